/* Hash chains: SharedDict beside a model, walks that meet what a writer left, and the bound. */
#include "world.h"

#include <stdlib.h>

#define CAPACITY 200
#define BUCKETS 512 /* the power of two above one and a half times the capacity */
#define RECORD 64

static segment s;
static client c;
static lcx_dict *dict;

static void set_up(void) {
    s = segment_make(LCS_PAYLOAD_OFFSET + lcx_dict_bytes(CAPACITY));
    lcx_dict_format(s.base, CAPACITY);
    c = client_join(&s);
    dict = lcx_dict_open(c.at, CAPACITY);
}

static void tear_down(void) {
    lcx_dict_close(dict);
    client_leave(&c);
    segment_end(&s);
}

/* The same memory through dict.h. */
static lc_dict inner(void) {
    uint8_t *records = s.base + LCS_PAYLOAD_OFFSET + 64;
    return (lc_dict){.records = records, .stride = RECORD, .nodes = CAPACITY, .mask = BUCKETS - 1,
                     .buckets = (_Atomic uint32_t *)(records + CAPACITY * RECORD)};
}

static int put(lc_key key, int32_t value) {
    return lcx_dict_put(dict, key.lo, key.hi, value, 0, BLOCKING);
}

static int get(lc_key key, int32_t *value) { return lcx_dict_get(dict, key.lo, key.hi, value); }

static int pop(lc_key key, int32_t *value) {
    return lcx_dict_pop(dict, key.lo, key.hi, value, BLOCKING);
}

static int broken(void) {
    char text[200];
    int rc = lcx_dict_check(dict, text, sizeof text, BLOCKING);
    CHECK(rc == 0 || rc == 1);
    return rc;
}

static void dict_fills_the_size_that_it_says(void) {
    CHECK_EQ(lcx_dict_bytes(1), 64 + 64 + 64 * 4);
    CHECK_EQ(lcx_dict_bytes(CAPACITY), 64 + CAPACITY * 64 + BUCKETS * 4);
}

static void dict_puts_and_pops(void) {
    int32_t value = -1;
    set_up();
    lc_key key = prompt_key(1, 1);
    CHECK_EQ(get(key, &value), LC_E_MISSING);
    CHECK_EQ(pop(key, &value), LC_E_MISSING);
    CHECK_EQ(put(key, 7), 0);
    CHECK_EQ(put(key, 8), 1);
    CHECK_EQ(lcx_dict_put(dict, key.lo, key.hi, 9, 1, BLOCKING), 1);
    CHECK_EQ(get(key, &value), LC_OK);
    CHECK_EQ(value, 8);
    CHECK_EQ(get((lc_key){key.lo, key.hi + 1}, &value), LC_E_MISSING);
    CHECK_EQ(lcx_dict_length(dict), 1);
    value = 0;
    CHECK_EQ(pop(key, &value), LC_OK);
    CHECK_EQ(value, 8);
    CHECK_EQ(lcx_dict_length(dict), 0);
    CHECK_EQ(get(key, &value), LC_E_MISSING);
    CHECK(!broken());
    tear_down();
}

static void dict_random_calls_equal_a_model(void) {
    int32_t model[64], value;
    uint32_t random = 1;
    int count = 0;
    set_up();
    for (int i = 0; i < 64; i++) model[i] = -1;
    for (int step = 0; step < 4000; step++) {
        random = random * 1664525 + 1013904223;
        uint32_t k = random >> 16 & 63;
        lc_key key = crowded_key(k & 3, k); /* four chains of 16 */
        if (random >> 31) {
            CHECK_EQ(put(key, step), model[k] >= 0);
            count += model[k] < 0;
            model[k] = step;
        } else {
            CHECK_EQ(pop(key, &value), model[k] < 0 ? LC_E_MISSING : LC_OK);
            if (model[k] >= 0) CHECK_EQ(value, model[k]);
            count -= model[k] >= 0;
            model[k] = -1;
        }
        CHECK_EQ(lcx_dict_length(dict), count);
        for (uint32_t i = 0; i < 64; i++) {
            CHECK_EQ(get(crowded_key(i & 3, i), &value), model[i] < 0 ? LC_E_MISSING : LC_OK);
            if (model[i] >= 0) CHECK_EQ(value, model[i]);
        }
    }
    CHECK(!broken());
    tear_down();
}

