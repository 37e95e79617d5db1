/* Ranks that share a host and compute on its CPUs, bound to processors of their own, or their memory node; ranks with
 * GPUs, to the memory node near theirs: run.bind. */
#ifndef MEGATRAIN_TRAIN_BIND_H
#define MEGATRAIN_TRAIN_BIND_H

#include "config/config.h"
#include "train/ranks.h"

/*
 * To be called before this rank's memory is touched, which then lies on the nodes of its processors. *threads: what it
 * computes with; `chosen`: nobody asked for so many, and they are no more than its processors afterwards. Ranks whose
 * GPUs are near the same processors divide these. Nothing is bound, and a line says why, where somebody outside has
 * bound ranks or threads, and where ranks have more threads than there are processors. Never a failure. No bit depends
 * on it.
 */
void bind_rank(const Config *cfg, const Ranks *ranks, int *threads, bool chosen);

/* For `doctor`: this machine's nodes and cores, and what run.bind does on it. */
void bind_describe(char *text, size_t size);

#endif
