/* How many threads a rank computes with when debug.threads does not say so. */
#ifndef MEGATRAIN_TRAIN_THREADS_H
#define MEGATRAIN_TRAIN_THREADS_H

#include "engine/trainer.h"
#include "train/ranks.h"

/*
 * What OMP_NUM_THREADS says; else the rank's share of the processors, but no more threads than the mean op of its step
 * (as planned) keeps busy, because threads that wait for one another more than they compute make a small model slower.
 * No bit depends on it. ranks NULL: there is one process.
 */
int threads_useful(const MemoryPlan *plan); /* that number of threads */
int threads_of_rank(const Ranks *ranks, const MemoryPlan *plan);

#endif
