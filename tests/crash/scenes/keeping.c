/* Keeping pages, letting branches go, listing the oldest and giving them up, minimums. */
#include "scenes.h"

#define AGAIN(call)                                                       \
    do {                                                                  \
        int rc_;                                                          \
        while ((rc_ = (call)) == LC_E_INTR || rc_ == LC_E_BUSY) continue; \
        NEED(rc_ >= 0);                                                   \
    } while (0)

static uint32_t keep(actor *a, uint32_t number, uint32_t n, int kept, lci_ns_ref ns) {
    lci_walk_op op = {0};
    lc_key keys[MAX_KEYS];
    run_keys(keys, number, n);
    AGAIN(lci_keep(a->h, keys, n, ns, kept, &op, LC_BLOCK, FOREVER));
    return kept ? op.cursor : op.pages;
}

static void keep_both(actor *v) {
    NEED(keep(v, 0, 20, 1, SCENE_NS) == 16);
    NEED(keep(v, 1, 16, 1, SCENE_NS) == 16);
}
SCENE(keep, .pages = 48, .set = two_runs, .act = keep_both)

static void two_kept(stage *s) {
    two_runs(s);
    keep_both(&s->survivor);
}
static void unkeep_both(actor *v) {
    NEED(keep(v, 0, 16, 0, SCENE_NS) == 16);
    NEED(keep(v, 1, 16, 0, SCENE_NS) == 16);
}
SCENE(unkeep, .pages = 48, .set = two_kept, .act = unkeep_both)

/* Kept while their reservation waits to be collected, and then collected. */
static void publish_six(actor *v) {
    run_reserve(v, &v->writing, 2, 6, 1, SCENE_NS);
    run_publish(v, &v->writing, 0);
}
static void keep_six(actor *v) { NEED(keep(v, 2, 6, 1, SCENE_NS) == 6); }
static void publish_and_keep_six(actor *v) {
    publish_six(v);
    keep_six(v);
    run_unpin(v, &v->writing);
}
SCENE(keep_published, .pages = 48, .set = two_runs, .prepare = publish_six, .act = keep_six)
SCENE(collect_kept, .pages = 48, .set = two_runs, .prepare = publish_and_keep_six,
      .act = act_evict_all, .taken = 32)

static void clear(actor *v) { deed_clear(v, SCENE_NS); }
SCENE(clear_kept, .pages = 48, .set = two_kept, .act = clear, .taken = 32)

/* Half of it is kept before, and the end is being written; nothing of the other run is. */
static void half_kept(stage *s) {
    actor *a = &s->survivor, *o = stage_other(s, 0);
    two_runs(s);
    NEED(keep(a, 0, 8, 1, SCENE_NS) == 8);
    run_reserve(o, &o->writing, 0, 18, 1, SCENE_NS);
}
static void keep_rest(actor *v) {
    NEED(keep(v, 0, 18, 1, SCENE_NS) == 16);
    NEED(keep(v, 1, 16, 0, SCENE_NS) == 0);
}
SCENE(keep_rest, .pages = 48, .set = half_kept, .act = keep_rest)

/* Kept pages that others hang on, and that hang on others. */
static void two_paths_kept(stage *s) {
    two_paths(s);
    keep_both(&s->survivor);
}
SCENE(keep_independent, .pages = 48, .set = two_paths, .act = keep_both)
SCENE(unkeep_independent, .pages = 48, .set = two_paths_kept, .act = unkeep_both)

SCENE(repair_kept, .pages = 48, .set = two_kept, .act = act_repair)
static void paths_without_roots(stage *s) {
    two_paths(s);
    deed_evict(&s->survivor, 3);
}
SCENE(repair_independent, .pages = 48, .set = paths_without_roots, .act = act_repair)

