/* repair: rebuild everything derived (chains, queue, free stack, doomed list, children, counts)
 * from the truth (page words and keys, page lists of reservations and tickets).
 *
 * Runs under the lock in one piece, without the log: `repairing` says that it has begun, and
 * the next holder of the lock starts it again. Chains that hold what they should are not touched,
 * so lookups in a sound index notice nothing. */
#include "repair.h"

#include <stdlib.h>

static bool named_word(uint32_t word) {
    uint32_t state = lci_state_of(word);
    return state == LCI_WRITING || state == LCI_READY;
}

/* A page that no lookup may find any more; its bytes stay as long as it has pins. */
static void doom(lci_page *p, uint32_t state) {
    lc_store(&p->word, LCI_DOOMED | (state == LCI_WRITING ? LCI_UNWRITTEN : 0));
}

/* The reservation that a page's word names must list it, and be of its namespace. */
static void settle_reserved(const builder *b, uint32_t page, uint32_t word) {
    const lci_handle *h = b->h;
    lci_page *p = &h->pages[page];
    uint32_t state = lci_state_of(word), rid = lci_res_of(word);
    uint32_t ready = LCI_READY | (word & (LCI_KIND | LCI_KEPT));
    const lci_reservation *r = rid && rid <= h->res_count ? &h->res[rid - 1] : NULL;
    bool listed = r && b->listed[page] == rid;
    bool over = !r || lc_load(&r->state) == LCI_RES_FREE || lci_complete(r);
    if (state == LCI_READY && !listed && over) lc_store(&p->word, ready);
    else if (!listed || lci_ns_of(word) != lci_ns_id(lc_load(&r->ns))) doom(p, state);
    else if (state == LCI_READY && !over)
        lc_store(&p->word, (word & ~LCI_KEPT) ^ (LCI_READY ^ LCI_WRITING));
}

/* A page without a key stays with the client that its word names, while that client pins it. Else
 * other clients may still read or write it. */
static void settle_held(const lci_handle *h, uint32_t page, uint32_t word) {
    lci_page *p = &h->pages[page];
    uint32_t slot = lci_ns_of(word);
    bool taken = slot && slot < LCS_SLOTS &&
                 lc_load_acquire(&lcs_client_of(h->at, slot)->state) == LCS_CLIENT_TAKEN;
    if (taken && lc_load(lci_pin(h, slot, page)))
        lc_store(&p->word, lci_held_word(slot));
    else
        lc_store(&p->word, lci_pinned(h, p) ? LCI_DOOMED | LCI_UNWRITTEN : LCI_FREE);
}

/* A page's word, made sound: EVICTING goes back; nonsense, and what could be reached with an odd
 * generation, becomes free, or doomed while it has pins. */
static void settle_page(const builder *b, uint32_t page) {
    const lci_handle *h = b->h;
    lci_page *p = &h->pages[page];
    uint32_t word = lc_load(&p->word), state = lci_state_of(word);
    uint64_t clock = lc_load(&h->root->clock) & LCI_TICK_MAX;
    uint32_t named = LCI_INDEPENDENT | LCI_GROUP_MASK;
    uint32_t stray = named_word(word) ? LCI_KEPT : LCI_KEPT | named; /* not READY's */
    if (lci_ahead(h, clock, lci_tick(p))) /* its hits stay */
        lc_store(&p->used, clock << LCI_TICK_SHIFT | (lc_load(&p->used) & LCI_HITS_MASK));
    if (state == LCI_EVICTING) lc_store(&p->word, word = LCI_READY | (word & LCI_KIND));
    else if (state != LCI_READY && word & stray) lc_store(&p->word, word &= ~stray);
    if (lc_load(&p->gen) & 1) state = LCI_FREE; /* its next use makes it even */
    uint32_t open = lc_load(&h->ns[lci_ns_of(word)].state);
    if (state == LCI_HELD) {
        settle_held(h, page, word);
    } else if (state == LCI_FREE || state > LCI_HELD) {
        lc_store(&p->word, lci_pinned(h, p) ? LCI_DOOMED | LCI_UNWRITTEN : LCI_FREE);
    } else if (named_word(word) && open != LCI_NS_NORMAL && open != LCI_NS_CLEARING) {
        doom(p, state);
    } else if (state == LCI_WRITING || (state == LCI_READY && lci_res_of(word))) {
        settle_reserved(b, page, word);
    }
}

