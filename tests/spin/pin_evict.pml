/* Pinning against evicting (docs/design/index.md, section 7), on one page.
 *
 * order WALK_GEN: guess-gen walk-gen
 * order GIVEN_GEN (GIVEN): pin-given-gen
 * order PIN_FENCE: pin-fence pin-present-fence pin-groups-fence pin-given-fence
 * order CONFIRM_WORD: confirm-word
 * sequence CONFIRM_WORD_FIRST: confirm-word confirm-gen
 * order UNPIN: unpin-count
 * order EVICT_FENCE: evict-fence
 * order DOOMED_FENCE (DOOM): doomed-fence
 * order GEN_EVEN: gen-even
 * order PAGE_READY: page-ready
 * spare WALK_FENCE: guess-fence walk-fence
 * spare CONFIRM_GEN: confirm-gen
 * spare GEN_ODD: gen-odd
 *
 * Readers: lookup.c, match_one: `standing` (whatever way leads to the record: no chain is modelled),
 * lci_pin_one, the fence, `confirm`; then the bytes are read, then lci_unpin_one.
 *
 * Evictor: evict.c, mark, settle, finish; then the page gets another key (reserve.c, make_page;
 * dict.c, lc_dict_insert), is written and published (publish.c, make_ready), and is evicted again.
 * The look at the pins before marking is left out: no safety may rest on it. Between two rounds the
 * evictor has passed the lock and has performed everything before it.
 *
 * With THREADS the two readers are threads of one client: they share its row, under its `rows`
 * mutex. NO_MUTEX takes that away.
 *
 * With GIVEN, which are threads too, readers pin by number: lookup.c, pin_given. They do not search; a
 * reader has been told the generation of the life it wants, which may be one to come, and pins if it
 * sees that. UNSEEN takes this look away.
 *
 * What must hold: who has confirmed its pin reads the bytes of its key until it unpins.
 */
#include "weak.pml"

#ifdef GIVEN
#define THREADS
#endif

#define FREE 0
#define WRITING 1
#define READY 2
#define EVICTING 3

#ifdef THREADS
#define CLIENTS 1
#else
#define CLIENTS 2
#endif
#define RESERVER 4 /* bit of the client that reserves the page anew */

/* The page. Its life n has the generation 2n, the key n and the bytes n. */
byte word = READY;
byte gen, key, bytes;
byte pins;         /* the bitmap: 1 << client */
byte row[CLIENTS]; /* the counts */
bool mutex;        /* at->rows, with THREADS */

/* ------------------------------------------------------------------ a reader */

#define LOCK 1            /* pthread_mutex_lock(rows) */
#define GEN 2             /* standing: g = lc_load_acquire(&p->gen) */
#define KEY 4             /* standing: lo, hi */
#define WORD 8            /* standing: word */
#define GEN_AGAIN 16      /* standing: behind the fence */
#define OLD 32            /* lci_pin_one: old = lc_load(count) */
#define COUNT 64          /* lci_pin_one: lc_store(count, old + 1) */
#define BIT 128           /* lci_pin_one: lc_load(pins) & bit */
#define SET_BIT 256       /* lci_pin_one: atomic_fetch_or, unless it was set */
#define SEE_WORD 512  /* confirm: word */
#define SEE_GEN 1024  /* confirm: generation */
#define UNLOCK 2048       /* pthread_mutex_unlock(rows) */
#define USE 4096          /* the page's bytes are read */
#define RELOCK 8192       /* lci_release */
#define OLD_AGAIN 16384   /* lci_unpin_one: old = lc_load(count) */
#define COUNT_DOWN 32768       /* lci_unpin_one: lc_store_release(count, old - 1) */
#define FOUND (GEN + KEY + WORD + GEN_AGAIN)
#define CONFIRMED (SEE_WORD + SEE_GEN)
#define MINE (1 << client)

