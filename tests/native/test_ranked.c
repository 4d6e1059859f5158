/* Eviction by ranked lists: order, what cannot go, ageing, orders that are installed, advice of any bytes. */
#include "calls.h"
#include "pair.h"

static uint64_t used_of(uint32_t page) { return lc_load(&a.h->pages[page].used); }

static lci_order *order_of(client *c) {
    return &c->h->ranks->order[lc_load(&c->h->ranks->chosen) & 1];
}

/* No page ages in a test that lasts a few ticks, and nothing is learned in it. */
static void coarse_ages(void) {
    set_up_ranked(400);
    lci_set_clock(a.h, 1);
    lci_set_clock(b.h, 1);
    lc_store(&a.h->learnt.root->unit, 20);
    lc_store(&a.h->learnt.root->claimed, 1);
}

static uint32_t next_random(uint32_t *random) {
    *random = *random * 1664525 + 1013904223;
    return *random >> 8;
}

/* Prompts of one page, some of them matched, so that they belong to several lists; and lie there. */
static void some_uses(uint32_t prompts, uint32_t matches) {
    uint32_t random = 7;
    for (uint32_t i = 0; i < prompts; i++) prompt_fill(&a, &p, i, 1);
    for (uint32_t i = 0; i < matches; i++) {
        prompt_make(&p, next_random(&random) % prompts, 1);
        CHECK_EQ(match(&b, &p, &l), 1);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    }
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
}

/* What `oldest` lists is what `evict` takes, in that order. */
static void oldest_is_what_goes(void) {
    coarse_ages();
    some_uses(300, 500);
    CHECK_EQ(oldest(&a, 300, 1), 300);
    index_check(&s);
    int32_t order[300];
    memcpy(order, list.pages, sizeof order);
    CHECK_EQ(lci_release(a.h, &list.head), LC_OK);
    for (uint32_t i = 0; i < 300; i++) {
        CHECK_EQ(lci_state_of(lc_load(&a.h->pages[order[i]].word)), LCI_READY);
        CHECK_EQ(evict(&b, 1), 1);
        CHECK_EQ(lci_state_of(lc_load(&a.h->pages[order[i]].word)), LCI_FREE);
    }
    tear_down();
}

/* The lower rank first; within a list the one that came first. */
static void lists_go_by_rank(void) {
    coarse_ages();
    some_uses(300, 500);
    CHECK_EQ(oldest(&a, 300, 1), 300);
    for (uint32_t i = 1; i < 300; i++) {
        uint64_t before = used_of((uint32_t)list.pages[i - 1]), now = used_of((uint32_t)list.pages[i]);
        CHECK(lci_rank(a.h, before) <= lci_rank(a.h, now));
    }
    CHECK_EQ(lci_release(a.h, &list.head), LC_OK);
    tear_down();
}

/* Pinned pages are met once and parked; a call ends, and they go when they can. */
static void pinned_pages_are_parked(void) {
    set_up_ranked(64);
    prompt_fill(&a, &p, 0, 1);
    static lease held[50];
    for (uint32_t i = 0; i < 50; i++) {
        prompt_fill(&a, &q, 1 + i, 1);
        memset(&held[i], 0, sizeof held[i]);
        CHECK_EQ(match(&b, &q, &held[i]), 1);
    }
    CHECK_EQ(evict(&a, 64), 1); /* the one that is not pinned, wherever it ranks */
    CHECK(!lc_list_empty(&a.h->lists, LCI_PARKED_LIST));
    CHECK_EQ(evict(&a, 64), 0);
    index_check(&s);
    for (uint32_t i = 0; i < 50; i++) CHECK_EQ(lci_release(b.h, &held[i].head), LC_OK);
    CHECK_EQ(evict(&a, 50), 50);
    CHECK_EQ(index_counts(&a).queued, 0);
    tear_down();
}

/* Calls of one hold of the lock each: how many, until this one is through. It does not begin anew. */
#define ONE_HOLD LC_BLOCK, 0
#define HOLDS(rc, call) \
    for (uint32_t held = 0; (rc = (call)) == LC_E_TIMEOUT; held++) CHECK(held < 100)

