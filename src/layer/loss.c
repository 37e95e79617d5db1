/*
 * Output head and cross entropy, cut over tp by vocabulary. Logits are never gathered and probabilities never
 * stored: per row and canonical block two numbers (max, sum of exponentials) travel in one all-gather, plus
 * the target's logit; backward turns the logits into their gradient in place. Where a rank has the whole vocabulary and
 * a step wants the gradient, forward does so at once (xent_row).
 */
#include "layer/internal.h"

int64_t head_padded_vocab(int64_t vocab, int tp_blocks)
{
    enum { LANES = 16 };
    int64_t parts = 1;
    while (((vocab + tp_blocks - 1) / tp_blocks + parts - 1) / parts > LEAF_MOST) parts *= 2;
    const int64_t unit = tp_blocks * (parts > LANES ? parts : LANES);
    return (vocab + unit - 1) / unit * unit;
}

Err head_register(Head *h, ParamRegistry *reg, const ModelSpec *spec, int tied_weight)
{
    *h = (Head){ .spec = spec, .weight = tied_weight, .bias = -1 };
    ParamSpec w = embedding_table(spec, false, 0); /* its own, but like it */
    w.name = "head.weight";
    if (tied_weight < 0) TRY(param_add(reg, w, &h->weight));
    if (!spec->logits.bias) return ERR_OK;
    w.name = "head.bias";
    w.ndim = 1;
    w.shape[1] = 1;
    w.init = INIT_ZERO;
    w.flags = 0;
    return param_add(reg, w, &h->bias);
}

/* In place: logits by what x times the weight is, and gradients likewise. */
static Err scale_logits(const Head *h, Ctx *c, Tensor logits)
{
    const float factor = model_logits_scale(h->spec);
    return factor < 1 || factor > 1 ? op(c->s, scale, .y = logits, .x = logits, .factor = factor) : ERR_OK;
}

Err head_logits(const Head *h, Ctx *c, Tensor x, Tensor logits)
{
    const float cap = h->spec->logits.softcap;
    TRY(op(c->s, linear_fwd, .y = logits, .x = x, .w = param_value(c, h->weight), .bias = param_value(c, h->bias),
           .leaf = whole_leaf(x.dim[1])));
    TRY(scale_logits(h, c, logits));
    return cap > 0 ? op(c->s, softcap, .y = logits, .x = logits, .cap = cap) : ERR_OK;
}

static int64_t first_column(const Head *h, const Ctx *c)
{
    return h->spec->padded_vocab / c->world->tp.size * c->world->tp.rank;
}

/* Canonical blocks of this rank's columns. */
static int64_t own_blocks(const Ctx *c)
{
    const int64_t J = c->canon.tp_blocks / c->world->tp.size;
    return J > 1 ? J : 1;
}

/*
 * Statistics of this rank's columns side by side in one row of memory, so that one gather moves them:
 * [block max | block sum | target logit], each [N, J], [N, J], [N].
 */
static Err gathered_stats(const Head *h, Ctx *c, Tensor logits, Tensor target, Tensor *all)
{
    int64_t N = logits.dim[0], J = own_blocks(c), width = N * (2 * J + 1);
    Comm *tp = &c->world->tp;
    Tensor own;
    TRY(tensor_new(c->scratch, all, F32, tp->size, width));
    own = tensor_row_slice(*all, tp->rank, 1);
    float *at = own.data;
    TRY(op(c->s, xent_stats, .block_max = tensor_of(at, F32, N, J), .block_sum = tensor_of(at + N * J, F32, N, J),
           .target_logit = tensor_of(at + 2 * N * J, F32, N), .logits = logits, .target = target,
           .block = logits.dim[1] / J, .first = first_column(h, c), .vocab = h->spec->vocab));
    return comm_all_gather(tp, c->s, *all, own, NULL);
}

/* A [R, N, J] (or [R, N]) view of the gathered statistics: ranks lie `width` elements apart. */
static Err ranks_apart(Ctx *c, Tensor all, int64_t skip, int64_t N, int64_t J, Tensor *out)
{
    int64_t R = all.dim[0];
    TRY(tensor_new(c->scratch, out, F32, R, N * J));
    for (int64_t r = 0; r < R; r++)
        TRY(device_copy(c->s, (float *)out->data + r * N * J, (float *)all.data + r * all.dim[1] + skip, N * J * 4));
    return ERR_OK;
}

