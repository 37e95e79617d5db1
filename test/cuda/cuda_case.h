/*
 * Tests of CUDA ops against their CPU twins, the same op called on both devices (on the emulator, or on a
 * GPU: the programs do not know).
 *
 *   static void norm_case(DType T, int64_t N, int64_t D)
 *   {
 *       CudaCase *c = case_open();
 *       Pair x = pair_random(c, T, 1, N, D), y = pair_output(c, T, N, D);
 *       BOTH(c, gelu_fwd, .y = AT(y), .x = AT(x));
 *       pair_check(c, y, case_tolerance(T), "gelu %s", dtype_name(T));
 *       case_close(c);
 *   }
 *
 * A Pair is one tensor on each device with the same numbers: rounded to the dtype, so that the CPU computes
 * in fp32 on exactly what the GPU reads. BOTH runs the CPU's op once and the GPU's twice from the same start:
 * the two must leave the same bits everywhere, and every byte outside the case's tensors untouched.
 */
#ifndef MEGATRAIN_TEST_CUDA_CASE_H
#define MEGATRAIN_TEST_CUDA_CASE_H

#include <stdarg.h>

#include "base/half.h"
#include "test.h"
#include "tested_op.h"

enum { CASE_BYTES = 24 << 20, CASE_PAIRS = 64, CASE_FILL = 0xA5, CASE_CPU = 0, CASE_GPU = 1 };

typedef struct {
    Tensor t[2]; /* CASE_CPU (16-bit dtypes as F32), CASE_GPU */
} Pair;

typedef struct {
    Device dev[2];
    Arena arena[2];
    int64_t begin[CASE_PAIRS], end[CASE_PAIRS]; /* bytes of the GPU tensors in their arena */
    int pairs;
    uint64_t random;
    char *before, *first, *second; /* host copies of the GPU arena */
} CudaCase;

static int case_side; /* which device AT() means */
#define AT(pair) ((pair).t[case_side])

static inline Stream *case_stream(CudaCase *c) { return &c->dev[case_side].stream; }

/* Numbers in host memory <-> a dtype. */
static inline void case_store(void *at, DType T, int64_t i, float x)
{
    if (T == F32) ((float *)at)[i] = x;
    else ((uint16_t *)at)[i] = T == BF16 ? bf16_from_float(x) : f16_from_float(x);
}

static inline float case_load(const void *at, DType T, int64_t i)
{
    if (T == F32) return ((const float *)at)[i];
    uint16_t h = ((const uint16_t *)at)[i];
    return T == BF16 ? bf16_to_float(h) : f16_to_float(h);
}

static inline CudaCase *case_open(void)
{
    static CudaCase c;
    static bool open; /* the devices stay open from case to case */
    if (!open) {
        void *base;
        OK(device_open(&c.dev[CASE_CPU], (DeviceChoice){ .kind = DEVICE_CPU, .threads = 1 }));
        OK(device_open(&c.dev[CASE_GPU], (DeviceChoice){ .kind = DEVICE_CUDA }));
        for (int side = 0; side < 2; side++) {
            OK(device_alloc(&c.dev[side], CASE_BYTES, &base));
            arena_init(&c.arena[side], "case", base, CASE_BYTES);
        }
        c.before = malloc(CASE_BYTES), c.first = malloc(CASE_BYTES), c.second = malloc(CASE_BYTES);
        memset(c.before, CASE_FILL, CASE_BYTES);
        OK(device_write(&c.dev[CASE_GPU].stream, c.arena[CASE_GPU].base, c.before, CASE_BYTES));
        open = true;
    }
    c.random = 1;
    return &c;
}

static inline void case_close(CudaCase *c)
{
    memset(c->before, CASE_FILL, (size_t)c->arena[CASE_GPU].used_bytes);
    OK(device_write(&c->dev[CASE_GPU].stream, c->arena[CASE_GPU].base, c->before, c->arena[CASE_GPU].used_bytes));
    for (int side = 0; side < 2; side++) arena_release(&c->arena[side], 0);
    c->pairs = 0;
}

