/* The deepest position of several groups, in two segments: what it needs is pinned, whatever others
 * do in between. */
#include "pair.h"

#include <stdlib.h>

#define EVERYTHING INT64_MAX
#define TOKENS 4 /* of a page */

enum { KV, WINDOW, STATES, GROUPS };

static segment other;
static client c, d; /* of the other segment: d matches beside b */
static lease leases[LCI_GROUPS];
static lci_group groups[LCI_GROUPS];
static int32_t there[MAX_KEYS]; /* pages of the other segment, by their keys' numbers */
static int32_t limit;

static void fill_one(uint32_t i) {
    static prompt one;
    one.n = 1;
    one.keys[0] = p.keys[i];
    independent_prompts = true;
    CHECK_EQ(prompt_reserve(&c, &one, NS, 1), 1);
    independent_prompts = false;
    prompt_publish(&c, &one, 0);
    prompt_unpin(&c, &one);
    there[i] = one.page[0];
}

static void empty_leases(void) {
    memset(leases, 0, sizeof leases);
    for (uint32_t i = 0; i < LCI_GROUPS; i++) {
        groups[i].lease = &leases[i].head;
        leases[i].head.capacity = MAX_KEYS;
    }
}

/* Twenty pages of KV; the last twelve tokens of positions 8 and 16; states there and at 4, 12 and
 * 20. Windows and states are in one index, so a page may serve as both. */
static void set_up_groups(void) {
    set_up(64);
    other = index_make(64);
    c = client_join(&other);
    d = client_join(&other);
    prompt_fill(&a, &p, 1, 20);
    for (uint32_t i = 3; i < 20; i++)
        if (i % 4 == 3 || i / 8 * 8 + 5 <= i) fill_one(i);
    memset(groups, 0, sizeof groups);
    groups[KV] = (lci_group){.h = b.h, .align = EVERYTHING, .ns = NS, .parts = 1};
    groups[WINDOW] = (lci_group){.h = d.h, .align = 1, .back = 3 * TOKENS, .ns = NS, .parts = 1};
    groups[STATES] = (lci_group){.h = d.h, .align = 1, .back = 1, .ns = NS, .parts = 1};
    empty_leases();
}

static void tear_down_groups(void) {
    client_leave(&c);
    client_leave(&d);
    index_check(&other);
    segment_end(&other);
    tear_down();
}

static int match_groups(uint32_t n) {
    return lci_match_groups(groups, GROUPS, p.keys, n, TOKENS, 1, &limit);
}
static int peek_groups(uint32_t n) {
    return lci_peek_groups(groups, GROUPS, p.keys, n, TOKENS, 1, &limit);
}

static uint32_t pins_in(client *of) {
    uint32_t n = 0;
    for (uint32_t page = 0; page < of->h->page_count; page++)
        n += lc_load(lci_pin(of->h, of->slot, page));
    return n;
}

/* What is pinned is what this position needs, and the group's own. */
static void check_pinned(int pages) {
    for (int i = 0; i < GROUPS; i++) CHECK_EQ(groups[i].first + leases[i].head.held, pages);
    CHECK_EQ(pins_in(&b), leases[KV].head.held);
    CHECK_EQ(pins_in(&d), leases[WINDOW].head.held + leases[STATES].head.held);
    for (int i = 0; i < pages; i++) CHECK_EQ(leases[KV].pages[i], p.page[i]);
    for (uint32_t i = 0; i < leases[WINDOW].head.held; i++)
        CHECK_EQ(leases[WINDOW].pages[i], there[groups[WINDOW].first + i]);
    for (uint32_t i = 0; i < leases[STATES].head.held; i++)
        CHECK_EQ(leases[STATES].pages[i], there[groups[STATES].first + i]);
}

static void release_groups(void) {
    for (int i = 0; i < GROUPS; i++) CHECK_EQ(lci_release(groups[i].h, groups[i].lease), LC_OK);
    CHECK_EQ(pins_in(&b) + pins_in(&d), 0);
    empty_leases();
}

