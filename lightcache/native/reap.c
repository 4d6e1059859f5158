/* Taking back what a dead client held. The reaper holds the dead slot's mending byte, so that no
 * client takes the slot meanwhile; if it dies it loses the byte, and the next reaper starts over:
 * every step here may be done twice. A reaper that has done its portion leaves the same state as
 * one that died. The dead one's own byte stays free: a reaper that is stopped does not make it look
 * alive, so others take over the lock that it died with. */
#include "index.h"

#include <errno.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#define QUARANTINE_NS UINT64_C(1000000000)

static uint32_t client_state(const lci_handle *h, uint32_t slot) {
    return lc_load_acquire(&lcs_client_of(h->at, slot)->state);
}

static bool writes_any(const lci_reservation *r, uint32_t slot) {
    uint32_t shards = lc_load(&r->shards);
    for (uint32_t s = 0; s < shards && s < LCI_SHARDS; s++) {
        uint32_t word = lc_load_acquire(&r->shard[s]);
        uint32_t status = word & LCI_SHARD_STATUS;
        bool written = status != LCI_SHARD_PENDING && status != LCI_SHARD_OPEN;
        if (!written && (word & LCI_SHARD_SLOT) == slot) return true;
    }
    return false;
}

/* Work on one dead client, under its mending byte. */
typedef struct reaping {
    lci_handle *h;
    uint32_t slot;
    int wait;
    uint64_t deadline;
    int64_t left;   /* what may still be done, in pins; the step that uses it up is the last */
    bool pins_stay; /* for now, of pages that were being written: a device's copies, or we live */
    uint32_t n, pages[LCI_HOLD + LCI_CHUNK_PAGES];
} reaping;

/* Unlink what a doomed reservation lists, chunk by chunk. False: there is more. */
static bool drain(reaping *r, lc_txn *t, uint32_t rid) {
    lci_handle *h = r->h;
    lci_reservation *res = &h->res[rid];
    while (r->n < LCI_HOLD && (int64_t)r->n * LCI_REAP_PAGE < r->left && !t->error) {
        const lci_chunk *c = lci_list_chunk(h, &res->pages);
        uint32_t n = c ? lci_list_part(h, t, &res->pages, c) : 0;
        for (uint32_t i = 0; i < n; i++) r->pages[r->n++] = lc_load(&c->page[i]);
        if (!t->error) lci_end_reservation(h, t, rid, 1);
        if (lc_load(&res->state) != LCI_RES_DOOMED) return true;
    }
    return false;
}

/* A reservation ends when the dead client still had to write a shard of it. If all that
 * is left is others', it stays active without an owner. False: there is more of it. */
static bool reap_reservation(reaping *r, lc_txn *t, uint32_t rid) {
    lci_handle *h = r->h;
    lci_reservation *res = &h->res[rid];
    uint32_t state = lc_load(&res->state), owner = lc_load(&res->owner);
    if (state == LCI_RES_FREE) return true;
    if (state == LCI_RES_DOOMED && owner == r->slot) return drain(r, t, rid);
    if (lci_complete(res)) {
        lci_flag_ended(h, rid); /* the client that should have said so may be the dead one */
        return true;
    }
    if (writes_any(res, r->slot)) {
        if (lci_doom_reservation(h, t, rid, r->slot)) return drain(r, t, rid);
    } else if (owner == r->slot) { /* and so it is not doomed */
        lc_txn_set(t, &res->owner, 0);
    }
    lci_step(t);
    return true;
}

/* After the commit that doomed them. Pages that were used again since are not doomed. */
static void unpin_drained(reaping *r) {
    for (uint32_t i = 0; i < r->n && !r->pins_stay; i++) {
        uint32_t page = r->pages[i];
        if (page < r->h->page_count && lci_state_of(lc_load(&r->h->pages[page].word)) == LCI_DOOMED)
            lc_store_release(lci_pin(r->h, r->slot, page), 0);
    }
}

/* One hold of the lock: of its reservations from `*rid` on. What had ended is taken in as well: a page
 * that was published stays, and none of it is in quarantine. */
