#include "world.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define GUARD (64 * 1024)

static uint64_t whole_pages(uint64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

segment segment_make(uint64_t bytes) {
    segment s = {.bytes = whole_pages(bytes), .fd = memfd_create("core_tests", MFD_CLOEXEC)};
    CHECK(s.fd >= 0 && ftruncate(s.fd, (off_t)s.bytes) == 0);
    uint8_t *room = mmap(NULL, s.bytes + 2 * GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(room != MAP_FAILED);
    s.base = mmap(room + GUARD, s.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, s.fd, 0);
    CHECK(s.base == room + GUARD);
    lcs_header *header = (lcs_header *)s.base;
    header->magic = LCS_MAGIC;
    header->bytes = s.bytes;
    header->time_namespace = lcs_time_namespace();
    memcpy(header->uuid, "a test's segment", sizeof header->uuid);
    lcs_ready_store(s.base);
    return s;
}

segment index_make_ordered(uint64_t pages, uint64_t grown, uint32_t eviction) {
    lci_geometry g;
    CHECK_EQ(lci_geometry_of(pages, eviction, &g), LC_OK);
    segment s = segment_make(g.end);
    CHECK_EQ(lci_format(s.base, s.bytes, pages, grown, eviction), LC_OK);
    s.pages = pages;
    return s;
}

segment index_make_grown(uint64_t pages, uint64_t grown) {
    return index_make_ordered(pages, grown, order_tested());
}

segment index_make(uint64_t pages) { return index_make_grown(pages, pages); }

void segment_end(segment *s) {
    CHECK(munmap(s->base - GUARD, s->bytes + 2 * GUARD) == 0);
    close(s->fd);
}

int life_descriptor(const segment *s) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", s->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    CHECK(fd >= 0);
    return fd;
}

static client attach(const segment *s, int readonly) {
    client c = {.life = life_descriptor(s)};
    c.at = lcs_attachment_new(s->base, s->bytes, c.life, 0, 0, readonly);
    CHECK(c.at);
    return c;
}

static void open_index(client *c, const segment *s) {
    if (!s->pages) return;
    c->h = lci_open(c->at, s->pages);
    CHECK(c->h);
    CHECK_EQ(lci_set_clock(c->h, 1), LC_OK); /* a tick is a call, however long the test takes */
}

client client_join_as(const segment *s, uint32_t flags) {
    client c = attach(s, 0);
    int slot = lcs_slot_claim(c.at, "a test", flags);
    CHECK(slot > 0);
    c.slot = (uint32_t)slot;
    open_index(&c, s);
    return c;
}

client client_join(const segment *s) { return client_join_as(s, 0); }

client reader_join(const segment *s) {
    client c = attach(s, 1);
    open_index(&c, s);
    return c;
}

void client_forget(client *c) {
    lci_close(c->h);
    lcs_attachment_free(c->at);
    if (c->life >= 0) close(c->life);
    *c = (client){.life = -1};
}

void client_leave(client *c) {
    if (c->h) CHECK_EQ(THROUGH(lci_leave(c->h, BLOCKING)), LC_OK);
    if (c->at->slot) CHECK_EQ(lcs_slot_release(c->at), LC_OK);
    client_forget(c);
}

void client_die(client *c) {
    close(c->life);
    c->life = -1;
    client_forget(c);
}

static lci_report report_of(const segment *s) {
    lci_report report;
    uint8_t *copy = malloc(s->bytes);
    CHECK(copy);
    memcpy(copy, s->base, s->bytes);
    CHECK(lci_recover_copy(copy, s->bytes, s->pages) >= 0);
    CHECK_EQ(lci_check(copy, s->bytes, s->pages, 1, &report), LC_OK);
    free(copy);
    return report;
}

int index_broken(const segment *s) { return report_of(s).broken; }

void index_check(const segment *s) {
    lci_report report = report_of(s);
    if (report.broken) check_failed("check", report.broken, report.message);
}

lci_counts index_counts(const client *c) {
    lci_counts counts;
    CHECK_EQ(lci_count(c->h, &counts), LC_OK);
    return counts;
}

uint32_t pins_of(const client *c, uint32_t page) {
    uint32_t pins = 0;
    for (uint32_t slot = 0; slot < LCS_SLOTS; slot++) pins += lc_load(lci_pin(c->h, slot, page));
    return pins;
}

lc_key prompt_key(uint32_t number, uint32_t i) {
    uint64_t x = (uint64_t)number << 32 | (i + 1); /* splitmix64's finish: no two alike */
    x = (x ^ x >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ x >> 27) * UINT64_C(0x94d049bb133111eb);
    return (lc_key){.lo = x ^ x >> 31, .hi = ~x};
}

lc_key crowded_key(uint32_t bucket, uint32_t i) {
    return (lc_key){.lo = (uint64_t)(i + 1) << 32 | bucket, .hi = i};
}

void prompt_make(prompt *p, uint32_t number, uint32_t n) {
    CHECK(n <= MAX_KEYS);
    memset(p, 0, sizeof *p);
    for (uint32_t i = 0; i < n; i++) p->keys[i] = prompt_key(number, i);
    p->n = n;
}

bool independent_prompts;

int prompt_reserve(client *c, prompt *p, lci_ns_ref ns, uint32_t shards) {
    p->op = (lci_reserve_op){.shards = shards, .ns = ns, .run = independent_prompts};
    int rc = THROUGH(lci_reserve(c->h, &p->op, p->keys, p->n, 0, p->page, p->status, BLOCKING));
    p->made = 0;
    for (uint32_t i = 0; i < p->n; i++)
        if (p->status[i] == LCI_NEW) p->fresh[p->made++] = p->page[i];
    return rc;
}

void prompt_publish(client *c, prompt *p, uint32_t shard) {
    CHECK(lci_publish(c->h, p->op.rid, p->op.gen, shard, p->fresh, p->made) >= 0);
}

void prompt_unpin(client *c, prompt *p) {
    CHECK_EQ(lci_unreserve(c->h, &p->op, p->page, p->status, p->n), LC_OK);
}

void prompt_fill(client *c, prompt *p, uint32_t number, uint32_t n) {
    prompt_make(p, number, n);
    CHECK_EQ(prompt_reserve(c, p, NS, 1), n);
    prompt_publish(c, p, 0);
    prompt_unpin(c, p);
}

uint32_t match(client *c, const prompt *p, lease *l) {
    memset(l, 0, sizeof *l);
    int found = lci_match1(c->h, p->keys, p->n, NS, &l->head);
    CHECK(found >= 0);
    return (uint32_t)found;
}

uint32_t peek(const client *c, const prompt *p) {
    int found = lci_peek1(c->h, p->keys, p->n, NS);
    CHECK(found >= 0);
    return (uint32_t)found;
}

void collect(client *c) {
    lc_txn t;
    uint32_t work;
    do {
        CHECK_EQ(lci_lock(c->h, &t, LCI_OP_COLLECT, BLOCKING), LC_OK);
        work = lci_collect(c->h, &t, 256);
        work += lci_settle_tickets(c->h, &t, 256);
        CHECK_EQ(lci_unlock(c->h, &t), LC_OK);
    } while (work);
}

uint32_t evict(client *c, uint32_t want) {
    uint32_t freed = 0;
    CHECK_EQ(lci_evict_pages(c->h, want, &freed, BLOCKING), LC_OK);
    return freed;
}

bool advice_is_heard(void) {
    void *page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    bool heard = madvise(page, 4096, 12345) != 0;
    munmap(page, 4096);
    return heard;
}

#ifdef LC_PAUSE_POINTS
static int at_point;
static uint32_t passes_left;
static void (*then)(void);

static void once(int point) {
    if (point != at_point || passes_left--) return;
    lc_pause_hook = NULL;
    then();
}

void play_after(int point, uint32_t passes, void (*what)(void)) {
    at_point = point;
    passes_left = passes;
    then = what;
    lc_pause_hook = once;
}

void play(int point, void (*what)(void)) { play_after(point, 0, what); }
void check_played(void) { CHECK(lc_pause_hook == NULL); }
#endif
