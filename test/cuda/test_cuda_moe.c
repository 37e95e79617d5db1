/*
 * Mixtures of experts on cuda against the CPU's ops: cuda/router.cu, balance.cu, permute_index.cu, permute.cu,
 * capacity.cu, grouped.cu. Tokens and rows that are not in use, choices that are dropped, experts without rows, rows
 * that lie apart.
 */
#include "pair_views.h"

static const DType types[] = { F32, BF16, F16 };
enum { TYPES = 3 };

/* What an op finds in the workspace is anybody's: NaN here. */
static void spoil_workspace(CudaCase *c)
{
    enum { BYTES = 64 << 10 };
    static char all_ones[BYTES];
    memset(all_ones, 0xFF, BYTES);
    OK(device_write(&c->dev[CASE_GPU].stream, c->dev[CASE_GPU].workspace, all_ones, BYTES));
}

/* ---- routers ---- */

/* step: 0, or what logits are multiples of: many scores are then equal. bias: 0, or biases up to it are added. */
typedef struct {
    int64_t N, E, K, gap, used;
    int groups, group_topk;
    double step, bias;
    int group_best;
} Routed;

static Router router_for(const Routed *p, RouterScore score, int normalize)
{
    return (Router){ .score = score, .normalize = normalize, .scale = 2.5f, .groups = p->groups ? p->groups : 1,
                     .group_topk = p->group_topk ? p->group_topk : 1, .group_best = p->group_best };
}

/* Random logits in a matrix with `gap` columns more. */
static Matrix make_logits(CudaCase *c, const Routed *p)
{
    const int64_t W = p->E + p->gap;
    float *x = malloc((size_t)(p->N * W) * 4);
    for (int64_t i = 0; i < p->N * W; i++) {
        const double v = test_uniform(&c->random, -3, 3);
        x[i] = (float)(p->step > 0 ? floor(v / p->step) * p->step : v);
    }
    Matrix m = { .all = pair_values(c, F32, x, p->N, W) };
    for (int side = 0; side < 2; side++) m.view.t[side] = tensor_col_slice(m.all.t[side], 0, p->E);
    free(x);
    return m;
}

static void router_case(RouterScore score, int normalize, Routed p)
{
    CudaCase *c = case_open();
    const Router r = router_for(&p, score, normalize);
    const int64_t used = p.used ? p.used : p.N;
    char name[128];
    snprintf(name, sizeof name, "score %d normalize %d N %d E %d K %d gap %d used %d groups %d step %g bias %g",
             score, normalize, (int)p.N, (int)p.E, (int)p.K, (int)p.gap, (int)used, p.groups, p.step, p.bias);
    Matrix logits = make_logits(c, &p), dlogits = matrix_uniform(c, F32, -1, 1, p.N, p.E, p.gap, 0);
    Pair index = pair_output(c, I32, p.N, p.K), weight = pair_random(c, F32, 1, p.N, p.K);
    Pair dweight = pair_random(c, F32, 1, p.N, p.K), rows = pair_values(c, I64, &used, 1);
    const Pair from = pair_used(logits.view, &rows), grad = pair_used(dweight, &rows);
    Pair bias = { 0 };
    if (p.bias > 0) bias = pair_random(c, F32, p.bias, p.E);
    BOTH(c, router_fwd, .index = AT(index), .weight = AT(weight), .logits = AT(from), .bias = AT(bias), .router = r);
    pair_check(c, index, 0, "index, %s", name);
    pair_check(c, weight, 1e-5, "weight, %s", name);
    BOTH(c, router_bwd, .dlogits = AT(dlogits.view), .dweight = AT(grad), .logits = AT(logits.view), .index = AT(index),
         .weight = AT(weight), .router = r);
    pair_check(c, dlogits.all, 2e-5, "dlogits, %s", name);
    case_close(c);
}

/* Experts and choices fewer than lanes, as many, more; all chosen; equal scores within and between groups; biases of
 * the size of the scores' differences, and far beyond them. */
TEST(router)
{
    static const Routed shapes[] = { { .N = 1, .E = 1, .K = 1 },
                                     { .N = 6, .E = 8, .K = 2, .gap = 3, .used = 4 },
                                     { .N = 3, .E = 17, .K = 17 },
                                     { .N = 5, .E = 64, .K = 6, .groups = 4, .group_topk = 2 },
                                     { .N = 8, .E = 40, .K = 3, .step = 1 },
                                     { .N = 5, .E = 64, .K = 8, .groups = 8, .group_topk = 4, .step = 1 },
                                     { .N = 2, .E = 60, .K = 40, .gap = 4, .step = 0.5 },
                                     { .N = 3, .E = 256, .K = 8, .groups = 8, .group_topk = 4 },
                                     { .N = 1, .E = 80, .K = 40, .groups = 40, .group_topk = 20, .step = 1 },
                                     { .N = 6, .E = 8, .K = 2, .gap = 1, .used = 5, .bias = 0.3 },
                                     { .N = 5, .E = 65, .K = 34, .bias = 8 },
                                     { .N = 6, .E = 64, .K = 6, .groups = 8, .group_topk = 2, .bias = 0.3 },
                                     { .N = 5, .E = 64, .K = 6, .groups = 8, .group_topk = 3, .group_best = 1 },
                                     { .N = 5, .E = 64, .K = 4, .groups = 4, .group_topk = 2, .group_best = 5 } };
    for (int score = ROUTER_SOFTMAX; score <= ROUTER_SQRT_SOFTPLUS; score++)
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
            router_case((RouterScore)score, 0, shapes[i]);
            if (score != ROUTER_SOFTMAX) router_case((RouterScore)score, 1, shapes[i]);
        }
    router_case(ROUTER_SIGMOID, 1, (Routed){ .N = 3, .E = 5000, .K = 9 }); /* two warps a block; with a bias, one */
    router_case(ROUTER_SIGMOID, 1, (Routed){ .N = 2, .E = 5000, .K = 9, .bias = 0.3 });
}

/* NaN and infinities: K different experts, those of test_moe_ops. */
TEST(router_of_nan)
{
    static const float rows[4][4] = { { NAN, NAN, NAN, NAN }, { 1, NAN, 2, NAN }, { INFINITY, 0, -INFINITY, NAN },
                                      { -INFINITY, -INFINITY, NAN, -INFINITY } };
    for (int score = ROUTER_SOFTMAX; score <= ROUTER_SQRT_SOFTPLUS; score++) {
        CudaCase *c = case_open();
        Pair logits = pair_values(c, F32, rows, 4, 4), index = pair_output(c, I32, 4, 3);
        Pair weight = pair_zero(c, F32, 4, 3);
        BOTH(c, router_fwd, .index = AT(index), .weight = AT(weight), .logits = AT(logits),
             .router = { (RouterScore)score, 0, 1, 1, 1 });
        pair_check(c, index, 0, "score %d", score);
        float w[12];
        OK(device_read(case_stream(c), w, weight.t[CASE_GPU].data, sizeof w));
        CHECK(isnan(w[0]));
        case_close(c);
    }
}

