/* Logs: one writer, readers, and a model that says which entry each of them reads next. */
#include "world.h"

#include <stdlib.h>
#include <unistd.h>

#define CAPACITY 5
#define MESSAGE 11
#define READERS 3

typedef struct end {
    client c;
    lcx_log *log;
} end;

static segment s;
static end writer, readers[READERS];

static end end_of(client c) {
    end e = {.c = c, .log = lcx_log_open(c.at, CAPACITY, MESSAGE)};
    CHECK(e.log);
    return e;
}

static end join(void) {
    end e = end_of(client_join(&s));
    CHECK_EQ(lcx_log_join(e.log), LC_OK);
    return e;
}

static void leave(end *e) {
    CHECK_EQ(lcx_log_leave(e->log, BLOCKING), LC_OK);
    lcx_log_close(e->log);
    client_leave(&e->c);
}

static void die(end *e) {
    lcx_log_close(e->log);
    client_die(&e->c);
}

static void set_up(uint32_t count) {
    s = segment_make(LCS_PAYLOAD_OFFSET + lcx_log_bytes(CAPACITY, MESSAGE));
    writer = end_of(client_join(&s));
    CHECK_EQ(lcx_log_lead(writer.log, BLOCKING), LC_OK);
    for (uint32_t i = 0; i < count; i++) readers[i] = join();
}

static void tear_down(uint32_t count) {
    for (uint32_t i = 0; i < count; i++) leave(&readers[i]);
    leave(&writer);
    segment_end(&s);
}

static lcx_log_root *root(void) { return (lcx_log_root *)(s.base + LCS_PAYLOAD_OFFSET); }

static lcx_log_slot *slot(uint32_t i) {
    return (lcx_log_slot *)((uint8_t *)(root() + 1) + i * (sizeof(lcx_log_slot) + 16));
}

/* Entry `number`: as many bytes as its number says, all of them telling it. */
static uint32_t length_of(uint64_t number) { return number % (MESSAGE + 1); }

static int append_by(end *e, uint64_t number) {
    uint8_t data[MESSAGE];
    memset(data, (int)number, sizeof data);
    return lcx_log_append(e->log, data, length_of(number));
}

static int append(uint64_t number) { return append_by(&writer, number); }

/* Read; those that come must be `number` and the next ones. */
static int read_with(end *e, uint64_t number, uint32_t limit, uint64_t room) {
    uint8_t out[8 * MESSAGE], *at = out;
    uint32_t lengths[8];
    int n = lcx_log_read(e->log, out, room, lengths, limit);
    for (int i = 0; i < n; i++) {
        CHECK_EQ(lengths[i], length_of(number + (uint32_t)i));
        for (uint32_t b = 0; b < lengths[i]; b++) CHECK_EQ(*at++, (number + (uint32_t)i) & 255);
    }
    return n;
}

static int reads(end *e, uint64_t number, uint32_t limit) {
    return read_with(e, number, limit, 8 * MESSAGE);
}

static int broken_of(end *e) {
    char text[200];
    int rc = lcx_log_check(e->log, text, sizeof text, BLOCKING);
    CHECK(rc == 0 || rc == 1);
    return rc;
}

static int broken(void) { return broken_of(&writer); }

static int64_t behind(const end *e) {
    int64_t all[LCS_SLOTS];
    CHECK(lcx_log_behind(writer.log, all) >= 0);
    return all[e->c.slot];
}

static void log_every_reader_reads_every_entry(void) {
    set_up(2);
    for (uint64_t i = 0; i < 40; i += 3) {
        for (uint64_t k = i; k < i + 3; k++) CHECK_EQ(append(k), LC_OK);
        CHECK_EQ(behind(&readers[0]), 3);
        CHECK(!broken());
        CHECK_EQ(reads(&readers[0], i, 8), 3);
        CHECK_EQ(reads(&readers[1], i, 1), 1);
        CHECK_EQ(reads(&readers[1], i + 1, 8), 2);
        CHECK_EQ(reads(&readers[1], i + 3, 8), LC_E_MISSING);
        CHECK_EQ(lcx_log_position(readers[1].log), (int64_t)i + 3);
    }
    tear_down(2);
}

