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
 * Memory: flat device buffers, all with the same order, in which each parameter is padded to PARAM_ALIGN elements:
 *   value  what layers read: f32, or the 16-bit copy of the master, written by every update; vectors may be copied
 *          there as they are (PARAM_FP32, ParamRegistry.fp32_vectors)
 *   grad   i64 fixed point (or f32 with reproducible = run)
 *   master          f32, this rank's ZeRO shards alone; where the value is f32, the value itself
 *   m, v            f32 or bf16, likewise this rank's ZeRO shards; v of the parameters alone that have two moments
 * What the optimizer alone reads (m, v, a master that is not the value) may lie in memory of the host, where ops reach
 * it over a link (device_alloc_far).
 * With ZERO_GRADS, `grad` holds only this rank's shards of the units' weights; with ZERO_VALUES so does `value`. A
 * unit's gradients, or values, are then whole only while somebody works on the unit, in buffers of optim/units.h.
 * A table of the tensors (FlatPart) lets one op run over them all. Every rank has statistics and fixed-point shifts of
 * the gradients of all parameters of the model (GradStats).
 *
 * Layout: parameters lie in backward's order, that is registration reversed. Buckets are cut between parameters. With
 * ZeRO-1 each bucket is cut into equal shards, one for each copy of the parameters; without, it is one shard. A shard
 * may begin and end inside a parameter. A bucket has parameters of one group: weights of experts come first, STATE
 * last. Parameters whose gradients are partial over other ranks than dp's lie behind the others, so that each kind of
 * them is summed by one call (param_layout):
 *
 *   | head, last block ... | ... | first block, table |pad| qk-norms | norms, row biases, positions |pad|
 *   |  shard 0 |  shard 1  | s0 | s1 |  shard 0 | shard 1 |        shard 0     |      shard 1          |
 *
 * A unit is gathered at once with ZERO_VALUES: the matrices of a block, or of the embedding, or of the head. Each unit
 * then has buckets of its own, one for experts and one for dense weights. Two kinds of parameters stay whole, in
 * buckets as above: vectors, which are not worth the calls, and those whose gradients are partial over tp or sp.
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

typedef enum { CUT_NONE, CUT_TP, CUT_EP, CUT_ETP, CUT_KINDS } Cut; /* the axis that cuts a dim */

/* How it begins (begin_at, param.c): numbers, NORMAL and UNIFORM ones of the spec's std; or, for heads with states
 * (layer/delta.c), logarithms of rates of decay, and the inverse softplus of times that go by with a token. */
typedef enum { INIT_ZERO, INIT_ONE, INIT_NORMAL, INIT_UNIFORM, INIT_LOG_RATE, INIT_TIME } Init;

/* The grid on which the copies of a parameter live. STATE is no weight but a number that each step's counts decide. Its
 * accumulator holds these counts, all of them on every rank. It is never cut, always in fp32 (its master), and in no
 * norm. */
typedef enum { PARAM_DENSE, PARAM_EXPERT, PARAM_STATE, PARAM_GROUPS } ParamGroup;

/* The ranks besides dp over which a gradient is partial and has to be summed; in the order of the layout. */
typedef enum {
    PARTIAL_NONE,   /* each rank's own shard, or computed alike everywhere */
    PARTIAL_STAGES, /* a table that the first and the last stage read: each has a part of its gradient */
    PARTIAL_HEADS,  /* partial because heads are cut: summed over tp */
    PARTIAL_ROWS,   /* partial when rows are sharded: summed over sp */
    PARTIAL_KINDS
} Partial;

/* States that ZeRO cuts over the copies of a parameter: each kind is cut with all before it. */
typedef enum { ZERO_NONE, ZERO_STATES, ZERO_GRADS, ZERO_VALUES } ZeroCut;

/*
 * A rank's share of the parameters of a pipeline stage: the shards that its axes cut, and which copy of them it has,
 * along dp for dense parameters, along the experts' dp for theirs. ZeRO cuts optimizer states further, into a ZeRO
 * shard for each copy (in a bidirectional pipeline two replicas have copies); without it there is one ZeRO shard. Where
 * there are groups of ZeRO (comm/groups.h), gradients and weights are cut over these alone: into near shards, and each
 * of them into the ZeRO shards of the ranks that share it. Without such groups these are the same shards.
 */
