#include "operations.h"

#include <pthread.h>

/* Codes that no damage explains: we are no forked child, closed nothing, make no system call that
 * could fail. */
static int sane(int rc, const char *what) {
    if (rc == LC_E_FORKED || rc < LC_E_MISSING) finding(what, rc);
    return rc;
}

static void in_range(const world *w, const int32_t *pages, int64_t n, const char *what) {
    for (int64_t i = 0; i < n; i++)
        if (pages[i] < 0 || (uint32_t)pages[i] >= w->pages) finding(what, pages[i]);
}

static void at_most(int64_t got, int64_t most, const char *what) {
    if (got > most) finding(what, got);
}

static void *room(size_t bytes) {
    void *got = calloc(1, bytes ? bytes : 1);
    NEED(got);
    return got;
}

static int worse(int a, int b) { return a < b ? a : b; }

/* Between 0 and `most` keys of a run that the picture has, or of one that it has not. */
static uint32_t some_keys(call *c, lc_key *keys, uint32_t most) {
    uint32_t n = below(c->r, most + 1);
    world_keys(keys, below(c->r, 10), n);
    return n;
}

static lci_ns_ref some_namespace(call *c) { return c->w->ns[below(c->r, 2)]; }

static lci_handle *some_handle(call *c) { return below(c->r, 2) ? c->w->h : c->w->reader_h; }

/* ------------------------------------------------------------------ lookups */

static int peek(call *c) {
    lc_key keys[MOST_KEYS];
    uint32_t n = some_keys(c, keys, MOST_KEYS);
    int rc = sane(lci_peek1(some_handle(c), keys, n, some_namespace(c)), "peek");
    at_most(rc, n, "peek found more than it was asked for");
    /* Without a draw of its own, as below. */
    int ahead = sane(lci_peek_ahead(c->w->h, keys, n, c->w->ns[0]), "peek ahead");
    at_most(ahead, n, "peek ahead found more than it was asked for");
    return worse(rc, ahead);
}

static int peek_many(call *c) {
    lc_key keys[MOST_KEYS];
    uint32_t n = some_keys(c, keys, MOST_KEYS);
    int64_t offsets[3] = {0, n / 2, n};
    int32_t counts[2] = {0, 0};
    int rc = sane(lci_peek(some_handle(c), keys, offsets, 2, some_namespace(c), counts), "peek");
    at_most(counts[0], n / 2, "peek found more than it was asked for");
    at_most(counts[1], n - n / 2, "peek found more than it was asked for");
    return rc;
}

static int deepest(call *c) {
    lc_key keys[MOST_KEYS];
    uint32_t n = some_keys(c, keys, MOST_KEYS);
    int64_t offsets[3] = {0, n / 2, n};
    int32_t counts[2] = {0, 0};
    lci_ns_ref ns = some_namespace(c);
    int rc = sane(lci_deepest1(some_handle(c), keys, n, ns), "deepest");
    at_most(rc, n, "deepest found more than it was asked for");
    rc = worse(rc, sane(lci_deepest(some_handle(c), keys, offsets, 2, ns, counts), "deepest"));
    at_most(counts[0], n / 2, "deepest found more than it was asked for");
    at_most(counts[1], n - n / 2, "deepest found more than it was asked for");
    return rc;
}

static int children(call *c) {
    lc_key keys[MOST_KEYS];
    int32_t counts[MOST_KEYS] = {0};
    uint32_t n = some_keys(c, keys, MOST_KEYS);
    int rc = sane(lci_children(some_handle(c), keys, n, some_namespace(c), counts), "children");
    for (uint32_t i = 0; i < n; i++) {
        at_most(counts[i], c->w->pages, "more children than there are pages");
        if (counts[i] < -1) finding("children", counts[i]);
    }
    return rc;
}

