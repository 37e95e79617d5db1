/* See measured.h. */
#include "cost/measured.h"

#include <math.h>
#include <string.h>

#include "base/int64.h"
#include "device/product_speedup.h"

/* ---- what an op has to do ---- */

static OpWork product(int64_t rows, int64_t outputs, int64_t inputs, double times)
{
    return (OpWork){ 3, { (double)rows, (double)outputs, (double)inputs }, times };
}

static int64_t rows_of(Tensor t) { return t.expected ? t.expected : t.dim[0]; }

/* Work of `experts` products that share the rows of both tensors. One of the tensors says how many rows are in use. */
static OpWork grouped(Tensor a, Tensor b, int64_t experts, int64_t outputs, int64_t inputs)
{
    const int64_t rows = a.expected ? a.expected : rows_of(b), each = max64(1, rows / experts);
    return product(each, outputs, inputs, (double)rows / (double)each);
}

int64_t codes_in_use(const fp8_grouped_add_args *a)
{
    const Tensor dy = a->dy;
    const int64_t known = dy.expected ? dy.expected : a->x.expected, runs = a->begin.dim[0] - 1;
    const int64_t block = dy.dim[1] / max64(1, dy.scale->dim[dy.scale->ndim - 1]);
    return known ? min64(known + block * runs / 2, dy.dim[1]) : dy.dim[1];
}

static OpWork grouped_codes(const fp8_grouped_add_args *a)
{
    const int64_t rows = codes_in_use(a), each = max64(1, rows / a->dw.dim[0]);
    return product(each, a->dw.dim[1], a->dw.dim[2], (double)rows / (double)each);
}

/* Number of causal pairs of so many queries, at the end of so many keys. */
double causal_pairs(double queries, double keys)
{
    return queries <= keys ? queries * (keys - (queries - 1) / 2) : keys * (keys + 1) / 2;
}

static OpWork attention(Tensor q, Tensor k, Tensor v, double seen)
{
    const double queries = (double)q.dim[1], keys = (double)k.dim[1], heads = (double)(q.dim[0] * q.dim[2]);
    return (
        OpWork){ 3, { queries, keys, (double)(q.dim[3] + v.dim[3]) / 2 }, heads * seen / causal_pairs(queries, keys) };
}

/* Tables of which a call reads some rows, or which stay in a cache. */
static bool is_table(const char *field)
{
    return !strcmp(field, "table") || !strcmp(field, "dtable") || !strcmp(field, "cos") || !strcmp(field, "sin");
}

double expected_share(Tensor t)
{
    const int64_t all = t.dim[tensor_counted_dim(t)];
    return t.expected && all ? (double)t.expected / (double)all : 1;
}

static double bytes_of(Tensor t) { return (double)tensor_bytes(t) * expected_share(t); }

static OpWork memory(OpId id, const void *args)
{
    const OpInfo *info = op_info(id);
    double bytes = 0;
    for (int i = 0; i < info->field_count; i++) {
        const OpField *f = &info->fields[i];
        const Tensor t = *(const Tensor *)((const char *)args + f->offset);
        if (t.data && !is_table(f->name)) bytes += bytes_of(t) * (f->read + f->written);
    }
    return (OpWork){ 1, { fmax(bytes, 1) }, 1 };
}

