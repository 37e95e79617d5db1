/*
 * Rows of tokens to rows of experts and back (device/ops.def, permute_*): a counting sort of choices by expert, copies,
 * and weighted sums. Threads own rows; the sort is one thread's, a few numbers a choice beside rows of D elements.
 */
#include "base/int64.h"
#include "cpu/rows.h"

static int32_t *row_i32(Tensor t, int64_t row) { return (int32_t *)t.data + row * t.ld; }

Err CPU(permute_index)(Stream *s, const permute_index_args *a)
{
    const int64_t N = rows_used(a->index), K = a->index.dim[1];
    const int64_t X = a->offset.dim[0] - 1, runs = X / a->experts;
    int64_t *start = a->offset.data;
    int32_t *choice = a->choice.data;
    (void)s;
    ASSERT(a->choice.dim[0] <= a->index.dim[0] * K);
    ASSERT(X == a->experts * runs && a->index.dim[0] <= runs * a->run);
    memset(start, 0, (size_t)(X + 1) * sizeof *start);
    for (int64_t n = 0; n < N; n++)
        for (int64_t k = 0; k < K; k++)
            if (row_i32(a->index, n)[k] >= 0) start[row_i32(a->index, n)[k] * runs + n / a->run + 1]++;
    for (int64_t i = 0; i < X; i++) start[i + 1] += start[i];
    for (int64_t n = 0; n < N; n++)
        for (int64_t k = 0; k < K; k++) {
            const int32_t expert = row_i32(a->index, n)[k];
            row_i32(a->row, n)[k] = -1;
            if (expert < 0) continue;
            const int64_t p = start[expert * runs + n / a->run]++; /* the next free row of the run */
            ASSERT(p < a->choice.dim[0]);
            row_i32(a->row, n)[k] = (int32_t)p;
            choice[p] = (int32_t)(n * K + k);
        }
    for (int64_t i = X; i > 0; i--) start[i] = start[i - 1]; /* each start has become the next one's */
    start[0] = 0;
    return ERR_OK;
}

Err CPU(dispatch_offsets)(Stream *s, const dispatch_offsets_args *a)
{
    const int64_t ranks = a->all.dim[0], runs = (a->offset.dim[0] - 1) / (a->own * ranks);
    int64_t *next = a->offset.data;
    (void)s;
    *next = 0;
    for (int64_t e = a->first; e < a->first + a->own; e++)
        for (int64_t rank = 0; rank < ranks; rank++) {
            const int64_t *from = (const int64_t *)a->all.data + rank * a->all.ld + e * runs;
            for (int64_t r = 0; r < runs; r++, next++) {
                const int64_t rows = from[r + 1] - from[r], room = a->most - next[0];
                next[1] = next[0] + (rows < 0 ? 0 : rows < room ? rows : room);
            }
        }
    return ERR_OK;
}

Err CPU(dispatch_choices)(Stream *s, const dispatch_choices_args *a)
{
    const int64_t ranks = a->all.dim[0], P = a->all_choice.dim[1], runs = (a->offset.dim[0] - 1) / (a->own * ranks);
    const int64_t *offset = a->offset.data;
    int32_t *to = a->choice.data;
    (void)s;
    for (int64_t e = a->first; e < a->first + a->own; e++)
        for (int64_t rank = 0; rank < ranks; rank++, offset += runs) {
            const int64_t from = ((const int64_t *)a->all.data)[rank * a->all.ld + e * runs];
            const int64_t n = offset[runs] - offset[0], first = max64(min64(from, P - n), 0);
            for (int64_t i = 0; i < n && i < P; i++) {
                const int32_t choice = row_i32(a->all_choice, rank)[first + i];
                to[offset[0] + i] = (int32_t)(rank * a->numbers + max64(min64(choice, a->numbers - 1), 0));
            }
        }
    return ERR_OK;
}

/* -1: none of a's groups. */
static int32_t group_of(const choice_groups_args *a, int64_t n, int64_t k)
{
    const int64_t expert = row_i32(a->index, n)[k], group = (expert - a->first) / a->own;
    const bool dropped = expert < 0 || (a->row.data && row_i32(a->row, n)[k] < 0);
    return dropped || expert < a->first || group >= a->count ? -1 : (int32_t)group;
}

