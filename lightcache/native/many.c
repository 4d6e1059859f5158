/* Reservations of several chains in one call. Each is what a call of its own would have made of it:
 * with its own progress, its own steps and its own holds of the lock, so that a death anywhere
 * leaves what it would have left between two calls.
 *
 * Chain i has the keys [offsets[i], offsets[i+1]), and is reserved from its starts[i]-th on. Its
 * pages and statuses follow those of the chain before. */
#include "index.h"

static uint32_t keys_of(const int64_t *offsets, uint32_t i) {
    return (uint32_t)(offsets[i + 1] - offsets[i]);
}

static bool settled(const lci_reserve_op *op, uint32_t rest) {
    return op->pinned && !op->look.due && (op->stopped || op->cursor >= rest);
}

/* `lci_reserve` for each chain. LC_OK: all are settled. LC_E_BUSY, LC_E_INTR and LC_E_GROW: call
 * again with the same `ops`, it continues where it was. After any other error the caller gives back
 * what was reserved, of all of them. */
LC_API int lci_reserve_many(lci_handle *h, lci_reserve_op *ops, const lc_key *keys,
                            const int64_t *offsets, const int64_t *starts, uint32_t chains,
                            int32_t *page, uint8_t *status, int wait, uint64_t deadline) {
    uint64_t begun = lcs_now_ns();
    for (uint32_t i = 0; i < chains; i++) {
        uint32_t n = keys_of(offsets, i), start = (uint32_t)starts[i];
        if (start > n) return LC_E_RANGE;
        if (!settled(&ops[i], n - start)) {
            int rc = lci_reserve(h, &ops[i], keys + offsets[i], n, start, page, status, wait,
                                 deadline);
            if (rc < 0) return rc;
            rc = i + 1 < chains ? lci_again(begun, wait, deadline) : LC_OK;
            if (rc != LC_OK) return rc;
        }
        page += n - start;
        status += n - start;
    }
    return LC_OK;
}

/* Publish every shard of each reservation. `pages` are their new pages, one reservation's after the
 * other's. `codes[i]` is what `lci_publish` returned for the last shard of the i-th; 1 also where
 * nothing was new. A failure of one does not stop the others. */
LC_API int lci_publish_many(lci_handle *h, const lci_reserve_op *ops, uint32_t chains,
                            const int32_t *pages, int32_t *codes) {
    for (uint32_t i = 0; i < chains; i++) {
        const lci_reserve_op *op = &ops[i];
        codes[i] = 1;
        for (uint32_t shard = 0; op->gen && shard < op->shards && codes[i] >= 0; shard++)
            codes[i] = lci_publish(h, op->rid, op->gen, shard, pages, op->made);
        pages += op->made;
    }
    return LC_OK;
}

/* `lci_unreserve` for each. An error is the last one's: nothing is left out for it. */
LC_API int lci_unreserve_many(lci_handle *h, lci_reserve_op *ops, const int64_t *offsets,
                              const int64_t *starts, uint32_t chains, const int32_t *page,
                              const uint8_t *status) {
    int rc = LC_OK;
    for (uint32_t i = 0; i < chains; i++) {
        uint32_t rest = keys_of(offsets, i) - (uint32_t)starts[i];
        int one = lci_unreserve(h, &ops[i], page, status, rest);
        if (one != LC_OK) rc = one;
        page += rest;
        status += rest;
    }
    return rc;
}
