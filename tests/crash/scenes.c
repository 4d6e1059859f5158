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

static run filling;

static void fill_behind(actor *a, uint32_t number, uint32_t i, uint32_t n) {
    run_behind(a, &filling, number, i, n);
    run_publish(a, &filling, 0);
    run_unpin(a, &filling);
}

static void fill_path(stage *s, uint32_t number) {
    for (uint32_t i = 0; i < (uint32_t)s->pages / 2 - 8; i++)
        fill_behind(&s->survivor, number, i, i + 1);
}

void two_paths(stage *s) {
    fill_path(s, 0);
    fill_path(s, 1);
}

void both_kinds(stage *s) {
    uint32_t n = (uint32_t)s->pages / 2 - 8;
    fill_path(s, 0);
    run_fill(&s->survivor, 1, n, SCENE_NS);
    run_reserve(&s->survivor, &filling, 0, n + 4, 1, SCENE_NS);
    run_publish(&s->survivor, &filling, 0);
    run_unpin(&s->survivor, &filling);
    fill_behind(&s->survivor, 1, n, n + 4);
}

void two_runs_met(stage *s) {
    two_runs(s);
    stage_other(s, 0)->stopped = true;
}

void two_paths_met(stage *s) {
    two_paths(s);
    stage_other(s, 0)->stopped = true;
}

bool pin_marked(stage *s) {
    lci_handle *h = s->other[0].h;
    for (uint32_t page = 0; page < h->page_count; page++)
        if (lci_state_of(lc_load(&h->pages[page].word)) == LCI_EVICTING) {
            NEED(lci_pin_one(h, page) == LC_OK);
            return true;
        }
    return false;
}

void act_publish(actor *v) { run_publish(v, &v->writing, 0); }
void act_abandon(actor *v) { run_abandon(v, &v->writing); }
void act_collect(actor *v) { NEED(deed_evict(v, 1) == 1); }
void act_evict_all(actor *v) { deed_evict(v, (uint32_t)v->pages); }
void act_clear(actor *v) { deed_clear(v, v->notes->ns); }
void act_repair(actor *v) { NEED(lci_repair(v->h, LC_BLOCK, FOREVER) == LC_OK); }
