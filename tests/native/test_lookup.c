/* peek, match, release, split: prefixes, pins, and what is not matched. */
#include "pair.h"

static lease m;

static void match_finds_the_longest_prefix(void) {
    set_up(600);
    prompt_fill(&a, &p, 1, 100);
    for (uint32_t n = 0; n <= 100; n += n < 70 ? 1 : 10) { /* around the blocks of a lookup */
        p.n = n;
        CHECK_EQ(peek(&b, &p), n);
        CHECK_EQ(match(&b, &p, &l), n);
        CHECK_EQ(l.head.held, n);
        CHECK_EQ(l.head.capacity, n);
        for (uint32_t i = 0; i < n; i++) CHECK_EQ(l.pages[i], p.page[i]);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    }
    for (uint32_t n = 0; n < 100; n += 9) { /* a key in the middle that is not there */
        p.n = 100;
        lc_key kept = p.keys[n];
        p.keys[n].hi++;
        CHECK_EQ(peek(&b, &p), n);
        CHECK_EQ(match(&b, &p, &l), n);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
        p.keys[n] = kept;
    }
    tear_down();
}

static void match_pins_and_release_unpins(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 10);
    CHECK_EQ(match(&b, &p, &l), 10);
    CHECK_EQ(match(&b, &p, &m), 10);
    CHECK_EQ(match(&a, &p, &m), 10);
    for (uint32_t i = 0; i < 10; i++) {
        CHECK_EQ(pins_of(&a, (uint32_t)p.page[i]), 3);
        CHECK_EQ(lc_load(lci_pin(a.h, b.slot, (uint32_t)p.page[i])), 2);
        CHECK(lci_pinned(a.h, &a.h->pages[p.page[i]]));
    }
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(l.head.held, 0);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK); /* holds nothing any more */
    CHECK_EQ(pins_of(&a, (uint32_t)p.page[0]), 2);
    CHECK_EQ(lci_release(a.h, &m.head), LC_OK);
    CHECK_EQ(lc_load(lci_pin(a.h, b.slot, (uint32_t)p.page[9])), 1);
    tear_down(); /* leaving gives the last one back */
}

static void release_of_what_is_not_pinned_is_damage(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 2);
    CHECK_EQ(match(&b, &p, &l), 2);
    lc_store(lci_pin(b.h, b.slot, (uint32_t)l.pages[0]), 0);
    CHECK_EQ(lci_release(b.h, &l.head), LC_E_CORRUPT);
    CHECK_EQ(pins_of(&a, (uint32_t)l.pages[1]), 0);
    tear_down();
}

static void match_of_pages_being_written_is_none(void) {
    set_up(64);
    prompt_make(&p, 1, 10);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 10);
    CHECK_EQ(peek(&b, &p), 0);
    CHECK_EQ(match(&b, &p, &l), 0);
    prompt_publish(&a, &p, 0);
    CHECK_EQ(peek(&b, &p), 10); /* before anybody has collected it */
    CHECK_EQ(match(&b, &p, &l), 10);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    prompt_unpin(&a, &p);
    tear_down();
}

static void match_of_another_namespace_is_none(void) {
    lci_ns_ref other;
    set_up(64);
    prompt_fill(&a, &p, 1, 10);
    CHECK_EQ(lci_namespace_open(a.h, "w", "t", 0, &other, BLOCKING), LC_OK);
    CHECK_EQ(lci_peek1(b.h, p.keys, 10, other), 0);
    CHECK_EQ(lci_match1(b.h, p.keys, 10, other, &l.head), 0);
    CHECK_EQ(lci_peek1(b.h, p.keys, 10, NS + (1 << 8)), 0); /* another epoch */
    CHECK_EQ(lci_match1(b.h, p.keys, 10, NS + (1 << 8), &l.head), 0);
    tear_down();
}

static void match_of_several_requests(void) {
    set_up(600);
    prompt_fill(&a, &p, 1, 40);
    prompt_fill(&a, &q, 2, 20);
    lc_key keys[90];
    int32_t counts[4];
    const int64_t offsets[] = {0, 40, 40, 70, 90};
    memcpy(keys, p.keys, sizeof(lc_key) * 40);
    for (uint32_t i = 0; i < 30; i++) keys[40 + i] = i < 20 ? q.keys[i] : prompt_key(3, i);
    memcpy(keys + 70, p.keys + 20, sizeof(lc_key) * 20); /* a suffix too: keys say all */
    CHECK_EQ(lci_peek(b.h, keys, offsets, 4, NS, counts), LC_OK);
    CHECK(counts[0] == 40 && counts[1] == 0 && counts[2] == 20 && counts[3] == 20);
    memset(&l, 0, sizeof l);
    memset(counts, 0xff, sizeof counts);
    CHECK_EQ(lci_match(b.h, keys, offsets, 4, NS, &l.head, counts), 80);
    CHECK(counts[0] == 40 && counts[1] == 0 && counts[2] == 20 && counts[3] == 20);
    CHECK_EQ(l.head.held, 80);
    for (uint32_t i = 0; i < 40; i++) CHECK_EQ(l.pages[i], p.page[i]);
    for (uint32_t i = 0; i < 20; i++) CHECK_EQ(l.pages[40 + i], q.page[i]);
    for (uint32_t i = 0; i < 20; i++) CHECK_EQ(l.pages[60 + i], p.page[20 + i]);
    CHECK_EQ(pins_of(&a, (uint32_t)p.page[20]), 2);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    tear_down();
}