static inline Pair pair_alloc(CudaCase *c, DType T, int ndim, const int64_t *dim)
{
    Pair p;
    ASSERT(c->pairs < CASE_PAIRS);
    OK(tensor_alloc(&c->arena[CASE_CPU], &p.t[CASE_CPU], T == BF16 || T == F16 ? F32 : T, ndim, dim));
    OK(tensor_alloc(&c->arena[CASE_GPU], &p.t[CASE_GPU], T, ndim, dim));
    int64_t begin = (char *)p.t[CASE_GPU].data - c->arena[CASE_GPU].base;
    c->begin[c->pairs] = begin;
    c->end[c->pairs++] = begin + tensor_bytes(p.t[CASE_GPU]);
    void *guard; /* so that one tensor's end is not the next one's begin */
    OK(arena_alloc(&c->arena[CASE_GPU], 1, &guard));
    return p;
}

/* Copies host numbers to both sides: floats (rounded to the pair's dtype), int32 or int64. */
static inline void pair_set(CudaCase *c, Pair *p, const void *values)
{
    int64_t n = tensor_count(p->t[CASE_GPU]), size = tensor_bytes(p->t[CASE_GPU]);
    DType T = p->t[CASE_GPU].dtype;
    if (T == BF16 || T == F16) {
        for (int64_t i = 0; i < n; i++) {
            case_store(c->first, T, i, ((const float *)values)[i]);
            ((float *)p->t[CASE_CPU].data)[i] = case_load(c->first, T, i);
        }
        values = c->first;
    } else memcpy(p->t[CASE_CPU].data, values, (size_t)size);
    OK(device_write(&c->dev[CASE_GPU].stream, p->t[CASE_GPU].data, values, size));
}

#define CASE_DIMS(...) (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (const int64_t[]){ __VA_ARGS__ }

static inline Pair pair_uniform(CudaCase *c, DType T, double low, double high, int ndim, const int64_t *dim)
{
    Pair p = pair_alloc(c, T, ndim, dim);
    int64_t n = tensor_count(p.t[CASE_CPU]);
    float *values = (float *)c->second;
    for (int64_t i = 0; i < n; i++) values[i] = (float)test_uniform(&c->random, low, high);
    pair_set(c, &p, values);
    return p;
}
/* Uniform in +-scale. */
#define pair_random(c, T, scale, ...) pair_uniform((c), (T), -(scale), (scale), CASE_DIMS(__VA_ARGS__))

static inline Pair pair_nan(CudaCase *c, DType T, int ndim, const int64_t *dim)
{
    Pair p = pair_alloc(c, T, ndim, dim);
    int64_t n = tensor_count(p.t[CASE_CPU]);
    memset(c->second, 0xFF, (size_t)(n * 8)); /* NaN, or -1 */
    pair_set(c, &p, c->second);
    return p;
}
/* For results that are overwritten: NaN (integers: -1) before. */
#define pair_output(c, T, ...) pair_nan((c), (T), CASE_DIMS(__VA_ARGS__))

static inline Pair pair_zeros(CudaCase *c, DType T, int ndim, const int64_t *dim)
{
    Pair p = pair_alloc(c, T, ndim, dim);
    memset(c->second, 0, (size_t)(tensor_count(p.t[CASE_CPU]) * 8));
    pair_set(c, &p, c->second);
    return p;
}
#define pair_zero(c, T, ...) pair_zeros((c), (T), CASE_DIMS(__VA_ARGS__))

static inline Pair pair_given(CudaCase *c, DType T, const void *values, int ndim, const int64_t *dim)
{
    Pair p = pair_alloc(c, T, ndim, dim);
    pair_set(c, &p, values);
    return p;
}
#define pair_values(c, T, values, ...) pair_given((c), (T), (values), CASE_DIMS(__VA_ARGS__))

/* ---- running ---- */

