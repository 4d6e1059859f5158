/* Eviction: pages leave from the leaves upward (independent ones in the order of their last use), and
 * only without pins. */
#include "index.h"

/* Marked pages leave the counts of their namespace and group, those of a row in one store. */
static void count_gone(lci_handle *h, lc_txn *t, lci_eviction *e) {
    if (e->gone) lci_count_named(h, t, e->gone_kind, -e->gone);
    e->gone = 0;
}

/* A page on its way out: off the queue, off its parent and the counts of its namespace and group
 * (`count_gone`), EVICTING. Its word has no other writer (publishing touches WRITING pages only), so a plain
 * store will do. Returns its parent. */
static uint32_t mark(lci_handle *h, lc_txn *t, lci_eviction *e, uint32_t page) {
    lci_page *p = &h->pages[page];
    uint32_t parent = lci_parent(h, p);
    if (parent != LC_NIL) lc_txn_add(t, &h->pages[parent].children, (uint32_t)-1);
    uint32_t kind = lc_load(&p->word) & LCI_KIND;
    if (e->gone && (kind ^ e->gone_kind) & LCI_COUNTED) count_gone(h, t, e);
    e->gone_kind = kind;
    e->gone++;
    LC_PAUSE(LC_AT_EVICT_CHOSEN);
    lc_txn_set(t, &p->word, LCI_EVICTING | kind);
    lc_prefetch_write((const void *)&h->dict.buckets[lc_bucket(&h->dict, lc_load(&p->lo))]);
    if (h->ranks) lch_prefetch(&h->learnt, lci_key_of(p));
    return parent;
}

/* Going up a prefix is one cache miss after another, each telling where the next is. A page that
 * something hangs on is on no list, so its link `queue.prev` is free for a hint: an ancestor some
 * steps up, as far as the prefix was reserved in one call. It may say anything (the page was on a
 * list since): it is only asked for, never believed. */
static void prefetch_ancestor(const lci_handle *h, lci_eviction *e, const lci_page *p) {
    uint32_t far = lc_load(&p->queue.prev), at = e->asked++ % LCI_ASKED_FOR, near = e->ahead[at];
    e->ahead[at] = far;
    if (near < h->page_count) { /* its record has come by now: the counts that its bits lead to */
        uint64_t bits = lc_load(&h->pages[near].pins);
        for (int i = 0; bits && i < 4; i++, bits &= bits - 1)
            __builtin_prefetch((const void *)lci_pin(h, (uint32_t)__builtin_ctzll(bits), near));
    }
    if (far >= h->page_count) return;
    lc_prefetch_write(&h->pages[far]);
    lc_prefetch_write((const void *)lci_pin(h, h->at->slot, far));
}

/* This call does not meet it again. Stored outright: `lci_touch` would leave a tick that is far ahead, by
 * which the page was not used since. Of pages that are discarded the word says whether they were used since
 * they were listed. */
static void used_now(const lci_handle *h, const lci_eviction *e, lci_page *p) {
    uint64_t used = lc_load(&p->used);
    if (h->ranks && e->cause == LCI_DISCARDED) return;
    if (lci_used_since(h, used >> LCI_TICK_SHIFT, e->since)) return;
    lc_store(&p->used, e->since << LCI_TICK_SHIFT | (used & LCI_HITS_MASK));
}

/* A client pinned it while we marked it: as it was before, and used just now. */
static void unmark(lci_handle *h, lc_txn *t, lci_eviction *e, uint32_t page) {
    lci_page *p = &h->pages[page];
    uint32_t parent = lci_parent(h, p);
    uint32_t kind = lc_load(&p->word) & LCI_KIND;
    lc_txn_set(t, &p->word, LCI_READY | kind);
    lci_count_named(h, t, kind, 1);
    if (parent != LC_NIL) lci_child_comes(h, t, parent);
    used_now(h, e, p);
    if (lci_covered(p)) return;
    if (h->ranks) lci_queue_defer(h, t, e, page);
    else lci_queue_add(h, t, page);
}

