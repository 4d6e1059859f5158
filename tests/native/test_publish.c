/* Publishing shard by shard, and waiting for what others write. */
#include "pair.h"

#include <pthread.h>

static int publish(client *c, uint32_t shard) {
    return lci_publish(c->h, p.op.rid, p.op.gen, shard, p.fresh, p.made);
}

static void publish_is_ready_with_the_last_shard(void) {
    set_up(128);
    prompt_make(&p, 1, 70);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 3), 70);
    CHECK_EQ(publish(&a, 1), 0);
    CHECK_EQ(publish(&a, 1), LC_E_TWICE);
    CHECK_EQ(publish(&a, 0), 0);
    CHECK_EQ(peek(&b, &p), 0);
    uint32_t event = lc_load(&a.h->root->event);
    CHECK_EQ(publish(&a, 2), 1);
    CHECK(lc_load(&a.h->root->event) != event);
    CHECK_EQ(peek(&b, &p), 70);
    prompt_unpin(&a, &p);
    index_check(&s);
    CHECK_EQ(evict(&b, 1), 1); /* whoever holds the lock next collects it */
    CHECK_EQ(index_counts(&b).reservations, 0);
    CHECK_EQ(index_counts(&b).chunks, 0);
    CHECK_EQ(publish(&a, 2), LC_E_STALE);
    tear_down();
}

static void publish_is_refused(void) {
    set_up(128);
    prompt_make(&p, 1, 10);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 2), 10);
    CHECK_EQ(publish(&a, 2), LC_E_RANGE);
    CHECK_EQ(publish(&a, LCI_SHARDS), LC_E_RANGE);
    CHECK_EQ(lci_publish(a.h, 128, p.op.gen, 0, p.fresh, 10), LC_E_RANGE);
    CHECK_EQ(lci_publish(a.h, p.op.rid, p.op.gen + 2, 0, p.fresh, 10), LC_E_STALE);
    CHECK_EQ(publish(&b, 0), LC_E_OWNER);
    client r = reader_join(&s);
    CHECK_EQ(publish(&r, 0), LC_E_READONLY);
    client_forget(&r);
    CHECK_EQ(publish(&a, 0), 0);
    int32_t kept = p.fresh[9];
    p.fresh[9] = 128;
    CHECK_EQ(publish(&a, 1), LC_E_RANGE);
    p.fresh[9] = kept;
    prompt_unpin(&a, &p);
    CHECK_EQ(evict(&b, 1), 1); /* all shards were there: it is collected as published */
    tear_down();
}

static void publish_after_clear(void) {
    set_up(128);
    prompt_make(&p, 1, 10);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 10);
    CHECK_EQ(lci_clear(b.h, NS, BLOCKING), LC_OK);
    CHECK_EQ(publish(&a, 0), LC_E_CLEARED);
    CHECK_EQ(lci_abandon(a.h, p.op.rid, p.op.gen, BLOCKING), LC_OK);
    prompt_unpin(&a, &p);
    tear_down();
}

static void wait_says_when_nobody_writes(void) {
    set_up(128);
    prompt_make(&p, 1, 10);
    CHECK_EQ(lci_wait(b.h, p.keys, 10, FOREVER), LC_OK);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 10);
    CHECK_EQ(lci_wait(b.h, p.keys, 10, 0), LC_E_TIMEOUT);
    CHECK_EQ(lci_wait(b.h, p.keys, 10, FOREVER), LC_E_BUSY); /* to look whether the writer lives */
    CHECK_EQ(lci_wait(b.h, p.keys, 0, FOREVER), LC_OK);
    prompt_publish(&a, &p, 0);
    CHECK_EQ(lci_wait(b.h, p.keys, 10, 0), LC_OK);
    prompt_unpin(&a, &p);
    client r = reader_join(&s);
    CHECK_EQ(lci_wait(r.h, p.keys, 10, 0), LC_OK);
    lcs_attachment_close(r.at);
    CHECK_EQ(lci_wait(r.h, p.keys, 10, 0), LC_E_CLOSED);
    client_forget(&r);
    tear_down();
}

static void *wait_for_keys(void *unused) {
    int rc;
    (void)unused;
    do rc = lci_wait(b.h, p.keys, p.n, FOREVER);
    while (rc == LC_E_BUSY || rc == LC_E_INTR);
    return (void *)(intptr_t)rc;
}

static void wait_is_woken(void) {
    pthread_t waiter;
    void *rc;
    for (int ending = 0; ending < 2; ending++) {
        set_up(128);
        prompt_make(&p, 1, 10);
        CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 10);
        CHECK_EQ(pthread_create(&waiter, NULL, wait_for_keys, NULL), 0);
        while (!(lc_load(&a.h->root->event) & 1)) {
        } /* it sleeps */
        if (ending) CHECK_EQ(lci_abandon(a.h, p.op.rid, p.op.gen, BLOCKING), LC_OK);
        else prompt_publish(&a, &p, 0);
        CHECK_EQ(pthread_join(waiter, &rc), 0);
        CHECK_EQ((intptr_t)rc, LC_OK);
        CHECK_EQ(match(&b, &p, &l), ending ? 0 : 10);
        prompt_unpin(&a, &p);
        tear_down();
    }
}

