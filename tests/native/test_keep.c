/* Keeping pages, letting branches go, listing the oldest and giving them up, minimums: what happens
 * in steps, what happens when somebody else is faster, and what damage comes to. */
#include "calls.h"
#include "pair.h"

static lease k;

static uint32_t keep(const prompt *of, int kept) {
    CHECK_EQ(keep_run(&a, of, kept), LC_OK);
    CHECK_EQ(walk.ended, 1);
    return kept ? walk.cursor : walk.pages;
}

static uint32_t drop(const prompt *of, uint32_t start) {
    CHECK_EQ(drop_run(&a, of, start), LC_OK);
    CHECK_EQ(walk.ended, 1);
    return walk.pages;
}

static uint32_t discarded(void) {
    CHECK_EQ(discard(&a), LC_OK);
    CHECK_EQ(list.head.held, 0);
    return giving.freed;
}

/* ------------------------------------------------------------------ in steps */

static void kept_pages_are_cleared_as_others(void) {
    set_up(100);
    prompt_fill(&a, &p, 1, 40);
    CHECK_EQ(keep(&p, 1), 40);
    CHECK_EQ(THROUGH(lci_clear(a.h, NS, BLOCKING)), LC_OK);
    CHECK_EQ(index_counts(&b).kept, 0);
    CHECK_EQ(index_counts(&b).named, 0);
    tear_down();
}

static void keep_and_drop_many(void) {
    set_up(600);
    prompt_fill(&a, &p, 1, 600);
    CHECK_EQ(keep(&p, 1), 600);
    CHECK_EQ(index_counts(&b).kept, 600);
    CHECK_EQ(drop(&p, 0), 0);
    CHECK_EQ(keep(&p, 0), 600);
    CHECK_EQ(keep(&p, 0), 0);
    CHECK_EQ(index_counts(&b).kept, 0);
    CHECK_EQ(drop(&p, 100), 500);
    index_check(&s);
    CHECK_EQ(peek(&b, &p), 100);
    tear_down();
}

/* A call goes on where an earlier one was interrupted, within its keys. */
static void what_is_interrupted_goes_on(void) {
    lci_walk_op op = {.cursor = 100};
    set_up(600);
    prompt_fill(&a, &p, 1, 400);
    CHECK_EQ(THROUGH(lci_keep(a.h, p.keys, 400, NS, 1, &op, BLOCKING)), LC_OK);
    CHECK_EQ(op.pages, 300);
    op = (lci_walk_op){.cursor = 401};
    CHECK_EQ(lci_keep(a.h, p.keys, 400, NS, 0, &op, BLOCKING), LC_E_RANGE);
    op = (lci_walk_op){.cursor = 2};
    CHECK_EQ(lci_drop(a.h, p.keys, 400, 399, NS, &op, BLOCKING), LC_E_RANGE);
    CHECK_EQ(lci_drop(a.h, p.keys, 400, 401, NS, &op, BLOCKING), LC_E_RANGE);
    tear_down();
}

static void oldest_lists_all_and_puts_them_back(void) {
    set_up_lru(600);
    for (uint32_t i = 0; i < 600; i++) prompt_fill(&a, &p, i, 1);
    CHECK_EQ(oldest(&a, 550, 1), 550);
    index_check(&s);
    for (uint32_t i = 0; i < 550; i++) {
        lc_key key = prompt_key(i, 0);
        CHECK(keys[i].lo == key.lo && keys[i].hi == key.hi);
        CHECK_EQ(parents[i], LC_NIL);
    }
    CHECK_EQ(lci_release(a.h, &list.head), LC_OK);
    for (uint32_t i = 0; i < 600; i += 50) { /* in the order in which they were */
        CHECK_EQ(evict(&b, 50), 50);
        prompt_make(&q, i + 49, 1);
        CHECK_EQ(peek(&b, &q), 0);
        prompt_make(&q, i + 50, 1);
        CHECK_EQ(peek(&b, &q), i + 50 < 600);
    }
    tear_down();
}

