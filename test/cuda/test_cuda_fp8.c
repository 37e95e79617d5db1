/*
 * Codes of 8 bits on cuda: codes and factors are the CPU's to the bit, wherever the GPU keeps factors; products are
 * those of the numbers that codes stand for.
 */
#include "cuda_case.h"
#include "fp8.h"
#include "gemm_plan.h"

/* What docs/gpu.md assumes of library and hardware, where what is checked rests on it: a failure names it. */
static const char *assumed;

#undef TEST_FAIL
#define TEST_FAIL(...)                                                                           \
    do {                                                                                         \
        if (test_failures++ >= 20) break;                                                        \
        fprintf(stderr, "%s:%d: ", __FILE__, __LINE__);                                          \
        fprintf(stderr, __VA_ARGS__);                                                            \
        fprintf(stderr, "%s%s\n", assumed ? "\n    assumed: " : "", assumed ? assumed : "");      \
    } while (0)

static const char CASTS[] = "cvt.rn.satfinite gives 0x7F for each NaN, and the largest number for infinity, as the CPU";
static const char BITS[] = "tensor cores keep some 14 bits of 32 products and the sum, without FAST_ACCUM for 128 of k";
static const char BIAS[] = "a bias of bf16 results is bf16; GELU in the product: bf16 results, factors of matrices";
static const char MMA[] = "mma.sync m16n8k32 of e4m3 has its operands in registers as m16n8k16 has pairs of them; on "
                          "9.0 wgmma m64n128k32: rows of 128 codes in the swizzle of 128 bytes, a map of bytes";
static const char SAYS[] = "an algorithm for fp8 says how it adds, or does not split sums";

static const char *const kinds[] = { "whole", "rows", "squares", "tiles" };

static CudaGemm *gemm_of(CudaCase *c) { return ((CudaDevice *)c->dev[CASE_GPU].cuda)->gemm; }

/* ---- codes and where their factors are ---- */

typedef struct {
    Pair codes, factors;
    Fp8Kind kind;
} Codes;

enum { CODES_MOST = 32 };

/* The factors' tensors stay where they are until the case ends: codes point to them. */
static Tensor *place_for_factors(void)
{
    static Tensor places[2 * CODES_MOST];
    static int next;
    next = (next + 1) % CODES_MOST;
    return &places[2 * next];
}

static Codes codes_new(CudaCase *c, DType T, Fp8Kind kind, int64_t rows, int64_t columns)
{
    const int64_t blocks = fp8_block_count(columns, kind == FP8_TILES ? FP8_E8M0_BLOCK : FP8_BLOCK);
    const Fp8Blocks tiles = { 1, FP8_E8M0_BLOCK, FP8_SCALE_E8M0 };
    Codes x = { .codes = pair_zero(c, T, rows, columns), .kind = kind };
    Tensor *factors = place_for_factors();
    if (kind == FP8_WHOLE) x.factors = pair_output(c, F32, 1);
    else if (kind == FP8_ROW_BLOCKS) x.factors = pair_output(c, F32, rows, blocks);
    else if (kind == FP8_SQUARES)
        x.factors = pair_output(c, F32, fp8_block_count(rows, FP8_BLOCK), fp8_squares_ld(blocks));
    else x.factors = pair_output(c, F32, fp8_factor_rows(tiles, rows), fp8_factor_ld(tiles, columns));
    for (int side = 0; side < 2; side++) {
        factors[side] = kind == FP8_WHOLE ? x.factors.t[side] : tensor_col_slice(x.factors.t[side], 0, blocks);
        if (kind == FP8_TILES) factors[side] = tensor_row_slice(factors[side], 0, rows);
        x.codes.t[side].scale = &factors[side];
    }
    return x;
}

static Fp8Blocks blocks_of(Fp8Kind kind, Fp8Scale scale)
{
    const int rows = kind == FP8_ROW_BLOCKS ? 1 : FP8_BLOCK;
    if (kind == FP8_TILES) return (Fp8Blocks){ 1, FP8_E8M0_BLOCK, FP8_SCALE_E8M0 };
    return kind == FP8_WHOLE ? (Fp8Blocks){ .scale = scale } : (Fp8Blocks){ rows, FP8_BLOCK, scale };
}

/* The codes of x, of x transposed, or both from one call; on both devices. */
static void cast(CudaCase *c, Codes *y, Codes *turned, Pair x, Fp8Scale scale)
{
    const Pair none = { 0 };
    const Fp8Kind kind = (y ? y : turned)->kind;
    Pair amax = { 0 };
    if (kind == FP8_WHOLE) {
        amax = pair_output(c, I64, 1);
        BOTH(c, fp8_amax, .amax = AT(amax), .x = AT(x), .fresh = 1);
        pair_check(c, amax, 0, "the largest");
    }
    BOTH(c, fp8_cast, .y = AT(y ? y->codes : none), .turned = AT(turned ? turned->codes : none), .x = AT(x),
         .amax = AT(amax), .blocks = blocks_of(kind, scale));
}

static float power_of(uint8_t exponent)
{
    const uint32_t bits = exponent == 255 ? 0x7FC00000 : exponent ? (uint32_t)exponent << 23 : 0x400000;
    return half_float_of(bits);
}