/* The group that is named refuses the next position, by itself. */
static void check_limit(uint32_t n, int pages) {
    CHECK_EQ(limit == -1, (uint32_t)pages == n);
    if (limit == -1) return;
    int32_t own;
    int alone = lci_peek_groups(&groups[limit], 1, p.keys, (uint32_t)pages + 1, TOKENS, 1, &own);
    CHECK(alone <= pages);
}

static void groups_pin_the_deepest_position(void) {
    static const struct { uint32_t n; int pages; } cases[] = {
        {20, 16}, {17, 16}, {16, 16}, {15, 8}, {8, 8}, {7, 0}, {4, 0}, {3, 0}, {0, 0},
    };
    set_up_groups();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK_EQ(peek_groups(cases[i].n), cases[i].pages);
        check_limit(cases[i].n, cases[i].pages);
        CHECK_EQ(match_groups(cases[i].n), cases[i].pages);
        check_limit(cases[i].n, cases[i].pages);
        check_pinned(cases[i].pages);
        release_groups();
    }
    tear_down_groups();
}

/* Each sequence as by a call of its own; a lease has the pages of one after the other. */
static void groups_of_many_sequences(void) {
    static const int64_t offsets[] = {0, 20, 20, 28};
    static int32_t found[2 + 2 * GROUPS][3];
    static lc_key keys[28];
    set_up_groups();
    memcpy(keys, p.keys, 20 * sizeof *keys);
    memcpy(keys + 20, p.keys, 8 * sizeof *keys);
    CHECK_EQ(lci_match_groups_many(groups, GROUPS, keys, offsets, 3, TOKENS, 1, *found), LC_OK);
    CHECK(found[0][0] == 16 && found[0][1] == 0 && found[0][2] == 8);
    CHECK(found[1][0] >= 0 && found[1][1] == -1 && found[1][2] == -1);
    for (int i = 0; i < GROUPS; i++) {
        for (int s = 0; s < 3; s++) CHECK_EQ(found[2 + i][s] + found[2 + GROUPS + i][s], found[0][s]);
        CHECK_EQ(leases[i].head.held, found[2 + GROUPS + i][0] + found[2 + GROUPS + i][2]);
    }
    for (int i = 0; i < 24; i++) CHECK_EQ(leases[KV].pages[i], p.page[i % 16]);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ(leases[WINDOW].pages[i], there[13 + i]);
        CHECK_EQ(leases[WINDOW].pages[3 + i], there[5 + i]);
    }
    CHECK(leases[STATES].pages[0] == there[15] && leases[STATES].pages[1] == there[7]);
    CHECK_EQ(pins_in(&b), 24);
    CHECK_EQ(pins_in(&d), 8);
    release_groups();
    leases[STATES].head.capacity = 1; /* room for that of the first sequence alone */
    CHECK_EQ(lci_match_groups_many(groups, GROUPS, keys, offsets, 3, TOKENS, 1, *found), LC_E_RANGE);
    CHECK_EQ(found[1][0], STATES);
    CHECK_EQ(pins_in(&b) + pins_in(&d), 0);
    for (int i = 0; i < GROUPS; i++) CHECK_EQ(leases[i].head.held, 0);
    empty_leases();
    CHECK_EQ(lci_match_groups_many(groups, GROUPS, keys, offsets, 0, TOKENS, 1, *found), LC_OK);
    CHECK_EQ(lci_match_groups_many(groups, LCI_GROUPS + 1, keys, offsets, 3, TOKENS, 1, *found),
             LC_E_RANGE);
    tear_down_groups();
}

static void group_in_steps(void) {
    set_up_groups();
    CHECK_EQ(lci_match_groups(&groups[STATES], 1, p.keys, 20, TOKENS, 8, &limit), 16);
    CHECK_EQ(lci_release(d.h, groups[STATES].lease), LC_OK);
    CHECK_EQ(lci_match_groups(&groups[STATES], 1, p.keys, 20, TOKENS, 3, &limit), 15);
    CHECK_EQ(limit, 0);
    CHECK_EQ(lci_release(d.h, groups[STATES].lease), LC_OK);
    CHECK_EQ(lci_match_groups(&groups[KV], 1, p.keys, 20, TOKENS, 7, &limit), 14);
    CHECK_EQ(limit, -1);
    CHECK_EQ(lci_release(b.h, groups[KV].lease), LC_OK);
    tear_down_groups();
}

