/* What the dead leave and who may take it: slots, rows, records. Told apart here: what is another's
 * by now, and what nobody may have yet. */
#include "pair.h"

#include <unistd.h>

static client dead;
static lcs_lock *lock;

static void prepare_as(uint32_t flags) {
    set_up(200);
    dead = client_join_as(&s, flags);
    lock = lcs_lock_of(a.at);
}

static void prepare(void) { prepare_as(0); }

static int take(client *c, lc_txn *t, uint64_t deadline) {
    return lci_lock(c->h, t, LCI_OP_CHECK, LC_BLOCK, deadline);
}

static void reap(uint32_t slot) {
    CHECK_EQ(lci_reap_slot(a.h, slot, BLOCKING), 1);
    CHECK_EQ(lc_load(&lcs_client_of(a.at, slot)->state), LCS_CLIENT_FREE);
}

/* ------------------------------------------------------------------ slots */

static void slot_tells_nothing_of_its_former_client(void) {
    prepare();
    lcs_client *record = lcs_client_of(a.at, 3);
    _Atomic uint64_t *counters[] = {&record->lookups,        &record->hit_pages,
                                    &record->missed_pages,   &record->reserved_pages,
                                    &record->evicted_pages,  &record->published_pages};
    for (int i = 0; i < 6; i++) lc_store(counters[i], 7);
    lc_store(&record->quarantine_until_ns, 7);
    client_leave(&dead);
    dead = client_join(&s);
    CHECK_EQ(dead.slot, 3);
    for (int i = 0; i < 6; i++) CHECK_EQ(lc_load(counters[i]), 0);
    CHECK_EQ(lc_load(&record->quarantine_until_ns), 0);
    client_leave(&dead);
    tear_down();
}

static void slot_that_somebody_mends_is_nobody_elses(void) {
    prepare();
    client_die(&dead);
    CHECK_EQ(lcs_slot_mend(a.at, 3), LC_OK);
    CHECK_EQ(lcs_slot_mend(b.at, 3), LC_E_BUSY);
    CHECK_EQ(lci_reap_slot(b.h, 3, BLOCKING), 0);
    CHECK_EQ(lcs_slot_free_dead(b.at, 3), LC_E_BUSY);
    lcs_slot_mended(a.at, 3);
    CHECK_EQ(lcs_slot_free_dead(b.at, 3), LC_OK);
    CHECK_EQ(lcs_byte_held(a.life, LCS_BYTE_MEND + 3, 1), 0); /* let go of */
    dead = client_join(&s);
    CHECK_EQ(dead.slot, 3);
    client_leave(&dead);
    CHECK_EQ(lcs_slot_mend(a.at, 3), LC_OK);
    dead = client_join(&s); /* passes it over */
    CHECK_EQ(dead.slot, 4);
    lcs_slot_mended(a.at, 3);
    client_leave(&dead);
    tear_down();
}

#ifdef LC_PAUSE_POINTS
static void b_reaps(void) { CHECK_EQ(lci_reap_slot(b.h, 3, BLOCKING), 1); }

static void b_reaps_and_another_joins(void) {
    b_reaps();
    dead = client_join(&s);
    CHECK_EQ(dead.slot, 3);
}

/* Seen dead, and before its slot could be mended another lives there. */
static void slot_that_was_taken_again_is_left(void) {
    prepare();
    client_die(&dead);
    play(LC_AT_DEAD_SEEN, b_reaps_and_another_joins);
    CHECK_EQ(lcs_slot_free_dead(a.at, 3), LC_E_BUSY);
    check_played();
    CHECK_EQ(lcs_attachment_usable(dead.at), LC_OK);
    CHECK_EQ(lcs_byte_held(b.life, LCS_BYTE_MEND + 3, 1), 0);
    client_die(&dead);
    play(LC_AT_DEAD_SEEN, b_reaps_and_another_joins);
    CHECK_EQ(lci_reap_slot(a.h, 3, BLOCKING), 0);
    check_played();
    CHECK_EQ(lcs_attachment_usable(dead.at), LC_OK);
    client_leave(&dead);
    tear_down();
}

