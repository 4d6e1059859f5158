/* The lock: taking, sleeping, handing over, and taking over from a dead owner (shm/native/lock.c).
 *
 * order LOCK_SWAP: lock-swap
 * order HOLDER_LOOK (APART): holder-look
 *
 * Client A has two threads, B and C have one each; each wants the lock once. A thread that has had
 * it exits, while its process lives on; with DEATH the first thread of A and B may be killed at any
 * instruction. Inside they change a word through the undo log (txn.h). The threads of A stand for
 * two calls, one behind the other at the door or not. A thread that exits performs all its stores
 * first, one that is killed those before that point: its end is seen through the kernel.
 *
 * What must hold: nobody takes the lock from a living holder. Whoever has it finds the word as it was
 * at the last commit. Nobody sleeps for ever: without deaths even when sleeps are not bounded.
 *
 * NO_SEQUENCE: a take-over compares the word alone. NO_TAG: the thread that is noted as holder is
 * believed to be that of this taking. BIT_FORGOTTEN: who has slept takes the lock without the
 * waiters bit. NOT_UNDONE: a taker does not look at the log.
 *
 * Who has slept may say that it starves. Then others leave it the free lock, for a time: here nobody
 * counts on that, so they may take it. STARVED_ALONE: it says so instead of saying that it waits.
 *
 * APART: with deaths, and each client is in a PID namespace of its own, where numbers of threads are given
 * out again: B's thread has that of A's first. /proc tells nothing, and the slot's byte goes late, or
 * not while we look. What tells is the kernel's mark: it looks at the word that a dying thread has led
 * it to, and marks it if the thread's number is there. LED_EARLY: a thread leads there before it takes the lock.
 * LED_LATE: until it has given it back.
 */
#include "weak.pml"

#ifdef APART
#define DEATH
#endif

#define NOBODY 0
#define A 1 /* clients: threads 0 and 1 are A's, 2 is B's, 3 is C's */
#define CLIENT(thread) ((thread) < 2 -> A : (thread))
#define UNKNOWN 9
#define MARK 8 /* FUTEX_OWNER_DIED, in place of the thread's number */
#ifdef APART
#define NUMBER(thread) ((thread) == 2 -> 0 : (thread))
#else
#define NUMBER(thread) (thread)
#endif

/* The 64 bits of the lock. */
byte owner;
bool waiters;
bool starved;
byte sequence;

/* lock->holder */
byte holder = UNKNOWN;
byte holder_sequence;

/* What the lock protects: a word and the log's entry for it. */
byte word, log_count, old_value;

bool ended[4]; /* this thread will never run again */
bool gone[4];  /* the same, as its byte and /proc say */
byte futex;   /* who sleeps: 1 << thread */

/* What is true. */
byte inside = UNKNOWN; /* the thread between taking and dropping */
byte committed;        /* what the word was at the last commit */

#define SLOT_ALIVE(client) \
    ((client) == A -> !gone[0] || !gone[1] : !gone[client])

/* ------------------------------------------------------------------ taking */

/* lcs_lock_take: the load of `both` and all that follows from it. */
#define ENTER(bit) \
    assert(inside == UNKNOWN || ended[inside]); \
    owner = CLIENT(me); waiters = bit; starved = false; sequence++; inside = me

#ifdef NO_SEQUENCE
#define UNCHANGED (owner == seen && waiters == seen_waiters && starved == seen_starved)
#else
#define UNCHANGED (owner == seen && waiters == seen_waiters && starved == seen_starved && \
                   sequence == seen_sequence)
#endif
#ifdef NO_TAG
#define OF_THIS_TAKING true
#else
#define OF_THIS_TAKING (holder_sequence == seen_sequence)
#endif
#ifdef BIT_FORGOTTEN
#define BIT false
#else
#define BIT (slept || seen != NOBODY) /* block: there may be other sleepers */
#endif

/* Inside, in program order. */
#define TAKE 1
#define NOTE 2   /* note_holder */
#define LOOK 4   /* lcs_lock_take: log_count; recover, if it says so */
#define READ 8   /* the word, and its new value from it */
#define ARM 16   /* lc_txn_set: the entry, counted */
#define STORE 32 /* lc_txn_set: the word */
#define COMMIT 64
#define DROP 128 /* let_go */

#ifdef DEATH
#define MORTAL (me == 0 || me == 2)
#else
#define MORTAL false
#endif

#ifdef LED_LATE
#define LED_UNTIL_END true
#else
#define LED_UNTIL_END false
#endif

/* The word is still what the process has made it: the kernel compares before it lets it sleep. */
#ifdef STARVED_ALONE
#define AS_SAID (owner == seen && (waiters || starved) && starved == seen_starved)
#else
#define AS_SAID (owner == seen && waiters && starved == seen_starved)
#endif
#ifdef STARVED_ALONE
#define AND_WAITS waiters
#else
#define AND_WAITS true
#endif

