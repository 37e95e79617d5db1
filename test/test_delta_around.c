/*
 * What stands around the gated delta rule, each op against an independent float64 loop, in all builds of the kernels;
 * the convolution against itself in slices; and the whole layer against the numbers of another program, which are
 * checked against those of Hugging Face's class.
 */
#include "base/half.h"
#include "golden_layer.h"
#include "ops_env.h"

#define CLOSE(got, want, scale, ...) CHECK_CLOSE((double)(got), (want), 3e-6 * (1 + fabs((double)(scale))), __VA_ARGS__)

static double sigmoid64(double x) { return 1 / (1 + exp(-x)); }
static double silu64(double x) { return x * sigmoid64(x); }
static double silu_slope64(double x) { return sigmoid64(x) * (1 + x * (1 - sigmoid64(x))); }

/* ---- convolution ---- */

enum { CONV_BIAS = 1, CONV_DOCS = 2, CONV_SLICE = 4, CONV_PLAIN = 8, CONV_FRESH = 16, CONV_TWO = 32 };

typedef struct {
    Tensor x, w, bias, before, doc, dy, after;
    int64_t B, T, C, taps, first;
} ConvCase;

/* Row t of x as row `reader` of the sample sees it, column c. */
static double conv_x(const ConvCase *k, int64_t b, int64_t reader, int64_t t, int64_t c)
{
    const int64_t doc = k->doc.data ? ((int32_t *)(void *)env_row(&k->doc, b))[reader] : 0;
    if (k->first + t < doc) return 0;
    if (t >= 0) return (double)env_f(k->x, b * k->T + t)[c];
    return k->before.data && t >= 1 - k->taps ? (double)env_f(k->before, b * (k->taps - 1) + k->taps - 1 + t)[c] : 0;
}

static double conv_u(const ConvCase *k, int64_t b, int64_t t, int64_t c)
{
    double u = k->bias.data ? (double)env_f(k->bias, c)[0] : 0;
    for (int64_t j = 0; j < k->taps; j++) u += (double)env_f(k->w, c)[j] * conv_x(k, b, t, t - k->taps + 1 + j, c);
    return u;
}

static double conv_du(const ConvCase *k, int64_t b, int64_t t, int64_t c)
{
    return (double)env_f(k->dy, b * k->T + t)[c] * silu_slope64(conv_u(k, b, t, c));
}

/* What rows t to t + taps - 1 give to row t. */
static double conv_dx(const ConvCase *k, int64_t b, int64_t t, int64_t c)
{
    const int64_t J = k->taps - 1;
    double sum = t + J >= k->T && k->after.data ? (double)env_f(k->after, b * J + t + J - k->T)[c] : 0;
    for (int64_t u = t < 0 ? 0 : t; u <= t + J && u < k->T; u++) {
        const int64_t doc = k->doc.data ? ((int32_t *)(void *)env_row(&k->doc, b))[u] : 0;
        if (k->first + t >= doc) sum += conv_du(k, b, u, c) * (double)env_f(k->w, c)[J - (u - t)];
    }
    return sum;
}

static void conv_check_sums(const Env *e, const ConvCase *k, Tensor dw, Tensor db, bool fresh)
{
    for (int64_t c = 0; c < k->C; c++)
        for (int64_t j = -1; j < k->taps; j++) {
            if (j < 0 && !db.data) continue;
            double want = 0, size = 0;
            for (int64_t n = 0; n < k->B * k->T; n++) {
                const int64_t b = n / k->T, t = n % k->T;
                const double one = conv_du(k, b, t, c) * (j < 0 ? 1 : conv_x(k, b, t, t - k->taps + 1 + j, c));
                want += one, size += fabs(one);
            }
            const Tensor acc = j < 0 ? db : dw;
            const int64_t row = j < 0 ? c : c, at = j < 0 ? 0 : j;
            if (fresh) want -= env_held(e, acc, 30, row, at);
            CLOSE(env_added(e, acc, 30, row, at), want, 10 + size + fabs(want), "column %d tap %d", (int)c, (int)j);
        }
}

