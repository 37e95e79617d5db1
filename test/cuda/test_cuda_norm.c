/* LayerNorm and RMSNorm of cuda/norm.cu, at the widths where it changes its way of sharing a row. */
#include "base/rng.h"
#include "pair_views.h"

enum { NORM_MEAN = 1, NORM_BIAS = 2, NORM_USED = 4, NORM_FRESH = 8, NORM_SUM = 16, NORM_INTO = 32,
       NORM_WIDE = 64 }; /* the stream, x and dx, is fp32 */

typedef struct {
    DType T;
    int64_t N, D, gap, skip;
    int flags;
    int64_t group; /* of rows of x and dx side by side; 0: none */
} NormShape;

typedef struct {
    Matrix x, y, dy, dx;
    Pair w, b, mean, rstd, dw, db, dsum, used, shift, overflow;
} NormPairs;

static NormPairs norm_pairs(CudaCase *c, const NormShape *p)
{
    const int64_t used = p->N - p->N / 3;
    const int32_t shift = 30, zero = 0;
    const DType stream = p->flags & NORM_WIDE ? F32 : p->T;
    NormPairs t = { .x = matrix_groups(c, stream, -2, 3, p->N, p->D, p->gap, p->skip, p->group),
                    .y = matrix_uniform(c, p->T, -1, 1, p->N, p->D, p->gap, p->skip),
                    .dy = matrix_uniform(c, p->T, -1, 1, p->N, p->D, p->gap, p->skip),
                    .dx = matrix_groups(c, stream, -1, 1, p->N, p->D, p->gap, p->skip, p->group) };
    t.w = pair_uniform(c, p->T, -1, 2, CASE_DIMS(p->D)), t.b = pair_random(c, p->T, 1, p->D);
    t.mean = pair_random(c, F32, 1, p->N), t.rstd = pair_random(c, F32, 1, p->N);
    t.dw = pair_random(c, F32, 2, p->D), t.db = pair_random(c, F32, 2, p->D), t.dsum = pair_random(c, F32, 2, p->D);
    t.used = pair_values(c, I64, &used, 1);
    t.shift = pair_values(c, I32, &shift, 1), t.overflow = pair_values(c, I32, &zero, 1);
    return t;
}

static void norm_case(NormShape p)
{
    CudaCase *c = case_open();
    NormPairs t = norm_pairs(c, &p);
    const Tensor none = { 0 };
    const bool mean = p.flags & NORM_MEAN, bias = p.flags & NORM_BIAS, summed = p.flags & NORM_SUM;
    const Pair *used = p.flags & NORM_USED ? &t.used : NULL;
    const Pair x = t.x.view, y = pair_used(t.y.view, used), dy = pair_used(t.dy.view, used), dx = t.dx.view;
    const double tol = case_tolerance(p.T), of_stream = case_tolerance(p.flags & NORM_WIDE ? F32 : p.T);
    char name[96];
    snprintf(name, sizeof name, "%s N %lld D %lld gap %lld skip %lld flags %d group %lld", dtype_name(p.T),
             (long long)p.N, (long long)p.D, (long long)p.gap, (long long)p.skip, p.flags, (long long)p.group);
    BOTH(c, norm_fwd, .y = AT(y), .mean = mean ? AT(t.mean) : none, .rstd = AT(t.rstd), .x = AT(x),
         .w = AT(t.w), .b = bias ? AT(t.b) : none, .eps = 1e-3f);
    pair_check(c, t.y.all, tol, "y, %s", name);
    pair_check(c, t.mean, 1e-5, "mean, %s", name);
    pair_check(c, t.rstd, 1e-5, "rstd, %s", name);
    BOTH(c, norm_bwd, .dx = AT(dx), .dw = AT(t.dw), .db = bias ? AT(t.db) : none,
         .dsum = summed ? AT(t.dsum) : none, .shift_sum = summed ? AT(t.shift) : none, .dy = AT(dy), .x = AT(x),
         .w = AT(t.w), .mean = mean ? AT(t.mean) : none, .rstd = AT(t.rstd), .shift_w = AT(t.shift),
         .shift_b = bias ? AT(t.shift) : none, .overflow = AT(t.overflow), .leaf = 4, .headroom_bits = 10,
         .fresh = p.flags & NORM_FRESH, .fresh_sum = !(p.flags & NORM_FRESH),
         .fresh_dx = p.flags & NORM_INTO);
    pair_check(c, t.dx.all, of_stream, "dx, %s", name);
    pair_check(c, t.dw, 1e-5, "dw, %s", name);
    pair_check(c, t.db, 1e-5, "db, %s", name);
    pair_check(c, t.dsum, of_stream, "dsum, %s", name);
    case_close(c);
}

