/* The eviction queue in the order that eviction has learned: a list for each class and age of pages
 * (hazard.h), and an order of these lists.
 *
 * Within a list pages stand by the time at which they came. The first page of the lowest list goes,
 * unless its word belongs to another list by now: then it moves there. A page that could not go when its
 * turn came (pinned, promised, or used since the call began) is parked: no call meets it a second time
 * before it has looked at all others. With each batch of pages that go, some parked ones are looked at
 * again. So each is met once in a while, however long it stays pinned, and a call ends.
 *
 * The order is that of one of two tables. A new one is written to the other, which is dead, and chosen by
 * a single store. Everything here is derived: from the pages' words, but for the order, of which any is
 * sound that names each list once. */
#include "index.h"

#define AGEING_MOST 64 /* pages that one step moves because of their age */
#define AHEAD_TICKS 250000 /* 1 s: a hit may have been stored before the clock that gave its tick is read */
#define LEARN_WAIT_NS UINT64_C(3000000) /* for the lock, of a call that has done its own work */

static uint64_t present(const lci_handle *h) { return lc_load(&h->root->clock) & LCI_TICK_MAX; }

static lci_order *chosen(const lci_handle *h) {
    return &h->ranks->order[lc_load(&h->ranks->chosen) & 1];
}

/* ------------------------------------------------------------------ ticks */

/* Unique to the call, and the time as long as there are fewer than 244,000 calls a second. */
uint64_t lci_tick_by_time(lci_handle *h) {
    uint64_t ns = lc_load(&h->clock_ns), last = lc_load(&h->root->clock), tick;
    if (LC_LIKELY(!ns)) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
        ns = (uint64_t)t.tv_sec * UINT64_C(1000000000) + (uint64_t)t.tv_nsec;
    }
    do {
        tick = last + 1;
        if (tick < ns / LCH_TICK_NS) tick = ns / LCH_TICK_NS;
    } while (!atomic_compare_exchange_weak_explicit(&h->root->clock, &last, tick,
                                                    memory_order_relaxed, memory_order_relaxed));
    return tick & LCI_TICK_MAX;
}

/* Let this handle's ticks be made of this time, in nanoseconds, instead of the system's clock (0): for
 * a trace that is replayed, and for tests. */
LC_API int lci_set_clock(lci_handle *h, uint64_t ns) {
    lc_store(&h->clock_ns, ns);
    return LC_OK;
}

/* ------------------------------------------------------------------ lists and ranks */

/* Tick 0 is what `evict_first` gives. */
uint32_t lci_ranked_list(const lci_handle *h, uint64_t used) {
    if (LC_UNLIKELY(used >> LCI_TICK_SHIFT == 0)) return LCI_FIRST_LIST;
    return lch_list(&h->learnt, used, present(h));
}

/* 0: goes before all others. */
static uint32_t rank_of(const lci_handle *h, uint32_t list) {
    return list == LCI_FIRST_LIST ? 0 : 1 + lc_load(&chosen(h)->rank[list]);
}

uint32_t lci_rank(const lci_handle *h, uint64_t used) {
    return rank_of(h, lci_ranked_list(h, used));
}

bool lci_ranked_follows(const lci_handle *h, const lci_eviction *e, uint64_t child, uint64_t parent) {
    if (lci_used_since(h, parent >> LCI_TICK_SHIFT, e->since)) return false;
    return lci_rank(h, parent) <= lci_rank(h, child);
}

void lci_ranked_mark(lci_handle *h, lc_txn *t, uint32_t list, bool full) {
    if (list >= LCH_LISTS) return;
    lci_order *o = chosen(h);
    uint32_t rank = lc_load(&o->rank[list]);
    if (LC_UNLIKELY(rank >= LCH_LISTS)) {
        t->error = LC_E_CORRUPT;
        return;
    }
    uint32_t bit = UINT32_C(1) << (rank % 32), old = lc_load(&o->occupied[rank / 32]);
    uint32_t value = full ? old | bit : old & ~bit;
    if (value != old) lc_txn_set(t, &o->occupied[rank / 32], value);
}

