/* A process's handle of a log (log.h), and what both of its sources use. */
#ifndef LC_LOG_HANDLE_H
#define LC_LOG_HANDLE_H

#include "clients.h"
#include "lock.h"
#include "log.h"

/* What the lock's record says of its holder; shm/logs.py has their names. */
enum { LCX_LOG_LEAD = 1, LCX_LOG_LEAVE = 2, LCX_LOG_CHECK = 3 };

/* Payload: the root, then `capacity` slots of `stride` bytes. */
typedef struct lcx_log {
    lcs_attachment *at;
    lcx_log_root *root;
    uint8_t *slots;
    uint32_t capacity, message, stride;
    /* The writer's own, under at->rows: what `appended` is, since no other client stores it, and up
     * to which entry its last look at the cursors allows it to append. */
    uint64_t next, limit;
} lcx_log;

static inline _Atomic uint64_t *lcx_log_cursor_of(const lcx_log *l, uint32_t slot) {
    return &l->root->cursors[slot].next;
}

static inline lcx_log_slot *lcx_log_slot_of(const lcx_log *l, uint64_t entry) {
    return (lcx_log_slot *)(l->slots + entry % l->capacity * l->stride);
}

/* The entry at which a cursor stands; that of a client that is joining is a lower bound. */
static inline uint64_t lcx_log_entry_of(uint64_t cursor) {
    return (cursor & ~LCX_LOG_JOINING) - 1;
}

/* For a client that has a slot. */
static inline int lcx_log_usable(const lcx_log *l) {
    int rc = lcs_usable(l->at);
    return rc == LC_OK && l->at->slot == 0 ? LC_E_READONLY : rc;
}

/* The one word that is ever logged. */
#define LCX_LOG_LOGGED (LCS_PAYLOAD_OFFSET + offsetof(lcx_log_root, writer))

static inline int lcx_log_lock(lcx_log *l, lc_txn *t, uint32_t operation, int wait,
                               uint64_t deadline) {
    int rc = lcx_log_usable(l);
    if (rc != LC_OK) return rc;
    if (wait == LC_TRY ? pthread_mutex_trylock(&l->at->door) : pthread_mutex_lock(&l->at->door))
        return LC_E_BUSY;
    rc = lcs_lock_take(l->at, t, operation, wait, deadline, LCX_LOG_LOGGED, LCX_LOG_LOGGED + 4);
    if (rc != LC_OK) pthread_mutex_unlock(&l->at->door);
    return rc;
}

static inline int lcx_log_unlock(lcx_log *l, lc_txn *t) {
    int rc = lcs_lock_drop(l->at, t, LCX_LOG_LOGGED, LCX_LOG_LOGGED + 4);
    pthread_mutex_unlock(&l->at->door);
    return rc;
}

#endif
