/* Lists, dicts and rings, each put through some steps by a victim, and what the next holder of the
 * lock finds when the victim dies on the way: all as it was before the step, or as it is behind it,
 * and nothing else. When it dies is up to the program. */
#ifndef STRUCTURE_CALLS_H
#define STRUCTURE_CALLS_H

#include "world.h"

typedef struct view view;

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

extern const calls structures[];
extern const uint32_t structure_count;

/* Go through all steps. `watch` is called with the victim's segment before each, and with NULL
 * behind it; in between the program calls structure_look() at whatever instant the victim may have
 * died. Returns the number of such instants. */
uint32_t structure_play(const calls *c, void (*watch)(const segment *watched));
void structure_look(void);

#endif
