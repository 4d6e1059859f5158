/* Lookups: peek, match, release. No lock that another process could hold. */
#include "index.h"

/* Keys are taken in blocks, in three stages, each a block ahead of the next: the bucket is asked
 * for; its chain's first record is; that one's key is compared and, if it is another, the record
 * after it is asked for. So no lookup waits for the two or three cache misses of a key, and the
 * length of a chain costs no mispredicted branch.
 *
 * These stages check nothing and promise nothing: they guess where the key's record lies. How a
 * guess becomes an answer: see `standing`. */
#define BLOCK 16
#define STAGES 4 /* a power of two above the blocks under way */

typedef struct pipeline {
    const lci_handle *h;
    const lc_key *keys;
    uint32_t n;
    uint32_t guess[STAGES][BLOCK]; /* always a page of the pool */
} pipeline;

LC_INLINE uint32_t block_end(const pipeline *p, uint32_t from) {
    return from + BLOCK < p->n ? from + BLOCK : p->n;
}

LC_INLINE uint32_t *guesses(pipeline *p, uint32_t from) {
    return p->guess[from / BLOCK % STAGES];
}

LC_INLINE void prefetch_buckets(const pipeline *p, uint32_t from) {
    uint32_t to = block_end(p, from);
    const lc_dict *d = &p->h->dict;
    for (uint32_t i = from; i < to; i++)
        __builtin_prefetch((const void *)&d->buckets[lc_bucket(d, p->keys[i].lo)]);
}

LC_INLINE void load_heads(pipeline *p, uint32_t from) {
    uint32_t to = block_end(p, from), *guess = guesses(p, from);
    const lc_dict *d = &p->h->dict;
    for (uint32_t i = from; i < to; i++) {
        uint32_t head = lc_load(&d->buckets[lc_bucket(d, p->keys[i].lo)]);
        head = head < d->nodes ? head : 0;
        guess[i - from] = head;
        __builtin_prefetch(&p->h->pages[head]);
    }
}

LC_INLINE void pass_heads(pipeline *p, uint32_t from, bool rows) {
    uint32_t to = block_end(p, from), *guess = guesses(p, from), nodes = p->h->dict.nodes;
    for (uint32_t i = from; i < to; i++) {
        uint32_t at = guess[i - from];
        const lci_page *head = &p->h->pages[at];
        uint32_t next = lc_load(&head->next);
        next = next < nodes ? next : 0;
        at = lc_load(&head->lo) == p->keys[i].lo ? at : next;
        guess[i - from] = at;
        __builtin_prefetch(&p->h->pages[at]);
        if (rows) __builtin_prefetch((const void *)&p->h->mine[at], 1);
    }
}

LC_INLINE void start(pipeline *p, bool rows) {
    prefetch_buckets(p, 0);
    prefetch_buckets(p, BLOCK);
    prefetch_buckets(p, 2 * BLOCK);
    load_heads(p, 0);
    load_heads(p, BLOCK);
    pass_heads(p, 0, rows);
}

LC_INLINE void advance(pipeline *p, uint32_t from, bool rows) {
    prefetch_buckets(p, from + 3 * BLOCK);
    load_heads(p, from + 2 * BLOCK);
    pass_heads(p, from + BLOCK, rows);
}

LC_INLINE bool ready(uint32_t word, uint32_t ns) {
    return (word & (LCI_STATE_MASK | LCI_NS_MASK)) == (LCI_READY | ns << LCI_NS_SHIFT);
}

/* Is this the key's record, READY? Whatever way led here: a READY page stands in the chain of its
 * key (it leaves the chain only after it has left that state, and enters it before), and a chain
 * holds a key once. So a record that had an even generation before and after we read from it this
 * key and READY is the answer, and no walk could find another. */
LC_INLINE bool standing(const lci_page *p, const lc_key *key, uint32_t ns, uint32_t *gen) {
    uint32_t g = *gen = lc_load_acquire(&p->gen); /* order: guess-gen */
    uint64_t lo = lc_load(&p->lo), hi = lc_load(&p->hi);
    uint32_t word = lc_load_acquire(&p->word); /* order: guess-word */
    LC_PAUSE(LC_AT_WALK_NEXT);
    atomic_thread_fence(memory_order_acquire); /* order: guess-fence */
    uint32_t wrong = (g & 1) | (lc_load(&p->gen) ^ g) | !ready(word, ns);
    return ((lo ^ key->lo) | (hi ^ key->hi) | wrong) == 0;
}

