#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "clients.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define PF_EXITING 0x4u /* of the kernel's task flags, field 9 of /proc/PID/task/TID/stat */

/* ------------------------------------------------------------------ byte locks */

static int set_lock(int fd, int64_t byte, short type) {
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    if (fcntl(fd, F_OFD_SETLK, &lock) == 0) return LC_OK;
    return errno == EAGAIN || errno == EACCES ? LC_E_BUSY : LC_E_SYS - errno;
}

int lcs_byte_lock(int fd, int64_t byte, int exclusive) {
    return set_lock(fd, byte, exclusive ? F_WRLCK : F_RDLCK);
}

int lcs_byte_unlock(int fd, int64_t byte) { return set_lock(fd, byte, F_UNLCK); }

int lcs_byte_held(int fd, int64_t byte, int64_t length) {
    struct flock lock = {
        .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = byte, .l_len = length};
    if (fcntl(fd, F_OFD_GETLK, &lock) != 0) return LC_E_SYS - errno;
    return lock.l_type != F_UNLCK;
}

/* ------------------------------------------------------------------ what /proc says */

typedef struct proc_stat {
    char state;
    uint32_t flags;
    uint64_t start_ticks;
} proc_stat;

/* LC_OK; LC_E_MISSING: no such process or thread; else LC_E_SYS - errno or LC_E_CORRUPT. */
static int read_stat(const char *path, proc_stat *out) {
    char text[1024];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return errno == ENOENT || errno == ESRCH ? LC_E_MISSING : LC_E_SYS - errno;
    ssize_t n = read(fd, text, sizeof text - 1);
    int error = errno;
    close(fd);
    if (n < 0) return error == ESRCH ? LC_E_MISSING : LC_E_SYS - error;
    text[n] = 0;
    /* The name stands in parentheses and may hold anything, parentheses too. */
    char *at = strrchr(text, ')');
    if (!at || at[1] != ' ') return LC_E_CORRUPT;
    at += 2;
    out->state = *at;
    for (int field = 3; field < 22; field++) {
        if (field == 9) out->flags = (uint32_t)strtoul(at, NULL, 10);
        at = strchr(at, ' ');
        if (!at) return LC_E_CORRUPT;
        at++;
    }
    out->start_ticks = strtoull(at, NULL, 10);
    return LC_OK;
}

static int process_stat(uint32_t pid, proc_stat *out) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    return read_stat(path, out);
}

uint64_t lcs_start_ticks(uint32_t pid) {
    proc_stat stat;
    return process_stat(pid, &stat) == LC_OK ? stat.start_ticks : 0;
}

/* /proc may hide processes (hidepid) or count from another time namespace, so a process that is
 * not there, or started at another time, proves nothing: then the byte lock decides. */
bool lcs_thread_gone(const lcs_attachment *at, uint32_t slot, uint32_t tid) {
    if (slot == 0 || slot >= LCS_SLOTS || tid == 0 || at->pidns == 0) return false;
    const lcs_client *client = lcs_client_of(at, slot);
    uint32_t pid = lc_load(&client->pid);
    if (lc_load(&client->pidns) != at->pidns || pid == 0) return false;
    uint64_t start = lc_load(&client->start_ticks);
    proc_stat stat;
    if (process_stat(pid, &stat) != LC_OK || stat.start_ticks != start) return false;
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/task/%u/stat", pid, tid);
    int rc = read_stat(path, &stat);
    bool gone = rc == LC_E_MISSING ||
                (rc == LC_OK && (strchr("ZXx", stat.state) || (stat.flags & PF_EXITING)));
    if (rc != LC_E_MISSING) return gone;
    /* The thread is gone from a process that was there: unless all of it has gone meanwhile. */
    return process_stat(pid, &stat) == LC_OK && stat.start_ticks == start;
}

/* ------------------------------------------------------------------ slots */

static uint64_t wall_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    return (uint64_t)ts.tv_sec * UINT64_C(1000000000) + (uint64_t)ts.tv_nsec;
}

int lcs_slot_alive(const lcs_attachment *at, uint32_t slot) {
    if (slot == 0 || slot >= LCS_SLOTS) return LC_E_RANGE;
    if (slot == at->slot) return 1; /* the kernel does not show us our own lock */
    return lcs_byte_held(at->life_fd, LCS_BYTE_SLOTS + slot, 1);
}

/* Both bytes are ours. Dying in here leaves a FREE slot with a raised epoch, or a TAKEN one whose
 * byte is free: both are what a reaper expects. */
