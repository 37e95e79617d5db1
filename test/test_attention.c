/*
 * Attention against float64 loops, against its own definition bit for bit, and against itself under every cut:
 * instruction sets, threads, heads, samples, zigzag context parallelism, partial key sets merged.
 *
 * A Problem holds the whole batch; a Cut says which part of it one call computes; play() gathers that part
 * into tensors whose every unused element is a NaN guard, calls the ops, checks the guards, and scatters the
 * results into arrays of the whole problem, where they can be compared.
 */
#define CPU_ISA_c /* the scalar build of vec.h, for the definition */
#define CPU_ISA c
#include "base/mathx.h"
#include "cpu/vec.h"
#include "device/ops.h"
#include "test.h"

enum { O, DQ, DK, DV, LSE, RESULTS };
static const char *const result_name[] = { "o", "dq", "dk", "dv", "lse" };

typedef struct {
    int64_t B, T, H, K, C, block, window, leaf;
    float drop;
    bool docs;
    float *q, *k, *v, *go; /* [B][T][H or K][C] */
    int32_t *doc;          /* [B][T] or NULL */
    int64_t sample[8];
    float scale;
    Dropout dropout;
} Problem;

typedef struct {
    float *x[RESULTS];
} Result;

typedef struct {
    Spans q, k;
    int64_t b0, B, k0, K; /* samples and key heads of the call */
    Isa isa;
    int threads;
    int64_t pad, workspace_bytes;
    bool forward_only;
} Cut;

/* ---- memory of one case, released by the next ---- */

static SetupArena memory;

static float *floats(int64_t n)
{
    float *p;
    ASSERT(setup_array(&memory, n + 1, &p) == ERR_OK);
    return p;
}

static void fresh(void)
{
    setup_release(&memory);
    setup_init(&memory);
}

static float *noise(int64_t n, uint64_t seed)
{
    float *p = floats(n);
    for (int64_t i = 0; i < n; i++) p[i] = (float)test_uniform(&seed, -1.5, 1.5);
    return p;
}

static void problem_fill(Problem *p)
{
    int64_t rows = p->B * p->T;
    p->q = noise(rows * p->H * p->C, 1), p->go = noise(rows * p->H * p->C, 2);
    p->k = noise(rows * p->K * p->C, 3), p->v = noise(rows * p->K * p->C, 4);
    p->scale = 1.0f / sqrtf((float)p->C);
    p->dropout = (Dropout){ 0x123456789ABCDEFu, dropout_threshold(p->drop), 1 / (1 - p->drop) };
    for (int64_t b = 0; b < p->B; b++) p->sample[b] = b * 7 + (b << 33);
    if (!p->docs) return;
    p->doc = (int32_t *)floats(rows);
    uint64_t seed = 5;
    for (int64_t i = 0, start = 0; i < rows; i++) {
        if (i % p->T == 0 || test_rand(&seed) % 9 == 0) start = i % p->T;
        p->doc[i] = (int32_t)start;
    }
}

static int64_t result_count(const Problem *p, int r)
{
    int64_t rows = p->B * p->T;
    return r == LSE ? rows * p->H : r == DK || r == DV ? rows * p->K * p->C : rows * p->H * p->C;
}

static Result result_new(const Problem *p)
{
    Result r;
    for (int i = 0; i < RESULTS; i++) r.x[i] = floats(result_count(p, i));
    return r;
}

static Cut cut_whole(const Problem *p)
{
    return (Cut){ .q = spans_whole(p->T), .k = spans_whole(p->T), .B = p->B, .K = p->K, .isa = isa_best(),
                  .threads = 1 };
}

/* ---- tensors of a cut ---- */

static float guard(void)
{
    union {
        uint32_t bits;
        float value;
    } u = { 0x7FC0BEEF };
    return u.value;
}

/* [B, rows, heads, C] (C = 0: [B, rows, heads]) with `pad` guards behind each row and some behind all. */
static Tensor guarded(int64_t B, int64_t rows, int64_t heads, int64_t C, int64_t pad)
{
    int64_t inner = C ? C : heads, outer = B * rows * (C ? heads : 1), count = outer * (inner + pad) + 32;
    Tensor t = { .data = floats(count), .dim = { B, rows, heads, C }, .ld = inner + pad, .ndim = C ? 4 : 3,
                 .dtype = F32 };
    for (int64_t i = 0; i < count; i++) ((float *)t.data)[i] = guard();
    return t;
}

