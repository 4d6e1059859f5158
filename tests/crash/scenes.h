/* A scene: one operation to be executed step by step, and what stands around it.
 *
 *     static void prepare(actor *v) { run_reserve(v, &v->writing, 2, 6, 1, SCENE_NS); }
 *     static void act(actor *v) { run_publish(v, &v->writing, 0); }
 *     SCENE(publish, .pages = 48, .set = two_runs, .prepare = prepare, .act = act, .made = 6)
 *
 * A file in scenes/ with such lines is all that a new scene needs. */
#ifndef SCENES_H
#define SCENES_H

#include "stage.h"

typedef struct scene {
    const char *name;
    uint64_t pages;
    uint64_t grown;              /* pages with memory behind them; 0: all */
    void (*set)(stage *s);       /* stepper: before the victim is there */
    void (*prepare)(actor *v);   /* victim: before it is watched */
    void (*ready)(stage *s);     /* stepper: then; what others do with what was prepared */
    void (*act)(actor *v);       /* victim: the operation, watched */
    bool (*meanwhile)(stage *s); /* stepper: after each change until true; what races with it */
    int taken;                   /* pages, ready before, that the operation takes away */
    int taken_ranked;            /* the same where lists are ranked; 0: as many */
    int made;                    /* pages that it makes ready, all at once */
    int made_before;             /* of these, a first part that becomes ready before the others */
    bool unjoined;               /* the victim has no slot before it acts */
    uint32_t flags;              /* of the victim's slot */
    bool ranked;                 /* lists of the eviction queue are ranked, whatever the tests are run for */
    bool unsound;                /* the index is damaged until the operation is over */
    struct scene *next;
} scene;

extern scene *all_scenes;
scene *scene_named(const char *name);

#define SCENE(id, ...)                                                   \
    static scene id##_scene = {.name = #id, __VA_ARGS__};                \
    __attribute__((constructor)) static void id##_enter(void) {          \
        id##_scene.next = all_scenes;                                    \
        all_scenes = &id##_scene;                                        \
    }

/* What most scenes begin with: the survivor has filled two runs; 8 pages and more are free. */
void two_runs(stage *s);
/* What those of independent pages begin with: as many of them, each last used a tick after the one that
 * it hangs on (the last two of a path at once). */
void two_paths(stage *s);
/* And those of both kinds: a path and a run, and behind each of them four pages of the other kind. */
void both_kinds(stage *s);
/* With another client, whose match finds a page just before the victim marks it to be evicted: it
 * counts its pin in `pin_marked`. */
void two_runs_met(stage *s);
void two_paths_met(stage *s);
bool pin_marked(stage *s);

/* What many scenes do with what the victim writes, with its space, or with the index. */
void act_publish(actor *v);
void act_abandon(actor *v);
void act_collect(actor *v); /* a reservation that was published; evicts one page */
void act_evict_all(actor *v);
void act_clear(actor *v); /* the namespace of the notes */
void act_repair(actor *v);

#endif
