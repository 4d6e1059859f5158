#include "structures.h"

#include "board.h"
#include "log.h"
#include "operations.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#define NODES 24
#define LISTS 4
#define KEYS 40
#define MESSAGE 12
/* Of ten seeds; none of the corpus's, whose cases stay what they were. */
#define RING_CASES 1
#define LOG_CASES 6

typedef struct arena {
    uint8_t *base, *picture;
    uint64_t bytes, payload;
    lcs_attachment *me;
    lcx_list *list;
    lcx_dict *dict;
    lcx_ring *ring;
    lcx_log *log, *reader; /* ours, as the writer, and of somebody who reads */
    rng flips;
    atomic_bool moving;
} arena;

static arena arenas[4];

static uint64_t soon(void) { return lcs_now_ns() + UINT64_C(2000000); }

/* ------------------------------------------------------------------ making them */

static void map(arena *a, uint64_t payload) {
    a->payload = payload;
    a->bytes = (LCS_PAYLOAD_OFFSET + payload + 4095) / 4096 * 4096;
    int fd = memfd_create("structure", MFD_CLOEXEC), life = memfd_create("life", MFD_CLOEXEC);
    NEED(fd >= 0 && life >= 0 && ftruncate(fd, (off_t)a->bytes) == 0);
    a->base = world_map(fd, a->bytes, PROT_READ | PROT_WRITE);
    a->me = lcs_attachment_new(a->base, a->bytes, life, 0, 0, 0);
    NEED(a->me && lcs_slot_claim(a->me, "me", 0) > 0);
    close(fd);
}

static void keep_picture(arena *a) {
    a->picture = malloc(a->bytes);
    NEED(a->picture);
    memcpy(a->picture, a->base, a->bytes);
}

/* Messages that go past the last slot, to the first. */
static void make_ring(arena *a) {
    uint8_t data[MESSAGE] = "a message";
    map(a, lcx_ring_bytes(NODES, MESSAGE));
    a->ring = lcx_ring_open(a->me, NODES, MESSAGE);
    NEED(a->ring);
    for (uint32_t i = 0; i < NODES + 12; i++) {
        uint32_t length = i % (MESSAGE + 1);
        NEED(lcx_ring_push(a->ring, data, &length, 1, LC_BLOCK, UINT64_MAX) == 1);
        if (i < 16)
            NEED(lcx_ring_pop(a->ring, data, MESSAGE, &length, 1, LC_BLOCK, UINT64_MAX) == 1);
    }
    keep_picture(a);
}

/* Another client of the arena, whom we see live or die. */
static lcs_attachment *another(const arena *a, const char *role, int *life) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", a->me->life_fd);
    *life = open(path, O_RDWR | O_CLOEXEC);
    NEED(*life >= 0);
    lcs_attachment *at = lcs_attachment_new(a->base, a->bytes, *life, 0, 0, 0);
    NEED(at && lcs_slot_claim(at, role, 0) > 0);
    return at;
}

/* Half full, with two readers, of which one is dead. */
static void make_log(arena *a) {
    uint8_t data[MESSAGE] = "an entry";
    int life, dead;
    map(a, lcx_log_bytes(NODES, MESSAGE));
    a->log = lcx_log_open(a->me, NODES, MESSAGE);
    a->reader = lcx_log_open(another(a, "reader", &life), NODES, MESSAGE);
    lcx_log *third = lcx_log_open(another(a, "dead", &dead), NODES, MESSAGE);
    NEED(a->log && a->reader && third);
    NEED(lcx_log_lead(a->log, LC_BLOCK, UINT64_MAX) == LC_OK);
    for (uint32_t i = 0; i < NODES + 12; i++) {
        if (i == NODES) NEED(lcx_log_join(a->reader) == LC_OK && lcx_log_join(third) == LC_OK);
        NEED(lcx_log_append(a->log, data, i % (MESSAGE + 1)) == LC_OK);
    }
    close(dead);
    keep_picture(a);
}

