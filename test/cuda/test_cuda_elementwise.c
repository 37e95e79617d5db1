/* The ops of cuda/elementwise.cu; dropout must keep and drop exactly what the CPU does. */
#include "base/rng.h"
#include "pair_views.h"

static const DType types[] = { F32, BF16, F16 };

typedef struct {
    int64_t N, D, gap, skip;
} Size;

/* Packs of a row 1, tile - 1, tile, tile + 1 for blocks of 256; rows around the blocks'; unaligned rows. */
static const Size sizes[] = { { 1, 1, 0, 0 },    { 3, 8, 0, 0 },    { 65, 8, 0, 0 },   { 63, 16, 8, 8 },
                              { 5, 33, 0, 0 },   { 2, 64, 3, 0 },   { 2, 64, 16, 1 },  { 1, 1020, 4, 0 },
                              { 3, 1024, 0, 0 }, { 3, 1028, 0, 0 }, { 2, 2040, 0, 0 }, { 1, 2048, 0, 0 },
                              { 2, 2056, 8, 8 }, { 1, 2051, 1, 0 } };
enum { SIZES = sizeof sizes / sizeof *sizes };

static Matrix matrix(CudaCase *c, DType T, Size z, double size)
{
    return matrix_uniform(c, T, -size, size, z.N, z.D, z.gap, z.skip);
}

static const char *text(DType T, Size z)
{
    static char name[96];
    snprintf(name, sizeof name, "%s N %lld D %lld gap %lld skip %lld", dtype_name(T), (long long)z.N,
             (long long)z.D, (long long)z.gap, (long long)z.skip);
    return name;
}

static Pair used_rows(CudaCase *c, int64_t N)
{
    const int64_t used = N - N / 3;
    return pair_values(c, I64, &used, 1);
}

/* ---- maps ---- */

static void map_case(DType T, Size z, bool count)
{
    CudaCase *c = case_open();
    Matrix x = matrix(c, T, z, 6), dy = matrix(c, T, z, 2), y = matrix(c, T, z, 1), dx = matrix(c, T, z, 1);
    const Pair rows = used_rows(c, z.N), *used = count ? &rows : NULL;
    const Pair xv = x.view, yv = pair_used(y.view, used), dyv = dy.view, dxv = pair_used(dx.view, used);
    BOTH(c, gelu_fwd, .y = AT(yv), .x = AT(xv));
    pair_check(c, y.all, case_tolerance(T), "gelu_fwd %s", text(T, z));
    BOTH(c, gelu_bwd, .dx = AT(dxv), .dy = AT(dyv), .x = AT(xv));
    pair_check(c, dx.all, case_tolerance(T), "gelu_bwd %s", text(T, z));
    BOTH(c, gelu_erf_fwd, .y = AT(yv), .x = AT(xv));
    pair_check(c, y.all, case_tolerance(T), "gelu_erf_fwd %s", text(T, z));
    BOTH(c, gelu_erf_bwd, .dx = AT(dxv), .dy = AT(dyv), .x = AT(xv));
    pair_check(c, dx.all, case_tolerance(T), "gelu_erf_bwd %s", text(T, z));
    BOTH(c, relu2_fwd, .y = AT(yv), .x = AT(xv));
    pair_check(c, y.all, case_tolerance(T), "relu2_fwd %s", text(T, z));
    BOTH(c, relu2_bwd, .dx = AT(dxv), .dy = AT(dyv), .x = AT(xv));
    pair_check(c, dx.all, case_tolerance(T), "relu2_bwd %s", text(T, z));
    Matrix gate = matrix(c, T, z, 6), dgate = matrix(c, T, z, 1);
    const Pair gv = gate.view, dgv = dgate.view;
    BOTH(c, gate_fwd, .y = AT(yv), .x = AT(xv), .gate = AT(gv));
    pair_check(c, y.all, case_tolerance(T), "gate_fwd %s", text(T, z));
    BOTH(c, gate_bwd, .dx = AT(dxv), .dgate = AT(dgv), .dy = AT(dyv), .x = AT(xv), .gate = AT(gv));
    pair_check(c, dx.all, case_tolerance(T), "gate_bwd %s", text(T, z));
    pair_check(c, dgate.all, case_tolerance(T), "gate_bwd's gate %s", text(T, z));
    BOTH(c, scale, .y = AT(yv), .x = AT(xv), .factor = 5.65685424f);
    pair_check(c, y.all, case_tolerance(T), "scale %s", text(T, z));
    BOTH(c, softcap, .y = AT(yv), .x = AT(xv), .cap = 3);
    pair_check(c, y.all, case_tolerance(T), "softcap %s", text(T, z));
    BOTH(c, fill_zero, .x = AT(yv));
    pair_check(c, y.all, 0, "fill_zero %s", text(T, z));
    case_close(c);
}

