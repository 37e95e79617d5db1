/*
 * When what a dry run does would happen: ops one behind the other on the device, each communicator's calls one behind
 * the other beside them. A call begins when what was issued before it is done, on the latest member (cost_skew); a wait
 * holds the device up until its call is done. The host issues ops ahead of the device; where it has to read
 * how many rows there are, it no longer is. With graphs (engine/replays.h) it issues what is between calls and waits at
 * once, which is taken to be as much work for it as one kernel.
 *
 *   host     issues 0, 1, exchange, 2 ... ahead of
 *   device   product 0 | product 1       | wait | ...
 *   tp                 exchange of 0 ......... |
 *
 * Copies between the device and its host's memory (Device.copies) come one behind the other beside both, each when what
 * was issued before it is done; on processors, which make them themselves, they hold everything up.
 *
 * A state that ranks hand on holds all but the first up: when a rank has scanned its rows, the others do one after the
 * other. All wait as long, at the call behind a scan. (In truth some go on, and wait at the next layer in which all
 * meet: where several such layers follow each other the line says more than it takes.)
 *
 * What pipeline ranks send each other takes no time here: the simulation of the schedule knows when both ends are there
 * (plan/predict.h).
 */
#ifndef MEGATRAIN_COST_TIME_LINE_H
#define MEGATRAIN_COST_TIME_LINE_H

#include "cost/cost.h"
#include "cost/op_ear.h"

/* Seconds so far. They add up: now = all of family, waited, copied and idle. */
typedef struct {
    double now;
    double family[FAMILIES];    /* ops, those beside calls for as long as these make them */
    double waited[WORLD_COMMS]; /* the device stood still for calls of that group */
    double copied;              /* for copies to and from the host's memory */
    double idle;                /* and for the host */
    double launches;            /* kernels */
    double pieces;              /* ops between calls and waits, one after another: with graphs one each */
    double op[OP_COUNT];        /* seconds of `family`, op by op */
    double calls[OP_COUNT];
} TimeShares;

typedef struct {
    OpEar ear; /* the first member: by it an op finds the line */
    CommTable comms;
    const CostModel *model;
    const CommTable *comms_below;
    const EventMarks *marks_below;
    World *world;
    DeviceBackend backend; /* the device's, with copies and marks heard */
    double copies;         /* how far copies have come */
    double host;           /* how far the host has come */
    bool graphs, in_piece; /* steps are graphs; an op was the last thing that was issued */
    TimeShares shares;
    CommPlace place[WORLD_COMMS];                 /* size 0: nobody has asked yet */
    double until[WORLD_COMMS];                    /* how far each communicator has come */
    double turn;                                  /* the last scan, if nobody has waited for it yet */
    double end[WORLD_COMMS][COMM_OPEN_MOST];      /* end of each of its calls */
    signed char within[WORLD_COMMS][WORLD_COMMS]; /* is a group in another? 0: nobody has asked yet */
    double met[WORLD_COMMS];                      /* when its members were last at the same place */
} TimeLine;

/* From now on ops of the null device and calls of the null world are on the line, which must outlive both. */
void time_line_attach(TimeLine *t, const CostModel *model, Device *dev, World *world);

#endif