/* Without a draw of its own: a seed of the corpus stays what it was. */
static int match_groups(const call *c, const lc_key *keys, uint32_t n, lci_ns_ref ns) {
    lci_lease *leases[2] = {room(sizeof(lci_lease) + 8 * (size_t)n),
                            room(sizeof(lci_lease) + 24 * (size_t)n)};
    lci_group groups[2] = {{.h = c->w->h, .lease = leases[0], .align = INT64_MAX, .ns = ns, .parts = 1},
                           {.h = c->w->h, .lease = leases[1], .align = 1, .back = 9, .ns = ns,
                            .number = n % 2, .parts = 1 + n % 3}};
    int32_t limit;
    leases[0]->capacity = n;
    leases[1]->capacity = 3 * n;
    int rc = sane(lci_match_groups(groups, 2, keys, n, 4, 1, &limit), "match groups");
    at_most(rc, n, "groups found more than they were asked for");
    for (int i = 0; i < 2; i++) {
        at_most(leases[i]->held, n * groups[i].parts, "a group holds more than it was asked for");
        in_range(c->w, (int32_t *)(leases[i] + 1), leases[i]->held, "a group was given a page");
        rc = worse(rc, sane(lci_release(c->w->h, leases[i]), "release"));
        free(leases[i]);
    }
    int64_t offsets[4] = {0, n / 3, n / 3, n};
    int32_t found[6][3];
    for (int i = 0; i < 2; i++) {
        leases[i] = groups[i].lease = room(sizeof(lci_lease) + (i ? 24 : 8) * (size_t)n);
        leases[i]->capacity = i ? 3 * n : n;
    }
    rc = worse(rc, sane(lci_match_groups_many(groups, 2, keys, offsets, 3, 4, 1, *found), "match groups"));
    for (int i = 0; i < 2; i++) {
        at_most(leases[i]->held, n * groups[i].parts, "a group holds more than it was asked for");
        in_range(c->w, (int32_t *)(leases[i] + 1), leases[i]->held, "a group was given a page");
        rc = worse(rc, sane(lci_release(c->w->h, leases[i]), "release"));
        free(leases[i]);
        groups[i].lease = NULL;
    }
    int peeked = sane(lci_peek_groups(groups, 2, keys, n, 4, 1, &limit), "peek groups");
    at_most(peeked, n, "groups found more than they were asked for");
    return worse(rc, peeked);
}

/* What was matched once more, by its numbers, and given back by them. Without a draw of its own. */
static int pin_pages(const call *c, const lci_lease *matched) {
    const int32_t *pages = (const int32_t *)(matched + 1);
    lci_lease *lease = room(sizeof *lease + 8 * (size_t)matched->held);
    uint32_t gens[MOST_KEYS] = {0}, refused = 0, n = matched->held;
    int rc = sane(lci_keys_of(c->w->h, pages, n, NULL, gens, &refused), "generations");
    at_most(refused, n, "generations refused a page");
    rc = worse(rc, sane(lci_pin_pages(c->w->h, pages, gens, n, lease, &refused), "pin pages"));
    at_most(refused, n, "pinning refused a page");
    at_most(lease->held, n, "a pin by number holds more than it was asked for");
    in_range(c->w, (int32_t *)(lease + 1), lease->held, "a page was pinned by its number");
    int given = sane(lci_release_pages(c->w->h, lease, pages, n / 2), "release pages");
    at_most(given, n / 2, "more pages were given back than were named");
    rc = worse(rc, given < 0 ? given : LC_OK);
    rc = worse(rc, sane(lci_release(c->w->h, lease), "release"));
    free(lease);
    return rc;
}

static int match(call *c) {
    lc_key keys[MOST_KEYS];
    uint32_t n = some_keys(c, keys, MOST_KEYS);
    lci_lease *lease = room(sizeof *lease + 8 * (size_t)n);
    lci_ns_ref ns = some_namespace(c); /* drawn first, as compilers have drawn it in the arguments */
    lci_handle *h = some_handle(c);
    int rc = sane(lci_match1(h, keys, n, ns, lease), "match");
    at_most(lease->held, n, "match holds more than it was asked for");
    in_range(c->w, (int32_t *)(lease + 1), lease->held, "match handed out a page");
    rc = worse(rc, pin_pages(c, lease));
    rc = worse(rc, sane(lci_release(c->w->h, lease), "release"));
    free(lease);
    return worse(rc, match_groups(c, keys, n, ns));
}

static int match_many(call *c) {
    lc_key keys[MOST_KEYS];
    uint32_t n = some_keys(c, keys, MOST_KEYS);
    int64_t offsets[4] = {0, n / 3, n / 3, n};
    int32_t counts[3] = {0, 0, 0};
    lci_lease *lease = room(sizeof *lease + 8 * (size_t)n);
    int rc = sane(lci_match(c->w->h, keys, offsets, 3, some_namespace(c), lease, counts), "match");
    at_most(lease->held, n, "match holds more than it was asked for");
    in_range(c->w, (int32_t *)(lease + 1), lease->held, "match handed out a page");
    rc = worse(rc, sane(lci_release(c->w->h, lease), "release"));
    free(lease);
    return rc;
}

