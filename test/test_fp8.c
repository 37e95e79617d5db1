/*
 * The formats of 8 and 4 bits, their scales and casts (base/fp8.h, src/cpu/fp8.c) against what another definition of
 * them gave (test/golden/fp8.txt, by test/tools/golden_fp8.py), to the bit and in every build of the kernels; products
 * against float64 loops over the numbers that codes stand for.
 */
#include "base/fp8.h"
#include "base/int64.h"
#include "ops_env.h"

/* ---- golden/fp8.txt ---- */

static DType format_of(const char *name) { return !strcmp(name, "e2m1") ? E2M1 : strcmp(name, "e5m2") ? E4M3 : E5M2; }
static float most_of(DType t) { return t == E4M3 ? E4M3_MOST : E5M2_MOST; }
static float value_of(DType t, uint8_t code)
{
    return t == E2M1 ? e2m1_to_float(code) : t == E4M3 ? e4m3_to_float(code) : e5m2_to_float(code);
}
static uint8_t code_of(DType t, float x)
{
    return t == E2M1 ? e2m1_from_float(x) : t == E4M3 ? e4m3_from_float(x) : e5m2_from_float(x);
}

static Fp8Scale scale_of(const char *name)
{
    if (!strcmp(name, "levels") || !strcmp(name, "mixed")) return FP8_SCALE_TWO_LEVELS;
    return !strcmp(name, "exact") ? FP8_SCALE_EXACT : !strcmp(name, "power") ? FP8_SCALE_POWER_OF_TWO : FP8_SCALE_E8M0;
}

static bool same_float(float a, uint32_t bits)
{
    return half_float_bits(a) == bits || (isnan(a) && isnan(half_float_of(bits)));
}

/* Calls `check` with each line that begins with the word, split at blanks; returns how many. */
typedef void LineFn(char **word, int count);
static int each_line(const char *kind, LineFn *check)
{
    static char line[1 << 15];
    char *word[1 << 11];
    FILE *f = fopen("test/golden/fp8.txt", "re");
    int lines = 0;
    if (!f) TEST_FAIL("no test/golden/fp8.txt");
    while (f && fgets(line, sizeof line, f)) {
        int count = 0;
        for (char *w = strtok(line, " \n"); w; w = strtok(NULL, " \n")) word[count++] = w;
        if (strcmp(word[0], kind)) continue;
        check(word, count);
        lines++;
    }
    if (f) fclose(f);
    return lines;
}

static uint32_t hex(const char *s) { return (uint32_t)strtoul(s, NULL, 16); }

static void check_values(char **word, int count)
{
    const DType t = format_of(word[1]);
    const int codes = t == E2M1 ? 16 : 256;
    CHECK(count == 2 + codes);
    for (int c = 0; c < codes; c++) {
        const float x = value_of(t, (uint8_t)c);
        CHECK_MSG(same_float(x, hex(word[2 + c])), "%s %02x", word[1], (unsigned)c);
        if (!isnan(x) && !isinf(x)) CHECK(code_of(t, x) == c);
    }
}

static void check_codes(char **word, int count)
{
    const DType t = format_of(word[1]);
    for (int i = 2; i < count; i++) {
        const uint8_t got = code_of(t, half_float_of(hex(word[i])));
        CHECK_MSG(got == hex(strchr(word[i], ':') + 1), "%s %s: %02x", word[1], word[i], got);
    }
}

static void check_scale(char **word, int count)
{
    CHECK(count == 6);
    const Fp8Factor f = fp8_factor(scale_of(word[1]), hex(word[3]), most_of(format_of(word[2])));
    CHECK_MSG(same_float(f.scale, hex(word[4])) && same_float(f.back, hex(word[5])), "%s %s %s: %08x %08x", word[1],
              word[2], word[3], half_float_bits(f.scale), half_float_bits(f.back));
}

static void check_levels(char **word, int count)
{
    CHECK(count == 5);
    const Fp8Factor f = fp8_factor_two_levels(hex(word[1]), hex(word[2]));
    CHECK_MSG(same_float(f.scale, hex(word[3])) && same_float(f.back, hex(word[4])), "%s %s: %08x %08x", word[1],
              word[2], half_float_bits(f.scale), half_float_bits(f.back));
}

TEST(formats)
{
    CHECK(each_line("values", check_values) == 3);
    CHECK(each_line("codes", check_codes) == 3);
}

