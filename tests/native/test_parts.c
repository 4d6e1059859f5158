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
    int rc =
        THROUGH(lci_reserve(c->h, &state.op, state.keys, state.n, 0, state.page, state.status, BLOCKING));
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

/* A chain of another group, or of none, does not continue with these pages. */
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
    for (uint32_t page = 0; page < 40; page++) CHECK(lc_load(lci_pin(a.h, a.slot, page)) <= 1);
    uint32_t pins = 0;
    for (uint32_t page = 0; page < 40; page++) pins += lc_load(lci_pin(a.h, a.slot, page));
    CHECK_EQ(pins, PARTS);
    CHECK_EQ(lci_unreserve(a.h, &state.op, state.page, state.status, state.n), LC_OK);
    CHECK_EQ(index_counts(&a).writing, 0);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(reserve_parts(&a, 1, 2, PARTS), 2 * PARTS);
    prompt_unpin(&a, &state);
    tear_down();
}

/* Fewer than are wanted, if nothing were pinned: refused before anything goes. */
static void nothing_goes_for_parts_that_cannot_be(void) {
    set_up_parts(40, PARTS, 1);
    prompt_fill(&a, &q, 2, 25);
    CHECK_EQ(reserve_parts(&a, 0, 6, PARTS), 0);
    CHECK_EQ(state.op.reason, LCI_WHY_PINNED);
    CHECK_EQ(peek(&b, &q), 25);
    CHECK_EQ(lci_unreserve(a.h, &state.op, state.page, state.status, state.n), LC_OK);
    CHECK_EQ(reserve_parts(&a, 0, 5, PARTS), 5 * PARTS);
    prompt_unpin(&a, &state);
    tear_down();
}

/* A chain of a group: every page that lacks a part ends it. */
static void a_prefix_in_parts(void) {
    set_up_parts(512, PARTS, 0);
    group.align = INT64_MAX;
    prompt_make(&state, 0, 40 * PARTS);
    CHECK_EQ(lci_part_keys(p.keys, 40, NUMBER, 0, PARTS, state.keys), LC_OK);
    state.op = (lci_reserve_op){.shards = 1, .ns = NS, .group = NUMBER};
    int made =
        THROUGH(lci_reserve(a.h, &state.op, state.keys, state.n, 0, state.page, state.status, BLOCKING));
    CHECK_EQ(made, 40 * PARTS);
    memcpy(state.fresh, state.page, state.n * sizeof *state.fresh);
    state.made = state.n;
    prompt_publish(&a, &state, 0);
    prompt_unpin(&a, &state);
    group.lease = NULL;
    CHECK_EQ(lci_peek_groups(&group, 1, p.keys, STATE_KEYS, 1, 1, &limit), 40);
    group.lease = &held.head;
    CHECK_EQ(match_parts(STATE_KEYS), 40);
    release_parts();
    doom_part(20, PARTS - 1);
    group.lease = NULL;
    CHECK_EQ(lci_peek_groups(&group, 1, p.keys, STATE_KEYS, 1, 1, &limit), 20);
    tear_down();
}

static uint32_t evict_group(uint32_t want) {
    lci_walk_op op = {0};
    CHECK_EQ(lci_evict_group(a.h, NUMBER, want, &op, BLOCKING), LC_OK);
    index_check(&s);
    return op.pages;
}

static bool there(uint32_t i) { return part_of(i, PARTS - 1) != LC_NIL; }

static uint32_t counts[2 * LCI_NUMBERS];

static void expect_counts(uint32_t plain, uint32_t parts) {
    client reader = reader_join(&s);
    CHECK_EQ(lci_count_groups(reader.h, counts), LC_OK);
    client_forget(&reader);
    CHECK_EQ(counts[0], plain);
    CHECK_EQ(counts[NUMBER], parts);
    index_check(&s);
}

/* What is ready and what is being written, by group, whatever becomes of it. */
static void pages_are_counted_by_group(void) {
    set_up_parts(64, PARTS, 1);
    put_parts(4, 2, PARTS);
    prompt_fill(&a, &q, 2, 20);
    CHECK_EQ(reserve_parts(&a, 9, 1, PARTS), PARTS);
    expect_counts(20, 3 * PARTS);
    prompt_unpin(&a, &state);
    CHECK_EQ(lci_abandon(a.h, state.op.rid, state.op.gen, BLOCKING), LC_OK);
    expect_counts(20, 2 * PARTS);
    CHECK_EQ(evict(&b, 3), 3);
    expect_counts(20, 2 * PARTS - 3);
    CHECK_EQ(match(&a, &q, &held), 20);
    CHECK_EQ(unname(&a, held.pages, 20), LC_OK);
    expect_counts(0, 2 * PARTS - 3);
    tear_down();
}

