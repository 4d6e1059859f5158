/* The ring's part of the stress: threads push and pop, each a client of its own, so that nothing but
 * the lock connects them. Messages are plain bytes: the sanitizer proves of each that writing it
 * happened before reading it, and reading before its slot was written again. */
#include "stress_ring.h"

#include "world.h"

#include <pthread.h>

#define CAPACITY 7
#define PRODUCERS 2
#define CONSUMERS 2
#define MOST 4

typedef struct message {
    uint32_t producer, number;
} message;

typedef struct end { /* a producer's or a consumer's */
    client c;
    lcx_ring *ring;
    uint32_t number, rounds, sum;
} end;

static _Atomic uint32_t taken; /* relaxed: it connects nobody */

static void *produce(void *argument) {
    end *e = argument;
    for (uint32_t at = 0; at < e->rounds;) {
        message some[MOST];
        uint32_t lengths[MOST], n = 1 + at % MOST;
        if (n > e->rounds - at) n = e->rounds - at;
        for (uint32_t i = 0; i < n; i++) {
            some[i] = (message){e->number, at + i};
            lengths[i] = sizeof *some;
        }
        int rc = lcx_ring_push(e->ring, (const uint8_t *)some, lengths, n, BLOCKING);
        CHECK(rc > 0 || rc == LC_E_FULL || rc == LC_E_INTR);
        if (rc > 0) at += (uint32_t)rc;
    }
    return NULL;
}

static void *consume(void *argument) {
    end *e = argument;
    uint32_t next[PRODUCERS] = {0}, all = PRODUCERS * e->rounds;
    while (atomic_load_explicit(&taken, memory_order_relaxed) < all) {
        message some[MOST];
        uint32_t lengths[MOST];
        int n = lcx_ring_pop(e->ring, (uint8_t *)some, sizeof some, lengths, MOST, BLOCKING);
        CHECK(n > 0 || n == LC_E_MISSING || n == LC_E_INTR);
        for (int i = 0; i < n; i++) {
            CHECK_EQ(lengths[i], sizeof *some);
            CHECK(some[i].producer < PRODUCERS && some[i].number >= next[some[i].producer]);
            next[some[i].producer] = some[i].number + 1;
            e->sum += some[i].number + 1;
        }
        if (n > 0) atomic_fetch_add_explicit(&taken, (uint32_t)n, memory_order_relaxed);
    }
    return NULL;
}

void stress_ring(uint32_t rounds) {
    segment s = segment_make(LCS_PAYLOAD_OFFSET + lcx_ring_bytes(CAPACITY, sizeof(message)));
    end ends[PRODUCERS + CONSUMERS];
    pthread_t threads[PRODUCERS + CONSUMERS];
    uint32_t sum = 0;
    lc_store(&taken, 0);
    for (uint32_t i = 0; i < PRODUCERS + CONSUMERS; i++) {
        ends[i] = (end){.c = client_join(&s), .number = i, .rounds = rounds};
        ends[i].ring = lcx_ring_open(ends[i].c.at, CAPACITY, sizeof(message));
        CHECK(ends[i].ring);
    }
    for (uint32_t i = 0; i < PRODUCERS + CONSUMERS; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, i < PRODUCERS ? produce : consume, &ends[i]), 0);
    for (uint32_t i = 0; i < PRODUCERS + CONSUMERS; i++) {
        CHECK_EQ(pthread_join(threads[i], NULL), 0);
        sum += ends[i].sum;
        lcx_ring_close(ends[i].ring);
        client_leave(&ends[i].c);
    }
    CHECK_EQ(sum, PRODUCERS * (rounds * (rounds + 1) / 2)); /* each message once */
    segment_end(&s);
}
