/*
 * The ops of mixtures of experts, each against an independent float64 loop, in all builds of the kernels and with 1 to
 * 3 threads (ops_env.h says what else is demanded). Choices of experts are compared exactly. See docs/moe.md.
 */
#include "ops_env.h"

#define CLOSE(got, want, scale, ...) \
    CHECK_CLOSE((double)(got), (want), 3e-6 * (1 + fabs((double)(scale))), __VA_ARGS__)

enum { E_MAX = 512 };

static int32_t *env_i(Tensor t, int64_t row)
{
    return (int32_t *)(void *)env_row(&t, row);
}

/* ---- router ---- */

/* A router by the text of step.h, in float64. Scores are rounded to float before they are compared, as ties count. */
typedef struct {
    double score[E_MAX], weight[ROUTER_TOPK_MAX];
    int index[ROUTER_TOPK_MAX];
} Routed;

static void definition_scores(const Router *r, const double *x, int64_t E, double *score)
{
    double sum = 0, most = -INFINITY;
    for (int64_t e = 0; e < E; e++) most = fmax(most, x[e]);
    for (int64_t e = 0; e < E; e++) sum += exp(x[e] - most);
    for (int64_t e = 0; e < E; e++) {
        score[e] = x[e];
        if (r->score == ROUTER_SOFTMAX_PRE) score[e] = exp(x[e] - most) / sum;
        if (r->score == ROUTER_SIGMOID) score[e] = 1 / (1 + exp(-x[e]));
        if (r->score == ROUTER_SQRT_SOFTPLUS) score[e] = sqrt(log1p(exp(x[e])));
    }
}

/* How many of the candidates are better than e. */
static int64_t rank_of(const double *score, const bool *candidate, int64_t n, int64_t e)
{
    int64_t before = 0;
    for (int64_t f = 0; f < n; f++)
        before += candidate[f] && (score[f] > score[e] || (score[f] == score[e] && f < e));
    return before;
}

static void definition_groups(const Router *r, const double *score, int64_t E, int64_t K, bool *open)
{
    double group[E_MAX];
    bool all[E_MAX];
    const int64_t size = E / r->groups, m = r->group_best ? r->group_best : K / r->group_topk;
    for (int64_t i = 0; i < E; i++) all[i] = true;
    for (int64_t g = 0; g < r->groups; g++) {
        group[g] = 0;
        for (int64_t i = 0; i < size; i++)
            if (rank_of(score + g * size, all, size, i) < m) group[g] += score[g * size + i];
    }
    for (int64_t e = 0; e < E; e++) open[e] = rank_of(group, all, r->groups, e / size) < r->group_topk;
}

static void definition(const Router *r, const double *x, int64_t E, int64_t K, Routed *out)
{
    bool open[E_MAX];
    double sum = 0;
    definition_scores(r, x, E, out->score);
    definition_groups(r, out->score, E, K, open);
    for (int64_t e = 0; e < E; e++)
        if (open[e] && rank_of(out->score, open, E, e) < K) out->index[rank_of(out->score, open, E, e)] = (int)e;
    for (int64_t k = 0; k < K; k++) {
        out->weight[k] = out->score[out->index[k]];
        if (r->score == ROUTER_SOFTMAX) out->weight[k] = exp(x[out->index[k]] - x[out->index[0]]);
        sum += out->weight[k];
    }
    const bool divide = r->score == ROUTER_SOFTMAX || r->normalize;
    for (int64_t k = 0; k < K; k++) out->weight[k] *= (double)r->scale / (divide ? sum : 1);
}

enum { SCORE = 7, NORMALIZE = 8, TIES = 16, GROUPS4 = 32, BEST1 = 64, BEST3 = 128 };

static Router case_router(const Shape *p)
{
    Router r = { .score = (RouterScore)(p->flags & SCORE), .normalize = !!(p->flags & NORMALIZE), .scale = 2.5f,
                 .groups = 1, .group_topk = 1 };
    if (p->flags & GROUPS4) r.groups = 4, r.group_topk = 2;
    if (p->flags & (BEST1 | BEST3)) r.group_best = p->flags & BEST1 ? 1 : 3;
    return r;
}

static void row_of(const Tensor logits, int64_t n, int64_t E, double *x)
{
    for (int64_t e = 0; e < E; e++) x[e] = (double)env_f(logits, n)[e];
}

/* d weights by one logit as a difference of two calls of the definition; the choice stays. */
static double slope(const Router *r, const double *x, int64_t E, int64_t K, int64_t e, const double *dw)
{
    const double h = 1e-5;
    double y[E_MAX], sum = 0;
    Routed up, down;
    memcpy(y, x, (size_t)E * sizeof *y);
    y[e] = x[e] + h;
    definition(r, y, E, K, &up);
    y[e] = x[e] - h;
    definition(r, y, E, K, &down);
    for (int64_t k = 0; k < K; k++) /* experts may change choices */
        sum += dw[up.index[k]] * up.weight[k] - dw[down.index[k]] * down.weight[k];
    return sum / (2 * h);
}

static void case_router_ops(Env *e, const Shape *p)
{
    const Router r = case_router(p);
    const int64_t E = p->D, K = p->a;
    Tensor logits = env_in(e, F32, -3, 3, p->N, E), dweight = env_in(e, F32, -1, 1, p->N, K);
    Tensor index = env_out(e, I32, 0, 1, p->N, K), weight = env_out(e, F32, 7, 8, p->N, K);
    Tensor dlogits = env_out(e, F32, 7, 8, p->N, E);
    if (p->flags & TIES) {
        for (int64_t n = 0; n < p->N; n++)
            for (int64_t i = 0; i < E; i++) env_f(logits, n)[i] = floorf(env_f(logits, n)[i]);
        env_settle(e);
    }
    RUN(e, router_fwd, .index = index, .weight = weight, .logits = env_used(e, logits), .router = r);
    RUN(e, router_bwd, .dlogits = dlogits, .dweight = env_used(e, dweight), .logits = logits, .index = index,
        .weight = weight, .router = r);
    for (int64_t n = 0; e->check && n < env_n(e, p->N); n++) {
        double x[E_MAX], dw[E_MAX] = { 0 };
        Routed want;
        row_of(logits, n, E, x);
        definition(&r, x, E, K, &want);
        for (int64_t k = 0; k < K; k++) {
            CHECK_MSG(env_i(index, n)[k] == want.index[k], "row %d choice %d: expert %d, want %d", (int)n, (int)k,
                      env_i(index, n)[k], want.index[k]);
            CLOSE(env_f(weight, n)[k], want.weight[k], 1, "row %d choice %d", (int)n, (int)k);
            dw[want.index[k]] = (double)env_f(dweight, n)[k];
        }
        for (int64_t i = 0; i < E && !(p->flags & TIES); i++)
            CHECK_CLOSE((double)env_f(dlogits, n)[i], slope(&r, x, E, K, i, dw), 2e-5, "row %d logit %d", (int)n,
                        (int)i);
    }
}

TEST(router)
{
    for (int score = ROUTER_SOFTMAX; score <= ROUTER_SQRT_SOFTPLUS; score++)
        CASES(case_router_ops, { 1, 1, 1, 0, score }, { 5, 8, 2, 0, score }, { 6, 17, 17, 0, score },
              { 9, 16, 4, 0, score | GROUPS4 }, { 7, 64, 6, 0, score | GROUPS4 }, { 12, 40, 3, 0, score | TIES },
              { 11, 64, 4, 0, score | TIES | GROUPS4 }, { 9, 64, 6, 0, score | GROUPS4 | BEST1 },
              { 9, 64, 4, 0, score | GROUPS4 | BEST3 });
    for (int score = ROUTER_SOFTMAX_PRE; score <= ROUTER_SQRT_SOFTPLUS; score++)
        CASES(case_router_ops, { 5, 8, 2, 0, score | NORMALIZE }, { 300, 32, 8, 0, score | NORMALIZE },
              { 9, 32, 8, 0, score | NORMALIZE | GROUPS4 });
}

