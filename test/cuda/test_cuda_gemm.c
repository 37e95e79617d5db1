/* The linear ops on cuda against the CPU's: sizes, views, bias, plans, timed choices, capture, refusals. */
#include "cuda_case.h"
#include "gemm.h"

static const DType types[] = { F32, BF16, F16 };
enum { TYPES = 3 };

static Pair columns(Pair p, int64_t first, int64_t count)
{
    for (int side = 0; side < 2; side++) p.t[side] = tensor_col_slice(p.t[side], first, count);
    return p;
}

/*
 * `rows` x `cols` inside rows of a multiple of 8 elements, so that odd sizes still start on 16 bytes. Columns
 * beyond hold numbers that must stay, on both sides.
 */
typedef struct {
    Pair whole, view;
} Padded;

static Padded padded(CudaCase *c, DType T, int64_t rows, int64_t cols)
{
    Padded p;
    p.whole = pair_random(c, T, 1, rows, (cols + 7) / 8 * 8);
    p.view = columns(p.whole, 0, cols);
    return p;
}

/* Sums of 16-bit products are exact to fp32 but for their order, and tensor cores cut bits off on the way. */
static double sum_tolerance(DType T) { return T == F32 ? 1e-5 : 1e-4; }

/* Tolerance with a bias. If rows are not aligned, kernels of the library round the product to 16 bits, and round again
 * with the bias: on an H100, 1.03 units of the last place were seen. */
static double biased_tolerance(DType T, bool with_bias)
{
    return (with_bias && T != F32 ? 1.5 : 1) * case_tolerance(T);
}

static void linear_case(DType T, int64_t N, int64_t O, int64_t I, bool with_bias)
{
    CudaCase *c = case_open();
    Padded x = padded(c, T, N, I), w = padded(c, T, O, I), y = padded(c, T, N, O), dy = padded(c, T, N, O),
           dx = padded(c, T, N, I), dw = padded(c, F32, O, I);
    Pair bias = pair_random(c, T, 1, O), shift = pair_zero(c, I32, 1), overflow = pair_zero(c, I32, 1);
    char what[128];
    snprintf(what, sizeof what, "%s N %d O %d I %d bias %d", dtype_name(T), (int)N, (int)O, (int)I, with_bias);
    if (!with_bias) memset(&bias, 0, sizeof bias);
    BOTH(c, linear_fwd, .y = AT(y.view), .x = AT(x.view), .w = AT(w.view), .bias = AT(bias), .leaf = I);
    pair_check(c, y.whole, biased_tolerance(T, with_bias), "fwd %s", what);
    BOTH(c, linear_dx, .dx = AT(dx.view), .dy = AT(dy.view), .w = AT(w.view), .leaf = O);
    pair_check(c, dx.whole, case_tolerance(T), "dx %s", what);
    for (int i = 0; i < 3; i++) { /* onto what is there, over it, onto that */
        BOTH(c, linear_dw, .dw = AT(dw.view), .dy = AT(dy.view), .x = AT(x.view), .shift = AT(shift),
             .overflow = AT(overflow), .leaf = N, .fresh = i == 1);
        pair_check(c, dw.whole, sum_tolerance(T), "dw %s", what);
    }
    case_close(c);
}

/* ---- results in fp32 of 16-bit numbers: a router's logits ---- */

typedef struct {
    double rms;
    int beyond; /* how many are off by more than a chain of fp32 sums may be: I times 2^-24 of the sum of |x w| */
} WideError;

/* Error of y beside x w^T + bias in float64. */
static WideError error_of(const float *y, Pair x, Pair w, Pair bias)
{
    const Tensor tx = x.t[CASE_CPU], tw = w.t[CASE_CPU];
    const float *px = tx.data, *pw = tw.data, *pb = bias.t[CASE_CPU].data;
    const int64_t N = tx.dim[0], O = tw.dim[0], I = tx.dim[1];
    double square = 0;
    WideError r = { 0 };
    for (int64_t n = 0; n < N; n++)
        for (int64_t o = 0; o < O; o++) {
            double sum = (double)pb[o], sizes = fabs(sum);
            for (int64_t i = 0; i < I; i++) {
                const double product = (double)px[n * I + i] * (double)pw[o * I + i];
                sum += product, sizes += fabs(product);
            }
            const double error = fabs(y[n * O + o] - sum);
            square += error * error;
            r.beyond += !(error <= (double)I * 0x1p-24 * sizes);
        }
    r.rms = sqrt(square / (double)(N * O));
    return r;
}

/* Within what fp32 sums, as the CPU's, may lose, and not many times what those do lose: tensor cores cut sums off, so
 * that errors add up which there half cancel (EMU_ROUND=chip: 8.4 times as much at 7,168 products). Were results or w
 * rounded to 16 bits once more, it would be a thousand times as much. */
static void wide_case(DType T, int64_t N, int64_t O, int64_t I)
{
    CudaCase *c = case_open();
    Pair x = pair_random(c, T, 1, N, I), w = pair_random(c, T, 1, O, I), bias = pair_random(c, F32, 1, O);
    Pair y = pair_output(c, F32, N, O);
    BOTH(c, linear_fwd, .y = AT(y), .x = AT(x), .w = AT(w), .bias = AT(bias), .leaf = I);
    OK(device_read(&c->dev[CASE_GPU].stream, c->first, y.t[CASE_GPU].data, tensor_bytes(y.t[CASE_GPU])));
    const WideError gpu = error_of((const float *)c->first, x, w, bias), cpu = error_of(y.t[CASE_CPU].data, x, w, bias);
    CHECK_MSG(gpu.rms <= 12 * cpu.rms && gpu.beyond == 0, "%s N %d O %d I %d: error %g, in fp32 %g; %d beyond",
              dtype_name(T), (int)N, (int)O, (int)I, gpu.rms, cpu.rms, gpu.beyond);
    case_close(c);
}

