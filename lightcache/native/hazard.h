/* Which pages are worth keeping: what eviction learns from hits, and what it remembers of pages
 * that went.
 *
 * A page's word says how often and when it was used. Words are sorted into classes (how many
 * turns, how long between the last two uses) and ages; each class and age is a list of the
 * eviction queue. How soon pages of a class and age are used again is counted, and gives the
 * order of the lists.
 *
 * All of this memory is advice: it has no lock, no log and no invariant. Whatever bytes are in
 * it, every index read from it is clamped, every loop has a fixed end, every order is a
 * permutation of the lists; wrong bytes cost hits until they are forgotten. All zeroes is the
 * state that knows nothing. */
#ifndef LCH_HAZARD_H
#define LCH_HAZARD_H

#include "dict.h"

/* ------------------------------------------------------------------ a page's word */

/* hint (bits 0..1), gap (2..4), gen (5..8), hits (9..15), tick (16..63). tick: of the last use.
 * hits: saturating. gen: how many calls had extended the prefix, each after it had been hit,
 * when the page was named; saturating. gap: class of the time between the last two uses; 0:
 * never hit. hint: what the caller expects of a page that was never hit. */
#define LCH_GAP_SHIFT 2
#define LCH_GEN_SHIFT 5
#define LCH_HITS_SHIFT 9
#define LCH_TICK_SHIFT 16
#define LCH_HINT_MAX 3
#define LCH_GAP_MAX 5
#define LCH_GEN_MAX 15
#define LCH_HITS_MAX 127
#define LCH_TICK_MAX (UINT64_MAX >> LCH_TICK_SHIFT)
enum { LCH_HINT_NONE = 0, LCH_HINT_CONTINUES = 1, LCH_HINT_TOOL_CALL = 2, LCH_HINT_ENDS = 3 };

LC_INLINE uint32_t lch_hint_of(uint64_t used) { return (uint32_t)used & LCH_HINT_MAX; }
LC_INLINE uint32_t lch_gap_of(uint64_t used) { return (uint32_t)(used >> LCH_GAP_SHIFT) & 7; }
LC_INLINE uint32_t lch_gen_of(uint64_t used) {
    return (uint32_t)(used >> LCH_GEN_SHIFT) & LCH_GEN_MAX;
}
LC_INLINE uint32_t lch_hits_of(uint64_t used) {
    return (uint32_t)(used >> LCH_HITS_SHIFT) & LCH_HITS_MAX;
}
LC_INLINE uint64_t lch_tick_of(uint64_t used) { return used >> LCH_TICK_SHIFT; }
LC_INLINE uint64_t lch_word(uint64_t tick, uint32_t hits, uint32_t gen, uint32_t gap,
                            uint32_t hint) {
    return tick << LCH_TICK_SHIFT | (uint64_t)hits << LCH_HITS_SHIFT | gen << LCH_GEN_SHIFT |
           gap << LCH_GAP_SHIFT | hint;
}
/* Modulo 2^48, where the clock wraps. Of a tick in the future: 0. */
LC_INLINE uint64_t lch_age(uint64_t used, uint64_t now) {
    uint64_t age = (now - lch_tick_of(used)) & LCH_TICK_MAX;
    return age <= LCH_TICK_MAX / 2 ? age : 0;
}

/* ------------------------------------------------------------------ the region */

#define LCH_TURNS 6  /* 0, 1, 2-3, 4-7, 8-15, 16 and more */
#define LCH_GAPS 9   /* never hit, by hint; then five gaps, each four times the one before */
#define LCH_AGES 14  /* below one unit, then each twice the one before */
#define LCH_CLASSES (LCH_TURNS * LCH_GAPS)
#define LCH_LISTS (LCH_CLASSES * LCH_AGES) /* list = class * LCH_AGES + age */
#define LCH_UNIT_MAX 40
#define LCH_GHOST_WAYS 4  /* half a line */
#define LCH_SAMPLE_WAYS 4 /* a line */

