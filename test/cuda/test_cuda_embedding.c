/* Lookup, its gradient, and column sums on cuda against the CPU's: sizes, views, other ranks' rows, counts in use. */
#include "cuda_case.h"

static const DType types[] = { F32, BF16, F16 };
enum { TYPES = 3 };

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

/* What an op finds in the workspace is anybody's: NaN here. */
static void spoil_workspace(CudaCase *c)
{
    enum { BYTES = 256 << 10 };
    static char all_ones[BYTES];
    memset(all_ones, 0xFF, BYTES);
    OK(device_write(&c->dev[CASE_GPU].stream, c->dev[CASE_GPU].workspace, all_ones, BYTES));
}

/* How tokens fall on rows. */
typedef enum { EVENLY, FREQUENT, ONE_ROW, IN_ORDER } Fall;

/* Indices into rows first .. first + V - 1, or every 6th outside them or none. */
static Pair indices(CudaCase *c, int64_t N, int64_t V, int64_t first, Fall fall, bool outside)
{
    int32_t *index = malloc((size_t)N * 4);
    for (int64_t n = 0; n < N; n++) {
        uint64_t any = test_rand(&c->random);
        int64_t row = (int64_t)(any % (uint64_t)V);
        if (fall == FREQUENT && any >> 40 & 1) row = 0;
        if (fall == FREQUENT && (any >> 40 & 6) == 6) row = V - 1;
        if (fall == ONE_ROW) row = V / 2;
        if (fall == IN_ORDER) row = n * V / N;
        index[n] = (int32_t)(first + row);
        if (outside && n % 6 == 2) index[n] = n % 12 == 2 ? -1 : (int32_t)(first + V);
        if (outside && n % 6 == 4 && first) index[n] = (int32_t)(first - 1);
    }
    Pair p = pair_values(c, I32, index, N);
    free(index);
    return p;
}

/* ---- lookup ---- */

static void fwd_case(DType T, DType to, int64_t N, int64_t V, int64_t D, int64_t pad, int64_t rows, bool add)
{
    CudaCase *c = case_open();
    Pair whole = pair_random(c, to, 1, N, D + pad), y = pair_columns(whole, pad / 2, D);
    Pair table = pair_columns(pair_random(c, T, 1, V, D + pad), 0, D);
    Pair index = indices(c, N, V, 100, EVENLY, true), use = pair_values(c, I64, &rows, 1);
    BOTH(c, embedding_fwd, .y = counted(AT(y), &use), .table = AT(table), .index = AT(index), .first = 100, .add = add);
    pair_check(c, whole, add ? case_tolerance(to) : 0, "%s N %d V %d D %d pad %d rows %d add %d", dtype_name(T), (int)N,
               (int)V, (int)D, (int)pad, (int)rows, add);
    case_close(c);
}

TEST(lookup)
{
    static const int64_t D[] = { 1, 4, 7, 8, 9, 64, 65, 2056 };
    for (int t = 0; t < TYPES; t++) {
        for (size_t i = 0; i < sizeof D / sizeof *D; i++) {
            fwd_case(types[t], types[t], 1 + D[i] % 4, 5, D[i], 0, 100, D[i] % 2);
            fwd_case(types[t], types[t], 11, 5, D[i], 3, 7, !(D[i] % 2));
            fwd_case(types[t], F32, 3, 5, D[i], 8, 3, D[i] % 2);
        }
        fwd_case(types[t], types[t], 530, 40, 8, 0, 530, false);
        fwd_case(types[t], types[t], 33, 7, 40, 8, 30, true);
        fwd_case(types[t], F32, 33, 7, 40, 8, 30, true);
    }
}

/* A table's -0 comes back as +0, as it would from a sum over ranks. */
TEST(no_negative_zero)
{
    for (int t = 0; t < TYPES; t++) {
        CudaCase *c = case_open();
        float table[8], got[16];
        for (int i = 0; i < 8; i++) table[i] = -0.0f;
        Pair rows = pair_values(c, types[t], table, 1, 8), y = pair_output(c, types[t], 2, 8);
        Pair index = pair_values(c, I32, ((int32_t[]){ 0, -1 }), 2);
        BOTH(c, embedding_fwd, .y = AT(y), .table = AT(rows), .index = AT(index));
        OK(device_read(&c->dev[CASE_GPU].stream, got, y.t[CASE_GPU].data, tensor_bytes(y.t[CASE_GPU])));
        for (int i = 0; i < 16; i++) CHECK(!signbit(case_load(got, types[t], i)) && case_load(got, types[t], i) == 0);
        case_close(c);
    }
}

/* ---- gradient ---- */

typedef struct {
    DType T;
    int64_t N, V, D, pad;
    Fall fall;
    int64_t rows;      /* in use; 0: all */
    int64_t workspace; /* bytes; 0: as it is */
} Grad;