static void make(void) {
    arena *a = &arenas[0], *d = &arenas[1];
    map(a, lcx_list_bytes(NODES, LISTS));
    lcx_list_format(a->base, NODES, LISTS);
    a->list = lcx_list_open(a->me, NODES, LISTS);
    NEED(a->list);
    for (uint32_t i = 0; i < NODES - 4; i++)
        NEED(lcx_list_put(a->list, i % 3, i, i % 2, 1, LC_BLOCK, UINT64_MAX) == LC_OK);
    keep_picture(a);
    map(d, lcx_dict_bytes(NODES));
    lcx_dict_format(d->base, NODES);
    d->dict = lcx_dict_open(d->me, NODES);
    NEED(d->dict);
    for (uint32_t i = 0; i < NODES - 4; i++) {
        lc_key key = world_key(0, i);
        NEED(lcx_dict_put(d->dict, key.lo, key.hi, (int32_t)i, 1, LC_BLOCK, UINT64_MAX) == 0);
    }
    for (uint32_t i = 0; i < 3; i++) {
        lc_key key = world_key(0, i);
        int32_t value;
        NEED(lcx_dict_pop(d->dict, key.lo, key.hi, &value, LC_BLOCK, UINT64_MAX) == LC_OK);
    }
    keep_picture(d);
    make_ring(&arenas[2]);
    make_log(&arenas[3]);
}

/* ------------------------------------------------------------------ every call */

static void answer(int rc, int64_t most, const char *what) {
    uint32_t at = rc >= 0 ? 0 : (uint32_t)-rc < CODES ? (uint32_t)-rc : CODES - 1;
    shared->codes[at]++;
    shared->calls++;
    if (rc > most || rc == LC_E_FORKED || rc < LC_E_MISSING) finding(what, rc);
}

static void use_list(arena *a, rng *r) {
    int32_t out[NODES];
    char text[208];
    uint32_t node = NODES;
    uint32_t list = below(r, LISTS), one = below(r, NODES);
    switch (below(r, 7)) {
    case 0:
        answer(lcx_list_put(a->list, list, one, (int)below(r, 2), (int)below(r, 2), LC_BLOCK,
                            soon()),
               0, "list put");
        break;
    case 1: answer(lcx_list_remove(a->list, one, LC_BLOCK, soon()), 0, "list remove"); break;
    case 2: {
        int rc = lcx_list_pop(a->list, list, (int)below(r, 2), &node, LC_BLOCK, soon());
        answer(rc, 0, "list pop");
        if (rc == LC_OK && node >= NODES) finding("list pop gave a node", node);
        break;
    }
    case 3: {
        int rc = lcx_list_copy(a->list, list, out, NODES, LC_BLOCK, soon());
        answer(rc, NODES, "list copy");
        for (int i = 0; i < rc; i++)
            if ((uint32_t)out[i] >= NODES) finding("list copy gave a node", out[i]);
        break;
    }
    case 4: answer(lcx_list_length(a->list, list), NODES, "list length"); break;
    case 5: answer(lcx_list_where(a->list, one), LISTS - 1, "list where"); break;
    default: answer(lcx_list_check(a->list, text, sizeof text, LC_BLOCK, soon()), 1, "list check");
    }
}

static void use_dict(arena *a, rng *r) {
    lc_key key = world_key(below(r, 2), below(r, NODES)), keys[KEYS];
    int32_t values[KEYS], value;
    uint8_t found[KEYS];
    char text[208];
    world_keys(keys, 0, KEYS);
    switch (below(r, 7)) {
    case 0: answer(lcx_dict_get(a->dict, key.lo, key.hi, &value), 0, "dict get"); break;
    case 1: answer(lcx_dict_get_many(a->dict, keys, KEYS, values, found), KEYS, "dict get"); break;
    case 2:
        answer(lcx_dict_put(a->dict, key.lo, key.hi, 7, (int)below(r, 2), LC_BLOCK, soon()), 1,
               "dict put");
        break;
    case 3:
        answer(lcx_dict_pop(a->dict, key.lo, key.hi, &value, LC_BLOCK, soon()), 0, "dict pop");
        break;
    case 4: answer(lcx_dict_length(a->dict), NODES, "dict length"); break;
    case 5:
        answer(lcx_dict_copy(a->dict, keys, values, NODES, LC_BLOCK, soon()), NODES, "dict copy");
        break;
    default: answer(lcx_dict_check(a->dict, text, sizeof text, LC_BLOCK, soon()), 1, "dict check");
    }
}

