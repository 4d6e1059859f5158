/* repair: rebuild everything derived (chains, queue, free stack, doomed list, children, counts)
 * from the truth (page words and keys, page lists of reservations and tickets).
 *
 * Runs under the lock in one piece, without the log: `repairing` says that it has begun, and
 * whoever takes the lock next starts it again. Chains that hold what they should are not touched,
 * so lookups in a sound index notice nothing. */
#include "index.h"

#include <stdlib.h>

typedef struct builder {
    lci_handle *h;
    uint32_t *head; /* what each chain should hold: first page, then by `next` */
    uint32_t *next;
    uint8_t *mark;
} builder;

static bool named_word(uint32_t word) {
    uint32_t state = lci_state_of(word);
    return state == LCI_WRITING || state == LCI_READY;
}

/* A page's word, made sound: EVICTING goes back, nonsense and odd generations become free. */
static void settle_page(lci_handle *h, uint32_t page) {
    lci_page *p = &h->pages[page];
    uint32_t word = lc_load(&p->word), state = lci_state_of(word), rid = word >> LCI_RES_SHIFT;
    if (state == LCI_EVICTING) lc_store(&p->word, LCI_READY | (word & LCI_NS_MASK));
    bool orphan = state == LCI_WRITING &&
                  (rid == 0 || rid > h->res_count || lc_load(&h->res[rid - 1].state) == LCI_RES_FREE);
    if (state > LCI_DOOMED || (lc_load(&p->gen) & 1) || orphan) {
        lc_store(&p->word, orphan ? LCI_DOOMED | LCI_UNWRITTEN : LCI_FREE);
        if (lc_load(&p->gen) & 1) lc_store_release(&p->gen, lc_load(&p->gen) + 1);
    }
    if (state == LCI_READY && rid && (rid > h->res_count || lc_load(&h->res[rid - 1].state) == LCI_RES_FREE))
        lc_store(&p->word, LCI_READY | (word & LCI_NS_MASK));
}

