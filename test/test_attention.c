/*
 * Attention against float64 loops and finite differences, over disjoint key sets; dropout, NaN and
 * refusals. Its bits are the business of test_attention_bits.c.
 */
#include "attention_case.h"

/* ---- float64 ---- */

static double dot(const float *x, const float *y, int64_t n)
{
    double d = 0;
    for (int64_t i = 0; i < n; i++) d += (double)x[i] * (double)y[i];
    return d;
}

/* The score of query t and key s, before masks. */
static double score_of(const Problem *p, int64_t b, int64_t h, int64_t t, int64_t s)
{
    const double cap = (double)p->softcap;
    const int64_t kh = h / (p->H / p->K);
    const double x = (double)p->scale * dot(p->q + at(p, b, t, p->H, h), p->k + at(p, b, s, p->K, kh), p->C);
    return cap > 0 ? cap * tanh(x / cap) : x;
}

/* Row (b, h, t): the softmax into w, slopes of the scores into slope; returns its log-sum-exp. */
static double row_softmax(const Problem *p, int64_t b, int64_t h, int64_t t, double *w, double *slope)
{
    const double sink = p->sink ? (double)p->sink[h] : -INFINITY, cap = (double)p->softcap;
    double max = sink, sum = 0;
    int64_t kh = h / (p->H / p->K);
    for (int64_t s = 0; s < p->T; s++) {
        double x = dot(p->q + at(p, b, t, p->H, h), p->k + at(p, b, s, p->K, kh), p->C);
        x *= (double)p->scale;
        slope[s] = (double)p->scale;
        if (cap > 0) slope[s] *= 1 - pow(tanh(x / cap), 2), x = cap * tanh(x / cap);
        w[s] = visible(p, b, t, s) ? x : -INFINITY;
        max = fmax(max, w[s]);
    }
    for (int64_t s = 0; s < p->T; s++) sum += w[s] = exp(w[s] - max);
    sum += exp(sink - max);
    for (int64_t s = 0; s < p->T; s++) w[s] /= sum;
    return max + log(sum);
}

static void row_reference(const Problem *p, int64_t b, int64_t h, int64_t t, double *const out[RESULTS])
{
    double w[512], dw[512], slope[512], delta = 0;
    int64_t C = p->C, V = p->V, kh = h / (p->H / p->K), qa = at(p, b, t, p->H, h), oa = at_v(p, b, t, p->H, h);
    out[LSE][(b * p->T + t) * p->H + h] = row_softmax(p, b, h, t, w, slope);
    for (int64_t s = 0; s < p->T; s++) {
        int64_t va = at_v(p, b, s, p->K, kh);
        double keep = keep_of(p, b, h, t, s);
        dw[s] = keep * dot(p->go + oa, p->v + va, V);
        delta += w[s] * dw[s];
        for (int64_t c = 0; c < V; c++) {
            out[O][oa + c] += w[s] * keep * (double)p->v[va + c];
            out[DV][va + c] += w[s] * keep * (double)p->go[oa + c];
        }
    }
    for (int64_t s = 0; s < p->T; s++) {
        int64_t ka = at(p, b, s, p->K, kh);
        double ds = w[s] * (dw[s] - delta) * slope[s];
        for (int64_t c = 0; c < C; c++) {
            out[DQ][qa + c] += ds * (double)p->k[ka + c];
            out[DK][ka + c] += ds * (double)p->q[qa + c];
        }
    }
}

/* Over all samples and queries, of the keys that each sees. */
static double largest_score(const Problem *p, int64_t h)
{
    double most = -INFINITY;
    for (int64_t i = 0; i < p->B * p->T * p->T; i++) {
        const int64_t b = i / p->T / p->T, t = i / p->T % p->T, s = i % p->T;
        if (visible(p, b, t, s)) most = fmax(most, score_of(p, b, h, t, s));
    }
    return most;
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
    for (int64_t h = 0; h < p->H; h++) {
        const double most = (double)logit_of_order(got->logit_max[h]), want = largest_score(p, h);
        CHECK_MSG(fabs(most - want) <= 3e-6 * fmax(1, fabs(want)), "%s: largest score %g, not %g", what, most, want);
    }
}

/* ---- cases ---- */

