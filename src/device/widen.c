/*
 * 16-bit storage on the CPU: an op on bf16 or f16 tensors runs in fp32 on widened copies, and what it wrote
 * is rounded back (to nearest, ties to even). So the CPU stores and reads what a GPU stores and reads, sums in
 * fp32 as it does, and one definition of each op is enough. The copies cost memory (the staging arena, sized by
 * the dry run as everything else) and time, so ops that take much of a step read bf16 themselves (is_native). One of
 * them has a result that it adds up in fp32, and so in a copy: attention's dq.
 *
 * Arguments that are the same view share one copy, so an op in place stays one.
 */
#include <string.h>

#include "device/ops.h"

enum { WIDEN_MAX = 24 };

typedef struct {
    Tensor narrow, wide;
    bool written;
} Widened;

typedef struct {
    Stream *s;
    Widened list[WIDEN_MAX];
    int count;
    ArenaMark mark;
} Widening;

static bool is_codes(const OpField *f) { return strstr(f->dims, ":fp8") != NULL; }

static bool is_narrow(const OpField *f, const Tensor *t)
{
    const char *suffix = strchr(f->dims, ':');
    if (is_codes(f)) return f->read;
    return t->data && (!suffix || !strcmp(suffix, ":wide")) && (t->dtype == BF16 || t->dtype == F16);
}

/* y = x between two tensors of one shape, of which one may be a view. */
static Err convert(Stream *s, Tensor y, Tensor x)
{
    int64_t rows = tensor_rows(x), cols = x.dim[x.ndim - 1];
    if (rows == 0 || cols == 0) return ERR_OK;
    if (x.scale) {
        const fp8_values_args values = { .y = y, .x = x };
        return s->dev->wide_ops->fp8_values(s, &values);
    }
    if (y.ld == cols && x.ld == cols) cols *= rows, rows = 1;
    char *to = y.data, *from = x.data;
    for (int64_t r = 0; r < rows; r++) {
        cast_args a = { .y = tensor_of(to + tensor_row_at(y, r) * dtype_size(y.dtype), y.dtype, cols),
                        .x = tensor_of(from + tensor_row_at(x, r) * dtype_size(x.dtype), x.dtype, cols) };
        TRY(s->dev->wide_ops->cast(s, &a));
    }
    return ERR_OK;
}

/* `fresh`: nothing reads what was there before. */
static Err widen_one(Widening *w, Tensor *t, bool written, bool fresh)
{
    for (int i = 0; i < w->count; i++) {
        Widened *e = &w->list[i];
        const bool same = e->narrow.data == t->data && e->narrow.ld == t->ld && e->narrow.group == t->group;
        if (!same || tensor_count(e->narrow) != tensor_count(*t)) continue;
        e->written |= written;
        *t = tensor_as(e->wide, t->ndim, t->dim);
        return ERR_OK;
    }
    ASSERT(w->count < WIDEN_MAX);
    Widened *e = &w->list[w->count++];
    *e = (Widened){ .narrow = *t, .written = written };
    TRY(tensor_alloc(&w->s->dev->staging, &e->wide, F32, t->ndim, t->dim));
    if (!fresh) TRY(convert(w->s, e->wide, e->narrow));
    e->wide.rows = t->rows;
    *t = e->wide;
    return ERR_OK;
}

static Err widen_begin(Widening *w, OpId id, void *args)
{
    const OpInfo *info = op_info(id);
    w->mark = arena_mark(&w->s->dev->staging);
    for (int i = 0; i < info->field_count; i++) {
        Tensor *t = (Tensor *)((char *)args + info->fields[i].offset);
        if (is_narrow(&info->fields[i], t)) TRY(widen_one(w, t, info->fields[i].written, false));
    }
    return ERR_OK;
}

static Err widen_end(Widening *w)
{
    for (int i = 0; i < w->count; i++) {
        Widened *e = &w->list[i];
        e->wide.rows = NULL;
        if (e->written) TRY(convert(w->s, e->narrow, e->wide));
    }
    arena_release(&w->s->dev->staging, w->mark);
    return ERR_OK;
}

