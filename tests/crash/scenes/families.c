/* Who hangs on whom: pages that lost their parents, keys that stand twice or belong to others,
 * reserving from the middle of a prefix, and memory that has to be had first. */
#include "scenes.h"

/* Page 8 of run 0 was made ready on top of pages that were given up after that. */
static void orphan(stage *s) {
    static run above;
    actor *a = &s->survivor;
    run_fill(a, 1, 16, SCENE_NS);
    actor *o = stage_other(s, 0);
    run_reserve(o, &o->writing, 0, 8, 1, SCENE_NS);
    run_reserve(a, &above, 0, 9, 1, SCENE_NS);
    NEED(above.made == 1);
    run_publish(a, &above, 0);
    run_unpin(a, &above);
    run_unpin(o, &o->writing);
    run_abandon(o, &o->writing);
    o->writing = (run){0};
}
static void orphan_of_ready(stage *s) {
    orphan(s);
    run_fill(&s->survivor, 0, 8, SCENE_NS);
}
static void reserve_nine(actor *v) { run_reserve(v, &v->writing, 0, 9, 1, SCENE_NS); }
SCENE(adopt_orphan, .pages = 48, .set = orphan, .act = reserve_nine)
SCENE(adopt_orphan_ready, .pages = 48, .set = orphan_of_ready, .act = reserve_nine)

/* What hangs on a page that is given up, and the page that it hung on: one ready and a leaf again. */
static void tail(actor *v) {
    run_reserve(v, &v->writing, 1, 20, 1, SCENE_NS);
    NEED(v->writing.made == 4);
    run_unpin(v, &v->writing);
}
SCENE(abandon_tail, .pages = 48, .set = two_runs, .prepare = tail, .act = act_abandon)

static void reserve_twins(actor *v) {
    run *r = &v->writing;
    run_keys(r->keys, 2, 6);
    r->keys[5] = r->keys[2];
    r->n = 6;
    r->op = (lci_reserve_op){.shards = 1, .ns = SCENE_NS};
    NEED(lci_reserve(v->h, &r->op, r->keys, 6, 0, r->page, r->status, LC_BLOCK, FOREVER) == 5);
    NEED(r->status[5] == LCI_BUSY_KEY);
}
SCENE(reserve_twins, .pages = 48, .set = two_runs, .act = reserve_twins)

static void other_space(stage *s) {
    two_runs(s);
    NEED(lci_namespace_open(s->survivor.h, "w", "t", 0, &s->notes->ns, LC_BLOCK, FOREVER) == LC_OK);
}
static void reserve_of_others(actor *v) {
    run_reserve(v, &v->writing, 1, 16, 1, v->notes->ns);
    NEED(v->writing.made == 0 && v->writing.op.reason == LCI_WHY_CHAIN);
}
SCENE(reserve_of_others, .pages = 48, .set = other_space, .act = reserve_of_others)

/* The caller has matched twelve pages before, one of which is not there any more. */
static void reserve_behind(actor *v) {
    run *r = &v->writing;
    run_keys(r->keys, 1, 20);
    r->keys[3] = scene_key(7, 0);
    r->n = 20;
    r->op = (lci_reserve_op){.shards = 1, .ns = SCENE_NS};
    NEED(lci_reserve(v->h, &r->op, r->keys, 20, 12, r->page, r->status, LC_BLOCK, FOREVER) == 4);
    r->n = 0; /* `page` and `status` begin at the twelfth key */
    NEED(lci_unreserve(v->h, &r->op, r->page, r->status, 8) == LC_OK);
}
SCENE(reserve_behind, .pages = 48, .set = two_runs, .act = reserve_behind)

/* The rest of a prompt, given by itself: on a page that another is writing, on one that is not there, and on
 * one that a dead client was writing. */
static void head_written(stage *s) {
    two_runs(s);
    actor *o = stage_other(s, 0);
    run_reserve(o, &o->writing, 2, 4, 1, SCENE_NS);
}
static int reserve_rest(actor *v, uint32_t from) {
    run *r = &v->writing;
    run_keys(r->keys, 2, 10);
    memmove(r->keys, r->keys + from, (10 - from) * sizeof *r->keys);
    r->n = 10 - from;
    r->op = (lci_reserve_op){.shards = 1, .ns = SCENE_NS, .linked = 1};
    int made = lci_reserve(v->h, &r->op, r->keys, r->n, 1, r->page, r->status, LC_BLOCK, FOREVER);
    NEED(lci_unreserve(v->h, &r->op, r->page, r->status, r->n - 1) == LC_OK);
    r->n = 0; /* `page` and `status` begin at the second key */
    return made;
}
static void reserve_piece(actor *v) { NEED(reserve_rest(v, 3) == 6); }
static void reserve_headless(actor *v) {
    NEED(reserve_rest(v, 5) == 0 && v->writing.op.reason == LCI_WHY_HEAD);
}
SCENE(reserve_piece, .pages = 48, .set = head_written, .act = reserve_piece)
SCENE(reserve_headless, .pages = 48, .set = head_written, .act = reserve_headless)

static void head_kept(stage *s) {
    two_runs(s);
    run_fill(&s->survivor, 2, 4, SCENE_NS);
    run_fill(&s->survivor, 3, 8, SCENE_NS);
}
static void touch_and_evict(actor *v) {
    lc_key head = scene_key(2, 3);
    NEED(reserve_rest(v, 3) == 6); /* room comes from run 0 */
    NEED(lci_touch_key(v->h, &head, SCENE_NS) == 1);
}
SCENE(reserve_piece_evicting, .pages = 40, .set = head_kept, .act = touch_and_evict, .taken = 2)

/* The rest was used and its head was not: the other run goes first, and then both of them. */
static void rest_used(actor *v) {
    hold l = {0};
    run_keys(l.keys, 0, 16);
    NEED(lci_match1(v->h, l.keys + 12, 4, SCENE_NS, &l.lease) == 4);
    NEED(lci_release(v->h, &l.lease) == LC_OK);
}
static void evict_both(actor *v) { NEED(deed_evict(v, 26) == 26); }
SCENE(evict_used_rest, .pages = 48, .set = two_runs, .prepare = rest_used, .act = evict_both, .taken = 26)

static void small_run(stage *s) { run_fill(&s->survivor, 0, 12, SCENE_NS); }
static void reserve_growing(actor *v) {
    run *r = &v->writing;
    run_keys(r->keys, 2, 6);
    r->n = 6;
    r->op = (lci_reserve_op){.shards = 1, .ns = SCENE_NS};
    for (int made = LC_E_GROW; made == LC_E_GROW;) {
        made = lci_reserve(v->h, &r->op, r->keys, 6, 0, r->page, r->status, LC_BLOCK, FOREVER);
        NEED(made == LC_E_GROW || made == 6);
        if (made == LC_E_GROW) NEED(lci_grow(v->h, 32, LC_BLOCK, FOREVER) == LC_OK);
    }
}
SCENE(reserve_growing, .pages = 48, .grown = 16, .set = small_run, .act = reserve_growing)
