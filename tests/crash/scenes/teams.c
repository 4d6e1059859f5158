/* Ranks that join a reservation: each is killed before, between the pins and its word, and after it has
 * published. */
#include "scenes.h"

#define TEAM 9

static void reserve_as(actor *a, uint64_t team, uint32_t shards, uint32_t shard, uint64_t until) {
    run *r = &a->writing;
    memset(r, 0, sizeof *r);
    run_keys(r->keys, 2, 6);
    r->n = 6;
    r->op = (lci_reserve_op){
        .shards = shards, .ns = SCENE_NS, .team = team, .shard = shard, .join_until = until};
    int rc;
    do rc = lci_reserve(a->h, &r->op, r->keys, 6, 0, r->page, r->status, LC_BLOCK, FOREVER);
    while (rc == LC_E_INTR);
    NEED(rc >= 0);
    for (uint32_t i = 0; i < 6; i++)
        if (r->status[i] == LCI_NEW) r->fresh[r->made++] = r->page[i];
}
static void first_rank(actor *a) { reserve_as(a, TEAM, 2, 0, FOREVER); }
static void second_rank(actor *a) { reserve_as(a, TEAM, 2, 1, FOREVER); }
static void publish_first(actor *a) { run_publish(a, &a->writing, 0); }
static void publish_second(actor *a) { run_publish(a, &a->writing, 1); }

/* The first rank begins. */
static void team_begin(actor *v) {
    first_rank(v);
    NEED(v->writing.made == 6 && !v->writing.op.joined);
}
SCENE(team_begin, .pages = 48, .set = two_runs, .act = team_begin)

/* The second joins, and the first has published or not. */
static void begun(stage *s) {
    two_runs(s);
    first_rank(stage_other(s, 0));
}
static void begun_and_published(stage *s) {
    begun(s);
    publish_first(&s->other[0]);
}
static void team_join(actor *v) {
    second_rank(v);
    NEED(v->writing.made == 6 && v->writing.op.joined);
}
SCENE(team_join, .pages = 48, .set = begun, .act = team_join)
SCENE(team_join_published, .pages = 48, .set = begun_and_published, .act = team_join)
SCENE(team_join_of_device, .pages = 48, .set = begun_and_published, .act = team_join,
      .flags = LCS_FLAG_DEVICE)

/* It publishes, first or last; then the owner, who dies before or after. */
SCENE(team_publish_last, .pages = 48, .set = begun_and_published, .prepare = team_join,
      .act = publish_second, .made = 6)
SCENE(team_publish, .pages = 48, .set = begun, .prepare = team_join, .act = publish_second)
static void other_stands(stage *s) {
    two_runs(s);
    stage_other(s, 0);
}
static void other_joins(stage *s) {
    second_rank(&s->other[0]);
    publish_second(&s->other[0]);
}
SCENE(team_owner_publishes_last, .pages = 48, .set = other_stands, .prepare = team_begin,
      .ready = other_joins, .act = publish_first, .made = 6)
SCENE(team_owner_publishes, .pages = 48, .set = two_runs, .prepare = team_begin, .act = publish_first)

/* The owner has published and dies while it does something else: with all joined the others continue. */
static void begin_and_publish(actor *v) {
    team_begin(v);
    publish_first(v);
}
static void other_joins_only(stage *s) { second_rank(&s->other[0]); }
static void match_other(actor *v) {
    hold l = {0};
    hold_match(v, &l, 1, 16, SCENE_NS);
    hold_release(v, &l);
}
SCENE(team_owner_gone, .pages = 48, .set = other_stands, .prepare = begin_and_publish,
      .ready = other_joins_only, .act = match_other)

/* One rank gives up: it is doomed for all. */
static void abandon(actor *v) {
    run_abandon(v, &v->writing);
    run_unpin(v, &v->writing);
    v->writing = (run){0};
}
SCENE(team_joiner_abandons, .pages = 48, .set = begun, .prepare = team_join, .act = abandon)
SCENE(team_owner_abandons, .pages = 48, .set = other_stands, .prepare = team_begin,
      .ready = other_joins_only, .act = abandon)

/* Two teams on the same keys: those of the other are busy. */
static void other_team(actor *v) {
    reserve_as(v, TEAM + 1, 2, 1, FOREVER);
    NEED(v->writing.made == 0 && v->writing.status[0] == LCI_BUSY_KEY);
    run_unpin(v, &v->writing);
}
SCENE(team_of_others, .pages = 48, .set = begun, .act = other_team)

/* No rank has joined in time: the next call that looks dooms it, and the second rank reserves again. */
static void begun_late(stage *s) {
    two_runs(s);
    reserve_as(stage_other(s, 0), TEAM, 2, 0, 1);
}
static void settle(actor *v) { NEED(lci_settle(v->h, LC_BLOCK, FOREVER) == LC_OK); }
static void begin_anew(actor *v) {
    second_rank(v);
    NEED(v->writing.made == 6 && !v->writing.op.joined);
}
SCENE(team_late, .pages = 48, .set = begun_late, .act = settle)
SCENE(team_late_again, .pages = 48, .set = begun_late, .act = begin_anew)

/* Damage or not, what is sound is not touched. */
static void repair(actor *v) { NEED(lci_repair(v->h, LC_BLOCK, FOREVER) == LC_OK); }
SCENE(team_repair, .pages = 48, .set = begun, .prepare = team_join, .act = repair)