/* All is pinned: a call that comes back between looks at each page once, and gives less. */
static void a_call_that_comes_back_goes_on(void) {
    static lease held[10];
    int rc;
    set_up_ranked(5000);
    independent_prompts = true; /* all are queued */
    for (uint32_t i = 0; i < 10; i++) {
        prompt_fill(&a, &p, i, 500);
        memset(&held[i], 0, sizeof held[i]);
        CHECK_EQ(match(&b, &p, &held[i]), 500);
    }
    independent_prompts = false;
    prompt_make(&q, 99, 1);
    q.op = (lci_reserve_op){.shards = 1, .ns = NS};
    HOLDS(rc, lci_reserve(a.h, &q.op, q.keys, 1, 0, q.page, q.status, ONE_HOLD));
    CHECK_EQ(rc, 0);
    op = (lci_held_op){0};
    HOLDS(rc, lci_allocate(a.h, &op, pages, gens, 1, ONE_HOLD));
    CHECK_EQ(rc, LC_E_FULL);
    lci_oldest_op listing = {.want = 1};
    memset(&list, 0, sizeof list);
    HOLDS(rc, lci_oldest(a.h, &listing, &list.head, keys, parents, ONE_HOLD));
    CHECK_EQ(rc, 0);
    for (uint32_t i = 0; i < 10; i++) CHECK_EQ(lci_release(b.h, &held[i].head), LC_OK);
    tear_down();
}

/* What was parked comes back while others go: nothing has to run out for that. */
static void parked_pages_come_back(void) {
    set_up_ranked(200);
    prompt_fill(&a, &p, 0, 1);
    CHECK_EQ(match(&b, &p, &l), 1);
    for (uint32_t i = 1; i < 200; i++) prompt_fill(&a, &q, i, 1);
    for (uint32_t i = 0; i < 4; i++) CHECK_EQ(evict(&a, 40), 40);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(evict(&a, 20), 20); /* 19 are left besides */
    CHECK(lc_list_empty(&a.h->lists, LCI_PARKED_LIST));
    tear_down();
}

/* A page that this call's chain hangs on stays, though its child goes and its list ranks no higher. */
static void what_a_call_has_used_does_not_follow(void) {
    set_up_ranked(40);
    prompt_fill(&a, &p, 1, 40);
    prompt_make(&q, 1, 30);
    for (uint32_t i = 10; i < 30; i++) q.keys[i] = prompt_key(2, i);
    q.op = (lci_reserve_op){.shards = 1, .ns = NS};
    CHECK_EQ(lci_reserve(b.h, &q.op, q.keys, 40 - 10, 10, q.page, q.status, BLOCKING), 20);
    CHECK_EQ(peek(&a, &p), 20);
    CHECK_EQ(evict(&a, 40), 10); /* what the new pages hang on stays */
    CHECK_EQ(lci_unreserve(b.h, &q.op, q.page, q.status, 20), LC_OK);
    CHECK_EQ(lci_abandon(b.h, q.op.rid, q.op.gen, BLOCKING), LC_OK);
    tear_down();
}

/* The parent was hit by itself: what is as cheap as the leaf goes before it. */
static void a_parent_that_ranks_above_does_not_follow(void) {
    coarse_ages();
    prompt_fill(&a, &p, 1, 2);
    prompt_fill(&a, &q, 2, 1);
    collect(&a);
    p.n = 1;
    CHECK_EQ(match(&b, &p, &l), 1);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(oldest(&a, 2, 1), 2);
    CHECK(list.pages[0] == p.page[1] && list.pages[1] == q.page[0]);
    CHECK_EQ(lci_release(a.h, &list.head), LC_OK);
    CHECK_EQ(evict(&a, 2), 2);
    CHECK(peek(&b, &p) == 1 && peek(&b, &q) == 0);
    tear_down();
}

/* The call that makes room has used the parent: it stays, and so it is parked. */
static void a_parent_that_the_call_used_does_not_follow(void) {
    lc_txn t;
    uint32_t parked = 0;
    coarse_ages();
    prompt_fill(&a, &p, 1, 2);
    collect(&a);
    CHECK_EQ(lci_lock(a.h, &t, LCI_OP_EVICT, BLOCKING), LC_OK);
    lci_eviction e = {.since = lci_next_tick(a.h), .parked = &parked};
    uint64_t word = used_of((uint32_t)p.page[0]) & LCI_HITS_MASK;
    lc_store(&a.h->pages[p.page[0]].used, e.since << LCI_TICK_SHIFT | word);
    CHECK_EQ(lci_evict(a.h, &t, &e, 2), 1);
    CHECK(!lc_list_empty(&a.h->lists, LCI_PARKED_LIST));
    CHECK_EQ(lci_unlock(a.h, &t), LC_OK);
    CHECK_EQ(peek(&b, &p), 1);
    tear_down();
}

