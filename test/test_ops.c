/*
 * Norms, elementwise ops, embedding: each against an independent float64 loop, in all builds of the kernels
 * (ops_env.h says what else is demanded of every case). Loss and optimizer ops: test_ops_step.c; linear and
 * attention: test_linear.c, test_attention.c. All these are linked with this program, so that an op without a test does
 * not link (tested_op.h).
 */
#include "base/half.h"
#include "ops_env.h"

#define CLOSE(got, want, scale, ...) \
    CHECK_CLOSE((double)(got), (want), 3e-6 * (1 + fabs((double)(scale))), __VA_ARGS__)

/* ---- norms ---- */

enum { NORM_MEAN = 1, NORM_BIAS = 2, NORM_PLAIN = 4, NORM_FRESH = 8, NORM_SUM = 16, NORM_INTO = 32 };

typedef struct {
    Tensor x, y, w, b, mean, rstd, dy, dx, dw, db, dsum;
    int fresh, into;
} NormCase;

static double norm_hat(const NormCase *t, int64_t n, int64_t i)
{
    double mean = t->mean.data ? (double)env_f(t->mean, n)[0] : 0;
    return ((double)env_f(t->x, n)[i] - mean) * (double)env_f(t->rstd, n)[0];
}

static void norm_check_fwd(const NormCase *t, int64_t N, int64_t D)
{
    for (int64_t n = 0; n < N; n++) {
        const float *x = env_f(t->x, n);
        double mean = 0, squares = 0;
        for (int64_t i = 0; t->mean.data && i < D; i++) mean += (double)x[i] / (double)D;
        for (int64_t i = 0; i < D; i++) squares += ((double)x[i] - mean) * ((double)x[i] - mean) / (double)D;
        double rstd = 1 / sqrt(squares + (double)1e-3f);
        if (t->mean.data) CLOSE(env_f(t->mean, n)[0], mean, 1, "row %d", (int)n);
        CLOSE(env_f(t->rstd, n)[0], rstd, rstd, "row %d", (int)n);
        for (int64_t i = 0; i < D; i++) {
            double h = ((double)x[i] - mean) * rstd, b = t->b.data ? (double)env_f(t->b, i)[0] : 0;
            CLOSE(env_f(t->y, n)[i], h * (double)env_f(t->w, i)[0] + b, rstd, "row %d column %d", (int)n,
                  (int)i);
        }
    }
}

static void norm_check_bwd(const Env *e, const NormCase *t, int64_t N, int64_t D)
{
    for (int64_t n = 0; n < N; n++) {
        double g_mean = 0, gh_mean = 0, rstd = (double)env_f(t->rstd, n)[0];
        const float *dy = env_f(t->dy, n), *before = env_before(e, env_f(t->dx, n));
        for (int64_t i = 0; i < D; i++) {
            double g = (double)dy[i] * (double)env_f(t->w, i)[0] / (double)D;
            if (t->mean.data) g_mean += g;
            gh_mean += g * norm_hat(t, n, i);
        }
        for (int64_t i = 0; i < D; i++) {
            double g = (double)dy[i] * (double)env_f(t->w, i)[0];
            double want = (t->into ? 0 : (double)before[i]) + rstd * (g - g_mean - norm_hat(t, n, i) * gh_mean);
            CLOSE(env_f(t->dx, n)[i], want, 3 * rstd, "row %d column %d", (int)n, (int)i);
        }
    }
}

static void norm_check_grad(const Env *e, const NormCase *t, int64_t N, int64_t D)
{
    for (int64_t i = 0; i < D; i++) {
        double dw = t->fresh ? -env_held(e, t->dw, 30, 0, i) : 0, db = 0, size = fabs(dw);
        if (t->fresh && t->db.data) db = -env_held(e, t->db, 33, 0, i);
        for (int64_t n = 0; n < N; n++) {
            dw += (double)env_f(t->dy, n)[i] * norm_hat(t, n, i);
            size += fabs((double)env_f(t->dy, n)[i] * norm_hat(t, n, i));
            db += (double)env_f(t->dy, n)[i];
        }
        CLOSE(env_added(e, t->dw, 30, i, 0), dw, 10 + size, "dw %d", (int)i);
        if (t->db.data) CLOSE(env_added(e, t->db, 33, i, 0), db, (double)(10 + N), "db %d", (int)i);
        double dx = t->fresh && t->dsum.data ? -env_held(e, t->dsum, 29, 0, i) : 0;
        for (int64_t n = 0; n < N; n++) dx += (double)env_f(t->dx, n)[i];
        if (t->dsum.data) CLOSE(env_added(e, t->dsum, 29, i, 0), dx, 10 + fabs(dx), "dsum %d", (int)i);
    }
}

static void case_norm(Env *e, const Shape *p)
{
    int64_t D = p->D;
    DType acc = p->flags & NORM_PLAIN ? F32 : I64;
    double high = acc == F32 ? 2 : 1e12;
    NormCase t = { .x = env_groups(e, -2, 3, p->N, D, p->b), .y = env_out(e, F32, 9, 10, p->N, D),
                   .w = env_in(e, F32, -1, 2, D), .rstd = env_out(e, F32, 9, 10, p->N),
                   .dy = env_in(e, F32, -1, 1, p->N, D), .dx = env_out_groups(e, -1, 1, p->N, D, p->b),
                   .dw = env_out(e, acc, -high, high, D),
                   .fresh = p->flags & NORM_FRESH, .into = p->flags & NORM_INTO };
    if (p->flags & NORM_MEAN) t.mean = env_out(e, F32, 9, 10, p->N);
    if (p->flags & NORM_BIAS) {
        t.b = env_in(e, F32, -1, 1, D);
        t.db = env_out(e, acc, -high, high, D);
    }
    if (p->flags & NORM_SUM) t.dsum = env_out(e, acc, -high, high, D);
    Tensor shift_w = env_int(e, 30), shift_b = t.db.data ? env_int(e, 33) : t.db, overflow = env_flag(e);
    Tensor shift_sum = t.dsum.data ? env_int(e, 29) : t.dsum;
    RUN(e, norm_fwd, .y = t.y, .mean = t.mean, .rstd = t.rstd, .x = env_used(e, t.x), .w = t.w, .b = t.b,
        .eps = 1e-3f);
    RUN(e, norm_bwd, .dx = t.dx, .dw = t.dw, .db = t.db, .dsum = t.dsum, .dy = env_used(e, t.dy), .x = t.x,
        .w = t.w, .mean = t.mean, .rstd = t.rstd, .shift_w = shift_w, .shift_b = shift_b,
        .shift_sum = shift_sum, .overflow = overflow, .leaf = p->a, .headroom_bits = 10, .fresh = t.fresh,
        .fresh_sum = t.fresh, .fresh_dx = t.into);
    if (!e->check) return;
    env_check_between(e, t.dx);
    norm_check_fwd(&t, env_n(e, p->N), D);
    norm_check_bwd(e, &t, env_n(e, p->N), D);
    norm_check_grad(e, &t, env_n(e, p->N), D);
    CHECK(*(int32_t *)overflow.data == 0);
}

