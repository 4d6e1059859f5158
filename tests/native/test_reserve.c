/* Reserving and abandoning: who gets which pages, and what stands in the way. */
#include "pair.h"

static void abandon(client *c, prompt *w) {
    int rc;
    do rc = lci_abandon(c->h, w->op.rid, w->op.gen, BLOCKING);
    while (rc == LC_E_INTR);
    CHECK_EQ(rc, LC_OK);
}

static void reserve_makes_pages_pinned_and_hung_on_one_another(void) {
    set_up(600);
    prompt_make(&p, 1, 300); /* more than one hold of the lock */
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 300);
    index_check(&s);
    lci_counts counts = index_counts(&a);
    CHECK_EQ(counts.named, 300);
    CHECK_EQ(counts.writing, 300);
    CHECK_EQ(counts.reservations, 1);
    CHECK_EQ(counts.chunks, 5);
    for (uint32_t i = 0; i < 300; i++) {
        const lci_page *page = &a.h->pages[p.page[i]];
        CHECK_EQ(p.status[i], LCI_NEW);
        CHECK_EQ(pins_of(&a, (uint32_t)p.page[i]), 1);
        CHECK_EQ(lci_parent(a.h, page), i ? (uint32_t)p.page[i - 1] : LC_NIL);
        CHECK_EQ(lc_load(&page->children), i < 299);
    }
    CHECK_EQ(lcs_client_of(a.at, a.slot)->reserved_pages, 300);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    prompt_unpin(&a, &p); /* once */
    CHECK_EQ(pins_of(&a, (uint32_t)p.page[0]), 0);
    counts = index_counts(&a);
    CHECK_EQ(counts.writing, 0); /* published pages count as ready before they are collected */
    CHECK_EQ(lcs_client_of(a.at, a.slot)->published_pages, 300);
    tear_down();
}

static void reserve_of_what_is_there_and_of_what_others_write(void) {
    set_up(600);
    prompt_fill(&a, &p, 1, 40);
    prompt_make(&q, 1, 60);
    CHECK_EQ(prompt_reserve(&a, &q, NS, 1), 20);
    for (uint32_t i = 0; i < 60; i++) CHECK_EQ(q.status[i], i < 40 ? LCI_PRESENT : LCI_NEW);
    CHECK_EQ(pins_of(&a, (uint32_t)q.page[0]), 1);
    prompt_make(&p, 1, 70);
    CHECK_EQ(prompt_reserve(&b, &p, NS, 1), 10);
    for (uint32_t i = 0; i < 70; i++)
        CHECK_EQ(p.status[i], i < 40 ? LCI_PRESENT : i < 60 ? LCI_BUSY_KEY : LCI_NEW);
    CHECK_EQ(p.page[45], q.page[45]);
    CHECK_EQ(pins_of(&a, (uint32_t)q.page[45]), 1); /* what others write is not pinned */
    index_check(&s);
    prompt_publish(&b, &p, 0);
    prompt_unpin(&b, &p);
    prompt_publish(&a, &q, 0);
    prompt_unpin(&a, &q);
    CHECK_EQ(peek(&b, &p), 70);
    tear_down();
}

static void reserve_of_a_suffix(void) {
    set_up(600);
    prompt_fill(&a, &p, 1, 20);
    const lci_page *page = &a.h->pages[p.page[3]];
    uint64_t tick = lci_tick(page);
    prompt_make(&q, 1, 30);
    q.op = (lci_reserve_op){.shards = 1, .ns = NS};
    CHECK_EQ(lci_reserve(a.h, &q.op, q.keys, 30, 20, q.page, q.status, BLOCKING), 10);
    CHECK(lci_tick(page) > tick); /* what it hangs on counts as used */
    CHECK_EQ(pins_of(&a, (uint32_t)p.page[3]), 0);
    CHECK_EQ(lci_parent(a.h, &a.h->pages[q.page[0]]), p.page[19]);
    CHECK_EQ(lci_unreserve(a.h, &q.op, q.page, q.status, 10), LC_OK);
    CHECK_EQ(lci_abandon(a.h, q.op.rid, q.op.gen, BLOCKING), LC_OK);
    CHECK_EQ(lci_reserve(a.h, &q.op, q.keys, 30, 31, q.page, q.status, BLOCKING), LC_E_RANGE);
    tear_down();
}

static void reserve_of_a_key_twice(void) {
    set_up(64);
    prompt_make(&p, 1, 10);
    p.keys[7] = p.keys[2];
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 9);
    CHECK_EQ(p.status[7], LCI_BUSY_KEY);
    CHECK_EQ(p.page[7], p.page[2]);
    index_check(&s);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    tear_down();
}

