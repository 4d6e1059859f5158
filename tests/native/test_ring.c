/* Rings: a model beside SharedRing says after every call what must stand there. */
#include "world.h"

#include <stdlib.h>

#define CAPACITY 5
#define MESSAGE 11

static segment s;
static client c;
static lcx_ring *ring;

static void set_up_as(uint32_t capacity, uint32_t message) {
    s = segment_make(LCS_PAYLOAD_OFFSET + lcx_ring_bytes(capacity, message));
    c = client_join(&s);
    ring = lcx_ring_open(c.at, capacity, message);
    CHECK(ring);
}

static void set_up(void) { set_up_as(CAPACITY, MESSAGE); }

static void tear_down(void) {
    lcx_ring_close(ring);
    client_leave(&c);
    segment_end(&s);
}

static lcx_ring_root *root(void) { return (lcx_ring_root *)(s.base + LCS_PAYLOAD_OFFSET); }

static lcx_ring_slot *slot(uint32_t i) {
    return (lcx_ring_slot *)((uint8_t *)(root() + 1) + i * (sizeof(lcx_ring_slot) + 16));
}

/* Message `number`: as many bytes as its number says, all of them telling it. */
static uint32_t length_of(uint32_t number) { return number % (MESSAGE + 1); }

static int push(uint32_t number, uint32_t n) {
    uint8_t data[8 * MESSAGE];
    uint32_t lengths[8], bytes = 0;
    for (uint32_t i = 0; i < n; i++) {
        lengths[i] = length_of(number + i);
        memset(data + bytes, (int)(number + i), lengths[i]);
        bytes += lengths[i];
    }
    return lcx_ring_push(ring, data, lengths, n, BLOCKING);
}

/* Pop with room for so many bytes; those that come must be `number` and the next ones. */
static int pop(uint32_t number, uint32_t limit, uint64_t room) {
    uint8_t out[8 * MESSAGE], *at = out;
    uint32_t lengths[8];
    int n = lcx_ring_pop(ring, out, room, lengths, limit, BLOCKING);
    for (int i = 0; i < n; i++) {
        CHECK_EQ(lengths[i], length_of(number + (uint32_t)i));
        for (uint32_t b = 0; b < lengths[i]; b++) CHECK_EQ(*at++, (number + (uint32_t)i) & 255);
    }
    return n;
}

static int broken(void) {
    char text[200];
    int rc = lcx_ring_check(ring, text, sizeof text, BLOCKING);
    CHECK(rc == 0 || rc == 1);
    return rc;
}

static void ring_keeps_order_and_goes_round(void) {
    set_up();
    for (uint32_t i = 0; i < 40; i += 3) {
        CHECK_EQ(push(i, 2), 2);
        CHECK_EQ(push(i + 2, 1), 1);
        CHECK_EQ(lcx_ring_length(ring), 3);
        CHECK(!broken());
        CHECK_EQ(pop(i, 1, sizeof(uint8_t[8 * MESSAGE])), 1);
        CHECK_EQ(pop(i + 1, 8, sizeof(uint8_t[8 * MESSAGE])), 2);
        CHECK_EQ(lcx_ring_length(ring), 0);
    }
    tear_down();
}

static void ring_random_calls_equal_a_model(void) {
    uint32_t random = 1, first = 0, next = 0;
    set_up();
    lc_store(&root()->pushed, UINT32_MAX - 100); /* stamps wrap on the way */
    for (int step = 0; step < 5000; step++) {
        random = random * 1664525 + 1013904223;
        uint32_t n = 1 + (random >> 8) % 7, room = CAPACITY - (next - first), there = next - first;
        if (random >> 30 < 2) {
            CHECK_EQ(push(next, n), room == 0 ? LC_E_FULL : (int)(n < room ? n : room));
            next += n < room ? n : room;
        } else {
            uint32_t expected = n < there ? n : there;
            CHECK_EQ(pop(first, n, 8 * MESSAGE), expected ? (int)expected : LC_E_MISSING);
            first += expected;
        }
        CHECK_EQ(lcx_ring_length(ring), next - first);
        CHECK(!broken());
    }
    tear_down();
}

