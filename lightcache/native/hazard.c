/* How soon pages of a class and age are used again, and the order of lists that follows from it.
 *
 * From counted uses and losses come hazards: uses a unit of time, by class and age. A class with
 * few counts leans on its turns, those on the turns below and all classes, those on a prior by
 * which a page is used the less often the older it is. A list's worth is the best rate of uses
 * that keeping its pages for any further time brings: a Gittins index. Ideas: hit density
 * (Beckmann, Chen and Cidon, NSDI 2018); Gittins (1979). */
#include "hazard.h"

#define UNITS_A_GHOST_TURN 11 /* as a power of 2: units in the time that replaces all ghosts */
#define EVENTS_MAX 32768      /* counted; then all counts are halved */
#define EARLY 100             /* pages named before the first recomputation */
#define SMALL 8192            /* pages; smaller caches change faster than they are replaced */
#define SMALL_PERIOD 1000

uint64_t lch_bytes(uint64_t pages) {
    return sizeof(lch_root) + lch_ghost_lines(pages) * LCH_GHOST_WAYS * sizeof(uint64_t) +
           lch_sample_lines(pages) * LCH_SAMPLE_WAYS * (sizeof(lch_sampled) + sizeof(uint32_t));
}

void lch_place(lch *l, void *region, uint64_t pages, uint64_t secret, lch_read read,
               const void *context) {
    *l = (lch){.root = region, .read = read, .context = context, .secret = secret};
    l->ghost_lines = lch_ghost_lines(pages);
    l->sample_lines = lch_sample_lines(pages);
    l->sampled = lch_sampled_of(pages);
    l->period = pages > SMALL ? 2 * (uint32_t)pages : SMALL_PERIOD;
    l->ghosts = (_Atomic uint64_t *)(l->root + 1);
    l->sample = (lch_sampled *)(l->ghosts + (uint64_t)l->ghost_lines * LCH_GHOST_WAYS);
    l->since = (_Atomic uint32_t *)(l->sample + (uint64_t)l->sample_lines * LCH_SAMPLE_WAYS);
}

/* ------------------------------------------------------------------ as pages come and go */

void lch_note(lch *l, uint64_t used, uint64_t age, uint32_t uses) {
    lc_raise(&l->root->hits[lch_class(used) * LCH_AGES + lch_age_class(l, age)], uses);
}

uint64_t lch_expected(const lch *l, lc_key key, uint64_t parent, uint32_t hint, uint64_t tick) {
    uint64_t used;
    return lch_known(l, key, tick, &used) ? lch_hit(l, used, tick) : lch_first_word(parent, hint, tick);
}

uint64_t lch_named_again(lch *l, uint64_t hash, uint32_t page, uint64_t parent, uint32_t hint,
                         uint64_t tick) {
    uint64_t used;
    if (lch_ghost_take(l, hash, tick, &used)) {
        used = lch_hit(l, used, tick) & ((UINT64_C(1) << LCH_TICK_SHIFT) - 1);
        used |= tick << LCH_TICK_SHIFT | (hint & LCH_HINT_MAX); /* whatever the ghost says */
    } else {
        used = lch_first_word(parent, hint, tick);
    }
    if (lch_is_sampled(l, hash)) lch_sample_named(l, hash, page, used, tick);
    return used;
}

bool lch_due(lch *l, uint64_t tick) {
    lch_root *root = l->root;
    uint64_t named = lc_load(&root->named), since = named - lc_load(&root->computed_named);
    uint64_t period = named / 8 < l->period ? named / 8 : l->period;
    if (LC_LIKELY(since < (period < EARLY ? EARLY : period))) return false;
    uint64_t claimed = lc_load(&root->claimed);
    /* A caller's tick may be a little older than the claim. */
    if (claimed && tick - claimed + LCH_CLAIM_TICKS < 2 * LCH_CLAIM_TICKS) return false;
    return atomic_compare_exchange_strong_explicit(&root->claimed, &claimed, tick ? tick : 1,
                                                   memory_order_relaxed, memory_order_relaxed);
}

/* ------------------------------------------------------------------ the unit of ages */

/* log2 in sixteenths, rounded down. */
static int32_t log16(uint64_t x) {
    uint32_t whole = lch_bits(x | 1) - 1;
    uint64_t part = whole < 4 ? x << (4 - whole) : x >> (whole - 4);
    return (int32_t)(whole * 16 + (part & 15));
}

