/* An event counter that processes sleep on: no lost wake-up as long as sleeps are bounded.
 *
 * The count goes up by two; bit 0 says that a process sleeps, and notifying clears it, so a sleeper
 * that was killed costs one needless wake-up and no more. A sleeper reads the count, then looks at
 * its condition, then sleeps only if the count is still what it read. Idea: eventcounts (Reed and
 * Kanodia, 1979) over a futex. */
#ifndef LC_EVENT_H
#define LC_EVENT_H

#include "lock.h"

#include <limits.h>

static inline void lc_event_notify(_Atomic uint32_t *event) {
    uint32_t old = lc_load(event);
    while (!atomic_compare_exchange_weak_explicit(
        event, &old, (old + 2) & ~UINT32_C(1), memory_order_acq_rel,
        memory_order_relaxed)) { /* order: event-notify */
    }
    if (old & 1) lc_futex_wake(event, INT_MAX);
}

/* Sleep unless the event was notified since `seen` was read. A reader (`writable` false) cannot
 * ask to be woken and sleeps its time. LC_OK, LC_E_TIMEOUT, LC_E_INTR. */
static inline int lc_event_sleep(_Atomic uint32_t *event, uint32_t seen, bool writable,
                                 uint64_t nanoseconds) {
    if (writable && !(seen & 1)) {
        uint32_t now = seen; /* another sleeper may have set the bit: then it is set for us too */
        bool asked = atomic_compare_exchange_strong(event, &now, seen | 1);
        if (!asked && now != (seen | 1)) return LC_OK;
        seen |= 1;
    }
    return lc_futex_wait(event, seen, nanoseconds);
}

#endif
