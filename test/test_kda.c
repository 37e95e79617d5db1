/*
 * Kimi Delta Attention's rule and its gates against float64, token by token; bits of calls that hand on their state;
 * documents, gates that forget all or nothing, 16 bits, refusals. The recurrence's own gradients are held to finite
 * differences here and in test_delta.c.
 */
#include "delta_rule.h"
#include "device/scan_room.h"
#include "golden_layer.h"

/* ---- against float64, in all builds ---- */

enum { TWO_SAMPLES = 1, DOCS = 2, STATES = 4, VIEWS = 8, FORGETS = 16, KEEPS = 32 };

typedef struct {
    Tensor q, k, v, g, beta, before, go, dafter, doc, o, after, states, dq, dk, dv, dg, dbeta, dbefore;
} Tensors;

static void check_rule(const Tensors *t, int64_t first)
{
    const double close = 1e-5;
    Rule r = { .B = t->q.dim[0],
               .T = t->q.dim[1],
               .K = t->q.dim[2],
               .V = t->q.dim[2],
               .D = t->q.dim[3],
               .A = t->q.dim[3],
               .E = t->v.dim[3],
               .first = first };
    int32_t *doc = calloc((size_t)(r.B * r.T), sizeof *doc);
    for (int64_t b = 0; t->doc.data && b < r.B; b++)
        memcpy(doc + b * r.T, env_row(&t->doc, b), (size_t)r.T * sizeof *doc);
    if (t->doc.data) r.doc = doc;
    rule_open(&r);
    to_doubles(r.q, t->q, r.D), to_doubles(r.k, t->k, r.D), to_doubles(r.v, t->v, r.E);
    to_doubles(r.g, t->g, r.D), to_doubles(r.beta, t->beta, r.V), to_doubles(r.before, t->before, r.E);
    to_doubles(r.go, t->go, r.E), to_doubles(r.dafter, t->dafter, r.E);
    rule_forward(&r);
    rule_backward(&r);
    same_numbers("o", t->o, r.o, r.E, close), same_numbers("after", t->after, r.after, r.E, close);
    same_numbers("dq", t->dq, r.dq, r.D, close), same_numbers("dk", t->dk, r.dk, r.D, close);
    same_numbers("dv", t->dv, r.dv, r.E, close), same_numbers("dg", t->dg, r.dg, r.D, close);
    same_numbers("dbeta", t->dbeta, r.dbeta, r.V, close);
    same_numbers("dbefore", t->dbefore, r.dbefore, r.E, close);
    rule_close(&r);
    free(doc);
}

/* A column that forgets all at some rows keeps nearly all at others. */
static Tensor gates(Env *e, int flags, int64_t B, int64_t T, int64_t V, int64_t D)
{
    const double low = flags & FORGETS ? -90 : flags & KEEPS ? -1e-3 : -1.5;
    Tensor g = env_in(e, F32, low, 0, B, T, V, D);
    for (int64_t n = 0; n < B * T * V && flags & FORGETS; n++)
        for (int64_t c = 0; c < D; c++)
            if ((n + c) % 3) env_f(g, n)[c] = (n + c) % 3 == 1 ? 0 : -1e-4f;
    env_settle(e);
    return g;
}

