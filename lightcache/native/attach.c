/* Geometry, formatting, handles, namespaces: what happens once. */
#include "index.h"

#include <stdlib.h>
#include <string.h>

static uint64_t up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

static uint64_t power_above(uint64_t n) {
    uint64_t p = 64;
    while (p < n) p *= 2;
    return p;
}

static uint64_t between(uint64_t low, uint64_t n, uint64_t high) {
    return n < low ? low : n > high ? high : n;
}

/* Where everything lies in an index of so many pages, with such an order of eviction. A pure function:
 * both sides of an attach compute it, and of the segment only the order is believed. */
LC_API int lci_geometry_of(uint64_t pages, uint32_t eviction, lci_geometry *g) {
    if (pages < 1 || pages > UINT64_C(1) << 30 || eviction > LCI_HZ) return LC_E_RANGE;
    uint64_t at = LCS_PAYLOAD_OFFSET;
    g->pages = pages;
    g->buckets = power_above(2 * pages); /* a chain of more than one costs a mispredicted branch */
    g->reservations = between(64, pages, 1024);
    g->tickets = between(64, pages, 4096);
    g->chunks = g->reservations + g->tickets + (pages + pages / 4) / LCI_CHUNK_PAGES;
    g->root = at;
    at += up(sizeof(lci_root), 4096);
    g->heads = at;
    at = up(at + LCI_LISTS * sizeof(lc_link), 64);
    g->namespaces = at;
    at += LCI_NAMESPACES * sizeof(lci_namespace);
    g->reservation = at;
    at += g->reservations * sizeof(lci_reservation);
    g->ticket = at;
    at += g->tickets * sizeof(lci_ticket);
    g->chunk = at = up(at, 256);
    at += g->chunks * sizeof(lci_chunk);
    g->bucket = at;
    at = up(at + g->buckets * 4, 4096);
    g->page = at;
    at += pages * sizeof(lci_page);
    g->rows = at;
    g->row_stride = up(pages, 32); /* counts of two clients never share a word, nor a line */
    g->ranks = g->advice = g->end = up(at + LCS_SLOTS * g->row_stride * 2, 4096);
    if (eviction == LCI_HZ) {
        g->advice = up(g->ranks + sizeof(lci_ranks), 4096);
        g->end = up(g->advice + lch_bytes(pages), 4096);
    }
    return g->advice <= LC_LOG_REACH ? LC_OK : LC_E_RANGE;
}

/* The order is what the root says. One that damage has put there is none, or the root's size is not its: then
 * it is read as LRU's, so that `check` can say so. */
int lci_geometry_in(const uint8_t *base, uint64_t bytes, uint64_t pages, lci_geometry *g) {
    lci_geometry ranked;
    int rc = lci_geometry_of(pages, LCI_LRU, g);
    if (rc != LC_OK || bytes < g->end) return LC_E_RANGE;
    const lci_root *r = (const lci_root *)(base + g->root);
    if (r->eviction != LCI_HZ || r->index_bytes == g->end) return LC_OK;
    rc = lci_geometry_of(pages, LCI_HZ, &ranked);
    if (rc != LC_OK || bytes < ranked.end) return LC_E_RANGE;
    *g = ranked;
    return LC_OK;
}

/* Are the root's own figures these? */
bool lci_geometry_agrees(const lci_root *r, const lci_geometry *g) {
    return r->pages == g->pages && r->buckets == g->buckets && r->reservations == g->reservations &&
           r->tickets == g->tickets && r->chunks == g->chunks && r->index_bytes == g->end &&
           r->eviction == (g->ranks == g->end ? LCI_LRU : LCI_HZ);
}

/* For what is learned: the key and word of a page, if it has a key. Any number may be asked for. */
static bool read_page(const void *context, uint32_t page, lc_key *key, uint64_t *used) {
    const lci_handle *h = context;
    if (page >= h->page_count) return false;
    const lci_page *p = &h->pages[page];
    uint32_t state = lci_state_of(lc_load(&p->word));
    *key = (lc_key){.lo = lc_load(&p->lo), .hi = lc_load(&p->hi)};
    *used = lc_load(&p->used);
    return state == LCI_READY || state == LCI_WRITING;
}

