/* Keys of a chain of pages: the XXH3 hashes of 128 bits of one text, up to the end of each page. The
 * library that hashes everything else (xxhash, from Python) costs a call for each page. No segment. */
#include "index.h"

#define SHORTEST 241 /* bytes; texts below it are hashed in another way */
#define LANES 8
#define STRIPE 64
#define SECRET 192
#define STRIPES 16 /* of a block, after which the lanes are stirred */
#define MAIN UINT64_C(0x9e3779b185ebca87)
#define SECOND UINT64_C(0xc2b2ae3d27d4eb4f)
#define SMALL UINT64_C(0x9e3779b1)

static const uint64_t constants[SECRET / 8] = {
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
    0xc3ebd33483acc5ea, 0xeb6313faffa081c5, 0x49daf0b751dd0d17, 0x9e68d429265516d3,
    0xfca1477d58be162b, 0xce31d07ad1b8f88f, 0x280416958f3acb45, 0x7e404bbbcafbd7af,
};

typedef struct chain {
    uint64_t lane[LANES];
    uint8_t secret[SECRET];
    const uint8_t *start, *pages; /* see lci_chain_keys */
    uint64_t before;
    uint64_t stripes; /* that the lanes have taken */
} chain;

static inline uint64_t word_at(const uint8_t *bytes) {
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

/* The 64 bytes of the text from a place on. */
static inline const uint8_t *stripe_at(const chain *c, uint64_t place) {
    return place < c->before ? c->start + place : c->pages + (place - c->before);
}

static void begin(chain *c, uint64_t seed) {
    static const uint64_t lanes[LANES] = {
        0xc2b2ae3d, MAIN, SECOND, 0x165667b19e3779f9,
        0x85ebca77c2b2ae63, 0x85ebca77, 0x27d4eb2f165667c5, SMALL,
    };
    memcpy(c->lane, lanes, sizeof lanes);
    for (uint32_t i = 0; i < SECRET / 8; i++) {
        uint64_t word = i % 2 ? constants[i] - seed : constants[i] + seed;
        memcpy(c->secret + 8 * i, &word, sizeof word);
    }
}

static inline void take(uint64_t *lane, const uint8_t *stripe, const uint8_t *secret) {
    for (uint32_t i = 0; i < LANES; i++) {
        uint64_t word = word_at(stripe + 8 * i), mixed = word ^ word_at(secret + 8 * i);
        lane[i ^ 1] += word;
        lane[i] += (mixed & UINT32_MAX) * (mixed >> 32);
    }
}

static void stir(chain *c) {
    const uint8_t *secret = c->secret + SECRET - STRIPE;
    for (uint32_t i = 0; i < LANES; i++) {
        uint64_t lane = c->lane[i];
        c->lane[i] = (lane ^ lane >> 47 ^ word_at(secret + 8 * i)) * SMALL;
    }
}

static uint64_t folded(const uint64_t *lane, const uint8_t *secret, uint64_t sum) {
    for (uint32_t i = 0; i < LANES; i += 2) {
        unsigned __int128 product = lane[i] ^ word_at(secret + 8 * i);
        product *= lane[i + 1] ^ word_at(secret + 8 * i + 8);
        sum += (uint64_t)product ^ (uint64_t)(product >> 64);
    }
    sum = (sum ^ sum >> 37) * UINT64_C(0x165667919e3779f9);
    return sum ^ sum >> 32;
}

/* Of the first `length` bytes. The lanes take all stripes before the last byte for good, and the last
 * 64 bytes for this hash alone. */
static lc_key hash(chain *c, uint64_t length) {
    uint64_t lane[LANES];
    while (c->stripes < (length - 1) / STRIPE) {
        take(c->lane, stripe_at(c, c->stripes * STRIPE), c->secret + 8 * (c->stripes % STRIPES));
        if (++c->stripes % STRIPES == 0) stir(c);
    }
    memcpy(lane, c->lane, sizeof lane);
    take(lane, stripe_at(c, length - STRIPE), c->secret + SECRET - STRIPE - 7);
    return (lc_key){
        folded(lane, c->secret + 11, length * MAIN),
        folded(lane, c->secret + SECRET - STRIPE - 11, ~(length * SECOND)),
    };
}

/* Whether one of the words is no token; see MARK in hashing.py. */
static bool marked(const uint8_t *words, uint64_t bytes) {
    uint32_t marks = 0;
    for (uint64_t i = 0; i + sizeof marks <= bytes; i += sizeof marks) {
        uint32_t word;
        memcpy(&word, words + i, sizeof word);
        marks |= word == UINT32_MAX;
    }
    return marks;
}

/* The text is `before` bytes of `start` and then n pages of `page` bytes each, of which `start` has the
 * first 64 bytes as well. LC_E_RANGE: so short a text is not hashed here, or it has what is no token. */
LC_API int lci_chain_keys(const uint8_t *start, uint64_t before, const uint8_t *pages, uint64_t page,
                          uint32_t n, uint64_t seed, lc_key *out) {
    chain c = {.start = start, .pages = pages, .before = before};
    if (before + page < SHORTEST || marked(pages, n * page)) return LC_E_RANGE;
    begin(&c, seed);
    for (uint32_t i = 0; i < n; i++) out[i] = hash(&c, before + (i + 1) * page);
    return LC_OK;
}
