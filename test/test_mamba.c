/*
 * Mamba-2's recurrence and gates against float64, token by token, and against finite differences; bits of calls that
 * hand on their state; documents, gates that forget all or nothing, refusals; and the whole mixer against the numbers
 * of another program, which are checked against those of Hugging Face's class.
 */
#include "device/scan_room.h"
#include "golden_layer.h"
#include "scan_case.h"

/* ---- float64, token by token ---- */

typedef struct {
    int64_t B, T, G, H, N, P, first;
    const int32_t *doc; /* [B][T] or NULL */
    double *x, *k, *q, *delta, *g, *skip, *before, *go, *dafter;
    double *o, *after, *dx, *dk, *dq, *ddelta, *dg, *dskip, *dbefore;
} Rule;

enum { RULE_ARRAYS = 18 };

/* Room of each of the arrays, in the order in which they stand. */
static void rule_open(Rule *r)
{
    const int64_t rows = r->B * r->T, values = rows * r->H * r->P, keys = rows * r->G * r->N, gates = rows * r->H;
    const int64_t state = r->B * r->H * r->N * r->P;
    const int64_t room[RULE_ARRAYS] = { values, keys,   keys,  gates, gates, r->H, state, values, state,
                                        values, state,  values, keys, keys,  gates, gates, gates, state };
    double **const all = &r->x;
    for (int i = 0; i < RULE_ARRAYS; i++) all[i] = zeros(room[i]);
}

static void rule_close(Rule *r)
{
    for (int i = 0; i < RULE_ARRAYS; i++) free((&r->x)[i]);
}

static bool begins(const Rule *r, int64_t n, int64_t t) { return r->doc && r->doc[n] == r->first + t; }

/* S[t] behind token t of head h of sample b, S[-1] before the first. Of a document's first token the state before it is
 * 0. */
static void head_forward(const Rule *r, int64_t b, int64_t h, double *S)
{
    const int64_t size = r->N * r->P;
    for (int64_t t = 0; t < r->T; t++) {
        const int64_t n = b * r->T + t, value = n * r->H + h, key = n * r->G + h / (r->H / r->G);
        for (int64_t p = 0; p < r->P; p++) {
            const double x = r->x[value * r->P + p];
            double o = r->skip[h] * x;
            for (int64_t d = 0; d < r->N; d++) {
                const double before = begins(r, n, t) ? 0 : S[(t - 1) * size + d * r->P + p];
                const double s = exp(r->g[value]) * before + r->k[key * r->N + d] * r->delta[value] * x;
                S[t * size + d * r->P + p] = s;
                o += s * r->q[key * r->N + d];
            }
            r->o[value * r->P + p] = o;
        }
    }
}

/* dS: behind the last token; becomes that before the first. */
static void head_backward(const Rule *r, int64_t b, int64_t h, const double *S, double *dS)
{
    const int64_t size = r->N * r->P;
    for (int64_t t = r->T - 1; t >= 0; t--) {
        const int64_t n = b * r->T + t, value = n * r->H + h, key = n * r->G + h / (r->H / r->G);
        const double left = exp(r->g[value]), step = r->delta[value];
        for (int64_t p = 0; p < r->P; p++) {
            const double x = r->x[value * r->P + p], go = r->go[value * r->P + p];
            double dwrite = 0;
            for (int64_t d = 0; d < r->N; d++) {
                double *ds = &dS[d * r->P + p];
                const double before = begins(r, n, t) ? 0 : S[(t - 1) * size + d * r->P + p];
                *ds += r->q[key * r->N + d] * go;
                r->dq[key * r->N + d] += S[t * size + d * r->P + p] * go;
                r->dk[key * r->N + d] += *ds * step * x;
                dwrite += *ds * r->k[key * r->N + d];
                r->dg[value] += *ds * before * left;
                *ds = begins(r, n, t) ? 0 : left * *ds;
            }
            r->dx[value * r->P + p] = step * dwrite + r->skip[h] * go;
            r->ddelta[value] += dwrite * x;
            r->dskip[value] += go * x;
        }
    }
}

static void rule_run(const Rule *r, bool backward)
{
    const int64_t size = r->N * r->P, bytes = size * (int64_t)sizeof(double);
    double *states = zeros((r->T + 1) * size), *S = states + size;
    for (int64_t i = 0; i < r->B * r->H; i++) {
        memcpy(states, r->before + i * size, (size_t)bytes);
        head_forward(r, i / r->H, i % r->H, S);
        memcpy(r->after + i * size, S + (r->T - 1) * size, (size_t)bytes);
        if (!backward) continue;
        memcpy(r->dbefore + i * size, r->dafter + i * size, (size_t)bytes);
        head_backward(r, i / r->H, i % r->H, S, r->dbefore + i * size);
    }
    free(states);
}

/* ---- against it, in all builds ---- */

enum { TWO_SAMPLES = 1, DOCS = 2, STATES = 4, VIEWS = 8, FORGETS = 16, KEEPS = 32, LONE = 64 };

typedef struct {
    Tensor x, k, q, delta, g, skip, doc, before, go, dafter;
    Tensor o, after, states, dx, dk, dq, ddelta, dg, dskip, dbefore, dstates;
} Tensors;

