/* Reserving, publishing and giving back for several requests in one call. */
#include "scenes.h"

static struct several { /* six keys of one run, and of another all but the first two of seven */
    lc_key keys[13];
    int64_t offsets[3], starts[2];
    lci_reserve_op ops[2];
    int32_t page[11], codes[2];
    uint8_t status[11];
} several;

static void ask(void) {
    several = (struct several){.offsets = {0, 6, 13}, .starts = {0, 2}};
    for (int i = 0; i < 2; i++) several.ops[i] = (lci_reserve_op){.shards = 1, .ns = SCENE_NS};
    run_keys(several.keys, 2, 6);
    run_keys(several.keys + 6, 3, 7);
}

static void reserve_several(actor *v) {
    struct several *s = &several;
    ask();
    int rc;
    do
        rc = lci_reserve_many(v->h, s->ops, s->keys, s->offsets, s->starts, 2, s->page, s->status,
                              LC_BLOCK, FOREVER);
    while (rc == LC_E_INTR || rc == LC_E_BUSY);
    NEED(rc == LC_OK);
    NEED(s->ops[0].made == 6 && s->ops[1].made == 5);
}

static void write_several(actor *v) {
    struct several *s = &several;
    reserve_several(v);
    for (uint32_t i = 0; i < 11; i++) {
        const lc_key *key = &s->keys[i < 6 ? i : i + 2];
        for (uint32_t w = 0; w < STAMP_WORDS; w++)
            v->stamps[(uint32_t)s->page[i] * STAMP_WORDS + w] = stamp_of(key->lo, key->hi, w);
    }
}

static void publish_several(actor *v) {
    struct several *s = &several;
    NEED(lci_publish_many(v->h, s->ops, 2, s->page, s->codes) == LC_OK);
    NEED(s->codes[0] == 1 && s->codes[1] == 1);
}

static void published_several(actor *v) {
    write_several(v);
    publish_several(v);
}

static void give_back_several(actor *v) {
    struct several *s = &several;
    NEED(lci_unreserve_many(v->h, s->ops, s->offsets, s->starts, 2, s->page, s->status) == LC_OK);
}

SCENE(reserve_many, .pages = 48, .set = two_runs, .act = reserve_several)
SCENE(publish_many, .pages = 48, .set = two_runs, .prepare = write_several,
      .act = publish_several, .made = 11, .made_before = 6)
SCENE(unreserve_many, .pages = 48, .set = two_runs, .prepare = published_several,
      .act = give_back_several)
