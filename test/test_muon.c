/*
 * Muon: Newton-Schulz against published numbers and float64; steps of tiny models against a program in float64 that
 * knows the matrices by their names, also of Lion and SGD; what is planned. That layouts have the bits of one rank is
 * test_array's.
 *
 * test_muon [case]
 */
#include "base/json.h"
#include "test.h"
#include "tiny.h"

enum { BUCKET_BYTES = 64 << 10, STEPS = 3 };

/* ---- Newton-Schulz ---- */

static const double abc_of[MUON_SETS][10][3] = {
    [MUON_SIMPLE] = { { 3.4445, -4.7750, 2.0315 } },
    [MUON_QUINTIC] = { { 4.0848, -6.8946, 2.9270 }, { 3.9505, -6.3029, 2.6377 }, { 3.7418, -5.5913, 2.3037 },
                       { 2.8769, -3.1427, 1.2046 }, { 2.8366, -3.0525, 1.2012 } },
    [MUON_POLAR_EXPRESS] = { { 8.2051, -22.9019, 16.4607 }, { 4.0664, -2.8612, .5184 }, { 3.9096, -2.8234, .5250 },
                             { 3.2856, -2.4153, .4853 }, { 2.2779, -1.6198, .3985 }, { 1.8726, -1.2307, .3585 },
                             { 1.8564, -1.2132, .3568 }, { 1.8750, -1.2500, .3750 } },
    [MUON_DEEPSEEKV4] = { { 3.4445, -4.7750, 2.0315 } },
};

static const double *abc_at(MuonSet set, int step)
{
    static const double last[3] = { 2, -1.5, .5 };
    if (set == MUON_QUINTIC) return abc_of[set][step % 5];
    if (set == MUON_POLAR_EXPRESS) return abc_of[set][step < 7 ? step : 7];
    return set == MUON_DEEPSEEKV4 && step >= 8 ? last : abc_of[set][0];
}

/* y[r, c] = x[r, k] z[k, c] */
static void product(const double *x, const double *z, double *y, int64_t r, int64_t k, int64_t c)
{
    memset(y, 0, (size_t)(r * c) * sizeof *y);
    for (int64_t i = 0; i < r; i++)
        for (int64_t n = 0; n < k; n++)
            for (int64_t j = 0; j < c; j++) y[i * c + j] += x[i * k + n] * z[n * c + j];
}

/* To fp32, if only what is stored between products is to be rounded. */
static void store(double *x, int64_t n, bool rounded)
{
    for (int64_t i = 0; rounded && i < n; i++) x[i] = (double)(float)x[i];
}

/*
 * In float64 and without a transposed copy: of a tall matrix A = X^T X stands on the other side. rounded: sums in
 * float64, but every matrix that is stored between them is rounded to fp32, which no program in fp32 can do without.
 */
static void orthogonalize_by(double *x, int64_t r, int64_t c, MuonSet set, int steps, bool rounded)
{
    const int64_t s = r < c ? r : c;
    double *t = malloc((size_t)(r * c) * sizeof *t), *a = malloc((size_t)(s * s) * sizeof *a),
           *b = malloc((size_t)(s * s) * sizeof *b), *y = malloc((size_t)(r * c) * sizeof *y), norm = 0;
    for (int64_t i = 0; i < r * c; i++) norm += x[i] * x[i];
    norm = fmax(sqrt(norm), 1e-7);
    for (int64_t i = 0; i < r * c; i++) x[i] /= norm;
    store(x, r * c, rounded);
    for (int step = 0; step < steps; step++) {
        const double *k = abc_at(set, step);
        for (int64_t i = 0; i < r; i++)
            for (int64_t j = 0; j < c; j++) t[j * r + i] = x[i * c + j];
        if (r <= c) product(x, t, a, r, c, r);
        else product(t, x, a, c, r, c);
        store(a, s * s, rounded);
        product(a, a, b, s, s, s);
        store(b, s * s, rounded);
        for (int64_t i = 0; i < s * s; i++) b[i] = k[1] * a[i] + k[2] * b[i];
        store(b, s * s, rounded);
        if (r <= c) product(b, x, y, r, r, c);
        else product(x, b, y, r, c, c);
        store(y, r * c, rounded);
        for (int64_t i = 0; i < r * c; i++) x[i] = k[0] * x[i] + y[i];
        store(x, r * c, rounded);
    }
    free(t);
    free(a);
    free(b);
    free(y);
}

static void orthogonalize(double *x, int64_t r, int64_t c, MuonSet set, int steps)
{
    orthogonalize_by(x, r, c, set, steps, false);
}

typedef struct {
    Device dev;
    Arena scratch;
    void *memory;
} Bench;

static void bench_open(Bench *b, int threads)
{
    enum { BYTES = 16 << 20 };
    OK(device_open(&b->dev, (DeviceChoice){ .threads = threads, .isa = isa_best(), .staging_bytes = 1 << 20 }));
    CHECK(!posix_memalign(&b->memory, ARENA_ALIGN, BYTES));
    arena_init(&b->scratch, "scratch", b->memory, BYTES);
}

