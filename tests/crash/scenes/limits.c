/* Limits: pin counts, lists of several chunks, quotas with a choice, chains with pinned pages. */
#include "scenes.h"

/* Our count of one page of run 1 stands at its limit: the call that comes to it lets go of all that
 * it has pinned. */
static void count_to_limit(actor *v, uint32_t page) {
    lc_store(lci_pin(v->h, v->at->slot, page), UINT16_MAX);
    atomic_fetch_or(&v->h->pages[page].pins, UINT64_C(1) << v->at->slot);
}
static void fifth_at_limit(actor *v) {
    hold_match(v, &v->held, 1, 5, SCENE_NS);
    count_to_limit(v, (uint32_t)v->held.pages[4]);
}
static void match_limit(actor *v) {
    hold l = {0};
    run_keys(l.keys, 1, 16);
    NEED(lci_match1(v->h, l.keys, 16, SCENE_NS, &l.lease) == LC_E_PINS);
}
static void match_batch_limit(actor *v) {
    static const int64_t offsets[] = {0, 16, 32};
    int32_t counts[2];
    hold l = {0};
    run_keys(l.keys, 0, 16);
    run_keys(l.keys + 16, 1, 16);
    NEED(lci_match(v->h, l.keys, offsets, 2, SCENE_NS, &l.lease, counts) == LC_E_PINS);
}
static void reserve_limit(actor *v) {
    run *r = &v->writing;
    run_keys(r->keys, 1, 20);
    r->n = 20;
    r->op = (lci_reserve_op){.shards = 1, .ns = SCENE_NS};
    NEED(lci_reserve(v->h, &r->op, r->keys, 20, 0, r->page, r->status, LC_BLOCK, FOREVER) ==
         LC_E_PINS);
    run_unpin(v, r);
}
SCENE(match_limit, .pages = 48, .set = two_runs, .prepare = fifth_at_limit, .act = match_limit)
SCENE(match_batch_limit, .pages = 48, .set = two_runs, .prepare = fifth_at_limit,
      .act = match_batch_limit)
SCENE(reserve_limit, .pages = 48, .set = two_runs, .prepare = fifth_at_limit, .act = reserve_limit)

/* A shard is taken over and given back again in the same step, because of one count. */
static void writing_given(stage *s) {
    two_runs(s);
    actor *o = stage_other(s, 0);
    run *r = &o->writing;
    run_reserve(o, r, 2, 6, 2, SCENE_NS);
    run_publish(o, r, 0);
    NEED(lci_ticket_give(o->h, r->fresh, r->made, r->op.rid, r->op.gen, ~UINT64_C(0), FOREVER,
                         &s->notes->ticket, LC_BLOCK, FOREVER) == LC_OK);
}
static void last_given_at_limit(actor *v) {
    const lci_ticket *k = &v->h->tickets[v->notes->ticket.index];
    count_to_limit(v, lc_load(&v->h->chunks[lc_load(&k->pages.first)].page[5]));
}
static void adopt_limit(actor *v) {
    uint32_t held = 0, rid, gen;
    NEED(lci_adopt(v->h, &v->notes->ticket, 1, &held, v->held.pages, MAX_KEYS, &rid, &gen, LC_BLOCK,
                   FOREVER) == LC_E_PINS);
    NEED(held == 0);
}
SCENE(adopt_limit, .pages = 48, .set = writing_given, .prepare = last_given_at_limit,
      .act = adopt_limit)

/* Longer than one chunk of a list. */
static void long_run(stage *s) { run_fill(&s->survivor, 0, 16, SCENE_NS); }
static void reserve_long(actor *v) {
    run_reserve(v, &v->writing, 2, 70, 1, SCENE_NS);
    NEED(v->writing.made == 70);
}
static void publish_long(actor *v) {
    reserve_long(v);
    run_publish(v, &v->writing, 0);
    run_unpin(v, &v->writing);
}
static void give_long(actor *v) {
    lci_ticket_ref ref;
    run *r = &v->writing;
    NEED(lci_ticket_give(v->h, r->fresh, r->made, LC_NIL, 0, 2, FOREVER, &ref, LC_BLOCK, FOREVER) ==
         LC_OK);
}
static void abandon_long(actor *v) { run_abandon(v, &v->writing); }
static void evict_one(actor *v) { NEED(deed_evict(v, 1) == 1); }
SCENE(reserve_long, .pages = 96, .set = long_run, .act = reserve_long)
SCENE(abandon_long, .pages = 96, .set = long_run, .prepare = reserve_long, .act = abandon_long)
SCENE(collect_long, .pages = 96, .set = long_run, .prepare = publish_long, .act = evict_one,
      .taken = 1)
SCENE(give_long, .pages = 96, .set = long_run, .prepare = reserve_long, .act = give_long)

/* Seven pages of a tenant may go and two have to: the two used longest ago, though younger ones
 * come first. */
static void leaves_of_a_space(stage *s) {
    actor *a = &s->survivor;
    hold l;
    two_runs(s);
    NEED(lci_namespace_open(a->h, "w", "t", 7, &s->notes->ns, LC_BLOCK, FOREVER) == LC_OK);
    for (uint32_t i = 0; i < 7; i++) run_fill(a, 10 + i, 1, s->notes->ns);
    for (uint32_t i = 0; i < 3; i++) {
        hold_match(a, &l, 12 - i, 1, s->notes->ns);
        hold_release(a, &l);
    }
}
static void reserve_two(actor *v) {
    run_reserve(v, &v->writing, 4, 2, 1, v->notes->ns);
    NEED(v->writing.made == 2);
}
SCENE(reserve_quota_choice, .pages = 48, .set = leaves_of_a_space, .act = reserve_two, .taken = 2)

