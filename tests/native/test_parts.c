/* Pages of a group that lie in several pages of an index: found and pinned when every part is there,
 * whatever goes in between. */
#include "calls.h"
#include "pair.h"

#define NUMBER 3
#define PARTS 7
#define STATE_KEYS 60 /* that have a page of the group, from the first on */

static prompt state;
static lease held;
static lci_group group;
static int32_t limit;

/* Reserve the parts of pages [from, from + n) of `p`. */
static int reserve_parts(client *c, uint32_t from, uint32_t n, uint32_t parts) {
    prompt_make(&state, 0, n * parts);
    CHECK_EQ(lci_part_keys(p.keys + from, n, NUMBER, 0, parts, state.keys), LC_OK);
    state.op = (lci_reserve_op){
        .shards = 1, .ns = NS, .run = parts, .group = NUMBER, .whole = 1};
    memset(state.status, 0, sizeof state.status);
    int rc = lci_reserve(c->h, &state.op, state.keys, state.n, 0, state.page, state.status, BLOCKING);
    state.made = 0;
    for (uint32_t i = 0; i < state.n; i++)
        if (state.status[i] == LCI_NEW) state.fresh[state.made++] = state.page[i];
    return rc;
}

static void put_parts(uint32_t from, uint32_t n, uint32_t parts) {
    CHECK_EQ(reserve_parts(&a, from, n, parts), (int)(n * parts));
    prompt_publish(&a, &state, 0);
    prompt_unpin(&a, &state);
}

static void set_up_parts(uint64_t pages, uint32_t parts, uint64_t back) {
    set_up(pages);
    prompt_make(&p, 1, STATE_KEYS);
    memset(&held, 0, sizeof held);
    held.head.capacity = MAX_KEYS;
    group = (lci_group){.h = b.h, .lease = &held.head, .align = 1, .back = back, .ns = NS,
                        .number = NUMBER, .parts = parts};
}

static int match_parts(uint32_t n) {
    held.head.held = 0;
    return lci_match_groups(&group, 1, p.keys, n, 1, 1, &limit);
}

static void release_parts(void) {
    CHECK_EQ(lci_release(b.h, &held.head), LC_OK);
    index_check(&s);
}

static uint32_t part_of(uint32_t i, uint32_t part) {
    uint32_t length;
    lc_key key = lci_part_key(p.keys[i], NUMBER, part);
    return lc_dict_look(&a.h->dict, key.lo, key.hi, &length);
}

/* A page that goes though others hang on it: as one that a writer's death, or a clear, takes. */
static void doom_part(uint32_t i, uint32_t part) {
    lc_txn t;
    CHECK_EQ(lci_lock(a.h, &t, LCI_OP_EVICT, BLOCKING), LC_OK);
    lci_collect(a.h, &t, 256);
    CHECK(lci_doom(a.h, &t, part_of(i, part)));
    CHECK_EQ(lci_unlock(a.h, &t), LC_OK);
}

static void parts_are_pinned_in_their_order(void) {
    set_up_parts(64, PARTS, 1);
    put_parts(4, 1, PARTS);
    put_parts(9, 1, PARTS);
    CHECK_EQ(match_parts(STATE_KEYS), 10);
    CHECK_EQ(limit, 0);
    CHECK_EQ(group.first, 9);
    CHECK_EQ(held.head.held, PARTS);
    for (uint32_t i = 0; i < PARTS; i++) CHECK_EQ(held.pages[i], (int32_t)part_of(9, i));
    release_parts();
    CHECK_EQ(match_parts(9), 5);
    release_parts();
    CHECK_EQ(match_parts(4), 0);
    CHECK_EQ(held.head.held, 0);
    tear_down();
}

/* The last part says that a page is there; whether it is, pinning tells. */
static void parts_with_a_hole_are_a_miss(void) {
    for (uint32_t part = 0; part < PARTS; part++) {
        set_up_parts(64, PARTS, 1);
        put_parts(4, 1, PARTS);
        put_parts(9, 1, PARTS);
        doom_part(9, part);
        CHECK_EQ(match_parts(STATE_KEYS), 5);
        CHECK_EQ(held.head.held, PARTS);
        release_parts();
        doom_part(4, part);
        CHECK_EQ(match_parts(STATE_KEYS), 0);
        CHECK_EQ(held.head.held, 0);
        index_check(&s);
        CHECK_EQ(reserve_parts(&a, 9, 1, PARTS), 1); /* the missing one alone */
        prompt_publish(&a, &state, 0);
        prompt_unpin(&a, &state);
        CHECK_EQ(match_parts(STATE_KEYS), 10);
        release_parts();
        tear_down();
    }
}

/* More parts than keys are made at a time, across the border in the middle of a page. */
static void windows_of_many_parts(void) {
    set_up_parts(512, PARTS, 40);
    put_parts(0, 50, PARTS);
    CHECK_EQ(match_parts(STATE_KEYS), 50);
    CHECK_EQ(group.first, 10);
    CHECK_EQ(held.head.held, 40 * PARTS);
    for (uint32_t i = 0; i < 40 * PARTS; i++)
        CHECK_EQ(held.pages[i], (int32_t)part_of(10 + i / PARTS, i % PARTS));
    release_parts();
    doom_part(30, 3);
    CHECK_EQ(match_parts(STATE_KEYS), 30);
    CHECK_EQ(held.head.held, 30 * PARTS);
    release_parts();
    tear_down();
}