TEST(wide_results)
{
    for (int t = 1; t < TYPES; t++) {
        wide_case(types[t], 33, 8, 768);
        wide_case(types[t], 40, 16, 2048);
        wide_case(types[t], 20, 8, 7168);
    }
}

TEST(wide_results_refused)
{
    CudaCase *c = case_open();
    Pair x = pair_random(c, BF16, 1, 8, 16), w = pair_random(c, BF16, 1, 8, 16), y = pair_output(c, F32, 8, 8);
    Pair bias = pair_random(c, BF16, 1, 8), gelu = pair_output(c, BF16, 8, 8);
    case_side = CASE_GPU;
    FAILS(op(case_stream(c), linear_fwd, .y = AT(y), .x = AT(x), .w = AT(w), .bias = AT(bias), .leaf = 16), ERR_SHAPE,
          "linear_fwd on cuda: y is f32, and its bias or gelu is not");
    FAILS(op(case_stream(c), linear_fwd, .y = AT(y), .x = AT(x), .w = AT(w), .gelu = AT(gelu), .leaf = 16), ERR_SHAPE,
          "linear_fwd on cuda: y is f32, and its bias or gelu is not");
    case_close(c);
}

TEST(sizes)
{
    static const int64_t size[][3] = { { 1, 1, 1 },   { 1, 8, 16 },  { 7, 5, 3 },    { 63, 64, 65 }, { 64, 64, 64 },
                                       { 65, 63, 9 }, { 3, 129, 1 }, { 128, 7, 33 }, { 17, 96, 200 } };
    for (int t = 0; t < TYPES; t++)
        for (size_t i = 0; i < sizeof size / sizeof *size; i++)
            for (int bias = 0; bias < 2; bias++) linear_case(types[t], size[i][0], size[i][1], size[i][2], bias);
}

/* What was in the outputs before, NaN even, is gone. */
TEST(overwrites)
{
    for (int t = 0; t < TYPES; t++) {
        CudaCase *c = case_open();
        Pair x = pair_random(c, types[t], 1, 24, 40), w = pair_random(c, types[t], 1, 32, 40),
             y = pair_output(c, types[t], 24, 32), dx = pair_output(c, types[t], 24, 40),
             dw = pair_output(c, F32, 40, 40), shift = pair_zero(c, I32, 1), overflow = pair_zero(c, I32, 1);
        BOTH(c, linear_fwd, .y = AT(y), .x = AT(x), .w = AT(w), .leaf = 40);
        pair_check(c, y, case_tolerance(types[t]), "fwd");
        BOTH(c, linear_dx, .dx = AT(dx), .dy = AT(y), .w = AT(w), .leaf = 32);
        pair_check(c, dx, 4 * case_tolerance(types[t]), "dx of y, which is rounded on one side only");
        BOTH(c, linear_dw, .dw = AT(dw), .dy = AT(x), .x = AT(x), .shift = AT(shift), .overflow = AT(overflow),
             .leaf = 24, .fresh = 1);
        pair_check(c, dw, sum_tolerance(types[t]), "dw");
        case_close(c);
    }
}

/* Columns out of wider tensors, from 16 and 48 bytes on: inputs and outputs of all three products. */
TEST(column_views)
{
    enum { N = 12, O = 16, I = 32 };
    for (int t = 0; t < TYPES; t++)
        for (int64_t skip = 8; skip <= 24; skip += 16) {
            CudaCase *c = case_open();
            Pair wide = pair_random(c, types[t], 1, N, I + 24), wide_y = pair_random(c, types[t], 1, N, O + 24),
                 wide_dx = pair_random(c, types[t], 1, N, I + 24), w = pair_random(c, types[t], 1, O, I),
                 dw = pair_random(c, F32, 1, O, I), shift = pair_zero(c, I32, 1), overflow = pair_zero(c, I32, 1),
                 wide_dy = pair_random(c, types[t], 1, N, O + 24), x = columns(wide, skip, I),
                 y = columns(wide_y, skip, O), dx = columns(wide_dx, skip, I), dy = columns(wide_dy, skip, O);
            BOTH(c, linear_fwd, .y = AT(y), .x = AT(x), .w = AT(w), .leaf = I);
            pair_check(c, wide_y, case_tolerance(types[t]), "fwd, columns from %d", (int)skip);
            BOTH(c, linear_dx, .dx = AT(dx), .dy = AT(dy), .w = AT(w), .leaf = O);
            pair_check(c, wide_dx, case_tolerance(types[t]), "dx, columns from %d", (int)skip);
            BOTH(c, linear_dw, .dw = AT(dw), .dy = AT(dy), .x = AT(x), .shift = AT(shift), .overflow = AT(overflow),
                 .leaf = N);
            pair_check(c, dw, sum_tolerance(types[t]), "dw, columns from %d", (int)skip);
            case_close(c);
        }
}

/* A layer cut by outputs: each half with its half of the weight and of the bias, into its columns of y. Both halves
 * share a plan where their addresses are aligned alike (O = 128). */
