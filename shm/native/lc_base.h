/* Shared declarations of the core: layouts, error codes, ordered stores, pause points.
 *
 * Two rules hold everywhere below this header.
 *
 * 1. No pointer and no libc object lives in a segment; links are indices, checked before use.
 * 2. A process may be killed between any two instructions. What it had stored stays stored, in
 *    program order: the kernel's exit path is a barrier. So against a death, compiler order is
 *    enough (`lc_kill_fence`); against a concurrent reader, real orders are named at the store.
 */
#ifndef LC_BASE_H
#define LC_BASE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LC_API __attribute__((visibility("default")))
#define LC_LIKELY(x) __builtin_expect(!!(x), 1)
#define LC_INLINE static inline __attribute__((always_inline)) /* where a call costs more than it does */
#define LC_UNLIKELY(x) __builtin_expect(!!(x), 0)

/* Results. Zero and above are counts; below are errors, which shm/codes.py turns into typed
 * exceptions. Keep both lists the same: tests/unit/test_native.py compares them. */
enum lc_error {
    LC_OK = 0,
    LC_E_FORKED = -1,     /* called in a forked child, which is not attached */
    LC_E_CLOSED = -2,     /* the handle was closed */
    LC_E_RETIRED = -3,    /* the segment was replaced or unlinked by its last user */
    LC_E_CORRUPT = -4,    /* a word in the segment cannot be what it says */
    LC_E_BUSY = -5,       /* the lock is held: call the variant that may block */
    LC_E_TIMEOUT = -6,    /* the time limit passed */
    LC_E_INTR = -7,       /* a signal arrived: run its handler, then call again */
    LC_E_FULL = -8,       /* no room */
    LC_E_STALE = -9,      /* a handle of something that has ended since (epoch or generation) */
    LC_E_OWNER = -10,     /* owned by another client */
    LC_E_RANGE = -11,     /* an argument out of range */
    LC_E_TWICE = -12,     /* done already */
    LC_E_PINS = -13,      /* more pins on one page than a row's 16 bits count */
    LC_E_CLEARED = -14,   /* the namespace was cleared */
    LC_E_GROW = -15,      /* pages are there but their memory is not: grow the pool, call again */
    LC_E_READONLY = -16,  /* attached read-only */
    LC_E_DISABLED = -17,  /* an operator disabled the cache */
    LC_E_LOST = -18,      /* this client was declared dead (its liveness lock was lost) */
    LC_E_MISSING = -19,   /* the key is not there */
    LC_E_SYS = -100,      /* a system call failed: LC_E_SYS - errno */
};

/* Orders. `lc_kill_fence` costs no instruction: it keeps the compiler from moving stores across
 * it, which is all that a death needs (see above). */
#define lc_kill_fence() atomic_signal_fence(memory_order_seq_cst)
#define lc_load(p) atomic_load_explicit((p), memory_order_relaxed)
#define lc_load_acquire(p) atomic_load_explicit((p), memory_order_acquire)
#define lc_store(p, v) atomic_store_explicit((p), (v), memory_order_relaxed)
#define lc_store_release(p, v) atomic_store_explicit((p), (v), memory_order_release)
/* For a counter with one writer at a time. */
#define lc_raise(p, n) lc_store((p), lc_load(p) + (n))

/* Ask for a line that will be stored to. On x86-64 the builtin asks for it as for reading, unless the
 * compiler is told of an instruction that older processors take for a no-op: a line that another
 * processor has would have to come twice. */
static inline void lc_prefetch_write(const void *line) {
#if defined(__x86_64__)
    __asm__ __volatile__("prefetchw %0" : : "m"(*(const char *)line));
#else
    __builtin_prefetch(line, 1);
#endif
}

/* Pause points: test builds only. A point calls the hook with its number and may be blocked
 * there while another thread or process runs the other side of a race. */
#ifdef LC_PAUSE_POINTS
extern void (*lc_pause_hook)(int point);
#define LC_PAUSE(point)                       \
    do {                                      \
        if (lc_pause_hook) lc_pause_hook(point); \
    } while (0)
