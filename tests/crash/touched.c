/* What recovery may change: of undoing, the words that the log names; of taking a dead client back,
 * its slot and row, its reservations and tickets, what had ended and waited to be collected, and
 * what is derived from these. The lock's line and the log are its own. */
#include "judge.h"

static void allow(judge *j, uint64_t offset, uint64_t bytes) {
    memset(j->allowed + offset / 4, 1, (bytes + 3) / 4);
}

#define ALLOW(j, h, field)                                                                \
    allow((j), (uint64_t)((uint8_t *)&(field) - (uint8_t *)(h)->root) + (h)->geometry.root, \
          sizeof(field))

static void begin(judge *j) {
    memset(j->allowed, 0, j->copy->bytes / 4);
    allow(j, LCS_LOCK_OFFSET, LCS_PAYLOAD_OFFSET - LCS_LOCK_OFFSET);
}

static void compare(judge *j, const uint8_t *before, const char *who) {
    const uint32_t *old = (const uint32_t *)before, *new = (const uint32_t *)j->copy->base;
    for (uint64_t word = 0; word < j->copy->bytes / 4; word++) {
        if (old[word] == new[word] || j->allowed[word]) continue;
        FOUND(j, "%s changed the word at %llu from %#x to %#x", who, (unsigned long long)word * 4,
              old[word], new[word]);
    }
}

void judge_undo_touched(judge *j) {
    const uint64_t *log = (const uint64_t *)(j->raw + LCS_LOG_OFFSET);
    uint32_t count = lc_load(&((lcs_lock *)(j->raw + LCS_LOCK_OFFSET))->log_count);
    begin(j);
    for (uint32_t i = 0; i < count && i < LCS_LOG_ENTRIES; i++) {
        uint32_t tag = (uint32_t)log[i];
        allow(j, (uint64_t)(tag & ~LC_LOG_KIND) * 4, 4);
        if ((tag & LC_LOG_KIND) == LC_LOG_SOFT) i++;
    }
    compare(j, j->raw, "undoing");
}

/* A page that goes, or joins the others: its record but for key and pins, its chain, its parent. */
static void allow_page(judge *j, lci_handle *h, uint32_t page) {
    lci_page *p = &h->pages[page];
    uint32_t bucket = lc_bucket(&h->dict, lc_load(&p->lo)), parent = lci_parent(h, p);
    ALLOW(j, h, p->word);
    ALLOW(j, h, p->parent);
    ALLOW(j, h, p->children);
    ALLOW(j, h, h->dict.buckets[bucket]);
    for (uint32_t i = 0; i < h->page_count; i++)
        if (lc_bucket(&h->dict, lc_load(&h->pages[i].lo)) == bucket) ALLOW(j, h, h->pages[i].next);
    if (parent != LC_NIL) ALLOW(j, h, h->pages[parent].children);
}

static void allow_list(judge *j, lci_handle *h, const lci_list *list, uint32_t rid) {
    uint32_t at = lc_load(&list->first), left = lc_load(&list->count);
    for (; left && at < h->chunk_count; at = lc_load(&h->chunks[at].next)) {
        lci_chunk *c = &h->chunks[at];
        ALLOW(j, h, c->next);
        for (uint32_t i = 0; i < lc_load(&c->count) && left; i++, left--) {
            uint32_t page = lc_load(&c->page[i]);
            if (!rid) allow(j, h->geometry.rows + page * 2 / 4 * 4, 4); /* row 0 */
            else if (lci_res_of(lc_load(&h->pages[page].word)) == rid) allow_page(j, h, page);
        }
    }
}

static bool dead_slot(const judge *j, uint32_t slot) { return j->dead >> (slot & 63) & 1; }

static void allow_reservations(judge *j, lci_handle *h) {
    for (uint32_t i = 0; i < lc_load(&h->root->res_fresh); i++) {
        lci_reservation *r = &h->res[i];
        bool ends = lc_load(&r->state) == LCI_RES_DOOMED || lci_complete(r);
        if (lc_load(&r->state) == LCI_RES_FREE) continue;
        for (uint32_t s = 0; s < lc_load(&r->shards); s++) {
            uint32_t word = lc_load(&r->shard[s]);
            uint32_t status = word & LCI_SHARD_STATUS;
            ends |= (status == LCI_SHARD_PENDING || status == LCI_SHARD_OPEN) &&
                    dead_slot(j, word & LCI_SHARD_SLOT);
            ends |= status == LCI_SHARD_OPEN && lcs_now_ns() >= lc_load(&r->deadline_ns);
        }
        if (dead_slot(j, lc_load(&r->owner))) ALLOW(j, h, r->owner);
        if (!ends) continue;
        ALLOW(j, h, *r);
        allow_list(j, h, &r->pages, i + 1);
    }
}

