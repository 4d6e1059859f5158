/* Names: a page that we hold gets its key, and is found from then on.
 *
 * What lookups have found must not be taken back when we die. So the pages of one hold of the lock
 * pass through a reservation: WRITING, listed and linked by steps that are undone as usual; then
 * its one shard is published, as by lci_publish, and then it is collected. After a
 * death, what was not published is doomed, and what was published is collected. */
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
    uint32_t merged[LCI_BATCH], merges, fresh[LCI_BATCH], news; /* ours that go; that stay */
    uint32_t rid, gen;       /* what this hold's pages pass through; gen 0: nothing so far */
    int32_t made[LCI_HOLD]; /* these, of the steps that are over */
    uint32_t made_count;
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

/* The next batch: which keys. `request` and `at` are then at its end. */
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
        lc_prefetch_write((const void *)&d->buckets[lc_bucket(d, k->keys[k->key[i]].lo)]);
        if (k->h->ranks) lch_prefetch(&k->h->learnt, k->keys[k->key[i]]);
        if ((uint32_t)page_of(k, i) < k->h->page_count)
            lc_prefetch_write(&k->h->pages[page_of(k, i)]);
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

/* What the words of the pages that this hold names are. */
static uint32_t new_word(const naming *k) {
    uint32_t flag = k->op->flags & LCI_NAME_INDEPENDENT ? LCI_INDEPENDENT : 0;
    return LCI_WRITING | flag | lci_ns_id(k->op->ns) << LCI_NS_SHIFT | (k->rid + 1) << LCI_RES_SHIFT;
}

/* The page of the key before, if there is one. */
static uint32_t parent_of(const naming *k, uint32_t i) {
    uint32_t word = 0, length;
    if (k->root[i]) return LC_NIL;
    if (i && k->key[i - 1] + 1 == k->key[i]) return k->there[i - 1];
    return look(k, k->key[i] - 1, &word, &length);
}

/* Fields of a page that is held are dead, and not logged. It hangs on a page of its kind alone. */
static void give_name(naming *k, uint32_t page, uint32_t key, uint32_t parent) {
    lci_handle *h = k->h;
    lci_page *p = &h->pages[page];
    uint32_t word = new_word(k);
    lc_store(&p->used, lci_used_by(h, k->keys[key], page, parent, LCH_HINT_NONE, k->op->tick));
    lc_store(&p->children, 0);
    lc_store(&p->parent, LC_NIL);
    if (parent != LC_NIL && lci_may_hang(h, parent, word))
        lci_attach_parent(h, &k->t, page, parent);
    lc_dict_insert(&k->t, &h->dict, page, k->keys[key], word);
    k->fresh[k->news++] = page;
}

/* The key has a page already; one of this call's own counts as ready. */
static uint8_t met(naming *k, uint32_t i, uint32_t there, uint32_t word, uint32_t parent) {
    lci_handle *h = k->h;
    uint32_t entry = k->op->done + i, state = lci_state_of(word);
    if (lci_ns_of(word) != lci_ns_id(k->op->ns)) return LCI_NO_ROOM;
    k->there[i] = there;
    bool ours = k->gen && lci_res_of(word) == k->rid + 1;
    if (state == LCI_WRITING && !ours) return LCI_BUSY_KEY;
    if (state != LCI_READY && state != LCI_WRITING) {
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

/* Is there room for one more? */
static bool room_for_one(naming *k, uint32_t chain) {
    lci_handle *h = k->h;
    const lci_namespace *ns = &h->ns[lci_ns_id(k->op->ns)];
    uint32_t quota = lc_load(&ns->quota), used = lc_load(&ns->pages) + k->news;
    k->op->reason = chain >= LC_CHAIN_MAX ? LCI_WHY_CHAIN : LCI_WHY_QUOTA;
    if (chain >= LC_CHAIN_MAX || (quota && used >= quota)) return false;
    k->op->reason = LCI_WHY_RESERVATIONS;
    if (!k->gen && !lci_open_reservation(h, &k->t, 1, k->op->ns, &k->rid, &k->gen)) return false;
    if (k->news >= lci_list_room(h, &h->res[k->rid].pages)) return false;
    k->op->reason = 0;
    return true;
}

/* In the same step as the pages became WRITING: a reaper of ours finds them listed. */
static void list_news(naming *k) {
    lci_handle *h = k->h;
    if (k->t.error || !k->news) return;
    if (lci_list_push(h, &k->t, &h->res[k->rid].pages, k->fresh, k->news) != k->news)
        k->t.error = LC_E_CORRUPT; /* there was room for them */
    lci_count_named(h, &k->t, new_word(k), k->news);
    lc_txn_add(&k->t, &h->root->named, k->news);
    lc_txn_add(&k->t, &h->root->writing, k->news);
    lc_txn_add(&k->t, &h->root->held, -k->news);
}

static void settle(naming *k) {
    k->merges = k->news = 0;
    for (uint32_t i = 0; i < k->count && !k->t.error; i++) {
        uint32_t word = 0, length, entry = k->op->done + i, parent = parent_of(k, i);
        uint32_t there = look(k, k->key[i], &word, &length);
        k->out[entry] = k->pages[entry];
        k->there[i] = LC_NIL;
        if (there != LC_NIL) {
            k->status[entry] = met(k, i, there, word, parent);
        } else if (!room_for_one(k, length)) {
            k->status[entry] = LCI_NO_ROOM;
            k->op->look.due = 1; /* a dead client may have what is lacking: the next name gets it */
        } else {
            k->there[i] = (uint32_t)k->pages[entry];
            give_name(k, k->there[i], k->key[i], parent);
            k->status[entry] = LCI_NEW;
        }
    }
    list_news(k);
    lci_doom_held(k->h, &k->t, k->merged, k->merges, 0);
}

/* Damage: the step is undone, and what it had pinned goes back by hand. */
static void take_back(naming *k) {
    if (!k->made_count) k->gen = 0; /* this step had opened it */
    for (uint32_t i = 0; i < k->count; i++) {
        uint32_t entry = k->op->done + i;
        if (k->status[entry] == LCI_PRESENT) lci_unpin_one(k->h, (uint32_t)k->out[entry]);
        k->status[entry] = LCI_UNKNOWN;
    }
}

/* How many keys of the step have no page yet: for a quota. */
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
        lci_step(&k->t);
        if (k->t.error) {
            take_back(k);
        } else {
            k->op->done += k->count;
            for (uint32_t i = 0; i < k->news; i++) k->made[k->made_count++] = (int32_t)k->fresh[i];
            lci_let_held_go(h, &k->t, k->merged, k->merges);
        }
        rc = k->t.error;
    }
    pthread_mutex_unlock(&h->at->rows);
    return rc;
}