/* Random appends, reads, joins and leaves; numbers go past the stamp's 32 bits. */
static void log_random_calls_equal_a_model(void) {
    const uint64_t start = UINT64_C(0xffffffff) - 300;
    uint64_t next = start, at[READERS];
    uint32_t random = 1;
    bool in[READERS] = {false};
    set_up(0);
    lc_store(&root()->appended, start);
    for (uint64_t i = start - CAPACITY; i < start; i++)
        lc_store(&slot(i % CAPACITY)->stamp, (uint32_t)i);
    CHECK_EQ(lcx_log_leave(writer.log, BLOCKING), LC_OK);
    CHECK_EQ(lcx_log_lead(writer.log, BLOCKING), LC_OK);
    for (int step = 0; step < 8000; step++) {
        random = random * 1664525 + 1013904223;
        uint32_t who = (random >> 8) % READERS, n = 1 + (random >> 16) % 6, kind = random >> 28;
        if (kind < 7) {
            bool full = false;
            for (uint32_t i = 0; i < READERS; i++) full |= in[i] && next - at[i] == CAPACITY;
            CHECK_EQ(append(next), full ? LC_E_FULL : LC_OK);
            next += !full;
        } else if (kind == 7 && in[who]) {
            leave(&readers[who]);
            in[who] = false;
        } else if (!in[who]) {
            readers[who] = join();
            at[who] = next;
            in[who] = true;
        } else {
            uint64_t there = next - at[who];
            uint64_t expected = n < there ? n : there;
            CHECK_EQ(reads(&readers[who], at[who], n), expected ? (int)expected : LC_E_MISSING);
            at[who] += expected;
        }
        for (uint32_t i = 0; i < READERS; i++)
            CHECK(!in[i] || behind(&readers[i]) == (int64_t)(next - at[i]));
        CHECK(!broken());
    }
    CHECK(next > start + 600);
    for (uint32_t i = 0; i < READERS; i++)
        if (in[i]) leave(&readers[i]);
    tear_down(0);
}

static void log_without_readers_never_fills(void) {
    set_up(0);
    for (uint64_t i = 0; i < 3 * CAPACITY; i++) CHECK_EQ(append(i), LC_OK);
    readers[0] = join(); /* and reads nothing of that */
    CHECK_EQ(reads(&readers[0], 0, 1), LC_E_MISSING);
    for (uint64_t i = 0; i < CAPACITY; i++) CHECK_EQ(append(3 * CAPACITY + i), LC_OK);
    CHECK_EQ(append(99), LC_E_FULL);
    CHECK_EQ(reads(&readers[0], 3 * CAPACITY, 1), 1);
    CHECK_EQ(append(4 * CAPACITY), LC_OK);
    CHECK_EQ(append(99), LC_E_FULL);
    leave(&readers[0]); /* who leaves holds nobody up */
    CHECK_EQ(append(99), LC_OK);
    CHECK(!broken());
    tear_down(0);
}

static void log_reads_what_fits(void) {
    set_up(1);
    for (uint64_t i = 0; i < 9; i++) {
        CHECK_EQ(append(i), LC_OK);
        CHECK_EQ(reads(&readers[0], i, 1), 1);
    }
    for (uint64_t i = 9; i < 13; i++) CHECK_EQ(append(i), LC_OK); /* 9, 10, 11 and 0 bytes */
    CHECK_EQ(read_with(&readers[0], 9, 4, 18), 1);
    CHECK_EQ(read_with(&readers[0], 10, 4, 21), 3);
    CHECK_EQ(read_with(&readers[0], 13, 1, MESSAGE - 1), LC_E_RANGE);
    tear_down(1);
}

static void log_reads_so_much_in_one_call(void) {
    enum { LONG = 1 << 14 };
    static uint8_t data[LONG], out[20 * LONG];
    uint32_t lengths[600];
    s = segment_make(LCS_PAYLOAD_OFFSET + lcx_log_bytes(600, LONG));
    client a = client_join(&s), b = client_join(&s);
    lcx_log *w = lcx_log_open(a.at, 600, LONG), *r = lcx_log_open(b.at, 600, LONG);
    CHECK_EQ(lcx_log_lead(w, BLOCKING), LC_OK);
    CHECK_EQ(lcx_log_join(r), LC_OK);
    for (int i = 0; i < 600; i++) CHECK_EQ(lcx_log_append(w, data, 4), LC_OK);
    CHECK_EQ(lcx_log_read(r, out, sizeof out, lengths, 600), LCX_LOG_BATCH);
    CHECK_EQ(lcx_log_read(r, out, sizeof out, lengths, 600), LCX_LOG_BATCH);
    CHECK_EQ(lcx_log_read(r, out, sizeof out, lengths, 600), 88);
    for (int i = 0; i < 20; i++) CHECK_EQ(lcx_log_append(w, data, LONG), LC_OK);
    CHECK_EQ(lcx_log_read(r, out, sizeof out, lengths, 20), 16);
    CHECK_EQ(lcx_log_read(r, out, sizeof out, lengths, 20), 4);
    CHECK_EQ(lcx_log_leave(r, BLOCKING), LC_OK);
    lcx_log_close(w);
    lcx_log_close(r);
    client_leave(&a);
    client_leave(&b);
    segment_end(&s);
}

