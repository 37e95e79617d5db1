/*
 * Runs an op case on every instruction set and number of threads and demands the same bits. A case is a
 * function that makes tensors with env_*, runs ops with RUN and, where e->check is set, compares with
 * float64 loops.
 *
 * Tensors lie in memory of 0xA5 bytes, with gaps between rows where e->pad is set; whatever an op writes
 * outside a tensor, or into a tensor not declared `out`, is found by env_close. The numbers of a tensor
 * depend on the case and its place in it alone, row by row; so a call with fewer rows has the same first
 * rows.
 */
#ifndef MEGATRAIN_TEST_OPS_ENV_H
#define MEGATRAIN_TEST_OPS_ENV_H

#include "test.h"

#include "base/rng.h"
#include "tested_op.h"

enum { ENV_BUFS = 32, ENV_GUARD = 256 };

typedef struct {
    char *mem, *before; /* before: a copy of mem as the ops found it */
    int64_t size_bytes;
    Tensor t;
    bool out;
} Buf;

typedef struct {
    Device dev;
    bool check;
    int64_t pad;         /* elements between rows */
    const int64_t *rows; /* count in use given with N tensors, or NULL */
    Buf buf[ENV_BUFS];
    int count;
    uint64_t state;
} Env;

/* Sizes and switches of a case, as it likes to read them. */
typedef struct {
    int64_t N, D, a, b;
    int flags;
} Shape;

typedef void CaseFn(Env *e, const Shape *p);

