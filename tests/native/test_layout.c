/* Where everything lies: regions that follow one another, and what format and open refuse. */
#include "facts.h"
#include "world.h"

#include <stdlib.h>

/* Every region begins behind the one before it, and is aligned for what is in it. */
static void check_geometry(uint64_t pages) {
    lci_geometry g;
    CHECK_EQ(lci_geometry_of(pages, LCI_LRU, &g), LC_OK);
    const struct { uint64_t at, bytes, alignment; } regions[] = {
        {g.root, sizeof(lci_root), 4096},
        {g.heads, LCI_LISTS * sizeof(lc_link), 64},
        {g.namespaces, LCI_NAMESPACES * sizeof(lci_namespace), 64},
        {g.reservation, g.reservations * sizeof(lci_reservation), 64},
        {g.ticket, g.tickets * sizeof(lci_ticket), 64},
        {g.chunk, g.chunks * sizeof(lci_chunk), 256},
        {g.bucket, g.buckets * 4, 64},
        {g.page, pages * sizeof(lci_page), 4096},
        {g.rows, LCS_SLOTS * g.row_stride * 2, 64},
    };
    uint64_t end = LCS_PAYLOAD_OFFSET;
    for (size_t i = 0; i < sizeof regions / sizeof *regions; i++) {
        CHECK(regions[i].at >= end && regions[i].at % regions[i].alignment == 0);
        end = regions[i].at + regions[i].bytes;
    }
    CHECK(g.end >= end && g.end < end + 4096 && g.end % 4096 == 0);
    CHECK(g.buckets >= 2 * pages && (g.buckets & (g.buckets - 1)) == 0);
    CHECK(g.row_stride >= pages && g.row_stride % 32 == 0); /* no line shared by two rows */
    CHECK(g.reservations >= 64 && g.reservations <= 1024);
    CHECK(g.tickets >= 64 && g.tickets <= 4096);
    /* However the pages are spread over lists, each of which may leave a chunk unfilled. */
    CHECK(g.chunks >= (pages + (g.reservations + g.tickets) * (LCI_CHUNK_PAGES - 1)) /
                          LCI_CHUNK_PAGES);
}

static void geometry_of_many_sizes(void) {
    for (uint64_t pages = 1; pages < 300; pages++) check_geometry(pages);
    for (uint64_t pages = 300; pages <= UINT64_C(1) << 24; pages += pages / 3)
        check_geometry(pages);
}

static void geometry_of_a_million_pages(void) {
    lci_geometry g;
    check_geometry(1000000);
    CHECK_EQ(lci_geometry_of(1000000, LCI_LRU, &g), LC_OK);
    CHECK_EQ(g.buckets, 1 << 21);
    CHECK_EQ(g.reservations, 1024);
    CHECK_EQ(g.tickets, 4096);
    CHECK_EQ(g.rows, g.page + UINT64_C(64000000));
    CHECK_EQ(g.row_stride, 1000000);
    CHECK(g.end / 1000000 < 210); /* bytes a page */
}

static void geometry_has_bounds(void) {
    lci_geometry g;
    CHECK_EQ(lci_geometry_of(0, LCI_LRU, &g), LC_E_RANGE);
    CHECK_EQ(lci_geometry_of((UINT64_C(1) << 30) + 1, LCI_LRU, &g), LC_E_RANGE);
    CHECK_EQ(lci_geometry_of(UINT64_C(1) << 30, LCI_LRU, &g), LC_E_RANGE); /* past what the log reaches */
    CHECK_EQ(lci_geometry_of(UINT64_MAX, LCI_LRU, &g), LC_E_RANGE);
}

static void format_makes_a_sound_index_and_nothing_outside(void) {
    for (uint64_t pages = 1; pages < 200; pages += 33) {
        segment s = index_make(pages);
        index_check(&s);
        segment_end(&s);
    }
}

static void format_refuses(void) {
    lci_geometry g;
    CHECK_EQ(lci_geometry_of(100, LCI_LRU, &g), LC_OK);
    segment s = segment_make(g.end);
    CHECK_EQ(lci_format(s.base, g.end - 1, 100, 0, LCI_LRU), LC_E_RANGE);
    CHECK_EQ(lci_format(s.base, g.end, 100, 101, LCI_LRU), LC_E_RANGE);
    CHECK_EQ(lci_format(s.base, g.end, 0, 0, LCI_LRU), LC_E_RANGE);
    segment_end(&s);
}

static void open_believes_nothing(void) {
    segment s = index_make(100);
    client c = client_join(&s);
    uint64_t *figures = (uint64_t *)c.h->root;
    CHECK(lci_open(c.at, 101) == NULL);
    CHECK(lci_open(c.at, 0) == NULL);
    CHECK(lci_open(c.at, 100000) == NULL); /* larger than the mapping */
    for (int i = 0; i < 7; i++) {
        figures[i]++;
        CHECK(lci_open(c.at, 100) == NULL);
        CHECK_EQ(index_broken(&s), 38);
        figures[i]--;
    }
    client_leave(&c);
    segment_end(&s);
}

static void layout_texts_name_every_record(void) {
    const char *types[] = {"lcs_header=4096\n", "lcs_client=128\n", "lcs_lock=256\n"};
    for (int i = 0; i < 3; i++) CHECK(strstr(lcs_layout(), types[i]));
    CHECK(strstr(lcs_layout(), "lcs_lock.log_count=128+4\n"));
    CHECK(strstr(lci_layout(), "lci_page=64\n"));
    CHECK(strstr(lci_layout(), "lci_page.gen=32+4\n"));
    char text[64];
    volatile size_t little = 8; /* not known to the compiler, which would warn */
    lc_fact fact = {"name", 1234, -1};
    CHECK(!lc_facts_write(text, little, &fact, 1));
    CHECK(lc_facts_write(text, sizeof text, &fact, 1));
    CHECK(strcmp(text, "name=1234\n") == 0);
}

const test layout_tests[] = {
    TEST(geometry_of_many_sizes),
    TEST(geometry_of_a_million_pages),
    TEST(geometry_has_bounds),
    TEST(format_makes_a_sound_index_and_nothing_outside),
    TEST(format_refuses),
    TEST(open_believes_nothing),
    TEST(layout_texts_name_every_record),
    END_OF_TESTS,
};
