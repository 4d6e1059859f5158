/* Who looks for dead clients: calls that evict, in turn, and calls that would give less. */
#include "calls.h"
#include "pair.h"

#include <unistd.h>

#define LESS_OFTEN UINT64_C(2000000000) /* than calls that evict look */

static client dead;
static prompt w;

static uint32_t state(uint32_t slot) { return lc_load(&lcs_client_of(a.at, slot)->state); }
static uint32_t reaped(void) { return lc_load(&a.h->root->reaped); }

/* Nobody's turn to look for a while, as far as time goes; and somebody's, whoever evicts. */
static void looked_just_now(void) { lc_store(&a.h->root->looking_ns, lcs_now_ns()); }
static void not_looked_for_long(void) {
    lc_store(&a.h->root->looking_ns, lcs_now_ns() - LESS_OFTEN);
}

static void prepare(uint64_t pages, uint32_t flags) {
    set_up(pages);
    dead = client_join_as(&s, flags);
    CHECK_EQ(dead.slot, 3);
}

static void end(prompt *run, client *c) {
    prompt_unpin(c, run);
    if (run->op.gen) CHECK_EQ(lci_abandon(c->h, run->op.rid, run->op.gen, BLOCKING), LC_OK);
    tear_down();
}

/* ------------------------------------------------------------------ less than asked for */

static void look_gives_what_a_dead_writer_held(void) {
    prepare(200, 0);
    prompt_make(&p, 1, 190);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 190);
    client_die(&dead);
    looked_just_now(); /* the call looks for itself */
    prompt_make(&q, 2, 190);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 190);
    CHECK_EQ(q.op.reason, 0);
    for (uint32_t i = 0; i < 190; i++) CHECK_EQ(q.status[i], LCI_NEW);
    for (uint32_t i = 1; i < 190; i++)
        CHECK_EQ(lci_parent(b.h, &b.h->pages[q.page[i]]), (uint32_t)q.page[i - 1]);
    CHECK_EQ(state(3), LCS_CLIENT_FREE);
    index_check(&s);
    end(&q, &b);
}

static void look_gives_what_a_dead_reader_pinned(void) {
    prepare(200, 0);
    prompt_fill(&a, &p, 1, 150);
    CHECK_EQ(match(&dead, &p, &l), 150);
    client_die(&dead);
    looked_just_now();
    prompt_make(&q, 2, 200);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 200);
    end(&q, &b);
}

/* Its first attempt has met the pins, and counts their pages as used. */
static void look_allocates_what_a_dead_reader_pinned(void) {
    prepare(200, 0);
    prompt_fill(&a, &p, 1, 150);
    CHECK_EQ(match(&dead, &p, &l), 150);
    client_die(&dead);
    looked_just_now();
    CHECK_EQ(allocate(&b, 200), LC_OK);
    tear_down();
}

static void look_gives_pages_without_a_key(void) {
    prepare(200, 0);
    CHECK_EQ(allocate(&dead, 190), LC_OK);
    client_die(&dead);
    looked_just_now();
    CHECK_EQ(lci_may_allocate(b.h, 190, LCI_MEMORY_ASK), 0);
    lci_look_op look = {0};
    CHECK_EQ(lci_look_for_dead(b.h, &look, LC_TRY, 0), LC_E_BUSY);
    CHECK_EQ(state(3), LCS_CLIENT_TAKEN);
    CHECK_EQ(allocate(&b, 190), LC_OK);
    CHECK_EQ(state(3), LCS_CLIENT_FREE);
    CHECK_EQ(free_pages(&b, pages, 190), LC_OK);
    CHECK_EQ(lci_look_for_dead(b.h, &look, LC_TRY, 0), 1); /* behind our back: try again */
    CHECK_EQ(lci_look_for_dead(b.h, &look, LC_TRY, 0), 0);
    tear_down();
}

/* What was found behind the first key without room is pinned once. */
static void look_tries_again_from_where_there_was_no_room(void) {
    prepare(100, 0);
    prompt_fill(&a, &w, 5, 2);
    prompt_make(&p, 1, 90);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 90);
    client_die(&dead);
    looked_just_now();
    prompt_make(&q, 2, 80);
    q.keys[40] = w.keys[0];
    q.keys[79] = w.keys[1];
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 78);
    for (uint32_t i = 0; i < 80; i++)
        CHECK_EQ(q.status[i], i == 40 || i == 79 ? LCI_PRESENT : LCI_NEW);
    CHECK_EQ(pins_of(&b, (uint32_t)q.page[40]), 1);
    CHECK_EQ(pins_of(&b, (uint32_t)q.page[79]), 1);
    index_check(&s);
    end(&q, &b);
}

