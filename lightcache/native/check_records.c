/* check: reservations, tickets, the chunks of their page lists, namespaces. */
#include "check.h"

typedef bool note(checker *c, uint32_t page, uint32_t index);

static bool note_reservation(checker *c, uint32_t page, uint32_t rid) {
    uint32_t word = lc_load(&c->h->pages[page].word), ns = lci_ns_id(lc_load(&c->h->res[rid].ns));
    if (lci_res_of(word) != rid + 1) return true; /* doomed, and perhaps used again since */
    if (c->listed[page] == rid + 1)
        BROKEN(c, 51, page, rid, "reservation %u lists page %u twice", rid, page);
    if (lci_ns_of(word) != ns && lci_state_of(word) != LCI_DOOMED)
        BROKEN(c, 58, page, rid, "page %u is of namespace %u, its reservation %u of %u", page,
               lci_ns_of(word), rid, ns);
    c->listed[page] = rid + 1;
    return true;
}

static bool note_ticket(checker *c, uint32_t page, uint32_t index) {
    (void)index;
    c->row0[page]++;
    return true;
}

/* One chunk of a list, which no other list may have. Returns its pages; 0: broken. */
static uint32_t chunk(checker *c, uint32_t at, const char *what, uint32_t index, note *each) {
    uint32_t pages = at < c->h->chunk_count ? lc_load(&c->h->chunks[at].count) : 0;
    if (pages - 1 >= LCI_CHUNK_PAGES)
        BROKEN(c, 16, at, index, "%s %u: chunk %u is out of range or its count is", what, index,
               at);
    if (c->chunk_owned[at]++)
        BROKEN(c, 45, at, index, "%s %u: chunk %u is in a list before", what, index, at);
    for (uint32_t i = 0; i < pages; i++) {
        uint32_t page = lc_load(&c->h->chunks[at].page[i]);
        if (page >= c->h->page_count)
            BROKEN(c, 17, page, index, "%s %u lists page %u", what, index, page);
        if (!each(c, page, index)) return 0;
    }
    return pages;
}

static bool page_list(checker *c, const lci_list *list, const char *what, uint32_t index,
                      note *each, uint32_t *chunks) {
    uint32_t n = 0, at = lc_load(&list->first), last = LC_NIL, count = lc_load(&list->count);
    while (n < count) {
        uint32_t here = chunk(c, at, what, index, each);
        if (!here) return false;
        n += here;
        ++*chunks;
        last = at;
        at = lc_load(&c->h->chunks[at].next);
    }
    if (n != count)
        BROKEN(c, 18, n, index, "%s %u lists %u pages, counts %u", what, index, n, count);
    if (last != lc_load(&list->last))
        BROKEN(c, 46, last, index, "%s %u ends with chunk %u, says %u", what, index, last,
               lc_load(&list->last));
    return true;
}

static bool shard_words(checker *c, uint32_t rid) {
    const lci_reservation *r = &c->h->res[rid];
    uint32_t shards = lc_load(&r->shards), gen = lc_load(&r->gen) & 0xffffff;
    bool doomed = lc_load(&r->state) == LCI_RES_DOOMED;
    if (shards - 1 >= LCI_SHARDS)
        BROKEN(c, 20, rid, shards, "reservation %u has %u shards", rid, shards);
    for (uint32_t s = 0; s < shards; s++) {
        uint32_t word = lc_load(&r->shard[s]), status = word & LCI_SHARD_STATUS;
        bool open = status == LCI_SHARD_OPEN;
        bool joins = lc_load(&r->team) && !doomed && (word & LCI_SHARD_SLOT) == lc_load(&r->owner);
        if (word >> LCI_SHARD_GEN_SHIFT != gen || (open && !joins))
            BROKEN(c, 48, rid, s, "reservation %u: shard %u has the word %#x", rid, s, word);
        if (status == LCI_SHARD_DEAD && !doomed)
            BROKEN(c, 49, rid, s, "reservation %u has a dead shard and is not doomed", rid);
    }
    return true;
}

