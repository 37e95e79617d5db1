/* Delta rules and what stands around them (cuda/delta_fwd.cu, delta_bwd.cu, delta_around.cu; kda_fwd.cu, kda_bwd.cu,
 * kda_gates.cu). */
#include "pair_views.h"

enum { VIEWS = 1, DOCS = 2, STATES = 4, FRESH = 8, BIAS = 16, WIDE = 32, GATE_FIRST = 64, THREE = 128, SIGMOID = 256 };

typedef struct {
    DType T;
    int64_t B, rows, K, V, D, E;
    int flags;
    int64_t workspace, workspace_bwd; /* bytes; 0: as it is */
} DeltaShape;

/* [B T H C]; as columns of a projection if they are views. */
static Pair heads4(CudaCase *c, const DeltaShape *p, double high, int64_t H, int64_t C, Pair *all)
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
        doc[i] = (int32_t)(first + (t < 5 ? -2 : t < 64 ? 5 : t < 70 ? 64 : 70 + (t - 70) / 31 * 31));
    }
    return pair_values(c, I32, doc, B, rows);
}

static void delta_case(DeltaShape p)
{
    CudaCase *c = case_open();
    const int64_t windows = (p.rows + DELTA_WINDOW - 1) / DELTA_WINDOW, first = 128;
    const double unit = sqrt(3.0 / (double)p.D), tol = p.T == F32 ? 2e-5 : case_tolerance(p.T);
    const Tensor none = { 0 };
    const bool states = p.flags & STATES, docs = p.flags & DOCS;
    Pair all[4];
    const Pair q = heads4(c, &p, unit, p.K, p.D, NULL), k = heads4(c, &p, unit, p.K, p.D, NULL);
    const Pair v = heads4(c, &p, 1, p.V, p.E, NULL), go = heads4(c, &p, 1, p.V, p.E, NULL);
    const Pair o = heads4(c, &p, 1, p.V, p.E, &all[0]), dv = heads4(c, &p, 1, p.V, p.E, &all[1]);
    const Pair dq = heads4(c, &p, 1, p.K, p.D, &all[2]), dk = heads4(c, &p, 1, p.K, p.D, &all[3]);
    const Pair g = pair_uniform(c, F32, -1, 0, CASE_DIMS(p.B, p.rows, p.V));
    const Pair beta = pair_uniform(c, F32, 0, 1, CASE_DIMS(p.B, p.rows, p.V));
    const Pair before = pair_random(c, F32, 1, p.B, p.V, p.D, p.E), dafter = pair_random(c, F32, 1, p.B, p.V, p.D, p.E);
    const Pair kept = pair_output(c, F32, p.B * windows * p.V, p.D, p.E),
               after = pair_output(c, F32, p.B, p.V, p.D, p.E);
    const Pair dbefore = pair_output(c, F32, p.B, p.V, p.D, p.E), dg = pair_output(c, F32, p.B, p.rows, p.V);
    const Pair dbeta = pair_output(c, F32, p.B, p.rows, p.V), doc = documents(c, p.B, p.rows, first);
    char name[96];
    snprintf(name, sizeof name, "%s B %d T %d heads %d, %d of %d, %d flags %d", dtype_name(p.T), (int)p.B, (int)p.rows,
             (int)p.K, (int)p.V, (int)p.D, (int)p.E, p.flags);
    const int64_t bytes = c->dev[CASE_GPU].workspace_bytes;
    if (p.workspace) c->dev[CASE_GPU].workspace_bytes = p.workspace;
    BOTH(c, delta_fwd, .o = AT(o), .states = AT(kept), .after = states ? AT(after) : none, .q = AT(q), .k = AT(k),
         .v = AT(v), .g = AT(g), .beta = AT(beta), .doc = docs ? AT(doc) : none, .before = states ? AT(before) : none,
         .first = first);
    c->dev[CASE_GPU].workspace_bytes = p.workspace_bwd ? p.workspace_bwd : bytes;
    pair_check(c, all[0], tol, "o, %s", name);
    pair_check(c, kept, 2e-5, "states, %s", name);
    if (states) pair_check(c, after, 2e-5, "after, %s", name);
    BOTH(c, delta_bwd, .dq = AT(dq), .dk = AT(dk), .dv = AT(dv), .dg = AT(dg), .dbeta = AT(dbeta),
         .dbefore = states ? AT(dbefore) : none, .go = AT(go), .dafter = states ? AT(dafter) : none, .q = AT(q),
         .k = AT(k), .v = AT(v), .g = AT(g), .beta = AT(beta), .states = AT(kept), .doc = docs ? AT(doc) : none,
         .first = first);
    c->dev[CASE_GPU].workspace_bytes = bytes;
    pair_check(c, all[1], tol, "dv, %s", name), pair_check(c, all[2], tol, "dq, %s", name);
    pair_check(c, all[3], tol, "dk, %s", name), pair_check(c, dg, 5e-5, "dg, %s", name);
    pair_check(c, dbeta, 5e-5, "dbeta, %s", name);
    if (states) pair_check(c, dbefore, 5e-5, "dbefore, %s", name);
    case_close(c);
}

