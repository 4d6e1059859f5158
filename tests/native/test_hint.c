/* Threads that die in the lock, in processes of their own: what the kernel marks, and what it must not. */
#include "world.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static segment s;
static client a;
static lcs_lock *lock;

static void set_up(void) {
    s = segment_make(LCS_PAYLOAD_OFFSET + 4096);
    a = client_join(&s);
    lock = lcs_lock_of(a.at);
}

static void tear_down(void) {
    client_leave(&a);
    segment_end(&s);
}

static int take(const client *c, int wait, uint64_t deadline) {
    lc_txn t;
    return lcs_lock_take(c->at, &t, 1, wait, deadline, LCS_PAYLOAD_OFFSET, s.bytes);
}

static int drop(const client *c) {
    lc_txn t = {.base = s.base, .lock = lock};
    return lcs_lock_drop(c->at, &t, LCS_PAYLOAD_OFFSET, s.bytes);
}

/* This thread's list of robust futexes; NULL: it has none, as under qemu's user emulation. */
static struct robust_list_head *own_list(void) {
    struct robust_list_head *head = NULL;
    size_t bytes;
    return syscall(SYS_get_robust_list, 0, &head, &bytes) == 0 ? head : NULL;
}

static bool skipped(const char *why) {
    fprintf(stderr, "%s: skipped: %s\n", check_running, why);
    return true;
}

static bool no_list(void) { return !own_list() && skipped("no list of robust futexes here"); }

/* ------------------------------------------------------------------ a victim in another process */

static void wait_for_death(pid_t child) {
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

/* The child shares the description that locks its byte with us, so this byte stays locked whatever
 * becomes of the child; and it is as if in another PID namespace, so /proc is of no use either. */
static pid_t child_with_our_byte(void (*live)(client *)) {
    client victim = {.life = life_descriptor(&s)};
    pid_t child = fork();
    CHECK(child >= 0);
    if (child) {
        wait_for_death(child);
        return victim.life;
    }
    victim.at = lcs_attachment_new(s.base, s.bytes, victim.life, 0, 0, 0);
    victim.at->pidns = 1;
    int slot = lcs_slot_claim(victim.at, "victim", 0);
    if (slot <= 0) _exit(1);
    victim.slot = (uint32_t)slot;
    live(&victim);
    kill(getpid(), SIGKILL);
    _exit(2);
}

static void hold(client *c) { CHECK_EQ(take(c, LC_TRY, 0), LC_OK); }

static void hold_with_much_memory(client *c) {
    size_t bytes = 64 << 20;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    memset(memory, 1, bytes);
    hold(c);
}

static void takes_over_by_the_mark(void (*live)(client *)) {
    if (no_list()) return;
    set_up();
    int life = child_with_our_byte(live);
    CHECK_EQ(lcs_slot_alive(a.at, 2), 1);
    CHECK((uint32_t)lc_load(&lock->holder) == FUTEX_OWNER_DIED);
    CHECK_EQ(take(&a, BLOCKING), LC_OK);
    CHECK_EQ(lcs_slot_alive(a.at, 2), 1); /* so it was not the byte that ended the wait */
    CHECK_EQ((uint32_t)lc_load(&lock->holder), (uint32_t)syscall(SYS_gettid));
    CHECK_EQ(drop(&a), LC_OK);
    close(life);
    tear_down();
}

static void hint_of_a_killed_process_ends_the_wait(void) { takes_over_by_the_mark(hold); }

static void hint_does_not_wait_for_memory(void) { takes_over_by_the_mark(hold_with_much_memory); }

static void hold_with_a_robust_mutex(client *c) {
    pthread_mutex_t *mutex = (pthread_mutex_t *)(s.base + LCS_PAYLOAD_OFFSET);
    CHECK_EQ(pthread_mutex_lock(mutex), 0);
    hold(c);
}

/* Our word is one more on the way of the kernel, which goes through the list as well. */
static void hint_leaves_robust_mutexes_as_they_are(void) {
    pthread_mutexattr_t shared;
    if (no_list()) return;
    set_up();
    pthread_mutex_t *mutex = (pthread_mutex_t *)(s.base + LCS_PAYLOAD_OFFSET);
    pthread_mutexattr_init(&shared);
    pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&shared, PTHREAD_MUTEX_ROBUST);
    CHECK_EQ(pthread_mutex_init(mutex, &shared), 0);
    int life = child_with_our_byte(hold_with_a_robust_mutex);
    CHECK_EQ(take(&a, BLOCKING), LC_OK);
    CHECK_EQ(pthread_mutex_lock(mutex), EOWNERDEAD); /* also while we hold ours */
    CHECK_EQ(pthread_mutex_consistent(mutex), 0);
    CHECK_EQ(pthread_mutex_unlock(mutex), 0);
    CHECK(own_list()->list_op_pending == NULL);
    CHECK_EQ(drop(&a), LC_OK);
    CHECK(own_list()->list_op_pending == NULL);
    close(life);
    tear_down();
}

