/* repair of pins and of the slots that they belong to. */
#include "pair.h"

#include <unistd.h>

static prompt ready, gone;
static lci_ticket_ref ticket;

/* 12 pages, of which one client pins 3, and has given 2 to the other. */
static void prepare(void) {
    set_up(128);
    prompt_fill(&b, &ready, 1, 12);
    ready.n = 3;
    CHECK_EQ(match(&b, &ready, &l), 3);
    ready.n = 12;
    CHECK_EQ(lci_ticket_give(b.h, l.pages, 2, LC_NIL, 0, UINT64_C(1) << a.slot, FOREVER, &ticket,
                             BLOCKING), LC_OK);
    index_check(&s);
}

static void repair(client *c) {
    CHECK_EQ(lci_repair(c->h, BLOCKING), LC_OK);
    index_check(&s);
}

static uint64_t bits_of(uint32_t page) { return lc_load(&a.h->pages[page].pins); }

static void expect_pins(uint32_t slot, uint32_t page, uint32_t count) {
    CHECK_EQ(lc_load(lci_pin(a.h, slot, page)), count);
    if (count) CHECK(bits_of(page) >> slot & 1);
}

static void mending_of_tickets_pins(void) {
    prepare();
    uint32_t page = (uint32_t)ready.page[0], loose = (uint32_t)ready.page[7];
    lc_store(lci_pin(a.h, 0, page), 7);
    lc_store(lci_pin(a.h, 0, loose), 1);
    lc_store(&a.h->pages[page].pins, 0);
    lci_ticket *unused = &a.h->tickets[100]; /* free: it holds nothing, whatever it says */
    lc_store(&unused->pages.first, lc_load(&a.h->tickets[ticket.index].pages.first));
    lc_store(&unused->pages.count, 2);
    CHECK_EQ(index_broken(&s), 25);
    repair(&a);
    expect_pins(0, page, 1); /* slot 0 is the tickets' */
    expect_pins(0, loose, 0);
    expect_pins(b.slot, page, 1);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(evict(&a, 128), 10); /* all but what the ticket holds */
    CHECK_EQ(peek(&a, &ready), 2);
    tear_down();
}

/* Pins of a slot that is free are nobody's, and whoever takes the slot has none. */
static void mending_of_a_free_slot(void) {
    prepare();
    uint32_t vacant = b.slot + 1;
    uint64_t bits[12];
    for (uint32_t i = 0; i < 12; i++) {
        bits[i] = bits_of((uint32_t)ready.page[i]);
        lc_store(lci_pin(a.h, vacant, (uint32_t)ready.page[i]), 3);
    }
    CHECK_EQ(index_broken(&s), 26);
    repair(&a);
    for (uint32_t i = 0; i < 12; i++) {
        expect_pins(vacant, (uint32_t)ready.page[i], 0);
        CHECK_EQ(bits_of((uint32_t)ready.page[i]), bits[i]);
    }
    client c = client_join(&s);
    CHECK_EQ(c.slot, vacant); /* repair has let go of it */
    client_leave(&c);
    tear_down();
}

/* A client that lives has a slot, whatever is written there, also if it repairs itself. */
static void mending_of_a_living_clients_slot(void) {
    for (int own = 0; own < 2; own++) {
        prepare();
        lcs_client *c = lcs_client_of(a.at, b.slot);
        uint32_t page = (uint32_t)ready.page[2];
        lc_store(&c->state, LCS_CLIENT_FREE);
        for (uint32_t i = 0; i < 3; i++) lc_store(&a.h->pages[ready.page[i]].pins, 0);
        CHECK(index_broken(&s));
        repair(own ? &b : &a);
        CHECK_EQ(lc_load(&c->state), LCS_CLIENT_TAKEN);
        expect_pins(b.slot, page, 1);
        CHECK(evict(&a, 128) > 0);
        CHECK_EQ(peek(&a, &ready), 3); /* pinned */
        tear_down();
    }
}

/* Who cannot ask whether a client lives takes nothing from it. */
static void mending_without_byte_locks_clears_no_pins(void) {
    prepare();
    lc_store(&lcs_client_of(a.at, b.slot)->state, LCS_CLIENT_FREE);
    client c = client_join(&s);
    close(c.life);
    repair(&c);
    CHECK_EQ(lc_load(&lcs_client_of(a.at, b.slot)->state), LCS_CLIENT_TAKEN);
    expect_pins(b.slot, (uint32_t)ready.page[2], 1);
    c.life = life_descriptor(&s);
    client_die(&c);
    tear_down();
}

