/*
 * cuTensorMapEncodeTiled, in a format of the emulator's own (the driver's is not public), with the driver's limits; and
 * the runtime's functions that find it. Source: CUDA driver API, cuTensorMapEncodeTiled.
 */
#include <cuda_runtime_api.h>

#include <cuda.h>

#include "hopper.h"

using namespace emu;

static unsigned element_bytes(CUtensorMapDataType type)
{
    switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: return 4;
    default: return 0;
    }
}

static unsigned swizzle_bytes(CUtensorMapSwizzle s)
{
    return s == CU_TENSOR_MAP_SWIZZLE_128B  ? 128
           : s == CU_TENSOR_MAP_SWIZZLE_64B ? 64
           : s == CU_TENSOR_MAP_SWIZZLE_32B ? 32
                                            : 16;
}

static CUresult no_map(const char *why, unsigned long long value)
{
    fprintf(stderr, "emu: cuTensorMapEncodeTiled: %s: %llu\n", why, value);
    return CUDA_ERROR_INVALID_VALUE;
}

static CUresult encode(CUtensorMap *out, CUtensorMapDataType type, cuuint32_t rank, void *data,
                       const cuuint64_t *dim, const cuuint64_t *stride, const cuuint32_t *box,
                       const cuuint32_t *step, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                       CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill)
{
    MapBits m = {};
    m.end = MapBits::MARK;
    for (int i = 0; i < 5; i++) m.set_box(i, 0);
    const unsigned bytes = element_bytes(type), span = swizzle_bytes(swizzle);
    if (reinterpret_cast<uintptr_t>(out) % 64) return no_map("the map's address is no multiple of 64", 0);
    if (!bytes || interleave || fill)
        return no_map("type, interleave or fill is not known to the emulator", type);
    if (rank < 1 || rank > 5) return no_map("rank", rank);
    if (reinterpret_cast<uintptr_t>(data) % 16) return no_map("address", reinterpret_cast<uintptr_t>(data));
    if (!device_find(data)) return no_map("not device memory", reinterpret_cast<uintptr_t>(data));
    m.magic = MAP_MAGIC, m.data = static_cast<unsigned char *>(data), m.stride[0] = bytes;
    m.rank = static_cast<uint8_t>(rank), m.element = static_cast<uint8_t>(bytes),
    m.swizzle = static_cast<uint8_t>(span);
    for (unsigned i = 0; i < rank; i++) {
        if (dim[i] < 1 || dim[i] > uint64_t(1) << 32) return no_map("dimension", dim[i]);
        if (box[i] < 1 || box[i] > 256) return no_map("box", box[i]);
        if (step[i] != 1) return no_map("element stride, of which the emulator knows 1 alone", step[i]);
        if (i && (stride[i - 1] % 16 || !stride[i - 1] || stride[i - 1] >> 40))
            return no_map("stride", stride[i - 1]);
        m.dim[i] = dim[i], m.set_box(static_cast<int>(i), box[i]);
        if (i) m.stride[i] = stride[i - 1];
    }
    if (box[0] * bytes % 16) return no_map("bytes of the box's rows are no multiple of 16", box[0] * bytes);
    if (span > 16 && box[0] * bytes > span)
        return no_map("the box's rows are longer than the swizzle's", box[0] * bytes);
    memset(out, 0, sizeof *out);
    memcpy(out, &m, sizeof m);
    return CUDA_SUCCESS;
}

static cudaError_t find(const char *name, void **out, cudaDriverEntryPointQueryResult *found)
{
    const bool known = !strcmp(name, "cuTensorMapEncodeTiled");
    *out = known ? reinterpret_cast<void *>(encode) : nullptr;
    if (found) *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

#if CUDART_VERSION >= 12050
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *found)
{
    return find(name, out, found);
}
#endif

#if CUDART_VERSION < 13000
cudaError_t cudaGetDriverEntryPoint(const char *name, void **out, unsigned long long,
                                    cudaDriverEntryPointQueryResult *found)
{
    return find(name, out, found);
}
#endif
