/* meetings: a call of one client is interrupted after each of its stores by a whole call of
 * another, which takes no lock (or the first holds none), and goes on; or dies there.
 *
 * However the two meet, each must have got what it was told: a page that was matched stays what it
 * is while it is held, and what was published is found, or was refused and is not. */
#include "world.h"

#include "hooks.h"

#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

#define PAGES 40
#define RUN 5

static segment real;
static client first, second, watcher;
static prompt old_run, new_run;
static lci_ticket_ref ticket;
static lease held;
static uint32_t gens[PAGES];
static int told; /* what the second was told, or the first */
static uint32_t meet_at, stores;
static bool watching;

typedef struct meeting {
    const char *name;
    void (*prepare)(void);
    void (*first)(void);
    void (*second)(void);
    void (*judge)(const client *who);
} meeting;

static const meeting *now;

#define RIGHT(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            fprintf(stderr, "%s, met after store %u: ", now->name, meet_at);               \
            check_failed(__FILE__, __LINE__, #condition);                                  \
        }                                                                                  \
    } while (0)

/* ------------------------------------------------------------------ what must be so */

static uint32_t found(const client *who, const prompt *p) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < p->n; i++) n += lci_peek1(who->h, &p->keys[i], 1, NS) == 1;
    return n;
}

static void as_told(const client *who) {
    uint32_t n = found(who, &new_run);
    if (told == 1) RIGHT(n == RUN);
    else RIGHT(n == 0);
}

/* 0 is right only as long as somebody is still to come, and nobody is. */
static void as_told_last(const client *who) {
    RIGHT(told == 1 || told == LC_E_STALE || told == LC_E_CLEARED);
    as_told(who);
}

static void note_lease(void) {
    for (uint32_t i = 0; i < held.head.held; i++)
        gens[i] = lc_load(&first.h->pages[held.pages[i]].gen);
}

static void lease_stands(const client *who) {
    for (uint32_t i = 0; i < held.head.held; i++) {
        const lci_page *p = &who->h->pages[held.pages[i]];
        RIGHT(lc_load(&p->gen) == gens[i]);
        RIGHT(lc_load(&p->lo) == old_run.keys[i].lo);
        RIGHT(lci_state_of(lc_load(&p->word)) == LCI_READY);
    }
}

/* The same where its namespace was forgotten: its bytes stay, whoever finds the key. */
static void lease_keeps(const client *who) {
    for (uint32_t i = 0; i < held.head.held; i++) {
        const lci_page *p = &who->h->pages[held.pages[i]];
        uint32_t state = lci_state_of(lc_load(&p->word));
        RIGHT(lc_load(&p->gen) == gens[i] && (state == LCI_READY || state == LCI_DOOMED));
    }
}

static void sound(const client *who) {
    static uint8_t copy[1 << 20];
    lci_report report;
    CHECK(real.bytes <= sizeof copy);
    memcpy(copy, who->at->base, real.bytes);
    RIGHT(lci_recover_copy(copy, real.bytes, PAGES) >= 0);
    CHECK_EQ(lci_check(copy, real.bytes, PAGES, 1, &report), LC_OK);
    if (report.broken) fprintf(stderr, "%s\n", report.message);
    RIGHT(!report.broken);
}

/* ------------------------------------------------------------------ who does what */

static void prepare(void) { prompt_fill(&first, &old_run, 1, 12); }

static void reserved(void) {
    prepare();
    prompt_make(&new_run, 2, RUN);
    CHECK_EQ(prompt_reserve(&first, &new_run, NS, 1), RUN);
}

/* Its publisher has stopped behind its last shard, before any page is ready. */
static void stopped(void) {
    reserved();
    _Atomic uint32_t *word = &first.h->res[new_run.op.rid].shard[0];
    lc_store(word, lc_load(word) | LCI_SHARD_DONE);
}

/* The second has adopted shard 1 and pins the pages; shard 0 is there already. */
static void shared(void) {
    uint32_t rid, gen;
    int32_t pages[RUN];
    uint32_t pinned = 0;
    prepare();
    prompt_make(&new_run, 2, RUN);
    CHECK_EQ(prompt_reserve(&first, &new_run, NS, 2), RUN);
    CHECK_EQ(lci_ticket_give(first.h, new_run.fresh, RUN, new_run.op.rid, new_run.op.gen,
                             UINT64_C(1) << second.slot, FOREVER, &ticket, BLOCKING),
             LC_OK);
    CHECK_EQ(lci_adopt(second.h, &ticket, 1, &pinned, pages, RUN, &rid, &gen, BLOCKING), RUN);
    prompt_publish(&first, &new_run, 0);
}

/* The first may adopt the only shard, which the second is about to publish. */
static void offered(void) {
    prepare();
    prompt_make(&new_run, 2, RUN);
    CHECK_EQ(prompt_reserve(&second, &new_run, NS, 1), RUN);
    CHECK_EQ(lci_ticket_give(second.h, new_run.fresh, RUN, new_run.op.rid, new_run.op.gen,
                             UINT64_C(1) << first.slot, FOREVER, &ticket, BLOCKING),
             LC_OK);
}

static void waiting(void) {
    prepare();
    CHECK_EQ(match(&first, &old_run, &held), old_run.n);
}

static int publish(client *c, uint32_t shard) {
    const lci_reserve_op *op = &new_run.op;
    return lci_publish(c->h, op->rid, op->gen, shard, new_run.fresh, RUN);
}

static void first_publishes(void) { told = publish(&first, 0); }
static void second_publishes(void) { told = publish(&second, 1); }

static void owner_publishes(void) { told = publish(&second, 0); }

static void first_adopts(void) {
    uint32_t rid, gen;
    int rc = lci_adopt(first.h, &ticket, 0, &held.head.held, held.pages, RUN, &rid, &gen, BLOCKING);
    RIGHT(rc == RUN || rc == LC_E_TWICE);
}

