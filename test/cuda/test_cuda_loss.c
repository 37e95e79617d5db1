/* Cross entropy and the sum of losses on cuda against the CPU's: sizes, views, ranks, bad numbers, counts in use. */
#include "cuda_case.h"

static const DType types[] = { F32, BF16, F16 };
enum { TYPES = 3 };

/* The tensor with a device-side count of rows. */
static Tensor counted(Tensor t, const Pair *rows)
{
    t.rows = rows->t[case_side].data;
    return t;
}

static Pair pair_columns(Pair p, int64_t first, int64_t count)
{
    for (int side = 0; side < 2; side++) p.t[side] = tensor_col_slice(p.t[side], first, count);
    return p;
}

/* [N, J] as the one rank's [1, N, J] that xent_loss reads. */
static Tensor one_rank(Tensor t)
{
    return tensor_reshape(t, 1, t.dim[0], t.dim[1]);
}

static Pair pair_step(CudaCase *c, const StepValues *v)
{
    return pair_values(c, I64, v, sizeof *v / 8);
}

typedef struct {
    DType T;
    int64_t N, V, block, first, vocab; /* vocab 0: no padding */
    int64_t before, after;             /* columns of other tensors in the same rows */
    int64_t rows;                      /* in use, 0: all */
    float softcap;
} Xent;

/* Targets: none, this rank's first and last columns, others of its, other ranks'. */
static Pair targets(CudaCase *c, const Xent *x, int64_t vocab)
{
    int32_t t[512];
    ASSERT(x->N <= 512);
    for (int64_t n = 0; n < x->N; n++) {
        int64_t own = test_rand(&c->random) % (uint64_t)x->V;
        t[n] = (int32_t)(x->first + (own < vocab - x->first ? own : 0));
        if (n % 7 == 1) t[n] = (int32_t)x->first;
        if (n % 7 == 2) t[n] = (int32_t)(vocab - 1 < x->first + x->V ? vocab - 1 : x->first + x->V - 1);
        if (n % 7 == 3) t[n] = -1;
        if (n % 7 == 5 && x->first) t[n] = (int32_t)(x->first - 1);
    }
    return pair_values(c, I32, t, x->N);
}

static void xent_case(Xent x)
{
    CudaCase *c = case_open();
    int64_t N = x.N, J = (x.V + x.block - 1) / x.block, vocab = x.vocab ? x.vocab : x.first + x.V;
    int64_t rows = x.rows ? x.rows : N;
    char what[160];
    snprintf(what, sizeof what, "%s N %d V %d block %d first %d vocab %d before %d", dtype_name(x.T), (int)N, (int)x.V,
             (int)x.block, (int)x.first, (int)vocab, (int)x.before);
    StepValues v = { .loss_scale = 0.125f };
    Pair whole = pair_random(c, x.T, 9, N, x.before + x.V + x.after), logits = pair_columns(whole, x.before, x.V);
    Pair target = targets(c, &x, vocab), step = pair_step(c, &v), use = pair_values(c, I64, &rows, 1);
    Pair max = pair_random(c, F32, 9, N, J), sum = pair_random(c, F32, 9, N, J), at = pair_random(c, F32, 9, N);
    Pair row_max = pair_random(c, F32, 9, N), row_sum = pair_random(c, F32, 9, N), loss = pair_random(c, F32, 9, N);
    Pair row = pair_values(c, x.T, whole.t[CASE_CPU].data, N, x.before + x.V + x.after),
         row_loss = pair_random(c, F32, 9, N);
    BOTH(c, xent_stats, .block_max = AT(max), .block_sum = AT(sum), .target_logit = AT(at),
         .logits = counted(AT(logits), &use), .target = AT(target), .block = x.block, .first = x.first, .vocab = vocab);
    pair_check(c, max, 0, "block max %s", what);
    pair_check(c, sum, 1e-5, "block sum %s", what);
    pair_check(c, at, 0, "target's logit %s", what);
    BOTH(c, xent_loss, .loss = counted(AT(loss), &use), .row_max = AT(row_max), .row_sum = AT(row_sum),
         .block_max = one_rank(AT(max)), .block_sum = one_rank(AT(sum)), .target_logit = tensor_reshape(AT(at), 1, N),
         .target = AT(target));
    pair_check(c, row_max, 0, "row max %s", what);
    pair_check(c, row_sum, 1e-5, "row sum %s", what);
    pair_check(c, loss, 1e-5, "loss %s", what);
    BOTH(c, xent_bwd, .logits = AT(logits), .target = counted(AT(target), &use), .row_max = AT(row_max),
         .row_sum = AT(row_sum), .step = AT(step).data, .weight = 0.3f, .softcap = x.softcap, .first = x.first,
         .vocab = vocab);
    pair_check(c, whole, case_tolerance(x.T), "gradient %s", what);
    if (x.first || x.V % x.block) return case_close(c);
    const Pair columns = pair_columns(row, x.before, x.V);
    BOTH(c, xent_row, .loss = counted(AT(row_loss), &use), .logits = AT(columns), .target = AT(target),
         .step = AT(step).data, .weight = 0.3f, .softcap = x.softcap, .block = x.block, .vocab = vocab);
    pair_check(c, row, case_tolerance(x.T), "gradient of rows %s", what);
    pair_check(c, row_loss, 1e-5, "loss of rows %s", what);
    case_close(c);
}

