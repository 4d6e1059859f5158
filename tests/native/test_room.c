/* Making room: what goes, what stays, and what a call that fails half-way still holds. */
#include "calls.h"
#include "pair.h"

#define MOVES_MAX 4096 /* as in queue.c */

static prompt w;

static lci_page *page_of(const prompt *of, uint32_t i) { return &a.h->pages[of->page[i]]; }

static void fill_in(lci_ns_ref ns, prompt *run, uint32_t number, uint32_t n) {
    prompt_make(run, number, n);
    CHECK_EQ(prompt_reserve(&a, run, ns, 1), n);
    prompt_publish(&a, run, 0);
    prompt_unpin(&a, run);
}

static void give_up(client *c, prompt *run) {
    prompt_unpin(c, run);
    CHECK_EQ(lci_abandon(c->h, run->op.rid, run->op.gen, BLOCKING), LC_OK);
}

static lci_ns_ref small_namespace(uint32_t quota) {
    lci_ns_ref ns;
    CHECK_EQ(lci_namespace_open(a.h, "w", "small", quota, &ns, BLOCKING), LC_OK);
    return ns;
}

/* ------------------------------------------------------------------ reserving */

/* Its last keys are there, and are the oldest pages: the first batch must not evict them. */
static void room_is_not_made_of_what_is_asked_for(void) {
    set_up(40);
    prompt_make(&p, 1, 40);
    memmove(p.keys, p.keys + 32, 8 * sizeof *p.keys);
    p.n = 8;
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 8);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    prompt_fill(&a, &q, 2, 32);
    prompt_make(&p, 1, 40);
    CHECK_EQ(prompt_reserve(&b, &p, NS, 1), 32);
    for (uint32_t i = 0; i < 40; i++) CHECK_EQ(p.status[i], i < 32 ? LCI_NEW : LCI_PRESENT);
    CHECK_EQ(peek(&a, &q), 0);
    index_check(&s);
    give_up(&b, &p);
    tear_down();
}

static void room_that_ends_leaves_what_is_present_behind_it(void) {
    set_up(40);
    prompt_fill(&a, &p, 1, 40);
    CHECK_EQ(match(&b, &p, &l), 40);
    prompt_make(&q, 2, 4);
    memcpy(q.keys + 1, p.keys, 3 * sizeof *q.keys);
    CHECK_EQ(prompt_reserve(&a, &q, NS, 1), 0);
    for (uint32_t i = 0; i < 4; i++) CHECK_EQ(q.status[i], i ? LCI_PRESENT : LCI_NO_ROOM);
    CHECK_EQ(pins_of(&a, (uint32_t)p.page[0]), 2);
    prompt_unpin(&a, &q);
    CHECK_EQ(pins_of(&a, (uint32_t)p.page[0]), 1);
    tear_down();
}

/* A call that goes on where it was is the same call: what it has used or pinned counts as used by
 * it, and is not pinned once more. */
static void room_is_asked_for_again_by_the_same_call(void) {
    set_up_grown(20, 10);
    prompt_fill(&a, &p, 1, 5);
    prompt_make(&w, 1, 1);
    w.keys[0] = prompt_key(1, 14);
    CHECK_EQ(prompt_reserve(&a, &w, NS, 1), 1);
    prompt_publish(&a, &w, 0);
    prompt_unpin(&a, &w);
    prompt_make(&q, 1, 15); /* begins with what `p` is, ends with what `w` is */
    q.op = (lci_reserve_op){.shards = 1, .ns = NS};
    int rc = lci_reserve(a.h, &q.op, q.keys, 15, 5, q.page, q.status, BLOCKING);
    CHECK_EQ(rc, LC_E_GROW);
    CHECK_EQ(lci_grow(a.h, 20, BLOCKING), LC_OK);
    prompt_make(&w, 2, 8);
    CHECK_EQ(prompt_reserve(&b, &w, NS, 1), 8);
    rc = lci_reserve(a.h, &q.op, q.keys, 15, 5, q.page, q.status, BLOCKING);
    CHECK_EQ(rc, 6); /* all that is left: its own prefix does not make room for it */
    CHECK_EQ(peek(&b, &p), 5);
    CHECK_EQ(q.status[9], LCI_PRESENT);
    CHECK_EQ(pins_of(&a, (uint32_t)q.page[9]), 1);
    tear_down();
}