static void look_gives_of_a_quota(void) {
    lci_ns_ref ns;
    prepare(200, 0);
    CHECK_EQ(lci_namespace_open(a.h, "w", "small", 10, &ns, BLOCKING), LC_OK);
    prompt_make(&p, 1, 10);
    CHECK_EQ(prompt_reserve(&dead, &p, ns, 1), 10);
    client_die(&dead);
    looked_just_now();
    prompt_make(&q, 2, 8);
    CHECK_EQ(prompt_reserve(&b, &q, ns, 1), 8);
    end(&q, &b);
}

static void look_gives_a_reservation(void) {
    prepare(200, 0);
    for (uint32_t i = 0; i < a.h->res_count; i++) {
        prompt_make(&p, 10 + i, 1);
        CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 1);
    }
    client_die(&dead);
    looked_just_now();
    prompt_make(&q, 2, 3);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 3);
    end(&q, &b);
}

static int give(client *c, uint64_t to, uint64_t until, lci_ticket_ref *ref) {
    return lci_ticket_give(c->h, l.pages, 2, LC_NIL, 0, to, until, ref, BLOCKING);
}

static void look_gives_a_ticket(void) {
    lci_ticket_ref ref;
    prepare(64, 0);
    prompt_fill(&a, &p, 1, 2);
    CHECK_EQ(match(&dead, &p, &l), 2);
    for (uint32_t i = 0; i < a.h->ticket_count; i++)
        CHECK_EQ(give(&dead, UINT64_C(1) << b.slot, FOREVER, &ref), LC_OK);
    CHECK_EQ(give(&dead, UINT64_C(1) << b.slot, FOREVER, &ref), LC_E_FULL);
    client_die(&dead);
    CHECK_EQ(match(&a, &p, &l), 2);
    CHECK_EQ(give(&a, UINT64_C(1) << b.slot, FOREVER, &ref), LC_E_FULL); /* b may adopt all of them */
    CHECK_EQ(state(3), LCS_CLIENT_FREE); /* but will not be asked for more: what can be done is */
    for (uint32_t i = 0; i < a.h->ticket_count; i++) lc_store(&a.h->tickets[i].deadline_ns, 0);
    CHECK_EQ(give(&a, UINT64_C(1) << b.slot, FOREVER, &ref), LC_OK);
    CHECK_EQ(lci_ticket_drop(a.h, &ref, BLOCKING), LC_OK);
    CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
    tear_down();
}

static void look_gives_tickets_that_are_late(void) {
    lci_ticket_ref ref;
    prepare(64, 0);
    prompt_fill(&a, &p, 1, 2);
    CHECK_EQ(match(&dead, &p, &l), 2);
    for (uint32_t i = 0; i < a.h->ticket_count; i++)
        CHECK_EQ(give(&dead, UINT64_C(1) << b.slot, lcs_now_ns() + 1, &ref), LC_OK);
    client_die(&dead);
    CHECK_EQ(match(&a, &p, &l), 2);
    CHECK_EQ(give(&a, UINT64_C(1) << b.slot, FOREVER, &ref), LC_OK);
    CHECK_EQ(lci_ticket_drop(a.h, &ref, BLOCKING), LC_OK);
    CHECK_EQ(lci_release(a.h, &l.head), LC_OK);
    tear_down();
}

/* What living clients hold is no reason to take anything back; and there is no second try. */
static void look_leaves_the_living_alone(void) {
    lci_ticket_ref ref;
    prepare(64, 0);
    prompt_make(&p, 1, 60);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 60);
    prompt_make(&q, 2, 10);
    uint64_t before = lcs_now_ns();
    not_looked_for_long();
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 4);
    CHECK_EQ(q.op.reason, LCI_WHY_PINNED);
    CHECK_EQ(q.op.stopped, 1);
    CHECK(lc_load(&a.h->root->looked_ns) >= before); /* it has looked */
    not_looked_for_long();
    lci_look_op look = {0};
    CHECK_EQ(lci_look_for_dead(b.h, &look, LC_TRY, 0), 0);
    CHECK(lc_load(&a.h->root->looking_ns) >= before); /* so those who evict need not */
    CHECK_EQ(allocate(&a, 10), LC_E_FULL);
    for (uint32_t i = 0; i < a.h->ticket_count; i++)
        CHECK_EQ(lci_ticket_give(b.h, q.fresh, 1, LC_NIL, 0, UINT64_C(1) << a.slot, FOREVER, &ref,
                                 BLOCKING), LC_OK);
    CHECK_EQ(lci_ticket_give(b.h, q.fresh, 1, LC_NIL, 0, UINT64_C(1) << a.slot, FOREVER, &ref,
                             BLOCKING), LC_E_FULL);
    CHECK_EQ(reaped(), 0);
    CHECK_EQ(state(3), LCS_CLIENT_TAKEN);
    client_leave(&dead);
    end(&q, &b);
}