typedef struct lch_sampled {
    _Atomic uint64_t name; /* fingerprint of the key << 32 | page, or LC_NIL */
    _Atomic uint64_t used; /* the page's word when it was last looked at; 0: empty */
} lch_sampled;

/* Counts for operators since the index was made, of the keys that are sampled. They only rise. Stored to as
 * the sample is: what two processes count at once may count as one. */
#define LCH_TICK_NS 4096 /* of the index's ticks */
#define LCH_SPANS 20 /* below a second, then each twice the one before; the last has all above */
#define LCH_SIZES 6 /* of caches: 9, 10, 12, 16, 24 and 40 eighths of the pages */
typedef struct lch_told {
    _Atomic uint64_t named; /* pages */
    /* Of these, that had gone, by the least of the sizes that would have kept them; the last: by none. */
    _Atomic uint64_t returned[LCH_SIZES + 1];
    _Atomic uint64_t hits[LCH_CLASSES]; /* by the class that the page was of before */
    _Atomic uint64_t idle_at_hit[LCH_SPANS]; /* by the time since the use before */
    _Atomic uint64_t idle_at_eviction[LCH_SPANS]; /* pages that went, by the time since their last use, */
    _Atomic uint64_t age_at_eviction[LCH_SPANS];  /* and since they were named */
} lch_told;

typedef struct lch_root {
    /* Read by every hit, stored to by a recomputation at most. */
    _Atomic uint32_t unit;     /* of ages: 2 to this power, in ticks */
    _Atomic uint32_t computed; /* recomputations so far */
    uint8_t pad0[56];
    /* Stored to as pages are named. */
    _Atomic uint64_t named;      /* pages so far */
    _Atomic uint64_t computed_named; /* `named` at the last recomputation */
    _Atomic uint64_t computed_tick;
    _Atomic uint64_t claimed;    /* tick at which a process began to recompute; 0: none does */
    _Atomic uint64_t paced_named, paced_ticks; /* the unit follows their ratio */
    uint8_t pad1[16];
    _Atomic uint32_t hits[LCH_LISTS];   /* uses seen, by the list that the page was in before */
    _Atomic uint32_t losses[LCH_LISTS]; /* pages lost sight of, by the list they were in */
    uint8_t pad2[64 - LCH_LISTS * 8 % 64];
    lch_told told;
    _Atomic uint8_t size[LCH_LISTS]; /* the least that keeps pages of a list now; LCH_SIZES: none does */
    uint8_t pad3[64 - (sizeof(lch_told) + LCH_LISTS) % 64];
} lch_root;
_Static_assert(offsetof(lch_root, named) % 64 == 0, "hot words on their own line");
_Static_assert(offsetof(lch_root, hits) % 64 == 0, "counts begin a line");
_Static_assert(sizeof(lch_root) % 64 == 0, "what follows begins a line");

/* What page has which key and word; false: it has no key now. Called with any number of a page. */
typedef bool (*lch_read)(const void *context, uint32_t page, lc_key *key, uint64_t *used);

typedef struct lch { /* process-local */
    lch_root *root;
    _Atomic uint64_t *ghosts;
    lch_sampled *sample;
    /* For each entry of the sample: of a page that is there, when it was named, in 2^LCH_SINCE_SHIFT ticks;
     * of one that went, the largest `size` of its lists since then. */
    _Atomic uint32_t *since;
    lch_read read;
    const void *context;
    uint64_t secret;
    uint32_t ghost_lines, sample_lines;
    uint32_t period;  /* pages named between two recomputations, once it has learned */
    uint32_t sampled; /* of 2^16 keys, as many are in the sample */
} lch;

/* ------------------------------------------------------------------ hazard.c */

/* Bytes of the region: 128 for a page, 512 KiB at least; and 168 KiB, or 648 up to 8,192 pages. */
uint64_t lch_bytes(uint64_t pages);

/* A handle on a region, which begins a line. The secret selects what is sampled, and where it
 * lies. */
void lch_place(lch *l, void *region, uint64_t pages, uint64_t secret, lch_read read,
               const void *context);

