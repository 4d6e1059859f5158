/* stress [ROUNDS [SEED]]: clients as threads of one process, each call against every other.
 *
 * Built with ThreadSanitizer. The pool's bytes are plain memory, stamped with the key by whoever
 * writes a page and compared by whoever has matched it, so that the sanitizer proves of every such
 * pair that publishing happened before matching, and releasing before the page was used again.
 * Nothing here but the core may connect two threads: they tell each other of tickets by relaxed
 * atomics, and start together after everything was made.
 *
 * Fences are a read-modify-write of a private word in that build (tsan_fence.h): what the sanitizer
 * accepts is ordered by acquire and release alone. It says nothing about a fence that is missing
 * or too weak, and none about an order that this machine never shows. Deaths are left out: that a
 * dead client's accesses are over is known from the kernel, which the sanitizer does not see. */
#include "stress_log.h"
#include "stress_ring.h"
#include "world.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define PAGES 96
#define CLIENTS 4
#define THREADS 6 /* the last two share attachments with the first two */
#define PROMPTS 8
#define LONGEST 24
#define SHARDS 2

typedef struct actor {
    client *c;
    uint32_t number, random;
    prompt p;
    lease l;
    lci_reserve_op owed; /* a reservation whose second shard was given away, and may never come */
    uint32_t matched, made; /* so that a run in which nothing happens is noticed */
} actor;

static segment s;
static client clients[CLIENTS];
static actor actors[THREADS];
static uint32_t rounds = 1500;
static uint64_t pool[PAGES][SHARDS]; /* plain */
static _Atomic uint64_t mailbox[CLIENTS]; /* a ticket for this client: index << 32 | gen */
static _Atomic uint32_t slots[CLIENTS]; /* of the clients, for those who give to them */
static _Atomic uint32_t namespace; /* the one in use: cleared now and then */

static uint32_t below(actor *a, uint32_t n) {
    a->random = (uint32_t)prompt_key(a->random, 0).lo; /* well mixed */
    return (a->random >> 8) % n;
}

static bool shares(const actor *a) { return a->number % CLIENTS < THREADS - CLIENTS; }

static void choose(actor *a) {
    prompt_make(&a->p, below(a, PROMPTS), 1 + below(a, LONGEST));
}

/* The stamp tells the key, and the shard that wrote it. */
static void stamp(const prompt *p, const int32_t *page, uint32_t shard, const uint8_t *status) {
    for (uint32_t i = 0; i < p->n; i++)
        if (status[i] == LCI_NEW) pool[page[i]][shard] = p->keys[i].lo + shard;
}

static void compare(const lc_key *keys, const int32_t *pages, uint32_t n) {
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t shard = 0; shard < SHARDS; shard++)
            CHECK(pool[pages[i]][shard] == keys[i].lo + shard);
}

static void do_match(actor *a) {
    lci_ns_ref ns = lc_load(&namespace);
    choose(a);
    int found = lci_match1(a->c->h, a->p.keys, a->p.n, ns, &a->l.head);
    CHECK(found >= 0);
    compare(a->p.keys, a->l.pages, (uint32_t)found);
    a->matched += (uint32_t)found;
    CHECK_EQ(lci_release(a->c->h, &a->l.head), LC_OK);
}

static void do_match_two(actor *a) {
    const int64_t offsets[] = {0, LONGEST, 2 * LONGEST};
    lc_key keys[2 * LONGEST];
    int32_t counts[2];
    prompt_make(&a->p, below(a, PROMPTS), LONGEST);
    memcpy(keys, a->p.keys, LONGEST * sizeof *keys);
    prompt_make(&a->p, below(a, PROMPTS), LONGEST);
    memcpy(keys + LONGEST, a->p.keys, LONGEST * sizeof *keys);
    memset(&a->l, 0, sizeof a->l);
    int found = lci_match(a->c->h, keys, offsets, 2, lc_load(&namespace), &a->l.head, counts);
    CHECK(found >= 0 && counts[0] + counts[1] == found);
    compare(keys, a->l.pages, (uint32_t)counts[0]);
    compare(keys + LONGEST, a->l.pages + counts[0], (uint32_t)counts[1]);
    CHECK_EQ(lci_release(a->c->h, &a->l.head), LC_OK);
}

static void do_peek(actor *a) {
    choose(a);
    CHECK(lci_peek1(a->c->h, a->p.keys, a->p.n, lc_load(&namespace)) >= 0);
    int rc = lci_wait(a->c->h, a->p.keys, a->p.n, lcs_now_ns());
    CHECK(rc == LC_OK || rc == LC_E_TIMEOUT);
    (void)index_counts(a->c);
}

