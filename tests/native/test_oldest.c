/* Listing the oldest and giving them up: tickets that have ended, pages that change meanwhile, damage,
 * and a step that fails. */
#include "calls.h"
#include "pair.h"

static void listing_settles_tickets_that_have_ended(void) {
    set_up(64);
    prompt_fill(&b, &p, 1, 40);
    let_a_ticket_end();
    CHECK_EQ(oldest(&a, 40, 1), 40);
    CHECK_EQ(lci_release(a.h, &list.head), LC_OK);
    tear_down();
}

static void giving_up_settles_tickets_that_have_ended(void) {
    set_up(64);
    prompt_fill(&b, &p, 1, 40);
    CHECK_EQ(oldest(&a, 40, 1), 40);
    let_a_ticket_end();
    CHECK_EQ(discard_used(&a), LC_OK); /* the match for the ticket counts for nothing here */
    CHECK_EQ(giving.freed, 40);
    tear_down();
}

/* Published, and nobody has come by since. */
static void giving_up_takes_in_what_was_published(void) {
    set_up(64);
    prompt_make(&p, 1, 3);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 3);
    prompt_publish(&a, &p, 0);
    list.head = (lci_lease){.held = 3, .capacity = 3};
    memcpy(list.pages, p.page, 3 * sizeof *p.page);
    CHECK_EQ(discard_used(&a), LC_OK);
    CHECK_EQ(giving.freed, 3);
    tear_down();
}

static void kept_pages_are_not_given_up(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 3);
    CHECK_EQ(oldest(&a, 3, 1), 3);
    CHECK_EQ(keep_run(&b, &p, 1), LC_OK);
    CHECK_EQ(discard(&a), LC_OK);
    CHECK_EQ(giving.freed, 0);
    CHECK_EQ(peek(&b, &p), 3);
    tear_down();
}

/* Something hangs on a listed page when it is to be put back: it is in no queue. */
static void what_left_the_queue_is_not_put_back(void) {
    lci_oldest_op listing = {.want = 2, .keep_order = 1};
    set_up(64);
    prompt_fill(&a, &p, 1, 1);
    prompt_fill(&a, &q, 2, 1);
    memset(&list, 0, sizeof list);
    CHECK_EQ(lci_oldest(a.h, &listing, &list.head, keys, parents, LC_BLOCK, lcs_now_ns()),
             LC_E_TIMEOUT);
    CHECK_EQ(list.head.held, 2);
    prompt_make(&q, 1, 2);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 1);
    CHECK_EQ(lci_oldest(a.h, &listing, &list.head, keys, parents, BLOCKING), 2);
    CHECK_EQ(index_counts(&a).queued, 1);
    index_check(&s);
    prompt_unpin(&b, &q);
    CHECK_EQ(lci_release(a.h, &list.head), LC_OK);
    tear_down();
}

/* ------------------------------------------------------------------ parents behind their children */

static void expect_listed(uint32_t n) {
    CHECK_EQ(oldest(&a, 60, 1), n);
    CHECK_EQ(list.pages[0], p.page[2]); /* the leaf first */
    CHECK_EQ(lci_release(a.h, &list.head), LC_OK);
}

static void a_parent_is_listed_behind_its_child(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 3);
    expect_listed(3);
    tear_down();
}

static void a_kept_parent_is_not_listed(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 3);
    p.n = 2;
    CHECK_EQ(keep_run(&a, &p, 1), LC_OK);
    expect_listed(1);
    tear_down();
}

/* It was used since: what was used before that goes first. */
static void a_younger_parent_is_not_listed(void) {
    set_up_lru(64);
    prompt_fill(&a, &p, 1, 3);
    prompt_fill(&a, &q, 2, 1);
    p.n = 2;
    CHECK_EQ(match(&b, &p, &l), 2);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    expect_listed(2);
    CHECK_EQ(list.pages[1], q.page[0]);
    tear_down();
}

/* Of two children one is kept. All but that were used at once. */
static void a_parent_of_another_is_not_listed(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 3);
    prompt_make(&q, 1, 3);
    q.keys[2] = prompt_key(2, 0);
    CHECK_EQ(prompt_reserve(&a, &q, NS, 1), 1);
    prompt_publish(&a, &q, 0);
    prompt_unpin(&a, &q);
    q.keys[0] = q.keys[2];
    q.n = 1;
    CHECK_EQ(keep_run(&a, &q, 1), LC_OK);
    CHECK_EQ(walk.pages, 1);
    CHECK_EQ(match(&b, &p, &l), 3);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    expect_listed(1);
    tear_down();
}