/* Worked by hand: weights of logits (0, ln 2, ln 3, -1), the best two. */
TEST(router_by_hand)
{
    static const struct {
        Router r;
        float want[2];
    } cases[] = { { { ROUTER_SOFTMAX, 0, 1, 1, 1 }, { 0.6f, 0.4f } },
                  { { ROUTER_SOFTMAX, 0, 2.5f, 1, 1 }, { 1.5f, 1.0f } },
                  { { ROUTER_SOFTMAX_PRE, 0, 1, 1, 1 }, { 0.47111443f, 0.31407630f } }, /* 3 and 2 of 6 + 1/e */
                  { { ROUTER_SOFTMAX_PRE, 1, 1, 1, 1 }, { 0.6f, 0.4f } },
                  { { ROUTER_SIGMOID, 0, 1, 1, 1 }, { 0.75f, 0.6666667f } },
                  { { ROUTER_SIGMOID, 1, 1, 1, 1 }, { 0.5294118f, 0.4705882f } },      /* 9/17, 8/17 */
                  { { ROUTER_SQRT_SOFTPLUS, 0, 1, 1, 1 }, { 1.1774100f, 1.0481470f } } }; /* sqrt(ln 4), sqrt(ln 3) */
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Env e;
        env_open(&e, isa_best(), 1, 0);
        Tensor logits = env_in(&e, F32, 0, 1, 1, 4), index = env_out(&e, I32, 0, 1, 1, 2);
        Tensor weight = env_out(&e, F32, 0, 1, 1, 2);
        memcpy(logits.data, (float[]){ 0, 0.69314718f, 1.09861229f, -1 }, 4 * sizeof(float));
        RUN(&e, router_fwd, .index = index, .weight = weight, .logits = logits, .router = cases[i].r);
        CHECK(env_i(index, 0)[0] == 2 && env_i(index, 0)[1] == 1);
        for (int k = 0; k < 2; k++) CLOSE(env_f(weight, 0)[k], (double)cases[i].want[k], 1, "case %d", (int)i);
        env_close(&e);
    }
}

/* Whatever the logits are, a choice is K different experts; a NaN is chosen last. */
TEST(router_of_nan)
{
    static const float rows[4][4] = { { NAN, NAN, NAN, NAN }, { 1, NAN, 2, NAN }, { INFINITY, 0, -INFINITY, NAN },
                                      { -INFINITY, -INFINITY, NAN, -INFINITY } };
    static const int want[4][3] = { { 0, 1, 2 }, { 2, 0, 1 }, { 0, 1, 2 }, { 0, 1, 3 } };
    Env e;
    env_open(&e, isa_best(), 1, 0);
    Tensor logits = env_in(&e, F32, 0, 1, 4, 4), index = env_out(&e, I32, 0, 1, 4, 3);
    Tensor weight = env_out(&e, F32, 0, 1, 4, 3);
    memcpy(logits.data, rows, sizeof rows);
    RUN(&e, router_fwd, .index = index, .weight = weight, .logits = logits,
        .router = { ROUTER_SOFTMAX, 0, 1, 1, 1 });
    for (int n = 0; n < 4; n++)
        for (int k = 0; k < 3; k++) CHECK_MSG(env_i(index, n)[k] == want[n][k], "row %d choice %d", n, k);
    CHECK(isnan(env_f(weight, 0)[0]));
    env_close(&e);
}

/* ---- what routers are given ---- */

/* Factors by the text of ops.def; they depend on the global coordinates alone, and lie on both sides of 1. */
static void case_jitter(Env *e, const Shape *p)
{
    const float eps = 0.25f;
    Tensor x = env_in(e, F32, -1, 1, p->N, p->D), y = env_out(e, F32, 8, 9, p->N, p->D);
    Tensor position = env_in(e, I32, 0, 5000, p->N), sample = env_in(e, I64, 0, 1e12, p->N);
    int below = 0, above = 0;
    RUN(e, jitter, .y = y, .x = env_used(e, x), .position = position, .sample = sample, .key = 77, .eps = eps);
    for (int64_t n = 0; e->check && n < env_n(e, p->N); n++)
        for (int64_t i = 0; i < p->D; i++) {
            const uint64_t s = (uint64_t)((int64_t *)sample.data)[n];
            const Philox r =
                philox(77, (uint32_t)i / 4, (uint32_t)((int32_t *)position.data)[n], (uint32_t)s, (uint32_t)(s >> 32));
            const double factor = 1 + (double)eps * (2 * (double)(r.v[i % 4] >> 8) / (1 << 24) - 1);
            CLOSE(env_f(y, n)[i], factor * (double)env_f(x, n)[i], 1, "row %d column %d", (int)n, (int)i);
            CHECK(factor >= 0.75 && factor < 1.25);
            below += factor < 1, above += factor > 1;
        }
    if (e->check && p->N * p->D > 100) CHECK(below > above / 2 && above > below / 2);
}

TEST(jitter)
{
    CASES(case_jitter, { 1, 1, 0, 0, 0 }, { 5, 16, 0, 0, 0 }, { 8, 33, 0, 0, 0 }, { 300, 70, 0, 0, 0 });
}

/* The K best of row g are the next K experts; over E rows each expert has K. */
TEST(router_even)
{
    enum { E = 6, K = 4, SEQ = 9 };
    Env e;
    env_open(&e, isa_best(), 2, 0);
    Tensor logits = env_out(&e, F32, 0, 1, 2 * SEQ, E), position = env_in(&e, I32, 0, 1, 2 * SEQ);
    Tensor sample = env_in(&e, I64, 0, 1, 2 * SEQ);
    for (int n = 0; n < 2 * SEQ; n++)
        ((int32_t *)position.data)[n] = n % SEQ, ((int64_t *)sample.data)[n] = 70 + n / SEQ;
    RUN(&e, router_even, .logits = logits, .position = position, .sample = sample, .seq = SEQ, .topk = K);
    for (int n = 0; n < 2 * SEQ; n++)
        for (int k = 0; k < E; k++) {
            const int64_t expert = ((70 * SEQ + n) * K + k) % E;
            int64_t better = 0;
            for (int i = 0; i < E; i++) better += env_f(logits, n)[i] > env_f(logits, n)[expert];
            CHECK_MSG(better == k, "row %d: expert %d is %d", n, (int)expert, (int)better);
        }
    env_close(&e);
}

/* ---- sinkhorn ---- */

/* The definition in float64, of one unit. */
static void definition_sinkhorn(const double *logits, int64_t rows, int64_t E, double *rank)
{
    double *p = calloc((size_t)rows, sizeof *p), q[E_MAX], change = 1;
    for (int64_t e = 0; e < E; e++) q[e] = 1;
    for (int round = 0; round < SINKHORN_ROUNDS && change > 1e-4; round++) {
        for (int64_t n = 0; n < rows; n++) {
            double sum = 0;
            for (int64_t e = 0; e < E; e++) sum += exp(logits[n * E + e]) * q[e];
            p[n] = 1 / ((double)rows * (sum + 1e-8));
        }
        change = 0;
        for (int64_t e = 0; e < E; e++) {
            double sum = 0;
            for (int64_t n = 0; n < rows; n++) sum += exp(logits[n * E + e]) * p[n];
            const double now = 1 / ((double)E * (sum + 1e-8));
            change += fabs(now - q[e]) / (double)E;
            q[e] = now;
        }
    }
    for (int64_t i = 0; i < rows * E; i++) rank[i] = exp(logits[i]) * q[i % E] * p[i / E];
    free(p);
}

/* D = E, a = rows of a unit. Ranks are compared by what they are of the row's sum: at the limit of rounds those of two
 * precisions may stop a round apart. */
static void case_sinkhorn(Env *e, const Shape *p)
{
    const int64_t E = p->D, rows = p->a;
    Tensor logits = env_in(e, F32, -2, 2, p->N, E), rank = env_out(e, F32, 0, 1, p->N, E),
           share = env_out(e, F32, 0, 1, p->N);
    for (int64_t n = 0; n < p->N; n++) env_f(logits, n)[0] += 3; /* left alone most rows would go there */
    env_settle(e);
    RUN(e, sinkhorn, .rank = rank, .share = share, .logits = logits, .rows = rows);
    for (int64_t u = 0; e->check && u < p->N / rows; u++) {
        double *x = malloc((size_t)(rows * E) * sizeof *x), *want = malloc((size_t)(rows * E) * sizeof *want);
        for (int64_t i = 0; i < rows * E; i++) x[i] = (double)env_f(logits, u * rows + i / E)[i % E];
        definition_sinkhorn(x, rows, E, want);
        for (int64_t n = 0; n < rows; n++)
            for (int64_t i = 0; i < E; i++)
                CHECK_CLOSE((double)env_f(rank, u * rows + n)[i] * (double)(rows * E),
                            want[n * E + i] * (double)(rows * E), 3e-3 * (1 + want[n * E + i] * (double)(rows * E)),
                            "unit %d row %d expert %d", (int)u, (int)n, (int)i);
        free(x);
        free(want);
    }
}

TEST(sinkhorn)
{
    static const Shape shapes[] = { { 1, 1, 1, 0, 0 }, { 8, 4, 8, 0, 0 }, { 60, 17, 20, 0, 0 }, { 256, 8, 128, 0, 0 } };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        const uint64_t want = env_run(case_sinkhorn, &shapes[i], isa_best(), 1, true);
        for (Isa isa = ISA_AVX512; isa < ISA_COUNT; isa++)
            for (int threads = 1; threads <= 3 && isa_supported(isa); threads++)
                CHECK(env_run(case_sinkhorn, &shapes[i], isa, threads, false) == want);
    }
}

