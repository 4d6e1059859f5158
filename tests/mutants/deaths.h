/* A victim that dies after each of its stores, in one process: what it leaves is looked at in a copy
 * of the segment, by a survivor who finds nobody alive there. */
#ifndef DEATHS_H
#define DEATHS_H

#include "world.h"

#include <stdio.h>

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

extern const scene scenes[];

/* The first part of the truth in which what undoing left differs from the last safe point; NULL:
 * none. Dead fields, advice, and what is changed without the lock are not compared. */
const char *difference(uint8_t *undone, uint8_t *safe);

#endif
