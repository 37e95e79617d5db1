/* State of the CUDA backend for one GPU; Device.cuda points to it. Opened and closed by cuda/device.c. */
#ifndef MEGATRAIN_CUDA_DEVICE_CUDA_H
#define MEGATRAIN_CUDA_DEVICE_CUDA_H

#include <cuda_runtime_api.h>

#include "device/device.h"

typedef struct CudaGemm CudaGemm; /* gemm.h */

enum { PINNED_PARTS = 4 };

/* The stream stands still between these, at most; made with the first use. */
typedef struct {
    cudaEvent_t begin, end;
} CudaStall;

typedef struct CudaDevice {
    int index;
    cudaStream_t stream, copies; /* Device.stream, Device.copies */
    /* ring through which host memory travels (Device.pinned_bytes): parts one after another, the present one, what is
     * used of it, and of the others where the stream has done with them */
    char *pinned;
    int pinned_part;
    int64_t pinned_used;
    cudaEvent_t pinned_free[PINNED_PARTS];
    CudaGemm *gemm;
    CudaStall *stall; /* that has begun; NULL: there was no room for one */
    CudaStall stalls[DEVICE_STALLS_MOST];
    int64_t stalls_begun, stalls_read; /* so far, modulo the room in `stalls` */
} CudaDevice;

extern const OpTable cuda_ops; /* table.c */

/*
 * Unless `code` is success: ERR_MEMORY; ERR_GPU, with the GPU's names, for what hardware or driver did; ERR_DEVICE,
 * which a kernel of ours may have done. `what`: the op or call, "rmsnorm_fwd".
 */
Err cuda_check(cudaError_t code, const char *what);
/* The same of the last error, which says more than a library does that failed by it. err: what the op returned. */
Err cuda_ended(Err err, const char *what);
/* Names the GPU of that number for cuda_check's messages. */
void cuda_remember(int index, const struct cudaDeviceProp *p);

/* For whoever completes `e`, before event_complete: the work itself is done when `stream` comes to this point. */
Err cuda_event_mark(Event *e, cudaStream_t stream);

#endif
