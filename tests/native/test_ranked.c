/* Eviction by ranked lists: order, what cannot go, ageing, orders that are installed, advice of any bytes. */
#include "calls.h"
#include "pair.h"

static uint64_t used_of(uint32_t page) { return lc_load(&a.h->pages[page].used); }

static lci_order *order_of(client *c) {
    return &c->h->ranks->order[lc_load(&c->h->ranks->chosen) & 1];
}

/* No page ages in a test that lasts a few ticks, and nothing is learned in it. */
static void coarse_ages(void) {
    set_up_ranked(400);
    lci_set_clock(a.h, 1);
    lci_set_clock(b.h, 1);
    lc_store(&a.h->learnt.root->unit, 20);
    lc_store(&a.h->learnt.root->claimed, 1);
}

static uint32_t next_random(uint32_t *random) {
    *random = *random * 1664525 + 1013904223;
    return *random >> 8;
}

/* Prompts of one page, some of them matched, so that they belong to several lists; and lie there. */
static void some_uses(uint32_t prompts, uint32_t matches) {
    uint32_t random = 7;
    for (uint32_t i = 0; i < prompts; i++) prompt_fill(&a, &p, i, 1);
    for (uint32_t i = 0; i < matches; i++) {
        prompt_make(&p, next_random(&random) % prompts, 1);
        CHECK_EQ(match(&b, &p, &l), 1);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    }
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
}

/* What `oldest` lists is what `evict` takes, in that order. */
static void oldest_is_what_goes(void) {
    coarse_ages();
    some_uses(300, 500);
    CHECK_EQ(oldest(&a, 300, 1), 300);
    index_check(&s);
    int32_t order[300];
    memcpy(order, list.pages, sizeof order);
    CHECK_EQ(lci_release(a.h, &list.head), LC_OK);
    for (uint32_t i = 0; i < 300; i++) {
        CHECK_EQ(lci_state_of(lc_load(&a.h->pages[order[i]].word)), LCI_READY);
        CHECK_EQ(evict(&b, 1), 1);
        CHECK_EQ(lci_state_of(lc_load(&a.h->pages[order[i]].word)), LCI_FREE);
    }
    tear_down();
}

/* The lower rank first; within a list the one that came first. */
static void lists_go_by_rank(void) {
    coarse_ages();
    some_uses(300, 500);
    CHECK_EQ(oldest(&a, 300, 1), 300);
    for (uint32_t i = 1; i < 300; i++) {
        uint64_t before = used_of((uint32_t)list.pages[i - 1]), now = used_of((uint32_t)list.pages[i]);
        CHECK(lci_rank(a.h, before) <= lci_rank(a.h, now));
    }
    CHECK_EQ(lci_release(a.h, &list.head), LC_OK);
    tear_down();
}

/* Pinned pages are met once and parked; a call ends, and they go when they can. */
static void pinned_pages_are_parked(void) {
    set_up_ranked(64);
    prompt_fill(&a, &p, 0, 1);
    static lease held[50];
    for (uint32_t i = 0; i < 50; i++) {
        prompt_fill(&a, &q, 1 + i, 1);
        memset(&held[i], 0, sizeof held[i]);
        CHECK_EQ(match(&b, &q, &held[i]), 1);
    }
    CHECK_EQ(evict(&a, 64), 1); /* the one that is not pinned, wherever it ranks */
    CHECK(!lc_list_empty(&a.h->lists, LCI_PARKED_LIST));
    CHECK_EQ(evict(&a, 64), 0);
    index_check(&s);
    for (uint32_t i = 0; i < 50; i++) CHECK_EQ(lci_release(b.h, &held[i].head), LC_OK);
    CHECK_EQ(evict(&a, 50), 50);
    CHECK_EQ(index_counts(&a).queued, 0);
    tear_down();
}

/* What was parked comes back while others go: nothing has to run out for that. */
static void parked_pages_come_back(void) {
    set_up_ranked(200);
    prompt_fill(&a, &p, 0, 1);
    CHECK_EQ(match(&b, &p, &l), 1);
    for (uint32_t i = 1; i < 200; i++) prompt_fill(&a, &q, i, 1);
    for (uint32_t i = 0; i < 4; i++) CHECK_EQ(evict(&a, 40), 40);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(evict(&a, 40), 40);
    CHECK(lc_list_empty(&a.h->lists, LCI_PARKED_LIST));
    tear_down();
}