static int reap_some_records(reaping *r, uint32_t *rid, bool *more) {
    lci_handle *h = r->h;
    lc_txn t;
    int rc = lci_lock(h, &t, LCI_OP_REAP, r->wait, r->deadline);
    if (rc != LC_OK) return rc;
    uint32_t end = lc_load(&h->root->res_fresh), work = 0;
    bool whole = true;
    if (end > h->res_count) end = h->res_count;
    r->n = 0;
    for (uint32_t i = 0; i < 64 && *rid < end && whole && !t.error; i++) {
        whole = reap_reservation(r, &t, *rid);
        *rid += whole;
    }
    if (whole && !t.error) work = lci_collect(h, &t, LCI_HOLD);
    *more = *rid < end || work;
    if (!*more) lci_ticket_client_gone(h, &t, r->slot);
    rc = lci_unlock(h, &t);
    if (rc == LC_OK) unpin_drained(r);
    r->left -= (int64_t)(r->n + work) * LCI_REAP_PAGE;
    return rc;
}

static int reap_records(reaping *r) {
    uint32_t rid = 0;
    int rc = LC_OK;
    for (bool more = true; more && r->left > 0 && rc == LC_OK;) rc = reap_some_records(r, &rid, &more);
    return rc;
}

/* ------------------------------------------------------------------ its row */

/* The first page from `page` on that it pins; those that it does not, four at a time. */
static uint32_t next_pinned(const lci_handle *h, uint32_t slot, uint32_t page) {
    const _Atomic uint64_t *four = (const _Atomic uint64_t *)lci_pin(h, slot, 0);
    while (page < h->page_count) {
        if (page % 4 == 0 && !lc_load(&four[page / 4])) page += 4;
        else if (lc_load(lci_pin(h, slot, page))) return page;
        else page++;
    }
    return h->page_count;
}

/* The next pages that it pins, as many as may be worked off; in `*page` where the others begin. */
static uint32_t gather(reaping *r, uint32_t *page) {
    const lci_handle *h = r->h;
    bool any_held = lc_load(&h->root->held) != 0;
    for (r->n = 0; r->n < LCI_HOLD && r->left > 0;) {
        *page = next_pinned(h, r->slot, *page);
        if (*page == h->page_count) break;
        r->left -= any_held && lci_held_by(h, *page, r->slot) ? LCI_REAP_PAGE : 1;
        r->pages[r->n++] = (*page)++;
    }
    return r->n;
}

static int doom_held(const reaping *r) {
    if (!lc_load(&r->h->root->held)) return LC_OK;
    return lci_reap_held(r->h, r->slot, r->pages, r->n, r->wait, r->deadline);
}

/* May a copy that the dead client started still write this page? */
static bool may_be_written(const lci_page *p) {
    uint32_t word = lc_load_acquire(&p->word), state = lci_state_of(word);
    return state == LCI_WRITING || state == LCI_HELD ||
           (state == LCI_DOOMED && (word & LCI_UNWRITTEN));
}

/* Clear the dead client's row, which has no other writer now. Where pins stay, `quarantine_until_ns`,
 * which says nothing before the quarantine begins, is the page up to which that is done. */
static int reap_row(reaping *r) {
    lci_handle *h = r->h;
    lcs_client *c = lcs_client_of(h->at, r->slot);
    uint64_t done = r->pins_stay ? lc_load(&c->quarantine_until_ns) : 0;
    uint32_t page = done < h->page_count ? (uint32_t)done : h->page_count;
    while (gather(r, &page)) {
        int rc = doom_held(r); /* before the pins: what is held is pinned */
        if (rc != LC_OK) return rc;
        for (uint32_t i = 0; i < r->n; i++)
            if (!r->pins_stay || !may_be_written(&h->pages[r->pages[i]]))
                lc_store_release(lci_pin(h, r->slot, r->pages[i]), 0);
        if (r->pins_stay) lc_store_release(&c->quarantine_until_ns, page);
    }
    return LC_OK;
}

enum copies { COPIES_OVER, COPIES_GOING_ON, COPIES_UNKNOWN };

/* Has every thread of the dead client ended, so that the kernel has torn down its device context
 * and no copy is under way any more? */