static void check_rule(const Tensors *t, int64_t first, double tolerance)
{
    Rule r = { .B = t->x.dim[0],
               .T = t->x.dim[1],
               .G = t->k.dim[2],
               .H = t->x.dim[2],
               .N = t->k.dim[3],
               .P = t->x.dim[3],
               .first = first };
    int32_t *doc = calloc((size_t)(r.B * r.T), sizeof *doc);
    for (int64_t b = 0; t->doc.data && b < r.B; b++)
        memcpy(doc + b * r.T, env_row(&t->doc, b), (size_t)r.T * sizeof *doc);
    if (t->doc.data) r.doc = doc;
    rule_open(&r);
    to_doubles(r.x, t->x, r.P), to_doubles(r.k, t->k, r.N), to_doubles(r.q, t->q, r.N);
    to_doubles(r.delta, t->delta, r.H), to_doubles(r.g, t->g, r.H), to_doubles(r.skip, t->skip, 1);
    to_doubles(r.before, t->before, r.P), to_doubles(r.go, t->go, r.P), to_doubles(r.dafter, t->dafter, r.P);
    rule_run(&r, true);
    same_numbers("o", t->o, r.o, r.P, tolerance), same_numbers("after", t->after, r.after, r.P, tolerance);
    same_numbers("dx", t->dx, r.dx, r.P, tolerance), same_numbers("dk", t->dk, r.dk, r.N, tolerance);
    same_numbers("dq", t->dq, r.dq, r.N, tolerance), same_numbers("ddelta", t->ddelta, r.ddelta, r.H, tolerance);
    same_numbers("dg", t->dg, r.dg, r.H, tolerance), same_numbers("dskip", t->dskip, r.dskip, r.H, tolerance);
    same_numbers("dbefore", t->dbefore, r.dbefore, r.P, tolerance);
    rule_close(&r);
    free(doc);
}

static Tensor decays(Env *e, int flags, int64_t B, int64_t T, int64_t H)
{
    const double low = flags & FORGETS ? -90 : flags & KEEPS ? -1e-3 : -.5;
    Tensor g = env_in(e, F32, low, 0, B, T, H);
    for (int64_t n = 0; n < B * T * H && flags & FORGETS; n++)
        if (n % 3) env_f(g, n / H)[n % H] = n % 3 == 1 ? 0 : -1e-4f;
    env_settle(e);
    return g;
}

/* N: groups; D, a: widths; b: rows. */
static void case_mamba(Env *e, const Shape *p)
{
    const int64_t B = p->flags & TWO_SAMPLES ? 2 : 1, T = p->b, G = p->N, H = p->flags & LONE ? G : 3 * G;
    const int64_t N = p->D, P = p->a, R = B * ((T + MAMBA_WINDOW - 1) / MAMBA_WINDOW) * H, first = 256;
    const bool views = p->flags & VIEWS;
    const double unit = sqrt(3.0 / (double)N);
    Tensors t = { .x = HEADS(e, views, false, 1, B, T, H, P),
                  .k = HEADS(e, views, false, unit, B, T, G, N),
                  .q = HEADS(e, views, false, unit, B, T, G, N),
                  .delta = env_in(e, F32, 0, 1, B, T, H),
                  .g = decays(e, p->flags, B, T, H),
                  .skip = env_in(e, F32, -1, 1, H),
                  .go = HEADS(e, views, false, 1, B, T, H, P),
                  .o = HEADS(e, views, true, 1, B, T, H, P),
                  .states = env_out(e, F32, 8, 9, R, N, P),
                  .dx = HEADS(e, views, true, 1, B, T, H, P),
                  .dk = HEADS(e, views, true, 1, B, T, G, N),
                  .dq = HEADS(e, views, true, 1, B, T, G, N),
                  .ddelta = env_out(e, F32, 8, 9, B, T, H),
                  .dg = env_out(e, F32, 8, 9, B, T, H),
                  .dskip = env_out(e, F32, 8, 9, B, T, H),
                  .dstates = env_out(e, F32, 8, 9, R, N, P) };
    if (p->flags & DOCS) t.doc = documents(e, B, T, first);
    if (p->flags & STATES) {
        t.before = env_in(e, F32, -1, 1, B, H, N, P), t.dafter = env_in(e, F32, -1, 1, B, H, N, P);
        t.after = env_out(e, F32, 8, 9, B, H, N, P), t.dbefore = env_out(e, F32, 8, 9, B, H, N, P);
    }
    RUN(e, mamba_fwd, .o = t.o, .states = t.states, .after = t.after, .x = t.x, .k = t.k, .q = t.q, .delta = t.delta,
        .g = t.g, .skip = t.skip, .doc = t.doc, .before = t.before, .first = first);
    RUN(e, mamba_bwd, .dx = t.dx, .dk = t.dk, .dq = t.dq, .ddelta = t.ddelta, .dg = t.dg, .dskip = t.dskip,
        .dbefore = t.dbefore, .dstates = t.dstates, .go = t.go, .dafter = t.dafter, .x = t.x, .k = t.k, .q = t.q,
        .delta = t.delta, .g = t.g, .skip = t.skip, .states = t.states, .doc = t.doc, .first = first);
    if (!e->check) return;
    env_check_between(e, tensor_reshape(t.dk, B * T * G, N));
    check_rule(&t, first, 1e-5);
}