/* The page of a key, READY; LC_NIL: there is none. The guess first, then the chain. */
LC_INLINE uint32_t find(const lci_handle *h, const lc_key *key, uint32_t guess, uint32_t ns,
                        uint32_t *gen) {
    lc_found found;
    if (LC_LIKELY(standing(&h->pages[guess], key, ns, gen))) return guess;
    lc_dict_find(&h->dict, key->lo, key->hi, &found);
    if (found.node == LC_NIL || !ready(found.word, ns)) return LC_NIL;
    *gen = found.gen;
    return found.node;
}

uint32_t lci_peek_run(const lci_handle *h, const lc_key *keys, uint32_t n, uint32_t ns) {
    pipeline p = {.h = h, .keys = keys, .n = n};
    uint32_t gen;
    start(&p, false);
    for (uint32_t from = 0; from < n; from += BLOCK) {
        uint32_t to = block_end(&p, from), *guess = guesses(&p, from);
        advance(&p, from, false);
        for (uint32_t i = from; i < to; i++)
            if (LC_UNLIKELY(find(h, &keys[i], guess[i - from], ns, &gen) == LC_NIL)) return i;
    }
    return n;
}

/* Longest ready prefix of each of `requests` runs of keys; run i is keys[offsets[i] ..
 * offsets[i+1]). `counts[i]` receives it. */
LC_API int lci_peek(lci_handle *h, const lc_key *keys, const int64_t *offsets, uint32_t requests,
                    lci_ns_ref ns, int32_t *counts) {
    int rc = lci_usable(h);
    if (rc != LC_OK) return rc;
    for (uint32_t i = 0; i < requests; i++) {
        bool open = lci_ns_open(h, ns);
        uint32_t n = (uint32_t)(offsets[i + 1] - offsets[i]);
        uint32_t found = open ? lci_peek_run(h, keys + offsets[i], n, lci_ns_id(ns)) : 0;
        /* A clear that began meanwhile wins: nothing of it is reported after it has returned. */
        counts[i] = LC_LIKELY(lci_ns_open(h, ns)) ? (int32_t)found : 0;
    }
    return LC_OK;
}

/* The same for a single request; returns the prefix. */
LC_API int lci_peek1(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ns) {
    int rc = lci_usable(h);
    if (LC_UNLIKELY(rc != LC_OK)) return rc;
    if (!lci_ns_open(h, ns)) return 0;
    uint32_t found = lci_peek_run(h, keys, n, lci_ns_id(ns));
    return LC_LIKELY(lci_ns_open(h, ns)) ? (int)found : 0;
}

/* The page of a key counts as used, if it is ready or being written: 1, else 0. Advice, as any tick. */
LC_API int lci_touch_key(lci_handle *h, const lc_key *key, lci_ns_ref ns) {
    lc_found found;
    int rc = lci_usable(h);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    if (!lci_ns_open(h, ns)) return 0;
    lc_dict_find(&h->dict, key->lo, key->hi, &found);
    if (found.node == LC_NIL || lci_ns_of(found.word) != lci_ns_id(ns)) return 0;
    lci_touch(&h->pages[found.node], lci_next_tick(h), 0);
    return 1;
}

bool lci_pinned(const lci_handle *h, const lci_page *p) {
    uint64_t bits = lc_load_acquire(&p->pins);
    uint32_t page = (uint32_t)(p - h->pages);
    while (bits) {
        uint32_t slot = (uint32_t)__builtin_ctzll(bits);
        if (lc_load_acquire(lci_pin(h, slot, page))) return true;
        bits &= bits - 1;
    }
    return false;
}

/* Count first, then the bit: a client that sees a set bit and a count of zero may take the page,
 * and one that sees no bit need not read the count. The bit stays set after the last release:
 * setting it is the only read-modify-write of a pin, and a page that is matched again saves it. */
