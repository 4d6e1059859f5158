/* Gaps in what living clients do. */
#include "gaps.h"

#include <unistd.h>

/* ------------------------------------------------------------------ records are used again */

static void reservations_are_used_again(void) {
    set_up(100);
    for (uint32_t i = 0; i < 3 * a.h->res_count; i++) prompt_fill(&a, &p, i, 2);
    CHECK(lc_load(&a.h->root->res_fresh) < 4);
    tear_down();
}

static void tickets_begin_clean(void) {
    lci_ticket_ref ref;
    lci_ticket_status status;
    uint32_t rid, gen;
    set_up(100);
    uint64_t to_b = UINT64_C(1) << b.slot;
    prompt_fill(&a, &p, 1, 10);
    for (int ok = 0; ok < 3; ok++) {
        CHECK_EQ(match(&a, &p, &l), 10);
        CHECK_EQ(lci_ticket_give(a.h, l.pages, 10, LC_NIL, 0, to_b, FOREVER, &ref, BLOCKING),
                 LC_OK);
        CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
        CHECK_EQ(ref.index, 0); /* the same record each time */
        CHECK_EQ(lci_ticket_poll(a.h, &ref, &status), LC_OK);
        CHECK_EQ(status.adopters, to_b);
        CHECK_EQ(status.adopted | status.done | status.failed, 0);
        CHECK_EQ(lci_adopt(b.h, &ref, 0, &l.head.held, l.pages, 10, &rid, &gen, BLOCKING), 10);
        CHECK_EQ(rid, LC_NIL);
        CHECK_EQ(lci_ticket_done(b.h, &ref, ok), LC_OK);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
        CHECK_EQ(lci_ticket_drop(a.h, &ref, BLOCKING), LC_OK);
        CHECK_EQ(lci_ticket_poll(a.h, &ref, &status), LC_E_STALE);
    }
    tear_down();
}

/* Its pins go in more steps than one. */
static void ticket_of_more_pages_than_the_log_has_entries(void) {
    enum { RUNS = 8, EACH = 600 };
    static lease leases[RUNS];
    static int32_t pages[RUNS * EACH];
    lci_ticket_ref ref;
    set_up(RUNS * EACH);
    CHECK(RUNS * EACH > LCS_LOG_ENTRIES);
    for (uint32_t i = 0; i < RUNS; i++) {
        prompt_fill(&a, &p, i, EACH);
        CHECK_EQ(match(&a, &p, &leases[i]), EACH);
        memcpy(pages + i * EACH, leases[i].pages, EACH * sizeof *pages);
    }
    CHECK_EQ(lci_ticket_give(a.h, pages, RUNS * EACH, LC_NIL, 0, UINT64_C(1) << b.slot, FOREVER,
                             &ref, BLOCKING),
             LC_OK);
    for (uint32_t i = 0; i < RUNS; i++) CHECK_EQ(lci_release(a.h, &leases[i].head), LC_OK);
    CHECK_EQ(pins_of(&a, (uint32_t)pages[0]), 1);
    lc_store(&a.h->tickets[ref.index].deadline_ns, 0); /* its time is over */
    CHECK_EQ(lci_ticket_drop(a.h, &ref, BLOCKING), LC_OK);
    for (uint32_t i = 0; i < RUNS * EACH; i++) CHECK_EQ(pins_of(&a, (uint32_t)pages[i]), 0);
    CHECK_EQ(index_counts(&a).tickets, 0);
    tear_down();
}

static void epochs_move_on(void) {
    set_up(10);
    lcs_client *slot = lcs_client_of(a.at, a.slot);
    uint32_t epoch = lc_load(&slot->epoch);
    CHECK_EQ(a.at->epoch, epoch);
    client_leave(&a);
    CHECK_EQ(lc_load(&slot->epoch), epoch + 1); /* given back */
    a = client_join(&s);
    CHECK_EQ(lc_load(&slot->epoch), epoch + 2); /* taken */
    CHECK_EQ(a.at->epoch, epoch + 2);
    tear_down();
}

static void counters_begin_at_zero(void) {
    set_up(100);
    prompt_fill(&a, &p, 1, 10);
    CHECK_EQ(match(&a, &p, &l), 10);
    prompt_make(&q, 2, 3);
    CHECK_EQ(peek(&a, &q), 0);
    CHECK_EQ(match(&a, &q, &l), 0);
    CHECK_EQ(evict(&a, 100), 0);
    client_leave(&a);
    CHECK_EQ(evict(&b, 4), 4);
    a = client_join(&s);
    const lcs_client *slot = lcs_client_of(a.at, a.slot);
    CHECK_EQ(lc_load(&slot->lookups) + lc_load(&slot->hit_pages) + lc_load(&slot->missed_pages), 0);
    CHECK_EQ(lc_load(&slot->reserved_pages) + lc_load(&slot->published_pages), 0);
    tear_down();
}

