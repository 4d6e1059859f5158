/* Reserving: room for pages that a client is about to write. */
#include "index.h"

#include <sched.h>

typedef struct reserve {
    lci_handle *h;
    lci_reserve_op *op;
    const lc_key *keys; /* all of them */
    uint32_t n, start;
    int32_t *page;
    uint8_t *status;
    lc_txn t;
    lci_room room;
    uint64_t tick;
    uint32_t kept, kept_gen; /* `made` and `gen` as of the last safe point */
    bool full; /* of the batch at hand: the chain of an absent key had no room */
    bool weighs; /* as `op->admission`, where pages are ranked */
    uint32_t continued; /* one past the last key whose page was there when the call began */
    uint32_t head[LCI_BATCH]; /* what the buckets of its keys led to before its first page was made */
} reserve;

static void keep(reserve *r) {
    if (r->t.error) return;
    lci_step(&r->t);
    r->kept = r->op->made;
    r->kept_gen = r->op->gen;
}

/* ------------------------------------------------------------------ before the lock */

/* A key's bucket is asked for, then its chain's first record, each some keys before it is needed:
 * so its two cache misses are not waited for. */
static void ask_for(const reserve *r, uint32_t i) {
    const lc_dict *d = &r->h->dict;
    if (i + 16 < r->start)
        __builtin_prefetch((const void *)&d->buckets[lc_bucket(d, r->keys[i + 16].lo)]);
    if (i + 8 >= r->start) return;
    uint32_t head = lc_load(&d->buckets[lc_bucket(d, r->keys[i + 8].lo)]);
    if (head < d->nodes) lc_prefetch_write(lc_node_at(d, head));
}

static void touch_chain(reserve *r) {
    lc_found found;
    for (uint32_t i = 0; i < r->start; i++) {
        ask_for(r, i);
        lc_dict_find(&r->h->dict, r->keys[i].lo, r->keys[i].hi, &found);
        if (found.node != LC_NIL) lci_touch(&r->h->pages[found.node], r->tick, 0);
    }
}

/* Pin what is there already, wherever in the chain, so that making room cannot take it. */
static int pin_present(reserve *r) {
    lci_handle *h = r->h;
    pthread_mutex_lock(&h->at->rows);
    int rc = lci_pin_ready(h, r->keys + r->start, r->n - r->start, lci_ns_id(r->op->ns), r->tick,
                           r->page, r->status);
    pthread_mutex_unlock(&h->at->rows);
    return rc;
}

/* ------------------------------------------------------------------ under the lock */

static uint32_t find_locked(const lci_handle *h, const lc_key *key, uint32_t *word,
                            uint32_t *length) {
    uint32_t page = lc_dict_look(&h->dict, key->lo, key->hi, length);
    if (page != LC_NIL) *word = lc_load_acquire(&h->pages[page].word);
    return page;
}

static uint32_t bucket_head(const reserve *r, uint32_t i) {
    const lc_dict *d = &r->h->dict;
    return lc_load(&d->buckets[lc_bucket(d, r->keys[r->start + i].lo)]);
}

/* What the word of a new page is, that of the i-th key from `start` on. */
static uint32_t new_word(const reserve *r, uint32_t i) {
    uint32_t run = r->op->run;
    uint32_t flag = run && (r->start + i + 1) % run == 0 ? LCI_INDEPENDENT : 0;
    return LCI_WRITING | flag | lci_ns_id(r->op->ns) << LCI_NS_SHIFT |
           (r->op->rid + 1) << LCI_RES_SHIFT | r->op->group << LCI_GROUP_SHIFT;
}

/* Hang a new page on its parent, if it may. A parent that is new in this step as well is
 * as dead as the page itself if the step is undone: its count needs no log, and it is on no list. */
static void hang(reserve *r, lci_page *p, uint32_t word, uint32_t parent, bool parent_is_new) {
    lci_handle *h = r->h;
    if (parent != LC_NIL && !lci_may_hang(h, parent, word)) parent = LC_NIL;
    lc_store(&p->parent, parent);
    if (parent == LC_NIL) return;
    lci_page *q = &h->pages[parent];
    lc_store(&p->parent_gen, lc_load(&q->gen));
    if (parent_is_new) {
        lc_store(&q->children, lc_load(&q->children) + 1);
    } else {
        lci_child_comes(h, &r->t, parent);
    }
}

