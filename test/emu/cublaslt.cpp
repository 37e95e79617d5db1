/*
 * cuBLASLt on the emulator: the calls of cuda/gemm.c and no others, over NVIDIA's own header. A product is one
 * loop over k in ascending order for each element, in fp32 without fused multiply-add; an algorithm that splits
 * k sums the parts apart and adds them, as the library does.
 *
 * Stricter than the library, so that what runs here is safe and fast there:
 *   - attributes, sizes of attributes, dtypes and epilogues that gemm.c does not need are refused
 *   - matrices and vectors start on 16 bytes, and so do their columns; and on whatever alignment the heuristic
 *     was told (256 bytes when it was told nothing)
 *   - an algorithm serves the product it was asked for: the same sizes, dtypes, epilogue; never none (NULL)
 *   - every address leads to device memory for its whole length; D overlaps no input; C is D
 *   - GELU within a product: 16-bit results, rows of its second matrix a multiple of 8 elements, and, so that the
 *     way without it is walked as well, only for results whose columns are a multiple of 8 elements
 *   - the workspace is device memory of at least the algorithm's size, and holds NaN when the product starts
 *   - the default stream is refused
 * Products of fp8, as its manual has them (chapter 3.1.4): both operands with k contiguous ("TN"), at most one of E5M2;
 * m, n and k multiples of 16; from compute capability 8.9 on. Factors: one for a matrix, or on 9.0 one for 128 elements
 * of a column or for blocks of 128 x 128, of A or of B but not of both; on 10.x one for 32 elements of a column of
 * each, as exponents of 8 bits, with k a multiple of 32. Each lies as the manual's "Scaling factors layouts" says; what
 * stands in tiles of exponents behind the end of k multiplies zeros. FAST_ACCUM with factors of blocks is refused, and
 * so is GELU; a bias on fp32 results, which is bf16 there, as well.
 * With a mask that lets sums be reduced in place, the heuristic offers such an algorithm first, and its sums
 * change from call to call: a test of repeats then fails.
 *
 * EMU_LT_SILENT=1,3: those algorithms (0 to 3 in the heuristic's table) do not say how they add. EMU_LT_FAST=3: all
 * others take a second, by events' clock. EMU_REPORT counts products by the multiprocessors that they are told to take.
 */
#include <cublasLt.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <string>
#include <vector>

#include "runtime.h"