TEST(maps)
{
    for (int t = 0; t < 3; t++)
        for (int k = 0; k < SIZES; k++) map_case(types[t], sizes[k], k % 3 == 2);
}

/* Gates that lie in groups of a projection's columns. */
TEST(gates_in_groups)
{
    static const Size groups[] = { { 48, 128, 256, 0 }, { 77, 64, 64, 8 }, { 36, 17, 3, 1 }, { 6, 1032, 8, 0 } };
    static const int64_t group[] = { 8, 7, 3, 2 };
    for (int k = 0; k < 12; k++) {
        CudaCase *c = case_open();
        const DType T = types[k % 3];
        const Size z = groups[k / 3];
        Matrix x = matrix(c, T, z, 6), dy = matrix(c, T, z, 2), y = matrix(c, T, z, 1), dx = matrix(c, T, z, 1);
        Matrix gate = matrix_groups(c, T, -6, 6, z.N, z.D, z.gap, z.skip, group[k / 3]);
        Matrix dgate = matrix_groups(c, T, -1, 1, z.N, z.D, z.gap, z.skip, group[k / 3]);
        BOTH(c, gate_fwd, .y = AT(y.view), .x = AT(x.view), .gate = AT(gate.view));
        pair_check(c, y.all, case_tolerance(T), "gate_fwd, groups of %lld, %s", (long long)group[k / 3], text(T, z));
        BOTH(c, gate_bwd, .dx = AT(dx.view), .dgate = AT(dgate.view), .dy = AT(dy.view), .x = AT(x.view),
             .gate = AT(gate.view));
        pair_check(c, dx.all, case_tolerance(T), "gate_bwd, groups of %lld, %s", (long long)group[k / 3], text(T, z));
        pair_check(c, dgate.all, case_tolerance(T), "gate_bwd's gate, groups of %lld, %s", (long long)group[k / 3],
                   text(T, z));
        case_close(c);
    }
}

/* To the dtype's rounding of the value itself, which may be as small as the dtype has them. */
static void check_value(CudaCase *c, Pair p, const char *what, double at)
{
    const Tensor g = p.t[CASE_GPU];
    const float *want = p.t[CASE_CPU].data;
    const double tiny = g.dtype == F16 ? 0x1p-24 : 0x1p-126;
    OK(device_read(&c->dev[CASE_GPU].stream, c->first, g.data, tensor_bytes(g)));
    for (int64_t i = 0; i < tensor_count(g); i++) {
        const double got = (double)case_load(c->first, g.dtype, i), w = (double)want[i];
        CHECK_MSG(fabs(got - w) <= case_tolerance(g.dtype) * fabs(w) + tiny,
                  "%s at %g, %s: gpu %.9g, cpu %.9g", what, at, dtype_name(g.dtype), got, w);
    }
}