/* Bits of the GPU's tensors, which are dense; of their first rows. */
static bool same_rows(CudaCase *c, Pair p, Pair q, int64_t rows)
{
    const int64_t size = tensor_bytes(p.t[CASE_GPU]) / p.t[CASE_GPU].dim[0] * rows;
    OK(device_read(&c->dev[CASE_GPU].stream, c->first, p.t[CASE_GPU].data, size));
    OK(device_read(&c->dev[CASE_GPU].stream, c->second, q.t[CASE_GPU].data, size));
    return !memcmp(c->first, c->second, (size_t)size);
}

/* The residual add with its norm: close to the CPU's, and on the GPU the bits of the two ops in turn. */
static void residual_norm_case(NormShape p)
{
    CudaCase *c = case_open();
    const NormPairs t = norm_pairs(c, &p), two = norm_pairs(c, &p);
    const Tensor none = { 0 };
    const bool mean = p.flags & NORM_MEAN, bias = p.flags & NORM_BIAS;
    int32_t position[64];
    int64_t sample[64];
    ASSERT(p.N <= 64);
    for (int64_t n = 0; n < p.N; n++)
        position[n] = (int32_t)(77 * n % 1000), sample[n] = (int64_t)1 << (n % 40);
    const Pair at = pair_values(c, I32, position, p.N), of = pair_values(c, I64, sample, p.N);
    const Dropout drop = { rng_key(3, "site"), bias ? dropout_threshold(0.2f) : 0, 1.25f };
    const Pair x = pair_used(t.dy.view, p.flags & NORM_USED ? &t.used : NULL), y = t.y.view, sum = t.dx.view;
    const Pair residual = t.x.view, y2 = two.y.view, sum2 = two.dx.view;
    const Pair normed = pair_used(sum2, p.flags & NORM_USED ? &t.used : NULL);
    BOTH(c, residual_norm_fwd, .y = AT(y), .mean = mean ? AT(t.mean) : none, .rstd = AT(t.rstd),
         .sum = AT(sum), .residual = AT(residual), .x = AT(x), .bias = bias ? AT(t.b) : none, .w = AT(t.w),
         .b = bias ? AT(two.b) : none, .position = AT(at), .sample = AT(of), .dropout = drop, .eps = 1e-3f);
    BOTH(c, residual_fwd, .y = AT(sum2), .residual = AT(residual), .x = AT(x), .bias = bias ? AT(t.b) : none,
         .position = AT(at), .sample = AT(of), .dropout = drop);
    BOTH(c, norm_fwd, .y = AT(y2), .mean = mean ? AT(two.mean) : none, .rstd = AT(two.rstd), .x = AT(normed),
         .w = AT(t.w), .b = bias ? AT(two.b) : none, .eps = 1e-3f);
    /* twice: the GPU norms the sum after it is rounded, the CPU before */
    const double tol = 2 * case_tolerance(p.T);
    pair_check(c, t.dx.all, p.flags & NORM_WIDE ? case_tolerance(F32) : tol, "sum, %s D %lld", dtype_name(p.T),
               (long long)p.D);
    pair_check(c, t.y.all, tol, "y, %s D %lld", dtype_name(p.T), (long long)p.D);
    const int64_t used = p.flags & NORM_USED ? p.N - p.N / 3 : p.N;
    for (int k = 0; k < 4; k++) {
        const Pair p1 = k == 0 ? t.y.all : k == 1 ? t.dx.all : k == 2 ? t.mean : t.rstd;
        const Pair p2 = k == 0 ? two.y.all : k == 1 ? two.dx.all : k == 2 ? two.mean : two.rstd;
        if ((k == 2 && !mean) || (k < 2 && p.gap)) continue;
        CHECK_MSG(same_rows(c, p1, p2, used), "result %d, %s N %lld D %lld", k, dtype_name(p.T),
                  (long long)p.N, (long long)p.D);
    }
    case_close(c);
}

