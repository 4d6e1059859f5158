#include "lock.h"

#include "clients.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define SPIN_NS UINT64_C(50000)      /* longer than most holds: to sleep and be woken costs more */
#ifndef LC_SPIN_ROUNDS /* tests that execute single steps set a smaller one */
#define LC_SPIN_ROUNDS 64            /* between two looks at the clock: 0.7 to 3 us */
#endif
#ifndef LC_STARVED_NS
#define LC_STARVED_NS UINT64_C(125000) /* a waiter that has slept goes before newcomers from then on */
#endif
#define YIELD_NS UINT64_C(100000)    /* so long they leave it the free lock: it may be dead */
#define SLEEP_NS UINT64_C(5000000)   /* then the owner's life is looked at */
#define SLICE_NS UINT64_C(50000000)  /* then the interpreter may run signal handlers */

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the lower half of `holder` comes first");

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
    __builtin_ia32_pause(); /* 10 to 50 ns */
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory"); /* about as long; `yield` is a no-op on most cores */
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

static bool is_free(uint64_t both) { return lcs_word_free(word_of(both)); }

/* By the clock: one round takes 1 ns on one processor and 50 on another. Who has not slept leaves a
 * free lock to a process that has starved, for as long as it may need to take it. */
static bool spin(lcs_lock *lock, uint32_t mine, uint64_t begun) {
    for (uint64_t waited = 0;;) {
        for (int i = 0; i < LC_SPIN_ROUNDS; i++) {
            uint64_t both = lc_load(&lock->both);
            bool yields = both & LCS_LOCK_STARVED && waited < YIELD_NS;
            if (is_free(both) && !yields && take(lock, both, mine)) return true;
            relax();
        }
        waited = lcs_now_ns() - begun;
        if (waited >= SPIN_NS && !is_free(lc_load(&lock->both))) return false;
    }
}

/* A starved process does not sleep again at once: it is woken too late to find the lock free. */
static bool spin_starved(const lcs_lock *lock) {
    uint64_t begun = lcs_now_ns();
    do {
        for (int i = 0; i < LC_SPIN_ROUNDS; i++) {
            if (is_free(lc_load(&lock->both))) return true;
            relax();
        }
    } while (lcs_now_ns() - begun < YIELD_NS);
    return false;
}

/* Is the owner that `both` names dead? Yes, when its slot has moved on to another epoch, when the
 * kernel has put its mark in place of the thread that took the lock (see `hint`), or when the slot's
 * byte is free; within one PID namespace also as soon as that thread will never run again. Our own
 * slot is never dead: another thread of this process holds the lock. */
static bool owner_dead(const lcs_attachment *at, const lcs_lock *lock, uint64_t both) {
    uint32_t word = word_of(both), slot = word & LCS_LOCK_SLOT;
    if (slot == 0) return true; /* damage: no client can hold it */
    uint32_t epoch = word >> LCS_LOCK_EPOCH_SHIFT;
    if (slot == at->slot && epoch == (at->epoch & 0xffffff)) return false;
    if ((lc_load(&lcs_client_of(at, slot)->epoch) & 0xffffff) != epoch) return true;
    /* Acquire: with the kernel's mark we see all that the dead one had stored before it. */
    uint64_t holder = lc_load_acquire(&lock->holder); /* order: holder-look */
    bool of_this_taking = holder >> 32 == both >> 32; /* or else the new holder is about to note it */
    if (of_this_taking && (holder & FUTEX_OWNER_DIED)) return true;
    if (!lcs_slot_alive(at, slot)) return true;
    return of_this_taking && lcs_thread_gone(at, slot, (uint32_t)holder);
}

static int sleep_once(lcs_lock *lock, uint64_t both, bool starved, bool *slept) {
    uint64_t said = both | LCS_LOCK_WAITERS | (starved ? LCS_LOCK_STARVED : 0);
    if (said != both && !swap(lock, both, said)) return LC_OK;
    *slept = true;
    if (starved && spin_starved(lock)) return LC_OK;
    int rc = lc_futex_wait(&lock->word, word_of(said), SLEEP_NS);
    return rc == LC_E_TIMEOUT ? LC_OK : rc;
}

/* A process dies, or gives up, with its STARVED in the word: who takes the lock next clears it, at the
 * latest YIELD_NS after it asked. */