TEST(router_refused)
{
    enum { E = 12289 };
    CudaCase *c = case_open();
    Pair logits = pair_zero(c, F32, 1, E), index = pair_zero(c, I32, 1, 1), weight = pair_zero(c, F32, 1, 1);
    Pair bias = pair_zero(c, F32, E / 2);
    case_side = CASE_GPU;
    FAILS(op(case_stream(c), router_fwd, .index = AT(index), .weight = AT(weight), .logits = AT(logits),
             .router = { ROUTER_SOFTMAX, 0, 1, 1, 1 }),
          ERR_SHAPE, "router_fwd: 12289 experts are too many");
    for (int side = 0; side < 2; side++) logits.t[side] = tensor_col_slice(logits.t[side], 0, E / 2);
    FAILS(op(case_stream(c), router_fwd, .index = AT(index), .weight = AT(weight), .logits = AT(logits),
             .bias = AT(bias), .router = { ROUTER_SIGMOID, 0, 1, 1, 1 }),
          ERR_SHAPE, "router_fwd: 6144 experts are too many");
    case_close(c);
}

/* ---- what routers are given ---- */

static void jitter_case(DType T, int64_t N, int64_t D, int64_t gap, int64_t used)
{
    CudaCase *c = case_open();
    int32_t position[64];
    int64_t sample[64];
    for (int i = 0; i < 64; i++) position[i] = 7 * i, sample[i] = ((int64_t)i << 33) + 5 * i;
    Matrix x = matrix_uniform(c, T, -1, 1, N, D, gap, 0), y = matrix_uniform(c, T, -1, 1, N, D, gap, 0);
    Pair rows = pair_values(c, I64, &used, 1), at = pair_values(c, I32, position, N);
    Pair of = pair_values(c, I64, sample, N);
    const Pair from = pair_used(x.view, &rows);
    BOTH(c, jitter, .y = AT(y.view), .x = AT(from), .position = AT(at), .sample = AT(of), .key = 99, .eps = 0.1f);
    pair_check(c, y.all, case_tolerance(T), "%s N %d D %d gap %d", dtype_name(T), (int)N, (int)D, (int)gap);
    BOTH(c, jitter, .y = AT(y.view), .x = AT(y.view), .position = AT(at), .sample = AT(of), .key = 98, .eps = 0.5f);
    pair_check(c, y.all, case_tolerance(T), "in place, %s N %d D %d gap %d", dtype_name(T), (int)N, (int)D, (int)gap);
    Pair logits = pair_output(c, F32, N, D);
    BOTH(c, router_even, .logits = AT(logits), .position = AT(at), .sample = AT(of), .seq = 128, .topk = 1 + D / 3);
    pair_check(c, logits, 1e-6, "turns of %d", (int)D);
    case_close(c);
}

TEST(router_input)
{
    for (int t = 0; t < TYPES; t++) {
        jitter_case(types[t], 1, 1, 0, 1);
        jitter_case(types[t], 9, 33, 0, 6);
        jitter_case(types[t], 8, 48, 8, 8);
        jitter_case(types[t], 3, 1100, 4, 2);
    }
}

static void sinkhorn_case(int64_t units, int64_t rows, int64_t E, int64_t gap)
{
    CudaCase *c = case_open();
    const int64_t N = units * rows;
    Matrix logits = matrix_uniform(c, F32, -2, 2, N, E, gap, 0), rank = matrix_uniform(c, F32, -1, 1, N, E, gap, 0);
    Pair share = pair_output(c, F32, N), index = pair_output(c, I32, N, 1), weight = pair_output(c, F32, N, 1);
    BOTH(c, sinkhorn, .rank = AT(rank.view), .share = AT(share), .logits = AT(logits.view), .rows = rows);
    pair_check(c, rank.all, 3e-3, "%d units of %d rows, %d experts", (int)units, (int)rows, (int)E);
    BOTH(c, router_fwd, .index = AT(index), .weight = AT(weight), .logits = AT(logits.view), .rank = AT(logits.view),
         .router = { ROUTER_SIGMOID, 0, 1, 1, 1 });
    pair_check(c, index, 0, "choices, %d experts", (int)E);
    pair_check(c, weight, 1e-5, "weights, %d experts", (int)E);
    case_close(c);
}

/* Fewer rows than warps, more experts than lanes, so many experts that few warps have room. */
TEST(sinkhorn)
{
    sinkhorn_case(1, 1, 1, 0);
    sinkhorn_case(2, 5, 8, 3);
    sinkhorn_case(3, 70, 40, 0);
    sinkhorn_case(1, 12, 2000, 0);
}

TEST(sinkhorn_refused)
{
    CudaCase *c = case_open();
    Pair rank = pair_zero(c, F32, 1, 6145), share = pair_zero(c, F32, 1);
    case_side = CASE_GPU;
    FAILS(op(case_stream(c), sinkhorn, .rank = AT(rank), .share = AT(share), .logits = AT(rank), .rows = 1), ERR_SHAPE,
          "sinkhorn: 6145 experts are too many");
    case_close(c);
}

/* ---- balance ---- */

/* Rows first .. first + N - 1 of a micro-batch of units of `rows` rows. aux, z: 0 for none. */
typedef struct {
    Routed routed;
    int64_t first, rows, units;
    float aux, z;
} Balanced;

/* Sums in fixed point of numbers that differ in their last digits; rows that had none to show are counted alike. */
static void check_losses(CudaCase *c, Pair losses, const char *name)
{
    const int64_t *want = losses.t[CASE_CPU].data, *got = (const int64_t *)(const void *)c->first;
    OK(device_read(&c->dev[CASE_GPU].stream, c->first, losses.t[CASE_GPU].data, 3 * (int64_t)sizeof *got));
    for (int i = 0; i < 2; i++)
        CHECK_MSG(fabs((double)(got[i] - want[i])) <= 2e-5 * (double)want[i], "losses, %s: gpu %lld, cpu %lld", name,
                  (long long)got[i], (long long)want[i]);
    CHECK_MSG(got[2] == want[2], "losses, %s: %lld rows not finite, cpu %lld", name, (long long)got[2],
              (long long)want[2]);
}