/* What lch_named would give, without naming anything. */
uint64_t lch_expected(const lch *l, lc_key key, uint64_t parent, uint32_t hint, uint64_t tick);

#define LCH_CLAIM_TICKS 250000 /* after which a process that was to recompute is taken for dead */
/* Is it time to recompute? Where it is, this caller is to do so, and no other is told so
 * meanwhile. */
bool lch_due(lch *l, uint64_t tick);

/* Learn from the sample, and give the lists in the order in which pages should go. Without the
 * lock; takes about 100 us. Ends what lch_due began. Of a region that knows nothing: the order
 * of old age. */
void lch_recompute(lch *l, uint64_t tick, uint16_t order[LCH_LISTS]);

/* For ghosts.c: a page of this class was used after all, so many ticks after it was last looked at. */
void lch_note(lch *l, uint64_t used, uint64_t age, uint32_t uses);

LC_INLINE uint32_t lch_unit(const lch *l) {
    uint32_t unit = lc_load(&l->root->unit);
    return unit < LCH_UNIT_MAX ? unit : LCH_UNIT_MAX;
}

/* The bits that a number needs. */
LC_INLINE uint32_t lch_bits(uint64_t x) { return x ? 64 - (uint32_t)__builtin_clzll(x) : 0; }
LC_INLINE uint32_t lch_least(uint32_t a, uint32_t b) { return a < b ? a : b; }

LC_INLINE uint32_t lch_age_class(const lch *l, uint64_t age) {
    return lch_least(lch_bits(age >> lch_unit(l)), LCH_AGES - 1);
}

/* Of uses that are so many ticks apart: below 4 units, 16, 64, 256, and above. */
LC_INLINE uint32_t lch_gap_class(const lch *l, uint64_t age) {
    return lch_least(1 + (lch_bits(age >> (lch_unit(l) + 2)) + 1) / 2, LCH_GAP_MAX);
}

LC_INLINE uint32_t lch_class(uint64_t used) {
    uint32_t turns = lch_least(lch_bits(lch_gen_of(used) + lch_hits_of(used)), LCH_TURNS - 1);
    uint32_t gap = lch_least(lch_gap_of(used), LCH_GAP_MAX);
    return turns * LCH_GAPS + (gap ? LCH_HINT_MAX + gap : lch_hint_of(used));
}

/* The list of a page now: below LCH_LISTS, whatever the word. */
LC_INLINE uint32_t lch_list(const lch *l, uint64_t used, uint64_t now) {
    return lch_class(used) * LCH_AGES + lch_age_class(l, lch_age(used, now));
}

/* The word of a page after a hit. */
LC_INLINE uint64_t lch_hit(const lch *l, uint64_t used, uint64_t tick) {
    uint64_t age = lch_age(used, tick);
    return lch_word(age ? tick : lch_tick_of(used), lch_least(lch_hits_of(used) + 1, LCH_HITS_MAX),
                    lch_gen_of(used), lch_gap_class(l, age), lch_hint_of(used));
}

/* The word of a page that was touched by a tick, and not hit. */
LC_INLINE uint64_t lch_touched(uint64_t used, uint64_t tick) {
    if (!lch_age(used, tick)) return used;
    return tick << LCH_TICK_SHIFT | (used & ((UINT64_C(1) << LCH_TICK_SHIFT) - 1));
}

/* ------------------------------------------------------------------ ghosts.c: pages that went */

LC_INLINE uint64_t lch_hash(const lch *l, lc_key key) {
    return ((key.lo ^ l->secret) * UINT64_C(0x9e3779b97f4a7c15)) ^ key.hi;
}
LC_INLINE _Atomic uint64_t *lch_ghost_line(const lch *l, uint64_t hash) {
    return l->ghosts + (((hash >> 32) * l->ghost_lines) >> 32) * LCH_GHOST_WAYS;
}
LC_INLINE bool lch_is_sampled(const lch *l, uint64_t hash) { return (hash & 0xffff) < l->sampled; }
LC_INLINE lch_sampled *lch_sample_line(const lch *l, uint64_t hash) {
    uint64_t other = (hash * UINT64_C(0xd6e8feb86659fd93)) >> 32;
    return l->sample + ((other * l->sample_lines) >> 32) * LCH_SAMPLE_WAYS;
}

