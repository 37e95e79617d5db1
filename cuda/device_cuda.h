/*
 * What the CUDA backend keeps for one GPU; Device.cuda points to it. Opened and closed by cuda/device.c.
 */
#ifndef MEGATRAIN_CUDA_DEVICE_CUDA_H
#define MEGATRAIN_CUDA_DEVICE_CUDA_H

#include <cuda_runtime_api.h>

#include "device/device.h"

typedef struct CudaGemm CudaGemm; /* gemm.h */

typedef struct CudaDevice {
    int index;
    cudaStream_t stream;
    char *pinned; /* ring through which host memory travels; PINNED_BYTES */
    int64_t pinned_used;
    CudaGemm *gemm;
} CudaDevice;

extern const OpTable cuda_ops; /* table.c */

/* ERR_MEMORY or ERR_DEVICE with CUDA's own text, unless `code` is success. `what`: the op or call, "rmsnorm_fwd". */
Err cuda_check(cudaError_t code, const char *what);

/* For whoever completes `e`, before event_complete: the work itself is done when `stream` comes to this point. */
Err cuda_event_mark(Event *e, cudaStream_t stream);

#endif