static void cut_case(DType T, int64_t O)
{
    enum { N = 9, I = 24 };
    CudaCase *c = case_open();
    Pair x = pair_random(c, T, 1, N, I), w = pair_random(c, T, 1, O, I), bias = pair_random(c, T, 1, O),
         y = pair_output(c, T, N, O);
    case_side = CASE_CPU;
    OK(op(case_stream(c), linear_fwd, .y = AT(y), .x = AT(x), .w = AT(w), .bias = AT(bias), .leaf = I));
    case_side = CASE_GPU;
    for (int half = 0; half < 2; half++)
        OK(op(case_stream(c), linear_fwd, .y = tensor_col_slice(AT(y), half * O / 2, O / 2), .x = AT(x),
              .w = tensor_row_slice(AT(w), half * O / 2, O / 2),
              .bias = tensor_row_slice(AT(bias), half * O / 2, O / 2), .leaf = I));
    pair_check(c, y, case_tolerance(T), "two halves against the whole, %s, O %d", dtype_name(T), (int)O);
    case_close(c);
}

TEST(bias_of_a_cut_layer)
{
    for (int t = 0; t < TYPES; t++) {
        cut_case(types[t], 48);
        cut_case(types[t], 128);
    }
}

/* ---- GELU ---- */

static bool emulated(void)
{
    DeviceInfo info;
    OK(device_cuda_info(0, &info));
    return !strcmp(info.name, "Emulated GPU");
}

static CudaGemm *gemm_of(CudaCase *c) { return ((CudaDevice *)c->dev[CASE_GPU].cuda)->gemm; }

/* Forward with GELU, and the gradient through it. Where it is done apart, it is GELU of what was rounded. */
static void gelu_case(DType T, int64_t N, int64_t O, int64_t I, bool with_bias, bool fuse)
{
    CudaCase *c = case_open();
    Padded x = padded(c, T, N, I), w = padded(c, T, O, I), y = padded(c, T, N, O), dy = padded(c, T, N, O),
           dx = padded(c, T, N, I), active = padded(c, T, N, O + 8); /* rows of y and of its GELU lie differently */
    active.view = columns(active.whole, 0, O);
    Pair bias = pair_random(c, T, 1, O);
    char what[128];
    snprintf(what, sizeof what, "%s N %d O %d I %d bias %d fused %d", dtype_name(T), (int)N, (int)O, (int)I, with_bias,
             fuse);
    if (!with_bias) memset(&bias, 0, sizeof bias);
    cuda_gemm_fuse_gelu(gemm_of(c), fuse);
    int64_t fused = cuda_gemm_counts(gemm_of(c)).fused;
    BOTH(c, linear_fwd, .y = AT(y.view), .gelu = AT(active.view), .x = AT(x.view), .w = AT(w.view), .bias = AT(bias),
         .leaf = I);
    pair_check(c, y.whole, case_tolerance(T), "y %s", what);
    pair_check(c, active.whole, 2 * case_tolerance(T), "gelu %s", what);
    BOTH(c, linear_dx, .dx = AT(dx.view), .dy = AT(dy.view), .w = AT(w.view), .gelu_x = AT(x.view), .leaf = O);
    pair_check(c, dx.whole, 2 * case_tolerance(T), "dx %s", what);
    fused = cuda_gemm_counts(gemm_of(c)).fused - fused;
    bool possible = fuse && T != F32 && O % 8 == 0 && I % 8 == 0; /* in the emulated library */
    CHECK_MSG(!emulated() || fused == (possible ? 4 : 0), "%s: %d calls with GELU inside", what, (int)fused);
    case_close(c);
}

TEST(gelu_in_the_product_and_apart)
{
    static const int64_t size[][3] = { { 1, 8, 8 }, { 37, 64, 40 }, { 64, 24, 136 }, { 9, 13, 21 } };
    for (int t = 0; t < TYPES; t++)
        for (size_t i = 0; i < sizeof size / sizeof *size; i++)
            for (int j = 0; j < 4; j++) gelu_case(types[t], size[i][0], size[i][1], size[i][2], j & 1, j & 2);
    cuda_gemm_fuse_gelu(gemm_of(case_open()), true);
}

/* ---- plans ---- */

static Err forward(CudaCase *c, Pair y, Pair x, Pair w)
{
    case_side = CASE_GPU;
    return op(case_stream(c), linear_fwd, .y = AT(y), .x = AT(x), .w = AT(w), .leaf = AT(x).dim[1]);
}

TEST(a_repeated_shape_is_a_look_up)
{
    CudaCase *c = case_open();
    Pair x = pair_random(c, BF16, 1, 40, 56), w = pair_random(c, BF16, 1, 72, 56), y = pair_output(c, BF16, 40, 72);
    OK(forward(c, y, x, w));
    CudaGemmCounts before = cuda_gemm_counts(gemm_of(c));
    for (int i = 0; i < 3; i++) OK(forward(c, y, x, w));
    CudaGemmCounts after = cuda_gemm_counts(gemm_of(c));
    CHECK(after.calls == before.calls + 3 && after.plans == before.plans);
    for (int side = 0; side < 2; side++) { /* fewer rows: another shape */
        x.t[side] = tensor_row_slice(x.t[side], 0, 39);
        y.t[side] = tensor_row_slice(y.t[side], 0, 39);
    }
    OK(forward(c, y, x, w));
    CHECK(cuda_gemm_counts(gemm_of(c)).plans == after.plans + 1);
    case_close(c);
}