static void room_in_one_chain_costs_no_other(void) {
    set_up(100);
    prompt *full[] = {&p, &q};
    for (uint32_t k = 0; k < 2; k++) {
        prompt_make(full[k], 0, LC_CHAIN_MAX);
        for (uint32_t i = 0; i < LC_CHAIN_MAX; i++) full[k]->keys[i] = crowded_key(3 + k, i);
        CHECK_EQ(prompt_reserve(&a, full[k], NS, 1), LC_CHAIN_MAX);
        prompt_publish(&a, full[k], 0);
        prompt_unpin(&a, full[k]);
    }
    prompt_make(&w, 0, 2);
    w.keys[0] = crowded_key(4, 0); /* there */
    w.keys[1] = crowded_key(3, 99);
    CHECK_EQ(prompt_reserve(&a, &w, NS, 1), 1);
    CHECK_EQ(peek(&b, &p), LC_CHAIN_MAX - 1);
    CHECK_EQ(peek(&b, &q), LC_CHAIN_MAX);
    give_up(&a, &w);
    tear_down();
}

static void room_is_what_a_late_ticket_held(void) {
    lci_ticket_ref ref;
    set_up(10);
    prompt_fill(&a, &p, 1, 10);
    CHECK_EQ(match(&a, &p, &l), 10);
    CHECK_EQ(lci_ticket_give(a.h, l.pages, 10, LC_NIL, 0, UINT64_C(1) << b.slot, FOREVER, &ref,
                             BLOCKING), LC_OK);
    CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
    lc_store(&a.h->tickets[ref.index].deadline_ns, 0); /* time passes */
    prompt_make(&q, 2, 5);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 5);
    give_up(&b, &q);
    CHECK_EQ(lci_ticket_drop(a.h, &ref, BLOCKING), LC_OK);
    tear_down();
}

/* ------------------------------------------------------------------ what can be had, by the count */

static void doomed_pages_count_as_room_when_nobody_pins_them(void) {
    set_up(10);
    prompt_fill(&a, &p, 1, 10);
    CHECK_EQ(match(&b, &p, &l), 10);
    CHECK_EQ(THROUGH(lci_clear(a.h, NS, BLOCKING)), LC_OK);
    CHECK_EQ(index_counts(&a).doomed, 10);
    CHECK_EQ(index_counts(&a).idle, 0);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(index_counts(&a).idle, 10);
    tear_down();
}

static void give_to_b(uint32_t number, uint32_t n, lci_ticket_ref *ref) {
    prompt_fill(&a, &p, number, n);
    CHECK_EQ(match(&a, &p, &l), n);
    CHECK_EQ(lci_ticket_give(a.h, l.pages, n, LC_NIL, 0, UINT64_C(1) << b.slot, FOREVER, ref,
                             BLOCKING), LC_OK);
    CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
}

static void pages_of_a_ticket_count_as_room_when_it_is_late(void) {
    lci_ticket_ref waits, adopted;
    set_up(10);
    give_to_b(1, 6, &waits);
    give_to_b(2, 4, &adopted);
    CHECK_EQ(lci_adopt(b.h, &adopted, 0, &l.head.held, l.pages, 2 * MAX_KEYS, &(uint32_t){0},
                       &(uint32_t){0}, BLOCKING), 4);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    prompt_make(&p, 1, 6); /* now it is doomed, pinned by the ticket alone */
    CHECK_EQ(THROUGH(lci_clear(a.h, NS, BLOCKING)), LC_OK);
    CHECK_EQ(index_counts(&a).doomed, 6);
    CHECK_EQ(index_counts(&a).idle, 0);
    lc_store(&a.h->tickets[waits.index].deadline_ns, 1); /* time passes; the other has no pages */
    CHECK_EQ(index_counts(&a).idle, 6);
    CHECK_EQ(lci_ticket_drop(a.h, &waits, BLOCKING), LC_OK);
    CHECK_EQ(lci_ticket_drop(a.h, &adopted, BLOCKING), LC_OK);
    tear_down();
}