static bool guards_whole(Tensor t)
{
    int64_t inner = t.dim[t.ndim - 1], outer = tensor_rows(t);
    const float *p = t.data;
    const float g = guard();
    for (int64_t i = 0; i < outer * t.ld + 32; i++)
        if ((i >= outer * t.ld || i % t.ld >= inner) && memcmp(p + i, &g, sizeof g)) return false;
    return true;
}

/* Between a tensor of the cut and the array of the whole problem with `heads` heads, `h0` the first here. */
static void move(bool gather, const Cut *c, Spans spans, Tensor t, float *whole, const Problem *p, int64_t heads,
                 int64_t h0)
{
    int64_t C = t.ndim == 4 ? p->C : 1;
    for (int64_t b = 0; b < t.dim[0]; b++)
        for (int64_t row = 0; row < t.dim[1]; row++)
            for (int64_t h = 0; h < t.dim[2]; h++) {
                int64_t at = b * t.dim[1] + row;
                float *in = (float *)t.data + (t.ndim == 4 ? (at * t.dim[2] + h) * t.ld : at * t.ld + h);
                float *out = whole + (((c->b0 + b) * p->T + spans_position(spans, row)) * heads + h0 + h) * C;
                memcpy(gather ? in : out, gather ? out : in, (size_t)C * sizeof(float));
            }
}

static Stream *device_of(const Cut *c)
{
    static Device devices[ISA_COUNT];
    Device *d = &devices[c->isa];
    if (!d->ops) ASSERT(device_open(d, "cpu", 1, c->isa) == ERR_OK);
    d->threads = c->threads;
    d->workspace_bytes = c->workspace_bytes ? c->workspace_bytes : DEVICE_WORKSPACE_BYTES;
    return &d->stream;
}

static Tensor doc_of(const Problem *p, const Cut *c)
{
    int64_t T = c->q.count[0] + c->q.count[1];
    if (!p->doc) return (Tensor){ 0 };
    Tensor t = tensor_of(floats(c->B * T), I32, c->B, T);
    for (int64_t i = 0; i < c->B * T; i++)
        ((int32_t *)t.data)[i] = p->doc[(c->b0 + i / T) * p->T + spans_position(c->q, i % T)];
    return t;
}

static Err play(const Problem *p, const Cut *c, Result *r)
{
    int64_t group = p->H / p->K, H = c->K * group, h0 = c->k0 * group, T = c->q.count[0] + c->q.count[1],
            S = c->k.count[0] + c->k.count[1];
    Tensor q = guarded(c->B, T, H, p->C, c->pad), go = q, o = q, dq = q, k = guarded(c->B, S, c->K, p->C, c->pad),
           v = k, dk = k, dv = k, lse = guarded(c->B, T, H, 0, c->pad), delta = lse;
    Tensor *const like_q[] = { &go, &o, &dq }, *const like_k[] = { &v, &dk, &dv };
    for (int i = 0; i < 3; i++) {
        *like_q[i] = guarded(c->B, T, H, p->C, c->pad);
        *like_k[i] = guarded(c->B, S, c->K, p->C, c->pad);
    }
    delta = guarded(c->B, T, H, 0, c->pad);
    move(true, c, c->q, q, p->q, p, p->H, h0), move(true, c, c->q, go, p->go, p, p->H, h0);
    move(true, c, c->k, k, p->k, p, p->K, c->k0), move(true, c, c->k, v, p->v, p, p->K, c->k0);
    Tensor doc = doc_of(p, c), sample = tensor_of((void *)(uintptr_t)(p->sample + c->b0), I64, c->B);
    Stream *s = device_of(c);
    TRY(op(s, attention_fwd, .o = o, .lse = lse, .q = q, .k = k, .v = v, .doc = doc, .sample = sample,
           .q_span = c->q, .k_span = c->k, .scale = p->scale, .block = p->block, .window = p->window,
           .dropout = p->dropout, .head0 = h0));
    move(false, c, c->q, o, r->x[O], p, p->H, h0), move(false, c, c->q, lse, r->x[LSE], p, p->H, h0);
    CHECK(guards_whole(o) && guards_whole(lse));
    if (c->forward_only) return ERR_OK;
    TRY(op(s, attention_bwd, .dq = dq, .dk = dk, .dv = dv, .go = go, .q = q, .k = k, .v = v, .o = o, .lse = lse,
           .delta = delta, .doc = doc, .sample = sample, .q_span = c->q, .k_span = c->k, .scale = p->scale,
           .block = p->block, .window = p->window, .dropout = p->dropout, .head0 = h0, .leaf = p->leaf,
           .positions = p->T));
    move(false, c, c->q, dq, r->x[DQ], p, p->H, h0);
    move(false, c, c->k, dk, r->x[DK], p, p->K, c->k0), move(false, c, c->k, dv, r->x[DV], p, p->K, c->k0);
    CHECK(guards_whole(dq) && guards_whole(dk) && guards_whole(dv) && guards_whole(delta));
    return ERR_OK;
}

