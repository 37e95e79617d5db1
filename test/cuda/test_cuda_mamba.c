/* Mamba-2's recurrence and gates (cuda/mamba.cu, delta_around.cu). */
#include "pair_views.h"

enum { VIEWS = 1, DOCS = 2, STATES = 4, FRESH = 8, WIDE = 16 };

typedef struct {
    DType T;
    int64_t B, rows, G, H, N, P;
    int flags;
} MambaShape;

/* [B T H C]; as columns of a projection if they are views. */
static Pair heads4(CudaCase *c, const MambaShape *p, double high, int64_t H, int64_t C, Pair *all)
{
    const bool views = p->flags & VIEWS;
    const int64_t N = p->B * p->rows * H;
    const Matrix m = matrix_groups(c, p->T, -high, high, N, C, views ? 5 : 0, views ? 3 : 0, views ? H : 0);
    Pair x = m.view;
    for (int side = 0; side < 2; side++) x.t[side] = tensor_reshape(x.t[side], p->B, p->rows, H, C);
    if (all) *all = m.all;
    return x;
}

static Pair documents(CudaCase *c, int64_t B, int64_t rows, int64_t first)
{
    static int32_t doc[4096];
    ASSERT(B * rows <= 4096);
    for (int64_t i = 0; i < B * rows; i++) {
        const int64_t t = i % rows;
        doc[i] = (int32_t)(first + (t < 5 ? -2 : t < 100 ? 5 : t < 140 ? 100 : t < 256 ? 140 : 256));
    }
    return pair_values(c, I32, doc, B, rows);
}

static void mamba_case(MambaShape p)
{
    CudaCase *c = case_open();
    const int64_t R = p.B * ((p.rows + MAMBA_WINDOW - 1) / MAMBA_WINDOW) * p.H, first = 256;
    const double unit = sqrt(3.0 / (double)p.N), tol = p.T == F32 ? 2e-5 : case_tolerance(p.T);
    const Tensor none = { 0 };
    const bool states = p.flags & STATES, docs = p.flags & DOCS;
    Pair all[4];
    const Pair q = heads4(c, &p, unit, p.G, p.N, NULL), k = heads4(c, &p, unit, p.G, p.N, NULL);
    const Pair x = heads4(c, &p, 1, p.H, p.P, NULL), go = heads4(c, &p, 1, p.H, p.P, NULL);
    const Pair o = heads4(c, &p, 1, p.H, p.P, &all[0]), dx = heads4(c, &p, 1, p.H, p.P, &all[1]);
    const Pair dq = heads4(c, &p, 1, p.G, p.N, &all[2]), dk = heads4(c, &p, 1, p.G, p.N, &all[3]);
    /* (so slow a decay that what a document must not see would be seen) */
    const Pair g = pair_uniform(c, F32, docs ? -0.05 : -1, 0, CASE_DIMS(p.B, p.rows, p.H));
    const Pair delta = pair_uniform(c, F32, 0, 1, CASE_DIMS(p.B, p.rows, p.H));
    const Pair skip = pair_random(c, p.flags & WIDE ? F32 : p.T, 1, p.H);
    const Pair before = pair_random(c, F32, 1, p.B, p.H, p.N, p.P), dafter = pair_random(c, F32, 1, p.B, p.H, p.N, p.P);
    const Pair kept = pair_output(c, F32, R, p.N, p.P), dkept = pair_output(c, F32, R, p.N, p.P);
    const Pair after = pair_output(c, F32, p.B, p.H, p.N, p.P), dbefore = pair_output(c, F32, p.B, p.H, p.N, p.P);
    const Pair dg = pair_output(c, F32, p.B, p.rows, p.H), ddelta = pair_output(c, F32, p.B, p.rows, p.H);
    const Pair dskip = pair_output(c, F32, p.B, p.rows, p.H), doc = documents(c, p.B, p.rows, first);
    char name[96];
    snprintf(name, sizeof name, "%s B %d T %d heads %d, %d of %d, %d flags %d", dtype_name(p.T), (int)p.B, (int)p.rows,
             (int)p.G, (int)p.H, (int)p.N, (int)p.P, p.flags);
    BOTH(c, mamba_fwd, .o = AT(o), .states = AT(kept), .after = states ? AT(after) : none, .x = AT(x), .k = AT(k),
         .q = AT(q), .delta = AT(delta), .g = AT(g), .skip = AT(skip), .doc = docs ? AT(doc) : none,
         .before = states ? AT(before) : none, .first = first);
    pair_check(c, all[0], tol, "o, %s", name);
    pair_check(c, kept, 2e-5, "states, %s", name);
    if (states) pair_check(c, after, 2e-5, "after, %s", name);
    BOTH(c, mamba_bwd, .dx = AT(dx), .dk = AT(dk), .dq = AT(dq), .ddelta = AT(ddelta), .dg = AT(dg), .dskip = AT(dskip),
         .dbefore = states ? AT(dbefore) : none, .dstates = AT(dkept), .go = AT(go),
         .dafter = states ? AT(dafter) : none, .x = AT(x), .k = AT(k), .q = AT(q), .delta = AT(delta), .g = AT(g),
         .skip = AT(skip), .states = AT(kept), .doc = docs ? AT(doc) : none, .first = first);
    pair_check(c, all[1], tol, "dx, %s", name), pair_check(c, all[2], tol, "dq, %s", name);
    pair_check(c, all[3], tol, "dk, %s", name), pair_check(c, dg, 5e-5, "dg, %s", name);
    pair_check(c, ddelta, 5e-5, "ddelta, %s", name), pair_check(c, dskip, 5e-5, "dskip, %s", name);
    pair_check(c, dkept, 5e-5, "dstates, %s", name);
    if (states) pair_check(c, dbefore, 5e-5, "dbefore, %s", name);
    case_close(c);
}

