/* Naming and unnaming: what the keys of a call have to do with each other and with what others write;
 * and a step that fails. */
#include "calls.h"
#include "pair.h"

/* `pages` by the keys of several requests, which stand one behind another. */
static int name_several(const lc_key *of, const int64_t *offsets, uint32_t requests) {
    static const int64_t starts[4];
    uint32_t n = (uint32_t)offsets[requests];
    op = (lci_held_op){.ns = NS};
    int rc;
    do {
        rc = lci_name(a.h, &op, of, offsets, starts, requests, pages, n, out, status, BLOCKING);
    } while (rc == LC_E_INTR);
    return rc;
}

/* One hold of the lock ends within the second request. */
static void naming_goes_on_within_a_later_request(void) {
    const int64_t offsets[] = {0, 100, 200, 300};
    set_up(300);
    for (uint32_t r = 0; r < 3; r++)
        for (uint32_t i = 0; i < 100; i++) q.keys[r * 100 + i] = prompt_key(r, i);
    CHECK_EQ(allocate(&a, 300), LC_OK);
    CHECK_EQ(name_several(q.keys, offsets, 3), LC_OK);
    for (uint32_t r = 0; r < 3; r++) {
        prompt_make(&p, r, 100);
        CHECK_EQ(peek(&b, &p), 100);
    }
    index_check(&s);
    tear_down();
}

static void a_key_named_twice_has_the_page_that_came_first(void) {
    const int64_t offsets[] = {0, 1, 2};
    set_up(8);
    q.keys[0] = q.keys[1] = prompt_key(1, 0);
    CHECK_EQ(allocate(&a, 2), LC_OK);
    CHECK_EQ(name_several(q.keys, offsets, 2), LC_OK);
    CHECK_EQ(status[0], LCI_NEW);
    CHECK_EQ(status[1], LCI_PRESENT);
    CHECK_EQ(out[1], pages[0]);
    CHECK_EQ(pins_of(&a, (uint32_t)pages[0]), 2);
    tear_down();
}

/* Others write what stands first, in the first reservation; or what stands behind a key of ours. */
static void keys_that_others_write_are_busy(void) {
    for (uint32_t theirs = 0; theirs < 2; theirs++) {
        set_up(8);
        prompt_make(&p, 1, 1);
        p.keys[0] = prompt_key(1, theirs);
        CHECK_EQ(prompt_reserve(&b, &p, NS, 1), 1);
        CHECK_EQ(p.op.rid, 0);
        CHECK_EQ(allocate(&a, 2), LC_OK);
        prompt_make(&q, 1, 2);
        CHECK_EQ(name(&a, &q, 0, 0), LC_OK);
        CHECK_EQ(status[theirs], LCI_BUSY_KEY);
        CHECK_EQ(status[1 - theirs], LCI_NEW);
        prompt_unpin(&b, &p);
        tear_down();
    }
}

/* No page of ours is new, so there is nothing to publish, least of all what others write. */
static void naming_what_is_there_publishes_nothing(void) {
    set_up(8);
    prompt_fill(&b, &p, 1, 2);
    collect(&b);
    prompt_make(&q, 2, 2);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 2);
    CHECK_EQ(q.op.rid, 0);
    CHECK_EQ(allocate(&a, 2), LC_OK);
    CHECK_EQ(name(&a, &p, 0, LCI_NAME_MERGE), LC_OK);
    CHECK_EQ(peek(&a, &q), 0);
    prompt_unpin(&b, &q);
    tear_down();
}

static void naming_tells_whoever_waits_and_leaves_nothing_behind(void) {
    set_up(8);
    prompt_make(&p, 1, 2);
    CHECK_EQ(allocate(&a, 2), LC_OK);
    uint32_t before = lc_load(&a.h->root->event);
    CHECK_EQ(name(&a, &p, 0, 0), LC_OK);
    CHECK(lc_load(&a.h->root->event) != before);
    CHECK_EQ(index_counts(&a).reservations, 0);
    CHECK_EQ(lc_load(&a.h->root->writing), 0);
    CHECK_EQ(lc_load(&lcs_client_of(a.at, a.slot)->published_pages), 2);
    tear_down();
}