static void bench_close(Bench *b)
{
    free(b->memory);
    device_close(&b->dev);
}

/* x [r, c], r <= c. */
static void run_newton_schulz(Bench *b, const float *x, float *y, int64_t r, int64_t c, MuonSet set, int steps)
{
    int64_t sums[256];
    OK(op(&b->dev.stream, normalize, .y = tensor_of(y, F32, r, c), .sums = tensor_of(sums, I64, r),
          .x = tensor_of((void *)(uintptr_t)x, F32, r, c), .eps = 1e-7f));
    OK(muon_newton_schulz(&b->dev.stream, set, steps, tensor_of(y, F32, r, c), &b->scratch));
    CHECK(b->scratch.used_bytes == 0);
}

TEST(published_numbers)
{
    static const float g[] = { 1, 2, -1, .5f, -1, 3 };
    static const struct {
        MuonSet set;
        int steps;
        double want[6];
    } cases[] = {
        { MUON_SIMPLE, 5, { .6090084654, .8135934027, .0987327087, .3606741671, .0874987218, .7485626547 } },
        { MUON_QUINTIC, 5, { .5565394289, .8399806871, -.07861763, .316200016, -.0862036903, .941356498 } },
        { MUON_DEEPSEEKV4, 10, { .546487826, .8329187223, -.091388199, .309362931, -.0986120026, .9459783321 } },
    };
    Bench b;
    bench_open(&b, 1);
    for (int k = 0; k < 3; k++) {
        float y[6];
        double x[6], tall[6];
        run_newton_schulz(&b, g, y, 2, 3, cases[k].set, cases[k].steps);
        for (int i = 0; i < 6; i++) x[i] = tall[i % 3 * 2 + i / 3] = (double)g[i];
        orthogonalize(x, 2, 3, cases[k].set, cases[k].steps);
        orthogonalize(tall, 3, 2, cases[k].set, cases[k].steps);
        for (int i = 0; i < 6; i++) {
            CHECK_CLOSE(x[i], cases[k].want[i], 1e-9, "set %d, element %d in float64", k, i);
            CHECK_CLOSE(tall[i % 3 * 2 + i / 3], cases[k].want[i], 1e-9, "set %d, element %d of the tall one", k, i);
            CHECK_CLOSE((double)y[i], cases[k].want[i], 3e-6, "set %d, element %d", k, i);
        }
    }
    bench_close(&b);
}

/* |a - b| over |b|, Frobenius norms. */
static double relative(const double *a, const double *b, int64_t n)
{
    double away = 0, whole = 0;
    for (int64_t i = 0; i < n; i++) {
        away += (a[i] - b[i]) * (a[i] - b[i]);
        whole += b[i] * b[i];
    }
    return sqrt(away / whole);
}

typedef enum { ALIKE, RANDOM, KINDS } MatrixKind;

/* ALIKE: singular values near each other. RANDOM: numbers without more, whose smallest singular values are near 0. */
static void fill(uint64_t *state, MatrixKind kind, float *x, int64_t r, int64_t c)
{
    for (int64_t i = 0; i < r * c; i++)
        x[i] = (float)test_uniform(state, -1, 1) / sqrtf((float)c) + (kind == ALIKE && i / c == i % c ? 1 : 0);
}

/* y on one thread; two give the same bits. */
static void run_twice(const float *x, float *y, int64_t r, int64_t c, MuonSet set, int steps)
{
    float *again = malloc((size_t)(r * c) * sizeof *again);
    for (int threads = 1; threads < 3; threads++) {
        Bench b;
        bench_open(&b, threads);
        run_newton_schulz(&b, x, threads == 1 ? y : again, r, c, set, steps);
        bench_close(&b);
    }
    CHECK(!memcmp(y, again, (size_t)(r * c) * sizeof *y));
    free(again);
}

/* Returns how far y is from the float64 program, *rounded how far that is with stored matrices in fp32. */
static double away_from_float64(MatrixKind kind, int64_t r, int64_t c, MuonSet set, uint64_t *state, double *rounded)
{
    const size_t n = (size_t)(r * c);
    const int steps = set == MUON_DEEPSEEKV4 ? 10 : 5;
    float *x = calloc(2 * n, sizeof *x), *y = x + n;
    double *want = malloc(3 * n * sizeof *want), *got = want + n, *stored = want + 2 * n;
    fill(state, kind, x, r, c);
    for (size_t i = 0; i < n; i++) want[i] = stored[i] = (double)x[i];
    run_twice(x, y, r, c, set, steps);
    orthogonalize(want, r, c, set, steps);
    orthogonalize_by(stored, r, c, set, steps, true);
    for (size_t i = 0; i < n; i++) got[i] = (double)y[i];
    const double away = relative(got, want, r * c);
    *rounded = relative(stored, want, r * c);
    free(x);
    free(want);
    return away;
}

