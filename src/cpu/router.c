/*
 * Routers of mixtures: scores, the best K of E, their weights, and the gradient of the logits. The formulas stand
 * in device/step.h (Router).
 *
 * Threads own rows. Scores of a row lie in the thread's share of the workspace. The choice is one pass over the
 * experts with a sorted list of the best so far: K is small.
 */
#include "base/mathx.h"
#include "cpu/rows.h"

#define NORMALIZE_EPS 1e-20f

/* ---- scores ---- */

static void row_softmax(float *y, const float *x, int64_t n)
{
    vf most = vf_set1(-__builtin_inff()), sum = vf_zero();
    for (int64_t i = 0; i < n; i += VEC) {
        const int64_t left = n - i;
        const vf v = row_load(x + i, left);
        most = vf_max(left >= VEC ? v : vf_select(vm_first_n(left), v, most), most);
    }
    const vf max = vf_set1(vf_hmax(most));
    for (int64_t i = 0; i < n; i += VEC) {
        const vf e = row_mask(vf_exp(vf_sub(row_load(x + i, n - i), max)), n - i);
        sum = vf_add(sum, e);
        row_store(y + i, e, n - i);
    }
    const vf total = vf_set1(vf_sum(sum));
    for (int64_t i = 0; i < n; i += VEC) row_store(y + i, vf_div(row_load(y + i, n - i), total), n - i);
}

static void row_scores(RouterScore kind, float *y, const float *x, int64_t n)
{
    switch (kind) {
    case ROUTER_SOFTMAX: memcpy(y, x, (size_t)n * sizeof *y); break;
    case ROUTER_SOFTMAX_PRE: row_softmax(y, x, n); break;
    case ROUTER_SIGMOID:
        for (int64_t i = 0; i < n; i++) y[i] = sigmoid_f32(x[i]);
        break;
    case ROUTER_SQRT_SOFTPLUS:
        for (int64_t i = 0; i < n; i++) y[i] = (float)__builtin_sqrt(softplus((double)x[i]));
        break;
    }
}

/* Score by logit; of SOFTMAX_PRE the row's sum comes to it (router_bwd). */
static float score_slope(RouterScore kind, float score, float logit)
{
    if (kind == ROUTER_SIGMOID) return score * (1 - score);
    if (kind == ROUTER_SQRT_SOFTPLUS) return score > 0 ? sigmoid_f32(logit) / (2 * score) : 0;
    return score;
}

/* ---- the choice ---- */

/* A NaN is below every number; equal scores are not better. */
static bool better(float a, float b) { return a > b || (b != b && a == a); }

/* A list of the best so far, sorted; of equal ones who came first stays in front. */
typedef struct {
    int32_t *index;
    int64_t count, most;
} Best;

static void best_add(Best *b, const float *score, int32_t i)
{
    int64_t at = b->count;
    if (at == b->most) {
        if (!better(score[i], score[b->index[at - 1]])) return;
        at--;
    } else {
        b->count++;
    }
    for (; at > 0 && better(score[i], score[b->index[at - 1]]); at--) b->index[at] = b->index[at - 1];
    b->index[at] = i;
}

/* Sum of the `most` best scores of experts [first, end), best first. */
static float group_score(const float *score, int64_t first, int64_t end, int64_t most)
{
    int32_t list[ROUTER_TOPK_MAX];
    Best best = { list, 0, most };
    float sum = 0;
    for (int64_t e = first; e < end; e++) best_add(&best, score, (int32_t)e);
    for (int64_t i = 0; i < best.count; i++) sum += score[list[i]];
    return sum;
}

static void sort_ascending(int32_t *x, int64_t n)
{
    for (int64_t i = 1; i < n; i++) {
        const int32_t v = x[i];
        int64_t at = i;
        for (; at > 0 && x[at - 1] > v; at--) x[at] = x[at - 1];
        x[at] = v;
    }
}

