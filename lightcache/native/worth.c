/* Is a page worth writing? Only if what goes for it ranks no higher.
 *
 * A call that reserves answers it for each page, with what would go for it (reserve.c). Ranks that write
 * together have to agree, so one client asks for all of them before they reserve: without the lock, from
 * what could go then (supply.c). What is not written is remembered like what went, else it would never
 * be worth more when it is asked for again. */
#include "index.h"

static uint32_t page_of(const lci_handle *h, lc_key key) {
    lc_found found;
    lc_dict_find(&h->dict, key.lo, key.hi, &found);
    return found.node;
}

uint64_t lci_word_of(const lci_handle *h, lc_key key, uint64_t tick) {
    uint64_t used;
    uint32_t page = page_of(h, key);
    if (page != LC_NIL) return lc_load(&h->pages[page].used);
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

/* What each page costs that is made when nothing is spare: the rank of the one that goes for it. */
typedef struct prices {
    lci_supply supply;
    bool known;
    uint32_t rank, pages; /* so many could go at this rank or a lower one */
} prices;

/* At its quota a namespace pays with its own. `own`: see lci_supply. */
static void ask_prices(const lci_handle *h, prices *p, uint32_t ns, uint64_t tick, uint32_t own,
                       uint32_t want) {
    lci_eviction e = {.since = tick, .by = ns + 1, .by_group = 1};
    uint32_t quota = lc_load(&h->ns[ns].quota);
    bool at_quota = quota && lc_load(&h->ns[ns].pages) >= quota;
    if (at_quota) lci_supply_of(h, &e, own, ns, &p->supply);
    else lci_supply_of_pool(h, &e, own, want, &p->supply);
    p->known = true;
    p->rank = 0;
    p->pages = p->supply.pages[0];
}

/* Of the k-th page. Where fewer can go, of the last of them: 0 if none can. */
static uint32_t price(prices *p, uint32_t k) {
    while (p->pages < k && p->rank < p->supply.highest) p->pages += p->supply.pages[++p->rank];
    return p->rank;
}

/* One past the last key of [start, n) that is worth a page: those before it are, as it hangs on them.
 * `*before`: the word of the key before `start`, then of the last one that is worth it. */
static uint32_t weigh(lci_handle *h, const lc_key *keys, uint32_t n, uint32_t start, uint32_t ns,
                      uint32_t hint, uint64_t tick, uint64_t *before) {
    uint64_t word = *before;
    uint32_t own = start ? page_of(h, keys[start - 1]) : LC_NIL, free = spare(h, ns), absent = 0, end = start;
    prices asked = {.known = false};
    for (uint32_t i = start; i < n; i++) {
        uint32_t page = page_of(h, keys[i]);
        if (page != LC_NIL) {
            own = page;
            word = lc_load(&h->pages[page].used);
        } else {
            word = lch_expected(&h->learnt, keys[i], word, hint, tick);
            absent++;
            if (absent > free && !asked.known) ask_prices(h, &asked, ns, tick, own, n - i);
            if (absent > free && lci_rank(h, word) < price(&asked, absent - free)) continue;
        }
        end = i + 1;
        *before = word;
    }
    return end;
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
    uint64_t tick = lci_next_tick(h), before = start ? lci_word_of(h, keys[start - 1], tick) : 0;
    uint32_t end = start;
    if (!refused) end = weigh(h, keys, n, start, lci_ns_id(ns), hint, tick, &before);
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
