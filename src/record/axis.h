/* What pictures have in common: ticks of the axes (round distances, short labels), marks. */
#ifndef MEGATRAIN_RECORD_AXIS_H
#define MEGATRAIN_RECORD_AXIS_H

enum { AXIS_BYTES = 32 };

/* A round distance (1, 2 or 5 times a power of ten) that gives about `wanted` ticks over a range above 0. */
double axis_distance(double range, int wanted);

/* The label of a tick, with as many digits as the distance needs: "0.25", "20k", "1.5M", "2e-4". */
const char *axis_label(char buf[AXIS_BYTES], double value, double distance);

/* A path of SVG, round the point it is put behind ("M x y"): 4 shapes that are told apart without colour. */
const char *axis_mark(int series);

/*
 * How far up an axis goes for single values, when smoothed ones reach from `low` to `high` and single ones down to
 * `lowest`: as much above as noise that reaches so far below may, and not for spikes.
 */
double axis_most(double low, double high, double lowest);

#endif