static void a_key_after_itself_does_not_hang_on_itself(void) {
    set_up(10);
    prompt_fill(&a, &p, 1, 1);
    prompt_make(&q, 1, 2);
    q.keys[1] = q.keys[0];
    CHECK_EQ(prompt_reserve(&a, &q, NS, 1), 0);
    CHECK_EQ(lci_parent(a.h, page_of(&p, 0)), LC_NIL);
    index_check(&s);
    prompt_unpin(&a, &q);
    tear_down();
}

static void a_page_used_again_forgets_who_pinned_it(void) {
    set_up(10);
    prompt_fill(&a, &p, 1, 1);
    CHECK_EQ(match(&b, &p, &l), 1);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(evict(&a, 1), 1);
    prompt_fill(&a, &q, 2, 1);
    CHECK_EQ(q.page[0], p.page[0]);
    CHECK_EQ(lc_load(&page_of(&q, 0)->pins), UINT64_C(1) << a.slot);
    tear_down();
}

/* What a free record says is dead. Its owner is whom a dump of the segment asks after. */
static void a_reservation_begins_empty(void) {
    set_up(10);
    lci_list *list = &a.h->res[0].pages;
    lc_store(&list->count, 3);
    lc_store(&list->first, 1);
    lc_store(&list->last, 1);
    index_check(&s);
    prompt_make(&p, 1, 1);
    CHECK_EQ(prompt_reserve(&b, &p, NS, 1), 1);
    CHECK_EQ(p.op.rid, 0);
    CHECK_EQ(lc_load(&list->count), 1);
    CHECK_EQ(lc_load(&a.h->res[0].owner), b.slot);
    CHECK_EQ(lc_load(&a.h->res[0].owner_epoch), b.at->epoch);
    index_check(&s);
    give_up(&b, &p);
    tear_down();
}

/* An old handle of a namespace pins nothing, and gets nothing, not even nothing. */
static void room_under_a_handle_that_is_over(void) {
    lci_ns_ref old = NS + (1 << 8);
    set_up(10);
    prompt_fill(&a, &p, 1, 3);
    CHECK_EQ(prompt_reserve(&a, &p, old, 1), LC_E_CLEARED);
    for (uint32_t i = 0; i < 3; i++) CHECK_EQ(pins_of(&a, (uint32_t)p.page[i]), 0);
    prompt_make(&q, 1, 0);
    CHECK_EQ(prompt_reserve(&a, &q, old, 1), LC_E_CLEARED);
    tear_down();
}

/* ------------------------------------------------------------------ memory */

static int reserve_in(prompt *run, uint32_t no_memory) {
    run->op = (lci_reserve_op){.shards = 1, .ns = NS, .no_memory = no_memory};
    return lci_reserve(a.h, &run->op, run->keys, run->n, 0, run->page, run->status, BLOCKING);
}

/* 10 of 20 pages have memory, and are ready. */
static void half_grown(void) {
    set_up_grown(20, 10);
    prompt_fill(&a, &p, 1, 10);
    prompt_make(&q, 2, 4);
    CHECK_EQ(reserve_in(&q, 0), LC_E_GROW);
    CHECK_EQ(q.op.wanted, 4);
    CHECK_EQ(peek(&b, &p), 10);
    CHECK_EQ(index_counts(&b).no_memory_ns, 0);
}

static void room_without_memory_is_made_by_evicting(void) {
    half_grown();
    CHECK_EQ(reserve_in(&q, 1), 4); /* its caller knows that there is none */
    give_up(&a, &q);
    prompt_make(&q, 3, 12);
    CHECK_EQ(reserve_in(&q, 1), 10);
    CHECK_EQ(q.op.reason, LCI_WHY_MEMORY);
    give_up(&a, &q);
    CHECK_EQ(lci_grow(a.h, 20, BLOCKING), LC_OK);
    prompt_fill(&a, &p, 1, 20);
    prompt_make(&q, 3, 24);
    CHECK_EQ(reserve_in(&q, 1), 20);
    CHECK_EQ(q.op.reason, LCI_WHY_PINNED);
    give_up(&a, &q);
    tear_down();
}

