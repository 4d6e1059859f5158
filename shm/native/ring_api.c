/* SharedRing: the ring of ring.h. */
#include "ring.h"

#include "event.h"
#include "lock.h"

#include <stdio.h>
#include <stdlib.h>

/* What the lock's record says of its holder; shm/rings.py has their names. */
enum { OP_PUSH = 1, OP_POP = 2, OP_CHECK = 3 };

/* Payload: the root, then `capacity` slots of `stride` bytes. */
typedef struct lcx_ring {
    lcs_attachment *at;
    lcx_ring_root *root;
    uint8_t *slots;
    uint32_t capacity, message, stride;
    uint64_t begin, end;
} lcx_ring;

static uint32_t stride_of(uint32_t message) {
    return (uint32_t)sizeof(lcx_ring_slot) + (message + 7) / 8 * 8;
}

/* 0: not within the bounds of ring.h. */
LC_API uint64_t lcx_ring_bytes(uint32_t capacity, uint32_t message) {
    if (!capacity || capacity > LCX_RING_CAPACITY || !message || message > LCX_RING_MESSAGE)
        return 0;
    return sizeof(lcx_ring_root) + (uint64_t)capacity * stride_of(message);
}

static void point(lcx_ring *r, uint8_t *base, uint32_t capacity, uint32_t message) {
    r->root = (lcx_ring_root *)(base + LCS_PAYLOAD_OFFSET);
    r->slots = (uint8_t *)(r->root + 1);
    r->capacity = capacity;
    r->message = message;
    r->stride = stride_of(message);
    r->begin = LCS_PAYLOAD_OFFSET;
    r->end = LCS_PAYLOAD_OFFSET + lcx_ring_bytes(capacity, message);
}

/* Zeroed memory is an empty ring: there is nothing to lay out. */
LC_API lcx_ring *lcx_ring_open(lcs_attachment *at, uint32_t capacity, uint32_t message) {
    lcx_ring *r = lcx_ring_bytes(capacity, message) ? calloc(1, sizeof *r) : NULL;
    if (!r) return NULL;
    r->at = at;
    point(r, at->base, capacity, message);
    return r;
}

LC_API void lcx_ring_close(lcx_ring *r) { free(r); }

static int lock(lcx_ring *r, lc_txn *t, uint32_t operation, int wait, uint64_t deadline) {
    int rc = lcs_usable(r->at);
    if (rc != LC_OK) return rc;
    if (r->at->slot == 0) return LC_E_READONLY;
    if (wait == LC_TRY ? pthread_mutex_trylock(&r->at->door) : pthread_mutex_lock(&r->at->door))
        return LC_E_BUSY;
    rc = lcs_lock_take(r->at, t, operation, wait, deadline, r->begin, r->end);
    if (rc != LC_OK) pthread_mutex_unlock(&r->at->door);
    return rc;
}

static int unlock(lcx_ring *r, lc_txn *t) {
    int rc = lcs_lock_drop(r->at, t, r->begin, r->end);
    pthread_mutex_unlock(&r->at->door);
    return rc;
}

/* The root's words, each loaded once. */
typedef struct state {
    uint32_t first, count, pushed;
} state;

static bool load(const lcx_ring *r, state *s) {
    *s = (state){lc_load(&r->root->first), lc_load(&r->root->count), lc_load(&r->root->pushed)};
    return s->first < r->capacity && s->count <= r->capacity;
}

static lcx_ring_slot *slot(const lcx_ring *r, uint32_t number) {
    return (lcx_ring_slot *)(r->slots + (uint64_t)(number % r->capacity) * r->stride);
}

/* How many of these messages one hold takes, with room for `most`; at least the first. */
static uint32_t in_one_hold(const uint32_t *lengths, uint32_t n, uint32_t most) {
    uint64_t bytes = 0;
    uint32_t i = 0;
    if (most > LCX_RING_BATCH) most = LCX_RING_BATCH;
    while (i < n && i < most && (bytes += lengths[i]) <= LCX_RING_HOLD) i++;
    return i;
}

/* Push the first of n messages, as many as there is room for and as one hold takes, all of them in
 * one step. Their bytes follow each other in `data`. Returns how many; LC_E_FULL: no room for one.
 * LC_E_RANGE: none given, or one is too long. */
