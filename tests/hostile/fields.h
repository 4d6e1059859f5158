/* Every field of a segment by its name, so that damage can be put exactly there. */
#ifndef HOSTILE_FIELDS_H
#define HOSTILE_FIELDS_H

#include "world.h"

/* What a field is for, which says what damage to it may come to. */
enum role {
    HEADER,   /* compared at attach; the rest of the header is for people */
    TRUTH,    /* nothing else says it */
    DERIVED,  /* can be rebuilt: `check` names damage, `repair` mends it */
    ADVICE,   /* may say anything: order of eviction, figures for people, hints */
    PROTOCOL, /* the lock and its log, clients, flags between processes */
};

typedef struct field {
    const char *name;
    enum role role;
    uint64_t at;       /* of instance 0, in bytes from the beginning */
    uint32_t stride, count, width;
    uint64_t live; /* where a word says that instance 0 is in use; 0: always */
    uint32_t live_mask;
} field;

/* Whether the picture uses this instance: what stands in a free record means nothing. */
static inline bool field_lives(const uint8_t *picture, const field *f, uint32_t i) {
    uint32_t word = UINT32_MAX;
    if (f->live) memcpy(&word, picture + f->live + (uint64_t)i * f->stride, sizeof word);
    return (word & f->live_mask) != 0;
}

#define MOST_FIELDS 160
uint32_t fields_of(const world *w, field *out);

static inline uint64_t field_load(const uint8_t *base, const field *f, uint32_t i) {
    uint64_t value = 0;
    memcpy(&value, base + f->at + (uint64_t)i * f->stride, f->width);
    return value;
}

/* A single store of the field's width, as another process would do it. */
static inline void field_store(uint8_t *base, const field *f, uint32_t i, uint64_t value) {
    uint8_t *at = base + f->at + (uint64_t)i * f->stride;
    if (f->width == 8) atomic_store_explicit((_Atomic uint64_t *)at, value, memory_order_relaxed);
    else if (f->width == 4)
        atomic_store_explicit((_Atomic uint32_t *)at, (uint32_t)value, memory_order_relaxed);
    else if (f->width == 2)
        atomic_store_explicit((_Atomic uint16_t *)at, (uint16_t)value, memory_order_relaxed);
    else atomic_store_explicit((_Atomic uint8_t *)at, (uint8_t)value, memory_order_relaxed);
}

#endif
