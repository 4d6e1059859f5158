#include "harness.h"

#include <stdio.h>
#include <stdlib.h>

const char *check_running = "no test";

void check_failed(const char *file, int line, const char *what) {
    fprintf(stderr, "%s: %s:%d: %s\n", check_running, file, line, what);
    exit(1);
}

void check_equal(const char *file, int line, const char *what, int64_t got, int64_t wanted) {
    if (got == wanted) return;
    fprintf(stderr, "%s: %s:%d: %s: %lld and %lld\n", check_running, file, line, what,
            (long long)got, (long long)wanted);
    exit(1);
}
