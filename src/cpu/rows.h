/*
 * Shared parts of the ops of src/cpu: cutting work into threads, rows of a tensor, adding to a gradient
 * accumulator, and the binary tree.
 *
 * Threads cut outputs only (rows, or columns in whole vectors), never a sum, and every part starts with the
 * same floating-point state; so neither the number of threads nor the cut can change a bit.
 */
#ifndef MEGATRAIN_CPU_ROWS_H
#define MEGATRAIN_CPU_ROWS_H

#include <omp.h>
#include <string.h>

#include "base/half.h"
#include "base/mathx.h"
#include "cpu/team.h"
#include "cpu/vec.h"
#include "device/ops.h"

/* The ops themselves; table.c collects them. */
#define OP(name, flop, args) Err CPU(name)(Stream *, const name##_args *);
#include "device/ops.def"
#undef OP

/* One number's, where there is one a row: of routers and gates. */
static inline float sigmoid_f32(float x) { return (float)(1 / (1 + m_exp(-(double)x))); }

/* log(1 + exp(x)), exact to the last digits on both sides. */
static inline double softplus(double x)
{
    const double u = m_exp(x < 0 ? x : -x);
    const double tail = u < 1e-5 ? u * (1 - u / 2) : m_log(1 + u);
    return (x > 0 ? x : 0) + tail;
}

/* Does the items [first, end). */
typedef void PartFn(const void *args, int64_t first, int64_t end);

/* A thread's: arrays of one part that are too large for a stack. It holds nothing from one part to the next. */
enum { CPU_SCRATCH_BYTES = 64 << 10 };
extern _Thread_local char cpu_scratch[CPU_SCRATCH_BYTES];

enum { PAR_GRAIN = 16384 }; /* with fewer elements another thread costs more than it saves (about 5 us) */

/* Sets round to nearest, keeps denormals and takes no traps, whatever somebody else left the thread with. */
static inline void fp_reset(void)
{
#ifdef __SSE__
    __builtin_ia32_ldmxcsr(0x1F80);
#endif
}

/* Does all of `n` items of `width` elements each, in parts that begin at multiples of `unit` items. */
static inline void par_units(const Stream *s, int64_t n, int64_t width, int64_t unit, PartFn *fn, const void *args)
{
    const int64_t units = (n + unit - 1) / unit, grains = n * width / PAR_GRAIN + 1;
    const int team = team_of(s->dev, units < grains ? units : grains);
    if (team == 1) {
        fp_reset();
        if (n > 0) fn(args, 0, n);
        return;
    }
#pragma omp parallel num_threads(team)
    {
        fp_reset();
        int64_t parts = omp_get_num_threads(), part = omp_get_thread_num();
        int64_t first = units * part / parts * unit, end = units * (part + 1) / parts * unit;
        if (end > n) end = n;
        if (first < end) fn(args, first, end);
    }
}

static inline void par_rows(const Stream *s, int64_t n, int64_t width, PartFn *fn, const void *args)
{
    par_units(s, n, width, 1, fn, args);
}

/* Columns of a matrix, or elements of a long row, in whole vectors. */
static inline void par_columns(const Stream *s, int64_t columns, int64_t rows, PartFn *fn, const void *args)
{
    par_units(s, columns, rows, VEC, fn, args);
}

/* How many rows of dim 0 are in use. */
static inline int64_t rows_used(Tensor t) { return t.rows && *t.rows < t.dim[0] ? *t.rows : t.dim[0]; }

/* The same for two tensors that share dim 0: an op may be given the count with either. */
static inline int64_t rows_both(Tensor t, Tensor u)
{
    int64_t a = rows_used(t), b = rows_used(u);
    return a < b ? a : b;
}

static inline float *row_f32(Tensor t, int64_t row) { return (float *)t.data + tensor_row_at(t, row); }

/* An element of a tensor of any float dtype. */
static inline float any_load(Tensor t, int64_t i)
{
    if (t.dtype == BF16) return bf16_to_float(((const uint16_t *)t.data)[i]);
    if (t.dtype == F16) return f16_to_float(((const uint16_t *)t.data)[i]);
    return ((const float *)t.data)[i];
}

static inline void any_store(Tensor t, int64_t i, float x)
{
    if (t.dtype == BF16) ((uint16_t *)t.data)[i] = bf16_from_float(x);
    else if (t.dtype == F16) ((uint16_t *)t.data)[i] = f16_from_float(x);
    else ((float *)t.data)[i] = x;
}

/* A vector of which `left` >= 1 elements remain in the row. */
VEC_FN vf row_load(const float *p, int64_t left) { return left >= VEC ? vf_load(p) : vf_load_n(p, left); }

VEC_FN void row_store(float *p, vf v, int64_t left)
{
    if (left >= VEC) vf_store(p, v);
    else vf_store_n(p, v, left);
}

