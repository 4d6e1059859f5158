/* SharedLog: the log of log.h. */
#include "log_handle.h"

#include "event.h"

#include <stdlib.h>

static uint32_t stride_of(uint32_t message) {
    return (uint32_t)sizeof(lcx_log_slot) + (message + 7) / 8 * 8;
}

/* 0: not within the bounds of log.h. */
LC_API uint64_t lcx_log_bytes(uint32_t capacity, uint32_t message) {
    if (!capacity || capacity > LCX_LOG_CAPACITY || !message || message > LCX_LOG_MESSAGE) return 0;
    return sizeof(lcx_log_root) + (uint64_t)capacity * stride_of(message);
}

static lcx_log_root *root_of(const lcs_attachment *at) {
    return (lcx_log_root *)(at->base + LCS_PAYLOAD_OFFSET);
}

/* Zeroed memory is a log without entries, writer and readers: there is nothing to lay out. */
LC_API lcx_log *lcx_log_open(lcs_attachment *at, uint32_t capacity, uint32_t message) {
    lcx_log *l = lcx_log_bytes(capacity, message) ? calloc(1, sizeof *l) : NULL;
    if (!l) return NULL;
    l->at = at;
    l->root = root_of(at);
    l->slots = (uint8_t *)(l->root + 1);
    l->capacity = capacity;
    l->message = message;
    l->stride = stride_of(message);
    return l;
}

LC_API void lcx_log_close(lcx_log *l) { free(l); }

/* ------------------------------------------------------------------ the writer's role */

static uint32_t mine(const lcx_log *l) {
    return l->at->slot | l->at->epoch << LCS_LOCK_EPOCH_SHIFT;
}

/* Does the client that this word names live? One that cannot be asked is taken to live. */
static bool writer_lives(const lcx_log *l, uint32_t word) {
    uint32_t slot = word & LCS_LOCK_SLOT, epoch = word >> LCS_LOCK_EPOCH_SHIFT;
    if (slot == 0 || word & LCS_LOCK_STARVED) return false; /* no client, or LCX_LOG_LEFT */
    if ((lc_load(&lcs_client_of(l->at, slot)->epoch) & 0xffffff) != epoch) return false;
    return lcs_slot_alive(l->at, slot) != 0;
}

/* The slot of a living writer, 0 when there is none. No lock. */
LC_API int lcx_log_writer(lcx_log *l) {
    int rc = lcs_usable(l->at);
    if (rc != LC_OK) return rc;
    uint32_t word = lc_load(&l->root->writer);
    return writer_lives(l, word) ? (int)(word & LCS_LOCK_SLOT) : 0;
}

static int lead(lcx_log *l, lc_txn *t) {
    uint32_t word = lc_load(&l->root->writer);
    uint64_t next = lc_load_acquire(&l->root->appended);
    if (lc_load(lcx_log_cursor_of(l, l->at->slot)) || next >= LCX_LOG_MOST) return LC_E_CORRUPT;
    if (word != mine(l) && writer_lives(l, word)) return LC_E_OWNER;
    l->next = l->limit = next; /* the first append begins with a look */
    if (word != mine(l)) lc_txn_set(t, &l->root->writer, mine(l));
    return LC_OK;
}

/* Become the writer, after one that has left or died. LC_OK also when we are it already.
 * LC_E_OWNER: a living one is. LC_E_CORRUPT: or we are a reader, which no writer is. */
LC_API int lcx_log_lead(lcx_log *l, int wait, uint64_t deadline) {
    lc_txn t;
    int rc = lcx_log_lock(l, &t, LCX_LOG_LEAD, wait, deadline);
    if (rc != LC_OK) return rc;
    t.error = lead(l, &t);
    rc = lcx_log_unlock(l, &t);
    if (rc == LC_OK) lc_event_notify(&l->root->news);
    return rc;
}

/* Stop being a reader, or the writer; nothing happens to a client that is neither. */
LC_API int lcx_log_leave(lcx_log *l, int wait, uint64_t deadline) {
    lc_txn t;
    int rc = lcx_log_usable(l);
    if (rc != LC_OK) return rc;
    if (lc_load(lcx_log_cursor_of(l, l->at->slot))) {
        lc_store_release(lcx_log_cursor_of(l, l->at->slot), 0); /* order: log-leave */
        lc_event_notify(&l->root->room);
    }
    if (lc_load(&l->root->writer) != mine(l)) return LC_OK;
    rc = lcx_log_lock(l, &t, LCX_LOG_LEAVE, wait, deadline);
    if (rc != LC_OK) return rc;
    lc_txn_set(&t, &l->root->writer, LCX_LOG_LEFT);
    rc = lcx_log_unlock(l, &t);
    if (rc == LC_OK) lc_event_notify(&l->root->news);
    return rc;
}

