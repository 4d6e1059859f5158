/* Admission: which new pages are made, what is given up for them, and what is remembered of the rest. */
#include "calls.h"
#include "pair.h"

static uint32_t admitted(client *c, prompt *r, uint32_t start, uint32_t hint) {
    r->op = (lci_reserve_op){.shards = 1, .ns = NS, .admission = 1, .hint = hint};
    int made = lci_reserve(c->h, &r->op, r->keys, r->n, start, r->page, r->status, BLOCKING);
    CHECK(made >= 0);
    return (uint32_t)made;
}

static void give_up(client *c, prompt *r, uint32_t start) {
    if (r->op.gen) CHECK_EQ(lci_abandon(c->h, r->op.rid, r->op.gen, BLOCKING), LC_OK);
    CHECK_EQ(lci_unreserve(c->h, &r->op, r->page, r->status, r->n - start), LC_OK);
}

static uint32_t worth(const prompt *r, uint32_t start) {
    return (uint32_t)lci_worth(b.h, r->keys, r->n, start, NS, LCH_HINT_NONE, 0);
}

/* A full index of `hot` pages that were hit and others that were not. Nothing ages, and nothing is learned:
 * so what was hit ranks above what was not. */
static void full(uint32_t pages, uint32_t hot) {
    set_up_ranked(pages);
    lci_set_clock(a.h, 1);
    lci_set_clock(b.h, 1);
    lc_store(&a.h->learnt.root->unit, 20);
    lc_store(&a.h->learnt.root->claimed, 1);
    for (uint32_t i = 0; i < pages; i++) {
        prompt_fill(&a, &p, 1000 + i, 1);
        if (i >= hot) continue;
        CHECK_EQ(match(&b, &p, &l), 1);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    }
}

static void a_page_goes_for_none_that_ranks_below_it(void) {
    full(100, 90);
    prompt_make(&q, 1, 40);
    CHECK_EQ(admitted(&a, &q, 0, LCH_HINT_NONE), 10);
    CHECK_EQ(q.op.reason, LCI_WHY_WORTH);
    for (uint32_t i = 0; i < 40; i++) CHECK_EQ(q.status[i], i < 10 ? LCI_NEW : LCI_NO_ROOM);
    CHECK_EQ(index_counts(&a).named, 100); /* ten went */
    give_up(&a, &q, 0);
    prompt_make(&p, 2, 10);
    CHECK_EQ(admitted(&a, &p, 0, LCH_HINT_ENDS), 10); /* which are free now */
    prompt_make(&q, 3, 5);
    CHECK_EQ(admitted(&b, &q, 0, LCH_HINT_ENDS), 0);
    prompt_make(&q, 4, 5);
    CHECK_EQ(worth(&q, 0), 0);
    CHECK_EQ(index_counts(&a).named, 100); /* none has gone for it */
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 5); /* without the option */
    index_check(&s);
    tear_down();
}

static void what_is_refused_is_remembered(void) {
    uint64_t used = 0, now;
    full(100, 100);
    prompt_make(&q, 1, 70); /* more than two batches */
    now = lc_load(&a.h->root->clock) + 1;
    CHECK_EQ(admitted(&a, &q, 0, LCH_HINT_NONE), 0);
    for (uint32_t i = 0; i < 70; i++) {
        CHECK(lch_known(&a.h->learnt, q.keys[i], now, &used));
        CHECK_EQ(lch_hits_of(used), 0);
    }
    CHECK_EQ(worth(&q, 0), 70); /* they have come back: that ranks as a hit */
    CHECK_EQ(admitted(&a, &q, 0, LCH_HINT_NONE), 70);
    CHECK_EQ(lch_hits_of(lc_load(&a.h->pages[q.page[69]].used)), 1);
    tear_down();
    full(100, 100);
    prompt_make(&q, 1, 70);
    CHECK_EQ(worth(&q, 0), 0);
    CHECK_EQ(worth(&q, 0), 70);
    CHECK_EQ(lci_worth(b.h, q.keys, 70, 60, NS, 0, 1), 0); /* the key before was refused */
    tear_down();
}

/* A rank's turn begins within a prompt: a page behind one that was hit is of a later turn than what is
 * there, pages that ended. */
