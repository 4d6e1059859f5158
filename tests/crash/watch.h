/* Seeing each change of the segment, cheaply. */
#ifndef WATCH_H
#define WATCH_H

#include "stage.h"

#define WATCHED 13

typedef struct watch {
    const uint8_t *base;
    uint8_t *seen;  /* the bytes as of the last call */
    uint64_t bytes; /* up to the notes */
    uint64_t advice, advice_end; /* not looked at */
    struct part {
        uint64_t from, to;
    } part[WATCHED];
    uint32_t parts, calls;
} watch;

void watch_begin(watch *w, const uint8_t *base, uint64_t pages);
/* Has anything changed since the last call? May be called in a signal handler. */
bool watch_changed(watch *w);
/* Stops the program if anything has changed that is not watched. */
void watch_whole(const watch *w);

#endif