/* N: 1; D: columns, a: taps, b: rows. */
static void case_conv(Env *e, const Shape *p)
{
    const int64_t B = p->flags & CONV_TWO ? 2 : 1, T = p->b, C = p->D, taps = p->a, J = taps - 1;
    const DType acc = p->flags & CONV_PLAIN ? F32 : I64;
    const double high = acc == F32 ? 2 : 1e9;
    const bool fresh = p->flags & CONV_FRESH;
    ConvCase k = { .x = env_in(e, F32, -2, 2, B, T, C),
                   .w = env_in(e, F32, -1, 1, C, taps),
                   .dy = env_in(e, F32, -1, 1, B, T, C),
                   .B = B,
                   .T = T,
                   .C = C,
                   .taps = taps,
                   .first = 50 };
    Tensor y = env_out(e, F32, 8, 9, B, T, C), dx = env_out(e, F32, 8, 9, B, T, C), dbefore = { 0 }, db = { 0 };
    Tensor dw = env_out(e, acc, -high, high, C, taps), shift = env_int(e, 30), overflow = env_flag(e);
    if (p->flags & CONV_BIAS) k.bias = env_in(e, F32, -1, 1, C), db = env_out(e, acc, -high, high, C);
    if (p->flags & CONV_SLICE) {
        k.before = env_in(e, F32, -1, 1, B, J, C), k.after = env_in(e, F32, -1, 1, B, J, C);
        dbefore = env_out(e, F32, 8, 9, B, J, C);
    }
    if (p->flags & CONV_DOCS) {
        k.doc = env_in(e, I32, 0, 1, B, T);
        for (int64_t n = 0; n < B * T; n++) {
            const int64_t t = n % T;
            ((int32_t *)(void *)env_row(&k.doc, n / T))[t] = (int32_t)(50 + (t < 1 ? -2 : t < 5 ? 1 : t / 5 * 5));
        }
        env_settle(e);
    }
    RUN(e, conv_silu_fwd, .y = y, .x = k.x, .w = k.w, .bias = k.bias, .before = k.before, .doc = k.doc, .first = 50);
    RUN(e, conv_silu_bwd, .dx = dx, .dw = dw, .dbias = db, .dbefore = dbefore, .dy = k.dy, .after = k.after, .x = k.x,
        .w = k.w, .bias = k.bias, .before = k.before, .doc = k.doc, .shift_w = shift, .shift_b = db.data ? shift : db,
        .overflow = overflow, .first = 50, .leaf = 4, .headroom_bits = 10, .fresh = fresh);
    for (int64_t n = 0; e->check && n < B * T * C; n++) {
        const int64_t b = n / C / T, t = n / C % T, c = n % C;
        CLOSE(env_f(y, n / C)[c], silu64(conv_u(&k, b, t, c)), 2, "y row %d column %d", (int)t, (int)c);
        CLOSE(env_f(dx, n / C)[c], conv_dx(&k, b, t, c), 2, "dx row %d column %d", (int)t, (int)c);
    }
    for (int64_t n = 0; e->check && dbefore.data && n < B * J * C; n++)
        CLOSE(env_f(dbefore, n / C)[n % C], conv_dx(&k, n / C / J, n / C % J - J, n % C), 2, "dbefore %d", (int)n);
    if (e->check) conv_check_sums(e, &k, dw, db, fresh);
    if (e->check) CHECK(*(int32_t *)overflow.data == 0);
}

#define ALONE(fn, ...)                                                                                             \
    do {                                                                                                           \
        static const Shape shapes[] = { __VA_ARGS__ };                                                             \
        for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) {                                              \
            const uint64_t want = env_run(fn, &shapes[k], isa_best(), 1, true);                                    \
            for (Isa isa = ISA_AVX512; isa < ISA_COUNT; isa++)                                                     \
                for (int threads = 1; isa_supported(isa) && threads <= 3; threads++)                               \
                    CHECK_MSG(env_run(fn, &shapes[k], isa, threads, false) == want, "%s with %d threads, case %d", \
                              isa_name(isa), threads, (int)k);                                                     \
        }                                                                                                          \
    } while (0)

TEST(conv_silu)
{
    ALONE(case_conv, { 1, 1, 1, 1, 0 }, { 1, 17, 4, 9, CONV_BIAS }, { 2, 40, 4, 21, CONV_DOCS | CONV_TWO },
          { 1, 16, 4, 12, CONV_SLICE | CONV_BIAS | CONV_TWO }, { 2, 70, 4, 2, CONV_SLICE },
          { 1, 33, 3, 30, CONV_SLICE | CONV_DOCS | CONV_FRESH | CONV_BIAS }, { 2, 130, 8, 25, CONV_PLAIN | CONV_DOCS },
          { 1, 20, 2, 7, CONV_PLAIN | CONV_FRESH | CONV_BIAS }, { 1, 20000, 4, 5, CONV_BIAS });
}

/* Slices that hand on their rows and gradients have the bits of one call. */
TEST(conv_silu_slices)
{
    enum { T = 40, C = 21, K = 4, CUT = 17 };
    static float x[T][C], dy[T][C], w[C][K], y[2][T][C], dx[2][T][C], tail[K - 1][C], after[K - 1][C], unused[K - 1][C];
    static int64_t dw[2][C][K];
    static int32_t doc[T], shift = 30, overflow;
    uint64_t state = 1;
    Device dev;
    OK(device_open(&dev, (DeviceChoice){ .threads = 1 }));
    for (int i = 0; i < T * C; i++)
        x[i / C][i % C] = (float)test_uniform(&state, -1, 1), dy[i / C][i % C] = (float)test_uniform(&state, -1, 1);
    for (int i = 0; i < C * K; i++) w[i / K][i % K] = (float)test_uniform(&state, -1, 1);
    for (int docs = 0; docs < 2; docs++) {
        for (int t = 0; t < T; t++) doc[t] = t < 16 ? 0 : 16;
        memset(dw, 0, sizeof dw);
        for (int cut = 0; cut < 2; cut++)
            for (int part = cut; part >= 0; part--) {
                const int first = part ? CUT : 0, n = part ? T - CUT : cut ? CUT : T;
                const Tensor d = docs ? tensor_of(doc + first, I32, 1, n) : (Tensor){ 0 };
                const Tensor before = part ? tensor_of(tail, F32, 1, K - 1, C) : (Tensor){ 0 };
                memcpy(tail, x[CUT - K + 1], sizeof tail);
                OK(tested_op(&dev.stream, conv_silu_fwd, .y = tensor_of(y[cut][first], F32, 1, n, C),
                             .x = tensor_of(x[first], F32, 1, n, C), .w = tensor_of(w, F32, C, K), .before = before,
                             .doc = d, .first = first));
                OK(tested_op(&dev.stream, conv_silu_bwd, .dx = tensor_of(dx[cut][first], F32, 1, n, C),
                             .dw = tensor_of(dw[cut], I64, C, K),
                             .dbefore = tensor_of(part ? after : unused, F32, 1, K - 1, C),
                             .dy = tensor_of(dy[first], F32, 1, n, C),
                             .after = cut && !part ? tensor_of(after, F32, 1, K - 1, C) : (Tensor){ 0 },
                             .x = tensor_of(x[first], F32, 1, n, C), .w = tensor_of(w, F32, C, K), .before = before,
                             .doc = d, .shift_w = tensor_of(&shift, I32, 1), .overflow = tensor_of(&overflow, I32, 1),
                             .first = first, .leaf = 1, .headroom_bits = 10));
            }
        CHECK(!memcmp(y[0], y[1], sizeof y[0]));
        CHECK(!memcmp(dx[0], dx[1], sizeof dx[0]));
        CHECK(!memcmp(dw[0], dw[1], sizeof dw[0]));
    }
    device_close(&dev);
}

