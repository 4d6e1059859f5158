/* More of tickets: the last adopter, a giver who does not wait, and a page that is pinned too often. */
#include "scenes.h"

static void match(actor *a) { hold_match(a, &a->held, 1, 16, SCENE_NS); }
static void give(actor *a, uint64_t adopters) {
    NEED(lci_ticket_give(a->h, a->held.pages, 16, LC_NIL, 0, adopters, FOREVER, &a->notes->ticket,
                         LC_BLOCK, FOREVER) == LC_OK);
}

/* The victim is the only one to adopt: with that the ticket's own pins are given back. */
static void lease_of_other(stage *s) {
    two_runs(s);
    match(stage_other(s, 0));
}
static void give_victim(stage *s) {
    give(&s->other[0], UINT64_C(1) << s->notes->victim);
}
static void adopt(actor *v) {
    uint32_t rid, gen;
    NEED(lci_adopt(v->h, &v->notes->ticket, 0, &v->held.lease.held, v->held.pages, MAX_KEYS, &rid,
                   &gen, LC_BLOCK, FOREVER) == 16);
}
SCENE(adopt_last, .pages = 48, .set = lease_of_other, .ready = give_victim, .act = adopt)

/* Another ticket is open. */
static void give_again(actor *v) {
    lci_ticket_ref ref;
    NEED(lci_ticket_give(v->h, v->held.pages, 16, LC_NIL, 0, 2, FOREVER, &ref, LC_BLOCK, FOREVER) ==
         LC_OK);
}
/* Dropped before anybody has adopted it. */
static void one_other(stage *s) {
    two_runs(s);
    stage_other(s, 0);
}
static void give_other(actor *v) {
    match(v);
    give(v, UINT64_C(1) << v->notes->other[0]);
}
static void drop(actor *v) {
    NEED(lci_ticket_drop(v->h, &v->notes->ticket, LC_BLOCK, FOREVER) == LC_OK);
}
SCENE(give_second, .pages = 48, .set = one_other, .prepare = give_other, .act = give_again)
SCENE(drop_early, .pages = 48, .set = one_other, .prepare = give_other, .act = drop)

static void revoke(actor *v) {
    NEED(lci_ticket_revoke(v->h, &v->notes->ticket, LC_BLOCK, FOREVER) == LC_OK);
}
SCENE(revoke, .pages = 48, .set = one_other, .prepare = give_other, .act = revoke)

/* The giver has died, and perhaps been taken back: who has not adopted never will. */
static void give_and_die(stage *s) {
    give_victim(s);
    stage_die(s, &s->other[0]);
}
static void give_and_be_reaped(stage *s) {
    give_and_die(s);
    deed_reap(&s->survivor, s->notes->other[0]);
}
static void refuse(actor *v) {
    uint32_t giver = v->notes->other[0], epoch = lc_load(&lcs_client_of(v->at, giver)->epoch);
    NEED(lci_ticket_refuse_orphans(v->h, giver, epoch, LC_BLOCK, FOREVER) == 1);
    NEED(lci_ticket_refuse_orphans(v->h, giver, epoch, LC_BLOCK, FOREVER) == 0);
}
SCENE(refuse_orphan, .pages = 48, .set = lease_of_other, .ready = give_and_die, .act = refuse)
SCENE(refuse_reaped, .pages = 48, .set = lease_of_other, .ready = give_and_be_reaped, .act = refuse)

/* As many tickets as can be counted hold the tenth page: the one half built is taken back. That so
 * many are missing is the damage that is repaired in the end. */
static void tenth_at_limit(stage *s) {
    uint32_t length;
    lc_key key = scene_key(1, 9);
    lci_handle *h = s->survivor.h;
    two_runs(s);
    uint32_t page = lc_dict_look(&h->dict, key.lo, key.hi, &length);
    lc_store(lci_pin(h, 0, page), UINT16_MAX);
}
static void give_in_vain(actor *v) {
    lci_ticket_ref ref;
    NEED(lci_ticket_give(v->h, v->held.pages, 16, LC_NIL, 0, 2, FOREVER, &ref, LC_BLOCK, FOREVER) ==
         LC_E_PINS);
}
SCENE(give_limit, .pages = 48, .set = tenth_at_limit, .prepare = match, .act = give_in_vain,
      .unsound = true)
