/* Joining, appending and reading: shm/native/log.h, of two slots and four entries.
 *
 * order LOOK_FENCE: log-look-fence
 * order JOIN_FENCE: log-join-fence
 * order APPEND_ORDER: log-append
 * order SEE_ORDER: log-see
 * order READ_ORDER: log-read
 * spare LOOK_ORDER: log-look
 * spare BEGIN_ORDER: log-begin
 * spare LEAVE_ORDER: log-leave
 *
 * The writer: log_api.c, append_one: `look`, if its last look does not allow another entry (a look
 * that finds the log full is tried again, and changes nothing); the slot; `appended`. The reader:
 * lcx_log_join, then lcx_log_read twice, one entry each time, then lcx_log_leave.
 *
 * What must hold: the reader reads the entry at which it begins and the one behind it, and not what
 * has been written over them.
 *
 * BEGIN_AT_FIRST lets the reader begin at what it announced, without loading `appended` again.
 * LIMIT_HIGH lets one look allow an entry more.
 *
 * The loads of a look are acquires that the model does not need: a store waits for the loads that
 * decide whether it is reached. Of several readers the lowest cursor counts, so one is modelled. */
#include "weak.pml"

#define SLOTS 2
#define ENTRIES 4
#ifdef LIMIT_HIGH
#define ALLOWS (SLOTS + 1)
#else
#define ALLOWS SLOTS
#endif

byte appended;
byte cursor;      /* 0: no reader; else 1 + the entry it reads next */
byte slot[SLOTS]; /* 1 + the entry in it */

/* ------------------------------------------------------------------ the writer */

#define LOOK(n) (1 << (3 * (n)))   /* look: every cursor */
#define WRITE(n) (2 << (3 * (n)))  /* stamp, length and bytes */
#define APPEND(n) (4 << (3 * (n))) /* lc_store_release(&l->root->appended) */
#define LOOKS_BEFORE(n) ((LOOK(0) | LOOK(1) | LOOK(2) | LOOK(3)) & BEFORE(LOOK(n)))
#define OTHERS_BEFORE(op, n) (((op(0) | op(1) | op(2) | op(3)) & BEFORE(op(n))))
#define LOWEST(n) ((cursor == 0 || cursor - 1 > (n)) -> (n) : cursor - 1)
#define AFTER_LOOKS(n) (LOOK(n) | LOOKS_BEFORE(n))

#define ENTRY(n) \
    :: d_step { limit > (n) && PERFORM(LOOK(n), LOOKS_BEFORE(n)) } \
    :: d_step { \
           limit <= (n) && LOWEST(n) + ALLOWS > (n) \
           && PERFORM(LOOK(n), LOOKS_BEFORE(n) | BIND_ALL(LOOK_FENCE, BEFORE(LOOK(n)))); \
           limit = LOWEST(n) + ALLOWS \
       } \
    :: d_step { \
           PERFORM(WRITE(n), AFTER_LOOKS(n) | OTHERS_BEFORE(WRITE, n)); \
           slot[(n) % SLOTS] = (n) + 1 \
       } \
    :: d_step { \
           PERFORM(APPEND(n), AFTER_LOOKS(n) | OTHERS_BEFORE(APPEND, n) \
                              | BIND_EARLIER(APPEND_ORDER, BEFORE(APPEND(n)))); \
           appended = (n) + 1 \
       }

proctype writer() {
    int done;
    byte limit;
    do
    ENTRY(0)
    ENTRY(1)
    ENTRY(2)
    ENTRY(3)
    :: DONE(BEFORE(LOOK(ENTRIES))) -> break
    od
}

/* ------------------------------------------------------------------ the reader */

#define FIRST 1     /* lcx_log_join: `appended` */
#define ANNOUNCE 2  /* the cursor, JOINING */
#define BEGIN 4     /* `appended` again */
#define SETTLE 8    /* the cursor */
#define SEE_0 16    /* unread: `appended`, once it is above the cursor */
#define COPY_0 32   /* read_some: the slot */
#define MOVE_0 64   /* the cursor */
#define SEE_1 128
#define COPY_1 256
#define MOVE_1 512
#define LEAVE 1024  /* lcx_log_leave */

/* What waits for the loads before it, in program order; the first load is an acquire. */
#define AFTER_BEGIN (FIRST | BIND_LATER(BEGIN_ORDER, BEGIN) | BIND_ALL(JOIN_FENCE, BEFORE(BEGIN)))
#define AFTER_SEE_0 (AFTER_BEGIN | BIND_LATER(SEE_ORDER, SEE_0))
#define AFTER_SEE_1 (AFTER_SEE_0 | BIND_LATER(SEE_ORDER, SEE_1))
#define BEFORE_MOVE(op) BIND_EARLIER(READ_ORDER, BEFORE(op))

#ifdef BEGIN_AT_FIRST
#define BEGINS first
#else
#define BEGINS appended
#endif
#define WRONG(entry) (slot[(entry) % SLOTS] != (entry) + 1)

proctype reader() {
    int done;
    byte first, next;
    bool wrong_0, wrong_1;
    do
    /* lcx_log_join */
    :: d_step { PERFORM(FIRST, 0); first = appended }
    :: d_step { PERFORM(ANNOUNCE, FIRST); cursor = first + 1 }
    :: d_step { PERFORM(BEGIN, FIRST | BIND_ALL(JOIN_FENCE, BEFORE(BEGIN))); next = BEGINS }
    :: d_step { PERFORM(SETTLE, AFTER_BEGIN | BEGIN | ANNOUNCE); cursor = next + 1 }

    /* lcx_log_read, twice; the slot may be loaded before it is known that there is something */
    :: d_step { appended > next && PERFORM(SEE_0, AFTER_BEGIN | BEGIN) }
    :: d_step { PERFORM(COPY_0, AFTER_SEE_0 | BEGIN); wrong_0 = WRONG(next) }
    :: d_step { PERFORM(MOVE_0, AFTER_SEE_0 | SEE_0 | SETTLE | BEFORE_MOVE(MOVE_0)); cursor++ }
    :: d_step { appended > next + 1 && PERFORM(SEE_1, AFTER_SEE_0 | SEE_0) }
    :: d_step { PERFORM(COPY_1, AFTER_SEE_1 | BEGIN); wrong_1 = WRONG(next + 1) }
    :: d_step { PERFORM(MOVE_1, AFTER_SEE_1 | SEE_1 | MOVE_0 | BEFORE_MOVE(MOVE_1)); cursor++ }

    /* lcx_log_leave */
    :: d_step {
           PERFORM(LEAVE, AFTER_SEE_1 | MOVE_1 | BIND_EARLIER(LEAVE_ORDER, BEFORE(LEAVE)));
           cursor = 0
       }
    :: DONE(2 * LEAVE - 1) -> break
    :: DONE(SETTLE) && next == ENTRIES -> break
    :: DONE(MOVE_0 | COPY_0) && next + 1 == ENTRIES -> break
    od;
    assert(!DONE(SEE_0 | COPY_0) || !wrong_0);
    assert(!DONE(SEE_1 | COPY_1) || !wrong_1)
}

init {
    atomic {
        run writer();
        run reader()
    }
}
