/* Pages without a key: taken, named, unnamed and given back; and what their client leaves. */
#include "calls.h"
#include "pair.h"

static uint32_t word_of(int32_t page) { return lc_load(&a.h->pages[page].word); }

static uint32_t all_pins(void) {
    uint32_t pins = 0;
    for (uint32_t page = 0; page < s.pages; page++) pins += pins_of(&a, page);
    return pins;
}

static void held_pages_are_in_no_structure(void) {
    set_up(300);
    CHECK_EQ(allocate(&a, 300), LC_OK);
    for (int32_t i = 0; i < 300; i++) {
        CHECK_EQ(pages[i], i);
        CHECK_EQ(word_of(i), lci_held_word(a.slot));
        CHECK_EQ(pins_of(&a, (uint32_t)i), 1);
    }
    index_check(&s);
    CHECK_EQ(index_counts(&a).held, 300);
    CHECK_EQ(evict(&b, 300), 0);
    prompt_make(&p, 1, 1);
    CHECK_EQ(prompt_reserve(&b, &p, NS, 1), 0);
    CHECK_EQ(free_pages(&b, pages, 1), LC_E_OWNER);
    CHECK_EQ(free_pages(&a, pages, 300), LC_OK);
    CHECK_EQ(index_counts(&a).free, 300);
    CHECK_EQ(all_pins(), 0);
    tear_down();
}

static void held_pages_have_a_sound_word_again_after_repair(void) {
    set_up(300);
    CHECK_EQ(allocate(&a, 2), LC_OK);
    lc_store(&a.h->pages[pages[0]].word, lci_held_word(a.slot) | UINT32_C(3) << LCI_RES_SHIFT);
    CHECK_EQ(index_broken(&s), 61);
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    CHECK_EQ(word_of(pages[0]), lci_held_word(a.slot));
    index_check(&s);
    CHECK_EQ(free_pages(&a, pages, 2), LC_OK);
    tear_down();
}

static void held_pages_all_or_none(void) {
    set_up(300);
    prompt_fill(&b, &p, 1, 100);
    CHECK_EQ(match(&b, &p, &l), 100);
    CHECK_EQ(allocate(&a, 201), LC_E_FULL); /* known only when 192 are taken */
    CHECK_EQ(op.reason, LCI_WHY_PINNED);
    CHECK_EQ(op.done, 0);
    CHECK_EQ(all_pins(), 100);
    index_check(&s);
    CHECK_EQ(allocate(&a, 200), LC_OK);
    CHECK_EQ(allocate(&b, 101), LC_E_FULL); /* known at once */
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(lci_may_allocate(b.h, 100, LCI_MEMORY_ASK), 1);
    CHECK_EQ(lci_may_allocate(b.h, 101, LCI_MEMORY_ASK), 0);
    CHECK_EQ(allocate(&b, 301), LC_E_RANGE);
    CHECK_EQ(allocate(&b, 100), LC_OK); /* evicts */
    CHECK_EQ(index_counts(&a).named, 0);
    tear_down();
}

static void held_pages_wait_for_memory(void) {
    set_up(64);
    lc_store(&a.h->root->grown, 10);
    CHECK_EQ(allocate(&a, 50), LC_E_GROW);
    CHECK_EQ(op.wanted, 40);
    CHECK_EQ(lci_grow(a.h, 64, BLOCKING), LC_OK);
    CHECK_EQ(THROUGH(lci_allocate(a.h, &op, pages, gens, 50, BLOCKING)), LC_OK);
    tear_down();
    set_up_grown(64, 40);
    prompt_fill(&b, &p, 1, 30);
    CHECK_EQ(lci_may_allocate(a.h, 10, LCI_MEMORY_ASK), 1);
    CHECK_EQ(lci_may_allocate(a.h, 11, LCI_MEMORY_ASK), LC_E_GROW);
    CHECK_EQ(lci_may_allocate(a.h, 64, LCI_MEMORY_ALL), 1);
    CHECK_EQ(lci_may_allocate(a.h, 65, LCI_MEMORY_ALL), 0);
    CHECK_EQ(lci_may_allocate(a.h, 40, LCI_MEMORY_NONE), 1);
    CHECK_EQ(lci_may_allocate(a.h, 41, LCI_MEMORY_NONE), 0);
    CHECK_EQ(lci_no_memory(b.h, UINT64_C(30000000000)), LC_OK);
    CHECK_EQ(lci_may_allocate(a.h, 41, LCI_MEMORY_ASK), 0);
    CHECK_EQ(allocate(&a, 41), LC_E_FULL);
    CHECK_EQ(op.reason, LCI_WHY_MEMORY);
    CHECK_EQ(peek(&b, &p), 30); /* nothing went for it */
    CHECK_EQ(allocate(&a, 40), LC_OK);
    CHECK_EQ(lci_no_memory(b.h, 0), LC_OK);
    op = (lci_held_op){.no_memory = 1};
    CHECK_EQ(lci_allocate(b.h, &op, pages, gens, 1, BLOCKING), LC_E_FULL);
    tear_down();
}