/* A prefix that ends within a step: what is beyond it is not kept pinned. */
static void group_ends_within_a_step(void) {
    set_up_groups();
    memset(p.keys + 18, 1, sizeof *p.keys);
    CHECK_EQ(lci_match_groups(&groups[KV], 1, p.keys, 20, TOKENS, 5, &limit), 15);
    CHECK_EQ(limit, 0);
    CHECK_EQ(leases[KV].head.held, 15);
    CHECK_EQ(pins_in(&b), 15);
    CHECK_EQ(lci_release(b.h, groups[KV].lease), LC_OK);
    tear_down_groups();
}

/* More pages are missing than a match makes attempts: it looks before it pins. */
static void group_with_one_page_far_back(void) {
    set_up_groups();
    for (uint32_t i = 4; i < 20; i++) {
        lci_walk_op op = {0};
        CHECK(lci_drop(c.h, &p.keys[i], 1, 0, NS, &op, BLOCKING) >= 0);
    }
    CHECK_EQ(lci_match_groups(&groups[STATES], 1, p.keys, 20, TOKENS, 1, &limit), 4);
    CHECK_EQ(lci_release(d.h, groups[STATES].lease), LC_OK);
    tear_down_groups();
}

static void groups_of_those_who_may_not(void) {
    set_up_groups();
    client reader = reader_join(&other);
    CHECK_EQ(lci_match_groups(groups, 0, p.keys, 20, TOKENS, 1, &limit), LC_E_RANGE);
    CHECK_EQ(lci_match_groups(groups, LCI_GROUPS + 1, p.keys, 20, TOKENS, 1, &limit), LC_E_RANGE);
    CHECK_EQ(limit, -1);
    CHECK_EQ(lci_match_groups(groups, GROUPS, p.keys, 20, 0, 1, &limit), LC_E_RANGE);
    CHECK_EQ(lci_match_groups(groups, GROUPS, p.keys, 20, TOKENS, 0, &limit), LC_E_RANGE);
    CHECK_EQ(limit, -1);
    groups[STATES].align = 0;
    CHECK_EQ(match_groups(20), LC_E_RANGE);
    CHECK_EQ(limit, STATES);
    groups[STATES].align = 1;
    leases[WINDOW].head.capacity = 2;
    CHECK_EQ(match_groups(20), LC_E_RANGE);
    CHECK_EQ(limit, WINDOW);
    leases[WINDOW].head.capacity = MAX_KEYS;
    groups[STATES].h = reader.h;
    CHECK_EQ(match_groups(20), LC_E_READONLY);
    CHECK_EQ(limit, STATES);
    CHECK_EQ(peek_groups(20), 16);
    groups[STATES].h = d.h;
    lc_store(&d.at->leaving, 1);
    CHECK_EQ(match_groups(20), LC_E_CLOSED);
    CHECK_EQ(limit, WINDOW);
    lc_store(&d.at->leaving, 0);
    lc_store(&lcs_header_of(a.at)->disabled, 1);
    CHECK_EQ(match_groups(20), LC_E_DISABLED);
    CHECK_EQ(peek_groups(20), LC_E_DISABLED);
    CHECK_EQ(limit, KV);
    lc_store(&lcs_header_of(a.at)->disabled, 0);
    lc_store(lci_pin(d.h, d.slot, (uint32_t)there[15]), UINT16_MAX);
    CHECK_EQ(match_groups(20), LC_E_PINS);
    CHECK_EQ(limit, WINDOW);
    lc_store(lci_pin(d.h, d.slot, (uint32_t)there[15]), 0);
    CHECK_EQ(pins_in(&b) + pins_in(&d), 0);
    CHECK_EQ(match_groups(20), 16); /* every mutex was given back */
    release_groups();
    client_leave(&reader);
    tear_down_groups();
}

