/* Ranks that join a reservation: of one team, the same shards and pages, whole. */
#include "pair.h"

#define TEAM UINT64_C(77)

static prompt first, second;

static int join_as(client *c, prompt *w, uint32_t number, uint32_t from, uint32_t to, uint64_t team,
                   uint32_t shards, uint32_t shard, uint64_t until) {
    prompt all;
    prompt_make(&all, number, to);
    memset(w, 0, sizeof *w);
    memcpy(w->keys, all.keys + from, (to - from) * sizeof *w->keys);
    w->n = to - from;
    w->op = (lci_reserve_op){
        .shards = shards, .ns = NS, .team = team, .shard = shard, .join_until = until};
    int made;
    do made = lci_reserve(c->h, &w->op, w->keys, w->n, 0, w->page, w->status, BLOCKING);
    while (made == LC_E_INTR);
    for (uint32_t i = 0; i < w->n; i++)
        if (w->status[i] == LCI_NEW) w->fresh[w->made++] = w->page[i];
    return made;
}

static int reserve(client *c, prompt *w, uint32_t shard) {
    return join_as(c, w, 1, 0, 8, TEAM, 2, shard, FOREVER);
}

static int publish(client *c, const prompt *w) {
    return lci_publish(c->h, w->op.rid, w->op.gen, w->op.shard, w->fresh, w->made);
}

static void unreserve(client *c, prompt *w) {
    CHECK_EQ(lci_unreserve(c->h, &w->op, w->page, w->status, w->n), LC_OK);
}

static void drop(client *c, prompt *w) {
    unreserve(c, w);
    int rc = lci_abandon(c->h, w->op.rid, w->op.gen, BLOCKING);
    CHECK(rc == LC_OK || rc == LC_E_STALE);
}

static uint32_t status_of(const prompt *w, uint32_t shard) {
    return lc_load(&a.h->res[w->op.rid].shard[shard]) & LCI_SHARD_STATUS;
}

static void the_second_rank_joins(void) {
    set_up(64);
    CHECK_EQ(reserve(&a, &first, 1), 8);
    CHECK_EQ(first.op.joined, 0);
    CHECK_EQ(status_of(&first, 0), LCI_SHARD_OPEN);
    CHECK_EQ(status_of(&first, 1), LCI_SHARD_PENDING);
    CHECK_EQ(lci_publish(a.h, first.op.rid, first.op.gen, 0, first.fresh, 8), LC_E_OWNER);
    index_check(&s);
    CHECK_EQ(reserve(&b, &second, 0), 8);
    CHECK_EQ(second.op.joined, 1);
    CHECK_EQ(second.op.reason, 0); /* nothing is missing */
    CHECK(second.op.rid == first.op.rid && second.op.gen == first.op.gen);
    for (uint32_t i = 0; i < 8; i++) {
        CHECK_EQ(second.page[i], first.page[i]);
        CHECK_EQ(lc_load(lci_pin(a.h, b.slot, (uint32_t)first.page[i])), 1);
    }
    CHECK_EQ(lc_load(&a.h->res[first.op.rid].shard[0]) & 0xff, b.slot); /* pending, and ours */
    index_check(&s);
    CHECK_EQ(publish(&b, &second), 0);
    unreserve(&b, &second);
    CHECK_EQ(publish(&a, &first), 1);
    unreserve(&a, &first);
    prompt_make(&p, 1, 8);
    CHECK_EQ(peek(&a, &p), 8);
    tear_down();
}

static void refused_as_busy(client *c, uint32_t n) {
    CHECK_EQ(second.op.joined, 0);
    for (uint32_t i = 0; i < n; i++) CHECK_EQ(second.status[i], LCI_BUSY_KEY);
    CHECK_EQ(lc_load(lci_pin(a.h, c->slot, (uint32_t)first.page[0])), 0);
    drop(c, &second);
}

