/* check: derive every invariant again from memory that does not change meanwhile (a copy, or the
 * segment under its lock), and name the first that is broken. No word is trusted: every walk is
 * bounded, every index compared before use. */
#include "check.h"

#include <stdlib.h>

static bool free_pages(checker *c) {
    const lci_root *r = c->h->root;
    uint32_t n = 0, at = lc_load(&r->free_head), fresh = lc_load(&r->fresh);
    if (fresh > lc_load(&r->grown) || lc_load(&r->grown) > c->h->page_count)
        BROKEN(c, 1, fresh, lc_load(&r->grown), "fresh %u <= grown %u <= pages %u does not hold",
               fresh, lc_load(&r->grown), c->h->page_count);
    for (; at != LC_NIL; at = lc_load(&c->h->pages[at].queue.next), n++) {
        if (at >= fresh || c->seen[at])
            BROKEN(c, 2, at, n, "free stack: entry %u is page %u, %s", n, at,
                   at >= fresh ? "which was never used" : "met before");
        if (lci_state_of(lc_load(&c->h->pages[at].word)) != LCI_FREE)
            BROKEN(c, 3, at, n, "free stack holds page %u, whose word is %#x", at,
                   lc_load(&c->h->pages[at].word));
        c->seen[at] = SEEN_FREE;
    }
    if (n != lc_load(&r->free_count))
        BROKEN(c, 4, n, lc_load(&r->free_count), "free stack has %u pages, its count says %u", n,
               lc_load(&r->free_count));
    c->out->free = n;
    return true;
}

static bool chain(checker *c, uint32_t bucket) {
    const lc_dict *d = &c->h->dict;
    uint32_t at = lc_load(&d->buckets[bucket]), n = 0;
    for (; at != LC_NIL; at = lc_load(&c->h->pages[at].next)) {
        if (at >= c->h->page_count || n++ >= LC_CHAIN_MAX)
            BROKEN(c, 5, at, bucket, "chain %u: page %u is out of range or past the bound", bucket, at);
        const lci_page *p = &c->h->pages[at];
        uint32_t state = lci_state_of(lc_load(&p->word));
        if (c->seen[at]) BROKEN(c, 6, at, bucket, "chain %u: page %u was met before", bucket, at);
        if (state != LCI_WRITING && state != LCI_READY)
            BROKEN(c, 7, at, bucket, "chain %u: page %u has state %u", bucket, at, state);
        if (lc_bucket(d, lc_load(&p->lo)) != bucket)
            BROKEN(c, 8, at, bucket, "page %u is in chain %u, its key belongs to %u", at, bucket,
                   lc_bucket(d, lc_load(&p->lo)));
        if (lc_load(&p->gen) & 1)
            BROKEN(c, 9, at, bucket, "page %u is reachable with odd generation %u", at, lc_load(&p->gen));
        for (uint32_t b = lc_load(&d->buckets[bucket]); b != at; b = lc_load(&c->h->pages[b].next))
            if (lc_load(&c->h->pages[b].lo) == lc_load(&p->lo) &&
                lc_load(&c->h->pages[b].hi) == lc_load(&p->hi))
                BROKEN(c, 10, at, b, "pages %u and %u have the same key", at, b);
        c->seen[at] |= SEEN_CHAIN;
        c->out->named++;
    }
    return true;
}

static bool list(checker *c, uint32_t number, uint8_t mark, uint32_t *count) {
    const lc_lists *l = &c->h->lists;
    uint32_t head = lc_list_head(l, number), prev = head, at = lc_load(&l->heads[number].next);
    for (; at != head; prev = at, at = lc_load(&lc_link_at(l, at)->next)) {
        if (at >= c->h->page_count || c->seen[at] & (SEEN_QUEUE | SEEN_DOOMED | SEEN_FREE))
            BROKEN(c, 11, at, number, "list %u: page %u is out of range or on a list before", number, at);
        if (lc_load(&lc_link_at(l, at)->prev) != prev)
            BROKEN(c, 12, at, number, "list %u: page %u does not point back to %u", number, at, prev);
        c->seen[at] |= mark;
        ++*count;
    }
    if (lc_load(&l->heads[number].prev) != prev)
        BROKEN(c, 12, prev, number, "list %u: its end is not page %u", number, prev);
    return true;
}

/* Does a bit say that this list of the queue holds pages? There is none for the two besides the ranks. */
static bool occupied(const lci_handle *h, uint32_t list, bool holds) {
    if (!h->ranks) return list < LCI_WHEEL && lc_load(&h->root->occupied[list / 32]) >> (list % 32) & 1;
    if (list >= LCH_LISTS) return holds;
    const lci_order *o = &h->ranks->order[lc_load(&h->ranks->chosen)];
    uint32_t rank = lc_load(&o->rank[list]);
    return lc_load(&o->occupied[rank / 32]) >> (rank % 32) & 1;
}

