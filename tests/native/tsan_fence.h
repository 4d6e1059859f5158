/* Included before everything else in the build for ThreadSanitizer, which knows no fences: each is
 * a read-modify-write of a word of the caller's own. On the machine that orders as much. In the
 * sanitizer's eyes it connects no two threads, so what it accepts as ordered is so by the acquires
 * and releases around the fence alone: where the core relied on a fence to publish plain memory,
 * it would complain without need, and it does not. A fence that is missing it cannot show. */
#ifndef TSAN_FENCE_H
#define TSAN_FENCE_H

#include <stdatomic.h>
#include <stdint.h>

static inline void tsan_fence(memory_order order) {
    _Atomic uint32_t own = 0;
    atomic_fetch_add_explicit(&own, 1, order);
}

#undef atomic_thread_fence
#define atomic_thread_fence(order) tsan_fence(order)

#endif
