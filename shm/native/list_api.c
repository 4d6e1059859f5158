/* SharedList: the intrusive lists of list.h over nodes that hold nothing else. */
#include "list.h"
#include "lock.h"

#include <stdio.h>
#include <stdlib.h>

/* Payload: counts[lists], where[nodes] (list + 1; 0: on none), heads[lists], links[nodes]. */
typedef struct lcx_list {
    lcs_attachment *at;
    _Atomic uint32_t *counts;
    _Atomic uint32_t *where;
    lc_lists lists;
    uint64_t begin, end;
} lcx_list;

LC_API uint64_t lcx_list_bytes(uint32_t nodes, uint32_t lists) {
    return (uint64_t)lists * 4 + (uint64_t)nodes * 4 + ((uint64_t)lists + nodes) * sizeof(lc_link);
}

static void point(lcx_list *l, uint8_t *base, uint32_t nodes, uint32_t lists) {
    uint8_t *at = base + LCS_PAYLOAD_OFFSET;
    l->counts = (_Atomic uint32_t *)at;
    l->where = l->counts + lists;
    l->lists.heads = (lc_link *)(l->where + nodes);
    l->lists.links = (uint8_t *)(l->lists.heads + lists);
    l->lists.stride = sizeof(lc_link);
    l->lists.nodes = nodes;
    l->lists.head_count = lists;
    l->begin = LCS_PAYLOAD_OFFSET;
    l->end = LCS_PAYLOAD_OFFSET + lcx_list_bytes(nodes, lists);
}

LC_API void lcx_list_format(uint8_t *base, uint32_t nodes, uint32_t lists) {
    lcx_list l;
    point(&l, base, nodes, lists);
    lc_lists_format(&l.lists);
}

LC_API lcx_list *lcx_list_open(lcs_attachment *at, uint32_t nodes, uint32_t lists) {
    lcx_list *l = calloc(1, sizeof *l);
    if (!l) return NULL;
    l->at = at;
    point(l, at->base, nodes, lists);
    return l;
}

LC_API void lcx_list_close(lcx_list *l) { free(l); }

static int lock(lcx_list *l, lc_txn *t, int wait, uint64_t deadline) {
    int rc = lcs_usable(l->at);
    if (rc != LC_OK) return rc;
    if (l->at->slot == 0) return LC_E_READONLY;
    if (wait == LC_TRY ? pthread_mutex_trylock(&l->at->door) : pthread_mutex_lock(&l->at->door))
        return LC_E_BUSY;
    rc = lcs_lock_take(l->at, t, 0, wait, deadline, l->begin, l->end);
    if (rc != LC_OK) pthread_mutex_unlock(&l->at->door);
    return rc;
}

static int unlock(lcx_list *l, lc_txn *t) {
    int rc = lcs_lock_drop(l->at, t, l->begin, l->end);
    pthread_mutex_unlock(&l->at->door);
    return rc;
}

static void attach_node(lcx_list *l, lc_txn *t, uint32_t list, uint32_t node, bool front) {
    uint32_t head = lc_list_head(&l->lists, list);
    lc_list_insert(t, &l->lists, node, front ? lc_load(&l->lists.heads[list].next) : head);
    lc_txn_set(t, &l->where[node], list + 1);
    lc_txn_add(t, &l->counts[list], 1);
}

static void detach_node(lcx_list *l, lc_txn *t, uint32_t list, uint32_t node) {
    lc_list_remove(t, &l->lists, node);
    lc_txn_set(t, &l->where[node], 0);
    lc_txn_add(t, &l->counts[list], (uint32_t)-1);
}

/* Move a node to an end of a list, from wherever it is. `must_be_free`: LC_E_TWICE when it is on a
 * list already. */
LC_API int lcx_list_put(lcx_list *l, uint32_t list, uint32_t node, int front, int must_be_free,
                        int wait, uint64_t deadline) {
    lc_txn t;
    if (list >= l->lists.head_count || node >= l->lists.nodes) return LC_E_RANGE;
    int rc = lock(l, &t, wait, deadline);
    if (rc != LC_OK) return rc;
    uint32_t on = lc_load(&l->where[node]);
    if (on > l->lists.head_count) t.error = LC_E_CORRUPT;
    else if (on && must_be_free) t.error = LC_E_TWICE;
    else {
        if (on) detach_node(l, &t, on - 1, node);
        if (!t.error) attach_node(l, &t, list, node, front != 0);
    }
    return unlock(l, &t);
}

LC_API int lcx_list_remove(lcx_list *l, uint32_t node, int wait, uint64_t deadline) {
    lc_txn t;
    if (node >= l->lists.nodes) return LC_E_RANGE;
    int rc = lock(l, &t, wait, deadline);
    if (rc != LC_OK) return rc;
    uint32_t on = lc_load(&l->where[node]);
    if (on == 0) t.error = LC_E_MISSING;
    else if (on > l->lists.head_count) t.error = LC_E_CORRUPT;
    else detach_node(l, &t, on - 1, node);
    return unlock(l, &t);
}