static void reserve_evicts_the_oldest(void) {
    set_up(100);
    prompt_fill(&a, &p, 1, 60);
    prompt_fill(&a, &q, 2, 40);
    prompt_fill(&a, &q, 3, 30);
    CHECK_EQ(peek(&a, &p), 30); /* from its end */
    index_check(&s);
    CHECK_EQ(lcs_client_of(a.at, a.slot)->evicted_pages, 30);
    for (uint32_t cause = 0; cause < LCI_CAUSES; cause++)
        CHECK_EQ(lc_load(&a.h->root->evicted[cause]), cause == LCI_FOR_ROOM ? 30 : 0);
    prompt_make(&q, 2, 40);
    CHECK_EQ(peek(&a, &q), 40);
    tear_down();
}

static void reserve_of_more_than_can_be_made_free(void) {
    set_up(100);
    prompt_fill(&a, &p, 1, 60);
    CHECK_EQ(match(&b, &p, &l), 60);
    prompt_make(&q, 2, 100);
    CHECK_EQ(prompt_reserve(&a, &q, NS, 1), 40);
    CHECK_EQ(q.op.stopped, 1);
    CHECK_EQ(q.op.reason, LCI_WHY_PINNED);
    for (uint32_t i = 0; i < 100; i++) CHECK_EQ(q.status[i], i < 40 ? LCI_NEW : LCI_NO_ROOM);
    index_check(&s);
    prompt_unpin(&a, &q);
    abandon(&a, &q);
    CHECK_EQ(peek(&b, &p), 60);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    tear_down();
}

static void reserve_asks_for_memory_first(void) {
    set_up_grown(100, 10);
    prompt_make(&p, 1, 25);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), LC_E_GROW);
    CHECK_EQ(p.op.wanted, 15);
    index_check(&s);
    CHECK_EQ(lci_grow(a.h, 101, BLOCKING), LC_E_RANGE);
    CHECK_EQ(lci_grow(a.h, 40, BLOCKING), LC_OK);
    CHECK_EQ(lci_grow(a.h, 30, BLOCKING), LC_OK); /* never back */
    CHECK_EQ(index_counts(&a).grown, 40);
    int rc = lci_reserve(a.h, &p.op, p.keys, 25, 0, p.page, p.status, BLOCKING);
    CHECK_EQ(rc, 25); /* goes on where it was */
    CHECK_EQ(lci_unreserve(a.h, &p.op, p.page, p.status, 25), LC_OK);
    abandon(&a, &p);
    CHECK_EQ(evict(&a, 1), 0); /* takes in what was doomed */
    CHECK_EQ(index_counts(&a).free, 25);
    tear_down();
}

static void reserve_of_a_full_chain_makes_room_in_it(void) {
    set_up(100);
    prompt_make(&p, 0, LC_CHAIN_MAX);
    for (uint32_t i = 0; i < p.n; i++) p.keys[i] = crowded_key(3, i);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), LC_CHAIN_MAX);
    prompt_publish(&a, &p, 0);
    prompt_make(&q, 0, 1);
    q.keys[0] = crowded_key(3, 99);
    CHECK_EQ(prompt_reserve(&a, &q, NS, 1), 0); /* all of them are pinned */
    CHECK_EQ(q.op.reason, LCI_WHY_CHAIN);
    prompt_unpin(&a, &p);
    prompt_make(&q, 0, 1);
    q.keys[0] = crowded_key(3, 99);
    CHECK_EQ(prompt_reserve(&a, &q, NS, 1), 1);
    CHECK_EQ(peek(&a, &p), LC_CHAIN_MAX - 1);
    index_check(&s);
    prompt_unpin(&a, &q);
    abandon(&a, &q);
    tear_down();
}

static void reserve_of_anothers_namespaces_key_stops(void) {
    lci_ns_ref other;
    set_up(64);
    prompt_fill(&a, &p, 1, 5);
    CHECK_EQ(lci_namespace_open(a.h, "w", "", 0, &other, BLOCKING), LC_OK);
    prompt_make(&q, 1, 5);
    q.keys[0] = prompt_key(7, 0);
    CHECK_EQ(prompt_reserve(&b, &q, other, 1), 1);
    CHECK_EQ(q.status[1], LCI_NO_ROOM);
    CHECK_EQ(q.op.reason, LCI_WHY_CHAIN);
    prompt_unpin(&b, &q);
    abandon(&b, &q);
    tear_down();
}

