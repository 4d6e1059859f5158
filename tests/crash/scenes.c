#include "scenes.h"

scene *all_scenes;

scene *scene_named(const char *name) {
    for (scene *s = all_scenes; s; s = s->next)
        if (strcmp(s->name, name) == 0) return s;
    return NULL;
}

void two_runs(stage *s) {
    uint32_t n = (uint32_t)s->pages / 2 - 8;
    run_fill(&s->survivor, 0, n, SCENE_NS);
    run_fill(&s->survivor, 1, n, SCENE_NS);
}

void two_paths(stage *s) {
    static run r;
    actor *a = &s->survivor;
    for (uint32_t number = 0; number < 2; number++)
        for (uint32_t i = 0; i < (uint32_t)s->pages / 2 - 8; i++) {
            run_behind(a, &r, number, i, i + 1);
            run_publish(a, &r, 0);
            run_unpin(a, &r);
        }
}
