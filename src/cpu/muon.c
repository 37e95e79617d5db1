/*
 * Muon on what ranks have of matrices (optim/muon.h): moments, rectangles on their way to and from the rank that has
 * the whole matrix, and there what its products need besides: the norm, and sums of two matrices.
 *
 * Elementwise, every operation rounded to float in this order, but for the norm:
 *
 *   g = (float)G * 2^-shift * grad_scale           (float accumulator: G * grad_scale)
 *   m = fma(beta, m, (1 - beta) * g)               muon_moment
 *   y = fma(beta, m, (1 - beta) * g)               muon_pack, nesterov
 *   w = w - lr * fma(decay, w, scale * x)          muon_apply (product and difference fused)
 *   y = x * (float)(1 / max(sqrt(sum), eps))       normalize; the sum of squares, its root and 1 / it in double
 *   y = fma(a, x, b * y)                           mix
 *
 * Traffic per element: muon_moment reads m and g and writes m, 16 bytes (12 of floats), muon_pack as many, muon_apply
 * and mix 12, normalize 12. All are bound by memory, beside products that are not.
 */
#include "cpu/rows.h"

enum { RUN = 512 }; /* elements that pass through a buffer in the nearest cache */

/* ---- moments ---- */

typedef struct {
    Grads g;
    int64_t grad;
    float *m;
    float beta;
} Moment;

static void muon_moment_part(const void *args, int64_t first, int64_t end)
{
    const Moment *a = args;
    const vf beta = vf_set1(a->beta), rest = vf_set1(1.0f - a->beta);
    for (int64_t i = first; i < end; i += VEC) {
        const int64_t left = end - i;
        const vf g = grad_load(&a->g, a->grad + i, left);
        row_store(a->m + i, vf_fma(beta, row_load(a->m + i, left), vf_mul(rest, g)), left);
    }
}

Err CPU(muon_moment)(Stream *s, const muon_moment_args *a)
{
    const FlatPart *parts = a->parts.data;
    if (a->step->skip) return ERR_OK;
    for (int64_t i = 0; i < a->parts.dim[0]; i++) {
        const FlatPart *p = &parts[i];
        if (!(p->flags & FLAT_MUON)) continue;
        const Moment t = { grads_of(a->g, a->shift, p->number, a->step), p->grad, (float *)a->m.data + p->shard,
                           a->beta };
        par_columns(s, p->count, 1, muon_moment_part, &t);
    }
    return ERR_OK;
}

/* ---- rectangles ---- */

/* One of a table; the tensors are what its offsets are into. */
typedef struct {
    const FlatBox *box;
    Tensor to, from, copy;
    Grads g;
    float beta, decay, lr;
    bool nesterov, back;
} BoxWork;

static int64_t box_at(const FlatBox *b, int64_t row, int64_t column)
{
    return b->at + row * b->row_step + column * b->column_step;
}

static void par_boxes(const Stream *s, BoxWork *w, PartFn *fn) { par_rows(s, w->box->rows, w->box->columns, fn, w); }

static void muon_pack_part(const void *args, int64_t first, int64_t end)
{
    const BoxWork *a = args;
    const FlatBox *b = a->box;
    const vf beta = vf_set1(a->beta), rest = vf_set1(1.0f - a->beta);
    const float *m = (const float *)a->from.data + b->shard;
    float *y = a->to.data, run[RUN];
    for (int64_t r = first; r < end; r++)
        for (int64_t c = 0, n; c < b->columns; c += n) {
            n = b->columns - c < RUN ? b->columns - c : RUN;
            for (int64_t k = 0; k < n; k += VEC) {
                const int64_t at = r * b->ld + c + k, left = n - k;
                vf u = row_load(m + at, left);
                if (a->nesterov) u = vf_fma(beta, u, vf_mul(rest, grad_load(&a->g, b->grad + at, left)));
                row_store(run + k, u, left);
            }
            for (int64_t k = 0; k < n; k++) y[box_at(b, r, c + k)] = run[k];
        }
}

Err CPU(muon_pack)(Stream *s, const muon_pack_args *a)
{
    const FlatBox *boxes = a->boxes.data;
    for (int64_t i = 0; i < a->boxes.dim[0]; i++) {
        BoxWork w = { .box = &boxes[i],
                      .to = a->y,
                      .from = a->m,
                      .g = grads_of(a->g, a->shift, boxes[i].number, a->step),
                      .beta = a->beta,
                      .nesterov = a->nesterov };
        par_boxes(s, &w, muon_pack_part);
    }
    return ERR_OK;
}