/* ------------------------------------------------------------------ whom it must not mark */


/* A client of another PID namespace takes it, whose thread has this one's number. */
static void another_takes_it(void) {
    uint64_t both = lc_load(&lock->both) + (UINT64_C(1) << 32);
    lc_store(&lock->both, both | a.slot | a.at->epoch << LCS_LOCK_EPOCH_SHIFT);
    lc_store(&lock->holder, both >> 32 << 32 | (uint32_t)syscall(SYS_gettid));
}

static void has_held(client *c) {
    hold(c);
    CHECK_EQ(drop(c), LC_OK);
    another_takes_it();
}

static void lost_it(client *c) {
    hold(c);
    lc_store(&lock->both, lc_load(&lock->both) & ~UINT64_C(0xffffffff));
    CHECK_EQ(drop(c), LC_E_LOST);
    another_takes_it();
}

static void refused_it(client *c) {
    lc_store(&lock->log_count, 1); /* behind a free lock: forged */
    CHECK_EQ(take(c, LC_TRY, 0), LC_E_CORRUPT);
    lc_store(&lock->log_count, 0);
    another_takes_it();
}

static void marks_nobody(void (*live)(client *)) {
    set_up();
    int life = child_with_our_byte(live);
    CHECK(((uint32_t)lc_load(&lock->holder) & FUTEX_OWNER_DIED) == 0);
    lc_store(&lcs_client_of(a.at, a.slot)->pidns, 1); /* so /proc is not asked for that number */
    client b = client_join(&s);
    CHECK_EQ(take(&b, BLOCKING), LC_E_INTR); /* a lives */
    CHECK_EQ(drop(&a), LC_OK);
    client_leave(&b);
    close(life);
    tear_down();
}

static void hint_is_gone_when_the_lock_is(void) { marks_nobody(has_held); }
static void hint_is_gone_when_the_lock_was_lost(void) { marks_nobody(lost_it); }
static void hint_is_gone_when_the_lock_was_refused(void) { marks_nobody(refused_it); }

/* The mark of one taking says nothing of the next, whose holder has not yet noted itself. */
static void hint_is_of_one_taking(void) {
    set_up();
    client b = client_join(&s);
    CHECK_EQ(take(&b, LC_TRY, 0), LC_OK);
    uint64_t before = (lc_load(&lock->sequence) - UINT64_C(1)) << 32;
    uint64_t holder = lc_load(&lock->holder);
    lc_store(&lock->holder, before | FUTEX_OWNER_DIED);
    CHECK_EQ(take(&a, BLOCKING), LC_E_INTR);
    lc_store(&lock->holder, holder >> 32 << 32 | FUTEX_OWNER_DIED);
    CHECK_EQ(take(&a, BLOCKING), LC_OK);
    CHECK_EQ(drop(&b), LC_E_LOST);
    CHECK_EQ(drop(&a), LC_OK);
    client_leave(&b);
    tear_down();
}