/* N: heads; D, a: widths; b: rows. */
static void case_kda(Env *e, const Shape *p)
{
    const int64_t B = p->flags & TWO_SAMPLES ? 2 : 1, T = p->b, V = p->N, D = p->D, E = p->a, first = 192;
    const int64_t windows = (T + DELTA_WINDOW - 1) / DELTA_WINDOW;
    const bool views = p->flags & VIEWS;
    const double unit = sqrt(3.0 / (double)D);
    Tensors t = { .q = HEADS(e, views, false, unit, B, T, V, D),
                  .k = HEADS(e, views, false, unit, B, T, V, D),
                  .v = HEADS(e, views, false, 1, B, T, V, E),
                  .g = gates(e, p->flags, B, T, V, D),
                  .beta = env_in(e, F32, 0, 1, B, T, V),
                  .go = HEADS(e, views, false, 1, B, T, V, E),
                  .o = HEADS(e, views, true, 1, B, T, V, E),
                  .states = env_out(e, F32, 8, 9, B * windows * V, D, E),
                  .dq = HEADS(e, views, true, 1, B, T, V, D),
                  .dk = HEADS(e, views, true, 1, B, T, V, D),
                  .dv = HEADS(e, views, true, 1, B, T, V, E),
                  .dg = env_out(e, F32, 8, 9, B, T, V, D),
                  .dbeta = env_out(e, F32, 8, 9, B, T, V) };
    if (p->flags & DOCS) t.doc = documents(e, B, T, first);
    if (p->flags & STATES) {
        t.before = env_in(e, F32, -1, 1, B, V, D, E), t.dafter = env_in(e, F32, -1, 1, B, V, D, E);
        t.after = env_out(e, F32, 8, 9, B, V, D, E), t.dbefore = env_out(e, F32, 8, 9, B, V, D, E);
    }
    RUN(e, kda_fwd, .o = t.o, .states = t.states, .after = t.after, .q = t.q, .k = t.k, .v = t.v, .g = t.g,
        .beta = t.beta, .doc = t.doc, .before = t.before, .first = first);
    RUN(e, kda_bwd, .dq = t.dq, .dk = t.dk, .dv = t.dv, .dg = t.dg, .dbeta = t.dbeta, .dbefore = t.dbefore, .go = t.go,
        .dafter = t.dafter, .q = t.q, .k = t.k, .v = t.v, .g = t.g, .beta = t.beta, .states = t.states, .doc = t.doc,
        .first = first);
    if (!e->check) return;
    env_check_between(e, tensor_reshape(t.dq, B * T * V, D));
    check_rule(&t, first);
}

TEST(kda_rule)
{
    static const Shape shapes[] = { { 1, 1, 1, 1, 0 },
                                    { 1, 4, 3, 7, 0 },
                                    { 2, 16, 16, 64, STATES },
                                    { 3, 17, 5, 65, STATES | TWO_SAMPLES },
                                    { 2, 33, 20, 200, STATES | DOCS },
                                    { 2, 8, 32, 150, DOCS | TWO_SAMPLES | VIEWS },
                                    { 4, 20, 16, 130, STATES | DOCS | TWO_SAMPLES | VIEWS },
                                    { 1, 64, 64, 128, KEEPS | STATES },
                                    { 2, 16, 16, 190, FORGETS | STATES },
                                    { 2, 40, 24, 129, FORGETS | DOCS | STATES },
                                    { 1, 130, 40, 33, 0 } };
    scan_cases(case_kda, shapes, sizeof shapes / sizeof *shapes);
}

/* ---- finite differences ---- */

TEST(finite_differences)
{
    Rule r = { .B = 1, .T = 9, .K = 2, .V = 2, .D = 3, .E = 2, .A = 3 };
    uint64_t state = 3;
    rule_open(&r);
    for (int64_t i = 0; i < r.T * r.V * r.D; i++) {
        r.q[i] = test_uniform(&state, -1, 1), r.k[i] = test_uniform(&state, -1, 1);
        r.g[i] = test_uniform(&state, -2, 0);
    }
    for (int64_t i = 0; i < r.T * r.V * r.E; i++)
        r.v[i] = test_uniform(&state, -1, 1), r.go[i] = test_uniform(&state, -1, 1);
    for (int64_t i = 0; i < r.T * r.V; i++) r.beta[i] = test_uniform(&state, 0, 1);
    rule_forward(&r);
    rule_backward(&r);
    check_slopes("g", &r, r.g, r.dg, r.T * r.V * r.D);
    rule_close(&r);
}

/* ---- gates ---- */

static double decay(double raw, double a_log, double dt_bias, double bound)
{
    const double x = raw + dt_bias, rate = exp(a_log);
    if (bound < 0) return bound / (1 + exp(-rate * x));
    return -rate * (x > 30 ? x : log1p(exp(x)));
}