static void ring_pops_what_fits(void) {
    set_up();
    CHECK_EQ(push(9, 4), 4); /* 9, 10, 11 and 0 bytes */
    CHECK_EQ(pop(9, 4, 18), 1);
    CHECK_EQ(pop(10, 4, 21), 3);
    CHECK_EQ(push(4, 1), 1);
    CHECK_EQ(pop(4, 1, MESSAGE - 1), LC_E_RANGE);
    CHECK_EQ(pop(4, 1, MESSAGE), 1);
    tear_down();
}

static void ring_moves_so_much_in_one_hold(void) {
    enum { LONG = 1 << 14 };
    static uint8_t data[600 * 4 + 20 * LONG], out[20 * LONG];
    uint32_t lengths[600];
    set_up_as(600, LONG);
    for (int i = 0; i < 600; i++) lengths[i] = 4;
    CHECK_EQ(lcx_ring_push(ring, data, lengths, 600, BLOCKING), LCX_RING_BATCH);
    CHECK_EQ(lcx_ring_push(ring, data, lengths, 600, BLOCKING), LCX_RING_BATCH);
    CHECK_EQ(lcx_ring_push(ring, data, lengths, 600, BLOCKING), 600 - 2 * LCX_RING_BATCH);
    CHECK_EQ(lcx_ring_pop(ring, out, sizeof out, lengths, 600, BLOCKING), LCX_RING_BATCH);
    CHECK_EQ(lcx_ring_pop(ring, out, sizeof out, lengths, 600, BLOCKING), LCX_RING_BATCH);
    CHECK_EQ(lcx_ring_pop(ring, out, sizeof out, lengths, 600, BLOCKING), 88);
    for (int i = 0; i < 20; i++) lengths[i] = LONG;
    CHECK_EQ(lcx_ring_push(ring, data, lengths, 20, BLOCKING), 16);
    CHECK_EQ(lcx_ring_push(ring, data, lengths, 4, BLOCKING), 4);
    CHECK_EQ(lcx_ring_pop(ring, out, sizeof out, lengths, 20, BLOCKING), 16);
    CHECK_EQ(lcx_ring_pop(ring, out, sizeof out, lengths, 20, BLOCKING), 4);
    CHECK(!broken());
    tear_down();
}

static void ring_of_the_largest_messages(void) {
    static uint8_t data[LCX_RING_MESSAGE], out[LCX_RING_MESSAGE];
    uint32_t length = sizeof data;
    set_up_as(1, sizeof data);
    for (int i = 0; i < 3; i++) {
        memset(data, i + 1, sizeof data);
        CHECK_EQ(lcx_ring_push(ring, data, &length, 1, BLOCKING), 1);
        CHECK_EQ(lcx_ring_push(ring, data, &length, 1, BLOCKING), LC_E_FULL);
        CHECK_EQ(lcx_ring_pop(ring, out, sizeof out, &length, 1, BLOCKING), 1);
        CHECK(length == sizeof out && memcmp(data, out, sizeof out) == 0);
    }
    tear_down();
}

static void ring_refuses(void) {
    uint32_t lengths[2] = {1, MESSAGE + 1};
    uint8_t data[2 * MESSAGE] = {0};
    set_up();
    CHECK_EQ(lcx_ring_bytes(0, 1), 0);
    CHECK_EQ(lcx_ring_bytes(1, 0), 0);
    CHECK_EQ(lcx_ring_bytes(LCX_RING_CAPACITY + 1, 1), 0);
    CHECK_EQ(lcx_ring_bytes(1, LCX_RING_MESSAGE + 1), 0);
    CHECK_EQ(lcx_ring_bytes(LCX_RING_CAPACITY, 1), 192 + ((int64_t)LCX_RING_CAPACITY << 4));
    CHECK(lcx_ring_open(c.at, 0, 1) == NULL);
    CHECK_EQ(lcx_ring_push(ring, data, lengths, 2, BLOCKING), LC_E_RANGE);
    CHECK_EQ(lcx_ring_push(ring, data, lengths, 0, BLOCKING), LC_E_RANGE);
    CHECK_EQ(lcx_ring_pop(ring, data, sizeof data, lengths, 0, BLOCKING), LC_E_RANGE);
    CHECK_EQ(pop(0, 1, MESSAGE), LC_E_MISSING);
    CHECK_EQ(push(0, 6), CAPACITY);
    CHECK_EQ(push(6, 1), LC_E_FULL);
    CHECK(!broken());
    tear_down();
}

