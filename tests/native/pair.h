/* Two clients of one index, and what most tests of them use: two prompts and a lease. */
#ifndef PAIR_H
#define PAIR_H

#include "world.h"

extern segment s;
extern client a, b;
extern prompt p, q;
extern lease l;

void set_up(uint64_t pages);
void set_up_grown(uint64_t pages, uint64_t grown);
void set_up_independent(uint64_t pages); /* prompts reserve independent pages */
void set_up_lru(uint64_t pages);    /* for what is said of this order alone, */
void set_up_ranked(uint64_t pages); /* and of ranked lists */
void tear_down(void); /* they leave, and the index is sound */

/* A word that is not what it must be, until it is mended; then the index is sound again. */
void break_word(_Atomic uint32_t *word, uint32_t value);
void mend_word(void);

uint32_t hits_of(uint32_t page); /* in either order */

/* A ticket from b to a of all of `p`: not adopted when its time is over, it pins all the same. */
void let_a_ticket_end(void);

#endif
