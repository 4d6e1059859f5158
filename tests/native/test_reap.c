/* What a dead client held is taken back; what is not its own is left. */
#include "pair.h"

#include <sys/wait.h>
#include <unistd.h>

static client dead;

static void prepare(uint32_t flags) {
    set_up(200);
    dead = client_join_as(&s, flags);
    prompt_fill(&a, &q, 9, 20);
}

static uint32_t state(uint32_t slot) { return lc_load(&lcs_client_of(a.at, slot)->state); }

static void reap(void) {
    CHECK_EQ(lci_reap_slot(a.h, 3, BLOCKING), 1);
    CHECK_EQ(state(3), LCS_CLIENT_FREE);
    index_check(&s);
    CHECK_EQ(lci_reap_slot(a.h, 3, BLOCKING), 0);
}

static void reap_takes_back_leases(void) {
    prepare(0);
    CHECK_EQ(match(&dead, &q, &l), 20);
    CHECK_EQ(lci_reap_slot(a.h, 3, BLOCKING), 0); /* it lives */
    uint32_t epoch = lc_load(&lcs_client_of(a.at, 3)->epoch);
    client_die(&dead);
    lc_store(&a.h->root->looking_ns, lcs_now_ns()); /* so that evicting does not look for it */
    CHECK_EQ(evict(&a, 200), 0);
    reap();
    CHECK_EQ(lc_load(&lcs_client_of(a.at, 3)->epoch), epoch + 1);
    CHECK_EQ(evict(&a, 200), 20);
    dead = client_join(&s); /* the slot can be taken again */
    CHECK_EQ(dead.slot, 3);
    client_leave(&dead);
    tear_down();
}

static void reap_dooms_what_was_being_written(void) {
    prepare(0);
    prompt_make(&p, 1, 70);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 2), 70);
    prompt_publish(&dead, &p, 0);
    client_die(&dead);
    uint32_t event = lc_load(&a.h->root->event);
    reap();
    CHECK(lc_load(&a.h->root->event) != event);
    lci_counts counts = index_counts(&a);
    CHECK_EQ(counts.reservations, 0);
    CHECK_EQ(counts.writing, 0);
    CHECK_EQ(counts.chunks, 0);
    CHECK_EQ(counts.named, 20);
    CHECK_EQ(evict(&a, 200), 20);
    CHECK_EQ(index_counts(&a).doomed, 0);
    tear_down();
}

static void reap_keeps_what_was_published(void) {
    prepare(0);
    prompt_make(&p, 1, 70);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 70);
    prompt_publish(&dead, &p, 0);
    for (int w = 0; w < 16; w++) lc_store(&a.h->root->completed[w], 0); /* died before saying so */
    _Atomic uint32_t *word = &a.h->pages[p.page[69]].word;
    lc_store(word, (lc_load(word) & ~LCI_STATE_MASK) | LCI_WRITING);
    client_die(&dead);
    reap();
    CHECK_EQ(peek(&a, &p), 70);
    CHECK_EQ(index_counts(&a).reservations, 0);
    tear_down();
}

/* The dead one's reservation, all of whose pending shards belong to another: it goes on. */
static void reap_leaves_a_reservation_to_those_who_write_it(void) {
    lci_ticket_ref ref;
    uint32_t rid, gen;
    prepare(0);
    prompt_make(&p, 1, 30);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 2), 30);
    CHECK_EQ(lci_ticket_give(dead.h, p.fresh, 30, p.op.rid, p.op.gen, 1u << b.slot, FOREVER, &ref,
                             BLOCKING), LC_OK);
    CHECK_EQ(lci_adopt(b.h, &ref, 1, &l.head.held, l.pages, 30, &rid, &gen, BLOCKING), 30);
    prompt_publish(&dead, &p, 0);
    client_die(&dead);
    reap();
    CHECK_EQ(lc_load(&a.h->res[rid].owner), 0);
    CHECK_EQ(lc_load(&a.h->res[rid].state), LCI_RES_ACTIVE);
    CHECK_EQ(lci_publish(b.h, rid, gen, 1, l.pages, 30), 1);
    CHECK_EQ(peek(&a, &p), 30);
    CHECK_EQ(lci_ticket_done(b.h, &ref, 1), LC_OK);
    CHECK_EQ(evict(&a, 1), 1);
    CHECK_EQ(index_counts(&a).tickets, 0);
    tear_down();
}

