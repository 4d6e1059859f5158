/* gaps: what mutants survived that changed what a user can see, until these tests were written. */
#include "world.h"

#include <stdio.h>
#include <unistd.h>

static segment s;
static client a, b;
static prompt p, q;
static lease l;

static void set_up(uint64_t pages) {
    s = index_make(pages);
    a = client_join(&s);
    b = client_join(&s);
    memset(&l, 0, sizeof l);
}

static void tear_down(void) {
    client_leave(&a);
    client_leave(&b);
    index_check(&s);
    segment_end(&s);
}

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

/* ------------------------------------------------------------------ what has ended */

/* A reservation is doomed, and whoever did that has collected nothing of it yet. */
static void doomed_reservation_is_not_published(void) {
    lc_txn t;
    set_up(100);
    prompt_make(&p, 1, 10);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 2), 10);
    CHECK_EQ(lci_publish(a.h, p.op.rid, p.op.gen, 1, p.fresh, 10), 0);
    CHECK_EQ(lci_lock(b.h, &t, LCI_OP_ABANDON, BLOCKING), LC_OK);
    CHECK(lci_doom_reservation(b.h, &t, p.op.rid));
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

/* ------------------------------------------------------------------ repair */

static void repair_counts_records(void) {
    lci_ticket_ref ref;
    set_up(60);
    prompt_fill(&a, &p, 1, 10);
    CHECK_EQ(match(&a, &p, &l), 10);
    CHECK_EQ(lci_ticket_give(a.h, l.pages, 10, LC_NIL, 0, 2, FOREVER, &ref, BLOCKING), LC_OK);
    prompt_make(&q, 2, 10);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 10);
    lci_root *r = a.h->root;
    lc_store(&r->ticket_used, 0);
    lc_store(&r->res_used, 7);
    lc_store(&r->clearing, 3);
    CHECK(index_broken(&s));
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
    index_check(&s);
    CHECK_EQ(lc_load(&r->ticket_used), 1);
    CHECK_EQ(lc_load(&r->clearing), 0);
    prompt_publish(&b, &q, 0);
    prompt_unpin(&b, &q);
    CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
    tear_down();
}

static void repair_of_pages_used_in_the_future(void) {
    set_up(60);
    prompt_fill(&a, &p, 1, 20);
    for (int i = 0; i < 20; i++)
        lc_store(&a.h->pages[p.page[i]].used, (UINT64_C(1) << 40) << LCI_TICK_SHIFT);
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    CHECK_EQ(evict(&b, 60), 20);
    tear_down();
}

static const test tests[] = {
    TEST(reservations_are_used_again),
    TEST(tickets_begin_clean),
    TEST(epochs_move_on),
    TEST(doomed_reservation_is_not_published),
    TEST(abandoning_leaves_pages_that_are_anothers),
    TEST(clear_goes_on_behind_what_one_hold_looks_at),
    TEST(whoever_waits_is_told),
    TEST(wheel_turns_beyond_32_bits),
    TEST(repair_counts_records),
    TEST(repair_of_pages_used_in_the_future),
    END_OF_TESTS,
};

int main(int argc, char **argv) {
    for (const test *one = tests; one->name; one++) {
        if (argc > 1 && !strstr(one->name, argv[1])) continue;
        check_running = one->name;
        alarm(20);
        one->run();
    }
    return 0;
}
