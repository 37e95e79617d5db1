/*
 * Parts that mixers whose heads have states share (delta.c, kda.c, mamba2.c). A state is a matrix of fixed size that
 * every row changes and reads. A unit is what no rank cuts: heads that read the same columns.
 *
 *   m, z  = x Win           columns lie unit by unit
 *   a     = x Wsmall        one or two numbers of each head, from which its gates come; ranks of tp have all of Wsmall
 *   m     = silu(convolution over the last rows of each column)
 *   gates = of a, A_log and dt_bias: two fp32 numbers of a row and head, one of them the logarithm of the decay
 *   o     = the recurrence over m and gates
 *   y     = (o, normed and gated by z) Wproj       no linear layer here has a bias
 *
 * Forward keeps for backward: the convolution's input (`mixed`), z, a, o, the states at the start of windows, and
 * the input of Wproj. Selective recomputation leaves out the last two. Backward computes convolution and gates again
 * in any case.
 *
 * A slice hands two things to the slice behind it: its last state, and the last rows that its convolution has read. In
 * backward their gradients come back from there. Each slice has whole windows (RecurrentShape.window), so it begins
 * where a window of the uncut sequence begins, and the bits are the same.
 *
 * Generation keeps the state at the start of the open window. Each call computes that window's rows again, so that a
 * text has the same bits however calls cut it.
 *
 * Ranks of cp exchange positions for heads behind the projections. Each then has all positions of its heads. Or they
 * have positions in order, all heads of them, and hand state and last rows to the rank behind, as slices do: a rank
 * waits for those before it. Gates, norm and z stay with the rows either way.
 */
#ifndef MEGATRAIN_LAYER_RECURRENT_H
#define MEGATRAIN_LAYER_RECURRENT_H

#include "layer/attend.h"
#include "layer/reshard.h"

enum { GATES = 2, LATENTS = 2 };
enum { LATENT_DECAY, LATENT_Z };

typedef struct RecurrentOps RecurrentOps;

/* Over all ranks. */
typedef struct {
    int64_t units, heads;
    int64_t mixed, gated; /* columns of a unit: of the convolution; of z, and of o */
    int64_t state[2];     /* rows and columns of a head's state */
    int inputs;           /* numbers of a row and head that Wsmall gives gates: 1 to GATES */
    int64_t decays;       /* numbers of a row and head that the last gate has, the logarithm of the decay */
    int64_t latent;       /* 0, or: z and the last gate's input are products of latents so wide, from Wsmall, not Win */
    int conv, window;     /* rows that the convolution spans; positions of a window */
    bool z_first;         /* z lies before the convolution's columns, not behind them */
} RecurrentShape;

/* The first member of each such kind's own struct. */
typedef struct {
    const ModelSpec *spec;
    const RecurrentOps *ops;
    RecurrentShape shape;
    Linear in, small, proj;
    Linear up[LATENTS];  /* from latents */
    int conv, conv_bias; /* -1: it has none */
    int a_log, dt_bias;
    int skip; /* numbers of heads that the scan itself reads; -1: it has none */
} Recurrent;

/* With selective recomputation states and gated are not kept. mixed and states are of the positions and heads that
 * the scan has. */
typedef struct {
    Saved mixed, z, latent[LATENTS], input[GATES], o, states, gated;
    Saved state, tail; /* from the rank before; with the states at the start of windows the first is one of them */
} RecurrentSave;

/* One call, and its sizes: of the rows as other layers have them, with the heads of this rank of tp; and of the scan,
 * whose positions and heads ranks of cp exchange. */
typedef struct {
    const Recurrent *r;
    Ctx *c;
    const RecurrentSave *save;
    ReshardPlan exchange;
    Comm *chain; /* ranks that have positions in order and hand the state on; NULL: none do */
    int64_t B, T, N, units, heads;
    int64_t rows, scan_units, scan_heads; /* of the scan: rows of a sample, units, heads */
    int64_t first;                        /* position of its first row */
    int64_t group;                        /* heads of a unit */
    int64_t mixed, gated;                 /* columns of a unit, as in RecurrentShape */
    int64_t before;                       /* rows that the convolution sees besides the present one */
} RecurrentCall;

/* Rows of the scan: mixed [B, rows, channels], gates [B, rows, heads], of several decays [B, rows, heads, decays]; the
 * rows ahead of them that the convolution sees, and the state ahead of the first, absent at the start of a sequence. */
typedef struct {
    Tensor mixed, gate[GATES], doc;
    Tensor ahead, state;
    int64_t first, rows;
} Scan;

/* Backward of a scan: from go [B, rows, heads, width] and the gradient of the state behind it, which may be absent,
 * the gradients of the convolution's result, of gates and of the state ahead, which may be absent. */
typedef struct {
    Tensor go, dafter, states;
    Tensor dy, dgate[GATES], dbefore;
    Tensor skip; /* where the gradient of Recurrent.skip is summed */
    bool fresh;  /* nothing is in it yet */
} ScanBackward;

