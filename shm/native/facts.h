/* Layout facts: what a library was compiled with, as text that the Python loader compares with its
 * own ctypes declarations. One line a fact, "name=value" or "name=offset+size". */
#ifndef LC_FACTS_H
#define LC_FACTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

typedef struct lc_fact {
    const char *name;
    int64_t value;
    int64_t size; /* -1: not a field */
} lc_fact;

#define LC_FACT_TYPE(type) {#type, (int64_t)sizeof(type), -1}
#define LC_FACT_FIELD(type, field) \
    {#type "." #field, (int64_t)offsetof(type, field), (int64_t)sizeof(((type *)0)->field)}
#define LC_FACT_CONST(name) {#name, (int64_t)(name), -1}

/* Writes all facts into `out`; false when they do not fit. */
static inline bool lc_facts_write(char *out, size_t room, const lc_fact *facts, size_t count) {
    size_t used = 0;
    out[0] = 0;
    for (size_t i = 0; i < count; i++) {
        const lc_fact *f = &facts[i];
        int n = f->size < 0 ? snprintf(out + used, room - used, "%s=%lld\n", f->name,
                                       (long long)f->value)
                            : snprintf(out + used, room - used, "%s=%lld+%lld\n", f->name,
                                       (long long)f->value, (long long)f->size);
        if (n < 0 || (size_t)n >= room - used) return false;
        used += (size_t)n;
    }
    return true;
}

#endif