static void slot_that_was_freed_meanwhile_is_not_freed_again(void) {
    prepare();
    client_die(&dead);
    play(LC_AT_DEAD_SEEN, b_reaps);
    CHECK_EQ(lci_reap_slot(a.h, 3, BLOCKING), 0); /* nothing of it was ours to take back */
    check_played();
    tear_down();
}
#endif

static void nothing_is_begun_while_leaving(void) {
    uint32_t freed = 0;
    prepare();
    prompt_fill(&a, &q, 9, 5);
    prompt_make(&p, 1, 10);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 10);
    CHECK_EQ(lci_hold(b.h, BLOCKING), LC_OK);
    CHECK_EQ(lci_leave(dead.h, LC_TRY, 0), LC_E_BUSY);
    CHECK_EQ(lci_let_go(b.h), LC_OK);
    CHECK_EQ(lcs_attachment_usable(dead.at), LC_E_CLOSED);
    CHECK_EQ(lci_publish(dead.h, p.op.rid, p.op.gen, 0, p.fresh, 10), LC_E_CLOSED);
    CHECK_EQ(lci_evict_pages(dead.h, 5, &freed, BLOCKING), LC_E_CLOSED);
    CHECK_EQ(lci_reap_slot(dead.h, 9, BLOCKING), LC_E_CLOSED);
    client_leave(&dead);
    CHECK_EQ(peek(&a, &p), 0);
    tear_down();
}

/* ------------------------------------------------------------------ without a slot */

static client stranger;

static void stranger_comes(void) {
    stranger = (client){.life = life_descriptor(&s)};
    stranger.at = lcs_attachment_new(s.base, s.bytes, stranger.life, 0, 0, 0);
    stranger.h = lci_open(stranger.at, s.pages);
}

static void guest_leaves_no_trace(void) {
    lc_txn t;
    prepare();
    client_die(&dead);
    stranger_comes();
    CHECK_EQ(lci_reap_unjoined(stranger.h, 3, BLOCKING), 1);
    CHECK_EQ(lcs_attachment_slot(stranger.at), 0);
    CHECK_EQ(lcs_attachment_epoch(stranger.at), 0);
    CHECK_EQ(lcs_byte_held(b.life, LCS_BYTE_MEND + 3, 1), 0);
    CHECK_EQ(lcs_byte_held(b.life, LCS_BYTE_SLOTS + 3, 1), 0);
    CHECK_EQ(lcs_slot_claim(stranger.at, "stranger", 0), 3);
    CHECK_EQ(take(&stranger, &t, FOREVER), LC_OK);
    CHECK(lc_load(&lock->holder) & UINT32_MAX); /* by its own thread, which can be seen to end */
    CHECK_EQ(lci_unlock(stranger.h, &t), LC_OK);
    CHECK_EQ(lcs_slot_release(stranger.at), LC_OK);
    client_forget(&stranger);
    tear_down();
}

#ifdef LC_PAUSE_POINTS
static void guest_holds_the_lock(void) {
    lc_txn t;
    CHECK_EQ(lcs_slot_alive(b.at, 3), 1);
    CHECK_EQ(take(&b, &t, 0), LC_E_TIMEOUT);
}

/* The record names a process that still is, with a number that is none of its threads': so it is
 * for a moment with one that was killed. */
static void guest_is_not_taken_for_the_dead(void) {
    prepare();
    lcs_client *record = lcs_client_of(a.at, 3);
    lc_store(&record->pid, (uint32_t)getppid());
    lc_store(&record->start_ticks, lcs_start_ticks((uint32_t)getppid()));
    client_die(&dead);
    stranger_comes();
    play(LC_AT_LOCKED, guest_holds_the_lock);
    CHECK_EQ(lci_reap_unjoined(stranger.h, 3, BLOCKING), 1);
    check_played();
    client_forget(&stranger);
    tear_down();
}
#endif

