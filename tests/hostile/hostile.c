/* Damages a small index in every way it can think of, and calls everything on what is left.
 *
 *     hostile seeds FIRST COUNT     cases FIRST .. FIRST + COUNT - 1
 *     hostile structures FIRST COUNT  the same for SharedList, Dict, Ring, Log
 *     hostile corpus FILE           cases that have found something once
 *     hostile explain SEED          what a case at rest damages, as a line of the corpus
 *     hostile fields                the names of all fields
 *
 * Cases run in forked children, so that one that is killed is told by its seed, and the rest go on.
 * The numbers are printed for fuzz.py, which adds up those of several. Exit status: 0 nothing was
 * found, 1 something was, 2 it did not run. */
#include "board.h"
#include "damage.h"
#include "operations.h"
#include "structures.h"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define BATCH 4000
#define LOCK_NS UINT64_C(2000000) /* how long a call may wait for a lock */
#define CPU_S 1                   /* an operation that works longer does not end */
#define WALL_S 30                 /* one that takes longer sleeps for ever */

board *shared;
static world worlds[VARIANTS];
static field names[MOST_FIELDS];
static uint32_t name_count;

void finding(const char *what, int64_t value) {
    shared->findings++;
    printf("FINDING seed %llu, %s: %s (%lld)\n", (unsigned long long)shared->seed, shared->doing,
           what, (long long)value);
    fflush(stdout);
}

/* ------------------------------------------------------------------ one operation */

static void limit(int cpu_s, int wall_s) {
    struct itimerval cpu = {.it_value.tv_sec = cpu_s}, wall = {.it_value.tv_sec = wall_s};
    setitimer(ITIMER_PROF, &cpu, NULL);
    setitimer(ITIMER_REAL, &wall, NULL);
}

static void count_code(int rc) {
    uint32_t at = rc >= 0 ? 0 : (uint32_t)-rc < CODES ? (uint32_t)-rc : CODES - 1;
    shared->codes[at]++;
}

static void mutexes_are_free(world *w) {
    pthread_mutex_t *all[] = {&w->me->door, &w->me->rows};
    for (int i = 0; i < 2; i++) {
        if (pthread_mutex_trylock(all[i]) != 0) {
            finding("a mutex of the process was left locked", i);
            exit(1);
        }
        pthread_mutex_unlock(all[i]);
    }
}

static int perform(world *w, rng *r, const operation *o, bool moving) {
    shared->doing = o->name;
    shared->calls++;
    limit(CPU_S, WALL_S);
    uint64_t begun = lcs_now_ns();
    call c = {.w = w, .r = r, .wait = below(r, 2) ? LC_BLOCK : LC_TRY, .moving = moving};
    c.deadline = begun + LOCK_NS;
    int rc = o->run(&c);
    uint64_t took = lcs_now_ns() - begun;
    count_code(rc);
    mutexes_are_free(w);
    if (took > shared->slowest_ns) {
        shared->slowest_ns = took;
        shared->slowest_seed = shared->seed;
        shared->slowest = o->name;
    }
    return rc;
}

/* ------------------------------------------------------------------ checks and lookups */

/* The first broken invariant of the world as it stands, an unfinished step undone; -1: its log. */
static int broken(world *w) {
    lci_report report;
    const lcs_lock *lock = lcs_lock_of(w->me);
    bool forged = lcs_word_free(lc_load(&lock->word)) && lc_load(&lock->log_count) != 0;
    memcpy(w->scratch, w->base, w->bytes);
    if (lci_recover_copy(w->scratch, w->bytes, w->pages) < 0) return -1;
    if (forged) finding("a log that nobody left was undone", lc_load(&lock->log_count));
    NEED(lci_check(w->scratch, w->bytes, w->pages, 1, &report) == LC_OK);
    return report.broken;
}

/* Ready pages that are found, of those that the picture has. */
static uint32_t found(world *w) {
    uint32_t all = 0;
    for (uint32_t run = 0; run < KEY_RUNS; run++)
        for (uint32_t i = 0; i < w->ready[run]; i++) {
            lc_key key = world_key(run, i);
            all += lci_peek1(w->reader_h, &key, 1, w->ns[0]) == 1 ||
                   lci_peek1(w->reader_h, &key, 1, w->ns[1]) == 1;
        }
    return all;
}

