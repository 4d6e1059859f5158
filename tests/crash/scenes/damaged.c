/* Repair of one kind of damage after another. What lookups found before they find all the time. */
#include "scenes.h"

static lci_page *page_of(const stage *s, uint32_t number, uint32_t i, uint32_t *page) {
    uint32_t length;
    lc_key key = scene_key(number, i);
    *page = lc_dict_look(&s->survivor.h->dict, key.lo, key.hi, &length);
    NEED(*page != LC_NIL);
    return &s->survivor.h->pages[*page];
}

/* One writes, one holds a lease and has given it away; four free pages have been in use. */
static void some_of_all(stage *s) {
    static run gone;
    actor *a = &s->survivor, *o, *p;
    run_fill(a, 0, 16, SCENE_NS);
    run_fill(a, CROWDED, 3, SCENE_NS);
    run_reserve(a, &gone, 3, 4, 1, SCENE_NS);
    o = stage_other(s, 0);
    p = stage_other(s, 0);
    run_reserve(o, &o->writing, CROWDED + 1, 6, 2, SCENE_NS);
    run_publish(o, &o->writing, 0);
    hold_match(p, &p->held, 0, 8, SCENE_NS);
    NEED(lci_ticket_give(p->h, p->held.pages, 8, LC_NIL, 0, 2, FOREVER, &s->notes->ticket, LC_BLOCK,
                         FOREVER) == LC_OK);
    run_unpin(a, &gone);
    run_abandon(a, &gone);
    NEED(lci_namespace_open(a->h, "w", "t", 0, &s->notes->ns, LC_BLOCK, FOREVER) == LC_OK);
    deed_clear(a, s->notes->ns); /* frees what was abandoned on the way */
    NEED(lci_namespace_open(a->h, "w", "t", 0, &s->notes->ns, LC_BLOCK, FOREVER) == LC_OK);
}

static void set_key(stage *s, uint32_t page, lc_key key) {
    lci_page *p = &s->survivor.h->pages[page];
    lc_store(&p->lo, key.lo);
    lc_store(&p->hi, key.hi);
    for (uint32_t w = 0; w < STAMP_WORDS; w++)
        s->stamps[page * STAMP_WORDS + w] = stamp_of(key.lo, key.hi, w);
}
static uint32_t free_page(const stage *s, uint32_t i) {
    uint32_t page = lc_load(&s->survivor.h->root->free_head);
    while (i--) page = lc_load(&s->survivor.h->pages[page].queue.next);
    return page;
}
/* Nonsense that its holder still pins. */
static void pin_nonsense(stage *s, uint32_t page) {
    actor *p = &s->other[1];
    hold *l = &p->held;
    uint32_t n = l->lease.held++;
    l->pages[n] = (int32_t)page;
    l->keys[n] = scene_key(8, 0);
    set_key(s, page, l->keys[n]);
    lc_store(lci_pin(p->h, p->at->slot, page), 1);
    lc_store(&p->h->pages[page].word, 7);
}
/* Six pages that are being written: one is ready too early, which no lookup finds, as its chain is
 * gone; the others name wrong records and namespaces. */
static void reserved(stage *s) {
    actor *o = &s->other[0];
    const run *r = &o->writing;
    uint32_t rid = (r->op.rid + 1) << LCI_RES_SHIFT;
    const uint32_t words[] = {
        LCI_READY | rid,
        LCI_WRITING | 60u << LCI_RES_SHIFT,
        LCI_WRITING,
        LCI_WRITING | rid | 5u << LCI_NS_SHIFT,
        LCI_WRITING | 100u << LCI_RES_SHIFT,
        LCI_WRITING | rid | lci_ns_id(s->notes->ns) << LCI_NS_SHIFT,
    };
    run_write(o, r, 1);
    for (uint32_t i = 0; i < 6; i++) lc_store(&o->h->pages[r->fresh[i]].word, words[i]);
}
/* Page words, keys, parents and chains. One page and a chain of three come back to lookups. */
static void pages(stage *s) {
    lci_handle *h = s->survivor.h;
    uint32_t at, above;
    some_of_all(s);
    uint32_t odd = free_page(s, 0), pinned = free_page(s, 1), nonsense = free_page(s, 2);
    uint32_t twin = free_page(s, 3);
    lc_store(&h->pages[odd].gen, lc_load(&h->pages[odd].gen) | 1);
    lc_store(&h->pages[nonsense].word, 6);
    pin_nonsense(s, pinned);
    set_key(s, twin, scene_key(0, 1));
    lc_store(&h->pages[twin].word, LCI_READY);
    lci_page *p = page_of(s, 0, 15, &at), *q = page_of(s, 0, 4, &above);
    lc_store(&p->word, LCI_EVICTING);
    lc_store(&p->used, ~UINT64_C(0));
    lc_store(&page_of(s, 0, 14, &at)->word, LCI_READY | 5u << LCI_NS_SHIFT);
    lc_store(&page_of(s, 0, 2, &at)->word, LCI_READY | 50u << LCI_RES_SHIFT);
    reserved(s);
    p = page_of(s, 0, 3, &at);
    lc_store(&p->parent, above);
    lc_store(&p->parent_gen, lc_load(&q->gen));
    lc_store(&h->dict.buckets[9], LC_NIL);
}
SCENE(repair_pages, .pages = 48, .set = pages, .act = act_repair, .unsound = true, .made = 4)

