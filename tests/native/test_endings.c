/* How reservations and namespaces end: in pieces, some of them later, some by others. */
#include "world.h"

#include <setjmp.h>

static segment s;
static client a, b, c;
static prompt p, q, r;

static void set_up(uint64_t pages) {
    s = index_make(pages);
    a = client_join(&s);
    b = client_join(&s);
    c = client_join(&s);
}

static void tear_down(void) {
    client_leave(&a);
    client_leave(&b);
    client_leave(&c);
    index_check(&s);
    segment_end(&s);
}

static void doom(client *who, uint32_t rid) {
    lc_txn t;
    CHECK_EQ(lci_lock(who->h, &t, LCI_OP_ABANDON, BLOCKING), LC_OK);
    CHECK(lci_doom_reservation(who->h, &t, rid, 0));
    CHECK_EQ(lci_unlock(who->h, &t), LC_OK);
}

/* ------------------------------------------------------------------ reservations */

/* Every other key is there already: each of the new pages hangs on a page that joins the queue when
 * the new one goes. That is more than one step has room for. */
static void doomed_pages_go_in_pieces(void) {
    static prompt one;
    set_up(700);
    prompt_make(&p, 1, 600);
    for (uint32_t i = 0; i < 600; i += 2) {
        prompt_make(&one, 1, 1);
        one.keys[0] = p.keys[i];
        CHECK_EQ(prompt_reserve(&a, &one, NS, 1), 1);
        prompt_publish(&a, &one, 0);
        prompt_unpin(&a, &one);
    }
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 300);
    CHECK_EQ(lci_abandon(a.h, p.op.rid, p.op.gen, BLOCKING), LC_OK);
    index_check(&s);
    CHECK_EQ(index_counts(&a).doomed, 300);
    prompt_unpin(&a, &p);
    CHECK_EQ(evict(&b, 700), 300);
    tear_down();
}

/* Of more pages than one hold of the lock works off: what is left is not forgotten. */
static void doomed_reservation_ends_in_several_holds(void) {
    set_up(700);
    prompt_make(&p, 1, 600);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 600);
    doom(&b, p.op.rid);
    prompt_unpin(&a, &p);
    collect(&b);
    CHECK_EQ(index_counts(&a).reservations, 0);
    CHECK_EQ(index_counts(&a).writing, 0);
    index_check(&s);
    tear_down();
}

static void doomed_pages_are_not_published_ones(void) {
    set_up(100);
    prompt_make(&p, 1, 10);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 10);
    doom(&b, p.op.rid);
    CHECK_EQ(index_counts(&a).writing, 10);
    collect(&b);
    CHECK_EQ(index_counts(&a).writing, 0);
    CHECK_EQ(index_counts(&a).doomed, 10);
    prompt_unpin(&a, &p);
    tear_down();
}

/* Published, forgotten with their namespace, freed, and used again, all before anybody came to
 * collect their reservation: there was another, of many pages, before it. */
static void published_pages_that_are_anothers_are_left(void) {
    lci_ns_ref other;
    set_up(330);
    CHECK_EQ(lci_namespace_open(a.h, "w", "t", 0, &other, BLOCKING), LC_OK);
    prompt_make(&p, 1, 300);
    prompt_make(&q, 2, 20);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 300);
    CHECK_EQ(prompt_reserve(&a, &q, other, 1), 20);
    prompt_publish(&a, &p, 0);
    prompt_publish(&a, &q, 0);
    prompt_unpin(&a, &p);
    prompt_unpin(&a, &q);
    CHECK_EQ(THROUGH(lci_clear(b.h, other, BLOCKING)), LC_OK);
    prompt_make(&r, 3, 20);
    CHECK_EQ(prompt_reserve(&b, &r, NS, 1), 20);
    uint32_t again = 0;
    for (uint32_t i = 0; i < 20; i++)
        for (uint32_t k = 0; k < 20; k++) again += r.page[i] == q.page[k];
    CHECK_EQ(again, 20);
    CHECK_EQ(index_counts(&a).reservations, 2); /* the second is there still */
    collect(&a);
    CHECK_EQ(index_counts(&a).reservations, 1);
    CHECK_EQ(peek(&a, &r), 0);
    index_check(&s);
    prompt_publish(&b, &r, 0);
    CHECK_EQ(peek(&a, &r), 20);
    prompt_unpin(&b, &r);
    tear_down();
}

