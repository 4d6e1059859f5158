/* Evicting and clearing. */
#include "scenes.h"

static void evict_five(actor *v) { NEED(deed_evict(v, 5) == 5); }
SCENE(evict, .pages = 48, .set = two_runs, .act = evict_five, .taken = 5)

SCENE(evict_all, .pages = 48, .set = two_runs, .act = act_evict_all, .taken = 32)
SCENE(evict_nothing, .pages = 48, .act = act_evict_all)

static void half_pinned(stage *s) {
    two_runs(s);
    actor *o = stage_other(s, 0);
    hold_match(o, &o->held, 0, 16, SCENE_NS);
}
SCENE(evict_pinned, .pages = 48, .set = half_pinned, .act = act_evict_all, .taken = 16)

/* A match of another client has found a page, and counts its pin when the evictor has marked it. */
SCENE(evict_raced, .pages = 48, .set = two_runs_met, .act = evict_five, .meanwhile = pin_marked,
      .taken = 5)
SCENE(evict_all_raced, .pages = 48, .set = two_runs_met, .act = act_evict_all,
      .meanwhile = pin_marked, .taken = 16)

/* Independent pages go from the middle of what hangs together. */
SCENE(evict_independent, .pages = 48, .set = two_paths, .act = evict_five, .taken = 5)
SCENE(evict_all_independent, .pages = 48, .set = two_paths, .act = act_evict_all, .taken = 32)

static void first_pinned(stage *s) {
    two_paths(s);
    actor *o = stage_other(s, 0);
    hold_match(o, &o->held, 0, 3, SCENE_NS);
}
SCENE(evict_pinned_independent, .pages = 48, .set = first_pinned, .act = act_evict_all,
      .taken = 29)

/* The first that is marked comes back: others hang on it, and are marked as well. */
SCENE(evict_raced_independent, .pages = 48, .set = two_paths_met, .act = evict_five,
      .meanwhile = pin_marked, .taken = 5)

/* Both kinds in one queue; behind a page of the other kind nothing hangs. */
SCENE(evict_mixed, .pages = 48, .set = both_kinds, .act = evict_five, .taken = 5)
SCENE(evict_all_mixed, .pages = 48, .set = both_kinds, .act = act_evict_all, .taken = 40)
static void other_of_kinds(stage *s) {
    both_kinds(s);
    stage_other(s, 0)->stopped = true;
}
SCENE(evict_raced_mixed, .pages = 48, .set = other_of_kinds, .act = evict_five,
      .meanwhile = pin_marked, .taken = 5)

/* Pages that others hang on go, and are used at once under other keys, and under their own. */
static void use_again(actor *v) {
    run r;
    run_behind(v, &r, 1, 16, 36);
    NEED(r.made == 20);
    run_publish(v, &r, 0);
    run_unpin(v, &r);
    run_behind(v, &r, 0, 0, 3);
    NEED(r.made == 3);
    run_publish(v, &r, 0);
    run_unpin(v, &r);
}
SCENE(evict_and_use_independent, .pages = 48, .set = two_paths, .act = use_again, .taken = 7,
      .made = 20)

static void default_space(stage *s) {
    two_runs(s);
    s->notes->ns = SCENE_NS;
}
SCENE(clear, .pages = 48, .set = default_space, .act = act_clear, .taken = 32)
static void default_paths(stage *s) {
    two_paths(s);
    deed_evict(&s->survivor, 3);
    s->notes->ns = SCENE_NS;
}
static void default_kinds(stage *s) {
    both_kinds(s);
    s->notes->ns = SCENE_NS;
}
SCENE(clear_mixed, .pages = 48, .set = default_kinds, .act = act_clear, .taken = 40)
SCENE(clear_independent, .pages = 48, .set = default_paths, .act = act_clear, .taken = 29)

/* A space of its own: some of its pages pinned, some being written. */
static void space_in_use(stage *s) {
    actor *a = &s->survivor, *o = stage_other(s, 0), *w = stage_other(s, 0);
    run_fill(a, 0, 16, SCENE_NS);
    NEED(lci_namespace_open(a->h, "w", "t", 0, &s->notes->ns, LC_BLOCK, FOREVER) == LC_OK);
    run_fill(a, 3, 8, s->notes->ns);
    hold_match(o, &o->held, 3, 4, s->notes->ns);
    run_reserve(w, &w->writing, 4, 5, 2, s->notes->ns);
    run_publish(w, &w->writing, 0);
}
SCENE(clear_in_use, .pages = 48, .set = space_in_use, .act = act_clear, .taken = 8)

static void no_pages(stage *s) { s->notes->ns = SCENE_NS; }
SCENE(clear_empty, .pages = 48, .set = no_pages, .act = act_clear)