/* Key i gets this page: pinned, hung on its parent, then linked under its key. Fields of a page that
 * was free are dead, so they are stored without the log. The caller holds `rows`. */
static void make_page(reserve *r, uint32_t i, uint32_t page, uint32_t parent, bool parent_is_new) {
    lci_handle *h = r->h;
    lc_txn *t = &r->t;
    lci_page *p = &h->pages[page];
    if (!lci_pin_free(h, page)) {
        t->error = LC_E_CORRUPT;
        return;
    }
    lc_store(&p->used, lci_used_by(h, r->keys[r->start + i], page, parent, r->op->hint, r->tick));
    lc_store(&p->children, 0);
    lc_store(&p->queue.prev, i >= LCI_HINT ? (uint32_t)r->page[i - LCI_HINT] : LC_NIL);
    uint32_t word = new_word(r, i);
    hang(r, p, word, parent, parent_is_new);
    lc_dict_insert(t, &h->dict, page, r->keys[r->start + i], word);
    r->page[i] = (int32_t)page;
    r->status[i] = LCI_NEW;
    r->op->made++;
}

/* Prefetch the chain heads of keys [from, to) and their buckets: all of them are read one by one
 * right afterwards. */
static void prefetch_keys(const reserve *r, uint32_t from, uint32_t to) {
    const lc_dict *d = &r->h->dict;
    const lc_key *keys = r->keys + r->start;
    uint32_t end = to + LCI_BATCH < r->n - r->start ? to + LCI_BATCH : r->n - r->start;
    for (uint32_t i = to; i < end; i++)
        lc_prefetch_write((const void *)&d->buckets[lc_bucket(d, keys[i].lo)]);
    for (uint32_t i = from; i < to; i++) {
        uint32_t head = lc_load(&d->buckets[lc_bucket(d, keys[i].lo)]);
        if (head < d->nodes) __builtin_prefetch(lc_node_at(d, head));
    }
    if (!r->h->ranks) return;
    for (uint32_t i = from; i < to; i++) lch_prefetch(&r->h->learnt, keys[i]);
}

/* Look at keys [from, to) again, now that no other process changes anything: pin what has become
 * ready, note what others write, count what is absent. `*full`: an absent key's chain has no
 * room. */
static uint32_t classify(reserve *r, uint32_t from, uint32_t to, bool *full) {
    lci_handle *h = r->h;
    uint32_t absent = 0, word = 0, length, ns = lci_ns_id(r->op->ns);
    prefetch_keys(r, from, to);
    for (uint32_t i = from; i < to && !r->t.error; i++) {
        if (r->status[i] == LCI_PRESENT) continue;
        uint32_t page = find_locked(h, &r->keys[r->start + i], &word, &length);
        r->status[i] = LCI_UNKNOWN;
        if (page == LC_NIL) {
            absent++;
            *full |= length >= LC_CHAIN_MAX;
        } else if (lci_ns_of(word) != ns) {
            r->status[i] = LCI_NO_ROOM; /* another namespace's: equal digests, not to be shared */
        } else if (lci_state_of(word) == LCI_WRITING) {
            r->status[i] = LCI_BUSY_KEY;
            r->page[i] = (int32_t)page;
            lci_look_if_due(h, &r->op->look); /* a dead writer would keep it for ever */
        } else if (lci_state_of(word) == LCI_READY) {
            int rc = lci_pin_one(h, page);
            if (rc != LC_OK) {
                r->t.error = rc;
                break;
            }
            r->page[i] = (int32_t)page;
            r->status[i] = LCI_PRESENT;
        } else {
            r->t.error = LC_E_CORRUPT; /* EVICTING outside a critical section */
        }
    }
    return absent;
}

/* How many of the absent keys the quota lets in. */
static uint32_t allowed(const reserve *r, uint32_t absent) {
    const lci_namespace *ns = &r->h->ns[lci_ns_id(r->op->ns)];
    uint32_t quota = lc_load(&ns->quota), used = lc_load(&ns->pages);
    if (!quota || used + absent <= quota) return absent;
    return used < quota ? quota - used : 0;
}