static void a_lookup_that_does_not_count_leaves_the_word_alone(void) {
    set_up_ranked(40);
    prompt_fill(&a, &p, 1, 2);
    uint64_t before = used_of((uint32_t)p.page[0]);
    l.head.capacity = LCI_UNCOUNTED;
    CHECK_EQ(lci_match1(b.h, p.keys, p.n, NS, &l.head), 2);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(used_of((uint32_t)p.page[0]), before);
    l.head.capacity = LCI_UNCOUNTED;
    CHECK_EQ(lci_match1(b.h, p.keys, p.n, NS, &l.head), 2);
    CHECK_EQ(lci_use(b.h, &l.head), LC_OK); /* it is taken */
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(lch_hits_of(used_of((uint32_t)p.page[0])), 1);
    CHECK(lch_gap_of(used_of((uint32_t)p.page[0])) > 0);
    tear_down();
}

/* What a client has matched it reserves with the rest of its prompt: that is one hit, and its only gap. */
static void a_match_and_then_a_reserve_are_one_hit(void) {
    set_up_ranked(40);
    lci_set_clock(a.h, UINT64_C(1) << 30);
    lci_set_clock(b.h, UINT64_C(1) << 40);
    prompt_fill(&a, &p, 1, 2);
    CHECK_EQ(match(&b, &p, &l), 2);
    uint64_t hit = used_of((uint32_t)p.page[0]);
    prompt_make(&q, 1, 3);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 1);
    uint64_t now = used_of((uint32_t)p.page[0]);
    CHECK_EQ(now & LCI_HITS_MASK, hit & LCI_HITS_MASK);
    CHECK_EQ(now >> LCI_TICK_SHIFT, q.op.tick);
    prompt_publish(&b, &q, 0);
    prompt_unpin(&b, &q);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    prompt_make(&q, 1, 4);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 1); /* nothing is pinned before: it is the hit */
    CHECK_EQ(lch_hits_of(used_of((uint32_t)p.page[0])), 2);
    prompt_publish(&b, &q, 0);
    prompt_unpin(&b, &q);
    tear_down();
}

/* A page that comes back has the history that it had when it went, and one hit more. */
static void pages_that_went_are_remembered(void) {
    set_up_ranked(40);
    prompt_fill(&a, &p, 1, 1);
    for (uint32_t i = 0; i < 3; i++) {
        CHECK_EQ(match(&b, &p, &l), 1);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    }
    CHECK_EQ(evict(&a, 1), 1);
    prompt_fill(&a, &p, 1, 1);
    CHECK_EQ(lch_hits_of(used_of((uint32_t)p.page[0])), 4);
    prompt_fill(&a, &q, 2, 1);
    CHECK_EQ(lch_hits_of(used_of((uint32_t)q.page[0])), 0);
    tear_down();
}

/* `discard` sees a use of a page whose hits are saturated. */
static void a_use_of_a_hot_page_is_seen(void) {
    set_up_ranked(40);
    for (uint32_t i = 0; i < 4; i++) prompt_fill(&a, &p, i, 1);
    prompt_make(&p, 2, 1);
    CHECK_EQ(match(&b, &p, &l), 1);
    uint32_t hot = (uint32_t)l.pages[0];
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    lc_store(&a.h->pages[hot].used, used_of(hot) | (uint64_t)LCH_HITS_MAX << LCH_HITS_SHIFT);
    CHECK_EQ(oldest(&a, 4, 0), 4);
    CHECK_EQ(match(&b, &p, &l), 1);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    const uint32_t *seen = (const uint32_t *)(list.pages + list.head.capacity);
    memcpy(hits, seen, 4 * sizeof *seen);
    CHECK_EQ(discard(&a), LC_OK);
    CHECK_EQ(giving.freed, 3);
    CHECK_EQ(peek(&b, &p), 1);
    tear_down();
}

/* A child that was used after its parent goes, and its parent with it: that is no use of the parent. */
static void giving_up_a_child_is_no_use_of_its_parent(void) {
    coarse_ages();
    prompt_fill(&a, &p, 1, 2);
    collect(&a);
    CHECK_EQ(lci_match1(b.h, &p.keys[1], 1, NS, &l.head), 1);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(oldest(&a, 2, 1), 2);
    CHECK_EQ(discard(&a), LC_OK);
    CHECK_EQ(giving.freed, 2);
    tear_down();
}

