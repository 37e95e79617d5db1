/*
 * The trace of several ranks: what those that are traced recorded, in one timeline.json, and of a pipeline the last
 * step as a picture, timeline.svg, as it was measured above as it was planned (docs/watching.md says how to read them).
 *
 * Each rank that is traced records spans of its own (base/trace.h), and each of a pipeline when the actions of its list
 * ran. After the step they send both to rank 0 over the host communicator, text in pieces of fixed size; nothing waits
 * for anybody inside the step. Memory is taken by timeline_open.
 *
 * Clocks. Rank 0 asks each rank for its time, CLOCK_ASKED times, and believes the shortest round trip: halfway
 * through it, with an error of at most half of it. An offset that is not greater than its error counts as none:
 * ranks of one host read the same clock.
 *
 * The plan is the schedule simulated with the measured mean of each stage's F, B, I and W, messages taking no
 * time. The bubble of both: the share of the ranks' time, from the first compute's start to the last one's end, in
 * which they compute nothing. Of ranks that differ in tp or dp alone the first stands for all. On GPUs there is no
 * picture: there spans are of launches.
 */
#ifndef MEGATRAIN_TRAIN_TIMELINE_H
#define MEGATRAIN_TRAIN_TIMELINE_H

#include "engine/trainer.h"

enum { CLOCK_ASKED = 8 };

typedef struct Timeline Timeline;

typedef struct {
    bool drawn; /* else there is no picture, and these are 0 */
    double bubble, bubble_simulated;
} TimelineFigures;

/* On every rank of a run of several. ranks: to trace, as rank_list.h has them, which there are. Calls trace_open on
 * these. t must outlive it. ERR_MEMORY. */
Err timeline_open(Trainer *t, const char *run_dir, const char *ranks, Timeline **out);
void timeline_close(Timeline *t);

/* Records from now on. */
void timeline_start(Timeline *t);
bool timeline_records(const Timeline *t); /* is this rank one that is traced? */
/* Collective, after a step: stops recording, and rank 0 writes the files over those of an earlier recording. ERR_IO
 * on rank 0, after all have sent. The figures are rank 0's. */
Err timeline_stop(Timeline *t, TimelineFigures *out);

#endif