/* Choices by ranks, weights by scores. */
TEST(router_by_rank)
{
    enum { E = 5, K = 2 };
    static const float x[E] = { 2, 1, 0, -1, -2 }, by[E] = { 0.1f, 0.3f, 0.1f, 0.9f, 0 };
    Env e;
    env_open(&e, isa_best(), 1, 0);
    Tensor logits = env_in(&e, F32, 0, 1, 1, E), rank = env_in(&e, F32, 0, 1, 1, E),
           index = env_out(&e, I32, 0, 1, 1, K);
    Tensor weight = env_out(&e, F32, 0, 1, 1, K);
    memcpy(logits.data, x, sizeof x);
    memcpy(rank.data, by, sizeof by);
    RUN(&e, router_fwd, .index = index, .weight = weight, .logits = logits, .rank = rank,
        .router = { ROUTER_SIGMOID, 0, 1, 1, 1 });
    const int want[K] = { 3, 1 };
    for (int k = 0; k < K; k++) {
        CHECK(env_i(index, 0)[k] == want[k]);
        CLOSE(env_f(weight, 0)[k], 1 / (1 + exp(-(double)x[want[k]])), 1, "choice %d", k);
    }
    env_close(&e);
}

/* ---- balance ---- */

/* log(sum exp(x)), and the scores of a row as they count for the auxiliary loss: their sum is 1. */
static double balance_scores(const Router *r, const double *x, int64_t E, double *q)
{
    double sum = 0, exps = 0;
    Router all = *r;
    if (all.score == ROUTER_SOFTMAX) all.score = ROUTER_SOFTMAX_PRE;
    definition_scores(&all, x, E, q);
    for (int64_t e = 0; e < E; e++) sum += q[e], exps += exp(x[e]);
    for (int64_t e = 0; e < E; e++) q[e] /= sum;
    return log(exps);
}

enum { FIRST = 3, UNIT = 8 }; /* place of row 0 in its micro-batch; rows of a unit */

/* The cost of one row: what is left of the losses when loads are numbers. */
static double balance_cost(const Router *r, const double *x, int64_t E, int64_t K, const int64_t *load, double aux,
                           double z)
{
    double q[E_MAX], sum = 0;
    const double log_sum = balance_scores(r, x, E, q);
    for (int64_t e = 0; e < E; e++) sum += (double)load[e] * q[e];
    return aux * (double)E / ((double)K * UNIT) * sum + z * log_sum * log_sum;
}

/* Loads are counted by hand; gradients are differences of the cost. */
static void case_balance(Env *e, const Shape *p)
{
    const Router r = { .score = (RouterScore)(p->flags & SCORE), .scale = 2, .groups = 1, .group_topk = 1 };
    const int64_t E = p->D, K = p->a, U = (p->N + FIRST + UNIT - 1) / UNIT;
    const float aux = p->b & 1 ? 0.5f : 0, z = p->b & 2 ? 0.25f : 0;
    const StepValues step = { .loss_scale = 4 };
    Tensor logits = env_in(e, F32, -3, 3, p->N, E), dlogits = env_out(e, F32, -1, 1, p->N, E);
    Tensor index = env_out(e, I32, 0, 1, p->N, K), weight = env_out(e, F32, 0, 1, p->N, K),
           load = env_out(e, I64, 5, 6, 40, E);
    RUN(e, router_fwd, .index = index, .weight = weight, .logits = env_used(e, logits), .router = r);
    RUN(e, router_count, .load = load, .index = env_used(e, index), .first = FIRST, .rows = UNIT);
    Tensor losses = env_out(e, I64, 5, 6, 3);
    RUN(e, router_balance, .dlogits = dlogits, .losses = losses, .logits = env_used(e, logits),
        .load = aux > 0 ? load : (Tensor){ 0 }, .router = r, .step = &step, .topk = (int)K, .aux = aux,
        .aux_coeff = 2 * aux, .z = z, .first = FIRST, .rows = UNIT);
    double told[2] = { 0 };
    for (int64_t u = 0; e->check && u < U; u++)
        for (int64_t i = 0; i < E; i++) {
            int64_t want = 5;
            for (int64_t n = 0; n < env_n(e, p->N); n++)
                for (int64_t k = 0; k < K && (n + FIRST) / UNIT == u; k++) want += env_i(index, n)[k] == i;
            CHECK_MSG(((int64_t *)(void *)env_row(&load, u))[i] == want, "unit %d expert %d", (int)u, (int)i);
        }
    for (int64_t n = 0; e->check && n < env_n(e, p->N); n++) {
        double x[E_MAX];
        const int64_t *unit = (const int64_t *)(void *)env_row(&load, (n + FIRST) / UNIT);
        row_of(logits, n, E, x);
        told[0] += aux > 0 ? balance_cost(&r, x, E, K, unit, 0.5, 0) : 0;
        told[1] += z > 0 ? balance_cost(&r, x, E, K, unit, 0, 1) : 0;
        for (int64_t i = 0; i < E; i++) {
            const double h = 1e-5, at = x[i], before = (double)((const float *)env_before(e, env_f(dlogits, n)))[i];
            x[i] = at + h;
            const double up = balance_cost(&r, x, E, K, unit, aux, z);
            x[i] = at - h;
            const double slope = (up - balance_cost(&r, x, E, K, unit, aux, z)) / (2 * h);
            x[i] = at;
            CHECK_CLOSE((double)env_f(dlogits, n)[i], before + 4 * slope, 2e-5 * (1 + fabs(slope)), "row %d logit %d",
                        (int)n, (int)i);
        }
    }
    const int64_t *sums = losses.data;
    for (int i = 0; e->check && i < 2; i++)
        CHECK_CLOSE(ldexp((double)(sums[i] - 5), -ROUTER_LOSS_BITS), told[i], 2e-6 * (1 + told[i]), "%s",
                    i ? "z" : "aux");
    CHECK(!e->check || sums[2] == 5);
}

/* A row that is not finite, and one whose z-loss has no room, are counted, not added. */
TEST(balance_losses_that_cannot_be_shown)
{
    const float x[3][2] = { { 0, 0 }, { NAN, 0 }, { 200, 0 } };
    const StepValues step = { .loss_scale = 1 };
    Env e;
    env_open(&e, isa_best(), 1, 0);
    Tensor logits = env_in(&e, F32, 0, 1, 3, 2), dlogits = env_out(&e, F32, 0, 0, 3, 2),
           losses = env_out(&e, I64, 0, 0, 3);
    memcpy(logits.data, x, sizeof x);
    RUN(&e, router_balance, .dlogits = dlogits, .losses = losses, .logits = logits, .step = &step, .topk = 1, .z = 1,
        .rows = 3);
    const int64_t *sums = losses.data;
    CHECK_CLOSE(ldexp((double)sums[1], -ROUTER_LOSS_BITS), log(2) * log(2), 1e-6);
    CHECK(sums[0] == 0 && sums[2] == 2);
    env_close(&e);
}

TEST(router_balance)
{
    for (int score = ROUTER_SOFTMAX; score <= ROUTER_SQRT_SOFTPLUS; score++)
        CASES(case_balance, { 1, 1, 1, 1, score }, { 7, 8, 2, 1, score }, { 40, 17, 3, 2, score },
              { 61, 64, 6, 3, score });
}

/* Choices are those of score + bias, weights those of the score: as a definition with another score decides. */
TEST(router_bias)
{
    enum { E = 8, K = 3 };
    const float x[E] = { 0.1f, -1, 2, 0.5f, -0.2f, 1, 0.3f, -3 }, bias[E] = { 0, 0.9f, -0.8f, 0, 0.3f, 0, 0, 0.95f };
    Env e;
    env_open(&e, isa_best(), 1, 0);
    Tensor logits = env_in(&e, F32, 0, 1, 1, E), b = env_in(&e, F32, 0, 1, E), index = env_out(&e, I32, 0, 1, 1, K);
    Tensor weight = env_out(&e, F32, 0, 1, 1, K);
    memcpy(logits.data, x, sizeof x);
    memcpy(b.data, bias, sizeof bias);
    RUN(&e, router_fwd, .index = index, .weight = weight, .logits = logits, .bias = b,
        .router = { ROUTER_SIGMOID, 0, 1, 1, 1 });
    const int want[K] = { 1, 7, 4 }; /* 1.169, 0.997, 0.750; then 0.731 */
    for (int k = 0; k < K; k++) {
        CHECK(env_i(index, 0)[k] == want[k]);
        CLOSE(env_f(weight, 0)[k], 1 / (1 + exp(-(double)x[want[k]])), 1, "choice %d", k);
    }
    env_close(&e);
}

