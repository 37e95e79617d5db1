/*
 * The trace of several ranks. timeline.json has what the traced ranks recorded. For a pipeline there is a picture of
 * the last step, timeline.svg: above as it was measured, below as it was planned (docs/watching.md says how to read
 * them).
 *
 * Each rank that is traced records spans of its own (base/trace.h), and each rank of a pipeline records when the
 * actions of its list ran. After the step they send both to rank 0 over the host communicator, the text in pieces of
 * fixed size; nothing waits for anybody inside the step. timeline_open takes the memory.
 *
 * Clocks. Rank 0 asks each rank for its time, CLOCK_ASKED times, and believes the shortest round trip: halfway
 * through it, with an error of at most half of it. An offset that is not greater than its error counts as none:
 * ranks of one host read the same clock.
 *
 * The plan is the schedule, simulated with the measured mean of each stage's F, B, I and W and messages that take no
 * time. The bubble of each is the share of the ranks' time, from the first compute's start to the last one's end, in
 * which they compute nothing. The first of the ranks that differ in tp, cp or dp alone stands for all of them. On GPUs
 * there is no picture, because spans there are of launches.
 */
#ifndef MEGATRAIN_TRAIN_TIMELINE_H
#define MEGATRAIN_TRAIN_TIMELINE_H

#include "engine/trainer.h"

enum { CLOCK_ASKED = 8 };

typedef struct Timeline Timeline;

typedef struct {
    bool drawn; /* false: there is no picture, and these are 0 */
    double bubble, bubble_simulated;
} TimelineFigures;

/* To be called on every rank of a run of several. ranks: those to trace, in the words of rank_list.h; all must exist.
 * Calls trace_open on these. t must outlive it. ERR_MEMORY. */
Err timeline_open(Trainer *t, const char *run_dir, const char *ranks, Timeline **out);
void timeline_close(Timeline *t);

/* Starts to record. */
void timeline_start(Timeline *t);
bool timeline_records(const Timeline *t); /* is this rank one that is traced? */
/* Collective. To be called after a step: stops recording, and rank 0 writes the files over those of an earlier
 * recording. ERR_IO on rank 0, after all have sent. Only rank 0 gets the figures. */
Err timeline_stop(Timeline *t, TimelineFigures *out);

#endif
