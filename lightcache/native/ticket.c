/* Tickets: pins handed from one client to others through the segment. While a page is in the
 * ticket's list, row 0 counts a pin for it. */
#include "index.h"

static uint64_t cache_tag(const lci_handle *h) {
    uint64_t tag;
    memcpy(&tag, lcs_header_of(h->at)->uuid, sizeof tag);
    return tag;
}

static bool has(const _Atomic uint32_t *mask, uint32_t slot) {
    return lc_load_acquire(&mask[slot / 32]) >> (slot % 32) & 1;
}

static uint64_t whole(const _Atomic uint32_t *mask) {
    return (uint64_t)lc_load_acquire(&mask[1]) << 32 | lc_load_acquire(&mask[0]);
}

/* Row 0 has one writer at a time, the holder of the lock; two counts share a logged word. */
static void count_row0(lci_handle *h, lc_txn *t, uint32_t page, int delta) {
    _Atomic uint16_t *count = lci_pin(h, 0, page);
    uint16_t old = lc_load(count);
    if ((delta > 0 && old == UINT16_MAX) || (delta < 0 && old == 0)) {
        t->error = delta > 0 ? LC_E_PINS : LC_E_CORRUPT;
        return;
    }
    _Atomic uint32_t *word = (_Atomic uint32_t *)(h->rows + (page & ~UINT32_C(1)));
    uint32_t value = lc_load(word);
    uint32_t shift = (page & 1) * 16;
    value = (value & ~(UINT32_C(0xffff) << shift)) | (uint32_t)(uint16_t)(old + delta) << shift;
    lc_txn_set(t, word, value);
    if (delta > 0) atomic_fetch_or_explicit(&h->pages[page].pins, 1, memory_order_relaxed);
}

/* Give back what row 0 holds for a ticket, chunk by chunk. */
static uint32_t unpin_ticket(lci_handle *h, lc_txn *t, lci_ticket *k) {
    uint32_t work = 0;
    const lci_chunk *c;
    while ((c = lci_list_chunk(h, &k->pages)) && !t->error) {
        uint32_t n = lci_list_part(h, t, &k->pages, c);
        for (uint32_t i = 0; i < n && !t->error; i++) {
            uint32_t page = lc_load(&c->page[i]);
            if (page >= h->page_count) t->error = LC_E_CORRUPT;
            else count_row0(h, t, page, -1);
        }
        if (t->error) break;
        lci_list_pop_chunk(h, t, &k->pages);
        lci_step(t);
        work += n;
    }
    if (lc_load(&k->pages.count)) t->error = LC_E_CORRUPT; /* it leads nowhere */
    return work;
}

static void free_ticket(lci_handle *h, lc_txn *t, lci_ticket *k) {
    lc_txn_set(t, &k->state, LCI_TICKET_FREE);
    lc_txn_add(t, &k->gen, 1);
    lc_txn_add(t, &h->root->ticket_used, (uint32_t)-1);
    uint32_t end = lci_ticket_end(h);
    if ((uint32_t)(k - h->tickets) + 1 != end) return;
    while (end && lc_load(&h->tickets[end - 1].state) == LCI_TICKET_FREE) end--;
    lc_txn_set(t, &h->root->ticket_end, end);
}

/* Adopters whose part is over: done, failed, or dead. */
static uint64_t settled(const lci_ticket *k, bool late) {
    uint64_t over = whole(k->done) | whole(k->failed);
    return late ? over | ~whole(k->adopted) : over;
}

/* Advance every ticket: its pins go when all have adopted it or cannot any more; a ticket that its
 * giver has dropped ends when the last adopter is done. Returns pages of work. */
uint32_t lci_settle_tickets(lci_handle *h, lc_txn *t, uint32_t budget) {
    uint64_t now = lcs_now_ns();
    uint32_t work = 0;
    uint32_t end = lci_ticket_end(h);
    for (uint32_t i = 0; i < end && work < budget && !t->error; i++) {
        lci_ticket *k = &h->tickets[i];
        uint32_t state = lc_load(&k->state);
        if (state != LCI_TICKET_OPEN && state != LCI_TICKET_DROPPED) continue;
        bool late = now >= lc_load(&k->deadline_ns);
        uint64_t all = whole(k->adopters);
        if (lc_load(&k->pages.count) && (late || (all & ~(whole(k->adopted) | settled(k, late))) == 0))
            work += unpin_ticket(h, t, k) + 1;
        if (t->error || lc_load(&k->pages.count)) continue;
        if (state == LCI_TICKET_DROPPED && (all & ~settled(k, late)) == 0) free_ticket(h, t, k);
        lci_step(t);
    }
    return work;
}

