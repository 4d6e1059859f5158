/* Names: a page that we hold gets its key and is found from then on; and loses it again. */
#include "index.h"

typedef struct naming {
    lci_handle *h;
    lci_held_op *op;
    const lc_key *keys;
    const int64_t *offsets, *starts;
    uint32_t requests, n;
    const int32_t *pages;
    int32_t *out;
    uint8_t *status;
    lc_txn t;
    lci_room room;
    uint32_t request; /* of the next page, and where its key stands */
    int64_t at;
    uint32_t count; /* of the step under way: for each page its key, whether one stands before it, */
    uint32_t key[LCI_BATCH];
    bool root[LCI_BATCH];
    uint32_t there[LCI_BATCH]; /* and the page under the key; LC_NIL: none of ours */
    uint32_t merged[LCI_BATCH], merges;
} naming;

/* ------------------------------------------------------------------ which page gets which key */

/* The arguments as a caller should have them. */
static bool sound(const naming *k) {
    uint64_t total = 0;
    for (uint32_t i = 0; i < k->requests; i++) {
        int64_t length = k->offsets[i + 1] - k->offsets[i];
        if (k->offsets[i] < 0 || k->starts[i] < 0 || k->starts[i] > length) return false;
        total += (uint64_t)(length - k->starts[i]);
    }
    return total == k->n && (k->requests == 0 || k->offsets[k->requests] <= INT32_MAX);
}

static void begin_request(naming *k, uint32_t request) {
    k->request = request;
    k->at = request < k->requests ? k->offsets[request] + k->starts[request] : 0;
}

/* To the first page that is not settled yet. */
static void seek(naming *k) {
    int64_t left = k->op->done;
    begin_request(k, 0);
    while (k->request < k->requests && k->offsets[k->request + 1] - k->at <= left) {
        left -= k->offsets[k->request + 1] - k->at;
        begin_request(k, k->request + 1);
    }
    k->at += left;
}

/* The next batch: which keys. `request` and `at` then stand behind it. */
static void plan(naming *k) {
    k->count = 0;
    while (k->count < LCI_BATCH && k->request < k->requests) {
        if (k->at == k->offsets[k->request + 1]) {
            begin_request(k, k->request + 1);
            continue;
        }
        k->root[k->count] = k->at == k->offsets[k->request];
        k->key[k->count++] = (uint32_t)k->at++;
    }
}

/* ------------------------------------------------------------------ naming */

static int32_t page_of(const naming *k, uint32_t i) { return k->pages[k->op->done + i]; }

/* All pages of the step are ours, pinned, and each there once (`children`, dead while it is held,
 * tells). Before anything is changed: what lookups have found must not be undone. */
static int ours(naming *k) {
    lci_handle *h = k->h;
    for (uint32_t i = 0; i < k->count; i++) {
        uint32_t page = (uint32_t)page_of(k, i);
        k->op->refused = k->op->done + i;
        if (!lci_holds(h, page) || !lc_load(&h->mine[page])) return LC_E_OWNER;
        lc_store(&h->pages[page].children, 0);
    }
    for (uint32_t i = 0; i < k->count; i++) {
        _Atomic uint32_t *mark = &h->pages[page_of(k, i)].children;
        k->op->refused = k->op->done + i;
        if (lc_load(mark)) return LC_E_OWNER;
        lc_store(mark, 1);
    }
    return LC_OK;
}

static int all_ours(naming *k) {
    for (uint32_t i = 0; i < k->n && !k->op->checked; i++) {
        k->op->refused = i;
        if (!lci_holds(k->h, (uint32_t)k->pages[i])) return LC_E_OWNER;
    }
    k->op->checked = 1;
    return LC_OK;
}

/* Bring near what the step reads. */
static void prefetch(const naming *k) {
    const lc_dict *d = &k->h->dict;
    for (uint32_t i = 0; i < k->count; i++) {
        __builtin_prefetch((const void *)&d->buckets[lc_bucket(d, k->keys[k->key[i]].lo)], 1);
        if ((uint32_t)page_of(k, i) < k->h->page_count)
            __builtin_prefetch(&k->h->pages[page_of(k, i)], 1);
    }
    for (uint32_t i = 0; i < k->count; i++) {
        uint32_t head = lc_load(&d->buckets[lc_bucket(d, k->keys[k->key[i]].lo)]);
        if (head < d->nodes) __builtin_prefetch(lc_node_at(d, head));
    }
}

