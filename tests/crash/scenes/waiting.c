/* Waiting for a lock that a living client holds, taking over from one that will never run again, and
 * sleeping until a page is ready. Who holds the lock would never let go of it in the copies, where
 * nobody goes on: there it dies with the victim. */
#include "scenes.h"

#include <pthread.h>

static void hold_lock(actor *a) { NEED(lci_hold(a->h, LC_BLOCK, FOREVER) == LC_OK); }

static actor *holder(stage *s) {
    two_runs(s);
    actor *o = stage_other(s, 0);
    o->dies_too = true;
    return o;
}

/* In another PID namespace, so only its byte says that it lives: looking at /proc takes longer, in
 * single steps, than one call waits. */
static void held_elsewhere(stage *s) {
    actor *o = holder(s);
    lc_store(&lcs_client_of(o->at, o->at->slot)->pidns, 1);
    hold_lock(o);
}
static bool let_go_at(stage *s, uint32_t bit) {
    if (s->other[0].at->life_fd < 0) return true; /* the victim has died before */
    if (!(lc_load(&lcs_lock_of(s->survivor.at)->both) & bit)) return false;
    NEED(lci_let_go(s->other[0].h) == LC_OK);
    return true;
}
static bool let_go_when_waited_for(stage *s) { return let_go_at(s, LCS_LOCK_WAITERS); }
static bool let_go_when_starved(stage *s) { return let_go_at(s, LCS_LOCK_STARVED); }
/* LC_E_INTR: nobody has let go of it in time. */
static void wait_for_lock(actor *v) {
    int rc = lci_grow(v->h, 0, LC_BLOCK, FOREVER);
    NEED(rc == LC_OK || rc == LC_E_INTR);
}
static void wait_in_vain(actor *v) {
    NEED(lci_grow(v->h, 0, LC_BLOCK, FOREVER) == LC_E_INTR);
    NEED(lci_grow(v->h, 0, LC_BLOCK, 1) == LC_E_TIMEOUT);
    NEED(lci_grow(v->h, 0, LC_TRY, 0) == LC_E_BUSY);
}
SCENE(lock_waited_for, .pages = 48, .set = held_elsewhere, .act = wait_for_lock,
      .meanwhile = let_go_when_waited_for)
SCENE(lock_of_starved, .pages = 48, .set = held_elsewhere, .act = wait_for_lock,
      .meanwhile = let_go_when_starved)
SCENE(lock_in_vain, .pages = 48, .set = held_elsewhere, .act = wait_in_vain)

/* One that starved has died: its bit is all that is left of it. */
static void starved_died(stage *s) {
    two_runs(s);
    lc_store(&lcs_lock_of(s->survivor.at)->word, LCS_LOCK_STARVED);
}

/* Its process lives; the thread that took the lock has ended. */
static void *take_and_end(void *a) {
    hold_lock(a);
    return NULL;
}
static void held_by_no_thread(stage *s) {
    pthread_t thread;
    actor *o = holder(s);
    NEED(pthread_create(&thread, NULL, take_and_end, o) == 0 && pthread_join(thread, NULL) == 0);
}
static void evict_five(actor *v) { NEED(deed_evict(v, 5) == 5); }
SCENE(lock_of_ended_thread, .pages = 48, .set = held_by_no_thread, .act = evict_five, .taken = 5)
SCENE(lock_after_starved, .pages = 48, .set = starved_died, .act = evict_five, .taken = 5)

/* Asleep until a key is ready, and woken by a look at who lives after 20 ms. */
static void other_writes(stage *s) {
    two_runs(s);
    actor *o = stage_other(s, 0);
    run_reserve(o, &o->writing, 2, 6, 1, SCENE_NS);
}
static void wait_for_page(actor *v) {
    lc_key keys[2] = {scene_key(0, 0), scene_key(2, 0)};
    int rc = lci_wait(v->h, keys, 2, FOREVER);
    NEED(rc == LC_OK || rc == LC_E_BUSY);
    NEED(lci_match1(v->h, keys + 1, 1, SCENE_NS, &v->held.lease) >= 0);
}
/* At the first change: the sleeper's bit, or on a slow machine what follows the waiting. */
static bool publish_to_sleeper(stage *s) {
    run_publish(&s->other[0], &s->other[0].writing, 0);
    return true;
}
SCENE(wait_asleep, .pages = 48, .set = other_writes, .act = wait_for_page)
SCENE(wait_woken, .pages = 48, .set = other_writes, .act = wait_for_page,
      .meanwhile = publish_to_sleeper, .made = 6)

/* A dead client that held nothing: its slot is all there is to free. */
static void dead_idle(stage *s) {
    two_runs(s);
    stage_die(s, stage_other(s, 0));
}
static void free_slot(actor *v) { NEED(lcs_slot_free_dead(v->at, v->notes->other[0]) == LC_OK); }
SCENE(free_dead_slot, .pages = 48, .set = dead_idle, .act = free_slot)
