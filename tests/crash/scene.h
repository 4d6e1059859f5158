/* What the driver and the stepper share: the segment's file, its keys, and how one attaches.
 *
 * The file is a segment as the core lays it out; the header says only what the core reads of it. */
#ifndef SCENE_H
#define SCENE_H

#include "index.h"
#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

/* The entry points, which only Python calls otherwise: lightcache/_native.py declares them too. */
int lci_format(uint8_t *base, uint64_t bytes, uint64_t pages, uint64_t grown);
lci_handle *lci_open(lcs_attachment *at, uint64_t pages);
int lci_grow(lci_handle *h, uint32_t pages, int wait, uint64_t deadline);
int lci_peek1(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ns);
int lci_match1(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ns, lci_lease *lease);
int lci_release(lci_handle *h, lci_lease *lease);
int lci_reserve(lci_handle *h, lci_reserve_op *op, const lc_key *keys, uint32_t n, uint32_t start,
                int32_t *page, uint8_t *status, int wait, uint64_t deadline);
int lci_unreserve(lci_handle *h, lci_reserve_op *op, const int32_t *page, const uint8_t *status,
                  uint32_t n);
int lci_publish(lci_handle *h, uint32_t rid, uint32_t gen, uint32_t shard, const int32_t *pages,
                uint32_t n);
int lci_abandon(lci_handle *h, uint32_t rid, uint32_t gen, int wait, uint64_t deadline);
int lci_evict_pages(lci_handle *h, uint32_t want, uint32_t *freed, int wait, uint64_t deadline);
int lci_clear(lci_handle *h, lci_ns_ref ref, int wait, uint64_t deadline);
int lci_ticket_give(lci_handle *h, const int32_t *pages, uint32_t n, uint32_t rid, uint32_t rgen,
                    uint64_t adopters, uint64_t expires, lci_ticket_ref *ref, int wait,
                    uint64_t deadline);
int lci_reap_slot(lci_handle *h, uint32_t slot, int wait, uint64_t deadline);
int lci_check(uint8_t *base, uint64_t bytes, uint64_t pages, int quiet, lci_report *out);
int lci_recover_copy(uint8_t *base, uint64_t bytes, uint64_t pages);

#define FOREVER INT64_MAX
#define MAX_KEYS 512

#define NEED(what)                                                                     \
    do {                                                                               \
        if (!(what)) {                                                                 \
            fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #what, errno); \
            exit(2);                                                                   \
        }                                                                              \
    } while (0)

/* Key i of a run of prompts; few buckets, so that chains have several links. */
static inline lc_key scene_key(uint32_t run, uint32_t i) {
    uint64_t mixed = (UINT64_C(0x9E3779B97F4A7C15) * (run * 1000 + i + 1)) ^ (run * 7919);
    return (lc_key){.lo = (mixed & ~UINT64_C(0xffff)) | (mixed >> 60 & 7), .hi = mixed * 31 + run};
}

typedef struct scene {
    lcs_attachment *at;
    lci_handle *h;
    uint64_t bytes;
} scene;

/* Attach to the file as a client with a slot of its own. */
static inline scene scene_attach(const char *path, uint64_t pages, const char *role) {
    lci_geometry g;
    scene s;
    void *base;
    NEED(lci_geometry_of(pages, &g) == LC_OK);
    int fd = open(path, O_RDWR | O_CLOEXEC), life = open(path, O_RDWR | O_CLOEXEC);
    NEED(fd >= 0 && life >= 0);
    s.bytes = g.end;
    NEED(lcs_map(fd, g.end, 1, &base) == LC_OK);
    close(fd);
    s.at = lcs_attachment_new(base, g.end, life, 0, 0, 0);
    NEED(s.at && lcs_slot_claim(s.at, role, 0) > 0);
    s.h = lci_open(s.at, pages);
    NEED(s.h);
    return s;
}

/* The default namespace of a fresh index. */
#define SCENE_NS ((lci_ns_ref)(1u << 8))

typedef struct run { /* a reservation of keys [0, n) of one run */
    lc_key keys[MAX_KEYS];
    int32_t page[MAX_KEYS], fresh[MAX_KEYS];
    uint8_t status[MAX_KEYS];
    uint32_t n, made;
    lci_reserve_op op;
} run;

static inline void run_reserve(scene *s, run *r, uint32_t number, uint32_t n, uint32_t shards) {
    memset(r, 0, sizeof *r);
    for (uint32_t i = 0; i < n; i++) r->keys[i] = scene_key(number, i);
    r->n = n;
    r->op = (lci_reserve_op){.shards = shards, .ns = SCENE_NS};
    NEED(lci_reserve(s->h, &r->op, r->keys, n, 0, r->page, r->status, LC_BLOCK, FOREVER) >= 0);
    for (uint32_t i = 0; i < n; i++)
        if (r->status[i] == LCI_NEW) r->fresh[r->made++] = r->page[i];
}

static inline void run_publish(scene *s, run *r, uint32_t shard) {
    NEED(lci_publish(s->h, r->op.rid, r->op.gen, shard, r->fresh, r->made) >= 0);
}

static inline void run_unpin(scene *s, run *r) {
    NEED(lci_unreserve(s->h, &r->op, r->page, r->status, r->n) == LC_OK);
}

static inline void run_fill(scene *s, run *r, uint32_t number, uint32_t n) {
    run_reserve(s, r, number, n, 1);
    run_publish(s, r, 0);
    run_unpin(s, r);
}

#endif