static int wait(call *c) {
    lc_key keys[8];
    world_keys(keys, below(c->r, 9), 8);
    uint64_t limit = lcs_now_ns() + UINT64_C(1000000);
    return sane(lci_wait(some_handle(c), keys, 8, limit), "wait");
}

/* ------------------------------------------------------------------ writing */

typedef struct reserving {
    lc_key keys[MOST_KEYS];
    lci_reserve_op op;
    uint32_t n, start, made;
    int32_t *page, *fresh;
    uint8_t *status;
} reserving;

/* A page that was handed out twice would be written by two. */
static void distinct(const int32_t *pages, uint32_t n) {
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t k = 0; k < i; k++)
            if (pages[i] == pages[k]) finding("a page was handed out twice", pages[i]);
}

/* My reservation of the picture, still being written. */
static bool open_stands(const world *w) {
    const lci_reservation *r = &w->h->res[w->open.rid];
    return w->open.gen && lc_load(&r->gen) == w->open.gen &&
           lc_load(&r->state) == LCI_RES_ACTIVE && !lci_complete(r);
}

/* In the mixed world alone: elsewhere cases draw what they drew before there were two kinds. */
static uint32_t some_kind(call *c) {
    return c->w->variant == MIXED_WORLD ? below(c->r, 2) : 0;
}

static int begin_reserve(call *c, reserving *v, uint32_t shards) {
    world *w = c->w;
    /* Whoever finds a repair unfinished repairs, which may end a damaged reservation. */
    bool stood = open_stands(w) && !lc_load(&w->h->root->repairing);
    v->n = some_keys(c, v->keys, (uint32_t)w->pages);
    v->start = below(c->r, v->n + 1) / 2;
    v->made = 0;
    v->page = room(4 * (size_t)(v->n - v->start));
    v->fresh = room(4 * (size_t)(v->n - v->start));
    v->status = room(v->n - v->start);
    v->op = (lci_reserve_op){.shards = shards, .ns = some_namespace(c)};
    v->op.run = some_kind(c);
    v->op.admission = v->n % 2;
    v->op.hint = v->n;
    if (v->n % 3 == 2) { /* without a draw, as above */
        v->op.run *= 3;
        v->op.group = v->n % LCI_NUMBERS;
        v->op.whole = v->op.run;
    }
    int rc = sane(lci_worth(w->h, v->keys, v->n, v->start, v->op.ns, v->n, v->n % 5 == 4), "worth");
    at_most(rc, v->n - v->start, "more pages are worth writing than there are");
    for (int i = 0; i < 3; i++) {
        rc = sane(lci_reserve(w->h, &v->op, v->keys, v->n, v->start, v->page, v->status, c->wait,
                              c->deadline),
                  "reserve");
        if (rc != LC_E_GROW) break;
        at_most(v->op.wanted, LCI_BATCH, "reserve wants memory for more pages than it works on");
        sane(lci_grow(w->h, below(c->r, w->pages + 1), c->wait, c->deadline), "grow");
    }
    for (uint32_t i = 0; i < v->n - v->start; i++) {
        if (v->status[i] > LCI_NO_ROOM) finding("reserve gave a status", v->status[i]);
        if (v->status[i] == LCI_PRESENT || v->status[i] == LCI_NEW || v->status[i] == LCI_BUSY_KEY)
            in_range(w, &v->page[i], 1, "reserve handed out a page");
        if (v->status[i] == LCI_NEW) v->fresh[v->made++] = v->page[i];
    }
    distinct(v->fresh, v->made);
    if (stood && !c->moving && v->op.gen && v->op.rid == w->open.rid)
        finding("reserve took a reservation that is in use", v->op.rid);
    if (rc == (int)v->made && v->made && !c->moving)
        at_most(v->made, lc_load(&w->h->res[v->op.rid].pages.count), "reserve listed fewer pages");
    return rc;
}

static int end_reserve(call *c, reserving *v) {
    int rc = sane(lci_unreserve(c->w->h, &v->op, v->page, v->status, v->n - v->start), "unreserve");
    free(v->page);
    free(v->fresh);
    free(v->status);
    return rc;
}