TEST(mamba)
{
    static const Shape shapes[] = { { 1, 1, 1, 1, 0 },
                                    { 1, 4, 3, 7, LONE },
                                    { 2, 16, 16, 128, STATES },
                                    { 3, 17, 5, 129, STATES | TWO_SAMPLES },
                                    { 1, 33, 20, 290, STATES | DOCS },
                                    { 2, 8, 32, 300, DOCS | TWO_SAMPLES | VIEWS },
                                    { 2, 20, 16, 270, STATES | DOCS | TWO_SAMPLES | VIEWS },
                                    { 1, 64, 64, 256, KEEPS | STATES | LONE },
                                    { 1, 16, 16, 390, FORGETS | STATES },
                                    { 1, 40, 130, 33, LONE } };
    scan_cases(case_mamba, shapes, sizeof shapes / sizeof *shapes);
}

/* ---- finite differences ---- */

static double rule_loss(const Rule *r)
{
    double loss = 0;
    rule_run(r, false);
    for (int64_t i = 0; i < r->B * r->T * r->H * r->P; i++) loss += r->o[i] * r->go[i];
    for (int64_t i = 0; i < r->B * r->H * r->N * r->P; i++) loss += r->after[i] * r->dafter[i];
    return loss;
}

static void check_slopes(const char *name, Rule *r, double *x, const double *want, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        const double at = x[i], step = 1e-5;
        x[i] = at + step;
        const double high = rule_loss(r);
        x[i] = at - step;
        const double slope = (high - rule_loss(r)) / (2 * step);
        x[i] = at;
        CHECK_CLOSE(want[i], slope, 1e-7, "%s %d", name, (int)i);
    }
}

static void uniform64(double *x, int64_t n, double low, double high, uint64_t seed)
{
    for (int64_t i = 0; i < n; i++) x[i] = test_uniform(&seed, low, high);
}

/* The recurrence's own backward, which all kernels are held to. */
TEST(finite_differences)
{
    int32_t doc[20];
    for (int i = 0; i < 20; i++) doc[i] = i < 3 ? 125 : i < 11 ? 131 : 139;
    Rule r = { .B = 1, .T = 20, .G = 2, .H = 4, .N = 3, .P = 2, .first = 128, .doc = doc };
    rule_open(&r);
    const int64_t rows = r.T, keys = rows * r.G * r.N, values = rows * r.H * r.P, state = r.H * r.N * r.P;
    uniform64(r.x, values, -1, 1, 1), uniform64(r.k, keys, -1, 1, 2), uniform64(r.q, keys, -1, 1, 3);
    uniform64(r.delta, rows * r.H, 0, 1, 4), uniform64(r.g, rows * r.H, -2, 0, 5), uniform64(r.skip, r.H, -1, 1, 6);
    uniform64(r.go, values, -1, 1, 7), uniform64(r.before, state, -1, 1, 8), uniform64(r.dafter, state, -1, 1, 9);
    rule_run(&r, true);
    check_slopes("x", &r, r.x, r.dx, values), check_slopes("k", &r, r.k, r.dk, keys);
    check_slopes("q", &r, r.q, r.dq, keys), check_slopes("delta", &r, r.delta, r.ddelta, rows * r.H);
    check_slopes("g", &r, r.g, r.dg, rows * r.H), check_slopes("before", &r, r.before, r.dbefore, state);
    double dskip[4] = { 0 };
    for (int64_t i = 0; i < rows * r.H; i++) dskip[i % r.H] += r.dskip[i];
    check_slopes("skip", &r, r.skip, dskip, r.H);
    rule_close(&r);
}

/* ---- calls that hand on their state ---- */

enum { CUT_ROWS = 460, CUT_G = 2, CUT_H = 4, CUT_N = 20, CUT_P = 24 };
enum { CUT_STATE = CUT_H * CUT_N * CUT_P, CUT_WINDOWS = (CUT_ROWS + MAMBA_WINDOW - 1) / MAMBA_WINDOW };

typedef struct {
    float x[CUT_ROWS][CUT_H * CUT_P], k[CUT_ROWS][CUT_G * CUT_N], q[CUT_ROWS][CUT_G * CUT_N];
    float go[CUT_ROWS][CUT_H * CUT_P], delta[CUT_ROWS][CUT_H], g[CUT_ROWS][CUT_H], skip[CUT_H];
    float before[CUT_STATE], dafter[CUT_STATE];
    int32_t doc[CUT_ROWS];
    bool documents;
} Sequence;

typedef struct {
    float o[CUT_ROWS][CUT_H * CUT_P], states[CUT_WINDOWS][CUT_STATE], after[CUT_STATE];
    float dx[CUT_ROWS][CUT_H * CUT_P], dk[CUT_ROWS][CUT_G * CUT_N], dq[CUT_ROWS][CUT_G * CUT_N];
    float ddelta[CUT_ROWS][CUT_H], dg[CUT_ROWS][CUT_H], dskip[CUT_ROWS][CUT_H], dbefore[CUT_STATE];
    float dstates[CUT_WINDOWS][CUT_STATE];
} Whole;