/* The lock's holder lets a call do a piece at a time. */
static void held_calls_go_on_where_they_were(void) {
    set_up(600);
    op = (lci_held_op){.done = 0};
    CHECK_EQ(lci_hold(b.h, BLOCKING), LC_OK);
    CHECK_EQ(lci_allocate(a.h, &op, pages, gens, 600, LC_TRY, 0), LC_E_BUSY);
    CHECK_EQ(lci_allocate(a.h, &op, pages, gens, 600, LC_BLOCK, lcs_now_ns()), LC_E_TIMEOUT);
    CHECK_EQ(op.done, 0);
    CHECK_EQ(lci_let_go(b.h), LC_OK);
    CHECK_EQ(THROUGH(lci_allocate(a.h, &op, pages, gens, 600, BLOCKING)), LC_OK);
    op = (lci_held_op){.done = 0};
    CHECK_EQ(THROUGH(lci_free_held(a.h, &op, pages, gens, 300, BLOCKING)), LC_OK);
    CHECK_EQ(THROUGH(lci_free_held(a.h, &op, pages, gens, 600, BLOCKING)), LC_OK); /* goes on behind 300 */
    CHECK_EQ(index_counts(&a).free, 600);
    tear_down();
}

static void held_generations_tell_what_was_named(void) {
    uint32_t old[4];
    set_up(64);
    CHECK_EQ(allocate(&a, 4), LC_OK);
    memcpy(old, gens, sizeof old);
    prompt_make(&p, 1, 4);
    CHECK_EQ(name(&a, &p, 2, 0), LC_OK); /* the first two pages, by keys 2 and 3 */
    CHECK_EQ(unname(&a, pages, 1), LC_OK);
    op = (lci_held_op){.done = 0};
    CHECK_EQ(THROUGH(lci_free_held(a.h, &op, pages, old, 4, BLOCKING)), LC_OK);
    CHECK_EQ(op.done, 4);
    CHECK_EQ(index_counts(&a).held, 1); /* named and unnamed: another's to free */
    CHECK_EQ(index_counts(&a).free, 2);
    CHECK_EQ(index_counts(&a).named, 1);
    CHECK_EQ(free_pages(&a, pages, 1), LC_OK);
    tear_down();
}

static void held_pages_named_are_found(void) {
    set_up(600);
    prompt_make(&p, 1, 500);
    CHECK_EQ(allocate(&a, 500), LC_OK);
    CHECK_EQ(name(&a, &p, 0, 0), LC_OK);
    index_check(&s);
    CHECK_EQ(peek(&b, &p), 500);
    CHECK_EQ(index_counts(&a).queued, 1);
    CHECK_EQ(index_counts(&a).named, 500);
    CHECK_EQ(index_counts(&a).writing, 0);
    CHECK_EQ(lc_load(&a.h->ns[0].pages), 500);
    for (int i = 1; i < 500; i++) CHECK_EQ(lci_parent(a.h, &a.h->pages[pages[i]]), pages[i - 1]);
    CHECK_EQ(evict(&b, 600), 0);
    uint32_t refused = 0;
    CHECK_EQ(lci_unpin(a.h, pages, 500, &refused), LC_OK);
    CHECK_EQ(evict(&b, 600), 500);
    tear_down();
}

