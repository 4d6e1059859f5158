#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "process.h"

#include "clients.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#define HUGE_BYTES ((uint64_t)2 << 20) /* where pages are 4 KiB; elsewhere collapsing is refused */
#define MEMORY_PREFERRED 1          /* MPOL_PREFERRED */
#define MEMORY_INTERLEAVE 3         /* MPOL_INTERLEAVE */
#define MEMORY_NODES_ALLOWED 4      /* MPOL_F_MEMS_ALLOWED */
#define MAX_NODES 4096
#define TMPFS 0x01021994u           /* TMPFS_MAGIC */
#define HUGETLBFS 0x958458f6u       /* HUGETLBFS_MAGIC */
#define MAX_LIFE_FDS 1024

/* One mutex for everything below. A fork takes it first, so no fork falls between opening a
 * description and recording it, or between mapping and MADV_DONTFORK. */
static pthread_mutex_t process_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t fork_once = PTHREAD_ONCE_INIT;
static int fork_error;
static struct life {
    int fd;
    dev_t device;
    ino_t inode;
} lives[MAX_LIFE_FDS];
static int life_count;
static const volatile uint32_t *fork_word;

static void before_fork(void) { pthread_mutex_lock(&process_mutex); }
static void after_fork_in_parent(void) { pthread_mutex_unlock(&process_mutex); }

/* Only close() and the mutex: the child of a threaded process may do little here. */
static void after_fork_in_child(void) {
    for (int i = 0; i < life_count; i++) close(lives[i].fd);
    life_count = 0;
    pthread_mutex_unlock(&process_mutex);
}

static void register_handlers(void) {
    fork_error = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
}

/* In a child that was forked past the handlers (clone, _Fork): its parent's descriptions, and with them the proof
 * of its parent's life. There are none where the handler has run. The child may have closed them itself, and
 * opened something else under these numbers. The mutex is held. */
static void forget_parent(void) {
    struct stat st;
    if (!fork_word || *fork_word == 1) return;
    for (int i = 0; i < life_count; i++) {
        const struct life *l = &lives[i];
        if (fstat(l->fd, &st) == 0 && st.st_dev == l->device && st.st_ino == l->inode) close(l->fd);
    }
    life_count = 0;
    fork_word = NULL;
}

static int enter(void) {
    pthread_once(&fork_once, register_handlers);
    if (fork_error) return LC_E_SYS - fork_error;
    pthread_mutex_lock(&process_mutex);
    forget_parent();
    return LC_OK;
}

static void leave(void) { pthread_mutex_unlock(&process_mutex); }

static size_t page_bytes(void) { return (size_t)sysconf(_SC_PAGESIZE); }