static void bit_of_what_goes_on_is_taken_back(void) {
    set_up(60);
    prompt_make(&p, 1, 10);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 10);
    lci_flag_ended(b.h, p.op.rid);
    collect(&b);
    CHECK_EQ(lc_load(&a.h->root->completed[0]), 0);
    CHECK_EQ(index_counts(&a).reservations, 1);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    tear_down();
}

#ifdef LC_PAUSE_POINTS
static void publish_now(void) {
    prompt_publish(&a, &p, 0);
}

/* The publisher says so between the look at its shards and the clearing of its bit. */
static void bit_of_what_ended_just_now_stays(void) {
    set_up(60);
    prompt_make(&p, 1, 10);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 10);
    lci_flag_ended(b.h, p.op.rid);
    play(LC_AT_NOT_ENDED, publish_now);
    collect(&b);
    check_played();
    index_check(&s);
    collect(&b);
    CHECK_EQ(index_counts(&a).reservations, 0);
    prompt_unpin(&a, &p);
    tear_down();
}

static void publish_at_lock(void) {
    prompt_publish(&a, &p, 0);
}

/* A call that is rolled back has collected what others had published, and that stays done. */
static void collected_by_a_call_that_fails(void) {
    set_up(60);
    prompt_make(&p, 1, 10);
    prompt_make(&q, 1, 10);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 10);
    _Atomic uint16_t *count = lci_pin(b.h, b.slot, (uint32_t)p.page[5]);
    lc_store(count, UINT16_MAX);
    play(LC_AT_LOCKED, publish_at_lock);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), LC_E_PINS);
    check_played();
    lc_store(count, 0);
    CHECK_EQ(index_counts(&a).reservations, 0);
    CHECK_EQ(lc_load(&a.h->root->completed[0]), 0);
    prompt_unpin(&a, &p);
    prompt_unpin(&b, &q);
    tear_down();
}

static jmp_buf death;
static uint32_t found;

static void look_and_die(void) {
    found = peek(&a, &p);
    longjmp(death, 1);
}

/* Its publisher has died, and so does who finishes for it: what a lookup found is found again. */
static void pages_once_found_stay(void) {
    lc_txn t;
    set_up(200);
    client publisher = client_join(&s), collector = client_join(&s);
    prompt_make(&p, 1, 70);
    CHECK_EQ(prompt_reserve(&publisher, &p, NS, 1), 70);
    _Atomic uint32_t *shard = &a.h->res[p.op.rid].shard[0];
    lc_store(shard, lc_load(shard) | LCI_SHARD_DONE);
    lci_flag_ended(a.h, p.op.rid);
    client_die(&publisher);
    CHECK_EQ(lci_lock(collector.h, &t, LCI_OP_COLLECT, BLOCKING), LC_OK);
    play(LC_AT_COMMIT, look_and_die);
    if (setjmp(death) == 0) lci_collect(collector.h, &t, 256);
    check_played();
    CHECK(found > 0 && found < 70);
    client_die(&collector);
    CHECK_EQ(lci_lock(b.h, &t, LCI_OP_CHECK, BLOCKING), LC_OK);
    CHECK(t.taken_over);
    CHECK_EQ(peek(&a, &p), found);
    CHECK_EQ(lci_unlock(b.h, &t), LC_OK);
    CHECK_EQ(lci_reap_slot(a.h, 4, BLOCKING), 1);
    CHECK_EQ(lci_reap_slot(a.h, 5, BLOCKING), 1);
    CHECK_EQ(peek(&a, &p), 70);
    tear_down();
}

static int told;

static void publish_and_die(void) {
    told = lci_publish(b.h, p.op.rid, p.op.gen, 1, p.fresh, p.made);
    longjmp(death, 1);
}

/* Told that the reservation has ended, by a step that is undone: who is told abandons, and it ends. */
static void publisher_that_was_told_of_an_undone_end_abandons(void) {
    set_up(60);
    client giver = client_join(&s);
    prompt_make(&p, 1, 10);
    CHECK_EQ(prompt_reserve(&giver, &p, NS, 2), 10);
    prompt_publish(&giver, &p, 0);
    _Atomic uint32_t *shard = &a.h->res[p.op.rid].shard[1]; /* adopted by b */
    lc_store(shard, (lc_load(shard) & ~LCI_SHARD_SLOT) | b.slot);
    play(LC_AT_COMMIT, publish_and_die);
    if (setjmp(death) == 0) (void)lci_abandon(giver.h, p.op.rid, p.op.gen, BLOCKING);
    check_played();
    CHECK_EQ(told, LC_E_STALE);
    uint32_t slot = giver.slot;
    client_die(&giver);
    CHECK_EQ(lci_reap_slot(a.h, slot, BLOCKING), 1);
    CHECK_EQ(lc_load(shard) & LCI_SHARD_STATUS, LCI_SHARD_PENDING); /* undone: b's again */
    CHECK_EQ(index_counts(&a).reservations, 1);
    CHECK_EQ(lci_abandon(b.h, p.op.rid, p.op.gen, BLOCKING), LC_OK);
    CHECK_EQ(index_counts(&a).reservations, 0);
    CHECK_EQ(lci_wait(a.h, p.keys, 10, 0), LC_OK); /* no key is busy */
    tear_down();
}
#endif

