/* Lists: a model beside SharedList says after every call what must stand there. */
#include "world.h"

#include <stdlib.h>

#define NODES 12
#define LISTS 3

static segment s;
static client c;
static lcx_list *list;

static void set_up(void) {
    s = segment_make(LCS_PAYLOAD_OFFSET + lcx_list_bytes(NODES, LISTS));
    lcx_list_format(s.base, NODES, LISTS);
    c = client_join(&s);
    list = lcx_list_open(c.at, NODES, LISTS);
}

static void tear_down(void) {
    lcx_list_close(list);
    client_leave(&c);
    segment_end(&s);
}

static int put(uint32_t l, uint32_t node, int front) {
    return lcx_list_put(list, l, node, front, 0, BLOCKING);
}

static int broken(void) {
    char text[200];
    int rc = lcx_list_check(list, text, sizeof text, BLOCKING);
    CHECK(rc == 0 || rc == 1);
    return rc;
}

/* Does list `l` hold exactly these nodes, in this order? */
static void check_list(uint32_t l, const int32_t *nodes, int count) {
    int32_t found[NODES];
    CHECK_EQ(lcx_list_copy(list, l, found, NODES, BLOCKING), count);
    CHECK_EQ(lcx_list_length(list, l), count);
    for (int i = 0; i < count; i++) {
        CHECK_EQ(found[i], nodes[i]);
        CHECK_EQ(lcx_list_where(list, (uint32_t)nodes[i]), l);
    }
    CHECK(!broken());
}

static void list_keeps_order_at_both_ends(void) {
    uint32_t node;
    set_up();
    check_list(0, NULL, 0);
    put(0, 1, 0);
    put(0, 2, 0);
    put(0, 0, 1);
    check_list(0, (int32_t[]){0, 1, 2}, 3);
    put(0, 1, 0); /* from the middle to the end */
    check_list(0, (int32_t[]){0, 2, 1}, 3);
    put(1, 2, 1); /* to another list */
    check_list(0, (int32_t[]){0, 1}, 2);
    check_list(1, (int32_t[]){2}, 1);
    CHECK_EQ(lcx_list_pop(list, 0, 1, &node, BLOCKING), LC_OK);
    CHECK_EQ(node, 0);
    put(0, 11, 0);
    CHECK_EQ(lcx_list_pop(list, 0, 0, &node, BLOCKING), LC_OK);
    CHECK_EQ(node, 11);
    check_list(0, (int32_t[]){1}, 1);
    CHECK_EQ(lcx_list_remove(list, 1, BLOCKING), LC_OK);
    check_list(0, NULL, 0);
    tear_down();
}

static void list_random_calls_equal_a_model(void) {
    int32_t model[LISTS][NODES];
    int length[LISTS] = {0};
    uint32_t random = 1;
    set_up();
    for (int step = 0; step < 3000; step++) {
        random = random * 1664525 + 1013904223;
        uint32_t node = random >> 8 & 15, l = (random >> 16) % LISTS, front = random >> 24 & 1;
        if (node >= NODES) continue;
        for (int k = 0; k < LISTS; k++) /* off its list, whichever */
            for (int i = 0; i < length[k]; i++)
                if (model[k][i] == (int32_t)node) {
                    memmove(&model[k][i], &model[k][i + 1],
                            (size_t)(--length[k] - i) * sizeof model[k][0]);
                }
        if (random >> 30 == 0) {
            int rc = lcx_list_remove(list, node, BLOCKING);
            CHECK(rc == LC_OK || rc == LC_E_MISSING);
        } else {
            CHECK_EQ(put(l, node, (int)front), LC_OK);
            memmove(&model[l][front], &model[l][0], (size_t)length[l] * sizeof model[l][0]);
            model[l][front ? 0 : length[l]] = (int32_t)node;
            length[l]++;
        }
        check_list(l, model[l], length[l]);
    }
    tear_down();
}