static void abandon(actor *a, lci_reserve_op *op) {
    int rc;
    if (!op->gen) return;
    do rc = lci_abandon(a->c->h, op->rid, op->gen, BLOCKING);
    while (rc == LC_E_INTR);
    CHECK(rc == LC_OK || rc == LC_E_STALE);
    op->gen = 0;
}

/* Reserve a prompt; write its new pages and publish them, or think better of it. */
static void do_reserve(actor *a) {
    choose(a);
    int made = prompt_reserve(a->c, &a->p, lc_load(&namespace), SHARDS);
    CHECK(made >= 0 || made == LC_E_CLEARED);
    a->made += a->p.made;
    if (a->p.op.gen) {
        uint32_t publishes = below(a, 8) ? SHARDS : below(a, SHARDS);
        for (uint32_t shard = 0; shard < publishes; shard++) {
            stamp(&a->p, a->p.page, shard, a->p.status);
            int rc = lci_publish(a->c->h, a->p.op.rid, a->p.op.gen, shard, a->p.fresh, a->p.made);
            CHECK(rc >= 0 || rc == LC_E_CLEARED || rc == LC_E_STALE);
            if (rc < 0) publishes = 0;
        }
        if (publishes < SHARDS) abandon(a, &a->p.op);
    }
    CHECK_EQ(lci_unreserve(a->c->h, &a->p.op, a->p.page, a->p.status, a->p.n), LC_OK);
}

static void do_evict(actor *a) {
    uint32_t freed = 0;
    int rc;
    do rc = lci_evict_pages(a->c->h, below(a, 12), &freed, BLOCKING);
    while (rc == LC_E_INTR);
    CHECK_EQ(rc, LC_OK);
}

static void do_evict_first(actor *a) {
    lci_walk_op op = {0};
    int rc;
    choose(a);
    do rc = lci_evict_first(a->c->h, a->p.keys, a->p.n, lc_load(&namespace), &op, BLOCKING);
    while (rc == LC_E_INTR);
    CHECK_EQ(rc, LC_OK);
}

static void do_clear(actor *a) {
    lci_ns_ref fresh, old = lc_load(&namespace);
    int rc;
    do rc = lci_clear(a->c->h, old, BLOCKING);
    while (rc == LC_E_INTR);
    CHECK_EQ(rc, LC_OK);
    do rc = lci_namespace_open(a->c->h, "weights", "", 60, &fresh, BLOCKING);
    while (rc == LC_E_INTR);
    CHECK_EQ(rc, LC_OK);
    lc_store(&namespace, fresh);
}

/* The receiver's client, never the own one. */
static uint32_t somebody(actor *a) {
    return (a->number % CLIENTS + 1 + below(a, CLIENTS - 1)) % CLIENTS;
}

static void post(uint32_t to, const lci_ticket_ref *ref) {
    lc_store(&mailbox[to], (uint64_t)ref->index << 32 | ref->gen);
}

/* Hand over a lease, or the second shard of a reservation. */
static void do_give(actor *a) {
    lci_ticket_ref ref;
    uint32_t to = somebody(a);
    uint64_t adopters = UINT64_C(1) << lc_load(&slots[to]), soon = lcs_now_ns() + 500000;
    choose(a);
    abandon(a, &a->owed);
    int made = prompt_reserve(a->c, &a->p, lc_load(&namespace), SHARDS);
    bool whole = made <= 0;
    int rc = LC_E_FULL;
    if (whole) {
        abandon(a, &a->p.op);
        int found = lci_match1(a->c->h, a->p.keys, a->p.n, lc_load(&namespace), &a->l.head);
        CHECK(found >= 0);
        rc = lci_ticket_give(a->c->h, a->l.pages, (uint32_t)found, LC_NIL, 0, adopters, soon, &ref,
                             BLOCKING);
        CHECK_EQ(lci_release(a->c->h, &a->l.head), LC_OK);
    } else {
        rc = lci_ticket_give(a->c->h, a->p.fresh, a->p.made, a->p.op.rid, a->p.op.gen, adopters,
                             soon, &ref, BLOCKING);
    }
    CHECK(rc == LC_OK || rc == LC_E_FULL || rc == LC_E_INTR);
    if (rc == LC_OK) post(to, &ref);
    if (!whole) {
        stamp(&a->p, a->p.page, 0, a->p.status);
        (void)lci_publish(a->c->h, a->p.op.rid, a->p.op.gen, 0, a->p.fresh, a->p.made);
        a->owed = a->p.op;
    }
    CHECK_EQ(lci_unreserve(a->c->h, &a->p.op, a->p.page, a->p.status, a->p.n), LC_OK);
    if (rc == LC_OK) (void)lci_ticket_drop(a->c->h, &ref, BLOCKING);
}