/* Pages that were told to go first do, however they rank; a use makes them ordinary. */
static void first_goes_first(void) {
    coarse_ages();
    some_uses(60, 100);
    prompt_make(&q, 5, 1);
    prompt_make(&p, 6, 1);
    for (uint32_t i = 0; i < 20; i++) {
        CHECK_EQ(match(&b, &p, &l), 1);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    }
    for (int i = 0; i < 2; i++) {
        walk = (lci_walk_op){0};
        prompt *which = i ? &q : &p;
        CHECK_EQ(lci_evict_first(a.h, which->keys, 1, NS, &walk, BLOCKING), LC_OK);
        CHECK_EQ(walk.pages, 1);
    }
    CHECK_EQ(match(&b, &q, &l), 1);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    index_check(&s);
    CHECK_EQ(evict(&a, 1), 1);
    CHECK_EQ(peek(&a, &p), 0);
    CHECK_EQ(peek(&a, &q), 1);
    tear_down();
}

/* In the order that knows nothing age alone counts: pages that have aged are found in their old lists. */
static void pages_age(void) {
    set_up_ranked(100);
    lc_store(&a.h->learnt.root->unit, 10);
    for (uint32_t i = 0; i < 30; i++) {
        lci_set_clock(a.h, (UINT64_C(1) + i) << 24);
        prompt_fill(&a, &p, i, 1);
    }
    lci_set_clock(a.h, UINT64_C(40) << 24);
    CHECK_EQ(evict(&a, 10), 10);
    for (uint32_t i = 0; i < 30; i++) {
        prompt_make(&p, i, 1);
        CHECK_EQ(peek(&b, &p), i >= 10);
    }
    index_check(&s);
    tear_down();
}

static void at_unit(uint64_t units) { lci_set_clock(a.h, units << 22); }

/* Of equal age, what was never hit goes first; so the younger page is found as soon as it is as old. */
static void a_page_is_found_when_it_is_due(void) {
    coarse_ages();
    lc_store(&a.h->learnt.root->unit, 10);
    lci_set_clock(b.h, UINT64_C(100) << 22);
    at_unit(99);
    prompt_fill(&a, &p, 1, 1);
    CHECK_EQ(match(&b, &p, &l), 1);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    at_unit(104);
    prompt_fill(&a, &q, 2, 1);
    collect(&a);
    for (uint64_t unit = 108; unit < 111; unit++) { /* it is moved first, then looked at */
        at_unit(unit);
        CHECK_EQ(oldest(&a, 1, 1), 1);
        CHECK_EQ(list.pages[0], p.page[0]); /* of 8 to 15 units; the other is of 4 to 7 */
        CHECK_EQ(lci_release(a.h, &list.head), LC_OK);
    }
    at_unit(113);
    CHECK_EQ(evict(&a, 1), 1);
    CHECK(peek(&b, &p) == 1 && peek(&b, &q) == 0);
    tear_down();
}

/* Damage: the first page of a list has a tick far ahead. What lies behind it ages all the same. */
static void a_list_ages_behind_a_page_that_is_ahead(void) {
    static const uint64_t distances[] = {UINT64_C(1) << 30, UINT64_C(1) << 43, UINT64_C(1) << 45,
                                         UINT64_C(1) << 47};
    for (uint32_t i = 0; i < sizeof distances / sizeof *distances; i++) {
        coarse_ages();
        lc_store(&a.h->learnt.root->unit, 10);
        lci_set_clock(b.h, UINT64_C(100) << 22);
        at_unit(99);
        prompt_fill(&a, &p, 1, 1);
        CHECK_EQ(match(&b, &p, &l), 1);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
        at_unit(104);
        prompt_fill(&a, &q, 2, 1);
        lci_page *ahead = &a.h->pages[q.page[0]];
        prompt_fill(&a, &q, 3, 1);
        collect(&a);
        uint64_t later = lc_load(&ahead->used) | UINT64_C(1) << LCH_GEN_SHIFT;
        lc_store(&ahead->used, later);
        lc_store(&a.h->pages[q.page[0]].used, later);
        CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK); /* both to the list of their word */
        lc_store(&ahead->used, later + (distances[i] << LCI_TICK_SHIFT));
        at_unit(113);
        CHECK_EQ(evict(&a, 1), 1); /* of 8 to 15 units, and never hit: before the one that was hit */
        CHECK(peek(&b, &p) == 1 && peek(&b, &q) == 0);
        CHECK_EQ(lc_load(&ahead->used) & LCI_HITS_MASK, later & LCI_HITS_MASK);
        CHECK_EQ(evict(&a, 2), 2);
        tear_down();
    }
}

