/* A victim, as the stepper sees it. */
#ifndef TRACE_H
#define TRACE_H

#include "stage.h"

#include <sys/types.h>

typedef struct trace {
    pid_t pid;
    const notes *notes;
} trace;

/* Start `program FILE PAGES SCENE` and wait for its first stop. */
trace trace_start(const char *program, const stage *real, const char *scene);
/* On to the next change of the segment. False: the operation is over. */
bool trace_next(trace *t);
void trace_kill(trace *t); /* SIGKILL; returns when the kernel has let go of all it held */
void trace_end(trace *t);  /* it has done everything: it may end by itself */

#endif
