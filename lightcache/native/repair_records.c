/* repair: reservations, tickets and their page lists, pins.
 *
 * A page of a reservation is known from two sides: its word names the reservation, whose list names
 * the page. Where the list is sound a page must be in it. Where it is not, the words say what was
 * in it. A ticket's list has no second witness: a damaged ticket ends, and a client that
 * would have adopted it is told that it is late.
 */
#include "repair.h"

/* A walk through a list, page by page. Others may scribble meanwhile: each word is loaded once,
 * then checked, however often the list has been walked before. */
typedef struct walk {
    uint32_t next, left; /* chunk to come, pages of the list to come */
    uint32_t at, here, i;
} walk;

static walk walk_of(const lci_list *list) {
    return (walk){.next = lc_load(&list->first), .left = lc_load(&list->count), .at = LC_NIL};
}

static bool next_chunk(const lci_handle *h, walk *w) {
    if (w->left == 0 || w->next >= h->chunk_count) return false;
    const lci_chunk *c = &h->chunks[w->next];
    w->here = lc_load(&c->count);
    w->i = 0;
    if (w->here - 1 >= LCI_CHUNK_PAGES || w->here > w->left) return false;
    w->at = w->next;
    w->left -= w->here;
    w->next = lc_load(&c->next);
    return true;
}

/* LC_NIL: the end, or damage. */
static uint32_t next_page(const builder *b, walk *w) {
    if (w->i == w->here && !next_chunk(b->h, w)) return LC_NIL;
    uint32_t page = lc_load(&b->h->chunks[w->at].page[w->i++]);
    return page < b->fresh ? page : LC_NIL;
}

static void leave_list(builder *b, const lci_list *list, uint32_t chunks) {
    walk w = walk_of(list);
    for (; chunks && next_chunk(b->h, &w); chunks--) b->chunk_mark[w.at] = 0;
}

/* Take a list's chunks. False: it is damaged, and none is taken. */
static bool take_list(builder *b, const lci_list *list, uint32_t *chunks) {
    walk w = walk_of(list);
    bool sound = w.left <= lci_list_most(b->h);
    *chunks = 0;
    while (sound && w.left) {
        sound = next_chunk(b->h, &w) && !b->chunk_mark[w.at];
        if (!sound) break;
        b->chunk_mark[w.at] = 1;
        ++*chunks;
        while (sound && w.i < w.here) sound = next_page(b, &w) != LC_NIL;
    }
    if (sound && w.at == lc_load(&list->last)) return true;
    leave_list(b, list, *chunks);
    return false;
}

static void empty_list(lci_list *list) {
    lc_store(&list->count, 0);
    lc_store(&list->first, LC_NIL);
    lc_store(&list->last, LC_NIL);
}

/* A list being rebuilt: a chunk at a time. */
typedef struct making {
    lci_list *list;
    uint32_t last, count, n;
    uint32_t page[LCI_CHUNK_PAGES];
} making;

/* False: there is no chunk left. */
static bool store_chunk(builder *b, making *m) {
    lci_handle *h = b->h;
    while (b->spare < h->chunk_count && b->chunk_mark[b->spare]) b->spare++;
    if (b->spare == h->chunk_count) return false;
    lci_chunk *c = &h->chunks[b->spare];
    b->chunk_mark[b->spare] = 1;
    for (uint32_t i = 0; i < m->n; i++) lc_store(&c->page[i], m->page[i]);
    lc_store(&c->count, m->n);
    lc_store(&c->next, LC_NIL);
    lc_store(m->last == LC_NIL ? &m->list->first : &h->chunks[m->last].next, b->spare);
    lc_store(&m->list->last, m->last = b->spare);
    lc_store(&m->list->count, m->count += m->n);
    m->n = 0;
    return true;
}

/* ------------------------------------------------------------------ reservations */

