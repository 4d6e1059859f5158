/* Taking the lock over: from whom, by whom, and what it keeps of that. */
#include "calls.h"
#include "pair.h"

#include <pthread.h>
#include <unistd.h>

static client dead;
static lcs_lock *lock;

static void prepare(void) {
    set_up(60);
    dead = client_join(&s);
    lock = lcs_lock_of(a.at);
}

static int take(client *c, lc_txn *t, uint64_t deadline) {
    return lci_lock(c->h, t, LCI_OP_CHECK, LC_BLOCK, deadline);
}

static void reap(uint32_t slot) {
    CHECK_EQ(lci_reap_slot(a.h, slot, BLOCKING), 1);
    CHECK_EQ(lc_load(&lcs_client_of(a.at, slot)->state), LCS_CLIENT_FREE);
}

static void *hold_and_end(void *c) {
    static lc_txn t;
    CHECK_EQ(take(c, &t, FOREVER), LC_OK);
    return NULL;
}

/* Its process lives on, and so do its bytes: only /proc tells. */
static void lock_of_an_ended_thread_is_taken_over(void) {
    pthread_t thread;
    lc_txn t;
    prepare();
    CHECK_EQ(pthread_create(&thread, NULL, hold_and_end, &dead), 0);
    CHECK_EQ(pthread_join(thread, NULL), 0);
    if (a.at->pidns) {
        uint32_t tid = (uint32_t)lc_load(&lock->holder);
        while (!lcs_thread_gone(a.at, 3, tid)) {
        } /* joined a little before the kernel lets go of it */
        CHECK_EQ(take(&a, &t, FOREVER), LC_OK);
        CHECK(t.taken_over);
        CHECK_EQ(lci_unlock(a.h, &t), LC_OK);
    }
    client_die(&dead);
    reap(3);
    tear_down();
}

static void lock_with_a_log_that_cannot_be_undone_is_refused(void) {
    lc_txn t;
    prepare();
    CHECK_EQ(take(&dead, &t, FOREVER), LC_OK);
    lc_txn_set(&t, &dead.h->root->event, 9);
    lc_store(&lock->log_count, LCS_LOG_ENTRIES + 1);
    client_die(&dead);
    CHECK_EQ(take(&a, &t, FOREVER), LC_E_CORRUPT);
    CHECK_EQ(lc_load(&lock->word), 0); /* let go of again */
    CHECK_EQ(lc_load(&lock->recoveries), 0);
    CHECK_EQ(take(&a, &t, FOREVER), LC_E_CORRUPT);
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
    reap(3);
    tear_down();
}

/* A forger's: the log of the last step, which was committed, is said to be in force, and the lock to be a
 * dead client's. */
static _Atomic uint64_t *entries(void) { return (_Atomic uint64_t *)(a.at->base + LCS_LOG_OFFSET); }

static void forget_the_log(void) {
    for (uint32_t i = 0; i < LCS_LOG_ENTRIES; i++) lc_store(&entries()[i], 0);
}

static void forge_a_death(void) {
    uint32_t count = 0;
    while (lc_load(&entries()[count])) count++;
    CHECK(count > 20);
    lc_store(&lock->log_count, count);
    lc_store(&lock->word, dead.slot | UINT32_C(9) << LCS_LOCK_EPOCH_SHIFT);
}

/* The step is undone, but the rows say what it gave away, and nobody gets that a second time. */
static void forged_death_hands_no_page_out_twice(void) {
    uint32_t refused;
    prepare();
    forget_the_log();
    CHECK_EQ(allocate(&a, 20), LC_OK);
    lci_held_op more = op;
    forge_a_death();
    CHECK_EQ(lci_allocate(a.h, &more, pages, gens, 40, BLOCKING), LC_E_CORRUPT);
    CHECK_EQ(more.done, 20);
    CHECK_EQ(index_counts(&a).held, 0);
    prompt_make(&p, 1, 30);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), LC_E_CORRUPT);
    CHECK_EQ(p.made, 0);
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
    CHECK_EQ(index_counts(&a).doomed, 20); /* ours as long as we pin them */
    CHECK_EQ(allocate(&b, 40), LC_OK);
    CHECK_EQ(allocate(&b, 1), LC_E_FULL);
    for (int32_t page = 0; page < 20; page++) CHECK_EQ(lci_unpin(a.h, &page, 1, &refused), LC_OK);
    CHECK_EQ(allocate(&b, 20), LC_OK);
    client_leave(&dead);
    tear_down();
}

static void forged_death_makes_no_page_new_twice(void) {
    prepare();
    prompt_make(&p, 1, 20);
    prompt_make(&q, 2, 30);
    forget_the_log();
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 20);
    forge_a_death();
    CHECK_EQ(prompt_reserve(&a, &q, NS, 1), LC_E_CORRUPT);
    CHECK_EQ(q.made, 0);
    CHECK_EQ(index_counts(&a).named, 0);
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
    CHECK_EQ(prompt_reserve(&a, &q, NS, 1), 30);
    prompt_unpin(&a, &p);
    client_leave(&dead);
    tear_down();
}

