/*
 * Parameters: one registration tells everything about a tensor; all the rest is derived from it.
 *
 * A layer calls param_add() with the global facts: name, unpadded shape, which grid axis cuts which dim,
 * sections, how to initialise, flags. From that follow the local shape, the initial values (a counter-based
 * generator keyed by name and unpadded global element index, so the same weights on every grid), the group
 * its gradient is summed over, weight decay, the optimizer's flat ranges, the checkpoint's pieces.
 *
 * Layers hold ids, never pointers. param_value() and param_grad() (layer/ctx.h: they go through Ctx) are the
 * one place that knows which copy of a weight is meant.
 *
 * Memory: flat device buffers, all with the same layout, each parameter padded to PARAM_ALIGN elements:
 *   value  what layers read: f32, or the 16-bit copy of the master, written by every update
 *   grad   i64 fixed point (or f32 with reproducible = run)
 *   master, m, v    f32, of this rank's slice alone; in f32 the master is the value itself
 * a table of the tensors (FlatPart), by which one op runs over them all,
 * and, of every parameter of the model on every rank, statistics and fixed-point shifts of its gradient (GradStats).
 *
 * Layout: backward's order, that is registration reversed, cut into buckets between parameters; each bucket
 * into equal slices, one per copy with ZeRO-1 (else one in all), which may straddle parameters. A bucket has parameters
 * of one group: weights of experts come first, STATE last. Parameters whose gradients are partial over other ranks than
 * dp's lie behind the others, so that their sums are one call each (param_layout):
 *
 *   | head, last block ... | ... | first block, table |pad| qk-norms | norms, row biases, positions |pad|
 *   |  slice 0 |  slice 1  | s0 | s1 |  slice 0 | slice 1 |        slice 0     |      slice 1          |
 *
 * Sections: a weight made of parts (q|k|v, gate|up) lies chunk by chunk in memory, so that a cut of dim 0
 * gives each rank whole chunks with every part in them:
 *   plain (checkpoint, export)    q q q q k k v v
 *   memory, interleave = 2        q q k v | q q k v
 *
 * A stack: the weights of several experts are one tensor, matrix below matrix. One axis cuts it between matrices,
 * others cut each matrix, whose sections and chunks these then are.
 */
#ifndef MEGATRAIN_PARAM_PARAM_H
#define MEGATRAIN_PARAM_PARAM_H

#include "comm/grid.h"
#include "device/ops.h"

typedef enum { CUT_NONE, CUT_TP, CUT_EP, CUT_ETP, CUT_KINDS } Cut; /* which axis cuts a dim */
typedef enum { INIT_ZERO, INIT_ONE, INIT_NORMAL } Init;
/* Which grid its copies live on. STATE: no weight but a number that each step's counts decide on: its accumulator holds
 * them, on all ranks all; it is never cut, in fp32 whatever the dtype (its master), and in no norm. */
typedef enum { PARAM_DENSE, PARAM_EXPERT, PARAM_STATE, PARAM_GROUPS } ParamGroup;

/* Over which ranks, besides dp, a gradient is partial and has to be summed; in the order of the layout. */
typedef enum {
    PARTIAL_NONE,   /* each rank's own shard, or computed alike everywhere */
    PARTIAL_STAGES, /* a table that the first and the last stage read: each has a part of its gradient */
    PARTIAL_HEADS,  /* partial because heads are cut: summed over tp */
    PARTIAL_ROWS,   /* partial when rows are sharded: summed over sp */
    PARTIAL_KINDS
} Partial;

/*
 * A rank's share of the parameters of a pipeline stage: its shards, and which of their copies these are, along dp for
 * dense parameters, along the experts' dp for theirs. ZeRO-1 cuts optimizer states into a slice for each copy (in a
 * bidirectional pipeline two replicas have copies), else there is one slice.
 */
typedef struct {
    bool zero;
    int shards[CUT_KINDS], shard[CUT_KINDS]; /* along an axis: how many shards, which is this rank's */
    int copy[PARAM_GROUPS];
    int zero_shards[PARAM_GROUPS], zero_shard[PARAM_GROUPS];
} ParamPlace;

ParamPlace param_place(Grid g, int rank, bool zero);
ParamPlace param_place_single(void); /* of one rank that has all */

enum {
    PARAM_DECAY = 1,
    PARAM_COPY = 2 /* another registry's of the same name is the one that counts (Param.copy) */
};
enum { PARAM_ALIGN = 64, PARAM_MAX_SECTIONS = 4, PARAM_NAME_MAX = 64 };