static void reserve_readopts_a_page_whose_parent_went(void) {
    set_up(100);
    prompt_make(&p, 1, 10);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 10);
    prompt_make(&q, 1, 12); /* hangs on pages that are being written */
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 2);
    CHECK_EQ(lci_parent(a.h, &a.h->pages[q.page[10]]), p.page[9]);
    prompt_unpin(&a, &p);
    abandon(&a, &p);
    prompt_publish(&b, &q, 0);
    prompt_unpin(&b, &q);
    CHECK_EQ(lci_parent(a.h, &a.h->pages[q.page[10]]), LC_NIL);
    index_check(&s);
    prompt_make(&p, 1, 11);
    p.op = (lci_reserve_op){.shards = 1, .ns = NS};
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 10);
    CHECK_EQ(p.status[10], LCI_PRESENT); /* it has a child, so it keeps what it has */
    CHECK_EQ(lci_parent(a.h, &a.h->pages[q.page[10]]), LC_NIL);
    prompt_unpin(&a, &p);
    CHECK_EQ(evict(&b, 1), 1); /* the child */
    prompt_publish(&a, &p, 0);
    prompt_make(&q, 1, 11);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 0);
    CHECK_EQ(lci_parent(a.h, &a.h->pages[q.page[10]]), p.page[9]);
    prompt_unpin(&b, &q);
    tear_down();
}

static void reserve_runs_out_of_reservations(void) {
    static prompt many[65];
    set_up(64);
    for (uint32_t i = 0; i < 64; i++) {
        prompt_make(&many[i], i, 1);
        if (i == 63) break;
        CHECK_EQ(prompt_reserve(&a, &many[i], NS, 1), 1);
    }
    a.h->res_count = 63; /* as many pages as reservations: without this the pages end first */
    CHECK_EQ(prompt_reserve(&a, &many[63], NS, 1), 0);
    CHECK_EQ(many[63].op.reason, LCI_WHY_RESERVATIONS);
    a.h->res_count = 64;
    for (uint32_t i = 0; i < 63; i++) {
        prompt_unpin(&a, &many[i]);
        abandon(&a, &many[i]);
    }
    CHECK_EQ(index_counts(&a).reservations, 0);
    tear_down();
}

static void reserve_is_refused(void) {
    set_up(64);
    prompt_make(&p, 1, 5);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 0), LC_E_RANGE);
    CHECK_EQ(prompt_reserve(&a, &p, NS, LCI_SHARDS + 1), LC_E_RANGE);
    CHECK_EQ(prompt_reserve(&a, &p, NS + (1 << 8), 1), LC_E_CLEARED);
    client r = reader_join(&s);
    CHECK_EQ(prompt_reserve(&r, &p, NS, 1), LC_E_READONLY);
    CHECK_EQ(lci_abandon(r.h, 0, 0, BLOCKING), LC_E_READONLY);
    uint32_t freed = 0;
    CHECK_EQ(lci_evict_pages(r.h, 1, &freed, BLOCKING), LC_E_READONLY);
    client_forget(&r);
    CHECK_EQ(lci_hold(b.h, BLOCKING), LC_OK);
    p.op = (lci_reserve_op){.shards = 1, .ns = NS};
    CHECK_EQ(lci_reserve(a.h, &p.op, p.keys, 5, 0, p.page, p.status, LC_TRY, 0), LC_E_BUSY);
    CHECK_EQ(lci_reserve(a.h, &p.op, p.keys, 5, 0, p.page, p.status, LC_BLOCK, 0), LC_E_TIMEOUT);
    CHECK_EQ(lci_evict_pages(a.h, 1, &freed, LC_TRY, 0), LC_E_BUSY);
    CHECK_EQ(lci_let_go(b.h), LC_OK);
    CHECK_EQ(pthread_mutex_lock(&a.at->door), 0); /* another thread of the process is at it */
    CHECK_EQ(lci_reserve(a.h, &p.op, p.keys, 5, 0, p.page, p.status, LC_TRY, 0), LC_E_BUSY);
    CHECK_EQ(pthread_mutex_unlock(&a.at->door), 0);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 5);
    p.page[4] = 64;
    CHECK_EQ(lci_unreserve(a.h, &p.op, p.page, p.status, 5), LC_E_RANGE);
    CHECK_EQ(lci_abandon(a.h, 64, 0, BLOCKING), LC_E_RANGE);
    CHECK_EQ(lci_abandon(a.h, p.op.rid, p.op.gen + 1, BLOCKING), LC_E_STALE);
    abandon(&a, &p);
    CHECK_EQ(lci_abandon(a.h, p.op.rid, p.op.gen, BLOCKING), LC_E_STALE);
    tear_down();
}

