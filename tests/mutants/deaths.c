/* deaths [--list | SCENE...]: in every scene the victim dies after each of its stores, and whoever
 * recovers from that dies after some of those by which it recovers.
 *
 * The core is built with hooks.h, so a death is a copy of the segment taken in the hook. There
 *
 *   1. every page that was ready before is found without any recovery, unless the operation takes
 *      it away in the end;
 *   2. undoing the log gives the segment of the last safe point, word for word, and it is sound;
 *   3. reaping gives a sound segment without the victim's pins, with all or nothing of what it
 *      wrote; everything that nobody pins can be had, and written again. */
#include "deaths.h"

#include "hooks.h"

#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define DEEP 12 /* one death in so many is followed by deaths in its recovery, */
#define EACH 5  /* after every so many stores of that */

/* A copy of the segment with one client in it, in which nobody else proves his life. */
typedef struct copy {
    uint8_t *base;
    client who;
    bool and_survivor; /* the survivor is dead here as well */
} copy;

segment real;
client victim, survivor, second, late;

static copy first_copy, second_copy;
static uint8_t *safe; /* the segment as of the victim's last safe point */
static const scene *running;
static uint32_t stores, recovery_stores, deaths, log_before;
static enum { OUTSIDE, OPERATING, LOOKING, RECOVERING } now;

static struct {
    lc_key key;
    uint32_t page, gen;
    bool missed;
} stable[PAGES];
static uint32_t stable_count;

/* Say what is wrong and end: with deaths after every store, the first is enough. */
#define WRONG(...)                                                                    \
    do {                                                                              \
        fprintf(stderr, "%s, store %u%s: ", running->name, stores,                    \
                now == RECOVERING ? ", death in recovery" : "");                      \
        fprintf(stderr, __VA_ARGS__);                                                 \
        fputc('\n', stderr);                                                          \
        exit(1);                                                                      \
    } while (0)