/* Every scale that the recipes' description gives as an example, too. */
TEST(scales)
{
    CHECK(each_line("scale", check_scale) == 96);
    CHECK_CLOSE(fp8_factor(FP8_SCALE_EXACT, half_float_bits(3), 448).scale, 149.3333, 1e-4, "tensor");
    CHECK_CLOSE(fp8_factor(FP8_SCALE_EXACT, half_float_bits(3), 57344).scale, 19114.667, 1e-4, "tensor, e5m2");
    CHECK(fp8_factor(FP8_SCALE_POWER_OF_TWO, half_float_bits(3), 448).scale == 128);
    CHECK(fp8_factor(FP8_SCALE_POWER_OF_TWO, half_float_bits(3), 57344).scale == 16384);
    CHECK(fp8_factor(FP8_SCALE_E8M0, half_float_bits(3), 448).back == 0x1p-7f);
}

/* What the recipes' description says of e2m1: ties, and a block of 1 in a tensor of 3, whose factor is 144 / 896. */
TEST(scales_of_two_levels)
{
    static const float ties[][2] = { { 0.25f, 0 }, { 0.75f, 1 }, { 1.25f, 1 }, { 1.75f, 2 },
                                     { 2.5f, 2 },  { 3.5f, 4 },  { 5, 4 } };
    CHECK(each_line("levels", check_levels) == 112);
    for (int i = 0; i < 7; i++)
        for (int sign = -1; sign < 2; sign += 2)
            CHECK(e2m1_to_float(e2m1_from_float((float)sign * ties[i][0])) == (float)sign * ties[i][1]);
    const Fp8Factor f = fp8_factor_two_levels(half_float_bits(3), half_float_bits(1));
    CHECK(f.back == 144 / 896.0f);
    CHECK_CLOSE(f.scale, 6.2222, 1e-5, "scale");
    CHECK(e2m1_to_float(e2m1_from_float(0.5f * f.scale)) == 3 && e2m1_to_float(e2m1_from_float(f.scale)) == 6);
    CHECK_CLOSE(3 * f.back, 0.482143, 1e-6, "0.5");
    CHECK_CLOSE(6 * f.back, 0.964286, 1e-6, "1");
}

/* ---- casts of whole tensors ---- */

typedef struct {
    uint64_t state;
} Draw;

static uint32_t draw(Draw *d)
{
    d->state = d->state * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(d->state >> 33);
}

/* tensor() of golden_fp8.py, rows `ld` apart. */
static void golden_tensor(int number, int64_t rows, int64_t columns, int64_t ld, uint16_t *out)
{
    Draw d = { (uint64_t)number };
    const uint32_t spread = 1 + draw(&d) % 40, center = 60 + draw(&d) % 130;
    const int64_t n = rows * columns;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t u = draw(&d), v = draw(&d);
        const uint32_t x = (u & 1) << 15 | (center + (u >> 1) % spread) << 7 | (v & 0x7F);
        out[i / columns * ld + i % columns] = (uint16_t)((v >> 7 & 15) == 0 ? 0 : x);
    }
    for (int k = 0; number % 7 == 3 && k < 2; k++) {
        const int64_t i = draw(&d) % n;
        out[i / columns * ld + i % columns] = k ? 0x7FC0 : 0x7F80;
    }
}

static uint64_t fnv(uint64_t h, const void *data, int64_t bytes)
{
    for (int64_t i = 0; i < bytes; i++) h = (h ^ ((const uint8_t *)data)[i]) * 0x100000001B3u;
    return h;
}
#define FNV 0xCBF29CE484222325u

/* Codes and factors of x, in memory of the caller. */
typedef struct {
    Tensor codes, factors;
} Codes;

static void codes_alloc(Codes *c, DType t, int64_t rows, int64_t columns, Fp8Blocks b, int64_t gap)
{
    c->codes = tensor_of(malloc((size_t)(rows * (columns + gap))), t, rows, columns);
    c->codes.ld += gap;
    memset(c->codes.data, 0xA5, (size_t)(rows * (columns + gap)));
    c->factors = tensor_of(NULL, F32, fp8_block_count(rows, b.rows), fp8_block_count(columns, b.columns));
    if (!b.rows) c->factors = tensor_of(NULL, F32, 1);
    c->factors.data = malloc((size_t)tensor_bytes(c->factors));
    ASSERT(c->codes.data && c->factors.data);
    c->codes.scale = &c->factors;
}