TEST(delta)
{
    static const DType types[] = { F32, BF16, F16 };
    for (int i = 0; i < 3; i++) {
        delta_case((DeltaShape){ types[i], 2, 70, 1, 2, 16, 8, VIEWS | STATES });
        delta_case((DeltaShape){ types[i], 1, 133, 2, 2, 8, 16, DOCS | STATES });
    }
    /* (by tensor cores: windows of several documents, widths of part of a tile and of several; room for two
     * windows of three) */
    delta_case((DeltaShape){ BF16, 2, 150, 1, 2, 72, 24, DOCS | STATES });
    delta_case((DeltaShape){ BF16, 2, 150, 1, 2, 72, 24, STATES, 170000, 470000 });
    delta_case((DeltaShape){ BF16, 1, 192, 1, 2, 128, 136, STATES });
    delta_case((DeltaShape){ BF16, 1, 5, 1, 1, 64, 64, 0 });
    delta_case((DeltaShape){ BF16, 1, 0, 1, 1, 64, 64, STATES });
    delta_case((DeltaShape){ F32, 1, 1, 1, 3, 5, 7, 0 });
    delta_case((DeltaShape){ F32, 1, 64, 2, 4, 20, 12, STATES });
    delta_case((DeltaShape){ F32, 2, 30, 1, 1, 12, 300, DOCS | VIEWS });
}

typedef struct {
    DType T;
    int64_t B, rows, C, taps;
    int flags;
} ConvShape;

static void conv_case(ConvShape p)
{
    CudaCase *c = case_open();
    const int64_t N = p.B * p.rows, J = p.taps - 1, gap = p.flags & VIEWS ? 7 : 0, first = 40;
    const int32_t shift = 30, zero = 0;
    const Tensor none = { 0 };
    const bool bias = p.flags & BIAS, states = p.flags & STATES && J, docs = p.flags & DOCS;
    Matrix y = matrix_uniform(c, p.T, -1, 1, N, p.C, gap, gap / 2), x = matrix_uniform(c, p.T, -2, 2, N, p.C, gap, 0);
    Matrix dy = matrix_uniform(c, p.T, -1, 1, N, p.C, gap, gap),
           dx = matrix_uniform(c, p.T, -1, 1, N, p.C, gap, 1 * (gap > 0));
    Matrix *all[] = { &y, &x, &dy, &dx };
    for (int i = 0; i < 4; i++)
        for (int side = 0; side < 2; side++)
            all[i]->view.t[side] = tensor_reshape(all[i]->view.t[side], p.B, p.rows, p.C);
    const DType wide = p.flags & WIDE ? F32 : p.T;
    const Pair w = pair_random(c, wide, 1, p.C, p.taps), b = pair_random(c, wide, 1, p.C);
    const Pair before = pair_random(c, p.T, 1, p.B, J ? J : 1, p.C),
               after = pair_random(c, F32, 1, p.B, J ? J : 1, p.C);
    const Pair dbefore = pair_output(c, F32, p.B, J ? J : 1, p.C), doc = documents(c, p.B, p.rows, first);
    const Pair dw = pair_random(c, F32, 1, p.C, p.taps), db = pair_random(c, F32, 1, p.C);
    const Pair shifts = pair_values(c, I32, &shift, 1), overflow = pair_values(c, I32, &zero, 1);
    char name[96];
    snprintf(name, sizeof name, "%s B %d T %d C %d taps %d flags %d", dtype_name(p.T), (int)p.B, (int)p.rows, (int)p.C,
             (int)p.taps, p.flags);
    BOTH(c, conv_silu_fwd, .y = AT(y.view), .x = AT(x.view), .w = AT(w), .bias = bias ? AT(b) : none,
         .before = states ? AT(before) : none, .doc = docs ? AT(doc) : none, .first = first);
    pair_check(c, y.all, case_tolerance(p.T), "y, %s", name);
    BOTH(c, conv_silu_bwd, .dx = AT(dx.view), .dw = AT(dw), .dbias = bias ? AT(db) : none,
         .dbefore = states ? AT(dbefore) : none, .dy = AT(dy.view), .after = states ? AT(after) : none, .x = AT(x.view),
         .w = AT(w), .bias = bias ? AT(b) : none, .before = states ? AT(before) : none, .doc = docs ? AT(doc) : none,
         .shift_w = AT(shifts), .shift_b = bias ? AT(shifts) : none, .overflow = AT(overflow), .first = first,
         .leaf = 16, .headroom_bits = 10, .fresh = p.flags & FRESH);
    pair_check(c, dx.all, case_tolerance(p.T), "dx, %s", name);
    pair_check(c, dw, 1e-5, "dw, %s", name);
    if (bias) pair_check(c, db, 1e-5, "dbias, %s", name);
    if (states) pair_check(c, dbefore, 1e-5, "dbefore, %s", name);
    case_close(c);
}

