/*
 * Attention bit for bit: against the scalar loops that define it, and against itself under every cut:
 * instruction sets, threads, heads, query heads of one key head, samples, zigzag context parallelism, rows out of
 * order, little workspace. In fp32, and of bf16 with both kinds of dot product.
 */
#define CPU_ISA_c /* the scalar build of vec.h, for the definition */
#define CPU_ISA c
#include "base/mathx.h"
#include "cpu/vec.h"

#include "attention_case.h"
#include "dot_step.h"

/* ---- the definition, bit for bit ---- */

static float exp_lane(float x)
{
    float out[VEC];
    vf_store(out, vf_exp(vf_set1(x)));
    return out[0];
}

static float tanh_lane(float x)
{
    float out[VEC];
    vf_store(out, vf_tanh(vf_set1(x)));
    return out[0];
}

static float sum_lanes(const float *x)
{
    return vf_sum(vf_load(x));
}

static bool in_pairs(const Problem *p) { return p->narrow && p->dot != DOT_FMA; }

/* The chain of products over a row. */
static float row_chain(const Problem *p, const float *x, const float *y, int64_t n)
{
    float sum = 0;
    for (int64_t c = 0; c < n && !in_pairs(p); c++) sum = fmaf(x[c], y[c], sum);
    for (int64_t c = 0; c < n && in_pairs(p); c += 2) {
        const bool two = c + 1 < n;
        sum = dot_step(two ? x[c + 1] : 0, two ? y[c + 1] : 0, sum);
        sum = dot_step(x[c], y[c], sum);
    }
    return sum;
}

/* A chain of products of weights and rows over positions, n sums at once. */
typedef struct {
    const Problem *p;
    float *sum;
    int64_t n, unit; /* pairs lie in one block, or leaf, of so many positions */
    const float *row; /* waits for its partner */
    int64_t position;
    float weight;
} Chain;

static float weight_of_16_bits(float w) { return as_bf16(flushed(w)); }

static void chain_pair(Chain *c, float w, const float *row)
{
    for (int64_t i = 0; i < c->n && c->row; i++)
        c->sum[i] = dot_step(c->weight, c->row[i], dot_step(w, row ? row[i] : 0, c->sum[i]));
    c->row = NULL;
}

static void chain_end(Chain *c) { chain_pair(c, 0, NULL); }

static void chain_add(Chain *c, int64_t position, float w, const float *row)
{
    if (!in_pairs(c->p)) {
        for (int64_t i = 0; i < c->n; i++) c->sum[i] = fmaf(w, row[i], c->sum[i]);
        return;
    }
    w = weight_of_16_bits(w);
    if (c->row && position % 2 && position == c->position + 1 && position % c->unit) return chain_pair(c, w, row);
    chain_end(c);
    c->row = row, c->position = position, c->weight = w;
}

static float as_stored(const Problem *p, float x) { return p->narrow ? as_bf16(x) : x; }

static float score_of(const Problem *p, const float *q, const float *k, float *slope)
{
    const float s = row_chain(p, k, q, p->C);
    *slope = p->scale;
    if (!(p->softcap > 0)) return s * p->scale;
    const float t = tanh_lane(s * (p->scale / p->softcap));
    *slope = p->scale * fmaf(-t, t, 1);
    return t * p->softcap;
}

