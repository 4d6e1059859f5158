/* SharedLog among the structures of structure_calls.c: a writer and a reader, both of the victim's
 * process. In a copy the writer is dead, and the reader lives until it is told to die. */
#include "structure_calls.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#define ENTRIES 4
#define ENTRY 24

typedef struct pair {
    lcx_log *writer, *reader;
    lcs_attachment *own, *other; /* the writer's, and the reader's */
    int life;                    /* the reader's; -1: it is dead */
} pair;

uint64_t log_bytes(void) { return lcx_log_bytes(ENTRIES, ENTRY); }

static lcx_log_root *root_of(const uint8_t *base) {
    return (lcx_log_root *)(base + LCS_PAYLOAD_OFFSET);
}

/* The slot that the first opening has claimed for the reader, 0 before. */
static uint32_t slot_of_reader(const lcs_attachment *at) {
    for (uint32_t slot = 1; slot < LCS_SLOTS; slot++)
        if (memcmp(lcs_client_of(at, slot)->role, "reader", 7) == 0) return slot;
    return 0;
}

static void be_reader(pair *p) {
    char path[64];
    uint32_t slot = slot_of_reader(p->own);
    uint32_t epoch = slot ? lc_load(&lcs_client_of(p->own, slot)->epoch) : 0;
    snprintf(path, sizeof path, "/proc/self/fd/%d", p->own->life_fd);
    p->life = open(path, O_RDWR | O_CLOEXEC);
    CHECK(p->life >= 0);
    p->other = lcs_attachment_new(p->own->base, p->own->bytes, p->life, slot, epoch, 0);
    CHECK(p->other);
    p->other->pidns = 0;
    if (slot) CHECK_EQ(lcs_byte_lock(p->life, LCS_BYTE_SLOTS + (int64_t)slot, 1), LC_OK);
    else CHECK(lcs_slot_claim(p->other, "reader", 0) > 0);
    p->reader = lcx_log_open(p->other, ENTRIES, ENTRY);
    CHECK(p->reader);
}

static void die(pair *p) {
    close(p->life);
    p->life = -1;
}

static void format_log(uint8_t *base) { (void)base; }

static void *open_log(lcs_attachment *at) {
    pair *p = calloc(1, sizeof *p);
    CHECK(p);
    p->own = at;
    p->writer = lcx_log_open(at, ENTRIES, ENTRY);
    CHECK(p->writer);
    /* A survivor lives for the reader too; of the victim's copy this byte is free. */
    CHECK_EQ(lcs_byte_lock(at->life_fd, LCS_BYTE_SLOTS + (int64_t)at->slot, 1), LC_OK);
    be_reader(p);
    return p;
}

static void close_log(void *log) {
    pair *p = log;
    if (p->life >= 0) die(p);
    lcx_log_close(p->writer);
    lcx_log_close(p->reader);
    lcs_attachment_free(p->other);
    free(p);
}

static int32_t sum_of(const uint8_t *bytes, uint32_t length) {
    uint32_t sum = length;
    for (uint32_t i = 0; i < length; i++) sum = sum * 31 + bytes[i];
    return (int32_t)sum;
}

static uint32_t write_entry(uint64_t number, uint8_t *data) {
    uint32_t length = (uint32_t)(number * 7 % (ENTRY + 1));
    memset(data, (int)number + 1, length);
    return length;
}

static uint64_t cursor_of(const pair *p) {
    return lc_load(&root_of(p->own->base)->cursors[p->other->slot].next);
}

/* What there is for whoever reads and writes next; who has not finished joining is no reader. */
static void look_at_log(const uint8_t *base, void *log, view *v) {
    const lcx_log_root *root = root_of(base);
    uint64_t cursor = cursor_of(log), appended = lc_load(&root->appended);
    uint64_t first = appended < ENTRIES ? 0 : appended - ENTRIES + 1;
    uint32_t writer = lc_load(&root->writer);
    v->count = 0;
    v->value[v->count++] = (int32_t)appended;
    v->value[v->count++] = writer == 0 ? 0 : writer == LCX_LOG_LEFT ? 1 : 2;
    v->value[v->count++] = cursor & LCX_LOG_JOINING ? 0 : (int32_t)cursor;
    for (uint64_t i = first; i < appended; i++) {
        const uint8_t *slot = (const uint8_t *)(root + 1) + i % ENTRIES * (8 + ENTRY);
        v->value[v->count++] = sum_of(slot + 8, lc_load(&((const lcx_log_slot *)slot)->length));
    }
}

