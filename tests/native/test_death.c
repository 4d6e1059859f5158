/* A death at every pause point of every operation, and what the survivors find. Without pause
 * points compiled in there is nothing here. */
#include "pair.h"

#include <setjmp.h>

#ifdef LC_PAUSE_POINTS

static prompt fresh;

static jmp_buf death;
static int passes_left;

static void die(int point) {
    (void)point;
    if (passes_left-- == 0) {
        lc_pause_hook = NULL;
        longjmp(death, 1);
    }
}

/* The victim's operations. `p` is ready, `fresh` is what it writes, where it writes. */
static client victim;
static lci_ticket_ref ticket;

static void do_reserve(void) { prompt_reserve(&victim, &fresh, NS, 1); }
static void do_publish(void) { prompt_publish(&victim, &fresh, 0); }
static void do_match(void) { (void)match(&victim, &p, &l); }
static void do_release(void) { (void)lci_release(victim.h, &l.head); }
static void do_evict(void) { (void)evict(&victim, 20); }
static void do_clear(void) { (void)lci_clear(victim.h, NS, BLOCKING); }
static void do_abandon(void) {
    (void)lci_abandon(victim.h, fresh.op.rid, fresh.op.gen, BLOCKING);
}
static void do_give(void) {
    (void)lci_ticket_give(victim.h, l.pages, l.head.held, LC_NIL, 0, 1u << b.slot, FOREVER, &ticket,
                          BLOCKING);
}
static void do_leave(void) { (void)lci_leave(victim.h, BLOCKING); }

typedef struct operation {
    const char *name;
    void (*run)(void);
    bool writes, holds; /* `fresh` is reserved before; `p` is matched before */
} operation;

static void prepare(const operation *o) {
    set_up(48);
    victim = client_join(&s);
    prompt_fill(&a, &p, 1, 20);
    prompt_fill(&a, &q, 2, 28); /* full: reserving has to evict */
    prompt_make(&q, 2, 20);
    prompt_make(&fresh, 3, 10);
    if (o->writes) CHECK_EQ(prompt_reserve(&victim, &fresh, NS, 1), 10);
    if (o->holds) (void)match(&victim, &p, &l);
    if (o->run == do_clear) { /* kept pages are cleared like others, and counted */
        lci_walk_op kept = {0};
        CHECK_EQ(THROUGH(lci_keep(a.h, q.keys, 20, NS, 1, &kept, BLOCKING)), LC_OK);
        CHECK_EQ(index_counts(&a).kept, 20);
    }
    memset(&ticket, 0, sizeof ticket);
}

/* What the survivors find: a sound index, whose pages can all be used. */
static void survive(const operation *o) {
    uint32_t slot = victim.slot, taken = lc_load(&lcs_client_of(a.at, slot)->state);
    CHECK(index_broken(&s) == 0 || taken == LCS_CLIENT_TAKEN);
    client_die(&victim);
    CHECK_EQ(lci_reap_slot(b.h, slot, BLOCKING), 1);
    index_check(&s);
    for (uint32_t page = 0; page < 48; page++) CHECK_EQ(lc_load(lci_pin(b.h, slot, page)), 0);
    CHECK_EQ(index_counts(&b).reservations, 0);
    if (o->run == do_clear) CHECK_EQ(THROUGH(lci_clear(b.h, NS, BLOCKING)), LC_OK);
    if (o->run == do_give) { /* the ticket may stand; its adopter may come */
        uint32_t rid, gen;
        if (ticket.gen)
            (void)lci_adopt(b.h, &ticket, 0, &l.head.held, l.pages, 48, &rid, &gen, BLOCKING);
        if (ticket.gen) (void)lci_ticket_done(b.h, &ticket, 1);
        CHECK_EQ(lci_leave(b.h, BLOCKING), LC_OK);
        lc_store(&b.at->leaving, 0);
    }
    (void)evict(&b, 48);
    (void)evict(&b, 48);
    lci_counts counts = index_counts(&b);
    CHECK_EQ(counts.free, 48);
    CHECK_EQ(counts.tickets, 0);
    CHECK_EQ(counts.chunks, 0);
    tear_down();
}

/* Die at each passing of a pause point, until the operation is through without dying. */
static void die_everywhere(const operation *o) {
    static volatile int pass;
    static volatile bool through;
    through = false;
    for (pass = 0; !through; pass++) {
        prepare(o);
        passes_left = pass;
        lc_pause_hook = die;
        if (setjmp(death) == 0) {
            o->run();
            through = true;
        }
        lc_pause_hook = NULL;
        survive(o);
    }
    CHECK(pass > 3 || o->run == do_release);
}

#define DEATH(name, run, writes, holds)                       \
    static void name(void) {                                  \
        static const operation o = {#name, run, writes, holds}; \
        die_everywhere(&o);                                   \
    }
DEATH(death_in_reserve, do_reserve, false, false)
DEATH(death_in_publish, do_publish, true, false)
DEATH(death_in_match, do_match, false, false)
DEATH(death_in_release, do_release, false, true)
DEATH(death_in_evict, do_evict, false, false)
DEATH(death_in_clear, do_clear, false, true)
DEATH(death_in_abandon, do_abandon, true, false)
DEATH(death_in_give, do_give, false, true)
DEATH(death_in_leave, do_leave, true, true)

const test death_tests[] = {
    TEST(death_in_reserve),
    TEST(death_in_publish),
    TEST(death_in_match),
    TEST(death_in_release),
    TEST(death_in_evict),
    TEST(death_in_clear),
    TEST(death_in_abandon),
    TEST(death_in_give),
    TEST(death_in_leave),
    END_OF_TESTS,
};

#else
const test death_tests[] = {END_OF_TESTS};
#endif
