/* Pinning by page number and generation, and giving back by page number. */
#include "pair.h"

static lease m;
static uint32_t gens[MAX_KEYS];

/* a pins what it tells b of. */
static void tell(uint32_t n) {
    uint32_t bad;
    prompt_fill(&a, &p, 1, n);
    CHECK_EQ(match(&a, &p, &m), n);
    CHECK_EQ(lci_keys_of(a.h, m.pages, n, NULL, gens, &bad), LC_OK);
    memset(&l, 0, sizeof l);
}

static uint32_t refused;
static int pin(uint32_t n) {
    refused = 99;
    return lci_pin_pages(b.h, m.pages, gens, n, &l.head, &refused);
}
static uint32_t own(const client *c, uint32_t page) { return lc_load(lci_pin(a.h, c->slot, page)); }
static void none_pinned(uint32_t n) {
    CHECK_EQ(l.head.held, 0);
    for (uint32_t i = 0; i < n; i++) CHECK_EQ(own(&b, (uint32_t)m.pages[i]), 0);
}

static void pages_are_pinned_by_number(void) {
    set_up(64);
    tell(10);
    const lcs_client *record = lcs_client_of(b.at, b.slot);
    uint64_t lookups = record->lookups, tick = lci_tick(&a.h->pages[m.pages[3]]);
    CHECK_EQ(pin(10), LC_OK);
    CHECK_EQ(l.head.held, 10);
    CHECK_EQ(l.head.capacity, 10);
    for (uint32_t i = 0; i < 10; i++) {
        CHECK_EQ(l.pages[i], m.pages[i]);
        CHECK_EQ(own(&b, (uint32_t)m.pages[i]), 1);
        CHECK(lc_load(&a.h->pages[m.pages[i]].pins) >> b.slot & 1);
    }
    CHECK_EQ(record->lookups, lookups + 1); /* for check: pins may be moving */
    CHECK_EQ(record->hit_pages + record->missed_pages, 0);
    CHECK(lci_tick(&a.h->pages[m.pages[3]]) > tick);
    CHECK_EQ(lci_release(a.h, &m.head), LC_OK);
    CHECK_EQ(evict(&a, 64), 0); /* b's own pins keep them */
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    none_pinned(10);
    CHECK_EQ(evict(&a, 64), 10);
    CHECK_EQ(lci_pin_pages(b.h, NULL, NULL, 0, &l.head, &refused), LC_OK);
    CHECK_EQ(l.head.held, 0);
    tear_down();
}

static void one_that_is_not_as_told_refuses_all(void) {
    set_up(64);
    tell(10);
    for (uint32_t i = 0; i < 10; i += 3) {
        gens[i] += 2; /* a life to come */
        CHECK_EQ(pin(10), LC_E_STALE);
        CHECK_EQ(refused, i);
        none_pinned(10);
        gens[i] -= 4; /* one that has passed */
        CHECK_EQ(pin(10), LC_E_STALE);
        CHECK_EQ(refused, i);
        gens[i] += 2;
        int32_t page = m.pages[i];
        m.pages[i] = 64;
        CHECK_EQ(pin(10), LC_E_RANGE);
        CHECK_EQ(refused, i);
        m.pages[i] = -1;
        CHECK_EQ(pin(10), LC_E_RANGE);
        m.pages[i] = page;
        none_pinned(10);
        lc_store(lci_pin(b.h, b.slot, (uint32_t)page), UINT16_MAX);
        CHECK_EQ(pin(10), LC_E_PINS);
        CHECK_EQ(refused, i);
        lc_store(lci_pin(b.h, b.slot, (uint32_t)page), 0);
        none_pinned(10);
    }
    CHECK_EQ(lci_release(a.h, &m.head), LC_OK);
    CHECK_EQ(evict(&a, 1), 1);
    prompt_fill(&a, &q, 2, 1); /* the last page, used again */
    CHECK_EQ(q.page[0], m.pages[9]);
    CHECK_EQ(pin(10), LC_E_STALE);
    CHECK_EQ(refused, 9);
    none_pinned(10);
    CHECK_EQ(pin(9), LC_OK);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    tear_down();
}

