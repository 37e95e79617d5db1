/* Rotary positions and the columns of the fused projection: cuda/rope.cu. */
#include "pair_views.h"

static const DType types[] = { F32, BF16, F16 };

typedef struct {
    int64_t N, H, R;   /* heads of 2 R columns that turn */
    int64_t gap, skip; /* around each head */
    int inverse, used;
    int64_t stay; /* columns behind them */
    int64_t group; /* 0: none; else heads that lie side by side, with a gap behind the last alone */
} RopeShape;

static void rope_case(DType T, RopeShape p)
{
    enum { P = 50 };
    CudaCase *c = case_open();
    int32_t position[64];
    const int64_t used = p.N - p.N / 3;
    ASSERT(p.N <= 64);
    for (int64_t n = 0; n < p.N; n++) position[n] = (int32_t)(test_rand(&c->random) % P);
    const int64_t group = p.group ? p.group : 1, C = 2 * p.R + p.stay;
    Matrix x = matrix_uniform(c, T, -2, 2, p.N * p.H / group, group * C, p.gap, p.skip);
    Pair at = pair_values(c, I32, position, p.N), rows = pair_values(c, I64, &used, 1);
    Pair cosine = pair_random(c, F32, 1, P, p.R), sine = pair_random(c, F32, 1, P, p.R);
    Pair heads = pair_used(matrix_heads(&x, p.N, p.H), p.used ? &rows : NULL);
    for (int side = 0; side < 2; side++) heads.t[side].dim[2] = C, heads.t[side].group = group;
    BOTH(c, rope, .x = AT(heads), .position = AT(at), .cos = AT(cosine), .sin = AT(sine),
         .inverse = p.inverse);
    pair_check(c, x.all, case_tolerance(T), "rope %s N %lld H %lld R %lld gap %lld skip %lld stay %lld group %lld",
               dtype_name(T), (long long)p.N, (long long)p.H, (long long)p.R, (long long)p.gap, (long long)p.skip,
               (long long)p.stay, (long long)p.group);
    case_close(c);
}

/* Queries as a projection has them, in groups of 2, 3 and 8, with k and v of the group behind; and queries that lie
 * anyhow. */
TEST(rope_in_groups)
{
    static const RopeShape shapes[] = { { 3, 8, 16, 64, 0, 0, 0, 0, 2 },  { 5, 6, 8, 32, 0, 1, 0, 0, 3 },
                                        { 2, 32, 32, 128, 0, 0, 0, 0, 8 }, { 9, 16, 8, 8, 8, 1, 1, 16, 8 },
                                        { 3, 9, 5, 3, 1, 0, 0, 0, 3 },     { 4, 2, 64, 256, 0, 0, 0, 0, 2 } };
    for (int t = 0; t < 3; t++)
        for (int k = 0; k < 6; k++) rope_case(types[t], shapes[k]);
}

/* Heads 1 to more than 4 a thread and more than a block takes; half widths of 1, of packs, of neither. */
TEST(rope)
{
    static const RopeShape shapes[] = { { 1, 1, 1, 0, 0, 0, 0 },   { 3, 2, 15, 0, 0, 1, 0 },
                                        { 4, 3, 16, 0, 0, 0, 0 },  { 5, 1, 17, 0, 0, 1, 0 },
                                        { 9, 4, 8, 0, 0, 0, 1 },   { 63, 5, 8, 8, 8, 1, 0 },
                                        { 2, 12, 32, 0, 0, 0, 0 }, { 3, 7, 64, 16, 0, 1, 1 },
                                        { 2, 3, 32, 3, 1, 0, 0 },  { 1, 36, 128, 0, 0, 0, 0 },
                                        { 64, 1, 4, 0, 0, 1, 0 },  { 5, 3, 16, 0, 0, 1, 0, 32 },
                                        { 4, 6, 5, 2, 1, 0, 0, 7 } };
    for (int t = 0; t < 3; t++)
        for (int k = 0; k < 13; k++) rope_case(types[t], shapes[k]);
}

/* Turned and turned back: what it was, to the dtype's rounding. */
TEST(rope_inverse)
{
    CudaCase *c = case_open();
    enum { N = 6, H = 3, R = 16 };
    float angles[2][N * R];
    int32_t position[N];
    for (int i = 0; i < N * R; i++) {
        const double a = test_uniform(&c->random, 0, 6);
        angles[0][i] = (float)cos(a), angles[1][i] = (float)sin(a);
    }
    for (int n = 0; n < N; n++) position[n] = N - 1 - n;
    Pair x = pair_random(c, F32, 1, N, H, 2 * R), at = pair_values(c, I32, position, N);
    Pair cosine = pair_values(c, F32, angles[0], N, R), sine = pair_values(c, F32, angles[1], N, R);
    float before[N * H * 2 * R], after[N * H * 2 * R];
    memcpy(before, x.t[CASE_CPU].data, sizeof before);
    case_side = CASE_GPU;
    for (int back = 0; back < 2; back++)
        OK(op(case_stream(c), rope, .x = AT(x), .position = AT(at), .cos = AT(cosine), .sin = AT(sine),
              .inverse = back));
    OK(device_read(case_stream(c), after, x.t[CASE_GPU].data, sizeof after));
    for (int i = 0; i < N * H * 2 * R; i++)
        CHECK_CLOSE((double)after[i], (double)before[i], 1e-6, "element %d", i);
    case_close(c);
}

