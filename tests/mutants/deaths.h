/* A victim that dies after each of its stores, in one process: what it leaves is looked at in a
 * copy of the segment, by a survivor who finds nobody alive there. */
#ifndef DEATHS_H
#define DEATHS_H

#include "world.h"

#include <stdio.h>
#include <stdlib.h>

#define PAGES 48
#define RUN 6  /* keys that the victim writes, if it writes */
#define HELD 3 /* pages that the survivor pins all the time: the first of the first run */

extern segment real;
/* `late` is dead before the scene begins, in scenes that are about that. */
extern client victim, survivor, second, late;
extern prompt first_run, second_run, written_run;

typedef enum may_be { NONE, EITHER, ALL } may_be;

typedef struct scene {
    const char *name;
    void (*prepare)(void);
    void (*operate)(void);
    may_be during; /* which of the written run's pages may be ready after a death in the middle */
    may_be after;  /* and after one when the operation is over */
    bool marks;    /* pages are EVICTING for a while and come back: a lookup may miss them then */
} scene;

extern const scene scenes[], page_scenes[];

/* A copy of the segment with one client in it, in which nobody else proves his life. */
typedef struct copy {
    uint8_t *base;
    client who;
    bool and_survivor; /* the survivor is dead here as well */
} copy;

extern const scene *running;
extern uint32_t stores; /* of the victim, so far */
extern enum at_work { OUTSIDE, OPERATING, LOOKING, RECOVERING } now;
extern uint8_t *safe; /* the segment as of the victim's last safe point */

/* What was ready before the operation began. */
extern struct stable_page {
    lc_key key;
    uint32_t page, gen;
    bool missed; /* a lookup did not find it */
} stable[PAGES];
extern uint32_t stable_count;

/* Say what is wrong and end: with deaths after every store, the first is enough. */
#define WRONG(...)                                                                    \
    do {                                                                              \
        fprintf(stderr, "%s, store %u%s: ", running->name, stores,                    \
                now == RECOVERING ? ", death in recovery" : "");                      \
        fprintf(stderr, __VA_ARGS__);                                                 \
        fputc('\n', stderr);                                                          \
        exit(1);                                                                      \
    } while (0)

/* heirs.c: what those find who come after a death, and whether they can go on. */
bool finds(const client *c, const lc_key *key);
void look_up(const client *c);
void undo(const copy *c);
void reap(const copy *c);
void recover(copy *c, may_be ready);

/* The first part of the truth in which what undoing left differs from the last safe point; NULL:
 * none. Dead fields, advice, and what is changed without the lock are not compared. */
const char *difference(uint8_t *undone, uint8_t *safe);

#endif
