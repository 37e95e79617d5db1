/*
 * The ops that balance a mixture of experts have no kernels here yet: base/config_check.c refuses device=cuda with moe.experts
 * before a run starts, and whoever calls one is told so.
 */
#include "device/ops.h"

static Err not_built(const char *op)
{
    return err_set(ERR_CONFIG, "'%s': mixtures of experts are not built yet for cuda", op),
           err_hint("take run.device = cpu");
}

#define WITHOUT_KERNEL(name)                          \
    Err cuda_##name(Stream *s, const name##_args *a); \
    Err cuda_##name(Stream *s, const name##_args *a)  \
    {                                                 \
        (void)s;                                      \
        (void)a;                                      \
        return not_built(#name);                      \
    }

WITHOUT_KERNEL(router_count)
WITHOUT_KERNEL(router_balance)
WITHOUT_KERNEL(expert_count)
WITHOUT_KERNEL(expert_bias)