static void lease_splits_into_runs(void) {
    lease parts[3];
    lci_lease *to[] = {&parts[0].head, &parts[1].head, &parts[2].head};
    set_up(64);
    prompt_fill(&a, &p, 1, 10);
    CHECK_EQ(match(&b, &p, &l), 10);
    CHECK_EQ(lci_split(&l.head, to, (int32_t[]){4, 0, 5}, 3), LC_E_RANGE);
    CHECK_EQ(lci_split(&l.head, to, (int32_t[]){4, 0, 6}, 3), LC_OK);
    CHECK_EQ(l.head.held, 0);
    CHECK_EQ(parts[0].head.held, 4);
    CHECK_EQ(parts[2].head.capacity, 6);
    CHECK_EQ(parts[2].pages[5], p.page[9]);
    CHECK_EQ(lci_release(b.h, to[0]), LC_OK);
    CHECK_EQ(pins_of(&a, (uint32_t)p.page[3]), 0);
    CHECK_EQ(pins_of(&a, (uint32_t)p.page[4]), 1);
    CHECK_EQ(lci_release(b.h, to[2]), LC_OK);
    tear_down();
}

static void match_beyond_65535_pins_holds_nothing(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 3);
    lc_store(lci_pin(b.h, b.slot, (uint32_t)p.page[2]), UINT16_MAX);
    CHECK_EQ(lci_match1(b.h, p.keys, 3, NS, &l.head), LC_E_PINS);
    CHECK_EQ(pins_of(&a, (uint32_t)p.page[0]), 0);
    const int64_t offsets[] = {0, 2, 3};
    int32_t counts[2];
    memset(&l, 0, sizeof l);
    CHECK_EQ(lci_match(b.h, p.keys, offsets, 2, NS, &l.head, counts), LC_E_PINS);
    CHECK_EQ(l.head.held, 0);
    CHECK_EQ(pins_of(&a, (uint32_t)p.page[0]), 0);
    CHECK_EQ(pins_of(&a, (uint32_t)p.page[1]), 0);
    CHECK_EQ(prompt_reserve(&b, &p, NS, 1), LC_E_PINS);
    prompt_unpin(&b, &p);
    CHECK_EQ(pins_of(&a, (uint32_t)p.page[0]), 0);
    lc_store(lci_pin(b.h, b.slot, (uint32_t)p.page[2]), 0);
    tear_down();
}

static void match_counts_hits_and_lookups(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 4);
    const lci_page *page = &a.h->pages[p.page[0]];
    uint64_t before = lci_tick(page);
    lci_page full = {.used = LCI_HITS_MASK};
    CHECK_EQ(match(&b, &p, &l), 4);
    CHECK_EQ(hits_of((uint32_t)p.page[0]), 1);
    CHECK(lci_tick(page) > before);
    CHECK_EQ(peek(&b, &p), 4);
    CHECK_EQ(hits_of((uint32_t)p.page[0]), 1);
    const lcs_client *record = lcs_client_of(b.at, b.slot);
    CHECK_EQ(record->lookups, 1);
    CHECK_EQ(record->hit_pages, 4);
    CHECK_EQ(record->missed_pages, 0);
    lci_touch(&full, 5, 1); /* hits stay at their bound, ticks never go back */
    CHECK_EQ(lc_load(&full.used), UINT64_C(5) << LCI_TICK_SHIFT | LCI_HITS_MASK);
    lci_touch(&full, 3, 0);
    CHECK_EQ(lci_tick(&full), 5);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    tear_down();
}

static void uncounted_matches(void) {
    static const int64_t offsets[] = {0, 3, 6};
    int32_t counts[2];
    set_up(64);
    prompt_fill(&a, &p, 1, 3);
    prompt_make(&p, 1, 6);
    const lcs_client *record = lcs_client_of(b.at, b.slot);
    memset(&l, 0, sizeof l);
    l.head.capacity = LCI_UNCOUNTED;
    CHECK_EQ(lci_match1(b.h, p.keys, 6, NS, &l.head), 3);
    CHECK_EQ(l.head.capacity, 6); /* the rest is as ever */
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    l.head.capacity = LCI_UNCOUNTED;
    CHECK_EQ(lci_match(b.h, p.keys, offsets, 2, NS, &l.head, counts), 3);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(record->lookups, 3);
    CHECK_EQ(record->hit_pages + record->missed_pages, 0);
    CHECK_EQ(hits_of((uint32_t)l.pages[0]), a.h->ranks ? 0 : 2); /* where lists are ranked `use` counts */
    CHECK_EQ(lci_count_pages(b.h, 6, 4), LC_OK);
    CHECK_EQ(record->hit_pages, 4);
    CHECK_EQ(record->missed_pages, 2);
    tear_down();
}

