/* What others left to do, done by the next holder of the lock: reservations that have ended,
 * doomed pages whose last pin has gone, namespaces being cleared. In pieces, with a safe point
 * after each, so that a death in between loses none of it. */
#include "event.h"
#include "index.h"

bool lci_complete(const lci_reservation *r) {
    uint32_t shards = lc_load(&r->shards), gen = lc_load(&r->gen) & 0xffffff;
    if (lc_load_acquire(&r->state) != LCI_RES_ACTIVE || shards == 0 || shards > LCI_SHARDS)
        return false;
    for (uint32_t s = 0; s < shards; s++) {
        uint32_t word =
            atomic_load_explicit(&r->shard[s], memory_order_seq_cst); /* order: shard-look */
        if (word >> LCI_SHARD_GEN_SHIFT != gen) return false;
        if ((word & LCI_SHARD_STATUS) != LCI_SHARD_DONE) return false;
    }
    return true;
}

/* Tell the next holder of the lock that reservation `rid` has ended (published or doomed). */
void lci_flag_ended(lci_handle *h, uint32_t rid) {
    atomic_fetch_or_explicit(&h->root->completed[rid / 64], UINT64_C(1) << (rid % 64),
                             memory_order_acq_rel); /* order: completed-set */
}

void lci_notify(lci_handle *h) { lc_event_notify(&h->root->event); }

/* Take a record for pages to be written. False: all are in use. */
bool lci_open_reservation(lci_handle *h, lc_txn *t, uint32_t shards, lci_ns_ref ns, uint32_t *its_rid,
                          uint32_t *its_gen) {
    uint32_t rid = lc_load(&h->root->res_head);
    if (rid < h->res_count) {
        lc_txn_set(t, &h->root->res_head, lc_load(&h->res[rid].next_free));
    } else {
        rid = lc_load(&h->root->res_fresh);
        if (rid >= h->res_count) return false;
        lc_txn_set(t, &h->root->res_fresh, rid + 1);
    }
    lci_reservation *res = &h->res[rid];
    if (lc_load(&res->state) != LCI_RES_FREE) {
        t->error = LC_E_CORRUPT;
        return false;
    }
    uint32_t gen = lc_load(&res->gen) + 1;
    lc_txn_set(t, &res->gen, gen);
    /* Dead until the record is ACTIVE, so not logged. */
    lc_store(&res->owner, h->at->slot);
    lc_store(&res->owner_epoch, h->at->epoch);
    lc_store(&res->shards, shards);
    lc_store(&res->ns, ns);
    lc_store(&res->team, 0);
    lc_store(&res->listed, 0);
    lc_store(&res->pages.count, 0);
    lc_store(&res->pages.first, LC_NIL);
    lc_store(&res->pages.last, LC_NIL);
    for (uint32_t s = 0; s < shards; s++)
        lc_store(&res->shard[s], (gen & 0xffffff) << LCI_SHARD_GEN_SHIFT | h->at->slot);
    lc_txn_set(t, &res->state, LCI_RES_ACTIVE);
    lc_txn_add(t, &h->root->res_used, 1);
    *its_rid = rid;
    *its_gen = gen;
    return true;
}

/* A page of a published reservation joins the others. Returns the pages that joined.
 *
 * Its publisher may have died before it came to this page. All shards were written, so the page becomes
 * READY as its publisher would have made it: without the log, because lookups may find it from now
 * on, and must not lose it again if this step is undone. */
static uint32_t adopt_page(lci_handle *h, lc_txn *t, uint32_t page, uint32_t rid) {
    lci_page *p = &h->pages[page];
    uint32_t word = lc_load_acquire(&p->word);
    if (lci_res_of(word) != rid + 1) return 0; /* doomed and perhaps used again since */
    while (lci_state_of(word) == LCI_WRITING) {
        uint32_t ready = (word & ~LCI_STATE_MASK) | LCI_READY;
        if (atomic_compare_exchange_strong_explicit(&p->word, &word, ready, memory_order_acq_rel,
                                                    memory_order_acquire))
            word = ready; /* otherwise its publisher was faster */
    }
    if (lci_state_of(word) != LCI_READY) return 0;
    lc_txn_set(t, &p->word, LCI_READY | (word & (LCI_KIND | LCI_KEPT)));
    if (lci_queueable(h, page)) lci_queue_add(h, t, page);
    return 1;
}

static uint32_t drain_chunk(lci_handle *h, lc_txn *t, uint32_t rid, bool doomed) {
    lci_list *list = &h->res[rid].pages;
    const lci_chunk *c = lci_list_chunk(h, list);
    if (!c) return 0;
    uint32_t n = lci_list_part(h, t, list, c);
    if (!n) return 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t page = lc_load(&c->page[i]);
        if (page < h->page_count) lc_prefetch_write(&h->pages[page]);
    }
    uint32_t joined = 0;
    for (uint32_t i = 0; i < n && !t->error; i++) {
        uint32_t page = lc_load(&c->page[i]);
        if (page >= h->page_count) {
            t->error = LC_E_CORRUPT;
        } else if (!doomed) {
            joined += adopt_page(h, t, page, rid);
        } else if (lci_res_of(lc_load(&h->pages[page].word)) == rid + 1) {
            lci_doom(h, t, page);
        }
    }
    if (joined) lc_txn_add(t, &h->root->writing, -joined);
    lci_list_pop_chunk(h, t, list);
    return n + 1;
}

