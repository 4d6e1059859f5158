/* The whole life of a page, with deaths: docs/design/, sections 4, 6 to 8, 10 and 12.
 *
 * One page, a reservation with two shards, a ticket. Client 1 reserves the page, gives a ticket to
 * client 2, writes its shard by a device whose copy may outlive it, and publishes it. Client 2 adopts
 * the other shard, writes and publishes it; or matches the page and reads it. Client 3 reaps or
 * evicts once. Each of them may be killed between any two steps, or exits and leaves the rest to be
 * reaped. Client 4 is never killed: it reaps, collects, evicts and hands the page out, in any order,
 * until the others have gone. Without REAPER client 3 is left out; with it client 2 is, and another
 * client takes slot 1 as soon as it is free.
 *
 * Memory is sequentially consistent here: against a death program order is enough (section 4), and
 * the orders against running readers are the other models'.
 *
 * What must hold:
 *   1. the page is handed out only when no living client has a confirmed pin on it, no ticket lists
 *      it, and no copy into it is under way;
 *   2. whoever matches the page finds both shards written;
 *   3. a pin is there until its client takes it back;
 *   4. at every safe point the page is exactly one of free, in its chain, doomed; a reservation or a
 *      ticket that is free lists nothing;
 *   5. what all shards were published of is not lost: it becomes READY;
 *   6. what was READY is not taken back to WRITING by undoing a step;
 *   7. when all have gone and been reaped no pin is left, and the page can be handed out.
 *
 * Each of these takes away a part, and must fail: UNLOGGED_WORD, UNLOGGED_LINK, UNLOGGED_LIST (a
 * store without its entry in the log), NOT_UNDONE (whoever takes over does not look at the log),
 * BLIND_EVICT, BLIND_DOOMED (no look at the pins once the page is marked), NO_BYTE (a reaper does
 * not hold the slot's byte, so it may be slow and meet a newcomer), NO_QUARANTINE, NO_FINISH (pages
 * of a complete reservation are doomed instead of finished), READY_LOGGED (they are finished through
 * the log), LISTED_LATE (a page is listed in the step after the one that makes it WRITING), FREED_EARLY
 * (a reaper that has done its portion frees the slot).
 */

/* Words that are changed under the lock, through the log. */
#define WORD 0    /* the page's state */
#define LINK 1    /* it is in its chain */
#define FREES 2   /* pages on the free stack */
#define DOOMS 3   /* pages on the doomed list */
#define LISTED 4  /* pages in the reservation */
#define RES 5     /* the reservation's state */
#define OWNER 6   /* its owner's slot */
#define SHARD 7   /* and 8: a shard's word, 4 * slot + status */
#define ROW_0 9   /* pins of tickets */
#define TICKET 10 /* the ticket's state */
#define CARRIED 11 /* pages in the ticket */
#define ADOPTED 12
#define WORDS 13

#define FREE 0
#define WRITING 1
#define READY 2
#define EVICTING 3
#define DOOMED 4
#define UNWRITTEN 5 /* doomed while somebody might have been writing it */

#define ACTIVE 1
#define ENDING 2 /* LCI_RES_DOOMED */

#define PENDING(slot) (4 * (slot))
#define PUBLISHED(slot) (4 * (slot) + 1)
#define DEAD(slot) (4 * (slot) + 2)
#define STATUS(w) ((w) & 3)
#define SLOT(w) ((w) >> 2)

#define BUILDING 1
#define OPEN 2
#define DROPPED 3

#define TAKEN 1
#define QUARANTINE 2

byte mem[WORDS];
byte lock_owner;
byte log_count, log_word[5], log_old[5], log_new[5]; /* log_new: of a soft entry, plus one */

byte row[3];   /* of slots 1 and 2; 0 is not used */
byte pins;     /* bitmap */
byte gen;
bool completed; /* the reservation's bit in root->completed */
bool done, failed; /* the adopter's verdict on the ticket */
byte slot_state[3];
byte slot_byte[3]; /* which process has locked it */