static void make_copy(copy *c, const client *of, bool and_survivor) {
    c->base = mmap(NULL, real.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int life = memfd_create("life", MFD_CLOEXEC);
    CHECK(c->base != MAP_FAILED && life >= 0);
    memcpy(c->base, real.base, real.bytes);
    c->and_survivor = and_survivor;
    c->who = (client){.life = life, .slot = of->slot};
    c->who.at = lcs_attachment_new(c->base, real.bytes, life, of->slot, of->at->epoch, 0);
    CHECK(c->who.at);
    c->who.at->pidns = 0; /* only the byte locks are asked who lives */
    c->who.h = lci_open(c->who.at, PAGES);
    CHECK(c->who.h);
}

static void drop_copy(copy *c) {
    client_forget(&c->who);
    munmap(c->base, real.bytes);
}

/* ------------------------------------------------------------------ what is found after a death */

static lci_report sound(const copy *c, const char *when, int quiet) {
    lci_report report;
    CHECK_EQ(lci_check(c->base, real.bytes, PAGES, quiet, &report), LC_OK);
    if (report.broken) WRONG("%s: invariant %d, %s", when, report.broken, report.message);
    return report;
}

static bool finds(const client *c, const lc_key *key) { return lci_peek1(c->h, key, 1, NS) == 1; }

static uint32_t ready_of(const client *c, const prompt *p) {
    uint32_t ready = 0;
    for (uint32_t i = 0; i < p->n; i++) ready += finds(c, &p->keys[i]);
    return ready;
}

static void look_up(const client *c) {
    for (uint32_t i = 0; i < stable_count; i++)
        if (!finds(c, &stable[i].key)) stable[i].missed = true;
}

static void undo(const copy *c) {
    if (lc_load(&c->who.h->root->repairing)) return; /* made without the log: it is begun again */
    int undone = lci_recover_copy(c->base, real.bytes, PAGES);
    if (undone < 0) WRONG("undoing gave %d", undone);
    sound(c, "after undoing", 0);
    const char *where = difference(c->base, safe);
    if (where) WRONG("undoing did not bring back the last safe point: %s", where);
}

static void reap_one(const copy *c, const client *dead) {
    const lcs_client *slot = lcs_client_of(c->who.at, dead->slot);
    if (!dead->slot || lc_load(&slot->state) == LCS_CLIENT_FREE) return;
    int rc = lci_reap_slot(c->who.h, dead->slot, BLOCKING);
    if (rc != 1) WRONG("reaping slot %u gave %d", dead->slot, rc);
    if (lc_load(&slot->state) != LCS_CLIENT_FREE) WRONG("slot %u was not freed", dead->slot);
}

static void reap(const copy *c) {
    reap_one(c, &victim);
    reap_one(c, &late);
    if (c->and_survivor) reap_one(c, &survivor);
}

/* Pages that somebody pins, and what stands above them: these stay. */
static uint32_t kept_pages(const copy *c) {
    bool kept[PAGES] = {false};
    uint32_t n = 0;
    for (uint32_t page = 0; page < PAGES; page++) {
        if (!pins_of(&c->who, page)) continue;
        kept[page] = true;
        uint32_t up = lci_parent(c->who.h, &c->who.h->pages[page]);
        for (; up != LC_NIL && !kept[up]; up = lci_parent(c->who.h, &c->who.h->pages[up]))
            kept[up] = true;
    }
    for (uint32_t page = 0; page < PAGES; page++) n += kept[page];
    return n;
}

/* A lease's ticket can be adopted by whom it was given to; one of a reservation only while that
 * lives. */
static void adopt(copy *c, const lci_ticket *k, const lci_ticket_ref *ref) {
    static lease mine;
    uint32_t rid, rgen, n = lc_load(&k->total);
    bool ended = lc_load(&k->reservation) != 0;
    mine.head.held = 0;
    int rc = lci_adopt(c->who.h, ref, 1, &mine.head.held, mine.pages, n, &rid, &rgen, BLOCKING);
    if (rc != (int)n && rc != LC_E_TWICE && !(ended && rc == LC_E_STALE))
        WRONG("adopting %u pages gave %d", n, rc);
    for (uint32_t i = 0; i < mine.head.held; i++)
        if (!pins_of(&c->who, (uint32_t)mine.pages[i])) WRONG("an adopted page is not pinned");
    if (rc == (int)n) CHECK_EQ(lci_ticket_done(c->who.h, ref, 1), LC_OK);
    CHECK_EQ(lci_release(c->who.h, &mine.head), LC_OK);
}

static void use_tickets(copy *c) {
    uint64_t tag;
    memcpy(&tag, lcs_header_of(c->who.at)->uuid, sizeof tag);
    for (uint32_t i = 0; i < c->who.h->ticket_count; i++) {
        lci_ticket *k = &c->who.h->tickets[i];
        if (lc_load(&k->state) == LCI_TICKET_FREE) continue;
        lci_ticket_ref ref = {.index = i, .gen = lc_load(&k->gen), .cache = tag};
        if (lc_load(&k->adopters[0]) >> c->who.slot & 1) adopt(c, k, &ref);
        lc_store(&k->deadline_ns, 0); /* time passes */
        if (lc_load(&k->giver) == c->who.slot && lc_load(&k->state) == LCI_TICKET_OPEN)
            CHECK_EQ(lci_ticket_drop(c->who.h, &ref, BLOCKING), LC_OK);
    }
}

static void write_again(copy *c) {
    static prompt again;
    prompt_make(&again, 9, RUN);
    if (prompt_reserve(&c->who, &again, NS, 1) != RUN) WRONG("there is no room for new pages");
    prompt_publish(&c->who, &again, 0);
    prompt_unpin(&c->who, &again);
    if (ready_of(&c->who, &again) != RUN) WRONG("new pages are not found");
    sound(c, "after writing", 1);
}

/* Room can be had again, and what is had can be written; what was begun by the dead is brought to
 * its end by whoever comes by. */
static void use(copy *c) {
    const lci_root *root = c->who.h->root;
    use_tickets(c);
    evict(&c->who, PAGES); /* here the tickets' pins go, */
    uint32_t kept = kept_pages(c);
    evict(&c->who, PAGES); /* and here what only they had kept */
    lci_report report = sound(c, "after evicting", 1);
    uint32_t left = report.writing + report.ready + report.doomed;
    if (left != kept) WRONG("%u pages are left, %u are held", left, kept);
    if (lc_load(&root->res_used)) WRONG("a reservation is left");
    if (lc_load(&root->ticket_used)) WRONG("a ticket is left");
    if (lc_load(&root->clearing)) WRONG("a namespace is still being cleared");
    if (lc_load(&c->who.h->ns[0].state) == LCI_NS_NORMAL) write_again(c);
    else if (report.named) WRONG("%u pages of a cleared namespace are named", report.named);
}

static uint32_t row_sum(const copy *c) {
    uint32_t sum = 0;
    for (uint32_t p = 0; p < PAGES; p++) sum += lc_load(&c->who.h->mine[p]);
    return sum;
}

static uint32_t listed_by_tickets(const copy *c) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < c->who.h->ticket_count; i++) {
        const lci_ticket *k = &c->who.h->tickets[i];
        if (lc_load(&k->state) != LCI_TICKET_FREE) n += lc_load(&k->pages.count);
    }
    return n;
}

static void recover(copy *c, may_be ready) {
    reap(c);
    lci_report report = sound(c, "after reaping", 1);
    if (!c->and_survivor) look_up(&c->who);
    uint32_t n = ready_of(&c->who, &written_run);
    bool open = lc_load(&c->who.h->ns[0].state) == LCI_NS_NORMAL;
    if (open && !((n == 0 && ready != ALL) || (n == written_run.n && ready != NONE)))
        WRONG("%u of %u written pages are ready", n, written_run.n);
    uint32_t held = row_sum(c) + listed_by_tickets(c);
    if (report.pins != held) WRONG("%u pins are left, %u are held", report.pins, held);
    use(c);
}

