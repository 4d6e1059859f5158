/* What must hold of a segment in which somebody was killed. */
#ifndef JUDGE_H
#define JUDGE_H

#include "scenes.h"

typedef struct page_note { /* a ready page */
    lc_key key;
    lci_ns_ref ns;
    uint32_t page, gen, kind;
    bool first;  /* it was there before the first victim began */
    bool here;   /* and before this one did */
    bool missed; /* by a lookup in any state that was looked at, nothing recovered yet */
} page_note;

typedef struct judge {
    const scene *scene;
    stage *real, *copy;
    const uint8_t *raw; /* the state that is looked at */
    uint8_t *undone;    /* the same with its log undone */
    uint8_t *allowed;   /* for each word: may recovery change it? */
    page_note stable[2 * MAX_KEYS]; /* ready before the operation */
    page_note found[2 * MAX_KEYS];  /* by a lookup in the state that is looked at, as it is */
    uint32_t stable_count, found_count;
    uint32_t new_ready[4 * MAX_KEYS]; /* how often so many new pages were ready after recovery */
    uint64_t dead;
    uint32_t step, looked, failures, dumps, dump_every;
    const char *phase, *folder;
} judge;

#define FOUND(j, ...)                                                         \
    do {                                                                      \
        if (++(j)->failures <= 5) {                                           \
            fprintf(stderr, "%s, %s, step %u: ", (j)->scene->name, (j)->phase, (j)->step); \
            fprintf(stderr, __VA_ARGS__);                                     \
            fputc('\n', stderr);                                              \
        }                                                                     \
    } while (0)

/* judge.c */
/* What is there in the real segment before a victim begins, the first or another one. */
void judge_note_stable(judge *j, bool first);
void judge_copy(judge *j, const uint8_t *raw);  /* a death here, in the copy */
void judge_real(judge *j);                      /* a death that has happened */
void judge_end(judge *j);                       /* the operation is over, its victim lives */
uint64_t judge_dead(const stage *s);            /* slots of clients that nobody has taken back */
void judge_sound(judge *j, stage *s, const char *when, bool quiet, lci_report *report);

/* touched.c: has recovery left alone what is not its business? */
void judge_undo_touched(judge *j);
void judge_reap_touched(judge *j);

/* goon.c: the survivors go on, to the last page. */
void judge_go_on(judge *j, stage *s);

#endif