static uint32_t look(const naming *k, uint32_t key, uint32_t *word, uint32_t *length) {
    const lci_handle *h = k->h;
    uint32_t page = lc_dict_look(&h->dict, k->keys[key].lo, k->keys[key].hi, length);
    if (page != LC_NIL) *word = lc_load_acquire(&h->pages[page].word);
    return page;
}

/* The page of the key before, if there is one and it is of this namespace. */
static uint32_t parent_of(const naming *k, uint32_t i) {
    uint32_t word = 0, length;
    if (k->root[i]) return LC_NIL;
    if (i && k->key[i - 1] + 1 == k->key[i]) return k->there[i - 1];
    uint32_t page = look(k, k->key[i] - 1, &word, &length);
    return page != LC_NIL && lci_ns_of(word) == lci_ns_id(k->op->ns) ? page : LC_NIL;
}

/* Fields of a page that is held are dead, and not logged. It stands in its chain before it is
 * READY, and its key before that: see `standing` in lookup.c. */
static void give_name(naming *k, uint32_t page, uint32_t key, uint32_t parent) {
    lci_handle *h = k->h;
    lci_page *p = &h->pages[page];
    lc_store(&p->used, k->op->tick << LCI_TICK_SHIFT);
    lc_store(&p->children, 0);
    lc_store(&p->parent, LC_NIL);
    if (parent != LC_NIL) lci_attach_parent(h, &k->t, page, parent);
    lc_dict_insert(&k->t, &h->dict, page, k->keys[key], lc_load(&p->word));
    lc_txn_set(&k->t, &p->word, LCI_READY | lci_ns_id(k->op->ns) << LCI_NS_SHIFT);
    lci_queue_add(h, &k->t, page);
}

/* The key has a page already. */
static uint8_t met(naming *k, uint32_t i, uint32_t there, uint32_t word, uint32_t parent) {
    lci_handle *h = k->h;
    uint32_t entry = k->op->done + i, state = lci_state_of(word);
    if (lci_ns_of(word) != lci_ns_id(k->op->ns)) return LCI_NO_ROOM;
    k->there[i] = there;
    if (state == LCI_WRITING) return LCI_BUSY_KEY;
    if (state != LCI_READY) {
        k->t.error = LC_E_CORRUPT;
        return LCI_UNKNOWN;
    }
    if (lci_pin_one(h, there) != LC_OK) return LCI_NO_ROOM; /* pinned 65,535 times */
    lci_touch(&h->pages[there], k->op->tick, 0);
    lci_readopt(h, &k->t, there, parent);
    if (k->op->flags & LCI_NAME_MERGE) k->merged[k->merges++] = (uint32_t)k->pages[entry];
    k->out[entry] = (int32_t)there;
    return LCI_PRESENT;
}

/* Pages that the namespace may have yet. */
static uint32_t allowed(const naming *k) {
    const lci_namespace *ns = &k->h->ns[lci_ns_id(k->op->ns)];
    uint32_t quota = lc_load(&ns->quota), used = lc_load(&ns->pages);
    return !quota ? UINT32_MAX : used < quota ? quota - used : 0;
}

static void settle(naming *k) {
    uint32_t room = allowed(k), named = 0;
    k->merges = 0;
    for (uint32_t i = 0; i < k->count && !k->t.error; i++) {
        uint32_t word = 0, length, entry = k->op->done + i, parent = parent_of(k, i);
        uint32_t there = look(k, k->key[i], &word, &length);
        k->out[entry] = k->pages[entry];
        k->there[i] = LC_NIL;
        if (there != LC_NIL) {
            k->status[entry] = met(k, i, there, word, parent);
        } else if (length >= LC_CHAIN_MAX || named == room) {
            k->status[entry] = LCI_NO_ROOM;
            k->op->reason = named == room ? LCI_WHY_QUOTA : LCI_WHY_CHAIN;
        } else {
            k->there[i] = (uint32_t)k->pages[entry];
            give_name(k, k->there[i], k->key[i], parent);
            k->status[entry] = LCI_NEW;
            named++;
        }
    }
    if (k->t.error || !named) return;
    lc_txn_add(&k->t, &k->h->ns[lci_ns_id(k->op->ns)].pages, named);
    lc_txn_add(&k->t, &k->h->root->named, named);
    lc_txn_add(&k->t, &k->h->root->held, -named);
    atomic_fetch_add_explicit(&lcs_client_of(k->h->at, k->h->at->slot)->published_pages, named,
                              memory_order_relaxed);
}

