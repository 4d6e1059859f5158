/* Mappings, life descriptors, and what a forked child is left with. */
#include "world.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define BYTES (64 * 1024)

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
    CHECK_EQ(lcs_populate(a, 5000, BYTES - 5000), LC_OK);
    CHECK_EQ(lcs_populate((uint8_t *)a + 64, 0, BYTES - 4096), LC_OK); /* as on an old kernel */
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

/* qemu's user emulation takes every advice and passes on none, also what a fork depends on. */
static bool advice_is_heard(void) {
    void *page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    bool heard = madvise(page, 4096, 12345) != 0;
    munmap(page, 4096);
    return heard;
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
    TEST(map_says_why_not),
    TEST(life_descriptors_are_recorded_and_closed),
    TEST(folders_and_what_is_in_them),
    TEST(fork_leaves_the_child_unattached),
    TEST(ready_and_retired_words),
    END_OF_TESTS,
};
