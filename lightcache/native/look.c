/* Looking for dead clients, for a call that could use what they hold: one that evicts, or one that
 * is about to give less than it was asked for. design/index.md, section 12, says which calls look,
 * and when. */
#include "event.h"
#include "index.h"

#define EVERY_NS UINT64_C(1000000000) /* calls that evict, in the whole cache */
#define REAPER_NS UINT64_C(10000000)  /* longer than another needs for a portion */
#define ROUND ((LCI_REAP_MOST) / LCI_LOOK_ROUNDS)

void lci_look_begin(const lci_handle *h, lci_look_op *look, uint64_t now) {
    if (look->begun_ns) return;
    look->begun_ns = now;
    look->reaped = lc_load_acquire(&h->root->reaped);
}

bool lci_look_due(const lci_handle *h, uint64_t now) {
    /* A time to come is damage: one look too many. */
    return now - lc_load(&h->root->looking_ns) >= EVERY_NS;
}

void lci_look_if_due(lci_handle *h, lci_look_op *look) {
    uint64_t now = lc_load(&lcs_lock_of(h->at)->since_ns);
    if (LC_LIKELY(!lci_look_due(h, now))) return;
    lc_store(&h->root->looking_ns, now); /* it is ours: the next holder of the lock sees it */
    look->due = 1;
}

/* Slots whose client has died, those in quarantine too: a bit each. */
static uint64_t dead_slots(const lci_handle *h) {
    uint64_t dead = 0;
    for (uint32_t slot = 1; slot < LCS_SLOTS; slot++)
        if (lc_load_acquire(&lcs_client_of(h->at, slot)->state) != LCS_CLIENT_FREE &&
            lcs_slot_alive(h->at, slot) == 0)
            dead |= UINT64_C(1) << slot;
    return dead;
}

static bool taken(const lci_handle *h, uint32_t slot) {
    return lc_load_acquire(&lcs_client_of(h->at, slot)->state) == LCS_CLIENT_TAKEN;
}

/* Take one dead client back, or as much of what it held as this call may. 1: something came back since
 * we looked, by us or by another; 0: it is in quarantine still; LC_E_BUSY: another is at it. */
static int take_back(lci_handle *h, lci_look_op *look, uint32_t slot, uint64_t deadline) {
    int64_t may = ((int64_t)LCI_LOOK_ROUNDS - look->rounds) * ROUND, left = may;
    int rc = lci_reap_some(h, slot, LC_BLOCK, deadline, &left);
    look->rounds += (uint32_t)((may - left + ROUND - 1) / ROUND);
    if (rc < 0) return rc;
    if (lc_load_acquire(&h->root->reaped) != look->reaped) return 1;
    return taken(h, slot) ? LC_E_BUSY : 0;
}

/* The first dead client from which something comes back. Clients that gave tickets that others are
 * still to adopt come last, and only for a call that has no other way: the adopters may finish. */
static int take_one_back(lci_handle *h, lci_look_op *look, uint64_t dead, bool less,
                         uint64_t deadline) {
    uint64_t givers = 0;
    int rc = 0;
    for (uint64_t bits = dead; bits; bits &= bits - 1)
        if (lci_ticket_awaited(h, (uint32_t)__builtin_ctzll(bits), dead)) givers |= bits & -bits;
    for (int last = 0; last <= less; last++) {
        for (uint64_t bits = last ? givers : dead & ~givers; bits; bits &= bits - 1) {
            int one = take_back(h, look, (uint32_t)__builtin_ctzll(bits), deadline);
            if (one == 1) return 1;
            if (one != 0) rc = one;
            if (one == LC_E_INTR) return one;
        }
    }
    return rc;
}

/* Until the client that is taking back now has taken something back. */
static int wait_for_reaper(lci_handle *h, const lci_look_op *look) {
    uint64_t now = lcs_now_ns(), end = now + REAPER_NS;
    for (; now < end; now = lcs_now_ns()) {
        uint32_t seen = lc_load_acquire(&h->root->event);
        if (lc_load_acquire(&h->root->reaped) != look->reaped) break;
        if (lc_event_sleep(&h->root->event, seen, true, end - now) == LC_E_INTR) return LC_E_INTR;
    }
    return 1;
}

/* Is there more to take back: from another client, or from one that held more than a portion? */
static bool any_taken(const lci_handle *h, uint64_t dead) {
    for (uint64_t bits = dead; bits; bits &= bits - 1)
        if (taken(h, (uint32_t)__builtin_ctzll(bits))) return true;
    return false;
}

static int look_for_dead(lci_handle *h, lci_look_op *look, bool less, int wait, uint64_t deadline) {
    lci_root *root = h->root;
    uint64_t now = lcs_now_ns();
    uint32_t before = look->reaped;
    look->reaped = lc_load_acquire(&root->reaped);
    if (less) {
        if (look->reaped != before) return 1; /* meanwhile, and perhaps after our last attempt */
        if (now - lc_load(&root->looked_ns) <= now - look->begun_ns) return 0;
        lc_store(&root->looking_ns, now);
    }
    uint64_t dead = dead_slots(h);
    if (!dead) {
        lc_store(&root->looked_ns, now);
        return 0;
    }
    if (wait == LC_TRY) {
        if (!less) lc_store(&root->looking_ns, 0); /* a caller without a `look` asks again */
        return LC_E_BUSY;
    }
    int rc = take_one_back(h, look, dead, less, deadline);
    if (rc == 1 && any_taken(h, dead)) lc_store(&root->looking_ns, 0); /* the next looks at once */
    if (!less) return rc == LC_E_INTR ? rc : 0;
    if (rc == LC_E_BUSY && !look->waited) {
        look->waited = 1;
        rc = wait_for_reaper(h, look);
    }
    before = look->reaped;
    look->reaped = lc_load_acquire(&root->reaped);
    if (rc != LC_E_INTR && look->reaped != before) rc = 1;
    if (rc == 0) lc_store(&root->looked_ns, now); /* what is left is in quarantine */
    return rc == 1 || rc == LC_E_INTR ? rc : 0;
}

int lci_look(lci_handle *h, lci_look_op *look, bool less, int wait, uint64_t deadline) {
    if (look->rounds >= LCI_LOOK_ROUNDS) return 0; /* it has done its share */
    int rc = look_for_dead(h, look, less, wait, deadline);
    look->due = rc < 0; /* the same call continues with it */
    if (rc >= 0) look->rounds++;
    return rc;
}

/* The same for a caller that has found by itself that there is too little. 1: something came back;
 * ask again. LC_E_BUSY, LC_E_INTR: call again with the same `look`. */
LC_API int lci_look_for_dead(lci_handle *h, lci_look_op *look, int wait, uint64_t deadline) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    lci_look_begin(h, look, lcs_now_ns());
    return lci_look(h, look, true, wait, deadline);
}
