/*
 * Routers of mixtures: scores, the best K of E experts, their weights, and the gradient of the logits, with that of
 * balance losses. The formulas stand in device/step.h (Router) and device/ops.def (router_balance). How many rows chose
 * an expert: balance.cu.
 *
 * Mapping   a warp for each row, its scores in shared memory, lane l the experts l, l + 32, .... Experts are in a
 *           strict order, by score, then by number, so the next best is the first in it behind the last chosen: K
 *           times a search by all lanes, without marks of who is taken. Groups the same way.
 * Traffic   4 E bytes a row, twice as many backward, and 8 K: 65,536 rows of 64 experts, 8 choices: 21 MB, 5 us at 4.3
 *           TB/s, and 38 MB, 9 us. Some 60 instructions for each choice and 32 experts, 70 M for these rows: forward is
 *           bound by them, some 100 us at one instruction a clock and scheduler.
 * Needs     fp32. The row's scores (with bias or ranks: twice), its groups' and K of the chosen fit 48 KiB: at most
 *           some 12,000 together.
 */
#include <limits.h>

#include "kernel.cuh"

constexpr float NORMALIZE_EPS = 1e-20f;
constexpr int ROUTER_WARPS = 4;
constexpr int64_t ROUTER_SHARED = 48 << 10;

struct Routing {
    Rows<const float> logits;
    const float *bias;    /* of the scores that are chosen by, or NULL */
    Rows<const float> by; /* what is chosen by instead; data: or NULL */
    Router router;
    RowCount rows;
    int E, K, warps; /* warps of a block */
    __host__ __device__ bool ranked() const { return bias || by.data; }
    /* Shared, a warp's. */
    __host__ __device__ int row_floats() const { return (ranked() ? 2 : 1) * E + router.groups + K; }
};

/* A warp's row; n < 0: none. Shared memory: E scores, with a bias E of score + bias, a score a group, K numbers. */
struct RoutedRow {
    int64_t n;
    float *score, *rank, *group, *chosen; /* rank: what is chosen by */
    __device__ __forceinline__ RoutedRow(const Routing &r, float *shared)
    {
        const int warp = threadIdx.x / WARP;
        n = blockIdx.x * static_cast<int64_t>(r.warps) + warp;
        if (n >= rows_in_use(r.rows)) n = -1;
        score = shared + warp * r.row_floats();
        rank = r.ranked() ? score + r.E : score;
        group = rank + r.E, chosen = group + r.router.groups;
    }
};

/* ---- scores ---- */

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float one_score(RouterScore kind, float x)
{
    if (kind == ROUTER_SIGMOID) return sigmoid(x);
    if (kind == ROUTER_SQRT_SOFTPLUS) return sqrtf(fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))));
    return x;
}

/* Returns log(sum of exp(x)). */
__device__ __forceinline__ float row_softmax(float *y, const float *x, int E)
{
    const int lane = threadIdx.x % WARP;
    float most = -INFINITY, sum = 0;
    for (int e = lane; e < E; e += WARP) most = fmaxf(most, x[e]);
    most = warp_max(most);
    for (int e = lane; e < E; e += WARP) {
        y[e] = expf(x[e] - most);
        sum += y[e];
    }
    sum = warp_sum(sum);
    for (int e = lane; e < E; e += WARP) y[e] /= sum;
    return most + logf(sum);
}

/* All lanes call it; then each sees all scores. */
__device__ __forceinline__ void row_scores(RouterScore kind, float *y, const float *x, int E)
{
    if (kind == ROUTER_SOFTMAX_PRE) row_softmax(y, x, E);
    else
        for (int e = threadIdx.x % WARP; e < E; e += WARP) y[e] = one_score(kind, x[e]);
    __syncwarp();
}

/* Score by logit; of softmax the row's sum comes to it (router_bwd_kernel, aux_gradient). */
__device__ __forceinline__ float score_slope(RouterScore kind, float score, float logit)
{
    if (kind == ROUTER_SIGMOID) return score * (1.0f - score);
    if (kind == ROUTER_SQRT_SOFTPLUS) return score > 0.0f ? sigmoid(logit) / (2.0f * score) : 0.0f;
    return score;
}

/* ---- the choice ---- */

struct Ranked {
    float score;
    int index;
};

/* A NaN is below every number. */
__device__ __forceinline__ bool better(float a, float b) { return a > b || (b != b && a == a); }

