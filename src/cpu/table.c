/* This build's op table: every op of ops.def, by name. A missing implementation does not compile. */
#include "cpu/isa.h"

const OpTable CPU(ops) = {
#define OP(name, flop, args) .name = CPU(name),
#include "device/ops.def"
#undef OP
};