typedef struct {
    const char *name;    /* global, e.g. "layers.3.attn.qkv.weight"; copied */
    int ndim;            /* 1 or 2 */
    int64_t shape[2];    /* global, unpadded */
    int64_t padded_rows; /* dim 0 in memory over all ranks, >= shape[0]; 0 = shape[0] */
    Cut cut[2];
    int64_t section[PARAM_MAX_SECTIONS]; /* rows of dim 0; all 0 = one section */
    int64_t interleave;                  /* chunks of dim 0; each section's rows divide by it. 0 = 1 */
    int64_t stack; /* dim 0 is so many matrices of equal rows, each with these sections and cuts. 0 = 1 */
    Cut stack_cut; /* the axis that cuts between them */
    Partial partial;
    ParamGroup group;
    Init init;
    float std;
    int64_t init_repeat; /* so many rows, one behind the other, begin alike. 0 = 1 */
    int flags;
} ParamSpec;

typedef struct {
    ParamSpec spec;
    char name[PARAM_NAME_MAX];
    int64_t local[2];               /* rows, columns on this rank (columns 1 for vectors) */
    int64_t matrices, first_matrix; /* of the stack */
    int64_t first[2];      /* this rank's first row and column in each padded, interleaved global matrix */
    int64_t offset, count; /* elements, in the flat buffers */
    int bucket;
    int global; /* its number in the registry of the whole model (param_number); its own id if there is no other */
    bool copy; /* another registry's of the same name is the one that counts: in norms, in checkpoints */
} Param;

/* A range of the flat buffers that is reduced and gathered in one piece. */
typedef struct {
    int64_t first, count;        /* elements; a multiple of zero_shards * PARAM_ALIGN */
    int64_t zero_first;          /* in a buffer made of this rank's slice of every bucket */
    int zero_shards, zero_shard; /* this rank's */
    ParamGroup group;
    int params;
    bool partial; /* holds gradients that are partial over other ranks than dp's */
} Bucket;

typedef struct {
    Param *items;
    int *by_name; /* [2 * capacity] index + 1, found by hashing the name; 0 = free */
    int count, capacity;
    int64_t flat_count; /* elements of each flat buffer */
    int64_t zero_count; /* of this rank's slices of it */
    Bucket *buckets;
    int bucket_count;
    int64_t partial_at[PARTIAL_KINDS +
                       1]; /* where each kind starts in the layout; the next one's start ends it */
    int *order;            /* [count] parameters in the order of their offsets */
    ParamPlace place;
    SetupArena *setup;
} ParamRegistry;

void param_registry_init(ParamRegistry *r, SetupArena *setup, ParamPlace place);

/* Returns the id in *id. ERR_CONFIG when a cut dim does not divide, ERR_INTERNAL for a repeated name. */
Err param_add(ParamRegistry *r, ParamSpec spec, int *id);

/* Numbers the parameters as `whole`, the registry of the whole model, does. ERR_INTERNAL: it lacks one. */
Err param_number(ParamRegistry *r, const ParamRegistry *whole);

/* The id of a parameter, or -1. */
int param_find(const ParamRegistry *r, const char *name);

/* Lays out what was registered: buckets of about bucket_elems elements. Once, before a store is made. */
Err param_layout(ParamRegistry *r, int64_t bucket_elems);

/*
 * The part of a parameter that lies in a rank's slice of its bucket: local elements [first, first + count), count
 * may be 0; `at`: its place in a buffer made of that slice of every bucket.
 */
typedef struct {
    int64_t first, count, at;
} ParamRange;

ParamRange param_zero_shard(const ParamRegistry *r, int id);               /* of this rank */
ParamRange param_zero_shard_at(const ParamRegistry *r, int id, int shard); /* of another copy */

int64_t param_padding(const ParamRegistry *r); /* elements of a flat buffer that are nobody's */
int64_t param_total(const ParamRegistry *r);   /* global unpadded element count of all parameters */
int64_t param_trained(const ParamRegistry *r); /* without STATE */

/* What a store keeps of gradients. */
typedef enum {
    GRADS_NONE, /* evaluation, generation: no moments either */
    GRADS_F32,  /* plain sums: repeats of a layout give the same bits */
    GRADS_I64   /* fixed point: all layouts do */
} GradKind;

/* Who moves gradients and values between ranks hears of what layers do with them; may be empty. */
typedef struct {
    void *user;
    Err (*added)(void *user, int id); /* one more addition to a gradient is on the stream */
    Err (*read)(void *user, int id);  /* a value is about to be read */
} ParamListener;

/*
 * Of the gradients of all parameters of the model, in the order of its registration: what decides on the step. Every
 * rank has all of it, whichever parameters it holds, so that norms add up in one order and all come to one decision.
 */
typedef struct {
    int count;
    Tensor shift, next_shift; /* [count] i32 fixed-point shifts (docs/determinism.md) */
    Tensor overflow;          /* [1] i32 flag: a gradient leaf did not fit */
    Tensor over_limit;        /* [1] i32 flag: experts got more rows than there is room for */
    Tensor flags;             /* [2] i64, in which these two lie: for the maximum over ranks */
    Tensor max, sumsq;        /* [count], [count, 4] i64: statistics (ops.def, grad_stats) */
} GradStats;

