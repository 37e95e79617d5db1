/*
 * Attention, forward, and the merging of results over disjoint key sets. Layout and bits: attention.h.
 *
 * Per query row, over key blocks of `block` positions, aligned in global position, ascending:
 *
 *   s = scale * chain over C of q k      or softcap * tanh(scale / softcap * chain); masked: -inf
 *   m' = max(m, max s)   r = exp(m - m')   p = exp(s - m')
 *   l  = l r + sum p     16 lanes by key position mod 16, each ascending, then the tree of vf_sum
 *   o  = o r, then one fmaf chain over the keys ascending with p (times 0 or 1 / (1 - p_drop))
 *
 * at the end o / l and m + log l; a sink z counts as one more block with this score and without a value:
 *
 *   m' = max(m, z)   r = exp(m - m')   l = l r + exp(z - m')   o = o r
 *
 * A block that a row does not see leaves its m, l and o as they are, bit for
 * bit: r = exp(0) = 1, every p = 0. A row without any key: o = 0, lse = -inf.
 *
 * Between calls that bring the keys piece by piece o is not divided, and m and l are kept beside it.
 *
 * Mapping  one item = up to PARTS tiles of queries (heads of one group first, then rows) that share each
 *          copied block of keys; items are independent, so threads take them in any order.
 * Work     T^2 (C + V) FLOP a head, plus the masked half of the diagonal blocks (block / T); one exp a score.
 * Traffic  q, o once; k, v once per item; scratch stays in L2.
 * Source   Dao et al. 2022 (FlashAttention); Milakov & Gimelshein 2018 (online softmax).
 */
#include <math.h>
#include <omp.h>
#include <stdatomic.h>
#include <string.h>

#include "base/mathx.h"
#include "cpu/attention.h"
#include "cpu/gemm.h"
#include "cpu/rows.h"
#include "cpu/team.h"

Err CPU(attention_fwd)(Stream *s, const attention_fwd_args *args);

enum { PARTS = 4 };

/* A tile of queries on its way through the keys. */
typedef struct {
    AttnTile tile;
    float *q; /* [k_units][ATTN_QUERIES] */
    float *o; /* [ATTN_QUERIES][v_width]; at first the queries' rows */
    float max[ATTN_QUERIES], sum[ATTN_QUERIES], rescale[ATTN_QUERIES];
} Part;

/* A thread's scratch. */
typedef struct {
    Part part[PARTS];
    AttnKeys keys;
    float *s; /* [block][ATTN_QUERIES] */
} Forward;

/* Lays the scratch out from `base` on; returns its bytes. */
static int64_t forward_layout(Forward *f, const Attn *a, float *base)
{
    int64_t rows = attn_slots(a, a->block < a->k.dim[1] ? a->block : a->k.dim[1]), used = 0;
#define TAKE(p, count) ((p) = (void *)(base + used), used += attn_lanes(count))
    for (int i = 0; i < PARTS; i++) {
        TAKE(f->part[i].q, a->k_units * ATTN_QUERIES);
        TAKE(f->part[i].o, (a->width > a->v_width ? a->width : a->v_width) * ATTN_QUERIES);
    }
    TAKE(f->keys.k, rows * a->k_row);
    TAKE(f->keys.v_lines, form_units(a->form, rows) * a->v_width);
    TAKE(f->keys.position, rows);
    TAKE(f->keys.seen, rows);
    TAKE(f->s, rows * ATTN_QUERIES);
#undef TAKE
    f->keys.v = a->paired ? NULL : f->keys.v_lines;
    f->keys.k_lines = NULL;
    return used * (int64_t)sizeof(float);
}

/* s = scale * s, masked; returns the largest score of each query. */
static vf scale_and_mask(const AttnColumn *c, float *s, const int32_t *seen, int64_t n, float scale, bool mask)
{
    const vf minus_inf = vf_set1(-INFINITY), factor = vf_set1(scale);
    vf max = minus_inf;
    for (int64_t j = 0; j < n; j++, s += ATTN_QUERIES) {
        vf x = vf_mul(vf_load(s), factor);
        if (mask) x = vf_select(attn_visible(c, seen[j]), x, minus_inf);
        vf_store(s, x);
        max = vf_max(max, x);
    }
    return max;
}