static void a_pinned_parent_is_not_listed(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 3);
    CHECK_EQ(lci_pin_one(b.h, (uint32_t)p.page[1]), LC_OK);
    expect_listed(1);
    CHECK_EQ(lci_unpin_one(b.h, (uint32_t)p.page[1]), LC_OK);
    tear_down();
}

static void a_promised_parent_is_not_listed(void) {
    lci_ns_ref ns;
    lci_ns_limits limits = {.minimum = 2};
    set_up(64);
    CHECK_EQ(lci_namespace_limits(a.h, "w", "t", &limits, &ns, BLOCKING), LC_OK);
    prompt_make(&p, 1, 3);
    CHECK_EQ(prompt_reserve(&a, &p, ns, 1), 3);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    expect_listed(1);
    tear_down();
}

/* ------------------------------------------------------------------ meanwhile */

#ifdef LC_PAUSE_POINTS
static lci_page *page_of(uint32_t i) { return &a.h->pages[p.page[i]]; }

/* The first page of a prompt hangs on its last, which is listed and seems to be pinned by nobody. */
static void scribble(void) {
    lc_store(&page_of(0)->parent, (uint32_t)p.page[39]);
    lc_store(&page_of(0)->parent_gen, lc_load(&page_of(39)->gen));
    lc_store(&page_of(39)->children, 1);
    lc_store(&page_of(39)->pins, 0);
}

/* Somebody scribbles while a list is made: no page is listed twice, or its pins would be given back
 * once too few. */
static void a_page_is_listed_once_whatever_is_scribbled(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 40);
    collect(&a);
    play(LC_AT_COMMIT, scribble);
    CHECK_EQ(oldest(&a, 60, 0), LC_E_CORRUPT);
    check_played();
    CHECK_EQ(list.head.held, 40);
    for (uint32_t i = 0; i < 40; i++) CHECK_EQ(lc_load(&a.h->mine[p.page[i]]), 1);
    CHECK_EQ(lci_release(a.h, &list.head), LC_OK);
    lc_store(&page_of(0)->parent, LC_NIL);
    lc_store(&page_of(39)->children, 0);
    tear_down();
}

static void find_it(void) { CHECK_EQ(peek(&b, &p), 1); }

/* While others go it is found all the time: it is not even marked. */
static void what_somebody_pins_is_not_given_up(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 1);
    prompt_fill(&a, &q, 2, 1);
    CHECK_EQ(oldest(&a, 2, 1), 2);
    CHECK_EQ(lci_pin_one(b.h, (uint32_t)p.page[0]), LC_OK);
    play(LC_AT_EVICT_FENCED, find_it);
    CHECK_EQ(discard(&a), LC_OK);
    check_played();
    CHECK_EQ(giving.freed, 1);
    CHECK_EQ(lci_unpin_one(b.h, (uint32_t)p.page[0]), LC_OK);
    tear_down();
}

static void break_a_chain(void) {
    break_word(&a.h->dict.buckets[lc_bucket(&a.h->dict, p.keys[4].lo)], LC_NIL);
}

/* The second step finds a page out of its chain: what the first gave up is gone, and told. */
static void giving_up_keeps_the_steps_before(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 40);
    CHECK_EQ(oldest(&a, 40, 1), 40);
    play_after(LC_AT_EVICT_FENCED, 1, break_a_chain);
    CHECK_EQ(discard(&a), LC_E_CORRUPT);
    check_played();
    CHECK_EQ(giving.freed, LCI_BATCH);
    mend_word();
    CHECK_EQ(peek(&b, &p), 40 - LCI_BATCH);
    tear_down();
}
#endif

const test oldest_tests[] = {
    TEST(listing_settles_tickets_that_have_ended),
    TEST(giving_up_settles_tickets_that_have_ended),
    TEST(giving_up_takes_in_what_was_published),
    TEST(kept_pages_are_not_given_up),
    TEST(what_left_the_queue_is_not_put_back),
    TEST(a_parent_is_listed_behind_its_child),
    TEST(a_kept_parent_is_not_listed),
    TEST(a_younger_parent_is_not_listed),
    TEST(a_parent_of_another_is_not_listed),
    TEST(a_pinned_parent_is_not_listed),
    TEST(a_promised_parent_is_not_listed),
#ifdef LC_PAUSE_POINTS
    TEST(a_page_is_listed_once_whatever_is_scribbled),
    TEST(what_somebody_pins_is_not_given_up),
    TEST(giving_up_keeps_the_steps_before),
#endif
    END_OF_TESTS,
};
