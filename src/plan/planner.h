/* Facts of a device that a search asks for: its name and memory, and how long things take there (predict.h). */
#ifndef MEGATRAIN_PLAN_PLANNER_H
#define MEGATRAIN_PLAN_PLANNER_H

#include "config/config_device.h"
#include "plan/layer_cost.h"
#include "plan/predict.h"
#include "plan/search.h"

typedef struct {
    DeviceFile device;
    CostModel model;   /* cost model of `device` */
    CostSource source; /* source over `model`: a planner must stay where it is */
} Planner;

/* Opens a planner for a device's name or file, and so many ranks. ERR_CONFIG: there is none, or it does not say how
 * fast it is. planner_close also after an error. */
Err planner_open(Planner *p, const char *device, int ranks);
void planner_close(Planner *p);

/* Warns where that configuration of a CPU computes otherwise than the processors of the file did when they were
 * measured, so that predicted products are those of other instructions. here: the run is this machine's, whose `auto`
 * is its own; else auto is that of the machine that was measured. Of a GPU it says whose times nobody measured. */
void planner_warn(const DeviceFile *device, const Config *c, bool here);

/* The question of a search for that device: `base` on so many ranks, in the usual limits; the vocabulary and how many
 * answers are the caller's. */
SearchQuestion planner_question(const Planner *p, const Config *base, int64_t world);

#endif
