/* Reserving, publishing, abandoning. */
#include "scenes.h"

static void full(stage *s) {
    run_fill(&s->survivor, 0, (uint32_t)s->pages / 2 - 8, SCENE_NS);
    run_fill(&s->survivor, 1, (uint32_t)s->pages / 2 + 8, SCENE_NS);
}

static void reserve_six(actor *v) {
    run_reserve(v, &v->writing, 2, 6, 1, SCENE_NS);
    NEED(v->writing.made == 6);
}
SCENE(reserve, .pages = 48, .set = two_runs, .act = reserve_six)
SCENE(reserve_empty, .pages = 48, .act = reserve_six)
SCENE(reserve_evicting, .pages = 48, .set = full, .act = reserve_six, .taken = 6)

/* More than one batch, and pages that others hang on already. */
static void reserve_longer(actor *v) {
    run_reserve(v, &v->writing, 0, 40, 1, SCENE_NS);
    NEED(v->writing.made == 24);
}
static void one_run(stage *s) { run_fill(&s->survivor, 0, 16, SCENE_NS); }
SCENE(reserve_longer, .pages = 48, .set = one_run, .act = reserve_longer)

/* Pages of a reservation that was abandoned are used again. */
static void abandon_first(actor *v) {
    run_reserve(v, &v->writing, 3, 16, 1, SCENE_NS);
    run_unpin(v, &v->writing);
    run_abandon(v, &v->writing);
}
SCENE(reserve_again, .pages = 48, .set = two_runs, .prepare = abandon_first, .act = reserve_six)

static void all_pinned(stage *s) {
    full(s);
    actor *o = stage_other(s, 0), *p = stage_other(s, 0);
    hold_match(o, &o->held, 0, (uint32_t)s->pages / 2 - 8, SCENE_NS);
    hold_match(p, &p->held, 1, (uint32_t)s->pages / 2 + 8, SCENE_NS);
}
static void reserve_none(actor *v) {
    run_reserve(v, &v->writing, 2, 6, 1, SCENE_NS);
    NEED(v->writing.made == 0);
}
SCENE(reserve_no_room, .pages = 48, .set = all_pinned, .act = reserve_none)

static void space_at_quota(stage *s) {
    actor *a = &s->survivor;
    two_runs(s);
    NEED(lci_namespace_open(a->h, "w", "t", 7, &s->notes->ns, LC_BLOCK, FOREVER) == LC_OK);
    run_fill(a, 3, 7, s->notes->ns);
}
static void reserve_in_space(actor *v) {
    run_reserve(v, &v->writing, 4, 4, 1, v->notes->ns);
    NEED(v->writing.made == 4);
}
SCENE(reserve_quota, .pages = 48, .set = space_at_quota, .act = reserve_in_space, .taken = 4)

/* A bucket's chain at its bound, and one below. */
static void crowd(stage *s, uint32_t n) {
    actor *a = &s->survivor;
    run_fill(a, CROWDED, n / 2, SCENE_NS);
    run_fill(a, CROWDED + 1, n - n / 2, SCENE_NS);
}
static void crowd_31(stage *s) { crowd(s, LC_CHAIN_MAX - 1); }
static void crowd_32(stage *s) { crowd(s, LC_CHAIN_MAX); }
static void reserve_crowded(actor *v) {
    run_reserve(v, &v->writing, CROWDED + 2, 1, 1, SCENE_NS);
    NEED(v->writing.made == 1);
}
static void reserve_two_crowded(actor *v) {
    run_reserve(v, &v->writing, CROWDED + 2, 2, 1, SCENE_NS);
    NEED(v->writing.made == 1 && v->writing.op.reason == LCI_WHY_CHAIN);
}
SCENE(reserve_chain_31, .pages = 48, .set = crowd_31, .act = reserve_crowded)
SCENE(reserve_chain_bound, .pages = 48, .set = crowd_31, .act = reserve_two_crowded)
SCENE(reserve_chain_32, .pages = 48, .set = crowd_32, .act = reserve_crowded, .taken = 1)

static void unpin(actor *v) { run_unpin(v, &v->writing); }
static void published(actor *v) {
    reserve_six(v);
    act_publish(v);
}
SCENE(publish, .pages = 48, .set = two_runs, .prepare = reserve_six, .act = act_publish, .made = 6)
SCENE(unreserve, .pages = 48, .set = two_runs, .prepare = published, .act = unpin)

static void reserve_shards(actor *v) { run_reserve(v, &v->writing, 2, 6, 2, SCENE_NS); }
static void first_shard(actor *v) {
    reserve_shards(v);
    run_publish(v, &v->writing, 0);
}
static void last_shard(actor *v) { run_publish(v, &v->writing, 1); }
SCENE(publish_first, .pages = 48, .set = two_runs, .prepare = reserve_shards, .act = act_publish)
SCENE(publish_last, .pages = 48, .set = two_runs, .prepare = first_shard, .act = last_shard,
      .made = 6)

static void abandon_unpinned(actor *v) {
    run_unpin(v, &v->writing);
    act_abandon(v);
}
SCENE(abandon, .pages = 48, .set = two_runs, .prepare = reserve_six, .act = act_abandon)
static void reserve_behind(actor *v) { run_behind(v, &v->writing, 1, 16, 22); }
static void publish_behind(actor *v) {
    reserve_behind(v);
    act_publish(v);
}
SCENE(reserve_independent, .pages = 48, .set = two_paths, .act = reserve_behind)
SCENE(publish_independent, .pages = 48, .set = two_paths, .prepare = reserve_behind,
      .act = act_publish, .made = 6)
SCENE(collect_independent, .pages = 48, .set = two_paths, .prepare = publish_behind,
      .act = act_collect, .taken = 1)

/* Behind a page of the other kind: it stays a leaf, and the first of ours has no parent. */
SCENE(reserve_mixed, .pages = 48, .set = two_runs, .act = reserve_behind)
SCENE(publish_mixed, .pages = 48, .set = two_runs, .prepare = reserve_behind, .act = act_publish,
      .made = 6)
SCENE(abandon_mixed, .pages = 48, .set = two_runs, .prepare = reserve_behind, .act = act_abandon)
static void reserve_longer_mixed(actor *v) {
    run_reserve(v, &v->writing, 0, 24, 1, SCENE_NS);
    NEED(v->writing.made == 8);
}
SCENE(reserve_longer_mixed, .pages = 48, .set = two_paths, .act = reserve_longer_mixed)
SCENE(abandon_independent, .pages = 48, .set = two_paths, .prepare = reserve_behind,
      .act = act_abandon)
SCENE(abandon_shards, .pages = 48, .set = two_runs, .prepare = first_shard, .act = abandon_unpinned)

/* A victim with a device: its pins on what it was writing stay for a while. */
SCENE(device_reserve, .pages = 48, .set = two_runs, .act = reserve_six, .flags = LCS_FLAG_DEVICE)
SCENE(device_publish, .pages = 48, .set = two_runs, .prepare = reserve_six, .act = act_publish,
      .made = 6, .flags = LCS_FLAG_DEVICE)
SCENE(device_abandon, .pages = 48, .set = two_runs, .prepare = reserve_six, .act = act_abandon,
      .flags = LCS_FLAG_DEVICE)
