/* What operators are told of a sample of pages: how old and how long unused they were when they went, which
 * were hit, and how much more memory would have kept those that came back.
 *
 * A larger cache keeps the same order, and more of it. So at each recomputation the sampled pages, those
 * that went as well, are counted from the highest rank down: where a list lies in that, in times of what is
 * there, is the size of a cache that holds it. A page that went needs the largest such size until it comes
 * back. Sizes nest, as in Mattson's stack (1970); to count it in keys that their hash selects is the idea of
 * SHARDS (Waldspurger and others, FAST 2015). */
#include "hazard.h"

static uint32_t span_of(uint64_t ticks) {
    return lch_least(lch_bits(ticks * LCH_TICK_NS / 1000000000), LCH_SPANS - 1);
}

static _Atomic uint32_t *since_of(const lch *l, const lch_sampled *s) {
    return &l->since[s - l->sample];
}

static bool gone(const lch_sampled *s) { return (uint32_t)lc_load(&s->name) == LC_NIL; }

void lch_tell_hits(lch *l, uint64_t used, uint64_t age, uint32_t uses) {
    lc_raise(&l->root->told.hits[lch_class(used)], uses);
    lc_raise(&l->root->told.idle_at_hit[span_of(age)], uses);
}

void lch_tell_named(lch *l, const lch_sampled *s, bool known, uint64_t tick) {
    lch_told *told = &l->root->told;
    lc_raise(&told->named, 1);
    if (known && gone(s)) {
        uint32_t size = lc_load(&l->root->size[lch_list(l, lc_load(&s->used), tick)]);
        if (size < lc_load(since_of(l, s))) size = lc_load(since_of(l, s));
        lc_raise(&told->returned[lch_least(size, LCH_SIZES)], 1);
    }
    lc_store(since_of(l, s), (uint32_t)(tick >> LCH_SINCE_SHIFT));
}

/* One that was never there, as it was not worth it (`lci_pass_by`), has no age. Nor is a page idle that was
 * put to go first: it has the tick 0. */
void lch_tell_evicted(lch *l, const lch_sampled *s, uint64_t used, uint64_t tick) {
    lch_told *told = &l->root->told;
    if (!gone(s)) {
        uint32_t age = (uint32_t)(tick >> LCH_SINCE_SHIFT) - lc_load(since_of(l, s));
        if (age > UINT32_MAX / 2) age = 0; /* its call began before that which named it */
        lc_raise(&told->age_at_eviction[span_of((uint64_t)age << LCH_SINCE_SHIFT)], 1);
        if (lch_tick_of(used)) lc_raise(&told->idle_at_eviction[span_of(lch_age(used, tick))], 1);
    }
    lc_store(since_of(l, s), lc_load(&l->root->size[lch_list(l, used, tick)]));
}

/* Half of a list counts for its own place. Sizes: 9/8, 10/8, 12/8, 16/8, and so on. */
static void size_lists(const uint16_t order[LCH_LISTS], const uint32_t alive[LCH_LISTS], uint32_t there,
                       uint8_t size[LCH_LISTS]) {
    uint64_t above = 0;
    for (uint32_t rank = LCH_LISTS; rank-- > 0;) {
        uint32_t list = order[rank];
        uint64_t eighths = (above + alive[list] / 2) * 8 / there;
        size[list] = eighths < 8 ? 0 : (uint8_t)lch_least(lch_bits(eighths - 8), LCH_SIZES);
        above += alive[list];
    }
}

void lch_tell_sizes(lch *l, uint64_t tick, const uint16_t order[LCH_LISTS],
                    const uint32_t alive[LCH_LISTS]) {
    uint32_t entries = l->sample_lines * LCH_SAMPLE_WAYS, there = 0;
    uint8_t size[LCH_LISTS];
    for (uint32_t i = 0; i < entries; i++) there += lc_load(&l->sample[i].used) && !gone(&l->sample[i]);
    size_lists(order, alive, there ? there : 1, size);
    for (uint32_t list = 0; list < LCH_LISTS; list++) lc_store(&l->root->size[list], size[list]);
    for (uint32_t i = 0; i < entries; i++) {
        const lch_sampled *s = &l->sample[i];
        uint64_t used = lc_load(&s->used);
        if (!used || !gone(s) || lc_load(since_of(l, s)) >= LCH_SIZES) continue; /* it needs no more */
        uint32_t own = size[lch_list(l, used, tick)];
        if (lc_load(since_of(l, s)) < own) lc_store(since_of(l, s), own);
    }
}