uint32_t lci_list_at(const lci_handle *h, uint32_t rank) {
    const lci_order *o = chosen(h);
    bool full = lc_load(&o->occupied[rank / 32]) >> (rank % 32) & 1;
    return full ? lc_load(&o->list[rank]) : LC_NIL;
}

/* The lowest list that holds pages; LC_NIL: there is none. */
static uint32_t lowest(const lci_handle *h, lc_txn *t) {
    if (LC_UNLIKELY(!lc_list_empty(&h->lists, LCI_FIRST_LIST))) return LCI_FIRST_LIST;
    const lci_order *o = chosen(h);
    for (uint32_t w = 0; w < LCI_RANK_WORDS; w++) {
        uint32_t bits = lc_load(&o->occupied[w]);
        if (!bits) continue;
        uint32_t rank = w * 32 + (uint32_t)__builtin_ctz(bits);
        uint32_t list = rank < LCH_LISTS ? lc_load(&o->list[rank]) : LCH_LISTS;
        if (LC_LIKELY(list < LCH_LISTS && lc_load(&o->rank[list]) == rank)) return list;
        t->error = LC_E_CORRUPT;
        break;
    }
    return LC_NIL;
}

/* From one list to the end of another. */
static void move(lci_handle *h, lc_txn *t, uint32_t page, uint32_t to) {
    uint32_t head = lc_list_remove(t, &h->lists, page);
    if (head != LC_NIL) lci_ranked_mark(h, t, head - h->lists.nodes, false);
    lc_list_append(t, &h->lists, page, to);
    lci_ranked_mark(h, t, to, true);
}

/* ------------------------------------------------------------------ what is remembered */

void lci_ranked_remember(lci_handle *h, const lci_eviction *e, const uint32_t *pages, uint32_t n) {
    uint64_t since = e->since;
    for (uint32_t i = 0; i < n; i++) {
        const lci_page *p = &h->pages[pages[i]];
        lch_evicted(&h->learnt, lci_key_of(p), lc_load(&p->used), since);
    }
}

/* ------------------------------------------------------------------ what cannot go */

/* Look at so many parked pages, the first ones first: back to their lists, or behind the others. */
static void unpark(lci_handle *h, lc_txn *t, const lci_eviction *e, uint32_t most) {
    for (; most && !t->error; most--) {
        uint32_t page = lc_list_first(t, &h->lists, LCI_PARKED_LIST);
        if (page == LC_NIL) return;
        bool goes = lci_free_to_go(h, e, page);
        move(h, t, page, goes ? lci_ranked_list(h, lc_load(&h->pages[page].used)) : LCI_PARKED_LIST);
    }
}

/* ------------------------------------------------------------------ ageing */

/* The tick at which a page of this list leaves it because of its age. */
static uint64_t due(const lci_handle *h, uint32_t list, uint64_t used) {
    uint32_t age = list % LCH_AGES;
    if (age == LCH_AGES - 1) return UINT64_MAX;
    return (used >> LCI_TICK_SHIFT) + (UINT64_C(1) << (age + lch_unit(&h->learnt)));
}

/* Damage: a tick far ahead of the clock. By it the page would be new for as long, and all that lies behind
 * it would wait: it counts as used before this call. True: it did so until now. */
static bool brought_back(lci_handle *h, const lci_eviction *e, uint32_t page) {
    lci_page *p = &h->pages[page];
    uint64_t used = lc_load(&p->used);
    if (LC_LIKELY(!lci_ahead(h, present(h) + AHEAD_TICKS, used >> LCI_TICK_SHIFT))) return false;
    lc_store(&p->used, (e->since - 1) << LCI_TICK_SHIFT | (used & LCI_HITS_MASK));
    return true;
}

