/*
 * List scheduling: each rank looks, tick by tick, at what is ready and takes what matters most. For schedules
 * that have no closed form at some shape. All actions take one tick (a whole backward two), messages none.
 */
#ifndef MEGATRAIN_PIPELINE_LIST_H
#define MEGATRAIN_PIPELINE_LIST_H

#include "pipeline/schedule.h"

/*
 * V placement with split backwards. `when` is a plan: [ranks][2 legs][2: F, I][units] times. A rank takes the
 * ready F or I that the plan has first, but a forward of the first leg only if at most `cap` units will be
 * held, those forwards of the second leg included that the plan has before it; else the oldest pending W.
 */
void list_schedule_v(Schedule *s, const double *when, int cap);

static inline int64_t list_plan_place(const Schedule *s, int rank, int leg, bool input, int unit)
{
    return (((int64_t)rank * 2 + leg) * 2 + input) * s->units + unit;
}

/* Any wave: backwards first, the shallowest, then the deepest forward; at most `open` micro-batches are begun. */
void list_schedule_wave(Schedule *s, int open);

/* Any placement, replica 0: forwards alone, the deepest first. */
void list_schedule_forward(Schedule *s);

#endif