static void only_ready_pages_of_an_open_namespace(void) {
    set_up(64);
    prompt_make(&p, 1, 3);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 3);
    for (uint32_t i = 0; i < 3; i++) {
        m.pages[i] = p.page[i];
        gens[i] = lc_load(&a.h->pages[p.page[i]].gen);
    }
    memset(&l, 0, sizeof l);
    CHECK_EQ(pin(3), LC_E_STALE); /* being written */
    CHECK_EQ(refused, 0);
    none_pinned(3);
    prompt_publish(&a, &p, 0);
    CHECK_EQ(pin(3), LC_OK); /* before anybody has collected them */
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    lci_ns_ref other;
    lci_namespace *ns = &a.h->ns[NS & 0xff];
    CHECK_EQ(lci_namespace_open(a.h, "w", "t", 0, &other, BLOCKING), LC_OK);
    prompt_make(&q, 2, 1);
    CHECK_EQ(prompt_reserve(&a, &q, other, 1), 1);
    prompt_publish(&a, &q, 0);
    m.pages[3] = q.page[0];
    gens[3] = lc_load(&a.h->pages[q.page[0]].gen);
    CHECK_EQ(pin(4), LC_E_STALE); /* of another namespace than the first */
    CHECK_EQ(refused, 3);
    none_pinned(4);
    lc_store(&ns->state, LCI_NS_CLEARING); /* and its pages are not looked at yet */
    CHECK_EQ(pin(3), LC_E_STALE);
    CHECK_EQ(refused, 0);
    none_pinned(3);
    lc_store(&ns->state, LCI_NS_NORMAL);
    CHECK_EQ(lci_clear(a.h, NS, BLOCKING), LC_OK);
    CHECK_EQ(pin(3), LC_E_STALE);
    none_pinned(3);
    prompt_unpin(&a, &p);
    prompt_unpin(&a, &q);
    tear_down();
}

static void pinning_by_those_who_may_not(void) {
    set_up(64);
    tell(3);
    client r = reader_join(&s);
    CHECK_EQ(lci_pin_pages(r.h, m.pages, gens, 3, &l.head, &refused), LC_E_READONLY);
    client_forget(&r);
    lc_store(&lcs_header_of(a.at)->disabled, 1);
    CHECK_EQ(pin(3), LC_E_DISABLED);
    lc_store(&lcs_header_of(a.at)->disabled, 0);
    lc_store(&b.at->leaving, 1);
    CHECK_EQ(pin(3), LC_E_CLOSED);
    lc_store(&b.at->leaving, 0);
    CHECK_EQ(pin(3), LC_OK);
    lcs_retire(s.base);
    CHECK_EQ(pin(3), LC_E_RETIRED);
    CHECK_EQ(lci_release_pages(b.h, &l.head, m.pages, 1), 1); /* giving back is always possible */
    lc_store(&lcs_header_of(a.at)->retired, 0);
    lcs_attachment_close(b.at);
    CHECK_EQ(lci_release_pages(b.h, &l.head, m.pages, 3), LC_E_CLOSED);
    CHECK_EQ(l.head.held, 2);
    b.at->closed = 0;
    tear_down();
}

static void a_lease_is_given_back_by_number(void) {
    set_up(64);
    tell(8);
    CHECK_EQ(pin(8), LC_OK);
    CHECK_EQ(lci_release_pages(b.h, &l.head, (const int32_t[]){m.pages[1], m.pages[2]}, 2), 2);
    CHECK_EQ(l.head.held, 6);
    for (uint32_t i = 0; i < 8; i++) CHECK_EQ(own(&b, (uint32_t)m.pages[i]), i != 1 && i != 2);
    CHECK_EQ(l.pages[0], m.pages[0]);
    CHECK_EQ(l.pages[1], m.pages[3]); /* the rest in its order */
    CHECK_EQ(l.pages[5], m.pages[7]);
    /* Given back before, twice in one call, of no lease, and no page at all. */
    CHECK_EQ(lci_release_pages(b.h, &l.head, (const int32_t[]){m.pages[1]}, 1), 0);
    CHECK_EQ(lci_release_pages(b.h, &l.head,
                               (const int32_t[]){m.pages[7], m.pages[0], m.pages[7], 63, -1, 64}, 6), 2);
    CHECK_EQ(l.head.held, 4);
    CHECK_EQ(l.pages[0], m.pages[3]);
    CHECK_EQ(own(&b, 63), 0);
    CHECK_EQ(lci_release_pages(b.h, &l.head, m.pages, 8), 4);
    CHECK_EQ(l.head.held, 0);
    none_pinned(8);
    CHECK_EQ(lci_release_pages(b.h, &l.head, m.pages, 8), 0);
    CHECK_EQ(own(&a, (uint32_t)m.pages[0]), 1);
    tear_down();
}

static void each_pin_of_a_page_is_given_back_once(void) {
    set_up(64);
    tell(2);
    m.pages[2] = m.pages[0];
    gens[2] = gens[0];
    CHECK_EQ(pin(3), LC_OK); /* one page twice */
    CHECK_EQ(own(&b, (uint32_t)m.pages[0]), 2);
    CHECK_EQ(lci_release_pages(b.h, &l.head, m.pages, 1), 1);
    CHECK_EQ(own(&b, (uint32_t)m.pages[0]), 1);
    CHECK_EQ(l.pages[0], m.pages[1]);
    lc_store(lci_pin(b.h, b.slot, (uint32_t)m.pages[1]), 0);
    CHECK_EQ(lci_release_pages(b.h, &l.head, m.pages, 2), LC_E_CORRUPT); /* a count that is not there */
    CHECK_EQ(l.head.held, 0);
    none_pinned(2);
    tear_down();
}

