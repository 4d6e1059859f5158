/* Calls that take back from a dead client what they would lack, and calls that make do without more
 * memory: all of it in one call, each part of which may be its last. */
#include "scenes.h"

static int32_t pages[MAX_KEYS];
static uint32_t gens[MAX_KEYS];

static void allocate(actor *a, uint32_t n) {
    lci_held_op op = {.done = 0};
    int rc;
    do rc = lci_allocate(a->h, &op, pages, gens, n, LC_BLOCK, FOREVER);
    while (rc == LC_E_INTR);
    NEED(rc == LC_OK);
}

/* Of 48 pages 32 are ready; a dead client was writing 12. */
static void dead_writer(stage *s) {
    two_runs(s);
    actor *o = stage_other(s, 0);
    run_reserve(o, &o->writing, 2, 12, 1, SCENE_NS);
    stage_die(s, o);
}
static void dead_holder(stage *s) {
    two_runs(s);
    actor *o = stage_other(s, 0);
    allocate(o, 12);
    stage_die(s, o);
}
static void dead_reader(stage *s) {
    two_runs(s);
    actor *o = stage_other(s, 0);
    hold_match(o, &o->held, 1, 16, SCENE_NS);
    stage_die(s, o);
}
static void reserve_most(actor *v) {
    run_reserve(v, &v->writing, 3, 44, 1, SCENE_NS);
    NEED(v->writing.made == 44);
}
static void allocate_most(actor *v) { allocate(v, 40); }
/* One who may not block says that there is a dead client, and the next call looks at once. */
static void evict_two(actor *v) {
    uint32_t freed = 0;
    lc_store(&v->h->root->looking_ns, 0); /* it is our turn */
    NEED(lci_evict_pages(v->h, 2, &freed, LC_TRY, FOREVER) == LC_E_BUSY);
    NEED(freed == 0 && lc_load(&v->h->root->looking_ns) == 0);
    NEED(deed_evict(v, 2) == 2);
    NEED(lc_load(&v->h->root->reaped) == 1);
}
static void reserve_same(actor *v) {
    lc_store(&v->h->root->looking_ns, 0);
    run_reserve(v, &v->writing, 2, 12, 1, SCENE_NS);
    NEED(v->writing.made == 0 && lc_load(&v->h->root->reaped) == 1);
}
SCENE(look_reserving, .pages = 48, .set = dead_writer, .act = reserve_most, .taken = 32)
SCENE(look_reserving_pins, .pages = 48, .set = dead_reader, .act = reserve_most, .taken = 28)
SCENE(look_allocating, .pages = 48, .set = dead_holder, .act = allocate_most, .taken = 24)
SCENE(look_evicting, .pages = 48, .set = dead_writer, .act = evict_two, .taken = 2)
SCENE(look_busy, .pages = 48, .set = dead_writer, .act = reserve_same)

/* In quarantine, and its process lives on: nothing comes back, and the call makes do without. */
static void quarantined(stage *s) {
    two_runs(s);
    actor *o = stage_other(s, LCS_FLAG_DEVICE);
    run_reserve(o, &o->writing, 2, 12, 1, SCENE_NS);
    stage_die(s, o);
    deed_reap(&s->survivor, o->at->slot);
    NEED(lc_load(&lcs_client_of(s->survivor.at, o->at->slot)->state) == LCS_CLIENT_QUARANTINE);
}
static void reserve_fewer(actor *v) {
    run_reserve(v, &v->writing, 3, 44, 1, SCENE_NS);
    NEED(v->writing.made == 36);
}
SCENE(look_quarantined, .pages = 48, .set = quarantined, .act = reserve_fewer, .taken = 32)

/* Another takes the dead client back: it does not come to an end while the victim waits for it, or it
 * does; or between the victim's attempt and its look. Killed, the two die at one instant. */
static void two_reapers(stage *s) {
    dead_writer(s);
    actor *r = stage_other(s, 0);
    r->dies_too = true;
    NEED(lcs_slot_mend(r->at, s->notes->other[0]) == LC_OK);
}
static void reap_at_last(stage *s) {
    if (s->other[1].at->life_fd < 0) return; /* it has died with the victim */
    lcs_slot_mended(s->other[1].at, s->notes->other[0]);
    deed_reap(&s->other[1], s->notes->other[0]);
}
static bool reap_for_sleeper(stage *s) {
    if (!(lc_load(&s->survivor.h->root->event) & 1)) return false;
    reap_at_last(s);
    return true;
}
static bool reap_behind_attempt(stage *s) {
    const lcs_lock *lock = lcs_lock_of(s->survivor.at);
    if (lc_load(&s->survivor.h->root->writing) < 48 || lc_load(&lock->both) & LCS_LOCK_SLOT)
        return false;
    reap_at_last(s);
    return true;
}
static void reserve_as_can_be(actor *v) {
    run_reserve(v, &v->writing, 3, 44, 1, SCENE_NS);
    NEED(v->writing.made == 44 || v->writing.made == 36); /* 36: nobody has come to an end */
}
SCENE(look_waiting, .pages = 48, .set = two_reapers, .act = reserve_fewer, .taken = 32)
SCENE(look_woken, .pages = 48, .set = two_reapers, .act = reserve_as_can_be,
      .meanwhile = reap_for_sleeper, .taken = 32)