TEST(norm)
{
    const int all = NORM_MEAN | NORM_BIAS;
    CASES(case_norm, { 1, 1, 1, 0, all }, { 3, 15, 2, 0, all }, { 4, 16, 4, 0, NORM_MEAN },
          { 7, 17, 3, 0, 0 }, { 5, 33, 8, 0, NORM_BIAS }, { 6, 130, 2, 0, all | NORM_PLAIN },
          { 37, 1030, 16, 0, all }, { 40, 1025, 7, 0, NORM_PLAIN },
          { 2, 31, 1, 0, NORM_PLAIN | NORM_MEAN }, { 6, 33, 4, 0, all | NORM_FRESH },
          { 5, 17, 2, 0, NORM_PLAIN | NORM_FRESH }, { 11, 40, 4, 0, all | NORM_SUM },
          { 6, 31, 4, 0, NORM_PLAIN | NORM_SUM | NORM_FRESH }, { 5, 33, 2, 0, all | NORM_INTO });
}

/* Heads of a projection. */
TEST(norm_in_groups)
{
    const int all = NORM_MEAN | NORM_BIAS;
    CASES(case_norm, { 3, 16, 1, 1, 0 }, { 6, 16, 1, 2, NORM_INTO }, { 9, 15, 2, 3, all },
          { 36, 130, 1, 4, NORM_INTO | NORM_FRESH }, { 12, 33, 4, 4, all | NORM_SUM | NORM_INTO },
          { 48, 64, 1, 8, NORM_PLAIN });
}

/* ---- residual and dropout ---- */

enum { RES_RESIDUAL = 1, RES_BIAS = 2, RES_DROP = 4, RES_OVER_X = 8, RES_OVER_RESIDUAL = 16 };

static double drop_factor(const Dropout *d, Tensor sample, Tensor position, int64_t n, int64_t i)
{
    if (!d->threshold) return (double)d->scale;
    return dropout_keep(d->key, d->threshold, ((int64_t *)sample.data)[n], ((int32_t *)position.data)[n], i) *
           (double)d->scale;
}

static void case_residual(Env *e, const Shape *p)
{
    bool over_x = p->flags & RES_OVER_X, over_residual = p->flags & RES_OVER_RESIDUAL;
    Tensor x = env_out(e, F32, -2, 2, p->N, p->D), dy = env_in(e, F32, -2, 2, p->N, p->D);
    Tensor residual = { 0 }, bias = { 0 };
    Tensor position = env_in(e, I32, 0, 1000, p->N), sample = env_in(e, I64, 0, 1e13, p->N);
    Tensor y = env_out(e, F32, 8, 9, p->N, p->D), dx = env_out(e, F32, 8, 9, p->N, p->D);
    if (p->flags & (RES_RESIDUAL | RES_OVER_RESIDUAL)) residual = env_out(e, F32, -3, 3, p->N, p->D);
    if (p->flags & RES_BIAS) bias = env_in(e, F32, -1, 1, p->D);
    Dropout drop = { .key = rng_key(5, "site"), .scale = 1.25f };
    if (p->flags & RES_DROP) drop.threshold = dropout_threshold(0.2f);
    if (over_x || over_residual) y = over_x ? x : residual;
    RUN(e, residual_fwd, .y = y, .residual = residual, .x = env_used(e, x), .bias = bias,
        .position = position, .sample = sample, .dropout = drop);
    RUN(e, residual_bwd, .dx = dx, .dy = env_used(e, dy), .position = position, .sample = sample,
        .dropout = drop);
    for (int64_t n = 0; e->check && n < env_n(e, p->N); n++) {
        const float *x0 = env_before(e, env_f(x, n)),
                    *r0 = residual.data ? env_before(e, env_f(residual, n)) : NULL;
        for (int64_t i = 0; i < p->D; i++) {
            double f = drop_factor(&drop, sample, position, n, i),
                   b = bias.data ? (double)env_f(bias, i)[0] : 0;
            double want = ((double)x0[i] + b) * f + (r0 ? (double)r0[i] : 0);
            CLOSE(env_f(y, n)[i], want, 1, "y %d %d", (int)n, (int)i);
            CLOSE(env_f(dx, n)[i], (double)env_f(dy, n)[i] * f, 1, "dx %d %d", (int)n, (int)i);
        }
    }
}

TEST(residual)
{
    const int all = RES_RESIDUAL | RES_BIAS | RES_DROP;
    CASES(case_residual, { 1, 1, 0, 0, all }, { 3, 15, 0, 0, all }, { 4, 16, 0, 0, RES_RESIDUAL },
          { 5, 17, 0, 0, RES_DROP }, { 2, 31, 0, 0, RES_BIAS }, { 3, 33, 0, 0, 0 },
          { 6, 63, 0, 0, all | RES_OVER_X }, { 6, 65, 0, 0, all | RES_OVER_RESIDUAL },
          { 31, 1090, 0, 0, all }, { 40, 1100, 0, 0, RES_DROP });
}

/* The two ops in one: their bits. */
static void case_residual_norm(Env *e, const Shape *p)
{
    Tensor x = env_in(e, F32, -2, 2, p->N, p->D), residual = env_out(e, F32, -3, 3, p->N, p->D);
    Tensor position = env_in(e, I32, 0, 1000, p->N), sample = env_in(e, I64, 0, 1e13, p->N);
    Tensor bias = { 0 }, b = { 0 }, w = env_in(e, F32, -1, 2, p->D);
    Tensor sum[2], y[2], mean[2] = { 0 }, rstd[2];
    for (int k = 0; k < 2; k++) {
        sum[k] = env_out(e, F32, 8, 9, p->N, p->D), y[k] = env_out(e, F32, 8, 9, p->N, p->D);
        rstd[k] = env_out(e, F32, 8, 9, p->N);
        if (p->flags & RES_BIAS) mean[k] = env_out(e, F32, 8, 9, p->N);
    }
    if (p->flags & RES_BIAS) bias = env_in(e, F32, -1, 1, p->D), b = env_in(e, F32, -1, 1, p->D);
    Dropout drop = { .key = rng_key(5, "site"), .scale = 1.25f };
    if (p->flags & RES_DROP) drop.threshold = dropout_threshold(0.2f);
    RUN(e, residual_fwd, .y = sum[1], .residual = residual, .x = env_used(e, x), .bias = bias,
        .position = position, .sample = sample, .dropout = drop);
    RUN(e, norm_fwd, .y = y[1], .mean = mean[1], .rstd = rstd[1], .x = env_used(e, sum[1]), .w = w, .b = b,
        .eps = 1e-3f);
    if (p->flags & RES_OVER_RESIDUAL) sum[0] = residual;
    RUN(e, residual_norm_fwd, .y = y[0], .mean = mean[0], .rstd = rstd[0], .sum = sum[0], .residual = residual,
        .x = env_used(e, x), .bias = bias, .w = w, .b = b, .position = position, .sample = sample,
        .dropout = drop, .eps = 1e-3f);
    for (int64_t n = 0; e->check && n < env_n(e, p->N); n++) {
        CHECK(!memcmp(env_f(sum[0], n), env_f(sum[1], n), (size_t)p->D * sizeof(float)));
        CHECK(!memcmp(env_f(y[0], n), env_f(y[1], n), (size_t)p->D * sizeof(float)));
        CHECK(env_f(rstd[0], n)[0] == env_f(rstd[1], n)[0]);
        CHECK(!mean[0].data || env_f(mean[0], n)[0] == env_f(mean[1], n)[0]);
    }
}