/* Members that a kind has of its own. y [B, rows, channels] is the convolution's result, which a scan may overwrite. */
struct RecurrentOps {
    /* From in [N, heads] to gate [N, heads], of the heads of this rank; and back, with the gradients of A_log and
     * dt_bias. The last ones have `decays` numbers a head: in [N, heads * decays], gate [N, heads, decays]. */
    Err (*gates)(const RecurrentCall *k, const Tensor *in, const Tensor *gate);
    Err (*gates_backward)(const RecurrentCall *k, const Tensor *in, const Tensor *dgate, const Tensor *din);
    /* o [B, rows, heads, width]. states, those at the start of windows, and after may be absent. */
    Err (*scan)(const RecurrentCall *k, const Scan *x, Tensor y, Tensor o, Tensor states, Tensor after);
    Err (*scan_backward)(const RecurrentCall *k, const Scan *x, Tensor y, const ScanBackward *b);
    /* y = norm and gate of o and z, all [N, columns]. Back: go becomes the gradient of o; dz [units of rows, gated]
     * may be columns of a wider tensor. */
    Err (*norm)(const RecurrentCall *k, Tensor o, Tensor z, Tensor y);
    Err (*norm_backward)(const RecurrentCall *k, Tensor go, Tensor dz);
};

/* ---- registration ---- */

/* Outputs of Win in the order in which they lie in a unit; 0 behind the last. */
typedef struct {
    const char *in, *small; /* names of Win and Wsmall */
    const char *up[LATENTS];
    int64_t section[PARAM_MAX_SECTIONS], head_rows[PARAM_MAX_SECTIONS];
    bool conv_bias;
} RecurrentParts;

/* r->spec, ops and shape are set. tp_blocks must divide the number of units. All but the norm and Wproj. */
Err recurrent_add(Recurrent *r, ParamRegistry *reg, const RecurrentParts *p, const char *owner, int layer);
Err recurrent_add_proj(Recurrent *r, ParamRegistry *reg, const char *owner, int layer);
/* `each` numbers of each head. */
Err recurrent_add_numbers(const Recurrent *r, ParamRegistry *reg, const char *owner, const char *what, int64_t each,
                          Init init, int *id);

/* ---- views ---- */

/* Some columns of each chunk of t [N, chunks]: [N * chunks / chunk, columns]. */
Tensor part_of(Tensor t, int64_t chunk, int64_t before, int64_t columns);
/* Heads that lie `group` side by side in each row of t, one below the other: [rows * group, width]. */
Tensor below(Tensor t, int64_t group);
/* The same by sample and row: [B, rows, heads, width]. */
Tensor by_row(const RecurrentCall *k, Tensor t, int64_t group, int64_t rows);
Tensor rows_of_heads(Tensor t, int64_t columns);
/* Windows of so many rows; room for states of `heads` heads in scratch, one below the other. */
int64_t windows_of(const RecurrentCall *k, int64_t rows);
Err states_new(const RecurrentCall *k, int64_t heads, Tensor *t);
/* The part of a parameter that is cut by units, or of its gradient, that this rank of cp scans. */
Tensor own_units(const RecurrentCall *k, Tensor t);

/* The accumulators of two gradients that one op adds to; *fresh: it overwrites both. in_parts: ranks of cp have parts
 * of them (own_units). The second may be -1. */
Err grad_pair(const RecurrentCall *k, int a, int b, bool in_parts, Tensor acc[2], bool *fresh);

/* ---- members of the LayerKind ---- */

Err recurrent_forward(const void *own, Ctx *c, Tensor x, Tensor y, void *kept);
Err recurrent_backward(const void *own, Ctx *c, const void *kept, Tensor x, Tensor dy, Tensor dx);
Err recurrent_cache(const void *own, DType dtype, void *cache, Arena *state);
Err recurrent_grads(const void *own, const Ctx *c, void *grads, Arena *state);
int64_t no_pair_flop(const ModelSpec *s);
int no_score_heads(const ModelSpec *s);

/* State and last rows of a slice, for the one behind it. ndim 0: they have not been computed yet. */
typedef struct {
    Saved state, tail;
} RecurrentKept;

/* The same at a border between slices, or between ranks; or their gradients, which come from behind. */
typedef struct {
    Tensor state, tail;
} RecurrentBorder;

/*
 * The state at the start of the open window. `rows`: those ahead of it that the convolution sees, then the window's;
 * their gates and documents.
 */
typedef struct {
    Tensor state;       /* [1, heads, ...] */
    Tensor rows;        /* [conv - 1 + window, channels] */
    Tensor gate[GATES]; /* [window, heads], of several decays [window, heads * decays] */
    Tensor doc;         /* [window, 1] */
} RecurrentCache;

#define RECURRENT_CARRY(window)                                                                                       \
    {                                                                                                                 \
        .ways = 1 << CONTEXT_A2A | 1 << CONTEXT_STATE, .slice_unit = (window), .cache_bytes = sizeof(RecurrentCache), \
        .kept_bytes = sizeof(RecurrentKept), .grads_bytes = sizeof(RecurrentBorder), .cache = recurrent_cache,        \
        .grads = recurrent_grads                                                                                      \
    }

#endif