#define RUN(e, name, ...) OK(tested_op(&(e)->dev.stream, name, __VA_ARGS__))
#define ENV_DIMS(...) \
    (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (const int64_t[]) { __VA_ARGS__ }

static inline void env_open(Env *e, Isa isa, int threads, int64_t pad)
{
    memset(e, 0, sizeof *e);
    OK(device_open(&e->dev, (DeviceChoice){ .threads = threads, .isa = isa }));
    e->pad = pad;
}

static inline int64_t env_rows(const Tensor *t)
{
    return t->ndim == 1 ? t->dim[0] : tensor_rows(*t);
}

static inline int64_t env_width(const Tensor *t)
{
    return t->ndim == 1 ? 1 : t->dim[t->ndim - 1];
}

static inline char *env_row(const Tensor *t, int64_t row)
{
    return (char *)t->data + (t->ndim == 1 ? row : tensor_row_at(*t, row)) * dtype_size(t->dtype);
}

static inline float *env_f(Tensor t, int64_t row)
{
    return (float *)(void *)env_row(&t, row);
}

/* Random numbers in [low, high); integers are rounded down. */
static inline Tensor env_make(Env *e, DType dtype, double low, double high, int ndim, const int64_t *dim)
{
    ASSERT(e->count < ENV_BUFS);
    Buf *b = &e->buf[e->count++];
    b->t = tensor_view(NULL, dtype, ndim, dim);
    if (ndim > 1) b->t.ld += e->pad;
    b->size_bytes = 2 * ENV_GUARD + (env_rows(&b->t) * (ndim > 1 ? b->t.ld : 1)) * dtype_size(dtype);
    b->mem = malloc((size_t)b->size_bytes);
    b->before = malloc((size_t)b->size_bytes);
    ASSERT(b->mem && b->before);
    memset(b->mem, 0xA5, (size_t)b->size_bytes);
    b->t.data = b->mem + ENV_GUARD;
    uint64_t state = 977 * (uint64_t)e->count;
    for (int64_t n = 0; n < env_rows(&b->t); n++) {
        for (int64_t i = 0; i < env_width(&b->t); i++) {
            double x = test_uniform(&state, low, high);
            if (dtype == F32) ((float *)(void *)env_row(&b->t, n))[i] = (float)x;
            if (dtype == I32) ((int32_t *)(void *)env_row(&b->t, n))[i] = (int32_t)floor(x);
            if (dtype == I64) ((int64_t *)(void *)env_row(&b->t, n))[i] = (int64_t)floor(x);
        }
    }
    memcpy(b->before, b->mem, (size_t)b->size_bytes);
    return b->t;
}

#define env_in(e, dtype, low, high, ...) env_make(e, dtype, low, high, ENV_DIMS(__VA_ARGS__))
#define env_out(e, dtype, low, high, ...) \
    env_mark_out(e, env_make(e, dtype, low, high, ENV_DIMS(__VA_ARGS__)))

static inline Tensor env_mark_out(Env *e, Tensor t)
{
    e->buf[e->count - 1].out = true;
    return t;
}

enum { ENV_BETWEEN = 5 };

/* Rows of N by D floats that lie in groups of `group` (Tensor.group), ENV_BETWEEN others behind each; 0: a matrix. */
static inline Tensor env_groups(Env *e, double low, double high, int64_t N, int64_t D, int64_t group)
{
    if (!group) return env_in(e, F32, low, high, N, D);
    Tensor t = env_in(e, F32, low, high, N / group, group * D + ENV_BETWEEN);
    t.dim[0] = N, t.dim[1] = D, t.group = group;
    return t;
}
#define env_out_groups(e, low, high, N, D, group) env_mark_out(e, env_groups(e, low, high, N, D, group))

/* A tensor whose dim 0 is N, with the count in use when there is one. */
static inline Tensor env_used(const Env *e, Tensor t)
{
    t.rows = e->rows;
    return t;
}

static inline int64_t env_n(const Env *e, int64_t N)
{
    return e->rows ? *e->rows : N;
}

/* After the case wrote into a tensor by hand. */
static inline void env_settle(Env *e)
{
    for (int i = 0; i < e->count; i++) memcpy(e->buf[i].before, e->buf[i].mem, (size_t)e->buf[i].size_bytes);
}

/* What the tensor of this data held before the ops. */
static inline const void *env_before(const Env *e, const void *p)
{
    for (int i = 0; i < e->count; i++) {
        const Buf *b = &e->buf[i];
        if ((const char *)p >= b->mem && (const char *)p < b->mem + b->size_bytes)
            return b->before + ((const char *)p - b->mem);
    }
    ASSERT(!"not a tensor of this case");
}

/* What lies behind the groups of t is what it was. */
static inline void env_check_between(const Env *e, Tensor t)
{
    for (int64_t n = 0; t.group && n < t.dim[0]; n += t.group) {
        const float *from = env_f(t, n) + t.group * t.dim[1];
        CHECK_MSG(!memcmp(from, env_before(e, from), ENV_BETWEEN * sizeof *from), "behind the group of row %d", (int)n);
    }
}

static inline bool env_inside(const Buf *b, int64_t byte)
{
    int64_t size = dtype_size(b->t.dtype), at = byte - ENV_GUARD;
    if (at < 0 || at >= b->size_bytes - 2 * ENV_GUARD) return false;
    return b->t.ndim == 1 || at / size % b->t.ld < env_width(&b->t);
}

/* Guards and inputs must be as they were. */
static inline void env_check_guards(const Env *e)
{
    for (int i = 0; i < e->count; i++) {
        const Buf *b = &e->buf[i];
        int64_t changed = 0;
        for (int64_t k = 0; k < b->size_bytes; k++)
            changed += (!b->out || !env_inside(b, k)) && b->mem[k] != b->before[k];
        CHECK_MSG(changed == 0, "tensor %d of the case: %lld bytes changed outside", i, (long long)changed);
    }
}

static inline uint64_t env_hash(const Env *e)
{
    uint64_t h = 1;
    for (int i = 0; i < e->count; i++)
        for (int64_t k = 0; k < e->buf[i].size_bytes; k++)
            h = (h ^ (uint8_t)e->buf[i].mem[k]) * 0x100000001B3u;
    return h;
}

static inline void env_close(Env *e)
{
    for (int i = 0; i < e->count; i++) {
        free(e->buf[i].mem);
        free(e->buf[i].before);
    }
    device_close(&e->dev);
}

static inline uint64_t env_run(CaseFn *fn, const Shape *p, Isa isa, int threads, bool check)
{
    Env e;
    env_open(&e, isa, threads, p->N % 2 ? 5 : 0);
    e.check = check;
    fn(&e, p);
    env_check_guards(&e);
    uint64_t h = env_hash(&e);
    env_close(&e);
    return h;
}

/* The same first rows from N rows of which `used` are in use as from `used` rows; the others untouched. */
static inline void env_check_rows(CaseFn *fn, Shape p, int64_t used)
{
    Env large, small;
    Shape q = p;
    q.N = used;
    env_open(&large, isa_best(), 1, 0);
    env_open(&small, isa_best(), 1, 0);
    large.rows = &used;
    large.check = true;
    fn(&large, &p);
    fn(&small, &q);
    for (int i = 0; i < large.count; i++) {
        const Buf *a = &large.buf[i], *b = &small.buf[i];
        if (!a->out) continue;
        int64_t same = b->size_bytes - 2 * ENV_GUARD;
        CHECK_MSG(!memcmp(a->mem, b->mem, (size_t)(ENV_GUARD + same)),
                  "tensor %d differs from the small call", i);
        CHECK_MSG(!memcmp(a->mem + ENV_GUARD + same, a->before + ENV_GUARD + same,
                          (size_t)(a->size_bytes - ENV_GUARD - same)), "tensor %d: unused rows changed", i);
    }
    env_check_guards(&large);
    env_close(&large);
    env_close(&small);
}

/* Right, and the same bits again, on every instruction set, with 1 to 3 threads. */
static inline void env_cases(CaseFn *fn, const Shape *p, int count)
{
    for (int k = 0; k < count; k++) {
        int failures = test_failures;
        uint64_t want = env_run(fn, &p[k], isa_best(), 1, true);
        for (Isa isa = ISA_AVX512; isa < ISA_COUNT; isa++) {
            if (!isa_supported(isa)) continue;
            for (int threads = 1; threads <= 3; threads++)
                CHECK_MSG(env_run(fn, &p[k], isa, threads, false) == want, "%s with %d threads",
                          isa_name(isa), threads);
        }
        if (p[k].N > 1) env_check_rows(fn, p[k], p[k].N - p[k].N / 3);
        if (test_failures > failures)
            fprintf(stderr, "    in case N %lld D %lld a %lld b %lld flags %d\n", (long long)p[k].N,
                    (long long)p[k].D, (long long)p[k].a, (long long)p[k].b, p[k].flags);
    }
}

#define CASES(fn, ...) \
    env_cases(fn, (const Shape[]){ __VA_ARGS__ }, (int)(sizeof((Shape[]){ __VA_ARGS__ }) / sizeof(Shape)))

/* A one-element tensor. */
static inline Tensor env_int(Env *e, int32_t value)
{
    return env_in(e, I32, value, value + 0.5, 1);
}

static inline Tensor env_flag(Env *e)
{
    return env_out(e, I32, 0, 0.5, 1);
}

/* What was added to element i of an accumulator. */
static inline double env_added(const Env *e, Tensor acc, int shift, int64_t row, int64_t i)
{
    const char *now = env_row(&acc, row), *before = env_before(e, now);
    if (acc.dtype == F32)
        return (double)((const float *)(const void *)now)[i] -
               (double)((const float *)(const void *)before)[i];
    return ldexp(
        (double)(((const int64_t *)(const void *)now)[i] - ((const int64_t *)(const void *)before)[i]),
        -shift);
}

/* What it held before. */
static inline double env_held(const Env *e, Tensor acc, int shift, int64_t row, int64_t i)
{
    const char *before = env_before(e, env_row(&acc, row));
    if (acc.dtype == F32) return (double)((const float *)(const void *)before)[i];
    return ldexp((double)((const int64_t *)(const void *)before)[i], -shift);
}

#endif