/* Around a vector, a warp's share of a block, a thread block's share of a row (8192 columns of 16 bits, 4096 of 32). */
TEST(sizes)
{
    static const int64_t V[] = { 1, 7, 8, 9, 31, 33, 255, 1000, 4095, 4097 };
    for (int t = 0; t < TYPES; t++) {
        for (size_t i = 0; i < sizeof V / sizeof *V; i++) {
            xent_case((Xent){ .T = types[t], .N = 1 + V[i] % 3, .V = V[i], .block = V[i] });
            if (V[i] <= 1000) xent_case((Xent){ .T = types[t], .N = 8, .V = V[i], .block = V[i] / 3 + 1, .first = 40 });
        }
        xent_case((Xent){ .T = types[t], .N = 1, .V = 8193, .block = 8193 });
        xent_case((Xent){ .T = types[t], .N = 1, .V = 16391, .block = 16391 });
        xent_case((Xent){ .T = types[t], .N = 130, .V = 16, .block = 8 });
        xent_case((Xent){ .T = types[t], .N = 3, .V = 1031, .block = 1031, .softcap = 10 });
    }
}

/* Rows and blocks that begin anywhere between two 16-byte boundaries. */
TEST(unaligned)
{
    for (int t = 0; t < TYPES; t++)
        for (int64_t before = 0; before < 9; before++)
            xent_case((Xent){ .T = types[t], .N = 3, .V = 40 + before, .block = 13, .before = before, .after = 3 });
}

/* Columns that are no words: the end of a block, whole blocks, the whole slice of a rank. */
TEST(padding)
{
    static const int64_t vocab[] = { 199, 150, 126, 125, 101 };
    for (int t = 0; t < TYPES; t++)
        for (size_t i = 0; i < sizeof vocab / sizeof *vocab; i++)
            xent_case((Xent){ .T = types[t], .N = 9, .V = 100, .block = 25, .first = 100, .vocab = vocab[i] });
}

TEST(rows_in_use)
{
    for (int64_t rows = 1; rows <= 21; rows += 5)
        xent_case((Xent){ .T = BF16, .N = 21, .V = 70, .block = 35, .rows = rows, .after = 2 });
}

/* A whole slice of padding: all its blocks are empty, its gradient is 0. */
TEST(empty_rank)
{
    CudaCase *c = case_open();
    Pair logits = pair_random(c, BF16, 3, 4, 24), max = pair_zero(c, F32, 4, 3), sum = pair_output(c, F32, 4, 3);
    Pair at = pair_output(c, F32, 4), target = pair_zero(c, I32, 4);
    Pair one = pair_values(c, F32, ((float[]){ 1, 1, 1, 1 }), 4), step = pair_step(c, &(StepValues){ .loss_scale = 1 });
    BOTH(c, xent_stats, .block_max = AT(max), .block_sum = AT(sum), .target_logit = AT(at), .logits = AT(logits),
         .target = AT(target), .block = 8, .first = 24, .vocab = 24);
    pair_check(c, max, 0, "max");
    pair_check(c, sum, 0, "sum");
    pair_check(c, at, 0, "target's logit");
    CHECK(isinf(((float *)max.t[CASE_CPU].data)[0]));
    BOTH(c, xent_bwd, .logits = AT(logits), .target = AT(target), .row_max = AT(one), .row_sum = AT(one),
         .step = AT(step).data, .weight = 1, .first = 24, .vocab = 24);
    pair_check(c, logits, 0, "gradient");
    case_close(c);
}