/* Into the private chain; a second page with the same key is doomed. */
static void collect_page(builder *b, uint32_t page) {
    lci_page *p = &b->h->pages[page];
    uint32_t bucket = lc_bucket(&b->h->dict, lc_load(&p->lo)), length = 0;
    for (uint32_t at = b->head[bucket]; at != LC_NIL; at = b->next[at], length++) {
        const lci_page *q = &b->h->pages[at];
        if ((lc_load(&q->lo) == lc_load(&p->lo) && lc_load(&q->hi) == lc_load(&p->hi)) ||
            length + 1 >= LC_CHAIN_MAX) {
            doom(p, lci_state_of(lc_load(&p->word)));
            return;
        }
    }
    b->next[page] = b->head[bucket];
    b->head[bucket] = page;
}

static void rebuild_chain(builder *b, uint32_t bucket) {
    lci_handle *h = b->h;
    uint32_t wanted = 0, found = 0, hops = 0;
    for (uint32_t at = b->head[bucket]; at != LC_NIL; at = b->next[at], wanted++) b->mark[at] = 1;
    uint32_t at = lc_load(&h->dict.buckets[bucket]);
    for (; at < h->page_count && b->mark[at] && hops <= LC_CHAIN_MAX; hops++) {
        b->mark[at] = 0;
        found++;
        at = lc_load(&h->pages[at].next);
    }
    for (uint32_t m = b->head[bucket]; m != LC_NIL; m = b->next[m]) b->mark[m] = 0;
    if (found == wanted && at == LC_NIL) return;
    for (uint32_t m = b->head[bucket]; m != LC_NIL; m = b->next[m])
        lc_store_release(&h->pages[m].next, b->next[m]);
    lc_store_release(&h->dict.buckets[bucket], b->head[bucket]);
}

/* How far pages have been used: whatever had a key, unless only its generation says so. One that is
 * pinned is in a client's hands, also if a forged log says that it was never handed out. The memory of
 * these is there; of the others it is unknown once the mark is nonsense, so it is given again. */
static uint32_t settle_marks(lci_handle *h) {
    lci_root *r = h->root;
    uint32_t said = lc_load(&r->fresh), grown = lc_load(&r->grown), fresh = 0;
    if (said > h->page_count) said = 0;
    if (grown > h->page_count) grown = 0;
    for (uint32_t page = 0; page < h->page_count; page++) {
        const lci_page *p = &h->pages[page];
        bool said_so = page < said || page < grown || lc_load(&p->word);
        if (lc_load(&p->gen) && (said_so || lci_pinned(h, p))) fresh = page + 1;
    }
    for (uint32_t page = fresh; page < h->page_count; page++)
        lc_store(&h->pages[page].word, LCI_FREE);
    lc_store(&r->fresh, fresh);
    lc_store(&r->grown, grown < fresh ? fresh : grown);
    lc_store(&r->clock, lc_load(&r->clock) & LCI_TICK_MAX);
    return fresh;
}

static void clear_totals(lci_handle *h) {
    lci_root *r = h->root;
    lc_lists_format(&h->lists);
    for (int i = 0; i < LCI_LEVELS * 2; i++) lc_store(&r->occupied[i], 0);
    if (h->ranks) lci_ranks_clear(h);
    lc_store(&r->free_head, LC_NIL);
    lc_store(&r->free_count, 0);
    lc_store(&r->named, 0);
    lc_store(&r->writing, 0);
    lc_store(&r->doomed, 0);
    lc_store(&r->held, 0);
    lc_store(&r->queued, 0);
    lc_store(&r->kept, 0);
    for (int i = 0; i < LCI_NUMBERS; i++) lc_store(&r->group[i].pages, 0);
    for (uint32_t p = 0; p < h->page_count; p++) lc_store(&h->pages[p].children, 0);
}