TEST(residual_norm)
{
    CASES(case_residual_norm, { 1, 1, 0, 0, RES_BIAS | RES_DROP }, { 3, 15, 0, 0, RES_BIAS },
          { 4, 64, 0, 0, RES_DROP | RES_OVER_RESIDUAL }, { 31, 1090, 0, 0, RES_BIAS | RES_DROP });
}

/* ---- activations ---- */

static double sigmoid64(double u)
{
    return 1 / (1 + exp(-u));
}

static double gelu_u(double x)
{
    return 2 * sqrt(2 / M_PI) * (x + 0.044715 * x * x * x);
}

static double gelu_slope64(double x)
{
    double s = sigmoid64(gelu_u(x)), du = 2 * sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
    return fabs(x) > 30 ? x > 0 : s + x * s * (1 - s) * du;
}

/* Inputs of every size: columns 0, 7, 14, ... are far out, where exp overflows. */
static void far_out(Env *e, Tensor x, int64_t N, int64_t D)
{
    static const float table[] = { 4e4f, -4e4f, 3e20f, -3e20f, 88, -88, -30, 19.9f, -12, 0, -0.0f, 1e-30f };
    for (int64_t k = 0; k < N * D; k += 7) env_f(x, k / D)[k % D] = table[k / 7 % 12];
    env_settle(e);
}

static void case_gelu(Env *e, const Shape *p)
{
    Tensor x = env_in(e, F32, -6, 6, p->N, p->D), dy = env_in(e, F32, -2, 2, p->N, p->D);
    Tensor y = env_out(e, F32, 8, 9, p->N, p->D), dx = env_out(e, F32, 8, 9, p->N, p->D);
    far_out(e, x, p->N, p->D);
    RUN(e, gelu_fwd, .y = y, .x = env_used(e, x));
    RUN(e, gelu_bwd, .dx = env_used(e, dx), .dy = dy, .x = x);
    for (int64_t k = 0; e->check && k < env_n(e, p->N) * p->D; k++) {
        int64_t n = k / p->D, i = k % p->D;
        double v = (double)env_f(x, n)[i], g = (double)env_f(dy, n)[i];
        CLOSE(env_f(y, n)[i], v * sigmoid64(gelu_u(v)), 0, "x = %g", v);
        CLOSE(env_f(dx, n)[i], g * gelu_slope64(v), 1, "x = %g", v);
    }
}

TEST(gelu)
{
    CASES(case_gelu, { 1, 1 }, { 3, 15 }, { 4, 16 }, { 5, 17 }, { 2, 31 }, { 3, 33 }, { 35, 1101 });
}

/* The distribution's integral by libm's erfc, which keeps the digits of its tail. */
static void case_gelu_erf(Env *e, const Shape *p)
{
    Tensor x = env_in(e, F32, -6, 6, p->N, p->D), dy = env_in(e, F32, -2, 2, p->N, p->D);
    Tensor y = env_out(e, F32, 8, 9, p->N, p->D), dx = env_out(e, F32, 8, 9, p->N, p->D);
    far_out(e, x, p->N, p->D);
    RUN(e, gelu_erf_fwd, .y = y, .x = env_used(e, x));
    RUN(e, gelu_erf_bwd, .dx = env_used(e, dx), .dy = dy, .x = x);
    for (int64_t k = 0; e->check && k < env_n(e, p->N) * p->D; k++) {
        const int64_t n = k / p->D, i = k % p->D;
        const double v = (double)env_f(x, n)[i], g = (double)env_f(dy, n)[i];
        const double integral = 0.5 * erfc(-v * 0.70710678118654752), density = exp(-0.5 * v * v) * 0.3989422804014327;
        CLOSE(env_f(y, n)[i], v * integral, 0, "x = %g", v);
        CLOSE(env_f(dx, n)[i], g * (integral + (density > 0 ? v * density : 0)), 1, "x = %g", v);
    }
}

TEST(gelu_erf)
{
    CASES(case_gelu_erf, { 1, 1 }, { 3, 15 }, { 4, 16 }, { 5, 17 }, { 2, 31 }, { 3, 33 }, { 35, 1101 });
}

static void case_relu2(Env *e, const Shape *p)
{
    Tensor x = env_in(e, F32, -6, 6, p->N, p->D), dy = env_in(e, F32, -2, 2, p->N, p->D);
    Tensor y = env_out(e, F32, 8, 9, p->N, p->D), dx = env_out(e, F32, 8, 9, p->N, p->D);
    far_out(e, x, p->N, p->D);
    RUN(e, relu2_fwd, .y = y, .x = env_used(e, x));
    RUN(e, relu2_bwd, .dx = env_used(e, dx), .dy = dy, .x = x);
    for (int64_t k = 0; e->check && k < env_n(e, p->N) * p->D; k++) {
        const int64_t n = k / p->D, i = k % p->D;
        const double r = fmax(0, (double)env_f(x, n)[i]), g = (double)env_f(dy, n)[i];
        CHECK(env_f(y, n)[i] == (float)(r * r));
        CHECK(env_f(dx, n)[i] == (float)(g * 2 * r));
    }
}

TEST(relu2)
{
    CASES(case_relu2, { 1, 1 }, { 3, 15 }, { 4, 16 }, { 5, 17 }, { 3, 33 }, { 35, 1101 });
}

/* D columns in chunks of `a`. */
static void case_swiglu(Env *e, const Shape *p)
{
    Tensor x = env_in(e, F32, -6, 6, p->N, 2 * p->D), dy = env_in(e, F32, -2, 2, p->N, p->D);
    Tensor y = env_out(e, F32, 8, 9, p->N, p->D), dx = env_out(e, F32, 8, 9, p->N, 2 * p->D);
    for (int64_t n = 0; n < p->N; n++) {
        static const float far[] = { -1e30f, 1e6f, -88, -200, 95 };
        env_f(x, n)[0] = far[n % 5];
    }
    env_settle(e);
    RUN(e, swiglu_fwd, .y = y, .x = env_used(e, x), .chunk = p->a);
    RUN(e, swiglu_bwd, .dx = env_used(e, dx), .dy = dy, .x = x, .chunk = p->a);
    for (int64_t k = 0; e->check && k < env_n(e, p->N) * p->D; k++) {
        int64_t n = k / p->D, f = k % p->D, at = f / p->a * 2 * p->a + f % p->a;
        double g = (double)env_f(x, n)[at], u = (double)env_f(x, n)[at + p->a], d = (double)env_f(dy, n)[f];
        double s = sigmoid64(g), slope = g < -100 ? 0 : s * (1 + g * (1 - s));
        CLOSE(env_f(y, n)[f], g * s * u, 0, "gate = %g", g);
        CLOSE(env_f(dx, n)[at], d * u * slope, 8, "gate = %g", g);
        CLOSE(env_f(dx, n)[at + p->a], d * g * s, 0, "gate = %g", g);
    }
}