static void balance_case(RouterScore score, Balanced b)
{
    CudaCase *c = case_open();
    const Routed p = b.routed;
    const Router r = router_for(&p, score, 1);
    const StepValues values = { .loss_scale = 0.5f };
    const int64_t used = p.used ? p.used : p.N;
    char name[128];
    snprintf(name, sizeof name, "score %d N %d E %d K %d gap %d used %d first %d rows %d aux %g z %g", score, (int)p.N,
             (int)p.E, (int)p.K, (int)p.gap, (int)used, (int)b.first, (int)b.rows, (double)b.aux, (double)b.z);
    Matrix logits = make_logits(c, &p), dlogits = matrix_uniform(c, F32, -0.1, 0.1, p.N, p.E, p.gap, 0);
    Pair index = pair_output(c, I32, p.N, p.K), weight = pair_random(c, F32, 1, p.N, p.K);
    Pair load = pair_zero(c, I64, b.units, p.E), rows = pair_values(c, I64, &used, 1), none = { 0 };
    Pair step = pair_values(c, I32, &values, sizeof values / 4);
    const Pair chosen = pair_used(index, &rows), from = pair_used(logits.view, &rows);
    BOTH(c, router_fwd, .index = AT(index), .weight = AT(weight), .logits = AT(logits.view), .router = r);
    for (int again = 0; again < 2; again++)
        BOTH(c, router_count, .load = AT(load), .index = AT(chosen), .first = b.first, .rows = b.rows);
    pair_check(c, load, 0, "load, %s", name);
    const Pair *by = b.aux > 0 ? &load : &none;
    Pair losses = pair_zero(c, I64, 3);
    BOTH(c, router_balance, .dlogits = AT(dlogits.view), .losses = AT(losses), .logits = AT(from), .load = AT(*by),
         .router = r, .step = AT(step).data, .topk = (int)p.K, .aux = b.aux, .aux_coeff = 2 * b.aux, .z = b.z,
         .first = b.first, .rows = b.rows);
    pair_check(c, dlogits.all, 2e-5, "dlogits, %s", name);
    check_losses(c, losses, name);
    case_close(c);
}

/* Units of which some rows are here, all, and none; of one block, and of several. */
TEST(balance)
{
    static const Balanced cases[] = { { { .N = 1, .E = 1, .K = 1 }, 0, 1, 1, 3, 2 },
                                      { { .N = 6, .E = 8, .K = 2, .gap = 3, .used = 5 }, 0, 3, 2, 3, 0 },
                                      { { .N = 7, .E = 40, .K = 3 }, 5, 4, 4, 2, 0.5f },
                                      { { .N = 5, .E = 65, .K = 6 }, 2, 10, 2, 0, 0.5f },
                                      { { .N = 3, .E = 5000, .K = 9 }, 0, 2, 2, 0.1f, 0.1f } };
    for (int score = ROUTER_SOFTMAX; score <= ROUTER_SQRT_SOFTPLUS; score++)
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) balance_case((RouterScore)score, cases[i]);
    balance_case(ROUTER_SIGMOID, (Balanced){ { .N = 900, .E = 20, .K = 10 }, 100, 751, 2, 1, 0 });
}

/* Rows as offsets say are added to loads; biases follow them, unless the step is skipped. most 0: an even load, which
 * moves none. */
static void bias_case(int64_t E, int64_t runs, int most, int skip)
{
    CudaCase *c = case_open();
    const StepValues values = { .skip = skip };
    const int64_t X = E * runs + 1;
    int64_t *at = calloc((size_t)X, sizeof *at);
    float *before = calloc((size_t)E, sizeof *before);
    for (int64_t e = 0; e < E && most; e++) before[e] = (float)(test_rand(&c->random) % 3);
    for (int64_t i = 1; i < X; i++)
        at[i] = at[i - 1] + (most ? (int64_t)(test_rand(&c->random) % (uint64_t)most) : 100003);
    Pair offset = pair_values(c, I64, at, X), load = pair_values(c, F32, before, E);
    Pair bias = pair_random(c, F32, 1, E), step = pair_values(c, I32, &values, sizeof values / 4);
    free(at);
    free(before);
    BOTH(c, expert_count, .load = AT(load), .offset = AT(offset));
    BOTH(c, expert_bias, .bias = AT(bias), .load = AT(load), .step = AT(step).data, .rate = 0.25f);
    pair_check(c, load, 0, "load, E %d runs %d", (int)E, (int)runs);
    pair_check(c, bias, 0, "bias, E %d runs %d most %d skip %d", (int)E, (int)runs, most, skip);
    case_close(c);
}

TEST(bias)
{
    bias_case(1, 1, 9, 0);
    bias_case(8, 3, 9, 0);
    bias_case(8, 3, 9, 1);
    bias_case(40, 2, 0, 0);
    bias_case(300, 1, 2, 0);
    bias_case(299, 2, 9, 0);
}

TEST(balance_refused)
{
    CudaCase *c = case_open();
    Pair index = pair_zero(c, I32, 1, 1), many = pair_zero(c, I64, 1, 12289), load = pair_zero(c, I64, 2);
    Pair bias = pair_zero(c, F32, 2), offset = pair_zero(c, I64, 3);
    case_side = CASE_GPU;
    FAILS(op(case_stream(c), router_count, .load = AT(many), .index = AT(index), .rows = 1), ERR_SHAPE,
          "router_count: 12289 experts are too many");
    FAILS(op(case_stream(c), expert_count, .load = AT(load), .offset = AT(offset)), ERR_SHAPE,
          "expert_count: load is i64");
    FAILS(op(case_stream(c), expert_bias, .bias = AT(bias), .load = AT(load)), ERR_SHAPE, "expert_bias: load is i64");
    case_close(c);
}

/* ---- the order of rows ---- */

/* How choices fall on experts. Every third expert is never chosen of SOME. */
typedef enum { EVENLY, SOME, SAME } Fall;

typedef struct {
    int64_t N, K, E, run, used; /* used: 0 for all tokens */
    Fall fall;
    int64_t gap; /* columns behind those of index and row */
    int drop;    /* one choice of so many is dropped; 0: none */
} Choices;

typedef struct {
    Pair index, row, whole_row, choice, offset, used;
    const Pair *count; /* &used, or NULL */
} Order;

static int32_t expert_for(CudaCase *c, const Choices *p, int64_t k)
{
    int64_t e = (int64_t)(test_rand(&c->random) % (uint64_t)p->E);
    if (p->drop && test_rand(&c->random) % (uint64_t)p->drop == 0) return -1;
    if (p->fall == SOME) e -= e % 3 == 2;
    if (p->fall == SAME) e = k % p->E;
    return (int32_t)e;
}