static void generations_are_told_of_what_we_pin(void) {
    uint32_t bad = 7, told[3];
    lc_key keys[3];
    set_up(64);
    tell(3);
    CHECK_EQ(lci_keys_of(b.h, m.pages, 3, NULL, told, &bad), LC_E_OWNER);
    CHECK_EQ(bad, 0);
    CHECK_EQ(lci_keys_of(a.h, m.pages, 3, keys, told, &bad), LC_OK);
    for (uint32_t i = 0; i < 3; i++) {
        CHECK_EQ(told[i], lc_load(&a.h->pages[m.pages[i]].gen));
        CHECK_EQ(keys[i].lo, p.keys[i].lo);
    }
    tear_down();
}

#ifdef LC_PAUSE_POINTS
static uint32_t freed;
static void evict_all(void) { freed = evict(&a, 64); }
static void clear_it(void) { CHECK_EQ(lci_clear(a.h, NS, BLOCKING), LC_OK); }

/* Who evicts before the pin is counted gets the page; who comes later does not. */
static void race_of_pinning_by_number_and_evicting(void) {
    static const int points[] = {LC_AT_PIN_COUNTED, LC_AT_PIN_FENCED};
    for (int i = 0; i < 2; i++) {
        set_up(64);
        tell(3);
        CHECK_EQ(lci_release(a.h, &m.head), LC_OK);
        play(points[i], evict_all);
        CHECK_EQ(pin(3), LC_OK);
        check_played();
        CHECK_EQ(freed, 0);
        index_check(&s);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
        tear_down();
    }
}

static int pinned;
static void pin_it(void) { pinned = pin(3); }
static void race_of_evicting_and_pinning_by_number(void) {
    static const int points[] = {LC_AT_EVICT_CHOSEN, LC_AT_EVICT_MARKED, LC_AT_EVICT_FENCED,
                                 LC_AT_EVICT_UNLINKED};
    for (int i = 0; i < 4; i++) {
        set_up(64);
        tell(3);
        CHECK_EQ(lci_release(a.h, &m.head), LC_OK);
        play(points[i], pin_it);
        freed = evict(&a, 3);
        check_played();
        CHECK_EQ(pinned, i == 0 ? LC_OK : LC_E_STALE);
        CHECK_EQ(freed, i == 0 ? 0 : 3);
        CHECK_EQ(own(&b, (uint32_t)m.pages[0]), i == 0);
        index_check(&s);
        CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
        tear_down();
    }
}

static void race_of_pinning_by_number_and_clearing(void) {
    static const int points[] = {LC_AT_PIN_COUNTED, LC_AT_PIN_FENCED};
    for (int i = 0; i < 2; i++) {
        set_up(64);
        tell(3);
        CHECK_EQ(lci_release(a.h, &m.head), LC_OK);
        play(points[i], clear_it);
        CHECK_EQ(pin(3), LC_E_STALE);
        check_played();
        none_pinned(3);
        tear_down();
    }
}

/* b is told of a life that the page has not come to yet. The page comes to it after b has looked, and
 * its bits are reset: a pin that was counted before would stand without its bit. */
static uint32_t used_again;
static void use_again(void) {
    uint32_t page = (uint32_t)m.pages[0];
    lc_store(lci_pin(b.h, b.slot, page), 0); /* the evictor had looked before */
    CHECK_EQ(evict(&a, 64), 1);
    prompt_fill(&a, &q, 2, 1);
    CHECK_EQ(q.page[0], page);
    lc_store(lci_pin(b.h, b.slot, page), 1);
    used_again = 1;
}
static void race_of_pinning_a_life_to_come(void) {
    set_up(64);
    tell(1);
    uint32_t now = gens[0];
    CHECK_EQ(lci_release(a.h, &m.head), LC_OK);
    play(LC_AT_PIN_COUNTED, use_again);
    CHECK_EQ(pin(1), LC_E_STALE); /* as told: the page was used again meanwhile */
    check_played();
    none_pinned(1);
    gens[0] = lc_load(&a.h->pages[m.pages[0]].gen);
    CHECK(gens[0] != now);
    gens[0] += gens[0] - now;
    used_again = 0;
    p = q;
    play(LC_AT_PIN_COUNTED, use_again);
    CHECK_EQ(pin(1), LC_E_STALE);
    CHECK_EQ(used_again, 0); /* it was refused before it had counted */
    none_pinned(1);
    lc_pause_hook = NULL;
    tear_down();
}
#endif

const test number_tests[] = {
    TEST(pages_are_pinned_by_number),
    TEST(one_that_is_not_as_told_refuses_all),
    TEST(only_ready_pages_of_an_open_namespace),
    TEST(pinning_by_those_who_may_not),
    TEST(a_lease_is_given_back_by_number),
    TEST(each_pin_of_a_page_is_given_back_once),
    TEST(generations_are_told_of_what_we_pin),
#ifdef LC_PAUSE_POINTS
    TEST(race_of_pinning_by_number_and_evicting),
    TEST(race_of_evicting_and_pinning_by_number),
    TEST(race_of_pinning_by_number_and_clearing),
    TEST(race_of_pinning_a_life_to_come),
#endif
    END_OF_TESTS,
};
