/*
 * What the tests of attention share.
 *
 * A Problem holds the whole batch; a Cut says which part of it one call computes; play() gathers that part
 * into tensors whose every unused element is a NaN guard, calls the ops, checks the guards, and scatters the
 * results into arrays of the whole problem, where they can be compared.
 */
#ifndef MEGATRAIN_TEST_ATTENTION_CASE_H
#define MEGATRAIN_TEST_ATTENTION_CASE_H

#include "base/arena.h"
#include "base/half.h"
#include "base/rng.h"
#include "test.h"
#include "tested_op.h"

enum { O, DQ, DK, DV, LSE, RESULTS };
static const char *const result_name[] = { "o", "dq", "dk", "dv", "lse" };

typedef struct {
    int64_t B, T, H, K, C, block, window, leaf;
    float drop;
    bool docs;
    int64_t chunks;        /* of a group's query heads; 0 = 1 */
    float softcap;
    bool sinks;
    int64_t V;             /* width of values; 0 = C */
    bool narrow;           /* tensors of bf16; dq, dk and dv, which show each bit of a sum, of f32 */
    DotKind dot;           /* of what is narrow */
    float *sink;           /* [H] or NULL */
    float *q, *k, *v, *go; /* [B][T][H or K][C or V] */
    int32_t *doc;          /* [B][T] or NULL */
    int64_t sample[8];
    float scale;
    Dropout dropout;
} Problem;

typedef struct {
    float *x[RESULTS];
    int64_t *logit_max; /* [H], by logit_order */
} Result;

typedef struct {
    Spans q, k;
    int64_t b0, B, k0, K;   /* samples and key heads of the call */
    int64_t sharing, share; /* K = 1, and of the group's query heads the share-th of `sharing` parts; 0 = 1 */
    Isa isa;
    int threads;
    int64_t pad, workspace_bytes;
    bool forward_only;
    bool grouped; /* the queries of a key head, and dq, lie side by side */
    bool without_pairs; /* VDPBF16PS by other instructions */
    bool narrow_sums;   /* of a narrow problem, dq, dk and dv in bf16 */
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

static float as_bf16(float x) { return bf16_to_float(bf16_from_float(x)); }

static float *inputs(const Problem *p, int64_t n, uint64_t seed)
{
    float *x = noise(n, seed);
    for (int64_t i = 0; p->narrow && i < n; i++) x[i] = as_bf16(x[i]);
    return x;
}

static void problem_fill(Problem *p)
{
    int64_t rows = p->B * p->T;
    if (!p->V) p->V = p->C;
    p->q = inputs(p, rows * p->H * p->C, 1), p->go = inputs(p, rows * p->H * p->V, 2);
    p->k = inputs(p, rows * p->K * p->C, 3), p->v = inputs(p, rows * p->K * p->V, 4);
    p->scale = 1.0f / sqrtf((float)p->C);
    if (p->sinks) p->sink = inputs(p, p->H, 6);
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
    const int64_t heads = r == DK || r == DV ? p->K : p->H, width = r == LSE ? 1 : r == O || r == DV ? p->V : p->C;
    return rows * heads * width;
}

static Result result_new(const Problem *p)
{
    Result r;
    for (int i = 0; i < RESULTS; i++) r.x[i] = floats(result_count(p, i));
    r.logit_max = (int64_t *)floats(2 * p->H);
    return r;
}

static inline Cut cut_whole(const Problem *p)
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

static bool is_guard(const void *data, int64_t i, DType dtype)
{
    const float g = guard(), x = dtype == BF16 ? bf16_to_float(((const uint16_t *)data)[i]) : ((const float *)data)[i];
    return half_float_bits(x) == (dtype == BF16 ? half_float_bits(g) & 0xFFFF0000 : half_float_bits(g));
}

/* [B, rows, heads, C] (C = 0: [B, rows, heads]) with `pad` guards behind each row and some behind all. */
static Tensor guarded(DType dtype, int64_t B, int64_t rows, int64_t heads, int64_t C, int64_t pad)
{
    int64_t inner = C ? C : heads, outer = B * rows * (C ? heads : 1), count = outer * (inner + pad) + 32;
    Tensor t = { .data = floats(count), .dim = { B, rows, heads, C }, .ld = inner + pad, .ndim = C ? 4 : 3,
                 .dtype = dtype };
    for (int64_t i = 0; i < count; i++) {
        if (dtype == BF16) ((uint16_t *)t.data)[i] = (uint16_t)(half_float_bits(guard()) >> 16);
        else ((float *)t.data)[i] = guard();
    }
    return t;
}

/* Heads that lie in groups side by side, with `pad` guards behind each group. */
static Tensor guarded_groups(DType dtype, int64_t B, int64_t rows, int64_t heads, int64_t C, int64_t pad, int64_t group)
{
    Tensor t = guarded(dtype, B, rows, heads / group, group * C, pad);
    t.dim[2] = heads, t.dim[3] = C, t.group = group;
    return t;
}

static bool guards_whole(Tensor t)
{
    const int64_t group = t.group > 1 ? t.group : 1;
    int64_t inner = t.dim[t.ndim - 1] * group, outer = tensor_rows(t) / group;
    for (int64_t i = 0; i < outer * t.ld + 32; i++)
        if ((i >= outer * t.ld || i % t.ld >= inner) && !is_guard(t.data, i, t.dtype)) return false;
    return true;
}

/* Between elements of a tensor from `at` on and floats. */
static void move_row(bool gather, Tensor t, int64_t at, float *out, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint16_t *half = (uint16_t *)t.data + at + i;
        float *whole = (float *)t.data + at + i;
        if (t.dtype == BF16 && gather) *half = bf16_from_float(out[i]);
        else if (t.dtype == BF16) out[i] = bf16_to_float(*half);
        else *(gather ? whole : out + i) = *(gather ? out + i : whole);
    }
}