/* Worked by hand: 12 rows, mean 3. */
TEST(expert_bias)
{
    for (int skip = 0; skip < 2; skip++)
        for (DType acc = F32; acc <= I64; acc += I64 - F32) {
            const int64_t offset[9] = { 0, 2, 5, 5, 6, 6, 9, 9, 12 };
            const StepValues step = { .skip = skip };
            Env e;
            env_open(&e, isa_best(), 1, 0);
            Tensor at = env_in(&e, I64, 0, 1, 9), load = env_out(&e, acc, 0, 0, 4), bias = env_out(&e, F32, 1, 1, 4);
            memcpy(at.data, offset, sizeof offset);
            RUN(&e, expert_count, .load = load, .offset = at);
            RUN(&e, expert_bias, .bias = bias, .load = load, .step = &step, .rate = 0.25f);
            const float want[4] = { 0.75f, 1.25f, 1, 1 }; /* loads 5, 1, 3, 3 */
            for (int i = 0; i < 4; i++) CHECK(((float *)bias.data)[i] == (skip ? 1 : want[i]));
            env_close(&e);
        }
}

/* ---- rows ---- */

/* K different experts a row, some of them never chosen. */
static Tensor make_choice(Env *e, int64_t N, int64_t K, int64_t E)
{
    Tensor index = env_in(e, I32, 0, 1, N, K);
    for (int64_t n = 0; n < N; n++)
        for (int64_t k = 0; k < K; k++)
            env_i(index, n)[k] =
                (int32_t)((rng_mix((uint64_t)n) % 5 * 3 + (uint64_t)k * (uint64_t)(E > 4 ? 2 : 1)) % (uint64_t)E);
    env_settle(e);
    return index;
}

enum { TOKENS = 4, RUNS = 76 }; /* of a run; of an expert, more than there are */

typedef struct {
    Tensor index, row, choice, offset;
} Order;

static Order make_order(Env *e, int64_t N, int64_t K, int64_t E)
{
    Order o = { .index = make_choice(e, N, K, E), .row = env_out(e, I32, 0, 1, N, K),
                .choice = env_out(e, I32, 0, 1, N * K), .offset = env_out(e, I64, 0, 1, E * RUNS + 1) };
    RUN(e, permute_index, .row = o.row, .choice = o.choice, .offset = o.offset, .index = env_used(e, o.index),
        .experts = E, .run = TOKENS);
    return o;
}

/* Begin of the rows of expert e. */
static int64_t start_of(const Order *o, int64_t e)
{
    return ((const int64_t *)o->offset.data)[e * RUNS];
}

/* The definition: rows sorted by (expert, choice number), runs of TOKENS tokens. */
static void check_order(const Order *o, int64_t N, int64_t K, int64_t E)
{
    const int32_t *choice = o->choice.data;
    const int64_t *offset = o->offset.data;
    int32_t p = 0;
    for (int64_t e = 0; e < E; e++) {
        for (int64_t i = 0; i < N * K; i++) {
            if (i % (TOKENS * K) == 0) CHECK(offset[e * RUNS + i / (TOKENS * K)] == p);
            if (env_i(o->index, i / K)[i % K] != e) continue;
            CHECK_MSG(choice[p] == i && env_i(o->row, i / K)[i % K] == p, "row %d", p);
            p++;
        }
    }
    CHECK(offset[E * RUNS] == p && p == N * K);
}

/* Groups of experts that tokens go to: each once, by its first choice that has a row; and rows of tokens that lie in
 * the order of those that go to one group. */
TEST(choices_in_groups)
{
    enum { N = 37, K = 5, E = 12, R = 40, D = 20 };
    static const int64_t groups[][3] = { { 0, 1, E }, { 0, 3, 4 }, { 4, 4, 1 }, { 3, 2, 3 } }; /* first, own, count */
    for (int which = 0; which < 4; which++) {
        const int64_t first = groups[which][0], own = groups[which][1], count = groups[which][2];
        Env e;
        env_open(&e, isa_best(), 2, 0);
        Tensor index = make_choice(&e, N, K, E), row = env_in(&e, I32, 0, 1, N, K),
               group = env_out(&e, I32, 5, 6, R, K);
        for (int n = 0; n < N; n++)
            for (int k = 0; k < K; k++) {
                if ((n + k) % 7 == 0) env_i(index, n)[k] = -1;
                env_i(row, n)[k] = (n * k) % 5 == 4 ? -1 : n;
            }
        RUN(&e, choice_groups, .group = group, .index = index, .row = row, .first = first, .own = own, .count = count);
        int goes = 0;
        for (int n = 0; n < R; n++) {
            uint32_t seen = 0;
            for (int k = 0; k < K; k++) {
                const int64_t expert = n < N ? env_i(index, n)[k] : -1;
                const bool there = expert >= first && expert < first + own * count && env_i(row, n)[k] >= 0;
                const int64_t want = there ? (expert - first) / own : -1;
                const bool again = there && seen >> want & 1;
                if (there) seen |= 1u << want;
                CHECK_MSG(env_i(group, n)[k] == (again ? -1 : want), "groups %d: choice %d of token %d", which, k, n);
                goes += there && !again;
            }
        }
        CHECK(goes > 0 && goes < N * K);
        env_close(&e);
    }
}

/* Rows of tokens of which x has some, in their order. */
TEST(rows_of_some_tokens)
{
    enum { N = 9, K = 3, D = 20 };
    static const int32_t choices[] = { 4 * K + 1, 1 * K, 7 * K + 2, 4 * K + 2 };
    static const int64_t places[] = { 1, 0, 2, 1 };
    Env e;
    env_open(&e, isa_best(), 2, 0);
    Tensor x = env_in(&e, F32, -1, 1, 3, D), weight = env_in(&e, F32, 0, 1, N, K), y = env_out(&e, F32, 8, 9, 4, D);
    Tensor row = env_in(&e, I32, 0, 1, N, K), choice = env_in(&e, I32, 0, 1, 4);
    for (int i = 0; i < N * K; i++) env_i(row, i / K)[i % K] = -1;
    env_i(row, 1)[2] = 0, env_i(row, 4)[0] = 1, env_i(row, 7)[1] = 2;
    memcpy(choice.data, choices, sizeof choices);
    RUN(&e, take_rows, .y = y, .x = x, .choice = choice, .weight = weight, .row = row, .topk = K);
    for (int q = 0; q < 4; q++)
        for (int d = 0; d < D; d++)
            CHECK(env_f(y, q)[d] == env_f(weight, choices[q] / K)[choices[q] % K] * env_f(x, places[q])[d]);
    env_close(&e);
}

/* The rows of the second rank's experts out of two ranks' tokens, gathered: an expert's from one rank, then the
 * other. */
TEST(gathered_rows)
{
    enum { N = 7, K = 3, E = 4, OWN = 2, D = 20, P = N * K, X = E + 1 };
    Env e;
    env_open(&e, isa_best(), 2, 0);
    Tensor index[2], all = env_in(&e, I64, 0, 1, 2, X), all_choice = env_in(&e, I32, 0, 1, 2, P);
    Tensor x = env_in(&e, F32, -1, 1, 2 * N, D), weight = env_in(&e, F32, 0, 1, 2 * N, K);
    for (int s = 0; s < 2; s++) {
        Tensor row = env_out(&e, I32, 0, 1, N, K), choice = env_out(&e, I32, 0, 1, P),
               offset = env_out(&e, I64, 0, 1, X);
        index[s] = env_in(&e, I32, 0, 1, N, K);
        for (int n = 0; n < N; n++)
            for (int k = 0; k < K; k++) env_i(index[s], n)[k] = (n * (s + 2) + k + s) % E;
        RUN(&e, permute_index, .row = row, .choice = choice, .offset = offset, .index = index[s], .experts = E,
            .run = N);
        memcpy((int64_t *)all.data + s * X, offset.data, X * sizeof(int64_t));
        memcpy(env_i(all_choice, s), choice.data, P * sizeof(int32_t));
    }
    Tensor owned = env_out(&e, I64, 0, 1, OWN * 2 + 1), taken = env_out(&e, I32, -1, 0, 2 * P);
    Tensor y = env_out(&e, F32, 8, 9, 2 * P, D), scaled = env_out(&e, F32, 8, 9, 2 * P, D);
    RUN(&e, dispatch_offsets, .offset = owned, .all = all, .first = OWN, .own = OWN, .most = 2 * P);
    RUN(&e, dispatch_choices, .choice = taken, .all_choice = all_choice, .all = all, .offset = owned, .first = OWN,
        .own = OWN, .numbers = P);
    y.rows = scaled.rows = (int64_t *)owned.data + 2 * OWN;
    RUN(&e, take_rows, .y = y, .x = x, .choice = taken, .topk = K);
    RUN(&e, take_rows, .y = scaled, .x = x, .choice = taken, .weight = weight, .topk = K);
    int q = 0;
    for (int expert = OWN; expert < E; expert++)
        for (int s = 0; s < 2; s++) {
            CHECK(((int64_t *)owned.data)[(expert - OWN) * 2 + s] == q);
            for (int i = 0; i < P; i++) {
                if (env_i(index[s], i / K)[i % K] != expert) continue;
                CHECK(((int32_t *)taken.data)[q] == s * P + i);
                for (int d = 0; d < D; d++) {
                    const float v = env_f(x, s * N + i / K)[d];
                    CHECK(env_f(y, q)[d] == v && env_f(scaled, q)[d] == env_f(weight, s * N + i / K)[i % K] * v);
                }
                q++;
            }
        }
    CHECK(q > P / 2 && q < 2 * P && env_f(y, q)[0] >= 8 && ((int32_t *)taken.data)[q] <= 0);
    env_close(&e);
}