static void check_same(const Problem *p, const Result *a, const Result *b, int first, int last, const char *what)
{
    for (int r = first; r <= last; r++)
        CHECK_MSG(!memcmp(a->x[r], b->x[r], (size_t)result_count(p, r) * sizeof(float)), "%s: %s differs", what,
                  result_name[r]);
}

/* ---- float64 ---- */

static bool visible(const Problem *p, int64_t b, int64_t t, int64_t s)
{
    return s <= t && (!p->window || t - s < p->window) && (!p->doc || s >= p->doc[b * p->T + t]);
}

static double keep_of(const Problem *p, int64_t b, int64_t h, int64_t t, int64_t s)
{
    if (!p->dropout.threshold) return 1;
    int keep = dropout_keep_attn(p->dropout.key, p->dropout.threshold, p->sample[b], h, t, s);
    return keep ? (double)p->dropout.scale : 0;
}

/* Row (b, t, h) of a [B][T][heads][C] array. */
static int64_t at(const Problem *p, int64_t b, int64_t t, int64_t heads, int64_t h)
{
    return ((b * p->T + t) * heads + h) * p->C;
}

static double dot(const float *x, const float *y, int64_t n)
{
    double d = 0;
    for (int64_t i = 0; i < n; i++) d += (double)x[i] * (double)y[i];
    return d;
}

/* Row (b, h, t): the softmax into w, its log-sum-exp. */
static double row_softmax(const Problem *p, int64_t b, int64_t h, int64_t t, double *w)
{
    double max = -INFINITY, sum = 0;
    int64_t kh = h / (p->H / p->K);
    for (int64_t s = 0; s < p->T; s++) {
        w[s] = visible(p, b, t, s) ? (double)p->scale * dot(p->q + at(p, b, t, p->H, h), p->k + at(p, b, s, p->K, kh), p->C)
                                   : -INFINITY;
        max = fmax(max, w[s]);
    }
    for (int64_t s = 0; s < p->T; s++) sum += w[s] = exp(w[s] - max);
    for (int64_t s = 0; s < p->T; s++) w[s] /= sum;
    return max + log(sum);
}

static void row_reference(const Problem *p, int64_t b, int64_t h, int64_t t, double *const out[RESULTS])
{
    double w[512], dw[512], delta = 0;
    int64_t C = p->C, kh = h / (p->H / p->K), qa = at(p, b, t, p->H, h);
    out[LSE][(b * p->T + t) * p->H + h] = row_softmax(p, b, h, t, w);
    for (int64_t s = 0; s < p->T; s++) {
        int64_t ka = at(p, b, s, p->K, kh);
        double keep = keep_of(p, b, h, t, s);
        dw[s] = keep * dot(p->go + qa, p->v + ka, C);
        delta += w[s] * dw[s];
        for (int64_t c = 0; c < C; c++) {
            out[O][qa + c] += w[s] * keep * (double)p->v[ka + c];
            out[DV][ka + c] += w[s] * keep * (double)p->go[qa + c];
        }
    }
    for (int64_t s = 0; s < p->T; s++) {
        int64_t ka = at(p, b, s, p->K, kh);
        double ds = w[s] * (dw[s] - delta) * (double)p->scale;
        for (int64_t c = 0; c < C; c++) {
            out[DQ][qa + c] += ds * (double)p->k[ka + c];
            out[DK][ka + c] += ds * (double)p->q[qa + c];
        }
    }
}