Err CPU(choice_groups)(Stream *s, const choice_groups_args *a)
{
    const int64_t N = a->index.dim[0], K = a->index.dim[1];
    (void)s;
    ASSERT(a->group.dim[0] >= N);
    for (int64_t n = 0; n < a->group.dim[0]; n++)
        for (int64_t k = 0; k < K; k++) {
            int32_t *group = row_i32(a->group, n), found = n < N ? group_of(a, n, k) : -1;
            for (int64_t j = 0; j < k && found >= 0; j++)
                if (group[j] == found) found = -1;
            group[k] = found;
        }
    return ERR_OK;
}

/* Place of token n in x. */
static int64_t place_of(const take_rows_args *a, int64_t n)
{
    int32_t place = -1;
    if (!a->row.data) return n;
    for (int64_t k = 0; k < a->row.dim[1]; k++)
        if (row_i32(a->row, n)[k] > place) place = row_i32(a->row, n)[k];
    return place;
}

static void take_part(const void *args, int64_t first, int64_t end)
{
    const take_rows_args *a = args;
    const int64_t D = a->y.dim[1], K = a->topk;
    for (int64_t q = first; q < end; q++) {
        const int64_t choice = ((const int32_t *)a->choice.data)[q], n = choice / K;
        const float *x = row_f32(a->x, place_of(a, n));
        float *y = row_f32(a->y, q);
        if (!a->weight.data) {
            memcpy(y, x, (size_t)D * sizeof *y);
            continue;
        }
        const vf w = vf_set1(row_f32(a->weight, n)[choice % K]);
        for (int64_t i = 0; i < D; i += VEC) row_store(y + i, vf_mul(w, row_load(x + i, D - i)), D - i);
    }
}

Err CPU(take_rows)(Stream *s, const take_rows_args *a)
{
    par_rows(s, rows_used(a->y), a->y.dim[1], take_part, a);
    return ERR_OK;
}

static void permute_part(const void *args, int64_t first, int64_t end)
{
    const permute_rows_args *a = args;
    const int32_t *choice = a->choice.data;
    const size_t bytes = (size_t)a->y.dim[1] * sizeof(float);
    for (int64_t p = first; p < end; p++) memcpy(row_f32(a->y, p), row_f32(a->x, choice[p] / a->topk), bytes);
}

Err CPU(permute_rows)(Stream *s, const permute_rows_args *a)
{
    const int64_t chosen = rows_used(a->x) * a->topk, kept = rows_used(a->choice);
    par_rows(s, chosen < kept ? chosen : kept, a->y.dim[1], permute_part, a);
    return ERR_OK;
}

static void unpermute_part(const void *args, int64_t first, int64_t end)
{
    const unpermute_rows_args *a = args;
    const int64_t D = a->y.dim[1], K = a->row.dim[1];
    for (int64_t n = first; n < end; n++) {
        const int32_t *row = row_i32(a->row, n);
        const float *w = a->weight.data ? row_f32(a->weight, n) : NULL;
        float *y = row_f32(a->y, n);
        for (int64_t i = 0; i < D; i += VEC) {
            const int64_t left = D - i;
            vf sum = a->add ? row_load(y + i, left) : vf_zero();
            for (int64_t k = 0; k < K; k++)
                if (row[k] >= 0) sum = vf_fma(vf_set1(w ? w[k] : 1.0f), row_load(row_f32(a->x, row[k]) + i, left), sum);
            row_store(y + i, sum, left);
        }
    }
}

Err CPU(unpermute_rows)(Stream *s, const unpermute_rows_args *a)
{
    par_rows(s, rows_both(a->y, a->row), a->y.dim[1] * a->row.dim[1], unpermute_part, a);
    return ERR_OK;
}

/* dx may be NULL. */
static float scale_and_dot(float *dx, const float *dy, const float *x, float weight, int64_t D)
{
    const vf w = vf_set1(weight);
    vf sum = vf_zero();
    for (int64_t i = 0; i < D; i += VEC) {
        const int64_t left = D - i;
        const vf g = row_load(dy + i, left), v = row_load(x + i, left);
        sum = vf_fma(g, v, sum);
        if (dx) row_store(dx + i, vf_mul(w, g), left);
    }
    return vf_sum(sum);
}