/* ------------------------------------------------------------------ rows and records */

/* All shards of its own are written, and others' are not: a copy into these pages may still be
 * under way, for all that anybody knows. */
static void quarantine_of_pages_that_others_write(void) {
    lci_ticket_ref ref;
    uint32_t rid, gen;
    prepare_as(LCS_FLAG_DEVICE);
    lcs_client *record = lcs_client_of(a.at, 3);
    prompt_make(&p, 1, 30);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 2), 30);
    CHECK_EQ(lci_ticket_give(dead.h, p.fresh, 30, p.op.rid, p.op.gen, 1u << b.slot, FOREVER, &ref,
                             BLOCKING), LC_OK);
    CHECK_EQ(lci_adopt(b.h, &ref, 1, &l.head.held, l.pages, 30, &rid, &gen, BLOCKING), 30);
    prompt_publish(&dead, &p, 0);
    client_die(&dead);
    CHECK_EQ(lci_reap_slot(a.h, 3, BLOCKING), 1);
    CHECK_EQ(lc_load(&record->state), LCS_CLIENT_QUARANTINE);
    CHECK_EQ(lc_load(lci_pin(a.h, 3, (uint32_t)p.page[29])), 1);
    CHECK_EQ(lci_publish(b.h, rid, gen, 1, l.pages, 30), 1);
    lc_store(&record->pidns, 0); /* from here on only time tells */
    lc_store(&record->quarantine_until_ns, 1);
    reap(3);
    CHECK_EQ(lc_load(lci_pin(a.h, 3, (uint32_t)p.page[29])), 0);
    tear_down();
}

static void quarantine_is_not_for_what_others_write(void) {
    prepare_as(LCS_FLAG_DEVICE);
    prompt_make(&p, 1, 30);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 30);
    client_die(&dead);
    reap(3);
    prompt_publish(&a, &p, 0);
    CHECK_EQ(peek(&b, &p), 30);
    prompt_unpin(&a, &p);
    tear_down();
}

static void reservation_of_the_living_keeps_its_owner(void) {
    lci_ticket_ref ref;
    uint32_t rid, gen;
    prepare();
    prompt_make(&p, 1, 30);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 2), 30);
    CHECK_EQ(lc_load(&a.h->res[p.op.rid].owner_epoch), lcs_attachment_epoch(a.at));
    CHECK_EQ(lci_ticket_give(a.h, p.fresh, 30, p.op.rid, p.op.gen, 1u << b.slot, FOREVER, &ref,
                             BLOCKING), LC_OK);
    CHECK_EQ(lc_load(&a.h->tickets[ref.index].giver_epoch), lcs_attachment_epoch(a.at));
    client_die(&dead);
    reap(3);
    CHECK_EQ(lc_load(&a.h->res[p.op.rid].owner), a.slot);
    CHECK_EQ(lci_adopt(b.h, &ref, 1, &l.head.held, l.pages, 30, &rid, &gen, BLOCKING), 30);
    prompt_unpin(&a, &p);
    tear_down();
}

/* The dead client had adopted a shard of it. It passes to the dead one, whose next reaper goes on with it. */
static void reservation_of_the_living_ends_in_portions(void) {
    lci_ticket_ref ref;
    uint32_t rid, gen;
    int64_t left = 1;
    prepare();
    prompt_make(&p, 1, 100);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 2), 100);
    CHECK_EQ(lci_ticket_give(a.h, p.fresh, 100, p.op.rid, p.op.gen, 1u << dead.slot, FOREVER, &ref,
                             BLOCKING), LC_OK);
    CHECK_EQ(lci_adopt(dead.h, &ref, 1, &l.head.held, l.pages, 100, &rid, &gen, BLOCKING), 100);
    client_die(&dead);
    CHECK_EQ(lci_reap_some(b.h, 3, BLOCKING, &left), 1);
    CHECK_EQ(lc_load(&lcs_client_of(a.at, 3)->state), LCS_CLIENT_TAKEN);
    CHECK_EQ(index_counts(&a).writing, 38); /* a chunk's pages have been unlinked */
    index_check(&s);
    reap(3);
    CHECK_EQ(index_counts(&a).writing, 0);
    CHECK_EQ(index_counts(&a).reservations, 0);
    prompt_unpin(&a, &p);
    tear_down();
}