static void check_reference(const Problem *p, const Result *got, const char *what)
{
    double *out[RESULTS];
    for (int r = 0; r < RESULTS; r++) out[r] = (double *)floats(2 * result_count(p, r) + 2);
    for (int64_t i = 0; i < p->B * p->H * p->T; i++)
        row_reference(p, i / p->T / p->H, i / p->T % p->H, i % p->T, out);
    for (int r = 0; r < RESULTS; r++) {
        double worst = 0, size = 1; /* terms are about 1, even where they cancel */
        for (int64_t i = 0; i < result_count(p, r); i++) {
            double d = fabs((double)got->x[r][i] - out[r][i]);
            if (!(d <= worst)) worst = d;
            size = fmax(size, fabs(out[r][i]));
        }
        CHECK_MSG(worst <= 3e-6 * size, "%s: %s is off by %g of %g", what, result_name[r], worst, size);
    }
}

/* ---- cases ---- */

static const Problem shapes[] = {
    /* B  T   H  K   C block window leaf drop docs */
    { 1, 1, 1, 1, 4, 8, 0, 8, 0, 0 },       { 2, 17, 4, 2, 8, 8, 0, 8, 0, 0 },
    { 1, 63, 2, 1, 16, 64, 0, 16, 0, 0 },   { 1, 64, 2, 2, 15, 64, 0, 64, 0, 0 },
    { 1, 65, 2, 1, 17, 64, 0, 13, 0, 0 },   { 1, 129, 1, 1, 64, 64, 0, 32, 0, 0 },
    { 1, 100, 8, 1, 20, 32, 7, 25, 0, 0 },  { 3, 40, 3, 3, 64, 16, 0, 8, 0, 1 },
    { 1, 70, 2, 2, 256, 64, 0, 70, .3f, 0 }, { 2, 33, 6, 2, 80, 8, 9, 8, .2f, 1 },
    { 1, 257, 2, 1, 32, 128, 64, 64, .1f, 1 }, { 1, 31, 8, 1, 5, 1000, 1, 4, .5f, 0 },
    { 2, 50, 5, 5, 1, 5, 0, 10, 0, 1 },     { 1, 200, 2, 2, 48, 24, 100, 50, 0, 0 },
};

TEST(attention_matches_float64)
{
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int isa = ISA_AVX512; isa < ISA_COUNT; isa++) {
            if (!isa_supported((Isa)isa)) continue;
            fresh();
            Problem p = shapes[i];
            problem_fill(&p);
            Cut cut = cut_whole(&p);
            cut.isa = (Isa)isa, cut.threads = 2, cut.pad = i % 3;
            Result r = result_new(&p);
            OK(play(&p, &cut, &r));
            char what[160];
            snprintf(what, sizeof what, "%s B %d T %d H %d K %d C %d", isa_name((Isa)isa), (int)p.B, (int)p.T,
                     (int)p.H, (int)p.K, (int)p.C);
            check_reference(&p, &r, what);
        }
}

static double objective(const Problem *p)
{
    double w[512], sum = 0;
    for (int64_t i = 0; i < p->B * p->H * p->T; i++) {
        int64_t b = i / p->T / p->H, h = i / p->T % p->H, t = i % p->T, kh = h / (p->H / p->K);
        row_softmax(p, b, h, t, w);
        for (int64_t s = 0; s < p->T; s++)
            sum += w[s] * keep_of(p, b, h, t, s) * dot(p->go + at(p, b, t, p->H, h), p->v + at(p, b, s, p->K, kh), p->C);
    }
    return sum;
}

TEST(attention_gradients_match_finite_differences)
{
    fresh();
    Problem p = { 2, 6, 4, 2, 3, 2, 4, 2, .25f, 1 };
    problem_fill(&p);
    Cut cut = cut_whole(&p);
    Result r = result_new(&p);
    OK(play(&p, &cut, &r));
    float *const input[] = { p.q, p.k, p.v };
    for (int x = 0; x < 3; x++)
        for (int64_t i = 0; i < result_count(&p, DQ + x); i++) {
            float *e = &input[x][i], old = *e, up, down;
            *e = up = old + 0x1p-9f;
            double above = objective(&p);
            *e = down = old - 0x1p-9f;
            double slope = (above - objective(&p)) / ((double)up - (double)down);
            *e = old;
            CHECK_CLOSE(r.x[DQ + x][i], slope, 2e-5, "%s[%d]", result_name[DQ + x], (int)i);
        }
}