/* More shapes than the table holds: each is still right, before and after it is emptied. */
TEST(more_shapes_than_plans)
{
    enum { ROWS = 450, O = 8, I = 8 };
    CudaCase *c = case_open();
    Pair x = pair_random(c, F32, 1, ROWS, I), w = pair_random(c, F32, 1, O, I), y = pair_output(c, F32, ROWS, O);
    int64_t plans = cuda_gemm_counts(gemm_of(c)).plans;
    case_side = CASE_CPU;
    OK(op(case_stream(c), linear_fwd, .y = AT(y), .x = AT(x), .w = AT(w), .leaf = I));
    for (int64_t n = ROWS; n > 0; n--) {
        Pair part = y, rows = x;
        part.t[CASE_GPU] = tensor_row_slice(y.t[CASE_GPU], 0, n);
        rows.t[CASE_GPU] = tensor_row_slice(x.t[CASE_GPU], 0, n);
        OK(forward(c, part, rows, w));
        if (n % 90 == 0) pair_check(c, y, 1e-5, "%d rows", (int)n);
    }
    CHECK(cuda_gemm_counts(gemm_of(c)).plans == plans + ROWS);
    case_close(c);
}

/* ---- choices by timing ---- */

typedef struct {
    CudaCase *c;
    Pair x, w, y, dy, dw, shift, overflow;
    char *text;
} Tuning;

static Tuning tuning_begin(void)
{
    CudaCase *c = case_open();
    Tuning t = { .c = c, .text = malloc(CUDA_GEMM_TEXT_BYTES) };
    t.x = pair_random(c, BF16, 1, 40, 48), t.w = pair_random(c, BF16, 1, 88, 48);
    t.y = pair_output(c, BF16, 40, 88), t.dy = pair_random(c, BF16, 1, 40, 88), t.dw = pair_zero(c, F32, 88, 48);
    t.shift = pair_zero(c, I32, 1), t.overflow = pair_zero(c, I32, 1);
    return t;
}

static void tuning_end(Tuning *t)
{
    cuda_gemm_autotune(gemm_of(t->c), TUNE_OFF);
    free(t->text);
    case_close(t->c);
}

static void forget_choices(CudaCase *c)
{
    CudaGemm *fresh;
    char *text = malloc(CUDA_GEMM_TEXT_BYTES);
    OK(cuda_gemm_open(&fresh));
    cuda_gemm_save(fresh, text);
    OK(cuda_gemm_load(gemm_of(c), text));
    cuda_gemm_close(fresh);
    free(text);
}

/* One line of choices for `op`, or NULL. */
static const char *choice_of(const char *text, const char *op)
{
    char start[64];
    snprintf(start, sizeof start, "\n%s ", op);
    return strstr(text, start);
}

TEST(timing_chooses_once_and_changes_no_result)
{
    Tuning t = tuning_begin();
    CudaGemm *g = gemm_of(t.c);
    case_side = CASE_CPU;
    OK(op(case_stream(t.c), linear_fwd, .y = AT(t.y), .x = AT(t.x), .w = AT(t.w), .leaf = 48));
    CudaGemmCounts before = cuda_gemm_counts(g);
    cuda_gemm_autotune(g, TUNE_FASTEST);
    for (int i = 0; i < 3; i++) OK(forward(t.c, t.y, t.x, t.w));
    CHECK(cuda_gemm_counts(g).timed == before.timed + 1);
    pair_check(t.c, t.y, case_tolerance(BF16), "timed");
    int64_t length = cuda_gemm_save(g, t.text);
    CHECK(length == (int64_t)strlen(t.text) && length < CUDA_GEMM_TEXT_BYTES);
    CHECK(strncmp(t.text, "cublasLt ", 9) == 0);
    CHECK(choice_of(t.text, "linear_fwd") != NULL);
    tuning_end(&t);
}

/* The emulator's algorithms 1 and 2 give the same bits; algorithm 3, which splits its sums, gives others. */
TEST(timing_that_keeps_the_bits)
{
    static const struct {
        const char *fast;
        DeviceTuning how;
        bool zeros, same_choice, same_bits; /* as the first one */
    } rows[] = { { "1", TUNE_SAME_BITS, false, true, true },   { "2", TUNE_SAME_BITS, false, false, true },
                 { "3", TUNE_SAME_BITS, false, true, true },   { "3", TUNE_FASTEST, false, false, false },
                 { "23", TUNE_SAME_BITS, false, false, true }, { "2", TUNE_SAME_BITS, true, true, true } };
    Tuning t = tuning_begin();
    CudaGemm *g = gemm_of(t.c);
    const int64_t bytes = tensor_bytes(t.dw.t[CASE_GPU]);
    char *chosen = malloc(CUDA_GEMM_TEXT_BYTES), *first = malloc((size_t)bytes), *now = malloc((size_t)bytes);
    case_side = CASE_GPU;
    for (int i = 0; i < 6; i++) {
        if (rows[i].zeros) OK(device_zero(case_stream(t.c), t.dy.t[CASE_GPU].data, tensor_bytes(t.dy.t[CASE_GPU])));
        for (int tuned = 0; tuned < 2; tuned++) {
            forget_choices(t.c);
            cuda_gemm_autotune(g, !tuned ? TUNE_OFF : rows[i].how);
            if (tuned) setenv("EMU_LT_FAST", rows[i].fast, 1);
            for (int call = 0; call < 2; call++)
                OK(op(case_stream(t.c), linear_dw, .dw = AT(t.dw), .dy = AT(t.dy), .x = AT(t.x), .shift = AT(t.shift),
                      .overflow = AT(t.overflow), .leaf = 40, .fresh = true));
            unsetenv("EMU_LT_FAST");
            OK(device_read(case_stream(t.c), tuned ? now : first, t.dw.t[CASE_GPU].data, bytes));
        }
        const bool same_bits = memcmp(first, now, (size_t)bytes) == 0;
        cuda_gemm_save(g, chosen);
        if (i == 0) strcpy(t.text, chosen); /* what the heuristic takes first, chosen */
        CHECK_MSG(same_bits || !rows[i].same_bits, "fast: %s: other bits", rows[i].fast);
        CHECK(choice_of(chosen, "linear_dw") != NULL);
        if (!emulated()) continue;
        CHECK_MSG(same_bits == rows[i].same_bits, "fast: %s: the same bits", rows[i].fast);
        CHECK_MSG((strcmp(chosen, t.text) == 0) == rows[i].same_choice, "fast: %s: %s", rows[i].fast, chosen);
    }
    /* 3,520 results in 16 bits are too few to tell */
    forget_choices(t.c);
    cuda_gemm_autotune(g, TUNE_OFF);
    OK(forward(t.c, t.y, t.x, t.w));
    case_snapshot(t.c, t.c->first);
    for (int fast = 2; fast <= 3; fast++) {
        forget_choices(t.c);
        setenv("EMU_LT_FAST", fast == 2 ? "2" : "3", 1);
        cuda_gemm_autotune(g, TUNE_SAME_BITS);
        OK(forward(t.c, t.y, t.x, t.w));
        unsetenv("EMU_LT_FAST");
        cuda_gemm_save(g, fast == 2 ? t.text : chosen);
        case_snapshot(t.c, t.c->second);
        CHECK(memcmp(t.c->first, t.c->second, (size_t)t.c->arena[CASE_GPU].used_bytes) == 0);
    }
    CHECK(strcmp(t.text, chosen) == 0);
    free(chosen), free(first), free(now);
    forget_choices(t.c);
    tuning_end(&t);
}

