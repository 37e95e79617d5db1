/*
 * From gradient accumulators to new weights: exact statistics, one decision for all tensors, AdamW, QK-clip.
 *
 * The norm is a sum over everything that all ranks own, so it must not know any order: each gradient,
 * rounded to float, is an integer A in units of 2^-shift, and A^2 is summed as an integer.
 * With A = a1 2^32 + a0:
 *
 *   A^2 = a0^2 + 2 a0 a1 2^32 + a1^2 2^64        64-bit products, whose 32-bit halves go to four limbs
 *
 * The square of a float below 2^43 is an exact double. It is cut into a multiple of 2^44 and a rest, whose sums over
 * 1,024 squares are exact doubles, too, and take a quarter of the time. What is added is the same integer.
 *
 * A < 2^62 is needed; what is not below (or NaN) adds nothing and shows in the maximum, a float: NaN and Inf
 * give Inf. A float that was never an integer has A = g 2^shift rounded to one, which keeps every
 * layout-free property and loses less than 2^-36 of the largest element. A lane of a limb grows by less than
 * 2^34 an element, so that 2^33 elements a call are safe; sumsq is left with its first three limbs below
 * 2^32, a form which the number alone determines.
 *
 * Traffic per parameter: grad_stats reads 8 bytes (4 for floats); adamw reads w, m, v, g and writes w, m, v: 32
 * bytes (28), with moments in bf16 24 (20). Both make one pass and are bound by memory.
 */
#include "base/int64.h"
#include "cpu/rows.h"

enum { LIMBS = 4, FLOAT_INF_BITS = 0x7F800000 };

#define FIXED_LIMIT 0x1p62f

/* ---- statistics ---- */

typedef struct {
    vl limb[LIMBS];
} StatLanes;

/* Carries between limbs until all but the last are below 2^32. The number they stand for stays. */
static void limbs_carry(int64_t *limb)
{
    for (int i = 0; i + 1 < LIMBS; i++) {
        limb[i + 1] += limb[i] >> 32;
        limb[i] &= 0xFFFFFFFF;
    }
}

/* v: gradients in units of 2^-shift. */
VEC_FN void stats_square(StatLanes *t, vf v)
{
    vl A = vl_from_f(vf_abs(vf_select(vf_fix_bad(v, FIXED_LIMIT), vf_zero(), v)));
    vl a1 = vl_shr32(A), low = vl_mul32(A, A), mid = vl_mul32(A, a1), high = vl_mul32(a1, a1);
    mid = vl_add(mid, mid); /* below 2^63 * 2: a1 < 2^30 */
    t->limb[0] = vl_add(t->limb[0], vl_low32(low));
    t->limb[1] = vl_add(t->limb[1], vl_add(vl_shr32(low), vl_low32(mid)));
    t->limb[2] = vl_add(t->limb[2], vl_add(vl_shr32(mid), vl_low32(high)));
    t->limb[3] = vl_add(t->limb[3], vl_shr32(high));
}

