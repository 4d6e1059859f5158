/* What is there before a scene's operation. Everywhere the first run's HELD keys are ready and
 * pinned by the survivor; `written_run` is what the victim writes, if it writes. */
#include "prepared.h"

prompt first_run, second_run, written_run;

prompt other_run;
lease lent;
lci_ticket_ref ticket;

/* Few buckets, so that chains have several links. */
void crowd(prompt *p, uint32_t number, uint32_t n) {
    prompt_make(p, number, n);
    for (uint32_t i = 0; i < n; i++) p->keys[i].lo = (p->keys[i].lo & ~UINT64_C(0xffff)) | (i & 7);
}

static void fill(client *c, prompt *p, uint32_t number, uint32_t n) {
    crowd(p, number, n);
    CHECK_EQ(prompt_reserve(c, p, NS, 1), n);
    prompt_publish(c, p, 0);
    prompt_unpin(c, p);
}

/* Pages of different age: their generations differ. */
static void grow_old(void) {
    for (uint32_t n = 1; n < 6; n++) {
        fill(&survivor, &other_run, 40 + n, 4 * n);
        CHECK_EQ(evict(&survivor, PAGES), 4 * n);
    }
}

void half_full(void) {
    grow_old();
    fill(&victim, &first_run, 0, HELD);
    fill(&survivor, &second_run, 1, 14);
    crowd(&written_run, 2, RUN);
}

void almost_empty(void) {
    fill(&victim, &first_run, 0, HELD);
    fill(&survivor, &second_run, 1, 2);
    crowd(&written_run, 2, RUN);
}

void full(void) {
    fill(&victim, &first_run, 0, HELD);
    fill(&survivor, &second_run, 1, PAGES - HELD);
    crowd(&written_run, 2, RUN);
}

static void reserved(uint32_t shards) {
    half_full();
    CHECK_EQ(prompt_reserve(&victim, &written_run, NS, shards), RUN);
}

void reserved_one(void) { reserved(1); }
void reserved_two(void) {
    reserved(2);
    prompt_publish(&victim, &written_run, 1);
}

void abandoned(void) { /* pages that are doomed, and nobody pins any more */
    fill(&victim, &first_run, 0, HELD);
    fill(&survivor, &second_run, 1, PAGES - HELD - RUN);
    crowd(&written_run, 2, RUN);
    crowd(&other_run, 3, RUN);
    CHECK_EQ(prompt_reserve(&survivor, &other_run, NS, 1), RUN);
    CHECK_EQ(lci_abandon(survivor.h, other_run.op.rid, other_run.op.gen, BLOCKING), LC_OK);
    prompt_unpin(&survivor, &other_run);
}

/* The second run's end is a page whose parent has been doomed while it was written. */
static void orphaned(void) {
    half_full();
    crowd(&written_run, 2, RUN);
    prompt *front = &other_run, *whole = &second_run;
    crowd(front, 3, 4);
    CHECK_EQ(prompt_reserve(&survivor, front, NS, 1), 4);
    crowd(whole, 3, 5);
    CHECK_EQ(prompt_reserve(&late, whole, NS, 1), 1);
    prompt_publish(&late, whole, 0);
    prompt_unpin(&late, whole);
    CHECK_EQ(lci_abandon(survivor.h, front->op.rid, front->op.gen, BLOCKING), LC_OK);
    prompt_unpin(&survivor, front);
}

void orphan(void) {
    late = second;
    orphaned();
    late = (client){.life = -1};
    written_run = other_run; /* what was abandoned is written anew, in front of what is there */
    written_run.n = 4;
}

/* The same, and what was abandoned has been written again, in the same pages. */
void orphan_behind(void) {
    static prompt front;
    lc_txn t;
    orphan();
    CHECK_EQ(lci_lock(survivor.h, &t, LCI_OP_COLLECT, BLOCKING), LC_OK);
    CHECK_EQ(lci_collect_doomed(survivor.h, &t, 4), 4);
    CHECK_EQ(lci_unlock(survivor.h, &t), LC_OK);
    fill(&survivor, &front, 3, 4);
    crowd(&written_run, 2, RUN);
}

void follow_present(void) { /* some of its keys are there already */
    half_full();
    crowd(&other_run, 4, RUN + 4);
    memcpy(other_run.keys, second_run.keys, 4 * sizeof *other_run.keys);
    memcpy(written_run.keys, other_run.keys + 4, RUN * sizeof *written_run.keys);
}

void behind_present(void) { /* what it writes hangs on a page that stays */
    follow_present();
    CHECK_EQ(prompt_reserve(&victim, &other_run, NS, 1), RUN);
    written_run.op = other_run.op;
}

void under_quota(void) {
    lci_ns_ref ns;
    half_full();
    CHECK_EQ(lci_namespace_open(survivor.h, "", "", HELD + 14 + 2, &ns, BLOCKING), LC_OK);
}