static void ring_notifies_behind_each_change(void) {
    uint32_t filled, drained;
    set_up();
    for (int i = 0; i < 3; i++) {
        filled = lc_load(&root()->filled);
        drained = lc_load(&root()->drained);
        CHECK_EQ(push(1, 1), 1);
        CHECK_EQ(lc_load(&root()->filled), filled + 2);
        CHECK_EQ(lc_load(&root()->drained), drained);
        CHECK_EQ(pop(1, 1, MESSAGE), 1);
        CHECK_EQ(lc_load(&root()->filled), filled + 2);
        CHECK_EQ(lc_load(&root()->drained), drained + 2);
        CHECK_EQ(pop(1, 1, MESSAGE), LC_E_MISSING);
        CHECK_EQ(lc_load(&root()->drained), drained + 2);
    }
    tear_down();
}

static void ring_handle_of_a_reader_or_a_closed_one(void) {
    uint8_t out[MESSAGE] = {0};
    uint32_t length = 1;
    char text[100];
    set_up();
    push(1, 1);
    client r = reader_join(&s);
    lcx_ring *read = lcx_ring_open(r.at, CAPACITY, MESSAGE);
    CHECK_EQ(lcx_ring_length(read), 1);
    CHECK_EQ(lcx_ring_push(read, out, &length, 1, BLOCKING), LC_E_READONLY);
    CHECK_EQ(lcx_ring_pop(read, out, MESSAGE, &length, 1, BLOCKING), LC_E_READONLY);
    CHECK_EQ(lcx_ring_check(read, text, sizeof text, BLOCKING), LC_E_READONLY);
    lcs_attachment_close(r.at);
    CHECK_EQ(lcx_ring_length(read), LC_E_CLOSED);
    CHECK_EQ(lcx_ring_push(read, out, &length, 1, BLOCKING), LC_E_CLOSED);
    CHECK_EQ(lcx_ring_pop(read, out, MESSAGE, &length, 1, BLOCKING), LC_E_CLOSED);
    CHECK_EQ(lcx_ring_check(read, text, sizeof text, BLOCKING), LC_E_CLOSED);
    lcx_ring_close(read);
    client_forget(&r);
    tear_down();
}

static void ring_is_busy_while_its_lock_is_held(void) {
    uint8_t out[MESSAGE];
    uint32_t length = 1;
    lc_txn t;
    set_up();
    client other = client_join(&s);
    CHECK_EQ(lcs_lock_take(other.at, &t, 0, BLOCKING, LCS_PAYLOAD_OFFSET, s.bytes), LC_OK);
    CHECK_EQ(lcx_ring_push(ring, out, &length, 1, LC_TRY, 0), LC_E_BUSY);
    CHECK_EQ(lcx_ring_pop(ring, out, MESSAGE, &length, 1, LC_BLOCK, 0), LC_E_TIMEOUT);
    CHECK_EQ(lcs_lock_drop(other.at, &t, LCS_PAYLOAD_OFFSET, s.bytes), LC_OK);
    CHECK_EQ(pthread_mutex_lock(&c.at->door), 0); /* another thread of ours */
    CHECK_EQ(lcx_ring_push(ring, out, &length, 1, LC_TRY, 0), LC_E_BUSY);
    CHECK_EQ(pthread_mutex_unlock(&c.at->door), 0);
    client_leave(&other);
    CHECK_EQ(push(1, 1), 1);
    tear_down();
}