static Pair columns_of(Pair p, int64_t count)
{
    for (int side = 0; side < 2; side++) p.t[side] = tensor_col_slice(p.t[side], 0, count);
    return p;
}

/* The order of random choices. `o` is filled in place: o->count points into it. */
static void make_order(CudaCase *c, const Choices *p, Order *o)
{
    const int64_t W = p->K + p->gap, runs = (p->N + p->run - 1) / p->run, used = p->used ? p->used : p->N;
    int32_t *index = malloc((size_t)(p->N * W) * 4);
    for (int64_t i = 0; i < p->N * W; i++) index[i] = expert_for(c, p, i % W);
    o->index = columns_of(pair_values(c, I32, index, p->N, W), p->K);
    free(index);
    o->whole_row = pair_output(c, I32, p->N, W);
    o->row = columns_of(o->whole_row, p->K);
    o->choice = pair_output(c, I32, p->N * p->K);
    o->offset = pair_output(c, I64, p->E * runs + 1);
    o->used = pair_values(c, I64, &used, 1);
    o->count = p->used ? &o->used : NULL;
    const Pair from = pair_used(o->index, o->count);
    spoil_workspace(c);
    BOTH(c, permute_index, .row = AT(o->row), .choice = AT(o->choice), .offset = AT(o->offset), .index = AT(from),
         .experts = p->E, .run = p->run);
}

static void order_case(Choices p)
{
    char name[128];
    CudaCase *c = case_open();
    Order o;
    snprintf(name, sizeof name, "N %d K %d E %d run %d used %d fall %d gap %d", (int)p.N, (int)p.K, (int)p.E,
             (int)p.run, (int)p.used, p.fall, (int)p.gap);
    make_order(c, &p, &o);
    pair_check(c, o.whole_row, 0, "row, %s", name);
    pair_check(c, o.choice, 0, "choice, %s", name);
    pair_check(c, o.offset, 0, "offset, %s", name);
    case_close(c);
}

/* One choice to several blocks a run; runs of one token; more experts than a block has threads; counts of more numbers
 * than the block that sums them has threads. */
TEST(order)
{
    order_case((Choices){ .N = 1, .K = 1, .E = 1, .run = 1 });
    order_case((Choices){ .N = 5, .K = 2, .E = 3, .run = 5 });
    order_case((Choices){ .N = 37, .K = 3, .E = 7, .run = 4, .gap = 2 });
    order_case((Choices){ .N = 40, .K = 2, .E = 9, .run = 8, .used = 19, .fall = SOME });
    order_case((Choices){ .N = 64, .K = 2, .E = 4, .run = 64, .used = 1 });
    order_case((Choices){ .N = 300, .K = 2, .E = 8, .run = 1, .fall = SOME });
    order_case((Choices){ .N = 33, .K = 8, .E = 300, .run = 16, .gap = 1 });
    order_case((Choices){ .N = 1500, .K = 4, .E = 16, .run = 1500 });
    order_case((Choices){ .N = 1500, .K = 3, .E = 5, .run = 700, .used = 1401, .fall = SOME });
    order_case((Choices){ .N = 700, .K = 2, .E = 2, .run = 700, .fall = SAME });
    order_case((Choices){ .N = 70, .K = 2, .E = 3000, .run = 40 });
    order_case((Choices){ .N = 37, .K = 3, .E = 7, .run = 4, .gap = 2, .drop = 3 });
    order_case((Choices){ .N = 1500, .K = 3, .E = 5, .run = 700, .used = 1401, .fall = SOME, .drop = 2 });
    order_case((Choices){ .N = 40, .K = 2, .E = 4, .run = 8, .drop = 1 });
}

TEST(order_refused)
{
    CudaCase *c = case_open();
    Pair index = pair_zero(c, I32, 4, 2), row = pair_zero(c, I32, 4, 2), choice = pair_zero(c, I32, 8);
    Pair offset = pair_zero(c, I64, 7), few = pair_zero(c, I64, 4);
    case_side = CASE_GPU;
    FAILS(op(case_stream(c), permute_index, .row = AT(row), .choice = AT(choice), .offset = AT(offset),
             .index = AT(index), .experts = 4, .run = 2),
          ERR_SHAPE, "7 offsets of 4 experts");
    FAILS(op(case_stream(c), permute_index, .row = AT(row), .choice = AT(choice), .offset = AT(few),
             .index = AT(index), .experts = 3, .run = 2),
          ERR_SHAPE, "runs of 2 tokens");
    case_close(c);
}

/* ---- choices that are dropped ---- */

typedef struct {
    Choices choices;
    int64_t most;
    double step; /* weights are multiples of it, so that many are equal; 0: choices are kept by their places */
    bool limits; /* a number for each list, from 0 on, instead of most */
} Dropped;

static void drop_case(Dropped p)
{
    CudaCase *c = case_open();
    const int64_t N = p.choices.N, K = p.choices.K, lists = p.choices.E * ((N + p.choices.run - 1) / p.choices.run);
    float *w = malloc((size_t)(N * K) * 4);
    int64_t *most = malloc((size_t)lists * 8);
    char name[128];
    Order o;
    snprintf(name, sizeof name, "N %d K %d E %d run %d used %d most %d step %g limits %d", (int)N, (int)K,
             (int)p.choices.E, (int)p.choices.run, (int)p.choices.used, (int)p.most, p.step, p.limits);
    make_order(c, &p.choices, &o);
    for (int64_t i = 0; i < N * K; i++) w[i] = (float)(floor(test_uniform(&c->random, -1, 1) / 0.25) * p.step);
    for (int64_t i = 2; i < N * K; i += 7) w[i] = i % 2 ? NAN : -0.0f;
    for (int64_t i = 0; i < lists; i++) most[i] = (int64_t)(test_rand(&c->random) % (uint64_t)(2 * p.most));
    Pair weight = p.step > 0 ? pair_values(c, F32, w, N, K) : (Pair){ 0 };
    Pair limit = p.limits ? pair_values(c, I64, most, lists) : (Pair){ 0 };
    Pair kept = pair_output(c, I32, N, K);
    free(w);
    free(most);
    BOTH(c, choice_drop, .kept = AT(kept), .weight = AT(weight), .choice = AT(o.choice), .offset = AT(o.offset),
         .limit = AT(limit), .experts = p.choices.E, .most = p.most);
    pair_check(c, kept, 0, "kept, %s", name);
    case_close(c);
}