/* What ops.def and attention.c say about one query row; results end with + 0. */
static void define_row(const Problem *p, int64_t b, int64_t h, int64_t t, Result *r)
{
    float max = -INFINITY, sum = 0, *o = r->x[O] + at_v(p, b, t, p->H, h), s[512], slope;
    int64_t kh = h / (p->H / p->K);
    for (int64_t first = 0; first <= t; first += p->block) {
        float top = max, lane[VEC] = { 0 };
        int64_t end = first + p->block < p->T ? first + p->block : p->T;
        bool any = false;
        for (int64_t j = first; j < end; j++) {
            if (!visible(p, b, t, j)) continue;
            s[j] = score_of(p, p->q + at(p, b, t, p->H, h), p->k + at(p, b, j, p->K, kh), &slope);
            if (s[j] > top) top = s[j];
            any = true;
        }
        if (!any) continue;
        float rescale = exp_lane(max - top);
        for (int64_t c = 0; c < p->V; c++) o[c] *= rescale;
        Chain chain = { p, o, p->V, p->block };
        for (int64_t j = first; j < end; j++) {
            if (!visible(p, b, t, j)) continue;
            float w = exp_lane(s[j] - top);
            lane[j % VEC] += w;
            w *= (float)keep_of(p, b, h, t, j);
            chain_add(&chain, j, w, p->v + at_v(p, b, j, p->K, kh));
        }
        chain_end(&chain);
        sum = fmaf(sum, rescale, sum_lanes(lane));
        max = top;
    }
    if (logit_order(max) > r->logit_max[h]) r->logit_max[h] = logit_order(max);
    if (p->sink) {
        const float top = max > p->sink[h] ? max : p->sink[h], rescale = (float)m_exp((double)(max - top));
        for (int64_t c = 0; c < p->V; c++) o[c] *= rescale;
        sum = fmaf(sum, rescale, (float)m_exp((double)(p->sink[h] - top)));
        max = top;
    }
    for (int64_t c = 0; c < p->V; c++) o[c] = as_stored(p, o[c] / sum + 0.0f);
    r->x[LSE][(b * p->T + t) * p->H + h] = max + (float)m_log((double)sum);
}

/* p keep and ds of (query t of head h, key j) */
static void define_pair(const Problem *p, const Result *r, const int64_t bhtj[4], float *kept, float *ds)
{
    int64_t b = bhtj[0], h = bhtj[1], t = bhtj[2], j = bhtj[3];
    const float *q = p->q + at(p, b, t, p->H, h), *go = p->go + at_v(p, b, t, p->H, h),
                *o = r->x[O] + at_v(p, b, t, p->H, h), *k = p->k + at(p, b, j, p->K, h / (p->H / p->K)),
                *v = p->v + at_v(p, b, j, p->K, h / (p->H / p->K));
    float lane[VEC] = { 0 }, dp = row_chain(p, v, go, p->V);
    for (int64_t c = 0; c < p->V; c++) lane[c % VEC] = fmaf(go[c], o[c], lane[c % VEC]);
    float slope, score = score_of(p, q, k, &slope), w = exp_lane(score - r->x[LSE][(b * p->T + t) * p->H + h]);
    *kept = w, *ds = 0;
    if (p->dropout.threshold) {
        float keep = (float)keep_of(p, b, h, t, j);
        *kept = w * keep;
        dp *= keep;
    }
    *ds = w * (dp - sum_lanes(lane)) * slope;
}

static void define_dq(const Problem *p, int64_t b, int64_t h, int64_t t, Result *r)
{
    float *dq = r->x[DQ] + at(p, b, t, p->H, h), kept, ds;
    Chain chain = { p, dq, p->C, p->block };
    for (int64_t j = 0; j <= t; j++) {
        if (!visible(p, b, t, j)) continue;
        define_pair(p, r, (int64_t[]){ b, h, t, j }, &kept, &ds);
        chain_add(&chain, j, ds, p->k + at(p, b, j, p->K, h / (p->H / p->K)));
    }
    chain_end(&chain);
    for (int64_t c = 0; c < p->C; c++) dq[c] += 0.0f;
}

enum { MOST = 32, WIDE = 64 };

/* x[0] = the sum of n rows (a power of two), pairwise. */
static void define_tree(float x[][WIDE], int64_t n)
{
    for (int64_t step = 1; step < n; step *= 2)
        for (int64_t z = 0; z < n; z += 2 * step)
            for (int64_t c = 0; c < WIDE; c++) x[z][c] += x[z + step][c];
}

/* The part of dk and dv of one key that `heads` query heads from `head` on give: n leaves (a power of two) in zigzag
 * order, chains, then the tree. */
