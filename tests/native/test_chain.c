/* Keys of chains, against hashes of xxhash 0.8.4. */
#include "harness.h"
#include "entry.h"

#define LENGTH 3200
#define SEED UINT64_C(0x9e3779b97f4a7c15)

static const struct {
    uint64_t seed, length, lo, hi;
} known[] = {
    {0, 241, 0xb578122aac5a052b, 0x0eb518a9e5022fc9},
    {0, 1024, 0x222382da19208524, 0x9a89237a9f85a424},
    {0, 1025, 0x4fde56e73735523b, 0xf815525559ea7447},
    {SEED, 256, 0x19d70d4ef15a4427, 0xda005de2c9f19047},
    {SEED, 1088, 0x85708156a88ab43f, 0xbf9cecd2a4027068},
    {SEED, 1089, 0x06525a3c859e7518, 0x725995462e7b5543},
    {SEED, 2049, 0x1d2ddd939c369f64, 0xd07bb2c97e2ea542},
    {SEED, 3200, 0xf199dcae477c4a45, 0x07c9e4e81fe6fc5a},
};

static uint8_t text[LENGTH];

static void fill(void) {
    for (uint32_t i = 0; i < LENGTH; i++) text[i] = (uint8_t)((i * i + 3 * i) >> 3);
}

static void hashes_are_those_of_xxh3(void) {
    fill();
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        lc_key key;
        CHECK_EQ(lci_chain_keys(text, 0, text, known[i].length, 1, known[i].seed, &key), LC_OK);
        CHECK_EQ(key.lo, known[i].lo);
        CHECK_EQ(key.hi, known[i].hi);
    }
}

static void keys_of_a_chain_are_those_of_its_beginnings(void) {
    enum { PAGE = 32, BEFORE = 209, PAGES = (LENGTH - BEFORE) / PAGE };
    lc_key keys[PAGES], one;
    uint8_t start[BEFORE + 64];
    fill();
    memcpy(start, text, sizeof start);
    CHECK_EQ(lci_chain_keys(start, BEFORE, text + BEFORE, PAGE, PAGES, SEED, keys), LC_OK);
    for (uint32_t i = 0; i < PAGES; i++) {
        CHECK_EQ(lci_chain_keys(text, 0, text, BEFORE + (i + 1) * PAGE, 1, SEED, &one), LC_OK);
        CHECK_EQ(keys[i].lo, one.lo);
        CHECK_EQ(keys[i].hi, one.hi);
    }
}

static void short_texts_are_refused(void) {
    lc_key key = {7, 7};
    CHECK_EQ(lci_chain_keys(text, 200, text + 200, 40, 1, SEED, &key), LC_E_RANGE);
    CHECK_EQ(key.lo, 7);
}

static void words_that_are_no_tokens_are_refused(void) {
    enum { BEFORE = 240, PAGE = 8, PAGES = 4 };
    lc_key keys[PAGES];
    uint8_t start[BEFORE + 64];
    for (size_t place = 0; place <= PAGES * PAGE; place += 4) {
        fill();
        memcpy(start, text, sizeof start);
        memset(text + BEFORE + place, 0xff, 4);
        CHECK_EQ(lci_chain_keys(start, BEFORE, text + BEFORE, PAGE, PAGES, SEED, keys),
                 place < PAGES * PAGE ? LC_E_RANGE : LC_OK);
    }
    fill();
    memset(text + BEFORE + 2, 0xff, 4); /* of two words */
    CHECK_EQ(lci_chain_keys(start, BEFORE, text + BEFORE, PAGE, PAGES, SEED, keys), LC_OK);
}

const test chain_tests[] = {
    TEST(hashes_are_those_of_xxh3),
    TEST(keys_of_a_chain_are_those_of_its_beginnings),
    TEST(short_texts_are_refused),
    TEST(words_that_are_no_tokens_are_refused),
    END_OF_TESTS,
};