#define KEYS_OF(x, T) tensor_of(x, F32, 1, (T), CUT_G, CUT_N)
#define VALUES_OF(x, T) tensor_of(x, F32, 1, (T), CUT_H, CUT_P)
#define GATES_OF(x, T) tensor_of(x, F32, 1, (T), CUT_H)
#define STATE_OF(x) tensor_of(x, F32, 1, CUT_H, CUT_N, CUT_P)

static Tensor window_states(float (*states)[CUT_STATE], int64_t first, int64_t T)
{
    const int64_t windows = (T + MAMBA_WINDOW - 1) / MAMBA_WINDOW;
    return tensor_of(states + first / MAMBA_WINDOW, F32, windows * CUT_H, CUT_N, CUT_P);
}

static Tensor doc_of(Sequence *s, int64_t first, int64_t T)
{
    return s->documents ? tensor_of(s->doc + first, I32, 1, T) : (Tensor){ 0 };
}

static mamba_fwd_args forward_args(Sequence *s, Whole *w, int64_t first, int64_t T, float *before)
{
    return (mamba_fwd_args){ .o = VALUES_OF(w->o + first, T),
                             .states = window_states(w->states, first, T),
                             .after = STATE_OF(w->after),
                             .x = VALUES_OF(s->x + first, T),
                             .k = KEYS_OF(s->k + first, T),
                             .q = KEYS_OF(s->q + first, T),
                             .delta = GATES_OF(s->delta + first, T),
                             .g = GATES_OF(s->g + first, T),
                             .skip = tensor_of(s->skip, F32, CUT_H),
                             .doc = doc_of(s, first, T),
                             .before = STATE_OF(before),
                             .first = first };
}

static mamba_bwd_args backward_args(Sequence *s, Whole *w, int64_t first, int64_t T, float *dafter)
{
    return (mamba_bwd_args){ .dx = VALUES_OF(w->dx + first, T),
                             .dk = KEYS_OF(w->dk + first, T),
                             .dq = KEYS_OF(w->dq + first, T),
                             .ddelta = GATES_OF(w->ddelta + first, T),
                             .dg = GATES_OF(w->dg + first, T),
                             .dskip = GATES_OF(w->dskip + first, T),
                             .dbefore = STATE_OF(w->dbefore),
                             .dstates = window_states(w->dstates, first, T),
                             .go = VALUES_OF(s->go + first, T),
                             .dafter = STATE_OF(dafter),
                             .x = VALUES_OF(s->x + first, T),
                             .k = KEYS_OF(s->k + first, T),
                             .q = KEYS_OF(s->q + first, T),
                             .delta = GATES_OF(s->delta + first, T),
                             .g = GATES_OF(s->g + first, T),
                             .skip = tensor_of(s->skip, F32, CUT_H),
                             .states = window_states(w->states, first, T),
                             .doc = doc_of(s, first, T),
                             .first = first };
}

static void run_forward(Device *dev, Sequence *s, Whole *w, int64_t first, int64_t T, float *before)
{
    const mamba_fwd_args a = forward_args(s, w, first, T, before);
    OK(op_mamba_fwd(&dev->stream, &a));
}

static void run_backward(Device *dev, Sequence *s, Whole *w, int64_t first, int64_t T, float *dafter)
{
    const mamba_bwd_args a = backward_args(s, w, first, T, dafter);
    OK(op_mamba_bwd(&dev->stream, &a));
}

static Sequence *sequence(bool documents)
{
    static Sequence s;
    fill(s.x[0], sizeof s.x, -1, 1, 1), fill(s.k[0], sizeof s.k, -.4, .4, 2), fill(s.q[0], sizeof s.q, -.4, .4, 3);
    fill(s.go[0], sizeof s.go, -1, 1, 4), fill(s.delta[0], sizeof s.delta, 0, 1, 5);
    fill(s.g[0], sizeof s.g, -.3, 0, 6), fill(s.skip, sizeof s.skip, -1, 1, 7);
    fill(s.before, sizeof s.before, -1, 1, 8), fill(s.dafter, sizeof s.dafter, -1, 1, 9);
    /* The first document goes on from before. */
    for (int i = 0; i < CUT_ROWS; i++) s.doc[i] = i < 40 ? -1 : i < 128 ? 40 : i < 131 ? 128 : i < 300 ? 131 : 300;
    s.documents = documents;
    return &s;
}

#define CUT_WINDOW MAMBA_WINDOW
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
    for (int i = 0; i < CUT_ROWS; i++) s->doc[i] = i < 128 ? 0 : 128;
    run_forward(&dev, s, &both, 0, CUT_ROWS, s->before);
    run_backward(&dev, s, &both, 0, CUT_ROWS, s->dafter);
    memcpy(&alone, &both, sizeof alone);
    memset(alone.o[128], 0xFF, sizeof alone.o - sizeof *alone.o * 128);
    memset(alone.dk[128], 0xFF, sizeof alone.dk - sizeof *alone.dk * 128);
    s->documents = false;
    float zero[CUT_STATE] = { 0 };
    run_forward(&dev, s, &alone, 128, CUT_ROWS - 128, zero);
    run_backward(&dev, s, &alone, 128, CUT_ROWS - 128, s->dafter);
    CHECK(!memcmp(both.o, alone.o, sizeof both.o) && !memcmp(both.dk, alone.dk, sizeof both.dk));
    CHECK(!memcmp(both.after, alone.after, sizeof both.after));
    for (int i = 0; i < CUT_STATE; i++) CHECK(both.dbefore[i] == 0);
    device_close(&dev);
}

