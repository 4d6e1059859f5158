/* Pages of a group that lie in several pages of the index, beside pages as they are. */
#include "scenes.h"

#define PARTS 5
#define NUMBER 1
#define STATES 30 /* the run of keys that they have */

static void state_keys(lc_key *keys, uint32_t from, uint32_t n) {
    lc_key own[MAX_KEYS];
    run_keys(own, STATES, from + n);
    NEED(lci_part_keys(own + from, n, NUMBER, 0, PARTS, keys) == LC_OK);
}

/* States [from, from + n), hung on the one before. Returns the parts that are new. */
static uint32_t states_reserve(actor *a, run *r, uint32_t from, uint32_t n, lci_ns_ref ns) {
    lc_key keys[MAX_KEYS];
    uint32_t start = from ? PARTS : 0, all = start + n * PARTS;
    int rc;
    memset(r, 0, sizeof *r);
    state_keys(keys, from ? from - 1 : 0, n + (from ? 1 : 0));
    memcpy(r->keys, keys + start, n * PARTS * sizeof *keys);
    r->n = n * PARTS;
    r->op = (lci_reserve_op){.shards = 1, .ns = ns, .run = PARTS, .group = NUMBER, .whole = 1};
    do rc = lci_reserve(a->h, &r->op, keys, all, start, r->page, r->status, LC_BLOCK, FOREVER);
    while (rc == LC_E_INTR);
    NEED(rc >= 0);
    for (uint32_t i = 0; i < r->n; i++)
        if (r->status[i] == LCI_NEW) r->fresh[r->made++] = r->page[i];
    return r->made;
}

static run filling;

static void state_fill(actor *a, uint32_t from, lci_ns_ref ns) {
    NEED(states_reserve(a, &filling, from, 1, ns) == PARTS);
    run_publish(a, &filling, 0);
    run_unpin(a, &filling);
}

/* Three states, and a run of 12 that was used after them. */
static void three_states(stage *s) {
    for (uint32_t i = 0; i < 3; i++) state_fill(&s->survivor, i, SCENE_NS);
    run_fill(&s->survivor, 0, 12, SCENE_NS);
}

static void reserve_fourth(actor *v) {
    NEED(states_reserve(v, &v->writing, 3, 1, SCENE_NS) == PARTS);
}
static void publish_fourth(actor *v) {
    reserve_fourth(v);
    act_publish(v);
}
SCENE(parts_reserve, .pages = 48, .set = three_states, .act = reserve_fourth)
SCENE(parts_publish, .pages = 48, .set = three_states, .prepare = reserve_fourth,
      .act = act_publish, .made = PARTS)
SCENE(parts_collect, .pages = 48, .set = three_states, .prepare = publish_fourth,
      .act = act_collect, .taken = 1)
SCENE(parts_abandon, .pages = 48, .set = three_states, .prepare = reserve_fourth,
      .act = act_abandon)

/* A state and a part of the next. */
static void evict_seven(actor *v) { NEED(deed_evict(v, 7) == 7); }
SCENE(parts_evict, .pages = 48, .set = three_states, .act = evict_seven, .taken = 7)

static void goes_first(actor *v, uint32_t number) {
    lci_walk_op walk = {0};
    lc_key keys[MAX_KEYS];
    state_keys(keys, number, 1);
    int rc;
    do rc = lci_evict_first(v->h, keys, PARTS, SCENE_NS, &walk, LC_BLOCK, FOREVER);
    while (rc == LC_E_INTR);
    NEED(rc == LC_OK && walk.pages == PARTS);
}
static void first_second(actor *v) { goes_first(v, 1); }
SCENE(parts_evict_first, .pages = 48, .set = three_states, .act = first_second)

static void one_other(stage *s) {
    three_states(s);
    stage_other(s, 0)->stopped = true;
}
SCENE(parts_evict_raced, .pages = 48, .set = one_other, .act = evict_seven, .meanwhile = pin_marked,
      .taken = 7)

/* What is left of a state is written again: the parts that are there stay. */
static void first_cut(stage *s) {
    three_states(s);
    goes_first(&s->survivor, 0);
    NEED(deed_evict(&s->survivor, 2) == 2);
}
static void reserve_rest(actor *v) {
    NEED(states_reserve(v, &v->writing, 0, 1, SCENE_NS) == 2);
}
SCENE(parts_reserve_rest, .pages = 48, .set = first_cut, .act = reserve_rest)