TEST(conv_silu)
{
    static const DType types[] = { F32, BF16, F16 };
    for (int i = 0; i < 3; i++) {
        conv_case((ConvShape){ types[i], 2, 75, 40, 4, VIEWS | STATES | BIAS });
        conv_case((ConvShape){ types[i], 1, 200, 17, 4, DOCS | FRESH | WIDE });
    }
    conv_case((ConvShape){ F32, 1, 1, 1, 1, 0 });
    conv_case((ConvShape){ F32, 2, 2, 5, 4, STATES | FRESH });
    conv_case((ConvShape){ F32, 1, 20, 300, 8, STATES | DOCS | BIAS });
}

typedef struct {
    DType T;
    int64_t N, D, group;
    int flags;
} RowShape;

static void unit_case(RowShape p)
{
    CudaCase *c = case_open();
    const int64_t gap = p.group ? 3 : 0, count = p.N - p.N / 3;
    const Pair used = pair_values(c, I64, &count, 1);
    const Matrix x = matrix_groups(c, p.T, -1, 1, p.N, p.D, gap, gap, p.group),
                 y = matrix_groups(c, p.T, -1, 1, p.N, p.D, gap, 0, p.group);
    const Matrix dy = matrix_groups(c, p.T, -1, 1, p.N, p.D, gap, 1 * (gap > 0), p.group),
                 dx = matrix_groups(c, p.T, -1, 1, p.N, p.D, gap, 0, p.group);
    const Pair rows = pair_used(x.view, p.flags & FRESH ? &used : NULL),
               drows = pair_used(dy.view, p.flags & FRESH ? &used : NULL);
    BOTH(c, unit_fwd, .y = AT(y.view), .x = AT(rows), .factor = 0.25f, .eps = 1e-6f);
    pair_check(c, y.all, case_tolerance(p.T), "y, %s N %d D %d", dtype_name(p.T), (int)p.N, (int)p.D);
    BOTH(c, unit_bwd, .dx = AT(dx.view), .dy = AT(drows), .x = AT(x.view), .factor = 0.25f, .eps = 1e-6f);
    pair_check(c, dx.all, case_tolerance(p.T), "dx, %s N %d D %d", dtype_name(p.T), (int)p.N, (int)p.D);
    case_close(c);
}

TEST(unit)
{
    static const DType types[] = { F32, BF16, F16 };
    for (int i = 0; i < 3; i++) {
        unit_case((RowShape){ types[i], 36, 16, 4, FRESH });
        unit_case((RowShape){ types[i], 9, 130, 0, 0 });
    }
}

