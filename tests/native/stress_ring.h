#ifndef STRESS_RING_H
#define STRESS_RING_H

#include <stdint.h>

/* Two producers push so many messages each, two consumers pop them: each once, and in order. */
void stress_ring(uint32_t rounds);

#endif
