/* What the victim is doing when it dies: pages without a key, kept pages, branches that go, the
 * oldest ones, and limits. */
#include "calls.h"
#include "prepared.h"

#define MOST 34 /* pages: more than one step takes */

/* ------------------------------------------------------------------ pages without a key */

static void hold_run(void) { CHECK_EQ(allocate(&victim, RUN), LC_OK); }
static void hold_most(void) { CHECK_EQ(allocate(&victim, MOST), LC_OK); }

/* Known when the first step is taken: that is given back. */
static void hold_too_many(void) { CHECK_EQ(allocate(&victim, PAGES - HELD + 1), LC_E_FULL); }

static void holding_run(void) {
    half_full();
    hold_run();
}

static void holding_most(void) {
    almost_empty();
    hold_most();
}

static void let_go(void) { CHECK_EQ(free_pages(&victim, pages, MOST), LC_OK); }

/* Somebody else pins one of them in each step. */
static void holding_pinned(void) {
    holding_most();
    CHECK_EQ(lci_pin_one(survivor.h, (uint32_t)pages[2]), LC_OK);
    CHECK_EQ(lci_pin_one(survivor.h, (uint32_t)pages[MOST - 2]), LC_OK);
}

static void name_run(void) { CHECK_EQ(name(&victim, &written_run, 0, 0), LC_OK); }

static void holding_long_run(void) {
    holding_most();
    crowd(&written_run, 2, MOST);
}

static void name_most(void) { CHECK_EQ(name(&victim, &written_run, 0, 0), LC_OK); }

/* Four of its keys have pages. */
static void holding_more(void) {
    follow_present();
    CHECK_EQ(allocate(&victim, other_run.n), LC_OK);
}

static void name_merging(void) {
    CHECK_EQ(name(&victim, &other_run, 0, LCI_NAME_MERGE), LC_OK);
    CHECK_EQ(status[0], LCI_PRESENT);
}

static void name_beside(void) { CHECK_EQ(name(&victim, &other_run, 0, 0), LC_OK); }

static void holding_under_quota(void) {
    under_quota();
    hold_run();
}

static void named(void) {
    holding_run();
    other_run = written_run;
    CHECK_EQ(name(&victim, &other_run, 0, 0), LC_OK);
    crowd(&written_run, 8, RUN); /* which nobody writes */
}

static void named_most(void) {
    holding_long_run();
    name_most();
    crowd(&written_run, 8, RUN);
}

static void unname_run(void) { CHECK_EQ(unname(&victim, pages, RUN), LC_OK); }
static void unname_most(void) { CHECK_EQ(unname(&victim, pages, MOST), LC_OK); }

/* Kept, and of a reservation that is not collected. */
static void published_and_kept(void) {
    reserved_one();
    other_run = written_run;
    prompt_publish(&victim, &written_run, 0);
    CHECK_EQ(keep_run(&victim, &written_run, 1), LC_OK);
    for (int w = 0; w < 16; w++) lc_store(&victim.h->root->completed[w], 0);
    memcpy(pages, written_run.page, RUN * sizeof *pages);
    crowd(&written_run, 8, RUN);
}

/* Somebody pins one of them when they have lost their names. */
static void pin_unnamed(void) {
    now = LOOKING;
    CHECK_EQ(lci_pin_one(survivor.h, (uint32_t)pages[1]), LC_OK);
    now = OPERATING;
}

static void unname_pinned(void) {
    play(LC_AT_EVICT_CHOSEN, pin_unnamed);
    CHECK_EQ(unname(&victim, pages, RUN), LC_E_PINS);
    check_played();
}

static void leave(void) {
    CHECK_EQ(lci_leave(victim.h, BLOCKING), LC_OK);
    CHECK_EQ(lcs_slot_release(victim.at), LC_OK);
}

static void someone_held(void) {
    almost_empty();
    late = client_join(&real);
    CHECK_EQ(allocate(&late, MOST), LC_OK);
    end_of(&late);
}

static void reap_late(void) { CHECK_EQ(lci_reap_slot(victim.h, late.slot, BLOCKING), 1); }

/* ------------------------------------------------------------------ keeping and letting go */

static void keep_second(void) { CHECK_EQ(keep_run(&victim, &second_run, 1), LC_OK); }

static void unkeep_second(void) {
    CHECK_EQ(keep_run(&victim, &second_run, 0), LC_OK);
    CHECK_EQ(walk.pages, second_run.n);
}

static void all_kept(void) {
    half_full();
    collect(&survivor);
    keep_second();
}

