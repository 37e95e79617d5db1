/*
 * Tensors of more than 2^32 elements, where an index of 32 bits, signed or not, is too short. Each op runs on one,
 * `far`, and on a small one with the same numbers, `near`; both must get the same bits. A GPU without room skips this.
 *
 * Ends     The far tensor has as many units (rows, or samples) as it takes, and the near one the first and the last of
 *          them, which are compared. Far memory is touched only there: the emulator runs no blocks but those at the
 *          ends of a grid. For ops whose blocks number elements.
 * Rows     Both tensors have the same few rows, which lie far apart in the far one: its second half begins beyond 2^32.
 *          All of it is compared. For ops that sum over rows or look them up: blocks at the ends would not have it all.
 *
 * Left out: linear_* (cuBLASLt computes them, with 64-bit sizes of operands); tensors that have a few numbers for
 * each row, and so no 2^31 elements beside rows that memory holds (routers, their balance and capacities, the order of
 * permuted rows, sinks, xent_loss, loss_sum); tensors that have one for each parameter tensor (step_finish);
 * qkv_split, qkv_merge, join_columns, residual_*, gate_bwd, jitter and clamped_swiglu_* (all of them PackGrid and
 * Rows::at of kernel.cuh, as maps and gated_units have here).
 */
#include <cuda_runtime_api.h>

#include "cuda_case.h"

/* Units of a tensor: rows of UNIT elements. */
enum { UNIT = 1024, NEAR_BYTES = 64 << 20 };
static const int64_t FAR_ROWS = ((int64_t)1 << 22) + 1, FAR_ELEMENTS = (int64_t)1 << 32;
static const int64_t FAR_BYTES = (int64_t)45 << 30, FAR_BYTES_OPTIM = (int64_t)73 << 30;

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
    double least; /* random number */
    int64_t room; /* bytes of far memory */
} far;

static void far_open_device(void)
{
    void *near, *base;
    setenv("EMU_BLOCKS", "ends", 1);
    setenv("EMU_GPU", "8.0", 0); /* blocks that stay for all of the work, as on Hopper, would go through all of it */
    setenv("EMU_MEMORY", "85899345920", 1);
    OK(device_open(&far.dev, (DeviceChoice){ .kind = DEVICE_CUDA }));
    OK(device_alloc(&far.dev, NEAR_BYTES, &near));
    far.room = FAR_BYTES_OPTIM; /* (device_alloc would touch it) */
    if (cudaMalloc(&base, (size_t)far.room) != cudaSuccess) far.room = FAR_BYTES;
    if (far.room == FAR_BYTES && cudaMalloc(&base, (size_t)far.room) != cudaSuccess) far.room = 0;
    arena_init(&far.arena[NEAR], "near", near, NEAR_BYTES);
    if (far.room) arena_init(&far.arena[FAR], "far", base, far.room);
}

static void far_open_of(int64_t bytes)
{
    static bool open;
    far.random = 1, far.least = -1;
    if (!open) far_open_device();
    open = true;
    if (far.room < bytes) SKIP("no %lld GiB of device memory", (long long)(bytes >> 30));
}
static void far_open(void) { far_open_of(FAR_BYTES); }

static void far_close(void)
{
    for (int i = 0; i < 2; i++) arena_release(&far.arena[i], 0);
}

/* Two tensors: a far one of `units` parts along its first dimension, and a near one of two. */
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
    for (int64_t i = 0; i < n; i++) case_store(values, T, i, (float)test_uniform(&far.random, far.least, 1));
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

/* ---- the same rows, far apart ---- */

/* Begin of row r of one side. */
static char *row_of(Tensor t, int64_t r) { return (char *)t.data + r * t.ld * dtype_size(t.dtype); }

