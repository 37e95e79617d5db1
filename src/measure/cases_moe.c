/* The cases of mixtures of experts. See make_case.h. */
#include "measure/make_case.h"

BENCH(jitter, { "" })
{
    int64_t N = tokens_of(m), D = m->d->D;
    ONCE(y, N, D);
    ONCE(x, N, D);
    MAKE(position, 1, ZERO, I32, N);
    MAKE(sample, 1, ZERO, I64, N);
    a->eps = 0.01f;
    return ERR_OK;
}

BENCH(router_even, { "" })
{
    int64_t N = tokens_of(m);
    MAKE(logits, 1, ZERO, F32, N, m->d->experts);
    MAKE(position, 1, ZERO, I32, N);
    MAKE(sample, 1, ZERO, I64, N);
    a->seq = m->d->T;
    a->topk = m->d->topk;
    return ERR_OK;
}

/* A balance unit is a sample. Bytes of one round; there are as many as it takes. */
BENCH(sinkhorn, { "" })
{
    int64_t N = tokens_of(m);
    MAKE(rank, 2, ZERO, F32, N, m->d->experts);
    MAKE(share, 1, ZERO, F32, N);
    MAKE(logits, 1, UNIFORM, F32, N, m->d->experts);
    a->rows = m->d->T;
    return ERR_OK;
}

BENCH(router_fwd, { "sigmoid" })
{
    int64_t N = tokens_of(m), K = m->d->topk;
    MAKE(index, 1, ZERO, I32, N, K);
    MAKE(weight, 1, UNIFORM, F32, N, K);
    MAKE(logits, 1, UNIFORM, F32, N, m->d->experts);
    a->router = (Router){ .score = ROUTER_SIGMOID, .normalize = 1, .scale = 1, .groups = 1, .group_topk = 1 };
    return ERR_OK;
}

BENCH(router_bwd, { "sigmoid" })
{
    int64_t N = tokens_of(m);
    router_fwd_args f = { 0 };
    TRY(make_router_fwd(m, &f));
    TRY(op_router_fwd(&m->dev->stream, &f));
    MAKE(dlogits, 1, UNIFORM, F32, N, m->d->experts);
    MAKE(dweight, 1, UNIFORM, F32, N, m->d->topk);
    a->logits = f.logits, a->index = f.index, a->weight = f.weight;
    a->router = f.router;
    return ERR_OK;
}

/* One balance unit: the micro-batch. */
BENCH(router_count, { "" })
{
    MAKE(load, 1, ZERO, I64, 1, m->d->experts);
    MAKE(index, 1, EXPERTS, I32, tokens_of(m), m->d->topk);
    a->rows = tokens_of(m);
    return ERR_OK;
}

BENCH(router_balance, { "sigmoid, z" })
{
    int64_t N = tokens_of(m), E = m->d->experts;
    StepValues *step;
    MAKE(dlogits, 2, UNIFORM, F32, N, E);
    MAKE(logits, 1, UNIFORM, F32, N, E);
    MAKE(load, 1, ZERO, I64, 1, E);
    MAKE(losses, 2, ZERO, I64, 3);
    TRY(make_step(m, &step));
    a->router = (Router){ .score = ROUTER_SIGMOID, .normalize = 1, .scale = 1, .groups = 1, .group_topk = 1 };
    a->step = step;
    a->topk = m->d->topk;
    a->aux = a->aux_coeff = 1e-2f, a->z = 1e-3f;
    a->rows = N;
    return ERR_OK;
}

BENCH(expert_count, { "" })
{
    MAKE(load, 2, ZERO, m->acc, m->d->experts);
    MAKE(offset, 1, ZERO, I64, m->d->experts * m->d->B + 1);
    return ERR_OK;
}

BENCH(expert_bias, { "" })
{
    StepValues *step;
    MAKE(bias, 2, UNIFORM, F32, m->d->experts);
    MAKE(load, 1, ZERO, m->acc, m->d->experts);
    TRY(make_step(m, &step));
    a->step = step;
    a->rate = 1e-3f;
    return ERR_OK;
}

BENCH(permute_index, { "" })
{
    int64_t N = tokens_of(m), K = m->d->topk;
    MAKE(row, 1, ZERO, I32, N, K);
    MAKE(choice, 1, ZERO, I32, N * K);
    MAKE(offset, 1, ZERO, I64, m->d->experts * m->d->B + 1);
    MAKE(index, 1, EXPERTS, I32, N, K);
    a->experts = m->d->experts;
    a->run = m->d->T;
    return ERR_OK;
}