static bool sane_shards(const lci_reservation *r) {
    uint32_t shards = lc_load(&r->shards), gen = lc_load(&r->gen) & 0xffffff;
    if (shards - 1 >= LCI_SHARDS) return false;
    for (uint32_t s = 0; s < shards; s++) {
        uint32_t word = lc_load_acquire(&r->shard[s]);
        if (word >> LCI_SHARD_GEN_SHIFT != gen) return false;
        bool open = (word & LCI_SHARD_STATUS) == LCI_SHARD_OPEN;
        bool joins = lc_load(&r->team) && (word & LCI_SHARD_SLOT) == lc_load(&r->owner);
        if (open ? !joins : (word & LCI_SHARD_STATUS) == LCI_SHARD_DEAD) return false;
    }
    return true;
}

/* What cannot be published any more ends; no client reads half of it. */
static void doom_record(lci_reservation *r) {
    uint32_t shards = lc_load(&r->shards), gen = lc_load(&r->gen) << LCI_SHARD_GEN_SHIFT;
    /* First of all: with fewer shards it may look complete, to its publishers, and to the next
     * process that repairs if we die. */
    lc_store_release(&r->state, LCI_RES_DOOMED);
    lc_kill_fence();
    if (shards - 1 >= LCI_SHARDS) lc_store_release(&r->shards, shards = 1);
    for (uint32_t s = 0; s < shards; s++) lc_store(&r->shard[s], gen | LCI_SHARD_DEAD);
}

/* Its pages, each by a word that names it and once; false: the list is damaged. */
static bool note_pages(builder *b, uint32_t rid) {
    lci_handle *h = b->h;
    const lci_list *list = &h->res[rid].pages;
    uint32_t chunks, page;
    bool once = true;
    if (!take_list(b, list, &chunks)) return false;
    for (walk w = walk_of(list); (page = next_page(b, &w)) != LC_NIL;) {
        if (lci_res_of(lc_load(&h->pages[page].word)) != rid + 1) continue;
        once &= b->listed[page] != rid + 1;
        b->listed[page] = rid + 1;
    }
    if (!once) leave_list(b, list, chunks);
    return once;
}

static bool names(const lci_handle *h, uint32_t page, uint32_t rid) {
    uint32_t word = lc_load(&h->pages[page].word), state = lci_state_of(word);
    return lci_res_of(word) == rid + 1 && (state == LCI_WRITING || state == LCI_READY);
}

static void list_again(builder *b, uint32_t rid) {
    lci_handle *h = b->h;
    making m = {.list = &h->res[rid].pages, .last = LC_NIL};
    bool room = true;
    empty_list(m.list);
    for (uint32_t page = 0; page < h->page_count && room; page++) {
        if (!names(h, page, rid)) continue;
        b->listed[page] = rid + 1;
        m.page[m.n++] = page;
        if (m.n == LCI_CHUNK_PAGES) room = store_chunk(b, &m);
    }
    if (room && m.n) room = store_chunk(b, &m);
    for (uint32_t i = 0; i < m.n; i++) b->listed[m.page[i]] = 0; /* the chunks were not enough */
}

static void mend_reservation(lci_handle *h, uint32_t rid) {
    lci_reservation *r = &h->res[rid];
    if (lc_load(&r->owner) >= LCS_SLOTS) lc_store(&r->owner, 0);
    bool doomed = lc_load(&r->state) == LCI_RES_DOOMED || !sane_shards(r);
    if (doomed) doom_record(r);
    else lc_store(&r->state, LCI_RES_ACTIVE);
    if (doomed || lci_complete(r)) lci_flag_ended(h, rid);
}

