/* The processor's trap flag makes every instruction end in SIGTRAP. The handler compares the
 * segment with what it was, and where it has changed stops the process: as it stands then, with all
 * that it has stored and nothing more, a SIGKILL finds it. The flag is set and cleared in the
 * context that the handler returns to. Against ptrace this saves two switches to another process
 * for each instruction, and it works where ptrace is not permitted. On x86-64 only: elsewhere a
 * process cannot step itself, and loops of load and store exclusive would never end. */
#include "step.h"

#include "watch.h"

#include <signal.h>
#include <ucontext.h>
#include <unistd.h>

#ifndef __x86_64__
#error "stepping needs the trap flag of x86-64"
#endif
#define TRAP_FLAG 0x100

static watch watched;
static notes *progress;
static volatile sig_atomic_t stepping;

void step_stop(void) { kill(getpid(), SIGSTOP); }

static void on_step(int signal, siginfo_t *info, void *context) {
    greg_t *flags = &((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL];
    int error = errno;
    (void)signal, (void)info;
    progress->steps++;
    if (watch_changed(&watched)) step_stop();
    *flags = stepping ? *flags | TRAP_FLAG : *flags & ~TRAP_FLAG;
    errno = error;
}

void step_begin(actor *a) {
    struct sigaction action = {.sa_sigaction = on_step, .sa_flags = SA_SIGINFO};
    progress = a->notes;
    watch_begin(&watched, a->at->base, a->pages);
    NEED(sigaction(SIGTRAP, &action, NULL) == 0);
    stepping = 1;
    raise(SIGTRAP);
}

void step_end(actor *a) {
    stepping = 0;
    if (watch_changed(&watched)) step_stop(); /* the last instruction's, if it was one */
    watch_whole(&watched);
    a->notes->over = 1;
}