/* Room for the absent keys of a batch: in the namespace, then in the pool. */
static int make_room(reserve *r, uint32_t want) {
    r->room.eviction.outbid = false;
    int rc = lci_make_quota_room(r->h, &r->t, &r->room, lci_ns_id(r->op->ns), want);
    bool outbid = r->room.eviction.outbid;
    if (rc == LCI_ROOM_MADE)
        rc = lci_make_room(r->h, &r->t, &r->room, outbid ? allowed(r, want) : want);
    if (rc == LC_E_GROW) r->op->wanted = r->room.wanted;
    return rc;
}

/* ------------------------------------------------------------------ what is worth writing */

/* The word of the page before the i-th key from `start` on; 0: there is none, or nothing is known. */
static uint64_t word_before(const reserve *r, uint32_t i) {
    uint32_t at = r->start + i;
    return at ? lci_word_of(r->h, r->keys[at - 1], r->tick) : 0;
}

#define PRICELESS UINT32_MAX

/* The rank that each absent key's page would have, or that of the best one behind it in the batch: it
 * is found with this one alone. What was promised is not weighed, nor what a page hangs on that is
 * there. */
static void weigh(const reserve *r, uint32_t from, uint32_t to, uint32_t *worth) {
    const lci_handle *h = r->h;
    uint32_t n = 0, owed = lci_promise_left(h, lci_ns_id(r->op->ns), r->op->group);
    uint64_t before = word_before(r, from);
    for (uint32_t i = from; i < to; i++) {
        if (r->status[i] == LCI_UNKNOWN) {
            before = lch_expected(&h->learnt, r->keys[r->start + i], before, r->op->hint, r->tick);
            worth[n] = n < owed || i < r->continued ? PRICELESS : lci_rank(h, before);
            n++;
        } else if (r->page[i] >= 0) {
            before = lc_load(&h->pages[r->page[i]].used);
        }
    }
    for (; n > 1; n--)
        if (worth[n - 1] > worth[n - 2]) worth[n - 2] = worth[n - 1];
}

/* Room for the absent keys of a batch, as far as each is worth the page that goes for it: worth falls
 * from key to key, and what is given up for them rises. */
static int make_worthy_room(reserve *r, uint32_t from, uint32_t to, uint32_t absent) {
    uint32_t worth[LCI_BATCH];
    if (LC_LIKELY(!r->weighs)) return make_room(r, absent);
    weigh(r, from, to, worth);
    int rc = LCI_ROOM_MADE;
    for (uint32_t i = 0, end; i < absent && rc == LCI_ROOM_MADE; i = end) {
        for (end = i + 1; end < absent && worth[end] == worth[i];) end++;
        r->room.eviction.spared = worth[i] + 1; /* 0 of what is not weighed */
        rc = make_room(r, end);
        if (r->room.eviction.outbid) break;
    }
    return rc;
}

/* Pages that were not worth writing are remembered like those that went: should they be asked for
 * again, they are worth more. Without the lock: all of it is advice. */
static void pass_by(const reserve *r) {
    uint32_t rest = r->n - r->start, i = 0;
    while (i < rest && r->status[i] != LCI_NO_ROOM) i++;
    uint64_t word = word_before(r, i);
    for (; i < rest; i++) {
        lc_key key = r->keys[r->start + i];
        if (i + 8 < rest) lch_prefetch(&r->h->learnt, r->keys[r->start + i + 8]);
        if (r->status[i] != LCI_NO_ROOM) continue;
        word = lci_pass_by(r->h, key, word, r->op->hint, r->tick);
    }
}

/* ------------------------------------------------------------------ taking pages */

/* No more pages: what is lacking from key i on stays so. Where nothing is, there is nothing to stop. */
static void stop(reserve *r, uint32_t i, uint32_t why) {
    bool lacking = false;
    for (uint32_t k = i; k < r->n - r->start; k++) {
        if (r->status[k] == LCI_PRESENT) continue;
        r->status[k] = LCI_NO_ROOM;
        lacking = true;
    }
    if (!lacking) return;
    bool grows = lc_load(&r->h->root->grown) < r->h->page_count;
    r->op->stopped = 1;
    r->op->reason = why == LCI_WHY_PINNED && grows ? LCI_WHY_MEMORY : why;
    r->op->kept = lc_load(&r->h->root->kept);
}

