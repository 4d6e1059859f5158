#include "fields.h"

typedef struct table {
    field *out;
    uint32_t n;
    uint64_t live; /* of the fields to come, see fields.h */
    uint32_t live_mask;
} table;

static void add(table *t, const char *name, enum role role, uint64_t at, size_t stride,
                uint64_t count, size_t width) {
    NEED(t->n < MOST_FIELDS && (width == 1 || width == 2 || width == 4 || width == 8));
    t->out[t->n++] = (field){.name = name, .role = role, .at = at, .stride = (uint32_t)stride,
                             .count = (uint32_t)count, .width = (uint32_t)width,
                             .live = stride < 32 ? 0 : t->live, /* not words of an array */
                             .live_mask = t->live ? t->live_mask : UINT32_MAX};
}

/* A member of `count` records that begin at `at`; an array member counts as that many words. */
#define IN_USE(record, member, begin, mask) \
    t->live = (begin) + offsetof(record, member), t->live_mask = (mask)
#define ALWAYS() t->live = 0
#define ONE(record, member, role, begin, count)                                              \
    add(t, #record "." #member, role, (begin) + offsetof(record, member), sizeof(record), count, \
        sizeof(((record *)0)->member))
#define ARRAY(record, member, role, begin, words)                                            \
    add(t, #record "." #member, role, (begin) + offsetof(record, member),                    \
        sizeof(((record *)0)->member[0]), words, sizeof(((record *)0)->member[0]))

static void header_fields(table *t) {
    ONE(lcs_header, retired, PROTOCOL, 0, 1);
    ONE(lcs_header, disabled, PROTOCOL, 0, 1);
    ONE(lcs_header, time_namespace, HEADER, 0, 1);
    ARRAY(lcs_header, uuid, HEADER, 0, 16);
}

static void client_fields(table *t) {
    IN_USE(lcs_client, state, LCS_CLIENTS_OFFSET, UINT32_MAX);
    ONE(lcs_client, state, PROTOCOL, LCS_CLIENTS_OFFSET, LCS_SLOTS);
    ONE(lcs_client, epoch, PROTOCOL, LCS_CLIENTS_OFFSET, LCS_SLOTS);
    ONE(lcs_client, pid, PROTOCOL, LCS_CLIENTS_OFFSET, LCS_SLOTS);
    ONE(lcs_client, flags, PROTOCOL, LCS_CLIENTS_OFFSET, LCS_SLOTS);
    ONE(lcs_client, pidns, PROTOCOL, LCS_CLIENTS_OFFSET, LCS_SLOTS);
    ONE(lcs_client, start_ticks, PROTOCOL, LCS_CLIENTS_OFFSET, LCS_SLOTS);
    ONE(lcs_client, attached_ns, ADVICE, LCS_CLIENTS_OFFSET, LCS_SLOTS);
    ONE(lcs_client, quarantine_until_ns, PROTOCOL, LCS_CLIENTS_OFFSET, LCS_SLOTS);
    ARRAY(lcs_client, role, ADVICE, LCS_CLIENTS_OFFSET + sizeof(lcs_client), 4);
    ONE(lcs_client, lookups, ADVICE, LCS_CLIENTS_OFFSET, LCS_SLOTS);
    ONE(lcs_client, evicted_pages, ADVICE, LCS_CLIENTS_OFFSET, LCS_SLOTS);
}

static void lock_fields(table *t) {
    ALWAYS();
    ONE(lcs_lock, word, PROTOCOL, LCS_LOCK_OFFSET, 1);
    ONE(lcs_lock, sequence, PROTOCOL, LCS_LOCK_OFFSET, 1);
    ONE(lcs_lock, holder, PROTOCOL, LCS_LOCK_OFFSET, 1);
    ONE(lcs_lock, log_count, PROTOCOL, LCS_LOCK_OFFSET, 1);
    ONE(lcs_lock, operation, ADVICE, LCS_LOCK_OFFSET, 1);
    ONE(lcs_lock, since_ns, ADVICE, LCS_LOCK_OFFSET, 1);
    ONE(lcs_lock, hold_ns, ADVICE, LCS_LOCK_OFFSET, 1);
    ONE(lcs_lock, hold_max_ns, ADVICE, LCS_LOCK_OFFSET, 1);
    ONE(lcs_lock, recoveries, ADVICE, LCS_LOCK_OFFSET, 1);
    add(t, "log.word", PROTOCOL, LCS_LOG_OFFSET, 8, 64, 4);
    add(t, "log.old", PROTOCOL, LCS_LOG_OFFSET + 4, 8, 64, 4);
}

