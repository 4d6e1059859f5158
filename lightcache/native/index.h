/* The page index: layout in the segment and the declarations that its parts share.
 *
 * Truth: page records (key, state, generation), pin rows, reservation and ticket records with
 * their page lists, namespaces. Derived: chains, eviction queue, free stack, counts. */
#ifndef LCI_INDEX_H
#define LCI_INDEX_H

#include "clients.h"
#include "dict.h"
#include "hazard.h"
#include "lock.h"

/* ------------------------------------------------------------------ records in the segment */

/* A page's word: state (bits 0..3), flags (4..7), namespace (8..15), reservation + 1 (16..26), group
 * (27..31). A HELD page has no namespace: there stands the slot of the client that holds it, and
 * nothing above. */
enum lci_state {
    LCI_FREE = 0, LCI_WRITING = 1, LCI_READY = 2, LCI_EVICTING = 3, LCI_DOOMED = 4, LCI_HELD = 5
};
#define LCI_STATE_MASK UINT32_C(0xf)
#define LCI_UNWRITTEN UINT32_C(0x10) /* doomed while a client might have been writing it */
#define LCI_KEPT UINT32_C(0x20)      /* READY, and never evicted (keep.c) */
#define LCI_INDEPENDENT UINT32_C(0x40) /* WRITING to EVICTING: may go while others hang on it */
#define LCI_NS_SHIFT 8
#define LCI_NS_MASK UINT32_C(0xff00)
#define LCI_RES_SHIFT 16
#define LCI_RES_MASK UINT32_C(0x7ff0000)
#define LCI_GROUP_SHIFT 27
#define LCI_GROUP_MASK UINT32_C(0xf8000000)
/* What a page keeps of its word as long as it has its key. */
#define LCI_KIND (LCI_NS_MASK | LCI_INDEPENDENT | LCI_GROUP_MASK)
#define LCI_COUNTED (LCI_NS_MASK | LCI_GROUP_MASK) /* whose counts it is in */

typedef struct lci_page {
    _Atomic uint64_t lo, hi;      /* key */
    _Atomic uint64_t pins;        /* bit c: client c's row may count pins; never missing a pin */
    _Atomic uint64_t used;        /* tick of last use << 16 | what the order needs, see below */
    _Atomic uint32_t gen;         /* odd while key and link change */
    _Atomic uint32_t word;        /* state, see above */
    _Atomic uint32_t next;        /* chain */
    lc_link queue;                /* eviction queue or doomed list; next also the free stack */
    _Atomic uint32_t parent;      /* page of the prefix that ends before this one */
    _Atomic uint32_t parent_gen;  /* the parent is that page only while it has this generation */
    _Atomic uint32_t children;    /* pages whose valid parent this is */
} lci_page;
_Static_assert(sizeof(lci_page) == 64, "one line a page");
_Static_assert(offsetof(lci_page, gen) == offsetof(lc_node, gen), "a page is a dict node");
_Static_assert(offsetof(lci_page, word) == offsetof(lc_node, word), "a page is a dict node");
_Static_assert(offsetof(lci_page, next) == offsetof(lc_node, next), "a page is a dict node");

/* Page lists of reservations and tickets: chunks chained by index. */
#define LCI_CHUNK_PAGES 62
typedef struct lci_chunk {
    _Atomic uint32_t next;
    _Atomic uint32_t count;
    _Atomic uint32_t page[LCI_CHUNK_PAGES];
} lci_chunk;
_Static_assert(sizeof(lci_chunk) == 256, "four lines a chunk");

typedef struct lci_list { /* inside a reservation or ticket */
    _Atomic uint32_t count;
    _Atomic uint32_t first;
    _Atomic uint32_t last;
} lci_list;

#define LCI_SHARDS 64
/* A shard's word: owner slot (bits 0..5), status (6..7), reservation generation (8..31). OPEN: the owner's
 * until a rank of its team joins; the owner writes no part of it. */
#define LCI_SHARD_SLOT UINT32_C(0x3f)
#define LCI_SHARD_STATUS UINT32_C(0xc0)
enum {
    LCI_SHARD_PENDING = 0x00, LCI_SHARD_DONE = 0x40, LCI_SHARD_DEAD = 0x80, LCI_SHARD_OPEN = 0xc0
};
#define LCI_SHARD_GEN_SHIFT 8

enum { LCI_RES_FREE = 0, LCI_RES_ACTIVE = 1, LCI_RES_DOOMED = 2 };

typedef struct lci_reservation {
    _Atomic uint32_t gen; /* raised when taken and when given back */
    _Atomic uint32_t state;
    _Atomic uint32_t owner; /* slot; 0: its owner has died and shards of others are pending */
    _Atomic uint32_t owner_epoch; /* 0: doomed, and for the reaper of `owner` alone to unlink */
    _Atomic uint32_t shards;
    _Atomic uint32_t next_free;
    lci_list pages;
    _Atomic uint32_t ns; /* reference of its namespace */
    _Atomic uint64_t team; /* whose ranks may join; 0: none's */
    _Atomic uint64_t deadline_ns; /* of a team's: CLOCK_MONOTONIC; joining ends then */
    _Atomic uint32_t listed; /* of a team's: no page will be added */
    uint32_t pad;
    _Atomic uint32_t shard[LCI_SHARDS];
} lci_reservation;
_Static_assert(sizeof(lci_reservation) == 320, "a reservation is five lines");

enum { LCI_TICKET_FREE = 0, LCI_TICKET_BUILDING = 1, LCI_TICKET_OPEN = 2, LCI_TICKET_DROPPED = 3 };

typedef struct lci_ticket {
    _Atomic uint32_t gen;
    _Atomic uint32_t state;
    _Atomic uint32_t giver;
    _Atomic uint32_t giver_epoch;
    _Atomic uint64_t deadline_ns; /* CLOCK_MONOTONIC; adopting ends then */
    lci_list pages;               /* pinned in row 0 while listed here */
    _Atomic uint32_t total;       /* pages it was made with */
    _Atomic uint32_t reservation; /* index + 1, 0 for a lease's ticket */
    _Atomic uint32_t reservation_gen;
    _Atomic uint32_t adopters[2]; /* client slots that may adopt */
    _Atomic uint32_t adopted[2];
    _Atomic uint32_t done[2];     /* changed by adopters without the lock */
    _Atomic uint32_t failed[2];
    uint32_t pad[12];
} lci_ticket;
_Static_assert(sizeof(lci_ticket) == 128, "a ticket is two lines");

#define LCI_NAMESPACES 256
#define LCI_NAME_WORDS 6
enum { LCI_NS_FREE = 0, LCI_NS_NORMAL = 1, LCI_NS_CLEARING = 2, LCI_NS_CLEARED = 3 };