/* Deaths before a look that began behind our call are those that matter to it. */
static void look_of_another_counts_if_it_began_behind_ours(void) {
    prepare(40, 0);
    CHECK_EQ(allocate(&dead, 40), LC_OK);
    client_die(&dead);
    lci_look_op look = {.begun_ns = lcs_now_ns(), .reaped = reaped()}, again = look;
    lc_store(&a.h->root->looked_ns, look.begun_ns - 1); /* before us: says nothing of ours */
    CHECK_EQ(lci_look_for_dead(a.h, &again, LC_TRY, 0), LC_E_BUSY);
    lc_store(&a.h->root->looked_ns, look.begun_ns);
    CHECK_EQ(lci_look_for_dead(a.h, &again, BLOCKING), 0);
    CHECK_EQ(state(3), LCS_CLIENT_TAKEN);
    lc_store(&a.h->root->looked_ns, UINT64_MAX); /* nobody has looked then: damage */
    CHECK_EQ(lci_look_for_dead(a.h, &again, LC_TRY, 0), LC_E_BUSY);
    look.reaped--; /* another has taken back meanwhile: that may be enough */
    lc_store(&a.h->root->looked_ns, 0);
    CHECK_EQ(lci_look_for_dead(a.h, &look, BLOCKING), 1);
    CHECK_EQ(look.reaped, reaped());
    CHECK_EQ(state(3), LCS_CLIENT_TAKEN);
    CHECK_EQ(lci_look_for_dead(a.h, &look, BLOCKING), 1);
    CHECK_EQ(state(3), LCS_CLIENT_FREE);
    look.rounds = LCI_LOOK_ROUNDS; /* it has done its share */
    CHECK_EQ(allocate(&b, 40), LC_OK);
    client_die(&b);
    CHECK_EQ(lci_look_for_dead(a.h, &look, BLOCKING), 0);
    b = client_join(&s);
    tear_down();
}

static void look_goes_on_until_it_is_enough(void) {
    prepare(100, 0);
    client other = client_join(&s);
    CHECK_EQ(allocate(&dead, 40), LC_OK);
    CHECK_EQ(allocate(&other, 40), LC_OK);
    client_die(&dead);
    client_die(&other);
    looked_just_now();
    CHECK_EQ(allocate(&b, 60), LC_OK);
    CHECK_EQ(state(3), LCS_CLIENT_FREE);
    CHECK_EQ(state(4), LCS_CLIENT_TAKEN); /* one caller pays for one death, if that is enough */
    CHECK_EQ(allocate(&a, 40), LC_OK);
    CHECK_EQ(state(4), LCS_CLIENT_FREE);
    tear_down();
}

/* Another is taking it back, and does not come to an end. */
static void look_does_not_wait_for_a_reaper_for_ever(void) {
    prepare(40, 0);
    CHECK_EQ(allocate(&dead, 40), LC_OK);
    client_die(&dead);
    CHECK_EQ(lcs_slot_mend(b.at, 3), LC_OK);
    lci_look_op look = {0};
    CHECK_EQ(lci_look_for_dead(a.h, &look, BLOCKING), 1); /* it has waited, so: try again */
    CHECK_EQ(look.waited, 1);
    CHECK_EQ(lci_look_for_dead(a.h, &look, BLOCKING), 0);
    CHECK_EQ(allocate(&a, 10), LC_E_FULL);
    lcs_slot_mended(b.at, 3);
    CHECK_EQ(allocate(&a, 10), LC_OK);
    tear_down();
}

static void look_finds_quarantine_over(void) {
    prepare(100, LCS_FLAG_DEVICE);
    prompt_make(&p, 1, 60);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 60);
    lcs_client *record = lcs_client_of(a.at, 3);
    client_die(&dead);
    CHECK_EQ(allocate(&a, 60), LC_E_FULL); /* its process, which is ours, runs */
    CHECK_EQ(state(3), LCS_CLIENT_QUARANTINE);
    uint32_t times = reaped();
    CHECK(times > 0);
    uint64_t before = lcs_now_ns();
    CHECK_EQ(allocate(&a, 60), LC_E_FULL);
    CHECK_EQ(reaped(), times);
    CHECK(lc_load(&a.h->root->looked_ns) >= before); /* there is nothing more to be done */
    record->pid = 0x7ffffff0; /* no process has this number */
    if (!a.at->pidns) record->quarantine_until_ns = 0;
    CHECK_EQ(allocate(&a, 60), LC_OK);
    CHECK_EQ(state(3), LCS_CLIENT_FREE);
    tear_down();
}

/* ------------------------------------------------------------------ more than a portion */

#define PORTION (LCI_REAP_MOST / LCI_REAP_PAGE) /* pages being written that one call takes back */
#define MANY 10000
#define CALLS (MANY / PORTION + 1)

/* The dead one was writing many pages, in parts of 500. */
static void write_many(uint64_t all) {
    prepare(all, 0);
    for (uint32_t i = 0; i < MANY / 500; i++) {
        prompt_make(&p, 10 + i, 500);
        CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 500);
    }
    client_die(&dead);
    looked_just_now();
}

