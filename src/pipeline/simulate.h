/*
 * Runs a schedule on paper: every rank computes its list in order, a compute starts when its rank is free and what it
 * needs has arrived, and messages take their time without occupying anybody.
 */
#ifndef MEGATRAIN_PIPELINE_SIMULATE_H
#define MEGATRAIN_PIPELINE_SIMULATE_H

#include "pipeline/schedule.h"

typedef struct {
    StageCost each;         /* times of every stage, if `stage` is NULL */
    const StageCost *stage; /* [stages] what each takes, or NULL */
    double latency;         /* how long a message between two ranks takes */
    /* [ranks] further time of a message between a rank and the next one (the last and the first), or NULL. */
    const double *hop;
    double bytes, bandwidth; /* a message takes bytes / bandwidth in addition; bandwidth 0: nothing */
    /* Number of ranks that compute at full speed at once; more share them evenly. 0: all ranks do. */
    double processors;
} SimulateCosts;

typedef struct {
    double start, end;
} Span;

/* Times are in the units of the costs. */
typedef struct {
    double makespan;    /* time from 0 to the last compute's end */
    double ideal;       /* the work of the rank that has most */
    double bubble;      /* makespan - ideal */
    double span_bubble; /* how long a rank idles at most between its own first start and last end */
    Span **span;        /* [ranks][count] when each compute action runs; the others have 0, 0 */
} Simulation;

/*
 * Owns: release with simulation_free, also after an error.
 * Errors: ERR_INTERNAL if the lists wait for each other, naming a rank and what it waits for; ERR_MEMORY.
 */
Err simulate(const Schedule *s, const SimulateCosts *costs, Simulation *out);
void simulation_free(Simulation *sim, const Schedule *s);

/* Simulates many times over with memory that is taken once. `out` is the simulator's, and holds until the next run. */
typedef struct Simulator Simulator;
Err simulator_open(const Schedule *s, Simulator **out); /* ERR_MEMORY */
Err simulator_run(Simulator *r, const SimulateCosts *costs, const Simulation **out);
void simulator_close(Simulator *r);

/* The share of the ranks' time, from 0 to the last compute's end, in which they compute nothing. The spans may be
 * measured ones. */
double simulation_idle(const Schedule *s, const Simulation *sim);

/* How many units a rank holds at most from F to the end of W (or of I), over all of its stages. */
int simulate_peak(const Schedule *s, int rank, bool until_input);

/* How many copies of its low-precision weights a rank has: one for each replica, or for each version that some action
 * still reads. */
int simulate_weight_copies(const Schedule *s, int rank);

#endif
