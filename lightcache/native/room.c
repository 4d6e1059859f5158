/* Room for pages, before they are taken: memory that has grown, doomed pages whose last pin has
 * gone, and what was used longest ago. */
#include "index.h"

#define NO_MEMORY_MOST_NS UINT64_C(60000000000)

uint32_t lci_available(const lci_handle *h) {
    uint32_t fresh = lc_load(&h->root->fresh), grown = lc_load(&h->root->grown);
    return lc_load(&h->root->free_count) + (grown > fresh ? grown - fresh : 0);
}

uint64_t lci_no_memory_left(const lci_handle *h) {
    uint64_t until = lc_load(&h->root->no_memory_ns);
    if (LC_LIKELY(!until)) return 0;
    uint64_t now = lcs_now_ns(), left = until - now;
    return until > now && left <= NO_MEMORY_MOST_NS ? left : 0; /* more than that is damage */
}

/* Record that the medium finds no memory for more pages: for this time calls evict instead of
 * asking for it. Advice, without the lock. */
LC_API int lci_no_memory(lci_handle *h, uint64_t nanoseconds) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    if (nanoseconds > NO_MEMORY_MOST_NS) nanoseconds = NO_MEMORY_MOST_NS;
    lc_store(&h->root->no_memory_ns, nanoseconds ? lcs_now_ns() + nanoseconds : 0);
    return LC_OK;
}

/* May memory be had for pages that have none? */
bool lci_may_grow(const lci_handle *h, const lci_room *room) {
    bool all = lc_load(&h->root->grown) >= h->page_count;
    return !all && !room->no_memory && !lci_no_memory_left(h);
}

/* See to it that a namespace may have `want` pages more, by its own, as far as possible. */
int lci_make_quota_room(lci_handle *h, lc_txn *t, lci_room *room, uint32_t id, uint32_t want) {
    const lci_namespace *ns = &h->ns[id];
    uint32_t quota = lc_load(&ns->quota);
    room->eviction.cause = LCI_FOR_QUOTA;
    while (quota && lc_load(&ns->pages) + want > quota && room->looked < h->page_count) {
        /* Nothing of a prefix can go before all of it has been taken in. */
        if (lci_collect(h, t, 256)) return LCI_ROOM_AGAIN;
        lci_look_if_due(h, room->look);
        uint32_t over = lc_load(&ns->pages) + want - quota;
        if (room->looked - room->looked_before >= 16 * LCI_WINDOW) {
            room->looked_before = room->looked;
            return LCI_ROOM_AGAIN;
        }
        if (lci_evict_namespace(h, t, &room->eviction, over, id))
            room->looked = room->looked_before = 0;
        else if (room->eviction.outbid) break;
        else room->looked += LCI_WINDOW;
        lci_step(t);
        if (t->error) return t->error;
    }
    return LCI_ROOM_MADE;
}

#define DOOMED_MOST 4096 /* pages that one call looks at before it gives less */

/* See to it that `want` pages are free, as far as possible. LC_E_GROW asks for memory first.
 *
 * Doomed pages come first, but no more of them are looked at than are wanted: while a lease pins
 * thousands, each call would pay for all. Only a call that finds nothing to evict looks on. */
int lci_make_room(lci_handle *h, lc_txn *t, lci_room *room, uint32_t want) {
    uint32_t have = lci_available(h); /* once: the difference must not wrap under scribbling */
    if (have >= want) return LCI_ROOM_MADE;
    if (lci_may_grow(h, room)) {
        room->wanted = want - have;
        return LC_E_GROW;
    }
    if (lci_collect(h, t, 256)) return LCI_ROOM_AGAIN; /* as for a quota */
    if (lc_load(&h->root->doomed)) lci_collect_doomed(h, t, want);
    room->eviction.cause = LCI_FOR_ROOM;
    if (lci_available(h) < want) lci_look_if_due(h, room->look);
    for (uint32_t steps = 0; lci_available(h) < want && !room->eviction.exhausted; steps++) {
        if (t->error) return t->error;
        if (room->eviction.outbid) break;
        if (steps == 8) return LCI_ROOM_AGAIN;
        lci_evict(h, t, &room->eviction, want - lci_available(h));
        lci_step(t);
    }
    if (lci_available(h) < want && *room->doomed < DOOMED_MOST &&
        *room->doomed < lc_load(&h->root->doomed) && !t->error) {
        uint32_t looked = lci_collect_doomed(h, t, 256);
        *room->doomed += looked;
        if (looked && !t->error) return LCI_ROOM_AGAIN;
    }
    return t->error;
}
