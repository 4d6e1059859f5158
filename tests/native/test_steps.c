/* Calls of several steps of which one fails, on pages without a key and on kept ones: what the steps
 * before it did stays and has been told, and nothing of the one that failed. */
#include "calls.h"
#include "pair.h"

/* ------------------------------------------------------------------ pages without a key */

/* The second step has to evict, and the queue is damaged: the pages of the first are ours. */
static void taking_keeps_the_steps_before(void) {
    set_up(64);
    prompt_fill(&b, &p, 1, 20);
    collect(&b);
    break_word(&a.h->pages[p.page[19]].queue.prev, 1000);
    CHECK_EQ(allocate(&a, 60), LC_E_CORRUPT);
    CHECK_EQ(op.done, LCI_BATCH);
    mend_word();
    CHECK_EQ(index_counts(&a).held, LCI_BATCH);
    CHECK_EQ(free_pages(&a, pages, LCI_BATCH), LC_OK);
    tear_down();
}

/* Nothing was given back, so the pages keep the pins that they are held by. */
static void giving_back_that_fails_leaves_the_pins(void) {
    set_up(64);
    CHECK_EQ(allocate(&a, 3), LC_OK);
    break_word(&a.h->lists.heads[LCI_DOOMED_LIST].prev, 1000);
    CHECK_EQ(free_pages(&a, pages, 3), LC_E_CORRUPT);
    CHECK_EQ(op.done, 0);
    mend_word();
    for (int i = 0; i < 3; i++) CHECK_EQ(pins_of(&a, (uint32_t)pages[i]), 1);
    tear_down();
}

#ifdef LC_PAUSE_POINTS
static void damage_the_last(void) {
    break_word(&a.h->pages[pages[2]].queue.prev, 1000);
}

/* Its pins are gone, which nothing undoes: so by then the pages are nobody's for good. */
static void pages_given_back_are_doomed_before_their_pins_go(void) {
    set_up(64);
    CHECK_EQ(allocate(&a, 3), LC_OK);
    play(LC_AT_COMMIT, damage_the_last);
    CHECK_EQ(free_pages(&a, pages, 3), LC_E_CORRUPT);
    check_played();
    mend_word();
    CHECK_EQ(lc_load(&a.h->pages[pages[0]].word), LCI_DOOMED);
    CHECK_EQ(index_counts(&a).held, 0);
    CHECK_EQ(allocate(&a, 64), LC_OK); /* whoever needs room takes them */
    tear_down();
}
#endif

/* Bits of those who pinned the page before say nothing of its new life. */
static void taken_pages_are_pinned_by_their_holder_alone(void) {
    set_up(4);
    prompt_fill(&b, &p, 1, 4);
    CHECK_EQ(evict(&b, 4), 4);
    CHECK_EQ(allocate(&a, 4), LC_OK);
    for (int i = 0; i < 4; i++)
        CHECK_EQ(lc_load(&a.h->pages[pages[i]].pins), UINT64_C(1) << a.slot);
    tear_down();
}

static void taking_settles_tickets_that_have_ended(void) {
    set_up(64);
    prompt_fill(&b, &p, 1, 40);
    let_a_ticket_end();
    CHECK_EQ(allocate(&a, 64), LC_OK);
    tear_down();
}

/* What is used while the call waits for memory is younger than the call, and stays. */
static void taking_is_as_old_as_its_first_call(void) {
    set_up_grown(64, 40);
    prompt_fill(&b, &p, 1, 40);
    CHECK_EQ(allocate(&a, 50), LC_E_GROW);
    CHECK_EQ(match(&b, &p, &l), 40);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(lci_grow(a.h, 64, BLOCKING), LC_OK);
    CHECK_EQ(lci_allocate(a.h, &op, pages, gens, 50, BLOCKING), LC_E_FULL);
    CHECK_EQ(peek(&b, &p), 40);
    tear_down();
}

/* Of what could be evicted only what we pin is missing; what we hold is not among it. */
static void held_pages_do_not_count_as_pinned(void) {
    set_up(64);
    CHECK_EQ(allocate(&a, 10), LC_OK);
    prompt_fill(&b, &p, 1, 54);
    CHECK_EQ(lci_may_allocate(a.h, 54, LCI_MEMORY_ASK), 1);
    p.n = 4;
    CHECK_EQ(match(&a, &p, &l), 4);
    CHECK_EQ(lci_may_allocate(a.h, 51, LCI_MEMORY_ASK), 0);
    CHECK_EQ(lci_may_allocate(a.h, 50, LCI_MEMORY_ASK), 1);
    CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
    tear_down();
}

