/* The undo log: what makes a critical section all or nothing under SIGKILL.
 *
 * A holder of the lock changes shared words through `lc_txn_set` and its kin. Each first writes
 * (word, old value) into the log, then counts the entry, then stores. `lc_txn_commit` empties the
 * log with one store, and that store is the instant at which the step has happened. A process that
 * takes the lock and finds entries undoes them in reverse (`lc_txn_undo`): the segment is then as
 * it was at the last commit. Undoing twice gives the same, so a death in recovery needs nothing.
 *
 * Undoing in reverse also keeps the promise made to readers without a lock: what was linked last
 * is unlinked first.
 *
 * Two kinds of word:
 *   plain  only the holder of the lock stores to it; the old value comes back.
 *   soft   others may compare-and-swap it without the lock (a page's state, a shard's word); the
 *          old value comes back only while our new one is still there.
 *
 * Not logged at all: the fields of a record that nothing leads to (a free one). They are dead, and
 * a record freed in a step must not be used again before the next one. Its generation only ever
 * moves on, in an undone step too. */
#ifndef LC_TXN_H
#define LC_TXN_H

#include "lc_base.h"

#define LC_LOG_KIND UINT32_C(0x80000000)
#define LC_LOG_PLAIN UINT32_C(0x00000000)
#define LC_LOG_SOFT UINT32_C(0x80000000) /* followed by an entry that holds the new value */
#define LC_LOG_REACH (UINT64_C(1) << 33) /* bytes that 31 bits of 4-byte words address */

typedef struct lc_txn {
    uint8_t *base;
    lcs_lock *lock;
    _Atomic uint64_t *log;
    uint32_t count; /* entries in force, as `lock->log_count` says */
    int32_t error;  /* the first thing that was wrong; the caller rolls back */
    bool taken_over; /* the lock was taken from an owner that had died in it */
} lc_txn;

static inline uint32_t lc_txn_word(const lc_txn *t, const void *word) {
    return (uint32_t)(((const uint8_t *)word - t->base) / 4);
}

static inline bool lc_txn_room(lc_txn *t, uint32_t entries) {
    if (LC_LIKELY(t->count + entries <= LCS_LOG_ENTRIES)) return true;
    if (!t->error) t->error = LC_E_CORRUPT; /* safe points bound a step; only damage gets here */
    return false;
}

static inline void lc_txn_note(lc_txn *t, uint32_t tag, uint32_t old) {
    lc_store(&t->log[t->count], (uint64_t)tag | (uint64_t)old << 32);
    t->count++;
}

/* The entries just noted come into force before the word is stored. */
static inline void lc_txn_arm(lc_txn *t) {
    lc_kill_fence();
    lc_store(&t->lock->log_count, t->count);
    lc_kill_fence();
}

/* Store `value` so that it is undone unless the step commits. Release: a reader without the lock
 * that sees the value sees everything stored before it. */
static inline void lc_txn_set(lc_txn *t, _Atomic uint32_t *word, uint32_t value) {
    if (LC_UNLIKELY(!lc_txn_room(t, 1))) return;
    lc_txn_note(t, lc_txn_word(t, word) | LC_LOG_PLAIN, lc_load(word));
    lc_txn_arm(t);
    lc_store_release(word, value); /* order: txn-set */
}

static inline void lc_txn_add(lc_txn *t, _Atomic uint32_t *word, uint32_t delta) {
    lc_txn_set(t, word, lc_load(word) + delta);
}

/* Compare-and-swap a word that others change without the lock. False: it held something else. */
static inline bool lc_txn_swap(lc_txn *t, _Atomic uint32_t *word, uint32_t old, uint32_t value) {
    if (LC_UNLIKELY(!lc_txn_room(t, 2))) return false;
    lc_txn_note(t, lc_txn_word(t, word) | LC_LOG_SOFT, old);
    lc_txn_note(t, value, 0);
    lc_txn_arm(t);
    return atomic_compare_exchange_strong_explicit(word, &old, value, memory_order_acq_rel,
                                                   memory_order_acquire);
}

static inline void lc_txn_commit(lc_txn *t) {
    if (!t->count) return;
    LC_PAUSE(LC_AT_COMMIT);
    lc_kill_fence();
    lc_store_release(&t->lock->log_count, 0);
    lc_kill_fence();
    t->count = 0;
}

/* Undo the entries of the log, newest first, and empty it. `begin` and `end` bound the words it may
 * touch, from the caller's own knowledge of the segment: the log lies in shared memory and is not
 * believed. Returns the number of words undone or LC_E_CORRUPT (then nothing was touched). */
int lc_txn_undo(uint8_t *base, lcs_lock *lock, uint64_t begin, uint64_t end);

#endif