TEST(residual_norm)
{
    static const DType types[] = { F32, BF16, F16 };
    static const int64_t packs[] = { 1, 16, 64, 65, 128, 129, 257 };
    for (int k = 0; k < 7; k++) {
        for (int t = 0; t < 3; t++) {
            const int64_t D = packs[k] * 16 / dtype_size(types[t]);
            residual_norm_case((NormShape){ types[t], 3 + k % 2 * 8, D, k % 3 == 1 ? 8 : 0, 0, (k + t) % 8 });
            if (types[t] == F32) continue;
            residual_norm_case(
                (NormShape){ types[t], 3 + k % 2 * 8, D, k % 3 == 1 ? 8 : 0, 0, (k + t) % 8 | NORM_WIDE });
        }
    }
    residual_norm_case((NormShape){ F32, 3, 37, 0, 0, NORM_MEAN | NORM_BIAS });
    residual_norm_case((NormShape){ BF16, 9, 70, 2, 1, NORM_BIAS | NORM_USED });
    residual_norm_case((NormShape){ BF16, 9, 70, 2, 1, NORM_BIAS | NORM_USED | NORM_WIDE });
}

/* Aligned rows: 8 lanes up to 16 packs, a warp up to 128 in registers and 256 without, then blocks. */
static void norm_widths(DType T, int wide)
{
    static const int64_t packs[] = { 1, 7, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 513 };
    static const int64_t rows[] = { 1, 7, 9, 31, 33, 1, 3, 2, 7, 9, 5, 9, 7, 3, 2 };
    const int64_t count = 16 / dtype_size(T);
    for (int k = 0; k < 15; k++) {
        norm_case((NormShape){ T, rows[k], packs[k] * count, 0, 0, (k % 2 ? 0 : NORM_MEAN | NORM_BIAS) | wide });
        if (k % 3 == 0)
            norm_case((NormShape){ T, rows[k], packs[k] * count, 2 * count, count, (k % 2 ? 7 : NORM_USED) | wide });
    }
}

TEST(norm_f32) { norm_widths(F32, 0); }
TEST(norm_bf16) { norm_widths(BF16, 0); }
TEST(norm_f16) { norm_widths(F16, 0); }
TEST(norm_bf16_of_f32) { norm_widths(BF16, NORM_WIDE); }
TEST(norm_f16_of_f32) { norm_widths(F16, NORM_WIDE); }

/* Rows that cannot be read 16 bytes at a time, by width, by distance, by where they begin. */
TEST(norm_unaligned)
{
    static const DType types[] = { F32, BF16, F16 };
    for (int k = 0; k < 3; k++) {
        const DType T = types[k];
        norm_case((NormShape){ T, 1, 1, 0, 0, NORM_MEAN | NORM_BIAS });
        norm_case((NormShape){ T, 3, 17, 0, 0, NORM_MEAN });
        norm_case((NormShape){ T, 2, 64, 3, 0, NORM_BIAS });
        norm_case((NormShape){ T, 2, 64, 16, 1, 0 });
        norm_case((NormShape){ T, 2, 2051, 2, 1, NORM_MEAN | NORM_BIAS | NORM_USED });
        norm_case((NormShape){ T, 3, 17, 0, 0, NORM_MEAN | NORM_BIAS | NORM_SUM | NORM_WIDE });
        norm_case((NormShape){ T, 2, 64, 3, 1, NORM_INTO | NORM_WIDE });
    }
}

