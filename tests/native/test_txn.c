/* The undo log: what was stored comes back, newest first, and nothing out of bounds is touched. */
#include "world.h"

#include <stdlib.h>

#define WORDS 8
#define BEGIN LCS_PAYLOAD_OFFSET

typedef struct scene {
    segment s;
    lc_txn t;
    _Atomic uint32_t *word; /* WORDS of them, each worth 10 times its number */
} scene;

static scene scene_make(void) {
    scene x = {.s = segment_make(BEGIN + 4096)};
    x.t = (lc_txn){.base = x.s.base,
                   .lock = (lcs_lock *)(x.s.base + LCS_LOCK_OFFSET),
                   .log = (_Atomic uint64_t *)(x.s.base + LCS_LOG_OFFSET)};
    x.word = (_Atomic uint32_t *)(x.s.base + BEGIN);
    for (uint32_t i = 0; i < WORDS; i++) lc_store(&x.word[i], 10 * i);
    return x;
}

static int undo(scene *x) { return lc_txn_undo(x->s.base, x->t.lock, BEGIN, x->s.bytes); }

static void check_words(const scene *x) {
    for (uint32_t i = 0; i < WORDS; i++) CHECK_EQ(lc_load(&x->word[i]), 10 * i);
}

static void txn_undone_words_come_back(void) {
    scene x = scene_make();
    for (uint32_t i = 0; i < WORDS; i++) lc_txn_set(&x.t, &x.word[i], 1000 + i);
    lc_txn_set(&x.t, &x.word[3], 7); /* twice in one step: the older value counts */
    lc_txn_add(&x.t, &x.word[4], (uint32_t)-1);
    CHECK_EQ(lc_load(&x.word[3]), 7);
    CHECK_EQ(lc_load(&x.word[4]), 1003);
    CHECK_EQ(lc_load(&x.t.lock->log_count), WORDS + 2);
    CHECK_EQ(undo(&x), WORDS + 2);
    check_words(&x);
    CHECK_EQ(lc_load(&x.t.lock->log_count), 0);
    CHECK_EQ(undo(&x), 0);
    segment_end(&x.s);
}

static void txn_committed_words_stay(void) {
    scene x = scene_make();
    lc_txn_set(&x.t, &x.word[1], 5);
    lc_txn_commit(&x.t);
    CHECK_EQ(x.t.count, 0);
    lc_txn_set(&x.t, &x.word[2], 6);
    CHECK_EQ(undo(&x), 1);
    CHECK_EQ(lc_load(&x.word[1]), 5);
    CHECK_EQ(lc_load(&x.word[2]), 20);
    segment_end(&x.s);
}

static void txn_soft_word_comes_back_only_if_ours_stands(void) {
    scene x = scene_make();
    CHECK(!lc_txn_swap(&x.t, &x.word[0], 99, 1)); /* it holds something else */
    CHECK(lc_txn_swap(&x.t, &x.word[1], 10, 11));
    CHECK(lc_txn_swap(&x.t, &x.word[2], 20, 21));
    lc_store(&x.word[2], 22); /* somebody else, without the lock */
    lc_txn_set(&x.t, &x.word[3], 31);
    CHECK_EQ(undo(&x), 7);
    CHECK_EQ(lc_load(&x.word[0]), 0);
    CHECK_EQ(lc_load(&x.word[1]), 10);
    CHECK_EQ(lc_load(&x.word[2]), 22);
    CHECK_EQ(lc_load(&x.word[3]), 30);
    segment_end(&x.s);
}

/* A soft entry's second half may look like an entry: it is data. */
static void txn_soft_value_is_not_taken_for_an_entry(void) {
    scene x = scene_make();
    uint32_t looks_like_soft = LC_LOG_SOFT | lc_txn_word(&x.t, &x.word[5]);
    CHECK(lc_txn_swap(&x.t, &x.word[1], 10, looks_like_soft));
    lc_txn_set(&x.t, &x.word[2], 1);
    CHECK_EQ(undo(&x), 3);
    check_words(&x);
    segment_end(&x.s);
}

static void txn_full_log_stores_nothing(void) {
    scene x = scene_make();
    for (uint32_t i = 0; i < LCS_LOG_ENTRIES - 1; i++) lc_txn_set(&x.t, &x.word[1], i);
    CHECK_EQ(x.t.error, LC_OK);
    CHECK(!lc_txn_swap(&x.t, &x.word[2], 20, 21)); /* needs two entries */
    CHECK_EQ(x.t.error, LC_E_CORRUPT);
    lc_txn_set(&x.t, &x.word[1], 4095);
    CHECK_EQ(lc_load(&x.t.lock->log_count), LCS_LOG_ENTRIES);
    lc_txn_set(&x.t, &x.word[3], 0);
    CHECK_EQ(lc_load(&x.word[3]), 30);
    CHECK_EQ(undo(&x), LCS_LOG_ENTRIES);
    check_words(&x);
    segment_end(&x.s);
}

static void put(scene *x, uint32_t entry, uint32_t tag, uint32_t old) {
    lc_store(&x->t.log[entry], (uint64_t)tag | (uint64_t)old << 32);
}

static void txn_damaged_log_touches_nothing(void) {
    scene x = scene_make();
    uint32_t good = lc_txn_word(&x.t, &x.word[1]), end = (uint32_t)(x.s.bytes / 4);
    const uint32_t bad[] = {0, BEGIN / 4 - 1, end, end + LC_LOG_KIND, 0x7fffffff};
    for (uint32_t i = 0; i < 2 * (sizeof bad / sizeof *bad); i++) {
        put(&x, i % 2, good, 77); /* the newest is undone first: sound or not, it must not be */
        put(&x, 1 - i % 2, bad[i / 2], 77);
        lc_store(&x.t.lock->log_count, 2);
        CHECK_EQ(undo(&x), LC_E_CORRUPT);
        check_words(&x);
    }
    put(&x, 0, good, 77);
    put(&x, 1, good | LC_LOG_SOFT, 77); /* whose second half is missing */
    CHECK_EQ(undo(&x), LC_E_CORRUPT);
    check_words(&x);
    lc_store(&x.t.lock->log_count, LCS_LOG_ENTRIES + 1);
    CHECK_EQ(undo(&x), LC_E_CORRUPT);
    check_words(&x);
    put(&x, 0, end - 1, 5); /* the very last word is in bounds */
    lc_store(&x.t.lock->log_count, 1);
    CHECK_EQ(undo(&x), 1);
    CHECK_EQ(lc_load((_Atomic uint32_t *)(x.s.base + x.s.bytes - 4)), 5);
    segment_end(&x.s);
}

const test txn_tests[] = {
    TEST(txn_undone_words_come_back),
    TEST(txn_committed_words_stay),
    TEST(txn_soft_word_comes_back_only_if_ours_stands),
    TEST(txn_soft_value_is_not_taken_for_an_entry),
    TEST(txn_full_log_stores_nothing),
    TEST(txn_damaged_log_touches_nothing),
    END_OF_TESTS,
};