/* ---- unit length ---- */

static void case_unit(Env *e, const Shape *p)
{
    const int64_t N = p->N, D = p->D;
    Tensor x = env_groups(e, -1, 1, N, D, p->b), y = env_out_groups(e, 8, 9, N, D, p->b);
    Tensor dy = env_groups(e, -1, 1, N, D, p->b), dx = env_out_groups(e, 8, 9, N, D, p->b);
    const double f = 0.25, eps = 0.5;
    RUN(e, unit_fwd, .y = y, .x = env_used(e, x), .factor = 0.25f, .eps = 0.5f);
    RUN(e, unit_bwd, .dx = dx, .dy = env_used(e, dy), .x = x, .factor = 0.25f, .eps = 0.5f);
    env_check_between(e, dx);
    for (int64_t n = 0; e->check && n < env_n(e, N); n++) {
        double squares = eps, dot = 0;
        for (int64_t i = 0; i < D; i++) {
            squares += pow((double)env_f(x, n)[i], 2);
            dot += (double)env_f(x, n)[i] * (double)env_f(dy, n)[i];
        }
        const double r = 1 / sqrt(squares);
        for (int64_t i = 0; i < D; i++) {
            const double v = (double)env_f(x, n)[i];
            CLOSE(env_f(y, n)[i], f * v * r, 1, "y %d %d", (int)n, (int)i);
            CLOSE(env_f(dx, n)[i], f * r * ((double)env_f(dy, n)[i] - v * dot * r * r), 1, "dx %d %d", (int)n, (int)i);
        }
    }
}

TEST(unit) { CASES(case_unit, { 1, 1 }, { 3, 15 }, { 12, 128, 0, 4 }, { 9, 17, 0, 3 }, { 40, 64 }); }

/* ---- gates ---- */

enum { GATES_PLAIN = 1, GATES_FRESH = 2 };

static double soft64(double x) { return x > 20 ? x : log1p(exp(x)); }

static void case_gates(Env *e, const Shape *p)
{
    const int64_t N = p->N, V = p->D;
    const DType acc = p->flags & GATES_PLAIN ? F32 : I64;
    const double high = acc == F32 ? 2 : 1e9, top = p->b ? 2 : 1;
    const bool fresh = p->flags & GATES_FRESH;
    Tensor b = env_in(e, F32, -50, 50, N, V), a = env_in(e, F32, -50, 50, N, V), a_log = env_in(e, F32, -4, 3, V);
    Tensor dt = env_in(e, F32, -1, 1, V), beta = env_out(e, F32, 8, 9, N, V), g = env_out(e, F32, 8, 9, N, V);
    Tensor dbeta = env_in(e, F32, -1, 1, N, V), dg = env_in(e, F32, -1, 1, N, V), db = env_out(e, F32, 8, 9, N, V);
    Tensor da = env_out(e, F32, 8, 9, N, V), da_log = env_out(e, acc, -high, high, V),
           ddt = env_out(e, acc, -high, high, V);
    Tensor shift = env_int(e, 20), overflow = env_flag(e);
    RUN(e, delta_gates_fwd, .beta = beta, .g = g, .b = env_used(e, b), .a = a, .a_log = a_log, .dt_bias = dt,
        .top = (float)top);
    RUN(e, delta_gates_bwd, .db = db, .da = da, .da_log = da_log, .ddt_bias = ddt, .dbeta = env_used(e, dbeta),
        .dg = dg, .b = b, .a = a, .a_log = a_log, .dt_bias = dt, .shift_a = shift, .shift_dt = shift,
        .overflow = overflow, .top = (float)top, .leaf = p->a, .headroom_bits = 10, .fresh = fresh);
    for (int64_t h = 0; e->check && h < V; h++) {
        double want_a = fresh ? -env_held(e, da_log, 20, h, 0) : 0, want_dt = fresh ? -env_held(e, ddt, 20, h, 0) : 0;
        double size = 10 + fabs(want_a) + fabs(want_dt);
        for (int64_t n = 0; n < env_n(e, N); n++) {
            const double s = sigmoid64((double)env_f(b, n)[h]), x = (double)env_f(a, n)[h] + (double)env_f(dt, h)[0];
            const double rate = exp((double)env_f(a_log, h)[0]), want = -rate * soft64(x), d = (double)env_f(dg, n)[h];
            CLOSE(env_f(beta, n)[h], top * s, 1, "beta %d", (int)n);
            CLOSE(env_f(g, n)[h], want, want, "g %d", (int)n);
            CLOSE(env_f(db, n)[h], top * s * (1 - s) * (double)env_f(dbeta, n)[h], 1, "db %d", (int)n);
            CLOSE(env_f(da, n)[h], -rate * sigmoid64(x) * d, rate, "da %d", (int)n);
            want_a += d * want, want_dt += -rate * sigmoid64(x) * d, size += fabs(d * want) + rate;
        }
        CLOSE(env_added(e, da_log, 20, h, 0), want_a, size, "da_log %d", (int)h);
        CLOSE(env_added(e, ddt, 20, h, 0), want_dt, size, "ddt_bias %d", (int)h);
    }
    if (e->check) CHECK(*(int32_t *)overflow.data == 0);
}