/* A second list has what the first has not, whoever asks. */
static void oldest_of_two_clients(void) {
    lci_oldest_op op = {.want = 30};
    set_up(64);
    for (uint32_t i = 0; i < 40; i++) prompt_fill(&a, &p, i, 1);
    CHECK_EQ(oldest(&a, 20, 1), 20);
    memset(&k, 0, sizeof k);
    CHECK_EQ(lci_oldest(b.h, &op, &k.head, keys, parents, BLOCKING), 20);
    for (uint32_t i = 0; i < 20; i++)
        for (uint32_t j = 0; j < 20; j++) CHECK(list.pages[i] != k.pages[j]);
    CHECK_EQ(discarded(), 20);
    CHECK_EQ(lci_release(b.h, &k.head), LC_OK);
    tear_down();
}

/* ------------------------------------------------------------------ going first */

static uint32_t first_in(lci_ns_ref ns, const prompt *of) {
    walk = (lci_walk_op){0};
    CHECK_EQ(THROUGH(lci_evict_first(a.h, of->keys, of->n, ns, &walk, BLOCKING)), LC_OK);
    CHECK_EQ(walk.ended, 1);
    return walk.pages;
}
static uint32_t first(const prompt *of) { return first_in(NS, of); }

static uint32_t ready_of(uint32_t number, uint32_t n) {
    prompt of;
    prompt_make(&of, number, n);
    return peek(&b, &of);
}

/* Before what is older, call by call; a prefix from its end. */
static void what_was_told_to_goes_first(void) {
    set_up(64);
    for (uint32_t i = 0; i < 4; i++) prompt_fill(&a, &p, i, 8);
    collect(&a);
    prompt_make(&p, 3, 8);
    CHECK_EQ(first(&p), 8);
    CHECK_EQ(first(&p), 0);
    prompt_make(&p, 2, 8);
    CHECK_EQ(first(&p), 8);
    index_check(&s);
    CHECK_EQ(evict(&b, 9), 9);
    CHECK(ready_of(3, 8) == 0 && ready_of(2, 8) == 7);
    CHECK_EQ(evict(&b, 8), 8);
    CHECK(ready_of(2, 8) == 0 && ready_of(0, 8) == 7 && ready_of(1, 8) == 8);
    tear_down();
}

/* Until it is used again; what was told so much later than it was queued goes first as well. */
static void what_is_used_again_goes_in_its_turn(void) {
    set_up(64);
    for (uint32_t i = 0; i < 3; i++) prompt_fill(&a, &p, i, 4);
    CHECK_EQ(evict(&b, 1), 1); /* the queue's present is not 0 any more */
    prompt_make(&p, 2, 4);
    CHECK_EQ(match(&b, &p, &l), 4);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(first(&p), 4);
    prompt_make(&q, 1, 4);
    CHECK_EQ(first(&q), 4);
    CHECK_EQ(match(&b, &p, &l), 4);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(evict(&b, 7), 7);
    CHECK(ready_of(0, 4) == 0 && ready_of(1, 4) == 0 && ready_of(2, 4) == 4);
    CHECK_EQ(hits_of((uint32_t)l.pages[0]), 2);
    tear_down();
}

/* In a chain whose pages go in any order, and in one whose first page has another child. */
static void parents_go_in_their_turn(void) {
    set_up_independent(64);
    prompt_fill(&a, &q, 2, 4);
    prompt_fill(&a, &p, 1, 4);
    prompt_make(&p, 1, 2);
    CHECK_EQ(first(&p), 2);
    CHECK_EQ(evict(&b, 2), 2);
    prompt_make(&p, 1, 4);
    CHECK_EQ(lci_peek1(b.h, p.keys + 2, 2, NS), 2);
    tear_down();
    set_up(64);
    prompt_fill(&a, &q, 2, 4);
    prompt_make(&p, 1, 4);
    p.keys[2] = prompt_key(9, 2);
    p.keys[3] = prompt_key(9, 3);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 4);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    prompt_make(&p, 1, 4);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 2);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    CHECK_EQ(first(&p), 4);
    CHECK_EQ(evict(&b, 2), 2);
    CHECK(ready_of(1, 4) == 2 && ready_of(2, 4) == 4);
    CHECK_EQ(evict(&b, 4), 4); /* the old prompt before the other branch of the two */
    CHECK(ready_of(1, 4) == 2 && ready_of(2, 4) == 0);
    CHECK_EQ(evict(&b, 4), 4);
    CHECK_EQ(index_counts(&b).named, 0);
    tear_down();
}

