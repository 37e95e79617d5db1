/* What products that add to gradients of weights share (linear.c): those of linear_dw, and those of 8-bit operands. */
#ifndef MEGATRAIN_CPU_LINEAR_H
#define MEGATRAIN_CPU_LINEAR_H

#include "cpu/gemm.h"
#include "cpu/isa.h"

/* dw [O x I] += a [O x tokens] b [tokens x I], dw and how it is added to being those of `to`. */
Err CPU(add_product)(Stream *s, const linear_dw_args *to, GemmOperand a, GemmOperand b, int64_t tokens);

#endif