/* With random numbers. Not `apart`: both are dense. */
static Ends ends_rows(bool apart, DType T, int ndim, const int64_t *dim)
{
    Ends e;
    for (int i = 0; i < 2; i++) {
        void *data;
        e.t[i] = tensor_view(NULL, T, ndim, dim);
        if (i == FAR && apart) e.t[i].ld = (2 * FAR_ELEMENTS / tensor_rows(e.t[i]) + 16) / 8 * 8;
        OK(arena_alloc(&far.arena[i], tensor_rows(e.t[i]) * e.t[i].ld * dtype_size(T), &data));
        e.t[i].data = data;
    }
    const int64_t n = dim[ndim - 1], bytes = n * dtype_size(T);
    char *row = malloc((size_t)bytes);
    for (int64_t r = 0; r < tensor_rows(e.t[NEAR]); r++) {
        for (int64_t c = 0; c < n; c++) case_store(row, T, c, (float)test_uniform(&far.random, far.least, 1));
        for (int i = 0; i < 2; i++) OK(device_write(&far.dev.stream, row_of(e.t[i], r), row, bytes));
    }
    free(row);
    return e;
}
#define ROWS(apart, T, ...) ends_rows((apart), (T), CASE_DIMS(__VA_ARGS__))

/* One list for both. */
static Ends ends_list(DType T, int64_t n, const void *values)
{
    Ends e;
    OK(tensor_alloc(&far.arena[NEAR], &e.t[NEAR], T, 1, &n));
    OK(device_write(&far.dev.stream, e.t[NEAR].data, values, n * dtype_size(T)));
    e.t[FAR] = e.t[NEAR];
    return e;
}

/* n numbers below `most`, each as often as any other where n is a multiple of it. `most` is no multiple of 7. */
static Ends ends_indices(int64_t n, int64_t most)
{
    int32_t *x = malloc((size_t)n * sizeof *x);
    for (int64_t i = 0; i < n; i++) x[i] = (int32_t)(i * 7 % most);
    const Ends e = ends_list(I32, n, x);
    free(x);
    return e;
}

