/* What those find who come after a death, and whether they can go on. */
#include "deaths.h"

static lci_report sound(const copy *c, const char *when, int quiet) {
    lci_report report;
    CHECK_EQ(lci_check(c->base, real.bytes, PAGES, quiet, &report), LC_OK);
    if (report.broken) WRONG("%s: invariant %d, %s", when, report.broken, report.message);
    return report;
}

bool finds(const client *c, const lc_key *key) { return lci_peek1(c->h, key, 1, NS) == 1; }

static uint32_t ready_of(const client *c, const prompt *p) {
    uint32_t ready = 0;
    for (uint32_t i = 0; i < p->n; i++) ready += finds(c, &p->keys[i]);
    return ready;
}

void look_up(const client *c) {
    for (uint32_t i = 0; i < stable_count; i++)
        if (!finds(c, &stable[i].key)) stable[i].missed = true;
}

void undo(const copy *c) {
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

void reap(const copy *c) {
    reap_one(c, &victim);
    reap_one(c, &late);
    if (c->and_survivor) reap_one(c, &survivor);
}

/* Pages that somebody pins or that are kept, and what stands above them: these stay. */
static uint32_t kept_pages(const copy *c) {
    bool kept[PAGES] = {false};
    uint32_t n = 0;
    for (uint32_t page = 0; page < PAGES; page++) {
        bool stays = lc_load(&c->who.h->pages[page].word) & LCI_KEPT;
        if (!stays && !pins_of(&c->who, page)) continue;
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
    lc_store(&c->who.h->ns[0].minimum, 0); /* nothing is promised any more */
    for (uint32_t i = 0; i < LCI_NUMBERS; i++) lc_store(&c->who.h->root->group[i].minimum, 0);
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

void recover(copy *c, may_be ready) {
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
