/*
 * Ranks as threads of one process, for tests of every layout: communicators and worlds of them, behind the same table
 * as those of processes. Calls are always compared (comm_check_calls); one that is late may find the group stopped:
 * ERR_PEER, with the same text.
 */
#ifndef MEGATRAIN_TEST_THREAD_RANKS_H
#define MEGATRAIN_TEST_THREAD_RANKS_H

#include "comm/grid.h"

typedef struct CommHub CommHub; /* what the ranks of one process share */

/* delay_ms: every completion is held back that long (a test that nothing depends on timing). */
Err comm_hub_open(int world_size, int delay_ms, CommHub **out);
void comm_hub_close(CommHub *hub);
/* Collective over the members, each calling from its own thread with the same list (world ranks, ascending). Of one
 * member, or of none: comm_open_self. */
Err comm_open_threads(CommHub *hub, Comm *c, const char *name, int world_rank, const int *members, int size);
Err world_open_threads(World *w, CommHub *hub, Grid g, int rank); /* collective */
/* Wakes every waiting rank; all open requests end with ERR_PEER and this text. The first call wins. */
void comm_hub_abort(CommHub *hub, const char *why);

#endif