static int reserve_publish(call *c) {
    reserving v;
    int rc = begin_reserve(c, &v, 1);
    if (rc > 0)
        rc = sane(lci_publish(c->w->h, v.op.rid, v.op.gen, 0, v.fresh, v.made), "publish");
    return worse(rc, end_reserve(c, &v));
}

static int reserve_abandon(call *c) {
    reserving v;
    int rc = begin_reserve(c, &v, 1 + below(c->r, LCI_SHARDS));
    if (v.op.gen)
        rc = worse(rc, sane(lci_abandon(c->w->h, v.op.rid, v.op.gen, c->wait, c->deadline),
                            "abandon"));
    return worse(rc, end_reserve(c, &v));
}

/* Two chains in one call, each with its own record of progress. */
static int reserve_several(call *c) {
    world *w = c->w;
    enum { CHAINS = 2 };
    lc_key keys[CHAINS * MOST_KEYS];
    int64_t offsets[CHAINS + 1] = {0}, starts[CHAINS];
    lci_reserve_op ops[CHAINS];
    uint32_t most = (uint32_t)w->pages / CHAINS, rest = 0;
    for (uint32_t i = 0; i < CHAINS; i++) {
        uint32_t n = some_keys(c, keys + offsets[i], most < MOST_KEYS ? most : MOST_KEYS);
        offsets[i + 1] = offsets[i] + n;
        starts[i] = below(c->r, n + 1) / 2;
        rest += n - (uint32_t)starts[i];
        ops[i] = (lci_reserve_op){.shards = 1 + below(c->r, 3), .ns = some_namespace(c)};
        ops[i].run = some_kind(c);
    }
    int32_t *page = room(4 * (size_t)rest), *fresh = room(4 * (size_t)rest), codes[CHAINS];
    uint8_t *status = room(rest);
    int rc = sane(lci_reserve_many(w->h, ops, keys, offsets, starts, CHAINS, page, status, c->wait,
                                   c->deadline),
                  "reserve many");
    uint32_t made = 0;
    for (uint32_t i = 0; i < rest; i++) {
        if (status[i] > LCI_NO_ROOM) finding("reserve many gave a status", status[i]);
        if (status[i] == LCI_NEW) in_range(w, &page[i], 1, "reserve many handed out a page");
        if (status[i] == LCI_NEW) fresh[made++] = page[i];
    }
    /* Between two holds of the lock our row's count may be overwritten, which alone says whose it is. */
    if (!c->moving) distinct(fresh, made);
    at_most((int64_t)ops[0].made + ops[1].made, made, "reserve many says it made more pages");
    if (rc == LC_OK && below(c->r, 2)) {
        rc = sane(lci_publish_many(w->h, ops, CHAINS, fresh, codes), "publish many");
        for (uint32_t i = 0; i < CHAINS; i++) sane(codes[i], "publish one of many");
    }
    rc = worse(rc, sane(lci_unreserve_many(w->h, ops, offsets, starts, CHAINS, page, status),
                        "unreserve many"));
    free(page);
    free(fresh);
    free(status);
    return rc;
}

/* What the picture holds open goes on: one shard, the other, or its end. */
static int publish_open(call *c) {
    world *w = c->w;
    int rc = sane(lci_publish(w->h, w->open.rid, w->open.gen, below(c->r, 3), w->open_pages,
                              w->open_count),
                  "publish");
    at_most(rc, 1, "publish");
    return rc;
}

static int abandon_open(call *c) {
    return sane(lci_abandon(c->w->h, c->w->open.rid, c->w->open.gen, c->wait, c->deadline),
                "abandon");
}

static int evict(call *c) {
    uint32_t freed = 0, want = below(c->r, 4) ? 1 + below(c->r, 5) : UINT32_MAX;
    int rc = sane(lci_evict_pages(c->w->h, want, &freed, c->wait, c->deadline), "evict");
    at_most(freed, want, "evict freed more than it was asked for");
    return rc;
}

/* ------------------------------------------------------------------ keeping, letting go */