/* 1e-6 of the result, in Frobenius' norm. polar_express begins with 8.2 - 22.9 + 16.5, of which a singular value near 1
 * loses a digit, whoever multiplies. */
TEST(equals_float64)
{
    static const int64_t shapes[][2] = { { 7, 7 }, { 16, 33 }, { 48, 200 }, { 100, 100 }, { 128, 512 } };
    static const char *const names[] = { "simple", "quintic", "polar_express", "deepseekv4" };
    uint64_t state = 5;
    for (MuonSet set = 0; set < MUON_SETS; set++) {
        const double allowed = set == MUON_POLAR_EXPRESS ? 3e-6 : 1e-6;
        double worst = 0, least = 0;
        for (int k = 0; k < 2 * 5; k++) {
            double rounded;
            const int64_t r = shapes[k / 2][0], c = shapes[k / 2][1];
            const double away = away_from_float64((MatrixKind)(k % 2), r, c, set, &state, &rounded);
            CHECK_MSG(away < allowed, "%s, %lld x %lld: %.3g", names[set], (long long)r, (long long)c, away);
            worst = fmax(worst, away);
            least = fmax(least, rounded);
        }
        printf("    %s: %.2g away at most, %.2g by rounding what is stored\n", names[set], worst, least);
    }
}

/* A single row: its one singular value is 1, where polynomials that do not converge are steepest. */
TEST(single_rows)
{
    static const double allowed[MUON_SETS] = { 2e-6, 2e-6, 5e-5, 1e-6 };
    uint64_t state = 6;
    for (MuonSet set = 0; set < MUON_SETS; set++)
        for (int64_t c = 1; c < 41; c += 39) {
            double rounded;
            const double away = away_from_float64(RANDOM, 1, c, set, &state, &rounded);
            CHECK_MSG(away < allowed[set], "set %d, %lld columns: %.3g", (int)set, (long long)c, away);
        }
}

/* W, m 0, beta .95, Nesterov, simple x 5, lr .02, decay .1, scale .2 sqrt(3): a published step. */
TEST(one_step)
{
    static const double want[6] = { .0955806656, -.2052367404, .2987159597, .3967011761, .4983937911, -.6039861942 };
    float w[6] = { .1f, -.2f, .3f, .4f, .5f, -.6f }, m[6] = { 0 }, g[6] = { 1, 2, -1, .5f, -1, 3 }, u[6], y[6];
    int32_t shift = 0;
    StepValues step = { .lr = .02f, .grad_scale = 1 };
    FlatPart part = { .count = 6, .flags = FLAT_MUON };
    FlatBox box = { .rows = 2, .columns = 3, .ld = 3, .row_step = 3, .column_step = 1, .flags = FLAT_DECAYS,
                    .scale = (float)(.2 * sqrt(3)) };
    const Tensor parts = tensor_of(&part, I64, 1, sizeof part / 8), boxes = tensor_of(&box, I64, 1, sizeof box / 8);
    Bench b;
    bench_open(&b, 1);
    Stream *s = &b.dev.stream;
    for (int skip = 1; skip >= 0; skip--) {
        step.skip = skip;
        OK(op(s, muon_moment, .m = tensor_of(m, F32, 6), .g = tensor_of(g, F32, 6), .shift = tensor_of(&shift, I32, 1),
              .parts = parts, .chunks = 1, .step = &step, .beta = .95f));
        OK(op(s, muon_pack, .y = tensor_of(u, F32, 6), .m = tensor_of(m, F32, 6), .g = tensor_of(g, F32, 6),
              .shift = tensor_of(&shift, I32, 1), .boxes = boxes, .chunks = 1, .step = &step, .beta = .95f,
              .nesterov = 1));
        run_newton_schulz(&b, u, y, 2, 3, MUON_SIMPLE, 5);
        OK(op(s, muon_apply, .w = tensor_of(w, F32, 6), .x = tensor_of(y, F32, 6), .boxes = boxes, .chunks = 1,
              .step = &step, .decay = .1f));
        if (skip) CHECK(w[0] == .1f && w[5] == -.6f && m[0] == 0 && m[5] == 0);
    }
    for (int i = 0; i < 6; i++) CHECK_CLOSE((double)w[i], want[i], 1e-7, "element %d", i);
    for (int i = 0; i < 6; i++) CHECK_CLOSE((double)m[i], .05 * (double)g[i], 1e-7, "moment %d", i);
    bench_close(&b);
}

/* ---- against torch.optim.Muon (test/golden/muon.json, made by test/tools/golden_muon.py) ---- */

typedef struct {
    int64_t rows, columns, newton_schulz;
    float rate, decay, momentum, scale;
    bool nesterov;
} TorchCase;