/* Ask for the lines of a key that lch_named or lch_evicted will be called with: some ten keys
 * ahead. */
LC_INLINE void lch_prefetch(const lch *l, lc_key key) {
    uint64_t hash = lch_hash(l, key);
    lc_prefetch_write((const void *)lch_ghost_line(l, hash));
    if (LC_UNLIKELY(lch_is_sampled(l, hash))) {
        const lch_sampled *line = lch_sample_line(l, hash);
        lc_prefetch_write((const void *)line);
        lc_prefetch_write((const void *)&l->since[line - l->sample]);
    }
}

uint32_t lch_ghost_lines(uint64_t pages);
uint32_t lch_sample_lines(uint64_t pages);
uint32_t lch_sampled_of(uint64_t pages);

/* A ghost: fingerprint (bits 0..18), gen (19..22), hits (23..27), tick >> 6 (28..63); 0: none. The time
 * is above, so that the smallest difference to a present just after now is the oldest; it wraps
 * after 200 days. With 13 bits of fingerprint, one new page in 2,000 had hits of another, and the
 * few of its class said that such pages never come back. */
#define LCH_FINGERPRINT UINT64_C(0x7ffff)
#define LCH_GHOST_GEN_SHIFT 19
#define LCH_GHOST_HITS_SHIFT 23
#define LCH_GHOST_HITS_MAX 31
#define LCH_GHOST_TIME_SHIFT 28
#define LCH_COARSE 6
_Static_assert(LCH_GHOST_HITS_SHIFT - LCH_GHOST_GEN_SHIFT == LCH_HITS_SHIFT - LCH_GEN_SHIFT,
               "gen and hits move together");

/* Does a line have this fingerprint? The bits of a free entry are those of a key among half a million. */
LC_INLINE bool lch_ghost_is(const _Atomic uint64_t *line, uint32_t i, uint64_t hash) {
    return ((lc_load(&line[i]) ^ hash) & LCH_FINGERPRINT) == 0;
}
LC_INLINE bool lch_haunted(const _Atomic uint64_t *line, uint64_t hash) {
    return lch_ghost_is(line, 0, hash) || lch_ghost_is(line, 1, hash) ||
           lch_ghost_is(line, 2, hash) || lch_ghost_is(line, 3, hash);
}

LC_INLINE uint64_t lch_ghost_of(uint64_t hash, uint64_t used) {
    uint64_t history = used & ((UINT64_C(1) << LCH_TICK_SHIFT) - (UINT64_C(1) << LCH_GEN_SHIFT));
    if (LC_UNLIKELY(lch_hits_of(used) > LCH_GHOST_HITS_MAX))
        history = lch_word(0, LCH_GHOST_HITS_MAX, lch_gen_of(used), 0, 0);
    return (lch_tick_of(used) >> LCH_COARSE) << LCH_GHOST_TIME_SHIFT |
           history << (LCH_GHOST_GEN_SHIFT - LCH_GEN_SHIFT) | (hash & LCH_FINGERPRINT);
}

/* How long ago the time of an entry is, the less the longer, with its place below. A free entry is of
 * time 0; a key that has an entry already, as after a death, gets a second one: both are of little
 * harm, and to look for them costs as much as all else here. */
LC_INLINE uint64_t lch_ghost_order(const _Atomic uint64_t *line, uint32_t i, uint64_t future) {
    return ((lc_load(&line[i]) - future) & ~(uint64_t)(LCH_GHOST_WAYS - 1)) | i;
}