static void gated_case(RowShape p)
{
    CudaCase *c = case_open();
    const int64_t gap = p.group ? 3 : 0;
    const int32_t shift = 30, zero = 0;
    Matrix m[6]; /* y, x, z, dy, dx, dz */
    for (int i = 0; i < 6; i++) m[i] = matrix_groups(c, p.T, -2, 2, p.N, p.D, gap, gap ? i % 4 : 0, p.group);
    const int64_t G = p.flags & THREE ? 3 : 1;
    const int inside = p.flags & GATE_FIRST ? 1 : 0;
    const Pair w = pair_random(c, p.flags & WIDE ? F32 : p.T, 1, G, p.D), dw = pair_random(c, F32, 1, G, p.D);
    const Pair shifts = pair_values(c, I32, &shift, 1), overflow = pair_values(c, I32, &zero, 1);
    char name[96];
    snprintf(name, sizeof name, "%s N %d E %d group %d flags %d", dtype_name(p.T), (int)p.N, (int)p.D, (int)p.group,
             p.flags);
    BOTH(c, gated_norm_fwd, .y = AT(m[0].view), .x = AT(m[1].view), .z = AT(m[2].view), .w = AT(w), .eps = 1e-3f,
         .gate_first = inside, .sigmoid = p.flags & SIGMOID);
    pair_check(c, m[0].all, case_tolerance(p.T), "y, %s", name);
    BOTH(c, gated_norm_bwd, .dx = AT(m[4].view), .dz = AT(m[5].view), .dw = AT(dw), .dy = AT(m[3].view),
         .x = AT(m[1].view), .z = AT(m[2].view), .w = AT(w), .shift = AT(shifts), .overflow = AT(overflow),
         .eps = 1e-3f, .gate_first = inside, .sigmoid = p.flags & SIGMOID, .leaf = 1, .headroom_bits = 10,
         .fresh = p.flags & FRESH);
    pair_check(c, m[4].all, case_tolerance(p.T), "dx, %s", name);
    pair_check(c, m[5].all, case_tolerance(p.T), "dz, %s", name);
    pair_check(c, dw, 1e-5, "dw, %s", name);
    case_close(c);
}

TEST(gated_norm)
{
    static const DType types[] = { F32, BF16, F16 };
    for (int i = 0; i < 3; i++) {
        gated_case((RowShape){ types[i], 36, 16, 4, FRESH });
        gated_case((RowShape){ types[i], 150, 70, 0, WIDE });
        gated_case((RowShape){ types[i], 45, 40, 3, GATE_FIRST | THREE });
        gated_case((RowShape){ types[i], 300, 16, 0, THREE | FRESH });
        gated_case((RowShape){ types[i], 40, 24, 0, SIGMOID });
    }
    gated_case((RowShape){ F32, 1, 1, 0, 0 });
}

static void gates_case(RowShape p)
{
    CudaCase *c = case_open();
    const int64_t V = p.D;
    const int32_t shift = 30, zero = 0;
    const Matrix b = matrix_uniform(c, p.T, -6, 6, p.N, V, 3, 1), a = matrix_uniform(c, p.T, -30, 30, p.N, V, 3, 2);
    const Matrix db = matrix_uniform(c, p.T, -6, 6, p.N, V, 3, 1), da = matrix_uniform(c, p.T, -1, 1, p.N, V, 3, 0);
    const Pair a_log = pair_uniform(c, p.flags & WIDE ? F32 : p.T, -4, 2, CASE_DIMS(V));
    const Pair dt_bias = pair_uniform(c, p.flags & WIDE ? F32 : p.T, 0, 1, CASE_DIMS(V));
    const Pair beta = pair_output(c, F32, p.N, V), g = pair_output(c, F32, p.N, V);
    const Pair dbeta = pair_random(c, F32, 1, p.N, V), dg = pair_random(c, F32, 1, p.N, V);
    const Pair da_log = pair_random(c, F32, 1, V), ddt = pair_random(c, F32, 1, V);
    const Pair shifts = pair_values(c, I32, &shift, 1), overflow = pair_values(c, I32, &zero, 1);
    BOTH(c, delta_gates_fwd, .beta = AT(beta), .g = AT(g), .b = AT(b.view), .a = AT(a.view), .a_log = AT(a_log),
         .dt_bias = AT(dt_bias), .top = 2);
    pair_check(c, beta, 1e-5, "beta"), pair_check(c, g, 1e-5, "g");
    BOTH(c, delta_gates_bwd, .db = AT(db.view), .da = AT(da.view), .da_log = AT(da_log), .ddt_bias = AT(ddt),
         .dbeta = AT(dbeta), .dg = AT(dg), .b = AT(b.view), .a = AT(a.view), .a_log = AT(a_log), .dt_bias = AT(dt_bias),
         .shift_a = AT(shifts), .shift_dt = AT(shifts), .overflow = AT(overflow), .top = 2, .leaf = 16,
         .headroom_bits = 10, .fresh = p.flags & FRESH);
    pair_check(c, db.all, case_tolerance(p.T), "db"), pair_check(c, da.all, case_tolerance(p.T), "da");
    pair_check(c, da_log, 2e-5, "da_log"), pair_check(c, ddt, 2e-5, "ddt_bias");
    case_close(c);
}