/* Why so many of the absent keys get no page, if nothing else stands in the way. */
static uint32_t why_less(const reserve *r, uint32_t want, uint32_t absent) {
    if (r->room.eviction.outbid) return LCI_WHY_WORTH;
    return want < absent ? LCI_WHY_QUOTA : LCI_WHY_PINNED;
}

/* Pages for the absent keys of a batch. Fewer than asked for: `*why` says why. */
static uint32_t take_pages(reserve *r, uint32_t absent, uint32_t *pages, uint32_t *why) {
    lci_handle *h = r->h;
    uint32_t want = allowed(r, absent);
    *why = why_less(r, want, absent);
    if (!want || (*why == LCI_WHY_WORTH && !lci_available(h))) return 0; /* and no reservation is opened */
    *why = LCI_WHY_RESERVATIONS;
    if (!r->op->gen) {
        if (!lci_open_reservation(h, &r->t, r->op->shards, r->op->ns, &r->op->rid, &r->op->gen))
            return 0;
        if (r->op->team) lci_open_shards(h, r->op);
    }
    uint32_t room = lci_list_room(h, &h->res[r->op->rid].pages);
    if (room >= want) *why = why_less(r, want, absent);
    return lci_take_free(h, &r->t, pages, room < want ? room : want);
}

/* Room in the chains of the absent keys, before any page is taken. */
static void make_chain_room(reserve *r, uint32_t from, uint32_t to) {
    lci_handle *h = r->h;
    for (uint32_t i = from; i < to && !r->t.error; i++) {
        if (r->status[i] != LCI_UNKNOWN) continue;
        uint64_t lo = r->keys[r->start + i].lo;
        if (LC_UNLIKELY(lc_dict_chain(&h->dict, lo) >= LC_CHAIN_MAX))
            lci_evict_from_chain(h, &r->t, &r->room.eviction, lo);
    }
}

/* The page of the key before `i`, if it is there and lives. */
static uint32_t parent_of(const reserve *r, uint32_t i) {
    uint32_t at = r->start + i, word = 0, length;
    if (at == 0) return LC_NIL;
    return find_locked(r->h, &r->keys[at - 1], &word, &length);
}

/* Must the first page hang on one that is not there? Asked again after room was made, which spares this
 * call's chain but for a tick that was lost to a race. */
static bool headless(const reserve *r) {
    bool useless = r->weighs && r->start && !r->op->run;
    if (!r->op->linked && !useless) return false;
    uint32_t parent = parent_of(r, 0);
    return parent == LC_NIL || !lci_may_hang(r->h, parent, new_word(r, 0));
}

/* A key that stands twice in the batch: the first has made its page, which we write. While the bucket
 * leads where it led, no page of this batch has come into the chain, and the key is absent from it as
 * it was: such a page was free before, so no bucket led to it. Only other chains are walked again. */
static uint32_t twin_of(const reserve *r, uint32_t i, uint32_t from, bool *full) {
    const lc_key *key = &r->keys[r->start + i];
    uint32_t word = 0, length = 0, twin = LC_NIL;
    if (r->full || bucket_head(r, i) != r->head[i - from]) twin = find_locked(r->h, key, &word, &length);
    *full = length >= LC_CHAIN_MAX;
    return twin;
}

/* Go through a batch in order: each key hangs on the one before it. Returns how many of the taken
 * pages were used. */
static uint32_t place(reserve *r, uint32_t from, uint32_t to, const uint32_t *pages, uint32_t got,
                      uint32_t why) {
    uint32_t parent = parent_of(r, from), used = 0;
    bool parent_is_new = false, full;
    for (uint32_t i = from; i < to; i++) r->head[i - from] = bucket_head(r, i);
    for (uint32_t i = from; i < to && !r->t.error; i++) {
        bool is_new = false;
        if (r->status[i] == LCI_UNKNOWN) {
            uint32_t twin = twin_of(r, i, from, &full);
            if (twin != LC_NIL) {
                r->page[i] = (int32_t)twin;
                r->status[i] = LCI_BUSY_KEY;
            } else if (i == 0 && headless(r)) {
                stop(r, i, LCI_WHY_HEAD);
                break;
            } else if (used == got || full) {
                stop(r, i, used == got ? why : LCI_WHY_CHAIN);
                break;
            } else {
                make_page(r, i, pages[used++], parent, parent_is_new);
                is_new = true;
            }
        } else if (r->status[i] == LCI_NO_ROOM) {
            stop(r, i, LCI_WHY_CHAIN);
            break;
        } else if (r->status[i] == LCI_PRESENT) {
            lci_readopt(r->h, &r->t, (uint32_t)r->page[i], parent);
        }
        parent = (uint32_t)r->page[i];
        parent_is_new = is_new;
    }
    return used;
}

