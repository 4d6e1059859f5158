/* The other side of a race, played at the pause point that decides it. Without pause points
 * compiled in there is nothing here. */
#include "pair.h"

#include <setjmp.h>
#include <stdlib.h>

#ifdef LC_PAUSE_POINTS

static prompt fresh;

static uint32_t matched;
static void match_it(void) { matched = match(&b, &p, &l); }

/* Whoever pins before the evictor has looked keeps its pages; whoever comes later gets none. */
static void race_of_matching_and_evicting(void) {
    static const int points[] = {LC_AT_EVICT_CHOSEN, LC_AT_EVICT_MARKED, LC_AT_EVICT_FENCED,
                                 LC_AT_EVICT_UNLINKED};
    for (int i = 0; i < 4; i++) {
        set_up(64);
        prompt_fill(&a, &p, 1, 3);
        play(points[i], match_it);
        uint32_t freed = evict(&a, 3);
        check_played();
        CHECK_EQ(matched + freed, 3);
        CHECK_EQ(matched, points[i] == LC_AT_EVICT_CHOSEN ? 3 : 0);
        for (uint32_t k = 0; k < matched; k++) CHECK_EQ(pins_of(&a, (uint32_t)p.page[k]), 1);
        for (uint32_t k = matched; k < 3; k++) CHECK_EQ(pins_of(&a, (uint32_t)p.page[k]), 0);
        index_check(&s);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
        tear_down();
    }
}

static uint32_t freed_in_between;
static void evict_all(void) { freed_in_between = evict(&a, 64); }

static void race_of_evicting_and_matching(void) {
    static const int points[] = {LC_AT_WALK_NEXT, LC_AT_PIN_COUNTED, LC_AT_PIN_FENCED};
    for (int i = 0; i < 3; i++) {
        set_up(64);
        prompt_fill(&a, &p, 1, 3);
        play(points[i], evict_all);
        matched = match(&b, &p, &l);
        check_played();
        CHECK_EQ(matched, points[i] == LC_AT_WALK_NEXT ? 0 : 3);
        CHECK_EQ(freed_in_between, 3 - matched);
        CHECK_EQ(pins_of(&a, (uint32_t)p.page[0]), matched > 0);
        index_check(&s);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
        tear_down();
    }
}

/* The page is evicted and used again under another key, and published, while b holds on to it. */
static void use_again(void) {
    CHECK_EQ(evict(&a, 64), 1);
    prompt_fill(&a, &q, 2, 1);
    CHECK_EQ(q.page[0], p.page[0]);
}

static void race_of_matching_and_using_again(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 1);
    play(LC_AT_WALK_NEXT, use_again);
    CHECK_EQ(match(&b, &p, &l), 0);
    check_played();
    CHECK_EQ(pins_of(&a, (uint32_t)q.page[0]), 0);
    CHECK_EQ(peek(&b, &q), 1);
    tear_down();
}

/* The same, where the pin is counted only after the page was published under its new key. */
static void use_again_before_the_pin(void) {
    _Atomic uint16_t *count = lci_pin(b.h, b.slot, (uint32_t)p.page[0]);
    lc_store(count, 0);
    use_again();
    lc_store(count, 1);
}

static void race_of_pinning_and_using_again(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 1);
    play(LC_AT_PIN_COUNTED, use_again_before_the_pin);
    CHECK_EQ(match(&b, &p, &l), 0);
    check_played();
    CHECK_EQ(pins_of(&a, (uint32_t)q.page[0]), 0);
    CHECK_EQ(peek(&b, &q), 1);
    tear_down();
}

static void clear_it(void) { CHECK_EQ(lci_clear(a.h, NS, BLOCKING), LC_OK); }