/* group: room for a score a group. */
static void choose(const Router *r, const float *score, float *group, int64_t E, Best *best)
{
    int32_t list[ROUTER_TOPK_MAX];
    const int64_t size = E / r->groups, counted = r->group_best ? r->group_best : best->most / r->group_topk;
    Best groups = { list, 0, r->group_topk };
    for (int32_t g = 0; g < r->groups; g++) {
        if (r->groups > 1) group[g] = group_score(score, g * size, (g + 1) * size, counted);
        else group[g] = 0;
        best_add(&groups, group, g);
    }
    sort_ascending(list, groups.count); /* so that of equal experts the lower comes first */
    for (int64_t i = 0; i < groups.count; i++)
        for (int64_t e = list[i] * size; e < (list[i] + 1) * size; e++) best_add(best, score, (int32_t)e);
}

/* ---- weights ---- */

static float chain_sum(const float *x, int64_t n)
{
    float sum = 0;
    for (int64_t i = 0; i < n; i++) sum += x[i];
    return sum;
}

/* The weights of the chosen experts, from their scores; without `scale`. */
static void row_weights(const Router *r, const float *score, const int32_t *index, int64_t K, float *w)
{
    const bool softmax = r->score == ROUTER_SOFTMAX;
    for (int64_t k = 0; k < K; k++) {
        const float s = score[index[k]];
        w[k] = softmax ? (float)m_exp((double)s - (double)score[index[0]]) : s;
    }
    if (!softmax && !r->normalize) return;
    const float sum = chain_sum(w, K) + (softmax ? 0 : NORMALIZE_EPS);
    for (int64_t k = 0; k < K; k++) w[k] /= sum;
}

/* ---- the ops ---- */

typedef struct {
    const void *args;
    char *memory; /* a share for each thread */
    int64_t share_bytes;
} RouterWork;

static float *own_memory(const RouterWork *w)
{
    return (float *)(void *)(w->memory + omp_get_thread_num() * w->share_bytes);
}

static void router_fwd_part(const void *args, int64_t first, int64_t end)
{
    const RouterWork *work = args;
    const router_fwd_args *a = work->args;
    const int64_t E = a->logits.dim[1], K = a->index.dim[1];
    const float *bias = a->bias.data;
    float *score = own_memory(work), *biased = score + 2 * E; /* score + E: of groups */
    for (int64_t n = first; n < end; n++) {
        float *w = row_f32(a->weight, n);
        Best best = { (int32_t *)a->index.data + n * a->index.ld, 0, K };
        row_scores(a->router.score, score, row_f32(a->logits, n), E);
        for (int64_t e = 0; bias && e < E; e++) biased[e] = score[e] + bias[e];
        const float *by = a->rank.data ? row_f32(a->rank, n) : bias ? biased : score;
        choose(&a->router, by, score + E, E, &best);
        row_weights(&a->router, score, best.index, K, w);
        for (int64_t k = 0; k < K; k++) w[k] *= a->router.scale;
    }
}

/* Runs on as many threads as have a share of the workspace. */
static Err router_run(Stream *s, const RouterWork *work, int64_t N, int64_t E, PartFn *part)
{
    RouterWork w = *work;
    Device dev = *s->dev;
    Stream own = *s;
    const int64_t need = 3 * E * (int64_t)sizeof(float);
    if (need > dev.workspace_bytes)
        return err_set(ERR_CONFIG, "a router of %lld experts needs %lld bytes of workspace, there are %lld",
                       (long long)E, (long long)need, (long long)dev.workspace_bytes);
    if (dev.threads > dev.workspace_bytes / need) dev.threads = (int)(dev.workspace_bytes / need);
    w.memory = dev.workspace, w.share_bytes = need;
    own.dev = &dev;
    par_rows(&own, N, 8 * E, part, &w);
    return ERR_OK;
}

Err CPU(router_fwd)(Stream *s, const router_fwd_args *a)
{
    const int64_t E = a->logits.dim[1], K = a->index.dim[1];
    ASSERT(K <= ROUTER_TOPK_MAX && K <= E && E % a->router.groups == 0 && a->router.group_topk <= a->router.groups);
    ASSERT((a->router.group_best || K % a->router.group_topk == 0) &&
           K <= a->router.group_topk * (E / a->router.groups));
    return router_run(s, &(RouterWork){ .args = a }, rows_both(a->logits, a->index), E, router_fwd_part);
}

