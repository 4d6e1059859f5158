/* Independent pages: they go in the order of their last use, whatever hangs on them, beside pages of
 * prefixes; and looking up each key for itself. */
#include "calls.h"
#include "pair.h"

static int32_t counts[MAX_KEYS];

/* A page under key i of this run, hung on that of key i - 1: as a checkpoint is reserved. */
static void put_under(uint32_t number, uint32_t i, lci_ns_ref ns) {
    prompt_make(&q, 0, i ? 2 : 1);
    for (uint32_t k = 0; k < q.n; k++) q.keys[k] = prompt_key(number, i + 1 - q.n + k);
    q.op = (lci_reserve_op){.shards = 1, .ns = ns, .run = independent_prompts};
    CHECK_EQ(lci_reserve(a.h, &q.op, q.keys, q.n, q.n - 1, q.page, q.status, BLOCKING), 1);
    q.fresh[0] = q.page[0];
    q.made = 1;
    prompt_publish(&a, &q, 0);
    CHECK_EQ(lci_unreserve(a.h, &q.op, q.page, q.status, 1), LC_OK);
}

/* A path of n pages, each hung on the one before and last used a tick after it, the last two at
 * once. */
static void put_path(uint32_t number, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) put_under(number, i, NS);
    prompt_make(&p, number, n);
    collect(&a);
}

static uint32_t page_of(uint32_t i) {
    uint32_t length;
    return lc_dict_look(&a.h->dict, p.keys[i].lo, p.keys[i].hi, &length);
}

/* What hangs on each key of `p`, from the first on, -1 for one that is gone. */
static void check_children(const int32_t *expected) {
    CHECK_EQ(lci_children(b.h, p.keys, p.n, NS, counts), LC_OK);
    for (uint32_t i = 0; i < p.n; i++) CHECK_EQ(counts[i], expected[i]);
    index_check(&s);
}
#define CHILDREN(...) check_children((const int32_t[]){__VA_ARGS__})

/* ------------------------------------------------------------------ eviction */

static void independent_goes_by_last_use(void) {
    set_up_independent(64);
    put_path(1, 6);
    CHECK_EQ(index_counts(&a).queued, 6);
    CHILDREN(1, 1, 1, 1, 1, 0);
    CHECK_EQ(evict(&a, 1), 1);
    CHILDREN(-1, 1, 1, 1, 1, 0);
    CHECK_EQ(lci_match1(b.h, &p.keys[1], 1, NS, &l.head), 1); /* used since */
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(evict(&a, 2), 2);
    CHILDREN(-1, 0, -1, -1, 1, 0);
    CHECK_EQ(index_counts(&a).queued, 3);
    CHECK_EQ(evict(&a, 64), 3);
    CHECK_EQ(index_counts(&a).queued, 0);
    tear_down();
}

/* Pages of one reserve share a tick, and a parent does not follow its child: one is asked for. */
static void independent_does_not_follow(void) {
    set_up_independent(64);
    prompt_fill(&a, &p, 1, 5);
    put_path(2, 1);
    CHECK_EQ(evict(&a, 3), 3);
    CHECK_EQ(index_counts(&a).queued, 3);
    index_check(&s);
    CHECK_EQ(evict(&a, 2), 2);
    prompt_make(&p, 2, 1);
    CHECK_EQ(peek(&b, &p), 1);
    tear_down();
}

/* Its number is used for another key, then its own key comes back elsewhere: what had hung on it
 * hangs on neither. */
static void independent_children_of_the_gone_stay_alone(void) {
    set_up_independent(3);
    put_path(1, 3);
    uint32_t first = page_of(0);
    put_under(7, 0, NS);
    CHECK_EQ(page_of(0), LC_NIL);
    uint32_t length;
    CHECK_EQ(lc_dict_look(&a.h->dict, prompt_key(7, 0).lo, prompt_key(7, 0).hi, &length), first);
    CHECK_EQ(lci_parent(a.h, &a.h->pages[page_of(1)]), LC_NIL);
    CHILDREN(-1, 1, 0);
    lc_key other = prompt_key(7, 0);
    CHECK_EQ(lci_drop(a.h, &other, 1, 0, NS, &(lci_walk_op){0}, BLOCKING), LC_OK);
    put_under(1, 0, NS);
    CHILDREN(0, 1, 0);
    CHECK_EQ(evict(&a, 1), 1); /* the second: leaving takes nothing from the first */
    CHILDREN(0, -1, 0);
    tear_down();
}

