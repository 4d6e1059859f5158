/* Tickets: pins handed over, of leases and of reservations. */
#include "world.h"

static segment s;
static client a, b, c;
static prompt p;
static lease l, m;
static lci_ticket_ref ref;

static void set_up(void) {
    s = index_make(300);
    a = client_join(&s);
    b = client_join(&s);
    c = client_join(&s);
    prompt_fill(&a, &p, 1, 100);
    collect(&a);
}

static void tear_down(void) {
    client_leave(&a);
    if (b.at) client_leave(&b);
    client_leave(&c);
    index_check(&s);
    segment_end(&s);
}

static uint64_t bit(const client *who) { return UINT64_C(1) << who->slot; }

static int give(const lease *from, uint64_t adopters, uint64_t expires) {
    return lci_ticket_give(a.h, from->pages, from->head.held, LC_NIL, 0, adopters, expires, &ref,
                           BLOCKING);
}

static int adopt(client *who, uint32_t shard, lease *to) {
    uint32_t rid, gen;
    memset(to, 0, sizeof *to);
    return lci_adopt(who->h, &ref, shard, &to->head.held, to->pages, 2 * MAX_KEYS, &rid, &gen,
                     BLOCKING);
}

static lci_ticket_status poll(void) {
    lci_ticket_status status;
    CHECK_EQ(lci_ticket_poll(a.h, &ref, &status), LC_OK);
    return status;
}

static void ticket_of_a_lease(void) {
    set_up();
    CHECK_EQ(match(&a, &p, &l), 100);
    CHECK_EQ(give(&l, bit(&b) | bit(&c), FOREVER), LC_OK);
    CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
    CHECK_EQ(evict(&a, 300), 0); /* on their way they are pinned */
    CHECK_EQ(lci_ticket_size(b.h, &ref), 100);
    index_check(&s);
    CHECK_EQ(adopt(&b, 0, &l), 100);
    CHECK_EQ(l.head.held, 100);
    for (uint32_t i = 0; i < 100; i++) CHECK_EQ(l.pages[i], p.page[i]);
    CHECK_EQ(pins_of(&a, (uint32_t)p.page[0]), 2);
    CHECK_EQ(lc_load(lci_pin(a.h, 0, (uint32_t)p.page[0])), 1);
    CHECK_EQ(adopt(&b, 0, &m), LC_E_TWICE);
    CHECK_EQ(adopt(&a, 0, &m), LC_E_OWNER);
    CHECK_EQ(lci_ticket_done(c.h, &ref, 1), LC_E_OWNER); /* not adopted */
    CHECK_EQ(adopt(&c, 0, &m), 100);
    CHECK_EQ(lc_load(lci_pin(a.h, 0, (uint32_t)p.page[0])), 0); /* all have adopted */
    CHECK_EQ(index_counts(&a).chunks, 0);
    CHECK_EQ(lci_ticket_done(b.h, &ref, 1), LC_OK);
    CHECK_EQ(lci_ticket_done(b.h, &ref, 1), LC_E_TWICE);
    CHECK_EQ(lci_ticket_done(c.h, &ref, 0), LC_OK);
    lci_ticket_status status = poll();
    CHECK_EQ(status.adopters, bit(&b) | bit(&c));
    CHECK_EQ(status.adopted, bit(&b) | bit(&c));
    CHECK_EQ(status.done, bit(&b));
    CHECK_EQ(status.failed, bit(&c));
    CHECK_EQ(status.late, 0);
    CHECK_EQ(lci_ticket_drop(b.h, &ref, BLOCKING), LC_E_OWNER);
    CHECK_EQ(lci_ticket_drop(a.h, &ref, BLOCKING), LC_OK);
    CHECK_EQ(index_counts(&a).tickets, 0);
    CHECK_EQ(lci_ticket_drop(a.h, &ref, BLOCKING), LC_E_STALE);
    CHECK_EQ(lci_ticket_poll(a.h, &ref, &status), LC_E_STALE);
    CHECK_EQ(lci_ticket_size(a.h, &ref), LC_E_STALE);
    CHECK_EQ(adopt(&b, 0, &m), LC_E_STALE);
    CHECK_EQ(lci_ticket_done(b.h, &ref, 1), LC_E_STALE);
    tear_down();
}

