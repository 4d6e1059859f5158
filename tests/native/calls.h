/* Calls on pages without a key, on kept pages and on the oldest, with room for what they say. Each
 * calls again until it is through, and returns what the core does. */
#ifndef CALLS_H
#define CALLS_H

#include "world.h"

extern int32_t pages[MAX_KEYS], out[MAX_KEYS];
extern uint32_t gens[MAX_KEYS];
extern uint8_t status[MAX_KEYS];
extern lci_held_op op;

int allocate(client *c, uint32_t n); /* into `pages` and `gens` */
int free_pages(client *c, const int32_t *which, uint32_t n);
/* `pages` by the keys of `of` from `start` on. */
int name(client *c, const prompt *of, uint32_t start, uint32_t flags);
int unname(client *c, const int32_t *which, uint32_t n);

extern lci_walk_op walk;

int keep_run(client *c, const prompt *of, int kept);
int drop_run(client *c, const prompt *of, uint32_t start);

/* What was listed, and what of it went. */
extern lease list;
extern lc_key keys[MAX_KEYS];
extern uint32_t parents[MAX_KEYS], hits[MAX_KEYS];
extern lci_discard_op giving;

int oldest(client *c, uint32_t want, uint32_t keep_order); /* how many */
int discard(client *c);                                    /* what is listed and was not used since */
int discard_used(client *c);                               /* what is listed */

#endif
