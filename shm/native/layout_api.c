/* The layout of a segment as this library was compiled, for the loader to compare. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "facts.h"
#include "process.h"
#include "ring.h"

static const lc_fact facts[] = {
    LC_FACT_TYPE(lcs_header),
    LC_FACT_FIELD(lcs_header, magic),
    LC_FACT_FIELD(lcs_header, abi),
    LC_FACT_FIELD(lcs_header, kind),
    LC_FACT_FIELD(lcs_header, layout_hash),
    LC_FACT_FIELD(lcs_header, bytes),
    LC_FACT_FIELD(lcs_header, uuid),
    LC_FACT_FIELD(lcs_header, created_ns),
    LC_FACT_FIELD(lcs_header, creator_pid),
    LC_FACT_FIELD(lcs_header, lifetime),
    LC_FACT_FIELD(lcs_header, boot_id),
    LC_FACT_FIELD(lcs_header, config_bytes),
    LC_FACT_FIELD(lcs_header, config),
    LC_FACT_FIELD(lcs_header, retired),
    LC_FACT_FIELD(lcs_header, disabled),
    LC_FACT_FIELD(lcs_header, ready),
    LC_FACT_TYPE(lcs_client),
    LC_FACT_FIELD(lcs_client, state),
    LC_FACT_FIELD(lcs_client, epoch),
    LC_FACT_FIELD(lcs_client, pid),
    LC_FACT_FIELD(lcs_client, flags),
    LC_FACT_FIELD(lcs_client, pidns),
    LC_FACT_FIELD(lcs_client, start_ticks),
    LC_FACT_FIELD(lcs_client, attached_ns),
    LC_FACT_FIELD(lcs_client, quarantine_until_ns),
    LC_FACT_FIELD(lcs_client, role),
    LC_FACT_FIELD(lcs_client, lookups),
    LC_FACT_FIELD(lcs_client, hit_pages),
    LC_FACT_FIELD(lcs_client, missed_pages),
    LC_FACT_FIELD(lcs_client, reserved_pages),
    LC_FACT_FIELD(lcs_client, evicted_pages),
    LC_FACT_FIELD(lcs_client, published_pages),
    LC_FACT_TYPE(lcs_lock),
    LC_FACT_FIELD(lcs_lock, word),
    LC_FACT_FIELD(lcs_lock, sequence),
    LC_FACT_FIELD(lcs_lock, holder),
    LC_FACT_FIELD(lcs_lock, log_count),
    LC_FACT_FIELD(lcs_lock, operation),
    LC_FACT_FIELD(lcs_lock, since_ns),
    LC_FACT_FIELD(lcs_lock, acquisitions),
    LC_FACT_FIELD(lcs_lock, contended),
    LC_FACT_FIELD(lcs_lock, wait_ns),
    LC_FACT_FIELD(lcs_lock, hold_ns),
    LC_FACT_FIELD(lcs_lock, hold_max_ns),
    LC_FACT_FIELD(lcs_lock, recoveries),
    LC_FACT_FIELD(lcs_lock, undone_words),
    LC_FACT_TYPE(lcx_ring_root),
    LC_FACT_FIELD(lcx_ring_root, first),
    LC_FACT_FIELD(lcx_ring_root, count),
    LC_FACT_FIELD(lcx_ring_root, pushed),
    LC_FACT_FIELD(lcx_ring_root, filled),
    LC_FACT_FIELD(lcx_ring_root, drained),
    LC_FACT_TYPE(lcx_ring_slot),
    LC_FACT_FIELD(lcx_ring_slot, stamp),
    LC_FACT_FIELD(lcx_ring_slot, length),
    LC_FACT_CONST(LCS_MAGIC),
    LC_FACT_CONST(LCS_ABI),
    LC_FACT_CONST(LCS_SLOTS),
    LC_FACT_CONST(LCS_LOG_ENTRIES),
    LC_FACT_CONST(LCS_CLIENTS_OFFSET),
    LC_FACT_CONST(LCS_LOCK_OFFSET),
    LC_FACT_CONST(LCS_LOG_OFFSET),
    LC_FACT_CONST(LCS_PAYLOAD_OFFSET),
    LC_FACT_CONST(LCS_BYTE_LIFE),
    LC_FACT_CONST(LCS_BYTE_READERS),
    LC_FACT_CONST(LCS_BYTE_GROW),
    LC_FACT_CONST(LCS_BYTE_SLOTS),
    LC_FACT_CONST(LCS_BYTE_MEND),
    LC_FACT_CONST(LCS_KIND_PLAIN),
    LC_FACT_CONST(LCS_KIND_LIST),
    LC_FACT_CONST(LCS_KIND_DICT),
    LC_FACT_CONST(LCS_KIND_INDEX),
    LC_FACT_CONST(LCS_KIND_RING),
    LC_FACT_CONST(LCS_LIFETIME_ATTACHED),
    LC_FACT_CONST(LCS_LIFETIME_PERSISTENT),
    LC_FACT_CONST(LCS_CLIENT_FREE),
    LC_FACT_CONST(LCS_CLIENT_TAKEN),
    LC_FACT_CONST(LCS_CLIENT_QUARANTINE),
    LC_FACT_CONST(LCS_FLAG_DEVICE),
    LC_FACT_CONST(LCS_LOCK_SLOT),
    LC_FACT_CONST(LCS_LOCK_WAITERS),
    LC_FACT_CONST(LCS_LOCK_EPOCH_SHIFT),
    LC_FACT_CONST(LCX_RING_BATCH),
    LC_FACT_CONST(LCX_RING_HOLD),
    LC_FACT_CONST(LCX_RING_CAPACITY),
    LC_FACT_CONST(LCX_RING_MESSAGE),
};

static char text[8192];
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void write_facts(void) {
    if (!lc_facts_write(text, sizeof text, facts, sizeof facts / sizeof facts[0])) text[0] = 0;
}

const char *lcs_layout(void) {
    pthread_once(&once, write_facts);
    return text;
}
