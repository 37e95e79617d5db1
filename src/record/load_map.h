/*
 * How evenly the experts of each layer were used over a run, thinned out to a size that does not depend on its length:
 * of neighbouring steps the mean load of each layer, which is the rows of its busiest expert over those of the mean one
 * (docs/watching.md). Reports draw it.
 */
#ifndef MEGATRAIN_RECORD_LOAD_MAP_H
#define MEGATRAIN_RECORD_LOAD_MAP_H

#include "base/arena.h"

enum { LOAD_MAP_BINS = 64 };

typedef struct {
    int layers;                  /* layers that are mixtures, from the first; 0: no step had loads */
    int bins;                    /* in use, each of `stride` steps; the last one may have fewer */
    int64_t stride;              /* doubles whenever there are no more */
    int64_t step[LOAD_MAP_BINS]; /* the last of each bin */
    int steps[LOAD_MAP_BINS];    /* in each, at most stride */
    double *sum;                 /* [layers][LOAD_MAP_BINS] */
} LoadMap;

/* Steps in ascending order. One with other layers than the first is left out. ERR_MEMORY. */
Err load_map_add(LoadMap *m, SetupArena *memory, int64_t step, const double *load, int layers);

/* The mean load of a layer over a bin. */
double load_map_at(const LoadMap *m, int layer, int bin);

#endif