static void no_memory_is_known_to_all_for_a_time(void) {
    half_grown();
    CHECK_EQ(lci_no_memory(b.h, UINT64_C(30000000000)), LC_OK);
    uint64_t left = index_counts(&a).no_memory_ns;
    CHECK(left > 0 && left <= UINT64_C(30000000000));
    CHECK_EQ(reserve_in(&q, 0), 4);
    give_up(&a, &q);
    lc_store(&a.h->root->no_memory_ns, lcs_now_ns()); /* it is over */
    prompt_make(&q, 4, 8); /* 4 are free */
    CHECK_EQ(reserve_in(&q, 0), LC_E_GROW);
    CHECK_EQ(lci_no_memory(b.h, UINT64_MAX), LC_OK); /* never for ever */
    CHECK(index_counts(&a).no_memory_ns <= UINT64_C(60000000000));
    CHECK(index_counts(&a).no_memory_ns > UINT64_C(30000000000));
    lc_store(&a.h->root->no_memory_ns, UINT64_MAX); /* damage */
    CHECK_EQ(reserve_in(&q, 0), LC_E_GROW);
    CHECK_EQ(lci_no_memory(b.h, UINT64_C(30000000000)), LC_OK);
    CHECK_EQ(lci_no_memory(b.h, 0), LC_OK);
    CHECK_EQ(reserve_in(&q, 0), LC_E_GROW);
    CHECK_EQ(lci_no_memory(b.h, UINT64_C(30000000000)), LC_OK);
    CHECK_EQ(lci_grow(a.h, 5, BLOCKING), LC_OK); /* no more than there is: says nothing new */
    CHECK(index_counts(&a).no_memory_ns > 0);
    CHECK_EQ(lci_grow(a.h, 12, BLOCKING), LC_OK);
    CHECK_EQ(index_counts(&a).no_memory_ns, 0);
    CHECK_EQ(lc_load(&a.h->root->no_memory_ns), 0);
    CHECK_EQ(lci_no_memory(b.h, 1000), LC_OK);
    CHECK_EQ(lci_grow(a.h, 20, BLOCKING), LC_OK);
    client r = reader_join(&s);
    CHECK_EQ(lci_no_memory(r.h, 1), LC_E_READONLY);
    client_forget(&r);
    tear_down();
}

/* A prefix that this call continues stays, also when it tries again behind a death. */
static void room_is_made_again_behind_a_death(void) {
    for (uint32_t n = 10; n <= 35; n += 25) {
        set_up(40);
        client dead = client_join(&s);
        prompt_fill(&a, &p, 1, 5);
        prompt_fill(&a, &w, 9, 35);
        CHECK_EQ(match(&dead, &w, &l), 35);
        client_die(&dead);
        lc_store(&a.h->root->looking_ns, lcs_now_ns());
        prompt_make(&q, 1, 5 + n);
        q.op = (lci_reserve_op){.shards = 1, .ns = NS};
        CHECK_EQ(lci_reserve(b.h, &q.op, q.keys, 5 + n, 5, q.page, q.status, BLOCKING), n);
        q.n = n; /* it has no page for the first five */
        CHECK_EQ(peek(&b, &p), 5);
        CHECK_EQ(peek(&b, &w), 35 - n);
        give_up(&b, &q);
        tear_down();
    }
}

/* ------------------------------------------------------------------ quotas */

static void a_quota_does_not_take_the_prefix_of_what_it_is_for(void) {
    set_up(40);
    lci_ns_ref ns = small_namespace(10);
    fill_in(ns, &p, 1, 10);
    prompt_make(&q, 1, 12);
    q.op = (lci_reserve_op){.shards = 1, .ns = ns};
    CHECK_EQ(lci_reserve(a.h, &q.op, q.keys, 12, 10, q.page, q.status, BLOCKING), 0);
    CHECK_EQ(q.op.reason, LCI_WHY_QUOTA);
    CHECK_EQ(lci_peek1(b.h, p.keys, 10, ns), 10);
    tear_down();
}

/* More than one step can evict, in one hold of the lock. */
static void a_quota_that_was_lowered(void) {
    set_up(700);
    lci_ns_ref ns = small_namespace(0);
    fill_in(ns, &p, 1, 600);
    CHECK_EQ(small_namespace(10), ns);
    prompt_make(&q, 2, 1);
    CHECK_EQ(prompt_reserve(&b, &q, ns, 1), 1);
    CHECK_EQ(lc_load(&a.h->ns[lci_ns_id(ns)].pages), 10);
    give_up(&b, &q);
    tear_down();
}