static void doomed_page_that_is_none_is_damage(void) {
    uint32_t freed = 0;
    set_up(60);
    prompt_make(&p, 1, 10);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 10);
    CHECK_EQ(lci_abandon(a.h, p.op.rid, p.op.gen, BLOCKING), LC_OK);
    prompt_unpin(&a, &p);
    _Atomic uint32_t *word = &a.h->pages[p.page[0]].word;
    uint32_t doomed = lc_load(word);
    lc_store(word, LCI_READY);
    CHECK_EQ(lci_evict_pages(b.h, 1, &freed, BLOCKING), LC_E_CORRUPT);
    lc_store(word, doomed);
    CHECK_EQ(evict(&b, 1), 0);
    CHECK_EQ(index_counts(&a).free, 10);
    tear_down();
}

/* ------------------------------------------------------------------ namespaces */

/* Pages in twos, the second of which stands before the first: each goes out of the queue, and lets
 * its parent in. That is more than one step has room for. */
static void clear_goes_in_pieces(void) {
    set_up(300);
    for (uint32_t i = 0; i < 300; i++) prompt_fill(&a, &p, i, 1);
    CHECK_EQ(evict(&a, 300), 300);
    for (uint32_t i = 0; i < 150; i++) prompt_fill(&a, &p, 1000 + i, 2);
    CHECK(p.page[1] < p.page[0]);
    collect(&a);
    CHECK_EQ(THROUGH(lci_clear(b.h, NS, BLOCKING)), LC_OK);
    CHECK_EQ(index_counts(&a).named, 0);
    CHECK_EQ(index_counts(&a).free + index_counts(&a).doomed, 300);
    tear_down();
}

static void clear_begins_at_the_first_page_each_time(void) {
    lci_ns_ref ns = NS;
    set_up(60);
    for (int i = 0; i < 3; i++) {
        prompt_make(&p, 1, 20);
        CHECK_EQ(prompt_reserve(&a, &p, ns, 1), 20);
        prompt_publish(&a, &p, 0);
        prompt_unpin(&a, &p);
        CHECK_EQ(THROUGH(lci_clear(b.h, ns, BLOCKING)), LC_OK);
        CHECK_EQ(index_counts(&a).named, 0);
        index_check(&s);
        CHECK_EQ(lci_namespace_open(a.h, "", "", 0, &ns, BLOCKING), LC_OK);
        CHECK_EQ(lci_ns_id(ns), 0);
    }
    tear_down();
}

static void clear_that_nobody_counts_is_damage(void) {
    set_up(60);
    lc_store(&a.h->ns[0].state, LCI_NS_CLEARING);
    CHECK_EQ(lci_clear(a.h, NS, BLOCKING), LC_E_CORRUPT);
    lc_store(&a.h->ns[0].state, LCI_NS_NORMAL);
    tear_down();
}

const test ending_tests[] = {
    TEST(doomed_pages_go_in_pieces),
    TEST(doomed_reservation_ends_in_several_holds),
    TEST(doomed_pages_are_not_published_ones),
    TEST(published_pages_that_are_anothers_are_left),
    TEST(bit_of_what_goes_on_is_taken_back),
    TEST(doomed_page_that_is_none_is_damage),
    TEST(clear_goes_in_pieces),
    TEST(clear_begins_at_the_first_page_each_time),
    TEST(clear_that_nobody_counts_is_damage),
#ifdef LC_PAUSE_POINTS
    TEST(bit_of_what_ended_just_now_stays),
    TEST(collected_by_a_call_that_fails),
    TEST(pages_once_found_stay),
    TEST(publisher_that_was_told_of_an_undone_end_abandons),
#endif
    END_OF_TESTS,
};