/* Into the private chain; a second page with the same key is doomed. */
static void collect_page(builder *b, uint32_t page) {
    lci_page *p = &b->h->pages[page];
    uint32_t bucket = lc_bucket(&b->h->dict, lc_load(&p->lo)), length = 0;
    for (uint32_t at = b->head[bucket]; at != LC_NIL; at = b->next[at], length++) {
        const lci_page *q = &b->h->pages[at];
        if ((lc_load(&q->lo) == lc_load(&p->lo) && lc_load(&q->hi) == lc_load(&p->hi)) ||
            length + 1 >= LC_CHAIN_MAX) {
            lc_store(&p->word, (lc_load(&p->word) & ~LCI_STATE_MASK) | LCI_DOOMED);
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

static void clear_totals(lci_handle *h) {
    lci_root *r = h->root;
    lc_lists_format(&h->lists);
    for (int i = 0; i < LCI_LEVELS * 2; i++) lc_store(&r->occupied[i], 0);
    lc_store(&r->free_head, LC_NIL);
    lc_store(&r->free_count, 0);
    lc_store(&r->named, 0);
    lc_store(&r->writing, 0);
    lc_store(&r->doomed, 0);
    lc_store(&r->queued, 0);
    if (lc_load(&r->grown) > h->page_count) lc_store(&r->grown, h->page_count);
    if (lc_load(&r->fresh) > lc_load(&r->grown)) lc_store(&r->fresh, lc_load(&r->grown));
    for (uint32_t i = 0; i < LCI_NAMESPACES; i++) lc_store(&h->ns[i].pages, 0);
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
        if (word >> LCI_RES_SHIFT) lc_store(&r->writing, lc_load(&r->writing) + 1);
        _Atomic uint32_t *pages = &h->ns[lci_ns_of(word)].pages;
        lc_store(pages, lc_load(pages) + 1);
        uint32_t parent = lci_parent(h, p);
        if (parent != LC_NIL && parent != page)
            lc_store(&h->pages[parent].children, lc_load(&h->pages[parent].children) + 1);
        else
            lc_store(&p->parent, LC_NIL);
    } else if (state == LCI_DOOMED) {
        append(h, page, LCI_DOOMED_LIST);
        lc_store(&r->doomed, lc_load(&r->doomed) + 1);
    } else {
        lc_store(&p->queue.next, lc_load(&r->free_head));
        lc_store(&r->free_head, page);
        lc_store(&r->free_count, lc_load(&r->free_count) + 1);
    }
}

static void enqueue(lci_handle *h, uint32_t page) {
    lci_page *p = &h->pages[page];
    uint64_t clock = lc_load(&h->root->clock);
    if (lci_tick(p) > clock) lc_store(&p->used, clock << LCI_TICK_SHIFT);
    uint32_t list = (uint32_t)lci_queue_slot(lci_tick(p), lci_queue_now(h));
    append(h, page, list);
    _Atomic uint32_t *word = &h->root->occupied[list / 32];
    lc_store(word, lc_load(word) | UINT32_C(1) << (list % 32));
    lc_store(&h->root->queued, lc_load(&h->root->queued) + 1);
}

/* Records: counts of reservations and tickets in use; ended ones are flagged to be collected. */
static void count_records(lci_handle *h) {
    uint32_t used = 0;
    lc_store(&h->root->res_head, LC_NIL);
    uint32_t fresh = lc_load(&h->root->res_fresh);
    if (fresh > h->res_count) fresh = h->res_count;
    lc_store(&h->root->res_fresh, fresh);
    for (uint32_t i = 0; i < fresh; i++) {
        if (lc_load(&h->res[i].state) != LCI_RES_FREE) {
            used++;
            if (lc_load(&h->res[i].state) != LCI_RES_ACTIVE || lci_complete(&h->res[i])) lci_flag_ended(h, i);
        } else {
            lc_store(&h->res[i].next_free, lc_load(&h->root->res_head));
            lc_store(&h->root->res_head, i);
        }
    }
    lc_store(&h->root->res_used, used);
    used = 0;
    for (uint32_t i = 0; i < h->ticket_count; i++)
        if (lc_load(&h->tickets[i].state) != LCI_TICKET_FREE) used++;
    lc_store(&h->root->ticket_used, used);
    used = 0;
    for (uint32_t i = 0; i < LCI_NAMESPACES; i++)
        if (lc_load(&h->ns[i].state) == LCI_NS_CLEARING) used++;
    lc_store(&h->root->clearing, used);
}

static void mark_list(const lci_handle *h, const lci_list *list, uint8_t *mark, uint32_t *used) {
    uint32_t n = 0, at = lc_load(&list->first), count = lc_load(&list->count);
    while (n < count && at < h->chunk_count && !mark[at]) {
        mark[at] = 1;
        ++*used;
        n += lc_load(&h->chunks[at].count);
        at = lc_load(&h->chunks[at].next);
    }
}

static void rebuild_chunks(lci_handle *h, uint8_t *mark) {
    uint32_t used = 0, fresh = lc_load(&h->root->chunk_fresh);
    if (fresh > h->chunk_count) fresh = h->chunk_count;
    lc_store(&h->root->chunk_fresh, fresh);
    for (uint32_t i = 0; i < h->res_count && i < lc_load(&h->root->res_fresh); i++)
        if (lc_load(&h->res[i].state) != LCI_RES_FREE) mark_list(h, &h->res[i].pages, mark, &used);
    for (uint32_t i = 0; i < h->ticket_count; i++)
        if (lc_load(&h->tickets[i].state) != LCI_TICKET_FREE) mark_list(h, &h->tickets[i].pages, mark, &used);
    lc_store(&h->root->chunk_head, LC_NIL);
    for (uint32_t c = 0; c < fresh; c++) {
        if (mark[c]) continue;
        lc_store(&h->chunks[c].next, lc_load(&h->root->chunk_head));
        lc_store(&h->root->chunk_head, c);
    }
    lc_store(&h->root->chunk_used, used);
}

static void rebuild(builder *b, uint8_t *chunk_mark) {
    lci_handle *h = b->h;
    clear_totals(h);
    count_records(h);
    uint32_t fresh = lc_load(&h->root->fresh);
    if (fresh > h->page_count) fresh = h->page_count;
    for (uint32_t p = 0; p < fresh; p++) settle_page(h, p);
    for (uint32_t p = 0; p < fresh; p++)
        if (named_word(lc_load(&h->pages[p].word))) collect_page(b, p);
    for (uint32_t i = 0; i <= h->dict.mask; i++) rebuild_chain(b, i);
    for (uint32_t p = 0; p < fresh; p++) count_page(h, p);
    for (uint32_t p = 0; p < fresh; p++)
        if (lci_queueable(h, p)) enqueue(h, p);
    rebuild_chunks(h, chunk_mark);
}

int lci_rebuild(lci_handle *h) {
    uint64_t buckets = (uint64_t)h->dict.mask + 1;
    builder b = {.h = h};
    b.head = malloc(buckets * 4);
    b.next = malloc((uint64_t)h->page_count * 4);
    b.mark = calloc(h->page_count, 1);
    uint8_t *chunk_mark = calloc(h->chunk_count, 1);
    int rc = b.head && b.next && b.mark && chunk_mark ? LC_OK : LC_E_FULL;
    if (rc == LC_OK) {
        memset(b.head, 0xff, buckets * 4);
        lc_store_release(&h->root->repairing, 1);
        lc_kill_fence();
        rebuild(&b, chunk_mark);
        lc_kill_fence();
        lc_store_release(&h->root->repairing, 0);
    }
    free(b.head);
    free(b.next);
    free(b.mark);
    free(chunk_mark);
    return rc;
}

/* Rebuild now. Allocations wait meanwhile; lookups do not. */
LC_API int lci_repair(lci_handle *h, int wait, uint64_t deadline) {
    lc_txn t;
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    /* A log that is not sound is left behind: the truth is enough. */
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
