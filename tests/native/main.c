/* core_tests [--list | --facts | PART...]: run the tests whose names hold one of the parts. */
#include "harness.h"
#include "entry.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define WATCHDOG_SECONDS 60 /* for one test: far above what any takes, also in an emulator */

extern const test txn_tests[], lock_tests[], list_tests[], dict_tests[], ring_tests[], sync_tests[];
extern const test join_tests[], client_tests[], process_tests[], layout_tests[], lookup_tests[], number_tests[],
    reserve_tests[];
extern const test publish_tests[], evict_tests[], namespace_tests[], ticket_tests[], reap_tests[];
extern const test check_tests[], repair_tests[], race_tests[], death_tests[], taking_back_tests[];
extern const test taking_over_tests[], ending_tests[], ticket_ending_tests[], mend_tests[], mend_records_tests[];
extern const test room_tests[], halfway_tests[], meanwhile_tests[], walk_tests[], mend_pins_tests[];
extern const test log_tests[], held_tests[], keep_tests[], independent_tests[], many_tests[];
extern const test step_tests[], naming_tests[], oldest_tests[], hint_tests[], look_tests[];
extern const test group_tests[], part_tests[], chain_tests[], ranked_tests[], hazard_tests[];
extern const test worth_tests[], ahead_tests[], ghost_tests[];

static const test *const tables[] = {
    txn_tests, lock_tests, list_tests, dict_tests, ring_tests, sync_tests, client_tests,
    join_tests, process_tests, layout_tests, lookup_tests, number_tests, reserve_tests, publish_tests,
    evict_tests, namespace_tests, ticket_tests, reap_tests, check_tests, repair_tests, race_tests, death_tests,
    taking_back_tests, taking_over_tests, ending_tests, ticket_ending_tests, mend_tests,
    mend_records_tests, room_tests, halfway_tests, meanwhile_tests, walk_tests,
    mend_pins_tests, log_tests, held_tests, keep_tests, independent_tests, many_tests,
    step_tests, naming_tests, oldest_tests, hint_tests, look_tests, group_tests,
    part_tests, chain_tests, ranked_tests, hazard_tests, worth_tests,
    ahead_tests, ghost_tests,
};

static void on_alarm(int signal) {
    (void)signal;
    ssize_t ignored = write(2, check_running, strlen(check_running));
    ignored = write(2, ": does not end\n", 15);
    (void)ignored;
    _exit(3);
}

static int wanted(const char *name, int parts, char **part) {
    for (int i = 0; i < parts; i++)
        if (strstr(name, part[i])) return 1;
    return parts == 0;
}

/* What two machines must agree on, if they are to share a segment. */
static void print_facts(void) {
    printf("%s%s", lcs_layout(), lci_layout());
    for (uint64_t pages = 1; pages <= UINT64_C(1) << 24; pages *= 4) {
        lci_geometry g;
        int rc = lci_geometry_of(pages, LCI_LRU, &g);
        printf("%llu pages: %d", (unsigned long long)pages, rc);
        const uint64_t *figures = (const uint64_t *)&g;
        for (size_t i = 0; rc == LC_OK && i < sizeof g / sizeof *figures; i++)
            printf(" %llu", (unsigned long long)figures[i]);
        printf("\n");
    }
}

int main(int argc, char **argv) {
    int count = 0, list = argc > 1 && strcmp(argv[1], "--list") == 0;
    if (argc > 1 && strcmp(argv[1], "--facts") == 0) return print_facts(), 0;
    signal(SIGALRM, on_alarm);
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++) {
        for (const test *one = tables[i]; one->name; one++) {
            if (list) puts(one->name);
            if (list || !wanted(one->name, argc - 1, argv + 1)) continue;
            check_running = one->name;
            alarm(WATCHDOG_SECONDS);
            one->run();
            count++;
        }
    }
    if (list) return 0;
    printf("%d tests\n", count);
    return count == 0;
}