/* N: heads; D: width; b: rows; a: whether there is a bound. */
static void case_gates(Env *e, const Shape *p)
{
    const int64_t N = p->b, V = p->N, D = p->D, leaf = 8;
    const float bound = p->a ? -5 : 0;
    const double most = p->flags & FORGETS ? 60 : 4;
    Tensor raw = HEADS(e, p->flags & VIEWS, false, most, 1, N, V, D),
           draw = HEADS(e, p->flags & VIEWS, true, 1, 1, N, V, D);
    Tensor b = env_in(e, F32, -most, most, N, V), db = env_out(e, F32, 0, 1, N, V);
    Tensor a_log = env_in(e, F32, -1, 2.8, V), dt = env_in(e, F32, -6, 1, V, D);
    Tensor g = env_out(e, F32, 0, 1, N, V, D), beta = env_out(e, F32, 0, 1, N, V);
    Tensor dg = env_in(e, F32, -1, 1, N, V, D), dbeta = env_in(e, F32, -1, 1, N, V);
    Tensor da = env_out(e, F32, 0, 1, V), ddt = env_out(e, F32, 0, 1, V, D), overflow = env_out(e, I32, 0, 1, 1);
    Tensor shift = env_in(e, I32, 0, 1, 1);
    raw = tensor_reshape(raw, N, V, D), draw = tensor_reshape(draw, N, V, D);
    RUN(e, kda_gates_fwd, .beta = beta, .g = g, .b = b, .raw = raw, .a_log = a_log, .dt_bias = dt, .bound = bound);
    RUN(e, kda_gates_bwd, .db = db, .draw = draw, .da_log = da, .ddt_bias = ddt, .dbeta = dbeta, .dg = dg, .b = b,
        .raw = raw, .a_log = a_log, .dt_bias = dt, .shift_a = shift, .shift_dt = shift, .overflow = overflow,
        .bound = bound, .leaf = leaf, .fresh = 1);
    if (!e->check) return;
    for (int64_t h = 0; h < V; h++) {
        const double log = (double)env_f(a_log, h)[0], step = 1e-5;
        double da_log = 0, size = 0;
        for (int64_t c = 0; c < D; c++) {
            const double bias = (double)env_f(dt, h)[c];
            double sum = 0, terms = 0;
            for (int64_t n = 0; n < N; n++) {
                const double x = (double)env_f(raw, n * V + h)[c], up = (double)env_f(dg, n * V + h)[c];
                const double want = decay(x, log, bias, (double)bound);
                const double slope =
                    (decay(x + step, log, bias, (double)bound) - decay(x - step, log, bias, (double)bound)) /
                    (2 * step);
                const double by_log =
                    (decay(x, log + step, bias, (double)bound) - decay(x, log - step, bias, (double)bound)) /
                    (2 * step);
                CHECK_CLOSE((double)env_f(g, n * V + h)[c], want, 2e-6, "g %d %d %d", (int)n, (int)h, (int)c);
                CHECK_CLOSE((double)env_f(draw, n * V + h)[c], up * slope, 1e-4, "draw %d %d %d", (int)n, (int)h,
                            (int)c);
                sum += up * slope, terms += fabs(up * slope), da_log += up * by_log, size += fabs(up * by_log);
            }
            CHECK_MSG(fabs((double)env_f(ddt, h)[c] - sum) <= 1e-4 * (terms + 1e-3), "ddt_bias %d %d", (int)h, (int)c);
        }
        CHECK_MSG(fabs((double)env_f(da, h)[0] - da_log) <= 1e-4 * (size + 1e-3), "da_log %d: %g, want %g", (int)h,
                  (double)env_f(da, h)[0], da_log);
    }
    for (int64_t n = 0; n < N; n++)
        for (int64_t h = 0; h < V; h++) {
            const double s = 1 / (1 + exp(-(double)env_f(b, n)[h]));
            CHECK_CLOSE((double)env_f(beta, n)[h], s, 1e-6, "beta");
            CHECK_CLOSE((double)env_f(db, n)[h], (double)env_f(dbeta, n)[h] * s * (1 - s), 1e-6, "db");
        }
}

TEST(kda_gates)
{
    static const Shape shapes[] = { { 1, 1, 0, 1, 0 },        { 3, 17, 0, 21, 0 },     { 2, 32, 1, 16, VIEWS },
                                    { 4, 40, 1, 9, 0 },       { 2, 16, 0, 33, VIEWS }, { 3, 20, 0, 19, FORGETS },
                                    { 3, 20, 1, 19, FORGETS } };
    scan_cases(case_gates, shapes, sizeof shapes / sizeof *shapes);
}

/* ---- calls that hand on their state ---- */

enum { CUT_ROWS = 200, CUT_V = 3, CUT_D = 20, CUT_E = 24 };
enum { CUT_STATE = CUT_V * CUT_D * CUT_E, CUT_WINDOWS = (CUT_ROWS + DELTA_WINDOW - 1) / DELTA_WINDOW };