/* The widest row that stays in registers, and one pack more. */
TEST(norm_widest)
{
    norm_case((NormShape){ F32, 1, 16384, 0, 0, NORM_MEAN | NORM_BIAS });
    norm_case((NormShape){ BF16, 2, 16384, 0, 0, NORM_INTO });
    norm_case((NormShape){ BF16, 1, 16384 + 8, 0, 0, 0 });
    norm_case((NormShape){ BF16, 2, 16384, 0, 0, NORM_INTO | NORM_SUM | NORM_WIDE });
    norm_case((NormShape){ F16, 1, 16384 + 8, 0, 0, NORM_WIDE });
}

/* More rows than a slice (8, 32 of a narrow tensor or an unaligned one): the last one shorter, and some of them
 * without a row in use. */
TEST(norm_slices)
{
    norm_case((NormShape){ F32, 101, 12, 0, 0, NORM_MEAN | NORM_BIAS });
    norm_case((NormShape){ BF16, 9, 72, 0, 0, NORM_MEAN | NORM_BIAS | NORM_FRESH });
    norm_case((NormShape){ F32, 3, 2052, 0, 0, NORM_FRESH });
    norm_case((NormShape){ F32, 41, 72, 0, 0, NORM_MEAN | NORM_BIAS | NORM_SUM });
    norm_case((NormShape){ BF16, 67, 256, 8, 0, NORM_SUM | NORM_FRESH | NORM_USED });
    norm_case((NormShape){ F32, 35, 1032, 0, 0, NORM_SUM });
    norm_case((NormShape){ F16, 5, 2051, 2, 1, NORM_BIAS | NORM_SUM });
    norm_case((NormShape){ BF16, 67, 256, 8, 0, NORM_SUM | NORM_FRESH | NORM_USED | NORM_WIDE });
    norm_case((NormShape){ F16, 41, 768, 0, 0, NORM_MEAN | NORM_BIAS | NORM_SUM | NORM_WIDE });
    norm_case((NormShape){ BF16, 128, 16, 0, 0, NORM_USED });
    norm_case((NormShape){ BF16, 97, 8, 8, 0, NORM_MEAN | NORM_BIAS | NORM_USED });
    norm_case((NormShape){ F32, 200, 7, 1, 0, NORM_BIAS | NORM_USED });
    norm_case((NormShape){ F16, 25, 160, 0, 0, NORM_MEAN | NORM_BIAS });
    norm_case((NormShape){ F32, 277, 68, 0, 0, NORM_MEAN | NORM_BIAS }); /* more slices than threads that add them */
}

/* Heads of a projection, k and v behind its queries; and any rows of every way to share one. */
TEST(norm_in_groups)
{
    static const NormShape shapes[] = { { BF16, 48, 128, 256, 0, NORM_INTO, 8 },
                                        { BF16, 77, 64, 128, 0, NORM_FRESH | NORM_INTO, 7 },
                                        { F16, 66, 128, 8, 8, NORM_USED, 3 },
                                        { F32, 40, 64, 128, 0, NORM_INTO | NORM_SUM, 4 },
                                        { BF16, 15, 256, 64, 0, NORM_MEAN | NORM_BIAS, 5 },
                                        { F16, 18, 512, 16, 8, NORM_SUM | NORM_INTO | NORM_USED, 6 },
                                        { F16, 6, 1032, 8, 0, 0, 2 },
                                        { F32, 9, 1032, 4, 0, NORM_SUM, 3 },
                                        { BF16, 6, 2056, 8, 0, NORM_INTO, 3 },
                                        { F16, 36, 17, 3, 1, NORM_MEAN | NORM_BIAS | NORM_SUM | NORM_INTO, 4 },
                                        { F32, 6, 64, 5, 1, NORM_INTO, 2 } };
    for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) norm_case(shapes[k]);
}

TEST_MAIN
