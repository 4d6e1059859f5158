/* What eviction learns and remembers, on memory of its own: no segment, no lock. */
#include "harness.h"
#include "hazard.h"

#include <stdlib.h>

#define PAGES 500
#define MANY 1000000 /* ticks: four seconds */

typedef struct cache {
    lch l;
    void *region;
    uint16_t order[LCH_LISTS], rank[LCH_LISTS];
    lc_key key[PAGES];
    uint64_t used[PAGES];
    uint32_t pages; /* that have a key */
    uint64_t tick;
    bool learns;
} cache;

static uint64_t mixed(uint64_t x) {
    x = (x ^ x >> 31) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 29) * UINT64_C(0x94d049bb133111eb);
    return x ^ x >> 32;
}
static lc_key key_of(uint64_t number) { return (lc_key){mixed(number + 1), mixed(~number)}; }

static bool read_page(const void *context, uint32_t page, lc_key *key, uint64_t *used) {
    const cache *c = context;
    if (page >= c->pages) return false;
    *key = c->key[page];
    *used = c->used[page];
    return true;
}

static void check_permutation(const cache *c) {
    bool seen[LCH_LISTS] = {false};
    for (uint32_t i = 0; i < LCH_LISTS; i++) {
        CHECK(c->order[i] < LCH_LISTS && !seen[c->order[i]]);
        seen[c->order[i]] = true;
    }
}

static void recompute(cache *c) {
    lch_recompute(&c->l, c->tick, c->order);
    check_permutation(c);
    for (uint32_t i = 0; i < LCH_LISTS; i++) c->rank[c->order[i]] = (uint16_t)i;
}

static cache *new_cache(bool learns) {
    cache *c = calloc(1, sizeof *c);
    uint64_t bytes = (lch_bytes(PAGES) + 63) / 64 * 64;
    CHECK(c);
    c->region = aligned_alloc(64, bytes);
    CHECK(c->region);
    memset(c->region, 0, bytes);
    c->learns = learns;
    c->tick = 1;
    lch_place(&c->l, c->region, PAGES, 12345, read_page, c);
    recompute(c);
    return c;
}

static void end(cache *c) {
    free(c->region);
    free(c);
}

/* ------------------------------------------------------------------ a cache without chains */

static bool before(const cache *c, uint32_t a, uint32_t b) {
    uint16_t ra = c->rank[lch_list(&c->l, c->used[a], c->tick)];
    uint16_t rb = c->rank[lch_list(&c->l, c->used[b], c->tick)];
    return ra != rb ? ra < rb : lch_tick_of(c->used[a]) < lch_tick_of(c->used[b]);
}

static uint32_t make_room(cache *c) {
    uint32_t first = 0;
    if (c->pages < PAGES) return c->pages++;
    for (uint32_t page = 1; page < PAGES; page++)
        if (before(c, page, first)) first = page;
    lch_evicted(&c->l, c->key[first], c->used[first], c->tick);
    return first;
}

/* Whether it was hit. */
static bool use(cache *c, uint64_t number, uint64_t ticks) {
    lc_key key = key_of(number);
    c->tick += ticks;
    for (uint32_t page = 0; page < c->pages; page++) {
        if (c->key[page].lo != key.lo) continue;
        c->used[page] = lch_hit(&c->l, c->used[page], c->tick);
        return true;
    }
    uint32_t page = make_room(c);
    c->key[page] = key;
    c->used[page] = lch_named(&c->l, key, page, 0, LCH_HINT_NONE, c->tick);
    if (c->learns && lch_due(&c->l, c->tick)) recompute(c);
    return false;
}

static uint32_t loop_hits(bool learns, uint64_t ticks) {
    cache *c = new_cache(learns);
    uint32_t hits = 0;
    for (uint64_t i = 0; i < 800 * 10; i++) hits += use(c, i % 800, ticks);
    end(c);
    return hits;
}

/* 400 favourites, half of the uses; the others never come again. After each third there are
 * others. */
static uint32_t favourite_hits(bool learns) {
    cache *c = new_cache(learns);
    uint32_t hits = 0;
    for (uint64_t i = 0; i < 18000; i++) {
        uint64_t favourite = i / 6000 * 400 + mixed(i) % 400;
        hits += use(c, i % 2 ? favourite : 1000000 + i, 5000);
    }
    end(c);
    return hits;
}

