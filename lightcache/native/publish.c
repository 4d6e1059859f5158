/* Publishing and waiting: no lock. */
#include "event.h"
#include "index.h"

/* Why the shard's word is not what its publisher expects. */
static int refused(const lci_handle *h, uint32_t word, uint32_t gen) {
    if (word >> LCI_SHARD_GEN_SHIFT != (gen & 0xffffff)) return LC_E_STALE;
    if ((word & LCI_SHARD_STATUS) == LCI_SHARD_DEAD) return LC_E_STALE;
    if ((word & LCI_SHARD_SLOT) != h->at->slot) return LC_E_OWNER;
    if ((word & LCI_SHARD_STATUS) == LCI_SHARD_OPEN) return LC_E_OWNER; /* for the rank that joins */
    if ((word & LCI_SHARD_STATUS) == LCI_SHARD_DONE) return LC_E_TWICE;
    return LC_OK;
}

/* All shards are there: the pages become ready. The caller pins every one of them, so that none
 * can have been used again under the same reservation number. What their words alone say, whether they
 * are independent and of which group, is as it was when they were made. */
int lci_make_ready(lci_handle *h, uint32_t rid, uint32_t ns, const int32_t *pages, uint32_t n) {
    uint32_t writing = LCI_WRITING | ns << LCI_NS_SHIFT | (rid + 1) << LCI_RES_SHIFT;
    int rc = 1;
    for (uint32_t i = 0; i < n; i++) {
        if ((uint32_t)pages[i] >= h->page_count) return LC_E_RANGE;
        uint32_t own = lc_load(&h->pages[pages[i]].word) & (LCI_INDEPENDENT | LCI_GROUP_MASK);
        uint32_t old = writing | own;
        uint32_t ready = (old & ~LCI_STATE_MASK) | LCI_READY;
        /* Release: a process that sees READY sees the bytes. */
        bool swapped = atomic_compare_exchange_strong_explicit(
            &h->pages[pages[i]].word, &old, ready, memory_order_acq_rel,
            memory_order_acquire); /* order: page-ready */
        if (!swapped && lci_state_of(old) != LCI_READY) rc = LC_E_CLEARED;
        LC_PAUSE(LC_AT_PAGE_READY);
    }
    return rc;
}

/* The reservation has ended while we published: another publisher was the last, or it was doomed. The
 * pages, which we pin, say which. */
static int outcome(const lci_handle *h, const int32_t *pages, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        if ((uint32_t)pages[i] >= h->page_count) return LC_E_RANGE;
        if (lci_state_of(lc_load_acquire(&h->pages[pages[i]].word)) != LCI_READY) return LC_E_STALE;
    }
    return 1;
}

/* Publish one shard of a reservation. Returns 1 when it was the last and the pages are ready now,
 * 0 when others are to come. `pages` are the reservation's new pages, pinned by the caller.
 *
 * LC_E_STALE and LC_E_CLEARED oblige the caller to lci_abandon. They may come from another client's
 * step, and that client may die before it commits: when the step is undone, the shard is pending
 * again in the caller's name, and its keys would be busy as long as the caller lives. Abandoning
 * takes the lock; once it is taken, such a step has been undone or is committed. */
LC_API int lci_publish(lci_handle *h, uint32_t rid, uint32_t gen, uint32_t shard,
                       const int32_t *pages, uint32_t n) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    if (rid >= h->res_count) return LC_E_RANGE;
    lci_reservation *r = &h->res[rid];
    if (lc_load_acquire(&r->gen) != gen) return LC_E_STALE;
    if (shard >= LCI_SHARDS || shard >= lc_load(&r->shards)) return LC_E_RANGE;
    lci_ns_ref ns = lc_load(&r->ns);
    uint32_t word = lc_load_acquire(&r->shard[shard]);
    do {
        rc = refused(h, word, gen);
        if (rc != LC_OK) return rc;
        if (!lci_ns_open(h, ns)) return LC_E_CLEARED;
    } while (!atomic_compare_exchange_strong_explicit(
        &r->shard[shard], &word, word | LCI_SHARD_DONE, memory_order_seq_cst,
        memory_order_acquire)); /* order: shard-done */
    LC_PAUSE(LC_AT_SHARD_DONE);
    /* Two last publishers may both find all done, never neither: hence sequential consistency. */
    atomic_thread_fence(memory_order_seq_cst); /* order: shard-fence */
    if (!lci_complete(r)) return lc_load_acquire(&r->gen) == gen ? 0 : outcome(h, pages, n);
    rc = lci_make_ready(h, rid, lci_ns_id(ns), pages, n);
    lci_flag_ended(h, rid);
    lci_notify(h);
    /* Threads of one client may publish at the same time, with nothing between them. */
    atomic_fetch_add_explicit(&lcs_client_of(h->at, h->at->slot)->published_pages, n,
                              memory_order_relaxed);
    return rc;
}