static void point(lci_handle *h, uint8_t *base, const lci_geometry *g) {
    h->geometry = *g;
    h->root = (lci_root *)(base + g->root);
    h->ns = (lci_namespace *)(base + g->namespaces);
    h->res = (lci_reservation *)(base + g->reservation);
    h->tickets = (lci_ticket *)(base + g->ticket);
    h->chunks = (lci_chunk *)(base + g->chunk);
    h->pages = (lci_page *)(base + g->page);
    h->rows = (_Atomic uint16_t *)(base + g->rows);
    h->row_stride = g->row_stride;
    h->page_count = (uint32_t)g->pages;
    h->res_count = (uint32_t)g->reservations;
    h->ticket_count = (uint32_t)g->tickets;
    h->chunk_count = (uint32_t)g->chunks;
    h->dict = (lc_dict){.records = base + g->page,
                        .stride = sizeof(lci_page),
                        .nodes = (uint32_t)g->pages,
                        .buckets = (_Atomic uint32_t *)(base + g->bucket),
                        .mask = (uint32_t)g->buckets - 1};
    h->lists = (lc_lists){.links = base + g->page + offsetof(lci_page, queue),
                          .stride = sizeof(lci_page),
                          .nodes = (uint32_t)g->pages,
                          .heads = (lc_link *)(base + g->heads),
                          .head_count = LCI_LISTS};
    h->log_begin = lci_log_begin(g);
    h->log_end = g->advice;
    if (g->end == g->ranks) return;
    h->ranks = (lci_ranks *)(base + g->ranks);
    uint64_t secret;
    memcpy(&secret, ((const lcs_header *)base)->uuid, sizeof secret);
    lch_place(&h->learnt, base + g->advice, g->pages, secret, read_page, h);
}

/* A handle on memory that no other process changes: a copy, or a segment being made. The caller
 * frees. */
lci_handle *lci_handle_on(uint8_t *base, const lci_geometry *g, lcs_attachment *at) {
    lci_handle *h = calloc(1, sizeof *h);
    if (!h) return NULL;
    point(h, base, g);
    h->at = at;
    h->mine = h->rows + (at ? at->slot : 0) * g->row_stride;
    return h;
}

typedef struct name {
    uint64_t word[LCI_NAME_WORDS];
} name;

static name name_of(const char *text) {
    name n = {{0}};
    memcpy(n.word, text, strnlen(text, sizeof n.word - 1));
    return n;
}

static void set_name(_Atomic uint64_t *to, const char *text) {
    name n = name_of(text);
    for (int i = 0; i < LCI_NAME_WORDS; i++) lc_store(&to[i], n.word[i]);
}

/* The epoch before the names: a reader that has read the new names under the old epoch sees another
 * epoch when it reads that again. */
static void set_namespace(lci_namespace *ns, const char *weights, const char *tenant,
                          uint32_t quota, uint32_t minimum) {
    lc_store_release(&ns->epoch, lc_load(&ns->epoch) + 1);
    atomic_thread_fence(memory_order_release);
    set_name(ns->weights, weights);
    set_name(ns->tenant, tenant);
    lc_store(&ns->quota, quota);
    lc_store(&ns->minimum, minimum);
    LC_PAUSE(LC_AT_NAME_STORED);
    lc_store_release(&ns->state, LCI_NS_NORMAL);
}

/* Lay out an index of `pages` pages in zeroed memory, before the segment is ready. `grown` pages
 * have memory already; `eviction`: an lci_eviction_order. */
LC_API int lci_format(uint8_t *base, uint64_t bytes, uint64_t pages, uint64_t grown,
                      uint32_t eviction) {
    lci_geometry g;
    int rc = lci_geometry_of(pages, eviction, &g);
    if (rc != LC_OK) return rc;
    if (bytes < g.end || grown > pages) return LC_E_RANGE;
    lci_handle *h = lci_handle_on(base, &g, NULL);
    if (!h) return LC_E_FULL;
    lci_root *r = h->root;
    r->pages = g.pages;
    r->buckets = g.buckets;
    r->reservations = g.reservations;
    r->tickets = g.tickets;
    r->chunks = g.chunks;
    r->index_bytes = g.end;
    r->eviction = eviction;
    lc_store(&r->free_head, LC_NIL);
    lc_store(&r->chunk_head, LC_NIL);
    lc_store(&r->res_head, LC_NIL);
    lc_store(&r->grown, (uint32_t)grown);
    lc_lists_format(&h->lists);
    memset(base + g.bucket, 0xff, g.buckets * 4);
    if (h->ranks) lci_ranks_format(h);
    set_namespace(&h->ns[0], "", "", 0, 0);
    free(h);
    return LC_OK;
}

