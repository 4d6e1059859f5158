/* The test harness: one macro, tables of tests, and a first failure that ends the program. */
#ifndef HARNESS_H
#define HARNESS_H

#include <stdint.h>

typedef struct test {
    const char *name; /* NULL ends a table */
    void (*run)(void);
} test;

#define TEST(function) {#function, function}
#define END_OF_TESTS {0, 0}

extern const char *check_running; /* the name of the test */

/* Print what did not hold, in which test, and end with status 1. */
_Noreturn void check_failed(const char *file, int line, const char *what);
void check_equal(const char *file, int line, const char *what, int64_t got, int64_t wanted);

#define CHECK(condition) \
    ((condition) ? (void)0 : check_failed(__FILE__, __LINE__, #condition))
#define CHECK_EQ(got, wanted) \
    check_equal(__FILE__, __LINE__, #got " == " #wanted, (int64_t)(got), (int64_t)(wanted))

#endif