/* What waits for the loads before it, in program order. */
#ifdef GIVEN
#define AFTER_GEN BIND_LATER(GIVEN_GEN, GEN)
#define AFTER_WALK AFTER_GEN
#define AS_WANTED(gen) ((gen) == 2 * wanted)
#else
#define AFTER_GEN BIND_LATER(WALK_GEN, GEN)
#define AFTER_WALK (AFTER_GEN | BIND_LATER(WALK_FENCE, GEN + KEY + WORD))
#define AS_WANTED(gen) (((gen) & 1) == 0)
#endif
#define AFTER_PIN (AFTER_WALK | BIND_ALL(PIN_FENCE, BEFORE(SEE_WORD)))
#define AFTER_CONFIRM \
    (AFTER_PIN | BIND_LATER(CONFIRM_WORD, SEE_WORD) \
               | BIND_LATER(CONFIRM_GEN, SEE_GEN))

#if CONFIRM_WORD_FIRST
#define WORD_WAITS 0
#define GEN_WAITS BIND_LATER(CONFIRM_WORD, SEE_WORD)
#else
#define WORD_WAITS BIND_LATER(CONFIRM_GEN, SEE_GEN)
#define GEN_WAITS 0
#endif

/* The mutex is taken with acquire and given back with release. */
#if defined(THREADS) && !defined(NO_MUTEX)
#define IN_HOLD LOCK
#define IN_RELEASE RELOCK
#define LEAVE mutex = false
#else
#define IN_HOLD 0
#define IN_RELEASE 0
#define LEAVE skip
#endif

proctype reader(byte client; byte wanted) {
    int done;
    byte g, old;
    bool other; /* what was found is not what was wanted */
    bool gone;  /* what was pinned has gone */
    bool wrong; /* bytes of another life */

#if IN_HOLD == 0
    done = LOCK + UNLOCK + RELOCK;
#endif
#ifndef THREADS
    done = done | OLD | OLD_AGAIN; /* nobody else stores to the row: the count is what we know */
#endif
#ifdef GIVEN
    done = done | KEY | WORD | GEN_AGAIN; /* nothing is searched */
#endif
#ifdef UNSEEN
    done = done | GEN;
    g = 2 * wanted;
#endif

    do
    /* rows mutex, and at its end */
    :: atomic { !mutex && PERFORM(LOCK, 0); mutex = true }
    :: atomic { PERFORM(UNLOCK, BEFORE(UNLOCK)); LEAVE }
    :: atomic { !mutex && PERFORM(RELOCK, CONFIRMED + UNLOCK); mutex = true }

    /* standing; or, with GIVEN, pin_given's look at the generation alone */
    :: d_step { PERFORM(GEN, IN_HOLD); g = gen; other = other || !AS_WANTED(gen) }
    :: d_step { PERFORM(KEY, IN_HOLD + AFTER_GEN); other = other || key != wanted }
    :: d_step { PERFORM(WORD, IN_HOLD + AFTER_GEN); other = other || word != READY }
    :: d_step { PERFORM(GEN_AGAIN, IN_HOLD | GEN | AFTER_WALK); other = other || gen != g }

    /* lci_pin_one; stores wait for what decides about them */
    :: d_step { PERFORM(OLD, IN_HOLD | AFTER_WALK); old = row[client] }
    :: d_step {
           !other && PERFORM(COUNT, FOUND | OLD | AFTER_WALK);
#ifdef THREADS
           row[client] = old + 1;
#else
           row[client]++;
#endif
           old = 0
       }
    :: d_step {
           PERFORM(BIT, IN_HOLD | AFTER_WALK);
           done = ((pins & MINE) -> done | SET_BIT : done)
       }
    :: d_step { !other && PERFORM(SET_BIT, FOUND | BIT | AFTER_WALK); pins = pins | MINE }

    /* confirm */
    :: d_step {
           PERFORM(SEE_WORD, IN_HOLD | WORD | AFTER_PIN | WORD_WAITS);
           gone = gone || word != READY
       }
    :: d_step {
           PERFORM(SEE_GEN, IN_HOLD | GEN | GEN_AGAIN | AFTER_PIN | GEN_WAITS);
           gone = gone || gen != g
       }

    /* The bytes; not read at all if the match failed. */
    :: d_step { PERFORM(USE, IN_HOLD | AFTER_CONFIRM); wrong = bytes != wanted }

    /* lci_unpin_one */
    :: d_step { PERFORM(OLD_AGAIN, IN_RELEASE | AFTER_CONFIRM | COUNT); old = row[client] }
    :: atomic {
           PERFORM(COUNT_DOWN, FOUND | COUNT | CONFIRMED | RELOCK | OLD_AGAIN
                          | BIND_EARLIER(UNPIN, BEFORE(COUNT_DOWN)));
           assert(gone || !DONE(USE) || !wrong);
#ifdef THREADS
           assert(old > 0); /* LC_E_CORRUPT */
           row[client] = old - 1;
#else
           row[client]--;
#endif
       }
    :: DONE(FOUND) && other -> break
    :: atomic { DONE(COUNT_DOWN | USE) -> assert(gone || !wrong); break }
    od;
#if IN_HOLD
    if
    :: DONE(LOCK) && (!DONE(UNLOCK) || DONE(RELOCK)) -> LEAVE
    :: else
    fi
#endif
}

