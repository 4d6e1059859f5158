/* The eviction queue: ready pages without children (independent ones with them, too), in one of two
 * orders. That of ranked lists is in ranked.c; LRU is a wheel of 8 x 64 lists.
 *
 * A page lies in the list that the highest differing base-64 digit of its tick and of the queue's
 * present selects: level = which digit, list = the digit's value. When the present reaches a list
 * above level 0, its pages fall to lower levels. So a page moves a few times in its life, matching
 * it moves nothing (its tick is looked at when its turn comes), and the order is exact LRU up to
 * pages that share a tick, except within the limits that bound the work of one call. Idea: the
 * hierarchical timing wheels of Varghese and Lauck (SOSP 1987), turned by eviction instead of time.
 */
#include "index.h"

#define MOVES_MAX 4096 /* then a page that was used since it was queued may go all the same */

static uint32_t digit(uint64_t tick, int level) {
    return (uint32_t)(tick >> (6 * level)) & (LCI_DIGITS - 1);
}

uint64_t lci_queue_now(const lci_handle *h) {
    return (uint64_t)lc_load(&h->root->now[1]) << 32 | lc_load(&h->root->now[0]);
}

static void set_now(lci_handle *h, lc_txn *t, uint64_t now) {
    lc_txn_set(t, &h->root->now[0], (uint32_t)now);
    if ((uint32_t)(now >> 32) != lc_load(&h->root->now[1]))
        lc_txn_set(t, &h->root->now[1], (uint32_t)(now >> 32));
}

int lci_queue_slot(uint64_t tick, uint64_t now) {
    if (tick <= now) return (int)digit(now, 0);
    int level = (63 - __builtin_clzll(tick ^ now)) / 6;
    if (level >= LCI_LEVELS) level = LCI_LEVELS - 1;
    return level * LCI_DIGITS + (int)digit(tick, level);
}

static uint64_t occupied(const lci_handle *h, int level) {
    return (uint64_t)lc_load(&h->root->occupied[2 * level + 1]) << 32 |
           lc_load(&h->root->occupied[2 * level]);
}

static void mark_wheel(lci_handle *h, lc_txn *t, uint32_t list, bool full) {
    _Atomic uint32_t *word = &h->root->occupied[list / 32];
    uint32_t bit = UINT32_C(1) << (list % 32), old = lc_load(word);
    uint32_t value = full ? old | bit : old & ~bit;
    if (value != old) lc_txn_set(t, word, value);
}

static void mark(lci_handle *h, lc_txn *t, uint32_t list, bool full) {
    if (LC_LIKELY(!h->ranks)) mark_wheel(h, t, list, full);
    else lci_ranked_mark(h, t, list, full);
}

/* What belongs into the queue: ready, not kept, in no reservation, nothing on it that goes first. */
bool lci_queueable(const lci_handle *h, uint32_t page) {
    const lci_page *p = &h->pages[page];
    uint32_t word = lc_load(&p->word);
    return (word & (LCI_STATE_MASK | LCI_KEPT)) == LCI_READY && !lci_res_of(word) &&
           !lci_covered(p);
}

/* The list that a page's word belongs to. */
uint32_t lci_queue_list(const lci_handle *h, uint32_t page) {
    if (h->ranks) return lci_ranked_list(h, lc_load(&h->pages[page].used));
    return (uint32_t)lci_queue_slot(lci_tick(&h->pages[page]), lci_queue_now(h));
}

static void put(lci_handle *h, lc_txn *t, uint32_t page, uint32_t list) {
    lc_list_append(t, &h->lists, page, list);
    mark(h, t, list, true);
    lc_txn_add(t, &h->root->queued, 1);
}

void lci_queue_add(lci_handle *h, lc_txn *t, uint32_t page) {
    put(h, t, page, lci_queue_list(h, page));
}

/* In the wheel: as if it had been used when the call began. */
void lci_queue_defer(lci_handle *h, lc_txn *t, const lci_eviction *e, uint32_t page) {
    uint32_t list = h->ranks ? LCI_PARKED_LIST
                             : (uint32_t)lci_queue_slot(e->since, lci_queue_now(h));
    put(h, t, page, list);
}

void lci_queue_first(lci_handle *h, lc_txn *t, uint32_t page, uint64_t tick) {
    put(h, t, page, h->ranks ? LCI_FIRST_LIST : (uint32_t)lci_queue_slot(tick, lci_queue_now(h)));
}

/* For a page that was popped and put elsewhere: the next to be popped from its list. */
void lci_queue_return(lci_handle *h, lc_txn *t, uint32_t page) {
    lci_queue_remove(h, t, page);
    uint32_t list = lci_queue_list(h, page);
    lc_list_insert(t, &h->lists, page, lc_load(&h->lists.heads[list].next));
    mark(h, t, list, true);
    lc_txn_add(t, &h->root->queued, 1);
    if (h->ranks && list < LCH_LISTS) h->due[list] = 0; /* it may be older than the first there */
}

