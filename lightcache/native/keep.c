/* What an engine decides itself about pages that have a key: to keep some for good, to let some go
 * first, or a branch at once; and which keys the pages have that it pins. */
#include "index.h"

/* The page that a key has; LC_NIL: none. `*usable`: it is READY, and of this namespace. */
static uint32_t page_of(const lci_handle *h, const lc_key *key, uint32_t ns, bool *usable) {
    uint32_t length, page = lc_dict_look(&h->dict, key->lo, key->hi, &length);
    *usable = false;
    if (page == LC_NIL) return LC_NIL;
    uint32_t word = lc_load_acquire(&h->pages[page].word);
    *usable = lci_state_of(word) == LCI_READY && lci_ns_of(word) == ns;
    return page;
}

/* ------------------------------------------------------------------ keeping */

/* A kept page is on no list. Its word has no other writer: publishing touches WRITING pages only.
 * Returns the pages changed. */
static uint32_t keep_page(lci_handle *h, lc_txn *t, uint32_t page) {
    lci_page *p = &h->pages[page];
    uint32_t word = lc_load(&p->word);
    if (word & LCI_KEPT) return 0;
    if (lci_queueable(h, page)) lci_queue_remove(h, t, page);
    lc_txn_set(t, &p->word, word | LCI_KEPT);
    lc_txn_add(t, &h->root->kept, 1);
    return 1;
}

static uint32_t unkeep_page(lci_handle *h, lc_txn *t, uint32_t page) {
    lci_page *p = &h->pages[page];
    uint32_t word = lc_load(&p->word);
    if (!(word & LCI_KEPT)) return 0;
    lc_txn_set(t, &p->word, word & ~LCI_KEPT);
    lc_txn_add(t, &h->root->kept, (uint32_t)-1);
    if (lci_queueable(h, page)) lci_queue_add(h, t, page);
    return 1;
}

/* One step: a batch of keys. */
static void keep_batch(lci_handle *h, lc_txn *t, const lc_key *keys, uint32_t n, uint32_t ns,
                       bool keep, lci_walk_op *op) {
    uint32_t at = op->cursor, end = n - at < LCI_BATCH ? n : at + LCI_BATCH, changed = 0;
    bool usable = true;
    for (; at < end && !t->error; at++) {
        uint32_t page = page_of(h, &keys[at], ns, &usable);
        if (keep && !usable) break;
        if (usable) changed += keep ? keep_page(h, t, page) : unkeep_page(h, t, page);
    }
    lci_step(t);
    if (t->error) return;
    op->cursor = at;
    op->pages += changed;
    op->ended = at == n || (keep && !usable);
}

/* Keep the longest ready prefix for good (`keep`), or let go of those of the keys that are kept.
 * `op->cursor` says how long the prefix is, `op->pages` how many were changed. LC_E_BUSY, LC_E_INTR:
 * call again, it continues. What an unfinished call has kept stays kept. */
LC_API int lci_keep(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ref, int keep,
                    lci_walk_op *op, int wait, uint64_t deadline) {
    lc_txn t;
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    if (op->cursor > n) return LC_E_RANGE;
    uint64_t begun = lcs_now_ns();
    while (!op->ended) {
        rc = lci_lock(h, &t, LCI_OP_KEEP, wait, deadline);
        if (rc != LC_OK) return rc;
        if (!lci_ns_open(h, ref)) op->ended = 1; /* nothing is found in it any more */
        for (int i = 0; i < 8 && !op->ended && !t.error; i++) {
            keep_batch(h, &t, keys, n, lci_ns_id(ref), keep, op);
            if (lcs_lock_wanted(h->at)) break;
        }
        rc = lci_unlock(h, &t);
        if (rc == LC_OK && !op->ended) rc = lci_again(begun, wait, deadline);
        if (rc != LC_OK) return rc;
    }
    return LC_OK;
}

/* ------------------------------------------------------------------ going first */

/* One step: a batch of keys. Ticks are lowered after the commit: a death before them leaves pages that
 * stand first and were used since, which their turn puts right; in the other order it would leave pages
 * that stand later than their ticks say. A page that is used meanwhile keeps its tick, for the same
 * reason. */
static void first_batch(lci_handle *h, lc_txn *t, const lc_key *keys, uint32_t n, uint32_t ns,
                        lci_walk_op *op) {
    lci_page *changed[LCI_BATCH];
    uint64_t used[LCI_BATCH];
    uint32_t count = 0, at = op->cursor, end = n - at < LCI_BATCH ? n : at + LCI_BATCH;
    bool usable;
    if (at == 0) op->tick = lci_queue_now(h); /* one for all: runs and prefixes go together */
    for (; at < end && !t->error; at++) {
        uint32_t page = page_of(h, &keys[at], ns, &usable);
        if (!usable) continue;
        lci_page *p = &h->pages[page];
        used[count] = lc_load(&p->used);
        if (used[count] >> LCI_TICK_SHIFT <= op->tick || lc_load(&p->word) & LCI_KEPT ||
            lci_pinned(h, p))
            continue;
        if (lci_queueable(h, page)) {
            lci_queue_remove(h, t, page);
            lci_queue_put(h, t, page, op->tick);
        }
        changed[count++] = p;
    }
    lci_step(t);
    if (t->error) return;
    for (uint32_t i = 0; i < count; i++)
        atomic_compare_exchange_strong_explicit(
            &changed[i]->used, &used[i],
            op->tick << LCI_TICK_SHIFT | (used[i] & LCI_HITS_MASK), memory_order_relaxed,
            memory_order_relaxed);
    op->cursor = end;
    op->pages += count;
    op->ended = end == n;
}

