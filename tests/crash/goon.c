/* After recovery everybody goes on: the survivor uses every operation, the others finish what they
 * had begun, and in the end every page is had again by somebody new. */
#include "judge.h"

#define MUST(j, what)                                          \
    do {                                                       \
        if (!(what)) FOUND((j), "going on: %s fails", #what);  \
    } while (0)

#define NEW_RUN 50 /* runs that no scene uses */

static void look_up(judge *j, stage *s) {
    hold l;
    if (!j->found_count) return;
    const page_note *p = &j->found[j->looked % j->found_count];
    memset(&l, 0, sizeof l);
    MUST(j, lci_match1(s->survivor.h, &p->key, 1, p->ns, &l.lease) == 1);
    MUST(j, lci_release(s->survivor.h, &l.lease) == LC_OK);
}

static int reserve(actor *a, run *r, uint32_t number, uint32_t n, lci_ns_ref ns) {
    memset(r, 0, sizeof *r);
    run_keys(r->keys, number, n);
    r->n = n;
    r->op = (lci_reserve_op){.shards = 1, .ns = ns};
    int rc = lci_reserve(a->h, &r->op, r->keys, n, 0, r->page, r->status, LC_BLOCK, FOREVER);
    for (uint32_t i = 0; i < n; i++)
        if (r->status[i] == LCI_NEW) r->fresh[r->made++] = r->page[i];
    return rc;
}

static void pass_on(judge *j, stage *s, lci_ns_ref ns) {
    actor *a = &s->survivor;
    lci_ticket_ref ref = {0};
    hold given, adopted;
    uint32_t held = 0, rid, rgen, slot = a->at->slot;
    memset(&given, 0, sizeof given);
    memset(&adopted, 0, sizeof adopted);
    run_keys(given.keys, NEW_RUN, 2);
    MUST(j, lci_match1(a->h, given.keys, 2, ns, &given.lease) == 2);
    MUST(j, lci_ticket_give(a->h, given.pages, 2, LC_NIL, 0, UINT64_C(1) << slot, FOREVER, &ref,
                            LC_BLOCK, FOREVER) == LC_OK);
    MUST(j, lci_adopt(a->h, &ref, 0, &held, adopted.pages, MAX_KEYS, &rid, &rgen, LC_BLOCK,
                      FOREVER) == 2);
    adopted.lease.held = held;
    MUST(j, lci_ticket_done(a->h, &ref, 1) == LC_OK);
    MUST(j, lci_ticket_drop(a->h, &ref, LC_BLOCK, FOREVER) == LC_OK);
    MUST(j, lci_release(a->h, &given.lease) == LC_OK);
    MUST(j, lci_release(a->h, &adopted.lease) == LC_OK);
}

static void write_some(judge *j, stage *s, lci_ns_ref ns) {
    static run r;
    actor *a = &s->survivor;
    MUST(j, reserve(a, &r, NEW_RUN, 2, ns) >= 0);
    run_write(a, &r, 0);
    if (r.op.gen) MUST(j, lci_publish(a->h, r.op.rid, r.op.gen, 0, r.fresh, r.made) == 1);
    MUST(j, lci_unreserve(a->h, &r.op, r.page, r.status, 2) == LC_OK);
    if (r.made == 2) { /* all may be pinned by the others */
        MUST(j, lci_peek1(s->reader.h, r.keys, 2, ns) == 2);
        pass_on(j, s, ns);
    }
}

/* What an other pins has its bytes still; then it lets go. */
static void finish_hold(judge *j, stage *s, actor *a) {
    hold *l = &a->held;
    for (uint32_t i = 0; i < l->lease.held; i++)
        for (uint32_t w = 0; w < STAMP_WORDS; w++)
            MUST(j, s->stamps[(uint32_t)l->pages[i] * STAMP_WORDS + w] ==
                        stamp_of(l->keys[i].lo, l->keys[i].hi, w));
    MUST(j, lci_release(a->h, &l->lease) == LC_OK);
}

/* Its own shards, unless the reservation had to end with somebody who died. */
static void finish_writing(judge *j, actor *a) {
    run *r = &a->writing;
    if (!r->op.gen) return;
    for (uint32_t shard = 0; shard < r->op.shards; shard++) {
        run_write(a, r, shard);
        int rc = lci_publish(a->h, r->op.rid, r->op.gen, shard, r->fresh, r->made);
        MUST(j, rc >= 0 || rc == LC_E_STALE || rc == LC_E_TWICE || rc == LC_E_OWNER ||
                    rc == LC_E_CLEARED);
    }
    MUST(j, lci_unreserve(a->h, &r->op, r->page, r->status, r->n) == LC_OK);
    int rc = lci_abandon(a->h, r->op.rid, r->op.gen, LC_BLOCK, FOREVER);
    MUST(j, rc == LC_OK || rc == LC_E_STALE);
}

static void finish_others(judge *j, stage *s) {
    for (uint32_t i = 0; i < s->others; i++) {
        actor *a = &s->other[i];
        uint32_t slot = a->at->slot;
        if (a->at->life_fd < 0 || !stage_alive(s, slot)) continue;
        if (a->stopped) {
            stage_die(s, a);
            MUST(j, lci_reap_slot(s->survivor.h, slot, LC_BLOCK, FOREVER) == 1);
            if (!s->path) stage_revive(s, a);
        } else {
            finish_hold(j, s, a);
            finish_writing(j, a);
        }
    }
}

/* Quarantine ends when its client's process is seen to be gone, or after a second. */
static void end_quarantine(judge *j, stage *s) {
    for (uint32_t slot = 1; slot < LCS_SLOTS; slot++) {
        lcs_client *c = lcs_client_of(s->survivor.at, slot);
        if (lc_load(&c->state) != LCS_CLIENT_QUARANTINE) continue;
        c->quarantine_until_ns = 0;
        c->pid = UINT32_C(0x7ffffff0); /* nobody's */
        MUST(j, lci_reap_slot(s->survivor.h, slot, LC_BLOCK, FOREVER) == 1);
        MUST(j, lc_load(&c->state) == LCS_CLIENT_FREE);
    }
}

/* What is kept for good, or promised to somebody, is let go. */
static void let_go(judge *j, stage *s) {
    lci_handle *h = s->survivor.h;
    for (uint32_t page = 0; page < h->page_count; page++) {
        const lci_page *p = &h->pages[page];
        uint32_t word = lc_load(&p->word), ns = lci_ns_of(word);
        lc_key key = {.lo = lc_load(&p->lo), .hi = lc_load(&p->hi)};
        lci_walk_op op = {0};
        if (!(word & LCI_KEPT)) continue;
        MUST(j, lci_keep(h, &key, 1, ns | lc_load(&h->ns[ns].epoch) << 8, 0, &op, LC_BLOCK,
                         FOREVER) == LC_OK);
        MUST(j, op.pages == 1);
    }
    for (uint32_t ns = 0; ns < LCI_NAMESPACES; ns++) lc_store(&h->ns[ns].minimum, 0);
    for (uint32_t i = 0; i < LCI_NUMBERS; i++) lc_store(&h->root->group[i].minimum, 0);
}

static void evict_all(judge *j, stage *s) {
    lci_report report;
    uint32_t freed = 0;
    MUST(j, lci_evict_pages(s->survivor.h, (uint32_t)s->pages, &freed, LC_BLOCK, FOREVER) == LC_OK);
    judge_sound(j, s, "after evicting", true, &report);
    uint32_t left = report.writing + report.ready + report.doomed + report.held;
    if (left || report.pins) FOUND(j, "%u pages cannot be had, %u pins", left, report.pins);
}

/* Every page, once. */
static void have_all(judge *j, stage *s, lci_ns_ref ns) {
    static run r;
    actor *a = &s->survivor;
    uint8_t had[4 * MAX_KEYS] = {0};
    uint32_t grown = lc_load(&a->h->root->grown), all = 0;
    MUST(j, lci_grow(a->h, (uint32_t)s->pages, LC_BLOCK, FOREVER) == LC_OK);
    MUST(j, grown <= s->pages);
    MUST(j, reserve(a, &r, NEW_RUN + 1, (uint32_t)s->pages, ns) == (int)s->pages);
    for (uint32_t i = 0; i < r.made; i++) all += !had[r.fresh[i]]++;
    MUST(j, all == s->pages);
    MUST(j, lci_unreserve(a->h, &r.op, r.page, r.status, r.n) == LC_OK);
    MUST(j, lci_abandon(a->h, r.op.rid, r.op.gen, LC_BLOCK, FOREVER) == LC_OK);
}

void judge_go_on(judge *j, stage *s) {
    lci_handle *h = s->survivor.h;
    lci_ns_ref ns = 0;
    look_up(j, s);
    MUST(j, lci_namespace_open(h, "after", "", 0, &ns, LC_BLOCK, FOREVER) == LC_OK);
    write_some(j, s, ns);
    finish_others(j, s);
    end_quarantine(j, s);
    for (uint32_t i = 0; i < h->ticket_count; i++) lc_store(&h->tickets[i].deadline_ns, 1);
    let_go(j, s);
    evict_all(j, s);
    have_all(j, s, ns);
    evict_all(j, s);
}