/* Without steps a state only fades; a row whose gate forgets all leaves nothing but its own write. Nothing of it makes
 * a NaN, but a NaN stays. */
TEST(edges)
{
    static Whole w;
    Device dev;
    Sequence *s = sequence(false);
    OK(device_open(&dev, (DeviceChoice){ .threads = 1 }));
    memset(s->delta, 0, sizeof s->delta), memset(s->before, 0, sizeof s->before);
    run_forward(&dev, s, &w, 0, CUT_ROWS, s->before);
    for (int i = 0; i < CUT_ROWS; i++) CHECK(w.o[i][0] == s->skip[0] * s->x[i][0]);
    s = sequence(false);
    for (int i = 0; i < CUT_ROWS; i++)
        for (int h = 0; h < CUT_H; h++) s->g[i][h] = (i + h) % 5 ? -1e4f : -3e38f, s->delta[i][h] = (float)(i % 2);
    run_forward(&dev, s, &w, 0, CUT_ROWS, s->before);
    run_backward(&dev, s, &w, 0, CUT_ROWS, s->dafter);
    const float *all = (const float *)(const void *)&w;
    for (size_t i = 0; i < sizeof w / sizeof *all; i++) CHECK(isfinite(all[i]));
    for (int i = 0; i < CUT_STATE; i++) {
        const int h = i / CUT_P / CUT_N, key = h / (CUT_H / CUT_G) * CUT_N + i / CUT_P % CUT_N, last = CUT_ROWS - 1;
        CHECK(w.after[i] == s->k[last][key] * s->x[last][h * CUT_P + i % CUT_P]);
    }
    s = sequence(false);
    s->x[200][0] = NAN;
    run_forward(&dev, s, &w, 0, CUT_ROWS, s->before);
    CHECK(isnan(w.o[200][0]) && isnan(w.after[0]) && !isnan(w.o[127][0]));
    device_close(&dev);
}

/* ---- tensors of bf16 ---- */

static Tensor as_bf16(Tensor t, uint16_t *data)
{
    t.data = data, t.dtype = BF16;
    return t;
}

/* Numbers read in 16 bits give the bits of widened copies, rounded where they are stored. */
TEST(narrow)
{
    static Whole w, n;
    Device dev;
    Sequence *s = sequence(true);
    OK(device_open(&dev, (DeviceChoice){ .threads = 1 }));
    uint16_t *in[] = { narrowed(s->x[0], sizeof s->x), narrowed(s->k[0], sizeof s->k), narrowed(s->q[0], sizeof s->q),
                       narrowed(s->go[0], sizeof s->go), narrowed(s->skip, sizeof s->skip) };
    uint16_t *out[] = { narrowed(n.o[0], sizeof n.o), narrowed(n.dx[0], sizeof n.dx), narrowed(n.dk[0], sizeof n.dk),
                        narrowed(n.dq[0], sizeof n.dq) };
    run_forward(&dev, s, &w, 0, CUT_ROWS, s->before);
    run_backward(&dev, s, &w, 0, CUT_ROWS, s->dafter);
    mamba_fwd_args f = forward_args(s, &n, 0, CUT_ROWS, s->before);
    f.x = as_bf16(f.x, in[0]), f.k = as_bf16(f.k, in[1]), f.q = as_bf16(f.q, in[2]), f.skip = as_bf16(f.skip, in[4]);
    f.o = as_bf16(f.o, out[0]);
    mamba_bwd_args b = backward_args(s, &n, 0, CUT_ROWS, s->dafter);
    b.x = f.x, b.k = f.k, b.q = f.q, b.skip = f.skip, b.go = as_bf16(b.go, in[3]);
    b.dx = as_bf16(b.dx, out[1]), b.dk = as_bf16(b.dk, out[2]), b.dq = as_bf16(b.dq, out[3]);
    OK(op_mamba_fwd(&dev.stream, &f));
    OK(op_mamba_bwd(&dev.stream, &b));
    same_rounded("o", out[0], w.o[0], sizeof w.o), same_rounded("dx", out[1], w.dx[0], sizeof w.dx);
    same_rounded("dk", out[2], w.dk[0], sizeof w.dk), same_rounded("dq", out[3], w.dq[0], sizeof w.dq);
    CHECK(!memcmp(w.states, n.states, sizeof w.states) && !memcmp(w.dg, n.dg, sizeof w.dg));
    CHECK(!memcmp(w.ddelta, n.ddelta, sizeof w.ddelta) && !memcmp(w.dbefore, n.dbefore, sizeof w.dbefore));
    CHECK(!memcmp(w.dskip, n.dskip, sizeof w.dskip));
    for (int i = 0; i < 5; i++) free(in[i]);
    for (int i = 0; i < 4; i++) free(out[i]);
    device_close(&dev);
}

/* ---- refusals ---- */