static void use_ring(arena *a, rng *r) {
    uint8_t data[8 * MESSAGE] = {0};
    uint32_t lengths[8], n = 1 + below(r, 8), bytes = 0;
    char text[208];
    switch (below(r, 6)) {
    case 0:
    case 1:
        for (uint32_t i = 0; i < n; i++) lengths[i] = below(r, MESSAGE + 1);
        answer(lcx_ring_push(a->ring, data, lengths, n, LC_BLOCK, soon()), n, "ring push");
        break;
    case 2:
    case 3: {
        uint64_t room = MESSAGE * (1 + below(r, 8));
        int rc = lcx_ring_pop(a->ring, data, room, lengths, n, LC_BLOCK, soon());
        answer(rc, n, "ring pop");
        for (int i = 0; i < rc; bytes += lengths[i++])
            if (lengths[i] > MESSAGE) finding("ring pop gave a length", lengths[i]);
        if (rc > 0 && bytes > room) finding("ring pop gave more than there was room", bytes);
        break;
    }
    case 4: answer(lcx_ring_length(a->ring), NODES, "ring length"); break;
    default: answer(lcx_ring_check(a->ring, text, sizeof text, LC_BLOCK, soon()), 1, "ring check");
    }
}

static void read_log(arena *a, rng *r) {
    uint8_t data[8 * MESSAGE];
    uint32_t lengths[8], n = 1 + below(r, 8), bytes = 0;
    uint64_t room = MESSAGE * (1 + below(r, 8));
    int rc = lcx_log_read(a->reader, data, room, lengths, n);
    answer(rc, n, "log read");
    for (int i = 0; i < rc; bytes += lengths[i++])
        if (lengths[i] > MESSAGE) finding("log read gave a length", lengths[i]);
    if (rc > 0 && bytes > room) finding("log read gave more than there was room", bytes);
}

static void look_at_log(arena *a) {
    int64_t behind[LCS_SLOTS] = {0}, all = lcx_log_behind(a->log, behind);
    answer(all < 0 ? (int)all : 0, 0, "log behind");
    for (uint32_t i = 0; all >= 0 && i < LCS_SLOTS; i++)
        if (behind[i] < -1 || behind[i] > NODES) finding("log behind gave", behind[i]);
    all = lcx_log_position(a->reader);
    answer(all < 0 ? (int)all : 0, 0, "log position");
    answer(lcx_log_ended(a->reader), 1, "log ended");
    answer(lcx_log_writer(a->reader), LCS_SLOTS - 1, "log writer");
}

static void use_log(arena *a, rng *r) {
    uint8_t data[MESSAGE] = {0};
    char text[208];
    lcx_log *one = below(r, 4) ? a->log : a->reader;
    switch (below(r, 12)) {
    case 0:
    case 1:
    case 2:
    case 3: answer(lcx_log_append(one, data, below(r, MESSAGE + 1)), 0, "log append"); break;
    case 4:
    case 5:
    case 6: read_log(a, r); break;
    case 7: look_at_log(a); break;
    case 8: answer(lcx_log_lead(one, LC_BLOCK, soon()), 0, "log lead"); break;
    case 9:
        if (below(r, 2)) answer(lcx_log_leave(one, LC_BLOCK, soon()), 0, "log leave");
        answer(lcx_log_join(a->reader), 0, "log join");
        break;
    case 10: answer(lcx_log_free_dead(a->me, below(r, LCS_SLOTS)), 0, "log free dead"); break;
    default: answer(lcx_log_check(one, text, sizeof text, LC_BLOCK, soon()), 1, "log check");
    }
}

