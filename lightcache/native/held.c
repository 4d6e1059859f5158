/* Pages without a key: taken for content that has no name yet, and given back. A page that is HELD
 * is in no structure; its word names its client. That client pins it in its own row; others may pin
 * it as well (through a ticket). Names are in naming.c. */
#include "index.h"

/* ------------------------------------------------------------------ giving back */

/* From here the pages have no owner, and stay as long as they have pins. */
void lci_doom_held(lci_handle *h, lc_txn *t, const uint32_t *pages, uint32_t n, uint32_t flags) {
    for (uint32_t i = 0; i < n; i++) {
        lc_txn_set(t, &h->pages[pages[i]].word, LCI_DOOMED | flags);
        lc_list_append(t, &h->lists, pages[i], LCI_DOOMED_LIST);
    }
    if (!n) return;
    lc_txn_add(t, &h->root->held, -n);
    lc_txn_add(t, &h->root->doomed, n);
}

/* After the commit that doomed them: our pin is removed, and the page freed unless another client
 * pins it. Not before the commit: a death would leave a page that is held and has no pin. The
 * caller holds `rows`. */
void lci_let_held_go(lci_handle *h, lc_txn *t, const uint32_t *pages, uint32_t n) {
    for (uint32_t i = 0; i < n; i++)
        if (lc_load(&h->mine[pages[i]])) lci_unpin_one(h, pages[i]);
    if (!n) return;
    /* No fence before the pins: no client confirms a pin of such a page without the lock. */
    for (uint32_t i = 0; i < n && !t->error; i++)
        if (!lci_pinned(h, &h->pages[pages[i]])) lci_free_doomed(h, t, pages[i]);
    lci_step(t);
}

/* Is it in our hands still as we took it, under no name since? Taking and naming move its
 * generation on. */
static bool as_taken(const lci_handle *h, uint32_t page, uint32_t gen) {
    return lci_holds(h, page) && lc_load(&h->pages[page].gen) == gen;
}

/* One step: at most a batch of pages that are ours, each once; of those with generations, what is as
 * we took it. */
static int free_batch(lci_handle *h, lc_txn *t, lci_held_op *op, const int32_t *from,
                      const uint32_t *gens, uint32_t n) {
    uint32_t pages[LCI_BATCH], count = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t page = (uint32_t)from[i];
        op->refused = op->done + i;
        if (gens && !as_taken(h, page, gens[i])) continue;
        if (!lci_holds(h, page)) return t->error = LC_E_OWNER;
        pages[count++] = page;
        lci_doom_held(h, t, &page, 1, 0);
    }
    lci_step(t);
    if (t->error) return t->error;
    pthread_mutex_lock(&h->at->rows);
    lci_let_held_go(h, t, pages, count);
    pthread_mutex_unlock(&h->at->rows);
    return t->error;
}

/* Before anything is changed: are all of them ours? */
static int all_ours(const lci_handle *h, lci_held_op *op, const int32_t *pages, uint32_t n) {
    for (uint32_t i = 0; i < n && !op->checked; i++) {
        op->refused = i;
        if (!lci_holds(h, (uint32_t)pages[i])) return LC_E_OWNER;
    }
    op->checked = 1;
    return LC_OK;
}

static uint32_t batch(uint32_t left) { return left < LCI_BATCH ? left : LCI_BATCH; }

/* Give back pages that we hold. LC_E_OWNER: `op->refused` is not ours; nothing after `op->done`
 * has changed. With the generations that lci_allocate gave, pages that have been named since, or
 * given back, are left alone instead. LC_E_BUSY, LC_E_INTR: call again with the same `op`. */