/* Was it doomed with a client whose reaper unlinks its pages, in portions? */
static bool being_reaped(const checker *c, const lci_reservation *r) {
    const uint8_t *base = (const uint8_t *)c->h->root - c->h->geometry.root;
    const lcs_client *k = (const lcs_client *)(base + LCS_CLIENTS_OFFSET) + lc_load(&r->owner);
    return lc_load(&r->owner_epoch) == 0 && lc_load(&k->state) == LCS_CLIENT_TAKEN;
}

static bool reservation(checker *c, uint32_t rid, uint32_t *chunks) {
    const lci_reservation *r = &c->h->res[rid];
    uint32_t state = lc_load(&r->state);
    if (state > LCI_RES_DOOMED || rid >= lc_load(&c->h->root->res_fresh) ||
        lc_load(&r->owner) >= LCS_SLOTS)
        BROKEN(c, 47, rid, state, "reservation %u has state %u, owner %u; %u were ever used", rid,
               state, lc_load(&r->owner), lc_load(&c->h->root->res_fresh));
    if (!shard_words(c, rid)) return false;
    bool ended = state == LCI_RES_DOOMED || lci_complete(r);
    bool flagged = lc_load(&c->h->root->completed[rid / 64]) >> (rid % 64) & 1;
    if (c->quiet && ended && !flagged && !being_reaped(c, r))
        BROKEN(c, 50, rid, state, "reservation %u has ended and nobody will collect it", rid);
    return page_list(c, &r->pages, "reservation", rid, note_reservation, chunks);
}

static bool free_reservations(checker *c, uint32_t used) {
    const lci_handle *h = c->h;
    uint32_t n = 0, at = lc_load(&h->root->res_head), fresh = lc_load(&h->root->res_fresh);
    for (; at != LC_NIL && n <= fresh; at = lc_load(&h->res[at].next_free), n++)
        if (at >= fresh || lc_load(&h->res[at].state) != LCI_RES_FREE)
            BROKEN(c, 52, at, n,
                   "free reservations: entry %u is reservation %u, out of range or in use", n, at);
    if (n + used != fresh)
        BROKEN(c, 52, n, used, "reservations: %u free + %u used != %u ever used", n, used, fresh);
    return true;
}

static bool reservations(checker *c, uint32_t *chunks) {
    const lci_handle *h = c->h;
    uint32_t used = 0, fresh = lc_load(&h->root->res_fresh);
    if (fresh > h->res_count) BROKEN(c, 19, fresh, 0, "%u reservations of %u", fresh, h->res_count);
    for (uint32_t i = 0; i < h->res_count; i++) {
        if (lc_load(&h->res[i].state) == LCI_RES_FREE) continue;
        if (!reservation(c, i, chunks)) return false;
        used++;
    }
    if (used != lc_load(&h->root->res_used))
        BROKEN(c, 21, used, 0, "%u reservations in use, the count says %u", used,
               lc_load(&h->root->res_used));
    for (uint32_t rid = h->res_count; rid < 16 * 64; rid++)
        if (lc_load(&h->root->completed[rid / 64]) >> (rid % 64) & 1)
            BROKEN(c, 53, rid, 0, "reservation %u of %u is said to have ended", rid, h->res_count);
    return free_reservations(c, used);
}

/* Some client is in `part` that is not in `all`. */
static bool strangers(const _Atomic uint32_t *part, const _Atomic uint32_t *all) {
    return (lc_load(&part[0]) & ~lc_load(&all[0])) || (lc_load(&part[1]) & ~lc_load(&all[1]));
}

static bool ticket(checker *c, uint32_t index, uint32_t *chunks) {
    const lci_ticket *k = &c->h->tickets[index];
    uint32_t state = lc_load(&k->state), count = lc_load(&k->pages.count);
    bool whole = state == LCI_TICKET_BUILDING || count <= lc_load(&k->total);
    if (state > LCI_TICKET_DROPPED || lc_load(&k->giver) >= LCS_SLOTS || !whole ||
        lc_load(&k->total) > lci_list_most(c->h) || lc_load(&k->reservation) > c->h->res_count)
        BROKEN(c, 54, index, state,
               "ticket %u: state %u, giver %u, %u of %u pages, reservation + 1 %u", index, state,
               lc_load(&k->giver), count, lc_load(&k->total), lc_load(&k->reservation));
    if (strangers(k->adopted, k->adopters) || strangers(k->done, k->adopted) ||
        strangers(k->failed, k->adopters))
        BROKEN(c, 54, index, state, "ticket %u: somebody adopted, was done or failed unasked",
               index);
    if (!page_list(c, &k->pages, "ticket", index, note_ticket, chunks)) return false;
    if (state != LCI_TICKET_BUILDING && lc_load(&k->deadline_ns) <= c->now) c->out->late += count;
    return true;
}

