/* Lookups over the groups of a model: the deepest position of a sequence at which every group has the
 * pages that its rule asks for. Groups may have their pages in different segments. No lock that
 * another process could hold. */
#include "index.h"

#define TRIES 8

typedef struct joint {
    lci_group *groups;
    uint32_t count;
    const lc_key *keys;
    uint32_t page_tokens, step;
    uint32_t pages;           /* no deeper position can be used */
    int32_t limit;            /* the group that refused the one after it; -1: none has */
    uint32_t low[LCI_GROUPS]; /* what a group needs from here on was there when it was looked at */
    uint32_t base[LCI_GROUPS]; /* pages of sequences before this one that its lease holds */
} joint;

/* What a group's lease holds for this sequence. */
static inline uint32_t held_by(const joint *m, uint32_t i) {
    return m->groups[i].lease->held - m->base[i];
}
static inline int32_t *pages_of(const joint *m, uint32_t i) {
    return (int32_t *)(m->groups[i].lease + 1) + m->base[i];
}
static inline uint32_t *gens_of(const joint *m, uint32_t i) {
    const lci_lease *lease = m->groups[i].lease;
    return (uint32_t *)((int32_t *)(lease + 1) + lease->capacity) + m->base[i];
}

/* The first page that a position needs; that position: none. It never falls when `pages` grows, so
 * a group that needs page 0 needs it at every position before, as attention over all tokens does. */
static inline uint32_t first_of(const joint *m, const lci_group *g, uint32_t pages) {
    uint64_t position = (uint64_t)pages * m->page_tokens;
    uint64_t begin = position - position % g->align;
    return (uint32_t)((begin > g->back ? begin - g->back : 0) / m->page_tokens);
}

/* The group lacks a page that this position needs. So does every position between that page and
 * this one: they need no page before those that this one needs. */
static inline void refuse(joint *m, uint32_t i, uint32_t missing) {
    m->pages = missing / m->step * m->step;
    m->limit = (int32_t)i;
}

/* ------------------------------------------------------------------ pages and their parts */

#define SOME 128 /* keys of parts that are made at a time */

static inline bool whole_pages(const lci_group *g) { return g->number == 0 && g->parts == 1; }

/* A page is there when its last part is: the parts of a run are evicted from the last one on. */
static void last_keys(const joint *m, const lci_group *g, uint32_t from, uint32_t n, lc_key *out) {
    for (uint32_t i = 0; i < n; i++)
        out[i] = lci_part_key(m->keys[from + i], g->number, g->parts - 1);
}

/* Keys of the parts [from, from + n) of what the group needs, counted over its pages. */
static void part_keys(const joint *m, const lci_group *g, uint32_t from, uint32_t n, lc_key *out) {
    uint32_t page = g->first + from / g->parts, part = from % g->parts;
    for (uint32_t i = 0; i < n; i++) {
        out[i] = lci_part_key(m->keys[page], g->number, part);
        if (++part == g->parts) part = 0, page++;
    }
}