bool killed[6];    /* by process: it will never run again; the kernel frees its bytes */
bool copying;      /* the device writes client 1's shard */

/* What is true. */
bool wrote[2];
bool holds[6];     /* a confirmed pin */
bool published;    /* all shards were, before the reservation was doomed */
bool was_ready;

#define BYTE_FREE(slot) (slot_byte[slot] == 0 || killed[slot_byte[slot]])
#define COMPLETE \
    (mem[RES] == ACTIVE && STATUS(mem[SHARD]) == 1 && STATUS(mem[SHARD + 1]) == 1)
#define PINNED \
    (((pins & 1) && mem[ROW_0]) || ((pins & 2) && row[1]) || ((pins & 4) && row[2]))
#define HELD ((holds[1] && !killed[1]) || (holds[2] && !killed[2]) || (holds[5] && !killed[5]))

/* ------------------------------------------------------------------ lock and log */

/* lc_txn_set: entry, count and store are one step here (lock.pml takes them apart). */
inline set(w, v) {
    d_step {
        log_word[log_count] = w;
        log_old[log_count] = mem[w];
        log_new[log_count] = 0;
        log_count++;
        mem[w] = v
    }
}

/* lc_txn_swap; it may find another value. */
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
    assert((mem[WORD] == FREE) == (mem[FREES] == 1)); \
    assert((mem[WORD] == WRITING || mem[WORD] == READY) == (mem[LINK] == 1)); \
    assert((mem[WORD] >= DOOMED) == (mem[DOOMS] == 1)); \
    assert(mem[WORD] != WRITING || mem[LISTED] == 1); \
    assert(mem[RES] != FREE || mem[LISTED] == 0); \
    assert(mem[TICKET] != FREE || mem[CARRIED] == 0); \
    assert(mem[CARRIED] == mem[ROW_0])

/* lc_txn_commit */
inline commit() { atomic { forget_log(); SAFE_POINT } }

#define TAKES_READY_BACK(i) (mem[WORD] == READY && log_old[i] == WRITING)

