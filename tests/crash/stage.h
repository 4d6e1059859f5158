/* A stage: a segment in a file, with a pool behind it, and the clients that play on it.
 *
 *     | segment as the core lays it out | stamps: the pool's bytes | notes |
 *
 * A page's bytes are STAMP_WORDS words made from its key, so whoever finds a page ready can say
 * whether it was written, and whole. The victim is a process of its own; all others are clients of
 * the stepper's process, each with a description of its own for its byte. */
#ifndef STAGE_H
#define STAGE_H

#include "../native/entry.h"
#include "clients.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#define NEED(what)                                                                       \
    do {                                                                                 \
        if (!(what)) {                                                                   \
            fprintf(stderr, "%s:%d: %s (errno %d)\n", __FILE__, __LINE__, #what, errno); \
            exit(2);                                                                     \
        }                                                                                \
    } while (0)

#define MAX_KEYS 128
#define STAMP_WORDS 4
#define OTHERS 4
#define SCENE_NS ((lci_ns_ref)(1u << 8)) /* the default namespace of a fresh index */
#define CROWDED 1000                     /* runs from here on: all keys in one bucket */

typedef struct run { /* a reservation of the first n keys of a run */
    lc_key keys[MAX_KEYS];
    int32_t page[MAX_KEYS], fresh[MAX_KEYS];
    uint8_t status[MAX_KEYS];
    uint32_t n, made;
    lci_reserve_op op;
} run;

typedef struct hold { /* a lease of the first n keys of a run */
    lc_key keys[MAX_KEYS];
    lci_lease lease;
    int32_t pages[2 * MAX_KEYS];
} hold;

/* What scene and victim tell each other, in the file: slots, handles, how far it has come. */
typedef struct notes {
    uint32_t over, steps; /* the operation has ended; instructions so far */
    uint32_t victim, other[OTHERS];
    lci_ticket_ref ticket;
    lci_ns_ref ns;
    uint32_t rid, gen;
} notes;

typedef struct actor {
    const char *path;
    uint64_t pages;
    lcs_attachment *at;
    lci_handle *h;
    uint64_t *stamps;
    notes *notes;
    run writing; /* op.gen 0: nothing */
    hold held;
    bool stopped;  /* in the middle of a call: it does not go on, it dies in the end */
    bool dies_too; /* when the victim does, at the same instant */
} actor;

typedef struct stage {
    const char *path; /* NULL: a copy in memory */
    int file;         /* whose bytes are locked */
    uint8_t *base;
    uint64_t bytes, pages;
    lci_geometry g;
    uint64_t *stamps;
    notes *notes;
    actor reader; /* read-only */
    actor survivor;
    actor other[OTHERS];
    uint32_t others;
} stage;

/* Where the parts behind the segment lie, and where the file ends. */
static inline uint64_t stage_up(uint64_t n) { return (n + 4095) / 4096 * 4096; }
static inline uint64_t stage_pool(const lci_geometry *g) { return stage_up(g->end); }
static inline uint64_t stage_notes(const lci_geometry *g) {
    return stage_pool(g) + stage_up(g->pages * STAMP_WORDS * 8);
}
static inline uint64_t stage_bytes(const lci_geometry *g) {
    return stage_notes(g) + stage_up(sizeof(notes));
}

/* stage.c */
stage *stage_open(const char *path, uint64_t pages, uint64_t grown);
stage *stage_copy(const stage *real);
void stage_refresh(stage *copy, const stage *real, const uint8_t *bytes);
void stage_close(stage *s);
actor *stage_other(stage *s, uint32_t flags);
void stage_die(stage *s, actor *a);
void stage_die_too(stage *s);
void stage_revive(stage *s, actor *a);
bool stage_alive(const stage *s, uint32_t slot);

/* deeds.c: attaching, and what actors do in one call. Each stops the program when it fails. */
void actor_map(actor *a, const char *path, uint64_t pages);
void actor_claim(actor *a, const char *role, uint32_t flags);
lc_key scene_key(uint32_t number, uint32_t i);
uint64_t stamp_of(uint64_t lo, uint64_t hi, uint32_t word);
void run_keys(lc_key *keys, uint32_t number, uint32_t n);
void run_reserve(actor *a, run *r, uint32_t number, uint32_t n, uint32_t shards, lci_ns_ref ns);
void run_write(actor *a, const run *r, uint32_t shard);
void run_publish(actor *a, run *r, uint32_t shard);
void run_unpin(actor *a, run *r);
void run_abandon(actor *a, run *r);
void run_fill(actor *a, uint32_t number, uint32_t n, lci_ns_ref ns);
/* Independent pages for keys [i, n) only. */
void run_behind(actor *a, run *r, uint32_t number, uint32_t i, uint32_t n);
void hold_match(actor *a, hold *l, uint32_t number, uint32_t n, lci_ns_ref ns);
void hold_release(actor *a, hold *l);
uint32_t deed_evict(actor *a, uint32_t n); /* returns the pages freed */
void deed_clear(actor *a, lci_ns_ref ns);
void deed_reap(actor *a, uint32_t slot);
/* Begin a call and leave it for good at a pause point, with whatever it holds (stepper only). */
void stop_at(actor *a, int point, void (*call)(actor *a));

#endif