static bool codes_same(const Codes *a, const Codes *b)
{
    const int64_t bytes = (a->codes.dim[0] - 1) * a->codes.ld + a->codes.dim[1];
    return !memcmp(a->codes.data, b->codes.data, (size_t)bytes) &&
           !memcmp(a->factors.data, b->factors.data, (size_t)tensor_bytes(a->factors));
}

static void codes_free(Codes *c) { free(c->codes.data), free(c->factors.data); }

/* Casts with the largest magnitude of all before them, where that is wanted: of x, of x transposed, or both at once. */
static void cast_mixed(Isa isa, int threads, const Codes *y, const Codes *turned, Tensor x, Fp8Blocks b, bool mixed)
{
    int64_t most = INT64_MAX, most_mixed = INT64_MAX;
    Device dev;
    const Tensor amax = tensor_of(&most, I64, 1);
    OK(device_open(&dev, (DeviceChoice){ .threads = threads, .isa = isa }));
    const bool whole = !b.rows || b.scale == FP8_SCALE_TWO_LEVELS;
    if (whole) OK(tested_op(&dev.stream, fp8_amax, .amax = amax, .x = x, .fresh = 1));
    const Tensor none = { 0 }, amax_mixed = tensor_of(&most_mixed, I64, 1);
    if (mixed) OK(tested_op(&dev.stream, fp8_amax, .amax = amax_mixed, .x = x, .fresh = 1, .mixed = 1));
    OK(tested_op(&dev.stream, fp8_cast, .y = y ? y->codes : none, .turned = turned ? turned->codes : none, .x = x,
                 .amax = whole ? amax : none, .turned_amax = mixed ? amax_mixed : none, .blocks = b, .mixed = mixed));
    device_close(&dev);
}

static void cast_on(Isa isa, int threads, const Codes *y, const Codes *turned, Tensor x, Fp8Blocks b)
{
    cast_mixed(isa, threads, y, turned, x, b, false);
}

static void check_cast_by(Isa isa, int threads, char **word)
{
    enum { GAP = 3 };
    const int number = atoi(word[1]);
    const Fp8Blocks b = { atoi(word[4]), atoi(word[5]), scale_of(word[2]) };
    const bool transposed = atoi(word[6]), mixed = !strcmp(word[2], "mixed");
    const int64_t rows = atoi(word[7]), columns = atoi(word[8]), gap = number % 2 * GAP;
    const DType t = format_of(word[3]);
    uint16_t *x = calloc((size_t)(rows * (columns + gap)), sizeof *x);
    Codes to, again, other, other_alone;
    golden_tensor(number, rows, columns, columns + gap, x);
    Tensor from = tensor_of(x, BF16, rows, columns);
    from.ld += gap;
    codes_alloc(&to, t, transposed ? columns : rows, transposed ? rows : columns, b, gap);
    codes_alloc(&again, t, transposed ? columns : rows, transposed ? rows : columns, b, gap);
    codes_alloc(&other, t, transposed ? rows : columns, transposed ? columns : rows, b, gap);
    codes_alloc(&other_alone, t, transposed ? rows : columns, transposed ? columns : rows, b, gap);
    cast_mixed(isa, threads, transposed ? NULL : &to, transposed ? &to : NULL, from, b, mixed);
    cast_on(isa, threads, transposed ? &other_alone : NULL, transposed ? NULL : &other_alone, from, b);
    cast_mixed(isa, threads, transposed ? &other : &again, transposed ? &again : &other, from, b, mixed);
    CHECK_MSG(codes_same(&again, &to) && codes_same(&other, &other_alone), "%s, %d threads: tensor %d, both at once",
              isa_name(isa), threads, number);
    uint64_t h = FNV;
    for (int64_t r = 0; r < to.codes.dim[0]; r++) {
        const uint8_t *row = (const uint8_t *)to.codes.data + r * to.codes.ld;
        h = fnv(h, row, to.codes.dim[1]);
        for (int64_t i = 0; i < gap; i++) CHECK(row[to.codes.dim[1] + i] == 0xA5);
    }
    for (int64_t i = 0; i < tensor_count(to.factors); i++) {
        uint32_t *f = (uint32_t *)to.factors.data + i;
        if (isnan(half_float_of(*f))) *f = 0x7FC00000;
    }
    CHECK_MSG(h == strtoull(word[9], NULL, 16) &&
                  fnv(FNV, to.factors.data, tensor_bytes(to.factors)) == strtoull(word[10], NULL, 16),
              "%s, %d threads: tensor %d, %s %s", isa_name(isa), threads, number, word[2], word[3]);
    codes_free(&to), codes_free(&again), codes_free(&other), codes_free(&other_alone);
    free(x);
}