/* ------------------------------------------------------------------ appending */

/* Raise the limit to what the cursors allow. */
static int look(lcx_log *l) {
    uint64_t lowest = l->next;
    atomic_thread_fence(memory_order_seq_cst); /* order: log-look-fence */
    for (uint32_t slot = 1; slot < LCS_SLOTS; slot++) {
        uint64_t at = lc_load_acquire(lcx_log_cursor_of(l, slot)); /* order: log-look */
        if (at == 0) continue;
        if (lcx_log_entry_of(at) > l->next) return LC_E_CORRUPT;
        if (lcx_log_entry_of(at) < lowest) lowest = lcx_log_entry_of(at);
    }
    l->limit = lowest + l->capacity;
    return l->limit > l->next ? LC_OK : LC_E_FULL;
}

/* Take back the cursor and the slot of a dead client, in any order with others that do the same:
 * the cursor first, because a free slot has none. */
static int free_dead(lcs_attachment *at, uint32_t slot) {
    int rc = lcs_slot_mend(at, slot);
    if (rc != LC_OK) return rc;
    lc_store_release(&root_of(at)->cursors[slot].next, 0);
    lcs_slot_mended(at, slot);
    return lcs_slot_free_dead(at, slot);
}

/* Free the slot of a dead client and what it left: a cursor. The codes of lcs_slot_free_dead. */
LC_API int lcx_log_free_dead(lcs_attachment *at, uint32_t slot) {
    int rc = lcs_usable(at);
    if (rc != LC_OK) return rc;
    if (at->readonly) return LC_E_READONLY;
    if (slot == 0 || slot >= LCS_SLOTS || slot == at->slot) return LC_E_RANGE;
    if (at->bytes < LCS_PAYLOAD_OFFSET + sizeof(lcx_log_root)) return LC_E_RANGE;
    if (lc_load_acquire(&lcs_client_of(at, slot)->state) != LCS_CLIENT_TAKEN) return LC_E_MISSING;
    return free_dead(at, slot);
}

/* Free those of the dead that hold us up, whatever their slots say of themselves. */
static void free_blocking(lcx_log *l) {
    for (uint32_t slot = 1; slot < LCS_SLOTS; slot++) {
        uint64_t at = lc_load(lcx_log_cursor_of(l, slot));
        if (slot != l->at->slot && at && lcx_log_entry_of(at) + l->capacity <= l->next)
            free_dead(l->at, slot);
    }
}

static int append_one(lcx_log *l, const uint8_t *data, uint32_t length) {
    if (lc_load(&l->root->writer) != mine(l)) return LC_E_OWNER;
    if (lc_load(&l->root->appended) != l->next) return LC_E_CORRUPT;
    if (l->next >= l->limit) {
        int rc = look(l);
        if (rc == LC_E_FULL) {
            free_blocking(l);
            rc = look(l);
        }
        if (rc != LC_OK) return rc;
    }
    lcx_log_slot *to = lcx_log_slot_of(l, l->next);
    /* After the last store of `appended`: `check` trusts a stamp until that store. */
    lc_store_release(&to->stamp, (uint32_t)l->next);
    lc_store(&to->length, length);
    memcpy(to->bytes, data, length);
    LC_PAUSE(LC_AT_LOG_WRITTEN);
    l->next++;
    lc_store_release(&l->root->appended, l->next); /* order: log-append */
    return LC_OK;
}

/* Append an entry. LC_E_FULL: a living reader has `capacity` entries still to read. LC_E_OWNER: we
 * are not the writer. LC_E_RANGE: too long. Looks for dead readers only when one is in the way. */
LC_API int lcx_log_append(lcx_log *l, const uint8_t *data, uint32_t length) {
    int rc = lcx_log_usable(l);
    if (rc != LC_OK) return rc;
    if (length > l->message) return LC_E_RANGE;
    pthread_mutex_lock(&l->at->rows);
    rc = append_one(l, data, length);
    pthread_mutex_unlock(&l->at->rows);
    if (rc == LC_OK) lc_event_notify(&l->root->news);
    return rc;
}

/* ------------------------------------------------------------------ reading */