typedef struct {
    float q[CUT_ROWS][CUT_V * CUT_D], k[CUT_ROWS][CUT_V * CUT_D], g[CUT_ROWS][CUT_V * CUT_D];
    float v[CUT_ROWS][CUT_V * CUT_E], go[CUT_ROWS][CUT_V * CUT_E];
    float beta[CUT_ROWS][CUT_V], before[CUT_STATE], dafter[CUT_STATE];
    int32_t doc[CUT_ROWS];
    bool documents;
} Sequence;

typedef struct {
    float o[CUT_ROWS][CUT_V * CUT_E], states[CUT_WINDOWS][CUT_STATE], after[CUT_STATE];
    float dq[CUT_ROWS][CUT_V * CUT_D], dk[CUT_ROWS][CUT_V * CUT_D], dg[CUT_ROWS][CUT_V * CUT_D];
    float dv[CUT_ROWS][CUT_V * CUT_E], dbeta[CUT_ROWS][CUT_V], dbefore[CUT_STATE];
} Whole;

#define KEYS_OF(x, T) tensor_of(x, F32, 1, (T), CUT_V, CUT_D)
#define VALUES_OF(x, T) tensor_of(x, F32, 1, (T), CUT_V, CUT_E)
#define GATES_OF(x, T) tensor_of(x, F32, 1, (T), CUT_V)
#define STATE_OF(x) tensor_of(x, F32, 1, CUT_V, CUT_D, CUT_E)

static void run_forward(Device *dev, Sequence *s, Whole *w, int64_t first, int64_t T, float *before)
{
    const int64_t windows = (T + DELTA_WINDOW - 1) / DELTA_WINDOW;
    OK(tested_op(&dev->stream, kda_fwd, .o = VALUES_OF(w->o + first, T),
                 .states = tensor_of(w->states + first / DELTA_WINDOW, F32, windows * CUT_V, CUT_D, CUT_E),
                 .after = STATE_OF(w->after), .q = KEYS_OF(s->q + first, T), .k = KEYS_OF(s->k + first, T),
                 .v = VALUES_OF(s->v + first, T), .g = KEYS_OF(s->g + first, T), .beta = GATES_OF(s->beta + first, T),
                 .doc = s->documents ? tensor_of(s->doc + first, I32, 1, T) : (Tensor){ 0 }, .before = STATE_OF(before),
                 .first = first));
}

static void run_backward(Device *dev, Sequence *s, Whole *w, int64_t first, int64_t T, float *dafter)
{
    const int64_t windows = (T + DELTA_WINDOW - 1) / DELTA_WINDOW;
    OK(tested_op(&dev->stream, kda_bwd, .dq = KEYS_OF(w->dq + first, T), .dk = KEYS_OF(w->dk + first, T),
                 .dv = VALUES_OF(w->dv + first, T), .dg = KEYS_OF(w->dg + first, T),
                 .dbeta = GATES_OF(w->dbeta + first, T), .dbefore = STATE_OF(w->dbefore),
                 .go = VALUES_OF(s->go + first, T), .dafter = STATE_OF(dafter), .q = KEYS_OF(s->q + first, T),
                 .k = KEYS_OF(s->k + first, T), .v = VALUES_OF(s->v + first, T), .g = KEYS_OF(s->g + first, T),
                 .beta = GATES_OF(s->beta + first, T),
                 .states = tensor_of(w->states + first / DELTA_WINDOW, F32, windows * CUT_V, CUT_D, CUT_E),
                 .doc = s->documents ? tensor_of(s->doc + first, I32, 1, T) : (Tensor){ 0 }, .first = first));
}

static Sequence *sequence(bool documents)
{
    static Sequence s;
    fill(s.q[0], sizeof s.q, -.4, .4, 1), fill(s.k[0], sizeof s.k, -.4, .4, 2), fill(s.v[0], sizeof s.v, -1, 1, 3);
    fill(s.go[0], sizeof s.go, -1, 1, 4), fill(s.g[0], sizeof s.g, -.3, 0, 5), fill(s.beta[0], sizeof s.beta, 0, 1, 6);
    fill(s.before, sizeof s.before, -1, 1, 7), fill(s.dafter, sizeof s.dafter, -1, 1, 8);
    for (int i = 0; i < CUT_ROWS; i++) s.doc[i] = i < 40 ? -1 : i < 128 ? 40 : i < 131 ? 128 : 131;
    s.documents = documents;
    return &s;
}

