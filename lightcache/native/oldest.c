/* What eviction would take next, listed and pinned so that its caller can copy it elsewhere; and
 * giving such pages up. */
#include "index.h"

typedef struct oldest {
    lci_handle *h;
    lci_oldest_op *op;
    lci_lease *lease;
    int32_t *page;  /* the lease's pages, and beside them */
    uint32_t *hits; /* what they had when they were listed */
    lc_key *keys;
    uint32_t *parent;
    lc_txn t;
    lci_eviction eviction;
} oldest;

/* Damage: what is listed is pinned, and so it does not come to the head of the queue again. */
static bool is_listed(const oldest *o, uint32_t page) {
    if (!lc_load(&o->h->mine[page])) return false; /* nearly always */
    for (uint32_t i = 0; i < o->lease->held; i++)
        if (o->page[i] == (int32_t)page) return true;
    return false;
}

/* What tells a use of a page that is listed: its hits, which others' evictions leave alone; where lists
 * are ranked, all of its word, which they do not touch either. */
static uint32_t seen(const lci_handle *h, uint32_t page) {
    uint64_t used = lc_load(&h->pages[page].used);
    if (!h->ranks) return (uint32_t)(used & LCI_HITS_MASK);
    return (uint32_t)used ^ (uint32_t)(used >> 32) * UINT32_C(0x9e3779b1);
}

/* It is the caller's from here on: should this step be undone, the lease still pins it. */
static void list_page(oldest *o, uint32_t page) {
    lci_handle *h = o->h;
    const lci_page *p = &h->pages[page];
    uint32_t at = o->lease->held;
    pthread_mutex_lock(&h->at->rows);
    int rc = is_listed(o, page) ? LC_E_CORRUPT : LC_OK;
    if (rc == LC_OK) rc = lc_load(&h->at->leaving) ? LC_E_CLOSED : lci_pin_one(h, page);
    o->page[at] = (int32_t)page;
    if (rc == LC_OK) o->lease->held = at + 1;
    pthread_mutex_unlock(&h->at->rows);
    if (rc != LC_OK) {
        o->t.error = rc;
        return;
    }
    o->hits[at] = seen(h, page);
    o->keys[at] = (lc_key){.lo = lc_load(&p->lo), .hi = lc_load(&p->hi)};
    o->parent[at] = lci_parent(h, p);
    uint32_t word = lc_load(&p->word);
    o->op->going[lci_ns_of(word)]++;
    o->op->going_group[lci_group_of(word)]++;
    o->op->climb = page + 1;
}

/* Does all that hangs on this page go before it? One of its children has just been listed. */
static bool bare(const oldest *o, uint32_t page) {
    uint32_t children = lc_load(&o->h->pages[page].children), listed = 0;
    if (children == 1) return true;
    for (uint32_t i = 0; i < o->lease->held; i++) listed += o->parent[i] == page;
    return listed == children;
}

/* The parent of the page listed last, if it went next anyway: as `follow` in evict.c. An independent
 * one is listed, or is not, by itself. */
static uint32_t next_up(const oldest *o) {
    lci_handle *h = o->h;
    uint32_t child = o->op->climb - 1;
    if (o->op->climb == 0 || child >= h->page_count) return LC_NIL;
    uint32_t parent = lci_parent(h, &h->pages[child]);
    if (parent == LC_NIL) return LC_NIL;
    const lci_page *q = &h->pages[parent];
    uint32_t word = lc_load(&q->word);
    uint32_t goes = word & (LCI_STATE_MASK | LCI_KEPT | LCI_INDEPENDENT);
    if (goes != LCI_READY || lci_res_of(word)) return LC_NIL;
    if (!lci_follows(h, &o->eviction, child, parent) || !bare(o, parent)) return LC_NIL;
    return lci_promised(h, &o->eviction, parent) || lci_pinned(h, q) ? LC_NIL : parent;
}

/* One step: list a batch. What comes from the queue is put where it would be if it had been used
 * now, so that the next one comes to its head. */
static uint32_t list_batch(oldest *o, uint32_t *steps) {
    uint32_t n = 0;
    lci_queue_begin(o->h, &o->t, &o->eviction, LCI_BATCH);
    while (n < LCI_BATCH && o->lease->held < o->op->want && !o->t.error) {
        uint32_t page = next_up(o);
        if (page == LC_NIL) {
            o->op->climb = 0;
            page = lci_queue_pop(o->h, &o->t, &o->eviction, steps);
            if (page == LC_NIL) break;
            lci_queue_defer(o->h, &o->t, &o->eviction, page);
        }
        list_page(o, page);
        n++;
    }
    lci_step(&o->t);
    return n;
}