static inline uint32_t least(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* How many pages are there from the first on. */
static uint32_t ready_from(const joint *m, const lci_group *g, uint32_t to, uint32_t ns) {
    lc_key some[SOME];
    if (LC_LIKELY(whole_pages(g))) return lci_peek_run(g->h, m->keys, to, ns);
    for (uint32_t at = 0, n; at < to; at += n) {
        n = least(to - at, SOME);
        last_keys(m, g, at, n, some);
        uint32_t found = lci_peek_run(g->h, some, n, ns);
        if (found < n) return at + found;
    }
    return to;
}

/* How many of the pages [from, to) are there without a gap, from the last one back. */
static uint32_t ready_back(const joint *m, const lci_group *g, uint32_t from, uint32_t to,
                           uint32_t ns) {
    lc_key some[SOME];
    if (LC_LIKELY(whole_pages(g))) return lci_ready_back(g->h, m->keys, from, to, ns);
    for (uint32_t at = to, n; at > from; at -= n) {
        n = least(at - from, SOME);
        last_keys(m, g, at - n, n, some);
        uint32_t found = lci_ready_back(g->h, some, 0, n, ns);
        if (found < n) return to - at + found;
    }
    return to - from;
}

/* ------------------------------------------------------------------ what is there */

/* Lower the position until the group has had all its pages. Each key is looked at once, also when
 * other groups lower it and this is called again: from the end, where a rule needs the last pages, or
 * from the front, where it needs all. */
static void look(joint *m, uint32_t i) {
    const lci_group *g = &m->groups[i];
    uint32_t ns = lci_ns_id(g->ns), *low = &m->low[i];
    for (;;) {
        uint32_t from = first_of(m, g, m->pages), to = m->pages < *low ? m->pages : *low;
        if (to <= from) return;
        if (from == 0) {
            uint32_t found = ready_from(m, g, to, ns);
            *low = 0;
            if (found < to) refuse(m, i, found);
            return;
        }
        *low = to - ready_back(m, g, from, to, ns);
        if (*low == from) return;
        refuse(m, i, *low - 1);
    }
}

/* Until no group lowers it any more. Those that need all pages come first: of an unknown prompt they
 * have none, and nothing else is looked at. */
static void look_all(joint *m) {
    uint32_t before;
    for (uint32_t i = 0; i < m->count; i++)
        if (first_of(m, &m->groups[i], m->pages) == 0) look(m, i);
    do {
        before = m->pages;
        for (uint32_t i = 0; i < m->count; i++) look(m, i);
    } while (m->pages < before);
}

/* ------------------------------------------------------------------ pinning it */

static void unpin_all(joint *m) {
    for (uint32_t i = 0; i < m->count; i++) {
        lci_unpin_run(m->groups[i].h, pages_of(m, i), 0, held_by(m, i));
        m->groups[i].lease->held = m->base[i];
    }
}

/* All parts of what the group needs, up to the first that is not there. They are in the lease. */
static int pin_parts(const joint *m, uint32_t i, uint32_t parts) {
    const lci_group *g = &m->groups[i];
    lc_key some[SOME];
    for (uint32_t at = held_by(m, i); at < parts; at = held_by(m, i)) {
        uint32_t n = least(parts - at, SOME);
        part_keys(m, g, at, n, some);
        int found = lci_find_and_pin(g->h, some, n, lci_ns_id(g->ns), pages_of(m, i) + at,
                                     gens_of(m, i) + at);
        if (LC_UNLIKELY(found < 0)) return found;
        g->lease->held += (uint32_t)found;
        if ((uint32_t)found < n) break;
    }
    return LC_OK;
}

/* What the group needs, as far as it is still there. */
static int pin(const joint *m, uint32_t i, uint32_t need) {
    const lci_group *g = &m->groups[i];
    if (LC_UNLIKELY(need > (g->lease->capacity - m->base[i]) / g->parts)) return LC_E_RANGE;
    if (!whole_pages(g)) return pin_parts(m, i, need * g->parts);
    int found = lci_find_and_pin(g->h, m->keys + g->first, need, lci_ns_id(g->ns), pages_of(m, i),
                                 gens_of(m, i));
    if (LC_LIKELY(found >= 0)) g->lease->held += (uint32_t)found;
    return found < 0 ? found : LC_OK;
}

/* A group that falls short lowers the position for those after it. */
static int pin_all(joint *m) {
    for (uint32_t i = 0; i < m->count; i++) {
        lci_group *g = &m->groups[i];
        g->first = first_of(m, g, m->pages);
        uint32_t need = m->pages - g->first;
        int rc = pin(m, i, need);
        if (LC_UNLIKELY(rc != LC_OK)) {
            m->limit = (int32_t)i;
            return rc;
        }
        uint32_t found = held_by(m, i) / g->parts;
        if (found < need) refuse(m, i, g->first + found);
    }
    return LC_OK;
}

/* Give back what the position does not need. False: a group needs pages that it has not pinned. */
static bool trim(joint *m) {
    for (uint32_t i = 0; i < m->count; i++) {
        lci_group *g = &m->groups[i];
        if (g->first != first_of(m, g, m->pages)) return false;
        uint32_t need = (m->pages - g->first) * g->parts;
        lci_unpin_run(g->h, pages_of(m, i), need, held_by(m, i));
        if (need < held_by(m, i)) g->lease->held = m->base[i] + need;
    }
    return true;
}

/* The tick of the request in this group's index: one for all its groups there. */
static uint64_t tick_of(const joint *m, uint32_t i, uint64_t *ticks) {
    for (uint32_t j = 0; j < i; j++)
        if (ticks[j] && m->groups[j].h->at == m->groups[i].h->at) return ticks[i] = ticks[j];
    return ticks[i] = lci_next_tick(m->groups[i].h);
}

/* Look again at what is pinned, and lower the position to what is left of it. */
static void confirm_all(joint *m) {
    uint64_t ticks[LCI_GROUPS] = {0};
    for (uint32_t i = 0; i < m->count; i++) {
        const lci_group *g = &m->groups[i];
        uint32_t held = held_by(m, i);
        if (!held) continue;
        uint32_t left = lci_confirm(g->h, pages_of(m, i), gens_of(m, i), held, lci_ns_id(g->ns),
                                    tick_of(m, i, ticks));
        uint32_t page = g->first + left / g->parts;
        if (LC_UNLIKELY(left < held) && page < m->pages) refuse(m, i, page);
    }
}

/* Another may evict a page between finding and pinning it, or mark it: then what was pinned goes
 * back, and the next position before that page is tried. */
static int pin_deepest(joint *m) {
    bool prefixes = true; /* finding and pinning tells all of them; nothing need be looked up before */
    for (uint32_t i = 0; i < m->count; i++)
        prefixes &= first_of(m, &m->groups[i], m->pages) == 0;
    for (int try = 0; try < TRIES; try++) {
        if (!prefixes) look_all(m);
        int rc = pin_all(m);
        if (LC_LIKELY(rc == LC_OK && trim(m))) {
            LC_PAUSE(LC_AT_PIN_COUNTED);
            atomic_thread_fence(memory_order_seq_cst); /* order: pin-groups-fence */
            LC_PAUSE(LC_AT_PIN_FENCED);
            confirm_all(m);
            if (LC_LIKELY(trim(m))) return LC_OK;
        }
        unpin_all(m);
        if (rc != LC_OK) return rc;
    }
    m->pages = 0;
    return LC_OK;
}

/* ------------------------------------------------------------------ the calls */

/* A group whose namespace was cleared has no pages, and no position without one either: its model's
 * pages are not valid any more. One look at the end says it: a namespace that is open now has been
 * open all the time, for none is opened twice with one epoch. */
static bool all_open(joint *m) {
    for (uint32_t i = 0; i < m->count; i++)
        if (LC_UNLIKELY(!lci_ns_open(m->groups[i].h, m->groups[i].ns))) {
            refuse(m, i, 0);
            return false;
        }
    return true;
}

static int match_all(joint *m) {
    for (uint32_t i = 0; i < m->count; i++)
        if (LC_UNLIKELY(lc_load(&m->groups[i].h->at->leaving))) {
            m->limit = (int32_t)i;
            return LC_E_CLOSED;
        }
    int rc = pin_deepest(m);
    if (LC_UNLIKELY(rc == LC_OK && !all_open(m))) unpin_all(m);
    return rc;
}

/* The mutexes of own rows, each once and always in the same order. Returns how many there are. */
static uint32_t attachments_of(const joint *m, lcs_attachment **at) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < m->count; i++) {
        lcs_attachment *one = m->groups[i].h->at;
        uint32_t j = n;
        while (j > 0 && at[j - 1] > one) j--;
        if (j > 0 && at[j - 1] == one) continue;
        memmove(at + j + 1, at + j, (n++ - j) * sizeof *at);
        at[j] = one;
    }
    return n;
}