LC_API int lci_free_held(lci_handle *h, lci_held_op *op, const int32_t *pages,
                         const uint32_t *gens, uint32_t n, int wait, uint64_t deadline) {
    lc_txn t;
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    uint64_t begun = lcs_now_ns();
    while (op->done < n) {
        rc = lci_lock(h, &t, LCI_OP_FREE, wait, deadline);
        if (rc != LC_OK) return rc;
        rc = gens ? LC_OK : all_ours(h, op, pages, n);
        for (uint32_t work = 0; rc == LC_OK && op->done < n && work < LCI_HOLD; work += LCI_BATCH) {
            uint32_t count = batch(n - op->done);
            rc = free_batch(h, &t, op, pages + op->done, gens ? gens + op->done : NULL, count);
            if (rc == LC_OK) op->done += count;
        }
        int dropped = lci_unlock(h, &t);
        if (rc == LC_OK) rc = dropped;
        if (rc == LC_OK && op->done < n) rc = lci_again(begun, wait, deadline);
        if (rc != LC_OK) return rc;
    }
    return LC_OK;
}

/* ------------------------------------------------------------------ taking */

typedef struct taking {
    lci_handle *h;
    lci_held_op *op;
    int32_t *out;
    uint32_t *gens;
    uint32_t n;
    lc_txn t;
    lci_room room;
} taking;

/* A free page becomes ours, pinned first. Its generation increases: a client that is just pinning
 * it as it was before, and loses its bit here, then fails; and `repair` sees that it was used. The
 * caller holds `rows`. */
static bool take_page(taking *k, uint32_t page) {
    lci_page *p = &k->h->pages[page];
    if (!lci_pin_free(k->h, page)) {
        k->t.error = LC_E_CORRUPT;
        return false;
    }
    lc_store_release(&p->gen, (lc_load(&p->gen) | 1) + 1);
    lc_txn_set(&k->t, &p->word, lci_held_word(k->h->at->slot));
    return true;
}

/* Pin and commit under `rows`; a step that failed gives its pins back by hand. */
static int take_pages(taking *k, const uint32_t *pages, uint32_t n) {
    lci_handle *h = k->h;
    uint32_t pinned = 0;
    pthread_mutex_lock(&h->at->rows);
    for (; pinned < n; pinned++)
        if (!take_page(k, pages[pinned])) break;
    lc_txn_add(&k->t, &h->root->held, n);
    lci_step(&k->t);
    for (uint32_t i = 0; i < n && !k->t.error; i++) {
        k->out[k->op->done + i] = (int32_t)pages[i];
        k->gens[k->op->done + i] = lc_load(&h->pages[pages[i]].gen);
    }
    while (k->t.error && pinned) lci_unpin_one(h, pages[--pinned]);
    if (!k->t.error) k->op->done += n;
    pthread_mutex_unlock(&h->at->rows);
    return k->t.error;
}

static int take_batch(taking *k) {
    uint32_t pages[LCI_BATCH], want = batch(k->n - k->op->done);
    int rc = lci_make_room(k->h, &k->t, &k->room, want);
    if (rc == LC_E_GROW) k->op->wanted = k->room.wanted + (k->n - k->op->done - want);
    if (rc != LCI_ROOM_MADE) return rc;
    lci_step(&k->t); /* pages freed in this step must not be used again in it */
    uint32_t have = lci_available(k->h);
    if (have < want) return k->t.error ? k->t.error : LC_E_FULL;
    if (lci_take_free(k->h, &k->t, pages, want) != want && !k->t.error) k->t.error = LC_E_CORRUPT;
    for (uint32_t i = 0; i < want && !k->t.error; i++) lc_prefetch_write(&k->h->pages[pages[i]]);
    return k->t.error ? k->t.error : take_pages(k, pages, want);
}

/* Is it impossible? Pages that are being written or held cannot be evicted for us, and memory that
 * cannot grow does not count. */
static bool too_many(const taking *k) {
    const lci_root *r = k->h->root;
    uint64_t kept = (uint64_t)lc_load(&r->writing) + lc_load(&r->held) - k->op->done;
    return kept + k->n > (lci_may_grow(k->h, &k->room) ? k->h->page_count : lc_load(&r->grown));
}

