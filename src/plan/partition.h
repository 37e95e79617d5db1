/*
 * The cuts of a pipeline: the items of a model (embedding, blocks, modules, head) form a chain, and each stage is a
 * run of them. A dynamic program keeps the cuts of the least bound; which of them is the fastest only a replay of the
 * schedule tells (pipeline/simulate.h), for the order by the bound is not that by time. docs/prediction.md says why.
 *
 * For schedules in which stage s is on rank s. Seconds and bytes are the caller's.
 */
#ifndef MEGATRAIN_PLAN_PARTITION_H
#define MEGATRAIN_PLAN_PARTITION_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"
#include "pipeline/schedule.h"

/* An item of the chain: what a unit takes there; bytes that it has always, and that each unit in flight keeps. */
typedef struct {
    StageCost cost;
    int64_t state, kept;
} ChainItem;

typedef struct {
    const ChainItem *items; /* [count] */
    int count, stages, units;
    double hop;           /* seconds of a message between stages */
    bool split;           /* wgrads are actions of their own, which may fill waits */
    const int *in_flight; /* [stages] units that a stage holds at most */
    int64_t limit;        /* bytes of a stage */
} Chain;

enum { PARTITION_BEST = 64, PARTITION_STAGES = 256, PARTITION_ITEMS = 1100 };

typedef struct {
    double bound;                  /* seconds; no replay of the cut is faster */
    int16_t end[PARTITION_STAGES]; /* stage s has the items from end[s - 1], or 0, up to before end[s] */
} ChainCut;

/*
 * No step that passes `units` units through such stages is shorter: every stage does all of its work, after the first
 * unit has come through the stages before it; unless wgrads can wait, the last unit's gradients have to go back through
 * these, too; and the first unit passes all stages and back.
 */
double partition_bound(const Chain *c, const int16_t *end);

/* Do the bytes of each stage keep to the limit? */
bool partition_fits(const Chain *c, const int16_t *end);

/*
 * The `most` (at most PARTITION_BEST) cuts of the least bounds that fit, each stage with an item at least, least
 * first; of cuts with one bound those whose stages are more equal come first as far as the table kept them. *count may
 * be 0. ERR_MEMORY.
 */
Err partition(const Chain *c, int most, ChainCut *cuts, int *count);

#endif