static void root_fields(table *t, uint64_t at) {
    ONE(lci_root, pages, DERIVED, at, 1);
    ONE(lci_root, buckets, DERIVED, at, 1);
    ONE(lci_root, reservations, DERIVED, at, 1);
    ONE(lci_root, tickets, DERIVED, at, 1);
    ONE(lci_root, chunks, DERIVED, at, 1);
    ONE(lci_root, index_bytes, DERIVED, at, 1);
    ONE(lci_root, free_head, DERIVED, at, 1);
    ONE(lci_root, free_count, DERIVED, at, 1);
    ONE(lci_root, fresh, TRUTH, at, 1);
    ONE(lci_root, grown, TRUTH, at, 1);
    ONE(lci_root, named, DERIVED, at, 1);
    ONE(lci_root, writing, DERIVED, at, 1);
    ONE(lci_root, doomed, DERIVED, at, 1);
    ONE(lci_root, chunk_head, DERIVED, at, 1);
    ONE(lci_root, chunk_fresh, TRUTH, at, 1);
    ONE(lci_root, chunk_used, DERIVED, at, 1);
    ONE(lci_root, res_head, DERIVED, at, 1);
    ONE(lci_root, res_fresh, TRUTH, at, 1);
    ONE(lci_root, res_used, DERIVED, at, 1);
    ONE(lci_root, ticket_used, DERIVED, at, 1);
    ONE(lci_root, ticket_end, DERIVED, at, 1);
    ONE(lci_root, clearing, DERIVED, at, 1);
    ONE(lci_root, queued, DERIVED, at, 1);
    ARRAY(lci_root, now, DERIVED, at, 2);
    ARRAY(lci_root, occupied, DERIVED, at, LCI_LEVELS * 2);
    ONE(lci_root, repairing, PROTOCOL, at, 1);
    ONE(lci_root, kept, DERIVED, at, 1);
    ONE(lci_root, held, DERIVED, at, 1);
    ONE(lci_root, reaped, ADVICE, at, 1);
    ONE(lci_root, looking_ns, ADVICE, at, 1);
    ONE(lci_root, looked_ns, ADVICE, at, 1);
    ONE(lci_root, no_memory_ns, ADVICE, at, 1);
    ONE(lci_root, joining_ns, ADVICE, at, 1);
    ONE(lci_root, clock, ADVICE, at, 1);
    ONE(lci_root, event, PROTOCOL, at, 1);
    ARRAY(lci_root, completed, PROTOCOL, at, 16);
    ARRAY(lci_root, evicted, ADVICE, at, LCI_CAUSES);
    for (uint32_t i = 0; i < 3; i++) {
        ONE(lci_root, group[i].pages, DERIVED, at, 1);
        ONE(lci_root, group[i].minimum, TRUTH, at, 1);
    }
}

static void page_fields(table *t, const lci_geometry *g) {
    IN_USE(lci_page, word, g->page, LCI_STATE_MASK);
    ONE(lci_page, lo, TRUTH, g->page, g->pages);
    ONE(lci_page, hi, TRUTH, g->page, g->pages);
    ONE(lci_page, pins, PROTOCOL, g->page, g->pages);
    ONE(lci_page, used, ADVICE, g->page, g->pages);
    ONE(lci_page, gen, TRUTH, g->page, g->pages);
    ONE(lci_page, word, TRUTH, g->page, g->pages);
    ONE(lci_page, next, DERIVED, g->page, g->pages);
    ONE(lci_page, queue.prev, DERIVED, g->page, g->pages);
    ONE(lci_page, queue.next, DERIVED, g->page, g->pages);
    ONE(lci_page, parent, TRUTH, g->page, g->pages);
    ONE(lci_page, parent_gen, TRUTH, g->page, g->pages);
    ONE(lci_page, children, DERIVED, g->page, g->pages);
    add(t, "page.state", TRUTH, g->page + offsetof(lci_page, word), sizeof(lci_page), g->pages, 1);
    ALWAYS();
    add(t, "bucket", DERIVED, g->bucket, 4, g->buckets, 4);
    add(t, "heads.link", DERIVED, g->heads, 4, LCI_LISTS * 2, 4);
    add(t, "row", PROTOCOL, g->rows, 2, LCS_SLOTS * g->row_stride, 2);
    add(t, "row0", DERIVED, g->rows, 2, g->pages, 2);
    if (g->end == g->ranks) return;
    ONE(lci_root, eviction, DERIVED, g->root, 1);
    add(t, "ranks.chosen", DERIVED, g->ranks, 4, 1, 4);
    add(t, "ranks.order", DERIVED, g->ranks + offsetof(lci_ranks, order), 4, sizeof(lci_order) / 2, 4);
    add(t, "advice", ADVICE, g->advice, 8, (g->end - g->advice) / 8, 8);
    add(t, "advice.root", ADVICE, g->advice, 8, 8, 8);
}