/* Take what is in the mailbox. A reservation's shard is written for all the pages in the ticket:
 * their keys are read from the records, which nobody changes while the pages are pinned. */
static void do_adopt(actor *a) {
    _Atomic uint64_t *box = &mailbox[a->number % CLIENTS];
    uint64_t mail = atomic_exchange_explicit(box, 0, memory_order_relaxed);
    lci_ticket_ref ref = {.index = (uint32_t)(mail >> 32), .gen = (uint32_t)mail};
    uint32_t rid, gen;
    if (!mail) return;
    memcpy(&ref.cache, lcs_header_of(a->c->at)->uuid, sizeof ref.cache);
    int n = lci_adopt(a->c->h, &ref, 1, &a->l.head.held, a->l.pages, MAX_KEYS, &rid, &gen,
                      BLOCKING);
    if (n < 0) return;
    for (int i = 0; i < n; i++) {
        uint64_t lo = lc_load(&a->c->h->pages[a->l.pages[i]].lo);
        if (rid != LC_NIL) pool[a->l.pages[i]][1] = lo + 1;
        else CHECK(pool[a->l.pages[i]][0] == lo && pool[a->l.pages[i]][1] == lo + 1);
    }
    if (rid != LC_NIL) (void)lci_publish(a->c->h, rid, gen, 1, a->l.pages, (uint32_t)n);
    CHECK_EQ(lci_release(a->c->h, &a->l.head), LC_OK);
    CHECK_EQ(lci_ticket_done(a->c->h, &ref, 1), LC_OK);
}

/* Leave with a lease in the hand, and come back into the same slot or another. */
static void do_leave(actor *a) {
    if (shares(a)) return;
    choose(a);
    (void)lci_match1(a->c->h, a->p.keys, a->p.n, lc_load(&namespace), &a->l.head);
    client_leave(a->c);
    *a->c = client_join(&s);
    lc_store(&slots[a->number % CLIENTS], a->c->slot);
}

static void do_copy(actor *a) {
    static uint8_t copies[THREADS][1 << 20];
    lci_report report;
    CHECK(s.bytes <= sizeof copies[0]);
    int rc = lci_copy(a->c->h, copies[a->number], s.bytes, BLOCKING);
    if (rc == LC_E_INTR) return;
    CHECK_EQ(rc, LC_OK);
    CHECK_EQ(lci_check(copies[a->number], s.bytes, s.pages, 0, &report), LC_OK);
    if (report.broken) check_failed("check", report.broken, report.message);
}

static void *act(void *argument) {
    actor *a = argument;
    for (uint32_t i = 0; i < rounds; i++) {
        uint32_t what = below(a, 64);
        if (what < 20) do_match(a);
        else if (what < 24) do_match_two(a);
        else if (what < 30) do_peek(a);
        else if (what < 46) do_reserve(a);
        else if (what < 50) below(a, 2) ? do_evict(a) : do_evict_first(a);
        else if (what < 55) do_give(a);
        else if (what < 61) do_adopt(a);
        else if (what < 62) do_copy(a);
        else if (what < 63) do_leave(a);
        else if (below(a, 8) == 0) do_clear(a);
    }
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t threads[THREADS];
    uint32_t seed = argc > 2 ? (uint32_t)atoi(argv[2]) : 1, matched = 0, made = 0;
    if (argc > 1) rounds = (uint32_t)atoi(argv[1]);
    check_running = "stress";
    s = index_make(PAGES);
    lc_store(&namespace, NS);
    for (uint32_t i = 0; i < CLIENTS; i++) {
        clients[i] = client_join(&s);
        lc_store(&slots[i], clients[i].slot);
    }
    for (uint32_t i = 0; i < THREADS; i++)
        actors[i] = (actor){.c = &clients[i % CLIENTS], .number = i, .random = seed * 1000 + i};
    for (uint32_t i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, act, &actors[i]), 0);
    for (uint32_t i = 0; i < THREADS; i++) CHECK_EQ(pthread_join(threads[i], NULL), 0);
    for (uint32_t i = 0; i < THREADS; i++) {
        matched += actors[i].matched;
        made += actors[i].made;
    }
    for (uint32_t i = 0; i < CLIENTS; i++) client_leave(&clients[i]);
    index_check(&s);
    segment_end(&s);
    printf("%u pages matched, %u made\n", matched, made);
    stress_ring(rounds);
    stress_log(rounds);
    CHECK(rounds < 100 || (matched > rounds && made > rounds));
    return 0;
}
