/*
 * The process grid: which rank sits where, and the communicators of one rank.
 *
 * Ranks are numbered with tp fastest, then dp (parallel.order tp-cp-ep-dp-pp with the axes that are 1 left
 * out): rank = dp_rank * tp + tp_rank.
 *
 *   tp    ranks that share a layer's weights                  size tp
 *   kv    those of them that share one kv head, neighbours: with tp up to kv_heads this rank alone
 *   sp    the same ranks when rows are sharded between them (sequence parallelism), else this rank alone:
 *         layers call collectives on it always, and a group of one is a no-op
 *   dp    ranks with the same shard and other samples         size dp
 *   world all
 *   host  all, for numbers in host memory, whatever the device
 */
#ifndef MEGATRAIN_COMM_GRID_H
#define MEGATRAIN_COMM_GRID_H

#include "comm/comm.h"
#include "comm/groups.h"

typedef struct {
    int tp, dp;
    bool sp;
    int kv; /* ranks that share a kv head; divides tp; 0 = 1 */
} Grid;

typedef struct {
    Grid grid;
    int rank, size;
    int tp_rank, dp_rank;
    Comm tp, sp, kv, dp, world, host;
} World;

enum { WORLD_COMMS = 6 };

/* tp, sp, kv, dp, world, host. */
Comm *world_comm(World *w, int i);

/* How the communicator of a list of ranks, ascending, is opened; all members call. */
typedef struct {
    void *user;
    Err (*open)(void *user, Comm *c, const char *name, const int *members, int size);
} CommOpener;

int grid_size(Grid g);
GridShape grid_shape(Grid g);
void grid_coords(Grid g, int rank, int *tp_rank, int *dp_rank);

Err world_open(World *w, Grid g, int rank, CommOpener opener); /* collective */
Err world_open_self(World *w);
Err world_open_null(World *w, Grid g, int rank);
Err world_open_threads(World *w, CommHub *hub, Grid g, int rank); /* collective */
void world_close(World *w);

#endif
