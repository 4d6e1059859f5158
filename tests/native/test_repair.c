/* repair: whatever is derived is rebuilt, and what the keys and records say stays. */
#include "pair.h"

#include <stdlib.h>

static prompt ready, writing, doomed;
static lci_ticket_ref ticket;

static void prepare(void) {
    set_up(128);
    prompt_fill(&a, &ready, 1, 24);
    CHECK_EQ(evict(&a, 4), 4);
    ready.n = 20;
    CHECK_EQ(match(&b, &ready, &l), 20);
    CHECK_EQ(lci_ticket_give(b.h, l.pages, 2, LC_NIL, 0, 2, FOREVER, &ticket, BLOCKING), LC_OK);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    prompt_make(&doomed, 2, 4);
    CHECK_EQ(prompt_reserve(&a, &doomed, NS, 1), 4);
    prompt_make(&writing, 3, 5);
    CHECK_EQ(prompt_reserve(&a, &writing, NS, 1), 5);
    CHECK_EQ(lci_abandon(a.h, doomed.op.rid, doomed.op.gen, BLOCKING), LC_OK);
    index_check(&s);
}

/* After a repair everything is found as before, and goes on. */
static void repair_and_go_on(void) {
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    index_check(&s);
    CHECK_EQ(lc_load(&a.h->root->repairing), 0);
    CHECK_EQ(peek(&b, &ready), 20);
    prompt_publish(&a, &writing, 0);
    prompt_unpin(&a, &writing);
    prompt_unpin(&a, &doomed);
    CHECK_EQ(peek(&b, &writing), 5);
    CHECK_EQ(evict(&b, 128), 23); /* all but what the ticket holds */
    lci_counts counts = index_counts(&b);
    CHECK_EQ(counts.doomed, 0);
    CHECK_EQ(counts.reservations, 0);
    CHECK_EQ(counts.free + counts.named, counts.fresh);
}

static void repair_of_a_sound_index_changes_nothing_that_is_found(void) {
    prepare();
    uint32_t gen = lc_load(&a.h->pages[ready.page[7]].gen);
    repair_and_go_on();
    CHECK(lc_load(&a.h->pages[ready.page[7]].gen) >= gen);
    tear_down();
}

static void repair_of_every_total(void) {
    for (int i = 0; i < 13; i++) {
        prepare();
        lci_root *r = a.h->root;
        _Atomic uint32_t *totals[] = {&r->free_head, &r->free_count, &r->named, &r->writing,
                                      &r->doomed, &r->chunk_head, &r->chunk_used, &r->res_head,
                                      &r->res_used, &r->ticket_used, &r->ticket_end, &r->queued,
                                      &r->clearing};
        lc_store(totals[i], 77);
        repair_and_go_on();
        tear_down();
    }
}

static void repair_of_links(void) {
    for (int i = 0; i < 8; i++) {
        prepare();
        lci_page *page = &a.h->pages[ready.page[5]], *leaf = &a.h->pages[ready.page[19]];
        _Atomic uint32_t *head = &a.h->dict.buckets[lc_bucket(&a.h->dict, lc_load(&page->lo))];
        _Atomic uint32_t *words[] = {head, &page->next, &leaf->queue.prev, &leaf->queue.next,
                                     &a.h->lists.heads[LCI_DOOMED_LIST].next, &page->children,
                                     &a.h->root->occupied[3], &a.h->ns[0].pages};
        lc_store(words[i], i % 2 ? 5 : 1000000);
        repair_and_go_on();
        tear_down();
    }
}

static void repair_of_a_chain_that_leads_elsewhere(void) {
    prepare();
    lci_page *page = &a.h->pages[ready.page[5]];
    lc_store(&a.h->dict.buckets[lc_bucket(&a.h->dict, lc_load(&page->lo))], LC_NIL);
    CHECK_EQ(peek(&b, &ready), 5);
    lc_store(&a.h->dict.buckets[0], (uint32_t)ready.page[5]);
    repair_and_go_on();
    tear_down();
}

/* What a page's own word says cannot be: it is given up, and so is an odd generation. */
static void repair_of_page_words(void) {
    prepare();
    lc_store(&a.h->pages[ready.page[19]].word, 9);
    lci_page *odd = &a.h->pages[ready.page[18]];
    lc_store(&odd->gen, lc_load(&odd->gen) + 1);
    lc_store(&a.h->pages[ready.page[17]].word, LCI_EVICTING);
    lc_store(&a.h->pages[ready.page[16]].word, LCI_READY | UINT32_C(60) << LCI_RES_SHIFT);
    lc_store(&a.h->pages[ready.page[15]].used, UINT64_MAX); /* from the future */
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    index_check(&s);
    CHECK_EQ(peek(&b, &ready), 18);
    CHECK_EQ(evict(&b, 1), 1);
    CHECK_EQ(peek(&b, &ready), 17);
    tear_down();
}