/* Far out, where exp overflows or nothing is left. */
static void far_out(DType T, float value)
{
    CudaCase *c = case_open();
    const float pair[2] = { value, 1.5f };
    Pair x = pair_values(c, T, pair, 1, 1), dy = pair_values(c, T, pair + 1, 1, 1),
         gates = pair_values(c, T, pair, 1, 2);
    Pair y = pair_output(c, T, 1, 1), dx = pair_output(c, T, 1, 1), dgates = pair_output(c, T, 1, 2);
    BOTH(c, gelu_fwd, .y = AT(y), .x = AT(x));
    check_value(c, y, "gelu", (double)value);
    BOTH(c, gelu_bwd, .dx = AT(dx), .dy = AT(dy), .x = AT(x));
    check_value(c, dx, "slope of gelu", (double)value);
    BOTH(c, gate_fwd, .y = AT(y), .x = AT(dy), .gate = AT(x));
    check_value(c, y, "gate", (double)value);
    BOTH(c, swiglu_fwd, .y = AT(y), .x = AT(gates), .chunk = 1);
    check_value(c, y, "swiglu", (double)value);
    BOTH(c, swiglu_bwd, .dx = AT(dgates), .dy = AT(dy), .x = AT(gates), .chunk = 1);
    check_value(c, dgates, "slopes of swiglu", (double)value);
    BOTH(c, geglu_fwd, .y = AT(y), .x = AT(gates), .chunk = 1);
    check_value(c, y, "geglu", (double)value);
    BOTH(c, geglu_bwd, .dx = AT(dgates), .dy = AT(dy), .x = AT(gates), .chunk = 1);
    check_value(c, dgates, "slopes of geglu", (double)value);
    BOTH(c, clamped_swiglu_fwd, .y = AT(y), .x = AT(gates), .chunk = 1, .limit = 7);
    check_value(c, y, "clamped swiglu", (double)value);
    BOTH(c, clamped_swiglu_bwd, .dx = AT(dgates), .dy = AT(dy), .x = AT(gates), .chunk = 1, .limit = 7);
    check_value(c, dgates, "slopes of clamped swiglu", (double)value);
    case_close(c);
}

TEST(far_out)
{
    static const float table[] = {
        4e4f, -4e4f, 3e20f, -3e20f, 88, -88, -89, -30, 19.9f, -12, 0, -0.0f, 1e-30f
    };
    for (int t = 0; t < 3; t++)
        for (size_t k = 0; k < sizeof table / sizeof *table; k++)
            if (types[t] != F16 || fabsf(table[k]) <= 4e4f) far_out(types[t], table[k]);
}

/* NaN in, NaN out, and nowhere else. */
TEST(nan_stays)
{
    CudaCase *c = case_open();
    float values[16];
    for (int i = 0; i < 16; i++) values[i] = i == 5 ? NAN : 1.0f;
    Pair x = pair_values(c, BF16, values, 1, 16), dy = pair_random(c, BF16, 1, 1, 16),
         y = pair_zero(c, BF16, 1, 16);
    for (int op_index = 0; op_index < 6; op_index++) {
        if (op_index == 0) BOTH(c, gelu_fwd, .y = AT(y), .x = AT(x));
        else if (op_index == 1) BOTH(c, gelu_bwd, .dx = AT(y), .dy = AT(dy), .x = AT(x));
        else if (op_index == 2) BOTH(c, relu2_fwd, .y = AT(y), .x = AT(x));
        else if (op_index == 3) BOTH(c, relu2_bwd, .dx = AT(y), .dy = AT(dy), .x = AT(x));
        else if (op_index == 4) BOTH(c, gelu_erf_fwd, .y = AT(y), .x = AT(x));
        else BOTH(c, gelu_erf_bwd, .dx = AT(y), .dy = AT(dy), .x = AT(x));
        uint16_t got[16];
        OK(device_read(&c->dev[CASE_GPU].stream, got, y.t[CASE_GPU].data, sizeof got));
        for (int i = 0; i < 16; i++) CHECK(isnan(case_load(got, BF16, i)) == (i == 5));
    }
    case_close(c);
}

/* ---- residual and dropout ---- */

enum { RES_RESIDUAL = 1, RES_BIAS = 2, RES_DROP = 4, RES_OVER_X = 8, RES_OVER_RESIDUAL = 16, RES_USED = 32 };

typedef struct {
    Pair position, sample;
} DropPairs;

static DropPairs drop_pairs(CudaCase *c, int64_t N)
{
    int32_t position[128];
    int64_t sample[128];
    ASSERT(N <= 128);
    for (int64_t n = 0; n < N; n++) {
        position[n] = (int32_t)(test_rand(&c->random) % 5000);
        sample[n] = (int64_t)(test_rand(&c->random) >> 20);
    }
    DropPairs d = { .position = pair_values(c, I32, position, N) };
    d.sample = pair_values(c, I64, sample, N);
    return d;
}