typedef struct lci_namespace {
    _Atomic uint32_t epoch; /* raised when it is taken: an old handle is refused */
    _Atomic uint32_t state;
    _Atomic uint32_t pages; /* named pages, writing or ready */
    _Atomic uint32_t quota; /* most named pages; 0: no limit */
    _Atomic uint32_t cursor; /* clearing: pages below it have been looked at */
    _Atomic uint32_t hand;   /* where evicting for its quota continues; advice */
    _Atomic uint32_t minimum; /* named pages that making room for others leaves it */
    uint32_t pad[1];
    _Atomic uint64_t weights[LCI_NAME_WORDS]; /* UTF-8, zero padded */
    _Atomic uint64_t tenant[LCI_NAME_WORDS];
} lci_namespace;
_Static_assert(sizeof(lci_namespace) == 128, "a namespace is two lines");

#define LCI_NUMBERS 32 /* of groups in an index: 0 to 31 */

typedef struct lci_group_count { /* of all namespaces together */
    _Atomic uint32_t pages;   /* named pages, writing or ready */
    _Atomic uint32_t minimum; /* of these, that making room for other groups leaves it */
} lci_group_count;

/* In which order pages go: decided when the index is made. */
enum lci_eviction_order { LCI_LRU = 0, LCI_HZ = 1 };

/* Why a page was evicted. CLEARED: its namespace was, and we came by to take its name. */
enum {
    LCI_ASKED = 0, LCI_FOR_ROOM = 1, LCI_FOR_QUOTA = 2, LCI_DROPPED = 3, LCI_DISCARDED = 4,
    LCI_CLEARED = 5, LCI_CAUSES = 6
};

/* The low bits of `used`: with LRU the hits, saturating; else see hazard.h. */
#define LCI_TICK_SHIFT 16
#define LCI_TICK_MAX (UINT64_MAX >> LCI_TICK_SHIFT)
#define LCI_HITS_MASK UINT64_C(0xffff)
_Static_assert(LCI_TICK_SHIFT == LCH_TICK_SHIFT, "both orders have the tick in the same place");

/* The eviction queue. LRU: levels of 64 lists, as in a timer wheel (queue.c). Ranked: a list for each
 * class and age, one of pages that go first, and one of pages that could not go when they were looked
 * at (ranked.c). */
#define LCI_LEVELS 8
#define LCI_DIGITS 64
#define LCI_WHEEL (LCI_LEVELS * LCI_DIGITS)
#define LCI_FIRST_LIST LCH_LISTS
#define LCI_PARKED_LIST (LCH_LISTS + 1)
#define LCI_DOOMED_LIST (LCH_LISTS + 2)
#define LCI_LISTS (LCI_DOOMED_LIST + 1)
_Static_assert(LCI_WHEEL <= LCH_LISTS, "the wheel has room");

/* An order of the ranked lists. Its two tables are each other's inverse. */
#define LCI_RANK_WORDS ((LCH_LISTS + 31) / 32)
typedef struct lci_order {
    _Atomic uint16_t list[LCH_LISTS]; /* of each rank; 0 goes first */
    _Atomic uint16_t rank[LCH_LISTS]; /* of each list */
    _Atomic uint32_t occupied[LCI_RANK_WORDS]; /* by rank */
} lci_order;

typedef struct lci_ranks {
    _Atomic uint32_t chosen; /* bit 0: which order holds; the other is dead until it is chosen */
    uint32_t pad[15];
    lci_order order[2];
} lci_ranks;

typedef struct lci_root {
    /* Geometry, written once; attached handles compute their own and compare. */
    uint64_t pages, buckets, reservations, tickets, chunks, index_bytes;
    uint64_t eviction; /* lci_eviction_order */
    uint8_t pad0[8];
    /* Changed under the lock, through the undo log. */
    _Atomic uint32_t free_head, free_count; /* stack of pages given back */
    _Atomic uint32_t fresh;                 /* pages below it have been handed out at least once */
    _Atomic uint32_t grown;                 /* pages below it have memory */
    _Atomic uint32_t named;                 /* WRITING, READY or EVICTING */
    _Atomic uint32_t writing;               /* of these, in a reservation not yet collected */
    _Atomic uint32_t doomed;
    _Atomic uint32_t chunk_head, chunk_fresh, chunk_used;
    _Atomic uint32_t res_head, res_fresh, res_used;
    _Atomic uint32_t ticket_used;
    _Atomic uint32_t clearing; /* namespaces in CLEARING */
    _Atomic uint32_t queued;   /* pages in the eviction queue */
    _Atomic uint32_t now[2];   /* the queue's present: no queued page is older (low, high word) */
    _Atomic uint32_t occupied[LCI_LEVELS * 2];
    _Atomic uint32_t repairing; /* a repair is unfinished: the next holder of the lock redoes it */
    _Atomic uint32_t kept;      /* READY pages that are kept */
    _Atomic uint32_t held;      /* pages without a key, each in the hands of one client */
    _Atomic uint32_t reaped;    /* times that something of a dead client was taken back; not logged */
    /* Advice, in CLOCK_MONOTONIC, stored without the log; on the line that every taking reads. */
    _Atomic uint64_t looking_ns;   /* when the last look for dead clients began */
    _Atomic uint64_t looked_ns;    /* when the last look began that left no dead client */
    _Atomic uint64_t no_memory_ns; /* until then no call asks for more memory */
    _Atomic uint64_t joining_ns;   /* no open shard's deadline is earlier; 0: there is none */
    /* Changed under the lock, through the log: above the highest ticket in use. */
    _Atomic uint32_t ticket_end;
    uint32_t pad4;
    /* Changed by every client. */
    _Atomic uint64_t clock; /* the last tick given out */
    uint8_t pad2[56];
    _Atomic uint32_t event; /* raised by two when writing ended somewhere; bit 0: sleepers */
    uint8_t pad3[60];
    _Atomic uint64_t completed[16]; /* bit r: all shards of reservation r published, to collect */
    lci_group_count group[LCI_NUMBERS]; /* changed under the lock, through the log */
    _Atomic uint64_t evicted[LCI_CAUSES]; /* pages, by cause; stored under the lock, without the log */
    uint8_t pad5[16];
} lci_root;
_Static_assert(offsetof(lci_root, clock) % 64 == 0, "hot words on their own lines");

/* ------------------------------------------------------------------ process-local handle */

typedef struct lci_geometry {
    uint64_t pages, buckets, reservations, tickets, chunks;
    uint64_t root, heads, namespaces, reservation, ticket, chunk, bucket, page, rows, row_stride;
    uint64_t ranks;  /* of LRU: `end`, as the advice */
    uint64_t advice; /* what eviction learns: nothing that the log may name, or check, lies from here on */
    uint64_t end;
} lci_geometry;