static int keep(call *c) {
    lc_key keys[MOST_KEYS];
    uint32_t n = some_keys(c, keys, MOST_KEYS);
    lci_walk_op op = {0}, first = {0};
    int kept = below(c->r, 2) != 0; /* drawn first, as compilers have drawn it in the arguments */
    lci_ns_ref ns = some_namespace(c);
    int rc = sane(lci_keep(c->w->h, keys, n, ns, kept, &op, c->wait, c->deadline), "keep");
    at_most(op.cursor, n, "keep came further than its keys");
    at_most(op.pages, n, "keep changed more than it was asked for");
    rc = worse(rc, sane(lci_evict_first(c->w->h, keys, n, ns, &first, c->wait, c->deadline),
                        "evict first"));
    at_most(first.cursor, n, "evict first came further than its keys");
    at_most(first.pages, n, "evict first changed more than it was asked for");
    return rc;
}

static int drop(call *c) {
    lc_key keys[MOST_KEYS];
    uint32_t n = some_keys(c, keys, MOST_KEYS), start = below(c->r, n + 1) / 2;
    lci_walk_op op = {0};
    int rc = sane(lci_drop(c->w->h, keys, n, start, some_namespace(c), &op, c->wait, c->deadline),
                  "drop");
    at_most(op.pages, n - start, "drop freed more than it was asked for");
    return rc;
}

static uint32_t *order_of(const int32_t *pages, uint32_t n) {
    uint32_t *order = room(4 * (size_t)n);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = i;
        for (; at && pages[order[at - 1]] > pages[i]; at--) order[at] = order[at - 1];
        order[at] = i;
    }
    return order;
}

/* What was listed is copied away, then given up, unless the caller thinks better of it. */
static int oldest(call *c) {
    world *w = c->w;
    uint32_t want = below(c->r, 70), bad = 0, parents[70];
    lci_lease *lease = room(sizeof *lease + 8 * (size_t)want);
    int32_t *listed = (int32_t *)(lease + 1), pages[70];
    lc_key keys[70], again[70];
    uint8_t done[70] = {0};
    lci_oldest_op op = {.want = want, .keep_order = below(c->r, 2)};
    int rc = sane(lci_oldest(w->h, &op, lease, keys, parents, c->wait, c->deadline), "oldest");
    uint32_t n = lease->held;
    at_most(n, want, "oldest listed more than it was asked for");
    in_range(w, listed, n, "oldest listed a page");
    distinct(listed, n);
    rc = worse(rc, sane(lci_keys_of(w->h, listed, n, again, NULL, &bad), "keys of pages"));
    at_most(bad, n, "keys of pages refused a page");
    memcpy(pages, listed, 4 * (size_t)n);
    uint32_t *order = order_of(pages, n), hits[70];
    memcpy(hits, listed + want, 4 * (size_t)n);
    lci_discard_op gone = {0};
    if (below(c->r, 4))
        rc = worse(rc, sane(lci_discard(w->h, &gone, lease, pages, below(c->r, 2) ? hits : NULL,
                                        order, done, n, c->wait, c->deadline),
                            "discard"));
    at_most(gone.freed, n, "discard freed more than it was asked for");
    rc = worse(rc, sane(lci_discard_end(w->h, &gone, pages, done, n), "discard end"));
    rc = worse(rc, sane(lci_release(w->h, lease), "release"));
    free(order);
    free(lease);
    return rc;
}

/* Pages that nobody gave us, in no order. */
static int discard_strange(call *c) {
    lci_discard_op op = {0};
    int32_t pages[8];
    uint8_t done[8] = {0};
    for (int i = 0; i < 8; i++) pages[i] = (int32_t)below(c->r, c->w->pages + 2);
    uint32_t *order = order_of(pages, 8);
    int rc = sane(lci_discard(c->w->h, &op, NULL, pages, NULL, order, done, 8, c->wait, c->deadline),
                  "discard");
    rc = worse(rc, sane(lci_discard_end(c->w->h, &op, pages, done, 8), "discard end"));
    free(order);
    return rc;
}

static int grow(call *c) {
    return sane(lci_grow(c->w->h, below(c->r, c->w->pages + 2), c->wait, c->deadline), "grow");
}

/* ------------------------------------------------------------------ namespaces */

static int namespaces(call *c) {
    static const char *const names[] = {"", "new", "old", "other"};
    const char *weights = names[below(c->r, 4)];
    lci_ns_ref ref = 0;
    int rc = sane(lci_namespace_find(some_handle(c), weights, "tenant", &ref), "namespace find");
    lci_ns_limits limits = {.quota = below(c->r, 9), .minimum = below(c->r, 9)};
    uint64_t others;
    if (below(c->r, 2)) limits.minimum = UINT32_MAX;
    rc = worse(rc, sane(lci_group_minimum(c->w->h, below(c->r, LCI_NUMBERS + 1), below(c->r, 9), &others,
                                          c->wait, c->deadline), "group minimum"));
    return worse(rc, sane(lci_namespace_limits(c->w->h, weights, below(c->r, 2) ? "tenant" : "",
                                               &limits, &ref, c->wait, c->deadline),
                          "namespace open"));
}