/* Room that is refused before a run is what an op would refuse. */
TEST(room_of_a_head)
{
    static Whole w;
    Device dev;
    Sequence *s = sequence(true);
    OK(device_open(&dev, (DeviceChoice){ .threads = 1 }));
    const int64_t all = dev.workspace_bytes;
    dev.workspace_bytes = mamba_room_cpu(CUT_N, CUT_P);
    run_forward(&dev, s, &w, 0, CUT_ROWS, s->before);
    run_backward(&dev, s, &w, 0, CUT_ROWS, s->dafter);
    dev.workspace_bytes--;
    const mamba_bwd_args b = backward_args(s, &w, 0, CUT_ROWS, s->dafter);
    FAILS(op_mamba_bwd(&dev.stream, &b), ERR_CONFIG, "the scan of Mamba-2 needs");
    dev.workspace_bytes = all;
    device_close(&dev);
}

TEST(refusals)
{
    static Whole w;
    Device dev;
    Sequence *s = sequence(false);
    OK(device_open(&dev, (DeviceChoice){ .threads = 1 }));
    const mamba_fwd_args good = forward_args(s, &w, 0, 128, s->before);
    mamba_fwd_args a = good;
    OK(op_mamba_fwd(&dev.stream, &a));
    a.first = 64;
    FAILS(op_mamba_fwd(&dev.stream, &a), ERR_SHAPE, "position 64");
    a = good;
    a.states = tensor_of(w.states, F32, 3, CUT_N, CUT_P);
    FAILS(op_mamba_fwd(&dev.stream, &a), ERR_SHAPE, "3 states for 1 windows");
    a = good;
    a.q.dim[2] = a.k.dim[2] = 3;
    FAILS(op_mamba_fwd(&dev.stream, &a), ERR_SHAPE, "4 value heads for 3 key heads");
    device_close(&dev);
}

/* ---- gates ---- */

#define CLOSE(got, want, scale, ...) CHECK_CLOSE((double)(got), (want), 3e-6 * (1 + fabs((double)(scale))), __VA_ARGS__)

enum { GATES_PLAIN = 1, GATES_FRESH = 2, GATES_FLOOR = 4 };

/* N: rows; D: heads; a: rows of a leaf. */
static void case_gates(Env *e, const Shape *p)
{
    const int64_t N = p->N, H = p->D;
    const DType acc = p->flags & GATES_PLAIN ? F32 : I64;
    const double high = acc == F32 ? 2 : 1e9, low = p->flags & GATES_FLOOR ? 0.25 : 0;
    const bool fresh = p->flags & GATES_FRESH;
    Tensor dt = env_in(e, F32, -50, 50, N, H), a_log = env_in(e, F32, -4, 3, H), bias = env_in(e, F32, -1, 1, H);
    for (int64_t i = 0; i < N * H; i++)
        if (i % 3) env_f(dt, i / H)[i % H] *= 0.05f;
    env_settle(e);
    Tensor delta = env_out(e, F32, 8, 9, N, H), g = env_out(e, F32, 8, 9, N, H), ddt = env_out(e, F32, 8, 9, N, H);
    Tensor ddelta = env_in(e, F32, -1, 1, N, H), dg = env_in(e, F32, -1, 1, N, H);
    Tensor da_log = env_out(e, acc, -high, high, H), dbias = env_out(e, acc, -high, high, H);
    Tensor shift = env_int(e, 20), overflow = env_flag(e);
    RUN(e, mamba_gates_fwd, .delta = delta, .g = g, .dt = env_used(e, dt), .a_log = a_log, .dt_bias = bias,
        .low = (float)low);
    RUN(e, mamba_gates_bwd, .ddt = ddt, .da_log = da_log, .ddt_bias = dbias, .ddelta = env_used(e, ddelta), .dg = dg,
        .dt = dt, .a_log = a_log, .dt_bias = bias, .shift_a = shift, .shift_dt = shift, .overflow = overflow,
        .low = (float)low, .leaf = p->a, .headroom_bits = 10, .fresh = fresh);
    for (int64_t h = 0; e->check && h < H; h++) {
        const double rate = -exp((double)env_f(a_log, h)[0]);
        double want_a = fresh ? -env_held(e, da_log, 20, h, 0) : 0, want_b = fresh ? -env_held(e, dbias, 20, h, 0) : 0;
        double size = 10 + fabs(want_a) + fabs(want_b);
        for (int64_t n = 0; n < env_n(e, N); n++) {
            const double x = (double)env_f(dt, n)[h] + (double)env_f(bias, h)[0], soft = x > 20 ? x : log1p(exp(x));
            const double step = fmax(soft, low), slope = soft < low ? 0 : 1 / (1 + exp(-x));
            const double d = (double)env_f(dg, n)[h], want = slope * ((double)env_f(ddelta, n)[h] + rate * d);
            CLOSE(env_f(delta, n)[h], step, step, "delta %d", (int)n);
            CLOSE(env_f(g, n)[h], rate * step, rate * step, "g %d", (int)n);
            CLOSE(env_f(ddt, n)[h], want, want, "ddt %d", (int)n);
            want_a += d * rate * step, want_b += want, size += fabs(d * rate * step) + fabs(want);
        }
        CLOSE(env_added(e, da_log, 20, h, 0), want_a, size, "da_log %d", (int)h);
        CLOSE(env_added(e, dbias, 20, h, 0), want_b, size, "ddt_bias %d", (int)h);
    }
    if (e->check) CHECK(*(int32_t *)overflow.data == 0);
}