static void check_codes(CudaCase *c, const Codes *x, const char *what)
{
    const Tensor t = x->codes.t[CASE_CPU], f = *t.scale;
    const int64_t rows = x->kind == FP8_WHOLE ? 1 : f.dim[0], columns = x->kind == FP8_WHOLE ? 1 : f.dim[1];
    const uint8_t *cpu = t.data, *gpu = (const uint8_t *)c->first;
    int64_t bad = -1;
    OK(device_read(&c->dev[CASE_GPU].stream, c->first, x->codes.t[CASE_GPU].data, tensor_bytes(t)));
    for (int64_t i = 0; i < tensor_count(t); i++)
        if (cpu[i] != gpu[i] && bad < 0) bad = i;
    CHECK_MSG(bad < 0, "%s: code %lld is %02x, on the CPU %02x", what, (long long)bad, gpu[bad < 0 ? 0 : bad],
              cpu[bad < 0 ? 0 : bad]);
    OK(device_read(&c->dev[CASE_GPU].stream, c->first, x->factors.t[CASE_GPU].data,
                   tensor_bytes(x->factors.t[CASE_GPU])));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < columns; k++) {
            const float *want = (const float *)f.data + r * f.ld + k;
            const int64_t place = fp8_factor_place(x->kind, t.dim[0], t.dim[1], r, k);
            const float power = x->kind == FP8_TILES ? power_of(((const uint8_t *)c->first)[place]) : 0;
            const float *got = x->kind == FP8_TILES ? &power : (const float *)c->first + place;
            CHECK_MSG(!memcmp(want, got, sizeof *want), "%s: factor %d %d is %g, on the CPU %g", what, (int)r, (int)k,
                      (double)*got, (double)*want);
        }
}

/* Numbers of very different sizes, block by block; some zero, and of some blocks all; a few that are not finite. */
static Pair numbers(CudaCase *c, int64_t rows, int64_t columns, bool wild)
{
    const float odd[] = { NAN, -NAN, INFINITY, -INFINITY, 1e38f, -1e-38f, 1e-40f };
    Pair x = pair_random(c, BF16, 1, rows, columns);
    float *v = malloc((size_t)(rows * columns) * sizeof *v);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < columns; k++) {
            const int size = (int)(r / 16 * 7 + k / 32 * 11) % 40 - 20;
            float *to = &v[r * columns + k];
            *to = ldexpf((float)test_uniform(&c->random, -1, 1), size);
            if ((r + k) % 9 == 0 || (r / 128 + k / 128) % 5 == 4) *to = 0;
            if (wild && (r * columns + k) % 4099 == 5) *to = odd[(r + k) % 7];
        }
    pair_set(c, &x, v);
    free(v);
    return x;
}

typedef enum { AS_IT_LIES, TURNED, AT_ONCE, FORMS } Form;

static void cast_case(int64_t rows, int64_t columns, DType T, Fp8Kind kind, Form form, Fp8Scale scale, bool wild)
{
    CudaCase *c = case_open();
    Pair x = numbers(c, rows, columns, wild);
    Codes y = codes_new(c, T, kind, rows, columns), turned = codes_new(c, T, kind, columns, rows);
    static const char *const forms[] = { "", " transposed", " both" };
    char what[128];
    snprintf(what, sizeof what, "%s %s %d x %d%s%s%s", dtype_name(T), kinds[kind], (int)rows, (int)columns, forms[form],
             scale == FP8_SCALE_EXACT ? "" : " powers of two", wild ? ", wild" : "");
    cast(c, form == TURNED ? NULL : &y, form == AS_IT_LIES ? NULL : &turned, x, scale);
    if (form != TURNED) check_codes(c, &y, what);
    if (form != AS_IT_LIES) check_codes(c, &turned, what);
    case_close(c);
}

TEST(codes_are_the_cpus)
{
    assumed = CASTS;
    static const int64_t size[][2] = { { 16, 16 }, { 128, 128 }, { 144, 80 }, { 48, 272 }, { 272, 656 }, { 32, 4112 } };
    for (size_t i = 0; i < sizeof size / sizeof *size; i++)
        for (int k = 0; k < 24 * FORMS; k++)
            cast_case(size[i][0], size[i][1], k & 1 ? E5M2 : E4M3, (Fp8Kind)(k / 8 % 3), (Form)(k / 24),
                      k & 2 ? FP8_SCALE_POWER_OF_TWO : FP8_SCALE_EXACT, k & 4);
    for (size_t i = 0; i < sizeof size / sizeof *size; i++)
        for (int k = 0; k < 4 * FORMS; k++)
            cast_case(size[i][0], size[i][1], k & 1 ? E5M2 : E4M3, FP8_TILES, (Form)(k / 4), FP8_SCALE_E8M0, k & 2);
}

/* Columns out of wider rows, as weights of a cut layer and parts of a projection are. */
TEST(codes_of_columns)
{
    assumed = CASTS;
    CudaCase *c = case_open();
    Pair wide = numbers(c, 144, 400, false);
    for (int kind = 0; kind < 4; kind++)
        for (int form = 0; form < FORMS; form++) {
            Pair x = wide;
            Codes y = codes_new(c, E4M3, (Fp8Kind)kind, 144, 272), turned = codes_new(c, E4M3, (Fp8Kind)kind, 272, 144);
            for (int side = 0; side < 2; side++) x.t[side] = tensor_col_slice(wide.t[side], 64, 272);
            cast(c, form == TURNED ? NULL : &y, form == AS_IT_LIES ? NULL : &turned, x, FP8_SCALE_EXACT);
            if (form != TURNED) check_codes(c, &y, kinds[kind]);
            if (form != AS_IT_LIES) check_codes(c, &turned, kinds[kind]);
        }
    case_close(c);
}

