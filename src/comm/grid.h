/*
 * The process grid: which rank sits where, and the communicators of one rank.
 *
 * Ranks are numbered with tp fastest, then dp (parallel.order tp-cp-ep-dp-pp with the axes that are 1 left
 * out): rank = dp_rank * tp + tp_rank.
 *
 *   tp    ranks that share a layer's weights                  size tp
 *   sp    the same ranks when rows are sharded between them (sequence parallelism), else this rank alone:
 *         layers call collectives on it always, and a group of one is a no-op
 *   dp    ranks with the same shard and other samples         size dp
 *   world all
 */
#ifndef MEGATRAIN_COMM_GRID_H
#define MEGATRAIN_COMM_GRID_H

#include "comm/comm.h"

typedef struct {
    int tp, dp;
    bool sp;
} Grid;

typedef struct {
    Grid grid;
    int rank, size;
    int tp_rank, dp_rank;
    Comm tp, sp, dp, world;
} World;

int grid_size(Grid g);
void grid_coords(Grid g, int rank, int *tp_rank, int *dp_rank);

Err world_open_self(World *w);
Err world_open_null(World *w, Grid g, int rank);
Err world_open_threads(World *w, CommHub *hub, Grid g, int rank); /* collective */
void world_close(World *w);

#endif
