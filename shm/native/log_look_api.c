/* SharedLog: looking at the log of log.h, which changes nothing. */
#include "log_handle.h"

#include <stdio.h>

/* Of each slot, how many entries its reader has still to read; -1: it has none. Returns how many
 * entries were ever appended. No lock: cursors move meanwhile. */
LC_API int64_t lcx_log_behind(lcx_log *l, int64_t *behind) {
    int rc = lcs_usable(l->at);
    if (rc != LC_OK) return rc;
    for (uint32_t slot = 0; slot < LCS_SLOTS; slot++) {
        uint64_t at = lc_load_acquire(lcx_log_cursor_of(l, slot));
        uint64_t appended = lc_load_acquire(&l->root->appended); /* after the cursor: not below */
        uint64_t count = appended - lcx_log_entry_of(at);
        if (at && lcx_log_entry_of(at) > appended) return LC_E_CORRUPT;
        if (count > l->capacity) count = l->capacity; /* it joins, or has moved on since */
        behind[slot] = at ? (int64_t)count : -1;
    }
    uint64_t appended = lc_load_acquire(&l->root->appended);
    return appended < LCX_LOG_MOST ? (int64_t)appended : LC_E_CORRUPT;
}

/* The entry that this reader reads next. LC_E_OWNER: it is none. */
LC_API int64_t lcx_log_position(lcx_log *l) {
    int rc = lcx_log_usable(l);
    uint64_t at = rc == LC_OK ? lc_load(lcx_log_cursor_of(l, l->at->slot)) : 0;
    if (rc != LC_OK) return rc;
    if (at == 0) return LC_E_OWNER;
    return at <= LCX_LOG_MOST ? (int64_t)at - 1 : LC_E_CORRUPT;
}

/* Which client counts as being in a slot; raised when it is taken and when it is given back. */
static uint32_t epoch_of(const lcx_log *l, uint32_t slot) {
    return lc_load_acquire(&lcs_client_of(l->at, slot)->epoch);
}

static int check_writer(const lcx_log *l, char *text, size_t room) {
    uint32_t word = lc_load(&l->root->writer), slot = word & LCS_LOCK_SLOT;
    if (word == 0 || word == LCX_LOG_LEFT) return 0;
    if (slot == 0 || word & LCS_LOCK_OTHERS)
        return snprintf(text, room, "the writer is said to be %#x", word);
    uint32_t epoch = epoch_of(l, slot);
    bool reads = lc_load_acquire(lcx_log_cursor_of(l, slot)) != 0;
    if (reads && (epoch & 0xffffff) == word >> LCS_LOCK_EPOCH_SHIFT && epoch_of(l, slot) == epoch)
        return snprintf(text, room, "the writer, client %u, has a cursor", slot);
    return 0;
}

/* No client is in the slot, and yet it has a cursor. A client that leaves gives up its cursor
 * first. */
static bool abandoned(const lcx_log *l, uint32_t slot) {
    uint32_t epoch = epoch_of(l, slot);
    if (lc_load_acquire(&lcs_client_of(l->at, slot)->state) != LCS_CLIENT_FREE) return false;
    return lc_load_acquire(lcx_log_cursor_of(l, slot)) && epoch_of(l, slot) == epoch;
}

/* Cursors move and entries are appended meanwhile: `appended` before a cursor is
 * loaded bounds the cursor from below, `appended` afterwards from above. */
static int check_cursors(const lcx_log *l, char *text, size_t room) {
    for (uint32_t slot = 0; slot < LCS_SLOTS; slot++) {
        uint64_t before = lc_load_acquire(&l->root->appended);
        uint64_t at = lc_load_acquire(lcx_log_cursor_of(l, slot)), entry = lcx_log_entry_of(at);
        uint64_t after = lc_load_acquire(&l->root->appended);
        if (at == 0) continue;
        if (slot == 0 || abandoned(l, slot))
            return snprintf(text, room, "slot %u has a cursor and no client", slot);
        bool joining = at & LCX_LOG_JOINING;
        if (entry > after || (!joining && entry + l->capacity < before))
            return snprintf(text, room, "reader %u stands at entry %llu, of %llu appended", slot,
                            (unsigned long long)entry, (unsigned long long)after);
    }
    return 0;
}

/* Is this entry, which looked wrong, one that cannot have been overwritten? It cannot until as many
 * entries have been appended after it as there are slots, nor as long as a reader has to read it. A
 * process that saw a later stamp sees both that `appended` has moved and that the cursors have. */
static bool kept(const lcx_log *l, uint64_t entry) {
    if (lc_load_acquire(&l->root->appended) < entry + l->capacity) return true;
    for (uint32_t slot = 1; slot < LCS_SLOTS; slot++) {
        uint64_t at = lc_load_acquire(lcx_log_cursor_of(l, slot));
        if (at && !(at & LCX_LOG_JOINING) && lcx_log_entry_of(at) <= entry) return true;
    }
    return false;
}

static int check_entries(const lcx_log *l, char *text, size_t room) {
    uint64_t appended = lc_load_acquire(&l->root->appended);
    for (uint64_t i = appended > l->capacity ? appended - l->capacity : 0; i < appended; i++) {
        const lcx_log_slot *one = lcx_log_slot_of(l, i);
        uint32_t stamp = lc_load_acquire(&one->stamp), length = lc_load(&one->length);
        if ((stamp == (uint32_t)i && length <= l->message) || !kept(l, i)) continue;
        if (stamp != (uint32_t)i)
            return snprintf(text, room, "slot %u holds entry %u, expected %u",
                            (uint32_t)(i % l->capacity), stamp, (uint32_t)i);
        return snprintf(text, room, "entry %llu has %u bytes, the most is %u",
                        (unsigned long long)i, length, l->message);
    }
    return 0;
}

static int check_all(const lcx_log *l, char *text, size_t room) {
    uint64_t appended = lc_load(&l->root->appended);
    if (appended >= LCX_LOG_MOST)
        return snprintf(text, room, "%llu entries are said to have been appended",
                        (unsigned long long)appended);
    int broken = check_writer(l, text, room);
    if (!broken) broken = check_cursors(l, text, room);
    return broken ? broken : check_entries(l, text, room);
}

/* Derive every invariant again, while others append and read. 0 clean, 1 broken (`text` names the
 * first). Under the lock, which undoes what a dead holder left. A process that attached read-only
 * cannot take it, and finds the same: the one logged word is sound before the store and after
 * it. */
LC_API int lcx_log_check(lcx_log *l, char *text, uint32_t room, int wait, uint64_t deadline) {
    lc_txn t;
    if (l->at->readonly) {
        int usable = lcs_usable(l->at);
        return usable == LC_OK ? check_all(l, text, room) != 0 : usable;
    }
    int rc = lcx_log_lock(l, &t, LCX_LOG_CHECK, wait, deadline);
    if (rc != LC_OK) return rc;
    int broken = check_all(l, text, room);
    rc = lcx_log_unlock(l, &t);
    return rc == LC_OK ? broken != 0 : rc;
}