/* Not of what is pinned, kept, being written, in another namespace, or gone. */
static void only_what_may_go_goes_first(void) {
    lci_ns_ref other;
    set_up(64);
    CHECK_EQ(lci_namespace_open(a.h, "w", "t", 0, &other, BLOCKING), LC_OK);
    prompt_fill(&a, &q, 5, 2); /* the oldest */
    prompt_fill(&a, &p, 1, 4);
    CHECK_EQ(match(&b, &p, &l), 4);
    CHECK_EQ(first(&p), 0);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(keep(&p, 1), 4);
    CHECK_EQ(first(&p), 0);
    CHECK_EQ(keep(&p, 0), 4);
    CHECK_EQ(first_in(other, &p), 0);
    CHECK_EQ(evict(&b, 2), 2);
    CHECK_EQ(ready_of(5, 2), 0);
    prompt_make(&q, 2, 4);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 4);
    CHECK_EQ(first(&q), 0);
    prompt_publish(&b, &q, 0);
    CHECK_EQ(first(&q), 0); /* its writer still pins it */
    prompt_unpin(&b, &q);
    CHECK_EQ(first(&q), 4); /* it is in no list yet */
    index_check(&s);
    CHECK_EQ(evict(&b, 4), 4);
    CHECK(ready_of(1, 4) == 4 && ready_of(2, 4) == 0);
    prompt_make(&q, 7, 4);
    CHECK_EQ(first(&q), 0);
    CHECK_EQ(THROUGH(lci_clear(a.h, NS, BLOCKING)), LC_OK);
    CHECK_EQ(first(&p), 0);
    CHECK_EQ(walk.cursor, 0);
    tear_down();
}

/* Over several holds of the lock, each from where the last ended; all get the tick of the first. */
static void many_go_first_at_one_tick(void) {
    set_up(1000);
    prompt_fill(&a, &q, 9, 100);
    prompt_fill(&a, &p, 1, 600);
    collect(&a);
    CHECK_EQ(first(&p), 600);
    CHECK_EQ(walk.cursor, 600);
    for (uint32_t i = 0; i < 600; i++) CHECK_EQ(lci_tick(&a.h->pages[p.page[i]]), walk.tick);
    CHECK_EQ(evict(&b, 600), 600);
    CHECK_EQ(ready_of(9, 100), 100);
    prompt_fill(&a, &p, 1, 400);
    walk = (lci_walk_op){.cursor = 100, .tick = 0};
    CHECK_EQ(THROUGH(lci_evict_first(a.h, p.keys, 400, NS, &walk, BLOCKING)), LC_OK);
    CHECK_EQ(walk.pages, 300);
    CHECK_EQ(lci_tick(&a.h->pages[p.page[399]]), 0);
    walk = (lci_walk_op){.cursor = 401};
    CHECK_EQ(lci_evict_first(a.h, p.keys, 400, NS, &walk, BLOCKING), LC_E_RANGE);
    walk = (lci_walk_op){.cursor = 0};
    CHECK_EQ(THROUGH(lci_evict_first(a.h, p.keys, 0, NS, &walk, BLOCKING)), LC_OK);
    tear_down();
}

/* A minimum holds for what goes first as for all else; its own namespace takes that before the rest. */
static void a_minimum_holds_for_what_goes_first(void) {
    lci_ns_ref ns;
    lci_ns_limits wanted = {.minimum = 8};
    set_up(16);
    CHECK_EQ(lci_namespace_limits(a.h, "w", "t", &wanted, &ns, BLOCKING), LC_OK);
    for (uint32_t i = 1; i <= 2; i++) {
        prompt_make(&p, i, 4);
        CHECK_EQ(prompt_reserve(&a, &p, ns, 1), 4);
        prompt_publish(&a, &p, 0);
        prompt_unpin(&a, &p);
    }
    prompt_fill(&b, &q, 3, 8);
    collect(&b);
    CHECK_EQ(first_in(ns, &p), 4);
    prompt_make(&q, 4, 4);
    CHECK_EQ(prompt_reserve(&a, &q, ns, 1), 4);
    prompt_publish(&a, &q, 0);
    prompt_unpin(&a, &q);
    CHECK(lci_peek1(b.h, p.keys, 4, ns) == 0 && ready_of(3, 8) == 8);
    CHECK_EQ(first_in(ns, &q), 4);
    CHECK_EQ(evict(&b, 16), 8);
    CHECK(lci_peek1(b.h, q.keys, 4, ns) == 4 && ready_of(3, 8) == 0);
    tear_down();
}