static TorchCase torch_case(const Json *j)
{
    TorchCase c = { json_int(json_get(j, "rows"), 0), json_int(json_get(j, "columns"), 0),
                    json_int(json_get(j, "newton_schulz"), 0) };
    const char *scale = json_text(json_get(j, "scale"), NULL);
    const double rows = (double)c.rows, columns = (double)c.columns;
    c.rate = (float)json_number(json_get(j, "rate"), NAN);
    c.decay = (float)json_number(json_get(j, "decay"), NAN);
    c.momentum = (float)json_number(json_get(j, "momentum"), NAN);
    c.nesterov = json_is_true(json_get(j, "nesterov"));
    c.scale = (float)(!strcmp(scale, "shape") ? sqrt(fmax(1, rows / columns))
                      : !strcmp(scale, "unit_rms_norm") ? sqrt(rows / columns)
                                                        : .2 * sqrt(fmax(rows, columns)));
    return c;
}

static void draw(uint64_t *state, float *x, int64_t n, double size)
{
    for (int64_t i = 0; i < n; i++) x[i] = (float)test_uniform(state, -size, size);
}

/* w after `steps` steps, by the ops of an update, whose Newton-Schulz is of numbers of `compute`. */
static void torch_steps(const TorchCase *c, int number, int steps, DType compute, float *w)
{
    const int64_t n = c->rows * c->columns;
    const bool tall = c->rows > c->columns;
    uint64_t state = (uint64_t)number + 1;
    float *m = calloc((size_t)n, sizeof *m), *g = malloc((size_t)n * sizeof *g), *u = malloc((size_t)n * sizeof *u);
    int32_t shift = 0;
    const StepValues step = { .lr = c->rate, .grad_scale = 1 };
    FlatPart part = { .count = n, .flags = FLAT_MUON };
    FlatBox box = { .rows = (int32_t)c->rows, .columns = (int32_t)c->columns, .ld = (int32_t)c->columns,
                    .row_step = tall ? 1 : (int32_t)c->columns, .column_step = tall ? (int32_t)c->rows : 1,
                    .flags = FLAT_DECAYS, .scale = c->scale };
    const Tensor parts = tensor_of(&part, I64, 1, sizeof part / 8), boxes = tensor_of(&box, I64, 1, sizeof box / 8);
    const Tensor shifts = tensor_of(&shift, I32, 1), flat_m = tensor_of(m, F32, n), flat_g = tensor_of(g, F32, n);
    const int64_t r = tall ? c->columns : c->rows, columns = n / r;
    Bench b;
    bench_open(&b, 1);
    Stream *s = &b.dev.stream;
    draw(&state, w, n, .25);
    for (int i = 0; i < steps; i++) {
        Tensor x, sums;
        draw(&state, g, n, 1);
        OK(op(s, muon_moment, .m = flat_m, .g = flat_g, .shift = shifts, .parts = parts, .chunks = 1, .step = &step,
              .beta = c->momentum));
        OK(op(s, muon_pack, .y = tensor_of(u, F32, n), .m = flat_m, .g = flat_g, .shift = shifts, .boxes = boxes,
              .chunks = 1, .step = &step, .beta = c->momentum, .nesterov = c->nesterov));
        OK(tensor_new(&b.scratch, &x, compute, r, columns));
        OK(tensor_new(&b.scratch, &sums, I64, r));
        OK(op(s, normalize, .y = x, .sums = sums, .x = tensor_of(u, F32, r, columns), .eps = 1e-7f));
        OK(muon_newton_schulz(s, MUON_SIMPLE, (int)c->newton_schulz, x, &b.scratch));
        OK(op(s, muon_apply, .w = tensor_of(w, F32, n), .x = tensor_reshape(x, n), .boxes = boxes, .chunks = 1,
              .step = &step, .decay = c->decay));
    }
    free(m);
    free(g);
    free(u);
    bench_close(&b);
}

/* |a - b| over |b - first|, how far the steps went: Frobenius norms. NAN if a number is missing. */
static double torch_distance(const float *w, const Json *a, const Json *b, const float *first, int64_t n)
{
    double away = 0, far = 0;
    for (int64_t i = 0; i < n; i++) {
        const double want = json_number(json_at(b, i), NAN);
        const double have = a ? json_number(json_at(a, i), NAN) : (double)w[i];
        away += (have - want) * (have - want);
        far += (want - (double)first[i]) * (want - (double)first[i]);
    }
    return json_count(b) == n ? sqrt(away / far) : NAN;
}