/* The lower index goes first among equal scores. */
__device__ __forceinline__ bool before(Ranked a, Ranked b)
{
    return better(a.score, b.score) || (!better(b.score, a.score) && a.index < b.index);
}

__device__ __forceinline__ Ranked before_all() { return { INFINITY, -1 }; }

/* The first behind `last` of those in [from, end) that are open; the same in every lane. */
template <class Open>
__device__ __forceinline__ Ranked next_best(const float *score, int from, int end, Ranked last, Open open)
{
    Ranked best = { NAN, INT_MAX };
    for (int i = from + threadIdx.x % WARP; i < end; i += WARP) {
        const Ranked x = { score[i], i };
        if (before(last, x) && before(x, best) && open(i)) best = x;
    }
    for (int d = WARP / 2; d > 0; d /= 2) {
        const Ranked x = { __shfl_xor_sync(ALL_LANES, best.score, d),
                           __shfl_xor_sync(ALL_LANES, best.index, d) };
        if (before(x, best)) best = x;
    }
    return best;
}

/* Fills row.group with the groups' scores; returns the worst of the groups that are chosen from. */
__device__ __forceinline__ Ranked choose_groups(const Routing &r, const RoutedRow &row)
{
    const int size = r.E / r.router.groups;
    const int most = r.router.group_best ? r.router.group_best : r.K / r.router.group_topk;
    const auto all = [](int) { return true; };
    for (int g = 0; g < r.router.groups; g++) {
        Ranked last = before_all();
        float sum = 0;
        for (int i = 0; i < most; i++) {
            last = next_best(row.rank, g * size, (g + 1) * size, last, all);
            sum += last.score;
        }
        if (threadIdx.x % WARP == 0) row.group[g] = sum;
    }
    __syncwarp();
    Ranked last = before_all();
    for (int i = 0; i < r.router.group_topk; i++) last = next_best(row.group, 0, r.router.groups, last, all);
    return last;
}

__device__ __forceinline__ void fill_rank(const Routing &r, const RoutedRow &row)
{
    for (int e = threadIdx.x % WARP; e < r.E; e += WARP)
        row.rank[e] = r.by.data ? r.by.at(row.n)[e] : row.score[e] + r.bias[e];
    __syncwarp();
}

/* index: the row's K experts; row.chosen: their scores. */
__device__ __forceinline__ void choose(const Routing &r, const RoutedRow &row, int32_t *index)
{
    const bool grouped = r.router.groups > 1;
    const int size = r.E / r.router.groups;
    const Ranked worst = grouped ? choose_groups(r, row) : before_all();
    const auto open = [&](int e) {
        const int g = e / size;
        return !grouped || !before(worst, { row.group[g], g });
    };
    Ranked last = before_all();
    for (int k = 0; k < r.K; k++) {
        last = next_best(row.rank, 0, r.E, last, open);
        if (threadIdx.x % WARP == 0) {
            index[k] = last.index;
            row.chosen[k] = row.score[last.index];
        }
    }
    __syncwarp();
}

/* ---- forward ---- */

/* Weights of the chosen experts, from their scores. */
__device__ __forceinline__ void row_weights(const Routing &r, float *chosen, float *weight)
{
    const bool softmax = r.router.score == ROUTER_SOFTMAX;
    const float best = chosen[0];
    float sum = 0;
    __syncwarp(); /* all have read chosen[0] */
    for (int k = threadIdx.x % WARP; k < r.K; k += WARP) {
        if (softmax) chosen[k] = expf(chosen[k] - best);
        sum += chosen[k];
    }
    sum = warp_sum(sum);
    const float divisor = softmax ? sum : r.router.normalize ? sum + NORMALIZE_EPS : 1.0f;
    for (int k = threadIdx.x % WARP; k < r.K; k += WARP) weight[k] = chosen[k] / divisor * r.router.scale;
}

__global__ void __launch_bounds__(ROUTER_WARPS *WARP)
    router_fwd_kernel(Routing r, Rows<int32_t> index, Rows<float> weight)
{
    DYNAMIC_SHARED(float, shared);
    const RoutedRow row(r, shared);
    if (row.n < 0) return;
    row_scores(r.router.score, row.score, r.logits.at(row.n), r.E);
    if (r.ranked()) fill_rank(r, row);
    choose(r, row, index.at(row.n));
    row_weights(r, row.chosen, weight.at(row.n));
}

/* ---- backward ---- */