/* ------------------------------------------------------------------ limits and damage */

/* What is kept stays so; only pages that are ready can be. */
static void kept_pages_are_counted_anew(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 3);
    CHECK_EQ(keep(&p, 1), 3);
    prompt_make(&q, 2, 2);
    CHECK_EQ(prompt_reserve(&a, &q, NS, 1), 2);
    _Atomic uint32_t *word = &a.h->pages[q.page[0]].word;
    lc_store(word, lc_load(word) | LCI_KEPT);
    lc_store(&a.h->root->kept, 77);
    CHECK(index_broken(&s));
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    index_check(&s);
    CHECK_EQ(index_counts(&a).kept, 3);
    CHECK_EQ(lc_load(word) & LCI_KEPT, 0);
    CHECK_EQ(evict(&b, 64), 0);
    prompt_unpin(&a, &q);
    tear_down();
}

/* A page whose count stands at its limit and whose bit is missing looks as if nobody pinned it. What
 * was listed before is the caller's to release. */
static void oldest_at_the_limit_of_pins(void) {
    set_up(64);
    prompt_fill(&a, &q, 1, 1);
    prompt_fill(&a, &p, 2, 3);
    collect(&a);
    lc_store(&a.h->mine[p.page[1]], UINT16_MAX);
    lc_store(&a.h->pages[p.page[1]].pins, 0);
    CHECK_EQ(oldest(&a, 4, 1), LC_E_PINS);
    CHECK_EQ(list.head.held, 2);
    CHECK_EQ(lci_release(a.h, &list.head), LC_OK);
    lc_store(&a.h->mine[p.page[1]], 0);
    CHECK_EQ(oldest(&a, 4, 1), 4);
    CHECK_EQ(discarded(), 4);
    tear_down();
}

static void damage_changes_nothing(void) {
    lci_walk_op op = {0};
    uint32_t bad = 7;
    lc_key key;
    set_up(64);
    prompt_fill(&a, &p, 1, 3);
    collect(&a);
    lci_page *leaf = &a.h->pages[p.page[2]];
    uint32_t old = lc_load(&leaf->queue.prev);
    lc_store(&leaf->queue.prev, 1000);
    CHECK_EQ(lci_keep(a.h, p.keys, 3, NS, 1, &op, BLOCKING), LC_E_CORRUPT);
    CHECK_EQ(op.pages + op.cursor, 0);
    CHECK_EQ(lci_drop(a.h, p.keys, 3, 0, NS, &op, BLOCKING), LC_E_CORRUPT);
    CHECK_EQ(oldest(&a, 3, 1), LC_E_CORRUPT);
    CHECK_EQ(lci_release(a.h, &list.head), LC_OK);
    uint64_t used = lc_load(&leaf->used);
    CHECK_EQ(lci_evict_first(a.h, p.keys, 3, NS, &op, BLOCKING), LC_E_CORRUPT);
    CHECK_EQ(op.pages + op.cursor, 0);
    CHECK_EQ(lc_load(&leaf->used), used);
    lc_store(&leaf->queue.prev, old);
    index_check(&s);
    CHECK_EQ(index_counts(&a).kept, 0);
    CHECK_EQ(match(&a, &p, &l), 3);
    lc_store(&leaf->gen, lc_load(&leaf->gen) + 1);
    CHECK_EQ(lci_keys_of(a.h, &l.pages[2], 1, &key, NULL, &bad), LC_E_STALE);
    lc_store(&leaf->gen, lc_load(&leaf->gen) - 1);
    CHECK_EQ(bad, 0);
    CHECK_EQ(lci_keys_of(a.h, &l.pages[2], 1, &key, NULL, &bad), LC_OK);
    CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
    tear_down();
}