static void a_loop_is_learned(void) {
    CHECK(loop_hits(false, 5000) < 80);
    CHECK(loop_hits(true, 5000) > 8000 * 4 / 10);
}

static void favourites_are_learned_and_forgotten(void) {
    CHECK(favourite_hits(true) > favourite_hits(false) + 18000 / 20);
}

static void the_same_at_another_rate_is_learned_as_the_same(void) {
    int32_t slow = (int32_t)loop_hits(true, 300000), fast = (int32_t)loop_hits(true, 300);
    CHECK(abs(slow - fast) < 8000 / 50);
}

/* ------------------------------------------------------------------ words */

static void a_word_holds_what_it_was_made_of(void) {
    uint64_t used = lch_word(LCH_TICK_MAX, LCH_HITS_MAX, LCH_GEN_MAX, LCH_GAP_MAX, LCH_HINT_MAX);
    CHECK_EQ(lch_tick_of(used), LCH_TICK_MAX);
    CHECK_EQ(lch_hits_of(used), LCH_HITS_MAX);
    CHECK_EQ(lch_gen_of(used), LCH_GEN_MAX);
    CHECK_EQ(lch_gap_of(used), LCH_GAP_MAX);
    CHECK_EQ(lch_hint_of(used), LCH_HINT_MAX);
    CHECK_EQ(lch_touched(lch_word(4, 3, 2, 1, 0), 5), lch_word(5, 3, 2, 1, 0));
}

static void a_hit_counts_and_saturates(void) {
    cache *c = new_cache(false);
    uint64_t used = lch_word(10, 0, 3, 0, LCH_HINT_ENDS);
    used = lch_hit(&c->l, used, 11);
    CHECK_EQ(used, lch_word(11, 1, 3, 1, LCH_HINT_ENDS));
    CHECK_EQ(lch_gap_of(lch_hit(&c->l, used, 11 + 4)), 2);
    CHECK_EQ(lch_gap_of(lch_hit(&c->l, used, 11 + 16)), 3);
    CHECK_EQ(lch_gap_of(lch_hit(&c->l, used, MANY)), LCH_GAP_MAX);
    for (int i = 0; i < 200; i++) used = lch_hit(&c->l, used, 11);
    CHECK_EQ(lch_hits_of(used), LCH_HITS_MAX);
    end(c);
}

static void a_tick_in_the_future_is_age_zero(void) {
    cache *c = new_cache(false);
    uint64_t used = lch_word(MANY, 1, 0, 1, 0);
    CHECK_EQ(lch_list(&c->l, used, 5) % LCH_AGES, 0);
    CHECK_EQ(lch_tick_of(lch_hit(&c->l, used, 5)), MANY);
    CHECK_EQ(lch_gap_of(lch_hit(&c->l, used, 5)), 1);
    CHECK_EQ(lch_touched(used, 5), used);
    CHECK_EQ(lch_list(&c->l, 0, MANY) % LCH_AGES, LCH_AGES - 1);
    used = lch_word(LCH_TICK_MAX - 1, 1, 0, 1, 0); /* the clock wraps */
    CHECK_EQ(lch_age(used, 2), 4);
    CHECK_EQ(lch_tick_of(lch_hit(&c->l, used, 2)), 2);
    CHECK_EQ(lch_tick_of(lch_touched(used, 2)), 2);
    end(c);
}

static void gen_counts_the_calls_that_extended_a_prefix(void) {
    cache *c = new_cache(false);
    uint64_t root = lch_named(&c->l, key_of(1), 0, 0, 0, 5);
    CHECK_EQ(root, lch_word(5, 0, 0, 0, 0));
    CHECK_EQ(lch_gen_of(lch_named(&c->l, key_of(2), 1, root, 0, 5)), 0); /* of the same call */
    root = lch_hit(&c->l, root, 9);
    uint64_t child = lch_named(&c->l, key_of(3), 2, root, LCH_HINT_TOOL_CALL, 9);
    CHECK_EQ(child, lch_word(9, 0, 1, 0, LCH_HINT_TOOL_CALL));
    uint64_t last = lch_word(9, 1, LCH_GEN_MAX, 1, 0);
    CHECK_EQ(lch_gen_of(lch_named(&c->l, key_of(4), 3, last, 0, 9)), LCH_GEN_MAX);
    end(c);
}

