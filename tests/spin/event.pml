/* Sleeping until something has happened: shm/native/event.h.
 *
 * order EVENT_SEEN: event-seen event-read
 * order EVENT_NOTIFY: event-notify
 *
 * Sleepers: publish.c, lci_wait: the count, the condition (being_written), lc_event_sleep. With API
 * they are callers of lcs_event_read and lcs_event_wait (sync_api.c). One of them may be killed.
 * Notifiers: what they have done (a page READY), then lc_event_notify; one of them brings something
 * that nobody waits for. The kernel's part: futex_wait compares and enqueues in one piece, and a
 * system call waits for everything before it.
 *
 * What must hold: nobody sleeps for ever. Without deaths of notifiers that takes no time limit. With
 * DEATH a notifier may be killed between counting and waking; then the limit of the sleep helps
 * (`timeout`: nothing else moves), and UNBOUNDED fails. LOADED_TWICE loads the count once to compare
 * it and again to sleep on it, and misses what is notified between the two.
 *
 * The order of the compare-and-swap that asks to be woken is not modelled: it is a store that waits
 * for the look at the condition, and whatever it overtakes, it fails if the count has moved.
 */
#include "weak.pml"


int event;         /* the count, up by two; bit 0: somebody sleeps */
bool happened;     /* what the sleepers wait for */
byte futex;        /* who sleeps in the kernel: 1 << sleeper */

/* ------------------------------------------------------------------ a sleeper */

#define SEEN 1  /* lci_wait: lc_load_acquire(&event) */
#define LOOK 2  /* lci_wait: being_written */
#define AFTER_SEEN BIND_LATER(EVENT_SEEN, SEEN)

proctype sleeper(byte me) {
    int done;
    int seen;
    bool over;
again:
    do
    :: d_step { PERFORM(SEEN, 0); seen = event }
    :: d_step { PERFORM(LOOK, AFTER_SEEN); over = happened }
    :: atomic { DONE(SEEN + LOOK) -> done = 0; break }
    od;
    if
    :: over -> goto end
    :: !over
    :: me == 0 -> goto end /* killed */
    fi;

#ifdef API /* lcs_event_wait */
    if
    :: d_step { (event & ~1) == (seen & ~1) -> seen = event }
    :: atomic { (event & ~1) != (seen & ~1) -> goto again }
    fi;
#ifdef LOADED_TWICE
    seen = event;
#endif
#endif
    /* lc_event_sleep: ask to be woken, unless somebody has asked. */
    if
    :: atomic { !(seen & 1) && event == seen -> event = event | 1; seen = seen | 1 }
    :: d_step { !(seen & 1) && event == (seen | 1) -> seen = seen | 1 }
    :: atomic { !(seen & 1) && event != seen && event != (seen | 1) -> seen = 0; goto again }
    :: seen & 1
    fi;
    if
    :: me == 0 -> goto end /* killed */
    :: true
    fi;
    if
    :: d_step { event == seen -> futex = futex | (1 << me) }
    :: atomic { event != seen -> seen = 0; goto again }
    fi;
    seen = 0;
    if
    :: atomic { !(futex & (1 << me)) -> goto again } /* woken */
#if defined(DEATH) && !defined(UNBOUNDED)
    :: atomic { timeout -> futex = futex & ~(1 << me); goto again }
#endif
    :: d_step { me == 0 -> futex = futex & ~(1 << me) } /* killed */
    fi;
end:
    skip
}

/* ------------------------------------------------------------------ a notifier */

#define HAPPEN 1 /* make_ready, and whatever else is waited for */
#define COUNT 2  /* lc_event_notify: the compare-and-swap; the load before it decides nothing */
#define WAKE 4   /* lc_futex_wake, if somebody sleeps */

proctype notifier(bool brings) {
    int done;
    bool wake;
    do
    :: d_step { PERFORM(HAPPEN, 0); happened = happened || brings }
    :: d_step {
           PERFORM(COUNT, BIND_EARLIER(EVENT_NOTIFY, HAPPEN));
           wake = event & 1;
           event = (event + 2) & ~1
       }
    :: d_step {
           PERFORM(WAKE, HAPPEN + COUNT);
           futex = (wake -> 0 : futex)
       }
    :: DONE(WAKE) -> break
#ifdef DEATH
    :: done == HAPPEN + COUNT -> break
#endif
    od
}

init {
    atomic {
        run sleeper(0);
        run sleeper(1);
        run notifier(true);
        run notifier(false)
    }
}