static void ring_damage_is_named_and_nothing_is_moved(void) {
    set_up();
    CHECK_EQ(push(0, 5), 5);
    CHECK_EQ(pop(0, 3, 8 * MESSAGE), 3);
    CHECK_EQ(push(5, 2), 2); /* slots 3, 4, 0, 1: messages 3 to 6 */
    struct {
        _Atomic uint32_t *word;
        uint32_t value;
        int push, pop;
    } damage[] = {
        {&root()->first, CAPACITY, LC_E_CORRUPT, LC_E_CORRUPT},
        {&root()->first, 2, 1, LC_E_CORRUPT},
        {&root()->first, UINT32_MAX, LC_E_CORRUPT, LC_E_CORRUPT},
        {&root()->count, CAPACITY + 1, LC_E_CORRUPT, LC_E_CORRUPT},
        {&root()->count, 5, LC_E_FULL, LC_E_CORRUPT},
        {&root()->pushed, 8, 1, LC_E_CORRUPT},
        {&slot(3)->stamp, 4, 1, LC_E_CORRUPT},
        {&slot(0)->stamp, 0, 1, LC_E_CORRUPT}, /* the third: the first two stay as well */
        {&slot(1)->length, MESSAGE + 1, 1, LC_E_CORRUPT},
        {&slot(3)->length, UINT32_MAX, 1, LC_E_CORRUPT},
    };
    uint8_t *sound = malloc(s.bytes);
    CHECK(sound);
    memcpy(sound, s.base, s.bytes);
    for (size_t i = 0; i < sizeof damage / sizeof *damage; i++) {
        lc_store(damage[i].word, damage[i].value);
        CHECK(broken());
        CHECK_EQ(pop(3, 4, 8 * MESSAGE), damage[i].pop);
        CHECK_EQ(lc_load(&root()->drained), 2);
        CHECK_EQ(push(7, 1), damage[i].push);
        memcpy(s.base + LCS_PAYLOAD_OFFSET, sound + LCS_PAYLOAD_OFFSET,
               s.bytes - LCS_PAYLOAD_OFFSET);
        CHECK(!broken());
    }
    lc_store(&root()->count, CAPACITY + 1);
    CHECK_EQ(lcx_ring_length(ring), LC_E_CORRUPT);
    memcpy(s.base, sound, s.bytes);
    CHECK_EQ(pop(3, 8, 8 * MESSAGE), 4);
    free(sound);
    tear_down();
}

/* A consumer and a producer die with their words stored and not committed. */
static void ring_step_of_a_dead_client_is_undone(void) {
    set_up();
    CHECK_EQ(push(1, 3), 3);
    for (int popping = 0; popping < 2; popping++) {
        client dying = client_join(&s);
        lc_txn t;
        CHECK_EQ(lcs_lock_take(dying.at, &t, 0, BLOCKING, LCS_PAYLOAD_OFFSET, s.bytes), LC_OK);
        if (popping) lc_txn_set(&t, &root()->first, 2);
        else lc_txn_add(&t, &root()->pushed, 2);
        lc_txn_set(&t, &root()->count, popping ? 1 : 5);
        client_die(&dying);
        CHECK(!broken());
        CHECK_EQ(lcx_ring_length(ring), 3);
    }
    CHECK_EQ(pop(1, 8, 8 * MESSAGE), 3);
    tear_down();
}

/* Who was declared dead between taking the lock and giving it back has popped nothing. */
#ifdef LC_PAUSE_POINTS
static client thief;

static void lose_the_lock(void) {
    lc_store(&lcs_lock_of(c.at)->word, thief.slot | thief.at->epoch << LCS_LOCK_EPOCH_SHIFT);
}

static void ring_pop_of_one_who_lost_the_lock_returns_nothing(void) {
    set_up();
    CHECK_EQ(push(1, 1), 1);
    thief = client_join(&s);
    play(LC_AT_LOCKED, lose_the_lock);
    CHECK_EQ(pop(1, 1, MESSAGE), LC_E_LOST);
    CHECK_EQ(lc_load(&root()->drained), 0);
    client_die(&thief); /* and the next one undoes what was stored in its name */
    CHECK_EQ(pop(1, 1, MESSAGE), 1);
    tear_down();
}
#endif

const test ring_tests[] = {
    TEST(ring_keeps_order_and_goes_round),
    TEST(ring_random_calls_equal_a_model),
    TEST(ring_pops_what_fits),
    TEST(ring_moves_so_much_in_one_hold),
    TEST(ring_of_the_largest_messages),
    TEST(ring_refuses),
    TEST(ring_notifies_behind_each_change),
    TEST(ring_handle_of_a_reader_or_a_closed_one),
    TEST(ring_is_busy_while_its_lock_is_held),
    TEST(ring_damage_is_named_and_nothing_is_moved),
    TEST(ring_step_of_a_dead_client_is_undone),
#ifdef LC_PAUSE_POINTS
    TEST(ring_pop_of_one_who_lost_the_lock_returns_nothing),
#endif
    END_OF_TESTS,
};
