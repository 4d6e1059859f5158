/* A log of entries: bounded, one writer, up to 63 readers, each of which reads every entry in
 * order. Appending and reading take no lock.
 *
 * Entries are counted from 0 on; `appended` is how many there have been, and entry n lies in slot
 * n % capacity. The writer fills a dead slot and then stores `appended` (release): that one store
 * is the instant at which the entry exists. A writer killed before it, anywhere
 * in the bytes, has appended nothing; if it is killed after it, all readers read the entry.
 *
 * A reader has a word of its own, its cursor: 0, or 1 + the entry that it reads next, on a line of
 * its own. Only it stores there, or, once it is dead, the holder of its slot's mending byte. It
 * loads `appended` (acquire), copies the entry, and stores its cursor (release). The writer
 * appends entry n only when every cursor is past entry n - capacity, so no reader's next entry is
 * overwritten.
 *
 * Joining. A reader announces a cursor at some entry that it has seen appended, fences, and loads
 * `appended` again: there it begins. The writer fences before it looks at the cursors. Say that
 * the reader begins at entry a. Before the writer overwrites it, with entry a + capacity, it looks
 * at all cursors at a time when `appended` is above a: `limit`, up to which one look allows to
 * append, is at most capacity above the lowest cursor and above `appended`. The reader loaded a,
 * so it did not see the store of a + 1, which stands before the writer's fence; hence the reader's
 * announcement, which stands before the reader's fence, is seen by that look. What it announced is
 * a or less. So the writer may look as rarely as it likes, and an append that needs no look needs
 * no fence.
 *
 * The role of the writer is taken and given back under the segment's lock, by one logged store,
 * and only when no living client has it. An heir finds `appended` as the dead one left it: the dead
 * one's slot byte is free only when its memory is torn down. Its own first append begins with a
 * look. */
#ifndef LC_LOG_H
#define LC_LOG_H

#include "lc_base.h"

#define LCX_LOG_BATCH 256      /* entries read in one call */
#define LCX_LOG_HOLD (1 << 18) /* bytes read in one call */
#define LCX_LOG_CAPACITY (1 << 24)
#define LCX_LOG_MESSAGE (1 << 16)              /* bytes; less than LCX_LOG_HOLD */
#define LCX_LOG_MOST (INT64_C(1) << 62)        /* entries, ever */
#define LCX_LOG_JOINING (UINT64_C(1) << 63)    /* of a cursor: announced, not yet begun */
#define LCX_LOG_LEFT UINT32_C(0x80)            /* as `writer`: there was one, which has left */

typedef struct lcx_log_cursor {
    _Atomic uint64_t next; /* 0: no reader; else 1 + the entry it reads next */
    uint64_t pad[7];
} lcx_log_cursor;

typedef struct lcx_log_root {
    _Atomic uint64_t appended; /* entries, ever; only the writer stores it */
    _Atomic uint32_t writer;   /* slot | epoch << 8, as in the lock; 0: there was none so far */
    uint32_t pad0[13];
    _Atomic uint32_t news; /* an event: something was appended, or there is another writer */
    uint32_t pad1[15];
    _Atomic uint32_t room; /* an event: something was read, or a reader has left */
    uint32_t pad2[15];
    lcx_log_cursor cursors[LCS_SLOTS];
} lcx_log_root;

typedef struct lcx_log_slot {
    _Atomic uint32_t stamp; /* the entry's number modulo 2^32 */
    _Atomic uint32_t length;
    uint8_t bytes[];
} lcx_log_slot;

_Static_assert(sizeof(lcx_log_cursor) == 64, "a cursor has its line");
_Static_assert(sizeof(lcx_log_root) == 192 + 64 * LCS_SLOTS, "three lines and the cursors");
_Static_assert(sizeof(lcx_log_slot) == 8, "the head of a slot");

#endif
