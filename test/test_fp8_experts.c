/*
 * Products of experts by 8-bit operands (src/cpu/fp8.c, src/cpu/grouped.c): codes of rows in runs against those of each
 * run alone, products against float64 loops over the numbers that codes stand for, in every build of the kernels.
 */
#include <math.h>

#include "base/fp8.h"
#include "test.h"
#include "tested_op.h"

enum { EXPERTS = 3, RUNS = 2, X = EXPERTS * RUNS + 1 };

/* Rows of each run: none, a few, a block exactly, more than one. */
static const int64_t lengths[X - 1] = { 5, 128, 0, 0, 131, 33 };
enum { ROWS = 5 + 128 + 131 + 33, SPARE = 20 };

static void offsets(int64_t *offset)
{
    offset[0] = 0;
    for (int i = 0; i + 1 < X; i++) offset[i + 1] = offset[i] + lengths[i];
}

static void open_on(Device *dev, Isa isa, int threads)
{
    OK(device_open(dev, (DeviceChoice){ .threads = threads, .isa = isa, .staging_bytes = 1 << 24 }));
}

/* Codes and factors that the caller frees; both begin as what no cast writes. */
typedef struct {
    Tensor codes, factors;
} Codes;

static void codes_alloc(Codes *c, int64_t rows, int64_t columns, Fp8Blocks b)
{
    c->codes = tensor_of(malloc((size_t)(rows * columns)), E4M3, rows, columns);
    c->factors = tensor_of(NULL, F32, fp8_block_count(rows, b.rows), fp8_block_count(columns, b.columns));
    c->factors.data = malloc((size_t)tensor_bytes(c->factors));
    ASSERT(c->codes.data && c->factors.data);
    memset(c->codes.data, 0x7F, (size_t)(rows * columns)); /* NaN */
    memset(c->factors.data, 0xFF, (size_t)tensor_bytes(c->factors));
    c->codes.scale = &c->factors;
}

static void codes_free(Codes *c) { free(c->codes.data), free(c->factors.data); }

static uint8_t code_at(const Codes *c, int64_t row, int64_t column)
{
    return ((const uint8_t *)c->codes.data)[row * c->codes.ld + column];
}

static float factor_at(const Codes *c, Fp8Blocks b, int64_t row, int64_t column)
{
    return ((const float *)c->factors.data)[row / b.rows * c->factors.dim[1] + column / b.columns];
}

static double number_at(const Codes *c, Fp8Blocks b, int64_t row, int64_t column)
{
    return (double)e4m3_to_float(code_at(c, row, column)) * (double)factor_at(c, b, row, column);
}

static uint16_t *random_rows(int seed, int64_t rows, int64_t columns)
{
    uint16_t *x = malloc((size_t)(rows * columns) * sizeof *x);
    uint64_t state = (uint64_t)seed;
    ASSERT(x);
    for (int64_t i = 0; i < rows * columns; i++)
        x[i] = bf16_from_float((float)(test_uniform(&state, -1, 1) * exp2(test_uniform(&state, -8, 0))));
    return x;
}

static const Fp8Blocks row_blocks[] = { { 1, 128, FP8_SCALE_POWER_OF_TWO }, { 1, 32, FP8_SCALE_E8M0 } };
static const Fp8Blocks weight_blocks[] = { { 128, 128, FP8_SCALE_POWER_OF_TWO }, { 1, 32, FP8_SCALE_E8M0 } };

static int64_t run_columns(Fp8Blocks b) { return b.columns * ((ROWS + SPARE) / b.columns + X - 1); }

static void cast_runs(Device *dev, Codes *to, int64_t *begin, const uint16_t *x, int64_t I, int64_t *offset,
                      Fp8Blocks b)
{
    codes_alloc(to, I, run_columns(b), b);
    OK(tested_op(&dev->stream, fp8_cast_runs, .y = to->codes, .begin = tensor_of(begin, I64, X),
                 .x = tensor_of((void *)(uintptr_t)x, BF16, ROWS + SPARE, I), .offset = tensor_of(offset, I64, X),
                 .blocks = b));
}

/* A run's codes and factors are those that it has without the others; behind it are zeros up to the next. */
static void check_run(Device *dev, const Codes *all, const int64_t *begin, const uint16_t *x, int64_t I, int run,
                      const int64_t *offset, Fp8Blocks b)
{
    const int64_t n = lengths[run];
    Codes alone;
    CHECK(begin[run] % b.columns == 0 && begin[run] + n <= begin[run + 1] && begin[run + 1] <= run_columns(b));
    for (int64_t i = 0; i < I; i++) {
        for (int64_t k = begin[run] + n; k < begin[run + 1]; k++) CHECK(code_at(all, i, k) == 0);
        for (int64_t k = begin[run] + n + b.columns - 1; k < begin[run + 1]; k += b.columns)
            CHECK(factor_at(all, b, i, k) == 1 || k / b.columns == (begin[run] + n - 1) / b.columns);
    }
    if (!n) return;
    codes_alloc(&alone, I, n, b);
    OK(tested_op(&dev->stream, fp8_cast, .turned = alone.codes, .blocks = b,
                 .x = tensor_of((void *)(uintptr_t)(x + offset[run] * I), BF16, n, I)));
    for (int64_t i = 0; i < I; i++) {
        for (int64_t k = 0; k < n; k++) {
            CHECK(code_at(all, i, begin[run] + k) == code_at(&alone, i, k));
            CHECK(factor_at(all, b, i, begin[run] + k) == factor_at(&alone, b, i, k));
        }
    }
    codes_free(&alone);
}