static void muon_apply_part(const void *args, int64_t first, int64_t end)
{
    const BoxWork *a = args;
    const FlatBox *b = a->box;
    const vf lr = vf_set1(a->lr), scale = vf_set1(b->scale);
    const vf decay = vf_set1(b->flags & FLAT_DECAYS ? a->decay : 0);
    float run[RUN], *to = (float *)a->to.data + (a->copy.data ? b->shard : b->value);
    for (int64_t r = first; r < end; r++)
        for (int64_t c = 0, n; c < b->columns; c += n) {
            float *w = to + r * b->ld + c;
            n = b->columns - c < RUN ? b->columns - c : RUN;
            for (int64_t k = 0; k < n; k++) run[k] = any_load(a->from, box_at(b, r, c + k));
            for (int64_t k = 0; k < n; k += VEC) {
                const vf old = row_load(w + k, n - k), x = vf_mul(scale, row_load(run + k, n - k));
                row_store(w + k, vf_fnma(lr, vf_fma(decay, old, x), old), n - k);
            }
            for (int64_t k = 0; a->copy.data && k < n; k++) any_store(a->copy, b->value + r * b->ld + c + k, w[k]);
        }
}

Err CPU(muon_apply)(Stream *s, const muon_apply_args *a)
{
    const FlatBox *boxes = a->boxes.data;
    if (a->step->skip) return ERR_OK;
    for (int64_t i = 0; i < a->boxes.dim[0]; i++) {
        BoxWork w = {
            .box = &boxes[i], .to = a->w, .from = a->x, .copy = a->copy, .decay = a->decay, .lr = a->step->lr
        };
        par_boxes(s, &w, muon_apply_part);
    }
    return ERR_OK;
}

static void box_copy_part(const void *args, int64_t first, int64_t end)
{
    const BoxWork *a = args;
    const FlatBox *b = a->box;
    for (int64_t r = first; r < end; r++)
        for (int64_t c = 0; c < b->columns; c++) {
            const int64_t packed = b->shard + r * b->ld + c, place = box_at(b, r, c);
            any_store(a->to, a->back ? packed : place, any_load(a->from, a->back ? place : packed));
        }
}

Err CPU(box_copy)(Stream *s, const box_copy_args *a)
{
    const FlatBox *boxes = a->boxes.data;
    for (int64_t i = 0; i < a->boxes.dim[0]; i++) {
        BoxWork w = { .box = &boxes[i], .to = a->y, .from = a->x, .back = a->back };
        par_boxes(s, &w, box_copy_part);
    }
    return ERR_OK;
}

/* ---- whole matrices ---- */

static double row_squares(const float *x, int64_t count)
{
    double lane[VEC] = { 0 };
    for (int64_t i = 0; i < count; i++) lane[i % VEC] += (double)x[i] * (double)x[i];
    for (int half = VEC / 2; half; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
}

static void row_squares_part(const void *args, int64_t first, int64_t end)
{
    const normalize_args *a = args;
    for (int64_t n = first; n < end; n++) {
        const double sum = row_squares(row_f32(a->x, n), a->x.dim[1]);
        memcpy((int64_t *)a->sums.data + n, &sum, sizeof sum);
    }
}

typedef struct {
    const normalize_args *op;
    float inverse;
} Normalize;

static void normalize_part(const void *args, int64_t first, int64_t end)
{
    const Normalize *a = args;
    const vf inverse = vf_set1(a->inverse);
    const int64_t D = a->op->x.dim[1];
    for (int64_t n = first; n < end; n++) {
        const float *x = row_f32(a->op->x, n);
        float *y = row_f32(a->op->y, n);
        for (int64_t i = 0; i < D; i += VEC) row_store(y + i, vf_mul(row_load(x + i, D - i), inverse), D - i);
    }
}

Err CPU(normalize)(Stream *s, const normalize_args *a)
{
    double sum = 0, root;
    par_rows(s, a->x.dim[0], a->x.dim[1], row_squares_part, a);
    fp_reset();
    for (int64_t n = 0; n < a->x.dim[0]; n++) {
        double row;
        memcpy(&row, (const int64_t *)a->sums.data + n, sizeof row);
        sum += row;
    }
    root = __builtin_sqrt(sum);
    const Normalize t = { a, (float)(1.0 / (root > (double)a->eps ? root : (double)a->eps)) };
    par_rows(s, a->x.dim[0], a->x.dim[1], normalize_part, &t);
    return ERR_OK;
}

static void mix_part(const void *args, int64_t first, int64_t end)
{
    const mix_args *a = args;
    const vf A = vf_set1(a->a), B = vf_set1(a->b);
    const int64_t D = a->x.dim[1];
    for (int64_t n = first; n < end; n++) {
        const float *x = row_f32(a->x, n);
        float *y = row_f32(a->y, n);
        for (int64_t i = 0; i < D; i += VEC)
            row_store(y + i, vf_fma(A, row_load(x + i, D - i), vf_mul(B, row_load(y + i, D - i))), D - i);
    }
}

Err CPU(mix)(Stream *s, const mix_args *a)
{
    par_rows(s, rows_both(a->y, a->x), a->x.dim[1], mix_part, a);
    return ERR_OK;
}
