/* The core's entry points, which only Python calls otherwise, and what all parts share. */
#ifndef HOSTILE_CORE_CALLS_H
#define HOSTILE_CORE_CALLS_H

#include "index.h"
#include "process.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

int lci_format(uint8_t *base, uint64_t bytes, uint64_t pages, uint64_t grown);
lci_handle *lci_open(lcs_attachment *at, uint64_t pages);
void lci_close(lci_handle *h);
int lci_grow(lci_handle *h, uint32_t pages, int wait, uint64_t deadline);
int lci_count(lci_handle *h, lci_counts *out);
int lci_peek(lci_handle *h, const lc_key *keys, const int64_t *offsets, uint32_t requests,
             lci_ns_ref ns, int32_t *counts);
int lci_peek1(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ns);
int lci_match(lci_handle *h, const lc_key *keys, const int64_t *offsets, uint32_t requests,
              lci_ns_ref ns, lci_lease *lease, int32_t *counts);
int lci_match1(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ns, lci_lease *lease);
int lci_release(lci_handle *h, lci_lease *lease);
int lci_reserve(lci_handle *h, lci_reserve_op *op, const lc_key *keys, uint32_t n, uint32_t start,
                int32_t *page, uint8_t *status, int wait, uint64_t deadline);
int lci_unreserve(lci_handle *h, lci_reserve_op *op, const int32_t *page, const uint8_t *status,
                  uint32_t n);
int lci_publish(lci_handle *h, uint32_t rid, uint32_t gen, uint32_t shard, const int32_t *pages,
                uint32_t n);
int lci_wait(lci_handle *h, const lc_key *keys, uint32_t n, uint64_t deadline);
int lci_abandon(lci_handle *h, uint32_t rid, uint32_t gen, int wait, uint64_t deadline);
int lci_evict_pages(lci_handle *h, uint32_t want, uint32_t *freed, int wait, uint64_t deadline);
int lci_clear(lci_handle *h, lci_ns_ref ref, int wait, uint64_t deadline);
int lci_namespace_find(lci_handle *h, const char *weights, const char *tenant, lci_ns_ref *out);
int lci_namespace_open(lci_handle *h, const char *weights, const char *tenant, uint32_t quota,
                       lci_ns_ref *out, int wait, uint64_t deadline);
int lci_namespace_limits(lci_handle *h, const char *weights, const char *tenant,
                         lci_ns_limits *limits, lci_ns_ref *out, int wait, uint64_t deadline);
int lci_keep(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ref, int keep,
             lci_walk_op *op, int wait, uint64_t deadline);
int lci_drop(lci_handle *h, const lc_key *keys, uint32_t n, uint32_t start, lci_ns_ref ref,
             lci_walk_op *op, int wait, uint64_t deadline);
int lci_oldest(lci_handle *h, lci_oldest_op *op, lci_lease *lease, lc_key *keys, uint32_t *parents,
               int wait, uint64_t deadline);
int lci_discard(lci_handle *h, lci_discard_op *op, lci_lease *lease, const int32_t *pages,
                const uint32_t *hits, const uint32_t *order, uint8_t *done, uint32_t n, int wait,
                uint64_t deadline);
int lci_discard_end(lci_handle *h, lci_discard_op *op, const int32_t *pages, uint8_t *done,
                    uint32_t n);
int lci_keys_of(lci_handle *h, const int32_t *pages, uint32_t n, lc_key *keys, uint32_t *bad);
int lci_ticket_give(lci_handle *h, const int32_t *pages, uint32_t n, uint32_t rid, uint32_t rgen,
                    uint64_t adopters, uint64_t expires, lci_ticket_ref *ref, int wait,
                    uint64_t deadline);
int lci_ticket_size(lci_handle *h, const lci_ticket_ref *ref);
int lci_adopt(lci_handle *h, const lci_ticket_ref *ref, uint32_t shard, uint32_t *held,
              int32_t *pages, uint32_t capacity, uint32_t *rid, uint32_t *rgen, int wait,
              uint64_t deadline);
int lci_ticket_done(lci_handle *h, const lci_ticket_ref *ref, int ok);
int lci_ticket_poll(lci_handle *h, const lci_ticket_ref *ref, lci_ticket_status *out);
int lci_ticket_drop(lci_handle *h, const lci_ticket_ref *ref, int wait, uint64_t deadline);
int lci_allocate(lci_handle *h, lci_held_op *op, int32_t *pages, uint32_t *gens, uint32_t n,
                 int wait, uint64_t deadline);
int lci_free_held(lci_handle *h, lci_held_op *op, const int32_t *pages, const uint32_t *gens,
                  uint32_t n, int wait, uint64_t deadline);
int lci_name(lci_handle *h, lci_held_op *op, const lc_key *keys, const int64_t *offsets,
             const int64_t *starts, uint32_t requests, const int32_t *pages, uint32_t n,
             int32_t *out, uint8_t *status, int wait, uint64_t deadline);
int lci_unname(lci_handle *h, lci_held_op *op, const int32_t *pages, uint32_t n, int wait,
               uint64_t deadline);
int lci_unpin(lci_handle *h, const int32_t *pages, uint32_t n, uint32_t *refused);
int lci_may_allocate(lci_handle *h, uint32_t want);
int lci_ticket_revoke(lci_handle *h, const lci_ticket_ref *ref, int wait, uint64_t deadline);
int lci_reap_slot(lci_handle *h, uint32_t slot, int wait, uint64_t deadline);
int lci_reap_unjoined(lci_handle *h, uint32_t slot, int wait, uint64_t deadline);
int lci_leave(lci_handle *h, int wait, uint64_t deadline);
int lci_repair(lci_handle *h, int wait, uint64_t deadline);
int lci_copy(lci_handle *h, uint8_t *to, uint64_t bytes, int wait, uint64_t deadline);
int lci_check(uint8_t *base, uint64_t bytes, uint64_t pages, int quiet, lci_report *out);
int lci_recover_copy(uint8_t *base, uint64_t bytes, uint64_t pages);
int lcs_event_read(lcs_attachment *at, uint64_t offset, uint32_t *seen);
int lcs_event_notify(lcs_attachment *at, uint64_t offset);
int lcs_event_wait(lcs_attachment *at, uint64_t offset, uint32_t seen, uint64_t nanoseconds);
int lcs_robust_take(lcs_attachment *at, uint32_t operation, int wait, uint64_t deadline);
int lcs_robust_drop(lcs_attachment *at);

#define NEED(what)                                                                     \
    do {                                                                               \
        if (!(what)) {                                                                 \
            fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #what, errno); \
            exit(2);                                                                   \
        }                                                                              \
    } while (0)

/* Numbers from a seed: splitmix64. Every case draws from its own, so it can be run alone. */
typedef struct rng {
    uint64_t state;
} rng;

static inline uint64_t draw(rng *r) {
    uint64_t z = r->state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}
static inline uint32_t below(rng *r, uint64_t n) { return n ? (uint32_t)(draw(r) % n) : 0; }

#endif