LC_API int lcx_ring_push(lcx_ring *r, const uint8_t *data, const uint32_t *lengths, uint32_t n,
                         int wait, uint64_t deadline) {
    lc_txn t;
    state s;
    uint32_t pushed = 0;
    for (uint32_t i = 0; i < n; i++)
        if (lengths[i] > r->message) return LC_E_RANGE;
    if (n == 0) return LC_E_RANGE;
    int rc = lock(r, &t, OP_PUSH, wait, deadline);
    if (rc != LC_OK) return rc;
    if (!load(r, &s)) t.error = LC_E_CORRUPT;
    else if (s.count == r->capacity) t.error = LC_E_FULL;
    else pushed = in_one_hold(lengths, n, r->capacity - s.count);
    for (uint32_t i = 0; i < pushed; i++) { /* into dead slots */
        lcx_ring_slot *to = slot(r, s.first + s.count + i);
        lc_store(&to->stamp, s.pushed + i);
        lc_store(&to->length, lengths[i]);
        memcpy(to->bytes, data, lengths[i]);
        data += lengths[i];
    }
    if (pushed) {
        lc_txn_add(&t, &r->root->count, pushed);
        lc_txn_add(&t, &r->root->pushed, pushed);
    }
    rc = unlock(r, &t);
    if (rc != LC_OK) return rc;
    lc_event_notify(&r->root->filled); /* after the commit: a process that wakes finds them */
    return (int)pushed;
}

/* Pop at most `limit` messages, the oldest first: as many as there are, as fit into `room` bytes
 * and as one hold takes, all of them in one step. Their bytes follow each other in `out`. Returns
 * how many; LC_E_MISSING: the ring is empty. LC_E_RANGE: no limit, or no room for any message. */
LC_API int lcx_ring_pop(lcx_ring *r, uint8_t *out, uint64_t room, uint32_t *lengths,
                        uint32_t limit, int wait, uint64_t deadline) {
    lc_txn t;
    state s;
    uint32_t n = 0;
    if (limit == 0 || room < r->message) return LC_E_RANGE;
    if (room > LCX_RING_HOLD) room = LCX_RING_HOLD;
    if (limit > LCX_RING_BATCH) limit = LCX_RING_BATCH;
    int rc = lock(r, &t, OP_POP, wait, deadline);
    if (rc != LC_OK) return rc;
    if (!load(r, &s)) t.error = LC_E_CORRUPT;
    else if (s.count == 0) t.error = LC_E_MISSING;
    for (; !t.error && n < limit && n < s.count; n++) {
        const lcx_ring_slot *from = slot(r, s.first + n);
        uint32_t length = lc_load(&from->length);
        if (length > r->message || lc_load(&from->stamp) != s.pushed - s.count + n) {
            t.error = LC_E_CORRUPT;
            break;
        }
        if (length > room) break;
        memcpy(out, from->bytes, length);
        lengths[n] = length;
        out += length;
        room -= length;
    }
    if (!t.error) {
        lc_txn_set(&t, &r->root->first, (s.first + n) % r->capacity);
        lc_txn_set(&t, &r->root->count, s.count - n);
    }
    rc = unlock(r, &t);
    if (rc != LC_OK) return rc; /* nothing was popped, whatever stands in `out` */
    lc_event_notify(&r->root->drained);
    return (int)n;
}

/* Messages in it; no lock. What a step that is under way, or that a death has left, has stored so
 * far counts: only under the lock is it certain. */
LC_API int lcx_ring_length(lcx_ring *r) {
    int rc = lcs_usable(r->at);
    if (rc != LC_OK) return rc;
    uint32_t count = lc_load(&r->root->count);
    return count <= r->capacity ? (int)count : LC_E_CORRUPT;
}

static int check_all(const lcx_ring *r, char *text, size_t room) {
    state s;
    if (!load(r, &s))
        return snprintf(text, room, "%u messages from slot %u on, in %u slots", s.count, s.first,
                        r->capacity);
    for (uint32_t i = 0; i < s.count; i++) {
        const lcx_ring_slot *one = slot(r, s.first + i);
        uint32_t stamp = lc_load(&one->stamp), length = lc_load(&one->length);
        if (stamp != s.pushed - s.count + i)
            return snprintf(text, room, "slot %u holds message %u, expected %u",
                            (s.first + i) % r->capacity, stamp, s.pushed - s.count + i);
        if (length > r->message)
            return snprintf(text, room, "message %u has %u bytes, the most is %u", stamp, length,
                            r->message);
    }
    return 0;
}

/* Derive every invariant again, under the lock. 0 clean, 1 broken (`text` names the first). */
LC_API int lcx_ring_check(lcx_ring *r, char *text, uint32_t room, int wait, uint64_t deadline) {
    lc_txn t;
    int rc = lock(r, &t, OP_CHECK, wait, deadline);
    if (rc != LC_OK) return rc;
    int broken = check_all(r, text, room);
    rc = unlock(r, &t);
    return rc == LC_OK ? broken != 0 : rc;
}

/* The same for a copy of the segment, `bytes` long, which no process changes. */
LC_API int lcx_ring_check_copy(uint8_t *base, uint64_t bytes, uint32_t capacity, uint32_t message,
                               char *text, uint32_t room) {
    lcx_ring r = {0};
    uint64_t needed = lcx_ring_bytes(capacity, message);
    if (!needed || bytes < LCS_PAYLOAD_OFFSET + needed) return LC_E_RANGE;
    point(&r, base, capacity, message);
    return check_all(&r, text, room) != 0;
}