static void lease_is_shortened(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 6);
    CHECK_EQ(match(&b, &p, &l), 6);
    CHECK_EQ(lci_shorten(b.h, &l.head, 9), LC_OK); /* nothing lies beyond */
    CHECK_EQ(l.head.held, 6);
    CHECK_EQ(lci_shorten(b.h, &l.head, 2), LC_OK);
    CHECK_EQ(l.head.held, 2);
    for (uint32_t i = 0; i < 6; i++) CHECK_EQ(pins_of(&b, (uint32_t)l.pages[i]), i < 2);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(pins_of(&b, (uint32_t)l.pages[0]), 0);
    tear_down();
}

static void lookups_of_those_who_may_not(void) {
    int32_t count;
    const int64_t offsets[] = {0, 3};
    set_up(64);
    prompt_fill(&a, &p, 1, 3);
    client r = reader_join(&s);
    CHECK_EQ(peek(&r, &p), 3);
    CHECK_EQ(lci_match1(r.h, p.keys, 3, NS, &l.head), LC_E_READONLY);
    CHECK_EQ(lci_count_pages(r.h, 3, 0), LC_E_READONLY);
    CHECK_EQ(lci_match(r.h, p.keys, offsets, 1, NS, &l.head, &count), LC_E_READONLY);
    client_forget(&r);
    lc_store(&lcs_header_of(a.at)->disabled, 1);
    CHECK_EQ(lci_peek1(b.h, p.keys, 3, NS), LC_E_DISABLED);
    CHECK_EQ(lci_peek(b.h, p.keys, offsets, 1, NS, &count), LC_E_DISABLED);
    CHECK_EQ(lci_match1(b.h, p.keys, 3, NS, &l.head), LC_E_DISABLED);
    CHECK_EQ(lci_match(b.h, p.keys, offsets, 1, NS, &l.head, &count), LC_E_DISABLED);
    CHECK_EQ(lci_reserve(b.h, &p.op, p.keys, 3, 0, p.page, p.status, BLOCKING), LC_E_DISABLED);
    lc_store(&lcs_header_of(a.at)->disabled, 0);
    CHECK_EQ(match(&b, &p, &l), 3);
    lcs_retire(s.base);
    CHECK_EQ(lci_peek1(b.h, p.keys, 3, NS), LC_E_RETIRED);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK); /* giving back is always possible */
    CHECK_EQ(pins_of(&a, (uint32_t)p.page[0]), 0);
    lc_store(&lcs_header_of(a.at)->retired, 0);
    lcs_attachment_close(b.at);
    CHECK_EQ(lci_release(b.h, &l.head), LC_E_CLOSED);
    CHECK_EQ(lci_shorten(b.h, &l.head, 0), LC_E_CLOSED);
    CHECK_EQ(lci_count_pages(b.h, 3, 0), LC_E_CLOSED);
    b.at->closed = 0;
    tear_down();
}

/* A chain with several records before the key's: the guess fails, the walk finds it. */
static void match_in_long_chains(void) {
    set_up(64);
    prompt_make(&p, 0, LC_CHAIN_MAX);
    for (uint32_t i = 0; i < p.n; i++) p.keys[i] = crowded_key(3, i);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), LC_CHAIN_MAX);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    CHECK_EQ(peek(&b, &p), LC_CHAIN_MAX);
    CHECK_EQ(match(&b, &p, &l), LC_CHAIN_MAX);
    for (uint32_t i = 0; i < p.n; i++) CHECK_EQ(l.pages[i], p.page[i]);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    tear_down();
}

const test lookup_tests[] = {
    TEST(match_finds_the_longest_prefix),
    TEST(match_pins_and_release_unpins),
    TEST(release_of_what_is_not_pinned_is_damage),
    TEST(match_of_pages_being_written_is_none),
    TEST(match_of_another_namespace_is_none),
    TEST(match_of_several_requests),
    TEST(lease_splits_into_runs),
    TEST(match_beyond_65535_pins_holds_nothing),
    TEST(match_counts_hits_and_lookups),
    TEST(uncounted_matches),
    TEST(lease_is_shortened),
    TEST(lookups_of_those_who_may_not),
    TEST(match_in_long_chains),
    END_OF_TESTS,
};