/* Where the CPU's result is 0, the GPU's is, and nowhere else. */
static void check_zeros(CudaCase *c, Pair p, const char *what)
{
    const Tensor g = p.t[CASE_GPU];
    const float *want = p.t[CASE_CPU].data;
    int64_t differ = 0, zeros = 0;
    OK(device_read(&c->dev[CASE_GPU].stream, c->first, g.data, tensor_bytes(g)));
    for (int64_t i = 0; i < tensor_count(g); i++) {
        zeros += want[i] == 0;
        differ += (want[i] == 0) != (case_load(c->first, g.dtype, i) == 0);
    }
    CHECK_MSG(differ == 0, "%s: %lld of %lld dropped or kept otherwise (%lld dropped)", what,
              (long long)differ, (long long)tensor_count(g), (long long)zeros);
}

/* stream: of y, residual and dy, as wide as T or wider. */
static void residual_case(DType T, DType stream, Size z, int flags)
{
    CudaCase *c = case_open();
    const Tensor none = { 0 };
    /* x is away from 0, so that a 0 of dropout is known as one */
    Matrix x = matrix_uniform(c, T, 1, 2, z.N, z.D, z.gap, z.skip), residual = matrix(c, stream, z, 3);
    Matrix own = matrix(c, stream, z, 1), dy = matrix_uniform(c, stream, 1, 2, z.N, z.D, z.gap, z.skip),
           dx = matrix(c, T, z, 1);
    Pair bias = pair_random(c, T, 1, z.D), rows = used_rows(c, z.N);
    DropPairs d = drop_pairs(c, z.N);
    const Dropout drop = { rng_key(5, "site"), flags & RES_DROP ? dropout_threshold(0.2f) : 0, 1.25f };
    const bool add = flags & (RES_RESIDUAL | RES_OVER_RESIDUAL);
    Matrix y = flags & RES_OVER_X ? x : flags & RES_OVER_RESIDUAL ? residual : own;
    const Pair xv = pair_used(x.view, flags & RES_USED ? &rows : NULL), yv = y.view, rv = residual.view;
    const Pair dyv = pair_used(dy.view, flags & RES_USED ? &rows : NULL), dxv = dx.view;
    BOTH(c, residual_bwd, .dx = AT(dxv), .dy = AT(dyv), .position = AT(d.position), .sample = AT(d.sample),
         .dropout = drop);
    pair_check(c, dx.all, case_tolerance(T), "residual_bwd %s flags %d", text(T, z), flags);
    if (flags & RES_DROP) check_zeros(c, dx.all, text(T, z));
    BOTH(c, residual_fwd, .y = AT(yv), .residual = add ? AT(rv) : none, .x = AT(xv),
         .bias = flags & RES_BIAS ? AT(bias) : none, .position = AT(d.position), .sample = AT(d.sample),
         .dropout = drop);
    pair_check(c, y.all, case_tolerance(stream), "residual_fwd %s of %s flags %d", text(T, z), dtype_name(stream),
               flags);
    case_close(c);
}

TEST(residual)
{
    static const int flags[] = {
        7, 0, RES_RESIDUAL, RES_BIAS | RES_DROP, 7 | RES_OVER_X, 7 | RES_OVER_RESIDUAL, 7 | RES_USED, RES_DROP
    };
    for (int t = 0; t < 3; t++)
        for (int k = 0; k < SIZES; k++) {
            residual_case(types[t], types[t], sizes[k], flags[k % 8]);
            if (types[t] != F32) residual_case(types[t], F32, sizes[k], flags[(k + t) % 8] & ~RES_OVER_X);
        }
}

/* dx over dy. */
TEST(residual_bwd_in_place)
{
    CudaCase *c = case_open();
    Pair d = pair_random(c, BF16, 2, 5, 264);
    DropPairs at = drop_pairs(c, 5);
    const Dropout drop = { rng_key(7, "other"), dropout_threshold(0.5f), 2 };
    BOTH(c, residual_bwd, .dx = AT(d), .dy = AT(d), .position = AT(at.position), .sample = AT(at.sample),
         .dropout = drop);
    check_zeros(c, d, "in place");
    pair_check(c, d, case_tolerance(BF16), "residual_bwd in place");
    case_close(c);
}