/* In fp32 ours is the package's program in float64. In bf16 each rounds in its own places, and is as far from it. */
TEST(equals_torch)
{
    Json *j;
    OK(json_read_file("test/golden/muon.json", 1 << 20, &j));
    const Json *cases = json_get(j, "cases");
    const int steps = (int)json_int(json_get(j, "steps"), 0);
    CHECK(json_count(cases) == 5 && steps == 4);
    for (int k = 0; k < 5; k++) {
        const Json *of = json_at(cases, k), *narrow = json_get(of, "bf16"), *exact = json_get(of, "float64");
        const TorchCase c = torch_case(of);
        const int64_t n = c.rows * c.columns;
        float *first = malloc((size_t)n * sizeof *first), *w = malloc((size_t)n * sizeof *w);
        torch_steps(&c, k, 0, F32, first);
        torch_steps(&c, k, steps, F32, w);
        const double wide = torch_distance(w, NULL, exact, first, n);
        torch_steps(&c, k, steps, BF16, w);
        const double ours = torch_distance(w, NULL, exact, first, n),
                     between = torch_distance(w, NULL, narrow, first, n),
                     theirs = torch_distance(NULL, narrow, exact, first, n);
        printf("    %lld x %lld: fp32 %.2g from float64, bf16 %.2g, torch's %.2g, between them %.2g\n",
               (long long)c.rows, (long long)c.columns, wide, ours, theirs, between);
        CHECK_MSG(wide < 3e-6, "fp32: %.3g", wide);
        CHECK_MSG(theirs > 1e-3 && theirs < .03, "torch's own: %.3g", theirs);
        CHECK_MSG(ours < 1.5 * theirs && between < 2 * theirs, "bf16: %.3g and %.3g, torch's %.3g", ours, between,
                  theirs);
        free(first);
        free(w);
    }
    json_free(j);
}

/* ---- models ---- */

/* Kinds of TINY_MODELS, each with another split, scale, set and choice for routers. */
typedef enum {
    GPT2,
    LLAMA,
    VARIANTS,
    LATENT,
    LATENT_Q,
    MIXTRAL,
    DEEPSEEK,
    GPTOSS,
    FURTHER,
    DELTA,
    DELTA_WHOLE,
    MAMBA,
    LION,
    SGD,
    MODELS
} Model;

static TrainSpec spec_of(Model kind)
{
    TrainSpec s = { 0 };
    MuonSpec m = { .momentum = .95f, .nesterov = true, .steps = 5, .router = true };
    switch (kind) {
    case GPT2: s = tiny_gpt2(); break;
    case LLAMA: s = tiny_llama(), m.set = MUON_QUINTIC, m.scale = MUON_SPECTRAL; break;
    case VARIANTS: s = tiny_variants(), m.split = MUON_SPLIT_HEAD, m.set = MUON_POLAR_EXPRESS; break;
    case LATENT: s = tiny_latent(tiny_llama(), 0), m.scale = MUON_SHAPE, m.nesterov = false; break;
    case LATENT_Q: s = tiny_latent(tiny_llama(), 24), m.split = MUON_SPLIT_HEAD; break;
    case MIXTRAL: s = tiny_mixture(TINY_MIXTRAL, 2), m.split = MUON_SPLIT_NONE; break;
    case DEEPSEEK: s = tiny_mixture(TINY_DEEPSEEK, 2), m.set = MUON_DEEPSEEKV4, m.steps = 10, m.router = false; break;
    case GPTOSS: s = tiny_gptoss(2), m.scale = MUON_UNIT_RMS_NORM; break;
    case FURTHER: s = tiny_further(tiny_llama(), 1), m.momentum = .9f; break;
    case DELTA: s = tiny_delta(tiny_llama()), m.split = MUON_SPLIT_HEAD; break;
    case DELTA_WHOLE: s = tiny_delta(tiny_llama()), m.split = MUON_SPLIT_NONE; break;
    case MAMBA: s = tiny_mamba(tiny_llama()), m.split = MUON_SPLIT_HEAD; break;
    case LION: s = tiny_llama(), s.update.adamw.beta2 = .99f; break;
    case SGD: s = tiny_mixture(TINY_MIXTRAL, 2); break;
    case MODELS: break;
    }
    s.update.optimizer = kind == LION ? OPTIMIZER_LION : kind == SGD ? OPTIMIZER_SGD : OPTIMIZER_MUON;
    s.update.muon = m;
    s.update.bucket_bytes = BUCKET_BYTES;
    return s;
}

static const char *const model_names[MODELS] = {
    "gpt2", "llama", "variants", "latent", "latent with q", "mixtral", "deepseek", "gpt-oss", "further tokens",
    "delta", "delta whole", "mamba", "lion", "sgd"
};

/* ---- against float64 ---- */

/* A parameter in plain order. */
typedef struct {
    int64_t rows, columns;
    double *w, *m, *v, *g;
} Plain;

typedef struct {
    Plain *plain;
    int32_t *shift; /* before the step */
    int step;
    double worst;
} Oracle;

static double accumulated(const ParamStore *s, Tensor shift, int id, int64_t at, const int32_t *before)
{
    const Tensor g = param_zero_shard_grad(s, id);
    (void)shift;
    if (g.dtype == F32) return (double)((const float *)g.data)[at];
    return ldexp((double)((const int64_t *)g.data)[at], -before[s->reg->items[id].global]);
}

enum { MATRICES = 65 };

/* Four sections, or each head of these, or all in one. */
static void section_rows(const int64_t heads[4], const int64_t width[4], MuonSplit split, int64_t *out)
{
    if (split == MUON_SPLIT_NONE) return;
    for (int i = 0; i < 4; i++)
        if (split == MUON_SPLIT_QKV) *out++ = heads[i] * width[i];
        else
            for (int64_t h = 0; h < heads[i]; h++) *out++ = width[i];
}