BENCH(dispatch_offsets, { "8 ranks" })
{
    enum { RANKS = 8 };
    const int64_t experts = RANKS * m->d->experts, X = experts * m->d->B + 1;
    MAKE(offset, 1, ZERO, I64, X);
    MAKE(all, 0, ZERO, I64, RANKS, X);
    m->bytes += X * 8; /* read: the part of this rank's experts */
    a->own = m->d->experts;
    a->most = RANKS * tokens_of(m) * m->d->topk;
    return ERR_OK;
}

/* No rows at all: as much work as with any. */
BENCH(room_limits, { "8 ranks" })
{
    enum { RANKS = 8 };
    const int64_t experts = RANKS * m->d->experts;
    MAKE(limit, 1, ZERO, I64, experts);
    MAKE(all, 1, ZERO, I64, RANKS, experts + 1);
    a->own = m->d->experts;
    a->room = tokens_of(m) * m->d->topk;
    return ERR_OK;
}

typedef struct {
    Tensor row, choice, offset;
} RowOrder;

/* The order of random choices; of its numbers, one a choice is read. */
static Err make_order(Maker *m, RowOrder *out)
{
    permute_index_args a = { 0 };
    int64_t bytes = m->bytes;
    TRY(make_permute_index(m, &a));
    TRY(op_permute_index(&m->dev->stream, &a));
    *out = (RowOrder){ a.row, a.choice, a.offset };
    m->bytes = bytes + tensor_bytes(out->row);
    return ERR_OK;
}

Err make_offset(Maker *m, Tensor *offset)
{
    RowOrder order;
    TRY(make_order(m, &order));
    *offset = order.offset;
    return ERR_OK;
}

/* The choices of one rank, as they are. */
BENCH(dispatch_choices, { "1 rank" })
{
    RowOrder order;
    MAKE(choice, 1, ZERO, I32, tokens_of(m) * m->d->topk);
    TRY(make_order(m, &order));
    a->all_choice = tensor_reshape(order.choice, 1, tensor_count(order.choice));
    a->all = tensor_reshape(order.offset, 1, tensor_count(order.offset));
    a->offset = order.offset;
    a->own = m->d->experts;
    a->numbers = tensor_count(order.choice);
    return ERR_OK;
}

BENCH(choice_groups, { "of 8" })
{
    enum { GROUPS = 8 };
    const int64_t N = tokens_of(m), K = m->d->topk;
    permute_index_args choices = { 0 };
    MAKE(group, 1, ZERO, I32, N, K);
    TRY(make_permute_index(m, &choices));
    a->index = choices.index;
    a->own = (m->d->experts + GROUPS - 1) / GROUPS;
    a->count = GROUPS;
    return ERR_OK;
}

BENCH(take_rows, { "weighted" })
{
    RowOrder order;
    int64_t N = tokens_of(m), D = m->d->D, K = m->d->topk;
    ONCE(y, N * K, D);
    ONCE(x, N, D);
    MAKE(weight, 1, POSITIVE, F32, N, K);
    TRY(make_order(m, &order));
    a->choice = order.choice;
    a->topk = K;
    return ERR_OK;
}

BENCH(sum_parts, { "2 parts" })
{
    enum { PARTS = 2 };
    int64_t P = tokens_of(m), D = m->d->D;
    ONCE(y, P, D);
    ONCE(x, PARTS * P, D);
    a->parts = PARTS;
    return ERR_OK;
}

/* Experts of half the mean capacity; a balance unit is a sample. */
BENCH(choice_drop, { "half of them" })
{
    RowOrder order;
    int64_t N = tokens_of(m), K = m->d->topk;
    MAKE(kept, 1, ZERO, I32, N, K);
    MAKE(weight, 1, POSITIVE, F32, N, K);
    TRY(make_order(m, &order));
    a->choice = order.choice, a->offset = order.offset;
    a->experts = m->d->experts;
    a->most = m->d->T * K / (2 * m->d->experts);
    return ERR_OK;
}

BENCH(permute_rows, { "" })
{
    RowOrder order;
    int64_t N = tokens_of(m), D = m->d->D;
    ONCE(y, N * m->d->topk, D);
    ONCE(x, N, D);
    TRY(make_order(m, &order));
    a->choice = order.choice;
    a->topk = m->d->topk;
    return ERR_OK;
}