int lci_pin_one(lci_handle *h, uint32_t page) {
    _Atomic uint16_t *count = &h->mine[page];
    uint16_t old = lc_load(count);
    if (LC_UNLIKELY(old == UINT16_MAX)) return LC_E_PINS;
    lc_store(count, (uint16_t)(old + 1));
    uint64_t bit = UINT64_C(1) << h->at->slot;
    _Atomic uint64_t *pins = &h->pages[page].pins;
    if (!(lc_load(pins) & bit)) atomic_fetch_or_explicit(pins, bit, memory_order_relaxed);
    return LC_OK;
}

/* The first pin of a page that is to be ours. False: damage. The page stood twice on the stack; or we have
 * it already: where somebody forges a dead holder of the lock, its log takes back a step that had given
 * pages to a living client, and the rows are not in the log. Under `rows` a free page has no pin of ours.
 *
 * Readers that hold on to the page's former life may still set bits here and take them back from their
 * rows: a bit without a count means nothing. */
bool lci_pin_free(lci_handle *h, uint32_t page) {
    lci_page *p = &h->pages[page];
    if (lci_state_of(lc_load(&p->word)) != LCI_FREE || lc_load(&h->mine[page])) return false;
    lc_store(&p->pins, UINT64_C(1) << h->at->slot);
    lc_store(&h->mine[page], 1);
    return true;
}

int lci_unpin_one(lci_handle *h, uint32_t page) {
    _Atomic uint16_t *count = &h->mine[page];
    uint16_t old = lc_load(count);
    if (LC_UNLIKELY(old == 0)) return LC_E_CORRUPT;
    /* Release: what we did with the page is over. */
    lc_store_release(count, (uint16_t)(old - 1)); /* order: unpin-count */
    return LC_OK;
}

void lci_unpin_run(lci_handle *h, const int32_t *pages, uint32_t from, uint32_t to) {
    for (uint32_t i = from; i < to; i++) lci_unpin_one(h, (uint32_t)pages[i]);
}

int lci_find_and_pin(lci_handle *h, const lc_key *keys, uint32_t n, uint32_t ns, int32_t *pages,
                     uint32_t *gens) {
    pipeline p = {.h = h, .keys = keys, .n = n};
    start(&p, true);
    for (uint32_t i = 0; i < n; i++) {
        if (i % BLOCK == 0) advance(&p, i, true);
        uint32_t page = find(h, &keys[i], guesses(&p, i)[i % BLOCK], ns, &gens[i]);
        if (page == LC_NIL) return (int)i;
        pages[i] = (int32_t)page;
        int rc = lci_pin_one(h, page);
        if (LC_UNLIKELY(rc != LC_OK)) {
            lci_unpin_run(h, pages, 0, i);
            return rc;
        }
    }
    return (int)n;
}

/* How many of the pinned pages are still what was found. The fence before it pairs with the one in
 * lci_evict: either the evictor sees our pin, or we see its EVICTING. */
uint32_t lci_confirm(lci_handle *h, const int32_t *pages, const uint32_t *gens, uint32_t n,
                     uint32_t ns, uint64_t tick) {
    lci_hits hits = {UINT64_MAX, 0}; /* a word that only damage makes */
    for (uint32_t i = 0; i < n; i++) {
        lci_page *page = &h->pages[pages[i]];
        /* The word first: if the generation has not moved after that, the word was of this life. */
        uint32_t word = lc_load_acquire(&page->word); /* order: confirm-word */
        uint32_t gen = lc_load_acquire(&page->gen);   /* order: confirm-gen */
        if (LC_UNLIKELY(!ready(word, ns) || gen != gens[i])) return i;
        lci_hit(h, page, tick, &hits);
    }
    return n;
}

static int match_one(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ns, int32_t *pages,
                     uint32_t *gens, bool counted) {
    uint32_t id = lci_ns_id(ns);
    if (LC_UNLIKELY(lc_load(&h->at->leaving))) return LC_E_CLOSED;
    if (!lci_ns_open(h, ns)) return 0;
    int found = lci_find_and_pin(h, keys, n, id, pages, gens);
    if (found <= 0) return found;
    LC_PAUSE(LC_AT_PIN_COUNTED);
    atomic_thread_fence(memory_order_seq_cst); /* order: pin-fence */
    LC_PAUSE(LC_AT_PIN_FENCED);
    uint64_t tick = counted || !h->ranks ? lci_next_tick(h) : 0;
    uint32_t held = lci_confirm(h, pages, gens, (uint32_t)found, id, tick);
    if (LC_UNLIKELY(!lci_ns_open(h, ns))) held = 0;
    if (LC_UNLIKELY(held < (uint32_t)found)) lci_unpin_run(h, pages, held, (uint32_t)found);
    return (int)held;
}