typedef struct lci_handle {
    lcs_attachment *at;
    lci_root *root;
    lci_namespace *ns;
    lci_reservation *res;
    lci_ticket *tickets;
    lci_chunk *chunks;
    lci_page *pages;
    _Atomic uint16_t *rows;  /* [LCS_SLOTS][row_stride]; a row begins on a line of its own */
    uint64_t row_stride;
    _Atomic uint16_t *mine;  /* own row */
    uint32_t page_count;
    uint32_t res_count, ticket_count, chunk_count;
    uint32_t doomed_hand; /* a doomed page at which the next look at them begins; under the lock, advice */
    lc_dict dict;
    lc_lists lists;
    uint64_t log_begin, log_end;
    lci_geometry geometry;
    lci_ranks *ranks; /* NULL: the order is LRU */
    lch learnt;       /* of an attached handle whose order is not LRU */
    uint64_t due[LCH_LISTS]; /* tick at which the first page of a list is too old for it; under the lock, advice */
    uint32_t computed; /* recomputations, when `due` was last cleared */
    _Atomic uint64_t clock_ns; /* what ticks are made of; 0: the system's clock */
    _Atomic uint64_t evicted[LCI_CAUSES]; /* pages, by us, since lci_take_evicted */
} lci_handle;

/* The first word that the log may name: what stands before it is written once. */
static inline uint64_t lci_log_begin(const lci_geometry *g) {
    return g->root + offsetof(lci_root, free_head);
}

/* What a lease's buffer begins with, in the caller's memory. The pages follow, int32 each, then as
 * many generations, needed only within the call. */
typedef struct lci_lease {
    uint32_t held; /* pages pinned and not yet released */
    uint32_t capacity; /* in, of a match: LCI_UNCOUNTED or 0; out: pages there is room for */
} lci_lease;
#define LCI_UNCOUNTED UINT32_MAX /* the client's figures do not count the pages of this lookup */

/* What a scheduler's handle of a namespace says: id in the low byte, epoch above. */
typedef uint32_t lci_ns_ref;
static inline uint32_t lci_ns_id(lci_ns_ref ref) { return ref & 0xff; }

/* Layers of a model whose pages are found together, in the caller's memory. The position after n
 * tokens needs the pages of those from floor(n / align) * align - back to n. */
typedef struct lci_group {
    lci_handle *h;
    lci_lease *lease; /* with its capacity; NULL for a peek */
    uint64_t align;   /* 1 at least */
    uint64_t back;
    lci_ns_ref ns;
    uint32_t first;  /* out: the first page that the position needs */
    uint32_t number; /* of the group in its index: 0 to 31; 0 and one part: pages have their own keys */
    uint32_t parts;  /* of each page, 1 at least: the lease has all of them, page by page */
} lci_group;
#define LCI_GROUPS 16
#define LCI_PARTS 4096 /* of a page of a group, at most */

/* The key of a part of a page. Every step can be undone, so two keys of one part differ if those of
 * their pages do; and what looks random stays so. `lightcache.runs` says the same of arrays. */
static inline uint64_t lci_mix(uint64_t x) {
    x ^= x >> 32;
    x *= UINT64_C(0xd6e8feb86659fd93);
    x ^= x >> 32;
    return x * UINT64_C(0xd6e8feb86659fd93);
}

static inline lc_key lci_part_key(lc_key key, uint32_t number, uint32_t part) {
    uint64_t tag = (uint64_t)number << 32 | part;
    if (tag == 0) return key;
    key.lo += tag * UINT64_C(0x9e3779b97f4a7c15);
    key.hi ^= lci_mix(key.lo);
    key.lo ^= lci_mix(key.hi);
    return key;
}

/* ------------------------------------------------------------------ what passes to Python */

enum { LCI_UNKNOWN = 0, LCI_PRESENT = 1, LCI_BUSY_KEY = 2, LCI_NEW = 3, LCI_NO_ROOM = 4 };

/* What one call does about dead clients (look.c), in the caller's memory, zeroed. */
typedef struct lci_look_op {
    uint64_t begun_ns; /* when the call began; 0 before */
    uint32_t reaped;   /* the root's, before what was tried last */
    uint32_t due;      /* it is this call's turn to look, whatever it got, or it has yet to end that */
    uint32_t waited;   /* it has waited once for another that was reaping */
    uint32_t rounds;   /* of LCI_LOOK_ROUNDS; what it took back counts as well */
} lci_look_op;

/* One call's progress, in the caller's memory: a caller that interrupts it between two holds of the
 * lock knows what is held. `page` and `status` have an entry for every key from `start` on. */
typedef struct lci_reserve_op {
    uint32_t rid, gen; /* of the reservation; gen 0: none was opened */
    uint32_t cursor;   /* keys from `start` on that are settled */
    uint32_t pinned;   /* the pass before the lock is over */
    uint32_t made;     /* new pages, pinned and listed in the reservation */
    uint32_t shards;
    uint32_t ns;
    uint32_t stopped; /* no room from `cursor` on */
    uint32_t wanted;  /* with LC_E_GROW: pages that need memory */
    uint32_t reason;  /* why there was no room: LCI_WHY_* */
    uint64_t tick;    /* of this call; 0 before it began */
    uint32_t unpinned; /* lci_unreserve has given back what was held */
    uint32_t kept;     /* pages that were kept when there was no room */
    uint32_t no_memory; /* the caller found none: make do with the pages that have some */
    uint32_t doomed;    /* doomed pages looked at because nothing could be evicted; for the core alone */
    uint32_t run;   /* each so many-th of all keys gets a page that may go while others hang on it; 0:
                     * none does */
    uint32_t group; /* of its new pages */
    uint32_t whole; /* nothing is evicted for more pages than there can be */
    uint32_t linked; /* nothing is made unless the first page can hang on that of the key before */
    uint64_t team;   /* join what another rank of it has begun, or begin it; 0: no team */
    uint64_t join_until; /* of what is begun: its deadline */
    uint64_t later;  /* until then another rank is waited for that is making pages; 0: not yet */
    uint32_t shard;  /* of a team: ours */
    uint32_t joined; /* out: another rank has begun it */
    uint32_t admission; /* no page goes for a new one that ranks below it: that is not made */
    uint32_t hint;   /* of its new pages: LCH_HINT_* */
    uint32_t parked; /* 1 + parked pages that are still to be looked at, when nothing else is left; 0:
                      * not begun; for the core alone */
    lci_look_op look;
} lci_reserve_op;
enum {
    LCI_WHY_PINNED = 1, LCI_WHY_QUOTA = 2, LCI_WHY_RESERVATIONS = 3, LCI_WHY_CHAIN = 4,
    LCI_WHY_MEMORY = 5, /* as PINNED, and more pages have no memory */
    LCI_WHY_HEAD = 6, /* the page of the key before is not there: what hung on it would be of no use */
    LCI_WHY_TEAM = 7, /* the rank that began the reservation did not reserve them */
    LCI_WHY_WORTH = 8 /* they rank below every page that could go for them */
};