/* Between a tensor of the cut and the array of the whole problem with `heads` heads, `h0` the first here. */
static void move(bool gather, const Cut *c, Spans spans, Tensor t, float *whole, const Problem *p,
                 int64_t heads, int64_t h0)
{
    int64_t C = t.ndim == 4 ? t.dim[3] : 1, group = t.group > 1 ? t.group : 1;
    for (int64_t b = 0; b < t.dim[0]; b++)
        for (int64_t row = 0; row < t.dim[1]; row++)
            for (int64_t h = 0; h < t.dim[2]; h++) {
                int64_t n = b * t.dim[1] + row, at = n * t.ld;
                at += t.ndim == 4 ? (n * (t.dim[2] / group - 1) + h / group) * t.ld + h % group * C : h;
                float *out = whole + (((c->b0 + b) * p->T + spans_position(spans, row)) * heads + h0 + h) * C;
                move_row(gather, t, at, out, C);
            }
}

static DType compute_of(const Problem *p) { return p->narrow ? BF16 : F32; }

static Stream *device_of(const Problem *p, const Cut *c)
{
    enum { STAGING = 8 << 20 };
    static Device devices[ISA_COUNT][2];
    Device *d = &devices[c->isa][p->narrow];
    const DeviceChoice choice = { .threads = 1, .isa = c->isa, .staging_bytes = p->narrow ? STAGING : 0 };
    if (!d->ops) ASSERT(device_open(d, choice) == ERR_OK);
    d->dot = p->dot;
    d->dot_pairs = c->isa == ISA_AVX512 && dot_supported() && !c->without_pairs;
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

static Tensor sinks_of(const Problem *p, int64_t h0, int64_t H)
{
    if (!p->sink) return (Tensor){ 0 };
    Tensor t = tensor_of(floats(H), compute_of(p), H);
    move_row(true, t, 0, p->sink + h0, H);
    return t;
}

static inline Err play(const Problem *p, const Cut *c, Result *r)
{
    int64_t group = p->H / p->K, H = c->K * group / (c->sharing ? c->sharing : 1),
            h0 = c->k0 * group + c->share * H, T = c->q.count[0] + c->q.count[1],
            S = c->k.count[0] + c->k.count[1];
    const int64_t side = c->grouped ? H / c->K : 1, B = c->B, K = c->K, pad = c->pad;
    const DType of = compute_of(p), sum = c->narrow_sums ? of : F32;
    Tensor q = guarded_groups(of, B, T, H, p->C, pad, side), k = guarded(of, B, S, K, p->C, pad),
           lse = guarded(F32, B, T, H, 0, pad), delta = guarded(F32, B, T, H, 0, pad),
           go = guarded(of, B, T, H, p->V, pad), o = guarded(of, B, T, H, p->V, pad),
           dq = guarded_groups(sum, B, T, H, p->C, pad, side), v = guarded(of, B, S, K, p->V, pad),
           dk = guarded(sum, B, S, K, p->C, pad), dv = guarded(sum, B, S, K, p->V, pad);
    move(true, c, c->q, q, p->q, p, p->H, h0), move(true, c, c->q, go, p->go, p, p->H, h0);
    move(true, c, c->k, k, p->k, p, p->K, c->k0), move(true, c, c->k, v, p->v, p, p->K, c->k0);
    Tensor sink = sinks_of(p, h0, H);
    Tensor doc = doc_of(p, c), sample = tensor_of((void *)(uintptr_t)(p->sample + c->b0), I64, c->B);
    Stream *s = device_of(p, c);
    TRY(tested_op(s, attention_fwd, .o = o, .lse = lse, .logit_max = tensor_of(r->logit_max + h0, I64, H), .q = q,
                  .k = k, .v = v, .sink = sink, .doc = doc, .sample = sample, .q_span = c->q, .k_span = c->k,
                  .scale = p->scale, .softcap = p->softcap, .block = p->block, .window = p->window,
                  .dropout = p->dropout, .head0 = h0));
    move(false, c, c->q, o, r->x[O], p, p->H, h0), move(false, c, c->q, lse, r->x[LSE], p, p->H, h0);
    CHECK(guards_whole(o) && guards_whole(lse));
    if (c->forward_only) return ERR_OK;
    TRY(tested_op(s, attention_bwd, .dq = dq, .dk = dk, .dv = dv, .go = go, .q = q, .k = k, .v = v, .o = o,
                  .lse = lse, .delta = delta, .doc = doc, .sample = sample, .q_span = c->q, .k_span = c->k,
                  .scale = p->scale, .softcap = p->softcap, .block = p->block, .window = p->window,
                  .dropout = p->dropout, .head0 = h0, .chunk = group / (p->chunks ? p->chunks : 1), .leaf = p->leaf,
                  .positions = p->T));
    move(false, c, c->q, dq, r->x[DQ], p, p->H, h0);
    move(false, c, c->k, dk, r->x[DK], p, p->K, c->k0), move(false, c, c->k, dv, r->x[DV], p, p->K, c->k0);
    CHECK(guards_whole(dq) && guards_whole(dk) && guards_whole(dv) && guards_whole(delta));
    return ERR_OK;
}

static inline void check_same(const Problem *p, const Result *a, const Result *b, const char *what)
{
    for (int r = 0; r < RESULTS; r++) {
        size_t bytes = (size_t)result_count(p, r) * sizeof(float);
        CHECK_MSG(!memcmp(a->x[r], b->x[r], bytes), "%s: %s differs", what, result_name[r]);
    }
    CHECK_MSG(!memcmp(a->logit_max, b->logit_max, (size_t)p->H * sizeof *a->logit_max), "%s: logit_max differs", what);
}

/* ---- what is visible, what is kept ---- */

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

/* Row (b, t, h) of a [B][T][heads] array; its first element in one of [C], of [V]. */
static int64_t row_at(const Problem *p, int64_t b, int64_t t, int64_t heads, int64_t h)
{
    return (b * p->T + t) * heads + h;
}

static int64_t at(const Problem *p, int64_t b, int64_t t, int64_t heads, int64_t h)
{
    return row_at(p, b, t, heads, h) * p->C;
}

static int64_t at_v(const Problem *p, int64_t b, int64_t t, int64_t heads, int64_t h)
{
    return row_at(p, b, t, heads, h) * p->V;
}

static Spans zigzag(int64_t T, int64_t cp, int64_t rank)
{
    int64_t n = T / (2 * cp);
    return (Spans){ { rank * n, (2 * cp - 1 - rank) * n }, { n, n } };
}

#endif