/* Its pages lie behind those that one look passes. */
static void a_quota_looks_on_where_it_was(void) {
    set_up(4700);
    for (uint32_t i = 0; i < 7; i++) prompt_fill(&a, &p, 10 + i, 600);
    CHECK(7 * 600 > LCI_WINDOW);
    lci_ns_ref ns = small_namespace(8);
    fill_in(ns, &p, 1, 8);
    prompt_make(&q, 2, 8);
    CHECK_EQ(prompt_reserve(&b, &q, ns, 1), 8);
    give_up(&b, &q);
    tear_down();
}

/* ------------------------------------------------------------------ evicting */

/* Begin an eviction that has moved so many pages already, and let it take one. */
static void evict_one(uint32_t moved) {
    lc_txn t;
    CHECK_EQ(lci_lock(a.h, &t, LCI_OP_EVICT, BLOCKING), LC_OK);
    lci_eviction e = {.since = lci_next_tick(a.h), .moved = moved};
    CHECK_EQ(lci_evict(a.h, &t, &e, 1), 1);
    CHECK_EQ(lci_unlock(a.h, &t), LC_OK);
}

static void a_call_that_moved_enough_takes_what_is_next(void) {
    for (int enough = 0; enough < 2; enough++) {
        set_up_lru(40);
        prompt_fill(&a, &p, 1, 1);
        prompt_fill(&a, &q, 2, 1);
        collect(&a);
        CHECK_EQ(match(&b, &p, &l), 1); /* used since it was queued */
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
        evict_one(enough ? MOVES_MAX : 0);
        CHECK_EQ(peek(&b, &p), !enough);
        CHECK_EQ(peek(&b, &q), enough);
        tear_down();
    }
}

/* Two pages of a list above level 0: the one that was put right goes, not the one behind it. */
static void a_call_that_moved_enough_takes_what_was_put_right(void) {
    set_up_lru(40);
    lc_store(&a.h->root->clock, 3 * LCI_DIGITS + 4);
    prompt_fill(&a, &p, 1, 1);
    prompt_fill(&a, &q, 2, 1);
    collect(&a);
    evict_one(MOVES_MAX - 1);
    CHECK_EQ(peek(&b, &p), 0);
    CHECK_EQ(peek(&b, &q), 1);
    tear_down();
}

/* ------------------------------------------------------------------ doomed pages */

static lease longer;

/* A namespace that was cleared while b has a lease on `pinned` pages of it, and a on `doomed`: all doomed. The
 * pool has no room but for `other` ready pages of the namespace that is returned. */
static lci_ns_ref doomed_and_pinned(uint32_t doomed, uint32_t pinned, uint32_t other) {
    lci_ns_ref ns;
    set_up(doomed + other);
    prompt_fill(&a, &p, 1, doomed);
    CHECK_EQ(match(&a, &p, &l), doomed);
    p.n = pinned;
    CHECK_EQ(match(&b, &p, &longer), pinned);
    CHECK_EQ(THROUGH(lci_clear(a.h, NS, BLOCKING)), LC_OK);
    CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
    CHECK_EQ(index_counts(&a).doomed, doomed);
    CHECK_EQ(lci_namespace_open(a.h, "w", "other", 0, &ns, BLOCKING), LC_OK);
    if (other) fill_in(ns, &q, 2, other);
    return ns;
}

static uint32_t first_doomed(void) { return lc_load(&a.h->lists.heads[LCI_DOOMED_LIST].next); }

/* Each look at a doomed page costs: as many as are wanted, and not one store for those that stay. */
static void doomed_pages_that_stay_are_let_lie(void) {
    lci_ns_ref ns = doomed_and_pinned(300, 300, 40);
    uint32_t first = first_doomed(), hand = first;
    a.h->doomed_hand = LC_NIL;
    for (uint32_t calls = 1; calls <= 3; calls++) {
        prompt_make(&w, 2 + calls, 4);
        CHECK_EQ(prompt_reserve(&a, &w, ns, 1), 4);
        prompt_publish(&a, &w, 0);
        prompt_unpin(&a, &w);
        CHECK_EQ(first_doomed(), first);
        for (int looked = 0; looked < 4; looked++) hand = lc_load(&a.h->pages[hand].queue.next);
        CHECK_EQ(a.h->doomed_hand, hand);
    }
    CHECK_EQ(lci_release(b.h, &longer.head), LC_OK);
    prompt_make(&w, 9, 300); /* now they are room like any other */
    CHECK_EQ(prompt_reserve(&a, &w, ns, 1), 300);
    CHECK_EQ(index_counts(&a).doomed, 0);
    prompt_unpin(&a, &w);
    tear_down();
}