static void record_fields(table *t, const lci_geometry *g) {
    uint64_t n = g->reservations;
    IN_USE(lci_reservation, state, g->reservation, UINT32_MAX);
    ONE(lci_reservation, gen, TRUTH, g->reservation, n);
    ONE(lci_reservation, state, TRUTH, g->reservation, n);
    ONE(lci_reservation, owner, TRUTH, g->reservation, n);
    ONE(lci_reservation, owner_epoch, ADVICE, g->reservation, n);
    ONE(lci_reservation, shards, TRUTH, g->reservation, n);
    ONE(lci_reservation, next_free, DERIVED, g->reservation, n);
    ONE(lci_reservation, pages.count, TRUTH, g->reservation, n);
    ONE(lci_reservation, pages.first, TRUTH, g->reservation, n);
    ONE(lci_reservation, pages.last, TRUTH, g->reservation, n);
    ONE(lci_reservation, ns, TRUTH, g->reservation, n);
    ONE(lci_reservation, team, TRUTH, g->reservation, n);
    ONE(lci_reservation, deadline_ns, TRUTH, g->reservation, n);
    ONE(lci_reservation, listed, TRUTH, g->reservation, n);
    ONE(lci_reservation, shard[0], TRUTH, g->reservation, n);
    ONE(lci_reservation, shard[1], TRUTH, g->reservation, n);
    n = g->chunks;
    IN_USE(lci_chunk, count, g->chunk, UINT32_MAX);
    ONE(lci_chunk, next, TRUTH, g->chunk, n);
    ONE(lci_chunk, count, TRUTH, g->chunk, n);
    ONE(lci_chunk, page[0], TRUTH, g->chunk, n);
    ONE(lci_chunk, page[1], TRUTH, g->chunk, n);
    n = LCI_NAMESPACES;
    IN_USE(lci_namespace, state, g->namespaces, UINT32_MAX);
    ONE(lci_namespace, epoch, TRUTH, g->namespaces, n);
    ONE(lci_namespace, state, TRUTH, g->namespaces, n);
    ONE(lci_namespace, pages, DERIVED, g->namespaces, n);
    ONE(lci_namespace, quota, TRUTH, g->namespaces, n);
    ONE(lci_namespace, cursor, TRUTH, g->namespaces, n);
    ONE(lci_namespace, hand, ADVICE, g->namespaces, n);
    ONE(lci_namespace, minimum, TRUTH, g->namespaces, n);
    ARRAY(lci_namespace, weights, TRUTH, g->namespaces + sizeof(lci_namespace), LCI_NAME_WORDS);
    ARRAY(lci_namespace, tenant, TRUTH, g->namespaces + sizeof(lci_namespace), LCI_NAME_WORDS);
}

static void ticket_fields(table *t, uint64_t at, uint64_t n) {
    IN_USE(lci_ticket, state, at, UINT32_MAX);
    ONE(lci_ticket, gen, TRUTH, at, n);
    ONE(lci_ticket, state, TRUTH, at, n);
    ONE(lci_ticket, giver, TRUTH, at, n);
    ONE(lci_ticket, giver_epoch, ADVICE, at, n);
    ONE(lci_ticket, deadline_ns, TRUTH, at, n);
    ONE(lci_ticket, pages.count, TRUTH, at, n);
    ONE(lci_ticket, pages.first, TRUTH, at, n);
    ONE(lci_ticket, pages.last, TRUTH, at, n);
    ONE(lci_ticket, total, TRUTH, at, n);
    ONE(lci_ticket, reservation, TRUTH, at, n);
    ONE(lci_ticket, reservation_gen, TRUTH, at, n);
    ONE(lci_ticket, adopters[0], TRUTH, at, n);
    ONE(lci_ticket, adopted[0], TRUTH, at, n);
    ONE(lci_ticket, done[0], TRUTH, at, n);
    ONE(lci_ticket, failed[0], TRUTH, at, n);
}

uint32_t fields_of(const world *w, field *out) {
    table made = {.out = out}, *t = &made;
    header_fields(t);
    client_fields(t);
    lock_fields(t);
    root_fields(t, w->g.root);
    page_fields(t, &w->g);
    record_fields(t, &w->g);
    ticket_fields(t, w->g.ticket, w->g.tickets);
    ALWAYS();
    add(t, "any.byte", PROTOCOL, LCS_CLIENTS_OFFSET, 1, w->bytes - LCS_CLIENTS_OFFSET, 1);
    return t->n;
}
