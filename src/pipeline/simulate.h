/*
 * Runs a schedule on paper: every rank computes its list in order, a compute starts when its rank is free and
 * what it needs has arrived, messages take their time without occupying anybody.
 */
#ifndef MEGATRAIN_PIPELINE_SIMULATE_H
#define MEGATRAIN_PIPELINE_SIMULATE_H

#include "pipeline/schedule.h"

typedef struct {
    StageCost each;          /* of every stage, unless: */
    const StageCost *stage;  /* [stages], or NULL */
    double latency;          /* of a message between two ranks */
    double bytes, bandwidth; /* of a message; bandwidth 0: no further time */
} SimulateCosts;

typedef struct {
    double start, end;
} Span;

/* Times are in the units of the costs. */
typedef struct {
    double makespan;    /* from 0 to the last compute's end */
    double ideal;       /* work of the rank that has most */
    double bubble;      /* makespan - ideal */
    double span_bubble; /* most that a rank idles between its own first start and last end */
    Span **span;        /* [ranks][count]: of compute actions; the others' are 0, 0 */
} Simulation;

/*
 * Owns: release with simulation_free, also after an error.
 * Errors: ERR_INTERNAL if the lists wait for each other, naming a rank and what it waits for; ERR_MEMORY.
 */
Err simulate(const Schedule *s, const SimulateCosts *costs, Simulation *out);
void simulation_free(Simulation *sim, const Schedule *s);

/* The same many times over, with memory taken once. `out` is the simulator's, and holds until the next run. */
typedef struct Simulator Simulator;
Err simulator_open(const Schedule *s, Simulator **out); /* ERR_MEMORY */
Err simulator_run(Simulator *r, const SimulateCosts *costs, const Simulation **out);
void simulator_close(Simulator *r);

/* Share of the ranks' time, from 0 to the last compute's end, without compute. Of measured spans, too. */
double simulation_idle(const Schedule *s, const Simulation *sim);

/* Most units held on a rank from F to the end of W (or of I), over all of its stages. */
int simulate_peak(const Schedule *s, int rank, bool until_input);

/* Copies of a rank's low-precision weights: replicas, or versions that some action still reads. */
int simulate_weight_copies(const Schedule *s, int rank);

#endif