TEST(mamba_gates)
{
    CASES(case_gates, { 1, 1, 1 }, { 40, 5, 16, 0, GATES_FLOOR }, { 33, 16, 4, 0, GATES_PLAIN },
          { 100, 33, 7, 0, GATES_FRESH | GATES_FLOOR }, { 700, 40, 16, 0, GATES_PLAIN | GATES_FRESH });
}

/* ---- a mixer ---- */

#define GOLDEN "../shared/fixtures/kinds/mamba2.json"
enum { M_T = 7, M_X = 6, M_H = 4, M_P = 3, M_G = 2, M_N = 4, M_TAPS = 4 };
enum { M_D = M_H * M_P, M_KEYS = M_G * M_N, M_C = M_D + 2 * M_KEYS, M_IN = M_D + M_C + M_H };

typedef struct {
    float x[M_T * M_X], in_w[M_IN * M_X], conv_w[M_C * M_TAPS], conv_b[M_C], a_log[M_H], skip[M_H], dt_b[M_H];
    float norm_w[M_D], out_w[M_X * M_D], dy[M_T * M_X];
    float p[M_T * M_IN], c[M_T * M_C], delta[M_T * M_H], g[M_T * M_H], o[M_T * M_D], n[M_T * M_D], y[M_T * M_X];
    float states[M_H * M_N * M_P], after[M_H * M_N * M_P], dstates[M_H * M_N * M_P];
    float dn[M_T * M_D], go[M_T * M_D], dp[M_T * M_IN], dc[M_T * M_C], ddelta[M_T * M_H], dg[M_T * M_H];
    float dskip_rows[M_T * M_H], dx[M_T * M_X];
    float dconv_w[M_C * M_TAPS], dconv_b[M_C], da_log[M_H], dskip[M_H], ddt_b[M_H], dnorm[M_D];
    int32_t shift, overflow;
} Mixer;

/* Columns of rows of `wide`, from `column` on: as rows of single heads, [1, T, heads, width]. */
static Tensor columns(float *data, int64_t wide, int64_t column, int64_t count, int64_t width)
{
    Tensor t = tensor_of(data + column, F32, 1, M_T, count, width);
    t.ld = wide, t.group = count;
    return t;
}

static Tensor as_rows(Tensor t) { return tensor_reshape(t, t.dim[1] * t.dim[2], t.dim[3]); }

/* Columns of the projection, [T, width]. */
static Tensor section(float *data, int64_t column, int64_t width)
{
    Tensor t = tensor_of(data + column, F32, M_T, width);
    t.ld = M_IN;
    return t;
}

static Tensor sample(Tensor t) { return tensor_reshape(t, 1, t.dim[0], t.dim[1]); }

static void golden_read(Mixer *l, const Json *j)
{
    const Json *in = json_get(j, "input");
    golden_numbers(in, "x", l->x, M_T * M_X), golden_numbers(in, "in_proj", l->in_w, M_IN * M_X);
    golden_numbers(in, "conv1d", l->conv_w, M_C * M_TAPS), golden_numbers(in, "conv1d_bias", l->conv_b, M_C);
    golden_numbers(in, "A_log", l->a_log, M_H), golden_numbers(in, "D", l->skip, M_H);
    golden_numbers(in, "dt_bias", l->dt_b, M_H), golden_numbers(in, "norm", l->norm_w, M_D);
    golden_numbers(in, "out_proj", l->out_w, M_X * M_D), golden_numbers(j, "dy", l->dy, M_T * M_X);
}

#define ROWS(x, count) tensor_of(l->x, F32, M_T, count)
#define SEQ(x, count) tensor_of(l->x, F32, 1, M_T, count)
#define VECTOR(x) tensor_of(l->x, F32, (int64_t)(sizeof l->x / sizeof *l->x))
#define STATES(x) tensor_of(l->x, F32, M_H, M_N, M_P)
#define HEADS_X columns(l->c, M_C, 0, M_H, M_P)
#define HEADS_K columns(l->c, M_C, M_D, M_G, M_N)
#define HEADS_Q columns(l->c, M_C, M_D + M_KEYS, M_G, M_N)
#define GROUPS(x) tensor_of(l->x, F32, M_T * M_G, M_D / M_G)

static void golden_forward(Mixer *l, Stream *s)
{
    times(l->p, l->x, l->in_w, M_T, M_IN, M_X);
    OK(op(s, conv_silu_fwd, .y = SEQ(c, M_C), .x = sample(section(l->p, M_D, M_C)),
          .w = tensor_of(l->conv_w, F32, M_C, M_TAPS), .bias = VECTOR(conv_b)));
    OK(op(s, mamba_gates_fwd, .delta = ROWS(delta, M_H), .g = ROWS(g, M_H), .dt = section(l->p, M_D + M_C, M_H),
          .a_log = VECTOR(a_log), .dt_bias = VECTOR(dt_b), .low = 1e-3f));
    OK(op(s, mamba_fwd, .o = tensor_of(l->o, F32, 1, M_T, M_H, M_P), .states = STATES(states),
          .after = tensor_reshape(STATES(after), 1, M_H, M_N, M_P), .x = HEADS_X, .k = HEADS_K, .q = HEADS_Q,
          .delta = SEQ(delta, M_H), .g = SEQ(g, M_H), .skip = VECTOR(skip)));
    OK(op(s, gated_norm_fwd, .y = GROUPS(n), .x = GROUPS(o), .z = as_rows(columns(l->p, M_IN, 0, M_G, M_D / M_G)),
          .w = tensor_of(l->norm_w, F32, M_G, M_D / M_G), .eps = 1e-5f, .gate_first = 1));
    times(l->y, l->n, l->out_w, M_T, M_X, M_D);
}

