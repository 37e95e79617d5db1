/*
 * The gated delta rule against the recurrence in float64, token by token, and against finite differences; bits of calls
 * that hand on their state; documents, gates that forget all or nothing, refusals.
 */
#include "device/scan_room.h"
#include "delta_rule.h"
#include "scan_case.h"

/* ---- against it, in all builds ---- */

enum { TWO_SAMPLES = 1, DOCS = 2, STATES = 4, VIEWS = 8, FORGETS = 16, KEEPS = 32, STRONG = 64, LONE = 128 };

typedef struct {
    Tensor q, k, v, g, beta, before, go, dafter, doc, o, after, states, dq, dk, dv, dg, dbeta, dbefore;
} Tensors;

static void check_rule(const Tensors *t, int64_t first, double tolerance)
{
    Rule r = { .B = t->q.dim[0],
               .T = t->q.dim[1],
               .K = t->q.dim[2],
               .V = t->v.dim[2],
               .D = t->q.dim[3],
               .E = t->v.dim[3],
               .A = 1,
               .first = first };
    int32_t *doc = calloc((size_t)(r.B * r.T), sizeof *doc);
    for (int64_t b = 0; t->doc.data && b < r.B; b++)
        memcpy(doc + b * r.T, env_row(&t->doc, b), (size_t)r.T * sizeof *doc);
    if (t->doc.data) r.doc = doc;
    rule_open(&r);
    to_doubles(r.q, t->q, r.D), to_doubles(r.k, t->k, r.D), to_doubles(r.v, t->v, r.E);
    to_doubles(r.g, t->g, r.V), to_doubles(r.beta, t->beta, r.V), to_doubles(r.before, t->before, r.E);
    to_doubles(r.go, t->go, r.E), to_doubles(r.dafter, t->dafter, r.E);
    rule_forward(&r);
    rule_backward(&r);
    same_numbers("o", t->o, r.o, r.E, tolerance), same_numbers("after", t->after, r.after, r.E, tolerance);
    same_numbers("dq", t->dq, r.dq, r.D, tolerance), same_numbers("dk", t->dk, r.dk, r.D, tolerance);
    same_numbers("dv", t->dv, r.dv, r.E, tolerance), same_numbers("dg", t->dg, r.dg, r.V, tolerance);
    same_numbers("dbeta", t->dbeta, r.dbeta, r.V, tolerance);
    same_numbers("dbefore", t->dbefore, r.dbefore, r.E, tolerance);
    rule_close(&r);
    free(doc);
}

static Tensor gates(Env *e, int flags, int64_t B, int64_t T, int64_t V)
{
    const double low = flags & FORGETS ? -90 : flags & KEEPS ? -1e-3 : -1.5;
    Tensor g = env_in(e, F32, low, 0, B, T, V);
    for (int64_t n = 0; n < B * T * V && flags & FORGETS; n++)
        if (n % 3) env_f(g, n / V)[n % V] = n % 3 == 1 ? 0 : -1e-4f;
    env_settle(e);
    return g;
}