static void groups_count_one_lookup_each(void) {
    set_up_groups();
    CHECK_EQ(match_groups(20), 16);
    const lcs_client *kv = lcs_client_of(b.at, b.slot), *rest = lcs_client_of(d.at, d.slot);
    CHECK(lc_load(&kv->lookups) == 1 && lc_load(&rest->lookups) == 1);
    CHECK(lc_load(&kv->hit_pages) == 16 && lc_load(&rest->hit_pages) == 4);
    CHECK(lc_load(&kv->missed_pages) == 4 && lc_load(&rest->missed_pages) == 4);
    uint64_t used = lci_tick(&d.h->pages[there[15]]);
    CHECK_EQ(lci_tick(&d.h->pages[there[13]]), used); /* one request, one tick */
    CHECK(lci_tick(&d.h->pages[there[11]]) < used);
    CHECK(lci_tick(&b.h->pages[p.page[16]]) < lci_tick(&b.h->pages[p.page[15]]));
    release_groups();
    tear_down_groups();
}

static void groups_of_a_cleared_namespace(void) {
    set_up_groups();
    CHECK_EQ(THROUGH(lci_clear(c.h, NS, BLOCKING)), LC_OK);
    CHECK_EQ(peek_groups(20), 0);
    CHECK_EQ(limit, WINDOW);
    CHECK_EQ(match_groups(20), 0);
    CHECK_EQ(limit, WINDOW);
    check_pinned(0);
    tear_down_groups();
}

#ifdef LC_PAUSE_POINTS

static uint32_t turn, passing;
static void (*then)(void);

static void at_turn(int point) {
    (void)point;
    if (passing++ != turn) return;
    lc_pause_hook = NULL; /* what is done then has points of its own */
    then();
}

static void evict_last_state(void) {
    lci_walk_op op = {0};
    lci_drop(c.h, &p.keys[15], 1, 0, NS, &op, BLOCKING);
}
static void evict_window(void) {
    lci_walk_op op = {0};
    lci_drop(c.h, &p.keys[14], 1, 0, NS, &op, BLOCKING);
}
static void evict_kv(void) { evict(&a, 6); }
static void clear_them(void) { CHECK_EQ(THROUGH(lci_clear(c.h, NS, BLOCKING)), LC_OK); }
/* And no more: its pages are as they were. */
static void begin_clearing(void) { lc_store(&c.h->ns[lci_ns_id(NS)].state, LCI_NS_CLEARING); }
static void add_window(void) { fill_one(16); }
static void add_kv(void) { prompt_fill(&a, &q, 2, 20); }

/* Something happens at every instant of a match at which it could matter: the match yields a
 * position that was there before or is there after, and pins that and nothing else. */
static void groups_while_others_work(void) {
    static void (*const deeds[])(void) = {evict_last_state, evict_window, evict_kv, clear_them,
                                          begin_clearing, add_window, add_kv};
    for (size_t i = 0; i < sizeof deeds / sizeof *deeds; i++) {
        bool met = true;
        uint32_t before = 0, changed = 0;
        for (turn = 0; met; turn++) {
            set_up_groups();
            then = deeds[i];
            passing = 0;
            lc_pause_hook = at_turn;
            int found = match_groups(20);
            met = lc_pause_hook == NULL;
            lc_pause_hook = NULL;
            check_pinned(found);
            release_groups();
            int after = peek_groups(20);
            CHECK(found == 16 || found == after);
            if (met && then == begin_clearing) {
                CHECK_EQ(found, 0);
                lc_store(&c.h->ns[lci_ns_id(NS)].state, LCI_NS_NORMAL);
            }
            index_check(&s);
            index_check(&other);
            before += found == 16;
            changed += found != 16;
            tear_down_groups();
        }
        CHECK(before > 0);
        CHECK_EQ(changed > 0, then != add_kv);
    }
}

static void mark(const client *of, int32_t page, uint32_t state) {
    _Atomic uint32_t *word = &of->h->pages[page].word;
    lc_store(word, (lc_load(word) & ~LCI_STATE_MASK) | state);
}

static uint32_t marked, marks;
static int32_t pages_marked[LCI_GROUPS * 2];

