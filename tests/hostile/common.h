/* What all parts share: what must hold of the machine, and numbers from a seed. */
#ifndef HOSTILE_COMMON_H
#define HOSTILE_COMMON_H

#include "../native/entry.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#define NEED(what)                                                                     \
    do {                                                                               \
        if (!(what)) {                                                                 \
            fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #what, errno); \
            exit(2);                                                                   \
        }                                                                              \
    } while (0)

/* Numbers from a seed: splitmix64. Every case draws from its own, so it can be run alone. */
typedef struct rng {
    uint64_t state;
} rng;

static inline uint64_t draw(rng *r) {
    uint64_t z = r->state += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}
static inline uint32_t below(rng *r, uint64_t n) { return n ? (uint32_t)(draw(r) % n) : 0; }

#endif
