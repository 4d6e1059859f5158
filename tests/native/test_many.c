/* Reservations of several chains in one call: each as a call of its own would have left it. */
#include "pair.h"

#define CHAINS 3

static struct many { /* three chains of 20 keys, reserved from 0, 5 and 20 on */
    lc_key keys[CHAINS * 20];
    int64_t offsets[CHAINS + 1], starts[CHAINS];
    lci_reserve_op ops[CHAINS];
    int32_t page[CHAINS * 20], codes[CHAINS];
    uint8_t status[CHAINS * 20];
} m;
#define SETTLED 35 /* keys that are reserved: 20, 15 and none */

static void ask(void) {
    m = (struct many){.offsets = {0, 20, 40, 60}, .starts = {0, 5, 20}};
    for (uint32_t c = 0; c < CHAINS; c++) {
        m.ops[c] = (lci_reserve_op){.shards = 1, .ns = NS};
        for (uint32_t i = 0; i < 20; i++) m.keys[c * 20 + i] = prompt_key(c + 1, i);
    }
}

static void begin(uint64_t pages) {
    set_up(pages);
    ask();
}

static int reserve_all(int wait) {
    int rc;
    do
        rc = lci_reserve_many(a.h, m.ops, m.keys, m.offsets, m.starts, CHAINS, m.page, m.status,
                              wait, UINT64_MAX);
    while (rc == LC_E_INTR);
    return rc;
}

static int give_back_all(void) {
    return lci_unreserve_many(a.h, m.ops, m.offsets, m.starts, CHAINS, m.page, m.status);
}

static void a_chain_of_which_nothing_is_reserved_counts_as_used(void) {
    begin(100);
    prompt_fill(&b, &p, 3, 20); /* the third chain, and it is the oldest */
    prompt_fill(&b, &q, 9, 20);
    collect(&b);
    CHECK_EQ(reserve_all(LC_BLOCK), LC_OK);
    CHECK_EQ(evict(&b, 20), 20);
    CHECK_EQ(peek(&b, &p), 20);
    CHECK_EQ(peek(&b, &q), 0);
    CHECK_EQ(give_back_all(), LC_OK);
    tear_down();
}

static void many_are_reserved_published_and_given_back(void) {
    begin(100);
    prompt_fill(&b, &p, 2, 7); /* of the second chain: two keys beyond its start are there */
    CHECK_EQ(reserve_all(LC_BLOCK), LC_OK);
    CHECK_EQ(m.ops[0].made, 20);
    CHECK_EQ(m.ops[1].made, 13);
    CHECK_EQ(m.ops[2].gen, 0); /* nothing of it was asked for */
    CHECK(m.ops[0].rid != m.ops[1].rid);
    for (uint32_t i = 0; i < SETTLED; i++)
        CHECK_EQ(m.status[i], i == 20 || i == 21 ? LCI_PRESENT : LCI_NEW);
    CHECK_EQ(lci_parent(a.h, &a.h->pages[m.page[20 + 2]]), m.page[20 + 1]);
    CHECK_EQ(index_counts(&a).reservations, 2);
    index_check(&s);
    int32_t fresh[SETTLED], n = 0;
    for (uint32_t i = 0; i < SETTLED; i++)
        if (m.status[i] == LCI_NEW) fresh[n++] = m.page[i];
    CHECK_EQ(lci_publish_many(a.h, m.ops, CHAINS, fresh, m.codes), LC_OK);
    for (uint32_t c = 0; c < CHAINS; c++) CHECK_EQ(m.codes[c], 1);
    prompt_make(&q, 1, 20);
    CHECK_EQ(peek(&b, &q), 20);
    prompt_make(&q, 2, 20);
    CHECK_EQ(peek(&b, &q), 20);
    CHECK_EQ(give_back_all(), LC_OK);
    CHECK_EQ(give_back_all(), LC_OK); /* once */
    for (uint32_t i = 0; i < SETTLED; i++) CHECK_EQ(pins_of(&a, (uint32_t)m.page[i]), 0);
    tear_down();
}