TEST(swiglu)
{
    CASES(case_swiglu, { 1, 1, 1 }, { 3, 15, 5 }, { 4, 32, 16 }, { 5, 34, 17 }, { 2, 31, 31 }, { 3, 99, 33 },
          { 36, 1200, 150 });
}

static void case_geglu(Env *e, const Shape *p)
{
    Tensor x = env_in(e, F32, -6, 6, p->N, 2 * p->D), dy = env_in(e, F32, -2, 2, p->N, p->D);
    Tensor y = env_out(e, F32, 8, 9, p->N, p->D), dx = env_out(e, F32, 8, 9, p->N, 2 * p->D);
    for (int64_t n = 0; n < p->N; n++) {
        static const float far[] = { -1e30f, 1e6f, -20, -200, 95 };
        env_f(x, n)[0] = far[n % 5];
    }
    env_settle(e);
    RUN(e, geglu_fwd, .y = y, .x = env_used(e, x), .chunk = p->a);
    RUN(e, geglu_bwd, .dx = env_used(e, dx), .dy = dy, .x = x, .chunk = p->a);
    for (int64_t k = 0; e->check && k < env_n(e, p->N) * p->D; k++) {
        int64_t n = k / p->D, f = k % p->D, at = f / p->a * 2 * p->a + f % p->a;
        double g = (double)env_f(x, n)[at], u = (double)env_f(x, n)[at + p->a], d = (double)env_f(dy, n)[f];
        double active = g * sigmoid64(gelu_u(g));
        CLOSE(env_f(y, n)[f], active * u, 1, "gate = %g", g);
        CLOSE(env_f(dx, n)[at], d * u * gelu_slope64(g), 8, "gate = %g", g);
        CLOSE(env_f(dx, n)[at + p->a], d * active, 1, "gate = %g", g);
    }
}

TEST(geglu)
{
    CASES(case_geglu, { 1, 1, 1 }, { 3, 15, 5 }, { 4, 32, 16 }, { 5, 34, 17 }, { 2, 31, 31 }, { 3, 99, 33 },
          { 36, 1200, 150 });
}

/* D columns in chunks of `a`; limits as flags in halves. Gates and ups of every kind: within, beyond, far out. */
static void case_clamped(Env *e, const Shape *p)
{
    const double limit = p->flags / 2.0;
    Tensor x = env_in(e, F32, -9, 9, p->N, 2 * p->D), dy = env_in(e, F32, -2, 2, p->N, p->D);
    Tensor y = env_out(e, F32, 8, 9, p->N, p->D), dx = env_out(e, F32, 8, 9, p->N, 2 * p->D);
    far_out(e, x, p->N, 2 * p->D);
    RUN(e, clamped_swiglu_fwd, .y = y, .x = env_used(e, x), .chunk = p->a, .limit = (float)limit);
    RUN(e, clamped_swiglu_bwd, .dx = env_used(e, dx), .dy = dy, .x = x, .chunk = p->a, .limit = (float)limit);
    for (int64_t k = 0; e->check && k < env_n(e, p->N) * p->D; k++) {
        int64_t n = k / p->D, f = k % p->D, at = f / p->a * 2 * p->a + f % p->a;
        double gate = (double)env_f(x, n)[at], up = (double)env_f(x, n)[at + p->a], d = (double)env_f(dy, n)[f];
        double g = fmin(gate, limit), u = fmax(-limit, fmin(up, limit)), s = sigmoid64(1.702 * g);
        double slope = g < -100 ? 0 : s * (1 + 1.702 * g * (1 - s));
        CLOSE(env_f(y, n)[f], g < -100 ? 0 : g * s * (u + 1), 8, "gate %g, up %g", gate, up);
        CLOSE(env_f(dx, n)[at], gate > limit ? 0 : d * (u + 1) * slope, 8, "gate %g, up %g", gate, up);
        CLOSE(env_f(dx, n)[at + p->a], fabs(up) > limit || g < -100 ? 0 : d * g * s, 8, "gate %g, up %g", gate, up);
    }
}

TEST(clamped_swiglu)
{
    CASES(case_clamped, { 1, 1, 1, 0, 14 }, { 3, 15, 5, 0, 14 }, { 4, 32, 16, 0, 4 }, { 5, 34, 17, 0, 14 },
          { 3, 99, 33, 0, 1 }, { 36, 1200, 150, 0, 14 });
}

/* The same elements at another place of a row: the same bits. */
TEST(position_in_row)
{
    Env e;
    env_open(&e, isa_best(), 1, 0);
    Tensor x = env_in(&e, F32, -6, 6, 3, 50), dy = env_in(&e, F32, -6, 6, 3, 50);
    Tensor y = env_out(&e, F32, 0, 1, 3, 50), part = env_out(&e, F32, 0, 1, 3, 50);
    for (int backward = 0; backward < 2; backward++) {
        for (int64_t first = 0; first < 50; first += 3) {
            int64_t count = 50 - first < 21 ? 50 - first : 21;
            Tensor xs = tensor_col_slice(x, first, count), ys = tensor_col_slice(part, first, count);
            Tensor ds = tensor_col_slice(dy, first, count);
            if (backward) RUN(&e, gelu_bwd, .dx = y, .dy = dy, .x = x);
            else RUN(&e, gelu_fwd, .y = y, .x = x);
            if (backward) RUN(&e, gelu_bwd, .dx = ys, .dy = ds, .x = xs);
            else RUN(&e, gelu_fwd, .y = ys, .x = xs);
            for (int n = 0; n < 3; n++)
                CHECK(!memcmp(env_f(y, n) + first, env_f(part, n) + first, (size_t)count * sizeof(float)));
        }
    }
    env_close(&e);
}

static void case_scale(Env *e, const Shape *p)
{
    Tensor x = env_in(e, F32, -2, 2, p->N, p->D), y = env_out(e, F32, 8, 9, p->N, p->D);
    RUN(e, scale, .y = y, .x = env_used(e, x), .factor = 5.65685424f);
    for (int64_t k = 0; e->check && k < env_n(e, p->N) * p->D; k++)
        CHECK(env_f(y, k / p->D)[k % p->D] == 5.65685424f * env_f(x, k / p->D)[k % p->D]);
}

TEST(scale)
{
    CASES(case_scale, { 1, 1 }, { 3, 15 }, { 5, 33 }, { 35, 100 });
}