static void list_refuses(void) {
    uint32_t node;
    set_up();
    CHECK_EQ(put(LISTS, 0, 0), LC_E_RANGE);
    CHECK_EQ(put(0, NODES, 0), LC_E_RANGE);
    CHECK_EQ(lcx_list_remove(list, NODES, BLOCKING), LC_E_RANGE);
    CHECK_EQ(lcx_list_pop(list, LISTS, 0, &node, BLOCKING), LC_E_RANGE);
    CHECK_EQ(lcx_list_copy(list, LISTS, NULL, 0, BLOCKING), LC_E_RANGE);
    CHECK_EQ(lcx_list_length(list, LISTS), LC_E_RANGE);
    CHECK_EQ(lcx_list_where(list, NODES), LC_E_RANGE);
    CHECK_EQ(lcx_list_where(list, 0), LC_E_MISSING);
    CHECK_EQ(lcx_list_remove(list, 0, BLOCKING), LC_E_MISSING);
    CHECK_EQ(lcx_list_pop(list, 0, 1, &node, BLOCKING), LC_E_MISSING);
    put(0, 5, 0);
    CHECK_EQ(lcx_list_put(list, 1, 5, 0, 1, BLOCKING), LC_E_TWICE);
    check_list(0, (int32_t[]){5}, 1);
    tear_down();
}

static void list_handle_of_a_reader_or_a_closed_one(void) {
    uint32_t node;
    char text[100];
    set_up();
    client r = reader_join(&s);
    lcx_list *read = lcx_list_open(r.at, NODES, LISTS);
    CHECK_EQ(lcx_list_length(read, 0), 0);
    CHECK_EQ(lcx_list_put(read, 0, 1, 0, 0, BLOCKING), LC_E_READONLY);
    CHECK_EQ(lcx_list_copy(read, 0, NULL, 0, BLOCKING), LC_E_READONLY);
    lcs_attachment_close(r.at);
    CHECK_EQ(lcx_list_length(read, 0), LC_E_CLOSED);
    CHECK_EQ(lcx_list_where(read, 0), LC_E_CLOSED);
    CHECK_EQ(lcx_list_pop(read, 0, 0, &node, BLOCKING), LC_E_CLOSED);
    CHECK_EQ(lcx_list_remove(read, 0, BLOCKING), LC_E_CLOSED);
    CHECK_EQ(lcx_list_check(read, text, sizeof text, BLOCKING), LC_E_CLOSED);
    lcx_list_close(read);
    client_forget(&r);
    tear_down();
}

/* Links as the library lays them out: counts, where, heads, links. */
static _Atomic uint32_t *words(void) { return (_Atomic uint32_t *)(s.base + LCS_PAYLOAD_OFFSET); }
static lc_link *heads(void) { return (lc_link *)(words() + LISTS + NODES); }
static lc_link *links(void) { return heads() + LISTS; }

static void list_damage_is_named_and_rolled_back(void) {
    static const struct { int word; uint32_t value; int put; } damage[] = {
        {0, 7, LC_OK},             /* a count */
        {LISTS + 1, 3, LC_OK},     /* says it is on another list */
        {LISTS + 8, 1, LC_OK},     /* says it is on a list and is not */
        {LISTS + 1, 99, LC_E_CORRUPT},
    };
    set_up();
    for (int i = 0; i < 3; i++) put(0, (uint32_t)i, 0);
    for (size_t i = 0; i < sizeof damage / sizeof *damage; i++) {
        uint32_t old = lc_load(&words()[damage[i].word]);
        lc_store(&words()[damage[i].word], damage[i].value);
        CHECK(broken());
        if (damage[i].put) CHECK_EQ(put(0, 1, 0), damage[i].put);
        lc_store(&words()[damage[i].word], old);
        CHECK(!broken());
    }
    _Atomic uint32_t *bad[] = {&links()[1].next, &links()[1].prev, &heads()[0].next,
                               &heads()[0].prev};
    for (int i = 0; i < 4; i++) {
        for (uint32_t value = NODES - 1; value <= NODES + LISTS; value += LISTS + 1) {
            uint32_t old = lc_load(bad[i]), node;
            lc_store(bad[i], value);
            CHECK(broken());
            CHECK_EQ(lcx_list_remove(list, i == 3 ? 2 : i == 2 ? 0 : 1, BLOCKING), LC_E_CORRUPT);
            if (i > 1) CHECK_EQ(lcx_list_pop(list, 0, i == 2, &node, BLOCKING), LC_E_CORRUPT);
            lc_store(bad[i], old);
            check_list(0, (int32_t[]){0, 1, 2}, 3);
        }
    }
    tear_down();
}