static void check_cast(char **word, int count)
{
    CHECK(count == 11);
    for (Isa isa = ISA_AVX512; isa < ISA_COUNT; isa++)
        if (isa_supported(isa)) check_cast_by(isa, 1 + atoi(word[1]) % 3, word);
}

TEST(casts) { CHECK(each_line("cast", check_cast) == 240); }

/* Mixes 16 tokens: to the bit, and against Hadamard's matrix in float64. */
static void check_mix(char **word, int count)
{
    static const char signs[] = "+++-+------+-+--";
    float x[FP8_MIXED];
    double size = 0;
    CHECK(count == 33);
    for (int i = 0; i < FP8_MIXED; i++) {
        x[i] = half_float_of(hex(word[1 + i]));
        size += fabs((double)x[i]);
    }
    fp8_mix(x);
    for (int i = 0; i < FP8_MIXED; i++) {
        double want = 0;
        for (int k = 0; k < FP8_MIXED; k++) {
            const double sign = signs[k] == '+' ? 0.25 : -0.25;
            want +=
                (__builtin_popcount((unsigned)(i & k)) % 2 ? -sign : sign) * (double)half_float_of(hex(word[1 + k]));
        }
        CHECK(same_float(x[i], hex(word[17 + i])));
        if (isfinite(want)) CHECK(fabs((double)x[i] - want) <= 1e-6 * size);
        else CHECK(isnan(want) ? isnan(x[i]) : (double)x[i] == want);
    }
}

TEST(tokens_that_are_mixed) { CHECK(each_line("mix", check_mix) == 45); }

/* Factors of two levels: a block of zeros has the factor 0 and is zeros, and so is a block too small for a factor. A
 * NaN makes its own block NaN, and an infinity becomes the largest number of its block. */
TEST(blocks_without_a_factor)
{
    enum { B = 16, BLOCKS = 5, I = B * BLOCKS };
    static float x[I], back[I];
    for (int way = 0; way < 2; way++) {
        Device dev;
        Codes c;
        for (int i = 0; i < I; i++) x[i] = i < B ? 0 : i < 2 * B ? 1e-7f : 1 + (float)(i % B);
        x[3] = -0.0f;
        if (way) x[3 * B + 2] = -INFINITY, x[4 * B + 5] = NAN;
        codes_alloc(&c, E2M1, 1, I, (Fp8Blocks){ 1, B, FP8_SCALE_TWO_LEVELS }, 0);
        cast_on(isa_best(), 1, &c, NULL, tensor_of(x, F32, 1, I), (Fp8Blocks){ 1, B, FP8_SCALE_TWO_LEVELS });
        OK(device_open(&dev, (DeviceChoice){ .threads = 1, .isa = isa_best() }));
        OK(tested_op(&dev.stream, fp8_values, .y = tensor_of(back, F32, 1, I), .x = c.codes));
        device_close(&dev);
        const float *factors = c.factors.data;
        CHECK(factors[0] == 0 && (way || factors[1] == 0));
        const uint8_t *codes = c.codes.data;
        for (int i = 0; i < B; i++) CHECK(codes[i] == (i == 3 ? 8 : 0) && back[i] == 0 && (way || back[B + i] == 0));
        for (int i = 2 * B; i < 3 * B; i++) CHECK_CLOSE(back[i], x[i], 0.21 * (double)fabsf(x[i]) + 0.3, "%d", i);
        if (!way) CHECK(back[5 * B - 1] == 16);
        if (way) CHECK(back[3 * B + 2] == -448 * 6);
        for (int i = 4 * B; way && i < I; i++) CHECK(isnan(back[i]));
        codes_free(&c);
    }
}

/* ---- the largest magnitude ---- */