static void case_gate(Env *e, const Shape *p)
{
    Tensor x = env_in(e, F32, -2, 2, p->N, p->D), gate = env_groups(e, -6, 6, p->N, p->D, p->b);
    Tensor y = env_out(e, F32, 8, 9, p->N, p->D), dy = env_in(e, F32, -2, 2, p->N, p->D);
    Tensor dx = env_out(e, F32, 8, 9, p->N, p->D), dgate = env_out_groups(e, 8, 9, p->N, p->D, p->b);
    far_out(e, gate, p->N, p->D);
    RUN(e, gate_fwd, .y = y, .x = env_used(e, x), .gate = gate);
    RUN(e, gate_bwd, .dx = env_used(e, dx), .dgate = dgate, .dy = dy, .x = x, .gate = gate);
    for (int64_t k = 0; e->check && k < env_n(e, p->N) * p->D; k++) {
        int64_t n = k / p->D, i = k % p->D;
        double v = (double)env_f(x, n)[i], d = (double)env_f(dy, n)[i], g = (double)env_f(gate, n)[i];
        double s = sigmoid64(g), slope = s * sigmoid64(-g);
        CLOSE(env_f(y, n)[i], v * s, 0, "gate = %g", g);
        CLOSE(env_f(dx, n)[i], d * s, 0, "gate = %g", g);
        CLOSE(env_f(dgate, n)[i], d * v * slope, 1, "gate = %g", g);
    }
    if (e->check) env_check_between(e, dgate);
}

TEST(gate)
{
    CASES(case_gate, { 1, 1 }, { 3, 15 }, { 4, 16 }, { 5, 17 }, { 35, 101 }, { 6, 16, 0, 2 }, { 9, 15, 0, 3 },
          { 12, 33, 0, 4 }, { 48, 64, 0, 8 });
}

static void case_sink(Env *e, const Shape *p)
{
    Tensor sink = env_in(e, F32, -2, 2, p->D), lse = env_in(e, F32, 1, 6, p->N, p->D);
    Tensor delta = env_in(e, F32, -2, 2, p->N, p->D), dsink = env_out(e, F32, 8, 9, p->N, p->D);
    RUN(e, sink_bwd, .dsink = env_used(e, dsink), .sink = sink, .lse = lse, .delta = delta);
    for (int64_t k = 0; e->check && k < env_n(e, p->N) * p->D; k++) {
        int64_t n = k / p->D, h = k % p->D;
        double z = (double)((const float *)sink.data)[h] - (double)env_f(lse, n)[h];
        CLOSE(env_f(dsink, n)[h], -exp(z) * (double)env_f(delta, n)[h], 0, "row %d, head %d", (int)n, (int)h);
    }
}

TEST(sinks)
{
    CASES(case_sink, { 1, 1 }, { 3, 4 }, { 5, 17 }, { 35, 64 });
}

/* ---- fill, columns, rope ---- */

static void case_fill(Env *e, const Shape *p)
{
    Tensor zero = env_out(e, F32, 1, 2, p->N, p->D), acc = env_out(e, I64, 1, 1e15, p->N);
    Tensor plain = env_out(e, F32, 1, 2, p->N);
    RUN(e, fill_zero, .x = env_used(e, zero));
    RUN(e, fill_zero_acc, .x = env_used(e, acc));
    RUN(e, fill_zero_acc, .x = env_used(e, plain));
    for (int64_t n = 0; e->check && n < env_n(e, p->N); n++) {
        CHECK(((int64_t *)acc.data)[n] == 0 && env_f(plain, n)[0] == 0.0f);
        for (int64_t i = 0; i < p->D; i++) CHECK(env_f(zero, n)[i] == 0.0f);
    }
}

/* Integers wrap, floats are one rounded addition. */
static void case_add_acc(Env *e, const Shape *p)
{
    Tensor y = env_out(e, I64, 9e18, 9.2e18, p->N), x = env_in(e, I64, 9e18, 9.2e18, p->N);
    Tensor fy = env_out(e, F32, 1, 2, p->N), fx = env_in(e, F32, 1, 2, p->N);
    uint64_t *sum = malloc((size_t)p->N * sizeof *sum);
    float *plain = malloc((size_t)p->N * sizeof *plain);
    for (int64_t n = 0; e->check && n < p->N; n++) {
        sum[n] = ((uint64_t *)y.data)[n] + ((uint64_t *)x.data)[n];
        plain[n] = env_f(fy, n)[0] + env_f(fx, n)[0];
    }
    RUN(e, add_acc, .y = env_used(e, y), .x = env_used(e, x));
    RUN(e, add_acc, .y = env_used(e, fy), .x = env_used(e, fx));
    for (int64_t n = 0; e->check && n < env_n(e, p->N); n++)
        CHECK(((uint64_t *)y.data)[n] == sum[n] && env_f(fy, n)[0] == plain[n]);
    free(sum), free(plain);
}

TEST(add_acc) { CASES(case_add_acc, { 1, 1 }, { 3, 1 }, { 17, 1 }, { 1031, 1 }); }

TEST(fill)
{
    CASES(case_fill, { 1, 1 }, { 3, 15 }, { 16, 16 }, { 17, 17 }, { 31, 33 }, { 43, 1031 });
}

/* H = D heads, K = a chunks, C = b columns of a head: whole groups, or parts of them; flags: with a gate. */
static void case_qkv(Env *e, const Shape *p)
{
    int64_t N = p->N, H = p->D, K = p->a, C = p->b, group = H / K, slots = (p->flags ? 2 : 1) * group + 2;
    int64_t W = K * slots * C;
    Tensor gate = p->flags ? env_out(e, F32, 3, 4, N, H * C) : (Tensor){ 0 };
    Tensor qkv = env_in(e, F32, -1, 1, N, W), back = env_out(e, F32, 3, 4, N, W);
    Tensor q = env_out(e, F32, 3, 4, N, H * C), k = env_out(e, F32, 3, 4, N, K * C),
           v = env_out(e, F32, 3, 4, N, K * C);
    RUN(e, qkv_split, .q = q, .k = k, .v = v, .gate = gate, .qkv = env_used(e, qkv), .chunks = K);
    RUN(e, qkv_merge, .qkv = env_used(e, back), .q = q, .k = k, .v = v, .gate = gate, .chunks = K);
    for (int64_t n = 0; e->check && n < env_n(e, N); n++) {
        for (int64_t w = 0; w < W; w++) {
            int64_t g = w / (slots * C), h = w / C % slots, c = w % C;
            const float *want = h < group        ? env_f(q, n) + (g * group + h) * C
                                : h == group     ? env_f(k, n) + g * C
                                : h == group + 1 ? env_f(v, n) + g * C
                                                 : env_f(gate, n) + (g * group + h - group - 2) * C;
            CHECK(env_f(qkv, n)[w] == want[c] && env_f(back, n)[w] == want[c]);
        }
    }
}

