/* Tests that mutants had survived until they were written. */
#ifndef GAPS_H
#define GAPS_H

#include "pair.h"

void die_as(client *c); /* it keeps its slot's number */

extern const test gaps[], dead_gaps[];

#endif