/* A weight [N, K]; `wild`: every other row of it is infinite. */
static Pair weight_of(CudaCase *c, DType T, int64_t N, int64_t K, bool wild)
{
    Pair w = pair_random(c, T, 1, N, K);
    float *values = malloc((size_t)(N * K) * sizeof *values);
    memcpy(values, w.t[CASE_CPU].data, (size_t)(N * K) * sizeof *values);
    for (int64_t i = 0; wild && i < N * K; i++)
        if (i / K % 2) values[i] = INFINITY;
    pair_set(c, &w, values);
    free(values);
    return w;
}

/*
 * Just as many results as tell in which order they were added, half of them infinite or NaN: nothing is chosen, and
 * data that are finite decide. The emulator's algorithm 3 gives other bits, which a comparison of NaN does not show.
 */
static void overflow_case(DType T)
{
    const int64_t N = T == F32 ? 32 : 1024, K = 24;
    CudaCase *c = case_open();
    CudaGemm *g = gemm_of(c);
    Pair x = pair_random(c, T, 1, N, K), y = pair_output(c, T, N, N), w = weight_of(c, T, N, K, false),
         wild = weight_of(c, T, N, K, true);
    const int64_t bytes = tensor_bytes(y.t[CASE_GPU]), timed = cuda_gemm_counts(g).timed;
    forget_choices(c);
    OK(forward(c, y, x, w));
    OK(device_read(case_stream(c), c->first, y.t[CASE_GPU].data, bytes));
    setenv("EMU_LT_FAST", "3", 1);
    cuda_gemm_autotune(g, TUNE_SAME_BITS);
    for (int i = 0; i < 2; i++) OK(forward(c, y, x, wild));
    const CudaGemmCounts now = cuda_gemm_counts(g);
    CHECK_MSG(now.timed == timed && now.choices == 0, "%s: chosen by results that overflowed", dtype_name(T));
    for (int i = 0; i < 2; i++) OK(forward(c, y, x, w));
    CHECK_MSG(cuda_gemm_counts(g).timed == timed + 1, "%s: not chosen by finite results", dtype_name(T));
    unsetenv("EMU_LT_FAST");
    cuda_gemm_autotune(g, TUNE_OFF);
    OK(device_read(case_stream(c), c->second, y.t[CASE_GPU].data, bytes));
    CHECK_MSG(memcmp(c->first, c->second, (size_t)bytes) == 0, "%s: other bits", dtype_name(T));
    forget_choices(c);
    case_close(c);
}

TEST(timing_waits_while_results_overflow)
{
    for (int t = 0; t < TYPES; t++) overflow_case(types[t]);
}

/* An accumulating product must not run twice: it is not timed, but takes the choice of the one that overwrites. */
TEST(timing_leaves_accumulators_alone)
{
    Tuning t = tuning_begin();
    CudaGemm *g = gemm_of(t.c);
    int64_t timed = cuda_gemm_counts(g).timed;
    cuda_gemm_autotune(g, TUNE_FASTEST);
    BOTH(t.c, linear_dw, .dw = AT(t.dw), .dy = AT(t.dy), .x = AT(t.x), .shift = AT(t.shift), .overflow = AT(t.overflow),
         .leaf = 40);
    CHECK(cuda_gemm_counts(g).timed == timed);
    for (int fresh = 1; fresh >= 0; fresh--)
        BOTH(t.c, linear_dw, .dw = AT(t.dw), .dy = AT(t.dy), .x = AT(t.x), .shift = AT(t.shift),
             .overflow = AT(t.overflow), .leaf = 40, .fresh = fresh);
    CHECK(cuda_gemm_counts(g).timed == timed + 1);
    pair_check(t.c, t.dw, sum_tolerance(BF16), "dw");
    tuning_end(&t);
}