struct RouterGrad {
    Rows<float> dlogits;
    Rows<const float> dweight, weight;
    Rows<const int32_t> index;
};

/* Sum over the row's choices k of x(k). */
template <class X> __device__ __forceinline__ float sum_choices(int K, X x)
{
    float sum = 0;
    for (int k = threadIdx.x % WARP; k < K; k += WARP) sum += x(k);
    return warp_sum(sum);
}

/*
 * With d the gradients of the weights before scale, s the chosen scores, S their sum: a score's gradient is d, or with
 * normalisation (d - sum of d w) / S; softmax is a normalisation of exponentials, of slope w instead of 1 / S.
 */
__global__ void __launch_bounds__(ROUTER_WARPS *WARP) router_bwd_kernel(Routing r, RouterGrad a)
{
    DYNAMIC_SHARED(float, shared);
    const RoutedRow row(r, shared);
    if (row.n < 0) return;
    const RouterScore kind = r.router.score;
    const float *x = r.logits.at(row.n), *dw = a.dweight.at(row.n), *w = a.weight.at(row.n),
                scale = r.router.scale;
    const int32_t *index = a.index.at(row.n);
    float *dx = a.dlogits.at(row.n);
    const bool softmax = kind == ROUTER_SOFTMAX;
    row_scores(kind, row.score, x, r.E);
    const float mean = sum_choices(r.K, [&](int k) { return dw[k] * (w[k] / scale); });
    const float sum = sum_choices(r.K, [&](int k) { return row.score[index[k]]; }) + NORMALIZE_EPS;
    const auto ds = [&](int k) { return r.router.normalize ? scale * (dw[k] - mean) / sum : scale * dw[k]; };
    const float pull = kind == ROUTER_SOFTMAX_PRE
                           ? sum_choices(r.K, [&](int k) { return ds(k) * row.score[index[k]]; })
                           : 0.0f;
    for (int e = threadIdx.x % WARP; e < r.E; e += WARP) dx[e] = pull == 0.0f ? 0.0f : -pull * row.score[e];
    __syncwarp();
    for (int k = threadIdx.x % WARP; k < r.K; k += WARP) {
        const int e = index[k];
        if (softmax) dx[e] = w[k] * (dw[k] - mean);
        else dx[e] += ds(k) * score_slope(kind, row.score[e], x[e]);
    }
}

/* ---- balance ---- */

struct Balance {
    Rows<float> dlogits;
    Rows<const int64_t> load; /* of units; data NULL: no loss by load */
    const StepValues *step;
    int64_t first, rows;
    float aux, z;               /* a row's, before step->loss_scale */
    float aux_coeff;            /* of the loss that is told */
    unsigned long long *losses; /* [3], or NULL */
};

/* dx += the gradients g[e] = pull * load[e] of the scores q, divided by their sum, through both. Returns the sum of g
 * q: the loss as pull weighs it. */
__device__ __forceinline__ float aux_gradient(RouterScore kind, const RoutedRow &row,
                                              Rows<const float> logits, int E, const int64_t *load,
                                              float pull, float *dx)
{
    const float *x = logits.at(row.n);
    float *q = row.score, sum = 0, mean = 0;
    const bool softmax = kind == ROUTER_SOFTMAX || kind == ROUTER_SOFTMAX_PRE;
    row_scores(softmax ? ROUTER_SOFTMAX_PRE : kind, q, x, E);
    for (int e = threadIdx.x % WARP; e < E; e += WARP) sum += q[e];
    sum = softmax ? 1.0f : warp_sum(sum) + NORMALIZE_EPS;
    for (int e = threadIdx.x % WARP; e < E; e += WARP)
        mean += pull * static_cast<float>(load[e]) * (q[e] / sum);
    mean = warp_sum(mean);
    for (int e = threadIdx.x % WARP; e < E; e += WARP)
        dx[e] += (pull * static_cast<float>(load[e]) - mean) / sum *
                 score_slope(softmax ? ROUTER_SOFTMAX_PRE : kind, q[e], x[e]);
    return mean;
}

/* sums += a row's losses, by its first lane: integers, whose order does not show. */
__device__ __forceinline__ void add_losses(unsigned long long *sums, float aux, float z)
{
    if (!sums || threadIdx.x % WARP) return;
    const float most = ROUTER_LOSS_MOST, one = 1 << ROUTER_LOSS_BITS;
    const bool told = fabsf(aux) < most && fabsf(z) < most;
    if (fabsf(aux) < most) atomicAdd(&sums[0], static_cast<unsigned long long>(llrintf(aux * one)));
    if (fabsf(z) < most) atomicAdd(&sums[1], static_cast<unsigned long long>(llrintf(z * one)));
    if (!told) atomicAdd(&sums[2], 1ull);
}

