/* Damage: pages whose ticks are ahead of the clock, so far that no call takes them for used. Calls end. */
#include "calls.h"
#include "pair.h"

/* A leaf that is its own parent: each time it is marked something hangs on it, and it stays. */
static void own_parent(uint32_t page) {
    lci_page *own = &a.h->pages[page];
    lc_store(&own->parent, page);
    lc_store(&own->parent_gen, lc_load(&own->gen));
}

static void ahead(uint32_t page, uint64_t ticks) {
    uint64_t tick = (lc_load(&a.h->root->clock) + ticks) & LCI_TICK_MAX;
    lc_store(&a.h->pages[page].used, tick << LCI_TICK_SHIFT);
}

static const uint64_t distances[] = {1, UINT64_C(1) << 43, UINT64_C(1) << 45, UINT64_C(1) << 47,
                                     LCI_TICK_MAX - 100};
#define DISTANCES (sizeof distances / sizeof *distances)

/* Two pages of which one cannot go. */
static void stuck(uint64_t distance) {
    set_up(40);
    prompt_fill(&a, &p, 1, 1);
    prompt_fill(&a, &q, 2, 1);
    collect(&a);
    own_parent((uint32_t)p.page[0]);
    ahead((uint32_t)p.page[0], distance);
}

static void mend(void) {
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
    tear_down();
}

static void evicting_ends(void) {
    for (uint32_t i = 0; i < DISTANCES; i++) {
        stuck(distances[i]);
        CHECK(evict(&a, 2) <= 1);
        mend();
    }
}

static void reserving_ends(void) {
    for (uint32_t i = 0; i < DISTANCES; i++) {
        stuck(distances[i]);
        prompt_make(&q, 3, 40);
        int made = prompt_reserve(&b, &q, NS, 1);
        CHECK(made > 0 && made < 40);
        CHECK_EQ(lci_abandon(b.h, q.op.rid, q.op.gen, BLOCKING), LC_OK);
        CHECK_EQ(lci_unreserve(b.h, &q.op, q.page, q.status, 40), LC_OK);
        mend();
    }
}

static void listing_ends(void) {
    for (uint32_t i = 0; i < DISTANCES; i++) {
        stuck(distances[i]);
        CHECK(oldest(&a, 2, 1) <= 2);
        CHECK_EQ(discard(&a), LC_OK);
        mend();
    }
}

static void evicting_a_group_ends(void) {
    for (uint32_t i = 0; i < DISTANCES; i++) {
        stuck(distances[i]);
        walk = (lci_walk_op){0};
        CHECK_EQ(lci_evict_group(a.h, 0, 2, &walk, BLOCKING), LC_OK);
        CHECK_EQ(walk.pages, 1);
        mend();
    }
}

/* A page that is pinned while it is on its way out counts as used, and a hit meanwhile stays what it is. */
#ifdef LC_PAUSE_POINTS
static void hit_it(void) { CHECK_EQ(match(&b, &p, &l), 1); }

static void a_hit_meanwhile_is_not_taken_back(void) {
    set_up(40);
    prompt_fill(&a, &p, 1, 1);
    collect(&a);
    lci_page *page = &a.h->pages[p.page[0]];
    play(LC_AT_EVICT_CHOSEN, hit_it);
    CHECK_EQ(evict(&a, 1), 0);
    check_played();
    CHECK_EQ(hits_of((uint32_t)p.page[0]), 1);
    CHECK_EQ(lci_tick(page), lc_load(&a.h->root->clock)); /* b's tick, which came after a's */
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    tear_down();
}
#endif

const test ahead_tests[] = {
    TEST(evicting_ends),
    TEST(reserving_ends),
    TEST(listing_ends),
    TEST(evicting_a_group_ends),
#ifdef LC_PAUSE_POINTS
    TEST(a_hit_meanwhile_is_not_taken_back),
#endif
    END_OF_TESTS,
};