/* Maxima are compared and sent as the bits of a float >= 0, which order as it does. */
static int64_t float_bits(float x)
{
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Sums of squares of integers below SMALL_LIMIT: value = high + low, high in multiples of 2^SMALL_SPLIT. */
enum { SMALL_COUNT = 1024, SMALL_SPLIT = 44 };
#define SMALL_LIMIT 0x1p43f

static void stats_small(int64_t *limb, const float *v, int64_t count)
{
    const double round = 0x1.8p52 * (double)(1LL << SMALL_SPLIT); /* adding it rounds to multiples of 2^SMALL_SPLIT */
    double high[VEC] = { 0 }, low[VEC] = { 0 };
    for (int64_t i = 0; i < count; i += VEC) {
#pragma omp simd
        for (int j = 0; j < VEC; j++) {
            const double square = (double)v[i + j] * (double)v[i + j], part = square + round - round;
            high[j] += part;
            low[j] += square - part;
        }
    }
    for (int j = 0; j < VEC; j++) {
        const int64_t units = (int64_t)(high[j] * 0x1p-44); /* below 2^52 */
        limb[0] += (int64_t)low[j];
        limb[1] += (units & 0xFFFFF) << (SMALL_SPLIT - 32);
        limb[2] += units >> (64 - SMALL_SPLIT);
    }
    limbs_carry(limb);
}

/* limb += the squares of what does not go by lanes. */
static int64_t stats_fixed(StatLanes *t, int64_t *limb, const int64_t *g, float unit, int64_t first, int64_t end)
{
    float v[SMALL_COUNT] __attribute__((aligned(64)));
    vf max = vf_zero();
    for (int64_t i = first, count; i < end; i += count) {
        vf most = vf_zero();
        count = 0;
        for (; count < SMALL_COUNT && i + count < end; count += VEC) {
            const vf x = vf_abs(vf_from_l(fixed_load(g + i + count, end - i - count)));
            most = vf_max(x, most);
            vf_store(v + count, x);
        }
        max = vf_max(most, max);
        if (vf_hmax(most) < SMALL_LIMIT) stats_small(limb, v, count);
        else
            for (int64_t k = 0; k < count; k += VEC) stats_square(t, vf_load(v + k));
    }
    return float_bits(vf_hmax(max) * unit);
}

/* llrint of x >= 0, as a float, which any integer that it gives is. */
VEC_FN vf round_positive(vf x)
{
    const vf magic = vf_set1(0x1p23f);
    return vf_select(vf_lt(x, magic), vf_sub(vf_add(x, magic), magic), x);
}

static int64_t stats_plain(StatLanes *t, int64_t *limb, const float *g, float scale, int64_t first, int64_t end)
{
    float v[SMALL_COUNT] __attribute__((aligned(64)));
    vf max = vf_zero();
    int bad = 0;
    for (int64_t i = first, count; i < end; i += count) {
        vf most = vf_zero();
        count = 0;
        for (; count < SMALL_COUNT && i + count < end; count += VEC) {
            const vf x = vf_abs(row_load(g + i + count, end - i - count));
            bad |= vm_any(vf_fix_bad(x, __builtin_inff()));
            most = vf_max(x, most);
            vf_store(v + count, vf_mul(x, vf_set1(scale)));
        }
        max = vf_max(most, max);
        if (!bad && vf_hmax(most) * scale < SMALL_LIMIT) {
            for (int64_t k = 0; k < count; k += VEC) vf_store(v + k, round_positive(vf_load(v + k)));
            stats_small(limb, v, count);
        } else {
            for (int64_t k = 0; k < count; k += VEC) stats_square(t, vf_load(v + k));
        }
    }
    return bad ? FLOAT_INF_BITS : float_bits(vf_hmax(max));
}

/* The statistics of one tensor under way. */
typedef struct {
    int64_t *max, *sumsq;
    const int64_t *fixed; /* this or plain is NULL */
    const float *plain;
    int shift;
} Stats;

static void grad_stats_part(const void *args, int64_t first, int64_t end)
{
    const Stats *a = args;
    int64_t limb[LIMBS] = { 0 }, lane[VEC];
    StatLanes t;
    for (int i = 0; i < LIMBS; i++) t.limb[i] = vl_zero();
    int64_t most = a->plain ? stats_plain(&t, limb, a->plain, fix_scale(a->shift), first, end)
                            : stats_fixed(&t, limb, a->fixed, fix_scale(-a->shift), first, end);
    for (int i = 0; i < LIMBS; i++) {
        vl_store(lane, t.limb[i]);
        for (int j = 0; j < VEC; j++) limb[i] += lane[j];
    }
    limbs_carry(limb);
    for (int i = 0; i < LIMBS; i++) __atomic_fetch_add(&a->sumsq[i], limb[i], __ATOMIC_RELAXED);
    int64_t seen = __atomic_load_n(a->max, __ATOMIC_RELAXED);
    while (most > seen && !__atomic_compare_exchange_n(a->max, &seen, most, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

Err CPU(grad_stats)(Stream *s, const grad_stats_args *a)
{
    const FlatPart *parts = a->parts.data;
    for (int64_t i = 0; i < a->parts.dim[0]; i++) {
        const FlatPart *p = &parts[i];
        if (!(p->flags & FLAT_COUNTS)) continue;
        const bool plain = a->g.dtype == F32;
        const Stats t = { .max = (int64_t *)a->max.data + p->number,
                          .sumsq = (int64_t *)a->sumsq.data + p->number * a->sumsq.ld,
                          .fixed = plain ? NULL : (const int64_t *)a->g.data + p->grad,
                          .plain = plain ? (const float *)a->g.data + p->grad : NULL,
                          .shift = ((const int32_t *)a->shift.data)[p->number] };
        par_columns(s, p->count, 1, grad_stats_part, &t);
        limbs_carry(t.sumsq);
    }
    return ERR_OK;
}

/* ---- the decision ---- */

enum {
    SHIFT_MIN = -60,
    SHIFT_MAX = 100,   /* 2^shift, 2^-shift and 2^(-2 shift) stay normal numbers */
    SHIFT_SPARE = 10,  /* bits by which a gradient may grow from one step to the next */
    SHIFT_RETREAT = 12 /* after an overflow, when nothing is known of the size */
};

/* Smallest e with x <= 2^e, x > 0. */
static int ceil_log2(int64_t x) { return x == 1 ? 0 : 64 - __builtin_clzll((uint64_t)x - 1); }

/* The same of the finite positive float with these bits. */
static int ceil_log2_float(int64_t bits)
{
    if (bits < 1 << 23) return ceil_log2(bits) - 149;
    return (int)(bits >> 23) - 127 + ((bits & ((1 << 23) - 1)) != 0);
}

/* Meaning of a tensor's maximum: overflow of its fixed point, or a gradient that is not finite. */
typedef struct {
    int overflow, nonfinite, zero;
    int log2_max; /* max |g| <= 2^log2_max; when there is one and it is finite */
} MaxFacts;

static MaxFacts max_facts(int64_t max, int shift)
{
    if (max == 0) return (MaxFacts){ .zero = 1 };
    if (max >= FLOAT_INF_BITS) return (MaxFacts){ .nonfinite = 1 };
    int e = ceil_log2_float(max);
    return (MaxFacts){ .overflow = e + shift > 61, .log2_max = e };
}

/* Room for `headroom_bits` bits of leaves and SHIFT_SPARE bits of growth above today's maximum. */
static int shift_next(int shift, MaxFacts f, int retreat, const step_finish_args *a)
{
    int next = 62 - a->headroom_bits - SHIFT_SPARE - f.log2_max;
    if (f.zero || f.nonfinite) next = shift;
    if (retreat) next = shift - SHIFT_RETREAT;
    return next < SHIFT_MIN ? SHIFT_MIN : next > SHIFT_MAX ? SHIFT_MAX : next;
}

/* The number that four limbs stand for, times 2^(-2 shift). Ranks' limbs were added, so carry first. */
static double limbs_value(const int64_t *sums, int shift)
{
    int64_t limb[LIMBS];
    memcpy(limb, sums, sizeof limb);
    limbs_carry(limb);
    double x = 0.0, unit = (double)fix_scale(-shift);
    for (int i = LIMBS; i-- > 0;) x = x * 0x1p32 + (double)limb[i];
    return x * (unit * unit);
}

/* Gradients carry the factor 1 / nominal; the mean is over the tokens that count. */
static void step_scale(StepValues *v, double norm)
{
    double mean = v->counted > 0 ? (double)v->nominal / (double)v->counted * (double)v->unscale : 0.0;
    double clip = v->clip > 0.0f ? (double)v->clip / (norm * mean + 1e-6) : 1.0;
    v->grad_norm = v->overflow ? 0.0f : (float)(norm * mean);
    v->grad_scale = v->skip ? 0.0f : (float)(mean * (clip < 1.0 ? clip : 1.0));
}

/*
 * overflow: a leaf or a sum did not fit; the step is to be done again with next_shift. (The integers then say
 * nothing about the size, so all shifts retreat; a float's maximum is known, and its shift right at once.)
 * nonfinite: the loss is, or a float gradient. skip: one of the two, no room, or no token counts.
 */
Err CPU(step_finish)(Stream *s, const step_finish_args *a)
{
    const int32_t *shift = a->shift.data;
    const int64_t *max = a->max.data, *sums = a->loss_sums.data;
    int raised = *(const int32_t *)a->overflow.data != 0, overflow = raised, nonfinite = sums[2] != 0;
    double squares = 0.0;
    (void)s;
    fp_reset();
    for (int64_t i = 0; i < a->max.dim[0]; i++) {
        MaxFacts f = max_facts(max[i], shift[i]);
        overflow |= f.overflow;
        nonfinite |= f.nonfinite;
        squares += limbs_value((const int64_t *)a->sumsq.data + i * a->sumsq.ld, shift[i]);
    }
    for (int64_t i = 0; i < a->max.dim[0]; i++) {
        int retreat = overflow && a->acc == I64;
        ((int32_t *)a->next_shift.data)[i] = shift_next(shift[i], max_facts(max[i], shift[i]), retreat, a);
    }
    StepValues *v = a->step;
    v->loss_fixed = sums[0];
    v->counted = sums[1];
    v->overflow = overflow;
    v->nonfinite = nonfinite;
    v->loss_nonfinite = sums[2] != 0;
    v->over_limit = a->over_limit.data && *(const int32_t *)a->over_limit.data != 0;
    v->skip = overflow || nonfinite || v->over_limit || v->counted <= 0;
    step_scale(v, __builtin_sqrt(squares));
    return ERR_OK;
}

/* ---- AdamW ---- */

/*
 * Elementwise, every operation rounded to float in this order:
 *
 *   g = (float)G * 2^-shift * grad_scale           (float accumulator: G * grad_scale)
 *   m = fma(beta1, m, (1 - beta1) * g)
 *   v = fma(beta2, v, (1 - beta2) * (g * g))
 *   u = (m * (1 / correct1)) / (sqrt(v * (1 / correct2)) + eps)
 *   w = w - lr * fma(decay, w, u)                  (product and difference fused)
 *
 * Of matrices of blocks lr and eps are first multiplied by hidden_rate.
 */
typedef struct {
    vf beta1, rest1, beta2, rest2, inverse1, inverse2, eps, decay, lr;
} AdamConstants;

/* Begin of one tensor in each buffer. */
typedef struct {
    const adamw_args *op;
    const FlatPart *part;
    float *w;
    Tensor m, v;
    Tensor copy; /* absent: there is none */
} Adam;

static AdamConstants adam_constants(const adamw_args *a, const FlatPart *p)
{
    const StepValues *v = a->step;
    const float share = p->flags & FLAT_HIDDEN ? a->hidden_rate : 1.0f;
    return (AdamConstants){ .beta1 = vf_set1(a->beta1),
                            .rest1 = vf_set1(1.0f - a->beta1),
                            .beta2 = vf_set1(a->beta2),
                            .rest2 = vf_set1(1.0f - a->beta2),
                            .inverse1 = vf_set1(1.0f / v->correct1),
                            .inverse2 = vf_set1(1.0f / v->correct2),
                            .eps = vf_set1(a->eps * share),
                            .decay = vf_set1(p->flags & FLAT_DECAYS ? a->decay : 0),
                            .lr = vf_set1(v->lr * share) };
}

/* Copy of a tensor that layers read; absent where that is w itself. */
static Tensor part_copy(Tensor copy, const FlatPart *p)
{
    if (!copy.data) return copy;
    if (p->flags & FLAT_WIDE) return tensor_of((uint16_t *)copy.data + p->value, F32, p->count);
    return tensor_row_slice(copy, p->value, p->count);
}

static void adam_copy(Tensor copy, const float *w, int64_t first, int64_t end)
{
    const Row to = { copy.data, copy.dtype == BF16 };
    if (copy.dtype == F16)
        for (int64_t i = first; i < end; i++) any_store(copy, i, w[i]);
    else
        for (int64_t i = first; i < end; i += VEC) row_put(to, i, row_load(w + i, end - i), end - i);
}

/* Elements that pass at a time through the nearest cache, from which what becomes of them is read again. */
enum { RUN = 512 };

VEC_FN void adam_lanes(const AdamConstants *c, vf g, float *pw, float *pm, float *pv, int64_t left)
{
    vf w = row_load(pw, left);
    vf m = vf_fma(c->beta1, row_load(pm, left), vf_mul(c->rest1, g));
    vf v = vf_fma(c->beta2, row_load(pv, left), vf_mul(c->rest2, vf_mul(g, g)));
    vf u = vf_div(vf_mul(m, c->inverse1), vf_add(vf_sqrt(vf_mul(v, c->inverse2)), c->eps));
    row_store(pm, m, left);
    row_store(pv, v, left);
    w = vf_fnma(c->lr, vf_fma(c->decay, w, u), w);
    row_store(pw, w, left);
}

/* Integers are two lines for each of the others: the processor's own prefetch of four streams falls behind. */
VEC_FN void grad_prefetch(const Grads *g, int64_t at)
{
    enum { AHEAD = 8 * VEC };
    if (!g->fixed) return;
    __builtin_prefetch(g->fixed + at + AHEAD);
    __builtin_prefetch(g->fixed + at + AHEAD + VEC / 2);
}

/* Elements [first, end), of which the first has its moments at m[0] and v[0]. */
static void adam_run(const Adam *a, const AdamConstants *c, const Grads *g, int64_t first, int64_t end, float *m,
                     float *v)
{
    for (int64_t i = first; i < end; i += VEC) {
        const int64_t left = end - i, at = i - first;
        grad_prefetch(g, a->part->grad + i);
        adam_lanes(c, grad_load(g, a->part->grad + i, left), a->w + i, m + at, v + at, left);
    }
}

/* The same with moments in bf16. */
static void adam_narrow(const Adam *a, const AdamConstants *c, const Grads *g, int64_t first, int64_t end)
{
    float m[RUN], v[RUN];
    uint16_t *pm = (uint16_t *)a->m.data + first, *pv = (uint16_t *)a->v.data + first;
    const int64_t n = end - first;
    for (int64_t k = 0; k < n; k++) m[k] = bf16_to_float(pm[k]), v[k] = bf16_to_float(pv[k]);
    adam_run(a, c, g, first, end, m, v);
    for (int64_t k = 0; k < n; k++) pm[k] = bf16_from_float(m[k]), pv[k] = bf16_from_float(v[k]);
}

static void adamw_part(const void *args, int64_t first, int64_t end)
{
    const Adam *a = args;
    const Grads g = grads_of(a->op->g, a->op->shift, a->part->number, a->op->step);
    const AdamConstants c = adam_constants(a->op, a->part);
    float *m = a->m.data, *v = a->v.data;
    for (int64_t i = first, next; i < end; i = next) {
        next = min64(i + RUN, end);
        if (a->m.dtype == F32) adam_run(a, &c, &g, i, next, m + i, v + i);
        else adam_narrow(a, &c, &g, i, next);
        if (a->copy.data) adam_copy(a->copy, a->w, i, next);
    }
}

static Err adam_moments(const adamw_args *a)
{
    if (a->m.dtype == a->v.dtype && a->m.dtype != F16) return ERR_OK;
    return err_set(ERR_SHAPE, "adamw: m is %s, v %s", dtype_name(a->m.dtype), dtype_name(a->v.dtype));
}

Err CPU(adamw)(Stream *s, const adamw_args *a)
{
    const FlatPart *parts = a->parts.data;
    TRY(adam_moments(a));
    if (a->step->skip) return ERR_OK;
    for (int64_t i = 0; i < a->parts.dim[0]; i++) {
        const FlatPart *p = &parts[i];
        const bool copy = a->copy.data != NULL;
        if (p->flags & FLAT_MUON) continue;
        const Adam t = { .op = a,
                         .part = p,
                         .w = (float *)a->w.data + (copy ? p->shard : p->value),
                         .m = tensor_row_slice(a->m, p->shard, p->count),
                         .v = tensor_row_slice(a->v, p->v, p->count),
                         .copy = part_copy(a->copy, p) };
        par_columns(s, p->count, 1, adamw_part, &t);
    }
    return ERR_OK;
}

/*
 * ---- Lion, and SGD with momentum ----
 *
 *   g as above
 *   Lion:  u = the sign of fma(beta1, m, (1 - beta1) * g); m = fma(beta2, m, (1 - beta2) * g)
 *   SGD:   m = u = fma(beta1, m, g)
 *   w = w - lr * fma(decay, w, u)                  (product and difference fused)
 */
typedef struct {
    vf beta1, rest1, beta2, rest2, decay, lr;
} OneMomentConstants;

typedef struct {
    const one_moment_args *op;
    const FlatPart *part;
    float *w, *m;
    Tensor copy; /* absent: there is none */
} OneMoment;

static OneMomentConstants one_moment_constants(const one_moment_args *a, const FlatPart *p)
{
    return (OneMomentConstants){ .beta1 = vf_set1(a->beta1),
                                 .rest1 = vf_set1(1.0f - a->beta1),
                                 .beta2 = vf_set1(a->beta2),
                                 .rest2 = vf_set1(1.0f - a->beta2),
                                 .decay = vf_set1(p->flags & FLAT_DECAYS ? a->decay : 0),
                                 .lr = vf_set1(a->step->lr * (p->flags & FLAT_HIDDEN ? a->hidden_rate : 1.0f)) };
}

VEC_FN vf sign_of(vf x)
{
    const vf zero = vf_zero(), below = vf_select(vf_lt(x, zero), vf_set1(-1.0f), zero);
    return vf_select(vf_lt(zero, x), vf_set1(1.0f), below);
}

VEC_FN void one_moment_lanes(const OneMomentConstants *c, vf g, float *pw, float *pm, int64_t left, bool lion)
{
    const vf w = row_load(pw, left), m = row_load(pm, left);
    const vf next = lion ? vf_fma(c->beta2, m, vf_mul(c->rest2, g)) : vf_fma(c->beta1, m, g);
    const vf u = lion ? sign_of(vf_fma(c->beta1, m, vf_mul(c->rest1, g))) : next;
    row_store(pm, next, left);
    row_store(pw, vf_fnma(c->lr, vf_fma(c->decay, w, u), w), left);
}

static void one_moment_part(const void *args, int64_t first, int64_t end)
{
    const OneMoment *a = args;
    const Grads g = grads_of(a->op->g, a->op->shift, a->part->number, a->op->step);
    const OneMomentConstants c = one_moment_constants(a->op, a->part);
    for (int64_t i = first, next; i < end; i = next) {
        next = min64(i + RUN, end);
        for (int64_t j = i; j < next; j += VEC)
            one_moment_lanes(&c, grad_load(&g, a->part->grad + j, next - j), a->w + j, a->m + j, next - j, a->op->lion);
        if (a->copy.data) adam_copy(a->copy, a->w, i, next);
    }
}

Err CPU(one_moment)(Stream *s, const one_moment_args *a)
{
    const FlatPart *parts = a->parts.data;
    if (a->step->skip) return ERR_OK;
    for (int64_t i = 0; i < a->parts.dim[0]; i++) {
        const FlatPart *p = &parts[i];
        const bool copy = a->copy.data != NULL;
        const OneMoment t = { .op = a,
                              .part = p,
                              .w = (float *)a->w.data + (copy ? p->shard : p->value),
                              .m = (float *)a->m.data + p->shard,
                              .copy = part_copy(a->copy, p) };
        par_columns(s, p->count, 1, one_moment_part, &t);
    }
    return ERR_OK;
}

/* ---- QK-clip ---- */

/* Factor of a row's elements. */
static float qk_factor(const qk_clip_args *a, int64_t row)
{
    const int kind = qk_row_kind(&a->rows, row);
    if (kind < 0) return 1;
    const float logit = qk_row_logit(&a->rows, row, a->logit_max.data);
    if (!(logit > a->threshold)) return 1;
    const double power = kind == QK_QUERY ? (double)a->alpha : kind == QK_KEY ? 1 - (double)a->alpha : 1;
    return (float)m_pow((double)a->threshold / (double)logit, power);
}

/* Rows of the whole matrix, as far as w has them. */
static void qk_clip_rows(const void *args, int64_t first, int64_t end)
{
    const qk_clip_args *a = args;
    const int64_t start = a->first / a->columns;
    for (int64_t row = start + first; row < start + end; row++) {
        const float factor = qk_factor(a, row);
        const int64_t at = row * a->columns - a->first, count = tensor_count(a->w);
        const int64_t from = at > 0 ? at : 0, to = at + a->columns < count ? at + a->columns : count;
        float *w = a->w.data;
        if (factor == 1) continue;
        for (int64_t i = from; i < to; i++) w[i] *= factor;
        if (a->copy.data) adam_copy(a->copy, w, from, to);
    }
}

Err CPU(qk_clip)(Stream *s, const qk_clip_args *a)
{
    if (a->step->skip) return ERR_OK;
    const int64_t end = a->first + a->w.dim[0];
    const int64_t rows = (end + a->columns - 1) / a->columns - a->first / a->columns;
    par_rows(s, rows, a->columns, qk_clip_rows, a);
    return ERR_OK;
}
