/* Stops a victim after every instruction of one operation, and asks each time what the others would
 * find if it died there.
 *
 *     stepper FILE PAGES SCENE STRIDE FOLDER DUMPS DRIVER
 *
 * Lays out a segment in FILE, attaches as a survivor, starts DRIVER under ptrace and executes what
 * it does between its two stops by single steps. After every STRIDE-th step that has changed the
 * segment it takes a copy, and
 *
 *   1. looks up every page that was ready before, in the copy as it is: nothing has been recovered.
 *      One that is missed must be among those that the operation takes away in the end;
 *   2. undoes the log in the copy (`lci_recover_copy`): `lci_check` must find it sound;
 *   3. takes the lock from the dead victim and reaps it, as a survivor does, in the copy: it must be
 *      sound again, hold no pin but the survivor's and those of tickets, what the victim was
 *      writing must be there whole or not at all, and every page that nobody pins can be had.
 *
 * A copy's byte locks lie in a file of their own, where nobody holds the victim's: there it is dead.
 * The survivor also asks for the real lock, where the victim holds it and lives, and must not get
 * it, above all in the steps before the victim has said who it is. Some recovered copies are written
 * to FOLDER, for the checker in Python. Prints its counts; 1: something was found, 2: it did not run. */
#include "scene.h"

#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/wait.h>

static scene real, copy;
static uint8_t *seen, *scratch;
static uint64_t bytes, pages;
static uint32_t victim;
static pid_t pid;
static uint32_t steps, changes, looked, asked, dumps, failures;

/* The pages that were ready before: their keys, and whether a lookup ever missed them. */
static struct {
    lc_key key;
    uint32_t page, gen;
    bool missed, present;
} stable[2 * MAX_KEYS];
static uint32_t stable_count;

#define FOUND(...)                                        \
    do {                                                  \
        if (++failures <= 5) {                            \
            fprintf(stderr, "step %u: ", steps);          \
            fprintf(stderr, __VA_ARGS__);                 \
            fputc('\n', stderr);                          \
        }                                                 \
    } while (0)