static void evict_group(actor *v) {
    lci_walk_op walk = {0};
    int rc;
    do rc = lci_evict_group(v->h, NUMBER, 7, &walk, LC_BLOCK, FOREVER);
    while (rc == LC_E_INTR);
    NEED(rc == LC_OK && walk.pages == 2 * PARTS);
}
SCENE(parts_evict_group, .pages = 48, .set = three_states, .act = evict_group, .taken = 2 * PARTS)

/* The group is left some of its pages, whatever others need; its own calls take them. */
static void promise_group(actor *v, uint32_t minimum) {
    uint64_t others;
    int rc;
    do rc = lci_group_minimum(v->h, NUMBER, minimum, &others, LC_BLOCK, FOREVER);
    while (rc == LC_E_INTR);
    NEED(rc == (minimum > v->pages ? LC_E_RANGE : LC_OK));
}
static void promised_group(stage *s) {
    three_states(s);
    promise_group(&s->survivor, PARTS + 1);
}
static void promise_all(actor *v) {
    promise_group(v, (uint32_t)v->pages + 1);
    promise_group(v, 3 * PARTS);
}
static void evict_promised(actor *v) { NEED(deed_evict(v, (uint32_t)v->pages) == 12 + 2 * PARTS - 1); }
static void reserve_most(actor *v) { /* the pool is full afterwards */
    NEED(states_reserve(v, &v->writing, 3, 8, SCENE_NS) == 8 * PARTS);
}
static void list_group(actor *v) {
    lci_oldest_op op = {.want = 20};
    lc_key keys[MAX_KEYS];
    uint32_t parents[MAX_KEYS];
    int rc;
    do rc = lci_oldest(v->h, &op, &v->held.lease, keys, parents, LC_BLOCK, FOREVER);
    while (rc == LC_E_INTR);
    NEED(rc == 20);
}
SCENE(parts_set_minimum, .pages = 48, .set = promised_group, .act = promise_all)
SCENE(parts_evict_promised, .pages = 48, .set = promised_group, .act = evict_promised,
      .taken = 12 + 2 * PARTS - 1)
SCENE(parts_reserve_promised, .pages = 48, .set = promised_group, .act = reserve_most, .taken = 19)
SCENE(parts_oldest_promised, .pages = 48, .set = promised_group, .act = list_group)

/* A tenant's quota is paid with a whole state. */
static void states_at_quota(stage *s) {
    actor *a = &s->survivor;
    NEED(lci_namespace_open(a->h, "w", "t", 12, &s->notes->ns, LC_BLOCK, FOREVER) == LC_OK);
    for (uint32_t i = 0; i < 2; i++) state_fill(a, i, s->notes->ns);
}
static void reserve_third(actor *v) {
    NEED(states_reserve(v, &v->writing, 2, 1, v->notes->ns) == PARTS);
}
SCENE(parts_quota, .pages = 48, .set = states_at_quota, .act = reserve_third, .taken = PARTS)

/* Fewer pages than are needed, for others pin the rest: what was made is given back. */
static void all_pinned(stage *s) {
    actor *o = stage_other(s, 0), *p = stage_other(s, 0);
    three_states(s);
    hold_match(o, &o->held, 0, 12, SCENE_NS);
    state_keys(p->held.keys, 0, 3);
    NEED(lci_match1(p->h, p->held.keys, 3 * PARTS, SCENE_NS, &p->held.lease) == 3 * PARTS);
}
static void reserve_too_many(actor *v) {
    NEED(states_reserve(v, &v->writing, 3, 5, SCENE_NS) == 0);
    NEED(v->writing.op.stopped && !v->writing.op.gen);
}
SCENE(parts_given_back, .pages = 48, .set = all_pinned, .act = reserve_too_many)

/* More than there can be: nothing is evicted for it. */
static void reserve_beyond(actor *v) { NEED(states_reserve(v, &v->writing, 3, 10, SCENE_NS) == 0); }
SCENE(parts_beyond, .pages = 48, .set = three_states, .act = reserve_beyond)

/* The last state of a run of keys, and the pages before it. */
static void match_both(actor *v) {
    int32_t limit;
    hold *l = &v->held, states = {0};
    run_keys(l->keys, STATES, 12);
    l->lease.capacity = states.lease.capacity = MAX_KEYS;
    lci_group groups[] = {
        {.h = v->h, .lease = &states.lease, .align = 1, .back = 1, .ns = SCENE_NS,
         .number = NUMBER, .parts = PARTS},
    };
    NEED(lci_match_groups(groups, 1, l->keys, 12, 1, 1, &limit) == 3);
    NEED(states.lease.held == PARTS && lci_release(v->h, &states.lease) == LC_OK);
}
SCENE(parts_match, .pages = 48, .set = three_states, .act = match_both)