/* How many pages a namespace may have, and how many it was promised. */
typedef struct lci_ns_limits {
    uint32_t quota, minimum; /* UINT32_MAX: as it is */
    uint64_t others;         /* out: what groups and the other open namespaces were promised */
} lci_ns_limits;

/* Progress of keep, unkeep, evict_first and drop, zeroed by the caller. */
typedef struct lci_walk_op {
    uint32_t cursor; /* keys that are settled: from the first on, of a drop from the last back */
    uint32_t pages;  /* that were changed */
    uint32_t ended;  /* nothing is left to do */
    uint64_t tick;   /* of evict_first: what its pages get */
} lci_walk_op;

/* Progress of listing what is evicted next; `want`, `keep_order` set and the rest zeroed. The lease
 * holds what is listed so far, with the hits of each page where a match has its generation. */
typedef struct lci_oldest_op {
    uint64_t since; /* tick of this call; 0 before it began */
    uint32_t want, keep_order;
    uint32_t ended;    /* nothing more can be listed */
    uint32_t climb;    /* page + 1 whose parent may be next */
    uint32_t returned; /* pages put back to where they were in the queue */
    uint32_t parked;   /* as in lci_reserve_op */
    uint32_t going[LCI_NAMESPACES];     /* listed pages of each namespace, */
    uint32_t going_group[LCI_NUMBERS]; /* and of each group */
} lci_oldest_op;

/* Progress of giving pages up, zeroed. */
typedef struct lci_discard_op {
    uint32_t taken;  /* the pins are this call's to give back: a lease holds them no more */
    uint32_t cursor; /* pages that were looked at */
    uint32_t climb;  /* position + 1 of the parent of one that went */
    uint32_t freed;
} lci_discard_op;
/* The same for what is done with pages that have no key. */
typedef struct lci_held_op {
    uint32_t done;    /* pages that are settled: the first `done`; of lci_allocate, that are ours */
    uint32_t giving;  /* lci_allocate gives back what it had taken: there is not enough */
    uint32_t wanted;  /* with LC_E_GROW: pages that need memory */
    uint32_t reason;  /* why there was no room: LCI_WHY_* */
    uint32_t refused; /* which page of the call is not what it must be */
    uint32_t ns, flags;
    uint32_t checked; /* every page of the call was what it must be */
    uint64_t tick;    /* of this call; 0 before it began */
    uint32_t no_memory; /* as in lci_reserve_op */
    uint32_t doomed;    /* the same */
    uint32_t parked;    /* the same */
    lci_look_op look;
} lci_held_op;
enum { LCI_NAME_MERGE = 1, LCI_NAME_INDEPENDENT = 2 };

typedef struct lci_ticket_ref { /* what travels: 16 bytes */
    uint32_t index;
    uint32_t gen;
    uint64_t cache; /* first half of the segment's uuid */
} lci_ticket_ref;

typedef struct lci_ticket_status {
    uint64_t adopters, adopted, done, failed; /* client slots */
    uint32_t late;                            /* the deadline has passed */
    uint32_t open;
} lci_ticket_status;

typedef struct lci_counts {
    uint32_t pages, grown, fresh, free, named, writing, doomed, queued;
    uint32_t reservations, tickets, chunks, namespaces_clearing;
    uint32_t held, kept;
    uint32_t idle; /* doomed pages without pins: the next call that needs room gets them */
    uint32_t pad0;
    uint64_t clock;
    uint64_t no_memory_ns; /* for how long no call asks for more memory */
} lci_counts;

typedef struct lci_report {
    int32_t broken; /* 0: clean, else the number of the invariant below */
    uint32_t page;
    uint32_t other;
    uint32_t free, named, writing, ready, doomed, held, queued, pins;
    uint32_t late; /* of the pins: those of tickets whose deadline has passed */
    char message[200];
} lci_report;

enum lci_op {
    LCI_OP_RESERVE = 1,
    LCI_OP_ABANDON,
    LCI_OP_EVICT,
    LCI_OP_CLEAR,
    LCI_OP_REAP,
    LCI_OP_TICKET,
    LCI_OP_ADOPT,
    LCI_OP_CHECK,
    LCI_OP_REPAIR,
    LCI_OP_GROW,
    LCI_OP_NAMESPACE,
    LCI_OP_COLLECT,
    LCI_OP_KEEP,
    LCI_OP_ALLOCATE,
    LCI_OP_NAME,
    LCI_OP_UNNAME,
    LCI_OP_FREE,
    LCI_OP_GROUP,
};

/* ------------------------------------------------------------------ helpers */

struct lci_eviction;

static inline uint32_t lci_state_of(uint32_t word) { return word & LCI_STATE_MASK; }
static inline uint32_t lci_ns_of(uint32_t word) { return (word & LCI_NS_MASK) >> LCI_NS_SHIFT; }
/* The reservation of a page, + 1; 0: it is in none. */
static inline uint32_t lci_res_of(uint32_t word) { return (word & LCI_RES_MASK) >> LCI_RES_SHIFT; }
static inline uint32_t lci_group_of(uint32_t word) { return word >> LCI_GROUP_SHIFT; }
static inline uint64_t lci_tick(const lci_page *p) { return lc_load(&p->used) >> LCI_TICK_SHIFT; }
static inline lc_key lci_key_of(const lci_page *p) {
    return (lc_key){.lo = lc_load(&p->lo), .hi = lc_load(&p->hi)};
}

static inline _Atomic uint16_t *lci_pin(const lci_handle *h, uint32_t slot, uint32_t page) {
    return &h->rows[slot * h->row_stride + page];
}

/* Raise the tick; a racing raise may be lost, which costs a few ticks of recency and nothing
 * else: the order prefix before suffix is kept by `children`, not by ticks. */
static inline void lci_touch(lci_page *p, uint64_t tick, uint32_t hit) {
    uint64_t old = lc_load(&p->used), hits = old & LCI_HITS_MASK;
    if (hits + hit <= LCI_HITS_MASK) hits += hit;
    uint64_t newer = old >> LCI_TICK_SHIFT < tick ? tick : old >> LCI_TICK_SHIFT;
    lc_store(&p->used, newer << LCI_TICK_SHIFT | hits);
}

/* What a hit makes of a page's word. Pages of a request mostly have one word, as they were named and hit
 * together: what becomes of it is computed once. */
typedef struct lci_hits {
    uint64_t before, after;
} lci_hits;