/* Out of their chains, and free. */
static void finish(lci_handle *h, lc_txn *t, const lci_eviction *e, const uint32_t *pages,
                   uint32_t n) {
    const lc_dict *d = &h->dict;
    if (LC_UNLIKELY(h->ranks != NULL)) lci_ranked_remember(h, e, pages, n);
    for (uint32_t i = 0; i < n; i++) { /* the buckets were asked for when the pages were marked */
        uint32_t head = lc_load(&d->buckets[lc_bucket(d, lc_load(&h->pages[pages[i]].lo))]);
        if (head < d->nodes) lc_prefetch_write(lc_node_at(d, head));
    }
    for (uint32_t i = 0; i < n; i++) {
        lc_dict_unlink(t, &h->dict, pages[i]);
        LC_PAUSE(LC_AT_EVICT_UNLINKED);
        /* Not logged again: marking it has logged, in this step, the word that undoing puts back. */
        lc_store_release(&h->pages[pages[i]].word, LCI_FREE);
    }
    if (n) lc_txn_add(t, &h->root->named, -n);
    lci_give_free(h, t, pages, n);
}

/* The parent of a page just marked, if it goes next anyway (`lci_follows`) and nothing else hangs on it: that
 * saves a whole prompt's way through the queue. Else it is queued. An independent one is there already, and
 * waits for its own turn.
 *
 * A parent was used when what hangs on it was, though a lookup of the rest of a prompt did not name it.
 * No lookup has to go up the prefix for that: while a page has children it is in no queue, so its tick
 * is asked for only here, when a child goes, and takes over the child's. */
static uint32_t follow(lci_handle *h, lc_txn *t, const lci_eviction *e, uint32_t page,
                       uint32_t parent, bool run) {
    lci_page *p = &h->pages[page];
    if (parent == LC_NIL) return LC_NIL;
    lci_page *q = &h->pages[parent];
    if (lc_load(&q->word) & LCI_INDEPENDENT) return LC_NIL;
    bool listed = h->ranks && e->cause == LCI_DISCARDED; /* its word says whether it was used since */
    if (!listed) lci_touch(q, lci_tick(p), 0);
    if (!lci_queueable(h, parent)) return LC_NIL;
    if (run && lci_follows(h, e, page, parent) && !lci_promised(h, e, parent) && !lci_pinned(h, q))
        return parent;
    lci_queue_add(h, t, parent);
    return LC_NIL;
}

void lci_evict_page(lci_handle *h, lc_txn *t, lci_eviction *e, uint32_t page) {
    lci_queue_remove(h, t, page);
    follow(h, t, e, page, mark(h, t, e, page), false);
}

/* A chosen page and those before it that were last used with it: `most` of them in all, but of a run
 * as far as a batch has room, for what is left of it is of no use. Returns how many are marked then. */
static uint32_t evict_with(lci_handle *h, lc_txn *t, lci_eviction *e, uint32_t page,
                           uint32_t *marked, uint32_t n, uint32_t most) {
    if (lc_load(&h->pages[page].word) & LCI_GROUP_MASK) most = LCI_BATCH;
    lci_queue_remove(h, t, page);
    while (page != LC_NIL) {
        marked[n++] = page;
        uint32_t parent = mark(h, t, e, page);
        page = follow(h, t, e, page, parent, n < most);
    }
    return n;
}

uint32_t lci_evict_settle(lci_handle *h, lc_txn *t, lci_eviction *e, uint32_t *marked, uint32_t n) {
    uint32_t freed = 0;
    count_gone(h, t, e);
    LC_PAUSE(LC_AT_EVICT_MARKED);
    /* Pairs with the one in match_one. */
    atomic_thread_fence(memory_order_seq_cst); /* order: evict-fence */
    LC_PAUSE(LC_AT_EVICT_FENCED);
    for (uint32_t i = 0; i < n && !t->error; i++) {
        lci_page *p = &h->pages[marked[i]];
        /* In order from the leaf: one that stays has become a child of the next again. An independent
         * one may be the child of one that goes: then it has no parent from now on. */
        if (lci_covered(p) || lci_pinned(h, p)) {
            unmark(h, t, e, marked[i]);
        } else {
            marked[freed++] = marked[i];
        }
    }
    finish(h, t, e, marked, freed);
    if (freed) lc_raise(&lcs_client_of(h->at, h->at->slot)->evicted_pages, freed);
    lci_count_evicted(h, e->cause, freed);
    return freed;
}