/* Pages that a publisher which died left WRITING become ready: all shards were written. */
static void collect_finishes_what_a_publisher_left(void) {
    set_up(128);
    prompt_make(&p, 1, 70);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 70);
    prompt_publish(&a, &p, 0);
    for (uint32_t i = 5; i < 70; i++) {
        _Atomic uint32_t *word = &a.h->pages[p.page[i]].word;
        lc_store(word, (lc_load(word) & ~LCI_STATE_MASK) | LCI_WRITING);
    }
    CHECK_EQ(peek(&b, &p), 5);
    prompt_unpin(&a, &p);
    CHECK_EQ(evict(&b, 1), 1);
    CHECK_EQ(peek(&b, &p), 69);
    tear_down();
}

static void peek_ahead_counts_what_is_written(void) {
    lci_ns_ref other;
    set_up(128);
    CHECK_EQ(lci_namespace_open(a.h, "w", "t", 0, &other, BLOCKING), LC_OK);
    client c = client_join(&s);
    prompt_fill(&a, &p, 1, 4);
    prompt_make(&p, 1, 10);
    CHECK_EQ(lci_peek_ahead(b.h, p.keys, 10, NS), 4);
    CHECK_EQ(prompt_reserve(&c, &p, NS, 2), 6);
    CHECK_EQ(lci_peek_ahead(b.h, p.keys, 10, NS), 10);
    CHECK_EQ(lci_peek_ahead(c.h, p.keys, 10, NS), 10); /* ours */
    CHECK_EQ(lci_peek_ahead(b.h, p.keys, 3, NS), 3);
    CHECK_EQ(lci_peek_ahead(b.h, p.keys, 10, other), 0);
    CHECK_EQ(lci_peek_ahead(b.h, p.keys, 10, NS + (1 << 8)), 0); /* another epoch */
    CHECK_EQ(peek(&b, &p), 4);
    prompt_publish(&c, &p, 0);
    CHECK_EQ(lci_peek_ahead(b.h, p.keys, 10, NS), 10);
    uint32_t slot = c.slot;
    client_die(&c); /* with a shard that is not written */
    CHECK_EQ(lci_peek_ahead(b.h, p.keys, 10, NS), 4);
    lc_store(&lcs_header_of(a.at)->disabled, 1);
    CHECK_EQ(lci_peek_ahead(b.h, p.keys, 10, NS), LC_E_DISABLED);
    lc_store(&lcs_header_of(a.at)->disabled, 0);
    CHECK_EQ(lci_reap_slot(a.h, slot, BLOCKING), 1);
    CHECK_EQ(lci_peek_ahead(b.h, p.keys, 10, NS), 4);
    tear_down();
}

static void peek_ahead_leaves_out_what_will_not_be(void) {
    set_up(64);
    prompt_make(&p, 1, 4);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 4);
    lci_reservation *r = &a.h->res[p.op.rid];
    uint32_t word = lc_load(&r->shard[0]);
    lc_store(&r->shard[0], word | LCI_SHARD_DEAD);
    CHECK_EQ(lci_peek_ahead(b.h, p.keys, 4, NS), 0);
    lc_store(&r->shard[0], (word ^ a.slot) | 40 | LCI_SHARD_DONE); /* by one that has left */
    CHECK_EQ(lci_peek_ahead(b.h, p.keys, 4, NS), 4);
    lc_store(&r->shard[0], word);
    lc_store(&r->state, LCI_RES_DOOMED);
    CHECK_EQ(lci_peek_ahead(b.h, p.keys, 4, NS), 0);
    lc_store(&r->state, LCI_RES_ACTIVE);
    _Atomic uint32_t *third = &a.h->pages[p.page[2]].word;
    uint32_t writing = lc_load(third);
    lc_store(third, (writing & ~LCI_STATE_MASK) | LCI_EVICTING);
    CHECK_EQ(lci_peek_ahead(b.h, p.keys, 4, NS), 2);
    lc_store(third, writing);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    tear_down();
}

static void collect_notices_damage(void) {
    set_up(128);
    prompt_make(&p, 1, 10);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 10);
    prompt_publish(&a, &p, 0);
    prompt_unpin(&a, &p);
    uint32_t freed = 0, first = lc_load(&a.h->res[p.op.rid].pages.first);
    _Atomic uint32_t *damage[] = {&a.h->chunks[first].count, &a.h->chunks[first].page[3],
                                  &a.h->res[p.op.rid].pages.first, &a.h->chunks[first].count};
    const uint32_t value[] = {63, 128, 1000000, 0};
    for (int i = 0; i < 4; i++) {
        uint32_t old = lc_load(damage[i]);
        lc_store(damage[i], value[i]);
        CHECK_EQ(lci_evict_pages(b.h, 1, &freed, BLOCKING), LC_E_CORRUPT);
        lc_store(damage[i], old);
        index_check(&s);
    }
    atomic_fetch_or(&a.h->root->completed[15], UINT64_C(1) << 63); /* there are not so many */
    CHECK_EQ(lci_evict_pages(b.h, 1, &freed, BLOCKING), LC_E_CORRUPT);
    lc_store(&a.h->root->completed[15], 0);
    CHECK_EQ(freed, 0);
    tear_down();
}

const test publish_tests[] = {
    TEST(publish_is_ready_with_the_last_shard),
    TEST(publish_is_refused),
    TEST(publish_after_clear),
    TEST(wait_says_when_nobody_writes),
    TEST(wait_is_woken),
    TEST(peek_ahead_counts_what_is_written),
    TEST(peek_ahead_leaves_out_what_will_not_be),
    TEST(collect_finishes_what_a_publisher_left),
    TEST(collect_notices_damage),
    END_OF_TESTS,
};
