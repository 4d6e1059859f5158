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

/* ------------------------------------------------------------------ walking through keys */

typedef struct walk {
    lci_handle *h;
    lci_walk_op *op; /* how far it is */
    const lc_key *keys;
    uint32_t n, start, ns;
    bool keep, drops;
    lc_txn t;
    lci_eviction eviction; /* of a walk that drops */
} walk;

/* Where the batch ends that begins at the cursor. */
static uint32_t batch_end(const walk *w) {
    uint32_t at = w->op->cursor;
    return w->n - at < LCI_BATCH ? w->n : at + LCI_BATCH;
}

/* Batches of keys from `op->cursor` on, one step each, eight a hold of the lock. LC_E_BUSY, LC_E_INTR:
 * call again, it continues; what it has changed stays so. */
static int walk_keys(walk *w, void (*batch)(walk *), lci_ns_ref ref, uint32_t operation, int wait,
                     uint64_t deadline) {
    lci_handle *h = w->h;
    lci_walk_op *op = w->op;
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    if (w->start > w->n || op->cursor > w->n - w->start) return LC_E_RANGE;
    w->ns = lci_ns_id(ref);
    if (w->drops) w->eviction = (lci_eviction){.since = lci_next_tick(h), .cause = LCI_DROPPED};
    uint64_t begun = lcs_now_ns();
    while (!op->ended) {
        rc = lci_lock(h, &w->t, operation, wait, deadline);
        if (rc != LC_OK) return rc;
        /* What was published and not taken in yet cannot go before. */
        bool all = !w->drops || lci_collect(h, &w->t, 256) < 256;
        if (w->drops && lc_load(&h->root->ticket_used)) lci_settle_tickets(h, &w->t, 256);
        if (!lci_ns_open(h, ref)) op->ended = 1; /* nothing is found in it any more */
        for (uint32_t work = 0; work < LCI_HOLD && all && !op->ended && !w->t.error;) {
            batch(w);
            if (lci_give_way(h, work += LCI_BATCH)) break;
        }
        rc = lci_unlock(h, &w->t);
        if (rc == LC_OK && !op->ended) rc = lci_again(begun, wait, deadline);
        if (rc != LC_OK) return rc;
    }
    return LC_OK;
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

static void keep_batch(walk *w) {
    lc_txn *t = &w->t;
    uint32_t at = w->op->cursor, end = batch_end(w), changed = 0;
    bool usable = true;
    for (; at < end && !t->error; at++) {
        uint32_t page = page_of(w->h, &w->keys[at], w->ns, &usable);
        if (w->keep && !usable) break;
        if (usable) changed += w->keep ? keep_page(w->h, t, page) : unkeep_page(w->h, t, page);
    }
    lci_step(t);
    if (t->error) return;
    w->op->cursor = at;
    w->op->pages += changed;
    w->op->ended = at == w->n || (w->keep && !usable);
}

/* Keep the longest ready prefix for good (`keep`), or let go of those of the keys that are kept.
 * `op->cursor` says how long the prefix is, `op->pages` how many were changed. Continues: see
 * `walk_keys`. */
LC_API int lci_keep(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ref, int keep,
                    lci_walk_op *op, int wait, uint64_t deadline) {
    walk w = {.h = h, .op = op, .keys = keys, .n = n, .keep = keep};
    return walk_keys(&w, keep_batch, ref, LCI_OP_KEEP, wait, deadline);
}

/* ------------------------------------------------------------------ going first */

/* Ticks are lowered after the commit: a death before them leaves pages that stand first and were used
 * since, which their turn puts right; in the other order it would leave pages that stand later than
 * their ticks say. A page that is used meanwhile keeps its tick, for the same reason. */
static void first_batch(walk *w) {
    lci_handle *h = w->h;
    lci_walk_op *op = w->op;
    lci_page *changed[LCI_BATCH];
    uint64_t used[LCI_BATCH];
    uint32_t count = 0, at = op->cursor, end = batch_end(w);
    bool usable;
    if (at == 0) op->tick = h->ranks ? 0 : lci_queue_now(h); /* one for all: runs and prefixes go together */
    for (; at < end && !w->t.error; at++) {
        uint32_t page = page_of(h, &w->keys[at], w->ns, &usable);
        if (!usable) continue;
        lci_page *p = &h->pages[page];
        used[count] = lc_load(&p->used);
        if (used[count] >> LCI_TICK_SHIFT <= op->tick || lc_load(&p->word) & LCI_KEPT ||
            lci_pinned(h, p))
            continue;
        if (lci_queueable(h, page)) {
            lci_queue_remove(h, &w->t, page);
            lci_queue_first(h, &w->t, page, op->tick);
        }
        changed[count++] = p;
    }
    lci_step(&w->t);
    if (w->t.error) return;
    for (uint32_t i = 0; i < count; i++)
        atomic_compare_exchange_strong_explicit(
            &changed[i]->used, &used[i],
            op->tick << LCI_TICK_SHIFT | (used[i] & LCI_HITS_MASK), memory_order_relaxed,
            memory_order_relaxed);
    op->cursor = end;
    op->pages += count;
    op->ended = end == w->n;
}

/* Make the pages of these keys that are ready, not kept and not pinned the first to be evicted, as if
 * they had been used before all others, those of one call together. Their next use makes them ordinary
 * ones. `op->pages`: how many have changed. Continues: see `walk_keys`. */
LC_API int lci_evict_first(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ref,
                           lci_walk_op *op, int wait, uint64_t deadline) {
    walk w = {.h = h, .op = op, .keys = keys, .n = n};
    return walk_keys(&w, first_batch, ref, LCI_OP_EVICT, wait, deadline);
}

/* ------------------------------------------------------------------ letting a branch go */

/* From the last key that has a page upward. */
static void drop_batch(walk *w) {
    lci_handle *h = w->h;
    lci_walk_op *op = w->op;
    uint32_t marked[LCI_BATCH], n = 0, rest = w->n - w->start, passed = op->cursor;
    bool stop = false, usable;
    while (n < LCI_BATCH && passed < rest && passed - op->cursor < 256 && !w->t.error) {
        uint32_t page = page_of(h, &w->keys[w->n - 1 - passed], w->ns, &usable);
        if (page == LC_NIL && op->pages + n == 0) { /* gone before, as the end of a prefix does */
            passed++;
            continue;
        }
        stop = !usable || !lci_queueable(h, page) || lci_pinned(h, &h->pages[page]);
        if (stop) break;
        lci_evict_page(h, &w->t, &w->eviction, page);
        marked[n++] = page;
        passed++;
    }
    uint32_t freed = n ? lci_evict_settle(h, &w->t, &w->eviction, marked, n) : 0;
    lci_step(&w->t);
    if (w->t.error) return;
    op->cursor = passed;
    op->pages += freed;
    op->ended = stop || freed < n || passed == rest; /* one that stays keeps those above it */
}

/* Evict the branch of keys [start, n), its end first, up to the first page that cannot go. Keys at
 * the end that have no page are passed over. `op->pages`: how many went. Continues: see `walk_keys`. */
LC_API int lci_drop(lci_handle *h, const lc_key *keys, uint32_t n, uint32_t start, lci_ns_ref ref,
                    lci_walk_op *op, int wait, uint64_t deadline) {
    walk w = {.h = h, .op = op, .keys = keys, .n = n, .start = start, .drops = true};
    return walk_keys(&w, drop_batch, ref, LCI_OP_EVICT, wait, deadline);
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
