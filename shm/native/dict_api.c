/* SharedDict: the hash chains of dict.h with a value in each record's word. */
#include "dict.h"
#include "lock.h"

#include <stdio.h>
#include <stdlib.h>

typedef struct lcx_record {
    lc_node node; /* node.word is the value; node.user1 links free records */
    uint64_t pad[2];
} lcx_record;
_Static_assert(sizeof(lcx_record) == 64, "one line a record");

typedef struct lcx_root {
    _Atomic uint32_t free_head, fresh, count;
    uint32_t pad[13];
} lcx_root;

typedef struct lcx_dict {
    lcs_attachment *at;
    lcx_root *root;
    lc_dict dict;
    uint64_t begin, end;
} lcx_dict;

static uint32_t bucket_count(uint32_t capacity) {
    uint64_t n = 64;
    while (n < (uint64_t)capacity + capacity / 2) n *= 2;
    return (uint32_t)n;
}

LC_API uint64_t lcx_dict_bytes(uint32_t capacity) {
    return sizeof(lcx_root) + (uint64_t)capacity * sizeof(lcx_record) +
           (uint64_t)bucket_count(capacity) * 4;
}

static void point(lcx_dict *d, uint8_t *base, uint32_t capacity) {
    d->root = (lcx_root *)(base + LCS_PAYLOAD_OFFSET);
    d->dict.records = (uint8_t *)(d->root + 1);
    d->dict.stride = sizeof(lcx_record);
    d->dict.nodes = capacity;
    d->dict.buckets =
        (_Atomic uint32_t *)(d->dict.records + (uint64_t)capacity * sizeof(lcx_record));
    d->dict.mask = bucket_count(capacity) - 1;
    d->begin = LCS_PAYLOAD_OFFSET;
    d->end = LCS_PAYLOAD_OFFSET + lcx_dict_bytes(capacity);
}

LC_API void lcx_dict_format(uint8_t *base, uint32_t capacity) {
    lcx_dict d;
    point(&d, base, capacity);
    lc_store(&d.root->free_head, LC_NIL);
    for (uint64_t i = 0; i <= d.dict.mask; i++) lc_store(&d.dict.buckets[i], LC_NIL);
}

LC_API lcx_dict *lcx_dict_open(lcs_attachment *at, uint32_t capacity) {
    lcx_dict *d = calloc(1, sizeof *d);
    if (!d) return NULL;
    d->at = at;
    point(d, at->base, capacity);
    return d;
}

LC_API void lcx_dict_close(lcx_dict *d) { free(d); }

static int lock(lcx_dict *d, lc_txn *t, int wait, uint64_t deadline) {
    int rc = lcs_usable(d->at);
    if (rc != LC_OK) return rc;
    if (d->at->slot == 0) return LC_E_READONLY;
    if (wait == LC_TRY ? pthread_mutex_trylock(&d->at->door) : pthread_mutex_lock(&d->at->door))
        return LC_E_BUSY;
    rc = lcs_lock_take(d->at, t, 0, wait, deadline, d->begin, d->end);
    if (rc != LC_OK) pthread_mutex_unlock(&d->at->door);
    return rc;
}

static int unlock(lcx_dict *d, lc_txn *t) {
    int rc = lcs_lock_drop(d->at, t, d->begin, d->end);
    pthread_mutex_unlock(&d->at->door);
    return rc;
}

static lc_node *record(const lcx_dict *d, uint32_t node) { return lc_node_at(&d->dict, node); }

static _Atomic uint32_t *free_link(const lcx_dict *d, uint32_t node) {
    return (_Atomic uint32_t *)&record(d, node)->user1;
}

/* LC_OK and `*value`, or LC_E_MISSING. No lock; a key that stays is never missed. */
LC_API int lcx_dict_get(lcx_dict *d, uint64_t lo, uint64_t hi, int32_t *value) {
    lc_found found;
    int rc = lcs_usable(d->at);
    if (rc != LC_OK) return rc;
    lc_dict_find(&d->dict, lo, hi, &found);
    if (found.node == LC_NIL) return LC_E_MISSING;
    *value = (int32_t)found.word;
    return LC_OK;
}

