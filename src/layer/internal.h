/* Shared by the layers alone. */
#ifndef MEGATRAIN_LAYER_INTERNAL_H
#define MEGATRAIN_LAYER_INTERNAL_H

#include "device/leaf.h"
#include "layer/layer.h"

Err wgrad_push(Ctx *c, Wgrad w);

/* The accumulator of a gradient, to be added to: cleared if nothing was in this step. */
Err grad_open(Ctx *c, int id, Tensor *acc);

/* The same, for an op that overwrites it instead of adding if nothing was: *fresh. */
Tensor grad_target(Ctx *c, int id, bool *fresh);

/* To be called when the op that adds is on the stream. */
Err grad_added(Ctx *c, int id);

/* ---- parts of rows between ranks (exchange.c) ---- */

/* Part i of rows that are cut into as many parts as there are ranks; some parts may have a row more. */
Tensor equal_part(Tensor rows, int ranks, int i);

/* Messages of the ranks of a group to each other. scatter, with `parts`: a rank's part of everybody's rows, into the
 * place of the rank that sends it; gather: everybody's part of its rows. */
typedef struct {
    Comm *group;
    int bands; /* into which the ranks are cut: a divisor of their number */
    Tensor rows, parts;
    MessageKind kind;
} PartMoves;

/* The messages of one turn, 0 to bands - 1: scatter: to the band that is so many ahead, from the one as many behind;
 * gather: the other way round. Where a band has one rank turn 0 has none, and `done` is not used. */
Err exchange_band(Ctx *c, const PartMoves *p, int turn, Event *done);

/* ---- rows in bands (bands.c) ---- */

/* The ranks that sum rows of tensor-parallel regions: c->world->sp, or tp where rows are not sharded. */
Comm *rows_group(const Ctx *c);

/* Some rows, one behind the other. */
typedef struct {
    int64_t first, count;
} RowRun;

/* Rows that come into a tensor-parallel region or go out of it, band by band, while products run. */
typedef struct {
    int count;   /* bands; 1: rows pass whole */
    Tensor rows; /* rows of all bands, in scratch unless rows are not sharded */
    PendingSum sum;
} RowBands;

/*
 * b->rows = the rows of all ranks, as gather_rows(). Those of turn 0, 1, ... b->count - 1 are there, for later work of
 * the stream, after rows_in_band() for that turn; all turns must be waited for.
 */
Err rows_in_begin(Ctx *c, Tensor x, RowBands *b);
Err rows_in_band(Ctx *c, const RowBands *b, int turn, RowRun *run);

/*
 * y = this rank's rows of the sum of b->rows over tp, as reduce_rows(), in `bands` bands. For each turn the caller
 * computes those of rows_out_band() and then sends them; reduce_rows_end() of b->sum ends it. Till then what lies in
 * scratch must stay there.
 */
Err rows_out_begin(Ctx *c, Tensor y, int bands, RowBands *b);
RowRun rows_out_band(const Ctx *c, const RowBands *b, int turn);
Err rows_out_send(Ctx *c, RowBands *b, int turn);

/* rows [B * T, columns] of a rank's positions become [B * seq, columns] of all, in scratch; and back. As they are where
 * no ranks share sequences. Collective over cp. */
Err context_all_rows(Ctx *c, Tensor *rows);
Err context_own_rows(Ctx *c, Tensor *rows);
/* A tensor in a region of the segment at work, as it is kept; and one that another slot keeps. */
Saved saved_of(const Ctx *c, Region region, Tensor t);
Tensor save_in(const Slot *slot, Saved saved);
/* Keeps t in the slot for later slices. pass: it does not lie in the slot's REGION_I, and is copied there. */
Err save_for_slices(Ctx *c, Tensor t, bool pass, Saved *out);

/*
 * Products of 8-bit operands (fp8.c). fp8_begin_... makes those by a weight ready: it has the weight's codes, in
 * scratch, and the largest magnitude of the operand, over all ranks that share it. Collective, to be called before rows
 * are on their way.
 */
typedef struct {
    Fp8Recipe recipe;
    int id;           /* id of the parameter */
    Tensor amax;      /* [fp8_amax_count] i64 of the operand; absent: blocks have theirs */
    Tensor w, factor; /* w: with the dim to sum over last; its scale is set for each call */
} Fp8Weight;

/* forward: x is the operand. */
Err fp8_begin_forward(Ctx *c, Fp8Recipe recipe, int weight, Tensor x, Fp8Weight *out);
/* y = x w^T + bias of some rows x; gelu as op linear_fwd. */
Err fp8_forward(Ctx *c, const Fp8Weight *w, linear_fwd_args a);
/* backward: dy is the operand; what is known of it goes along with wgrad, which names it as this rank holds it. */
Err fp8_begin_backward(Ctx *c, Fp8Recipe recipe, Wgrad *wgrad, Fp8Weight *out);
/* dx = dy w of some rows dy, or the gradient of gelu_x. whole: dy are all rows that this weight gradient is of, and it
 * is made before scratch is released: it gets their codes from the same cast. NULL: they are not. */
Err fp8_dx(Ctx *c, const Fp8Weight *w, linear_dx_args a, Wgrad *whole);
/* dw += dy^T x */
Err fp8_dw(Ctx *c, const Wgrad *w, linear_dw_args a);
/* Blocks with one scale each. */
Fp8Blocks fp8_blocks_of(Fp8Recipe recipe, bool weight);
/* Room for codes, whose scale then points to *factor, and for their factors. */
Err fp8_codes_alloc(Arena *at, DType t, Fp8Blocks b, int64_t rows, int64_t columns, Tensor *codes, Tensor *factor);
/* An operand: codes, and the factors that their scale points to. Not to be copied. */
typedef struct {
    Tensor codes, factor;
} Fp8Operand;

/* The products of experts of 8-bit operands (fp8_experts.c): as the ops of these arguments. `recipe` has blocks. */
Err fp8_experts_fwd(Ctx *c, Fp8Recipe recipe, grouped_fwd_args a);
Err fp8_experts_dx(Ctx *c, Fp8Recipe recipe, grouped_dx_args a);
Err fp8_experts_dw(Ctx *c, Fp8Recipe recipe, grouped_dw_args a);

/* x itself if it is in fp32, else a copy in scratch that is. */
Err as_fp32(Ctx *c, Tensor x, Tensor *wide);
/* Tensor in which several calls add to x: x itself, or as much in fp32, in scratch; and x from it. */
Err wide_sum(Ctx *c, Tensor x, Tensor *sum);
Err round_sum(Ctx *c, Tensor x, Tensor sum);
/* y = the tree over `count` equal parts, rounded once; without y's dtype they are overwritten. */
Err sum_parts_to(Ctx *c, Tensor parts, int64_t count, Tensor y);
/* Leaf of a sum that tp cuts: a canonical chunk of the global length, or a part of one; not exact: of the local one. */
int64_t tree_leaf(const Ctx *c, int64_t global, int64_t local);

#endif