TEST(choices_travel_as_text)
{
    Tuning t = tuning_begin();
    CudaGemm *g = gemm_of(t.c), *other;
    char *again = malloc(CUDA_GEMM_TEXT_BYTES), *bad = malloc(CUDA_GEMM_TEXT_BYTES);
    cuda_gemm_autotune(g, TUNE_FASTEST);
    OK(forward(t.c, t.y, t.x, t.w));
    cuda_gemm_autotune(g, TUNE_OFF);
    cuda_gemm_save(g, t.text);
    OK(cuda_gemm_open(&other));
    OK(cuda_gemm_load(other, t.text));
    CHECK(cuda_gemm_counts(other).choices == cuda_gemm_counts(g).choices);
    cuda_gemm_save(other, again);
    CHECK(strcmp(again, t.text) == 0);
    /* with the choice loaded nothing is timed, and the bits are the same */
    case_snapshot(t.c, t.c->first);
    OK(cuda_gemm_load(g, t.text));
    int64_t timed = cuda_gemm_counts(g).timed;
    cuda_gemm_autotune(g, TUNE_FASTEST);
    OK(forward(t.c, t.y, t.x, t.w));
    CHECK(cuda_gemm_counts(g).timed == timed);
    case_snapshot(t.c, t.c->second);
    CHECK(memcmp(t.c->first, t.c->second, (size_t)t.c->arena[CASE_GPU].used_bytes) == 0);
    /* damage */
    int64_t held = cuda_gemm_counts(other).choices;
    snprintf(bad, CUDA_GEMM_TEXT_BYTES, "cublasLt 1, another GPU%s", strchr(t.text, '\n'));
    FAILS(cuda_gemm_load(other, bad), ERR_CONFIG, "cublasLt 1, another GPU");
    FAILS(cuda_gemm_load(other, ""), ERR_CONFIG, "choices");
    for (size_t cut = strcspn(t.text, "\n") + 2; cut < strlen(t.text) - 1; cut += 13) { /* any torn last line */
        snprintf(bad, cut + 1, "%s", t.text);
        FAILS(cuda_gemm_load(other, bad), ERR_CONFIG, "damaged");
    }
    snprintf(bad, CUDA_GEMM_TEXT_BYTES, "%.*s more\n", (int)(strlen(t.text) - 1), t.text);
    FAILS(cuda_gemm_load(other, bad), ERR_CONFIG, "damaged");
    snprintf(bad, CUDA_GEMM_TEXT_BYTES, "%s", t.text);
    memcpy(strstr(bad, "\nlinear_"), "\nlinnar_", 8);
    FAILS(cuda_gemm_load(other, bad), ERR_CONFIG, "line 2");
    CHECK(cuda_gemm_counts(other).choices == held);
    cuda_gemm_close(other);
    free(again), free(bad);
    tuning_end(&t);
}

/* If two ranks chose differently, both take the choice of one; shapes that only the other has met are added. */
TEST(choices_of_another_are_added)
{
    Tuning t = tuning_begin();
    CudaGemm *g = gemm_of(t.c), *first, *both;
    char *mine = malloc(CUDA_GEMM_TEXT_BYTES), *merged = malloc(CUDA_GEMM_TEXT_BYTES);
    forget_choices(t.c);
    cuda_gemm_autotune(g, TUNE_FASTEST);
    OK(forward(t.c, t.y, t.x, t.w));
    cuda_gemm_save(g, t.text); /* of one shape */
    case_side = CASE_GPU;
    OK(op(case_stream(t.c), linear_dw, .dw = AT(t.dw), .dy = AT(t.dy), .x = AT(t.x), .shift = AT(t.shift),
          .overflow = AT(t.overflow), .leaf = 40, .fresh = true));
    cuda_gemm_autotune(g, TUNE_OFF);
    cuda_gemm_save(g, mine);
    char *other = strstr(mine, "\nlinear_fwd ");
    CHECK(other && cuda_gemm_counts(g).choices == 2);
    char *last = strchr(other + 1, '\n') - 1;
    *last = *last == '1' ? '2' : '1'; /* another algorithm for the shape that both have */
    OK(cuda_gemm_open(&both));
    OK(cuda_gemm_load(both, t.text));
    OK(cuda_gemm_add(both, mine));
    cuda_gemm_save(both, merged);
    CHECK(cuda_gemm_counts(both).choices == 2 && strncmp(merged, t.text, strlen(t.text)) == 0);
    CHECK(choice_of(merged, "linear_dw") != NULL);
    OK(cuda_gemm_open(&first));
    OK(cuda_gemm_load(first, mine));
    OK(cuda_gemm_add(first, t.text));
    cuda_gemm_save(first, merged);
    CHECK(strcmp(merged, mine) == 0); /* its own stay */
    cuda_gemm_close(first), cuda_gemm_close(both);
    free(mine), free(merged);
    forget_choices(t.c);
    tuning_end(&t);
}

/* The emulator's algorithms 1, 2 and 3 are those with a fixed order. */
TEST(algorithms_that_do_not_say_how_they_add)
{
    static const struct {
        const char *silent;
        int64_t unknown, unsplit;
    } rows[] = { { "1", 1, 0 }, { "1,2", 2, 0 }, { "1,2,3", 3, 1 }, { "none", 0, 0 } };
    Tuning t = tuning_begin();
    CudaGemm *g = gemm_of(t.c);
    case_side = CASE_CPU;
    OK(op(case_stream(t.c), linear_fwd, .y = AT(t.y), .x = AT(t.x), .w = AT(t.w), .leaf = 48));
    for (int i = 0; i < 4; i++) {
        const CudaGemmCounts before = cuda_gemm_counts(g);
        forget_choices(t.c); /* and plans */
        setenv("EMU_LT_SILENT", rows[i].silent, 1);
        OK(forward(t.c, t.y, t.x, t.w));
        const CudaGemmCounts after = cuda_gemm_counts(g);
        pair_check(t.c, t.y, case_tolerance(BF16), "silent: %s", rows[i].silent);
        if (emulated())
            CHECK_MSG(after.unknown == before.unknown + rows[i].unknown &&
                          after.unsplit == before.unsplit + rows[i].unsplit,
                      "silent: %s: %d, %d", rows[i].silent, (int)(after.unknown - before.unknown),
                      (int)(after.unsplit - before.unsplit));
    }
    unsetenv("EMU_LT_SILENT");
    forget_choices(t.c);
    tuning_end(&t);
}