/* Rows of the matrices of a weight, by its name: 0 ends the list, which is repeated. */
static void matrix_rows(const ModelSpec *m, const MuonSpec *u, const char *name, int64_t rows, int64_t out[MATRICES])
{
    const int64_t q = (int64_t)m->heads * m->head_dim, kv = (int64_t)m->kv_heads * m->head_dim;
    const bool gated = activation_gated(m->activation), head = u->split == MUON_SPLIT_HEAD;
    memset(out, 0, MATRICES * sizeof *out);
    out[0] = rows;
    const DeltaSpec *d = &m->delta;
    const MambaSpec *s = &m->mamba;
    if (strstr(name, "delta.qkvz.")) {
        section_rows((int64_t[]){ d->key_heads, d->key_heads, d->value_heads, d->value_heads },
                     (int64_t[]){ d->key, d->key, d->value, d->value }, u->split, out);
        return;
    }
    if (strstr(name, "mamba.in.")) {
        section_rows((int64_t[]){ s->heads, s->heads, s->groups, s->groups },
                     (int64_t[]){ s->head, s->head, s->state, s->state }, u->split, out);
        return;
    }
    if (strstr(name, "attn.qkv.") && head) out[0] = m->head_dim;
    else if (strstr(name, "attn.qkv.") && u->split == MUON_SPLIT_QKV)
        out[0] = q, out[1] = out[2] = kv, out[3] = m->attention_gate ? q : 0;
    else if ((strstr(name, "attn.q_b.") || strstr(name, "attn.q.")) && head) out[0] = m->head_dim;
    else if (strstr(name, "attn.kv_b.") && head) out[0] = m->latent.width.nope + m->latent.width.value;
    else if (strstr(name, "attn.gate.") && head) out[0] = m->latent.width.value;
    else if (strstr(name, "experts.fc1.")) out[0] = m->moe.ffn, out[1] = gated ? m->moe.ffn : 0;
    else if (strstr(name, "experts.fc2.")) out[0] = m->hidden;
    else if (strstr(name, ".fc1.") && gated) out[0] = out[1] = rows / 2;
}

static bool by_muon(const MuonSpec *u, const char *name, const Plain *p)
{
    if (p->columns == 1 || p->rows == 1 || !strstr(name, ".weight")) return false;
    if (strstr(name, "embedding.token") || strstr(name, "embedding.position") || strstr(name, "head.weight") ||
        strstr(name, "conv.weight"))
        return false;
    return u->router || !strstr(name, "router.weight");
}

static double scale_for(MuonScale s, double r, double c)
{
    return s == MUON_MATCH_RMS_ADAMW ? .2 * sqrt(fmax(r, c)) : s == MUON_SPECTRAL ? sqrt(fmax(r, c))
           : s == MUON_SHAPE ? sqrt(fmax(1, r / c)) : sqrt(r / c);
}

static void muon_in_float64(const TrainSpec *s, const char *name, Plain *p, double lr)
{
    const MuonSpec *u = &s->update.muon;
    const double beta = (double)u->momentum;
    int64_t rows[MATRICES];
    matrix_rows(&s->model, u, name, p->rows, rows);
    for (int64_t row = 0, k = 0; row < p->rows; row += rows[k], k = rows[k + 1] ? k + 1 : 0) {
        const int64_t n = rows[k] * p->columns, first = row * p->columns;
        double *x = malloc((size_t)n * sizeof *x);
        for (int64_t i = 0; i < n; i++) {
            double *m = &p->m[first + i], g = p->g[first + i];
            *m = beta * *m + (1 - beta) * g;
            x[i] = u->nesterov ? beta * *m + (1 - beta) * g : *m;
        }
        orthogonalize(x, rows[k], p->columns, u->set, u->steps);
        for (int64_t i = 0; i < n; i++) {
            double *w = &p->w[first + i];
            *w *= 1 - lr * (double)s->update.adamw.weight_decay;
            *w -= lr * scale_for(u->scale, (double)rows[k], (double)p->columns) * x[i];
        }
        free(x);
    }
}

static void adamw_in_float64(const TrainSpec *s, Plain *p, double lr, double decay, int step)
{
    const AdamWSpec *a = &s->update.adamw;
    const double b1 = (double)a->beta1, b2 = (double)a->beta2;
    for (int64_t i = 0; i < p->rows * p->columns; i++) {
        p->m[i] = b1 * p->m[i] + (1 - b1) * p->g[i];
        p->v[i] = b2 * p->v[i] + (1 - b2) * p->g[i] * p->g[i];
        const double u = p->m[i] / (1 - pow(b1, step)) / (sqrt(p->v[i] / (1 - pow(b2, step))) + (double)a->eps);
        p->w[i] -= lr * (u + decay * p->w[i]);
    }
}