/* Both kinds, some being written, some published and not collected, some kept. */
static void kinds_in_use(stage *s) {
    actor *o = stage_other(s, 0), *p = stage_other(s, 0);
    both_kinds(s);
    NEED(keep(&s->survivor, 0, 18, 1, SCENE_NS) == 18);
    run_behind(o, &o->writing, 1, 20, 23);
    run_behind(p, &p->writing, 2, 0, 3);
    run_publish(p, &p->writing, 0);
}
SCENE(repair_mixed, .pages = 48, .set = kinds_in_use, .act = act_repair)
static void keep_ends(actor *v) {
    NEED(keep(v, 0, 20, 1, SCENE_NS) == 20);
    NEED(keep(v, 1, 20, 1, SCENE_NS) == 20);
}
static void kinds_kept(stage *s) {
    both_kinds(s);
    keep_ends(&s->survivor);
}
static void unkeep_ends(actor *v) {
    NEED(keep(v, 0, 20, 0, SCENE_NS) == 20);
    NEED(keep(v, 1, 20, 0, SCENE_NS) == 20);
}
SCENE(keep_mixed, .pages = 48, .set = both_kinds, .act = keep_ends)
SCENE(unkeep_mixed, .pages = 48, .set = kinds_kept, .act = unkeep_ends)

/* ------------------------------------------------------------------ going first */

static uint32_t first(actor *a, uint32_t number, uint32_t n) {
    lci_walk_op op = {0};
    lc_key keys[MAX_KEYS];
    run_keys(keys, number, n);
    AGAIN(lci_evict_first(a->h, keys, n, SCENE_NS, &op, LC_BLOCK, FOREVER));
    return op.pages;
}
/* The second run waits to be collected, the first stands in the queue. */
static void first_both(actor *v) {
    NEED(first(v, 1, 20) == 16);
    NEED(first(v, 0, 16) == 16);
}
SCENE(evict_first, .pages = 48, .set = two_runs, .act = first_both)
SCENE(evict_first_independent, .pages = 48, .set = two_paths, .act = first_both)

/* What was told to stands in the queue, and goes; a page that is used meanwhile stays. */
static void told_to_go_first(stage *s) {
    two_paths(s);
    first_both(&s->survivor);
}
static void evict_ten(actor *v) { NEED(deed_evict(v, 10) == 10); }
SCENE(evict_what_goes_first, .pages = 48, .set = told_to_go_first, .act = evict_ten, .taken = 10)
static bool match_one(stage *s) {
    hold l;
    hold_match(&s->other[0], &l, 1, 14, SCENE_NS);
    hold_release(&s->other[0], &l);
    return true;
}
static void path_and_other(stage *s) {
    two_paths(s);
    stage_other(s, 0)->stopped = true;
}
static void first_some(actor *v) { first(v, 1, 16); }

/* Nine pages of a run are pinned by another client, of the other eight are kept and four go first. */
static void few_may_go(stage *s) {
    actor *o = stage_other(s, 0);
    two_runs(s);
    hold_match(o, &o->held, 1, 9, SCENE_NS);
    NEED(keep(&s->survivor, 0, 8, 1, SCENE_NS) == 8);
    NEED(first(&s->survivor, 0, 12) == 4);
}
static void first_few(actor *v) {
    NEED(first(v, 1, 16) == 7);
    NEED(first(v, 0, 16) == 4);
}
SCENE(evict_first_few, .pages = 48, .set = few_may_go, .act = first_few)
SCENE(evict_first_raced, .pages = 48, .set = path_and_other, .act = first_some,
      .meanwhile = match_one)

/* ------------------------------------------------------------------ letting go */

static uint32_t drop(actor *a, uint32_t number, uint32_t n, uint32_t start) {
    lci_walk_op op = {0};
    lc_key keys[MAX_KEYS];
    run_keys(keys, number, n);
    AGAIN(lci_drop(a->h, keys, n, start, SCENE_NS, &op, LC_BLOCK, FOREVER));
    return op.pages;
}
static void drop_twelve(actor *v) { NEED(drop(v, 1, 20, 4) == 12); }
static void drop_some(actor *v) { drop(v, 1, 16, 0); }
static void drop_published(actor *v) { NEED(drop(v, 2, 40, 0) == 40); }
static void publish_forty(actor *v) {
    run_reserve(v, &v->writing, 2, 40, 1, SCENE_NS);
    run_publish(v, &v->writing, 0);
    run_unpin(v, &v->writing);
}
SCENE(drop, .pages = 48, .set = two_runs, .act = drop_twelve, .taken = 12)
SCENE(drop_published, .pages = 48, .prepare = publish_forty, .act = drop_published, .taken = 40)