static void lay_out(const char *path) {
    lci_geometry g;
    NEED(lci_geometry_of(pages, &g) == LC_OK);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    NEED(fd >= 0 && ftruncate(fd, (off_t)g.end) == 0);
    uint8_t *base = mmap(NULL, g.end, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    NEED(base != MAP_FAILED && lci_format(base, g.end, pages, pages) == LC_OK);
    munmap(base, g.end);
    close(fd);
}

/* A copy of the segment with the survivor in it, and nobody else alive. */
static void prepare_copy(void) {
    bytes = real.bytes;
    seen = malloc(bytes);
    scratch = malloc(bytes);
    copy.bytes = bytes;
    uint8_t *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int life = memfd_create("life", MFD_CLOEXEC);
    NEED(seen && scratch && base != MAP_FAILED && life >= 0);
    memcpy(base, real.at->base, bytes);
    copy.at = lcs_attachment_new(base, bytes, life, real.at->slot, real.at->epoch, 0);
    NEED(copy.at);
    copy.at->pidns = 0; /* only the byte locks are asked who lives */
    copy.h = lci_open(copy.at, pages);
    NEED(copy.h);
}

static bool finds(scene *s, const lc_key *key) { return lci_peek1(s->h, key, 1, SCENE_NS) == 1; }

static void note_stable(void) {
    for (uint32_t number = 0; number < 2; number++)
        for (uint32_t i = 0; i < MAX_KEYS; i++) {
            lc_key key = scene_key(number, i);
            lc_found found;
            lc_dict_find(&real.h->dict, key.lo, key.hi, &found);
            if (found.node == LC_NIL || lci_state_of(found.word) != LCI_READY) break;
            stable[stable_count].key = key;
            stable[stable_count].page = found.node;
            stable[stable_count++].gen = found.gen;
        }
    NEED(stable_count > 8);
}

static void sound(const char *when, int quiet, lci_report *report) {
    NEED(lci_check(copy.at->base, bytes, pages, quiet, report) == LC_OK);
    if (report->broken) FOUND("%s: invariant %d, %s", when, report->broken, report->message);
}

static void dump(const char *folder) {
    char path[4096];
    snprintf(path, sizeof path, "%s/copy%u", folder, steps);
    FILE *out = fopen(path, "wb");
    NEED(out && fwrite(copy.at->base, 1, bytes, out) == bytes && fclose(out) == 0);
}

/* The victim's writing, after it was reaped: the run's prefix that is ready. */
static uint32_t written(uint32_t number, uint32_t n) {
    lc_key keys[MAX_KEYS];
    for (uint32_t i = 0; i < n; i++) keys[i] = scene_key(number, i);
    uint32_t ready = 0;
    for (uint32_t i = 0; i < n; i++) ready += finds(&copy, &keys[i]);
    return ready;
}

static void reap_in_copy(void) {
    lci_report report;
    uint32_t freed = 0;
    int rc = lci_reap_slot(copy.h, victim, LC_BLOCK, FOREVER);
    if (rc != 1) FOUND("reaping gave %d", rc);
    sound("after reaping", 1, &report);
    uint32_t ready = written(2, 6);
    if (ready != 0 && ready != 6) FOUND("after reaping %u of 6 written pages are ready", ready);
    uint32_t held = lc_load(&copy.h->root->ticket_used) ? report.pins : 0;
    if (report.pins != held) FOUND("after reaping %u pins are left", report.pins);
    /* Ready ones go from the leaves up, doomed ones with them; only a ticket's pins keep any. */
    rc = lci_evict_pages(copy.h, (uint32_t)pages, &freed, LC_BLOCK, FOREVER);
    if (rc != LC_OK) FOUND("evicting after reaping gave %d", rc);
    sound("after evicting", 1, &report);
    uint32_t left = report.writing + report.ready + report.doomed;
    if (held ? left > held : left) FOUND("%u pages cannot be had again", left);
}

/* What would the others find? */
static void look(const char *folder, uint32_t every) {
    lci_report report;
    memcpy(copy.at->base, scratch, bytes);
    for (uint32_t i = 0; i < stable_count; i++)
        if (!finds(&copy, &stable[i].key)) stable[i].missed = true;
    int undone = lci_recover_copy(copy.at->base, bytes, pages);
    if (undone < 0) FOUND("recovery gave %d", undone);
    sound("after recovery", 0, &report);
    if (every && looked % every == 0) {
        dump(folder);
        dumps++;
    }
    memcpy(copy.at->base, scratch, bytes); /* again from the victim's last store, by its survivor */
    reap_in_copy();
    looked++;
}

/* The victim holds the lock and lives: nobody else gets it. */
static void ask_for_lock(void) {
    lcs_lock *lock = lcs_lock_of(real.at);
    uint64_t both = lc_load(&lock->both);
    if ((both & LCS_LOCK_SLOT) != victim) return;
    bool unnamed = lc_load(&lock->holder) >> 32 != both >> 32;
    static uint32_t held[2]; /* each time costs 5 ms: the first few steps, and a sample */
    uint32_t n = held[unnamed]++;
    if (n >= 8 && n % 512) return;
    int rc = lci_grow(real.h, 0, LC_BLOCK, lcs_now_ns() + 1000000);
    if (rc != LC_E_TIMEOUT && rc != LC_E_INTR)
        FOUND("a lock whose owner lives was taken from it (%d), named %u", rc, !unnamed);
    asked++;
}

static int wait_for_victim(void) {
    int status;
    NEED(waitpid(pid, &status, 0) == pid);
    NEED(WIFSTOPPED(status));
    return WSTOPSIG(status);
}

static void start_victim(const char *driver, const char *path, const char *count, const char *name) {
    pid = fork();
    NEED(pid >= 0);
    if (pid == 0) {
        ptrace(PTRACE_TRACEME, 0, NULL, NULL);
        execl(driver, driver, path, count, name, (char *)NULL);
        _exit(127);
    }
    NEED(wait_for_victim() == SIGTRAP); /* the exec */
    NEED(ptrace(PTRACE_SETOPTIONS, pid, NULL, (void *)(long)PTRACE_O_EXITKILL) == 0);
    NEED(ptrace(PTRACE_CONT, pid, NULL, NULL) == 0);
    NEED(wait_for_victim() == SIGSTOP);
    /* The lock's last holder is now one who is no thread of the victim's. */
    NEED(lci_grow(real.h, 0, LC_BLOCK, FOREVER) == LC_OK);
}

static void compare_with_end(void) {
    uint32_t taken = 0;
    for (uint32_t i = 0; i < stable_count; i++) {
        const lci_page *p = &real.h->pages[stable[i].page];
        bool stays = finds(&real, &stable[i].key) && lc_load(&p->gen) == stable[i].gen;
        taken += !stays;
        if (stays && stable[i].missed) FOUND("page %u was missed and stays", stable[i].page);
    }
    printf("steps %u changes %u looked %u asked %u dumps %u stable %u taken %u failures %u\n", steps,
           changes, looked, asked, dumps, stable_count, taken, failures);
}

int main(int argc, char **argv) {
    NEED(argc == 8);
    uint32_t stride = (uint32_t)strtoul(argv[4], NULL, 10), every;
    pages = strtoull(argv[2], NULL, 10);
    every = (uint32_t)strtoul(argv[6], NULL, 10);
    lay_out(argv[1]);
    real = scene_attach(argv[1], pages, "survivor");
    prepare_copy();
    start_victim(argv[7], argv[1], argv[2], argv[3]);
    for (victim = 1; victim == real.at->slot; victim++) {}
    NEED(lc_load(&lcs_client_of(real.at, victim)->state) == LCS_CLIENT_TAKEN);
    note_stable();
    memcpy(seen, real.at->base, bytes);
    for (int signal = 0; signal != SIGSTOP; steps++) {
        NEED(ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL) == 0);
        signal = wait_for_victim();
        NEED(signal == SIGTRAP || signal == SIGSTOP);
        ask_for_lock();
        if (memcmp(seen, real.at->base, bytes) == 0) continue;
        memcpy(seen, real.at->base, bytes);
        if (changes++ % stride) continue;
        memcpy(scratch, seen, bytes);
        look(argv[5], every);
    }
    compare_with_end();
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    return failures != 0;
}