static int clear(call *c) {
    world *w = c->w;
    bool free = lc_load(&lcs_lock_of(w->me)->word) == 0;
    int rc = sane(lci_clear(w->h, some_namespace(c), c->wait, c->deadline), "clear");
    if (rc == LC_E_TIMEOUT && free && !c->moving) finding("clear waits for nobody", rc);
    return rc;
}

/* ------------------------------------------------------------------ tickets */

static int adopt_one(call *c, const lci_ticket_ref *ref) {
    world *w = c->w;
    int size = sane(lci_ticket_size(w->h, ref), "ticket size");
    if (size < 0) return size;
    at_most(size, (int64_t)w->g.chunks * LCI_CHUNK_PAGES, "a ticket is larger than all lists");
    if ((uint64_t)size > w->g.chunks * LCI_CHUNK_PAGES) return LC_E_CORRUPT;
    int32_t *pages = room(4 * (size_t)size);
    uint32_t held = 0, rid = 0, gen = 0;
    int rc = sane(lci_adopt(w->h, ref, below(c->r, 3), &held, pages, (uint32_t)size, &rid, &gen,
                            c->wait, c->deadline),
                  "adopt");
    at_most(held, size, "adopt holds more than there was room for");
    in_range(w, pages, held, "adopt handed out a page");
    if (rc >= 0 && rid != LC_NIL)
        at_most(rid, (int64_t)w->g.reservations - 1, "adopt's reservation");
    free(pages);
    if (rc >= 0) rc = worse(rc, sane(lci_ticket_done(w->h, ref, below(c->r, 2)), "done"));
    return rc;
}

static int adopt(call *c) { return adopt_one(c, &c->w->ticket); }
static int adopt_shard(call *c) { return adopt_one(c, &c->w->shard_ticket); }

static int ticket(call *c) {
    world *w = c->w;
    lci_ticket_status status;
    lci_ticket_ref made;
    int32_t pages[70];
    uint32_t n = below(c->r, 71);
    uint64_t expires = lcs_now_ns() + below(c->r, 1000000);
    for (uint32_t i = 0; i < n; i++) pages[i] = (int32_t)(i % (w->pages / 4)); /* all used */
    bool pinned = below(c->r, 8) != 0; /* else refused */
    for (uint32_t i = 0; i < n && pinned; i++) lci_pin_one(w->h, (uint32_t)pages[i]);
    int rc = sane(lci_ticket_give(w->h, pages, n, LC_NIL, 0, draw(c->r), expires, &made, c->wait,
                                  c->deadline),
                  "ticket");
    for (uint32_t i = 0; i < n && pinned; i++) lci_unpin_one(w->h, (uint32_t)pages[i]);
    if (rc == LC_OK) {
        rc = worse(rc, sane(lci_ticket_poll(w->h, &made, &status), "poll"));
        if (below(c->r, 2))
            rc = worse(rc, sane(lci_ticket_drop(w->h, &made, c->wait, c->deadline), "drop"));
        else
            rc = worse(rc, sane(lci_ticket_revoke(w->h, &made, c->wait, c->deadline), "revoke"));
    }
    rc = worse(rc, sane(lci_ticket_poll(w->reader_h, &w->given, &status), "poll"));
    return worse(rc, sane(lci_ticket_drop(w->h, &w->given, c->wait, c->deadline), "drop"));
}

/* ------------------------------------------------------------------ pages without a key */