static void look_takes_a_portion_back(void) {
    write_many(MANY + 500);
    for (uint32_t call = 0, before = 0; call < CALLS - 1; call++) {
        lci_look_op look = {0};
        CHECK_EQ(lci_look_for_dead(call % 2 ? a.h : b.h, &look, BLOCKING), 1);
        lci_counts now = index_counts(&a);
        CHECK(now.doomed - before >= PORTION && now.doomed - before < PORTION + LCI_CHUNK_PAGES);
        CHECK_EQ(now.writing, MANY - now.doomed); /* and nothing is left for others to collect */
        CHECK_EQ(pins_of(&a, lc_load(&a.h->lists.heads[LCI_DOOMED_LIST].prev)), 0);
        CHECK_EQ(state(3), LCS_CLIENT_TAKEN);
        CHECK_EQ(reaped(), call + 1);
        CHECK_EQ(lc_load(&a.h->root->looking_ns), 0); /* whoever evicts goes on */
        CHECK_EQ(lc_load(&a.h->root->looked_ns), 0);
        index_check(&s);
        CHECK_EQ(lci_look_for_dead(b.h, &look, BLOCKING), 0); /* the same call has done its share */
        CHECK_EQ(index_counts(&a).doomed, now.doomed);
        before = now.doomed;
    }
    lci_look_op look = {0};
    CHECK_EQ(lci_look_for_dead(b.h, &look, BLOCKING), 1);
    CHECK_EQ(state(3), LCS_CLIENT_FREE);
    CHECK_EQ(index_counts(&a).doomed, MANY);
    CHECK_EQ(index_counts(&a).reservations, 0);
    tear_down();
}

static void look_tries_again_with_a_portion(void) {
    write_many(MANY);
    for (uint32_t call = 0; call < PORTION / 500; call++) {
        prompt_make(&q, 200 + call, 500);
        CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 500);
        prompt_publish(&b, &q, 0);
        if (call) prompt_unpin(&b, &q);
    }
    CHECK_EQ(state(3), LCS_CLIENT_TAKEN);
    tear_down();
}

/* All or nothing: it is had as soon as there is enough. */
static void look_gives_more_than_a_portion_to_some_calls(void) {
    static int32_t had[MANY];
    static uint32_t its[MANY];
    write_many(MANY);
    for (uint32_t call = 1; call <= CALLS; call++) {
        lci_held_op all = {0};
        int rc = THROUGH(lci_allocate(b.h, &all, had, its, MANY - 10, BLOCKING));
        CHECK_EQ(rc, call < CALLS ? LC_E_FULL : LC_OK);
    }
    CHECK_EQ(state(3), LCS_CLIENT_FREE);
    tear_down();
}

static void look_takes_all_back_by_hand(void) {
    write_many(MANY + 500);
    lci_look_op look = {0};
    CHECK_EQ(lci_look_for_dead(b.h, &look, BLOCKING), 1);
    CHECK_EQ(lci_reap_slot(a.h, 3, BLOCKING), 1);
    CHECK_EQ(state(3), LCS_CLIENT_FREE);
    CHECK_EQ(index_counts(&a).doomed, MANY);
    tear_down();
}

static int portion(client *c, int64_t pins) { return lci_reap_some(c->h, 3, BLOCKING, &pins); }

static uint32_t row_of(uint32_t slot) {
    uint32_t pinned = 0;
    for (uint32_t page = 0; page < a.h->page_count; page++)
        pinned += lc_load(lci_pin(a.h, slot, page)) != 0;
    return pinned;
}

static void look_takes_pins_back_in_portions(void) {
    prepare(200, 0);
    prompt_fill(&a, &p, 1, 150);
    collect(&a);
    CHECK_EQ(match(&dead, &p, &l), 150);
    client_die(&dead);
    CHECK_EQ(portion(&a, 60), 1);
    CHECK_EQ(row_of(3), 90);
    CHECK_EQ(portion(&b, 60), 1);
    CHECK_EQ(row_of(3), 30);
    CHECK_EQ(reaped(), 2);
    CHECK_EQ(state(3), LCS_CLIENT_TAKEN);
    index_check(&s);
    CHECK_EQ(portion(&b, 31), 1);
    CHECK_EQ(state(3), LCS_CLIENT_FREE);
    tear_down();
}

static void look_takes_pages_without_a_key_back_in_portions(void) {
    prepare(200, 0);
    CHECK_EQ(allocate(&dead, 100), LC_OK);
    client_die(&dead);
    CHECK_EQ(portion(&a, 30 * LCI_REAP_PAGE), 1);
    CHECK_EQ(index_counts(&a).held, 70);
    CHECK_EQ(row_of(3), 70);
    index_check(&s);
    looked_just_now();
    CHECK_EQ(allocate(&b, 130), LC_OK);
    CHECK_EQ(state(3), LCS_CLIENT_TAKEN); /* 100 and 30: enough */
    CHECK_EQ(portion(&a, 71 * LCI_REAP_PAGE), 1);
    CHECK_EQ(state(3), LCS_CLIENT_FREE);
    tear_down();
}