static void held_pages_merge_into_what_is_there(void) {
    set_up(300);
    prompt_fill(&b, &q, 1, 60);
    prompt_make(&p, 1, 100);
    CHECK_EQ(allocate(&a, 100), LC_OK);
    int32_t mine = pages[59];
    CHECK_EQ(lci_pin_one(b.h, (uint32_t)mine), LC_OK); /* somebody adopted it */
    CHECK_EQ(name(&a, &p, 0, LCI_NAME_MERGE), LC_OK);
    index_check(&s);
    for (uint32_t i = 0; i < 100; i++) {
        CHECK_EQ(status[i], i < 60 ? LCI_PRESENT : LCI_NEW);
        CHECK_EQ(out[i], i < 60 ? q.page[i] : pages[i]);
        CHECK_EQ(lc_load(&a.h->mine[out[i]]), 1);
    }
    CHECK_EQ(lci_state_of(word_of(mine)), LCI_DOOMED);
    CHECK_EQ(index_counts(&a).doomed, 1);
    CHECK_EQ(index_counts(&a).held, 0);
    CHECK_EQ(peek(&a, &p), 100);
    CHECK_EQ(lci_parent(a.h, &a.h->pages[out[60]]), out[59]);
    CHECK_EQ(lci_unpin_one(b.h, (uint32_t)mine), LC_OK);
    tear_down();
}

static void held_pages_stay_without_room(void) {
    set_up(300);
    lci_ns_ref other, small;
    CHECK_EQ(lci_namespace_open(a.h, "other", "", 0, &other, BLOCKING), LC_OK);
    CHECK_EQ(lci_namespace_open(a.h, "small", "", 1, &small, BLOCKING), LC_OK);
    prompt_fill(&b, &q, 1, 1);
    prompt_make(&p, 1, 2);
    CHECK_EQ(allocate(&a, 2), LC_OK);
    int64_t offsets[2] = {0, 2}, starts[1] = {0};
    op = (lci_held_op){.ns = other};
    CHECK_EQ(lci_name(a.h, &op, p.keys, offsets, starts, 1, pages, 2, out, status, BLOCKING), LC_OK);
    CHECK_EQ(status[0], LCI_NO_ROOM); /* another's key, which is no parent either */
    CHECK_EQ(status[1], LCI_NEW);
    CHECK_EQ(lci_parent(a.h, &a.h->pages[out[1]]), LC_NIL);
    CHECK_EQ(free_pages(&a, pages, 1), LC_OK);
    for (uint32_t i = 0; i < 33; i++) p.keys[i] = crowded_key(5, i);
    p.n = 33;
    CHECK_EQ(allocate(&a, 33), LC_OK);
    CHECK_EQ(name(&a, &p, 0, 0), LC_OK);
    CHECK_EQ(status[31], LCI_NEW);
    CHECK_EQ(status[32], LCI_NO_ROOM);
    CHECK_EQ(op.reason, LCI_WHY_CHAIN);
    prompt_make(&p, 3, 2);
    CHECK_EQ(allocate(&a, 2), LC_OK);
    op = (lci_held_op){.ns = small};
    CHECK_EQ(lci_name(a.h, &op, p.keys, offsets, starts, 1, pages, 2, out, status, BLOCKING), LC_OK);
    CHECK_EQ(status[0], LCI_NEW);
    CHECK_EQ(status[1], LCI_NO_ROOM);
    CHECK_EQ(op.reason, LCI_WHY_QUOTA);
    index_check(&s);
    tear_down();
}

static void held_pages_under_too_many_pins(void) {
    set_up(64);
    prompt_fill(&b, &q, 1, 1);
    CHECK_EQ(allocate(&a, 1), LC_OK);
    lc_store(&a.h->mine[q.page[0]], UINT16_MAX);
    CHECK_EQ(name(&a, &q, 0, LCI_NAME_MERGE), LC_OK);
    CHECK_EQ(status[0], LCI_NO_ROOM);
    CHECK_EQ(out[0], pages[0]);
    lc_store(&a.h->mine[q.page[0]], 0);
    tear_down();
}