static void a_key_is_worth_what_its_prefix_is(void) {
    full(100, 0);
    for (uint32_t i = 0; i < 100; i++)
        lc_store(&a.h->pages[i].used, lc_load(&a.h->pages[i].used) | LCH_HINT_ENDS);
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK); /* each to the list of its word */
    prompt_make(&q, 1, 10);
    CHECK_EQ(worth(&q, 1), 0);
    prompt_make(&p, 1050, 1);
    CHECK_EQ(match(&b, &p, &l), 1);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    prompt_make(&q, 2, 10);
    q.keys[0] = p.keys[0];
    CHECK_EQ(worth(&q, 1), 9);
    tear_down();
}

/* Who asks for nothing but this, and is always refused, learns from it all the same. */
static void refusals_are_learned_from(void) {
    full(100, 100);
    lc_store(&a.h->learnt.root->claimed, 0);
    uint32_t computed = lc_load(&a.h->learnt.root->computed), chosen = lc_load(&a.h->ranks->chosen);
    prompt_make(&q, 1, 100);
    CHECK_EQ(worth(&q, 0), 0);
    CHECK_EQ(lc_load(&a.h->learnt.root->computed), computed + 1);
    CHECK_EQ(lc_load(&a.h->ranks->chosen), !chosen);
    tear_down();
}

/* In worth as in prefixes: what is behind is found with what is before it. */
static void a_key_is_worth_what_is_behind_it(void) {
    full(100, 100);
    prompt_make(&q, 1, 8);
    lc_key last = q.keys[7];
    prompt_make(&q, 2, 1);
    q.keys[0] = last;
    CHECK_EQ(admitted(&a, &q, 0, LCH_HINT_NONE), 0); /* remembered */
    prompt_make(&q, 1, 10);
    CHECK_EQ(admitted(&a, &q, 0, LCH_HINT_NONE), 8);
    tear_down();
    full(100, 100);
    prompt_make(&q, 1, 40);
    q.keys[36] = prompt_key(1000, 0); /* is there */
    CHECK_EQ(worth(&q, 0), 37);
    prompt_make(&q, 2, 40);
    q.keys[36] = prompt_key(1000, 0);
    CHECK_EQ(admitted(&a, &q, 0, LCH_HINT_NONE), 36);
    CHECK_EQ(q.status[36], LCI_PRESENT);
    CHECK_EQ(q.op.reason, LCI_WHY_WORTH);
    tear_down();
}

static void a_prompt_without_its_head_is_not_written(void) {
    full(100, 100);
    CHECK_EQ(evict(&a, 50), 50);
    prompt_make(&q, 1, 20);
    CHECK_EQ(admitted(&a, &q, 10, LCH_HINT_NONE), 0);
    CHECK_EQ(q.op.reason, LCI_WHY_HEAD);
    q.op = (lci_reserve_op){.shards = 1, .ns = NS, .admission = 1, .run = 1};
    CHECK_EQ(lci_reserve(a.h, &q.op, q.keys, 20, 10, q.page, q.status, BLOCKING), 10); /* independent */
    tear_down();
    full(100, 100);
    CHECK_EQ(evict(&a, 50), 50);
    prompt_make(&q, 1, 20);
    q.keys[9] = prompt_key(1099, 0);
    CHECK_EQ(peek(&a, &p), 1);
    CHECK_EQ(admitted(&a, &q, 10, LCH_HINT_NONE), 10); /* hangs on a page that is there */
    tear_down();
}

/* At its quota a namespace is compared with its own, also where it has more by now and pages are free. */
static void a_quota(void) {
    full(100, 100);
    CHECK_EQ(evict(&a, 20), 20);
    prompt_make(&q, 1, 10);
    CHECK_EQ(worth(&q, 0), 10);
    for (uint32_t quota = 40; quota <= 80; quota += 40) {
        lc_store(&a.h->ns[0].quota, quota);
        prompt_make(&q, quota, 10);
        CHECK_EQ(worth(&q, 0), 0);
        prompt_make(&q, quota + 1, 10);
        CHECK_EQ(admitted(&a, &q, 0, LCH_HINT_NONE), 0);
        CHECK_EQ(q.op.reason, LCI_WHY_WORTH);
        CHECK_EQ(index_counts(&a).named, 80);
    }
    lc_store(&a.h->ns[0].quota, 83);
    prompt_make(&q, 90, 10);
    CHECK_EQ(worth(&q, 0), 3);
    prompt_make(&q, 91, 10);
    CHECK_EQ(admitted(&a, &q, 0, LCH_HINT_NONE), 3);
    tear_down();
}

