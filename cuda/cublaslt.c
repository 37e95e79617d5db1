/*
 * cuBLASLt, looked up when it is first wanted: half a gigabyte that a program which trains on the CPU, plans or reads a
 * file need not map, and a bundle that starts where it is missing. Each function that gemm.c calls, under the header's
 * own name, leads on to the library's. (The emulator defines the same names itself: test/emu/cublaslt.cpp.)
 */
#include <cublasLt.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>

#include "device/device.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define SONAME "libcublasLt.so." TEXT(CUBLAS_VER_MAJOR)

/* name behind "cublasLt", what it takes, the same without types; all of these return a status */
#define CALLS(F)                                                                                             \
    F(Create, (cublasLtHandle_t * h), (h))                                                                   \
    F(Destroy, (cublasLtHandle_t h), (h))                                                                    \
    F(MatmulDescInit_internal,                                                                               \
      (cublasLtMatmulDesc_t d, size_t size, cublasComputeType_t compute, cudaDataType_t scale),              \
      (d, size, compute, scale))                                                                             \
    F(MatmulDescSetAttribute,                                                                                \
      (cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t what, const void *value, size_t size),         \
      (d, what, value, size))                                                                                \
    F(MatrixLayoutInit_internal,                                                                             \
      (cublasLtMatrixLayout_t l, size_t size, cudaDataType type, uint64_t rows, uint64_t cols, int64_t ld),  \
      (l, size, type, rows, cols, ld))                                                                       \
    F(MatmulPreferenceInit_internal, (cublasLtMatmulPreference_t p, size_t size), (p, size))                 \
    F(MatmulPreferenceSetAttribute,                                                                          \
      (cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t what, const void *value,           \
       size_t size),                                                                                         \
      (p, what, value, size))                                                                                \
    F(MatmulAlgoConfigGetAttribute,                                                                          \
      (const cublasLtMatmulAlgo_t *algo, cublasLtMatmulAlgoConfigAttributes_t what, void *value,             \
       size_t size, size_t *written),                                                                        \
      (algo, what, value, size, written))                                                                    \
    F(MatmulAlgoGetHeuristic,                                                                                \
      (cublasLtHandle_t h, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,    \
       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, cublasLtMatmulPreference_t p, int wanted,         \
       cublasLtMatmulHeuristicResult_t result[], int *found),                                                \
      (h, desc, a, b, c, d, p, wanted, result, found))                                                       \
    F(MatmulAlgoCheck,                                                                                       \
      (cublasLtHandle_t h, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,    \
       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algo,                 \
       cublasLtMatmulHeuristicResult_t *result),                                                             \
      (h, desc, a, b, c, d, algo, result))                                                                   \
    F(Matmul,                                                                                                \
      (cublasLtHandle_t h, cublasLtMatmulDesc_t desc, const void *alpha, const void *pa,                     \
       cublasLtMatrixLayout_t a, const void *pb, cublasLtMatrixLayout_t b, const void *beta, const void *pc, \
       cublasLtMatrixLayout_t c, void *pd, cublasLtMatrixLayout_t d, const cublasLtMatmulAlgo_t *algo,       \
       void *workspace, size_t bytes, cudaStream_t stream),                                                  \
      (h, desc, alpha, pa, a, pb, b, beta, pc, c, pd, d, algo, workspace, bytes, stream))

static struct {
#define MEMBER(name, takes, given) __typeof__(&cublasLt##name) name;
    CALLS(MEMBER)
    __typeof__(&cublasLtGetVersion) GetVersion;
    __typeof__(&cublasLtGetStatusName) GetStatusName;
    __typeof__(&cublasLtGetStatusString) GetStatusString;
    char why[256]; /* it is not to be had; "": it is */
} lt;

static void load(void)
{
    void *library = dlopen(SONAME, RTLD_NOW | RTLD_LOCAL);
    if (!library) return (void)snprintf(lt.why, sizeof lt.why, "%.250s", dlerror());
#define LOOK_UP(name, takes, given)                                          \
    lt.name = (__typeof__(&cublasLt##name))dlsym(library, "cublasLt" #name); \
    if (!lt.name) snprintf(lt.why, sizeof lt.why, SONAME " has no cublasLt" #name);
    CALLS(LOOK_UP)
    LOOK_UP(GetVersion, , )
    LOOK_UP(GetStatusName, , )
    LOOK_UP(GetStatusString, , )
}

bool device_cuda_blas(const char **why)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
    *why = lt.why;
    return !lt.why[0];
}

#define FORWARD(name, takes, given) \
    cublasStatus_t cublasLt##name takes { return lt.name given; }
CALLS(FORWARD)

size_t cublasLtGetVersion(void) { return lt.GetVersion(); }
const char *cublasLtGetStatusName(cublasStatus_t status) { return lt.GetStatusName(status); }
const char *cublasLtGetStatusString(cublasStatus_t status) { return lt.GetStatusString(status); }