static bool being_written(const lci_handle *h, const lc_key *keys, uint32_t n) {
    lc_found found;
    for (uint32_t i = 0; i < n; i++) {
        lc_dict_find(&h->dict, keys[i].lo, keys[i].hi, &found);
        if (found.node != LC_NIL && lci_state_of(found.word) == LCI_WRITING) return true;
    }
    return false;
}

/* Can the reservation still be published: does every client live that is to write a shard of it? A
 * system call for each such shard. */
static bool has_writers(const lci_handle *h, uint32_t rid) {
    if (rid >= h->res_count) return false;
    const lci_reservation *r = &h->res[rid];
    uint32_t shards = lc_load(&r->shards);
    if (lc_load_acquire(&r->state) != LCI_RES_ACTIVE) return false;
    for (uint32_t s = 0; s < shards && s < LCI_SHARDS; s++) {
        uint32_t word = lc_load_acquire(&r->shard[s]), status = word & LCI_SHARD_STATUS;
        if (status == LCI_SHARD_DONE) continue; /* whether its writer lives or not */
        if (status == LCI_SHARD_DEAD) return false;
        if (lcs_slot_alive(h->at, word & LCI_SHARD_SLOT) == 0) return false;
    }
    return true;
}

/* How many of the keys, from the first on, are READY or being written by clients that live: what a
 * request that waits for writers may find. Advice: each was so at some instant of the call. */
LC_API int lci_peek_ahead(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ns) {
    uint32_t i, last = LC_NIL; /* of the pages before, the reservation whose writers live */
    lc_found found;
    int rc = lci_usable(h);
    if (rc != LC_OK) return rc;
    for (i = 0; i < n; i++) {
        lc_dict_find(&h->dict, keys[i].lo, keys[i].hi, &found);
        if (found.node == LC_NIL || lci_ns_of(found.word) != lci_ns_id(ns)) break;
        if (lci_state_of(found.word) == LCI_READY) continue;
        if (lci_state_of(found.word) != LCI_WRITING) break;
        uint32_t rid = lci_res_of(found.word) - 1;
        if (rid != last && !has_writers(h, rid)) break;
        last = rid;
    }
    return lci_ns_open(h, ns) ? (int)i : 0;
}

/* Sleep until no client is writing any of the keys. LC_E_TIMEOUT at the deadline; LC_E_BUSY
 * every 20 ms, for the caller to look whether a writer has died; LC_E_INTR after a signal. */
LC_API int lci_wait(lci_handle *h, const lc_key *keys, uint32_t n, uint64_t deadline) {
    uint64_t look = lcs_now_ns() + UINT64_C(20000000);
    for (;;) {
        int rc = lcs_usable(h->at);
        if (rc != LC_OK) return rc;
        uint32_t seen = lc_load_acquire(&h->root->event); /* order: event-seen */
        if (!being_written(h, keys, n)) return LC_OK;
        uint64_t now = lcs_now_ns();
        if (now >= deadline) return LC_E_TIMEOUT;
        if (now >= look) return LC_E_BUSY;
        uint64_t until = deadline < look ? deadline : look;
        rc = lc_event_sleep(&h->root->event, seen, !h->at->readonly, until - now);
        if (rc == LC_E_INTR) return rc;
    }
}
