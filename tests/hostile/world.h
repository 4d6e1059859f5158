/* A small index with a bit of everything in it, between guard pages: what the harness damages.
 *
 * Its memory is mapped twice: for writing, and PROT_READ for a reader, so that what a
 * reader writes is a signal. A world is put back to its picture before every case. */
#ifndef HOSTILE_WORLD_H
#define HOSTILE_WORLD_H

#include "common.h"

/* What the pictures show. */
enum variant {
    BUSY_WORLD,  /* prompts, reservations, tickets, namespaces, a client that has died */
    DEAD_HOLDER, /* the same, and the dead client holds the lock with entries in the log */
    FRESH_WORLD, /* nothing yet, and memory behind a part of the pages only */
    FULL_WORLD,  /* so few pages that every link matters, all of them in use */
    MIXED_WORLD, /* as the busy one, with independent pages too; some have gone that others hang on */
    VARIANTS
};

#define MOST_KEYS 64
#define HELD_PAGES 3
#define KEY_RUNS 4

typedef struct world {
    enum variant variant;
    uint64_t pages, bytes;
    lci_geometry g;
    uint8_t *base;    /* for writing */
    uint8_t *picture; /* what `base` is put back to */
    uint8_t *scratch; /* for copies to check */
    lcs_attachment *me, *peer, *reader;
    lci_handle *h, *peer_h, *reader_h;
    uint32_t me_slot, me_epoch, dead_slot;
    int life; /* the file whose bytes say who lives */
    lci_ns_ref ns[2];
    uint32_t ready[KEY_RUNS];  /* keys of each run that are ready in the picture */
    lci_reserve_op open;       /* my reservation, two shards, none published */
    int32_t open_pages[8];
    int32_t held_pages[HELD_PAGES]; /* mine, without a key */
    uint32_t open_count;
    lci_ticket_ref ticket, shard_ticket; /* for me, by the peer */
    lci_ticket_ref given;                /* by me, for the peer */
} world;

/* Key `i` of a run of prompts; few buckets, so that chains have several links. */
lc_key world_key(uint32_t run, uint32_t i);
void world_keys(lc_key *keys, uint32_t run, uint32_t n);

void world_make(world *w, enum variant variant);
void world_restore(world *w);
/* `bytes` of a file, between two stretches that nobody may touch. */
uint8_t *world_map(int fd, uint64_t bytes, int protection);
/* Another description of an open file. */
int world_reopen(int fd);
/* A writer's attachment of its own description, without a slot. */
lcs_attachment *world_stranger(const world *w);
void world_dismiss(lcs_attachment *at);

#endif
