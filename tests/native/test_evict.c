/* The eviction queue and who leaves: order, pins, children, bounds. */
#include "pair.h"

/* A tick equal to the present or before it goes into the present's list; a later one into the list
 * of the highest digit in which it differs. */
static void queue_slots(void) {
    CHECK_EQ(lci_queue_slot(5, 5), 5);
    CHECK_EQ(lci_queue_slot(3, 5), 5);
    CHECK_EQ(lci_queue_slot(63, 5), 63);
    CHECK_EQ(lci_queue_slot(64, 5), 64 + 1);
    CHECK_EQ(lci_queue_slot(64 * 64 - 1, 5), 64 + 63);
    CHECK_EQ(lci_queue_slot(64 * 64, 5), 2 * 64 + 1);
    CHECK_EQ(lci_queue_slot(70, 64), 6);
    CHECK_EQ(lci_queue_slot(UINT64_C(1) << 47, 0), 7 * 64 + 32);
    CHECK_EQ(lci_queue_slot(UINT64_C(63) << 42, 0), 7 * 64 + 63);
}

/* Single pages, matched at random, leave in the order of their last use, over many turns. */
static void evict_is_lru(void) {
    enum { PAGES = 200 };
    uint64_t used[PAGES];
    uint32_t random = 1;
    set_up_lru(PAGES);
    for (uint32_t i = 0; i < PAGES; i++) {
        prompt_fill(&a, &p, i, 1);
        used[i] = lci_tick(&a.h->pages[p.page[0]]);
    }
    for (uint32_t i = 0; i < 5000; i++) {
        random = random * 1664525 + 1013904223;
        uint32_t number = (random >> 10) % PAGES;
        prompt_make(&p, number, 1);
        CHECK_EQ(match(&b, &p, &l), 1);
        used[number] = lci_tick(&a.h->pages[l.pages[0]]);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    }
    for (uint32_t left = PAGES; left > 0; left -= 10) {
        CHECK_EQ(evict(&a, 10), 10);
        uint64_t gone = 0, stays = UINT64_MAX;
        for (uint32_t i = 0; i < PAGES; i++) {
            prompt_make(&p, i, 1);
            if (peek(&a, &p)) stays = used[i] < stays ? used[i] : stays;
            else gone = used[i] > gone ? used[i] : gone;
        }
        CHECK(gone < stays);
        index_check(&s);
    }
    CHECK_EQ(evict(&a, 10), 0);
    CHECK_EQ(index_counts(&a).free, PAGES);
    tear_down();
}

/* Leaves first; a run of one call's pages goes on upwards without passing through the queue. */
static void evict_goes_from_the_leaves_upward(void) {
    set_up(100);
    prompt_fill(&a, &p, 1, 40);
    prompt_make(&q, 1, 60);
    for (uint32_t i = 30; i < 60; i++) q.keys[i] = prompt_key(2, i); /* a branch at 30 */
    CHECK_EQ(prompt_reserve(&a, &q, NS, 1), 30);
    prompt_publish(&a, &q, 0);
    prompt_unpin(&a, &q);
    CHECK_EQ(lc_load(&a.h->pages[p.page[29]].children), 2);
    CHECK_EQ(evict(&a, 10), 10); /* the older branch */
    CHECK_EQ(peek(&a, &p), 30);
    CHECK_EQ(peek(&a, &q), 60);
    index_check(&s);
    CHECK_EQ(evict(&a, 35), 35); /* the younger one, then the trunk from its end */
    CHECK_EQ(peek(&a, &q), 25);
    CHECK_EQ(evict(&a, 100), 25);
    tear_down();
}

/* A prefix that was used after its end waits for its own turn. */
static void evict_stops_at_a_prefix_used_since(void) {
    set_up(40);
    prompt_fill(&a, &p, 1, 10);
    prompt_fill(&a, &q, 2, 1);
    p.n = 5;
    CHECK_EQ(match(&b, &p, &l), 5);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(evict(&a, 6), 6);
    CHECK_EQ(peek(&b, &p), 5);
    CHECK_EQ(peek(&b, &q), 0);
    tear_down();
}

static void evict_of_two_namespaces_at_once(void) {
    lci_ns_ref ns;
    set_up(40);
    CHECK_EQ(lci_namespace_open(a.h, "w", "t", 0, &ns, BLOCKING), LC_OK);
    prompt_fill(&a, &p, 1, 5);
    prompt_make(&q, 2, 5);
    CHECK_EQ(prompt_reserve(&a, &q, ns, 1), 5);
    prompt_publish(&a, &q, 0);
    prompt_unpin(&a, &q);
    CHECK_EQ(evict(&b, 10), 10);
    index_check(&s); /* each has no pages left */
    tear_down();
}

