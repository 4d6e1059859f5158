/* Mappings, life descriptors, and what a forked child is left with. */
#include "world.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define BYTES (64 * 1024)
#define MIB (1 << 20)
#define POPULATE_WRITE 23

/* In this program the kernel may be one before 5.14, which knows no MADV_POPULATE_WRITE. */
static bool populates = true;

int madvise(void *at, size_t bytes, int advice) {
    if (advice == POPULATE_WRITE && !populates) return errno = EINVAL, -1;
    return (int)syscall(SYS_madvise, at, bytes, advice);
}

static void map_shares_memory(void) {
    void *a, *b;
    int fd = memfd_create("core_tests", MFD_CLOEXEC);
    CHECK(ftruncate(fd, BYTES) == 0);
    CHECK_EQ(lcs_fallocate(fd, 0, BYTES), LC_OK);
    CHECK_EQ(lcs_map(fd, BYTES, 1, &a), LC_OK);
    CHECK_EQ(lcs_map(fd, BYTES, 0, &b), LC_OK);
    CHECK(a != b);
    *(volatile uint8_t *)a = 77;
    CHECK_EQ(*(volatile uint8_t *)b, 77);
    CHECK_EQ(lcs_populate(fd, a, 5000, BYTES - 5000), LC_OK);
    populates = false;
    CHECK_EQ(lcs_populate(fd, a, 5000, BYTES - 5000), LC_OK);
    CHECK_EQ(lcs_populate(-1, a, 0, BYTES), LC_E_SYS - EBADF);
    populates = true;
    CHECK_EQ(*(volatile uint8_t *)b, 77);
    (void)lcs_advise(a, BYTES, 1, LCS_ALL_NODES); /* advice may be refused, and changes nothing */
    (void)lcs_advise(a, BYTES, 0, 0);
    CHECK(lcs_advise(a, BYTES, 0, 1 << 20) < 0);
    CHECK_EQ(lcs_advise(a, BYTES, 0, LCS_ANY_NODE), LC_OK);
    CHECK_EQ(*(volatile uint8_t *)b, 77);
    CHECK_EQ(lcs_unmap(a, BYTES), LC_OK);
    CHECK_EQ(lcs_unmap(b, BYTES), LC_OK);
    close(fd);
}

/* Some bytes more than three huge pages: both mappings begin where a huge page may, and end where asked. */
static void large_maps_are_where_huge_pages_fit(void) {
    uint64_t bytes = 6 * MIB + 5000;
    uint8_t *a, *b;
    int fd = memfd_create("core_tests", MFD_CLOEXEC);
    CHECK_EQ(lcs_fallocate(fd, 0, bytes), LC_OK);
    CHECK_EQ(lcs_map(fd, bytes, 1, (void **)&a), LC_OK);
    CHECK_EQ(lcs_map(fd, bytes, 0, (void **)&b), LC_OK);
    CHECK_EQ((uintptr_t)a % (2 * MIB), 0);
    CHECK_EQ((uintptr_t)b % (2 * MIB), 0);
    for (uint64_t i = 0; i < bytes; i += 1000) a[i] = (uint8_t)(i / 1000);
    (void)lcs_collapse(a, bytes); /* may be refused, and changes nothing */
    for (uint64_t i = 0; i < bytes; i += 1000) CHECK_EQ(b[i], (uint8_t)(i / 1000));
    CHECK_EQ(lcs_collapse(a, MIB), LC_OK); /* less than one: nothing to do */
    CHECK(lcs_collapse(a + 1, bytes) < 0);
    CHECK_EQ(lcs_unmap(a, bytes), LC_OK);
    CHECK_EQ(lcs_unmap(b, bytes), LC_OK);
    close(fd);
}

/* The exit status of a child with a tmpfs of 1 MiB of its own; 100: it may not have one. */
static int in_a_small_tmpfs(void) {
    void *base;
    if (unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) ||
        mount("none", "/tmp", "tmpfs", 0, "size=1m"))
        return 100;
    int fd = open("/tmp/pool", O_RDWR | O_CREAT | O_EXCL, 0600);
    if (fd < 0 || ftruncate(fd, 4 * MIB) || lcs_map(fd, 4 * MIB, 1, &base)) return 101;
    for (int old = 0; old < 2; old++) {
        populates = !old;
        if (lcs_populate(fd, base, 0, MIB / 2) != LC_OK) return 1 + old;
        struct stat found;
        if (fstat(fd, &found)) return 102;
        if (found.st_blocks * 512 < MIB / 2) continue; /* qemu takes the advice and does nothing */
        int rc = lcs_populate(fd, base, MIB / 2, 3 * MIB);
        if (rc != LC_E_SYS - (old ? ENOSPC : EFAULT) && rc != LC_E_SYS - ENOMEM) return 3 + old;
    }
    return 0;
}

