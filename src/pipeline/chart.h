/*
 * Schedules for people: the actions of each rank, and what a simulation made of them over time, as text and as
 * a picture. Times are whatever the simulation's are.
 */
#ifndef MEGATRAIN_PIPELINE_CHART_H
#define MEGATRAIN_PIPELINE_CHART_H

#include <stdio.h>

#include "pipeline/simulate.h"

/*
 * One line a rank: computes as F3.s1 (unit 3, stage 1; F4x2: units 4 and 5), messages of a group in brackets
 * with the stage that consumes them and the peer, the end of a step in words. Behind a stage, ' is the second
 * replica and @-1 weights that are one update old; | joins a pair.
 */
void chart_list(const Schedule *s, FILE *out);

/*
 * One line a rank, time from left to right, idle time as dots. Short schedules show each compute with its
 * unit (F3) and, where a rank has several stages, a letter for the stage's place on the rank or the replica;
 * longer ones one character a tick; the longest one character for several ticks.
 */
void chart_text(const Schedule *s, const Simulation *sim, FILE *out);

/*
 * SVG for any browser, light or dark: a row a rank, colour by kind of compute, shade by chunk or replica, idle
 * time hatched, unit numbers where they fit, the bubble stated, a description for screen readers.
 */
void chart_svg(const Schedule *s, const Simulation *sim, FILE *out);

#endif