/* Pin every one of the keys that is ready, wherever in the run: for reserve. `pages[i]` and
 * `status[i]` = LCI_PRESENT say which. After an error those that are marked so stay pinned. Where lists are
 * ranked, what this client pins already was hit when it did so: it counts as used now, and no more. */
int lci_pin_ready(lci_handle *h, const lc_key *keys, uint32_t n, uint32_t ns, uint64_t tick,
                  int32_t *pages, uint8_t *status) {
    pipeline p = {.h = h, .keys = keys, .n = n};
    const lc_dict *d = &h->dict;
    lc_found found;
    prefetch_buckets(&p, 0);
    for (uint32_t i = 0; i < n; i++) {
        if (i % BLOCK == 0) prefetch_buckets(&p, i + BLOCK);
        /* Most keys are absent, and of most of these the chain is empty. */
        uint32_t head = lc_load_acquire(&d->buckets[lc_bucket(d, keys[i].lo)]);
        if (LC_LIKELY(head >= d->nodes)) continue;
        lc_dict_find_from(d, keys[i].lo, keys[i].hi, head, &found);
        if (found.node == LC_NIL || !ready(found.word, ns)) continue;
        bool again = h->ranks && lc_load(&h->mine[found.node]);
        int rc = lci_pin_one(h, found.node);
        if (rc != LC_OK) return rc;
        pages[i] = (int32_t)found.node;
        atomic_thread_fence(memory_order_seq_cst); /* order: pin-present-fence */
        if (lci_confirm(h, &pages[i], &found.gen, 1, ns, again ? 0 : tick)) status[i] = LCI_PRESENT;
        else lci_unpin_one(h, found.node);
        if (again) lci_touch(&h->pages[found.node], tick, 0);
    }
    return LC_OK;
}

static void count_hits(lcs_client *c, uint32_t asked, uint32_t hit) {
    lc_raise(&c->hit_pages, hit);
    lc_raise(&c->missed_pages, asked - hit);
}

/* `lookups` counts uncounted ones too: `check` learns from it that pins may be moving. */
void lci_note_lookup(lcs_attachment *at, uint32_t asked, uint32_t hit) {
    lcs_client *c = lcs_client_of(at, at->slot);
    lc_raise(&c->lookups, 1);
    count_hits(c, asked, hit);
}

/* Pin the longest ready prefix of each request; `lease` begins zeroed. Pages are written to the
 * lease one request after another; `counts[i]` are request i's. Returns the pages in all. On an
 * error nothing is pinned. */
LC_API int lci_match(lci_handle *h, const lc_key *keys, const int64_t *offsets, uint32_t requests,
                     lci_ns_ref ns, lci_lease *lease, int32_t *counts) {
    int rc = lci_usable(h);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    bool counted = lease->capacity != LCI_UNCOUNTED;
    lease->capacity = (uint32_t)(offsets[requests] - offsets[0]);
    int32_t *pages = (int32_t *)(lease + 1);
    uint32_t *gens = (uint32_t *)(pages + lease->capacity);
    for (uint32_t i = 0; i < requests; i++) {
        uint32_t n = (uint32_t)(offsets[i + 1] - offsets[i]);
        pthread_mutex_lock(&h->at->rows);
        rc = match_one(h, keys + offsets[i], n, ns, pages + lease->held, gens, counted);
        if (rc >= 0) {
            counts[i] = rc;
            lease->held += (uint32_t)rc;
            lci_note_lookup(h->at, counted ? n : 0, counted ? (uint32_t)rc : 0);
        } else {
            lci_unpin_run(h, pages, 0, lease->held);
            lease->held = 0;
        }
        pthread_mutex_unlock(&h->at->rows);
        if (rc < 0) return rc;
    }
    return (int)lease->held;
}