/* A client has died: what it gave is dropped, what it adopted or should have has failed. */
void lci_ticket_client_gone(lci_handle *h, lc_txn *t, uint32_t slot) {
    uint32_t end = lci_ticket_end(h);
    for (uint32_t i = 0; i < end && !t->error; i++) {
        lci_ticket *k = &h->tickets[i];
        uint32_t state = lc_load(&k->state);
        if (state == LCI_TICKET_FREE) continue;
        if (has(k->adopters, slot) && !has(k->done, slot))
            atomic_fetch_or(&k->failed[slot / 32], UINT32_C(1) << (slot % 32));
        if (lc_load(&k->giver) == slot && state == LCI_TICKET_BUILDING) {
            unpin_ticket(h, t, k);
            if (!t->error) free_ticket(h, t, k);
        } else if (lc_load(&k->giver) == slot) {
            lc_txn_set(t, &k->state, LCI_TICKET_DROPPED);
            lc_txn_set(t, &k->giver, 0);
        }
        lci_step(t);
    }
    lci_settle_tickets(h, t, 256); /* the rest is for later calls */
}

bool lci_ticket_awaited(const lci_handle *h, uint32_t slot, uint64_t dead) {
    if (!lc_load(&h->root->ticket_used)) return false;
    uint64_t now = lcs_now_ns();
    for (uint32_t i = 0, end = lci_ticket_end(h); i < end; i++) {
        const lci_ticket *k = &h->tickets[i];
        if (lc_load_acquire(&k->state) != LCI_TICKET_OPEN || lc_load(&k->giver) != slot) continue;
        if (now >= lc_load(&k->deadline_ns)) continue;
        if (whole(k->adopters) & ~(whole(k->adopted) | settled(k, false) | dead)) return true;
    }
    return false;
}

static lci_ticket *find_ticket(const lci_handle *h, const lci_ticket_ref *ref, int *rc) {
    *rc = LC_OK;
    if (ref->cache != cache_tag(h) || ref->index >= h->ticket_count) *rc = LC_E_MISSING;
    else if (lc_load_acquire(&h->tickets[ref->index].gen) != ref->gen) *rc = LC_E_STALE;
    return *rc == LC_OK ? &h->tickets[ref->index] : NULL;
}

static int open_ticket(lci_handle *h, lc_txn *t, uint32_t rid, uint32_t rgen, uint64_t adopters,
                       uint64_t deadline, lci_ticket_ref *ref) {
    for (uint32_t i = 0; i < h->ticket_count; i++) {
        lci_ticket *k = &h->tickets[i];
        if (lc_load(&k->state) != LCI_TICKET_FREE) continue;
        uint32_t gen = lc_load(&k->gen) + 1;
        lc_txn_set(t, &k->gen, gen);
        /* Dead until the record is BUILDING, so not logged. */
        lc_store(&k->giver, h->at->slot);
        lc_store(&k->giver_epoch, h->at->epoch);
        lc_store(&k->deadline_ns, deadline);
        lc_store(&k->total, 0);
        lc_store(&k->pages.count, 0);
        lc_store(&k->pages.first, LC_NIL);
        lc_store(&k->pages.last, LC_NIL);
        lc_store(&k->reservation, rid == LC_NIL ? 0 : rid + 1);
        lc_store(&k->reservation_gen, rgen);
        for (int w = 0; w < 2; w++) {
            lc_store(&k->adopters[w], (uint32_t)(adopters >> (32 * w)));
            lc_store(&k->adopted[w], 0);
            lc_store(&k->done[w], 0);
            lc_store(&k->failed[w], 0);
        }
        lc_txn_set(t, &k->state, LCI_TICKET_BUILDING);
        lc_txn_add(t, &h->root->ticket_used, 1);
        if (i >= lci_ticket_end(h)) lc_txn_set(t, &h->root->ticket_end, i + 1);
        lci_step(t);
        *ref = (lci_ticket_ref){.index = i, .gen = gen, .cache = cache_tag(h)};
        return LC_OK;
    }
    return LC_E_FULL;
}

