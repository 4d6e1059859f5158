/* Admission: a reserve that is refused, whole or from some key on. */
#include "scenes.h"

static void reserve_worthy(actor *v, uint32_t made) {
    run *r = &v->writing;
    memset(r, 0, sizeof *r);
    run_keys(r->keys, 7, 20);
    r->n = 20;
    r->op = (lci_reserve_op){.shards = 1, .ns = SCENE_NS, .admission = 1};
    int rc;
    do rc = lci_reserve(v->h, &r->op, r->keys, r->n, 0, r->page, r->status, LC_BLOCK, FOREVER);
    while (rc == LC_E_INTR || rc == LC_E_BUSY);
    NEED(rc == (int)made && r->op.reason == LCI_WHY_WORTH);
    for (uint32_t i = 0; i < r->n; i++)
        if (r->status[i] == LCI_NEW) r->fresh[r->made++] = r->page[i];
}

/* Nothing ages, and nothing is learned: what was hit ranks above what was not. */
static void hit(stage *s, uint32_t number, uint32_t n) {
    actor *a = &s->survivor;
    hold held;
    lc_store(&a->h->learnt.root->unit, 20);
    lc_store(&a->h->learnt.root->claimed, 1);
    hold_match(a, &held, number, n, SCENE_NS);
    hold_release(a, &held);
}

/* Every page is likelier to be used than a new one. */
static void all_hit(stage *s) {
    run_fill(&s->survivor, 0, 48, SCENE_NS);
    hit(s, 0, 48);
}
static void refused(actor *v) { reserve_worthy(v, 0); }
SCENE(reserve_refused, .pages = 48, .ranked = true, .set = all_hit, .act = refused)

/* Nine are not: as many pages go, and the rest is refused. */
static void most_hit(stage *s) {
    run_fill(&s->survivor, 0, 39, SCENE_NS);
    run_fill(&s->survivor, 1, 9, SCENE_NS);
    hit(s, 0, 39);
}
static void refused_from_nine(actor *v) { reserve_worthy(v, 9); }
SCENE(reserve_worthy, .pages = 48, .ranked = true, .set = most_hit, .act = refused_from_nine, .taken = 9)