static void free_reservation(lci_handle *h, lc_txn *t, uint32_t rid) {
    lci_reservation *r = &h->res[rid];
    lc_txn_set(t, &r->state, LCI_RES_FREE);
    lc_txn_add(t, &r->gen, 1);
    lc_store(&r->next_free, lc_load(&h->root->res_head)); /* dead until the record is FREE */
    lc_txn_set(t, &h->root->res_head, rid);
    lc_txn_add(t, &h->root->res_used, (uint32_t)-1);
}

/* Work off one ended reservation; returns the pages of work. */
uint32_t lci_end_reservation(lci_handle *h, lc_txn *t, uint32_t rid, uint32_t budget) {
    lci_reservation *r = &h->res[rid];
    uint32_t done = 0;
    bool doomed = lc_load(&r->state) == LCI_RES_DOOMED;
    if (!doomed && !lci_complete(r)) return 0;
    while (lc_load(&r->pages.count) && done < budget && !t->error) {
        uint32_t n = drain_chunk(h, t, rid, doomed);
        if (!n) {
            t->error = LC_E_CORRUPT;
            return done;
        }
        done += n;
        lci_step(t);
    }
    if (lc_load(&r->pages.count) || t->error) return done;
    free_reservation(h, t, rid);
    lci_step(t);
    return done + 1;
}

uint32_t lci_collect(lci_handle *h, lc_txn *t, uint32_t budget) {
    uint32_t done = 0;
    if (LC_UNLIKELY(lc_load(&h->root->joining_ns))) lci_settle_joins(h, t);
    for (uint32_t w = 0; w < 16 && done < budget && !t->error; w++) {
        uint64_t bits = lc_load_acquire(&h->root->completed[w]);
        for (; bits && done < budget && !t->error; bits &= bits - 1) {
            uint32_t rid = w * 64 + (uint32_t)__builtin_ctzll(bits);
            if (rid >= h->res_count) {
                t->error = LC_E_CORRUPT;
                break;
            }
            done += lci_end_reservation(h, t, rid, budget - done);
            lci_reservation *r = &h->res[rid];
            if (lc_load(&r->state) == LCI_RES_DOOMED || lci_complete(r)) continue; /* not done yet */
            LC_PAUSE(LC_AT_NOT_ENDED);
            atomic_fetch_and_explicit(&h->root->completed[w], ~(UINT64_C(1) << (rid % 64)),
                                      memory_order_acq_rel); /* order: completed-clear */
            /* Taken again and published between our look and our clearing? Then it counts. */
            if (lci_complete(r)) lci_flag_ended(h, rid);
        }
    }
    if (done < budget && lc_load(&h->root->clearing)) done += lci_clear_some(h, t, budget - done);
    return done;
}

/* From here the reservation can only end. Its pages, WRITING, are not matched; they are unlinked by
 * lci_collect, by us or by the next holder of the lock. `of` (else 0) is the slot of a client that
 * is being taken back: it becomes the owner, and its reaper alone unlinks the pages, in portions;
 * others would have to unlink all of them before they may evict. False: it was published before, or
 * is gone. */
bool lci_doom_reservation(lci_handle *h, lc_txn *t, uint32_t rid, uint32_t of) {
    lci_reservation *r = &h->res[rid];
    uint32_t shards = lc_load(&r->shards);
    bool pending = false;
    if (lc_load(&r->state) != LCI_RES_ACTIVE || shards > LCI_SHARDS) return false;
    for (uint32_t s = 0; s < shards; s++) {
        uint32_t word = lc_load_acquire(&r->shard[s]);
        uint32_t status = word & LCI_SHARD_STATUS;
        if (status != LCI_SHARD_PENDING && status != LCI_SHARD_OPEN) continue;
        uint32_t dead = (word & ~LCI_SHARD_STATUS) | LCI_SHARD_DEAD;
        pending |= lc_txn_swap(t, &r->shard[s], word, dead); /* lost to its publisher: done */
    }
    if (!pending) return false;
    lc_txn_set(t, &r->state, LCI_RES_DOOMED);
    if (of) {
        lc_txn_set(t, &r->owner, of);
        lc_txn_set(t, &r->owner_epoch, 0);
    } else {
        lci_flag_ended(h, rid); /* before it is so: a bit too many is taken back, one too few is not */
    }
    lci_step(t);
    return true;
}