void lci_queue_remove(lci_handle *h, lc_txn *t, uint32_t page) {
    uint32_t head = lc_list_remove(t, &h->lists, page);
    if (head != LC_NIL && head - h->lists.nodes < LCI_DOOMED_LIST)
        mark(h, t, head - h->lists.nodes, false);
    lc_txn_add(t, &h->root->queued, (uint32_t)-1);
}

/* A list above level 0 that the present has reached and that still holds pages; -1: none. */
static int unfinished(const lci_handle *h, uint64_t now) {
    for (int level = 1; level < LCI_LEVELS; level++)
        if (occupied(h, level) >> digit(now, level) & 1)
            return level * LCI_DIGITS + (int)digit(now, level);
    return -1;
}

/* The next list at level 0 within the present's window; -1: none. */
static int due(const lci_handle *h, uint64_t now) {
    uint64_t later = occupied(h, 0) >> digit(now, 0);
    return later ? (int)digit(now, 0) + __builtin_ctzll(later) : -1;
}

/* Turn the wheel to the next list that holds pages. False: the queue is empty. */
static bool turn(lci_handle *h, lc_txn *t, uint64_t now) {
    for (int level = 1; level < LCI_LEVELS; level++) {
        uint32_t here = digit(now, level);
        if (here == LCI_DIGITS - 1) continue;
        uint64_t later = occupied(h, level) >> (here + 1);
        if (!later) continue;
        uint64_t to = here + 1 + (uint64_t)__builtin_ctzll(later);
        uint64_t above = now >> (6 * (level + 1)) << (6 * (level + 1));
        set_now(h, t, above | to << (6 * level));
        return true;
    }
    return false;
}

static void requeue(lci_handle *h, lc_txn *t, uint32_t page, uint64_t tick) {
    lci_queue_remove(h, t, page);
    put(h, t, page, (uint32_t)lci_queue_slot(tick, lci_queue_now(h)));
}

/* What counts as a page's last use. A call that only lists pages leaves the ticks of those that its
 * own client pins alone, which are first of all those it has listed: they lie where `since` is. */
static uint64_t tick_for(const lci_handle *h, const lci_eviction *e, uint32_t page) {
    uint64_t tick = lci_tick(&h->pages[page]);
    bool listed = e->listing && tick < e->since && lc_load(&h->mine[page]);
    return listed ? e->since : tick;
}

/* The list to look at next, or -1. */
static int next_list(lci_handle *h, lc_txn *t, const lci_eviction *e) {
    for (int guard = 0; guard <= LCI_WHEEL; guard++) {
        uint64_t now = lci_queue_now(h);
        int left = unfinished(h, now), ready = due(h, now);
        if (left >= 0 && (e->moved < MOVES_MAX || ready < 0)) return left;
        if (ready >= 0) {
            if ((uint32_t)ready != digit(now, 0))
                set_now(h, t, (now & ~UINT64_C(63)) | (uint64_t)ready);
            return ready;
        }
        if (!turn(h, t, now)) return -1;
    }
    t->error = LC_E_CORRUPT;
    return -1;
}

static uint32_t pop_wheel(lci_handle *h, lc_txn *t, lci_eviction *e, uint32_t *steps) {
    while (*steps > 0 && !t->error) {
        --*steps;
        if (t->count > LCS_LOG_ENTRIES / 2) return LC_NIL;
        int list = next_list(h, t, e);
        if (list < 0) break;
        uint32_t page = lc_list_first(t, &h->lists, (uint32_t)list);
        if (page == LC_NIL || !lci_queueable(h, page)) {
            t->error = LC_E_CORRUPT;
            break;
        }
        lci_page *p = &h->pages[page];
        uint64_t tick = tick_for(h, e, page), now = lci_queue_now(h);
        bool moves = lci_queue_slot(tick, now) != list;
        if (moves && (e->moved < MOVES_MAX || tick >= e->since)) {
            e->moved++;
            requeue(h, t, page, tick);
        } else if (tick >= e->since) {
            break; /* the oldest that is left was used, or found pinned, since this call began */
        } else if (lci_promised(h, e, page) || lci_pinned(h, p)) {
            lci_touch(p, e->since, 0);
            requeue(h, t, page, lci_tick(p));
        } else {
            lci_queue_remove(h, t, page);
            return page;
        }
    }
    if (*steps > 0) e->exhausted = true;
    return LC_NIL;
}

uint32_t lci_queue_pop(lci_handle *h, lc_txn *t, lci_eviction *e, uint32_t *steps) {
    return h->ranks ? lci_ranked_pop(h, t, e, steps) : pop_wheel(h, t, e, steps);
}
