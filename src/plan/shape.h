/*
 * Schedules of a shape, made once for the many layouts that have it: what is in flight, and replays with any costs.
 */
#ifndef MEGATRAIN_PLAN_SHAPE_H
#define MEGATRAIN_PLAN_SHAPE_H

#include "pipeline/simulate.h"

typedef struct {
    char name[48];
    int ranks, chunks, microbatches; /* as asked; chunks 0: the schedule's own */
    bool legal;
    Schedule s; /* its figures alone, until shape_lists */
    int made;   /* micro-batches of the lists: a long step's middle repeats itself; 0: there are none yet */
    Simulator *simulator;
    /* [ranks][replicas * chunks][2] units in each of a rank's stages, up to the end of I and of W, at the moment when
     * the rank has most of them up to W */
    int *held;
    bool *split; /* [ranks][replicas * chunks] some backward of the stage is split */
} Shape;

typedef struct {
    Shape **shapes;
    int count, capacity;
} ShapeTable;

/* The shape, from the table or made; legal or not. ERR_MEMORY. */
Err shape_get(ShapeTable *t, const char *schedule, int ranks, int chunks, int microbatches, Shape **out);
/* Makes its lists, which take longer, unless it has them. They may show that it is not legal. ERR_MEMORY. */
Err shape_lists(Shape *s);
void shape_table_free(ShapeTable *t);

/* Seconds of the whole step with such stages. costs: [stages]. Not for several threads at once. */
Err shape_replay(const Shape *shape, const StageCost *costs, double hop, double *seconds);

/* How many micro-batches of a step show all that a longer one does. */
int shape_microbatches(int ranks, int microbatches);

#endif