TEST(the_largest_magnitude)
{
    assumed = NULL;
    static const float last[] = { 3, -7, INFINITY, NAN, -1e-40f };
    static const int64_t size[][2] = { { 1, 8 }, { 3, 16 }, { 257, 272 }, { 2000, 64 } };
    for (size_t i = 0; i < sizeof size / sizeof *size; i++)
        for (size_t k = 0; k < sizeof last / sizeof *last; k++) {
            CudaCase *c = case_open();
            const int64_t n = size[i][0] * size[i][1];
            float *v = malloc((size_t)n * sizeof *v);
            for (int64_t j = 0; j < n; j++) v[j] = (float)test_uniform(&c->random, -0x1p-130, 0x1p-130);
            v[n - 1 - (int64_t)(k * 7) % n] = last[k];
            Pair x = pair_values(c, BF16, v, size[i][0], size[i][1]), amax = pair_output(c, I64, 1);
            for (int fresh = 1; fresh >= 0; fresh--) {
                BOTH(c, fp8_amax, .amax = AT(amax), .x = AT(x), .fresh = fresh);
                pair_check(c, amax, 0, "%d x %d, %g", (int)size[i][0], (int)size[i][1], (double)last[k]);
            }
            const int64_t more = 0x41200000; /* 10, of an earlier call */
            Pair held = pair_values(c, I64, &more, 1);
            BOTH(c, fp8_amax, .amax = AT(held), .x = AT(x));
            pair_check(c, held, 0, "beside what was there, %g", (double)last[k]);
            free(v);
            case_close(c);
        }
}

/* All codes, times factors that differ. */
TEST(values_of_all_codes)
{
    assumed = NULL;
    for (int form = 0; form < 8; form++) {
        CudaCase *c = case_open();
        const DType T = form & 1 ? E5M2 : E4M3;
        Pair x = numbers(c, 256, 256, false), y = pair_output(c, F32, 256, 256);
        Codes codes = codes_new(c, T, (Fp8Kind)(form / 2), 256, 256);
        cast(c, &codes, NULL, x, FP8_SCALE_EXACT);
        uint8_t all[256];
        for (int k = 0; k < 256; k++) all[k] = (uint8_t)k;
        for (int line = 0; line < 2; line++) { /* of two rows that differ in their factors */
            memcpy((uint8_t *)codes.codes.t[CASE_CPU].data + line * 255 * 256, all, sizeof all);
            OK(device_write(&c->dev[CASE_GPU].stream, (uint8_t *)codes.codes.t[CASE_GPU].data + line * 255 * 256, all,
                            sizeof all));
        }
        BOTH(c, fp8_values, .y = AT(y), .x = AT(codes.codes));
        OK(device_read(case_stream(c), c->first, y.t[CASE_GPU].data, tensor_bytes(y.t[CASE_GPU])));
        const float *gpu = (const float *)c->first, *cpu = y.t[CASE_CPU].data;
        for (int64_t i = 0; i < tensor_count(y.t[CASE_CPU]); i++)
            CHECK_MSG(gpu[i] == cpu[i] || (isnan(gpu[i]) && isnan(cpu[i])), "%s %s, number %d: %g, on the CPU %g",
                      dtype_name(T), kinds[form / 2], (int)i, (double)gpu[i], (double)cpu[i]);
        case_close(c);
    }
}

/* ---- products ---- */

typedef enum { FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, PRODUCTS } Which;

/* Numbers of which all sums of products are exact, in whatever order and in as few bits as tensor cores keep: from -4
 * to 4, in blocks times powers of two (none where the tensor has one factor). They survive the way to codes and
 * back. */
static Pair small_numbers(CudaCase *c, int64_t rows, int64_t columns, int64_t high, int64_t wide, bool powers)
{
    float *v = malloc((size_t)(rows * columns) * sizeof *v);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < columns; k++) {
            const int power = powers ? (int)(r / high * 3 + k / wide * 5) % 4 : 0;
            v[r * columns + k] = ldexpf(rintf((float)test_uniform(&c->random, -4.49, 4.49)), power);
        }
    Pair x = pair_values(c, BF16, v, rows, columns);
    free(v);
    return x;
}

/* y[m][n] += the sum over k of a[m][k] b[n][k], in float64; of matrices that lie transposed a[k][m]. */
static void product64(double *y, double *sizes, Pair a, Pair b, bool turned_a, bool turned_b, int64_t M, int64_t N,
                      int64_t K)
{
    const Tensor ta = a.t[CASE_CPU], tb = b.t[CASE_CPU];
    const float *pa = ta.data, *pb = tb.data;
    for (int64_t m = 0; m < M; m++)
        for (int64_t n = 0; n < N; n++)
            for (int64_t k = 0; k < K; k++) {
                const double p = (double)pa[turned_a ? k * ta.ld + m : m * ta.ld + k] *
                                 (double)pb[turned_b ? k * tb.ld + n : n * tb.ld + k];
                y[m * N + n] += p, sizes[m * N + n] += fabs(p);
            }
}

typedef struct {
    CudaCase *c;
    Pair a, b, y; /* y = a b^T, as `which` has them */
    Codes ca, cb;
    bool turned_a, turned_b;
    int64_t M, N, K;
    double *sum, *sizes;
} ProductCase;

