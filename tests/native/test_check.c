/* check: every invariant, broken by hand, is named by its number. */
#include "world.h"

#include <stdlib.h>

static segment s;
static client a;
static prompt ready, writing, doomed;
static lease l;
static lci_ticket_ref ticket;

/* Pages in every state: 18 ready of which 2 in a ticket, 5 being written, 4 doomed, 6 free. */
static void set_up_in(segment made) {
    s = made;
    a = client_join(&s);
    prompt_fill(&a, &ready, 1, 24);
    ready.n = 2;
    CHECK_EQ(match(&a, &ready, &l), 2);
    CHECK_EQ(lci_ticket_give(a.h, l.pages, 2, LC_NIL, 0, 4, FOREVER, &ticket, BLOCKING), LC_OK);
    prompt_make(&doomed, 2, 4);
    CHECK_EQ(prompt_reserve(&a, &doomed, NS, 1), 4);
    prompt_make(&writing, 3, 5);
    CHECK_EQ(prompt_reserve(&a, &writing, NS, 1), 5);
    CHECK_EQ(lci_abandon(a.h, doomed.op.rid, doomed.op.gen, BLOCKING), LC_OK);
    CHECK_EQ(evict(&a, 6), 6);
    index_check(&s);
}

static void set_up(void) { set_up_in(index_make(128)); }

static void tear_down(void) {
    client_forget(&a);
    segment_end(&s);
}

static lci_page *page_of(const prompt *p, uint32_t i) { return &a.h->pages[p->page[i]]; }

static void expect(int number, _Atomic uint32_t *word, uint32_t value) {
    uint32_t old = lc_load(word);
    CHECK(old != value);
    lc_store(word, value);
    CHECK_EQ(index_broken(&s), number);
    lc_store(word, old);
    index_check(&s);
}

static void check_of_totals(void) {
    set_up();
    lci_root *r = a.h->root;
    lci_namespace *ns = &a.h->ns[0];
    expect(1, &r->fresh, 129);
    expect(1, &r->grown, 129);
    expect(4, &r->free_count, 7);
    expect(14, &r->queued, 2);
    expect(15, &r->doomed, 3);
    expect(19, &r->res_fresh, 1000);
    expect(21, &r->res_used, 9);
    expect(22, &r->ticket_used, 0);
    expect(22, &r->ticket_end, 0);
    expect(22, &r->ticket_end, 2);
    expect(23, &r->chunk_used, 1);
    expect(24, &r->chunk_fresh, 1);
    expect(24, &r->chunk_head, 100000);
    expect(35, &r->named, 1);
    expect(35, &r->writing, 4);
    expect(36, &ns->pages, 1);
    expect(29, &a.h->pages[100].word, LCI_READY);
    tear_down();
}

static void check_of_the_free_stack(void) {
    set_up();
    uint32_t head = lc_load(&a.h->root->free_head), next = lc_load(&a.h->pages[head].queue.next);
    expect(2, &a.h->root->free_head, 128);
    expect(2, &a.h->root->free_head, 100); /* never used */
    expect(2, &a.h->pages[head].queue.next, head);
    expect(3, &a.h->pages[head].queue.next, (uint32_t)ready.page[0]);
    expect(3, &a.h->pages[next].word, LCI_READY);
    expect(4, &a.h->root->free_head, next);
    tear_down();
}

static void check_of_chains(void) {
    set_up();
    lci_page *page = page_of(&ready, 1);
    _Atomic uint32_t *bucket = &a.h->dict.buckets[lc_bucket(&a.h->dict, lc_load(&page->lo))];
    expect(5, bucket, 128);
    expect(5, &page->next, 1000);
    expect(6, &page->next, lc_load(&a.h->root->free_head));
    expect(7, &page_of(&ready, 1)->word, LCI_EVICTING);
    expect(8, (_Atomic uint32_t *)&page->lo, (uint32_t)lc_load(&page->lo) ^ 1);
    expect(9, &page->gen, lc_load(&page->gen) + 1);
    expect(31, bucket, LC_NIL); /* ready, and in no chain */
    tear_down();
}

/* Two records with one key, and a chain past its bound. */
static void check_of_one_crowded_chain(void) {
    s = index_make(128);
    a = client_join(&s);
    prompt_make(&ready, 0, LC_CHAIN_MAX);
    for (uint32_t i = 0; i < ready.n; i++) ready.keys[i] = crowded_key(7, i);
    CHECK_EQ(prompt_reserve(&a, &ready, NS, 1), LC_CHAIN_MAX);
    lci_page *last = page_of(&ready, 0), *page = page_of(&ready, 5);
    uint64_t lo = lc_load(&page->lo), hi = lc_load(&page->hi);
    lc_store(&page->lo, lc_load(&page_of(&ready, 9)->lo));
    lc_store(&page->hi, lc_load(&page_of(&ready, 9)->hi));
    CHECK_EQ(index_broken(&s), 10);
    lc_store(&page->lo, lo);
    lc_store(&page->hi, hi);
    index_check(&s);
    expect(5, &last->next, (uint32_t)ready.page[LC_CHAIN_MAX - 1]);
    tear_down();
}