/* Up to a page that somebody pins. */
static void middle_pinned(stage *s) {
    actor *o = stage_other(s, 0);
    two_runs(s);
    hold_match(o, &o->held, 1, 9, SCENE_NS);
}
static void drop_seven(actor *v) { NEED(drop(v, 1, 16, 0) == 7); }
SCENE(drop_pinned, .pages = 48, .set = middle_pinned, .act = drop_seven, .taken = 7)

/* Another client's match counts its pin when a page is marked: the end of the branch, and so all of
 * it stays. */
SCENE(drop_raced, .pages = 48, .set = two_runs_met, .act = drop_some, .meanwhile = pin_marked)

/* What hangs on an independent page stays. */
static void drop_all_of_one(actor *v) { NEED(drop(v, 1, 20, 0) == 20); }
SCENE(drop_mixed, .pages = 48, .set = both_kinds, .act = drop_all_of_one, .taken = 20)
SCENE(drop_independent, .pages = 48, .set = two_paths, .act = drop_twelve, .taken = 12)
static void drop_six(actor *v) { NEED(drop(v, 1, 10, 4) == 6); }
SCENE(drop_middle_independent, .pages = 48, .set = two_paths, .act = drop_six, .taken = 6)

/* ------------------------------------------------------------------ the oldest */

static void oldest(actor *v, uint32_t want, uint32_t keep_order) {
    lci_oldest_op op = {.want = want, .keep_order = keep_order};
    uint32_t parents[MAX_KEYS];
    memset(&v->held, 0, sizeof v->held);
    AGAIN(lci_oldest(v->h, &op, &v->held.lease, v->held.keys, parents, LC_BLOCK, FOREVER));
    NEED(v->held.lease.held == want);
}
static void oldest_twenty(actor *v) { oldest(v, 20, 1); }
static void oldest_as_used(actor *v) { oldest(v, 20, 0); }
SCENE(oldest, .pages = 48, .set = two_runs, .act = oldest_twenty)
SCENE(oldest_as_used, .pages = 48, .set = two_runs, .act = oldest_as_used)

/* A trunk of eight with two branches, the end of a run pinned by another client, and more asked for
 * than there is: the trunk follows its second branch, which was reserved together with it. Where lists are
 * ranked it does not: it was hit then. */
static void branches(stage *s) {
    static run r;
    actor *a = &s->survivor, *o = stage_other(s, 0);
    two_runs(s);
    run_keys(r.keys, 0, 12);
    for (uint32_t i = 8; i < 12; i++) r.keys[i] = scene_key(9, i);
    r.n = 12;
    r.made = 0;
    r.op = (lci_reserve_op){.shards = 1, .ns = SCENE_NS};
    AGAIN(lci_reserve(a->h, &r.op, r.keys, 12, 0, r.page, r.status, LC_BLOCK, FOREVER));
    for (uint32_t i = 8; i < 12; i++) r.fresh[r.made++] = r.page[i];
    run_publish(a, &r, 0);
    run_unpin(a, &r);
    hold_match(o, &o->held, 1, 16, SCENE_NS);
}
static void oldest_all(actor *v) {
    lci_oldest_op op = {.want = 40, .keep_order = 1};
    uint32_t parents[MAX_KEYS];
    memset(&v->held, 0, sizeof v->held);
    AGAIN(lci_oldest(v->h, &op, &v->held.lease, v->held.keys, parents, LC_BLOCK, FOREVER));
    NEED(v->held.lease.held == (v->h->ranks ? 12 : 20));
}
SCENE(oldest_branches, .pages = 48, .set = branches, .act = oldest_all)