namespace
{

constexpr uint64_t HANDLE = 0x6c74686e, DESC = 0x6c746473, LAYOUT = 0x6c746c79, PREFERENCE = 0x6c747072,
                   ALGO = 0x6c74616c;
constexpr size_t VERSION = 130100;

struct Handle {
    uint64_t magic;
};

struct Desc {
    uint64_t magic;
    int32_t ta, tb;
    uint32_t epilogue, unused;
    const void *bias;
    void *aux;
    int64_t aux_ld;
    int32_t target; /* multiprocessors; 0: all */
    const float *scale[2]; /* of A and B, which fp8 needs */
    int32_t mode[2];
    int8_t fast;
    bool in_blocks() const { return mode[0] || mode[1]; }
    bool has_bias() const { return epilogue & CUBLASLT_EPILOGUE_BIAS; }
    bool has_gelu() const { return epilogue & CUBLASLT_EPILOGUE_GELU; }
    bool has_slope() const { return epilogue == CUBLASLT_EPILOGUE_DGELU; }
    bool has_aux() const { return has_gelu() || has_slope(); }
};

struct Layout {
    uint64_t magic, rows, cols;
    int64_t ld;
    int32_t type, unused;
};

struct Preference {
    uint64_t magic, workspace;
    uint32_t reductions, align[4];
};

/* What a product is, apart from addresses: an algorithm is for one of these. */
struct Algo {
    uint64_t magic, problem;
    int32_t id, split, reduction, workspace;
    uint16_t align[4]; /* bytes that A, B, C, D are known to start on */
    uint64_t unused[3];
};

static_assert(sizeof(Desc) <= sizeof(cublasLtMatmulDescOpaque_t), "ours fits into the library's");
static_assert(sizeof(Layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "ours fits into the library's");
static_assert(sizeof(Preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t), "ours fits into the library's");
static_assert(sizeof(Algo) == sizeof(cublasLtMatmulAlgo_t), "ours is as large as the library's");

template <class OURS, class THEIRS> OURS *as(THEIRS *p, uint64_t magic)
{
    OURS *ours = reinterpret_cast<OURS *>(p);
    return ours && ours->magic == magic ? ours : nullptr;
}

template <class OURS, class THEIRS> const OURS *as(const THEIRS *p, uint64_t magic)
{
    const OURS *ours = reinterpret_cast<const OURS *>(p);
    return ours && ours->magic == magic ? ours : nullptr;
}

/* Says on stderr what was wrong: the library's status alone is one word. */
cublasStatus_t refuse(cublasStatus_t status, const char *why)
{
    fprintf(stderr, "emulated cublasLt: %s\n", why);
    return status;
}

template <class T> cublasStatus_t set(T *to, const void *from, size_t size)
{
    if (!from || size != sizeof *to)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "an attribute of the wrong size");
    memcpy(to, from, size);
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- elements ---- */

bool is_fp8(int32_t type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }

size_t size_of(int32_t type) { return type == CUDA_R_32F ? 4 : is_fp8(type) ? 1 : 2; }

/* E5M2 is the upper half of fp16's bits. E4M3 has no infinity, and one NaN of each sign. */
float from_fp8(uint32_t code, int32_t type)
{
    if (type == CUDA_R_8F_E5M2) return emu::from_half<emu::FLOAT16>(code << 8);
    const int exponent = code >> 3 & 15, fraction = code & 7;
    float size = exponent ? ldexpf(8 + fraction, exponent - 10) : ldexpf(fraction, -9);
    if ((code & 127) == 127) size = NAN;
    return code & 128 ? -size : size;
}

float load(const void *p, int32_t type, int64_t i)
{
    if (is_fp8(type)) return from_fp8(static_cast<const uint8_t *>(p)[i], type);
    if (type == CUDA_R_32F) return static_cast<const float *>(p)[i];
    if (type == CUDA_R_16BF) return __bfloat162float(static_cast<const __nv_bfloat16 *>(p)[i]);
    return __half2float(static_cast<const __half *>(p)[i]);
}

void store(void *p, int32_t type, int64_t i, float x)
{
    if (type == CUDA_R_32F) static_cast<float *>(p)[i] = x;
    else if (type == CUDA_R_16BF) static_cast<__nv_bfloat16 *>(p)[i] = __float2bfloat16(x);
    else static_cast<__half *>(p)[i] = __float2half(x);
}

/* ---- a product ---- */

struct Product {
    Desc desc;
    Layout a, b, d;
    const void *at, *bt;
    void *dt;
    float alpha, beta;
    int32_t split;
    bool in_place; /* adds the parts in whatever order */
    void *workspace;
    size_t workspace_bytes;
    int64_t m() const { return static_cast<int64_t>(d.rows); }
    int64_t n() const { return static_cast<int64_t>(d.cols); }
    int64_t k() const { return static_cast<int64_t>(desc.ta ? a.rows : a.cols); }
};

bool known(uint32_t epilogue)
{
    return epilogue == CUBLASLT_EPILOGUE_DEFAULT || epilogue == CUBLASLT_EPILOGUE_BIAS ||
           epilogue == CUBLASLT_EPILOGUE_GELU_AUX || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS ||
           epilogue == CUBLASLT_EPILOGUE_DGELU;
}

/* x/2 (1 + tanh(u)), u = c (x + a x^3), and its derivative */
constexpr float GELU_C = 0.7978845608f, GELU_A = 0.044715f;

float gelu(float x) { return 0.5f * x * (1 + tanhf(GELU_C * (x + GELU_A * x * x * x))); }

float gelu_slope(float x)
{
    const float t = tanhf(GELU_C * (x + GELU_A * x * x * x));
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * GELU_C * (1 + 3 * GELU_A * x * x);
}

/* op(A) with k down and m across, op(B) with n down and k across: what the inner loop reads in order. */
std::vector<float> unpack(const void *at, const Layout &l, bool turned, int64_t down, int64_t across)
{
    std::vector<float> out;
    out.reserve(static_cast<size_t>(down * across));
    for (int64_t i = 0; i < down; i++)
        for (int64_t j = 0; j < across; j++)
            out.push_back(load(at, l.type, turned ? i + j * l.ld : i * l.ld + j));
    return out;
}

/* The same 16 products at a time, as tensor cores add them. */
void chain_as_chip(float *sum, const float *a, const float *x, int64_t M, int64_t first, int64_t end)
{
    enum { AT_ONCE = 16 };
    for (int64_t i = 0; i < M; i++)
        for (int64_t k = first; k < end; k += AT_ONCE)
            sum[i] = emu::chip_sum(sum[i], a + k * M + i, static_cast<int>(M), x + k, 1,
                                   static_cast<int>(end - k < AT_ONCE ? end - k : AT_ONCE));
}

/* sum[i] = op(A)(i, k) x[k], k ascending from `first` to before `end`. a: op(A) as unpacked; halves: of 16 bits
 * each. */
void chain(float *sum, const float *a, const float *x, bool halves, int64_t M, int64_t first, int64_t end)
{
    for (int64_t i = 0; i < M; i++) sum[i] = 0;
    if (halves && emu::chip_rounding) return chain_as_chip(sum, a, x, M, first, end);
    for (int64_t k = first; k < end; k++)
        for (int64_t i = 0; i < M; i++) sum[i] += a[k * M + i] * x[k];
}

/* ---- products of fp8 ---- */

constexpr int64_t BLOCK = 128, TILE = 512; /* TILE: exponents of 128 columns, 4 of each */
constexpr int32_t EXPONENTS = CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;

int64_t blocks_of(int64_t n) { return (n + BLOCK - 1) / BLOCK; }

/* Numbers from one row of 128 x 128 blocks to the next. */
int64_t between_rows(int64_t k) { return (blocks_of(k) + 3) / 4 * 4; }

/* How many factors of a matrix with `across` columns, as it is read, there are room for. */
int64_t factors_of(int32_t mode, int64_t across, int64_t k)
{
    if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F) return across * blocks_of(k);
    return mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F ? between_rows(k) * blocks_of(across) : 1;
}

/* Tiles of 128 columns with 4 exponents each that are beside one another along k. */
int64_t tiles_of(int64_t k) { return blocks_of(k); }

/* Bytes of the factors of a matrix with `across` columns, as it is read. */
int64_t factor_bytes(int32_t mode, int64_t across, int64_t k)
{
    return mode == EXPONENTS ? blocks_of(across) * tiles_of(k) * TILE : 4 * factors_of(mode, across, k);
}

float power_of(const float *scale, int64_t at, int64_t block, int64_t k)
{
    const int64_t tile = at / BLOCK * tiles_of(k) + block / 4, line = at % BLOCK;
    const uint8_t e =
        reinterpret_cast<const uint8_t *>(scale)[tile * TILE + line % 32 * 16 + line / 32 * 4 + block % 4];
    return e == 255 ? NAN : ldexpf(1, e - 127);
}

float factor_of(const float *scale, int32_t mode, int64_t at, int64_t across, int64_t block, int64_t k)
{
    if (mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F) return scale[block * across + at];
    return scale[mode == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F ? at / BLOCK * between_rows(k) + block : 0];
}

/* sum[i] += those of k from first to before end: 32 at a time; EMU_ROUND=chip: with few bits kept of each such sum. */
void chain_fp8(float *sum, const float *a, const float *x, int64_t M, int64_t first, int64_t end)
{
    enum { AT_ONCE = 32 };
    for (int64_t i = 0; i < M; i++)
        for (int64_t k = first; k < end; k += AT_ONCE) {
            const int count = static_cast<int>(end - k < AT_ONCE ? end - k : AT_ONCE);
            if (emu::chip_rounding)
                sum[i] = emu::chip_sum_fp8(sum[i], a + k * M + i, static_cast<int>(M), x + k, 1, count);
            for (int64_t l = k; !emu::chip_rounding && l < k + count; l++) sum[i] += a[l * M + i] * x[l];
        }
}

/* Products of 32 at a time with both their exponents; to the end of the last tile. */
void chain_exponents(const Product &p, float *sum, const float *a, const float *x, int64_t j, int64_t first,
                     int64_t end)
{
    const Desc &desc = p.desc;
    const int64_t M = p.m(), K = p.k(), last = end == K ? tiles_of(K) * BLOCK : end;
    std::vector<float> part(static_cast<size_t>(M));
    for (int64_t i = 0; i < M; i++) sum[i] = 0;
    for (int64_t k = first, stop; k < last; k = stop) {
        stop = (k / 32 + 1) * 32 < last ? (k / 32 + 1) * 32 : last;
        std::fill(part.begin(), part.end(), 0.0f);
        if (k < K) chain_fp8(part.data(), a, x, M, k, stop);
        for (int64_t i = 0; i < M; i++)
            sum[i] += part[static_cast<size_t>(i)] *
                      (power_of(desc.scale[0], i, k / 32, K) * power_of(desc.scale[1], j, k / 32, K));
    }
}

/* Without FAST_ACCUM what the tensor cores add up is added to sums in fp32 after each 128 of k, here times factors. */
void chain_promoted(const Product &p, float *sum, const float *a, const float *x, int64_t j, int64_t first, int64_t end)
{
    const Desc &desc = p.desc;
    const int64_t M = p.m(), N = p.n(), K = p.k();
    std::vector<float> part(static_cast<size_t>(M));
    for (int64_t i = 0; i < M; i++) sum[i] = 0;
    if (desc.fast) return chain_fp8(sum, a, x, M, first, end);
    for (int64_t k = first, stop; k < end; k = stop) {
        stop = (k / BLOCK + 1) * BLOCK < end ? (k / BLOCK + 1) * BLOCK : end;
        std::fill(part.begin(), part.end(), 0.0f);
        chain_fp8(part.data(), a, x, M, k, stop);
        for (int64_t i = 0; i < M; i++)
            sum[i] += !desc.in_blocks() ? part[static_cast<size_t>(i)]
                                        : part[static_cast<size_t>(i)] *
                                              (factor_of(desc.scale[0], desc.mode[0], i, M, k / BLOCK, K) *
                                               factor_of(desc.scale[1], desc.mode[1], j, N, k / BLOCK, K));
    }
}

float epilogue(const Product &p, int64_t i, int64_t j, float x)
{
    const int64_t at = i + j * p.d.ld, at_aux = i + j * p.desc.aux_ld;
    if (p.beta != 0) x += p.beta * load(p.dt, p.d.type, at);
    if (p.desc.has_bias()) x += load(p.desc.bias, p.d.type, i);
    if (p.desc.has_slope()) return x * gelu_slope(load(p.desc.aux, p.d.type, at_aux));
    if (!p.desc.has_gelu()) return x;
    store(p.desc.aux, p.d.type, at_aux, x);
    return gelu(x);
}

void compute(const Product &p)
{
    static int call;
    const int64_t M = p.m(), N = p.n(), K = p.k();
    const int first = p.in_place ? call++ % p.split : 0; /* whose part comes first */
    memset(p.workspace, 0xff, p.workspace_bytes);
    const std::vector<float> a = unpack(p.at, p.a, p.desc.ta, K, M), b = unpack(p.bt, p.b, p.desc.tb, N, K);
    std::vector<float> sums(static_cast<size_t>(M)), parts(sums);
    float *sum = sums.data(), *part = parts.data();
    const bool fp8 = is_fp8(p.a.type);
    const float alpha = fp8 && !p.desc.in_blocks() ? p.alpha * p.desc.scale[0][0] * p.desc.scale[1][0] : p.alpha;
    for (int64_t j = 0; j < N; j++) {
        for (int s = 0; s < p.split; s++) {
            const int piece = (s + first) % p.split;
            const int64_t from = K * piece / p.split, to = K * (piece + 1) / p.split;
            float *const into = s ? part : sum;
            if (fp8 && p.desc.mode[0] == EXPONENTS)
                chain_exponents(p, into, a.data(), b.data() + j * K, j, from, to);
            else if (fp8) chain_promoted(p, into, a.data(), b.data() + j * K, j, from, to);
            else chain(into, a.data(), b.data() + j * K, p.a.type != CUDA_R_32F, M, from, to);
            for (int64_t i = 0; s && i < M; i++) sum[i] += part[i];
        }
        for (int64_t i = 0; i < M; i++)
            store(p.dt, p.d.type, i + j * p.d.ld, epilogue(p, i, j, alpha * sum[i]));
    }
}

/* ---- checks ---- */

uint64_t mix(uint64_t h, uint64_t x)
{
    h = (h ^ x) * 0x9E3779B97F4A7C15u;
    return h ^ h >> 29;
}

uint64_t problem_of(const Desc &x, const Layout &a, const Layout &b, const Layout &d)
{
    uint64_t h = mix(mix(mix(1, static_cast<uint64_t>(x.ta)), static_cast<uint64_t>(x.tb)), x.epilogue);
    for (const Layout *l : { &a, &b, &d })
        h = mix(mix(mix(mix(h, l->rows), l->cols), static_cast<uint64_t>(l->ld)),
                static_cast<uint64_t>(l->type));
    for (int i = 0; i < 2; i++) h = mix(h, static_cast<uint64_t>(x.mode[i]));
    return mix(mix(mix(h, static_cast<uint64_t>(x.aux_ld)), static_cast<uint64_t>(x.target)),
               static_cast<uint64_t>(x.fast));
}

const char *fp8_wrong(const Desc &x, const Layout &a, const Layout &b, const Layout &d)
{
    const int capability = emu::gpu().major * 10 + emu::gpu().minor;
    if (capability < 89) return "fp8 on a GPU that has no such products";
    if (a.type == CUDA_R_8F_E5M2 && b.type == CUDA_R_8F_E5M2) return "both operands of E5M2";
    if (x.ta != CUBLAS_OP_T || x.tb != CUBLAS_OP_N) return "fp8 with an operand whose k is not contiguous";
    if (d.rows % 16 || d.cols % 16 || a.rows % 16) return "fp8 with sizes that are no multiples of 16";
    if (d.type == CUDA_R_32F && x.has_bias()) return "fp8 with a bias on fp32 results, which is none of fp32";
    if (!x.in_blocks()) return nullptr;
    if (x.mode[0] == EXPONENTS && x.mode[1] == EXPONENTS)
        return capability / 10 != 10 ? "exponents as factors on a GPU that is not of 10.x"
               : a.rows % 32         ? "exponents as factors with a k that is no multiple of 32"
               : x.fast              ? "FAST_ACCUM with exponents as factors"
                                     : nullptr;
    if (capability != 90) return "factors of blocks on a GPU that is not of 9.0";
    if (x.fast) return "FAST_ACCUM with factors of blocks";
    for (int32_t mode : x.mode)
        if (mode != CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F && mode != CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F)
            return "factors that are not emulated, or of blocks for one operand alone";
    return x.mode[0] == x.mode[1] && x.mode[0] == CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F
               ? "blocks of 128 x 128 of both operands"
               : nullptr;
}

const char *shapes_wrong(const Desc &x, const Layout &a, const Layout &b, const Layout &d)
{
    const uint64_t K = x.ta ? a.rows : a.cols;
    if ((x.ta ? a.cols : a.rows) != d.rows || (x.tb ? b.rows : b.cols) != d.cols ||
        (x.tb ? b.cols : b.rows) != K)
        return "the sizes of the matrices do not fit";
    if (!d.rows || !d.cols || !K) return "an empty matrix";
    if (is_fp8(a.type) != is_fp8(b.type) || (a.type != b.type && !is_fp8(a.type)))
        return "A and B have different dtypes";
    if (is_fp8(d.type)) return "results of fp8";
    if (d.type != a.type && d.type != CUDA_R_32F && !is_fp8(a.type)) return "D is neither of A's dtype nor fp32";
    if (!known(x.epilogue)) return "an epilogue that is not emulated";
    if ((x.has_gelu() || x.has_slope()) && d.type != a.type && !is_fp8(a.type))
        return "GELU with outputs of another dtype";
    if (!is_fp8(a.type) && (x.in_blocks() || x.fast || x.scale[0] || x.scale[1]))
        return "factors or FAST_ACCUM without fp8";
    if (is_fp8(a.type) && fp8_wrong(x, a, b, d)) return fp8_wrong(x, a, b, d);
    if (x.has_aux() && (d.type == CUDA_R_32F || x.aux_ld % 8 || x.aux_ld < static_cast<int64_t>(d.rows)))
        return "GELU on fp32, or with rows of its second matrix that are short or no multiple of 8";
    return nullptr;
}

/* Bytes from the first element to behind the last. */
size_t extent(const Layout &l)
{
    return (static_cast<size_t>(l.ld) * (l.cols - 1) + l.rows) * size_of(l.type);
}

bool overlap(const void *p, size_t p_size, const void *q, size_t q_size)
{
    const uintptr_t a = reinterpret_cast<uintptr_t>(p), b = reinterpret_cast<uintptr_t>(q);
    return a < b + q_size && b < a + p_size;
}

const char *matrix_wrong(const void *p, const Layout &l, uint32_t align)
{
    if (align < 16) align = 16;
    if (!emu::device_holds(p, extent(l))) return "a matrix outside device memory";
    if (reinterpret_cast<uintptr_t>(p) % align)
        return "a matrix that is not aligned as the heuristic was told";
    if (l.cols > 1 && static_cast<size_t>(l.ld) * size_of(l.type) % 16)
        return "columns that are not on 16-byte boundaries";
    return nullptr;
}

const char *epilogue_wrong(const Desc &x, const Layout &d)
{
    Layout aux = d;
    aux.ld = x.aux_ld;
    const char *wrong = x.has_aux() ? matrix_wrong(x.aux, aux, 16) : nullptr;
    if (wrong) return wrong;
    if (x.has_bias() && !emu::device_holds(x.bias, d.rows * size_of(d.type)))
        return "a bias outside device memory";
    if (x.has_bias() && reinterpret_cast<uintptr_t>(x.bias) % 16)
        return "a bias that is not on a 16-byte boundary";
    return nullptr;
}

const char *factors_wrong(const Product &p)
{
    if (!is_fp8(p.a.type)) return nullptr;
    for (int i = 0; i < 2; i++) {
        const int64_t bytes = factor_bytes(p.desc.mode[i], i ? p.n() : p.m(), p.k());
        if (!emu::device_holds(p.desc.scale[i], static_cast<size_t>(bytes)))
            return "fp8 without factors, or with some outside device memory";
        if (reinterpret_cast<uintptr_t>(p.desc.scale[i]) % (p.desc.mode[i] ? 16 : 4))
            return "factors that are not on a 16-byte boundary";
    }
    return nullptr;
}

const char *product_wrong(const Product &p, const Algo &algo)
{
    const char *wrong;
    if (algo.problem != problem_of(p.desc, p.a, p.b, p.d))
        return "an algorithm that was chosen for another product";
    if ((wrong = matrix_wrong(p.at, p.a, algo.align[0]))) return wrong;
    if ((wrong = matrix_wrong(p.bt, p.b, algo.align[1]))) return wrong;
    if ((wrong = matrix_wrong(p.dt, p.d, algo.align[3]))) return wrong;
    if ((wrong = epilogue_wrong(p.desc, p.d))) return wrong;
    if ((wrong = factors_wrong(p))) return wrong;
    if (overlap(p.dt, extent(p.d), p.at, extent(p.a)) || overlap(p.dt, extent(p.d), p.bt, extent(p.b)))
        return "D overlaps A or B";
    if (p.desc.has_aux() && p.desc.aux == p.dt) return "GELU with one matrix for both";
    if (p.desc.has_aux() && p.beta != 0) return "GELU of a product that accumulates";
    if (p.workspace_bytes < static_cast<size_t>(algo.workspace))
        return "a workspace smaller than the algorithm's";
    if (!emu::device_holds(p.workspace, static_cast<size_t>(algo.workspace)) ||
        reinterpret_cast<uintptr_t>(p.workspace) % 256)
        return "a workspace outside device memory or not on a 256-byte boundary";
    return nullptr;
}

struct Operands {
    const Desc *desc;
    const Layout *a, *b, *c, *d;
    bool good() const { return desc && a && b && c && d && memcmp(c, d, sizeof *c) == 0; }
};

Operands operands(cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                  cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d)
{
    return { as<Desc>(desc, DESC), as<Layout>(a, LAYOUT), as<Layout>(b, LAYOUT), as<Layout>(c, LAYOUT),
             as<Layout>(d, LAYOUT) };
}

} // namespace