#else
#define LC_PAUSE(point) ((void)0)
#endif

enum lc_pause_point {
    LC_AT_PIN_COUNTED = 1,   /* own row counted up, bit set, fence not yet passed */
    LC_AT_PIN_FENCED = 2,    /* fence passed, generations not yet looked at again */
    LC_AT_EVICT_MARKED = 3,  /* EVICTING stored, fence not yet passed */
    LC_AT_EVICT_FENCED = 4,  /* fence passed, pins not yet looked at */
    LC_AT_EVICT_UNLINKED = 5,/* out of its chain, not yet free */
    LC_AT_KEY_ODD = 6,       /* generation odd, key not yet written */
    LC_AT_KEY_WRITTEN = 7,   /* key written, generation still odd */
    LC_AT_LINKED = 8,        /* linked at the head of its chain */
    LC_AT_SHARD_DONE = 9,    /* last shard's word DONE, no page READY yet */
    LC_AT_PAGE_READY = 10,   /* some pages READY, not all */
    LC_AT_WALK_HEAD = 11,    /* a reader has loaded a chain's head */
    LC_AT_WALK_NEXT = 12, /* a reader has read a record, and not yet its generation again */
    LC_AT_LOCKED = 13,       /* the lock has just been taken */
    LC_AT_COMMIT = 14,       /* before the log is emptied */
    LC_AT_UNLOCK = 15,       /* before the lock is dropped */
    LC_AT_RECOVER = 16,      /* between two steps of recovery */
    LC_AT_EVICT_CHOSEN = 17, /* found without pins, not yet EVICTING */
    LC_AT_MEND = 18,         /* a dead client's slot is ours to mend, nothing taken back yet */
    LC_AT_NAME_LOOKED = 19,  /* a namespace was seen to be open, its names not yet looked at */
    LC_AT_NAME_STORED = 20,  /* the names of a new one are stored, it is not yet open */
    LC_AT_EVENT_COMPARED = 21, /* not notified so far, not yet asleep */
    LC_AT_DEAD_SEEN = 22,    /* a slot's byte was free, its mending byte is not yet ours */
    LC_AT_OWNER_DEAD = 23,   /* the lock's owner is dead, its lock not yet taken over */
    LC_AT_NOT_ENDED = 24,    /* a reservation was seen to continue, its bit is not yet cleared */
    LC_AT_LOG_WRITTEN = 25,  /* an entry's slot is written, `appended` not yet stored */
    LC_AT_LOG_ANNOUNCED = 26, /* a reader has announced itself, and not yet fenced */
    LC_AT_LOG_COPIED = 27,   /* entries are copied, the cursor is not yet stored */
};

/* ------------------------------------------------------------------ layout of a segment */

#define LCS_MAGIC UINT64_C(0x31454843414c434c) /* "LCLACHE1" as bytes */
#define LCS_ABI 1
#define LCS_SLOTS 64      /* slot 0 belongs to the segment itself (tickets) */
#define LCS_LOG_ENTRIES 4096

#define LCS_HEADER_BYTES 4096
#define LCS_CLIENTS_OFFSET 4096
#define LCS_LOCK_OFFSET (4096 + LCS_SLOTS * 128)           /* 12288 */
#define LCS_LOG_OFFSET (LCS_LOCK_OFFSET + 4096)            /* 16384 */
#define LCS_PAYLOAD_OFFSET (LCS_LOG_OFFSET + LCS_LOG_ENTRIES * 8) /* 49152 */

/* Offsets in the object of the bytes that are locked with open-file-description locks. They lie
 * past every possible end: a lock needs no byte of the file. */
#define LCS_BYTE_LIFE (INT64_C(1) << 46)
#define LCS_BYTE_READERS (LCS_BYTE_LIFE + 1)
#define LCS_BYTE_GROW (LCS_BYTE_LIFE + 2)
#define LCS_BYTE_SLOTS (LCS_BYTE_LIFE + 16) /* + slot: its client lives */
#define LCS_BYTE_MEND (LCS_BYTE_SLOTS + LCS_SLOTS) /* + slot: its state changes hands */