/* Names for pages of ours, as far as they are; and what that says. */
static int name(call *c, const int32_t *pages, uint32_t n, int32_t *out) {
    lc_key keys[2 * MOST_KEYS];
    uint8_t status[MOST_KEYS] = {0};
    uint32_t cut = below(c->r, n + 1), front = below(c->r, MOST_KEYS);
    /* Two requests, the first behind `front` keys of a run, the second from another's root. */
    int64_t offsets[3] = {0, front + cut, front + n}, starts[2] = {front, 0};
    lci_held_op op = {.ns = some_namespace(c), .flags = below(c->r, 2)};
    if (some_kind(c)) op.flags |= LCI_NAME_INDEPENDENT;
    world_keys(keys, below(c->r, 10), front + cut);
    world_keys(keys + front + cut, below(c->r, 10), n - cut);
    for (uint32_t i = 0; i < n; i++) out[i] = 0;
    int rc = sane(lci_name(c->w->h, &op, keys, offsets, starts, 2, pages, n, out, status, c->wait,
                           c->deadline),
                  "name");
    at_most(op.done, n, "name settled more pages than there are");
    in_range(c->w, out, n, "name handed out a page");
    for (uint32_t i = 0; i < n; i++)
        if (status[i] > LCI_NO_ROOM) finding("name gave a status", status[i]);
    return rc;
}

static int free_held(call *c, const int32_t *pages, const uint32_t *gens, uint32_t n) {
    lci_held_op op = {.done = 0};
    int rc = sane(lci_free_held(c->w->h, &op, pages, gens, n, c->wait, c->deadline), "free");
    at_most(op.done, n, "free settled more pages than there are");
    return rc;
}

static int unname(call *c, const int32_t *pages, uint32_t n) {
    lci_held_op op = {.done = 0};
    int rc = sane(lci_unname(c->w->h, &op, pages, n, c->wait, c->deadline), "unname");
    at_most(op.done, n, "unname settled more pages than there are");
    return rc;
}

static int allocate(call *c) {
    int32_t pages[MOST_KEYS] = {0}, out[MOST_KEYS];
    uint32_t gens[MOST_KEYS] = {0}, n = below(c->r, MOST_KEYS + 1), refused = 0;
    lci_held_op op = {.done = 0};
    if (n > c->w->pages) n = (uint32_t)c->w->pages;
    at_most(sane(lci_may_allocate(some_handle(c), n, LCI_MEMORY_ASK), "may allocate"), 1, "may allocate");
    int rc = 0;
    for (int i = 0; i < 3; i++) {
        rc = sane(lci_allocate(c->w->h, &op, pages, gens, n, c->wait, c->deadline), "allocate");
        if (rc != LC_E_GROW) break;
        at_most(op.wanted, n, "allocate wants memory for more pages than it was asked for");
        sane(lci_grow(c->w->h, below(c->r, c->w->pages + 1), c->wait, c->deadline), "grow");
    }
    at_most(op.done, n, "allocate took more than it was asked for");
    in_range(c->w, pages, op.done, "allocate handed out a page");
    distinct(pages, op.done);
    if (below(c->r, 2)) rc = worse(rc, name(c, pages, op.done, out));
    if (below(c->r, 2)) rc = worse(rc, unname(c, pages, op.done));
    rc = worse(rc, free_held(c, pages, below(c->r, 2) ? gens : NULL, op.done));
    for (uint32_t i = 0; i < op.done; i++) {
        int one = sane(lci_unpin(c->w->h, &pages[i], 1, &refused), "unpin");
        if (one != LC_E_OWNER) rc = worse(rc, one);
    }
    return rc;
}

/* The same with what the picture holds, or has already. */
static int held_open(call *c) {
    int32_t out[MOST_KEYS];
    const int32_t *pages = c->w->held_pages;
    switch (below(c->r, 3)) {
    case 0: return name(c, pages, HELD_PAGES, out);
    case 1: return unname(c, pages, HELD_PAGES);
    default: return free_held(c, pages, NULL, HELD_PAGES);
    }
}

/* ------------------------------------------------------------------ clients */

static int reap(call *c) {
    int rc = 0;
    for (uint32_t slot = 1; slot < LCS_SLOTS; slot++) {
        int one = sane(lci_reap_slot(c->w->h, slot, c->wait, c->deadline), "reap");
        rc = worse(rc, one);
        if (one < 0) break; /* not 60 times the deadline */
    }
    return rc;
}

static int reap_unjoined(call *c) {
    lcs_attachment *at = world_stranger(c->w);
    lci_handle *h = lci_open(at, c->w->pages);
    int rc = h ? sane(lci_reap_unjoined(h, c->w->dead_slot ? c->w->dead_slot : 3, c->wait,
                                        c->deadline),
                      "reap")
               : LC_E_CORRUPT;
    if (h) lci_close(h);
    world_dismiss(at);
    return rc;
}