static void grad_case(Grad g)
{
    CudaCase *c = case_open();
    int64_t rows = g.rows ? g.rows : g.N, bytes = c->dev[CASE_GPU].workspace_bytes;
    Pair dtable = pair_random(c, F32, 1, g.V, g.D + g.pad), dy = pair_random(c, g.T, 1, g.N, g.D + g.pad);
    Pair index = indices(c, g.N, g.V, 50, g.fall, g.fall != IN_ORDER), shift = pair_zero(c, I32, 1);
    Pair overflow = pair_zero(c, I32, 1), use = pair_values(c, I64, &rows, 1);
    Pair to = pair_columns(dtable, 0, g.D), from = pair_columns(dy, g.pad, g.D);
    spoil_workspace(c);
    if (g.workspace) c->dev[CASE_GPU].workspace_bytes = g.workspace;
    BOTH(c, embedding_grad, .dtable = AT(to), .dy = counted(AT(from), &use), .index = AT(index), .shift = AT(shift),
         .overflow = AT(overflow), .first = 50);
    c->dev[CASE_GPU].workspace_bytes = bytes;
    pair_check(c, dtable, 1e-5, "%s N %d V %d D %d pad %d fall %d rows %d workspace %d", dtype_name(g.T), (int)g.N,
               (int)g.V, (int)g.D, (int)g.pad, g.fall, (int)rows, (int)g.workspace);
    case_close(c);
}

/* Around a window of 64 tokens, a warp's 32 packs of columns, a block's 512 tokens; all ways to fall. */
TEST(gradient_sizes)
{
    static const int64_t N[] = { 1, 63, 64, 65, 128, 511, 513 };
    static const int64_t D[] = { 8, 1, 129, 256, 32, 264, 5 };
    for (int t = 0; t < TYPES; t++) {
        for (int i = 0; i < 7; i++) {
            for (Fall fall = EVENLY; fall <= IN_ORDER; fall++)
                grad_case((Grad){ .T = types[t], .N = N[i], .V = 40, .D = D[(i + fall) % 7], .fall = fall });
        }
        grad_case((Grad){ .T = types[t], .N = 200, .V = 9, .D = 24, .pad = 8, .fall = FREQUENT });
        grad_case((Grad){ .T = types[t], .N = 200, .V = 9, .D = 24, .pad = 3, .fall = FREQUENT });
    }
}

/* One, two and three digits of a row's number; a row is the last of its digits. */
TEST(gradient_table_sizes)
{
    static const int64_t V[] = { 1, 2, 511, 512, 513, 5000, 262143, 262144 };
    for (int i = 0; i < 8; i++)
        for (Fall fall = EVENLY; fall <= IN_ORDER; fall += 3)
            grad_case((Grad){ .T = BF16, .N = 700, .V = V[i], .D = 4, .fall = fall });
}

/* A row of many windows: more than the 8 parts that are loaded at once, more than the 32 looked at at once. */
TEST(gradient_frequent_rows)
{
    grad_case((Grad){ .T = F32, .N = 64 * 40 + 7, .V = 3, .D = 4, .fall = ONE_ROW });
    grad_case((Grad){ .T = BF16, .N = 64 * 9, .V = 3, .D = 12, .fall = FREQUENT });
    grad_case((Grad){ .T = BF16, .N = 64 * 33, .V = 1, .D = 8, .fall = EVENLY });
    grad_case((Grad){ .T = F32, .N = 64 * 33, .V = 1, .D = 4, .fall = IN_ORDER });
    grad_case((Grad){ .T = F32, .N = 64 * 66, .V = 2, .D = 4, .fall = IN_ORDER });
}

/*
 * The promised order, to the bit: tokens sorted by row, ascending within a row; windows of 64 of them; one chain
 * a row and window; the chains of a row added in order, then to the table.
 */
static void ordered_sums(int64_t N, int64_t V, const int32_t *index, const float *dy, float *dtable)
{
    int64_t at = 0; /* among the sorted tokens */
    for (int64_t v = 0; v < V; v++) {
        float total = 0, chain = 0;
        int64_t parts = 0, length = 0;
        for (int64_t n = 0; n < N; n++) {
            if (index[n] != v) continue;
            chain += dy[n];
            length++;
            if (++at % 64) continue;
            total = parts++ ? total + chain : chain;
            chain = 0, length = 0;
        }
        if (length) total = parts++ ? total + chain : chain;
        if (parts) dtable[v] += total;
    }
}

