/* Facts that layers derive from the specification alike. */
#include "layer/spec.h"

#include <math.h>
#include <stdio.h>

#include "base/fp8.h"
#include "base/rng.h"
#include "device/fp8_gpus.h"
#include "param/param.h"

float model_hidden_std(const ModelSpec *s) { return s->init_std / sqrtf(model_width(s)); }

int model_branches(const ModelSpec *s)
{
    int branches = 0;
    for (int i = 0; i < s->layers; i++)
        branches += (layer_pattern_at(&s->mixer, i) != MIXER_NONE) + model_has_ffn(s, i);
    return branches;
}

/* Megatron's rule, for its hybrid models too, whose layers are blocks of one. */
float model_projection_std(const ModelSpec *s)
{
    return s->init_std / sqrtf((float)model_branches(s) * model_width(s));
}

float model_attention_scale(const ModelSpec *s, float times)
{
    const float base = (float)(s->mup.head_dim ? s->mup.head_dim : s->head_dim);
    const float scale = s->attention_scale > 0 ? s->attention_scale : times / sqrtf(base);
    return scale * (base / (float)s->head_dim);
}

uint64_t model_key(const ModelSpec *spec, const char *owner, const char *site)
{
    char name[PARAM_NAME_MAX];
    snprintf(name, sizeof name, "%s.%s", owner, site);
    return rng_key(spec->seed, name);
}

Err fp8_spec_on_gpu(const Fp8Spec *s, int capability, const char *gpu)
{
#define FACTORS(name, text, bits, block, weight_rows, unit, scale, tensor, mixes, wide, gpus) [FP8_##name] = gpus,
    static const Fp8Factors factors[FP8_RECIPES] = { FP8_RECIPE_LIST(FACTORS) };
#undef FACTORS
    if (factors[s->recipe] == FP8_FACTORS)
        return err_set(ERR_CONFIG, "%s", E2M1_NOT_ON_GPUS), err_hint("set run.fp8=tensorwise");
    return s->recipe == FP8_NONE ? ERR_OK : fp8_gpu_multiplies(factors[s->recipe], capability, gpu);
}