/* What it was writing stays pinned, and each portion begins behind that. */
static void look_leaves_to_quarantine_in_portions(void) {
    prepare(400, LCS_FLAG_DEVICE);
    prompt_fill(&a, &w, 1, 90);
    collect(&a);
    CHECK_EQ(allocate(&dead, 60), LC_OK);
    prompt_make(&p, 2, 100);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 100);
    CHECK_EQ(match(&dead, &w, &l), 90);
    client_die(&dead);
    lcs_client *record = lcs_client_of(a.at, 3);
    uint32_t portions = 0;
    for (; state(3) == LCS_CLIENT_TAKEN; portions++) {
        CHECK(portions < 20);
        CHECK_EQ(portion(portions % 2 ? &a : &b, 20 * LCI_REAP_PAGE), 1);
        index_check(&s);
    }
    CHECK(portions >= 2 + 60 / 20); /* two chunks of the reservation, and what was held */
    CHECK_EQ(state(3), LCS_CLIENT_QUARANTINE);
    CHECK_EQ(row_of(3), 160);
    CHECK_EQ(index_counts(&a).doomed, 160);
    CHECK(lc_load(&record->quarantine_until_ns) > lcs_now_ns());
    CHECK_EQ(portion(&a, 100), 1); /* its process, which is ours, runs */
    CHECK_EQ(row_of(3), 160);
    record->pid = 0x7ffffff0; /* no process has this number */
    if (!a.at->pidns) record->quarantine_until_ns = 0;
    CHECK_EQ(portion(&a, 100), 1);
    CHECK_EQ(row_of(3), 60);
    CHECK_EQ(state(3), LCS_CLIENT_QUARANTINE);
    CHECK_EQ(portion(&b, 100), 1);
    CHECK_EQ(state(3), LCS_CLIENT_FREE);
    tear_down();
}

/* What stays pinned is not looked at again by the next portion, or small ones would never come to
 * its end. */
static void look_comes_behind_what_stays_in_small_portions(void) {
    prepare(400, LCS_FLAG_DEVICE);
    prompt_fill(&a, &w, 1, 90);
    collect(&a);
    prompt_make(&p, 2, 100);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 100);
    CHECK_EQ(match(&dead, &w, &l), 90);
    client_die(&dead);
    while (index_counts(&a).reservations) CHECK_EQ(portion(&a, LCI_REAP_PAGE), 1);
    for (uint32_t portions = 0; state(3) == LCS_CLIENT_TAKEN; portions++) {
        CHECK(portions < 20);
        CHECK_EQ(portion(&b, 30), 1);
    }
    CHECK_EQ(state(3), LCS_CLIENT_QUARANTINE);
    CHECK_EQ(row_of(3), 100);
    tear_down();
}

/* Its row is paid for, also where it had nothing; not where quarantine only goes on. */
static void look_counts_the_row_that_it_looked_through(void) {
    int64_t left = 1000;
    prepare(400, LCS_FLAG_DEVICE);
    client_die(&dead);
    CHECK_EQ(lci_reap_some(a.h, 3, BLOCKING, &left), 1);
    CHECK_EQ(left, 1000 - a.h->page_count / LCI_REAP_PAGE);
    tear_down();
    prepare(400, LCS_FLAG_DEVICE);
    prompt_make(&p, 1, 5);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 5);
    client_die(&dead);
    CHECK_EQ(portion(&a, 1000), 1);
    CHECK_EQ(state(3), LCS_CLIENT_QUARANTINE);
    left = 1000;
    CHECK_EQ(lci_reap_some(a.h, 3, BLOCKING, &left), 1); /* its process, which is ours, runs */
    CHECK_EQ(left, 1000);
    lcs_client_of(a.at, 3)->pid = 0x7ffffff0; /* no process has this number */
    if (!a.at->pidns) lcs_client_of(a.at, 3)->quarantine_until_ns = 0;
    CHECK_EQ(lci_reap_some(a.h, 3, BLOCKING, &left), 1);
    CHECK_EQ(left, 1000 - 5 - a.h->page_count / LCI_REAP_PAGE);
    tear_down();
}

/* The dead one had adopted a shard: the owner ends the reservation, in the middle of its portions. */
static void look_leaves_an_owner_to_end_its_reservation(void) {
    lci_ticket_ref ref;
    uint32_t rid, gen;
    prepare(400, 0);
    prompt_make(&p, 1, 150);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 2), 150);
    CHECK_EQ(lci_ticket_give(a.h, p.fresh, 150, p.op.rid, p.op.gen, UINT64_C(1) << dead.slot, FOREVER,
                             &ref, BLOCKING), LC_OK);
    CHECK_EQ(lci_adopt(dead.h, &ref, 1, &l.head.held, l.pages, 150, &rid, &gen, BLOCKING), 150);
    client_die(&dead);
    CHECK_EQ(portion(&b, 1), 1);
    CHECK_EQ(index_counts(&a).doomed, LCI_CHUNK_PAGES);
    CHECK_EQ(row_of(3), 150 - LCI_CHUNK_PAGES);
    index_check(&s);
    collect(&b);
    CHECK_EQ(index_counts(&a).doomed, LCI_CHUNK_PAGES); /* nobody but its reaper works on it */
    CHECK_EQ(lci_publish(a.h, p.op.rid, p.op.gen, 0, p.fresh, 150), LC_E_STALE);
    CHECK_EQ(lci_abandon(a.h, p.op.rid, p.op.gen, BLOCKING), LC_OK);
    CHECK_EQ(index_counts(&a).reservations, 0);
    prompt_unpin(&a, &p);
    CHECK_EQ(portion(&b, 1000), 1);
    CHECK_EQ(state(3), LCS_CLIENT_FREE);
    CHECK_EQ(lci_ticket_drop(a.h, &ref, BLOCKING), LC_OK);
    tear_down();
}