/* lcs_lock_take: of nobody, or of somebody dead, and what that one left undone is undone. */
inline lock() {
    atomic { lock_owner == 0 || killed[lock_owner] -> lock_owner = me };
#ifndef NOT_UNDONE
    do
    :: d_step { /* lc_txn_undo: the newest, which is then in force no more */
           log_count > 0 ->
           log_count--;
           assert(!(log_word[log_count] == WORD && TAKES_READY_BACK(log_count)));
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

/* reserve.c, settle_locked: all of it one step. */
inline reserve() {
    if
    :: mem[WORD] == FREE && mem[RES] == FREE ->
        atomic {
            assert(!HELD && !copying && mem[CARRIED] == 0);
            mem[SHARD] = PENDING(1); mem[SHARD + 1] = PENDING(1) /* dead words until ACTIVE */
        };
        set(FREES, 0);
        set(RES, ACTIVE);
        atomic { mem[OWNER] = 1; pins = 2; gen++; row[1]++ }; /* dead fields, and the own row */
#ifdef UNLOGGED_WORD
        mem[WORD] = WRITING;
#else
        set(WORD, WRITING);
#endif
#ifdef UNLOGGED_LINK
        mem[LINK] = 1;
#else
        set(LINK, 1);
#endif
#ifdef UNLOGGED_LIST
        mem[LISTED] = 1;
#else
#ifndef LISTED_LATE
        set(LISTED, 1);
#endif
#endif
        commit();
#ifdef LISTED_LATE
        set(LISTED, 1);
        commit();
#endif
        atomic { got = true; holds[me] = true }
    :: else
    fi
}

/* lci_doom, as part of collecting the reservation */
inline doom_page() {
    if
    :: mem[WORD] == WRITING -> swap(WORD, WRITING, UNWRITTEN)
    :: else
    fi;
    if
    :: mem[WORD] == READY -> swap(WORD, READY, DOOMED)
    :: else
    fi;
    set(LINK, 0);
    set(DOOMS, 1);
    set(LISTED, 0);
    commit()
}

/* collect.c, lci_collect */
inline collect() {
    if
    :: !completed
    :: completed && mem[RES] == ENDING ->
        if
        :: mem[LISTED] -> doom_page()
        :: else
        fi;
        set(RES, FREE);
        commit();
        completed = false
    :: completed && COMPLETE ->
        if
#ifdef NO_FINISH
        :: mem[LISTED] && mem[WORD] == WRITING -> doom_page()
#else
        :: mem[LISTED] && mem[WORD] == WRITING ->
#ifdef READY_LOGGED
            swap(WORD, WRITING, READY);
            was_ready = true;
#else
            atomic { /* adopt_page: without the log, as its publisher would */
                if
                :: mem[WORD] == WRITING -> mem[WORD] = READY; was_ready = true
                :: else
                fi
            };
#endif
            set(LISTED, 0);
            commit()
#endif
        :: mem[LISTED] && mem[WORD] != WRITING -> set(LISTED, 0); commit()
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

/* collect.c, lci_collect_doomed */
inline collect_doomed() {
    if
#ifdef BLIND_DOOMED
    :: mem[DOOMS] ->
#else
    :: mem[DOOMS] && !PINNED ->
#endif
        set(DOOMS, 0);
        set(WORD, FREE);
        set(FREES, 1);
        commit()
    :: else
    fi
}

/* evict.c: chosen without pins, marked, looked at again */
inline evict() {
    if
    :: mem[WORD] == READY && !mem[LISTED] && !PINNED ->
        set(WORD, EVICTING);
        if
#ifndef BLIND_EVICT
        :: PINNED -> set(WORD, READY)
        :: !PINNED ->
#else
        :: true ->
#endif
            set(LINK, 0);
            mem[WORD] = FREE; /* marking has logged what undoing puts back */
            set(FREES, 1)
        fi;
        commit()
    :: else
    fi
}

/* ticket.c, lci_settle_tickets. The deadline comes some time after the adopter has gone. */
#define OVER (done || failed || (killed[2] && !mem[ADOPTED]))

inline settle_ticket() {
    if
    :: mem[CARRIED] && mem[TICKET] >= OPEN && (mem[ADOPTED] || OVER) -> unpin_ticket()
    :: else
    fi;
    if
    :: mem[TICKET] == DROPPED && !mem[CARRIED] && OVER -> set(TICKET, FREE); commit()
    :: else
    fi
}

inline unpin_ticket() {
    set(ROW_0, 0);
    set(CARRIED, 0);
    commit()
}

/* ------------------------------------------------------------------ without the lock */

/* publish.c, lci_publish */
inline publish(s) {
    if
    :: atomic {
           mem[RES] == ACTIVE && mem[SHARD + s] == PENDING(me) ->
           mem[SHARD + s] = PUBLISHED(me);
           published = published || COMPLETE
       };
        if
        :: COMPLETE ->
            atomic {
                if
                :: mem[WORD] == WRITING -> mem[WORD] = READY; was_ready = true
                :: else
                fi
            };
            completed = true
        :: else
        fi
    :: else
    fi
}

/* lookup.c, match_one; the page is read; lci_release */
inline match(slot) {
    atomic { mem[WORD] == READY -> found = gen };
    row[slot]++;
    pins = pins | (1 << slot);
    if
    :: atomic {
           mem[WORD] == READY && gen == found ->
           holds[me] = true;
           assert(wrote[0] && wrote[1])
       };
        atomic { assert(gen == found); holds[me] = false }
    :: else
    fi;
    atomic { assert(row[slot] > 0); row[slot]--; found = 0 }
}

/* ------------------------------------------------------------------ reaping */

/* reap.c, drain: all of it, or (a portion) none */
inline drain() {
    if
    :: true
    :: true ->
        if
        :: mem[LISTED] -> doom_page()
        :: else
        fi;
        set(RES, FREE);
        commit()
    fi
}

/* reap.c, reap_reservation */
inline reap_reservation(slot) {
    if
    :: mem[RES] == FREE
    :: COMPLETE -> completed = true
    :: mem[RES] == ENDING && mem[OWNER] == slot -> drain()
    :: mem[RES] == ENDING && mem[OWNER] != slot /* its reaper's */
    :: mem[RES] == ACTIVE && !COMPLETE ->
        if
        :: mem[SHARD] == PENDING(slot) || mem[SHARD + 1] == PENDING(slot) ->
            doom_shard(0);
            doom_shard(1);
            if
            :: STATUS(mem[SHARD]) == 2 || STATUS(mem[SHARD + 1]) == 2 ->
                set(RES, ENDING);
                set(OWNER, slot);
                commit();
                drain()
            :: else -> commit()
            fi
        :: else ->
            if
            :: mem[OWNER] == slot -> set(OWNER, 0); commit()
            :: else
            fi
        fi
    fi
}

inline doom_shard(s) {
    if
    :: STATUS(mem[SHARD + s]) == 0 ->
        found = mem[SHARD + s];
        swap(SHARD + s, found, found + 2);
        found = 0
    :: else
    fi
}

/* ticket.c, lci_ticket_client_gone: 1 gave the ticket, 2 may adopt it */
inline ticket_client_gone(slot) {
    if
    :: mem[TICKET] != FREE && slot == 2 && !done -> failed = true
    :: mem[TICKET] == BUILDING && slot == 1 ->
        if
        :: mem[CARRIED] -> unpin_ticket()
        :: else
        fi;
        set(TICKET, FREE);
        commit()
    :: mem[TICKET] == OPEN && slot == 1 -> set(TICKET, DROPPED); commit()
    :: else
    fi;
    settle_ticket()
}

#define MAY_BE_WRITTEN (mem[WORD] == WRITING || mem[WORD] == UNWRITTEN)

/* reap.c, lci_reap_slot. Only client 1 has a device. */
inline reap(slot) {
    if
#ifdef NO_BYTE
    :: BYTE_FREE(slot) && slot_state[slot] != FREE ->
#else
    :: atomic { BYTE_FREE(slot) && slot_state[slot] != FREE -> slot_byte[slot] = me };
#endif
        if
        :: slot_state[slot] == TAKEN ->
            lock();
            reap_reservation(slot);
            if
#ifndef FREED_EARLY
            :: mem[RES] == ENDING && mem[OWNER] == slot -> unlock() /* a portion: it stays TAKEN */
            :: !(mem[RES] == ENDING && mem[OWNER] == slot) ->
#else
            :: true ->
#endif
                collect();
                ticket_client_gone(slot);
                unlock();
                if
#ifndef NO_QUARANTINE
                :: slot == 1 && row[slot] && MAY_BE_WRITTEN -> slot_state[slot] = QUARANTINE
                :: !(slot == 1 && row[slot] && MAY_BE_WRITTEN) ->
#else
                :: true ->
#endif
                    row[slot] = 0;
                    slot_state[slot] = FREE
                fi
            fi
        :: slot_state[slot] == QUARANTINE && !copying ->
            row[slot] = 0;
            slot_state[slot] = FREE
        :: else /* COPIES_GOING_ON */
        fi;
        slot_byte[slot] = (slot_byte[slot] == me -> 0 : slot_byte[slot])
    :: else
    fi
}

/* ------------------------------------------------------------------ processes */

proctype client_1() {
    byte me = 1;
    bool got;
    {
        lock();
        reserve();
        unlock();
        if
        :: got ->
            got = false;
            if
#ifndef REAPER
            :: lock(); /* lci_ticket_give */
                set(TICKET, BUILDING);
                commit();
                set(CARRIED, 1);
                set(ROW_0, 1);
                atomic { pins = pins | 1 };
                set(TICKET, OPEN);
                commit();
                unlock()
#endif
            :: true -> /* writes both shards itself */
                wrote[1] = true;
                publish(1)
            fi;
            copying = true;
            !copying;
            publish(0);
            atomic { row[1]--; holds[1] = false }
        :: else
        fi
    } unless { killed[1] };
    killed[1] = true
}

/* The device finishes a copy, whether or not its process lives. */
active proctype device() {
end_idle:
    atomic { copying -> copying = false; wrote[0] = true }
}

#define MAY_ADOPT \
    (mem[TICKET] == OPEN && !failed && mem[RES] == ACTIVE && mem[SHARD + 1] == PENDING(mem[OWNER]))

proctype client_2() {
    byte me = 2, found;
    bool got;
    {
        if
        :: mem[TICKET] == OPEN ->
            lock(); /* lci_adopt */
            if
            :: MAY_ADOPT ->
                swap(SHARD + 1, PENDING(1), PENDING(2));
                row[2]++;
                pins = pins | 4;
                set(ADOPTED, 1);
                atomic { commit(); holds[2] = true; got = true };
                settle_ticket()
            :: else
            fi;
            unlock();
            if
            :: got ->
                wrote[1] = true;
                publish(1);
                done = true; /* lci_ticket_done */
                atomic { row[2]--; holds[2] = false }
            :: else
            fi
        :: match(2)
        :: true /* has nothing to do */
        fi
    } unless { killed[2] };
    killed[2] = true
}

/* Reaps, or evicts, once. */
proctype client_3() {
    byte me = 3, found;
    {
        if
        :: reap(1)
        :: lock(); collect(); collect_doomed(); evict(); unlock()
        fi
    } unless { killed[3] };
    killed[3] = true
}

#ifdef REAPER
/* Another client in slot 1: clients.c, lcs_slot_claim. */
proctype client_5() {
    byte me = 5, found;
    atomic { slot_state[1] == FREE && BYTE_FREE(1) -> slot_byte[1] = me };
    slot_state[1] = TAKEN;
    if
    :: match(1)
    :: true
    fi;
    killed[5] = true
}
#endif

#ifdef REAPER
#define ALL_GONE (killed[1] && killed[2] && killed[5])
#else
#define ALL_GONE (killed[1] && killed[2])
#endif

proctype client_4() {
    byte me = 4, found, dead;
    do
    :: atomic {
           if
           :: dead = 1
#ifndef REAPER
           :: dead = 2
#endif
           fi
       };
        reap(dead);
        dead = 0
    :: lock(); collect(); settle_ticket(); collect_doomed(); evict();
        if
        :: mem[WORD] == FREE -> assert(!HELD && !copying && mem[CARRIED] == 0) /* handed out */
        :: else
        fi;
        unlock()
    :: atomic { ALL_GONE && slot_state[1] == FREE && slot_state[2] == FREE -> break }
    od;
    lock(); collect(); settle_ticket(); collect_doomed(); evict(); unlock();
    assert(!published || was_ready);
    assert(row[1] == 0 && row[2] == 0 && mem[ROW_0] == 0);
    assert(mem[WORD] == FREE && mem[RES] == FREE && mem[TICKET] == FREE)
}

/* Who is killed, and when. */
proctype killer() {
    do
    :: !killed[1] -> killed[1] = true
    :: !killed[2] -> killed[2] = true
    :: !killed[3] -> killed[3] = true
    :: break
    od
}

init {
    atomic {
        mem[FREES] = 1;
        slot_state[1] = TAKEN;
        slot_byte[1] = 1;
        run client_1();
        run client_4();
        run killer();
#ifdef REAPER
        killed[2] = true;
        run client_3();
        run client_5()
#else
        killed[3] = true;
        slot_state[2] = TAKEN;
        slot_byte[2] = 2;
        run client_2()
#endif
    }
}