static lci_ns_ref other;

static void fill_other(uint32_t number) {
    prompt_make(&p, number, 1);
    CHECK_EQ(prompt_reserve(&a, &p, other, 1), 1);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
}

/* Some go for the quota, and the rest for the pool: that its own rank higher is no price of the others. */
static void a_quota_is_filled_from_the_pool(void) {
    full(100, 70);
    CHECK_EQ(lci_namespace_open(a.h, "w", "t", 20, &other, BLOCKING), LC_OK);
    CHECK_EQ(evict(&a, 18), 18);
    for (uint32_t i = 0; i < 18; i++) fill_other(2000 + i);
    for (uint32_t i = 3; i < 18; i++) {
        prompt_make(&p, 2000 + i, 1);
        memset(&l, 0, sizeof l);
        CHECK_EQ(lci_match1(b.h, p.keys, 1, other, &l.head), 1);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    }
    prompt_make(&q, 1, 5);
    q.op = (lci_reserve_op){.shards = 1, .ns = other, .admission = 1};
    CHECK_EQ(lci_reserve(a.h, &q.op, q.keys, 5, 0, q.page, q.status, BLOCKING), 5);
    CHECK_EQ(lc_load(&a.h->ns[lci_ns_id(other)].pages), 20);
    CHECK_EQ(index_counts(&a).named, 100); /* three of its own, and two others */
    tear_down();
}

/* Below its quota a namespace is compared with what the pool gives up first, not with its own. */
static void below_a_quota_the_pool_is_the_price(void) {
    full(100, 70);
    CHECK_EQ(lci_namespace_open(a.h, "w", "t", 20, &other, BLOCKING), LC_OK);
    CHECK_EQ(evict(&a, 18), 18);
    for (uint32_t i = 0; i < 18; i++) {
        fill_other(2000 + i);
        l.head.held = 0;
        CHECK_EQ(lci_match1(b.h, p.keys, 1, other, &l.head), 1);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    }
    prompt_make(&q, 1, 5);
    CHECK_EQ(lci_worth(b.h, q.keys, 5, 0, other, LCH_HINT_NONE, 0), 5);
    lc_store(&a.h->ns[lci_ns_id(other)].quota, 18);
    CHECK_EQ(lci_worth(b.h, q.keys, 5, 0, other, LCH_HINT_NONE, 0), 0);
    tear_down();
}

/* Nothing is held for it, and nothing was changed but advice. */
static void a_refusal_leaves_nothing(void) {
    full(100, 100);
    prompt_make(&q, 1, 40);
    collect(&a);
    lci_counts before = index_counts(&a);
    CHECK_EQ(admitted(&a, &q, 0, LCH_HINT_NONE), 0);
    lci_counts after = index_counts(&a);
    CHECK_EQ(q.op.gen, 0); /* no reservation */
    CHECK_EQ(after.named, before.named);
    CHECK_EQ(after.free, before.free);
    CHECK_EQ(after.queued, before.queued);
    client_die(&a); /* with its reservation, if it had one */
    prompt_make(&p, 2, 3);
    CHECK_EQ(prompt_reserve(&b, &p, NS, 1), 3);
    index_check(&s);
    client_forget(&a);
    a = client_join(&s);
    tear_down();
}

/* A key whose chain has no room, and which is not worth a page: none of the chain goes for it. */
static void a_full_chain_loses_nothing(void) {
    full(100, 100);
    CHECK_EQ(evict(&a, LC_CHAIN_MAX), LC_CHAIN_MAX);
    for (uint32_t i = 0; i < LC_CHAIN_MAX; i++) {
        prompt_make(&p, 2000 + i, 1);
        p.keys[0].lo = 5;
        CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 1);
        prompt_publish(&a, &p, 0);
        prompt_unpin(&a, &p);
        CHECK_EQ(match(&b, &p, &l), 1);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    }
    prompt_make(&q, 1, 1);
    q.keys[0].lo = 5;
    CHECK_EQ(admitted(&a, &q, 0, LCH_HINT_NONE), 0);
    CHECK_EQ(q.op.reason, LCI_WHY_WORTH);
    CHECK_EQ(index_counts(&a).named, 100);
    tear_down();
}