/* Row 0 keeps what is pinned, and nothing else. */
static void ticket_of_what_is_not_pinned_is_refused(void) {
    set_up();
    CHECK_EQ(match(&b, &p, &l), 100); /* by another */
    CHECK_EQ(give(&l, bit(&b), FOREVER), LC_E_OWNER);
    CHECK_EQ(index_counts(&a).tickets, 0);
    CHECK_EQ(pins_of(&a, (uint32_t)p.page[0]), 1);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    tear_down();
}

static void ticket_dropped_before_it_was_adopted(void) {
    set_up();
    CHECK_EQ(match(&a, &p, &l), 100);
    CHECK_EQ(give(&l, bit(&b), FOREVER), LC_OK);
    CHECK_EQ(lci_ticket_drop(a.h, &ref, BLOCKING), LC_OK);
    CHECK_EQ(index_counts(&a).tickets, 1); /* its adopter may still come */
    CHECK_EQ(adopt(&b, 0, &m), 100);
    CHECK_EQ(lci_ticket_done(b.h, &ref, 1), LC_OK);
    collect(&c);
    CHECK_EQ(index_counts(&a).tickets, 0);
    tear_down();
}

static void ticket_revoked(void) {
    set_up();
    CHECK_EQ(match(&a, &p, &l), 100);
    CHECK_EQ(give(&l, bit(&b) | bit(&c), FOREVER), LC_OK);
    CHECK_EQ(adopt(&b, 0, &m), 100);
    CHECK_EQ(lci_ticket_revoke(b.h, &ref, BLOCKING), LC_E_OWNER);
    CHECK_EQ(lci_ticket_revoke(a.h, &ref, BLOCKING), LC_OK);
    CHECK_EQ(lci_ticket_revoke(a.h, &ref, BLOCKING), LC_E_OWNER);
    CHECK_EQ(poll().failed, bit(&c));
    lease other;
    CHECK_EQ(adopt(&c, 0, &other), LC_E_TIMEOUT);
    CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
    CHECK_EQ(lci_release(b.h, &m.head), LC_OK);
    CHECK_EQ(evict(&c, 300), 100); /* it pins nothing any more */
    CHECK_EQ(index_counts(&a).tickets, 1);
    CHECK_EQ(lci_ticket_done(b.h, &ref, 1), LC_OK);
    collect(&c);
    CHECK_EQ(index_counts(&a).tickets, 0);
    tear_down();
}

static void ticket_ends_at_its_deadline(void) {
    set_up();
    CHECK_EQ(match(&a, &p, &l), 100);
    CHECK_EQ(give(&l, bit(&b), 1), LC_OK); /* long ago */
    CHECK_EQ(poll().late, 1);
    CHECK_EQ(adopt(&b, 0, &m), LC_E_TIMEOUT);
    CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
    CHECK_EQ(evict(&c, 300), 100);
    CHECK_EQ(lci_ticket_drop(a.h, &ref, BLOCKING), LC_OK);
    CHECK_EQ(index_counts(&a).tickets, 0);
    tear_down();
}

