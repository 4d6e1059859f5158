/* The victim: attaches, prepares a scene, stops, performs one operation, stops again.
 *
 *     driver FILE PAGES SCENE
 *
 * The stepper traces it: what lies between the two stops is executed one instruction at a time.
 * Runs 0 and 1 are ready before; run 2 is what the operation writes, if it writes. */
#include "scene.h"

static run a, b, c;
static struct {
    lci_lease head;
    int32_t rest[2 * MAX_KEYS];
} lease;

static void match(scene *s, const run *r) {
    memset(&lease, 0, sizeof lease);
    NEED(lci_match1(s->h, r->keys, r->n, SCENE_NS, &lease.head) == (int)r->n);
}

int main(int argc, char **argv) {
    NEED(argc == 4);
    const char *name = argv[3];
    uint64_t pages = strtoull(argv[2], NULL, 10);
    scene s = scene_attach(argv[1], pages, "victim");
    bool full = strcmp(name, "reserve-evicting") == 0;
    uint32_t n = (uint32_t)pages / 2, more = 6, freed = 0;
    lci_ticket_ref ticket;
    run_fill(&s, &a, 0, n - 8);
    run_fill(&s, &b, 1, full ? n + 8 : n - 8);
    bool writes = strcmp(name, "publish") == 0 || strcmp(name, "abandon") == 0 ||
                  strcmp(name, "publish-shard") == 0;
    bool holds = strcmp(name, "release") == 0 || strcmp(name, "ticket") == 0;
    if (writes) run_reserve(&s, &c, 2, more, name[7] == '-' ? 2 : 1);
    if (holds) match(&s, &b);
    if (name[7] == '-' && writes) run_publish(&s, &c, 0);

    raise(SIGSTOP);
    if (strcmp(name, "reserve") == 0 || full) {
        run_reserve(&s, &c, 2, more, 1);
    } else if (strcmp(name, "publish") == 0) {
        run_publish(&s, &c, 0);
    } else if (strcmp(name, "publish-shard") == 0) {
        run_publish(&s, &c, 1);
    } else if (strcmp(name, "abandon") == 0) {
        NEED(lci_abandon(s.h, c.op.rid, c.op.gen, LC_BLOCK, FOREVER) == LC_OK);
    } else if (strcmp(name, "match") == 0) {
        match(&s, &b);
    } else if (strcmp(name, "release") == 0) {
        NEED(lci_release(s.h, &lease.head) == LC_OK);
    } else if (strcmp(name, "evict") == 0) {
        NEED(lci_evict_pages(s.h, 5, &freed, LC_BLOCK, FOREVER) == LC_OK && freed == 5);
    } else if (strcmp(name, "ticket") == 0) {
        NEED(lci_ticket_give(s.h, lease.rest, lease.head.held, LC_NIL, 0, 2, FOREVER, &ticket,
                             LC_BLOCK, FOREVER) == LC_OK);
    } else if (strcmp(name, "clear") == 0) {
        NEED(lci_clear(s.h, SCENE_NS, LC_BLOCK, FOREVER) == LC_OK);
    } else {
        NEED(!"a scene of this name");
    }
    raise(SIGSTOP);
    return 0;
}
