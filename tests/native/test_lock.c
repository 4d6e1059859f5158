/* The lock: who has it, who waits, and what happens when its owner is dead. */
#include "world.h"

#include <pthread.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define OPERATION 7

/* In this program the clock may be ours: then it goes on by `pace` with each look at it. */
static uint64_t pace, clock_ns;
static int looks;

int clock_gettime(clockid_t which, struct timespec *now) {
    if (!pace) return (int)syscall(SYS_clock_gettime, which, now);
    clock_ns += pace;
    looks++;
    *now = (struct timespec){.tv_sec = 1, .tv_nsec = (long)clock_ns};
    return 0;
}

static segment s;
static client a, b;
static lcs_lock *lock;

static void set_up(void) {
    s = segment_make(LCS_PAYLOAD_OFFSET + 4096);
    a = client_join(&s);
    b = client_join(&s);
    lock = lcs_lock_of(a.at);
}

static void tear_down(void) {
    if (a.at) client_leave(&a);
    if (b.at) client_leave(&b);
    segment_end(&s);
}

static int take(const client *c, lc_txn *t, int wait, uint64_t deadline) {
    return lcs_lock_take(c->at, t, OPERATION, wait, deadline, LCS_PAYLOAD_OFFSET, s.bytes);
}

static int drop(const client *c, lc_txn *t) {
    return lcs_lock_drop(c->at, t, LCS_PAYLOAD_OFFSET, s.bytes);
}

static _Atomic uint32_t *payload(void) {
    return (_Atomic uint32_t *)(s.base + LCS_PAYLOAD_OFFSET);
}

static void lock_excludes_and_counts(void) {
    lc_txn t, u;
    set_up();
    CHECK_EQ(take(&a, &t, LC_TRY, 0), LC_OK);
    CHECK(!t.taken_over);
    CHECK_EQ(lc_load(&lock->word) & LCS_LOCK_SLOT, a.slot);
    CHECK_EQ(lc_load(&lock->word) >> LCS_LOCK_EPOCH_SHIFT, lcs_attachment_epoch(a.at));
    CHECK_EQ(lc_load(&lock->operation), OPERATION);
    CHECK_EQ(lc_load(&lock->holder) >> 32, lc_load(&lock->sequence));
    CHECK(lc_load(&lock->holder) & UINT32_MAX);
    CHECK_EQ(take(&b, &u, LC_TRY, 0), LC_E_BUSY);
    CHECK(!lcs_lock_wanted(a.at));
    CHECK_EQ(take(&b, &u, LC_BLOCK, 0), LC_E_TIMEOUT);
    CHECK_EQ(drop(&b, &t), LC_E_LOST); /* not its */
    CHECK_EQ(drop(&a, &t), LC_OK);
    CHECK_EQ(lc_load(&lock->word), 0);
    CHECK_EQ(take(&b, &u, LC_TRY, 0), LC_OK);
    CHECK_EQ(lc_load(&lock->sequence), 2);
    CHECK_EQ(lc_load(&lock->acquisitions), 2);
    CHECK_EQ(drop(&b, &u), LC_OK);
    tear_down();
}

/* However fast the processor goes round: 50 us, by the clock. */
static void lock_is_spun_for_by_time(void) {
    lc_txn t;
    set_up();
    CHECK_EQ(take(&a, &t, LC_TRY, 0), LC_OK);
    for (uint64_t ns = 1000; ns <= 25000; ns *= 25) {
        clock_ns = 0, looks = 0, pace = ns;
        int rc = take(&b, &t, LC_TRY, 0);
        pace = 0;
        CHECK_EQ(rc, LC_E_BUSY);
        CHECK_EQ(looks, 1 + 50000 / (int)ns);
    }
    CHECK_EQ(drop(&a, &t), LC_OK);
    tear_down();
}

static void lock_waiter_says_so_and_comes_back_for_signals(void) {
    lc_txn t, u;
    set_up();
    CHECK_EQ(take(&a, &t, LC_TRY, 0), LC_OK);
    CHECK_EQ(take(&b, &u, BLOCKING), LC_E_INTR); /* after a slice: the interpreter looks */
    CHECK(lcs_lock_wanted(a.at));
    CHECK_EQ(drop(&a, &t), LC_OK);
    CHECK_EQ(lc_load(&lock->word), LCS_LOCK_STARVED); /* it waited long, and may be back */
    tear_down();
}

/* A process that has slept says so when it has waited for 125 us, and not before. */
static void lock_waiter_that_slept_long_goes_first(void) {
    lc_txn t, u;
    set_up();
    for (uint64_t ns = 4000; ns <= 200000; ns *= 50) { /* it sleeps several times in either */
        CHECK_EQ(take(&a, &t, LC_TRY, 0), LC_OK);
        clock_ns = 0, pace = ns;
        int rc = take(&b, &u, LC_BLOCK, UINT64_C(1000000000) + 30 * ns);
        pace = 0;
        CHECK_EQ(rc, LC_E_TIMEOUT);
        CHECK_EQ((lc_load(&lock->word) & LCS_LOCK_STARVED) != 0, ns == 200000);
        CHECK_EQ(drop(&a, &t), LC_OK);
    }
    tear_down();
}

/* Who comes leaves it to a starved process for 100 us, no longer: that one may have died. */
static void lock_is_left_to_the_starved(void) {
    lc_txn t;
    set_up();
    lc_store(&lock->word, LCS_LOCK_STARVED);
    clock_ns = 0, pace = 1000;
    int rc = take(&b, &t, LC_TRY, 0);
    pace = 0;
    CHECK_EQ(rc, LC_OK);
    CHECK(clock_ns >= 100000 && clock_ns < 110000);
    CHECK_EQ(drop(&b, &t), LC_OK);
    CHECK_EQ(lc_load(&lock->word), 0); /* said again by those who still starve */
    tear_down();
}

