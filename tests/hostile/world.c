#include "world.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#define GUARD ((size_t)1 << 20)

static const uint32_t sizes[VARIANTS] = {64, 64, 16, 7, 64};

lc_key world_key(uint32_t run, uint32_t i) {
    uint64_t mixed = (UINT64_C(0x9E3779B97F4A7C15) * (run * 1000 + i + 1)) ^ (run * 7919);
    return (lc_key){.lo = (mixed & ~UINT64_C(0xffff)) | (mixed >> 60 & 7), .hi = mixed * 31 + run};
}

void world_keys(lc_key *keys, uint32_t run, uint32_t n) {
    for (uint32_t i = 0; i < n; i++) keys[i] = world_key(run, i);
}

uint8_t *world_map(int fd, uint64_t bytes, int protection) {
    uint8_t *all = mmap(NULL, bytes + 2 * GUARD, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    NEED(all != MAP_FAILED);
    NEED(mmap(all + GUARD, bytes, protection, MAP_SHARED | MAP_FIXED, fd, 0) != MAP_FAILED);
    return all + GUARD;
}

int world_reopen(int fd) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int got = open(path, O_RDWR | O_CLOEXEC);
    NEED(got >= 0);
    return got;
}

lcs_attachment *world_stranger(const world *w) {
    lcs_attachment *at = lcs_attachment_new(w->base, w->bytes, world_reopen(w->life), 0, 0, 0);
    NEED(at);
    return at;
}

void world_dismiss(lcs_attachment *at) {
    close(at->life_fd);
    lcs_attachment_free(at);
}

static lcs_attachment *join(const world *w, const char *role) {
    lcs_attachment *at = world_stranger(w);
    NEED(lcs_slot_claim(at, role, 0) > 0);
    return at;
}

typedef struct filling {
    lci_reserve_op op;
    lc_key keys[MOST_KEYS];
    int32_t page[MOST_KEYS], fresh[MOST_KEYS];
    uint8_t status[MOST_KEYS];
    uint32_t n, made;
} filling;

/* In the mixed world every second run is one of independent pages. */
static void reserve(const world *w, lci_handle *h, filling *f, uint32_t run, uint32_t n,
                    uint32_t shards, lci_ns_ref ns) {
    memset(f, 0, sizeof *f);
    world_keys(f->keys, run, n);
    f->n = n;
    f->op = (lci_reserve_op){.shards = shards, .ns = ns};
    f->op.run = w->variant == MIXED_WORLD && run % 2 == 0;
    NEED(lci_reserve(h, &f->op, f->keys, n, 0, f->page, f->status, LC_BLOCK, FOREVER) >= 0);
    for (uint32_t i = 0; i < n; i++)
        if (f->status[i] == LCI_NEW) f->fresh[f->made++] = f->page[i];
}

static void publish(lci_handle *h, filling *f) {
    NEED(lci_publish(h, f->op.rid, f->op.gen, 0, f->fresh, f->made) == 1);
    NEED(lci_unreserve(h, &f->op, f->page, f->status, f->n) == LC_OK);
}

static void fill(world *w, uint32_t run, uint32_t n, lci_ns_ref ns) {
    filling f;
    reserve(w, w->h, &f, run, n, 1, ns);
    publish(w->h, &f);
    w->ready[run] = f.made;
}

static void keep(world *w, uint32_t run, uint32_t n) {
    lci_walk_op op = {0};
    lc_key keys[MOST_KEYS];
    world_keys(keys, run, n);
    NEED(lci_keep(w->h, keys, n, w->ns[0], 1, &op, LC_BLOCK, FOREVER) == LC_OK && op.pages == n);
}

static void promise(world *w, uint32_t minimum) {
    lci_ns_limits limits = {.quota = UINT32_MAX, .minimum = minimum};
    lci_ns_ref ns;
    NEED(lci_namespace_limits(w->h, "new", "tenant", &limits, &ns, LC_BLOCK, FOREVER) == LC_OK);
    NEED(ns == w->ns[1]);
}

static uint64_t soon(void) { return lcs_now_ns() + UINT64_C(3600) * 1000000000; }

static void give_tickets(world *w) {
    struct {
        lci_lease head;
        int32_t rest[2 * MOST_KEYS];
    } lease = {.head.held = 0};
    lc_key keys[6];
    filling f;
    world_keys(keys, 0, 6);
    NEED(lci_match1(w->peer_h, keys, 6, w->ns[0], &lease.head) == 6);
    NEED(lci_ticket_give(w->peer_h, lease.rest, 6, LC_NIL, 0, UINT64_C(1) << w->me_slot, soon(),
                         &w->ticket, LC_BLOCK, FOREVER) == LC_OK);
    for (uint32_t i = 6; i < 2 * MOST_KEYS; i++) lease.rest[i] = lease.rest[i % 6];
    for (uint32_t i = 0; i < 6; i++) NEED(lci_pin_one(w->h, (uint32_t)lease.rest[i]) == LC_OK);
    uint64_t to_peer = UINT64_C(1) << w->peer->slot;
    NEED(lci_ticket_give(w->h, lease.rest, 2 * MOST_KEYS, LC_NIL, 0, to_peer, soon(), &w->given,
                         LC_BLOCK, FOREVER) == LC_OK);
    for (uint32_t i = 0; i < 6; i++) NEED(lci_unpin_one(w->h, (uint32_t)lease.rest[i]) == LC_OK);
    NEED(lci_release(w->peer_h, &lease.head) == LC_OK); /* a list of three chunks, pages repeated */
    reserve(w, w->peer_h, &f, 6, 3, 2, w->ns[0]);
    NEED(lci_ticket_give(w->peer_h, f.fresh, f.made, f.op.rid, f.op.gen,
                         UINT64_C(1) << w->me_slot, soon(), &w->shard_ticket, LC_BLOCK,
                         FOREVER) == LC_OK);
}