static void list_some(oldest *o) {
    lci_handle *h = o->h;
    uint32_t steps = 256, done = 0;
    bool all = lci_collect(h, &o->t, 256) < 256; /* whatever was published is taken in */
    if (lc_load(&h->root->ticket_used)) lci_settle_tickets(h, &o->t, 256);
    while (done < 256 && !o->t.error) {
        uint32_t n = list_batch(o, &steps);
        done += n;
        if (n < LCI_BATCH || lci_give_way(h, done)) break;
    }
    if (o->lease->held == o->op->want || (all && o->eviction.exhausted)) o->op->ended = 1;
    o->eviction.exhausted = false;
}

/* Back to the head of the queue, the last one first. */
static void put_back(oldest *o) {
    lci_handle *h = o->h;
    for (uint32_t i = 0; i < 256 && o->op->returned < o->lease->held && !o->t.error; i++) {
        uint32_t page = (uint32_t)o->page[o->lease->held - 1 - o->op->returned++];
        if (page < h->page_count && lci_queueable(h, page)) lci_queue_return(h, &o->t, page);
        if (i % LCI_BATCH == LCI_BATCH - 1) lci_step(&o->t);
    }
}

static bool over(const oldest *o) {
    return o->op->ended && (!o->op->keep_order || o->op->returned >= o->lease->held);
}

/* Pin the up to `op->want` pages that would be evicted next by a call for no namespace, each before
 * its parent (independent ones in the order of eviction alone): into a lease with room for them,
 * with their keys and parents (LC_NIL: none). Returns how many. They stay in the queue: where they
 * were (`op->keep_order`), or as if they had been used now. LC_E_BUSY, LC_E_INTR: call again, it
 * continues. What the lease holds is the caller's to release, after an error as well. */
LC_API int lci_oldest(lci_handle *h, lci_oldest_op *op, lci_lease *lease, lc_key *keys,
                      uint32_t *parents, int wait, uint64_t deadline) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    lease->capacity = op->want;
    oldest o = {.h = h, .op = op, .lease = lease, .keys = keys, .parent = parents};
    o.page = (int32_t *)(lease + 1);
    o.hits = (uint32_t *)(o.page + op->want);
    if (!op->since) op->since = lci_next_tick(h);
    o.eviction = (lci_eviction){.since = op->since, .listing = op, .parked = &op->parked};
    uint64_t begun = lcs_now_ns();
    while (!over(&o)) {
        rc = lci_lock(h, &o.t, LCI_OP_EVICT, wait, deadline);
        if (rc != LC_OK) return rc;
        if (!op->ended) list_some(&o);
        else put_back(&o);
        rc = lci_unlock(h, &o.t);
        if (rc == LC_OK && !over(&o)) rc = lci_again(begun, wait, deadline);
        if (rc != LC_OK) return rc;
    }
    return (int)lease->held;
}

/* ------------------------------------------------------------------ giving them up */

typedef struct discard {
    lci_handle *h;
    lci_discard_op *op;
    const int32_t *page;
    const uint32_t *hits;  /* NULL: matches that have ended do not count */
    const uint32_t *order; /* positions in `page`, by page number */
    uint8_t *done;         /* its pin was given back */
    uint32_t n;
    lc_txn t;
    lci_eviction eviction;
} discard;

/* From here on the pins are this call's. They must be there, once for each page. */
static int take_pins(discard *d, lci_lease *lease) {
    lci_handle *h = d->h;
    int rc = LC_OK;
    pthread_mutex_lock(&h->at->rows);
    if (lease && lease->held != d->n) rc = LC_E_TWICE;
    for (uint32_t i = 0; i < d->n && rc == LC_OK; i++) {
        if ((uint32_t)d->page[i] >= h->page_count) rc = LC_E_RANGE;
        else if (!lc_load(&h->mine[d->page[i]])) rc = LC_E_OWNER;
    }
    if (rc == LC_OK) {
        if (lease) lease->held = 0;
        d->op->taken = 1;
    }
    pthread_mutex_unlock(&h->at->rows);
    return rc;
}

/* Our pin goes. Does another client pin it, or did one? (Hits saturate: then only pins tell.) */
static bool unwanted(discard *d, uint32_t i) {
    lci_handle *h = d->h;
    const lci_page *p = &h->pages[d->page[i]];
    pthread_mutex_lock(&h->at->rows);
    int rc = lci_unpin_one(h, (uint32_t)d->page[i]);
    d->done[i] = 1;
    pthread_mutex_unlock(&h->at->rows);
    if (rc != LC_OK) d->t.error = rc;
    bool matched = d->hits && d->hits[i] != seen(h, (uint32_t)d->page[i]);
    return rc == LC_OK && !matched && lci_queueable(h, (uint32_t)d->page[i]) && !lci_pinned(h, p);
}

