/* Is a page worth writing? Only if what goes for it ranks no higher.
 *
 * A call that reserves answers it for each page, with what would go for it (reserve.c). Ranks that write
 * together have to agree, so one client asks for all of them before they reserve: without the lock, from
 * the lowest page alone. What is not written is remembered like what went, else it would never be worth
 * more when it is asked for again. */
#include "index.h"

uint64_t lci_word_of(const lci_handle *h, lc_key key, uint64_t tick) {
    lc_found found;
    uint64_t used;
    lc_dict_find(&h->dict, key.lo, key.hi, &found);
    if (found.node != LC_NIL) return lc_load(&h->pages[found.node].used);
    return lch_known(&h->learnt, key, tick, &used) ? used : 0;
}

uint32_t lci_promise_left(const lci_handle *h, uint32_t ns, uint32_t group) {
    const lci_group_count *g = &h->root->group[group];
    int64_t tenant = (int64_t)lc_load(&h->ns[ns].minimum) - lc_load(&h->ns[ns].pages);
    int64_t layers = (int64_t)lc_load(&g->minimum) - lc_load(&g->pages);
    int64_t more = tenant > layers ? tenant : layers;
    return more > 0 ? (uint32_t)more : 0;
}

uint64_t lci_pass_by(lci_handle *h, lc_key key, uint64_t before, uint32_t hint, uint64_t tick) {
    uint64_t word = lch_named(&h->learnt, key, LC_NIL, before, hint, tick);
    lch_evicted(&h->learnt, key, word, tick);
    return word;
}

/* Pages that this namespace can get though none goes for them. */
static uint32_t spare(const lci_handle *h, uint32_t ns) {
    uint32_t quota = lc_load(&h->ns[ns].quota), pages = lc_load(&h->ns[ns].pages);
    uint32_t grown = lc_load(&h->root->grown), free = lci_available(h);
    uint32_t left = quota > pages ? quota - pages : 0;
    if (grown < h->page_count && !lci_no_memory_left(h)) free += h->page_count - grown;
    if (quota && free > left) free = left;
    uint32_t owed = lci_promise_left(h, ns, 0);
    return free > owed ? free : owed;
}

/* The rank of what goes first for this namespace: at its quota of its own. 0: nothing can go. */
static uint32_t price(const lci_handle *h, uint32_t ns, uint64_t tick) {
    lci_eviction e = {.since = tick, .by = ns + 1, .by_group = 1};
    uint32_t quota = lc_load(&h->ns[ns].quota);
    if (quota && lc_load(&h->ns[ns].pages) >= quota) return lci_lowest_of(h, &e, ns);
    return lci_lowest_rank(h, &e);
}

/* How many of the keys [start, n) are worth writing: those behind are not. `refused`: none is, as the
 * key before was not. All of them, where pages are not ranked. No lock; remembers what is not worth
 * it. */
LC_API int lci_worth(lci_handle *h, const lc_key *keys, uint32_t n, uint32_t start, lci_ns_ref ns,
                     uint32_t hint, uint32_t refused) {
    int rc = lci_usable(h);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    if (start > n) return LC_E_RANGE;
    if (!lci_ns_open(h, ns)) return LC_E_CLEARED;
    if (!h->ranks) return (int)(n - start);
    uint64_t tick = lci_next_tick(h), word = start ? lci_word_of(h, keys[start - 1], tick) : 0;
    uint64_t before = word;
    uint32_t free = refused ? 0 : spare(h, lci_ns_id(ns)), end = start;
    uint32_t least = refused ? UINT32_MAX : price(h, lci_ns_id(ns), tick), absent = 0;
    lc_found found;
    for (uint32_t i = start; i < n && !refused; i++) {
        lc_dict_find(&h->dict, keys[i].lo, keys[i].hi, &found);
        if (found.node != LC_NIL) word = lc_load(&h->pages[found.node].used);
        else word = lch_expected(&h->learnt, keys[i], word, hint, tick);
        bool written = found.node != LC_NIL || absent++ < free || lci_rank(h, word) >= least;
        if (!written) continue;
        end = i + 1; /* and so is what it hangs on */
        before = word;
    }
    for (uint32_t i = end; i < n; i++) {
        if (i + 8 < n) lch_prefetch(&h->learnt, keys[i + 8]);
        before = lci_pass_by(h, keys[i], before, hint, tick);
    }
    if (end < n) lci_learn_if_due(h, tick, LC_TRY, 0);
    return (int)(end - start);
}

/* Whether a page of this key went, and is remembered: 1 or 0. Nothing is, where pages are not ranked. */
LC_API int lci_remembers(lci_handle *h, const lc_key *key) {
    int rc = lci_usable(h);
    if (rc != LC_OK) return rc;
    uint64_t used;
    return h->ranks && lch_known(&h->learnt, *key, 0, &used);
}