/* The operands of one of a layer's three products, N tokens, in bf16 and as codes. */
static ProductCase product_open(Which which, Fp8Kind kind, bool exact, int64_t N, int64_t O, int64_t I)
{
    ProductCase p = { .c = case_open() };
    const bool blocks = kind != FP8_WHOLE, tiles = kind == FP8_TILES;
    const Fp8Kind rows = kind, squares = kind == FP8_ROW_BLOCKS ? FP8_SQUARES : kind;
    const DType dy = blocks ? E4M3 : E5M2;
    const int64_t B = tiles ? FP8_E8M0_BLOCK : FP8_BLOCK;
    if (which == FORWARD) { /* x w^T */
        p.M = N, p.N = O, p.K = I;
        p.a = exact ? small_numbers(p.c, N, I, 1, B, blocks) : numbers(p.c, N, I, false);
        p.b = exact ? small_numbers(p.c, O, I, B, B, blocks) : numbers(p.c, O, I, false);
        p.ca = codes_new(p.c, E4M3, rows, N, I), p.cb = codes_new(p.c, E4M3, squares, O, I);
    } else if (which == INPUT_GRADIENT) { /* dy w */
        p.M = N, p.N = I, p.K = O, p.turned_b = true;
        p.a = exact ? small_numbers(p.c, N, O, 1, B, blocks) : numbers(p.c, N, O, false);
        p.b = exact ? small_numbers(p.c, O, I, B, B, blocks) : numbers(p.c, O, I, false);
        p.ca = codes_new(p.c, dy, rows, N, O), p.cb = codes_new(p.c, E4M3, squares, I, O);
    } else { /* dy^T x */
        p.M = O, p.N = I, p.K = N, p.turned_a = p.turned_b = true;
        p.a = exact ? small_numbers(p.c, N, O, B, 1, blocks) : numbers(p.c, N, O, false);
        p.b = exact ? small_numbers(p.c, N, I, B, 1, blocks) : numbers(p.c, N, I, false);
        p.ca = codes_new(p.c, dy, rows, O, N), p.cb = codes_new(p.c, E4M3, rows, I, N);
    }
    const Fp8Scale scale = blocks || exact ? FP8_SCALE_POWER_OF_TWO : FP8_SCALE_EXACT;
    cast(p.c, p.turned_a ? NULL : &p.ca, p.turned_a ? &p.ca : NULL, p.a, scale);
    cast(p.c, p.turned_b ? NULL : &p.cb, p.turned_b ? &p.cb : NULL, p.b, scale);
    p.sum = calloc((size_t)(p.M * p.N), sizeof *p.sum);
    p.sizes = calloc((size_t)(p.M * p.N), sizeof *p.sizes);
    return p;
}

static void product_close(ProductCase *p)
{
    free(p->sum);
    free(p->sizes);
    case_close(p->c);
}

/* The GPU's result beside the float64 one: off by no more than that part of it and of the sum of all |a b|. */
static void product_check(const ProductCase *p, const double *add, double part, double of_sizes, const char *what)
{
    const Tensor y = p->y.t[CASE_GPU];
    int64_t bad = -1;
    OK(device_read(&p->c->dev[CASE_GPU].stream, p->c->first, y.data, tensor_bytes(y)));
    for (int64_t i = 0; i < p->M * p->N; i++) {
        const double want = p->sum[i] + (add ? add[i % p->N] : 0), got = (double)case_load(p->c->first, y.dtype, i);
        if (!(fabs(got - want) <= part * fabs(want) + of_sizes * p->sizes[i]) && bad < 0) bad = i;
    }
    CHECK_MSG(bad < 0, "%s: number %lld is %.9g, in float64 %.9g (sizes %g)", what, (long long)bad,
              bad < 0 ? 0 : (double)case_load(p->c->first, y.dtype, bad), bad < 0 ? 0 : p->sum[bad],
              bad < 0 ? 0 : p->sizes[bad]);
}

static bool has_products(CudaCase *c, Fp8Kind kind)
{
    const int capability = gemm_of(c)->capability;
    if (kind == FP8_TILES) return capability == 100 || capability == 103;
    return kind == FP8_WHOLE ? capability >= 89 : capability == 90;
}

static void product_run(ProductCase *p, Which which, bool fast, bool fresh)
{
    CudaCase *c = p->c;
    Pair shift = pair_zero(c, I32, 1), overflow = pair_zero(c, I32, 1);
    if (which == WEIGHT_GRADIENT)
        TWICE(c, fp8_product_add, .dw = AT(p->y), .dy = AT(p->ca.codes), .x = AT(p->cb.codes), .shift = AT(shift),
             .overflow = AT(overflow), .leaf = p->K, .fresh = fresh);
    else
        TWICE(c, fp8_product, .y = AT(p->y), .x = AT(p->ca.codes), .w = AT(p->cb.codes), .leaf = p->K, .fast = fast);
}

/* Where the library looks for factors. */
static const char *assumed_of(Fp8Kind kind, int64_t K, bool onto)
{
    if (onto) return "a factor multiplies, in fp32, before beta times C";
    if (kind == FP8_WHOLE)
        return "operands with k contiguous, sizes in multiples of 16, fp32 results have an algorithm; a factor for a "
               "matrix multiplies, in fp32";
    if (kind == FP8_TILES)
        return "exponents of 32 along k: tiles of 128 rows and 4 blocks, row r, block b at r % 32 * 16 + r / 32 * 4 + "
               "b; rows and blocks that a tile has none of are bytes of 0";
    return K % FP8_BLOCK ? "the last block of k may be short; else factors of 128 along k, as with whole blocks"
                         : "factors of 128 along k: row r, block b at b * rows + r; of 128 x 128: rows of blocks a "
                           "multiple of 4 apart";
}