static void keys_are_told_of_what_we_pin(void) {
    uint32_t bad = 7;
    lc_key told[3];
    set_up(64);
    prompt_fill(&a, &p, 1, 3);
    p.n = 2;
    CHECK_EQ(match(&b, &p, &l), 2);
    CHECK_EQ(lci_keys_of(b.h, p.page, 2, told, NULL, &bad), LC_OK);
    CHECK(told[1].lo == p.keys[1].lo && told[1].hi == p.keys[1].hi);
    CHECK_EQ(lci_keys_of(b.h, p.page, 3, told, NULL, &bad), LC_E_OWNER);
    CHECK_EQ(bad, 2);
    CHECK_EQ(lci_keys_of(b.h, (const int32_t[]){64}, 1, told, NULL, &bad), LC_E_RANGE);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    tear_down();
}

static void discard_takes_only_pins_that_are_there(void) {
    lci_discard_op op = {0};
    uint32_t order[2] = {0, 1};
    uint8_t done[2] = {0};
    set_up(64);
    prompt_fill(&a, &p, 1, 2);
    CHECK_EQ(match(&a, &p, &l), 2);
    k.head.held = 1;
    CHECK_EQ(lci_discard(a.h, &op, &k.head, l.pages, NULL, order, done, 2, BLOCKING), LC_E_TWICE);
    CHECK_EQ(lci_discard(b.h, &op, NULL, l.pages, NULL, order, done, 2, BLOCKING), LC_E_OWNER);
    CHECK_EQ(lci_discard_end(b.h, &op, l.pages, done, 2), LC_OK);
    CHECK_EQ(done[0] + done[1] + op.taken, 0);
    CHECK_EQ(pins_of(&a, (uint32_t)l.pages[0]), 1);
    CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
    tear_down();
}

/* Half of a branch: on each page hangs another, on the last one what is not among them. All pins are
 * given back all the same. */
static void discard_of_what_others_hang_on(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 10);
    p.n = 5;
    memset(&list, 0, sizeof list);
    CHECK_EQ(match(&a, &p, &list), 5);
    memset(list.pages + list.head.capacity, 0, 5 * sizeof(uint32_t));
    CHECK_EQ(discarded(), 0);
    for (uint32_t i = 0; i < 5; i++) CHECK_EQ(pins_of(&a, (uint32_t)list.pages[i]), 0);
    CHECK_EQ(evict(&b, 20), 10);
    tear_down();
}

/* ------------------------------------------------------------------ somebody is faster */

#ifdef LC_PAUSE_POINTS
/* Its tick stays, and its turn brings it to where that belongs. */
static void match_p(void) {
    CHECK_EQ(match(&b, &p, &l), 4);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
}
static void a_use_while_pages_are_told_to_go_first(void) {
    set_up(64);
    prompt_fill(&a, &q, 2, 4);
    prompt_fill(&a, &p, 1, 4);
    collect(&a);
    play(LC_AT_COMMIT, match_p);
    first(&p);
    check_played();
    index_check(&s);
    CHECK_EQ(evict(&b, 4), 4);
    CHECK(ready_of(1, 4) == 4 && ready_of(2, 4) == 0);
    tear_down();
}

/* The queue is in force before any tick is lowered: a death in between is put right by itself. */
static void ticks_stand(void) {
    for (uint32_t i = 0; i < 4; i++) CHECK(lci_tick(&a.h->pages[p.page[i]]) > 0);
}
static void ticks_are_lowered_after_the_commit(void) {
    set_up_independent(64);
    prompt_fill(&a, &p, 1, 4);
    collect(&a);
    play(LC_AT_COMMIT, ticks_stand);
    CHECK_EQ(first(&p), 4);
    check_played();
    for (uint32_t i = 0; i < 4; i++) CHECK_EQ(lci_tick(&a.h->pages[p.page[i]]), 0);
    tear_down();
}

static uint32_t middle;
static void pin_middle(void) { CHECK_EQ(lci_pin_one(b.h, middle), LC_OK); }

/* All of a branch is marked when its middle is pinned: what hangs on that goes, it stays, and so
 * does what it hangs on. */
static void a_pin_in_the_middle_of_what_is_dropped(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 10);
    middle = (uint32_t)p.page[5];
    collect(&a);
    play(LC_AT_EVICT_MARKED, pin_middle);
    CHECK_EQ(drop(&p, 0), 4);
    check_played();
    CHECK_EQ(peek(&b, &p), 6);
    index_check(&s);
    CHECK_EQ(lci_unpin_one(b.h, middle), LC_OK);
    CHECK_EQ(drop(&p, 0), 6);
    tear_down();
}