/* A feature's draw belongs to its coordinates: base/rng.h, alone. The threshold is the very draw of one of them,
 * which is kept. */
TEST(dropout_by_coordinates)
{
    CudaCase *c = case_open();
    enum { N = 3, D = 37 };
    float ones[N * D];
    for (int i = 0; i < N * D; i++) ones[i] = 1;
    Pair x = pair_values(c, F32, ones, N, D), y = pair_output(c, F32, N, D);
    DropPairs at = drop_pairs(c, N);
    const int64_t *sample = at.sample.t[CASE_CPU].data;
    const int32_t *position = at.position.t[CASE_CPU].data;
    const uint64_t key = rng_key(9, "site");
    const Philox draw =
        philox(key, 6, (uint32_t)position[1], (uint32_t)sample[1], (uint32_t)(sample[1] >> 32));
    const Dropout drop = { key, draw.v[3], 1 };
    BOTH(c, residual_fwd, .y = AT(y), .x = AT(x), .position = AT(at.position), .sample = AT(at.sample),
         .dropout = drop);
    float got[N * D];
    OK(device_read(&c->dev[CASE_GPU].stream, got, y.t[CASE_GPU].data, sizeof got));
    CHECK(got[D + 6 * 4 + 3] == 1);
    for (int i = 0; i < N * D; i++)
        CHECK(got[i] == (float)dropout_keep(drop.key, drop.threshold, sample[i / D], position[i / D], i % D));
    case_close(c);
}

/* ---- SwiGLU ---- */

typedef struct {
    int64_t N, F, chunk, gap, skip;
} Chunks;

static void swiglu_case(DType T, Chunks z, bool count)
{
    CudaCase *c = case_open();
    Matrix x = matrix_uniform(c, T, -6, 6, z.N, 2 * z.F, z.gap, z.skip),
           dx = matrix_uniform(c, T, -1, 1, z.N, 2 * z.F, z.gap, z.skip);
    Matrix y = matrix_uniform(c, T, -1, 1, z.N, z.F, z.gap, z.skip),
           dy = matrix_uniform(c, T, -2, 2, z.N, z.F, z.gap, z.skip);
    const Pair rows = used_rows(c, z.N), *used = count ? &rows : NULL;
    const Pair xv = pair_used(x.view, used), yv = y.view, dxv = dx.view, dyv = pair_used(dy.view, used);
    char name[96];
    snprintf(name, sizeof name, "%s N %lld F %lld chunk %lld gap %lld", dtype_name(T), (long long)z.N,
             (long long)z.F, (long long)z.chunk, (long long)z.gap);
    BOTH(c, swiglu_fwd, .y = AT(yv), .x = AT(xv), .chunk = z.chunk);
    pair_check(c, y.all, case_tolerance(T), "swiglu_fwd %s", name);
    BOTH(c, swiglu_bwd, .dx = AT(dxv), .dy = AT(dyv), .x = AT(xv), .chunk = z.chunk);
    pair_check(c, dx.all, case_tolerance(T), "swiglu_bwd %s", name);
    BOTH(c, geglu_fwd, .y = AT(yv), .x = AT(xv), .chunk = z.chunk);
    pair_check(c, y.all, case_tolerance(T), "geglu_fwd %s", name);
    BOTH(c, geglu_bwd, .dx = AT(dxv), .dy = AT(dyv), .x = AT(xv), .chunk = z.chunk);
    pair_check(c, dx.all, case_tolerance(T), "geglu_bwd %s", name);
    BOTH(c, clamped_swiglu_fwd, .y = AT(yv), .x = AT(xv), .chunk = z.chunk, .limit = 2.5f);
    pair_check(c, y.all, case_tolerance(T), "clamped_swiglu_fwd %s", name);
    BOTH(c, clamped_swiglu_bwd, .dx = AT(dxv), .dy = AT(dyv), .x = AT(xv), .chunk = z.chunk, .limit = 2.5f);
    pair_check(c, dx.all, case_tolerance(T), "clamped_swiglu_bwd %s", name);
    case_close(c);
}