extern "C" {

cublasStatus_t cublasLtCreate(cublasLtHandle_t *out)
{
    *out = reinterpret_cast<cublasLtHandle_t>(new Handle{ HANDLE });
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t h)
{
    Handle *handle = as<Handle>(h, HANDLE);
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    handle->magic = 0;
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion(void) { return VERSION; }

bool device_cuda_blas(const char **why)
{
    *why = "";
    return true;
}

const char *cublasLtGetStatusName(cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_INVALID_VALUE: return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "CUBLAS_STATUS_NOT_SUPPORTED";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "CUBLAS_STATUS_EXECUTION_FAILED";
    default: return "CUBLAS_STATUS_INTERNAL_ERROR";
    }
}

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_SUCCESS: return "success";
    case CUBLAS_STATUS_NOT_INITIALIZED: return "the library was not initialized";
    case CUBLAS_STATUS_INVALID_VALUE: return "an unsupported value or parameter was passed to the function";
    case CUBLAS_STATUS_NOT_SUPPORTED: return "the requested functionality is not supported";
    case CUBLAS_STATUS_EXECUTION_FAILED: return "the function failed to launch on the GPU";
    default: return "an internal operation failed";
    }
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t d, size_t size,
                                               cublasComputeType_t compute, cudaDataType_t scale)
{
    if (!d || size < sizeof(Desc)) return CUBLAS_STATUS_ALLOC_FAILED;
    if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F)
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "only fp32 sums without TF32");
    memset(d, 0, size);
    *reinterpret_cast<Desc *>(d) = { DESC, CUBLAS_OP_N, CUBLAS_OP_N, CUBLASLT_EPILOGUE_DEFAULT,
                                     0,    nullptr,     nullptr,     0,
                                     0,    {},          {},          0 };
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t d, cublasLtMatmulDescAttributes_t what,
                                              const void *value, size_t size)
{
    Desc *x = as<Desc>(d, DESC);
    if (!x) return CUBLAS_STATUS_INVALID_VALUE;
    switch (what) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return set(&x->ta, value, size);
    case CUBLASLT_MATMUL_DESC_TRANSB: return set(&x->tb, value, size);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return set(&x->epilogue, value, size);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return set(&x->bias, value, size);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER: return set(&x->aux, value, size);
    case CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD: return set(&x->aux_ld, value, size);
    case CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET:
        if (set(&x->target, value, size)) return CUBLAS_STATUS_INVALID_VALUE;
        if (x->target >= 1 && x->target <= 4) return CUBLAS_STATUS_SUCCESS;
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "more multiprocessors than there are, or none");
    case CUBLASLT_MATMUL_DESC_A_SCALE_POINTER: return set(&x->scale[0], value, size);
    case CUBLASLT_MATMUL_DESC_B_SCALE_POINTER: return set(&x->scale[1], value, size);
    case CUBLASLT_MATMUL_DESC_A_SCALE_MODE: return set(&x->mode[0], value, size);
    case CUBLASLT_MATMUL_DESC_B_SCALE_MODE: return set(&x->mode[1], value, size);
    case CUBLASLT_MATMUL_DESC_FAST_ACCUM: return set(&x->fast, value, size);
    default: return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "an attribute of a product that is not emulated");
    }
}

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t l, size_t size, cudaDataType type,
                                                 uint64_t rows, uint64_t cols, int64_t ld)
{
    if (!l || size < sizeof(Layout)) return CUBLAS_STATUS_ALLOC_FAILED;
    if (type != CUDA_R_32F && type != CUDA_R_16BF && type != CUDA_R_16F && !is_fp8(type))
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "a dtype that is not emulated");
    if (rows > INT32_MAX || cols > INT32_MAX || ld < static_cast<int64_t>(rows))
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "columns that overlap, or a size beyond 32 bits");
    memset(l, 0, size);
    *reinterpret_cast<Layout *>(l) = { LAYOUT, rows, cols, ld, type, 0 };
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t p, size_t size)
{
    if (!p || size < sizeof(Preference)) return CUBLAS_STATUS_ALLOC_FAILED;
    memset(p, 0, size);
    *reinterpret_cast<Preference *>(
        p) = { PREFERENCE, 0, CUBLASLT_REDUCTION_SCHEME_MASK, { 256, 256, 256, 256 } };
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t p,
                                                    cublasLtMatmulPreferenceAttributes_t what,
                                                    const void *value, size_t size)
{
    Preference *x = as<Preference>(p, PREFERENCE);
    if (!x) return CUBLAS_STATUS_INVALID_VALUE;
    switch (what) {
    case CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES: return set(&x->workspace, value, size);
    case CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK: return set(&x->reductions, value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES: return set(&x->align[0], value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES: return set(&x->align[1], value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES: return set(&x->align[2], value, size);
    case CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES: return set(&x->align[3], value, size);
    default: return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "a preference that is not emulated");
    }
}

/* In place (when allowed), whole, whole with another tile, and k in three with a pass that adds the parts; for fewer
 * multiprocessors the other way round. */
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int wanted,
                                              cublasLtMatmulHeuristicResult_t *result, int *found)
{
    static const struct {
        int32_t split, reduction;
    } offers[] = { { 3, CUBLASLT_REDUCTION_SCHEME_INPLACE },
                   { 1, CUBLASLT_REDUCTION_SCHEME_NONE },
                   { 1, CUBLASLT_REDUCTION_SCHEME_NONE },
                   { 3, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE } };
    const Operands o = operands(desc, a, b, c, d);
    const Preference *p = as<Preference>(preference, PREFERENCE);
    *found = 0;
    if (!as<Handle>(handle, HANDLE) || !o.good() || !p || wanted <= 0) return CUBLAS_STATUS_INVALID_VALUE;
    const char *wrong = shapes_wrong(*o.desc, *o.a, *o.b, *o.d);
    if (wrong) return refuse(CUBLAS_STATUS_NOT_SUPPORTED, wrong);
    for (uint32_t align : p->align)
        if (align < 16 || (align & (align - 1)))
            return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "matrices that do not start on 16 bytes");
    if (o.desc->in_blocks() && o.desc->has_aux()) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (o.desc->has_aux() && (o.d->rows % 8 || reinterpret_cast<uintptr_t>(o.desc->aux) % 16))
        return CUBLAS_STATUS_NOT_SUPPORTED;
    if (o.desc->has_bias() && reinterpret_cast<uintptr_t>(o.desc->bias) % 16)
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "a bias that does not start on 16 bytes");
    for (int32_t i = 0; i < 4 && *found < wanted; i++) {
        const int32_t id = o.desc->target ? 3 - i : i;
        Algo algo = {
            ALGO, problem_of(*o.desc, *o.a, *o.b, *o.d), id, offers[id].split, offers[id].reduction, 0, {}, {}
        };
        algo.workspace = offers[id].split > 1 ? 1 << 16 : 256;
        for (int k = 0; k < 4; k++) algo.align[k] = static_cast<uint16_t>(p->align[k]);
        if ((algo.reduction & ~static_cast<int32_t>(p->reductions)) ||
            static_cast<uint64_t>(algo.workspace) > p->workspace)
            continue;
        cublasLtMatmulHeuristicResult_t *r = &result[(*found)++];
        memset(r, 0, sizeof *r);
        memcpy(&r->algo, &algo, sizeof algo);
        r->workspaceSize = static_cast<size_t>(algo.workspace);
        r->wavesCount = 1;
    }
    return *found ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                       cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                       cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t *algo,
                                       cublasLtMatmulHeuristicResult_t *result)
{
    const Operands o = operands(desc, a, b, c, d);
    const Algo *x = as<Algo>(algo, ALGO);
    if (!as<Handle>(handle, HANDLE) || !o.good() || !x || x->problem != problem_of(*o.desc, *o.a, *o.b, *o.d))
        return CUBLAS_STATUS_INVALID_VALUE;
    result->state = CUBLAS_STATUS_SUCCESS;
    result->workspaceSize = static_cast<size_t>(x->workspace);
    result->wavesCount = 1;
    return CUBLAS_STATUS_SUCCESS;
}

