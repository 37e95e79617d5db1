/* A mixture of experts, shared by moe*.c and capacity.c alone (docs/moe.md). */
#ifndef MEGATRAIN_LAYER_MOE_H
#define MEGATRAIN_LAYER_MOE_H

#include "layer/mlp.h"

/*
 * A router sends each row to topk of the experts. Each expert is an mlp of its own, and y is the weighted sum of
 * their outputs. A shared expert may be added, which every row passes, with a gate or without. The ranks of a tp-ep
 * group share the experts: each has E / ep of them, and etp neighbours have a part of each of these. They send their
 * rows to each other's experts.
 *
 *   router [E, D]    experts.fc1 [E * F, D] (swiglu: [E * 2F, D], an expert's gate above its up)
 *                    experts.fc2 [E * D, F]; both cut over ep between experts, over etp along F
 *
 * With moe.latent L the experts read and write rows of L numbers instead of D: they read latent_in x, and y is
 * latent_out of their weighted sum. Every rank has both whole.
 *
 *   latent_in [L, D]   latent_out [D, L]
 *
 * Biases, if the model has them: of the logits, [E]; of fc1, cut as its rows; of fc2, [E * D], whole on each rank.
 * The latter is added on the rank that a row's outputs return to, because ranks that share an expert have partial
 * sums.
 */
typedef struct {
    const ModelSpec *model;
    const MixtureSpec *spec;             /* &model->moe */
    Fp8Recipe fp8;                       /* the experts' products */
    int router, fc1, fc2;                /* weights */
    int router_bias, fc1_bias, fc2_bias; /* or -1 */
    int bias;                            /* STATE: a bias for choosing each expert; its accumulator counts rows */
    uint64_t jitter_key;
    Linear latent_in, latent_out; /* if spec->latent */
    Mlp shared;                   /* if spec->shared_ffn */
    int shared_gate;              /* weight [1, D], or -1 */
} Moe;

typedef struct {
    Saved logits, index, weight, row, choice, offset;
    Saved owned;             /* offsets of this rank's experts; with one rank along ep they are `offset` */
    Saved learned;           /* further facts that the dispatcher learned of other ranks */
    Saved x, hidden, active; /* rows of this rank's experts: input, before and behind the activation */
    Saved out;               /* the experts' outputs for this rank's rows */
    Saved sum;               /* the weighted sum of these, where latent_out reads it */
    Saved shared_out, gate;
    MlpSave shared;
} MoeSave;

/* Numbers in a row that experts read and write. */
static inline int64_t moe_width(const ModelSpec *s) { return s->moe.latent ? s->moe.latent : s->hidden; }

/* LayerKind.add (moe_register.c). */
Err moe_add(void *own, ParamRegistry *reg, const ModelSpec *spec, const char *name, int layer);

/*
 * kept [N, K] = a mixture's choices `index`, with -1 in the places of those that a full expert does not take or that
 * the expert's ranks have no room for. It lies in scratch, or is index itself where nothing is dropped. weight [N, K]:
 * what experts choose by. Collective over sp, cp and tp-ep.
 */
Err moe_choices_kept(const Moe *m, Ctx *c, Tensor index, Tensor weight, Tensor *kept);

/* Rows of this rank, of any dtype, to those of the micro-batch, in scratch, by sample and position; `own` itself in a
 * group of one. Collective over sp and cp. */
Err moe_gather_balance_rows(Ctx *c, Tensor own, Tensor *all);
/* The way back: this rank's rows of those of the micro-batch. */
Err moe_own_rows(Ctx *c, Tensor all, Tensor *own);
/* Rows of a balance unit, on all ranks. */
int64_t moe_balance_rows(const Moe *m, const Ctx *c);

/*
 * Tensors of one call of a mixture, under the names of MoeSave and with their shapes: N rows of tokens, K choices of
 * each, E experts, D columns, of experts' rows L (D without moe.latent); P permuted rows of this rank's tokens, Q rows
 * of its experts, F columns of an expert (H before a gated activation).
 */
typedef struct {
    Tensor logits_NE, index_NK, weight_NK, row_NK, choice_P, offset;
    Tensor owned, learned, x_QL, hidden_QH, active_QF, out_PL;
    Tensor shared_out_ND, gate_N1;
    Event *known; /* marked where `owned` was filled, in this call; else NULL */
} MoeRows;

/* ---- the way to the experts and back (moe_dispatch.c) ---- */

/* Rows on their way, in both places: the same memory if one rank has all experts. */
typedef struct {
    Tensor local;  /* [P, D] of this rank's tokens, permuted */
    Tensor remote; /* [Q, D] of its experts */
    Tensor parts;  /* results that ranks with parts of an expert send back, in scratch */
} MovedRows;