/* Some multiprocessors left to a communicator: right results; choices hold for both numbers, and plans stay. */
TEST(multiprocessors_are_left_free)
{
    Tuning t = tuning_begin();
    CudaGemm *g = gemm_of(t.c), *other;
    char *all = malloc(CUDA_GEMM_TEXT_BYTES), few[64];
    const int count = t.c->dev[CASE_GPU].threads;
    cuda_gemm_autotune(g, TUNE_FASTEST);
    forget_choices(t.c);
    OK(forward(t.c, t.y, t.x, t.w));
    cuda_gemm_save(g, all);
    for (int left = 1; left <= count; left += count - 1) { /* never more than half */
        device_leave_free(&t.c->dev[CASE_GPU], left);
        case_side = CASE_CPU;
        OK(op(case_stream(t.c), linear_fwd, .y = AT(t.y), .x = AT(t.x), .w = AT(t.w), .leaf = 48));
        const CudaGemmCounts before = cuda_gemm_counts(g);
        for (int i = 0; i < 4; i++) {
            t.c->dev[CASE_GPU].beside = i % 2;
            OK(forward(t.c, t.y, t.x, t.w));
            pair_check(t.c, t.y, case_tolerance(BF16), "%d left free, %d beside", left, i % 2);
        }
        t.c->dev[CASE_GPU].beside = 0;
        const CudaGemmCounts after = cuda_gemm_counts(g);
        CHECK(after.plans == before.plans + 2 && after.timed == before.timed + 2 && after.choices == 2);
        snprintf(few, sizeof few, ", %d or %d multiprocessors\n", left == 1 ? count - 1 : (count + 1) / 2, count);
        cuda_gemm_save(g, t.text);
        CHECK_MSG(strstr(t.text, few) != NULL, "%d left free: %s", left, t.text);
        if (emulated()) { /* whose algorithms are for one number each, by their second word */
            const char *first = strstr(t.text, " 6c74616c "), *second = strstr(first + 1, " 6c74616c ");
            CHECK(memcmp(first, second, 20) != 0);
        }
    }
    FAILS(cuda_gemm_load(g, all), ERR_CONFIG, "choices");
    device_leave_free(&t.c->dev[CASE_GPU], 0);
    OK(cuda_gemm_open(&other));
    cuda_gemm_save(g, t.text);
    OK(cuda_gemm_load(other, t.text));
    cuda_gemm_close(other);
    free(all);
    tuning_end(&t);
}

/* dw beside collectives, or not, into `out`; *planned: a plan was made for it. */
static void dw_beside(Tuning *t, bool beside, char *out, bool *planned)
{
    const int64_t plans = cuda_gemm_counts(gemm_of(t->c)).plans;
    case_side = CASE_GPU;
    t->c->dev[CASE_GPU].beside = beside;
    OK(op(case_stream(t->c), linear_dw, .dw = AT(t->dw), .dy = AT(t->dy), .x = AT(t->x), .shift = AT(t->shift),
          .overflow = AT(t->overflow), .leaf = 40, .fresh = true));
    t->c->dev[CASE_GPU].beside = 0;
    OK(device_read(case_stream(t->c), out, t->dw.t[CASE_GPU].data, tensor_bytes(t->dw.t[CASE_GPU])));
    *planned = cuda_gemm_counts(gemm_of(t->c)).plans > plans;
}

/*
 * What runs beside a product changes none of its bits, though the emulator offers the algorithm that splits sums, which
 * is also the fastest, first there. Without timing, and where results tell nothing, products take all multiprocessors.
 */
TEST(bits_do_not_depend_on_what_runs_beside)
{
    static const struct {
        DeviceTuning how;
        bool zeros, own_plan;
    } rows[] = { { TUNE_SAME_BITS, false, true },
                 { TUNE_SAME_BITS, true, false },
                 { TUNE_OFF, false, false },
                 { TUNE_FASTEST, false, true } };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        Tuning t = tuning_begin();
        const int64_t bytes = tensor_bytes(t.dw.t[CASE_GPU]);
        char *alone = malloc((size_t)bytes), *beside = malloc((size_t)bytes);
        bool planned, planned_beside;
        cuda_gemm_autotune(gemm_of(t.c), rows[i].how);
        device_leave_free(&t.c->dev[CASE_GPU], 1);
        if (rows[i].zeros) OK(device_zero(case_stream(t.c), t.dy.t[CASE_GPU].data, tensor_bytes(t.dy.t[CASE_GPU])));
        setenv("EMU_LT_FAST", "3", 1);
        dw_beside(&t, false, alone, &planned);
        dw_beside(&t, true, beside, &planned_beside);
        unsetenv("EMU_LT_FAST");
        CHECK_MSG(memcmp(alone, beside, (size_t)bytes) == 0, "row %d: other bits", (int)i);
        if (emulated()) CHECK_MSG(planned_beside == rows[i].own_plan, "row %d: its own plan", (int)i);
        device_leave_free(&t.c->dev[CASE_GPU], 0);
        free(alone), free(beside);
        tuning_end(&t);
    }
}