/* A page that this call's chain hangs on stays, though its child goes and its list ranks no higher. */
static void what_a_call_has_used_does_not_follow(void) {
    set_up_ranked(40);
    prompt_fill(&a, &p, 1, 40);
    prompt_make(&q, 1, 30);
    for (uint32_t i = 10; i < 30; i++) q.keys[i] = prompt_key(2, i);
    q.op = (lci_reserve_op){.shards = 1, .ns = NS};
    CHECK_EQ(lci_reserve(b.h, &q.op, q.keys, 40 - 10, 10, q.page, q.status, BLOCKING), 20);
    CHECK_EQ(peek(&a, &p), 20);
    CHECK_EQ(evict(&a, 40), 10); /* what the new pages hang on stays */
    CHECK_EQ(lci_unreserve(b.h, &q.op, q.page, q.status, 20), LC_OK);
    CHECK_EQ(lci_abandon(b.h, q.op.rid, q.op.gen, BLOCKING), LC_OK);
    tear_down();
}

static void a_lookup_that_does_not_count_leaves_the_word_alone(void) {
    set_up_ranked(40);
    prompt_fill(&a, &p, 1, 2);
    uint64_t before = used_of((uint32_t)p.page[0]);
    l.head.capacity = LCI_UNCOUNTED;
    CHECK_EQ(lci_match1(b.h, p.keys, p.n, NS, &l.head), 2);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(used_of((uint32_t)p.page[0]), before);
    l.head.capacity = LCI_UNCOUNTED;
    CHECK_EQ(lci_match1(b.h, p.keys, p.n, NS, &l.head), 2);
    CHECK_EQ(lci_use(b.h, &l.head), LC_OK); /* it is taken */
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(lch_hits_of(used_of((uint32_t)p.page[0])), 1);
    CHECK(lch_gap_of(used_of((uint32_t)p.page[0])) > 0);
    tear_down();
}

/* A page that comes back has the history that it had when it went, and one hit more. */
static void pages_that_went_are_remembered(void) {
    set_up_ranked(40);
    prompt_fill(&a, &p, 1, 1);
    for (uint32_t i = 0; i < 3; i++) {
        CHECK_EQ(match(&b, &p, &l), 1);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    }
    CHECK_EQ(evict(&a, 1), 1);
    prompt_fill(&a, &p, 1, 1);
    CHECK_EQ(lch_hits_of(used_of((uint32_t)p.page[0])), 4);
    prompt_fill(&a, &q, 2, 1);
    CHECK_EQ(lch_hits_of(used_of((uint32_t)q.page[0])), 0);
    tear_down();
}

/* `discard` sees a use of a page whose hits are saturated. */
static void a_use_of_a_hot_page_is_seen(void) {
    set_up_ranked(40);
    for (uint32_t i = 0; i < 4; i++) prompt_fill(&a, &p, i, 1);
    prompt_make(&p, 2, 1);
    CHECK_EQ(match(&b, &p, &l), 1);
    uint32_t hot = (uint32_t)l.pages[0];
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    lc_store(&a.h->pages[hot].used, used_of(hot) | (uint64_t)LCH_HITS_MAX << LCH_HITS_SHIFT);
    CHECK_EQ(oldest(&a, 4, 0), 4);
    CHECK_EQ(match(&b, &p, &l), 1);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    const uint32_t *seen = (const uint32_t *)(list.pages + list.head.capacity);
    memcpy(hits, seen, 4 * sizeof *seen);
    CHECK_EQ(discard(&a), LC_OK);
    CHECK_EQ(giving.freed, 3);
    CHECK_EQ(peek(&b, &p), 1);
    tear_down();
}

/* Pages that were told to go first do, however they rank; a use makes them ordinary. */
static void first_goes_first(void) {
    coarse_ages();
    some_uses(60, 100);
    prompt_make(&q, 5, 1);
    prompt_make(&p, 6, 1);
    for (uint32_t i = 0; i < 20; i++) {
        CHECK_EQ(match(&b, &p, &l), 1);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    }
    for (int i = 0; i < 2; i++) {
        walk = (lci_walk_op){0};
        prompt *which = i ? &q : &p;
        CHECK_EQ(lci_evict_first(a.h, which->keys, 1, NS, &walk, BLOCKING), LC_OK);
        CHECK_EQ(walk.pages, 1);
    }
    CHECK_EQ(match(&b, &q, &l), 1);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    index_check(&s);
    CHECK_EQ(evict(&a, 1), 1);
    CHECK_EQ(peek(&a, &p), 0);
    CHECK_EQ(peek(&a, &q), 1);
    tear_down();
}