/* A handle for an attached process, or NULL if the segment's own figures are not those of an index
 * of `pages` pages. */
LC_API lci_handle *lci_open(lcs_attachment *at, uint64_t pages) {
    lci_geometry g;
    if (lci_geometry_in(at->base, at->bytes, pages, &g) != LC_OK) return NULL;
    if (!lci_geometry_agrees((const lci_root *)(at->base + g.root), &g)) return NULL;
    return lci_handle_on(at->base, &g, at);
}

LC_API void lci_close(lci_handle *h) { free(h); }

/* Record that the first `pages` pages have memory. */
LC_API int lci_grow(lci_handle *h, uint32_t pages, int wait, uint64_t deadline) {
    lc_txn t;
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (pages > h->page_count) return LC_E_RANGE;
    rc = lci_lock(h, &t, LCI_OP_GROW, wait, deadline);
    if (rc != LC_OK) return rc;
    if (pages > lc_load(&h->root->grown)) {
        lc_txn_set(&t, &h->root->grown, pages);
        lc_store(&h->root->no_memory_ns, 0);
    }
    return lci_unlock(h, &t);
}

/* ------------------------------------------------------------------ namespaces */

static bool same(const _Atomic uint64_t *words, const name *n) {
    uint64_t differ = 0;
    for (int i = 0; i < LCI_NAME_WORDS; i++) differ |= lc_load(&words[i]) ^ n->word[i];
    return differ == 0;
}

/* Is this namespace open under these names? If its entry changes hands meanwhile: no. */
static bool named(const lci_namespace *ns, const name *weights, const name *tenant,
                  uint32_t *epoch) {
    *epoch = lc_load_acquire(&ns->epoch);
    if (lc_load_acquire(&ns->state) != LCI_NS_NORMAL) return false;
    LC_PAUSE(LC_AT_NAME_LOOKED);
    if (!same(ns->weights, weights) || !same(ns->tenant, tenant)) return false;
    atomic_thread_fence(memory_order_acquire);
    return lc_load(&ns->epoch) == *epoch;
}

static lci_ns_ref ref_of(const lci_handle *h, const lci_namespace *ns, uint32_t epoch) {
    return (uint32_t)(ns - h->ns) | epoch << 8;
}

/* Look a namespace up. No lock; LC_E_MISSING when there is none of that name. */
LC_API int lci_namespace_find(lci_handle *h, const char *weights, const char *tenant,
                              lci_ns_ref *out) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    name wanted_weights = name_of(weights), wanted_tenant = name_of(tenant);
    for (uint32_t i = 0, epoch; i < LCI_NAMESPACES; i++) {
        if (!named(&h->ns[i], &wanted_weights, &wanted_tenant, &epoch)) continue;
        *out = ref_of(h, &h->ns[i], epoch);
        return LC_OK;
    }
    return LC_E_MISSING;
}

/* Whether anything may be found in it or published. No lock. */
LC_API int lci_namespace_good(lci_handle *h, lci_ns_ref ref) {
    int rc = lcs_usable(h->at);
    return rc != LC_OK ? rc : lci_ns_open(h, ref);
}

static lci_namespace *vacant(lci_handle *h) {
    for (uint32_t i = 0; i < LCI_NAMESPACES; i++) {
        uint32_t state = lc_load(&h->ns[i].state);
        if (state == LCI_NS_FREE) return &h->ns[i];
        if (state == LCI_NS_CLEARED && lc_load(&h->ns[i].pages) == 0) return &h->ns[i];
    }
    return NULL;
}