static const Problem shapes[] = {
    /* B  T   H  K   C block window leaf drop docs chunks */
    { 1, 1, 1, 1, 4, 8, 0, 8, 0, 0 },       { 2, 17, 4, 2, 8, 8, 0, 8, 0, 0 },
    { 1, 63, 2, 1, 16, 64, 0, 16, 0, 0 },   { 1, 64, 2, 2, 15, 64, 0, 64, 0, 0 },
    { 1, 65, 2, 1, 17, 64, 0, 13, 0, 0 },   { 1, 129, 1, 1, 64, 64, 0, 32, 0, 0 },
    { 1, 100, 8, 1, 20, 32, 7, 25, 0, 0, 4 }, { 3, 40, 3, 3, 64, 16, 0, 8, 0, 1 },
    { 1, 70, 2, 2, 256, 64, 0, 70, .3f, 0 }, { 2, 33, 6, 2, 80, 8, 9, 8, .2f, 1, 3 },
    { 1, 257, 2, 1, 32, 128, 64, 64, .1f, 1 }, { 1, 31, 8, 1, 5, 1000, 1, 4, .5f, 0 },
    { 2, 50, 5, 5, 1, 5, 0, 10, 0, 1 },     { 1, 200, 2, 2, 48, 24, 100, 50, 0, 0 },
    { 1, 70, 4, 2, 16, 16, 0, 16, 0, 0, .softcap = 2 },
    { 2, 33, 4, 4, 24, 8, 0, 8, 0, 1, .sinks = true },
    { 1, 129, 6, 2, 64, 64, 20, 32, .2f, 1, 3, .softcap = .5f, .sinks = true },
    /* values of another width than keys */
    { 1, 70, 2, 2, 192, 64, 0, 64, 0, 0, .V = 128 },
    { 2, 33, 4, 2, 24, 8, 9, 8, .2f, 1, .V = 16 },
    { 1, 65, 6, 1, 17, 16, 0, 13, .1f, 0, 3, .softcap = 2, .sinks = true, .V = 33 },
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
            cut.isa = (Isa)isa, cut.threads = 2, cut.pad = i % 3, cut.grouped = i % 2;
            Result r = result_new(&p);
            OK(play(&p, &cut, &r));
            char what[160];
            snprintf(what, sizeof what, "%s B %d T %d H %d K %d C %d V %d", isa_name((Isa)isa), (int)p.B, (int)p.T,
                     (int)p.H, (int)p.K, (int)p.C, (int)p.V);
            check_reference(&p, &r, what);
        }
}

static double objective(const Problem *p)
{
    double w[512], slope[512], sum = 0;
    for (int64_t i = 0; i < p->B * p->H * p->T; i++) {
        int64_t b = i / p->T / p->H, h = i / p->T % p->H, t = i % p->T, kh = h / (p->H / p->K);
        row_softmax(p, b, h, t, w, slope);
        for (int64_t s = 0; s < p->T; s++)
            sum += w[s] * keep_of(p, b, h, t, s) *
                   dot(p->go + at_v(p, b, t, p->H, h), p->v + at_v(p, b, s, p->K, kh), p->V);
    }
    return sum;
}

static void check_differences(Problem p)
{
    fresh();
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

TEST(attention_gradients_match_finite_differences)
{
    check_differences((Problem){ 2, 6, 4, 2, 3, 2, 4, 2, .25f, 1 });
    check_differences((Problem){ 2, 6, 4, 2, 3, 2, 4, 2, .25f, 1, .softcap = .7f, .sinks = true });
    check_differences((Problem){ 2, 6, 4, 2, 3, 2, 4, 2, .25f, 1, .V = 5 });
}

/* A sink far above the scores takes nearly all, one far below nothing. */
TEST(attention_sinks_at_the_ends)
{
    fresh();
    Problem p = { 1, 40, 2, 1, 16, 16, 0, 8, 0, 0, .sinks = true };
    problem_fill(&p);
    Cut cut = cut_whole(&p);
    Result sunk = result_new(&p), plain = result_new(&p);
    p.sink[0] = 200, p.sink[1] = -200;
    OK(play(&p, &cut, &sunk));
    p.sink = NULL;
    OK(play(&p, &cut, &plain));
    CHECK(!memcmp(sunk.logit_max, plain.logit_max, 2 * sizeof *plain.logit_max)); /* (a sink is no score of a key) */
    for (int64_t t = 0; t < p.T; t++) {
        CHECK(sunk.x[LSE][2 * t] == 200 && sunk.x[LSE][2 * t + 1] == plain.x[LSE][2 * t + 1]);
        for (int64_t c = 0; c < p.C; c++) {
            CHECK(fabsf(sunk.x[O][at(&p, 0, t, 2, 0) + c]) < 1e-30f);
            CHECK(sunk.x[O][at(&p, 0, t, 2, 1) + c] == plain.x[O][at(&p, 0, t, 2, 1) + c]);
        }
    }
}

/* ---- partial key sets ---- */

/* a = the attention over the keys of both. */
static void join(const Problem *p, Result *a, const Result *b)
{
    for (int64_t i = 0; i < result_count(p, LSE); i++) {
        float *lse = &a->x[LSE][i], *o = a->x[O] + i * p->C;
        const double most = fmax(*lse, b->x[LSE][i]);
        if (most == -INFINITY) continue;
        const double w = exp(*lse - most), w2 = exp(b->x[LSE][i] - most);
        for (int64_t c = 0; c < p->C; c++) o[c] = (float)((o[c] * w + b->x[O][i * p->C + c] * w2) / (w + w2));
        *lse = (float)(most + log(w + w2));
    }
}

/* Only keys of a few positions: most rows of the first ones see nothing. */
TEST(attention_over_disjoint_key_sets)
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
        join(&p, &part[3], &part[2]); /* rows that neither sees stay empty */
        join(&p, &part[0], &part[1]);
        CHECK(part[3].x[LSE][0] == -INFINITY && part[3].x[O][0] == 0);
        join(&p, &part[3], &part[0]);
        for (int64_t i = 0; i < result_count(&p, O); i++)
            CHECK_CLOSE(part[3].x[O][i], whole.x[O][i], 1e-6, "o");
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
                const Dropout *d = &p.dropout;
                bool keep = j <= t && dropout_keep_attn(d->key, d->threshold, p.sample[b], 1, t, j);
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
    CHECK(isfinite(logit_of_order(r.logit_max[0])) && isnan(logit_of_order(r.logit_max[1])));
    p.q[at(&p, 0, 20, 2, 1) + 3] = 1;
    p.k[at(&p, 0, 10, 1, 0)] = NAN; /* (one score of many in a row) */
    r = result_new(&p);
    OK(play(&p, &cut, &r));
    CHECK(isnan(logit_of_order(r.logit_max[0])) && isnan(logit_of_order(r.logit_max[1])));
}