static void evict_leaves_what_is_pinned(void) {
    set_up(100);
    prompt_fill(&a, &p, 1, 40);
    p.n = 20;
    CHECK_EQ(match(&b, &p, &l), 20);
    CHECK_EQ(evict(&a, 100), 20);
    CHECK_EQ(peek(&b, &p), 20);
    index_check(&s);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(evict(&a, 100), 20);
    CHECK_EQ(index_counts(&a).queued, 0);
    tear_down();
}

/* A bit without a count is a hint that came to nothing; a count without a bit is not looked at. */
static void evict_looks_into_the_rows_that_bits_name(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 2);
    lci_page *page = &a.h->pages[p.page[1]];
    collect(&a);
    lc_store(&page->pins, UINT64_MAX);
    CHECK(!lci_pinned(a.h, page));
    lc_store(lci_pin(a.h, 63, (uint32_t)p.page[1]), 1);
    CHECK(lci_pinned(a.h, page));
    CHECK_EQ(evict(&a, 64), 0);
    lc_store(lci_pin(a.h, 63, (uint32_t)p.page[1]), 0);
    CHECK_EQ(evict(&a, 64), 2);
    tear_down();
}

static void evict_of_the_quota_takes_the_oldest_of_the_namespace(void) {
    lci_ns_ref small;
    set_up(100);
    prompt_fill(&a, &q, 50, 20); /* older, of another namespace */
    CHECK_EQ(lci_namespace_open(a.h, "w", "small", 10, &small, BLOCKING), LC_OK);
    for (uint32_t i = 0; i < 14; i++) {
        prompt_make(&p, i, 1);
        CHECK_EQ(prompt_reserve(&a, &p, small, 1), 1);
        prompt_publish(&a, &p, 0);
        prompt_unpin(&a, &p);
        index_check(&s);
    }
    CHECK_EQ(lc_load(&a.h->ns[lci_ns_id(small)].pages), 10);
    for (uint32_t i = 0; i < 14; i++) {
        lc_key key = prompt_key(i, 0);
        CHECK_EQ(lci_peek1(b.h, &key, 1, small), i >= 4);
    }
    CHECK_EQ(peek(&b, &q), 20);
    prompt_make(&p, 30, 15); /* more than the quota at once */
    CHECK_EQ(prompt_reserve(&a, &p, small, 1), 10);
    CHECK_EQ(p.op.reason, LCI_WHY_QUOTA);
    CHECK_EQ(p.status[10], LCI_NO_ROOM);
    CHECK_EQ(lc_load(&a.h->ns[lci_ns_id(small)].pages), 10);
    prompt_unpin(&a, &p);
    CHECK_EQ(lci_abandon(a.h, p.op.rid, p.op.gen, BLOCKING), LC_OK);
    tear_down();
}

/* The sample: more candidates than are wanted, the oldest of them go. */
static void evict_of_a_namespace_chooses_among_many(void) {
    lci_ns_ref ns;
    set_up(200);
    CHECK_EQ(lci_namespace_open(a.h, "w", "", 100, &ns, BLOCKING), LC_OK);
    for (uint32_t i = 0; i < 100; i++) {
        prompt_make(&p, i, 1);
        CHECK_EQ(prompt_reserve(&a, &p, ns, 1), 1);
        prompt_publish(&a, &p, 0);
        prompt_unpin(&a, &p);
    }
    for (uint32_t i = 0; i < 50; i++) { /* the first half is used again */
        lc_key key = prompt_key(i, 0);
        CHECK_EQ(lci_match1(b.h, &key, 1, ns, &l.head), 1);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    }
    prompt_make(&p, 1000, 50);
    CHECK_EQ(prompt_reserve(&a, &p, ns, 1), 50);
    for (uint32_t i = 0; i < 100; i++) {
        lc_key key = prompt_key(i, 0);
        CHECK_EQ(lci_peek1(b.h, &key, 1, ns), i < 50);
    }
    prompt_unpin(&a, &p);
    tear_down();
}

/* What was published is taken in some hundred pages at a time, and not before a prefix is whole may
 * its end go: all of it has to be taken in before anybody may say that nothing can be evicted. */
static void evict_takes_in_all_that_was_published(void) {
    set_up(600);
    prompt_fill(&a, &p, 1, 600);
    CHECK_EQ(evict(&a, 600), 600);
    prompt_fill(&a, &p, 1, 600);
    prompt_make(&q, 2, 200);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 200);
    prompt_unpin(&b, &q);
    tear_down();
}