static void mending_of_pins_on_unused_pages(void) {
    prepare();
    CHECK(lc_load(&a.h->root->fresh) <= 120);
    lc_store(lci_pin(a.h, a.slot, 120), 1);
    CHECK_EQ(index_broken(&s), 27);
    repair(&b);
    expect_pins(a.slot, 120, 0);
    CHECK_EQ(bits_of(120), 0);
    tear_down();
}

/* A log that is forged takes back the step that gave pages to a living client, and both marks; its pins
 * are not in the log. The pages are given to no other client. */
static void mending_of_pages_that_are_in_use_and_say_free(void) {
    prompt mine, other;
    prepare();
    uint32_t fresh = lc_load(&a.h->root->fresh), grown = lc_load(&a.h->root->grown);
    prompt_make(&mine, 3, 4);
    CHECK_EQ(prompt_reserve(&a, &mine, NS, 1), 4);
    for (uint32_t i = 0; i < 4; i++) {
        CHECK((uint32_t)mine.fresh[i] >= fresh);
        lc_store(&a.h->pages[mine.fresh[i]].word, LCI_FREE);
    }
    lc_store(&a.h->root->fresh, fresh);
    lc_store(&a.h->root->grown, fresh);
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    CHECK_EQ(lci_grow(a.h, grown, BLOCKING), LC_OK);
    prompt_make(&other, 4, 4);
    CHECK_EQ(prompt_reserve(&b, &other, NS, 1), 4);
    for (uint32_t i = 0; i < 4; i++)
        for (uint32_t k = 0; k < 4; k++) CHECK(mine.fresh[i] != other.fresh[k]);
    for (uint32_t i = 0; i < 4; i++) expect_pins(a.slot, (uint32_t)mine.fresh[i], 1);
    tear_down();
}

/* Slots without pins, or not free, are left to those who are at work on them and hold their bytes:
 * one joins, another reaps the dead client of a slot in quarantine as its guest. */
static void mending_leaves_slots_to_others(void) {
    prepare();
    client device = client_join_as(&s, LCS_FLAG_DEVICE);
    uint32_t slot = device.slot, joins = slot + 1;
    prompt_make(&gone, 2, 4);
    CHECK_EQ(prompt_reserve(&device, &gone, NS, 1), 4);
    client_die(&device);
    CHECK_EQ(lci_reap_slot(a.h, slot, BLOCKING), 1);
    CHECK_EQ(lc_load(&lcs_client_of(a.at, slot)->state), LCS_CLIENT_QUARANTINE);
    int other = life_descriptor(&s);
    CHECK_EQ(lcs_byte_lock(other, LCS_BYTE_SLOTS + slot, 1), LC_OK);
    CHECK_EQ(lcs_byte_lock(other, LCS_BYTE_SLOTS + joins, 1), LC_OK);
    repair(&a);
    CHECK_EQ(lc_load(&lcs_client_of(a.at, slot)->state), LCS_CLIENT_QUARANTINE);
    CHECK_EQ(lc_load(&lcs_client_of(a.at, joins)->state), LCS_CLIENT_FREE);
    CHECK_EQ(bits_of((uint32_t)ready.page[11]) >> joins & 1, 0);
    for (uint32_t i = 0; i < 4; i++) expect_pins(slot, (uint32_t)gone.page[i], 1);
    lcs_byte_unlock(other, LCS_BYTE_SLOTS + slot);
    lcs_byte_unlock(other, LCS_BYTE_SLOTS + joins);
    client_leave(&a);
    client_leave(&b);
    segment_end(&s);
}

const test mend_pins_tests[] = {
    TEST(mending_of_tickets_pins),
    TEST(mending_of_a_free_slot),
    TEST(mending_of_a_living_clients_slot),
    TEST(mending_without_byte_locks_clears_no_pins),
    TEST(mending_of_pins_on_unused_pages),
    TEST(mending_of_pages_that_are_in_use_and_say_free),
    TEST(mending_leaves_slots_to_others),
    END_OF_TESTS,
};
