#include "damage.h"

#include <pthread.h>
#include <semaphore.h>

/* Any instance, three times in four of a record that is in use. */
static uint32_t some_index(const world *w, const field *f, rng *r) {
    uint32_t index = below(r, f->count);
    if (below(r, 4) == 0) return index;
    for (uint32_t i = 0; i < f->count && i < 4096 && !field_lives(w->picture, f, index); i++)
        index = (index + 1) % f->count;
    return index;
}

static uint64_t limited(uint64_t value, uint32_t width) {
    return width == 8 ? value : value & ((UINT64_C(1) << (8 * width)) - 1);
}

/* A plausible value is worse than a random one: bits, neighbours, ends of ranges, what stands in
 * the same field of another record. */
static uint64_t some_value(const world *w, const field *f, uint64_t old, rng *r) {
    const uint64_t ends[] = {0,
                             1,
                             2,
                             UINT64_MAX,
                             UINT32_MAX,
                             INT32_MAX,
                             (uint64_t)INT32_MAX + 1,
                             UINT64_MAX / 2,
                             w->pages,
                             w->pages - 1,
                             w->g.chunks,
                             w->g.reservations,
                             w->me_slot,
                             w->me_slot | (uint64_t)w->me_epoch << 8,
                             w->dead_slot,
                             LCS_SLOTS,
                             LCI_CHUNK_PAGES};
    switch (below(r, 8)) {
    case 0: return old ^ UINT64_C(1) << below(r, 8 * f->width);
    case 1: return old ^ (uint64_t)below(r, 256) << 8 * below(r, f->width);
    case 2: return old + 1;
    case 3: return old - 1;
    case 4: return ends[below(r, sizeof ends / sizeof ends[0])];
    case 5: return field_load(w->picture, f, some_index(w, f, r));
    case 6: return below(r, w->pages + 8);
    default: return draw(r);
    }
}

static void resolve(hit *h, const field *f, uint32_t number, uint32_t index, uint64_t value) {
    *h = (hit){.lives = h->lives,
               .field = number,
               .index = index,
               .at = f->at + (uint64_t)index * f->stride,
               .width = f->width,
               .value = limited(value, f->width)};
}

/* The fields of this world: the same names as everywhere, at other places. */
static void here(const world *w, field *out) { fields_of(w, out); }

void damage_draw(damage *d, const world *w, const field *names, uint32_t count, rng *r) {
    field own[MOST_FIELDS];
    (void)names;
    here(w, own);
    uint32_t number = below(r, count), index = some_index(w, &own[number], r);
    const field *f = &own[number];
    uint64_t old = field_load(w->picture, f, index), value = old;
    for (int i = 0; i < 16 && value == old; i++)
        value = limited(some_value(w, f, old, r), f->width);
    if (value == old) value = limited(~old, f->width);
    NEED(d->count < MOST_HITS);
    d->hit[d->count].lives = field_lives(w->picture, f, index);
    resolve(&d->hit[d->count++], f, number, index, value);
}

void damage_set(damage *d, const world *w, const field *names, uint32_t count, const char *name,
                uint32_t index, uint64_t value) {
    field own[MOST_FIELDS];
    here(w, own);
    for (uint32_t i = 0; i < count; i++) {
        if (strcmp(names[i].name, name) != 0) continue;
        NEED(index < own[i].count && d->count < MOST_HITS);
        resolve(&d->hit[d->count++], &own[i], i, index, value);
        return;
    }
    fprintf(stderr, "there is no field %s\n", name);
    exit(2);
}

static void store(uint8_t *base, const hit *h) {
    field one = {.at = h->at, .count = 1, .width = h->width};
    field_store(base, &one, 0, h->value);
}

void damage_apply(world *w, const damage *d) {
    for (uint32_t i = 0; i < d->count; i++) store(w->base, &d->hit[i]);
}

/* ------------------------------------------------------------------ while others work */

struct flipper {
    sem_t begin, ended;
    atomic_bool running;
    world *w;
    rng r;
    uint64_t count;
    pthread_t thread;
};

static void flip_some(flipper *f, const field *own, uint32_t fields) {
    world *w = f->w;
    const field *one = &own[below(&f->r, fields)];
    uint32_t index = some_index(w, one, &f->r);
    uint64_t old = field_load(w->picture, one, index);
    for (uint32_t n = below(&f->r, 8); n; n--) {
        field_store(w->base, one, index, limited(some_value(w, one, old, &f->r), one->width));
        f->count++;
    }
    if (below(&f->r, 4)) field_store(w->base, one, index, old);
}

static void *flip(void *argument) {
    flipper *f = argument;
    field own[MOST_FIELDS];
    for (;;) {
        while (sem_wait(&f->begin) != 0) {}
        uint32_t fields = fields_of(f->w, own);
        while (atomic_load(&f->running)) flip_some(f, own, fields);
        sem_post(&f->ended);
    }
    return NULL;
}

flipper *flipper_new(void) {
    flipper *f = calloc(1, sizeof *f);
    NEED(f && sem_init(&f->begin, 0, 0) == 0 && sem_init(&f->ended, 0, 0) == 0);
    NEED(pthread_create(&f->thread, NULL, flip, f) == 0);
    return f;
}

void flipper_start(flipper *f, world *w, uint64_t seed) {
    f->w = w;
    f->r.state = seed;
    f->count = 0;
    atomic_store(&f->running, true);
    sem_post(&f->begin);
}

uint64_t flipper_stop(flipper *f) {
    atomic_store(&f->running, false);
    while (sem_wait(&f->ended) != 0) {}
    return f->count;
}