/* ------------------------------------------------------------------ the minimum of a group */

static int minimum(uint32_t number, uint32_t pages) {
    uint64_t others;
    return lci_group_minimum(a.h, number, pages, &others, BLOCKING);
}

static void others_leave_a_group_its_minimum(void) {
    set_up_parts(64, PARTS, 1);
    CHECK_EQ(minimum(NUMBER, 10), LC_OK);
    for (uint32_t i = 0; i < 3; i++) put_parts(i, 1, PARTS);
    prompt_fill(&a, &q, 2, 20); /* used later */
    CHECK_EQ(evict(&b, 20), 20);
    expect_counts(20 - 20 + 3 * PARTS - 10, 10); /* the states down to the minimum, then the prompt */
    CHECK_EQ(evict(&b, 64), 11);
    expect_counts(0, 10);
    prompt_make(&q, 3, 60);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 54);
    CHECK_EQ(q.op.reason, LCI_WHY_PINNED);
    prompt_unpin(&b, &q);
    CHECK_EQ(lci_abandon(b.h, q.op.rid, q.op.gen, BLOCKING), LC_OK);
    expect_counts(0, 10);
    tear_down();
}

/* Its own calls take them, and those that name the group. */
static void a_group_takes_its_own(void) {
    set_up_parts(64, PARTS, 1);
    CHECK_EQ(minimum(NUMBER, 64), LC_OK);
    put_parts(0, 9, PARTS);
    CHECK_EQ(evict(&b, 1), 0);
    CHECK_EQ(reserve_parts(&a, 9, 1, PARTS), PARTS);
    uint32_t left = 0;
    for (uint32_t i = 0; i < 9; i++) left += there(i);
    CHECK_EQ(left, 8);
    prompt_publish(&a, &state, 0);
    prompt_unpin(&a, &state);
    CHECK_EQ(evict_group(64), 9 * PARTS + 1); /* with the first part of the one that went */
    tear_down();
}

/* A tenant at its quota pays with what is its own, of whatever group. */
static void a_quota_takes_of_a_group_below_its_minimum(void) {
    lci_ns_ref ns;
    set_up_parts(64, PARTS, 1);
    CHECK_EQ(minimum(NUMBER, 30), LC_OK);
    CHECK_EQ(lci_namespace_open(a.h, "w", "t", PARTS, &ns, BLOCKING), LC_OK);
    prompt_make(&state, 0, PARTS);
    CHECK_EQ(lci_part_keys(p.keys, 1, NUMBER, 0, PARTS, state.keys), LC_OK);
    state.op = (lci_reserve_op){.shards = 1, .ns = ns, .run = PARTS, .group = NUMBER, .whole = 1};
    memset(state.status, 0, sizeof state.status);
    CHECK_EQ(lci_reserve(a.h, &state.op, state.keys, PARTS, 0, state.page, state.status, BLOCKING),
             PARTS);
    memcpy(state.fresh, state.page, PARTS * sizeof *state.fresh);
    state.made = PARTS;
    prompt_publish(&a, &state, 0);
    prompt_unpin(&a, &state);
    prompt_make(&q, 2, 3);
    CHECK_EQ(prompt_reserve(&a, &q, ns, 1), 3);
    expect_counts(3, 0); /* a run goes whole */
    prompt_unpin(&a, &q);
    tear_down();
}

/* A namespace's minimum and that of a group hold each by itself. */
static void a_namespace_leaves_a_group_its_minimum(void) {
    lci_ns_ref ns;
    lci_ns_limits limits = {.minimum = 5};
    set_up_parts(64, PARTS, 1);
    CHECK_EQ(minimum(NUMBER, PARTS), LC_OK);
    CHECK_EQ(lci_namespace_limits(a.h, "w", "t", &limits, &ns, BLOCKING), LC_OK);
    put_parts(0, 2, PARTS);
    prompt_make(&q, 2, 60);
    CHECK_EQ(prompt_reserve(&a, &q, ns, 1), 64 - PARTS);
    expect_counts(64 - PARTS, PARTS);
    prompt_unpin(&a, &q);
    tear_down();
}

/* What a list has taken already is still counted: it ends where eviction would. */
static void a_list_leaves_a_group_its_minimum(void) {
    set_up_parts(64, PARTS, 1);
    CHECK_EQ(minimum(NUMBER, PARTS + 2), LC_OK);
    put_parts(0, 3, PARTS);
    CHECK_EQ(oldest(&a, 64, 1), 2 * PARTS - 2);
    CHECK_EQ(lci_release(a.h, &list.head), LC_OK);
    index_check(&s);
    tear_down();
}