TEST(delta_gates)
{
    CASES(case_gates, { 1, 1, 1 }, { 40, 5, 16, 1 }, { 33, 16, 4, 0, GATES_PLAIN }, { 100, 33, 7, 1, GATES_FRESH },
          { 700, 40, 16, 0, GATES_PLAIN | GATES_FRESH });
}

/* ---- a norm under a gate ---- */

enum { NORM_PLAIN = 1, NORM_FRESH = 2, GATE_FIRST = 4, THREE_GROUPS = 8, GATE_SIGMOID = 16 };

static double gate64(const Shape *p, double u) { return p->flags & GATE_SIGMOID ? sigmoid64(u) : silu64(u); }
static double gate_slope64(const Shape *p, double u)
{
    return p->flags & GATE_SIGMOID ? sigmoid64(u) * (1 - sigmoid64(u)) : silu_slope64(u);
}

/* A row in float64: h = v / root of v, whose norm is taken, and the gradient of h. */
typedef struct {
    double r, mean;
} GatedRow;

static double gated_v(const Shape *p, double x, double u) { return p->flags & GATE_FIRST ? x * gate64(p, u) : x; }

static double gated_dh(const Shape *p, double dy, double w, double u)
{
    return p->flags & GATE_FIRST ? dy * w : dy * w * gate64(p, u);
}

static GatedRow gated_row(const Shape *p, const float *x, const float *z, const float *dy, const float *w)
{
    GatedRow g = { 0 };
    double squares = 0;
    for (int64_t i = 0; i < p->D; i++) squares += pow(gated_v(p, (double)x[i], (double)z[i]), 2) / (double)p->D;
    g.r = 1 / sqrt(squares + (double)1e-3f);
    for (int64_t i = 0; i < p->D; i++)
        g.mean += gated_dh(p, (double)dy[i], (double)w[i], (double)z[i]) * gated_v(p, (double)x[i], (double)z[i]) *
                  g.r / (double)p->D;
    return g;
}

static void case_gated(Env *e, const Shape *p)
{
    const int64_t N = p->N, E = p->D, G = p->flags & THREE_GROUPS ? 3 : 1;
    const DType acc = p->flags & NORM_PLAIN ? F32 : I64;
    const double high = acc == F32 ? 2 : 1e9;
    const bool fresh = p->flags & NORM_FRESH, inside = p->flags & GATE_FIRST;
    Tensor x = env_groups(e, -2, 2, N, E, p->b), z = env_groups(e, -9, 9, N, E, p->b), w = env_in(e, F32, -1, 2, G, E);
    Tensor y = env_out_groups(e, 8, 9, N, E, p->b), dy = env_groups(e, -1, 1, N, E, p->b);
    Tensor dx = env_out_groups(e, 8, 9, N, E, p->b), dz = env_out_groups(e, 8, 9, N, E, p->b);
    Tensor dw = tensor_reshape(env_out(e, acc, -high, high, G * E), G, E), shift = env_int(e, 30);
    Tensor overflow = env_flag(e);
    RUN(e, gated_norm_fwd, .y = y, .x = env_used(e, x), .z = z, .w = w, .eps = 1e-3f, .gate_first = inside,
        .sigmoid = p->flags & GATE_SIGMOID);
    RUN(e, gated_norm_bwd, .dx = dx, .dz = dz, .dw = dw, .dy = env_used(e, dy), .x = x, .z = z, .w = w, .shift = shift,
        .overflow = overflow, .eps = 1e-3f, .gate_first = inside, .sigmoid = p->flags & GATE_SIGMOID, .leaf = p->a,
        .headroom_bits = 10, .fresh = fresh);
    env_check_between(e, dz);
    double sum[3][256] = { 0 };
    for (int64_t n = 0; e->check && n < env_n(e, N); n++) {
        const GatedRow row = gated_row(p, env_f(x, n), env_f(z, n), env_f(dy, n), env_f(w, n % G));
        for (int64_t i = 0; i < E; i++) {
            const double xi = (double)env_f(x, n)[i], u = (double)env_f(z, n)[i], d = (double)env_f(dy, n)[i];
            const double wi = (double)env_f(w, n % G)[i], h = gated_v(p, xi, u) * row.r;
            const double dv = row.r * (gated_dh(p, d, wi, u) - h * row.mean), scale = 20 * row.r;
            CLOSE(env_f(y, n)[i], wi * h * (inside ? 1 : gate64(p, u)), 10, "y %d %d", (int)n, (int)i);
            CLOSE(env_f(dx, n)[i], inside ? dv * gate64(p, u) : dv, inside ? 10 * scale : scale, "dx %d %d", (int)n,
                  (int)i);
            CLOSE(env_f(dz, n)[i], (inside ? dv * xi : d * wi * h) * gate_slope64(p, u), inside ? 2 * scale : 3,
                  "dz %d %d", (int)n, (int)i);
            sum[n % G][i] += d * h * (inside ? 1 : gate64(p, u));
        }
    }
    for (int64_t k = 0; e->check && k < G * E; k++)
        CLOSE(env_added(e, dw, 30, k / E, k % E), sum[k / E][k % E] - (fresh ? env_held(e, dw, 30, k / E, k % E) : 0),
              20 + 10 * (double)N, "dw %d", (int)k);
}