/* Make the pages of these keys that are ready, not kept and not pinned the first to be evicted, as if
 * they had been used before all others, those of one call together. Their next use makes them ordinary
 * ones. `op->pages`: how many have changed. LC_E_BUSY, LC_E_INTR: call again, it continues. */
LC_API int lci_evict_first(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ref,
                           lci_walk_op *op, int wait, uint64_t deadline) {
    lc_txn t;
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    if (op->cursor > n) return LC_E_RANGE;
    uint64_t begun = lcs_now_ns();
    while (!op->ended) {
        rc = lci_lock(h, &t, LCI_OP_EVICT, wait, deadline);
        if (rc != LC_OK) return rc;
        if (!lci_ns_open(h, ref)) op->ended = 1;
        for (int i = 0; i < 8 && !op->ended && !t.error; i++) {
            first_batch(h, &t, keys, n, lci_ns_id(ref), op);
            if (lcs_lock_wanted(h->at)) break;
        }
        rc = lci_unlock(h, &t);
        if (rc == LC_OK && !op->ended) rc = lci_again(begun, wait, deadline);
        if (rc != LC_OK) return rc;
    }
    return LC_OK;
}

/* ------------------------------------------------------------------ letting a branch go */

typedef struct drop {
    lci_handle *h;
    lci_walk_op *op;
    const lc_key *keys;
    uint32_t n, start, ns;
    lc_txn t;
    lci_eviction eviction;
} drop;

/* One step: a batch of pages, from the last key that has one upward. */
static void drop_batch(drop *d) {
    lci_handle *h = d->h;
    lci_walk_op *op = d->op;
    uint32_t marked[LCI_BATCH], n = 0, rest = d->n - d->start, passed = op->cursor;
    bool stop = false, usable;
    while (n < LCI_BATCH && passed < rest && passed - op->cursor < 256 && !d->t.error) {
        uint32_t page = page_of(h, &d->keys[d->n - 1 - passed], d->ns, &usable);
        if (page == LC_NIL && op->pages + n == 0) { /* gone before, as the end of a prefix does */
            passed++;
            continue;
        }
        stop = !usable || !lci_queueable(h, page) || lci_pinned(h, &h->pages[page]);
        if (stop) break;
        lci_evict_page(h, &d->t, &d->eviction, page);
        marked[n++] = page;
        passed++;
    }
    uint32_t freed = n ? lci_evict_settle(h, &d->t, &d->eviction, marked, n) : 0;
    lci_step(&d->t);
    if (d->t.error) return;
    op->cursor = passed;
    op->pages += freed;
    op->ended = stop || freed < n || passed == rest; /* one that stays keeps those above it */
}

/* Evict the branch of keys [start, n), its end first, up to the first page that cannot go. Keys at
 * the end that have no page are passed over. `op->pages`: how many went. LC_E_BUSY, LC_E_INTR: call
 * again, it continues. */
LC_API int lci_drop(lci_handle *h, const lc_key *keys, uint32_t n, uint32_t start, lci_ns_ref ref,
                    lci_walk_op *op, int wait, uint64_t deadline) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    if (start > n || op->cursor > n - start) return LC_E_RANGE;
    drop d = {.h = h, .op = op, .keys = keys, .n = n, .start = start, .ns = lci_ns_id(ref)};
    d.eviction = (lci_eviction){.since = lci_next_tick(h), .cause = LCI_DROPPED};
    uint64_t begun = lcs_now_ns();
    while (!op->ended) {
        rc = lci_lock(h, &d.t, LCI_OP_EVICT, wait, deadline);
        if (rc != LC_OK) return rc;
        /* What was published and not taken in yet cannot go before. */
        bool all = lci_collect(h, &d.t, 256) < 256;
        if (lc_load(&h->root->ticket_used)) lci_settle_tickets(h, &d.t, 256);
        if (!lci_ns_open(h, ref)) op->ended = 1;
        for (int i = 0; i < 8 && all && !op->ended && !d.t.error; i++) {
            drop_batch(&d);
            if (lcs_lock_wanted(h->at)) break;
        }
        rc = lci_unlock(h, &d.t);
        if (rc == LC_OK && !op->ended) rc = lci_again(begun, wait, deadline);
        if (rc != LC_OK) return rc;
    }
    return LC_OK;
}

/* ------------------------------------------------------------------ keys of pages */

static int key_of(const lci_handle *h, uint32_t page, lc_key *key, uint32_t *gen) {
    const lci_page *p = &h->pages[page];
    *gen = lc_load_acquire(&p->gen);
    *key = (lc_key){.lo = lc_load(&p->lo), .hi = lc_load(&p->hi)};
    uint32_t word = lc_load_acquire(&p->word);
    atomic_thread_fence(memory_order_acquire);
    bool same = !(*gen & 1) && lc_load(&p->gen) == *gen;
    return same && lci_state_of(word) == LCI_READY ? LC_OK : LC_E_STALE;
}

/* The keys and generations of pages that we pin and that are READY; either may be NULL. No lock. `*bad`
 * is the position of the first that is not: LC_E_RANGE no page, LC_E_OWNER not pinned by us, LC_E_STALE
 * without a key. */
LC_API int lci_keys_of(lci_handle *h, const int32_t *pages, uint32_t n, lc_key *keys, uint32_t *gens,
                       uint32_t *bad) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t page = (uint32_t)pages[i], gen;
        lc_key key;
        *bad = i;
        if (page >= h->page_count) return LC_E_RANGE;
        if (!lc_load(&h->mine[page])) return LC_E_OWNER;
        rc = key_of(h, page, &key, &gen);
        if (rc != LC_OK) return rc;
        if (keys) keys[i] = key;
        if (gens) gens[i] = gen;
    }
    return LC_OK;
}