static enum copies copies(const lci_handle *h, const lcs_client *c) {
    uint64_t pidns = lc_load(&c->pidns);
    uint32_t pid = lc_load(&c->pid);
    if (pidns == 0 || pidns != h->at->pidns) return COPIES_UNKNOWN;
    uint64_t start = lcs_start_ticks(pid), clock = h->at->time_namespace;
    bool another = start != 0 && start != lc_load(&c->start_ticks);
    /* Another process by now, unless its start was counted from another instant. */
    bool counted_alike = clock != 0 && clock == lcs_header_of(h->at)->time_namespace;
    if (another && counted_alike) return COPIES_OVER;
    int fd = (int)syscall(SYS_pidfd_open, pid, 0);
    if (fd < 0) return errno == ESRCH ? COPIES_OVER : COPIES_UNKNOWN;
    struct pollfd poller = {.fd = fd, .events = POLLIN};
    int ready = poll(&poller, 1, 0);
    close(fd);
    if (ready == 1) return COPIES_OVER;
    return ready == 0 && !another ? COPIES_GOING_ON : COPIES_UNKNOWN;
}

/* For clients that had too little and wait for this, or look after us. The dead one's pages
 * first. */
static void say_reaped(lci_handle *h) {
    atomic_fetch_add_explicit(&h->root->reaped, 1, memory_order_release);
    lci_notify(h);
}

static void end_slot(lcs_client *c) {
    lc_store(&c->epoch, lc_load(&c->epoch) + 1);
    lc_store_release(&c->state, LCS_CLIENT_FREE);
}

static int reap_portion(reaping *r) {
    lci_handle *h = r->h;
    lcs_client *c = lcs_client_of(h->at, r->slot);
    uint32_t state = client_state(h, r->slot);
    if (state == LCS_CLIENT_TAKEN) {
        r->pins_stay = (lc_load(&c->flags) & LCS_FLAG_DEVICE) != 0;
        int rc = reap_records(r);
        if (rc == LC_OK) rc = reap_row(r);
        if (rc != LC_OK || r->left <= 0) return rc;
        if (r->pins_stay && next_pinned(h, r->slot, 0) < h->page_count) {
            lc_store(&c->quarantine_until_ns, lcs_now_ns() + QUARANTINE_NS);
            lc_store_release(&c->state, LCS_CLIENT_QUARANTINE);
            state = LCS_CLIENT_QUARANTINE;
            say_reaped(h);
        }
    }
    if (state == LCS_CLIENT_QUARANTINE) {
        enum copies now = copies(h, c);
        if (now == COPIES_GOING_ON) return LC_OK;
        uint64_t until = lc_load(&c->quarantine_until_ns);
        if (now == COPIES_UNKNOWN && lcs_now_ns() < until) return LC_OK;
        r->pins_stay = false;
        int rc = reap_row(r);
        if (rc != LC_OK || r->left <= 0) return rc;
    }
    end_slot(c);
    say_reaped(h);
    return LC_OK;
}

/* A portion, or (`left` is without end) all of it. 1: it was dead. */
static int reap_dead(lci_handle *h, uint32_t slot, int wait, uint64_t deadline, int64_t *left) {
    uint32_t state = client_state(h, slot);
    if (state != LCS_CLIENT_TAKEN && state != LCS_CLIENT_QUARANTINE) return 0;
    reaping r = {.h = h, .slot = slot, .wait = wait, .deadline = deadline, .left = *left};
    int rc = reap_portion(&r);
    if (rc == LC_OK && r.left <= 0) say_reaped(h);
    /* Its row has been looked through, unless nothing could be done. */
    if (state == LCS_CLIENT_TAKEN || r.left != *left) r.left -= h->page_count / LCI_REAP_PAGE;
    *left = r.left;
    return rc == LC_OK ? 1 : rc;
}

int lci_reap_some(lci_handle *h, uint32_t slot, int wait, uint64_t deadline, int64_t *left) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    if (slot == 0 || slot >= LCS_SLOTS) return LC_E_RANGE;
    if (slot == h->at->slot) return 0;
    if (client_state(h, slot) == LCS_CLIENT_FREE) return 0;
    if (wait == LC_TRY ? pthread_mutex_trylock(&h->at->door) : pthread_mutex_lock(&h->at->door))
        return LC_E_BUSY;
    rc = lcs_slot_mend(h->at, slot);
    if (rc == LC_OK) {
        LC_PAUSE(LC_AT_MEND);
        rc = reap_dead(h, slot, wait, deadline, left);
        lcs_slot_mended(h->at, slot);
    } else if (rc == LC_E_BUSY) {
        rc = 0; /* it lives, or is being reaped */
    }
    pthread_mutex_unlock(&h->at->door);
    return rc;
}

