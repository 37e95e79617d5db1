/* What layers derive from the specification alike. */
#include "layer/spec.h"

#include <math.h>
#include <stdio.h>

#include "base/rng.h"
#include "param/param.h"

/* Megatron's rule. */
float model_projection_std(const ModelSpec *s) { return s->init_std / sqrtf(2.0f * (float)s->layers); }

uint64_t model_key(const ModelSpec *spec, const char *owner, const char *site)
{
    char name[PARAM_NAME_MAX];
    snprintf(name, sizeof name, "%s.%s", owner, site);
    return rng_key(spec->seed, name);
}
