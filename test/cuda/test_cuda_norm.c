/* LayerNorm and RMSNorm of cuda/norm.cu, at the widths where it changes its way of sharing a row. */
#include "pair_views.h"

enum { NORM_MEAN = 1, NORM_BIAS = 2, NORM_USED = 4 };

typedef struct {
    DType T;
    int64_t N, D, gap, skip;
    int flags;
} NormShape;

typedef struct {
    Matrix x, y, dy, dx;
    Pair w, b, mean, rstd, dw, db, used, shift, overflow;
} NormPairs;

static NormPairs norm_pairs(CudaCase *c, const NormShape *p)
{
    const int64_t used = p->N - p->N / 3;
    const int32_t shift = 30, zero = 0;
    NormPairs t = { .x = matrix_uniform(c, p->T, -2, 3, p->N, p->D, p->gap, p->skip),
                    .y = matrix_uniform(c, p->T, -1, 1, p->N, p->D, p->gap, p->skip),
                    .dy = matrix_uniform(c, p->T, -1, 1, p->N, p->D, p->gap, p->skip),
                    .dx = matrix_uniform(c, p->T, -1, 1, p->N, p->D, p->gap, p->skip) };
    t.w = pair_uniform(c, p->T, -1, 2, CASE_DIMS(p->D)), t.b = pair_random(c, p->T, 1, p->D);
    t.mean = pair_random(c, F32, 1, p->N), t.rstd = pair_random(c, F32, 1, p->N);
    t.dw = pair_random(c, F32, 2, p->D), t.db = pair_random(c, F32, 2, p->D);
    t.used = pair_values(c, I64, &used, 1);
    t.shift = pair_values(c, I32, &shift, 1), t.overflow = pair_values(c, I32, &zero, 1);
    return t;
}

static void norm_case(NormShape p)
{
    CudaCase *c = case_open();
    NormPairs t = norm_pairs(c, &p);
    const Tensor none = { 0 };
    const bool mean = p.flags & NORM_MEAN, bias = p.flags & NORM_BIAS;
    const Pair *used = p.flags & NORM_USED ? &t.used : NULL;
    const Pair x = t.x.view, y = pair_used(t.y.view, used), dy = pair_used(t.dy.view, used), dx = t.dx.view;
    const double tol = case_tolerance(p.T);
    char name[96];
    snprintf(name, sizeof name, "%s N %lld D %lld gap %lld skip %lld flags %d", dtype_name(p.T),
             (long long)p.N, (long long)p.D, (long long)p.gap, (long long)p.skip, p.flags);
    BOTH(c, norm_fwd, .y = AT(y), .mean = mean ? AT(t.mean) : none, .rstd = AT(t.rstd), .x = AT(x),
         .w = AT(t.w), .b = bias ? AT(t.b) : none, .eps = 1e-3f);
    pair_check(c, t.y.all, tol, "y, %s", name);
    pair_check(c, t.mean, 1e-5, "mean, %s", name);
    pair_check(c, t.rstd, 1e-5, "rstd, %s", name);
    BOTH(c, norm_bwd, .dx = AT(dx), .dw = AT(t.dw), .db = bias ? AT(t.db) : none, .dy = AT(dy), .x = AT(x),
         .w = AT(t.w), .mean = mean ? AT(t.mean) : none, .rstd = AT(t.rstd), .shift_w = AT(t.shift),
         .shift_b = bias ? AT(t.shift) : none, .overflow = AT(t.overflow), .leaf = 4, .room = 10);
    pair_check(c, t.dx.all, tol, "dx, %s", name);
    pair_check(c, t.dw, 1e-5, "dw, %s", name);
    pair_check(c, t.db, 1e-5, "db, %s", name);
    case_close(c);
}

/* Aligned rows: 8 lanes up to 16 packs, a warp up to 128 in registers and 256 without, then blocks. */
static void norm_widths(DType T)
{
    static const int64_t packs[] = { 1, 7, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 513 };
    static const int64_t rows[] = { 1, 7, 9, 31, 33, 1, 3, 2, 7, 9, 5, 9, 7, 3, 2 };
    const int64_t count = 16 / dtype_size(T);
    for (int k = 0; k < 15; k++) {
        norm_case((NormShape){ T, rows[k], packs[k] * count, 0, 0, k % 2 ? 0 : NORM_MEAN | NORM_BIAS });
        if (k % 3 == 0)
            norm_case((NormShape){ T, rows[k], packs[k] * count, 2 * count, count, k % 2 ? 7 : NORM_USED });
    }
}

TEST(norm_f32) { norm_widths(F32); }
TEST(norm_bf16) { norm_widths(BF16); }
TEST(norm_f16) { norm_widths(F16); }

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
    }
}

/* The widest row that stays in registers, and one pack more. */
TEST(norm_widest)
{
    norm_case((NormShape){ F32, 1, 16384, 0, 0, NORM_MEAN | NORM_BIAS });
    norm_case((NormShape){ BF16, 2, 16384, 0, 0, 0 });
    norm_case((NormShape){ BF16, 1, 16384 + 8, 0, 0, 0 });
}

/* More rows than a slice (8, 32 of a narrow tensor or an unaligned one): the last one shorter, and some of them
 * without a row in use. */
TEST(norm_slices)
{
    norm_case((NormShape){ F32, 101, 12, 0, 0, NORM_MEAN | NORM_BIAS });
    norm_case((NormShape){ BF16, 128, 16, 0, 0, NORM_USED });
    norm_case((NormShape){ BF16, 97, 8, 8, 0, NORM_MEAN | NORM_BIAS | NORM_USED });
    norm_case((NormShape){ F32, 200, 7, 1, 0, NORM_BIAS | NORM_USED });
    norm_case((NormShape){ F16, 25, 160, 0, 0, NORM_MEAN | NORM_BIAS });
    norm_case((NormShape){ F32, 277, 68, 0, 0, NORM_MEAN | NORM_BIAS }); /* more slices than threads that add them */
}

TEST_MAIN