TEST(mamba)
{
    static const DType types[] = { F32, BF16, F16 };
    for (int i = 0; i < 3; i++) {
        mamba_case((MambaShape){ types[i], 2, 135, 1, 3, 16, 8, VIEWS | STATES });
        mamba_case((MambaShape){ types[i], 1, 263, 2, 4, 8, 16, DOCS | STATES | WIDE });
    }
    /* (by tensor cores: windows of several documents, more heads than a block has, widths of part of a tile) */
    mamba_case((MambaShape){ BF16, 2, 300, 1, 10, 72, 24, DOCS | STATES });
    mamba_case((MambaShape){ BF16, 1, 256, 2, 4, 128, 64, STATES | WIDE });
    mamba_case((MambaShape){ BF16, 1, 130, 1, 2, 256, 64, DOCS });
    mamba_case((MambaShape){ BF16, 1, 5, 1, 1, 64, 64, 0 });
    mamba_case((MambaShape){ BF16, 1, 0, 1, 1, 64, 64, STATES });
    mamba_case((MambaShape){ F32, 1, 1, 1, 3, 5, 7, 0 });
    mamba_case((MambaShape){ F32, 1, 128, 2, 4, 20, 12, STATES });
    mamba_case((MambaShape){ F32, 2, 40, 1, 1, 12, 300, DOCS | VIEWS });
}

static void gates_case(DType T, int64_t N, int64_t H, float low, int flags)
{
    CudaCase *c = case_open();
    const int32_t shift = 30, zero = 0;
    const Matrix dt = matrix_uniform(c, T, -30, 30, N, H, 3, 2), ddt = matrix_uniform(c, T, -1, 1, N, H, 3, 0);
    const Pair a_log = pair_uniform(c, flags & WIDE ? F32 : T, -4, 2, CASE_DIMS(H));
    const Pair bias = pair_uniform(c, flags & WIDE ? F32 : T, 0, 1, CASE_DIMS(H));
    const Pair delta = pair_output(c, F32, N, H), g = pair_output(c, F32, N, H);
    const Pair ddelta = pair_random(c, F32, 1, N, H), dg = pair_random(c, F32, 1, N, H);
    const Pair da_log = pair_random(c, F32, 1, H), dbias = pair_random(c, F32, 1, H);
    const Pair shifts = pair_values(c, I32, &shift, 1), overflow = pair_values(c, I32, &zero, 1);
    BOTH(c, mamba_gates_fwd, .delta = AT(delta), .g = AT(g), .dt = AT(dt.view), .a_log = AT(a_log),
         .dt_bias = AT(bias), .low = low);
    pair_check(c, delta, 1e-5, "delta"), pair_check(c, g, 1e-5, "g");
    BOTH(c, mamba_gates_bwd, .ddt = AT(ddt.view), .da_log = AT(da_log), .ddt_bias = AT(dbias), .ddelta = AT(ddelta),
         .dg = AT(dg), .dt = AT(dt.view), .a_log = AT(a_log), .dt_bias = AT(bias), .shift_a = AT(shifts),
         .shift_dt = AT(shifts), .overflow = AT(overflow), .low = low, .leaf = 16, .headroom_bits = 10,
         .fresh = flags & FRESH);
    pair_check(c, ddt.all, case_tolerance(T), "ddt");
    pair_check(c, da_log, 2e-5, "da_log"), pair_check(c, dbias, 2e-5, "ddt_bias");
    case_close(c);
}

TEST(mamba_gates)
{
    static const DType types[] = { F32, BF16, F16 };
    for (int i = 0; i < 3; i++) {
        gates_case(types[i], 300, 5, 0, WIDE);
        gates_case(types[i], 7, 40, 0.25f, FRESH);
    }
}

TEST_MAIN
