/* Pages without a key: allocating, naming, unnaming, freeing, and what their client leaves. */
#include "scenes.h"

typedef struct keeping { /* of one actor at a time: the victim, or the first other */
    int32_t pages[MAX_KEYS], out[MAX_KEYS];
    uint32_t gens[MAX_KEYS];
    uint8_t status[MAX_KEYS];
    lci_held_op op;
} keeping;
static keeping kept;

static bool again(int rc) { return rc == LC_E_INTR; }

static void allocate(actor *a, uint32_t n, int expected) {
    int rc;
    kept.op = (lci_held_op){.done = 0};
    do rc = lci_allocate(a->h, &kept.op, kept.pages, kept.gens, n, LC_BLOCK, FOREVER);
    while (again(rc));
    NEED(rc == expected);
}

static void give_back(actor *a, uint32_t n, const uint32_t *gens) {
    int rc;
    kept.op = (lci_held_op){.done = 0};
    do rc = lci_free_held(a->h, &kept.op, kept.pages, gens, n, LC_BLOCK, FOREVER);
    while (again(rc));
    NEED(rc == LC_OK);
}

/* Content first: all of it, for it is ready from the instant of its naming. */
static void name_in(actor *a, lci_ns_ref ns, uint32_t number, uint32_t start, uint32_t n,
                    uint32_t flags) {
    lc_key keys[MAX_KEYS];
    int64_t offsets[2] = {0, n}, starts[1] = {start};
    int rc;
    run_keys(keys, number, n);
    for (uint32_t i = start; i < n; i++)
        for (uint32_t w = 0; w < STAMP_WORDS; w++)
            a->stamps[(uint32_t)kept.pages[i - start] * STAMP_WORDS + w] =
                stamp_of(keys[i].lo, keys[i].hi, w);
    kept.op = (lci_held_op){.ns = ns, .flags = flags};
    do {
        rc = lci_name(a->h, &kept.op, keys, offsets, starts, 1, kept.pages, n - start, kept.out,
                      kept.status, LC_BLOCK, FOREVER);
    } while (again(rc));
    NEED(rc == LC_OK);
}

static void name(actor *a, uint32_t number, uint32_t start, uint32_t n, uint32_t flags) {
    name_in(a, SCENE_NS, number, start, n, flags);
}

static void unname(actor *a, uint32_t n, int expected) {
    int rc;
    kept.op = (lci_held_op){.done = 0};
    do rc = lci_unname(a->h, &kept.op, kept.pages, n, LC_BLOCK, FOREVER);
    while (again(rc));
    NEED(rc == expected);
}

/* ------------------------------------------------------------------ taking and giving back */

static void full(stage *s) {
    run_fill(&s->survivor, 0, (uint32_t)s->pages / 2 - 8, SCENE_NS);
    run_fill(&s->survivor, 1, (uint32_t)s->pages / 2 + 8, SCENE_NS);
}
static void six(actor *v) { allocate(v, 6, LC_OK); }
SCENE(hold, .pages = 48, .set = two_runs, .act = six)
SCENE(hold_evicting, .pages = 48, .set = full, .act = six, .taken = 6)
SCENE(hold_of_device, .pages = 48, .set = two_runs, .act = six, .flags = LCS_FLAG_DEVICE)

/* More than one step; and more than can be had, which is known when the first step is taken. */
static void one_run(stage *s) { run_fill(&s->survivor, 0, 8, SCENE_NS); }
static void forty(actor *v) { allocate(v, 40, LC_OK); }
static void most_pinned(stage *s) {
    one_run(s);
    actor *o = stage_other(s, 0);
    hold_match(o, &o->held, 0, 8, SCENE_NS);
}
static void too_many(actor *v) { allocate(v, 41, LC_E_FULL); }
SCENE(hold_forty, .pages = 48, .set = one_run, .act = forty)
SCENE(hold_too_many, .pages = 48, .set = most_pinned, .act = too_many)

static void growing(actor *v) {
    int rc;
    kept.op = (lci_held_op){.done = 0};
    do {
        rc = lci_allocate(v->h, &kept.op, kept.pages, kept.gens, 12, LC_BLOCK, FOREVER);
        if (rc == LC_E_GROW) NEED(lci_grow(v->h, 32, LC_BLOCK, FOREVER) == LC_OK);
    } while (again(rc) || rc == LC_E_GROW);
    NEED(rc == LC_OK);
}
SCENE(hold_growing, .pages = 48, .grown = 16, .set = one_run, .act = growing)