static void anything_else_is_busy(void) {
    set_up(64);
    CHECK_EQ(reserve(&a, &first, 0), 8);
    CHECK_EQ(join_as(&b, &second, 1, 0, 8, TEAM + 1, 2, 1, FOREVER), 0); /* another team */
    refused_as_busy(&b, 8);
    CHECK_EQ(join_as(&b, &second, 1, 0, 8, TEAM, 3, 1, FOREVER), 0); /* other shards */
    refused_as_busy(&b, 8);
    CHECK_EQ(join_as(&b, &second, 1, 0, 8, TEAM, 2, 0, FOREVER), 0); /* the owner's own */
    refused_as_busy(&b, 8);
    CHECK_EQ(join_as(&b, &second, 1, 0, 7, TEAM, 2, 1, FOREVER), 0); /* a part */
    refused_as_busy(&b, 7);
    CHECK_EQ(join_as(&b, &second, 1, 1, 8, TEAM, 2, 1, FOREVER), 0); /* its end */
    CHECK_EQ(second.status[0], LCI_BUSY_KEY);
    drop(&b, &second);
    CHECK_EQ(join_as(&b, &second, 1, 0, 8, 0, 1, 0, FOREVER), 0); /* of no team */
    refused_as_busy(&b, 8);
    CHECK_EQ(join_as(&b, &second, 1, 0, 8, TEAM, 2, 2, FOREVER), LC_E_RANGE);
    second.op.gen = 0;
    CHECK_EQ(reserve(&b, &second, 1), 8);
    prompt third;
    CHECK_EQ(reserve(&b, &third, 1), 0); /* that rank is there */
    CHECK_EQ(third.status[0], LCI_BUSY_KEY);
    drop(&b, &second);
    drop(&a, &first);
    tear_down();
}

static void keys_in_another_order_are_busy(void) {
    set_up(64);
    CHECK_EQ(reserve(&a, &first, 0), 8);
    memset(&second, 0, sizeof second);
    for (uint32_t i = 0; i < 8; i++) second.keys[i] = first.keys[7 - i];
    second.n = 8;
    second.op = (lci_reserve_op){.shards = 2, .ns = NS, .team = TEAM, .shard = 1};
    CHECK_EQ(lci_reserve(b.h, &second.op, second.keys, 8, 0, second.page, second.status, BLOCKING), 0);
    refused_as_busy(&b, 8);
    drop(&a, &first);
    tear_down();
}

/* The first rank has seen less, or room for less: what it did not reserve is missing for the second. */
static void more_keys_than_there_are_pages(void) {
    set_up(64);
    prompt_fill(&a, &p, 1, 2);
    CHECK_EQ(join_as(&a, &first, 1, 0, 80, TEAM, 2, 0, FOREVER), 62); /* with chunks between */
    CHECK_EQ(first.op.reason, LCI_WHY_PINNED);
    CHECK_EQ(join_as(&b, &second, 1, 0, 80, TEAM, 2, 1, FOREVER), 62);
    CHECK_EQ(second.op.reason, LCI_WHY_TEAM);
    for (uint32_t i = 0; i < 80; i++) {
        CHECK_EQ(second.status[i], first.status[i]);
        CHECK_EQ(second.status[i], i < 2 ? LCI_PRESENT : i < 64 ? LCI_NEW : LCI_NO_ROOM);
    }
    CHECK_EQ(publish(&a, &first), 0);
    CHECK_EQ(publish(&b, &second), 1);
    unreserve(&a, &first);
    unreserve(&b, &second);
    tear_down();
}

static void long_lists_are_joined_whole(void) {
    set_up(600);
    CHECK_EQ(join_as(&a, &first, 1, 0, 300, TEAM, 2, 0, FOREVER), 300);
    CHECK_EQ(join_as(&b, &second, 1, 0, 299, TEAM, 2, 1, FOREVER), 0);
    drop(&b, &second);
    CHECK_EQ(join_as(&b, &second, 1, 0, 300, TEAM, 2, 1, FOREVER), 300);
    CHECK_EQ(publish(&b, &second), 0);
    CHECK_EQ(publish(&a, &first), 1);
    unreserve(&a, &first);
    unreserve(&b, &second);
    tear_down();
}

/* While the owner is between two holds of the lock, ranks wait a while and are then told busy. */
static void what_is_being_made_is_not_joined(void) {
    set_up(64);
    CHECK_EQ(reserve(&a, &first, 0), 8);
    lc_store(&a.h->res[first.op.rid].listed, 0);
    uint64_t before = lcs_now_ns();
    CHECK_EQ(reserve(&b, &second, 1), 0);
    CHECK(lcs_now_ns() - before >= LCI_JOIN_WAIT);
    refused_as_busy(&b, 8);
    drop(&a, &first);
    tear_down();
}