/* An evictor marks a state whenever one is pinned, and stands. */
static void mark_pinned(int point) {
    if (point != LC_AT_PIN_COUNTED) return;
    marks++;
    if (marked == sizeof pages_marked / sizeof *pages_marked) return;
    int32_t page = leases[STATES].pages[0];
    pages_marked[marked++] = page;
    mark(&d, page, LCI_EVICTING);
}

static void unmark(void) {
    for (uint32_t i = 0; i < marked; i++) mark(&d, pages_marked[i], LCI_READY);
    marked = marks = 0;
}

static void groups_give_up_after_eight_attempts(void) {
    set_up_groups();
    for (uint32_t i = 0; i < 20; i++)
        if (lci_peek1(c.h, &p.keys[i], 1, NS) == 0) fill_one(i);
    lc_pause_hook = mark_pinned;
    lci_group two[] = {groups[KV], groups[STATES]};
    CHECK_EQ(lci_match_groups(two, 2, p.keys, 20, TOKENS, 1, &limit), 0);
    lc_pause_hook = NULL;
    CHECK_EQ(marks, 8);
    CHECK_EQ(limit, 1);
    CHECK_EQ(pins_in(&b) + pins_in(&d), 0);
    CHECK_EQ(lci_peek_groups(two, 2, p.keys, 20, TOKENS, 1, &limit), 12);
    unmark();
    CHECK_EQ(lci_match_groups(two, 2, p.keys, 20, TOKENS, 1, &limit), 20);
    CHECK_EQ(lci_release(b.h, two[0].lease), LC_OK);
    CHECK_EQ(lci_release(d.h, two[1].lease), LC_OK);
    tear_down_groups();
}

static void mark_both(int point) {
    if (point != LC_AT_PIN_COUNTED) return;
    mark(&a, p.page[1], LCI_EVICTING);
    mark(&c, there[3], LCI_EVICTING);
}

/* The shallower of what two groups have lost counts. */
static void two_groups_lose_pages_at_once(void) {
    set_up_groups();
    for (uint32_t i = 0; i < 3; i++) fill_one(i);
    lci_group two[] = {groups[KV], groups[KV]};
    two[1].h = d.h;
    two[1].lease = groups[STATES].lease;
    lc_pause_hook = mark_both;
    CHECK_EQ(lci_match_groups(two, 2, p.keys, 20, TOKENS, 1, &limit), 1);
    lc_pause_hook = NULL;
    CHECK_EQ(limit, 0);
    mark(&a, p.page[1], LCI_READY);
    mark(&c, there[3], LCI_READY);
    CHECK(pins_in(&b) == 1 && pins_in(&d) == 1);
    CHECK_EQ(lci_release(b.h, two[0].lease), LC_OK);
    CHECK_EQ(lci_release(d.h, two[1].lease), LC_OK);
    tear_down_groups();
}

static void one_group_is_confirmed_in_part(void) {
    set_up_groups();
    lci_group kv = groups[KV];
    turn = 0;
    passing = 0;
    then = evict_kv;
    lc_pause_hook = at_turn;
    CHECK_EQ(lci_match_groups(&kv, 1, p.keys, 20, TOKENS, 1, &limit), 14);
    CHECK_EQ(limit, 0);
    CHECK_EQ(pins_in(&b), 14);
    CHECK_EQ(lci_release(b.h, kv.lease), LC_OK);
    tear_down_groups();
}

#endif

const test group_tests[] = {
    TEST(groups_pin_the_deepest_position),
    TEST(groups_of_many_sequences),
    TEST(group_in_steps),
    TEST(group_ends_within_a_step),
    TEST(group_with_one_page_far_back),
    TEST(groups_of_those_who_may_not),
    TEST(groups_count_one_lookup_each),
    TEST(groups_of_a_cleared_namespace),
#ifdef LC_PAUSE_POINTS
    TEST(groups_while_others_work),
    TEST(groups_give_up_after_eight_attempts),
    TEST(two_groups_lose_pages_at_once),
    TEST(one_group_is_confirmed_in_part),
#endif
    END_OF_TESTS,
};
