/* Room for pages, before anybody takes them: memory that has grown, doomed pages whose last pin has
 * gone, and what was used longest ago. */
#include "index.h"

uint32_t lci_available(const lci_handle *h) {
    uint32_t fresh = lc_load(&h->root->fresh), grown = lc_load(&h->root->grown);
    return lc_load(&h->root->free_count) + (grown > fresh ? grown - fresh : 0);
}

/* See to it that a namespace may have `want` pages more, by its own, as far as possible. */
int lci_make_quota_room(lci_handle *h, lc_txn *t, lci_room *room, uint32_t id, uint32_t want) {
    const lci_namespace *ns = &h->ns[id];
    uint32_t quota = lc_load(&ns->quota);
    room->eviction.cause = LCI_FOR_QUOTA;
    while (quota && lc_load(&ns->pages) + want > quota && room->looked < h->page_count) {
        /* Nothing of a prefix can go before all of it has been taken in. */
        if (lci_collect(h, t, 256)) return LCI_ROOM_AGAIN;
        uint32_t over = lc_load(&ns->pages) + want - quota;
        if (room->looked - room->looked_before >= 16 * LCI_WINDOW) {
            room->looked_before = room->looked;
            return LCI_ROOM_AGAIN;
        }
        if (lci_evict_namespace(h, t, &room->eviction, over, id))
            room->looked = room->looked_before = 0;
        else room->looked += LCI_WINDOW;
        lci_step(t);
        if (t->error) return t->error;
    }
    return LCI_ROOM_MADE;
}

/* See to it that `want` pages are free, as far as possible. LC_E_GROW asks for memory first. */
int lci_make_room(lci_handle *h, lc_txn *t, lci_room *room, uint32_t want) {
    uint32_t have = lci_available(h); /* once: the difference must not wrap when somebody scribbles */
    if (have >= want) return LCI_ROOM_MADE;
    if (lc_load(&h->root->grown) < h->page_count) {
        room->wanted = want - have;
        return LC_E_GROW;
    }
    if (lci_collect(h, t, 256)) return LCI_ROOM_AGAIN; /* as for a quota */
    if (lc_load(&h->root->doomed)) lci_collect_doomed(h, t, 256);
    room->eviction.cause = LCI_FOR_ROOM;
    for (uint32_t steps = 0; lci_available(h) < want && !room->eviction.exhausted; steps++) {
        if (t->error) return t->error;
        if (steps == 8) return LCI_ROOM_AGAIN;
        lci_evict(h, t, &room->eviction, want - lci_available(h));
        lci_step(t);
    }
    return t->error;
}