/* All rows have the same bits on both sides. */
static void rows_check(Ends e, const char *what)
{
    const int64_t bytes = e.t[NEAR].dim[e.t[NEAR].ndim - 1] * dtype_size(e.t[NEAR].dtype);
    char *got = malloc((size_t)bytes), *want = malloc((size_t)bytes);
    for (int64_t r = 0; r < tensor_rows(e.t[NEAR]); r++) {
        OK(device_read(&far.dev.stream, want, row_of(e.t[NEAR], r), bytes));
        OK(device_read(&far.dev.stream, got, row_of(e.t[FAR], r), bytes));
        CHECK_MSG(memcmp(got, want, (size_t)bytes) == 0, "%s: row %lld of a far tensor differs", what, (long long)r);
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
    BOTH_ENDS(gelu_erf_fwd, .y = END(y), .x = END(x));
    ends_check(y, UNIT, "gelu_erf_fwd");
    BOTH_ENDS(gelu_erf_bwd, .dx = END(y), .dy = END(dy), .x = END(x));
    ends_check(y, UNIT, "gelu_erf_bwd");
    BOTH_ENDS(relu2_fwd, .y = END(y), .x = END(x));
    ends_check(y, UNIT, "relu2_fwd");
    BOTH_ENDS(relu2_bwd, .dx = END(y), .dy = END(dy), .x = END(x));
    ends_check(y, UNIT, "relu2_bwd");
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
              .x = END(x), .w = END(w), .position = END(position), .sample = END(sample), .dropout.scale = 1,
              .eps = 1e-3f);
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

/* ---- gradients and experts: rows far apart, of one operand after the other ---- */

TEST(bias_gradient)
{
    far_open();
    const int32_t zero[1] = { 0 };
    Ends dy = ROWS(true, BF16, 300, 64), dbias = ROWS(false, F32, 1, 64), shift = ends_list(I32, 1, zero);
    for (int i = 0; i < 2; i++) dbias.t[i] = tensor_reshape(dbias.t[i], 64);
    BOTH_ENDS(bias_grad, .dbias = END(dbias), .dy = END(dy), .shift = END(shift), .overflow = END(shift), .leaf = 4,
              .headroom_bits = 10);
    for (int i = 0; i < 2; i++) dbias.t[i] = tensor_reshape(dbias.t[i], 1, 64);
    rows_check(dbias, "bias_grad");
    far_close();
}

TEST(table_gradient)
{
    enum { N = 96, V = 8, D = 64 };
    const int32_t zero[1] = { 0 };
    for (int apart = 0; apart < 2; apart++) {
        far_open();
        Ends dtable = ROWS(apart == 0, F32, V, D), dy = ROWS(apart == 1, BF16, N, D);
        Ends index = ends_indices(N, V), shift = ends_list(I32, 1, zero);
        BOTH_ENDS(embedding_grad, .dtable = END(dtable), .dy = END(dy), .index = END(index), .shift = END(shift),
                  .overflow = END(shift), .headroom_bits = 10);
        rows_check(dtable, apart ? "embedding_grad, dy apart" : "embedding_grad, dtable apart");
        far_close();
    }
}

static void experts_case(DType T, int apart)
{
    enum { E = 3, O = 64, I = 72, P = 100 }; /* (no more than 4 blocks) */
    const int64_t begins[E + 1] = { 0, 30, 70, P };
    const int32_t zero[1] = { 0 };
    far_open();
    Ends offset = ends_list(I64, E + 1, begins), shift = ends_list(I32, 1, zero);
    Ends y = ROWS(apart == 0, T, P, O), x = ROWS(apart == 1, T, P, I), w = ROWS(apart == 2, T, E, O, I);
    BOTH_ENDS(grouped_fwd, .y = END(y), .x = END(x), .w = END(w), .offset = END(offset), .leaf = I);
    rows_check(y, "grouped_fwd");
    BOTH_ENDS(grouped_dx, .dx = END(x), .dy = END(y), .w = END(w), .offset = END(offset), .leaf = O);
    rows_check(x, "grouped_dx");
    far_close();
    far_open();
    offset = ends_list(I64, E + 1, begins), shift = ends_list(I32, 1, zero);
    y = ROWS(apart == 0, T, P, O), x = ROWS(apart == 1, T, P, I), w = ROWS(apart == 2, F32, E, O, I);
    for (int fresh = 1; fresh >= 0; fresh--) {
        BOTH_ENDS(grouped_dw, .dw = END(w), .dy = END(y), .x = END(x), .offset = END(offset), .shift = END(shift),
                  .overflow = END(shift), .headroom_bits = 10, .fresh = fresh);
        rows_check(w, "grouped_dw");
    }
    far_close();
}

TEST(products_of_experts)
{
    for (int apart = 0; apart < 3; apart++) {
        experts_case(BF16, apart);
        experts_case(F32, apart);
    }
}

TEST(biases_of_experts)
{
    enum { E = 3, O = 64, P = 30 };
    const int64_t begins[E + 1] = { 0, 9, 20, P };
    const int32_t zero[1] = { 0 };
    for (int apart = 0; apart < 2; apart++) {
        far_open();
        Ends offset = ends_list(I64, E + 1, begins), shift = ends_list(I32, 1, zero);
        Ends y = ROWS(apart == 0, BF16, P, O), bias = ROWS(apart == 1, BF16, E, O);
        BOTH_ENDS(grouped_bias, .y = END(y), .bias = END(bias), .offset = END(offset));
        rows_check(y, "grouped_bias");
        far_close();
        far_open();
        offset = ends_list(I64, E + 1, begins), shift = ends_list(I32, 1, zero);
        y = ROWS(apart == 0, BF16, P, O), bias = ROWS(apart == 1, F32, E, O);
        BOTH_ENDS(grouped_bias_grad, .dbias = END(bias), .dy = END(y), .offset = END(offset), .shift = END(shift),
                  .overflow = END(shift), .headroom_bits = 10);
        rows_check(bias, "grouped_bias_grad");
        far_close();
    }
}

TEST(rows_of_experts)
{
    enum { N = 32, D = 64, PARTS = 2 };
    for (int apart = 0; apart < 3; apart++) {
        far_open();
        Ends a = ROWS(apart == 0, BF16, N, D), b = ROWS(apart == 1, BF16, N, D), c = ROWS(apart == 2, BF16, N, D);
        Ends choice = ends_indices(N, N), row = choice, weight = ROWS(false, F32, N, 1), sums = ROWS(false, F32, N, 1);
        for (int i = 0; i < 2; i++) row.t[i] = tensor_reshape(row.t[i], N, 1);
        BOTH_ENDS(take_rows, .y = END(a), .x = END(b), .choice = END(choice), .weight = END(weight), .topk = 1);
        rows_check(a, "take_rows");
        BOTH_ENDS(unpermute_bwd, .dx = END(a), .dweight = END(sums), .dy = END(b), .x = END(c), .row = END(row),
                  .weight = END(weight));
        rows_check(a, "dx of unpermute_bwd"), rows_check(sums, "dweight of unpermute_bwd");
        BOTH_ENDS(gated_add_fwd, .y = END(a), .residual = END(b), .x = END(c), .gate = END(weight));
        rows_check(a, "gated_add_fwd");
        BOTH_ENDS(gated_add_bwd, .dx = END(a), .dgate = END(sums), .dy = END(b), .x = END(c), .gate = END(weight));
        rows_check(a, "dx of gated_add_bwd"), rows_check(sums, "dgate of gated_add_bwd");
        far_close();
        if (apart == 2) break;
        far_open();
        a = ROWS(apart == 0, BF16, N, D), b = ROWS(apart == 1, BF16, PARTS * N, D);
        BOTH_ENDS(sum_parts, .y = END(a), .x = END(b), .parts = PARTS);
        rows_check(a, "sum_parts");
        far_close();
    }
}

TEST(latent_heads)
{
    enum { N = 16, H = 4, OWN = 16, R = 8, V = 24 };
    for (int apart = 0; apart < 4; apart++) {
        far_open();
        Ends k = ROWS(apart == 0, BF16, N, H, OWN + R), v = ROWS(apart == 1, BF16, N, H, V);
        Ends kv = ROWS(apart == 2, BF16, N, H, OWN + V), pe = ROWS(apart == 3, BF16, N, R);
        BOTH_ENDS(mla_split, .k = END(k), .v = END(v), .kv = END(kv), .pe = END(pe));
        rows_check(k, "k of mla_split"), rows_check(v, "v of mla_split");
        far_close();
        far_open();
        k = ROWS(apart == 0, BF16, N, H, OWN + R), v = ROWS(apart == 1, BF16, N, H, V);
        kv = ROWS(apart == 2, BF16, N, H, OWN + V), pe = ROWS(apart == 3, BF16, N, R);
        BOTH_ENDS(mla_merge, .kv = END(kv), .pe = END(pe), .k = END(k), .v = END(v), .chunk = 1);
        rows_check(kv, "kv of mla_merge"), rows_check(pe, "pe of mla_merge");
        far_close();
    }
}

static void attention_backward_case(int apart)
{
    const DType T = BF16;
    enum { B = 2, S = 64, H = 2, C = 64 };
    const int64_t samples[B] = { 0, 1 };
    far_open();
    Ends m[8]; /* matrices */
    for (int i = 0; i < 8; i++) m[i] = ROWS(apart == i, T, B, S, H, C);
    const Ends dq = m[0], dk = m[1], dv = m[2], go = m[3], o = m[4], q = m[5], k = m[6], v = m[7];
    Ends lse = ROWS(false, F32, B, S, H), delta = ROWS(false, F32, B, S, H), sample = ends_list(I64, B, samples);
    BOTH_ENDS(attention_bwd, .dq = END(dq), .dk = END(dk), .dv = END(dv), .go = END(go), .q = END(q), .k = END(k),
              .v = END(v), .o = END(o), .lse = END(lse), .delta = END(delta), .sample = END(sample),
              .q_span = spans_whole(S), .k_span = spans_whole(S), .scale = 0.125f, .block = 64, .chunk = 1, .leaf = S,
              .positions = S);
    rows_check(dq, "dq of attention_bwd"), rows_check(dk, "dk of attention_bwd"), rows_check(dv, "dv of attention_bwd");
    far_close();
}

TEST(attention_backward)
{
    for (int apart = 0; apart < 8; apart++) attention_backward_case(apart);
}

/* ---- flat buffers ---- */

/* A flat buffer of FAR_ROWS units. */
static Ends ends_flat(DType T)
{
    Ends e = ENDS(T, FAR_ROWS, UNIT);
    for (int i = 0; i < 2; i++) e.t[i] = tensor_reshape(e.t[i], e.t[i].dim[0] * UNIT);
    return e;
}

TEST(accumulators)
{
    far_open();
    Ends x = ends_flat(F32), y = ends_flat(F32);
    BOTH_ENDS(add_acc, .y = END(y), .x = END(x));
    ends_check(y, UNIT, "add_acc");
    BOTH_ENDS(fill_zero_acc, .x = END(y));
    ends_check(y, UNIT, "fill_zero_acc");
    far_close();
    far_open();
    x = ends_flat(F32), y = ends_flat(BF16);
    BOTH_ENDS(cast, .y = END(y), .x = END(x));
    ends_check(y, UNIT, "cast to bf16");
    far_close();
    far_open();
    x = ends_flat(BF16), y = ends_flat(F32);
    BOTH_ENDS(cast, .y = END(y), .x = END(x));
    ends_check(y, UNIT, "cast to f32");
    far_close();
}

/* A table of parts for each side, of a buffer of so many chunks: one part; the first chunk and the last; all but the
 * last chunk, and that. */
typedef enum { PARTS_ONE, PARTS_ENDS, PARTS_ALL } PartsKind;
static Ends ends_parts(PartsKind kind, const int64_t *chunks)
{
    Ends e;
    for (int i = 0; i < 2; i++) {
        const int64_t last = chunks[i] - 1, head = kind == PARTS_ENDS ? 1 : kind == PARTS_ONE ? chunks[i] : last;
        const FlatPart part[2] = {
            { .count = head * FLAT_CHUNK, .number = 0, .flags = FLAT_DECAYS | FLAT_COUNTS },
            { .grad = last * FLAT_CHUNK,
              .value = last * FLAT_CHUNK,
              .shard = last * FLAT_CHUNK,
              .v = last * FLAT_CHUNK,
              .count = FLAT_CHUNK,
              .chunk = head,
              .number = 1,
              .flags = FLAT_COUNTS },
        };
        const int64_t rows = kind == PARTS_ONE ? 1 : 2;
        OK(tensor_new(&far.arena[NEAR], &e.t[i], I64, rows, sizeof *part / sizeof(int64_t)));
        OK(device_write(&far.dev.stream, e.t[i].data, part, rows * (int64_t)sizeof *part));
    }
    return e;
}

static Ends ends_chunks(DType T, int64_t chunks)
{
    Ends e = ENDS(T, chunks, FLAT_CHUNK);
    for (int i = 0; i < 2; i++) e.t[i] = tensor_reshape(e.t[i], e.t[i].dim[0] * FLAT_CHUNK);
    return e;
}

TEST(optimizer)
{
    enum { SEEN = FLAT_CHUNK / 2 }; /* two of a chunk's four blocks */
    const int64_t chunks[2] = { 2, FAR_ELEMENTS / FLAT_CHUNK + 1 };
    const int32_t zeros[2] = { 0, 0 };
    const StepValues values = { .lr = 0.1f, .correct1 = 0.5f, .correct2 = 0.5f, .grad_scale = 0.5f };
    void *step;
    for (PartsKind kind = PARTS_ONE; kind <= PARTS_ALL; kind++) {
        far_open_of(FAR_BYTES_OPTIM);
        far.least = 0; /* (v has squares) */
        OK(arena_alloc(&far.arena[NEAR], sizeof values, &step));
        OK(device_write(&far.dev.stream, step, &values, sizeof values));
        Ends w = ends_chunks(F32, chunks[FAR]), m = ends_chunks(F32, chunks[FAR]), v = ends_chunks(F32, chunks[FAR]);
        Ends g = ends_chunks(F32, chunks[FAR]), copy = ends_chunks(BF16, chunks[FAR]);
        Ends shift = ends_list(I32, 2, zeros), parts = ends_parts(kind, chunks);
        BOTH_ENDS(adamw, .w = END(w), .m = END(m), .v = END(v), .g = END(g), .copy = END(copy), .shift = END(shift),
                  .parts = END(parts), .chunks = kind == PARTS_ENDS ? 2 : chunks[side], .step = step, .beta1 = 0.9f,
                  .beta2 = 0.99f, .eps = 1, .decay = 0.1f);
        ends_check(w, SEEN, "w of adamw");
        ends_check(m, SEEN, "m of adamw");
        ends_check(v, SEEN, "v of adamw");
        ends_check(copy, SEEN, "copy of adamw");
        far_close();
    }
}

TEST(one_moment)
{
    enum { SEEN = FLAT_CHUNK / 2 };
    const int64_t chunks[2] = { 2, FAR_ELEMENTS / FLAT_CHUNK + 1 };
    const int32_t zeros[2] = { 0, 0 };
    const StepValues values = { .lr = 0.1f, .grad_scale = 0.5f };
    void *step;
    far_open_of(FAR_BYTES_OPTIM);
    OK(arena_alloc(&far.arena[NEAR], sizeof values, &step));
    OK(device_write(&far.dev.stream, step, &values, sizeof values));
    Ends w = ends_chunks(F32, chunks[FAR]), m = ends_chunks(F32, chunks[FAR]), g = ends_chunks(F32, chunks[FAR]);
    Ends copy = ends_chunks(BF16, chunks[FAR]), shift = ends_list(I32, 2, zeros),
         parts = ends_parts(PARTS_ENDS, chunks);
    BOTH_ENDS(one_moment, .w = END(w), .m = END(m), .g = END(g), .copy = END(copy), .shift = END(shift),
              .parts = END(parts), .chunks = 2, .step = step, .beta1 = 0.9f, .beta2 = 0.99f, .decay = 0.1f,
              .hidden_rate = 1, .lion = 1);
    ends_check(w, SEEN, "w of one_moment");
    ends_check(m, SEEN, "m of one_moment");
    ends_check(copy, SEEN, "copy of one_moment");
    far_close();
}

TEST(statistics)
{
    const int64_t chunks[2] = { 2, FAR_ELEMENTS / FLAT_CHUNK + 1 };
    const int64_t zeros[10] = { 0 };
    far_open();
    Ends g = ends_chunks(F32, chunks[FAR]), parts = ends_parts(PARTS_ENDS, chunks), shift = ends_list(I32, 2, zeros);
    Ends max, sums;
    for (int i = 0; i < 2; i++) {
        OK(tensor_new(&far.arena[NEAR], &max.t[i], I64, 2));
        OK(tensor_new(&far.arena[NEAR], &sums.t[i], I64, 2, 4));
        OK(device_write(&far.dev.stream, max.t[i].data, zeros, tensor_bytes(max.t[i])));
        OK(device_write(&far.dev.stream, sums.t[i].data, zeros, tensor_bytes(sums.t[i])));
    }
    BOTH_ENDS(grad_stats, .max = END(max), .sumsq = END(sums), .g = END(g), .shift = END(shift), .parts = END(parts),
              .chunks = 2);
    ends_check(max, 1, "max of grad_stats");
    rows_check(sums, "sumsq of grad_stats");
    far_close();
}

TEST_MAIN