/* Parts of rows are added in pairs, then pairs of pairs; what an odd number leaves over comes last. */
TEST(parts)
{
    enum { P = 5, D = 17 };
    const int counts[] = { 1, 2, 3, 4, 7, 64 };
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
        const int parts = counts[c];
        Env e;
        env_open(&e, isa_best(), 2, 0);
        Tensor x = env_in(&e, F32, -1, 1, parts * P, D), y = env_out(&e, F32, 8, 9, P, D);
        RUN(&e, sum_parts, .y = y, .x = x, .parts = parts);
        for (int n = 0; n < P; n++)
            for (int i = 0; i < D; i++) {
                float sum[64];
                for (int k = 0; k < parts; k++) sum[k] = env_f(x, k * P + n)[i];
                for (int step = 1; step < parts; step *= 2)
                    for (int k = 0; k + step < parts; k += 2 * step) sum[k] += sum[k + step];
                CHECK_MSG(env_f(y, n)[i] == sum[0], "%d parts, row %d column %d", parts, n, i);
            }
        env_close(&e);
    }
}

/* a = K, b = E */
static void case_permute(Env *e, const Shape *p)
{
    const int64_t N = p->N, D = p->D, K = p->a, used = env_n(e, N);
    Order o = make_order(e, N, K, p->b);
    Tensor x = env_in(e, F32, -1, 1, N, D), out = env_in(e, F32, -1, 1, N * K, D), dy = env_in(e, F32, -1, 1, N, D);
    Tensor weight = env_in(e, F32, 0, 1, N, K), xp = env_out(e, F32, 8, 9, N * K, D), y = env_out(e, F32, 8, 9, N, D);
    Tensor sum = env_out(e, F32, -1, 1, N, D), dout = env_out(e, F32, 8, 9, N * K, D), dw = env_out(e, F32, 8, 9, N, K);
    RUN(e, permute_rows, .y = xp, .x = env_used(e, x), .choice = o.choice, .topk = K);
    RUN(e, unpermute_rows, .y = env_used(e, y), .x = out, .row = o.row, .weight = weight);
    RUN(e, unpermute_rows, .y = env_used(e, sum), .x = out, .row = o.row, .add = 1);
    RUN(e, unpermute_bwd, .dx = dout, .dweight = dw, .dy = env_used(e, dy), .x = out, .row = o.row, .weight = weight);
    if (!e->check) return;
    check_order(&o, used, K, p->b);
    for (int64_t n = 0; n < used; n++) {
        for (int64_t k = 0; k < K; k++) {
            const int32_t row = env_i(o.row, n)[k];
            double dot = 0;
            CHECK(!memcmp(env_f(xp, row), env_f(x, n), (size_t)D * sizeof(float)));
            for (int64_t i = 0; i < D; i++) {
                dot += (double)env_f(dy, n)[i] * (double)env_f(out, row)[i];
                CLOSE(env_f(dout, row)[i], (double)env_f(weight, n)[k] * (double)env_f(dy, n)[i], 1, "dx");
            }
            CLOSE(env_f(dw, n)[k], dot, D, "dweight of row %d", (int)n);
        }
        for (int64_t i = 0; i < D; i++) {
            double want = 0, plain = (double)((const float *)env_before(e, env_f(sum, n)))[i];
            for (int64_t k = 0; k < K; k++) {
                const double v = (double)env_f(out, env_i(o.row, n)[k])[i];
                want += (double)env_f(weight, n)[k] * v;
                plain += v;
            }
            CLOSE(env_f(y, n)[i], want, K, "row %d column %d", (int)n, (int)i);
            CLOSE(env_f(sum, n)[i], plain, K, "sum of row %d column %d", (int)n, (int)i);
        }
    }
}

TEST(permute)
{
    CASES(case_permute, { 1, 1, 1, 1, 0 }, { 2, 15, 2, 3, 0 }, { 7, 33, 2, 8, 0 }, { 64, 16, 4, 9, 0 },
          { 301, 70, 3, 7, 0 }, { 5, 17, 1, 64, 0 });
}

/* The definition: choice i of a list's expert stays if fewer than `most` of the list are better than it. */
static bool definition_kept(const Order *o, Tensor weight, int64_t N, int64_t K, int64_t i, int64_t most,
                            bool by_weight)
{
    const int expert = env_i(o->index, i / K)[i % K];
    const float w = env_f(weight, i / K)[i % K];
    int64_t better = 0;
    for (int64_t j = 0; j < N * K; j++) {
        if (j / K / TOKENS != i / K / TOKENS || env_i(o->index, j / K)[j % K] != expert) continue;
        const float v = env_f(weight, j / K)[j % K];
        better += by_weight ? v > w || (w != w && v == v) || (j < i && !(w > v) && !(v != v && w == w)) : j < i;
    }
    return better < most;
}

enum { BY_WEIGHT = 1, EQUAL = 2, LIMITS = 4, NANS = 8 };

/* What a list may keep: with LIMITS from 0 to beyond what it has, by its number. */
static int64_t list_limit(const Shape *p, int64_t list) { return p->flags & LIMITS ? list % 5 : 2; }

static Tensor drop_weights(Env *e, const Shape *p)
{
    Tensor weight = env_in(e, F32, -1, 1, p->N, p->a);
    for (int64_t n = 0; n < p->N; n++)
        for (int64_t k = 0; k < p->a; k++) {
            float *w = &env_f(weight, n)[k];
            if (p->flags & EQUAL) *w = 0.5f * floorf(2 * *w); /* -1, -0.5, 0, 0.5 */
            if (p->flags & EQUAL && (n + k) % 5 == 0) *w = nextafterf(*w, 1); /* (no tie: the larger one) */
            if (p->flags & NANS && (n + k) % 3 == 0) *w = n % 2 ? NAN : -0.0f;
        }
    env_settle(e);
    return weight;
}

/* a = K, b = E: first the order of all choices, then what is kept of it, then the order of that, whose rows are
 * used. */
static void case_drop(Env *e, const Shape *p)
{
    const int64_t N = p->N, K = p->a, E = p->b, used = env_n(e, N);
    Order o = make_order(e, N, K, E);
    Tensor weight = drop_weights(e, p), kept = env_out(e, I32, 0, 1, N, K), row = env_out(e, I32, 0, 1, N, K);
    Tensor choice = env_out(e, I32, 0, 1, N * K), offset = env_out(e, I64, 0, 1, E * RUNS + 1);
    Tensor limit = env_in(e, I64, 0, 1, E * RUNS), none = { 0 };
    for (int64_t l = 0; l < E * RUNS; l++) ((int64_t *)limit.data)[l] = list_limit(p, l);
    env_settle(e);
    RUN(e, choice_drop, .kept = kept, .weight = p->flags & BY_WEIGHT ? weight : none, .choice = o.choice,
        .offset = o.offset, .limit = p->flags & LIMITS ? limit : none, .experts = E, .most = 2);
    RUN(e, permute_index, .row = row, .choice = choice, .offset = offset, .index = env_used(e, kept), .experts = E,
        .run = TOKENS);
    int32_t next = 0;
    for (int64_t x = 0; e->check && x < E; x++)
        for (int64_t i = 0; i < used * K; i++) {
            if (env_i(o.index, i / K)[i % K] != x) continue;
            const int64_t most = list_limit(p, x * RUNS + i / K / TOKENS);
            const bool want = definition_kept(&o, weight, used, K, i, most, p->flags & BY_WEIGHT);
            CHECK_MSG(env_i(kept, i / K)[i % K] == (want ? x : -1), "choice %d of expert %d", (int)i, (int)x);
            CHECK_MSG(env_i(row, i / K)[i % K] == (want ? next : -1), "row of choice %d", (int)i);
            if (want) CHECK(((int32_t *)choice.data)[next++] == i);
        }
    if (e->check) CHECK(((int64_t *)offset.data)[E * RUNS] == next);
}

