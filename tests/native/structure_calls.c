#include "structure_calls.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#define NODES 12
#define LISTS 3
#define RECORDS 40
#define MESSAGES 4
#define MESSAGE 24

_Static_assert(RECORDS <= MOST_SEEN && (NODES + 1) * LISTS <= MOST_SEEN, "what is seen fits");

/* A copy of the segment with one client in it, in which nobody else proves his life. */
typedef struct copy {
    uint8_t *base;
    lcs_attachment *at;
} copy;

static segment real;
static client victim;
static copy survivors, heirs;
static const calls *now;
static view before, after;
static uint32_t deaths, step;

static bool equal(const view *a, const view *b) {
    return a->count == b->count && !memcmp(a->value, b->value, a->count * sizeof *a->value);
}

/* ------------------------------------------------------------------ the list */

static void format_list(uint8_t *base) { lcx_list_format(base, NODES, LISTS); }
static void *open_list(lcs_attachment *at) { return lcx_list_open(at, NODES, LISTS); }
static void close_list(void *l) { lcx_list_close(l); }

static void look_at_lists(const uint8_t *base, void *l, view *v) {
    (void)base;
    v->count = 0;
    for (uint32_t i = 0; i < LISTS; i++) {
        int n = lcx_list_copy(l, i, v->value + v->count + 1, NODES, BLOCKING);
        CHECK(n >= 0);
        CHECK_EQ(lcx_list_length(l, i), n);
        v->value[v->count] = n;
        v->count += (uint32_t)n + 1;
    }
}

static int check_list(void *l, char *text) { return lcx_list_check(l, text, 200, BLOCKING); }

static void change_list(void *l, uint32_t n) {
    uint32_t node;
    switch (n) {
    case 0: CHECK_EQ(lcx_list_put(l, 0, 3, 0, 1, BLOCKING), LC_OK); break;
    case 1: CHECK_EQ(lcx_list_put(l, 0, 5, 1, 0, BLOCKING), LC_OK); break;
    case 2: CHECK_EQ(lcx_list_put(l, 1, 3, 0, 0, BLOCKING), LC_OK); break; /* from the other */
    case 3: CHECK_EQ(lcx_list_put(l, 1, 7, 1, 0, BLOCKING), LC_OK); break;
    case 4: CHECK_EQ(lcx_list_remove(l, 3, BLOCKING), LC_OK); break;
    case 5: CHECK_EQ(lcx_list_pop(l, 1, 1, &node, BLOCKING), LC_OK); break;
    default: CHECK_EQ(lcx_list_pop(l, 0, 0, &node, BLOCKING), LC_OK); break;
    }
}

/* ------------------------------------------------------------------ the dict */

static lc_key key_of(uint32_t i) { return crowded_key(i & 3, i); }

static void format_dict(uint8_t *base) { lcx_dict_format(base, RECORDS); }
static void *open_dict(lcs_attachment *at) { return lcx_dict_open(at, RECORDS); }
static void close_dict(void *d) { lcx_dict_close(d); }

static void look_at_dict(const uint8_t *base, void *d, view *v) {
    (void)base;
    v->count = RECORDS;
    int n = 0;
    for (uint32_t i = 0; i < RECORDS; i++) {
        lc_key key = key_of(i);
        v->value[i] = -1;
        n += lcx_dict_get(d, key.lo, key.hi, &v->value[i]) == LC_OK;
    }
    CHECK_EQ(lcx_dict_length(d), n);
}

static int check_dict(void *d, char *text) { return lcx_dict_check(d, text, 200, BLOCKING); }

static void change_dict(void *d, uint32_t n) {
    static const struct {
        uint32_t key;
        int32_t value; /* 0: removed */
    } all[] = {{0, 10}, {4, 11}, {8, 12}, {1, 13}, {4, 14},
               {0, 0}, {12, 15}, {8, 0}, {8, 16}, {1, 0}};
    lc_key key = key_of(all[n].key);
    int32_t value = all[n].value;
    if (value) CHECK(lcx_dict_put(d, key.lo, key.hi, value, 0, BLOCKING) >= 0);
    else CHECK_EQ(lcx_dict_pop(d, key.lo, key.hi, &value, BLOCKING), LC_OK);
}

/* ------------------------------------------------------------------ the ring */

static void format_ring(uint8_t *base) { (void)base; }
static void *open_ring(lcs_attachment *at) { return lcx_ring_open(at, MESSAGES, MESSAGE); }
static void close_ring(void *r) { lcx_ring_close(r); }

static int32_t sum_of(const uint8_t *bytes, uint32_t length) {
    uint32_t sum = length;
    for (uint32_t i = 0; i < length; i++) sum = sum * 31 + bytes[i];
    return (int32_t)sum;
}

/* The same as popping all of them, which is done to see whether one can; see use_ring. */
static void look_at_ring(const uint8_t *base, void *r, view *v) {
    const lcx_ring_root *root = (const lcx_ring_root *)(base + LCS_PAYLOAD_OFFSET);
    v->count = lc_load(&root->count);
    CHECK(v->count <= MESSAGES);
    CHECK_EQ(lcx_ring_length(r), v->count);
    for (uint32_t i = 0; i < v->count; i++) {
        uint32_t number = (lc_load(&root->first) + i) % MESSAGES;
        const uint8_t *slot = (const uint8_t *)(root + 1) + number * (8 + MESSAGE);
        v->value[i] = sum_of(slot + 8, lc_load(&((const lcx_ring_slot *)slot)->length));
    }
}

static int check_ring(void *r, char *text) { return lcx_ring_check(r, text, 200, BLOCKING); }