static void log_refuses(void) {
    uint8_t data[2 * MESSAGE] = {0};
    uint32_t length;
    set_up(1);
    CHECK_EQ(lcx_log_bytes(0, 1), 0);
    CHECK_EQ(lcx_log_bytes(1, 0), 0);
    CHECK_EQ(lcx_log_bytes(LCX_LOG_CAPACITY + 1, 1), 0);
    CHECK_EQ(lcx_log_bytes(1, LCX_LOG_MESSAGE + 1), 0);
    CHECK_EQ(lcx_log_bytes(LCX_LOG_CAPACITY, 1), 4288 + ((int64_t)LCX_LOG_CAPACITY << 4));
    CHECK(lcx_log_open(writer.c.at, 0, 1) == NULL);
    CHECK_EQ(lcx_log_append(writer.log, data, MESSAGE + 1), LC_E_RANGE);
    CHECK_EQ(lcx_log_append(readers[0].log, data, 1), LC_E_OWNER);
    CHECK_EQ(lcx_log_read(writer.log, data, sizeof data, &length, 1), LC_E_OWNER);
    CHECK_EQ(lcx_log_ended(writer.log), 0);
    CHECK_EQ(lcx_log_position(writer.log), LC_E_OWNER);
    CHECK_EQ(lcx_log_read(readers[0].log, data, sizeof data, &length, 0), LC_E_RANGE);
    CHECK_EQ(lcx_log_join(writer.log), LC_E_CORRUPT);
    CHECK_EQ(lcx_log_lead(readers[0].log, BLOCKING), LC_E_CORRUPT);
    CHECK_EQ(lcx_log_join(readers[0].log), LC_OK); /* again */
    CHECK_EQ(append(0), LC_OK);
    CHECK_EQ(lcx_log_lead(writer.log, BLOCKING), LC_OK);
    CHECK_EQ(append(1), LC_OK);
    CHECK_EQ(reads(&readers[0], 0, 8), 2);
    CHECK_EQ(lcx_log_free_dead(writer.c.at, 0), LC_E_RANGE);
    CHECK_EQ(lcx_log_free_dead(writer.c.at, LCS_SLOTS), LC_E_RANGE);
    CHECK_EQ(lcx_log_free_dead(writer.c.at, writer.c.slot), LC_E_RANGE);
    CHECK_EQ(lcx_log_free_dead(writer.c.at, readers[0].c.slot), LC_E_BUSY);
    CHECK_EQ(lcx_log_free_dead(writer.c.at, 60), LC_E_MISSING);
    segment small = segment_make(LCS_PAYLOAD_OFFSET + sizeof(lcx_log_root));
    small.bytes = LCS_PAYLOAD_OFFSET + sizeof(lcx_log_root) - 64;
    client in_it = client_join(&small);
    CHECK_EQ(lcx_log_free_dead(in_it.at, 60), LC_E_RANGE);
    client_leave(&in_it);
    small.bytes = (LCS_PAYLOAD_OFFSET + sizeof(lcx_log_root) + 4095) / 4096 * 4096;
    segment_end(&small);
    tear_down(1);
}

static void log_notifies_behind_each_change(void) {
    set_up(1);
    uint32_t news = lc_load(&root()->news), room = lc_load(&root()->room);
    for (uint32_t i = 0; i < 3; i++) {
        CHECK_EQ(append(i), LC_OK);
        CHECK_EQ(lc_load(&root()->news), news += 2);
        CHECK_EQ(lc_load(&root()->room), room);
        CHECK_EQ(reads(&readers[0], i, 1), 1);
        CHECK_EQ(lc_load(&root()->news), news);
        CHECK_EQ(lc_load(&root()->room), room += 2);
        CHECK_EQ(reads(&readers[0], i, 1), LC_E_MISSING);
        CHECK_EQ(lc_load(&root()->room), room);
    }
    leave(&readers[0]);
    CHECK_EQ(lc_load(&root()->room), room + 2);
    CHECK_EQ(lcx_log_leave(writer.log, BLOCKING), LC_OK);
    CHECK_EQ(lc_load(&root()->news), news + 2);
    CHECK_EQ(lcx_log_leave(writer.log, BLOCKING), LC_OK); /* nothing to leave */
    CHECK_EQ(lc_load(&root()->news), news + 2);
    CHECK_EQ(lc_load(&root()->room), room + 2);
    CHECK_EQ(lcx_log_lead(writer.log, BLOCKING), LC_OK);
    CHECK_EQ(lc_load(&root()->news), news + 4);
    tear_down(0);
}