/* A childless page that lost its parent hangs on the new one when both are reserved together. */
static void independent_readopts_when_it_is_told(void) {
    set_up_independent(8);
    put_path(1, 2);
    CHECK_EQ(evict(&a, 1), 1);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 1);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    CHILDREN(1, 0);
    tear_down();
}

/* A tenant at its quota pays with what it used longest ago, parents and children in one batch. */
static void independent_quota(void) {
    lci_ns_ref ns;
    set_up_independent(64);
    CHECK_EQ(lci_namespace_open(a.h, "w", "t", 6, &ns, BLOCKING), LC_OK);
    for (uint32_t i = 0; i < 6; i++) put_under(1, i, ns);
    collect(&a);
    prompt_make(&p, 2, 4);
    CHECK_EQ(prompt_reserve(&a, &p, ns, 1), 4);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    collect(&a);
    for (uint32_t i = 0; i < 6; i++) {
        lc_key key = prompt_key(1, i);
        CHECK_EQ(lci_peek1(b.h, &key, 1, ns), i >= 4);
    }
    CHECK_EQ(index_counts(&a).queued, 6);
    tear_down();
}

#ifdef LC_PAUSE_POINTS
static uint32_t wanted; /* a bit for each key of `p` */
static uint32_t number_of[8];

static void pin_wanted(void) {
    for (uint32_t i = 0; i < 8; i++)
        if (wanted >> i & 1) CHECK_EQ(lci_pin_one(b.h, number_of[i]), LC_OK);
}

static void pin_when_marked(uint32_t which) {
    wanted = which;
    for (uint32_t i = 0; i < p.n; i++) number_of[i] = page_of(i);
    play(LC_AT_EVICT_MARKED, pin_wanted);
}

static void let_go(void) {
    check_played();
    for (uint32_t i = 0; i < p.n; i++) lc_store(lci_pin(b.h, b.slot, number_of[i]), 0);
}

/* Somebody comes for some of three that are marked, parents and children of each other: they stay,
 * queued, and what hung on one of them hangs on if it stays as well. The fourth is kept. */
static void independent_stays_whoever_is_pinned(void) {
    for (uint32_t mask = 1; mask < 8; mask++) {
        int32_t left[4] = {0};
        uint32_t stay = mask | 8, n = 0;
        set_up_independent(64);
        put_path(1, 4);
        CHECK_EQ(THROUGH(lci_keep(a.h, &p.keys[3], 1, NS, 1, &(lci_walk_op){0}, BLOCKING)), LC_OK);
        for (uint32_t i = 0; i < 4; i++)
            left[i] = stay >> i & 1 ? (int32_t)(stay >> (i + 1) & 1) : -1;
        for (uint32_t i = 0; i < 3; i++) n += mask >> i & 1;
        pin_when_marked(mask);
        CHECK_EQ(evict(&a, 4), 3 - n);
        check_children(left);
        CHECK_EQ(index_counts(&a).queued, n);
        let_go();
        CHECK_EQ(evict(&a, 64), n);
        tear_down();
    }
}

/* The second of four comes back to a parent that was not chosen. */
static void independent_comes_back_to_its_parent(void) {
    lci_walk_op op = {0};
    set_up_independent(64);
    put_path(1, 4);
    pin_when_marked(2);
    CHECK_EQ(lci_drop(a.h, p.keys, 2, 1, NS, &op, BLOCKING), LC_OK);
    CHECK_EQ(op.pages, 0);
    CHILDREN(1, 1, 1, 0);
    CHECK_EQ(index_counts(&a).queued, 4);
    let_go();
    tear_down();
}
#endif

/* ------------------------------------------------------------------ what an engine decides */

static uint32_t drop(uint32_t n, uint32_t start) {
    lci_walk_op op = {0};
    CHECK_EQ(lci_drop(a.h, p.keys, n, start, NS, &op, BLOCKING), LC_OK);
    CHECK_EQ(op.ended, 1);
    return op.pages;
}