/* Products become capped scores. */
static void cap_column(const Attn *a, float *s, int64_t n)
{
    const vf inner = vf_set1(a->scale / a->softcap), cap = vf_set1(a->softcap);
    for (int64_t j = 0; j < n; j++, s += ATTN_QUERIES) vf_store(s, vf_mul(vf_tanh(vf_mul(vf_load(s), inner)), cap));
}

/* s = exp(s - max). Nothing else in this loop: exp is long, and many must be in flight at once. */
static void exp_column(float *s, int64_t n, vf max)
{
    for (int64_t j = 0; j < n; j++, s += ATTN_QUERIES) vf_store(s, vf_exp(vf_sub(vf_load(s), max)));
}

static vf sum_column(const float *s, const int32_t *position, int64_t n)
{
    vf lane[VEC];
    for (int i = 0; i < VEC; i++) lane[i] = vf_zero();
    for (int64_t j = 0; j < n; j++, s += ATTN_QUERIES) {
        vf *sum = &lane[position[j] & (VEC - 1)];
        *sum = vf_add(*sum, vf_load(s));
    }
    for (int d = VEC / 2; d > 0; d /= 2)
        for (int i = 0; i < d; i++) lane[i] = vf_add(lane[i], lane[i + d]);
    return lane[0];
}

static void drop_column(AttnColumn *c, float *s, const int32_t *position, int64_t n)
{
    for (int64_t j = 0; j < n; j++, s += ATTN_QUERIES) vf_store(s, vf_mul(vf_load(s), attn_keep(c, position[j])));
}

/* One block of keys for 16 queries: scores to weights, and the running maximum and sum. */
static void softmax_column(const Attn *a, Part *p, const AttnKeys *keys, float *s, int64_t column)
{
    AttnColumn c;
    attn_column(&c, a, &p->tile, column);
    bool mask = attn_needs_mask(&p->tile, keys);
    vf old = vf_load(p->max + column);
    const bool capped = a->softcap > 0;
    if (capped) cap_column(a, s + column, keys->n);
    vf max = vf_max(old, scale_and_mask(&c, s + column, keys->seen, keys->n, capped ? 1 : a->scale, mask));
    /* Queries that have seen no key yet: subtract 0, so that exp(-inf) = 0 and not exp(NaN). */
    vf base = vf_select(vf_ge(vf_set1(-INFINITY), max), vf_zero(), max);
    vf r = vf_exp(vf_sub(old, base));
    exp_column(s + column, keys->n, base);
    vf sum = sum_column(s + column, keys->position, keys->n);
    if (c.threshold) drop_column(&c, s + column, keys->position, keys->n);
    if (a->paired) CPU(attn_keys_paired)(a, s + column, s + column, keys->n);
    vf_store(p->max + column, max);
    vf_store(p->rescale + column, r);
    vf_store(p->sum + column, vf_fma(vf_load(p->sum + column), r, sum));
}

static void scale_row(float *o, int64_t width, float factor)
{
    for (int64_t c = 0; c < width; c += VEC) vf_store(o + c, vf_mul(vf_load(o + c), vf_set1(factor)));
}

/* The keys are of one block. */
static void part_block(const Attn *a, Part *p, const AttnKeys *block, float *s)
{
    int64_t n = p->tile.n, lanes = attn_lanes(n);
    AttnKeys keys = CPU(attn_seen)(a, &p->tile, block);
    if (keys.n == 0) return;
    TileGemm scores = { .m = keys.n,
                        .n = lanes,
                        .k = a->k_units,
                        .a = keys.k,
                        .a_row = a->k_row,
                        .a_k = 1,
                        .b = p->q,
                        .ldb = ATTN_QUERIES,
                        .c = s,
                        .ldc = ATTN_QUERIES,
                        .form = a->form };
    CPU(tile_gemm)(&scores);
    for (int64_t column = 0; column < lanes; column += VEC) softmax_column(a, p, &keys, s, column);
    for (int64_t i = 0; i < n; i++) scale_row(p->o + i * a->v_width, a->v_width, p->rescale[i]);
    TileGemm values = { .m = n,
                        .n = a->v_width,
                        .k = form_units(a->form, keys.n),
                        .a = s,
                        .a_row = 1,
                        .a_k = ATTN_QUERIES,
                        .b = keys.v_lines,
                        .ldb = a->v_width,
                        .c = p->o,
                        .ldc = a->v_width,
                        .beta = true,
                        .form = a->form };
    CPU(tile_gemm)(&values);
}

