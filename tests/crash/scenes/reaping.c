/* Taking back what somebody held who died before: the victim is the one who does it. */
#include "scenes.h"

static void reap_first(actor *v) { deed_reap(v, v->notes->other[0]); }
static void reap_unjoined(actor *v) {
    v->h = lci_open(v->at, v->pages);
    NEED(v->h && lci_reap_unjoined(v->h, v->notes->other[0], LC_BLOCK, FOREVER) == 1);
}

static void holds_pins(stage *s) {
    two_runs(s);
    actor *o = stage_other(s, 0);
    hold_match(o, &o->held, 1, 16, SCENE_NS);
    stage_die(s, o);
}
SCENE(reap_pins, .pages = 48, .set = holds_pins, .act = reap_first)
SCENE(unjoined_pins, .pages = 48, .set = holds_pins, .act = reap_unjoined, .unjoined = true)

static void give(stage *s, actor *o, const int32_t *pages, uint32_t n, uint32_t rid, uint32_t gen) {
    NEED(lci_ticket_give(o->h, pages, n, rid, gen, ~UINT64_C(0), FOREVER, &s->notes->ticket,
                         LC_BLOCK, FOREVER) == LC_OK);
}

/* The first other reserves two shards and gives a ticket; the second adopts shard 1. */
static void shared_writing(stage *s, bool written) {
    two_runs(s);
    actor *o = stage_other(s, 0), *p = stage_other(s, 0);
    run *r = &o->writing;
    uint32_t rid, gen;
    run_reserve(o, r, 2, 6, 2, SCENE_NS);
    give(s, o, r->fresh, r->made, r->op.rid, r->op.gen);
    NEED(lci_adopt(p->h, &s->notes->ticket, 1, &p->held.lease.held, p->held.pages, MAX_KEYS, &rid,
                   &gen, LC_BLOCK, FOREVER) == 6);
    p->writing = *r;
    p->held.lease.held = 0; /* its pins are those of the run, which it goes on writing */
    if (written) run_publish(o, r, 0);
    stage_die(s, o);
}
static void dead_with_shard(stage *s) { shared_writing(s, false); }
static void dead_without_shard(stage *s) { shared_writing(s, true); }
SCENE(reap_writing, .pages = 48, .set = dead_with_shard, .act = reap_first)
SCENE(reap_owner, .pages = 48, .set = dead_without_shard, .act = reap_first)
SCENE(unjoined_writing, .pages = 48, .set = dead_with_shard, .act = reap_unjoined, .unjoined = true)

/* It gave one ticket and had adopted another. */
static void dead_with_tickets(stage *s) {
    two_runs(s);
    actor *o = stage_other(s, 0), *p = stage_other(s, 0);
    uint32_t held, rid, gen;
    int32_t pages[MAX_KEYS];
    hold_match(p, &p->held, 0, 8, SCENE_NS);
    give(s, p, p->held.pages, 8, LC_NIL, 0);
    NEED(lci_adopt(o->h, &s->notes->ticket, 0, &held, pages, MAX_KEYS, &rid, &gen, LC_BLOCK,
                   FOREVER) == 8);
    hold_match(o, &o->held, 1, 16, SCENE_NS);
    give(s, o, o->held.pages, 16, LC_NIL, 0);
    stage_die(s, o);
}
SCENE(reap_tickets, .pages = 48, .set = dead_with_tickets, .act = reap_first)

/* It died in the middle of a call. */
static void reserve(actor *a) { run_reserve(a, &a->writing, 2, 6, 1, SCENE_NS); }
static void match(actor *a) { hold_match(a, &a->held, 1, 16, SCENE_NS); }
static void evict(actor *a) { deed_evict(a, 8); }
static void die_at(stage *s, int point, void (*before)(actor *), void (*call)(actor *)) {
    two_runs(s);
    actor *o = stage_other(s, 0);
    if (before) before(o);
    stop_at(o, point, call);
    stage_die(s, o);
}
static void dead_matching(stage *s) { die_at(s, LC_AT_PIN_COUNTED, NULL, match); }
static void dead_published(stage *s) { die_at(s, LC_AT_SHARD_DONE, reserve, act_publish); }
static void dead_publishing(stage *s) { die_at(s, LC_AT_PAGE_READY, reserve, act_publish); }
static void dead_reserving(stage *s) { die_at(s, LC_AT_LINKED, NULL, reserve); }
/* With all of a step in the log. */
static void evict_one(actor *a) { deed_evict(a, 1); }
static void dead_committing(stage *s) { die_at(s, LC_AT_COMMIT, evict_one, evict); }
static void dead_evicting(stage *s) { die_at(s, LC_AT_EVICT_UNLINKED, NULL, evict); }
SCENE(reap_matching, .pages = 48, .set = dead_matching, .act = reap_first)
SCENE(reap_published, .pages = 48, .set = dead_published, .act = reap_first, .made = 6)
SCENE(reap_publishing, .pages = 48, .set = dead_publishing, .act = reap_first, .made = 5)
SCENE(reap_reserving, .pages = 48, .set = dead_reserving, .act = reap_first)
SCENE(reap_evicting, .pages = 48, .set = dead_evicting, .act = reap_first, .made = 8)
SCENE(reap_committing, .pages = 48, .set = dead_committing, .act = reap_first, .made = 8)
SCENE(unjoined_evicting, .pages = 48, .set = dead_evicting, .act = reap_unjoined, .made = 8,
      .unjoined = true)

static void other_run(actor *v) { run_reserve(v, &v->writing, 3, 6, 1, SCENE_NS); }
SCENE(take_over_reserving, .pages = 48, .set = dead_reserving, .act = other_run)
SCENE(take_over_evicting, .pages = 48, .set = dead_evicting, .act = other_run, .made = 8)

/* A device's copies may go on: pins on pages that it was writing are kept. */
static void dead_with_device(stage *s) {
    two_runs(s);
    actor *o = stage_other(s, LCS_FLAG_DEVICE);
    reserve(o);
    match(o);
    stage_die(s, o);
}
SCENE(reap_device, .pages = 48, .set = dead_with_device, .act = reap_first)

/* In quarantine, and its process has ended since. */
static void quarantined(stage *s) {
    dead_with_device(s);
    lcs_client *c = lcs_client_of(s->survivor.at, s->notes->other[0]);
    NEED(lci_reap_slot(s->survivor.h, s->notes->other[0], LC_BLOCK, FOREVER) == 1);
    NEED(lc_load(&c->state) == LCS_CLIENT_QUARANTINE);
    c->pid = UINT32_C(0x7ffffff0);
    c->quarantine_until_ns = 0;
}
SCENE(reap_quarantined, .pages = 48, .set = quarantined, .act = reap_first)

/* The same in portions as small as can be. */
static void reap_bit_by_bit(actor *v) {
    uint32_t slot = v->notes->other[0];
    int rc;
    do {
        int64_t left = 1;
        rc = lci_reap_some(v->h, slot, LC_BLOCK, FOREVER, &left);
        NEED(rc == 1 || rc == LC_E_INTR);
    } while (lc_load(&lcs_client_of(v->at, slot)->state) != LCS_CLIENT_FREE);
}
SCENE(portion_quarantined, .pages = 48, .set = quarantined, .act = reap_bit_by_bit)