static void independent_drops_from_the_middle(void) {
    set_up_independent(64);
    put_path(1, 6);
    CHECK_EQ(drop(3, 2), 1);
    CHILDREN(1, 0, -1, 1, 1, 0);
    CHECK_EQ(drop(5, 3), 2);
    CHILDREN(1, 0, -1, -1, -1, 0);
    CHECK_EQ(lci_match1(b.h, p.keys, 1, NS, &l.head), 1);
    CHECK_EQ(drop(2, 0), 1); /* up to one that is pinned */
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHILDREN(0, -1, -1, -1, -1, 0);
    tear_down();
}

static uint32_t discarded(void) {
    CHECK_EQ(discard(&a), LC_OK);
    return giving.freed;
}

/* In order, each once, though the listed ones are parents of each other; and those that go leave
 * what hangs on them. */
static void independent_lists_and_discards_the_oldest(void) {
    set_up_independent(64);
    put_path(1, 5);
    CHECK_EQ(oldest(&a, 3, 1), 3);
    for (uint32_t i = 0; i < 3; i++) CHECK_EQ(list.pages[i], page_of(i));
    CHECK_EQ(parents[0], LC_NIL);
    CHECK_EQ(parents[2], list.pages[1]);
    index_check(&s);
    CHECK_EQ(discarded(), 3);
    CHILDREN(-1, -1, -1, 1, 0);
    CHECK_EQ(oldest(&a, 8, 1), 2);
    CHECK_EQ(lci_release(a.h, &list.head), LC_OK);
    CHECK_EQ(evict(&a, 1), 1); /* they were put back in their order */
    CHILDREN(-1, -1, -1, -1, 0);
    tear_down();
}

/* One reserve, one tick: a parent is listed in its own turn, not a second time behind its child. */
static void independent_lists_a_prompt_once(void) {
    set_up_independent(64);
    prompt_fill(&a, &p, 1, 10);
    CHECK_EQ(oldest(&a, 64, 1), 10);
    for (uint32_t i = 0; i < 10; i++)
        for (uint32_t k = 0; k < i; k++) CHECK(list.pages[i] != list.pages[k]);
    index_check(&s);
    CHECK_EQ(discarded(), 10);
    tear_down();
}

/* Of pages with one tick the next is the one that stands there, not a parent that stands behind. */
static void independent_lists_by_the_queue_alone(void) {
    set_up_independent(64);
    prompt_fill(&a, &p, 1, 3);
    collect(&a);
    for (int kept = 1; kept >= 0; kept--) /* queued again: behind the others */
        CHECK_EQ(THROUGH(lci_keep(a.h, p.keys, 1, NS, kept, &(lci_walk_op){0}, BLOCKING)), LC_OK);
    CHECK_EQ(oldest(&a, 2, 1), 2);
    CHECK_EQ(list.pages[0], p.page[1]);
    CHECK_EQ(list.pages[1], p.page[2]);
    CHECK_EQ(lci_release(a.h, &list.head), LC_OK);
    tear_down();
}

static void independent_keeps(void) {
    lci_walk_op op = {0};
    set_up_independent(64);
    put_path(1, 4);
    CHECK_EQ(THROUGH(lci_keep(a.h, p.keys, 2, NS, 1, &op, BLOCKING)), LC_OK);
    CHECK_EQ(index_counts(&a).queued, 2);
    CHECK_EQ(evict(&a, 64), 2);
    CHILDREN(1, 0, -1, -1);
    op = (lci_walk_op){0};
    CHECK_EQ(THROUGH(lci_keep(a.h, p.keys, 1, NS, 0, &op, BLOCKING)), LC_OK);
    CHECK_EQ(evict(&a, 64), 1); /* though a kept one hangs on it */
    CHILDREN(-1, 0, -1, -1);
    tear_down();
}

