/*
 * Cross entropy over a vocabulary that ranks share, in canonical blocks of columns.
 *
 *   capped  l = cap tanh(x / cap), before all of this, if logits have a cap
 *   stats   per row and block: m_b = max l,  s_b = sum exp(l - m_b)      16 lanes by column of the block
 * mod 16 loss    m = max m_b,  S = tree of s_b exp(m_b - m) over all blocks in global order, loss = log S +
 * m - l[target] bwd     l <- (exp(l - m) / S - onehot) * scale
 *
 * No probabilities are stored: the backward makes them again. Threads own rows. xent_row is all three, a row at a time:
 * the same functions, so the same bits.
 *
 * Traffic per logit: stats reads 4 bytes (its second pass hits the cache, a block being some 25 KB), bwd
 * reads and writes 4, in bf16 2; about 20 instructions for 16 logits each.
 */
#include "base/mathx.h"
#include "cpu/rows.h"

/* A loss beyond this many nats counts as not finite: 2^16 * 2^LOSS_FIXED_BITS * 2^19 tokens fit an int64. */
#define LOSS_LIMIT 65536.0f

/* ---- a cap ---- */

static void softcap_part(const void *args, int64_t first, int64_t end)
{
    const softcap_args *a = args;
    const int64_t D = a->x.dim[1];
    const vf cap = vf_set1(a->cap);
    for (int64_t n = first; n < end; n++) {
        const float *x = row_f32(a->x, n);
        float *y = row_f32(a->y, n);
        for (int64_t i = 0; i < D; i += VEC)
            row_store(y + i, vf_mul(vf_tanh(vf_div(row_load(x + i, D - i), cap)), cap), D - i);
    }
}

Err CPU(softcap)(Stream *s, const softcap_args *a)
{
    par_rows(s, rows_both(a->y, a->x), a->x.dim[1], softcap_part, a);
    return ERR_OK;
}

/* ---- stats ---- */

/* Largest of n >= 1 logits from column `at` on. NaN is passed over here; it shows in the sum. */
VEC_FN float block_max(Row x, int64_t at, int64_t n)
{
    const vf none = vf_set1(-__builtin_inff());
    vf m = none;
    int64_t i = 0;
    for (; i + VEC <= n; i += VEC) m = vf_max(row_get(x, at + i, VEC), m);
    if (i < n) m = vf_max(vf_select(vm_first_n(n - i), row_get(x, at + i, n - i), none), m);
    return vf_hmax(m);
}

VEC_FN float block_sum(Row x, int64_t at, int64_t n, float max)
{
    vf m = vf_set1(max), sum = vf_zero();
    int64_t i = 0;
    for (; i + VEC <= n; i += VEC) sum = vf_add(sum, vf_exp(vf_sub(row_get(x, at + i, VEC), m)));
    if (i < n) sum = vf_add(sum, row_mask(vf_exp(vf_sub(row_get(x, at + i, n - i), m)), n - i));
    return vf_sum(sum);
}

/* Columns of this rank that are words, not padding. */
static int64_t columns_used(int64_t V, int64_t first, int64_t vocab)
{
    int64_t n = vocab - first;
    return n < 0 ? 0 : n < V ? n : V;
}

VEC_FN void xent_stats_row(const xent_stats_args *a, Row x, int64_t n, int64_t used)
{
    const int64_t J = a->block_max.dim[1];
    float *max = row_f32(a->block_max, n), *sum = row_f32(a->block_sum, n);
    for (int64_t j = 0; j < J; j++) {
        int64_t at = j * a->block, left = used - at, count = left < a->block ? left : a->block;
        max[j] = count > 0 ? block_max(x, at, count) : -__builtin_inff();
        sum[j] = count > 0 ? block_sum(x, at, count, max[j]) : 0.0f;
    }
}

static void xent_stats_part(const void *args, int64_t first, int64_t end)
{
    const xent_stats_args *a = args;
    int64_t used = columns_used(a->logits.dim[1], a->first, a->vocab);
    for (int64_t n = first; n < end; n++) {
        const Row x = row_of(a->logits, n);
        if (x.narrow) xent_stats_row(a, (Row){ x.data, true }, n, used);
        else xent_stats_row(a, (Row){ x.data, false }, n, used);
        int64_t t = ((const int32_t *)a->target.data)[n] - a->first;
        ((float *)a->target_logit.data)[n] =
            t >= 0 && t < used ? any_load(a->logits, tensor_row_at(a->logits, n) + t) : 0.0f;
    }
}

