/*
 * How long each rank computed in a step, and how long it waited for others: what names a slow rank, for which all the
 * others wait, so that by the length of a step they are all alike.
 *
 * A rank is compared with its peers: the ranks of its stage of the pipeline, which do the same; where it has none, all.
 * The slowest is the one that lies farthest above the median of its peers (of two the lower).
 */
#ifndef MEGATRAIN_TRAIN_RANK_TIMES_H
#define MEGATRAIN_TRAIN_RANK_TIMES_H

#include "comm/grid.h"
#include "record/record.h"

enum { RANK_HOST_BYTES = 64, LAG_STEPS = 5 };

typedef struct {
    World *world;
    Stream *stream;
    int64_t *ns;                   /* [2][ranks]: computing, waiting */
    double *sorted;                /* [ranks] */
    char (*host)[RANK_HOST_BYTES]; /* [ranks] */
    int slow, streak, named; /* the rank that lags notably, in so many steps now; the last one told of */
} RankTimes;

/* Collective. ERR_MEMORY. */
Err rank_times_open(RankTimes *t, World *world, Stream *stream, SetupArena *memory);

/*
 * Collective: each rank's times of a step. Notable is a lag of LAG_NOTABLE or more of the same rank in LAG_STEPS calls
 * one after another; then rank 0 says once where that rank is.
 */
Err rank_times_share(RankTimes *t, double compute_s, double wait_s, MetricsRanks *out);

/* The same from what every rank took, of any grid: what rank_times_share makes of it. */
void rank_times_compare(RankTimes *t, Grid grid, MetricsRanks *out);

#endif
