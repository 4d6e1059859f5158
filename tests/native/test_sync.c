/* Atomics, events and the robust lock, as Python uses them by themselves. */
#include "world.h"

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

enum { OP_LOAD, OP_STORE, OP_ADD, OP_OR, OP_AND, OP_SWAP };
#define WORD LCS_PAYLOAD_OFFSET

static segment s;
static client c, r;

static void set_up(void) {
    s = segment_make(LCS_PAYLOAD_OFFSET + 4096);
    c = client_join(&s);
    r = reader_join(&s);
}

static void tear_down(void) {
    client_forget(&r);
    if (c.at) client_leave(&c);
    segment_end(&s);
}

static void sync_atomics(void) {
    static const struct { int op; uint32_t value, after; } steps[] = {
        {OP_STORE, 12, 12}, {OP_ADD, 5, 17}, {OP_OR, 0x80000000, 0x80000011},
        {OP_AND, 0xf0000001, 0x80000001}, {OP_SWAP, 3, 3}, {OP_ADD, UINT32_MAX, 2},
    };
    uint32_t old = 0, before = 0, now;
    uint64_t old64 = 0;
    set_up();
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        CHECK_EQ(lcs_atomic32(c.at, WORD, steps[i].op, steps[i].value, &old), LC_OK);
        if (steps[i].op != OP_STORE) CHECK_EQ(old, before);
        CHECK_EQ(lcs_atomic32(r.at, WORD, OP_LOAD, 0, &now), LC_OK);
        CHECK_EQ(now, steps[i].after);
        before = now;
    }
    CHECK_EQ(lcs_atomic32(c.at, WORD, OP_SWAP + 1, 0, &old), LC_E_RANGE);
    CHECK_EQ(lcs_atomic32(r.at, WORD, OP_ADD, 1, &old), LC_E_READONLY);
    CHECK_EQ(lcs_atomic64(c.at, WORD + 8, OP_STORE, UINT64_C(1) << 40, &old64), LC_OK);
    CHECK_EQ(lcs_atomic64(c.at, WORD + 8, OP_ADD, 1, &old64), LC_OK);
    CHECK_EQ(old64, UINT64_C(1) << 40);
    CHECK_EQ(lcs_atomic64(c.at, WORD + 8, OP_OR, 2, &old64), LC_OK);
    CHECK_EQ(lcs_atomic64(c.at, WORD + 8, OP_AND, 3, &old64), LC_OK);
    CHECK_EQ(old64, (UINT64_C(1) << 40) + 3);
    CHECK_EQ(lcs_atomic64(c.at, WORD + 8, OP_SWAP, 5, &old64), LC_OK);
    CHECK_EQ(old64, 3);
    CHECK_EQ(lcs_atomic64(c.at, WORD + 8, OP_LOAD, 0, &old64), LC_OK);
    CHECK_EQ(old64, 5);
    uint64_t pairs[] = {1, 7, 2, 9, 1, 1};
    CHECK_EQ(lcs_add_many(c.at, WORD, pairs, 3), LC_OK);
    CHECK_EQ(lcs_atomic64(c.at, WORD + 8, OP_LOAD, 0, &old64), LC_OK);
    CHECK_EQ(old64, 13);
    CHECK_EQ(lcs_atomic64(c.at, WORD + 16, OP_LOAD, 0, &old64), LC_OK);
    CHECK_EQ(old64, 9);
    CHECK_EQ(lcs_add_many(r.at, WORD, pairs, 3), LC_E_READONLY);
    CHECK_EQ(lcs_atomic64(r.at, WORD + 8, OP_STORE, 0, &old64), LC_E_READONLY);
    CHECK_EQ(lcs_atomic64(c.at, WORD + 8, -1, 0, &old64), LC_E_RANGE);
    tear_down();
}

static void sync_compare_exchange(void) {
    uint32_t expected = 1, now;
    uint64_t expected64 = 0;
    set_up();
    CHECK_EQ(lcs_compare_exchange32(c.at, WORD, &expected, 9), 0);
    CHECK_EQ(expected, 0);
    CHECK_EQ(lcs_compare_exchange32(c.at, WORD, &expected, 9), 1);
    CHECK_EQ(lcs_atomic32(c.at, WORD, OP_LOAD, 0, &now), LC_OK);
    CHECK_EQ(now, 9);
    CHECK_EQ(lcs_compare_exchange64(c.at, WORD + 8, &expected64, UINT64_MAX), 1);
    CHECK_EQ(lcs_compare_exchange64(c.at, WORD + 8, &expected64, 1), 0);
    CHECK(expected64 == UINT64_MAX);
    CHECK_EQ(lcs_compare_exchange32(r.at, WORD, &expected, 1), LC_E_READONLY);
    CHECK_EQ(lcs_compare_exchange64(r.at, WORD, &expected64, 1), LC_E_READONLY);
    tear_down();
}

static void event_counts_by_two_and_clears_the_sleepers_bit(void) {
    _Atomic uint32_t event = 0;
    lc_event_notify(&event);
    CHECK_EQ(lc_load(&event), 2);
    lc_store(&event, 7);
    lc_event_notify(&event);
    CHECK_EQ(lc_load(&event), 8);
}

