/* The log's part of the stress: a writer, readers of which each is a client of its own, and one that
 * checks. Entries are plain bytes: the sanitizer proves of each that writing it happened before
 * reading it, and reading by everybody before its slot was written again. */
#include "stress_log.h"

#include "world.h"

#include <pthread.h>

#define CAPACITY 5
#define READERS 3
#define MOST 4
#define STAY 40 /* entries that a reader reads before it leaves and joins again */

typedef struct end {
    client c;
    lcx_log *log;
    uint32_t rounds, number, seen;
} end;

static void *append(void *argument) {
    end *e = argument;
    for (uint32_t at = 0; at < e->rounds;) {
        uint32_t entry[2] = {at, ~at};
        int rc = lcx_log_append(e->log, (const uint8_t *)entry, sizeof entry);
        CHECK(rc == LC_OK || rc == LC_E_FULL);
        at += rc == LC_OK;
    }
    return NULL;
}

/* Until the last entry. The first reader stays; the others leave and join again on the way, and
 * begin at the position that they are told. */
static void *read_all(void *argument) {
    end *e = argument;
    uint32_t next = (uint32_t)lcx_log_position(e->log), until = next + STAY;
    while (next < e->rounds) {
        uint32_t some[MOST][2], lengths[MOST];
        int n = lcx_log_read(e->log, (uint8_t *)some, sizeof some, lengths, MOST);
        CHECK(n > 0 || n == LC_E_MISSING);
        for (int i = 0; i < n; i++, next++) {
            CHECK_EQ(lengths[i], sizeof *some);
            CHECK(some[i][0] == next && some[i][1] == ~next);
            e->seen++;
        }
        if (e->number == 0 || next < until) continue;
        CHECK_EQ(lcx_log_leave(e->log, BLOCKING), LC_OK);
        CHECK_EQ(lcx_log_join(e->log), LC_OK);
        CHECK(lcx_log_position(e->log) >= next);
        next = (uint32_t)lcx_log_position(e->log);
        until = next + STAY;
    }
    return NULL;
}

static void *check(void *argument) {
    end *e = argument;
    char text[200] = "";
    int64_t behind[LCS_SLOTS] = {0};
    while (lcx_log_behind(e->log, behind) < e->rounds) {
        int rc = lcx_log_check(e->log, text, sizeof text, BLOCKING);
        if (rc == 1) check_failed("stress_log", 0, text);
        CHECK(rc == 0 || rc == LC_E_INTR);
        for (uint32_t slot = 0; slot < LCS_SLOTS; slot++) CHECK(behind[slot] <= CAPACITY);
    }
    return NULL;
}

void stress_log(uint32_t rounds) {
    segment s = segment_make(LCS_PAYLOAD_OFFSET + lcx_log_bytes(CAPACITY, 2 * sizeof(uint32_t)));
    end ends[READERS + 2];
    pthread_t threads[READERS + 2];
    void *(*const work[])(void *) = {read_all, read_all, read_all, append, check};
    for (uint32_t i = 0; i < READERS + 2; i++) {
        ends[i] = (end){.c = client_join(&s), .rounds = rounds, .number = i};
        ends[i].log = lcx_log_open(ends[i].c.at, CAPACITY, 2 * sizeof(uint32_t));
        CHECK(ends[i].log);
        if (i < READERS) CHECK_EQ(lcx_log_join(ends[i].log), LC_OK);
        if (i == READERS) CHECK_EQ(lcx_log_lead(ends[i].log, BLOCKING), LC_OK);
    }
    for (uint32_t i = 0; i < READERS + 2; i++)
        CHECK_EQ(pthread_create(&threads[i], NULL, work[i], &ends[i]), 0);
    for (uint32_t i = 0; i < READERS + 2; i++) CHECK_EQ(pthread_join(threads[i], NULL), 0);
    CHECK_EQ(ends[0].seen, rounds);
    CHECK(rounds < 1000 || ends[1].seen > STAY);
    for (uint32_t i = 0; i < READERS + 2; i++) {
        CHECK_EQ(lcx_log_leave(ends[i].log, BLOCKING), LC_OK);
        lcx_log_close(ends[i].log);
        client_leave(&ends[i].c);
    }
    segment_end(&s);
}