/* A clock that wraps evicts on. */
static void a_clock_that_wraps(void) {
    set_up_ranked(64);
    lc_store(&a.h->root->clock, (UINT64_C(1) << 48) - 1000);
    for (uint32_t i = 0; i < 3000; i++) {
        prompt_fill(&a, &p, i, 1);
        if (i % 3) continue;
        CHECK_EQ(match(&b, &p, &l), 1);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    }
    CHECK(index_counts(&a).clock > UINT64_C(1) << 48);
    CHECK_EQ(evict(&a, 64), 64);
    tear_down();
}

/* Enough pages are named: the other table holds from then on, and the next call that evicts looks at all
 * lists again. */
static void an_order_is_learned(void) {
    set_up_ranked(64);
    uint32_t before = lc_load(&a.h->ranks->chosen), changes = 0;
    bool changed = false;
    for (uint32_t i = 0; i < 4000; i++) {
        prompt_fill(&a, &p, i, 1);
        if (changed) CHECK_EQ(a.h->due[LCH_LISTS - 2], 0); /* the unit may be another */
        a.h->due[LCH_LISTS - 2] = UINT64_MAX;
        uint32_t now = lc_load(&a.h->ranks->chosen);
        changed = now != before;
        changes += changed;
        before = now;
        CHECK(lci_ranks_sound(a.h));
    }
    CHECK(changes > 3);
    index_check(&s);
    tear_down();
}

static bool install(const uint16_t *lists) {
    lc_txn t;
    CHECK_EQ(lci_lock(a.h, &t, LCI_OP_EVICT, BLOCKING), LC_OK);
    bool done = lci_install_order(a.h, &t, lists);
    CHECK_EQ(lci_unlock(a.h, &t), LC_OK);
    index_check(&s);
    return done;
}

/* What went first goes last; and what names a list twice, or one that there is not, changes nothing. */
static void an_order_is_installed(void) {
    uint16_t lists[LCH_LISTS];
    coarse_ages();
    some_uses(300, 500);
    CHECK_EQ(oldest(&a, 1, 1), 1);
    uint32_t first = (uint32_t)list.pages[0], chosen = lc_load(&a.h->ranks->chosen);
    CHECK_EQ(lci_release(a.h, &list.head), LC_OK);
    uint32_t rank = lci_rank(a.h, used_of(first));
    for (uint32_t i = 0; i < LCH_LISTS; i++) lists[i] = lc_load(&order_of(&a)->list[LCH_LISTS - 1 - i]);
    lists[5]++;
    CHECK(!install(lists));
    lists[5] = LCH_LISTS;
    CHECK(!install(lists));
    CHECK_EQ(lc_load(&a.h->ranks->chosen), chosen);
    lists[5] = lc_load(&order_of(&a)->list[LCH_LISTS - 1 - 5]);
    CHECK(install(lists));
    CHECK_EQ(lc_load(&a.h->ranks->chosen), !chosen);
    CHECK_EQ(lci_rank(a.h, used_of(first)), LCH_LISTS + 1 - rank);
    uint32_t others = 0;
    for (uint32_t i = 0; i < 300; i++) others += lci_rank(a.h, used_of(i)) != LCH_LISTS + 1 - rank;
    CHECK(others > 0);
    CHECK_EQ(evict(&a, others), others);
    CHECK_EQ(lci_state_of(lc_load(&a.h->pages[first].word)), LCI_READY);
    tear_down();
}

/* Damage: a page that is its own parent comes back each time it is marked, and no call goes on for ever. */
static void a_page_that_is_its_own_parent(void) {
    set_up_ranked(40);
    prompt_fill(&a, &p, 1, 1);
    prompt_fill(&a, &q, 2, 1);
    collect(&a);
    lci_page *own = &a.h->pages[p.page[0]];
    lc_store(&own->parent, (uint32_t)p.page[0]);
    lc_store(&own->parent_gen, lc_load(&own->gen));
    CHECK_EQ(evict(&a, 2), 1);
    CHECK_EQ(peek(&b, &q), 0);
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
    tear_down();
}

