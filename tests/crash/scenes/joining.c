/* Coming, going, and what happens once: slots, namespaces, growing. */
#include "scenes.h"

static void attach(actor *v) { actor_claim(v, "victim", 0); }
SCENE(attach, .pages = 48, .set = two_runs, .act = attach, .unjoined = true)

static void leave(actor *v) {
    NEED(lci_leave(v->h, LC_BLOCK, FOREVER) == LC_OK);
    NEED(lcs_slot_release(v->at) == LC_OK);
}
static void hold_everything(actor *v) {
    hold *l = &v->held;
    hold_match(v, l, 1, 16, SCENE_NS);
    run_reserve(v, &v->writing, 2, 6, 2, SCENE_NS);
    run_publish(v, &v->writing, 0);
    NEED(lci_ticket_give(v->h, l->pages, 16, LC_NIL, 0, 2, FOREVER, &v->notes->ticket, LC_BLOCK,
                         FOREVER) == LC_OK);
}
SCENE(leave, .pages = 48, .set = two_runs, .act = leave)
SCENE(leave_holding, .pages = 48, .set = two_runs, .prepare = hold_everything, .act = leave)

static void open_space(actor *v) {
    lci_ns_ref ns;
    NEED(lci_namespace_open(v->h, "weights", "tenant", 5, &ns, LC_BLOCK, FOREVER) == LC_OK);
}
SCENE(open_space, .pages = 48, .set = two_runs, .act = open_space)

/* The entry of a cleared namespace is used again. */
static void cleared_space(stage *s) {
    lci_handle *h = s->survivor.h;
    lci_ns_ref ns;
    two_runs(s);
    NEED(lci_namespace_open(h, "old", "one", 0, &ns, LC_BLOCK, FOREVER) == LC_OK);
    run_fill(&s->survivor, 3, 4, ns);
    NEED(lci_clear(h, ns, LC_BLOCK, FOREVER) == LC_OK);
    NEED(lc_load(&h->ns[lci_ns_id(ns)].pages) == 0);
}
SCENE(open_cleared_space, .pages = 48, .set = cleared_space, .act = open_space)

static void space(stage *s) {
    lci_ns_ref ns;
    two_runs(s);
    NEED(lci_namespace_open(s->survivor.h, "weights", "tenant", 9, &ns, LC_BLOCK, FOREVER) ==
         LC_OK);
    run_fill(&s->survivor, 3, 4, ns);
}
SCENE(set_quota, .pages = 48, .set = space, .act = open_space)

static void grow(actor *v) {
    NEED(lci_grow(v->h, (uint32_t)v->pages, LC_BLOCK, FOREVER) == LC_OK);
}
static void small_run(stage *s) { run_fill(&s->survivor, 0, 12, SCENE_NS); }
SCENE(grow, .pages = 48, .grown = 16, .set = small_run, .act = grow)
