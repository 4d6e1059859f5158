/* What the index is measured against: memory read without any protocol, and calls that do nothing.
 *
 * Compiled at run time into a temporary folder (tools/bench/_baseline.py); never installed. */
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#define API __attribute__((visibility("default")))
#define BLOCK 16 /* keys a block, as in lightcache/native/lookup.c */

typedef struct key {
    uint64_t lo, hi;
} key;

typedef struct record {
    uint64_t lo, hi;
    uint32_t words[12];
} record;
_Static_assert(sizeof(record) == 64, "one line a record");

static uint64_t now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * UINT64_C(1000000000) + (uint64_t)ts.tv_nsec;
}

static void prefetch_buckets(const uint32_t *buckets, uint32_t mask, const key *keys, uint32_t from,
                             uint32_t n) {
    uint32_t to = from + BLOCK < n ? from + BLOCK : n;
    for (uint32_t i = from; i < to; i++)
        __builtin_prefetch(&buckets[(uint32_t)keys[i].lo & mask]);
}

static void load_heads(const uint32_t *buckets, uint32_t mask, const record *records,
                       const key *keys, uint32_t from, uint32_t n, uint32_t *heads) {
    uint32_t to = from + BLOCK < n ? from + BLOCK : n;
    for (uint32_t i = from; i < to; i++) {
        heads[i - from] = buckets[(uint32_t)keys[i].lo & mask];
        __builtin_prefetch(&records[heads[i - from]]);
    }
}

/* Read the bucket and the record of every key and compare the keys. No chain, no state, no
 * generation. Returns the nanoseconds it took; `*found` counts the keys that were equal. */
API uint64_t lcb_probe(const uint32_t *buckets, uint32_t mask, const record *records,
                       const key *keys, uint32_t n, uint32_t *found) {
    uint32_t heads[2][BLOCK], equal = 0;
    uint64_t begin = now_ns();
    prefetch_buckets(buckets, mask, keys, 0, n);
    prefetch_buckets(buckets, mask, keys, BLOCK, n);
    load_heads(buckets, mask, records, keys, 0, n, heads[0]);
    for (uint32_t i = 0; i < n; i++) {
        if (i % BLOCK == 0) {
            prefetch_buckets(buckets, mask, keys, i + 2 * BLOCK, n);
            load_heads(buckets, mask, records, keys, i + BLOCK, n, heads[(i / BLOCK + 1) % 2]);
        }
        const record *r = &records[heads[i / BLOCK % 2][i % BLOCK]];
        equal += r->lo == keys[i].lo && r->hi == keys[i].hi;
    }
    *found = equal;
    return now_ns() - begin;
}

/* Calls with as many arguments as lci_match1 and lci_release, doing nothing. */
API int lcb_empty5(void *a, const void *b, uint32_t c, uint32_t d, void *e) {
    (void)a, (void)b, (void)c, (void)d, (void)e;
    return 0;
}

API int lcb_empty2(void *a, void *b) {
    (void)a, (void)b;
    return 0;
}

/* The one thing that Python has no way to say. */
API int lcb_compare_and_swap(_Atomic uint32_t *word, uint32_t expected, uint32_t desired) {
    return atomic_compare_exchange_strong(word, &expected, desired);
}
