/* What the victim is doing when it dies. Before every scene the first run's HELD first keys are
 * ready and pinned by the survivor; the victim writes `written_run`, if it writes. */
#include "deaths.h"

prompt first_run, second_run, written_run;

static prompt other_run;
static lease lent;
static lci_ticket_ref ticket;

/* Few buckets, so that chains have several links. */
static void crowd(prompt *p, uint32_t number, uint32_t n) {
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

static void half_full(void) {
    grow_old();
    fill(&victim, &first_run, 0, HELD);
    fill(&survivor, &second_run, 1, 14);
    crowd(&written_run, 2, RUN);
}

static void full(void) {
    fill(&victim, &first_run, 0, HELD);
    fill(&survivor, &second_run, 1, PAGES - HELD);
    crowd(&written_run, 2, RUN);
}

static void reserved(uint32_t shards) {
    half_full();
    CHECK_EQ(prompt_reserve(&victim, &written_run, NS, shards), RUN);
}

static void reserved_one(void) { reserved(1); }
static void reserved_two(void) {
    reserved(2);
    prompt_publish(&victim, &written_run, 1);
}

static void abandoned(void) { /* pages that are doomed, and nobody pins any more */
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

static void orphan(void) {
    late = second;
    orphaned();
    late = (client){.life = -1};
    written_run = other_run; /* what was abandoned is written anew, in front of what is there */
    written_run.n = 4;
}

/* The same, and what was abandoned has been written again. */
static void orphan_behind(void) {
    static prompt front;
    orphan();
    fill(&survivor, &front, 3, 4);
    crowd(&written_run, 2, RUN);
}

static void follow_present(void) { /* some of its keys are there already */
    half_full();
    crowd(&other_run, 4, RUN + 4);
    memcpy(other_run.keys, second_run.keys, 4 * sizeof *other_run.keys);
    memcpy(written_run.keys, other_run.keys + 4, RUN * sizeof *written_run.keys);
}

static void under_quota(void) {
    lci_ns_ref ns;
    half_full();
    CHECK_EQ(lci_namespace_open(survivor.h, "", "", HELD + 14 + 2, &ns, BLOCKING), LC_OK);
}

/* Keys of one bucket: its chain has no room for another. */
static void crowd_one(prompt *p, uint32_t number, uint32_t n) {
    prompt_make(p, number, n);
    for (uint32_t i = 0; i < n; i++) p->keys[i].lo = (p->keys[i].lo | 127) ^ 64;
}

static void full_chain(void) {
    fill(&victim, &first_run, 0, HELD);
    crowd_one(&second_run, 1, LC_CHAIN_MAX);
    CHECK_EQ(prompt_reserve(&survivor, &second_run, NS, 1), LC_CHAIN_MAX);
    prompt_publish(&survivor, &second_run, 0);
    prompt_unpin(&survivor, &second_run);
    crowd_one(&written_run, 2, 1);
}

/* Pages that were used long before others: the wheel of the queue has to turn. */
static void long_ago(void) {
    fill(&victim, &first_run, 0, HELD);
    for (uint32_t i = 0; i < 5; i++) {
        fill(&survivor, i ? &other_run : &second_run, 20 + i, 8);
        atomic_fetch_add(&survivor.h->root->clock, UINT64_C(1) << (9 * i));
    }
    crowd(&written_run, 2, RUN);
}

static void dead(client *c) {
    uint32_t slot = c->slot;
    client_die(c);
    c->slot = slot;
}

/* A client that is dead: it was writing and held a lease. */
static void someone_died(void) {
    half_full();
    late = client_join(&real);
    crowd(&other_run, 3, 5);
    CHECK_EQ(prompt_reserve(&late, &other_run, NS, 1), 5);
    CHECK_EQ(match(&late, &second_run, &lent), second_run.n);
    dead(&late);
}

/* It had published all that it wrote, and nobody has collected it: not even its bit is set. */
static void someone_had_published(void) {
    someone_died();
    lci_reservation *r = &survivor.h->res[other_run.op.rid];
    lc_store(&r->shard[0], lc_load(&r->shard[0]) | LCI_SHARD_DONE);
}

static uint64_t bit(const client *c) { return UINT64_C(1) << c->slot; }

static void give_lease(client *c, uint64_t adopters) {
    CHECK_EQ(match(c, &second_run, &lent), second_run.n);
    CHECK_EQ(lci_ticket_give(c->h, lent.pages, lent.head.held, LC_NIL, 0, adopters, FOREVER,
                             &ticket, BLOCKING), LC_OK);
    CHECK_EQ(lci_release(c->h, &lent.head), LC_OK);
}

static void someone_had_given(void) {
    half_full();
    late = client_join(&real);
    give_lease(&late, bit(&survivor));
    dead(&late);
}

static void someone_should_adopt(void) {
    half_full();
    late = client_join(&real);
    give_lease(&victim, bit(&late));
    dead(&late);
}

static void given_to_victim(void) {
    half_full();
    give_lease(&survivor, bit(&victim));
}

/* The victim owns the reservation, the survivor is to write its second shard. */
static void given_shard(void) {
    reserved(2);
    CHECK_EQ(lci_ticket_give(victim.h, written_run.fresh, RUN, written_run.op.rid,
                             written_run.op.gen, bit(&survivor), FOREVER, &ticket, BLOCKING),
             LC_OK);
}

static int adopt_as(client *c, uint32_t shard) {
    uint32_t rid, rgen;
    memset(&lent, 0, sizeof lent);
    return lci_adopt(c->h, &ticket, shard, &lent.head.held, lent.pages, MAX_KEYS, &rid, &rgen,
                     BLOCKING);
}

static void adopted(void) {
    given_to_victim();
    CHECK_EQ(adopt_as(&victim, 0), second_run.n);
}

static void reserve(void) {
    CHECK_EQ(prompt_reserve(&victim, &written_run, NS, 1), written_run.n);
}
static void reserve_more(void) {
    CHECK_EQ(prompt_reserve(&victim, &other_run, NS, 1), RUN);
}
static void reserve_front(void) {
    static prompt whole;
    crowd(&whole, 3, 5);
    CHECK_EQ(prompt_reserve(&victim, &whole, NS, 1), 4);
}
static void reserve_over(void) {
    static prompt whole;
    crowd(&whole, 3, 5);
    CHECK_EQ(prompt_reserve(&victim, &whole, NS, 1), 0);
}

static void publish(void) { prompt_publish(&victim, &written_run, 0); }
static void match_run(void) { CHECK_EQ(match(&victim, &second_run, &lent), second_run.n); }
static void evict_some(void) { CHECK_EQ(evict(&victim, 5), 5); }

static void abandon(void) {
    const lci_reserve_op *op = &written_run.op;
    CHECK_EQ(lci_abandon(victim.h, op->rid, op->gen, BLOCKING), LC_OK);
}

static void matched(void) {
    half_full();
    match_run();
}

static void release(void) { CHECK_EQ(lci_release(victim.h, &lent.head), LC_OK); }

static void give(void) {
    CHECK_EQ(lci_ticket_give(victim.h, lent.pages, lent.head.held, LC_NIL, 0, bit(&survivor),
                             FOREVER, &ticket, BLOCKING), LC_OK);
}

static void adopt(void) { CHECK_EQ(adopt_as(&victim, 0), second_run.n); }
static void done(void) { CHECK_EQ(lci_ticket_done(victim.h, &ticket, 1), LC_OK); }
static void drop(void) { CHECK_EQ(lci_ticket_drop(victim.h, &ticket, BLOCKING), LC_OK); }
static void clear(void) { CHECK_EQ(lci_clear(victim.h, NS, BLOCKING), LC_OK); }
static void reap(void) { CHECK_EQ(lci_reap_slot(victim.h, late.slot, BLOCKING), 1); }
static void repair(void) { CHECK_EQ(lci_repair(victim.h, BLOCKING), LC_OK); }

static void leave(void) {
    CHECK_EQ(lci_leave(victim.h, BLOCKING), LC_OK);
    CHECK_EQ(lcs_slot_release(victim.at), LC_OK);
}

static void join(void) {
    late.slot = second.slot + 1;
    late = client_join(&real);
}

static void open_namespace(void) {
    lci_ns_ref ns;
    CHECK_EQ(lci_namespace_open(victim.h, "w", "t", 7, &ns, BLOCKING), LC_OK);
    CHECK_EQ(lci_namespace_open(victim.h, "w", "t", 9, &ns, BLOCKING), LC_OK);
}

/* Somebody pins the last page of the second run while it is being evicted. */
static void pin_marked(int point) {
    if (point != LC_AT_EVICT_MARKED) return;
    lc_pause_hook = NULL;
    lc_found found;
    lc_key key = second_run.keys[second_run.n - 1];
    lc_dict_find(&survivor.h->dict, key.lo, key.hi, &found);
    CHECK_EQ(lci_pin_one(survivor.h, found.node), LC_OK); /* its prefix stays with it */
}

static void evict_pinned(void) {
    lc_pause_hook = pin_marked;
    CHECK_EQ(evict(&victim, 5), 0);
    CHECK(!lc_pause_hook);
}

const scene scenes[] = {
    {"match", half_full, match_run, NONE, NONE, false},
    {"release", matched, release, NONE, NONE, false},
    {"publish", reserved_one, publish, EITHER, ALL, false},
    {"publish-last", reserved_two, publish, EITHER, ALL, false},
    {"reserve", half_full, reserve, NONE, NONE, false},
    {"abandon", reserved_one, abandon, NONE, NONE, false},
    {"evict", full, evict_some, NONE, NONE, false},
    {"evict-pinned", half_full, evict_pinned, NONE, NONE, true},
    {"evict-old", long_ago, evict_some, NONE, NONE, false},
    {"reserve-evicting", full, reserve, NONE, NONE, false},
    {"reserve-doomed", abandoned, reserve, NONE, NONE, false},
    {"reserve-after-present", follow_present, reserve_more, NONE, NONE, false},
    {"reserve-before-orphan", orphan, reserve_front, NONE, NONE, false},
    {"reserve-over-orphan", orphan_behind, reserve_over, NONE, NONE, false},
    {"reserve-quota", under_quota, reserve, NONE, NONE, false},
    {"reserve-full-chain", full_chain, reserve, NONE, NONE, false},
    {"ticket", matched, give, NONE, NONE, false},
    {"adopt", given_to_victim, adopt, NONE, NONE, false},
    {"done", adopted, done, NONE, NONE, false},
    {"drop", someone_should_adopt, drop, NONE, NONE, false},
    {"reap", someone_died, reap, NONE, NONE, false},
    {"reap-published", someone_had_published, reap, NONE, NONE, false},
    {"reap-giver", someone_had_given, reap, NONE, NONE, false},
    {"reap-adopter", someone_should_adopt, reap, NONE, NONE, false},
    {"give-shard", given_shard, publish, NONE, NONE, false},
    {"leave", reserved_one, leave, NONE, NONE, false},
    {"join", half_full, join, NONE, NONE, false},
    {"namespace", half_full, open_namespace, NONE, NONE, false},
    {"clear", half_full, clear, NONE, NONE, false},
    {"clear-writing", reserved_one, clear, NONE, NONE, false},
    {"repair", abandoned, repair, NONE, NONE, false},
    {0},
};