static void race_of_matching_and_clearing(void) {
    static const int points[] = {LC_AT_WALK_NEXT, LC_AT_PIN_COUNTED, LC_AT_PIN_FENCED};
    for (int i = 0; i < 3; i++) {
        set_up(64);
        prompt_fill(&a, &p, 1, 3);
        play(points[i], clear_it);
        CHECK_EQ(match(&b, &p, &l), 0);
        check_played();
        CHECK_EQ(pins_of(&a, (uint32_t)p.page[0]), 0);
        tear_down();
    }
    set_up(64);
    prompt_fill(&a, &p, 1, 3);
    play(LC_AT_WALK_NEXT, clear_it);
    CHECK_EQ(peek(&b, &p), 0);
    check_played();
    tear_down();
}

static void publish_second(void) {
    CHECK_EQ(lci_publish(a.h, fresh.op.rid, fresh.op.gen, 1, fresh.fresh, fresh.made), 1);
}

/* Two last publishers: each sees all shards done, both make the pages ready. */
static void race_of_two_last_publishers(void) {
    set_up(64);
    prompt_make(&fresh, 3, 5);
    CHECK_EQ(prompt_reserve(&a, &fresh, NS, 2), 5);
    play(LC_AT_SHARD_DONE, publish_second);
    CHECK_EQ(lci_publish(a.h, fresh.op.rid, fresh.op.gen, 0, fresh.fresh, fresh.made), 1);
    check_played();
    CHECK_EQ(peek(&b, &fresh), 5);
    prompt_unpin(&a, &fresh);
    tear_down();
}

static void publish_second_and_collect(void) {
    publish_second();
    CHECK_EQ(evict(&b, 1), 0); /* pinned by a; but the reservation is gone now */
    CHECK_EQ(index_counts(&b).reservations, 0);
}

static void race_of_a_publisher_and_the_collector(void) {
    set_up(64);
    prompt_make(&fresh, 3, 5);
    CHECK_EQ(prompt_reserve(&a, &fresh, NS, 2), 5);
    play(LC_AT_SHARD_DONE, publish_second_and_collect);
    CHECK_EQ(lci_publish(a.h, fresh.op.rid, fresh.op.gen, 0, fresh.fresh, fresh.made), 1);
    check_played();
    CHECK_EQ(peek(&b, &fresh), 5);
    prompt_unpin(&a, &fresh);
    tear_down();
}

static jmp_buf death;

static void die(void) { longjmp(death, 1); }

/* Somebody looks for names at an entry that is cleared meanwhile and given these very names, by one
 * who dies before it is open: what was seen is neither the old namespace nor a new one. */
static void die_naming_it_again(void) {
    lci_ns_ref ref;
    CHECK_EQ(lci_clear(a.h, NS, BLOCKING), LC_OK);
    if (setjmp(death)) return;
    play(LC_AT_NAME_STORED, die);
    (void)lci_namespace_open(a.h, "new", "", 0, &ref, BLOCKING);
    check_failed(__FILE__, __LINE__, "lived on");
}

static void race_of_looking_for_a_name_that_is_being_given(void) {
    lci_ns_ref found;
    set_up(64);
    play(LC_AT_NAME_LOOKED, die_naming_it_again);
    CHECK_EQ(lci_namespace_find(b.h, "new", "", &found), LC_E_MISSING);
    check_played();
    client_die(&a);
    CHECK_EQ(lci_reap_slot(b.h, 1, BLOCKING), 1);
    CHECK_EQ(lci_namespace_open(b.h, "new", "", 0, &found, BLOCKING), LC_OK);
    CHECK(lci_ns_open(b.h, found));
    client_leave(&b);
    index_check(&s);
    segment_end(&s);
}

const test race_tests[] = {
    TEST(race_of_matching_and_evicting),
    TEST(race_of_evicting_and_matching),
    TEST(race_of_matching_and_using_again),
    TEST(race_of_pinning_and_using_again),
    TEST(race_of_matching_and_clearing),
    TEST(race_of_two_last_publishers),
    TEST(race_of_a_publisher_and_the_collector),
    TEST(race_of_looking_for_a_name_that_is_being_given),
    END_OF_TESTS,
};

#else
const test race_tests[] = {END_OF_TESTS};
#endif
