/* The victim: attaches, prepares its part of a scene, stops, performs one operation, stops again.
 *
 *     victim FILE PAGES SCENE
 *
 * The stepper traces it: what lies between the two stops is executed one instruction at a time. */
#include "scenes.h"

#include <signal.h>

/* There in a build that counts what is executed (covered.py): counted is what is stepped. */
extern void __gcov_reset(void) __attribute__((weak));

int main(int argc, char **argv) {
    static actor v;
    NEED(argc == 4);
    const scene *s = scene_named(argv[3]);
    NEED(s);
    actor_map(&v, argv[1], strtoull(argv[2], NULL, 10));
    if (!s->unjoined) {
        actor_claim(&v, "victim", s->flags);
        v.notes->victim = v.at->slot;
    }
    if (s->prepare) s->prepare(&v);
    if (__gcov_reset) __gcov_reset();
    raise(SIGSTOP);
    s->act(&v);
    raise(SIGSTOP);
    return 0;
}