static void abandoned_pages_wait_for_the_last_pin(void) {
    set_up(64);
    prompt_make(&p, 1, 20);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 2), 20);
    abandon(&a, &p);
    CHECK_EQ(index_counts(&a).doomed, 20);
    CHECK_EQ(index_counts(&a).named, 0);
    CHECK_EQ(evict(&b, 64), 0);
    CHECK_EQ(index_counts(&a).doomed, 20);
    CHECK_EQ(lci_publish(a.h, p.op.rid, p.op.gen, 0, p.fresh, p.made), LC_E_STALE);
    index_check(&s);
    prompt_unpin(&a, &p);
    prompt_make(&q, 2, 60); /* needs them */
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 60);
    CHECK_EQ(index_counts(&a).doomed, 0);
    prompt_unpin(&b, &q);
    abandon(&b, &q);
    tear_down();
}

/* Damage under the lock: the step is rolled back, and what it had pinned is given back. */
static void reserve_that_meets_damage_holds_nothing(void) {
    set_up(64);
    prompt_fill(&a, &q, 2, 4);
    CHECK_EQ(evict(&a, 2), 2);
    lc_store(&a.h->pages[lc_load(&a.h->root->free_head)].word, LCI_DOOMED);
    prompt_make(&p, 1, 5);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), LC_E_CORRUPT);
    CHECK_EQ(p.op.made, 0);
    CHECK_EQ(p.op.gen, 0);
    prompt_unpin(&a, &p);
    for (uint32_t i = 0; i < 64; i++) CHECK_EQ(pins_of(&a, i), 0);
    lc_store(&a.h->pages[lc_load(&a.h->root->free_head)].word, LCI_FREE);
    index_check(&s);
    lc_store(&a.h->pages[q.page[0]].word, LCI_EVICTING); /* outside a critical section */
    q.op.pinned = 0;
    CHECK_EQ(prompt_reserve(&a, &q, NS, 1), LC_E_CORRUPT);
    lc_store(&a.h->pages[q.page[0]].word, LCI_READY);
    prompt_unpin(&a, &q);
    tear_down();
}

/* A chain in pieces: keys[0] is that of the page before. */
static int reserve_piece(client *c, prompt *piece, uint32_t from, uint32_t to) {
    lci_reserve_op op = {.shards = 1, .ns = NS, .linked = 1};
    prompt whole;
    prompt_make(&whole, 1, to);
    memset(piece, 0, sizeof *piece);
    memcpy(piece->keys, whole.keys + from - 1, (to - from + 1) * sizeof *piece->keys);
    piece->n = to - from + 1;
    int made = lci_reserve(c->h, &op, piece->keys, piece->n, 1, piece->page, piece->status, BLOCKING);
    piece->op = op;
    return made;
}

static void pieces_hang_on_the_page_before(void) {
    prompt piece;
    set_up(64);
    CHECK_EQ(reserve_piece(&b, &piece, 4, 8), 0); /* nothing there */
    CHECK_EQ(piece.op.reason, LCI_WHY_HEAD);
    CHECK_EQ(piece.status[0], LCI_NO_ROOM);
    CHECK_EQ(piece.op.gen, 0);
    prompt_make(&p, 1, 4);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 4); /* being written */
    CHECK_EQ(reserve_piece(&b, &piece, 4, 8), 4);
    CHECK_EQ(lci_parent(b.h, &b.h->pages[piece.page[0]]), (uint32_t)p.page[3]);
    CHECK_EQ(lc_load(&b.h->pages[p.page[3]].children), 1);
    CHECK_EQ(lci_abandon(a.h, p.op.rid, p.op.gen, BLOCKING), LC_OK);
    CHECK_EQ(lci_parent(b.h, &b.h->pages[piece.page[0]]), LC_NIL); /* its writer gave up */
    prompt_unpin(&a, &p);
    CHECK_EQ(lci_publish(b.h, piece.op.rid, piece.op.gen, 0, piece.page, 4), 1);
    CHECK_EQ(lci_unreserve(b.h, &piece.op, piece.page, piece.status, 4), LC_OK);
    CHECK_EQ(reserve_piece(&b, &piece, 4, 8), 0); /* all there: no head is asked for */
    CHECK_EQ(piece.op.reason + piece.op.stopped, 0);
    for (uint32_t i = 0; i < 4; i++) CHECK_EQ(piece.status[i], LCI_PRESENT);
    CHECK_EQ(lci_unreserve(b.h, &piece.op, piece.page, piece.status, 4), LC_OK);
    tear_down();
}

