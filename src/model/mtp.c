/*
 * Multi-token prediction: modules behind the last block, of which that of depth k = 1, 2, ... predicts, for each
 * position t, the token k behind the one that the head predicts:
 *
 *   h(0) = final_norm(what the last block gave)       the head predicts token t + 1 from row t
 *
 *   e = embedding of token t + k, from the model's table
 *   x = proj([embedding_norm(e) | hidden_norm(h(k-1))])
 *   h(k) = final_norm(block(x))                       the model's head predicts token t + k + 1 from row t
 *
 * The block is like the model's last one, and sees rows at their own positions. The last k rows of a sample have no
 * token t + k: no target, and a row of zeros as e. Rows see earlier ones alone, so that nothing that counts sees them;
 * but rows that do not count for another reason are seen, and have their token. Losses are added to the model's, each
 * times weight / modules, per token that counts for the head itself (the report's average over depths and positions).
 *
 * Over tp the projection is cut by columns, which are gathered: the sum over its 2 D inputs is whole on each rank.
 *
 * Sources: the DeepSeek-V3 report, 2024, section 2.2; the order of the two halves and the norms are Megatron-LM's and
 * those of the published weights.
 */
#include <stdio.h>

#include "model/model.h"

Err mtp_register(Mtp *m, ParamRegistry *reg, const ModelSpec *s, int table, SetupArena *setup)
{
    char name[PARAM_NAME_MAX / 2];
    const LinearSpec proj = { name, "proj", 2 * s->hidden, s->hidden, LINEAR_COLUMN, .std = model_hidden_std(s) };
    snprintf(name, sizeof name, "mtp.%d", m->depth - 1);
    embedding_share(&m->embedding, reg, s, name, table);
    TRY(model_norm_register(&m->embedding_norm, reg, s, name, "embedding_norm"));
    TRY(model_norm_register(&m->hidden_norm, reg, s, name, "hidden_norm"));
    TRY(linear_register(&m->proj, reg, proj));
    TRY(block_register(&m->block, reg, s, name, s->layers + m->depth - 1, setup));
    return model_norm_register(&m->final_norm, reg, s, name, "final_norm");
}

/* [N] of the tokens that the module looks up. */
static Tensor token_of(const Mtp *m, const Ctx *c)
{
    const Tensor all = c->batch->further_token;
    return tensor_reshape(tensor_row_slice(all, m->depth - 1, 1), all.dim[1]);
}

/* ---- the projection ---- */

