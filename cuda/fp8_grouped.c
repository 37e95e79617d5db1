/* Products of experts of 8-bit operands (device/ops.def, fp8_grouped): GPUs have none. run.fp8_experts says so first. */
#include "device/ops.h"

Err cuda_fp8_cast_runs(Stream *s, const fp8_cast_runs_args *a);
Err cuda_fp8_grouped(Stream *s, const fp8_grouped_args *a);
Err cuda_fp8_grouped_add(Stream *s, const fp8_grouped_add_args *a);

static Err refused(OpId op)
{
    err_set(ERR_CONFIG, "%s on cuda is not built", op_info(op)->name);
    err_hint("set run.fp8_experts=false");
    return ERR_CONFIG;
}

Err cuda_fp8_cast_runs(Stream *s, const fp8_cast_runs_args *a)
{
    (void)s, (void)a;
    return refused(OP_fp8_cast_runs);
}

Err cuda_fp8_grouped(Stream *s, const fp8_grouped_args *a)
{
    (void)s, (void)a;
    return refused(OP_fp8_grouped);
}

Err cuda_fp8_grouped_add(Stream *s, const fp8_grouped_add_args *a)
{
    (void)s, (void)a;
    return refused(OP_fp8_grouped_add);
}