/* A call that has to be made again is as old as it was. */
static void naming_has_one_tick(void) {
    const int64_t offsets[] = {0, 2}, starts[] = {0};
    set_up(8);
    prompt_make(&p, 1, 2);
    CHECK_EQ(allocate(&a, 2), LC_OK);
    op = (lci_held_op){.ns = NS};
    CHECK_EQ(lci_hold(b.h, BLOCKING), LC_OK);
    CHECK_EQ(lci_name(a.h, &op, p.keys, offsets, starts, 1, pages, 2, out, status, LC_TRY, 0),
             LC_E_BUSY);
    CHECK_EQ(lci_let_go(b.h), LC_OK);
    uint64_t tick = op.tick;
    CHECK_EQ(lci_name(a.h, &op, p.keys, offsets, starts, 1, pages, 2, out, status, BLOCKING),
             LC_OK);
    CHECK_EQ(op.tick, tick);
    CHECK_EQ(lci_tick(&a.h->pages[pages[0]]), tick);
    tear_down();
}

static void nothing_is_named_in_what_was_cleared(void) {
    set_up(8);
    prompt_make(&p, 1, 2);
    CHECK_EQ(allocate(&a, 2), LC_OK);
    CHECK_EQ(lci_clear(b.h, NS, BLOCKING), LC_OK);
    CHECK_EQ(name(&a, &p, 0, 0), LC_E_CLEARED);
    CHECK_EQ(index_counts(&a).held, 2);
    tear_down();
}

/* The key of the second step's third page has a page in no state of a key: the first step's names
 * stand, are found at once, and whoever comes next takes them in. */
static void naming_keeps_the_steps_before(void) {
    set_up(64);
    prompt_make(&q, 1, 1);
    q.keys[0] = prompt_key(1, LCI_BATCH + 2);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 1);
    prompt_publish(&b, &q, 0);
    prompt_unpin(&b, &q);
    collect(&b);
    _Atomic uint32_t *word = &a.h->pages[q.page[0]].word;
    break_word(word, lc_load(word) ^ LCI_READY ^ LCI_EVICTING);
    CHECK_EQ(allocate(&a, 40), LC_OK);
    prompt_make(&p, 1, 40);
    CHECK_EQ(name(&a, &p, 0, 0), LC_E_CORRUPT);
    CHECK_EQ(op.done, LCI_BATCH);
    CHECK_EQ(status[LCI_BATCH], LCI_UNKNOWN);
    CHECK_EQ(peek(&b, &p), LCI_BATCH);
    CHECK_EQ(index_counts(&b).writing, 0);
    mend_word();
    CHECK_EQ(index_counts(&a).held, 40 - LCI_BATCH);
    collect(&b);
    CHECK_EQ(index_counts(&b).reservations, 0);
    CHECK_EQ(lc_load(&b.h->root->writing), 0);
    CHECK_EQ(peek(&b, &p), LCI_BATCH);
    tear_down();
}

/* Chunks that are said to be there and are not. */
static void naming_that_cannot_list_its_pages_names_none(void) {
    set_up(8);
    prompt_make(&p, 1, 2);
    CHECK_EQ(allocate(&a, 2), LC_OK);
    break_word(&a.h->root->chunk_fresh, a.h->chunk_count);
    CHECK_EQ(name(&a, &p, 0, 0), LC_E_CORRUPT);
    mend_word();
    CHECK_EQ(index_counts(&a).held, 2);
    CHECK_EQ(peek(&b, &p), 0);
    tear_down();
}

/* So many pages are listed that no chunk is left. */
static void naming_stops_where_no_list_has_room(void) {
    set_up(8);
    prompt_make(&p, 1, 2);
    CHECK_EQ(allocate(&a, 2), LC_OK);
    break_word(&a.h->root->chunk_used, a.h->chunk_count);
    CHECK_EQ(name(&a, &p, 0, 0), LC_OK);
    mend_word();
    for (int i = 0; i < 2; i++) CHECK_EQ(status[i], LCI_NO_ROOM);
    CHECK_EQ(op.reason, LCI_WHY_RESERVATIONS);
    CHECK_EQ(index_counts(&a).held, 2);
    tear_down();
}

