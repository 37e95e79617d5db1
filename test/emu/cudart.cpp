/*
 * The CUDA runtime's C functions on devices, memory and kernels, as far as the host layer uses them; streams,
 * events and graphs are in stream.cpp. Stricter than the library: copies must name the right kind, lie in one
 * live allocation, and not come from freed memory; attributes that are not known are refused.
 */
#include "stream.h"

#include <stdlib.h>

using namespace emu;
typedef std::lock_guard<std::recursive_mutex> Lock;

enum { MULTIPROCESSORS = 4, VERSION = CUDART_VERSION };

/* ---- errors ---- */

static const struct ErrorText {
    cudaError_t code;
    const char *name, *text;
} error_texts[] = {
    { cudaSuccess, "cudaSuccess", "no error" },
    { cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument" },
    { cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory" },
    { cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument" },
    { cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy" },
    { cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
      "CUDA driver version is insufficient for CUDA runtime version" },
    { cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected" },
    { cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal" },
    { cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle" },
    { cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state" },
    { cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered" },
    { cudaErrorNvlinkUncorrectable, "cudaErrorNvlinkUncorrectable", "uncorrectable NVLink error" },
    { cudaErrorNotReady, "cudaErrorNotReady", "device not ready" },
    { cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported" },
    { cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
      "operation not permitted when stream is capturing" },
    { cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
      "operation failed due to a previous error during capture" },
    { cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge",
      "operation would result in a merge of separate captures" },
    { cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
      "capture was not ended in the stream it began in" },
    { cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work" },
    { cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
      "dependency on uncaptured work in another stream" },
    { cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
      "operation would make the legacy stream depend on a capturing blocking stream" },
    { cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
      "operation not permitted on an event last recorded in a capture" },
    { cudaErrorGraphExecUpdateFailure, "cudaErrorGraphExecUpdateFailure", "the graph update was not performed" },
};

static const ErrorText *text_of(cudaError_t e)
{
    for (const ErrorText &t : error_texts)
        if (t.code == e) return &t;
    return nullptr;
}

const char *cudaGetErrorName(cudaError_t e)
{
    return text_of(e) ? text_of(e)->name : "an error that the emulator does not know";
}
const char *cudaGetErrorString(cudaError_t e)
{
    return text_of(e) ? text_of(e)->text : "an error that the emulator does not know";
}
cudaError_t cudaGetLastError(void) { return take_error(true); }
cudaError_t cudaPeekAtLastError(void) { return take_error(false); }

/* ---- devices ---- */

/* Source: CUDA C++ Programming Guide, technical specifications per compute capability. */
static const Gpu gpus[] = { { "9.0", 9, 0, 227, 228, 2048, 32 },    { "8.0", 8, 0, 163, 164, 2048, 32 },
                            { "8.6", 8, 6, 99, 100, 1536, 16 },     { "8.9", 8, 9, 99, 100, 1536, 24 },
                            { "10.0", 10, 0, 227, 228, 2048, 32 },  { "12.0", 12, 0, 99, 100, 1536, 24 } };

static const Gpu *find_gpu()
{
    const char *wanted = getenv("EMU_GPU");
    if (!wanted) return gpus;
    for (const Gpu &g : gpus)
        if (!strcmp(g.name, wanted)) return &g;
    fail("EMU_GPU=%s: 8.0, 8.6, 8.9, 9.0, 10.0 or 12.0 is wanted", wanted);
}

const Gpu &emu::gpu()
{
    static const Gpu *const found = find_gpu();
    return *found;
}

/* EMU_DRIVER=12020: an older one; 0: none. */
static int driver_version()
{
    const char *given = getenv("EMU_DRIVER");
    return given ? atoi(given) : VERSION;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    *count = 0;
    if (driver_version() < VERSION) return set_error(cudaErrorInsufficientDriver);
    *count = device_count();
    return *count ? cudaSuccess : set_error(cudaErrorNoDevice);
}

cudaError_t cudaSetDevice(int device)
{
    if (!device_count()) return set_error(cudaErrorNoDevice);
    if (device < 0 || device >= device_count()) return set_error(cudaErrorInvalidDevice);
    current_device() = device;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    if (!device_count()) return set_error(cudaErrorNoDevice);
    *device = current_device();
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp *p, int device)
{
    Lock lock(runtime_mutex());
    size_t free_bytes;
    if (!device_count()) return set_error(cudaErrorNoDevice);
    if (device < 0 || device >= device_count()) return set_error(cudaErrorInvalidDevice);
    *p = {};
    snprintf(p->name, sizeof p->name, "Emulated GPU");
    snprintf(p->uuid.bytes, sizeof p->uuid.bytes, "emu GPU %d", host_gpu(device)); /* on this host */
    p->pciBusID = 0x1b + 0x10 * host_gpu(device);
    memory_info(&free_bytes, &p->totalGlobalMem);
    p->major = gpu().major;
    p->minor = gpu().minor;
    p->multiProcessorCount = MULTIPROCESSORS;
    p->warpSize = WARP_LANES;
    p->maxThreadsPerBlock = MAX_THREADS;
    p->maxThreadsPerMultiProcessor = gpu().threads_sm;
    p->maxBlocksPerMultiProcessor = gpu().blocks_sm;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = MAX_THREADS;
    p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 0x7fffffff;
    p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->sharedMemPerBlock = SHARED_DEFAULT;
    p->sharedMemPerBlockOptin = static_cast<size_t>(gpu().shared_block) << 10;
    p->sharedMemPerMultiprocessor = static_cast<size_t>(gpu().shared_sm) << 10;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->l2CacheSize = 4 << 20;
    p->memoryBusWidth = 6144;
    p->unifiedAddressing = 1;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device)
{
    cudaDeviceProp p;
    if (cudaGetDeviceProperties(&p, device)) return take_error(false);
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = SHARED_DEFAULT; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = gpu().shared_block << 10; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = gpu().shared_sm << 10; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrClockRate: *value = 1980000; break;
    case cudaDevAttrMemoryClockRate: *value = 3201000; break;
    default: return refuse(cudaErrorInvalidValue, "cudaDeviceGetAttribute: attribute %d is not known", attribute);
    }
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version)
{
    *version = driver_version();
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    *version = VERSION;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    Lock lock(runtime_mutex());
    if (!device_count()) return set_error(cudaErrorNoDevice);
    memory_info(free_bytes, total_bytes);
    return cudaSuccess;
}

/* ---- memory ---- */

cudaError_t cudaMalloc(void **out, size_t size)
{
    Lock lock(runtime_mutex());
    if (!device_count()) return set_error(cudaErrorNoDevice);
    if (unless_capturing("cudaMalloc")) return cudaErrorStreamCaptureUnsupported;
    return device_malloc(out, size);
}

cudaError_t cudaFree(void *p)
{
    Lock lock(runtime_mutex());
    if (!device_count()) return set_error(cudaErrorNoDevice);
    if (unless_capturing("cudaFree")) return cudaErrorStreamCaptureUnsupported;
    drain_all();
    return p ? device_free(p) : cudaSuccess;
}

cudaError_t cudaHostAlloc(void **out, size_t size, unsigned)
{
    Lock lock(runtime_mutex());
    if (!device_count()) return set_error(cudaErrorNoDevice);
    if (unless_capturing("cudaHostAlloc")) return cudaErrorStreamCaptureUnsupported;
    return pinned_malloc(out, size);
}

cudaError_t cudaMallocHost(void **out, size_t size) { return cudaHostAlloc(out, size, 0); }

cudaError_t cudaFreeHost(void *p)
{
    Lock lock(runtime_mutex());
    if (unless_capturing("cudaFreeHost")) return cudaErrorStreamCaptureUnsupported;
    drain_all();
    return p ? pinned_free(p) : cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *out, const void *p)
{
    Lock lock(runtime_mutex());
    *out = {};
    out->type = device_find(p)       ? cudaMemoryTypeDevice
                : pinned_holds(p, 0) ? cudaMemoryTypeHost
                                     : cudaMemoryTypeUnregistered;
    if (out->type == cudaMemoryTypeDevice) out->device = device_find(p)->device;
    if (out->type != cudaMemoryTypeHost) out->devicePointer = out->type ? const_cast<void *>(p) : nullptr;
    else out->hostPointer = out->devicePointer = const_cast<void *>(p);
    return cudaSuccess;
}

/* ---- copies ---- */

/* One side of a copy must be device memory or must not. `bytes` from p on are used. */
static bool side_fits(const char *call, const char *side, const void *p, size_t bytes, bool device)
{
    if (device_address(p) != device)
        return refuse(cudaErrorInvalidMemcpyDirection, "%s: the %s %p is %sdevice memory", call, side, p,
                      device ? "not " : ""),
               false;
    if (device ? device_holds(p, bytes) : p != nullptr) return true;
    return refuse(cudaErrorInvalidValue, "%s: the %s, %zu bytes at %p, is not within one allocation", call, side, bytes,
                  p),
           false;
}

struct Rows {
    unsigned char *to;
    const unsigned char *from;
    size_t to_pitch, from_pitch, width, height;
    size_t to_bytes() const { return height ? (height - 1) * to_pitch + width : 0; }
    size_t from_bytes() const { return height ? (height - 1) * from_pitch + width : 0; }
};

static void copy_rows(const Rows &r)
{
    for (size_t i = 0; i < r.height; i++) memmove(r.to + i * r.to_pitch, r.from + i * r.from_pitch, r.width);
}

static cudaError_t check_copy(const char *call, const Rows &r, cudaMemcpyKind kind)
{
    const bool to_device = kind == cudaMemcpyDefault
                               ? device_address(r.to)
                               : kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDefault
                                 ? device_address(r.from)
                                 : kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (kind > cudaMemcpyDefault) return refuse(cudaErrorInvalidMemcpyDirection, "%s: kind %d", call, kind);
    if (!r.width || !r.height) return cudaSuccess;
    if (r.width > r.to_pitch || r.width > r.from_pitch) return refuse(cudaErrorInvalidValue, "%s: rows overlap", call);
    if (!side_fits(call, "target", r.to, r.to_bytes(), to_device) ||
        !side_fits(call, "source", r.from, r.from_bytes(), from_device))
        return take_error(false);
    if (r.to < r.from + r.from_bytes() && r.from < r.to + r.to_bytes())
        return refuse(cudaErrorInvalidValue, "%s: source and target overlap", call);
    return cudaSuccess;
}

static cudaError_t copy_now(const char *call, const Rows &r, cudaMemcpyKind kind)
{
    Lock lock(runtime_mutex());
    if (unless_capturing(call)) return cudaErrorStreamCaptureUnsupported;
    if (check_copy(call, r, kind)) return take_error(false);
    drain_blocking();
    OpenDevice open;
    copy_rows(r);
    return cudaSuccess;
}

/* Pinned memory is read and written when the copy runs; other host memory, as in CUDA, before the call returns. */
static cudaError_t copy_later(const char *call, const Rows &r, cudaMemcpyKind kind, cudaStream_t stream)
{
    Lock lock(runtime_mutex());
    CUstream_st *s = stream_of(stream, call);
    if (!s) return cudaErrorInvalidResourceHandle;
    if (check_copy(call, r, kind)) return take_error(false);
    if (!r.width || !r.height) return cudaSuccess;
    const bool source_pageable = !device_address(r.from) && !pinned_holds(r.from, r.from_bytes());
    const bool target_pageable = !device_address(r.to) && !pinned_holds(r.to, r.to_bytes());
    if (s->capture && (source_pageable || target_pageable))
        return unless_capturing("cudaMemcpyAsync of memory that is not pinned");
    if (source_pageable && !target_pageable) {
        auto held = std::make_shared<std::vector<unsigned char>>(r.from, r.from + r.from_bytes());
        return submit(stream, "", [r, held] {
            Rows q = r;
            q.from = held->data();
            copy_rows(q);
        });
    }
    if (submit(stream, "", [r] { copy_rows(r); })) return take_error(false);
    if (target_pageable) drain(s);
    return cudaSuccess;
}

static Rows one_row(void *to, const void *from, size_t size)
{
    return Rows{ static_cast<unsigned char *>(to), static_cast<const unsigned char *>(from), size, size, size, 1 };
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, cudaMemcpyKind kind)
{
    return copy_now("cudaMemcpy", one_row(to, from, size), kind);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, cudaMemcpyKind kind, cudaStream_t stream)
{
    return copy_later("cudaMemcpyAsync", one_row(to, from, size), kind, stream);
}

cudaError_t cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                         cudaMemcpyKind kind)
{
    const Rows r = {
        static_cast<unsigned char *>(to), static_cast<const unsigned char *>(from), to_pitch, from_pitch, width, height
    };
    return copy_now("cudaMemcpy2D", r, kind);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind kind, cudaStream_t stream)
{
    const Rows r = {
        static_cast<unsigned char *>(to), static_cast<const unsigned char *>(from), to_pitch, from_pitch, width, height
    };
    return copy_later("cudaMemcpy2DAsync", r, kind, stream);
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t size, cudaStream_t stream)
{
    Lock lock(runtime_mutex());
    if (!size) return cudaSuccess;
    if (!device_holds(p, size) && !pinned_holds(p, size))
        return refuse(cudaErrorInvalidValue, "cudaMemsetAsync: %zu bytes at %p are not within one allocation", size, p);
    return submit(stream, "", [p, value, size] { memset(p, value, size); });
}

cudaError_t cudaMemset(void *p, int value, size_t size) { return cudaMemsetAsync(p, value, size, nullptr); }

/* ---- kernels ---- */

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value)
{
    Lock lock(runtime_mutex());
    if (!kernel) return refuse(cudaErrorInvalidValue, "cudaFuncSetAttribute: no kernel");
    if (attribute == cudaFuncAttributePreferredSharedMemoryCarveout && value >= -1 && value <= 100) return cudaSuccess;
    if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize || value < 0 || value > gpu().shared_block << 10)
        return refuse(cudaErrorInvalidValue, "cudaFuncSetAttribute: attribute %d, value %d", attribute, value);
    set_dynamic_limit(kernel, value);
    return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, const void *kernel)
{
    Lock lock(runtime_mutex());
    *out = {};
    out->maxThreadsPerBlock = MAX_THREADS;
    out->maxDynamicSharedSizeBytes = dynamic_limit(kernel);
    out->numRegs = 64;
    out->binaryVersion = out->ptxVersion = 10 * gpu().major + gpu().minor;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int threads, size_t dynamic_bytes)
{
    if (threads < 1 || threads > MAX_THREADS) return set_error(cudaErrorInvalidValue);
    const int by_threads = gpu().threads_sm / threads,
              by_shared = static_cast<int>((static_cast<size_t>(gpu().shared_sm) << 10) / (dynamic_bytes + 1024));
    *blocks = by_threads < by_shared ? by_threads : by_shared;
    if (*blocks > gpu().blocks_sm) *blocks = gpu().blocks_sm;
    return cudaSuccess;
}