static void rebuild_reservations(builder *b) {
    lci_handle *h = b->h;
    lci_root *root = h->root;
    uint32_t used = 0, fresh = lc_load(&root->res_fresh);
    if (fresh > h->res_count) fresh = h->res_count;
    for (uint32_t i = fresh; i < h->res_count; i++)
        if (lc_load(&h->res[i].state) != LCI_RES_FREE) fresh = i + 1;
    lc_store(&root->res_fresh, fresh);
    lc_store(&root->res_head, LC_NIL);
    /* Bits that name no reservation. Not by a store: publishers set others of the same word. */
    for (uint32_t rid = h->res_count; rid < 16 * 64; rid = (rid / 64 + 1) * 64)
        atomic_fetch_and_explicit(&root->completed[rid / 64], (UINT64_C(1) << rid % 64) - 1,
                                  memory_order_relaxed);
    for (uint32_t i = 0; i < fresh; i++) {
        if (lc_load(&h->res[i].state) == LCI_RES_FREE) {
            lc_store(&h->res[i].next_free, lc_load(&root->res_head));
            lc_store(&root->res_head, i);
            continue;
        }
        used++;
        mend_reservation(h, i);
        b->damaged[i] = !note_pages(b, i);
    }
    lc_store(&root->res_used, used);
}

/* ------------------------------------------------------------------ tickets */

static void both(_Atomic uint32_t *mask, const _Atomic uint32_t *within) {
    for (int w = 0; w < 2; w++) atomic_fetch_and(&mask[w], lc_load(&within[w]));
}

static void end_ticket(lci_ticket *k) {
    empty_list(&k->pages);
    lc_store(&k->total, 0);
    lc_store(&k->reservation, 0);
    lc_store(&k->deadline_ns, 0);
    lc_store(&k->giver, 0);
    lc_store_release(&k->state, LCI_TICKET_DROPPED);
}

static void rebuild_tickets(builder *b) {
    lci_handle *h = b->h;
    uint32_t used = 0, end = 0;
    for (uint32_t i = 0; i < h->ticket_count; i++) {
        lci_ticket *k = &h->tickets[i];
        uint32_t state = lc_load(&k->state), total = lc_load(&k->total);
        if (state == LCI_TICKET_FREE) continue;
        used++;
        end = i + 1;
        both(k->adopted, k->adopters);
        both(k->done, k->adopted);
        both(k->failed, k->adopters);
        bool sane = state <= LCI_TICKET_DROPPED && lc_load(&k->giver) < LCS_SLOTS &&
                    lc_load(&k->reservation) <= h->res_count && total <= lci_list_most(h) &&
                    (state == LCI_TICKET_BUILDING || lc_load(&k->pages.count) <= total);
        uint32_t chunks;
        if (!sane || !take_list(b, &k->pages, &chunks)) end_ticket(k);
    }
    lc_store(&h->root->ticket_used, used);
    lc_store(&h->root->ticket_end, end);
}

static void rebuild_chunks(builder *b) {
    lci_handle *h = b->h;
    uint32_t used = 0, fresh = 0;
    for (uint32_t c = 0; c < h->chunk_count; c++)
        if (b->chunk_mark[c]) fresh = c + 1;
    lc_store(&h->root->chunk_fresh, fresh);
    lc_store(&h->root->chunk_head, LC_NIL);
    for (uint32_t c = 0; c < fresh; c++) {
        used += b->chunk_mark[c];
        if (b->chunk_mark[c]) continue;
        lc_store(&h->chunks[c].next, lc_load(&h->root->chunk_head));
        lc_store(&h->root->chunk_head, c);
    }
    lc_store(&h->root->chunk_used, used);
}

/* What it was promised, unless that cannot have been. `all`: what those before it were. */
static uint32_t believable_minimum(const lci_handle *h, const lci_namespace *ns, uint32_t all) {
    uint32_t minimum = lc_load(&ns->minimum), quota = lc_load(&ns->quota);
    if (lc_load(&ns->state) != LCI_NS_NORMAL || minimum > h->page_count - all) return 0;
    return quota && minimum > quota ? 0 : minimum;
}