/* d of a chosen expert's score, from those of the weights: through scale and normalisation. */
static void score_gradients(const Router *r, const float *dw, const float *w, int64_t K, float sum, float *ds)
{
    float mean = 0; /* the mean of dw by the weights without scale */
    for (int64_t k = 0; k < K; k++) mean += dw[k] * (w[k] / r->scale);
    for (int64_t k = 0; k < K; k++)
        ds[k] = r->normalize ? r->scale * (dw[k] - mean) / (sum + NORMALIZE_EPS) : r->scale * dw[k];
}

static void router_bwd_row(const router_bwd_args *a, int64_t n, float *score)
{
    const Router *r = &a->router;
    const int64_t E = a->logits.dim[1], K = a->index.dim[1];
    const int32_t *index = (const int32_t *)a->index.data + n * a->index.ld;
    const float *x = row_f32(a->logits, n), *dw = row_f32(a->dweight, n), *w = row_f32(a->weight, n);
    float *dx = row_f32(a->dlogits, n), ds[ROUTER_TOPK_MAX], mean = 0, sum = 0;
    memset(dx, 0, (size_t)E * sizeof *dx);
    if (r->score == ROUTER_SOFTMAX) {
        for (int64_t k = 0; k < K; k++) mean += dw[k] * (w[k] / r->scale);
        for (int64_t k = 0; k < K; k++) dx[index[k]] = w[k] * (dw[k] - mean);
        return;
    }
    row_scores(r->score, score, x, E);
    for (int64_t k = 0; k < K; k++) sum += score[index[k]];
    score_gradients(r, dw, w, K, sum, ds);
    for (int64_t k = 0; k < K; k++) mean += ds[k] * score[index[k]];
    for (int64_t e = 0; r->score == ROUTER_SOFTMAX_PRE && e < E; e++) dx[e] = -mean * score[e];
    for (int64_t k = 0; k < K; k++) {
        const int32_t e = index[k];
        dx[e] += ds[k] * score_slope(r->score, score[e], x[e]);
    }
}

static void router_bwd_part(const void *args, int64_t first, int64_t end)
{
    const RouterWork *work = args;
    const router_bwd_args *a = work->args;
    for (int64_t n = first; n < end; n++) router_bwd_row(a, n, own_memory(work));
}

Err CPU(router_bwd)(Stream *s, const router_bwd_args *a)
{
    const int64_t N = rows_both(a->dlogits, a->dweight);
    ASSERT(a->index.dim[1] <= ROUTER_TOPK_MAX);
    return router_run(s, &(RouterWork){ .args = a }, N, a->logits.dim[1], router_bwd_part);
}

/* ---- balance ---- */

Err CPU(router_count)(Stream *s, const router_count_args *a)
{
    const int64_t N = rows_used(a->index), K = a->index.dim[1];
    (void)s;
    ASSERT(a->first + N <= a->rows * a->load.dim[0]);
    for (int64_t n = 0; n < N; n++) {
        int64_t *load = (int64_t *)a->load.data + (a->first + n) / a->rows * a->load.ld;
        const int32_t *index = (const int32_t *)a->index.data + n * a->index.ld;
        for (int64_t k = 0; k < K; k++) load[index[k]]++;
    }
    return ERR_OK;
}

/* dx += of the gradients g of the scores q = score / sum, through both. g[e] = pull * load[e]. Returns the sum of g q:
 * the loss as pull weighs it. */
static float aux_gradient(const Router *r, const float *x, float *q, float *dx, int64_t E, const int64_t *load,
                          float pull)
{
    const bool softmax = r->score == ROUTER_SOFTMAX || r->score == ROUTER_SOFTMAX_PRE;
    float sum = 0, mean = 0;
    if (softmax) row_softmax(q, x, E);
    else row_scores(r->score, q, x, E);
    if (!softmax) sum = chain_sum(q, E) + NORMALIZE_EPS;
    for (int64_t e = 0; e < E; e++) mean += pull * (float)load[e] * (softmax ? q[e] : q[e] / sum);
    for (int64_t e = 0; e < E; e++) {
        const float g = pull * (float)load[e] - mean;
        dx[e] += softmax ? q[e] * g : g / sum * score_slope(r->score, q[e], x[e]);
    }
    return mean;
}

