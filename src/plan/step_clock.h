/*
 * How long a step takes on a device that is not here: a dry run whose ops and calls move a clock. An op takes the longer
 * of its bytes and its FLOP over the rates of its family, and a launch; calls of each communicator run beside ops, and a
 * wait holds the clock until its call is done. What the host does between steps is not in it.
 */
#ifndef MEGATRAIN_PLAN_STEP_CLOCK_H
#define MEGATRAIN_PLAN_STEP_CLOCK_H

#include "plan/layer_cost.h"

/* Bytes and FLOP a second, and seconds. */
typedef struct {
    double memory, matrix, fp32, grouped, attention_fwd, attention_bwd;
    double link, network; /* that a rank sends to its host's ranks, to others */
    double launch_s, link_s, network_s;
    double matrix_beside; /* seconds of matrix work beside a call, to those without one */
    int host_devices;
} ClockRates;

/* As CostSource.dry_run; user: ClockRates. */
Err step_clock_run(void *user, const TrainSpec *spec, Grid grid, int rank, MemoryPlan *plan, RankTimes *times);

#endif