TEST(swiglu)
{
    static const Chunks shapes[] = { { 1, 1, 1, 0, 0 },       { 3, 15, 5, 0, 0 },      { 5, 32, 16, 0, 0 },
                                     { 65, 32, 8, 8, 8 },     { 2, 99, 33, 1, 0 },     { 3, 64, 32, 5, 1 },
                                     { 2, 2056, 2056, 0, 0 }, { 1, 2048, 1024, 8, 0 }, { 40, 24, 24, 0, 0 } };
    for (int t = 0; t < 3; t++)
        for (int k = 0; k < 9; k++) swiglu_case(types[t], shapes[k], k % 3 == 1);
}

TEST(swiglu_shapes_refused)
{
    CudaCase *c = case_open();
    Pair x = pair_random(c, F32, 1, 2, 24), y = pair_output(c, F32, 2, 12);
    case_side = CASE_GPU;
    CHECK(op(case_stream(c), swiglu_fwd, .y = AT(y), .x = AT(x), .chunk = 5) == ERR_SHAPE);
    CHECK(op(case_stream(c), swiglu_fwd, .y = AT(y), .x = AT(x), .chunk = 0) == ERR_SHAPE);
    CHECK(op(case_stream(c), swiglu_bwd, .dx = AT(x), .dy = AT(y), .x = AT(x), .chunk = 7) == ERR_SHAPE);
    CHECK(op(case_stream(c), geglu_fwd, .y = AT(y), .x = AT(x), .chunk = 5) == ERR_SHAPE);
    CHECK(op(case_stream(c), geglu_bwd, .dx = AT(x), .dy = AT(y), .x = AT(x), .chunk = 7) == ERR_SHAPE);
    CHECK(op(case_stream(c), clamped_swiglu_fwd, .y = AT(y), .x = AT(x), .chunk = 5, .limit = 7) == ERR_SHAPE);
    CHECK(op(case_stream(c), clamped_swiglu_bwd, .dx = AT(x), .dy = AT(y), .x = AT(x), .chunk = 7) == ERR_SHAPE);
    case_close(c);
}

/* ---- zeros of accumulators ---- */

TEST(fill_zero_acc)
{
    static const int64_t lengths[] = { 1, 3, 4, 1023, 1024, 4096, 4097, 5001 };
    for (int k = 0; k < 8; k++) {
        CudaCase *c = case_open();
        int64_t integers[5001];
        for (int i = 0; i < 5001; i++) integers[i] = i + 1;
        Pair x = pair_random(c, F32, 1, lengths[k]), fixed = pair_values(c, I64, integers, lengths[k]);
        Pair part = pair_random(c, F32, 1, lengths[k]), rows = used_rows(c, lengths[k]),
             used = pair_used(part, &rows);
        BOTH(c, fill_zero_acc, .x = AT(x));
        BOTH(c, fill_zero_acc, .x = AT(fixed));
        BOTH(c, fill_zero_acc, .x = AT(used));
        pair_check(c, x, 0, "%lld floats", (long long)lengths[k]);
        pair_check(c, fixed, 0, "%lld integers", (long long)lengths[k]);
        pair_check(c, part, 0, "%lld floats, in use", (long long)lengths[k]);
        case_close(c);
    }
}

TEST(add_acc)
{
    static const int64_t lengths[] = { 1, 255, 256, 257, 5001 };
    for (int k = 0; k < 5; k++) {
        CudaCase *c = case_open();
        int64_t integers[5001];
        for (int i = 0; i < 5001; i++) integers[i] = i % 2 ? INT64_MAX - i : -i;
        Pair y = pair_random(c, F32, 1, lengths[k]), x = pair_random(c, F32, 1, lengths[k]);
        Pair fy = pair_values(c, I64, integers, lengths[k]), fx = pair_values(c, I64, integers, lengths[k]);
        BOTH(c, add_acc, .y = AT(y), .x = AT(x));
        BOTH(c, add_acc, .y = AT(fy), .x = AT(fx));
        pair_check(c, y, 0, "%lld floats", (long long)lengths[k]);
        pair_check(c, fy, 0, "%lld integers", (long long)lengths[k]);
        case_close(c);
    }
}

TEST_MAIN
