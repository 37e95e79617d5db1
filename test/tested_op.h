/*
 * An op that no test calls does not link. A test calls it by tested_op, which is op() (device/ops.h) and leaves the
 * symbol tested_NAME in its object. every_op.c asks for those of all ops; it is linked with the tests of the CPU's ops,
 * and with those of the GPU's (Makefile: OP_TESTS, EMU_TESTS).
 */
#ifndef MEGATRAIN_TEST_TESTED_OP_H
#define MEGATRAIN_TEST_TESTED_OP_H

#include "device/ops.h"

/* A function cannot define a variable for the linker; the assembler can. Weak: an op may have several tests. */
#define OP_IS_TESTED(name) __asm__(".weak tested_" #name "\n.set tested_" #name ", 1")

#define tested_op(stream, name, ...)    \
    ({                                  \
        OP_IS_TESTED(name);             \
        op(stream, name, __VA_ARGS__);  \
    })

#endif