static uint32_t expected(const world *w) {
    uint32_t all = 0;
    for (uint32_t run = 0; run < KEY_RUNS; run++) all += w->ready[run];
    return all;
}

static bool attaches(world *w) {
    lci_handle *h = lci_open(w->reader, w->pages);
    if (!h) return false;
    lci_close(h);
    return true;
}

/* Repair what stands there. True: it says that it is done; then `check` must agree. */
static bool mend(world *w, const char *when, bool strict) {
    shared->doing = when;
    limit(CPU_S, WALL_S);
    if (lci_repair(w->h, LC_BLOCK, lcs_now_ns() + LOCK_NS) != LC_OK) return false;
    int number = broken(w);
    if (number == 0) return true;
    shared->unmended[number & (INVARIANTS - 1)]++;
    shared->unmended_seed[number & (INVARIANTS - 1)] = shared->seed;
    if (strict && attaches(w)) finding("repaired, and still broken: invariant", number);
    return false;
}

/* ------------------------------------------------------------------ one case */

/* Damage at rest: is it told, and can it be mended? Returns whether `check` or attaching told. */
static bool look_at_rest(world *w, const damage *d, tally *t) {
    world_restore(w);
    damage_apply(w, d);
    shared->doing = "check";
    limit(CPU_S, WALL_S);
    bool refused = !attaches(w);
    int number = broken(w);
    t->cases++;
    t->refused += refused;
    t->named += !refused && number != 0;
    if (!refused && number == 0 && found(w) != expected(w)) t->misled++;
    if (mend(w, "repair at rest", true)) {
        t->mended++;
        bool lost = found(w) < expected(w);
        enum role role = names[d->hit[0].field].role;
        t->lost += lost;
        if (lost && d->count == 1 && (role == DERIVED || role == ADVICE))
            finding("repaired, and a ready page is gone", expected(w) - found(w));
    } else {
        t->declined++;
    }
    return refused || number != 0;
}

static bool operate(world *w, rng *r, bool moving) {
    uint32_t order[64], n = operation_count - 1; /* the last one is to leave */
    bool noticed = false;
    for (uint32_t i = 0; i < n; i++) order[i] = i;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t k = i + below(r, n - i), other = order[i];
        order[i] = order[k];
        order[k] = other;
    }
    for (uint32_t i = 0; i < n; i++)
        if (below(r, 2)) noticed |= perform(w, r, &operations[order[i]], moving) == LC_E_CORRUPT;
    return noticed;
}

/* Nobody but a creator writes these; operations least of all. */
static void header_stands(world *w, const uint8_t *before) {
    if (memcmp(w->base, before, offsetof(lcs_header, retired)) != 0)
        finding("an operation wrote to the header", 0);
    if (memcmp(w->base + w->g.root, before + LCS_HEADER_BYTES, offsetof(lci_root, pad0)) != 0)
        finding("an operation wrote to the geometry", 0);
}

static void note_fixed(const world *w, uint8_t *to) {
    memcpy(to, w->base, LCS_HEADER_BYTES);
    memcpy(to + LCS_HEADER_BYTES, w->base + w->g.root, offsetof(lci_root, free_head));
}

/* Damage, then every operation, in any order. */
static void operate_on(world *w, rng *r, const damage *d, flipper *f) {
    static uint8_t before[2 * LCS_HEADER_BYTES];
    world_restore(w);
    damage_apply(w, d);
    note_fixed(w, before);
    if (f) flipper_start(f, w, draw(r));
    bool noticed = operate(w, r, f != NULL);
    if (f) shared->flips += flipper_stop(f);
    if (!f) header_stands(w, before);
    if (d->count == 1 && !f) shared->fields[d->hit[0].field].noticed += noticed;
    mend(w, "repair in the end", false);
    perform(w, r, &operations[operation_count - 1], false);
}