/* What the groups and the open namespaces were promised together, but for one minimum. */
static uint64_t promised(const lci_handle *h, const _Atomic uint32_t *besides) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < LCI_NUMBERS; i++)
        if (&h->root->group[i].minimum != besides) sum += lc_load(&h->root->group[i].minimum);
    for (uint32_t i = 0; i < LCI_NAMESPACES; i++)
        if (&h->ns[i].minimum != besides && lc_load(&h->ns[i].state) == LCI_NS_NORMAL)
            sum += lc_load(&h->ns[i].minimum);
    return sum;
}

/* Limits as they shall be: of those not given, what `ns` has (NULL: it is to be made). */
static int settle_limits(const lci_handle *h, const lci_namespace *ns, lci_ns_limits *limits) {
    if (limits->quota == UINT32_MAX) limits->quota = ns ? lc_load(&ns->quota) : 0;
    if (limits->minimum == UINT32_MAX) limits->minimum = ns ? lc_load(&ns->minimum) : 0;
    limits->others = promised(h, ns ? &ns->minimum : NULL);
    if (!limits->minimum) return LC_OK;
    bool within = !limits->quota || limits->minimum <= limits->quota;
    return within && limits->others + limits->minimum <= h->page_count ? LC_OK : LC_E_RANGE;
}

/* Find a namespace or make it, with these limits; UINT32_MAX leaves one as it is (0 in a new one).
 * LC_E_FULL: all 256 are in use. LC_E_RANGE: more is promised than there is; nothing was changed;
 * `limits` returns how much was asked for in all. */
LC_API int lci_namespace_limits(lci_handle *h, const char *weights, const char *tenant,
                                lci_ns_limits *limits, lci_ns_ref *out, int wait,
                                uint64_t deadline) {
    lc_txn t;
    bool as_it_is = limits->quota == UINT32_MAX && limits->minimum == UINT32_MAX;
    int rc = lci_namespace_find(h, weights, tenant, out);
    if ((rc != LC_OK && rc != LC_E_MISSING) || (rc == LC_OK && as_it_is)) return rc;
    rc = lci_lock(h, &t, LCI_OP_NAMESPACE, wait, deadline);
    if (rc != LC_OK) return rc;
    rc = lci_namespace_find(h, weights, tenant, out);
    lci_namespace *ns = rc == LC_OK ? &h->ns[lci_ns_id(*out)] : NULL;
    if (ns || rc == LC_E_MISSING) rc = settle_limits(h, ns, limits);
    if (rc == LC_OK && ns) {
        lc_txn_set(&t, &ns->quota, limits->quota);
        lc_txn_set(&t, &ns->minimum, limits->minimum);
    } else if (rc == LC_OK) {
        ns = vacant(h);
        rc = ns ? LC_OK : LC_E_FULL;
        /* One record, its state stored last: a death before that leaves it vacant. */
        if (ns) {
            set_namespace(ns, weights, tenant, limits->quota, limits->minimum);
            *out = ref_of(h, ns, lc_load(&ns->epoch));
        }
    }
    int dropped = lci_unlock(h, &t);
    return dropped != LC_OK ? dropped : rc;
}

/* The same with a quota alone. */
LC_API int lci_namespace_open(lci_handle *h, const char *weights, const char *tenant,
                              uint32_t quota, lci_ns_ref *out, int wait, uint64_t deadline) {
    lci_ns_limits limits = {.quota = quota, .minimum = UINT32_MAX};
    return lci_namespace_limits(h, weights, tenant, &limits, out, wait, deadline);
}

/* Leave a group at least so many pages, of all namespaces together. LC_E_RANGE: there is no such group, or
 * more is promised than there is; nothing was changed, and `*others` returns the other minimums. */
LC_API int lci_group_minimum(lci_handle *h, uint32_t number, uint32_t minimum, uint64_t *others,
                             int wait, uint64_t deadline) {
    lc_txn t;
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    if (number >= LCI_NUMBERS) return LC_E_RANGE;
    rc = lci_lock(h, &t, LCI_OP_GROUP, wait, deadline);
    if (rc != LC_OK) return rc;
    _Atomic uint32_t *word = &h->root->group[number].minimum;
    *others = promised(h, word);
    bool fits = *others + minimum <= h->page_count;
    if (fits) lc_txn_set(&t, word, minimum);
    rc = lci_unlock(h, &t);
    if (rc != LC_OK) return rc;
    return fits ? LC_OK : LC_E_RANGE;
}

