/* Handing pins from one client to another. */
#include "scenes.h"

#define EVERYBODY (~UINT64_C(0))

static void give(actor *a, uint64_t adopters, uint64_t expires) {
    const hold *l = &a->held;
    NEED(lci_ticket_give(a->h, l->pages, l->lease.held, LC_NIL, 0, adopters, expires,
                         &a->notes->ticket, LC_BLOCK, FOREVER) == LC_OK);
}
static void adopt(actor *a, uint32_t shard, int expected) {
    uint32_t rid, gen;
    NEED(lci_adopt(a->h, &a->notes->ticket, shard, &a->held.lease.held, a->held.pages, MAX_KEYS,
                   &rid, &gen, LC_BLOCK, FOREVER) == expected);
}

static void match(actor *v) { hold_match(v, &v->held, 1, 16, SCENE_NS); }
static void give_lease(actor *v) {
    lci_ticket_ref ref;
    hold *l = &v->held;
    NEED(lci_ticket_give(v->h, l->pages, l->lease.held, LC_NIL, 0, 2, FOREVER, &ref, LC_BLOCK,
                         FOREVER) == LC_OK);
}
SCENE(give, .pages = 48, .set = two_runs, .prepare = match, .act = give_lease)

static void reserve_shards(actor *a) {
    run_reserve(a, &a->writing, 2, 6, 2, SCENE_NS);
    run_publish(a, &a->writing, 0);
}
static void give_writing(actor *v) {
    lci_ticket_ref ref;
    run *r = &v->writing;
    NEED(lci_ticket_give(v->h, r->fresh, r->made, r->op.rid, r->op.gen, 2, FOREVER, &ref, LC_BLOCK,
                         FOREVER) == LC_OK);
}
SCENE(give_writing, .pages = 48, .set = two_runs, .prepare = reserve_shards, .act = give_writing)

static void lease_given(stage *s) {
    two_runs(s);
    actor *o = stage_other(s, 0);
    match(o);
    give(o, EVERYBODY, FOREVER);
}
static void adopt_lease(actor *v) { adopt(v, 0, 16); }
SCENE(adopt, .pages = 48, .set = lease_given, .act = adopt_lease)

static void writing_given(stage *s) {
    two_runs(s);
    actor *o = stage_other(s, 0);
    run *r = &o->writing;
    reserve_shards(o);
    NEED(lci_ticket_give(o->h, r->fresh, r->made, r->op.rid, r->op.gen, EVERYBODY, FOREVER,
                         &s->notes->ticket, LC_BLOCK, FOREVER) == LC_OK);
}
static void adopt_shard(actor *v) { adopt(v, 1, 6); }
SCENE(adopt_shard, .pages = 48, .set = writing_given, .act = adopt_shard)

/* The adopter is the last publisher, of a reservation that another client made. */
static void publish_adopted(actor *v) {
    hold *l = &v->held;
    const lci_ticket *k = &v->h->tickets[v->notes->ticket.index];
    for (uint32_t i = 0; i < l->lease.held; i++)
        for (uint32_t w = 1; w < STAMP_WORDS; w += 2) {
            lc_key key = scene_key(2, i);
            v->stamps[(uint32_t)l->pages[i] * STAMP_WORDS + w] = stamp_of(key.lo, key.hi, w);
        }
    NEED(lci_publish(v->h, lc_load(&k->reservation) - 1, lc_load(&k->reservation_gen), 1, l->pages,
                     l->lease.held) == 1);
}
SCENE(publish_adopted, .pages = 48, .set = writing_given, .prepare = adopt_shard,
      .act = publish_adopted, .made = 6)

static void verdict(actor *v) { NEED(lci_ticket_done(v->h, &v->notes->ticket, 1) == LC_OK); }
static void bad_verdict(actor *v) { NEED(lci_ticket_done(v->h, &v->notes->ticket, 0) == LC_OK); }
SCENE(done, .pages = 48, .set = lease_given, .prepare = adopt_lease, .act = verdict)
SCENE(done_failed, .pages = 48, .set = lease_given, .prepare = adopt_lease, .act = bad_verdict)

/* The giver asks until its one adopter is done, and drops the ticket: it is freed. */
static void one_other(stage *s) {
    two_runs(s);
    stage_other(s, 0);
}
static void give_other(actor *v) {
    match(v);
    give(v, UINT64_C(1) << v->notes->other[0], FOREVER);
}
static void other_is_done(stage *s) {
    actor *o = &s->other[0];
    run_keys(o->held.keys, 1, 16);
    adopt(o, 0, 16);
    verdict(o);
}
static void collect(actor *v) {
    lci_ticket_status status = {0};
    NEED(lci_ticket_poll(v->h, &v->notes->ticket, &status) == LC_OK);
    NEED(status.done == UINT64_C(1) << v->notes->other[0]);
    NEED(lci_ticket_drop(v->h, &v->notes->ticket, LC_BLOCK, FOREVER) == LC_OK);
}
SCENE(collect, .pages = 48, .set = one_other, .prepare = give_other, .ready = other_is_done,
      .act = collect)

/* The deadline has passed and nobody has adopted: whoever has the lock next gives the pins back. */
static void give_late(actor *v) {
    match(v);
    give(v, UINT64_C(1) << v->notes->other[0], 1);
    hold_release(v, &v->held);
}
SCENE(expire, .pages = 48, .set = one_other, .prepare = give_late, .act = act_evict_all,
      .taken = 32)