/* Of two dead clients, what the first had taken back in part is left to its own reaper. */
static void look_keeps_the_dead_apart(void) {
    prepare(400, 0);
    client other = client_join(&s);
    prompt_make(&p, 1, 150);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 150);
    prompt_make(&q, 2, 10);
    CHECK_EQ(prompt_reserve(&other, &q, NS, 1), 10);
    client_die(&dead);
    client_die(&other);
    CHECK_EQ(portion(&b, 1), 1);
    CHECK_EQ(lci_reap_slot(b.h, 4, BLOCKING), 1);
    CHECK_EQ(index_counts(&a).doomed, LCI_CHUNK_PAGES + 10);
    CHECK_EQ(state(3), LCS_CLIENT_TAKEN);
    index_check(&s);
    CHECK_EQ(lci_reap_slot(b.h, 3, BLOCKING), 1);
    tear_down();
}

/* ------------------------------------------------------------------ evicting */

/* b reserves some new pages of a full index, whose dead client holds 10 pages. */
static uint32_t number;
static void evict_some(void) {
    prompt_make(&q, 100 + number++, 5);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 5);
    prompt_publish(&b, &q, 0);
    prompt_unpin(&b, &q);
}

static void full_beside_a_dead(uint64_t pages) {
    prepare(pages, 0);
    prompt_make(&p, 1, 10);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 10);
    prompt_fill(&a, &w, 2, (uint32_t)pages - 10);
}

static void look_comes_in_turn_to_those_who_evict(void) {
    full_beside_a_dead(100);
    client_die(&dead);
    looked_just_now();
    evict_some();
    CHECK_EQ(state(3), LCS_CLIENT_TAKEN);
    not_looked_for_long();
    uint64_t before = lcs_now_ns();
    evict_some();
    CHECK_EQ(state(3), LCS_CLIENT_FREE);
    CHECK(lc_load(&a.h->root->looking_ns) >= before - 1000000000);
    CHECK_EQ(reaped(), 1);
    prompt_make(&p, 50, 8); /* what it had is free: nothing goes for it, and nobody looks */
    not_looked_for_long();
    uint64_t unasked = lc_load(&a.h->root->looking_ns);
    CHECK_EQ(prompt_reserve(&b, &p, NS, 1), 8);
    CHECK_EQ(lc_load(&a.h->root->looking_ns), unasked);
    end(&p, &b);
}

static void look_takes_one_back_and_leaves_the_rest_to_the_next(void) {
    full_beside_a_dead(100);
    client other = client_join(&s);
    CHECK_EQ(match(&other, &w, &l), 90);
    client_die(&dead);
    client_die(&other);
    not_looked_for_long();
    lci_look_op look = {.due = 1};
    CHECK_EQ(lci_look(b.h, &look, false, LC_TRY, 0), LC_E_BUSY);
    CHECK_EQ(look.due, 1);
    CHECK_EQ(lc_load(&a.h->root->looking_ns), 0); /* still due, to whoever comes */
    looked_just_now();
    CHECK_EQ(lci_look(b.h, &look, false, BLOCKING), 0);
    CHECK_EQ(look.due, 0);
    CHECK_EQ(state(3), LCS_CLIENT_FREE);
    CHECK_EQ(state(4), LCS_CLIENT_TAKEN);
    CHECK_EQ(lc_load(&a.h->root->looking_ns), 0);
    CHECK_EQ(evict(&a, 1), 1);
    CHECK_EQ(state(4), LCS_CLIENT_FREE);
    CHECK(lc_load(&a.h->root->looking_ns) != 0);
    tear_down();
}

/* The rest does not wait a second for each portion. */
static void look_goes_on_with_the_next_portion_at_once(void) {
    write_many(MANY + 200);
    prompt_fill(&a, &w, 5, 200);
    uint32_t calls = 0, before = 0;
    CHECK_EQ(evict(&b, 1), 1);
    CHECK_EQ(index_counts(&b).doomed, 0);
    not_looked_for_long();
    for (; state(3) == LCS_CLIENT_TAKEN; calls++) {
        CHECK(calls < CALLS);
        CHECK_EQ(evict(&b, 1), 1);
        CHECK(index_counts(&b).free > before);
        before = index_counts(&b).free;
        CHECK_EQ(lc_load(&a.h->root->looking_ns) == 0, state(3) == LCS_CLIENT_TAKEN);
    }
    CHECK_EQ(calls, CALLS);
    tear_down();
}

