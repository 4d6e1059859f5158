/* Lists, dicts, rings and logs, each put through some steps by a victim, and what the next holder of the
 * lock finds when the victim dies on the way: all as it was before the step, or as it is behind it,
 * and nothing else. When it dies is up to the program. */
#ifndef STRUCTURE_CALLS_H
#define STRUCTURE_CALLS_H

#include "world.h"

/* What somebody sees who may take the lock: every list in order, every item by its key, or every
 * message or entry. */
#define MOST_SEEN 80
typedef struct view {
    int32_t value[MOST_SEEN];
    uint32_t count;
} view;

typedef struct calls { /* one of the structures, on memory that anybody may stand in */
    const char *name;
    void (*format)(uint8_t *base);
    void *(*open)(lcs_attachment *at);
    void (*close)(void *structure);
    void (*look)(const uint8_t *base, void *structure, view *v);
    int (*check)(void *structure, char *text);
    void (*change)(void *structure, uint32_t step);
    void (*use)(void *structure, const view *seen); /* NULL: nothing more */
    uint32_t steps;
} calls;

extern const calls *const structures[];
extern const uint32_t structure_count;

extern const calls log_calls; /* structure_log.c */
uint64_t log_bytes(void);     /* of its payload */

uint64_t structure_bytes(const calls *c); /* of its segment */

/* Go through all steps. `watch` is called with the victim's segment before each, and with NULL
 * behind it, when it calls structure_look() with whatever the segment held when the victim may have
 * died: it may as well do so in between. Returns the number of deaths looked at. */
uint32_t structure_play(const calls *c, void (*watch)(const segment *watched));

/* A survivor takes the lock in a copy of these bytes. If there is a `watch`, it is called with the
 * copy before, and with NULL behind it; in between structure_look_again() may be called, at whatever
 * instant the survivor may have died as well: an heir takes the lock in a copy of that copy. */
void structure_look(const uint8_t *left, void (*watch)(const uint8_t *base));
void structure_look_again(void);

#endif