static void held_calls_are_refused(void) {
    int64_t offsets[2] = {0, 3}, starts[1] = {0};
    set_up(64);
    CHECK_EQ(allocate(&a, 3), LC_OK);
    prompt_make(&p, 1, 3);
    op = (lci_held_op){.ns = NS};
    CHECK_EQ(lci_name(a.h, &op, p.keys, offsets, starts, 1, pages, 2, out, status, BLOCKING),
             LC_E_RANGE);
    starts[0] = 4;
    CHECK_EQ(lci_name(a.h, &op, p.keys, offsets, starts, 1, pages, 3, out, status, BLOCKING),
             LC_E_RANGE);
    CHECK_EQ(name(&b, &p, 0, 0), LC_E_OWNER);
    int32_t third = pages[2];
    for (int32_t wrong = -1; wrong < 65; wrong += 1) {
        if (wrong == pages[1]) continue; /* twice below */
        pages[2] = wrong == third ? pages[0] : wrong;
        CHECK_EQ(name(&a, &p, 0, 0), LC_E_OWNER);
        CHECK_EQ(op.refused, 2);
        CHECK_EQ(free_pages(&a, pages, 3), LC_E_OWNER);
        CHECK_EQ(op.refused, 2);
        CHECK_EQ(unname(&a, pages + 2, 1), LC_E_OWNER);
    }
    pages[2] = third;
    index_check(&s);
    CHECK_EQ(index_counts(&a).held, 3);
    lc_store(&lcs_header_of(a.at)->disabled, 1);
    CHECK_EQ(lci_allocate(a.h, &op, out, gens, 1, BLOCKING), LC_E_DISABLED);
    lc_store(&lcs_header_of(a.at)->disabled, 0);
    tear_down();
}

static void held_pages_are_looked_at_before_any_is_named(void) {
    set_up(64);
    CHECK_EQ(allocate(&a, 40), LC_OK);
    prompt_make(&p, 1, 40);
    int32_t kept = pages[35];
    pages[35] = 63;
    CHECK_EQ(name(&a, &p, 0, 0), LC_E_OWNER);
    CHECK_EQ(op.refused, 35);
    CHECK_EQ(op.done, 0);
    CHECK_EQ(unname(&b, &kept, 1), LC_E_OWNER);
    pages[35] = kept;
    lc_store(&a.h->mine[kept], 0); /* held, and its pin was given away */
    CHECK_EQ(name(&a, &p, 0, 0), LC_E_OWNER);
    CHECK_EQ(op.refused, 35);
    CHECK_EQ(op.done, 32);
    lc_store(&a.h->mine[kept], 1);
    index_check(&s);
    tear_down();
}

/* What hangs on what: nothing on another namespace's page, and nothing where it hung before. */
static void held_pages_forget_their_parents(void) {
    lci_ns_ref other;
    uint32_t refused;
    set_up(64);
    CHECK_EQ(lci_namespace_open(a.h, "other", "", 0, &other, BLOCKING), LC_OK);
    prompt_make(&p, 1, 2);
    CHECK_EQ(allocate(&a, 2), LC_OK);
    CHECK_EQ(name(&a, &p, 0, 0), LC_OK);
    CHECK_EQ(lci_tick(&a.h->pages[pages[1]]), op.tick);
    CHECK_EQ(lci_parent(a.h, &a.h->pages[pages[1]]), pages[0]);
    CHECK_EQ(unname(&a, pages + 1, 1), LC_OK);
    int64_t offsets[2] = {0, 2}, starts[1] = {1};
    op = (lci_held_op){.ns = other};
    CHECK_EQ(lci_name(a.h, &op, p.keys, offsets, starts, 1, pages + 1, 1, out, status, BLOCKING),
             LC_OK);
    CHECK_EQ(status[0], LCI_NEW);
    CHECK_EQ(lci_parent(a.h, &a.h->pages[pages[1]]), LC_NIL);
    index_check(&s);
    CHECK_EQ(lci_unpin(a.h, pages, 2, &refused), LC_OK);
    CHECK_EQ(unname(&a, pages, 1), LC_E_OWNER); /* ready, and not pinned by us */
    CHECK_EQ(allocate(&a, 1), LC_OK);
    CHECK_EQ(name(&a, &p, 1, 0), LC_OK); /* equal digests, another namespace */
    CHECK_EQ(status[0], LCI_NO_ROOM);
    p.n = 1;
    CHECK_EQ(name(&a, &p, 0, 0), LC_OK);
    CHECK_EQ(status[0], LCI_PRESENT);
    CHECK_EQ(lci_tick(&a.h->pages[out[0]]), op.tick); /* as used now */
    tear_down();
}

