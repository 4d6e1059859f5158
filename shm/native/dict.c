#include "dict.h"

void lc_dict_find_slow(const lc_dict *d, uint64_t lo, uint64_t hi, lc_found *out) {
    for (int i = 0; i < LC_WALK_RESTARTS; i++) {
        uint32_t head = lc_load_acquire(&d->buckets[lc_bucket(d, lo)]);
        LC_PAUSE(LC_AT_WALK_HEAD);
        if (lc_dict_walk(d, lo, hi, head, out)) return;
    }
    out->node = LC_NIL;
}

void lc_dict_unlink(lc_txn *t, const lc_dict *d, uint32_t node) {
    lc_node *self = lc_node_at(d, node);
    _Atomic uint32_t *at = &d->buckets[lc_bucket(d, lc_load(&self->lo))];
    for (int hops = 0; hops <= LC_CHAIN_MAX; hops++) {
        uint32_t here = lc_load(at);
        if (here == node) {
            lc_txn_set(t, at, lc_load(&self->next));
            return;
        }
        if (here >= d->nodes) break;
        at = &lc_node_at(d, here)->next;
    }
    t->error = LC_E_CORRUPT;
}

uint32_t lc_dict_chain(const lc_dict *d, uint64_t lo) {
    uint32_t count = 0, at = lc_load(&d->buckets[lc_bucket(d, lo)]);
    while (at < d->nodes && count <= LC_CHAIN_MAX) {
        at = lc_load(&lc_node_at(d, at)->next);
        count++;
    }
    return count;
}

void lc_dict_insert(lc_txn *t, const lc_dict *d, uint32_t node, lc_key key, uint32_t word) {
    lc_node *self = lc_node_at(d, node);
    uint32_t bucket = lc_bucket(d, key.lo);
    lc_gen_open(&self->gen);
    LC_PAUSE(LC_AT_KEY_ODD);
    lc_store(&self->lo, key.lo);
    lc_store(&self->hi, key.hi);
    lc_store(&self->next, lc_load(&d->buckets[bucket]));
    lc_txn_set(t, &self->word, word);
    LC_PAUSE(LC_AT_KEY_WRITTEN);
    lc_gen_close(&self->gen);
    lc_dict_link(t, d, node);
    LC_PAUSE(LC_AT_LINKED);
}