static void log_has_one_writer_at_a_time(void) {
    set_up(1);
    CHECK_EQ(lcx_log_writer(readers[0].log), writer.c.slot);
    end second = end_of(client_join(&s));
    CHECK_EQ(lcx_log_lead(second.log, BLOCKING), LC_E_OWNER);
    CHECK_EQ(append_by(&second, 0), LC_E_OWNER);
    CHECK_EQ(append(0), LC_OK);
    CHECK_EQ(append(1), LC_OK);
    CHECK_EQ(lcx_log_ended(readers[0].log), 0);
    die(&writer);
    CHECK_EQ(lcx_log_writer(readers[0].log), 0);
    CHECK_EQ(lcx_log_ended(readers[0].log), 0); /* not all was read */
    CHECK_EQ(reads(&readers[0], 0, 8), 2);
    CHECK_EQ(lcx_log_ended(readers[0].log), 1);
    CHECK_EQ(append_by(&second, 2), LC_E_OWNER);
    CHECK_EQ(lcx_log_lead(second.log, BLOCKING), LC_OK);
    CHECK_EQ(lcx_log_ended(readers[0].log), 0);
    for (uint64_t i = 2; i < 2 + CAPACITY; i++) CHECK_EQ(append_by(&second, i), LC_OK);
    CHECK_EQ(append_by(&second, 99), LC_E_FULL);
    CHECK_EQ(reads(&readers[0], 2, 8), CAPACITY);
    writer = second;
    CHECK_EQ(lcx_log_leave(writer.log, BLOCKING), LC_OK);
    CHECK_EQ(lcx_log_ended(readers[0].log), 1);
    CHECK_EQ(lc_load(&root()->writer), LCX_LOG_LEFT);
    CHECK_EQ(append(99), LC_E_OWNER);
    CHECK(!broken());
    tear_down(1);
}

/* The slot of a dead writer may be taken by somebody else meanwhile. */
static void log_writer_is_one_life_of_a_slot(void) {
    set_up(1);
    uint32_t was = writer.c.slot;
    die(&writer);
    CHECK_EQ(lcx_log_free_dead(readers[0].c.at, was), LC_OK);
    writer = end_of(client_join(&s));
    CHECK_EQ(writer.c.slot, was);
    CHECK_EQ(lcx_log_writer(readers[0].log), 0);
    CHECK_EQ(append(0), LC_E_OWNER);
    CHECK_EQ(lcx_log_lead(writer.log, BLOCKING), LC_OK);
    CHECK_EQ(append(0), LC_OK);
    tear_down(1);
}

static void log_nobody_waits_for_a_dead_reader(void) {
    set_up(3);
    uint32_t dead = readers[1].c.slot;
    for (uint64_t i = 0; i < CAPACITY; i++) CHECK_EQ(append(i), LC_OK);
    CHECK_EQ(reads(&readers[0], 0, 8), CAPACITY);
    CHECK_EQ(append(99), LC_E_FULL);
    die(&readers[1]);
    CHECK_EQ(append(99), LC_E_FULL); /* the third lives, and has read nothing */
    CHECK_EQ(behind(&(end){.c = {.slot = dead}}), -1);
    CHECK_EQ(lc_load(&lcs_client_of(writer.c.at, dead)->state), LCS_CLIENT_FREE);
    CHECK_EQ(reads(&readers[2], 0, 2), 2);
    CHECK_EQ(append(CAPACITY), LC_OK);
    readers[1] = join(); /* in the dead one's slot */
    CHECK_EQ(readers[1].c.slot, dead);
    CHECK_EQ(append(CAPACITY + 1), LC_OK);
    CHECK_EQ(reads(&readers[1], CAPACITY + 1, 8), 1);
    CHECK_EQ(reads(&readers[2], 2, 8), CAPACITY);
    CHECK(!broken());
    tear_down(3);
}

