/*
 * The parameters of a mixture of experts (layer.h, Moe): router, biases of experts, experts, the shared expert and its
 * gate. What is computed with them: moe.c.
 */
#include <stdio.h>

#include "base/rng.h"
#include "layer/internal.h"

static Err add_weight(ParamRegistry *reg, const MoeSpec *m, const char *what, ParamSpec w, int *id)
{
    char name[PARAM_NAME_MAX];
    snprintf(name, sizeof name, "%s.%s.weight", m->name, what);
    w.name = name;
    w.ndim = 2;
    w.init = INIT_NORMAL;
    w.flags = PARAM_DECAY;
    return param_add(reg, w, id);
}

static Err register_shared(Moe *m, ParamRegistry *reg, const MoeSpec *s)
{
    char name[PARAM_NAME_MAX];
    m->shared_gate = -1;
    m->has_shared = s->shared_ffn > 0;
    if (!m->has_shared) return ERR_OK;
    snprintf(name, sizeof name, "%s.shared", s->name);
    TRY(mlp_register(&m->shared, reg,
                     (MlpSpec){ .name = name,
                                .hidden = s->hidden,
                                .ffn = s->shared_ffn,
                                .activation = s->activation,
                                .activation_limit = s->activation_limit,
                                .tp_blocks = s->tp_blocks,
                                .bias = s->bias,
                                .recompute = s->recompute,
                                .std = s->std,
                                .proj_std = s->proj_std }));
    if (!s->shared_gate) return ERR_OK;
    const ParamSpec gate = { .shape = { 1, s->hidden }, .std = s->std, .partial = PARTIAL_ROWS };
    return add_weight(reg, s, "shared_gate", gate, &m->shared_gate);
}

/* The bias of the rows that w has; -1 without biases. */
static Err add_bias(ParamRegistry *reg, const MoeSpec *m, const char *what, ParamSpec w, int *id)
{
    char name[PARAM_NAME_MAX];
    *id = -1;
    if (!m->bias) return ERR_OK;
    snprintf(name, sizeof name, "%s.%s.bias", m->name, what);
    w.name = name;
    w.ndim = 1;
    w.init = INIT_ZERO;
    w.init_repeat = 0;
    return param_add(reg, w, id);
}

static Err add_state(ParamRegistry *reg, const MoeSpec *s, int *id)
{
    char name[PARAM_NAME_MAX];
    snprintf(name, sizeof name, "%s.router.bias", s->name);
    return param_add(
        reg,
        (ParamSpec){
            .name = name, .ndim = 1, .shape = { s->experts }, .partial = PARTIAL_ROWS, .group = PARAM_STATE },
        id);
}

Err moe_register(Moe *m, ParamRegistry *reg, MoeSpec s)
{
    char noise[PARAM_NAME_MAX];
    snprintf(noise, sizeof noise, "%s.jitter", s.name);
    const int64_t E = s.experts, D = s.hidden, F = s.ffn, gated = activation_gated(s.activation) ? 2 : 1;
    ASSERT(s.balance.unit > 0);
    *m = (Moe){ .experts = s.experts,
                .topk = s.topk,
                .hidden = D,
                .ffn = F,
                .act = { s.activation, s.activation_limit, F / s.tp_blocks },
                .scoring = s.scoring,
                .balance = s.balance,
                .gathers = s.gathers,
                .capacity = s.capacity,
                .jitter = s.jitter,
                .jitter_key = rng_key(s.seed, noise),
                .recompute = s.recompute };
    ParamSpec router = { .shape = { E, D }, .std = s.std, .partial = PARTIAL_ROWS, .init_repeat = s.parts };
    ParamSpec fc1 = { .shape = { E * gated * F, D }, .cut = { CUT_ETP }, .std = s.std };
    ParamSpec fc2 = { .shape = { E * D, F }, .cut = { CUT_NONE, CUT_ETP }, .std = s.proj_std };
    fc1.stack = fc2.stack = E;
    fc1.stack_cut = fc2.stack_cut = CUT_EP;
    fc1.group = fc2.group = PARAM_EXPERT;
    if (gated == 2) {
        fc1.section[0] = fc1.section[1] = F;
        fc1.interleave = s.tp_blocks;
    }
    const ParamSpec fc2_bias = { .shape = { E * D }, .partial = PARTIAL_ROWS };
    TRY(add_weight(reg, &s, "router", router, &m->router));
    TRY(add_bias(reg, &s, "router.logits", router, &m->router_bias));
    TRY(add_state(reg, &s, &m->bias));
    TRY(add_weight(reg, &s, "experts.fc1", fc1, &m->fc1));
    TRY(add_bias(reg, &s, "experts.fc1", fc1, &m->fc1_bias));
    TRY(add_weight(reg, &s, "experts.fc2", fc2, &m->fc2));
    TRY(add_bias(reg, &s, "experts.fc2", fc2_bias, &m->fc2_bias));
    return register_shared(m, reg, &s);
}
