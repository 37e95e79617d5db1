/* Shared by the layers alone. */
#ifndef MEGATRAIN_LAYER_INTERNAL_H
#define MEGATRAIN_LAYER_INTERNAL_H

#include "layer/layer.h"

Err wgrad_push(Ctx *c, Wgrad w);

/* The accumulator of a gradient, to be added to: cleared if nothing was in this step. */
Err grad_open(Ctx *c, int id, Tensor *acc);

/* The same, for an op that overwrites it instead of adding if nothing was: *fresh. */
Tensor grad_target(Ctx *c, int id, bool *fresh);

/* To be called when the op that adds is on the stream. */
Err grad_added(Ctx *c, int id);

/* Heads of a rank's rows: q [N, H, C], k and v [N or more, K, C], and a gate [N, H, C] or, without one, no data. */
typedef struct {
    Tensor q, k, v, gate;
} Heads;

/* All but the sinks, which are registered where the layer's parameters have them: a score for each head, or -1. Beside
 * the other scores a sink of 0 is a key that is orthogonal to all queries. */
AttentionCore attention_core(const ModelSpec *spec, const char *name, int layer, float scale);
Err attention_core_sinks(AttentionCore *a, ParamRegistry *reg, const char *name);

/* o [N, H, C] and lse [B, T, H] of h; k_span: the positions of its keys. */
Err attention_core_forward(const AttentionCore *a, Ctx *c, const Heads *h, Spans k_span, Tensor o,
                           Tensor lse);

/* What backward reads of a call besides its heads, and what it needs. */
typedef struct {
    Tensor o, go, lse; /* go: the gradient of o, behind the gate */
    Tensor delta;      /* [B, T, H], to be filled */
    int64_t chunk;     /* query heads in a leaf of the sum over those that read one key */
} AttendSave;

/* d = the gradients of h, and += that of the sinks. */
Err attention_core_backward(const AttentionCore *a, Ctx *c, const Heads *h, const AttendSave *save,
                            const Heads *d);

/* Keys or values of the rows, as later slices are to find them; see slice_keep_keys. */
Err attend_keep(Ctx *c, const Heads *h, bool pass);

/* own [T, columns] joins what `kept` [seq, columns] has of positions before the batch's; all becomes both together. */
Err cache_join(Ctx *c, Tensor kept, Tensor own, Tensor *all);

/* Heads side by side: [N, H, C] -> [N, H * C]; and below each other, [N * H, C]. */
Tensor heads_as_columns(Tensor t);
Tensor heads_as_rows(Tensor t);

/* o [N, H, C] times the sigmoid of a gate of the same shape, kept for backward; without a gate (no data) o itself. */
Err heads_gate_forward(Ctx *c, Tensor o, Tensor gate, Saved *saved, Tensor *gated);
/* go [N, H, C], the gradient of o under the gate, becomes that of o. Without a gate nothing is done. */
Err heads_gate_backward(Ctx *c, Tensor go, Tensor dgate, Tensor o, Tensor gate);

/* sum += x, of rows as outside tensor-parallel regions. */
Err add_rows(Ctx *c, Tensor sum, Tensor x);

/* Between the two products of a feed-forward layer of that width; gated: chunk by chunk (mlp.c). */
Err activation_forward(Ctx *c, const ModelSpec *spec, int64_t ffn, Tensor hidden, Tensor active);
typedef struct {
    Tensor hidden, dactive, dhidden;
} ActivationGrad;
Err activation_backward(Ctx *c, const ModelSpec *spec, int64_t ffn, ActivationGrad g);

/*
 * Of a mixture's choices index [N, K], whose weights are those, the ones that its experts take and their
 * ranks have room for: index with -1 in the places of the others. In scratch; index itself where nothing is dropped.
 * Collective over sp, cp and tp-ep.
 */
Err moe_choices_kept(const Moe *m, Ctx *c, Tensor index, Tensor weight, Tensor *kept);

/* Rows of this rank, of any dtype, to those of the micro-batch, in scratch, by sample and position; `own` itself in a
 * group of one. Collective over sp and cp. */
Err moe_gather_units(Ctx *c, Tensor own, Tensor *all);
/* Of these this rank's. */
Err moe_own_rows(Ctx *c, Tensor all, Tensor *own);
/* Rows of a balance unit, on all ranks. */
int64_t moe_unit_rows(const Moe *m, const Ctx *c);