/* Every release reads magic, abi, uuid, lifetime, config_bytes, config, idle_ns, used_ns, retired and
 * ready of every other one, to remove what it has left: they never move, whatever LCS_ABI is. */
typedef struct lcs_header {
    uint64_t magic;
    uint32_t abi;
    uint32_t kind;        /* LCS_KIND_* */
    uint64_t layout_hash; /* of every layout in the library that made it */
    uint64_t bytes;       /* of the whole object */
    uint8_t uuid[16];
    uint64_t created_ns;  /* CLOCK_REALTIME */
    uint32_t creator_pid;
    uint32_t lifetime;    /* LCS_LIFETIME_* */
    char boot_id[40];
    uint32_t config_bytes;
    uint32_t reserved;
    char config[2048]; /* JSON, UTF-8, zero padded */
    uint64_t time_namespace; /* its creator's, as lcs_time_namespace says; 0: unknown */
    uint8_t pad0[1896];
    uint64_t idle_ns;          /* unused for longer, a persistent one may go for room; 0: never */
    _Atomic uint64_t used_ns;  /* CLOCK_REALTIME, advice: it was used then, or later */
    _Atomic uint32_t retired;  /* never cleared */
    _Atomic uint32_t disabled; /* an operator's switch */
    _Atomic uint32_t ready;    /* stored last, with release order */
    uint32_t pad1;
} lcs_header;

enum {
    LCS_KIND_PLAIN = 1,
    LCS_KIND_LIST = 2,
    LCS_KIND_DICT = 3,
    LCS_KIND_INDEX = 4,
    LCS_KIND_RING = 5,
    LCS_KIND_LOG = 6,
    LCS_KIND_COUNTERS = 7,
};
enum { LCS_LIFETIME_ATTACHED = 0, LCS_LIFETIME_PERSISTENT = 1 };

enum { LCS_CLIENT_FREE = 0, LCS_CLIENT_TAKEN = 1, LCS_CLIENT_QUARANTINE = 2 };
enum { LCS_FLAG_DEVICE = 1 };

/* Others look at a record while its slot changes hands, so every word of it is atomic. */
typedef struct lcs_client {
    _Atomic uint32_t state;
    _Atomic uint32_t epoch; /* raised when the slot is taken and when it is given back */
    _Atomic uint32_t pid;   /* in its own PID namespace */
    _Atomic uint32_t flags;
    _Atomic uint64_t pidns;       /* inode of that namespace */
    _Atomic uint64_t start_ticks; /* field 22 of /proc/PID/stat: tells a recycled pid */
    _Atomic uint64_t attached_ns; /* CLOCK_REALTIME */
    _Atomic uint64_t quarantine_until_ns; /* CLOCK_MONOTONIC */
    _Atomic uint64_t role[4];     /* UTF-8, zero padded */
    /* Counters, written by the client alone. */
    _Atomic uint64_t lookups;
    _Atomic uint64_t hit_pages;
    _Atomic uint64_t missed_pages;
    _Atomic uint64_t reserved_pages;
    _Atomic uint64_t evicted_pages;
    _Atomic uint64_t published_pages;
} lcs_client;

/* The lock: 64 bits that are swapped as one. The word (which is slept on): owner slot (bits 0..5; 0
 * with no other bit but STARVED: free), starved (bit 6), waiters (bit 7), epoch (24 bits above). The
 * sequence increases with each taking, so a process that found the owner of one taking dead cannot
 * take the lock from the owner of another. */
#define LCS_LOCK_SLOT UINT32_C(0x3f)
#define LCS_LOCK_STARVED UINT32_C(0x40) /* a process has slept long: who comes now leaves it the lock */
#define LCS_LOCK_WAITERS UINT32_C(0x80)
#define LCS_LOCK_OTHERS (LCS_LOCK_STARVED | LCS_LOCK_WAITERS) /* what others than the owner set */
#define LCS_LOCK_EPOCH_SHIFT 8
static inline bool lcs_word_free(uint32_t word) { return (word & ~LCS_LOCK_STARVED) == 0; }