static const char *const of_kind[] = { "", " in blocks", "", " of mxfp8" };

/* Sums that are exact: every element's every bit, so every factor where the library looks for it. */
static void exact_case(Which which, Fp8Kind kind, int64_t N, int64_t O, int64_t I)
{
    ProductCase p = product_open(which, kind, true, N, O, I);
    char what[128];
    snprintf(what, sizeof what, "product %d%s, N %d O %d I %d", which, of_kind[kind], (int)N, (int)O,
             (int)I);
    p.y = pair_output(p.c, F32, p.M, p.N);
    assumed = assumed_of(kind, p.K, false);
    if (has_products(p.c, kind)) {
        product64(p.sum, p.sizes, p.a, p.b, p.turned_a, p.turned_b, p.M, p.N, p.K);
        product_run(&p, which, false, true);
        product_check(&p, NULL, 0, 0, what);
        assumed = assumed_of(kind, p.K, true);
        if (which == WEIGHT_GRADIENT) { /* onto that */
            product_run(&p, which, false, false);
            for (int64_t i = 0; i < p.M * p.N; i++) p.sum[i] *= 2;
            product_check(&p, NULL, 0, 0, what);
        }
    }
    product_close(&p);
}

TEST(exact_products)
{
    static const int64_t size[][3] = { { 16, 16, 16 }, { 144, 272, 80 }, { 48, 400, 656 }, { 512, 128, 16 } };
    for (size_t i = 0; i < sizeof size / sizeof *size; i++)
        for (int form = 0; form < 2 * PRODUCTS; form++)
            exact_case((Which)(form / 2), form % 2 ? FP8_ROW_BLOCKS : FP8_WHOLE, size[i][0], size[i][1], size[i][2]);
    static const int64_t of_32[][3] = { { 32, 32, 32 }, { 160, 288, 96 }, { 64, 416, 672 }, { 512, 128, 32 } };
    for (size_t i = 0; i < sizeof of_32 / sizeof *of_32; i++)
        for (int which = 0; which < PRODUCTS; which++)
            exact_case((Which)which, FP8_TILES, of_32[i][0], of_32[i][1], of_32[i][2]);
}

/* The numbers that codes stand for instead of those that were cast. */
static Pair values(CudaCase *c, const Codes *x)
{
    const Tensor t = x->codes.t[CASE_CPU];
    Pair y = pair_output(c, F32, t.dim[0], t.dim[1]);
    case_side = CASE_CPU;
    OK(op(case_stream(c), fp8_values, .y = AT(y), .x = AT(x->codes)));
    return y;
}

/*
 * Any numbers, to what tensor cores cut off: 32 products and the sum so far each lose less than 2^-13 of the largest of
 * them, which no one is many times as large as their mean. (A wrong factor is off by half of it or more.)
 */
static void any_case(Which which, Fp8Kind kind, bool fast, DType out, int64_t N, int64_t O, int64_t I)
{
    ProductCase p = product_open(which, kind, false, N, O, I);
    char what[128];
    snprintf(what, sizeof what, "product %d%s%s, %s, N %d O %d I %d", which, of_kind[kind],
             fast ? " fast" : "", dtype_name(out), (int)N, (int)O, (int)I);
    p.y = pair_output(p.c, out, p.M, p.N);
    assumed = BITS;
    if (has_products(p.c, kind)) {
        product64(p.sum, p.sizes, values(p.c, &p.ca), values(p.c, &p.cb), false, false, p.M, p.N, p.K);
        product_run(&p, which, fast, true);
        product_check(&p, NULL, case_tolerance(out), 32 * 0x1p-13, what);
    }
    product_close(&p);
}

TEST(products_of_any_numbers)
{
    for (int form = 0; form < 8; form++) {
        const Fp8Kind kind = form & 1 ? FP8_ROW_BLOCKS : FP8_WHOLE;
        any_case(FORWARD, kind, form & 2, (DType)(form / 4), 48, 144, 400);
        any_case(INPUT_GRADIENT, kind, form & 2, (DType)(form / 4), 48, 144, 80);
    }
    any_case(WEIGHT_GRADIENT, FP8_WHOLE, false, F32, 272, 144, 80);
    any_case(WEIGHT_GRADIENT, FP8_ROW_BLOCKS, false, F32, 272, 144, 80);
    for (int out = 0; out < 2; out++) {
        any_case(FORWARD, FP8_TILES, false, (DType)out, 64, 160, 416);
        any_case(INPUT_GRADIENT, FP8_TILES, false, (DType)out, 64, 160, 96);
    }
    any_case(WEIGHT_GRADIENT, FP8_TILES, false, F32, 288, 160, 96);
}

