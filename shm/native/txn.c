#include "txn.h"

#ifdef LC_PAUSE_POINTS
LC_API void (*lc_pause_hook)(int point);
#endif

static bool sound(const _Atomic uint64_t *log, uint32_t count, uint64_t begin, uint64_t end) {
    for (uint32_t i = 0; i < count; i++) {
        uint32_t tag = (uint32_t)lc_load(&log[i]);
        uint64_t at = (uint64_t)(tag & ~LC_LOG_KIND) * 4;
        if (at < begin || at + 4 > end) return false;
        if ((tag & LC_LOG_KIND) == LC_LOG_SOFT && ++i == count) return false;
    }
    return true;
}

static void undo_one(uint8_t *base, uint32_t tag, uint32_t old, uint32_t value) {
    _Atomic uint32_t *word = (_Atomic uint32_t *)(base + (uint64_t)(tag & ~LC_LOG_KIND) * 4);
    if ((tag & LC_LOG_KIND) == LC_LOG_SOFT)
        atomic_compare_exchange_strong_explicit(word, &value, old, memory_order_acq_rel,
                                                memory_order_acquire);
    else
        lc_store_release(word, old);
}

int lc_txn_undo(uint8_t *base, lcs_lock *lock, uint64_t begin, uint64_t end) {
    const _Atomic uint64_t *log = (_Atomic uint64_t *)(base + LCS_LOG_OFFSET);
    uint32_t count = lc_load_acquire(&lock->log_count);
    if (count > LCS_LOG_ENTRIES || !sound(log, count, begin, end)) return LC_E_CORRUPT;
    /* A soft pair is found by its first half; walking backwards we would meet the second. Mark
     * the firsts on the way up. */
    uint8_t first[LCS_LOG_ENTRIES / 8];
    memset(first, 0, sizeof first);
    for (uint32_t i = 0; i < count; i++) {
        first[i / 8] |= (uint8_t)(1u << (i % 8));
        if (((uint32_t)lc_load(&log[i]) & LC_LOG_KIND) == LC_LOG_SOFT) i++;
    }
    for (uint32_t i = count; i-- > 0;) {
        if (!(first[i / 8] >> (i % 8) & 1)) continue;
        uint64_t entry = lc_load(&log[i]), word = (uint64_t)((uint32_t)entry & ~LC_LOG_KIND) * 4;
        if (word < begin || word + 4 > end) return LC_E_CORRUPT; /* a process scribbles just now */
        uint32_t value = i + 1 < count ? (uint32_t)lc_load(&log[i + 1]) : 0;
        undo_one(base, (uint32_t)entry, (uint32_t)(entry >> 32), value);
        /* One entry less is in force: a process that continues after our death does not begin again
         * at the newest, which would unlink records once more that readers find by now. */
        lc_kill_fence();
        lc_store_release(&lock->log_count, i);
        LC_PAUSE(LC_AT_RECOVER);
    }
    return (int)count;
}
