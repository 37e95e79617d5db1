/*
 * The CUDA op table. Each op runs inside an NVTX range of its name, for Nsight's timeline, and a launch that
 * CUDA refused is reported with the op that made it. A missing launcher does not link.
 */
#include <nvtx3/nvToolsExt.h>

#include "device/ops.h"
#include "device_cuda.h"

#define OP(name, flop, args)                                    \
    Err cuda_##name(Stream *, const name##_args *);             \
    static Err table_##name(Stream *s, const name##_args *a)    \
    {                                                           \
        nvtxRangePushA(#name);                                  \
        Err err = cuda_##name(s, a);                            \
        nvtxRangePop();                                         \
        return cuda_ended(err, #name);                          \
    }
#include "device/ops.def"
#undef OP

const OpTable cuda_ops = {
#define OP(name, flop, args) .name = table_##name,
#include "device/ops.def"
#undef OP
};
