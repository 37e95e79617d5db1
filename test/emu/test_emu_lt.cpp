/*
 * The emulated cuBLASLt's products of 8 bits: what it refuses as the library does, and numbers worked by hand where
 * factors of blocks are. (What its other products do: test_cuda_gemm, through cuda/gemm.c.)
 */
#include <cublasLt.h>

#include <math.h>
#include <string.h>
#include <vector>

#include "test.h"

#include "runtime.h"

static const int32_t VEC128 = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
static const int32_t EXPONENTS = CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
static const int32_t BLK128 = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;

/* D [m x n] = op(A) op(B). */
struct Problem {
    cudaDataType_t a = CUDA_R_8F_E4M3, b = CUDA_R_8F_E4M3, d = CUDA_R_32F;
    int32_t ta = CUBLAS_OP_T, tb = CUBLAS_OP_N, mode_a = 0, mode_b = 0;
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    int8_t fast = 0;
    uint64_t m = 32, n = 48, k = 144;
    const float *scale_a = nullptr, *scale_b = nullptr;
};

struct Lt {
    cublasLtHandle_t handle;
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a, b, d;
    cublasLtMatmulHeuristicResult_t result;
    template <class T> void set(cublasLtMatmulDescAttributes_t what, T value)
    {
        CHECK(!cublasLtMatmulDescSetAttribute(&desc, what, &value, sizeof value));
    }
};

static cublasStatus_t ask(const Problem &p, Lt *lt)
{
    cublasLtMatmulPreferenceOpaque_t preference;
    const uint64_t workspace = 1 << 20;
    const uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_NONE;
    int found = 0;
    CHECK(!cublasLtCreate(&lt->handle));
    CHECK(!cublasLtMatmulDescInit(&lt->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    lt->set(CUBLASLT_MATMUL_DESC_TRANSA, p.ta);
    lt->set(CUBLASLT_MATMUL_DESC_TRANSB, p.tb);
    lt->set(CUBLASLT_MATMUL_DESC_EPILOGUE, p.epilogue);
    lt->set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, p.fast);
    lt->set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, p.mode_a);
    lt->set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, p.mode_b);
    lt->set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.scale_a);
    lt->set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.scale_b);
    const bool ta = p.ta == CUBLAS_OP_T, tb = p.tb == CUBLAS_OP_T;
    CHECK(!cublasLtMatrixLayoutInit(&lt->a, p.a, ta ? p.k : p.m, ta ? p.m : p.k, ta ? p.k : p.m));
    CHECK(!cublasLtMatrixLayoutInit(&lt->b, p.b, tb ? p.n : p.k, tb ? p.k : p.n, tb ? p.n : p.k));
    CHECK(!cublasLtMatrixLayoutInit(&lt->d, p.d, p.m, p.n, p.m));
    CHECK(!cublasLtMatmulPreferenceInit(&preference));
    CHECK(!cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, 8));
    CHECK(!cublasLtMatmulPreferenceSetAttribute(&preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reductions,
                                                4));
    return cublasLtMatmulAlgoGetHeuristic(lt->handle, &lt->desc, &lt->a, &lt->b, &lt->d, &lt->d, &preference, 1,
                                          &lt->result, &found);
}

static void offered(const char *what, bool wanted, Problem p)
{
    Lt lt;
    const cublasStatus_t status = ask(p, &lt);
    CHECK_MSG(status == (wanted ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED), "%s: status %d", what, status);
    cublasLtDestroy(lt.handle);
}

#define OFFERED(wanted, ...) offered(#__VA_ARGS__, (wanted), [] { Problem p; __VA_ARGS__; return p; }())

TEST(what_the_library_has)
{
    OFFERED(true, p.fast = 1);
    OFFERED(true, p.b = CUDA_R_8F_E5M2);
    OFFERED(true, p.a = CUDA_R_8F_E5M2, p.d = CUDA_R_16BF);
    OFFERED(false, p.a = p.b = CUDA_R_8F_E5M2);
    OFFERED(false, p.b = CUDA_R_16BF);
    OFFERED(false, p.ta = CUBLAS_OP_N);
    OFFERED(false, p.tb = CUBLAS_OP_T);
    OFFERED(false, p.m = 40);
    OFFERED(false, p.n = 40);
    OFFERED(false, p.k = 136);
    OFFERED(false, p.epilogue = CUBLASLT_EPILOGUE_BIAS);
    OFFERED(true, p.epilogue = CUBLASLT_EPILOGUE_BIAS, p.d = CUDA_R_16BF);
}