/* Whoever is at a slot holds its mending byte, and lets go of it. */
static void slots_are_mended_by_one_at_a_time(void) {
    set_up(100);
    int fd = life_descriptor(&s);
    client other = client_join(&s);
    int64_t byte = LCS_BYTE_MEND + other.slot;
    CHECK_EQ(lcs_byte_held(fd, byte, 1), 0);
    CHECK_EQ(lcs_slot_mend(a.at, other.slot), LC_E_BUSY); /* it lives */
    CHECK_EQ(lcs_byte_held(fd, byte, 1), 0);
    die_as(&other);
    CHECK_EQ(lcs_byte_lock(fd, byte, 1), LC_OK);
    CHECK_EQ(lcs_slot_mend(a.at, other.slot), LC_E_BUSY);
    CHECK_EQ(lcs_slot_free_dead(a.at, other.slot), LC_E_BUSY);
    CHECK_EQ(lcs_byte_unlock(fd, byte), LC_OK);
    CHECK_EQ(lcs_slot_mend(a.at, other.slot), LC_OK);
    CHECK_EQ(lcs_byte_held(fd, byte, 1), 1);
    lcs_slot_mended(a.at, other.slot);
    CHECK_EQ(lcs_slot_free_dead(b.at, other.slot), LC_OK);
    CHECK_EQ(lcs_byte_held(fd, byte, 1), 0);
    CHECK_EQ(lcs_byte_lock(fd, byte, 1), LC_OK);
    client next = client_join(&s);
    CHECK(next.slot != other.slot); /* passed over */
    CHECK_EQ(lcs_byte_unlock(fd, byte), LC_OK);
    client_leave(&next);
    close(fd);
    tear_down();
}

/* ------------------------------------------------------------------ what has ended */

/* A reservation is doomed, and whoever did that has collected nothing of it yet. */
static void doomed_reservation_is_not_published(void) {
    lc_txn t;
    set_up(100);
    prompt_make(&p, 1, 10);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 2), 10);
    CHECK_EQ(lci_publish(a.h, p.op.rid, p.op.gen, 1, p.fresh, 10), 0);
    CHECK_EQ(lci_lock(b.h, &t, LCI_OP_ABANDON, BLOCKING), LC_OK);
    CHECK(lci_doom_reservation(b.h, &t, p.op.rid, 0));
    CHECK_EQ(lci_unlock(b.h, &t), LC_OK);
    CHECK_EQ(lci_publish(a.h, p.op.rid, p.op.gen, 0, p.fresh, 10), LC_E_STALE);
    CHECK_EQ(lci_publish(a.h, p.op.rid, p.op.gen, 1, p.fresh, 10), LC_E_TWICE);
    CHECK_EQ(peek(&a, &p), 0);
    prompt_unpin(&a, &p);
    tear_down();
}

/* Its pages were forgotten with their namespace, freed, and are somebody else's by now. */
static void abandoning_leaves_pages_that_are_anothers(void) {
    lci_ns_ref other;
    set_up(12);
    prompt_make(&p, 1, 10);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 10);
    CHECK_EQ(lci_clear(b.h, NS, BLOCKING), LC_OK);
    prompt_unpin(&a, &p);
    CHECK_EQ(lci_namespace_open(b.h, "w", "t", 0, &other, BLOCKING), LC_OK);
    prompt_make(&q, 2, 10);
    CHECK_EQ(prompt_reserve(&b, &q, other, 1), 10);
    prompt_publish(&b, &q, 0);
    CHECK_EQ(lci_abandon(a.h, p.op.rid, p.op.gen, BLOCKING), LC_OK);
    CHECK_EQ(lci_peek1(b.h, q.keys, 10, other), 10);
    index_check(&s);
    prompt_unpin(&b, &q);
    CHECK_EQ(lci_peek1(b.h, q.keys, 10, other), 10);
    tear_down();
}

/* Most of what it looks at belongs to others. */
static void clear_goes_on_behind_what_one_hold_looks_at(void) {
    lci_ns_ref other;
    set_up(900);
    CHECK_EQ(lci_namespace_open(a.h, "w", "t", 0, &other, BLOCKING), LC_OK);
    prompt_make(&p, 1, 600);
    CHECK_EQ(prompt_reserve(&a, &p, other, 1), 600);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    prompt_fill(&a, &q, 2, 200);
    CHECK_EQ(lci_clear(b.h, NS, BLOCKING), LC_OK);
    CHECK_EQ(index_counts(&a).named, 600);
    CHECK_EQ(index_counts(&a).namespaces_clearing, 0);
    CHECK_EQ(lci_peek1(a.h, p.keys, 600, other), 600);
    tear_down();
}