static uint64_t mask(const _Atomic uint32_t *words) {
    return (uint64_t)lc_load(&words[1]) << 32 | lc_load(&words[0]);
}

static void allow_tickets(judge *j, lci_handle *h) {
    for (uint32_t i = 0; i < h->ticket_count; i++) {
        lci_ticket *k = &h->tickets[i];
        if (lc_load(&k->state) == LCI_TICKET_FREE) continue;
        uint64_t adopters = mask(k->adopters);
        uint64_t settled = mask(k->adopted) | mask(k->done) | mask(k->failed) | j->dead;
        bool theirs = dead_slot(j, lc_load(&k->giver)) || adopters & j->dead;
        bool ripe = (adopters & ~settled) == 0 || lcs_now_ns() >= lc_load(&k->deadline_ns);
        if (!theirs && !ripe) continue;
        ALLOW(j, h, *k);
        if (ripe || lc_load(&k->state) == LCI_TICKET_BUILDING) allow_list(j, h, &k->pages, 0);
    }
}

static void allow_namespaces(judge *j, lci_handle *h) {
    for (uint32_t i = 0; i < LCI_NAMESPACES; i++) {
        ALLOW(j, h, h->ns[i].pages);
        if (lc_load(&h->ns[i].state) != LCI_NS_CLEARING) continue;
        ALLOW(j, h, h->ns[i].state);
        ALLOW(j, h, h->ns[i].cursor);
        for (uint32_t page = 0; page < h->page_count; page++)
            if (lci_ns_of(lc_load(&h->pages[page].word)) == i) allow_page(j, h, page);
    }
}

/* Pages without a key go with their client. */
static void allow_held(judge *j, lci_handle *h) {
    for (uint32_t page = 0; page < h->page_count; page++) {
        uint32_t word = lc_load(&h->pages[page].word);
        if (lci_state_of(word) == LCI_HELD && dead_slot(j, lci_ns_of(word)))
            ALLOW(j, h, h->pages[page].word);
    }
}

/* Totals and links: `lci_check` has derived them again. */
static void allow_derived(judge *j, lci_handle *h) {
    lci_root *r = h->root;
    allow(j, h->geometry.heads, LCI_LISTS * sizeof(lc_link));
    for (uint32_t page = 0; page < h->page_count; page++) ALLOW(j, h, h->pages[page].queue);
    ALLOW(j, h, r->free_head);
    ALLOW(j, h, r->free_count);
    ALLOW(j, h, r->named);
    ALLOW(j, h, r->writing);
    ALLOW(j, h, r->doomed);
    ALLOW(j, h, r->held);
    ALLOW(j, h, r->chunk_head);
    ALLOW(j, h, r->chunk_used);
    ALLOW(j, h, r->res_head);
    ALLOW(j, h, r->res_used);
    ALLOW(j, h, r->ticket_used);
    ALLOW(j, h, r->ticket_end);
    ALLOW(j, h, r->clearing);
    ALLOW(j, h, r->queued);
    ALLOW(j, h, r->kept);
    ALLOW(j, h, r->occupied);
    allow(j, h->geometry.ranks, h->geometry.end - h->geometry.ranks); /* and the advice */
    ALLOW(j, h, r->event);
    ALLOW(j, h, r->reaped); /* counts what reaping has done */
    ALLOW(j, h, r->evicted); /* the same: pages of a namespace that is being cleared */
    ALLOW(j, h, r->joining_ns); /* a look for late ranks, by any holder of the lock */
    ALLOW(j, h, r->completed);
    for (uint32_t i = 0; i < LCI_NUMBERS; i++) ALLOW(j, h, r->group[i].pages);
}

static void allow_client(judge *j, lci_handle *h, uint32_t slot) {
    uint64_t client = LCS_CLIENTS_OFFSET + slot * sizeof(lcs_client);
    allow(j, client + offsetof(lcs_client, state), 8); /* and epoch */
    allow(j, client + offsetof(lcs_client, quarantine_until_ns), 8);
    allow(j, h->geometry.rows + slot * h->row_stride * 2, h->row_stride * 2);
}

void judge_reap_touched(judge *j) {
    lci_handle *h = lci_handle_on(j->undone, &j->copy->g, NULL);
    NEED(h);
    begin(j);
    for (uint32_t slot = 1; slot < LCS_SLOTS; slot++)
        if (dead_slot(j, slot)) allow_client(j, h, slot);
    allow_reservations(j, h);
    allow_tickets(j, h);
    allow_namespaces(j, h);
    allow_held(j, h);
    allow_derived(j, h);
    compare(j, j->undone, "reaping");
    free(h);
}
