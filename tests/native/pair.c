#include "pair.h"

segment s;
client a, b;
prompt p, q;
lease l;

static void join(segment made, bool independent) {
    s = made;
    independent_prompts = independent;
    a = client_join(&s);
    b = client_join(&s);
    memset(&l, 0, sizeof l);
}

void set_up(uint64_t pages) { join(index_make(pages), false); }
void set_up_grown(uint64_t pages, uint64_t grown) { join(index_make_grown(pages, grown), false); }
void set_up_independent(uint64_t pages) { join(index_make(pages), true); }

void set_up_lru(uint64_t pages) { join(index_make_ordered(pages, pages, LCI_LRU), false); }
void set_up_ranked(uint64_t pages) { join(index_make_ordered(pages, pages, LCI_HZ), false); }

void tear_down(void) {
    client_leave(&a);
    client_leave(&b);
    index_check(&s);
    segment_end(&s);
}

uint32_t hits_of(uint32_t page) {
    uint64_t used = lc_load(&a.h->pages[page].used);
    return a.h->ranks ? lch_hits_of(used) : (uint32_t)(used & LCI_HITS_MASK);
}

static _Atomic uint32_t *damaged;
static uint32_t sound;

void break_word(_Atomic uint32_t *word, uint32_t value) {
    damaged = word;
    sound = lc_load(word);
    lc_store(word, value);
}

void mend_word(void) {
    lc_store(damaged, sound);
    index_check(&s);
}

void let_a_ticket_end(void) {
    lci_ticket_ref ref;
    CHECK_EQ(match(&b, &p, &l), p.n);
    CHECK_EQ(lci_ticket_give(b.h, l.pages, p.n, LC_NIL, 0, UINT64_C(1) << a.slot, FOREVER, &ref,
                             BLOCKING), LC_OK);
    CHECK_EQ(lci_release(b.h, &l.head), LC_OK);
    CHECK_EQ(lci_ticket_drop(b.h, &ref, BLOCKING), LC_OK);
    CHECK_EQ(lc_load(lci_pin(b.h, 0, (uint32_t)p.page[0])), 1);
    lc_store(&a.h->tickets[ref.index].deadline_ns, 0);
}