Err CPU(xent_stats)(Stream *s, const xent_stats_args *a)
{
    par_rows(s, rows_both(a->block_max, a->logits), a->logits.dim[1], xent_stats_part, a);
    return ERR_OK;
}

/* ---- loss ---- */

/* The value of block b of row n, blocks numbered over all ranks. */
static float block_at(Tensor t, int64_t b, int64_t n)
{
    int64_t N = t.dim[1], J = t.dim[2];
    return row_f32(t, b / J * N + n)[b % J];
}

static void xent_loss_row(const xent_loss_args *a, int64_t n)
{
    int64_t R = a->target_logit.dim[0], blocks = R * a->block_max.dim[2];
    float max = -__builtin_inff(), target_logit = 0.0f;
    for (int64_t b = 0; b < blocks; b++) {
        float m = block_at(a->block_max, b, n);
        max = m > max ? m : max;
    }
    Tree tree = { .count = 0 };
    for (int64_t b = 0; b < blocks; b++) {
        float sum = block_at(a->block_sum, b, n);
        /* an empty block's exp(-inf - max) must not become NaN when max is not finite */
        float turn = sum == 0.0f ? 0.0f : vf_hmax(vf_exp(vf_set1(block_at(a->block_max, b, n) - max)));
        tree_push(&tree, sum * turn);
    }
    float sum = tree_total(&tree);
    for (int64_t r = 0; r < R; r++) target_logit += row_f32(a->target_logit, r)[n];
    ((float *)a->row_max.data)[n] = max;
    ((float *)a->row_sum.data)[n] = sum;
    int counts = ((const int32_t *)a->target.data)[n] >= 0;
    ((float *)a->loss.data)[n] = counts ? (float)(m_log((double)sum) + ((double)max - (double)target_logit)) : 0.0f;
}

static void xent_loss_part(const void *args, int64_t first, int64_t end)
{
    for (int64_t n = first; n < end; n++) xent_loss_row(args, n);
}

Err CPU(xent_loss)(Stream *s, const xent_loss_args *a)
{
    int64_t cost = 32 * a->target_logit.dim[0] * a->block_max.dim[2];
    par_rows(s, rows_both(a->loss, a->target), cost, xent_loss_part, a);
    return ERR_OK;
}

/* Serial: integer sums over few numbers. */
Err CPU(loss_sum)(Stream *s, const loss_sum_args *a)
{
    const float *loss = a->loss.data;
    const int32_t *target = a->target.data;
    int64_t *sums = a->sums.data, rows = rows_both(a->loss, a->target);
    (void)s;
    fp_reset();
    for (int64_t n = 0; n < rows; n++) {
        sums[1] += target[n] >= 0;
        if (__builtin_fabsf(loss[n]) < LOSS_LIMIT) {
            sums[0] += __builtin_llrintf(loss[n] * (float)(1 << LOSS_FIXED_BITS));
        } else {
            sums[2] = 1;
        }
    }
    return ERR_OK;
}

/* ---- backward ---- */

typedef struct {
    vf max, inverse, scale;
    float cap; /* of the logits; 0: none */
} SoftmaxRow;

/* Under a cap d(cap tanh(u / cap))/du = 1 - (x / cap)^2 follows. */
VEC_FN vf softmax_grad(const SoftmaxRow *r, vf x, float onehot)
{
    vf p = vf_mul(vf_exp(vf_sub(x, r->max)), r->inverse);
    vf d = vf_mul(vf_sub(p, vf_set1(onehot)), r->scale);
    if (!(r->cap > 0)) return d;
    vf t = vf_div(x, vf_set1(r->cap));
    return vf_mul(d, vf_sub(vf_set1(1.0f), vf_mul(t, t)));
}

