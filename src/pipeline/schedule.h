/*
 * Pipeline schedules as data. A schedule is one list of actions for each rank of the pipeline; the executor,
 * the simulator, the memory plan, the charts and the tests all read the same lists.
 *
 *   generator   emits the compute actions of each rank (gen_*.c, listed in table.c)
 *   passes      split (B -> I W), checking, sync (end of a step), lowering (messages), buffers (passes.h)
 *   readers     simulate.h (times, bubbles, peaks), check.h (what a valid program is), the executor
 *
 * Words. There are p ranks and m micro-batches; the model is cut into S stages, and a rank holds `chunks` stages of
 * each replica. A unit is what passes through the stages at once: a micro-batch, or a part of one, which is some of its
 * samples (unit_div > 1) or a slice of all its sequences (slices > 1). F is the forward of one stage and one unit, I
 * the dgrad of its backward, W the wgrad, B both at once.
 *
 * Slices of a micro-batch are its units in ascending order of positions. A slice's queries see the keys of the slices
 * before it, so on every stage forwards take slices in that order, and backwards the other way round: when the input
 * half of a slice runs, those of all later ones have added to the gradients of its keys. No other micro-batch's input
 * half runs in between, so a stage has one set of these gradients.
 *
 * A schedule is a pure function of its spec: every rank makes the whole of it and gets the same bytes, so that
 * the two sides of each message agree without talking. docs/pipeline.md says how to add one.
 */
#ifndef MEGATRAIN_PIPELINE_SCHEDULE_H
#define MEGATRAIN_PIPELINE_SCHEDULE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

typedef enum {
    ACT_F, /* this and the next three: compute of (replica, stage) on `count` units from `microbatch` on */
    ACT_B,
    ACT_I,
    ACT_W,
    ACT_SEND, /* one message; consecutive ones joined by ACTION_MORE are one group, started together */
    ACT_RECV,
    ACT_TIED,   /* sum of a shared table's gradients; on the ranks of the first and the last stage, and of `table` */
    ACT_REDUCE, /* sums a replica's gradients over its data-parallel group */
    ACT_NORM,   /* computes the norm of all gradients of the step */
    ACT_UPDATE, /* updates a replica's weights */
    ACT_KINDS
} ActionKind;

enum { PAYLOAD_ACTIVATION, PAYLOAD_GRADIENT };

enum {
    ACTION_MORE = 1, /* SEND, RECV: the next action belongs to the same group */
    /* F: the backward action after it may overlap with it; what they need is there for both */
    ACTION_PAIR = 2
};

/*
 * The end of a step in a synchronous schedule: TIED, REDUCE for each replica on the rank, NORM, UPDATE for each
 * replica. Replicas come in ascending order of `stage`, their lowest on the rank, so that two ranks that share
 * two stages start their collectives in one order. Asynchronous schedules have REDUCE and UPDATE behind the
 * backward that completes a batch.
 */
typedef struct {
    uint8_t kind;       /* an ActionKind */
    uint8_t replica;    /* 0, or 1 for the second direction of a bidirectional schedule */
    uint8_t flags;      /* ACTION_* */
    uint8_t payload;    /* SEND, RECV: what is sent */
    uint16_t stage;     /* its number in the model. SEND, RECV: the stage that consumes the message */
    uint16_t peer;      /* SEND, RECV: the other rank in the pipeline */
    uint16_t slice;     /* slice of its micro-batch's sequences that the first unit is */
    uint16_t version;   /* F, B, I: the age in updates of the weights that it reads; 0: the newest */
    int32_t microbatch; /* the first unit */
    int32_t count;      /* how many units; SEND, RECV: 1; actions that end a step: 0 */
    int16_t in, out;    /* boundary buffers (see below); -1: none */
    double stamp;       /* simulated time: when a compute starts, when a message's producer ends */
} Action;

/*
 * Boundary buffers: a rank has one pool of equally large ones (ActionList.buffers), each the boundary tensor
 * of one unit.
 *
 *   F        reads `in` (activation of the stage before; first stage: -1), writes `out` (last stage: -1)
 *   B, I     reads `in` (gradient from the stage behind; last stage: -1), writes `out` (first stage: -1)
 *   RECV     fills `in`. The buffer is taken from the RECV's place in the list until its consumer has ended
 *   SEND     reads `out`. The buffer is taken from its producer until the message has gone
 *
 * An action of several units uses `in`, `in + 1`, ...: one buffer a unit, and one message a unit. Two stages
 * that follow each other on the same rank exchange no message: what one writes is what the other reads. A
 * buffer whose message still goes out is given to a new writer only where the simulation says that it has
 * gone; a writer must still wait for that SEND, and hardly ever does so for long.
 */

typedef enum {
    PLACE_LOOP,   /* stage s on rank s mod p */
    PLACE_WAVE,   /* forth and back: stage p - 1 and p on one rank; V with two chunks */
    PLACE_TWO_WAY /* replica 0: stage s on rank s; replica 1: on rank p - 1 - s */
} Placement;

/* Versions of the weights that units are computed with. All but VERSIONS_STEP update while the pipeline runs. */
typedef enum {
    VERSIONS_STEP,     /* one version for the step */
    VERSIONS_STASH,    /* PipeDream: the newest at its forward, kept for its backward; update after each unit */
    VERSIONS_VERTICAL, /* PipeDream with vertical sync: on all stages the one that the first stage had */
    VERSIONS_DOUBLE    /* PipeDream-2BW: batch b uses the version after batch b - 2; update after each batch */
} Versions;