static void what_goes_first_is_the_price(void) {
    lci_walk_op first = {0};
    full(100, 100);
    prompt_make(&p, 1050, 1);
    prompt_make(&q, 1, 5);
    CHECK_EQ(worth(&q, 0), 0);
    CHECK_EQ(lci_evict_first(a.h, p.keys, 1, NS, &first, BLOCKING), LC_OK);
    CHECK_EQ(first.pages, 1);
    prompt_make(&q, 2, 5);
    CHECK_EQ(worth(&q, 0), 1); /* each has its own price */
    prompt_make(&q, 3, 5);
    CHECK_EQ(admitted(&a, &q, 0, LCH_HINT_NONE), 1);
    tear_down();
}

static uint32_t worth_of(uint32_t number) {
    prompt_make(&q, number, 40);
    return worth(&q, 0);
}

/* Of the pool, and of a namespace at its quota: ten pages rank no higher than the new ones. */
static void each_key_has_its_price(void) {
    full(100, 90);
    collect(&a);
    CHECK_EQ(worth_of(1), 10);
    lc_store(&a.h->ns[0].quota, 100);
    CHECK_EQ(worth_of(2), 10);
    lc_store(&a.h->ns[0].quota, 0);
    CHECK_EQ(evict(&a, 4), 4); /* of the ten; as many pages are free now */
    CHECK_EQ(worth_of(3), 10);
    index_check(&s);
    tear_down();
}

/* A pool of what was hit, but for the ten pages of `p`. */
static void one_path(void) {
    full(100, 100);
    CHECK_EQ(evict(&a, 10), 10);
    prompt_fill(&a, &p, 1, 10);
    collect(&a);
}

static void quota(uint32_t pages) { lc_store(&a.h->ns[0].quota, pages); }

/* A leaf's price is that of what goes after it as well. */
static void what_follows_is_counted(void) {
    lci_walk_op kept = {0};
    for (uint32_t own = 0; own <= 100; own += 100) {
        one_path();
        quota(own);
        CHECK_EQ(worth_of(2), 10);
        p.n = 4;
        l.head.capacity = LCI_UNCOUNTED;
        CHECK_EQ(lci_match1(b.h, p.keys, 4, NS, &l.head), 4); /* pinned */
        CHECK_EQ(worth_of(3), 6);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
        CHECK_EQ(worth_of(4), 10);
        CHECK_EQ(match(&b, &p, &l), 4); /* they rank above the rest now */
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
        CHECK_EQ(worth_of(5), 6);
        tear_down();
        one_path();
        CHECK_EQ(evict(&a, 2), 2);
        prompt_make(&q, 6, 6); /* a branch of two behind four pages */
        memcpy(q.keys, p.keys, 4 * sizeof *q.keys);
        CHECK_EQ(prompt_reserve(&a, &q, NS, 1), 2);
        prompt_publish(&a, &q, 0);
        prompt_unpin(&a, &q);
        collect(&a);
        quota(own);
        uint64_t word = lc_load(&a.h->pages[p.page[7]].used);
        for (uint32_t i = 0; i < 6; i++) lc_store(&a.h->pages[q.page[i]].used, word);
        CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK); /* all ten in one list, or on their way to it */
        CHECK_EQ(worth_of(7), 6);
        tear_down();
        one_path();
        quota(own);
        CHECK_EQ(lci_keep(a.h, p.keys, 3, NS, 1, &kept, BLOCKING), LC_OK);
        kept = (lci_walk_op){0};
        CHECK_EQ(worth_of(8), 7);
        tear_down();
    }
}

/* Neither the page that the first key hangs on nor what that hangs on goes for it. */
static void its_own_chain_is_no_price(void) {
    for (uint32_t own = 0; own <= 100; own += 100) {
        one_path();
        quota(own);
        prompt_make(&q, 1, 30);
        CHECK_EQ(worth(&q, 10), 0);
        prompt_make(&q, 2, 30);
        memcpy(q.keys, p.keys, 10 * sizeof *q.keys);
        CHECK_EQ(worth(&q, 0), 10); /* what is there */
        tear_down();
    }
}

