/* The victim: attaches, prepares its part of a scene, stops, performs one operation, stops again.
 * Between these two stops it stops behind every instruction that has changed the segment.
 *
 *     victim FILE PAGES SCENE
 */
#include "scenes.h"
#include "step.h"

/* There in a build that counts what is executed (covered.py): counted is what is stepped. */
extern void __gcov_reset(void) __attribute__((weak));

int main(int argc, char **argv) {
    static actor v;
    NEED(argc == 4);
    const scene *s = scene_named(argv[3]);
    NEED(s);
    actor_map(&v, argv[1], strtoull(argv[2], NULL, 10));
    v.notes->over = v.notes->steps = 0;
    if (!s->unjoined) {
        actor_claim(&v, "victim", s->flags);
        v.notes->victim = v.at->slot;
    }
    if (s->prepare) s->prepare(&v);
    step_stop();
    if (__gcov_reset) __gcov_reset();
    step_begin(&v);
    s->act(&v);
    step_end(&v);
    step_stop();
    return 0;
}