/* Integers order as floats do, NaN above all and nothing below all, and come back as they were. */
TEST(logits_in_order)
{
    static const float ascending[] = { -INFINITY, -3e38f, -1, -1e-40f, 0, 1e-40f, 1, 100, 3e38f, INFINITY };
    enum { N = sizeof ascending / sizeof *ascending };
    for (int i = 0; i < N; i++) {
        const int64_t order = logit_order(ascending[i]);
        const float back = logit_of_order(order);
        CHECK(order > (i ? logit_order(ascending[i - 1]) : 0) && order < logit_order(NAN) && order < logit_order(-NAN));
        CHECK(!memcmp(&back, &ascending[i], sizeof back));
    }
    CHECK(isnan(logit_of_order(logit_order(NAN))) && logit_of_order(0) == -INFINITY);
    CHECK(logit_of_order(logit_order(-0.0f)) == 0);
}

/* Where all scores are negative, places behind the last query, and masked ones, are no scores of 0. */
TEST(attention_largest_of_negative_scores)
{
    for (int i = 0; i < 2; i++) {
        fresh();
        Problem p = { 2, 35, 2, 1, 8, 8, i ? 5 : 0, 8, 0, i };
        problem_fill(&p);
        for (int64_t n = 0; n < result_count(&p, DQ); n++) p.q[n] = fabsf(p.q[n]) + 0.1f;
        for (int64_t n = 0; n < result_count(&p, DK); n++) p.k[n] = -fabsf(p.k[n]) - 0.1f;
        Cut cut = cut_whole(&p);
        Result r = result_new(&p);
        OK(play(&p, &cut, &r));
        check_reference(&p, &r, "negative scores");
        CHECK(logit_of_order(r.logit_max[0]) < 0 && logit_of_order(r.logit_max[1]) < 0);
    }
}

/* A head whose queries see no key has a maximum of -Inf, and one that a smaller score does not change. */
TEST(attention_largest_score_of_nothing)
{
    fresh();
    Problem p = { 1, 32, 2, 1, 8, 8, 0, 8, 0, 0 };
    problem_fill(&p);
    Cut cut = cut_whole(&p);
    Result r = result_new(&p);
    cut.q = spans_run(0, 16), cut.k = spans_run(16, 16), cut.forward_only = true;
    r.logit_max[1] = logit_order(1e4f);
    OK(play(&p, &cut, &r));
    CHECK(logit_of_order(r.logit_max[0]) == -INFINITY && logit_of_order(r.logit_max[1]) == 1e4f);
    cut = cut_whole(&p), cut.forward_only = true;
    OK(play(&p, &cut, &r));
    CHECK(fabsf(logit_of_order(r.logit_max[0]) - (float)largest_score(&p, 0)) < 1e-5f);
    CHECK(logit_of_order(r.logit_max[1]) == 1e4f);
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
    FAILS(play(&p, &cut, &r), ERR_SHAPE, "block is 0");
    p.block = 8, p.leaf = 0;
    FAILS(play(&p, &cut, &r), ERR_SHAPE, "leaf is 0");
    p.leaf = 8, p.chunks = 4;
    FAILS(play(&p, &cut, &r), ERR_SHAPE, "chunks of 0 query heads, 2 for a key head");
}

TEST_MAIN
