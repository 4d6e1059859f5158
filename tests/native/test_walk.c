/* Lookups that others are at work beside: a reader is interrupted at each of its loads, or a call
 * between two of its requests. */
#include "lc_base.h"

/* What this file includes from here on loads through these. */
static void before_load(void);
#undef lc_load
#define lc_load(p) (before_load(), atomic_load_explicit((p), memory_order_relaxed))
#undef lc_load_acquire
#define lc_load_acquire(p) (before_load(), atomic_load_explicit((p), memory_order_acquire))

#include "pair.h"

#define CAPACITY 8
#define RECORD 64

static lcx_dict *dict;
static lc_dict inner;

static void (*interruption)(void);
static int loads_before_it;

static void before_load(void) {
    if (!interruption || loads_before_it-- > 0) return;
    void (*now)(void) = interruption;
    interruption = NULL;
    now();
}

/* ------------------------------------------------------------------ a chain */

static lc_key stays, goes, comes, nobody, nobody_either;

/* `goes` stands before `stays` in one chain. Its record is used again, for a key of the same chain
 * or of another. Nobody's keys are half of each. */
static void set_up_dict(bool same_chain) {
    s = segment_make(LCS_PAYLOAD_OFFSET + lcx_dict_bytes(CAPACITY));
    lcx_dict_format(s.base, CAPACITY);
    a = client_join(&s);
    dict = lcx_dict_open(a.at, CAPACITY);
    uint8_t *records = s.base + LCS_PAYLOAD_OFFSET + 64;
    inner = (lc_dict){.records = records, .stride = RECORD, .nodes = CAPACITY, .mask = 63,
                      .buckets = (_Atomic uint32_t *)(records + CAPACITY * RECORD)};
    stays = crowded_key(5, 1);
    goes = crowded_key(5, 2);
    comes = crowded_key(same_chain ? 5 : 6, 3);
    nobody = (lc_key){.lo = goes.lo, .hi = comes.hi};
    nobody_either = (lc_key){.lo = comes.lo, .hi = goes.hi};
    CHECK_EQ(lcx_dict_put(dict, stays.lo, stays.hi, 1, 0, BLOCKING), 0);
    CHECK_EQ(lcx_dict_put(dict, goes.lo, goes.hi, 2, 0, BLOCKING), 0);
}

static void tear_down_dict(void) {
    lcx_dict_close(dict);
    client_leave(&a);
    segment_end(&s);
}

static void use_again(void) {
    int32_t value;
    CHECK_EQ(lcx_dict_pop(dict, goes.lo, goes.hi, &value, BLOCKING), LC_OK);
    CHECK_EQ(lcx_dict_put(dict, comes.lo, comes.hi, 3, 0, BLOCKING), 0);
}

static bool met; /* the last walk was interrupted */

static uint32_t found_beside(bool same_chain, const lc_key *key, int loads) {
    lc_found found;
    set_up_dict(same_chain);
    loads_before_it = loads;
    interruption = use_again;
    lc_dict_find(&inner, key->lo, key->hi, &found);
    met = !interruption;
    interruption = NULL;
    tear_down_dict();
    return found.node;
}

static void walk_beside_a_record_that_is_used_again(void) {
    for (int same_chain = 0; same_chain < 2; same_chain++) {
        met = true;
        for (int loads = 0; met; loads++) {
            CHECK_EQ(found_beside(same_chain, &nobody, loads), LC_NIL);
            CHECK_EQ(found_beside(same_chain, &nobody_either, loads), LC_NIL);
            CHECK_EQ(found_beside(same_chain, &stays, loads), 0); /* never missed */
            CHECK(met || loads > 8);
        }
    }
}

/* Under the lock: keys that share one half are two keys. */
static void look_at_both_halves_of_a_key(void) {
    char text[100];
    uint32_t length;
    set_up_dict(true);
    CHECK_EQ(lc_dict_look(&inner, goes.lo, goes.hi, &length), 1);
    CHECK_EQ(lc_dict_look(&inner, goes.lo, stays.hi, &length), LC_NIL);
    CHECK_EQ(lc_dict_look(&inner, stays.lo, goes.hi, &length), LC_NIL);
    CHECK_EQ(length, 2);
    CHECK_EQ(lcx_dict_put(dict, goes.lo, stays.hi, 3, 0, BLOCKING), 0);
    CHECK_EQ(lcx_dict_put(dict, stays.lo, goes.hi, 4, 0, BLOCKING), 0);
    CHECK_EQ(lcx_dict_check(dict, text, sizeof text, BLOCKING), 0);
    tear_down_dict();
}