static void settle_locked(reserve *r, uint32_t from, uint32_t to, uint32_t absent) {
    uint32_t pages[LCI_BATCH], why = 0, got = 0;
    if (absent) {
        got = take_pages(r, absent, pages, &why);
        for (uint32_t i = 0; i < got; i++) lc_prefetch_write(&r->h->pages[pages[i]]);
    }
    uint32_t before = r->op->made, used = place(r, from, to, pages, got, why);
    if (r->t.error) return;
    lci_give_free(r->h, &r->t, pages + used, got - used);
    uint32_t made = r->op->made - before;
    if (made) {
        /* In the same step as the pages became WRITING: a reaper of ours finds them listed. */
        if (lci_list_push(r->h, &r->t, &r->h->res[r->op->rid].pages, pages, made) != made)
            r->t.error = LC_E_CORRUPT; /* there was room for them */
        lci_count_named(r->h, &r->t, new_word(r, 0), made);
        lc_txn_add(&r->t, &r->h->root->named, made);
        lc_txn_add(&r->t, &r->h->root->writing, made);
        lc_raise(&lcs_client_of(r->h->at, r->h->at->slot)->reserved_pages, made);
    }
}

static int settle_batch(reserve *r, uint32_t from, uint32_t to) {
    pthread_mutex_t *rows = &r->h->at->rows;
    pthread_mutex_lock(rows);
    r->full = false;
    uint32_t absent = classify(r, from, to, &r->full);
    pthread_mutex_unlock(rows);
    if (r->t.error) return r->t.error;
    if (absent) {
        int rc = make_worthy_room(r, from, to, absent);
        if (rc != LCI_ROOM_MADE) return rc;
        if (r->full && !r->room.eviction.outbid) make_chain_room(r, from, to);
        keep(r); /* pages freed in this step must not be used again in it */
    }
    pthread_mutex_lock(rows);
    settle_locked(r, from, to, absent);
    pthread_mutex_unlock(rows);
    if (r->t.error) return r->t.error;
    keep(r);
    r->op->cursor = to;
    return LC_OK;
}

/* Can there be pages for all keys, if nothing is pinned? Else a caller that needs all of them would
 * have pages evicted for nothing. */
static bool too_many(const reserve *r, uint32_t *why) {
    const lci_root *root = r->h->root;
    uint32_t rest = r->n - r->start, present = 0;
    for (uint32_t i = 0; i < rest; i++) present += r->status[i] == LCI_PRESENT;
    uint32_t quota = lc_load(&r->h->ns[lci_ns_id(r->op->ns)].quota);
    uint64_t taken = (uint64_t)lc_load(&root->kept) + lc_load(&root->held) + lc_load(&root->writing);
    bool beyond = quota && rest > quota; /* the quota counts what is there already */
    *why = beyond ? LCI_WHY_QUOTA : LCI_WHY_PINNED;
    return beyond || rest - present + taken > r->h->page_count;
}

/* What another rank has begun is joined whole. Keys that are not there stay so: it found no room for
 * them, or they went since. Looks at all keys under one hold of the lock. True: this call is through, or
 * has to come again, as the other rank is making pages. */
