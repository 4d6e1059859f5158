/* repair of records: reservations, tickets, their page lists, namespaces. One word is damaged,
 * repair mends it, and then all records and pages are used. */
#include "pair.h"

static prompt ready, large, small, over, dead, gone;
static lci_ticket_ref ticket;
static uint32_t res_fresh;

#define LARGE 70 /* two chunks, the second not full */

static uint32_t bit(const client *c) { return UINT32_C(1) << c->slot; }
static lci_reservation *record(const prompt *p) { return &a.h->res[p->op.rid]; }
static lci_ticket *given(void) { return &a.h->tickets[ticket.index]; }
static lci_chunk *chunk_of(const lci_list *list) { return &a.h->chunks[lc_load(&list->first)]; }

static void reserve(client *c, prompt *p, uint32_t number, uint32_t n) {
    prompt_make(p, number, n);
    CHECK_EQ(prompt_reserve(c, p, NS, 1), n);
}

static void doom(client *c, const prompt *p) {
    lc_txn t;
    CHECK_EQ(lci_lock(c->h, &t, LCI_OP_ABANDON, BLOCKING), LC_OK);
    CHECK(lci_doom_reservation(c->h, &t, p->op.rid, 0));
    CHECK_EQ(lci_unlock(c->h, &t), LC_OK);
}

static void give(client *from, const client *to, uint32_t n) {
    CHECK_EQ(lci_ticket_give(from->h, l.pages, n, LC_NIL, 0, bit(to), FOREVER, &ticket, BLOCKING),
             LC_OK);
}

/* Records in every state: two reservations being written, one written, one doomed, the last two not
 * yet collected; one free below those that were used; a ticket of two pages. */
static void prepare(void) {
    set_up(128);
    prompt_fill(&b, &ready, 1, 12);
    ready.n = 3;
    CHECK_EQ(match(&b, &ready, &l), 3);
    ready.n = 12;
    give(&b, &a, 2);
    reserve(&a, &gone, 2, 4);
    reserve(&a, &large, 3, LARGE);
    reserve(&b, &small, 4, 5);
    reserve(&b, &over, 5, 4);
    reserve(&a, &dead, 6, 4);
    CHECK_EQ(lci_abandon(a.h, gone.op.rid, gone.op.gen, BLOCKING), LC_OK);
    prompt_unpin(&a, &gone);
    prompt_publish(&b, &over, 0);
    doom(&a, &dead);
    res_fresh = lc_load(&a.h->root->res_fresh);
    CHECK_EQ(index_counts(&a).reservations, 4);
    index_check(&s);
}

/* A word, what is put there, the invariant that is broken then, what the publisher of `large` is
 * told, how many pages of it are found, and what whoever adopts the ticket is told. */
typedef struct damage {
    _Atomic uint32_t *word;
    uint32_t value;
    int broken;
    int published;
    uint32_t large;
    int adopted;
} damage;

#define ALL_STAY 1, LARGE, 2
#define DOOMED LC_E_STALE, 0, 2
#define LATE 1, LARGE, LC_E_TIMEOUT

/* The list leads through its chunks to the last, and no further. */
static void expect_list(const lci_list *list, uint32_t pages) {
    uint32_t at = lc_load(&list->first), listed = 0, last = LC_NIL;
    CHECK_EQ(lc_load(&list->count), pages);
    for (; at < a.h->chunk_count && listed <= pages; at = lc_load(&a.h->chunks[at].next)) {
        listed += lc_load(&a.h->chunks[at].count);
        last = at;
    }
    CHECK_EQ(at, LC_NIL);
    CHECK_EQ(listed, pages);
    CHECK_EQ(lc_load(&list->last), last);
}

static void repair(client *c) {
    CHECK_EQ(lci_repair(c->h, BLOCKING), LC_OK);
    index_check(&s);
}

static void publish_all(const damage *d) {
    CHECK_EQ(lci_publish(a.h, large.op.rid, large.op.gen, 0, large.fresh, LARGE), d->published);
    CHECK_EQ(peek(&b, &large), d->large);
    CHECK_EQ(lci_publish(b.h, small.op.rid, small.op.gen, 0, small.fresh, 5), 1);
    CHECK_EQ(peek(&a, &small), 5);
    CHECK_EQ(lci_publish(a.h, dead.op.rid, dead.op.gen, 0, dead.fresh, 4), LC_E_STALE);
}

static void give_everything_back(const damage *d) {
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    int n = lci_adopt(a.h, &ticket, 0, &l.head.held, l.pages, 2, &(uint32_t){0}, &(uint32_t){0},
                      BLOCKING);
    CHECK_EQ(n, d->adopted);
    if (n == 2) CHECK_EQ(lci_ticket_done(a.h, &ticket, 1), LC_OK);
    if (n == 2) CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
    if (n == 2) CHECK_EQ(lci_ticket_drop(b.h, &ticket, BLOCKING), LC_OK);
    prompt_unpin(&a, &large);
    prompt_unpin(&b, &small);
    prompt_unpin(&b, &over);
    prompt_unpin(&a, &dead);
    collect(&a);
    lci_counts counts = index_counts(&a);
    CHECK_EQ(counts.reservations + counts.tickets + counts.chunks + counts.writing, 0);
    index_check(&s);
}