/* The stopped publisher goes on. */
static void second_makes_ready(void) {
    for (uint32_t i = 0; i < RUN; i++) {
        _Atomic uint32_t *word = &second.h->pages[new_run.fresh[i]].word;
        uint32_t rid = new_run.op.rid + 1, old = LCI_WRITING | rid << LCI_RES_SHIFT;
        atomic_compare_exchange_strong(word, &old, old ^ LCI_WRITING ^ LCI_READY);
    }
    lci_flag_ended(second.h, new_run.op.rid);
}

static void abandons(client *c) {
    int rc = lci_abandon(c->h, new_run.op.rid, new_run.op.gen, BLOCKING);
    RIGHT(rc == LC_OK || rc == LC_E_STALE);
}

static void first_abandons(void) { abandons(&first); }
static void second_abandons(void) { abandons(&second); }
static void clears(client *c) { RIGHT(lci_clear(c->h, NS, BLOCKING) == LC_OK); }
static void first_clears(void) { clears(&first); }
static void second_clears(void) { clears(&second); }
static void first_evicts(void) { (void)evict(&first, PAGES); }
static void second_evicts(void) { (void)evict(&second, PAGES); }

static void matches(client *c) {
    match(c, &old_run, &held);
    note_lease();
}

static void first_matches(void) { matches(&first); }
static void second_matches(void) { matches(&second); }

/* Whoever is evicted is used again at once. */
static void first_writes(void) {
    static prompt more;
    prompt_make(&more, 3, PAGES - 4);
    int n = prompt_reserve(&first, &more, NS, 1);
    RIGHT(n >= 0);
    if (more.made) prompt_publish(&first, &more, 0);
    prompt_unpin(&first, &more);
}

static void second_writes(void) {
    static prompt more;
    prompt_make(&more, 3, PAGES - 4);
    int n = prompt_reserve(&second, &more, NS, 1);
    RIGHT(n >= 0);
    if (more.made) prompt_publish(&second, &more, 0);
    prompt_unpin(&second, &more);
}

static void first_releases(void) { RIGHT(lci_release(first.h, &held.head) == LC_OK); }

static void nothing(const client *who) { (void)who; }

static const meeting meetings[] = {
    {"evict, match", prepare, first_evicts, second_matches, lease_stands},
    {"match, evict", prepare, first_matches, second_evicts, lease_stands},
    {"write, match", prepare, first_writes, second_matches, lease_stands},
    {"match, write", prepare, first_matches, second_writes, lease_stands},
    {"clear, match", prepare, first_clears, second_matches, lease_keeps},
    {"match, clear", prepare, first_matches, second_clears, lease_keeps},
    {"release, evict", waiting, first_releases, second_evicts, nothing},
    {"abandon, publish", shared, first_abandons, second_publishes, as_told_last},
    {"evict, publish", shared, first_evicts, second_publishes, as_told},
    {"clear, publish", shared, first_clears, second_publishes, nothing},
    {"adopt, publish", offered, first_adopts, owner_publishes, as_told},
    {"clear, go on publishing", stopped, first_clears, second_makes_ready, nothing},
    {"evict, go on publishing", stopped, first_evicts, second_makes_ready, nothing},
    {"publish, abandon", reserved, first_publishes, second_abandons, as_told_last},
    {"publish, clear", reserved, first_publishes, second_clears, nothing},
    {"publish, evict", reserved, first_publishes, second_evicts, nothing},
};

/* ------------------------------------------------------------------ meetings */

/* The first dies where they have met: what the second was told holds all the same. */
static void die(void) {
    int kind = MAP_PRIVATE | MAP_ANONYMOUS;
    uint8_t *base = mmap(NULL, real.bytes, PROT_READ | PROT_WRITE, kind, -1, 0);
    client heir = {.life = memfd_create("life", MFD_CLOEXEC)};
    CHECK(base != MAP_FAILED && heir.life >= 0);
    memcpy(base, real.base, real.bytes);
    heir.at = lcs_attachment_new(base, real.bytes, heir.life, watcher.slot, watcher.at->epoch, 0);
    CHECK(heir.at);
    heir.at->pidns = 0; /* only the byte locks are asked who lives */
    heir.h = lci_open(heir.at, PAGES);
    RIGHT(lci_reap_slot(heir.h, first.slot, BLOCKING) == 1);
    sound(&heir);
    if (now->first != first_matches && now->first != first_publishes) now->judge(&heir);
    client_forget(&heir);
    munmap(base, real.bytes);
}

static void on_store(const volatile void *word) {
    const volatile uint8_t *at = word;
    if (!watching || at < real.base || at >= real.base + real.bytes || ++stores != meet_at) return;
    watching = false;
    now->second();
    die();
}

/* Returns whether they have met. */
static bool meet(void) {
    real = index_make(PAGES);
    first = client_join(&real);
    second = client_join(&real);
    watcher = client_join(&real);
    memset(&held, 0, sizeof held);
    told = LC_E_STALE;
    now->prepare();
    stores = 0;
    watching = true;
    now->first();
    watching = false;
    bool met = stores >= meet_at;
    if (met) {
        sound(&watcher);
        now->judge(&watcher);
    }
    client_forget(&first);
    client_forget(&second);
    client_forget(&watcher);
    segment_end(&real);
    return met;
}

int main(void) {
    after_store = on_store;
    for (uint32_t i = 0; i < sizeof meetings / sizeof *meetings; i++) {
        now = &meetings[i];
        check_running = now->name;
        for (meet_at = 1; meet(); meet_at++) {}
        printf("%s: %u meetings\n", now->name, meet_at - 1);
    }
    return 0;
}