/* The adopter dies with its shard pending: the reserver's reservation ends. */
static void reap_of_an_adopter_ends_the_reservation(void) {
    lci_ticket_ref ref;
    uint32_t rid, gen;
    prepare(0);
    prompt_make(&p, 1, 30);
    CHECK_EQ(prompt_reserve(&b, &p, NS, 2), 30);
    CHECK_EQ(lci_ticket_give(b.h, p.fresh, 30, p.op.rid, p.op.gen, 1u << 3, FOREVER, &ref,
                             BLOCKING), LC_OK);
    CHECK_EQ(lci_adopt(dead.h, &ref, 1, &l.head.held, l.pages, 30, &rid, &gen, BLOCKING), 30);
    client_die(&dead);
    reap();
    CHECK_EQ(lci_publish(b.h, rid, gen, 0, p.fresh, 30), LC_E_STALE);
    prompt_unpin(&b, &p);
    tear_down();
}

static void reap_of_a_half_built_ticket(void) {
    lci_ticket_ref ref;
    prepare(0);
    CHECK_EQ(match(&dead, &q, &l), 20);
    CHECK_EQ(lci_ticket_give(dead.h, l.pages, 20, LC_NIL, 0, 2, FOREVER, &ref, BLOCKING), LC_OK);
    lc_store(&a.h->tickets[ref.index].state, LCI_TICKET_BUILDING);
    client_die(&dead);
    reap();
    CHECK_EQ(index_counts(&a).tickets, 0);
    CHECK_EQ(index_counts(&a).chunks, 0);
    tear_down();
}

/* A device's copies may outlive its client: what it was writing stays until its process is gone. */
static void reap_of_a_device_waits_in_quarantine(void) {
    prepare(LCS_FLAG_DEVICE);
    prompt_make(&p, 1, 30);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 30);
    CHECK_EQ(match(&dead, &q, &l), 20);
    client_die(&dead);
    lcs_client *record = lcs_client_of(a.at, 3);
    CHECK_EQ(lci_reap_slot(a.h, 3, BLOCKING), 1);
    CHECK_EQ(state(3), LCS_CLIENT_QUARANTINE); /* its process, which is ours, runs */
    CHECK_EQ(pins_of(&a, (uint32_t)p.page[0]), 1);
    CHECK_EQ(pins_of(&a, (uint32_t)q.page[0]), 0);
    CHECK_EQ(evict(&a, 200), 20);
    CHECK_EQ(index_counts(&a).doomed, 30);
    index_check(&s);
    CHECK_EQ(lci_reap_slot(a.h, 3, BLOCKING), 1);
    CHECK_EQ(state(3), LCS_CLIENT_QUARANTINE);
    record->start_ticks++; /* the number belongs to another process by now */
    if (!a.at->pidns) record->quarantine_until_ns = 0; /* no /proc here: only time tells */
    reap();
    evict(&a, 1);
    CHECK_EQ(index_counts(&a).doomed, 0);
    tear_down();
}

static void quarantine_ends_by_time_where_nothing_can_be_seen(void) {
    prepare(LCS_FLAG_DEVICE);
    prompt_make(&p, 1, 30);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 30);
    lcs_client *record = lcs_client_of(a.at, 3);
    record->pidns++;
    client_die(&dead);
    CHECK_EQ(lci_reap_slot(a.h, 3, BLOCKING), 1);
    CHECK_EQ(state(3), LCS_CLIENT_QUARANTINE);
    CHECK(record->quarantine_until_ns > lcs_now_ns());
    record->quarantine_until_ns = 1;
    reap();
    tear_down();
}