static int by_page(const void *a, const void *b, void *pages) {
    const int32_t *page = pages;
    return page[*(const uint32_t *)a] - page[*(const uint32_t *)b];
}
static uint32_t discard(actor *v) {
    lci_discard_op op = {0};
    hold *l = &v->held;
    uint32_t n = l->lease.held, order[MAX_KEYS], hits[MAX_KEYS];
    uint8_t done[MAX_KEYS] = {0};
    int32_t pages[MAX_KEYS];
    memcpy(pages, l->pages, n * sizeof *pages);
    memcpy(hits, l->pages + l->lease.capacity, n * sizeof *hits);
    for (uint32_t i = 0; i < n; i++) order[i] = i;
    qsort_r(order, n, sizeof *order, by_page, pages);
    AGAIN(lci_discard(v->h, &op, &l->lease, pages, hits, order, done, n, LC_BLOCK, FOREVER));
    return op.freed;
}
static void discard_twenty(actor *v) { NEED(discard(v) == 20); }
static void discard_all(actor *v) { NEED(discard(v) == (v->h->ranks ? 12 : 20)); }
static void discard_some(actor *v) { discard(v); }
SCENE(discard, .pages = 48, .set = two_runs, .prepare = oldest_twenty, .act = discard_twenty,
      .taken = 20)
SCENE(discard_raced, .pages = 48, .set = two_runs_met, .prepare = oldest_twenty,
      .act = discard_some, .meanwhile = pin_marked, .taken = 4)

/* Some of them have been matched by another client since. All are listed: which of the runs comes first
 * depends, where lists are ranked, on the time between them. */
static void oldest_thirty_two(actor *v) { oldest(v, 32, 1); }
static void matched(stage *s) {
    hold l;
    hold_match(&s->survivor, &l, 1, 14, SCENE_NS);
    hold_release(&s->survivor, &l);
}
SCENE(discard_matched, .pages = 48, .set = two_runs, .prepare = oldest_thirty_two, .ready = matched,
      .act = discard_some, .taken = 18)

SCENE(discard_branches, .pages = 48, .set = branches, .prepare = oldest_all,
      .act = discard_all, .taken = 20, .taken_ranked = 12)

SCENE(oldest_mixed, .pages = 48, .set = both_kinds, .act = oldest_twenty)
SCENE(discard_mixed, .pages = 48, .set = both_kinds, .prepare = oldest_twenty,
      .act = discard_twenty, .taken = 20)
SCENE(oldest_independent, .pages = 48, .set = two_paths, .act = oldest_twenty)
SCENE(discard_independent, .pages = 48, .set = two_paths, .prepare = oldest_twenty,
      .act = discard_twenty, .taken = 20)
SCENE(discard_raced_independent, .pages = 48, .set = two_paths_met,
      .prepare = oldest_twenty, .act = discard_some, .meanwhile = pin_marked, .taken = 19)

static void end_discard(actor *v) {
    lci_discard_op op = {.taken = 1};
    uint8_t done[MAX_KEYS] = {0, 1, 0, 1};
    hold *l = &v->held;
    NEED(lci_discard_end(v->h, &op, l->pages, done, l->lease.held) == LC_OK);
}
SCENE(discard_end, .pages = 48, .set = two_runs, .prepare = oldest_twenty, .act = end_discard)

/* ------------------------------------------------------------------ minimums */

static void promise(actor *v, uint32_t quota, uint32_t minimum) {
    lci_ns_limits limits = {.quota = quota, .minimum = minimum};
    AGAIN(lci_namespace_limits(v->h, "w", "t", &limits, &v->notes->ns, LC_BLOCK, FOREVER));
}
static void promised(stage *s) {
    two_runs(s);
    promise(&s->survivor, 0, 5);
    run_fill(&s->survivor, 3, 8, s->notes->ns);
}
static void promise_other(actor *v) { promise(v, 9, 7); }
SCENE(open_promised, .pages = 48, .set = two_runs, .act = promise_other)
SCENE(set_minimum, .pages = 48, .set = promised, .act = promise_other)
SCENE(evict_promised, .pages = 48, .set = promised, .act = act_evict_all, .taken = 35)
SCENE(oldest_promised, .pages = 48, .set = promised, .act = oldest_twenty)
/* Its own pages are no room for others, and room for itself. */
static void reserve_own(actor *v) {
    run_reserve(v, &v->writing, 4, 44, 1, v->notes->ns);
    NEED(v->writing.made == 44);
}
SCENE(reserve_promised, .pages = 48, .set = promised, .act = reserve_own, .taken = 36)
SCENE(clear_promised, .pages = 48, .set = promised, .act = act_clear, .taken = 8)