/* Free doomed pages without pins; look at `budget` of them at most, and begin where the
 * last look of this handle ended: a lease over a cleared namespace may pin many for minutes. Returns how
 * many were looked at. */
uint32_t lci_collect_doomed(lci_handle *h, lc_txn *t, uint32_t budget) {
    uint32_t looked = 0, count = lc_load(&h->root->doomed), page = h->doomed_hand;
    if (budget > count) budget = count;
    /* DOOMED before the pins: a client that pins after this sees it, as in lci_evict. */
    atomic_thread_fence(memory_order_seq_cst); /* order: doomed-fence */
    /* A page in this state is on the list, so whatever page the hand names by now is a place to begin. */
    if (page >= h->page_count || lci_state_of(lc_load(&h->pages[page].word)) != LCI_DOOMED)
        page = LC_NIL;
    for (; looked < budget && !t->error; looked++) {
        if (page == LC_NIL) page = lc_list_first(t, &h->lists, LCI_DOOMED_LIST);
        if (page == LC_NIL) break;
        lci_page *p = &h->pages[page];
        if (lci_state_of(lc_load(&p->word)) != LCI_DOOMED) {
            t->error = LC_E_CORRUPT;
            break;
        }
        uint32_t next = lc_list_follow(t, &h->lists, LCI_DOOMED_LIST, &p->queue);
        if (next != LC_NIL) __builtin_prefetch(&h->pages[next]);
        if (!t->error && !lci_pinned(h, p)) lci_free_doomed(h, t, page);
        page = next;
        if (looked % 16 == 15) lci_step(t);
    }
    h->doomed_hand = page;
    lci_step(t);
    return looked;
}

static lci_namespace *being_cleared(lci_handle *h) {
    for (uint32_t i = 0; i < LCI_NAMESPACES; i++)
        if (lc_load(&h->ns[i].state) == LCI_NS_CLEARING) return &h->ns[i];
    return NULL;
}

uint32_t lci_clear_some(lci_handle *h, lc_txn *t, uint32_t budget) {
    lci_namespace *ns = being_cleared(h);
    uint32_t looked = 0, cleared = 0;
    if (!ns) {
        t->error = LC_E_CORRUPT;
        return 0;
    }
    uint32_t id = (uint32_t)(ns - h->ns), end = lc_load(&h->root->fresh);
    if (end > h->page_count) end = h->page_count;
    uint32_t at = lc_load(&ns->cursor);
    for (; at < end && looked < budget && !t->error; at++, looked++) {
        uint32_t word = lc_load(&h->pages[at].word);
        if (lci_ns_of(word) == id && lci_state_of(word) != LCI_FREE)
            cleared += lci_doom(h, t, at) && lci_state_of(word) == LCI_READY;
        /* After a death the cursor stands before these pages: looking again dooms nothing. */
        if (t->count > LCS_LOG_ENTRIES / 2) lci_step(t);
    }
    lci_count_evicted(h, LCI_CLEARED, cleared);
    lc_txn_set(t, &ns->cursor, at);
    if (at >= end) {
        lc_txn_set(t, &ns->state, LCI_NS_CLEARED);
        lc_txn_add(t, &h->root->clearing, (uint32_t)-1);
    }
    lci_step(t);
    return looked + 1;
}

/* Forget a namespace. Its state changes first: from that store on no lookup finds anything of it.
 * LC_E_BUSY / LC_E_INTR: call again, it continues. */
LC_API int lci_clear(lci_handle *h, lci_ns_ref ref, int wait, uint64_t deadline) {
    lc_txn t;
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    lci_namespace *ns = &h->ns[lci_ns_id(ref)];
    uint64_t begun = lcs_now_ns();
    for (bool more = true; more;) {
        rc = lci_lock(h, &t, LCI_OP_CLEAR, wait, deadline);
        if (rc != LC_OK) return rc;
        if ((lc_load(&ns->epoch) & 0xffffff) == ref >> 8 &&
            lc_load(&ns->state) == LCI_NS_NORMAL) {
            lc_store(&ns->cursor, 0); /* dead until the state says CLEARING */
            lc_txn_add(&t, &h->root->clearing, 1);
            lc_txn_set(&t, &ns->minimum, 0); /* of pages that are on their way out */
            lc_txn_set(&t, &ns->state, LCI_NS_CLEARING);
            lci_step(&t);
        }
        if (lc_load(&h->root->clearing)) lci_clear_some(h, &t, 256);
        else if (lc_load(&ns->state) == LCI_NS_CLEARING) t.error = LC_E_CORRUPT; /* not counted */
        lci_collect_doomed(h, &t, 256);
        more = lc_load(&ns->state) == LCI_NS_CLEARING && lc_load(&ns->epoch) << 8 >> 8 == ref >> 8;
        rc = lci_unlock(h, &t);
        if (rc == LC_OK && more) rc = lci_again(begun, wait, deadline);
        if (rc != LC_OK) return rc;
    }
    lci_notify(h);
    return LC_OK;
}