/* A start that is not the one recorded says "another process" only where both were counted from the same
 * instant: from another time namespace it is the very process, which may be copying. */
static void quarantine_does_not_end_by_the_clock_of_another_namespace(void) {
    for (uint64_t unknown = 0; unknown < 2; unknown++) {
        prepare(LCS_FLAG_DEVICE);
        uint64_t *made_in = &((lcs_header *)s.base)->time_namespace;
        uint64_t ours = *made_in;
        prompt_make(&p, 1, 30);
        CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 30);
        lcs_client *record = lcs_client_of(a.at, 3);
        client_die(&dead); /* its process, which is ours, runs */
        record->start_ticks += 1000000;
        *made_in = unknown ? 0 : ours + 1;
        CHECK_EQ(lci_reap_slot(a.h, 3, BLOCKING), 1);
        CHECK_EQ(state(3), LCS_CLIENT_QUARANTINE);
        record->quarantine_until_ns = 1; /* then time decides, as where nothing can be seen */
        reap();
        tear_down();
    }
}

/* A zombie has its number and its start, and its device context no more. */
static void quarantine_ends_when_every_thread_has_ended(void) {
    siginfo_t ended;
    prepare(LCS_FLAG_DEVICE);
    prompt_make(&p, 1, 30);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 30);
    lcs_client *record = lcs_client_of(a.at, 3);
    client_die(&dead);
    pid_t child = fork();
    if (child == 0) _exit(0);
    CHECK(waitid(P_PID, (id_t)child, &ended, WEXITED | WNOWAIT) == 0);
    record->pid = (uint32_t)child;
    record->start_ticks = lcs_start_ticks((uint32_t)child);
    CHECK_EQ(lci_reap_slot(a.h, 3, BLOCKING), 1);
    if (a.at->pidns) CHECK_EQ(state(3), LCS_CLIENT_FREE);
    CHECK(waitpid(child, NULL, 0) == child);
    lc_store(&record->state, LCS_CLIENT_FREE);
    tear_down();
}

static void quarantine_ends_when_the_process_is_gone(void) {
    prepare(LCS_FLAG_DEVICE);
    prompt_make(&p, 1, 30);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 30);
    lcs_client *record = lcs_client_of(a.at, 3);
    client_die(&dead);
    record->pid = 0x7ffffff0; /* no process has this number */
    if (!a.at->pidns) record->start_ticks++;
    CHECK(lci_reap_slot(a.h, 3, BLOCKING) == 1);
    if (a.at->pidns) CHECK_EQ(state(3), LCS_CLIENT_FREE);
    else lc_store(&record->state, LCS_CLIENT_FREE);
    tear_down();
}

static void reap_of_a_device_that_wrote_nothing_needs_no_quarantine(void) {
    prepare(LCS_FLAG_DEVICE);
    CHECK_EQ(match(&dead, &q, &l), 20);
    client_die(&dead);
    reap();
    tear_down();
}

static void reap_by_one_who_has_no_slot(void) {
    prepare(0);
    CHECK_EQ(match(&dead, &q, &l), 20);
    CHECK_EQ(lci_hold(dead.h, BLOCKING), LC_OK); /* and the lock with it */
    client stranger = {.life = life_descriptor(&s)};
    stranger.at = lcs_attachment_new(s.base, s.bytes, stranger.life, 0, 0, 0);
    stranger.h = lci_open(stranger.at, s.pages);
    CHECK_EQ(lci_reap_unjoined(stranger.h, 3, BLOCKING), 0); /* it lives */
    CHECK_EQ(lci_reap_unjoined(stranger.h, 0, BLOCKING), LC_E_RANGE);
    CHECK_EQ(lci_reap_unjoined(a.h, 3, BLOCKING), LC_E_RANGE); /* has a slot */
    CHECK_EQ(lci_reap_unjoined(stranger.h, 9, BLOCKING), 0);
    client_die(&dead);
    CHECK_EQ(lci_reap_unjoined(stranger.h, 3, BLOCKING), 1);
    CHECK_EQ(state(3), LCS_CLIENT_FREE);
    CHECK_EQ(stranger.at->slot, 0);
    CHECK_EQ(lcs_slot_claim(stranger.at, "stranger", 0), 3);
    CHECK_EQ(lcs_slot_release(stranger.at), LC_OK);
    client_forget(&stranger);
    CHECK_EQ(evict(&a, 200), 20);
    tear_down();
}