/* Draw a case: its world and its damage, which is none if it is done while others work. */
static world *draw_case(uint64_t seed, rng *r, damage *d) {
    *r = (rng){.state = seed * 2 + 1};
    d->count = 0;
    /* Every fifth, so that the others draw what they drew before there was a mixed one. */
    world *w = &worlds[seed % 5 == 4 ? MIXED_WORLD : below(r, MIXED_WORLD)];
    if (below(r, 4) == 0) return w;
    uint32_t hits = below(r, 4) ? 1 : 2 + below(r, 2);
    for (uint32_t i = 0; i < hits; i++) damage_draw(d, w, names, name_count, r);
    return w;
}

static void run_case(uint64_t seed, flipper *f) {
    rng r;
    damage d;
    world *w = draw_case(seed, &r, &d);
    shared->seed = seed;
    shared->cases++;
    if (d.count == 0) {
        operate_on(w, &r, &d, f);
        return;
    }
    tally *t = &shared->fields[d.hit[0].field];
    uint64_t noticed = t->noticed;
    bool told = d.count == 1 && look_at_rest(w, &d, t);
    operate_on(w, &r, &d, NULL);
    if (told) t->noticed = noticed; /* counted where neither attaching nor `check` told */
    else if (d.count == 1 && t->noticed == noticed && d.hit[0].lives) t->unseen++;
    else if (d.count == 1 && t->noticed == noticed) t->idle++;
}

static void explain(void *argument) {
    rng r;
    damage d;
    world *w = draw_case(*(uint64_t *)argument, &r, &d);
    printf("set %d", w->variant);
    for (uint32_t i = 0; i < d.count; i++)
        printf(" %s %u %#llx", names[d.hit[i].field].name, d.hit[i].index,
               (unsigned long long)d.hit[i].value);
    printf(d.count ? "\n" : " moving\n");
}

/* An explicit case: look, then operations in several orders. */
static void run_damage(uint64_t number, enum variant variant, const damage *d) {
    world *w = &worlds[variant];
    shared->seed = number;
    look_at_rest(w, d, &shared->fields[d->hit[0].field]);
    for (uint64_t i = 0; i < 40; i++) {
        rng r = {.state = i};
        shared->cases++;
        operate_on(w, &r, d, NULL);
    }
}

/* ------------------------------------------------------------------ children */

static void make_worlds(void) {
    for (int v = 0; v < VARIANTS; v++) world_make(&worlds[v], (enum variant)v);
    name_count = fields_of(&worlds[0], names);
}

/* Runs `body` in a child. True: it ended by itself. */
static bool in_child(void (*body)(void *), void *argument) {
    int status;
    fflush(stdout);
    pid_t pid = fork();
    NEED(pid >= 0);
    if (pid == 0) {
        make_worlds();
        body(argument);
        fflush(stdout);
        _exit(0);
    }
    NEED(waitpid(pid, &status, 0) == pid);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return true;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 2) exit(2);
    int signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    const char *what = "died";
    if (signal == SIGPROF) what = "worked without end";
    if (signal == SIGALRM) what = "slept without end";
    finding(what, signal ? signal : WEXITSTATUS(status));
    return false;
}

typedef struct range {
    uint64_t first, end;
} range;

static void run_range(void *argument) {
    const range *all = argument;
    flipper *f = flipper_new();
    for (uint64_t seed = all->first; seed < all->end; seed++) run_case(seed, f);
}

static void run_structures(void *argument) {
    const range *all = argument;
    shared->doing = "structures";
    for (uint64_t seed = all->first; seed < all->end; seed++) {
        limit(CPU_S, WALL_S);
        structures_case(seed);
    }
}

static void run_seeds(void (*body)(void *), uint64_t first, uint64_t count) {
    for (uint64_t at = first, end = first + count; at < end;) {
        range some = {at, at + BATCH < end ? at + BATCH : end};
        at = in_child(body, &some) ? some.end : shared->seed + 1;
    }
}