static inline void case_snapshot(CudaCase *c, char *to)
{
    OK(device_read(&c->dev[CASE_GPU].stream, to, c->arena[CASE_GPU].base, c->arena[CASE_GPU].used_bytes));
}

static inline void case_compare(CudaCase *c, const char *name)
{
    int64_t used = c->arena[CASE_GPU].used_bytes, at = 0;
    CHECK_MSG(memcmp(c->first, c->second, (size_t)used) == 0, "%s: two runs differ", name);
    for (int i = 0; i <= c->pairs; i++) { /* pairs are in ascending order */
        int64_t stop = i < c->pairs ? c->begin[i] : used, bad = -1;
        for (; at < stop; at++)
            if ((uint8_t)c->first[at] != CASE_FILL && bad < 0) bad = at;
        CHECK_MSG(bad < 0, "%s: wrote outside its tensors, %lld bytes after tensor %d", name,
                  (long long)(bad - (i ? c->end[i - 1] : 0)), i - 1);
        if (i < c->pairs) at = c->end[i];
    }
}

/* The GPU's op alone, for what the CPU's device does not compute in fp32. */
#define TWICE(c, name, ...)                                                                                   \
    do {                                                                                                      \
        case_side = CASE_GPU;                                                                                 \
        case_snapshot((c), (c)->before);                                                                      \
        OK(tested_op(case_stream(c), name, __VA_ARGS__));                                                     \
        case_snapshot((c), (c)->first);                                                                       \
        OK(device_write(case_stream(c), (c)->arena[CASE_GPU].base, (c)->before, (c)->arena[CASE_GPU].used_bytes)); \
        OK(op(case_stream(c), name, __VA_ARGS__));                                                            \
        case_snapshot((c), (c)->second);                                                                      \
        case_compare((c), #name);                                                                             \
    } while (0)

#define BOTH(c, name, ...)                    \
    do {                                      \
        case_side = CASE_CPU;                 \
        OK(op(case_stream(c), name, __VA_ARGS__)); \
        TWICE(c, name, __VA_ARGS__);          \
    } while (0)

/* ---- comparing ---- */

/* A few units in the last place of the dtype. */
static inline double case_tolerance(DType T) { return T == BF16 ? 0x1p-7 : T == F16 ? 0x1p-10 : 1e-5; }

/*
 * |gpu - cpu| <= tol * max(|cpu|, rms of the tensor), element by element; infinities must be equal, NaN
 * fails. Integers must be equal.
 */
__attribute__((format(printf, 4, 5))) static inline void pair_check(CudaCase *c, Pair p, double tol, const char *fmt,
                                                                    ...)
{
    Tensor g = p.t[CASE_GPU], w = p.t[CASE_CPU];
    int64_t n = tensor_count(g), bad = 0, first = -1;
    double square = 0;
    char what[256];
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    OK(device_read(&c->dev[CASE_GPU].stream, c->first, g.data, tensor_bytes(g)));
    if (g.dtype == I32 || g.dtype == I64) {
        CHECK_MSG(memcmp(c->first, w.data, (size_t)tensor_bytes(g)) == 0, "%s: integers differ", what);
        return;
    }
    const float *want = w.data;
    for (int64_t i = 0; i < n; i++)
        if (isfinite(want[i])) square += (double)want[i] * want[i];
    double rms = sqrt(square / (double)(n ? n : 1));
    for (int64_t i = 0; i < n; i++) {
        double got = case_load(c->first, g.dtype, i), limit = tol * fmax(fabs((double)want[i]), rms);
        bool ok = isinf(want[i]) ? got == (double)want[i] : fabs(got - (double)want[i]) <= limit;
        if (!ok && bad++ == 0) first = i;
    }
    CHECK_MSG(bad == 0, "%s: %lld of %lld differ; element %lld: gpu %.9g, cpu %.9g (rms %g)", what, (long long)bad,
              (long long)n, (long long)first, first < 0 ? 0 : (double)case_load(c->first, g.dtype, first),
              first < 0 ? 0 : (double)want[first], rms);
}

#endif
