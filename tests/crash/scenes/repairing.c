/* Rebuilding: of a sound index, of a damaged one, and after a repair that died. */
#include "scenes.h"


/* Some of everything that a repair reads. */
static void some_of_all(stage *s) {
    two_runs(s);
    actor *o = stage_other(s, 0), *p = stage_other(s, 0);
    run_reserve(o, &o->writing, 2, 4, 2, SCENE_NS);
    run_publish(o, &o->writing, 0);
    hold_match(p, &p->held, 1, 8, SCENE_NS);
    NEED(lci_ticket_give(p->h, p->held.pages, 8, LC_NIL, 0, 2, FOREVER, &s->notes->ticket, LC_BLOCK,
                         FOREVER) == LC_OK);
}
SCENE(repair, .pages = 48, .set = some_of_all, .act = act_repair)

/* Queue and counts are nonsense; chains, the readers' part, are sound. */
static void damage(stage *s) {
    lci_root *r = s->survivor.h->root;
    some_of_all(s);
    lc_lists_format(&s->survivor.h->lists);
    lc_store(&r->free_head, LC_NIL);
    lc_store(&r->named, 77);
    lc_store(&r->queued, 0);
}
SCENE(repair_damaged, .pages = 48, .set = damage, .act = act_repair, .unsound = true)

/* The last repair died: the next to have the lock repairs before anything else. */
static void repair_died(stage *s) {
    damage(s);
    lc_store(&s->survivor.h->root->repairing, 1);
}
static void evict_five(actor *v) { NEED(deed_evict(v, 5) == 5); }
SCENE(repair_again, .pages = 48, .set = repair_died, .act = evict_five, .taken = 5, .unsound = true)
