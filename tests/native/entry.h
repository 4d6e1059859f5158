/* The entry points that no header of the core declares, because only Python calls them: the same
 * signatures as in lightcache/layout.py and lightcache/shm. For all tests in C. */
#ifndef ENTRY_H
#define ENTRY_H

#include "event.h"
#include "index.h"

#include <stdlib.h>
#include <string.h>
#include "log.h"
#include "process.h"
#include "ring.h"

typedef struct lcx_list lcx_list;
typedef struct lcx_dict lcx_dict;
typedef struct lcx_ring lcx_ring;
typedef struct lcx_log lcx_log;

uint64_t lcx_list_bytes(uint32_t nodes, uint32_t lists);
void lcx_list_format(uint8_t *base, uint32_t nodes, uint32_t lists);
lcx_list *lcx_list_open(lcs_attachment *at, uint32_t nodes, uint32_t lists);
void lcx_list_close(lcx_list *l);
int lcx_list_put(lcx_list *l, uint32_t list, uint32_t node, int front, int must_be_free, int wait,
                 uint64_t deadline);
int lcx_list_remove(lcx_list *l, uint32_t node, int wait, uint64_t deadline);
int lcx_list_pop(lcx_list *l, uint32_t list, int front, uint32_t *node, int wait,
                 uint64_t deadline);
int lcx_list_copy(lcx_list *l, uint32_t list, int32_t *out, uint32_t room, int wait,
                  uint64_t deadline);
int lcx_list_length(lcx_list *l, uint32_t list);
int lcx_list_where(lcx_list *l, uint32_t node);
int lcx_list_check(lcx_list *l, char *text, uint32_t room, int wait, uint64_t deadline);

uint64_t lcx_dict_bytes(uint32_t capacity);
void lcx_dict_format(uint8_t *base, uint32_t capacity);
lcx_dict *lcx_dict_open(lcs_attachment *at, uint32_t capacity);
void lcx_dict_close(lcx_dict *d);
int lcx_dict_get(lcx_dict *d, uint64_t lo, uint64_t hi, int32_t *value);
int lcx_dict_get_many(lcx_dict *d, const lc_key *keys, uint32_t n, int32_t *values,
                      uint8_t *found);
int lcx_dict_put(lcx_dict *d, uint64_t lo, uint64_t hi, int32_t value, int only_new, int wait,
                 uint64_t deadline);
int lcx_dict_pop(lcx_dict *d, uint64_t lo, uint64_t hi, int32_t *value, int wait,
                 uint64_t deadline);
int lcx_dict_length(lcx_dict *d);
int lcx_dict_copy(lcx_dict *d, lc_key *keys, int32_t *values, uint32_t room, int wait,
                  uint64_t deadline);
int lcx_dict_check(lcx_dict *d, char *text, uint32_t room, int wait, uint64_t deadline);

uint64_t lcx_ring_bytes(uint32_t capacity, uint32_t message);
lcx_ring *lcx_ring_open(lcs_attachment *at, uint32_t capacity, uint32_t message);
void lcx_ring_close(lcx_ring *r);
int lcx_ring_push(lcx_ring *r, const uint8_t *data, const uint32_t *lengths, uint32_t n, int wait,
                  uint64_t deadline);
int lcx_ring_pop(lcx_ring *r, uint8_t *out, uint64_t room, uint32_t *lengths, uint32_t limit,
                 int wait, uint64_t deadline);
int lcx_ring_length(lcx_ring *r);
int lcx_ring_check(lcx_ring *r, char *text, uint32_t room, int wait, uint64_t deadline);

uint64_t lcx_log_bytes(uint32_t capacity, uint32_t message);
lcx_log *lcx_log_open(lcs_attachment *at, uint32_t capacity, uint32_t message);
void lcx_log_close(lcx_log *l);
int lcx_log_lead(lcx_log *l, int wait, uint64_t deadline);
int lcx_log_join(lcx_log *l);
int lcx_log_leave(lcx_log *l, int wait, uint64_t deadline);
int lcx_log_append(lcx_log *l, const uint8_t *data, uint32_t length);
int lcx_log_read(lcx_log *l, uint8_t *out, uint64_t room, uint32_t *lengths, uint32_t limit);
int lcx_log_writer(lcx_log *l);
int lcx_log_ended(lcx_log *l);
int64_t lcx_log_behind(lcx_log *l, int64_t *behind);
int64_t lcx_log_position(lcx_log *l);
int lcx_log_check(lcx_log *l, char *text, uint32_t room, int wait, uint64_t deadline);
int lcx_log_free_dead(lcs_attachment *at, uint32_t slot);

