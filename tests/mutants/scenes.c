/* What the victim is doing when it dies. */
#include "prepared.h"

static void reserve(void) {
    CHECK_EQ(prompt_reserve(&victim, &written_run, NS, 1), written_run.n);
}
static void reserve_more(void) {
    CHECK_EQ(prompt_reserve(&victim, &other_run, NS, 1), RUN);
}
static void reserve_front(void) {
    static prompt whole;
    crowd(&whole, 3, 5);
    CHECK_EQ(prompt_reserve(&victim, &whole, NS, 1), 4);
}
static void reserve_over(void) {
    static prompt whole;
    crowd(&whole, 3, 5);
    CHECK_EQ(prompt_reserve(&victim, &whole, NS, 1), 0);
}

static void publish(void) { prompt_publish(&victim, &written_run, 0); }
static void match_run(void) { CHECK_EQ(match(&victim, &second_run, &lent), second_run.n); }
static void evict_some(void) { CHECK_EQ(evict(&victim, 5), 5); }

static void abandon(void) {
    const lci_reserve_op *op = &written_run.op;
    CHECK_EQ(lci_abandon(victim.h, op->rid, op->gen, BLOCKING), LC_OK);
}

static void matched(void) {
    half_full();
    match_run();
}

static void release(void) { CHECK_EQ(lci_release(victim.h, &lent.head), LC_OK); }

/* It was told the numbers of pages, and pins them for itself. */
static uint32_t gens[RUN * 8];
static int32_t numbers[RUN * 8];
static void told(void) {
    uint32_t bad;
    matched();
    CHECK_EQ(lci_keys_of(victim.h, lent.pages, lent.head.held, NULL, gens, &bad), LC_OK);
    memcpy(numbers, lent.pages, sizeof numbers);
    release();
}
static void pin_pages(void) {
    uint32_t refused;
    CHECK_EQ(lci_pin_pages(victim.h, numbers, gens, second_run.n, &lent.head, &refused), LC_OK);
}
static void told_and_pinned(void) {
    told();
    pin_pages();
}
static void release_pages(void) {
    CHECK_EQ(lci_release_pages(victim.h, &lent.head, numbers, second_run.n / 2), second_run.n / 2);
}

static void give(void) {
    CHECK_EQ(lci_ticket_give(victim.h, lent.pages, lent.head.held, LC_NIL, 0, bit(&survivor),
                             FOREVER, &ticket, BLOCKING), LC_OK);
}

static void adopt(void) { CHECK_EQ(adopt_as(&victim, 0), second_run.n); }
static void done(void) { CHECK_EQ(lci_ticket_done(victim.h, &ticket, 1), LC_OK); }
static void drop(void) { CHECK_EQ(lci_ticket_drop(victim.h, &ticket, BLOCKING), LC_OK); }
static void clear(void) { CHECK_EQ(lci_clear(victim.h, NS, BLOCKING), LC_OK); }
static void reap_late(void) { CHECK_EQ(lci_reap_slot(victim.h, late.slot, BLOCKING), 1); }
static void repair(void) { CHECK_EQ(lci_repair(victim.h, BLOCKING), LC_OK); }

static void leave(void) {
    CHECK_EQ(lci_leave(victim.h, BLOCKING), LC_OK);
    CHECK_EQ(lcs_slot_release(victim.at), LC_OK);
}

static void join(void) {
    late.slot = second.slot + 1;
    late = client_join(&real);
}

static void open_namespace(void) {
    lci_ns_ref ns;
    CHECK_EQ(lci_namespace_open(victim.h, "w", "t", 7, &ns, BLOCKING), LC_OK);
    CHECK_EQ(lci_namespace_open(victim.h, "w", "t", 9, &ns, BLOCKING), LC_OK);
}

/* Somebody pins the last page of the second run while it is being evicted. */
static void pin_marked(void) {
    lc_found found;
    lc_key key = second_run.keys[second_run.n - 1];
    lc_dict_find(&survivor.h->dict, key.lo, key.hi, &found);
    CHECK_EQ(lci_pin_one(survivor.h, found.node), LC_OK); /* its prefix stays with it */
}

static void evict_pinned(void) {
    play(LC_AT_EVICT_MARKED, pin_marked);
    CHECK_EQ(evict(&victim, 5), 0);
    check_played();
}

const scene scenes[] = {
    {"match", half_full, match_run, NONE, NONE, false},
    {"release", matched, release, NONE, NONE, false},
    {"pin-pages", told, pin_pages, NONE, NONE, false},
    {"release-pages", told_and_pinned, release_pages, NONE, NONE, false},
    {"publish", reserved_one, publish, EITHER, ALL, false},
    {"publish-last", reserved_two, publish, EITHER, ALL, false},
    {"reserve", half_full, reserve, NONE, NONE, false},
    {"abandon", reserved_one, abandon, NONE, NONE, false},
    {"abandon-behind-present", behind_present, abandon, NONE, NONE, false},
    {"evict", full, evict_some, NONE, NONE, false},
    {"evict-pinned", half_full, evict_pinned, NONE, NONE, true},
    {"evict-old", long_ago, evict_some, NONE, NONE, false},
    {"evict-far", far_ahead, evict_some, NONE, NONE, false},
    {"reserve-beside-dead", someone_died, reserve, NONE, NONE, false},
    {"reserve-evicting", full, reserve, NONE, NONE, false},
    {"reserve-doomed", abandoned, reserve, NONE, NONE, false},
    {"reserve-after-present", follow_present, reserve_more, NONE, NONE, false},
    {"reserve-before-orphan", orphan, reserve_front, NONE, NONE, false},
    {"reserve-over-orphan", orphan_behind, reserve_over, NONE, NONE, false},
    {"reserve-quota", under_quota, reserve, NONE, NONE, false},
    {"reserve-full-chain", full_chain, reserve, NONE, NONE, false},
    {"ticket", matched, give, NONE, NONE, false},
    {"adopt", given_to_victim, adopt, NONE, NONE, false},
    {"done", adopted, done, NONE, NONE, false},
    {"drop", someone_should_adopt, drop, NONE, NONE, false},
    {"drop-last", adopted_and_done, drop, NONE, NONE, false},
    {"reap", someone_died, reap_late, NONE, NONE, false},
    {"reap-published", someone_had_published, reap_late, NONE, NONE, false},
    {"reap-giver", someone_had_given, reap_late, NONE, NONE, false},
    {"reap-adopter", someone_should_adopt, reap_late, NONE, NONE, false},
    {"give-again", settled_behind_drop, give, NONE, NONE, false},
    {"give-shard", given_shard, publish, NONE, NONE, false},
    {"leave", reserved_one, leave, NONE, NONE, false},
    {"join", half_full, join, NONE, NONE, false},
    {"namespace", half_full, open_namespace, NONE, NONE, false},
    {"clear", half_full, clear, NONE, NONE, false},
    {"clear-writing", reserved_one, clear, NONE, NONE, false},
    {"repair", abandoned, repair, NONE, NONE, false},
    {0},
};
