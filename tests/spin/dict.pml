/* A walk along a chain while one of its records is moved to another chain and back.
 *
 * order WALK_GEN: guess-gen walk-gen
 * order WALK_FENCE: guess-fence walk-fence
 * order GEN_ODD: gen-odd
 * order GEN_EVEN: gen-even
 * spare TXN_SET: txn-set
 *
 * Chain A begins as Z -> X -> P, chain B is empty. The writer (dict.c, lc_dict_unlink and
 * lc_dict_insert, under the lock) takes X out of A, gives it a key of B and links it there; then
 * takes it out of B and links it under a third key at the head of A. The record's word says which
 * life it belongs to. The writer may stop for ever at any instruction (killed, SIGSTOP).
 *
 * Reader: dict.h, lc_dict_find with lc_dict_walk, for any of the keys; and, with GUESS, lookup.c,
 * `standing` on any record, whatever led there. A walk is performed as a processor might: the second
 * look at a record's generation may come as late as the next record's fence, loads behind a branch
 * may be performed before the branch is known, on either path, and count if that path was right.
 *
 * What must hold: P, which stays, is found. A record that is accepted had the wanted key in the
 * life whose generation and word were read. When the writer stands still, a fresh walk ends.
 *
 * TXN_SET, the release of links, is spare here: who follows a link to a record not yet closed meets
 * an odd or an old generation, and starts again. The acquire load of a head is not modelled: a record
 * is read at the address that it gave, which no machine foresees.
 */
#include "weak.pml"

#define Z 0
#define X 1
#define P 2
#define NIL 3
#define A 0
#define B 1

/* Keys: the record's number in A; X has KEY_B in its second life and KEY_A in its third. */
#define KEY_B 3
#define KEY_A 4
#define BUCKET(k) ((k) == KEY_B)

byte head[2];
byte key[3], next[3], gen[3], word[3];
bool still; /* the writer has stopped */

/* What is true of a record's life: its word, and its key. */
#define LIFE(g) ((g) / 2 + 1)
#define KEY_IN(record, g) ((g) == 0 -> (record) : ((g) == 2 -> KEY_B : KEY_A))

/* ------------------------------------------------------------------ the writer */

/* A move; the second follows in the same thread, so its operations stand behind these. */
#define UNLINK 1
#define FREE 2      /* finish: the word */
#define ODD 4       /* lc_gen_open, whose fence stands behind it */
#define SET_KEY 8
#define SET_NEXT 16
#define SET_WORD 32
#ifndef LINK_ODD
#define EVEN 64     /* lc_gen_close */
#define LINK 128    /* lc_dict_link */
#else
#define EVEN 128
#define LINK 64
#endif
#define SECOND(op) (256 * (op))

#define CLOSED(op) BIND_EARLIER(GEN_EVEN, BEFORE(op))
#define RELEASED(op) BIND_EARLIER(TXN_SET, BEFORE(op))
/* Behind the release fences of the moves so far. */
#define OPENED (BIND_EARLIER(GEN_ODD, BEFORE(SET_KEY)))
#define OPENED_2 (BIND_EARLIER(GEN_ODD, BEFORE(256 * SET_KEY)))

#ifndef TAIL
#define LAST_NEXT head[A]
#define LAST_LINK head[A] = X
#else
#define LAST_NEXT NIL
#define LAST_LINK next[P] = X
#endif

proctype writer() {
    int done;
    do
    /* From A to B. */
    :: d_step { PERFORM(UNLINK, 0); next[Z] = next[X] }
    :: d_step { PERFORM(FREE, RELEASED(FREE)); word[X] = 0 }
    :: d_step { PERFORM(ODD, 0); gen[X] = gen[X] | 1 }
    :: d_step { PERFORM(SET_KEY, OPENED); key[X] = KEY_B }
    :: d_step { PERFORM(SET_NEXT, OPENED | UNLINK); next[X] = NIL }
    :: d_step { PERFORM(SET_WORD, OPENED | FREE | RELEASED(SET_WORD)); word[X] = 2 }
    :: d_step { PERFORM(EVEN, OPENED | ODD | CLOSED(EVEN)); gen[X] = 2 }
    :: d_step { PERFORM(LINK, OPENED | RELEASED(LINK)); head[B] = X }

    /* From B to the head of A. */
    :: d_step {
           PERFORM(SECOND(UNLINK), OPENED | LINK | SET_NEXT | RELEASED(SECOND(UNLINK)));
           head[B] = NIL
       }
    :: d_step { PERFORM(SECOND(FREE), OPENED | SET_WORD | RELEASED(SECOND(FREE))); word[X] = 0 }
    :: d_step { PERFORM(SECOND(ODD), OPENED | EVEN); gen[X] = 3 }
    :: d_step { PERFORM(SECOND(SET_KEY), OPENED_2 | SET_KEY); key[X] = KEY_A }
    :: d_step { PERFORM(SECOND(SET_NEXT), OPENED_2 | SET_NEXT); next[X] = LAST_NEXT }
    :: d_step {
           PERFORM(SECOND(SET_WORD), OPENED_2 | SECOND(FREE) | RELEASED(SECOND(SET_WORD)));
           word[X] = 3
       }
    :: d_step {
           PERFORM(SECOND(EVEN), OPENED_2 | SECOND(ODD) | CLOSED(SECOND(EVEN)));
           gen[X] = 4
       }
    :: d_step { PERFORM(SECOND(LINK), OPENED_2 | RELEASED(SECOND(LINK))); LAST_LINK }

    /* Nothing behind an instruction is performed, everything before it is: then it may stop. */
    :: (done & (done + 1)) == 0 -> break
    od;
    still = true
}

