/* The lock: one futex word that knows its owner, taken over by the process that finds the owner
 * dead. */
#ifndef LC_LOCK_H
#define LC_LOCK_H

#include "txn.h"

/* LC_DISCARD beside one of them: a log that is damaged is dropped instead of refused (repair). */
enum lc_wait { LC_TRY = 0, LC_BLOCK = 1, LC_DISCARD = 2 };

/* Take the lock for `operation`. With LC_TRY spin for some microseconds, then LC_E_BUSY. With
 * LC_BLOCK sleep in slices until `deadline_ns` (CLOCK_MONOTONIC; LC_E_TIMEOUT), and come back with
 * LC_E_INTR after a signal or at the latest every 50 ms, so that the interpreter may run handlers.
 * Whatever a dead owner left half done has been undone when this returns LC_OK. The words that
 * undoing may touch are [begin, end), byte offsets in the segment. */
int lcs_lock_take(lcs_attachment *at, lc_txn *txn, uint32_t operation, int wait,
                  uint64_t deadline_ns, uint64_t begin, uint64_t end);

/* Give it back, after a commit (or after rolling back when `txn->error` is set). LC_E_LOST: this
 * client had been declared dead and the lock taken from it. */
int lcs_lock_drop(lcs_attachment *at, lc_txn *txn, uint64_t begin, uint64_t end);

/* Does a process wait? Then a holder of long work gives way between two commits. */
static inline bool lcs_lock_wanted(const lcs_attachment *at) {
    return (lc_load(&lcs_lock_of(at)->word) & LCS_LOCK_WAITERS) != 0;
}

/* 0 woken or changed, LC_E_INTR, LC_E_TIMEOUT. Shared (not private) futex. */
int lc_futex_wait(_Atomic uint32_t *word, uint32_t expected, uint64_t nanoseconds);
void lc_futex_wake(_Atomic uint32_t *word, int count);

#endif
