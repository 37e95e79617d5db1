/*
 * How long each rank computed in a step, and how long it waited for others. This names a slow rank: all the others wait
 * for it, so the length of a step is the same on all of them.
 *
 * A rank is compared with its peers: the ranks of its stage of the pipeline, which do the same, or all ranks if it is
 * the only one there. The slowest is the one that lies farthest above the median of its peers (for two, the lower).
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
    int slow, streak, named; /* the rank that lags notably; in how many steps by now; the last one that was named */
} RankTimes;

/* Collective. ERR_MEMORY. */
Err rank_times_open(RankTimes *t, World *world, Stream *stream, SetupArena *memory);

/*
 * Collective. Shares each rank's times of a step. If the same rank lags by LAG_NOTABLE or more in LAG_STEPS calls in
 * succession, rank 0 says once where that rank is.
 */
Err rank_times_share(RankTimes *t, double compute_s, double wait_s, MetricsRanks *out);

/* The figures that rank_times_share makes of every rank's times, for any grid. */
void rank_times_compare(RankTimes *t, Grid grid, MetricsRanks *out);

#endif