static void reap_is_refused(void) {
    prepare(0);
    client r = reader_join(&s);
    CHECK_EQ(lci_reap_slot(r.h, 3, BLOCKING), LC_E_READONLY);
    client_forget(&r);
    CHECK_EQ(lci_reap_slot(a.h, 0, BLOCKING), LC_E_RANGE);
    CHECK_EQ(lci_reap_slot(a.h, LCS_SLOTS, BLOCKING), LC_E_RANGE);
    CHECK_EQ(lci_reap_slot(a.h, a.slot, BLOCKING), 0);
    CHECK_EQ(lci_reap_slot(a.h, 9, BLOCKING), 0);
    client_die(&dead);
    CHECK_EQ(lci_hold(b.h, BLOCKING), LC_OK);
    CHECK_EQ(lci_reap_slot(a.h, 3, LC_TRY, 0), LC_E_BUSY);
    CHECK_EQ(lcs_byte_held(b.life, LCS_BYTE_SLOTS + 3, 1), 0); /* let go of again */
    CHECK_EQ(lci_let_go(b.h), LC_OK);
    reap();
    tear_down();
}

static void leave_gives_back_everything(void) {
    prepare(0);
    prompt_make(&p, 1, 30);
    CHECK_EQ(prompt_reserve(&dead, &p, NS, 1), 30);
    CHECK_EQ(match(&dead, &q, &l), 20);
    CHECK_EQ(lci_hold(b.h, BLOCKING), LC_OK);
    CHECK_EQ(lci_leave(dead.h, LC_TRY, 0), LC_E_BUSY);
    CHECK_EQ(lci_let_go(b.h), LC_OK);
    CHECK_EQ(lci_match1(dead.h, q.keys, 20, NS, &l.head), LC_E_CLOSED); /* leaving has begun */
    CHECK_EQ(lci_leave(dead.h, BLOCKING), LC_OK);
    CHECK_EQ(lcs_slot_release(dead.at), LC_OK);
    CHECK_EQ(lci_leave(dead.h, BLOCKING), LC_OK); /* has no slot */
    client_forget(&dead);
    index_check(&s);
    CHECK_EQ(index_counts(&a).reservations, 0);
    CHECK_EQ(evict(&a, 200), 20);
    dead = client_join(&s);
    close(dead.life); /* declared dead, and reaped, before it leaves */
    dead.life = -1;
    reap();
    CHECK_EQ(lci_leave(dead.h, BLOCKING), LC_OK);
    CHECK_EQ(lcs_attachment_usable(dead.at), LC_E_LOST);
    client_forget(&dead);
    tear_down();
}

const test reap_tests[] = {
    TEST(reap_takes_back_leases),
    TEST(reap_dooms_what_was_being_written),
    TEST(reap_keeps_what_was_published),
    TEST(reap_leaves_a_reservation_to_those_who_write_it),
    TEST(reap_of_an_adopter_ends_the_reservation),
    TEST(reap_of_a_half_built_ticket),
    TEST(reap_of_a_device_waits_in_quarantine),
    TEST(quarantine_ends_by_time_where_nothing_can_be_seen),
    TEST(quarantine_does_not_end_by_the_clock_of_another_namespace),
    TEST(quarantine_ends_when_every_thread_has_ended),
    TEST(quarantine_ends_when_the_process_is_gone),
    TEST(reap_of_a_device_that_wrote_nothing_needs_no_quarantine),
    TEST(reap_by_one_who_has_no_slot),
    TEST(reap_is_refused),
    TEST(leave_gives_back_everything),
    END_OF_TESTS,
};