/* Of LRU's wheel; a_damaged_order_is_found_and_mended has what is the ranked lists' own. */
static void check_of_lists(void) {
    set_up_in(index_make_ordered(128, 128, LCI_LRU));
    uint32_t leaf = (uint32_t)ready.page[17];
    lc_link *link = lc_link_at(&a.h->lists, leaf);
    uint32_t list = lc_load(&link->next) - a.h->lists.nodes;
    lc_link *head = &a.h->lists.heads[list];
    expect(11, &head->next, 1000);
    expect(11, &head->next, lc_load(&a.h->root->free_head));
    expect(12, &link->prev, leaf);
    expect(12, &head->prev, leaf ^ 1);
    expect(13, &a.h->root->occupied[list / 32], 0);
    CHECK(list < LCI_DIGITS);
    expect(39, &a.h->root->now[0], list + 1); /* the present has passed it */
    uint32_t other = list == 3 ? 4 : 3;
    expect(13, &a.h->root->occupied[0],
           lc_load(&a.h->root->occupied[0]) | UINT32_C(1) << other);
    head = &a.h->lists.heads[LCI_DOOMED_LIST];
    expect(11, &head->next, leaf);
    expect(12, &head->prev, (uint32_t)doomed.page[0]);
    tear_down();
}

static void check_of_page_lists(void) {
    set_up();
    lci_reservation *r = &a.h->res[writing.op.rid];
    lci_chunk *chunk = &a.h->chunks[lc_load(&r->pages.first)];
    lci_ticket *k = &a.h->tickets[ticket.index];
    expect(16, &r->pages.first, 1000);
    expect(16, &chunk->count, 63);
    expect(16, &chunk->count, 0);
    expect(17, &chunk->page[2], 128);
    expect(18, &r->pages.count, 4);
    expect(16, &r->pages.count, UINT32_MAX);
    expect(45, &k->pages.first, lc_load(&r->pages.first));
    expect(46, &r->pages.last, 50);
    expect(18, &k->pages.count, 1);
    expect(20, &r->shards, 0);
    expect(20, &r->shards, LCI_SHARDS + 1);
    expect(33, &chunk->page[2], (uint32_t)ready.page[0]);
    expect(51, &chunk->page[2], (uint32_t)writing.page[1]);
    tear_down();
}

static void check_of_records(void) {
    set_up();
    lci_reservation *r = &a.h->res[writing.op.rid];
    lci_ticket *k = &a.h->tickets[ticket.index];
    uint32_t shard = lc_load(&r->shard[0]);
    expect(47, &r->owner, LCS_SLOTS);
    expect(47, &r->state, LCI_RES_DOOMED + 1);
    expect(48, &r->shard[0], shard ^ 1u << LCI_SHARD_GEN_SHIFT); /* of another generation */
    expect(49, &r->shard[0], shard | LCI_SHARD_DEAD);
    expect(50, &r->shard[0], shard | LCI_SHARD_DONE); /* complete, and nobody will collect it */
    expect(52, &a.h->root->res_head, LC_NIL);
    expect(52, &a.h->root->res_head, writing.op.rid);
    lc_store(&a.h->root->completed[15], UINT64_C(1) << 63);
    CHECK_EQ(index_broken(&s), 53);
    lc_store(&a.h->root->completed[15], 0);
    expect(54, &k->giver, LCS_SLOTS);
    expect(54, &k->adopted[0], 8); /* who was not asked to */
    expect(54, &k->done[0], 4); /* without having adopted */
    expect(55, &a.h->ns[5].state, LCI_NS_CLEARED + 1);
    expect(55, &a.h->root->clearing, 1);
    expect(56, &a.h->ns[0].state, LCI_NS_CLEARED);
    expect(57, &a.h->root->repairing, 1);
    tear_down();
}

static void hang(lci_page *page, lci_page *parent) {
    lc_store(&page->parent, (uint32_t)(parent - a.h->pages));
    lc_store(&page->parent_gen, lc_load(&parent->gen));
    lc_store(&parent->children, lc_load(&parent->children) + 1);
}

static void check_of_parents_and_ticks(void) {
    set_up();
    lci_page *first = page_of(&ready, 0), *second = page_of(&ready, 1);
    uint64_t used = lc_load(&first->used);
    /* In the future, however far; where ticks wrap, the last of all is that of long ago. */
    for (uint32_t bits = a.h->ranks ? 1 : 0; bits < 8; bits++) {
        lc_store(&first->used, UINT64_MAX >> bits);
        CHECK_EQ(index_broken(&s), 43);
    }
    lc_store(&first->used, used);
    index_check(&s);
    hang(first, second); /* which hangs on the first */
    CHECK_EQ(index_broken(&s), 42);
    tear_down();
}