/* A group whose pages have one part and keys of their own, many of them. */
static void windows_of_one_part(void) {
    set_up_parts(512, 1, 55);
    put_parts(2, 58, 1);
    CHECK_EQ(match_parts(STATE_KEYS), 60);
    CHECK_EQ(held.head.held, 55);
    release_parts();
    CHECK_EQ(match_parts(56), 0); /* it would need page 1 */
    tear_down();
}

static void parts_that_cannot_be(void) {
    set_up_parts(64, PARTS, 1);
    put_parts(4, 1, PARTS);
    group.parts = 0;
    CHECK_EQ(match_parts(STATE_KEYS), LC_E_RANGE);
    group.parts = LCI_PARTS + 1;
    CHECK_EQ(match_parts(STATE_KEYS), LC_E_RANGE);
    group.parts = PARTS;
    group.number = LCI_NUMBERS;
    CHECK_EQ(match_parts(STATE_KEYS), LC_E_RANGE);
    group.number = NUMBER;
    held.head.capacity = PARTS - 1;
    CHECK_EQ(match_parts(STATE_KEYS), LC_E_RANGE);
    CHECK_EQ(held.head.held, 0);
    CHECK_EQ(lci_part_keys(p.keys, 1, LCI_NUMBERS, 0, 1, state.keys), LC_E_RANGE);
    CHECK_EQ(lci_part_keys(p.keys, 1, 1, 2, 1, state.keys), LC_E_RANGE);
    CHECK_EQ(lci_part_keys(p.keys, 1, 1, 0, LCI_PARTS + 1, state.keys), LC_E_RANGE);
    state.op = (lci_reserve_op){.shards = 1, .ns = NS, .group = LCI_NUMBERS};
    CHECK_EQ(lci_reserve(a.h, &state.op, p.keys, 1, 0, state.page, state.status, BLOCKING),
             LC_E_RANGE);
    lci_walk_op none = {0};
    CHECK_EQ(lci_evict_group(a.h, LCI_NUMBERS, 1, &none, BLOCKING), LC_E_RANGE);
    tear_down();
}

/* A chain of another group, or of none, does not go on with these pages. */
static void groups_do_not_hang_on_each_other(void) {
    set_up_parts(64, 1, 1);
    prompt_fill(&a, &q, 1, 3);
    prompt_make(&q, 1, 4);
    q.op = (lci_reserve_op){.shards = 1, .ns = NS, .run = 1, .group = NUMBER};
    CHECK_EQ(lci_reserve(a.h, &q.op, q.keys, 4, 3, q.page, q.status, BLOCKING), 1);
    q.made = 1;
    q.fresh[0] = q.page[0];
    prompt_publish(&a, &q, 0);
    CHECK_EQ(lci_unreserve(a.h, &q.op, q.page, q.status, 1), LC_OK);
    int32_t children[4];
    CHECK_EQ(lci_children(a.h, q.keys, 4, NS, children), LC_OK);
    CHECK(children[1] == 1 && children[2] == 0 && children[3] == 0);
    index_check(&s);
    tear_down();
}

/* Enough for a part of what is wanted: all of it goes back, and what was there stays pinned. */
static void parts_are_reserved_all_or_none(void) {
    set_up_parts(40, PARTS, 1);
    put_parts(0, 1, PARTS);
    prompt_fill(&a, &q, 2, 25);
    CHECK_EQ(match(&b, &q, &l), 25);
    CHECK_EQ(reserve_parts(&a, 0, 3, PARTS), 0); /* 8 are free, 14 are wanted */
    CHECK_EQ(state.made, 0);
    CHECK_EQ(state.op.made, 0);
    CHECK_EQ(state.op.gen, 0);
    for (uint32_t i = 0; i < PARTS; i++) CHECK_EQ(state.status[i], LCI_PRESENT);
    for (uint32_t i = PARTS; i < 3 * PARTS; i++) CHECK_EQ(state.status[i], LCI_NO_ROOM);
    CHECK_EQ(pins_of(&a, part_of(0, 0)), 1);
    CHECK_EQ(lci_unreserve(a.h, &state.op, state.page, state.status, state.n), LC_OK);
    CHECK_EQ(index_counts(&a).writing, 0);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(reserve_parts(&a, 1, 2, PARTS), 2 * PARTS);
    prompt_unpin(&a, &state);
    tear_down();
}

const test part_tests[] = {
    TEST(parts_are_pinned_in_their_order),
    TEST(parts_with_a_hole_are_a_miss),
    TEST(windows_of_many_parts),
    TEST(windows_of_one_part),
    TEST(parts_that_cannot_be),
    TEST(groups_do_not_hang_on_each_other),
    TEST(parts_are_reserved_all_or_none),
    END_OF_TESTS,
};