/* Damage: a kept page is queued. It is not given away. */
static void a_queued_page_that_may_not_go(void) {
    uint32_t freed = 0;
    set_up_ranked(40);
    prompt_fill(&a, &p, 1, 1);
    collect(&a);
    _Atomic uint32_t *word = &a.h->pages[p.page[0]].word;
    break_word(word, lc_load(word) | LCI_KEPT);
    CHECK_EQ(lci_evict_pages(a.h, 1, &freed, BLOCKING), LC_E_CORRUPT);
    CHECK_EQ(lci_state_of(lc_load(word)), LCI_READY);
    mend_word();
    CHECK_EQ(evict(&a, 1), 1);
    tear_down();
}

/* As a death leaves it between the ghost and the end of its step: the page is there, and remembered. */
static void a_page_and_its_ghost(void) {
    set_up_ranked(40);
    prompt_fill(&a, &p, 1, 1);
    lch_evicted(&a.h->learnt, p.keys[0], used_of((uint32_t)p.page[0]), 1);
    CHECK_EQ(match(&b, &p, &l), 1);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(hits_of((uint32_t)p.page[0]), 1);
    index_check(&s);
    CHECK_EQ(evict(&a, 1), 1);
    prompt_fill(&a, &p, 1, 1);
    CHECK(hits_of((uint32_t)p.page[0]) >= 1); /* of two ghosts either */
    index_check(&s);
    tear_down();
}

/* A call that has done its work does not wait for long to install an order: the next one tries. */
static void learning_does_not_wait_for_the_lock(void) {
    lc_txn t;
    set_up_ranked(64);
    uint32_t before = lc_load(&a.h->ranks->chosen);
    lc_store(&a.h->learnt.root->named, 1000);
    CHECK_EQ(lci_lock(b.h, &t, LCI_OP_EVICT, BLOCKING), LC_OK);
    lci_learn_if_due(a.h, lci_next_tick(a.h), BLOCKING);
    CHECK_EQ(lci_unlock(b.h, &t), LC_OK);
    CHECK_EQ(lc_load(&a.h->ranks->chosen), before);
    lci_learn_if_due(a.h, lci_next_tick(a.h), BLOCKING);
    CHECK(lc_load(&a.h->ranks->chosen) != before);
    tear_down();
}

/* The unit of ages changes in another process: what this one knew of when lists are due is void. */
static void another_unit_is_noticed(void) {
    set_up_ranked(100);
    lc_store(&a.h->learnt.root->unit, 40);
    for (uint32_t i = 0; i < 30; i++) {
        lci_set_clock(a.h, (UINT64_C(1) + i) << 24);
        prompt_fill(&a, &p, i, 1);
    }
    lci_set_clock(a.h, UINT64_C(40) << 24);
    CHECK_EQ(evict(&a, 1), 1);
    uint32_t list = lci_ranked_list(a.h, used_of((uint32_t)p.page[0]));
    CHECK(!lc_list_empty(&a.h->lists, list));
    lc_store(&b.h->learnt.root->unit, 10);
    lc_store(&b.h->learnt.root->computed, lc_load(&b.h->learnt.root->computed) + 1);
    CHECK_EQ(evict(&a, 1), 1);
    CHECK(lc_list_empty(&a.h->lists, list));
    tear_down();
}

/* What was listed goes back to the head of its list, older than what is there. */
static void a_page_that_returns_makes_its_list_due(void) {
    coarse_ages();
    prompt_fill(&a, &p, 1, 1);
    uint32_t own = lci_ranked_list(a.h, used_of((uint32_t)p.page[0]));
    CHECK_EQ(oldest(&a, 1, 1), 1);
    CHECK_EQ(a.h->due[own], 0);
    CHECK_EQ(lci_release(a.h, &list.head), LC_OK);
    tear_down();
}

/* Whatever bytes are in the advice: the index is sound, and gives pages. */
static void advice_of_any_bytes(void) {
    uint32_t random = 3;
    set_up_ranked(64);
    const lci_geometry *g = &a.h->geometry;
    for (uint32_t round = 0; round < 20; round++) {
        uint32_t *word = (uint32_t *)(s.base + g->advice), *end = (uint32_t *)(s.base + g->end);
        for (; word < end; word++) *word = next_random(&random) << 8 ^ next_random(&random);
        for (uint32_t i = 0; i < 200; i++) {
            prompt_fill(&a, &p, 200 * round + i, 1 + i % 3);
            CHECK_EQ(match(&b, &p, &l), p.n);
            CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
        }
        index_check(&s);
    }
    tear_down();
}