static void define_chunk(const Problem *p, const int64_t bj[2], int64_t head, int64_t heads, const Result *r,
                         float sum_dk[WIDE], float sum_dv[WIDE])
{
    static float dk[MOST][WIDE], dv[MOST][WIDE];
    int64_t n = p->T / p->leaf, b = bj[0], j = bj[1];
    for (int64_t z = 0; z < n; z++) {
        int64_t leaf = z % 2 ? n - 1 - z / 2 : z / 2;
        Chain to_dk = { p, dk[z], p->C, p->leaf }, to_dv = { p, dv[z], p->V, p->leaf };
        memset(dk[z], 0, sizeof dk[z]), memset(dv[z], 0, sizeof dv[z]);
        for (int64_t i = 0; i < heads * p->leaf; i++) {
            int64_t h = head + i / p->leaf, t = leaf * p->leaf + i % p->leaf, qa = at(p, b, t, p->H, h),
                    oa = at_v(p, b, t, p->H, h);
            float kept, ds;
            if (!visible(p, b, t, j)) continue;
            define_pair(p, r, (int64_t[]){ b, h, t, j }, &kept, &ds);
            chain_add(&to_dk, t, ds, p->q + qa);
            chain_add(&to_dv, t, kept, p->go + oa);
        }
        chain_end(&to_dk), chain_end(&to_dv);
    }
    define_tree(dk, n), define_tree(dv, n);
    memcpy(sum_dk, dk, sizeof dk[0]), memcpy(sum_dv, dv, sizeof dv[0]);
}

/* A tree over the chunks of query heads. */
static void define_key(const Problem *p, int64_t b, int64_t kh, int64_t j, Result *r)
{
    static float dk[MOST][WIDE], dv[MOST][WIDE];
    int64_t chunks = p->chunks ? p->chunks : 1, heads = p->H / p->K / chunks;
    for (int64_t n = 0; n < chunks; n++)
        define_chunk(p, (int64_t[]){ b, j }, (kh * chunks + n) * heads, heads, r, dk[n], dv[n]);
    define_tree(dk, chunks), define_tree(dv, chunks);
    for (int64_t c = 0; c < p->C; c++) r->x[DK][at(p, b, j, p->K, kh) + c] = dk[0][c] + 0.0f;
    for (int64_t c = 0; c < p->V; c++) r->x[DV][at_v(p, b, j, p->K, kh) + c] = dv[0][c] + 0.0f;
}

static const Problem cut_shapes[] = {
    { 3, 64, 4, 2, 24, 8, 0, 8, .2f, 1 },
    { 1, 256, 2, 2, 64, 64, 0, 32, 0, 0 },
    { 2, 128, 6, 1, 12, 16, 37, 16, .1f, 0 },
    { 1, 64, 12, 1, 12, 16, 20, 16, .1f, 1, 4 },
    { 2, 64, 8, 2, 64, 32, 0, 16, 0, 0, 2 },
    { 2, 64, 8, 2, 20, 16, 0, 16, .1f, 0, 2, .softcap = 1.5f, .sinks = true },
    { 1, 128, 2, 2, 64, 32, 40, 16, 0, 1, .softcap = 3, .sinks = true },
    { 2, 64, 4, 4, 24, 8, 0, 8, .1f, 1, .V = 16 },
    { 1, 64, 8, 2, 20, 16, 20, 16, 0, 0, 2, .softcap = 1.5f, .V = 37 },
    /* blocks and leaves of odd lengths, that cut pairs */
    { 1, 104, 4, 2, 17, 13, 0, 13, .1f, 1, .V = 9 },
    { 2, 80, 2, 1, 33, 5, 9, 5, 0, 0, .sinks = true },
};

/* In fp32, and of bf16 with each kind of dot product. */
enum { KINDS = 1 + DOT_KINDS };
#define EACH_CASE(i, kind)                                               \
    for (size_t i = 0; i < sizeof cut_shapes / sizeof *cut_shapes; i++) \
        for (int kind = 0; kind < KINDS; kind++)

static Problem case_of(size_t i, int kind)
{
    fresh();
    Problem p = cut_shapes[i];
    if (kind > 0) p.narrow = true, p.dot = (DotKind)(kind - 1);
    problem_fill(&p);
    return p;
}