/* Lists that are full and not, of more choices than a block has threads; equal weights, negative ones and NaN. */
TEST(drops)
{
    for (int limits = 0; limits < 2; limits++)
        for (int by = 0; by < 2; by++) {
            drop_case((Dropped){ { .N = 1, .K = 1, .E = 1, .run = 1 }, 1, by, limits });
            drop_case((Dropped){ { .N = 37, .K = 3, .E = 7, .run = 8 }, 2, by, limits });
            drop_case((Dropped){ { .N = 40, .K = 2, .E = 9, .run = 8, .used = 19, .fall = SOME }, 1, by, limits });
            drop_case((Dropped){ { .N = 700, .K = 2, .E = 2, .run = 700, .fall = SAME }, 333, by, limits });
            drop_case((Dropped){ { .N = 600, .K = 3, .E = 4, .run = 300 }, 100, 1e-3 * by, limits });
        }
}

TEST(drops_refused)
{
    CudaCase *c = case_open();
    Pair kept = pair_zero(c, I32, 2, 1), choice = pair_zero(c, I32, 2), offset = pair_zero(c, I64, 5);
    Pair limit = pair_zero(c, I64, 3);
    case_side = CASE_GPU;
    FAILS(op(case_stream(c), choice_drop, .kept = AT(kept), .choice = AT(choice), .offset = AT(offset), .experts = 3),
          ERR_SHAPE, "choice_drop: 4 lists of 3 experts");
    FAILS(op(case_stream(c), choice_drop, .kept = AT(kept), .choice = AT(choice), .offset = AT(offset),
             .limit = AT(limit), .experts = 2),
          ERR_SHAPE, "limits for 3");
    case_close(c);
}

static void room_case(int64_t ranks, int64_t own, int64_t most, int64_t room)
{
    CudaCase *c = case_open();
    const int64_t E = ranks * own, X = E + 1;
    int64_t *all = malloc((size_t)(ranks * X) * 8);
    for (int64_t i = 0; i < ranks * X; i++)
        all[i] = i % X ? all[i - 1] + (int64_t)(test_rand(&c->random) % (uint64_t)most) : 0;
    Pair from = pair_values(c, I64, all, ranks, X);
    free(all);
    for (int rank = 0; rank < ranks; rank++) {
        Pair limit = pair_output(c, I64, E), full = pair_zero(c, I32, 1), none = { 0 };
        BOTH(c, room_limits, .limit = AT(limit), .full = AT(full), .all = AT(from), .own = own, .room = room,
             .rank = rank);
        pair_check(c, limit, 0, "limits of rank %d of %d, %d experts each", rank, (int)ranks, (int)own);
        pair_check(c, full, 0, "flag of rank %d of %d, %d experts each", rank, (int)ranks, (int)own);
        BOTH(c, room_limits, .limit = AT(limit), .full = AT(none), .all = AT(from), .own = own, .room = room,
             .rank = rank);
    }
    case_close(c);
}

/* Room for all, for some, for none; more pieces than the block has threads. */
TEST(room)
{
    room_case(1, 1, 9, 4);
    room_case(2, 3, 20, 1000);
    room_case(3, 2, 20, 31);
    room_case(4, 5, 3, 7);
    room_case(3, 2, 20, 0);
    room_case(3, 400, 50, 17000);
}

TEST(room_refused)
{
    CudaCase *c = case_open();
    Pair all = pair_zero(c, I64, 2, 5), limit = pair_zero(c, I64, 3);
    case_side = CASE_GPU;
    FAILS(op(case_stream(c), room_limits, .limit = AT(limit), .all = AT(all), .own = 3), ERR_SHAPE,
          "room_limits: 5 offsets of 3 experts on 2 ranks");
    case_close(c);
}

/* back: the most that an offset may be below the one before it, as of a rank that was lost; most: as in ops.def */
static void dispatch_case(int64_t ranks, int64_t each, int64_t runs, int rank, int64_t back, int64_t most)
{
    CudaCase *c = case_open();
    const int64_t X = ranks * each * runs + 1;
    int64_t *all = malloc((size_t)(ranks * X) * 8);
    for (int64_t i = 0; i < ranks * X; i++)
        all[i] = i % X ? all[i - 1] + (int64_t)(test_rand(&c->random) % (uint64_t)(4 + back)) - back : 0;
    Pair from = pair_values(c, I64, all, ranks, X), offset = pair_output(c, I64, X);
    free(all);
    BOTH(c, dispatch_offsets, .offset = AT(offset), .all = AT(from), .first = rank * each, .own = each,
         .most = most);
    pair_check(c, offset, 0, "%d ranks, %d experts each, %d runs, rank %d", (int)ranks, (int)each, (int)runs, rank);
    const int64_t P = ranks * each * runs * 4, Q = most < ranks * P ? most : ranks * P;
    Pair choices = pair_uniform(c, I32, -9, (double)P + 9, CASE_DIMS(ranks, P)), taken = pair_output(c, I32, Q);
    BOTH(c, dispatch_choices, .choice = AT(taken), .all_choice = AT(choices), .all = AT(from), .offset = AT(offset),
         .first = rank * each, .own = each, .numbers = P + 5);
    pair_check(c, taken, 0, "choices of %d ranks, %d experts each, %d runs, rank %d", (int)ranks, (int)each, (int)runs,
               rank);
    case_close(c);
}

TEST(dispatch)
{
    enum { ALL = 1 << 20 };
    dispatch_case(1, 1, 1, 0, 0, ALL);
    dispatch_case(1, 5, 3, 0, 0, ALL);
    for (int rank = 0; rank < 3; rank++) dispatch_case(3, 2, 7, rank, 0, ALL);
    dispatch_case(4, 16, 16, 2, 0, ALL);
    dispatch_case(2, 40, 50, 1, 0, ALL);
    dispatch_case(2, 40, 50, 1, 0, 1000);
    dispatch_case(2, 40, 50, 1, 6, ALL);
    dispatch_case(2, 40, 50, 1, 6, 1000);
}

/* R: tokens of the result, N of which have choices, that may name an expert twice */
static void groups_case(int64_t N, int64_t K, int64_t R, int64_t first, int64_t own, int64_t count, bool rows)
{
    CudaCase *c = case_open();
    int32_t *experts = malloc((size_t)(N * K) * 4), *at = malloc((size_t)(N * K) * 4);
    for (int64_t i = 0; i < N * K; i++) {
        experts[i] = (int32_t)(test_rand(&c->random) % (uint64_t)(first + own * count + 9)) - 3;
        at[i] = (int32_t)(test_rand(&c->random) % 9) - 2;
    }
    Pair index = pair_values(c, I32, experts, N, K), none = { 0 };
    Pair row = rows ? pair_values(c, I32, at, N, K) : none, group = pair_output(c, I32, R, K);
    free(experts);
    free(at);
    BOTH(c, choice_groups, .group = AT(group), .index = AT(index), .row = AT(row), .first = first, .own = own,
         .count = count);
    pair_check(c, group, 0, "%d of %d tokens, K %d, %d groups of %d experts from %d on", (int)N, (int)R, (int)K,
               (int)count, (int)own, (int)first);
    case_close(c);
}