static void *wait_for_it(void *unused) {
    lc_txn u;
    int rc;
    do rc = take(&b, &u, BLOCKING);
    while (rc == LC_E_INTR);
    if (rc == LC_OK) rc = drop(&b, &u);
    (void)unused;
    return (void *)(intptr_t)rc;
}

static void lock_passes_to_a_sleeper(void) {
    lc_txn t;
    pthread_t waiter;
    void *rc;
    set_up();
    CHECK_EQ(take(&a, &t, LC_TRY, 0), LC_OK);
    CHECK_EQ(pthread_create(&waiter, NULL, wait_for_it, NULL), 0);
    while (!lcs_lock_wanted(a.at)) {
    }
    CHECK_EQ(drop(&a, &t), LC_OK);
    CHECK_EQ(pthread_join(waiter, &rc), 0);
    CHECK_EQ((intptr_t)rc, LC_OK);
    CHECK_EQ(lc_load(&lock->word), 0);
    CHECK_EQ(lc_load(&lock->contended), 1);
    CHECK(lc_load(&lock->wait_ns) > 0);
    tear_down();
}

static void lock_of_a_dead_owner_is_taken_over_and_its_step_undone(void) {
    lc_txn t, u;
    set_up();
    lc_store(payload(), 1);
    CHECK_EQ(take(&a, &t, LC_TRY, 0), LC_OK);
    lc_txn_set(&t, payload(), 2);
    client_die(&a);
    CHECK_EQ(take(&b, &u, LC_TRY, 0), LC_E_BUSY); /* who only tries does not look */
    CHECK_EQ(take(&b, &u, BLOCKING), LC_OK);
    CHECK(u.taken_over);
    CHECK_EQ(lc_load(payload()), 1);
    CHECK_EQ(lc_load(&lock->recoveries), 1);
    CHECK_EQ(lc_load(&lock->undone_words), 1);
    CHECK_EQ(drop(&b, &u), LC_OK);
    tear_down();
}

static void lock_owner_of_another_epoch_is_dead(void) {
    lc_txn t, u;
    set_up();
    CHECK_EQ(take(&a, &t, LC_TRY, 0), LC_OK);
    lc_store(&lcs_client_of(a.at, a.slot)->epoch, lcs_attachment_epoch(a.at) + 1);
    CHECK_EQ(take(&b, &u, BLOCKING), LC_OK);
    CHECK(u.taken_over);
    CHECK_EQ(lcs_attachment_usable(a.at), LC_E_LOST);
    CHECK_EQ(drop(&a, &t), LC_E_LOST);
    CHECK_EQ(drop(&b, &u), LC_OK);
    CHECK_EQ(lcs_slot_release(a.at), LC_E_LOST);
    client_forget(&a);
    tear_down();
}

static void lock_word_that_names_nobody_is_taken(void) {
    lc_txn u;
    const uint32_t words[] = {LCS_LOCK_WAITERS, LCS_LOCK_SLOT, 1u << LCS_LOCK_EPOCH_SHIFT};
    set_up();
    for (uint32_t i = 0; i < sizeof words / sizeof *words; i++) {
        lc_store(&lock->word, words[i]);
        CHECK_EQ(take(&b, &u, BLOCKING), LC_OK);
        CHECK_EQ(drop(&b, &u), LC_OK);
    }
    tear_down();
}

static void lock_error_rolls_back(void) {
    lc_txn t;
    set_up();
    lc_store(payload(), 1);
    CHECK_EQ(take(&a, &t, LC_TRY, 0), LC_OK);
    lc_txn_set(&t, payload(), 2);
    t.error = LC_E_FULL;
    CHECK_EQ(drop(&a, &t), LC_E_FULL);
    CHECK_EQ(lc_load(payload()), 1);
    CHECK_EQ(take(&a, &t, LC_TRY, 0), LC_OK);
    lc_txn_set(&t, payload(), 3);
    CHECK_EQ(drop(&a, &t), LC_OK);
    CHECK_EQ(lc_load(payload()), 3);
    tear_down();
}

static void lock_damaged_log_is_refused_or_discarded(void) {
    lc_txn t;
    set_up();
    lc_store(&lock->log_count, LCS_LOG_ENTRIES + 1);
    CHECK_EQ(take(&a, &t, LC_TRY, 0), LC_E_CORRUPT);
    CHECK_EQ(lc_load(&lock->word), 0);
    CHECK_EQ(take(&a, &t, LC_TRY | LC_DISCARD, 0), LC_OK);
    CHECK_EQ(lc_load(&lock->log_count), 0);
    CHECK_EQ(drop(&a, &t), LC_OK);
    tear_down();
}

static void lock_is_not_for_readers(void) {
    lc_txn t;
    set_up();
    client r = reader_join(&s);
    CHECK_EQ(take(&r, &t, BLOCKING), LC_E_READONLY);
    client_forget(&r);
    tear_down();
}

const test lock_tests[] = {
    TEST(lock_excludes_and_counts),
    TEST(lock_is_spun_for_by_time),
    TEST(lock_waiter_says_so_and_comes_back_for_signals),
    TEST(lock_waiter_that_slept_long_goes_first),
    TEST(lock_is_left_to_the_starved),
    TEST(lock_passes_to_a_sleeper),
    TEST(lock_of_a_dead_owner_is_taken_over_and_its_step_undone),
    TEST(lock_owner_of_another_epoch_is_dead),
    TEST(lock_word_that_names_nobody_is_taken),
    TEST(lock_error_rolls_back),
    TEST(lock_damaged_log_is_refused_or_discarded),
    TEST(lock_is_not_for_readers),
    END_OF_TESTS,
};
