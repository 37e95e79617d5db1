/*
 * src/cpu/ is compiled three times, each time for another instruction set, with CPU_ISA set to avx512, avx2
 * or c. CPU(name) is this build's own name of a function; vec.h gives all three the same 16-lane arithmetic,
 * so that they give the same bits. table.c collects this build's ops, all declared here, in one OpTable.
 */
#ifndef MEGATRAIN_CPU_ISA_H
#define MEGATRAIN_CPU_ISA_H

#include "device/ops.h"

#define CPU_PASTE2(isa, name) cpu_##isa##_##name
#define CPU_PASTE(isa, name) CPU_PASTE2(isa, name)
#define CPU(name) CPU_PASTE(CPU_ISA, name)

#define OP(name, flop, args) Err CPU(name)(Stream *, const name##_args *);
#include "device/ops.def"
#undef OP

#endif