/* Also where the kernel cannot populate a mapping: an error, never a signal. */
static void populating_what_there_is_no_memory_for(void) {
    int status;
    pid_t child = fork();
    if (child == 0) _exit(in_a_small_tmpfs());
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    if (WEXITSTATUS(status) == 100)
        fprintf(stderr, "%s: skipped: a tmpfs cannot be mounted here\n", check_running);
    else CHECK_EQ(WEXITSTATUS(status), 0);
}

static void map_says_why_not(void) {
    void *base = NULL;
    CHECK_EQ(lcs_map(-1, BYTES, 1, &base), LC_E_SYS - EBADF);
    CHECK(base == NULL);
    CHECK_EQ(lcs_fallocate(-1, 0, 1), LC_E_SYS - EBADF);
    CHECK_EQ(lcs_unmap((void *)1, BYTES), LC_E_SYS - EINVAL);
}

static void life_descriptors_are_recorded_and_closed(void) {
    char name[64];
    int fd = 0, none = -1;
    snprintf(name, sizeof name, "/lightcache.core-tests-%d", getpid());
    CHECK_EQ(lcs_life_open(name, 1, &fd), LC_E_SYS - ENOENT);
    CHECK_EQ(fd, -1);
    int made = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    CHECK(made >= 0);
    CHECK_EQ(lcs_life_open(name, 1, &fd), LC_OK);
    CHECK(fd >= 0 && fcntl(fd, F_GETFD) == FD_CLOEXEC);
    int kept = fd, other = made;
    lcs_life_close(&other); /* not one of ours: stays open */
    CHECK_EQ(other, -1);
    CHECK(fcntl(made, F_GETFD) >= 0);
    lcs_life_close(&fd);
    CHECK_EQ(fd, -1);
    CHECK(fcntl(kept, F_GETFD) < 0);
    lcs_life_close(&none);
    CHECK_EQ(lcs_life_open(name, 0, &fd), LC_OK);
    CHECK_EQ(fcntl(fd, F_GETFL) & O_ACCMODE, O_RDONLY);
    lcs_life_close(&fd);
    shm_unlink(name);
    close(made);
}

static void folders_and_what_is_in_them(void) {
    uint64_t page = 0;
    int fd, folder = open("/dev/shm", O_RDONLY | O_DIRECTORY), proc = open("/proc", O_RDONLY);
    char name[64];
    snprintf(name, sizeof name, "/lightcache.core-tests-%d", getpid());
    CHECK(folder >= 0 && proc >= 0);
    CHECK_EQ(lcs_folder_kind(folder, &page), LCS_FOLDER_TMPFS);
    CHECK_EQ(page, 4096);
    CHECK_EQ(lcs_folder_kind(proc, &page), LCS_FOLDER_OTHER);
    CHECK_EQ(lcs_folder_kind(-1, &page), LC_E_SYS - EBADF);
    CHECK_EQ(lcs_life_open_at(folder, name + 1, 1, &fd), LC_E_SYS - ENOENT);
    int made = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    CHECK_EQ(lcs_life_open_at(folder, name + 1, 1, &fd), LC_OK);
    CHECK(fcntl(fd, F_GETFD) == FD_CLOEXEC);
    lcs_life_close(&fd);
    CHECK(symlinkat(name + 1, folder, "lightcache.core-tests-link") == 0);
    CHECK_EQ(lcs_life_open_at(folder, "lightcache.core-tests-link", 1, &fd), LC_E_SYS - ELOOP);
    CHECK_EQ(lcs_life_open_at(-1, name + 1, 1, &fd), LC_E_SYS - EBADF);
    CHECK_EQ(fd, -1);
    unlinkat(folder, "lightcache.core-tests-link", 0);
    shm_unlink(name);
    close(made);
    close(folder);
    close(proc);
}

typedef struct segment_of_parent {
    char name[64];
    int life, other;
} segment_of_parent;

