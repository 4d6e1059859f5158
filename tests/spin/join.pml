/* Ranks that join a reservation, with deaths: docs/design/joining.md, section 32.
 *
 * One page, a reservation of two shards. Rank 1 reserves the page and owns the reservation; the other
 * shard is OPEN in its name. Rank 2 does what others left to do, and joins: its pin and its shard's word,
 * one step of the log. Each may abandon, and may be killed between any two steps. Client 3 is never
 * killed: it reaps, collects and evicts, in any order, until the others have gone. At some moment the
 * time for joining has passed.
 *
 * Memory is sequentially consistent here, as in life.pml: joining is under the lock, and publish.pml has
 * the orders of publishing. A reaper dooms as an abandoning client does, without portions.
 *
 * What must hold:
 *   1. the page becomes READY only when all shards are DONE, so all were written;
 *   2. the page is freed only when no living rank copies into it;
 *   3. when all have gone and been reaped the page is not WRITING, no reservation and no pin is left;
 *      and a holder of the lock that looks once the time has passed leaves no shard OPEN;
 *   4. once a rank has given up the reservation has ended for both;
 *   5. what all shards were published of is not lost: it becomes READY.
 *
 * Each of these takes away a part, and must fail: OPEN_COUNTS (an OPEN shard does not keep a publisher
 * from being the last), PINNED_LATE (a rank pins in the step after its word), OPEN_IS_OTHERS (an OPEN
 * shard does not doom what its dead owner made), CLEARED_EARLY (the time to look is forgotten before the
 * dooming is committed), NO_DEADLINE, ABANDON_UNPINS (a rank that gives up only unpins), NOT_UNDONE (the log
 * of a dead holder is not undone).
 */

/* Words that are changed under the lock, through the log. */
#define WORD 0   /* the page's state */
#define LISTED 1 /* pages in the reservation */
#define RES 2    /* its state */
#define WHOLE 3  /* lci_reservation.listed: no page will be added */
#define OWNER 4
#define SHARD 5  /* and 6: a shard's word, 4 * slot + status */
#define WORDS 7

#define FREE 0
#define WRITING 1
#define READY 2
#define DOOMED 3

#define ACTIVE 1
#define ENDING 2 /* LCI_RES_DOOMED */

#define PENDING(slot) (4 * (slot))
#define PUBLISHED(slot) (4 * (slot) + 1)
#define OPEN(slot) (4 * (slot) + 3)
#define DEAD(w) (((w) / 4) * 4 + 2)
#define STATUS(s) (mem[SHARD + s] & 3)

byte mem[WORDS];
byte lock_owner;
byte log_count, log_word[5], log_old[5], log_new[5]; /* log_new: of a soft entry, plus one */

byte row[3];    /* of slots 1 and 2; 0 is not used */
bool completed; /* the reservation's bit in root->completed */
bool joining;   /* root->joining_ns is set */
bool late;      /* and has passed */
bool killed[4], reaped[3];

/* What is true. */
bool wrote[2], copying[3];
bool published; /* all shards were */
bool was_ready;

#ifdef OPEN_COUNTS
#define THERE(s) (STATUS(s) == 1 || STATUS(s) == 3)
#else
#define THERE(s) (STATUS(s) == 1)
#endif
#define ALL(what) (what(0) && what(1))
#define ANY(what) (what(0) || what(1))
#define IS_OPEN(s) (STATUS(s) == 3)
#define IS_DEAD(s) (STATUS(s) == 2)
#define WROTE(s) (wrote[s])
#define DONE(s) (STATUS(s) == 1)
#define COMPLETE (mem[RES] == ACTIVE && ALL(THERE))
#define LATE_OPEN (mem[RES] == ACTIVE && mem[WHOLE] && ANY(IS_OPEN))
#define PINNED (row[1] || row[2])
#define COPIES(i) (copying[i] && !killed[i])

/* ------------------------------------------------------------------ lock and log */

