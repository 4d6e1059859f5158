/* What others do in the middle of the operation. They act between two of the victim's instructions,
 * by whole calls of their own or by the one store of a call that they had begun. */
#include "scenes.h"

static actor *writer(stage *s, uint32_t shards) {
    two_runs(s);
    actor *o = stage_other(s, 0);
    run_reserve(o, &o->writing, 2, 6, shards, SCENE_NS);
    return o;
}
static void other_writes(stage *s) { writer(s, 1); }
static bool victim_has_lock(const stage *s) {
    return (lc_load(&lcs_lock_of(s->survivor.at)->both) & LCS_LOCK_SLOT) == s->notes->victim;
}

/* Matched pages are cleared before the match looks at them again. */
static void default_space(stage *s) {
    two_runs(s);
    stage_other(s, 0);
    s->notes->ns = SCENE_NS;
}
static uint32_t pins_of_victim(const stage *s) {
    const lci_handle *h = s->survivor.h;
    uint32_t n = 0;
    for (uint32_t page = 0; page < h->page_count; page++)
        n += lc_load(lci_pin(h, s->notes->victim, page));
    return n;
}
static bool clear_when_pinned(stage *s) {
    if (pins_of_victim(s) < 16) return false;
    deed_clear(&s->other[0], s->notes->ns);
    return true;
}
static void match_cleared(actor *v) {
    hold *l = &v->held;
    run_keys(l->keys, 1, 16);
    NEED(lci_match1(v->h, l->keys, 16, SCENE_NS, &l->lease) <= 16);
}
SCENE(match_cleared, .pages = 48, .set = default_space, .act = match_cleared,
      .meanwhile = clear_when_pinned, .taken = 32)

static void match_batch(actor *v) {
    static const int64_t offsets[] = {0, 16, 24, 40};
    int32_t counts[3];
    hold l = {0};
    run_keys(l.keys, 0, 16);
    run_keys(l.keys + 16, 7, 8);
    run_keys(l.keys + 24, 1, 16);
    int n = lci_match(v->h, l.keys, offsets, 3, SCENE_NS, &l.lease, counts);
    NEED(n == counts[0] + counts[2] && counts[1] == 0);
    NEED(lci_release(v->h, &l.lease) == LC_OK);
}
SCENE(match_batch, .pages = 48, .set = two_runs, .act = match_batch)

/* A key that another writes is ready when the lock is had, so it is pinned then. */
static bool publish_first(stage *s) {
    if (!victim_has_lock(s)) return false;
    run_publish(&s->other[0], &s->other[0].writing, 0);
    return true;
}
static void reserve_same(actor *v) { run_reserve(v, &v->writing, 2, 8, 1, SCENE_NS); }
SCENE(reserve_published, .pages = 48, .set = other_writes, .act = reserve_same,
      .meanwhile = publish_first, .made = 6)
SCENE(reserve_written, .pages = 48, .set = other_writes, .act = reserve_same)

/* That one cannot be pinned: what was begun is rolled back. */
static void written_at_limit(actor *v) {
    const lci_reservation *r = v->h->res;
    while (lc_load(&r->state) != LCI_RES_ACTIVE) r++;
    uint32_t page = lc_load(&v->h->chunks[lc_load(&r->pages.first)].page[2]);
    lc_store(lci_pin(v->h, v->at->slot, page), UINT16_MAX);
    atomic_fetch_or(&v->h->pages[page].pins, UINT64_C(1) << v->at->slot);
}
static void reserve_at_limit(actor *v) {
    run *r = &v->writing;
    run_keys(r->keys, 2, 8);
    r->n = 8;
    r->op = (lci_reserve_op){.shards = 1, .ns = SCENE_NS};
    int rc = lci_reserve(v->h, &r->op, r->keys, 8, 0, r->page, r->status, LC_BLOCK, FOREVER);
    NEED(rc == LC_E_PINS || rc == 2); /* 2: it was not published meanwhile */
    run_unpin(v, r);
}
SCENE(reserve_rolled_back, .pages = 48, .set = other_writes, .prepare = written_at_limit,
      .act = reserve_at_limit, .meanwhile = publish_first, .made = 6)