static bool lists(checker *c) {
    uint64_t now = lci_queue_now(c->h);
    if (c->h->ranks && !lci_ranks_sound(c->h))
        BROKEN(c, 69, lc_load(&c->h->ranks->chosen), 0, "the order of eviction does not name each list once");
    for (uint32_t i = 0; i < LCI_DOOMED_LIST; i++) {
        uint32_t before = c->out->queued;
        if (!list(c, i, SEEN_QUEUE, &c->out->queued)) return false;
        bool holds = c->out->queued > before, bit = occupied(c->h, i, holds);
        if (bit != holds)
            BROKEN(c, 13, i, bit, "queue list %u: %u pages, occupied bit %d", i,
                   c->out->queued - before, bit);
        if (!c->h->ranks && bit && i % LCI_DIGITS < (now >> 6 * (i / LCI_DIGITS) & (LCI_DIGITS - 1)))
            BROKEN(c, 39, i, 0, "queue list %u holds pages, and the queue's present has passed it", i);
    }
    if (c->out->queued != lc_load(&c->h->root->queued))
        BROKEN(c, 14, c->out->queued, 0, "queue has %u pages, its count says %u", c->out->queued,
               lc_load(&c->h->root->queued));
    if (!list(c, LCI_DOOMED_LIST, SEEN_DOOMED, &c->out->doomed)) return false;
    if (c->out->doomed != lc_load(&c->h->root->doomed))
        BROKEN(c, 15, c->out->doomed, 0, "doomed list has %u pages, its count says %u",
               c->out->doomed, lc_load(&c->h->root->doomed));
    return true;
}

static bool pins(checker *c, uint32_t page) {
    const lci_handle *h = c->h;
    uint64_t bits = lc_load(&h->pages[page].pins);
    bool free = lci_state_of(lc_load(&h->pages[page].word)) == LCI_FREE;
    for (uint32_t slot = 0; slot < LCS_SLOTS; slot++) {
        uint32_t count = lc_load(&h->rows[slot * h->row_stride + page]);
        c->out->pins += count;
        if (slot == 0 && count != c->row0[page])
            BROKEN(c, 25, page, count, "page %u: row 0 counts %u pins, tickets hold %u", page, count,
                   c->row0[page]);
        if (!count || !c->quiet) continue;
        const lcs_client *k = (const lcs_client *)((const uint8_t *)h->root - h->geometry.root +
                                                   LCS_CLIENTS_OFFSET) + slot;
        if (slot && lc_load(&k->state) == LCS_CLIENT_FREE)
            BROKEN(c, 26, page, slot, "page %u is pinned %u times by free slot %u", page, count, slot);
        if (slot && lc_load(&k->state) == LCS_CLIENT_QUARANTINE) continue;
        if (!(bits >> slot & 1))
            BROKEN(c, 27, page, slot, "page %u: slot %u pins it, its bit is not set", page, slot);
        if (free) BROKEN(c, 28, page, slot, "free page %u is pinned by slot %u", page, slot);
    }
    return true;
}

/* A page without a key has an owner, whose pin it is that others see. */
static bool held_by_somebody(checker *c, uint32_t page) {
    uint32_t word = lc_load(&c->h->pages[page].word), slot = lci_ns_of(word);
    if (slot == 0 || slot >= LCS_SLOTS || word != lci_held_word(slot))
        BROKEN(c, 61, page, word, "page %u is held by nobody: its word is %#x", page, word);
    if (c->quiet && !lc_load(lci_pin(c->h, slot, page)))
        BROKEN(c, 62, page, slot, "page %u is held by slot %u, which does not pin it", page, slot);
    return true;
}