TEST(qkv_columns)
{
    CASES(case_qkv, { 1, 1, 1, 1 }, { 3, 4, 2, 5 }, { 4, 6, 1, 16 }, { 5, 3, 3, 17 }, { 31, 12, 4, 64 },
          { 3, 4, 2, 5, 1 }, { 31, 12, 4, 16, 1 });
}

/* D columns of a ranks. */
static void case_join(Env *e, const Shape *p)
{
    int64_t N = p->N, D = p->D, R = p->a;
    Tensor x = env_in(e, F32, -1, 1, R, N, D), y = env_out(e, F32, 3, 4, N, R, D);
    for (int64_t i = 0; i < R * N * D; i++) /* by coordinates: rows of x lie elsewhere in a call with fewer */
        env_f(x, i / D)[i % D] = (float)(i / D % N * 10000 + i / D / N * 100 + i % D);
    env_settle(e);
    RUN(e, join_columns, .y = env_used(e, y), .x = x);
    for (int64_t n = 0; e->check && n < env_n(e, N); n++)
        for (int64_t r = 0; r < R; r++)
            for (int64_t i = 0; i < D; i++) CHECK(env_f(y, n * R + r)[i] == env_f(x, r * N + n)[i]);
}

TEST(columns_side_by_side)
{
    CASES(case_join, { 1, 1, 1 }, { 3, 5, 2 }, { 7, 16, 4 }, { 33, 2, 8 }, { 5, 33, 3 });
}

/* H = D heads with keys of b columns of their own and a shared ones, values of b + 3; sums by chunks of `flags`. */
static void case_mla(Env *e, const Shape *p)
{
    int64_t N = p->N, H = p->D, R = p->a, own = p->b, V = own + 3, chunks = H / p->flags;
    Tensor kv = env_in(e, F32, -1, 1, N, H, own + V), pe = env_in(e, F32, -1, 1, N, R);
    Tensor k = env_out(e, F32, 3, 4, N, H, own + R), v = env_out(e, F32, 3, 4, N, H, V);
    Tensor back = env_out(e, F32, 3, 4, N, H, own + V), sum = env_out(e, F32, 3, 4, N, R);
    Tensor dk = env_in(e, F32, -1, 1, N, H, own + R);
    RUN(e, mla_split, .k = env_used(e, k), .v = v, .kv = kv, .pe = pe);
    RUN(e, mla_merge, .kv = env_used(e, back), .pe = sum, .k = dk, .v = v, .chunk = p->flags);
    for (int64_t row = 0; e->check && row < env_n(e, N) * H; row++) {
        const float *in = env_f(kv, row), *made = env_f(k, row), *merged = env_f(back, row);
        CHECK(!memcmp(made, in, (size_t)own * sizeof *in));
        CHECK(!memcmp(made + own, env_f(pe, row / H), (size_t)R * sizeof *in));
        CHECK(!memcmp(env_f(v, row), in + own, (size_t)V * sizeof *in));
        CHECK(!memcmp(merged, env_f(dk, row), (size_t)own * sizeof *in));
        CHECK(!memcmp(merged + own, in + own, (size_t)V * sizeof *in));
    }
    for (int64_t i = 0; e->check && i < env_n(e, N) * R; i++) {
        float part[16];
        for (int64_t h = 0; h < H; h++) {
            const float x = env_f(dk, i / R * H + h)[own + i % R];
            part[h / p->flags] = h % p->flags ? part[h / p->flags] + x : x;
        }
        for (int64_t step = 1; step < chunks; step *= 2)
            for (int64_t n = 0; n < chunks; n += 2 * step) part[n] += part[n + step];
        CHECK(env_f(sum, i / R)[i % R] == part[0]);
    }
}

TEST(latent_keys_and_values)
{
    CASES(case_mla, { 1, 1, 1, 1, 1 }, { 3, 4, 5, 2, 1 }, { 4, 6, 16, 8, 3 }, { 5, 16, 17, 0, 2 }, { 31, 8, 4, 16, 8 });
}

/* H = D heads of 2 a columns that turn and b that stay; flags: turn back. */
static void case_rope(Env *e, const Shape *p)
{
    int64_t N = p->N, H = p->D, R = p->a, C = 2 * R + p->b;
    Tensor x = env_out(e, F32, -2, 2, N, H, C), position = env_in(e, I32, 0, 50, N);
    Tensor cosine = env_in(e, F32, -1, 1, 50, R), sine = env_in(e, F32, -1, 1, 50, R);
    RUN(e, rope, .x = env_used(e, x), .position = position, .cos = cosine, .sin = sine, .inverse = p->flags);
    for (int64_t row = 0; e->check && row < env_n(e, N) * H; row++) {
        const float *before = env_before(e, env_f(x, row));
        int32_t at = ((int32_t *)position.data)[row / H];
        for (int64_t i = 0; i < R; i++) {
            double c = (double)env_f(cosine, at)[i], s = (double)env_f(sine, at)[i] * (p->flags ? -1 : 1);
            double u = (double)before[i], v = (double)before[i + R];
            CLOSE(env_f(x, row)[i], u * c - v * s, 0, "row %d, %d", (int)row, (int)i);
            CLOSE(env_f(x, row)[i + R], v * c + u * s, 0, "row %d, %d", (int)row, (int)i);
        }
        CHECK(!memcmp(env_f(x, row) + 2 * R, before + 2 * R, (size_t)p->b * sizeof(float)));
    }
}

/* The same with heads in groups of `flags` side by side, as the queries of a projection's chunks: two heads behind. */
static void case_rope_groups(Env *e, const Shape *p)
{
    const int64_t N = p->N, g = p->flags, chunks = p->D / g, R = p->a, C = 2 * R + p->b, chunk = (g + 2) * C;
    Tensor all = env_out(e, F32, -2, 2, N * chunks, chunk), position = env_in(e, I32, 0, 50, N), x = all;
    Tensor cosine = env_in(e, F32, -1, 1, 50, R), sine = env_in(e, F32, -1, 1, 50, R);
    x.ndim = 3, x.dim[0] = N, x.dim[1] = p->D, x.dim[2] = C, x.group = g;
    RUN(e, rope, .x = env_used(e, x), .position = position, .cos = cosine, .sin = sine);
    for (int64_t i = 0; e->check && i < env_n(e, N) * chunks * chunk; i++) {
        const int64_t row = i / chunk, column = i % chunk % C, low = column % R;
        const float *before = env_before(e, env_f(all, row)), *head = before + i % chunk / C * C;
        const int32_t at = ((int32_t *)position.data)[row / chunks];
        if (i % chunk >= g * C || column >= 2 * R) {
            CHECK(env_f(all, row)[i % chunk] == before[i % chunk]);
            continue;
        }
        double c = (double)env_f(cosine, at)[low], s = (double)env_f(sine, at)[low], u = (double)head[low],
               v = (double)head[low + R];
        CLOSE(env_f(all, row)[i % chunk], column < R ? u * c - v * s : v * c + u * s, 0, "chunk %d, %d", (int)row,
              (int)(i % chunk));
    }
}