/* Move the first pages of a list that belong to another by now. Returns how many of `most` are left. */
static uint32_t age_list(lci_handle *h, lc_txn *t, const lci_eviction *e, uint32_t list, uint64_t now,
                         uint32_t most) {
    uint32_t page;
    while (most && (page = lc_list_first(t, &h->lists, list)) != LC_NIL && !t->error) {
        bool ahead = brought_back(h, e, page);
        uint64_t used = lc_load(&h->pages[page].used);
        uint32_t own = lci_ranked_list(h, used);
        if (own == list && !ahead) {
            h->due[list] = due(h, list, used);
            return most;
        }
        move(h, t, page, own);
        if (own < LCH_LISTS && h->due[own] > now) h->due[own] = now; /* it may be the first there */
        most--;
    }
    return most;
}

/* A page's age takes it to a list that may rank below its own: so the first pages of all lists are
 * looked at when they are due. */
static void age_lists(lci_handle *h, lc_txn *t, const lci_eviction *e) {
    uint64_t now = present(h);
    uint32_t left = AGEING_MOST, computed = lc_load(&h->learnt.root->computed);
    if (h->computed != computed) memset(h->due, 0, sizeof h->due); /* the unit of ages may be another */
    h->computed = computed;
    const lci_order *o = chosen(h);
    for (uint32_t w = 0; w < LCI_RANK_WORDS; w++) {
        for (uint32_t bits = lc_load(&o->occupied[w]); bits; bits &= bits - 1) {
            uint32_t rank = w * 32 + (uint32_t)__builtin_ctz(bits);
            uint32_t list = rank < LCH_LISTS ? lc_load(&o->list[rank]) : LCH_LISTS;
            if (list >= LCH_LISTS || h->due[list] > now) continue;
            left = age_list(h, t, e, list, now, left);
            if (!left || t->error) return;
        }
    }
}

/* ------------------------------------------------------------------ taking pages */

void lci_ranked_begin(lci_handle *h, lc_txn *t, lci_eviction *e, uint32_t want) {
    unpark(h, t, e, want / 2 + 1);
    age_lists(h, t, e);
}

/* Nothing is left but parked pages: each of them is looked at once. False: all were. */
static bool seek(lci_handle *h, lc_txn *t, lci_eviction *e, uint32_t *steps) {
    if (!*e->parked) *e->parked = 1 + lch_least(lc_load(&h->root->queued), h->page_count);
    if (lc_list_empty(&h->lists, LCI_PARKED_LIST)) *e->parked = 1;
    uint32_t n = lch_least(lch_least(*e->parked - 1, *steps), LCI_BATCH);
    *e->parked -= n;
    *steps -= n;
    unpark(h, t, e, n);
    return n != 0;
}

uint32_t lci_ranked_pop(lci_handle *h, lc_txn *t, lci_eviction *e, uint32_t *steps) {
    while (*steps > 0 && !t->error) {
        if (t->count > LCS_LOG_ENTRIES / 2) return LC_NIL;
        uint32_t list = lowest(h, t);
        if (list == LC_NIL) {
            if (t->error) break;
            if (seek(h, t, e, steps)) continue;
            e->exhausted = true;
            return LC_NIL;
        }
        if (LC_UNLIKELY(e->spared) && rank_of(h, list) >= e->spared) {
            e->outbid = true;
            return LC_NIL;
        }
        --*steps;
        uint32_t page = lc_list_first(t, &h->lists, list);
        if (page == LC_NIL || !lci_queueable(h, page)) {
            t->error = LC_E_CORRUPT;
            break;
        }
        uint32_t own = lci_ranked_list(h, lc_load(&h->pages[page].used));
        if (!lci_free_to_go(h, e, page)) {
            move(h, t, page, LCI_PARKED_LIST);
        } else if (own != list) {
            move(h, t, page, own);
        } else {
            lci_queue_remove(h, t, page);
            return page;
        }
    }
    return LC_NIL;
}