/* Keys of one bucket: its chain has no room for another. */
static void crowd_one(prompt *p, uint32_t number, uint32_t n) {
    prompt_make(p, number, n);
    for (uint32_t i = 0; i < n; i++) p->keys[i].lo = (p->keys[i].lo | 127) ^ 64;
}

void full_chain(void) {
    fill(&victim, &first_run, 0, HELD);
    crowd_one(&second_run, 1, LC_CHAIN_MAX);
    CHECK_EQ(prompt_reserve(&survivor, &second_run, NS, 1), LC_CHAIN_MAX);
    prompt_publish(&survivor, &second_run, 0);
    prompt_unpin(&survivor, &second_run);
    crowd_one(&written_run, 2, 1);
}

/* Pages that were used long before others: the wheel of the queue has to turn. */
void long_ago(void) {
    fill(&victim, &first_run, 0, HELD);
    for (uint32_t i = 0; i < 5; i++) {
        fill(&survivor, i ? &other_run : &second_run, 20 + i, 8);
        atomic_fetch_add(&survivor.h->root->clock, UINT64_C(1) << (9 * i));
    }
    crowd(&written_run, 2, RUN);
}

/* Ticks of more than 32 bits, where the queue's present has not been yet. */
void far_ahead(void) {
    half_full();
    evict(&survivor, PAGES);
    atomic_fetch_add(&survivor.h->root->clock, UINT64_C(1) << 40);
    fill(&victim, &first_run, 0, HELD);
    fill(&survivor, &second_run, 1, 14);
}

void end_of(client *c) {
    uint32_t slot = c->slot;
    client_die(c);
    c->slot = slot;
}

/* A client that is dead: it was writing and held a lease. */
void someone_died(void) {
    half_full();
    late = client_join(&real);
    crowd(&other_run, 3, 5);
    CHECK_EQ(prompt_reserve(&late, &other_run, NS, 1), 5);
    CHECK_EQ(match(&late, &second_run, &lent), second_run.n);
    end_of(&late);
}

/* It had published all that it wrote, and nobody has collected it: not even its bit is set. */
void someone_had_published(void) {
    someone_died();
    lci_reservation *r = &survivor.h->res[other_run.op.rid];
    lc_store(&r->shard[0], lc_load(&r->shard[0]) | LCI_SHARD_DONE);
}

uint64_t bit(const client *c) { return UINT64_C(1) << c->slot; }

static void give_lease(client *c, uint64_t adopters) {
    CHECK_EQ(match(c, &second_run, &lent), second_run.n);
    CHECK_EQ(lci_ticket_give(c->h, lent.pages, lent.head.held, LC_NIL, 0, adopters, FOREVER,
                             &ticket, BLOCKING), LC_OK);
    CHECK_EQ(lci_release(c->h, &lent.head), LC_OK);
}

void someone_had_given(void) {
    half_full();
    late = client_join(&real);
    give_lease(&late, bit(&survivor));
    end_of(&late);
}

void someone_should_adopt(void) {
    half_full();
    late = client_join(&real);
    give_lease(&victim, bit(&late));
    end_of(&late);
}

/* A ticket is over since its adopter's verdict, and nobody has freed it: the next is given in its
 * record. */
void settled_behind_drop(void) {
    half_full();
    give_lease(&victim, bit(&survivor));
    CHECK_EQ(adopt_as(&survivor, 0), second_run.n);
    CHECK_EQ(lci_release(survivor.h, &lent.head), LC_OK);
    CHECK_EQ(lci_ticket_drop(victim.h, &ticket, BLOCKING), LC_OK);
    CHECK_EQ(lci_ticket_done(survivor.h, &ticket, 1), LC_OK);
    CHECK_EQ(match(&victim, &second_run, &lent), second_run.n);
}

void given_to_victim(void) {
    half_full();
    give_lease(&survivor, bit(&victim));
}

/* The victim owns the reservation, the survivor is to write its second shard. */
void given_shard(void) {
    reserved(2);
    CHECK_EQ(lci_ticket_give(victim.h, written_run.fresh, RUN, written_run.op.rid,
                             written_run.op.gen, bit(&survivor), FOREVER, &ticket, BLOCKING),
             LC_OK);
}

int adopt_as(client *c, uint32_t shard) {
    uint32_t rid, rgen;
    memset(&lent, 0, sizeof lent);
    return lci_adopt(c->h, &ticket, shard, &lent.head.held, lent.pages, MAX_KEYS, &rid, &rgen,
                     BLOCKING);
}

void adopted(void) {
    given_to_victim();
    CHECK_EQ(adopt_as(&victim, 0), second_run.n);
}

/* The victim gave a ticket, and nobody needs it any more. */
void adopted_and_done(void) {
    half_full();
    give_lease(&victim, bit(&survivor));
    CHECK_EQ(adopt_as(&survivor, 0), second_run.n);
    CHECK_EQ(lci_release(survivor.h, &lent.head), LC_OK);
    CHECK_EQ(lci_ticket_done(survivor.h, &ticket, 1), LC_OK);
}