/* ------------------------------------------------------------------ the evictor */

#define MARK 1     /* mark: EVICTING */
#define LOOK 2     /* lci_pinned: the bitmap */
#define LOOK_0 4   /* lci_pinned: a row, if its bit is set */
#define LOOK_1 8
#define NAME_FREE 16 /* finish: FREE */
#define RESET 32   /* make_page: lc_store(&p->pins, own bit) */
#define ODD 64     /* lc_gen_open */
#define SET_KEY 128
#define SET_WORD 256 /* lc_dict_insert: WRITING, lc_txn_set */
#define EVEN 512   /* lc_gen_close */
#define WRITE 1024 /* the bytes */
#define PUBLISH 2048 /* make_ready */
#define LOOKED (LOOK + LOOK_0 + LOOK_1)

#ifdef DOOM /* lci_doom, then lci_collect_doomed as often as somebody pins the page */
#define MARK_FENCE DOOMED_FENCE
#define NOT_YET done = done & ~LOOKED
#else /* unmark */
#define MARK_FENCE EVICT_FENCE
#define NOT_YET word = READY; done = 0
#endif
#define AFTER_MARK BIND_ALL(MARK_FENCE, MARK)
/* A row is found by its bit, so its load waits for the bitmap in any order. */
#define ROW_WAITS (LOOK | AFTER_MARK)
/* Stores behind the fence of lc_gen_open. */
#define AFTER_ODD (LOOKED | BIND_EARLIER(GEN_ODD, BEFORE(SET_KEY)))

proctype evictor() {
    int done;
    byte bits;
    bool pinned;
again:
    do
    :: d_step { PERFORM(MARK, 0); word = EVICTING }
    :: d_step { PERFORM(LOOK, AFTER_MARK); bits = pins }
    :: d_step { PERFORM(LOOK_0, ROW_WAITS); pinned = pinned || ((bits & 1) && row[0]) }
    :: d_step {
           PERFORM(LOOK_1, ROW_WAITS);
#ifndef THREADS
           pinned = pinned || ((bits & 2) && row[1])
#endif
       }
    :: d_step { pinned && DONE(MARK | LOOKED) -> NOT_YET; pinned = false; bits = 0 }
    :: d_step { !pinned && PERFORM(NAME_FREE, BEFORE(NAME_FREE)); word = FREE; bits = 0 }
    :: d_step { !pinned && PERFORM(RESET, LOOKED); pins = RESERVER }
    :: d_step { !pinned && PERFORM(ODD, LOOKED); gen = gen | 1 }
    :: d_step { !pinned && PERFORM(SET_KEY, AFTER_ODD); key++ }
    :: d_step { !pinned && PERFORM(SET_WORD, BEFORE(SET_WORD)); word = WRITING }
    :: d_step { PERFORM(EVEN, AFTER_ODD | ODD | BIND_EARLIER(GEN_EVEN, BEFORE(EVEN))); gen++ }
    :: d_step { !pinned && PERFORM(WRITE, AFTER_ODD); bytes++ }
    :: d_step {
           PERFORM(PUBLISH, AFTER_ODD | SET_WORD | BIND_EARLIER(PAGE_READY, BEFORE(PUBLISH)));
           word = READY
       }
    :: atomic { DONE(2 * PUBLISH - 1) -> done = 0; break }
    od;
    if
    :: key < 2 -> goto again
    :: else
    fi
}

init {
    atomic {
        byte first, second;
        select(first : 0 .. 1);
        select(second : 0 .. 1);
#ifdef THREADS
        run reader(0, first);
        run reader(0, second);
#else
        run reader(0, first);
        run reader(1, second);
#endif
        run evictor()
    }
}