static void fill(lcs_attachment *at, uint32_t slot, const char *role, uint32_t flags) {
    lcs_client *client = lcs_client_of(at, slot);
    lc_store(&client->epoch, lc_load(&client->epoch) + 1);
    lc_store(&client->pid, at->pid);
    lc_store(&client->flags, flags);
    lc_store(&client->pidns, at->pidns);
    lc_store(&client->start_ticks, lcs_start_ticks(at->pid));
    lc_store(&client->attached_ns, wall_ns());
    lc_store(&client->quarantine_until_ns, 0);
    uint64_t words[4] = {0};
    memcpy(words, role, strnlen(role, sizeof words - 1));
    for (int i = 0; i < 4; i++) lc_store(&client->role[i], words[i]);
    _Atomic uint64_t *counters[] = {&client->lookups,        &client->hit_pages,
                                    &client->missed_pages,   &client->reserved_pages,
                                    &client->evicted_pages,  &client->published_pages};
    for (int i = 0; i < 6; i++) lc_store(counters[i], 0);
    at->epoch = lc_load(&client->epoch);
    lc_store_release(&client->state, LCS_CLIENT_TAKEN);
    at->slot = slot;
}

static int mend_lock(const lcs_attachment *at, uint32_t slot) {
    return lcs_byte_lock(at->life_fd, LCS_BYTE_MEND + slot, 1);
}

void lcs_slot_mended(const lcs_attachment *at, uint32_t slot) {
    lcs_byte_unlock(at->life_fd, LCS_BYTE_MEND + slot);
}

/* The client's own byte is looked at twice: first because most clients live, then because only
 * under the mending byte no new client can take the slot. */
int lcs_slot_mend(const lcs_attachment *at, uint32_t slot) {
    int held = lcs_byte_held(at->life_fd, LCS_BYTE_SLOTS + slot, 1);
    if (held != 0) return held < 0 ? held : LC_E_BUSY;
    LC_PAUSE(LC_AT_DEAD_SEEN);
    int rc = mend_lock(at, slot);
    if (rc != LC_OK) return rc;
    held = lcs_byte_held(at->life_fd, LCS_BYTE_SLOTS + slot, 1);
    if (held == 0) return LC_OK;
    lcs_slot_mended(at, slot);
    return held < 0 ? held : LC_E_BUSY;
}

/* LC_E_BUSY: not free, or another process is at it. Under the mending byte no other process makes
 * the slot TAKEN, so the life byte that we lock is never that of a client that died in it
 * meanwhile. */
static int claim_one(lcs_attachment *at, uint32_t slot, const char *role, uint32_t flags) {
    const lcs_client *client = lcs_client_of(at, slot);
    /* Stale is harmless: a slot freed this instant is found by the next attempt. */
    if (lc_load_acquire(&client->state) != LCS_CLIENT_FREE) return LC_E_BUSY;
    int rc = mend_lock(at, slot);
    if (rc != LC_OK) return rc;
    bool vacant = lc_load_acquire(&client->state) == LCS_CLIENT_FREE;
    rc = vacant ? lcs_byte_lock(at->life_fd, LCS_BYTE_SLOTS + slot, 1) : LC_E_BUSY;
    if (rc == LC_OK) fill(at, slot, role, flags);
    lcs_slot_mended(at, slot);
    return rc;
}

int lcs_slot_claim(lcs_attachment *at, const char *role, uint32_t flags) {
    int rc = lcs_usable(at);
    if (rc != LC_OK) return rc;
    if (at->readonly) return LC_E_READONLY;
    if (at->slot) return LC_E_TWICE;
    for (uint32_t slot = 1; slot < LCS_SLOTS; slot++) {
        rc = claim_one(at, slot, role, flags);
        if (rc == LC_OK) return (int)slot;
        if (rc != LC_E_BUSY) return rc;
    }
    return LC_E_FULL;
}

static void free_slot(lcs_client *client) {
    lc_store(&client->epoch, lc_load(&client->epoch) + 1);
    lc_store_release(&client->state, LCS_CLIENT_FREE);
}

int lcs_slot_release(lcs_attachment *at) {
    if (*at->fork_word != 1) return LC_E_FORKED;
    if (at->closed) return LC_E_CLOSED;
    uint32_t slot = at->slot;
    if (slot == 0 || slot >= LCS_SLOTS) return LC_E_MISSING;
    at->slot = 0;
    lcs_client *client = lcs_client_of(at, slot);
    if (lc_load(&client->epoch) != at->epoch) return LC_E_LOST; /* not ours now */
    free_slot(client);
    return lcs_byte_unlock(at->life_fd, LCS_BYTE_SLOTS + slot);
}

int lcs_slot_free_dead(lcs_attachment *at, uint32_t slot) {
    int rc = lcs_usable(at);
    if (rc != LC_OK) return rc;
    if (at->readonly) return LC_E_READONLY;
    if (slot == 0 || slot >= LCS_SLOTS || slot == at->slot) return LC_E_RANGE;
    lcs_client *client = lcs_client_of(at, slot);
    if (lc_load_acquire(&client->state) != LCS_CLIENT_TAKEN) return LC_E_MISSING;
    rc = lcs_slot_mend(at, slot);
    if (rc != LC_OK) return rc;
    bool taken = lc_load_acquire(&client->state) == LCS_CLIENT_TAKEN;
    if (taken) free_slot(client);
    lcs_slot_mended(at, slot);
    return taken ? LC_OK : LC_E_MISSING;
}