static Err keep_scores(Ctx *c, Tensor scores, Tensor loss, Tensor target_logit)
{
    if (!scores.data) return ERR_OK;
    const int64_t R = target_logit.dim[0];
    TRY(device_copy(c->s, scores.data, loss.data, tensor_bytes(loss)));
    return device_copy(c->s, tensor_row_slice(scores, 1, R).data, target_logit.data, tensor_bytes(target_logit));
}

/* loss [N], in scratch, of all ranks' columns; what backward needs is saved. */
static Err shared_loss(const Head *h, Ctx *c, Tensor logits, Tensor loss, Tensor scores, HeadSave *save)
{
    int64_t N = logits.dim[0], R = c->world->tp.size, J = own_blocks(c);
    Tensor row_max, row_sum, all, bmax, bsum, target;
    TRY(save_new(c, REGION_I, &row_max, &save->row_max, F32, N));
    TRY(save_new(c, REGION_I, &row_sum, &save->row_sum, F32, N));
    TRY(gathered_stats(h, c, logits, save->target, &all));
    TRY(ranks_apart(c, all, 0, N, J, &bmax));
    TRY(ranks_apart(c, all, N * J, N, J, &bsum));
    TRY(ranks_apart(c, all, 2 * N * J, N, 1, &target));
    TRY(op(c->s, xent_loss, .loss = loss, .row_max = row_max, .row_sum = row_sum,
           .block_max = tensor_reshape(bmax, R, N, J), .block_sum = tensor_reshape(bsum, R, N, J),
           .target_logit = target, .target = save->target));
    return keep_scores(c, scores, loss, target);
}

/* logits [N, own part of the vocabulary] of x, this rank's rows. */
static Err sharded_logits(const Head *h, Ctx *c, Tensor x, Tensor logits)
{
    RowBands in;
    RowRun r;
    TRY(rows_in_begin(c, x, &in));
    for (int turn = 0; turn < in.count; turn++) {
        TRY(rows_in_band(c, &in, turn, &r));
        TRY(head_logits(h, c, tensor_row_slice(in.rows, r.first, r.count), tensor_row_slice(logits, r.first, r.count)));
    }
    return ERR_OK;
}

Err head_forward(const Head *h, Ctx *c, Tensor x, const HeadLoss *to, HeadSave *save)
{
    int64_t N = c->batch->B * c->batch->T, R = c->world->tp.size;
    Tensor logits, loss;
    TRY(save_new(c, REGION_W, &logits, &save->logits, c->dtype, N, h->spec->padded_vocab / R));
    save->target = to->target;
    save->weight = to->weight;
    save->at_once = R == 1 && c->mode.training;
    ArenaMark mark = arena_mark(c->scratch);
    TRY(sharded_logits(h, c, x, logits));
    TRY(tensor_new(c->scratch, &loss, F32, N));
    if (save->at_once)
        TRY(op(c->s, xent_row, .loss = loss, .logits = logits, .target = to->target, .step = c->step,
               .weight = to->weight, .softcap = h->spec->logits.softcap, .block = logits.dim[1] / own_blocks(c),
               .vocab = h->spec->vocab));
    else TRY(shared_loss(h, c, logits, loss, to->scores, save));
    TRY(op(c->s, loss_sum, .sums = to->sums, .loss = loss, .target = to->target));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

Err head_backward(const Head *h, Ctx *c, const HeadSave *save, Tensor x, Tensor dx)
{
    const Linear product = { h->weight, h->bias, x.dim[1], h->spec->padded_vocab, LINEAR_COLUMN };
    Tensor dlogits = save_get(c, save->logits);
    if (!save->at_once)
        TRY(op(c->s, xent_bwd, .logits = dlogits, .target = save->target, .row_max = save_get(c, save->row_max),
               .row_sum = save_get(c, save->row_sum), .step = c->step, .weight = save->weight,
               .softcap = h->spec->logits.softcap, .first = first_column(h, c), .vocab = h->spec->vocab));
    TRY(scale_logits(h, c, dlogits));
    return linear_backward(&product, c, x, dlogits, dx);
}