/* Pages of a prefix do not hang on an independent one: it is no head of theirs. */
static void a_piece_hangs_on_its_own_kind(void) {
    prompt piece;
    set_up_independent(64);
    prompt_fill(&a, &p, 1, 4);
    CHECK_EQ(reserve_piece(&b, &piece, 4, 8), 0);
    CHECK_EQ(piece.op.reason, LCI_WHY_HEAD);
    tear_down();
}

static void keys_are_touched(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 2);
    lc_key absent = prompt_key(9, 9);
    const lci_page *page = &a.h->pages[p.page[0]];
    uint64_t before = lci_tick(page);
    CHECK_EQ(lci_touch_key(b.h, &absent, NS), 0);
    CHECK_EQ(lci_touch_key(b.h, &p.keys[0], NS + 1), 0); /* of another namespace */
    CHECK_EQ(lci_tick(page), before);
    CHECK_EQ(lci_touch_key(b.h, &p.keys[0], NS), 1);
    CHECK(lci_tick(page) > before);
    CHECK_EQ(lc_load(&page->used) & LCI_HITS_MASK, 0);
    tear_down();
}

#ifdef LC_PAUSE_POINTS
/* Another client waits all the time, and the hold began at `begun`: holds of the lock that it takes to
 * reserve 256 pages. */
static uint64_t begun;

static void others_wait(int point) {
    lcs_lock *lock = lcs_lock_of(a.at);
    if (point != LC_AT_LOCKED) return;
    atomic_fetch_or(&lock->both, LCS_LOCK_WAITERS);
    lc_store(&lock->since_ns, begun);
}

static uint64_t holds_beside_others(uint64_t since, uint32_t number) {
    begun = since;
    prompt_make(&p, number, 256);
    uint64_t before = lc_load(&lcs_lock_of(a.at)->acquisitions);
    lc_pause_hook = others_wait;
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 256);
    lc_pause_hook = NULL;
    uint64_t holds = lc_load(&lcs_lock_of(a.at)->acquisitions) - before;
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    return holds;
}

static void reserve_gives_way_when_it_has_done_its_share(void) {
    set_up(600);
    if (a.h->ranks) lc_store(&a.h->learnt.root->claimed, 1); /* to install an order takes a hold more */
    CHECK_EQ(holds_beside_others(UINT64_MAX / 2, 1), 256 / LCI_SHARE);
    CHECK_EQ(holds_beside_others(0, 2), 256 / LCI_BATCH); /* it has lasted long */
    uint32_t freed = 0;
    uint64_t before = lc_load(&lcs_lock_of(a.at)->acquisitions);
    begun = UINT64_MAX / 2;
    lc_pause_hook = others_wait;
    CHECK_EQ(lci_evict_pages(a.h, 256, &freed, BLOCKING), LC_OK);
    lc_pause_hook = NULL;
    CHECK_EQ(freed, 256);
    CHECK_EQ(lc_load(&lcs_lock_of(a.at)->acquisitions) - before, 256 / LCI_SHARE);
    tear_down();
}

#endif

const test reserve_tests[] = {
    TEST(reserve_makes_pages_pinned_and_hung_on_one_another),
    TEST(reserve_of_what_is_there_and_of_what_others_write),
    TEST(reserve_of_a_suffix),
    TEST(reserve_of_a_key_twice),
    TEST(reserve_evicts_the_oldest),
    TEST(reserve_of_more_than_can_be_made_free),
    TEST(reserve_asks_for_memory_first),
    TEST(reserve_of_a_full_chain_makes_room_in_it),
    TEST(reserve_of_anothers_namespaces_key_stops),
    TEST(reserve_readopts_a_page_whose_parent_went),
    TEST(reserve_runs_out_of_reservations),
    TEST(reserve_is_refused),
    TEST(abandoned_pages_wait_for_the_last_pin),
    TEST(reserve_that_meets_damage_holds_nothing),
    TEST(pieces_hang_on_the_page_before),
    TEST(a_piece_hangs_on_its_own_kind),
    TEST(keys_are_touched),
#ifdef LC_PAUSE_POINTS
    TEST(reserve_gives_way_when_it_has_done_its_share),
#endif
    END_OF_TESTS,
};
