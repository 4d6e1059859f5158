/* Ranks that write one reservation together and send each other no message. Each calls lci_reserve
 * with the same keys, its own shard and the number of the team, which they have agreed on before. The
 * first makes the pages and owns the reservation; the others join it. All of this is under the lock.
 *
 * A shard that no rank has joined is OPEN and in the owner's name, so a dead owner dooms the
 * reservation, and so does the deadline. */
#include "index.h"

/* The first reservation of a busy page that this team makes for these shards. */
static uint32_t candidate(const lci_handle *h, const lci_reserve_op *op, const int32_t *page,
                          const uint8_t *status, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) {
        if (status[i] != LCI_BUSY_KEY) continue;
        uint32_t rid = lci_res_of(lc_load(&h->pages[page[i]].word)) - 1;
        if (rid >= h->res_count) continue;
        const lci_reservation *r = &h->res[rid];
        if (lc_load(&r->state) == LCI_RES_ACTIVE && lc_load(&r->team) == op->team &&
            lc_load(&r->shards) == op->shards && lc_load(&r->ns) == op->ns)
            return rid;
    }
    return LC_NIL;
}

static bool of(const lci_handle *h, uint32_t rid, int32_t page, uint8_t status) {
    return status == LCI_BUSY_KEY && lci_res_of(lc_load(&h->pages[page].word)) == rid + 1;
}

/* Are its pages among the busy ones, all of them, in its order and once? */
static bool same_pages(const lci_handle *h, uint32_t rid, const int32_t *page, const uint8_t *status,
                       uint32_t n) {
    const lci_list *list = &h->res[rid].pages;
    uint32_t left = lc_load(&list->count), c = lc_load(&list->first), at = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (!of(h, rid, page[i], status[i])) continue;
        if (!left || c >= h->chunk_count || at >= LCI_CHUNK_PAGES) return false;
        const lci_chunk *chunk = &h->chunks[c];
        if (lc_load(&chunk->page[at]) != (uint32_t)page[i]) return false;
        left--;
        if (++at == lc_load(&chunk->count)) {
            c = lc_load(&chunk->next);
            at = 0;
        }
    }
    return left == 0;
}

/* What is pinned before one of them cannot be, the caller gives back as any rest of an undone step. */
static int pin_all(lci_handle *h, uint32_t rid, lci_reserve_op *op, const int32_t *page,
                   uint8_t *status, uint32_t n) {
    int rc = LC_OK;
    pthread_mutex_lock(&h->at->rows);
    for (uint32_t i = 0; i < n && rc == LC_OK; i++) {
        if (!of(h, rid, page[i], status[i])) continue;
        rc = lci_pin_one(h, (uint32_t)page[i]);
        if (rc != LC_OK) break;
        status[i] = LCI_NEW;
        op->made++;
    }
    pthread_mutex_unlock(&h->at->rows);
    return rc;
}

/* Join what another rank of the team has begun, if it is whole among these keys, which were looked at
 * under this hold of the lock: `status` says which are busy, and of the joined ones then LCI_NEW. The
 * pins come before the shard's word, in one step, which giving the lock back commits: a death before
 * leaves pins, for `reap`. */
int lci_join(lci_handle *h, lc_txn *t, lci_reserve_op *op, const int32_t *page, uint8_t *status,
             uint32_t n) {
    uint32_t rid = candidate(h, op, page, status, n);
    if (rid == LC_NIL) return LCI_JOIN_NONE;
    lci_reservation *r = &h->res[rid];
    if (!lc_load(&r->listed)) return LCI_JOIN_LATER; /* the owner is between two holds of the lock */
    uint32_t word = lc_load_acquire(&r->shard[op->shard]);
    if ((word & LCI_SHARD_STATUS) != LCI_SHARD_OPEN) return LCI_JOIN_NONE; /* that rank is there */
    if (!same_pages(h, rid, page, status, n)) return LCI_JOIN_NONE;
    int rc = pin_all(h, rid, op, page, status, n);
    if (rc != LC_OK) return rc;
    uint32_t mine = (word & ~(LCI_SHARD_STATUS | LCI_SHARD_SLOT)) | h->at->slot;
    lc_txn_swap(t, &r->shard[op->shard], word, mine); /* an open one changes under the lock only */
    op->rid = rid;
    op->gen = lc_load(&r->gen);
    op->joined = 1;
    return LCI_JOINED;
}

/* A reservation that was just opened: for ranks of the team, once its pages are listed. Until the step
 * is committed its record is dead, so nothing is logged. */
void lci_open_shards(lci_handle *h, const lci_reserve_op *op) {
    lci_reservation *r = &h->res[op->rid];
    lc_store(&r->team, op->team);
    lc_store(&r->deadline_ns, op->join_until);
    for (uint32_t s = 0; s < op->shards; s++)
        if (s != op->shard) lc_store(&r->shard[s], lc_load(&r->shard[s]) | LCI_SHARD_OPEN);
}

/* All pages that it will have are listed. */
int lci_list_whole(lci_handle *h, const lci_reserve_op *op, int wait, uint64_t deadline) {
    lc_txn t;
    lci_reservation *r = &h->res[op->rid];
    int rc = lci_lock(h, &t, LCI_OP_RESERVE, wait, deadline);
    if (rc != LC_OK) return rc;
    if (lc_load(&r->gen) == op->gen && lc_load(&r->state) == LCI_RES_ACTIVE) {
        uint64_t due = lc_load(&h->root->joining_ns), ours = lc_load(&r->deadline_ns);
        /* Before ranks can join, and not logged: a time too early costs a look. */
        if (!due || ours < due) lc_store(&h->root->joining_ns, ours);
        lc_txn_set(&t, &r->listed, 1);
    }
    return lci_unlock(h, &t);
}

/* One that has ended has no OPEN shard. */
static bool open_to_ranks(const lci_reservation *r) {
    uint32_t shards = lc_load(&r->shards);
    if (!lc_load(&r->listed)) return false;
    for (uint32_t s = 0; s < shards && s < LCI_SHARDS; s++)
        if ((lc_load_acquire(&r->shard[s]) & LCI_SHARD_STATUS) == LCI_SHARD_OPEN) return true;
    return false;
}

/* Doom the reservations that ranks have not joined in time. They are collected as others are. */
void lci_settle_joins(lci_handle *h, lc_txn *t) {
    uint64_t now = lcs_now_ns(), next = 0;
    uint32_t end = lc_load(&h->root->res_fresh);
    if (now < lc_load(&h->root->joining_ns)) return;
    for (uint32_t rid = 0; rid < end && rid < h->res_count && !t->error; rid++) {
        if (!open_to_ranks(&h->res[rid])) continue;
        uint64_t until = lc_load(&h->res[rid].deadline_ns);
        if (now >= until) lci_doom_reservation(h, t, rid, 0);
        else if (!next || until < next) next = until;
    }
    if (!t->error) lc_store(&h->root->joining_ns, next);
}

/* For a client that waits for others: what no rank joined in time ends now. Takes the lock only then. */
LC_API int lci_settle(lci_handle *h, int wait, uint64_t deadline) {
    lc_txn t;
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    uint64_t due = lc_load(&h->root->joining_ns);
    if (!due || lcs_now_ns() < due) return LC_OK;
    rc = lci_lock(h, &t, LCI_OP_COLLECT, wait, deadline);
    if (rc != LC_OK) return rc;
    lci_collect(h, &t, LCI_HOLD);
    rc = lci_unlock(h, &t);
    lci_notify(h);
    return rc;
}