TEST(gated_norm)
{
    CASES(case_gated, { 1, 1, 1 }, { 3, 15, 1 }, { 12, 128, 1, 4 }, { 9, 17, 4, 3, NORM_FRESH },
          { 40, 130, 16, 0, NORM_PLAIN }, { 12, 64, 5, 2, NORM_PLAIN | NORM_FRESH }, { 1, 16, 1, 0, GATE_FIRST },
          { 9, 17, 1, 3, GATE_FIRST | NORM_FRESH }, { 45, 40, 4, 3, GATE_FIRST | THREE_GROUPS },
          { 90, 70, 16, 0, THREE_GROUPS | NORM_PLAIN }, { 27, 130, 1, 3, GATE_FIRST | THREE_GROUPS | NORM_FRESH },
          { 12, 40, 4, 4, GATE_SIGMOID },
          { 18, 17, 1, 3, GATE_SIGMOID | GATE_FIRST | NORM_FRESH });
}

/* Rows that find no room together go in pieces of whole leaves, with the same bits; dx and dz in the place of dy. */
TEST(gated_norm_in_pieces)
{
    enum { N = 57, E = 20, G = 3, LEAF = 4 };
    static float x[N][E], z[N][E], w[G][E], dy[2][N][E], dz[2][N][E];
    static int64_t dw[2][G][E];
    static int32_t shift = 30, overflow;
    uint64_t state = 1;
    Device dev;
    OK(device_open(&dev, (DeviceChoice){ .threads = 2 }));
    for (int i = 0; i < N * E; i++) {
        x[i / E][i % E] = (float)test_uniform(&state, -1, 1), z[i / E][i % E] = (float)test_uniform(&state, -1, 1);
        dy[0][i / E][i % E] = dy[1][i / E][i % E] = (float)test_uniform(&state, -1, 1);
    }
    for (int i = 0; i < G * E; i++) w[i / E][i % E] = (float)test_uniform(&state, -1, 1);
    const int64_t all = dev.workspace_bytes, few = 2 * LEAF * G * (int64_t)sizeof(float) + 8;
    gated_norm_bwd_args a = { .x = tensor_of(x, F32, N, E),
                              .z = tensor_of(z, F32, N, E),
                              .w = tensor_of(w, F32, G, E),
                              .shift = tensor_of(&shift, I32, 1),
                              .overflow = tensor_of(&overflow, I32, 1),
                              .eps = 1e-3f,
                              .gate_first = 1,
                              .leaf = LEAF,
                              .headroom_bits = 10 };
    for (int i = 0; i < 2; i++) {
        dev.workspace_bytes = i ? few : all;
        a.dx = a.dy = tensor_of(dy[i], F32, N, E), a.dz = tensor_of(dz[i], F32, N, E);
        a.dw = tensor_of(dw[i], I64, G, E);
        OK(op_gated_norm_bwd(&dev.stream, &a));
    }
    CHECK(!memcmp(dy[0], dy[1], sizeof dy[0]) && !memcmp(dz[0], dz[1], sizeof dz[0]));
    CHECK(!memcmp(dw[0], dw[1], sizeof dw[0]) && !overflow);
    dev.workspace_bytes = LEAF * G * (int64_t)sizeof(float) - 1;
    FAILS(op_gated_norm_bwd(&dev.stream, &a), ERR_CONFIG, "no workspace for 12 rows");
    dev.workspace_bytes = all;
    a.w.dim[0] = a.dw.dim[0] = 2;
    FAILS(op_gated_norm_bwd(&dev.stream, &a), ERR_SHAPE, "57 rows of x for 2 of w");
    device_close(&dev);
}

/* ---- tensors of bf16 ---- */

enum { NARROW_N = 20, NARROW_D = 21, NARROW_TENSORS = 12 };

/* Numbers of bf16 in both forms; which of them an op gets is `wide`. */
typedef struct {
    float x[NARROW_TENSORS][NARROW_N * NARROW_D];
    uint16_t h[NARROW_TENSORS][NARROW_N * NARROW_D];
    float f32[4][NARROW_N * NARROW_D]; /* what is fp32 in any case */
    int64_t sums[2][NARROW_D * 4];
} Narrow;