static bool join(reserve *r) {
    lci_reserve_op *op = r->op;
    uint32_t rest = r->n - r->start;
    bool full = false;
    pthread_mutex_lock(&r->h->at->rows);
    classify(r, 0, rest, &full);
    pthread_mutex_unlock(&r->h->at->rows);
    if (r->t.error) return true;
    int rc = lci_join(r->h, &r->t, op, r->page, r->status, rest);
    if (rc == LCI_JOIN_LATER) {
        uint64_t now = lcs_now_ns();
        if (!op->later) op->later = now + LCI_JOIN_WAIT;
        return now < op->later;
    }
    if (rc < 0) r->t.error = rc;
    if (rc != LCI_JOINED) return rc < 0;
    r->kept = op->made;
    r->kept_gen = op->gen;
    for (uint32_t i = 0; i < rest; i++) {
        if (r->status[i] == LCI_UNKNOWN) r->status[i] = LCI_NO_ROOM;
        if (r->status[i] == LCI_NO_ROOM) op->reason = LCI_WHY_TEAM;
    }
    op->cursor = rest;
    return true;
}

/* Work under one hold of the lock: at most LCI_HOLD keys, fewer when others wait. */
static int settle(reserve *r) {
    uint32_t rest = r->n - r->start, worked = 0, why;
    if (!lci_ns_open(r->h, r->op->ns)) return LC_E_CLEARED;
    if (r->op->team && r->op->cursor == 0 && !r->op->gen && join(r)) return r->t.error;
    if (r->op->cursor == 0 && headless(r)) stop(r, 0, LCI_WHY_HEAD);
    if (r->op->whole && r->op->cursor == 0 && too_many(r, &why)) stop(r, 0, why);
    while (r->op->cursor < rest && !r->op->stopped) {
        uint32_t to = r->op->cursor + LCI_BATCH < rest ? r->op->cursor + LCI_BATCH : rest;
        int rc = settle_batch(r, r->op->cursor, to);
        if (rc == LCI_ROOM_AGAIN) break;
        if (rc != LC_OK) return rc;
        worked += LCI_BATCH;
        if (worked >= LCI_HOLD || lci_give_way(r->h, worked)) break;
    }
    return LC_OK;
}

/* What the step that was rolled back had taken in our row has to be given back by hand. */
static void unpin_unlisted(reserve *r) {
    lci_handle *h = r->h;
    uint32_t seen = 0, made = r->kept;
    pthread_mutex_lock(&h->at->rows);
    for (uint32_t i = 0; i < r->n - r->start; i++) {
        if (r->status[i] != LCI_NEW || ++seen <= made) continue;
        lci_unpin_one(h, (uint32_t)r->page[i]);
        r->status[i] = LCI_UNKNOWN;
    }
    r->op->made = made;
    r->op->gen = r->kept_gen;
    pthread_mutex_unlock(&h->at->rows);
}

static int locked_part(reserve *r, int wait, uint64_t deadline) {
    lci_handle *h = r->h;
    uint64_t begun = lcs_now_ns();
    lci_look_begin(h, &r->op->look, begun);
    while (r->op->cursor < r->n - r->start && !r->op->stopped) {
        int rc = lci_lock(h, &r->t, LCI_OP_RESERVE, wait, deadline);
        if (rc != LC_OK) return rc;
        r->kept = r->op->made;
        r->kept_gen = r->op->gen;
        lci_collect(h, &r->t, 256);
        if (lc_load(&h->root->ticket_used)) lci_settle_tickets(h, &r->t, 256);
        if (!r->t.error) rc = settle(r);
        if (rc == LC_E_CORRUPT || rc == LC_E_PINS) r->t.error = rc;
        bool undone = r->t.error != 0;
        int dropped = lci_unlock(h, &r->t);
        if (undone) unpin_unlisted(r);
        if (dropped != LC_OK) return dropped;
        if (rc != LC_OK) return rc;
        bool more = r->op->cursor < r->n - r->start && !r->op->stopped;
        if (r->op->later && !r->op->gen) sched_yield(); /* to a rank that is making pages */
        if (more && (rc = lci_again(begun, wait, deadline)) != LC_OK) return rc;
    }
    return (int)r->op->made;
}

/* There was no room from some key on: from there once more. Keys after it are missing or present,
 * see `stop`, and are looked at again in their turn. */
static void try_again(reserve *r) {
    uint32_t rest = r->n - r->start, i = 0;
    while (i < rest && r->status[i] != LCI_NO_ROOM) i++;
    r->op->cursor = i;
    r->op->stopped = r->op->reason = r->op->kept = 0;
    lci_room_again(r->h, &r->room, &r->op->tick);
    r->tick = r->op->tick;
    touch_chain(r); /* used by this call, as before */
}

