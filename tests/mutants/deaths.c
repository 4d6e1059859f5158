/* deaths [--list | SCENE...]: in every scene the victim dies after each of its stores, and whoever
 * recovers from that dies after some of those by which it recovers.
 *
 * The core is built with hooks.h, so a death is a copy of the segment taken in the hook. There
 *
 *   1. every page that was ready before is found without any recovery, unless the operation takes
 *      it away in the end;
 *   2. undoing the log gives the segment of the last safe point, word for word, and it is sound;
 *   3. reaping gives a sound segment without the victim's pins, with all or nothing of what it
 *      wrote; everything that nobody pins can be had, and written again. */
#include "deaths.h"

#include "hooks.h"

#include <sys/mman.h>
#include <unistd.h>

#define DEEP 12 /* one death in so many is followed by deaths in its recovery, */
#define EACH 5  /* after every so many stores of that */

segment real;
client victim, survivor, second, late;

static copy first_copy, second_copy;
uint8_t *safe;
const scene *running;
uint32_t stores;
static uint32_t recovery_stores, deaths, log_before;
enum at_work now;

struct stable_page stable[PAGES];
uint32_t stable_count;

static void make_copy(copy *c, const client *of, bool and_survivor) {
    c->base = mmap(NULL, real.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int life = memfd_create("life", MFD_CLOEXEC);
    CHECK(c->base != MAP_FAILED && life >= 0);
    memcpy(c->base, real.base, real.bytes);
    c->and_survivor = and_survivor;
    c->who = (client){.life = life, .slot = of->slot};
    c->who.at = lcs_attachment_new(c->base, real.bytes, life, of->slot, of->at->epoch, 0);
    CHECK(c->who.at);
    c->who.at->pidns = 0; /* only the byte locks are asked who lives */
    c->who.h = lci_open(c->who.at, PAGES);
    CHECK(c->who.h);
}

static void drop_copy(copy *c) {
    client_forget(&c->who);
    munmap(c->base, real.bytes);
}

/* ------------------------------------------------------------------ deaths */

static void look(may_be ready) {
    memcpy(first_copy.base, real.base, real.bytes);
    if (!running->marks) look_up(&first_copy.who);
    undo(&first_copy);
    memcpy(first_copy.base, real.base, real.bytes);
    recover(&first_copy, ready);
    if (deaths++ % DEEP) return;
    memcpy(first_copy.base, real.base, real.bytes);
    now = RECOVERING;
    reap(&first_copy);
    now = LOOKING;
}

/* Outside of the lock everything is one; inside it the log has just been emptied. A repair works
 * without the log: whoever comes next begins it anew. */
static void note_safe_point(void) {
    const lcs_lock *lock = lcs_lock_of(victim.at);
    uint32_t log = lc_load(&lock->log_count);
    bool inside = (lc_load(&lock->word) & LCS_LOCK_SLOT) == victim.slot;
    bool unlogged = lc_load(&victim.h->root->repairing) != 0;
    if (!inside || unlogged || (log == 0 && log_before)) memcpy(safe, real.base, real.bytes);
    log_before = log;
}

static bool lies_in(const uint8_t *base, const volatile void *word) {
    const volatile uint8_t *at = word;
    return at >= base && at < base + real.bytes;
}

static void on_store(const volatile void *word) {
    void (*hook)(int) = lc_pause_hook;
    lc_pause_hook = NULL; /* what a scene does at a pause point is for the victim alone */
    if (now == OPERATING && lies_in(real.base, word)) {
        now = LOOKING;
        stores++;
        note_safe_point();
        look(running->during);
        now = OPERATING;
    } else if (now == RECOVERING && lies_in(first_copy.base, word) &&
               recovery_stores++ % EACH == 0) {
        now = LOOKING;
        memcpy(second_copy.base, first_copy.base, real.bytes);
        recover(&second_copy, running->during);
        now = RECOVERING;
    }
    lc_pause_hook = hook;
}

/* ------------------------------------------------------------------ scenes */

static void note_stable(void) {
    const prompt *runs[] = {&first_run, &second_run};
    stable_count = 0;
    for (uint32_t r = 0; r < 2; r++)
        for (uint32_t i = 0; i < runs[r]->n; i++) {
            lc_found found;
            lc_key key = runs[r]->keys[i];
            lc_dict_find(&survivor.h->dict, key.lo, key.hi, &found);
            if (found.node == LC_NIL || lci_state_of(found.word) != LCI_READY) continue;
            stable[stable_count].key = key;
            stable[stable_count].missed = false;
            stable[stable_count].page = found.node;
            stable[stable_count++].gen = found.gen;
        }
    CHECK(stable_count >= HELD);
}

static void compare_with_end(void) {
    for (uint32_t i = 0; i < stable_count; i++) {
        const lci_page *p = &survivor.h->pages[stable[i].page];
        bool stays = finds(&survivor, &stable[i].key) && lc_load(&p->gen) == stable[i].gen;
        if (stays && stable[i].missed) WRONG("page %u stays and was missed", stable[i].page);
    }
}

static void play_scene(const scene *s) {
    static lease held;
    running = s;
    check_running = s->name;
    stores = recovery_stores = deaths = log_before = 0;
    real = index_make(PAGES);
    safe = malloc(real.bytes);
    victim = client_join(&real);
    survivor = client_join(&real);
    second = client_join(&real);
    late = (client){.life = -1};
    s->prepare();
    CHECK_EQ(match(&survivor, &first_run, &held), HELD);
    note_stable();
    make_copy(&first_copy, &survivor, false);
    make_copy(&second_copy, &second, true);
    memcpy(safe, real.base, real.bytes);
    now = OPERATING;
    s->operate();
    now = LOOKING;
    note_safe_point();
    look(s->after);
    compare_with_end();
    now = OUTSIDE;
    printf("%s: %u deaths\n", s->name, deaths);
    drop_copy(&first_copy);
    drop_copy(&second_copy);
    free(safe);
    segment_end(&real); /* its clients are left as they are: nothing of theirs is used again */
}

static uint32_t play_all(const scene *s, int argc, char **argv, bool list) {
    uint32_t played = 0;
    for (; s->name; s++) {
        bool wanted = argc == 1 || list;
        for (int i = 1; i < argc; i++) wanted |= strcmp(argv[i], s->name) == 0;
        if (list) puts(s->name);
        else if (wanted) play_scene(s);
        played += wanted;
    }
    return played;
}

int main(int argc, char **argv) {
    bool list = argc > 1 && strcmp(argv[1], "--list") == 0;
    after_store = on_store;
    uint32_t played = play_all(scenes, argc, argv, list);
    played += play_all(page_scenes, argc, argv, list);
    return played ? 0 : 2;
}