static Tensor narrow_at(Narrow *t, int wide, int i, int64_t rows, int64_t columns)
{
    return wide ? tensor_of(t->x[i], F32, rows, columns) : tensor_of(t->h[i], BF16, rows, columns);
}

static Tensor narrow_flat(Narrow *t, int wide, int i)
{
    return wide ? tensor_of(t->x[i], F32, NARROW_D) : tensor_of(t->h[i], BF16, NARROW_D);
}

static void narrow_run(Narrow *t, int wide, Stream *s)
{
    enum { N = NARROW_N, D = NARROW_D };
    static int32_t shift = 30, overflow;
    const Tensor at = tensor_of(&shift, I32, 1), flag = tensor_of(&overflow, I32, 1);
    const Tensor x = narrow_at(t, wide, 0, N, D), y = narrow_at(t, wide, 1, N, D), z = narrow_at(t, wide, 2, N, D);
    const Tensor f = tensor_of(t->f32[0], F32, N, D), g = tensor_of(t->f32[1], F32, N, D);
#define OUT(i) narrow_at(t, wide, i, N, D)
#define SAMPLE(x) tensor_reshape(x, 1, N, D)
    OK(op(s, unit_fwd, .y = OUT(4), .x = x, .factor = 0.5f, .eps = 1e-6f));
    OK(op(s, unit_bwd, .dx = OUT(5), .dy = y, .x = x, .factor = 0.5f, .eps = 1e-6f));
    OK(op(s, gated_norm_fwd, .y = OUT(6), .x = x, .z = z, .w = narrow_at(t, wide, 3, 1, D), .eps = 1e-6f));
    OK(op(s, gated_norm_bwd, .dx = OUT(7), .dz = OUT(8), .dw = tensor_of(t->sums[0], I64, 1, D), .dy = y, .x = x,
          .z = z, .w = narrow_at(t, wide, 3, 1, D), .shift = at, .overflow = flag, .eps = 1e-6f, .leaf = 4,
          .headroom_bits = 10));
    OK(op(s, delta_gates_fwd, .beta = f, .g = g, .b = x, .a = y, .a_log = narrow_flat(t, wide, 3),
          .dt_bias = narrow_flat(t, wide, 2), .top = 1));
    OK(op(s, delta_gates_bwd, .db = OUT(9), .da = OUT(10), .da_log = tensor_of(t->sums[0], I64, D),
          .ddt_bias = tensor_of(t->sums[1], I64, D), .dbeta = f, .dg = g, .b = x, .a = y,
          .a_log = narrow_flat(t, wide, 3), .dt_bias = narrow_flat(t, wide, 2), .shift_a = at, .shift_dt = at,
          .overflow = flag, .top = 1, .leaf = 4, .headroom_bits = 10));
    const Tensor before = tensor_reshape(narrow_at(t, wide, 2, 3, D), 1, 3, D), w = narrow_at(t, wide, 3, D, 4);
    OK(op(s, conv_silu_fwd, .y = SAMPLE(OUT(11)), .x = SAMPLE(x), .w = w, .bias = narrow_flat(t, wide, 2),
          .before = before, .first = 9));
    OK(op(s, conv_silu_bwd, .dx = SAMPLE(OUT(4)), .dw = tensor_of(t->sums[1], I64, D, 4),
          .dbefore = tensor_of(t->f32[2], F32, 1, 3, D), .dy = SAMPLE(y), .x = SAMPLE(x), .w = w,
          .bias = narrow_flat(t, wide, 2), .before = before, .shift_w = at, .overflow = flag, .first = 9, .leaf = 4,
          .headroom_bits = 10));
    CHECK(!overflow);
#undef OUT
#undef SAMPLE
}

/* What is read in 16 bits has the bits of widened copies, rounded where it is stored. */
TEST(narrow)
{
    static Narrow t[2];
    uint64_t state = 1;
    Device dev;
    OK(device_open(&dev, (DeviceChoice){ .threads = 1 }));
    for (int i = 0; i < NARROW_TENSORS * NARROW_N * NARROW_D; i++) {
        const int k = i / (NARROW_N * NARROW_D), j = i % (NARROW_N * NARROW_D);
        t[0].h[k][j] = bf16_from_float((float)test_uniform(&state, -1, 1));
        t[1].x[k][j] = bf16_to_float(t[0].h[k][j]);
    }
    for (int wide = 0; wide < 2; wide++) narrow_run(&t[wide], wide, &dev.stream);
    for (int k = 0; k < NARROW_TENSORS; k++)
        for (int j = 0; j < NARROW_N * NARROW_D; j++)
            CHECK_MSG(t[0].h[k][j] == bf16_from_float(t[1].x[k][j]), "tensor %d, %d", k, j);
    CHECK(!memcmp(t[0].f32, t[1].f32, sizeof t[0].f32) && !memcmp(t[0].sums, t[1].sums, sizeof t[0].sums));
    device_close(&dev);
}

/* ---- a layer ---- */

#define GOLDEN "../shared/fixtures/kinds/gdn.json"
enum { G_T = 7, G_H = 6, G_K = 2, G_V = 4, G_D = 4, G_E = 3, G_TAPS = 4, G_C = 28, G_VE = G_V * G_E, G_KD = G_K * G_D };