static void held_again_by_unnaming(void) {
    set_up(600);
    prompt_make(&p, 1, 500);
    CHECK_EQ(allocate(&a, 500), LC_OK);
    CHECK_EQ(name(&a, &p, 0, 0), LC_OK);
    CHECK_EQ(lci_pin_one(b.h, (uint32_t)pages[450]), LC_OK);
    CHECK_EQ(unname(&a, pages, 500), LC_E_PINS);
    CHECK_EQ(op.refused, 450);
    CHECK_EQ(op.done, 448); /* whole steps */
    index_check(&s);
    CHECK_EQ(lci_unpin_one(b.h, (uint32_t)pages[450]), LC_OK);
    CHECK_EQ(unname(&a, pages + 448, 52), LC_OK);
    CHECK_EQ(index_counts(&a).held, 500);
    CHECK_EQ(index_counts(&a).queued, 0);
    CHECK_EQ(lc_load(&a.h->ns[0].pages), 0);
    CHECK_EQ(peek(&b, &p), 0);
    index_check(&s);
    CHECK_EQ(name(&a, &p, 0, 0), LC_OK);
    CHECK_EQ(peek(&b, &p), 500);
    tear_down();
}

#ifdef LC_PAUSE_POINTS
/* Found and pinned behind the first look at the pins. */
static void match_now(void) {
    CHECK_EQ(match(&b, &p, &l), 3);
}

static void held_pages_pinned_while_they_lose_their_names(void) {
    set_up(64);
    prompt_make(&p, 1, 3);
    CHECK_EQ(allocate(&a, 3), LC_OK);
    CHECK_EQ(name(&a, &p, 0, 0), LC_OK);
    play(LC_AT_EVICT_CHOSEN, match_now);
    CHECK_EQ(unname(&a, pages, 3), LC_E_PINS);
    check_played();
    CHECK_EQ(peek(&b, &p), 3);
    CHECK_EQ(index_counts(&a).held, 0);
    index_check(&s);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(unname(&a, pages, 3), LC_OK);
    tear_down();
}
#endif

/* Unpublished pages and those of a reservation that is not collected. */
static void held_pages_that_were_reserved(void) {
    set_up(64);
    prompt_make(&p, 1, 3);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 3);
    CHECK_EQ(unname(&a, p.page, 1), LC_E_OWNER);
    prompt_publish(&a, &p, 0);
    for (int w = 0; w < 16; w++) lc_store(&a.h->root->completed[w], 0); /* nobody collects it */
    CHECK_EQ(unname(&a, p.page, 1), LC_OK);
    CHECK_EQ(lc_load(&a.h->root->writing), 2);
    lci_flag_ended(a.h, p.op.rid);
    collect(&b);
    CHECK_EQ(lc_load(&a.h->root->writing), 0);
    index_check(&s);
    CHECK_EQ(free_pages(&a, p.page, 1), LC_OK);
    tear_down();
}

static void held_pages_pinned_twice_are_doomed(void) {
    uint32_t refused = 9;
    set_up(64);
    CHECK_EQ(allocate(&a, 2), LC_OK);
    CHECK_EQ(lci_unpin(a.h, pages, 2, &refused), LC_E_OWNER);
    CHECK_EQ(refused, 0);
    CHECK_EQ(lci_pin_one(a.h, (uint32_t)pages[0]), LC_OK);
    CHECK_EQ(lci_unpin(a.h, pages, 2, &refused), LC_E_OWNER); /* what was unpinned is pinned again */
    CHECK_EQ(refused, 1);
    CHECK_EQ(pins_of(&a, (uint32_t)pages[0]), 2);
    CHECK_EQ(free_pages(&a, pages, 2), LC_OK);
    CHECK_EQ(word_of(pages[0]), LCI_DOOMED);
    CHECK_EQ(word_of(pages[1]), LCI_FREE);
    index_check(&s);
    CHECK_EQ(lci_unpin(a.h, pages, 1, &refused), LC_OK);
    CHECK_EQ(lci_evict_pages(a.h, 1, &(uint32_t){0}, BLOCKING), LC_OK);
    CHECK_EQ(word_of(pages[0]), LCI_FREE);
    CHECK_EQ(lci_unpin(a.h, (const int32_t[]){64}, 1, &refused), LC_E_OWNER);
    tear_down();
}

/* ------------------------------------------------------------------ deaths */