/* ------------------------------------------------------------------ kept pages */

static void kept_pages_are_kept_once(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 3);
    CHECK_EQ(keep_run(&a, &p, 1), LC_OK);
    CHECK_EQ(keep_run(&b, &p, 1), LC_OK);
    CHECK_EQ(walk.cursor, 3);
    CHECK_EQ(walk.pages, 0);
    CHECK_EQ(index_counts(&a).kept, 3);
    tear_down();
}

/* The last key's page, the only one of a queue, fails in the second step. */
static void keeping_keeps_the_steps_before(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 40);
    collect(&a);
    break_word(&a.h->pages[p.page[39]].queue.prev, 1000);
    CHECK_EQ(keep_run(&a, &p, 1), LC_E_CORRUPT);
    CHECK_EQ(walk.cursor, LCI_BATCH);
    CHECK_EQ(walk.pages, LCI_BATCH);
    mend_word();
    CHECK_EQ(index_counts(&a).kept, LCI_BATCH);
    tear_down();
}

/* A new namespace has the record of one that was cleared. */
static void nothing_is_kept_or_let_go_under_an_old_reference(void) {
    lci_ns_ref old, now;
    set_up(64);
    CHECK_EQ(lci_namespace_open(a.h, "w", "old", 0, &old, BLOCKING), LC_OK);
    CHECK_EQ(lci_clear(a.h, old, BLOCKING), LC_OK);
    CHECK_EQ(lci_namespace_open(a.h, "w", "new", 0, &now, BLOCKING), LC_OK);
    CHECK_EQ(lci_ns_id(now), lci_ns_id(old));
    prompt_make(&p, 1, 3);
    CHECK_EQ(prompt_reserve(&a, &p, now, 1), 3);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    walk = (lci_walk_op){.cursor = 0};
    CHECK_EQ(lci_keep(a.h, p.keys, 3, old, 1, &walk, BLOCKING), LC_OK);
    CHECK_EQ(walk.cursor, 0);
    CHECK_EQ(walk.ended, 1);
    CHECK_EQ(index_counts(&a).kept, 0);
    walk = (lci_walk_op){.cursor = 0};
    CHECK_EQ(lci_drop(a.h, p.keys, 3, 0, old, &walk, BLOCKING), LC_OK);
    CHECK_EQ(walk.pages, 0);
    CHECK_EQ(lci_peek1(b.h, p.keys, 3, now), 3);
    tear_down();
}

/* ------------------------------------------------------------------ branches */

static void letting_go_settles_tickets_that_have_ended(void) {
    set_up(64);
    prompt_fill(&b, &p, 1, 40);
    let_a_ticket_end();
    CHECK_EQ(drop_run(&a, &p, 10), LC_OK);
    CHECK_EQ(walk.pages, 30);
    tear_down();
}

#ifdef LC_PAUSE_POINTS
static uint32_t steps_before; /* the one that fails */

static void break_a_chain(int point) {
    if (point != LC_AT_EVICT_MARKED || steps_before--) return;
    lc_pause_hook = NULL;
    break_word(&a.h->dict.buckets[lc_bucket(&a.h->dict, p.keys[4].lo)], LC_NIL);
}

/* The second step finds a page out of its chain: what the first let go is gone, and told. */
static void letting_go_keeps_the_steps_before(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 40);
    steps_before = 1;
    lc_pause_hook = break_a_chain;
    CHECK_EQ(drop_run(&a, &p, 0), LC_E_CORRUPT);
    check_played();
    CHECK_EQ(walk.pages, LCI_BATCH);
    CHECK_EQ(walk.cursor, LCI_BATCH);
    mend_word();
    CHECK_EQ(peek(&b, &p), 40 - LCI_BATCH);
    tear_down();
}
#endif

const test step_tests[] = {
    TEST(taking_keeps_the_steps_before),
    TEST(giving_back_that_fails_leaves_the_pins),
#ifdef LC_PAUSE_POINTS
    TEST(pages_given_back_are_doomed_before_their_pins_go),
#endif
    TEST(taken_pages_are_pinned_by_their_holder_alone),
    TEST(taking_settles_tickets_that_have_ended),
    TEST(taking_is_as_old_as_its_first_call),
    TEST(held_pages_do_not_count_as_pinned),
    TEST(kept_pages_are_kept_once),
    TEST(keeping_keeps_the_steps_before),
    TEST(nothing_is_kept_or_let_go_under_an_old_reference),
    TEST(letting_go_settles_tickets_that_have_ended),
#ifdef LC_PAUSE_POINTS
    TEST(letting_go_keeps_the_steps_before),
#endif
    END_OF_TESTS,
};
