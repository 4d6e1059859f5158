#include "lock.h"

#include "clients.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#ifndef LC_SPINS /* tests that execute single steps set a smaller one */
#define LC_SPINS 2000                /* about 20 us: longer than most holds, shorter than a switch */
#endif
#define SLEEP_NS UINT64_C(5000000)   /* then the owner's life is looked at */
#define SLICE_NS UINT64_C(50000000)  /* then the interpreter may run signal handlers */

uint64_t lcs_now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * UINT64_C(1000000000) + (uint64_t)ts.tv_nsec;
}

int lc_futex_wait(_Atomic uint32_t *word, uint32_t expected, uint64_t nanoseconds) {
    struct timespec ts = {.tv_sec = (time_t)(nanoseconds / UINT64_C(1000000000)),
                          .tv_nsec = (long)(nanoseconds % UINT64_C(1000000000))};
    if (syscall(SYS_futex, word, FUTEX_WAIT, expected, &ts, NULL, 0) == 0) return LC_OK;
    if (errno == EINTR) return LC_E_INTR;
    return errno == ETIMEDOUT ? LC_E_TIMEOUT : LC_OK;
}

void lc_futex_wake(_Atomic uint32_t *word, int count) {
    syscall(SYS_futex, word, FUTEX_WAKE, count, NULL, NULL, 0);
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    atomic_signal_fence(memory_order_seq_cst);
#endif
}

static uint32_t own_word(const lcs_attachment *at) {
    return at->slot | at->epoch << LCS_LOCK_EPOCH_SHIFT;
}

static uint32_t word_of(uint64_t both) { return (uint32_t)both; }

static uint64_t with_word(uint64_t both, uint32_t word) {
    return (both & ~UINT64_C(0xffffffff)) | word;
}

static bool swap(lcs_lock *lock, uint64_t from, uint64_t to) {
    return atomic_compare_exchange_strong_explicit(&lock->both, &from, to, memory_order_acq_rel,
                                                   memory_order_relaxed); /* order: lock-swap */
}

/* A taking: the owner's word and the next sequence. */
static bool take(lcs_lock *lock, uint64_t from, uint32_t mine) {
    return swap(lock, from, with_word(from + (UINT64_C(1) << 32), mine));
}

static bool spin(lcs_lock *lock, uint32_t mine) {
    for (int i = 0; i < LC_SPINS; i++) {
        uint64_t both = lc_load(&lock->both);
        if (word_of(both) == 0 && take(lock, both, mine)) return true;
        relax();
    }
    return false;
}

/* Is the owner that `both` names dead? Yes, when its slot's byte is free or its slot has moved on to
 * another epoch; within one PID namespace also as soon as the thread that took the lock will never
 * run again. Our own slot is never dead: another thread of this process holds the lock. */
static bool owner_dead(const lcs_attachment *at, const lcs_lock *lock, uint64_t both) {
    uint32_t word = word_of(both), slot = word & LCS_LOCK_SLOT;
    if (slot == 0 || slot >= LCS_SLOTS) return true; /* damage: nobody can hold it */
    uint32_t epoch = word >> LCS_LOCK_EPOCH_SHIFT;
    if (slot == at->slot && epoch == (at->epoch & 0xffffff)) return false;
    if ((lc_load(&lcs_client_of(at, slot)->epoch) & 0xffffff) != epoch) return true;
    if (!lcs_slot_alive(at, slot)) return true;
    uint64_t holder = lc_load(&lock->holder);
    if (holder >> 32 != both >> 32) return false; /* of an earlier taking: the new one is at it */
    return lcs_thread_gone(at, slot, (uint32_t)holder);
}

static int sleep_once(lcs_lock *lock, uint64_t both) {
    if (!(both & LCS_LOCK_WAITERS)) {
        if (!swap(lock, both, both | LCS_LOCK_WAITERS)) return LC_OK;
        both |= LCS_LOCK_WAITERS;
    }
    int rc = lc_futex_wait(&lock->word, word_of(both), SLEEP_NS);
    return rc == LC_E_TIMEOUT ? LC_OK : rc;
}

static int block(lcs_attachment *at, lcs_lock *lock, uint32_t mine, uint64_t deadline,
                 bool *taken_over) {
    uint64_t slice = lcs_now_ns() + SLICE_NS;
    for (;;) {
        uint64_t both = lc_load(&lock->both);
        /* Whoever has slept takes the lock with the waiters bit: there may be other sleepers. */
        if (word_of(both) == 0) {
            if (take(lock, both, mine | LCS_LOCK_WAITERS)) return LC_OK;
            continue;
        }
        if (owner_dead(at, lock, both)) {
            LC_PAUSE(LC_AT_OWNER_DEAD);
            *taken_over = take(lock, both, mine | LCS_LOCK_WAITERS);
            if (*taken_over) return LC_OK;
            continue;
        }
        uint64_t now = lcs_now_ns();
        if (now >= deadline) return LC_E_TIMEOUT;
        if (now >= slice) return LC_E_INTR;
        int rc = sleep_once(lock, both);
        if (rc != LC_OK) return rc;
        if (*at->fork_word != 1) return LC_E_FORKED;
    }
}