/* A page is given its name behind one, loses it again, and is cleared: parents stay queued. */
static void independent_names_and_clears(void) {
    int64_t offsets[2] = {0, 2}, starts[1] = {1};
    lci_held_op op = {.done = 0};
    int32_t page, out;
    uint32_t gen;
    uint8_t status;
    set_up_independent(8);
    put_path(1, 1);
    prompt_make(&p, 1, 2);
    CHECK_EQ(THROUGH(lci_allocate(a.h, &op, &page, &gen, 1, BLOCKING)), LC_OK);
    op = (lci_held_op){.ns = NS, .flags = LCI_NAME_INDEPENDENT};
    CHECK_EQ(lci_name(a.h, &op, p.keys, offsets, starts, 1, &page, 1, &out, &status, BLOCKING),
             LC_OK);
    CHECK_EQ(status, LCI_NEW);
    CHILDREN(1, 0);
    CHECK_EQ(index_counts(&a).queued, 2);
    op = (lci_held_op){.done = 0};
    CHECK_EQ(lci_unname(a.h, &op, &page, 1, BLOCKING), LC_OK);
    CHILDREN(0, -1);
    CHECK_EQ(THROUGH(lci_free_held(a.h, &op, &page, NULL, 0, BLOCKING)), LC_OK);
    put_path(2, 3);
    CHECK_EQ(THROUGH(lci_clear(a.h, NS, BLOCKING)), LC_OK);
    CHECK_EQ(index_counts(&a).queued, 0);
    tear_down();
}

/* ------------------------------------------------------------------ looking */

static void deepest_and_children(void) {
    int64_t offsets[4] = {0, 0, 2, 40};
    lci_ns_ref ns;
    set_up_independent(64);
    put_path(1, 3);
    prompt_make(&p, 1, 40);
    CHECK_EQ(lci_deepest1(b.h, p.keys, 40, NS), 3);
    CHECK_EQ(lci_deepest1(b.h, p.keys, 2, NS), 2);
    CHECK_EQ(lci_deepest1(b.h, p.keys, 0, NS), 0);
    CHECK_EQ(lci_deepest1(b.h, p.keys + 3, 37, NS), 0);
    CHECK_EQ(drop(2, 1), 1);
    CHECK_EQ(lci_deepest1(b.h, p.keys, 40, NS), 3); /* each for itself */
    CHECK_EQ(lci_deepest1(b.h, p.keys, 2, NS), 1);
    CHECK_EQ(lci_deepest(b.h, p.keys, offsets, 3, NS, counts), LC_OK);
    CHECK_EQ(counts[0], 0);
    CHECK_EQ(counts[1], 1);
    CHECK_EQ(counts[2], 1);
    client reader = reader_join(&s);
    CHECK_EQ(lci_deepest1(reader.h, p.keys, 40, NS), 3);
    CHECK_EQ(lci_children(reader.h, p.keys, 40, NS, counts), LC_OK);
    client_forget(&reader);
    CHECK_EQ(lci_namespace_open(a.h, "w", "t", 0, &ns, BLOCKING), LC_OK);
    CHECK_EQ(lci_deepest1(b.h, p.keys, 40, ns), 0);
    CHECK_EQ(THROUGH(lci_clear(a.h, ns, BLOCKING)), LC_OK);
    CHECK_EQ(lci_children(b.h, p.keys, 40, ns, counts), LC_OK);
    for (uint32_t i = 0; i < 40; i++) CHECK_EQ(counts[i], -1);
    tear_down();
}

/* What is being written counts for what it hangs on and is not found. A disabled one is refused. */
static void deepest_finds_what_is_ready(void) {
    set_up_independent(64);
    put_path(1, 1);
    prompt_make(&p, 1, 2);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 1);
    CHECK_EQ(lci_deepest1(b.h, p.keys, 2, NS), 1);
    CHILDREN(1, -1);
    prompt_publish(&a, &p, 0);
    CHECK_EQ(lci_deepest1(b.h, p.keys, 2, NS), 2);
    prompt_unpin(&a, &p);
    lc_store(&lcs_header_of(a.at)->disabled, 1);
    CHECK_EQ(lci_deepest1(b.h, p.keys, 2, NS), LC_E_DISABLED);
    CHECK_EQ(lci_deepest(b.h, p.keys, (int64_t[]){0, 2}, 1, NS, counts), LC_E_DISABLED);
    CHECK_EQ(lci_children(b.h, p.keys, 2, NS, counts), LC_E_DISABLED);
    lc_store(&lcs_header_of(a.at)->disabled, 0);
    tear_down();
}