/* Damage: ranks that are none, links and parents in circles. Each answer is one of those there are. */
static void a_damaged_order_gives_an_answer(void) {
    full(100, 0);
    collect(&a);
    lci_order *o = &a.h->ranks->order[lc_load(&a.h->ranks->chosen) & 1];
    for (uint32_t list = 0; list < LCH_LISTS; list++) lc_store(&o->rank[list], UINT16_MAX);
    CHECK(worth_of(1) <= 40);
    for (uint32_t rank = 0; rank < LCH_LISTS; rank++) lc_store(&o->list[rank], UINT16_MAX);
    CHECK_EQ(worth_of(2), 40); /* nothing can go, as far as it sees */
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
    for (uint32_t i = 0; i < 100; i++) {
        lci_page *page = &a.h->pages[i];
        lc_store(&page->queue.next, i);
        lc_store(&page->parent, i);
        lc_store(&page->parent_gen, lc_load(&page->gen));
        lc_store(&page->children, 1);
    }
    CHECK(worth_of(3) <= 40);
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
    index_check(&s);
    tear_down();
}

static void pinned_pages_are_no_price(void) {
    full(60, 50);
    static lease held[10];
    for (uint32_t i = 0; i < 10; i++) { /* those that rank below */
        prompt_make(&p, 1050 + i, 1);
        memset(&held[i], 0, sizeof held[i]);
        held[i].head.capacity = LCI_UNCOUNTED;
        CHECK_EQ(lci_match1(b.h, p.keys, 1, NS, &held[i].head), 1);
    }
    prompt_make(&q, 1, 10);
    CHECK_EQ(worth(&q, 0), 0);
    prompt_make(&q, 2, 10);
    CHECK_EQ(admitted(&a, &q, 0, LCH_HINT_NONE), 0);
    index_check(&s);
    for (uint32_t i = 0; i < 10; i++) CHECK_EQ(lci_release(b.h, &held[i].head), LC_OK);
    tear_down();
}

static void advice_of_any_bytes(void) {
    uint32_t random = 5;
    full(100, 70);
    for (uint32_t round = 0; round < 200; round++) {
        uint64_t *at = (uint64_t *)a.h->learnt.root;
        uint64_t words = (a.h->geometry.end - a.h->geometry.advice) / 8;
        for (uint32_t i = 0; i < 2000; i++) {
            random = random * 1664525 + 1013904223;
            at[(i < 1000 ? i : random) % words] = (uint64_t)random << 32 | random * 3;
        }
        prompt_make(&q, 100 + round, 40);
        CHECK(worth(&q, 0) <= 40);
        prompt_make(&q, 400 + round, 40);
        CHECK(admitted(&a, &q, 0, round) <= 40);
        give_up(&a, &q, 0);
        index_check(&s);
    }
    tear_down();
}

static void what_is_refused_at_once(void) {
    full(40, 40);
    prompt_make(&q, 1, 4);
    CHECK_EQ(lci_worth(b.h, q.keys, 4, 5, NS, 0, 0), LC_E_RANGE);
    CHECK_EQ(lci_worth(b.h, q.keys, 4, 0, NS + 256, 0, 0), LC_E_CLEARED);
    client r = reader_join(&s);
    CHECK_EQ(lci_worth(r.h, q.keys, 4, 0, NS, 0, 0), LC_E_READONLY);
    client_leave(&r);
    tear_down();
    set_up_lru(40);
    prompt_fill(&a, &p, 1, 40);
    prompt_make(&q, 2, 4);
    CHECK_EQ(worth(&q, 1), 3);
    CHECK_EQ(admitted(&a, &q, 1, 0), 3);
    tear_down();
}

const test worth_tests[] = {
    TEST(a_page_goes_for_none_that_ranks_below_it),
    TEST(what_is_refused_is_remembered),
    TEST(a_key_is_worth_what_its_prefix_is),
    TEST(refusals_are_learned_from),
    TEST(a_key_is_worth_what_is_behind_it),
    TEST(a_prompt_without_its_head_is_not_written),
    TEST(a_quota),
    TEST(a_quota_is_filled_from_the_pool),
    TEST(below_a_quota_the_pool_is_the_price),
    TEST(a_refusal_leaves_nothing),
    TEST(a_full_chain_loses_nothing),
    TEST(what_goes_first_is_the_price),
    TEST(each_key_has_its_price),
    TEST(what_follows_is_counted),
    TEST(its_own_chain_is_no_price),
    TEST(a_damaged_order_gives_an_answer),
    TEST(pinned_pages_are_no_price),
    TEST(advice_of_any_bytes),
    TEST(what_is_refused_at_once),
    END_OF_TESTS,
};