/* What the survivor pins is not even marked: it is found all the time. */
static void drop_pinned(void) {
    CHECK_EQ(drop_run(&victim, &first_run, 0), LC_OK);
    CHECK_EQ(walk.pages, 0);
}

static void drop_second(void) {
    CHECK_EQ(drop_run(&victim, &second_run, 2), LC_OK);
    CHECK_EQ(walk.pages, second_run.n - 2);
}

/* ------------------------------------------------------------------ the oldest */

static void list_as_they_are(void) { CHECK_EQ(oldest(&victim, MOST, 1), MOST); }
static void list_as_used(void) { CHECK_EQ(oldest(&victim, MOST, 0), MOST); }

/* Single pages: each comes from the queue by itself. */
static void singles(void) {
    almost_empty();
    for (uint32_t i = 0; i < MOST; i++) prompt_fill(&survivor, &other_run, 10 + i, 1);
}

static void listed(void) {
    full();
    list_as_they_are();
}

static void discard_listed(void) {
    CHECK_EQ(discard(&victim), LC_OK);
    CHECK_EQ(giving.freed, MOST - HELD); /* the survivor has matched the others since */
}

/* ------------------------------------------------------------------ limits */

static void set_limits(void) {
    lci_ns_ref ns;
    lci_ns_limits limits = {.quota = 9, .minimum = 4};
    CHECK_EQ(lci_namespace_limits(victim.h, "w", "t", &limits, &ns, BLOCKING), LC_OK);
    limits = (lci_ns_limits){.quota = 7, .minimum = 5};
    CHECK_EQ(lci_namespace_limits(victim.h, "w", "t", &limits, &ns, BLOCKING), LC_OK);
}

/* The namespace of all pages was promised some of them. */
static void promised(void) {
    lci_ns_ref ns;
    lci_ns_limits limits = {.quota = UINT32_MAX, .minimum = 5};
    half_full();
    CHECK_EQ(lci_namespace_limits(survivor.h, "", "", &limits, &ns, BLOCKING), LC_OK);
}

/* A group was promised something, and then something else. */
static void set_group(void) {
    uint64_t others;
    CHECK_EQ(lci_group_minimum(victim.h, 0, 4, &others, BLOCKING), LC_OK);
    CHECK_EQ(lci_group_minimum(victim.h, 0, 6, &others, BLOCKING), LC_OK);
}

static void clear(void) { CHECK_EQ(lci_clear(victim.h, NS, BLOCKING), LC_OK); }

const scene page_scenes[] = {
    {"hold", half_full, hold_run, NONE, NONE, false},
    {"hold-evicting", full, hold_run, NONE, NONE, false},
    {"hold-most", almost_empty, hold_most, NONE, NONE, false},
    {"hold-too-many", almost_empty, hold_too_many, NONE, NONE, false},
    {"let-go-pinned", holding_pinned, let_go, NONE, NONE, false},
    {"name", holding_run, name_run, EITHER, ALL, false},
    {"name-most", holding_long_run, name_most, EITHER, ALL, false},
    {"name-merging", holding_more, name_merging, EITHER, ALL, false},
    {"name-beside", holding_more, name_beside, EITHER, ALL, false},
    {"name-quota", holding_under_quota, name_run, EITHER, ALL, false},
    {"unname", named, unname_run, NONE, NONE, false},
    {"unname-most", named_most, unname_most, NONE, NONE, false},
    {"unname-kept", published_and_kept, unname_run, NONE, NONE, false},
    {"unname-pinned", named, unname_pinned, NONE, NONE, true},
    {"leave-holding", holding_run, leave, NONE, NONE, false},
    {"reap-holder", someone_held, reap_late, NONE, NONE, false},
    {"keep", half_full, keep_second, NONE, NONE, false},
    {"unkeep", all_kept, unkeep_second, NONE, NONE, false},
    {"drop-branch", full, drop_second, NONE, NONE, false},
    {"drop-pinned", full, drop_pinned, NONE, NONE, false},
    {"oldest", full, list_as_they_are, NONE, NONE, false},
    {"oldest-singles", singles, list_as_they_are, NONE, NONE, false},
    {"oldest-used", singles, list_as_used, NONE, NONE, false},
    {"discard", listed, discard_listed, NONE, NONE, false},
    {"limits", half_full, set_limits, NONE, NONE, false},
    {"group-minimum", half_full, set_group, NONE, NONE, false},
    {"clear-promised", promised, clear, NONE, NONE, false},
    {0},
};
