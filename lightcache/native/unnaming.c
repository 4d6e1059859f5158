/* Taking a page's name away: it is ready and pinned by us alone, and HELD afterwards. */
#include "index.h"

static bool pinned_by_others(const lci_handle *h, uint32_t page) {
    uint64_t bits = lc_load_acquire(&h->pages[page].pins) & ~(UINT64_C(1) << h->at->slot);
    for (; bits; bits &= bits - 1)
        if (lc_load_acquire(lci_pin(h, (uint32_t)__builtin_ctzll(bits), page))) return true;
    return false;
}

static int may_unname(const lci_handle *h, uint32_t page) {
    if (page >= h->page_count || !lc_load(&h->mine[page])) return LC_E_OWNER;
    if (lci_state_of(lc_load_acquire(&h->pages[page].word)) != LCI_READY) return LC_E_OWNER;
    return pinned_by_others(h, page) ? LC_E_PINS : LC_OK;
}

/* Off the queue and off its parent, ours; still in its chain. Returns what its word was. What hangs
 * on it has no parent any more. */
static uint32_t mark(lci_handle *h, lc_txn *t, uint32_t page) {
    uint32_t word = lc_load_acquire(&h->pages[page].word);
    if (lci_state_of(word) != LCI_READY) { /* it stands twice among the pages */
        t->error = LC_E_OWNER;
        return word;
    }
    if (lci_queueable(h, page)) lci_queue_remove(h, t, page);
    lci_detach_parent(h, t, page);
    LC_PAUSE(LC_AT_EVICT_CHOSEN);
    lc_txn_set(t, &h->pages[page].word, lci_held_word(h->at->slot));
    return word;
}

static void forget(lci_handle *h, lc_txn *t, uint32_t page, uint32_t word) {
    lc_dict_unlink(t, &h->dict, page);
    lci_count_named(h, t, word, (uint32_t)-1);
    if (lci_res_of(word)) lc_txn_add(t, &h->root->writing, (uint32_t)-1);
    if (word & LCI_KEPT) lc_txn_add(t, &h->root->kept, (uint32_t)-1);
}

/* A step of unnaming. The caller holds `rows`, so that no thread of ours gives up the pin that the
 * page is held by. */
static int unname_batch(lci_handle *h, lc_txn *t, lci_held_op *op, const int32_t *pages,
                        uint32_t n) {
    uint32_t word[LCI_BATCH];
    for (uint32_t i = 0; i < n; i++) {
        op->refused = op->done + i;
        int rc = may_unname(h, (uint32_t)pages[i]);
        if (rc != LC_OK) return rc;
    }
    for (uint32_t i = 0; i < n && !t->error; i++) {
        op->refused = op->done + i;
        word[i] = mark(h, t, (uint32_t)pages[i]);
    }
    /* HELD before the pins: a client that pins after this sees it, as in lci_evict. */
    atomic_thread_fence(memory_order_seq_cst);
    for (uint32_t i = 0; i < n && !t->error; i++) {
        op->refused = op->done + i;
        if (pinned_by_others(h, (uint32_t)pages[i])) t->error = LC_E_PINS;
    }
    for (uint32_t i = 0; i < n && !t->error; i++) forget(h, t, (uint32_t)pages[i], word[i]);
    lc_txn_add(t, &h->root->named, -n);
    lc_txn_add(t, &h->root->held, n);
    lci_step(t);
    if (!t->error) op->done += n;
    return t->error;
}

/* Take the names of ready pages that we alone pin: they are held again. LC_E_OWNER: page
 * `op->refused` is not pinned by us, or not ready. LC_E_PINS: another client pins it. Nothing after
 * `op->done` has changed. LC_E_BUSY, LC_E_INTR: call again with the same `op`. */
LC_API int lci_unname(lci_handle *h, lci_held_op *op, const int32_t *pages, uint32_t n, int wait,
                      uint64_t deadline) {
    lc_txn t;
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    uint64_t begun = lcs_now_ns();
    while (op->done < n) {
        rc = lci_lock(h, &t, LCI_OP_UNNAME, wait, deadline);
        if (rc != LC_OK) return rc;
        lci_collect(h, &t, 256);
        rc = t.error;
        pthread_mutex_lock(&h->at->rows);
        for (uint32_t work = 0; rc == LC_OK && op->done < n && work < LCI_HOLD; work += LCI_BATCH) {
            uint32_t left = n - op->done;
            rc = unname_batch(h, &t, op, pages + op->done, left < LCI_BATCH ? left : LCI_BATCH);
        }
        pthread_mutex_unlock(&h->at->rows);
        int dropped = lci_unlock(h, &t);
        if (rc == LC_OK) rc = dropped;
        if (rc == LC_OK && op->done < n) rc = lci_again(begun, wait, deadline);
        if (rc != LC_OK) return rc;
    }
    return LC_OK;
}