/* Ages a unit longer fall one class lower: so do the counts. */
static void shift(uint32_t count[LCH_LISTS], int32_t by) {
    for (uint32_t class = 0; class < LCH_CLASSES; class++) {
        uint32_t *c = count + class * LCH_AGES, old[LCH_AGES];
        memcpy(old, c, sizeof old);
        memset(c, 0, sizeof old);
        for (int32_t age = 0; age < LCH_AGES; age++) {
            int32_t to = age - by < 0 ? 0 : age - by;
            c[to < LCH_AGES ? to : LCH_AGES - 1] += old[age];
        }
    }
}

/* The unit follows the time in which all ghosts are replaced: so traffic at a thousand times the
 * rate is learned as the same. It is moved by a step at least, that it may rest. */
static uint32_t new_unit(lch *l, uint64_t tick) {
    lch_root *root = l->root;
    uint64_t ghosts = (uint64_t)l->ghost_lines * LCH_GHOST_WAYS;
    uint64_t begun = lc_load(&root->computed_tick);
    uint64_t ticks = lc_load(&root->paced_ticks) + (tick > begun ? tick - begun : 0);
    uint64_t named = lc_load(&root->paced_named) + lc_load(&root->named) -
                     lc_load(&root->computed_named);
    uint32_t halve = named > ghosts;
    lc_store(&root->paced_ticks, ticks >> halve);
    lc_store(&root->paced_named, named >> halve);
    int32_t wanted = log16(ticks) - log16(named) + log16(ghosts) - 16 * UNITS_A_GHOST_TURN;
    int32_t unit = (int32_t)lch_unit(l);
    if (wanted > 16 * unit - 16 && wanted < 16 * unit + 16) return (uint32_t)unit;
    return wanted < 0 ? 0 : lch_least((uint32_t)(wanted + 8) / 16, LCH_UNIT_MAX);
}

/* ------------------------------------------------------------------ learning */

typedef struct counts {
    uint32_t hits[LCH_LISTS], losses[LCH_LISTS]; /* copies of the root's, which others write */
    uint32_t alive[LCH_LISTS];
} counts;

typedef double rates[LCH_AGES];

static double width(uint32_t age) { return age ? (double)(UINT64_C(1) << (age - 1)) : 1; }
static double middle(uint32_t age) { return age ? 1.5 * width(age) : 0.5; }

/* `weight` uses at the rate of the prior are added to those that were counted. */
static void hazards(const rates hits, const rates ends, const rates prior, double weight,
                    rates rate) {
    double older = 0;
    for (uint32_t age = LCH_AGES; age-- > 0;) {
        double here = hits[age] + ends[age];
        double exposed = width(age) * (older + here / 2);
        older += here;
        rate[age] = (hits[age] + weight) / (exposed + weight / prior[age]);
    }
}

static void add(const counts *c, uint32_t class, rates hits, rates ends) {
    for (uint32_t age = 0; age < LCH_AGES; age++) {
        uint32_t list = class * LCH_AGES + age;
        hits[age] += c->hits[list];
        ends[age] += (double)c->losses[list] + c->alive[list];
    }
}

/* What is used at such rates: the best share of uses in the time from an age on to any later
 * one. */
static void worths(const rates rate, float worth[LCH_AGES]) {
    double ends[LCH_AGES], time[LCH_AGES];
    for (uint32_t age = 0; age < LCH_AGES; age++) {
        double x = rate[age] * width(age), left = 1 / (1 + x + x * x / 2); /* nearly exp(-x) */
        ends[age] = x * (1 + x / 2) * left;
        time[age] = width(age) * (1 + x / 2) * left;
    }
    for (uint32_t from = 0; from < LCH_AGES; from++) {
        double left = 1, uses = 0, spent = 0, best = 0;
        for (uint32_t age = from; age < LCH_AGES; age++) {
            uses += left * ends[age];
            spent += left * time[age];
            left *= 1 - ends[age];
            if (uses > best * spent) best = uses / spent;
        }
        worth[from] = (float)best;
    }
}