static int push_some(lcx_ring *r, uint32_t number, uint32_t n) {
    uint8_t data[MESSAGES * MESSAGE];
    uint32_t lengths[MESSAGES], bytes = 0;
    for (uint32_t i = 0; i < n; i++) {
        lengths[i] = (number * 7 + i * 5) % (MESSAGE + 1);
        memset(data + bytes, (int)(number + i), lengths[i]);
        bytes += lengths[i];
    }
    return lcx_ring_push(r, data, lengths, n, BLOCKING);
}

static int pop_some(lcx_ring *r, uint32_t limit, int32_t *sums) {
    uint8_t out[MESSAGES * MESSAGE], *at = out;
    uint32_t lengths[MESSAGES];
    int n = lcx_ring_pop(r, out, sizeof out, lengths, limit, BLOCKING);
    for (int i = 0; i < n; at += lengths[i++]) sums[i] = sum_of(at, lengths[i]);
    return n;
}

static void change_ring(void *r, uint32_t n) {
    static const struct {
        uint32_t push, pop;
        int result;
    } all[] = {{1, 0, 1}, {2, 0, 2}, {0, 1, 1}, {3, 0, 2}, {1, 0, LC_E_FULL}, {0, 3, 3},
               {0, 2, 1}, {0, 1, LC_E_MISSING}, {4, 0, 4}, {0, 1, 1}};
    int32_t sums[MESSAGES];
    if (all[n].push) CHECK_EQ(push_some(r, 10 * n, all[n].push), all[n].result);
    else CHECK_EQ(pop_some(r, all[n].pop, sums), all[n].result);
}

/* What was seen can be popped, once, and then the ring takes as much as ever. */
static void use_ring(void *r, const view *seen) {
    int32_t sums[MESSAGES];
    CHECK_EQ(pop_some(r, MESSAGES, sums), seen->count ? (int)seen->count : LC_E_MISSING);
    CHECK(memcmp(sums, seen->value, seen->count * sizeof *sums) == 0);
    CHECK_EQ(pop_some(r, 1, sums), LC_E_MISSING);
    CHECK_EQ(push_some(r, 200, MESSAGES), MESSAGES);
    CHECK_EQ(push_some(r, 200, 1), LC_E_FULL);
    CHECK_EQ(pop_some(r, MESSAGES, sums), MESSAGES);
}

static const calls list = {"list",     format_list, open_list, close_list, look_at_lists,
                           check_list, change_list, NULL, 7};
static const calls dict = {"dict",     format_dict, open_dict, close_dict, look_at_dict,
                           check_dict, change_dict, NULL, 10};
static const calls ring = {"ring",     format_ring, open_ring, close_ring, look_at_ring,
                           check_ring, change_ring, use_ring, 10};
const calls *const structures[] = {&list, &dict, &ring, &log_calls};
const uint32_t structure_count = sizeof structures / sizeof *structures;

uint64_t structure_bytes(const calls *c) {
    uint64_t payload = c == &list   ? lcx_list_bytes(NODES, LISTS)
                       : c == &dict ? lcx_dict_bytes(RECORDS)
                       : c == &ring ? lcx_ring_bytes(MESSAGES, MESSAGE)
                                    : log_bytes();
    return LCS_PAYLOAD_OFFSET + payload;
}

/* ------------------------------------------------------------------ deaths */

/* The next taker of the lock, which is `check`, undoes what the dead began. */
static void look(const uint8_t *left, const copy *c, void (*watch)(const uint8_t *base)) {
    char text[200] = "";
    view seen;
    memcpy(c->base, left, real.bytes);
    void *structure = now->open(c->at);
    CHECK(structure);
    if (watch) watch(c->base);
    int broken = now->check(structure, text);
    if (watch) watch(NULL);
    if (broken) check_failed(now->name, (int)step, text);
    now->look(c->base, structure, &seen);
    if (!equal(&seen, &before) && !equal(&seen, &after))
        check_failed(now->name, (int)step, "half a step is left");
    if (now->use) now->use(structure, &seen);
    now->close(structure);
    deaths++;
}

void structure_look(const uint8_t *left, void (*watch)(const uint8_t *base)) {
    look(left, &survivors, watch);
}

void structure_look_again(void) { look(survivors.base, &heirs, NULL); }

static copy make_copy(void) {
    copy c;
    client who = client_join(&real);
    c.base = mmap(NULL, real.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int life = memfd_create("life", MFD_CLOEXEC);
    CHECK(c.base != MAP_FAILED && life >= 0);
    memcpy(c.base, real.base, real.bytes);
    c.at = lcs_attachment_new(c.base, real.bytes, life, who.slot, who.at->epoch, 0);
    CHECK(c.at);
    c.at->pidns = 0; /* only the byte locks are asked who lives */
    return c;
}

static void set_up(const calls *c) {
    real = segment_make(structure_bytes(c));
    c->format(real.base);
    victim = client_join(&real);
    survivors = make_copy();
    heirs = make_copy();
}

uint32_t structure_play(const calls *c, void (*watch)(const segment *watched)) {
    now = c;
    check_running = c->name;
    deaths = 0;
    set_up(c);
    void *structure = c->open(victim.at);
    /* What a step comes to is seen where nobody dies: in a second segment. */
    segment twin = segment_make(real.bytes);
    memcpy(twin.base, real.base, real.bytes);
    client other = client_join(&twin);
    void *model = c->open(other.at);
    c->look(twin.base, model, &after);
    for (step = 0; step < c->steps; step++) {
        before = after;
        c->change(model, step);
        c->look(twin.base, model, &after);
        watch(&real);
        c->change(structure, step);
        watch(NULL);
        before = after; /* behind the call: nothing but what it came to */
        structure_look(real.base, NULL);
    }
    c->close(structure);
    c->close(model);
    client_leave(&other);
    segment_end(&twin);
    return deaths;
}
