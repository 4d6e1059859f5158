/* How tickets end: in pieces, refused, over before anybody sees it, or with their giver. */
#include "world.h"

static segment s;
static client a, b, c;
static prompt p, q, r;
static lease l, m;
static lci_ticket_ref ref;

static void set_up(uint64_t pages) {
    s = index_make(pages);
    a = client_join(&s);
    b = client_join(&s);
    c = client_join(&s);
}

static void tear_down(void) {
    client_leave(&a);
    client_leave(&b);
    client_leave(&c);
    index_check(&s);
    segment_end(&s);
}

static uint64_t bit(const client *who) { return UINT64_C(1) << who->slot; }

static void doom(client *who, uint32_t rid) {
    lc_txn t;
    CHECK_EQ(lci_lock(who->h, &t, LCI_OP_ABANDON, BLOCKING), LC_OK);
    CHECK(lci_doom_reservation(who->h, &t, rid, 0));
    CHECK_EQ(lci_unlock(who->h, &t), LC_OK);
}

static int give(uint64_t adopters, uint64_t expires) {
    return lci_ticket_give(a.h, l.pages, l.head.held, LC_NIL, 0, adopters, expires, &ref, BLOCKING);
}

static int adopt(client *who, uint32_t shard) {
    uint32_t rid, gen;
    memset(&m, 0, sizeof m);
    return lci_adopt(who->h, &ref, shard, &m.head.held, m.pages, 2 * MAX_KEYS, &rid, &gen,
                     BLOCKING);
}

static void match_all(uint32_t pages) {
    prompt_fill(&a, &q, 1, pages);
    collect(&a);
    CHECK_EQ(match(&a, &q, &l), pages);
}

static uint32_t settle(void) {
    lc_txn t;
    CHECK_EQ(lci_lock(b.h, &t, LCI_OP_TICKET, BLOCKING), LC_OK);
    uint32_t work = lci_settle_tickets(b.h, &t, 256);
    CHECK_EQ(lci_unlock(b.h, &t), LC_OK);
    return work;
}

#define LONG 4500 /* pages of a ticket: more than a step has entries, of those below */

static void long_tickets_are_made_and_settled_in_pieces(void) {
    static int32_t pages[LONG];
    set_up(100);
    match_all(50);
    for (int i = 0; i < LONG; i++) pages[i] = l.pages[i % 50];
    CHECK_EQ(lci_ticket_give(a.h, pages, LONG, LC_NIL, 0, bit(&b), FOREVER, &ref, BLOCKING), LC_OK);
    CHECK_EQ(lci_ticket_size(b.h, &ref), LONG);
    CHECK_EQ(lc_load(lci_pin(a.h, 0, (uint32_t)l.pages[7])), LONG / 50);
    index_check(&s);
    lc_store(&a.h->tickets[ref.index].deadline_ns, 1);
    CHECK(settle() >= LONG);
    CHECK_EQ(lc_load(lci_pin(a.h, 0, (uint32_t)l.pages[7])), 0);
    CHECK_EQ(index_counts(&a).chunks, 0);
    tear_down();
}

static void settled_tickets_are_no_work(void) {
    set_up(100);
    match_all(50);
    CHECK_EQ(give(bit(&b), FOREVER), LC_OK);
    CHECK_EQ(adopt(&b, 0), 50);
    CHECK_EQ(settle(), 0);
    CHECK_EQ(lci_ticket_drop(a.h, &ref, BLOCKING), LC_OK);
    CHECK_EQ(settle(), 0);
    CHECK_EQ(index_counts(&a).tickets, 1); /* its verdict is to come */
    tear_down();
}

static void ticket_with_too_many_pins_leaves_all_as_it_was(void) {
    set_up(100);
    match_all(50);
    _Atomic uint16_t *count = lci_pin(a.h, 0, (uint32_t)l.pages[40]);
    lc_store(count, UINT16_MAX); /* as if many tickets held it */
    CHECK_EQ(give(bit(&b), FOREVER), LC_E_PINS);
    CHECK_EQ(lc_load(count), UINT16_MAX);
    lc_store(count, 0);
    CHECK_EQ(index_counts(&a).tickets, 0);
    CHECK_EQ(index_counts(&a).chunks, 0);
    tear_down();
}