uint32_t lci_evict(lci_handle *h, lc_txn *t, lci_eviction *e, uint32_t want) {
    uint32_t marked[LCI_BATCH], n = 0, steps = 256, page = LC_NIL;
    if (want > LCI_BATCH) want = LCI_BATCH;
    lci_queue_begin(h, t, e, want);
    while (n < want && !t->error) {
        if (page == LC_NIL) page = lci_queue_pop(h, t, e, &steps);
        if (page == LC_NIL) break;
        marked[n++] = page;
        prefetch_ancestor(h, e, &h->pages[page]);
        uint32_t parent = mark(h, t, e, page);
        page = follow(h, t, e, page, parent, n < want);
    }
    return n ? lci_evict_settle(h, t, e, marked, n) : 0;
}

/* May go now, for whom room is made, and was not used by that call. */
static bool may_go(const lci_handle *h, const lci_eviction *e, uint32_t page) {
    return lci_queueable(h, page) && lci_free_to_go(h, e, page);
}

/* A page, and what tells when it goes: the lower rank first (LRU: all are 0), then the older. */
typedef struct candidate {
    uint32_t page, rank;
    uint64_t tick;
} candidate;

static candidate candidate_of(const lci_handle *h, uint32_t page) {
    uint64_t used = lc_load(&h->pages[page].used);
    return (candidate){page, h->ranks ? lci_rank(h, used) : 0, used >> LCI_TICK_SHIFT};
}

static bool goes_before(const candidate *c, const candidate *other) {
    return c->rank != other->rank ? c->rank < other->rank : c->tick < other->tick;
}

/* The one of the chosen that goes last, to make way for one that goes before it. */
static uint32_t last_to_go(const candidate *chosen, uint32_t n) {
    uint32_t at = 0;
    for (uint32_t i = 1; i < n; i++)
        if (goes_before(&chosen[at], &chosen[i])) at = i;
    return at;
}

/* The oldest evictable pages among the next LCI_WINDOW records, of those whose word has these bits
 * (`mask`): of a namespace, or of a group. */
static uint32_t choose(const lci_handle *h, lci_eviction *e, candidate *out, uint32_t want,
                       uint32_t mask, uint32_t bits, uint32_t *hand) {
    uint32_t n = 0, at = *hand, end = lc_load(&h->root->fresh);
    bool spares = false;
    if (end > h->page_count) end = h->page_count;
    for (uint32_t i = 0; i < LCI_WINDOW && i < end; i++, at++) {
        if (at >= end) at = 0;
        if ((lc_load(&h->pages[at].word) & mask) != bits || !may_go(h, e, at)) continue;
        candidate here = candidate_of(h, at);
        if (LC_UNLIKELY(e->spared) && here.rank >= e->spared) {
            spares = true;
            continue;
        }
        if (n < want) {
            out[n++] = here;
            continue;
        }
        uint32_t last = last_to_go(out, n);
        if (goes_before(&here, &out[last])) out[last] = here;
    }
    *hand = at;
    e->outbid = spares && !n;
    return n;
}

/* The oldest of what was chosen first, until as many are marked as are wanted. */
static uint32_t evict_chosen(lci_handle *h, lc_txn *t, lci_eviction *e, candidate *chosen,
                             uint32_t n, uint32_t want) {
    uint32_t marked[LCI_BATCH], done = 0;
    while (n > 0 && done < want && !t->error) {
        uint32_t first = 0;
        for (uint32_t i = 1; i < n; i++)
            if (goes_before(&chosen[i], &chosen[first])) first = i;
        done = evict_with(h, t, e, chosen[first].page, marked, done, want);
        chosen[first] = chosen[--n];
    }
    return done ? lci_evict_settle(h, t, e, marked, done) : 0;
}

/* Free pages of one namespace: what a tenant over its quota pays with. Looks at LCI_WINDOW records
 * and takes the oldest that may go, so it is LRU in small pools and sampled LRU in large ones (the
 * idea is Redis's). The next call continues after these records. */
