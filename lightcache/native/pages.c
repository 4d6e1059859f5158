/* A page's transitions under the lock, and the page lists of reservations and tickets. */
#include "index.h"

/* Up to `want` free pages into `out`; returns how many. The stack first: its pages are warm and have
 * memory. */
uint32_t lci_take_free(lci_handle *h, lc_txn *t, uint32_t *out, uint32_t want) {
    lci_root *r = h->root;
    uint32_t n = 0, page = lc_load(&r->free_head), fresh = lc_load(&r->fresh);
    uint32_t grown = lc_load(&r->grown), from = fresh;
    for (; n < want && page != LC_NIL; n++) {
        if (page >= h->page_count || lci_state_of(lc_load(&h->pages[page].word)) != LCI_FREE) {
            t->error = LC_E_CORRUPT;
            return 0;
        }
        out[n] = page;
        page = lc_load(&h->pages[page].queue.next);
    }
    if (n) {
        lc_txn_set(t, &r->free_head, page);
        lc_txn_add(t, &r->free_count, -n);
    }
    for (; n < want && fresh < grown && fresh < h->page_count; n++) {
        if (lci_state_of(lc_load(&h->pages[fresh].word)) != LCI_FREE) {
            t->error = LC_E_CORRUPT;
            return 0;
        }
        out[n] = fresh++;
    }
    if (fresh != from) lc_txn_set(t, &r->fresh, fresh);
    return n;
}

/* Pages whose words say FREE go onto the stack in one piece. What was in `queue.next` is logged:
 * undoing may have to bring back a link of the queue. */
void lci_give_free(lci_handle *h, lc_txn *t, const uint32_t *pages, uint32_t n) {
    uint32_t head = lc_load(&h->root->free_head);
    if (!n) return;
    for (uint32_t i = 0; i < n; i++) {
        lc_txn_set(t, &h->pages[pages[i]].queue.next, head);
        head = pages[i];
    }
    lc_txn_set(t, &h->root->free_head, head);
    lc_txn_add(t, &h->root->free_count, n);
}

/* So many pages more with a key, whose words say the namespace and group of `word`; or fewer. */
void lci_count_named(lci_handle *h, lc_txn *t, uint32_t word, uint32_t delta) {
    lc_txn_add(t, &h->ns[lci_ns_of(word)].pages, delta);
    lc_txn_add(t, &h->root->group[lci_group_of(word)].pages, delta);
}

uint32_t lci_parent(const lci_handle *h, const lci_page *p) {
    uint32_t parent = lc_load(&p->parent);
    if (parent >= h->page_count) return LC_NIL;
    const lci_page *q = &h->pages[parent];
    uint32_t state = lci_state_of(lc_load(&q->word));
    if (lc_load(&q->gen) != lc_load(&p->parent_gen)) return LC_NIL;
    return state == LCI_WRITING || state == LCI_READY || state == LCI_EVICTING ? parent : LC_NIL;
}

static bool is_independent(const lci_handle *h, uint32_t page) {
    return lc_load(&h->pages[page].word) & LCI_INDEPENDENT;
}

/* One page more hangs on `parent`: it leaves the queue, unless it may go before what hangs on it. */
void lci_child_comes(lci_handle *h, lc_txn *t, uint32_t parent) {
    if (!is_independent(h, parent) && lci_queueable(h, parent)) lci_queue_remove(h, t, parent);
    lc_txn_add(t, &h->pages[parent].children, 1);
}

/* One fewer: with the last of them it comes into the queue, unless it is there all the time. */
void lci_child_goes(lci_handle *h, lc_txn *t, uint32_t parent) {
    lc_txn_add(t, &h->pages[parent].children, (uint32_t)-1);
    if (!is_independent(h, parent) && lci_queueable(h, parent)) lci_queue_add(h, t, parent);
}

/* For a page on its way out: its own fields are dead from then on. */
void lci_detach_parent(lci_handle *h, lc_txn *t, uint32_t page) {
    uint32_t parent = lci_parent(h, &h->pages[page]);
    if (parent != LC_NIL) lci_child_goes(h, t, parent);
}

/* `page` has no parent so far. */
void lci_attach_parent(lci_handle *h, lc_txn *t, uint32_t page, uint32_t parent) {
    lci_page *p = &h->pages[page];
    lc_txn_set(t, &p->parent, parent);
    lc_txn_set(t, &p->parent_gen, lc_load(&h->pages[parent].gen));
    lci_child_comes(h, t, parent);
}

/* A page that lost its parent is given the one that stands there now, if that is of its kind. Only a
 * childless page: its new parent cannot hang on it. */
void lci_readopt(lci_handle *h, lc_txn *t, uint32_t page, uint32_t parent) {
    const lci_page *p = &h->pages[page];
    if (parent == LC_NIL || parent == page || lc_load(&p->children)) return;
    if (lci_parent(h, p) == LC_NIL && lci_may_hang(h, parent, lc_load(&p->word)))
        lci_attach_parent(h, t, page, parent);
}

/* Make a named page unreachable at once. Its bytes stay until its last pin is released; the next
 * holder of the lock then collects it. Pages that hang on it stay, without a parent. False: it is
 * READY under a reservation just completed, and stays. */