typedef struct {
    ZeroCut zero;
    int shards[CUT_KINDS], shard[CUT_KINDS]; /* along an axis: how many there are, which is this rank's */
    int copy[PARAM_GROUPS];
    int zero_shards[PARAM_GROUPS], zero_shard[PARAM_GROUPS];
    int near_shards[PARAM_GROUPS], near_shard[PARAM_GROUPS];
} ParamPlace;

ParamPlace param_place(Grid g, int rank, ZeroCut zero);

/*
 * Grid.zero_group of a grid for which everything else is known: `asked`, or 0 where a group of ZeRO would have all
 * copies. But the replicas of a bidirectional pipeline come to a stage at different times: what is gathered and summed
 * while the step runs is cut over the copies of one of them.
 */
int param_zero_group(Grid g, ZeroCut zero, int64_t asked);

ParamPlace param_place_single(void); /* the place of a rank that has all */

enum {
    PARAM_DECAY = 1,
    PARAM_COPY = 2,   /* the parameter of this name in another registry is the one that counts (Param.copy) */
    PARAM_HIDDEN = 4, /* a matrix of a block: the wider the model, the more inputs it has */
    PARAM_TABLE = 8,  /* a row for each token, position or channel, not a matrix that inputs are multiplied by */
    PARAM_ROUTER = 16,
    PARAM_EIGHT_BITS = 32, /* its products are of 8-bit operands */
    PARAM_FP32 = 64        /* layers read it in fp32, whatever else they read */
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
    int64_t stack; /* matrices of equal rows that dim 0 has, each with these sections and cuts. 0 = 1 */
    Cut stack_cut; /* the axis that cuts between them */
    /* Rows of dim 0 that belong to a head, in each section; all 0: there are no heads. */
    int64_t head_rows[PARAM_MAX_SECTIONS];
    Partial partial;
    ParamGroup group;
    Init init;
    float std;           /* of NORMAL; UNIFORM: the largest magnitude */
    int64_t init_repeat; /* number of rows in succession that begin alike. 0 = 1 */
    int flags;
    QkRows qk; /* rows of dim 0, in memory's order, that make queries and keys; chunk 0: none */
    int block; /* the block of the model to which a STATE parameter, or one with qk, belongs */
} ParamSpec;

typedef struct {
    ParamSpec spec;
    char name[PARAM_NAME_MAX];
    int64_t local[2];               /* rows, columns on this rank (columns 1 for vectors) */
    int64_t matrices, first_matrix; /* matrices of the stack that this rank has */
    int64_t first[2];               /* this rank's first row and column in each padded, interleaved global matrix */
    int64_t offset, count;          /* its elements in the order of all buckets, each whole */
    int unit;                       /* param_begin_unit */
    int bucket;
    int global;     /* its number in the registry of the whole model (param_number); its own id if there is no other */
    int optimizer;  /* the one that updates it: 0 is AdamW (optim/optimizer.h) */
    bool as_matrix; /* the optimizer updates it matrix by matrix, not number by number */
    int moments;    /* moments that the optimizer keeps: 1 or 2 */
    bool copy;      /* norms and checkpoints take the parameter of this name in another registry */
} Param;

/* A range of the flat buffers that is reduced and gathered at once. */
typedef struct {
    int64_t first, count; /* elements, each bucket whole; a multiple of zero_shards * PARAM_ALIGN */
    int64_t zero_first;   /* where its shard begins in a buffer of this rank's shards of all buckets */
    /* Its begin in `value` and in `grad`: of all of it, or, where these are cut, of its near shard. */
    int64_t value_first, grad_first;
    bool value_cut, grad_cut;
    bool fp32;                   /* its values are fp32, whatever the store's others are (PARAM_FP32, fp32_vectors) */
    int unit;                    /* the unit of its parameters, where any is cut; else -1 */
    int zero_shards, zero_shard; /* number of its ZeRO shards; this rank's */
    int near_shards, near_shard;
    ParamGroup group;
    int params;
    bool partial; /* some of its gradients are partial over other ranks than dp's */
} Bucket;