/* N: key heads; D, a: widths; b: rows. */
static void case_delta(Env *e, const Shape *p)
{
    const int64_t B = p->flags & TWO_SAMPLES ? 2 : 1, T = p->b, K = p->N, V = p->flags & LONE ? K : 2 * K + K % 2 * K;
    const int64_t D = p->D, E = p->a, windows = (T + DELTA_WINDOW - 1) / DELTA_WINDOW, first = 192;
    const bool views = p->flags & VIEWS, states = p->flags & STATES;
    const double unit = sqrt(3.0 / (double)D);
    Tensors t = { .q = HEADS(e, views, false, unit, B, T, K, D),
                  .k = HEADS(e, views, false, unit, B, T, K, D),
                  .v = HEADS(e, views, false, 1, B, T, V, E),
                  .g = gates(e, p->flags, B, T, V),
                  .beta = env_in(e, F32, 0, p->flags & STRONG ? 1.6 : 1, B, T, V),
                  .go = HEADS(e, views, false, 1, B, T, V, E),
                  .o = HEADS(e, views, true, 1, B, T, V, E),
                  .states = env_out(e, F32, 8, 9, B * windows * V, D, E),
                  .dq = HEADS(e, views, true, 1, B, T, K, D),
                  .dk = HEADS(e, views, true, 1, B, T, K, D),
                  .dv = HEADS(e, views, true, 1, B, T, V, E),
                  .dg = env_out(e, F32, 8, 9, B, T, V),
                  .dbeta = env_out(e, F32, 8, 9, B, T, V) };
    if (p->flags & DOCS) t.doc = documents(e, B, T, first);
    if (states) {
        t.before = env_in(e, F32, -1, 1, B, V, D, E), t.dafter = env_in(e, F32, -1, 1, B, V, D, E);
        t.after = env_out(e, F32, 8, 9, B, V, D, E), t.dbefore = env_out(e, F32, 8, 9, B, V, D, E);
    }
    RUN(e, delta_fwd, .o = t.o, .states = t.states, .after = t.after, .q = t.q, .k = t.k, .v = t.v, .g = t.g,
        .beta = t.beta, .doc = t.doc, .before = t.before, .first = first);
    RUN(e, delta_bwd, .dq = t.dq, .dk = t.dk, .dv = t.dv, .dg = t.dg, .dbeta = t.dbeta, .dbefore = t.dbefore,
        .go = t.go, .dafter = t.dafter, .q = t.q, .k = t.k, .v = t.v, .g = t.g, .beta = t.beta, .states = t.states,
        .doc = t.doc, .first = first);
    if (!e->check) return;
    env_check_between(e, tensor_reshape(t.dq, B * T * K, D));
    check_rule(&t, first, p->flags & STRONG ? 1e-4 : 1e-5);
}

TEST(delta_rule)
{
    static const Shape shapes[] = { { 1, 1, 1, 1, 0 },
                                    { 1, 4, 3, 7, LONE },
                                    { 2, 16, 16, 64, STATES },
                                    { 3, 17, 5, 65, STATES | TWO_SAMPLES },
                                    { 1, 33, 20, 200, STATES | DOCS },
                                    { 2, 8, 32, 150, DOCS | TWO_SAMPLES | VIEWS },
                                    { 2, 20, 16, 130, STATES | DOCS | TWO_SAMPLES | VIEWS },
                                    { 1, 64, 64, 128, KEEPS | STATES | LONE },
                                    { 1, 16, 16, 190, FORGETS | STATES },
                                    { 2, 12, 18, 129, STRONG | STATES | VIEWS },
                                    { 1, 40, 130, 33, LONE } };
    scan_cases(case_delta, shapes, sizeof shapes / sizeof *shapes);
}

/* ---- finite differences ---- */

/* The recurrence's own backward, which all kernels are held to. */
TEST(finite_differences)
{
    int32_t doc[20];
    for (int i = 0; i < 20; i++) doc[i] = i < 3 ? 61 : i < 11 ? 67 : 75;
    Rule r = { .B = 1, .T = 20, .K = 2, .V = 4, .D = 3, .E = 2, .A = 1, .first = 64, .doc = doc };
    uint64_t state = 3;
    rule_open(&r);
    const int64_t N = r.T;
    for (int64_t i = 0; i < N * r.K * r.D; i++)
        r.q[i] = test_uniform(&state, -1, 1), r.k[i] = test_uniform(&state, -1, 1);
    for (int64_t i = 0; i < N * r.V * r.E; i++)
        r.v[i] = test_uniform(&state, -1, 1), r.go[i] = test_uniform(&state, -1, 1);
    for (int64_t i = 0; i < N * r.V; i++) r.g[i] = test_uniform(&state, -2, 0), r.beta[i] = test_uniform(&state, 0, 1);
    for (int64_t i = 0; i < r.V * r.D * r.E; i++)
        r.before[i] = test_uniform(&state, -1, 1), r.dafter[i] = test_uniform(&state, -1, 1);
    rule_forward(&r);
    rule_backward(&r);
    check_slopes("q", &r, r.q, r.dq, N * r.K * r.D), check_slopes("k", &r, r.k, r.dk, N * r.K * r.D);
    check_slopes("v", &r, r.v, r.dv, N * r.V * r.E), check_slopes("g", &r, r.g, r.dg, N * r.V);
    check_slopes("beta", &r, r.beta, r.dbeta, N * r.V);
    check_slopes("before", &r, r.before, r.dbefore, r.V * r.D * r.E);
    rule_close(&r);
}

/* ---- calls that hand on their state ---- */

