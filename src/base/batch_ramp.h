/*
 * The samples of each step, and the text of a configuration that gives them:
 *
 *   "64"                  every step has 64
 *   "32*1000,64"          steps 1 to 1000 have 32, all later ones 64
 *   "16*500,32*500,64"    and so on
 *
 * Steps count from 1. Where the data stand after a step follows from the ramp alone, so a run that is resumed knows it.
 */
#ifndef MEGATRAIN_BASE_BATCH_RAMP_H
#define MEGATRAIN_BASE_BATCH_RAMP_H

#include <stdbool.h>
#include <stdint.h>

enum { RAMP_PARTS = 32, RAMP_BATCH_MAX = 1 << 30 };

typedef struct {
    int64_t batch; /* samples of a step */
    int64_t last;  /* step; INT64_MAX in the last part */
} BatchRampPart;

typedef struct {
    BatchRampPart part[RAMP_PARTS];
    int count;
} BatchRamp;

/*
 * The ramp of a text. Returns what is wrong with it, NULL: nothing; *out is set in either case, to steps of 1 sample
 * where it is wrong.
 */
const char *batch_ramp_read(const char *text, BatchRamp *out);

/* Every step has as many. */
BatchRamp batch_ramp_flat(int64_t batch);

int64_t batch_ramp_at(const BatchRamp *r, int64_t step); /* samples of that step */
int64_t batch_ramp_most(const BatchRamp *r);             /* samples of the largest step */

/* Is every step a multiple of `unit` samples? */
bool batch_ramp_divides(const BatchRamp *r, int64_t unit);

/* Samples of the steps 1 to `steps`; INT64_MAX when they are more than can be counted. */
int64_t batch_ramp_samples(const BatchRamp *r, int64_t steps);

/* The fewest steps that have so many samples together. */
int64_t batch_ramp_steps(const BatchRamp *r, int64_t samples);

#endif