static bool page_state(checker *c, uint32_t page) {
    const lci_page *p = &c->h->pages[page];
    uint32_t word = lc_load(&p->word), state = lci_state_of(word), seen = c->seen[page];
    uint32_t expected = 0;
    if (page >= lc_load(&c->h->root->fresh)) {
        if (word || seen) BROKEN(c, 29, page, word, "page %u was never used, its word is %#x", page, word);
        return true;
    }
    switch (state) {
    case LCI_FREE: expected = SEEN_FREE; break;
    case LCI_WRITING: expected = SEEN_CHAIN; c->out->writing++; break;
    case LCI_READY: expected = SEEN_CHAIN | (lci_queueable(c->h, page) ? SEEN_QUEUE : 0u); c->out->ready++; break;
    case LCI_DOOMED: expected = SEEN_DOOMED; break;
    case LCI_HELD: c->out->held++; break; /* in no structure */
    default: BROKEN(c, 30, page, word, "page %u has state %u outside a critical section", page, state);
    }
    if (seen != expected)
        BROKEN(c, 31, page, seen, "page %u (state %u) is in structures %#x, belongs into %#x "
               "(1 free, 2 chain, 4 queue, 8 doomed)", page, state, seen, expected);
    if (state == LCI_FREE && word) BROKEN(c, 40, page, word, "free page %u has the word %#x", page, word);
    if (state == LCI_HELD && !held_by_somebody(c, page)) return false;
    if (state == LCI_WRITING && !lci_res_of(word))
        BROKEN(c, 32, page, word, "page %u is being written under no reservation", page);
    if ((state == LCI_WRITING || state == LCI_READY) && lci_res_of(word) &&
        c->listed[page] != lci_res_of(word))
        BROKEN(c, 33, page, lci_res_of(word), "page %u says reservation %u, which does not list it",
               page, lci_res_of(word) - 1);
    if ((state == LCI_WRITING || state == LCI_READY)) {
        uint32_t parent = lci_parent(c->h, p);
        if (parent != LC_NIL) {
            c->children[parent]++;
            if (!lci_may_hang(c->h, parent, word))
                BROKEN(c, 41, page, parent, "page %u (word %#x) hangs on page %u (word %#x), which is of "
                       "another namespace or group, or one of them is independent", page, word, parent,
                       lc_load(&c->h->pages[parent].word));
        }
        c->ns_pages[lci_ns_of(word)]++;
        c->group_pages[lci_group_of(word)]++;
    }
    if (word & LCI_KEPT && state != LCI_READY)
        BROKEN(c, 63, page, word, "page %u is kept and has state %u", page, state);
    if (word & (LCI_INDEPENDENT | LCI_GROUP_MASK) && state != LCI_WRITING && state != LCI_READY)
        BROKEN(c, 66, page, word, "page %u is independent or of a group and has state %u (word %#x)",
               page, state, word);
    return true;
}

static bool totals(checker *c) {
    const lci_root *r = c->h->root;
    uint32_t uncollected = 0, kept = 0;
    for (uint32_t page = 0; page < lc_load(&r->fresh); page++) {
        const lci_page *p = &c->h->pages[page];
        uint32_t word = lc_load(&p->word), state = lci_state_of(word);
        bool is_named = state == LCI_WRITING || state == LCI_READY;
        if (is_named && lci_res_of(word)) uncollected++;
        if (word & LCI_KEPT) kept++;
        if (is_named && lc_load(&p->children) != c->children[page])
            BROKEN(c, 34, page, c->children[page], "page %u has %u children, its count says %u", page,
                   c->children[page], lc_load(&p->children));
    }
    if (c->out->named != lc_load(&r->named) || uncollected != lc_load(&r->writing))
        BROKEN(c, 35, c->out->named, uncollected, "named %u (count %u), uncollected %u (count %u)",
               c->out->named, lc_load(&r->named), uncollected, lc_load(&r->writing));
    if (kept != lc_load(&r->kept))
        BROKEN(c, 64, kept, lc_load(&r->kept), "%u pages are kept, the count says %u", kept,
               lc_load(&r->kept));
    for (uint32_t i = 0; i < LCI_NAMESPACES; i++)
        if (c->ns_pages[i] != lc_load(&c->h->ns[i].pages))
            BROKEN(c, 36, i, c->ns_pages[i], "namespace %u has %u pages, its count says %u", i,
                   c->ns_pages[i], lc_load(&c->h->ns[i].pages));
    for (uint32_t i = 0; i < LCI_NUMBERS; i++)
        if (c->group_pages[i] != lc_load(&r->group[i].pages))
            BROKEN(c, 67, i, c->group_pages[i], "group %u has %u pages, its count says %u", i,
                   c->group_pages[i], lc_load(&r->group[i].pages));
    if (c->out->held != lc_load(&r->held))
        BROKEN(c, 63, c->out->held, lc_load(&r->held), "%u pages are held, the count says %u",
               c->out->held, lc_load(&r->held));
    uint32_t all = c->out->free + c->out->writing + c->out->ready + c->out->doomed + c->out->held;
    if (all != lc_load(&r->fresh))
        BROKEN(c, 37, all, lc_load(&r->fresh),
               "free %u + writing %u + ready %u + doomed %u + held %u != %u pages", c->out->free,
               c->out->writing, c->out->ready, c->out->doomed, c->out->held, lc_load(&r->fresh));
    return true;
}

/* From the leaves up every page is reached, unless some hang on each other in a circle: these would
 * never be evicted. Takes `children` to pieces. */