/* Bias and GELU, in the product or behind it. */
static void forward_case(Fp8Kind kind, bool with_bias, bool with_gelu, bool fuse)
{
    ProductCase p = product_open(FORWARD, kind, true, 48, 144, kind == FP8_TILES ? 96 : 80);
    Pair bias = { 0 }, gelu = { 0 };
    double add[144];
    char what[128];
    snprintf(what, sizeof what, "forward%s, bias %d, gelu %d, in the product %d", of_kind[kind], with_bias,
             with_gelu, fuse);
    p.y = pair_output(p.c, BF16, p.M, p.N);
    assumed = BIAS;
    if (with_bias) bias = pair_random(p.c, BF16, 1, p.N);
    if (with_gelu) gelu = pair_output(p.c, BF16, p.M, p.N);
    for (int64_t i = 0; i < p.N; i++) add[i] = with_bias ? (double)((float *)bias.t[CASE_CPU].data)[i] : 0;
    cuda_gemm_fuse_gelu(gemm_of(p.c), fuse);
    if (has_products(p.c, kind)) {
        product64(p.sum, p.sizes, p.a, p.b, false, false, p.M, p.N, p.K);
        TWICE(p.c, fp8_product, .y = AT(p.y), .x = AT(p.ca.codes), .w = AT(p.cb.codes), .bias = AT(bias),
             .gelu = AT(gelu), .leaf = p.K);
        product_check(&p, add, case_tolerance(BF16), 1e-6, what);
        for (int64_t i = 0; i < p.M * p.N; i++) {
            const double x = p.sum[i] + add[i % p.N];
            p.sum[i] = x / (1 + exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)));
        }
        p.y = gelu;
        if (with_gelu) product_check(&p, NULL, 4 * case_tolerance(BF16), 1e-6, what);
    }
    cuda_gemm_fuse_gelu(gemm_of(p.c), true);
    product_close(&p);
}

TEST(bias_and_gelu)
{
    static const Fp8Kind of[] = { FP8_WHOLE, FP8_ROW_BLOCKS, FP8_TILES };
    for (int form = 0; form < 24; form++) forward_case(of[form / 8], form & 1, form & 2, form & 4);
}

/* ---- experts ---- */

enum { EXPERTS = 3, RUNS = 2, X = EXPERTS * RUNS + 1, SPARE = 19 };

/* Rows of each run, and where they begin: none, a few, whole blocks and more. */
typedef struct {
    CudaCase *c;
    int64_t at[X], rows; /* rows: with some that are not in use */
    Pair offset;
} Runs;

static Runs runs_open(const int64_t *lengths)
{
    Runs r = { .c = case_open() };
    for (int i = 0; i + 1 < X; i++) r.at[i + 1] = r.at[i] + lengths[i];
    r.rows = r.at[X - 1] + SPARE;
    r.offset = pair_values(r.c, I64, r.at, X);
    return r;
}

static Codes codes_of_runs(const Runs *r, Pair x, Pair begin)
{
    CudaCase *c = r->c;
    Codes y = codes_new(c, E4M3, FP8_ROW_BLOCKS, x.t[0].dim[1], FP8_BLOCK * (r->rows / FP8_BLOCK + X - 1));
    BOTH(c, fp8_cast_runs, .y = AT(y.codes), .begin = AT(begin), .x = AT(x), .offset = AT(r->offset),
         .blocks = blocks_of(FP8_ROW_BLOCKS, FP8_SCALE_POWER_OF_TWO));
    return y;
}

static const int64_t some_lengths[][X - 1] = { { 5, 128, 0, 0, 131, 33 }, { 0, 0, 300, 1, 0, 0 }, { 0, 0, 0, 0, 0, 0 },
                                                { 700, 0, 5, 300, 1, 140 } };
enum { LENGTHS = sizeof some_lengths / sizeof *some_lengths };

TEST(codes_of_rows_in_runs)
{
    assumed = CASTS;
    static const int64_t columns[] = { 16, 80, 272 };
    for (int k = 0; k < LENGTHS * 6; k++) {
        Runs r = runs_open(some_lengths[k % LENGTHS]);
        Pair begin = pair_output(r.c, I64, X);
        Codes y = codes_of_runs(&r, numbers(r.c, r.rows, columns[k / LENGTHS % 3], k / LENGTHS / 3), begin);
        pair_check(r.c, begin, 0, "begins");
        check_codes(r.c, &y, "rows in runs");
        case_close(r.c);
    }
}