/* ------------------------------------------------------------------ damage */

/* A word of the payload. Most of a log's root is padding: rather a word that says something. */
static uint64_t any_word(const arena *a, rng *r) {
    if (!a->log || below(r, 4) == 0) return below(r, a->payload / 4);
    switch (below(r, 3)) {
    case 0: return below(r, 3);
    case 1: return (offsetof(lcx_log_root, cursors) + 64 * below(r, 5)) / 4 + below(r, 2);
    default: return sizeof(lcx_log_root) / 4 + below(r, (a->payload - sizeof(lcx_log_root)) / 4);
    }
}

static void flip_word(arena *a, rng *r) {
    uint64_t lock = sizeof(lcs_lock) / 4;
    bool of_lock = below(r, 8) == 0;
    uint64_t at = (of_lock ? LCS_LOCK_OFFSET : LCS_PAYLOAD_OFFSET) / 4;
    at += of_lock ? below(r, lock) : any_word(a, r);
    const uint32_t values[] = {0,       1,          NODES,         NODES - 1, NODES + 1, UINT32_MAX,
                               LISTS,   INT32_MAX,  1u << below(r, 32), below(r, NODES + LISTS)};
    uint32_t old = ((const uint32_t *)a->picture)[at];
    uint32_t value = below(r, 3) ? values[below(r, sizeof values / sizeof values[0])]
                                 : old ^ 1u << below(r, 32);
    lc_store((_Atomic uint32_t *)a->base + at, value);
}

static void *flip_on(void *argument) {
    arena *a = argument;
    while (atomic_load(&a->moving)) {
        flip_word(a, &a->flips);
        shared->flips++;
        if (below(&a->flips, 16) == 0)
            memcpy(a->base + LCS_PAYLOAD_OFFSET, a->picture + LCS_PAYLOAD_OFFSET, a->payload);
    }
    return NULL;
}

static void judge(arena *a, tally *t) {
    char text[208];
    int rc = a->list   ? lcx_list_check(a->list, text, sizeof text, LC_BLOCK, soon())
             : a->dict ? lcx_dict_check(a->dict, text, sizeof text, LC_BLOCK, soon())
             : a->ring ? lcx_ring_check(a->ring, text, sizeof text, LC_BLOCK, soon())
                       : lcx_log_check(a->log, text, sizeof text, LC_BLOCK, soon());
    t->cases++;
    t->named += rc != 0;
    t->unseen += rc == 0;
}

void structures_case(uint64_t seed) {
    if (!arenas[0].base) make();
    rng r = {.state = seed * 2 + 1};
    arena *a = &arenas[below(&r, 2)];
    if (seed % 10 == RING_CASES) a = &arenas[2];
    if (seed % 10 == LOG_CASES) a = &arenas[3];
    bool moving = below(&r, 4) == 0;
    pthread_t thread;
    shared->seed = seed;
    shared->cases++;
    memcpy(a->base, a->picture, a->bytes);
    if (a->log) NEED(lcx_log_lead(a->log, LC_BLOCK, UINT64_MAX) == LC_OK); /* what is its own */
    if (moving) {
        a->flips.state = seed;
        atomic_store(&a->moving, true);
        NEED(pthread_create(&thread, NULL, flip_on, a) == 0);
    } else {
        uint32_t hits = 1 + below(&r, 3);
        for (uint32_t i = 0; i < hits; i++) flip_word(a, &r);
        if (hits == 1) judge(a, &shared->fields[a - arenas + LIST_TALLY]);
    }
    for (int i = 0; i < 24; i++) {
        if (a->list) use_list(a, &r);
        else if (a->dict) use_dict(a, &r);
        else if (a->ring) use_ring(a, &r);
        else use_log(a, &r);
    }
    if (moving) {
        atomic_store(&a->moving, false);
        pthread_join(thread, NULL);
    }
}