static void held_pages_of_the_dead_are_doomed(void) {
    set_up(600);
    client dead = client_join(&s);
    CHECK_EQ(allocate(&dead, 500), LC_OK);
    CHECK_EQ(lci_pin_one(a.h, (uint32_t)pages[7]), LC_OK); /* a reads it */
    CHECK_EQ(lci_pin_one(dead.h, 550), LC_OK);
    client_die(&dead);
    CHECK_EQ(lci_reap_slot(b.h, 3, BLOCKING), 1);
    index_check(&s);
    CHECK_EQ(index_counts(&a).held, 0);
    CHECK_EQ(evict(&b, 1), 0); /* collects some, and some again */
    for (int i = 0; i < 2; i++) evict(&b, 1);
    CHECK_EQ(index_counts(&a).doomed, 1);
    CHECK_EQ(word_of(pages[7]), LCI_DOOMED | LCI_UNWRITTEN);
    CHECK_EQ(lci_unpin_one(a.h, (uint32_t)pages[7]), LC_OK);
    CHECK_EQ(allocate(&a, 600), LC_OK);
    tear_down();
}

static void held_pages_outlive_those_who_read_them(void) {
    set_up(64);
    client reader = client_join(&s);
    CHECK_EQ(allocate(&a, 3), LC_OK);
    for (int i = 0; i < 3; i++) CHECK_EQ(lci_pin_one(reader.h, (uint32_t)pages[i]), LC_OK);
    client_die(&reader);
    CHECK_EQ(lci_reap_slot(b.h, 3, BLOCKING), 1);
    CHECK_EQ(index_counts(&a).held, 3);
    CHECK_EQ(all_pins(), 3);
    index_check(&s);
    tear_down();
}

/* A dead client with a device may still be writing what it held, and what others hold. */
static void held_pages_in_quarantine(void) {
    set_up(64);
    client dead = client_join_as(&s, LCS_FLAG_DEVICE);
    CHECK_EQ(allocate(&a, 1), LC_OK);
    int32_t of_a = pages[0];
    CHECK_EQ(lci_pin_one(dead.h, (uint32_t)of_a), LC_OK);
    CHECK_EQ(allocate(&dead, 2), LC_OK);
    client_die(&dead); /* this process lives: nobody can tell that its copies are over */
    CHECK_EQ(lci_reap_slot(b.h, 3, BLOCKING), 1);
    CHECK_EQ(lc_load(&lcs_client_of(a.at, 3)->state), LCS_CLIENT_QUARANTINE);
    index_check(&s);
    CHECK_EQ(pins_of(&a, (uint32_t)of_a), 2);
    CHECK_EQ(pins_of(&a, (uint32_t)pages[0]), 1);
    CHECK_EQ(evict(&b, 64), 0);
    CHECK_EQ(index_counts(&a).doomed, 2);
    CHECK_EQ(free_pages(&a, &of_a, 1), LC_OK);
    CHECK_EQ(index_counts(&a).doomed, 3);
    lc_store(&a.h->pages[pages[0]].word, lci_held_word(3)); /* it never comes back to let it go */
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    CHECK_EQ(word_of(pages[0]), LCI_DOOMED | LCI_UNWRITTEN);
    lcs_client *c = lcs_client_of(a.at, 3);
    lc_store(&c->pidns, 0); /* out of sight, and its time is over */
    lc_store(&c->quarantine_until_ns, 0);
    CHECK_EQ(lci_reap_slot(b.h, 3, BLOCKING), 1);
    CHECK_EQ(allocate(&b, 64), LC_OK);
    tear_down();
}

static void held_pages_are_repaired(void) {
    set_up(64);
    CHECK_EQ(allocate(&a, 10), LC_OK);
    lc_store(&a.h->mine[pages[0]], 0);                                /* nobody's */
    lc_store(&a.h->pages[pages[1]].word, lci_held_word(40));          /* a vacant slot's */
    lc_store(&a.h->pages[pages[2]].word, lci_held_word(a.slot) | 64); /* with a flag */
    lc_store(&a.h->pages[pages[3]].word, LCI_HELD);
    lc_store(&a.h->root->held, 77);
    lc_store(&a.h->root->fresh, 1000);
    lc_store(&a.h->root->grown, 1000);
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    index_check(&s);
    CHECK_EQ(word_of(pages[0]), LCI_FREE);
    CHECK_EQ(word_of(pages[1]), LCI_DOOMED | LCI_UNWRITTEN);
    CHECK_EQ(word_of(pages[2]), lci_held_word(a.slot));
    CHECK_EQ(word_of(pages[3]), LCI_DOOMED | LCI_UNWRITTEN);
    for (int i = 4; i < 10; i++) CHECK_EQ(word_of(pages[i]), lci_held_word(a.slot));
    CHECK_EQ(index_counts(&a).held, 7);
    tear_down();
}

