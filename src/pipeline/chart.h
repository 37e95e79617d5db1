/*
 * Schedules for people: the actions of each rank, and what a simulation made of them over time, as text and as
 * a picture. Times are whatever the simulation's are.
 */
#ifndef MEGATRAIN_PIPELINE_CHART_H
#define MEGATRAIN_PIPELINE_CHART_H

#include <stdio.h>

#include "pipeline/simulate.h"

enum { CHART_UNIT_BYTES = 24 };

/* How the charts name a unit: by its number, or in a schedule with slices by micro-batch and slice, as in 3:1. Returns
 * out. */
const char *chart_unit(const Schedule *s, int unit, char out[CHART_UNIT_BYTES]);

/*
 * Prints one line for each rank: computes as F3.s1 (unit 3, stage 1; F4x2: units 4 and 5), messages of a group in
 * brackets with the stage that consumes them and the peer, the end of a step in words. Behind a stage, ' is the second
 * replica and @-1 weights that are one update old; | joins a pair.
 */
void chart_list(const Schedule *s, FILE *out);

/*
 * Prints one line for each rank, time from left to right, idle time as dots. Short schedules show each compute with its
 * unit (F3) and, where a rank has several stages, a letter for the chunk or the replica; longer ones have one character
 * a tick; the longest one character for several ticks.
 */
void chart_text(const Schedule *s, const Simulation *sim, FILE *out);

/*
 * Writes SVG for any browser, light or dark. It has a row for each rank, colour by kind of compute, shade by chunk or
 * replica, idle time hatched, unit numbers where they fit, the bubble, and a description for screen readers.
 */
void chart_svg(const Schedule *s, const Simulation *sim, FILE *out);

/*
 * Writes the same for one or two runs of a schedule, one below the other at one scale, such as a step that was measured
 * above the one that was planned. Spans may come from a clock; the time of each run begins at 0.
 */
typedef struct {
    const char *title, *figures; /* the first two lines; together the description for screen readers */
    const char *unit;            /* the unit of time: "ms" */
    const char *name[2];         /* stands above each run */
    const Simulation *run[2];
    int runs;
} ChartRuns;

void chart_svg_runs(const Schedule *s, const ChartRuns *runs, FILE *out);

/* How many bytes a picture of so many runs has at most, without its title and figures. */
int64_t chart_svg_bytes(const Schedule *s, int runs);

#endif