/* ------------------------------------------------------------------ the index */

static void prepare(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 4);
}

/* Keys that share one half, as a reservation sees them. */
static void reserve_of_keys_that_share_a_half(void) {
    prepare();
    prompt_make(&p, 1, 3);
    p.keys[1] = (lc_key){p.keys[0].lo, p.keys[0].hi + 1};
    p.keys[2] = (lc_key){p.keys[0].lo ^ UINT64_C(1) << 40, p.keys[0].hi};
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 2);
    CHECK_EQ(p.status[0], LCI_PRESENT);
    tear_down();
}

static void match_counts_what_was_missed(void) {
    int32_t counts[2];
    const int64_t offsets[] = {0, 6, 10};
    lc_key keys[10];
    prepare();
    const lcs_client *record = lcs_client_of(b.at, b.slot);
    for (uint32_t i = 0; i < 6; i++) keys[i] = prompt_key(1, i);
    for (uint32_t i = 6; i < 10; i++) keys[i] = prompt_key(1, i - 6);
    CHECK_EQ(lci_match(b.h, keys, offsets, 2, NS, &l.head, counts), 8);
    CHECK_EQ(record->lookups, 2);
    CHECK_EQ(record->hit_pages, 8);
    CHECK_EQ(record->missed_pages, 2);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    tear_down();
}

#ifdef LC_PAUSE_POINTS

static void (*then)(void);

static void at_the_fence(void) {
    then();
}

/* Another thread leaves: it has waited for the first request's `rows`. */
static void leave(void) { lc_store(&b.at->leaving, 1); }

static void match_of_one_who_leaves_holds_nothing(void) {
    int32_t counts[2];
    const int64_t offsets[] = {0, 2, 4};
    prepare();
    then = leave;
    play(LC_AT_PIN_FENCED, at_the_fence);
    CHECK_EQ(lci_match(b.h, p.keys, offsets, 2, NS, &l.head, counts), LC_E_CLOSED);
    check_played();
    CHECK_EQ(l.head.held, 0);
    for (uint32_t i = 0; i < 4; i++) CHECK_EQ(pins_of(&a, (uint32_t)p.page[i]), 0);
    tear_down();
}

/* A clear has begun, and has not come to these pages: nothing is found from here on. */
static void begin_to_clear(void) {
    lc_txn t;
    CHECK_EQ(lci_lock(a.h, &t, LCI_OP_CLEAR, BLOCKING), LC_OK);
    lc_txn_set(&t, &a.h->ns[0].cursor, 0);
    lc_txn_add(&t, &a.h->root->clearing, 1);
    lc_txn_set(&t, &a.h->ns[0].state, LCI_NS_CLEARING);
    CHECK_EQ(lci_unlock(a.h, &t), LC_OK);
}

static void match_beside_a_clear_that_has_begun(void) {
    prepare();
    then = begin_to_clear;
    play(LC_AT_PIN_FENCED, at_the_fence);
    CHECK_EQ(match(&b, &p, &l), 0);
    check_played();
    for (uint32_t i = 0; i < 4; i++) CHECK_EQ(pins_of(&a, (uint32_t)p.page[i]), 0);
    CHECK_EQ(peek(&b, &p), 0);
    tear_down();
}

#endif

const test walk_tests[] = {
    TEST(walk_beside_a_record_that_is_used_again),
    TEST(look_at_both_halves_of_a_key),
    TEST(reserve_of_keys_that_share_a_half),
    TEST(match_counts_what_was_missed),
#ifdef LC_PAUSE_POINTS
    TEST(match_of_one_who_leaves_holds_nothing),
    TEST(match_beside_a_clear_that_has_begun),
#endif
    END_OF_TESTS,
};