/* lc_txn_set, lc_txn_swap: entry, count and store are one step here (lock.pml takes them apart). */
inline set(w, v) {
    d_step {
        log_word[log_count] = w;
        log_old[log_count] = mem[w];
        log_new[log_count] = 0;
        log_count++;
        mem[w] = v
    }
}

inline swap(w, old, v) {
    d_step {
        log_word[log_count] = w;
        log_old[log_count] = old;
        log_new[log_count] = v + 1;
        log_count++;
        mem[w] = (mem[w] == old -> v : mem[w])
    }
}

inline forget_log() {
    log_count = 0;
    log_word[0] = 0; log_word[1] = 0; log_word[2] = 0; log_word[3] = 0; log_word[4] = 0;
    log_old[0] = 0; log_old[1] = 0; log_old[2] = 0; log_old[3] = 0; log_old[4] = 0;
    log_new[0] = 0; log_new[1] = 0; log_new[2] = 0; log_new[3] = 0; log_new[4] = 0
}

#define SAFE_POINT \
    assert(mem[WORD] != WRITING || mem[LISTED] == 1); \
    assert(mem[RES] != FREE || mem[LISTED] == 0)

inline commit() { atomic { forget_log(); SAFE_POINT } }

inline lock() {
    atomic { lock_owner == 0 || killed[lock_owner] -> lock_owner = me };
#ifndef NOT_UNDONE
    do
    :: d_step {
           log_count > 0 ->
           log_count--;
           if
           :: log_new[log_count] == 0 || mem[log_word[log_count]] == log_new[log_count] - 1 ->
               mem[log_word[log_count]] = log_old[log_count]
           :: else
           fi
       }
    :: else -> break
    od;
#endif
    atomic { forget_log(); SAFE_POINT }
}

inline unlock() { lock_owner = 0 }

/* ------------------------------------------------------------------ under the lock */

inline make_ready() {
    atomic {
        if
        :: mem[WORD] == WRITING ->
            mem[WORD] = READY;
            was_ready = true;
            assert(ALL(DONE));
            assert(ALL(WROTE))
        :: else
        fi
    }
}

inline doom_shard(s) {
    if
    :: STATUS(s) == 0 || STATUS(s) == 3 ->
        found = mem[SHARD + s];
        swap(SHARD + s, found, DEAD(found));
        found = 0
    :: else
    fi
}

/* lci_doom_reservation */
inline doom() {
    if
    :: mem[RES] == ACTIVE ->
        doom_shard(0);
        doom_shard(1);
        if
        :: ANY(IS_DEAD) -> set(RES, ENDING); completed = true
        :: else /* lost to its publishers */
        fi;
#ifdef CLEARED_EARLY
        joining = false;
#endif
        commit()
    :: else
    fi
}

/* lci_settle_joins; then the rest of lci_collect. */
inline collect() {
    if
    :: late ->
        if
#ifndef NO_DEADLINE
        :: joining && LATE_OPEN -> doom()
#endif
        :: else
        fi;
        atomic { joining = false; assert(!LATE_OPEN) }
    :: else
    fi;
    if
    :: !completed
    :: completed && mem[RES] == ENDING ->
        if
        :: mem[LISTED] -> set(WORD, DOOMED); set(LISTED, 0); commit()
        :: else
        fi;
        set(RES, FREE);
        commit();
        completed = false
    :: completed && COMPLETE ->
        make_ready();
        if
        :: mem[LISTED] -> set(LISTED, 0); commit()
        :: else
        fi;
        set(RES, FREE);
        commit();
        completed = false
    :: completed && mem[RES] != ENDING && !COMPLETE ->
        completed = false;
        completed = completed || COMPLETE
    fi
}

/* lci_collect_doomed, and an evictor: nothing matches this page. */
inline free_page() {
    if
    :: (mem[WORD] == DOOMED || mem[WORD] == READY) && !mem[LISTED] && !PINNED ->
        atomic { assert(!COPIES(1) && !COPIES(2)) };
        set(WORD, FREE);
        commit()
    :: else
    fi
}

/* ------------------------------------------------------------------ without the lock */