__global__ void __launch_bounds__(ROUTER_WARPS *WARP) router_balance_kernel(Routing r, Balance b)
{
    DYNAMIC_SHARED(float, shared);
    const RoutedRow row(r, shared);
    if (row.n < 0) return;
    const float scale = b.step->loss_scale;
    float *dx = b.dlogits.at(row.n), aux = 0, z = 0;
    if (b.load.data)
        aux = aux_gradient(r.router.score, row, r.logits, r.E, b.load.at((b.first + row.n) / b.rows),
                           scale * b.aux, dx) /
              (scale * b.aux_coeff);
    if (b.z > 0) {
        z = row_softmax(row.score, r.logits.at(row.n), r.E);
        for (int e = threadIdx.x % WARP; e < r.E; e += WARP) dx[e] += scale * b.z * 2.0f * z * row.score[e];
    }
    add_losses(b.losses, aux, z * z);
}

/* ---- launching ---- */

static Err routing_of(Routing *r, const char *name, Tensor logits, int64_t K, Router router)
{
    const int64_t E = logits.dim[1],
                  fit = ROUTER_SHARED / (((r->ranked() ? 2 : 1) * E + router.groups + K) * 4);
    ASSERT(K <= E && E % router.groups == 0 && (router.group_best || K % router.group_topk == 0));
    ASSERT(router.group_topk <= router.groups && K <= router.group_topk * (E / router.groups));
    if (fit < 1) return err_set(ERR_SHAPE, "%s: %lld experts are too many", name, static_cast<long long>(E));
    r->logits = rows_of<const float>(logits);
    r->router = router;
    r->E = static_cast<int>(E), r->K = static_cast<int>(K);
    r->warps = static_cast<int>(fit < ROUTER_WARPS ? fit : ROUTER_WARPS);
    return ERR_OK;
}

static unsigned routing_grid(const Routing &r) { return grid_blocks(ceil_div(r.rows.capacity, r.warps)); }
static size_t routing_shared(const Routing &r) { return sizeof(float) * r.warps * r.row_floats(); }

extern "C" Err cuda_router_fwd(Stream *s, const router_fwd_args *a)
{
    Routing r = {};
    r.bias = data_of<const float>(a->bias);
    r.by = rows_of<const float>(a->rank);
    TRY(routing_of(&r, "router_fwd", a->logits, a->index.dim[1], a->router));
    r.rows = row_count(a->logits, a->index);
    LAUNCH(router_fwd_kernel, routing_grid(r), r.warps * WARP, routing_shared(r), cuda_stream(s), r,
           rows_of<int32_t>(a->index), rows_of<float>(a->weight));
    return ERR_OK;
}

extern "C" Err cuda_router_bwd(Stream *s, const router_bwd_args *a)
{
    Routing r = {};
    const RouterGrad g = { rows_of<float>(a->dlogits), rows_of<const float>(a->dweight),
                           rows_of<const float>(a->weight), rows_of<const int32_t>(a->index) };
    TRY(routing_of(&r, "router_bwd", a->logits, a->index.dim[1], a->router));
    r.rows = row_count(a->dlogits, a->dweight);
    LAUNCH(router_bwd_kernel, routing_grid(r), r.warps * WARP, routing_shared(r), cuda_stream(s), r, g);
    return ERR_OK;
}

extern "C" Err cuda_router_balance(Stream *s, const router_balance_args *a)
{
    Routing r = {};
    Balance b = { rows_of<float>(a->dlogits),
                  rows_of<const int64_t>(a->load),
                  a->step,
                  a->first,
                  a->rows,
                  0,
                  a->z,
                  a->aux_coeff,
                  data_of<unsigned long long>(a->losses) };
    TRY(routing_of(&r, "router_balance", a->logits, a->topk, a->router));
    r.rows = row_count(a->dlogits, a->logits);
    b.aux = a->aux * static_cast<float>(r.E) / (static_cast<float>(a->topk) * static_cast<float>(a->rows));
    LAUNCH(router_balance_kernel, routing_grid(r), r.warps * WARP, routing_shared(r), cuda_stream(s), r, b);
    return ERR_OK;
}
