/* Calls that meet damage half-way: what they have done so far is whole, what they have not is
 * undone, and what they hold is known. */
#include "pair.h"

#include <stdlib.h>
#include <sys/resource.h>

static prompt w;

static lci_page *page_of(const prompt *of, uint32_t i) { return &a.h->pages[of->page[i]]; }

static uint32_t all_pins(void) {
    uint32_t pins = 0;
    for (uint32_t page = 0; page < s.pages; page++) pins += pins_of(&a, page);
    return pins;
}

/* The free stack goes round. The first page of the step that is undone was a parent already. */
static void half_a_step_of_reserving_is_undone(void) {
    set_up(64);
    prompt_fill(&a, &q, 1, 4);
    CHECK_EQ(evict(&a, 2), 2);
    uint32_t second = lc_load(&a.h->pages[lc_load(&a.h->root->free_head)].queue.next);
    _Atomic uint32_t *link = &a.h->pages[second].queue.next;
    CHECK_EQ(lc_load(link), LC_NIL);
    lc_store(link, second);
    prompt_make(&p, 1, 7); /* the first two are there */
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), LC_E_CORRUPT);
    for (uint32_t i = 0; i < 7; i++) CHECK_EQ(p.status[i] == LCI_PRESENT, i < 2);
    CHECK_EQ(all_pins(), 2);
    CHECK_EQ(pins_of(&a, (uint32_t)q.page[1]), 1);
    prompt_unpin(&a, &p);
    CHECK_EQ(all_pins(), 0);
    lc_store(link, LC_NIL);
    index_check(&s);
    prompt_fill(&a, &w, 2, 1); /* a page of that step, without the child that it had */
    index_check(&s);
    tear_down();
}

/* The second batch commits a step of making room, then meets damage: the first batch stays. */
static void the_batch_before_stays_reserved(void) {
    set_up(66);
    prompt_make(&w, 1, 1);
    CHECK_EQ(prompt_reserve(&b, &w, NS, 1), 1);
    prompt_unpin(&b, &w);
    CHECK_EQ(lci_abandon(b.h, w.op.rid, w.op.gen, BLOCKING), LC_OK);
    prompt_fill(&a, &q, 2, 32);
    collect(&a);
    CHECK_EQ(index_counts(&a).doomed, 1);
    _Atomic uint32_t *word = &page_of(&q, 31)->word;
    uint32_t whole = lc_load(word);
    lc_store(word, LCI_DOOMED); /* the next to be evicted */
    prompt_make(&p, 3, 64);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), LC_E_CORRUPT);
    lc_store(word, whole);
    CHECK_EQ(index_counts(&a).doomed, 0);
    CHECK_EQ(p.op.made, 32);
    CHECK(p.op.gen != 0);
    for (uint32_t i = 0; i < 64; i++) CHECK_EQ(p.status[i] == LCI_NEW, i < 32);
    CHECK_EQ(all_pins(), 32);
    index_check(&s);
    prompt_unpin(&a, &p);
    CHECK_EQ(lci_abandon(a.h, p.op.rid, p.op.gen, BLOCKING), LC_OK);
    tear_down();
}

static void what_was_evicted_before_damage_is_free(void) {
    uint32_t freed = 0;
    set_up(64);
    for (uint32_t i = 0; i < 40; i++) prompt_fill(&a, &p, i, 1);
    collect(&a);
    prompt_make(&q, 36, 1);
    CHECK_EQ(match(&a, &q, &l), 1);
    CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
    _Atomic uint32_t *word = &a.h->pages[l.pages[0]].word;
    uint32_t whole = lc_load(word);
    lc_store(word, LCI_DOOMED);
    CHECK_EQ(lci_evict_pages(a.h, 40, &freed, BLOCKING), LC_E_CORRUPT);
    lc_store(word, whole);
    index_check(&s);
    CHECK_EQ(freed, LCI_BATCH);
    CHECK_EQ(index_counts(&a).named, 40 - LCI_BATCH);
    tear_down();
}