/* Take back all that the client of `slot` held, if it is dead. 1: it was (or is in quarantine), 0: it
 * lives or the slot is free; LC_E_BUSY, LC_E_INTR: call again. */
LC_API int lci_reap_slot(lci_handle *h, uint32_t slot, int wait, uint64_t deadline) {
    int64_t left = INT64_MAX;
    return lci_reap_some(h, slot, wait, deadline, &left);
}

/* Act as the dead client in a new epoch, so that others see that the owner of a lock that it still
 * holds is dead: the epoch is raised before the slot's byte says again that a client lives
 * there. */
static int reap_as_guest(lci_handle *h, uint32_t slot, int wait, uint64_t deadline) {
    lcs_client *c = lcs_client_of(h->at, slot);
    if (client_state(h, slot) == LCS_CLIENT_FREE) return 0;
    uint32_t epoch = lc_load(&c->epoch) + 1;
    lc_store_release(&c->epoch, epoch);
    int rc = lcs_byte_lock(h->at->life_fd, LCS_BYTE_SLOTS + slot, 1);
    if (rc != LC_OK) return rc == LC_E_BUSY ? 0 : rc;
    h->at->slot = slot;
    h->at->epoch = epoch;
    h->at->guest = 1;
    LC_PAUSE(LC_AT_MEND);
    int64_t left = INT64_MAX;
    rc = reap_dead(h, slot, wait, deadline, &left);
    h->at->slot = 0;
    h->at->epoch = 0;
    h->at->guest = 0;
    lcs_byte_unlock(h->at->life_fd, LCS_BYTE_SLOTS + slot);
    return rc;
}

/* The same for a process that has no slot yet because all are taken. */
LC_API int lci_reap_unjoined(lci_handle *h, uint32_t slot, int wait, uint64_t deadline) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->slot != 0 || slot == 0 || slot >= LCS_SLOTS) return LC_E_RANGE;
    if (client_state(h, slot) == LCS_CLIENT_FREE) return 0;
    rc = lcs_slot_mend(h->at, slot);
    if (rc != LC_OK) return rc == LC_E_BUSY ? 0 : rc;
    rc = reap_as_guest(h, slot, wait, deadline);
    lcs_slot_mended(h->at, slot);
    return rc;
}

/* Before a client leaves: whatever it still holds goes the way of a dead one's, without
 * quarantine, since it says itself that it has finished. */
LC_API int lci_leave(lci_handle *h, int wait, uint64_t deadline) {
    lcs_attachment *at = h->at;
    if (*at->fork_word != 1) return LC_E_FORKED;
    if (at->readonly || at->slot == 0) return LC_OK;
    if (lc_load(&lcs_client_of(at, at->slot)->epoch) != at->epoch) return LC_OK; /* reaped before */
    if (wait == LC_TRY ? pthread_mutex_trylock(&at->door) : pthread_mutex_lock(&at->door))
        return LC_E_BUSY;
    /* From here on no call of this handle begins; those that pin right now end under `rows`. */
    pthread_mutex_lock(&at->rows);
    lc_store(&at->leaving, 1);
    pthread_mutex_unlock(&at->rows);
    reaping r = {.h = h, .slot = at->slot, .wait = wait, .deadline = deadline, .left = INT64_MAX,
                 .pins_stay = true};
    int rc = reap_records(&r);
    for (uint32_t page = 0; rc == LC_OK && gather(&r, &page);) rc = doom_held(&r);
    if (rc == LC_OK) {
        pthread_mutex_lock(&at->rows);
        for (uint32_t page = 0; (page = next_pinned(h, at->slot, page)) < h->page_count; page++)
            lc_store_release(lci_pin(h, at->slot, page), 0);
        pthread_mutex_unlock(&at->rows);
        lci_notify(h);
    }
    pthread_mutex_unlock(&at->door);
    return rc;
}