/* ------------------------------------------------------------------ deaths */

static void look(may_be ready) {
    memcpy(first_copy.base, real.base, real.bytes);
    if (!running->marks) look_up(&first_copy.who);
    undo(&first_copy);
    memcpy(first_copy.base, real.base, real.bytes);
    recover(&first_copy, ready);
    if (deaths++ % DEEP) return;
    memcpy(first_copy.base, real.base, real.bytes);
    now = RECOVERING;
    reap(&first_copy);
    now = LOOKING;
}

/* Outside of the lock everything is one; inside it the log has just been emptied. A repair works
 * without the log: whoever comes next begins it anew. */
static void note_safe_point(void) {
    const lcs_lock *lock = lcs_lock_of(victim.at);
    uint32_t log = lc_load(&lock->log_count);
    bool inside = (lc_load(&lock->word) & LCS_LOCK_SLOT) == victim.slot;
    bool unlogged = lc_load(&victim.h->root->repairing) != 0;
    if (!inside || unlogged || (log == 0 && log_before)) memcpy(safe, real.base, real.bytes);
    log_before = log;
}

static bool lies_in(const uint8_t *base, const volatile void *word) {
    const volatile uint8_t *at = word;
    return at >= base && at < base + real.bytes;
}

static void on_store(const volatile void *word) {
    void (*hook)(int) = lc_pause_hook;
    lc_pause_hook = NULL; /* what a scene does at a pause point is for the victim alone */
    if (now == OPERATING && lies_in(real.base, word)) {
        now = LOOKING;
        stores++;
        note_safe_point();
        look(running->during);
        now = OPERATING;
    } else if (now == RECOVERING && lies_in(first_copy.base, word) && recovery_stores++ % EACH == 0) {
        now = LOOKING;
        memcpy(second_copy.base, first_copy.base, real.bytes);
        recover(&second_copy, running->during);
        now = RECOVERING;
    }
    lc_pause_hook = hook;
}

/* ------------------------------------------------------------------ scenes */

static void note_stable(void) {
    const prompt *runs[] = {&first_run, &second_run};
    stable_count = 0;
    for (uint32_t r = 0; r < 2; r++)
        for (uint32_t i = 0; i < runs[r]->n; i++) {
            lc_found found;
            lc_key key = runs[r]->keys[i];
            lc_dict_find(&survivor.h->dict, key.lo, key.hi, &found);
            if (found.node == LC_NIL || lci_state_of(found.word) != LCI_READY) continue;
            stable[stable_count].key = key;
            stable[stable_count].missed = false;
            stable[stable_count].page = found.node;
            stable[stable_count++].gen = found.gen;
        }
    CHECK(stable_count >= HELD);
}

static void compare_with_end(void) {
    for (uint32_t i = 0; i < stable_count; i++) {
        const lci_page *p = &survivor.h->pages[stable[i].page];
        bool stays = finds(&survivor, &stable[i].key) && lc_load(&p->gen) == stable[i].gen;
        if (stays && stable[i].missed) WRONG("page %u stays and was missed", stable[i].page);
    }
}

static void play(const scene *s) {
    static lease held;
    running = s;
    check_running = s->name;
    stores = recovery_stores = deaths = log_before = 0;
    real = index_make(PAGES);
    safe = malloc(real.bytes);
    victim = client_join(&real);
    survivor = client_join(&real);
    second = client_join(&real);
    late = (client){.life = -1};
    s->prepare();
    CHECK_EQ(match(&survivor, &first_run, &held), HELD);
    note_stable();
    make_copy(&first_copy, &survivor, false);
    make_copy(&second_copy, &second, true);
    memcpy(safe, real.base, real.bytes);
    now = OPERATING;
    s->operate();
    now = LOOKING;
    note_safe_point();
    look(s->after);
    compare_with_end();
    now = OUTSIDE;
    printf("%s: %u deaths\n", s->name, deaths);
    drop_copy(&first_copy);
    drop_copy(&second_copy);
    free(safe);
    segment_end(&real); /* its clients are left as they are: nothing of theirs is used again */
}

int main(int argc, char **argv) {
    bool list = argc > 1 && strcmp(argv[1], "--list") == 0;
    uint32_t played = 0;
    after_store = on_store;
    for (const scene *s = scenes; s->name; s++) {
        bool wanted = argc == 1 || list;
        for (int i = 1; i < argc; i++) wanted |= strcmp(argv[i], s->name) == 0;
        if (list) puts(s->name);
        else if (wanted) play(s);
        played += wanted;
    }
    return played ? 0 : 2;
}