/* What is made and what is not; then, without the lock, whether a dead client holds what is lacking. */
static int reserve_all(reserve *r, int wait, uint64_t deadline) {
    lci_handle *h = r->h;
    for (;;) {
        if (wait == LC_TRY ? pthread_mutex_trylock(&h->at->door)
                           : pthread_mutex_lock(&h->at->door))
            return LC_E_BUSY;
        int made = locked_part(r, wait, deadline);
        pthread_mutex_unlock(&h->at->door);
        bool less = r->op->stopped && r->op->reason != LCI_WHY_WORTH;
        if (made < 0 || LC_LIKELY(!less && !r->op->look.due)) return made;
        int found = lci_look(h, &r->op->look, less, wait, deadline);
        if (found < 0) return found;
        if (!less || !found) return made;
        try_again(r);
    }
}

/* A caller that needs all of them has got fewer: they go, and what was present stays pinned. */
static int give_back(reserve *r, int wait, uint64_t deadline) {
    lci_handle *h = r->h;
    int rc = r->op->gen ? lci_abandon(h, r->op->rid, r->op->gen, wait, deadline) : LC_OK;
    if (rc != LC_OK && rc != LC_E_STALE) return rc;
    pthread_mutex_lock(&h->at->rows);
    for (uint32_t i = 0; i < r->n - r->start; i++) {
        if (r->status[i] != LCI_NEW) continue;
        lci_unpin_one(h, (uint32_t)r->page[i]);
        r->status[i] = LCI_NO_ROOM;
    }
    r->op->made = r->op->gen = 0;
    pthread_mutex_unlock(&h->at->rows);
    return LC_OK;
}

/* Reserve pages for keys [start, n): see `op->run`, `op->group`, `op->whole` and `op->linked`. Returns the
 * number of new pages; LC_E_BUSY, LC_E_INTR and LC_E_GROW: call again with the same `op`, it
 * continues where it was. After any other error the caller gives back what `page` and `status` say
 * it holds. */
LC_API int lci_reserve(lci_handle *h, lci_reserve_op *op, const lc_key *keys, uint32_t n,
                       uint32_t start, int32_t *page, uint8_t *status, int wait,
                       uint64_t deadline) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    if (lc_load(&lcs_header_of(h->at)->disabled)) return LC_E_DISABLED;
    if (start > n || op->shards == 0 || op->shards > LCI_SHARDS) return LC_E_RANGE;
    if (op->group >= LCI_NUMBERS || (op->team && op->shard >= op->shards)) return LC_E_RANGE;
    if (!lci_ns_open(h, op->ns)) return LC_E_CLEARED;
    reserve r = {.h = h, .op = op, .keys = keys, .n = n, .start = start,
                 .page = page, .status = status};
    if (!op->tick) op->tick = lci_next_tick(h);
    r.tick = op->tick;
    r.room.eviction.by = lci_ns_id(op->ns) + 1;
    r.room.eviction.by_group = op->group + 1;
    r.room.eviction.since = r.tick; /* the same on every call: this chain counts as used by now */
    r.room.eviction.parked = &op->parked;
    r.room.look = &op->look;
    r.room.doomed = &op->doomed;
    r.room.no_memory = op->no_memory != 0;
    r.weighs = op->admission && !op->whole && h->ranks;
    if (!op->pinned) {
        touch_chain(&r);
        rc = pin_present(&r);
        if (rc != LC_OK) return rc;
        op->pinned = 1;
    }
    for (uint32_t i = r.weighs ? n - start : 0; i && !r.continued; i--)
        if (status[i - 1] == LCI_PRESENT) r.continued = i;
    rc = reserve_all(&r, wait, deadline);
    bool passed = op->reason == LCI_WHY_WORTH || op->reason == LCI_WHY_HEAD;
    if (rc >= 0 && r.weighs && op->stopped && passed) pass_by(&r);
    if (rc > 0 || r.weighs) lci_learn_if_due(h, r.tick, wait, deadline);
    if (LC_UNLIKELY(rc > 0 && op->whole && op->stopped)) rc = give_back(&r, wait, deadline);
    if (LC_UNLIKELY(rc > 0 && op->team && !op->joined)) {
        int listed = lci_list_whole(h, op, wait, deadline);
        if (listed != LC_OK) return listed;
    }
    return rc;
}

