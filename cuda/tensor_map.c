/* Tensor maps, made by the driver's own call, which the runtime finds: nothing is linked against the driver. */
#include "tensor_map.h"

#include <cuda_runtime.h>
#include <cudaTypedefs.h>

#include "device_cuda.h"

typedef PFN_cuTensorMapEncodeTiled_v12000 Encode;

static Err find_encode(Encode *out)
{
    void *call = NULL;
    enum cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    const cudaError_t code = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &call, 12000,
                                                              cudaEnableDefault, &found);
#else
    const cudaError_t code = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &call, cudaEnableDefault, &found);
#endif
    TRY(cuda_check(code, "looking for cuTensorMapEncodeTiled"));
    if (found != cudaDriverEntryPointSuccess || !call)
        return err_set(ERR_DEVICE, "this driver has no cuTensorMapEncodeTiled, which kernels for Hopper need"),
               err_hint("install a driver of CUDA 12.0 or newer");
    *out = (Encode)call;
    return ERR_OK;
}

static CUtensorMapSwizzle swizzle_of(int bytes)
{
    return bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B
           : bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
           : bytes == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                         : CU_TENSOR_MAP_SWIZZLE_NONE;
}

Err tensor_map(TensorMap *out, const TensorBox *b)
{
    static Encode encode; /* the process has one driver; any thread finds the same */
    if (!encode) TRY(find_encode(&encode));
    cuuint64_t dim[5], stride[4];
    cuuint32_t box[5], step[5] = { 1, 1, 1, 1, 1 };
    for (int i = 0; i < b->rank; i++) {
        dim[i] = (cuuint64_t)b->dim[i];
        box[i] = (cuuint32_t)b->box[i];
        if (i > 0) stride[i - 1] = (cuuint64_t)b->stride[i];
    }
    const CUtensorMapDataType type = b->codes ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    const CUresult code = encode(out, type, (cuuint32_t)b->rank, (void *)(uintptr_t)b->data, dim, stride, box, step,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(b->swizzle),
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (code == CUDA_SUCCESS) return ERR_OK;
    return err_set(ERR_SHAPE, "the driver makes no tensor map (%d) of rank %d: %lld x %lld, boxes %d x %d, %p",
                   code, b->rank, (long long)b->dim[0], (long long)b->dim[1], b->box[0], b->box[1], b->data);
}
