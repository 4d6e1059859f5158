/* Intrusive doubly linked lists over fixed records, changed under the lock through the undo log.
 *
 * A node is a record's index; after the last record come the list heads, so a list is a ring that
 * passes through its head and no link is ever empty while linked. A node is on one list at most.
 * Only the holder of the lock reads or writes links. */
#ifndef LC_LIST_H
#define LC_LIST_H

#include "txn.h"

#define LC_NIL UINT32_MAX

typedef struct lc_link {
    _Atomic uint32_t prev;
    _Atomic uint32_t next;
} lc_link;

/* Process-local: where the links lie. Taken from checked geometry, never read from the segment. */
typedef struct lc_lists {
    uint8_t *links; /* link of record 0 */
    uint32_t stride;
    uint32_t nodes;
    lc_link *heads;
    uint32_t head_count;
} lc_lists;

static inline lc_link *lc_link_at(const lc_lists *l, uint32_t node) {
    if (LC_LIKELY(node < l->nodes)) return (lc_link *)(l->links + (uint64_t)node * l->stride);
    if (LC_LIKELY(node - l->nodes < l->head_count)) return &l->heads[node - l->nodes];
    return NULL;
}

static inline uint32_t lc_list_head(const lc_lists *l, uint32_t list) { return l->nodes + list; }

static inline bool lc_list_empty(const lc_lists *l, uint32_t list) {
    return lc_load(&l->heads[list].next) == lc_list_head(l, list);
}

/* The node that a link of `list` leads to; LC_NIL at its end. A damaged link sets `t->error`. */
static inline uint32_t lc_list_follow(lc_txn *t, const lc_lists *l, uint32_t list,
                                      const lc_link *link) {
    uint32_t node = lc_load(&link->next);
    if (node == lc_list_head(l, list)) return LC_NIL;
    if (LC_UNLIKELY(node >= l->nodes)) {
        t->error = LC_E_CORRUPT;
        return LC_NIL;
    }
    return node;
}

/* The first node of a list. Its link back must lead to the head: else it would be unlinked elsewhere and
 * stay the first here, however often a caller takes it off. With that, each pair of links that a caller
 * goes through agrees, so a node is on one list at most, and what ends on sound lists ends on damaged ones. */
static inline uint32_t lc_list_first(lc_txn *t, const lc_lists *l, uint32_t list) {
    uint32_t node = lc_list_follow(t, l, list, &l->heads[list]);
    if (node == LC_NIL || LC_LIKELY(lc_load(&lc_link_at(l, node)->prev) == lc_list_head(l, list)))
        return node;
    t->error = LC_E_CORRUPT;
    return LC_NIL;
}

/* Link `node`, which is on no list, before `at` (a head: at the end of that list). */
static inline void lc_list_insert(lc_txn *t, const lc_lists *l, uint32_t node, uint32_t at) {
    lc_link *right = lc_link_at(l, at), *self = lc_link_at(l, node), *left = NULL;
    if (right) left = lc_link_at(l, lc_load(&right->prev));
    if (LC_UNLIKELY(!right || !self || !left || lc_load(&left->next) != at)) {
        t->error = LC_E_CORRUPT;
        return;
    }
    lc_txn_set(t, &self->prev, lc_load(&right->prev));
    lc_txn_set(t, &self->next, at);
    lc_txn_set(t, &left->next, node);
    lc_txn_set(t, &right->prev, node);
}

static inline void lc_list_append(lc_txn *t, const lc_lists *l, uint32_t node, uint32_t list) {
    lc_list_insert(t, l, node, lc_list_head(l, list));
}

/* Unlink `node`. Its own links keep their values: they are what undoing needs. Returns the head
 * if the list is empty now, else LC_NIL. */
static inline uint32_t lc_list_remove(lc_txn *t, const lc_lists *l, uint32_t node) {
    lc_link *self = lc_link_at(l, node);
    uint32_t prev = lc_load(&self->prev), next = lc_load(&self->next);
    lc_link *left = lc_link_at(l, prev), *right = lc_link_at(l, next);
    if (LC_UNLIKELY(!left || !right || lc_load(&left->next) != node ||
                    lc_load(&right->prev) != node)) {
        t->error = LC_E_CORRUPT;
        return LC_NIL;
    }
    lc_txn_set(t, &left->next, next);
    lc_txn_set(t, &right->prev, prev);
    return prev == next ? prev : LC_NIL;
}

static inline void lc_lists_format(const lc_lists *l) {
    for (uint32_t i = 0; i < l->head_count; i++) {
        lc_store(&l->heads[i].prev, lc_list_head(l, i));
        lc_store(&l->heads[i].next, lc_list_head(l, i));
    }
}

#endif