static int fill_ticket(lci_handle *h, lc_txn *t, lci_ticket *k, const int32_t *pages, uint32_t n) {
    for (uint32_t i = 0; i < n && !t->error; i++) {
        uint32_t page = (uint32_t)pages[i];
        if (lci_list_push(h, t, &k->pages, &page, 1) == 0) return t->error ? t->error : LC_E_FULL;
        count_row0(h, t, page, 1);
        if (i % 32 == 31) lci_step(t);
    }
    lc_store(&k->total, n);
    lc_txn_set(t, &k->state, LCI_TICKET_OPEN);
    lci_step(t);
    return t->error;
}

static int give_ticket(lci_handle *h, const int32_t *pages, uint32_t n, uint32_t rid, uint32_t rgen,
                       uint64_t adopters, uint64_t expires, lci_ticket_ref *ref, int wait,
                       uint64_t deadline) {
    lc_txn t;
    int rc = lci_lock(h, &t, LCI_OP_TICKET, wait, deadline);
    if (rc != LC_OK) return rc;
    lci_settle_tickets(h, &t, 256);
    for (uint32_t i = 0; i < n; i++) /* row 0 keeps what is pinned, and nothing else */
        if (!lc_load(&h->mine[pages[i]])) rc = LC_E_OWNER;
    if (rc == LC_OK) rc = open_ticket(h, &t, rid, rgen, adopters, expires, ref);
    if (rc == LC_OK) {
        rc = fill_ticket(h, &t, &h->tickets[ref->index], pages, n);
        if (rc == LC_E_FULL || t.error == LC_E_PINS) { /* take the half-built ticket back */
            rc = rc == LC_OK ? t.error : rc;
            t.error = LC_OK;
            lc_txn_undo(h->at->base, t.lock, h->log_begin, h->log_end);
            t.count = 0;
            unpin_ticket(h, &t, &h->tickets[ref->index]);
            free_ticket(h, &t, &h->tickets[ref->index]);
        }
    }
    int dropped = lci_unlock(h, &t);
    return dropped != LC_OK ? dropped : rc;
}

/* Hand pages that the caller pins to the client slots in `adopters`, until `expires`. A ticket of a
 * reservation carries its number and generation, else LC_NIL. LC_E_FULL: too many are outstanding, of
 * the living. */
LC_API int lci_ticket_give(lci_handle *h, const int32_t *pages, uint32_t n, uint32_t rid,
                           uint32_t rgen, uint64_t adopters, uint64_t expires, lci_ticket_ref *ref,
                           int wait, uint64_t deadline) {
    lci_look_op look = {0};
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    for (uint32_t i = 0; i < n; i++)
        if ((uint32_t)pages[i] >= h->page_count) return LC_E_RANGE;
    lci_look_begin(h, &look, lcs_now_ns());
    for (;;) {
        rc = give_ticket(h, pages, n, rid, rgen, adopters, expires, ref, wait, deadline);
        if (rc != LC_E_FULL) return rc;
        int found = lci_look(h, &look, true, wait, deadline);
        if (found < 0) return found;
        if (found == 0) return LC_E_FULL;
    }
}

static int may_adopt(const lci_handle *h, const lci_ticket *k) {
    uint32_t slot = h->at->slot;
    if (!has(k->adopters, slot)) return LC_E_OWNER;
    if (has(k->adopted, slot)) return LC_E_TWICE;
    if (lc_load(&k->state) != LCI_TICKET_OPEN && lc_load(&k->state) != LCI_TICKET_DROPPED)
        return LC_E_STALE;
    if (lcs_now_ns() >= lc_load(&k->deadline_ns) || has(k->failed, slot)) return LC_E_TIMEOUT;
    return LC_OK;
}

/* A reservation's shard passes to the adopter. `rid` LC_NIL: it is a lease's ticket. */
static int take_shard(lci_handle *h, lc_txn *t, uint32_t rid, uint32_t gen, uint32_t shard) {
    if (rid == LC_NIL) return LC_OK;
    if (rid >= h->res_count) return LC_E_CORRUPT;
    lci_reservation *r = &h->res[rid];
    if (lc_load(&r->gen) != gen || lc_load(&r->state) != LCI_RES_ACTIVE) return LC_E_STALE;
    if (shard >= LCI_SHARDS || shard >= lc_load(&r->shards)) return LC_E_RANGE;
    uint32_t word = lc_load_acquire(&r->shard[shard]);
    if ((word & LCI_SHARD_STATUS) != LCI_SHARD_PENDING) return LC_E_TWICE;
    if ((word & LCI_SHARD_SLOT) != lc_load(&r->owner)) return LC_E_OWNER; /* adopted already */
    return lc_txn_swap(t, &r->shard[shard], word, (word & ~LCI_SHARD_SLOT) | h->at->slot)
               ? LC_OK
               : LC_E_TWICE;
}