TEST(groups)
{
    for (int rows = 0; rows < 2; rows++) {
        groups_case(1, 1, 1, 0, 1, 1, rows);
        groups_case(37, 5, 40, 0, 3, 4, rows);
        groups_case(300, 8, 300, 32, 32, 1, rows);
        groups_case(300, 8, 320, 5, 1, 32, rows);
        groups_case(90, 9, 91, 3, 2, 7, rows);
    }
}

TEST(groups_refused)
{
    CudaCase *c = case_open();
    Pair index = pair_zero(c, I32, 3, 2), group = pair_zero(c, I32, 2, 2);
    case_side = CASE_GPU;
    FAILS(op(case_stream(c), choice_groups, .group = AT(group), .index = AT(index), .own = 1, .count = 1), ERR_SHAPE,
          "choice_groups: 3 tokens, room for 2");
    case_close(c);
}

/* ---- rows ---- */

typedef struct {
    Choices choices;
    int64_t D, gap, skip;
} RowShape;

static void rows_case(DType T, RowShape p)
{
    CudaCase *c = case_open();
    const int64_t N = p.choices.N, K = p.choices.K;
    char name[128];
    Order o;
    snprintf(name, sizeof name, "%s N %d K %d D %d gap %d skip %d used %d", dtype_name(T), (int)N, (int)K, (int)p.D,
             (int)p.gap, (int)p.skip, (int)p.choices.used);
    make_order(c, &p.choices, &o);
    Matrix x = matrix_uniform(c, T, -1, 1, N, p.D, p.gap, p.skip);
    Matrix y = matrix_uniform(c, T, -1, 1, N, p.D, p.gap, p.skip);
    Matrix sum = matrix_uniform(c, T, -1, 1, N, p.D, p.gap, p.skip);
    Matrix xp = matrix_uniform(c, T, -1, 1, N * K, p.D, p.gap, p.skip);
    Matrix out = matrix_uniform(c, T, -1, 1, N * K, p.D, p.gap, p.skip);
    Matrix dout = matrix_uniform(c, T, -1, 1, N * K, p.D, p.gap, p.skip);
    Pair weight = pair_uniform(c, F32, 0, 1, CASE_DIMS(N, K)), dweight = pair_random(c, F32, 1, N, K);
    Pair kept = o.choice;
    for (int side = 0; side < 2; side++)
        kept.t[side].rows = (const int64_t *)o.offset.t[side].data + o.offset.t[side].dim[0] - 1;
    const Pair from = pair_used(x.view, o.count), to = pair_used(y.view, o.count), add = pair_used(sum.view, o.count);
    BOTH(c, permute_rows, .y = AT(xp.view), .x = AT(from), .choice = AT(kept), .topk = K);
    BOTH(c, unpermute_rows, .y = AT(to), .x = AT(out.view), .row = AT(o.row), .weight = AT(weight));
    BOTH(c, unpermute_rows, .y = AT(add), .x = AT(out.view), .row = AT(o.row), .add = 1);
    BOTH(c, unpermute_bwd, .dx = AT(dout.view), .dweight = AT(dweight), .dy = AT(from), .x = AT(out.view),
         .row = AT(o.row), .weight = AT(weight));
    pair_check(c, xp.all, 0, "permute_rows, %s", name);
    pair_check(c, y.all, case_tolerance(T), "unpermute_rows, %s", name);
    pair_check(c, sum.all, case_tolerance(T), "unpermute_rows added, %s", name);
    pair_check(c, dout.all, case_tolerance(T), "unpermute_bwd dx, %s", name);
    pair_check(c, dweight, 1e-5, "unpermute_bwd dweight, %s", name);
    const int parts = N % 3 == 0 ? 3 : N % 2 == 0 ? 2 : 1;
    Matrix all = matrix_uniform(c, T, -1, 1, N, p.D, p.gap, p.skip);
    Matrix part = matrix_uniform(c, T, -1, 1, N / parts, p.D, p.gap, p.skip);
    Matrix taken = matrix_uniform(c, T, -1, 1, N * K, p.D, p.gap, p.skip);
    BOTH(c, sum_parts, .y = AT(part.view), .x = AT(all.view), .parts = parts);
    Pair placed = taken.view;
    for (int side = 0; side < 2; side++)
        placed.t[side].rows = (const int64_t *)o.offset.t[side].data + o.offset.t[side].dim[0] - 1;
    BOTH(c, take_rows, .y = AT(placed), .x = AT(x.view), .choice = AT(o.choice), .weight = AT(weight), .topk = K);
    pair_check(c, part.all, case_tolerance(T), "sum_parts, %s", name);
    pair_check(c, taken.all, case_tolerance(T), "take_rows, %s", name);
    int32_t *at = malloc((size_t)(N * K) * 4);
    for (int64_t i = 0; i < N * K; i++) at[i] = i % K == i / K % K ? (int32_t)(N - 1 - i / K) : -1;
    Pair row = pair_values(c, I32, at, N, K);
    free(at);
    BOTH(c, take_rows, .y = AT(placed), .x = AT(x.view), .choice = AT(o.choice), .weight = AT(weight), .row = AT(row),
         .topk = K);
    pair_check(c, taken.all, case_tolerance(T), "take_rows of placed tokens, %s", name);
    case_close(c);
}

/* Widths of one element, of packs, of neither, of more than a block or warp takes at once; K beyond 4 at a time. */
TEST(rows)
{
    static const RowShape shapes[] = {
        { { .N = 1, .K = 1, .E = 1, .run = 1 }, 1, 0, 0 },
        { { .N = 5, .K = 2, .E = 3, .run = 5 }, 15, 0, 0 },
        { { .N = 7, .K = 2, .E = 8, .run = 4 }, 33, 0, 0 },
        { { .N = 30, .K = 4, .E = 9, .run = 8, .used = 17 }, 16, 8, 8 },
        { { .N = 9, .K = 3, .E = 7, .run = 9, .fall = SOME }, 24, 3, 1 },
        { { .N = 6, .K = 9, .E = 20, .run = 3, .used = 5 }, 64, 0, 0 },
        { { .N = 3, .K = 2, .E = 2, .run = 3, .fall = SAME }, 1040, 0, 0 },
        { { .N = 3, .K = 2, .E = 5, .run = 3 }, 2100, 16, 0 },
        { { .N = 9, .K = 5, .E = 7, .run = 9, .drop = 2 }, 24, 0, 0 },
        { { .N = 30, .K = 4, .E = 9, .run = 8, .used = 17, .drop = 3 }, 33, 3, 0 },
        { { .N = 4, .K = 2, .E = 4, .run = 4, .drop = 1 }, 16, 0, 0 },
    };
    for (int t = 0; t < TYPES; t++)
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) rows_case(types[t], shapes[i]);
}