TEST(codes_of_rows_in_runs)
{
    enum { I = 70 };
    int64_t offset[X], begin[X];
    uint16_t *x = random_rows(3, ROWS + SPARE, I);
    offsets(offset);
    for (int k = 0; k < 2; k++) {
        for (Isa isa = ISA_AVX512; isa < ISA_COUNT; isa++) {
            Device dev;
            Codes all;
            if (!isa_supported(isa)) continue;
            open_on(&dev, isa, 1 + (int)isa % 3);
            cast_runs(&dev, &all, begin, x, I, offset, row_blocks[k]);
            for (int run = 0; run + 1 < X; run++) check_run(&dev, &all, begin, x, I, run, offset, row_blocks[k]);
            codes_free(&all);
            device_close(&dev);
        }
    }
    free(x);
}

/* ---- products ---- */

static double bound_of(double sum_of_sizes) { return 4e-6 * sum_of_sizes + 1e-30; }

/* y = x w^T of each expert's rows, from its weights [E O, I], or from those transposed, [I, E O] with O summed over. */
static void check_rows(int k, bool transposed, Isa isa, int threads, const int64_t *offset, float *y)
{
    enum { O = 256, I = 128 };
    const int64_t depth = transposed ? O : I, across = transposed ? I : O;
    const Fp8Blocks bx = row_blocks[k], bw = weight_blocks[k];
    uint16_t *x = random_rows(5, ROWS + SPARE, depth), *w = random_rows(6, EXPERTS * O, I);
    Codes cx, cw;
    Device dev;
    open_on(&dev, isa, threads);
    codes_alloc(&cx, ROWS + SPARE, depth, bx);
    codes_alloc(&cw, transposed ? I : EXPERTS * O, transposed ? EXPERTS * O : I, bw);
    Tensor rows = tensor_of(x, BF16, ROWS + SPARE, depth);
    rows.rows = cx.codes.rows = &offset[X - 1];
    OK(tested_op(&dev.stream, fp8_cast, .y = cx.codes, .x = rows, .blocks = bx));
    OK(tested_op(&dev.stream, fp8_cast, .y = transposed ? (Tensor){ 0 } : cw.codes,
                 .turned = transposed ? cw.codes : (Tensor){ 0 }, .x = tensor_of(w, BF16, EXPERTS * O, I),
                 .blocks = bw));
    for (int64_t i = 0; i < (ROWS + SPARE) * across; i++) y[i] = 77;
    OK(tested_op(&dev.stream, fp8_grouped, .y = tensor_of(y, F32, ROWS + SPARE, across), .x = cx.codes, .w = cw.codes,
                 .offset = tensor_of((void *)(uintptr_t)offset, I64, X), .leaf = depth / 2));
    device_close(&dev);
    for (int64_t n = 0; n < ROWS + SPARE; n++) {
        int e = 0;
        while (e < EXPERTS && offset[(e + 1) * RUNS] <= n) e++;
        for (int64_t o = 0; o < across; o++) {
            double sum = e == EXPERTS ? 77 : 0, size = 0;
            for (int64_t i = 0; e < EXPERTS && i < depth; i++) {
                const double b = transposed ? number_at(&cw, bw, o, e * O + i) : number_at(&cw, bw, e * O + o, i);
                const double p = number_at(&cx, bx, n, i) * b;
                sum += p, size += fabs(p);
            }
            CHECK_MSG(fabs((double)y[n * across + o] - sum) <= bound_of(size), "row %d: %g, in float64 %g", (int)n,
                      (double)y[n * across + o], sum);
        }
    }
    codes_free(&cx), codes_free(&cw);
    free(x), free(w);
}

TEST(products_of_rows)
{
    static float first[(ROWS + SPARE) * 256], y[(ROWS + SPARE) * 256];
    int64_t offset[X];
    offsets(offset);
    for (int way = 0; way < 4; way++) {
        check_rows(way / 2, way % 2, isa_best(), 1, offset, first);
        for (Isa isa = ISA_AVX512; isa < ISA_COUNT; isa++) {
            if (!isa_supported(isa)) continue;
            check_rows(way / 2, way % 2, isa, 3, offset, y);
            CHECK(!memcmp(first, y, (size_t)((ROWS + SPARE) * (way % 2 ? 128 : 256)) * sizeof *y));
        }
    }
}