/* ------------------------------------------------------------------ whose word `list_op_pending` is */

static struct robust_list *pending(void) { return own_list()->list_op_pending; }

static void hint_is_set_while_the_lock_is_held(void) {
    if (no_list()) return;
    set_up();
    CHECK(pending() == NULL);
    CHECK_EQ(take(&a, LC_TRY, 0), LC_OK);
    CHECK((uint8_t *)pending() + own_list()->futex_offset == (uint8_t *)&lock->holder);
    CHECK_EQ(drop(&a), LC_OK);
    CHECK(pending() == NULL);
    tear_down();
}

/* As when a signal handler calls us within an operation on a robust mutex. */
static void hint_gives_way_to_others(void) {
    struct robust_list other;
    if (no_list()) return;
    set_up();
    own_list()->list_op_pending = &other;
    CHECK_EQ(take(&a, LC_TRY, 0), LC_OK);
    CHECK(pending() == &other);
    CHECK_EQ(drop(&a), LC_OK);
    CHECK(pending() == &other);
    own_list()->list_op_pending = NULL;
    CHECK_EQ(take(&a, LC_TRY, 0), LC_OK);
    own_list()->list_op_pending = &other;
    CHECK_EQ(drop(&a), LC_OK);
    CHECK(pending() == &other);
    own_list()->list_op_pending = NULL;
    tear_down();
}

/* Two segments, given back in the order in which they were taken: none is left led to. */
static void hint_of_two_locks_at_once(void) {
    if (no_list()) return;
    set_up();
    segment first = s;
    client of_first = a;
    set_up();
    lc_txn t;
    CHECK_EQ(lcs_lock_take(of_first.at, &t, 1, LC_TRY, 0, LCS_PAYLOAD_OFFSET, s.bytes), LC_OK);
    struct robust_list *led = pending();
    CHECK(led != NULL);
    CHECK_EQ(take(&a, LC_TRY, 0), LC_OK);
    CHECK(pending() == led);
    CHECK_EQ(lcs_lock_drop(of_first.at, &t, LCS_PAYLOAD_OFFSET, s.bytes), LC_OK);
    CHECK(pending() == NULL);
    CHECK_EQ(drop(&a), LC_OK);
    CHECK(pending() == NULL);
    tear_down();
    s = first, a = of_first;
    tear_down();
}

/* As under musl, before the first robust mutex. The list has to be there again when the thread ends: the
 * C library looks at it. */
static void without_a_list(void (*work)(client *)) {
    struct robust_list_head *head = own_list();
    syscall(SYS_set_robust_list, NULL, sizeof *head);
    work(&a);
    CHECK_EQ((uint32_t)lc_load(&lock->holder), (uint32_t)syscall(SYS_gettid));
    CHECK(!head || head->list_op_pending == NULL);
    if (head) syscall(SYS_set_robust_list, head, sizeof *head);
}

static void hold_and_drop(client *c) {
    hold(c);
    CHECK_EQ(drop(c), LC_OK);
}

static void *take_without_a_list(void *unused) {
    without_a_list(hold_and_drop);
    return unused;
}

static void *end_without_a_list(void *unused) {
    without_a_list(hold);
    return unused;
}