OpWork op_work(OpId id, const void *args)
{
    switch (id) {
    case OP_linear_fwd: {
        const linear_fwd_args *a = args;
        return product(rows_of(a->x), a->w.dim[0], a->w.dim[1], 1);
    }
    case OP_linear_dx: {
        const linear_dx_args *a = args;
        return product(rows_of(a->dy), a->w.dim[0], a->w.dim[1], 1);
    }
    case OP_linear_dw: {
        const linear_dw_args *a = args;
        OpWork w = product(rows_of(a->dy), a->dw.dim[0], a->dw.dim[1], 1);
        w.fixed = a->dw.dtype == I64;
        return w;
    }
    case OP_fp8_product: {
        const fp8_product_args *a = args;
        return product(rows_of(a->x), a->w.dim[0], a->w.dim[1], 1);
    }
    case OP_fp8_product_add: {
        const fp8_product_add_args *a = args;
        return product(a->dy.dim[1], a->dw.dim[0], a->dw.dim[1], 1);
    }
    case OP_grouped_fwd: {
        const grouped_fwd_args *a = args;
        return grouped(a->x, a->y, a->w.dim[0], a->w.dim[1], a->w.dim[2]);
    }
    case OP_grouped_dx: {
        const grouped_dx_args *a = args;
        return grouped(a->dy, a->dx, a->w.dim[0], a->w.dim[1], a->w.dim[2]);
    }
    case OP_grouped_dw: {
        const grouped_dw_args *a = args;
        return grouped(a->dy, a->x, a->dw.dim[0], a->dw.dim[1], a->dw.dim[2]);
    }
    case OP_fp8_grouped: {
        const fp8_grouped_args *a = args;
        const int64_t outputs = a->y.dim[1], inputs = a->x.dim[1];
        return grouped(a->y, a->x, a->w.dim[0] / outputs * (a->w.dim[1] / inputs), outputs, inputs);
    }
    case OP_fp8_grouped_add: return grouped_codes(args);
    case OP_attention_fwd: {
        const attention_fwd_args *a = args;
        return attention(a->q, a->k, a->v, (double)spans_pairs(a->q_span, a->k_span, a->window));
    }
    case OP_attention_bwd: {
        const attention_bwd_args *a = args;
        return attention(a->q, a->k, a->v, (double)spans_pairs(a->q_span, a->k_span, a->window));
    }
    default: return memory(id, args);
    }
}

/* Number to which the time of a shape is proportional. */
static double volume(OpId id, const double *shape)
{
    const bool attends = id == OP_attention_fwd || id == OP_attention_bwd;
    return (attends ? causal_pairs(shape[0], shape[1]) : shape[0] * shape[1]) * shape[2];
}

const char *op_dtype(OpId id, const void *args)
{
    const OpInfo *info = op_info(id);
    for (int i = 0; i < info->field_count; i++) {
        const OpField *f = &info->fields[i];
        const Tensor t = *(const Tensor *)((const char *)args + f->offset);
        if (t.data && (!strchr(f->dims, ':') || strstr(f->dims, ":wide") || strstr(f->dims, ":any")) && t.dtype != F32)
            return dtype_name(t.dtype);
    }
    return dtype_name(F32);
}

/* ---- between points ---- */

enum { POINTS_MOST = 1024 };

typedef struct {
    const DevicePoint *at[POINTS_MOST]; /* of one dtype, or group, and the same ranks and threads */
    int count;
} Chosen;

static double apart(double a, double b) { return fabs(log2(a / b)); }

/* How far a point is from so many ranks and threads: threads first. */
static double unlike(const DevicePoint *p, int ranks, int threads)
{
    return 16 * apart(p->threads, threads) + apart(p->ranks, ranks);
}

/* Is `a` nearer than b; of two as near, the one of fewer threads, or ranks? */
static bool nearer(const DevicePoint *a, const DevicePoint *b, int ranks, int threads)
{
    const double here = unlike(a, ranks, threads), there = unlike(b, ranks, threads);
    if (here != there) return here < there;
    return a->threads != b->threads ? a->threads < b->threads : a->ranks < b->ranks;
}

/* Those measured with the ranks and threads that are nearest to so many; never some of one kind and some of another, as
 * far above as those are below. */
static void choose(Chosen *c, const DevicePoint *all, int count, const char *dtype, int ranks, int threads)
{
    const DevicePoint *like = NULL;
    c->count = 0;
    for (int i = 0; i < count; i++)
        if (!strcmp(all[i].dtype, dtype) && (!like || nearer(&all[i], like, ranks, threads))) like = &all[i];
    for (int i = 0; i < count && c->count < POINTS_MOST; i++)
        if (!strcmp(all[i].dtype, dtype) && all[i].ranks == like->ranks && all[i].threads == like->threads)
            c->at[c->count++] = &all[i];
}

/* Microseconds at `x` on the line through two points of one dim, both logarithmic; what is smaller than the smallest
 * takes as long, what is larger goes on at the largest's rate. */
static double on_line(const DevicePoint *a, const DevicePoint *b, double x)
{
    if (!a) return b->us;
    if (!b) return a->us * x / a->shape[0];
    if (a == b) return a->us;
    const double part = log(x / a->shape[0]) / log(b->shape[0] / a->shape[0]);
    return a->us * pow(b->us / a->us, part);
}

static double by_size(const Chosen *c, double x)
{
    const DevicePoint *below = NULL, *above = NULL;
    for (int i = 0; i < c->count; i++) {
        const DevicePoint *p = c->at[i];
        if (p->shape[0] <= x && (!below || p->shape[0] > below->shape[0])) below = p;
        if (p->shape[0] >= x && (!above || p->shape[0] < above->shape[0])) above = p;
    }
    return on_line(below, above, x);
}

