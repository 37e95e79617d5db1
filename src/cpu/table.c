/* This build's op table: every op of ops.def, by name. A missing implementation does not compile. */
#include "cpu/isa.h"

#ifdef CPU_ISA_c /* one for all builds */
#include "cpu/rows.h"

_Alignas(64) _Thread_local char cpu_scratch[CPU_SCRATCH_BYTES];
#endif

const OpTable CPU(ops) = {
#define OP(name, flop, args) .name = CPU(name),
#include "device/ops.def"
#undef OP
};