static void a_damaged_order_is_found_and_mended(void) {
    set_up_ranked(64);
    for (uint32_t i = 0; i < 40; i++) prompt_fill(&a, &p, i, 1);
    lci_order *o = order_of(&a);
    for (uint32_t i = 0; i < 3; i++) {
        if (i == 0) lc_store(&o->list[3], lc_load(&o->list[4]));
        if (i == 1) lc_store(&o->rank[7], LCH_LISTS);
        if (i == 2) lc_store(&a.h->ranks->chosen, 2);
        CHECK_EQ(index_broken(&s), 69);
        CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
        index_check(&s);
    }
    for (uint32_t full = 0; full < 2; full++) { /* no list is said to have pages, or each */
        for (uint32_t w = 0; w < LCI_RANK_WORDS; w++) lc_store(&order_of(&a)->occupied[w], -full);
        CHECK_EQ(index_broken(&s), 13);
        CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
        index_check(&s);
    }
    CHECK_EQ(evict(&a, 64), 40);
    tear_down();
}

/* However many pages have aged, or cannot go: a step moves so many as to be short, and its log has room. */
static void a_step_is_bounded(void) {
    uint32_t parked = 0, most = 0, freed = 0, steps = 0;
    lc_txn t;
    set_up_ranked(3000);
    lc_store(&a.h->learnt.root->unit, 10);
    for (uint32_t i = 0; i < 3000; i++) {
        lci_set_clock(a.h, (UINT64_C(1) + i / 100) << 24);
        prompt_fill(&a, &p, i, 1);
        if (i % 2) CHECK_EQ(lci_pin_one(b.h, (uint32_t)p.page[0]), LC_OK);
    }
    collect(&a);
    lci_set_clock(a.h, UINT64_C(60) << 24);
    lci_eviction e = {.since = lci_next_tick(a.h), .parked = &parked};
    CHECK_EQ(lci_lock(a.h, &t, LCI_OP_EVICT, BLOCKING), LC_OK);
    for (; !e.exhausted; steps++) {
        freed += lci_evict(a.h, &t, &e, 32);
        CHECK_EQ(t.error, LC_OK);
        if (t.count > most) most = t.count;
        lci_step(&t);
    }
    CHECK_EQ(lci_unlock(a.h, &t), LC_OK);
    CHECK_EQ(freed, 1500);
    CHECK(most <= LCS_LOG_ENTRIES / 2);
    CHECK(steps <= 200);
    index_check(&s);
    tear_down();
}

const test ranked_tests[] = {
    TEST(oldest_is_what_goes),
    TEST(lists_go_by_rank),
    TEST(pinned_pages_are_parked),
    TEST(a_call_that_comes_back_goes_on),
    TEST(parked_pages_come_back),
    TEST(what_a_call_has_used_does_not_follow),
    TEST(a_parent_that_ranks_above_does_not_follow),
    TEST(a_parent_that_the_call_used_does_not_follow),
    TEST(a_lookup_that_does_not_count_leaves_the_word_alone),
    TEST(a_match_and_then_a_reserve_are_one_hit),
    TEST(pages_that_went_are_remembered),
    TEST(a_use_of_a_hot_page_is_seen),
    TEST(giving_up_a_child_is_no_use_of_its_parent),
    TEST(first_goes_first),
    TEST(pages_age),
    TEST(a_step_is_bounded),
    TEST(a_page_is_found_when_it_is_due),
    TEST(a_list_ages_behind_a_page_that_is_ahead),
    TEST(a_clock_that_wraps),
    TEST(an_order_is_learned),
    TEST(an_order_is_installed),
    TEST(a_page_that_is_its_own_parent),
    TEST(a_queued_page_that_may_not_go),
    TEST(a_page_and_its_ghost),
    TEST(learning_does_not_wait_for_the_lock),
    TEST(another_unit_is_noticed),
    TEST(a_page_that_returns_makes_its_list_due),
    TEST(advice_of_any_bytes),
    TEST(a_damaged_order_is_found_and_mended),
    END_OF_TESTS,
};