/* The same for n keys: `found[i]` 1 and `values[i]`, or 0. Returns how many were found. */
LC_API int lcx_dict_get_many(lcx_dict *d, const lc_key *keys, uint32_t n, int32_t *values,
                             uint8_t *found) {
    int count = 0, rc = lcs_usable(d->at);
    if (rc != LC_OK) return rc;
    for (uint32_t i = 0; i < n; i++) {
        lc_found one;
        if (i + 8 < n)
            __builtin_prefetch((const void *)&d->dict.buckets[lc_bucket(&d->dict, keys[i + 8].lo)]);
        lc_dict_find(&d->dict, keys[i].lo, keys[i].hi, &one);
        found[i] = one.node != LC_NIL;
        values[i] = found[i] ? (int32_t)one.word : 0;
        count += found[i];
    }
    return count;
}

static uint32_t take_record(lcx_dict *d, lc_txn *t) {
    uint32_t node = lc_load(&d->root->free_head);
    if (node < d->dict.nodes) {
        lc_txn_set(t, &d->root->free_head, lc_load(free_link(d, node)));
        return node;
    }
    node = lc_load(&d->root->fresh);
    if (node >= d->dict.nodes) return LC_NIL;
    lc_txn_set(t, &d->root->fresh, node + 1);
    return node;
}

static void insert(lcx_dict *d, lc_txn *t, lc_key key, int32_t value) {
    uint32_t node = LC_NIL;
    if (lc_dict_chain(&d->dict, key.lo) < LC_CHAIN_MAX) node = take_record(d, t);
    if (node == LC_NIL) {
        t->error = LC_E_FULL;
        return;
    }
    lc_dict_insert(t, &d->dict, node, key, (uint32_t)value);
    lc_txn_add(t, &d->root->count, 1);
}

/* Set a key. 1: it was there (with `only_new`: and was left as it is), 0: it is new. LC_E_FULL: no
 * record left, or its chain is at the bound. */
LC_API int lcx_dict_put(lcx_dict *d, uint64_t lo, uint64_t hi, int32_t value, int only_new,
                        int wait, uint64_t deadline) {
    lc_txn t;
    lc_found found;
    int rc = lock(d, &t, wait, deadline);
    if (rc != LC_OK) return rc;
    lc_dict_find(&d->dict, lo, hi, &found);
    bool there = found.node != LC_NIL;
    if (!there) insert(d, &t, (lc_key){lo, hi}, value);
    else if (!only_new) lc_txn_set(&t, &record(d, found.node)->word, (uint32_t)value);
    rc = unlock(d, &t);
    return rc == LC_OK ? there : rc;
}

/* Remove a key, its value into `*value`. LC_E_MISSING: it was not there. */
LC_API int lcx_dict_pop(lcx_dict *d, uint64_t lo, uint64_t hi, int32_t *value, int wait,
                        uint64_t deadline) {
    lc_txn t;
    lc_found found;
    int rc = lock(d, &t, wait, deadline);
    if (rc != LC_OK) return rc;
    lc_dict_find(&d->dict, lo, hi, &found);
    if (found.node == LC_NIL) {
        t.error = LC_E_MISSING;
    } else {
        *value = (int32_t)found.word;
        lc_dict_unlink(&t, &d->dict, found.node);
        lc_store(free_link(d, found.node), lc_load(&d->root->free_head)); /* dead in a record in use */
        lc_txn_set(&t, &d->root->free_head, found.node);
        lc_txn_add(&t, &d->root->count, (uint32_t)-1);
    }
    return unlock(d, &t);
}

LC_API int lcx_dict_length(lcx_dict *d) {
    int rc = lcs_usable(d->at);
    if (rc != LC_OK) return rc;
    uint32_t count = lc_load(&d->root->count);
    return count <= d->dict.nodes ? (int)count : LC_E_CORRUPT;
}

