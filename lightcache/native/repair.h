/* What the parts of `repair` share. */
#ifndef LCI_REPAIR_H
#define LCI_REPAIR_H

#include "index.h"

typedef struct builder {
    lci_handle *h;
    uint32_t fresh; /* the root's, settled; not to be loaded again: a process might scribble */
    uint32_t *head; /* what each chain should hold: first page, then by `next` */
    uint32_t *next;
    uint8_t *mark;
    uint8_t *chunk_mark; /* chunks that are in a list */
    uint32_t *listed;    /* reservation + 1 that lists the page */
    uint32_t spare;      /* no chunk below it is without an owner */
    bool damaged[1024];  /* reservations whose lists are to be rebuilt */
} builder;

/* repair_records.c: records and their page lists, made sound before the pages are looked at. */
void lci_rebuild_records(builder *b);
void lci_rebuild_rows(builder *b);

#endif