/* Lion's direction is a sign: of a sum that is nearly 0 the rounded program may have the other one, or none, and its
 * weight is then taken as right. `have`: the weights as they became. */
static void lion_in_float64(const TrainSpec *s, Plain *p, double lr, double decay, const double *have)
{
    const double b1 = (double)s->update.adamw.beta1, b2 = (double)s->update.adamw.beta2;
    for (int64_t i = 0; i < p->rows * p->columns; i++) {
        const double mixed = b1 * p->m[i] + (1 - b1) * p->g[i], least = 1e-6 * (fabs(p->m[i]) + fabs(p->g[i]));
        p->m[i] = b2 * p->m[i] + (1 - b2) * p->g[i];
        p->w[i] -= lr * ((mixed > 0) - (mixed < 0) + decay * p->w[i]);
        if (least > 0 && fabs(mixed) <= least && fabs(p->w[i] - have[i]) <= 2.1 * lr) p->w[i] = have[i];
    }
}

static void sgd_in_float64(const TrainSpec *s, Plain *p, double lr, double decay)
{
    for (int64_t i = 0; i < p->rows * p->columns; i++) {
        p->m[i] = (double)s->update.adamw.beta1 * p->m[i] + p->g[i];
        p->w[i] -= lr * (p->m[i] + decay * p->w[i]);
    }
}

/* Place of a local element of a parameter in plain order; -1: nowhere. */
static int64_t plain_at(const Param *p, int64_t e)
{
    const int64_t row = param_plain_row(p, e / p->local[1]);
    return row < 0 ? -1 : row * p->spec.shape[1] + e % p->local[1];
}

static void oracle_open(Oracle *o, const Trainer *t)
{
    const ParamStore *s = &t->stores[0];
    o->plain = calloc((size_t)s->reg->count, sizeof *o->plain);
    o->shift = calloc((size_t)s->reg->count, sizeof *o->shift);
    for (int i = 0; i < s->reg->count; i++) {
        const Param *p = &s->reg->items[i];
        const int64_t n = p->spec.shape[0] * p->spec.shape[1];
        Plain *q = &o->plain[i];
        *q = (Plain){ p->spec.shape[0], p->spec.shape[1] };
        q->w = calloc((size_t)(4 * n), sizeof *q->w);
        q->m = q->w + n, q->v = q->w + 2 * n, q->g = q->w + 3 * n;
        for (int64_t e = 0; e < p->count; e++)
            if (plain_at(p, e) >= 0) q->w[plain_at(p, e)] = (double)((const float *)param_store_value(s, i, 0).data)[e];
    }
}

static void update_in_float64(const Oracle *o, const Trainer *t, int id, Plain *q)
{
    const TrainSpec *s = &t->spec;
    const Param *p = &t->stores[0].reg->items[id];
    const OptimizerKind kind = s->update.optimizer;
    const double lr = (double)((const StepValues *)t->step_values)->lr;
    const double decay = p->spec.flags & PARAM_DECAY ? (double)s->update.adamw.weight_decay : 0;
    const bool muon = kind == OPTIMIZER_MUON && by_muon(&s->update.muon, p->name, q);
    CHECK_MSG(muon == (p->optimizer == OPTIMIZER_MUON) && muon == p->as_matrix, "%s", p->name);
    if (muon) muon_in_float64(s, p->name, q, lr);
    else if (kind == OPTIMIZER_SGD) sgd_in_float64(s, q, lr, decay);
    else if (kind == OPTIMIZER_LION) {
        double *have = calloc((size_t)(q->rows * q->columns), sizeof *have);
        for (int64_t e = 0; e < p->count; e++)
            if (plain_at(p, e) >= 0)
                have[plain_at(p, e)] = (double)((const float *)param_store_value(&t->stores[0], id, 0).data)[e];
        lion_in_float64(s, q, lr, decay, have);
        free(have);
    } else adamw_in_float64(s, q, lr, decay, o->step);
}

static void oracle_step(Oracle *o, const Trainer *t)
{
    const ParamStore *s = &t->stores[0];
    const StepValues *v = t->step_values;
    o->step++;
    for (int i = 0; i < s->reg->count; i++) {
        const Param *p = &s->reg->items[i];
        Plain *q = &o->plain[i];
        if (p->spec.group == PARAM_STATE) continue;
        for (int64_t e = 0; e < p->count; e++)
            if (plain_at(p, e) >= 0)
                q->g[plain_at(p, e)] = accumulated(s, t->stats.shift, i, e, o->shift) * (double)v->grad_scale;
        update_in_float64(o, t, i, q);
        double worst = 0;
        for (int64_t e = 0; e < p->count; e++)
            if (plain_at(p, e) >= 0) {
                const double w = (double)((const float *)param_store_value(s, i, 0).data)[e];
                const double away = fabs(w - q->w[plain_at(p, e)]);
                worst = away <= worst ? worst : away;
                q->w[plain_at(p, e)] = w; /* (what a step amplifies must not be amplified again) */
            }
        CHECK_MSG(worst < 3e-7, "%s, step %d: %.3g away", p->name,
                  o->step, worst);
        if (!(worst <= o->worst)) o->worst = worst;
    }
}