static const char *kind_name(const Problem *p) { return p->narrow ? dot_name(p->dot) : "f32"; }

TEST(attention_is_its_scalar_definition)
{
    EACH_CASE(i, kind)
    {
        Problem p = case_of(i, kind);
        Cut cut = cut_whole(&p);
        Result got = result_new(&p), want = result_new(&p);
        char what[64];
        OK(play(&p, &cut, &got));
        for (int64_t b = 0; b < p.B; b++)
            for (int64_t t = 0; t < p.T; t++)
                for (int64_t h = 0; h < p.H; h++) {
                    define_row(&p, b, h, t, &want);
                    define_dq(&p, b, h, t, &want);
                }
        for (int64_t n = 0; n < p.B * p.T * p.K; n++)
            define_key(&p, n / p.T / p.K, n % p.K, n / p.K % p.T, &want);
        snprintf(what, sizeof what, "definition of case %d, %s", (int)i, kind_name(&p));
        check_same(&p, &got, &want, what);
    }
}

/* ---- cuts ---- */

/* Without the instruction; and with gradients of 16 bits, which are those of 32 rounded. */
static void check_narrow(const Problem *p, const Result *whole)
{
    Result slow = result_new(p), sums = result_new(p), want = *whole;
    Cut cut = cut_whole(p);
    cut.without_pairs = true;
    OK(play(p, &cut, &slow));
    check_same(p, whole, &slow, "without VDPBF16PS");
    cut = cut_whole(p);
    cut.narrow_sums = cut.grouped = true;
    OK(play(p, &cut, &sums));
    for (int r = DQ; r <= DV; r++) {
        want.x[r] = floats(result_count(p, r));
        for (int64_t e = 0; e < result_count(p, r); e++) want.x[r][e] = as_bf16(whole->x[r][e]);
    }
    check_same(p, &want, &sums, "sums of 16 bits");
}

static void check_cuts(const Problem *p, const Result *whole)
{
    char what[64];
    for (int isa = ISA_AVX512; isa < ISA_COUNT; isa++)
        for (int threads = 1; threads <= 3 && isa_supported((Isa)isa); threads++) {
            Cut cut = cut_whole(p);
            cut.isa = (Isa)isa, cut.threads = threads, cut.pad = threads, cut.grouped = threads != 2;
            Result r = result_new(p);
            OK(play(p, &cut, &r));
            snprintf(what, sizeof what, "%s, %d threads", isa_name((Isa)isa), threads);
            check_same(p, whole, &r, what);
        }
    if (p->narrow) check_narrow(p, whole);
    Result heads = result_new(p), samples = result_new(p), tight = result_new(p);
    for (int64_t i = 0; i < p->K; i++) {
        Cut cut = cut_whole(p);
        cut.k0 = i, cut.K = 1, cut.grouped = true;
        OK(play(p, &cut, &heads));
    }
    check_same(p, whole, &heads, "cut by heads");
    for (int64_t i = 0; i < p->B; i++) {
        Cut cut = cut_whole(p);
        cut.b0 = i, cut.B = 1, cut.grouped = true, cut.pad = 2 * p->C;
        OK(play(p, &cut, &samples));
    }
    check_same(p, whole, &samples, "cut by samples");
    Cut cut = cut_whole(p);
    cut.threads = 3, cut.workspace_bytes = 300 << 10;
    OK(play(p, &cut, &tight));
    check_same(p, whole, &tight, "small workspace");
}

/* What ranks in turn left: all of o, lse, dq; dk and dv meet in a tree over ranks. */
static void check_ranks(const Problem *p, const Result *whole, Result *rank, int64_t ranks, const char *what)
{
    for (int64_t step = 1; step < ranks; step *= 2)
        for (int64_t i = 0; i < ranks; i += 2 * step)
            for (int r = DK; r <= DV; r++)
                for (int64_t e = 0; e < result_count(p, r); e++) rank[i].x[r][e] += rank[i + step].x[r][e];
    check_same(p, whole, &rank[0], what);
}