static void many_with_several_shards_and_one_that_has_ended(void) {
    begin(100);
    for (uint32_t c = 0; c < CHAINS; c++) m.ops[c].shards = 2;
    CHECK_EQ(reserve_all(LC_BLOCK), LC_OK);
    CHECK_EQ(lci_abandon(a.h, m.ops[0].rid, m.ops[0].gen, BLOCKING), LC_OK);
    CHECK_EQ(lci_publish_many(a.h, m.ops, CHAINS, m.page, m.codes), LC_OK);
    CHECK_EQ(m.codes[0], LC_E_STALE); /* and holds up no other */
    CHECK_EQ(m.codes[1], 1);
    CHECK_EQ(m.codes[2], 1);
    prompt_make(&q, 1, 20);
    CHECK_EQ(peek(&b, &q), 0);
    CHECK_EQ(lc_load(&a.h->pages[m.page[20]].word) & LCI_STATE_MASK, LCI_READY);
    CHECK_EQ(give_back_all(), LC_OK);
    tear_down();
}

static void many_go_on_where_memory_was_missing(void) {
    set_up_grown(100, 25);
    ask();
    CHECK_EQ(reserve_all(LC_BLOCK), LC_E_GROW);
    CHECK_EQ(m.ops[0].made, 20);
    CHECK(m.ops[1].wanted > 0);
    CHECK_EQ(m.ops[1].made, 0);
    uint32_t rid = m.ops[0].rid, gen = m.ops[0].gen;
    CHECK_EQ(lci_grow(a.h, 100, BLOCKING), LC_OK);
    CHECK_EQ(reserve_all(LC_BLOCK), LC_OK);
    CHECK_EQ(m.ops[0].rid, rid); /* the first was through, and was let alone */
    CHECK_EQ(m.ops[0].gen, gen);
    CHECK_EQ(m.ops[1].made, 15);
    index_check(&s);
    CHECK_EQ(give_back_all(), LC_OK);
    tear_down();
}

static void many_of_the_same_keys_are_written_once(void) {
    begin(100);
    for (uint32_t i = 0; i < 20; i++) m.keys[20 + i] = m.keys[i];
    CHECK_EQ(reserve_all(LC_BLOCK), LC_OK);
    CHECK_EQ(m.ops[0].made, 20);
    CHECK_EQ(m.ops[1].made, 0);
    for (uint32_t i = 20; i < SETTLED; i++) CHECK_EQ(m.status[i], LCI_BUSY_KEY);
    CHECK_EQ(give_back_all(), LC_OK);
    tear_down();
}

static void many_are_refused_as_one_is(void) {
    begin(100);
    m.starts[1] = 21;
    CHECK_EQ(reserve_all(LC_BLOCK), LC_E_RANGE);
    CHECK_EQ(m.ops[0].made, 20); /* the caller gives it back */
    m.starts[1] = 20;
    CHECK_EQ(give_back_all(), LC_OK);
    CHECK_EQ(lci_abandon(a.h, m.ops[0].rid, m.ops[0].gen, BLOCKING), LC_OK);
    ask();
    CHECK_EQ(lci_hold(b.h, BLOCKING), LC_OK); /* somebody has the lock */
    CHECK_EQ(reserve_all(LC_TRY), LC_E_BUSY);
    CHECK_EQ(lci_let_go(b.h), LC_OK);
    CHECK_EQ(reserve_all(LC_TRY), LC_OK);
    CHECK_EQ(give_back_all(), LC_OK);
    CHECK_EQ(lci_namespace_good(a.h, NS), 1);
    int rc;
    do rc = lci_clear(a.h, NS, BLOCKING);
    while (rc == LC_E_INTR);
    CHECK_EQ(rc, LC_OK);
    CHECK_EQ(lci_namespace_good(a.h, NS), 0);
    ask();
    CHECK_EQ(reserve_all(LC_BLOCK), LC_E_CLEARED);
    CHECK_EQ(give_back_all(), LC_OK);
    tear_down();
}

const test many_tests[] = {
    TEST(a_chain_of_which_nothing_is_reserved_counts_as_used),
    TEST(many_are_reserved_published_and_given_back),
    TEST(many_with_several_shards_and_one_that_has_ended),
    TEST(many_go_on_where_memory_was_missing),
    TEST(many_of_the_same_keys_are_written_once),
    TEST(many_are_refused_as_one_is),
    END_OF_TESTS,
};