/* Takes over the state that an earlier call left; or (`leave`) leaves it for a later one. */
static void part_pass_on(const Attn *a, Part *p, const attention_fwd_args *args, bool leave)
{
    const AttnTile *t = &p->tile;
    const size_t bytes = (size_t)a->V * sizeof(float);
    for (int64_t i = 0; i < t->n; i++) {
        float *o = attn_row(args->o, t->b, t->row + i, t->head), *kept = p->o + i * a->v_width;
        float *max = attn_value(args->max, t->b, t->row + i, t->head);
        float *sum = attn_value(args->sum, t->b, t->row + i, t->head);
        memcpy(leave ? o : kept, leave ? kept : o, bytes);
        *(leave ? max : &p->max[i]) = leave ? p->max[i] : *max;
        *(leave ? sum : &p->sum[i]) = leave ? p->sum[i] : *sum;
    }
}

static void part_begin(const Attn *a, Part *p, const attention_fwd_args *args)
{
    CPU(attn_rows)(a, p->o, p->q, a->q, &p->tile, false);
    memset(p->o, 0, (size_t)(ATTN_QUERIES * a->v_width) * sizeof(float));
    memset(p->sum, 0, sizeof p->sum);
    for (int i = 0; i < ATTN_QUERIES; i++) p->max[i] = -INFINITY;
    if (args->resumed) part_pass_on(a, p, args, false);
}

/* The largest score of the tile's rows so far, to its head's. A row whose sum is NaN had a score that is not finite. */
static void part_logit(const Part *p, const attention_fwd_args *args)
{
    int64_t most = 0;
    for (int64_t i = 0; i < p->tile.n; i++) {
        const int64_t order = logit_order(p->sum[i] != p->sum[i] ? p->sum[i] : p->max[i]);
        if (order > most) most = order;
    }
    _Atomic int64_t *head = (_Atomic int64_t *)args->logit_max.data + p->tile.head;
    int64_t old = atomic_load(head);
    while (most > old && !atomic_compare_exchange_weak(head, &old, most)) {}
}

/* The sink's score, to the maximum and sum of row i; o is scaled. */
static void add_sink(const Attn *a, Part *p, int64_t i, float score)
{
    const float old = p->max[i], max = old > score ? old : score, rescale = (float)m_exp(old - max);
    p->max[i] = max;
    p->sum[i] = fmaf(p->sum[i], rescale, (float)m_exp(score - max));
    scale_row(p->o + i * a->v_width, a->v_width, rescale);
}

static void part_end(const Attn *a, Part *p, const attention_fwd_args *args)
{
    const AttnTile *t = &p->tile;
    for (int64_t i = 0; i < t->n; i++) {
        if (args->sink.data) add_sink(a, p, i, any_load(args->sink, t->head));
        const float sum = p->sum[i];
        const Row out = { attn_row(args->o, t->b, t->row + i, t->head), args->o.dtype == BF16 };
        const float *in = p->o + i * a->v_width;
        bool empty = sum == 0; /* a row with a score sums to 1 or more: its largest gives 1 */
        *attn_value(args->lse, t->b, t->row + i, t->head) = empty ? -INFINITY : p->max[i] + (float)m_log(sum);
        vf divisor = vf_set1(empty ? 1 : sum);
        for (int64_t c = 0; c < a->V; c += VEC) {
            vf x = vf_add(vf_div(vf_load(in + c), divisor), vf_zero());
            row_put(out, c, x, a->V - c);
        }
    }
}