/* All of a tenant's pages are pinned: as many more as its quota lets in. */
static void space_pinned(stage *s) {
    actor *a = &s->survivor, *o = stage_other(s, 0);
    two_runs(s);
    NEED(lci_namespace_open(a->h, "w", "t", 7, &s->notes->ns, LC_BLOCK, FOREVER) == LC_OK);
    run_fill(a, 3, 5, s->notes->ns);
    hold_match(o, &o->held, 3, 5, s->notes->ns);
}
static void space_pinned_full(stage *s) {
    space_pinned(s);
    NEED(lci_namespace_open(s->survivor.h, "w", "t", 5, &s->notes->ns, LC_BLOCK, FOREVER) == LC_OK);
}
static void reserve_four(actor *v, uint32_t made) {
    run_reserve(v, &v->writing, 4, 4, 1, v->notes->ns);
    NEED(v->writing.made == made && v->writing.op.reason == LCI_WHY_QUOTA);
}
static void reserve_two_of_four(actor *v) { reserve_four(v, 2); }
static void reserve_none_of_four(actor *v) { reserve_four(v, 0); }
SCENE(reserve_quota_pinned, .pages = 48, .set = space_pinned, .act = reserve_two_of_four)
SCENE(reserve_quota_full, .pages = 48, .set = space_pinned_full, .act = reserve_none_of_four)

/* A chain at its bound, its first pages pinned; all of them pinned. */
static void crowd(stage *s) {
    run_fill(&s->survivor, CROWDED, LC_CHAIN_MAX / 2, SCENE_NS);
    run_fill(&s->survivor, CROWDED + 1, LC_CHAIN_MAX / 2, SCENE_NS);
    actor *o = stage_other(s, 0);
    hold_match(o, &o->held, CROWDED + 1, LC_CHAIN_MAX / 2, SCENE_NS);
}
static void crowd_pinned(stage *s) {
    crowd(s);
    actor *p = stage_other(s, 0);
    hold_match(p, &p->held, CROWDED, LC_CHAIN_MAX / 2, SCENE_NS);
}
static void reserve_crowded(actor *v) {
    run_reserve(v, &v->writing, CROWDED + 2, 1, 1, SCENE_NS);
    NEED(v->writing.made == 1);
}
/* The first key finds no room; those behind it are there, and stay pinned. */
static void reserve_crowded_out(actor *v) {
    run *r = &v->writing;
    run_keys(r->keys, CROWDED, 6);
    r->keys[0] = scene_key(CROWDED + 2, 0);
    r->n = 6;
    r->op = (lci_reserve_op){.shards = 1, .ns = SCENE_NS};
    NEED(lci_reserve(v->h, &r->op, r->keys, 6, 0, r->page, r->status, LC_BLOCK, FOREVER) == 0);
    NEED(r->op.reason == LCI_WHY_CHAIN && r->status[5] == LCI_PRESENT);
}
SCENE(reserve_chain_held, .pages = 48, .set = crowd, .act = reserve_crowded, .taken = 1)
SCENE(reserve_chain_pinned, .pages = 48, .set = crowd_pinned, .act = reserve_crowded_out)

/* The clock stands far ahead of the queue's present, which has to turn over several levels; pages
 * of the same level fall down from it to different lists. */
static void ages(stage *s) {
    actor *a = &s->survivor;
    _Atomic uint64_t *clock = &a->h->root->clock;
    run_fill(a, 0, 4, SCENE_NS);
    lc_store(clock, 62);
    for (uint32_t i = 0; i < 4; i++) run_fill(a, 10 + i, 1, SCENE_NS);
    lc_store(clock, UINT64_C(5) << 12 | 17);
    for (uint32_t i = 0; i < 3; i++) run_fill(a, 20 + i, 1, SCENE_NS);
    lc_store(clock, (UINT64_C(5) << 12) + 200);
    run_fill(a, 23, 2, SCENE_NS);
    lc_store(clock, UINT64_C(3) << 33);
    for (uint32_t i = 0; i < 3; i++) run_fill(a, 30 + i, 1, SCENE_NS);
    lc_store(clock, UINT64_C(1) << 47);
    run_fill(a, 40, 2, SCENE_NS);
}
static void evict_all(actor *v) { NEED(deed_evict(v, (uint32_t)v->pages) == 18); }
SCENE(evict_ages, .pages = 48, .set = ages, .act = evict_all, .taken = 18)

/* Nothing can be evicted, and of the doomed pages those that come first are pinned. */
static void doomed_behind_pinned(stage *s) {
    static hold all;
    actor *a = &s->survivor, *o = stage_other(s, 0);
    two_runs(s);
    NEED(lci_namespace_open(a->h, "w", "t", 0, &s->notes->ns, LC_BLOCK, FOREVER) == LC_OK);
    run_fill(a, 3, 12, s->notes->ns);
    hold_match(o, &o->held, 3, 8, s->notes->ns);
    hold_match(a, &all, 3, 12, s->notes->ns);
    deed_clear(a, s->notes->ns);
    hold_release(a, &all);
    for (uint32_t i = 0; i < 2; i++) {
        actor *p = stage_other(s, 0);
        hold_match(p, &p->held, i, 16, SCENE_NS);
    }
}
static void reserve_eight(actor *v) {
    run_reserve(v, &v->writing, 4, 8, 1, SCENE_NS);
    NEED(v->writing.made == 8);
}
SCENE(reserve_doomed, .pages = 48, .set = doomed_behind_pinned, .act = reserve_eight)