/* ------------------------------------------------------------------ ghosts */

static void a_ghost_that_comes_back_was_hit(void) {
    cache *c = new_cache(false);
    uint64_t used = lch_word(640, 3, 2, 4, LCH_HINT_ENDS), known;
    CHECK(!lch_known(&c->l, key_of(1), 1000, &known));
    lch_evicted(&c->l, key_of(1), used, 1000);
    CHECK(lch_known(&c->l, key_of(1), 1000, &known));
    CHECK_EQ(known, lch_word(640, 3, 2, 0, 0));
    uint64_t named = lch_named(&c->l, key_of(1), 0, 0, LCH_HINT_NONE, 640 + 16);
    CHECK_EQ(named, lch_word(656, 4, 2, 3, 0));
    CHECK(!lch_known(&c->l, key_of(1), 1000, &known));
    end(c);
}

static uint32_t known_of(const cache *c, uint64_t from, uint64_t to) {
    uint32_t count = 0;
    uint64_t used;
    for (uint64_t i = from; i < to; i++) count += lch_known(&c->l, key_of(i), 0, &used);
    return count;
}

static void ghosts_outlive_many_lives_of_the_cache(void) {
    cache *c = new_cache(false);
    for (uint64_t i = 0; i < 1000 + 32768; i++)
        lch_evicted(&c->l, key_of(i), lch_word(64 * i, 0, 0, 0, 0), 64 * i);
    CHECK(known_of(c, 0, 1000) > 800);
    CHECK_EQ(known_of(c, 32768, 33768), 1000);
    for (uint64_t i = 33768; i < 400000; i++)
        lch_evicted(&c->l, key_of(i), lch_word(64 * i, 0, 0, 0, 0), 64 * i);
    CHECK(known_of(c, 0, 33768) < 1000);
    end(c);
}

/* The clock wraps, and the youngest stay all the same. */
static void ghosts_know_the_oldest_where_the_clock_wraps(void) {
    cache *c = new_cache(false);
    uint64_t start = LCH_TICK_MAX - 64 * 65536;
    for (uint64_t i = 0; i < 150000; i++) {
        uint64_t tick = (start + 64 * i) & LCH_TICK_MAX;
        lch_evicted(&c->l, key_of(i), lch_word(tick, 0, 0, 0, 0), tick);
    }
    CHECK(known_of(c, 149000, 150000) == 1000);
    CHECK(known_of(c, 120000, 130000) > 9000);
    uint64_t used, now = (start + 64 * 150000) & LCH_TICK_MAX;
    CHECK(lch_known(&c->l, key_of(149000), now, &used)); /* a thousand before now */
    CHECK(now < 64 * 100000);
    CHECK_EQ(lch_age(used, now) / 64, 1000);
    CHECK(lch_known(&c->l, key_of(149000), 0, &used)); /* as if it were in the future */
    CHECK_EQ(lch_tick_of(used), 0);
    end(c);
}

static void the_end_of_the_clock_stops_nothing(void) {
    cache *c = new_cache(true);
    c->tick = LCH_TICK_MAX - 1000;
    uint32_t hits = 0;
    for (uint64_t i = 0; i < 4000; i++) {
        hits += use(c, i % 300, 1);
        c->tick &= LCH_TICK_MAX;
        if (i % 300 == 0) c->pages = c->pages > 100 ? c->pages - 100 : c->pages;
    }
    CHECK(hits > 2000);
    end(c);
}

/* ------------------------------------------------------------------ recomputing */

static void one_caller_at_a_time_recomputes(void) {
    cache *c = new_cache(false);
    for (uint64_t i = 0; i < 99; i++) use(c, i, 1);
    CHECK(!lch_due(&c->l, c->tick));
    use(c, 99, 1);
    CHECK(lch_due(&c->l, c->tick));
    CHECK(!lch_due(&c->l, c->tick - 1)); /* its call began before the other's */
    CHECK(!lch_due(&c->l, c->tick + LCH_CLAIM_TICKS - 1));
    CHECK(lch_due(&c->l, c->tick + LCH_CLAIM_TICKS)); /* the first has died */
    recompute(c);
    CHECK(!lch_due(&c->l, c->tick + LCH_CLAIM_TICKS));
    end(c);
}