TEST(what_the_library_has_of_blocks)
{
    OFFERED(true, p.mode_a = p.mode_b = VEC128);
    OFFERED(true, p.mode_a = VEC128, p.mode_b = BLK128);
    OFFERED(true, p.mode_a = BLK128, p.mode_b = VEC128, p.d = CUDA_R_16BF);
    OFFERED(false, p.mode_a = p.mode_b = BLK128);
    OFFERED(false, p.mode_a = VEC128);
    OFFERED(false, p.mode_a = p.mode_b = VEC128, p.fast = 1);
    OFFERED(false, p.mode_a = p.mode_b = EXPONENTS, p.k = 160); /* not on 9.0 */
    OFFERED(false, p.a = p.b = CUDA_R_16BF, p.mode_a = p.mode_b = VEC128);
}

template <class T> static T *device(const std::vector<T> &values)
{
    void *p;
    CHECK(!cudaMalloc(&p, values.size() * sizeof(T)));
    CHECK(!cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return static_cast<T *>(p);
}

/* All codes are 1 (0x38): each element is the sum over blocks of their lengths times two factors. */
static void by_hand(int32_t mode_a, int32_t mode_b)
{
    enum { M = 144, N = 32, K = 272, L = 3, L4 = 4 };
    const int length[L] = { 128, 128, 16 };
    std::vector<float> fa(mode_a == BLK128 ? 2 * L4 : M * L), fb(mode_b == BLK128 ? L4 : N * L), out(M * N);
    const auto of_a = [&](int m, int b) -> float & { return fa[mode_a == BLK128 ? m / 128 * L4 + b : b * M + m]; };
    const auto of_b = [&](int n, int b) -> float & { return fb[mode_b == BLK128 ? n / 128 * L4 + b : b * N + n]; };
    for (int b = 0; b < L; b++) {
        for (int m = 0; m < M; m++) of_a(m, b) = static_cast<float>((mode_a == BLK128 ? m / 128 : m % 5) + 2 * b + 1);
        for (int n = 0; n < N; n++) of_b(n, b) = static_cast<float>((mode_b == BLK128 ? 0 : n % 3) + 4 * b + 1);
    }
    Problem p;
    p.m = M, p.n = N, p.k = K, p.mode_a = mode_a, p.mode_b = mode_b;
    p.scale_a = device(fa), p.scale_b = device(fb);
    Lt lt;
    CHECK(!ask(p, &lt));
    const uint8_t *a = device(std::vector<uint8_t>(M * K, 0x38)), *b = device(std::vector<uint8_t>(N * K, 0x38));
    float *d = device(out), *workspace = device(std::vector<float>(1 << 18));
    const float alpha = 1, beta = 0;
    cudaStream_t stream;
    CHECK(!cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(!cublasLtMatmul(lt.handle, &lt.desc, &alpha, a, &lt.a, b, &lt.b, &beta, d, &lt.d, d, &lt.d, &lt.result.algo,
                          workspace, 1 << 20, stream));
    CHECK(!cudaStreamSynchronize(stream));
    CHECK(!cudaMemcpy(out.data(), d, out.size() * sizeof(float), cudaMemcpyDeviceToHost));
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) {
            float want = 0;
            for (int block = 0; block < L; block++) want += length[block] * of_a(m, block) * of_b(n, block);
            CHECK(out[n * M + m] == want);
        }
    /* without one of the factors, or from the middle of 16 bytes */
    const float *none = nullptr, *middle = p.scale_b + 1;
    for (const float *wrong : { none, middle }) {
        lt.set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, wrong);
        CHECK(cublasLtMatmul(lt.handle, &lt.desc, &alpha, a, &lt.a, b, &lt.b, &beta, d, &lt.d, d, &lt.d,
                             &lt.result.algo, workspace, 1 << 20, stream) == CUBLAS_STATUS_INVALID_VALUE);
    }
    cudaStreamDestroy(stream);
    cublasLtDestroy(lt.handle);
}

TEST(blocks_by_hand)
{
    by_hand(VEC128, VEC128);
    by_hand(VEC128, BLK128);
    by_hand(BLK128, VEC128);
}

TEST_MAIN