static void append(lci_handle *h, uint32_t page, uint32_t list) {
    uint32_t head = lc_list_head(&h->lists, list);
    lc_link *end = &h->lists.heads[list], *self = lc_link_at(&h->lists, page);
    uint32_t last = lc_load(&end->prev);
    lc_store(&self->prev, last);
    lc_store(&self->next, head);
    lc_link *left = lc_link_at(&h->lists, last);
    if (left) lc_store(&left->next, page);
    lc_store(&end->prev, page);
}

static void count_page(lci_handle *h, uint32_t page) {
    lci_root *r = h->root;
    lci_page *p = &h->pages[page];
    uint32_t word = lc_load(&p->word), state = lci_state_of(word);
    if (named_word(word)) {
        lc_store(&r->named, lc_load(&r->named) + 1);
        if (lci_res_of(word)) lc_store(&r->writing, lc_load(&r->writing) + 1);
        if (word & LCI_KEPT) lc_store(&r->kept, lc_load(&r->kept) + 1);
        _Atomic uint32_t *tenant = &h->ns[lci_ns_of(word)].pages;
        _Atomic uint32_t *group = &r->group[lci_group_of(word)].pages;
        lc_store(tenant, lc_load(tenant) + 1);
        lc_store(group, lc_load(group) + 1);
        uint32_t parent = lci_parent(h, p);
        if (parent != LC_NIL && lci_may_hang(h, parent, word))
            lc_store(&h->pages[parent].children, lc_load(&h->pages[parent].children) + 1);
        else
            lc_store(&p->parent, LC_NIL);
    } else if (state == LCI_DOOMED) {
        append(h, page, LCI_DOOMED_LIST);
        lc_store(&r->doomed, lc_load(&r->doomed) + 1);
    } else if (state == LCI_HELD) {
        lc_store(&r->held, lc_load(&r->held) + 1);
    } else {
        lc_store(&p->queue.next, lc_load(&r->free_head));
        lc_store(&r->free_head, page);
        lc_store(&r->free_count, lc_load(&r->free_count) + 1);
    }
}

/* Pages that hang on each other in a circle would never be evicted: each loses its parent. From the
 * leaves up all others are reached; `next` counts the children not yet reached. */
static void break_circles(builder *b, uint32_t fresh) {
    lci_handle *h = b->h;
    for (uint32_t p = 0; p < fresh; p++) {
        b->next[p] = lc_load(&h->pages[p].children);
        b->mark[p] = named_word(lc_load(&h->pages[p].word));
    }
    for (uint32_t p = 0; p < fresh; p++)
        for (uint32_t at = p; at != LC_NIL && b->mark[at] && b->next[at] == 0;) {
            b->mark[at] = 0;
            at = lci_parent(h, &h->pages[at]);
            if (at != LC_NIL) b->next[at]--;
        }
    for (uint32_t p = 0; p < fresh; p++) {
        if (!b->mark[p]) continue;
        uint32_t parent = lci_parent(h, &h->pages[p]);
        if (parent == LC_NIL) continue;
        lc_store(&h->pages[parent].children, lc_load(&h->pages[parent].children) - 1);
        lc_store(&h->pages[p].parent, LC_NIL);
    }
}

static void enqueue(lci_handle *h, uint32_t page) {
    uint32_t list = lci_queue_list(h, page);
    append(h, page, list);
    if (h->ranks) {
        lci_ranks_occupy(h, list);
    } else {
        _Atomic uint32_t *word = &h->root->occupied[list / 32];
        lc_store(word, lc_load(word) | UINT32_C(1) << (list % 32));
    }
    lc_store(&h->root->queued, lc_load(&h->root->queued) + 1);
}

/* The present of the wheel becomes the oldest tick: every page finds its exact place. */
static void rebuild_queue(lci_handle *h, uint32_t fresh) {
    uint64_t oldest = lc_load(&h->root->clock);
    for (uint32_t p = 0; p < fresh; p++)
        if (lci_queueable(h, p) && lci_tick(&h->pages[p]) < oldest) oldest = lci_tick(&h->pages[p]);
    lc_store(&h->root->now[0], (uint32_t)oldest);
    lc_store(&h->root->now[1], (uint32_t)(oldest >> 32));
    for (uint32_t p = 0; p < fresh; p++)
        if (lci_queueable(h, p)) enqueue(h, p);
}