static uint32_t sum(const _Atomic uint32_t *count) {
    uint32_t all = 0;
    for (uint32_t list = 0; list < LCH_LISTS; list++) all += lc_load(&count[list]);
    return all;
}

static void hits_are_counted_where_the_page_was(void) {
    cache *c = new_cache(false);
    use(c, 1, 1);
    for (int i = 0; i < 3; i++) use(c, 1, 5);
    for (int i = 0; i < 2; i++) { /* the second finds nothing new */
        recompute(c);
        CHECK_EQ(sum(c->l.root->hits), 3);
        uint32_t never_hit = 0; /* as the page was when it was last looked at: class 0 */
        for (uint32_t age = 0; age < LCH_AGES; age++) never_hit += lc_load(&c->l.root->hits[age]);
        CHECK_EQ(never_hit, 3);
    }
    end(c);
}

static void what_the_sample_loses_sight_of_is_counted(void) {
    cache *c = new_cache(false);
    for (uint64_t i = 0; i < 30000; i++) lch_named(&c->l, key_of(i), 0, 0, 0, 100 + i);
    uint32_t few = sum(c->l.root->losses);
    for (uint64_t i = 0; i < 30000; i++) lch_named(&c->l, key_of(30000 + i), 0, 0, 0, 30100 + i);
    CHECK(few < 15000);
    CHECK(sum(c->l.root->losses) > few + 15000);
    end(c);
}

static const lch_sampled *line_of(const cache *c, uint64_t number) {
    return lch_sample_line(&c->l, lch_hash(&c->l, key_of(number)));
}

/* The entry of a page that was hit since it was looked at goes to another. */
static void hits_are_counted_before_the_sample_loses_sight(void) {
    cache *c = new_cache(false);
    uint64_t next = 1;
    use(c, 0, 1);
    use(c, 0, 5);
    for (uint32_t i = 0; i < LCH_SAMPLE_WAYS; i++) {
        while (line_of(c, next) != line_of(c, 0)) next++;
        use(c, next++, 5);
    }
    CHECK_EQ(sum(c->l.root->losses), 1);
    CHECK_EQ(sum(c->l.root->hits), 1);
    end(c);
}

/* A page, the first, whose hash has the bits of an entry that is empty. */
static void empty_entries_are_of_no_page(void) {
    cache *c = new_cache(false);
    c->key[0] = (lc_key){1, lch_hash(&c->l, (lc_key){1, 0})};
    CHECK_EQ(lch_hash(&c->l, c->key[0]), 0);
    c->tick = 10;
    c->used[c->pages++] = lch_named(&c->l, c->key[0], 0, 0, 0, c->tick);
    CHECK_EQ(sum(c->l.root->hits), 0); /* it was not known */
    c->used[0] = lch_hit(&c->l, c->used[0], 20);
    recompute(c);
    CHECK_EQ(sum(c->l.root->hits), 1);
    end(c);
}

static void pages_that_wait_in_vain_are_worth_less(void) {
    cache *c = new_cache(false);
    uint64_t used = 0;
    for (uint64_t i = 0; i < 400; i++)
        used = lch_named(&c->l, key_of(i), 0, 0, LCH_HINT_ENDS, c->tick += 50);
    recompute(c);
    uint32_t waiting = lch_list(&c->l, used, c->tick);
    uint32_t unknown = lch_list(&c->l, used & ~(uint64_t)LCH_HINT_MAX, c->tick);
    CHECK(waiting > unknown); /* so of equal worth it would be the later one */
    CHECK(c->rank[waiting] < c->rank[unknown]);
    end(c);
}

static void old_counts_are_halved(void) {
    cache *c = new_cache(false);
    lc_store(&c->l.root->hits[3], 60000);
    lc_store(&c->l.root->losses[5], 10000);
    recompute(c);
    CHECK_EQ(lc_load(&c->l.root->hits[3]), 30000);
    CHECK_EQ(lc_load(&c->l.root->losses[5]), 5000);
    end(c);
}

