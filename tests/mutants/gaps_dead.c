/* Gaps in recovery and repair. */
#include "gaps.h"

#include "hooks.h"

#include <setjmp.h>

/* ------------------------------------------------------------------ the dead */

static void many_pages_of_the_dead_are_collected(void) {
    set_up(700);
    client other = client_join(&s);
    prompt_make(&p, 1, 600);
    CHECK_EQ(prompt_reserve(&other, &p, NS, 1), 600);
    die_as(&other);
    CHECK_EQ(lci_reap_slot(a.h, other.slot, BLOCKING), 1);
    CHECK_EQ(index_counts(&a).reservations, 0);
    CHECK_EQ(index_counts(&a).writing, 0);
    tear_down();
}

#define TAKERS 4

static pthread_barrier_t all_here;

static void *take_over(void *argument) {
    client *c = argument;
    lc_txn t;
    pthread_barrier_wait(&all_here);
    CHECK_EQ(lcs_lock_take(c->at, &t, 1, LC_BLOCK, FOREVER, c->h->log_begin, c->h->log_end), LC_OK);
    CHECK_EQ(lcs_lock_drop(c->at, &t, c->h->log_begin, c->h->log_end), LC_OK);
    return NULL;
}

/* They all find its owner dead at once, and one of them gets it. */
static void one_at_a_time_takes_over(void) {
    client takers[TAKERS];
    pthread_t threads[TAKERS];
    lc_txn t;
    set_up(20);
    CHECK_EQ(pthread_barrier_init(&all_here, NULL, TAKERS), 0);
    for (int i = 0; i < TAKERS; i++) takers[i] = client_join(&s);
    for (int round = 0; round < 200; round++) {
        client other = client_join(&s);
        CHECK_EQ(lci_lock(other.h, &t, LCI_OP_GROW, BLOCKING), LC_OK);
        die_as(&other);
        for (int i = 0; i < TAKERS; i++)
            CHECK_EQ(pthread_create(&threads[i], NULL, take_over, &takers[i]), 0);
        for (int i = 0; i < TAKERS; i++) CHECK_EQ(pthread_join(threads[i], NULL), 0);
        CHECK_EQ(lci_reap_slot(a.h, other.slot, BLOCKING), 1);
    }
    for (int i = 0; i < TAKERS; i++) client_leave(&takers[i]);
    pthread_barrier_destroy(&all_here);
    tear_down();
}

static void *take_and_end(void *argument) {
    client *c = argument;
    lc_txn t;
    CHECK_EQ(lci_lock(c->h, &t, LCI_OP_CLEAR, BLOCKING), LC_OK);
    lc_txn_set(&t, &c->h->root->res_used, 77);
    return NULL;
}

/* The thread that held the lock is gone, its process lives and holds its byte. */
static void lock_of_a_thread_that_is_gone_is_taken_over(void) {
    pthread_t thread;
    lc_txn t;
    set_up(20);
    if (!a.at->pidns) return tear_down(); /* /proc says nothing here */
    CHECK_EQ(pthread_create(&thread, NULL, take_and_end, &a), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    CHECK_EQ(lc_load(&lcs_lock_of(b.at)->operation), LCI_OP_CLEAR);
    uint64_t since = lc_load(&lcs_lock_of(b.at)->since_ns), now = lcs_now_ns();
    CHECK(since != 0 && since <= now);
    uint64_t end = now + UINT64_C(15000000000);
    int rc = LC_E_INTR;
    while (rc == LC_E_INTR) rc = lci_lock(b.h, &t, LCI_OP_GROW, LC_BLOCK, end);
    CHECK_EQ(rc, LC_OK);
    CHECK(t.taken_over);
    CHECK_EQ(lc_load(&b.h->root->res_used), 0);
    CHECK_EQ(lci_unlock(b.h, &t), LC_OK);
    CHECK_EQ(lc_load(&lcs_lock_of(b.at)->recoveries), 1);
    CHECK_EQ(lc_load(&lcs_lock_of(b.at)->undone_words), 1);
    tear_down();
}

static void take_from_a(void) {
    lcs_lock *lock = lcs_lock_of(b.at);
    uint64_t next = (lc_load(&lock->both) >> 32) + 1;
    lc_store(&lock->both, next << 32 | b.slot | b.at->epoch << LCS_LOCK_EPOCH_SHIFT);
}

/* Somebody held it for dead and took the lock just before it was to be given back. */
static void lock_that_is_anothers_is_not_let_go(void) {
    lc_txn t;
    set_up(20);
    lcs_lock *lock = lcs_lock_of(a.at);
    CHECK_EQ(lci_lock(a.h, &t, LCI_OP_GROW, BLOCKING), LC_OK);
    play(LC_AT_UNLOCK, take_from_a);
    CHECK_EQ(lci_unlock(a.h, &t), LC_OK);
    CHECK_EQ(lc_load(&lock->word) & LCS_LOCK_SLOT, b.slot);
    lc_store(&lock->word, 0);
    tear_down();
}

static jmp_buf dead_end;

static void die_at_cursor(const volatile void *word) {
    if (word != &a.h->ns[0].cursor || !lc_load(&lcs_lock_of(a.at)->log_count)) return;
    if (lc_load(&a.h->ns[0].cursor) == 0) return; /* just begun */
    after_store = NULL;
    longjmp(dead_end, 1);
}

/* Where it had come to is forgotten with the pages that it had forgotten. */
static void clear_whose_step_is_undone_leaves_no_page(void) {
    set_up(500);
    client other = client_join(&s);
    prompt_fill(&a, &p, 1, 450);
    CHECK_EQ(evict(&a, 1), 1); /* what was published is taken in */
    after_store = die_at_cursor;
    if (!setjmp(dead_end)) lci_clear(other.h, NS, BLOCKING);
    CHECK(!after_store);
    die_as(&other);
    CHECK_EQ(lci_reap_slot(a.h, other.slot, BLOCKING), 1);
    CHECK_EQ(index_counts(&a).named, 0);
    CHECK_EQ(index_counts(&a).namespaces_clearing, 0);
    tear_down();
}

/* ------------------------------------------------------------------ repair */

static void repair_flags_what_is_doomed(void) {
    lc_txn t;
    set_up(60);
    prompt_make(&p, 1, 10);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 10);
    CHECK_EQ(lci_lock(b.h, &t, LCI_OP_ABANDON, BLOCKING), LC_OK);
    CHECK(lci_doom_reservation(b.h, &t, p.op.rid, 0));
    lc_store(&b.h->root->completed[0], 0);
    CHECK_EQ(lci_unlock(b.h, &t), LC_OK);
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    prompt_unpin(&a, &p);
    CHECK_EQ(evict(&b, 60), 0);
    CHECK_EQ(index_counts(&b).reservations, 0);
    CHECK_EQ(index_counts(&b).free, 10);
    tear_down();
}

