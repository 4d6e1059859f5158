/* repair of pages: one word is damaged, repair mends it, and then every page is used again. */
#include "pair.h"

#define GROWN 96

static lci_ns_ref other_ns;
static prompt ready, old[3], writing, over, other;
static lci_ticket_ref ticket;

static lci_page *page_of(const prompt *p, uint32_t i) { return &a.h->pages[p->page[i]]; }

static uint64_t bit(const client *c) { return UINT64_C(1) << c->slot; }

static void open_other(void) {
    CHECK_EQ(lci_namespace_open(a.h, "w", "t", 0, &other_ns, BLOCKING), LC_OK);
    prompt_make(&other, 5, 4);
    CHECK_EQ(prompt_reserve(&a, &other, other_ns, 1), 4);
    prompt_publish(&a, &other, 0);
    prompt_unpin(&a, &other);
}

static const uint32_t used_order[] = {1, 0, 2}; /* not that of their pages' numbers */

/* Pages in every state: 12 ready, 3 of them pinned and 2 in a ticket; 9 old ones; 4 of another
 * namespace; 5 being written; 4 written and not yet collected; 6 free. The others were never used,
 * and the last have no memory. */
static void prepare_after(void (*begin)(uint64_t)) {
    begin(128);
    lc_store(&a.h->root->grown, GROWN);
    prompt_fill(&a, &ready, 0, 40);
    CHECK_EQ(evict(&a, 40), 40);
    open_other();
    prompt_fill(&a, &ready, 1, 12);
    for (uint32_t i = 0; i < 3; i++) prompt_fill(&a, &old[i], 10 + i, 3);
    for (uint32_t i = 0; i < 3; i++) {
        CHECK_EQ(match(&a, &old[used_order[i]], &l), 3);
        CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
    }
    ready.n = 3;
    CHECK_EQ(match(&b, &ready, &l), 3);
    ready.n = 12;
    CHECK_EQ(lci_ticket_give(b.h, l.pages, 2, LC_NIL, 0, bit(&a), FOREVER, &ticket, BLOCKING),
             LC_OK);
    prompt_make(&writing, 2, 5);
    CHECK_EQ(prompt_reserve(&a, &writing, NS, 1), 5);
    prompt_make(&over, 3, 4);
    CHECK_EQ(prompt_reserve(&b, &over, NS, 1), 4);
    prompt_publish(&b, &over, 0);
    index_check(&s);
}

static void prepare(void) { prepare_after(set_up); }

static void give_everything_back(void) {
    prompt_unpin(&a, &writing);
    prompt_unpin(&b, &over);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(lci_ticket_drop(b.h, &ticket, BLOCKING), LC_OK);
    CHECK_EQ(lci_adopt(a.h, &ticket, 0, &l.head.held, l.pages, 2, &(uint32_t){0}, &(uint32_t){0},
                       BLOCKING), 2);
    CHECK_EQ(lci_ticket_done(a.h, &ticket, 1), LC_OK);
    CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
    collect(&b);
}

/* Every page that has memory is written under a new key, and found. */
static void use_every_page(void) {
    static prompt all;
    evict(&a, 128);
    index_check(&s);
    prompt_fill(&b, &all, 20, GROWN);
    CHECK_EQ(peek(&a, &all), GROWN);
    CHECK_EQ(match(&a, &all, &l), GROWN);
    CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
    collect(&a);
    lci_counts counts = index_counts(&a);
    CHECK_EQ(counts.named, GROWN);
    CHECK_EQ(counts.free + counts.doomed + counts.reservations + counts.tickets, 0);
    index_check(&s);
}

/* A word, what is put there, the invariant that is broken then (0: none), and how many pages of the
 * prompts are found behind a repair. */
typedef struct damage {
    _Atomic uint32_t *word;
    uint32_t value;
    int broken;
    uint32_t ready, over, written;
} damage;

#define ALL_STAY 12, 4, 5

static void mend(const damage *d) {
    uint64_t pins = lc_load(&page_of(&ready, 9)->pins);
    lc_store(d->word, d->value);
    CHECK_EQ(index_broken(&s), d->broken);
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    index_check(&s);
    CHECK_EQ(peek(&b, &ready), d->ready);
    CHECK_EQ(peek(&b, &over), d->over); /* before anybody has collected it */
    CHECK_EQ(peek(&b, &writing), 0);
    CHECK_EQ(lci_peek1(b.h, other.keys, 4, other_ns), 4);
    CHECK_EQ(index_counts(&b).grown, GROWN);
    CHECK_EQ(lc_load(&page_of(&ready, 9)->pins), pins);
    CHECK_EQ(lci_publish(a.h, writing.op.rid, writing.op.gen, 0, writing.fresh, 5),
             d->written == 5 ? 1 : LC_E_CLEARED);
    CHECK_EQ(peek(&b, &writing), d->written);
    give_everything_back();
    use_every_page();
}