static void a_pin_in_the_middle_of_what_is_discarded(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 10);
    prompt_fill(&a, &q, 2, 5);
    middle = (uint32_t)p.page[5];
    CHECK_EQ(oldest(&a, 15, 1), 15);
    play(LC_AT_EVICT_FENCED, pin_middle);
    CHECK_EQ(discarded(), 4 + 5);
    check_played();
    CHECK_EQ(peek(&b, &p), 6);
    CHECK_EQ(lci_unpin_one(b.h, middle), LC_OK);
    tear_down();
}
#endif

/* ------------------------------------------------------------------ minimums */

static int limits(const char *tenant, uint32_t quota, uint32_t minimum, lci_ns_ref *ns) {
    lci_ns_limits wanted = {.quota = quota, .minimum = minimum};
    return lci_namespace_limits(a.h, "w", tenant, &wanted, ns, BLOCKING);
}

static void a_minimum_holds_within_a_step(void) {
    lci_ns_ref ns;
    set_up(64);
    CHECK_EQ(limits("t", 0, 10, &ns), LC_OK);
    prompt_make(&p, 1, 40); /* one branch: parents follow their children */
    CHECK_EQ(prompt_reserve(&a, &p, ns, 1), 40);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    CHECK_EQ(evict(&b, 32), 30);
    CHECK_EQ(lci_peek1(b.h, p.keys, 40, ns), 10);
    index_check(&s);
    prompt_make(&q, 2, 60); /* others have to do without */
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 54);
    CHECK_EQ(q.op.reason, LCI_WHY_PINNED);
    prompt_unpin(&b, &q);
    CHECK_EQ(lci_abandon(b.h, q.op.rid, q.op.gen, BLOCKING), LC_OK);
    tear_down();
}

static void minimums_of_all_namespaces_fit(void) {
    lci_ns_ref one, two;
    set_up(64);
    CHECK_EQ(limits("one", 0, 40, &one), LC_OK);
    CHECK_EQ(limits("two", 0, 25, &two), LC_E_RANGE);
    CHECK_EQ(limits("two", 20, 21, &two), LC_E_RANGE);
    CHECK_EQ(limits("two", 20, 20, &two), LC_OK);
    CHECK_EQ(limits("two", 19, UINT32_MAX, &two), LC_E_RANGE);
    CHECK_EQ(lc_load(&a.h->ns[lci_ns_id(two)].quota), 20);
    CHECK_EQ(THROUGH(lci_clear(a.h, one, BLOCKING)), LC_OK);
    CHECK_EQ(lc_load(&a.h->ns[lci_ns_id(one)].minimum), 0);
    CHECK_EQ(limits("two", 0, 64, &two), LC_OK);
    CHECK_EQ(lc_load(&a.h->ns[lci_ns_id(two)].minimum), 64);
    tear_down();
}

/* What a repair cannot believe, it forgets: a promise of more than there is, or to nobody. */
static void a_repair_believes_minimums_that_can_be(void) {
    lci_ns_ref good, large, gone;
    set_up(64);
    CHECK_EQ(limits("good", 0, 30, &good), LC_OK);
    CHECK_EQ(limits("large", 0, 5, &large), LC_OK);
    CHECK_EQ(limits("gone", 0, 6, &gone), LC_OK);
    CHECK_EQ(THROUGH(lci_clear(a.h, gone, BLOCKING)), LC_OK);
    lc_store(&a.h->ns[lci_ns_id(large)].minimum, 65);
    lc_store(&a.h->ns[lci_ns_id(gone)].minimum, 6);
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
    CHECK_EQ(lc_load(&a.h->ns[lci_ns_id(good)].minimum), 30);
    CHECK_EQ(lc_load(&a.h->ns[lci_ns_id(large)].minimum), 0);
    CHECK_EQ(lc_load(&a.h->ns[lci_ns_id(gone)].minimum), 0);
    tear_down();
}

/* ------------------------------------------------------------------ counting */

static bool evicted(client *c, uint32_t cause, uint32_t pages) {
    uint64_t found[LCI_CAUSES];
    CHECK_EQ(lci_take_evicted(c->h, found), LC_OK);
    for (uint32_t i = 0; i < LCI_CAUSES; i++)
        if (found[i] != (i == cause ? pages : 0)) return false;
    return true;
}