bool lci_doom(lci_handle *h, lc_txn *t, uint32_t page) {
    lci_page *p = &h->pages[page];
    uint32_t word = lc_load_acquire(&p->word), state = lci_state_of(word);
    if (state != LCI_WRITING && state != LCI_READY) return false;
    if (lci_queueable(h, page)) lci_queue_remove(h, t, page);
    lci_detach_parent(h, t, page);
    uint32_t others = LCI_NS_MASK | LCI_RES_MASK;
    uint32_t flag = state == LCI_WRITING ? LCI_UNWRITTEN : 0;
    uint32_t doomed = (word & others) | LCI_DOOMED | flag;
    while (!lc_txn_swap(t, &p->word, word, doomed)) { /* a publisher was faster: now it is READY */
        word = lc_load_acquire(&p->word);
        doomed = (word & others) | LCI_DOOMED;
        if (t->error) return false;
    }
    lc_dict_unlink(t, &h->dict, page);
    lc_list_append(t, &h->lists, page, LCI_DOOMED_LIST);
    lci_count_named(h, t, word, (uint32_t)-1);
    lc_txn_add(t, &h->root->named, (uint32_t)-1);
    if (lci_res_of(word)) lc_txn_add(t, &h->root->writing, (uint32_t)-1);
    if (word & LCI_KEPT) lc_txn_add(t, &h->root->kept, (uint32_t)-1);
    lc_txn_add(t, &h->root->doomed, 1);
    return true;
}

void lci_free_doomed(lci_handle *h, lc_txn *t, uint32_t page) {
    lc_list_remove(t, &h->lists, page);
    lc_txn_add(t, &h->root->doomed, (uint32_t)-1);
    lc_txn_set(t, &h->pages[page].word, LCI_FREE);
    lci_give_free(h, t, &page, 1);
}

/* ------------------------------------------------------------------ page lists */

/* The caller stores its count. */
static uint32_t take_chunk(lci_handle *h, lc_txn *t) {
    lci_root *r = h->root;
    uint32_t c = lc_load(&r->chunk_head);
    if (c < h->chunk_count) {
        lc_txn_set(t, &r->chunk_head, lc_load(&h->chunks[c].next));
    } else {
        c = lc_load(&r->chunk_fresh);
        if (c >= h->chunk_count) return LC_NIL;
        lc_txn_set(t, &r->chunk_fresh, c + 1);
    }
    lc_txn_add(t, &r->chunk_used, 1);
    lc_txn_set(t, &h->chunks[c].next, LC_NIL);
    return c;
}

/* Append pages, as many as there are chunks for; returns how many (damage: `t->error`). */
uint32_t lci_list_push(lci_handle *h, lc_txn *t, lci_list *list, const uint32_t *pages,
                       uint32_t n) {
    uint32_t done = 0;
    while (done < n && !t->error) {
        uint32_t last = lc_load(&list->last), used = LCI_CHUNK_PAGES;
        if (last < h->chunk_count) used = lc_load(&h->chunks[last].count);
        if (used >= LCI_CHUNK_PAGES) {
            uint32_t fresh = take_chunk(h, t);
            if (fresh == LC_NIL) break;
            lc_txn_set(t, last < h->chunk_count ? &h->chunks[last].next : &list->first, fresh);
            lc_txn_set(t, &list->last, fresh);
            last = fresh;
            used = 0;
        }
        lci_chunk *c = &h->chunks[last];
        uint32_t room = LCI_CHUNK_PAGES - used;
        uint32_t now = n - done < room ? n - done : room;
        for (uint32_t i = 0; i < now; i++) lc_store(&c->page[used + i], pages[done + i]);
        lc_txn_set(t, &c->count, used + now); /* entries are dead until counted */
        done += now;
    }
    if (done) lc_txn_add(t, &list->count, done);
    return done;
}

/* Pages that can be appended for certain. */
uint32_t lci_list_room(const lci_handle *h, const lci_list *list) {
    const lci_root *r = h->root;
    uint32_t last = lc_load(&list->last), used = lc_load(&r->chunk_used), room = 0;
    if (used < h->chunk_count) room = (h->chunk_count - used) * LCI_CHUNK_PAGES;
    if (last >= h->chunk_count) return room;
    uint32_t listed = lc_load(&h->chunks[last].count);
    return listed < LCI_CHUNK_PAGES ? room + LCI_CHUNK_PAGES - listed : room;
}

/* The first chunk, checked; NULL: the list is empty. */
const lci_chunk *lci_list_chunk(const lci_handle *h, const lci_list *list) {
    uint32_t first = lc_load(&list->first);
    if (lc_load(&list->count) == 0 || first >= h->chunk_count) return NULL;
    return &h->chunks[first];
}

/* The count also bounds the way through a list that goes round. */
uint32_t lci_list_part(const lci_handle *h, lc_txn *t, const lci_list *list, const lci_chunk *c) {
    uint32_t n = lc_load(&c->count), all = lc_load(&list->count);
    if (n != 0 && n <= LCI_CHUNK_PAGES && n <= all && all <= lci_list_most(h)) return n;
    t->error = LC_E_CORRUPT;
    return 0;
}

/* Drop the first chunk with its pages. */
void lci_list_pop_chunk(lci_handle *h, lc_txn *t, lci_list *list) {
    uint32_t first = lc_load(&list->first);
    if (first >= h->chunk_count) {
        t->error = LC_E_CORRUPT;
        return;
    }
    lci_chunk *c = &h->chunks[first];
    uint32_t n = lc_load(&c->count), all = lc_load(&list->count);
    uint32_t next = lc_load(&c->next);
    lc_txn_set(t, &list->count, n < all ? all - n : 0);
    lc_txn_set(t, &list->first, next);
    if (next >= h->chunk_count) lc_txn_set(t, &list->last, LC_NIL);
    lc_txn_set(t, &c->next, lc_load(&h->root->chunk_head));
    lc_txn_set(t, &h->root->chunk_head, first);
    lc_txn_add(t, &h->root->chunk_used, (uint32_t)-1);
}