/* ---- the definition, bit for bit ---- */

static float exp_lane(float x)
{
    float out[VEC];
    vf_store(out, vf_exp(vf_set1(x)));
    return out[0];
}

static float sum_lanes(const float *x)
{
    return vf_sum(vf_load(x));
}

static float score_of(const Problem *p, const float *q, const float *k)
{
    float s = 0;
    for (int64_t c = 0; c < p->C; c++) s = fmaf(k[c], q[c], s);
    return s * p->scale;
}

/* What ops.def and attention.c say about one query row; results end with + 0. */
static void define_row(const Problem *p, int64_t b, int64_t h, int64_t t, Result *r)
{
    float max = -INFINITY, sum = 0, *o = r->x[O] + at(p, b, t, p->H, h), s[512];
    int64_t kh = h / (p->H / p->K);
    for (int64_t first = 0; first <= t; first += p->block) {
        float top = max, lane[VEC] = { 0 };
        int64_t end = first + p->block < p->T ? first + p->block : p->T;
        bool any = false;
        for (int64_t j = first; j < end; j++) {
            if (!visible(p, b, t, j)) continue;
            s[j] = score_of(p, p->q + at(p, b, t, p->H, h), p->k + at(p, b, j, p->K, kh));
            if (s[j] > top) top = s[j];
            any = true;
        }
        if (!any) continue;
        float rescale = exp_lane(max - top);
        for (int64_t c = 0; c < p->C; c++) o[c] *= rescale;
        for (int64_t j = first; j < end; j++) {
            if (!visible(p, b, t, j)) continue;
            float w = exp_lane(s[j] - top);
            lane[j % VEC] += w;
            w *= (float)keep_of(p, b, h, t, j);
            for (int64_t c = 0; c < p->C; c++) o[c] = fmaf(w, p->v[at(p, b, j, p->K, kh) + c], o[c]);
        }
        sum = fmaf(sum, rescale, sum_lanes(lane));
        max = top;
    }
    for (int64_t c = 0; c < p->C; c++) o[c] = o[c] / sum + 0.0f;
    r->x[LSE][(b * p->T + t) * p->H + h] = max + (float)m_log((double)sum);
}

/* p keep and ds of (query t of head h, key j) */
static void define_pair(const Problem *p, const Result *r, const int64_t bhtj[4], float *kept, float *ds)
{
    int64_t b = bhtj[0], h = bhtj[1], t = bhtj[2], j = bhtj[3];
    const float *q = p->q + at(p, b, t, p->H, h), *go = p->go + at(p, b, t, p->H, h),
                *o = r->x[O] + at(p, b, t, p->H, h), *k = p->k + at(p, b, j, p->K, h / (p->H / p->K)),
                *v = p->v + at(p, b, j, p->K, h / (p->H / p->K));
    float lane[VEC] = { 0 }, dp = 0;
    for (int64_t c = 0; c < p->C; c++) {
        lane[c % VEC] = fmaf(go[c], o[c], lane[c % VEC]);
        dp = fmaf(v[c], go[c], dp);
    }
    float w = exp_lane(score_of(p, q, k) - r->x[LSE][(b * p->T + t) * p->H + h]);
    *kept = w, *ds = 0;
    if (p->dropout.threshold) {
        float keep = (float)keep_of(p, b, h, t, j);
        *kept = w * keep;
        dp *= keep;
    }
    *ds = w * (dp - sum_lanes(lane)) * p->scale;
}

static void define_dq(const Problem *p, int64_t b, int64_t h, int64_t t, Result *r)
{
    float *dq = r->x[DQ] + at(p, b, t, p->H, h), kept, ds;
    for (int64_t j = 0; j <= t; j++) {
        if (!visible(p, b, t, j)) continue;
        define_pair(p, r, (int64_t[]){ b, h, t, j }, &kept, &ds);
        for (int64_t c = 0; c < p->C; c++) dq[c] = fmaf(ds, p->k[at(p, b, j, p->K, h / (p->H / p->K)) + c], dq[c]);
    }
    for (int64_t c = 0; c < p->C; c++) dq[c] += 0.0f;
}

