/*
 * LayerNorm and RMSNorm over rows. With sharded rows the parameters' gradients are partial (PARTIAL_ROWS).
 *
 * A norm over columns that tp cuts needs sums over whole rows. These are not added up over ranks: their rows travel.
 * Rank i gets the columns of all ranks of the i-th part of the rows, norms whole rows as one rank alone would, and
 * gives each rank its columns back. So the bits are those of one rank, and a rank sends what it has once for each way.
 *
 *   x [N, columns] --parts of rows--> [ranks, N / ranks, columns] --side by side--> [N / ranks, all columns] --norm-->
 *   y of all columns --apart--> [ranks, N / ranks, columns] --parts of rows--> [N, columns]
 */
#include <stdio.h>

#include "layer/internal.h"

Err norm_register(Norm *n, ParamRegistry *reg, const char *name, int64_t width, NormKind kind, float eps,
                  Partial partial)
{
    char text[PARAM_NAME_MAX];
    *n = (Norm){ .bias = -1, .rms = kind == NORM_RMS, .single_rows = partial == PARTIAL_HEADS, .eps = eps };
    ParamSpec p = { .name = text, .ndim = 1, .shape = { width }, .partial = partial, .init = INIT_ONE };
    snprintf(text, sizeof text, "%s.weight", name);
    TRY(param_add(reg, p, &n->weight));
    if (kind != NORM_LAYER) return ERR_OK;
    p.init = INIT_ZERO;
    snprintf(text, sizeof text, "%s.bias", name);
    return param_add(reg, p, &n->bias);
}

static Err run(const Norm *n, Ctx *c, Tensor x, Tensor y, Tensor mean, Tensor rstd)
{
    return op(c->s, norm_fwd, .y = y, .mean = mean, .rstd = rstd, .x = x, .w = param_value(c, n->weight),
              .b = param_value(c, n->bias), .eps = n->eps);
}

static Err save_stats(const Norm *n, Ctx *c, int64_t rows, NormSave *save, Tensor *mean, Tensor *rstd)
{
    *mean = (Tensor){ 0 };
    if (!n->rms) TRY(save_new(c, REGION_I, mean, &save->mean, F32, rows));
    return save_new(c, REGION_I, rstd, &save->rstd, F32, rows);
}

Err norm_forward(const Norm *n, Ctx *c, Tensor x, Tensor y, NormSave *save)
{
    Tensor mean, rstd;
    TRY(save_stats(n, c, x.dim[0], save, &mean, &rstd));
    return run(n, c, x, y, mean, rstd);
}

Err residual_add(Ctx *c, const ResidualSum *r)
{
    if (!r->branch.data) return ERR_OK;
    return op(c->s, residual_fwd, .y = r->sum, .residual = r->residual, .x = r->branch, .bias = r->bias,
              .position = ctx_row_slice(c, c->batch->position), .sample = ctx_row_slice(c, c->batch->sample),
              .dropout = r->dropout);
}

Err add_rows(Ctx *c, Tensor sum, Tensor x)
{
    const ResidualSum r = { .sum = sum, .residual = sum, .branch = x, .dropout = { 0, 0, 1 } };
    return residual_add(c, &r);
}

Err norm_forward_sum(const Norm *n, Ctx *c, const ResidualSum *r, Tensor y, NormSave *save)
{
    Tensor mean, rstd;
    if (!r->branch.data) return norm_forward(n, c, r->sum, y, save);
    TRY(save_stats(n, c, y.dim[0], save, &mean, &rstd));
    return op(c->s, residual_norm_fwd, .y = y, .mean = mean, .rstd = rstd, .sum = r->sum, .residual = r->residual,
              .x = r->branch, .bias = r->bias, .w = param_value(c, n->weight), .b = param_value(c, n->bias),
              .position = ctx_row_slice(c, c->batch->position), .sample = ctx_row_slice(c, c->batch->sample),
              .dropout = r->dropout, .eps = n->eps);
}

Err norm_again(const Norm *n, Ctx *c, Tensor x, Tensor y)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor mean = { 0 }, rstd;
    if (!n->rms) TRY(tensor_new(c->scratch, &mean, F32, x.dim[0]));
    TRY(tensor_new(c->scratch, &rstd, F32, x.dim[0]));
    TRY(run(n, c, x, y, mean, rstd));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* Destination of this rank's gradient of the weight: nowhere if the first rank of the sharing ones counts the same
 * rows. */
static Err weight_gradient(const Norm *n, Ctx *c, Tensor *dw, bool *fresh)
{
    *dw = grad_target(c, n->weight, fresh);
    if (!n->shared || c->world->kv.rank == 0) return ERR_OK;
    if (*fresh) TRY(op(c->s, fill_zero_acc, .x = *dw));
    *fresh = true;
    return tensor_new(c->scratch, dw, dw->dtype, dw->dim[0]);
}

/* Leaves of rows; one row each where a rank may hold any of them, by heads or by number. `into`: dx is
 * overwritten. */
