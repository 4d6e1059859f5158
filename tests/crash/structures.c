/* Lists, dicts, rings and logs, whose user dies behind every instruction that has changed the segment:
 * also in the middle of a message's bytes, which no hook behind a store can see. Whoever recovers
 * from that dies in the same way.
 *
 * As step.c does it, but without a second process: the processor's trap flag makes every
 * instruction end in SIGTRAP, whose handler keeps what the segment holds. */
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
#define STATES 256 /* of one call */

static const uint8_t *watched;
static uint64_t bytes;
static uint8_t *seen; /* what is watched, behind the last instruction */
static void (*on_change)(void);
static volatile sig_atomic_t stepping;
static uint8_t *state[STATES]; /* of the segment, in one call of the victim */
static uint32_t states;
static uint64_t steps, second_deaths;

static void look_if_changed(void) {
    if (memcmp(seen, watched, bytes) == 0) return;
    memcpy(seen, watched, bytes);
    on_change();
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

static void begin(const uint8_t *base, void (*change)(void)) {
    watched = base;
    on_change = change;
    memcpy(seen, base, bytes);
    stepping = 1;
    raise(SIGTRAP);
}

static void end(void) {
    stepping = 0;
    look_if_changed(); /* the last instruction's, if it was one */
}

static void keep(void) {
    CHECK(states < STATES);
    memcpy(state[states++], seen, bytes);
}

static void die_as_well(void) {
    structure_look_again();
    second_deaths++;
}

static void watch_recovery(const uint8_t *base) {
    if (base) begin(base, die_as_well);
    else end();
}

static void watch(const segment *real) {
    if (real) {
        begin(real->base, keep);
        return;
    }
    end();
    for (uint32_t i = 0; i < states; i++) structure_look(state[i], watch_recovery);
    states = 0;
}

static void make_room(uint64_t most) {
    seen = malloc(most);
    CHECK(seen);
    for (uint32_t i = 0; i < STATES; i++) CHECK((state[i] = malloc(most)));
}

/* For each structure: its name, instructions, deaths, and those of a survivor. */
int main(void) {
    struct sigaction action = {.sa_sigaction = on_step, .sa_flags = SA_SIGINFO};
    CHECK(sigaction(SIGTRAP, &action, NULL) == 0);
    for (uint32_t i = 0; i < structure_count; i++) {
        steps = second_deaths = 0;
        bytes = structure_bytes(structures[i]);
        make_room(bytes);
        uint64_t deaths = structure_play(structures[i], watch) - second_deaths;
        printf("%s %llu %llu %llu\n", structures[i]->name, (unsigned long long)steps,
               (unsigned long long)deaths, (unsigned long long)second_deaths);
    }
    return 0;
}