static void a_reservation_in_use_is_not_given_again(void) {
    set_up(64);
    prompt_make(&p, 1, 5);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 5);
    uint32_t head = lc_load(&a.h->root->res_head);
    lc_store(&a.h->root->res_head, p.op.rid);
    prompt_make(&q, 2, 5);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), LC_E_CORRUPT);
    lc_store(&a.h->root->res_head, head);
    index_check(&s);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    CHECK_EQ(peek(&b, &p), 5);
    tear_down();
}

static void dooming_ends_when_the_log_is_full(void) {
    lc_txn t;
    set_up(64);
    prompt_fill(&a, &p, 1, 5);
    CHECK_EQ(lci_lock(a.h, &t, LCI_OP_CLEAR, BLOCKING), LC_OK);
    t.count = LCS_LOG_ENTRIES;
    CHECK(!lci_doom(a.h, &t, (uint32_t)p.page[4]));
    CHECK_EQ(lci_unlock(a.h, &t), LC_E_CORRUPT);
    CHECK_EQ(peek(&b, &p), 5);
    tear_down();
}

/* A shard's word of another life: its publisher was slow. */
static void a_word_of_another_life_is_not_published(void) {
    set_up(64);
    prompt_make(&p, 1, 5);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 2), 5);
    _Atomic uint32_t *word = &a.h->res[p.op.rid].shard[0];
    uint32_t mine = lc_load(word), others = mine + (2 << LCI_SHARD_GEN_SHIFT);
    lc_store(word, others);
    CHECK_EQ(lci_publish(a.h, p.op.rid, p.op.gen, 0, p.fresh, 5), LC_E_STALE);
    CHECK_EQ(lc_load(word), others);
    lc_store(word, mine);
    CHECK_EQ(THROUGH(lci_clear(b.h, NS, BLOCKING)), LC_OK);
    CHECK_EQ(lci_publish(a.h, p.op.rid, p.op.gen, 0, p.fresh, 5), LC_E_CLEARED);
    CHECK_EQ(lc_load(word), mine); /* the first of two: nothing but the namespace says so */
    tear_down();
}

#ifndef __SANITIZE_ADDRESS__ /* which ends the program when there is no memory */
/* Somebody has to repair the index and has no memory for it: others may have. */
static void who_cannot_repair_gives_the_lock_back(void) {
    struct rlimit was, none;
    uint32_t freed = 0;
    set_up(60000);
    prompt_fill(&a, &p, 1, 5);
    lc_store(&a.h->root->repairing, 1);
    CHECK_EQ(getrlimit(RLIMIT_AS, &was), 0);
    none = (struct rlimit){.rlim_cur = 0, .rlim_max = was.rlim_max};
    CHECK_EQ(setrlimit(RLIMIT_AS, &none), 0);
    void *volatile some = malloc(60000 * 4);
    int rc = lci_evict_pages(a.h, 5, &freed, BLOCKING);
    CHECK_EQ(setrlimit(RLIMIT_AS, &was), 0);
    if (!some) CHECK_EQ(rc, LC_E_FULL); /* an emulator does not know of limits */
    free(some);
    freed = 0;
    CHECK_EQ(lci_evict_pages(b.h, 5, &freed, LC_TRY, 0), LC_OK);
    CHECK_EQ(lc_load(&a.h->root->repairing), 0);
    tear_down();
}
#endif

const test halfway_tests[] = {
    TEST(half_a_step_of_reserving_is_undone),
    TEST(the_batch_before_stays_reserved),
    TEST(what_was_evicted_before_damage_is_free),
    TEST(a_reservation_in_use_is_not_given_again),
    TEST(dooming_ends_when_the_log_is_full),
    TEST(a_word_of_another_life_is_not_published),
#ifndef __SANITIZE_ADDRESS__
    TEST(who_cannot_repair_gives_the_lock_back),
#endif
    END_OF_TESTS,
};