/* Lines of the corpus: `seed N`, `structures N`, or `set WORLD FIELD INDEX VALUE ...` */
static void run_line(void *argument) {
    char *line = argument, *rest;
    char *verb = strtok_r(line, " \n", &rest);
    if (strcmp(verb, "structures") == 0) {
        structures_case(strtoull(rest, NULL, 0));
        return;
    }
    if (strcmp(verb, "seed") == 0) {
        run_case(strtoull(rest, NULL, 0), flipper_new());
        return;
    }
    damage d = {.count = 0};
    unsigned variant = (unsigned)strtoul(strtok_r(NULL, " \n", &rest), NULL, 0);
    NEED(strcmp(verb, "set") == 0 && variant < VARIANTS);
    for (char *name; (name = strtok_r(NULL, " \n", &rest)) && name[0] != '#';) {
        char *index = strtok_r(NULL, " \n", &rest), *value = strtok_r(NULL, " \n", &rest);
        NEED(index && value);
        damage_set(&d, &worlds[variant], names, name_count, name, (uint32_t)strtoul(index, NULL, 0),
                   strtoull(value, NULL, 0));
    }
    NEED(d.count > 0);
    run_damage(shared->seed, (enum variant)variant, &d);
}

static void run_corpus(const char *path) {
    char line[4096];
    FILE *file = fopen(path, "r");
    NEED(file);
    for (uint64_t number = 1; fgets(line, sizeof line, file); number++) {
        if (line[0] == '#' || line[0] == '\n') continue;
        shared->seed = number;
        in_child(run_line, line);
    }
    fclose(file);
}

/* ------------------------------------------------------------------ the numbers */

static void print_numbers(void) {
    printf("total cases %llu flips %llu calls %llu findings %llu\n",
           (unsigned long long)shared->cases, (unsigned long long)shared->flips,
           (unsigned long long)shared->calls, (unsigned long long)shared->findings);
    printf("slowest %llu %llu %s\n", (unsigned long long)shared->slowest_ns,
           (unsigned long long)shared->slowest_seed, shared->slowest ? shared->slowest : "-");
    for (int i = 0; i < CODES; i++)
        if (shared->codes[i]) printf("code %d %llu\n", -i, (unsigned long long)shared->codes[i]);
    for (int i = 0; i < INVARIANTS; i++)
        if (shared->unmended[i])
            printf("unmended %d %llu %llu\n", i, (unsigned long long)shared->unmended[i],
                   (unsigned long long)shared->unmended_seed[i]);
    static const char *const roles[] = {"header", "truth", "derived", "advice", "protocol"};
    names[LIST_TALLY] = (field){.name = "SharedList", .role = DERIVED};
    names[DICT_TALLY] = (field){.name = "SharedDict", .role = DERIVED};
    names[RING_TALLY] = (field){.name = "SharedRing", .role = DERIVED};
    names[LOG_TALLY] = (field){.name = "SharedLog", .role = DERIVED};
    for (uint32_t i = 0; i < MOST_FIELDS; i++) {
        const tally *t = &shared->fields[i];
        if (!names[i].name) continue;
        const uint64_t columns[] = {t->cases,  t->idle,   t->refused, t->named,    t->noticed,
                                    t->unseen, t->misled, t->mended,  t->declined, t->lost};
        printf("field %s %s", names[i].name, roles[names[i].role]);
        for (int k = 0; k < 10; k++) printf(" %llu", (unsigned long long)columns[k]);
        printf("\n");
    }
}

int main(int argc, char **argv) {
    NEED(argc >= 2);
    setvbuf(stdout, NULL, _IOLBF, 0);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    NEED(shared != MAP_FAILED);
    world plain = {.pages = 64};
    NEED(lci_geometry_of(plain.pages, order_tested(), &plain.g) == LC_OK);
    plain.bytes = plain.g.end;
    name_count = fields_of(&plain, names);
    if (strcmp(argv[1], "seeds") == 0 && argc == 4)
        run_seeds(run_range, strtoull(argv[2], NULL, 0), strtoull(argv[3], NULL, 0));
    else if (strcmp(argv[1], "structures") == 0 && argc == 4)
        run_seeds(run_structures, strtoull(argv[2], NULL, 0), strtoull(argv[3], NULL, 0));
    else if (strcmp(argv[1], "explain") == 0 && argc == 3) {
        uint64_t seed = strtoull(argv[2], NULL, 0);
        return !in_child(explain, &seed);
    } else if (strcmp(argv[1], "corpus") == 0 && argc == 3) run_corpus(argv[2]);
    else NEED(strcmp(argv[1], "fields") == 0);
    print_numbers();
    return shared->findings != 0;
}