static void lock_works_in_a_thread_without_a_list(void) {
    pthread_t thread;
    set_up();
    CHECK_EQ(pthread_create(&thread, NULL, take_without_a_list, NULL), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    tear_down();
}

/* Nothing marks the lock, and its process lives: /proc tells. */
static void lock_of_a_thread_that_ended_without_a_list(void) {
    pthread_t thread;
    set_up();
    client b = client_join(&s);
    CHECK_EQ(pthread_create(&thread, NULL, end_without_a_list, NULL), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    uint32_t tid = (uint32_t)lc_load(&lock->holder);
    if (a.at->pidns) {
        while (!lcs_thread_gone(b.at, a.slot, tid)) {
        } /* joined a little before the kernel lets go of it */
        CHECK_EQ(take(&b, BLOCKING), LC_OK);
        CHECK_EQ((uint32_t)lc_load(&lock->holder), (uint32_t)syscall(SYS_gettid));
        CHECK_EQ(drop(&b), LC_OK);
    }
    client_leave(&b);
    tear_down();
}

/* ------------------------------------------------------------------ numbers that a child inherits */

/* A process that is the first of its PID namespace again has its parent's pid, not its thread's number:
 * in `said` what it found, 0 if all was right. */
static int *said;

static int found_by_the_child(void) {
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) || mount("proc", "/proc", "proc", 0, NULL))
        return 1;
    client c = client_join(&s);
    CHECK(c.at->pidns != 0); /* so that others may look at our threads */
    CHECK_EQ(take(&c, LC_TRY, 0), LC_OK);
    if ((uint32_t)lc_load(&lock->holder) != (uint32_t)syscall(SYS_gettid)) return 2;
    pid_t other = fork();
    if (other == 0) {
        client b = client_join(&s);
        int rc = take(&b, BLOCKING);
        _exit(rc == LC_E_INTR ? 0 : 3); /* it waits: the holder lives */
    }
    int status;
    if (waitpid(other, &status, 0) != other || !WIFEXITED(status)) return 4;
    if (WEXITSTATUS(status)) return WEXITSTATUS(status);
    CHECK_EQ(drop(&c), LC_OK);
    client_leave(&c);
    return 0;
}

/* Run `work` in a child that is the first process of a PID namespace and has mounts of its own; what
 * it returns. */
static int first_of_a_namespace(int (*work)(void)) {
    int status;
    if (unshare(CLONE_NEWPID | CLONE_NEWNS) != 0) return 100;
    pid_t child = fork();
    if (child == 0) _exit(work());
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status));
    return WEXITSTATUS(status);
}

static void *take_and_have_a_child(void *unused) {
    client c = client_join(&s);
    CHECK_EQ(take(&c, LC_TRY, 0), LC_OK);
    CHECK_EQ(drop(&c), LC_OK);
    *said = first_of_a_namespace(found_by_the_child);
    client_leave(&c);
    return unused;
}

/* pid 1, whose second thread takes the lock, and then forks the first process of another namespace. */
static int have_a_thread(void) {
    pthread_t thread;
    CHECK_EQ(pthread_create(&thread, NULL, take_and_have_a_child, NULL), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    return *said;
}

static void lock_notes_the_thread_of_a_child_with_its_parents_pid(void) {
    if (!advice_is_heard() && skipped("a child does not know that it was forked")) return;
    set_up();
    said = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(said != MAP_FAILED);
    int status;
    pid_t child = fork(); /* unshare changes its caller's children for good */
    if (child == 0) _exit(first_of_a_namespace(have_a_thread));
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    if (WEXITSTATUS(status) == 100) (void)skipped("no PID namespace can be made (unshare refuses)");
    else if (WEXITSTATUS(status) == 1) (void)skipped("/proc cannot be mounted here");
    else CHECK_EQ(WEXITSTATUS(status), 0);
    munmap(said, 4096);
    tear_down();
}

const test hint_tests[] = {
    TEST(hint_of_a_killed_process_ends_the_wait),
    TEST(hint_does_not_wait_for_memory),
    TEST(hint_leaves_robust_mutexes_as_they_are),
    TEST(hint_is_gone_when_the_lock_is),
    TEST(hint_is_gone_when_the_lock_was_lost),
    TEST(hint_is_gone_when_the_lock_was_refused),
    TEST(hint_is_of_one_taking),
    TEST(hint_is_set_while_the_lock_is_held),
    TEST(hint_gives_way_to_others),
    TEST(hint_of_two_locks_at_once),
    TEST(lock_works_in_a_thread_without_a_list),
    TEST(lock_of_a_thread_that_ended_without_a_list),
    TEST(lock_notes_the_thread_of_a_child_with_its_parents_pid),
    END_OF_TESTS,
};