/* Between two batches another reservation ends: it is taken in before anything is evicted. */
static void nearly_full(stage *s) {
    actor *o = stage_other(s, 0);
    run_fill(&s->survivor, 0, 6, SCENE_NS);
    run_reserve(o, &o->writing, 2, 6, 1, SCENE_NS);
}
static bool publish_between(stage *s) {
    if (lc_load(&s->survivor.h->root->writing) < 38) return false;
    /* The stepper has asked for the lock: not wanted any more, it is kept for the next batch. */
    atomic_fetch_and(&lcs_lock_of(s->survivor.at)->both, ~LCS_LOCK_WAITERS);
    run_publish(&s->other[0], &s->other[0].writing, 0);
    return true;
}
static void reserve_forty(actor *v) {
    run_reserve(v, &v->writing, 5, 40, 1, SCENE_NS);
    NEED(v->writing.made == 40);
}
SCENE(reserve_collecting, .pages = 48, .set = nearly_full, .act = reserve_forty,
      .meanwhile = publish_between, .taken = 4, .made = 6)

/* The last shard is published at the instant at which its reservation is to be doomed. */
static bool logged(const stage *s, const void *word) {
    const lcs_lock *lock = lcs_lock_of(s->survivor.at);
    const _Atomic uint64_t *log = (_Atomic uint64_t *)(s->base + LCS_LOG_OFFSET);
    uint32_t count = lc_load(&lock->log_count);
    uint64_t at = (uint64_t)((const uint8_t *)word - s->survivor.at->base);
    for (uint32_t i = 0; i < count; i++)
        if ((lc_load(&log[i]) & 0xffffffff) == (at / 4 | LC_LOG_SOFT)) return true;
    return false;
}
static void owner_gave_shard(stage *s) {
    two_runs(s);
    stage_other(s, 0);
}
static void give_last_shard(actor *v) {
    run *r = &v->writing;
    run_reserve(v, r, 2, 6, 2, SCENE_NS);
    run_publish(v, r, 0);
    NEED(lci_ticket_give(v->h, r->fresh, r->made, r->op.rid, r->op.gen, ~UINT64_C(0), FOREVER,
                         &v->notes->ticket, LC_BLOCK, FOREVER) == LC_OK);
}
static void adopt_last_shard(stage *s) {
    actor *o = &s->other[0];
    run *r = &o->writing;
    uint32_t rid, gen;
    run_keys(r->keys, 2, 6);
    NEED(lci_adopt(o->h, &s->notes->ticket, 1, &r->made, r->page, MAX_KEYS, &rid, &gen, LC_BLOCK,
                   FOREVER) == 6);
    memcpy(r->fresh, r->page, sizeof r->page);
    memset(r->status, LCI_NEW, 6);
    r->n = 6;
    r->op = (lci_reserve_op){.shards = 2, .ns = SCENE_NS, .rid = rid, .gen = gen};
}
static bool publish_doomed(stage *s) {
    actor *o = &s->other[0];
    const run *r = &o->writing;
    if (!logged(s, &s->survivor.h->res[r->op.rid].shard[1])) return false;
    run_write(o, r, 1); /* too late if the victim has died with this entry in the log */
    lci_publish(o->h, r->op.rid, r->op.gen, 1, r->fresh, r->made);
    return true;
}
SCENE(abandon_published, .pages = 48, .set = owner_gave_shard, .prepare = give_last_shard,
      .ready = adopt_last_shard, .act = act_abandon, .meanwhile = publish_doomed, .made = 6)

/* Pages become ready while they are cleared: their publisher had passed its last check before. */
static void publisher_stands(stage *s) {
    actor *o = writer(s, 1);
    stop_at(o, LC_AT_SHARD_DONE, act_publish);
    s->notes->ns = SCENE_NS;
}
static bool page_ready(stage *s) {
    const run *r = &s->other[0].writing;
    lci_page *p = &s->survivor.h->pages[r->fresh[2]];
    uint32_t word = lc_load(&p->word);
    if (!logged(s, &p->word) || lci_state_of(word) != LCI_WRITING) return false;
    lc_store(&p->word, (word & ~LCI_STATE_MASK) | LCI_READY);
    return true;
}
SCENE(clear_published, .pages = 48, .set = publisher_stands, .act = act_clear,
      .meanwhile = page_ready, .taken = 32, .made = 6)

/* Pages that their writer has given up, and pins still: they are doomed before. */
static void writer_gave_up(stage *s) {
    actor *o = writer(s, 1);
    run_abandon(o, &o->writing);
    s->notes->ns = SCENE_NS;
}
SCENE(clear_abandoned, .pages = 48, .set = writer_gave_up, .act = act_clear, .taken = 32)

/* Somebody sleeps until something is published. */
static void sleeper(actor *v) {
    run_reserve(v, &v->writing, 2, 6, 1, SCENE_NS);
    atomic_fetch_or(&v->h->root->event, 1);
}
SCENE(publish_awaited, .pages = 48, .set = two_runs, .prepare = sleeper, .act = act_publish,
      .made = 6)