/* Pages of reservations that are published and not collected yet: ready for all clients, but still
 * counted as being written. */
uint32_t lci_uncollected(const lci_handle *h) {
    uint32_t pages = 0;
    for (uint32_t w = 0; w < 16; w++) {
        uint64_t bits = lc_load_acquire(&h->root->completed[w]);
        for (; bits; bits &= bits - 1) {
            uint32_t rid = w * 64 + (uint32_t)__builtin_ctzll(bits);
            if (rid < h->res_count && lci_complete(&h->res[rid]))
                pages += lc_load(&h->res[rid].pages.count);
        }
    }
    return pages;
}

/* Does a ticket hold pages that may still be adopted? The others' pins go with the next look. */
static bool tickets_hold(const lci_handle *h) {
    uint64_t now = lcs_now_ns();
    if (!lc_load(&h->root->ticket_used)) return false;
    for (uint32_t i = 0, end = lci_ticket_end(h); i < end; i++) {
        const lci_ticket *k = &h->tickets[i];
        if (lc_load(&k->state) != LCI_TICKET_FREE && lc_load(&k->pages.count) &&
            now < lc_load(&k->deadline_ns))
            return true;
    }
    return false;
}

static bool pinned_by_clients(const lci_handle *h, const lci_page *p) {
    uint32_t page = (uint32_t)(p - h->pages);
    for (uint64_t bits = lc_load_acquire(&p->pins) & ~UINT64_C(1); bits; bits &= bits - 1)
        if (lc_load_acquire(lci_pin(h, (uint32_t)__builtin_ctzll(bits), page))) return true;
    return false;
}

#define IDLE_MOST 4096 /* doomed pages that are looked at: a third of a millisecond */

/* Doomed pages that a call that needs room gets at once. No lock: the list may change meanwhile,
 * and is followed no further than its length. While a ticket's pins last, all of row 0 counts. */
static uint32_t idle(const lci_handle *h) {
    uint32_t found = 0, count = lc_load(&h->root->doomed);
    if (!count) return 0;
    bool held = tickets_hold(h);
    uint32_t page = lc_load(&h->lists.heads[LCI_DOOMED_LIST].next);
    if (count > IDLE_MOST) count = IDLE_MOST;
    for (uint32_t i = 0; i < count && page < h->page_count; i++) {
        const lci_page *p = &h->pages[page];
        bool pinned = held ? lci_pinned(h, p) : pinned_by_clients(h, p);
        found += lci_state_of(lc_load_acquire(&p->word)) == LCI_DOOMED && !pinned;
        page = lc_load(&p->queue.next);
    }
    return found;
}

/* The totals, each read once and all at slightly different instants. No lock. */
LC_API int lci_count(lci_handle *h, lci_counts *out) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    const lci_root *r = h->root;
    uint32_t writing = lc_load(&r->writing), published = lci_uncollected(h);
    *out = (lci_counts){
        .pages = h->page_count,
        .grown = lc_load(&r->grown),
        .fresh = lc_load(&r->fresh),
        .free = lc_load(&r->free_count),
        .named = lc_load(&r->named),
        .writing = writing > published ? writing - published : 0,
        .doomed = lc_load(&r->doomed),
        .queued = lc_load(&r->queued),
        .reservations = lc_load(&r->res_used),
        .tickets = lc_load(&r->ticket_used),
        .chunks = lc_load(&r->chunk_used),
        .namespaces_clearing = lc_load(&r->clearing),
        .kept = lc_load(&r->kept),
        .held = lc_load(&r->held),
        .idle = idle(h),
        .clock = lc_load(&r->clock),
        .no_memory_ns = lc_load(&r->grown) < h->page_count ? lci_no_memory_left(h) : 0,
    };
    return LC_OK;
}

/* Pages by group, and then what each was promised. Each figure is read once, all at slightly different
 * instants. No lock. */
LC_API int lci_count_groups(const lci_handle *h, uint32_t counts[2 * LCI_NUMBERS]) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    for (uint32_t i = 0; i < LCI_NUMBERS; i++) {
        counts[i] = lc_load(&h->root->group[i].pages);
        counts[LCI_NUMBERS + i] = lc_load(&h->root->group[i].minimum);
    }
    return LC_OK;
}