BENCH(unpermute_rows, { "weighted" }, { "added", .option = 1 })
{
    RowOrder order;
    int64_t N = tokens_of(m), D = m->d->D;
    MAKE(y, m->c->option ? 2 : 1, UNIFORM, m->dtype, N, D);
    ONCE(x, N * m->d->topk, D);
    if (!m->c->option) MAKE(weight, 1, POSITIVE, F32, N, m->d->topk);
    TRY(make_order(m, &order));
    a->row = order.row;
    a->add = m->c->option;
    return ERR_OK;
}

BENCH(unpermute_bwd, { "" })
{
    RowOrder order;
    int64_t N = tokens_of(m), D = m->d->D, K = m->d->topk;
    ONCE(dx, N * K, D);
    MAKE(dweight, 1, UNIFORM, F32, N, K);
    ONCE(dy, N, D);
    ONCE(x, N * K, D);
    MAKE(weight, 1, POSITIVE, F32, N, K);
    TRY(make_order(m, &order));
    a->row = order.row;
    return ERR_OK;
}

/* shape FC1, FC2: of experts that are F / topk wide. */
void expert_dims(const Maker *m, int64_t *O, int64_t *I)
{
    const int64_t width = m->d->F / m->d->topk;
    *O = m->c->shape == FC1 ? width : m->d->D;
    *I = m->c->shape == FC1 ? m->d->D : width;
}

BENCH(grouped_fwd, { "fc1", FC1 }, { "fc2", FC2 })
{
    RowOrder order;
    int64_t P = tokens_of(m) * m->d->topk, O, I;
    expert_dims(m, &O, &I);
    TRY(make_order(m, &order));
    ONCE(y, P, O);
    ONCE(x, P, I);
    ONCE(w, m->d->experts, O, I);
    a->offset = order.offset;
    a->leaf = I;
    return ERR_OK;
}

BENCH(grouped_dx, { "fc1", FC1 }, { "fc2", FC2 })
{
    RowOrder order;
    int64_t P = tokens_of(m) * m->d->topk, O, I;
    expert_dims(m, &O, &I);
    TRY(make_order(m, &order));
    ONCE(dx, P, I);
    ONCE(dy, P, O);
    ONCE(w, m->d->experts, O, I);
    a->offset = order.offset;
    a->leaf = O;
    return ERR_OK;
}

BENCH(grouped_dw, { "fc1", FC1 }, { "fc2", FC2 })
{
    RowOrder order;
    int64_t P = tokens_of(m) * m->d->topk, O, I;
    expert_dims(m, &O, &I);
    TRY(make_order(m, &order));
    MAKE(dw, 1, UNIFORM, m->acc, m->d->experts, O, I);
    ONCE(dy, P, O);
    ONCE(x, P, I);
    SHIFT_OF_GRADIENT;
    a->offset = order.offset;
    a->fresh = 1;
    return ERR_OK;
}

BENCH(grouped_bias, { "fc1", FC1 })
{
    RowOrder order;
    int64_t P = tokens_of(m) * m->d->topk, O, I;
    expert_dims(m, &O, &I);
    TRY(make_order(m, &order));
    MAKE(y, 2, UNIFORM, m->dtype, P, O);
    ONCE(bias, m->d->experts, O);
    a->offset = order.offset;
    return ERR_OK;
}

BENCH(grouped_bias_grad, { "fc1", FC1 })
{
    RowOrder order;
    int64_t P = tokens_of(m) * m->d->topk, O, I;
    expert_dims(m, &O, &I);
    TRY(make_order(m, &order));
    MAKE(dbias, 2, UNIFORM, m->acc, m->d->experts, O);
    ONCE(dy, P, O);
    SHIFT_OF_GRADIENT;
    a->offset = order.offset;
    return ERR_OK;
}

BENCH(gated_add_fwd, { "" })
{
    int64_t N = tokens_of(m), D = m->d->D;
    ONCE(y, N, D);
    ONCE(residual, N, D);
    ONCE(x, N, D);
    MAKE(gate, 1, UNIFORM, F32, N, 1);
    return ERR_OK;
}

BENCH(gated_add_bwd, { "" })
{
    int64_t N = tokens_of(m), D = m->d->D;
    ONCE(dx, N, D);
    MAKE(dgate, 1, UNIFORM, F32, N, 1);
    ONCE(dy, N, D);
    ONCE(x, N, D);
    MAKE(gate, 1, UNIFORM, F32, N, 1);
    return ERR_OK;
}