inline copy_and_publish(s) {
    copying[me] = true;
    atomic { copying[me] = false; wrote[s] = true };
    if
    :: atomic {
           mem[SHARD + s] == PENDING(me) ->
           mem[SHARD + s] = PUBLISHED(me);
           published = published || (mem[RES] == ACTIVE && ALL(DONE))
       };
        if
        :: COMPLETE -> make_ready(); completed = true
        :: else
        fi
    :: else
    fi
}

/* lci_abandon, in the middle of its copy or not. Then the pin goes. */
inline abandon() {
    lock();
#ifndef ABANDON_UNPINS
    doom();
#endif
    collect();
    atomic { assert(mem[RES] != ACTIVE); lock_owner = 0 }
}

/* ------------------------------------------------------------------ processes */

/* Rank 1, the owner. */
proctype owner() {
    byte me = 1, found;
    {
        lock();
        d_step { /* dead words until ACTIVE */
            mem[SHARD] = PENDING(1);
            mem[SHARD + 1] = OPEN(1);
            mem[WHOLE] = 0;
            mem[OWNER] = 1
        };
        set(RES, ACTIVE);
        row[1]++;
        set(WORD, WRITING);
        set(LISTED, 1);
        commit();
        unlock();
        lock(); /* lci_list_whole */
        if
        :: mem[RES] == ACTIVE -> joining = true; set(WHOLE, 1); commit()
        :: else
        fi;
        unlock();
        if
        :: copy_and_publish(0)
        :: abandon()
        fi;
        row[1]--
    } unless { killed[1] };
    killed[1] = true
}

#define MAY_JOIN \
    (mem[WORD] == WRITING && mem[RES] == ACTIVE && mem[WHOLE] && mem[SHARD + 1] == OPEN(1))

/* lci_join */
inline join() {
    lock();
    collect();
    if
    :: MAY_JOIN ->
#ifndef PINNED_LATE
        row[2]++;
#endif
        swap(SHARD + 1, OPEN(1), PENDING(2));
        commit();
        joined = true
    :: else
    fi;
    unlock();
    if
    :: joined ->
        joined = false;
#ifdef PINNED_LATE
        row[2]++;
#endif
        if
        :: copy_and_publish(1)
        :: abandon()
        fi;
        row[2]--
    :: else
    fi
}

proctype rank() {
    byte me = 2, found;
    bool joined;
    { join() } unless { killed[2] };
    killed[2] = true
}

#ifdef OPEN_IS_OTHERS
#define HAS_TO_WRITE(s) (mem[SHARD + s] == PENDING(dead))
#else
#define HAS_TO_WRITE(s) (mem[SHARD + s] == PENDING(dead) || mem[SHARD + s] == OPEN(dead))
#endif

/* reap.c */
inline reap() {
    lock();
    if
    :: COMPLETE -> completed = true
    :: mem[RES] == ACTIVE && !COMPLETE && ANY(HAS_TO_WRITE) -> doom()
    :: mem[RES] == ACTIVE && !COMPLETE && !ANY(HAS_TO_WRITE) && mem[OWNER] == dead ->
        set(OWNER, 0);
        commit()
    :: else
    fi;
    collect();
    unlock();
    atomic { row[dead] = 0; reaped[dead] = true }
}

proctype client_3() {
    byte me = 3, found, dead;
    do
    :: atomic {
           if
           :: killed[1] && !reaped[1] -> dead = 1
           :: killed[2] && !reaped[2] -> dead = 2
           fi
       };
        reap();
        dead = 0
    :: lock(); collect(); free_page(); unlock()
    :: !late -> late = true
    :: reaped[1] && reaped[2] -> break
    od;
    lock(); collect(); free_page(); unlock();
    assert(!published || was_ready);
    assert(!PINNED);
    assert(mem[WORD] == FREE && mem[RES] == FREE)
}

/* Who is killed, and when. */
proctype killer() {
    do
    :: !killed[1] -> killed[1] = true
    :: !killed[2] -> killed[2] = true
    :: break
    od
}

init {
    atomic {
        run owner();
        run rank();
        run client_3();
        run killer()
    }
}