LC_API int lci_match1(lci_handle *h, const lc_key *keys, uint32_t n, lci_ns_ref ns,
                      lci_lease *lease) {
    int rc = lci_usable(h);
    if (LC_UNLIKELY(rc != LC_OK)) return rc;
    if (LC_UNLIKELY(h->at->readonly)) return LC_E_READONLY;
    bool counted = lease->capacity != LCI_UNCOUNTED;
    lease->capacity = n;
    int32_t *pages = (int32_t *)(lease + 1);
    uint32_t *gens = (uint32_t *)(pages + n);
    pthread_mutex_lock(&h->at->rows);
    rc = match_one(h, keys, n, ns, pages, gens, counted);
    if (rc >= 0) {
        lease->held = (uint32_t)rc;
        lci_note_lookup(h->at, counted ? n : 0, counted ? (uint32_t)rc : 0);
    }
    pthread_mutex_unlock(&h->at->rows);
    return rc;
}

/* Pages whose numbers and generations another client has told us, as it pins them. The look at the
 * generation before the pin is what `find` is for a match: making a page resets its bits, so a pin that
 * was counted before the page came to this generation might have no bit, and be confirmed all the same. */
static int pin_given(lci_handle *h, const int32_t *pages, const uint32_t *gens, uint32_t n,
                     uint32_t *refused) {
    if (LC_UNLIKELY(lc_load(&h->at->leaving))) return LC_E_CLOSED;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t page = (uint32_t)pages[i], gen;
        int rc = LC_E_RANGE;
        if (LC_LIKELY(page < h->page_count)) {
            gen = lc_load_acquire(&h->pages[page].gen); /* order: pin-given-gen */
            rc = gen == gens[i] ? lci_pin_one(h, page) : LC_E_STALE;
        }
        if (LC_UNLIKELY(rc != LC_OK)) {
            *refused = i;
            lci_unpin_run(h, pages, 0, i);
            return rc;
        }
    }
    return LC_OK;
}

/* Are they READY still, in these generations and in one namespace, which is open? */
static int confirm_given(lci_handle *h, const int32_t *pages, const uint32_t *gens, uint32_t n,
                         uint32_t *refused) {
    uint32_t id = lci_ns_of(lc_load(&h->pages[pages[0]].word));
    lci_ns_ref ns = lc_load(&h->ns[id].epoch) << 8 | id;
    LC_PAUSE(LC_AT_PIN_COUNTED);
    atomic_thread_fence(memory_order_seq_cst); /* order: pin-given-fence */
    LC_PAUSE(LC_AT_PIN_FENCED);
    *refused = lci_confirm(h, pages, gens, n, id, lci_next_tick(h));
    if (LC_LIKELY(*refused == n && lci_ns_open(h, ns))) return LC_OK;
    if (*refused == n) *refused = 0;
    lci_unpin_run(h, pages, 0, n);
    return LC_E_STALE;
}

/* Pin all of these pages, each in the generation that is given, or none; `lease` begins zeroed. Pages
 * of one namespace. LC_E_RANGE: page `*refused` is none of the index; LC_E_STALE: it is not READY in
 * that generation, or was cleared; LC_E_PINS. No lock. */
LC_API int lci_pin_pages(lci_handle *h, const int32_t *pages, const uint32_t *gens, uint32_t n,
                         lci_lease *lease, uint32_t *refused) {
    int rc = lci_usable(h);
    if (LC_UNLIKELY(rc != LC_OK)) return rc;
    if (LC_UNLIKELY(h->at->readonly)) return LC_E_READONLY;
    lease->capacity = n;
    if (n == 0) return LC_OK;
    memcpy(lease + 1, pages, n * sizeof *pages);
    pages = (const int32_t *)(lease + 1); /* a copy that no thread of the caller changes */
    pthread_mutex_lock(&h->at->rows);
    rc = pin_given(h, pages, gens, n, refused);
    if (rc == LC_OK) rc = confirm_given(h, pages, gens, n, refused);
    if (rc == LC_OK) {
        lease->held = n;
        lci_note_lookup(h->at, 0, 0);
    }
    pthread_mutex_unlock(&h->at->rows);
    return rc;
}

/* Count the pages of lookups that were not counted: of a request that was looked up many times. */
LC_API int lci_count_pages(lci_handle *h, uint32_t asked, uint32_t hit) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    pthread_mutex_lock(&h->at->rows);
    count_hits(lcs_client_of(h->at, h->at->slot), asked, hit);
    pthread_mutex_unlock(&h->at->rows);
    return LC_OK;
}