static void dict_of_many_keys_at_once(void) {
    lc_key keys[40], copied[CAPACITY];
    int32_t values[CAPACITY];
    uint8_t found[40];
    set_up();
    for (uint32_t i = 0; i < 40; i++) {
        keys[i] = prompt_key(2, i);
        if (i % 3) put(keys[i], (int32_t)i);
    }
    CHECK_EQ(lcx_dict_get_many(dict, keys, 40, values, found), 26);
    for (uint32_t i = 0; i < 40; i++) {
        CHECK_EQ(found[i], i % 3 != 0);
        CHECK_EQ(values[i], i % 3 ? i : 0);
    }
    CHECK_EQ(lcx_dict_copy(dict, copied, values, CAPACITY, BLOCKING), 26);
    uint64_t sum = 0;
    for (int i = 0; i < 26; i++) {
        sum += (uint32_t)values[i];
        CHECK_EQ(copied[i].hi, keys[values[i]].hi);
    }
    CHECK_EQ(sum, 39 * 40 / 2 - 3 * (13 * 14 / 2));
    CHECK_EQ(lcx_dict_copy(dict, copied, values, 5, BLOCKING), 5);
    tear_down();
}

static void dict_is_full_at_its_capacity_and_at_a_chains_bound(void) {
    int32_t value;
    set_up();
    for (uint32_t i = 0; i < LC_CHAIN_MAX; i++) CHECK_EQ(put(crowded_key(5, i), 1), 0);
    CHECK_EQ(put(crowded_key(5, LC_CHAIN_MAX), 1), LC_E_FULL);
    CHECK_EQ(get(crowded_key(5, 0), &value), LC_OK); /* the last of the longest chain */
    CHECK_EQ(get(crowded_key(5, LC_CHAIN_MAX), &value), LC_E_MISSING);
    CHECK_EQ(pop(crowded_key(5, 0), &value), LC_OK);
    CHECK_EQ(put(crowded_key(5, LC_CHAIN_MAX), 1), 0);
    for (uint32_t i = 0; i < CAPACITY - LC_CHAIN_MAX; i++)
        CHECK_EQ(put(crowded_key(6 + i, i), 1), 0);
    CHECK_EQ(put(crowded_key(400, 0), 1), LC_E_FULL);
    CHECK_EQ(lcx_dict_length(dict), CAPACITY);
    CHECK(!broken());
    CHECK_EQ(pop(crowded_key(6, 0), &value), LC_OK);
    CHECK_EQ(put(crowded_key(400, 0), 1), 0);
    tear_down();
}

static void dict_handles_of_others(void) {
    int32_t value;
    uint8_t found;
    char text[100];
    lc_key key = prompt_key(1, 1);
    set_up();
    put(key, 3);
    client r = reader_join(&s);
    lcx_dict *read = lcx_dict_open(r.at, CAPACITY);
    CHECK_EQ(lcx_dict_get(read, key.lo, key.hi, &value), LC_OK);
    CHECK_EQ(value, 3);
    CHECK_EQ(lcx_dict_put(read, key.lo, key.hi, 4, 0, BLOCKING), LC_E_READONLY);
    CHECK_EQ(lcx_dict_pop(read, key.lo, key.hi, &value, BLOCKING), LC_E_READONLY);
    CHECK_EQ(lcx_dict_copy(read, NULL, NULL, 0, BLOCKING), LC_E_READONLY);
    lcs_attachment_close(r.at);
    CHECK_EQ(lcx_dict_get(read, key.lo, key.hi, &value), LC_E_CLOSED);
    CHECK_EQ(lcx_dict_get_many(read, &key, 1, &value, &found), LC_E_CLOSED);
    CHECK_EQ(lcx_dict_length(read), LC_E_CLOSED);
    CHECK_EQ(lcx_dict_check(read, text, sizeof text, BLOCKING), LC_E_CLOSED);
    lcx_dict_close(read);
    client_forget(&r);
    tear_down();
}

static void dict_damage_is_named(void) {
    int32_t value;
    set_up();
    lc_dict d = inner();
    for (uint32_t i = 0; i < 3; i++) put(crowded_key(9, i), 1); /* chain 2, 1, 0 */
    put(crowded_key(8, 0), 1);
    pop(crowded_key(8, 0), &value); /* record 3 is free */
    lc_node *node = lc_node_at(&d, 1), *last = lc_node_at(&d, 0), *free = lc_node_at(&d, 3);
    _Atomic uint32_t *root = (_Atomic uint32_t *)(s.base + LCS_PAYLOAD_OFFSET);
    struct { _Atomic uint32_t *word; uint32_t value; } damage[] = {
        {&node->next, 2},                                   /* round in a circle */
        {&node->next, CAPACITY},                            /* out of range */
        {&node->next, LC_NIL},                              /* too short */
        {&node->gen, lc_load(&node->gen) + 1},              /* odd */
        {(_Atomic uint32_t *)&node->lo, 10},                /* of another chain */
        {(_Atomic uint32_t *)&free->user1, 1},              /* the free stack leads to one in use */
        {(_Atomic uint32_t *)&free->user1, CAPACITY},
        {&root[0], CAPACITY + 1},                           /* free_head, fresh, count */
        {&root[1], 9},
        {&root[2], 9},
    };
    CHECK(!broken());
    for (size_t i = 0; i < sizeof damage / sizeof *damage; i++) {
        uint32_t old = lc_load(damage[i].word);
        lc_store(damage[i].word, damage[i].value);
        CHECK(broken());
        lc_store(damage[i].word, old);
        CHECK(!broken());
    }
    uint64_t lo = lc_load(&node->lo), hi = lc_load(&node->hi);
    lc_store(&node->lo, lc_load(&last->lo));
    lc_store(&node->hi, lc_load(&last->hi));
    CHECK(broken()); /* the same key twice */
    lc_store(&node->lo, lo);
    lc_store(&node->hi, hi);
    lc_store(&lc_node_at(&d, 2)->next, 0); /* 1 is in no chain: it cannot be unlinked */
    lc_txn t = {.base = s.base, .lock = lcs_lock_of(c.at),
                .log = (_Atomic uint64_t *)(s.base + LCS_LOG_OFFSET)};
    lc_dict_unlink(&t, &d, 1);
    CHECK_EQ(t.error, LC_E_CORRUPT);
    tear_down();
}