static int check_log(void *log, char *text) {
    return lcx_log_check(((pair *)log)->writer, text, 200, BLOCKING);
}

static int append(pair *p) {
    uint8_t data[ENTRY];
    uint64_t number = lc_load(&root_of(p->own->base)->appended);
    return lcx_log_append(p->writer, data, write_entry(number, data));
}

/* What comes must be the entries at the cursor, of which each tells its number. */
static int read_some(pair *p, uint32_t limit) {
    uint8_t out[ENTRIES * ENTRY], wanted[ENTRY], *at = out;
    uint32_t lengths[ENTRIES];
    uint64_t number = cursor_of(p) - 1;
    int n = lcx_log_read(p->reader, out, sizeof out, lengths, limit);
    for (int i = 0; i < n; at += lengths[i++]) {
        CHECK_EQ(lengths[i], write_entry(number + (uint32_t)i, wanted));
        CHECK(memcmp(at, wanted, lengths[i]) == 0);
    }
    return n;
}

enum { LEAD, JOIN, APPEND, READ, READ_ALL, LEAVE, LEAVE_READER };

static void change_log(void *log, uint32_t n) {
    static const struct {
        int call, result;
    } all[] = {{LEAD, 0},        {APPEND, 0}, {APPEND, 0},        {JOIN, 0},     {APPEND, 0},
               {APPEND, 0},      {READ, 1},   {APPEND, 0},        {APPEND, 0},   {APPEND, 0},
               {APPEND, LC_E_FULL}, {READ_ALL, 4}, {READ, LC_E_MISSING}, {LEAVE, 0}, {LEAD, 0},
               {APPEND, 0},      {LEAVE_READER, 0}, {APPEND, 0},  {JOIN, 0},     {APPEND, 0},
               {READ_ALL, 1},    {LEAVE, 0}};
    pair *p = log;
    int rc = 0;
    switch (all[n].call) {
    case LEAD: rc = lcx_log_lead(p->writer, BLOCKING); break;
    case JOIN: rc = lcx_log_join(p->reader); break;
    case APPEND: rc = append(p); break;
    case READ: rc = read_some(p, 1); break;
    case READ_ALL: rc = read_some(p, ENTRIES); break;
    case LEAVE: rc = lcx_log_leave(p->writer, BLOCKING); break;
    case LEAVE_READER: rc = lcx_log_leave(p->reader, BLOCKING); break;
    }
    CHECK_EQ(rc, all[n].result);
}

/* The survivor is the writer now, and nobody stops it; the reader, if it lives, goes on where it
 * stood, without a gap and without seeing anything twice. */
static void use_log(void *log, const view *seen) {
    pair *p = log;
    uint64_t cursor = cursor_of(p);
    char text[200] = "";
    if (cursor == 0) CHECK_EQ(lcx_log_join(p->reader), LC_OK);
    bool joining = cursor & LCX_LOG_JOINING;
    if (joining) die(p);
    for (uint64_t next = cursor_of(p) - 1; !joining && next < (uint32_t)seen->value[0]; next++)
        CHECK_EQ(read_some(p, 1), 1);
    if (!joining) CHECK_EQ(lcx_log_ended(p->reader), seen->value[1] != 0);
    CHECK_EQ(lcx_log_lead(p->writer, BLOCKING), LC_OK);
    for (uint32_t i = 0; i < ENTRIES; i++) CHECK_EQ(append(p), LC_OK);
    if (!joining) {
        CHECK_EQ(append(p), LC_E_FULL);
        CHECK_EQ(lcx_log_ended(p->reader), 0);
        CHECK_EQ(read_some(p, ENTRIES), ENTRIES);
        CHECK_EQ(read_some(p, 1), LC_E_MISSING);
        die(p);
    }
    for (uint32_t i = 0; i <= ENTRIES; i++) CHECK_EQ(append(p), LC_OK);
    if (check_log(p, text)) check_failed("use_log", 0, text);
}

const calls log_calls = {"log",     format_log, open_log,   close_log, look_at_log,
                         check_log, change_log, use_log, 22};