TEST(rope_in_groups)
{
    CASES(case_rope_groups, { 1, 1, 1, 0, 1 }, { 3, 2, 15, 0, 1 }, { 4, 4, 16, 0, 2 }, { 5, 6, 17, 3, 3 },
          { 35, 16, 8, 0, 8 }, { 2, 8, 33, 1, 8 }, { 6, 6, 4, 0, 2 });
}

/* Widened to fp32 and back: 6 heads in groups of 3 turn as the same heads without gaps do; what lies between stays. */
TEST(rope_in_groups_of_16_bits)
{
    enum { N = 2, H = 6, C = 4, GROUP = 3, LD = 20, ALL = N * H / GROUP * LD };
    static uint16_t apart[ALL], before[ALL], even[N * H * C], turned[N * H * C];
    static float table[4 * C / 2];
    static int32_t position[N] = { 3, 1 };
    uint64_t state = 5;
    Device dev;
    OK(device_open(&dev, (DeviceChoice){ .threads = 1, .staging_bytes = 1 << 16 }));
    for (int i = 0; i < ALL; i++) {
        before[i] = apart[i] = bf16_from_float((float)test_uniform(&state, -2, 2));
        const int at = i / LD * GROUP * C + i % LD;
        if (i % LD < GROUP * C) even[at] = turned[at] = apart[i];
    }
    for (int i = 0; i < 4 * C / 2; i++) table[i] = (float)test_uniform(&state, -1, 1);
    Tensor x = tensor_of(apart, BF16, N, H, C), y = tensor_of(turned, BF16, N, H, C);
    const Tensor at = tensor_of(position, I32, N), angles = tensor_of(table, F32, 4, C / 2);
    x.ld = LD, x.group = GROUP;
    OK(tested_op(&dev.stream, rope, .x = x, .position = at, .cos = angles, .sin = angles));
    OK(tested_op(&dev.stream, rope, .x = y, .position = at, .cos = angles, .sin = angles));
    CHECK(memcmp(even, turned, sizeof even) != 0);
    for (int i = 0; i < ALL; i++) {
        const uint16_t want = i % LD < GROUP * C ? turned[i / LD * GROUP * C + i % LD] : before[i];
        CHECK_MSG(apart[i] == want, "element %d", i);
    }
    device_close(&dev);
}

/* An argument without a * of a tensor in groups, and groups that do not divide the rows. */
TEST(groups_are_refused_where_nothing_reads_them)
{
    static float memory[256];
    static int32_t position[2];
    Device dev;
    OK(device_open(&dev, (DeviceChoice){ .threads = 1 }));
    Tensor x = tensor_of(memory, F32, 2, 6, 4), y = tensor_of(memory + 128, F32, 12, 4);
    const Tensor at = tensor_of(position, I32, 2), table = tensor_of(memory + 200, F32, 4, 2);
    x.ld = 16, x.group = 3;
    OK(tested_op(&dev.stream, rope, .x = x, .position = at, .cos = table, .sin = table));
    x.group = 4;
    FAILS(tested_op(&dev.stream, rope, .x = x, .position = at, .cos = table, .sin = table), ERR_SHAPE,
          "rope: x has 6 rows in groups of 4, declared as 'N H* C'");
    x.group = 3;
    const Tensor rows = tensor_reshape(x, 12, 4);
    CHECK(rows.group == 3 && rows.ld == 16);
    FAILS(tested_op(&dev.stream, gelu_fwd, .y = y, .x = rows), ERR_SHAPE,
          "gelu_fwd: x has 12 rows in groups of 3, declared as 'N F'");
    FAILS(tested_op(&dev.stream, gelu_fwd, .y = rows, .x = y), ERR_SHAPE, "gelu_fwd: y has 12 rows in groups of 3");
    Tensor many = rows, even = y;
    many.dim[0] = even.dim[0] = (int64_t)3 << 30;
    FAILS(tested_op(&dev.stream, gate_fwd, .y = even, .x = even, .gate = many), ERR_SHAPE,
          "gate_fwd: gate has 3221225472 rows in groups of 3");
    device_close(&dev);
}

TEST(rope)
{
    CASES(case_rope, { 1, 1, 1 }, { 3, 2, 15, 0, 1 }, { 4, 3, 16 }, { 5, 1, 17, 0, 1 }, { 2, 2, 31 },
          { 3, 1, 33 }, { 35, 10, 60 }, { 3, 2, 15, 2, 1 }, { 5, 3, 8, 16 }, { 4, 1, 1, 7 });
}

/* ---- embedding ---- */

enum { EMB_ADD = 1, EMB_PLAIN = 2 };

/* Local rows [a, a + 20) of a table of 40; indices from -1 to 39. */
static void case_embedding(Env *e, const Shape *p)
{
    int64_t N = p->N, D = p->D, V = 20;
    DType acc = p->flags & EMB_PLAIN ? F32 : I64;
    Tensor table = env_in(e, F32, -1, 1, V, D), index = env_in(e, I32, -1, 40, N),
           y = env_out(e, F32, -1, 1, N, D);
    Tensor dtable = env_out(e, acc, -10, 10, V, D), dy = env_in(e, F32, -1, 1, N, D);
    Tensor shift = env_int(e, 35), overflow = env_flag(e);
    for (int64_t v = 0; v < V; v++) env_f(table, v)[0] = -0.0f;
    env_settle(e);
    RUN(e, embedding_fwd, .y = env_used(e, y), .table = table, .index = index, .first = p->a,
        .add = (p->flags & EMB_ADD) != 0);
    RUN(e, embedding_grad, .dtable = dtable, .dy = env_used(e, dy), .index = index, .shift = shift,
        .overflow = overflow, .first = p->a, .headroom_bits = 16);
    if (!e->check) return;
    const int32_t *at = index.data;
    for (int64_t n = 0; n < env_n(e, N); n++) {
        const float *before = env_before(e, env_f(y, n));
        bool here = at[n] >= p->a && at[n] < p->a + V;
        for (int64_t i = 0; i < D; i++) {
            float want =
                (p->flags & EMB_ADD ? before[i] : 0.0f) + (here ? env_f(table, at[n] - p->a)[i] : 0.0f);
            CHECK(env_f(y, n)[i] == want && !(want == 0.0f && signbit(env_f(y, n)[i])));
        }
    }
    for (int64_t k = 0; k < V * D; k++) {
        const int64_t v = k / D;
        double want = 0;
        for (int64_t n = 0; n < env_n(e, N); n++)
            if (at[n] == p->a + v) want += (double)env_f(dy, n)[k % D];
        CHECK_CLOSE(env_added(e, dtable, 35, v, k % D), want, acc == F32 ? 1e-5 : 1e-9, "element %d", (int)k);
    }
    CHECK(*(int32_t *)overflow.data == 0);
}

TEST(embedding)
{
    CASES(case_embedding, { 1, 1 }, { 33, 15, 10 }, { 40, 16, 20, 0, EMB_ADD }, { 9, 17, 0, 0, EMB_PLAIN },
          { 31, 33, 10, 0, EMB_ADD | EMB_PLAIN }, { 61, 900, 5, 0, 0 });
}

