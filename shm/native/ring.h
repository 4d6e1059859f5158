/* A ring of messages: bounded, many producers and consumers, changed under the lock.
 *
 * Messages lie in slots from `first` on, `count` of them; the slots after them are dead. Pushing
 * writes dead slots, which needs no log, and makes them live by storing `count` through the undo
 * log. Popping copies a message out and makes its slot dead in the same way. So the commit of the
 * step, one store, is the instant at which messages are pushed, or popped:
 *
 *   a producer killed before it, anywhere in its bytes, has pushed nothing: there is no claim that
 *   others would have to skip; if it is killed after it, the message is delivered;
 *   a consumer killed before it leaves the message to the next one; if it is killed after it, the
 *   message is lost with it. No call returns a message that another call has returned.
 *
 * A slot is used again only in a later step: between popping and pushing there is a commit.
 * `stamp` counts messages modulo 2^32. The live slots bear those before `pushed` in order, which
 * is what `check` derives again, and what a pop asks of each slot before it believes it. */
#ifndef LC_RING_H
#define LC_RING_H

#include "lc_base.h"

#define LCX_RING_BATCH 256      /* messages moved in one hold of the lock */
#define LCX_RING_HOLD (1 << 18) /* bytes moved in one hold: some 30 us */
#define LCX_RING_CAPACITY (1 << 24)
#define LCX_RING_MESSAGE (1 << 16) /* bytes; less than LCX_RING_HOLD */

typedef struct lcx_ring_root {
    _Atomic uint32_t first;  /* slot of the oldest message, or of the next one */
    _Atomic uint32_t count;  /* messages */
    _Atomic uint32_t pushed; /* ever, modulo 2^32: the next one's stamp */
    uint32_t pad0[13];
    _Atomic uint32_t filled; /* an event: something was pushed */
    uint32_t pad1[15];
    _Atomic uint32_t drained; /* an event: something was popped */
    uint32_t pad2[15];
} lcx_ring_root;

typedef struct lcx_ring_slot {
    _Atomic uint32_t stamp;
    _Atomic uint32_t length;
    uint8_t bytes[];
} lcx_ring_slot;

_Static_assert(sizeof(lcx_ring_root) == 192, "three lines");
_Static_assert(sizeof(lcx_ring_slot) == 8, "the head of a slot");

#endif
