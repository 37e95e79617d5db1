/* What a search asks of a device: its name and memory, and how long things take there. */
#ifndef MEGATRAIN_PLAN_PLANNER_H
#define MEGATRAIN_PLAN_PLANNER_H

#include "config/config_device.h"
#include "plan/step_clock.h"

typedef struct {
    char name[DEVICE_NAME_BYTES];
    int64_t memory;   /* bytes of a device */
    double peak_flop; /* a second, which MFU refers to */
    ClockRates rates;
    CostSource source; /* points to `rates`: the planner must stay where it is */
} Planner;

/* By a device's name or file. ERR_CONFIG: there is none, or it does not say how fast it is. */
Err planner_open(Planner *p, const char *device);

#endif