/* Work under one hold of the lock. */
static int take_some(taking *k) {
    lci_handle *h = k->h;
    uint32_t ended = lci_collect(h, &k->t, LCI_HOLD);
    if (lc_load(&h->root->ticket_used)) lci_settle_tickets(h, &k->t, 256);
    if (k->t.error) return k->t.error;
    if (ended >= LCI_HOLD) return LC_OK; /* more may have ended that still counts as written */
    if (too_many(k)) return LC_E_FULL;
    for (uint32_t work = 0; k->op->done < k->n && work < LCI_HOLD; work += LCI_BATCH) {
        int rc = take_batch(k);
        if (rc == LCI_ROOM_AGAIN) return LC_OK;
        if (rc != LC_OK) return rc;
        if (lci_give_way(h, work + LCI_BATCH)) break;
    }
    return LC_OK;
}

/* From the end: `done` says at every instant what is ours. */
static int give_some(taking *k) {
    for (uint32_t work = 0; k->op->done && work < LCI_HOLD; work += LCI_BATCH) {
        uint32_t n = batch(k->op->done), from = k->op->done - n;
        int rc = free_batch(k->h, &k->t, k->op, k->out + from, NULL, n);
        if (rc != LC_OK) return rc;
        k->op->done = from;
    }
    return LC_OK;
}

/* LC_E_FULL, and not yet `giving`: there is not enough, and what was taken is still held. */
static int allocate_locked(taking *k, int wait, uint64_t deadline) {
    lci_held_op *op = k->op;
    uint64_t begun = lcs_now_ns();
    lci_look_begin(k->h, &op->look, begun);
    while (op->giving ? op->done > 0 : op->done < k->n) {
        int rc = lci_lock(k->h, &k->t, LCI_OP_ALLOCATE, wait, deadline);
        if (rc != LC_OK) return rc;
        rc = op->giving ? give_some(k) : take_some(k);
        int dropped = lci_unlock(k->h, &k->t);
        if (dropped != LC_OK) return dropped;
        if (rc != LC_OK) return rc;
        bool more = op->giving ? op->done > 0 : op->done < k->n;
        if (more && (rc = lci_again(begun, wait, deadline)) != LC_OK) return rc;
    }
    return op->giving ? LC_E_FULL : LC_OK;
}

/* As reserve_all: before what was taken is given back, a dead client may have what is lacking. */
static int allocate_all(taking *k, int wait, uint64_t deadline) {
    lci_handle *h = k->h;
    lci_held_op *op = k->op;
    for (;;) {
        if (wait == LC_TRY ? pthread_mutex_trylock(&h->at->door)
                           : pthread_mutex_lock(&h->at->door))
            return LC_E_BUSY;
        int rc = allocate_locked(k, wait, deadline);
        pthread_mutex_unlock(&h->at->door);
        bool less = rc == LC_E_FULL && !op->giving;
        if (!less && (rc != LC_OK || LC_LIKELY(!op->look.due))) return rc;
        int found = lci_look(h, &op->look, less, wait, deadline);
        if (found < 0) return found;
        if (!less) return LC_OK;
        if (found) {
            lci_room_again(h, &k->room, &op->tick);
        } else {
            op->giving = 1;
            op->reason = lc_load(&h->root->grown) < h->page_count ? LCI_WHY_MEMORY : LCI_WHY_PINNED;
        }
    }
}

/* Take n free pages, evicting as lci_reserve does: all of them, or none (LC_E_FULL, with a reason).
 * LC_E_BUSY, LC_E_INTR, LC_E_GROW: call again with the same `op`. After any other error the first
 * `op->done` of `pages` are ours all the same, for the caller to give back. */
LC_API int lci_allocate(lci_handle *h, lci_held_op *op, int32_t *pages, uint32_t *gens,
                        uint32_t n, int wait, uint64_t deadline) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    if (lc_load(&lcs_header_of(h->at)->disabled) && !op->giving) return LC_E_DISABLED;
    if (n > h->page_count) return LC_E_RANGE;
    taking k = {.h = h, .op = op, .out = pages, .gens = gens, .n = n};
    if (!op->tick) op->tick = lci_next_tick(h);
    k.room.eviction.since = op->tick;
    k.room.eviction.parked = &op->parked;
    k.room.look = &op->look;
    k.room.doomed = &op->doomed;
    k.room.no_memory = op->no_memory != 0;
    return allocate_all(&k, wait, deadline);
}

