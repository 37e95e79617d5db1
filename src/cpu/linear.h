/* Shared parts of products that add to gradients of weights (linear.c): those of linear_dw, and those of 8-bit
 * operands; and the latter's demands on their operands. */
#ifndef MEGATRAIN_CPU_LINEAR_H
#define MEGATRAIN_CPU_LINEAR_H

#include "cpu/gemm.h"
#include "cpu/isa.h"

/* dw [O x I] += a [O x tokens] b [tokens x I], dw and how it is added to being those of `to`. */
Err CPU(add_product)(Stream *s, const linear_dw_args *to, GemmOperand a, GemmOperand b, int64_t tokens);

/* 8-bit operands are in fp32 by now (device/widen.c). */
static inline Err check_widened(Tensor x, Tensor y)
{
    if (x.dtype == F32 && y.dtype == F32) return ERR_OK;
    return err_set(ERR_INTERNAL, "products of 8 bits on the cpu are of a device with room to widen them");
}

#endif