static void log_handle_of_an_onlooker_or_a_closed_one(void) {
    uint8_t out[MESSAGE] = {0};
    uint32_t length = 1;
    int64_t all[LCS_SLOTS];
    char text[100];
    set_up(1);
    append(0);
    end look = end_of(reader_join(&s));
    CHECK_EQ(lcx_log_behind(look.log, all), 1);
    CHECK_EQ(all[readers[0].c.slot], 1);
    CHECK_EQ(all[writer.c.slot], -1);
    CHECK_EQ(lcx_log_writer(look.log), writer.c.slot);
    CHECK_EQ(broken_of(&look), 0);
    for (int closed = 0; closed < 2; closed++) {
        int refused = closed ? LC_E_CLOSED : LC_E_READONLY;
        CHECK_EQ(lcx_log_append(look.log, out, 1), refused);
        CHECK_EQ(lcx_log_read(look.log, out, MESSAGE, &length, 1), refused);
        CHECK_EQ(lcx_log_join(look.log), refused);
        CHECK_EQ(lcx_log_lead(look.log, BLOCKING), refused);
        CHECK_EQ(lcx_log_leave(look.log, BLOCKING), refused);
        CHECK_EQ(lcx_log_ended(look.log), refused);
        CHECK_EQ(lcx_log_position(look.log), refused);
        CHECK_EQ(lcx_log_free_dead(look.c.at, 1), refused);
        lcs_attachment_close(look.c.at);
    }
    CHECK_EQ(lcx_log_behind(look.log, all), LC_E_CLOSED);
    CHECK_EQ(lcx_log_writer(look.log), LC_E_CLOSED);
    CHECK_EQ(lcx_log_check(look.log, text, sizeof text, BLOCKING), LC_E_CLOSED);
    lcx_log_close(look.log);
    client_forget(&look.c);
    tear_down(1);
}

static void log_roles_wait_for_the_lock_and_entries_do_not(void) {
    lc_txn t;
    set_up(1);
    end second = end_of(client_join(&s));
    CHECK_EQ(lcs_lock_take(second.c.at, &t, 0, BLOCKING, LCS_PAYLOAD_OFFSET, s.bytes), LC_OK);
    CHECK_EQ(lcx_log_lead(writer.log, LC_TRY, 0), LC_E_BUSY);
    CHECK_EQ(lcx_log_leave(writer.log, LC_BLOCK, 0), LC_E_TIMEOUT);
    CHECK_EQ(append(0), LC_OK);
    CHECK_EQ(reads(&readers[0], 0, 1), 1);
    end third = join();
    leave(&third);
    CHECK_EQ(lcs_lock_drop(second.c.at, &t, LCS_PAYLOAD_OFFSET, s.bytes), LC_OK);
    CHECK_EQ(pthread_mutex_lock(&writer.c.at->door), 0); /* another thread of ours */
    CHECK_EQ(lcx_log_lead(writer.log, LC_TRY, 0), LC_E_BUSY);
    CHECK_EQ(pthread_mutex_unlock(&writer.c.at->door), 0);
    leave(&second);
    tear_down(1);
}

/* The next holder of the lock undoes a role that was taken and not committed. */
static void log_role_of_a_dead_heir_is_undone(void) {
    set_up(1);
    client dying = client_join(&s);
    lc_txn t;
    CHECK_EQ(lcs_lock_take(dying.at, &t, 0, BLOCKING, LCS_PAYLOAD_OFFSET, s.bytes), LC_OK);
    lc_txn_set(&t, &root()->writer, dying.slot | dying.at->epoch << LCS_LOCK_EPOCH_SHIFT);
    CHECK_EQ(append(0), LC_E_OWNER); /* nobody appends beside an heir */
    client_die(&dying);
    CHECK(!broken_of(&readers[0]));
    CHECK_EQ(append(0), LC_OK);
    CHECK_EQ(reads(&readers[0], 0, 1), 1);
    tear_down(1);
}

