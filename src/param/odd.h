/*
 * Weights that are NaN or infinite, noted where they come from files or go into some: whoever has them is warned, as
 * the model computes nothing else.
 */
#ifndef MEGATRAIN_PARAM_ODD_H
#define MEGATRAIN_PARAM_ODD_H

#include "param/param.h"

typedef struct {
    const ParamRegistry *whole; /* the whole model's */
    int *has;                   /* [whole->count] 1: the parameter has such numbers; written by several threads */
} OddValues;

/* Memory is of `a`. */
Err odd_open(OddValues *o, const ParamRegistry *whole, SetupArena *a);

/* Looks at numbers of parameter `id` of the whole model. From any thread. */
void odd_look(OddValues *o, int id, const float *x, int64_t count);

/* Looks at all weights that this rank has. */
Err odd_look_at_store(OddValues *o, const ParamStore *s, Stream *stream);

/* Collective: all members of `c` have noted what any has. */
Err odd_share(OddValues *o, Comm *c, Stream *stream);

/* Warns, once, with the first of the parameters that have such numbers, and how many these are. from: a path. */
void odd_warn(const OddValues *o, const char *from);

#endif