/* The first of two was let go alone, and the second stayed: it hangs on the new first. */
static void a_page_that_is_met_hangs_on_what_is_named_before_it(void) {
    set_up_independent(8);
    prompt_fill(&b, &q, 1, 2);
    q.n = 1;
    CHECK_EQ(drop_run(&b, &q, 0), LC_OK);
    CHECK_EQ(walk.pages, 1);
    prompt_make(&p, 1, 2);
    CHECK_EQ(allocate(&a, 2), LC_OK);
    CHECK_EQ(name(&a, &p, 0, LCI_NAME_INDEPENDENT), LC_OK);
    CHECK_EQ(status[0], LCI_NEW);
    CHECK_EQ(status[1], LCI_PRESENT);
    CHECK_EQ(lci_parent(a.h, &a.h->pages[out[1]]), out[0]);
    tear_down();
}

/* ------------------------------------------------------------------ unnaming */

static void a_page_loses_its_name_once(void) {
    set_up(8);
    prompt_make(&p, 1, 2);
    CHECK_EQ(allocate(&a, 2), LC_OK);
    CHECK_EQ(name(&a, &p, 0, 0), LC_OK);
    const int32_t twice[] = {pages[0], pages[0]};
    CHECK_EQ(unname(&a, twice, 2), LC_E_OWNER);
    CHECK_EQ(op.refused, 1);
    CHECK_EQ(index_counts(&a).held, 0);
    index_check(&s);
    CHECK_EQ(peek(&b, &p), 2);
    tear_down();
}

#ifdef LC_PAUSE_POINTS
static void pin_in_the_second_step(void) {
    CHECK_EQ(lci_pin_one(b.h, (uint32_t)pages[LCI_BATCH + 3]), LC_OK);
}

/* Somebody pins a page that has just lost its name: that step is undone, and not the one before. */
static void unnaming_keeps_the_steps_before(void) {
    set_up(64);
    prompt_make(&p, 1, 40);
    CHECK_EQ(allocate(&a, 40), LC_OK);
    CHECK_EQ(name(&a, &p, 0, 0), LC_OK);
    play_after(LC_AT_EVICT_CHOSEN, LCI_BATCH + 5, pin_in_the_second_step);
    CHECK_EQ(unname(&a, pages, 40), LC_E_PINS);
    check_played();
    CHECK_EQ(op.done, LCI_BATCH);
    CHECK_EQ(op.refused, LCI_BATCH + 3);
    CHECK_EQ(index_counts(&a).held, LCI_BATCH);
    index_check(&s);
    CHECK_EQ(lci_unpin_one(b.h, (uint32_t)pages[LCI_BATCH + 3]), LC_OK);
    tear_down();
}
#endif

/* Whoever has the lock takes in what was published, so that its reservation is not needed. */
static void unnaming_takes_in_what_was_published(void) {
    set_up(8);
    prompt_make(&p, 1, 2);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 2);
    prompt_publish(&a, &p, 0);
    CHECK_EQ(unname(&a, p.page, 1), LC_OK);
    CHECK_EQ(index_counts(&a).reservations, 0);
    tear_down();
}

const test naming_tests[] = {
    TEST(naming_goes_on_within_a_later_request),
    TEST(a_key_named_twice_has_the_page_that_came_first),
    TEST(keys_that_others_write_are_busy),
    TEST(naming_what_is_there_publishes_nothing),
    TEST(naming_tells_whoever_waits_and_leaves_nothing_behind),
    TEST(naming_has_one_tick),
    TEST(nothing_is_named_in_what_was_cleared),
    TEST(naming_keeps_the_steps_before),
    TEST(naming_that_cannot_list_its_pages_names_none),
    TEST(naming_stops_where_no_list_has_room),
    TEST(a_page_that_is_met_hangs_on_what_is_named_before_it),
    TEST(a_page_loses_its_name_once),
#ifdef LC_PAUSE_POINTS
    TEST(unnaming_keeps_the_steps_before),
#endif
    TEST(unnaming_takes_in_what_was_published),
    END_OF_TESTS,
};