/* A head whose end is on another list: what is put there must not take that list apart. */
static void list_put_at_an_end_that_is_anothers(void) {
    set_up();
    put(0, 1, 0);
    put(0, 2, 0);
    put(1, 3, 0);
    lc_store(&heads()[0].prev, 3);
    CHECK_EQ(put(0, 4, 0), LC_E_CORRUPT);
    lc_store(&heads()[0].prev, 2);
    check_list(0, (int32_t[]){1, 2}, 2);
    check_list(1, (int32_t[]){3}, 1);
    tear_down();
}

static void list_copy_of_a_damaged_list(void) {
    int32_t out[NODES];
    set_up();
    put(0, 1, 0);
    put(0, 2, 0);
    lc_store(&links()[2].next, LC_NIL);
    CHECK_EQ(lcx_list_copy(list, 0, out, NODES, BLOCKING), LC_E_CORRUPT);
    lc_store(&links()[2].next, lc_list_head(&(lc_lists){.nodes = NODES}, 0));
    CHECK_EQ(lcx_list_copy(list, 0, out, 2, BLOCKING), 2);
    tear_down();
}

static void list_step_of_a_dead_client_is_undone(void) {
    set_up();
    for (int i = 0; i < 3; i++) put(0, (uint32_t)i, 0);
    client dying = client_join(&s);
    lc_txn t;
    CHECK_EQ(lcs_lock_take(dying.at, &t, 0, BLOCKING, LCS_PAYLOAD_OFFSET, s.bytes), LC_OK);
    lc_lists lists = {.links = (uint8_t *)links(), .stride = sizeof(lc_link), .nodes = NODES,
                      .heads = heads(), .head_count = LISTS};
    CHECK_EQ(lc_list_remove(&t, &lists, 1), LC_NIL);
    lc_list_append(&t, &lists, 1, 1);
    CHECK(!lc_list_empty(&lists, 1));
    CHECK_EQ(lc_list_first(&t, &lists, 1), 1);
    client_die(&dying);
    check_list(0, (int32_t[]){0, 1, 2}, 3);
    check_list(1, NULL, 0);
    tear_down();
}

static void list_first_of_a_damaged_list(void) {
    set_up();
    lc_txn t = {.base = s.base};
    lc_lists lists = {.links = (uint8_t *)links(), .stride = sizeof(lc_link), .nodes = NODES,
                      .heads = heads(), .head_count = LISTS};
    CHECK_EQ(lc_list_first(&t, &lists, 0), LC_NIL);
    CHECK_EQ(t.error, LC_OK);
    lc_store(&heads()[0].next, lc_list_head(&lists, 1));
    CHECK_EQ(lc_list_first(&t, &lists, 0), LC_NIL);
    CHECK_EQ(t.error, LC_E_CORRUPT);
    lc_store(&heads()[0].next, 2); /* whose link back does not say so */
    t.error = LC_OK;
    CHECK_EQ(lc_list_first(&t, &lists, 0), LC_NIL);
    CHECK_EQ(t.error, LC_E_CORRUPT);
    CHECK(lc_link_at(&lists, NODES + LISTS) == NULL);
    CHECK(lc_link_at(&lists, LC_NIL) == NULL);
    CHECK(lc_link_at(&lists, NODES + LISTS - 1) == &heads()[LISTS - 1]);
    tear_down();
}

const test list_tests[] = {
    TEST(list_keeps_order_at_both_ends),
    TEST(list_random_calls_equal_a_model),
    TEST(list_refuses),
    TEST(list_handle_of_a_reader_or_a_closed_one),
    TEST(list_damage_is_named_and_rolled_back),
    TEST(list_put_at_an_end_that_is_anothers),
    TEST(list_copy_of_a_damaged_list),
    TEST(list_step_of_a_dead_client_is_undone),
    TEST(list_first_of_a_damaged_list),
    END_OF_TESTS,
};