typedef struct {
    int64_t N, H, K, C, gap, skip; /* K chunks, each with H / K heads of C columns of q, one of k, one of v */
    int used, gated; /* gated: and H / K heads of the gate */
} QkvShape;

static void qkv_case(DType T, QkvShape p)
{
    CudaCase *c = case_open();
    const int64_t W = ((p.gated ? 2 : 1) * p.H + 2 * p.K) * p.C, used = p.N - p.N / 3;
    char name[96];
    snprintf(name, sizeof name, "%s N %lld H %lld K %lld C %lld gap %lld skip %lld gated %d", dtype_name(T),
             (long long)p.N, (long long)p.H, (long long)p.K, (long long)p.C, (long long)p.gap,
             (long long)p.skip, p.gated);
    Matrix g = matrix_uniform(c, T, -1, 1, p.N, p.H * p.C, p.gap, p.skip);
    const Pair gate = p.gated ? g.view : (Pair){ 0 };
    Matrix qkv = matrix_uniform(c, T, -1, 1, p.N, W, p.gap, p.skip),
           back = matrix_uniform(c, T, -1, 1, p.N, W, p.gap, p.skip);
    Matrix q = matrix_uniform(c, T, -1, 1, p.N, p.H * p.C, p.gap, p.skip),
           k = matrix_uniform(c, T, -1, 1, p.N, p.K * p.C, p.gap, p.skip),
           v = matrix_uniform(c, T, -1, 1, p.N, p.K * p.C, p.gap, p.skip);
    Pair rows = pair_values(c, I64, &used, 1);
    const Pair *count = p.used ? &rows : NULL;
    const Pair from = pair_used(qkv.view, count), to = pair_used(back.view, count);
    BOTH(c, qkv_split, .q = AT(q.view), .k = AT(k.view), .v = AT(v.view), .gate = AT(gate), .qkv = AT(from),
         .chunks = p.K);
    pair_check(c, q.all, 0, "q, %s", name);
    pair_check(c, k.all, 0, "k, %s", name);
    pair_check(c, v.all, 0, "v, %s", name);
    pair_check(c, g.all, 0, "gate, %s", name);
    BOTH(c, qkv_merge, .qkv = AT(to), .q = AT(q.view), .k = AT(k.view), .v = AT(v.view), .gate = AT(gate),
         .chunks = p.K);
    pair_check(c, back.all, 0, "qkv, %s", name);
    case_close(c);
}

TEST(qkv)
{
    static const QkvShape shapes[] = { { 1, 1, 1, 1, 0, 0, 0 },   { 3, 4, 2, 5, 0, 0, 0 },
                                       { 4, 6, 1, 16, 0, 0, 1 },  { 5, 3, 3, 17, 0, 0, 0 },
                                       { 31, 12, 4, 8, 0, 0, 0 }, { 2, 12, 12, 64, 0, 0, 0 },
                                       { 5, 32, 8, 32, 0, 0, 0 }, { 3, 2, 1, 256, 8, 8, 0 },
                                       { 7, 8, 2, 24, 5, 1, 1 },  { 257, 1, 1, 8, 0, 0, 1 },
                                       { 5, 6, 2, 32, 8, 8, 0, 1 }, { 3, 4, 2, 5, 0, 0, 1, 1 },
                                       { 31, 12, 4, 8, 0, 0, 0, 1 },
                                       { 3, 32, 16, 96, 0, 0, 0 } /* 12 packs a head, no power of two, in 16 bits */ };
    for (int t = 0; t < 3; t++)
        for (int k = 0; k < 14; k++) qkv_case(types[t], shapes[k]);
}

typedef struct {
    int64_t N, R, C, gap, skip; /* R ranks with C columns each */
    int used;
} JoinShape;

static void join_case(DType T, JoinShape p)
{
    CudaCase *c = case_open();
    const int64_t used = p.N - p.N / 3;
    Matrix x = matrix_uniform(c, T, -1, 1, p.R * p.N, p.C, p.gap, p.skip),
           y = matrix_uniform(c, T, -1, 1, p.N * p.R, p.C, p.gap, p.skip);
    Pair rows = pair_values(c, I64, &used, 1);
    const Pair from = matrix_heads(&x, p.R, p.N), to = pair_used(matrix_heads(&y, p.N, p.R), p.used ? &rows : NULL);
    BOTH(c, join_columns, .y = AT(to), .x = AT(from));
    pair_check(c, y.all, 0, "join_columns %s N %lld R %lld C %lld gap %lld skip %lld", dtype_name(T),
               (long long)p.N, (long long)p.R, (long long)p.C, (long long)p.gap, (long long)p.skip);
    case_close(c);
}