static void look_when_evicting_for_a_quota(void) {
    lci_ns_ref ns;
    prepare(200, 0);
    CHECK_EQ(lci_namespace_open(a.h, "w", "small", 10, &ns, BLOCKING), LC_OK);
    prompt_make(&p, 1, 5);
    CHECK_EQ(prompt_reserve(&a, &p, ns, 1), 5);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    prompt_make(&w, 3, 5);
    CHECK_EQ(prompt_reserve(&dead, &w, ns, 1), 5);
    client_die(&dead);
    not_looked_for_long();
    prompt_make(&q, 2, 5);
    CHECK_EQ(prompt_reserve(&b, &q, ns, 1), 5);
    CHECK_EQ(state(3), LCS_CLIENT_FREE);
    end(&q, &b);
}

/* Keys that a dead client was writing are nobody's again, without anybody waiting for them. */
static void look_when_a_key_is_busy(void) {
    prepare(40, 0);
    prompt_make(&p, 1, 4);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 4);
    client_die(&dead);
    not_looked_for_long();
    prompt_make(&q, 1, 4);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 0);
    CHECK_EQ(q.status[0], LCI_BUSY_KEY);
    CHECK_EQ(state(3), LCS_CLIENT_FREE);
    CHECK_EQ(prompt_reserve(&b, &q, NS, 1), 4);
    end(&q, &b);
}

/* A name that finds no room makes some for the next. */
static void look_when_a_name_finds_no_room(void) {
    lci_ns_ref ns;
    prepare(200, 0);
    CHECK_EQ(lci_namespace_open(a.h, "w", "small", 5, &ns, BLOCKING), LC_OK);
    prompt_make(&w, 3, 5);
    CHECK_EQ(prompt_reserve(&dead, &w, ns, 1), 5);
    client_die(&dead);
    looked_just_now();
    CHECK_EQ(allocate(&b, 2), LC_OK);
    prompt_make(&p, 1, 2);
    int64_t offsets[] = {0, 2}, starts[] = {0};
    op = (lci_held_op){.ns = ns};
    CHECK_EQ(lci_name(b.h, &op, p.keys, offsets, starts, 1, pages, 2, out, status, BLOCKING), LC_OK);
    CHECK_EQ(status[0], LCI_NO_ROOM);
    CHECK_EQ(state(3), LCS_CLIENT_FREE);
    op = (lci_held_op){.ns = ns};
    CHECK_EQ(lci_name(b.h, &op, p.keys, offsets, starts, 1, pages, 2, out, status, BLOCKING), LC_OK);
    CHECK_EQ(status[0], LCI_NEW);
    tear_down();
}

/* ------------------------------------------------------------------ givers of tickets */

/* The dead one has given a ticket to b; a evicts. Returns whether it was taken back. */
static bool taken_back_by_evicting(uint64_t until, void (*then)(const lci_ticket_ref *)) {
    lci_ticket_ref ref;
    full_beside_a_dead(100);
    CHECK_EQ(lci_ticket_give(dead.h, p.fresh, 10, p.op.rid, p.op.gen, UINT64_C(1) << b.slot, until,
                             &ref, BLOCKING), LC_OK);
    if (then) then(&ref);
    client_die(&dead);
    not_looked_for_long();
    CHECK_EQ(evict(&a, 1), 1);
    return state(3) == LCS_CLIENT_FREE;
}

static void look_spares_a_giver_whose_ticket_is_awaited(void) {
    CHECK(!taken_back_by_evicting(FOREVER, NULL));
    not_looked_for_long();
    evict(&a, 1);
    CHECK_EQ(state(3), LCS_CLIENT_TAKEN);
    prompt_make(&q, 9, 95); /* unless there is no other way */
    CHECK_EQ(prompt_reserve(&a, &q, NS, 1), 90); /* the ticket pins what it lists */
    CHECK_EQ(state(3), LCS_CLIENT_FREE);
    CHECK_EQ(q.op.reason, LCI_WHY_PINNED);
    for (uint32_t i = 0; i < a.h->ticket_count; i++) lc_store(&a.h->tickets[i].deadline_ns, 0);
    end(&q, &a);
}

static void look_takes_others_before_a_giver(void) {
    lci_ticket_ref ref;
    prepare(100, 0);
    client other = client_join(&s);
    prompt_make(&p, 1, 40);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 40);
    CHECK_EQ(lci_ticket_give(dead.h, p.fresh, 40, p.op.rid, p.op.gen, UINT64_C(1) << b.slot, FOREVER,
                             &ref, BLOCKING), LC_OK);
    CHECK_EQ(allocate(&other, 40), LC_OK);
    client_die(&dead);
    client_die(&other);
    looked_just_now();
    CHECK_EQ(allocate(&a, 60), LC_OK);
    CHECK_EQ(state(3), LCS_CLIENT_TAKEN);
    CHECK_EQ(state(4), LCS_CLIENT_FREE);
    lc_store(&a.h->tickets[ref.index].deadline_ns, 0);
    tear_down();
}