static uint32_t copy_pages(lci_handle *h, lc_txn *t, const lci_ticket *k, int32_t *pages,
                           uint32_t capacity) {
    uint32_t n = 0, c = lc_load(&k->pages.first), count = lc_load(&k->pages.count);
    while (n < count && c < h->chunk_count) {
        uint32_t here = lc_load(&h->chunks[c].count);
        if (here == 0 || here > LCI_CHUNK_PAGES || here > capacity - n) break;
        for (uint32_t i = 0; i < here; i++) pages[n++] = (int32_t)lc_load(&h->chunks[c].page[i]);
        c = lc_load(&h->chunks[c].next);
    }
    bool sound = n == count;
    for (uint32_t i = 0; i < n; i++) sound &= (uint32_t)pages[i] < h->page_count;
    if (sound) return n;
    t->error = LC_E_CORRUPT;
    return 0;
}

/* Pages of a ticket: what adopting needs room for. */
LC_API int lci_ticket_size(lci_handle *h, const lci_ticket_ref *ref) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    const lci_ticket *k = find_ticket(h, ref, &rc);
    uint32_t total = k ? lc_load(&k->total) : 0;
    if (total > lci_list_most(h)) return LC_E_CORRUPT;
    return k ? (int)total : rc;
}

/* Pin a ticket's pages in the own name, into a lease of at least lci_ticket_size pages. For a
 * reservation's ticket also take over `shard`; `*rid`, `*rgen` then name the reservation. */
LC_API int lci_adopt(lci_handle *h, const lci_ticket_ref *ref, uint32_t shard, uint32_t *held,
                     int32_t *pages, uint32_t capacity, uint32_t *rid, uint32_t *rgen, int wait,
                     uint64_t deadline) {
    lc_txn t;
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    rc = lci_lock(h, &t, LCI_OP_ADOPT, wait, deadline);
    if (rc != LC_OK) return rc;
    lci_ticket *k = find_ticket(h, ref, &rc);
    if (k) rc = may_adopt(h, k);
    uint32_t n = rc == LC_OK ? copy_pages(h, &t, k, pages, capacity) : 0;
    uint32_t its_rid = k ? lc_load(&k->reservation) - 1 : LC_NIL;
    uint32_t its_gen = k ? lc_load(&k->reservation_gen) : 0;
    if (rc == LC_OK && !t.error) rc = take_shard(h, &t, its_rid, its_gen, shard);
    if (rc == LC_OK && !t.error) {
        uint32_t pinned = 0;
        pthread_mutex_lock(&h->at->rows);
        while (pinned < n && rc == LC_OK) {
            rc = lci_pin_one(h, (uint32_t)pages[pinned]);
            if (rc == LC_OK) pinned++;
        }
        while (rc != LC_OK && pinned) lci_unpin_one(h, (uint32_t)pages[--pinned]);
        *held = pinned;
        pthread_mutex_unlock(&h->at->rows);
    }
    if (rc == LC_OK && !t.error) {
        uint32_t slot = h->at->slot;
        lc_txn_set(&t, &k->adopted[slot / 32],
                   lc_load(&k->adopted[slot / 32]) | UINT32_C(1) << (slot % 32));
        *rid = its_rid;
        *rgen = its_gen;
        lci_step(&t);
        lci_settle_tickets(h, &t, 256);
    } else if (!t.error) {
        t.error = rc; /* roll the shard back */
    }
    int dropped = lci_unlock(h, &t);
    if (dropped != LC_OK) return dropped;
    return rc != LC_OK ? rc : (int)n;
}

/* An adopter's verdict. No lock. LC_E_TWICE: given already. */
LC_API int lci_ticket_done(lci_handle *h, const lci_ticket_ref *ref, int ok) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    lci_ticket *k = find_ticket(h, ref, &rc);
    if (!k) return rc;
    uint32_t slot = h->at->slot, bit = UINT32_C(1) << (slot % 32);
    if (!has(k->adopted, slot)) return LC_E_OWNER;
    if (has(k->done, slot) || has(k->failed, slot)) return LC_E_TWICE;
    atomic_fetch_or(ok ? &k->done[slot / 32] : &k->failed[slot / 32], bit);
    lci_notify(h);
    return LC_OK;
}