/* Statistics of R ranks with J blocks each, some of them empty. */
static void ranks_case(int64_t R, int64_t N, int64_t J)
{
    CudaCase *c = case_open();
    float *max = malloc((size_t)(R * N * J) * 4), *sum = malloc((size_t)(R * N * J) * 4);
    int32_t *t = malloc((size_t)N * 4);
    for (int64_t i = 0; i < R * N * J; i++) {
        bool empty = i % 5 == 3;
        max[i] = empty ? -INFINITY : (float)test_uniform(&c->random, -20, 20);
        sum[i] = empty ? 0 : (float)test_uniform(&c->random, 1, 300);
    }
    for (int64_t i = 0; i < N; i++) t[i] = (int32_t)(i % 4) - 1;
    Pair bmax = pair_values(c, F32, max, R, N, J), bsum = pair_values(c, F32, sum, R, N, J);
    Pair at = pair_random(c, F32, 5, R, N), target = pair_values(c, I32, t, N);
    Pair row_max = pair_output(c, F32, N), row_sum = pair_output(c, F32, N), loss = pair_output(c, F32, N);
    BOTH(c, xent_loss, .loss = AT(loss), .row_max = AT(row_max), .row_sum = AT(row_sum), .block_max = AT(bmax),
         .block_sum = AT(bsum), .target_logit = AT(at), .target = AT(target));
    pair_check(c, row_max, 0, "row max, %d ranks %d rows %d blocks", (int)R, (int)N, (int)J);
    pair_check(c, row_sum, 1e-5, "row sum, %d ranks %d rows %d blocks", (int)R, (int)N, (int)J);
    pair_check(c, loss, 1e-5, "loss, %d ranks %d rows %d blocks", (int)R, (int)N, (int)J);
    free(max), free(sum), free(t);
    case_close(c);
}

TEST(ranks)
{
    ranks_case(1, 1, 1);
    ranks_case(2, 127, 1);
    ranks_case(2, 128, 3);
    ranks_case(4, 129, 16);
    ranks_case(3, 300, 7);
}

/* One row of 40 logits, one of them bad: the loss of both devices is not finite, and loss_sum says so. */
static void bad_case(DType T, int place, float bad)
{
    CudaCase *c = case_open();
    float l[40];
    int64_t start[3] = { 10, 20, 0 };
    for (int i = 0; i < 40; i++) l[i] = (float)i;
    l[place] = bad;
    Pair logits = pair_values(c, T, l, 1, 40), target = pair_zero(c, I32, 1), sums = pair_values(c, I64, start, 3);
    Pair max = pair_output(c, F32, 1, 3), sum = pair_output(c, F32, 1, 3), at = pair_output(c, F32, 1);
    Pair row_max = pair_output(c, F32, 1), row_sum = pair_output(c, F32, 1), loss = pair_output(c, F32, 1);
    BOTH(c, xent_stats, .block_max = AT(max), .block_sum = AT(sum), .target_logit = AT(at), .logits = AT(logits),
         .target = AT(target), .block = 17, .vocab = 40);
    BOTH(c, xent_loss, .loss = AT(loss), .row_max = AT(row_max), .row_sum = AT(row_sum), .block_max = one_rank(AT(max)),
         .block_sum = one_rank(AT(sum)), .target_logit = tensor_reshape(AT(at), 1, 1), .target = AT(target));
    BOTH(c, loss_sum, .sums = AT(sums), .loss = AT(loss), .target = AT(target));
    const int64_t *s = sums.t[CASE_CPU].data;
    CHECK_MSG(s[0] == 10 && s[1] == 21 && s[2] == 1, "cpu: %s, logit %d is %g", dtype_name(T), place, (double)bad);
    pair_check(c, sums, 0, "%s, logit %d is %g", dtype_name(T), place, (double)bad);
    case_close(c);
}