static void repair_of_a_written_page_without_a_reservation(void) {
    prepare();
    lci_page *page = &a.h->pages[writing.page[4]];
    lc_store(&page->word, LCI_WRITING | UINT32_C(50) << LCI_RES_SHIFT);
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    CHECK_EQ(lc_load(&page->word), LCI_DOOMED | LCI_UNWRITTEN); /* may still be written to */
    index_check(&s);
    tear_down();
}

static void repair_of_two_pages_with_one_key(void) {
    prepare();
    lci_page *twin = &a.h->pages[ready.page[19]], *page = &a.h->pages[ready.page[2]];
    lc_store(&twin->lo, lc_load(&page->lo));
    lc_store(&twin->hi, lc_load(&page->hi));
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    index_check(&s);
    CHECK_EQ(lci_state_of(lc_load(&page->word)) + lci_state_of(lc_load(&twin->word)),
             LCI_READY + LCI_DOOMED);
    CHECK_EQ(peek(&b, &ready), 19);
    tear_down();
}

static void repair_of_bounds(void) {
    prepare();
    lc_store(&a.h->root->grown, 1000000);
    lc_store(&a.h->root->res_fresh, 1000000);
    lc_store(&a.h->root->chunk_fresh, 1000000);
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    index_check(&s);
    CHECK(index_counts(&a).grown <= 128); /* grown again, if need be */
    tear_down();
}

/* A log that is not sound cannot be undone: repair leaves it behind, others refuse. */
static void repair_discards_a_damaged_log(void) {
    uint32_t freed = 0;
    prepare();
    lc_store(&lcs_lock_of(a.at)->log_count, LCS_LOG_ENTRIES + 1);
    CHECK_EQ(lci_evict_pages(b.h, 1, &freed, BLOCKING), LC_E_CORRUPT);
    repair_and_go_on();
    tear_down();
}

/* Whoever takes the lock after a repairer has died repairs again. */
static void repair_is_begun_again_after_a_death(void) {
    prepare();
    lc_store(&a.h->root->repairing, 1);
    lc_store(&a.h->root->named, 77);
    CHECK_EQ(evict(&a, 1), 1);
    CHECK_EQ(lc_load(&a.h->root->repairing), 0);
    index_check(&s);
    tear_down();
}

static void repair_is_refused(void) {
    prepare();
    client r = reader_join(&s);
    CHECK_EQ(lci_repair(r.h, BLOCKING), LC_E_READONLY);
    client_forget(&r);
    CHECK_EQ(lci_hold(a.h, BLOCKING), LC_OK);
    CHECK_EQ(lci_repair(b.h, LC_TRY, 0), LC_E_BUSY);
    CHECK_EQ(lci_let_go(a.h), LC_OK);
    repair_and_go_on();
    tear_down();
}

/* Taken under the lock; the lock itself and the log are as they were then. */
static void a_copy_holds_what_the_index_holds(void) {
    prepare();
    uint64_t from = a.h->geometry.root;
    uint8_t *copy = calloc(1, s.bytes);
    CHECK(copy);
    CHECK_EQ(lci_copy(a.h, copy, s.bytes + 8, BLOCKING), LC_E_RANGE);
    CHECK_EQ(lci_copy(a.h, copy, s.bytes, LC_TRY, 0), LC_E_BUSY);
    CHECK_EQ(lci_copy(a.h, copy, s.bytes, BLOCKING), LC_OK);
    CHECK(memcmp(copy + from, s.base + from, s.bytes - from) == 0);
    free(copy);
    tear_down();
}

const test repair_tests[] = {
    TEST(repair_of_a_sound_index_changes_nothing_that_is_found),
    TEST(repair_of_every_total),
    TEST(repair_of_links),
    TEST(repair_of_a_chain_that_leads_elsewhere),
    TEST(repair_of_page_words),
    TEST(repair_of_a_written_page_without_a_reservation),
    TEST(repair_of_two_pages_with_one_key),
    TEST(repair_of_bounds),
    TEST(repair_discards_a_damaged_log),
    TEST(repair_is_begun_again_after_a_death),
    TEST(repair_is_refused),
    TEST(a_copy_holds_what_the_index_holds),
    END_OF_TESTS,
};