static void rebuild_namespaces(lci_handle *h) {
    uint32_t clearing = 0, promised = 0;
    for (uint32_t i = 0; i < LCI_NAMESPACES; i++) {
        lci_namespace *ns = &h->ns[i];
        lc_store(&ns->pages, 0);
        if (lc_load(&ns->state) > LCI_NS_CLEARED) { /* whose its pages are cannot be told */
            lc_store(&ns->cursor, 0);
            lc_store_release(&ns->state, LCI_NS_CLEARING);
        }
        clearing += lc_load(&ns->state) == LCI_NS_CLEARING;
        uint32_t minimum = believable_minimum(h, ns, promised);
        lc_store(&ns->minimum, minimum);
        promised += minimum;
    }
    lc_store(&h->root->clearing, clearing);
    for (uint32_t i = 0; i < LCI_NUMBERS; i++) { /* after the namespaces, of what is left */
        _Atomic uint32_t *minimum = &h->root->group[i].minimum;
        if (lc_load(minimum) > h->page_count - promised) lc_store(minimum, 0);
        promised += lc_load(minimum);
    }
}

void lci_rebuild_records(builder *b) {
    rebuild_namespaces(b->h);
    rebuild_reservations(b);
    rebuild_tickets(b);
    for (uint32_t i = 0; i < b->h->res_count; i++) /* when all sound lists have their chunks */
        if (b->damaged[i]) list_again(b, i);
    rebuild_chunks(b);
}

/* ------------------------------------------------------------------ pins */

static void count_row0(builder *b, const lci_list *list) {
    uint32_t page;
    for (walk w = walk_of(list); (page = next_page(b, &w)) != LC_NIL;) {
        _Atomic uint16_t *pins = lci_pin(b->h, 0, page);
        lc_store(pins, (uint16_t)(lc_load(pins) + 1));
    }
}

/* A slot that says it is free and has pins. The holder of its byte keeps others from taking it: if
 * we can lock the byte, its row has no owner. Else its client lives, or may live. */
static void settle_vacant(lci_handle *h, uint32_t slot) {
    lcs_client *client = lcs_client_of(h->at, slot);
    bool own = slot == h->at->slot;
    if (own || lcs_byte_lock(h->at->life_fd, LCS_BYTE_SLOTS + slot, 1) != LC_OK) {
        lc_store_release(&client->state, LCS_CLIENT_TAKEN);
        return;
    }
    if (lc_load_acquire(&client->state) == LCS_CLIENT_FREE)
        for (uint32_t page = 0; page < h->page_count; page++) lc_store(lci_pin(h, slot, page), 0);
    lcs_byte_unlock(h->at->life_fd, LCS_BYTE_SLOTS + slot);
}

static void set_bits(const builder *b, uint32_t slot) {
    lci_handle *h = b->h;
    uint64_t bit = UINT64_C(1) << slot;
    bool vacant = slot && lc_load_acquire(&lcs_client_of(h->at, slot)->state) == LCS_CLIENT_FREE;
    for (uint32_t page = 0; page < h->page_count; page++) {
        if (lc_load(lci_pin(h, slot, page)) == 0) continue;
        if (page >= b->fresh) { /* no client ever found it */
            lc_store(lci_pin(h, slot, page), 0);
            continue;
        }
        if (vacant) {
            settle_vacant(h, slot);
            vacant = false;
            if (lc_load(lci_pin(h, slot, page)) == 0) return;
        }
        if (!(lc_load(&h->pages[page].pins) & bit))
            atomic_fetch_or_explicit(&h->pages[page].pins, bit, memory_order_seq_cst);
    }
}

/* Row 0 from the tickets, the bits from the rows. */
void lci_rebuild_rows(builder *b) {
    lci_handle *h = b->h;
    for (uint32_t page = 0; page < h->page_count; page++) lc_store(lci_pin(h, 0, page), 0);
    for (uint32_t i = 0; i < h->ticket_count; i++)
        if (lc_load(&h->tickets[i].state) != LCI_TICKET_FREE) count_row0(b, &h->tickets[i].pages);
    for (uint32_t slot = 0; slot < LCS_SLOTS; slot++) set_bits(b, slot);
}