static void ticket_of_a_reservation_carries_its_shards(void) {
    uint32_t rid, gen;
    set_up();
    prompt_make(&p, 2, 50);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 3), 50);
    CHECK_EQ(lci_ticket_give(a.h, p.fresh, 50, p.op.rid, p.op.gen, bit(&b) | bit(&c), FOREVER, &ref,
                             BLOCKING), LC_OK);
    CHECK_EQ(adopt(&b, 3, &l), LC_E_RANGE);
    CHECK_EQ(adopt(&b, LCI_SHARDS, &l), LC_E_RANGE);
    memset(&l, 0, sizeof l);
    CHECK_EQ(lci_adopt(b.h, &ref, 1, &l.head.held, l.pages, 50, &rid, &gen, BLOCKING), 50);
    CHECK_EQ(rid, p.op.rid);
    CHECK_EQ(gen, p.op.gen);
    CHECK_EQ(adopt(&c, 1, &m), LC_E_OWNER); /* adopted by b */
    CHECK_EQ(m.head.held, 0);
    CHECK_EQ(lci_publish(a.h, rid, gen, 1, p.fresh, 50), LC_E_OWNER);
    CHECK_EQ(lci_publish(b.h, rid, gen, 1, l.pages, 50), 0);
    CHECK_EQ(adopt(&c, 1, &m), LC_E_TWICE); /* published */
    CHECK_EQ(adopt(&c, 2, &m), 50);
    CHECK_EQ(lci_publish(c.h, rid, gen, 2, m.pages, 50), 0);
    CHECK_EQ(lci_publish(a.h, rid, gen, 0, p.fresh, 50), 1);
    CHECK_EQ(peek(&b, &p), 50);
    prompt_unpin(&a, &p);
    CHECK_EQ(lci_ticket_drop(a.h, &ref, BLOCKING), LC_OK);
    tear_down();
}

static void ticket_of_a_reservation_that_ended(void) {
    set_up();
    prompt_make(&p, 2, 50);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 2), 50);
    CHECK_EQ(lci_ticket_give(a.h, p.fresh, 50, p.op.rid, p.op.gen, bit(&b), FOREVER, &ref,
                             BLOCKING), LC_OK);
    CHECK_EQ(lci_abandon(a.h, p.op.rid, p.op.gen, BLOCKING), LC_OK);
    CHECK_EQ(adopt(&b, 0, &l), LC_E_STALE);
    CHECK_EQ(l.head.held, 0);
    prompt_unpin(&a, &p);
    CHECK_EQ(lc_load(lci_pin(a.h, 0, (uint32_t)p.page[0])), 1);
    tear_down();
    /* The giver has left: the ticket is dropped, and lives for b alone, which has left as well. */
}

static void ticket_adopted_with_too_many_pins_takes_nothing(void) {
    set_up();
    prompt_make(&p, 2, 50);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 2), 50);
    CHECK_EQ(lci_ticket_give(a.h, p.fresh, 50, p.op.rid, p.op.gen, bit(&b), FOREVER, &ref,
                             BLOCKING), LC_OK);
    lc_store(lci_pin(b.h, b.slot, (uint32_t)p.page[30]), UINT16_MAX);
    CHECK_EQ(adopt(&b, 1, &l), LC_E_PINS);
    CHECK_EQ(pins_of(&b, (uint32_t)p.page[29]), 2);
    lc_store(lci_pin(b.h, b.slot, (uint32_t)p.page[30]), 0);
    CHECK_EQ(poll().adopted, 0);
    CHECK_EQ(adopt(&b, 1, &l), 50); /* the shard went back as well */
    tear_down();
}

static void ticket_is_refused(void) {
    lci_ticket_ref good, wrong;
    lci_ticket_status status;
    set_up();
    CHECK_EQ(match(&a, &p, &l), 100);
    int32_t kept = l.pages[99];
    l.pages[99] = 300;
    CHECK_EQ(give(&l, bit(&b), FOREVER), LC_E_RANGE);
    l.pages[99] = kept;
    lc_store(lci_pin(a.h, 0, (uint32_t)l.pages[70]), UINT16_MAX); /* as if many tickets held it */
    CHECK_EQ(give(&l, bit(&b), FOREVER), LC_E_PINS);
    lc_store(lci_pin(a.h, 0, (uint32_t)l.pages[70]), 0);
    CHECK_EQ(index_counts(&a).tickets, 0);
    index_check(&s);
    CHECK_EQ(give(&l, bit(&b), FOREVER), LC_OK);
    good = wrong = ref;
    wrong.cache++; /* of another cache */
    CHECK_EQ(lci_ticket_poll(a.h, &wrong, &status), LC_E_MISSING);
    wrong = good;
    wrong.index = a.h->ticket_count;
    CHECK_EQ(lci_ticket_size(a.h, &wrong), LC_E_MISSING);
    CHECK_EQ(lci_ticket_drop(a.h, &wrong, BLOCKING), LC_E_MISSING);
    CHECK_EQ(lci_ticket_done(b.h, &wrong, 1), LC_E_MISSING);
    client r = reader_join(&s);
    uint32_t rid, gen;
    CHECK_EQ(lci_adopt(r.h, &ref, 0, &m.head.held, m.pages, 100, &rid, &gen, BLOCKING),
             LC_E_READONLY);
    CHECK_EQ(lci_ticket_poll(r.h, &ref, &status), LC_OK);
    client_forget(&r);
    CHECK_EQ(lci_adopt(b.h, &ref, 0, &m.head.held, m.pages, 99, &rid, &gen, BLOCKING),
             LC_E_CORRUPT); /* less room than it says it needs */
    CHECK_EQ(lci_ticket_drop(a.h, &ref, BLOCKING), LC_OK);
    tear_down();
}

