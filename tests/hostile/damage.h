/* What is done to a world: fields that are set to something else, at rest or all the time. */
#ifndef HOSTILE_DAMAGE_H
#define HOSTILE_DAMAGE_H

#include "fields.h"

#define MOST_HITS 8

typedef struct hit {
    uint32_t field; /* its number, the same in every world */
    uint32_t index;
    uint64_t at;    /* as resolved in its world */
    uint32_t width;
    uint64_t value;
    bool lives; /* in a record that is in use */
} hit;

typedef struct damage {
    hit hit[MOST_HITS];
    uint32_t count;
} damage;

/* Add a hit of any field. The value is another one than the picture's. */
void damage_draw(damage *d, const world *w, const field *names, uint32_t count, rng *r);
/* Add the one that is named. */
void damage_set(damage *d, const world *w, const field *names, uint32_t count, const char *name,
                uint32_t index, uint64_t value);
void damage_apply(world *w, const damage *d);

/* A thread that damages a world, and partly mends it again, while others work on it. */
typedef struct flipper flipper;
flipper *flipper_new(void);
void flipper_start(flipper *f, world *w, uint64_t seed);
uint64_t flipper_stop(flipper *f); /* how much it has damaged */

#endif