static void learn(const counts *c, float worth[LCH_LISTS]) {
    rates hits = {0}, ends = {0}, prior, by_turns, rate;
    for (uint32_t class = 0; class < LCH_CLASSES; class++) add(c, class, hits, ends);
    for (uint32_t age = 0; age < LCH_AGES; age++) prior[age] = 0.1 / middle(age);
    hazards(hits, ends, prior, 4, by_turns);
    for (uint32_t turns = 0; turns < LCH_TURNS; turns++) {
        memset(hits, 0, sizeof hits);
        memset(ends, 0, sizeof ends);
        memcpy(prior, by_turns, sizeof prior);
        for (uint32_t gap = 0; gap < LCH_GAPS; gap++) add(c, turns * LCH_GAPS + gap, hits, ends);
        hazards(hits, ends, prior, 8, by_turns);
        for (uint32_t gap = 0; gap < LCH_GAPS; gap++) {
            uint32_t class = turns * LCH_GAPS + gap;
            memset(hits, 0, sizeof hits);
            memset(ends, 0, sizeof ends);
            add(c, class, hits, ends);
            hazards(hits, ends, by_turns, 16, rate);
            worths(rate, worth + class * LCH_AGES);
        }
    }
}

/* Lowest worth first, of equal ones the older. Positive floats are in the order of their bits. */
static void sort(const float worth[LCH_LISTS], uint16_t order[LCH_LISTS]) {
    uint64_t key[LCH_LISTS];
    for (uint32_t list = 0; list < LCH_LISTS; list++) {
        uint32_t bits, age = list % LCH_AGES;
        memcpy(&bits, &worth[list], sizeof bits);
        key[list] = (uint64_t)bits << 32 | (LCH_AGES - 1 - age) << 16 | list;
    }
    static const uint32_t gaps[] = {301, 132, 57, 23, 10, 4, 1};
    for (uint32_t g = 0; g < sizeof gaps / sizeof *gaps; g++) {
        for (uint32_t i = gaps[g]; i < LCH_LISTS; i++) {
            uint64_t one = key[i];
            uint32_t at = i;
            for (; at >= gaps[g] && key[at - gaps[g]] > one; at -= gaps[g])
                key[at] = key[at - gaps[g]];
            key[at] = one;
        }
    }
    for (uint32_t i = 0; i < LCH_LISTS; i++) order[i] = (uint16_t)key[i];
}

static void copy(const _Atomic uint32_t *from, uint32_t *to) {
    for (uint32_t list = 0; list < LCH_LISTS; list++) to[list] = lc_load(&from[list]);
}

/* Counts have one writer at a time as a rule; what another adds meanwhile may be lost. */
static void give_back(const uint32_t *from, _Atomic uint32_t *to, bool halve) {
    for (uint32_t list = 0; list < LCH_LISTS; list++) lc_store(&to[list], from[list] >> halve);
}

static void count_alive(const lch *l, uint64_t tick, counts *c) {
    memset(c->alive, 0, sizeof c->alive);
    for (uint32_t i = 0; i < l->sample_lines * LCH_SAMPLE_WAYS; i++) {
        uint64_t used = lc_load(&l->sample[i].used);
        if (used) c->alive[lch_list(l, used, tick)]++;
    }
}

void lch_recompute(lch *l, uint64_t tick, uint16_t order[LCH_LISTS]) {
    lch_root *root = l->root;
    counts c;
    float worth[LCH_LISTS];
    uint64_t named = lc_load(&root->named), events = 0;
    uint32_t unit = named ? new_unit(l, tick) : 0;
    int32_t by = (int32_t)unit - (int32_t)lch_unit(l);
    lch_inspect(l);
    copy(root->hits, c.hits);
    copy(root->losses, c.losses);
    for (uint32_t list = 0; list < LCH_LISTS; list++)
        events += (uint64_t)c.hits[list] + c.losses[list];
    if (by) {
        shift(c.hits, by);
        shift(c.losses, by);
        lc_store(&root->unit, unit);
    }
    if (by || events > EVENTS_MAX) {
        give_back(c.hits, root->hits, events > EVENTS_MAX);
        give_back(c.losses, root->losses, events > EVENTS_MAX);
    }
    count_alive(l, tick, &c);
    learn(&c, worth);
    sort(worth, order);
    lch_tell_sizes(l, tick, order, c.alive);
    lc_store(&root->computed_named, named);
    lc_store(&root->computed_tick, tick);
    lc_store(&root->computed, lc_load(&root->computed) + 1);
    lc_store(&root->claimed, 0);
}
