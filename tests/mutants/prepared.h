/* What is there before a scene's operation. Everywhere the first run's HELD keys are ready and
 * pinned by the survivor; `written_run` is what the victim writes, if it writes. */
#ifndef PREPARED_H
#define PREPARED_H

#include "deaths.h"

extern prompt other_run;
extern lease lent;
extern lci_ticket_ref ticket;

void crowd(prompt *p, uint32_t number, uint32_t n);
void half_full(void);
void almost_empty(void);
void full(void);
void reserved_one(void);
void reserved_two(void);
void abandoned(void);
void orphan(void);
void orphan_behind(void);
void follow_present(void);
void behind_present(void);
void under_quota(void);
void full_chain(void);
void long_ago(void);
void far_ahead(void);
void end_of(client *c); /* dead; it keeps its slot's number */
void someone_died(void);
void someone_had_published(void);
uint64_t bit(const client *c);
void someone_had_given(void);
void someone_should_adopt(void);
int adopt_as(client *c, uint32_t shard);
void settled_behind_drop(void);
void given_to_victim(void);
void given_shard(void);
void adopted(void);
void adopted_and_done(void);

#endif