typedef struct {
    Action *action;
    int count, capacity;
    int buffers; /* how many boundary buffers the rank has */
} ActionList;

/* Times of a stage, in any unit of time. */
typedef struct {
    double f, i, w; /* times of one unit; B takes i + w */
    double pair;    /* how much less a pair (ACTION_PAIR) of its forward takes than both halves one by one */
} StageCost;

typedef struct Schedule Schedule;

/* A request for a schedule. Zero stands for the schedule's usual value. */
typedef struct {
    /* A name in the table (schedule_name), or an alias. "+split" behind it splits every B into I W. */
    const char *name;
    int ranks, microbatches;
    int chunks;  /* how many stages of a replica a rank has (interleaved, bfs, zb-h1-int) */
    int group;   /* how many micro-batches a group has (interleaved); usually as many as ranks */
    int waves;   /* how many waves (hanayo); a rank has two chunks for each */
    int slices;  /* how many slices a sequence has (seq1f1b) */
    int batches; /* how many batches of `microbatches` an asynchronous list covers */
    int table;   /* a stage that, like the first and the last, may read the embedding's table; 0: none */
    int cap;     /* a rank must not hold more units between F and W, over its stages; 0: no limit */
    /* [stages] what stages are expected to take, > 0, for the order of messages; NULL: all the same */
    const StageCost *costs;
    /* Whether a model can be cut into the stages of a shape, for the hint's nearest legal shape; NULL: any can. */
    bool (*stages_fit)(const Schedule *shape, const void *user);
    const void *user; /* for stages_fit */
} ScheduleSpec;

typedef struct ScheduleKind ScheduleKind;

struct Schedule {
    char name[48];
    const ScheduleKind *kind;
    int ranks, microbatches, chunks, group, waves, slices, batches, cap;
    int stages, replicas;
    int unit_div; /* into how many units a micro-batch's samples are divided */
    int units;    /* how many the lists cover: microbatches * unit_div * slices * batches */
    int table;    /* the specification's */
    Placement placement;
    Versions versions;
    bool forward_only, split;
    const StageCost *costs; /* the specification's, while the schedule is made */
    bool no_memory;         /* a list could not grow; schedule_make reports it */
    uint8_t *unit_replica;  /* [units] the replica that computes it */
    ActionList *rank;       /* [ranks] */
};

/*
 * Generates, runs all passes and checks the result. Costs O(actions log actions).
 * Owns: release with schedule_free, also after an error.
 * Errors: ERR_CONFIG for a name or a shape that is not legal, with the rule and the nearest legal shape (if any);
 *         ERR_MEMORY.
 */
Err schedule_make(const ScheduleSpec *spec, Schedule *out);

/* Fills its figures alone, without lists: `rank` and `unit_replica` stay NULL, and nothing is owned. ERR_CONFIG as in
 * schedule_make. */
Err schedule_shape(const ScheduleSpec *spec, Schedule *out);

/* Makes a schedule with the same placement and units that has forwards alone, for evaluations. If there are two
 * replicas, only the first is used. */
Err schedule_forward(const ScheduleSpec *spec, Schedule *out);

void schedule_free(Schedule *s);

/* Does the schedule hold every stage twice, once for each direction? ERR_CONFIG for an unknown name. */
Err schedule_two_way(const char *name, bool *out);

/* Does it mark pairs (ACTION_PAIR)? ERR_CONFIG for an unknown name. */
Err schedule_pairs(const char *name, bool *out);

/* Versions of the weights that its units are computed with. ERR_CONFIG for an unknown name. */
Err schedule_versions(const char *name, Versions *out);

/* The name of the i-th schedule in the table; NULL behind the last. */
const char *schedule_name(int i);

/* ---- questions ---- */

int schedule_rank_of(const Schedule *s, int replica, int stage);
int schedule_chunk_of(const Schedule *s, int stage); /* 0 .. chunks - 1 on its rank */
int schedule_stage_at(const Schedule *s, int rank, int replica, int chunk);
/* The replica whose stage on this rank is the lower one, if there are two. What a rank does for both replicas, together
 * with the ranks that hold the same stages, it does for the lower stage first, and so do these ranks. */
int schedule_lower_replica(const Schedule *s, int rank);

/* How many updates a step has on each rank; 1 if weights change at its end alone. */
int schedule_updates(const Schedule *s);

/* Slice of the sequences that a unit is. */
static inline int schedule_slice_of(const Schedule *s, int unit) { return unit % s->slices; }

/* How many units one stage of one replica has at most between F and the end of W (or, with until_input, of I). */
int schedule_in_flight(const Schedule *s, int replica, int stage, bool until_input);

/* The index of a unit at a stage in tables [replicas][stages][units]. */
static inline int64_t schedule_place(const Schedule *s, int replica, int stage, int unit)
{
    return ((int64_t)replica * s->stages + stage) * s->units + unit;
}

static inline bool action_is_compute(ActionKind kind) { return kind <= ACT_W; }
static inline bool action_is_message(ActionKind kind) { return kind == ACT_SEND || kind == ACT_RECV; }
const char *action_name(ActionKind kind);

#endif
