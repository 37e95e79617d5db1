/*
 * Feed-forward: fc1 (COLUMN), activation, fc2 (ROW; its bias is added by the residual add).
 * A gated activation (SwiGLU): fc1 has 2F outputs, gate and up chunk by chunk, so that each rank holds whole pairs.
 */
#include <stdio.h>

#include "layer/internal.h"

Err mlp_register(Mlp *m, ParamRegistry *reg, MlpSpec spec)
{
    char name[PARAM_NAME_MAX];
    const bool gated = activation_gated(spec.activation);
    *m = (Mlp){ .act = { spec.activation, spec.activation_limit, spec.ffn / spec.tp_blocks },
                .ffn = spec.ffn,
                .recompute = spec.recompute };
    LinearSpec fc1 = { .name = name,
                       .in = spec.hidden,
                       .out = gated ? 2 * spec.ffn : spec.ffn,
                       .kind = LINEAR_COLUMN,
                       .bias = spec.bias,
                       .std = spec.std };
    if (gated) {
        fc1.section[0] = fc1.section[1] = spec.ffn;
        fc1.interleave = spec.tp_blocks;
    }
    snprintf(name, sizeof name, "%s.fc1", spec.name);
    TRY(linear_register(&m->fc1, reg, fc1));
    snprintf(name, sizeof name, "%s.fc2", spec.name);
    return linear_register(&m->fc2, reg,
                           (LinearSpec){ .name = name,
                                         .in = spec.ffn,
                                         .out = spec.hidden,
                                         .kind = LINEAR_ROW,
                                         .bias = spec.bias,
                                         .std = spec.proj_std });
}

Err activation_forward(Ctx *c, const Act *act, Tensor hidden, Tensor active)
{
    switch (act->kind) {
    case ACT_GELU: return op(c->s, gelu_fwd, .y = active, .x = hidden);
    case ACT_SWIGLU: return op(c->s, swiglu_fwd, .y = active, .x = hidden, .chunk = act->chunk);
    case ACT_CLAMPED_SWIGLU: break;
    }
    return op(c->s, clamped_swiglu_fwd, .y = active, .x = hidden, .chunk = act->chunk, .limit = act->limit);
}

Err activation_backward(Ctx *c, const Act *act, Tensor hidden, Tensor dactive, Tensor dhidden)
{
    switch (act->kind) {
    case ACT_GELU: return op(c->s, gelu_bwd, .dx = dhidden, .dy = dactive, .x = hidden);
    case ACT_SWIGLU:
        return op(c->s, swiglu_bwd, .dx = dhidden, .dy = dactive, .x = hidden, .chunk = act->chunk);
    case ACT_CLAMPED_SWIGLU: break;
    }
    return op(c->s, clamped_swiglu_bwd, .dx = dhidden, .dy = dactive, .x = hidden, .chunk = act->chunk,
              .limit = act->limit);
}

/* GELU is part of the product before it, and its gradient of the product after it. */
static Err fc1_forward(const Mlp *m, Ctx *c, Tensor x, Tensor hidden, Tensor active)
{
    if (m->act.kind == ACT_GELU) return linear_forward_gelu(&m->fc1, c, x, hidden, active);
    TRY(linear_forward(&m->fc1, c, x, hidden));
    return activation_forward(c, &m->act, hidden, active);
}

static Err fc2_backward(const Mlp *m, Ctx *c, Tensor hidden, Tensor active, Tensor dy, Tensor dhidden)
{
    Tensor dactive;
    if (m->act.kind == ACT_GELU) return linear_backward_gelu(&m->fc2, c, active, dy, hidden, dhidden);
    TRY(tensor_new(c->scratch, &dactive, c->dtype, active.dim[0], active.dim[1]));
    TRY(linear_backward(&m->fc2, c, active, dy, dactive));
    return activation_backward(c, &m->act, hidden, dactive, dhidden);
}

static int64_t local_ffn(const Mlp *m, const Ctx *c) { return m->ffn / c->world->tp.size; }

Err mlp_forward(const Mlp *m, Ctx *c, Tensor x, Tensor y, MlpSave *save)
{
    ArenaMark mark = arena_mark(c->scratch);
    int64_t N = c->batch->B * c->batch->T, F = local_ffn(m, c), H = activation_gated(m->act.kind) ? 2 * F : F;
    Tensor hidden, active;
    TRY(save_new(c, REGION_I, &hidden, &save->hidden, c->dtype, N, H));
    if (!m->recompute) TRY(save_new(c, REGION_W, &active, &save->active, c->dtype, N, F));
    bool in_scratch = c->into[REGION_I] == c->scratch;
    if (!in_scratch) mark = arena_mark(c->scratch);
    if (m->recompute) TRY(tensor_new(c->scratch, &active, c->dtype, N, F));
    TRY(fc1_forward(m, c, x, hidden, active));
    TRY(linear_forward(&m->fc2, c, active, y));
    if (!in_scratch) arena_release(c->scratch, mark);
    return ERR_OK;
}

Err mlp_backward(const Mlp *m, Ctx *c, const MlpSave *save, Tensor x, Tensor dy, Tensor dx)
{
    ArenaMark mark = arena_mark(c->scratch);
    int64_t N = c->batch->B * c->batch->T, F = local_ffn(m, c);
    Tensor hidden = save_get(c, save->hidden), active, dhidden;
    TRY(dy_alloc(c, &dhidden, N, hidden.dim[1]));
    if (m->recompute) {
        TRY(dy_alloc(c, &active, N, F));
        TRY(activation_forward(c, &m->act, hidden, active));
    } else {
        active = save_get(c, save->active);
    }
    TRY(fc2_backward(m, c, hidden, active, dy, dhidden));
    TRY(linear_backward(&m->fc1, c, x, dhidden, dx));
    arena_release(c->scratch, mark);
    return ERR_OK;
}
