/* Arguments of the ops of mixtures of experts, for the list in cases.c. See make_case.h. */
#include "make_case.h"

Err make_jitter(Maker *m, AnyArgs *any)
{
    jitter_args *a = &any->jitter;
    int64_t N = tokens_of(m), D = m->d->D;
    ONCE(y, N, D);
    ONCE(x, N, D);
    MAKE(position, 1, ZERO, I32, N);
    MAKE(sample, 1, ZERO, I64, N);
    a->eps = 0.01f;
    return ERR_OK;
}

Err make_router_even(Maker *m, AnyArgs *any)
{
    router_even_args *a = &any->router_even;
    int64_t N = tokens_of(m);
    MAKE(logits, 1, ZERO, F32, N, m->d->experts);
    MAKE(position, 1, ZERO, I32, N);
    MAKE(sample, 1, ZERO, I64, N);
    a->seq = m->d->T;
    a->topk = m->d->topk;
    return ERR_OK;
}

/* A balance unit is a sample. Bytes of one round; there are as many as it takes. */
Err make_sinkhorn(Maker *m, AnyArgs *any)
{
    sinkhorn_args *a = &any->sinkhorn;
    int64_t N = tokens_of(m);
    MAKE(rank, 2, ZERO, F32, N, m->d->experts);
    MAKE(share, 1, ZERO, F32, N);
    MAKE(logits, 1, UNIFORM, F32, N, m->d->experts);
    a->rows = m->d->T;
    return ERR_OK;
}

Err make_router_fwd(Maker *m, AnyArgs *any)
{
    router_fwd_args *a = &any->router_fwd;
    int64_t N = tokens_of(m), K = m->d->topk;
    MAKE(index, 1, ZERO, I32, N, K);
    MAKE(weight, 1, UNIFORM, F32, N, K);
    MAKE(logits, 1, UNIFORM, F32, N, m->d->experts);
    a->router = (Router){ .score = ROUTER_SIGMOID, .normalize = 1, .scale = 1, .groups = 1, .group_topk = 1 };
    return ERR_OK;
}

Err make_router_bwd(Maker *m, AnyArgs *any)
{
    router_bwd_args *a = &any->router_bwd;
    int64_t N = tokens_of(m);
    AnyArgs forward = { 0 };
    TRY(make_router_fwd(m, &forward));
    const router_fwd_args *f = &forward.router_fwd;
    TRY(op_router_fwd(&m->dev->stream, f));
    MAKE(dlogits, 1, UNIFORM, F32, N, m->d->experts);
    MAKE(dweight, 1, UNIFORM, F32, N, m->d->topk);
    a->logits = f->logits, a->index = f->index, a->weight = f->weight;
    a->router = f->router;
    return ERR_OK;
}

/* One balance unit: the micro-batch. */
Err make_router_count(Maker *m, AnyArgs *any)
{
    router_count_args *a = &any->router_count;
    MAKE(load, 1, ZERO, I64, 1, m->d->experts);
    MAKE(index, 1, EXPERTS, I32, tokens_of(m), m->d->topk);
    a->rows = tokens_of(m);
    return ERR_OK;
}