/* Unpin what a reserve holds, once: after a signal the caller calls again. */
LC_API int lci_unreserve(lci_handle *h, lci_reserve_op *op, const int32_t *page,
                         const uint8_t *status, uint32_t n) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK && rc != LC_E_RETIRED) return rc;
    pthread_mutex_lock(&h->at->rows);
    rc = LC_OK;
    for (uint32_t i = 0; i < n && !op->unpinned; i++) {
        if (status[i] != LCI_NEW && status[i] != LCI_PRESENT) continue;
        int one = (uint32_t)page[i] < h->page_count ? lci_unpin_one(h, (uint32_t)page[i])
                                                    : LC_E_RANGE;
        if (one != LC_OK) rc = one;
    }
    op->unpinned = 1;
    pthread_mutex_unlock(&h->at->rows);
    return rc;
}

/* End a reservation whose shards are not all published. Its pages are gone from every lookup when
 * this returns, or (LC_E_BUSY, LC_E_INTR) call again. LC_E_STALE: it had ended before. */
LC_API int lci_abandon(lci_handle *h, uint32_t rid, uint32_t gen, int wait, uint64_t deadline) {
    lc_txn t;
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    if (rid >= h->res_count) return LC_E_RANGE;
    lci_reservation *r = &h->res[rid];
    uint64_t begun = lcs_now_ns();
    for (bool more = true; more;) {
        if (lc_load_acquire(&r->gen) != gen) return LC_E_STALE;
        rc = lci_lock(h, &t, LCI_OP_ABANDON, wait, deadline);
        if (rc != LC_OK) return rc;
        bool mine = lc_load(&r->gen) == gen;
        if (mine && !lci_doom_reservation(h, &t, rid, 0)) lci_flag_ended(h, rid); /* doomed before */
        lci_collect(h, &t, 256);
        more = mine && !t.error && lc_load(&r->gen) == gen && lc_load(&r->state) == LCI_RES_DOOMED;
        rc = lci_unlock(h, &t);
        if (rc == LC_OK && more) rc = lci_again(begun, wait, deadline);
        if (rc != LC_OK) return rc;
    }
    lci_notify(h);
    return LC_OK;
}

/* Free up to `want` pages. Adds to `*freed`; LC_E_BUSY, LC_E_INTR: call again. */
LC_API int lci_evict_pages(lci_handle *h, uint32_t want, uint32_t *freed, int wait,
                           uint64_t deadline) {
    lc_txn t;
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    if (lci_look_due(h, lcs_now_ns())) {
        lci_look_op look = {0};
        lc_store(&h->root->looking_ns, lcs_now_ns());
        rc = lci_look(h, &look, false, wait, deadline);
        if (rc < 0) return rc;
    }
    /* Of this call: it comes back early only if it has waited long for the lock, and what it parked is in
     * the index. Called again, with a new tick, it looks at all of it anew, as LRU does. */
    uint32_t parked = 0;
    lci_eviction e = {.since = lci_next_tick(h), .parked = &parked};
    while (*freed < want && !e.exhausted) {
        rc = lci_lock(h, &t, LCI_OP_EVICT, wait, deadline);
        if (rc != LC_OK) return rc;
        uint32_t work = lci_collect(h, &t, 256);
        if (lc_load(&h->root->ticket_used)) lci_settle_tickets(h, &t, 256);
        if (lc_load(&h->root->doomed)) lci_collect_doomed(h, &t, 256);
        for (int i = 0; i < 8 && *freed < want && !e.exhausted && !t.error; i++) {
            uint32_t n = lci_evict(h, &t, &e, want - *freed);
            lci_step(&t);
            if (!t.error) *freed += n;
            if (lci_give_way(h, (uint32_t)(i + 1) * LCI_BATCH)) break;
        }
        if (work) e.exhausted = false; /* more may have ended that was not taken in yet */
        rc = lci_unlock(h, &t);
        if (rc != LC_OK) return rc;
    }
    return LC_OK;
}