static bool tickets(checker *c, uint32_t *chunks) {
    const lci_handle *h = c->h;
    uint32_t used = 0, end = 0;
    for (uint32_t i = 0; i < h->ticket_count; i++) {
        if (lc_load(&h->tickets[i].state) == LCI_TICKET_FREE) continue;
        if (!ticket(c, i, chunks)) return false;
        used++;
        end = i + 1;
    }
    if (end != lc_load(&h->root->ticket_end))
        BROKEN(c, 22, used, end, "tickets in use end at %u, the root says %u", end,
               lc_load(&h->root->ticket_end));
    if (used != lc_load(&h->root->ticket_used))
        BROKEN(c, 22, used, 0, "%u tickets in use, the count says %u", used,
               lc_load(&h->root->ticket_used));
    return true;
}

static bool free_chunks(checker *c, uint32_t used) {
    const lci_handle *h = c->h;
    uint32_t n = 0, at = lc_load(&h->root->chunk_head), fresh = lc_load(&h->root->chunk_fresh);
    if (used != lc_load(&h->root->chunk_used))
        BROKEN(c, 23, used, 0, "%u chunks in use, the count says %u", used,
               lc_load(&h->root->chunk_used));
    for (; at != LC_NIL; at = lc_load(&h->chunks[at].next), n++)
        if (at >= h->chunk_count || at >= fresh || c->chunk_owned[at]++)
            BROKEN(c, 24, at, n, "free chunk %u is out of range, or has an owner", at);
    if (n + used != fresh)
        BROKEN(c, 24, n, fresh, "chunks: %u free + %u used != %u ever used", n, used, fresh);
    return true;
}

static bool namespaces(checker *c) {
    const lci_handle *h = c->h;
    uint32_t clearing = 0;
    uint64_t promised = 0;
    for (uint32_t i = 0; i < LCI_NAMESPACES; i++) {
        uint32_t state = lc_load(&h->ns[i].state), pages = lc_load(&h->ns[i].pages);
        clearing += state == LCI_NS_CLEARING;
        if (state > LCI_NS_CLEARED) BROKEN(c, 55, i, state, "namespace %u has state %u", i, state);
        if (pages && (state == LCI_NS_FREE || state == LCI_NS_CLEARED))
            BROKEN(c, 56, i, pages, "namespace %u is closed and has %u pages", i, pages);
        uint32_t minimum = lc_load(&h->ns[i].minimum), quota = lc_load(&h->ns[i].quota);
        if (state != LCI_NS_NORMAL) continue;
        promised += minimum;
        if (promised > h->page_count || (quota && minimum > quota))
            BROKEN(c, 65, i, minimum, "namespace %u was promised %u pages, of a quota of %u, of %u",
                   i, minimum, quota, h->page_count);
    }
    for (uint32_t i = 0; i < LCI_NUMBERS; i++) {
        uint32_t minimum = lc_load(&h->root->group[i].minimum);
        promised += minimum;
        if (promised > h->page_count)
            BROKEN(c, 68, i, minimum, "group %u was promised %u pages, %llu are promised in all, of %u",
                   i, minimum, (unsigned long long)promised, h->page_count);
    }
    if (clearing != lc_load(&h->root->clearing))
        BROKEN(c, 55, clearing, 0, "%u namespaces are being cleared, the count says %u", clearing,
               lc_load(&h->root->clearing));
    return true;
}

bool lci_check_records(checker *c) {
    uint32_t chunks = 0;
    if (lc_load(&c->h->root->repairing)) BROKEN(c, 57, 0, 0, "a repair has begun and not ended");
    return reservations(c, &chunks) && tickets(c, &chunks) && free_chunks(c, chunks) &&
           namespaces(c);
}
