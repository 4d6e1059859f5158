/* What the tests hang on the core's pause points (libraries built with -DLC_PAUSE_POINTS).
 *
 * `gate_hook`: at the n-th passing of one point, say so in shared memory and sleep there until told
 * to go on. `fall_hook`: die or stop at a random instruction soon after a point: when told to, it
 * sets a timer there that fires SIGKILL or SIGSTOP, and takes it back when the lock is given back.
 * Process-local; set once. */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { AT_LOCKED = 13, AT_UNLOCK = 15 };

typedef struct gate { /* in memory that the test shares */
    _Atomic uint32_t reached;
    _Atomic uint32_t open;   /* gate_hook: go on; fall_hook: 0 live, 1 die, 2 stop */
    _Atomic uint32_t passed; /* how often the point was passed in all */
    _Atomic uint32_t inside; /* fall_hook: 1 between taking the lock and giving it back */
} gate;

static gate *shared;
static int wanted_point;
static uint32_t wanted_pass;
static uint32_t one_in, longest_ns;
static uint64_t state;
static timer_t timers[2]; /* SIGKILL, SIGSTOP */

static uint32_t next_random(void) { /* xorshift64* */
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    return (uint32_t)((state * UINT64_C(0x2545F4914F6CDD1D)) >> 32);
}

static void wait_word(_Atomic uint32_t *word) {
    struct timespec slice = {.tv_nsec = 20000000};
    while (!atomic_load(word)) syscall(SYS_futex, word, FUTEX_WAIT, 0, &slice, NULL, 0);
}

void gate_hook(int point) {
    if (point != wanted_point) return;
    if (atomic_fetch_add(&shared->passed, 1) + 1 != wanted_pass) return;
    atomic_store(&shared->reached, 1);
    syscall(SYS_futex, &shared->reached, FUTEX_WAKE, 64, NULL, NULL, 0);
    wait_word(&shared->open);
}

void set_gate(gate *where, int point, uint32_t pass) {
    shared = where;
    wanted_point = point;
    wanted_pass = pass;
}

void fall_hook(int point) {
    struct itimerspec when = {{0, 0}, {0, 0}};
    uint32_t how = atomic_load(&shared->open);
    if (point == AT_LOCKED) atomic_store(&shared->inside, 1);
    if (point == AT_UNLOCK) {
        for (int i = 0; i < 2; i++) timer_settime(timers[i], 0, &when, NULL);
        atomic_store(&shared->inside, 0);
    } else if (point == wanted_point && (how == 1 || how == 2) && next_random() % one_in == 0) {
        when.it_value.tv_nsec = 1 + next_random() % longest_ns;
        timer_settime(timers[how - 1], 0, &when, NULL);
    }
}

int set_fall(gate *where, int point, uint32_t chance, uint32_t nanoseconds, uint64_t seed) {
    struct sigevent die = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGKILL};
    struct sigevent stop = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGSTOP};
    shared = where;
    wanted_point = point;
    one_in = chance;
    longest_ns = nanoseconds;
    state = seed * 2 + 1;
    return timer_create(CLOCK_MONOTONIC, &die, &timers[0]) ||
           timer_create(CLOCK_MONOTONIC, &stop, &timers[1]);
}