/* Tensors of one call of a mixture: those of MoeSave, under the same names. */
typedef struct {
    Tensor logits, index, weight, row, choice, offset;
    Tensor owned, taken, x, hidden, active, out;
    Tensor shared_out, gate;
} MoeRows;

/* Logits, choices and weights of x: t->logits, index and weight. Collective over sp where units are balanced. */
Err moe_choose(const Moe *m, Ctx *c, Tensor x, const MoeRows *t);
/* dx = what came through the router's weights, of which dweight [N, K] is the gradient. Collective over sp and cp. */
Err moe_router_backward(const Moe *m, Ctx *c, const MoeRows *t, Tensor x, Tensor dweight, Tensor dx);

/*
 * Results of the router and of the gate have a number for each expert, or one, and products take rows that begin on 16
 * bytes (cuda/gemm.c): memory has so many columns, of which the tensor is the first `cols`.
 */
int64_t moe_padded_cols(int64_t cols);
Tensor moe_first_cols(Tensor padded, int64_t cols);

/* y [N, rows of the weight] in fp32, of a product in fp32. bias: -1 = none. */
Err moe_fp32_linear(Ctx *c, int weight, int bias, Tensor x, Tensor y);
/* Where the fp32 gradient of moe_fp32_linear's y goes: `dy`, which the weight's gradient reads, or wide, rounded to it.
 * Padded. */
Err moe_fp32_dy_alloc(Ctx *c, int64_t cols, Tensor *dy, Tensor *wide);
/* dx (overwritten), and the weight's gradient queued: in the compute dtype, as those of other linears. */
Err moe_fp32_linear_backward(Ctx *c, int weight, Tensor x, Tensor dy, Tensor wide, Tensor dx);

MoeRoom moe_room_of(const Moe *m, const Ctx *c);
int moe_own_experts(const Moe *m, const Ctx *c);

/* Products of a leaf, at most, where a sum can be cut into so short ones (linear.c). */
enum { LEAF_MOST = 2048 };

/*
 * The attention ops for this rank's queries of the slice at work and all keys that they may see: its own, those of the
 * other ranks of world->cp, and of earlier slices (keys.c). k, v, dk and dv are of its own positions, [B, T, K, C], and
 * k_span is q_span; dk and dv are whole. Where sequences are whole and a rank has all of them, these are the ops.
 */
Err context_attention(Ctx *c, attention_fwd_args a);
Err context_attention_bwd(Ctx *c, attention_bwd_args a);

/*
 * Where sequences pass in slices (c->slice_count > 1) a layer hands its keys and values, [B, T, K, C], over before
 * context_attention: later slices read them. pass: they do not lie in the slot's REGION_I, and are copied there.
 */
Err slice_keep_keys(Ctx *c, Tensor k, Tensor v, bool pass);

/* What lse and delta of context_attention's queries, [rows, heads] by their size, are of: all heads of own positions,
 * or some of them of more positions. */
typedef struct {
    int64_t rows, first, heads;
} HeadRows;

HeadRows context_head_rows(const Ctx *c, int64_t rows, int64_t heads);

/* rows [B * T, columns] of a rank's positions become [B * seq, columns] of all, in scratch; and back. As they are where
 * no ranks share sequences. Collective over cp. */
Err context_all_rows(Ctx *c, Tensor *rows);
Err context_own_rows(Ctx *c, Tensor *rows);
/* A tensor in a region of the segment at work, as it is kept; and one that another slot keeps. */
Saved saved_of(const Ctx *c, Region region, Tensor t);
Tensor save_in(const Slot *slot, Saved saved);

/* y = x, to the nearest of y's dtype. */
Err cast_values(Ctx *c, Tensor y, Tensor x);
/* x itself if it is in fp32, else a copy in scratch that is. */
Err as_fp32(Ctx *c, Tensor x, Tensor *wide);
/* Where what several calls add to x is summed: x itself, or as much in fp32, in scratch; and x from it. */
Err wide_sum(Ctx *c, Tensor x, Tensor *sum);
Err round_sum(Ctx *c, Tensor x, Tensor sum);
/* Leaf of a sum that every rank forms whole. */
int64_t whole_leaf(int64_t length);

/* Leaf of a sum that tp cuts: a canonical chunk of the global length, or a part of one; not exact: of the local one. */
int64_t tree_leaf(const Ctx *c, int64_t global, int64_t local);

#endif