/* Nothing can be evicted, and the one page that can be freed is the last of the list. */
static void doomed_pages_are_all_looked_at_before_less_is_given(void) {
    lci_ns_ref ns = doomed_and_pinned(500, 499, 0);
    a.h->doomed_hand = LC_NIL;
    prompt_make(&w, 3, 1);
    CHECK_EQ(prompt_reserve(&a, &w, ns, 1), 1);
    CHECK_EQ(index_counts(&a).doomed, 499);
    prompt_unpin(&a, &w);
    prompt_make(&q, 4, 1);
    CHECK_EQ(prompt_reserve(&a, &q, ns, 1), 0);
    CHECK_EQ(q.op.reason, LCI_WHY_PINNED);
    prompt_unpin(&a, &q);
    CHECK_EQ(lci_release(b.h, &longer.head), LC_OK);
    tear_down();
}

#ifdef LC_PAUSE_POINTS
/* So long that the call comes back after each hold of the lock, to be called again. */
static void hold_long(int point) {
    uint64_t begun = lcs_now_ns();
    while (point == LC_AT_LOCKED && lcs_now_ns() - begun < UINT64_C(1100000)) {
    }
}

static void doomed_pages_are_looked_at_once_by_a_call_that_comes_back(void) {
    lci_ns_ref ns = doomed_and_pinned(500, 500, 0);
    int rc = LC_E_BUSY;
    lc_pause_hook = hold_long;
    op = (lci_held_op){.done = 0};
    for (int i = 0; i < 10 && rc == LC_E_BUSY; i++)
        rc = lci_allocate(a.h, &op, pages, gens, 1, LC_TRY, FOREVER);
    CHECK_EQ(rc, LC_E_FULL);
    prompt_make(&q, 4, 1);
    q.op = (lci_reserve_op){.shards = 1, .ns = ns};
    rc = LC_E_BUSY;
    for (int i = 0; i < 10 && rc == LC_E_BUSY; i++)
        rc = lci_reserve(a.h, &q.op, q.keys, 1, 0, q.page, q.status, LC_TRY, FOREVER);
    lc_pause_hook = NULL;
    CHECK_EQ(rc, 0);
    CHECK_EQ(q.op.reason, LCI_WHY_PINNED);
    CHECK_EQ(lci_release(b.h, &longer.head), LC_OK);
    tear_down();
}
#endif

const test room_tests[] = {
#ifdef LC_PAUSE_POINTS
    TEST(doomed_pages_are_looked_at_once_by_a_call_that_comes_back),
#endif
    TEST(doomed_pages_that_stay_are_let_lie),
    TEST(doomed_pages_are_all_looked_at_before_less_is_given),
    TEST(room_is_not_made_of_what_is_asked_for),
    TEST(room_that_ends_leaves_what_is_present_behind_it),
    TEST(room_is_asked_for_again_by_the_same_call),
    TEST(room_in_one_chain_costs_no_other),
    TEST(room_is_what_a_late_ticket_held),
    TEST(doomed_pages_count_as_room_when_nobody_pins_them),
    TEST(pages_of_a_ticket_count_as_room_when_it_is_late),
    TEST(a_key_after_itself_does_not_hang_on_itself),
    TEST(a_page_used_again_forgets_who_pinned_it),
    TEST(a_reservation_begins_empty),
    TEST(room_under_a_handle_that_is_over),
    TEST(room_without_memory_is_made_by_evicting),
    TEST(no_memory_is_known_to_all_for_a_time),
    TEST(room_is_made_again_behind_a_death),
    TEST(a_quota_does_not_take_the_prefix_of_what_it_is_for),
    TEST(a_quota_that_was_lowered),
    TEST(a_quota_looks_on_where_it_was),
    TEST(a_call_that_moved_enough_takes_what_is_next),
    TEST(a_call_that_moved_enough_takes_what_was_put_right),
    END_OF_TESTS,
};