/* A lease from a lookup that was not counted is taken: where lists are ranked its pages are hit now, once
 * for the request. (In LRU each lookup was a hit.) */
LC_API int lci_use(lci_handle *h, lci_lease *lease) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    if (!h->ranks) return LC_OK;
    const int32_t *pages = (const int32_t *)(lease + 1);
    lci_hits hits = {UINT64_MAX, 0};
    uint64_t tick = lci_next_tick(h);
    pthread_mutex_lock(&h->at->rows);
    for (uint32_t i = 0; i < lease->held; i++)
        if ((uint32_t)pages[i] < h->page_count && lc_load(&h->mine[pages[i]]))
            lci_hit(h, &h->pages[pages[i]], tick, &hits);
    pthread_mutex_unlock(&h->at->rows);
    return LC_OK;
}

#define UNPINNED (-1) /* no page, in a lease */

/* Unpin what the lease holds beyond its first `pages`. */
static int shorten(lci_handle *h, lci_lease *lease, uint32_t pages) {
    int rc = lcs_usable(h->at);
    if (LC_UNLIKELY(rc != LC_OK && rc != LC_E_RETIRED)) return rc;
    int32_t *page = (int32_t *)(lease + 1);
    pthread_mutex_lock(&h->at->rows);
    uint32_t held = lease->held;
    if (pages < held) lease->held = pages;
    rc = LC_OK;
    for (uint32_t i = pages; i < held; i++) {
        int one = lci_unpin_one(h, (uint32_t)page[i]);
        if (one != LC_OK) rc = one;
    }
    pthread_mutex_unlock(&h->at->rows);
    return rc;
}

/* Unpin what the lease holds. LC_E_TWICE when it holds nothing any more is the caller's to tell. */
LC_API int lci_release(lci_handle *h, lci_lease *lease) { return shorten(h, lease, 0); }

/* Keep the first pages: in one call, for a caller that a signal may interrupt. */
LC_API int lci_shorten(lci_handle *h, lci_lease *lease, uint32_t pages) {
    return shorten(h, lease, pages);
}

/* Unpin those of these pages that the lease holds, and let it hold the others, in its order. A page that
 * it does not hold, or not so often, is passed over. Returns how many were unpinned. In the lease's order
 * each costs a look or two; else a look at each that it holds. */
LC_API int lci_release_pages(lci_handle *h, lci_lease *lease, const int32_t *pages, uint32_t n) {
    int rc = lcs_usable(h->at);
    if (LC_UNLIKELY(rc != LC_OK && rc != LC_E_RETIRED)) return rc;
    int32_t *page = (int32_t *)(lease + 1);
    uint32_t at = 0, left = 0;
    pthread_mutex_lock(&h->at->rows);
    uint32_t held = lease->held;
    rc = LC_OK;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t looked = 0;
        for (; looked < held && page[at] != pages[i]; looked++) at = at + 1 < held ? at + 1 : 0;
        if (looked == held || pages[i] == UNPINNED) continue;
        int one = lci_unpin_one(h, (uint32_t)page[at]);
        if (one != LC_OK) rc = one;
        page[at] = UNPINNED;
    }
    for (uint32_t i = 0; i < held; i++)
        if (page[i] != UNPINNED) page[left++] = page[i];
    lease->held = left;
    pthread_mutex_unlock(&h->at->rows);
    return rc == LC_OK ? (int)(held - left) : rc;
}

/* Hand what a lease holds to others, a run of `counts[i]` pages to each: at once, for a caller that
 * a signal may interrupt. Process-local. LC_E_RANGE: the counts are not what it holds. */
LC_API int lci_split(lci_lease *from, lci_lease *const *to, const int32_t *counts, uint32_t n) {
    const int32_t *pages = (const int32_t *)(from + 1);
    uint64_t all = 0;
    for (uint32_t i = 0; i < n; i++) all += (uint32_t)counts[i];
    if (all != from->held) return LC_E_RANGE;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t count = (uint32_t)counts[i];
        memcpy(to[i] + 1, pages, count * sizeof *pages);
        to[i]->held = to[i]->capacity = count;
        pages += count;
    }
    from->held = 0;
    return LC_OK;
}