int lcs_atomic32(lcs_attachment *at, uint64_t offset, int op, uint32_t value, uint32_t *old);
int lcs_atomic64(lcs_attachment *at, uint64_t offset, int op, uint64_t value, uint64_t *old);
int lcs_add_many(lcs_attachment *at, uint64_t row, const uint64_t *pairs, uint32_t n);
int lcs_compare_exchange32(lcs_attachment *at, uint64_t offset, uint32_t *expected,
                           uint32_t value);
int lcs_compare_exchange64(lcs_attachment *at, uint64_t offset, uint64_t *expected,
                           uint64_t value);
int lcs_event_read(lcs_attachment *at, uint64_t offset, uint32_t *seen);
int lcs_event_notify(lcs_attachment *at, uint64_t offset);
int lcs_event_wait(lcs_attachment *at, uint64_t offset, uint32_t seen, uint64_t nanoseconds);
int lcs_robust_take(lcs_attachment *at, uint32_t operation, int wait, uint64_t deadline);
int lcs_robust_drop(lcs_attachment *at);
int lcs_recover_copy(uint8_t *base, uint64_t bytes);

/* The order of eviction that the tests are run for: LIGHTCACHE_TEST_EVICTION=hz, else LRU. */
static inline uint32_t order_tested(void) {
    const char *order = getenv("LIGHTCACHE_TEST_EVICTION");
    return order && !strcmp(order, "hz") ? LCI_HZ : LCI_LRU;
}

const char *lci_layout(void);
int lci_format(uint8_t *base, uint64_t bytes, uint64_t pages, uint64_t grown, uint32_t eviction);
lci_handle *lci_open(lcs_attachment *at, uint64_t pages);
void lci_close(lci_handle *h);
int lci_set_clock(lci_handle *h, uint64_t ns);
int lci_remembers(lci_handle *h, const lc_key *key);
int lci_worth(lci_handle *h, const lc_key *keys, uint32_t n, uint32_t start, lci_ns_ref ns,
              uint32_t hint, uint32_t refused);
int lci_count(lci_handle *h, lci_counts *out);
int lci_count_groups(const lci_handle *h, uint32_t counts[2 * LCI_NUMBERS]);
int lci_group_minimum(lci_handle *h, uint32_t number, uint32_t minimum, uint64_t *others, int wait,
                      uint64_t deadline);
int lci_touch_key(lci_handle *h, const lc_key *key, lci_ns_ref ns);
int lci_peek1(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ns);
int lci_peek(lci_handle *h, const lc_key *keys, const int64_t *offsets, uint32_t requests,
             lci_ns_ref ns, int32_t *counts);
int lci_deepest1(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ns);
int lci_deepest(lci_handle *h, const lc_key *keys, const int64_t *offsets, uint32_t requests,
                lci_ns_ref ns, int32_t *counts);
int lci_children(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ns, int32_t *counts);
int lci_match1(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ns, lci_lease *lease);
int lci_match(lci_handle *h, const lc_key *keys, const int64_t *offsets, uint32_t requests,
              lci_ns_ref ns, lci_lease *lease, int32_t *counts);
int lci_match_groups(lci_group *groups, uint32_t count, const lc_key *keys, uint32_t n,
                     uint32_t page_tokens, uint32_t step, int32_t *limit);
int lci_match_groups_many(lci_group *groups, uint32_t count, const lc_key *keys,
                          const int64_t *offsets, uint32_t sequences, uint32_t page_tokens,
                          uint32_t step, int32_t *found);
int lci_peek_groups(lci_group *groups, uint32_t count, const lc_key *keys, uint32_t n,
                    uint32_t page_tokens, uint32_t step, int32_t *limit);
int lci_release(lci_handle *h, lci_lease *lease);
int lci_pin_pages(lci_handle *h, const int32_t *pages, const uint32_t *gens, uint32_t n, lci_lease *lease,
                  uint32_t *refused);
int lci_shorten(lci_handle *h, lci_lease *lease, uint32_t pages);
int lci_release_pages(lci_handle *h, lci_lease *lease, const int32_t *pages, uint32_t n);
int lci_use(lci_handle *h, lci_lease *lease);
int lci_count_pages(lci_handle *h, uint32_t asked, uint32_t hit);
int lci_split(lci_lease *from, lci_lease *const *to, const int32_t *counts, uint32_t n);
int lci_reserve(lci_handle *h, lci_reserve_op *op, const lc_key *keys, uint32_t n, uint32_t start,
                int32_t *page, uint8_t *status, int wait, uint64_t deadline);
int lci_settle(lci_handle *h, int wait, uint64_t deadline);
int lci_unreserve(lci_handle *h, lci_reserve_op *op, const int32_t *page, const uint8_t *status,
                  uint32_t n);
int lci_publish(lci_handle *h, uint32_t rid, uint32_t gen, uint32_t shard, const int32_t *pages,
                uint32_t n);
int lci_reserve_many(lci_handle *h, lci_reserve_op *ops, const lc_key *keys,
                     const int64_t *offsets, const int64_t *starts, uint32_t chains, int32_t *page,
                     uint8_t *status, int wait, uint64_t deadline);
