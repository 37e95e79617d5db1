/* Products for the gradients of weights: at once, or queued for a later W of the schedule; see layer.h. */
#include "layer/internal.h"

/* dy and x: of w, with all rows. */
static Err grad_add_product(Ctx *c, const Wgrad *w, Tensor dy, Tensor x)
{
    bool fresh;
    const Tensor dw = grad_target(c, w->weight, &fresh);
    const linear_dw_args a = { .dw = dw,
                               .dy = dy,
                               .x = x,
                               .shift = param_store_shift(c->params, w->weight),
                               .overflow = c->params->stats->overflow,
                               .leaf = c->canon.leaf_tokens,
                               .headroom_bits = c->canon.headroom_bits,
                               .fresh = fresh };
    TRY(w->fp8 ? fp8_dw(c, w, a) : op_linear_dw(c->s, &a));
    return grad_added(c, w->weight);
}

/* w is a product for the weights of all experts, which are [E * outputs, inputs] in memory. */
static Err grad_add_grouped(Ctx *c, const Wgrad *w)
{
    bool fresh;
    const Tensor dw = grad_target(c, w->weight, &fresh);
    const int64_t outputs = w->dy.dim[1], inputs = w->x.dim[1];
    const grouped_dw_args a = { .dw = tensor_reshape(dw, dw.dim[0] / outputs, outputs, inputs),
                                .dy = w->dy,
                                .x = w->x,
                                .offset = w->offset,
                                .shift = param_store_shift(c->params, w->weight),
                                .overflow = c->params->stats->overflow,
                                .headroom_bits = c->canon.headroom_bits,
                                .fresh = fresh };
    TRY(w->fp8 ? fp8_experts_dw(c, w->fp8, a) : op_grouped_dw(c->s, &a));
    return grad_added(c, w->weight);
}

static Err wgrad_run(Ctx *c, const Wgrad *w)
{
    if (w->offset.data) return grad_add_grouped(c, w);
    ArenaMark mark = arena_mark(c->scratch);
    Tensor dy = w->dy, x = w->x;
    if (w->gather_x) TRY(gather_rows(c, x, &x));
    if (w->gather_dy) TRY(gather_rows(c, dy, &dy));
    TRY(grad_add_product(c, w, dy, x));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

Err wgrad_drain(Ctx *c)
{
    for (int i = 0; i < c->slot->queued; i++) TRY(wgrad_run(c, &c->slot->queue[i]));
    c->slot->queued = 0;
    return ERR_OK;
}

/* Now, or in the slot's queue for a later W. */
Err wgrad_push(Ctx *c, Wgrad w)
{
    Slot *s = c->slot;
    if (!c->mode.split_backward) return wgrad_run(c, &w);
    ASSERT(s->queued < s->queue_capacity);
    s->queue[s->queued++] = w;
    return ERR_OK;
}
