/* A process that executes itself one instruction at a time. */
#ifndef STEP_H
#define STEP_H

#include "stage.h"

/* Stop this process until the stepper sends it on. */
void step_stop(void);
/* From here to the end: stop behind every instruction that has changed the segment. */
void step_begin(actor *a);
void step_end(actor *a);

#endif