LC_INLINE void lch_ghost_put(const lch *l, uint64_t hash, uint64_t used, uint64_t tick) {
    _Atomic uint64_t *line = lch_ghost_line(l, hash);
    uint64_t future = ((tick >> LCH_COARSE) + 1) << LCH_GHOST_TIME_SHIFT;
    uint64_t a = lch_ghost_order(line, 0, future), b = lch_ghost_order(line, 1, future);
    uint64_t c = lch_ghost_order(line, 2, future), d = lch_ghost_order(line, 3, future);
    a = a < b ? a : b;
    c = c < d ? c : d;
    lc_store(&line[(a < c ? a : c) & (LCH_GHOST_WAYS - 1)], lch_ghost_of(hash, used));
}
_Static_assert(LCH_GHOST_WAYS == 4, "unrolled above");

/* The word of a page that went, its tick rounded down to 64; false: not remembered. */
bool lch_known(const lch *l, lc_key key, uint64_t tick, uint64_t *used);

/* The same, and forget it. */
bool lch_ghost_take(lch *l, uint64_t hash, uint64_t tick, uint64_t *used);

/* A page that is sampled was named, or goes. */
void lch_sample_named(lch *l, uint64_t hash, uint32_t page, uint64_t used, uint64_t tick);
void lch_sample_evicted(lch *l, uint64_t hash, uint64_t used, uint64_t tick);

/* Look at every page of the sample that is still there, and count its uses since. */
void lch_inspect(lch *l);

/* ------------------------------------------------------------------ told.c: what operators are told */

#define LCH_SINCE_SHIFT 16 /* 0.27 s */

/* A page of the sample was hit, so many times, the time between two of them being `age`. */
void lch_tell_hits(lch *l, uint64_t used, uint64_t age, uint32_t uses);

/* A sampled page gets its key again; or goes. `s`: its entry, as it was before. */
void lch_tell_named(lch *l, const lch_sampled *s, bool known, uint64_t tick);
void lch_tell_evicted(lch *l, const lch_sampled *s, uint64_t used, uint64_t tick);

/* A recomputation gave this order; `alive`: entries of the sample by list. */
void lch_tell_sizes(lch *l, uint64_t tick, const uint16_t order[LCH_LISTS],
                    const uint32_t alive[LCH_LISTS]);

/* ------------------------------------------------------------------ as pages come and go */

/* The word of a page that was never there, behind a page with that word. What continues a page that was
 * hit belongs to one more call than that. */
LC_INLINE uint64_t lch_first_word(uint64_t parent, uint32_t hint, uint64_t tick) {
    uint32_t gen = lch_gen_of(parent);
    if (LC_UNLIKELY(lch_hits_of(parent) > 0)) gen = lch_least(gen + 1, LCH_GEN_MAX);
    return lch_word(tick, 0, gen, 0, hint & LCH_HINT_MAX);
}

/* hazard.c: lch_named of a key that is remembered or sampled. */
uint64_t lch_named_again(lch *l, uint64_t hash, uint32_t page, uint64_t parent, uint32_t hint,
                         uint64_t tick);

/* The word of a page that gets this key, or would (`page` is LC_NIL); with or without the index's lock. A
 * key that is remembered has come back: that counts as a hit. `parent`: the word of the page before; 0:
 * none, or unknown. */
LC_INLINE uint64_t lch_named(lch *l, lc_key key, uint32_t page, uint64_t parent, uint32_t hint,
                             uint64_t tick) {
    uint64_t hash = lch_hash(l, key);
    if (LC_UNLIKELY(lc_load(&l->root->named) == 0)) lc_store(&l->root->computed_tick, tick);
    lc_raise(&l->root->named, 1);
    if (LC_UNLIKELY(lch_haunted(lch_ghost_line(l, hash), hash) || lch_is_sampled(l, hash)))
        return lch_named_again(l, hash, page, parent, hint, tick);
    return lch_first_word(parent, hint, tick);
}

/* A page with this key and word goes, or was not written: remember it. With or without the lock. */
LC_INLINE void lch_evicted(lch *l, lc_key key, uint64_t used, uint64_t tick) {
    uint64_t hash = lch_hash(l, key);
    lch_ghost_put(l, hash, used, tick);
    if (LC_UNLIKELY(lch_is_sampled(l, hash))) lch_sample_evicted(l, hash, used, tick);
}

#endif
