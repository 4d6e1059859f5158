/* The core's entry points, which otherwise only Python calls: lightcache/_native.py declares them
 * too. */
#ifndef CORE_H
#define CORE_H

#include "clients.h"
#include "index.h"
#include "process.h"

int lci_format(uint8_t *base, uint64_t bytes, uint64_t pages, uint64_t grown);
lci_handle *lci_open(lcs_attachment *at, uint64_t pages);
void lci_close(lci_handle *h);
int lci_grow(lci_handle *h, uint32_t pages, int wait, uint64_t deadline);
int lci_namespace_open(lci_handle *h, const char *weights, const char *tenant, uint32_t quota,
                       lci_ns_ref *out, int wait, uint64_t deadline);
int lci_peek1(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ns);
int lci_match1(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ns, lci_lease *lease);
int lci_match(lci_handle *h, const lc_key *keys, const int64_t *offsets, uint32_t requests,
              lci_ns_ref ns, lci_lease *lease, int32_t *counts);
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
int lci_ticket_revoke(lci_handle *h, const lci_ticket_ref *ref, int wait, uint64_t deadline);
int lci_reap_slot(lci_handle *h, uint32_t slot, int wait, uint64_t deadline);
int lci_reap_unjoined(lci_handle *h, uint32_t slot, int wait, uint64_t deadline);
int lci_leave(lci_handle *h, int wait, uint64_t deadline);
int lci_repair(lci_handle *h, int wait, uint64_t deadline);
int lci_hold(lci_handle *h, int wait, uint64_t deadline);
int lci_let_go(lci_handle *h);
int lci_check(uint8_t *base, uint64_t bytes, uint64_t pages, int quiet, lci_report *out);
int lci_recover_copy(uint8_t *base, uint64_t bytes, uint64_t pages);

#define FOREVER INT64_MAX

#endif