static void minimums_of_groups_and_namespaces_fit(void) {
    lci_ns_ref ns;
    lci_ns_limits limits = {.minimum = 30};
    uint64_t others = 0;
    set_up_parts(64, PARTS, 1);
    CHECK_EQ(lci_namespace_limits(a.h, "w", "t", &limits, &ns, BLOCKING), LC_OK);
    CHECK_EQ(minimum(1, 20), LC_OK);
    CHECK_EQ(lci_group_minimum(b.h, 2, 15, &others, BLOCKING), LC_E_RANGE);
    CHECK_EQ(others, 50);
    CHECK_EQ(lc_load(&a.h->root->group[2].minimum), 0);
    CHECK_EQ(minimum(2, 14), LC_OK);
    limits = (lci_ns_limits){.quota = UINT32_MAX, .minimum = 31};
    CHECK_EQ(lci_namespace_limits(a.h, "w", "t", &limits, &ns, BLOCKING), LC_E_RANGE);
    CHECK_EQ(limits.others, 34);
    CHECK_EQ(minimum(1, 0), LC_OK);
    CHECK_EQ(minimum(2, 34), LC_OK);
    CHECK_EQ(minimum(LCI_NUMBERS, 0), LC_E_RANGE);
    CHECK_EQ(minimum(2, UINT32_MAX), LC_E_RANGE);
    CHECK_EQ(lci_count_groups(a.h, counts), LC_OK);
    CHECK_EQ(counts[LCI_NUMBERS + 2], 34);
    client reader = reader_join(&s);
    CHECK_EQ(lci_group_minimum(reader.h, 2, 1, &others, BLOCKING), LC_E_READONLY);
    client_forget(&reader);
    index_check(&s);
    tear_down();
}

static void a_repair_mends_the_counts_of_groups(void) {
    lci_group_count *group;
    set_up_parts(64, PARTS, 1);
    group = a.h->root->group;
    put_parts(0, 2, PARTS);
    CHECK_EQ(minimum(NUMBER, 40), LC_OK);
    CHECK_EQ(minimum(5, 20), LC_OK);
    lc_store(&group[NUMBER].pages, 3);
    CHECK_EQ(index_broken(&s), 67);
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
    expect_counts(0, 2 * PARTS);
    CHECK_EQ(lc_load(&group[NUMBER].minimum), 40);
    lc_store(&group[5].minimum, 25);
    CHECK_EQ(index_broken(&s), 68);
    lc_store(&group[6].minimum, UINT32_MAX);
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
    CHECK_EQ(lc_load(&group[NUMBER].minimum), 40);
    CHECK_EQ(lc_load(&group[5].minimum), 0);
    CHECK_EQ(lc_load(&group[6].minimum), 0);
    index_check(&s);
    tear_down();
}

/* The oldest goes, and all of it, whichever records the pages have. */
static void the_oldest_run_goes_whole(void) {
    for (uint32_t used = 0; used < 2; used++) {
        set_up_parts(64, PARTS, 1);
        put_parts(3, 1, PARTS);
        put_parts(5, 1, PARTS);
        prompt_fill(&a, &q, 2, 20);
        if (used) { /* the first, which then is younger than the second */
            CHECK_EQ(match_parts(4), 4);
            release_parts();
        }
        CHECK_EQ(evict_group(2), PARTS);
        CHECK_EQ(there(3), used == 1);
        CHECK_EQ(there(5), used == 0);
        CHECK_EQ(peek(&b, &q), 20);
        CHECK_EQ(evict_group(64), PARTS);
        CHECK_EQ(evict_group(1), 0);
        CHECK_EQ(peek(&b, &q), 20);
        tear_down();
    }
}

static void a_pinned_run_does_not_go(void) {
    set_up_parts(64, PARTS, 1);
    put_parts(3, 1, PARTS);
    put_parts(5, 1, PARTS);
    CHECK_EQ(match_parts(4), 4);
    CHECK_EQ(evict_group(1), PARTS);
    CHECK(there(3) && !there(5));
    CHECK_EQ(evict_group(1), 0);
    release_parts();
    tear_down();
}

/* What a ticket pins may go when its time is up. */
static void a_late_ticket_keeps_no_run(void) {
    lci_ticket_ref ref;
    set_up_parts(64, PARTS, 1);
    put_parts(3, 1, PARTS);
    CHECK_EQ(match_parts(4), 4);
    CHECK_EQ(lci_ticket_give(b.h, held.pages, PARTS, LC_NIL, 0, UINT64_C(1) << a.slot, FOREVER,
                             &ref, BLOCKING), LC_OK);
    release_parts();
    CHECK_EQ(evict_group(64), 0);
    lc_store(&a.h->tickets[ref.index].deadline_ns, 1);
    CHECK_EQ(evict_group(64), PARTS);
    CHECK_EQ(lci_ticket_drop(b.h, &ref, BLOCKING), LC_OK);
    tear_down();
}