static void adopted(const lci_ticket_ref *ref) {
    uint32_t rid, gen;
    CHECK_EQ(lci_adopt(b.h, ref, 0, &l.head.held, l.pages, 10, &rid, &gen, BLOCKING), 10);
}
static void failed(const lci_ticket_ref *ref) {
    CHECK_EQ(lci_ticket_refuse_orphans(b.h, dead.slot, dead.at->epoch, BLOCKING), 1);
    (void)ref;
}
static void dropped(const lci_ticket_ref *ref) {
    CHECK_EQ(lci_ticket_drop(dead.h, ref, BLOCKING), LC_OK);
}
static void adopter_dies(const lci_ticket_ref *ref) {
    (void)ref;
    client_die(&b);
}

static void look_takes_a_giver_back_whom_nobody_waits_for(void) {
    CHECK(taken_back_by_evicting(1, NULL)); /* late */
    tear_down();
    CHECK(taken_back_by_evicting(FOREVER, adopted));
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    for (uint32_t i = 0; i < a.h->ticket_count; i++) lc_store(&a.h->tickets[i].deadline_ns, 0);
    tear_down();
    CHECK(taken_back_by_evicting(FOREVER, failed));
    tear_down();
    CHECK(taken_back_by_evicting(FOREVER, dropped));
    for (uint32_t i = 0; i < a.h->ticket_count; i++) lc_store(&a.h->tickets[i].deadline_ns, 0);
    tear_down();
    taken_back_by_evicting(FOREVER, adopter_dies);
    not_looked_for_long(); /* both are dead: the first of them has been taken back */
    evict(&a, 1);
    CHECK_EQ(state(3), LCS_CLIENT_FREE);
    CHECK_EQ(state(2), LCS_CLIENT_FREE);
    b = client_join(&s);
    for (uint32_t i = 0; i < a.h->ticket_count; i++) lc_store(&a.h->tickets[i].deadline_ns, 0);
    tear_down();
}

static void look_is_refused(void) {
    set_up(40);
    lci_look_op look = {0};
    client r = reader_join(&s);
    CHECK_EQ(lci_look_for_dead(r.h, &look, BLOCKING), LC_E_READONLY);
    client_forget(&r);
    lcs_retire(s.base);
    CHECK_EQ(lci_look_for_dead(a.h, &look, BLOCKING), LC_E_RETIRED);
    lc_store(&((lcs_header *)s.base)->retired, 0);
    CHECK_EQ(look.begun_ns, 0);
    tear_down();
}

const test look_tests[] = {
    TEST(look_gives_what_a_dead_writer_held),
    TEST(look_gives_what_a_dead_reader_pinned),
    TEST(look_allocates_what_a_dead_reader_pinned),
    TEST(look_gives_pages_without_a_key),
    TEST(look_tries_again_from_where_there_was_no_room),
    TEST(look_gives_of_a_quota),
    TEST(look_gives_a_reservation),
    TEST(look_gives_a_ticket),
    TEST(look_gives_tickets_that_are_late),
    TEST(look_leaves_the_living_alone),
    TEST(look_of_another_counts_if_it_began_behind_ours),
    TEST(look_goes_on_until_it_is_enough),
    TEST(look_does_not_wait_for_a_reaper_for_ever),
    TEST(look_finds_quarantine_over),
    TEST(look_takes_a_portion_back),
    TEST(look_tries_again_with_a_portion),
    TEST(look_gives_more_than_a_portion_to_some_calls),
    TEST(look_takes_all_back_by_hand),
    TEST(look_takes_pins_back_in_portions),
    TEST(look_takes_pages_without_a_key_back_in_portions),
    TEST(look_leaves_to_quarantine_in_portions),
    TEST(look_comes_behind_what_stays_in_small_portions),
    TEST(look_counts_the_row_that_it_looked_through),
    TEST(look_leaves_an_owner_to_end_its_reservation),
    TEST(look_keeps_the_dead_apart),
    TEST(look_goes_on_with_the_next_portion_at_once),
    TEST(look_comes_in_turn_to_those_who_evict),
    TEST(look_takes_one_back_and_leaves_the_rest_to_the_next),
    TEST(look_when_evicting_for_a_quota),
    TEST(look_when_a_key_is_busy),
    TEST(look_when_a_name_finds_no_room),
    TEST(look_spares_a_giver_whose_ticket_is_awaited),
    TEST(look_takes_others_before_a_giver),
    TEST(look_takes_a_giver_back_whom_nobody_waits_for),
    TEST(look_is_refused),
    END_OF_TESTS,
};