static void free_six(actor *v) { give_back(v, 6, NULL); }
static void free_forty(actor *v) { give_back(v, 40, kept.gens); }
SCENE(let_go, .pages = 48, .set = two_runs, .prepare = six, .act = free_six)
SCENE(let_go_forty, .pages = 48, .set = one_run, .prepare = forty, .act = free_forty)

/* Others read them: they are doomed. */
static void given(actor *v) {
    six(v);
    NEED(lci_ticket_give(v->h, kept.pages, 6, LC_NIL, 0, ~UINT64_C(0), FOREVER, &v->notes->ticket,
                         LC_BLOCK, FOREVER) == LC_OK);
}
static void other_adopts(stage *s) {
    actor *o = &s->other[0];
    uint32_t held, rid, gen;
    int32_t pages[MAX_KEYS];
    NEED(lci_adopt(o->h, &s->notes->ticket, 0, &held, pages, MAX_KEYS, &rid, &gen, LC_BLOCK,
                   FOREVER) == 6);
    lci_lease *l = &o->held.lease;
    l->held = 0; /* it has no keys that could be looked at: it dies in the end */
    o->stopped = true;
}
static void one_other(stage *s) {
    two_runs(s);
    stage_other(s, 0);
}
SCENE(let_go_given, .pages = 48, .set = one_other, .prepare = given, .ready = other_adopts,
      .act = free_six)

/* ------------------------------------------------------------------ names */

static void name_six(actor *v) { name(v, 2, 0, 6, 0); }
SCENE(name, .pages = 48, .set = two_runs, .prepare = six, .act = name_six, .made = 6)

/* Behind a prefix that is there: its last page is a leaf no more. */
static void name_behind(actor *v) { name(v, 1, 16, 22, 0); }
SCENE(name_behind, .pages = 48, .set = two_runs, .prepare = six, .act = name_behind, .made = 6)
static void name_free(actor *v) { name(v, 1, 16, 22, LCI_NAME_INDEPENDENT); }
SCENE(name_independent, .pages = 48, .set = two_paths, .prepare = six, .act = name_free, .made = 6)

/* Behind a page of the other kind: it stays a leaf, and the first of ours has no parent. */
SCENE(name_mixed, .pages = 48, .set = two_runs, .prepare = six, .act = name_free, .made = 6)
SCENE(name_behind_independent, .pages = 48, .set = two_paths, .prepare = six, .act = name_behind,
      .made = 6)

/* Four are there: pinned; and ours of these are free, or stay. */
static void ten(actor *v) { allocate(v, 10, LC_OK); }
static void merge(actor *v) { name(v, 0, 12, 22, LCI_NAME_MERGE); }
static void keep(actor *v) { name(v, 0, 12, 22, 0); }
SCENE(name_merging, .pages = 64, .set = two_runs, .prepare = ten, .act = merge, .made = 0)
SCENE(name_keeping, .pages = 48, .set = two_runs, .prepare = ten, .act = keep, .made = 6)

/* More than one step, of which the first finds all keys there. */
static void most_there(stage *s) { run_fill(&s->survivor, 0, 32, SCENE_NS); }
static void name_forty(actor *v) { name(v, 0, 0, 40, LCI_NAME_MERGE); }
SCENE(name_forty, .pages = 80, .set = most_there, .prepare = forty, .act = name_forty, .made = 8)

/* A key that another client writes, behind which ours hang. */
static void other_writes(stage *s) {
    two_runs(s);
    actor *o = stage_other(s, 0);
    run_reserve(o, &o->writing, 2, 2, 1, SCENE_NS);
}
static void name_busy(actor *v) {
    name(v, 2, 0, 6, 0);
    NEED(kept.status[0] == LCI_BUSY_KEY && kept.status[2] == LCI_NEW);
}
SCENE(name_busy, .pages = 48, .set = other_writes, .prepare = six, .act = name_busy, .made = 4)

/* A namespace at its quota pays with its own. */
static void space_at_quota(stage *s) {
    two_runs(s);
    NEED(lci_namespace_open(s->survivor.h, "w", "t", 7, &s->notes->ns, LC_BLOCK, FOREVER) == LC_OK);
    run_fill(&s->survivor, 3, 7, s->notes->ns);
}
static void name_quota(actor *v) { name_in(v, v->notes->ns, 4, 0, 6, 0); }
SCENE(name_quota, .pages = 48, .set = space_at_quota, .prepare = six, .act = name_quota,
      .taken = 6, .made = 6)