/* Verdicts take no lock: the tickets are over, and nobody has come by to see it. */
static void tickets_that_are_over_make_room(void) {
    static lci_ticket_ref all[64];
    set_up(64);
    match_all(1);
    for (int i = 0; i < 64; i++) {
        CHECK_EQ(give(bit(&b), FOREVER), LC_OK);
        CHECK_EQ(adopt(&b, 0), 1);
        CHECK_EQ(lci_release(b.h, &m.head), LC_OK);
        CHECK_EQ(lci_ticket_drop(a.h, &ref, BLOCKING), LC_OK);
        all[i] = ref;
    }
    CHECK_EQ(give(bit(&b), FOREVER), LC_E_FULL);
    for (int i = 0; i < 64; i++) CHECK_EQ(lci_ticket_done(b.h, &all[i], 1), LC_OK);
    CHECK_EQ(give(bit(&b), FOREVER), LC_OK);
    CHECK_EQ(index_counts(&a).tickets, 1);
    tear_down();
}

static void verdicts_are_given_once(void) {
    lci_ticket_status status;
    set_up(100);
    match_all(50);
    CHECK_EQ(give(bit(&b) | bit(&c), FOREVER), LC_OK);
    CHECK_EQ(adopt(&b, 0), 50);
    CHECK_EQ(lci_ticket_done(b.h, &ref, 0), LC_OK);
    CHECK_EQ(lci_ticket_done(b.h, &ref, 1), LC_E_TWICE);
    CHECK_EQ(adopt(&c, 0), 50);
    CHECK_EQ(lci_ticket_done(c.h, &ref, 1), LC_OK);
    CHECK_EQ(lci_ticket_done(c.h, &ref, 0), LC_E_TWICE);
    uint64_t failed = bit(&b), done = bit(&c);
    client_die(&c);
    CHECK_EQ(lci_reap_slot(a.h, 3, BLOCKING), 1);
    CHECK_EQ(lci_ticket_poll(a.h, &ref, &status), LC_OK);
    CHECK_EQ(status.failed, failed);
    CHECK_EQ(status.done, done); /* what it had finished stays finished */
    c = client_join(&s);
    tear_down();
}

/* It was given to the client that died, not to whoever has its slot now. */
static void ticket_is_not_for_the_next_in_the_slot(void) {
    set_up(100);
    match_all(50);
    CHECK_EQ(give(bit(&c), FOREVER), LC_OK);
    client_die(&c);
    CHECK_EQ(lci_reap_slot(a.h, 3, BLOCKING), 1);
    c = client_join(&s);
    CHECK_EQ(c.slot, 3);
    CHECK_EQ(adopt(&c, 0), LC_E_TIMEOUT);
    CHECK_EQ(m.head.held, 0);
    tear_down();
}

/* All that its ticket waited for was the giver, who is dead: it goes with it. */
static void ticket_of_a_dead_giver_goes_at_once(void) {
    set_up(100);
    prompt_fill(&b, &q, 1, 50);
    CHECK_EQ(match(&c, &q, &l), 50);
    CHECK_EQ(lci_ticket_give(c.h, l.pages, 50, LC_NIL, 0, bit(&b), FOREVER, &ref, BLOCKING), LC_OK);
    CHECK_EQ(adopt(&b, 0), 50);
    CHECK_EQ(lci_ticket_done(b.h, &ref, 1), LC_OK);
    client_die(&c);
    CHECK_EQ(index_counts(&a).tickets, 1);
    CHECK_EQ(lci_reap_slot(a.h, 3, BLOCKING), 1);
    CHECK_EQ(index_counts(&a).tickets, 0);
    c = client_join(&s);
    tear_down();
}

static lci_ticket_ref give_from(client *giver, uint64_t adopters) {
    lci_ticket_ref made;
    CHECK_EQ(lci_ticket_give(giver->h, l.pages, 50, LC_NIL, 0, adopters, FOREVER, &made, BLOCKING),
             LC_OK);
    return made;
}

static uint64_t failed_of(const lci_ticket_ref *which) {
    lci_ticket_status status;
    CHECK_EQ(lci_ticket_poll(a.h, which, &status), LC_OK);
    return status.failed;
}

/* Tickets' pins of the first page. */
static uint32_t held_back(void) { return lc_load(lci_pin(a.h, 0, (uint32_t)l.pages[0])); }

/* Whoever knows of no more tickets of a dead giver refuses those that it has not adopted; nobody
 * else's, no other's part of them, and once. */