enum { CUT_ROWS = 230, CUT_K = 2, CUT_V = 4, CUT_D = 20, CUT_E = 24 };
enum { CUT_STATE = CUT_V * CUT_D * CUT_E, CUT_WINDOWS = (CUT_ROWS + DELTA_WINDOW - 1) / DELTA_WINDOW };

typedef struct {
    float q[CUT_ROWS][CUT_K * CUT_D], k[CUT_ROWS][CUT_K * CUT_D], v[CUT_ROWS][CUT_V * CUT_E],
        go[CUT_ROWS][CUT_V * CUT_E];
    float g[CUT_ROWS][CUT_V], beta[CUT_ROWS][CUT_V], before[CUT_STATE], dafter[CUT_STATE];
    int32_t doc[CUT_ROWS];
    bool documents;
} Sequence;

typedef struct {
    float o[CUT_ROWS][CUT_V * CUT_E], states[CUT_WINDOWS][CUT_STATE], after[CUT_STATE];
    float dq[CUT_ROWS][CUT_K * CUT_D], dk[CUT_ROWS][CUT_K * CUT_D], dv[CUT_ROWS][CUT_V * CUT_E];
    float dg[CUT_ROWS][CUT_V], dbeta[CUT_ROWS][CUT_V], dbefore[CUT_STATE];
} Whole;

#define KEYS_OF(x, T) tensor_of(x, F32, 1, (T), CUT_K, CUT_D)
#define VALUES_OF(x, T) tensor_of(x, F32, 1, (T), CUT_V, CUT_E)
#define GATES_OF(x, T) tensor_of(x, F32, 1, (T), CUT_V)
#define STATE_OF(x) tensor_of(x, F32, 1, CUT_V, CUT_D, CUT_E)

static void run_forward(Device *dev, Sequence *s, Whole *w, int64_t first, int64_t T, float *before)
{
    const int64_t windows = (T + DELTA_WINDOW - 1) / DELTA_WINDOW;
    OK(tested_op(&dev->stream, delta_fwd, .o = VALUES_OF(w->o + first, T),
                 .states = tensor_of(w->states + first / DELTA_WINDOW, F32, windows * CUT_V, CUT_D, CUT_E),
                 .after = STATE_OF(w->after), .q = KEYS_OF(s->q + first, T), .k = KEYS_OF(s->k + first, T),
                 .v = VALUES_OF(s->v + first, T), .g = GATES_OF(s->g + first, T), .beta = GATES_OF(s->beta + first, T),
                 .doc = s->documents ? tensor_of(s->doc + first, I32, 1, T) : (Tensor){ 0 }, .before = STATE_OF(before),
                 .first = first));
}