/* dw of each expert, in both kinds of accumulators, onto what they hold and anew. */
static void check_gradient(int k, bool fixed, bool fresh)
{
    enum { O = 48, I = 33, SHIFT = 30, HELD = 3 };
    const Fp8Blocks b = row_blocks[k];
    uint16_t *dy = random_rows(8, ROWS + SPARE, O), *x = random_rows(9, ROWS + SPARE, I);
    static float plain[EXPERTS * O * I];
    static int64_t units[EXPERTS * O * I];
    int64_t offset[X], begin[X];
    int32_t shift = SHIFT, overflow = 0;
    Codes cdy, cx;
    Device dev;
    offsets(offset);
    for (int i = 0; i < EXPERTS * O * I; i++) plain[i] = HELD, units[i] = (int64_t)HELD << SHIFT;
    open_on(&dev, isa_best(), 2);
    cast_runs(&dev, &cdy, begin, dy, O, offset, b);
    cast_runs(&dev, &cx, begin, x, I, offset, b);
    const Tensor dw = fixed ? tensor_of(units, I64, EXPERTS, O, I) : tensor_of(plain, F32, EXPERTS, O, I);
    OK(tested_op(&dev.stream, fp8_grouped_add, .dw = dw, .dy = cdy.codes, .x = cx.codes,
                 .begin = tensor_of(begin, I64, X), .shift = tensor_of(&shift, I32, 1),
                 .overflow = tensor_of(&overflow, I32, 1), .headroom_bits = 10, .fresh = fresh));
    CHECK(!overflow);
    for (int64_t at = 0; at < EXPERTS * O * I; at++) {
        const int64_t e = at / (O * I), o = at / I % O, i = at % I;
        double sum = fresh ? 0 : HELD, size = sum;
        for (int run = (int)e * RUNS; run < ((int)e + 1) * RUNS; run++)
            for (int64_t n = 0; n < lengths[run]; n++) {
                const double p = number_at(&cdy, b, o, begin[run] + n) * number_at(&cx, b, i, begin[run] + n);
                sum += p, size += fabs(p);
            }
        const double got = fixed ? ldexp((double)units[at], -SHIFT) : (double)plain[at];
        CHECK_MSG(fabs(got - sum) <= bound_of(size) + (fixed ? ldexp(RUNS, -SHIFT) : 0), "expert %d: %g, in float64 %g",
                  (int)e, got, sum);
    }
    shift = 62;
    if (fixed)
        OK(tested_op(&dev.stream, fp8_grouped_add, .dw = dw, .dy = cdy.codes, .x = cx.codes,
                     .begin = tensor_of(begin, I64, X), .shift = tensor_of(&shift, I32, 1),
                     .overflow = tensor_of(&overflow, I32, 1), .headroom_bits = 10));
    CHECK(overflow == fixed);
    device_close(&dev);
    codes_free(&cdy), codes_free(&cx);
    free(dy), free(x);
}

TEST(gradients)
{
    for (int way = 0; way < 8; way++) check_gradient(way / 4, way & 1, way & 2);
}

/* ---- what is refused ---- */

TEST(shapes_are_checked)
{
    enum { I = 128 };
    int64_t offset[X], begin[X];
    uint16_t *x = random_rows(3, ROWS + SPARE, I);
    float *y = calloc((ROWS + SPARE) * I, sizeof *y);
    Codes few, w, rows;
    Device dev;
    offsets(offset);
    open_on(&dev, isa_best(), 1);
    codes_alloc(&few, I, 4 * 128, row_blocks[0]);
    codes_alloc(&w, 2 * I, 2 * I, weight_blocks[0]);
    codes_alloc(&rows, ROWS + SPARE, I, row_blocks[0]);
    const Tensor from = tensor_of(x, BF16, ROWS + SPARE, I), at = tensor_of(offset, I64, X);
    CHECK(op(&dev.stream, fp8_cast_runs, .y = few.codes, .begin = tensor_of(begin, I64, X), .x = from, .offset = at,
             .blocks = row_blocks[0]) == ERR_SHAPE && strstr(err_message(), "y has 512 columns"));
    CHECK(op(&dev.stream, fp8_cast_runs, .y = few.codes, .begin = tensor_of(begin, I64, X), .x = from, .offset = at,
             .blocks = row_blocks[1]) == ERR_SHAPE && strstr(err_message(), "a factor for each"));
    CHECK(op(&dev.stream, fp8_grouped, .y = tensor_of(y, F32, ROWS + SPARE, I), .x = rows.codes, .w = w.codes,
             .offset = at, .leaf = I) == ERR_SHAPE && strstr(err_message(), "its experts [128, 128]"));
    device_close(&dev);
    codes_free(&few), codes_free(&w), codes_free(&rows);
    free(x), free(y);
}

TEST_MAIN
