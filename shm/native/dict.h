/* Hash chains over fixed records: changed under the lock through the undo log, read without.
 *
 * A record has a 128-bit key, a generation and a chain link. Writers keep three rules:
 *   1. a record's key and link change only while its generation is odd;
 *   2. a record is reachable from a bucket only while its generation is even;
 *   3. records enter a chain at its head.
 *
 * A reader checks of every record it stands on that the generation was even and the same before and
 * after it read key and link, and that the key belongs to this bucket; else it starts again at the
 * head. Then a record that stays in its chain during the whole walk is never missed: each record
 * that the reader visits was in this chain, before that record, at an instant of the walk. If it
 * was unlinked since, its link is frozen from the instant of unlinking; if it was used again,
 * either the bucket differs, or it stands at the head of this very chain, before everything else.
 * By rule 2 a fresh start never meets the record that a stopped or dead writer left odd, so readers
 * need no help and no recovery to get through. Idea: sequence locks on list nodes, as in hash
 * tables read under optimistic versioning (MemC3, NSDI 2013); the proof above is ours. */
#ifndef LC_DICT_H
#define LC_DICT_H

#include "list.h"

#define LC_CHAIN_MAX 32       /* an insert beyond it finds no room: bounds every walk */
#define LC_WALK_RESTARTS 1024 /* each needs a writer's progress; past it the key counts as absent */

typedef struct lc_key {
    uint64_t lo;
    uint64_t hi;
} lc_key;

/* The first 48 bytes of every record that a dict holds are laid out so. */
typedef struct lc_node {
    _Atomic uint64_t lo;
    _Atomic uint64_t hi;
    uint64_t user0[2];
    _Atomic uint32_t gen;
    _Atomic uint32_t word; /* the user's state or value, seen together with the generation */
    _Atomic uint32_t next;
    uint32_t user1;
} lc_node;
_Static_assert(sizeof(lc_node) == 48, "the head of a record");

typedef struct lc_dict {
    uint8_t *records;
    uint32_t stride;
    uint32_t nodes;
    _Atomic uint32_t *buckets;
    uint32_t mask;
} lc_dict;

typedef struct lc_found {
    uint32_t node; /* LC_NIL: absent */
    uint32_t gen;
    uint32_t word;
} lc_found;

static inline lc_node *lc_node_at(const lc_dict *d, uint32_t node) {
    return (lc_node *)(d->records + (uint64_t)node * d->stride);
}

/* Keys are digests already: their low bits are as good as any hash of them. */
static inline uint32_t lc_bucket(const lc_dict *d, uint64_t lo) { return (uint32_t)lo & d->mask; }

/* One walk from `head`. Returns 1 when it ended (found or absent), 0 when it must start again. */
static inline int lc_dict_walk(const lc_dict *d, uint64_t lo, uint64_t hi, uint32_t head,
                               lc_found *out) {
    uint32_t at = head, bucket = lc_bucket(d, lo);
    for (int hops = 0; hops <= LC_CHAIN_MAX; hops++) {
        if (LC_UNLIKELY(at >= d->nodes)) {
            out->node = LC_NIL;
            return 1;
        }
        lc_node *r = lc_node_at(d, at);
        uint32_t gen = lc_load_acquire(&r->gen); /* order: walk-gen */
        uint64_t klo = lc_load(&r->lo), khi = lc_load(&r->hi);
        uint32_t word = lc_load_acquire(&r->word); /* order: walk-word */
        uint32_t next = lc_load(&r->next);
        LC_PAUSE(LC_AT_WALK_NEXT);
        atomic_thread_fence(memory_order_acquire); /* order: walk-fence */
        if (LC_UNLIKELY((gen & 1) || lc_load(&r->gen) != gen)) return 0;
        if (LC_LIKELY(klo == lo && khi == hi)) {
            *out = (lc_found){.node = at, .gen = gen, .word = word};
            return 1;
        }
        if (LC_UNLIKELY(lc_bucket(d, klo) != bucket)) return 0;
        at = next;
    }
    return 0; /* longer than a chain can be: it changed under us, or it is damaged */
}

void lc_dict_find_slow(const lc_dict *d, uint64_t lo, uint64_t hi, lc_found *out);

/* Find a key, without the lock. `head` is the bucket's head as loaded earlier in this call. */
static inline void lc_dict_find_from(const lc_dict *d, uint64_t lo, uint64_t hi, uint32_t head,
                                     lc_found *out) {
    LC_PAUSE(LC_AT_WALK_HEAD);
    if (LC_UNLIKELY(!lc_dict_walk(d, lo, hi, head, out))) lc_dict_find_slow(d, lo, hi, out);
}

static inline void lc_dict_find(const lc_dict *d, uint64_t lo, uint64_t hi, lc_found *out) {
    uint32_t head = lc_load_acquire(&d->buckets[lc_bucket(d, lo)]);
    lc_dict_find_from(d, lo, hi, head, out);
}

/* Open a record that nothing leads to: its generation becomes odd (a death may have left it so).
 * The fence orders the stores of the record's new fields after it. */
static inline void lc_gen_open(_Atomic uint32_t *gen) {
    lc_store(gen, lc_load(gen) | 1);
    atomic_thread_fence(memory_order_release); /* order: gen-odd */
}

/* Close it: even, with release, so that a reader of this generation reads the fields. */
static inline void lc_gen_close(_Atomic uint32_t *gen) {
    lc_store_release(gen, lc_load(gen) + 1); /* order: gen-even */
}

/* Under the lock: find a key without the readers' checks, for nothing changes meanwhile. `*length`
 * receives the records passed: of an absent key's chain all, at most LC_CHAIN_MAX + 1. */
static inline uint32_t lc_dict_look(const lc_dict *d, uint64_t lo, uint64_t hi,
                                    uint32_t *length) {
    uint32_t n = 0, at = lc_load(&d->buckets[lc_bucket(d, lo)]);
    for (; at < d->nodes && n <= LC_CHAIN_MAX; n++) {
        const lc_node *r = lc_node_at(d, at);
        if (lc_load(&r->lo) == lo && lc_load(&r->hi) == hi) break;
        at = lc_load(&r->next);
    }
    *length = n;
    return at < d->nodes && n <= LC_CHAIN_MAX ? at : LC_NIL;
}

/* Under the lock: link a record whose key is set and whose generation is even. */
static inline void lc_dict_link(lc_txn *t, const lc_dict *d, uint32_t node) {
    _Atomic uint32_t *head = &d->buckets[lc_bucket(d, lc_load(&lc_node_at(d, node)->lo))];
    lc_txn_set(t, head, node);
}

/* Under the lock: take a record out of its chain. Its own key and link stay for readers on it. */
void lc_dict_unlink(lc_txn *t, const lc_dict *d, uint32_t node);

/* Under the lock: records in the chain of this key, at most LC_CHAIN_MAX + 1. */
uint32_t lc_dict_chain(const lc_dict *d, uint64_t lo);

/* Under the lock: store key and link of an unlinked record and link it. Rules 1 to 3 in order.
 * `word` is stored while the record is open. */
void lc_dict_insert(lc_txn *t, const lc_dict *d, uint32_t node, lc_key key, uint32_t word);

#endif
