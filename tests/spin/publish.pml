/* Publishing a page of two shards against reading it, and against the collector of reservations.
 *
 * order SHARD_DONE: shard-done
 * order COMPLETED_CLEAR: completed-clear
 * spare COMPLETED_SET: completed-set
 * spare SHARD_FENCE: shard-fence
 * spare SHARD_LOOK: shard-look
 * spare PAGE_READY: page-ready
 * spare WALK_WORD: guess-word walk-word
 * spare WALK_FENCE: guess-fence walk-fence
 * together SHARDS: SHARD_DONE SHARD_LOOK SHARD_FENCE
 * together READER: WALK_WORD WALK_FENCE
 *
 * Publishers: publish.c, lci_publish: the bytes of the shard, its word, the look at all words, then
 * make_ready, lci_flag_ended. Reader: lookup.c, `standing`, and then the bytes: less than any real
 * reader does, who also passes the fence of its pin. Collector: collect.c, lci_collect, once, led
 * there by a bit that somebody set too early (the comment at lci_doom_reservation says who).
 *
 * What must hold: who sees READY reads what both have written. At the end the page is READY, and
 * either it has been collected or the bit in `completed` says that it is to be.
 *
 * Either the fence or the order of shard-done and shard-look lets one of two last publishers see
 * both words, so each is spare; without both nobody may. PAGE_READY is spare because a publisher
 * stores it only after its own word, which is a release behind its bytes. pin_evict.pml publishes
 * without shards and needs it. COMPLETED_SET is spare for the same reason.
 */
#include "weak.pml"

bool bytes[2];
bool shard[2]; /* DONE */
bool ready;    /* the page's word: WRITING or READY */
bool completed = true;
bool clearing; /* a fetch_and of `completed` has loaded and not yet stored */
bool collected;
byte ended;

/* ------------------------------------------------------------------ a publisher */

#define WRITE 1    /* the bytes */
#define DONE_LOAD 2 /* lci_publish: the compare-and-swap of the own word */
#define DONE_STORE 4
#define LOOK 8     /* lci_complete: the other word; the own one is ours */
#define READY 16   /* make_ready */
#define FLAG 32    /* lci_flag_ended: atomic_fetch_or */

#define UP_TO_DONE (WRITE + DONE_LOAD + DONE_STORE)
#define AFTER_DONE \
    (BIND_LATER(SHARD_DONE | SHARD_FENCE, DONE_LOAD) | BIND_ALL(SHARD_FENCE, UP_TO_DONE))
/* A seq_cst load behind a seq_cst read-modify-write waits for its store. */
#define LOOK_WAITS (AFTER_DONE | BIND_ALL(SHARD_DONE & SHARD_LOOK, DONE_STORE))
/* Stores: they also wait for the look, which decides about them. */
#define AFTER_LOOK (LOOK | AFTER_DONE | BIND_EARLIER(SHARD_FENCE, UP_TO_DONE))

#define FLAG_WAITS BIND_EARLIER(COMPLETED_SET, BEFORE(FLAG))

proctype publisher(bit mine) {
    int done;
    bool last;
    do
    :: d_step { PERFORM(WRITE, 0); bytes[mine] = true }
    :: PERFORM(DONE_LOAD, 0)
    :: d_step {
           PERFORM(DONE_STORE, DONE_LOAD | BIND_EARLIER(SHARD_DONE, WRITE));
           shard[mine] = true
       }
    :: d_step { PERFORM(LOOK, LOOK_WAITS); last = shard[1 - mine] }
    :: d_step {
           last && PERFORM(READY, AFTER_LOOK | BIND_EARLIER(PAGE_READY, BEFORE(READY)));
           ready = true
       }
    :: d_step {
           last && !clearing && PERFORM(FLAG, AFTER_LOOK | FLAG_WAITS);
           completed = true
       }
    :: DONE(WRITE | DONE_STORE | LOOK) && (!last || DONE(READY | FLAG)) -> break
    od;
    ended++
}

/* ------------------------------------------------------------------ the collector */

#define LOOK_0 1        /* end_reservation: lci_complete */
#define LOOK_1 2
#define ADOPT 4         /* adopt_page: WRITING to READY */
#define CLEAR_LOAD 8    /* lci_collect: atomic_fetch_and */
#define CLEAR_STORE 16
#define LOOK_AGAIN_0 32 /* lci_complete once more */
#define LOOK_AGAIN_1 64
#define FLAG_AGAIN 128  /* lci_flag_ended */
#define LOOKED (LOOK_0 + LOOK_1)
#define LOOKED_AGAIN (LOOK_AGAIN_0 + LOOK_AGAIN_1)

#define AFTER_CLEAR BIND_LATER(COMPLETED_CLEAR, CLEAR_LOAD)
#define CLEAR_WAITS BIND_EARLIER(COMPLETED_CLEAR, BEFORE(CLEAR_LOAD) & ~ADOPT)

proctype collector() {
    int done;
    bool missing, missing_again;
    do
    :: d_step { PERFORM(LOOK_0, 0); missing = missing || !shard[0] }
    :: d_step { PERFORM(LOOK_1, 0); missing = missing || !shard[1] }
    :: d_step { !missing && PERFORM(ADOPT, LOOKED); ready = true; collected = true }

    /* Nothing to collect: the bit goes, and is set again if that has just changed. */
    :: d_step { missing && PERFORM(CLEAR_LOAD, LOOKED); clearing = true }
    :: d_step { PERFORM(CLEAR_STORE, CLEAR_LOAD | CLEAR_WAITS); completed = false; clearing = false }
    :: d_step {
           PERFORM(LOOK_AGAIN_0, LOOK_0 | AFTER_CLEAR);
           missing_again = missing_again || !shard[0]
       }
    :: d_step {
           PERFORM(LOOK_AGAIN_1, LOOK_1 | AFTER_CLEAR);
           missing_again = missing_again || !shard[1]
       }
    :: d_step { !missing_again && PERFORM(FLAG_AGAIN, CLEAR_STORE | LOOKED_AGAIN); completed = true }

    :: DONE(ADOPT) -> break
    :: DONE(CLEAR_STORE | LOOKED_AGAIN) && (missing_again || DONE(FLAG_AGAIN)) -> break
    od;
    ended++
}

/* ------------------------------------------------------------------ a reader */

#define WORD 1
#define BYTES_0 2
#define BYTES_1 4
#define AFTER_WORD (BIND_LATER(WALK_WORD, WORD) | BIND_LATER(WALK_FENCE, WORD))

proctype reader() {
    int done;
    bool matched, unwritten;
    do
    :: d_step { PERFORM(WORD, 0); matched = ready }
    :: d_step { PERFORM(BYTES_0, AFTER_WORD); unwritten = unwritten || !bytes[0] }
    :: d_step { PERFORM(BYTES_1, AFTER_WORD); unwritten = unwritten || !bytes[1] }
    :: DONE(WORD | BYTES_0 | BYTES_1) -> break
    od;
    assert(!matched || !unwritten)
}

init {
    atomic {
        run publisher(0);
        run publisher(1);
        run collector();
        run reader()
    }
    ended == 3;
    assert(ready);
    assert(collected || completed)
}