/* ---- products ---- */

typedef struct {
    Choices choices;
    int64_t O, I, gap, skip, spare; /* spare: rows behind all choices', as where ranks send rows */
    int fresh;
} Product;

static void product_case(DType T, Product p)
{
    CudaCase *c = case_open();
    const int64_t E = p.choices.E, P = p.choices.N * p.choices.K + p.spare;
    char name[128];
    Order o;
    snprintf(name, sizeof name, "%s N %d K %d E %d used %d O %d I %d gap %d skip %d spare %d fresh %d", dtype_name(T),
             (int)p.choices.N, (int)p.choices.K, (int)E, (int)p.choices.used, (int)p.O, (int)p.I, (int)p.gap,
             (int)p.skip, (int)p.spare, p.fresh);
    make_order(c, &p.choices, &o);
    Matrix x = matrix_uniform(c, T, -1, 1, P, p.I, p.gap, p.skip);
    Matrix y = matrix_uniform(c, T, -1, 1, P, p.O, p.gap, p.skip);
    Matrix dx = matrix_uniform(c, T, -1, 1, P, p.I, p.gap, p.skip);
    Matrix dy = matrix_uniform(c, T, -1, 1, P, p.O, p.gap, p.skip);
    Matrix all = matrix_uniform(c, T, -1, 1, E * p.O, p.I, p.gap, p.skip);
    Matrix grad = matrix_uniform(c, F32, -1, 1, E * p.O, p.I, p.gap, p.skip);
    const Pair w = matrix_heads(&all, E, p.O), dw = matrix_heads(&grad, E, p.O);
    Pair shift = pair_zero(c, I32, 1), overflow = pair_zero(c, I32, 1);
    BOTH(c, grouped_fwd, .y = AT(y.view), .x = AT(x.view), .w = AT(w), .offset = AT(o.offset), .leaf = p.I);
    BOTH(c, grouped_dx, .dx = AT(dx.view), .dy = AT(dy.view), .w = AT(w), .offset = AT(o.offset), .leaf = p.O);
    BOTH(c, grouped_dw, .dw = AT(dw), .dy = AT(dy.view), .x = AT(x.view), .offset = AT(o.offset), .shift = AT(shift),
         .overflow = AT(overflow), .fresh = p.fresh);
    pair_check(c, y.all, case_tolerance(T), "y, %s", name);
    pair_check(c, dx.all, case_tolerance(T), "dx, %s", name);
    pair_check(c, grad.all, 1e-5, "dw, %s", name);
    case_close(c);
}

/* Tiles of 64, 128 and 256, and a depth of 16, 32 and 64 at a time: below, equal, beyond, and beyond the four steps
 * that are under way at once; more experts than a warp has lanes; experts without rows, with all rows, with rows of
 * several tiles; several bands of tiles (grouped_order.h), the last one lower, beside several columns; more tiles than
 * blocks that stay, the last of them cut in two or not. */
TEST(products)
{
    static const Product shapes[] = {
        { { .N = 1, .K = 1, .E = 1, .run = 1 }, 1, 1, 0, 0, 0, 1 },
        { { .N = 6, .K = 2, .E = 3, .run = 4 }, 20, 17, 0, 0, 0, 0 },
        { { .N = 40, .K = 2, .E = 9, .run = 8, .used = 19, .fall = SOME }, 40, 24, 0, 0, 5, 0 },
        { { .N = 33, .K = 3, .E = 70, .run = 16, .fall = SOME }, 8, 72, 0, 0, 0, 1 },
        { { .N = 150, .K = 2, .E = 2, .run = 75, .fall = SAME }, 136, 200, 0, 0, 64, 0 },
        { { .N = 129, .K = 1, .E = 3, .run = 129, .fall = SAME }, 64, 128, 8, 8, 0, 1 },
        { { .N = 64, .K = 2, .E = 4, .run = 64, .used = 3 }, 129, 65, 3, 1, 0, 0 },
        { { .N = 200, .K = 2, .E = 3, .run = 50 }, 96, 32, 0, 0, 0, 0 },
        { { .N = 33, .K = 3, .E = 70, .run = 16, .fall = SOME }, 136, 24, 0, 0, 0, 1 },
        { { .N = 6, .K = 1, .E = 1, .run = 6 }, 2184, 136, 0, 0, 0, 1 },
        { { .N = 700, .K = 1, .E = 3, .run = 350, .fall = SAME }, 264, 328, 8, 8, 3, 1 },
        { { .N = 130, .K = 3, .E = 5, .run = 65, .fall = SOME }, 520, 192, 0, 0, 70, 0 },
    };
    for (int t = 0; t < TYPES; t++)
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) product_case(types[t], shapes[i]);
}

/* A row's numbers reach no other row, and what lies behind an expert's last row enters no sum: NaN there. */
TEST(products_apart)
{
    for (int t = 0; t < TYPES; t++) {
        enum { P = 40, E = 2, O = 16, I = 24, FIRST = 7, LAST = 33 };
        CudaCase *c = case_open();
        static const int64_t offset[E + 1] = { FIRST, 20, LAST };
        float x[P * I], dy[P * O];
        for (int i = 0; i < P * I; i++) x[i] = i / I < FIRST || i / I >= LAST ? NAN : (float)(i % 13) / 8;
        for (int i = 0; i < P * O; i++) dy[i] = i / O < FIRST || i / O >= LAST ? NAN : (float)(i % 11) / 8;
        Pair xs = pair_values(c, types[t], x, P, I), dys = pair_values(c, types[t], dy, P, O);
        Pair dw = pair_output(c, F32, E, O, I), runs = pair_values(c, I64, offset, E + 1);
        Pair shift = pair_zero(c, I32, 1), overflow = pair_zero(c, I32, 1);
        BOTH(c, grouped_dw, .dw = AT(dw), .dy = AT(dys), .x = AT(xs), .offset = AT(runs), .shift = AT(shift),
             .overflow = AT(overflow), .fresh = 1);
        pair_check(c, dw, 1e-5, "dw %s", dtype_name(types[t]));
        case_close(c);
    }
}

