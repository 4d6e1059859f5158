/* structures: who changes a SharedList or a SharedDict dies after each of his stores. Whoever takes
 * the lock next finds it as it was before the call, or as it is behind it, and nothing else. */
#include "world.h"

#include "hooks.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#define NODES 12
#define LISTS 3
#define RECORDS 40
#define ITEMS (NODES * LISTS + RECORDS)

/* What somebody sees who may take the lock: every list in order, or every item by its key. */
typedef struct view {
    int32_t value[ITEMS];
    uint32_t count;
} view;

typedef struct calls { /* one of the two structures, on memory that anybody may stand in */
    const char *name;
    void *(*open)(lcs_attachment *at);
    void (*close)(void *structure);
    void (*look)(void *structure, view *v);
    int (*check)(void *structure, char *text);
    void (*change)(void *structure, uint32_t step);
    uint32_t steps;
} calls;

static segment real;
static client victim, survivor;
static uint8_t *copy;
static lcs_attachment *there;
static const calls *now;
static view before, after;
static bool watching;
static uint32_t deaths, step;

static bool equal(const view *a, const view *b) {
    return a->count == b->count && !memcmp(a->value, b->value, a->count * sizeof *a->value);
}

/* ------------------------------------------------------------------ the list */

static void *open_list(lcs_attachment *at) { return lcx_list_open(at, NODES, LISTS); }
static void close_list(void *l) { lcx_list_close(l); }

static void look_at_lists(void *l, view *v) {
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

static void *open_dict(lcs_attachment *at) { return lcx_dict_open(at, RECORDS); }
static void close_dict(void *d) { lcx_dict_close(d); }

static void look_at_dict(void *d, view *v) {
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

static const calls structures[] = {
    {"list", open_list, close_list, look_at_lists, check_list, change_list, 7},
    {"dict", open_dict, close_dict, look_at_dict, check_dict, change_dict, 10},
};

/* ------------------------------------------------------------------ deaths */

/* In the copy nobody holds the victim's byte: the next taker of the lock undoes what it began. */
static void look(void) {
    char text[200] = "";
    view seen;
    memcpy(copy, real.base, real.bytes);
    void *structure = now->open(there);
    CHECK(structure);
    int broken = now->check(structure, text);
    if (broken) check_failed(now->name, (int)step, text);
    now->look(structure, &seen);
    if (!equal(&seen, &before) && !equal(&seen, &after))
        check_failed(now->name, (int)step, "half a step is left");
    now->close(structure);
    deaths++;
}

static void on_store(const volatile void *word) {
    const volatile uint8_t *at = word;
    if (!watching || at < real.base || at >= real.base + real.bytes) return;
    watching = false;
    look();
    watching = true;
}

static void play(const calls *c) {
    now = c;
    check_running = c->name;
    void *structure = c->open(victim.at);
    /* What a step comes to is seen where nobody dies: in a second segment. */
    segment twin = segment_make(real.bytes);
    memcpy(twin.base, real.base, real.bytes);
    client other = client_join(&twin);
    void *model = c->open(other.at);
    c->look(model, &after);
    for (step = 0; step < c->steps; step++) {
        before = after;
        c->change(model, step);
        c->look(model, &after);
        watching = true;
        c->change(structure, step);
        watching = false;
        before = after; /* behind the call: nothing but what it came to */
        look();
    }
    c->close(structure);
    c->close(model);
    client_leave(&other);
    segment_end(&twin);
}

static void set_up(void) {
    victim = client_join(&real);
    survivor = client_join(&real);
    copy = mmap(NULL, real.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int life = memfd_create("life", MFD_CLOEXEC);
    CHECK(copy != MAP_FAILED && life >= 0);
    memcpy(copy, real.base, real.bytes);
    there = lcs_attachment_new(copy, real.bytes, life, survivor.slot, survivor.at->epoch, 0);
    CHECK(there);
    there->pidns = 0; /* only the byte locks are asked who lives */
}

int main(void) {
    after_store = on_store;
    real = segment_make(LCS_PAYLOAD_OFFSET + lcx_list_bytes(NODES, LISTS));
    lcx_list_format(real.base, NODES, LISTS);
    set_up();
    play(&structures[0]);
    real = segment_make(LCS_PAYLOAD_OFFSET + lcx_dict_bytes(RECORDS));
    lcx_dict_format(real.base, RECORDS);
    set_up();
    play(&structures[1]);
    printf("%u deaths\n", deaths);
    return 0;
}
