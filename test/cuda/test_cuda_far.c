/*
 * Tensors of more than 2^32 elements, where an index of 32 bits, signed or not, is too short. Each op runs on one, `far`,
 * and on one of the same first and last units (rows, or samples), `near`: the ends must have the same bits. Far memory is
 * touched only there: the emulator runs no blocks but those at the ends of a grid. A GPU without room for it skips this.
 */
#include <cuda_runtime_api.h>

#include "cuda_case.h"

/* Units of a tensor: rows of UNIT elements. */
enum { UNIT = 1024, NEAR_BYTES = 64 << 20 };
static const int64_t FAR_ROWS = ((int64_t)1 << 22) + 1, FAR_BYTES = (int64_t)45 << 30;

typedef struct {
    Tensor t[2]; /* NEAR, FAR */
} Ends;
enum { NEAR, FAR };
static int side; /* which one END means */
#define END(ends) ((ends).t[side])

static struct {
    Device dev;
    Arena arena[2];
    uint64_t random;
    bool none; /* no room */
} far;

static void far_open_device(void)
{
    void *near, *base;
    setenv("EMU_BLOCKS", "ends", 1);
    setenv("EMU_MEMORY", "68719476736", 1);
    OK(device_open(&far.dev, (DeviceChoice){ .kind = DEVICE_CUDA }));
    OK(device_alloc(&far.dev, NEAR_BYTES, &near));
    far.none = cudaMalloc(&base, (size_t)FAR_BYTES) != cudaSuccess; /* (device_alloc would touch it) */
    arena_init(&far.arena[NEAR], "near", near, NEAR_BYTES);
    if (!far.none) arena_init(&far.arena[FAR], "far", base, FAR_BYTES);
}

static void far_open(void)
{
    static bool open;
    far.random = 1;
    if (!open) far_open_device();
    open = true;
    if (far.none) SKIP("no %lld GiB of device memory", (long long)(FAR_BYTES >> 30));
}

static void far_close(void)
{
    for (int i = 0; i < 2; i++) arena_release(&far.arena[i], 0);
}

/* Of `units` parts along its first dimension far, and two near. */
static Ends ends_alloc(DType T, int64_t units, int ndim, const int64_t *dim)
{
    Ends e;
    int64_t d[TENSOR_MAX_DIMS];
    for (int i = 1; i < ndim; i++) d[i] = dim[i];
    for (int i = 0; i < 2; i++) {
        d[0] = i == FAR ? units : 2;
        OK(tensor_alloc(&far.arena[i], &e.t[i], T, ndim, d));
    }
    return e;
}

/* The same bytes to both, a unit of them to each end. */
static void ends_write(const Ends *e, const void *bytes)
{
    const int64_t unit = tensor_bytes(e->t[NEAR]) / 2, last = tensor_bytes(e->t[FAR]) - unit;
    OK(device_write(&far.dev.stream, e->t[NEAR].data, bytes, 2 * unit));
    OK(device_write(&far.dev.stream, e->t[FAR].data, bytes, unit));
    OK(device_write(&far.dev.stream, (char *)e->t[FAR].data + last, (const char *)bytes + unit, unit));
}

static Ends ends_uniform(DType T, int64_t units, int ndim, const int64_t *dim)
{
    const Ends e = ends_alloc(T, units, ndim, dim);
    const int64_t n = tensor_count(e.t[NEAR]);
    char *values = malloc((size_t)n * 4);
    for (int64_t i = 0; i < n; i++) case_store(values, T, i, (float)test_uniform(&far.random, -1, 1));
    ends_write(&e, values);
    free(values);
    return e;
}
#define ENDS(T, ...) ends_uniform((T), CASE_FIRST(__VA_ARGS__), CASE_DIMS(__VA_ARGS__))
#define CASE_FIRST(...) ((const int64_t[]){ __VA_ARGS__ })[0]

/* Integers, 0 wherever none is of interest. The last is 1; with `places` far the number of its unit. */
static Ends ends_numbers(DType T, int64_t units, bool places)
{
    const Ends e = ends_alloc(T, units, 1, &units);
    const int64_t size = (int64_t)dtype_size(T);
    for (int i = 0; i < 2; i++) {
        const int64_t n = tensor_count(e.t[i]), last = places ? n - 1 : 1; /* (its low half is an int32_t of it) */
        char *all = calloc((size_t)n, (size_t)size);
        memcpy(all + (n - 1) * size, &last, (size_t)size);
        OK(device_write(&far.dev.stream, e.t[i].data, all, n * size));
        free(all);
    }
    return e;
}

