/* Atomics, events and the lock as Python uses them by themselves. Offsets are byte offsets in the
 * segment, checked by the caller to lie in the payload and to be aligned. */
#include "event.h"

#include <errno.h>

enum { OP_LOAD = 0, OP_STORE, OP_ADD, OP_OR, OP_AND, OP_SWAP };

static int writable(const lcs_attachment *at) {
    int rc = lcs_usable(at);
    if (rc == LC_OK && at->readonly) rc = LC_E_READONLY;
    return rc;
}

#define ATOMIC(bits)                                                                              \
    LC_API int lcs_atomic##bits(lcs_attachment *at, uint64_t offset, int op, uint##bits##_t value, \
                                uint##bits##_t *old) {                                            \
        int rc = op == OP_LOAD ? lcs_usable(at) : writable(at);                                   \
        if (rc != LC_OK) return rc;                                                               \
        _Atomic uint##bits##_t *word = (_Atomic uint##bits##_t *)(at->base + offset);             \
        switch (op) {                                                                             \
        case OP_LOAD: *old = atomic_load(word); break;                                            \
        case OP_STORE: atomic_store(word, value); break;                                          \
        case OP_ADD: *old = atomic_fetch_add(word, value); break;                                 \
        case OP_OR: *old = atomic_fetch_or(word, value); break;                                   \
        case OP_AND: *old = atomic_fetch_and(word, value); break;                                 \
        case OP_SWAP: *old = atomic_exchange(word, value); break;                                 \
        default: return LC_E_RANGE;                                                               \
        }                                                                                         \
        return LC_OK;                                                                             \
    }                                                                                             \
    LC_API int lcs_compare_exchange##bits(lcs_attachment *at, uint64_t offset,                    \
                                          uint##bits##_t *expected, uint##bits##_t value) {       \
        int rc = writable(at);                                                                    \
        if (rc != LC_OK) return rc;                                                               \
        _Atomic uint##bits##_t *word = (_Atomic uint##bits##_t *)(at->base + offset);             \
        return atomic_compare_exchange_strong(word, expected, value);                             \
    }

ATOMIC(32)
ATOMIC(64)

/* Adds to counters of a row, which begins at `row`: pairs of a place in it and what is added. Each
 * addition is whole wherever the process is killed. Sums of independent counters need no order. */
LC_API int lcs_add_many(lcs_attachment *at, uint64_t row, const uint64_t *pairs, uint32_t n) {
    int rc = writable(at);
    if (rc != LC_OK) return rc;
    _Atomic uint64_t *words = (_Atomic uint64_t *)(at->base + row);
    for (uint32_t i = 0; i < n; i++)
        atomic_fetch_add_explicit(&words[pairs[2 * i]], pairs[2 * i + 1], memory_order_relaxed);
    return LC_OK;
}

/* The count to hand to lcs_event_wait later. */
LC_API int lcs_event_read(lcs_attachment *at, uint64_t offset, uint32_t *seen) {
    int rc = lcs_usable(at);
    if (rc != LC_OK) return rc;
    *seen = lc_load_acquire((_Atomic uint32_t *)(at->base + offset)); /* order: event-read */
    return LC_OK;
}

LC_API int lcs_event_notify(lcs_attachment *at, uint64_t offset) {
    int rc = writable(at);
    if (rc == LC_OK) lc_event_notify((_Atomic uint32_t *)(at->base + offset));
    return rc;
}

/* LC_OK: notified since `seen`, or woken for no reason; LC_E_TIMEOUT after `nanoseconds`. */
LC_API int lcs_event_wait(lcs_attachment *at, uint64_t offset, uint32_t seen,
                          uint64_t nanoseconds) {
    int rc = lcs_usable(at);
    if (rc != LC_OK) return rc;
    _Atomic uint32_t *event = (_Atomic uint32_t *)(at->base + offset);
    /* One load: what is compared is what is slept on. A second might find a notification in it. */
    uint32_t now = lc_load_acquire(event);
    if ((now & ~UINT32_C(1)) != (seen & ~UINT32_C(1))) return LC_OK;
    LC_PAUSE(LC_AT_EVENT_COMPARED);
    return lc_event_sleep(event, now, !at->readonly, nanoseconds);
}

/* Take the segment's lock: 1 when its owner had died holding it, else 0. */
LC_API int lcs_robust_take(lcs_attachment *at, uint32_t operation, int wait, uint64_t deadline) {
    lc_txn t;
    int rc = lcs_usable(at);
    if (rc != LC_OK) return rc;
    if (at->slot == 0) return LC_E_READONLY;
    if (wait == LC_TRY ? pthread_mutex_trylock(&at->door) : pthread_mutex_lock(&at->door))
        return LC_E_BUSY;
    rc = lcs_lock_take(at, &t, operation, wait, deadline, LCS_PAYLOAD_OFFSET, at->bytes);
    if (rc != LC_OK) {
        pthread_mutex_unlock(&at->door);
        return rc;
    }
    return t.taken_over ? 1 : 0;
}

LC_API int lcs_robust_drop(lcs_attachment *at) {
    if (*at->fork_word != 1) return LC_E_FORKED;
    lc_txn t = {.base = at->base, .lock = lcs_lock_of(at)};
    int rc = lcs_lock_drop(at, &t, LCS_PAYLOAD_OFFSET, at->bytes);
    pthread_mutex_unlock(&at->door);
    return rc;
}

/* Undo an unfinished step in a copy of a segment, `bytes` long, as the next holder of the lock would.
 * Returns the log entries undone, or LC_E_CORRUPT. */
LC_API int lcs_recover_copy(uint8_t *base, uint64_t bytes) {
    if (bytes < LCS_PAYLOAD_OFFSET) return LC_E_RANGE;
    lcs_lock *lock = (lcs_lock *)(base + LCS_LOCK_OFFSET);
    if (lc_load(&lock->log_count) && lcs_word_free(lc_load(&lock->word))) return LC_E_CORRUPT;
    return lc_txn_undo(base, lock, LCS_PAYLOAD_OFFSET, bytes);
}