static void who_does_not_join_in_time_dooms_it(void) {
    set_up(64);
    CHECK_EQ(join_as(&a, &first, 1, 0, 8, TEAM, 2, 0, 1), 8);
    CHECK_EQ(lc_load(&a.h->root->joining_ns), 1);
    CHECK_EQ(publish(&a, &first), 0);
    uint32_t notified = lc_load(&a.h->root->event);
    CHECK_EQ(lci_settle(b.h, BLOCKING), LC_OK);
    CHECK(lc_load(&a.h->root->event) != notified); /* whoever waits for these pages looks now */
    CHECK_EQ(lc_load(&a.h->root->joining_ns), 0);
    CHECK_EQ(index_counts(&a).doomed, 8);
    unreserve(&a, &first);
    CHECK_EQ(join_as(&b, &second, 1, 0, 8, TEAM, 2, 1, 1), 8); /* reserves again */
    CHECK_EQ(second.op.joined, 0);
    prompt_make(&p, 1, 8);
    CHECK_EQ(prompt_reserve(&a, &p, NS, 1), 8); /* any holder of the lock looks */
    CHECK_EQ(publish(&b, &second), LC_E_STALE);
    drop(&b, &second);
    drop(&a, &p);
    tear_down();
}

static void once_all_have_joined_the_deadline_is_past(void) {
    set_up(64);
    CHECK_EQ(reserve(&a, &first, 0), 8);
    CHECK_EQ(reserve(&b, &second, 1), 8);
    lc_store(&a.h->res[first.op.rid].deadline_ns, 1);
    lc_store(&a.h->root->joining_ns, 1);
    CHECK_EQ(lci_settle(a.h, BLOCKING), LC_OK);
    CHECK_EQ(publish(&a, &first), 0);
    CHECK_EQ(publish(&b, &second), 1);
    unreserve(&a, &first);
    unreserve(&b, &second);
    tear_down();
}

static void the_earliest_deadline_is_looked_for(void) {
    uint64_t later = lcs_now_ns() + UINT64_C(1000000000000);
    set_up(64);
    CHECK_EQ(join_as(&a, &first, 1, 0, 4, TEAM, 2, 0, later + 5), 4);
    CHECK_EQ(join_as(&b, &second, 2, 0, 4, TEAM, 2, 0, later), 4);
    CHECK_EQ(lc_load(&a.h->root->joining_ns), later);
    lc_store(&a.h->root->joining_ns, 1);
    collect(&a);
    CHECK_EQ(lc_load(&a.h->root->joining_ns), later);
    CHECK_EQ(lci_settle(a.h, BLOCKING), LC_OK);
    drop(&b, &second);
    lc_store(&a.h->root->joining_ns, 1);
    collect(&a);
    CHECK_EQ(lc_load(&a.h->root->joining_ns), later + 5);
    drop(&a, &first);
    tear_down();
}

static void whoever_abandons_abandons_for_all(void) {
    for (int who = 0; who < 2; who++) {
        set_up(64);
        CHECK_EQ(reserve(&a, &first, 0), 8);
        CHECK_EQ(reserve(&b, &second, 1), 8);
        drop(who ? &a : &b, who ? &first : &second);
        CHECK_EQ(publish(who ? &b : &a, who ? &second : &first), LC_E_STALE);
        drop(who ? &b : &a, who ? &second : &first);
        tear_down();
    }
}

static void a_dead_owner(void) {
    set_up(64);
    client c = client_join(&s);
    CHECK_EQ(reserve(&c, &first, 0), 8); /* no rank has joined */
    CHECK_EQ(publish(&c, &first), 0);
    uint32_t slot = c.slot;
    client_die(&c);
    CHECK_EQ(lci_reap_slot(a.h, slot, BLOCKING), 1);
    CHECK_EQ(index_counts(&a).writing, 0);
    CHECK_EQ(index_counts(&a).reservations, 0);
    c = client_join(&s);
    CHECK_EQ(reserve(&c, &first, 0), 8); /* all have */
    CHECK_EQ(reserve(&b, &second, 1), 8);
    CHECK_EQ(publish(&c, &first), 0);
    slot = c.slot;
    client_die(&c);
    CHECK_EQ(lci_reap_slot(a.h, slot, BLOCKING), 1);
    index_check(&s);
    CHECK_EQ(publish(&b, &second), 1);
    unreserve(&b, &second);
    tear_down();
}