/* Allocates in `state`; without `gradients` only shifts and flags. */
Err grad_stats_init(GradStats *g, int count, bool gradients, Arena *state);

/* The buffers of one registry. */
typedef struct {
    const ParamRegistry *reg;
    const GradStats *stats;
    /* Ranks with the same parameters: gradients are summed over it, slices are its members'. */
    Comm *group[PARAM_GROUPS];
    Tensor value;  /* flat */
    Tensor master; /* value itself if that is f32, else as m and v */
    Tensor m, v;   /* [zero_count] */
    Tensor
        *older; /* [older_count] values before the last updates, for schedules that update while they run */
    int older_count, updates; /* updates: since older was begun; version i is older[i % older_count] */
    Tensor grad;              /* flat: I64 or F32; empty without gradients */
    Tensor parts;             /* [tensors, 5] FlatPart: what this rank updates, without STATE */
    int64_t chunks;           /* of all parts */
    /* [count], host: nothing was added in this step. The memory then holds no number of this step, and who adds first
     * overwrites, so that no pass over the gradients clears them. */
    bool *fresh;
    ParamListener listener;
    Err read_failed; /* of listener.read: layers go on, the executor stops behind the action */
} ParamStore;

/*
 * Allocates in `state`, and on the host in the registry's setup memory. value_dtype F32, BF16 or F16. All
 * gradients are fresh. `stats` must outlive the store; `group` is to be set where there is more than one slice.
 */
Err param_store_init(ParamStore *s, const ParamRegistry *reg, const GradStats *stats, Arena *state,
                     DType value_dtype, GradKind grads);

/* Makes the table `parts`, in `state`; of a store with gradients. */
Err param_store_list_parts(ParamStore *s, Arena *state, Stream *stream);

/* Keeps the last `count` values beside the newest. In `state`. */
Err param_store_keep_older(ParamStore *s, int count, Arena *state);
/* The values as they are become one update older; before the update. */
Err param_store_age(ParamStore *s, Stream *stream);
/* The values as they were `age` updates ago. */
Tensor param_store_value(const ParamStore *s, int age);

/* A step begins, again if it is repeated: all gradients are fresh. */
void param_store_begin(ParamStore *s);

/* Fills masters by their Init; to be published. Host arithmetic, `threads` of it. */
Err param_store_fill(ParamStore *s, Stream *stream, uint64_t seed, int threads);

/* Views of one parameter: [local rows, local columns], or [local rows] for vectors. */
Tensor param_view(const Param *p, Tensor flat);
Tensor param_store_grad(const ParamStore *s, int id);
/* Flat views of this rank's slice of one parameter. */
Tensor param_zero_shard_master(const ParamStore *s, int id);
Tensor param_zero_shard_grad(const ParamStore *s, int id);
/* Where in master, m or v element 0 of a parameter's local memory lies, or would lie: of a slice only a part does. */
int64_t param_origin(const ParamStore *s, int id, Tensor flat);
/* Local elements of a parameter that master, m or v has: all, or this rank's slice. */
ParamRange param_held(const ParamStore *s, int id, Tensor flat);
Tensor param_store_shift(const ParamStore *s, int id); /* [1] i32 */

/*
 * The parameters of a model over the ranks of a pipeline. A rank has a registry for each replica of the model of which
 * it holds stages: one, or two where the pipeline runs in both directions.
 */
typedef struct {
    const ParamRegistry *whole; /* of all stages in one: numbers, names and shapes; need not be laid out */
    const ParamRegistry *registries; /* [ranks][replicas], laid out for this rank's dp and tp coordinates */
    int ranks, replicas;             /* pipeline ranks; registries of each */
    ParamStore *stores;              /* [replicas], of this rank */
    int lower;                       /* of its two replicas the one with the lower stage; else 0 */
    GradStats *stats;
} ParamSet;

/* Of a model on one pipeline rank. */
ParamSet param_set_single(ParamStore *store, GradStats *stats);

static inline const ParamRegistry *param_set_registry(const ParamSet *s, int pp_rank, int replica)
{
    return &s->registries[pp_rank * s->replicas + replica];
}

/*
 * The stores' 16-bit copies again from the masters of all slices, after these were filled or loaded. Collective over
 * the groups of each store, that of the lower stage first: with two replicas the ranks that have a stage in common hold
 * it in different ones, and must not wait for each other in different groups.
 */
Err param_set_publish(const ParamSet *s, Stream *stream);

/* Global plain row of this rank's local row r (sections undone); -1 for padding. */
int64_t param_plain_row(const Param *p, int64_t r);

#endif