typedef struct {
    Param *items;
    int *by_name; /* [2 * capacity] hash table by name: index + 1; 0 = free */
    int count, capacity;
    int units;          /* how many were begun */
    int64_t flat_count; /* elements of all buckets, each whole */
    /* Elements of `value` and of `grad`. A number of an fp32 bucket takes two elements of `value`, which has 16 bits
     * each. */
    int64_t value_count, grad_count;
    int64_t zero_count; /* elements of this rank's ZeRO shards */
    Bucket *buckets;
    int bucket_count;
    /* The start of each kind in `grad`, which is the end of the kind before it. */
    int64_t partial_at[PARTIAL_KINDS + 1];
    int *order; /* [count] parameters in the order of their offsets */
    ParamPlace place;
    /* To be set before the layout. narrow: `value` is of 16 bits; parameters with PARAM_FP32 are in fp32 there, in
     * buckets of their own, and of no unit. With fp32_vectors so are all vectors, and tables of positions. */
    bool narrow, fp32_vectors;
    SetupArena *setup;
} ParamRegistry;

void param_registry_init(ParamRegistry *r, SetupArena *setup, ParamPlace place);

/* Returns the id in *id. ERR_CONFIG: a dim does not divide into its shards. ERR_INTERNAL: the name is repeated. */
Err param_add(ParamRegistry *r, ParamSpec spec, int *id);

/* Begins a unit: all parameters that are registered up to the next call. */
void param_begin_unit(ParamRegistry *r);

/* Numbers the parameters as `whole`, the registry of the whole model, does. ERR_INTERNAL: it lacks one. */
Err param_number(ParamRegistry *r, const ParamRegistry *whole);

/* The id of a parameter, or -1. */
int param_find(const ParamRegistry *r, const char *name);

/* Lays out what was registered in buckets of about bucket_elems elements. To be called once, before a store is made. */
Err param_layout(ParamRegistry *r, int64_t bucket_elems);

/*
 * A range of a parameter's local elements, [first, first + count), and the position `at` of its first element in a
 * buffer. param_zero_shard gives the part of a parameter that lies in a ZeRO shard of its bucket, and `at` in a buffer
 * of these shards of all buckets. count may be 0.
 */
typedef struct {
    int64_t first, count, at;
} ParamRange;

ParamRange param_zero_shard(const ParamRegistry *r, int id);               /* this rank's */
ParamRange param_zero_shard_at(const ParamRegistry *r, int id, int shard); /* the shard of another copy */

int64_t param_padding(const ParamRegistry *r); /* elements of flat_count that no parameter has */
int64_t param_total(const ParamRegistry *r);   /* global unpadded element count of all parameters */
int64_t param_trained(const ParamRegistry *r); /* the same without STATE */

/* The form in which a store keeps gradients. */
typedef enum {
    GRADS_NONE, /* for evaluation and generation: there are no moments either */
    GRADS_F32,  /* in plain sums: repeats of a layout give the same bits */
    GRADS_I64   /* in fixed point: all layouts give the same bits */
} GradKind;

/* The forms in which a store keeps its numbers. */
typedef struct {
    DType value;   /* F32, BF16 or F16 */
    DType moments; /* F32 or BF16 */
    GradKind grads;
} StoreKinds;

/* The pass that reads a value. Two passes may run in turn, one of each kind (engine/pair.h). */
typedef enum { PASS_FORWARD, PASS_BACKWARD, PASSES } Pass;

/* An action on one of the stages that a rank has. */
typedef struct {
    int stage; /* among those of the rank; -1: there is none */
    Pass pass;
} Visit;

/* Tells whoever moves gradients and values between ranks what layers do with them. It may be empty. */
typedef struct {
    void *user;
    /* An action begins; `next` will follow it on this registry. */
    void (*begins)(void *user, Visit now, Visit next);
    Err (*read)(void *user, int id, Pass pass); /* a value is about to be read */
    Err (*write)(void *user, int id);           /* a gradient is about to be added to, or asked for */
    Err (*added)(void *user, int id);           /* one more addition to it is on the stream */
    /* The action of this pass is over. keeps: its values are read again by the next one, always. */
    Err (*ended)(void *user, Pass pass, bool keeps);
} ParamListener;