static void tickets_run_out(void) {
    static lci_ticket_ref many[512];
    set_up();
    p.n = 1;
    CHECK_EQ(match(&a, &p, &l), 1);
    uint32_t count = a.h->ticket_count;
    CHECK(count == 300 && lc_load(&a.h->root->ticket_end) == 0);
    for (uint32_t i = 0; i < count; i++) {
        CHECK_EQ(give(&l, bit(&b), FOREVER), LC_OK);
        CHECK_EQ(ref.index, i);
        many[i] = ref;
    }
    CHECK_EQ(give(&l, bit(&b), FOREVER), LC_E_FULL);
    CHECK_EQ(lc_load(lci_pin(a.h, 0, (uint32_t)l.pages[0])), count);
    CHECK_EQ(lc_load(&a.h->root->ticket_end), count);
    index_check(&s);
    ref = many[100];
    CHECK_EQ(adopt(&b, 0, &m), 1);
    CHECK_EQ(lci_ticket_done(b.h, &ref, 1), LC_OK);
    CHECK_EQ(lci_ticket_drop(a.h, &ref, BLOCKING), LC_OK);
    CHECK_EQ(give(&l, bit(&b), FOREVER), LC_OK);
    CHECK_EQ(ref.index, many[100].index);
    tear_down();
}

static uint32_t end_after_drop(const lci_ticket_ref *of) {
    CHECK_EQ(lci_ticket_drop(a.h, of, BLOCKING), LC_OK);
    CHECK_EQ(lci_ticket_revoke(a.h, of, BLOCKING), LC_E_STALE); /* it has ended */
    index_check(&s);
    return lc_load(&a.h->root->ticket_end);
}

/* A scan of tickets looks no further than the highest in use. */
static void scans_end_at_the_highest_ticket(void) {
    lci_ticket_ref given[4];
    set_up();
    CHECK_EQ(match(&a, &p, &l), 100);
    for (int i = 0; i < 4; i++) {
        CHECK_EQ(give(&l, 0, FOREVER), LC_OK); /* for no client: ends when it is dropped */
        given[i] = ref;
        CHECK_EQ(lc_load(&a.h->root->ticket_end), ref.index + 1);
    }
    CHECK_EQ(end_after_drop(&given[1]), 4);
    CHECK_EQ(end_after_drop(&given[2]), 4);
    CHECK_EQ(end_after_drop(&given[3]), 1); /* past those that had ended before */
    CHECK_EQ(give(&l, 0, FOREVER), LC_OK);
    CHECK_EQ(ref.index, 1);
    CHECK_EQ(lc_load(&a.h->root->ticket_end), 2);
    CHECK_EQ(end_after_drop(&given[0]), 2);
    CHECK_EQ(give(&l, 0, FOREVER), LC_OK);
    CHECK(ref.index == 0 && lc_load(&a.h->root->ticket_end) == 2);
    lc_store(&a.h->root->ticket_end, UINT32_MAX); /* damage: no further than the records */
    CHECK_EQ(evict(&a, 1), 0); /* all are pinned */
    lc_store(&a.h->root->ticket_end, 2);
    tear_down();
}

