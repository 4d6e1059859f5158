/* Is an undone step gone without a trace? */
#include "deaths.h"

#include <stdlib.h>

static lci_handle *of_undone, *of_safe;

static lci_handle *on(lci_handle **h, uint8_t *base) {
    lci_geometry g;
    CHECK_EQ(lci_geometry_of(PAGES, LCI_LRU, &g), LC_OK);
    free(*h);
    *h = lci_handle_on(base, &g, NULL);
    CHECK(*h);
    return *h;
}

#define DIFFER(field) (lc_load(&a->field) != lc_load(&b->field))

static bool roots(const lci_root *a, const lci_root *b) {
    for (int i = 0; i < 2; i++)
        if (DIFFER(now[i])) return true;
    for (int i = 0; i < LCI_LEVELS * 2; i++)
        if (DIFFER(occupied[i])) return true;
    for (int i = 0; i < LCI_NUMBERS; i++)
        if (DIFFER(group[i].pages) || DIFFER(group[i].minimum)) return true;
    return DIFFER(free_head) || DIFFER(free_count) || DIFFER(fresh) || DIFFER(grown) ||
           DIFFER(named) || DIFFER(writing) || DIFFER(doomed) || DIFFER(chunk_head) ||
           DIFFER(chunk_fresh) || DIFFER(chunk_used) || DIFFER(res_head) || DIFFER(res_fresh) ||
           DIFFER(res_used) || DIFFER(ticket_used) || DIFFER(ticket_end) || DIFFER(clearing) ||
           DIFFER(queued) || DIFFER(kept) || DIFFER(held);
}

/* The pages of a chunk count only while it is on a list: what a free one held is dead. */
static bool lists(const lci_list *a, const lci_list *b) {
    uint32_t at = lc_load(&b->first), n = 0;
    if (DIFFER(count) || DIFFER(first) || DIFFER(last)) return true;
    for (; n < lc_load(&b->count); at = lc_load(&of_safe->chunks[at].next)) {
        const lci_chunk *left = &of_undone->chunks[at], *right = &of_safe->chunks[at];
        for (uint32_t i = 0; i < lc_load(&right->count); i++, n++)
            if (lc_load(&left->page[i]) != lc_load(&right->page[i])) return true;
    }
    return false;
}

static bool namespaces(const lci_namespace *a, const lci_namespace *b) {
    uint32_t state = lc_load(&b->state);
    if (state == LCI_NS_FREE || state == LCI_NS_CLEARED) return false;
    return DIFFER(state) || DIFFER(epoch) || DIFFER(pages) || DIFFER(quota) ||
           DIFFER(minimum) || (state == LCI_NS_CLEARING && DIFFER(cursor));
}

/* Naming does this under the lock, and as everywhere without the log. */
static bool published(uint32_t is, uint32_t was) {
    return (was & LCI_SHARD_STATUS) == LCI_SHARD_PENDING && is == (was | LCI_SHARD_DONE);
}

static bool reservations(const lci_reservation *a, const lci_reservation *b) {
    if (DIFFER(state) || DIFFER(gen)) return true;
    if (lc_load(&b->state) == LCI_RES_FREE) return DIFFER(next_free);
    for (uint32_t s = 0; s < lc_load(&b->shards); s++) {
        uint32_t is = lc_load(&a->shard[s]), was = lc_load(&b->shard[s]);
        if (is != was && !published(is, was)) return true;
    }
    return DIFFER(owner) || DIFFER(owner_epoch) || DIFFER(shards) || DIFFER(ns) ||
           lists(&a->pages, &b->pages);
}

static bool tickets(const lci_ticket *a, const lci_ticket *b) {
    if (DIFFER(state) || DIFFER(gen)) return true;
    if (lc_load(&b->state) == LCI_TICKET_FREE) return false;
    for (int w = 0; w < 2; w++)
        if (DIFFER(adopters[w]) || DIFFER(adopted[w])) return true;
    bool opened = lc_load(&b->state) != LCI_TICKET_BUILDING;
    return DIFFER(giver) || DIFFER(giver_epoch) || DIFFER(deadline_ns) ||
           (opened && DIFFER(total)) || DIFFER(reservation) || DIFFER(reservation_gen) ||
           lists(&a->pages, &b->pages);
}

static bool chunks(const lci_chunk *a, const lci_chunk *b) {
    return DIFFER(next) || DIFFER(count);
}

/* Pages of a published reservation become READY at once, and stay so. */
static bool made_ready(uint32_t is, uint32_t was) {
    uint32_t rid = lci_res_of(was);
    return lci_state_of(was) == LCI_WRITING && is == (was ^ LCI_WRITING ^ LCI_READY) &&
           lci_complete(&of_undone->res[rid - 1]);
}

static bool pages(const lci_page *a, const lci_page *b) {
    uint32_t state = lci_state_of(lc_load(&b->word));
    if (DIFFER(word) && !made_ready(lc_load(&a->word), lc_load(&b->word))) return true;
    if (state == LCI_FREE) return DIFFER(queue.next);
    if (state == LCI_HELD) return false; /* its word says all; the rest is dead */
    return DIFFER(gen) || DIFFER(lo) || DIFFER(hi) || DIFFER(next) || DIFFER(queue.prev) ||
           DIFFER(queue.next) || DIFFER(parent) || DIFFER(parent_gen) || DIFFER(children);
}

#define COMPARE(what, field, count)                                       \
    for (uint32_t i = 0; i < (count); i++)                                \
        if (what(&of_undone->field[i], &of_safe->field[i])) return #what

const char *difference(uint8_t *undone, uint8_t *safe) {
    lci_handle *h = on(&of_undone, undone);
    const lci_geometry *g = &on(&of_safe, safe)->geometry;
    if (roots(h->root, of_safe->root)) return "root";
    if (memcmp(undone + g->heads, safe + g->heads, LCI_LISTS * sizeof(lc_link))) return "heads";
    if (memcmp(undone + g->bucket, safe + g->bucket, g->buckets * 4)) return "buckets";
    if (memcmp(undone + g->rows, safe + g->rows, g->row_stride * 2)) return "row 0";
    COMPARE(pages, pages, lc_load(&of_safe->root->fresh));
    COMPARE(reservations, res, h->res_count);
    COMPARE(tickets, tickets, h->ticket_count);
    COMPARE(chunks, chunks, lc_load(&of_safe->root->chunk_fresh));
    COMPARE(namespaces, ns, LCI_NAMESPACES);
    return NULL;
}