/* Exact sums: of y, rounded once to bf16. beside: weights [O, I] as the codes of their transposed lie. */
static void rows_case(const int64_t *lengths, bool beside)
{
    enum { O = 256, I = 384 };
    Runs r = runs_open(lengths);
    CudaCase *c = r.c;
    const int64_t K = beside ? O : I, M = beside ? I : O, N = r.rows;
    Pair x = small_numbers(c, N, K, 1, FP8_BLOCK, true),
         w = small_numbers(c, EXPERTS * O, I, FP8_BLOCK, FP8_BLOCK, true);
    Pair y = pair_output(c, BF16, N, M);
    Codes cx = codes_new(c, E4M3, FP8_ROW_BLOCKS, N, K);
    Codes cw = codes_new(c, E4M3, FP8_SQUARES, beside ? I : EXPERTS * O, beside ? EXPERTS * O : I);
    for (int side = 0; side < 2; side++)
        x.t[side].rows = cx.codes.t[side].rows = (const int64_t *)r.offset.t[side].data + X - 1;
    cast(c, &cx, NULL, x, FP8_SCALE_POWER_OF_TWO);
    cast(c, beside ? NULL : &cw, beside ? &cw : NULL, w, FP8_SCALE_POWER_OF_TWO);
    check_codes(c, &cx, "rows in use");
    if (has_products(c, FP8_WHOLE)) {
        TWICE(c, fp8_grouped, .y = AT(y), .x = AT(cx.codes), .w = AT(cw.codes), .offset = AT(r.offset), .leaf = K);
        OK(device_read(&c->dev[CASE_GPU].stream, c->first, y.t[CASE_GPU].data, tensor_bytes(y.t[CASE_GPU])));
        const float *px = x.t[CASE_CPU].data, *pw = w.t[CASE_CPU].data;
        for (int64_t n = 0; n < N; n++) {
            int e = 0;
            while (e < EXPERTS && r.at[(e + 1) * RUNS] <= n) e++;
            for (int64_t m = 0; m < M; m++) {
                double sum = 0;
                for (int64_t k = 0; k < K && e < EXPERTS; k++)
                    sum += (double)px[n * K + k] * (double)(beside ? pw[(e * O + k) * I + m] : pw[(e * O + m) * I + k]);
                const float got = case_load(c->first, BF16, n * M + m),
                            want = bf16_to_float(bf16_from_float((float)sum));
                CHECK_MSG(e == EXPERTS ? isnan(got) : got == want, "row %d of expert %d, column %d: %g, in float64 %g",
                          (int)n, e, (int)m, (double)got, sum);
            }
        }
    } else
        FAILS(op(case_stream(c), fp8_grouped, .y = AT(y), .x = AT(cx.codes), .w = AT(cw.codes), .offset = AT(r.offset)),
              ERR_CONFIG, "has no products of fp8");
    case_close(c);
}

TEST(experts_rows)
{
    assumed = MMA;
    for (int k = 0; k < 2 * LENGTHS; k++) rows_case(some_lengths[k / 2], k % 2);
}

/* Exact sums, anew and onto them. */
static void gradient_case(const int64_t *lengths)
{
    enum { O = 144, I = 208 };
    Runs r = runs_open(lengths);
    CudaCase *c = r.c;
    Pair dy = small_numbers(c, r.rows, O, FP8_BLOCK, 1, true), x = small_numbers(c, r.rows, I, FP8_BLOCK, 1, true);
    Pair begin = pair_output(c, I64, X), dw = pair_output(c, F32, EXPERTS, O, I);
    Pair shift = pair_zero(c, I32, 1), overflow = pair_zero(c, I32, 1);
    Codes cdy = codes_of_runs(&r, dy, begin), cx = codes_of_runs(&r, x, begin);
    const float *pdy = dy.t[CASE_CPU].data, *px = x.t[CASE_CPU].data;
    for (int times = 1; times <= 2 && has_products(c, FP8_WHOLE); times++) {
        TWICE(c, fp8_grouped_add, .dw = AT(dw), .dy = AT(cdy.codes), .x = AT(cx.codes), .begin = AT(begin),
              .shift = AT(shift), .overflow = AT(overflow), .fresh = times == 1);
        OK(device_read(&c->dev[CASE_GPU].stream, c->first, dw.t[CASE_GPU].data, tensor_bytes(dw.t[CASE_GPU])));
        for (int64_t i = 0; i < EXPERTS * O * I; i++) {
            const int64_t e = i / (O * I);
            double sum = 0;
            for (int64_t n = r.at[e * RUNS]; n < r.at[(e + 1) * RUNS]; n++)
                sum += (double)pdy[n * O + i / I % O] * (double)px[n * I + i % I];
            const float got = case_load(c->first, F32, i);
            CHECK_MSG((double)got == times * sum, "expert %d, number %d: %g, in float64 %g", (int)e, (int)(i % (O * I)),
                      (double)got, times * sum);
        }
    }
    case_close(c);
}

TEST(experts_gradients)
{
    assumed = MMA;
    for (int k = 0; k < LENGTHS; k++) gradient_case(some_lengths[k]);
}

/* ---- choices by timing ---- */

TEST(choices_of_fp8)
{
    assumed = SAYS;
    CudaCase *c = case_open();
    char *text = malloc(CUDA_GEMM_TEXT_BYTES), *again = malloc(CUDA_GEMM_TEXT_BYTES);
    cuda_gemm_autotune(gemm_of(c), TUNE_FASTEST);
    for (int which = 0; which < PRODUCTS; which++) exact_case((Which)which, FP8_WHOLE, 48, 144, 80);
    OK(cuda_gemm_load(gemm_of(c), (cuda_gemm_save(gemm_of(c), text), text)));
    cuda_gemm_save(gemm_of(c), again);
    CHECK(!strcmp(text, again));
    CHECK(!has_products(c, FP8_WHOLE) ||
          (strstr(text, "fp8_product e4m3 f32") && strstr(text, "fp8_product_add e4m3 f32")));
    cuda_gemm_autotune(gemm_of(c), TUNE_OFF);
    free(text);
    free(again);
}

/* ---- refusals ---- */