/* 65,536 ghosts, 8 ticks a page: replaced in 2^19 ticks, of which a unit is one in 2^11. */
static void counts_follow_the_unit(void) {
    cache *c = new_cache(false);
    lch_root *root = c->l.root;
    lc_store(&root->unit, 10);
    lc_store(&root->named, 1000);
    lc_store(&root->computed_named, 1000);
    lc_store(&root->computed_tick, c->tick);
    lc_store(&root->paced_named, 1000);
    lc_store(&root->paced_ticks, 8000);
    lc_store(&root->hits[5], 7);
    lc_store(&root->losses[LCH_AGES - 1], 6);
    lc_store(&root->losses[4], 9);
    recompute(c);
    CHECK_EQ(lch_unit(&c->l), 8);
    CHECK_EQ(lc_load(&root->hits[5 + 2]), 7);
    CHECK_EQ(lc_load(&root->losses[4 + 2]), 9);
    CHECK_EQ(lc_load(&root->losses[LCH_AGES - 1]), 6);
    lc_store(&root->paced_ticks, 8000 * 4);
    recompute(c);
    CHECK_EQ(lch_unit(&c->l), 10);
    CHECK_EQ(lc_load(&root->hits[5]), 7);
    end(c);
}

/* However long an index lay there before its first page, and however often it has learned. */
static void the_unit_follows_the_pace_of_pages(void) {
    cache *c = new_cache(false);
    c->tick = UINT64_C(1) << 40;
    for (uint64_t round = 0; round < 50; round++) {
        for (uint64_t i = 0; i < 200; i++) {
            c->tick += 8;
            lch_named(&c->l, key_of(200 * round + i), 0, 0, 0, c->tick);
        }
        recompute(c);
        CHECK_EQ(lch_unit(&c->l), 8);
    }
    end(c);
}

static uint32_t list_at(uint32_t turns, uint32_t gap, uint32_t age) {
    return (turns * LCH_GAPS + gap) * LCH_AGES + age;
}

/* Of the same age the class of more turns would go last: but no page of these turns came back. */
static void a_class_without_counts_leans_on_its_turns(void) {
    cache *c = new_cache(false);
    lc_store(&c->l.root->hits[list_at(1, 5, 2)], 9000);
    lc_store(&c->l.root->losses[list_at(2, 5, 2)], 9000);
    recompute(c);
    CHECK(c->rank[list_at(1, 6, 2)] > c->rank[list_at(2, 6, 2)]);
    end(c);
}

/* All that is seen of use is after a while: so pages of that age stay, those of other turns as well. */
static void turns_without_counts_lean_on_all(void) {
    cache *c = new_cache(false);
    lc_store(&c->l.root->hits[list_at(5, 5, 9)], 9000);
    recompute(c);
    CHECK(c->rank[list_at(0, 0, 9)] > c->rank[list_at(0, 0, 5)]);
    end(c);
}

static void what_knows_nothing_evicts_the_oldest(void) {
    cache *c = new_cache(false);
    for (uint32_t class = 0; class < LCH_CLASSES; class++)
        for (uint32_t age = 1; age < LCH_AGES; age++)
            CHECK(c->rank[class * LCH_AGES + age] < c->rank[class * LCH_AGES + age - 1]);
    end(c);
}

static void random_bytes_do_no_harm(void) {
    for (uint64_t seed = 1; seed <= 20; seed++) {
        cache *c = new_cache(true);
        for (uint64_t i = 0; i < 2000; i++) use(c, i % 700, 5000);
        uint64_t *word = c->region, bytes = lch_bytes(PAGES), known;
        for (uint64_t i = 0; i < bytes / 8; i++)
            word[i] = seed % 4 == 0 ? UINT64_MAX : mixed(i + seed * bytes) >> (seed % 4 * 8);
        recompute(c);
        for (uint64_t i = 0; i < 3000; i++) {
            use(c, mixed(i) % 700, 5000);
            CHECK(lch_list(&c->l, mixed(i + seed), mixed(i)) < LCH_LISTS);
            lch_hit(&c->l, mixed(i + seed), mixed(i) >> 16);
            lch_known(&c->l, key_of(mixed(i)), mixed(i) >> 16, &known);
            if (i % 500 == 0) recompute(c);
        }
        end(c);
    }
}