#ifdef LC_PAUSE_POINTS
/* Both go, and are used for other keys, one hanging on the other. */
static void use_for_another(void) {
    prompt other;
    CHECK_EQ(evict(&a, 64), 2);
    prompt_fill(&a, &other, 9, 2);
}

/* The page has been found, its children have been counted, and they are another's. */
static void children_of_another_page_are_not_told(void) {
    set_up_independent(2);
    put_path(1, 2);
    play_after(LC_AT_WALK_NEXT, 1, use_for_another);
    CHECK_EQ(lci_children(b.h, p.keys, 1, NS, counts), LC_OK);
    check_played();
    CHECK_EQ(counts[0], -1);
    tear_down();
}

static void clear_all(void) { CHECK_EQ(THROUGH(lci_clear(a.h, NS, BLOCKING)), LC_OK); }

/* A page is found that a clear has doomed by the time of the answer. */
static void a_clear_wins_over_looking(void) {
    set_up_independent(8);
    put_path(1, 2);
    play(LC_AT_WALK_NEXT, clear_all);
    CHECK_EQ(lci_deepest1(b.h, p.keys, 2, NS), 0);
    check_played();
    tear_down();
    set_up_independent(8);
    put_path(1, 2);
    play(LC_AT_WALK_NEXT, clear_all);
    check_children((const int32_t[]){-1, -1});
    check_played();
    tear_down();
}
#endif

/* A count that cannot be is cut off; so no damage gives a number that means something else. */
static void children_of_damage(void) {
    set_up_independent(64);
    put_path(1, 1);
    lc_store(&a.h->pages[page_of(0)].children, UINT32_MAX);
    CHECK_EQ(lci_children(b.h, p.keys, 1, NS, counts), LC_OK);
    CHECK_EQ(counts[0], 64);
    CHECK_EQ(index_broken(&s), 34);
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
    CHILDREN(0);
    tear_down();
}

/* ------------------------------------------------------------------ the flag */

static uint32_t word_of(uint32_t i) { return lc_load(&a.h->pages[page_of(i)].word); }
static uint32_t parent_of(uint32_t i) { return lci_parent(a.h, &a.h->pages[page_of(i)]); }

/* Reserve, publish and unpin what is missing of n keys: pages of one kind. */
static void add(uint32_t number, uint32_t n, bool independent) {
    independent_prompts = independent;
    prompt_make(&p, number, n);
    CHECK(prompt_reserve(&a, &p, NS, 1) >= 0);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    collect(&a);
}

static void check_kinds(const char *expected) { /* i: independent, p: of a prefix, -: none */
    for (uint32_t i = 0; expected[i]; i++) {
        CHECK_EQ(page_of(i) == LC_NIL, expected[i] == '-');
        if (page_of(i) != LC_NIL) CHECK_EQ((word_of(i) & LCI_INDEPENDENT) != 0, expected[i] == 'i');
    }
    index_check(&s);
}

/* Pages of both kinds in one index, in one order of eviction: a prefix from its end, the others one by
 * one. */
static void kinds_live_together(void) {
    set_up_lru(64);
    put_path(1, 2);
    prompt_fill(&a, &p, 2, 5);
    independent_prompts = true;
    put_path(3, 4);
    CHECK_EQ(index_counts(&a).queued, 1 + 1 + 4);
    CHECK_EQ(evict(&a, 5), 5); /* the path and the end of the prompt, which is older than the rest */
    prompt_make(&p, 2, 5);
    CHILDREN(1, 0, -1, -1, -1);
    check_kinds("pp---");
    CHECK_EQ(match(&b, &p, &l), 2);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(evict(&a, 3), 3);
    CHILDREN(1, 0, -1, -1, -1);
    prompt_make(&p, 3, 4);
    CHILDREN(-1, -1, -1, 0);
    check_kinds("---i");
    CHECK_EQ(index_counts(&a).queued, 2);
    CHECK_EQ(evict(&a, 64), 3);
    tear_down();
}