/* Copies that its device began may still be under way. */
static void repair_leaves_what_is_in_quarantine(void) {
    set_up(60);
    client other = client_join_as(&s, LCS_FLAG_DEVICE);
    prompt_make(&p, 1, 10);
    CHECK_EQ(prompt_reserve(&other, &p, NS, 1), 10);
    die_as(&other);
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
    CHECK_EQ(pins_of(&a, (uint32_t)p.page[0]), 1); /* not yet reaped */
    CHECK_EQ(lci_reap_slot(a.h, other.slot, BLOCKING), 1);
    lcs_client *slot = lcs_client_of(a.at, other.slot);
    CHECK_EQ(lc_load(&slot->state), LCS_CLIENT_QUARANTINE);
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
    for (int i = 0; i < 10; i++) CHECK_EQ(pins_of(&a, (uint32_t)p.page[i]), 1);
    lc_store(&slot->pidns, 0); /* nothing can be seen of it any more: its time decides */
    lc_store(&slot->quarantine_until_ns, 0);
    CHECK_EQ(lci_reap_slot(a.h, other.slot, BLOCKING), 1);
    CHECK_EQ(pins_of(&a, (uint32_t)p.page[0]), 0);
    tear_down();
}

static void repair_counts_records(void) {
    lci_ticket_ref ref;
    set_up(60);
    prompt_fill(&a, &p, 1, 10);
    CHECK_EQ(match(&a, &p, &l), 10);
    CHECK_EQ(lci_ticket_give(a.h, l.pages, 10, LC_NIL, 0, 2, FOREVER, &ref, BLOCKING), LC_OK);
    prompt_make(&q, 2, 10);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 10);
    lci_root *r = a.h->root;
    lc_store(&r->ticket_used, 0);
    lc_store(&r->res_used, 7);
    lc_store(&r->clearing, 3);
    CHECK(index_broken(&s));
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
    index_check(&s);
    CHECK_EQ(lc_load(&r->ticket_used), 1);
    CHECK_EQ(lc_load(&r->clearing), 0);
    prompt_publish(&b, &q, 0);
    prompt_unpin(&b, &q);
    CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
    tear_down();
}

static void repair_of_pages_used_in_the_future(void) {
    set_up(60);
    prompt_fill(&a, &p, 1, 20);
    for (int i = 0; i < 20; i++)
        lc_store(&a.h->pages[p.page[i]].used, (UINT64_C(1) << 40) << LCI_TICK_SHIFT);
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    CHECK_EQ(evict(&b, 60), 20);
    tear_down();
}

const test dead_gaps[] = {
    TEST(many_pages_of_the_dead_are_collected),
    TEST(lock_of_a_thread_that_is_gone_is_taken_over),
    TEST(lock_that_is_anothers_is_not_let_go),
    TEST(clear_whose_step_is_undone_leaves_no_page),
    TEST(one_at_a_time_takes_over),
    TEST(repair_flags_what_is_doomed),
    TEST(repair_leaves_what_is_in_quarantine),
    TEST(repair_counts_records),
    TEST(repair_of_pages_used_in_the_future),
    END_OF_TESTS,
};