TEST(delta_gates)
{
    static const DType types[] = { F32, BF16, F16 };
    for (int i = 0; i < 3; i++) {
        gates_case((RowShape){ types[i], 300, 5, 0, WIDE });
        gates_case((RowShape){ types[i], 7, 40, 0, FRESH });
    }
}

/* K of the shape is not read. */
static void kda_case(DeltaShape p)
{
    CudaCase *c = case_open();
    const int64_t windows = (p.rows + DELTA_WINDOW - 1) / DELTA_WINDOW, first = 128;
    const double unit = sqrt(3.0 / (double)p.D), tol = p.T == F32 ? 2e-5 : case_tolerance(p.T);
    const Tensor none = { 0 };
    const bool states = p.flags & STATES, docs = p.flags & DOCS;
    Pair all[4];
    const Pair q = heads4(c, &p, unit, p.V, p.D, NULL), k = heads4(c, &p, unit, p.V, p.D, NULL);
    const Pair v = heads4(c, &p, 1, p.V, p.E, NULL), go = heads4(c, &p, 1, p.V, p.E, NULL);
    const Pair o = heads4(c, &p, 1, p.V, p.E, &all[0]), dv = heads4(c, &p, 1, p.V, p.E, &all[1]);
    const Pair dq = heads4(c, &p, 1, p.V, p.D, &all[2]), dk = heads4(c, &p, 1, p.V, p.D, &all[3]);
    const Pair g = pair_uniform(c, F32, p.flags & FRESH ? -40 : -1, 0, CASE_DIMS(p.B, p.rows, p.V, p.D));
    const Pair beta = pair_uniform(c, F32, 0, 1, CASE_DIMS(p.B, p.rows, p.V));
    const Pair before = pair_random(c, F32, 1, p.B, p.V, p.D, p.E), dafter = pair_random(c, F32, 1, p.B, p.V, p.D, p.E);
    const Pair kept = pair_output(c, F32, p.B * windows * p.V, p.D, p.E),
               after = pair_output(c, F32, p.B, p.V, p.D, p.E);
    const Pair dbefore = pair_output(c, F32, p.B, p.V, p.D, p.E), dg = pair_output(c, F32, p.B, p.rows, p.V, p.D);
    const Pair dbeta = pair_output(c, F32, p.B, p.rows, p.V), doc = documents(c, p.B, p.rows, first);
    char name[96];
    snprintf(name, sizeof name, "%s B %d T %d heads %d, %d of %d flags %d", dtype_name(p.T), (int)p.B, (int)p.rows,
             (int)p.V, (int)p.D, (int)p.E, p.flags);
    BOTH(c, kda_fwd, .o = AT(o), .states = AT(kept), .after = states ? AT(after) : none, .q = AT(q), .k = AT(k),
         .v = AT(v), .g = AT(g), .beta = AT(beta), .doc = docs ? AT(doc) : none, .before = states ? AT(before) : none,
         .first = first);
    pair_check(c, all[0], tol, "o, %s", name);
    pair_check(c, kept, 2e-5, "states, %s", name);
    if (states) pair_check(c, after, 2e-5, "after, %s", name);
    BOTH(c, kda_bwd, .dq = AT(dq), .dk = AT(dk), .dv = AT(dv), .dg = AT(dg), .dbeta = AT(dbeta),
         .dbefore = states ? AT(dbefore) : none, .go = AT(go), .dafter = states ? AT(dafter) : none, .q = AT(q),
         .k = AT(k), .v = AT(v), .g = AT(g), .beta = AT(beta), .states = AT(kept), .doc = docs ? AT(doc) : none,
         .first = first);
    pair_check(c, all[1], tol, "dv, %s", name), pair_check(c, all[2], tol, "dq, %s", name);
    pair_check(c, all[3], tol, "dk, %s", name), pair_check(c, dg, 5e-5, "dg, %s", name);
    pair_check(c, dbeta, 5e-5, "dbeta, %s", name);
    if (states) pair_check(c, dbefore, 5e-5, "dbefore, %s", name);
    case_close(c);
}

