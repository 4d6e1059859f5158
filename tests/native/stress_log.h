#ifndef STRESS_LOG_H
#define STRESS_LOG_H

#include <stdint.h>

/* One writer appends so many entries; each reader reads all that come while it is one, in order. */
void stress_log(uint32_t rounds);

#endif
