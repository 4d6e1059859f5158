/* Eviction by ranked lists: pages that are parked and come back, an order that is installed. */
#include "scenes.h"

static void evict_five(actor *v) { NEED(deed_evict(v, 5) == 5); }
SCENE(evict_ranked, .pages = 48, .ranked = true, .set = two_runs, .act = evict_five, .taken = 5)
SCENE(evict_all_ranked, .pages = 48, .ranked = true, .set = two_paths, .act = act_evict_all, .taken = 32)
SCENE(evict_raced_ranked, .pages = 48, .ranked = true, .set = two_runs_met, .act = evict_five,
      .meanwhile = pin_marked, .taken = 5)

/* Eight pages of a path are pinned: each is met, and parked. */
static void eight_pinned(stage *s) {
    two_paths(s);
    actor *o = stage_other(s, 0);
    hold_match(o, &o->held, 0, 8, SCENE_NS);
}
SCENE(park, .pages = 48, .ranked = true, .set = eight_pinned, .act = act_evict_all, .taken = 24)

/* They are parked, half of them are pinned no more, and pages with other words have come. */
static void eight_parked(stage *s) {
    static hold half;
    actor *a = &s->survivor, *o = stage_other(s, 0);
    two_paths(s);
    hold_match(o, &half, 0, 8, SCENE_NS);
    hold_match(o, &o->held, 0, 4, SCENE_NS);
    NEED(deed_evict(a, 48) == 24);
    hold_release(o, &half);
    run_fill(a, 5, 12, SCENE_NS);
}
SCENE(unpark, .pages = 48, .ranked = true, .set = eight_parked, .act = act_evict_all, .taken = 16)

/* Listed and put back, from among pages that were parked. */
static void list_ten(actor *v) {
    lci_oldest_op op = {.want = 10, .keep_order = 1};
    uint32_t parents[MAX_KEYS];
    int rc;
    memset(&v->held, 0, sizeof v->held);
    do rc = lci_oldest(v->h, &op, &v->held.lease, v->held.keys, parents, LC_BLOCK, FOREVER);
    while (rc == LC_E_INTR || rc == LC_E_BUSY);
    NEED(rc == 10);
}
SCENE(oldest_ranked, .pages = 48, .ranked = true, .set = two_paths, .act = list_ten)
SCENE(oldest_parked, .pages = 48, .ranked = true, .set = eight_parked, .act = list_ten)

/* The order that is there, from its end. */
static void install(actor *v) {
    const lci_order *o = &v->h->ranks->order[lc_load(&v->h->ranks->chosen) & 1];
    uint16_t lists[LCH_LISTS];
    lc_txn t;
    for (uint32_t i = 0; i < LCH_LISTS; i++) lists[i] = lc_load(&o->list[LCH_LISTS - 1 - i]);
    NEED(lci_lock(v->h, &t, LCI_OP_EVICT, LC_BLOCK, FOREVER) == LC_OK);
    NEED(lci_install_order(v->h, &t, lists));
    NEED(lci_unlock(v->h, &t) == LC_OK);
}
SCENE(install_order, .pages = 48, .ranked = true, .set = two_paths, .act = install)

/* What was installed before a page goes by it; the table that another died over is written again. */
static void install_and_evict(actor *v) {
    install(v);
    evict_five(v);
}
SCENE(install_and_evict, .pages = 48, .ranked = true, .set = eight_parked, .act = install_and_evict,
      .taken = 5)

/* It is time to learn, of pages that were hit and of some that went. The unit of ages changes, and with it
 * all counts, of which there are so many that they are halved. */
static void due(stage *s) {
    hold held;
    actor *a = &s->survivor;
    lch_root *root = a->h->learnt.root;
    two_runs(s);
    hold_match(a, &held, 0, 8, SCENE_NS);
    hold_release(a, &held);
    NEED(deed_evict(a, 5) == 5);
    lc_store(&root->named, 1000);
    lc_store(&root->unit, 30);
    for (uint32_t i = 0; i < LCH_LISTS; i++) {
        lc_store(&root->hits[i], 60);
        lc_store(&root->losses[i], 60);
    }
}
static void write_five(actor *v) {
    run_reserve(v, &v->writing, 7, 5, 1, SCENE_NS);
    run_publish(v, &v->writing, 0);
}
SCENE(learn, .pages = 48, .ranked = true, .set = due, .act = write_five, .made = 5)

/* Pages that went come back, each with its history. */
static void some_went(stage *s) {
    two_runs(s);
    NEED(deed_evict(&s->survivor, 5) == 5);
}
static void write_again(actor *v) {
    run_reserve(v, &v->writing, 0, 16, 1, SCENE_NS);
    NEED(v->writing.made == 5);
    run_publish(v, &v->writing, 0);
}
SCENE(remembered, .pages = 48, .ranked = true, .set = some_went, .act = write_again, .made = 5)

/* The pages behind the first ones of a list were hit since they were queued: they move when their turn
 * comes. */
static void hit_since(stage *s) {
    actor *a = &s->survivor;
    hold held;
    lc_store(&a->h->learnt.root->unit, 20);
    two_paths(s);
    NEED(deed_evict(a, 1) == 1); /* queued by now */
    hold_match(a, &held, 1, 16, SCENE_NS);
    hold_release(a, &held);
}
static void evict_twenty(actor *v) { NEED(deed_evict(v, 20) == 20); }
SCENE(evict_hit_since, .pages = 48, .ranked = true, .set = hit_since, .act = evict_twenty, .taken = 20)

/* What is put to go first does, and before it what was put there by another. */
static void first(actor *a, uint32_t number, uint32_t n) {
    lc_key keys[MAX_KEYS];
    lci_walk_op op = {0};
    int rc;
    run_keys(keys, number, n);
    do rc = lci_evict_first(a->h, keys, n, SCENE_NS, &op, LC_BLOCK, FOREVER);
    while (rc == LC_E_INTR || rc == LC_E_BUSY);
    NEED(rc == LC_OK && op.pages == n);
}
static void two_first(stage *s) {
    two_paths(s);
    first(&s->survivor, 1, 2);
}
static void first_and_evict(actor *v) {
    first(v, 0, 3);
    evict_five(v);
}
SCENE(first_ranked, .pages = 48, .ranked = true, .set = two_first, .act = first_and_evict, .taken = 5)

SCENE(repair_ranked, .pages = 48, .ranked = true, .set = eight_parked, .act = act_repair)