/* The position of a page; n: it is none of them. */
static uint32_t position(const discard *d, uint32_t page) {
    uint32_t low = 0, high = d->n;
    while (low < high) {
        uint32_t mid = (low + high) / 2;
        if ((uint32_t)d->page[d->order[mid]] < page) low = mid + 1;
        else high = mid;
    }
    return low < d->n && (uint32_t)d->page[d->order[low]] == page ? d->order[low] : d->n;
}

/* The next to look at: the parent of one that went, else the next in order; n: all were. */
static uint32_t next_one(discard *d) {
    uint32_t i = d->op->climb ? d->op->climb - 1 : d->op->cursor;
    if (d->op->climb) d->op->climb = 0;
    else if (i < d->n) d->op->cursor++;
    return i;
}

/* One step. Returns false when all were looked at. A page that something hangs on is passed over:
 * when the last of that has gone its turn comes again. An independent one is not. */
static bool discard_batch(discard *d) {
    lci_handle *h = d->h;
    uint32_t marked[LCI_BATCH], n = 0, i = 0;
    for (int looked = 0; n < LCI_BATCH && looked < 256 && !d->t.error; looked++) {
        i = next_one(d);
        if (i == d->n) break;
        uint32_t page = (uint32_t)d->page[i];
        if (d->done[i] || lci_covered(&h->pages[page]) || !unwanted(d, i)) continue;
        uint32_t parent = lci_parent(h, &h->pages[page]);
        lci_evict_page(h, &d->t, &d->eviction, page);
        marked[n++] = page;
        uint32_t above = parent == LC_NIL ? d->n : position(d, parent);
        if (above < d->n) d->op->climb = above + 1;
    }
    uint32_t freed = n ? lci_evict_settle(h, &d->t, &d->eviction, marked, n) : 0;
    lci_step(&d->t);
    if (!d->t.error) d->op->freed += freed;
    return i < d->n;
}

/* Give back the pins that a discard has not given back yet: whatever became of it. */
LC_API int lci_discard_end(lci_handle *h, lci_discard_op *op, const int32_t *pages, uint8_t *done,
                           uint32_t n) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK && rc != LC_E_RETIRED) return rc;
    pthread_mutex_lock(&h->at->rows);
    rc = LC_OK;
    for (uint32_t i = 0; i < n && op->taken; i++) {
        if (done[i]) continue;
        int one = lci_unpin_one(h, (uint32_t)pages[i]);
        if (one != LC_OK) rc = one;
        done[i] = 1;
    }
    pthread_mutex_unlock(&h->at->rows);
    return rc;
}

/* Give up our pins of these pages, each different, and evict those that no other client pins, that
 * had no hit since `hits` (NULL: whatever they had), and on which nothing else hangs, unless they
 * are independent. With `lease` the pins are those that it holds, and it holds none any more.
 * LC_E_BUSY, LC_E_INTR: call again, it continues; after any other end lci_discard_end gives back
 * the rest. LC_E_OWNER: we do not pin one of them; LC_E_TWICE: the lease was released. Nothing was
 * given up then. */
LC_API int lci_discard(lci_handle *h, lci_discard_op *op, lci_lease *lease, const int32_t *pages,
                       const uint32_t *hits, const uint32_t *order, uint8_t *done, uint32_t n,
                       int wait, uint64_t deadline) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    discard d = {.h = h, .op = op, .page = pages, .hits = hits, .order = order, .done = done,
                 .n = n};
    d.eviction = (lci_eviction){.since = lci_next_tick(h), .cause = LCI_DISCARDED};
    if (!op->taken) rc = take_pins(&d, lease);
    uint64_t begun = lcs_now_ns();
    for (bool more = rc == LC_OK && n; more;) {
        rc = lci_lock(h, &d.t, LCI_OP_EVICT, wait, deadline);
        if (rc != LC_OK) return rc;
        bool all = lci_collect(h, &d.t, 256) < 256;
        if (lc_load(&h->root->ticket_used)) lci_settle_tickets(h, &d.t, 256);
        for (uint32_t work = 0; work < LCI_HOLD && all && more && !d.t.error;) {
            more = discard_batch(&d);
            if (lci_give_way(h, work += LCI_BATCH)) break;
        }
        rc = lci_unlock(h, &d.t);
        if (rc == LC_OK && more) rc = lci_again(begun, wait, deadline);
        if (rc != LC_OK) return rc;
    }
    return rc == LC_OK ? lci_discard_end(h, op, pages, done, n) : rc;
}