/* Where a ticket stands. No lock. */
LC_API int lci_ticket_poll(lci_handle *h, const lci_ticket_ref *ref, lci_ticket_status *out) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    const lci_ticket *k = find_ticket(h, ref, &rc);
    if (!k) return rc;
    *out = (lci_ticket_status){.adopters = whole(k->adopters), .adopted = whole(k->adopted),
                               .done = whole(k->done), .failed = whole(k->failed),
                               .late = lcs_now_ns() >= lc_load(&k->deadline_ns),
                               .open = lc_load(&k->state)};
    return lc_load_acquire(&k->gen) == ref->gen ? LC_OK : LC_E_STALE;
}

/* Clients that have not adopted count as failed, as after a deadline. Not logged: others set their
 * bits here without the lock. What a giver that dies in it has stored need not be undone: its
 * ticket is dropped with it. */
static void refuse_adopters(lci_ticket *k) {
    for (int w = 0; w < 2; w++)
        atomic_fetch_or(&k->failed[w], lc_load(&k->adopters[w]) & ~lc_load(&k->adopted[w]));
}

static int end_ticket(lci_handle *h, const lci_ticket_ref *ref, bool revoke, int wait,
                      uint64_t deadline) {
    lc_txn t;
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    rc = lci_lock(h, &t, LCI_OP_TICKET, wait, deadline);
    if (rc != LC_OK) return rc;
    lci_ticket *k = find_ticket(h, ref, &rc);
    if (k && (lc_load(&k->giver) != h->at->slot || lc_load(&k->state) != LCI_TICKET_OPEN))
        rc = LC_E_OWNER;
    if (rc == LC_OK) {
        if (revoke) refuse_adopters(k);
        lc_txn_set(&t, &k->state, LCI_TICKET_DROPPED);
        lci_step(&t);
        lci_settle_tickets(h, &t, 256);
    }
    int dropped = lci_unlock(h, &t);
    return dropped != LC_OK ? dropped : rc;
}

/* The giver does not need the ticket any more. Adopters keep what they adopted; no client can adopt
 * it once it has been freed. */
LC_API int lci_ticket_drop(lci_handle *h, const lci_ticket_ref *ref, int wait, uint64_t deadline) {
    return end_ticket(h, ref, false, wait, deadline);
}

/* The same, and from this instant on no client can adopt it: its pins go as soon as those that have
 * adopted it are done. */
LC_API int lci_ticket_revoke(lci_handle *h, const lci_ticket_ref *ref, int wait,
                             uint64_t deadline) {
    return end_ticket(h, ref, true, wait, deadline);
}

/* For a client that has read every message of a dead giver, and so will hear of no more tickets
 * from it: refuse those that the giver gave us and we have not adopted. The same for givers that
 * were reaped. Returns how many we refuse. The giver is not reaped here: others may still adopt
 * what it gave them, and finish its work. */
LC_API int lci_ticket_refuse_orphans(lci_handle *h, uint32_t giver, uint32_t epoch, int wait,
                                     uint64_t deadline) {
    lc_txn t;
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    rc = lci_lock(h, &t, LCI_OP_TICKET, wait, deadline);
    if (rc != LC_OK) return rc;
    int refused = 0;
    uint32_t slot = h->at->slot, bit = UINT32_C(1) << (slot % 32);
    for (uint32_t i = 0, end = lci_ticket_end(h); i < end; i++) {
        lci_ticket *k = &h->tickets[i];
        uint32_t state = lc_load(&k->state), by = lc_load(&k->giver);
        if (state != LCI_TICKET_OPEN && state != LCI_TICKET_DROPPED) continue;
        if (by != 0 && (by != giver || lc_load(&k->giver_epoch) != epoch)) continue;
        if (!has(k->adopters, slot) || has(k->adopted, slot) || has(k->failed, slot)) continue;
        atomic_fetch_or(&k->failed[slot / 32], bit); /* as refuse_adopters: not logged */
        refused++;
    }
    if (refused) lci_settle_tickets(h, &t, 256);
    int dropped = lci_unlock(h, &t);
    return dropped != LC_OK ? dropped : refused;
}