/* Damage: the step is undone, and what it had pinned goes back by hand. */
static void take_back(naming *k) {
    for (uint32_t i = 0; i < k->count; i++) {
        uint32_t entry = k->op->done + i;
        if (k->status[entry] == LCI_PRESENT) lci_unpin_one(k->h, (uint32_t)k->out[entry]);
        k->status[entry] = LCI_UNKNOWN;
    }
}

/* How many keys of the step nobody has: for a quota. */
static uint32_t absent(const naming *k) {
    uint32_t n = 0, word, length;
    for (uint32_t i = 0; i < k->count; i++) n += look(k, k->key[i], &word, &length) == LC_NIL;
    return n;
}

static int name_batch(naming *k) {
    lci_handle *h = k->h;
    uint32_t id = lci_ns_id(k->op->ns);
    plan(k);
    prefetch(k);
    if (lc_load(&h->ns[id].quota)) {
        int rc = lci_make_quota_room(h, &k->t, &k->room, id, absent(k));
        if (rc != LCI_ROOM_MADE) return rc;
    }
    pthread_mutex_lock(&h->at->rows);
    int rc = ours(k);
    if (rc == LC_OK) {
        settle(k);
        lci_doom_held(h, &k->t, k->merged, k->merges, 0);
        lci_step(&k->t);
        if (k->t.error) {
            take_back(k);
        } else {
            k->op->done += k->count;
            lci_let_held_go(h, &k->t, k->merged, k->merges);
        }
        rc = k->t.error;
    }
    pthread_mutex_unlock(&h->at->rows);
    return rc;
}

static int name_some(naming *k) {
    if (!lci_ns_open(k->h, k->op->ns)) return LC_E_CLEARED;
    int rc = all_ours(k);
    seek(k);
    for (uint32_t work = 0; rc == LC_OK && k->op->done < k->n && work < 256; work += LCI_BATCH) {
        rc = name_batch(k);
        if (lcs_lock_wanted(k->h->at)) break;
    }
    return rc == LCI_ROOM_AGAIN ? LC_OK : rc;
}

/* Name pages that we hold: those of request i by its keys from starts[i] on. `out` and `status` say
 * which page stands under each key: ours (LCI_NEW), another's that we have pinned (LCI_PRESENT; with
 * LCI_NAME_MERGE ours is free), or ours, held as before (LCI_BUSY_KEY, LCI_NO_ROOM). LC_E_OWNER:
 * page `op->refused` is not ours; nothing behind `op->done` has changed. LC_E_BUSY, LC_E_INTR:
 * call again with the same `op`. */
LC_API int lci_name(lci_handle *h, lci_held_op *op, const lc_key *keys, const int64_t *offsets,
                    const int64_t *starts, uint32_t requests, const int32_t *pages, uint32_t n,
                    int32_t *out, uint8_t *status, int wait, uint64_t deadline) {
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    naming k = {.h = h, .op = op, .keys = keys, .offsets = offsets, .starts = starts,
                .requests = requests, .n = n, .pages = pages, .out = out, .status = status};
    if (!sound(&k)) return LC_E_RANGE;
    if (!op->tick) op->tick = lci_next_tick(h);
    k.room.eviction.since = op->tick;
    uint64_t begun = lcs_now_ns();
    while (op->done < n) {
        rc = lci_lock(h, &k.t, LCI_OP_NAME, wait, deadline);
        if (rc != LC_OK) return rc;
        rc = name_some(&k);
        int dropped = lci_unlock(h, &k.t);
        if (rc == LC_OK) rc = dropped;
        if (rc == LC_OK && op->done < n) rc = lci_again(begun, wait, deadline);
        if (rc != LC_OK) return rc;
    }
    return LC_OK;
}

/* ------------------------------------------------------------------ unnaming */

static bool pinned_by_others(const lci_handle *h, uint32_t page) {
    uint64_t bits = lc_load_acquire(&h->pages[page].pins) & ~(UINT64_C(1) << h->at->slot);
    for (; bits; bits &= bits - 1)
        if (lc_load_acquire(lci_pin(h, (uint32_t)__builtin_ctzll(bits), page))) return true;
    return false;
}