static void hold(lci_handle *h, int32_t *pages, uint32_t n) {
    lci_held_op op = {.done = 0};
    uint32_t gens[MOST_KEYS];
    NEED(lci_allocate(h, &op, pages, gens, n, LC_BLOCK, FOREVER) == LC_OK);
}

/* Somebody who died with a lease, a reservation and pages without a key, and before that cleared a namespace whose pages
 * somebody still pins. */
static void have_a_death(world *w) {
    lcs_attachment *at = join(w, "dead");
    lci_handle *h = lci_open(at, w->pages);
    filling f;
    struct {
        lci_lease head;
        int32_t rest[2 * MOST_KEYS];
    } lease = {.head.held = 0};
    lci_ns_ref gone;
    NEED(h && lci_namespace_open(h, "old", "", 0, &gone, LC_BLOCK, FOREVER) == LC_OK);
    reserve(w, h, &f, 7, 4, 1, gone);
    publish(h, &f);
    NEED(lci_match1(h, f.keys, 2, gone, &lease.head) == 2);
    NEED(lci_clear(h, gone, LC_BLOCK, FOREVER) == LC_OK);
    reserve(w, h, &f, 8, 5, 1, w->ns[0]);
    hold(h, lease.rest + 2, 2);
    w->dead_slot = at->slot;
    if (w->variant == DEAD_HOLDER) {
        lc_txn t;
        NEED(lcs_lock_take(at, &t, LCI_OP_EVICT, LC_BLOCK, FOREVER, h->log_begin, h->log_end) ==
             LC_OK);
        lci_doom(h, &t, f.fresh[0]);
        lci_doom(h, &t, f.fresh[1]);
        NEED(!t.error && t.count > 10);
    }
    lci_close(h);
    world_dismiss(at);
}

static void populate(world *w) {
    uint32_t freed = 0;
    filling f;
    NEED(lci_namespace_open(w->h, "new", "tenant", 9, &w->ns[1], LC_BLOCK, FOREVER) == LC_OK);
    fill(w, 0, 14, w->ns[0]);
    fill(w, 1, 9, w->ns[0]);
    fill(w, 2, 6, w->ns[1]);
    reserve(w, w->h, &f, 5, 5, 2, w->ns[0]);
    w->open = f.op;
    w->open_count = f.made;
    memcpy(w->open_pages, f.fresh, f.made * sizeof f.fresh[0]);
    fill(w, 3, 6, w->ns[0]);
    keep(w, 1, 3);
    promise(w, 3);
    give_tickets(w);
    NEED(lci_evict_pages(w->h, 4, &freed, LC_BLOCK, FOREVER) == LC_OK && freed == 4);
    hold(w->h, w->held_pages, HELD_PAGES);
    have_a_death(w);
}

static void settle_ready(world *w) {
    for (uint32_t run = 0; run < KEY_RUNS; run++) {
        lc_key keys[MOST_KEYS];
        world_keys(keys, run, MOST_KEYS);
        w->ready[run] = 0;
        for (int i = 0; i < 2; i++) {
            int n = lci_peek1(w->h, keys, MOST_KEYS, w->ns[i]);
            if (n > (int)w->ready[run]) w->ready[run] = (uint32_t)n;
        }
    }
}

void world_make(world *w, enum variant variant) {
    memset(w, 0, sizeof *w);
    w->variant = variant;
    w->pages = sizes[variant];
    NEED(lci_geometry_of(w->pages, order_tested(), &w->g) == LC_OK);
    w->bytes = w->g.end;
    int memory = memfd_create("segment", MFD_CLOEXEC);
    w->life = memfd_create("life", MFD_CLOEXEC);
    NEED(memory >= 0 && w->life >= 0 && ftruncate(memory, (off_t)w->bytes) == 0);
    w->base = world_map(memory, w->bytes, PROT_READ | PROT_WRITE);
    uint64_t grown = variant == FRESH_WORLD ? w->pages / 2 : w->pages;
    NEED(lci_format(w->base, w->bytes, w->pages, grown, order_tested()) == LC_OK);
    w->me = join(w, "me");
    w->peer = join(w, "peer");
    w->reader = lcs_attachment_new(world_map(memory, w->bytes, PROT_READ), w->bytes,
                                   world_reopen(w->life), 0, 0, 1);
    NEED(w->reader);
    w->h = lci_open(w->me, w->pages);
    w->peer_h = lci_open(w->peer, w->pages);
    w->reader_h = lci_open(w->reader, w->pages);
    NEED(w->h && w->peer_h && w->reader_h);
    w->me_slot = w->me->slot;
    w->me_epoch = w->me->epoch;
    w->ns[0] = w->ns[1] = (lci_ns_ref)(1u << 8);
    if (variant == FULL_WORLD) fill(w, 0, 7, w->ns[0]);
    else if (variant != FRESH_WORLD) populate(w);
    settle_ready(w);
    close(memory);
    w->picture = malloc(w->bytes);
    w->scratch = malloc(w->bytes);
    NEED(w->picture && w->scratch);
    memcpy(w->picture, w->base, w->bytes);
}

void world_restore(world *w) {
    memcpy(w->base, w->picture, w->bytes);
    lcs_attachment *me = w->me;
    me->leaving = 0;
    me->slot = w->me_slot;
    me->epoch = w->me_epoch;
    NEED(lcs_byte_lock(me->life_fd, LCS_BYTE_SLOTS + me->slot, 1) == LC_OK);
}