int lci_publish_many(lci_handle *h, const lci_reserve_op *ops, uint32_t chains,
                     const int32_t *pages, int32_t *codes);
int lci_unreserve_many(lci_handle *h, lci_reserve_op *ops, const int64_t *offsets,
                       const int64_t *starts, uint32_t chains, const int32_t *page,
                       const uint8_t *status);
int lci_wait(lci_handle *h, const lc_key *keys, uint32_t n, uint64_t deadline);
int lci_peek_ahead(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ns);
int lci_abandon(lci_handle *h, uint32_t rid, uint32_t gen, int wait, uint64_t deadline);
int lci_evict_pages(lci_handle *h, uint32_t want, uint32_t *freed, int wait, uint64_t deadline);
int lci_evict_group(lci_handle *h, uint32_t number, uint32_t want, lci_walk_op *op, int wait,
                    uint64_t deadline);
int lci_chain_keys(const uint8_t *start, uint64_t before, const uint8_t *pages, uint64_t page, uint32_t n,
                   uint64_t seed, lc_key *out);
int lci_part_keys(const lc_key *keys, uint32_t n, uint32_t number, uint32_t from, uint32_t to,
                  lc_key *out);
int lci_take_evicted(lci_handle *h, uint64_t *pages);
int lci_clear(lci_handle *h, lci_ns_ref ref, int wait, uint64_t deadline);
int lci_grow(lci_handle *h, uint32_t pages, int wait, uint64_t deadline);
int lci_namespace_good(lci_handle *h, lci_ns_ref ref);
int lci_namespace_find(lci_handle *h, const char *weights, const char *tenant, lci_ns_ref *out);
int lci_namespace_open(lci_handle *h, const char *weights, const char *tenant, uint32_t quota,
                       lci_ns_ref *out, int wait, uint64_t deadline);
int lci_namespace_limits(lci_handle *h, const char *weights, const char *tenant,
                         lci_ns_limits *limits, lci_ns_ref *out, int wait, uint64_t deadline);
int lci_keep(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ref, int keep,
             lci_walk_op *op, int wait, uint64_t deadline);
int lci_evict_first(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ref,
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
int lci_keys_of(lci_handle *h, const int32_t *pages, uint32_t n, lc_key *keys, uint32_t *gens,
                uint32_t *bad);
int lci_ticket_give(lci_handle *h, const int32_t *pages, uint32_t n, uint32_t rid, uint32_t rgen,
                    uint64_t adopters, uint64_t expires, lci_ticket_ref *ref, int wait,
                    uint64_t deadline);
int lci_ticket_size(lci_handle *h, const lci_ticket_ref *ref);
int lci_ticket_done(lci_handle *h, const lci_ticket_ref *ref, int ok);
int lci_ticket_poll(lci_handle *h, const lci_ticket_ref *ref, lci_ticket_status *out);
int lci_ticket_drop(lci_handle *h, const lci_ticket_ref *ref, int wait, uint64_t deadline);
int lci_ticket_revoke(lci_handle *h, const lci_ticket_ref *ref, int wait, uint64_t deadline);
int lci_ticket_refuse_orphans(lci_handle *h, uint32_t giver, uint32_t epoch, int wait,
                              uint64_t deadline);
int lci_adopt(lci_handle *h, const lci_ticket_ref *ref, uint32_t shard, uint32_t *held,
              int32_t *pages, uint32_t capacity, uint32_t *rid, uint32_t *rgen, int wait,
              uint64_t deadline);
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
int lci_may_allocate(lci_handle *h, uint32_t want, uint32_t memory);
int lci_look_for_dead(lci_handle *h, lci_look_op *look, int wait, uint64_t deadline);
int lci_no_memory(lci_handle *h, uint64_t nanoseconds);
int lci_reap_slot(lci_handle *h, uint32_t slot, int wait, uint64_t deadline);
int lci_reap_unjoined(lci_handle *h, uint32_t slot, int wait, uint64_t deadline);
int lci_leave(lci_handle *h, int wait, uint64_t deadline);
int lci_check(uint8_t *base, uint64_t bytes, uint64_t pages, int quiet, lci_report *out);
int lci_recover_copy(uint8_t *base, uint64_t bytes, uint64_t pages);
int lci_repair(lci_handle *h, int wait, uint64_t deadline);
int lci_hold(lci_handle *h, int wait, uint64_t deadline);
int lci_let_go(lci_handle *h);
int lci_copy(lci_handle *h, uint8_t *to, uint64_t bytes, int wait, uint64_t deadline);

#define FOREVER INT64_MAX /* a deadline, as Python says that there is none */

#ifdef LC_PAUSE_POINTS
extern void (*lc_pause_hook)(int point);
#endif

#endif