static int may_unname(const lci_handle *h, uint32_t page) {
    if (page >= h->page_count || !lc_load(&h->mine[page])) return LC_E_OWNER;
    if (lci_state_of(lc_load_acquire(&h->pages[page].word)) != LCI_READY) return LC_E_OWNER;
    return pinned_by_others(h, page) ? LC_E_PINS : LC_OK;
}

/* Off the queue and off its parent, ours; still in its chain. Returns what its word was. What hangs
 * on it has no parent any more. */
static uint32_t mark(lci_handle *h, lc_txn *t, uint32_t page) {
    uint32_t word = lc_load_acquire(&h->pages[page].word);
    if (lci_state_of(word) != LCI_READY) { /* it stands twice among the pages */
        t->error = LC_E_OWNER;
        return word;
    }
    if (lci_queueable(h, page)) lci_queue_remove(h, t, page);
    lci_detach_parent(h, t, page);
    lc_txn_set(t, &h->pages[page].word, lci_held_word(h->at->slot));
    return word;
}

static void forget(lci_handle *h, lc_txn *t, uint32_t page, uint32_t word) {
    lc_dict_unlink(t, &h->dict, page);
    lc_txn_add(t, &h->ns[lci_ns_of(word)].pages, (uint32_t)-1);
    if (word >> LCI_RES_SHIFT) lc_txn_add(t, &h->root->writing, (uint32_t)-1);
    if (word & LCI_KEPT) lc_txn_add(t, &h->root->kept, (uint32_t)-1);
}

/* A step of unnaming. The caller holds `rows`, so that no thread of ours gives up the pin that the
 * page is held by. */
static int unname_batch(lci_handle *h, lc_txn *t, lci_held_op *op, const int32_t *pages,
                        uint32_t n) {
    uint32_t word[LCI_BATCH];
    for (uint32_t i = 0; i < n; i++) {
        op->refused = op->done + i;
        int rc = may_unname(h, (uint32_t)pages[i]);
        if (rc != LC_OK) return rc;
    }
    for (uint32_t i = 0; i < n && !t->error; i++) {
        op->refused = op->done + i;
        word[i] = mark(h, t, (uint32_t)pages[i]);
    }
    /* HELD before the pins: whoever pins after this sees it, as in lci_evict. */
    atomic_thread_fence(memory_order_seq_cst);
    for (uint32_t i = 0; i < n && !t->error; i++) {
        op->refused = op->done + i;
        if (pinned_by_others(h, (uint32_t)pages[i])) t->error = LC_E_PINS;
    }
    for (uint32_t i = 0; i < n && !t->error; i++) forget(h, t, (uint32_t)pages[i], word[i]);
    lc_txn_add(t, &h->root->named, -n);
    lc_txn_add(t, &h->root->held, n);
    lci_step(t);
    if (!t->error) op->done += n;
    return t->error;
}

/* Take the names of ready pages that we pin, and nobody else: they are held again. LC_E_OWNER: page
 * `op->refused` is not pinned by us, or not ready. LC_E_PINS: somebody else pins it. Nothing behind
 * `op->done` has changed. LC_E_BUSY, LC_E_INTR: call again with the same `op`. */
LC_API int lci_unname(lci_handle *h, lci_held_op *op, const int32_t *pages, uint32_t n, int wait,
                      uint64_t deadline) {
    lc_txn t;
    int rc = lcs_usable(h->at);
    if (rc != LC_OK) return rc;
    if (h->at->readonly) return LC_E_READONLY;
    uint64_t begun = lcs_now_ns();
    while (op->done < n) {
        rc = lci_lock(h, &t, LCI_OP_UNNAME, wait, deadline);
        if (rc != LC_OK) return rc;
        lci_collect(h, &t, 256);
        rc = t.error;
        pthread_mutex_lock(&h->at->rows);
        for (uint32_t work = 0; rc == LC_OK && op->done < n && work < 256; work += LCI_BATCH) {
            uint32_t left = n - op->done;
            rc = unname_batch(h, &t, op, pages + op->done, left < LCI_BATCH ? left : LCI_BATCH);
        }
        pthread_mutex_unlock(&h->at->rows);
        int dropped = lci_unlock(h, &t);
        if (rc == LC_OK) rc = dropped;
        if (rc == LC_OK && op->done < n) rc = lci_again(begun, wait, deadline);
        if (rc != LC_OK) return rc;
    }
    return LC_OK;
}
