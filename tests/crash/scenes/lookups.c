/* What takes no lock: looking up, letting go, waiting. */
#include "scenes.h"

#define WAIT_NS 3000000

static void match(actor *v) { hold_match(v, &v->held, 1, 16, SCENE_NS); }
static void release(actor *v) { hold_release(v, &v->held); }
SCENE(match, .pages = 48, .set = two_runs, .act = match)
SCENE(release, .pages = 48, .set = two_runs, .prepare = match, .act = release)

static void match_nothing(actor *v) {
    hold *l = &v->held;
    run_keys(l->keys, 7, 16);
    NEED(lci_match1(v->h, l->keys, 16, SCENE_NS, &l->lease) == 0);
}
SCENE(match_nothing, .pages = 48, .act = match_nothing)

/* An evictor marks pages that the match has not come to yet, and dies: it comes out short. */
static void evict_four(actor *a) { deed_evict(a, 4); }
static void one_other(stage *s) {
    run_fill(&s->survivor, 0, 24, SCENE_NS);
    stage_other(s, 0);
}
static bool die_evicting(stage *s) {
    if (!lc_load(lci_pin(s->survivor.h, s->notes->victim, 6))) return false;
    stop_at(&s->other[0], LC_AT_EVICT_MARKED, evict_four);
    stage_die(s, &s->other[0]);
    return true;
}
static void match_short(actor *v) {
    hold *l = &v->held;
    run_keys(l->keys, 0, 24);
    NEED(lci_match1(v->h, l->keys, 24, SCENE_NS, &l->lease) == 20);
}
SCENE(match_short, .pages = 48, .set = one_other, .act = match_short, .meanwhile = die_evicting,
      .taken = 4)

static void other_writes(stage *s) {
    two_runs(s);
    actor *o = stage_other(s, 0);
    run_reserve(o, &o->writing, 2, 6, 1, SCENE_NS);
}
static void wait_in_vain(actor *v) {
    lc_key keys[6];
    run_keys(keys, 2, 6);
    NEED(lci_wait(v->h, keys, 6, lcs_now_ns() + WAIT_NS) == LC_E_TIMEOUT);
}
SCENE(wait, .pages = 48, .set = other_writes, .act = wait_in_vain)