SCENE(look_overtaken, .pages = 48, .set = two_reapers, .act = reserve_as_can_be,
      .meanwhile = reap_behind_attempt, .taken = 32)

/* It gave half of its lease to a living client, who may adopt it still: an evicting call leaves it alone,
 * one that lacks pages does not. */
static void dead_giver(stage *s) {
    two_runs(s);
    actor *o = stage_other(s, 0), *p = stage_other(s, 0);
    hold_match(o, &o->held, 1, 16, SCENE_NS);
    NEED(lci_ticket_give(o->h, o->held.pages, 8, LC_NIL, 0, UINT64_C(1) << p->at->slot, FOREVER,
                         &s->notes->ticket, LC_BLOCK, FOREVER) == LC_OK);
    stage_die(s, o);
}
static void evict_beside_giver(actor *v) {
    lc_store(&v->h->root->looking_ns, 0);
    NEED(deed_evict(v, 2) == 2);
    NEED(lc_load(&v->h->root->reaped) == 0);
}
static void reserve_from_giver(actor *v) {
    run_reserve(v, &v->writing, 3, 40, 1, SCENE_NS);
    NEED(v->writing.made == 40);
}
SCENE(look_giver_spared, .pages = 48, .set = dead_giver, .act = evict_beside_giver, .taken = 2)
SCENE(look_giver, .pages = 48, .set = dead_giver, .act = reserve_from_giver, .taken = 24)

/* More than a portion, which is 12 pages in these builds: two reservations of 12, 16 pages without a key,
 * a lease. After so many portions the survivor leaves the rest to the victim; a kill in the middle of
 * one, or between two, leaves it to whoever comes next. */
static void look_once(actor *a) {
    lci_look_op op = {.begun_ns = 0};
    int rc = lci_look_for_dead(a->h, &op, LC_TRY, FOREVER);
    NEED(rc == LC_E_BUSY);
    do rc = lci_look_for_dead(a->h, &op, LC_BLOCK, FOREVER);
    while (rc == LC_E_INTR);
    NEED(rc == 1);
}
static void dead_with_much(stage *s, uint32_t flags, uint32_t portions) {
    static run more;
    two_runs(s);
    actor *o = stage_other(s, flags);
    hold_match(o, &o->held, 1, 16, SCENE_NS);
    run_reserve(o, &o->writing, 2, 12, 1, SCENE_NS);
    run_reserve(o, &more, 4, 12, 1, SCENE_NS);
    allocate(o, 16);
    stage_die(s, o);
    for (uint32_t i = 0; i < portions; i++) look_once(&s->survivor);
    lcs_client *c = lcs_client_of(s->survivor.at, s->notes->other[0]);
    NEED(lc_load(&c->state) == LCS_CLIENT_TAKEN);
}
static void before_first(stage *s) { dead_with_much(s, 0, 0); }
static void before_second(stage *s) { dead_with_much(s, 0, 1); }
static void before_third(stage *s) { dead_with_much(s, 0, 2); }
static void before_last(stage *s) { dead_with_much(s, 0, 3); }
static void before_second_device(stage *s) { dead_with_much(s, LCS_FLAG_DEVICE, 1); }
static void before_third_device(stage *s) { dead_with_much(s, LCS_FLAG_DEVICE, 2); }
static void before_last_device(stage *s) { dead_with_much(s, LCS_FLAG_DEVICE, 3); }
SCENE(portion_first, .pages = 72, .set = before_first, .act = look_once)
SCENE(portion_second, .pages = 72, .set = before_second, .act = look_once)
SCENE(portion_third, .pages = 72, .set = before_third, .act = look_once)
SCENE(portion_last, .pages = 72, .set = before_last, .act = look_once)
SCENE(portion_device_second, .pages = 72, .set = before_second_device, .act = look_once)
SCENE(portion_device_third, .pages = 72, .set = before_third_device, .act = look_once)
SCENE(portion_device_last, .pages = 72, .set = before_last_device, .act = look_once)

/* 40 of 48 pages have memory. There is no more, and then there is. */
static void without_memory(actor *v) {
    NEED(lci_no_memory(v->h, UINT64_C(1000000000)) == LC_OK);
    NEED(lci_no_memory(v->h, 0) == LC_OK);
    NEED(lci_no_memory(v->h, UINT64_C(1000000000)) == LC_OK);
    NEED(lci_grow(v->h, 44, LC_BLOCK, FOREVER) == LC_OK);
    NEED(lc_load(&v->h->root->no_memory_ns) == 0);
}
SCENE(no_memory, .pages = 48, .grown = 40, .set = two_runs, .act = without_memory)