/* ------------------------------------------------------------------ who waits is told */

static uint32_t last_event;

static void expect_event(void) {
    uint32_t event = lc_load(&a.h->root->event);
    CHECK(event != last_event);
    last_event = event;
}

static void whoever_waits_is_told(void) {
    lci_ticket_ref ref;
    uint32_t rid, gen;
    set_up(60);
    last_event = lc_load(&a.h->root->event);
    prompt_fill(&a, &p, 1, 10);
    expect_event(); /* published */
    prompt_make(&q, 2, 10);
    CHECK_EQ(prompt_reserve(&a, &q, NS, 1), 10);
    CHECK_EQ(lci_abandon(a.h, q.op.rid, q.op.gen, BLOCKING), LC_OK);
    expect_event();
    prompt_unpin(&a, &q);
    CHECK_EQ(match(&a, &p, &l), 10);
    CHECK_EQ(lci_ticket_give(a.h, l.pages, 10, LC_NIL, 0, UINT64_C(1) << b.slot, FOREVER, &ref,
                             BLOCKING), LC_OK);
    CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
    CHECK_EQ(lci_adopt(b.h, &ref, 0, &l.head.held, l.pages, 10, &rid, &gen, BLOCKING), 10);
    CHECK_EQ(lci_ticket_done(b.h, &ref, 1), LC_OK);
    expect_event();
    client other = client_join(&s);
    uint32_t slot = other.slot;
    client_die(&other);
    CHECK_EQ(lci_reap_slot(a.h, slot, BLOCKING), 1);
    expect_event();
    CHECK_EQ(lci_clear(a.h, NS, BLOCKING), LC_OK);
    expect_event();
    client_leave(&b);
    expect_event();
    b = client_join(&s);
    tear_down();
}

/* ------------------------------------------------------------------ eviction */

static void wheel_turns_beyond_32_bits(void) {
    set_up(60);
    for (uint32_t i = 0; i < 10; i++) {
        prompt_fill(&a, &p, i, 5);
        atomic_fetch_add(&a.h->root->clock, UINT64_C(0x60000000));
    }
    for (uint32_t i = 0; i < 10; i++) {
        CHECK_EQ(evict(&b, 5), 5); /* the oldest each time */
        for (uint32_t k = 0; k < 10; k++) {
            prompt_make(&q, k, 5);
            CHECK_EQ(peek(&a, &q), k > i ? 5 : 0);
        }
        index_check(&s);
    }
    tear_down();
}

/* ------------------------------------------------------------------ keys */

static void keys_alike_in_one_half_are_two(void) {
    set_up(60);
    prompt_make(&p, 1, 4);
    for (int i = 1; i < 4; i++) p.keys[i].lo = p.keys[0].lo;
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 4);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    CHECK_EQ(match(&b, &p, &l), 4);
    for (int i = 0; i < 4; i++) CHECK_EQ(l.pages[i], p.page[i]);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    prompt_make(&q, 1, 1);
    q.keys[0].hi = p.keys[0].hi + 1;
    CHECK_EQ(peek(&b, &q), 0);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 1);
    prompt_unpin(&b, &q);
    tear_down();
}

static void publish_p(void) {
    prompt_publish(&a, &p, 0);
}

/* Its first look, before the lock, found them being written. */
static void what_is_published_before_the_lock_is_present(void) {
    set_up(60);
    prompt_make(&p, 1, 8);
    prompt_make(&q, 1, 8);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 8);
    play(LC_AT_LOCKED, publish_p);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 0);
    check_played();
    for (int i = 0; i < 8; i++) {
        CHECK_EQ(q.status[i], LCI_PRESENT);
        CHECK_EQ(q.page[i], p.page[i]);
        CHECK_EQ(pins_of(&b, (uint32_t)q.page[i]), 2);
    }
    prompt_unpin(&a, &p);
    prompt_unpin(&b, &q);
    tear_down();
}

const test gaps[] = {
    TEST(reservations_are_used_again),
    TEST(tickets_begin_clean),
    TEST(ticket_of_more_pages_than_the_log_has_entries),
    TEST(epochs_move_on),
    TEST(counters_begin_at_zero),
    TEST(slots_are_mended_by_one_at_a_time),
    TEST(doomed_reservation_is_not_published),
    TEST(abandoning_leaves_pages_that_are_anothers),
    TEST(clear_goes_on_behind_what_one_hold_looks_at),
    TEST(whoever_waits_is_told),
    TEST(wheel_turns_beyond_32_bits),
    TEST(keys_alike_in_one_half_are_two),
    TEST(what_is_published_before_the_lock_is_present),
    END_OF_TESTS,
};