static void orphans_are_refused(void) {
    set_up(100);
    prompt_fill(&a, &q, 1, 50);
    CHECK_EQ(match(&c, &q, &l), 50);
    lci_ticket_ref two = give_from(&c, bit(&a) | bit(&b)), one = give_from(&c, bit(&b));
    lci_ticket_ref taken = give_from(&c, bit(&a) | bit(&b)), dropped = give_from(&c, bit(&b));
    lci_ticket_ref gone = give_from(&c, bit(&b)), others = give_from(&c, bit(&a));
    CHECK_EQ(lci_ticket_revoke(c.h, &gone, BLOCKING), LC_OK);
    CHECK_EQ(lci_ticket_drop(c.h, &dropped, BLOCKING), LC_OK);
    ref = taken;
    CHECK_EQ(adopt(&b, 0), 50);
    uint32_t epoch = lc_load(&a.h->tickets[one.index].giver_epoch), slot = c.slot;
    client_die(&c);
    CHECK_EQ(match(&a, &q, &l), 50);
    lci_ticket_ref living = give_from(&a, bit(&b));
    CHECK_EQ(held_back(), 6);
    CHECK_EQ(lci_ticket_refuse_orphans(b.h, slot, epoch + 1, BLOCKING), 0);
    CHECK_EQ(lci_ticket_refuse_orphans(b.h, slot, epoch, BLOCKING), 3);
    CHECK_EQ(lci_ticket_refuse_orphans(b.h, slot, epoch, BLOCKING), 0);
    CHECK_EQ(held_back(), 4); /* those that only waited for us are over */
    CHECK_EQ(failed_of(&two), bit(&b));
    CHECK_EQ(failed_of(&taken), 0);
    CHECK_EQ(failed_of(&others), 0);
    CHECK_EQ(failed_of(&living), 0);
    ref = two;
    CHECK_EQ(adopt(&b, 0), LC_E_TIMEOUT);
    CHECK_EQ(lci_reap_slot(a.h, slot, BLOCKING), 1); /* nobody is their giver any more */
    CHECK_EQ(lci_ticket_refuse_orphans(a.h, slot, epoch + 1, BLOCKING), 3);
    CHECK_EQ(held_back(), 1);
    ref = living;
    CHECK_EQ(adopt(&b, 0), 50);
    c = client_join(&s);
    tear_down();
}

/* The reservation has ended, and its record is another's of the same client. */
static void ticket_of_an_ended_reservation_takes_no_other(void) {
    set_up(100);
    prompt_make(&p, 1, 10);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 2), 10);
    CHECK_EQ(lci_ticket_give(a.h, p.fresh, 10, p.op.rid, p.op.gen, bit(&b) | bit(&c), FOREVER, &ref,
                             BLOCKING), LC_OK);
    doom(&c, p.op.rid);
    CHECK_EQ(adopt(&b, 1), LC_E_STALE); /* nobody has collected it yet */
    uint32_t rid = p.op.rid;
    CHECK_EQ(lci_abandon(a.h, rid, p.op.gen, BLOCKING), LC_OK);
    prompt_unpin(&a, &p);
    prompt_make(&r, 2, 10);
    CHECK_EQ(prompt_reserve(&a, &r, NS, 2), 10);
    CHECK_EQ(r.op.rid, rid);
    CHECK_EQ(adopt(&b, 1), LC_E_STALE);
    CHECK_EQ(lci_publish(a.h, r.op.rid, r.op.gen, 1, r.fresh, 10), 0); /* still its own */
    prompt_unpin(&a, &r);
    tear_down();
}

static void ticket_whose_list_leads_nowhere_is_damage(void) {
    uint32_t freed = 0;
    set_up(100);
    match_all(50);
    CHECK_EQ(give(bit(&b), 1), LC_OK);
    _Atomic uint32_t *first = &a.h->tickets[ref.index].pages.first;
    uint32_t was = lc_load(first);
    lc_store(first, LC_NIL);
    CHECK_EQ(lci_evict_pages(b.h, 1, &freed, BLOCKING), LC_E_CORRUPT);
    lc_store(first, was);
    CHECK_EQ(lci_ticket_drop(a.h, &ref, BLOCKING), LC_OK);
    tear_down();
}

const test ticket_ending_tests[] = {
    TEST(long_tickets_are_made_and_settled_in_pieces),
    TEST(settled_tickets_are_no_work),
    TEST(ticket_with_too_many_pins_leaves_all_as_it_was),
    TEST(tickets_that_are_over_make_room),
    TEST(verdicts_are_given_once),
    TEST(ticket_is_not_for_the_next_in_the_slot),
    TEST(ticket_of_a_dead_giver_goes_at_once),
    TEST(orphans_are_refused),
    TEST(ticket_of_an_ended_reservation_takes_no_other),
    TEST(ticket_whose_list_leads_nowhere_is_damage),
    END_OF_TESTS,
};