static void lock_keeps_its_figures(void) {
    lc_txn t;
    prepare();
    uint64_t begun = lcs_now_ns(), sum = lc_load(&lock->hold_ns);
    lc_store(&lock->hold_max_ns, 0);
    CHECK_EQ(take(&a, &t, FOREVER), LC_OK);
    CHECK(lc_load(&lock->since_ns) >= begun);
    while (lcs_now_ns() == lc_load(&lock->since_ns)) {
    }
    CHECK_EQ(lci_unlock(a.h, &t), LC_OK);
    uint64_t longest = lc_load(&lock->hold_max_ns);
    CHECK(longest > 0 && longest <= lcs_now_ns() - begun);
    CHECK_EQ(lc_load(&lock->hold_ns), sum + longest);
    lc_store(&lock->hold_max_ns, INT64_MAX);
    CHECK_EQ(take(&a, &t, FOREVER), LC_OK);
    CHECK_EQ(lci_unlock(a.h, &t), LC_OK);
    CHECK_EQ(lc_load(&lock->hold_max_ns), INT64_MAX);
    client_leave(&dead);
    tear_down();
}

static void *take_after_waiting(void *over) {
    lc_txn t;
    int rc;
    do rc = take(&b, &t, FOREVER);
    while (rc == LC_E_INTR);
    CHECK_EQ(rc, LC_OK);
    *(bool *)over = t.taken_over;
    CHECK_EQ(lci_unlock(b.h, &t), LC_OK);
    return NULL;
}

/* Whoever has slept for it and finds it free has not taken it from a dead one. */
static void lock_given_back_is_not_taken_over(void) {
    pthread_t waiter;
    lc_txn t;
    bool over = true;
    prepare();
    CHECK_EQ(take(&a, &t, FOREVER), LC_OK);
    CHECK_EQ(pthread_create(&waiter, NULL, take_after_waiting, &over), 0);
    while (!lcs_lock_wanted(a.at)) {
    }
    CHECK_EQ(lci_unlock(a.h, &t), LC_OK);
    CHECK_EQ(pthread_join(waiter, NULL), 0);
    CHECK(!over);
    CHECK_EQ(lc_load(&lock->recoveries), 0);
    client_leave(&dead);
    tear_down();
}

#ifdef LC_PAUSE_POINTS
static lc_txn of_b;

static void b_takes_over(void) {
    CHECK_EQ(take(&b, &of_b, FOREVER), LC_OK);
    CHECK(of_b.taken_over);
}

/* Two find the owner dead, and one is faster. */
static void lock_is_taken_over_by_one(void) {
    lc_txn t;
    prepare();
    CHECK_EQ(take(&dead, &t, FOREVER), LC_OK);
    client_die(&dead);
    play(LC_AT_OWNER_DEAD, b_takes_over);
    CHECK_EQ(take(&a, &t, 0), LC_E_TIMEOUT);
    check_played();
    CHECK_EQ(lci_unlock(b.h, &of_b), LC_OK);
    reap(3);
    tear_down();
}

static void its_byte_is_lost_and_b_takes_over(void) {
    close(dead.life);
    dead.life = -1;
    b_takes_over();
}

/* Taken for dead while it was about to give the lock back: that is another's now. */
static void lock_of_another_is_not_given_back(void) {
    lc_txn t;
    prepare();
    CHECK_EQ(take(&dead, &t, FOREVER), LC_OK);
    play(LC_AT_UNLOCK, its_byte_is_lost_and_b_takes_over);
    (void)lci_unlock(dead.h, &t);
    check_played();
    CHECK_EQ(lc_load(&lock->word) & LCS_LOCK_SLOT, b.slot);
    CHECK_EQ(take(&a, &t, 0), LC_E_TIMEOUT);
    CHECK_EQ(lci_unlock(b.h, &of_b), LC_OK);
    client_die(&dead);
    reap(3);
    tear_down();
}
#endif

const test taking_over_tests[] = {
    TEST(lock_of_an_ended_thread_is_taken_over),
    TEST(lock_with_a_log_that_cannot_be_undone_is_refused),
    TEST(forged_death_hands_no_page_out_twice),
    TEST(forged_death_makes_no_page_new_twice),
    TEST(lock_keeps_its_figures),
    TEST(lock_given_back_is_not_taken_over),
#ifdef LC_PAUSE_POINTS
    TEST(lock_is_taken_over_by_one),
    TEST(lock_of_another_is_not_given_back),
#endif
    END_OF_TESTS,
};
