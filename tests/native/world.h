/* A segment in memory between guard pages, and clients of it that live and die in one process.
 *
 * Every client has a slot, and a descriptor of its own that proves its life: closing it is its
 * death, as far as anybody else can tell. */
#ifndef WORLD_H
#define WORLD_H

#include "harness.h"
#include "entry.h"

#define BLOCKING LC_BLOCK, FOREVER
/* What a call returns that is called again for as long as it says so: after 50 ms it lets its caller look for
 * signals. */
#define THROUGH(call)                   \
    ({                                  \
        int rc_;                        \
        do rc_ = (call);                \
        while (rc_ == LC_E_INTR);       \
        rc_;                            \
    })
#define MAX_KEYS 600

typedef struct segment {
    int fd;
    uint8_t *base;
    uint64_t bytes;
    uint64_t pages; /* of the index in it, else 0 */
} segment;

/* Zeroed memory with a header; an access outside of it faults. */
segment segment_make(uint64_t bytes);
segment index_make(uint64_t pages); /* formatted, all pages grown */
segment index_make_grown(uint64_t pages, uint64_t grown);
segment index_make_ordered(uint64_t pages, uint64_t grown, uint32_t eviction);
void segment_end(segment *s);

/* Can a child notice that it was forked? qemu's user emulation takes every advice and passes on none,
 * also what a fork depends on. */
bool advice_is_heard(void);

/* A descriptor for byte locks on the segment, a description of its own. */
int life_descriptor(const segment *s);

typedef struct client {
    lcs_attachment *at;
    lci_handle *h; /* NULL when there is no index in the segment */
    int life;
    uint32_t slot;
} client;

client client_join(const segment *s);
client client_join_as(const segment *s, uint32_t flags);
client reader_join(const segment *s); /* read-only, without a slot */
void client_leave(client *c);         /* gives back all that it holds */
void client_die(client *c);           /* gives back nothing */
void client_forget(client *c);        /* what it has in this process, after it was reaped */

/* Every invariant of the index, pins as well, on a copy. */
void index_check(const segment *s);
int index_broken(const segment *s); /* the number of the first broken invariant, or 0 */
lci_counts index_counts(const client *c);
uint32_t pins_of(const client *c, uint32_t page); /* of all clients and tickets */

/* Keys of a prompt, different for each number; and of one bucket, to make long chains. */
lc_key prompt_key(uint32_t number, uint32_t i);
lc_key crowded_key(uint32_t bucket, uint32_t i);

#define NS ((lci_ns_ref)(1u << 8)) /* the default namespace of a fresh index */

typedef struct prompt { /* keys [0, n), and a reservation of them */
    lc_key keys[MAX_KEYS];
    int32_t page[MAX_KEYS], fresh[MAX_KEYS];
    uint8_t status[MAX_KEYS];
    uint32_t n, made;
    lci_reserve_op op;
} prompt;

typedef struct lease {
    lci_lease head;
    int32_t pages[2 * MAX_KEYS];
} lease;

void prompt_make(prompt *p, uint32_t number, uint32_t n);
/* Of which kind the pages are that prompt_reserve gets. */
extern bool independent_prompts;
/* lci_reserve until it is through; its result. `made` and `fresh` are its new pages. */
int prompt_reserve(client *c, prompt *p, lci_ns_ref ns, uint32_t shards);
void prompt_publish(client *c, prompt *p, uint32_t shard);
void prompt_unpin(client *c, prompt *p);
/* Make, reserve, publish and unpin: n ready pages under these keys. */
void prompt_fill(client *c, prompt *p, uint32_t number, uint32_t n);
uint32_t match(client *c, const prompt *p, lease *l); /* pages matched and pinned */
uint32_t peek(const client *c, const prompt *p);
uint32_t evict(client *c, uint32_t want); /* pages freed */
void collect(client *c); /* all that others left to do */

#ifdef LC_PAUSE_POINTS
/* Call `what` once, at this pause point; its own pause points call nothing. */
void play(int point, void (*what)(void));
void play_after(int point, uint32_t passes, void (*what)(void)); /* lets as many pass before */
void check_played(void);
#endif

#endif