typedef struct {
    float x[G_T * G_H], qkv_w[G_C * G_H], z_w[G_VE * G_H], b_w[G_V * G_H], a_w[G_V * G_H], conv_w[G_C * G_TAPS];
    float a_log[G_V], dt[G_V], norm_w[G_E], out_w[G_H * G_VE], dy[G_T * G_H];
    float m[G_T * G_C], z[G_T * G_VE], b[G_T * G_V], a[G_T * G_V], c[G_T * G_C], q[G_T * G_KD], k[G_T * G_KD];
    float beta[G_T * G_V], g[G_T * G_V], o[G_T * G_VE], n[G_T * G_VE], y[G_T * G_H], states[G_V * G_D * G_E];
    float after[G_V * G_D * G_E];
    float dn[G_T * G_VE], go[G_T * G_VE], dz[G_T * G_VE], dq[G_T * G_KD], dk[G_T * G_KD], dc[G_T * G_C];
    float dm[G_T * G_C], dbeta[G_T * G_V], dg[G_T * G_V], db[G_T * G_V], da[G_T * G_V], dx[G_T * G_H];
    float dconv[G_C * G_TAPS], dnorm[G_E], da_log[G_V], ddt[G_V], db_w[G_V * G_H], da_w[G_V * G_H];
    int32_t shift, overflow;
} Layer;

/* Heads of some columns of rows of `wide`, from `column` on. */
static Tensor part(float *data, int64_t wide, int64_t column, int64_t heads, int64_t width)
{
    Tensor t = tensor_of(data + column, F32, 1, G_T, heads, width);
    t.ld = wide, t.group = heads;
    return t;
}
static Tensor as_rows(Tensor t) { return tensor_reshape(t, t.dim[1] * t.dim[2], t.dim[3]); }

static void golden_read(Layer *l, const Json *j)
{
    const Json *in = json_get(j, "input");
    golden_numbers(in, "x", l->x, G_T * G_H), golden_numbers(in, "in_proj_qkv", l->qkv_w, G_C * G_H);
    golden_numbers(in, "in_proj_z", l->z_w, G_VE * G_H), golden_numbers(in, "in_proj_b", l->b_w, G_V * G_H);
    golden_numbers(in, "in_proj_a", l->a_w, G_V * G_H), golden_numbers(in, "conv1d", l->conv_w, G_C * G_TAPS);
    golden_numbers(in, "A_log", l->a_log, G_V), golden_numbers(in, "dt_bias", l->dt, G_V);
    golden_numbers(in, "norm", l->norm_w, G_E), golden_numbers(in, "out_proj", l->out_w, G_H * G_VE);
    golden_numbers(j, "dy", l->dy, G_T * G_H);
}

#define ROWS(x, columns) tensor_of(l->x, F32, G_T, columns)
#define SEQ(x, columns) tensor_of(l->x, F32, 1, G_T, columns)

static void golden_forward(Layer *l, Stream *s)
{
    times(l->m, l->x, l->qkv_w, G_T, G_C, G_H), times(l->z, l->x, l->z_w, G_T, G_VE, G_H);
    times(l->b, l->x, l->b_w, G_T, G_V, G_H), times(l->a, l->x, l->a_w, G_T, G_V, G_H);
    OK(op(s, conv_silu_fwd, .y = SEQ(c, G_C), .x = SEQ(m, G_C), .w = tensor_of(l->conv_w, F32, G_C, G_TAPS)));
    OK(op(s, unit_fwd, .y = tensor_of(l->q, F32, G_T * G_K, G_D), .x = as_rows(part(l->c, G_C, 0, G_K, G_D)),
          .factor = 0.5f, .eps = 1e-6f));
    OK(op(s, unit_fwd, .y = tensor_of(l->k, F32, G_T * G_K, G_D), .x = as_rows(part(l->c, G_C, G_KD, G_K, G_D)),
          .factor = 1, .eps = 1e-6f));
    OK(op(s, delta_gates_fwd, .beta = ROWS(beta, G_V), .g = ROWS(g, G_V), .b = ROWS(b, G_V), .a = ROWS(a, G_V),
          .a_log = tensor_of(l->a_log, F32, G_V), .dt_bias = tensor_of(l->dt, F32, G_V), .top = 1));
    OK(op(s, delta_fwd, .o = tensor_of(l->o, F32, 1, G_T, G_V, G_E), .states = tensor_of(l->states, F32, G_V, G_D, G_E),
          .after = tensor_of(l->after, F32, 1, G_V, G_D, G_E), .q = tensor_of(l->q, F32, 1, G_T, G_K, G_D),
          .k = tensor_of(l->k, F32, 1, G_T, G_K, G_D), .v = part(l->c, G_C, 2 * G_KD, G_V, G_E), .g = SEQ(g, G_V),
          .beta = SEQ(beta, G_V)));
    OK(op(s, gated_norm_fwd, .y = tensor_of(l->n, F32, G_T * G_V, G_E), .x = tensor_of(l->o, F32, G_T * G_V, G_E),
          .z = tensor_of(l->z, F32, G_T * G_V, G_E), .w = tensor_of(l->norm_w, F32, 1, G_E), .eps = 1e-6f));
    times(l->y, l->n, l->out_w, G_T, G_H, G_VE);
}