/* dk and dv of one key: n leaves (a power of two) in zigzag order, chains, then the tree. */
static void define_key(const Problem *p, int64_t b, int64_t kh, int64_t j, Result *r)
{
    enum { MOST = 32, WIDE = 64 };
    static float dk[MOST][WIDE], dv[MOST][WIDE];
    int64_t n = p->T / p->leaf, group = p->H / p->K;
    for (int64_t z = 0; z < n; z++) {
        int64_t leaf = z % 2 ? n - 1 - z / 2 : z / 2;
        memset(dk[z], 0, sizeof dk[z]), memset(dv[z], 0, sizeof dv[z]);
        for (int64_t i = 0; i < group * p->leaf; i++) {
            int64_t h = kh * group + i / p->leaf, t = leaf * p->leaf + i % p->leaf, qa = at(p, b, t, p->H, h);
            float kept, ds;
            if (!visible(p, b, t, j)) continue;
            define_pair(p, r, (int64_t[]){ b, h, t, j }, &kept, &ds);
            for (int64_t c = 0; c < p->C; c++) {
                dk[z][c] = fmaf(ds, p->q[qa + c], dk[z][c]);
                dv[z][c] = fmaf(kept, p->go[qa + c], dv[z][c]);
            }
        }
    }
    for (int64_t step = 1; step < n; step *= 2)
        for (int64_t z = 0; z < n; z += 2 * step)
            for (int64_t c = 0; c < p->C; c++) dk[z][c] += dk[z + step][c], dv[z][c] += dv[z + step][c];
    for (int64_t c = 0; c < p->C; c++) {
        r->x[DK][at(p, b, j, p->K, kh) + c] = dk[0][c] + 0.0f;
        r->x[DV][at(p, b, j, p->K, kh) + c] = dv[0][c] + 0.0f;
    }
}

static const Problem cut_shapes[] = {
    { 3, 64, 4, 2, 24, 8, 0, 8, .2f, 1 },
    { 1, 256, 2, 2, 64, 64, 0, 32, 0, 0 },
    { 2, 128, 6, 1, 12, 16, 37, 16, .1f, 0 },
};

TEST(attention_is_its_scalar_definition)
{
    for (size_t i = 0; i < sizeof cut_shapes / sizeof *cut_shapes; i++) {
        fresh();
        Problem p = cut_shapes[i];
        problem_fill(&p);
        Cut cut = cut_whole(&p);
        Result got = result_new(&p), want = result_new(&p);
        OK(play(&p, &cut, &got));
        for (int64_t b = 0; b < p.B; b++)
            for (int64_t t = 0; t < p.T; t++)
                for (int64_t h = 0; h < p.H; h++) {
                    define_row(&p, b, h, t, &want);
                    define_dq(&p, b, h, t, &want);
                }
        for (int64_t n = 0; n < p.B * p.T * p.K; n++)
            define_key(&p, n / p.T / p.K, n % p.K, n / p.K % p.T, &want);
        check_same(&p, &got, &want, O, LSE, "definition");
    }
}

/* ---- cuts ---- */

static void check_cuts(const Problem *p, const Result *whole)
{
    char what[64];
    for (int isa = ISA_AVX512; isa < ISA_COUNT; isa++)
        for (int threads = 1; threads <= 3 && isa_supported((Isa)isa); threads++) {
            Cut cut = cut_whole(p);
            cut.isa = (Isa)isa, cut.threads = threads, cut.pad = threads;
            Result r = result_new(p);
            OK(play(p, &cut, &r));
            snprintf(what, sizeof what, "%s, %d threads", isa_name((Isa)isa), threads);
            check_same(p, whole, &r, O, LSE, what);
        }
    Result heads = result_new(p), samples = result_new(p), tight = result_new(p);
    for (int64_t i = 0; i < p->K; i++) {
        Cut cut = cut_whole(p);
        cut.k0 = i, cut.K = 1;
        OK(play(p, &cut, &heads));
    }
    check_same(p, whole, &heads, O, LSE, "cut by heads");
    for (int64_t i = 0; i < p->B; i++) {
        Cut cut = cut_whole(p);
        cut.b0 = i, cut.B = 1;
        OK(play(p, &cut, &samples));
    }
    check_same(p, whole, &samples, O, LSE, "cut by samples");
    Cut cut = cut_whole(p);
    cut.threads = 3, cut.workspace_bytes = 300 << 10;
    OK(play(p, &cut, &tight));
    check_same(p, whole, &tight, O, LSE, "small workspace");
}