static int block(lcs_attachment *at, lcs_lock *lock, uint32_t mine, uint64_t asked,
                 uint64_t deadline, bool *taken_over) {
    uint64_t slice = lcs_now_ns() + SLICE_NS;
    for (bool slept = false;;) {
        uint64_t both = lc_load(&lock->both);
        /* After sleeping the lock is taken with the waiters bit: there may be other sleepers. */
        if (is_free(both)) {
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
        int rc = sleep_once(lock, both, slept && now - asked >= LC_STARVED_NS, &slept);
        if (rc != LC_OK) return rc;
        if (*at->fork_word != 1) return LC_E_FORKED;
    }
}

/* What the calling thread knows of itself. A forked child inherits it, with the number and perhaps
 * even the pid of its parent's thread: the fork word's address is another one in every child. */
typedef struct own_thread {
    const volatile uint32_t *fork_word;
    uint32_t tid;
    struct robust_list_head *robust; /* NULL: this thread has registered none */
} own_thread;
static _Thread_local own_thread self;

static const own_thread *know_self(const lcs_attachment *at) {
    own_thread *me = &self; /* looked up once: a call, in a shared library */
    if (LC_LIKELY(me->fork_word == at->fork_word)) return me;
    me->tid = (uint32_t)syscall(SYS_gettid);
    me->robust = NULL;
#ifdef SYS_get_robust_list
    struct robust_list_head *head = NULL;
    size_t bytes = 0;
    if (syscall(SYS_get_robust_list, 0, &head, &bytes) == 0 && bytes == sizeof *head)
        me->robust = head;
#endif
    me->fork_word = at->fork_word;
    return me;
}

/* The hint: where a thread dies, the kernel looks at the word that `list_op_pending` of its list of
 * robust futexes leads to, and if it finds the thread's number there (as its own PID namespace
 * counts) it stores FUTEX_OWNER_DIED. It does so before it takes down the dead one's memory, which
 * takes 20 ms for each GiB; the byte lock is released only after that. The word is the lower half
 * of `holder`, whose upper half says which taking it belongs to.
 *
 * A thread of another PID namespace may have our number. So the word is led to only between taking
 * the lock and giving it back: a dying thread that does not have the lock marks nothing.
 *
 * The C library uses `list_op_pending` in each operation on a robust mutex, and leaves it NULL.
 * Where it is not NULL now, we are a signal handler within one, or hold another segment's lock:
 * then there is no hint, as in a thread that has no list (musl makes it with the first robust
 * mutex). Where a robust mutex was used since, by a signal handler or by the holder of the lock of
 * a plain segment, the hint is gone. Then the byte lock decides, as before. */
static struct robust_list *hint_of(const own_thread *me, const lcs_lock *lock) {
    return (struct robust_list *)((uintptr_t)&lock->holder - (uintptr_t)me->robust->futex_offset);
}

/* The swaps that take the lock and give it back keep both of these between them. */
static void hint(const own_thread *me, const lcs_lock *lock) {
    if (!me->robust || (me->robust->futex_offset & 1)) return; /* bit 0: it inherits priority */
    struct robust_list *volatile *pending = &me->robust->list_op_pending;
    if (*pending == NULL) *pending = hint_of(me, lock);
}

static void unhint(const lcs_attachment *at, const lcs_lock *lock) {
    const own_thread *me = &self;
    if (me->fork_word != at->fork_word || !me->robust) return; /* another thread took the lock */
    struct robust_list *volatile *pending = &me->robust->list_op_pending;
    if (*pending == hint_of(me, lock)) *pending = NULL;
}

static void note_holder(const lcs_attachment *at, lcs_lock *lock, uint32_t operation,
                        uint64_t asked, uint64_t now) {
    uint64_t sequence = lc_load(&lock->both) >> 32;
    const own_thread *me = know_self(at);
    lc_store(&lock->operation, operation);
    lc_store(&lock->since_ns, now);
    /* Last: a process that finds this taking's sequence here knows that the two above belong to it
     * as well. A guest is no thread of the client that it acts as. */
    lc_store_release(&lock->holder, sequence << 32 | (at->guest ? 0 : me->tid));
    if (!at->guest) hint(me, lock);
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
    return ((lc_load(&lock->word) ^ mine) & ~LCS_LOCK_OTHERS) == 0;
}

static void let_go(const lcs_attachment *at, lcs_lock *lock, uint32_t mine) {
    unhint(at, lock);
    uint64_t both = lc_load(&lock->both);
    while (is_mine(lock, mine) && !swap(lock, both, with_word(both, both & LCS_LOCK_STARVED)))
        both = lc_load(&lock->both); /* a waiter has set a bit */
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
        if (!spin(lock, mine, asked)) {
            if (!(wait & LC_BLOCK)) return LC_E_BUSY;
            int rc = block(at, lock, mine, asked, deadline, &taken_over);
            if (rc != LC_OK) return rc;
        }
    }
    /* From here to the end of recovery a death leaves the log as it is: the next one undoes it. */
    note_holder(at, lock, operation, asked, lcs_now_ns());
    LC_PAUSE(LC_AT_LOCKED);
    if (lc_load_acquire(&lock->log_count) != 0) {
        /* A holder that gives the lock back has emptied the log: entries under a free lock are
         * forged, or a log that could not be undone before. */
        int rc = taken_over ? recover(at, lock, begin, end) : LC_E_CORRUPT;
        if (rc != LC_OK && (wait & LC_DISCARD)) {
            lc_store_release(&lock->log_count, 0);
        } else if (rc != LC_OK) {
            let_go(at, lock, mine);
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
    if (!is_mine(lock, mine)) {
        unhint(at, lock);
        return LC_E_LOST;
    }
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
    let_go(at, lock, mine);
    return error;
}