/* Chunks run out in the middle of a ticket: it is taken back, and nothing of it stays. */
static void ticket_without_chunks_is_taken_back(void) {
    set_up();
    CHECK_EQ(match(&a, &p, &l), 100);
    a.h->chunk_count = 1;
    CHECK_EQ(give(&l, bit(&b), FOREVER), LC_E_FULL);
    a.h->chunk_count = (uint32_t)a.h->geometry.chunks;
    CHECK_EQ(index_counts(&a).tickets, 0);
    CHECK_EQ(index_counts(&a).chunks, 0);
    CHECK_EQ(lc_load(lci_pin(a.h, 0, (uint32_t)l.pages[0])), 0);
    index_check(&s);
    CHECK_EQ(give(&l, bit(&b), FOREVER), LC_OK);
    CHECK_EQ(lci_ticket_drop(a.h, &ref, BLOCKING), LC_OK);
    tear_down();
}

static void ticket_of_the_dead(void) {
    set_up();
    CHECK_EQ(match(&a, &p, &l), 100);
    CHECK_EQ(give(&l, bit(&b) | bit(&c), FOREVER), LC_OK);
    CHECK_EQ(adopt(&b, 0, &m), 100);
    uint64_t dead = bit(&b);
    client_die(&b);
    CHECK_EQ(lci_reap_slot(a.h, 2, BLOCKING), 1);
    lci_ticket_status status = poll();
    CHECK_EQ(status.failed, dead);
    CHECK_EQ(status.adopted, dead);
    CHECK_EQ(pins_of(&a, (uint32_t)p.page[0]), 2);
    index_check(&s);
    CHECK_EQ(lci_ticket_drop(a.h, &ref, BLOCKING), LC_OK);
    tear_down();
}

static void ticket_notices_damage(void) {
    set_up();
    CHECK_EQ(match(&a, &p, &l), 100);
    CHECK_EQ(give(&l, bit(&b), FOREVER), LC_OK);
    lci_ticket *k = &a.h->tickets[ref.index];
    lci_chunk *chunk = &a.h->chunks[lc_load(&k->pages.first)];
    _Atomic uint32_t *damage[] = {&chunk->count, &chunk->page[5]};
    for (int i = 0; i < 2; i++) {
        uint32_t old = lc_load(damage[i]);
        lc_store(damage[i], i ? 300 : 63);
        CHECK_EQ(adopt(&b, 0, &m), LC_E_CORRUPT);
        lc_store(&k->deadline_ns, 1);
        uint32_t freed = 0;
        CHECK_EQ(lci_evict_pages(c.h, 1, &freed, BLOCKING), LC_E_CORRUPT);
        lc_store(&k->deadline_ns, FOREVER);
        lc_store(damage[i], old);
    }
    index_check(&s);
    lc_store(lci_pin(a.h, 0, (uint32_t)l.pages[0]), 0); /* row 0 counts one less than is listed */
    CHECK_EQ(index_broken(&s), 25);
    CHECK_EQ(adopt(&b, 0, &m), LC_E_CORRUPT);
    lc_store(lci_pin(a.h, 0, (uint32_t)l.pages[0]), 1);
    tear_down();
}

const test ticket_tests[] = {
    TEST(ticket_of_a_lease),
    TEST(ticket_of_what_is_not_pinned_is_refused),
    TEST(ticket_dropped_before_it_was_adopted),
    TEST(ticket_revoked),
    TEST(ticket_ends_at_its_deadline),
    TEST(ticket_of_a_reservation_carries_its_shards),
    TEST(ticket_of_a_reservation_that_ended),
    TEST(ticket_adopted_with_too_many_pins_takes_nothing),
    TEST(ticket_is_refused),
    TEST(tickets_run_out),
    TEST(scans_end_at_the_highest_ticket),
    TEST(ticket_without_chunks_is_taken_back),
    TEST(ticket_of_the_dead),
    TEST(ticket_notices_damage),
    END_OF_TESTS,
};