static void case_amax(Env *e, const Shape *p)
{
    const bool fresh = p->flags & 1;
    Tensor x = env_in(e, F32, -3, 2, p->N, p->D), amax = env_out(e, I64, 0, 1, 1);
    int64_t *held = amax.data;
    *held = fresh ? INT64_MAX : p->a;
    if (p->flags & 2) env_f(x, p->N / 2)[p->D - 1] = -INFINITY;
    if (p->flags & 4) env_f(x, 0)[p->D / 2] = -NAN;
    env_settle(e);
    float most = 0;
    bool is_nan = false;
    for (int64_t k = 0; k < env_n(e, p->N) * p->D; k++) {
        const float v = env_f(x, k / p->D)[k % p->D];
        most = fmaxf(most, fabsf(v));
        is_nan |= isnan(v);
    }
    RUN(e, fp8_amax, .amax = amax, .x = env_used(e, x), .fresh = fresh);
    if (!e->check) return;
    if (is_nan) CHECK(*held > 0x7F800000 && *held <= 0x7FFFFFFF);
    else CHECK(*held == max64(half_float_bits(most), fresh ? 0 : p->a));
}

TEST(largest_magnitudes)
{
    CASES(case_amax, { 1, 1, 0, 0, 1 }, { 3, 17, 0, 0, 1 }, { 35, 100, 0x3F800000, 0, 0 },
          { 35, 100, 0x40800000, 0, 0 }, { 20, 1000, 0, 0, 1 }, { 9, 130, 0, 0, 3 }, { 9, 130, 0, 0, 7 },
          { 300, 129, 0, 0, 0 });
}

/* ---- rows in use, and back ---- */

/* Rows that are not in use keep their codes and factors; what codes stand for is code times factor. */
TEST(rows_in_use)
{
    enum { N = 70, USED = 41, I = 50 };
    static const Fp8Blocks blocks[] = { { 1, 32, FP8_SCALE_E8M0 },
                                        { 1, 128, FP8_SCALE_POWER_OF_TWO },
                                        { 0, 0, FP8_SCALE_EXACT },
                                        { 1, 16, FP8_SCALE_TWO_LEVELS } };
    static uint16_t x[N * I];
    static float back[N * I];
    const int64_t used = USED;
    golden_tensor(5, N, I, I, x);
    x[0] = bf16_from_float(1e9f); /* (the largest of all is one of the rows in use) */
    for (int k = 0; k < 4; k++) {
        const DType t = k == 3 ? E2M1 : E4M3;
        Codes few, all;
        Tensor from = tensor_of(x, BF16, N, I), some = tensor_row_slice(from, 0, USED);
        from.rows = &used;
        codes_alloc(&few, t, USED, I, blocks[k], 0);
        codes_alloc(&all, t, N, I, blocks[k], 0);
        cast_on(isa_best(), 2, &few, NULL, some, blocks[k]);
        cast_on(isa_best(), 2, &all, NULL, from, blocks[k]);
        CHECK(!memcmp(few.codes.data, all.codes.data, USED * I));
        CHECK(!memcmp(few.factors.data, all.factors.data, (size_t)tensor_bytes(few.factors)));
        const uint8_t *codes = all.codes.data;
        for (int i = USED * I; i < N * I; i++) CHECK(codes[i] == 0xA5);
        Device dev;
        OK(device_open(&dev, (DeviceChoice){ .threads = 2, .isa = isa_best() }));
        OK(tested_op(&dev.stream, fp8_values, .y = tensor_of(back, F32, USED, I), .x = few.codes));
        device_close(&dev);
        for (int i = 0; i < USED * I; i++) {
            const int block = blocks[k].rows ? i / I * (int)few.factors.dim[1] + i % I / blocks[k].columns : 0;
            CHECK(back[i] == value_of(t, codes[i]) * ((const float *)few.factors.data)[block]);
        }
        codes_free(&few), codes_free(&all);
    }
}

/* ---- products ---- */

/* A device that widens 16-bit tensors, as one that trains in bf16. */
static void wide_open(Device *dev, Isa isa, int threads)
{
    OK(device_open(dev, (DeviceChoice){ .threads = threads, .isa = isa, .staging_bytes = 1 << 24 }));
}

/* Codes of random numbers, and in `numbers` what they stand for. */
static void random_codes(Codes *c, int seed, DType t, int64_t rows, int64_t columns, Fp8Blocks b, double *numbers)
{
    float *x = malloc((size_t)(rows * columns) * sizeof *x);
    uint64_t state = (uint64_t)seed;
    for (int64_t i = 0; i < rows * columns; i++)
        x[i] = (float)(test_uniform(&state, -1, 1) * exp2(test_uniform(&state, -6, 0)));
    codes_alloc(c, t, rows, columns, b, seed % 2 * 5);
    cast_on(isa_best(), 1, c, NULL, tensor_of(x, F32, rows, columns), b);
    for (int64_t i = 0; i < rows * columns; i++) {
        const int64_t r = i / columns, k = i % columns;
        const float *f = c->factors.data;
        const int64_t at = b.rows ? r / b.rows * c->factors.dim[1] + k / b.columns : 0;
        numbers[i] = (double)value_of(t, ((const uint8_t *)c->codes.data)[r * c->codes.ld + k]) * (double)f[at];
        const double size = fabs((double)x[i]), apart = fabs(numbers[i] - (double)x[i]);
        CHECK(t == E2M1 ? apart <= 0.35 * size + 0.1 : apart <= (t == E5M2 ? 0.14 : 0.07) * size + 1.0 / 256);
    }
    free(x);
}

