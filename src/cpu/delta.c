/* The gated delta rule. */
#include "cpu/rows.h"

Err CPU(conv_silu_fwd)(Stream *s, const conv_silu_fwd_args *a)
{
    (void)s;
    (void)a;
    return err_set(ERR_INTERNAL, "conv_silu_fwd is not there yet");
}

Err CPU(conv_silu_bwd)(Stream *s, const conv_silu_bwd_args *a)
{
    (void)s;
    (void)a;
    return err_set(ERR_INTERNAL, "conv_silu_bwd is not there yet");
}

Err CPU(unit_fwd)(Stream *s, const unit_fwd_args *a)
{
    (void)s;
    (void)a;
    return err_set(ERR_INTERNAL, "unit_fwd is not there yet");
}

Err CPU(unit_bwd)(Stream *s, const unit_bwd_args *a)
{
    (void)s;
    (void)a;
    return err_set(ERR_INTERNAL, "unit_bwd is not there yet");
}

Err CPU(delta_gates_fwd)(Stream *s, const delta_gates_fwd_args *a)
{
    (void)s;
    (void)a;
    return err_set(ERR_INTERNAL, "delta_gates_fwd is not there yet");
}

Err CPU(delta_gates_bwd)(Stream *s, const delta_gates_bwd_args *a)
{
    (void)s;
    (void)a;
    return err_set(ERR_INTERNAL, "delta_gates_bwd is not there yet");
}

Err CPU(delta_fwd)(Stream *s, const delta_fwd_args *a)
{
    (void)s;
    (void)a;
    return err_set(ERR_INTERNAL, "delta_fwd is not there yet");
}

Err CPU(delta_bwd)(Stream *s, const delta_bwd_args *a)
{
    (void)s;
    (void)a;
    return err_set(ERR_INTERNAL, "delta_bwd is not there yet");
}

Err CPU(gated_norm_fwd)(Stream *s, const gated_norm_fwd_args *a)
{
    (void)s;
    (void)a;
    return err_set(ERR_INTERNAL, "gated_norm_fwd is not there yet");
}

Err CPU(gated_norm_bwd)(Stream *s, const gated_norm_bwd_args *a)
{
    (void)s;
    (void)a;
    return err_set(ERR_INTERNAL, "gated_norm_bwd is not there yet");
}

