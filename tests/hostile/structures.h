/* SharedList, SharedDict, SharedRing and SharedLog, damaged word by word. */
#ifndef HOSTILE_STRUCTURES_H
#define HOSTILE_STRUCTURES_H

#include <stdint.h>

/* One case: damage, at rest or all the time, then every call. */
void structures_case(uint64_t seed);

#endif