static uint32_t own_tid(const lcs_attachment *at) {
    static _Thread_local uint32_t tid;
    static _Thread_local uint32_t tid_of;
    if (at->guest) return 0;
    if (tid_of != at->pid) {
        tid = (uint32_t)syscall(SYS_gettid);
        tid_of = at->pid;
    }
    return tid;
}

static void note_holder(const lcs_attachment *at, lcs_lock *lock, uint32_t operation,
                        uint64_t asked, uint64_t now) {
    uint64_t sequence = lc_load(&lock->both) >> 32;
    lc_store(&lock->operation, operation);
    lc_store(&lock->since_ns, now);
    /* Last: who finds this taking's sequence here knows that the two above are of it as well. */
    lc_store_release(&lock->holder, sequence << 32 | own_tid(at));
    lc_store(&lock->acquisitions, lc_load(&lock->acquisitions) + 1);
    if (asked) {
        lc_store(&lock->contended, lc_load(&lock->contended) + 1);
        lc_store(&lock->wait_ns, lc_load(&lock->wait_ns) + (now - asked));
    }
}

static int recover(lcs_attachment *at, lcs_lock *lock, uint64_t begin, uint64_t end) {
    int undone = lc_txn_undo(at->base, lock, begin, end);
    if (undone < 0) return undone;
    lc_store(&lock->recoveries, lc_load(&lock->recoveries) + 1);
    lc_store(&lock->undone_words, lc_load(&lock->undone_words) + (uint64_t)undone);
    return LC_OK;
}

static bool is_mine(const lcs_lock *lock, uint32_t mine) {
    return ((lc_load(&lock->word) ^ mine) & ~LCS_LOCK_WAITERS) == 0;
}

static void let_go(lcs_lock *lock, uint32_t mine) {
    uint64_t both = lc_load(&lock->both);
    while (is_mine(lock, mine) && !swap(lock, both, with_word(both, 0)))
        both = lc_load(&lock->both); /* a waiter has set its bit */
    if (both & LCS_LOCK_WAITERS) lc_futex_wake(&lock->word, 1);
}

int lcs_lock_take(lcs_attachment *at, lc_txn *txn, uint32_t operation, int wait,
                  uint64_t deadline, uint64_t begin, uint64_t end) {
    lcs_lock *lock = lcs_lock_of(at);
    uint32_t mine = own_word(at);
    uint64_t asked = 0;
    bool taken_over = false;
    if (at->readonly) return LC_E_READONLY;
    uint64_t both = lc_load(&lock->both);
    if (word_of(both) != 0 || !take(lock, both, mine)) {
        asked = lcs_now_ns();
        if (!spin(lock, mine)) {
            if (!(wait & LC_BLOCK)) return LC_E_BUSY;
            int rc = block(at, lock, mine, deadline, &taken_over);
            if (rc != LC_OK) return rc;
        }
    }
    /* From here to the end of recovery a death leaves the log as it is: the next one undoes it. */
    note_holder(at, lock, operation, asked, lcs_now_ns());
    LC_PAUSE(LC_AT_LOCKED);
    if (lc_load_acquire(&lock->log_count) != 0) {
        /* Who gives the lock back has emptied the log: entries behind a free lock are forged, or a
         * log that could not be undone before. */
        int rc = taken_over ? recover(at, lock, begin, end) : LC_E_CORRUPT;
        if (rc != LC_OK && (wait & LC_DISCARD)) {
            lc_store_release(&lock->log_count, 0);
        } else if (rc != LC_OK) {
            let_go(lock, mine);
            return rc;
        }
    }
    *txn = (lc_txn){.base = at->base,
                    .lock = lock,
                    .taken_over = taken_over,
                    .log = (_Atomic uint64_t *)(at->base + LCS_LOG_OFFSET)};
    return LC_OK;
}

int lcs_lock_drop(lcs_attachment *at, lc_txn *txn, uint64_t begin, uint64_t end) {
    lcs_lock *lock = txn->lock;
    uint32_t mine = own_word(at);
    if (!is_mine(lock, mine)) return LC_E_LOST;
    int error = txn->error;
    if (error) {
        int rc = lc_txn_undo(at->base, lock, begin, end);
        if (rc < 0) error = rc;
        txn->count = 0;
    } else {
        lc_txn_commit(txn);
    }
    uint64_t held = lcs_now_ns() - lc_load(&lock->since_ns);
    lc_store(&lock->hold_ns, lc_load(&lock->hold_ns) + held);
    if (held > lc_load(&lock->hold_max_ns)) lc_store(&lock->hold_max_ns, held);
    LC_PAUSE(LC_AT_UNLOCK);
    let_go(lock, mine);
    return error;
}