/* A page was found and pinned by a call with this tick; 0: by one that asks for another, which counts. */
static inline void lci_hit(const lci_handle *h, lci_page *p, uint64_t tick, lci_hits *hits) {
    if (LC_LIKELY(!h->ranks)) {
        lci_touch(p, tick, 1);
    } else if (tick) {
        uint64_t used = lc_load(&p->used);
        if (LC_UNLIKELY(used != hits->before))
            *hits = (lci_hits){used, lch_hit(&h->learnt, used, tick)};
        lc_store(&p->used, hits->after);
    }
}

/* Is this tick ahead of the clock, which no call gave? Ticks that are times wrap: of half of all it cannot
 * be told. Numbers do not wrap. */
static inline bool lci_ahead(const lci_handle *h, uint64_t clock, uint64_t tick) {
    if (LC_LIKELY(!h->ranks)) return tick > clock;
    return ((clock - tick) & LCI_TICK_MAX) > LCI_TICK_MAX / 2;
}

/* Was a page with this tick used at `since`, when a call began, or after it? Where ticks wrap, those of
 * the next two years are after it: no call lasts longer, and one under a clock that damage has set far
 * ahead finds pages to evict. */
#define LCI_CALL_TICKS (UINT64_C(1) << 44)
static inline bool lci_used_since(const lci_handle *h, uint64_t tick, uint64_t since) {
    if (LC_LIKELY(!h->ranks)) return tick >= since;
    return ((tick - since) & LCI_TICK_MAX) < LCI_CALL_TICKS;
}

/* The tick of a call: the next number, or, where ages are told, the time in units of 4,096 ns unless
 * calls are ahead of it. As many bits as a page's `used` has for it: a damaged clock must not give
 * ticks that no page can reach, for which eviction would look for ever. */
uint64_t lci_tick_by_time(lci_handle *h);
static inline uint64_t lci_next_tick(lci_handle *h) {
    if (LC_UNLIKELY(h->ranks != NULL)) return lci_tick_by_time(h);
    uint64_t tick = atomic_fetch_add_explicit(&h->root->clock, 1, memory_order_relaxed) + 1;
    return tick & LCI_TICK_MAX;
}

/* The word of a page that gets this key behind `parent` (LC_NIL: none), under the lock. */
static inline uint64_t lci_used_by(lci_handle *h, lc_key key, uint32_t page, uint32_t parent,
                                   uint32_t hint, uint64_t tick) {
    if (LC_LIKELY(!h->ranks)) return tick << LCI_TICK_SHIFT;
    uint64_t before = parent == LC_NIL ? 0 : lc_load(&h->pages[parent].used);
    return lch_named(&h->learnt, key, page, before, hint, tick);
}

/* Above the highest ticket in use, which scans of tickets end at. Within the records, whatever the
 * segment says. */
static inline uint32_t lci_ticket_end(const lci_handle *h) {
    uint32_t end = lc_load(&h->root->ticket_end);
    return end < h->ticket_count ? end : h->ticket_count;
}
static inline bool lci_ns_open(const lci_handle *h, lci_ns_ref ref) {
    const lci_namespace *ns = &h->ns[lci_ns_id(ref)];
    return lc_load_acquire(&ns->state) == LCI_NS_NORMAL &&
           (lc_load(&ns->epoch) & 0xffffff) == ref >> 8;
}

/* For calls that need nothing of this client: neither a slot nor a row. */
static inline int lci_usable(const lci_handle *h) {
    int rc = lcs_usable(h->at);
    if (LC_LIKELY(rc == LC_OK) && LC_UNLIKELY(lc_load(&lcs_header_of(h->at)->disabled)))
        return LC_E_DISABLED;
    return rc;
}

LC_API int lci_geometry_of(uint64_t pages, uint32_t eviction, lci_geometry *g);
/* attach.c: the same of a segment of so many bytes, with the order that it says. */
int lci_geometry_in(const uint8_t *base, uint64_t bytes, uint64_t pages, lci_geometry *g);
bool lci_geometry_agrees(const lci_root *r, const lci_geometry *g);
/* attach.c: a handle on memory, see there. */
lci_handle *lci_handle_on(uint8_t *base, const lci_geometry *g, lcs_attachment *at);

/* Does any client pin the page? Reads the rows of those whose bit is set. */
bool lci_pinned(const lci_handle *h, const lci_page *p);

/* A valid parent, or LC_NIL. */
uint32_t lci_parent(const lci_handle *h, const lci_page *p);

/* lookup.c: own pins, under the process's `rows` mutex (the caller holds it). */
int lci_pin_one(lci_handle *h, uint32_t page);
bool lci_pin_free(lci_handle *h, uint32_t page);
int lci_pin_ready(lci_handle *h, const lc_key *keys, uint32_t n, uint32_t ns, uint64_t tick,
                  int32_t *pages, uint8_t *status);
int lci_unpin_one(lci_handle *h, uint32_t page);
void lci_unpin_run(lci_handle *h, const int32_t *pages, uint32_t from, uint32_t to);
/* The longest ready prefix, pinned: its length, or an error and nothing is pinned. A pin counts when
 * it has been confirmed, behind a fence (seq_cst): then how many pages are still what was found. */
int lci_find_and_pin(lci_handle *h, const lc_key *keys, uint32_t n, uint32_t ns, int32_t *pages,
                     uint32_t *gens);
uint32_t lci_confirm(lci_handle *h, const int32_t *pages, const uint32_t *gens, uint32_t n,
                     uint32_t ns, uint64_t tick);
void lci_note_lookup(lcs_attachment *at, uint32_t asked, uint32_t hit);

/* lookup.c and sparse.c: nothing is pinned. */
uint32_t lci_peek_run(const lci_handle *h, const lc_key *keys, uint32_t n, uint32_t ns);
uint32_t lci_ready_back(const lci_handle *h, const lc_key *keys, uint32_t from, uint32_t to,
                        uint32_t ns);

/* queue.c, under the lock. */
void lci_queue_add(lci_handle *h, lc_txn *t, uint32_t page);
void lci_queue_remove(lci_handle *h, lc_txn *t, uint32_t page);
bool lci_queueable(const lci_handle *h, uint32_t page);
uint32_t lci_queue_list(const lci_handle *h, uint32_t page);
int lci_queue_slot(uint64_t tick, uint64_t now);
uint64_t lci_queue_now(const lci_handle *h);
/* ranked.c */
uint32_t lci_ranked_list(const lci_handle *h, uint64_t used);
uint32_t lci_rank(const lci_handle *h, uint64_t used);
void lci_ranked_mark(lci_handle *h, lc_txn *t, uint32_t list, bool full);
void lci_ranked_begin(lci_handle *h, lc_txn *t, struct lci_eviction *e, uint32_t want);
uint32_t lci_ranked_pop(lci_handle *h, lc_txn *t, struct lci_eviction *e, uint32_t *steps);
void lci_ranks_format(lci_handle *h);
bool lci_ranks_sound(const lci_handle *h);
/* For repair, without the log: lists are empty, and the order is sound; this list is not. */
void lci_ranks_clear(lci_handle *h);
void lci_ranks_occupy(lci_handle *h, uint32_t list);
/* The list of a rank, below LCH_LISTS; LC_NIL: no page is in it. Of a damaged order any number. */
uint32_t lci_list_at(const lci_handle *h, uint32_t rank);
/* supply.c, without the lock: pages that could go, by the rank at which they go (see lci_rank); of the pool,
 * from the lowest rank up until as many are found as are wanted, and of a namespace. `own`: the last page of
 * the caller's chain, which stays with those before it; LC_NIL: there is none. */