/* Copy all items, at most `room`, in no order. Returns how many. */
LC_API int lcx_dict_copy(lcx_dict *d, lc_key *keys, int32_t *values, uint32_t room, int wait,
                         uint64_t deadline) {
    lc_txn t;
    uint32_t n = 0;
    int rc = lock(d, &t, wait, deadline);
    if (rc != LC_OK) return rc;
    for (uint64_t b = 0; b <= d->dict.mask; b++) {
        uint32_t at = lc_load(&d->dict.buckets[b]);
        for (; at < d->dict.nodes && n < room; at = lc_load(&record(d, at)->next)) {
            keys[n] = (lc_key){lc_load(&record(d, at)->lo), lc_load(&record(d, at)->hi)};
            values[n++] = (int32_t)lc_load(&record(d, at)->word);
        }
    }
    rc = unlock(d, &t);
    return rc == LC_OK ? (int)n : rc;
}

static int check_chain(const lcx_dict *d, uint32_t bucket, uint8_t *seen, uint32_t *count,
                       char *text, size_t room) {
    uint32_t at = lc_load(&d->dict.buckets[bucket]), n = 0;
    for (; at != LC_NIL; at = lc_load(&record(d, at)->next)) {
        if (at >= d->dict.nodes || seen[at] || n++ >= LC_CHAIN_MAX)
            return snprintf(text, room, "chain %u: record %u is out of range or met before", bucket, at);
        if (lc_bucket(&d->dict, lc_load(&record(d, at)->lo)) != bucket)
            return snprintf(text, room, "record %u is in chain %u, its key is not", at, bucket);
        if (lc_load(&record(d, at)->gen) & 1)
            return snprintf(text, room, "record %u is reachable with odd generation", at);
        /* Of the segment itself, not of a copy: checked again, and at most as far as before. */
        uint32_t b = lc_load(&d->dict.buckets[bucket]);
        for (uint32_t i = 1; i < n && b < d->dict.nodes; i++, b = lc_load(&record(d, b)->next))
            if (lc_load(&record(d, b)->lo) == lc_load(&record(d, at)->lo) &&
                lc_load(&record(d, b)->hi) == lc_load(&record(d, at)->hi))
                return snprintf(text, room, "records %u and %u have the same key", at, b);
        seen[at] = 1;
        ++*count;
    }
    return 0;
}

static int check_all(const lcx_dict *d, uint8_t *seen, char *text, size_t room) {
    uint32_t count = 0, free_count = 0, at;
    int broken = 0;
    for (uint64_t b = 0; b <= d->dict.mask && !broken; b++)
        broken = check_chain(d, (uint32_t)b, seen, &count, text, room);
    if (broken) return broken;
    for (at = lc_load(&d->root->free_head); at != LC_NIL; at = lc_load(free_link(d, at))) {
        if (at >= d->dict.nodes || seen[at])
            return snprintf(text, room, "free record %u is out of range or in use", at);
        seen[at] = 1;
        free_count++;
    }
    if (count != lc_load(&d->root->count) || count + free_count != lc_load(&d->root->fresh))
        return snprintf(text, room, "%u items (count %u) + %u free != %u ever used", count,
                        lc_load(&d->root->count), free_count, lc_load(&d->root->fresh));
    return 0;
}

/* Derive every invariant again, under the lock. 0 clean, 1 broken (`text` names the first). */
LC_API int lcx_dict_check(lcx_dict *d, char *text, uint32_t room, int wait, uint64_t deadline) {
    lc_txn t;
    uint8_t *seen = calloc(d->dict.nodes, 1);
    int broken = 0, rc = seen ? lock(d, &t, wait, deadline) : LC_E_FULL;
    if (rc == LC_OK) {
        broken = check_all(d, seen, text, room);
        rc = unlock(d, &t);
    }
    free(seen);
    return rc == LC_OK ? broken != 0 : rc;
}

/* The same for a copy of the segment, `bytes` long, which no process changes. */
LC_API int lcx_dict_check_copy(uint8_t *base, uint64_t bytes, uint32_t capacity, char *text,
                               uint32_t room) {
    lcx_dict d = {0};
    if (bytes < LCS_PAYLOAD_OFFSET + lcx_dict_bytes(capacity)) return LC_E_RANGE;
    uint8_t *seen = calloc(capacity, 1);
    if (!seen) return LC_E_FULL;
    point(&d, base, capacity);
    int broken = check_all(&d, seen, text, room);
    free(seen);
    return broken != 0;
}
