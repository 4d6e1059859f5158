/* What parent and child share: where the child is, and what has been counted. */
#ifndef HOSTILE_BOARD_H
#define HOSTILE_BOARD_H

#include "fields.h"

/* Of damage to one field, at rest. Each case is counted once in each column. */
typedef struct tally {
    uint64_t cases;
    uint64_t idle;     /* of a record that is not in use, and nobody noticed */
    uint64_t refused;  /* attaching says no */
    uint64_t named;    /* `check` names it */
    uint64_t noticed;  /* not named, but some operation said CORRUPT */
    uint64_t unseen;   /* none of these, and lookups answer as before */
    uint64_t misled;   /* none of these, and lookups answer otherwise */
    uint64_t mended;   /* repair, and `check` is clean */
    uint64_t declined; /* repair says why not */
    uint64_t lost;     /* mended, and a ready page is gone */
} tally;

#define CODES 24
enum { LIST_TALLY = MOST_FIELDS - 4, DICT_TALLY, RING_TALLY, LOG_TALLY }; /* beside the index */
#define INVARIANTS 64

typedef struct board {
    uint64_t seed;        /* under way */
    const char *doing;    /* the operation under way (same address in parent and child) */
    uint64_t cases, flips, calls, findings;
    uint64_t codes[CODES]; /* results of operations: [0] success, [-code] */
    uint64_t unmended[INVARIANTS]; /* what `check` names after a repair */
    uint64_t unmended_seed[INVARIANTS];
    uint64_t slowest_ns, slowest_seed;
    const char *slowest;
    tally fields[MOST_FIELDS];
} board;

extern board *shared;

#endif