typedef struct lci_supply {
    uint32_t pages[1 + LCH_LISTS];
    uint32_t highest; /* rank that has pages; 0 also if none has */
} lci_supply;
void lci_supply_of_pool(const lci_handle *h, const struct lci_eviction *e, uint32_t own, uint32_t want,
                        lci_supply *supply);
void lci_supply_of(const lci_handle *h, const struct lci_eviction *e, uint32_t own, uint32_t ns,
                   lci_supply *supply);
/* worth.c, without the lock: the word of the page of a key, or what is remembered of it; 0: nothing is.
 * How many pages the namespace lacks of what it was promised, or the group. A page that is not written is
 * remembered, with the word that it would have, which is returned. */
uint64_t lci_word_of(const lci_handle *h, lc_key key, uint64_t tick);
uint32_t lci_promise_left(const lci_handle *h, uint32_t ns, uint32_t group);
uint64_t lci_pass_by(lci_handle *h, lc_key key, uint64_t before, uint32_t hint, uint64_t tick);
/* Its pages go, and their keys are still there: remember them. */
void lci_ranked_remember(lci_handle *h, const struct lci_eviction *e, const uint32_t *pages, uint32_t n);
/* Under the lock: pages go in this order of lists from now on. False, and nothing changed: it does not
 * name each list once. */
bool lci_install_order(lci_handle *h, lc_txn *t, const uint16_t list[LCH_LISTS]);
/* After the lock: learn, and install the new order, if it is time to. */
void lci_learn_if_due(lci_handle *h, uint64_t tick, int wait, uint64_t deadline);

/* Does something hang on it that has to go first? On an independent page nothing has to. */
static inline bool lci_covered(const lci_page *p) {
    return lc_load(&p->children) != 0 && !(lc_load(&p->word) & LCI_INDEPENDENT);
}

/* May a page with this word hang on that one? On one of its own namespace and group. In group 0 both
 * are independent or neither is. In others a run's last part alone is, and hangs on one that is not. */
static inline bool lci_may_hang(const lci_handle *h, uint32_t parent, uint32_t word) {
    uint32_t other = lc_load(&h->pages[parent].word) ^ word;
    if (word & LCI_GROUP_MASK) other &= ~LCI_INDEPENDENT;
    return (other & LCI_KIND) == 0;
}

#define LCI_ASKED_FOR 8
/* One call's eviction, over several holds of the lock. */
typedef struct lci_eviction {
    uint64_t since; /* pages used at or after this tick are left alone: they came in meanwhile */
    uint32_t moved; /* pages that were queued older than they are and have been put right */
    bool exhausted; /* nothing can be evicted any more */
    uint32_t by;    /* for a namespace: its number + 1; 0: for none */
    uint32_t by_group; /* for a group: its number + 1; 0: for none */
    uint32_t cause; /* LCI_ASKED and so on, for the counts */
    uint32_t gone;      /* pages that are marked, and still counted by namespace and group: */
    uint32_t gone_kind; /* those of this word */
    uint32_t asked, ahead[LCI_ASKED_FOR]; /* pages likely to be evicted next: their records were asked for */
    const lci_oldest_op *listing; /* listed pages are still counted; NULL: nothing is listed */
    uint32_t *parked; /* of the call, however often it is interrupted: see lci_reserve_op */
    uint32_t spared; /* pages of this rank or a higher one stay; 0: of none */
    bool outbid;     /* what could go now is spared */
} lci_eviction;

/* Is it among what its namespace was promised, or its group? Then only calls for that namespace, or that
 * group, may take it. A namespace pays for its quota with what is its own, of whatever group. */
static inline bool lci_promised(const lci_handle *h, const lci_eviction *e, uint32_t page) {
    uint32_t word = lc_load(&h->pages[page].word), id = lci_ns_of(word), number = lci_group_of(word);
    const lci_namespace *ns = &h->ns[id];
    const lci_group_count *group = &h->root->group[number];
    uint64_t tenant = lc_load(&ns->minimum), layers = lc_load(&group->minimum);
    if (LC_LIKELY((tenant | layers) == 0)) return false;
    uint32_t going = id == lci_ns_of(e->gone_kind) ? e->gone : 0;
    if (e->listing) going += e->listing->going[id];
    if (tenant && e->by != id + 1 && lc_load(&ns->pages) <= tenant + going) return true;
    going = number == lci_group_of(e->gone_kind) ? e->gone : 0;
    if (e->listing) going += e->listing->going_group[number];
    return layers && e->by_group != number + 1 && e->cause != LCI_FOR_QUOTA &&
           lc_load(&group->pages) <= layers + going;
}

/* May it go for this call, as far as it is no matter of the queue? */
static inline bool lci_free_to_go(const lci_handle *h, const lci_eviction *e, uint32_t page) {
    const lci_page *p = &h->pages[page];
    return !lci_used_since(h, lci_tick(p), e->since) && !lci_promised(h, e, page) && !lci_pinned(h, p);
}

/* queue.c: the next page to go, taken off the queue; LC_NIL: none now (`e->exhausted`), or the
 * work of one hold is done. `steps` counts down. */
uint32_t lci_queue_pop(lci_handle *h, lc_txn *t, lci_eviction *e, uint32_t *steps);
/* queue.c: begin a step that takes up to `want` pages. */
static inline void lci_queue_begin(lci_handle *h, lc_txn *t, lci_eviction *e, uint32_t want) {
    if (h->ranks) lci_ranked_begin(h, t, e, want);
}
/* queue.c: a page that is on no list, where this call does not meet it again; and to where those go
 * that go first. */
void lci_queue_defer(lci_handle *h, lc_txn *t, const lci_eviction *e, uint32_t page);
void lci_queue_first(lci_handle *h, lc_txn *t, uint32_t page, uint64_t tick);
/* queue.c: back to the head of the list of its own word. */
void lci_queue_return(lci_handle *h, lc_txn *t, uint32_t page);
/* evict.c: free up to `want` pages (at most a batch in this step). Returns how many. */
uint32_t lci_evict(lci_handle *h, lc_txn *t, lci_eviction *e, uint32_t want);
#define LCI_WINDOW 4096
uint32_t lci_evict_namespace(lci_handle *h, lc_txn *t, lci_eviction *e, uint32_t want, uint32_t ns);
bool lci_evict_from_chain(lci_handle *h, lc_txn *t, lci_eviction *e, uint64_t key_lo);
/* The two halves of evicting pages that the caller has chosen: queueable ones, without pins when
 * it looked, a batch at most and each before its parent (independent ones in any order). Settling
 * compacts `marked` to those that are free now and returns their number. */