static void event_does_not_sleep_past_a_notification(void) {
    _Atomic uint32_t event = 4;
    CHECK_EQ(lc_event_sleep(&event, 2, true, UINT64_MAX), LC_OK);
    CHECK_EQ(lc_load(&event), 4);
    lc_store(&event, 3); /* another sleeper has set the bit for us too */
    CHECK_EQ(lc_event_sleep(&event, 2, true, 1), LC_E_TIMEOUT);
    CHECK_EQ(lc_event_sleep(&event, 3, true, 1), LC_E_TIMEOUT);
    CHECK_EQ(lc_load(&event), 3);
    lc_store(&event, 2);
    CHECK_EQ(lc_event_sleep(&event, 2, false, 1), LC_E_TIMEOUT);
    CHECK_EQ(lc_load(&event), 2); /* a reader asks for nothing */
    CHECK_EQ(lc_event_sleep(&event, 2, true, 1), LC_E_TIMEOUT);
    CHECK_EQ(lc_load(&event), 3);
}

static void *wait_for_event(void *argument) {
    uint32_t seen = *(uint32_t *)argument;
    int rc;
    do rc = lcs_event_wait(c.at, WORD, seen, FOREVER);
    while (rc == LC_E_INTR);
    return (void *)(intptr_t)rc;
}

static void event_wakes_its_sleepers(void) {
    uint32_t seen;
    pthread_t sleepers[3];
    void *rc;
    set_up();
    CHECK_EQ(lcs_event_read(c.at, WORD, &seen), LC_OK);
    for (int i = 0; i < 3; i++)
        CHECK_EQ(pthread_create(&sleepers[i], NULL, wait_for_event, &seen), 0);
    uint32_t now = 0;
    while (!(now & 1)) CHECK_EQ(lcs_event_read(c.at, WORD, &now), LC_OK);
    CHECK_EQ(lcs_event_notify(c.at, WORD), LC_OK);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(pthread_join(sleepers[i], &rc), 0);
        CHECK_EQ((intptr_t)rc, LC_OK);
    }
    CHECK_EQ(lcs_event_wait(c.at, WORD, seen, FOREVER), LC_OK); /* notified since */
    CHECK_EQ(lcs_event_notify(r.at, WORD), LC_E_READONLY);
    CHECK_EQ(lcs_event_read(r.at, WORD, &seen), LC_OK);
    CHECK_EQ(lcs_event_wait(r.at, WORD, seen, 1), LC_E_TIMEOUT);
    lcs_attachment_close(r.at);
    CHECK_EQ(lcs_event_wait(r.at, WORD, seen, 1), LC_E_CLOSED);
    CHECK_EQ(lcs_event_read(r.at, WORD, &seen), LC_E_CLOSED);
    tear_down();
}

static void robust_lock_tells_whose_owner_died(void) {
    set_up();
    client other = client_join(&s);
    CHECK_EQ(lcs_robust_take(c.at, 1, BLOCKING), 0);
    CHECK_EQ(lcs_robust_take(other.at, 1, LC_TRY, 0), LC_E_BUSY);
    CHECK_EQ(lcs_robust_take(other.at, 1, LC_BLOCK, 0), LC_E_TIMEOUT);
    CHECK_EQ(lcs_robust_take(c.at, 1, LC_TRY, 0), LC_E_BUSY); /* another thread, it may be */
    CHECK_EQ(lcs_robust_take(r.at, 1, BLOCKING), LC_E_READONLY);
    CHECK_EQ(lcs_robust_drop(c.at), LC_OK);
    CHECK_EQ(lcs_robust_take(c.at, 1, BLOCKING), 0);
    close(c.life);
    c.life = -1;
    CHECK_EQ(lcs_robust_take(other.at, 1, BLOCKING), 1);
    CHECK_EQ(lcs_robust_drop(c.at), LC_E_LOST);
    CHECK_EQ(lcs_robust_drop(other.at), LC_OK);
    client_forget(&c);
    client_leave(&other);
    tear_down();
}

static int recovered(uint64_t bytes) {
    uint8_t *copy = malloc(s.bytes);
    CHECK(copy);
    memcpy(copy, s.base, s.bytes);
    int rc = lcs_recover_copy(copy, bytes);
    if (rc >= 0) CHECK_EQ(lc_load((_Atomic uint32_t *)(copy + WORD)), 7);
    free(copy);
    return rc;
}

static void copy_is_recovered_as_by_the_next_holder(void) {
    set_up();
    lcs_lock *lock = lcs_lock_of(c.at);
    _Atomic uint32_t *word = (_Atomic uint32_t *)(s.base + WORD);
    lc_store(word, 7);
    CHECK_EQ(recovered(s.bytes), 0);
    CHECK_EQ(lcs_robust_take(c.at, 1, BLOCKING), 0);
    lc_txn t = {.base = s.base, .lock = lock,
                .log = (_Atomic uint64_t *)(s.base + LCS_LOG_OFFSET)};
    lc_txn_set(&t, word, 8);
    CHECK_EQ(recovered(s.bytes), 1);
    CHECK_EQ(recovered(LCS_PAYLOAD_OFFSET - 1), LC_E_RANGE);
    uint32_t holder = lc_load(&lock->word);
    lc_store(&lock->word, 0); /* entries, and nobody holds the lock: forged */
    CHECK_EQ(recovered(s.bytes), LC_E_CORRUPT);
    lc_store(&lock->word, holder);
    lc_txn_undo(s.base, lock, LCS_PAYLOAD_OFFSET, s.bytes);
    CHECK_EQ(lcs_robust_drop(c.at), LC_OK);
    CHECK_EQ(lc_load(word), 7);
    tear_down();
}

const test sync_tests[] = {
    TEST(sync_atomics),
    TEST(sync_compare_exchange),
    TEST(event_counts_by_two_and_clears_the_sleepers_bit),
    TEST(event_does_not_sleep_past_a_notification),
    TEST(event_wakes_its_sleepers),
    TEST(robust_lock_tells_whose_owner_died),
    TEST(copy_is_recovered_as_by_the_next_holder),
    END_OF_TESTS,
};