/* The child's exit status: the number of the first thing that was wrong, or 0. */
static int in_child(client *c, int life) {
    if (fcntl(life, F_GETFD) >= 0) return 1; /* would keep the parent's lock past its death */
    if (lcs_attachment_usable(c->at) != LC_E_FORKED) return 2;
    const uint32_t *word = lcs_fork_word();
    if (!word || *word != 1 || word == c->at->fork_word) return 3;
    unsigned char there;
    if (mincore(c->at->base, 4096, &there) == 0) return 4; /* the mapping was not inherited */
    return 0;
}

static void fork_leaves_the_child_unattached(void) {
    if (!advice_is_heard()) return;
    char name[64];
    int fd, status;
    void *base;
    snprintf(name, sizeof name, "/lightcache.core-tests-%d", getpid());
    int made = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
    CHECK(made >= 0 && ftruncate(made, BYTES) == 0);
    CHECK_EQ(lcs_life_open(name, 1, &fd), LC_OK);
    CHECK_EQ(lcs_map(made, BYTES, 1, &base), LC_OK);
    client c = {.life = fd, .at = lcs_attachment_new(base, BYTES, fd, 0, 0, 0)};
    CHECK_EQ(lcs_slot_claim(c.at, "parent", 0), 1);
    pid_t child = fork();
    if (child == 0) _exit(in_child(&c, fd));
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
    CHECK_EQ(lcs_attachment_usable(c.at), LC_OK);
    CHECK_EQ(lcs_byte_held(made, LCS_BYTE_SLOTS + 1, 1), 1);
    CHECK_EQ(lcs_slot_release(c.at), LC_OK);
    lcs_attachment_free(c.at);
    lcs_life_close(&fd);
    CHECK_EQ(lcs_unmap(base, BYTES), LC_OK);
    shm_unlink(name);
    close(made);
}

/* What a child finds that no handler has prepared: its parent's life, until it first calls us. */
static int in_raw_child(const segment_of_parent *parent) {
    if (fcntl(parent->life, F_GETFD) < 0) return 1;
    if (dup2(STDERR_FILENO, parent->other) != parent->other) return 6; /* another file by now */
    const uint32_t *word = lcs_fork_word();
    if (!word || *word != 1) return 2;
    if (fcntl(parent->life, F_GETFD) >= 0) return 3;
    if (fcntl(parent->other, F_GETFD) < 0) return 7;
    int own;
    if (lcs_life_open(parent->name, 1, &own) != LC_OK) return 4;
    if (lcs_fork_word() != word || fcntl(own, F_GETFD) < 0) return 5;
    return 0;
}

static void child_forked_past_the_handlers_lets_its_parents_life_go(void) {
    if (!advice_is_heard()) return;
    segment_of_parent parent;
    int status;
    snprintf(parent.name, sizeof parent.name, "/lightcache.core-tests-%d", getpid());
    int made = shm_open(parent.name, O_RDWR | O_CREAT | O_EXCL, 0600);
    CHECK(made >= 0 && lcs_fork_word() != NULL);
    CHECK_EQ(lcs_life_open(parent.name, 1, &parent.life), LC_OK);
    CHECK_EQ(lcs_life_open(parent.name, 0, &parent.other), LC_OK);
    pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (child == 0) _exit(in_raw_child(&parent));
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
    CHECK(fcntl(parent.life, F_GETFD) >= 0);
    lcs_life_close(&parent.life);
    lcs_life_close(&parent.other);
    shm_unlink(parent.name);
    close(made);
}

static void ready_and_retired_words(void) {
    segment s = segment_make(4096);
    lcs_header *header = (lcs_header *)s.base;
    lc_store(&header->ready, 0);
    CHECK_EQ(lcs_ready_load(s.base), 0);
    lcs_ready_store(s.base);
    CHECK_EQ(lcs_ready_load(s.base), 1);
    lcs_retire(s.base);
    CHECK_EQ(lc_load(&header->retired), 1);
    lcs_attachment_free(NULL);
    segment_end(&s);
}

const test process_tests[] = {
    TEST(map_shares_memory),
    TEST(large_maps_are_where_huge_pages_fit),
    TEST(populating_what_there_is_no_memory_for),
    TEST(map_says_why_not),
    TEST(life_descriptors_are_recorded_and_closed),
    TEST(folders_and_what_is_in_them),
    TEST(fork_leaves_the_child_unattached),
    TEST(child_forked_past_the_handlers_lets_its_parents_life_go),
    TEST(ready_and_retired_words),
    END_OF_TESTS,
};
