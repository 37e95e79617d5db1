/* CUDA's errors as ours; see device_cuda.h. */
#include "device_cuda.h"

Err cuda_check(cudaError_t code, const char *what)
{
    if (code == cudaSuccess) return ERR_OK;
    if (code == cudaErrorMemoryAllocation)
        return err_set(ERR_MEMORY, "%s: %s", what, cudaGetErrorString(code));
    return err_set(ERR_DEVICE, "%s: %s (%s)", what, cudaGetErrorString(code), cudaGetErrorName(code)),
           err_hint(
               "to find the kernel at fault run with CUDA_LAUNCH_BLOCKING=1, or under compute-sanitizer");
}