/* Ops that read and write bf16 themselves. */
static const OpId reads_bf16[] = {
    OP_linear_fwd,      OP_linear_dx,       OP_linear_dw,      OP_grouped_fwd,   OP_grouped_dx,      OP_grouped_dw,
    OP_bias_grad,       OP_embedding_fwd,   OP_embedding_grad, OP_norm_fwd,      OP_norm_bwd,        OP_residual_fwd,
    OP_residual_bwd,    OP_attention_fwd,   OP_attention_bwd,  OP_xent_stats,    OP_xent_bwd,        OP_xent_row,
    OP_conv_silu_fwd,   OP_conv_silu_bwd,   OP_unit_fwd,       OP_unit_bwd,      OP_delta_gates_fwd, OP_delta_gates_bwd,
    OP_delta_fwd,       OP_delta_bwd,       OP_kda_gates_fwd,  OP_kda_gates_bwd, OP_kda_fwd,         OP_kda_bwd,
    OP_mamba_gates_fwd, OP_mamba_gates_bwd, OP_mamba_fwd,      OP_mamba_bwd,     OP_gated_norm_fwd,  OP_gated_norm_bwd,
    OP_fp8_amax,        OP_fp8_cast,        OP_fp8_cast_runs
};

static bool is_native(OpId id, const void *args)
{
    const OpInfo *info = op_info(id);
    bool found = false;
    if (id == OP_fp8_values) return true;
    for (size_t i = 0; i < sizeof reads_bf16 / sizeof *reads_bf16; i++) found |= reads_bf16[i] == id;
    for (int i = 0; i < info->field_count && found; i++) {
        const Tensor *t = (const Tensor *)((const char *)args + info->fields[i].offset);
        if (t->data && t->dtype == F16) return false;
    }
    return found;
}

/* GELU is of the product as it is stored. */
static Err product_gelu_apart(Stream *s, const fp8_product_args *a)
{
    fp8_product_args product = *a;
    const gelu_fwd_args gelu = { .y = a->gelu, .x = a->y };
    product.gelu = (Tensor){ 0 };
    TRY(widened_ops.fp8_product(s, &product));
    return widened_ops.gelu_fwd(s, &gelu);
}

static bool has_gelu_apart(OpId id, const void *args)
{
    return id == OP_fp8_product && ((const fp8_product_args *)args)->gelu.data;
}

/* The tensor that a native op adds up in fp32. With `resumed` it is fp32 already, so this is fresh. */
static Tensor *sum_of(OpId id, void *args)
{
    attention_bwd_args *a = args;
    return id == OP_attention_bwd && a->dq.dtype == BF16 ? &a->dq : NULL;
}

static Err native_begin(Widening *w, OpId id, void *args)
{
    Tensor *sum = sum_of(id, args);
    w->mark = arena_mark(&w->s->dev->staging);
    return sum ? widen_one(w, sum, true, true) : ERR_OK;
}

/* (residual_norm_fwd: the norm is of the sum as it is stored, so the sum is rounded in between) */
#define OP(name, flop, args)                                                                           \
    static Err wide_##name(Stream *s, const name##_args *a)                                            \
    {                                                                                                  \
        if (OP_##name == OP_residual_norm_fwd) return residual_norm_apart(&widened_ops, s, (void *)a); \
        if (has_gelu_apart(OP_##name, a)) return product_gelu_apart(s, (const void *)a);               \
        name##_args wide = *a;                                                                         \
        Widening w = { .s = s };                                                                       \
        const bool native = is_native(OP_##name, a);                                                   \
        TRY(native ? native_begin(&w, OP_##name, &wide) : widen_begin(&w, OP_##name, &wide));          \
        TRY(s->dev->wide_ops->name(s, &wide));                                                         \
        return widen_end(&w);                                                                          \
    }
#include "device/ops.def"
#undef OP

const OpTable widened_ops = {
#define OP(name, flop, args) .name = wide_##name,
#include "device/ops.def"
#undef OP
};