Err make_router_balance(Maker *m, AnyArgs *any)
{
    router_balance_args *a = &any->router_balance;
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

Err make_expert_count(Maker *m, AnyArgs *any)
{
    expert_count_args *a = &any->expert_count;
    MAKE(load, 2, ZERO, F32, m->d->experts);
    MAKE(offset, 1, ZERO, I64, m->d->experts * m->d->B + 1);
    return ERR_OK;
}

Err make_expert_bias(Maker *m, AnyArgs *any)
{
    expert_bias_args *a = &any->expert_bias;
    StepValues *step;
    MAKE(bias, 2, UNIFORM, F32, m->d->experts);
    MAKE(load, 1, ZERO, F32, m->d->experts);
    TRY(make_step(m, &step));
    a->step = step;
    a->rate = 1e-3f;
    return ERR_OK;
}

Err make_permute_index(Maker *m, AnyArgs *any)
{
    permute_index_args *a = &any->permute_index;
    int64_t N = tokens_of(m), K = m->d->topk;
    MAKE(row, 1, ZERO, I32, N, K);
    MAKE(choice, 1, ZERO, I32, N * K);
    MAKE(offset, 1, ZERO, I64, m->d->experts * m->d->B + 1);
    MAKE(index, 1, EXPERTS, I32, N, K);
    a->experts = m->d->experts;
    a->run = m->d->T;
    return ERR_OK;
}

Err make_dispatch_offsets(Maker *m, AnyArgs *any)
{
    enum { RANKS = 8 };
    dispatch_offsets_args *a = &any->dispatch_offsets;
    const int64_t experts = RANKS * m->d->experts, X = experts * m->d->B + 1;
    MAKE(offset, 1, ZERO, I64, X);
    MAKE(all, 0, ZERO, I64, RANKS, X);
    m->bytes += X * 8; /* read: the part of this rank's experts */
    a->own = m->d->experts;
    a->most = RANKS * tokens_of(m) * m->d->topk;
    return ERR_OK;
}

/* No rows at all: as much work as with any. */
Err make_room_limits(Maker *m, AnyArgs *any)
{
    enum { RANKS = 8 };
    room_limits_args *a = &any->room_limits;
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
    AnyArgs any = { 0 };
    int64_t bytes = m->bytes;
    TRY(make_permute_index(m, &any));
    TRY(op_permute_index(&m->dev->stream, &any.permute_index));
    *out = (RowOrder){ any.permute_index.row, any.permute_index.choice, any.permute_index.offset };
    m->bytes = bytes + tensor_bytes(out->row);
    return ERR_OK;
}

/* Of one rank: the choices as they are. */
Err make_dispatch_choices(Maker *m, AnyArgs *any)
{
    dispatch_choices_args *a = &any->dispatch_choices;
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

Err make_take_rows(Maker *m, AnyArgs *any)
{
    take_rows_args *a = &any->take_rows;
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

Err make_sum_parts(Maker *m, AnyArgs *any)
{
    enum { PARTS = 2 };
    sum_parts_args *a = &any->sum_parts;
    int64_t P = tokens_of(m), D = m->d->D;
    ONCE(y, P, D);
    ONCE(x, PARTS * P, D);
    a->parts = PARTS;
    return ERR_OK;
}

/* Experts of half the mean capacity; a balance unit is a sample. */
Err make_choice_drop(Maker *m, AnyArgs *any)
{
    choice_drop_args *a = &any->choice_drop;
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

Err make_permute_rows(Maker *m, AnyArgs *any)
{
    permute_rows_args *a = &any->permute_rows;
    RowOrder order;
    int64_t N = tokens_of(m), D = m->d->D;
    ONCE(y, N * m->d->topk, D);
    ONCE(x, N, D);
    TRY(make_order(m, &order));
    a->choice = order.choice;
    a->topk = m->d->topk;
    return ERR_OK;
}

Err make_unpermute_rows(Maker *m, AnyArgs *any)
{
    unpermute_rows_args *a = &any->unpermute_rows;
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

Err make_unpermute_bwd(Maker *m, AnyArgs *any)
{
    unpermute_bwd_args *a = &any->unpermute_bwd;
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
static void expert_dims(const Maker *m, int64_t *O, int64_t *I)
{
    const int64_t width = m->d->F / m->d->topk;
    *O = m->c->shape == FC1 ? width : m->d->D;
    *I = m->c->shape == FC1 ? m->d->D : width;
}

Err make_grouped_fwd(Maker *m, AnyArgs *any)
{
    grouped_fwd_args *a = &any->grouped_fwd;
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

Err make_grouped_dx(Maker *m, AnyArgs *any)
{
    grouped_dx_args *a = &any->grouped_dx;
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

Err make_grouped_dw(Maker *m, AnyArgs *any)
{
    grouped_dw_args *a = &any->grouped_dw;
    RowOrder order;
    int64_t P = tokens_of(m) * m->d->topk, O, I;
    expert_dims(m, &O, &I);
    TRY(make_order(m, &order));
    MAKE(dw, 1, UNIFORM, F32, m->d->experts, O, I);
    ONCE(dy, P, O);
    ONCE(x, P, I);
    SHIFT_OF_GRADIENT;
    a->offset = order.offset;
    a->fresh = 1;
    return ERR_OK;
}

Err make_grouped_bias(Maker *m, AnyArgs *any)
{
    grouped_bias_args *a = &any->grouped_bias;
    RowOrder order;
    int64_t P = tokens_of(m) * m->d->topk, O, I;
    expert_dims(m, &O, &I);
    TRY(make_order(m, &order));
    MAKE(y, 2, UNIFORM, m->dtype, P, O);
    ONCE(bias, m->d->experts, O);
    a->offset = order.offset;
    return ERR_OK;
}

Err make_grouped_bias_grad(Maker *m, AnyArgs *any)
{
    grouped_bias_grad_args *a = &any->grouped_bias_grad;
    RowOrder order;
    int64_t P = tokens_of(m) * m->d->topk, O, I;
    expert_dims(m, &O, &I);
    TRY(make_order(m, &order));
    MAKE(dbias, 2, UNIFORM, F32, m->d->experts, O);
    ONCE(dy, P, O);
    SHIFT_OF_GRADIENT;
    a->offset = order.offset;
    return ERR_OK;
}

Err make_gated_add_fwd(Maker *m, AnyArgs *any)
{
    gated_add_fwd_args *a = &any->gated_add_fwd;
    int64_t N = tokens_of(m), D = m->d->D;
    ONCE(y, N, D);
    ONCE(residual, N, D);
    ONCE(x, N, D);
    MAKE(gate, 1, UNIFORM, F32, N, 1);
    return ERR_OK;
}

Err make_gated_add_bwd(Maker *m, AnyArgs *any)
{
    gated_add_bwd_args *a = &any->gated_add_bwd;
    int64_t N = tokens_of(m), D = m->d->D;
    ONCE(dx, N, D);
    MAKE(dgate, 1, UNIFORM, F32, N, 1);
    ONCE(dy, N, D);
    ONCE(x, N, D);
    MAKE(gate, 1, UNIFORM, F32, N, 1);
    return ERR_OK;
}