static void unpermute_bwd_part(const void *args, int64_t first, int64_t end)
{
    const unpermute_bwd_args *a = args;
    const int64_t D = a->dy.dim[1], K = a->row.dim[1];
    for (int64_t n = first; n < end; n++) {
        const int32_t *row = row_i32(a->row, n);
        const float *w = row_f32(a->weight, n), *dy = row_f32(a->dy, n);
        float *dweight = row_f32(a->dweight, n);
        for (int64_t k = 0; k < K; k++) {
            if (row[k] < 0) dweight[k] = 0;
            else
                dweight[k] =
                    scale_and_dot(a->dx.data ? row_f32(a->dx, row[k]) : NULL, dy, row_f32(a->x, row[k]), w[k], D);
        }
    }
}

Err CPU(unpermute_bwd)(Stream *s, const unpermute_bwd_args *a)
{
    par_rows(s, rows_both(a->dy, a->row), a->dy.dim[1] * a->row.dim[1], unpermute_bwd_part, a);
    return ERR_OK;
}

/* ---- parts of sums ---- */

/* Vector i of rows p, p + P, ...: the larger aligned half, then what is left. */
static vf tree_of(const sum_parts_args *a, int64_t p, int64_t i, int64_t first, int64_t count)
{
    const int64_t D = a->y.dim[1], P = a->y.dim[0];
    int64_t half = 1;
    if (count == 1) return row_load(row_f32(a->x, first * P + p) + i, D - i);
    while (2 * half < count) half *= 2;
    return vf_add(tree_of(a, p, i, first, half), tree_of(a, p, i, first + half, count - half));
}

static void sum_parts_part(const void *args, int64_t first, int64_t end)
{
    const sum_parts_args *a = args;
    const int64_t D = a->y.dim[1];
    for (int64_t p = first; p < end; p++)
        for (int64_t i = 0; i < D; i += VEC) row_store(row_f32(a->y, p) + i, tree_of(a, p, i, 0, a->parts), D - i);
}

Err CPU(sum_parts)(Stream *s, const sum_parts_args *a)
{
    ASSERT(a->x.dim[0] == a->y.dim[0] * a->parts);
    par_rows(s, a->y.dim[0], a->y.dim[1] * a->parts, sum_parts_part, a);
    return ERR_OK;
}

/* ---- the gate of a shared expert ---- */

static void gated_fwd_part(const void *args, int64_t first, int64_t end)
{
    const gated_add_fwd_args *a = args;
    const int64_t D = a->y.dim[1];
    for (int64_t n = first; n < end; n++) {
        const vf gate = vf_set1(sigmoid_f32(*row_f32(a->gate, n)));
        const float *x = row_f32(a->x, n), *residual = row_f32(a->residual, n);
        float *y = row_f32(a->y, n);
        for (int64_t i = 0; i < D; i += VEC)
            row_store(y + i, vf_fma(gate, row_load(x + i, D - i), row_load(residual + i, D - i)), D - i);
    }
}

Err CPU(gated_add_fwd)(Stream *s, const gated_add_fwd_args *a)
{
    par_rows(s, rows_both(a->y, a->x), a->y.dim[1], gated_fwd_part, a);
    return ERR_OK;
}

static void gated_bwd_part(const void *args, int64_t first, int64_t end)
{
    const gated_add_bwd_args *a = args;
    for (int64_t n = first; n < end; n++) {
        const float gate = sigmoid_f32(*row_f32(a->gate, n));
        const float dot = scale_and_dot(row_f32(a->dx, n), row_f32(a->dy, n), row_f32(a->x, n), gate, a->dy.dim[1]);
        *row_f32(a->dgate, n) = dot * (gate * (1 - gate));
    }
}

Err CPU(gated_add_bwd)(Stream *s, const gated_add_bwd_args *a)
{
    par_rows(s, rows_both(a->dx, a->dy), a->dy.dim[1], gated_bwd_part, a);
    return ERR_OK;
}