#define CUT_WINDOW DELTA_WINDOW
#include "scan_cuts.h"

TEST(cuts) { check_cuts(false); }
TEST(cuts_documents) { check_cuts(true); }

/* Nothing of gates at their ends makes a NaN, but a NaN stays. */
TEST(edges)
{
    static Whole w;
    Device dev;
    Sequence *s = sequence(false);
    OK(device_open(&dev, (DeviceChoice){ .threads = 1 }));
    memset(s->k, 0, sizeof s->k);
    for (int i = 0; i < CUT_ROWS; i++)
        for (int c = 0; c < CUT_V * CUT_D; c++) s->g[i][c] = (i + c) % 5 ? -1e4f : -3e38f;
    for (int i = 0; i < CUT_ROWS; i++)
        for (int h = 0; h < CUT_V; h++) s->beta[i][h] = (float)(i % 2);
    run_forward(&dev, s, &w, 0, CUT_ROWS, s->before);
    run_backward(&dev, s, &w, 0, CUT_ROWS, s->dafter);
    const float *all = (const float *)(const void *)&w;
    for (size_t i = 0; i < sizeof w / sizeof *all; i++) CHECK(isfinite(all[i]));
    s = sequence(false);
    s->v[100][0] = NAN;
    run_forward(&dev, s, &w, 0, CUT_ROWS, s->before);
    CHECK(isnan(w.o[100][0]) && isnan(w.after[0]) && !isnan(w.o[79][0]));
    device_close(&dev);
}

/* With one gate for all columns of a head it is the gated delta rule. */
TEST(equal_gates)
{
    static Whole w, delta;
    static float g[CUT_ROWS][CUT_V], dg[CUT_ROWS][CUT_V];
    Device dev;
    Sequence *s = sequence(true);
    OK(device_open(&dev, (DeviceChoice){ .threads = 1 }));
    fill(g[0], sizeof g, -.6, 0, 9);
    for (int i = 0; i < CUT_ROWS; i++)
        for (int c = 0; c < CUT_V * CUT_D; c++) s->g[i][c] = g[i][c / CUT_D];
    run_forward(&dev, s, &w, 0, CUT_ROWS, s->before);
    run_backward(&dev, s, &w, 0, CUT_ROWS, s->dafter);
    const Tensor states = tensor_of(delta.states, F32, CUT_WINDOWS * CUT_V, CUT_D, CUT_E);
    const Tensor q = KEYS_OF(s->q, CUT_ROWS), k = KEYS_OF(s->k, CUT_ROWS), v = VALUES_OF(s->v, CUT_ROWS);
    const Tensor doc = tensor_of(s->doc, I32, 1, CUT_ROWS), beta = GATES_OF(s->beta, CUT_ROWS);
    OK(op(&dev.stream, delta_fwd, .o = VALUES_OF(delta.o, CUT_ROWS), .states = states, .after = STATE_OF(delta.after),
          .q = q, .k = k, .v = v, .g = GATES_OF(g, CUT_ROWS), .beta = beta, .doc = doc, .before = STATE_OF(s->before)));
    OK(op(&dev.stream, delta_bwd, .dq = KEYS_OF(delta.dq, CUT_ROWS), .dk = KEYS_OF(delta.dk, CUT_ROWS),
          .dv = VALUES_OF(delta.dv, CUT_ROWS), .dg = GATES_OF(dg, CUT_ROWS), .dbeta = GATES_OF(delta.dbeta, CUT_ROWS),
          .dbefore = STATE_OF(delta.dbefore), .go = VALUES_OF(s->go, CUT_ROWS), .dafter = STATE_OF(s->dafter), .q = q,
          .k = k, .v = v, .g = GATES_OF(g, CUT_ROWS), .beta = beta, .states = states, .doc = doc));
    for (int i = 0; i < CUT_ROWS; i++)
        for (int h = 0; h < CUT_V; h++) {
            float sum = 0;
            for (int c = 0; c < CUT_D; c++) sum += w.dg[i][h * CUT_D + c];
            CHECK_MSG(fabsf(sum - dg[i][h]) <= 3e-5f, "dg %d %d: %g, want %g", i, h, (double)sum, (double)dg[i][h]);
            for (int c = 0; c < CUT_E; c++)
                CHECK_CLOSE((double)w.o[i][h * CUT_E + c], (double)delta.o[i][h * CUT_E + c], 1e-5, "o");
            for (int c = 0; c < CUT_D; c++)
                CHECK_CLOSE((double)w.dk[i][h * CUT_D + c], (double)delta.dk[i][h * CUT_D + c], 1e-5, "dk");
        }
    device_close(&dev);
}