TEST(choice_drop)
{
    for (int by = 0; by <= BY_WEIGHT; by++)
        CASES(case_drop, { 1, 1, 1, 1, by }, { 7, 1, 2, 3, by }, { 64, 1, 3, 3, by }, { 64, 1, 4, 9, by | LIMITS },
              { 301, 1, 3, 4, by | EQUAL }, { 33, 1, 4, 5, by | EQUAL | LIMITS }, { 40, 1, 2, 2, by | NANS });
}

/* Dropped choices have no output, their weights no gradient, and nothing is written for them. D columns, a = K, b =
 * E */
static void case_dropped_rows(Env *e, const Shape *p)
{
    const int64_t N = p->N, D = p->D, K = p->a, E = p->b, P = N * K;
    Tensor index = make_choice(e, N, K, E), x = env_in(e, F32, -1, 1, N, D), weight = env_in(e, F32, 0, 1, N, K);
    for (int64_t i = 0; i < P; i++)
        if (rng_mix((uint64_t)i) % 3 == 0) env_i(index, i / K)[i % K] = -1;
    env_settle(e);
    Order o = { .index = index, .row = env_out(e, I32, 0, 1, N, K), .choice = env_out(e, I32, 0, 1, P),
                .offset = env_out(e, I64, 0, 1, E * RUNS + 1) };
    Tensor xp = env_out(e, F32, 8, 9, P, D), y = env_out(e, F32, 8, 9, N, D), dy = env_in(e, F32, -1, 1, N, D);
    Tensor dout = env_out(e, F32, 8, 9, P, D), dw = env_out(e, F32, 8, 9, N, K), all = o.choice;
    RUN(e, permute_index, .row = o.row, .choice = o.choice, .offset = o.offset, .index = env_used(e, index),
        .experts = E, .run = TOKENS);
    all.rows = (const int64_t *)o.offset.data + E * RUNS;
    RUN(e, permute_rows, .y = xp, .x = x, .choice = all, .topk = K);
    RUN(e, unpermute_rows, .y = env_used(e, y), .x = xp, .row = o.row, .weight = weight);
    RUN(e, unpermute_bwd, .dx = dout, .dweight = dw, .dy = env_used(e, dy), .x = xp, .row = o.row, .weight = weight);
    for (int64_t n = 0; e->check && n < env_n(e, N); n++) {
        double sum = 0, dot = 0;
        for (int64_t i = 0; i < D; i++) dot += (double)env_f(dy, n)[i] * (double)env_f(x, n)[i];
        for (int64_t k = 0; k < K; k++) {
            const bool kept = env_i(index, n)[k] >= 0;
            sum += kept ? (double)env_f(weight, n)[k] : 0;
            CHECK((env_i(o.row, n)[k] >= 0) == kept);
            CLOSE(env_f(dw, n)[k], kept ? dot : 0, D, "dweight of row %d choice %d", (int)n, (int)k);
        }
        for (int64_t i = 0; i < D; i++) CLOSE(env_f(y, n)[i], sum * (double)env_f(x, n)[i], K, "row %d", (int)n);
    }
    for (int64_t r = *all.rows; e->check && r < P; r++)
        for (int64_t i = 0; i < D; i++) CHECK(env_f(xp, r)[i] >= 8 && env_f(dout, r)[i] >= 8);
}

TEST(dropped_rows)
{
    CASES(case_dropped_rows, { 1, 1, 1, 1, 0 }, { 7, 33, 2, 8, 0 }, { 64, 16, 4, 9, 0 }, { 301, 70, 3, 7, 0 });
}

/* What ranks are sent is what they were told of: the offsets of three ranks' tables of random runs; with `lost` some of
 * them are nonsense, and no more than `most` rows are left. */
static void dispatch_case(int rank, bool lost, int64_t most)
{
    enum { S = 3, EACH = 2, R = 2, X = S * EACH * R + 1 };
    Env e;
    env_open(&e, isa_best(), 1, 0);
    Tensor all = env_in(&e, I64, 0, 1, S, X), offset = env_out(&e, I64, 0, 1, X);
    uint64_t seed = 7;
    int64_t *from = all.data, at = 0;
    for (int s = 0; s < S; s++, from += X) {
        from[0] = 0;
        for (int i = 1; i < X; i++)
            from[i] = from[i - 1] + (int64_t)(test_rand(&seed) % 4) - 9 * lost * (i % 3);
    }
    RUN(&e, dispatch_offsets, .offset = offset, .all = all, .first = rank * EACH, .own = EACH, .most = most);
    const int64_t *got = offset.data;
    from = all.data;
    CHECK(got[0] == 0);
    for (int c = 0; c < EACH; c++)
        for (int s = 0; s < S; s++)
            for (int r = 0; r < R; r++) {
                const int64_t *run = from + s * X + (rank * EACH + c) * R + r;
                at += run[1] > run[0] ? run[1] - run[0] : 0;
                CHECK(got[(c * S + s) * R + r + 1] == (at < most ? at : most));
            }
    env_close(&e);
}

TEST(dispatch)
{
    for (int rank = 0; rank < 3; rank++) {
        dispatch_case(rank, false, 1000);
        dispatch_case(rank, true, 1000);
        dispatch_case(rank, false, 7);
    }
}

/* Pieces of three ranks with two experts each, by hand: what fits is left as it is; else all are cut to one number, and
 * the first of the larger ones get what is left. */
TEST(room_limits)
{
    enum { S = 3, E = 6, X = E + 1 };
    static const int64_t rows[S][E] = { { 5, 0, 3, 3, 0, 0 }, { 2, 1, 3, 3, 9, 0 }, { 4, 7, 3, 3, 1, 2 } };
    /* room 10: rank 0 would get 5 2 4, 0 1 7; cut to 2 that is 9, and one more of the first. Rank 1: 3 3 3, 3 3 3; cut
     * to 1 that is 6, and one more of the first four. Rank 2: 0 9 1, 0 0 2; cut to 7. */
    static const int64_t want[S][E] = { { 3, 0, 2, 2, 0, 0 }, { 2, 1, 2, 1, 7, 0 }, { 2, 2, 2, 1, 1, 2 } };
    for (int rank = 0; rank < S; rank++)
        for (int wide = 0; wide < 2; wide++) {
            Env e;
            env_open(&e, isa_best(), 1, 0);
            Tensor all = env_in(&e, I64, 0, 1, S, X), limit = env_out(&e, I64, 0, 1, E), full = env_flag(&e);
            for (int s = 0; s < S; s++)
                for (int i = 0, at = 0; i < X; i++) {
                    ((int64_t *)all.data)[s * X + i] = at;
                    at += i < E ? (int)rows[s][i] : 0;
                }
            RUN(&e, room_limits, .limit = limit, .full = full, .all = all, .own = 2, .room = wide ? 19 : 10,
                .rank = rank);
            CHECK(*(int32_t *)full.data == !wide);
            for (int i = 0; i < E; i++)
                CHECK_MSG(((int64_t *)limit.data)[i] == (wide ? rows : want)[rank][i], "rank %d, expert %d", rank, i);
            env_close(&e);
        }
}

/* ---- products ---- */

typedef struct {
    Order o;
    Tensor x, w, dy, y, dx, dw;
} Grouped;

static void grouped_check_rows(const Grouped *g, int64_t O, int64_t I, int64_t E)
{
    for (int64_t e = 0; e < E; e++)
        for (int64_t p = start_of(&g->o, e); p < start_of(&g->o, e + 1); p++) {
            for (int64_t o = 0; o < O; o++) {
                double want = 0;
                for (int64_t i = 0; i < I; i++)
                    want += (double)env_f(g->x, p)[i] * (double)env_f(g->w, e * O + o)[i];
                CLOSE(env_f(g->y, p)[o], want, I, "y, expert %d row %d column %d", (int)e, (int)p, (int)o);
            }
            for (int64_t i = 0; i < I; i++) {
                double want = 0;
                for (int64_t o = 0; o < O; o++)
                    want += (double)env_f(g->dy, p)[o] * (double)env_f(g->w, e * O + o)[i];
                CLOSE(env_f(g->dx, p)[i], want, O, "dx, expert %d row %d column %d", (int)e, (int)p, (int)i);
            }
        }
}

static void grouped_check_gradient(const Env *env, const Grouped *g, int64_t O, int64_t I, int64_t E)
{
    for (int64_t e = 0; e < E; e++)
        for (int64_t o = 0; o < O; o++)
            for (int64_t i = 0; i < I; i++) {
                double want = 0;
                for (int64_t p = start_of(&g->o, e); p < start_of(&g->o, e + 1); p++)
                    want += (double)env_f(g->dy, p)[o] * (double)env_f(g->x, p)[i];
                CLOSE(env_added(env, g->dw, 30, e * O + o, i), want, 10 + start_of(&g->o, e + 1) - start_of(&g->o, e),
                      "dw of expert %d at %d %d", (int)e, (int)o, (int)i);
            }
}

enum { PLAIN = 1 };