/* Tiles of one (sample, key head) are numbered rows first descending, heads of the group inside. */
typedef struct {
    int64_t tiles[2]; /* how many tiles the rows of each span make */
    int64_t items;    /* how many one (sample, key head) has */
} Plan;

static Plan plan_of(const Attn *a)
{
    Plan p;
    for (int s = 0; s < 2; s++) p.tiles[s] = (a->q_span[s].count + ATTN_QUERIES - 1) / ATTN_QUERIES;
    p.items = ((p.tiles[0] + p.tiles[1]) * a->group + PARTS - 1) / PARTS;
    return p;
}

static void plan_tile(const Attn *a, const Plan *p, AttnTile *out, int64_t b, int64_t head, int64_t number)
{
    int64_t i = p->tiles[0] + p->tiles[1] - 1 - number / a->group; /* the longest first */
    const AttnSpan *span = &a->q_span[i >= p->tiles[0]];
    if (i >= p->tiles[0]) i -= p->tiles[0];
    int64_t left = span->count - i * ATTN_QUERIES;
    CPU(attn_tile)
    (a, out, b, head * a->group + number % a->group, span->row + i * ATTN_QUERIES,
     left < ATTN_QUERIES ? left : ATTN_QUERIES);
}

static void forward_item(const Attn *a, const Plan *plan, Forward *f, const attention_fwd_args *args, int64_t item)
{
    int64_t K = a->k.dim[2], b = item % (a->q.dim[0] * K) / K, head = item % K;
    int64_t number = item / (a->q.dim[0] * K) * PARTS, low = INT64_MAX, end = 0;
    int parts = 0;
    for (; parts < PARTS && number + parts < (plan->tiles[0] + plan->tiles[1]) * a->group; parts++) {
        Part *p = &f->part[parts];
        plan_tile(a, plan, &p->tile, b, head, number + parts);
        part_begin(a, p, args);
        if (p->tile.low_min < low) low = p->tile.low_min;
        if (p->tile.first + p->tile.n > end) end = p->tile.first + p->tile.n;
    }
    for (int64_t at = low, stop; at < end; at = stop) {
        stop = at + a->block - at % a->block; /* the next multiple of block */
        int64_t i0 = CPU(attn_keys_before)(a, at), i1 = CPU(attn_keys_before)(a, stop < end ? stop : end);
        if (i0 == i1) continue;
        const int64_t taken = CPU(attn_keys)(a, &f->keys, b, head, i0, i1, attn_slots(a, i1 - i0));
        ASSERT(taken == i1);
        for (int i = 0; i < parts; i++) part_block(a, &f->part[i], &f->keys, f->s);
    }
    for (int i = 0; i < parts; i++) {
        if (args->logit_max.data) part_logit(&f->part[i], args);
        if (args->unfinished) part_pass_on(a, &f->part[i], args, true);
        else part_end(a, &f->part[i], args);
    }
}

Err CPU(attention_fwd)(Stream *s, const attention_fwd_args *args)
{
    Attn a = ATTN_OF(args);
    if ((args->resumed || args->unfinished) && (!args->max.data || !args->sum.data))
        return err_set(ERR_SHAPE, "attention_fwd: keys in several calls need max and sum");
    if ((args->resumed || args->unfinished) && args->o.dtype != F32)
        return err_set(ERR_SHAPE, "attention_fwd: keys in several calls need o in f32");
    TRY(CPU(attn_open)(&a, s->dev, args->o));
    Plan plan = plan_of(&a);
    Forward unused;
    int64_t items = plan.items * a.q.dim[0] * a.k.dim[2];
    int64_t bytes = forward_layout(&unused, &a, (float *)s->dev->workspace);
    int threads;
    atomic_llong next = 0;
    TRY(CPU(attn_threads)(s->dev, items, bytes, &threads));
#pragma omp parallel num_threads(team_of(s->dev, threads))
    if (omp_get_thread_num() < threads) {
        Forward f;
        forward_layout(&f, &a, (float *)(s->dev->workspace + omp_get_thread_num() * bytes));
        for (int64_t i; (i = atomic_fetch_add(&next, 1)) < items;) forward_item(&a, &plan, &f, args, i);
    }
    return ERR_OK;
}
