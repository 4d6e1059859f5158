/* Lists, dicts and rings, whose user dies behind every instruction that has changed the segment:
 * also in the middle of a message's bytes, which no hook behind a store can see.
 *
 * As step.c does it, but without a second process: the processor's trap flag makes every
 * instruction end in SIGTRAP, and what the next holder of the lock finds is looked at in the
 * handler, in a copy. */
#include "structure_calls.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <ucontext.h>

#ifndef __x86_64__
#error "stepping needs the trap flag of x86-64"
#endif
#define TRAP_FLAG 0x100

static const segment *watched;
static uint8_t *seen; /* the segment behind the last instruction */
static volatile sig_atomic_t stepping;
static uint64_t steps;

static void look_if_changed(void) {
    if (memcmp(seen, watched->base, watched->bytes) == 0) return;
    memcpy(seen, watched->base, watched->bytes);
    structure_look();
}

static void on_step(int signal, siginfo_t *info, void *context) {
    greg_t *flags = &((ucontext_t *)context)->uc_mcontext.gregs[REG_EFL];
    int error = errno;
    (void)signal, (void)info;
    steps++;
    look_if_changed();
    *flags = stepping ? *flags | TRAP_FLAG : *flags & ~TRAP_FLAG;
    errno = error;
}

static void watch(const segment *real) {
    if (!real) {
        stepping = 0;
        look_if_changed(); /* the last instruction's, if it was one */
        free(seen);
        return;
    }
    watched = real;
    seen = malloc(real->bytes);
    CHECK(seen);
    memcpy(seen, real->base, real->bytes);
    stepping = 1;
    raise(SIGTRAP);
}

int main(void) {
    struct sigaction action = {.sa_sigaction = on_step, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGTRAP, &action, NULL) == 0);
    for (uint32_t i = 0; i < structure_count; i++) {
        uint64_t before = steps;
        uint32_t deaths = structure_play(&structures[i], watch);
        printf("%s %llu %u\n", structures[i].name, (unsigned long long)(steps - before), deaths);
    }
    return 0;
}