typedef struct {
    /* An expert's rows come from several ranks. Where they begin is t->owned, not t->offset. */
    bool remote;
    bool weighs; /* send_gradient takes dy and weights, and not d.local. */
    /* How many numbers t->learned [I32] has; NULL: none. */
    int64_t (*learned)(const Moe *m, const Ctx *c);
    /* Fills t->owned and t->learned. */
    Err (*learn)(const Moe *m, Ctx *c, const MoeRows *t);
    /* Tokens x [N, D] to the experts' rows [Q, D]. */
    Err (*send)(const Moe *m, Ctx *c, const MoeRows *t, Tensor x, Tensor rows);
    /* Results of experts, or gradients of their rows, to the ranks that sent the rows. Work between the calls overlaps
     * it; what begin has in scratch must stay there until end. */
    Err (*bring_begin)(const Moe *m, Ctx *c, const MoeRows *t, MovedRows *r);
    Err (*bring_end)(Ctx *c, const MovedRows *r);
    /* d.remote, the gradient of the experts' results: from d.local, or from dy [N, D] and the weights of choices. */
    Err (*send_gradient)(const Moe *m, Ctx *c, const MoeRows *t, Tensor dy, MovedRows d);
} Dispatcher;

#define DISPATCHER_FUNCTIONS(name, text, numbers, functions) extern const Dispatcher functions;
DISPATCHERS(DISPATCHER_FUNCTIONS)
#undef DISPATCHER_FUNCTIONS

/* The dispatcher of the specification. Where one rank has all experts, there is none. */
const Dispatcher *moe_dispatcher(const Moe *m, const Ctx *c);
/* Waits for a call that was begun with c->moves.done. In a pair this is where the halves take turns. */
Err moe_rows_end(Ctx *c, const Comm *group);
/* Parts of all-to-all that other dispatchers share. */
Err moe_learn_offsets(const Moe *m, Ctx *c, const MoeRows *t);
Err moe_bring_begin(const Moe *m, Ctx *c, const MoeRows *t, MovedRows *r);
Err moe_bring_end(Ctx *c, const MovedRows *r);

/* The dtype of experts' results and of their rows' gradients. In exact runs, parts that several ranks give to a sum are
 * not rounded before the sum. */
DType moe_result_dtype(const Ctx *c);
/* The other of two rows: the same memory, or, for other ranks' rows, new in scratch. */
Err moe_remote_rows(const Moe *m, Ctx *c, const MoeRows *t, MovedRows *r);
Err moe_local_rows(const Moe *m, Ctx *c, const MoeRows *t, MovedRows *r);
/* A tensor of permuted rows, of which those count that the offsets say are there. */
Tensor moe_in_use(Tensor rows, Tensor offset);
/* How many rows this rank's experts get at once if all experts get the same. */
int64_t moe_even_rows(const Moe *m, const Ctx *c);

/* ---- tokens in pieces (moe_pieces.c) ---- */

int64_t moe_run_tokens(const Ctx *c);                 /* tokens in a leaf of the weights' gradients */
int64_t moe_piece_tokens(const Moe *m, const Ctx *c); /* tokens of this rank that pass the experts at once */
int64_t moe_sent_rows(const Moe *m, const Ctx *c);    /* permuted rows of all its tokens */
/* The part of t that is of the piece from token `first` on. */
MoeRows moe_piece_at(const Moe *m, const Ctx *c, const MoeRows *t, int64_t first);
/* Learns other ranks' offsets of a piece: kept, or, of one piece of several, in scratch. Collective over tp-ep. */
Err moe_learn_piece(const Moe *m, Ctx *c, MoeRows *p);

/* ---- the router (moe_router.c) ---- */

/* t->logits_NE, index_NK and weight_NK of x [N, D]. Collective over sp where units are balanced. */
Err moe_choose(const Moe *m, Ctx *c, Tensor x, const MoeRows *t);
/* dx = what came through the router's weights, of which dweight [N, K] is the gradient. Collective over sp and cp. */
Err moe_router_backward(const Moe *m, Ctx *c, const MoeRows *t, Tensor x, Tensor dweight, Tensor dx);

/*
 * Results of the router and of the gate have a number for each expert, or one, and products take rows that begin on 16
 * bytes (cuda/gemm.c): memory has so many columns, of which the tensor is the first `cols`.
 */
int64_t moe_padded_cols(int64_t cols);
Tensor moe_first_cols(Tensor padded, int64_t cols);

/* y [N, rows of the weight] in fp32: a product of what the compute dtype has of x and the weight, whose sums are not
 * rounded. bias: -1 = none. */
Err moe_fp32_linear(Ctx *c, int weight, int bias, Tensor x, Tensor y);
/* Destination of the fp32 gradient of moe_fp32_linear's y: `dy`, which the weight's gradient reads, or wide, rounded to
 * it. Padded. */
Err moe_fp32_dy_alloc(Ctx *c, int64_t cols, Tensor *dy, Tensor *wide);
/* dx (overwritten), and the weight's gradient queued: in the compute dtype, as those of other linears. */
Err moe_fp32_linear_backward(Ctx *c, int weight, Tensor x, Tensor dy, Tensor wide, Tensor dx);

MoeLimits moe_limits_of(const Moe *m, const Ctx *c);
int moe_own_experts(const Moe *m, const Ctx *c);

#endif