VEC_FN void xent_bwd_row(Row x, int64_t used, const SoftmaxRow *r)
{
    for (int64_t i = 0; i < used; i += VEC) row_put(x, i, softmax_grad(r, row_get(x, i, used - i), 0.0f), used - i);
}

static void xent_bwd_part(const void *args, int64_t first, int64_t end)
{
    const xent_bwd_args *a = args;
    const float *max = a->row_max.data, *sum = a->row_sum.data;
    const int32_t *target = a->target.data;
    const vf scale = vf_set1(a->step->loss_scale * a->weight);
    int64_t V = a->logits.dim[1], used = columns_used(V, a->first, a->vocab);
    for (int64_t n = first; n < end; n++) {
        const Row x = row_of(a->logits, n);
        const int64_t at = tensor_row_at(a->logits, n), t = target[n] - a->first;
        const int64_t words = target[n] >= 0 ? used : 0, size = dtype_size(a->logits.dtype);
        const SoftmaxRow r = { vf_set1(max[n]), vf_set1(1.0f / sum[n]), scale, a->softcap };
        const bool here = t >= 0 && t < words;
        const float at_target = here ? vf_hmax(softmax_grad(&r, vf_set1(any_load(a->logits, at + t)), 1.0f)) : 0.0f;
        if (x.narrow) xent_bwd_row((Row){ x.data, true }, words, &r);
        else xent_bwd_row((Row){ x.data, false }, words, &r);
        if (here) any_store(a->logits, at + t, at_target);
        memset((char *)x.data + words * size, 0, (size_t)((V - words) * size));
    }
}

Err CPU(xent_bwd)(Stream *s, const xent_bwd_args *a)
{
    par_rows(s, rows_both(a->logits, a->target), a->logits.dim[1], xent_bwd_part, a);
    return ERR_OK;
}

/* ---- all three ---- */

enum { BLOCKS_MOST = 4096 };
_Static_assert(2 * BLOCKS_MOST * sizeof(float) <= CPU_SCRATCH_BYTES, "both arrays fit");

static void xent_row_part(const void *args, int64_t first, int64_t end)
{
    const xent_row_args *a = args;
    const int64_t J = a->logits.dim[1] / a->block;
    float *max = (float *)cpu_scratch, *sum = max + BLOCKS_MOST, at_target, row_max, row_sum;
    for (int64_t n = first; n < end; n++) {
        const Tensor logits = tensor_row_slice(a->logits, n, 1), target = tensor_row_slice(a->target, n, 1);
        const xent_stats_args stats = { .block_max = tensor_of(max, F32, 1, J),
                                        .block_sum = tensor_of(sum, F32, 1, J),
                                        .target_logit = tensor_of(&at_target, F32, 1),
                                        .logits = logits,
                                        .target = target,
                                        .block = a->block,
                                        .vocab = a->vocab };
        const xent_loss_args loss = { .loss = tensor_row_slice(a->loss, n, 1),
                                      .row_max = tensor_of(&row_max, F32, 1),
                                      .row_sum = tensor_of(&row_sum, F32, 1),
                                      .block_max = tensor_of(max, F32, 1, 1, J),
                                      .block_sum = tensor_of(sum, F32, 1, 1, J),
                                      .target_logit = tensor_of(&at_target, F32, 1, 1),
                                      .target = target };
        const xent_bwd_args bwd = { .logits = logits,
                                    .target = target,
                                    .row_max = loss.row_max,
                                    .row_sum = loss.row_sum,
                                    .step = a->step,
                                    .weight = a->weight,
                                    .softcap = a->softcap,
                                    .vocab = a->vocab };
        xent_stats_part(&stats, 0, 1);
        xent_loss_part(&loss, 0, 1);
        xent_bwd_part(&bwd, 0, 1);
    }
}

Err CPU(xent_row)(Stream *s, const xent_row_args *a)
{
    const int64_t V = a->logits.dim[1], J = a->block > 0 ? V / a->block : 0;
    if (J < 1 || V % a->block || J > BLOCKS_MOST)
        return err_set(ERR_SHAPE, "xent_row: %lld columns in blocks of %lld", (long long)V, (long long)a->block);
    par_rows(s, rows_both(a->loss, a->logits), V, xent_row_part, a);
    return ERR_OK;
}