static void a_dead_joiner(void) {
    set_up(64);
    client c = client_join(&s);
    CHECK_EQ(reserve(&a, &first, 0), 8);
    CHECK_EQ(reserve(&c, &second, 1), 8);
    uint32_t slot = c.slot;
    client_die(&c);
    CHECK_EQ(lci_reap_slot(a.h, slot, BLOCKING), 1);
    CHECK_EQ(publish(&a, &first), LC_E_STALE);
    drop(&a, &first);
    tear_down();
}

static void pins_at_their_limit(void) {
    set_up(64);
    CHECK_EQ(reserve(&a, &first, 0), 8);
    _Atomic uint16_t *count = lci_pin(b.h, b.slot, (uint32_t)first.page[5]);
    lc_store(count, UINT16_MAX);
    CHECK_EQ(reserve(&b, &second, 1), LC_E_PINS);
    CHECK_EQ(lc_load(count), UINT16_MAX); /* what was not pinned is not given back */
    lc_store(count, 0);
    CHECK_EQ(status_of(&first, 1), LCI_SHARD_OPEN);
    CHECK_EQ(second.op.made, 0);
    for (uint32_t i = 0; i < 8; i++)
        CHECK_EQ(lc_load(lci_pin(b.h, b.slot, (uint32_t)first.page[i])), 0);
    drop(&a, &first);
    tear_down();
}

static void open_shards_are_checked_and_mended(void) {
    set_up(64);
    CHECK_EQ(reserve(&a, &first, 0), 8);
    lci_reservation *r = &a.h->res[first.op.rid];
    uint32_t word = lc_load(&r->shard[1]);
    lc_store(&r->shard[1], word ^ a.slot ^ b.slot); /* of one that is not the owner */
    CHECK_EQ(index_broken(&s), 48);
    lc_store(&r->shard[1], word);
    lc_store(&r->team, 0);
    CHECK_EQ(index_broken(&s), 48);
    lc_store(&r->team, TEAM);
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK); /* sound: as it was */
    CHECK_EQ(status_of(&first, 1), LCI_SHARD_OPEN);
    CHECK_EQ(reserve(&b, &second, 1), 8);
    drop(&b, &second);
    CHECK_EQ(publish(&a, &first), LC_E_STALE);
    drop(&a, &first);
    CHECK_EQ(reserve(&a, &first, 0), 8);
    lc_store(&a.h->res[first.op.rid].team, 0);
    CHECK_EQ(lci_repair(b.h, BLOCKING), LC_OK);
    CHECK_EQ(publish(&a, &first), LC_E_STALE); /* damaged: it ends */
    drop(&a, &first);
    tear_down();
}

/* Keys that nothing has, and busy ones of others, before and after what is joined: they stay so, whatever
 * the caller's memory says of their pages. */
static void what_else_is_asked_for_does_not_matter(void) {
    prompt other;
    set_up(64);
    CHECK_EQ(join_as(&a, &other, 2, 0, 4, TEAM, 2, 0, FOREVER), 4);
    CHECK_EQ(join_as(&a, &first, 1, 1, 9, TEAM, 2, 0, FOREVER), 8);
    for (int of_which = 0; of_which < 2; of_which++) {
        prompt_make(&second, 1, 9); /* nothing has its first key */
        second.op = (lci_reserve_op){.shards = 2, .ns = NS, .team = TEAM, .shard = 1};
        second.page[0] = of_which ? first.page[0] : other.page[0];
        second.keys[9] = other.keys[0];
        CHECK_EQ(lci_reserve(b.h, &second.op, second.keys, 10, 0, second.page, second.status, BLOCKING), 8);
        CHECK_EQ(second.op.rid, first.op.rid);
        CHECK_EQ(second.status[0], LCI_NO_ROOM);
        CHECK_EQ(second.status[9], LCI_BUSY_KEY);
        second.n = 10;
        drop(&b, &second);
        drop(&a, &first);
        CHECK_EQ(join_as(&a, &first, 1, 1, 9, TEAM, 2, 0, FOREVER), 8);
    }
    drop(&a, &first);
    drop(&a, &other);
    tear_down();
}