static void log_damage_is_named(void) {
    set_up(2);
    for (uint64_t i = 0; i < 7; i++) {
        CHECK_EQ(append(i), LC_OK);
        if (i < 3) CHECK_EQ(reads(&readers[0], i, 1), 1);
        if (i < 4) CHECK_EQ(reads(&readers[1], i, 1), 1);
    } /* entries 3 to 6 in the slots 3, 4, 0, 1; 2 was read by all */
    _Atomic uint64_t *first = &root()->cursors[readers[0].c.slot].next;
    _Atomic uint64_t *second = &root()->cursors[readers[1].c.slot].next;
    struct {
        void *word;
        uint64_t value; /* of 64 bits where a cursor or `appended` is damaged */
        int wide, append, read;
    } damage[] = {
        {&root()->appended, 5, 1, LC_E_CORRUPT, 2},
        {&root()->appended, 12, 1, LC_E_CORRUPT, LC_E_CORRUPT},
        {&root()->appended, UINT64_MAX, 1, LC_E_CORRUPT, LC_E_CORRUPT},
        {&root()->writer, LCS_SLOTS, 0, LC_E_OWNER, 4},
        {&root()->writer, 1 << 8, 0, LC_E_OWNER, 4},
        {first, 9, 1, LC_OK, LC_E_CORRUPT},
        {first, 2, 1, LC_E_FULL, LC_E_CORRUPT},
        {first, UINT64_MAX, 1, LC_OK, LC_E_CORRUPT},
        {second, 20, 1, LC_OK, 4},
        {&root()->cursors[50].next, 7, 1, LC_OK, 4},
        {&root()->cursors[0].next, 7, 1, LC_OK, 4},
        {&root()->cursors[writer.c.slot].next, 7, 1, LC_OK, 4},
        {&slot(3)->stamp, 8, 0, LC_OK, LC_E_CORRUPT},
        {&slot(0)->stamp, 0, 0, LC_OK, LC_E_CORRUPT},
        {&slot(1)->length, MESSAGE + 1, 0, LC_OK, LC_E_CORRUPT},
        {&slot(3)->length, UINT32_MAX, 0, LC_OK, LC_E_CORRUPT},
    };
    uint8_t *sound = malloc(s.bytes);
    CHECK(sound);
    memcpy(sound, s.base, s.bytes);
    for (size_t i = 0; i < sizeof damage / sizeof *damage; i++) {
        if (damage[i].wide) lc_store((_Atomic uint64_t *)damage[i].word, damage[i].value);
        else lc_store((_Atomic uint32_t *)damage[i].word, (uint32_t)damage[i].value);
        CHECK(broken());
        CHECK_EQ(lcx_log_lead(writer.log, BLOCKING) >= LC_E_MISSING, 1);
        if (damage[i].word != &root()->appended || damage[i].value < LCX_LOG_MOST)
            CHECK_EQ(reads(&readers[0], 3, 8), damage[i].read);
        memcpy(s.base + LCS_PAYLOAD_OFFSET, sound + LCS_PAYLOAD_OFFSET,
               s.bytes - LCS_PAYLOAD_OFFSET);
        CHECK_EQ(lcx_log_lead(writer.log, BLOCKING), LC_OK);
        CHECK(!broken());
    }
    for (size_t i = 0; i < sizeof damage / sizeof *damage; i++) { /* what the writer finds */
        if (damage[i].wide) lc_store((_Atomic uint64_t *)damage[i].word, damage[i].value);
        else lc_store((_Atomic uint32_t *)damage[i].word, (uint32_t)damage[i].value);
        int rc = append(7);
        bool cursor = damage[i].wide && damage[i].word != &root()->appended;
        if (cursor && damage[i].value > 8) CHECK_EQ(rc, LC_E_CORRUPT); /* found by its look */
        else if (damage[i].word == &root()->cursors[50].next) CHECK_EQ(rc, LC_OK);
        else if (!cursor || damage[i].append != LC_OK) CHECK_EQ(rc, damage[i].append);
        memcpy(s.base + LCS_PAYLOAD_OFFSET, sound + LCS_PAYLOAD_OFFSET,
               s.bytes - LCS_PAYLOAD_OFFSET);
        CHECK_EQ(lcx_log_lead(writer.log, BLOCKING), LC_OK);
    }
    int64_t all[LCS_SLOTS];
    lc_store(first, 9);
    CHECK_EQ(lcx_log_behind(writer.log, all), LC_E_CORRUPT);
    CHECK_EQ(lcx_log_ended(readers[0].log), 0);
    lc_store(first, LCX_LOG_JOINING | 1);
    CHECK_EQ(lcx_log_position(readers[0].log), LC_E_CORRUPT);
    CHECK_EQ(behind(&readers[0]), CAPACITY);
    CHECK(!broken());
    memcpy(s.base + LCS_PAYLOAD_OFFSET, sound + LCS_PAYLOAD_OFFSET, s.bytes - LCS_PAYLOAD_OFFSET);
    lc_store(&root()->appended, LCX_LOG_MOST);
    CHECK_EQ(lcx_log_behind(writer.log, all), LC_E_CORRUPT);
    CHECK_EQ(lcx_log_lead(writer.log, BLOCKING), LC_E_CORRUPT);
    end third = end_of(client_join(&s));
    CHECK_EQ(lcx_log_join(third.log), LC_E_CORRUPT);
    leave(&third);
    memcpy(s.base + LCS_PAYLOAD_OFFSET, sound + LCS_PAYLOAD_OFFSET, s.bytes - LCS_PAYLOAD_OFFSET);
    CHECK_EQ(reads(&readers[0], 3, 8), 4);
    free(sound);
    tear_down(2);
}