/* y [R, D] of x [R, 2 D]: all ranks' columns side by side, and of these this rank's rows. */
static Err project(const Mtp *m, Ctx *c, Tensor x, Tensor y)
{
    Comm *tp = &c->world->tp;
    const int64_t N = c->batch->B * c->batch->T, R = y.dim[0], D = y.dim[1], columns = D / tp->size;
    Tensor own, all, whole = y;
    if (tp->size == 1) return linear_forward(&m->proj, c, x, y);
    ArenaMark mark = arena_mark(c->scratch);
    TRY(tensor_new(c->scratch, &own, c->dtype, N, columns));
    TRY(tensor_new(c->scratch, &all, c->dtype, tp->size, N, columns));
    TRY(linear_forward(&m->proj, c, x, own));
    TRY(comm_all_gather(tp, c->s, all, own, NULL));
    if (R < N) TRY(tensor_new(c->scratch, &whole, c->dtype, N, D));
    TRY(op(c->s, join_columns, .y = tensor_reshape(whole, N, tp->size, columns), .x = all));
    if (R < N) TRY(device_copy(c->s, y.data, ctx_row_slice(c, whole).data, tensor_bytes(y)));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* The rank's columns of dy go to memory that lives as long as the weight's gradient needs them. */
static Err project_backward(const Mtp *m, Ctx *c, Tensor x, Tensor dy, Tensor dx)
{
    const Comm *tp = &c->world->tp;
    const int64_t columns = dy.dim[1] / tp->size;
    Tensor full, own;
    ArenaMark mark = arena_mark(c->scratch);
    TRY(gather_rows(c, dy, &full));
    TRY(dy_alloc(c, &own, full.dim[0], columns));
    TRY(copy_rows(c, own, tensor_col_slice(full, tp->rank * columns, columns)));
    TRY(linear_backward(&m->proj, c, x, own, dx));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- the module ---- */

/* The block's input. */
static Err forward_input(const Mtp *m, Ctx *c, Tensor h, MtpSave *save, Tensor *x)
{
    const int64_t R = h.dim[0], D = h.dim[1];
    Tensor e, joined, narrow;
    TRY(save_new(c, REGION_I, &e, &save->embedding, ctx_residual(c), R, D));
    TRY(save_new(c, REGION_W, &joined, &save->joined, c->dtype, R, 2 * D));
    TRY(stream_new(c, m->block.spec, m->block.norms, x, &save->x));
    TRY(embedding_forward(&m->embedding, c, token_of(m, c), e));
    TRY(norm_forward(&m->embedding_norm, c, e, tensor_col_slice(joined, 0, D), &save->embedding_norm));
    TRY(norm_forward(&m->hidden_norm, c, h, tensor_col_slice(joined, D, D), &save->hidden_norm));
    if (x->dtype == c->dtype) return project(m, c, joined, *x);
    TRY(tensor_new(c->scratch, &narrow, c->dtype, R, D));
    TRY(project(m, c, joined, narrow));
    return cast_values(c, *x, narrow);
}

Err mtp_forward(const Mtp *m, Ctx *c, Tensor h, MtpSave *save)
{
    const int64_t R = h.dim[0], D = h.dim[1];
    ArenaMark mark = arena_mark(c->scratch);
    ResidualStream stream;
    Tensor x, y, out;
    segment_begin(c, m->segment);
    TRY(forward_input(m, c, h, save, &x));
    segment_end(c);
    segment_begin(c, m->segment + 1);
    TRY(residual_stream(c, m->block.spec, x, &stream));
    TRY(block_run(&m->block, c, &stream, &save->block));
    segment_begin(c, m->segment + 2);
    TRY(save_new(c, REGION_I, &y, &save->y, ctx_residual(c), R, D));
    TRY(block_output(&m->block, c, &stream, y));
    TRY(save_new(c, REGION_W, &out, &save->out, c->dtype, R, D));
    TRY(norm_forward_sum(&m->final_norm, c, &stream.sum, out, &save->final_norm));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* d: the gradient of the block's input, used up. */
static Err backward_input(const Mtp *m, Ctx *c, const MtpSave *save, Tensor h, Tensor d, Tensor dh)
{
    const int64_t D = d.dim[1];
    Tensor djoined, narrow = d;
    TRY(tensor_new(c->scratch, &djoined, c->dtype, d.dim[0], 2 * D));
    if (d.dtype != c->dtype) {
        TRY(tensor_new(c->scratch, &narrow, c->dtype, d.dim[0], D));
        TRY(cast_values(c, narrow, d));
    }
    TRY(project_backward(m, c, save_get(c, save->joined), narrow, djoined));
    TRY(norm_backward(&m->hidden_norm, c, &save->hidden_norm, h, tensor_col_slice(djoined, D, D), dh));
    TRY(norm_backward_into(&m->embedding_norm, c, &save->embedding_norm, save_get(c, save->embedding),
                           tensor_col_slice(djoined, 0, D), d));
    return embedding_backward(&m->embedding, c, token_of(m, c), d);
}

Err mtp_backward(const Mtp *m, Ctx *c, MtpSave *save, Tensor h, Tensor dout, Tensor dh)
{
    ArenaMark mark = arena_mark(c->scratch);
    Tensor d;
    TRY(tensor_new(c->scratch, &d, ctx_residual(c), dout.dim[0], dout.dim[1]));
    TRY(norm_backward_into(&m->final_norm, c, &save->final_norm, save_get(c, save->y), dout, d));
    TRY(block_run_backward(&m->block, c, &save->block, save_get(c, save->x), d, (InputSum){ .bias = -1 }));
    TRY(backward_input(m, c, save, h, d, dh));
    arena_release(c->scratch, mark);
    return ERR_OK;
}