#define FORGET seen = 0; seen_waiters = 0; seen_starved = 0; seen_sequence = 0; slept = 0

proctype thread(byte me) {
    int done;
    byte seen, seen_sequence, value;
    bool seen_waiters, seen_starved, slept, wake;
    bool led; /* list_op_pending: hint() with NOTE, unhint() between COMMIT and DROP */

again: /* spin, then block */
#if !(LOCK_SWAP & 1) /* the swap does not hold up what is loaded behind it */
    if
    :: d_step { value = word; done = READ }
    :: d_step { value = 0; done = 0 }
    fi;
#endif
#if defined(APART) && !(HOLDER_LOOK & 1) /* what is loaded behind the mark may be loaded before it */
    if
    :: d_step { log_count == 0 -> done = done | LOOK }
    :: d_step { done = done & ~LOOK }
    fi;
#endif
    atomic {
        seen = owner; seen_waiters = waiters; seen_starved = starved; seen_sequence = sequence;
        if
        :: seen == NOBODY -> done = done & ~LOOK; goto take
        :: seen == CLIENT(me) -> goto wait /* another thread of ours */
        :: else
        fi
    }
    /* owner_dead: the kernel's mark, the slot's byte, the thread. */
#ifdef APART
    if
    :: atomic { OF_THIS_TAKING && holder == MARK -> goto take }
    :: else -> done = done & ~LOOK /* what follows is a system call */
    fi;
#endif
    if
    :: atomic { !SLOT_ALIVE(seen) -> goto take }
    :: SLOT_ALIVE(seen)
    fi;
#ifndef APART
    if
    :: atomic { OF_THIS_TAKING && holder != UNKNOWN && gone[holder] -> goto take }
    :: else
    fi;
#endif
wait: /* sleep_once */
    if
    :: atomic { UNCHANGED -> waiters = true; seen_starved = starved; slept = true }
    :: atomic { UNCHANGED && slept -> waiters = AND_WAITS; starved = true; seen_starved = true }
    :: atomic { !UNCHANGED -> goto again }
    fi;
    /* What spin_starved finds is what a wake-up finds. */
    if
    :: d_step { AS_SAID -> futex = futex | (1 << me) }
    :: atomic { !AS_SAID -> goto again }
    fi;
    if
    :: atomic { !(futex & (1 << me)) -> goto again } /* woken */
#if defined(DEATH) && !defined(UNBOUNDED)
    :: atomic { futex = futex & ~(1 << me); goto again } /* five milliseconds have passed */
#endif
    :: atomic { MORTAL -> futex = futex & ~(1 << me); goto end }
    fi;
    goto again;
take:
#ifdef LED_EARLY
    led = true;
#endif
    if
    :: atomic { UNCHANGED -> ENTER(BIT); done = done | TAKE; FORGET }
    :: atomic { !UNCHANGED -> done = 0; goto again }
    fi;
    do
    :: d_step {
           PERFORM(NOTE, TAKE); holder = NUMBER(me); holder_sequence = sequence;
           led = LED_UNTIL_END || !(done & COMMIT)
       }
    :: atomic {
           PERFORM(LOOK, TAKE);
#ifndef NOT_UNDONE
           if
           :: log_count -> word = old_value; log_count = 0
           :: else
           fi
#endif
       }
    :: d_step { PERFORM(READ, LOOK); value = word }
    :: atomic {
           PERFORM(ARM, TAKE | LOOK | READ);
           assert(value == committed);
           old_value = word; log_count = 1
       }
    :: d_step { PERFORM(STORE, ARM); word = value + 1; value = 0 }
    :: d_step { PERFORM(COMMIT, STORE); log_count = 0; committed++; led = led && LED_UNTIL_END }
    :: d_step {
           PERFORM(DROP, READ | BIND_EARLIER(LOCK_SWAP, BEFORE(DROP)));
           wake = waiters; owner = NOBODY; waiters = false; inside = UNKNOWN
       }
    :: DONE(2 * DROP - 1) -> break
    :: atomic { MORTAL && (done & (done + 1)) == 0 -> goto end }
    od;
    /* let_go: lc_futex_wake */
    if
    :: atomic {
           wake && futex != 0 ->
           if
           :: futex & 1 -> futex = futex & ~1
           :: futex & 2 -> futex = futex & ~2
           :: futex & 4 -> futex = futex & ~4
           :: futex & 8 -> futex = futex & ~8
           fi
       }
    :: atomic { !wake || futex == 0 }
    :: atomic { MORTAL -> goto end }
    fi;
end:
    atomic {
        ended[me] = true;
#ifdef APART
        if
        :: led && holder == NUMBER(me) -> holder = MARK
        :: else
        fi
    }
    atomic {
#endif
        gone[me] = true; led = false; FORGET; value = 0; done = 0; wake = false
    }
}

init {
    atomic {
        run thread(0);
        run thread(1);
        run thread(2);
#ifndef DEATH
        run thread(3)
#endif
    }
}