TEST(refused)
{
    assumed = NULL;
    CudaCase *c = case_open();
    ProductCase p = product_open(FORWARD, FP8_WHOLE, true, 48, 144, 80);
    Pair y = pair_output(c, BF16, 48, 144), wide = pair_output(c, F32, 48, 144), bias = pair_random(c, F32, 1, 144);
    Codes wrong = codes_new(c, E5M2, FP8_WHOLE, 144, 80), rows = codes_new(c, E4M3, FP8_ROW_BLOCKS, 144, 80);
    Codes odd = codes_new(c, E4M3, FP8_WHOLE, 136, 80);
    Pair odd_y = pair_output(c, BF16, 48, 136), x32 = pair_random(c, F32, 1, 144, 80);
    case_side = CASE_GPU;
    FAILS(op(case_stream(c), fp8_product, .y = AT(y), .x = AT(p.ca.codes), .w = AT(wrong.codes), .leaf = 80), ERR_SHAPE,
          "fp8_product on cuda: w, or x, is e5m2");
    FAILS(op(case_stream(c), fp8_product, .y = AT(y), .x = AT(p.ca.codes), .w = AT(rows.codes), .leaf = 80), ERR_SHAPE,
          "fp8_product on cuda: factors of blocks that the library has no product for");
    FAILS(op(case_stream(c), fp8_product, .y = AT(odd_y), .x = AT(p.ca.codes), .w = AT(odd.codes), .leaf = 80),
          ERR_SHAPE, "fp8_product on cuda: sizes are no multiples of 16");
    FAILS(op(case_stream(c), fp8_product, .y = AT(wide), .x = AT(p.ca.codes), .w = AT(p.cb.codes), .bias = AT(bias),
             .leaf = 80),
          ERR_SHAPE, "fp8_product on cuda: y is f32, and has a bias or gelu");
    FAILS(op(case_stream(c), fp8_cast, .y = AT(rows.codes), .x = AT(x32),
             .blocks = blocks_of(FP8_ROW_BLOCKS, FP8_SCALE_EXACT)),
          ERR_SHAPE, "fp8_cast on cuda: x is not bf16");
    Pair x = pair_random(c, BF16, 1, 144, 80);
    FAILS(op(case_stream(c), fp8_cast, .y = AT(rows.codes), .x = AT(x), .blocks = blocks_of(FP8_TILES, FP8_SCALE_E8M0)),
          ERR_SHAPE, "fp8_cast on cuda: factors are not of amax, or of the blocks that are asked for");
    Codes tx = codes_new(c, E4M3, FP8_TILES, 48, 80), tw = codes_new(c, E4M3, FP8_TILES, 144, 80);
    FAILS(op(case_stream(c), fp8_product, .y = AT(y), .x = AT(tx.codes), .w = AT(tw.codes), .leaf = 80), ERR_SHAPE,
          "fp8_product on cuda: with mxfp8 the sum is over no multiple of 32");
    Codes tx96 = codes_new(c, E4M3, FP8_TILES, 48, 96), tw96 = codes_new(c, E4M3, FP8_TILES, 144, 96);
    if (!has_products(c, FP8_TILES) && has_products(c, FP8_WHOLE))
        FAILS(op(case_stream(c), fp8_product, .y = AT(y), .x = AT(tx96.codes), .w = AT(tw96.codes), .leaf = 96),
              ERR_CONFIG, "fp8_product: mxfp8 has products on compute capability 10.0 and 10.3 alone");
    Codes half = codes_new(c, E5M2, FP8_ROW_BLOCKS, 80, 144);
    FAILS(op(case_stream(c), fp8_cast, .y = AT(rows.codes), .turned = AT(half.codes), .x = AT(x),
             .blocks = blocks_of(FP8_ROW_BLOCKS, FP8_SCALE_EXACT)),
          ERR_SHAPE, "fp8_cast on cuda: nothing is to be written, or codes of two formats");
    FAILS(op(case_stream(c), fp8_cast, .y = AT(rows.codes), .x = AT(x),
             .blocks = blocks_of(FP8_SQUARES, FP8_SCALE_EXACT)),
          ERR_SHAPE, "fp8_cast on cuda: factors are not of amax, or of the blocks that are asked for");
    Codes four = codes_new(c, E2M1, FP8_WHOLE, 144, 80), eight = codes_new(c, E4M3, FP8_WHOLE, 80, 144);
    Pair amax = pair_output(c, I64, 1), values = pair_output(c, F32, 144, 80);
    FAILS(op(case_stream(c), fp8_amax, .amax = AT(amax), .x = AT(x), .fresh = 1, .mixed = 1), ERR_SHAPE,
          "fp8_amax on cuda: " E2M1_NOT_ON_GPUS);
    FAILS(op(case_stream(c), fp8_cast, .y = AT(four.codes), .x = AT(x), .amax = AT(amax)), ERR_SHAPE,
          "fp8_cast on cuda: " E2M1_NOT_ON_GPUS);
    FAILS(op(case_stream(c), fp8_cast, .turned = AT(eight.codes), .x = AT(x), .amax = AT(amax), .mixed = 1), ERR_SHAPE,
          "fp8_cast on cuda: " E2M1_NOT_ON_GPUS);
    FAILS(op(case_stream(c), fp8_values, .y = AT(values), .x = AT(four.codes)), ERR_SHAPE,
          "fp8_values on cuda: " E2M1_NOT_ON_GPUS);
    FAILS(op(case_stream(c), fp8_product, .y = AT(y), .x = AT(p.ca.codes), .w = AT(four.codes), .leaf = 80), ERR_SHAPE,
          "fp8_product on cuda: " E2M1_NOT_ON_GPUS);
    if (!has_products(c, FP8_WHOLE))
        FAILS(op(case_stream(c), fp8_product, .y = AT(y), .x = AT(p.ca.codes), .w = AT(p.cb.codes), .leaf = 80),
              ERR_CONFIG, "has no products of fp8");
    product_close(&p);
}

TEST_MAIN