static Result rank_result(const Problem *p, const Result *rank, int64_t i)
{
    Result own = result_new(p);
    for (int r = 0; r < RESULTS && i > 0; r++)
        if (r != DK && r != DV) own.x[r] = rank[0].x[r];
    if (i > 0) own.logit_max = rank[0].logit_max;
    return own;
}

/* Tensor parallel ranks that share key heads: each has some of a head's chunks of query heads. */
static void check_shared(const Problem *p, const Result *whole, int64_t sharing)
{
    Result rank[8];
    char what[64];
    for (int64_t i = 0; i < sharing; i++) {
        Cut cut = cut_whole(p);
        cut.K = 1, cut.sharing = sharing, cut.share = i;
        rank[i] = rank_result(p, rank, i);
        for (cut.k0 = 0; cut.k0 < p->K; cut.k0++) OK(play(p, &cut, &rank[i]));
    }
    snprintf(what, sizeof what, "%d ranks share key heads", (int)sharing);
    check_ranks(p, whole, rank, sharing, what);
}

/* Context parallel ranks. */
static void check_zigzag(const Problem *p, const Result *whole, int64_t cp)
{
    Result rank[8];
    for (int64_t i = 0; i < cp; i++) {
        Cut cut = cut_whole(p);
        cut.q = zigzag(p->T, cp, i);
        rank[i] = rank_result(p, rank, i);
        OK(play(p, &cut, &rank[i]));
    }
    char what[64];
    snprintf(what, sizeof what, "cp %d", (int)cp);
    check_ranks(p, whole, rank, cp, what);
}

/* The chunks of dk or dv in t [chunks * B, ...], one by one. */
static void take_chunks(const Problem *p, const Cut *cut, Spans keys, Tensor t, Result *chunk, int which)
{
    Tensor part = t;
    part.dim[0] = p->B;
    for (int64_t n = 0; n < t.dim[0] / p->B; n++) {
        part.data = (float *)t.data + n * tensor_rows(part) * t.ld;
        move(false, cut, keys, part, chunk[n].x[which], p, p->K, 0);
    }
}

/* Keys that come in several calls, and chunks of query heads whose dk and dv are left apart. */
static Err play_pieces(const Problem *p, int64_t pieces, Result *r, Result *chunk)
{
    const Cut cut = cut_whole(p);
    const int64_t chunks = p->chunks ? p->chunks : 1, S = p->T / pieces, pad = 3;
    const DType of = compute_of(p);
    Tensor q = guarded(of, p->B, p->T, p->H, p->C, pad), o = guarded(F32, p->B, p->T, p->H, p->V, pad),
           go = guarded(of, p->B, p->T, p->H, p->V, pad), dq = guarded(F32, p->B, p->T, p->H, p->C, pad),
           lse = guarded(F32, p->B, p->T, p->H, 0, pad), max = guarded(F32, p->B, p->T, p->H, 0, pad),
           sum = guarded(F32, p->B, p->T, p->H, 0, pad), delta = guarded(F32, p->B, p->T, p->H, 0, pad);
    Stream *s = device_of(p, &cut);
    Tensor sample = tensor_of((void *)(uintptr_t)p->sample, I64, p->B), sink = sinks_of(p, 0, p->H);
    move(true, &cut, cut.q, q, p->q, p, p->H, 0), move(true, &cut, cut.q, go, p->go, p, p->H, 0);
    for (int backward = 0; backward < 2; backward++) {
        const Tensor stored = guarded(of, p->B, p->T, p->H, p->V, pad); /* o, rounded by the caller */
        if (backward) {
            move(false, &cut, cut.q, o, r->x[O], p, p->H, 0);
            move(true, &cut, cut.q, stored, r->x[O], p, p->H, 0);
        }
        for (int64_t i = 0; i < pieces; i++) {
            const Spans keys = { { i * S, 0 }, { S, 0 } };
            Tensor k = guarded(of, p->B, S, p->K, p->C, pad), v = guarded(of, p->B, S, p->K, p->V, pad),
                   dk = guarded(F32, chunks * p->B, S, p->K, p->C, pad),
                   dv = guarded(F32, chunks * p->B, S, p->K, p->V, pad);
            move(true, &cut, keys, k, p->k, p, p->K, 0), move(true, &cut, keys, v, p->v, p, p->K, 0);
            if (!backward)
                TRY(op(s, attention_fwd, .o = o, .lse = lse, .max = max, .sum = sum,
                       .logit_max = tensor_of(r->logit_max, I64, p->H), .q = q, .k = k, .v = v, .sink = sink,
                       .doc = doc_of(p, &cut), .sample = sample, .q_span = cut.q, .k_span = keys, .scale = p->scale,
                       .softcap = p->softcap, .block = p->block, .window = p->window, .dropout = p->dropout,
                       .resumed = i > 0, .unfinished = i < pieces - 1));
            else
                TRY(op(s, attention_bwd, .dq = dq, .dk = dk, .dv = dv, .go = go, .q = q, .k = k, .v = v, .o = stored,
                       .lse = lse, .delta = delta, .doc = doc_of(p, &cut), .sample = sample, .q_span = cut.q,
                       .k_span = keys, .scale = p->scale, .softcap = p->softcap, .block = p->block, .window = p->window,
                       .dropout = p->dropout, .chunk = p->H / p->K / chunks, .leaf = p->leaf, .positions = p->T,
                       .resumed = i > 0));
            if (!backward) continue;
            take_chunks(p, &cut, keys, dk, chunk, DK), take_chunks(p, &cut, keys, dv, chunk, DV);
            CHECK(guards_whole(dk) && guards_whole(dv));
        }
    }
    move(false, &cut, cut.q, o, r->x[O], p, p->H, 0), move(false, &cut, cut.q, dq, r->x[DQ], p, p->H, 0);
    for (int64_t e = 0; e < result_count(p, O); e++) r->x[O][e] = as_stored(p, r->x[O][e]);
    move(false, &cut, cut.q, lse, r->x[LSE], p, p->H, 0);
    CHECK(guards_whole(o) && guards_whole(lse) && guards_whole(max) && guards_whole(sum) && guards_whole(dq));
    return ERR_OK;
}