/* Fills in the rows of a table; how many there are. */
typedef uint32_t table(damage *rows);

static void mend_each(table *fill) {
    damage rows[16];
    for (uint32_t i = 0, n = 1; i < n; i++) {
        prepare();
        n = fill(rows);
        CHECK(n <= 16);
        mend(&rows[i]);
        tear_down();
    }
}

/* ------------------------------------------------------------------ words of pages */

static uint32_t words(damage *rows) {
    _Atomic uint32_t *last = &page_of(&ready, 11)->word, *pinned = &page_of(&ready, 2)->word;
    _Atomic uint32_t *w = &page_of(&writing, 4)->word, *o = &page_of(&over, 3)->word;
    uint32_t word = lc_load(w), free = lc_load(&a.h->root->free_head);
    uint32_t foreign = lci_ns_id(other_ns) << LCI_NS_SHIFT, closed = UINT32_C(9) << LCI_NS_SHIFT;
    const damage all[] = {
        {last, 9, 7, 11, 4, 5},
        {last, LCI_FREE, 7, 11, 4, 5},
        {pinned, 9, 7, 2, 4, 5}, /* somebody reads it: it may not be free at once */
        {pinned, LCI_FREE, 7, 2, 4, 5},
        {last, LCI_READY | closed, 41, 11, 4, 5},
        {w, word | closed, 58, 12, 4, 4},
        {w, (word & ~LCI_NS_MASK) | foreign, 58, 12, 4, 4},
        {w, (word & ~LCI_STATE_MASK) | LCI_READY, 44, ALL_STAY}, /* it was not written: not found */
        {o, (lc_load(o) & ~LCI_STATE_MASK) | LCI_WRITING, 0, 12, 3, 5},
        {&page_of(&ready, 11)->gen, 7, 9, 11, 4, 5},
        {&a.h->pages[free].gen, 7, 0, ALL_STAY},
    };
    memcpy(rows, all, sizeof all);
    return sizeof all / sizeof *all;
}

static void mending_of_words(void) { mend_each(words); }

/* What was forgotten while it was written may still be written to by a device. */
static void mending_of_what_is_doomed_changes_nothing(void) {
    prepare();
    CHECK_EQ(lci_clear(b.h, NS, BLOCKING), LC_OK);
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    for (uint32_t i = 0; i < 5; i++)
        CHECK_EQ(lc_load(&page_of(&writing, i)->word) & (LCI_STATE_MASK | LCI_UNWRITTEN),
                 LCI_DOOMED | LCI_UNWRITTEN);
    index_check(&s);
    tear_down();
}

/* Of two pages with one key one goes. It was being written, and still may be: by a device that its
 * writer's death does not stop at once. */
static void mending_of_a_written_twin(void) {
    prepare();
    lci_page *twin = page_of(&writing, 4), *page = page_of(&ready, 3);
    lc_store(&twin->lo, lc_load(&page->lo));
    lc_store(&twin->hi, lc_load(&page->hi));
    CHECK(index_broken(&s));
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    index_check(&s);
    CHECK_EQ(lci_state_of(lc_load(&page->word)), LCI_READY);
    CHECK_EQ(lc_load(&twin->word), LCI_DOOMED | LCI_UNWRITTEN);
    CHECK_EQ(peek(&b, &ready), 12);
    tear_down();
}

/* ------------------------------------------------------------------ how far pages were used */

static uint32_t marks(damage *rows) {
    lci_root *r = a.h->root;
    lci_page *unused = &a.h->pages[110]; /* without memory */
    const damage all[] = {
        {&r->fresh, 3, 2, ALL_STAY},
        {&r->fresh, 1000000, 1, ALL_STAY},
        {&unused->word, LCI_READY, 29, ALL_STAY},
        {&unused->word, LCI_DOOMED, 29, ALL_STAY},
        {&unused->gen, 2, 0, ALL_STAY},
    };
    memcpy(rows, all, sizeof all);
    return sizeof all / sizeof *all;
}

static void mending_of_marks(void) { mend_each(marks); }