static Spans zigzag(int64_t T, int64_t cp, int64_t rank)
{
    int64_t n = T / (2 * cp);
    return (Spans){ { rank * n, (2 * cp - 1 - rank) * n }, { n, n } };
}

/* Context parallel ranks one after another: rows of o, lse, dq are theirs; dk, dv meet in a tree in rank order. */
static void check_zigzag(const Problem *p, const Result *whole, int64_t cp)
{
    Result rank[8];
    for (int64_t i = 0; i < cp; i++) {
        Cut cut = cut_whole(p);
        cut.q = zigzag(p->T, cp, i);
        rank[i] = result_new(p);
        for (int r = 0; r < RESULTS && i > 0; r++)
            if (r != DK && r != DV) rank[i].x[r] = rank[0].x[r];
        OK(play(p, &cut, &rank[i]));
    }
    for (int64_t step = 1; step < cp; step *= 2)
        for (int64_t i = 0; i < cp; i += 2 * step)
            for (int r = DK; r <= DV; r++)
                for (int64_t e = 0; e < result_count(p, r); e++) rank[i].x[r][e] += rank[i + step].x[r][e];
    char what[64];
    snprintf(what, sizeof what, "cp %d", (int)cp);
    check_same(p, whole, &rank[0], O, LSE, what);
}

TEST(attention_has_the_same_bits_under_every_cut)
{
    for (size_t i = 0; i < sizeof cut_shapes / sizeof *cut_shapes; i++) {
        fresh();
        Problem p = cut_shapes[i];
        problem_fill(&p);
        Result whole = result_new(&p);
        Cut cut = cut_whole(&p);
        OK(play(&p, &cut, &whole));
        check_cuts(&p, &whole);
        for (int64_t cp = 1; cp <= 4; cp *= 2) check_zigzag(&p, &whole, cp);
        Result turned = result_new(&p);
        cut.k = (Spans){ { 40, 0 }, { p.T - 40, 40 } }; /* rows out of order: positions decide */
        cut.q = (Spans){ { p.T / 2, 0 }, { p.T - p.T / 2, p.T / 2 } };
        OK(play(&p, &cut, &turned));
        check_same(&p, &whole, &turned, O, LSE, "rows out of order");
    }
}

/* ---- partial key sets ---- */

static void merge(const Problem *p, Isa isa, Result *a, const Result *b)
{
    Cut cut = { .isa = isa, .threads = 2 };
    int64_t rows = p->B * p->T;
    Tensor o = tensor_of(a->x[O], F32, p->B, p->T, p->H, p->C), o2 = tensor_of(b->x[O], F32, p->B, p->T, p->H, p->C);
    Tensor lse = tensor_of(a->x[LSE], F32, p->B, p->T, p->H), lse2 = tensor_of(b->x[LSE], F32, p->B, p->T, p->H);
    a->x[O][rows * p->H * p->C] = a->x[LSE][rows * p->H] = guard();
    OK(op(device_of(&cut), attention_merge, .o = o, .lse = lse, .o2 = o2, .lse2 = lse2));
    CHECK(isnan(a->x[O][rows * p->H * p->C]) && isnan(a->x[LSE][rows * p->H]));
}

