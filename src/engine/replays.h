/*
 * A step's actions as recorded work (device/recorder.h). Addresses and shapes of an action are the same in every step,
 * and values that vary from step to step are read from device memory. So once two steps in a row gave the device the
 * same work, the next one is recorded while it runs, and all later ones replay it without running the host code of
 * layers, of reductions and of updates. What the host does around actions goes on: slots, batches, messages.
 *
 *   listens    the host code runs; digests of what it gives are kept, one for each unit of each action
 *   records    the same, and the first unit of each digest is recorded
 *   replays    no host code runs
 *
 * Units with one digest, such as all micro-batches but the first and the last, share a recording. A step is all of one
 * kind, for host code of an action may read what that of an earlier one left, such as the queue of wgrads.
 *
 * A step that has something in it which no recording can hold, such as a wait of the host, differs from all others. If
 * steps go on to differ, or one has too many different units, nothing is recorded: that is said once, and they run as
 * without graphs.
 */
#ifndef MEGATRAIN_ENGINE_REPLAYS_H
#define MEGATRAIN_ENGINE_REPLAYS_H

#include "base/arena.h"
#include "device/recorder.h"
#include "pipeline/schedule.h"

typedef enum { REPLAYS_OFF, REPLAYS_LISTENS, REPLAYS_RECORDS, REPLAYS_REPLAYS } ReplaysMode;

/* A unit of an action. */
typedef struct {
    uint64_t digest;      /* digest of the work that it gave last */
    Recording *recording; /* recording of that work, once there is one */
} UnitReplay;

/* Gives an action's work to the device. */
typedef Err UnitWork(void *user);

typedef struct {
    int *first;        /* [actions of the list] the number of its first unit */
    UnitReplay *units; /* units of all actions */
    int unit_count;
    Recording **recordings; /* one for each digest */
    int recording_count, recording_capacity;
    ReplaysMode mode;    /* mode of the step at work */
    bool ready, off;     /* a step is recorded; nothing will be */
    bool changed;        /* in this step the work of a unit is another than the last time */
    const char *refused; /* in this step something cannot be recorded; NULL: all can */
    int same, differing; /* steps in a row that gave the same work as the one before, and that did not */
} Replays;

/* For a list of a step. ERR_MEMORY. */
Err replays_open(Replays *r, const ActionList *list, SetupArena *setup);
void replays_release(Replays *r, Device *dev);

/* A step begins, perhaps the same once more. plainly: its host code is not that of other steps, so that it runs, and
 * nothing is learned from it. */
void replays_begin(Replays *r, bool plainly);
/* A unit of an action of the list, between begin and end: its host code runs, or what it gave is given again. Errors:
 * the host code's, and of the device. */
Err replays_run(Replays *r, Stream *s, int action, int unit, UnitWork *work, void *user);
/* All of the step has been given to the device. */
void replays_end(Replays *r);

/* Work of a recorded step for the host: launches one by one; or graphs. The calls between are the same. */
typedef struct {
    int64_t launches, graphs, calls;
} StepCounts;
StepCounts replays_counts(const Replays *r);

/* From here on steps have other work. */
void replays_forget(Replays *r);

#endif