static bool is_in(const char *list, int32_t id) { return list && strchr(list, '0' + id); }

static bool is_silent(int32_t id) { return is_in(getenv("EMU_LT_SILENT"), id); }

static bool is_slow(int32_t id)
{
    const char *fast = getenv("EMU_LT_FAST");
    return fast && !is_in(fast, id);
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t what, void *value,
                                                    size_t size, size_t *written)
{
    const Algo *x = as<Algo>(algo, ALGO);
    if (!x || !value || size != 4) return CUBLAS_STATUS_INVALID_VALUE;
    if (what != CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME && what != CUBLASLT_ALGO_CONFIG_ID)
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "a property of algorithms that is not emulated");
    if (what == CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME && is_silent(x->id)) return CUBLAS_STATUS_NOT_SUPPORTED;
    memcpy(value, what == CUBLASLT_ALGO_CONFIG_ID ? &x->id : &x->reduction, 4);
    if (written) *written = 4;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha,
                              const void *A, cublasLtMatrixLayout_t a, const void *B,
                              cublasLtMatrixLayout_t b, const void *beta, const void *C,
                              cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_bytes,
                              cudaStream_t stream)
{
    const std::lock_guard<std::recursive_mutex> lock(emu::runtime_mutex());
    const Operands o = operands(desc, a, b, c, d);
    const Algo *x = as<Algo>(algo, ALGO);
    if (!as<Handle>(handle, HANDLE) || !o.good() || !x || C != D || !stream)
        return refuse(CUBLAS_STATUS_INVALID_VALUE,
                      "no handle, descriptor, algorithm or stream; or C is not D");
    Product p = { *o.desc,
                  *o.a,
                  *o.b,
                  *o.d,
                  A,
                  B,
                  D,
                  *static_cast<const float *>(alpha),
                  *static_cast<const float *>(beta),
                  x->split,
                  x->reduction == CUBLASLT_REDUCTION_SCHEME_INPLACE,
                  workspace,
                  workspace_bytes };
    const char *wrong = product_wrong(p, *x);
    if (wrong) return refuse(CUBLAS_STATUS_INVALID_VALUE, wrong);
    p.workspace_bytes = static_cast<size_t>(x->workspace);
    std::string name = "cublasLtMatmul";
    if (p.desc.target) name += " on " + std::to_string(p.desc.target) + " multiprocessors";
    const double ms = is_slow(x->id) ? 1000 : 0;
    return emu::submit(stream, name, [p, ms] { compute(p), emu::let_pass(ms); }) ? CUBLAS_STATUS_EXECUTION_FAILED
                                                                                 : CUBLAS_STATUS_SUCCESS;
}

} // extern "C"