/* A cursor in a slot that nobody is in, which only damage leaves, is taken back like a dead one's,
 * and the slot is claimed as ever. */
static void log_cursor_without_a_client_holds_nobody_up(void) {
    set_up(1);
    uint32_t next = readers[0].c.slot + 1;
    lc_store(&root()->cursors[next].next, 1);
    for (uint64_t i = 0; i <= CAPACITY; i++) {
        CHECK_EQ(append(i), LC_OK);
        CHECK_EQ(reads(&readers[0], i, 1), 1);
    }
    CHECK(!broken());
    readers[1] = join();
    CHECK_EQ(readers[1].c.slot, next);
    tear_down(2);
}

/* Stamps that fit do not make a cursor sound. */
static void log_reads_nothing_behind_the_last_entry(void) {
    set_up(1);
    for (uint64_t i = 0; i < CAPACITY; i++) CHECK_EQ(append(i), LC_OK);
    CHECK_EQ(reads(&readers[0], 0, 3), 3);
    lc_store(&root()->appended, 2);
    CHECK_EQ(reads(&readers[0], 3, 8), LC_E_CORRUPT);
    CHECK_EQ(lcx_log_ended(readers[0].log), 0);
    lc_store(&root()->writer, LCX_LOG_LEFT);
    CHECK_EQ(lcx_log_ended(readers[0].log), LC_E_CORRUPT);
    lc_store(&root()->appended, CAPACITY);
    CHECK_EQ(reads(&readers[0], 3, 8), 2);
    CHECK_EQ(lcx_log_ended(readers[0].log), 1);
    tear_down(1);
}

/* An entry that a reader has still to read is named when it is damaged, even where the next append
 * would be into its slot; one that all have read may look as it likes. */
static void log_checks_what_is_still_to_be_read(void) {
    set_up(1);
    for (uint64_t i = 0; i < CAPACITY; i++) CHECK_EQ(append(i), LC_OK);
    lc_store(&slot(0)->stamp, 77);
    CHECK(broken());
    lc_store(&slot(0)->stamp, 0);
    CHECK_EQ(reads(&readers[0], 0, 1), 1);
    lc_store(&slot(0)->stamp, 77);
    CHECK(!broken());
    lc_store(&slot(1)->stamp, 77);
    CHECK(broken());
    lc_store(&slot(1)->stamp, 1);
    tear_down(1);
}

#ifdef LC_PAUSE_POINTS
static end joiner;
static uint32_t asked;

/* A reader stands between announcing itself and beginning; the log goes round meanwhile. */
static void append_while_joining(void) {
    for (uint64_t i = 0; i < CAPACITY; i++) CHECK_EQ(append(i), LC_OK);
    CHECK_EQ(append(99), LC_E_FULL); /* who joins is waited for: it may begin at any of these */
    CHECK(!broken());
    CHECK_EQ(behind(&joiner), CAPACITY);
    asked++;
}

static void log_appends_while_somebody_joins(void) {
    set_up(0);
    joiner = end_of(client_join(&s));
    play(LC_AT_LOG_ANNOUNCED, append_while_joining);
    CHECK_EQ(lcx_log_join(joiner.log), LC_OK);
    CHECK_EQ(asked, 1);
    CHECK_EQ(behind(&joiner), 0);
    CHECK_EQ(append(CAPACITY), LC_OK);
    CHECK_EQ(reads(&joiner, CAPACITY, 8), 1);
    leave(&joiner);
    tear_down(0);
}

/* One that was killed there is found like any other. */
static void die_while_joining(void) {
    close(joiner.c.life);
    for (uint64_t i = 0; i <= CAPACITY; i++) CHECK_EQ(append(i), LC_OK);
    CHECK(!broken());
}