static void order_case(int64_t N, int64_t V, Fall fall)
{
    CudaCase *c = case_open();
    Pair index = indices(c, N, V, 0, fall, fall == FREQUENT), shift = pair_zero(c, I32, 1);
    Pair overflow = pair_zero(c, I32, 1), dtable = pair_random(c, F32, 1, V, 1);
    Pair dy = pair_random(c, F32, 1000, N, 1);
    float *want = malloc((size_t)V * 4), *got = malloc((size_t)V * 4);
    memcpy(want, dtable.t[CASE_CPU].data, (size_t)V * 4);
    ordered_sums(N, V, index.t[CASE_CPU].data, dy.t[CASE_CPU].data, want);
    spoil_workspace(c);
    BOTH(c, embedding_grad, .dtable = AT(dtable), .dy = AT(dy), .index = AT(index), .shift = AT(shift),
         .overflow = AT(overflow));
    OK(device_read(&c->dev[CASE_GPU].stream, got, dtable.t[CASE_GPU].data, V * 4));
    CHECK_MSG(!memcmp(want, got, (size_t)V * 4), "N %d V %d fall %d", (int)N, (int)V, fall);
    free(want), free(got);
    case_close(c);
}

TEST(gradient_order)
{
    for (Fall fall = EVENLY; fall <= IN_ORDER; fall++) {
        order_case(64, 3, fall);
        order_case(1500, 1, fall);
        order_case(1500, 4, fall);
        order_case(700, 512, fall);
        order_case(2100, 600, fall);
    }
}

TEST(gradient_rows_in_use)
{
    for (int64_t rows = 1; rows <= 301; rows += 100)
        grad_case((Grad){ .T = BF16, .N = 400, .V = 6, .D = 16, .fall = FREQUENT, .rows = rows });
}

/* Little workspace: several rounds; and blocks of more than 512 tokens. */
TEST(gradient_rounds)
{
    int64_t counts = 64 * 512 * 4, window = 2 * 16 * 4 + 64 * 16;
    grad_case((Grad){ .T = BF16, .N = 700, .V = 6, .D = 16, .fall = FREQUENT, .workspace = counts + window });
    grad_case((Grad){ .T = BF16, .N = 700, .V = 6, .D = 16, .fall = EVENLY, .workspace = counts + 5 * window + 9 });
    grad_case((Grad){ .T = F32, .N = 34000, .V = 30000, .D = 1, .fall = EVENLY });
}

/* ---- column sums ---- */

static void bias_case(DType T, int64_t N, int64_t O, int64_t pad, int64_t rows, int64_t workspace, bool fresh)
{
    CudaCase *c = case_open();
    int64_t bytes = c->dev[CASE_GPU].workspace_bytes;
    Pair dbias = pair_random(c, F32, 1, O), whole = pair_random(c, T, 1, N, O + pad), dy = pair_columns(whole, pad, O);
    Pair shift = pair_zero(c, I32, 1), overflow = pair_zero(c, I32, 1), use = pair_values(c, I64, &rows, 1);
    spoil_workspace(c);
    if (workspace) c->dev[CASE_GPU].workspace_bytes = workspace;
    BOTH(c, bias_grad, .dbias = AT(dbias), .dy = counted(AT(dy), &use), .shift = AT(shift), .overflow = AT(overflow),
         .leaf = N, .fresh = fresh);
    c->dev[CASE_GPU].workspace_bytes = bytes;
    pair_check(c, dbias, 1e-5, "%s N %d O %d pad %d rows %d workspace %d", dtype_name(T), (int)N, (int)O, (int)pad,
               (int)rows, (int)workspace);
    case_close(c);
}

TEST(bias_gradient)
{
    static const int64_t N[] = { 1, 7, 8, 33, 127, 128, 129, 300 }, O[] = { 1, 31, 128, 129, 256, 264, 40, 3 };
    for (int t = 0; t < TYPES; t++) {
        for (int i = 0; i < 8; i++) bias_case(types[t], N[i], O[(i + t) % 8], 0, N[i], 0, i % 2);
        bias_case(types[t], 270, 48, 8, 140, 0, false);
        bias_case(types[t], 270, 48, 3, 140, 0, false);
        bias_case(types[t], 1300, 16, 0, 1300, 0, false);      /* more runs of rows than warps that add them */
        bias_case(types[t], 1300, 16, 0, 1000, 16 * 8, false); /* workspace for two runs */
    }
    bias_case(BF16, 33000, 4, 0, 33000, 0, false); /* more than 256 runs of 128 rows: longer ones */
}

/* Integers are refused. */
TEST(no_fixed_point)
{
    CudaCase *c = case_open();
    Pair integers = pair_zero(c, I64, 3, 8), dy = pair_zero(c, F32, 3, 8);
    Pair index = pair_zero(c, I32, 3), shift = pair_zero(c, I32, 1);
    Pair overflow = pair_zero(c, I32, 1);
    case_side = CASE_GPU;
    FAILS(op(case_stream(c), embedding_grad, .dtable = AT(integers), .dy = AT(dy), .index = AT(index),
             .shift = AT(shift), .overflow = AT(overflow)),
          ERR_SHAPE, "embedding_grad on cuda has no fixed point");
    case_close(c);
}

TEST_MAIN
