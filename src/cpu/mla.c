/* Keys and values of latent attention, from what all heads share and what each has of its own (ops.def). */
#include "cpu/rows.h"

/* Columns of a head: its own part of the key, the shared one, the value. */
typedef struct {
    int64_t own, shared, value;
} Widths;

static Err widths_of(Tensor k, Tensor v, Tensor kv, Tensor pe, Widths *w)
{
    *w = (Widths){ k.dim[2] - pe.dim[1], pe.dim[1], v.dim[2] };
    if (w->own >= 0 && w->own + w->value == kv.dim[2]) return ERR_OK;
    return err_set(ERR_SHAPE, "mla: %lld columns of kv for keys of %lld, %lld of them shared, and values of %lld",
                   (long long)kv.dim[2], (long long)k.dim[2], (long long)w->shared, (long long)w->value);
}

typedef struct {
    const mla_split_args *args;
    Widths w;
} Split;

static void copy_floats(float *to, const float *from, int64_t n) { memcpy(to, from, (size_t)n * sizeof *to); }

static void split_part(const void *args, int64_t first, int64_t end)
{
    const Split *s = args;
    const mla_split_args *a = s->args;
    const int64_t H = a->kv.dim[1];
    for (int64_t row = first * H; row < end * H; row++) {
        const float *kv = row_f32(a->kv, row);
        float *k = row_f32(a->k, row);
        copy_floats(k, kv, s->w.own);
        copy_floats(k + s->w.own, row_f32(a->pe, row / H), s->w.shared);
        copy_floats(row_f32(a->v, row), kv + s->w.own, s->w.value);
    }
}

Err CPU(mla_split)(Stream *s, const mla_split_args *a)
{
    Split call = { .args = a };
    TRY(widths_of(a->k, a->v, a->kv, a->pe, &call.w));
    par_rows(s, rows_both(a->k, a->kv), a->k.dim[1] * a->k.dim[2], split_part, &call);
    return ERR_OK;
}

typedef struct {
    const mla_merge_args *args;
    Widths w;
} Merge;

enum { LEVELS = 32 };

/* The sum over heads of row n, of columns c ... of what they share. */
static vf sum_heads(const Merge *m, int64_t n, int64_t c)
{
    const int64_t H = m->args->k.dim[1], chunk = m->args->chunk, left = m->w.shared - c;
    vf level[LEVELS], sum = vf_zero();
    for (int64_t i = 0; i < H / chunk; i++) {
        int top = 0;
        for (int64_t h = i * chunk; h < (i + 1) * chunk; h++) {
            const vf x = row_load(row_f32(m->args->k, n * H + h) + m->w.own + c, left);
            sum = h == i * chunk ? x : vf_add(sum, x);
        }
        for (int64_t done = i; done & 1; done >>= 1) sum = vf_add(level[top++], sum);
        level[top] = sum;
    }
    return sum;
}

static void merge_part(const void *args, int64_t first, int64_t end)
{
    const Merge *m = args;
    const mla_merge_args *a = m->args;
    const int64_t H = a->kv.dim[1], R = m->w.shared;
    for (int64_t row = first * H; row < end * H; row++) {
        float *kv = row_f32(a->kv, row);
        copy_floats(kv, row_f32(a->k, row), m->w.own);
        copy_floats(kv + m->w.own, row_f32(a->v, row), m->w.value);
    }
    for (int64_t n = first; n < end; n++)
        for (int64_t c = 0; c < R; c += VEC) row_store(row_f32(a->pe, n) + c, sum_heads(m, n, c), R - c);
}

Err CPU(mla_merge)(Stream *s, const mla_merge_args *a)
{
    Merge call = { .args = a };
    const int64_t H = a->k.dim[1], chunks = a->chunk > 0 ? H / a->chunk : 0;
    TRY(widths_of(a->k, a->v, a->kv, a->pe, &call.w));
    if (chunks < 1 || chunks * a->chunk != H || (chunks & (chunks - 1)))
        return err_set(ERR_SHAPE, "mla_merge: %lld heads in chunks of %lld, not in a power of two of them",
                       (long long)H, (long long)a->chunk);
    par_rows(s, rows_both(a->k, a->kv), H * a->k.dim[2], merge_part, &call);
    return ERR_OK;
}