void lci_evict_page(lci_handle *h, lc_txn *t, lci_eviction *e, uint32_t page);
/* Does a page go right after its child? It was used by the same call or before it; where lists are
 * ranked, its own is not above its child's, and this call has not used it. */
bool lci_ranked_follows(const lci_handle *h, const lci_eviction *e, uint64_t child, uint64_t parent);
static inline bool lci_follows(const lci_handle *h, const lci_eviction *e, uint32_t child,
                               uint32_t parent) {
    uint64_t used = lc_load(&h->pages[child].used), other = lc_load(&h->pages[parent].used);
    if (h->ranks && used != other) return lci_ranked_follows(h, e, used, other);
    if (h->ranks) return !lci_used_since(h, other >> LCI_TICK_SHIFT, e->since);
    return other >> LCI_TICK_SHIFT <= used >> LCI_TICK_SHIFT;
}
uint32_t lci_evict_settle(lci_handle *h, lc_txn *t, lci_eviction *e, uint32_t *marked, uint32_t n);
/* Count pages that went, under the lock: of all processes, where a step that is undone after a death is
 * counted as if it had happened, and of this one, lost with it. Advice. */
static inline void lci_count_evicted(lci_handle *h, uint32_t cause, uint32_t pages) {
    lc_raise(&h->root->evicted[cause], pages);
    atomic_fetch_add_explicit(&h->evicted[cause], pages, memory_order_relaxed);
}
#define LCI_BATCH 32
#define LCI_HOLD 256 /* pages of work under one hold of the lock */
/* While others wait, a hold does so many pages, or lasts so long: to hand the lock over costs as much
 * as writing tens of pages, and a request of usual size should not pay for it several times. */
#define LCI_SHARE 128
#define LCI_SHARE_NS UINT64_C(50000)
#define LCI_HINT 12 /* steps up a prefix, see prefetch_ancestor in evict.c */

/* room.c, under the lock: what one call does to have pages to take, over several holds of it. */
typedef struct lci_room {
    lci_eviction eviction;
    uint32_t looked, looked_before; /* pages looked at in vain for some of the namespace */
    uint32_t *doomed; /* of the call, however often it is interrupted: see lci_reserve_op */
    uint32_t wanted;                /* with LC_E_GROW: pages that need memory */
    bool no_memory;                 /* and the caller knows that there is none */
    lci_look_op *look;              /* of the call; its turn to look may come */
} lci_room;
/* The result of making room, besides an error: enough is free, or all that can be; or this hold of
 * the lock has done its share and the next continues. */
enum { LCI_ROOM_MADE = 0, LCI_ROOM_AGAIN = 1 };
uint32_t lci_available(const lci_handle *h);
uint32_t lci_uncollected(const lci_handle *h); /* attach.c, without the lock */
int lci_make_quota_room(lci_handle *h, lc_txn *t, lci_room *room, uint32_t id, uint32_t want);
int lci_make_room(lci_handle *h, lc_txn *t, lci_room *room, uint32_t want);

/* room.c: for how long no call asks for more memory; 0: the next one does. */
uint64_t lci_no_memory_left(const lci_handle *h);
bool lci_may_grow(const lci_handle *h, const lci_room *room);
/* Make room once more, after something was taken back, at a new tick: pages that were found pinned
 * before count as used at the earlier one. */
static inline void lci_room_again(lci_handle *h, lci_room *room, uint64_t *tick) {
    room->eviction.since = *tick = lci_next_tick(h);
    room->eviction.exhausted = false;
    room->eviction.moved = *room->eviction.parked = 0;
    room->looked = room->looked_before = *room->doomed = 0;
}

/* look.c: dead clients. A call notes when it began (`now`, before it tries); under the lock, where it
 * evicts, whether it is its turn to look; and after the lock, without the `door`, it looks. `less`:
 * it has got less than it was asked for. 1: something came back, try again (for `less` alone); 0: no;
 * LC_E_BUSY, LC_E_INTR: call again with the same `look`. */
void lci_look_begin(const lci_handle *h, lci_look_op *look, uint64_t now);
bool lci_look_due(const lci_handle *h, uint64_t now);
void lci_look_if_due(lci_handle *h, lci_look_op *look);
int lci_look(lci_handle *h, lci_look_op *look, bool less, int wait, uint64_t deadline);
LC_API int lci_reap_slot(lci_handle *h, uint32_t slot, int wait, uint64_t deadline);
/* reap.c: the same in portions. `left` says how much may be done, in pins, and then how much of
 * that is left; at 0 or below the slot may still be TAKEN or in QUARANTINE, and the next reaper
 * continues. */
int lci_reap_some(lci_handle *h, uint32_t slot, int wait, uint64_t deadline, int64_t *left);
#define LCI_REAP_PAGE 64 /* what unlinking a page costs, in pins that are cleared */
/* What one call takes back for its caller, so that it costs less than 10 ms: a page that was being
 * written costs 0.1 to 1 us (two cores, ten processes), which is 4 ms; a pin 2 to 20 ns. */
#ifndef LCI_REAP_MOST
#define LCI_REAP_MOST (4096 * LCI_REAP_PAGE)
#endif
#define LCI_LOOK_ROUNDS 256 /* of one call, each a share of LCI_REAP_MOST */
/* ticket.c, without the lock: has `slot` given a ticket that a client that is not `dead` may
 * adopt? */
bool lci_ticket_awaited(const lci_handle *h, uint32_t slot, uint64_t dead);

/* held.c: pages without a key. */
static inline uint32_t lci_held_word(uint32_t slot) { return LCI_HELD | slot << LCI_NS_SHIFT; }
static inline bool lci_holds(const lci_handle *h, uint32_t page) {
    return page < h->page_count && lc_load(&h->pages[page].word) == lci_held_word(h->at->slot);
}
void lci_doom_held(lci_handle *h, lc_txn *t, const uint32_t *pages, uint32_t n, uint32_t flags);
void lci_let_held_go(lci_handle *h, lc_txn *t, const uint32_t *pages, uint32_t n);
bool lci_held_by(const lci_handle *h, uint32_t page, uint32_t slot);
int lci_reap_held(lci_handle *h, uint32_t slot, const uint32_t *pages, uint32_t n, int wait,
                  uint64_t deadline);

