/* Two clients of one index, for tests that mutants had survived until they were written. */
#ifndef GAPS_H
#define GAPS_H

#include "world.h"

extern segment s;
extern client a, b;
extern prompt p, q;
extern lease l;

void set_up(uint64_t pages);
void tear_down(void);
void die_as(client *c); /* it keeps its slot's number */

extern const test gaps[], dead_gaps[];

#endif