/* A page that comes behind one of the other kind has no parent, and holds nothing back. */
static void a_page_hangs_on_its_kind_alone(void) {
    for (int first = 0; first < 2; first++) {
        set_up(64);
        add(1, 3, first);
        uint32_t queued = index_counts(&a).queued;
        add(1, 5, !first);
        check_kinds(first ? "iiipp" : "pppii"); /* what is there stays what it is */
        CHECK_EQ(parent_of(3), LC_NIL);
        CHECK_EQ(parent_of(4), page_of(3));
        CHILDREN(1, 1, 0, 1, 0);
        CHECK_EQ(index_counts(&a).queued, queued + (first ? 1 : 2));
        tear_down();
    }
}

/* One that lost its parent hangs on the next one only if that is of its kind. */
static void a_parent_of_another_kind_adopts_nothing(void) {
    set_up(64);
    add(1, 2, true);
    CHECK_EQ(drop(1, 0), 1);
    add(1, 2, false);
    check_kinds("pi");
    CHILDREN(0, 0);
    CHECK_EQ(index_counts(&a).queued, 2);
    CHECK_EQ(drop(1, 0), 1);
    add(1, 2, true);
    CHILDREN(1, 0);
    tear_down();
}

static void names_are_of_a_kind(void) {
    set_up(64);
    add(1, 2, false);
    prompt_make(&p, 1, 5);
    CHECK_EQ(allocate(&a, 2), LC_OK);
    prompt_make(&q, 1, 4);
    CHECK_EQ(name(&a, &q, 2, LCI_NAME_INDEPENDENT), LC_OK);
    check_kinds("ppii-");
    CHILDREN(1, 0, 1, 0, -1);
    CHECK_EQ(unname(&a, pages, 1), LC_OK);
    q.n = 3;
    CHECK_EQ(name(&a, &q, 2, 0), LC_OK);
    check_kinds("pppi-");
    CHILDREN(1, 1, 0, 0, -1);
    CHECK_EQ(lci_unpin(a.h, pages, 2, &(uint32_t){0}), LC_OK);
    tear_down();
}

/* The flag goes with the key: a page that is doomed, or held, or free, has none. */
static void the_flag_goes_with_the_key(void) {
    set_up(64);
    add(1, 3, true);
    CHECK_EQ(match(&b, &p, &l), 3);
    uint32_t page = page_of(0), gone = page_of(1);
    CHECK_EQ(THROUGH(lci_clear(a.h, NS, BLOCKING)), LC_OK);
    CHECK_EQ(lc_load(&a.h->pages[page].word) & (LCI_INDEPENDENT | LCI_STATE_MASK), LCI_DOOMED);
    index_check(&s);
    break_word(&a.h->pages[gone].word, lc_load(&a.h->pages[gone].word) | LCI_INDEPENDENT);
    CHECK_EQ(index_broken(&s), 66);
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
    index_check(&s);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    tear_down();
}

/* While it is written, and published with others' shards to come, and collected, kept and let go, and
 * made whole by whoever comes after a death: it is what it was made as. */
static void the_flag_stays(void) {
    set_up(64);
    independent_prompts = true;
    prompt_make(&p, 1, 3);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 2), 3);
    check_kinds("iii");
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    check_kinds("iii");
    prompt_publish(&a, &p, 0);
    prompt_publish(&a, &p, 1);
    check_kinds("iii");
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK); /* ready, and its reservation not collected */
    check_kinds("iii");
    collect(&a);
    prompt_unpin(&a, &p);
    for (int kept = 1; kept >= 0; kept--) {
        CHECK_EQ(THROUGH(lci_keep(a.h, p.keys, 2, NS, kept, &(lci_walk_op){0}, BLOCKING)), LC_OK);
        check_kinds("iii");
    }
    CHECK_EQ(THROUGH(lci_keep(a.h, p.keys, 1, NS, 1, &(lci_walk_op){0}, BLOCKING)), LC_OK);
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    check_kinds("iii");
    CHECK_EQ(word_of(0) & LCI_KEPT, LCI_KEPT);
    CHILDREN(1, 1, 0);
    tear_down();
}