/* What this hold has named is complete. Called also after a step that failed and is not yet undone:
 * it names no page of that step. */
static void publish(naming *k) {
    lci_handle *h = k->h;
    if (!k->gen) return;
    atomic_fetch_or_explicit(&h->res[k->rid].shard[0], LCI_SHARD_DONE, memory_order_seq_cst);
    int rc = lci_make_ready(h, k->rid, lci_ns_id(k->op->ns), k->made, k->made_count);
    lci_flag_ended(h, k->rid);
    if (rc < 0 && !k->t.error) k->t.error = LC_E_CORRUPT;
    if (!k->t.error) lci_end_reservation(h, &k->t, k->rid, UINT32_MAX);
    atomic_fetch_add_explicit(&lcs_client_of(h->at, h->at->slot)->published_pages, k->made_count,
                              memory_order_relaxed);
}

/* Work under one hold of the lock. */
static int name_some(naming *k) {
    if (!lci_ns_open(k->h, k->op->ns)) return LC_E_CLEARED;
    int rc = all_ours(k);
    k->gen = k->made_count = 0;
    seek(k);
    for (uint32_t work = 0; rc == LC_OK && k->op->done < k->n && work < LCI_HOLD;
         work += LCI_BATCH) {
        rc = name_batch(k);
        if (lci_give_way(k->h, work + LCI_BATCH)) break;
    }
    publish(k);
    return rc == LCI_ROOM_AGAIN ? LC_OK : rc;
}

/* Name pages that we hold: those of request i by its keys from starts[i] on. `out` and `status` say
 * which page each key has: ours (LCI_NEW), another's that we have pinned (LCI_PRESENT; with
 * LCI_NAME_MERGE ours is free), or ours, held as before (LCI_BUSY_KEY, LCI_NO_ROOM). With
 * LCI_NAME_INDEPENDENT ours may go while others hang on them. LC_E_OWNER:
 * page `op->refused` is not ours; nothing after `op->done` has changed. LC_E_BUSY, LC_E_INTR:
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
    k.room.eviction.by = lci_ns_id(op->ns) + 1;
    k.room.eviction.by_group = 1;
    k.room.look = &op->look;
    uint64_t begun = lcs_now_ns();
    while (op->done < n) {
        rc = lci_lock(h, &k.t, LCI_OP_NAME, wait, deadline);
        if (rc != LC_OK) return rc;
        rc = name_some(&k);
        int dropped = lci_unlock(h, &k.t);
        if (k.made_count) lci_notify(h);
        if (rc == LC_OK) rc = dropped;
        if (rc == LC_OK && op->done < n) rc = lci_again(begun, wait, deadline);
        if (rc != LC_OK) return rc;
    }
    lci_learn_if_due(h, op->tick, wait, deadline);
    return op->look.due ? lci_look(h, &op->look, false, wait, deadline) : LC_OK;
}