static void named(actor *v) {
    six(v);
    name_six(v);
}
static void unpin_six(actor *v) {
    uint32_t refused;
    NEED(lci_unpin(v->h, kept.pages, 6, &refused) == LC_OK);
}
SCENE(unpin_named, .pages = 48, .set = two_runs, .prepare = named, .act = unpin_six)

/* The rest of what was taken: three have been named since. */
static void half_named(actor *v) {
    six(v);
    name(v, 2, 0, 3, 0);
}
static void free_rest(actor *v) { give_back(v, 6, kept.gens); }
SCENE(let_go_rest, .pages = 48, .set = two_runs, .prepare = half_named, .act = free_rest)
static void unname_six(actor *v) { unname(v, 6, LC_OK); }
SCENE(unname, .pages = 48, .set = two_runs, .prepare = named, .act = unname_six, .taken = 6)

static void named_and_kept(actor *v) {
    lc_key keys[6];
    lci_walk_op op = {0};
    named(v);
    run_keys(keys, 2, 6);
    NEED(lci_keep(v->h, keys, 6, SCENE_NS, 1, &op, LC_BLOCK, FOREVER) == LC_OK && op.pages == 6);
}
SCENE(unname_kept, .pages = 48, .set = two_runs, .prepare = named_and_kept, .act = unname_six,
      .taken = 6)

/* The end of a run of which the rest stays: a leaf again. */
static void named_behind(actor *v) {
    six(v);
    name_behind(v);
}
SCENE(unname_behind, .pages = 48, .set = two_runs, .prepare = named_behind, .act = unname_six,
      .taken = 6)
static void named_free(actor *v) {
    six(v);
    name_free(v);
}
SCENE(unname_independent, .pages = 48, .set = two_paths, .prepare = named_free, .act = unname_six,
      .taken = 6)

static void other_matches(stage *s) {
    actor *o = &s->other[0];
    hold_match(o, &o->held, 2, 6, SCENE_NS);
}
static void refused(actor *v) { unname(v, 6, LC_E_PINS); }
SCENE(unname_refused, .pages = 48, .set = one_other, .prepare = named, .ready = other_matches,
      .act = refused)

/* Named, and used again under another name. */
static void unnamed(actor *v) {
    named(v);
    unname_six(v);
}
static void name_again(actor *v) { name(v, 3, 0, 6, 0); }
SCENE(name_again, .pages = 48, .set = two_runs, .prepare = unnamed, .act = name_again, .made = 6)

/* ------------------------------------------------------------------ leaving and dying */

static void leave(actor *v) { NEED(lci_leave(v->h, LC_BLOCK, FOREVER) == LC_OK); }
SCENE(leave_holding, .pages = 48, .set = one_run, .prepare = forty, .act = leave)

static void holds_forty(stage *s) {
    one_run(s);
    actor *o = stage_other(s, 0);
    forty(o);
    stage_die(s, o);
}
static void holds_device(stage *s) {
    two_runs(s);
    actor *o = stage_other(s, LCS_FLAG_DEVICE);
    six(o);
    stage_die(s, o);
}
static void reap_first(actor *v) { deed_reap(v, v->notes->other[0]); }
static void reap_unjoined(actor *v) {
    v->h = lci_open(v->at, v->pages);
    NEED(v->h && lci_reap_unjoined(v->h, v->notes->other[0], LC_BLOCK, FOREVER) == 1);
}
/* What the dead one pins, and what another holds. */
static void reader_beside_holder(stage *s) {
    one_run(s);
    actor *o = stage_other(s, 0), *p = stage_other(s, 0);
    hold_match(o, &o->held, 0, 8, SCENE_NS);
    six(p);
    p->stopped = true;
    stage_die(s, o);
}
SCENE(reap_beside_holder, .pages = 48, .set = reader_beside_holder, .act = reap_first)
SCENE(reap_holding, .pages = 48, .set = holds_forty, .act = reap_first)
SCENE(reap_holding_device, .pages = 48, .set = holds_device, .act = reap_first)
SCENE(unjoined_holding, .pages = 48, .set = holds_forty, .act = reap_unjoined, .unjoined = true)

SCENE(repair_holding, .pages = 48, .set = two_runs, .prepare = six, .act = act_repair)