static void expect(int number, _Atomic uint32_t *word, uint32_t value) {
    uint32_t old = lc_load(word);
    lc_store(word, value);
    CHECK_EQ(index_broken(&s), number);
    lc_store(word, old);
    index_check(&s);
}

static void held_pages_are_checked(void) {
    set_up(64);
    CHECK_EQ(allocate(&a, 3), LC_OK);
    _Atomic uint32_t *word = &a.h->pages[pages[1]].word;
    expect(61, word, LCI_HELD);
    expect(61, word, lci_held_word(LCS_SLOTS));
    expect(61, word, lci_held_word(a.slot) | LCI_UNWRITTEN);
    expect(61, word, lci_held_word(a.slot) | 1 << LCI_RES_SHIFT);
    expect(62, word, lci_held_word(b.slot));
    expect(63, &a.h->root->held, 2);
    expect(31, word, LCI_FREE);
    expect(31, word, LCI_DOOMED);
    CHECK_EQ(free_pages(&a, pages, 1), LC_OK);
    expect(3, &a.h->pages[pages[0]].word, lci_held_word(a.slot));
    tear_down();
}

/* A damaged free stack: what the step had taken is undone, what came before it is ours. */
static void held_pages_of_half_a_step(void) {
    set_up(64);
    prompt_fill(&a, &q, 1, 40);
    CHECK_EQ(evict(&a, 40), 40);
    uint32_t page = lc_load(&a.h->root->free_head);
    for (int i = 0; i < 35; i++) page = lc_load(&a.h->pages[page].queue.next);
    _Atomic uint32_t *link = &a.h->pages[page].queue.next;
    uint32_t next = lc_load(link);
    lc_store(link, page);
    CHECK_EQ(allocate(&a, 60), LC_E_CORRUPT);
    CHECK_EQ(op.done, 32);
    lc_store(link, next);
    index_check(&s);
    CHECK_EQ(all_pins(), 32);
    CHECK_EQ(free_pages(&a, pages, 32), LC_OK);
    tear_down();
}

/* An odd list: the step that names is undone, and its pins of other pages with it. */
static void held_pages_of_half_a_naming(void) {
    set_up(64);
    prompt_fill(&b, &q, 1, 1);
    CHECK_EQ(allocate(&a, 3), LC_OK);
    prompt_make(&p, 1, 3);
    for (uint32_t i = 0; i < LCI_DOOMED_LIST; i++) lc_store(&a.h->lists.heads[i].prev, 99999);
    CHECK_EQ(name(&a, &p, 0, 0), LC_E_CORRUPT);
    CHECK_EQ(op.done, 0);
    CHECK_EQ(status[0], LCI_UNKNOWN);
    CHECK_EQ(all_pins(), 3);
    CHECK_EQ(word_of(pages[1]), lci_held_word(a.slot));
    CHECK_EQ(lci_repair(a.h, BLOCKING), LC_OK);
    CHECK_EQ(name(&a, &p, 0, 0), LC_OK);
    tear_down();
}

const test held_tests[] = {
    TEST(held_pages_are_in_no_structure),
    TEST(held_pages_have_a_sound_word_again_after_repair),
    TEST(held_pages_all_or_none),
    TEST(held_pages_wait_for_memory),
    TEST(held_calls_go_on_where_they_were),
    TEST(held_generations_tell_what_was_named),
    TEST(held_pages_named_are_found),
    TEST(held_pages_merge_into_what_is_there),
    TEST(held_pages_stay_without_room),
    TEST(held_pages_under_too_many_pins),
    TEST(held_calls_are_refused),
    TEST(held_pages_are_looked_at_before_any_is_named),
    TEST(held_pages_forget_their_parents),
    TEST(held_again_by_unnaming),
#ifdef LC_PAUSE_POINTS
    TEST(held_pages_pinned_while_they_lose_their_names),
#endif
    TEST(held_pages_that_were_reserved),
    TEST(held_pages_pinned_twice_are_doomed),
    TEST(held_pages_of_the_dead_are_doomed),
    TEST(held_pages_outlive_those_who_read_them),
    TEST(held_pages_in_quarantine),
    TEST(held_pages_are_repaired),
    TEST(held_pages_are_checked),
    TEST(held_pages_of_half_a_step),
    TEST(held_pages_of_half_a_naming),
    END_OF_TESTS,
};