/* Workspace that a configuration is refused for is what an op would refuse. */
TEST(room_of_a_head)
{
    static Whole w;
    Device dev;
    Sequence *s = sequence(true);
    OK(device_open(&dev, (DeviceChoice){ .threads = 1 }));
    const int64_t all = dev.workspace_bytes;
    run_forward(&dev, s, &w, 0, CUT_ROWS, s->before);
    dev.workspace_bytes = kda_room_cpu(CUT_D, CUT_E);
    run_backward(&dev, s, &w, 0, CUT_ROWS, s->dafter);
    dev.workspace_bytes--;
    FAILS(op(&dev.stream, kda_bwd, .dq = KEYS_OF(w.dq, 64), .dk = KEYS_OF(w.dk, 64), .dv = VALUES_OF(w.dv, 64),
             .dg = KEYS_OF(w.dg, 64), .dbeta = GATES_OF(w.dbeta, 64), .go = VALUES_OF(s->go, 64),
             .q = KEYS_OF(s->q, 64), .k = KEYS_OF(s->k, 64), .v = VALUES_OF(s->v, 64), .g = KEYS_OF(s->g, 64),
             .beta = GATES_OF(s->beta, 64), .states = tensor_of(w.states, F32, CUT_V, CUT_D, CUT_E)),
          ERR_CONFIG, "Kimi's delta rule needs");
    dev.workspace_bytes = all;
    device_close(&dev);
}

TEST(refusals)
{
    static Whole w;
    Device dev;
    Sequence *s = sequence(false);
    OK(device_open(&dev, (DeviceChoice){ .threads = 1 }));
    const kda_fwd_args good = { .o = VALUES_OF(w.o, 64),
                                .q = KEYS_OF(s->q, 64),
                                .k = KEYS_OF(s->k, 64),
                                .v = VALUES_OF(s->v, 64),
                                .g = KEYS_OF(s->g, 64),
                                .beta = GATES_OF(s->beta, 64) };
    kda_fwd_args a = good;
    OK(op_kda_fwd(&dev.stream, &a));
    a.first = 63;
    FAILS(op_kda_fwd(&dev.stream, &a), ERR_SHAPE, "position 63");
    a = good;
    a.states = tensor_of(w.states, F32, 4, CUT_D, CUT_E);
    FAILS(op_kda_fwd(&dev.stream, &a), ERR_SHAPE, "4 states for 1 windows");
    a = good;
    dev.workspace_bytes = 4096;
    FAILS(op_kda_fwd(&dev.stream, &a), ERR_CONFIG, "Kimi's delta rule needs");
    device_close(&dev);
}

/* ---- another program's numbers ---- */

#define GOLDEN "../shared/fixtures/kinds/kda.json"
enum { G_T = 6, G_H = 6, G_V = 2, G_D = 4, G_TAPS = 4, G_C = G_V * G_D };

typedef struct {
    float x[G_T * G_H], y[G_T * G_H], dy[G_T * G_H], w[3][G_C * G_H], taps[3 * G_C * G_TAPS], f_a[G_D * G_H],
        f_b[G_C * G_D];
    float a_log[G_V], dt[G_C], b_w[G_V * G_H], g_a[G_D * G_H], g_b[G_C * G_D], norm[G_D], out[G_H * G_C];
    float m[3][G_T * G_C], raw[G_T * G_C], g[G_T * G_C], b[G_T * G_V], beta[G_T * G_V], gate[G_T * G_C];
    float o[G_T * G_C], go[G_T * G_C], states[G_V * G_D * G_D], after[G_V * G_D * G_D];
    float dm[3][G_T * G_C], dg[G_T * G_C], dbeta[G_T * G_V], db[G_T * G_V], draw[G_T * G_C];
    float da_log[G_V], ddt[G_C];
} Mixer;