/* D = I, a = K, b = E; O = I + 3, leaves of 4 tokens */
static void case_grouped(Env *e, const Shape *p)
{
    const int64_t K = p->a, E = p->b, I = p->D, O = I + 3, P = p->N * K;
    const DType acc = p->flags & PLAIN ? F32 : I64;
    const double high = acc == F32 ? 2 : 1e12;
    Grouped g = { .o = make_order(e, p->N, K, E),
                  .x = env_in(e, F32, -1, 1, P, I),
                  .w = env_in(e, F32, -1, 1, E, O, I),
                  .dy = env_in(e, F32, -1, 1, P, O),
                  .y = env_out(e, F32, 8, 9, P, O),
                  .dx = env_out(e, F32, 8, 9, P, I),
                  .dw = env_out(e, acc, -high, high, E, O, I) };
    Tensor shift = env_int(e, 30), overflow = env_flag(e);
    RUN(e, grouped_fwd, .y = g.y, .x = g.x, .w = g.w, .offset = g.o.offset, .leaf = I / 2 + 1);
    RUN(e, grouped_dx, .dx = g.dx, .dy = g.dy, .w = g.w, .offset = g.o.offset, .leaf = O);
    RUN(e, grouped_dw, .dw = g.dw, .dy = g.dy, .x = g.x, .offset = g.o.offset, .shift = shift,
        .overflow = overflow, .headroom_bits = 10);
    if (!e->check) return;
    grouped_check_rows(&g, O, I, E);
    grouped_check_gradient(e, &g, O, I, E);
    CHECK(*(int32_t *)overflow.data == 0);
}

TEST(grouped)
{
    CASES(case_grouped, { 1, 1, 1, 1, 0 }, { 6, 17, 2, 3, 0 }, { 33, 16, 2, 8, 0 }, { 40, 31, 3, 5, PLAIN },
          { 300, 40, 2, 6, 0 }, { 7, 5, 1, 12, 0 }, { 64, 64, 1, 1, PLAIN });
}

/* The integer of each leaf is that of linear_dw over the same rows alone: nothing but expert and run of tokens cuts a
 * sum. */
TEST(grouped_leaves)
{
    enum { N = 22, K = 2, E = 3, O = 5, I = 20 };
    Env e;
    env_open(&e, isa_best(), 2, 0);
    Grouped g = { .o = make_order(&e, N, K, E), .x = env_in(&e, F32, -1, 1, N * K, I),
                  .dy = env_in(&e, F32, -1, 1, N * K, O), .dw = env_out(&e, I64, 5, 6, E, O, I) };
    Tensor want = env_out(&e, I64, 0, 1, E * O, I), shift = env_int(&e, 28), overflow = env_flag(&e);
    RUN(&e, grouped_dw, .dw = g.dw, .dy = g.dy, .x = g.x, .offset = g.o.offset, .shift = shift,
        .overflow = overflow, .headroom_bits = 10, .fresh = 1);
    const int32_t *choice = g.o.choice.data;
    for (int x = 0; x < E; x++)
        for (int64_t p = start_of(&g.o, x), next; p < start_of(&g.o, x + 1); p = next) {
            next = p + 1;
            while (next < start_of(&g.o, x + 1) && choice[next] / (K * TOKENS) == choice[p] / (K * TOKENS)) next++;
            RUN(&e, linear_dw, .dw = tensor_row_slice(want, x * O, O), .dy = tensor_row_slice(g.dy, p, next - p),
                .x = tensor_row_slice(g.x, p, next - p), .shift = shift, .overflow = overflow, .leaf = N * K,
                .headroom_bits = 10);
        }
    for (int64_t i = 0; i < E * O * I; i++)
        CHECK_MSG(((int64_t *)g.dw.data)[i] == ((int64_t *)want.data)[i], "element %d", (int)i);
    env_close(&e);
}

/* The tree: a product whose summed dim is cut at a leaf is the sum of the products of the parts, to the bit. */
TEST(grouped_tree)
{
    enum { N = 9, K = 2, E = 3, W = 24, LEAF = W / 4 };
    Env e;
    env_open(&e, isa_best(), 2, 0);
    const Order o = make_order(&e, N, K, E);
    Tensor x = env_in(&e, F32, -1, 1, N * K, W), w = env_in(&e, F32, -1, 1, E, 5, W),
           y = env_out(&e, F32, 8, 9, N * K, 5);
    Tensor dy = env_in(&e, F32, -1, 1, N * K, W), v = env_in(&e, F32, -1, 1, E, W, 5),
           dx = env_out(&e, F32, 8, 9, N * K, 5);
    Tensor part[2], dpart[2];
    RUN(&e, grouped_fwd, .y = y, .x = x, .w = w, .offset = o.offset, .leaf = LEAF);
    RUN(&e, grouped_dx, .dx = dx, .dy = dy, .w = v, .offset = o.offset, .leaf = LEAF);
    for (int h = 0; h < 2; h++) {
        part[h] = env_out(&e, F32, 8, 9, N * K, 5);
        dpart[h] = env_out(&e, F32, 8, 9, N * K, 5);
        Tensor half = env_in(&e, F32, 0, 1, E, W / 2, 5), wide = env_in(&e, F32, 0, 1, E, 5, W / 2);
        for (int64_t i = 0; i < E * 5; i++)
            memcpy(env_f(wide, i), env_f(w, i) + h * (W / 2), W / 2 * sizeof(float));
        for (int64_t i = 0; i < E * (W / 2); i++)
            memcpy(env_f(half, i), env_f(v, i / (W / 2) * W + h * (W / 2) + i % (W / 2)), 5 * sizeof(float));
        RUN(&e, grouped_fwd, .y = part[h], .x = tensor_col_slice(x, h * (W / 2), W / 2), .w = wide, .offset = o.offset,
            .leaf = LEAF);
        RUN(&e, grouped_dx, .dx = dpart[h], .dy = tensor_col_slice(dy, h * (W / 2), W / 2), .w = half,
            .offset = o.offset, .leaf = LEAF);
    }
    for (int64_t p = 0; p < N * K; p++)
        for (int i = 0; i < 5; i++) {
            CHECK_MSG(env_f(y, p)[i] == env_f(part[0], p)[i] + env_f(part[1], p)[i], "y, row %d", (int)p);
            CHECK_MSG(env_f(dx, p)[i] == env_f(dpart[0], p)[i] + env_f(dpart[1], p)[i], "dx, row %d", (int)p);
        }
    env_close(&e);
}

/* NaN and what does not fit a fixed-point leaf raise the flag; an expert without rows has a gradient of 0. */
TEST(grouped_overflow_and_nothing)
{
    enum { N = 6, E = 4, O = 3, I = 16 };
    for (int bad = 0; bad < 2; bad++) {
        Env e;
        env_open(&e, isa_best(), 2, 0);
        Tensor index = env_in(&e, I32, 2, 2.5, N, 1), row = env_out(&e, I32, 0, 1, N, 1),
               choice = env_out(&e, I32, 0, 1, N);
        Tensor offset = env_out(&e, I64, 0, 1, E + 1), x = env_in(&e, F32, -1, 1, N, I),
               dy = env_in(&e, F32, -1, 1, N, O);
        Tensor dw = env_out(&e, I64, -9, 9, E, O, I), shift = env_int(&e, 30), overflow = env_flag(&e);
        if (bad) env_f(dy, 4)[1] = NAN;
        RUN(&e, permute_index, .row = row, .choice = choice, .offset = offset, .index = index, .experts = E, .run = N);
        RUN(&e, grouped_dw, .dw = dw, .dy = dy, .x = x, .offset = offset, .shift = shift,
            .overflow = overflow, .headroom_bits = 10, .fresh = 1);
        CHECK(*(int32_t *)overflow.data == bad);
        for (int64_t i = 0; i < E * O * I; i++)
            if (i / (O * I) != 2) CHECK(((int64_t *)dw.data)[i] == 0);
        env_close(&e);
    }
}

/* ---- biases of experts ---- */

/* D columns, a = K, b = E; leaves of 4 tokens */
static void case_bias(Env *e, const Shape *p)
{
    const int64_t K = p->a, E = p->b, O = p->D, P = p->N * K;
    const DType acc = p->flags & PLAIN ? F32 : I64;
    const double high = acc == F32 ? 2 : 1e12;
    const Order o = make_order(e, p->N, K, E);
    Tensor y = env_out(e, F32, -1, 1, P, O), bias = env_in(e, F32, -1, 1, E, O), dy = env_in(e, F32, -1, 1, P, O);
    Tensor dbias = env_out(e, acc, -high, high, E, O), shift = env_int(e, 30), overflow = env_flag(e);
    RUN(e, grouped_bias, .y = y, .bias = bias, .offset = o.offset);
    RUN(e, grouped_bias_grad, .dbias = dbias, .dy = dy, .offset = o.offset, .shift = shift, .overflow = overflow,
        .headroom_bits = 10);
    for (int64_t x = 0; e->check && x < E; x++)
        for (int64_t i = 0; i < O; i++) {
            double sum = 0;
            for (int64_t r = start_of(&o, x); r < start_of(&o, x + 1); r++) {
                const double before = (double)((const float *)env_before(e, env_f(y, r)))[i];
                CLOSE(env_f(y, r)[i], before + (double)env_f(bias, x)[i], 1, "row %d column %d", (int)r, (int)i);
                sum += (double)env_f(dy, r)[i];
            }
            CLOSE(env_added(e, dbias, 30, x, i), sum, P, "expert %d column %d", (int)x, (int)i);
        }
    CHECK(*(int32_t *)overflow.data == 0);
}