typedef struct {
    int64_t N, O, I, leaf;
    Fp8Blocks x, w;
    DType tx;
    bool biased;
} ProductCase;

static const ProductCase product_cases[] = {
    { 3, 5, 40, 40, { 0, 0, FP8_SCALE_EXACT }, { 0, 0, FP8_SCALE_EXACT }, E4M3, false },
    { 33, 48, 256, 64, { 0, 0, FP8_SCALE_EXACT }, { 0, 0, FP8_SCALE_EXACT }, E5M2, true },
    { 64, 272, 400, 400, { 1, 128, FP8_SCALE_POWER_OF_TWO }, { 128, 128, FP8_SCALE_POWER_OF_TWO }, E4M3, true },
    { 17, 144, 160, 32, { 1, 32, FP8_SCALE_E8M0 }, { 1, 32, FP8_SCALE_E8M0 }, E4M3, false },
    { 21, 80, 112, 56, { 1, 16, FP8_SCALE_TWO_LEVELS }, { 16, 16, FP8_SCALE_TWO_LEVELS }, E2M1, true },
};
enum { PRODUCT_CASES = sizeof product_cases / sizeof *product_cases };

static DType weights_of(const ProductCase *p) { return p->tx == E2M1 ? E2M1 : E4M3; }

/* Sums of products in fp32 are off by what their largest parts round, at most. */
static double bound_of(double sum_of_sizes) { return 4e-6 * sum_of_sizes + 1e-30; }

static void check_product(const ProductCase *p, Isa isa, int threads, uint64_t *hash)
{
    const int64_t N = p->N, O = p->O, I = p->I;
    double *x = malloc((size_t)(N * I) * 8), *w = malloc((size_t)(O * I) * 8);
    float *y = malloc((size_t)(N * O) * 4), *bias = malloc((size_t)O * 4);
    uint16_t *narrow = malloc((size_t)(N * O) * 2), *gelu = malloc((size_t)(N * O) * 2),
             *apart = malloc((size_t)(N * O) * 2);
    uint16_t *narrow_bias = malloc((size_t)O * 2);
    Codes cx, cw;
    Device dev;
    random_codes(&cx, 7, p->tx, N, I, p->x, x);
    random_codes(&cw, 8, weights_of(p), O, I, p->w, w);
    for (int64_t o = 0; o < O; o++) {
        narrow_bias[o] = bf16_from_float((float)o * 0.01f - 0.3f);
        bias[o] = bf16_to_float(narrow_bias[o]);
    }
    wide_open(&dev, isa, threads);
    OK(tested_op(&dev.stream, fp8_product, .y = tensor_of(y, F32, N, O), .x = cx.codes, .w = cw.codes,
                 .bias = p->biased ? tensor_of(bias, F32, O) : (Tensor){ 0 }, .leaf = p->leaf));
    OK(tested_op(&dev.stream, fp8_product, .y = tensor_of(narrow, BF16, N, O), .gelu = tensor_of(gelu, BF16, N, O),
                 .x = cx.codes, .w = cw.codes, .bias = p->biased ? tensor_of(narrow_bias, BF16, O) : (Tensor){ 0 },
                 .leaf = p->leaf));
    OK(tested_op(&dev.stream, gelu_fwd, .y = tensor_of(apart, BF16, N, O), .x = tensor_of(narrow, BF16, N, O)));
    CHECK(!memcmp(gelu, apart, (size_t)(N * O) * 2));
    device_close(&dev);
    for (int64_t n = 0; n < N; n++) {
        for (int64_t o = 0; o < O; o++) {
            double sum = p->biased ? (double)bias[o] : 0, size = fabs(sum);
            for (int64_t i = 0; i < I; i++)
                sum += x[n * I + i] * w[o * I + i], size += fabs(x[n * I + i] * w[o * I + i]);
            CHECK_MSG(fabs((double)y[n * O + o] - sum) <= bound_of(size), "%g, in float64 %g", (double)y[n * O + o],
                      sum);
            CHECK(narrow[n * O + o] == bf16_from_float(y[n * O + o]));
        }
    }
    *hash = fnv(FNV, y, N * O * 4);
    codes_free(&cx), codes_free(&cw);
    free(x), free(w), free(y), free(bias), free(narrow), free(gelu), free(apart), free(narrow_bias);
}