/* Right again soon after damage, as wrong counts are halved away and wrong ghosts replaced. */
static void damage_is_forgotten(void) {
    cache *c = new_cache(true);
    uint64_t *word = c->region;
    for (uint64_t i = 0; i < lch_bytes(PAGES) / 8; i++) word[i] = mixed(i);
    for (uint64_t i = 0; i < 800 * 60; i++) use(c, i % 800, 5000);
    uint32_t hits = 0;
    for (uint64_t i = 0; i < 800 * 5; i++) hits += use(c, i % 800, 5000);
    CHECK(hits > 4000 * 5 / 10);
    end(c);
}

/* ------------------------------------------------------------------ what operators are told */

#define SECONDS(n) ((uint64_t)(n)*UINT64_C(1000000000) / LCH_TICK_NS)

static uint64_t total(const _Atomic uint64_t *count, uint32_t n) {
    uint64_t all = 0;
    for (uint32_t i = 0; i < n; i++) all += lc_load(&count[i]);
    return all;
}

static void what_goes_is_told_with_its_age_and_idle_time(void) {
    cache *c = new_cache(false);
    lch_told *told = &c->l.root->told;
    lch_named(&c->l, key_of(1), 0, 0, 0, SECONDS(100));
    lch_evicted(&c->l, key_of(1), lch_word(SECONDS(195), 1, 0, 1, 0), SECONDS(200));
    CHECK_EQ(lc_load(&told->idle_at_eviction[3]), 1); /* 4 to 8 s */
    CHECK_EQ(lc_load(&told->age_at_eviction[7]), 1);  /* 64 to 128 s */
    CHECK_EQ(lc_load(&told->idle_at_hit[7]), 1);      /* the hit, at 195 */
    CHECK_EQ(lc_load(&told->hits[0]), 1);             /* of a page never hit */
    lch_named(&c->l, key_of(2), 1, 0, 0, SECONDS(300)); /* evict_first: no time of use */
    lch_evicted(&c->l, key_of(2), lch_word(0, 0, 0, 0, 0), SECONDS(300));
    CHECK_EQ(total(told->idle_at_eviction, LCH_SPANS), 1);
    CHECK_EQ(lc_load(&told->age_at_eviction[0]), 1);
    lch_named(&c->l, key_of(3), 2, 0, 0, LCH_TICK_MAX); /* the clock wraps */
    lch_evicted(&c->l, key_of(3), lch_word(LCH_TICK_MAX, 0, 0, 0, 0), SECONDS(300));
    CHECK_EQ(lc_load(&told->idle_at_eviction[9]), 1);
    CHECK_EQ(lc_load(&told->age_at_eviction[9]), 1);
    lch_named(&c->l, key_of(4), 3, 0, 0, 1); /* longer than the last span begins */
    lch_evicted(&c->l, key_of(4), lch_word(1, 0, 0, 0, 0), LCH_TICK_MAX / 2);
    CHECK_EQ(lc_load(&told->idle_at_eviction[LCH_SPANS - 1]), 1);
    lch_named(&c->l, key_of(5), 4, 0, 0, SECONDS(400)); /* the call that evicts began before */
    lch_evicted(&c->l, key_of(5), lch_word(SECONDS(400), 0, 0, 0, 0), SECONDS(300));
    CHECK_EQ(lc_load(&told->idle_at_eviction[0]), 1);
    CHECK_EQ(lc_load(&told->age_at_eviction[0]), 2);
    CHECK_EQ(total(told->age_at_eviction, LCH_SPANS), 5);
    end(c);
}

static void what_was_not_worth_it_had_no_age(void) {
    cache *c = new_cache(false);
    lch_told *told = &c->l.root->told;
    uint64_t used = lch_named(&c->l, key_of(1), LC_NIL, 0, 0, SECONDS(1));
    lch_evicted(&c->l, key_of(1), used, SECONDS(1));
    CHECK_EQ(total(told->age_at_eviction, LCH_SPANS) + total(told->idle_at_eviction, LCH_SPANS), 0);
    lch_named(&c->l, key_of(1), 0, 0, 0, SECONDS(2)); /* but it comes back */
    CHECK_EQ(total(told->returned, LCH_SIZES + 1), 1);
    CHECK_EQ(lc_load(&told->named), 2);
    end(c);
}

/* 400 pages are there. The list of each turn has 200 pages, from the highest rank down: a quarter of the
 * cache lies above the middle of the first, three quarters above that of the second, then 10 eighths. */