/* More than one hold of the lock has room for, in an index of several windows; some pages stand in
 * none that was collected. */
static void many_of_a_group(void) {
    set_up_parts(LCI_WINDOW + 2000, 1, 1);
    for (uint32_t number = 10; number < 20; number++) prompt_fill(&a, &q, number, 500);
    for (uint32_t i = 0; i < 3; i++) {
        prompt_make(&p, 50 + i, 300);
        CHECK_EQ(reserve_parts(&a, 0, 300, 1), 300);
        prompt_publish(&a, &state, 0);
        prompt_unpin(&a, &state);
    }
    CHECK_EQ(evict_group(500), 500);
    CHECK_EQ(evict_group(1000), 400);
    prompt_make(&q, 10, 500);
    CHECK_EQ(peek(&b, &q), 500);
    tear_down();
}

/* Parents and children of a group far apart, so that the walk comes to a page before it may go. */
static void what_hung_on_others_goes_in_the_end(void) {
    set_up_parts(64, 1, 1);
    for (uint32_t i = 0; i < 6; i++) { /* a chain, each page used at another time */
        prompt_make(&state, 0, i + 1);
        CHECK_EQ(lci_part_keys(p.keys, i + 1, NUMBER, 0, 1, state.keys), LC_OK);
        state.op = (lci_reserve_op){.shards = 1, .ns = NS, .group = NUMBER};
        CHECK_EQ(lci_reserve(a.h, &state.op, state.keys, i + 1, i, state.page, state.status,
                             BLOCKING), 1);
        state.fresh[0] = state.page[0];
        state.made = 1;
        prompt_publish(&a, &state, 0);
        CHECK_EQ(lci_unreserve(a.h, &state.op, state.page, state.status, 1), LC_OK);
    }
    CHECK_EQ(evict_group(64), 6);
    tear_down();
}

/* A tenant's quota is paid with a run, and not with a part of one. */
static void a_quota_is_paid_with_whole_runs(void) {
    lci_ns_ref ns;
    set_up_parts(64, PARTS, 1);
    CHECK_EQ(lci_namespace_open(a.h, "w", "t", 2 * PARTS + 2, &ns, BLOCKING), LC_OK);
    group.ns = ns;
    for (uint32_t i = 0; i < 3; i++) {
        prompt_make(&state, 0, PARTS);
        CHECK_EQ(lci_part_keys(p.keys + i, 1, NUMBER, 0, PARTS, state.keys), LC_OK);
        state.op = (lci_reserve_op){
            .shards = 1, .ns = ns, .run = PARTS, .group = NUMBER, .whole = 1};
        CHECK_EQ(lci_reserve(a.h, &state.op, state.keys, PARTS, 0, state.page, state.status,
                             BLOCKING), PARTS);
        memcpy(state.fresh, state.page, PARTS * sizeof *state.fresh);
        state.made = PARTS;
        prompt_publish(&a, &state, 0);
        prompt_unpin(&a, &state);
    }
    for (uint32_t part = 0; part < PARTS; part++) CHECK(part_of(0, part) == LC_NIL);
    CHECK(there(1) && there(2));
    index_check(&s);
    tear_down();
}

const test part_tests[] = {
    TEST(nothing_goes_for_parts_that_cannot_be),
    TEST(a_prefix_in_parts),
    TEST(pages_are_counted_by_group),
    TEST(others_leave_a_group_its_minimum),
    TEST(a_group_takes_its_own),
    TEST(a_quota_takes_of_a_group_below_its_minimum),
    TEST(a_namespace_leaves_a_group_its_minimum),
    TEST(a_list_leaves_a_group_its_minimum),
    TEST(minimums_of_groups_and_namespaces_fit),
    TEST(a_repair_mends_the_counts_of_groups),
    TEST(the_oldest_run_goes_whole),
    TEST(a_pinned_run_does_not_go),
    TEST(a_late_ticket_keeps_no_run),
    TEST(many_of_a_group),
    TEST(what_hung_on_others_goes_in_the_end),
    TEST(a_quota_is_paid_with_whole_runs),
    TEST(parts_are_pinned_in_their_order),
    TEST(parts_with_a_hole_are_a_miss),
    TEST(windows_of_many_parts),
    TEST(windows_of_one_part),
    TEST(parts_that_cannot_be),
    TEST(groups_do_not_hang_on_each_other),
    TEST(parts_are_reserved_all_or_none),
    END_OF_TESTS,
};
