/* structures: who changes a list, a dict, a ring or a log dies after each of his stores. Whoever takes the
 * lock next finds it as it was before the call, or as it is behind it, and nothing else. */
#include "structure_calls.h"

#include "hooks.h"

#include <stdio.h>

static const segment *watched;

static void watch(const segment *real) { watched = real; }

static void on_store(const volatile void *word) {
    const volatile uint8_t *at = word;
    const segment *real = watched;
    if (!real || at < real->base || at >= real->base + real->bytes) return;
    watched = NULL;
    structure_look(real->base, NULL);
    watched = real;
}

int main(void) {
    uint32_t deaths = 0;
    after_store = on_store;
    for (uint32_t i = 0; i < structure_count; i++) deaths += structure_play(structures[i], watch);
    printf("%u deaths\n", deaths);
    return 0;
}