static void a_page_that_comes_back_needs_the_largest_size_since(void) {
    static const uint32_t least[LCH_TURNS] = {0, 0, 2, 3, 4, 4};
    uint16_t order[LCH_LISTS];
    uint32_t alive[LCH_LISTS] = {0};
    for (uint32_t i = 0; i < LCH_LISTS; i++) order[i] = (uint16_t)(LCH_LISTS - 1 - i);
    for (uint32_t turns = 0; turns < LCH_TURNS; turns++) alive[turns * LCH_GAPS * LCH_AGES] = 200;
    for (uint32_t turns = 0; turns < LCH_TURNS; turns++) {
        cache *c = new_cache(false);
        lch_told *told = &c->l.root->told;
        uint64_t used = lch_word(MANY, turns ? 1 << (turns - 1) : 0, 0, 0, 0);
        _Atomic uint8_t *size = &c->l.root->size[lch_list(&c->l, used, MANY)];
        for (uint32_t i = 0; i <= 400; i++) lch_named(&c->l, key_of(i), i, 0, 0, MANY);
        lch_evicted(&c->l, key_of(400), used, MANY);
        lch_tell_sizes(&c->l, MANY, order, alive);
        CHECK_EQ(lc_load(size), least[turns]);
        lc_store(size, 0); /* its list ranks higher by now: it would have gone all the same */
        lch_named(&c->l, key_of(400), 400, 0, 0, MANY);
        CHECK_EQ(lc_load(&told->returned[least[turns]]), 1);
        lch_named(&c->l, key_of(400), 400, 0, 0, MANY); /* it was there */
        CHECK_EQ(total(told->returned, LCH_SIZES + 1), 1);
        lch_evicted(&c->l, key_of(400), used, MANY);
        lc_store(size, UINT8_MAX); /* lower since, or damage */
        lch_named(&c->l, key_of(400), 400, 0, 0, MANY);
        CHECK_EQ(lc_load(&told->returned[LCH_SIZES]), 1);
        end(c);
    }
}

/* 800 pages in turn through 500 need 1.6 times the pages. */
static void the_size_that_a_loop_needs_is_told(void) {
    cache *c = new_cache(true);
    lch_told *told = &c->l.root->told;
    for (uint64_t i = 0; i < 800 * 10; i++) use(c, i % 800, 5000);
    uint64_t all = total(told->returned, LCH_SIZES + 1), below = total(told->returned, 4);
    CHECK(all > 1000 && below > all * 9 / 10);
    CHECK(total(told->returned, 2) < all / 2);
    end(c);
}

const test hazard_tests[] = {
    TEST(a_loop_is_learned),
    TEST(favourites_are_learned_and_forgotten),
    TEST(the_same_at_another_rate_is_learned_as_the_same),
    TEST(a_word_holds_what_it_was_made_of),
    TEST(a_hit_counts_and_saturates),
    TEST(a_tick_in_the_future_is_age_zero),
    TEST(gen_counts_the_calls_that_extended_a_prefix),
    TEST(a_ghost_that_comes_back_was_hit),
    TEST(ghosts_outlive_many_lives_of_the_cache),
    TEST(ghosts_know_the_oldest_where_the_clock_wraps),
    TEST(the_end_of_the_clock_stops_nothing),
    TEST(one_caller_at_a_time_recomputes),
    TEST(hits_are_counted_where_the_page_was),
    TEST(what_the_sample_loses_sight_of_is_counted),
    TEST(hits_are_counted_before_the_sample_loses_sight),
    TEST(empty_entries_are_of_no_page),
    TEST(pages_that_wait_in_vain_are_worth_less),
    TEST(old_counts_are_halved),
    TEST(counts_follow_the_unit),
    TEST(the_unit_follows_the_pace_of_pages),
    TEST(a_class_without_counts_leans_on_its_turns),
    TEST(turns_without_counts_lean_on_all),
    TEST(what_knows_nothing_evicts_the_oldest),
    TEST(random_bytes_do_no_harm),
    TEST(damage_is_forgotten),
    TEST(what_goes_is_told_with_its_age_and_idle_time),
    TEST(what_was_not_worth_it_had_no_age),
    TEST(a_page_that_comes_back_needs_the_largest_size_since),
    TEST(the_size_that_a_loop_needs_is_told),
    END_OF_TESTS,
};