TEST(join_columns)
{
    static const JoinShape shapes[] = { { 1, 1, 1, 0, 0, 0 },  { 3, 2, 5, 0, 0, 0 },  { 4, 8, 16, 0, 0, 1 },
                                        { 31, 4, 8, 0, 0, 0 }, { 6, 2, 64, 8, 8, 1 }, { 7, 3, 24, 5, 1, 1 },
                                        { 2, 2, 256, 0, 0, 0 }, { 257, 1, 8, 0, 0, 1 },
                                        { 2, 1, 4096, 0, 0, 0 }, { 3, 2, 2051, 0, 0, 1 } /* wider than a block */ };
    for (int t = 0; t < 3; t++)
        for (int k = 0; k < 10; k++) join_case(types[t], shapes[k]);
}

typedef struct {
    int64_t N, H, own, shared, value, gap, skip;
    int used;
} LatentShape;

/* Keys and values of latent attention; each tensor as columns of something wider. */
static void latent_case(DType T, LatentShape p)
{
    CudaCase *c = case_open();
    const int64_t used = p.N - p.N / 3, rows = p.N * p.H;
    Matrix k = matrix_uniform(c, T, -1, 1, rows, p.own + p.shared, p.gap, p.skip),
           v = matrix_uniform(c, T, -1, 1, rows, p.value, p.gap, p.skip),
           kv = matrix_uniform(c, T, -1, 1, rows, p.own + p.value, p.gap, p.skip),
           back = matrix_uniform(c, T, -1, 1, rows, p.own + p.value, p.gap, p.skip),
           pe = matrix_uniform(c, T, -1, 1, p.N, p.shared, p.gap, p.skip),
           sum = matrix_uniform(c, T, -1, 1, p.N, p.shared, p.gap, p.skip);
    Pair count = pair_values(c, I64, &used, 1);
    const Pair from = pair_used(matrix_heads(&kv, p.N, p.H), p.used ? &count : NULL);
    const Pair to = pair_used(matrix_heads(&back, p.N, p.H), p.used ? &count : NULL);
    const Pair keys = matrix_heads(&k, p.N, p.H), values = matrix_heads(&v, p.N, p.H);
    char name[80];
    snprintf(name, sizeof name, "%s N %d H %d of %d, %d, %d gap %d", dtype_name(T), (int)p.N, (int)p.H, (int)p.own,
             (int)p.shared, (int)p.value, (int)p.gap);
    BOTH(c, mla_split, .k = AT(keys), .v = AT(values), .kv = AT(from), .pe = AT(pe.view));
    pair_check(c, k.all, 0, "k, %s", name);
    pair_check(c, v.all, 0, "v, %s", name);
    BOTH(c, mla_merge, .kv = AT(to), .pe = AT(sum.view), .k = AT(keys), .v = AT(values), .chunk = p.H);
    pair_check(c, back.all, 0, "kv, %s", name);
    pair_check(c, sum.all, case_tolerance(T), "pe, %s", name);
    case_close(c);
}

TEST(latent_keys_and_values)
{
    static const LatentShape shapes[] = { { 1, 1, 8, 8, 8, 0, 0, 0 },    { 3, 2, 5, 3, 4, 0, 0, 0 },
                                          { 4, 16, 128, 64, 128, 0, 0, 1 }, { 31, 4, 16, 8, 24, 8, 8, 0 },
                                          { 7, 3, 24, 8, 16, 5, 1, 1 },  { 65, 2, 8, 16, 8, 0, 0, 1 } };
    for (int t = 0; t < 3; t++)
        for (int k = 0; k < 6; k++) latent_case(types[t], shapes[k]);
}

TEST(heads_refused)
{
    CudaCase *c = case_open();
    Pair qkv = pair_random(c, F32, 1, 2, 16), q = pair_output(c, F32, 2, 8), few = pair_output(c, F32, 2, 4),
         k = pair_output(c, F32, 2, 4), v = pair_output(c, F32, 2, 4);
    case_side = CASE_GPU;
    CHECK(op(case_stream(c), qkv_split, .q = AT(few), .k = AT(k), .v = AT(v), .qkv = AT(qkv), .chunks = 1) ==
          ERR_SHAPE);
    for (int chunks = 0; chunks <= 3; chunks++) {
        Err want = chunks == 0 || chunks == 3 ? ERR_SHAPE : ERR_OK;
        CHECK(op(case_stream(c), qkv_split, .q = AT(q), .k = AT(k), .v = AT(v), .qkv = AT(qkv), .chunks = chunks) ==
              want);
    }
    case_close(c);
}

TEST_MAIN