/* Become a reader: of what is appended from now on. LC_OK also when we are one already.
 * LC_E_CORRUPT: or we are the writer, which does not read. */
LC_API int lcx_log_join(lcx_log *l) {
    int rc = lcx_log_usable(l);
    if (rc != LC_OK) return rc;
    if (lc_load(&l->root->writer) == mine(l)) return LC_E_CORRUPT;
    _Atomic uint64_t *own = lcx_log_cursor_of(l, l->at->slot);
    uint64_t at = lc_load(own);
    if (at && !(at & LCX_LOG_JOINING)) return LC_OK;
    uint64_t begin = lc_load_acquire(&l->root->appended);
    if (begin >= LCX_LOG_MOST) return LC_E_CORRUPT;
    lc_store(own, (begin + 1) | LCX_LOG_JOINING);
    LC_PAUSE(LC_AT_LOG_ANNOUNCED);
    atomic_thread_fence(memory_order_seq_cst); /* order: log-join-fence */
    begin = lc_load_acquire(&l->root->appended); /* order: log-begin */
    if (begin < LCX_LOG_MOST) lc_store_release(own, begin + 1);
    return begin < LCX_LOG_MOST ? LC_OK : LC_E_CORRUPT;
}

/* The reader's cursor, and how many entries come after it. */
static int unread(const lcx_log *l, uint64_t *next, uint64_t *count) {
    uint64_t at = lc_load(lcx_log_cursor_of(l, l->at->slot));
    if (at == 0) return LC_E_OWNER;
    uint64_t appended = lc_load_acquire(&l->root->appended); /* order: log-see */
    *next = at - 1;
    *count = appended - *next; /* wraps for a cursor above, or of a client still joining */
    return *count <= l->capacity ? LC_OK : LC_E_CORRUPT;
}

static int read_some(const lcx_log *l, uint8_t *out, uint64_t room, uint32_t *lengths,
                     uint32_t limit) {
    uint64_t next, count;
    uint32_t n = 0;
    int rc = unread(l, &next, &count);
    if (rc != LC_OK) return rc;
    for (; n < limit && n < count; n++) {
        const lcx_log_slot *from = lcx_log_slot_of(l, next + n);
        uint32_t length = lc_load(&from->length);
        if (length > l->message || lc_load(&from->stamp) != (uint32_t)(next + n))
            return LC_E_CORRUPT;
        if (length > room) break;
        memcpy(out, from->bytes, length);
        lengths[n] = length;
        out += length;
        room -= length;
    }
    if (n == 0) return LC_E_MISSING;
    LC_PAUSE(LC_AT_LOG_COPIED);
    lc_store_release(lcx_log_cursor_of(l, l->at->slot), next + n + 1); /* order: log-read */
    return (int)n;
}

/* Read at most `limit` entries, in order: as many as there are and as fit into `room` bytes. Their
 * bytes follow each other in `out`. Returns how many; LC_E_MISSING: none is there. LC_E_OWNER: we
 * are no reader. LC_E_RANGE: no limit, or no room for any entry. */
LC_API int lcx_log_read(lcx_log *l, uint8_t *out, uint64_t room, uint32_t *lengths,
                        uint32_t limit) {
    int rc = lcx_log_usable(l);
    if (rc != LC_OK) return rc;
    if (limit == 0 || room < l->message) return LC_E_RANGE;
    if (room > LCX_LOG_HOLD) room = LCX_LOG_HOLD;
    if (limit > LCX_LOG_BATCH) limit = LCX_LOG_BATCH;
    pthread_mutex_lock(&l->at->rows);
    rc = read_some(l, out, room, lengths, limit);
    pthread_mutex_unlock(&l->at->rows);
    if (rc > 0) lc_event_notify(&l->root->room);
    return rc;
}

/* Will nothing come unless there is another writer? 1: the last one has left or died, and all that
 * it appended was read here; 0: no, or there was none so far. */
LC_API int lcx_log_ended(lcx_log *l) {
    uint64_t next, count;
    int rc = lcx_log_usable(l);
    if (rc != LC_OK) return rc;
    uint32_t word = lc_load_acquire(&l->root->writer);
    if (word == 0 || writer_lives(l, word)) return 0;
    /* Read after its death: this is all that it appended, unless an heir has appended since. */
    rc = unread(l, &next, &count);
    if (rc != LC_OK) return rc;
    return count == 0 && lc_load(&l->root->writer) == word;
}