/* ---- column sums ---- */

static void case_bias_grad(Env *e, const Shape *p)
{
    DType acc = p->flags & 1 ? F32 : I64;
    const int fresh = p->flags & 2;
    Tensor dbias = env_out(e, acc, -10, 10, p->D), dy = env_in(e, F32, -1, 1, p->N, p->D);
    Tensor shift = env_int(e, 40), overflow = env_flag(e);
    RUN(e, bias_grad, .dbias = dbias, .dy = env_used(e, dy), .shift = shift, .overflow = overflow,
        .leaf = p->a, .headroom_bits = 8, .fresh = fresh);
    for (int64_t i = 0; e->check && i < p->D; i++) {
        double want = fresh ? -env_held(e, dbias, 40, 0, i) : 0;
        for (int64_t n = 0; n < env_n(e, p->N); n++) want += (double)env_f(dy, n)[i];
        CHECK_CLOSE(env_added(e, dbias, 40, i, 0), want, acc == F32 ? 1e-5 : 2e-6, "column %d", (int)i);
    }
}

TEST(bias_grad)
{
    CASES(case_bias_grad, { 1, 1, 1 }, { 33, 15, 10 }, { 40, 16, 40 }, { 9, 17, 3, 0, 1 }, { 31, 33, 64 },
          { 10, 129, 4, 0, 1 }, { 32, 2049, 5 }, { 9, 33, 4, 0, 2 }, { 9, 33, 4, 0, 3 });
}

/* Leaves cut into calls in any order, and columns cut, give the same integers. */
TEST(grad_splits)
{
    enum { N = 24, D = 70, LEAF = 4 };
    Env e;
    env_open(&e, isa_best(), 1, 3);
    Tensor x = env_in(&e, F32, -2, 2, N, D), dy = env_in(&e, F32, -1, 1, N, D),
           rstd = env_in(&e, F32, 1, 2, N), w = env_in(&e, F32, -1, 1, D), dx = env_out(&e, F32, -1, 1, N, D);
    Tensor shift = env_int(&e, 40), flag = env_flag(&e), index = env_in(&e, I32, 0, 9, N);
    Tensor whole[3], cut[3];
    for (int k = 0; k < 3; k++) {
        int64_t rows = k == 2 ? 9 : 1;
        whole[k] = env_out(&e, I64, 0, 0.5, rows, D), cut[k] = env_out(&e, I64, 0, 0.5, rows, D);
        whole[k] = tensor_of(whole[k].data, I64, rows, D), cut[k] = tensor_of(cut[k].data, I64, rows, D);
    }
    for (int part = -1; part < 4; part++) {
        static const int64_t first[4] = { 16, 0, 16, 4 }, count[4] = { 8, 4, 8, 12 },
                             left[4] = { 0, 0, 33, 0 };
        int64_t n0 = part < 0 ? 0 : first[part], rows = part < 0 ? N : count[part],
                c0 = part < 0 ? 0 : left[part];
        int64_t columns = part < 0 || c0 ? D - c0 : part ? D : 33;
        Tensor *to = part < 0 ? whole : cut;
        Tensor dys = tensor_col_slice(tensor_row_slice(dy, n0, rows), c0, columns);
        Tensor xs = tensor_col_slice(tensor_row_slice(x, n0, rows), c0, columns);
        Tensor rs = tensor_row_slice(rstd, n0, rows);
        RUN(&e, bias_grad, .dbias = tensor_of((int64_t *)to[0].data + c0, I64, columns), .dy = dys,
            .shift = shift, .overflow = flag, .leaf = LEAF, .headroom_bits = 10);
        RUN(&e, norm_bwd, .dx = tensor_col_slice(tensor_row_slice(dx, n0, rows), c0, columns),
            .dw = tensor_of((int64_t *)to[1].data + c0, I64, columns), .dy = dys, .x = xs,
            .w = tensor_of((float *)w.data + c0, F32, columns), .rstd = rs, .shift_w = shift,
            .overflow = flag, .leaf = LEAF, .headroom_bits = 10);
        RUN(&e, embedding_grad, .dtable = tensor_col_slice(to[2], c0, columns), .dy = dys,
            .index = tensor_row_slice(index, n0, rows), .shift = shift, .overflow = flag, .headroom_bits = 10);
    }
    for (int k = 0; k < 3; k++)
        CHECK_MSG(!memcmp(whole[k].data, cut[k].data, (size_t)tensor_bytes(whole[k])), "accumulator %d", k);
    CHECK(((int64_t *)whole[0].data)[0] != 0 && ((int64_t *)whole[1].data)[69] != 0);
    env_close(&e);
}

/* A leaf that does not fit raises the flag, adds nothing, and leaves its neighbours alone. */
TEST(grad_overflow)
{
    static const float bad[] = { NAN, INFINITY, -INFINITY, 3e38f, 0x1p13f, -0x1p13f };
    for (int k = 0; k < 8; k++) {
        Env e;
        env_open(&e, isa_best(), 1, 0);
        Tensor dy = env_in(&e, F32, -1, 1, 1, 21), x = env_in(&e, F32, -1, 1, 1, 21),
               one = env_in(&e, F32, 1, 1, 1), w = env_in(&e, F32, -1, 1, 21), dx = env_out(&e, F32, -1, 1, 1, 21);
        Tensor acc[3], flag[3], shift = env_int(&e, 40), index = env_int(&e, 0);
        for (int i = 0; i < 3; i++) acc[i] = env_out(&e, I64, 5, 5.5, 1, 21), flag[i] = env_flag(&e);
        for (int i = 0; i < 21; i++) env_f(dy, 0)[i] = env_f(x, 0)[i] = 1.0f;
        env_f(dy, 0)[18] = k < 6 ? bad[k] : k == 6 ? 0x1.fffffep12f : 1.0f;
        RUN(&e, bias_grad, .dbias = tensor_of(acc[0].data, I64, 21), .dy = dy, .shift = shift,
            .overflow = flag[0], .leaf = 1, .headroom_bits = 9);
        RUN(&e, norm_bwd, .dx = dx, .dw = tensor_of(acc[1].data, I64, 21), .dy = dy, .x = x, .w = w,
            .rstd = one, .shift_w = shift, .overflow = flag[1], .leaf = 1, .headroom_bits = 9);
        RUN(&e, embedding_grad, .dtable = acc[2], .dy = dy, .index = index, .shift = shift,
            .overflow = flag[2], .headroom_bits = 9);
        for (int i = 0; i < 3; i++) {
            const int64_t *a = acc[i].data;
            CHECK_MSG(*(int32_t *)flag[i].data == (k < 6), "op %d value %g", i, (double)env_f(dy, 0)[18]);
            CHECK((a[18] == 5) == (k < 6));
            CHECK(a[17] == a[0] && a[17] > 1LL << 39 && a[20] == a[0]);
        }
        env_close(&e);
    }
}

TEST_MAIN
