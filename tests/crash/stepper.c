/* Lets a victim execute one operation, stopped behind every instruction that changes the segment,
 * and asks each time what the others would find if it died there.
 *
 *     stepper list
 *     stepper FILE SCENE VICTIM FOLDER STRIDE KILLS SECONDS DUMPS
 *
 * 1. VICTIM (victim.c) performs the scene's operation in single steps (step.c). A copy is taken of
 *    every STRIDE-th state of the segment and is judged (judge.c).
 * 2. At KILLS of these changes, evenly spread, a victim is really killed, and the survivor recovers
 *    in the real segment.
 * 3. At SECONDS of them a victim is killed and another process recovers: that one is stepped and
 *    judged in the same way, so that a third has to recover from both.
 *
 * While a victim lives, the survivor asks for the lock that it holds and must not get it, above all
 * in the steps before the victim has said which thread it is.
 *
 * Every DUMPS-th recovered copy goes to FOLDER, for the checker in Python. Prints its counts; exit
 * status 1: something was found, 2: it did not run. */
#include "judge.h"
#include "trace.h"

static const scene *the_scene;
static const char *file, *program, *folder;
static uint32_t stride, dump_every;
static struct {
    uint32_t steps, changes, looked, asked, killed, seconds, dumps, stable, failures;
} total;

static judge open_judge(void) {
    judge j = {.scene = the_scene, .folder = folder, .dump_every = dump_every};
    j.real = stage_open(file, the_scene->pages,
                        the_scene->grown ? the_scene->grown : the_scene->pages);
    if (the_scene->set) the_scene->set(j.real);
    j.undone = malloc(j.real->bytes);
    j.allowed = malloc(j.real->bytes / 4);
    NEED(j.undone && j.allowed);
    return j;
}

static void close_judge(judge *j) {
    total.looked += j->looked;
    total.dumps += j->dumps;
    total.failures += j->failures;
    if (j->copy) stage_close(j->copy);
    stage_close(j->real);
    free(j->undone);
    free(j->allowed);
}

static trace start_victim(judge *j) {
    trace t = trace_start(program, j->real, the_scene->name);
    if (the_scene->ready) the_scene->ready(j->real);
    /* The lock's last holder is now one who is no thread of the victim's. */
    if (!the_scene->unsound) {
        int rc = lci_grow(j->real->survivor.h, 0, LC_TRY, 0);
        NEED(rc == LC_OK || rc == LC_E_BUSY); /* busy: one who is stopped, or dead, holds it */
    }
    judge_note_stable(j, true);
    return t;
}

/* The victim holds the lock and lives: nobody else gets it. */
static void ask_for_lock(judge *j, uint32_t victim) {
    lcs_lock *lock = lcs_lock_of(j->real->survivor.at);
    uint64_t both = lc_load(&lock->both);
    if (!victim || (both & LCS_LOCK_SLOT) != victim) return;
    bool unnamed = lc_load(&lock->holder) >> 32 != both >> 32;
    static uint32_t held[2]; /* each time costs 5 ms: the first few, and a sample */
    uint32_t n = held[unnamed]++;
    if (n >= 8 && n % 128) return;
    int rc = lci_grow(j->real->survivor.h, 0, LC_BLOCK, lcs_now_ns() + 1000000);
    if (rc != LC_E_TIMEOUT && rc != LC_E_INTR)
        FOUND(j, "a lock whose owner lives was taken from it (%d), named %u", rc, !unnamed);
    total.asked++;
}

/* Step until the operation is over or the segment has changed `stop` times; judge every `every`-th
 * change (0: none). Returns the changes. */