/* One lookup of each index: hits are the groups' pages pinned there, misses those of the sequence behind the
 * position, which have to be computed. */
static void note(const joint *m, lcs_attachment *at, uint32_t n) {
    uint32_t hit = 0;
    for (uint32_t i = 0; i < m->count; i++)
        if (m->groups[i].h->at == at) hit += held_by(m, i) / m->groups[i].parts;
    lci_note_lookup(at, hit + n - m->pages, hit);
}

static int begin(joint *m, lci_group *groups, uint32_t count, const lc_key *keys, uint32_t n,
                 uint32_t page_tokens, uint32_t step) {
    *m = (joint){.groups = groups, .count = count, .keys = keys, .page_tokens = page_tokens,
                 .step = step, .limit = -1};
    if (count == 0 || count > LCI_GROUPS || page_tokens == 0 || step == 0) return LC_E_RANGE;
    m->pages = n / step * step;
    for (uint32_t i = 0; i < count; i++) {
        m->low[i] = m->pages;
        if (groups[i].lease) m->base[i] = groups[i].lease->held;
        bool sound = groups[i].align && groups[i].number < LCI_NUMBERS &&
                     groups[i].parts - 1 < LCI_PARTS;
        int rc = sound ? lci_usable(groups[i].h) : LC_E_RANGE;
        if (LC_UNLIKELY(rc != LC_OK)) {
            m->limit = (int32_t)i;
            return rc;
        }
    }
    return LC_OK;
}

