/* A state is looked at three times, each time from the same bytes:
 *
 *   1. as it is: every page that was ready is found, unless the operation takes it away in the end;
 *      a ready page has its bytes;
 *   2. with the log undone: the index is sound, and undoing has changed nothing but the words that
 *      the log names;
 *   3. by a survivor, who takes the lock from the dead one and takes back what it held: the index
 *      is sound, nothing is pinned by the dead, only what was theirs has changed (touched.c), and
 *      everybody can go on until every page has been handed out again (goon.c).
 *
 * Readers during recovery. The survivor is compiled with pause points; at each of them a reader
 * without a lock looks up every page that it found before recovery began. Between two entries
 * that are undone lies a pause point, and undoing an entry is one store: so of undoing no state is
 * left out. Between two pause points of reaping lie several stores; the states between them are
 * looked at when recovery itself is the victim (stepper.c), after each of its instructions, and
 * there it is compiled as it is installed. A thread that reads all the time would meet these states
 * by chance only. */
#include "judge.h"

static judge *reading;
static stage *read_stage;

static bool finds(stage *s, const page_note *p) {
    return lci_peek1(s->reader.h, &p->key, 1, p->ns) == 1;
}

/* One that somebody pins while it is marked comes back: that one lookup comes out short. */
static bool marked(const judge *j, const stage *s, const page_note *p) {
    return j->scene->meanwhile &&
           lci_state_of(lc_load(&s->reader.h->pages[p->page].word)) == LCI_EVICTING;
}

static void read_at_pause(int point) {
    lc_pause_hook = NULL; /* lookups have pause points of their own */
    for (uint32_t i = 0; i < reading->found_count; i++) {
        const page_note *p = &reading->found[i];
        if (!finds(read_stage, p) && !marked(reading, read_stage, p))
            FOUND(reading, "page %u was missed during recovery, at pause point %d", p->page, point);
    }
    lc_pause_hook = read_at_pause;
}

static void begin_reading(judge *j, stage *s) {
    reading = j;
    read_stage = s;
    lc_pause_hook = read_at_pause;
}

static void end_reading(void) { lc_pause_hook = NULL; }

static bool is_stable(const judge *j, const lci_page *p, bool first) {
    for (uint32_t i = 0; i < j->stable_count; i++)
        if (j->stable[i].key.lo == lc_load(&p->lo) && j->stable[i].key.hi == lc_load(&p->hi))
            return !first || j->stable[i].first;
    return false;
}

/* Everything that a lookup finds now, as many as there is room for in `notes`. */
static uint32_t find_all(stage *s, page_note *notes) {
    const lci_handle *h = s->reader.h;
    uint32_t n = 0;
    for (uint32_t page = 0; page < h->page_count; page++) {
        const lci_page *p = &h->pages[page];
        uint32_t word = lc_load(&p->word), ns = lci_ns_of(word);
        page_note one = {.key = {lc_load(&p->lo), lc_load(&p->hi)},
                         .ns = ns | lc_load(&h->ns[ns].epoch) << 8,
                         .page = page,
                         .gen = lc_load(&p->gen),
                         .kind = word & LCI_KIND};
        if (lci_state_of(word) != LCI_READY || !finds(s, &one)) continue;
        NEED(n < 2 * MAX_KEYS);
        notes[n++] = one;
    }
    return n;
}

void judge_note_stable(judge *j, bool first) {
    page_note now[2 * MAX_KEYS];
    uint32_t n = find_all(j->real, now);
    for (uint32_t i = 0; i < j->stable_count; i++) {
        j->stable[i].here = finds(j->real, &j->stable[i]);
        j->stable[i].missed = false;
    }
    for (uint32_t i = 0; i < n; i++) {
        if (is_stable(j, &j->real->reader.h->pages[now[i].page], false)) continue;
        NEED(j->stable_count < 2 * MAX_KEYS);
        now[i].first = first;
        now[i].here = true;
        j->stable[j->stable_count++] = now[i];
    }
}

static void read_raw(judge *j, stage *s) {
    j->found_count = find_all(s, j->found);
    for (uint32_t i = 0; i < j->stable_count; i++) {
        page_note *p = &j->stable[i];
        const lci_page *page = &s->reader.h->pages[p->page];
        bool ready = lci_state_of(lc_load(&page->word)) == LCI_READY;
        if (finds(s, p) || marked(j, s, p)) continue;
        p->missed = true;
        if (ready && lc_load(&page->gen) == p->gen && lci_ns_open(s->reader.h, p->ns))
            FOUND(j, "page %u is ready and a lookup misses it", p->page);
    }
}