TEST(products)
{
    for (int k = 0; k < PRODUCT_CASES; k++) {
        uint64_t want, hash;
        check_product(&product_cases[k], isa_best(), 1, &want);
        for (Isa isa = ISA_AVX512; isa < ISA_COUNT; isa++) {
            if (!isa_supported(isa)) continue;
            check_product(&product_cases[k], isa, 3, &hash);
            CHECK_MSG(hash == want, "case %d, %s", k, isa_name(isa));
        }
    }
}

/* dw [O, I] of N tokens: in both kinds of accumulators, onto what they hold and anew. */
static void check_product_add(const ProductCase *p, bool fixed, bool fresh)
{
    enum { SHIFT = 30, HELD = 3 };
    const int64_t O = p->N, I = p->O, N = p->I;
    double *dy = malloc((size_t)(N * O) * 8), *x = malloc((size_t)(N * I) * 8);
    float *plain = malloc((size_t)(O * I) * 4);
    int64_t *units = malloc((size_t)(O * I) * 8);
    int32_t shift = SHIFT, overflow = 0;
    Codes cdy, cx;
    Device dev;
    random_codes(&cdy, 9, p->tx, O, N, p->x, dy);
    random_codes(&cx, 10, weights_of(p), I, N, p->x, x);
    for (int64_t i = 0; i < O * I; i++) plain[i] = HELD, units[i] = (int64_t)HELD << SHIFT;
    const Tensor dw = fixed ? tensor_of(units, I64, O, I) : tensor_of(plain, F32, O, I);
    wide_open(&dev, isa_best(), 2);
    OK(tested_op(&dev.stream, fp8_product_add, .dw = dw, .dy = cdy.codes, .x = cx.codes,
                 .shift = tensor_of(&shift, I32, 1), .overflow = tensor_of(&overflow, I32, 1), .leaf = p->leaf,
                 .headroom_bits = 10, .fresh = fresh));
    CHECK(!overflow);
    for (int64_t o = 0; o < O; o++) {
        for (int64_t i = 0; i < I; i++) {
            double sum = fresh ? 0 : HELD, size = sum;
            for (int64_t n = 0; n < N; n++)
                sum += dy[o * N + n] * x[i * N + n], size += fabs(dy[o * N + n] * x[i * N + n]);
            const double got = fixed ? ldexp((double)units[o * I + i], -SHIFT) : (double)plain[o * I + i];
            const double rounding = fixed ? ldexp((double)(N / p->leaf + 1), -SHIFT) : 0;
            CHECK_MSG(fabs(got - sum) <= bound_of(size) + rounding, "%g, in float64 %g", got, sum);
        }
    }
    shift = 62;
    if (fixed)
        OK(tested_op(&dev.stream, fp8_product_add, .dw = dw, .dy = cdy.codes, .x = cx.codes,
                     .shift = tensor_of(&shift, I32, 1), .overflow = tensor_of(&overflow, I32, 1), .leaf = p->leaf,
                     .headroom_bits = 10));
    CHECK(overflow == fixed);
    device_close(&dev);
    codes_free(&cdy), codes_free(&cx);
    free(dy), free(x), free(plain), free(units);
}

TEST(products_of_gradients)
{
    for (int k = 0; k < PRODUCT_CASES; k++)
        for (int way = 0; way < 4; way++) check_product_add(&product_cases[k], way & 1, way & 2);
}