static void golden_read(Mixer *l, const Json *j)
{
    const Json *in = json_get(j, "input");
    const char *proj[] = { "q_proj", "k_proj", "v_proj" };
    for (int i = 0; i < 3; i++) golden_numbers(in, proj[i], l->w[i], G_C * G_H);
    golden_numbers(in, "x", l->x, G_T * G_H), golden_numbers(in, "conv", l->taps, 3 * G_C * G_TAPS);
    golden_numbers(in, "f_a_proj", l->f_a, G_D * G_H), golden_numbers(in, "f_b_proj", l->f_b, G_C * G_D);
    golden_numbers(in, "g_a_proj", l->g_a, G_D * G_H), golden_numbers(in, "g_b_proj", l->g_b, G_C * G_D);
    golden_numbers(in, "A_log", l->a_log, G_V), golden_numbers(in, "dt_bias", l->dt, G_C);
    golden_numbers(in, "b_proj", l->b_w, G_V * G_H), golden_numbers(in, "o_norm", l->norm, G_D);
    golden_numbers(in, "o_proj", l->out, G_H * G_C), golden_numbers(j, "dy", l->dy, G_T * G_H);
}

/* Queries, keys and values behind convolution, SiLU and, of the first two, unit length; b, raw and the gate of the
 * output. */
static void golden_inputs(Mixer *l)
{
    float mixed[G_T * G_C], low[G_T * G_D];
    for (int part = 0; part < 3; part++) {
        times(mixed, l->x, l->w[part], G_T, G_C, G_H);
        for (int t = 0; t < G_T; t++)
            for (int c = 0; c < G_C; c++) {
                double sum = 0;
                for (int i = 0; i < G_TAPS; i++) {
                    const int row = t - G_TAPS + 1 + i;
                    if (row >= 0) sum += (double)l->taps[(part * G_C + c) * G_TAPS + i] * (double)mixed[row * G_C + c];
                }
                l->m[part][t * G_C + c] = (float)(sum / (1 + exp(-sum)));
            }
        for (int h = 0; h < G_T * G_V && part < 2; h++) {
            float *row = l->m[part] + h * G_D;
            double sum = 1e-6;
            for (int d = 0; d < G_D; d++) sum += (double)row[d] * (double)row[d];
            for (int d = 0; d < G_D; d++) row[d] = (float)((double)row[d] / sqrt(sum * (part ? 1 : G_D)));
        }
    }
    times(low, l->x, l->f_a, G_T, G_D, G_H), times(l->raw, low, l->f_b, G_T, G_C, G_D);
    times(low, l->x, l->g_a, G_T, G_D, G_H), times(l->gate, low, l->g_b, G_T, G_C, G_D);
    times(l->b, l->x, l->b_w, G_T, G_V, G_H);
}

/* y = (w rms(o) sigmoid(gate)) out; and from dy the gradient of o. */
static void golden_output(Mixer *l)
{
    float normed[G_T * G_C], dn[G_T * G_C] = { 0 };
    times_back(dn, l->dy, l->out, G_T, G_H, G_C);
    for (int h = 0; h < G_T * G_V; h++) {
        const float *o = l->o + h * G_D;
        double squares = 0, dot = 0, dh[G_D];
        for (int d = 0; d < G_D; d++) squares += (double)o[d] * (double)o[d];
        const double r = 1 / sqrt(squares / G_D + 1e-5);
        for (int d = 0; d < G_D; d++) {
            const double gate = (double)l->norm[d] / (1 + exp(-(double)l->gate[h * G_D + d]));
            normed[h * G_D + d] = (float)((double)o[d] * r * gate);
            dh[d] = (double)dn[h * G_D + d] * gate;
            dot += dh[d] * (double)o[d] * r;
        }
        for (int d = 0; d < G_D; d++) l->go[h * G_D + d] = (float)(r * (dh[d] - (double)o[d] * r * dot / G_D));
    }
    times(l->y, normed, l->out, G_T, G_H, G_C);
}

#define ROWS(x) tensor_of(l->x, F32, 1, G_T, G_V, G_D)
#define GATES_AT(x) tensor_of(l->x, F32, G_T, G_V)
#define COLUMNS(x) tensor_of(l->x, F32, G_T, G_V, G_D)