/* The parent's word reads 0 in a child for ever: the child's own attachments get a new page. */
static const volatile uint32_t *new_fork_word(void) {
    uint32_t *word = mmap(NULL, page_bytes(), PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (word == MAP_FAILED) return NULL;
    if (madvise(word, page_bytes(), MADV_WIPEONFORK) != 0) {
        munmap(word, page_bytes());
        return NULL;
    }
    *word = 1;
    return word;
}

const uint32_t *lcs_fork_word(void) {
    if (enter() != LC_OK) return NULL;
    if (!fork_word) fork_word = new_fork_word(); /* enter() has forgotten a parent's */
    const uint32_t *word = (const uint32_t *)fork_word;
    leave();
    return word;
}

/* ------------------------------------------------------------------ memory */

/* A place at which huge pages of an object can be huge pages of its mapping. Reserves 2 MiB more than
 * needed and unmaps what is before and after. MAP_FAILED: there is none. */
static void *huge_place(uint64_t bytes) {
    uint64_t size = page_bytes(), all = (bytes + size - 1) / size * size, most = all + HUGE_BYTES;
    uint8_t *got = mmap(NULL, most, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) return got;
    uint64_t before = (HUGE_BYTES - (uintptr_t)got % HUGE_BYTES) % HUGE_BYTES;
    if (before) munmap(got, before);
    munmap(got + before + all, most - before - all);
    return got + before;
}

/* In such a place; a hugetlbfs has its own. Where mapping over the place fails, it stays: the kernel may
 * have given it back before, and another thread may have got it. */
static void *map_shared(int fd, uint64_t bytes, int access) {
    struct statfs found;
    void *place = MAP_FAILED;
    bool placed_by_kernel = fstatfs(fd, &found) == 0 && (uint32_t)found.f_type == HUGETLBFS;
    if (bytes >= HUGE_BYTES && !placed_by_kernel) place = huge_place(bytes);
    if (place == MAP_FAILED) return mmap(NULL, bytes, access, MAP_SHARED, fd, 0);
    return mmap(place, bytes, access, MAP_SHARED | MAP_FIXED, fd, 0);
}

int lcs_map(int fd, uint64_t bytes, int writable, void **base) {
    int rc = enter();
    if (rc != LC_OK) return rc;
    void *got = map_shared(fd, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ);
    if (got == MAP_FAILED) {
        rc = LC_E_SYS - errno;
    } else if (madvise(got, bytes, MADV_DONTFORK) != 0) {
        rc = LC_E_SYS - errno;
        munmap(got, bytes);
    } else {
        *base = got;
    }
    leave();
    return rc;
}

int lcs_unmap(void *base, uint64_t bytes) {
    return munmap(base, bytes) == 0 ? LC_OK : LC_E_SYS - errno;
}

/* Through system calls: libnuma is not everywhere, and this needs one mask. One node is preferred,
 * never bound to: when it is full, memory of another is slower, while binding lets the kernel kill
 * a process although there is memory. The policy of a shared object stays with the object, and
 * holds for every process that gives it memory later. */
static int place_memory(void *base, uint64_t bytes, int node) {
#if defined(SYS_mbind) && defined(SYS_get_mempolicy)
    enum { BITS = 8 * sizeof(unsigned long) };
    unsigned long nodes[MAX_NODES / BITS] = {0};
    int policy = MEMORY_PREFERRED;
    if (node == LCS_ALL_NODES) {
        policy = MEMORY_INTERLEAVE;
        if (syscall(SYS_get_mempolicy, NULL, nodes, (unsigned long)MAX_NODES, NULL,
                    (unsigned long)MEMORY_NODES_ALLOWED) != 0)
            return LC_E_SYS - errno;
    } else {
        if (node < 0 || node >= MAX_NODES) return LC_E_RANGE;
        nodes[node / BITS] = 1ul << node % BITS;
    }
    if (syscall(SYS_mbind, base, bytes, policy, nodes, (unsigned long)MAX_NODES, 0) != 0)
        return LC_E_SYS - errno;
    return LC_OK;
#else
    (void)base, (void)bytes, (void)node;
    return LC_E_SYS - ENOSYS;
#endif
}

int lcs_advise(void *base, uint64_t bytes, int huge, int node) {
    int rc = LC_OK;
    if (huge && madvise(base, bytes, MADV_HUGEPAGE) != 0) rc = LC_E_SYS - errno;
    if (node != LCS_ANY_NODE) {
        int second = place_memory(base, bytes, node);
        if (rc == LC_OK) rc = second;
    }
    return rc;
}

int lcs_collapse(void *base, uint64_t bytes) {
    uint64_t whole = bytes / HUGE_BYTES * HUGE_BYTES;
    return !whole || madvise(base, whole, MADV_COLLAPSE) == 0 ? LC_OK : LC_E_SYS - errno;
}

int lcs_fallocate(int fd, uint64_t offset, uint64_t bytes) {
    if (fallocate(fd, 0, (off_t)offset, (off_t)bytes) == 0) return LC_OK;
    return errno == EINTR ? LC_E_INTR : LC_E_SYS - errno;
}

int lcs_populate(int fd, void *base, uint64_t offset, uint64_t bytes) {
    size_t page = page_bytes();
    uint64_t begin = offset / page * page;
    uint64_t end = offset + bytes;
    uint8_t *at = (uint8_t *)base + begin;
    if (madvise(at, end - begin, MADV_POPULATE_WRITE) == 0) return LC_OK;
    if (errno == EINTR) return LC_E_INTR;
    if (errno != EINVAL) return LC_E_SYS - errno;
    /* Before Linux 5.14. First the memory, slower and one caller at a time: touching a page for which there
     * is none is a SIGBUS. Adding nothing atomically also keeps what others write meanwhile. */
    int rc = lcs_fallocate(fd, begin, end - begin);
    for (; rc == LC_OK && begin < end; begin += page, at += page)
        atomic_fetch_or_explicit((_Atomic uint32_t *)at, 0, memory_order_relaxed);
    return rc;
}

int lcs_folder_kind(int fd, uint64_t *page) {
    struct statfs found;
    if (fstatfs(fd, &found) != 0) return LC_E_SYS - errno;
    *page = (uint64_t)found.f_bsize;
    switch ((uint32_t)found.f_type) {
    case TMPFS: return LCS_FOLDER_TMPFS;
    case HUGETLBFS: return LCS_FOLDER_HUGETLBFS;
    default: return LCS_FOLDER_OTHER;
    }
}

/* ------------------------------------------------------------------ descriptions */

#define LIFE_FOLDER_SHM (-1) /* no folder's descriptor: POSIX shared memory */

static int life_open(int folder, const char *name, int writable, int *fd) {
    *fd = -1;
    int rc = enter();
    if (rc != LC_OK) return rc;
    if (life_count == MAX_LIFE_FDS) {
        rc = LC_E_FULL;
    } else {
        /* O_NONBLOCK: a FIFO in its place must not hold us up; it is refused by its type later. */
        int flags = (writable ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
        int got = folder == LIFE_FOLDER_SHM ? shm_open(name, flags, 0)
                                            : openat(folder, name, flags);
        struct stat st;
        if (got < 0 || fstat(got, &st) != 0) {
            rc = LC_E_SYS - errno;
            if (got >= 0) close(got);
        } else {
            lives[life_count++] = (struct life){got, st.st_dev, st.st_ino};
            *fd = got;
        }
    }
    leave();
    return rc;
}

int lcs_life_open(const char *name, int writable, int *fd) {
    return life_open(LIFE_FOLDER_SHM, name, writable, fd);
}

int lcs_life_open_at(int folder, const char *name, int writable, int *fd) {
    *fd = -1;
    if (folder < 0) return LC_E_SYS - EBADF;
    return life_open(folder, name, writable, fd);
}

void lcs_life_close(int *fd) {
    if (*fd < 0 || enter() != LC_OK) return;
    for (int i = 0; i < life_count; i++) {
        if (lives[i].fd != *fd) continue;
        lives[i] = lives[--life_count];
        close(*fd);
        break;
    }
    *fd = -1;
    leave();
}

/* ------------------------------------------------------------------ attachments */

/* The PID namespace, or 0 where /proc cannot be used to look at its processes: not mounted, or
 * mounted by another namespace, whose numbers would mean other processes. */
static uint64_t own_pid_namespace(void) {
    char self[32];
    ssize_t n = readlink("/proc/self", self, sizeof self - 1);
    if (n <= 0) return 0;
    self[n] = 0;
    if (strtol(self, NULL, 10) != (long)getpid()) return 0;
    struct stat st;
    return stat("/proc/self/ns/pid", &st) == 0 ? (uint64_t)st.st_ino : 0;
}

uint64_t lcs_time_namespace(void) {
    struct stat st;
    if (stat("/proc/self/ns/time", &st) == 0) return (uint64_t)st.st_ino;
    return errno == ENOENT && stat("/proc/self/ns/pid", &st) == 0; /* 1: a kernel that has only one */
}

lcs_attachment *lcs_attachment_new(void *base, uint64_t bytes, int life_fd, uint32_t slot,
                                   uint32_t epoch, int readonly) {
    const uint32_t *word = lcs_fork_word();
    lcs_attachment *at = calloc(1, sizeof *at);
    if (!word || !at) {
        free(at);
        return NULL;
    }
    at->base = base;
    at->bytes = bytes;
    at->fork_word = word;
    at->life_fd = life_fd;
    at->slot = slot;
    at->epoch = epoch;
    at->readonly = readonly != 0;
    at->pid = (uint32_t)getpid();
    at->pidns = own_pid_namespace();
    at->time_namespace = lcs_time_namespace();
    pthread_mutex_init(&at->door, NULL);
    pthread_mutex_init(&at->rows, NULL);
    return at;
}

void lcs_attachment_close(lcs_attachment *at) { at->closed = 1; }

void lcs_attachment_free(lcs_attachment *at) {
    if (!at) return;
    pthread_mutex_destroy(&at->door);
    pthread_mutex_destroy(&at->rows);
    free(at);
}

uint32_t lcs_attachment_slot(const lcs_attachment *at) { return at->slot; }
uint32_t lcs_attachment_epoch(const lcs_attachment *at) { return at->epoch; }
int lcs_attachment_usable(const lcs_attachment *at) { return lcs_usable(at); }

/* ------------------------------------------------------------------ header words */

void lcs_ready_store(void *base) { lc_store_release(&((lcs_header *)base)->ready, 1); }
uint32_t lcs_ready_load(const void *base) {
    return lc_load_acquire(&((const lcs_header *)base)->ready);
}
void lcs_retire(void *base) { lc_store_release(&((lcs_header *)base)->retired, 1); }
