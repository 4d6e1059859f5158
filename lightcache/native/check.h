/* What the parts of `check` share. */
#ifndef LCI_CHECK_H
#define LCI_CHECK_H

#include "index.h"

#include <stdio.h>

typedef struct checker {
    lci_handle *h;
    lci_report *out;
    uint8_t *seen;      /* which structure holds the page: SEEN_* */
    uint32_t *children; /* counted again */
    uint16_t *row0;     /* pins that tickets account for */
    uint32_t *listed;   /* reservation + 1 that lists the page */
    uint8_t *chunk_owned; /* by a list, or free */
    uint32_t ns_pages[LCI_NAMESPACES], group_pages[LCI_NUMBERS];
    bool quiet;
    uint64_t now;       /* tickets whose deadline has passed are late */
} checker;
enum { SEEN_FREE = 1, SEEN_CHAIN = 2, SEEN_QUEUE = 4, SEEN_DOOMED = 8, SEEN_CLIMBED = 16 };

#define BROKEN(c, number, p, o, ...)                                               \
    do {                                                                           \
        if (!(c)->out->broken) {                                                   \
            (c)->out->broken = (number);                                           \
            (c)->out->page = (p);                                                  \
            (c)->out->other = (o);                                                 \
            snprintf((c)->out->message, sizeof (c)->out->message, __VA_ARGS__);    \
        }                                                                          \
        return false;                                                              \
    } while (0)

/* check_records.c: reservations, tickets, their page lists, namespaces. */
bool lci_check_records(checker *c);

#endif
