/* A victim under ptrace. */
#ifndef TRACE_H
#define TRACE_H

#include "stage.h"

#include <sys/types.h>

typedef struct trace {
    pid_t pid;
    bool done; /* it has reached its second stop */
} trace;

/* Start `program FILE PAGES SCENE` and let it run to its first stop. */
trace trace_start(const char *program, const stage *real, const char *scene);
void trace_step(trace *t); /* one instruction */
void trace_kill(trace *t); /* SIGKILL; returns when the kernel has let go of all it held */
void trace_end(trace *t);  /* it has done everything: it may end by itself */

#endif