static int end(const joint *m, int rc, int32_t *limit) {
    *limit = m->limit;
    if (rc != LC_OK) return rc;
    for (uint32_t i = 0; i < m->count; i++)
        m->groups[i].first = first_of(m, &m->groups[i], m->pages);
    return (int)m->pages;
}

/* The deepest position, in pages, that every group accepts: a multiple of `step`, 0: none. `limit`
 * is the group that refused the next one, or -1, or the group that an error is about. Each is an
 * answer of about this instant. */
LC_API int lci_peek_groups(lci_group *groups, uint32_t count, const lc_key *keys, uint32_t n,
                           uint32_t page_tokens, uint32_t step, int32_t *limit) {
    joint m;
    int rc = begin(&m, groups, count, keys, n, page_tokens, step);
    if (rc == LC_OK) {
        look_all(&m);
        all_open(&m);
    }
    return end(&m, rc, limit);
}

/* Keys of the parts [from, to) of n pages, page by page. */
LC_API int lci_part_keys(const lc_key *keys, uint32_t n, uint32_t number, uint32_t from,
                         uint32_t to, lc_key *out) {
    if (number >= LCI_NUMBERS || from > to || to > LCI_PARTS) return LC_E_RANGE;
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t part = from; part < to; part++)
            *out++ = lci_part_key(keys[i], number, part);
    return LC_OK;
}

/* The same, and each group's pages from its `first` to the position are pinned: they follow those that
 * its lease holds already. After an error it holds as many as before. */
LC_API int lci_match_groups(lci_group *groups, uint32_t count, const lc_key *keys, uint32_t n,
                            uint32_t page_tokens, uint32_t step, int32_t *limit) {
    joint m;
    lcs_attachment *at[LCI_GROUPS];
    int rc = begin(&m, groups, count, keys, n, page_tokens, step);
    for (uint32_t i = 0; i < count && rc == LC_OK; i++)
        if (LC_UNLIKELY(groups[i].h->at->readonly)) {
            m.limit = (int32_t)i;
            rc = LC_E_READONLY;
        }
    if (LC_LIKELY(rc == LC_OK)) {
        uint32_t mutexes = attachments_of(&m, at);
        for (uint32_t i = 0; i < mutexes; i++) pthread_mutex_lock(&at[i]->rows);
        rc = match_all(&m);
        for (uint32_t i = 0; i < mutexes; i++) {
            if (rc == LC_OK) note(&m, at[i], n);
            pthread_mutex_unlock(&at[i]->rows);
        }
    }
    return end(&m, rc, limit);
}

/* The same for many sequences: that of the keys [offsets[i], offsets[i+1]) is the i-th, as if each were
 * matched by a call of its own. Each group's lease, which begins empty, holds its pages of one sequence
 * after the other. `found` are 2 + 2 * count rows of as many numbers as there are sequences: the
 * positions, the limits, then each group's first page, then how many pages its lease has for the
 * sequence. After an error nothing is pinned, and limits[0] is the group that it is about. */
LC_API int lci_match_groups_many(lci_group *groups, uint32_t count, const lc_key *keys,
                                 const int64_t *offsets, uint32_t sequences, uint32_t page_tokens,
                                 uint32_t step, int32_t *found) {
    int32_t *position = found, *limit = position + sequences, *first = limit + sequences;
    int32_t *held = first + (size_t)count * sequences;
    for (uint32_t s = 0; s < sequences; s++) {
        uint32_t before[LCI_GROUPS], n = (uint32_t)(offsets[s + 1] - offsets[s]);
        for (uint32_t i = 0; i < count && i < LCI_GROUPS; i++) before[i] = groups[i].lease->held;
        int rc = lci_match_groups(groups, count, keys + offsets[s], n, page_tokens, step, &limit[s]);
        if (LC_UNLIKELY(rc < 0)) {
            limit[0] = limit[s];
            if (s > 0) /* else none holds anything, or there are more than there can be */
                for (uint32_t i = 0; i < count; i++) lci_release(groups[i].h, groups[i].lease);
            return rc;
        }
        position[s] = rc;
        for (uint32_t i = 0; i < count; i++) {
            first[(size_t)i * sequences + s] = (int32_t)groups[i].first;
            held[(size_t)i * sequences + s] = (int32_t)(groups[i].lease->held - before[i]);
        }
    }
    return LC_OK;
}