static void check_of_pins(void) {
    set_up();
    uint32_t page = (uint32_t)ready.page[0], free = lc_load(&a.h->root->free_head);
    lci_page *p = &a.h->pages[page];
    _Atomic uint16_t *row0 = lci_pin(a.h, 0, page), *mine = lci_pin(a.h, a.slot, page);
    lc_store(row0, 2);
    CHECK_EQ(index_broken(&s), 25);
    lc_store(row0, 1);
    lc_store(lci_pin(a.h, 5, page), 1); /* of a slot that nobody has */
    CHECK_EQ(index_broken(&s), 26);
    lc_store(lci_pin(a.h, 5, page), 0);
    uint64_t bits = lc_load(&p->pins);
    lc_store(&p->pins, bits & ~(UINT64_C(1) << a.slot));
    CHECK_EQ(index_broken(&s), 27);
    lc_store(&p->pins, bits);
    lc_store(&a.h->pages[free].pins, UINT64_C(1) << a.slot);
    lc_store(lci_pin(a.h, a.slot, free), 1);
    CHECK_EQ(index_broken(&s), 28);
    lc_store(&lcs_client_of(a.at, a.slot)->state, LCS_CLIENT_QUARANTINE);
    index_check(&s); /* kept for copies that may be going on */
    lc_store(&lcs_client_of(a.at, a.slot)->state, LCS_CLIENT_TAKEN);
    lc_store(lci_pin(a.h, a.slot, free), 0);
    lci_report report;
    lc_store(mine, 7);
    lc_store(&p->pins, 1);
    CHECK_EQ(lci_check(s.base, s.bytes, 128, 0, &report), LC_OK); /* not quiet: pins may move */
    CHECK_EQ(report.broken, 0);
    CHECK_EQ(report.pins, 2 + 7 + 1 + 5 + 4);
    CHECK(report.free == 6 && report.ready == 18 && report.writing == 5 && report.doomed == 4);
    CHECK(report.named == 23 && report.queued == 1);
    lc_store(mine, 1);
    lc_store(&p->pins, bits);
    tear_down();
}

static void check_of_states(void) {
    set_up();
    lci_page *leaf = page_of(&ready, 17), *d = page_of(&doomed, 1), *w = page_of(&writing, 4);
    uint32_t word = lc_load(&w->word);
    expect(30, &d->word, 9);
    expect(31, &d->word, LCI_FREE);
    expect(31, &leaf->children, 1); /* should not be queued then */
    expect(32, &w->word, word & UINT32_C(0xffff));
    expect(33, &w->word, (word & UINT32_C(0xffff)) | UINT32_C(50) << LCI_RES_SHIFT);
    expect(34, &page_of(&ready, 3)->children, 2);
    expect(40, &a.h->pages[lc_load(&a.h->root->free_head)].word, UINT32_C(1) << LCI_NS_SHIFT);
    expect(41, &leaf->word, LCI_READY | UINT32_C(9) << LCI_NS_SHIFT);
    expect(44, &w->word, (word & ~LCI_STATE_MASK) | LCI_READY);
    expect(58, &w->word, word | UINT32_C(9) << LCI_NS_SHIFT);
    tear_down();
}

static void check_needs_the_whole_segment(void) {
    lci_report report;
    set_up();
    CHECK_EQ(lci_check(s.base, s.bytes - 1, 128, 1, &report), LC_E_RANGE);
    CHECK_EQ(lci_check(s.base, s.bytes, 0, 1, &report), LC_E_RANGE);
    CHECK_EQ(lci_recover_copy(s.base, s.bytes - 1, 128), LC_E_RANGE);
    CHECK_EQ(lci_recover_copy(s.base, s.bytes, 0), LC_E_RANGE);
    tear_down();
}

static void copy_is_what_was_there_under_the_lock(void) {
    set_up();
    lci_report report;
    uint8_t *copy = malloc(s.bytes);
    CHECK(copy);
    CHECK_EQ(lci_copy(a.h, copy, s.bytes + 1, BLOCKING), LC_E_RANGE);
    CHECK_EQ(lci_copy(a.h, copy, s.bytes, LC_TRY, 0), LC_E_BUSY); /* too long to be tried */
    CHECK_EQ(lci_copy(a.h, copy, s.bytes, BLOCKING), LC_OK);
    CHECK(memcmp(copy + LCS_PAYLOAD_OFFSET, s.base + LCS_PAYLOAD_OFFSET,
                 s.bytes - LCS_PAYLOAD_OFFSET) == 0);
    CHECK_EQ(lci_recover_copy(copy, s.bytes, 128), 0);
    CHECK_EQ(lci_check(copy, s.bytes, 128, 1, &report), LC_OK);
    CHECK_EQ(report.broken, 0);
    CHECK_EQ(report.ready, 18);
    free(copy);
    tear_down();
}

const test check_tests[] = {
    TEST(check_of_totals),
    TEST(check_of_the_free_stack),
    TEST(check_of_chains),
    TEST(check_of_one_crowded_chain),
    TEST(check_of_lists),
    TEST(check_of_page_lists),
    TEST(check_of_records),
    TEST(check_of_parents_and_ticks),
    TEST(check_of_pins),
    TEST(check_of_states),
    TEST(check_needs_the_whole_segment),
    TEST(copy_is_what_was_there_under_the_lock),
    END_OF_TESTS,
};