TEST(bad_logits)
{
    for (int t = 0; t < TYPES; t++)
        for (int place = 0; place < 40; place += 3) {
            bad_case(types[t], place, NAN);
            bad_case(types[t], place, INFINITY);
        }
}

/* -Inf is a logit of probability 0; only a block of nothing else has no sum. */
TEST(minus_infinity)
{
    for (int t = 0; t < TYPES; t++) {
        CudaCase *c = case_open();
        float l[2][60];
        for (int i = 0; i < 120; i++) l[i / 60][i % 60] = i % 60 < 20 || i % 2 ? -INFINITY : (float)(i % 7);
        Pair logits = pair_values(c, types[t], l, 2, 60), target = pair_zero(c, I32, 2);
        Pair max = pair_output(c, F32, 2, 2), sum = pair_output(c, F32, 2, 2), at = pair_output(c, F32, 2);
        BOTH(c, xent_stats, .block_max = AT(max), .block_sum = AT(sum), .target_logit = AT(at), .logits = AT(logits),
             .target = AT(target), .block = 30, .vocab = 60);
        pair_check(c, max, 0, "max");
        pair_check(c, sum, 1e-5, "sum");
        case_close(c);
    }
}

TEST(block_of_minus_infinity)
{
    CudaCase *c = case_open();
    float l[40], got[2];
    for (int i = 0; i < 40; i++) l[i] = i < 20 ? -INFINITY : 1;
    Pair logits = pair_values(c, F32, l, 1, 40), target = pair_zero(c, I32, 1);
    Pair max = pair_zero(c, F32, 1, 2), sum = pair_zero(c, F32, 1, 2), at = pair_output(c, F32, 1);
    BOTH(c, xent_stats, .block_max = AT(max), .block_sum = AT(sum), .target_logit = AT(at), .logits = AT(logits),
         .target = AT(target), .block = 20, .vocab = 40);
    pair_check(c, max, 0, "max");
    OK(device_read(&c->dev[CASE_GPU].stream, got, sum.t[CASE_GPU].data, sizeof got));
    CHECK(isnan(((float *)sum.t[CASE_CPU].data)[0]) && isnan(got[0]) && got[1] == 20);
    case_close(c);
}

/* Integers, so equal to the last: sum in fixed point, count, flag. */
static void sum_case(int64_t N, int64_t rows, float bad, int64_t place)
{
    CudaCase *c = case_open();
    float *l = malloc((size_t)N * 4);
    int32_t *t = malloc((size_t)N * 4);
    int64_t start[3] = { -7, 3, 0 };
    for (int64_t i = 0; i < N; i++) l[i] = (float)test_uniform(&c->random, 0, 30), t[i] = (int32_t)(i % 4) - 1;
    if (place >= 0) l[place] = bad;
    Pair loss = pair_values(c, F32, l, N), target = pair_values(c, I32, t, N), sums = pair_values(c, I64, start, 3);
    Pair use = pair_values(c, I64, &rows, 1);
    BOTH(c, loss_sum, .sums = AT(sums), .loss = counted(AT(loss), &use), .target = AT(target));
    pair_check(c, sums, 0, "%d rows, %d in use, %g at %d", (int)N, (int)rows, (double)bad, (int)place);
    free(l), free(t);
    case_close(c);
}

TEST(loss_sum)
{
    static const int64_t N[] = { 1, 31, 255, 256, 257, 1000, 64 * 256 + 5 };
    for (size_t i = 0; i < sizeof N / sizeof *N; i++) {
        sum_case(N[i], N[i], 0, -1);
        sum_case(N[i], N[i] / 2, 0, -1);
    }
    static const float bad[] = { NAN, INFINITY, -INFINITY, 65536.0f, 65535.996f, -65536.0f };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) sum_case(300, 300, bad[i], 280);
}

TEST_MAIN
