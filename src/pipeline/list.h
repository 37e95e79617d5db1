/*
 * List scheduling: each rank looks, tick by tick, at what is ready and takes what matters most. It is for
 * schedules that have no closed form at some shape. All actions take one tick (a whole backward two), messages none.
 */
#ifndef MEGATRAIN_PIPELINE_LIST_H
#define MEGATRAIN_PIPELINE_LIST_H

#include "pipeline/schedule.h"

/*
 * V placement with split backwards. `when` is a plan: the times [ranks][2 legs][2: F, I][units]. A rank takes the ready
 * F or I that the plan has first. A forward of the first leg it takes only if at most `cap` units will be held,
 * counting the forwards of the second leg that the plan has before it. Else it takes the oldest pending W.
 */
void list_schedule_v(Schedule *s, const double *when, int cap);

static inline int64_t list_plan_place(const Schedule *s, int rank, int leg, bool input, int unit)
{
    return (((int64_t)rank * 2 + leg) * 2 + input) * s->units + unit;
}

/* For any wave: backwards first, the shallowest before others, then the deepest forward; at most `open` micro-batches
 * are begun. */
void list_schedule_wave(Schedule *s, int open);

/* For any placement, of replica 0: forwards alone, the deepest first. */
void list_schedule_forward(Schedule *s);

#endif