/* How far everything has been used. */
static void marks(stage *s) {
    lci_root *r = s->survivor.h->root;
    some_of_all(s);
    lc_store(&r->fresh, 1000);
    lc_store(&r->grown, 1000);
}
static void marks_too_low(stage *s) {
    lci_root *r = s->survivor.h->root;
    some_of_all(s);
    run_fill(&s->survivor, 6, 2, SCENE_NS); /* published, and not taken in */
    lc_store(&s->survivor.h->res[s->other[0].writing.op.rid].shards, 100);
    lc_store(&r->res_fresh, 0);
    lc_store(&r->chunk_fresh, 0);
}
SCENE(repair_marks, .pages = 48, .set = marks, .act = act_repair, .unsound = true)
SCENE(repair_low_marks, .pages = 48, .set = marks_too_low, .act = act_repair, .unsound = true)

/* Lists, records, namespaces, rows. */
static void records(stage *s) {
    lci_handle *h = s->survivor.h;
    some_of_all(s);
    actor *p = stage_other(s, 0);
    run_reserve(p, &p->writing, 4, 3, 2, SCENE_NS);
    lci_reservation *r = &h->res[s->other[0].writing.op.rid], *q = &h->res[p->writing.op.rid];
    lc_store(&h->chunks[lc_load(&r->pages.first)].count, 0);
    lc_store(&r->owner, 200);
    lc_store(&q->shard[1], 0xfffff0ff);
    lc_store(&h->tickets[s->notes->ticket.index].total, 1u << 30);
    uint32_t at;
    lc_store(&h->ns[3].state, 9);
    lc_store(&page_of(s, 0, 15, &at)->word, LCI_READY | 3u << LCI_NS_SHIFT);
    lc_store(lci_pin(h, 7, 2), 1); /* of a free slot */
    lc_store(lci_pin(h, p->at->slot, 47), 1); /* of a page that was never used */
    lc_store(&lcs_client_of(p->at, p->at->slot)->state, LCS_CLIENT_FREE);
}
static void lists(stage *s) {
    lci_handle *h = s->survivor.h;
    some_of_all(s);
    lci_list *list = &h->res[s->other[0].writing.op.rid].pages;
    lci_chunk *c = &h->chunks[lc_load(&list->first)];
    lc_store(&c->page[1], lc_load(&c->page[0]));
    lci_ticket *k = &h->tickets[s->notes->ticket.index];
    lc_store(&h->chunks[lc_load(&k->pages.first)].page[3], 5000);
}
/* Pages without a key whose words name nobody, no slot, a free one, and a client that does not pin them;
 * and a page that is being written and kept. */
static void held(stage *s) {
    int32_t pages[5];
    uint32_t gens[5];
    lci_held_op op = {.done = 0};
    some_of_all(s);
    actor *p = stage_other(s, 0);
    NEED(lci_allocate(p->h, &op, pages, gens, 5, LC_BLOCK, FOREVER) == LC_OK);
    const uint32_t slots[] = {0, 200, 9, s->survivor.at->slot, 0};
    for (int i = 0; i < 5; i++) lc_store(&p->h->pages[pages[i]].word, lci_held_word(slots[i]));
    lc_store(lci_pin(p->h, p->at->slot, (uint32_t)pages[4]), 0);
    p->stopped = true;
    _Atomic uint32_t *word = &p->h->pages[s->other[0].writing.fresh[2]].word;
    lc_store(word, lc_load(word) | LCI_KEPT);
}
static void hold_some(actor *v) { hold_match(v, &v->held, 0, 4, SCENE_NS); }
static void slot_forgotten(stage *s) {
    lc_store(&lcs_client_of(s->survivor.at, s->notes->victim)->state, LCS_CLIENT_FREE);
}
SCENE(repair_records, .pages = 48, .set = records, .act = act_repair, .unsound = true, .made = 1)
SCENE(repair_held, .pages = 48, .set = held, .act = act_repair, .unsound = true)
SCENE(repair_lists, .pages = 48, .set = lists, .prepare = hold_some, .ready = slot_forgotten,
      .act = act_repair, .unsound = true)