TEST(kda)
{
    static const DType types[] = { F32, BF16, F16 };
    for (int i = 0; i < 3; i++) {
        kda_case((DeltaShape){ types[i], 2, 70, 0, 2, 16, 8, VIEWS | STATES });
        kda_case((DeltaShape){ types[i], 1, 133, 0, 2, 8, 16, DOCS | STATES });
    }
    kda_case((DeltaShape){ F32, 1, 1, 0, 3, 5, 7, 0 });
    kda_case((DeltaShape){ F32, 1, 64, 0, 2, 20, 12, STATES | FRESH });
    kda_case((DeltaShape){ F32, 2, 30, 0, 1, 12, 300, DOCS | VIEWS });
}

typedef struct {
    DType T;
    int64_t N, V, D;
    float bound;
    int flags;
} ColumnGates;

static void column_gates_case(ColumnGates p)
{
    CudaCase *c = case_open();
    const int32_t shift = 30, zero = 0;
    const DType wide = p.flags & WIDE ? F32 : p.T;
    const Matrix b = matrix_uniform(c, p.T, -6, 6, p.N, p.V, 3, 1), db = matrix_uniform(c, p.T, -6, 6, p.N, p.V, 3, 1);
    Matrix raw = matrix_groups(c, p.T, -30, 30, p.N * p.V, p.D, 5, 3, p.V);
    Matrix draw = matrix_groups(c, p.T, -1, 1, p.N * p.V, p.D, 5, 3, p.V);
    for (int side = 0; side < 2; side++) {
        raw.view.t[side] = tensor_reshape(raw.view.t[side], p.N, p.V, p.D);
        draw.view.t[side] = tensor_reshape(draw.view.t[side], p.N, p.V, p.D);
    }
    const Pair a_log = pair_uniform(c, wide, -4, 2, CASE_DIMS(p.V)),
               dt = pair_uniform(c, wide, -1, 1, CASE_DIMS(p.V, p.D));
    const Pair beta = pair_output(c, F32, p.N, p.V), g = pair_output(c, F32, p.N, p.V, p.D);
    const Pair dbeta = pair_random(c, F32, 1, p.N, p.V), dg = pair_random(c, F32, 1, p.N, p.V, p.D);
    const Pair da_log = pair_random(c, F32, 1, p.V), ddt = pair_random(c, F32, 1, p.V, p.D);
    const Pair shifts = pair_values(c, I32, &shift, 1), overflow = pair_values(c, I32, &zero, 1);
    BOTH(c, kda_gates_fwd, .beta = AT(beta), .g = AT(g), .b = AT(b.view), .raw = AT(raw.view), .a_log = AT(a_log),
         .dt_bias = AT(dt), .bound = p.bound);
    pair_check(c, beta, 1e-5, "beta"), pair_check(c, g, 1e-5, "g");
    BOTH(c, kda_gates_bwd, .db = AT(db.view), .draw = AT(draw.view), .da_log = AT(da_log), .ddt_bias = AT(ddt),
         .dbeta = AT(dbeta), .dg = AT(dg), .b = AT(b.view), .raw = AT(raw.view), .a_log = AT(a_log), .dt_bias = AT(dt),
         .shift_a = AT(shifts), .shift_dt = AT(shifts), .overflow = AT(overflow), .bound = p.bound, .leaf = 16,
         .headroom_bits = 10, .fresh = p.flags & FRESH);
    pair_check(c, db.all, case_tolerance(p.T), "db"), pair_check(c, draw.all, case_tolerance(p.T), "draw");
    pair_check(c, da_log, 5e-5, "da_log"), pair_check(c, ddt, 5e-5, "ddt_bias");
    case_close(c);
}

TEST(kda_gates)
{
    static const DType types[] = { F32, BF16, F16 };
    for (int i = 0; i < 3; i++) {
        column_gates_case((ColumnGates){ types[i], 70, 3, 40, 0, WIDE });
        column_gates_case((ColumnGates){ types[i], 7, 2, 16, -5, FRESH });
    }
}

TEST_MAIN