/* All shards are done, and nobody has made the pages ready: the next holder does. */
static void a_collected_page_stays_independent(void) {
    set_up(64);
    independent_prompts = true;
    prompt_make(&p, 1, 2);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 2);
    CHECK_EQ(lci_publish(a.h, p.op.rid, p.op.gen, 0, p.fresh, 0), 1);
    collect(&b);
    check_kinds("ii");
    CHECK_EQ(index_counts(&a).queued, 2);
    prompt_unpin(&a, &p);
    tear_down();
}

/* What a repair finds half done or without its reservation, it puts back with its kind. */
static void repair_keeps_the_kind(void) {
    set_up(64);
    add(1, 4, true);
    _Atomic uint32_t *word = &a.h->pages[page_of(1)].word;
    lc_store(word, (lc_load(word) & ~LCI_STATE_MASK) | LCI_EVICTING);
    word = &a.h->pages[page_of(2)].word;
    lc_store(word, lc_load(word) | UINT32_C(60) << LCI_RES_SHIFT); /* which is free */
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    check_kinds("iiii");
    CHILDREN(1, 1, 1, 0);
    CHECK_EQ(index_counts(&a).queued, 4);
    tear_down();
}

/* A flag that does not fit what hangs together is named; repair separates the two. */
static void a_damaged_kind(void) {
    for (int independent = 0; independent < 2; independent++) {
        set_up(64);
        add(1, 3, independent);
        break_word(&a.h->pages[page_of(2)].word, word_of(2) ^ LCI_INDEPENDENT);
        CHECK_EQ(index_broken(&s), 41);
        mend_word();
        break_word(&a.h->pages[page_of(1)].word, word_of(1) ^ LCI_INDEPENDENT);
        CHECK(index_broken(&s) == 31 || index_broken(&s) == 41);
        CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
        CHILDREN(0, 0, 0);
        CHECK_EQ(index_counts(&a).queued, 3);
        CHECK_EQ(evict(&a, 64), 3);
        tear_down();
    }
}

/* The queue, the children and the totals of them, made anew. */
static void independent_repair(void) {
    set_up_independent(64);
    put_path(1, 5);
    CHECK_EQ(evict(&a, 1), 1);
    for (uint32_t i = 1; i < 5; i++) lc_store(&a.h->pages[page_of(i)].children, 9);
    lc_store(&a.h->lists.heads[0].next, 3);
    lc_store(&a.h->root->queued, 1);
    CHECK(index_broken(&s) != 0);
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
    CHILDREN(-1, 1, 1, 1, 0);
    CHECK_EQ(index_counts(&a).queued, 4);
    CHECK_EQ(evict(&a, 2), 2);
    CHILDREN(-1, -1, -1, 1, 0);
    tear_down();
}

const test independent_tests[] = {
    TEST(independent_goes_by_last_use),
    TEST(independent_does_not_follow),
    TEST(independent_children_of_the_gone_stay_alone),
    TEST(independent_readopts_when_it_is_told),
    TEST(independent_quota),
#ifdef LC_PAUSE_POINTS
    TEST(independent_stays_whoever_is_pinned),
    TEST(independent_comes_back_to_its_parent),
#endif
    TEST(independent_drops_from_the_middle),
    TEST(independent_lists_and_discards_the_oldest),
    TEST(independent_lists_a_prompt_once),
    TEST(independent_lists_by_the_queue_alone),
    TEST(independent_keeps),
    TEST(independent_names_and_clears),
    TEST(deepest_and_children),
    TEST(deepest_finds_what_is_ready),
#ifdef LC_PAUSE_POINTS
    TEST(children_of_another_page_are_not_told),
    TEST(a_clear_wins_over_looking),
#endif
    TEST(children_of_damage),
    TEST(kinds_live_together),
    TEST(a_page_hangs_on_its_kind_alone),
    TEST(a_parent_of_another_kind_adopts_nothing),
    TEST(names_are_of_a_kind),
    TEST(the_flag_goes_with_the_key),
    TEST(the_flag_stays),
    TEST(a_collected_page_stays_independent),
    TEST(repair_keeps_the_kind),
    TEST(a_damaged_kind),
    TEST(independent_repair),
    END_OF_TESTS,
};