typedef struct lcs_lock {
    union {
        _Atomic uint64_t both;
        struct {
            _Atomic uint32_t word;
            _Atomic uint32_t sequence;
        };
    };
    /* sequence << 32 | the holder's thread id in its namespace; 0 unknown. The kernel makes the id
     * FUTEX_OWNER_DIED where it sees the holder's thread end (lock.c). */
    _Atomic uint64_t holder;
    uint8_t pad0[112];
    /* Stored by the holder alone, `log_count` with each word that it changes. Waiters poll what is
     * above: on its line, or on the one that is fetched with it, each store would wait for them. */
    _Atomic uint32_t log_count; /* entries of the undo log that are in force; 0: nothing to undo */
    _Atomic uint32_t operation; /* LC_OP_* of the holder, once `holder` has this sequence */
    _Atomic uint64_t since_ns;  /* CLOCK_MONOTONIC, when it was taken; the same */
    _Atomic uint64_t acquisitions;
    _Atomic uint64_t contended;
    _Atomic uint64_t wait_ns;
    _Atomic uint64_t hold_ns;
    _Atomic uint64_t hold_max_ns;
    _Atomic uint64_t recoveries;
    _Atomic uint64_t undone_words;
    uint8_t pad[56];
} lcs_lock;

_Static_assert(sizeof(lcs_header) == LCS_HEADER_BYTES, "header is one page");
_Static_assert(sizeof(lcs_client) == 128, "a client is two lines");
_Static_assert(sizeof(lcs_lock) == 256, "the lock is four lines");
_Static_assert(offsetof(lcs_lock, log_count) == 128, "not fetched with what waiters poll");

/* Process-local: one for every attach of a writer or reader. Never in shared memory. */
typedef struct lcs_attachment {
    uint8_t *base;
    uint64_t bytes;
    const volatile uint32_t *fork_word; /* 1 in the process that attached, 0 in its children */
    int32_t life_fd;                    /* holds the slot's byte; -1 for readers */
    uint32_t slot;                      /* 0 for readers */
    uint32_t epoch;
    uint32_t readonly;
    uint32_t closed;
    _Atomic uint32_t leaving; /* closing has begun: calls other than leaving say CLOSED */
    uint32_t guest;           /* acts as a dead client while reaping it: has no thread of that one */
    uint32_t pid;
    uint64_t pidns;
    uint64_t time_namespace;
    pthread_mutex_t door; /* threads of one process queue here before the shared lock */
    pthread_mutex_t rows; /* threads of one process settle their pins under it */
} lcs_attachment;

static inline lcs_header *lcs_header_of(const lcs_attachment *at) { return (lcs_header *)at->base; }
static inline lcs_client *lcs_client_of(const lcs_attachment *at, uint32_t slot) {
    return (lcs_client *)(at->base + LCS_CLIENTS_OFFSET) + (slot & (LCS_SLOTS - 1));
}
static inline lcs_lock *lcs_lock_of(const lcs_attachment *at) {
    return (lcs_lock *)(at->base + LCS_LOCK_OFFSET);
}

/* Every entry point begins with this. */
static inline int lcs_usable(const lcs_attachment *at) {
    if (LC_UNLIKELY(*at->fork_word != 1)) return LC_E_FORKED;
    if (LC_UNLIKELY(at->closed || lc_load(&at->leaving))) return LC_E_CLOSED;
    const lcs_header *h = lcs_header_of(at);
    if (LC_UNLIKELY(lc_load_acquire(&h->retired))) return LC_E_RETIRED;
    /* Other code closed the descriptor that proves our life, and we were reaped. */
    if (LC_UNLIKELY(at->slot && lc_load(&lcs_client_of(at, at->slot)->epoch) != at->epoch))
        return LC_E_LOST;
    return LC_OK;
}

uint64_t lcs_now_ns(void);  /* CLOCK_MONOTONIC */

#endif
