/* Seeing each change of the segment, cheaply. */
#ifndef WATCH_H
#define WATCH_H

#include "stage.h"

#define WATCHED 12

typedef struct watch {
    const stage *real;
    uint8_t *seen; /* the bytes as of the last call */
    struct part {
        uint64_t from, to;
    } part[WATCHED];
    uint32_t parts, calls;
} watch;

void watch_begin(watch *w, const stage *real);
/* Has anything changed since the last call? `w->seen` is up to date afterwards. */
bool watch_changed(watch *w);
/* Everything may have changed: the stepper itself has acted. */
void watch_again(watch *w);
void watch_end(watch *w);

#endif