static void use_every_page(void) {
    static prompt all;
    evict(&a, 128);
    prompt_fill(&b, &all, 20, 128);
    CHECK_EQ(peek(&a, &all), 128);
    index_check(&s);
}

static void mend(const damage *d) {
    lc_store(d->word, d->value);
    CHECK_EQ(index_broken(&s), d->broken);
    repair(&b);
    CHECK_EQ(index_counts(&b).reservations, 4);
    CHECK_EQ(index_counts(&b).tickets, 1);
    CHECK_EQ(lc_load(&a.h->root->res_fresh), res_fresh);
    CHECK_EQ(peek(&b, &ready), 12);
    CHECK_EQ(peek(&b, &over), 4);
    if (d->large == LARGE) expect_list(&record(&large)->pages, LARGE);
    publish_all(d);
    give_everything_back(d);
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

/* ------------------------------------------------------------------ reservations */

static uint32_t page_lists(damage *rows) {
    lci_list *list = &record(&large)->pages;
    lci_chunk *chunk = chunk_of(list);
    const damage all[] = {
        {&list->first, 1000, 16, ALL_STAY},
        {&list->last, 50, 46, ALL_STAY},
        {&list->count, 4, 18, ALL_STAY},
        {&list->count, UINT32_MAX, 16, ALL_STAY},
        {&chunk->next, 1000, 16, ALL_STAY},
        {&chunk->count, 63, 16, ALL_STAY},
        {&chunk->page[2], 128, 17, ALL_STAY},
        {&chunk->page[2], (uint32_t)large.page[1], 51, ALL_STAY},
        {&record(&small)->pages.last, 50, 46, ALL_STAY},
        {&a.h->root->chunk_fresh, 0, 24, ALL_STAY},
        {&a.h->root->chunk_fresh, 1000000, 24, ALL_STAY},
    };
    memcpy(rows, all, sizeof all);
    return sizeof all / sizeof *all;
}

static void mending_of_page_lists(void) { mend_each(page_lists); }

static uint32_t reservations(damage *rows) {
    lci_root *root = a.h->root;
    lci_reservation *r = record(&large), *d = record(&dead);
    uint32_t shard = lc_load(&r->shard[0]), next = UINT32_C(1) << LCI_SHARD_GEN_SHIFT;
    _Atomic uint32_t *ended = (_Atomic uint32_t *)&root->completed[0];
    const damage all[] = {
        {&r->owner, LCS_SLOTS, 47, ALL_STAY},
        {&r->state, 77, 47, ALL_STAY},
        {&r->state, LCI_RES_DOOMED, 50, DOOMED},
        {&r->shards, 0, 20, DOOMED},
        {&r->shards, LCI_SHARDS + 1, 20, DOOMED},
        {&r->shard[0], shard ^ next, 48, DOOMED},
        {&r->shard[0], shard | LCI_SHARD_DEAD, 49, DOOMED},
        {&d->shards, 0, 20, ALL_STAY},
        {&d->shard[0], lc_load(&d->shard[0]) ^ next, 48, ALL_STAY},
        {ended, 0, 50, ALL_STAY},
        {(_Atomic uint32_t *)&root->completed[15], 1, 53, ALL_STAY},
        {&root->res_fresh, 0, 47, ALL_STAY},
        {&root->res_head, large.op.rid, 52, ALL_STAY},
    };
    memcpy(rows, all, sizeof all);
    return sizeof all / sizeof *all;
}

static void mending_of_reservations(void) { mend_each(reservations); }

/* What a reservation lists is listed again in chunks that nobody has, not in those of a ticket. */
static void mending_a_reservations_list_leaves_tickets_alone(void) {
    prepare();
    uint32_t page[2];
    lci_chunk *listed = chunk_of(&given()->pages);
    for (int i = 0; i < 2; i++) page[i] = lc_load(&listed->page[i]);
    lc_store(&record(&large)->pages.last, LC_NIL);
    repair(&b);
    expect_list(&given()->pages, 2);
    for (int i = 0; i < 2; i++) CHECK_EQ(lc_load(&listed->page[i]), page[i]);
    CHECK_EQ(lc_load(lci_pin(a.h, 0, page[0])), 1);
    CHECK_EQ(lc_load(&given()->state), LCI_TICKET_OPEN);
    tear_down();
}

/* What a sound list names is not in question: a page that it does not name is given up. */
static void mending_gives_up_what_is_not_listed(void) {
    prepare();
    lc_store(&chunk_of(&record(&large)->pages)->page[2], (uint32_t)small.page[0]);
    CHECK_EQ(index_broken(&s), 33);
    mend(&(damage){&a.h->root->res_used, 77, 21, LC_E_CLEARED, 2, 2});
    tear_down();
}

/* A page whose word names the reservation, but which is doomed, is not listed again. */
static void mending_lists_what_is_written_and_nothing_else(void) {
    prepare();
    lci_reservation *r = record(&large);
    _Atomic uint32_t *word = &a.h->pages[large.page[9]].word;
    lc_store(word, (lc_load(word) & ~LCI_STATE_MASK) | LCI_DOOMED | LCI_UNWRITTEN);
    lc_store(&r->pages.last, LC_NIL);
    repair(&b);
    expect_list(&r->pages, LARGE - 1);
    for (uint32_t i = 0; i < 5; i++) lc_store(&a.h->pages[small.page[i]].word, LCI_FREE);
    lc_store(&record(&small)->pages.count, 700);
    repair(&b);
    expect_list(&record(&small)->pages, 0);
    tear_down();
}

/* Its list still names pages that were doomed, freed, and are being written by another since. */
static void mending_keeps_pages_that_an_old_list_names_too(void) {
    set_up(64);
    lci_ns_ref other;
    reserve(&a, &gone, 1, 30);
    reserve(&a, &large, 2, 30);
    CHECK_EQ(lci_namespace_open(b.h, "w", "t", 0, &other, BLOCKING), LC_OK);
    CHECK_EQ(lci_abandon(a.h, gone.op.rid, gone.op.gen, BLOCKING), LC_OK);
    CHECK_EQ(lci_clear(b.h, NS, BLOCKING), LC_OK);
    prompt_unpin(&a, &gone);
    prompt_unpin(&a, &large);
    prompt_make(&small, 3, 64);
    CHECK_EQ(prompt_reserve(&b, &small, other, 1), 64);
    CHECK_EQ(small.op.rid, gone.op.rid); /* the old list is looked at last */
    CHECK(lc_load(&record(&large)->pages.count) > 0);
    repair(&a);
    prompt_publish(&b, &small, 0);
    CHECK_EQ(lci_peek1(a.h, small.keys, 64, other), 64);
    prompt_unpin(&b, &small);
    tear_down();
}

/* A publisher may set its bit while repair clears those that name no reservation. */
static void mending_leaves_bits_of_reservations_to_their_publishers(void) {
    set_up(100);
    CHECK_EQ(a.h->res_count, 100);
    lc_store(&a.h->root->completed[1], UINT64_MAX);
    lc_store(&a.h->root->completed[2], UINT64_MAX);
    repair(&a);
    CHECK_EQ(lc_load(&a.h->root->completed[1]), (UINT64_C(1) << (100 - 64)) - 1);
    CHECK_EQ(lc_load(&a.h->root->completed[2]), 0);
    tear_down();
}

/* ------------------------------------------------------------------ tickets, namespaces */

static uint32_t tickets(damage *rows) {
    lci_ticket *k = given();
    const damage all[] = {
        {&k->pages.first, 1000, 16, LATE},
        {&k->pages.last, 50, 46, LATE},
        {&k->pages.count, 1, 18, LATE},
        {&k->total, 1, 54, LATE},
        {&k->total, 5000000, 54, LATE},
        {&k->state, 77, 54, LATE},
        {&k->giver, LCS_SLOTS, 54, LATE},
        {&k->reservation, 1000, 54, LATE},
        {&k->adopted[0], bit(&b), 54, ALL_STAY},
        {&k->done[0], bit(&a), 54, ALL_STAY},
        {&k->failed[1], 8, 54, ALL_STAY},
        {&a.h->ns[5].state, 9, 55, ALL_STAY},
    };
    memcpy(rows, all, sizeof all);
    return sizeof all / sizeof *all;
}

static void mending_of_tickets(void) { mend_each(tickets); }

/* Nobody can tell any more whose its pages are: all go, those also that the cursor has passed. */
static void mending_of_a_namespace(void) {
    prepare();
    lc_store(&a.h->ns[0].cursor, 1000);
    lc_store(&a.h->ns[0].state, LCI_NS_CLEARED + 1);
    repair(&b);
    CHECK_EQ(lc_load(&a.h->ns[0].state), LCI_NS_CLEARING);
    CHECK_EQ(index_counts(&a).namespaces_clearing, 1);
    collect(&b);
    CHECK_EQ(lc_load(&a.h->ns[0].state), LCI_NS_CLEARED);
    CHECK_EQ(index_counts(&a).named, 0);
    index_check(&s);
    tear_down();
}

const test mend_records_tests[] = {
    TEST(mending_of_page_lists),
    TEST(mending_of_reservations),
    TEST(mending_a_reservations_list_leaves_tickets_alone),
    TEST(mending_gives_up_what_is_not_listed),
    TEST(mending_lists_what_is_written_and_nothing_else),
    TEST(mending_keeps_pages_that_an_old_list_names_too),
    TEST(mending_leaves_bits_of_reservations_to_their_publishers),
    TEST(mending_of_tickets),
    TEST(mending_of_a_namespace),
    END_OF_TESTS,
};
