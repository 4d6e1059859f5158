/* After every instruction the whole segment would have to be compared: 170 KB, of which a scene
 * uses a tenth. So only the parts that a small scene can reach are compared each time, and the
 * whole every WHOLE_EVERY calls: a store elsewhere stops the program, and the parts must be
 * widened. It cannot pass unseen. Of the log the entries in force and some behind them are
 * compared: entries are written where the count stands, at most two at a time, and are dead until
 * they are counted. */
#include "watch.h"

#define WHOLE_EVERY 256
#define NAMESPACES 4
#define RECORDS 8 /* reservations, tickets, slots */
#define CHUNKS 16
#define LOG_BEHIND 4 /* entries */

static void part(watch *w, uint64_t from, uint64_t bytes) {
    NEED(w->parts < WATCHED);
    w->part[w->parts++] = (struct part){from, from + bytes};
}

void watch_begin(watch *w, const uint8_t *base, uint64_t pages) {
    lci_geometry geometry, *g = &geometry;
    NEED(lci_geometry_of(pages, order_tested(), g) == LC_OK);
    *w = (watch){.base = base, .bytes = stage_notes(g)};
    w->seen = malloc(w->bytes);
    NEED(w->seen);
    memcpy(w->seen, base, w->bytes);
    part(w, LCS_LOCK_OFFSET, sizeof(lcs_lock));
    part(w, LCS_CLIENTS_OFFSET, RECORDS * sizeof(lcs_client));
    part(w, g->root, sizeof(lci_root));
    part(w, g->heads, LCI_LISTS * sizeof(lc_link));
    part(w, g->namespaces, NAMESPACES * sizeof(lci_namespace));
    part(w, g->reservation, RECORDS * sizeof(lci_reservation));
    part(w, g->ticket, RECORDS * sizeof(lci_ticket));
    part(w, g->chunk, CHUNKS * sizeof(lci_chunk));
    part(w, g->bucket, g->buckets * 4);
    part(w, g->page, g->pages * sizeof(lci_page));
    part(w, g->rows, RECORDS * g->row_stride * 2);
    if (g->end > g->ranks) part(w, g->ranks, g->advice - g->ranks);
    w->advice = g->advice;
    w->advice_end = g->end;
    part(w, stage_pool(g), g->pages * STAMP_WORDS * 8);
}

static bool changed(watch *w, uint64_t from, uint64_t to) {
    if (memcmp(w->seen + from, w->base + from, to - from) == 0) return false;
    memcpy(w->seen + from, w->base + from, to - from);
    return true;
}

static void compare(const watch *w, uint64_t from, uint64_t to) {
    if (memcmp(w->seen + from, w->base + from, to - from) == 0) return;
    while (w->seen[from] == w->base[from]) from++;
    fprintf(stderr, "a store at %llu, which is not watched\n", (unsigned long long)from);
    exit(2);
}

void watch_whole(const watch *w) {
    compare(w, 0, LCS_LOG_OFFSET);
    compare(w, LCS_PAYLOAD_OFFSET, w->advice); /* any bytes may stand in the advice */
    compare(w, w->advice_end, w->bytes);
}

bool watch_changed(watch *w) {
    bool any = false;
    for (uint32_t i = 0; i < w->parts; i++) any |= changed(w, w->part[i].from, w->part[i].to);
    uint64_t entries = lc_load(&((lcs_lock *)(w->base + LCS_LOCK_OFFSET))->log_count) + LOG_BEHIND;
    if (entries > LCS_LOG_ENTRIES) entries = LCS_LOG_ENTRIES;
    any |= changed(w, LCS_LOG_OFFSET, LCS_LOG_OFFSET + entries * 8);
    if (++w->calls % WHOLE_EVERY == 0) watch_whole(w);
    return any;
}