static void golden_backward(Layer *l, Stream *s)
{
    const Tensor shift = tensor_of(&l->shift, I32, 1), overflow = tensor_of(&l->overflow, I32, 1);
    times_back(l->dn, l->dy, l->out_w, G_T, G_H, G_VE);
    OK(op(s, gated_norm_bwd, .dx = tensor_of(l->go, F32, G_T * G_V, G_E), .dz = tensor_of(l->dz, F32, G_T * G_V, G_E),
          .dw = tensor_of(l->dnorm, F32, 1, G_E), .dy = tensor_of(l->dn, F32, G_T * G_V, G_E),
          .x = tensor_of(l->o, F32, G_T * G_V, G_E), .z = tensor_of(l->z, F32, G_T * G_V, G_E),
          .w = tensor_of(l->norm_w, F32, 1, G_E), .shift = shift, .overflow = overflow, .eps = 1e-6f, .leaf = 1));
    OK(op(s, delta_bwd, .dq = tensor_of(l->dq, F32, 1, G_T, G_K, G_D), .dk = tensor_of(l->dk, F32, 1, G_T, G_K, G_D),
          .dv = part(l->dc, G_C, 2 * G_KD, G_V, G_E), .dg = SEQ(dg, G_V), .dbeta = SEQ(dbeta, G_V),
          .go = tensor_of(l->go, F32, 1, G_T, G_V, G_E), .q = tensor_of(l->q, F32, 1, G_T, G_K, G_D),
          .k = tensor_of(l->k, F32, 1, G_T, G_K, G_D), .v = part(l->c, G_C, 2 * G_KD, G_V, G_E), .g = SEQ(g, G_V),
          .beta = SEQ(beta, G_V), .states = tensor_of(l->states, F32, G_V, G_D, G_E)));
    OK(op(s, unit_bwd, .dx = as_rows(part(l->dc, G_C, 0, G_K, G_D)), .dy = tensor_of(l->dq, F32, G_T * G_K, G_D),
          .x = as_rows(part(l->c, G_C, 0, G_K, G_D)), .factor = 0.5f, .eps = 1e-6f));
    OK(op(s, unit_bwd, .dx = as_rows(part(l->dc, G_C, G_KD, G_K, G_D)), .dy = tensor_of(l->dk, F32, G_T * G_K, G_D),
          .x = as_rows(part(l->c, G_C, G_KD, G_K, G_D)), .factor = 1, .eps = 1e-6f));
    OK(op(s, conv_silu_bwd, .dx = SEQ(dm, G_C), .dw = tensor_of(l->dconv, F32, G_C, G_TAPS), .dy = SEQ(dc, G_C),
          .x = SEQ(m, G_C), .w = tensor_of(l->conv_w, F32, G_C, G_TAPS), .shift_w = shift, .overflow = overflow,
          .leaf = 16));
    OK(op(s, delta_gates_bwd, .db = ROWS(db, G_V), .da = ROWS(da, G_V), .da_log = tensor_of(l->da_log, F32, G_V),
          .ddt_bias = tensor_of(l->ddt, F32, G_V), .dbeta = ROWS(dbeta, G_V), .dg = ROWS(dg, G_V), .b = ROWS(b, G_V),
          .a = ROWS(a, G_V), .a_log = tensor_of(l->a_log, F32, G_V), .dt_bias = tensor_of(l->dt, F32, G_V),
          .shift_a = shift, .shift_dt = shift, .overflow = overflow, .top = 1, .leaf = 16));
    times_back(l->dx, l->dm, l->qkv_w, G_T, G_C, G_H), times_back(l->dx, l->dz, l->z_w, G_T, G_VE, G_H);
    times_back(l->dx, l->db, l->b_w, G_T, G_V, G_H), times_back(l->dx, l->da, l->a_w, G_T, G_V, G_H);
    times_sum(l->db_w, l->db, l->x, G_T, G_V, G_H), times_sum(l->da_w, l->da, l->x, G_T, G_V, G_H);
}

TEST(golden_layer)
{
    static Layer layer;
    Layer *l = &layer;
    Json *j;
    Device dev;
    FILE *f = fopen(GOLDEN, "r");
    if (!f) SKIP("no " GOLDEN);
    fclose(f);
    OK(json_read_file(GOLDEN, 1 << 20, &j));
    OK(device_open(&dev, (DeviceChoice){ .threads = 1 }));
    golden_read(l, j);
    golden_forward(l, &dev.stream);
    golden_backward(l, &dev.stream);
    golden_check(j, "after_conv_silu", l->c, G_T * G_C), golden_check(j, "log_decay", l->g, G_T * G_V);
    golden_check(j, "beta", l->beta, G_T * G_V), golden_check(j, "o", l->o, G_T * G_VE);
    golden_check(j, "final_state", l->after, G_V * G_D * G_E), golden_check(j, "y", l->y, G_T * G_H);
    const Json *grad = json_get(j, "grad");
    golden_check(grad, "x", l->dx, G_T * G_H), golden_check(grad, "conv1d", l->dconv, G_C * G_TAPS);
    golden_check(grad, "in_proj_b", l->db_w, G_V * G_H), golden_check(grad, "in_proj_a", l->da_w, G_V * G_H);
    golden_check(grad, "A_log", l->da_log, G_V), golden_check(grad, "dt_bias", l->ddt, G_V);
    golden_check(grad, "norm", l->dnorm, G_E);
    json_free(j);
    device_close(&dev);
}

TEST_MAIN
