/* Lookups where an index has a few of many keys, as one of checkpoints does: each key for itself.
 * No lock, nothing is pinned or written. */
#include "index.h"

#define AHEAD 16 /* keys whose buckets are asked for before they are looked at */

static inline void prefetch_bucket(const lci_handle *h, const lc_key *key) {
    __builtin_prefetch((const void *)&h->dict.buckets[lc_bucket(&h->dict, key->lo)]);
}

/* The page of a key, READY. Most keys are absent, and of most of these the chain is empty: one look
 * at a bucket. */
static inline bool find(const lci_handle *h, const lc_key *key, uint32_t ns, lc_found *found) {
    const lc_dict *d = &h->dict;
    uint32_t head = lc_load_acquire(&d->buckets[lc_bucket(d, key->lo)]);
    if (LC_LIKELY(head >= d->nodes)) return false;
    lc_dict_find_from(d, key->lo, key->hi, head, found);
    return found->node != LC_NIL && lci_state_of(found->word) == LCI_READY &&
           lci_ns_of(found->word) == ns;
}

/* ------------------------------------------------------------------ the deepest key */

static uint32_t deepest_one(const lci_handle *h, const lc_key *keys, uint32_t n, uint32_t ns) {
    lc_found found;
    for (uint32_t i = n; i > n - (n < AHEAD ? n : AHEAD); i--) prefetch_bucket(h, &keys[i - 1]);
    for (uint32_t i = n; i > 0; i--) {
        if (i > AHEAD) prefetch_bucket(h, &keys[i - 1 - AHEAD]);
        if (find(h, &keys[i - 1], ns, &found)) return i;
    }
    return 0;
}

/* How many keys of a run there are up to the last that is ready, whatever of those before it is: 0
 * when none is. */
LC_API int lci_deepest1(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ns) {
    int rc = lci_usable(h);
    if (LC_UNLIKELY(rc != LC_OK)) return rc;
    uint32_t found = deepest_one(h, keys, n, lci_ns_id(ns));
    /* A clear that began meanwhile wins, as in lci_peek. */
    return LC_LIKELY(lci_ns_open(h, ns)) ? (int)found : 0;
}

/* The same for many: run i is keys[offsets[i] .. offsets[i+1]). `counts[i]` receives it. */
LC_API int lci_deepest(lci_handle *h, const lc_key *keys, const int64_t *offsets,
                       uint32_t requests, lci_ns_ref ns, int32_t *counts) {
    int rc = lci_usable(h);
    for (uint32_t i = 0; i < requests && rc >= 0; i++) {
        rc = lci_deepest1(h, keys + offsets[i], (uint32_t)(offsets[i + 1] - offsets[i]), ns);
        counts[i] = rc;
    }
    return rc < 0 ? rc : LC_OK;
}

/* How many of the keys [from, to) are ready without a gap, from the last one back. Asks ahead for
 * keys before `from` too: whoever finds a gap goes on there. */
uint32_t lci_ready_back(const lci_handle *h, const lc_key *keys, uint32_t from, uint32_t to,
                        uint32_t ns) {
    lc_found found;
    for (uint32_t i = to; i > from && i + AHEAD > to; i--) prefetch_bucket(h, &keys[i - 1]);
    for (uint32_t i = to; i > from; i--) {
        if (i > AHEAD) prefetch_bucket(h, &keys[i - 1 - AHEAD]);
        if (!find(h, &keys[i - 1], ns, &found)) return to - i;
    }
    return to - from;
}

/* ------------------------------------------------------------------ what hangs on a key */

/* -1: the key is not there. */
static int32_t children_of(const lci_handle *h, const lc_key *key, uint32_t ns) {
    lc_found found;
    if (!find(h, key, ns, &found)) return -1;
    const lci_page *p = &h->pages[found.node];
    uint32_t children = lc_load_acquire(&p->children);
    LC_PAUSE(LC_AT_WALK_NEXT);
    /* It may have gone since, and be a page with other children by now. */
    if (lc_load(&p->gen) != found.gen) return -1;
    return (int32_t)(children < h->page_count ? children : h->page_count);
}

/* How many pages hang on each key's, at about this instant. */
LC_API int lci_children(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ns,
                        int32_t *counts) {
    int rc = lci_usable(h);
    if (rc != LC_OK) return rc;
    bool open = lci_ns_open(h, ns);
    for (uint32_t i = 0; i < n; i++) {
        if (i + AHEAD < n) prefetch_bucket(h, &keys[i + AHEAD]);
        counts[i] = open ? children_of(h, &keys[i], lci_ns_id(ns)) : -1;
    }
    if (!lci_ns_open(h, ns))
        for (uint32_t i = 0; i < n; i++) counts[i] = -1;
    return LC_OK;
}
