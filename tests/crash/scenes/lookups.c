/* What takes no lock: looking up, letting go, waiting. */
#include "scenes.h"

#define WAIT_NS 3000000

static void match(actor *v) { hold_match(v, &v->held, 1, 16, SCENE_NS); }
static void release(actor *v) { hold_release(v, &v->held); }
SCENE(match, .pages = 48, .set = two_runs, .act = match)
SCENE(release, .pages = 48, .set = two_runs, .prepare = match, .act = release)

/* Two groups of one model: all 16 pages of a run, and the last four before the position. */
static int match_groups(actor *v) {
    int32_t limit;
    hold *l = &v->held, window = {0};
    run_keys(l->keys, 1, 16);
    l->lease.capacity = window.lease.capacity = MAX_KEYS;
    lci_group groups[] = {
        {.h = v->h, .lease = &l->lease, .align = INT64_MAX, .ns = SCENE_NS, .parts = 1},
        {.h = v->h, .lease = &window.lease, .align = 1, .back = 16, .ns = SCENE_NS, .parts = 1},
    };
    int found = lci_match_groups(groups, 2, l->keys, 16, 4, 1, &limit);
    NEED(lci_release(v->h, &window.lease) == LC_OK);
    return found;
}
static void match_both(actor *v) { NEED(match_groups(v) == 16); }
SCENE(match_groups, .pages = 48, .set = two_runs, .act = match_both)

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

/* When both have pinned all that they need, it is cleared: all pins go back. */
static void runs_and_other(stage *s) {
    two_runs(s);
    stage_other(s, 0);
}
static bool clear_when_pinned(stage *s) {
    const lci_handle *h = s->survivor.h;
    uint32_t pins = 0;
    for (uint32_t page = 0; page < h->page_count; page++)
        pins += lc_load(lci_pin(h, s->notes->victim, page));
    if (pins < 20) return false;
    deed_clear(&s->other[0], SCENE_NS);
    return true;
}
static void match_cleared_groups(actor *v) { NEED(match_groups(v) <= 16); }
SCENE(match_groups_cleared, .pages = 48, .set = runs_and_other, .act = match_cleared_groups,
      .meanwhile = clear_when_pinned, .taken = 32)

/* A lease is shortened: its first pages stay pinned, until its client is taken back. */
static void match_sixteen(actor *v) { hold_match(v, &v->held, 1, 16, SCENE_NS); }
static void keep_six(actor *v) {
    NEED(lci_shorten(v->h, &v->held.lease, 6) == LC_OK);
    NEED(lci_count_pages(v->h, 16, 16) == LC_OK);
}
SCENE(shorten, .pages = 48, .set = two_runs, .prepare = match_sixteen, .act = keep_six)

/* The victim was told numbers and generations by one that pins the pages, which may end before it. */
static void told(actor *v, uint32_t *gens) {
    uint32_t bad;
    hold_match(v, &v->held, 1, 16, SCENE_NS);
    NEED(lci_keys_of(v->h, v->held.pages, 16, NULL, gens, &bad) == LC_OK);
    hold_release(v, &v->held);
}
static uint32_t gens[MAX_KEYS];
static void told_sixteen(actor *v) { told(v, gens); }
static int pin_pages(actor *v, uint32_t n) {
    uint32_t refused;
    int32_t pages[MAX_KEYS];
    hold *l = &v->held;
    memcpy(pages, l->pages, sizeof *pages * n);
    return lci_pin_pages(v->h, pages, gens, n, &l->lease, &refused);
}
static void pin_sixteen(actor *v) { NEED(pin_pages(v, 16) == LC_OK); }
static void told_wrongly(actor *v) {
    told(v, gens);
    gens[9] += 2;
}
static void pin_none(actor *v) { NEED(pin_pages(v, 16) == LC_E_STALE); }
static void told_and_pinned(actor *v) {
    told(v, gens);
    pin_sixteen(v);
}
static void give_some_back(actor *v) {
    const int32_t *p = v->held.pages;
    const int32_t pages[] = {p[3], p[2], p[2], p[11], 47, p[15]};
    NEED(lci_release_pages(v->h, &v->held.lease, pages, 6) == 4);
}
SCENE(pin_pages, .pages = 48, .set = two_runs, .prepare = told_sixteen, .act = pin_sixteen)
SCENE(pin_pages_in_vain, .pages = 48, .set = two_runs, .prepare = told_wrongly, .act = pin_none)
SCENE(release_pages, .pages = 48, .set = two_runs, .prepare = told_and_pinned, .act = give_some_back)

/* When all are pinned and not confirmed yet, the namespace is cleared. */
static bool clear_when_given(stage *s) {
    const lci_handle *h = s->survivor.h;
    uint32_t pins = 0;
    for (uint32_t page = 0; page < h->page_count; page++)
        pins += lc_load(lci_pin(h, s->notes->victim, page));
    if (pins < 16) return false;
    deed_clear(&s->other[0], SCENE_NS);
    return true;
}
static void pin_or_not(actor *v) {
    int rc = pin_pages(v, 16); /* cleared before it was confirmed, or after */
    NEED(rc == LC_OK || rc == LC_E_STALE);
}
SCENE(pin_pages_cleared, .pages = 48, .set = runs_and_other, .prepare = told_sixteen,
      .act = pin_or_not, .meanwhile = clear_when_given, .taken = 32)

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