VEC_FN vl fixed_load(const int64_t *p, int64_t left)
{
    if (left >= VEC) return vl_load(p);
    int64_t part[VEC] = { 0 };
    memcpy(part, p, (size_t)left * sizeof *part);
    return vl_load(part);
}

/* A row of f32, or of bf16, whose numbers are widened as they are read and rounded as they are written. */
typedef struct {
    void *data;
    bool narrow;
} Row;

VEC_FN Row row_of(Tensor t, int64_t row)
{
    const int64_t at = tensor_row_at(t, row);
    if (t.dtype == BF16) return (Row){ (uint16_t *)t.data + at, true };
    return (Row){ (float *)t.data + at, false };
}

/* From element i on, of which `left` >= 1 remain. */
VEC_FN vf row_get(Row r, int64_t i, int64_t left)
{
    if (!r.narrow) return row_load((const float *)r.data + i, left);
    const uint16_t *p = (const uint16_t *)r.data + i;
    return left >= VEC ? vf_load_bf16(p) : vf_load_bf16_n(p, left);
}

VEC_FN void row_put(Row r, int64_t i, vf v, int64_t left)
{
    if (!r.narrow) return row_store((float *)r.data + i, v, left);
    uint16_t *p = (uint16_t *)r.data + i;
    if (left >= VEC) vf_store_bf16(p, v);
    else vf_store_bf16_n(p, v, left);
}

/* v, with 0 in the lanes beyond the row. */
VEC_FN vf row_mask(vf v, int64_t left) { return left >= VEC ? v : vf_select(vm_first_n(left), v, vf_zero()); }

/* A gradient accumulator: int64 fixed point, or float. */
typedef struct {
    int64_t *fixed; /* this or plain is NULL */
    float *plain;
    float scale, limit;
} GradAcc;

static inline GradAcc grad_acc(Tensor acc, Tensor shift, int headroom_bits)
{
    if (acc.dtype == F32) return (GradAcc){ .plain = acc.data };
    return (GradAcc){ .fixed = acc.data,
                      .scale = fix_scale(*(const int32_t *)shift.data),
                      .limit = fix_limit(headroom_bits) };
}

/* Adds a leaf to elements `at`...; lanes that do not fit add nothing. Returns whether there were any. */
VEC_FN int grad_acc_add(const GradAcc *a, int64_t at, vf leaf, int64_t left)
{
    if (a->plain) {
        row_store(a->plain + at, vf_add(row_load(a->plain + at, left), leaf), left);
        return 0;
    }
    vf v = row_mask(vf_mul(leaf, vf_set1(a->scale)), left);
    vm bad = vf_fix_bad(v, a->limit);
    vl add = vl_from_f(vf_select(bad, vf_zero(), v));
    if (left >= VEC) {
        vl_store(a->fixed + at, vl_add(vl_load(a->fixed + at), add));
    } else {
        int64_t part[VEC] = { 0 };
        memcpy(part, a->fixed + at, (size_t)left * sizeof *part);
        vl_store(part, vl_add(vl_load(part), add));
        memcpy(a->fixed + at, part, (size_t)left * sizeof *part);
    }
    return vm_any(bad);
}

/* Gradients of tensor `number` as an update reads them: in fp32, times the factor by which the step multiplies all of
 * them. */
typedef struct {
    const int64_t *fixed; /* this or plain is NULL */
    const float *plain;
    vf unit, scale;
} Grads;

static inline Grads grads_of(Tensor g, Tensor shift, int number, const StepValues *step)
{
    const bool plain = g.dtype == F32;
    const float unit = plain ? 1.0f : fix_scale(-((const int32_t *)shift.data)[number]);
    return (Grads){ .fixed = plain ? NULL : g.data,
                    .plain = plain ? g.data : NULL,
                    .unit = vf_set1(unit),
                    .scale = vf_set1(step->grad_scale) };
}

VEC_FN vf grad_load(const Grads *g, int64_t at, int64_t left)
{
    const vf x = g->plain ? row_load(g->plain + at, left) : vf_from_l(fixed_load(g->fixed + at, left));
    return vf_mul(vf_mul(x, g->unit), g->scale);
}

/* Several threads may raise one flag. */
static inline void flag_raise(Tensor flag) { __atomic_store_n((int32_t *)flag.data, 1, __ATOMIC_RELAXED); }

/* Sum of a sequence as a binary tree: neighbours in pairs, pairs in fours, ...; a lone one moves up as it
 * is. */
typedef struct {
    float level[48];
    int64_t count;
} Tree;

static inline void tree_push(Tree *t, float x)
{
    int i = 0;
    for (int64_t c = t->count++; c & 1; c >>= 1) x = t->level[i++] + x;
    t->level[i] = x;
}

static inline float tree_total(const Tree *t)
{
    float sum = 0.0f;
    int found = 0, i = 0;
    for (int64_t c = t->count; c; c >>= 1, i++) {
        if (!(c & 1)) continue;
        sum = found ? t->level[i] + sum : t->level[i];
        found = 1;
    }
    return sum;
}

#endif
