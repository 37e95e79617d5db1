/*
 * The parameters of a mixture of experts (moe.h): router, biases of experts, experts, the ways into their latent and
 * out of it, the shared expert and its gate. What is computed with them: moe.c.
 */
#include <stdio.h>

#include "layer/moe.h"

/* The mixture that a parameter belongs to, and where it is registered. */
typedef struct {
    ParamRegistry *reg;
    const ModelSpec *spec;
    const char *name; /* "layers.3.mlp" */
    int layer;        /* 3 */
} Owner;

static Err add(const Owner *o, const char *what, ParamSpec w, int *id)
{
    char name[PARAM_NAME_MAX];
    snprintf(name, sizeof name, "%s.%s", o->name, what);
    w.name = name;
    return param_add(o->reg, w, id);
}

static Err add_weight(const Owner *o, const char *what, ParamSpec w, int *id)
{
    w.ndim = 2;
    w.init = INIT_NORMAL;
    w.flags |= PARAM_DECAY | PARAM_HIDDEN;
    return add(o, what, w, id);
}

/* The bias of the rows that w has; -1 without biases. */
static Err add_bias(const Owner *o, const char *what, ParamSpec w, int *id)
{
    *id = -1;
    w.ndim = 1;
    w.init = INIT_ZERO;
    w.init_repeat = 0;
    return o->spec->bias ? add(o, what, w, id) : ERR_OK;
}

static Err register_shared(Moe *m, const Owner *o)
{
    const ModelSpec *s = o->spec;
    char name[PARAM_NAME_MAX];
    m->shared_gate = -1;
    if (!s->moe.shared_ffn) return ERR_OK;
    snprintf(name, sizeof name, "%s.shared", o->name);
    TRY(mlp_register(&m->shared, o->reg, s, name, o->layer, s->moe.shared_ffn));
    if (!s->moe.shared_gate) return ERR_OK;
    const ParamSpec gate = { .shape = { 1, s->hidden }, .std = model_hidden_std(s), .partial = PARTIAL_ROWS };
    return add_weight(o, "shared_gate.weight", gate, &m->shared_gate);
}

/* Weights added to the residual stream begin as projections do: latent_out's, and through it the experts'. */
static Err register_latent(Moe *m, const Owner *o)
{
    const ModelSpec *s = o->spec;
    const int64_t L = s->moe.latent;
    const LinearSpec in = { o->name, "latent_in", s->hidden, L, LINEAR_WHOLE, .std = model_hidden_std(s) };
    const LinearSpec out = { o->name, "latent_out", L, s->hidden, LINEAR_WHOLE, .std = model_projection_std(s) };
    if (!L) return ERR_OK;
    TRY(linear_register(&m->latent_in, o->reg, in));
    return linear_register(&m->latent_out, o->reg, out);
}

Err moe_add(void *own, ParamRegistry *reg, const ModelSpec *s, const char *name, int layer)
{
    Moe *m = own;
    const Owner o = { reg, s, name, layer };
    const int64_t E = s->moe.experts, L = moe_width(s), F = s->moe.ffn, gated = activation_gated(s->activation) ? 2 : 1;
    ASSERT(s->moe.balance.unit > 0);
    *m = (Moe){ .model = s,
                .spec = &s->moe,
                .fp8 = s->fp8.experts ? model_fp8(s, layer) : FP8_NONE,
                .jitter_key = model_key(s, name, "jitter") };
    ParamSpec router = { .shape = { E, s->hidden },
                         .std = model_hidden_std(s),
                         .partial = PARTIAL_ROWS,
                         .init_repeat = s->moe.parts,
                         .flags = PARAM_ROUTER };
    ParamSpec fc1 = { .shape = { E * gated * F, L }, .cut = { CUT_ETP }, .std = model_hidden_std(s) };
    ParamSpec fc2 = { .shape = { E * L, F }, .cut = { CUT_NONE, CUT_ETP }, .std = model_projection_std(s) };
    fc1.stack = fc2.stack = E;
    fc1.stack_cut = fc2.stack_cut = CUT_EP;
    fc1.group = fc2.group = PARAM_EXPERT;
    if (gated == 2) {
        fc1.section[0] = fc1.section[1] = F;
        fc1.interleave = s->tp_blocks;
    }
    const ParamSpec state = {
        .ndim = 1, .shape = { E }, .partial = PARTIAL_ROWS, .group = PARAM_STATE, .block = layer
    };
    const ParamSpec fc2_bias = { .shape = { E * L }, .partial = PARTIAL_ROWS };
    TRY(add_weight(&o, "router.weight", router, &m->router));
    TRY(add_bias(&o, "router.logits.bias", router, &m->router_bias));
    TRY(add(&o, "router.bias", state, &m->bias));
    TRY(add_weight(&o, "experts.fc1.weight", fc1, &m->fc1));
    TRY(add_bias(&o, "experts.fc1.bias", fc1, &m->fc1_bias));
    TRY(add_weight(&o, "experts.fc2.weight", fc2, &m->fc2));
    TRY(add_bias(&o, "experts.fc2.bias", fc2_bias, &m->fc2_bias));
    TRY(register_latent(m, &o));
    return register_shared(m, &o);
}
