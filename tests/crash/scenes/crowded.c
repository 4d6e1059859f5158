/* Three others stand in the middle of different operations: one has written half of its shards, one
 * has counted the pins of a match and not looked again, one holds a lease. */
#include "scenes.h"

static void match(actor *a) { hold_match(a, &a->held, 1, 4, SCENE_NS); }

static void busy(stage *s) {
    two_runs(s);
    actor *o = stage_other(s, 0), *p = stage_other(s, 0), *q = stage_other(s, 0);
    run_reserve(o, &o->writing, 4, 5, 2, SCENE_NS);
    run_publish(o, &o->writing, 0);
    stop_at(p, LC_AT_PIN_COUNTED, match);
    hold_match(q, &q->held, 0, 6, SCENE_NS);
    s->notes->ns = SCENE_NS;
}

static void reserve(actor *v) {
    run_reserve(v, &v->writing, 2, 20, 1, SCENE_NS);
    NEED(v->writing.made == 20);
}
static void evict(actor *v) { NEED(deed_evict(v, 48) == 22); }
static void lease(actor *v) { hold_match(v, &v->held, 1, 16, SCENE_NS); }
static void give(actor *v) {
    lci_ticket_ref ref;
    NEED(lci_ticket_give(v->h, v->held.pages, 16, LC_NIL, 0, 2, FOREVER, &ref, LC_BLOCK, FOREVER) ==
         LC_OK);
}
static void leave(actor *v) {
    NEED(lci_leave(v->h, LC_BLOCK, FOREVER) == LC_OK && lcs_slot_release(v->at) == LC_OK);
}

SCENE(busy_reserve, .pages = 48, .set = busy, .act = reserve, .taken = 9)
SCENE(busy_publish, .pages = 48, .set = busy, .prepare = reserve, .act = act_publish, .made = 20)
SCENE(busy_abandon, .pages = 48, .set = busy, .prepare = reserve, .act = act_abandon)
SCENE(busy_evict, .pages = 48, .set = busy, .act = evict, .taken = 22)
SCENE(busy_clear, .pages = 48, .set = busy, .act = act_clear, .taken = 32)
SCENE(busy_match, .pages = 48, .set = busy, .act = lease)
SCENE(busy_release, .pages = 48, .set = busy, .prepare = lease, .act = leave)
SCENE(busy_give, .pages = 48, .set = busy, .prepare = lease, .act = give)
SCENE(busy_repair, .pages = 48, .set = busy, .act = act_repair)

/* And a fourth is dead. */
static void busy_with_dead(stage *s) {
    busy(s);
    actor *d = stage_other(s, 0);
    run_reserve(d, &d->writing, 5, 3, 1, SCENE_NS);
    match(d);
    stage_die(s, d);
}
static void reap(actor *v) { deed_reap(v, v->notes->other[3]); }
SCENE(busy_reap, .pages = 48, .set = busy_with_dead, .act = reap)
SCENE(busy_beside_dead, .pages = 48, .set = busy_with_dead, .act = reserve, .taken = 12)