static void oracle_close(Oracle *o, const Trainer *t)
{
    for (int i = 0; i < t->stores[0].reg->count; i++) free(o->plain[i].w);
    free(o->plain);
    free(o->shift);
}

/* Moments go on in float64 from step to step; of a model of each kind for longer. */
static int compared_steps(Model k)
{
    const bool longer = k == GPT2 || k == LLAMA || k == LATENT || k == MIXTRAL;
    return brief() ? 2 : longer ? 20 : 4;
}

TEST(steps_equal_float64)
{
    for (Model k = 0; k < MODELS; k++) {
        TrainSpec s = spec_of(k);
        MemoryPlan plan;
        World w;
        Trainer t;
        Oracle o = { 0 };
        const bool muon = s.update.optimizer == OPTIMIZER_MUON;
        Grid g = { .tp = 1, .dp = 1, .pp = 1, .owners = muon, .ep = s.model.moe.experts > 0 };
        OK(trainer_plan(&s, g, 0, &plan));
        OK(world_open_self(&w));
        w.grid.owners = muon;
        OK(trainer_open(&t, &s, &w, &plan));
        oracle_open(&o, &t);
        for (int i = 0; i < compared_steps(k); i++) {
            StepReport report;
            memcpy(o.shift, t.stats.shift.data, (size_t)t.stats.count * sizeof *o.shift);
            OK(trainer_step(&t, tiny_source(&t), &report));
            CHECK(!report.skipped && !report.redone);
            oracle_step(&o, &t);
        }
        printf("    %s: %d steps, %.2g away at most\n", model_names[k], o.step, o.worst);
        oracle_close(&o, &t);
        trainer_close(&t);
        world_close(&w);
    }
}

/* ---- plans ---- */

/* GPT-2's matrices, of 12 blocks. */
static TrainSpec gpt2_small(void)
{
    TrainSpec s = spec_of(GPT2);
    s.exact = false;
    s.global_batch = 512, s.micro_batch = 4;
    s.model.layers = 12, s.model.hidden = 768, s.model.heads = s.model.kv_heads = 12, s.model.head_dim = 64;
    s.model.ffn = 3072, s.model.seq = 1024, s.model.vocab = 50257, s.model.padded_vocab = 50432;
    s.model.tp_blocks = 4;
    return s;
}

/* With half a million tokens the orthogonal matrices are a small part of a step. Ranks own alike, send a matrix's
 * numbers once there and once back, and take as much memory each. */
TEST(plans)
{
    static const struct {
        int tp, dp, zero;
    } cases[] = { { 1, 1, 0 }, { 1, 8, 1 }, { 2, 4, 1 }, { 2, 2, 0 }, { 4, 2, 3 } };
    const TrainSpec base = gpt2_small();
    const double matrices = 12.0 * 12 * 768 * 768;
    for (int k = 0; k < 5; k++) {
        const Grid g = { .tp = cases[k].tp, .dp = cases[k].dp, .sp = cases[k].tp > 1, .owners = true };
        const int ranks = g.tp * g.dp;
        double sent = 0, flop = 0, all = 0;
        MemoryPlan first = { 0 };
        for (int rank = 0; rank < ranks; rank++) {
            TrainSpec s = base;
            MemoryPlan p;
            s.update.zero = (ZeroCut)cases[k].zero;
            OK(trainer_plan(&s, g, rank, &p));
            if (!rank) first = p;
            /* (tables of what lies in a ZeRO shard have a row for each tensor) */
            CHECK_MSG(llabs(p.state - first.state) < 8192 && p.scratch == first.scratch && p.save == first.save,
                      "state %lld and %lld, scratch %lld and %lld", (long long)p.state, (long long)first.state,
                      (long long)p.scratch, (long long)first.scratch);
            CHECK_MSG(p.muon.imbalance < 1.05, "%.3f", p.muon.imbalance);
            CHECK(p.muon.flop <= 1.05 * p.muon.mean && (double)p.work.flop > p.muon.flop);
            sent += (double)p.work.comm[GROUP_OWNERS][COMM_EXCHANGE].bytes / 4;
            flop += p.muon.flop;
            all += (double)p.work.flop;
        }
        CHECK_MSG(flop > 0 && flop < 0.03 * all, "%.3g of %.3g", flop, all);
        CHECK_CLOSE(flop, first.muon.mean * ranks, 1e-9, "FLOP of all ranks");
        const int copies = cases[k].zero ? 1 : g.dp, parts = ranks / copies;
        /* there what the owner lacks; back what each of the others lacks */
        const double want = matrices * (parts - 1) / parts + matrices * (copies - 1.0 / parts);
        CHECK_MSG(fabs(sent - want) < 0.02 * want + 1, "%d ranks: %.4g sent, want %.4g", ranks, sent, want);
    }
}

TEST_MAIN