TEST(products_refused)
{
    CudaCase *c = case_open();
    Pair x = pair_zero(c, F32, 4, 8), dy = pair_zero(c, F32, 4, 8), dw = pair_zero(c, I64, 2, 8, 8);
    Pair offset = pair_zero(c, I64, 3), shift = pair_zero(c, I32, 1), overflow = pair_zero(c, I32, 1);
    Pair odd = pair_zero(c, I64, 4), w = pair_zero(c, F32, 2, 8, 8);
    case_side = CASE_GPU;
    FAILS(op(case_stream(c), grouped_dw, .dw = AT(dw), .dy = AT(dy), .x = AT(x), .offset = AT(offset),
             .shift = AT(shift), .overflow = AT(overflow)),
          ERR_SHAPE, "grouped_dw on cuda has no fixed point");
    FAILS(op(case_stream(c), grouped_dx, .dx = AT(x), .dy = AT(dy), .w = AT(w), .offset = AT(odd)), ERR_SHAPE,
          "grouped_dx: 4 offsets for 2 experts");
    Pair narrow = pair_zero(c, BF16, 4, 8), thin = pair_zero(c, BF16, 2, 8, 8);
    FAILS(op(case_stream(c), grouped_dx, .dx = AT(x), .dy = AT(narrow), .w = AT(thin), .offset = AT(offset)), ERR_SHAPE,
          "grouped_dx on cuda writes bf16, not f32");
    Pair bias = pair_zero(c, F32, 2, 8), dbias = pair_zero(c, I64, 2, 8);
    FAILS(op(case_stream(c), grouped_bias, .y = AT(x), .bias = AT(bias), .offset = AT(odd)), ERR_SHAPE,
          "grouped_bias: 4 offsets for 2 experts");
    FAILS(op(case_stream(c), grouped_bias_grad, .dbias = AT(dbias), .dy = AT(dy), .offset = AT(offset),
             .shift = AT(shift), .overflow = AT(overflow)),
          ERR_SHAPE, "grouped_bias_grad on cuda has no fixed point");
    case_close(c);
}

/* ---- biases of experts ---- */

static void add_bias_case(DType T, Product p)
{
    CudaCase *c = case_open();
    const int64_t E = p.choices.E, P = p.choices.N * p.choices.K + p.spare;
    char name[128];
    Order o;
    snprintf(name, sizeof name, "%s N %d K %d E %d used %d O %d gap %d skip %d spare %d", dtype_name(T),
             (int)p.choices.N, (int)p.choices.K, (int)E, (int)p.choices.used, (int)p.O, (int)p.gap, (int)p.skip,
             (int)p.spare);
    make_order(c, &p.choices, &o);
    Matrix y = matrix_uniform(c, T, -1, 1, P, p.O, p.gap, p.skip),
           dy = matrix_uniform(c, T, -1, 1, P, p.O, p.gap, p.skip);
    Matrix bias = matrix_uniform(c, T, -1, 1, E, p.O, p.gap, p.skip);
    Matrix dbias = matrix_uniform(c, F32, -1, 1, E, p.O, p.gap, p.skip);
    Pair shift = pair_zero(c, I32, 1), overflow = pair_zero(c, I32, 1);
    BOTH(c, grouped_bias, .y = AT(y.view), .bias = AT(bias.view), .offset = AT(o.offset));
    BOTH(c, grouped_bias_grad, .dbias = AT(dbias.view), .dy = AT(dy.view), .offset = AT(o.offset), .shift = AT(shift),
         .overflow = AT(overflow));
    pair_check(c, y.all, case_tolerance(T), "y, %s", name);
    pair_check(c, dbias.all, 1e-5, "dbias, %s", name);
    case_close(c);
}

/* Packs of columns below and beyond a warp's; experts without rows, with all, with more than 8 warps take at once. */
TEST(biases_of_experts)
{
    static const Product shapes[] = {
        { { .N = 1, .K = 1, .E = 1, .run = 1 }, 1, 0, 0, 0, 0, 0 },
        { { .N = 40, .K = 2, .E = 9, .run = 8, .used = 19, .fall = SOME }, 40, 0, 0, 0, 5, 0 },
        { { .N = 33, .K = 3, .E = 70, .run = 16, .fall = SOME }, 8, 0, 0, 0, 0, 0 },
        { { .N = 150, .K = 2, .E = 2, .run = 75, .fall = SAME }, 264, 0, 8, 8, 64, 0 },
        { { .N = 64, .K = 2, .E = 4, .run = 64, .used = 3 }, 129, 0, 3, 1, 0, 0 },
    };
    for (int t = 0; t < TYPES; t++)
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) add_bias_case(types[t], shapes[i]);
}

/* ---- the gate of a shared expert ---- */

static void gated_case(DType T, int64_t N, int64_t D, int64_t gap, int64_t used)
{
    CudaCase *c = case_open();
    char name[96];
    snprintf(name, sizeof name, "%s N %d D %d gap %d used %d", dtype_name(T), (int)N, (int)D, (int)gap, (int)used);
    Matrix x = matrix_uniform(c, T, -1, 1, N, D, gap, 0), dy = matrix_uniform(c, T, -1, 1, N, D, gap, 0);
    Matrix residual = matrix_uniform(c, T, -1, 1, N, D, gap, 0), y = matrix_uniform(c, T, -1, 1, N, D, gap, 0);
    Matrix dx = matrix_uniform(c, T, -1, 1, N, D, gap, 0);
    Pair gate = pair_random(c, F32, 6, N, 1), dgate = pair_random(c, F32, 1, N, 1);
    Pair rows = pair_values(c, I64, &used, 1);
    const Pair from = pair_used(x.view, &rows), grad = pair_used(dy.view, &rows);
    BOTH(c, gated_add_fwd, .y = AT(y.view), .residual = AT(residual.view), .x = AT(from), .gate = AT(gate));
    BOTH(c, gated_add_bwd, .dx = AT(dx.view), .dgate = AT(dgate), .dy = AT(grad), .x = AT(x.view), .gate = AT(gate));
    pair_check(c, y.all, case_tolerance(T), "y, %s", name);
    pair_check(c, dx.all, case_tolerance(T), "dx, %s", name);
    pair_check(c, dgate, 1e-5, "dgate, %s", name);
    BOTH(c, gated_add_fwd, .y = AT(residual.view), .residual = AT(residual.view), .x = AT(from), .gate = AT(gate));
    pair_check(c, residual.all, case_tolerance(T), "in place, %s", name);
    case_close(c);
}

TEST(gated_add)
{
    for (int t = 0; t < TYPES; t++) {
        gated_case(types[t], 1, 1, 0, 1);
        gated_case(types[t], 9, 33, 0, 6);
        gated_case(types[t], 8, 48, 8, 8);
        gated_case(types[t], 7, 48, 3, 5);
        gated_case(types[t], 3, 1100, 4, 2);
    }
}

TEST_MAIN