/* dx += pull * d log(sum exp(x))^2. Returns that square. */
static float z_gradient(const float *x, float *p, float *dx, int64_t E, float pull)
{
    int64_t best = 0;
    row_softmax(p, x, E);
    for (int64_t e = 1; e < E; e++)
        if (better(x[e], x[best])) best = e;
    const float z = x[best] - (float)m_log((double)p[best]); /* p is e to the power x - z */
    for (int64_t e = 0; e < E; e++) dx[e] += pull * 2 * z * p[e];
    return z * z;
}

/* sums += a row's losses; false: one of them cannot be shown. */
static bool tell_loss(int64_t *sum, float loss)
{
    if (!(__builtin_fabsf(loss) < (float)ROUTER_LOSS_MOST)) return false;
    *sum += __builtin_llrint((double)loss * (1 << ROUTER_LOSS_BITS));
    return true;
}

/* Parts of the rows are done beside each other: integers, whose order does not show. */
static void add_losses(Tensor losses, const int64_t sums[3])
{
    for (int i = 0; losses.data && i < 3; i++)
        __atomic_fetch_add((int64_t *)losses.data + i, sums[i], __ATOMIC_RELAXED);
}

static void router_balance_part(const void *args, int64_t first, int64_t end)
{
    const RouterWork *work = args;
    const router_balance_args *a = work->args;
    const int64_t E = a->logits.dim[1];
    const float scale = a->step->loss_scale, mean = (float)E / ((float)a->topk * (float)a->rows);
    float *memory = own_memory(work);
    int64_t sums[3] = { 0 };
    for (int64_t n = first; n < end; n++) {
        const float *x = row_f32(a->logits, n);
        float *dx = row_f32(a->dlogits, n), aux = 0, z = 0;
        if (a->load.data)
            aux = aux_gradient(&a->router, x, memory, dx, E,
                               (const int64_t *)a->load.data + (a->first + n) / a->rows * a->load.ld,
                               scale * a->aux * mean) /
                  (scale * a->aux_coeff);
        if (a->z > 0) z = z_gradient(x, memory, dx, E, scale * a->z);
        const bool told_aux = tell_loss(&sums[0], aux), told_z = tell_loss(&sums[1], z);
        sums[2] += !(told_aux && told_z);
    }
    add_losses(a->losses, sums);
}

Err CPU(router_balance)(Stream *s, const router_balance_args *a)
{
    return router_run(s, &(RouterWork){ .args = a }, rows_both(a->dlogits, a->logits), a->logits.dim[1],
                      router_balance_part);
}

static double load_of(Tensor load, int64_t e)
{
    return load.dtype == I64 ? (double)((const int64_t *)load.data)[e] : (double)((const float *)load.data)[e];
}

Err CPU(expert_count)(Stream *s, const expert_count_args *a)
{
    const int64_t E = a->load.dim[0], runs = (a->offset.dim[0] - 1) / E, *offset = a->offset.data;
    (void)s;
    for (int64_t e = 0; e < E; e++) {
        const int64_t rows = offset[(e + 1) * runs] - offset[e * runs];
        if (a->load.dtype == I64) ((int64_t *)a->load.data)[e] += rows;
        else ((float *)a->load.data)[e] += (float)rows;
    }
    return ERR_OK;
}

Err CPU(expert_bias)(Stream *s, const expert_bias_args *a)
{
    const int64_t E = a->bias.dim[0];
    float *bias = a->bias.data;
    double sum = 0; /* (counts and their sum are exact) */
    (void)s;
    if (a->step->skip) return ERR_OK;
    for (int64_t e = 0; e < E; e++) sum += load_of(a->load, e);
    for (int64_t e = 0; e < E; e++) {
        const double over = load_of(a->load, e) * (double)E - sum;
        if (over != 0) bias[e] += over > 0 ? -a->rate : a->rate;
    }
    return ERR_OK;
}
