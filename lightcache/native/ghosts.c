/* What is remembered of pages that went (ghosts), and a sample of all pages, from which uses are
 * counted.
 *
 * Both are tables of lines: a key selects a line, and within it an entry is found by a
 * fingerprint, or the oldest one makes room. A wrong fingerprint costs one page a wrong history. */
#include "hazard.h"

#define GHOSTS_LEAST 65536
#define GHOSTS_A_PAGE 16
#define SAMPLE UINT64_C(8192)
#define SMALL 8192 /* pages; below, the sample is of many lives of the cache: a larger one */
#ifndef LCH_SMALL_SAMPLE
#define LCH_SMALL_SAMPLE UINT64_C(32768)
#endif
#define HORIZON 8  /* pages named, by the pages of the cache, that the sample is of */

static uint64_t ghost_count(uint64_t pages) {
    uint64_t count = pages * GHOSTS_A_PAGE;
    return count > GHOSTS_LEAST ? count : GHOSTS_LEAST;
}

uint32_t lch_ghost_lines(uint64_t pages) {
    return (uint32_t)(ghost_count(pages) / LCH_GHOST_WAYS);
}

static uint64_t sample_size(uint64_t pages) {
    return pages <= SMALL ? LCH_SMALL_SAMPLE : SAMPLE;
}

uint32_t lch_sample_lines(uint64_t pages) {
    return (uint32_t)(sample_size(pages) / LCH_SAMPLE_WAYS);
}

uint32_t lch_sampled_of(uint64_t pages) {
    uint64_t share = (sample_size(pages) << 16) / (HORIZON * (pages ? pages : 1));
    return share < 1 ? 1 : share < 65536 ? (uint32_t)share : 65536;
}

/* ------------------------------------------------------------------ ghosts */

#define TIME_MAX (UINT64_MAX >> LCH_GHOST_TIME_SHIFT)

static uint64_t unpacked(uint64_t ghost, uint64_t tick) {
    uint64_t now = tick >> LCH_COARSE, age = (now - (ghost >> LCH_GHOST_TIME_SHIFT)) & TIME_MAX;
    uint64_t then = (now - (age <= TIME_MAX / 2 ? age : 0)) << LCH_COARSE & LCH_TICK_MAX;
    uint32_t hits = (uint32_t)(ghost >> LCH_GHOST_HITS_SHIFT) & LCH_GHOST_HITS_MAX;
    uint32_t gen = (uint32_t)(ghost >> LCH_GHOST_GEN_SHIFT) & LCH_GEN_MAX;
    return lch_word(then, hits, gen, 0, 0);
}

static _Atomic uint64_t *find(const lch *l, uint64_t hash) {
    _Atomic uint64_t *line = lch_ghost_line(l, hash);
    for (uint32_t i = 0; i < LCH_GHOST_WAYS; i++)
        if (lch_ghost_is(line, i, hash) && lc_load(&line[i])) return &line[i];
    return NULL;
}

bool lch_known(const lch *l, lc_key key, uint64_t tick, uint64_t *used) {
    _Atomic uint64_t *ghost = find(l, lch_hash(l, key));
    if (!ghost) return false;
    *used = unpacked(lc_load(ghost), tick);
    return true;
}

bool lch_ghost_take(lch *l, uint64_t hash, uint64_t tick, uint64_t *used) {
    _Atomic uint64_t *ghost = find(l, hash);
    if (!ghost) return false;
    *used = unpacked(lc_load(ghost), tick);
    lc_store(ghost, 0);
    return true;
}

/* ------------------------------------------------------------------ the sample */

static uint64_t name_of(uint64_t hash, uint32_t page) {
    return (hash >> 16 & UINT32_MAX) << 32 | page;
}

/* The mean time between uses counts once for each of them. A page whose hits are saturated says no
 * more than its last gap. */
static void look_at(lch *l, lch_sampled *s, uint64_t now_used) {
    uint64_t used = lc_load(&s->used);
    uint32_t hits = lch_hits_of(now_used), before = lch_hits_of(used);
    uint64_t age = lch_age(used, lch_tick_of(now_used));
    if (hits == before && (hits < LCH_HITS_MAX || age == 0)) return;
    uint32_t uses = hits > before ? hits - before : 1;
    lch_note(l, used, age / uses, uses);
    lch_tell_hits(l, used, age / uses, uses);
    lc_store(&s->used, now_used);
}

static void inspect(lch *l, lch_sampled *s) {
    uint64_t name = lc_load(&s->name), used;
    lc_key key;
    if ((uint32_t)name == LC_NIL || lc_load(&s->used) == 0) return;
    if (!l->read(l->context, (uint32_t)name, &key, &used)) return;
    if (name_of(lch_hash(l, key), (uint32_t)name) == name) look_at(l, s, used);
}

void lch_inspect(lch *l) {
    for (uint32_t i = 0; i < l->sample_lines * LCH_SAMPLE_WAYS; i++) inspect(l, &l->sample[i]);
}

static lch_sampled *find_sampled(const lch *l, uint64_t hash) {
    lch_sampled *line = lch_sample_line(l, hash);
    for (uint32_t i = 0; i < LCH_SAMPLE_WAYS; i++)
        if (lc_load(&line[i].name) >> 32 == name_of(hash, 0) >> 32 && lc_load(&line[i].used))
            return &line[i];
    return NULL;
}

static lch_sampled *oldest_sampled(const lch *l, uint64_t hash, uint64_t tick) {
    lch_sampled *line = lch_sample_line(l, hash), *oldest = line;
    for (uint32_t i = 1; i < LCH_SAMPLE_WAYS; i++)
        if (lch_age(lc_load(&line[i].used), tick) > lch_age(lc_load(&oldest->used), tick))
            oldest = &line[i];
    return oldest;
}

void lch_sample_named(lch *l, uint64_t hash, uint32_t page, uint64_t used, uint64_t tick) {
    lch_sampled *s = find_sampled(l, hash);
    bool known = s != NULL;
    if (known) {
        lch_note(l, lc_load(&s->used), lch_age(lc_load(&s->used), tick), 1);
    } else {
        s = oldest_sampled(l, hash, tick);
        inspect(l, s);
        if (lc_load(&s->used)) lc_raise(&l->root->losses[lch_list(l, lc_load(&s->used), tick)], 1);
    }
    lch_tell_named(l, s, known, tick);
    lc_store(&s->name, name_of(hash, page));
    lc_store(&s->used, used);
}

void lch_sample_evicted(lch *l, uint64_t hash, uint64_t used, uint64_t tick) {
    lch_sampled *s = find_sampled(l, hash);
    if (!s) return;
    look_at(l, s, used);
    lch_tell_evicted(l, s, used, tick);
    lc_store(&s->name, name_of(hash, LC_NIL));
}
