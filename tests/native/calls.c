#include "calls.h"

#include <stdlib.h>

int32_t pages[MAX_KEYS], out[MAX_KEYS];
uint32_t gens[MAX_KEYS];
uint8_t status[MAX_KEYS];
lci_held_op op;
lci_walk_op walk;
lease list;
lc_key keys[MAX_KEYS];
uint32_t parents[MAX_KEYS], hits[MAX_KEYS];
lci_discard_op giving;

int allocate(client *c, uint32_t n) {
    op = (lci_held_op){.done = 0};
    return THROUGH(lci_allocate(c->h, &op, pages, gens, n, BLOCKING));
}

int free_pages(client *c, const int32_t *which, uint32_t n) {
    op = (lci_held_op){.done = 0};
    return THROUGH(lci_free_held(c->h, &op, which, NULL, n, BLOCKING));
}

int name(client *c, const prompt *of, uint32_t start, uint32_t flags) {
    int64_t offsets[2] = {0, of->n}, starts[1] = {start};
    op = (lci_held_op){.ns = NS, .flags = flags};
    memset(status, 0, sizeof status);
    return THROUGH(lci_name(c->h, &op, of->keys, offsets, starts, 1, pages, of->n - start, out,
                            status, BLOCKING));
}

int unname(client *c, const int32_t *which, uint32_t n) {
    op = (lci_held_op){.done = 0};
    return THROUGH(lci_unname(c->h, &op, which, n, BLOCKING));
}

int keep_run(client *c, const prompt *of, int kept) {
    walk = (lci_walk_op){.cursor = 0};
    return THROUGH(lci_keep(c->h, of->keys, of->n, NS, kept, &walk, BLOCKING));
}

int drop_run(client *c, const prompt *of, uint32_t start) {
    walk = (lci_walk_op){.cursor = 0};
    return THROUGH(lci_drop(c->h, of->keys, of->n, start, NS, &walk, BLOCKING));
}

int oldest(client *c, uint32_t want, uint32_t keep_order) {
    lci_oldest_op listing = {.want = want, .keep_order = keep_order};
    memset(&list, 0, sizeof list);
    return THROUGH(lci_oldest(c->h, &listing, &list.head, keys, parents, BLOCKING));
}

static int by_page(const void *x, const void *y) {
    return list.pages[*(const uint32_t *)x] - list.pages[*(const uint32_t *)y];
}

static int give_up(client *c, const uint32_t *seen) {
    static uint32_t order[MAX_KEYS];
    static uint8_t done[MAX_KEYS];
    uint32_t n = list.head.held;
    memset(done, 0, sizeof done);
    for (uint32_t i = 0; i < n; i++) order[i] = i;
    qsort(order, n, sizeof *order, by_page);
    giving = (lci_discard_op){.taken = 0};
    return THROUGH(lci_discard(c->h, &giving, &list.head, list.pages, seen, order, done, n, BLOCKING));
}

int discard(client *c) {
    memcpy(hits, list.pages + list.head.capacity, list.head.held * sizeof *hits);
    return give_up(c, hits);
}

int discard_used(client *c) { return give_up(c, NULL); }