/* For whoever made them go, once, under the cause. */
static void evictions_are_counted_by_cause(void) {
    lci_ns_ref small;
    set_up(100);
    prompt_fill(&a, &p, 1, 60);
    prompt_fill(&b, &q, 2, 60);
    CHECK(evicted(&b, LCI_FOR_ROOM, 20));
    CHECK(evicted(&b, LCI_FOR_ROOM, 0)); /* taken before */
    CHECK_EQ(evict(&a, 10), 10);
    CHECK(evicted(&a, LCI_ASKED, 10));
    CHECK_EQ(drop(&q, 50), 10);
    CHECK(evicted(&a, LCI_DROPPED, 10));
    CHECK_EQ(oldest(&a, 5, 1), 5);
    CHECK_EQ(discarded(), 5);
    CHECK(evicted(&a, LCI_DISCARDED, 5));
    CHECK_EQ(lci_namespace_open(a.h, "w", "small", 4, &small, BLOCKING), LC_OK);
    for (uint32_t i = 0; i < 6; i++) {
        prompt_make(&p, 10 + i, 1);
        CHECK_EQ(prompt_reserve(&a, &p, small, 1), 1);
        prompt_publish(&a, &p, 0);
        prompt_unpin(&a, &p);
    }
    CHECK(evicted(&a, LCI_FOR_QUOTA, 2));
    prompt_make(&p, 20, 1); /* that is being written is not evicted, it never was ready */
    CHECK_EQ(prompt_reserve(&b, &p, small, 1), 1);
    CHECK(evicted(&b, LCI_FOR_QUOTA, 1));
    CHECK_EQ(THROUGH(lci_clear(a.h, small, BLOCKING)), LC_OK);
    CHECK(evicted(&a, LCI_CLEARED, 3));
    prompt_unpin(&b, &p);
    CHECK(evicted(&b, LCI_CLEARED, 0));
    tear_down();
}

static void room_in_a_chain_counts_as_room(void) {
    set_up(100);
    p.n = LC_CHAIN_MAX;
    for (uint32_t i = 0; i < LC_CHAIN_MAX; i++) p.keys[i] = crowded_key(3, i);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), LC_CHAIN_MAX);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    q.n = 1;
    q.keys[0] = crowded_key(3, LC_CHAIN_MAX);
    CHECK_EQ(prompt_reserve(&a, &q, NS, 1), 1);
    CHECK(evicted(&a, LCI_FOR_ROOM, 1));
    prompt_publish(&a, &q, 0);
    prompt_unpin(&a, &q);
    tear_down();
}

const test keep_tests[] = {
    TEST(kept_pages_are_cleared_as_others),
    TEST(keep_and_drop_many),
    TEST(what_is_interrupted_goes_on),
    TEST(oldest_lists_all_and_puts_them_back),
    TEST(oldest_of_two_clients),
    TEST(what_was_told_to_goes_first),
    TEST(what_is_used_again_goes_in_its_turn),
    TEST(parents_go_in_their_turn),
    TEST(only_what_may_go_goes_first),
    TEST(many_go_first_at_one_tick),
    TEST(a_minimum_holds_for_what_goes_first),
    TEST(kept_pages_are_counted_anew),
    TEST(oldest_at_the_limit_of_pins),
    TEST(damage_changes_nothing),
    TEST(keys_are_told_of_what_we_pin),
    TEST(discard_takes_only_pins_that_are_there),
    TEST(discard_of_what_others_hang_on),
#ifdef LC_PAUSE_POINTS
    TEST(a_use_while_pages_are_told_to_go_first),
    TEST(ticks_are_lowered_after_the_commit),
    TEST(a_pin_in_the_middle_of_what_is_dropped),
    TEST(a_pin_in_the_middle_of_what_is_discarded),
#endif
    TEST(a_minimum_holds_within_a_step),
    TEST(minimums_of_all_namespaces_fit),
    TEST(a_repair_believes_minimums_that_can_be),
    TEST(evictions_are_counted_by_cause),
    TEST(room_in_a_chain_counts_as_room),
    END_OF_TESTS,
};