/*
 * Facts that decide on the step: those of the gradients of all parameters of the model, in the order of registration.
 * Every rank has all of them, whichever parameters it holds. So norms add up in one order, and all ranks come to one
 * decision.
 */
typedef struct {
    int count;
    Tensor shift, next_shift; /* [count] i32 fixed-point shifts (docs/determinism.md) */
    Tensor overflow;          /* [1] i32 flag: a gradient leaf did not fit */
    Tensor over_limit;        /* [1] i32 flag: a rank's experts got more rows than moe.slack allows */
    Tensor flags;             /* [2] i64: these two lie in it, for the maximum over ranks */
    Tensor max, sumsq;        /* [count], [count, 4] i64: statistics (ops.def, grad_stats) */
} GradStats;

/* Allocates in `state`; without `gradients` only shifts and flags. */
Err grad_stats_init(GradStats *g, int count, bool gradients, Arena *state);

/* Codes of a weight and of it transposed, with their factors (ops.def). */
typedef struct {
    Tensor codes[2], factor[2];
} ParamCodes;

/* Codes and magnitudes of the newest values that products of 8-bit operands keep until the values change (layer.h,
 * fp8_keep_weights). */
typedef struct {
    /* [count] i64: op fp8_amax's result, over all ranks that have some of the weight; or absent */
    Tensor amax;
    ParamCodes *codes;       /* [count], for those with PARAM_EIGHT_BITS; NULL: made for each product */
    bool *amax_known, *cast; /* [count] in host memory: is amax, are codes, those of the newest values? */
} ParamEights;

/* The buffers of one registry. */
typedef struct {
    const ParamRegistry *reg;
    const GradStats *stats;
    /* group: the ranks with the same parameters. Gradients are summed over them, and with ZeRO each has a shard. With
     * groups of ZeRO it holds only those in the rank's own group of ZeRO; `far` then holds the ranks of other groups
     * that have the same near shard, and is NULL otherwise. */
    Comm *group[PARAM_GROUPS], *far[PARAM_GROUPS];
    bool trained;    /* it has gradients and moments: the same on all ranks, also where one has no parameter */
    Tensor value;    /* [value_count] of its dtype; an fp32 bucket in it is of F32 (param_bucket_value) */
    Tensor master;   /* value itself if that is f32, else it has the shape of m and v */
    Tensor m, v;     /* [zero_count], and less where some have no v (param_held); of one dtype */
    int64_t *before; /* [count] elements in front of a parameter that have no place in v */
    /* [older_count] the values before the last updates, for schedules that update while they run: version i is
     * older[i % older_count]. updates: number of updates since these are kept. */
    Tensor *older;
    int older_count, updates;
    Tensor grad; /* [grad_count] I64 or F32; empty without gradients */
    /* [buckets] The place where all of a bucket is now. Absent: only a near shard is in memory, and layers must not
     * ask. whole_grad: NULL without gradients. */
    Tensor *whole_value, *whole_grad;
    Tensor parts;   /* [tensors, 7] FlatPart: the parts that this rank updates, without STATE */
    int64_t chunks; /* number of chunks of all parts together */
    /* [count] in host memory: nothing was added to the gradient in this step. Its memory then holds no number of this
     * step, and who adds first overwrites it, so that no pass over the gradients clears them. */
    bool *fresh;
    ParamEights eights;
    ParamListener listener;
    Err failed; /* error of listener.read or write: layers go on, the executor stops behind the action */
} ParamStore;

/* Memory of a store: states that the optimizer alone reads lie in `states`, all else in `state`. They may be one. */
typedef struct {
    Arena *state, *states;
} StoreMemory;

/*
 * Allocates in `memory`, and on the host in the registry's setup memory. All gradients are fresh. `stats` must outlive
 * the store. `group` is to be set where there is more than one ZeRO shard.
 */
Err param_store_init(ParamStore *s, const ParamRegistry *reg, const GradStats *stats, StoreMemory memory,
                     StoreKinds kinds);

/* Makes the table `parts` in `state`. The store must have gradients. */
Err param_store_list_parts(ParamStore *s, Arena *state, Stream *stream);

