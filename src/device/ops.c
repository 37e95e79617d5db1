/*
 * Common parts of an op on all backends: the field tables generated from ops.def, the shape check that reads them, the
 * exact counts of bytes and FLOP, and the null table, which does nothing more.
 */
#include "device/ops.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "device/recorder.h"

/* field tables: args of op X are read as X_args fields */
#define T(member, text) { #member, text, offsetof(Args, member), true, false },
#define W(member, text) { #member, text, offsetof(Args, member), false, true },
#define U(member, text) { #member, text, offsetof(Args, member), true, true },
#define S(type, name)
#define OP(op_name, flop_text, args)                                                                \
    static const OpInfo *info_##op_name(void)                                                       \
    {                                                                                               \
        typedef op_name##_args Args;                                                                \
        static const OpField fields[] = { args };                                                   \
        static const OpInfo info = { #op_name, flop_text, fields, sizeof fields / sizeof *fields }; \
        return &info;                                                                               \
    }
#include "device/ops.def"
#undef OP
#undef S
#undef T

static const OpInfo *(*const infos[OP_COUNT])(void) = {
#define OP(name, flop, args) info_##name,
#include "device/ops.def"
#undef OP
};

const OpInfo *op_info(OpId id)
{
    ASSERT(id < OP_COUNT);
    return infos[id]();
}

/* Sizes bound to letters while one call is checked; `by` is the argument that bound it. */
typedef struct {
    int64_t size[128];
    int64_t used[128]; /* of it, on the average: what is counted */
    const char *by[128];
    DType compute;
    const char *compute_by;
} Binding;

static Err check_dtype(const OpInfo *info, const OpField *f, const char *suffix, DType got, Binding *b)
{
    static const struct {
        const char *suffix;
        DType want, also;
    } table[] = { { ":f32", F32, F32 }, { ":i32", I32, I32 }, { ":i64", I64, I64 }, { ":acc", I64, F32 } };
    bool computes = got == F32 || got == BF16 || got == F16;
    if (!strcmp(suffix, ":any") && computes) return ERR_OK;
    if (!strcmp(suffix, ":fp8") && (got == E4M3 || got == E5M2 || got == E2M1)) return ERR_OK;
    const bool wide = !strcmp(suffix, ":wide");
    if (wide && got == F32) return ERR_OK;
    if (!*suffix || wide) {
        if (!b->compute_by) {
            b->compute = got;
            b->compute_by = f->name;
        }
        if (got == b->compute && computes) return ERR_OK;
        return err_set(ERR_SHAPE, "%s: %s is %s, %s is %s", info->name, f->name, dtype_name(got), b->compute_by,
                       dtype_name(b->compute));
    }
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (!strcmp(suffix, table[i].suffix) && (got == table[i].want || got == table[i].also)) return ERR_OK;
    return err_set(ERR_SHAPE, "%s: %s is %s, wanted%s", info->name, f->name, dtype_name(got), suffix);
}

/* The rows of a group lie side by side, which only some arguments may have: whole groups of their dim with a *, whose
 * rows kernels number in 31 bits. */
static Err check_group(const OpInfo *info, const OpField *f, const Tensor *t)
{
    if (t->group <= 1) return ERR_OK;
    const int64_t rows = t->ndim > 1 ? t->dim[t->ndim - 2] : 0;
    if (!strchr(f->dims, '*') || rows % t->group || rows > INT32_MAX)
        return err_set(ERR_SHAPE, "%s: %s has %lld rows in groups of %lld, declared as '%s'", info->name, f->name,
                       (long long)rows, (long long)t->group, f->dims);
    return ERR_OK;
}

/* The factors that go with codes, and with nothing else. */
static Err check_factors(const OpInfo *info, const OpField *f, const Tensor *t)
{
    const bool codes = strstr(f->dims, ":fp8") != NULL;
    const Tensor *s = t->scale;
    if (!codes && s) return err_set(ERR_SHAPE, "%s: %s has factors, which are of codes alone", info->name, f->name);
    if (!codes) return ERR_OK;
    if (!s || !s->data || s->dtype != F32 || s->ndim > 2 || (s->ndim == 1 && s->dim[0] != 1))
        return err_set(ERR_SHAPE, "%s: the codes of %s have no f32 factors, one or a matrix", info->name, f->name);
    return ERR_OK;
}

/* Reads "?B T H:f32" word by word beside the tensor's dims. */
static Err check_field(const OpInfo *info, const OpField *f, const Tensor *t, Binding *b)
{
    const char *p = f->dims;
    if (*p == '?') {
        if (!t->data) return ERR_OK;
        p++;
    }
    if (!t->data) return err_set(ERR_SHAPE, "%s: %s is missing", info->name, f->name);
    TRY(check_factors(info, f, t));
    int d = 0;
    for (; *p && *p != ':'; p++) {
        if (*p == ' ' || *p == '*') continue;
        if (d >= t->ndim) break;
        if (*p >= '0' && *p <= '9') {
            if (t->dim[d] != *p - '0')
                return err_set(ERR_SHAPE, "%s: dim %d of %s is %lld, wanted %c", info->name, d, f->name,
                               (long long)t->dim[d], *p);
        } else if (!b->by[(int)*p]) {
            b->size[(int)*p] = b->used[(int)*p] = t->dim[d];
            b->by[(int)*p] = f->name;
        } else if (b->size[(int)*p] != t->dim[d]) {
            return err_set(ERR_SHAPE, "%s: %s: %c is %lld here, %lld in %s", info->name, f->name, *p,
                           (long long)t->dim[d], (long long)b->size[(int)*p], b->by[(int)*p]);
        }
        if (d == tensor_counted_dim(*t) && t->expected) b->used[(int)*p] = t->expected;
        d++;
    }
    if (d != t->ndim || (*p && *p != ':'))
        return err_set(ERR_SHAPE, "%s: %s has %d dims, declared as '%s'", info->name, f->name, t->ndim, f->dims);
    TRY(check_group(info, f, t));
    return check_dtype(info, f, p, t->dtype, b);
}

/* Pairs of one head and one sample that attention sees; 0 for other ops. */
static int64_t seen_pairs(OpId id, const void *args)
{
    const attention_fwd_args *fwd = args;
    const attention_bwd_args *bwd = args;
    if (id == OP_attention_fwd) return spans_pairs(fwd->q_span, fwd->k_span, fwd->window);
    return id == OP_attention_bwd ? spans_pairs(bwd->q_span, bwd->k_span, bwd->window) : 0;
}

/* The value of the number or letter at *text, which moves behind it. */
static int64_t flop_term(const char **text, const Binding *b)
{
    int64_t n = 0;
    if (**text < '0' || **text > '9') return b->used[(int)*(*text)++];
    while (**text >= '0' && **text <= '9') n = n * 10 + (*(*text)++ - '0');
    return n;
}

/* Product of the words of "2 N O I", of which each may be a sum as "C+V"; 0 when empty. */
static WideCount flop_count(const char *text, const Binding *b)
{
    if (!*text) return 0;
    WideCount product = 1;
    for (; *text; text += *text == ' ') {
        int64_t sum = flop_term(&text, b);
        while (*text == '+') text++, sum += flop_term(&text, b);
        product *= sum;
    }
    return product;
}

static const Tensor *tensor_field(const OpInfo *info, int i, const void *args)
{
    return (const Tensor *)((const char *)args + info->fields[i].offset);
}

/* Bytes of the rows that are in use. */
static int64_t counted_bytes(const OpField *f, const Tensor *t, const Binding *b)
{
    const int rows = f->dims[*f->dims == '?'];
    if (!t->data) return 0;
    if (t->scale) return tensor_bytes(*t) + tensor_bytes(*t->scale);
    return b->by[rows] && t->dim[0] ? tensor_bytes(*t) / t->dim[0] * b->used[rows] : tensor_bytes(*t);
}

/* what a recorder is told of an op */
#define T(name, dims) digest = digest_tensor(digest, &a->name);
#define W(name, dims) T(name, dims)
#define U(name, dims) T(name, dims)
#define S(type, name) digest = digest_scalar(digest, a->name);
#define OP(op_name, flop, args)                      \
    static uint64_t digest_##op_name(const void *of) \
    {                                                \
        const op_name##_args *a = of;                \
        uint64_t digest = DIGEST_EMPTY;              \
        args return digest;                          \
    }
#include "device/ops.def"
#undef OP
#undef S
#undef U
#undef W
#undef T

static uint64_t (*const digests[OP_COUNT])(const void *) = {
#define OP(name, flop, args) digest_##name,
#include "device/ops.def"
#undef OP
};

uint64_t op_digest(OpId id, const void *args) { return digest_int(digests[id](args), id); }

Err op_begin(Stream *s, OpId id, const void *args)
{
    const OpInfo *info = op_info(id);
    Binding b;
    memset(b.by, 0, sizeof b.by);
    b.compute_by = NULL;
    DeviceCounters *c = &s->dev->counters;
    for (int i = 0; i < info->field_count; i++)
        TRY(check_field(info, &info->fields[i], tensor_field(info, i, args), &b));
    for (int i = 0; i < info->field_count; i++)
        c->bytes += counted_bytes(&info->fields[i], tensor_field(info, i, args), &b);
    c->ops++;
    b.used['X'] = seen_pairs(id, args);
    c->flop += flop_count(info->flop, &b);
    return recorder_hears(s) ? recorder_work(s, op_digest(id, args)) : ERR_OK;
}

Err residual_norm_apart(const OpTable *ops, Stream *s, const residual_norm_fwd_args *a)
{
    const residual_fwd_args add = { .y = a->sum,
                                    .residual = a->residual,
                                    .x = a->x,
                                    .bias = a->bias,
                                    .position = a->position,
                                    .sample = a->sample,
                                    .dropout = a->dropout };
    norm_fwd_args norm = {
        .y = a->y, .mean = a->mean, .rstd = a->rstd, .x = a->sum, .w = a->w, .b = a->b, .eps = a->eps
    };
    if (!norm.x.rows) norm.x.rows = a->x.rows;
    TRY(ops->residual_fwd(s, &add));
    return ops->norm_fwd(s, &norm);
}

/* the null table */
#define OP(name, flop, args)                                \
    static Err null_##name(Stream *s, const name##_args *a) \
    {                                                       \
        (void)s;                                            \
        (void)a;                                            \
        return ERR_OK;                                      \
    }
#include "device/ops.def"
#undef OP

const OpTable null_ops = {
#define OP(name, flop, args) .name = null_##name,
#include "device/ops.def"
#undef OP
};
