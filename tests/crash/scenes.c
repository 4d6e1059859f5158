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