static void rebuild(builder *b) {
    lci_handle *h = b->h;
    uint32_t fresh = b->fresh = settle_marks(h);
    clear_totals(h);
    lci_rebuild_records(b);
    lci_rebuild_rows(b);
    for (uint32_t p = 0; p < fresh; p++) settle_page(b, p);
    for (uint32_t p = 0; p < fresh; p++)
        if (named_word(lc_load(&h->pages[p].word))) collect_page(b, p);
    for (uint32_t i = 0; i <= h->dict.mask; i++) rebuild_chain(b, i);
    for (uint32_t p = 0; p < fresh; p++) count_page(h, p);
    break_circles(b, fresh);
    rebuild_queue(h, fresh);
}

int lci_rebuild(lci_handle *h) {
    uint64_t buckets = (uint64_t)h->dict.mask + 1;
    builder b = {.h = h};
    b.head = malloc(buckets * 4);
    b.next = malloc((uint64_t)h->page_count * 4);
    b.mark = calloc(h->page_count, 1);
    b.chunk_mark = calloc(h->chunk_count, 1);
    b.listed = calloc(h->page_count, 4);
    int rc = b.head && b.next && b.mark && b.chunk_mark && b.listed ? LC_OK : LC_E_FULL;
    if (rc == LC_OK) {
        memset(b.head, 0xff, buckets * 4);
        lc_store_release(&h->root->repairing, 1);
        lc_kill_fence();
        rebuild(&b);
        lc_kill_fence();
        lc_store_release(&h->root->repairing, 0);
    }
    free(b.head);
    free(b.next);
    free(b.mark);
    free(b.chunk_mark);
    free(b.listed);
    return rc;
}

/* Rebuild now. Allocations wait meanwhile; lookups do not. */
LC_API int lci_repair(lci_handle *h, int wait, uint64_t deadline) {
    lc_txn t;
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    /* A log that is not sound is dropped: the truth is enough. */
    rc = lcs_lock_take(h->at, &t, LCI_OP_REPAIR, wait | LC_DISCARD, deadline, h->log_begin,
                       h->log_end);
    if (rc != LC_OK) return rc;
    rc = lci_rebuild(h);
    int dropped = lci_unlock(h, &t);
    return rc != LC_OK ? rc : dropped;
}

/* Hold the lock across calls: for tests that play a stopped holder. */
LC_API int lci_hold(lci_handle *h, int wait, uint64_t deadline) {
    lc_txn t;
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    return lcs_lock_take(h->at, &t, LCI_OP_CHECK, wait, deadline, h->log_begin, h->log_end);
}

LC_API int lci_let_go(lci_handle *h) {
    lc_txn t = {.base = h->at->base, .lock = lcs_lock_of(h->at)};
    return lci_unlock(h, &t);
}

/* Word by word: pins, states and counters change meanwhile, without the lock. */
static void copy_words(uint8_t *to, const uint8_t *from, uint64_t bytes) {
    const _Atomic uint64_t *words = (const _Atomic uint64_t *)from;
    uint64_t at = 0;
    for (; at + 8 <= bytes; at += 8) {
        uint64_t word = lc_load(&words[at / 8]);
        memcpy(to + at, &word, 8);
    }
    uint64_t last = at < bytes ? lc_load(&words[at / 8]) : 0; /* a segment ends with a whole one */
    memcpy(to + at, &last, bytes - at);
}

/* Copy the segment while holding the lock, for `check`: allocations wait for it. Never with the
 * interpreter's lock held: a million pages take 50 ms. */
LC_API int lci_copy(lci_handle *h, uint8_t *to, uint64_t bytes, int wait, uint64_t deadline) {
    lc_txn t;
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (bytes > h->at->bytes) return LC_E_RANGE;
    if (wait == LC_TRY) return LC_E_BUSY;
    rc = lcs_lock_take(h->at, &t, LCI_OP_CHECK, wait, deadline, h->log_begin, h->log_end);
    if (rc != LC_OK) return rc;
    copy_words(to, h->at->base, bytes);
    return lci_unlock(h, &t);
}