/* ------------------------------------------------------------------ without the lock */

/* Release one pin of each page. LC_E_OWNER: `*refused` is not pinned by us (so often), or held by us
 * by this pin alone: nothing was released. No lock. */
LC_API int lci_unpin(lci_handle *h, const int32_t *pages, uint32_t n, uint32_t *refused) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK && rc != LC_E_RETIRED) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    pthread_mutex_lock(&h->at->rows);
    uint32_t i = 0;
    for (rc = LC_OK; i < n; i++) {
        uint32_t page = (uint32_t)pages[i];
        uint32_t pins = page < h->page_count ? lc_load(&h->mine[page]) : 0;
        if (pins == 0 || (pins == 1 && lci_holds(h, page))) {
            *refused = i;
            rc = LC_E_OWNER;
            break;
        }
        lci_unpin_one(h, page);
    }
    /* Restore counts alone: a page taken in between is its taker's, and its bit is set. */
    while (rc != LC_OK && i) lci_pin_one(h, (uint32_t)pages[--i]);
    pthread_mutex_unlock(&h->at->rows);
    return rc;
}

/* How many pages could be had now, as far as our own pins tell: 1 if `want` could. Advice. No lock;
 * looks at the own row only when the totals do not decide. `memory`: LCI_MEMORY_*; LC_E_GROW: it
 * depends on that, and the caller says LCI_MEMORY_ASK. */
LC_API int lci_may_allocate(lci_handle *h, uint32_t want, uint32_t memory) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    const lci_root *r = h->root;
    uint64_t have = (uint64_t)lci_available(h) + lc_load(&r->doomed);
    uint64_t grown = lc_load(&r->grown), named = lc_load(&r->named), writing = lc_load(&r->writing);
    if (have >= want) return 1;
    if (grown < h->page_count) {
        if (memory == LCI_MEMORY_ALL) have += h->page_count - grown;
        else if (memory == LCI_MEMORY_ASK && !lci_no_memory_left(h)) return LC_E_GROW;
        if (have >= want) return 1;
    }
    uint64_t published = lci_uncollected(h);  /* a call that makes room collects them first */
    writing = writing > published ? writing - published : 0;
    have += named > writing ? named - writing : 0;
    for (uint32_t page = 0; page < h->page_count && have >= want; page++)
        if (lc_load(&h->mine[page]) && lci_state_of(lc_load(&h->pages[page].word)) == LCI_READY)
            have--;
    return have >= want;
}

/* ------------------------------------------------------------------ taking back from the dead */

bool lci_held_by(const lci_handle *h, uint32_t page, uint32_t slot) {
    return lc_load(&h->pages[page].word) == lci_held_word(slot);
}

/* Those of the pages, at most LCI_HOLD, that the dead client of `slot` (or we, leaving) still held
 * are doomed; its device may still be writing them. The lock has been taken since its death, so its
 * unfinished step is undone; it gets no more pages, and looking for them needs no lock. */
int lci_reap_held(lci_handle *h, uint32_t slot, const uint32_t *pages, uint32_t n, int wait,
                  uint64_t deadline) {
    lc_txn t;
    uint32_t i = 0, doomed = 0;
    while (i < n && !lci_held_by(h, pages[i], slot)) i++;
    if (i == n) return LC_OK;
    int rc = lci_lock(h, &t, LCI_OP_REAP, wait, deadline);
    if (rc != LC_OK) return rc;
    for (; i < n && !t.error; i++) {
        if (!lci_held_by(h, pages[i], slot)) continue;
        lci_doom_held(h, &t, &pages[i], 1, LCI_UNWRITTEN);
        if (++doomed % LCI_BATCH == 0) lci_step(&t);
    }
    return lci_unlock(h, &t);
}