uint32_t lci_evict_namespace(lci_handle *h, lc_txn *t, lci_eviction *e, uint32_t want,
                             uint32_t ns) {
    candidate chosen[LCI_BATCH];
    uint32_t hand = lc_load(&h->ns[ns].hand);
    if (want > LCI_BATCH) want = LCI_BATCH;
    uint32_t n = choose(h, e, chosen, want, LCI_NS_MASK, ns << LCI_NS_SHIFT, &hand);
    lc_store(&h->ns[ns].hand, hand);
    return evict_chosen(h, t, e, chosen, n, want);
}

/* A batch of one group, from the record `op->cursor` on. */
static void evict_some(lci_handle *h, lc_txn *t, lci_eviction *e, uint32_t want, uint32_t number,
                       lci_walk_op *op) {
    candidate chosen[LCI_BATCH];
    uint32_t hand = op->cursor;
    if (want > LCI_BATCH) want = LCI_BATCH;
    uint32_t n = choose(h, e, chosen, want, LCI_GROUP_MASK | LCI_STATE_MASK,
                        number << LCI_GROUP_SHIFT | LCI_READY, &hand);
    uint32_t freed = evict_chosen(h, t, e, chosen, n, want);
    lci_step(t);
    if (t->error) return;
    op->pages += freed;
    if (freed < want) op->cursor += LCI_WINDOW; /* else there may be more */
    if (op->cursor < lc_load(&h->root->fresh) || op->ended == op->pages) return;
    op->cursor = 0; /* what hung on others may go now */
    op->ended = op->pages;
}

/* Free up to `want` pages of a group, and with the last part of a run those before it: a few more. Looks
 * at LCI_WINDOW records at a time and takes the oldest of these, until none may go any more
 * (`op->ended`: freed when the walk through all of them began). LC_E_BUSY, LC_E_INTR: call again with
 * the same `op`, zeroed before. */
LC_API int lci_evict_group(lci_handle *h, uint32_t number, uint32_t want, lci_walk_op *op, int wait,
                           uint64_t deadline) {
    lc_txn t;
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    if (number >= LCI_NUMBERS) return LC_E_RANGE;
    lci_eviction e = {.since = lci_next_tick(h), .by_group = number + 1};
    while (op->pages < want && op->cursor < lc_load(&h->root->fresh)) {
        rc = lci_lock(h, &t, LCI_OP_EVICT, wait, deadline);
        if (rc != LC_OK) return rc;
        lci_collect(h, &t, 256);
        if (lc_load(&h->root->ticket_used)) lci_settle_tickets(h, &t, 256);
        for (int i = 0; i < 8 && op->pages < want && !t.error; i++) {
            evict_some(h, &t, &e, want - op->pages, number, op);
            if (lci_give_way(h, (uint32_t)(i + 1) * LCI_BATCH)) break;
        }
        rc = lci_unlock(h, &t);
        if (rc != LC_OK) return rc;
    }
    return LC_OK;
}

/* A chain at its bound: make room in it by one page that may go. */
bool lci_evict_from_chain(lci_handle *h, lc_txn *t, lci_eviction *e, uint64_t key_lo) {
    uint32_t at = lc_load(&h->dict.buckets[lc_bucket(&h->dict, key_lo)]);
    e->cause = LCI_FOR_ROOM;
    for (int hops = 0; hops <= LC_CHAIN_MAX && at < h->page_count; hops++) {
        if (may_go(h, e, at)) {
            lci_evict_page(h, t, e, at);
            return lci_evict_settle(h, t, e, &at, 1) == 1;
        }
        at = lc_load(&h->pages[at].next);
    }
    return false;
}

/* Pages that this handle has evicted since the last such call, by cause. No lock: what others count
 * meanwhile is in the next one. */
LC_API int lci_take_evicted(lci_handle *h, uint64_t *pages) {
    for (int cause = 0; cause < LCI_CAUSES; cause++)
        pages[cause] = atomic_exchange_explicit(&h->evicted[cause], 0, memory_order_relaxed);
    return LC_OK;
}
