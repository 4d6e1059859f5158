/* What could go for new pages: how many pages at each rank. Read without the lock, while others change links
 * and words: each page is clamped, and so many are looked at at most. Advice. */
#include "index.h"

#define LOOKED_LEAST 64 /* pages that are looked at, and twice as many as are wanted */

typedef struct counting {
    const lci_handle *h;
    const lci_eviction *e;
    lci_supply *supply;
    uint32_t own;           /* ends the caller's chain: neither this page goes nor one before it */
    uint32_t limit, within; /* pages of this rank or a lower one */
    uint32_t left;          /* pages that may still be looked at */
} counting;

/* Does it go after the page that hangs on it, if nothing is in the way? */
static bool goes_with_its_child(const lci_handle *h, uint32_t page) {
    const lci_page *p = &h->pages[page];
    uint32_t flags = lc_load(&p->word) & (LCI_STATE_MASK | LCI_KEPT | LCI_INDEPENDENT);
    return flags == LCI_READY && lc_load(&p->children) == 1;
}

/* A page that nothing hangs on, and those before it, which go after it: none at a lower rank than its child,
 * whose tick it takes over. */
static void count_path(counting *c, uint32_t page) {
    uint64_t tick = lci_tick(&c->h->pages[page]);
    uint32_t rank = 0;
    while (c->left) {
        c->left--;
        if (page == c->own || !lci_free_to_go(c->h, c->e, page)) return;
        const lci_page *p = &c->h->pages[page];
        uint32_t alone = lci_rank(c->h, lch_touched(lc_load(&p->used), tick));
        if (alone > rank) rank = lch_least(alone, LCH_LISTS); /* a damaged order may say more */
        c->supply->pages[rank]++;
        if (rank > c->supply->highest) c->supply->highest = rank;
        if (rank <= c->limit) c->within++;
        page = lci_parent(c->h, p);
        if (page == LC_NIL || !goes_with_its_child(c->h, page)) return;
    }
}

static void count_list(counting *c, uint32_t list, uint32_t want) {
    const lc_link *link = lc_link_at(&c->h->lists, lc_list_head(&c->h->lists, list));
    while (link && c->left && c->within < want) {
        uint32_t page = lc_load(&link->next);
        if (page >= c->h->page_count) return;
        count_path(c, page);
        link = &c->h->pages[page].queue;
    }
}

void lci_supply_of_pool(const lci_handle *h, const lci_eviction *e, uint32_t own, uint32_t want,
                        lci_supply *supply) {
    want = lch_least(want, h->page_count);
    memset(supply, 0, sizeof *supply);
    counting c = {.h = h, .e = e, .supply = supply, .own = own, .left = 2 * want + LOOKED_LEAST};
    count_list(&c, LCI_FIRST_LIST, want);
    for (uint32_t rank = 0; rank < LCH_LISTS && c.left && c.within < want; rank++) {
        uint32_t list = lci_list_at(h, rank);
        c.within += supply->pages[++c.limit];
        if (list < LCH_LISTS) count_list(&c, list, want);
    }
}

/* Of the records that making room for its quota looks at next. */
void lci_supply_of(const lci_handle *h, const lci_eviction *e, uint32_t own, uint32_t ns,
                   lci_supply *supply) {
    uint32_t at = lc_load(&h->ns[ns].hand), end = lc_load(&h->root->fresh);
    memset(supply, 0, sizeof *supply);
    counting c = {.h = h, .e = e, .supply = supply, .own = own, .left = 2 * LCI_WINDOW};
    if (end > h->page_count) end = h->page_count;
    for (uint32_t i = 0; i < LCI_WINDOW && i < end; i++, at++) {
        if (at >= end) at = 0;
        if (lci_ns_of(lc_load(&h->pages[at].word)) == ns && lci_queueable(h, at)) count_path(&c, at);
    }
}