static void check_pieces(const Problem *p, const Result *whole, int64_t pieces)
{
    Result chunk[8], got = result_new(p);
    const int64_t chunks = p->chunks ? p->chunks : 1;
    if (p->T % (pieces * p->block)) return;
    for (int64_t n = 0; n < chunks; n++) chunk[n] = result_new(p);
    OK(play_pieces(p, pieces, &got, chunk));
    for (int64_t step = 1; step < chunks; step *= 2)
        for (int64_t n = 0; n + step < chunks; n += 2 * step)
            for (int r = DK; r <= DV; r++)
                for (int64_t e = 0; e < result_count(p, r); e++) chunk[n].x[r][e] += chunk[n + step].x[r][e];
    got.x[DK] = chunk[0].x[DK], got.x[DV] = chunk[0].x[DV];
    check_same(p, whole, &got, "keys in pieces");
}

TEST(attention_has_the_same_bits_under_every_cut)
{
    EACH_CASE(i, kind)
    {
        Problem p = case_of(i, kind);
        Result whole = result_new(&p);
        Cut cut = cut_whole(&p);
        OK(play(&p, &cut, &whole));
        check_cuts(&p, &whole);
        for (int64_t pieces = 1; pieces <= 4; pieces *= 2) check_pieces(&p, &whole, pieces);
        for (int64_t n = 2; n <= p.chunks; n *= 2) check_shared(&p, &whole, n);
        for (int64_t cp = 1; cp <= 4 && !p.chunks; cp *= 2) check_zigzag(&p, &whole, cp); /* else a call a chunk */
        for (int64_t first = 40; first < 42; first++) { /* rows out of order: positions decide */
            Result turned = result_new(&p);
            cut.k = (Spans){ { first, 0 }, { p.T - first, first } };
            cut.q = (Spans){ { p.T / 2, 0 }, { p.T - p.T / 2, p.T / 2 } };
            OK(play(&p, &cut, &turned));
            check_same(&p, &whole, &turned, "rows out of order");
        }
    }
}

TEST_MAIN
