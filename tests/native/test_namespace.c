/* Namespaces: names, epochs, clearing. */
#include "pair.h"

#include <stdio.h>

static lci_ns_ref open_namespace(const char *weights, const char *tenant, uint32_t quota) {
    lci_ns_ref ref;
    CHECK_EQ(lci_namespace_open(a.h, weights, tenant, quota, &ref, BLOCKING), LC_OK);
    return ref;
}

static void clear(client *c, lci_ns_ref ref) {
    CHECK_EQ(THROUGH(lci_clear(c->h, ref, BLOCKING)), LC_OK);
}

static void namespace_is_found_by_both_names(void) {
    lci_ns_ref found;
    char longest[48];
    set_up(64);
    CHECK_EQ(lci_namespace_find(b.h, "", "", &found), LC_OK);
    CHECK_EQ(found, NS);
    CHECK_EQ(lci_namespace_find(b.h, "w", "t", &found), LC_E_MISSING);
    lci_ns_ref ref = open_namespace("w", "t", 7);
    CHECK(lci_ns_id(ref) != lci_ns_id(NS));
    CHECK_EQ(lci_namespace_find(b.h, "w", "t", &found), LC_OK);
    CHECK_EQ(found, ref);
    CHECK_EQ(lci_namespace_find(b.h, "w", "", &found), LC_E_MISSING);
    CHECK_EQ(open_namespace("w", "t", UINT32_MAX), ref);
    CHECK_EQ(lc_load(&a.h->ns[lci_ns_id(ref)].quota), 7);
    CHECK_EQ(open_namespace("w", "t", 9), ref);
    CHECK_EQ(lc_load(&a.h->ns[lci_ns_id(ref)].quota), 9);
    memset(longest, 'x', 47);
    longest[47] = 0;
    ref = open_namespace(longest, longest, UINT32_MAX);
    CHECK_EQ(lci_namespace_find(b.h, longest, longest, &found), LC_OK);
    CHECK_EQ(found, ref);
    CHECK_EQ(lc_load(&a.h->ns[lci_ns_id(ref)].quota), 0);
    client r = reader_join(&s);
    CHECK_EQ(lci_namespace_find(r.h, "w", "t", &found), LC_OK);
    CHECK_EQ(lci_namespace_open(r.h, "v", "", 0, &found, BLOCKING), LC_E_READONLY);
    client_forget(&r);
    tear_down();
}

static void namespaces_are_256(void) {
    char name[16];
    lci_ns_ref ref, last = 0;
    set_up(64);
    for (int i = 1; i < LCI_NAMESPACES; i++) {
        snprintf(name, sizeof name, "%d", i);
        last = open_namespace(name, "", 0);
        CHECK_EQ(lci_ns_id(last), i);
    }
    CHECK_EQ(lci_namespace_open(a.h, "more", "", 0, &ref, BLOCKING), LC_E_FULL);
    clear(&a, last);
    ref = open_namespace("more", "", 0);
    CHECK_EQ(lci_ns_id(ref), lci_ns_id(last));
    CHECK(ref != last);
    tear_down();
}

static void clear_makes_everything_unfindable(void) {
    set_up(600);
    lci_ns_ref other = open_namespace("w", "", 0);
    prompt_make(&q, 2, 30);
    CHECK_EQ(prompt_reserve(&a, &q, other, 1), 30);
    prompt_publish(&a, &q, 0);
    prompt_unpin(&a, &q);
    prompt_fill(&a, &p, 1, 500); /* in several pieces */
    p.n = 100;
    CHECK_EQ(match(&b, &p, &l), 100);
    clear(&b, NS);
    CHECK_EQ(peek(&a, &p), 0);
    CHECK_EQ(lci_peek1(a.h, q.keys, 30, other), 30);
    lci_counts counts = index_counts(&a);
    CHECK_EQ(counts.named, 30);
    CHECK_EQ(counts.doomed, 100); /* as long as they are pinned */
    CHECK_EQ(counts.namespaces_clearing, 0);
    index_check(&s);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), LC_E_CLEARED);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    lci_ns_ref again = open_namespace("", "", 0); /* under another epoch */
    CHECK(again != NS);
    CHECK_EQ(lci_clear(a.h, NS, BLOCKING), LC_OK); /* the old handle clears nothing */
    CHECK_EQ(prompt_reserve(&a, &p, again, 1), 100);
    CHECK_EQ(index_counts(&a).doomed, 0);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    CHECK_EQ(lci_peek1(b.h, p.keys, 100, again), 100);
    CHECK_EQ(peek(&b, &p), 0);
    tear_down();
}

static void clear_dooms_what_is_being_written(void) {
    set_up(128);
    prompt_make(&p, 1, 20);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 20);
    clear(&b, NS);
    CHECK_EQ(index_counts(&a).doomed, 20);
    for (uint32_t i = 0; i < 20; i++) {
        uint32_t word = lc_load(&a.h->pages[p.page[i]].word);
        CHECK_EQ(lci_state_of(word), LCI_DOOMED);
        CHECK(word & LCI_UNWRITTEN);
    }
    CHECK_EQ(lci_abandon(a.h, p.op.rid, p.op.gen, BLOCKING), LC_OK);
    prompt_unpin(&a, &p);
    CHECK_EQ(evict(&b, 1), 0);
    CHECK_EQ(index_counts(&a).free, 20);
    tear_down();
}

/* Whoever holds the lock next goes on with what a dead client was clearing. */
static void clear_of_a_dead_client_is_finished(void) {
    set_up(600);
    prompt_fill(&a, &p, 1, 500);
    collect(&a);
    lc_store(&a.h->ns[0].state, LCI_NS_CLEARING);
    lc_store(&a.h->root->clearing, 1);
    CHECK_EQ(peek(&b, &p), 0);
    lci_ns_ref other = open_namespace("w", "", 0);
    prompt_make(&q, 2, 200);
    CHECK_EQ(prompt_reserve(&b, &q, other, 1), 200);
    for (uint32_t i = 0; i < 10 && index_counts(&b).namespaces_clearing; i++) evict(&b, 1);
    CHECK_EQ(lc_load(&a.h->ns[0].state), LCI_NS_CLEARED);
    CHECK_EQ(lc_load(&a.h->ns[0].pages), 0);
    prompt_unpin(&b, &q);
    tear_down();
}

static void clear_is_refused(void) {
    set_up(64);
    CHECK_EQ(lci_hold(b.h, BLOCKING), LC_OK);
    CHECK_EQ(lci_clear(a.h, NS, LC_TRY, 0), LC_E_BUSY);
    CHECK_EQ(lci_let_go(b.h), LC_OK);
    client r = reader_join(&s);
    CHECK_EQ(lci_clear(r.h, NS, BLOCKING), LC_E_READONLY);
    client_forget(&r);
    lc_store(&a.h->root->clearing, 1); /* and no namespace says that it is being cleared */
    uint32_t freed = 0;
    CHECK_EQ(lci_evict_pages(a.h, 1, &freed, BLOCKING), LC_E_CORRUPT);
    lc_store(&a.h->root->clearing, 0);
    CHECK_EQ(lci_ns_open(a.h, NS), true);
    tear_down();
}

const test namespace_tests[] = {
    TEST(namespace_is_found_by_both_names),
    TEST(namespaces_are_256),
    TEST(clear_makes_everything_unfindable),
    TEST(clear_dooms_what_is_being_written),
    TEST(clear_of_a_dead_client_is_finished),
    TEST(clear_is_refused),
    END_OF_TESTS,
};
