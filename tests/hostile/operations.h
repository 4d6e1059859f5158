/* Every call of the core, made on a damaged world, its answer looked at: a result is a count or one
 * of our errors, and what it hands out lies where the caller may use it. */
#ifndef HOSTILE_OPERATIONS_H
#define HOSTILE_OPERATIONS_H

#include "world.h"

typedef struct call {
    world *w;
    rng *r;
    int wait;
    uint64_t deadline;
    bool moving; /* somebody damages the world meanwhile */
} call;

typedef struct operation {
    const char *name;
    int (*run)(call *c); /* the worst result of what it called */
} operation;

extern const operation operations[];
extern const uint32_t operation_count;

/* Reported by operations, printed and counted by the harness. */
void finding(const char *what, int64_t value);

#endif