/* pages.c, under the lock: the transitions of a page and the lists of reservations and tickets. */
void lci_count_named(lci_handle *h, lc_txn *t, uint32_t word, uint32_t delta);
uint32_t lci_take_free(lci_handle *h, lc_txn *t, uint32_t *out, uint32_t want);
void lci_give_free(lci_handle *h, lc_txn *t, const uint32_t *pages, uint32_t n);
void lci_detach_parent(lci_handle *h, lc_txn *t, uint32_t page);
void lci_readopt(lci_handle *h, lc_txn *t, uint32_t page, uint32_t parent);
void lci_attach_parent(lci_handle *h, lc_txn *t, uint32_t page, uint32_t parent);
void lci_child_comes(lci_handle *h, lc_txn *t, uint32_t parent);
void lci_child_goes(lci_handle *h, lc_txn *t, uint32_t parent);
bool lci_doom(lci_handle *h, lc_txn *t, uint32_t page);
void lci_free_doomed(lci_handle *h, lc_txn *t, uint32_t page);
uint32_t lci_list_push(lci_handle *h, lc_txn *t, lci_list *list, const uint32_t *pages,
                       uint32_t n);
uint32_t lci_list_room(const lci_handle *h, const lci_list *list);
void lci_list_pop_chunk(lci_handle *h, lc_txn *t, lci_list *list);
const lci_chunk *lci_list_chunk(const lci_handle *h, const lci_list *list);
/* How many pages of the list its first chunk `c` holds; 0: damage, `t->error` says so. */
uint32_t lci_list_part(const lci_handle *h, lc_txn *t, const lci_list *list, const lci_chunk *c);
/* More pages than this no list can hold. */
static inline uint32_t lci_list_most(const lci_handle *h) {
    return h->chunk_count * LCI_CHUNK_PAGES;
}

/* collect.c, under the lock: what others left to do, in pieces. Each returns pages of work. */
uint32_t lci_collect(lci_handle *h, lc_txn *t, uint32_t budget);
uint32_t lci_collect_doomed(lci_handle *h, lc_txn *t, uint32_t budget);
uint32_t lci_clear_some(lci_handle *h, lc_txn *t, uint32_t budget);
uint32_t lci_end_reservation(lci_handle *h, lc_txn *t, uint32_t rid, uint32_t budget);
bool lci_open_reservation(lci_handle *h, lc_txn *t, uint32_t shards, lci_ns_ref ns, uint32_t *rid,
                          uint32_t *gen);
bool lci_complete(const lci_reservation *r);
bool lci_doom_reservation(lci_handle *h, lc_txn *t, uint32_t rid, uint32_t of);
void lci_flag_ended(lci_handle *h, uint32_t rid);
void lci_notify(lci_handle *h);

/* join.c, under the lock but for the last. lci_join: one of these, or LC_E_PINS and nothing is
 * pinned. */
enum { LCI_JOIN_NONE = 0, LCI_JOINED = 1, LCI_JOIN_LATER = 2 };
int lci_join(lci_handle *h, lc_txn *t, lci_reserve_op *op, const int32_t *page, uint8_t *status,
             uint32_t n);
void lci_open_shards(lci_handle *h, const lci_reserve_op *op);
void lci_settle_joins(lci_handle *h, lc_txn *t);
int lci_list_whole(lci_handle *h, const lci_reserve_op *op, int wait, uint64_t deadline);
#define LCI_JOIN_WAIT UINT64_C(20000000) /* ns that a rank waits for one that is making pages */

/* What a caller of lci_may_allocate knows of memory for the pages that have none. */
enum { LCI_MEMORY_ASK = 0, LCI_MEMORY_NONE = 1, LCI_MEMORY_ALL = 2 };

/* reserve.c and publish.c: for many.c, which calls them chain by chain. */
LC_API int lci_reserve(lci_handle *h, lci_reserve_op *op, const lc_key *keys, uint32_t n,
                       uint32_t start, int32_t *page, uint8_t *status, int wait,
                       uint64_t deadline);
LC_API int lci_unreserve(lci_handle *h, lci_reserve_op *op, const int32_t *page,
                         const uint8_t *status, uint32_t n);
LC_API int lci_abandon(lci_handle *h, uint32_t rid, uint32_t gen, int wait, uint64_t deadline);
LC_API int lci_publish(lci_handle *h, uint32_t rid, uint32_t gen, uint32_t shard,
                       const int32_t *pages, uint32_t n);

/* lookup.c: for groups.c, which gives back what it matched before an error. */
LC_API int lci_release(lci_handle *h, lci_lease *lease);

/* publish.c: without the lock. */
int lci_make_ready(lci_handle *h, uint32_t rid, uint32_t ns, const int32_t *pages, uint32_t n);

/* ticket.c, under the lock. */
uint32_t lci_settle_tickets(lci_handle *h, lc_txn *t, uint32_t budget);
void lci_ticket_client_gone(lci_handle *h, lc_txn *t, uint32_t slot);

/* repair.c, under the lock: rebuild everything derived from the truth. */
int lci_rebuild(lci_handle *h);

static inline int lci_lock(lci_handle *h, lc_txn *t, uint32_t op, int wait, uint64_t deadline) {
    int rc = lcs_lock_take(h->at, t, op, wait, deadline, h->log_begin, h->log_end);
    if (LC_UNLIKELY(rc == LC_OK && lc_load(&h->root->repairing))) {
        rc = lci_rebuild(h);
        if (rc != LC_OK) lcs_lock_drop(h->at, t, h->log_begin, h->log_end);
    }
    return rc;
}

/* Between two holds of long work: continue (LC_OK), or first let the interpreter look for signals
 * (LC_E_INTR; LC_E_BUSY: with its lock let go), or give up. */
static inline int lci_again(uint64_t begun, int wait, uint64_t deadline) {
    uint64_t now = lcs_now_ns();
    if (wait == LC_TRY) return now - begun < UINT64_C(1000000) ? LC_OK : LC_E_BUSY;
    if (now >= deadline) return LC_E_TIMEOUT;
    return now - begun < UINT64_C(50000000) ? LC_OK : LC_E_INTR;
}
static inline int lci_unlock(lci_handle *h, lc_txn *t) {
    return lcs_lock_drop(h->at, t, h->log_begin, h->log_end);
}
/* Between two steps: do others wait, and has this hold done its share? */
static inline bool lci_give_way(const lci_handle *h, uint32_t worked) {
    if (LC_LIKELY(!lcs_lock_wanted(h->at))) return false;
    return worked >= LCI_SHARE ||
           lcs_now_ns() >= lc_load(&lcs_lock_of(h->at)->since_ns) + LCI_SHARE_NS;
}
/* A safe point: everything so far has happened. */
static inline void lci_step(lc_txn *t) {
    if (!t->error) lc_txn_commit(t);
}

#endif
