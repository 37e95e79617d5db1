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
 * Memory: flat device buffers in registration order, each parameter padded to PARAM_ALIGN elements:
 *   master f32   m f32   v f32   grad i64 fixed point (or f32 with reproducible = run)
 *   grad_once f32   instead of grad, for tensors whose sum is complete after one product (GradPlace)
 *   value  what layers read: the master itself, or its 16-bit copy, written by every update
 * and per parameter a fixed-point shift (docs/determinism.md).
 *
 * Sections: a weight made of parts (q|k|v, gate|up) lies chunk by chunk in memory, so that a cut of dim 0
 * gives each rank whole chunks with every part in them:
 *   plain (checkpoint, export)    q q q q k k v v
 *   memory, interleave = 2        q q k v | q q k v
 */
#ifndef MEGATRAIN_PARAM_PARAM_H
#define MEGATRAIN_PARAM_PARAM_H

#include "comm/grid.h"
#include "device/ops.h"

typedef enum { CUT_NONE, CUT_TP } Cut; /* which axis cuts a dim */
typedef enum { INIT_ZERO, INIT_ONE, INIT_NORMAL } Init;
typedef enum { PARAM_DENSE, PARAM_EXPERT } ParamGroup; /* which grid its copies live on */

/* Over which ranks, besides dp, a gradient is partial and has to be summed. */
typedef enum {
    PARTIAL_NONE, /* each rank's own shard, or computed alike everywhere */
    PARTIAL_ROWS, /* partial when rows are sharded: summed over sp */
    PARTIAL_HEADS /* partial because heads are cut: summed over tp */
} Partial;

enum {
    PARAM_DECAY = 1,
    PARAM_ONE_PRODUCT = 2 /* its gradient is one grad_add_product a micro-batch and nothing else */
};
enum { PARAM_ALIGN = 64, PARAM_MAX_SECTIONS = 3, PARAM_NAME_MAX = 64 };

typedef struct {
    const char *name;    /* global, e.g. "layers.3.attn.qkv.weight"; copied */
    int ndim;            /* 1 or 2 */
    int64_t shape[2];    /* global, unpadded */
    int64_t padded_rows; /* dim 0 in memory over all ranks, >= shape[0]; 0 = shape[0] */
    Cut cut[2];
    int64_t section[PARAM_MAX_SECTIONS]; /* rows of dim 0; all 0 = one section */
    int64_t interleave;                  /* chunks of dim 0; each section's rows divide by it. 0 = 1 */
    Partial partial;
    ParamGroup group;
    Init init;
    float std;
    int flags;
} ParamSpec;

typedef struct {
    ParamSpec spec;
    char name[PARAM_NAME_MAX];
    int64_t local[2];      /* rows, columns on this rank (columns 1 for vectors) */
    int64_t first[2];      /* this rank's first row and column in the padded, interleaved global tensor */
    int64_t offset, count; /* elements, in the flat buffers */
} Param;

typedef struct {
    Param *items;
    int *by_name; /* [2 * capacity] index + 1, found by hashing the name; 0 = free */
    int count, capacity;
    int64_t flat_count; /* elements of each flat buffer */
    int tp, tp_rank;
    SetupArena *setup;
} ParamRegistry;

void param_registry_init(ParamRegistry *r, SetupArena *setup, int tp, int tp_rank);

/* Returns the id in *id. ERR_CONFIG when a cut dim does not divide, ERR_INTERNAL for a repeated name. */
Err param_add(ParamRegistry *r, ParamSpec spec, int *id);

int64_t param_total(const ParamRegistry *r); /* global unpadded element count of all parameters */

/* What a store keeps of gradients. */
typedef enum {
    GRADS_NONE,    /* evaluation, generation: no moments either */
    GRADS_F32,     /* plain sums: repeats of a layout give the same bits */
    GRADS_I64,     /* fixed point: all layouts do */
    GRADS_I64_ONCE /* the same bits for a single micro-batch a step on a single dp rank, in less memory */
} GradKind;

/*
 * The gradient of one parameter. once: the step's only product forms the integers in its own tile and leaves
 * their sum rounded to float, as the optimizer would round it; PARAM_ONE_PRODUCT under GRADS_I64_ONCE.
 * fresh: nothing was added in this step. What the memory holds is then no number of this step: who adds first
 * overwrites. So no pass over the gradients clears them.
 */
typedef struct {
    int64_t offset; /* elements, in grad or, if `once`, in grad_once */
    bool once, fresh;
} GradPlace;

/* The buffers of one replica of one stage. */
typedef struct {
    const ParamRegistry *reg;
    Tensor value;             /* flat: [flat_count]; shares the master's memory when that is its dtype */
    Tensor master, m, v;      /* flat */
    Tensor grad, grad_once;   /* flat: I64 or F32, and F32; either may be empty */
    GradPlace *place;         /* [count], host */
    Tensor shift, next_shift; /* [count] i32 */
    Tensor overflow;          /* [1] i32 flag: a gradient leaf did not fit */
    Tensor overflow_cell;     /* the 8 bytes it lies in, as [1] i64, for the maximum over ranks */
    Tensor max, sumsq;        /* [count], [count, 4] i64: gradient statistics (ops.def, grad_stats) */
} ParamStore;

/*
 * Allocates in `state`, and on the host in the registry's setup memory. value_dtype F32, BF16 or F16. All
 * gradients are fresh.
 */
Err param_store_init(ParamStore *s, const ParamRegistry *reg, Arena *state, DType value_dtype,
                     GradKind grads);

/* A step begins, again if it is repeated: all gradients are fresh. */
void param_store_begin(ParamStore *s);

/* The 16-bit copy again from the masters, after these were filled or loaded. */
Err param_store_publish(ParamStore *s, Stream *stream);

/* Fills masters by their Init, publishes, sets shifts to `shift`. Host arithmetic, `threads` of it. */
Err param_store_fill(ParamStore *s, Stream *stream, uint64_t seed, int shift, int threads);

/* Views of one parameter: [local rows, local columns], or [local rows] for vectors. */
Tensor param_view(const Param *p, Tensor flat);
Tensor param_store_grad(const ParamStore *s, int id);
Tensor param_store_shift(const ParamStore *s, int id); /* [1] i32 */

/* Global plain row of this rank's local row r (sections undone); -1 for padding. */
int64_t param_plain_row(const Param *p, int64_t r);

#endif