static Err backward(const Norm *n, Ctx *c, const NormSave *save, NormRows r, int sum, bool into)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor none = { 0 }, dw, db = { 0 }, dsum = { 0 };
    bool bias = n->bias >= 0, fresh, bias_fresh, fresh_sum = false;
    TRY(weight_gradient(n, c, &dw, &fresh));
    if (bias) db = grad_target(c, n->bias, &bias_fresh);
    ASSERT(!bias || bias_fresh == fresh); /* each adds to both */
    if (sum >= 0) dsum = grad_target(c, sum, &fresh_sum);
    TRY(op(c->s, norm_bwd, .dx = r.dx, .dw = dw, .db = db, .dsum = dsum, .dy = r.dy, .x = r.x,
           .w = param_value(c, n->weight), .mean = n->rms ? none : save_get(c, save->mean),
           .rstd = save_get(c, save->rstd), .shift_w = param_store_shift(c->params, n->weight),
           .shift_b = bias ? param_store_shift(c->params, n->bias) : none,
           .shift_sum = sum >= 0 ? param_store_shift(c->params, sum) : none, .overflow = c->params->stats->overflow,
           .leaf = n->single_rows ? 1 : c->canon.leaf_rows, .headroom_bits = c->canon.headroom_bits, .fresh = fresh,
           .fresh_sum = fresh_sum, .fresh_dx = into));
    arena_release(c->scratch, mark);
    TRY(grad_added(c, n->weight));
    if (bias) TRY(grad_added(c, n->bias));
    return sum >= 0 ? grad_added(c, sum) : ERR_OK;
}

Err norm_backward(const Norm *n, Ctx *c, const NormSave *save, Tensor x, Tensor dy, Tensor dx)
{
    return backward(n, c, save, (NormRows){ x, dy, dx }, -1, false);
}

Err norm_backward_into(const Norm *n, Ctx *c, const NormSave *save, Tensor x, Tensor dy, Tensor dx)
{
    return backward(n, c, save, (NormRows){ x, dy, dx }, -1, true);
}

Err norm_backward_sum(const Norm *n, Ctx *c, const NormSave *save, NormRows r, int sum)
{
    return backward(n, c, save, r, sum, false);
}

/* ---- columns that tp cuts ---- */

/* Part i of `from` goes to rank i, whose part for this rank goes to part i of `to`. */
static Err swap_parts(Ctx *c, Tensor from, Tensor to)
{
    Comm *tp = &c->world->tp;
    const PartMoves moves = { .group = tp, .bands = 1, .rows = from, .parts = to, .kind = MESSAGE_ROWS };
    const Tensor own = equal_part(from, tp->size, tp->rank);
    TRY(device_copy(c->s, equal_part(to, tp->size, tp->rank).data, own.data, tensor_bytes(own)));
    return exchange_band(c, &moves, 0, NULL);
}

/* rows [n, all columns]: this rank's part of the N rows, from the columns of all ranks. */
static Err gather_columns(Ctx *c, Tensor x, Tensor rows)
{
    const int64_t ranks = c->world->tp.size, n = rows.dim[0], columns = x.dim[1];
    ArenaMark mark = arena_mark(c->scratch);
    Tensor parts, dense = x;
    if (x.ld != columns) {
        TRY(tensor_new(c->scratch, &dense, x.dtype, x.dim[0], columns));
        TRY(copy_rows(c, dense, x));
    }
    TRY(tensor_new(c->scratch, &parts, x.dtype, ranks * n, columns));
    TRY(swap_parts(c, dense, parts));
    TRY(op(c->s, join_columns, .y = tensor_reshape(rows, n, ranks, columns),
           .x = tensor_reshape(parts, ranks, n, columns)));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* And back. */
static Err scatter_columns(Ctx *c, Tensor rows, Tensor y)
{
    const int64_t ranks = c->world->tp.size, n = rows.dim[0], columns = y.dim[1];
    ArenaMark mark = arena_mark(c->scratch);
    Tensor parts;
    TRY(tensor_new(c->scratch, &parts, y.dtype, ranks * n, columns));
    TRY(op(c->s, join_columns, .y = tensor_reshape(parts, ranks, n, columns),
           .x = tensor_reshape(rows, n, ranks, columns)));
    TRY(swap_parts(c, parts, y));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

Err cut_norm_begin(Ctx *c, int64_t N, int64_t columns, CutNormSave *save, CutNorm *out)
{
    const int64_t ranks = c->world->tp.size, rank = c->world->tp.rank;
    const int64_t rows = N * (rank + 1) / ranks - N * rank / ranks; /* as equal_part() */
    ASSERT(N >= ranks);
    TRY(save_new(c, REGION_I, &out->rows, &save->rows, c->dtype, rows, columns * ranks));
    return save_new(c, REGION_I, &out->rstd, &save->norm.rstd, F32, rows);
}

Tensor cut_norm_input(const Ctx *c, const CutNorm *t, Tensor y) { return c->world->tp.size == 1 ? t->rows : y; }

Err cut_norm_forward(const Norm *n, Ctx *c, const CutNorm *t, Tensor y)
{
    const Tensor no_mean = { 0 };
    ArenaMark mark = arena_mark(c->scratch);
    Tensor out;
    if (c->world->tp.size == 1) return run(n, c, t->rows, y, no_mean, t->rstd);
    TRY(tensor_new(c->scratch, &out, y.dtype, t->rows.dim[0], t->rows.dim[1]));
    TRY(gather_columns(c, y, t->rows));
    TRY(run(n, c, t->rows, out, no_mean, t->rstd));
    TRY(scatter_columns(c, out, y));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

Err cut_norm_backward(const Norm *n, Ctx *c, const CutNormSave *save, Tensor dy, Tensor dx)
{
    const Tensor rows = save_get(c, save->rows);
    ArenaMark mark = arena_mark(c->scratch);
    Tensor dout, drows;
    if (c->world->tp.size == 1) return norm_backward_into(n, c, &save->norm, rows, dy, dx);
    TRY(tensor_new(c->scratch, &dout, dy.dtype, rows.dim[0], rows.dim[1]));
    TRY(tensor_new(c->scratch, &drows, dy.dtype, rows.dim[0], rows.dim[1]));
    TRY(gather_columns(c, dy, dout));
    TRY(norm_backward_into(n, c, &save->norm, rows, dout, drows));
    TRY(scatter_columns(c, drows, dx));
    arena_release(c->scratch, mark);
    return ERR_OK;
}