/* Come, look, and leave, as another process would. */
static int visit(call *c) {
    lcs_attachment *at = world_stranger(c->w);
    int slot = sane(lcs_slot_claim(at, "visitor", 0), "claim"), rc = slot;
    lci_handle *h = slot > 0 ? lci_open(at, c->w->pages) : NULL;
    if (slot > 0) at_most(slot, LCS_SLOTS - 1, "claim gave a slot");
    if (h) {
        rc = sane(lci_leave(h, c->wait, c->deadline), "leave");
        lci_close(h);
    }
    if (slot > 0) rc = worse(rc, sane(lcs_slot_release(at), "give back the slot"));
    world_dismiss(at);
    return rc;
}

static int leave(call *c) { return sane(lci_leave(c->w->h, c->wait, c->deadline), "leave"); }

static int slots(call *c) {
    int rc = 0;
    for (uint32_t slot = 0; slot <= LCS_SLOTS; slot++) {
        rc = worse(rc, sane(lcs_slot_alive(c->w->me, slot), "alive"));
        lcs_thread_gone(c->w->me, slot, below(c->r, 3));
    }
    return worse(rc, sane(lcs_slot_free_dead(c->w->me, below(c->r, LCS_SLOTS)), "free a slot"));
}

/* ------------------------------------------------------------------ the rest */

static int count(call *c) {
    lci_counts counts;
    uint32_t pages[2 * LCI_NUMBERS];
    lci_handle *h = some_handle(c);
    int rc = sane(lci_count(h, &counts), "count");
    return worse(rc, sane(lci_count_groups(h, pages), "count_groups"));
}

static int checked(call *c) {
    world *w = c->w;
    lci_report report;
    int rc = sane(lci_copy(w->h, w->scratch, w->bytes, LC_BLOCK, c->deadline), "copy");
    if (rc != LC_OK) memcpy(w->scratch, w->base, w->bytes);
    rc = worse(rc, lci_recover_copy(w->scratch, w->bytes, w->pages));
    NEED(lci_check(w->scratch, w->bytes, w->pages, 1, &report) == LC_OK);
    if (!memchr(report.message, 0, sizeof report.message)) finding("check's message has no end", 0);
    return rc;
}

static int repair(call *c) { return sane(lci_repair(c->w->h, c->wait, c->deadline), "repair"); }

/* The lock of a plain segment, whose log names words of its user. */
static int robust(call *c) {
    if (lc_load(&lcs_lock_of(c->w->me)->log_count)) return LC_OK;
    int rc = sane(lcs_robust_take(c->w->me, 0, c->wait, c->deadline), "take");
    if (rc >= 0) rc = worse(rc, sane(lcs_robust_drop(c->w->me), "drop"));
    return rc;
}

static int events(call *c) {
    lcs_attachment *at = below(c->r, 2) ? c->w->me : c->w->reader;
    uint64_t where = c->w->g.root + offsetof(lci_root, event);
    uint32_t seen = 0;
    int rc = sane(lcs_event_read(at, where, &seen), "event");
    rc = worse(rc, sane(lcs_event_wait(at, where, seen, 50000), "event"));
    return worse(rc, sane(lcs_event_notify(at, where), "event"));
}

const operation operations[] = {
    {"peek", peek},
    {"peek_many", peek_many},
    {"deepest", deepest},
    {"children", children},
    {"match", match},
    {"match_many", match_many},
    {"wait", wait},
    {"reserve and publish", reserve_publish},
    {"reserve and abandon", reserve_abandon},
    {"reserve many", reserve_several},
    {"publish", publish_open},
    {"abandon", abandon_open},
    {"evict", evict},
    {"keep and evict first", keep},
    {"drop", drop},
    {"oldest and discard", oldest},
    {"discard", discard_strange},
    {"grow", grow},
    {"namespace", namespaces},
    {"clear", clear},
    {"adopt", adopt},
    {"adopt a shard", adopt_shard},
    {"ticket", ticket},
    {"allocate", allocate},
    {"held", held_open},
    {"reap", reap},
    {"reap unjoined", reap_unjoined},
    {"visit", visit},
    {"slots", slots},
    {"count", count},
    {"check", checked},
    {"robust lock", robust},
    {"events", events},
    {"repair", repair},
    {"leave", leave},
};
const uint32_t operation_count = sizeof operations / sizeof operations[0];
