/* What a process has once: mappings, its open descriptions, and how it notices a fork.
 *
 * Linked into lightcache.shm._shm only. The other libraries get an `lcs_attachment` from it. */
#ifndef LC_PROCESS_H
#define LC_PROCESS_H

#include "lc_base.h"

/* A word that is 1 in this process and 0 in every child forked after this call, however it was
 * forked: its page is wiped on fork. A child that asks gets a new word. NULL: out of memory. */
LC_API const uint32_t *lcs_fork_word(void);

/* Map `bytes` of `fd` shared into `*base`; forked children do not inherit the mapping. The
 * descriptor may be closed afterwards and is never duplicated. */
LC_API int lcs_map(int fd, uint64_t bytes, int writable, void **base);
LC_API int lcs_unmap(void *base, uint64_t bytes);

/* Advice before first use: huge pages, and memory of one node where there is room (its number), of
 * all nodes this process may use in turn (LCS_ALL_NODES), or as it comes (LCS_ANY_NODE).
 * Advice only: an error says what was refused, and the mapping works all the same. */
#define LCS_ANY_NODE (-1)
#define LCS_ALL_NODES (-2)
LC_API int lcs_advise(void *base, uint64_t bytes, int huge, int node);

/* Bring memory that the object has into huge pages, as much as there are (Linux 6.1; also where shmem_enabled
 * is "never"): every mapping of it has them from then on. Advice: an error says what was refused, and
 * nothing else changes. Takes 2 to 3 seconds for 1 GiB; signals do not end it. */
LC_API int lcs_collapse(void *base, uint64_t bytes);

/* Give the range its pages now; blocks, about a second for 4 GiB on one thread. `base` maps the object
 * from its begin, `fd` is open on it for writing: a kernel before 5.14 cannot populate a mapping without a
 * signal where there is no memory, so there the range is allocated first. Where there is none: LC_E_SYS -
 * ENOMEM, EFAULT or (before 5.14) ENOSPC, and part of the range may have its pages. LC_E_INTR after a
 * signal: call again. */
LC_API int lcs_populate(int fd, void *base, uint64_t offset, uint64_t bytes);

/* Allocate the range of the object. LC_E_SYS - ENOSPC, LC_E_INTR after a signal (nothing lost). */
LC_API int lcs_fallocate(int fd, uint64_t offset, uint64_t bytes);

/* What kind of file system the open folder (or file) `fd` is on, and its page size in `*page`. */
enum lcs_folder { LCS_FOLDER_OTHER = 0, LCS_FOLDER_TMPFS = 1, LCS_FOLDER_HUGETLBFS = 2 };
LC_API int lcs_folder_kind(int fd, uint64_t *page);

/* Open a description of the POSIX shared memory object `name` ("/lightcache.x") for byte locks
 * into `*fd`. It must never be mapped or duplicated. Forked children close it at once: one that
 * kept it would keep its parent's locks past its parent's death. LC_E_FULL: 1024 are open. */
LC_API int lcs_life_open(const char *name, int writable, int *fd);

/* The same of the object `name` (no slash) in an open folder. */
LC_API int lcs_life_open_at(int folder, const char *name, int writable, int *fd);

/* Close `*fd` and set it to -1; nothing happens for a number this process did not open so. */
LC_API void lcs_life_close(int *fd);

/* This process's time namespace: its inode, 1 on a kernel without them (before 5.6), 0 where /proc does
 * not say. Each has its own offsets of CLOCK_MONOTONIC and of when processes started. */
LC_API uint64_t lcs_time_namespace(void);

/* A record of one attach, to be handed to every call of the structures. `life_fd` stays the
 * caller's. NULL: out of memory. */
LC_API lcs_attachment *lcs_attachment_new(void *base, uint64_t bytes, int life_fd, uint32_t slot,
                                          uint32_t epoch, int readonly);
LC_API void lcs_attachment_close(lcs_attachment *at); /* later calls: LC_E_CLOSED */
LC_API void lcs_attachment_free(lcs_attachment *at);
LC_API uint32_t lcs_attachment_slot(const lcs_attachment *at);
LC_API uint32_t lcs_attachment_epoch(const lcs_attachment *at);
LC_API int lcs_attachment_usable(const lcs_attachment *at); /* what every entry point checks */

/* `ready`: stored last, with release; a process that loads 1 with acquire sees the whole layout. */
LC_API void lcs_ready_store(void *base);
LC_API uint32_t lcs_ready_load(const void *base);
LC_API void lcs_retire(void *base);

/* The layout facts of this library: see facts.h. A static string. */
LC_API const char *lcs_layout(void);

#endif