/* Scribbled on, a page that nobody ever wrote does not become one that was used. */
static void mending_leaves_unused_pages_unused(void) {
    prepare();
    uint32_t fresh = index_counts(&a).fresh;
    lc_store(&a.h->pages[GROWN - 1].word, LCI_READY);
    lc_store(&a.h->pages[120].gen, 4);
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    CHECK_EQ(index_counts(&a).fresh, fresh);
    CHECK_EQ(index_counts(&a).grown, GROWN);
    index_check(&s);
    tear_down();
}

/* When neither mark says how far pages were used, their words do; memory beyond is given again. */
static void mending_of_both_marks(void) {
    prepare();
    lc_store(&a.h->root->fresh, 1000000);
    lc_store(&a.h->root->grown, 1000000);
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    index_check(&s);
    CHECK_EQ(peek(&b, &ready), 12);
    for (uint32_t i = 0; i < 3; i++) CHECK_EQ(peek(&b, &old[i]), 3);
    uint32_t named = 4 + 12 + 9 + 5 + 4;
    CHECK_EQ(index_counts(&b).named, named);
    CHECK(index_counts(&b).grown >= named && index_counts(&b).grown <= GROWN);
    tear_down();
}

/* A clock that has run out goes on below what a page's tick can say, and never backwards. */
static void mending_of_the_clock(void) {
    prepare();
    lc_store(&a.h->root->clock, UINT64_MAX);
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    CHECK_EQ(peek(&a, &old[0]), 3);
    CHECK_EQ(match(&a, &old[0], &l), 3);
    CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
    index_check(&s);
    tear_down();
}

/* ------------------------------------------------------------------ parents */

static void hang(uint32_t page, uint32_t parent) {
    lc_store(&a.h->pages[page].parent, parent);
    lc_store(&a.h->pages[page].parent_gen, lc_load(&a.h->pages[parent].gen));
}

static uint32_t root_of(const prompt *p) { return (uint32_t)p->page[0]; }

/* Pages that hang on each other, or on one of another namespace, hang on nothing any more; others
 * keep their place: the leaf goes first. */
static void mending_of_parents(void) {
    for (int i = 0; i < 4; i++) {
        prepare();
        uint32_t first = root_of(&ready), parent = (uint32_t)ready.page[i < 2 ? i : 11];
        if (i == 3) parent = root_of(&other);
        hang(first, parent); /* itself, its child, the end of its prompt, a page of others */
        CHECK(index_broken(&s));
        CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
        index_check(&s);
        CHECK_EQ(lci_parent(a.h, &a.h->pages[first]), LC_NIL);
        for (uint32_t k = 1; k < 3; k++) {
            uint32_t kept = lci_parent(a.h, page_of(&old[0], k));
            CHECK_EQ(kept, old[0].page[k - 1]);
        }
        give_everything_back();
        CHECK_EQ(evict(&a, 12 + 9 + 4 + 4), 12 + 9 + 4 + 4);
        CHECK_EQ(peek(&b, &ready), 0);
        tear_down();
    }
}

/* ------------------------------------------------------------------ the queue */

/* LRU: whatever the queue's present said, what was used longest ago goes first, and leaves before what
 * they hang on. */
static void mending_of_the_queue(void) {
    for (int i = 0; i < 4; i++) {
        prepare_after(set_up_lru);
        lc_store(&page_of(&ready, 0)->used, UINT64_C(1) << 60); /* far beyond the clock */
        if (i & 1) lc_store(&a.h->root->now[0], UINT32_MAX);
        if (i & 2) lc_store(&a.h->root->now[1], 7);
        CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
        index_check(&s);
        CHECK_EQ(evict(&a, 13), 13); /* what was never matched since: other's 4, and 9 of ready */
        CHECK_EQ(peek(&b, &ready), 3);
        for (uint32_t k = 0; k < 9; k++) {
            for (uint32_t turn = 0; turn < 3; turn++) {
                uint32_t left = k < 3 * turn ? 3 : k < 3 * turn + 3 ? 3 * turn + 3 - k : 0;
                CHECK_EQ(peek(&b, &old[used_order[turn]]), left);
            }
            CHECK_EQ(evict(&a, 1), 1);
        }
        index_check(&s);
        tear_down();
    }
}

const test mend_tests[] = {
    TEST(mending_of_words),
    TEST(mending_of_what_is_doomed_changes_nothing),
    TEST(mending_of_a_written_twin),
    TEST(mending_of_marks),
    TEST(mending_leaves_unused_pages_unused),
    TEST(mending_of_both_marks),
    TEST(mending_of_the_clock),
    TEST(mending_of_parents),
    TEST(mending_of_the_queue),
    END_OF_TESTS,
};