/* No death leaves it so; whoever reaps says it all the same. */
static void reaping_says_what_was_doomed(void) {
    lc_txn t;
    prepare();
    prompt_make(&p, 1, 30);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 30);
    CHECK_EQ(take(&dead, &t, FOREVER), LC_OK);
    CHECK(lci_doom_reservation(dead.h, &t, p.op.rid, 0));
    CHECK_EQ(lci_unlock(dead.h, &t), LC_OK);
    lc_store(&a.h->root->completed[0], 0);
    client_die(&dead);
    reap(3);
    CHECK_EQ(index_counts(&a).reservations, 0);
    tear_down();
}

/* What a record holds that nobody has is dead, whatever it says. */
static void free_records_may_hold_anything(void) {
    lci_ticket_ref ref;
    prepare();
    prompt_fill(&a, &q, 1, 100);
    collect(&a);
    CHECK_EQ(match(&a, &q, &l), 100);
    CHECK_EQ(lci_ticket_give(a.h, l.pages, 100, LC_NIL, 0, 1u << b.slot, 1, &ref, BLOCKING), LC_OK);
    CHECK_EQ(lci_ticket_drop(a.h, &ref, BLOCKING), LC_OK);
    lci_reservation *r = &a.h->res[0];
    lci_ticket *k = &a.h->tickets[0];
    CHECK_EQ(lc_load(&r->state) | lc_load(&k->state), 0);
    _Atomic uint32_t *fields[] = {&r->owner,       &r->owner_epoch, &r->shards,
                                  &r->ns,          &r->pages.count, &r->pages.first,
                                  &r->pages.last,  &k->giver,       &k->giver_epoch,
                                  &k->pages.count, &k->pages.first, &k->pages.last,
                                  &k->total,       &k->reservation};
    for (uint32_t i = 0; i < sizeof fields / sizeof *fields; i++) lc_store(fields[i], 1);
    index_check(&s);
    prompt_make(&p, 2, 70);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 70);
    CHECK_EQ(p.op.rid, 0);
    CHECK_EQ(lci_ticket_give(a.h, l.pages, 100, LC_NIL, 0, 1u << b.slot, 1, &ref, BLOCKING), LC_OK);
    CHECK_EQ(ref.index, 0);
    index_check(&s);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    CHECK_EQ(lci_ticket_drop(a.h, &ref, BLOCKING), LC_OK);
    CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
    CHECK_EQ(evict(&b, 200), 170);
    CHECK_EQ(index_counts(&a).chunks, 0);
    client_leave(&dead);
    tear_down();
}

const test taking_back_tests[] = {
    TEST(slot_tells_nothing_of_its_former_client),
    TEST(slot_that_somebody_mends_is_nobody_elses),
    TEST(nothing_is_begun_while_leaving),
    TEST(guest_leaves_no_trace),
    TEST(quarantine_of_pages_that_others_write),
    TEST(quarantine_is_not_for_what_others_write),
    TEST(reservation_of_the_living_keeps_its_owner),
    TEST(reservation_of_the_living_ends_in_portions),
    TEST(reaping_says_what_was_doomed),
    TEST(free_records_may_hold_anything),
#ifdef LC_PAUSE_POINTS
    TEST(slot_that_was_taken_again_is_left),
    TEST(slot_that_was_freed_meanwhile_is_not_freed_again),
    TEST(guest_is_not_taken_for_the_dead),
#endif
    END_OF_TESTS,
};
