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

/* What was published is queued: `lci_worth` takes no lock, and so takes nothing in. */
static void take_in(stage *s) {
    lci_handle *h = s->survivor.h;
    lc_txn t;
    NEED(lci_lock(h, &t, LCI_OP_COLLECT, LC_BLOCK, FOREVER) == LC_OK);
    while (lci_collect(h, &t, LCI_HOLD)) {
    }
    NEED(lci_unlock(h, &t) == LC_OK);
}

/* 32 pages that were hit are queued, and the first of them are pinned: their walk passes those by. 16
 * pages are free. */
static void queued_and_hit(stage *s) {
    two_paths(s);
    take_in(s);
    hit(s, 0, 16);
    hit(s, 1, 16);
    actor *o = stage_other(s, 0);
    hold_match(o, &o->held, 0, 3, SCENE_NS);
}

static void ask(actor *v, uint32_t number, uint32_t n, int worth) {
    lc_key keys[MAX_KEYS];
    run_keys(keys, number, n);
    NEED(lci_worth(v->h, keys, n, 0, SCENE_NS, LCH_HINT_NONE, 0) == worth);
}
static void ask_of_twenty(actor *v) { ask(v, 7, 20, 16); }
SCENE(worth, .pages = 48, .ranked = true, .set = queued_and_hit, .act = ask_of_twenty)

/* Refused once, and so remembered: they have come back, and rank as what was hit. */
static void refused_before(stage *s) {
    queued_and_hit(s);
    ask_of_twenty(&s->survivor);
}
static void ask_again(actor *v) { ask(v, 7, 24, 20); }
SCENE(worth_again, .pages = 48, .ranked = true, .set = refused_before, .act = ask_again)

/* What was refused makes it time to learn. */
static void queued_and_due(stage *s) {
    queued_and_hit(s);
    lc_store(&s->survivor.h->learnt.root->claimed, 0);
    lc_store(&s->survivor.h->learnt.root->named, 1000);
}
SCENE(worth_and_learn, .pages = 48, .ranked = true, .set = queued_and_due, .act = ask_of_twenty)
