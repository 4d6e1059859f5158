/* Taking back what a dead client held. The reaper holds the dead slot's mending byte, so that nobody
 * takes the slot meanwhile; dying itself it loses the byte, and the next reaper starts over: every
 * step here may be done twice. The dead one's own byte stays free: a reaper that is stopped does not
 * make it look alive, so others take over the lock that it died with. */
#include "index.h"

#include <errno.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#define QUARANTINE_NS UINT64_C(1000000000)

static bool writes_any(const lci_reservation *r, uint32_t slot) {
    uint32_t shards = lc_load(&r->shards);
    for (uint32_t s = 0; s < shards && s < LCI_SHARDS; s++) {
        uint32_t word = lc_load_acquire(&r->shard[s]);
        if ((word & LCI_SHARD_STATUS) == LCI_SHARD_PENDING && (word & LCI_SHARD_SLOT) == slot)
            return true;
    }
    return false;
}

/* A reservation ends when the dead client still had to write a shard of it. If others have all
 * that is left, it goes on without an owner. */
static void reap_reservation(lci_handle *h, lc_txn *t, uint32_t rid, uint32_t slot) {
    lci_reservation *r = &h->res[rid];
    uint32_t state = lc_load(&r->state);
    if (state == LCI_RES_FREE) return;
    if (state == LCI_RES_DOOMED || lci_complete(r)) {
        lci_flag_ended(h, rid); /* whoever should have said so may be the dead one */
        return;
    }
    if (writes_any(r, slot)) lci_doom_reservation(h, t, rid);
    else if (lc_load(&r->owner) == slot) lc_txn_set(t, &r->owner, 0);
    lci_step(t);
}

static int reap_records(lci_handle *h, uint32_t slot, int wait, uint64_t deadline) {
    lc_txn t;
    uint32_t rid = 0, end = 1, work;
    do {
        int rc = lci_lock(h, &t, LCI_OP_REAP, wait, deadline);
        if (rc != LC_OK) return rc;
        end = lc_load(&h->root->res_fresh);
        if (end > h->res_count) end = h->res_count;
        for (uint32_t i = 0; i < 64 && rid < end && !t.error; i++, rid++)
            reap_reservation(h, &t, rid, slot);
        work = lci_collect(h, &t, 256);
        if (rid >= end && !work) lci_ticket_client_gone(h, &t, slot);
        rc = lci_unlock(h, &t);
        if (rc != LC_OK) return rc;
    } while (rid < end || work);
    return lci_reap_pages(h, slot, wait, deadline);
}

/* May a copy that the dead client started still write this page? */
static bool may_be_written(const lci_page *p) {
    uint32_t word = lc_load_acquire(&p->word), state = lci_state_of(word);
    return state == LCI_WRITING || state == LCI_HELD ||
           (state == LCI_DOOMED && (word & LCI_UNWRITTEN));
}

/* Clear the dead client's row, which has no other writer now. Returns the pins kept. */
static uint32_t clear_row(lci_handle *h, uint32_t slot, bool quarantine) {
    uint32_t kept = 0;
    for (uint32_t page = 0; page < h->page_count; page++) {
        _Atomic uint16_t *count = lci_pin(h, slot, page);
        if (LC_LIKELY(lc_load(count) == 0)) continue;
        if (quarantine && may_be_written(&h->pages[page])) kept++;
        else lc_store_release(count, 0);
    }
    return kept;
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

/* For those who had too little and wait for this, or look behind us. The dead one's pages first. */
static void say_reaped(lci_handle *h) {
    atomic_fetch_add_explicit(&h->root->reaped, 1, memory_order_release);
    lci_notify(h);
}

static void end_slot(lcs_client *c) {
    lc_store(&c->epoch, lc_load(&c->epoch) + 1);
    lc_store_release(&c->state, LCS_CLIENT_FREE);
}

static int reap_held(lci_handle *h, uint32_t slot, int wait, uint64_t deadline) {
    lcs_client *c = lcs_client_of(h->at, slot);
    uint32_t state = lc_load_acquire(&c->state);
    bool device = (lc_load(&c->flags) & LCS_FLAG_DEVICE) != 0;
    if (state == LCS_CLIENT_TAKEN) {
        int rc = reap_records(h, slot, wait, deadline);
        if (rc != LC_OK) return rc;
        if (clear_row(h, slot, device)) {
            lc_store(&c->quarantine_until_ns, lcs_now_ns() + QUARANTINE_NS);
            lc_store_release(&c->state, LCS_CLIENT_QUARANTINE);
            state = LCS_CLIENT_QUARANTINE;
            say_reaped(h);
        }
    }
    if (state == LCS_CLIENT_QUARANTINE) {
        enum copies now = copies(h, c);
        if (now == COPIES_GOING_ON) return 1;
        uint64_t until = lc_load(&c->quarantine_until_ns);
        if (now == COPIES_UNKNOWN && lcs_now_ns() < until) return 1;
        clear_row(h, slot, false);
    } else if (state != LCS_CLIENT_TAKEN) {
        return 0;
    }
    end_slot(c);
    say_reaped(h);
    return 1;
}

/* Take back what the client of `slot` held, if it is dead. 1: it was (or is in quarantine), 0: it
 * lives or nobody is there; LC_E_BUSY, LC_E_INTR: call again. */
LC_API int lci_reap_slot(lci_handle *h, uint32_t slot, int wait, uint64_t deadline) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    if (slot == 0 || slot >= LCS_SLOTS) return LC_E_RANGE;
    if (slot == h->at->slot) return 0;
    if (lc_load_acquire(&lcs_client_of(h->at, slot)->state) == LCS_CLIENT_FREE) return 0;
    if (wait == LC_TRY ? pthread_mutex_trylock(&h->at->door) : pthread_mutex_lock(&h->at->door))
        return LC_E_BUSY;
    rc = lcs_slot_mend(h->at, slot);
    if (rc == LC_OK) {
        LC_PAUSE(LC_AT_MEND);
        rc = reap_held(h, slot, wait, deadline);
        lcs_slot_mended(h->at, slot);
    } else if (rc == LC_E_BUSY) {
        rc = 0; /* it lives, or is being reaped */
    }
    pthread_mutex_unlock(&h->at->door);
    return rc;
}

/* Act as the dead client in a new epoch, so that a lock the dead one still holds is seen to be
 * nobody's: the epoch is raised before the slot's byte says again that somebody lives there. */
static int reap_as_guest(lci_handle *h, uint32_t slot, int wait, uint64_t deadline) {
    lcs_client *c = lcs_client_of(h->at, slot);
    if (lc_load_acquire(&c->state) == LCS_CLIENT_FREE) return 0;
    uint32_t epoch = lc_load(&c->epoch) + 1;
    lc_store_release(&c->epoch, epoch);
    int rc = lcs_byte_lock(h->at->life_fd, LCS_BYTE_SLOTS + slot, 1);
    if (rc != LC_OK) return rc == LC_E_BUSY ? 0 : rc;
    h->at->slot = slot;
    h->at->epoch = epoch;
    h->at->guest = 1;
    LC_PAUSE(LC_AT_MEND);
    rc = reap_held(h, slot, wait, deadline);
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
    if (lc_load_acquire(&lcs_client_of(h->at, slot)->state) == LCS_CLIENT_FREE) return 0;
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
    int rc = reap_records(h, at->slot, wait, deadline);
    if (rc == LC_OK) {
        pthread_mutex_lock(&at->rows);
        clear_row(h, at->slot, false);
        pthread_mutex_unlock(&at->rows);
        lci_notify(h);
    }
    pthread_mutex_unlock(&at->door);
    return rc;
}
