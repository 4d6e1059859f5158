/* gaps [PART OF A NAME]: what mutants survived that changed what a user can see, until these tests
 * were written. */
#include "gaps.h"

#include <unistd.h>

void die_as(client *c) {
    uint32_t slot = c->slot;
    client_die(c);
    c->slot = slot;
}

static void run_all(const test *one, const char *part) {
    for (; one->name; one++) {
        if (!strstr(one->name, part)) continue;
        check_running = one->name;
        alarm(20);
        one->run();
    }
}

int main(int argc, char **argv) {
    const char *part = argc > 1 ? argv[1] : "";
    run_all(gaps, part);
    run_all(dead_gaps, part);
    return 0;
}