/* The same for a namespace at its quota. */
static void evict_of_the_quota_takes_in_all_that_was_published(void) {
    lci_ns_ref ns;
    set_up(700);
    CHECK_EQ(lci_namespace_open(a.h, "w", "small", 600, &ns, BLOCKING), LC_OK);
    prompt_make(&p, 1, 600);
    CHECK_EQ(prompt_reserve(&a, &p, ns, 1), 600);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    prompt_make(&q, 2, 1);
    CHECK_EQ(prompt_reserve(&b, &q, ns, 1), 1);
    CHECK_EQ(lci_peek1(a.h, p.keys, 600, ns), 599);
    prompt_unpin(&b, &q);
    CHECK_EQ(lci_abandon(b.h, q.op.rid, q.op.gen, BLOCKING), LC_OK);
    tear_down();
}

static void queue_notices_damage(void) {
    uint32_t freed = 0;
    set_up(64);
    prompt_fill(&a, &p, 1, 1);
    collect(&a);
    _Atomic uint32_t *damage[] = {&a.h->pages[p.page[0]].word, &a.h->pages[p.page[0]].queue.prev};
    for (int i = 0; i < 2; i++) {
        uint32_t old = lc_load(damage[i]);
        lc_store(damage[i], i ? 1000 : LCI_DOOMED);
        CHECK_EQ(lci_evict_pages(a.h, 5, &freed, BLOCKING), LC_E_CORRUPT);
        lc_store(damage[i], old);
        index_check(&s);
    }
    lci_ranks *ranks = a.h->ranks;
    int words = ranks ? LCI_RANK_WORDS : LCI_LEVELS * 2;
    _Atomic uint32_t *occupied =
        ranks ? ranks->order[lc_load(&ranks->chosen)].occupied : a.h->root->occupied;
    for (int w = 0; w < words; w++) lc_store(&occupied[w], 0xffffffff);
    CHECK_EQ(lci_evict_pages(a.h, 5, &freed, BLOCKING), LC_E_CORRUPT);
    CHECK_EQ(freed, 0);
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
    tear_down();
}

/* A link back to a record whose own link happens to lead here: unlinked there, the page would be the
 * first of its list for ever, and be queued again and again, for it is pinned. */
static void evict_ends_where_a_page_cannot_be_taken_off_its_list(void) {
    uint32_t freed = 0;
    set_up(64);
    prompt_fill(&a, &p, 1, 1);
    collect(&a);
    CHECK_EQ(match(&b, &p, &l), 1);
    uint32_t page = (uint32_t)p.page[0];
    lci_page *record = &a.h->pages[page], *other = &a.h->pages[63];
    uint32_t prev = lc_load(&record->queue.prev), next = lc_load(&other->queue.next);
    lc_store(&record->queue.prev, 63);
    lc_store(&other->queue.next, page);
    CHECK_EQ(lci_evict_pages(a.h, 5, &freed, BLOCKING), LC_E_CORRUPT);
    CHECK_EQ(freed, 0);
    lc_store(&record->queue.prev, prev);
    lc_store(&other->queue.next, next);
    index_check(&s);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(evict(&a, 5), 1);
    tear_down();
}

/* A page whose tick rose while it was queued moves on instead of leaving. */
static void evict_puts_right_what_was_used_since(void) {
    set_up_lru(64);
    prompt_fill(&a, &p, 1, 1);
    prompt_fill(&a, &q, 2, 1);
    collect(&a);
    prompt_fill(&b, &q, 3, 1); /* collects both */
    prompt_make(&q, 2, 1);
    CHECK_EQ(match(&b, &p, &l), 1);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(evict(&a, 1), 1);
    CHECK_EQ(peek(&a, &p), 1);
    CHECK_EQ(peek(&a, &q), 0);
    tear_down();
}

/* Damage: nothing counts as used after a call of that tick. */
static void evict_goes_on_under_a_clock_far_ahead(void) {
    set_up(64);
    for (uint32_t i = 0; i < 40; i++) prompt_fill(&a, &p, i, 1);
    lc_store(&a.h->root->clock, UINT64_C(3) << 46);
    CHECK_EQ(evict(&a, 64), 40);
    tear_down();
}

const test evict_tests[] = {
    TEST(queue_slots),
    TEST(evict_is_lru),
    TEST(evict_goes_from_the_leaves_upward),
    TEST(evict_stops_at_a_prefix_used_since),
    TEST(evict_of_two_namespaces_at_once),
    TEST(evict_leaves_what_is_pinned),
    TEST(evict_looks_into_the_rows_that_bits_name),
    TEST(evict_of_the_quota_takes_the_oldest_of_the_namespace),
    TEST(evict_of_a_namespace_chooses_among_many),
    TEST(evict_takes_in_all_that_was_published),
    TEST(evict_of_the_quota_takes_in_all_that_was_published),
    TEST(queue_notices_damage),
    TEST(evict_ends_where_a_page_cannot_be_taken_off_its_list),
    TEST(evict_puts_right_what_was_used_since),
    TEST(evict_goes_on_under_a_clock_far_ahead),
    END_OF_TESTS,
};