/*
 * The choice for 88 outputs under the key of 72: the emulator's algorithms serve one product only, so the loaded
 * choice is refused, with the op's name and sizes. (On a GPU it may well fit.)
 */
TEST(a_choice_that_does_not_fit)
{
    Tuning t = tuning_begin();
    CudaGemm *g = gemm_of(t.c);
    cuda_gemm_autotune(g, TUNE_FASTEST);
    OK(forward(t.c, t.y, t.x, t.w));
    cuda_gemm_autotune(g, TUNE_OFF);
    cuda_gemm_save(g, t.text);
    char *sizes = strstr(t.text, " 88 40 48 ");
    CHECK(sizes != NULL);
    memcpy(sizes, " 72", 3);
    char *columns = strstr(sizes, " 88 ");
    CHECK(columns != NULL);
    memcpy(columns, " 72", 3);
    OK(cuda_gemm_load(g, t.text));
    Pair w = t.w, y = t.y;
    w.t[CASE_GPU] = tensor_row_slice(w.t[CASE_GPU], 0, 72);
    y.t[CASE_GPU] = tensor_of(y.t[CASE_GPU].data, BF16, 40, 72);
    if (emulated())
        FAILS(forward(t.c, y, t.x, w), ERR_DEVICE, "linear_fwd (N 40, O 72, I 48, bf16): the chosen algorithm");
    forget_choices(t.c);
    OK(forward(t.c, y, t.x, w));
    tuning_end(&t);
}

/* ---- capture ---- */

static void cuda_ok(cudaError_t code) { CHECK_MSG(code == cudaSuccess, "%s", cudaGetErrorString(code)); }

/* Captured with timing on and not yet done: recorded with the heuristic's first, run by the graph, timed later. */
TEST(capture)
{
    Tuning t = tuning_begin();
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CudaGemm *g = gemm_of(t.c);
    forget_choices(t.c);
    case_side = CASE_CPU;
    OK(op(case_stream(t.c), linear_fwd, .y = AT(t.y), .x = AT(t.x), .w = AT(t.w), .leaf = 48));
    OK(forward(t.c, t.y, t.x, t.w));
    CudaGemmCounts before = cuda_gemm_counts(g);
    cuda_gemm_autotune(g, TUNE_FASTEST);
    cudaStream_t stream = case_stream(t.c)->handle;
    OK(device_zero(case_stream(t.c), t.y.t[CASE_GPU].data, tensor_bytes(t.y.t[CASE_GPU])));
    OK(device_sync(case_stream(t.c)));
    cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    OK(forward(t.c, t.y, t.x, t.w));
    cuda_ok(cudaStreamEndCapture(stream, &graph));
    CHECK(cuda_gemm_counts(g).timed == before.timed);
    cuda_ok(cudaGraphInstantiate(&exec, graph, 0));
    cuda_ok(cudaGraphLaunch(exec, stream));
    pair_check(t.c, t.y, case_tolerance(BF16), "by the graph");
    OK(forward(t.c, t.y, t.x, t.w));
    CHECK(cuda_gemm_counts(g).timed == before.timed + 1);
    cuda_ok(cudaGraphExecDestroy(exec));
    cuda_ok(cudaGraphDestroy(graph));
    tuning_end(&t);
}

/* ---- refusals ---- */

TEST(refusals)
{
    CudaCase *c = case_open();
    int64_t count = 4;
    Pair x = pair_random(c, BF16, 1, 8, 16), w = pair_random(c, BF16, 1, 8, 16), y = pair_output(c, BF16, 8, 8),
         whole = pair_zero(c, I64, 8, 16), shift = pair_zero(c, I32, 1),
         overflow = pair_zero(c, I32, 1);
    case_side = CASE_GPU;
    Tensor counted = AT(x);
    counted.rows = &count;
    FAILS(op(case_stream(c), linear_fwd, .y = AT(y), .x = counted, .w = AT(w), .leaf = 16), ERR_SHAPE,
          "linear_fwd on cuda takes no row counts");
    FAILS(op(case_stream(c), linear_dx, .dx = counted, .dy = AT(y), .w = AT(w), .leaf = 8), ERR_SHAPE,
          "linear_dx on cuda takes no row counts");
    FAILS(op(case_stream(c), linear_dw, .dw = AT(whole), .dy = AT(y), .x = AT(x), .shift = AT(shift),
             .overflow = AT(overflow), .leaf = 8),
          ERR_SHAPE, "linear_dw on cuda has no fixed point");
    case_close(c);
}

/* Rows of 14 bytes: refused with a reason, or (the library on a GPU, slowly) right. */
TEST(rows_off_16_bytes)
{
    CudaCase *c = case_open();
    Pair x = pair_random(c, BF16, 1, 5, 7), w = pair_random(c, BF16, 1, 8, 7), y = pair_output(c, BF16, 5, 8);
    case_side = CASE_CPU;
    OK(op(case_stream(c), linear_fwd, .y = AT(y), .x = AT(x), .w = AT(w), .leaf = 7));
    if (forward(c, y, x, w)) {
        CHECK_MSG(strstr(err_message(), "linear_fwd (N 5, O 8, I 7, bf16): cublasLt has no algorithm"), "%s",
                  err_message());
        CHECK_MSG(strstr(err_hint_text(), "multiples of 8"), "%s", err_hint_text());
    } else pair_check(c, y, case_tolerance(BF16), "unaligned");
    case_close(c);
}

TEST_MAIN
