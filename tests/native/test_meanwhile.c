/* Somebody else is faster, between two looks of a call: the call is told so, and holds nothing that
 * is not its own. Without pause points compiled in there is nothing here. */
#include "pair.h"

#ifdef LC_PAUSE_POINTS

static void pin_it(void) { CHECK_EQ(lci_pin_one(b.h, (uint32_t)p.page[0]), LC_OK); }

/* Pinned while it was marked, it counts as used just now: another goes before it. */
static void a_page_that_came_back_is_young(void) {
    lc_txn t;
    set_up_lru(64);
    prompt_fill(&a, &p, 1, 1);
    prompt_fill(&a, &q, 2, 1);
    collect(&a);
    CHECK_EQ(lci_lock(a.h, &t, LCI_OP_EVICT, BLOCKING), LC_OK);
    lci_eviction e = {.since = lci_next_tick(a.h)};
    play(LC_AT_EVICT_MARKED, pin_it);
    CHECK_EQ(lci_evict(a.h, &t, &e, 1), 0);
    check_played();
    CHECK_EQ(lci_unpin_one(b.h, (uint32_t)p.page[0]), LC_OK);
    lci_step(&t);
    CHECK_EQ(lci_evict(a.h, &t, &e, 1), 1);
    CHECK_EQ(lci_unlock(a.h, &t), LC_OK);
    CHECK_EQ(peek(&b, &p), 1);
    tear_down();
}

static uint32_t seen;
static void look_at_it(void) { seen = peek(&b, &p); }

/* What is pinned before the evictor looks is never marked: no lookup misses it. */
static void a_pinned_page_is_never_marked(void) {
    for (uint32_t leaf = 0; leaf < 2; leaf++) { /* a page of its own, or one that others hang on */
        uint32_t n = leaf ? 1 : 10, kept = leaf ? 1 : 5;
        set_up(64);
        prompt_fill(&a, &p, 1, n);
        prompt_fill(&a, &q, 2, 1);
        uint32_t pinned = (uint32_t)p.page[kept - 1];
        CHECK_EQ(lci_pin_one(b.h, pinned), LC_OK); /* not used: as old as what hangs on it */
        p.n = kept;
        play(LC_AT_EVICT_MARKED, look_at_it);
        CHECK_EQ(evict(&a, 64), n - kept + 1);
        check_played();
        CHECK_EQ(seen, kept);
        CHECK_EQ(lci_unpin_one(b.h, pinned), LC_OK);
        tear_down();
    }
}

static uint32_t all_pins(void) {
    uint32_t pins = 0;
    for (uint32_t page = 0; page < s.pages; page++) pins += pins_of(&a, page);
    return pins;
}

static void evict_all(void) { CHECK_EQ(evict(&b, 64), 1); }

static void a_page_that_went_before_it_was_pinned_is_written_anew(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 1);
    play(LC_AT_WALK_NEXT, evict_all);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 1);
    check_played();
    CHECK_EQ(all_pins(), 1);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    tear_down();
}

static void clear_it(void) { CHECK_EQ(lci_clear(b.h, NS, BLOCKING), LC_OK); }

static void a_namespace_cleared_before_the_lock_gets_no_pages(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 1);
    prompt_make(&p, 1, 3);
    play(LC_AT_WALK_NEXT, clear_it);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), LC_E_CLEARED);
    check_played();
    index_check(&s);
    prompt_unpin(&a, &p);
    tear_down();
}

static void abandon_it(void) {
    CHECK_EQ(lci_abandon(b.h, p.op.rid, p.op.gen, BLOCKING), LC_OK);
    CHECK_EQ(index_counts(&b).reservations, 0);
}

/* With a shard to come the publisher learns that it was in vain; with none the abandoning was, and
 * takes in what is published instead. */
static void a_publisher_is_told_that_others_ended_it(void) {
    for (uint32_t shards = 1; shards <= 2; shards++) {
        set_up(64);
        prompt_make(&p, 1, 5);
        CHECK_EQ(prompt_reserve(&a, &p, NS, shards), 5);
        play(LC_AT_SHARD_DONE, abandon_it);
        int told = lci_publish(a.h, p.op.rid, p.op.gen, 0, p.fresh, 5);
        check_played();
        CHECK_EQ(told, shards == 1 ? 1 : LC_E_STALE);
        CHECK_EQ(peek(&b, &p), shards == 1 ? 5 : 0);
        prompt_unpin(&a, &p);
        tear_down();
    }
}

static void be_anothers(void) { lc_store(&a.h->res[q.op.rid].gen, q.op.gen); }

/* The record is used again between the look at its generation and the lock. */
static void abandoning_leaves_a_reservation_that_is_anothers(void) {
    set_up(64);
    prompt_make(&p, 1, 5);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 5);
    CHECK_EQ(lci_abandon(a.h, p.op.rid, p.op.gen, BLOCKING), LC_OK);
    prompt_unpin(&a, &p);
    prompt_make(&q, 2, 5);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 5);
    CHECK_EQ(q.op.rid, p.op.rid);
    lc_store(&a.h->res[q.op.rid].gen, p.op.gen); /* not yet */
    play(LC_AT_LOCKED, be_anothers);
    CHECK_EQ(lci_abandon(a.h, p.op.rid, p.op.gen, BLOCKING), LC_OK);
    check_played();
    prompt_publish(&b, &q, 0);
    prompt_unpin(&b, &q);
    CHECK_EQ(peek(&a, &q), 5);
    tear_down();
}

const test meanwhile_tests[] = {
    TEST(a_page_that_came_back_is_young),
    TEST(a_pinned_page_is_never_marked),
    TEST(a_page_that_went_before_it_was_pinned_is_written_anew),
    TEST(a_namespace_cleared_before_the_lock_gets_no_pages),
    TEST(a_publisher_is_told_that_others_ended_it),
    TEST(abandoning_leaves_a_reservation_that_is_anothers),
    END_OF_TESTS,
};

#else
const test meanwhile_tests[] = {END_OF_TESTS};
#endif