/* A NaN's code makes sums NaN, and with it the flag of a fixed-point gradient. */
TEST(not_a_number)
{
    enum { N = 16, I = 16 };
    float x[N * I] = { 0 }, y[N * N];
    int64_t dw[N * N] = { 0 };
    int32_t shift = 0, overflow = 0;
    Codes c;
    Device dev;
    x[3] = NAN;
    codes_alloc(&c, E4M3, N, I, (Fp8Blocks){ 0 }, 0);
    cast_on(isa_best(), 1, &c, NULL, tensor_of(x, F32, N, I), (Fp8Blocks){ 0 });
    wide_open(&dev, isa_best(), 1);
    OK(tested_op(&dev.stream, fp8_product, .y = tensor_of(y, F32, N, N), .x = c.codes, .w = c.codes, .leaf = I));
    OK(tested_op(&dev.stream, fp8_product_add, .dw = tensor_of(dw, I64, N, N), .dy = c.codes, .x = c.codes,
                 .shift = tensor_of(&shift, I32, 1), .overflow = tensor_of(&overflow, I32, 1), .leaf = I, .fresh = 1));
    CHECK(isnan(y[0]) && y[N + 1] == 0 && overflow == 1);
    device_close(&dev);
    codes_free(&c);
}

/* ---- what is no operand ---- */

TEST(operands_are_checked)
{
    enum { N = 16 };
    uint8_t codes[N * N] = { 0 };
    float y[N * N], factors[N * N];
    Device dev;
    wide_open(&dev, isa_best(), 1);
    const Tensor one = tensor_of(factors, F32, 1), three = tensor_of(factors, F32, 3),
                 wrong = tensor_of(factors, F32, 2, 1);
    Tensor x = tensor_of(codes, E4M3, N, N), bare = x, plain = tensor_of(y, F32, N, N);
    x.scale = &one;
    Tensor many = x, scaled = plain;
    many.scale = &three;
    scaled.scale = &one;
    const Tensor out = tensor_of(y, F32, N, N);
    CHECK(op(&dev.stream, fp8_product, .y = out, .x = x, .w = bare, .leaf = N) == ERR_SHAPE &&
          strstr(err_message(), "factors"));
    CHECK(op(&dev.stream, fp8_product, .y = out, .x = many, .w = x, .leaf = N) == ERR_SHAPE &&
          strstr(err_message(), "factors"));
    CHECK(op(&dev.stream, fp8_product, .y = out, .x = plain, .w = x, .leaf = N) == ERR_SHAPE);
    CHECK(op(&dev.stream, fp8_product, .y = scaled, .x = x, .w = x, .leaf = N) == ERR_SHAPE &&
          strstr(err_message(), "of codes alone"));
    many.scale = &wrong;
    CHECK(op(&dev.stream, fp8_cast, .y = many, .x = plain, .blocks = { 1, 128, FP8_SCALE_EXACT }) == ERR_SHAPE &&
          strstr(err_message(), "a factor for each block"));
    CHECK(op(&dev.stream, fp8_cast, .y = x, .x = plain) == ERR_SHAPE && strstr(err_message(), "either blocks or amax"));
    int64_t most = 0;
    const Fp8Blocks two = { 1, 16, FP8_SCALE_TWO_LEVELS };
    const Tensor amax = tensor_of(&most, I64, 1), sixteenth = tensor_of(factors, F32, N, 1);
    Tensor small = tensor_of(codes, E2M1, N, N), large = x;
    small.scale = large.scale = &sixteenth;
    OK(op(&dev.stream, fp8_cast, .y = small, .x = plain, .amax = amax, .blocks = two));
    CHECK(op(&dev.stream, fp8_cast, .y = small, .x = plain, .blocks = two) == ERR_SHAPE &&
          strstr(err_message(), "and of amax"));
    CHECK(op(&dev.stream, fp8_cast, .y = small, .x = plain, .amax = amax) == ERR_SHAPE &&
          strstr(err_message(), "of e2m1"));
    CHECK(op(&dev.stream, fp8_cast, .y = large, .x = plain, .amax = amax, .blocks = two) == ERR_SHAPE &&
          strstr(err_message(), "of e2m1"));
    Tensor few = tensor_row_slice(plain, 0, N - 1), narrow = tensor_of(codes, E2M1, N, N - 1);
    narrow.scale = &sixteenth;
    CHECK(op(&dev.stream, fp8_cast, .turned = narrow, .x = few, .amax = amax, .blocks = two, .mixed = 1) == ERR_SHAPE &&
          strstr(err_message(), "not to be mixed"));
    CHECK(op(&dev.stream, fp8_amax, .amax = amax, .x = few, .mixed = 1) == ERR_SHAPE &&
          strstr(err_message(), "not to be mixed"));
    CHECK(op(&dev.stream, fp8_cast, .x = plain, .blocks = { 1, 128, FP8_SCALE_EXACT }) == ERR_SHAPE &&
          strstr(err_message(), "nothing is to be written"));
    device_close(&dev);
}

TEST_MAIN