/* Logarithms of rates and their weights, added up. */
typedef struct {
    double weights, sum;
} Mean;

/* Threads share a product by tasks of whole tiles, of which small ones have few: what one of them has to itself is no
 * property of sizes in between. Rates are compared as those of one thread. */
static double speedup(ProductBy by, OpId id, const DevicePoint *measured_like, const double *shape, bool fixed)
{
    const ProductShape product = { (int64_t)llround(shape[0]), (int64_t)llround(shape[1]), (int64_t)llround(shape[2]),
                                   .bf16 = !strcmp(measured_like->dtype, dtype_name(BF16)), .fixed = fixed };
    return product_speedup(by, id, product, measured_like->threads);
}

static void mean_add(Mean *m, ProductBy by, OpId id, const DevicePoint *p, double weight)
{
    m->weights += weight;
    /* (sums of gradients were measured as they are by default: calibrate.c) */
    const bool fixed = !strcmp(p->dtype, dtype_name(F32));
    m->sum += weight * log(volume(id, p->shape) / p->us / speedup(by, id, p, p->shape, fixed));
}

static const DevicePoint *point_at(const Chosen *c, const double *shape)
{
    for (int i = 0; i < c->count; i++)
        if (!memcmp(c->at[i]->shape, shape, POINT_SHAPE_MOST * sizeof *shape)) return c->at[i];
    return NULL;
}

/* The sizes of dim k that were measured next to x: at most it, and at least it. Beyond the outermost both are that. */
static void bracket(const Chosen *c, int k, double x, double side[2])
{
    side[0] = 0, side[1] = INFINITY;
    for (int i = 0; i < c->count; i++) {
        const double at = c->at[i]->shape[k];
        if (at <= x) side[0] = fmax(side[0], at);
        if (at >= x) side[1] = fmin(side[1], at);
    }
    if (side[0] == 0) side[0] = side[1];
    if (isinf(side[1])) side[1] = side[0];
}

/* The mean of the corners of the cell around, where a grid was measured. */
static Mean by_corners(const Chosen *c, ProductBy by, OpId id, const OpWork *w)
{
    double side[POINT_SHAPE_MOST][2], part[POINT_SHAPE_MOST];
    Mean m = { 0 };
    for (int k = 0; k < POINT_SHAPE_MOST; k++) {
        bracket(c, k, w->shape[k], side[k]);
        part[k] = side[k][0] == side[k][1] ? 0 : log(w->shape[k] / side[k][0]) / log(side[k][1] / side[k][0]);
    }
    for (int corner = 0; corner < 1 << POINT_SHAPE_MOST; corner++) {
        double shape[POINT_SHAPE_MOST], weight = 1;
        for (int k = 0; k < POINT_SHAPE_MOST; k++) {
            const int high = corner >> k & 1;
            shape[k] = side[k][high];
            weight *= high ? part[k] : 1 - part[k];
        }
        const DevicePoint *p = weight > 0 ? point_at(c, shape) : NULL;
        if (p) mean_add(&m, by, id, p, weight);
    }
    return m;
}

/* Elsewhere all points, of which the nearest weigh most. */
static Mean by_distance(const Chosen *c, ProductBy by, OpId id, const OpWork *w)
{
    Mean m = { 0 };
    for (int i = 0; i < c->count; i++) {
        double square = 1e-6;
        for (int k = 0; k < POINT_SHAPE_MOST; k++) square += pow(apart(c->at[i]->shape[k], w->shape[k]), 2);
        mean_add(&m, by, id, c->at[i], pow(square, -3));
    }
    return m;
}

/* Microseconds by the mean logarithm of rates measured at shapes around; half of a cell's corners must be known. */
static double by_shape(const Chosen *c, ProductBy by, OpId id, const OpWork *w)
{
    Mean m = by_corners(c, by, id, w);
    if (m.weights < 0.5) m = by_distance(c, by, id, w);
    return volume(id, w->shape) / exp(m.sum / m.weights) / speedup(by, id, c->at[0], w->shape, w->fixed);
}