/* ------------------------------------------------------------------ the order */

/* A table for this order, and which lists hold pages; dead until it is chosen. False: the order does not
 * name each list once. */
static bool write_order(lci_handle *h, lci_order *o, const uint16_t list[LCH_LISTS]) {
    uint32_t seen[LCI_RANK_WORDS] = {0};
    for (uint32_t rank = 0; rank < LCH_LISTS; rank++) {
        uint32_t number = list[rank];
        if (number >= LCH_LISTS || seen[number / 32] >> (number % 32) & 1) return false;
        seen[number / 32] |= UINT32_C(1) << (number % 32);
    }
    for (uint32_t w = 0; w < LCI_RANK_WORDS; w++) {
        uint32_t bits = 0;
        for (uint32_t rank = w * 32; rank < w * 32 + 32 && rank < LCH_LISTS; rank++) {
            lc_store(&o->list[rank], list[rank]);
            lc_store(&o->rank[list[rank]], (uint16_t)rank);
            if (!lc_list_empty(&h->lists, list[rank])) bits |= UINT32_C(1) << (rank % 32);
        }
        lc_store(&o->occupied[w], bits);
    }
    return true;
}

/* The order of a new index, and of one whose order was damaged: what the advice says, which is any order
 * at all. */
void lci_ranks_format(lci_handle *h) {
    uint16_t order[LCH_LISTS];
    lch_recompute(&h->learnt, lc_load(&h->root->clock) & LCI_TICK_MAX, order);
    write_order(h, &h->ranks->order[0], order);
    lc_store(&h->ranks->chosen, 0);
}

/* Does the chosen order name each list once, and is one table the inverse of the other? */
bool lci_ranks_sound(const lci_handle *h) {
    const lci_order *o = chosen(h);
    if (lc_load(&h->ranks->chosen) > 1) return false;
    for (uint32_t rank = 0; rank < LCH_LISTS; rank++) {
        uint32_t list = lc_load(&o->list[rank]);
        if (list >= LCH_LISTS || lc_load(&o->rank[list]) != rank) return false;
    }
    return true;
}

void lci_ranks_clear(lci_handle *h) {
    if (!lci_ranks_sound(h)) lci_ranks_format(h);
    for (uint32_t w = 0; w < LCI_RANK_WORDS; w++) lc_store(&chosen(h)->occupied[w], 0);
}

void lci_ranks_occupy(lci_handle *h, uint32_t list) {
    if (list >= LCH_LISTS) return;
    uint32_t rank = lc_load(&chosen(h)->rank[list]) % LCH_LISTS;
    _Atomic uint32_t *word = &chosen(h)->occupied[rank / 32];
    lc_store(word, lc_load(word) | UINT32_C(1) << (rank % 32));
}

bool lci_install_order(lci_handle *h, lc_txn *t, const uint16_t list[LCH_LISTS]) {
    uint32_t other = ~lc_load(&h->ranks->chosen) & 1;
    if (!write_order(h, &h->ranks->order[other], list)) return false;
    lc_txn_set(t, &h->ranks->chosen, other);
    return true;
}

void lci_learn_if_due(lci_handle *h, uint64_t tick, int wait, uint64_t deadline) {
    uint16_t order[LCH_LISTS];
    lc_txn t;
    if (LC_LIKELY(!h->ranks) || LC_LIKELY(!lch_due(&h->learnt, tick))) return;
    uint64_t before = lc_load(&h->learnt.root->computed_named);
    lch_recompute(&h->learnt, tick, order);
    uint64_t soon = lcs_now_ns() + LEARN_WAIT_NS;
    if (lci_lock(h, &t, LCI_OP_EVICT, wait, soon < deadline ? soon : deadline) != LC_OK) {
        lc_store(&h->learnt.root->computed_named, before); /* the next call tries */
        return;
    }
    lci_install_order(h, &t, order);
    lci_unlock(h, &t);
}