/* One tensor for both, of two rows. */
static Ends ends_shared(DType T, int64_t columns)
{
    Ends e = ENDS(T, 2, columns);
    e.t[FAR] = e.t[NEAR];
    return e;
}
static Ends ends_vector(DType T, int64_t n)
{
    Ends e = ends_shared(T, n / 2);
    for (int i = 0; i < 2; i++) e.t[i] = tensor_reshape(e.t[i], n);
    return e;
}

/* The first and the last `count` elements have the same bits on both sides. */
static void ends_check(Ends e, int64_t count, const char *what)
{
    const int64_t bytes = count * (int64_t)dtype_size(e.t[NEAR].dtype);
    char *got = malloc((size_t)bytes), *want = malloc((size_t)bytes);
    for (int last = 0; last < 2; last++) {
        char *from[2];
        for (int i = 0; i < 2; i++) from[i] = (char *)e.t[i].data + (last ? tensor_bytes(e.t[i]) - bytes : 0);
        OK(device_read(&far.dev.stream, want, from[NEAR], bytes));
        OK(device_read(&far.dev.stream, got, from[FAR], bytes));
        CHECK_MSG(memcmp(got, want, (size_t)bytes) == 0, "%s: the %s %lld elements of a far tensor differ", what,
                  last ? "last" : "first", (long long)count);
    }
    free(got), free(want);
}

#define BOTH_ENDS(name, ...) \
    for (side = NEAR; side <= FAR; side++) OK(op(&far.dev.stream, name, __VA_ARGS__))

TEST(maps)
{
    far_open();
    Ends x = ENDS(BF16, FAR_ROWS, UNIT), dy = ENDS(BF16, FAR_ROWS, UNIT), y = ENDS(BF16, FAR_ROWS, UNIT);
    BOTH_ENDS(gelu_fwd, .y = END(y), .x = END(x));
    ends_check(y, UNIT, "gelu_fwd");
    BOTH_ENDS(gelu_bwd, .dx = END(y), .dy = END(dy), .x = END(x));
    ends_check(y, UNIT, "gelu_bwd");
    BOTH_ENDS(gate_fwd, .y = END(y), .x = END(x), .gate = END(dy));
    ends_check(y, UNIT, "gate_fwd");
    BOTH_ENDS(fill_zero, .x = END(y));
    ends_check(y, UNIT, "fill_zero");
    far_close();
}

TEST(gated_units)
{
    far_open();
    Ends x = ENDS(BF16, FAR_ROWS, UNIT), dx = ENDS(BF16, FAR_ROWS, UNIT);
    Ends y = ENDS(BF16, FAR_ROWS, UNIT / 2);
    BOTH_ENDS(swiglu_bwd, .dx = END(dx), .dy = END(y), .x = END(x), .chunk = UNIT / 2);
    ends_check(dx, UNIT, "swiglu_bwd");
    BOTH_ENDS(swiglu_fwd, .y = END(y), .x = END(x), .chunk = UNIT / 2);
    ends_check(y, UNIT / 2, "swiglu_fwd");
    far_close();
}

TEST(norms)
{
    far_open();
    Ends x = ENDS(BF16, FAR_ROWS, UNIT), residual = ENDS(BF16, FAR_ROWS, UNIT), y = ENDS(BF16, FAR_ROWS, UNIT);
    Ends sum = ENDS(BF16, FAR_ROWS, UNIT), rstd = ENDS(F32, FAR_ROWS), w = ends_vector(BF16, UNIT);
    Ends position = ends_numbers(I32, FAR_ROWS, false), sample = ends_numbers(I64, FAR_ROWS, false);
    BOTH_ENDS(norm_fwd, .y = END(y), .rstd = END(rstd), .x = END(x), .w = END(w), .eps = 1e-3f);
    ends_check(y, UNIT, "norm_fwd");
    ends_check(rstd, 1, "rstd of norm_fwd");
    BOTH_ENDS(residual_norm_fwd, .y = END(y), .rstd = END(rstd), .sum = END(sum), .residual = END(residual),
              .x = END(x), .w = END(w), .position = END(position), .sample = END(sample), .eps = 1e-3f);
    ends_check(y, UNIT, "residual_norm_fwd");
    ends_check(sum, UNIT, "sum of residual_norm_fwd");
    Ends dw = ends_vector(F32, UNIT), shift = ends_numbers(I32, 2, false); /* (sums over all rows: not compared) */
    for (int i = 0; i < 2; i++) shift.t[i].dim[0] = 1;
    BOTH_ENDS(norm_bwd, .dx = END(residual), .dw = END(dw), .dy = END(y), .x = END(x), .w = END(w), .rstd = END(rstd),
              .shift_w = END(shift), .overflow = END(shift), .leaf = 4, .headroom_bits = 10, .fresh = 1);
    ends_check(residual, UNIT, "norm_bwd");
    far_close();
}