/* Microseconds of what a point of the op stands for, by so many ranks and threads. false: nothing was measured. */
static bool one_of(const DevicePoints *all, OpId id, const char *dtype, const OpWork *w, int ranks, int threads,
                   double *us)
{
    int count = 0;
    Chosen c;
    const DevicePoint *points = device_points_of(all, op_info(id)->name, &count);
    if (!points) return false;
    choose(&c, points, count, dtype, ranks, threads);
    if (!c.count) choose(&c, points, count, dtype_name(F32), ranks, threads);
    if (!c.count) return false;
    *us = w->dims == 1 ? by_size(&c, w->shape[0]) : by_shape(&c, product_by_names(all->isa, all->dot), id, w);
    return true;
}

/* Threads that share an op begin together and wait for the last once a call, in which so many heads, or experts, were
 * measured. Of more of them each takes its part of what one thread takes beside as many others. */
static bool alone(const DevicePoints *all, OpId id, const char *dtype, const OpWork *w, int ranks, int threads,
                  double *seconds)
{
    const double measured = w->dims == 1 ? 1 : MEASURED_AT_ONCE, more = w->times - measured;
    double us, apart_us;
    if (!one_of(all, id, dtype, w, ranks, threads, &us)) return false;
    *seconds = 1e-6 * w->times * us;
    if (threads > 1 && more > 0 && one_of(all, id, dtype, w, ranks * threads, 1, &apart_us))
        *seconds = 1e-6 * fmin(w->times * us, measured * us + more * apart_us / threads);
    return true;
}

/* ---- epilogues ---- */

/* Work that an op does besides, as an op of its own with so many bytes; false: none. */
static bool beside(OpId id, const void *args, OpId *other, double *bytes)
{
    const linear_fwd_args *fwd = args;
    const linear_dx_args *dx = args;
    const norm_bwd_args *norm = args;
    const fp8_product_args *fp8 = args;
    switch (id) {
    case OP_linear_fwd: *other = OP_gelu_fwd, *bytes = 2 * bytes_of(fwd->y); return fwd->gelu.data != NULL;
    case OP_fp8_product: *other = OP_gelu_fwd, *bytes = 2 * bytes_of(fp8->y); return fp8->gelu.data != NULL;
    case OP_linear_dx: *other = OP_gelu_bwd, *bytes = 3 * bytes_of(dx->dx); return dx->gelu_x.data != NULL;
    case OP_norm_bwd: *other = OP_bias_grad, *bytes = bytes_of(norm->dx); return norm->dsum.data != NULL;
    default: return false;
    }
}

bool measured_op(const DevicePoints *all, OpId id, const void *args, int ranks, int threads, double *seconds)
{
    if (!all->count) return false;
    const OpWork w = op_work(id, args);
    const char *dtype = op_dtype(id, args);
    OpId other;
    double bytes, more;
    if (!alone(all, id, dtype, &w, ranks, threads, seconds)) return false;
    if (beside(id, args, &other, &bytes) &&
        alone(all, other, dtype, &(OpWork){ 1, { bytes }, 1 }, ranks, threads, &more))
        *seconds += more;
    return true;
}

bool measured_comm(const DevicePoints *all, CommKind kind, int members, int64_t bytes, double *seconds)
{
    int count = 0;
    Chosen c;
    const DevicePoint *points = device_points_of(all, comm_kind_name(kind), &count);
    if (!points) return false;
    choose(&c, points, count, "", members, 1);
    *seconds = 1e-6 * by_size(&c, (double)max64(1, bytes));
    return true;
}

/* (Behind more work than was measured it is no longer: by then the scheduler has moved a thread that waits. Of other
 * numbers of ranks the nearest counts; but where ranks take turns on the processors only what was measured so.) */
double measured_skew(const DevicePoints *all, int members, int ranks, int processors, double work)
{
    int count = 0;
    Chosen c;
    const bool turns = ranks > processors, apart = turns && members < ranks;
    const DevicePoint *points = device_points_of(all, apart ? SKEW_PAIRS_NAME : SKEW_NAME, &count);
    if (!points || members < 2) return 0;
    choose(&c, points, count, "", turns ? ranks : members, 1);
    if (turns && c.at[0]->ranks <= processors) return 0;
    double least = INFINITY, most = 0;
    for (int i = 0; i < c.count; i++) {
        least = fmin(least, c.at[i]->shape[0]);
        most = fmax(most, c.at[i]->shape[0]);
    }
    /* (the points say how long work took between ranks that took turns, too) */
    const double took = turns ? work * ranks / processors : work, at = fmin(fmax(1e6 * took, least), most);
    return 1e-6 * fmax(0, by_size(&c, at) - by_size(&c, least));
}
