#include "stage.h"

#include <fcntl.h>
#include <setjmp.h>
#include <sys/stat.h>
#include <unistd.h>

/* A call that steps make slow comes back after 50 ms, to be called again. */
#define AGAIN(call)                                                        \
    do {                                                                   \
        int rc_;                                                           \
        while ((rc_ = (call)) == LC_E_INTR) {                              \
        }                                                                  \
        if (rc_ < 0) fprintf(stderr, "%s: %d\n", #call, rc_);              \
        NEED(rc_ >= 0);                                                    \
    } while (0)

/* Map the file, without a slot: as one who is about to join. */
void actor_map(actor *a, const char *path, uint64_t pages) {
    lci_geometry g;
    void *base = NULL;
    NEED(lci_geometry_of(pages, order_tested(), &g) == LC_OK);
    uint64_t bytes = stage_bytes(&g);
    int fd = open(path, O_RDWR | O_CLOEXEC), life = open(path, O_RDWR | O_CLOEXEC);
    NEED(fd >= 0 && life >= 0 && lcs_map(fd, bytes, 1, &base) == LC_OK);
    close(fd);
    *a = (actor){.path = path, .pages = pages};
    a->at = lcs_attachment_new(base, bytes, life, 0, 0, 0);
    NEED(a->at);
    a->stamps = (uint64_t *)((uint8_t *)base + stage_pool(&g));
    a->notes = (notes *)((uint8_t *)base + stage_notes(&g));
}

void actor_claim(actor *a, const char *role, uint32_t flags) {
    NEED(lcs_slot_claim(a->at, role, flags) > 0);
    a->h = lci_open(a->at, a->pages);
    NEED(a->h);
}

/* Key i of a run: few buckets, so that chains have several links; of a crowded run, only one. */
lc_key scene_key(uint32_t number, uint32_t i) {
    uint64_t mixed = (UINT64_C(0x9E3779B97F4A7C15) * (number * 1000 + i + 1)) ^ (number * 7919);
    uint64_t bucket = number >= CROWDED ? 9 : mixed >> 60 & 7;
    return (lc_key){.lo = (mixed & ~UINT64_C(0xffff)) | bucket, .hi = mixed * 31 + number};
}

uint64_t stamp_of(uint64_t lo, uint64_t hi, uint32_t word) {
    return (lo ^ hi * 3) * (2 * word + 1) + word;
}

void run_keys(lc_key *keys, uint32_t number, uint32_t n) {
    NEED(n <= MAX_KEYS);
    for (uint32_t i = 0; i < n; i++) keys[i] = scene_key(number, i);
}

void run_reserve(actor *a, run *r, uint32_t number, uint32_t n, uint32_t shards, lci_ns_ref ns) {
    memset(r, 0, sizeof *r);
    run_keys(r->keys, number, n);
    r->n = n;
    r->op = (lci_reserve_op){.shards = shards, .ns = ns};
    AGAIN(lci_reserve(a->h, &r->op, r->keys, n, 0, r->page, r->status, LC_BLOCK, FOREVER));
    for (uint32_t i = 0; i < n; i++)
        if (r->status[i] == LCI_NEW) r->fresh[r->made++] = r->page[i];
}

/* As a checkpoint is made: only the page that it hangs on counts as used. */
void run_behind(actor *a, run *r, uint32_t number, uint32_t i, uint32_t n) {
    lc_key keys[MAX_KEYS];
    uint32_t first = i ? i - 1 : 0;
    memset(r, 0, sizeof *r);
    run_keys(keys, number, n);
    memcpy(r->keys, keys + i, (n - i) * sizeof *keys);
    r->n = n - i;
    r->op = (lci_reserve_op){.shards = 1, .ns = SCENE_NS, .run = 1};
    AGAIN(lci_reserve(a->h, &r->op, keys + first, n - first, i - first, r->page, r->status,
                      LC_BLOCK, FOREVER));
    for (uint32_t k = 0; k < r->n; k++)
        if (r->status[k] == LCI_NEW) r->fresh[r->made++] = r->page[k];
}

/* The shard's part of every new page. */
void run_write(actor *a, const run *r, uint32_t shard) {
    for (uint32_t i = 0; i < r->n; i++)
        for (uint32_t w = shard; r->status[i] == LCI_NEW && w < STAMP_WORDS; w += r->op.shards)
            a->stamps[(uint32_t)r->page[i] * STAMP_WORDS + w] =
                stamp_of(r->keys[i].lo, r->keys[i].hi, w);
}

void run_publish(actor *a, run *r, uint32_t shard) {
    run_write(a, r, shard);
    NEED(lci_publish(a->h, r->op.rid, r->op.gen, shard, r->fresh, r->made) >= 0);
}

void run_unpin(actor *a, run *r) {
    NEED(lci_unreserve(a->h, &r->op, r->page, r->status, r->n) == LC_OK);
}

void run_abandon(actor *a, run *r) {
    AGAIN(lci_abandon(a->h, r->op.rid, r->op.gen, LC_BLOCK, FOREVER));
}

void run_fill(actor *a, uint32_t number, uint32_t n, lci_ns_ref ns) {
    static run r;
    run_reserve(a, &r, number, n, 1, ns);
    NEED(r.made == n);
    run_publish(a, &r, 0);
    run_unpin(a, &r);
}

void hold_match(actor *a, hold *l, uint32_t number, uint32_t n, lci_ns_ref ns) {
    memset(l, 0, sizeof *l);
    run_keys(l->keys, number, n);
    NEED(lci_match1(a->h, l->keys, n, ns, &l->lease) == (int)n);
}

void hold_release(actor *a, hold *l) { NEED(lci_release(a->h, &l->lease) == LC_OK); }

uint32_t deed_evict(actor *a, uint32_t n) {
    uint32_t freed = 0;
    AGAIN(lci_evict_pages(a->h, n, &freed, LC_BLOCK, FOREVER));
    return freed;
}

void deed_clear(actor *a, lci_ns_ref ns) { AGAIN(lci_clear(a->h, ns, LC_BLOCK, FOREVER)); }

void deed_reap(actor *a, uint32_t slot) { AGAIN(lci_reap_slot(a->h, slot, LC_BLOCK, FOREVER)); }

#ifdef LC_PAUSE_POINTS
static int stop_point;
static jmp_buf stopped;

static void stop_here(int point) {
    if (point == stop_point) longjmp(stopped, 1);
}

void stop_at(actor *a, int point, void (*call)(actor *a)) {
    stop_point = point;
    if (setjmp(stopped) == 0) {
        lc_pause_hook = stop_here;
        call(a);
        NEED(!"the call came to that point");
    }
    lc_pause_hook = NULL;
    a->stopped = true;
}
#else
void stop_at(actor *a, int point, void (*call)(actor *a)) {
    (void)a, (void)point, (void)call;
    NEED(!"only the stepper stops others");
}
#endif