static void bytes_whole(judge *j, stage *s, const char *when) {
    const lci_handle *h = s->reader.h;
    for (uint32_t page = 0; page < h->page_count; page++) {
        const lci_page *p = &h->pages[page];
        if (lci_state_of(lc_load(&p->word)) != LCI_READY) continue;
        for (uint32_t w = 0; w < STAMP_WORDS; w++)
            if (s->stamps[page * STAMP_WORDS + w] != stamp_of(lc_load(&p->lo), lc_load(&p->hi), w))
                FOUND(j, "%s: page %u is ready, word %u of its bytes is not", when, page, w);
    }
}

/* A page that has its key still is of the kind that it was when it was ready. */
static void same_kind(judge *j, stage *s, const page_note *n, const char *when) {
    const lci_page *p = &s->reader.h->pages[n->page];
    uint32_t word = lc_load(&p->word), state = lci_state_of(word);
    bool named = state == LCI_READY || state == LCI_EVICTING;
    if (named && lc_load(&p->gen) == n->gen && (word & LCI_KIND) != n->kind)
        FOUND(j, "%s: page %u was of kind %#x, its word is %#x", when, n->page, n->kind, word);
}

static void still_found(judge *j, stage *s, const char *when) {
    for (uint32_t i = 0; i < j->found_count; i++) {
        if (!finds(s, &j->found[i])) FOUND(j, "%s: page %u is missed", when, j->found[i].page);
        same_kind(j, s, &j->found[i], when);
    }
    for (uint32_t i = 0; i < j->stable_count; i++) same_kind(j, s, &j->stable[i], when);
    bytes_whole(j, s, when);
}

void judge_sound(judge *j, stage *s, const char *when, bool quiet, lci_report *report) {
    NEED(lci_check(s->base, s->bytes, s->pages, quiet, report) == LC_OK);
    if (report->broken) FOUND(j, "%s: invariant %d, %s", when, report->broken, report->message);
}

static void dump(const judge *j, const stage *s, const char *what) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s-%s-%u-%u", j->folder, what, j->phase, (uint32_t)s->pages,
             j->step);
    FILE *out = fopen(path, "wb");
    NEED(out && fwrite(s->base, 1, s->g.end, out) == s->g.end && fclose(out) == 0);
}

static bool rebuilding(const judge *j, const stage *s) {
    return j->scene->unsound || lc_load(&s->survivor.h->root->repairing);
}

static void undo(judge *j, bool dumped) {
    lci_report report;
    begin_reading(j, j->copy);
    int undone = lci_recover_copy(j->copy->base, j->copy->bytes, j->copy->pages);
    end_reading();
    if (undone < 0) FOUND(j, "undoing gave %d", undone);
    memcpy(j->undone, j->copy->base, j->copy->bytes);
    judge_undo_touched(j);
    still_found(j, j->copy, "after undoing");
    if (rebuilding(j, j->copy)) return; /* sound again only when somebody has had the lock */
    judge_sound(j, j->copy, "after undoing", false, &report);
    if (dumped) dump(j, j->copy, "undone");
}

uint64_t judge_dead(const stage *s) {
    uint64_t dead = 0;
    for (uint32_t slot = 1; slot < LCS_SLOTS; slot++)
        if (lc_load(&lcs_client_of(s->survivor.at, slot)->state) == LCS_CLIENT_TAKEN &&
            !stage_alive(s, slot))
            dead |= UINT64_C(1) << slot;
    return dead;
}

/* By turns all at once, and in portions as small as can be. */
static int take_back(const judge *j, stage *s, uint32_t slot) {
    const lcs_client *c = lcs_client_of(s->survivor.at, slot);
    if (j->looked % 4 < 2) return lci_reap_slot(s->survivor.h, slot, LC_BLOCK, FOREVER);
    int rc;
    do {
        int64_t left = 1;
        rc = lci_reap_some(s->survivor.h, slot, LC_BLOCK, FOREVER, &left);
    } while (rc == 1 && lc_load(&c->state) == LCS_CLIENT_TAKEN);
    return rc;
}