/* ------------------------------------------------------------------ the reader */

#define GEN 1
#define KEY 2
#define WORD 4
#define NEXT 8
#define AGAIN 16 /* the generation once more, behind the fence */
#define READ (GEN + KEY + WORD + NEXT)
#define AFTER_GEN BIND_LATER(WALK_GEN, GEN)
#define AFTER_READ BIND_LATER(WALK_FENCE, READ)

/* The record before has been read, and not its generation again: what it must turn out to be. */
#define NOTHING 0
#define THE_SAME 1
#define ANOTHER 2

#define FORGET done = 0; g = 0; k = 0; w = 0; n = 0; changed = false

#ifdef NO_BUCKET
#define STRAYED false
#else
#define STRAYED (BUCKET(k) != BUCKET(wanted))
#endif

#ifdef GUESS /* what is not accepted is no answer: a walk follows */
#define RESTART goto end
#define GO_ON goto end
#define NOT_HERE goto end
#else
#define RESTART assert(!fresh); goto restart
#define GO_ON at = n; FORGET; goto record
#define NOT_HERE goto absent
#endif

proctype reader(byte wanted) {
    int done;
    byte at, g, k, w, n;
    byte due = NOTHING, due_at, due_gen;
    bool changed;
    bool fresh; /* this walk began when the writer stood still */

#ifdef GUESS
    select(at : 0 .. 2);
#else
restart:
    atomic { at = head[BUCKET(wanted)]; fresh = still; FORGET }
#endif
    if
    :: at == NIL -> goto absent
    :: else
    fi;
record:
    do
    :: d_step { PERFORM(GEN, 0); g = gen[at] }
    :: d_step { PERFORM(KEY, AFTER_GEN); k = key[at] }
    :: d_step { PERFORM(WORD, AFTER_GEN); w = word[at] }
    :: d_step { PERFORM(NEXT, AFTER_GEN); n = next[at] }
    :: d_step { due == NOTHING && PERFORM(AGAIN, GEN | AFTER_READ); changed = gen[at] != g }
    :: atomic {
           due != NOTHING ->
           if
           :: (due == THE_SAME) == (gen[due_at] == due_gen)
           :: else -> goto end /* the processor had taken the wrong path: nothing of it counts */
           fi;
           due = NOTHING; due_at = 0; due_gen = 0
       }
    :: atomic { DONE(READ) && due == NOTHING -> break }
    od;

#ifndef GUESS
    if
    :: atomic { g & 1 -> assert(!fresh); goto restart }
    /* The outcome of the last look is foreseen, and checked later. */
    :: atomic { !DONE(AGAIN) && !(g & 1) -> due = ANOTHER; due_at = at; due_gen = g; goto restart }
    :: atomic {
           !DONE(AGAIN) && !(g & 1) && k != wanted && !STRAYED && n != NIL ->
           due = THE_SAME; due_at = at; due_gen = g; at = n; FORGET; goto record
       }
    :: else -> goto judge
    fi;
#endif
judge:
    if
    :: atomic { !DONE(AGAIN) -> done = done | AGAIN; changed = gen[at] != g }
    :: else
    fi;
    atomic {
        if
        :: changed || (g & 1) || (k != wanted && STRAYED) ->
            RESTART
        :: else
        fi;
        if
        :: k == wanted && w != 0 -> /* accepted */
            assert(w == LIFE(g) && k == KEY_IN(at, g))
        :: k == wanted -> skip /* of no use: being changed */
        :: k != wanted && n == NIL -> NOT_HERE
        :: else -> GO_ON
        fi
    };
    goto end;
absent:
    if
    :: due == NOTHING || (due == THE_SAME) == (gen[due_at] == due_gen) -> assert(wanted != P)
    :: else
    fi;
end:
    skip
}

init {
    byte wanted;
    next[Z] = X; next[X] = P; next[P] = NIL;
    head[A] = Z; head[B] = NIL;
    key[X] = X; key[P] = P;
    word[Z] = 1; word[X] = 1; word[P] = 1;
    select(wanted : 0 .. 4);
    atomic { run writer(); run reader(wanted) }
}