static void golden_rule(Mixer *l, Stream *s)
{
    static int32_t shift, overflow;
    const Tensor zero = tensor_of(&shift, I32, 1), a_log = tensor_of(l->a_log, F32, G_V);
    const Tensor dt = tensor_of(l->dt, F32, G_V, G_D), beta = tensor_of(l->beta, F32, 1, G_T, G_V);
    OK(op(s, kda_gates_fwd, .beta = GATES_AT(beta), .g = COLUMNS(g), .b = GATES_AT(b), .raw = COLUMNS(raw),
          .a_log = a_log, .dt_bias = dt));
    OK(op(s, kda_fwd, .o = ROWS(o), .states = tensor_of(l->states, F32, G_V, G_D, G_D),
          .after = tensor_of(l->after, F32, 1, G_V, G_D, G_D), .q = ROWS(m[0]), .k = ROWS(m[1]), .v = ROWS(m[2]),
          .g = ROWS(g), .beta = beta));
    golden_output(l);
    OK(op(s, kda_bwd, .dq = ROWS(dm[0]), .dk = ROWS(dm[1]), .dv = ROWS(dm[2]), .dg = ROWS(dg),
          .dbeta = tensor_of(l->dbeta, F32, 1, G_T, G_V), .go = ROWS(go), .q = ROWS(m[0]), .k = ROWS(m[1]),
          .v = ROWS(m[2]), .g = ROWS(g), .beta = beta, .states = tensor_of(l->states, F32, G_V, G_D, G_D)));
    OK(op(s, kda_gates_bwd, .db = GATES_AT(db), .draw = COLUMNS(draw), .da_log = tensor_of(l->da_log, F32, G_V),
          .ddt_bias = tensor_of(l->ddt, F32, G_V, G_D), .dbeta = GATES_AT(dbeta), .dg = COLUMNS(dg), .b = GATES_AT(b),
          .raw = COLUMNS(raw), .a_log = a_log, .dt_bias = dt, .shift_a = zero, .shift_dt = zero,
          .overflow = tensor_of(&overflow, I32, 1), .leaf = 64, .fresh = 1));
}

TEST(golden_mixer)
{
    static Mixer l;
    Device dev;
    Json *j;
    FILE *f = fopen(GOLDEN, "r");
    if (!f) SKIP("no " GOLDEN);
    fclose(f);
    OK(json_read_file(GOLDEN, 1 << 20, &j));
    OK(device_open(&dev, (DeviceChoice){ .threads = 1 }));
    golden_read(&l, j);
    golden_inputs(&l);
    float low[G_T * G_D], f_b[G_C * G_D] = { 0 }, b_w[G_V * G_H] = { 0 }, safe[G_T * G_C];
    times(low, l.x, l.f_a, G_T, G_D, G_H);
    golden_rule(&l, &dev.stream);
    golden_check(j, "log_decay", l.g, G_T * G_C), golden_check(j, "beta", l.beta, G_T * G_V);
    golden_check(j, "o", l.o, G_T * G_C), golden_check(j, "final_state", l.after, G_V * G_D * G_D);
    golden_check(j, "y", l.y, G_T * G_H);
    times_sum(f_b, l.draw, low, G_T, G_C, G_D), times_sum(b_w, l.db, l.x, G_T, G_V, G_H);
    const Json *grad = json_get(j, "grad");
    golden_check(grad, "f_b_proj", f_b, G_C * G_D), golden_check(grad, "b_proj", b_w, G_V * G_H);
    golden_check(grad, "A_log", l.da_log, G_V), golden_check(grad, "dt_bias", l.ddt, G_C);
    OK(op(&dev.stream, kda_gates_fwd, .beta = tensor_of(l.beta, F32, G_T, G_V),
          .g = tensor_of(safe, F32, G_T, G_V, G_D), .b = tensor_of(l.b, F32, G_T, G_V),
          .raw = tensor_of(l.raw, F32, G_T, G_V, G_D), .a_log = tensor_of(l.a_log, F32, G_V),
          .dt_bias = tensor_of(l.dt, F32, G_V, G_D), .bound = -5));
    golden_check(j, "log_decay_safe", safe, G_T * G_C);
    json_free(j);
    device_close(&dev);
}

TEST_MAIN
