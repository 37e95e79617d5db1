/*
 * Feed-forward: fc1 (COLUMN), activation, fc2 (ROW; its bias is added by the residual add).
 * A gated activation (SwiGLU, GeGLU): fc1 has 2F outputs, gate and up chunk by chunk, so that each rank holds pairs.
 */
#include "layer/mlp.h"

Err mlp_register(Mlp *m, ParamRegistry *reg, const ModelSpec *s, const char *name, int layer, int64_t ffn)
{
    LinearSpec fc1 = { name,
                       "fc1",
                       s->hidden,
                       ffn,
                       LINEAR_COLUMN,
                       .bias = s->bias,
                       .std = model_hidden_std(s),
                       .fp8 = model_fp8(s, layer) };
    *m = (Mlp){ .spec = s, .ffn = ffn };
    if (activation_gated(s->activation)) {
        fc1.out = 2 * ffn;
        fc1.section[0] = fc1.section[1] = ffn;
        fc1.interleave = s->tp_blocks;
    }
    TRY(linear_register(&m->fc1, reg, fc1));
    return linear_register(&m->fc2, reg,
                           (LinearSpec){ name, "fc2", ffn, s->hidden, LINEAR_ROW, .bias = s->bias,
                                         .std = model_projection_std(s), .fp8 = model_fp8(s, layer) });
}

Err activation_forward(Ctx *c, const ModelSpec *s, int64_t ffn, Tensor hidden, Tensor active)
{
    const int64_t chunk = ffn / s->tp_blocks;
    switch (s->activation) {
    case ACT_GELU: return op(c->s, gelu_fwd, .y = active, .x = hidden);
    case ACT_GELU_ERF: return op(c->s, gelu_erf_fwd, .y = active, .x = hidden);
    case ACT_RELU2: return op(c->s, relu2_fwd, .y = active, .x = hidden);
    case ACT_SWIGLU: return op(c->s, swiglu_fwd, .y = active, .x = hidden, .chunk = chunk);
    case ACT_GEGLU: return op(c->s, geglu_fwd, .y = active, .x = hidden, .chunk = chunk);
    case ACT_CLAMPED_SWIGLU: break;
    }
    return op(c->s, clamped_swiglu_fwd, .y = active, .x = hidden, .chunk = chunk, .limit = s->activation_limit);
}

Err activation_backward(Ctx *c, const ModelSpec *s, int64_t ffn, ActivationGrad g)
{
    const int64_t chunk = ffn / s->tp_blocks;
    switch (s->activation) {
    case ACT_GELU: return op(c->s, gelu_bwd, .dx = g.dhidden, .dy = g.dactive, .x = g.hidden);
    case ACT_GELU_ERF: return op(c->s, gelu_erf_bwd, .dx = g.dhidden, .dy = g.dactive, .x = g.hidden);
    case ACT_RELU2: return op(c->s, relu2_bwd, .dx = g.dhidden, .dy = g.dactive, .x = g.hidden);
    case ACT_SWIGLU: return op(c->s, swiglu_bwd, .dx = g.dhidden, .dy = g.dactive, .x = g.hidden, .chunk = chunk);
    case ACT_GEGLU: return op(c->s, geglu_bwd, .dx = g.dhidden, .dy = g.dactive, .x = g.hidden, .chunk = chunk);
    case ACT_CLAMPED_SWIGLU: break;
    }
    return op(c->s, clamped_swiglu_bwd, .dx = g.dhidden, .dy = g.dactive, .x = g.hidden, .chunk = chunk,
              .limit = s->activation_limit);
}

/* GELU is part of the product before it, and its gradient of the product after it. */
static Err fc1_forward(const Mlp *m, Ctx *c, Tensor x, Tensor hidden, Tensor active)
{
    if (m->spec->activation == ACT_GELU) return linear_forward_gelu(&m->fc1, c, x, hidden, active);
    TRY(linear_forward(&m->fc1, c, x, hidden));
    return activation_forward(c, m->spec, m->ffn, hidden, active);
}

static Err fc2_backward(const Mlp *m, Ctx *c, Tensor hidden, Tensor active, Tensor dy, Tensor dhidden)
{
    Tensor dactive;
    if (m->spec->activation == ACT_GELU) return linear_backward_gelu(&m->fc2, c, active, dy, hidden, dhidden);
    TRY(tensor_new(c->scratch, &dactive, c->dtype, active.dim[0], active.dim[1]));
    TRY(linear_backward(&m->fc2, c, active, dy, dactive));
    return activation_backward(c, m->spec, m->ffn, (ActivationGrad){ hidden, dactive, dhidden });
}

static int64_t local_ffn(const Mlp *m, const Ctx *c) { return m->ffn / c->world->tp.size; }

Err mlp_forward(const void *own, Ctx *c, Tensor x, Tensor y, void *kept)
{
    const Mlp *m = own;
    MlpSave *save = kept;
    ArenaMark mark = arena_mark(c->scratch);
    int64_t N = c->batch->B * c->batch->T, F = local_ffn(m, c), H = activation_gated(m->spec->activation) ? 2 * F : F;
    Tensor hidden, active;
    TRY(save_new(c, REGION_I, &hidden, &save->hidden, c->dtype, N, H));
    bool in_scratch = c->into[REGION_I] == c->scratch;
    if (!in_scratch) mark = arena_mark(c->scratch);
    TRY(save_if(c, !ctx_recomputes(c, m->spec), REGION_W, &active, &save->active, c->dtype, N, F));
    TRY(fc1_forward(m, c, x, hidden, active));
    TRY(linear_forward(&m->fc2, c, active, y));
    if (!in_scratch) arena_release(c->scratch, mark);
    return ERR_OK;
}

Err mlp_backward(const void *own, Ctx *c, const void *kept, Tensor x, Tensor dy, Tensor dx)
{
    const Mlp *m = own;
    const MlpSave *save = kept;
    ArenaMark mark = arena_mark(c->scratch);
    int64_t N = c->batch->B * c->batch->T, F = local_ffn(m, c);
    Tensor hidden = save_get(c, save->hidden), active, dhidden;
    TRY(dy_alloc(c, &dhidden, N, hidden.dim[1]));
    if (ctx_recomputes(c, m->spec)) {
        TRY(dy_alloc(c, &active, N, F));
        TRY(activation_forward(c, m->spec, m->ffn, hidden, active));
    } else {
        active = save_get(c, save->active);
    }
    TRY(fc2_backward(m, c, hidden, active, dy, dhidden));
    TRY(linear_backward(&m->fc1, c, x, dhidden, dx));
    arena_release(c->scratch, mark);
    return ERR_OK;
}

/* ---- the kind ---- */

static Err mlp_add(void *own, ParamRegistry *reg, const ModelSpec *s, const char *name, int layer)
{
    return mlp_register(own, reg, s, name, layer, s->ffn);
}

static int mlp_bias(const void *own) { return ((const Mlp *)own)->fc2.bias; }

int64_t mlp_weights(const ModelSpec *s, int64_t ffn)
{
    return (activation_gated(s->activation) ? 3 : 2) * s->hidden * ffn;
}

static int64_t mlp_flop(const ModelSpec *s) { return 2 * mlp_weights(s, s->ffn); }

const LayerKind mlp_kind = { .name = "mlp",
                             .own_bytes = sizeof(Mlp),
                             .save_bytes = sizeof(MlpSave),
                             .linears = 2,
                             .add = mlp_add,
                             .forward = mlp_forward,
                             .backward = mlp_backward,
                             .residual_bias = mlp_bias,
                             .flop = mlp_flop };