TEST(rotary_positions)
{
    enum { R = 32, H = UNIT / 2 / R };
    far_open();
    Ends x = ENDS(BF16, FAR_ROWS, H, 2 * R), position = ends_numbers(I32, FAR_ROWS, false);
    Ends table = ends_shared(F32, R);
    BOTH_ENDS(rope, .x = END(x), .position = END(position), .cos = END(table), .sin = END(table));
    ends_check(x, UNIT, "rope");
    far_close();
}

TEST(rows_of_a_table)
{
    far_open();
    Ends y = ENDS(BF16, FAR_ROWS, UNIT), table = ENDS(BF16, FAR_ROWS, UNIT);
    Ends index = ends_numbers(I32, FAR_ROWS, true);
    BOTH_ENDS(embedding_fwd, .y = END(y), .table = END(table), .index = END(index));
    ends_check(y, UNIT, "embedding_fwd");
    BOTH_ENDS(permute_rows, .y = END(y), .x = END(table), .choice = END(index), .topk = 1);
    ends_check(y, UNIT, "permute_rows");
    for (int i = 0; i < 2; i++) index.t[i] = tensor_reshape(index.t[i], index.t[i].dim[0], 1);
    BOTH_ENDS(unpermute_rows, .y = END(y), .x = END(table), .row = END(index));
    ends_check(y, UNIT, "unpermute_rows");
    far_close();
}

TEST(loss)
{
    far_open();
    Ends logits = ENDS(BF16, FAR_ROWS, UNIT), loss = ENDS(F32, FAR_ROWS), target = ends_numbers(I32, FAR_ROWS, false);
    const StepValues values = { .loss_scale = 1 };
    void *step;
    OK(arena_alloc(&far.arena[NEAR], sizeof values, &step));
    OK(device_write(&far.dev.stream, step, &values, sizeof values));
    BOTH_ENDS(xent_row, .loss = END(loss), .logits = END(logits), .target = END(target), .step = step, .weight = 1,
              .block = UNIT, .vocab = UNIT);
    ends_check(logits, UNIT, "gradient of xent_row");
    ends_check(loss, 1, "loss of xent_row");
    Ends max = ENDS(F32, FAR_ROWS, 1), sum = ENDS(F32, FAR_ROWS, 1), at = ENDS(F32, FAR_ROWS);
    BOTH_ENDS(xent_stats, .block_max = END(max), .block_sum = END(sum), .target_logit = END(at), .logits = END(logits),
              .target = END(target), .block = UNIT, .vocab = UNIT);
    ends_check(max, 1, "xent_stats");
    ends_check(at, 1, "target's logit of xent_stats");
    for (int i = 0; i < 2; i++) {
        max.t[i] = tensor_reshape(max.t[i], max.t[i].dim[0]);
        sum.t[i] = tensor_reshape(sum.t[i], sum.t[i].dim[0]);
    }
    BOTH_ENDS(xent_bwd, .logits = END(logits), .target = END(target), .row_max = END(max), .row_sum = END(sum),
              .step = step, .weight = 1, .vocab = UNIT);
    ends_check(logits, UNIT, "xent_bwd");
    far_close();
}

TEST(attention)
{
    enum { T = 512, H = 8, C = 64 };
    const int64_t B = FAR_ROWS * UNIT / (T * H * C) + 1;
    far_open();
    Ends q = ENDS(BF16, B, T, H, C), k = ENDS(BF16, B, T, H, C), v = ENDS(BF16, B, T, H, C), o = ENDS(BF16, B, T, H, C);
    Ends lse = ENDS(F32, B, T, H), sample = ends_numbers(I64, B, false);
    BOTH_ENDS(attention_fwd, .o = END(o), .lse = END(lse), .q = END(q), .k = END(k), .v = END(v), .sample = END(sample),
              .q_span = spans_whole(T), .k_span = spans_whole(T), .scale = 0.125f, .block = 64);
    ends_check(o, C, "attention_fwd");
    ends_check(lse, 1, "lse of attention_fwd");
    far_close();
}

TEST_MAIN