/* Pages of a reservation that ranks have not joined in time, more than one hold of the lock can unlink:
 * what the team has made since is joined all the same. */
static void what_is_doomed_is_no_candidate(void) {
    prompt late;
    set_up(600);
    CHECK_EQ(join_as(&a, &late, 1, 0, 400, TEAM, 2, 0, 1), 400);
    lc_store(&a.h->root->joining_ns, UINT64_MAX); /* so that the next call does not look yet */
    CHECK_EQ(join_as(&a, &first, 2, 0, 4, TEAM, 2, 0, FOREVER), 4);
    lc_store(&a.h->root->joining_ns, 1);
    memset(&second, 0, sizeof second);
    second.keys[0] = late.keys[399];
    memcpy(second.keys + 1, first.keys, 4 * sizeof *first.keys);
    second.op = (lci_reserve_op){.shards = 2, .ns = NS, .team = TEAM, .shard = 1};
    second.n = 5;
    CHECK_EQ(lci_reserve(b.h, &second.op, second.keys, 5, 0, second.page, second.status, BLOCKING), 4);
    CHECK_EQ(second.status[0], LCI_BUSY_KEY);
    CHECK_EQ(second.op.rid, first.op.rid);
    drop(&b, &second);
    drop(&a, &first);
    drop(&a, &late);
    tear_down();
}

/* The time for joining is that of a whole list: its owner lists pages as long as that takes. */
static void what_is_being_made_is_not_late(void) {
    set_up(64);
    CHECK_EQ(join_as(&a, &first, 1, 0, 8, TEAM, 2, 0, 1), 8);
    lc_store(&a.h->res[first.op.rid].listed, 0);
    CHECK_EQ(lci_settle(b.h, BLOCKING), LC_OK);
    CHECK_EQ(status_of(&first, 1), LCI_SHARD_OPEN);
    CHECK_EQ(lc_load(&a.h->root->joining_ns), 0);
    CHECK_EQ(lci_list_whole(a.h, &first.op, BLOCKING), LC_OK);
    CHECK_EQ(lci_settle(b.h, BLOCKING), LC_OK);
    CHECK_EQ(index_counts(&a).doomed, 8);
    drop(&a, &first);
    tear_down();
}

/* One that has ended meanwhile, or another's in its record, is not listed. */
static void only_its_own_reservation_is_listed(void) {
    set_up(64);
    CHECK_EQ(reserve(&a, &first, 0), 8);
    lci_reservation *r = &a.h->res[first.op.rid];
    lc_store(&r->listed, 0);
    first.op.gen++;
    CHECK_EQ(lci_list_whole(a.h, &first.op, BLOCKING), LC_OK);
    CHECK_EQ(lc_load(&r->listed), 0);
    first.op.gen--;
    lc_store(&r->state, LCI_RES_DOOMED);
    CHECK_EQ(lci_list_whole(a.h, &first.op, BLOCKING), LC_OK);
    CHECK_EQ(lc_load(&r->listed), 0);
    lc_store(&r->state, LCI_RES_ACTIVE);
    CHECK_EQ(lci_list_whole(a.h, &first.op, BLOCKING), LC_OK);
    CHECK_EQ(lc_load(&r->listed), 1);
    drop(&a, &first);
    tear_down();
}

const test join_tests[] = {
    TEST(the_second_rank_joins),
    TEST(anything_else_is_busy),
    TEST(keys_in_another_order_are_busy),
    TEST(more_keys_than_there_are_pages),
    TEST(long_lists_are_joined_whole),
    TEST(what_is_being_made_is_not_joined),
    TEST(who_does_not_join_in_time_dooms_it),
    TEST(once_all_have_joined_the_deadline_is_past),
    TEST(the_earliest_deadline_is_looked_for),
    TEST(whoever_abandons_abandons_for_all),
    TEST(a_dead_owner),
    TEST(a_dead_joiner),
    TEST(what_else_is_asked_for_does_not_matter),
    TEST(what_is_doomed_is_no_candidate),
    TEST(what_is_being_made_is_not_late),
    TEST(only_its_own_reservation_is_listed),
    TEST(pins_at_their_limit),
    TEST(open_shards_are_checked_and_mended),
    END_OF_TESTS,
};