TEST(grouped_bias)
{
    CASES(case_bias, { 1, 1, 1, 1, 0 }, { 6, 17, 2, 3, 0 }, { 33, 16, 2, 8, 0 }, { 40, 31, 3, 5, PLAIN },
          { 300, 70, 2, 6, 0 }, { 7, 5, 1, 12, 0 });
}

/* The integer of each leaf is that of bias_grad over the same rows alone; what does not fit raises the flag. */
TEST(grouped_bias_leaves)
{
    enum { N = 22, K = 2, E = 3, O = 21 };
    for (int bad = 0; bad < 2; bad++) {
        Env e;
        env_open(&e, isa_best(), 2, 0);
        const Order o = make_order(&e, N, K, E);
        Tensor dy = env_in(&e, F32, -1, 1, N * K, O), got = env_out(&e, I64, 0, 1, E, O);
        Tensor want = env_out(&e, I64, 0, 1, E, O), shift = env_int(&e, 28), overflow = env_flag(&e);
        Tensor apart = env_flag(&e);
        if (bad) env_f(dy, 7)[3] = NAN;
        RUN(&e, grouped_bias_grad, .dbias = got, .dy = dy, .offset = o.offset, .shift = shift, .overflow = overflow,
            .headroom_bits = 10);
        for (int64_t run = 0; run < o.offset.dim[0] - 1; run++) {
            const int64_t *at = (const int64_t *)o.offset.data + run, x = run / ((o.offset.dim[0] - 1) / E);
            if (at[0] == at[1]) continue;
            RUN(&e, bias_grad, .dbias = tensor_of(env_row(&want, x), I64, O),
                .dy = tensor_row_slice(dy, at[0], at[1] - at[0]), .shift = shift, .overflow = apart, .leaf = N * K,
                .headroom_bits = 10);
        }
        for (int64_t i = 0; i < E * O; i++)
            CHECK_MSG(((int64_t *)got.data)[i] == ((int64_t *)want.data)[i], "number %d", (int)i);
        CHECK(*(int32_t *)overflow.data == bad && *(int32_t *)apart.data == bad);
        env_close(&e);
    }
}

/* ---- the gate of the shared expert ---- */

static void case_gated(Env *e, const Shape *p)
{
    const int64_t D = p->D;
    Tensor x = env_in(e, F32, -1, 1, p->N, D), residual = env_in(e, F32, -1, 1, p->N, D),
           gate = env_in(e, F32, -4, 4, p->N, 1);
    Tensor dy = env_in(e, F32, -1, 1, p->N, D), y = env_out(e, F32, 8, 9, p->N, D), dx = env_out(e, F32, 8, 9, p->N, D);
    Tensor dgate = env_out(e, F32, 8, 9, p->N, 1);
    RUN(e, gated_add_fwd, .y = y, .residual = residual, .x = env_used(e, x), .gate = gate);
    RUN(e, gated_add_bwd, .dx = dx, .dgate = dgate, .dy = env_used(e, dy), .x = x, .gate = gate);
    for (int64_t n = 0; e->check && n < env_n(e, p->N); n++) {
        const double s = 1 / (1 + exp(-(double)env_f(gate, n)[0]));
        double dot = 0;
        for (int64_t i = 0; i < D; i++) {
            const double v = (double)env_f(x, n)[i], g = (double)env_f(dy, n)[i];
            CLOSE(env_f(y, n)[i], (double)env_f(residual, n)[i] + s * v, 1, "y of row %d", (int)n);
            CLOSE(env_f(dx, n)[i], s * g, 1, "dx of row %d", (int)n);
            dot += v * g;
        }
        CLOSE(env_f(dgate, n)[0], dot * s * (1 - s), D, "dgate of row %d", (int)n);
    }
}

TEST(gated_add)
{
    CASES(case_gated, { 1, 1, 0, 0, 0 }, { 5, 16, 0, 0, 0 }, { 8, 33, 0, 0, 0 }, { 300, 70, 0, 0, 0 });
}

/* ---- sums in fp32 of rows of 16 bits ---- */

/* t in 16 bits; t itself gets what is left of its numbers. */
static Tensor rounded(Env *e, Tensor t)
{
    Tensor narrow = env_out(e, BF16, 0, 1, t.dim[0], t.dim[1]);
    for (int64_t n = 0; n < t.dim[0]; n++)
        for (int64_t i = 0; i < t.dim[1]; i++) {
            uint16_t *half = (uint16_t *)(void *)env_row(&narrow, n) + i;
            *half = bf16_from_float(env_f(t, n)[i]);
            env_f(t, n)[i] = bf16_to_float(*half);
        }
    return narrow;
}

/* `narrow` has the numbers of `wide`, each rounded once. */
static bool same_rounded(Tensor narrow, Tensor wide)
{
    for (int64_t n = 0; n < wide.dim[0]; n++)
        for (int64_t i = 0; i < wide.dim[1]; i++)
            if (((uint16_t *)(void *)env_row(&narrow, n))[i] != bf16_from_float(env_f(wide, n)[i])) return false;
    return true;
}

static bool same_bits(Tensor a, Tensor b)
{
    bool same = true;
    for (int64_t n = 0; n < a.dim[0]; n++)
        same &= !memcmp(env_f(a, n), env_f(b, n), (size_t)a.dim[1] * sizeof(float));
    return same;
}

/* What is fp32 is neither rounded nor read rounded: the bits are those of the op in fp32 on the same numbers, and a row
 * of a gradient is rounded once, whether it is weighed where the token is or where the expert is. */
TEST(sums_beside_16_bits)
{
    enum { N = 37, K = 3, E = 5, D = 50, P = N * K };
    Env e = { .pad = 5 };
    OK(device_open(&e.dev, (DeviceChoice){ .threads = 2, .isa = isa_best(), .staging_bytes = 1 << 20 }));
    const Order o = make_order(&e, N, K, E);
    Tensor out = env_in(&e, F32, -1, 1, P, D), out16 = rounded(&e, out), weight = env_in(&e, F32, 0, 1, N, K);
    Tensor dy = env_in(&e, F32, -1, 1, N, D), gate = env_in(&e, F32, -4, 4, P, 1), from = env_in(&e, F32, -1, 1, P, D);
    Tensor y[2], dx[3], dx16[3], dw[2], sum[2], dgate[2];
    for (int k = 0; k < 2; k++) {
        y[k] = env_out(&e, F32, 8, 9, N, D), dw[k] = env_out(&e, F32, 8, 9, N, K);
        sum[k] = env_out(&e, F32, 8, 9, P, D), dgate[k] = env_out(&e, F32, 8, 9, P, 1);
        for (int64_t n = 0; n < N; n++) memcpy(env_f(y[k], n), env_f(dy, n), D * sizeof(float));
    }
    for (int k = 0; k < 3; k++) dx[k] = env_out(&e, F32, 8, 9, P, D), dx16[k] = env_out(&e, BF16, 0, 1, P, D);
    for (int k = 0; k < 2; k++) {
        const Tensor x = k ? out16 : out, *to = k ? dx16 : dx;
        RUN(&e, unpermute_rows, .y = y[k], .x = x, .row = o.row, .weight = weight, .add = 1);
        RUN(&e, unpermute_bwd, .dx = to[0], .dweight = dw[k], .dy = dy, .x = x, .row = o.row, .weight = weight);
        RUN(&e, take_rows, .y = to[1], .x = dy, .choice = o.choice, .weight = weight, .topk = K);
        RUN(&e, gated_add_fwd, .y = sum[k], .residual = from, .x = x, .gate = gate);
        RUN(&e, gated_add_bwd, .dx = to[2], .dgate = dgate[k], .dy = from, .x = x, .gate = gate);
    }
    CHECK(same_bits(y[1], y[0]) && same_bits(dw[1], dw[0]) && same_bits(sum[1], sum[0]) &&
          same_bits(dgate[1], dgate[0]));
    for (int k = 0; k < 3; k++) CHECK(same_rounded(dx16[k], dx[k]));
    CHECK(same_bits(dx[0], dx[1]));
    env_close(&e);
}

TEST_MAIN