/* In the order that knows nothing age alone counts: pages that have aged are found in their old lists. */
static void pages_age(void) {
    set_up_ranked(100);
    lc_store(&a.h->learnt.root->unit, 10);
    for (uint32_t i = 0; i < 30; i++) {
        lci_set_clock(a.h, (UINT64_C(1) + i) << 24);
        prompt_fill(&a, &p, i, 1);
    }
    lci_set_clock(a.h, UINT64_C(40) << 24);
    CHECK_EQ(evict(&a, 10), 10);
    for (uint32_t i = 0; i < 30; i++) {
        prompt_make(&p, i, 1);
        CHECK_EQ(peek(&b, &p), i >= 10);
    }
    index_check(&s);
    tear_down();
}

/* A clock that wraps evicts on, in both orders. */
static void a_clock_that_wraps(void) {
    for (uint32_t eviction = LCI_LRU; eviction <= LCI_HZ; eviction++) {
        if (eviction == LCI_HZ) set_up_ranked(64);
        else set_up(64);
        lc_store(&a.h->root->clock, (UINT64_C(1) << 48) - 1000);
        for (uint32_t i = 0; i < 3000; i++) {
            prompt_fill(&a, &p, i, 1);
            if (i % 3) continue;
            CHECK_EQ(match(&b, &p, &l), 1);
            CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
        }
        CHECK(index_counts(&a).clock > UINT64_C(1) << 48);
        CHECK_EQ(evict(&a, 64), 64);
        tear_down();
    }
}

/* Enough pages are named: the other table holds from then on. */
static void an_order_is_learned(void) {
    set_up_ranked(64);
    uint32_t before = lc_load(&a.h->ranks->chosen), changes = 0;
    for (uint32_t i = 0; i < 4000; i++) {
        prompt_fill(&a, &p, i, 1);
        uint32_t now = lc_load(&a.h->ranks->chosen);
        changes += now != before;
        before = now;
        CHECK(lci_ranks_sound(a.h));
    }
    CHECK(changes > 3);
    index_check(&s);
    tear_down();
}

/* Whatever bytes are in the advice: the index is sound, and gives pages. */
static void advice_of_any_bytes(void) {
    uint32_t random = 3;
    set_up_ranked(64);
    const lci_geometry *g = &a.h->geometry;
    for (uint32_t round = 0; round < 20; round++) {
        uint32_t *word = (uint32_t *)(s.base + g->advice), *end = (uint32_t *)(s.base + g->end);
        for (; word < end; word++) *word = next_random(&random) << 8 ^ next_random(&random);
        for (uint32_t i = 0; i < 200; i++) {
            prompt_fill(&a, &p, 200 * round + i, 1 + i % 3);
            CHECK_EQ(match(&b, &p, &l), p.n);
            CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
        }
        index_check(&s);
    }
    tear_down();
}

static void a_damaged_order_is_found_and_mended(void) {
    set_up_ranked(64);
    for (uint32_t i = 0; i < 40; i++) prompt_fill(&a, &p, i, 1);
    lci_order *o = order_of(&a);
    for (uint32_t i = 0; i < 3; i++) {
        if (i == 0) lc_store(&o->list[3], lc_load(&o->list[4]));
        if (i == 1) lc_store(&o->rank[7], LCH_LISTS);
        if (i == 2) lc_store(&a.h->ranks->chosen, 2);
        CHECK_EQ(index_broken(&s), 69);
        CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
        index_check(&s);
    }
    for (uint32_t w = 0; w < LCI_RANK_WORDS; w++) lc_store(&order_of(&a)->occupied[w], 0);
    CHECK_EQ(index_broken(&s), 13);
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
    CHECK_EQ(evict(&a, 64), 40);
    tear_down();
}

const test ranked_tests[] = {
    TEST(oldest_is_what_goes),
    TEST(lists_go_by_rank),
    TEST(pinned_pages_are_parked),
    TEST(parked_pages_come_back),
    TEST(what_a_call_has_used_does_not_follow),
    TEST(a_lookup_that_does_not_count_leaves_the_word_alone),
    TEST(pages_that_went_are_remembered),
    TEST(a_use_of_a_hot_page_is_seen),
    TEST(first_goes_first),
    TEST(pages_age),
    TEST(a_clock_that_wraps),
    TEST(an_order_is_learned),
    TEST(advice_of_any_bytes),
    TEST(a_damaged_order_is_found_and_mended),
    END_OF_TESTS,
};