static void run_backward(Device *dev, Sequence *s, Whole *w, int64_t first, int64_t T, float *dafter)
{
    const int64_t windows = (T + DELTA_WINDOW - 1) / DELTA_WINDOW;
    OK(tested_op(&dev->stream, delta_bwd, .dq = KEYS_OF(w->dq + first, T), .dk = KEYS_OF(w->dk + first, T),
                 .dv = VALUES_OF(w->dv + first, T), .dg = GATES_OF(w->dg + first, T),
                 .dbeta = GATES_OF(w->dbeta + first, T), .dbefore = STATE_OF(w->dbefore),
                 .go = VALUES_OF(s->go + first, T), .dafter = STATE_OF(dafter), .q = KEYS_OF(s->q + first, T),
                 .k = KEYS_OF(s->k + first, T), .v = VALUES_OF(s->v + first, T), .g = GATES_OF(s->g + first, T),
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
    for (int i = 0; i < CUT_ROWS; i++) s.doc[i] = i < 40 ? 0 : i < 128 ? 40 : i < 131 ? 128 : 131;
    s.doc[0] = -1; /* it goes on */
    for (int i = 1; i < 40; i++) s.doc[i] = -1;
    s.documents = documents;
    return &s;
}

#define CUT_WINDOW DELTA_WINDOW
#include "scan_cuts.h"

TEST(cuts) { check_cuts(false); }
TEST(cuts_documents) { check_cuts(true); }

/* A document that begins with a window has the bits that it has alone. */
TEST(documents_apart)
{
    static Whole both, alone;
    Device dev;
    Sequence *s = sequence(true);
    OK(device_open(&dev, (DeviceChoice){ .threads = 1 }));
    for (int i = 0; i < CUT_ROWS; i++) s->doc[i] = i < 64 ? 0 : 64;
    run_forward(&dev, s, &both, 0, CUT_ROWS, s->before);
    run_backward(&dev, s, &both, 0, CUT_ROWS, s->dafter);
    memcpy(&alone, &both, sizeof alone);
    memset(alone.o[64], 0xFF, sizeof alone.o - sizeof *alone.o * 64);
    memset(alone.dk[64], 0xFF, sizeof alone.dk - sizeof *alone.dk * 64);
    s->documents = false;
    float zero[CUT_STATE] = { 0 };
    run_forward(&dev, s, &alone, 64, CUT_ROWS - 64, zero);
    run_backward(&dev, s, &alone, 64, CUT_ROWS - 64, s->dafter);
    CHECK(!memcmp(both.o, alone.o, sizeof both.o) && !memcmp(both.dk, alone.dk, sizeof both.dk));
    CHECK(!memcmp(both.after, alone.after, sizeof both.after));
    for (int i = 0; i < CUT_STATE; i++) CHECK(both.dbefore[i] == 0);
    device_close(&dev);
}

/* The state is 0 at first; beta = 0 and k = 0 write nothing. Nothing of it makes a NaN, but a NaN stays. */
TEST(edges)
{
    static Whole w;
    Device dev;
    Sequence *s = sequence(false);
    OK(device_open(&dev, (DeviceChoice){ .threads = 1 }));
    memset(s->beta, 0, sizeof s->beta);
    memset(s->before, 0, sizeof s->before);
    run_forward(&dev, s, &w, 0, CUT_ROWS, s->before);
    for (int i = 0; i < CUT_ROWS; i++) CHECK(w.o[i][0] == 0 && w.o[i][CUT_V * CUT_E - 1] == 0);
    s = sequence(false);
    memset(s->k, 0, sizeof s->k);
    for (int i = 0; i < CUT_ROWS; i++)
        for (int h = 0; h < CUT_V; h++) s->g[i][h] = (i + h) % 5 ? -1e4f : -3e38f, s->beta[i][h] = (float)(i % 2);
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

/* ---- tensors of bf16 ---- */

/* What is read in 16 bits has the bits of widened copies, rounded where it is stored. */
TEST(narrow)
{
    static Whole w, n;
    Device dev;
    Sequence *s = sequence(true);
    OK(device_open(&dev, (DeviceChoice){ .threads = 1 }));
    uint16_t *in[] = { narrowed(s->q[0], sizeof s->q), narrowed(s->k[0], sizeof s->k), narrowed(s->v[0], sizeof s->v),
                       narrowed(s->go[0], sizeof s->go) };
    uint16_t *out[] = { narrowed(n.o[0], sizeof n.o), narrowed(n.dq[0], sizeof n.dq), narrowed(n.dk[0], sizeof n.dk),
                        narrowed(n.dv[0], sizeof n.dv) };
    const Tensor q = tensor_of(in[0], BF16, 1, CUT_ROWS, CUT_K, CUT_D);
    const Tensor k = tensor_of(in[1], BF16, 1, CUT_ROWS, CUT_K, CUT_D);
    const Tensor v = tensor_of(in[2], BF16, 1, CUT_ROWS, CUT_V, CUT_E);
    const Tensor states = tensor_of(n.states, F32, CUT_WINDOWS * CUT_V, CUT_D, CUT_E);
    run_forward(&dev, s, &w, 0, CUT_ROWS, s->before);
    run_backward(&dev, s, &w, 0, CUT_ROWS, s->dafter);
    OK(op(&dev.stream, delta_fwd, .o = tensor_of(out[0], BF16, 1, CUT_ROWS, CUT_V, CUT_E), .states = states,
          .after = STATE_OF(n.after), .q = q, .k = k, .v = v, .g = GATES_OF(s->g, CUT_ROWS),
          .beta = GATES_OF(s->beta, CUT_ROWS), .doc = tensor_of(s->doc, I32, 1, CUT_ROWS),
          .before = STATE_OF(s->before)));
    OK(op(&dev.stream, delta_bwd, .dq = tensor_of(out[1], BF16, 1, CUT_ROWS, CUT_K, CUT_D),
          .dk = tensor_of(out[2], BF16, 1, CUT_ROWS, CUT_K, CUT_D),
          .dv = tensor_of(out[3], BF16, 1, CUT_ROWS, CUT_V, CUT_E), .dg = GATES_OF(n.dg, CUT_ROWS),
          .dbeta = GATES_OF(n.dbeta, CUT_ROWS), .dbefore = STATE_OF(n.dbefore),
          .go = tensor_of(in[3], BF16, 1, CUT_ROWS, CUT_V, CUT_E), .dafter = STATE_OF(s->dafter), .q = q, .k = k,
          .v = v, .g = GATES_OF(s->g, CUT_ROWS), .beta = GATES_OF(s->beta, CUT_ROWS), .states = states,
          .doc = tensor_of(s->doc, I32, 1, CUT_ROWS)));
    same_rounded("o", out[0], w.o[0], sizeof w.o), same_rounded("dq", out[1], w.dq[0], sizeof w.dq);
    same_rounded("dk", out[2], w.dk[0], sizeof w.dk), same_rounded("dv", out[3], w.dv[0], sizeof w.dv);
    CHECK(!memcmp(w.states, n.states, sizeof w.states) && !memcmp(w.dg, n.dg, sizeof w.dg));
    CHECK(!memcmp(w.dbeta, n.dbeta, sizeof w.dbeta) && !memcmp(w.dbefore, n.dbefore, sizeof w.dbefore));
    for (int i = 0; i < 4; i++) free(in[i]), free(out[i]);
    device_close(&dev);
}

/* What is refused before a run is what an op would refuse. */
TEST(room_of_a_head)
{
    static Whole w;
    Device dev;
    Sequence *s = sequence(true);
    OK(device_open(&dev, (DeviceChoice){ .threads = 1 }));
    run_forward(&dev, s, &w, 0, CUT_ROWS, s->before);
    const int64_t all = dev.workspace_bytes;
    dev.workspace_bytes = delta_room_cpu(CUT_D, CUT_E, CUT_V / CUT_K);
    run_forward(&dev, s, &w, 0, CUT_ROWS, s->before);
    run_backward(&dev, s, &w, 0, CUT_ROWS, s->dafter);
    dev.workspace_bytes--;
    FAILS(op(&dev.stream, delta_bwd, .dq = KEYS_OF(w.dq, CUT_ROWS), .dk = KEYS_OF(w.dk, CUT_ROWS),
             .dv = VALUES_OF(w.dv, CUT_ROWS), .dg = GATES_OF(w.dg, CUT_ROWS), .dbeta = GATES_OF(w.dbeta, CUT_ROWS),
             .go = VALUES_OF(s->go, CUT_ROWS), .q = KEYS_OF(s->q, CUT_ROWS), .k = KEYS_OF(s->k, CUT_ROWS),
             .v = VALUES_OF(s->v, CUT_ROWS), .g = GATES_OF(s->g, CUT_ROWS), .beta = GATES_OF(s->beta, CUT_ROWS),
             .states = tensor_of(w.states, F32, CUT_WINDOWS * CUT_V, CUT_D, CUT_E)),
          ERR_CONFIG, "the delta rule needs");
    dev.workspace_bytes = all;
    device_close(&dev);
}

TEST(refusals)
{
    static Whole w;
    Device dev;
    Sequence *s = sequence(false);
    OK(device_open(&dev, (DeviceChoice){ .threads = 1 }));
    const delta_fwd_args good = { .o = VALUES_OF(w.o, 64),
                                  .q = KEYS_OF(s->q, 64),
                                  .k = KEYS_OF(s->k, 64),
                                  .v = VALUES_OF(s->v, 64),
                                  .g = GATES_OF(s->g, 64),
                                  .beta = GATES_OF(s->beta, 64) };
    delta_fwd_args a = good;
    OK(op_delta_fwd(&dev.stream, &a));
    a.first = 63;
    FAILS(op_delta_fwd(&dev.stream, &a), ERR_SHAPE, "position 63");
    a = good;
    a.states = tensor_of(w.states, F32, 3, CUT_D, CUT_E);
    FAILS(op_delta_fwd(&dev.stream, &a), ERR_SHAPE, "3 states for 1 windows");
    a = good;
    a.q.dim[2] = a.k.dim[2] = 3;
    FAILS(op_delta_fwd(&dev.stream, &a), ERR_SHAPE, "4 value heads for 3 key heads");
    device_close(&dev);
}

TEST_MAIN