static uint32_t drive(judge *j, trace *t, uint32_t stop, uint32_t every, bool ask) {
    uint32_t changes = 0, victim = j->real->notes->victim;
    bool raced = the_scene->meanwhile == NULL || j->copy == NULL;
    for (; changes < stop && trace_next(t); changes++) {
        j->step = t->notes->steps;
        if (every && changes % every == 0) judge_copy(j, j->real->base);
        /* These two are seen as a change of their own, behind the next instruction. */
        if (ask) ask_for_lock(j, victim);
        if (!raced) raced = the_scene->meanwhile(j->real);
    }
    total.steps += t->notes->steps;
    return changes;
}

static uint32_t step_all(void) {
    judge j = open_judge();
    j.phase = "stepped";
    trace t = start_victim(&j);
    j.copy = stage_copy(j.real);
    total.stable = j.stable_count;
    uint32_t changes = drive(&j, &t, UINT32_MAX, stride, true);
    judge_end(&j);
    trace_end(&t);
    close_judge(&j);
    total.changes += changes;
    return changes;
}

/* A victim is killed behind change `at`. They may be fewer this time: some depend on the clock. */
static judge kill_at(uint32_t at, const char *phase) {
    judge j = open_judge();
    j.phase = phase;
    trace t = start_victim(&j);
    drive(&j, &t, at, 0, false);
    trace_kill(&t);
    stage_die_too(j.real);
    j.looked = at; /* who is taken back first changes with it */
    return j;
}

static void check_new(judge *j) {
    for (int i = 1; i < 4 * MAX_KEYS; i++)
        if (i != the_scene->made && i != the_scene->made_before && j->new_ready[i])
            FOUND(j, "%d of %d new pages were ready", i, the_scene->made);
}

static void kill_one(uint32_t at) {
    judge j = kill_at(at, "killed");
    judge_real(&j);
    check_new(&j);
    j.looked = 0;
    close_judge(&j);
    total.killed++;
}

/* The one who recovers is the next victim. */
static void step_second(uint32_t at) {
    judge j = kill_at(at, "second");
    j.looked = 0;
    trace t = trace_start(program, j.real, "recover");
    judge_note_stable(&j, false);
    j.copy = stage_copy(j.real);
    total.changes += drive(&j, &t, UINT32_MAX, stride, false);
    for (uint32_t i = 0; i < j.stable_count; i++)
        if (j.stable[i].missed && j.stable[i].here)
            FOUND(&j, "page %u was missed during recovery", j.stable[i].page);
    trace_end(&t);
    judge_real(&j);
    check_new(&j);
    close_judge(&j);
    total.seconds++;
}

static uint32_t point(uint32_t changes, uint32_t i, uint32_t n) {
    return 1 + (uint32_t)(((uint64_t)changes * (2 * i + 1)) / (2 * n));
}

static int list(void) {
    for (const scene *s = all_scenes; s; s = s->next)
        if (s->pages) printf("%s\n", s->name);
    return 0;
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "list") == 0) return list();
    NEED(argc == 9);
    file = argv[1];
    the_scene = scene_named(argv[2]);
    NEED(the_scene);
    if (the_scene->ranked) setenv("LIGHTCACHE_TEST_EVICTION", "hz", 1); /* the victims' as well */
    program = argv[3];
    folder = argv[4];
    stride = (uint32_t)strtoul(argv[5], NULL, 10);
    uint32_t kills = (uint32_t)strtoul(argv[6], NULL, 10);
    uint32_t seconds = (uint32_t)strtoul(argv[7], NULL, 10);
    dump_every = (uint32_t)strtoul(argv[8], NULL, 10);
    uint32_t changes = step_all();
    for (uint32_t i = 0; i < kills; i++) kill_one(point(changes, i, kills));
    for (uint32_t i = 0; i < seconds; i++) step_second(point(changes, i, seconds));
    printf("steps %u changes %u looked %u asked %u killed %u seconds %u dumps %u stable %u "
           "failures %u\n", total.steps, total.changes, total.looked, total.asked, total.killed,
           total.seconds, total.dumps, total.stable, total.failures);
    return total.failures != 0;
}