/* By turns from either end: whom of several dead clients is taken back first must not matter. */
static void reap(judge *j, stage *s) {
    for (uint32_t i = 1; i < LCS_SLOTS; i++) {
        uint32_t slot = j->looked % 2 ? LCS_SLOTS - i : i;
        if (!(j->dead >> slot & 1)) continue;
        int rc = take_back(j, s, slot);
        if (rc != 1) FOUND(j, "taking back slot %u gave %d", slot, rc);
    }
    /* A dead one without a slot may hold the lock as well. */
    int rc = lci_grow(s->survivor.h, 0, LC_BLOCK, FOREVER);
    if (rc != LC_OK) FOUND(j, "the lock cannot be had: %d", rc);
}

static void nothing_of_the_dead(judge *j, stage *s) {
    const lci_handle *h = s->survivor.h;
    if (judge_dead(s)) FOUND(j, "dead clients are left: %#llx", (unsigned long long)judge_dead(s));
    for (uint32_t slot = 1; slot < LCS_SLOTS; slot++) {
        if (lc_load(&lcs_client_of(s->survivor.at, slot)->state) != LCS_CLIENT_FREE) continue;
        for (uint32_t page = 0; page < h->page_count; page++)
            if (lc_load(lci_pin(h, slot, page))) FOUND(j, "dead slot %u pins page %u", slot, page);
    }
}

static void count_new(judge *j, stage *s) {
    const lci_handle *h = s->reader.h;
    uint32_t n = 0;
    for (uint32_t page = 0; page < h->page_count; page++)
        if (lci_state_of(lc_load(&h->pages[page].word)) == LCI_READY)
            n += !is_stable(j, &h->pages[page], true);
    j->new_ready[n]++;
}

static void recover(judge *j, stage *s, bool dumped) {
    lci_report report;
    j->dead = judge_dead(s);
    begin_reading(j, s);
    reap(j, s);
    if (j->scene->unsound && lci_repair(s->survivor.h, LC_BLOCK, FOREVER) != LC_OK)
        FOUND(j, "it cannot be repaired");
    end_reading();
    bool rebuilt = lc_load(&((lci_root *)(j->undone + s->g.root))->repairing) != 0;
    if (!s->path && !rebuilt && !j->scene->unsound) judge_reap_touched(j);
    still_found(j, s, "after reaping");
    judge_sound(j, s, "after reaping", true, &report);
    nothing_of_the_dead(j, s);
    if (dumped) dump(j, s, "reaped");
    count_new(j, s);
    judge_go_on(j, s);
}

void judge_copy(judge *j, const uint8_t *raw) {
    bool dumped = j->dump_every && j->looked % j->dump_every == 0;
    j->raw = raw;
    stage_refresh(j->copy, j->real, raw);
    read_raw(j, j->copy);
    bytes_whole(j, j->copy, "as it is");
    undo(j, dumped);
    stage_refresh(j->copy, j->real, raw); /* again from the victim's last store, by its survivor */
    recover(j, j->copy, dumped);
    j->dumps += dumped;
    j->looked++;
}

void judge_real(judge *j) {
    read_raw(j, j->real);
    bytes_whole(j, j->real, "as it is");
    recover(j, j->real, false);
}

void judge_end(judge *j) {
    int taken = 0, made = j->scene->made, before = j->scene->made_before;
    for (uint32_t i = 0; i < j->stable_count; i++) {
        const page_note *n = &j->stable[i];
        const lci_page *p = &j->real->reader.h->pages[n->page];
        bool stays = finds(j->real, n) && lc_load(&p->gen) == n->gen;
        taken += !stays;
        if (stays && n->missed) FOUND(j, "page %u was missed and stays", n->page);
    }
    int expected = j->real->reader.h->ranks && j->scene->taken_ranked ? j->scene->taken_ranked : j->scene->taken;
    if (taken != expected) FOUND(j, "%d pages were taken, not %d", taken, expected);
    count_new(j, j->real);
    if (!j->new_ready[made]) FOUND(j, "%d new pages were never ready", made);
    for (int i = 1; i < 4 * MAX_KEYS; i++)
        if (i != made && i != before && j->new_ready[i])
            FOUND(j, "%d of %d new pages were ready", i, made);
}