/* A walk from a record that was used again, in another chain, starts again and finds the key. */
static void dict_walk_from_a_record_of_another_chain(void) {
    lc_found found;
    set_up();
    lc_dict d = inner();
    put(crowded_key(1, 0), 11); /* record 0 */
    put(crowded_key(2, 0), 22); /* record 1 */
    lc_key key = crowded_key(2, 0);
    CHECK_EQ(lc_dict_walk(&d, key.lo, key.hi, 0, &found), 0);
    lc_dict_find_from(&d, key.lo, key.hi, 0, &found);
    CHECK_EQ(found.node, 1);
    CHECK_EQ(found.word, 22);
    CHECK_EQ(found.gen, lc_load(&lc_node_at(&d, 1)->gen));
    tear_down();
}

/* A record left odd holds nobody up for ever, and a chain in a circle does not either. */
static void dict_walk_ends_whatever_it_meets(void) {
    lc_found found;
    set_up();
    lc_dict d = inner();
    put(crowded_key(3, 0), 1);
    put(crowded_key(3, 1), 2);
    lc_key first = crowded_key(3, 0), absent = crowded_key(3, 9);
    lc_node *head = lc_node_at(&d, 1);
    lc_store(&head->gen, lc_load(&head->gen) | 1);
    lc_dict_find(&d, first.lo, first.hi, &found);
    CHECK_EQ(found.node, LC_NIL);
    lc_gen_close(&head->gen);
    lc_store(&lc_node_at(&d, 0)->next, 1);
    lc_dict_find(&d, absent.lo, absent.hi, &found);
    CHECK_EQ(found.node, LC_NIL);
    CHECK_EQ(lc_dict_chain(&d, absent.lo), LC_CHAIN_MAX + 1);
    uint32_t length;
    CHECK_EQ(lc_dict_look(&d, absent.lo, absent.hi, &length), LC_NIL);
    CHECK_EQ(length, LC_CHAIN_MAX + 1);
    lc_store(&lc_node_at(&d, 0)->next, LC_NIL);
    CHECK_EQ(lc_dict_look(&d, first.lo, first.hi, &length), 0);
    CHECK_EQ(length, 1);
    tear_down();
}

static void dict_step_of_a_dead_client_is_undone(void) {
    int32_t value;
    set_up();
    lc_dict d = inner();
    put(crowded_key(4, 0), 1);
    put(crowded_key(4, 1), 2);
    client dying = client_join(&s);
    lc_txn t;
    CHECK_EQ(lcs_lock_take(dying.at, &t, 0, BLOCKING, LCS_PAYLOAD_OFFSET, s.bytes), LC_OK);
    lc_dict_unlink(&t, &d, 0);
    lc_dict_insert(&t, &d, 100, crowded_key(4, 7), 9);
    CHECK_EQ(get(crowded_key(4, 7), &value), LC_OK);
    CHECK_EQ(get(crowded_key(4, 0), &value), LC_E_MISSING);
    client_die(&dying);
    CHECK(!broken());
    CHECK_EQ(get(crowded_key(4, 7), &value), LC_E_MISSING);
    CHECK_EQ(get(crowded_key(4, 0), &value), LC_OK);
    CHECK_EQ(value, 1);
    tear_down();
}

const test dict_tests[] = {
    TEST(dict_fills_the_size_that_it_says),
    TEST(dict_puts_and_pops),
    TEST(dict_random_calls_equal_a_model),
    TEST(dict_of_many_keys_at_once),
    TEST(dict_is_full_at_its_capacity_and_at_a_chains_bound),
    TEST(dict_handles_of_others),
    TEST(dict_damage_is_named),
    TEST(dict_walk_from_a_record_of_another_chain),
    TEST(dict_walk_ends_whatever_it_meets),
    TEST(dict_step_of_a_dead_client_is_undone),
    END_OF_TESTS,
};