static bool ancestors(checker *c) {
    const lci_handle *h = c->h;
    uint32_t reached = 0, fresh = lc_load(&h->root->fresh);
    for (uint32_t page = 0; page < fresh; page++) {
        for (uint32_t at = page; at != LC_NIL && c->seen[at] & SEEN_CHAIN && !c->children[at];) {
            c->seen[at] = SEEN_CLIMBED;
            reached++;
            at = lci_parent(h, &h->pages[at]);
            if (at != LC_NIL) c->children[at]--;
        }
    }
    for (uint32_t page = 0; page < fresh && reached != c->out->named; page++)
        if (c->seen[page] & SEEN_CHAIN) BROKEN(c, 42, page, 0, "page %u is its own ancestor", page);
    return true;
}

/* What changes without the lock: only in a copy that was made while no process worked. */
static bool at_rest(checker *c) {
    const lci_handle *h = c->h;
    uint64_t clock = lc_load(&h->root->clock);
    for (uint32_t page = 0; page < lc_load(&h->root->fresh); page++) {
        uint32_t word = lc_load(&h->pages[page].word), rid = lci_res_of(word);
        uint64_t tick = lci_tick(&h->pages[page]);
        if (!(c->seen[page] & SEEN_CHAIN)) continue;
        if (lci_ahead(h, clock, tick))
            BROKEN(c, 43, page, 0, "page %u was used at %llu, the clock says %llu", page,
                   (unsigned long long)tick, (unsigned long long)clock);
        if (lci_state_of(word) == LCI_READY && rid && !lci_complete(&h->res[rid - 1]))
            BROKEN(c, 44, page, rid - 1, "page %u is ready, reservation %u has shards to be written",
                   page, rid - 1);
    }
    return true;
}

static bool figures(checker *c) {
    if (!lci_geometry_agrees(c->h->root, &c->h->geometry))
        BROKEN(c, 38, 0, 0, "the root's own figures are not those of an index of %u pages",
               c->h->page_count);
    return true;
}

static bool everything(checker *c) {
    if (!figures(c)) return false;
    if (!free_pages(c)) return false;
    for (uint32_t b = 0; b <= c->h->dict.mask; b++) {
        if (b + 16 <= c->h->dict.mask) {
            uint32_t ahead = lc_load(&c->h->dict.buckets[b + 16]);
            if (ahead < c->h->page_count) __builtin_prefetch(&c->h->pages[ahead]);
        }
        if (!chain(c, b)) return false;
    }
    if (!lists(c) || !lci_check_records(c)) return false;
    for (uint32_t page = 0; page < c->h->page_count; page++)
        if (!page_state(c, page)) return false;
    for (uint32_t page = 0; page < c->h->page_count; page++)
        if (!pins(c, page)) return false;
    return totals(c) && (!c->quiet || at_rest(c)) && ancestors(c);
}

/* Check memory that holds a segment of an index of `pages` pages. `quiet`: no client was in the
 * middle of pinning, so that pins are checked too. An unfinished critical section must have been
 * undone (lci_recover_copy). Returns 0, or LC_E_RANGE / LC_E_FULL when it could not be checked. */
LC_API int lci_check(uint8_t *base, uint64_t bytes, uint64_t pages, int quiet, lci_report *out) {
    lci_geometry g;
    memset(out, 0, sizeof *out);
    if (lci_geometry_in(base, bytes, pages, &g) != LC_OK) return LC_E_RANGE;
    checker c = {.h = lci_handle_on(base, &g, NULL), .out = out, .quiet = quiet,
                 .now = lcs_now_ns()};
    c.seen = calloc(pages, 1);
    c.children = calloc(pages, 4);
    c.row0 = calloc(pages, 2);
    c.listed = calloc(pages, 4);
    c.chunk_owned = calloc(g.chunks, 1);
    int rc = c.h && c.seen && c.children && c.row0 && c.listed && c.chunk_owned ? LC_OK : LC_E_FULL;
    if (rc == LC_OK) everything(&c);
    free(c.h);
    free(c.seen);
    free(c.children);
    free(c.row0);
    free(c.listed);
    free(c.chunk_owned);
    return rc;
}

/* Undo an unfinished critical section in a copy: what the next holder of the lock would do. */
LC_API int lci_recover_copy(uint8_t *base, uint64_t bytes, uint64_t pages) {
    lci_geometry g;
    lcs_lock *lock = (lcs_lock *)(base + LCS_LOCK_OFFSET);
    if (lci_geometry_in(base, bytes, pages, &g) != LC_OK) return LC_E_RANGE;
    if (lc_load(&lock->log_count) && lcs_word_free(lc_load(&lock->word))) return LC_E_CORRUPT;
    return lc_txn_undo(base, lock, lci_log_begin(&g), g.advice);
}