static void log_joiner_that_died_holds_nobody_up(void) {
    set_up(0);
    joiner = end_of(client_join(&s));
    play(LC_AT_LOG_ANNOUNCED, die_while_joining);
    CHECK_EQ(lcx_log_join(joiner.log), LC_OK); /* of one that is dead: its slot is free by now */
    lc_store(&root()->cursors[joiner.c.slot].next, 0);
    joiner.c.life = -1;
    lcx_log_close(joiner.log);
    client_forget(&joiner.c);
    CHECK_EQ(append(CAPACITY + 1), LC_OK);
    tear_down(0);
}

/* While a slot is written, nobody sees it, and check takes it for neither good nor bad. */
static void look_while_writing(void) {
    CHECK_EQ(reads(&readers[0], CAPACITY, 8), LC_E_MISSING);
    CHECK(!broken_of(&readers[0]));
    asked++;
}

static void log_entry_is_there_when_it_is_counted(void) {
    set_up(1);
    asked = 0;
    for (uint64_t i = 0; i < CAPACITY; i++) CHECK_EQ(append(i), LC_OK);
    CHECK_EQ(reads(&readers[0], 0, 8), CAPACITY);
    play(LC_AT_LOG_WRITTEN, look_while_writing);
    CHECK_EQ(append(CAPACITY), LC_OK);
    CHECK_EQ(asked, 1);
    CHECK_EQ(reads(&readers[0], CAPACITY, 8), 1);
    tear_down(1);
}

/* What is being copied is not overwritten. */
static void append_while_reading(void) {
    CHECK_EQ(append(99), LC_E_FULL);
    asked++;
}

static void log_entry_stays_while_it_is_read(void) {
    set_up(1);
    asked = 0;
    for (uint64_t i = 0; i < CAPACITY; i++) CHECK_EQ(append(i), LC_OK);
    play(LC_AT_LOG_COPIED, append_while_reading);
    CHECK_EQ(reads(&readers[0], 0, 1), 1);
    CHECK_EQ(asked, 1);
    CHECK_EQ(append(CAPACITY), LC_OK);
    CHECK_EQ(reads(&readers[0], 1, 8), CAPACITY);
    tear_down(1);
}

/* Who was declared dead while it took the role has not got it. */
static client thief;

static void lose_the_lock(void) {
    lc_store(&lcs_lock_of(writer.c.at)->word, thief.slot | thief.at->epoch << LCS_LOCK_EPOCH_SHIFT);
}

static void log_heir_that_lost_the_lock_is_told(void) {
    set_up(0);
    CHECK_EQ(lcx_log_leave(writer.log, BLOCKING), LC_OK);
    uint32_t news = lc_load(&root()->news);
    thief = client_join(&s);
    play(LC_AT_LOCKED, lose_the_lock);
    CHECK_EQ(lcx_log_lead(writer.log, BLOCKING), LC_E_LOST);
    CHECK_EQ(lc_load(&root()->news), news);
    client_die(&thief); /* and the next one undoes what was stored in its name */
    CHECK(!broken());
    CHECK_EQ(lc_load(&root()->writer), LCX_LOG_LEFT);
    tear_down(0);
}
#endif

const test log_tests[] = {
    TEST(log_every_reader_reads_every_entry),
    TEST(log_random_calls_equal_a_model),
    TEST(log_without_readers_never_fills),
    TEST(log_reads_what_fits),
    TEST(log_reads_so_much_in_one_call),
    TEST(log_refuses),
    TEST(log_notifies_behind_each_change),
    TEST(log_has_one_writer_at_a_time),
    TEST(log_writer_is_one_life_of_a_slot),
    TEST(log_nobody_waits_for_a_dead_reader),
    TEST(log_handle_of_an_onlooker_or_a_closed_one),
    TEST(log_roles_wait_for_the_lock_and_entries_do_not),
    TEST(log_role_of_a_dead_heir_is_undone),
    TEST(log_damage_is_named),
    TEST(log_cursor_without_a_client_holds_nobody_up),
    TEST(log_reads_nothing_behind_the_last_entry),
    TEST(log_checks_what_is_still_to_be_read),
#ifdef LC_PAUSE_POINTS
    TEST(log_appends_while_somebody_joins),
    TEST(log_joiner_that_died_holds_nobody_up),
    TEST(log_entry_is_there_when_it_is_counted),
    TEST(log_entry_stays_while_it_is_read),
    TEST(log_heir_that_lost_the_lock_is_told),
#endif
    END_OF_TESTS,
};
