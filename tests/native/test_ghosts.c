/* What is remembered of a page that went: whatever its key, and however often it was hit. */
#include "calls.h"
#include "pair.h"

/* A key whose fingerprint has the bits of a free entry. */
static lc_key blank_key(const lch *l, uint64_t lo) {
    lc_key key = {.lo = lo};
    key.hi = lch_hash(l, key) & LCH_FINGERPRINT;
    return key;
}

static void a_free_entry_is_nobodys(void) {
    uint64_t used;
    set_up_ranked(40);
    for (uint64_t lo = 1; lo < 100; lo++) {
        lc_key key = blank_key(&a.h->learnt, lo);
        CHECK_EQ(lch_hash(&a.h->learnt, key) & LCH_FINGERPRINT, 0);
        CHECK(!lch_known(&a.h->learnt, key, 1000, &used));
        CHECK_EQ(lch_hits_of(lch_named(&a.h->learnt, key, LC_NIL, 0, 0, 1000)), 0);
        lch_evicted(&a.h->learnt, key, lch_word(1000, 3, 2, 1, 0), 1000);
        CHECK(lch_known(&a.h->learnt, key, 1000, &used));
        CHECK_EQ(lch_hits_of(used), 3);
        CHECK_EQ(lch_hits_of(lch_named(&a.h->learnt, key, LC_NIL, 0, 0, 2000)), 4);
        CHECK(!lch_known(&a.h->learnt, key, 2000, &used)); /* it is a page again */
    }
    tear_down();
}

/* More hits than a ghost counts do not run into what stands above them. */
static void hits_of_a_ghost_saturate(void) {
    uint64_t used, tick = UINT64_C(123) << 20;
    set_up_ranked(40);
    for (uint32_t hits = 0; hits <= LCH_HITS_MAX; hits++) {
        lc_key key = prompt_key(1, hits);
        lch_evicted(&a.h->learnt, key, lch_word(tick, hits, 9, 3, 2), tick);
        CHECK(lch_known(&a.h->learnt, key, tick, &used));
        CHECK_EQ(lch_hits_of(used), lch_least(hits, LCH_GHOST_HITS_MAX));
        CHECK_EQ(lch_gen_of(used), 9);
        CHECK_EQ(lch_tick_of(used), tick);
        CHECK(lch_gap_of(used) == 0 && lch_hint_of(used) == 0);
    }
    tear_down();
}

const test ghost_tests[] = {
    TEST(a_free_entry_is_nobodys),
    TEST(hits_of_a_ghost_saturate),
    END_OF_TESTS,
};