static void golden_backward(Mixer *l, Stream *s)
{
    const Tensor shift = tensor_of(&l->shift, I32, 1), overflow = tensor_of(&l->overflow, I32, 1);
    times_back(l->dn, l->dy, l->out_w, M_T, M_X, M_D);
    OK(op(s, gated_norm_bwd, .dx = GROUPS(go), .dz = as_rows(columns(l->dp, M_IN, 0, M_G, M_D / M_G)),
          .dw = tensor_of(l->dnorm, F32, M_G, M_D / M_G), .dy = GROUPS(dn), .x = GROUPS(o),
          .z = as_rows(columns(l->p, M_IN, 0, M_G, M_D / M_G)), .w = tensor_of(l->norm_w, F32, M_G, M_D / M_G),
          .shift = shift, .overflow = overflow, .eps = 1e-5f, .gate_first = 1, .leaf = 16));
    OK(op(s, mamba_bwd, .dx = columns(l->dc, M_C, 0, M_H, M_P), .dk = columns(l->dc, M_C, M_D, M_G, M_N),
          .dq = columns(l->dc, M_C, M_D + M_KEYS, M_G, M_N), .ddelta = SEQ(ddelta, M_H), .dg = SEQ(dg, M_H),
          .dskip = SEQ(dskip_rows, M_H), .dstates = STATES(dstates), .go = tensor_of(l->go, F32, 1, M_T, M_H, M_P),
          .x = HEADS_X, .k = HEADS_K, .q = HEADS_Q, .delta = SEQ(delta, M_H), .g = SEQ(g, M_H), .skip = VECTOR(skip),
          .states = STATES(states)));
    OK(op(s, bias_grad, .dbias = VECTOR(dskip), .dy = ROWS(dskip_rows, M_H), .shift = shift, .overflow = overflow,
          .leaf = 16));
    OK(op(s, mamba_gates_bwd, .ddt = section(l->dp, M_D + M_C, M_H), .da_log = VECTOR(da_log),
          .ddt_bias = VECTOR(ddt_b), .ddelta = ROWS(ddelta, M_H), .dg = ROWS(dg, M_H),
          .dt = section(l->p, M_D + M_C, M_H), .a_log = VECTOR(a_log), .dt_bias = VECTOR(dt_b), .shift_a = shift,
          .shift_dt = shift, .overflow = overflow, .low = 1e-3f, .leaf = 16));
    OK(op(s, conv_silu_bwd, .dx = sample(section(l->dp, M_D, M_C)), .dw = tensor_of(l->dconv_w, F32, M_C, M_TAPS),
          .dbias = VECTOR(dconv_b), .dy = SEQ(dc, M_C), .x = sample(section(l->p, M_D, M_C)),
          .w = tensor_of(l->conv_w, F32, M_C, M_TAPS), .bias = VECTOR(conv_b), .shift_w = shift, .shift_b = shift,
          .overflow = overflow, .leaf = 16));
    times_back(l->dx, l->dp, l->in_w, M_T, M_IN, M_X);
}

TEST(golden_mixer)
{
    static Mixer mixer;
    Mixer *l = &mixer;
    Json *j;
    Device dev;
    FILE *f = fopen(GOLDEN, "r");
    if (!f) SKIP("no " GOLDEN);
    fclose(f);
    OK(json_read_file(GOLDEN, 1 << 20, &j));
    OK(device_open(&dev, (DeviceChoice){ .threads = 1 }));
    golden_read(l, j);
    golden_forward(l, &dev.stream);
    golden_backward(l, &dev.stream);
    float states[M_H * M_N * M_P];
    for (int i = 0; i < M_H * M_N * M_P; i++)
        states[(i / M_N / M_P * M_P + i % M_P) * M_N + i / M_P % M_N] = l->after[i];
    golden_check(j, "dt", l->delta, M_T * M_H), golden_check(j, "o_before_gate", l->o, M_T * M_D);
    golden_check(j, "final_state", states, M_H * M_N * M_P), golden_check(j, "y", l->y, M_T * M_X);
    const Json *grad = json_get(j, "grad");
    golden_check(grad, "x", l->dx, M_T * M_X), golden_check(grad, "conv1d", l->dconv_w, M_C * M_TAPS);
    golden_check(grad, "conv1d_bias", l->dconv_b, M_C), golden_check(grad, "A_log", l->da_log, M_H);
    golden_check(grad, "D", l->dskip, M_H), golden_check(grad, "dt_bias", l->ddt_b, M_H);
    golden_check(grad, "norm", l->dnorm, M_D);
    json_free(j);
    device_close(&dev);
}

TEST_MAIN