/* Take the node at an end off its list, into `*node`. LC_E_MISSING: the list is empty. */
LC_API int lcx_list_pop(lcx_list *l, uint32_t list, int front, uint32_t *node, int wait,
                        uint64_t deadline) {
    lc_txn t;
    if (list >= l->lists.head_count) return LC_E_RANGE;
    int rc = lock(l, &t, wait, deadline);
    if (rc != LC_OK) return rc;
    lc_link *head = &l->lists.heads[list];
    *node = lc_load(front ? &head->next : &head->prev);
    if (*node == lc_list_head(&l->lists, list)) t.error = LC_E_MISSING;
    else if (*node >= l->lists.nodes) t.error = LC_E_CORRUPT;
    else detach_node(l, &t, list, *node);
    return unlock(l, &t);
}

/* Copy a list's nodes in order, at most `room`. Returns how many. */
LC_API int lcx_list_copy(lcx_list *l, uint32_t list, int32_t *out, uint32_t room, int wait,
                         uint64_t deadline) {
    lc_txn t;
    uint32_t n = 0;
    if (list >= l->lists.head_count) return LC_E_RANGE;
    int rc = lock(l, &t, wait, deadline);
    if (rc != LC_OK) return rc;
    uint32_t at = lc_load(&l->lists.heads[list].next);
    for (; at < l->lists.nodes && n < room; at = lc_load(&lc_link_at(&l->lists, at)->next))
        out[n++] = (int32_t)at;
    if (at != lc_list_head(&l->lists, list)) t.error = LC_E_CORRUPT;
    rc = unlock(l, &t);
    return rc == LC_OK ? (int)n : rc;
}

/* Length of a list; no lock. */
LC_API int lcx_list_length(lcx_list *l, uint32_t list) {
    int rc = lcs_usable(l->at);
    if (rc != LC_OK) return rc;
    if (list >= l->lists.head_count) return LC_E_RANGE;
    uint32_t count = lc_load(&l->counts[list]);
    return count <= l->lists.nodes ? (int)count : LC_E_CORRUPT;
}

/* The list a node is on; LC_E_MISSING: none. No lock. */
LC_API int lcx_list_where(lcx_list *l, uint32_t node) {
    int rc = lcs_usable(l->at);
    if (rc != LC_OK) return rc;
    if (node >= l->lists.nodes) return LC_E_RANGE;
    uint32_t on = lc_load(&l->where[node]);
    if (on > l->lists.head_count) return LC_E_CORRUPT;
    return on ? (int)on - 1 : LC_E_MISSING;
}

static int check_list(const lcx_list *l, uint32_t list, uint8_t *seen, char *text, size_t room) {
    uint32_t head = lc_list_head(&l->lists, list), prev = head, n = 0;
    uint32_t at = lc_load(&l->lists.heads[list].next);
    for (; at != head; prev = at, at = lc_load(&lc_link_at(&l->lists, at)->next), n++) {
        if (at >= l->lists.nodes || seen[at])
            return snprintf(text, room, "list %u: node %u is out of range or met before", list, at);
        if (lc_load(&lc_link_at(&l->lists, at)->prev) != prev)
            return snprintf(text, room, "list %u: node %u does not point back to %u", list, at, prev);
        if (lc_load(&l->where[at]) != list + 1)
            return snprintf(text, room, "node %u is on list %u, says %d", at, list,
                            (int)(lc_load(&l->where[at]) - 1));
        seen[at] = 1;
    }
    if (lc_load(&l->lists.heads[list].prev) != prev)
        return snprintf(text, room, "list %u does not end at node %u", list, prev);
    if (n != lc_load(&l->counts[list]))
        return snprintf(text, room, "list %u has %u nodes, its count says %u", list, n,
                        lc_load(&l->counts[list]));
    return 0;
}

static int check_all(const lcx_list *l, uint8_t *seen, char *text, size_t room) {
    int broken = 0;
    for (uint32_t i = 0; i < l->lists.head_count && !broken; i++)
        broken = check_list(l, i, seen, text, room);
    for (uint32_t n = 0; n < l->lists.nodes && !broken; n++)
        if (lc_load(&l->where[n]) && !seen[n])
            broken = snprintf(text, room, "node %u says it is on list %u and is not", n,
                              lc_load(&l->where[n]) - 1);
    return broken;
}

/* Derive every invariant again, under the lock. 0 clean, 1 broken (`text` names the first). */
LC_API int lcx_list_check(lcx_list *l, char *text, uint32_t room, int wait, uint64_t deadline) {
    lc_txn t;
    uint8_t *seen = calloc(l->lists.nodes, 1);
    int broken = 0, rc = seen ? lock(l, &t, wait, deadline) : LC_E_FULL;
    if (rc == LC_OK) {
        broken = check_all(l, seen, text, room);
        rc = unlock(l, &t);
    }
    free(seen);
    return rc == LC_OK ? broken != 0 : rc;
}

/* The same for a copy of the segment, `bytes` long, which no process changes. */
LC_API int lcx_list_check_copy(uint8_t *base, uint64_t bytes, uint32_t nodes, uint32_t lists,
                               char *text, uint32_t room) {
    lcx_list l = {0};
    if (bytes < LCS_PAYLOAD_OFFSET + lcx_list_bytes(nodes, lists)) return LC_E_RANGE;
    uint8_t *seen = calloc(nodes, 1);
    if (!seen) return LC_E_FULL;
    point(&l, base, nodes, lists);
    int broken = check_all(&l, seen, text, room);
    free(seen);
    return broken != 0;
}