/* Only keys of a few positions: most rows of the first ones see nothing. */
TEST(attention_merges_disjoint_key_sets)
{
    fresh();
    Problem p = { 2, 64, 4, 2, 24, 8, 0, 8, .2f, 1 };
    problem_fill(&p);
    for (int isa = ISA_AVX512; isa < ISA_COUNT; isa++) {
        if (!isa_supported((Isa)isa)) continue;
        Result part[4], whole = result_new(&p);
        Cut cut = cut_whole(&p);
        cut.isa = (Isa)isa, cut.forward_only = true;
        OK(play(&p, &cut, &whole));
        for (int64_t i = 0; i < 4; i++) {
            cut.k = zigzag(p.T, 4, i);
            part[i] = result_new(&p);
            OK(play(&p, &cut, &part[i]));
        }
        /* keys 24..39: rows before 24 have none */
        bool empty = true;
        for (int64_t b = 0; b < p.B; b++)
            for (int64_t i = 0; i < 24 * p.H; i++) {
                empty = empty && part[3].x[LSE][b * p.T * p.H + i] == -INFINITY;
                for (int64_t c = 0; c < p.C; c++) {
                    const float zero = 0, *o = part[3].x[O] + (b * p.T * p.H + i) * p.C + c;
                    empty = empty && !memcmp(o, &zero, sizeof zero);
                }
            }
        CHECK(empty);
        merge(&p, (Isa)isa, &part[3], &part[2]); /* rows that neither sees stay empty */
        merge(&p, (Isa)isa, &part[0], &part[1]);
        CHECK(part[3].x[LSE][0] == -INFINITY && part[3].x[O][0] == 0);
        merge(&p, (Isa)isa, &part[3], &part[0]);
        for (int64_t i = 0; i < result_count(&p, O); i++) CHECK_CLOSE(part[3].x[O][i], whole.x[O][i], 1e-6, "o");
        for (int64_t i = 0; i < result_count(&p, LSE); i++)
            CHECK_CLOSE(part[3].x[LSE][i], whole.x[LSE][i], 1e-6, "lse");
    }
}

/* ---- dropout, NaN, refusals ---- */

/* Values that are unit vectors show each weight by itself. */
TEST(attention_dropout_is_the_mask_of_global_coordinates)
{
    fresh();
    Problem p = { 2, 24, 2, 2, 24, 8, 0, 8, .4f, 0 };
    problem_fill(&p);
    for (int64_t i = 0; i < p.B * p.T * p.K * p.C; i++) p.v[i] = i / p.C / p.K % p.T == i % p.C;
    Cut cut = cut_whole(&p);
    cut.k0 = 1, cut.K = 1;
    Result r = result_new(&p);
    OK(play(&p, &cut, &r));
    int64_t kept = 0, seen = 0;
    for (int64_t b = 0; b < p.B; b++)
        for (int64_t t = 0; t < p.T; t++)
            for (int64_t j = 0; j < p.T; j++) {
                bool keep = j <= t && dropout_keep_attn(p.dropout.key, p.dropout.threshold, p.sample[b], 1, t, j);
                CHECK((r.x[O][at(&p, b, t, p.H, 1) + j] != 0) == keep);
                kept += keep, seen += j <= t;
            }
    CHECK(kept > seen / 2 && kept < seen * 7 / 10);
}

TEST(attention_keeps_nan_in_its_rows)
{
    fresh();
    Problem p = { 1, 40, 2, 1, 16, 16, 0, 8, 0, 0 };
    problem_fill(&p);
    p.q[at(&p, 0, 20, 2, 1) + 3] = NAN;
    Cut cut = cut_whole(&p);
    Result r = result_new(&p);
    OK(play(&p, &cut, &r));
    for (int64_t i = 0; i < p.T * p.H; i++) CHECK(isnan(r.x[O][i * p.C]) == (i == 20 * 2 + 1));
    CHECK(isnan(r.x[LSE][41]) && isnan(r.x[DQ][41 * 16]) && isnan(r.x[DK][0]));
}

TEST(attention_refuses_what_does_not_fit)
{
    fresh();
    Problem p = { 1, 16, 2, 1, 8, 8, 0, 8, 0, 0 };
    problem_fill(&p);
    Result r = result_new(&p);
    Cut cut = cut_whole(&p);
    cut.workspace_bytes = 4096;
    FAILS(play(&p, &cut, &r), ERR_CONFIG, "bytes of workspace");
    cut = cut_whole(&p);
    cut.k = (Spans){ { 0, 4 }, { 8, 8 } };
    FAILS(play(&p, &cut, &r), ERR_SHAPE, "spans of k overlap");
    cut = cut_whole(&p);
    p.block = 0;
    FAILS(play(&p, &cut, &r), ERR_SHAPE, "block is '0'");
    p.block = 8, p.leaf = 0;
    FAILS(play(&p, &cut, &r), ERR_SHAPE, "leaf is '0'");
}

TEST_MAIN