/* Keeps the last `count` values beside the newest, in `state`. */
Err param_store_keep_older(ParamStore *s, int count, Arena *state);
/* The present values become one update older. To be called before the update. */
Err param_store_age(ParamStore *s, Stream *stream);

/* Values may have changed: forgets codes and magnitudes that were kept of them. */
void param_store_forget(ParamStore *s);

/* A step begins, perhaps the same once more: all gradients are fresh, and nothing is known of values. */
void param_store_begin(ParamStore *s);
/* A parameter whose gradient is fresh has 0, and is so no more. Its bucket must be whole. */
Err param_store_clear_fresh(ParamStore *s, Stream *stream, int id);

/* Fills the masters by their Init, with `threads` threads of the host. They are to be published (param_set_publish). */
Err param_store_fill(ParamStore *s, Stream *stream, uint64_t seed, int threads);

/* The copies that layers read in the masters' place, of 16 bits but for parts with FLAT_WIDE. Absent where layers read
 * the masters. An update writes both. */
static inline Tensor param_store_copy(const ParamStore *s) { return s->value.dtype == F32 ? (Tensor){ 0 } : s->value; }

/* Views of one parameter, [local rows, local columns], or [local rows] for vectors; the value as it was `age` updates
 * ago. Their buckets must be whole. */
Tensor param_store_value(const ParamStore *s, int id, int age);
Tensor param_store_grad(const ParamStore *s, int id);
/* This rank's near shard of a bucket, in `value` and in `grad`; and its ZeRO shard in such a near shard. */
Tensor param_bucket_value(const ParamStore *s, int bucket);
Tensor param_bucket_grad(const ParamStore *s, int bucket);
Tensor param_bucket_own(const ParamStore *s, int bucket, Tensor near);
/* Flat views of the part of one parameter that this rank's ZeRO shard has. */
Tensor param_zero_shard_master(const ParamStore *s, int id);
Tensor param_zero_shard_value(const ParamStore *s, int id);
Tensor param_zero_shard_grad(const ParamStore *s, int id);
/* The place in master, m or v of element 0 of a parameter's local memory, or the place that it would have if the ZeRO
 * shard began before it. */
int64_t param_origin(const ParamStore *s, int id, Tensor flat);
/* The local elements of a parameter that master, m or v has: all, or those in this rank's ZeRO shard, or near shard;
 * none of one that has no v. */
ParamRange param_held(const ParamStore *s, int id, Tensor flat);
/* The place in the buffers of `count` local elements from `first` on, which lie in this rank's ZeRO shard. */
FlatPart param_flat_part(const ParamStore *s, int id, int64_t first, int64_t count);
Tensor param_store_shift(const ParamStore *s, int id); /* [1] i32 */

/*
 * The parameters of a model over the ranks of a pipeline. A rank has a registry for each replica of the model of which
 * it holds stages: one, or two where the pipeline runs in both directions.
 */
typedef struct {
    const ParamRegistry *whole;      /* has all stages: numbers, names and shapes; need not be laid out */
    const ParamRegistry *registries; /* [ranks][replicas], laid out for this rank's dp and tp coordinates */
    int ranks, replicas;             /* number of pipeline ranks; number of registries of each */
    ParamStore *stores;              /* [replicas] this rank's */
    int lower; /* the one of its two replicas that has the lower stage; 0 if there is one replica */
    GradStats *stats;
} ParamSet;

/* The set of a model that has one pipeline rank. */
ParamSet param_set_single(ParamStore *store, GradStats *stats);

static inline const ParamRegistry *param_set_registry(const ParamSet *s, int pp_rank, int replica)
{
    return &s->registries[pp_rank * s->replicas + replica];
}

/*
 * Makes the stores' 16-bit copies anew from the masters in all ZeRO shards, after these were filled or loaded.
 * Collective over the groups of each store, that of the lower stage first: with two replicas, ranks that have a stage
 * in common hold it in different replicas, and must not wait for each other in different groups.
 */
Err param_set_publish(const ParamSet *s, Stream *stream);

/* The row of the global tensor, in plain order, that is this rank's local row r; -1: it is padding. */
int64_t param_plain_row(const Param *p, int64_t r);

#endif
