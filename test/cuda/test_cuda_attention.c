/*
 * Attention: cuda/attention*.cu. Against the CPU twin in fp32 on the same rounded inputs.
 *
 * Tolerances, relative to the larger of the element and the tensor's rms; u = 2^-9 for bf16, 2^-12 for fp16.
 * Weights, ds and results are rounded to u; an error is the sum of the terms' roundings, u / sqrt(3) of the root of
 * their sum of squares. Terms are largest in the first rows: key 0 has the weights 1, 1/2, 1/3, ..., root 1.3 against
 * an rms of the sums of 0.16 (numbers are uniform in +-1): 2.7 u for one standard deviation, 12 u for the largest of
 * 1e5. So gradients are allowed 16 u. A row of o has weights that sum to 1: half of that. lse and delta are fp32.
 */
#include "base/rng.h"
#include "cuda_case.h"

typedef struct {
    int64_t B, H, K, C;
    Spans q, k; /* count 0 and 0 in k: as q */
    int64_t window;
    int docs, gap;
    double drop, softcap;
    int sinks;
    int64_t V; /* width of values; 0: as keys */
    /* queries and dq are columns of a fused projection: those of a key head side by side, two heads apart */
    int grouped;
} Shape;

enum { POSITIONS = 512, HEAD0 = 3 };

static const char *shape_name(DType T, const Shape *s)
{
    static char name[256];
    snprintf(name, sizeof name,
             "%s B %d H %d K %d C %d V %d q %d+%d %d+%d k %d+%d %d+%d window %d docs %d gap %d drop %g softcap %g "
             "sinks %d grouped %d",
             dtype_name(T),
             (int)s->B, (int)s->H, (int)s->K, (int)s->C, (int)(s->V ? s->V : s->C), (int)s->q.first[0],
             (int)s->q.count[0], (int)s->q.first[1],
             (int)s->q.count[1], (int)s->k.first[0], (int)s->k.count[0], (int)s->k.first[1], (int)s->k.count[1],
             (int)s->window, s->docs, s->gap, s->drop, s->softcap, s->sinks, s->grouped);
    return name;
}

/* [B, rows, heads, C] with `gap` numbers behind each row of C. */
static Pair heads_random(CudaCase *c, DType T, double scale, const Shape *s, int64_t rows, int64_t heads)
{
    return pair_random(c, T, scale, s->B, rows, heads, s->C + s->gap);
}

static Pair without_gap(Pair p, const Shape *s)
{
    for (int side = 0; side < 2; side++) p.t[side].dim[3] = s->C;
    return p;
}

/* Like without_gap's, with random numbers in a matrix of chunks: all. */
static Pair query_heads(Pair *all, CudaCase *c, DType T, double scale, const Shape *s, int64_t rows)
{
    const int64_t group = s->H / s->K;
    if (!s->grouped) return without_gap(*all = heads_random(c, T, scale, s, rows, s->H), s);
    Pair p = *all = pair_random(c, T, scale, s->B, rows, s->K, (group + 2) * s->C + s->gap);
    for (int side = 0; side < 2; side++) p.t[side].dim[2] = s->H, p.t[side].dim[3] = s->C, p.t[side].group = group;
    return p;
}

/* First position of the document of each query; documents are about 20 positions long, or as many as `docs`, or
 * exactly as many as its negative says. */
static Pair documents(CudaCase *c, const Shape *s, int64_t T)
{
    int32_t start[POSITIONS], doc[4 * POSITIONS];
    ASSERT(s->B * T <= 4 * POSITIONS);
    for (int64_t b = 0; b < s->B; b++) {
        for (int i = 0; i < POSITIONS; i++)
            start[i] = s->docs < 0 ? i / -s->docs * -s->docs
                       : i == 0 || test_rand(&c->random) % (s->docs > 1 ? s->docs : 20) == 0 ? i : start[i - 1];
        for (int64_t t = 0; t < T; t++) doc[b * T + t] = start[spans_position(s->q, t)];
    }
    return pair_values(c, I32, doc, s->B, T);
}

static Pair samples(CudaCase *c, const Shape *s)
{
    int64_t sample[8];
    for (int64_t b = 0; b < s->B; b++) sample[b] = b * 7 + 2 + (b << 33);
    return pair_values(c, I64, sample, s->B);
}

static double unit_of(DType T) { return T == BF16 ? 0x1p-9 : T == F16 ? 0x1p-12 : 1.25e-6; }

/* What would be 0 in exact arithmetic: rows that see only themselves have a constant softmax. */
static void check_zero(CudaCase *c, Pair p, const char *what)
{
    const double limit = 1e-5;
    int64_t bad = 0;
    OK(device_read(&c->dev[CASE_GPU].stream, c->first, p.t[CASE_GPU].data, tensor_bytes(p.t[CASE_GPU])));
    for (int64_t i = 0; i < tensor_count(p.t[CASE_GPU]); i++) {
        const double x = fabs((double)case_load(c->first, p.t[CASE_GPU].dtype, i));
        if (!(x <= limit)) bad++;
    }
    CHECK_MSG(bad == 0, "%s: %lld elements are not 0", what, (long long)bad);
}

/* Largest scores of heads, of the kernel and of its twin. Where a row sees only itself a score may be near 0. */
static void check_logits(CudaCase *c, Pair p, const char *name)
{
    int64_t got[64], heads = tensor_count(p.t[CASE_GPU]);
    OK(device_read(&c->dev[CASE_GPU].stream, got, p.t[CASE_GPU].data, heads * (int64_t)sizeof *got));
    for (int64_t h = 0; h < heads; h++) {
        const float want = logit_of_order(((const int64_t *)p.t[CASE_CPU].data)[h]), most = logit_of_order(got[h]);
        CHECK_MSG(most == want || fabsf(most - want) <= 1e-5f * fmaxf(1, fabsf(want)),
                  "largest score of head %d: %.8g, not %.8g, %s", (int)h, (double)most, (double)want, name);
    }
}

static void attention_case(DType T, Shape s)
{
    CudaCase *c = case_open();
    if (s.k.count[0] + s.k.count[1] == 0) s.k = s.q;
    const int64_t rows = s.q.count[0] + s.q.count[1], keys = s.k.count[0] + s.k.count[1];
    const char *name = shape_name(T, &s);
    const float scale = 1.0f / sqrtf((float)s.C);
    const Dropout dropout = { 0x123456789ABCDEF, dropout_threshold((float)s.drop), 1 / (1 - (float)s.drop) };
    Shape values = s;
    if (s.V) values.C = s.V;
    Pair q, q_ = query_heads(&q, c, T, 3, &s, rows), k = heads_random(c, T, 1, &s, keys, s.K);
    Pair v = heads_random(c, T, 1, &values, keys, s.K), o = heads_random(c, T, 1, &values, rows, s.H);
    Pair lse = pair_output(c, F32, s.B, rows, s.H), sample = samples(c, &s), doc = { 0 }, sink = { 0 };
    Pair logits = pair_zero(c, I64, s.H);
    if (s.sinks) sink = pair_random(c, T, 2, s.H);
    if (s.docs) doc = documents(c, &s, rows);
    Pair k_ = without_gap(k, &s), v_ = without_gap(v, &values), o_ = without_gap(o, &values);
    BOTH(c, attention_fwd, .o = AT(o_), .lse = AT(lse), .logit_max = AT(logits), .q = AT(q_), .k = AT(k_), .v = AT(v_),
         .sink = AT(sink), .doc = AT(doc), .sample = AT(sample), .q_span = s.q, .k_span = s.k, .scale = scale,
         .softcap = (float)s.softcap, .block = 64, .window = s.window, .dropout = dropout, .head0 = HEAD0);
    pair_check(c, o, 8 * unit_of(T), "o, %s", name);
    pair_check(c, lse, 1e-5, "lse, %s", name);
    check_logits(c, logits, name);

    /* backward from the CPU's results, rounded: the same on both sides */
    o = pair_values(c, T, o.t[CASE_CPU].data, s.B, rows, s.H, values.C + s.gap);
    lse = pair_values(c, F32, lse.t[CASE_CPU].data, s.B, rows, s.H);
    o_ = without_gap(o, &values);
    Pair go = heads_random(c, T, 1, &values, rows, s.H), dq, dq_ = query_heads(&dq, c, T, 1, &s, rows);
    Pair dk = heads_random(c, T, 1, &s, keys, s.K), dv = heads_random(c, T, 1, &values, keys, s.K);
    Pair delta = pair_output(c, F32, s.B, rows, s.H), go_ = without_gap(go, &values);
    Pair dk_ = without_gap(dk, &s), dv_ = without_gap(dv, &values);
    BOTH(c, attention_bwd, .dq = AT(dq_), .dk = AT(dk_), .dv = AT(dv_), .go = AT(go_), .q = AT(q_), .k = AT(k_),
         .v = AT(v_), .o = AT(o_), .lse = AT(lse), .delta = AT(delta), .doc = AT(doc), .sample = AT(sample),
         .q_span = s.q, .k_span = s.k, .scale = scale, .softcap = (float)s.softcap, .block = 64, .window = s.window,
         .dropout = dropout, .head0 = HEAD0, .chunk = s.H / s.K, .leaf = 64, .positions = POSITIONS);
    pair_check(c, delta, 1e-5, "delta, %s", name);
    pair_check(c, dv, 16 * unit_of(T), "dv, %s", name);
    if (s.window == 1 || rows == 1) {
        check_zero(c, dq, name);
        check_zero(c, dk, name);
    } else {
        pair_check(c, dq, 16 * unit_of(T), "dq, %s", name);
        pair_check(c, dk, 16 * unit_of(T), "dk, %s", name);
    }
    case_close(c);
}

static Spans run(int64_t first, int64_t count) { return (Spans){ { first, 0 }, { count, 0 } }; }

static const DType types[] = { F32, BF16, F16 };

/* One row to more than a block of 128 and tiles of 64. */
TEST(attention_lengths)
{
    static const int64_t lengths[] = { 1, 15, 16, 17, 63, 64, 65, 130 };
    for (int i = 0; i < 8; i++) {
        attention_case(types[i % 3], (Shape){ .B = 1, .H = 1, .K = 1, .C = 64, .q = run(0, lengths[i]) });
        attention_case(types[(i + 1) % 3],
                       (Shape){
                           .B = 1 + i % 2, .H = 2, .K = 1, .C = 32, .q = run(0, lengths[i]), .window = i % 2 * 40 });
    }
}

/* More tiles than the rings of Hopper's kernels have stages, and more work than blocks; a last tile that is not
 * full. */
TEST(attention_rings)
{
    for (int i = 0; i < 2; i++) {
        const int64_t C = i ? 128 : 64;
        const DType T = types[1 + i];
        attention_case(T, (Shape){ .B = 2, .H = 2, .K = 2, .C = C, .q = run(0, 461) });
        attention_case(T, (Shape){ .B = 1, .H = 2, .K = 2, .C = C, .q = run(0, 449), .window = 150, .gap = 8 });
        attention_case(T, (Shape){ .B = 1, .H = 2, .K = 1, .C = C, .q = run(0, 500), .docs = 1, .drop = .1,
                                   .grouped = 1 });
    }
}

/* Where queries are two runs and keys one, or the other way round, as context parallelism has them: a warpgroup leaves
 * out as many tiles in a row as a ring has stages, short ones among them, while it still holds one. */
TEST(attention_rings_left_out)
{
    const Spans middle = { { 160, 320 }, { 160, 160 } }, last = { { 300, 400 }, { 100, 100 } };
    const Spans short_first = { { 0, 65 }, { 65, 127 } }, two = { { 0, 70 }, { 70, 130 } };
    attention_case(BF16, (Shape){ .B = 1, .H = 2, .K = 1, .C = 128, .q = middle, .k = run(0, 640) });
    attention_case(F16, (Shape){ .B = 1, .H = 2, .K = 1, .C = 128, .q = last, .k = run(0, 800), .drop = .1 });
    attention_case(BF16, (Shape){ .B = 1, .H = 2, .K = 1, .C = 256, .q = run(0, 128), .k = short_first });
    attention_case(F16, (Shape){ .B = 2, .H = 3, .K = 3, .C = 128, .q = run(0, 200), .k = two });
}

/* Each width of tile, full and padded. */
TEST(attention_widths)
{
    static const int64_t widths[] = { 8, 32, 40, 64, 80, 96, 104, 128, 136, 192, 200, 256 };
    for (int t = 0; t < 3; t++)
        for (int i = 0; i < 12; i++)
            attention_case(
                types[t],
                (Shape){ .B = 1, .H = 1, .K = 1, .C = widths[i], .q = run(0, i % 2 ? 65 : 33), .gap = i % 4 * 8 });
}

/* Where a block has the least shared memory that any GPU grants: the widths whose tiles are then smaller. */
TEST(attention_little_shared_memory)
{
    Device *gpu = &case_open()->dev[CASE_GPU];
    const int64_t all = gpu->shared_bytes;
    CHECK_MSG(all >= 99 << 10, "%lld bytes", (long long)all);
    gpu->shared_bytes = 99 << 10;
    for (int t = 0; t < 3; t++)
        for (int64_t C = 128; C <= 256; C *= 2) {
            attention_case(types[t], (Shape){ .B = 1, .H = 2, .K = 1, .C = C, .q = run(0, 66), .drop = .2 });
            attention_case(types[t],
                           (Shape){ .B = 1, .H = 1, .K = 1, .C = C, .q = run(3, 40), .softcap = 1, .docs = 1 });
        }
    gpu->shared_bytes = all;
}

/* Values of another width than keys: narrower as in latent attention, or wider, each engine. */
TEST(attention_widths_of_values)
{
    for (int t = 0; t < 3; t++) {
        attention_case(types[t], (Shape){ .B = 1, .H = 2, .K = 2, .C = 192, .V = 128, .q = run(0, 70) });
        attention_case(types[t],
                       (Shape){ .B = 2, .H = 2, .K = 2, .C = 24, .V = 16, .q = run(0, 66), .docs = 1, .gap = 8 });
    }
    attention_case(BF16, (Shape){ .B = 1, .H = 2, .K = 1, .C = 64, .V = 96, .q = run(0, 65), .drop = .2 });
    attention_case(F32, (Shape){ .B = 1, .H = 1, .K = 1, .C = 40, .V = 72, .q = run(0, 40), .softcap = 1 });
    attention_case(F16,
                   (Shape){ .B = 1, .H = 1, .K = 1, .C = 128, .V = 64, .q = run(0, 70), .softcap = 1, .window = 33 });
}

/* Queries where the projection has left them, in groups of 1, 2, 3 and 8. */
TEST(attention_query_groups)
{
    static const int64_t group[] = { 1, 2, 3, 8 };
    for (int t = 0; t < 3; t++)
        for (int i = 0; i < 4; i++)
            attention_case(types[t], (Shape){ .B = 1 + i % 2, .H = 2 * group[i], .K = 2, .C = i % 2 ? 32 : 64,
                                              .q = run(0, 70), .gap = (t + i) % 2 * 8, .grouped = 1 });
    for (int64_t C = 96; C <= 256; C += 32) /* each engine */
        attention_case(types[C / 32 % 3], (Shape){ .B = 1, .H = 6, .K = 2, .C = C, .q = run(0, 40), .docs = 1,
                                                   .softcap = C % 64 ? 1 : 0, .grouped = 1 });
}

TEST(attention_grouped_heads)
{
    for (int t = 0; t < 3; t++) {
        attention_case(types[t], (Shape){ .B = 2, .H = 4, .K = 1, .C = 32, .q = run(0, 33) });
        attention_case(types[t], (Shape){ .B = 1, .H = 4, .K = 2, .C = 64, .q = run(0, 70), .docs = 1, .gap = 8 });
        attention_case(types[t], (Shape){ .B = 2, .H = 3, .K = 3, .C = 16, .q = run(0, 17), .gap = 8 });
    }
}

/* Edges of the mask on, before and behind edges of tiles; documents; tiles that nobody sees. */
TEST(attention_masks)
{
    static const int64_t windows[] = { 1, 16, 31, 32, 33, 64, 65, 129 };
    for (int i = 0; i < 8; i++)
        attention_case(types[i % 3],
                       (Shape){ .B = 1, .H = 1, .K = 1, .C = 32, .q = run(0, 130), .window = windows[i] });
    for (int t = 0; t < 3; t++) {
        attention_case(types[t], (Shape){ .B = 2, .H = 1, .K = 1, .C = 32, .q = run(0, 131), .docs = 1 });
        attention_case(types[t], (Shape){ .B = 1, .H = 2, .K = 1, .C = 64, .q = run(0, 300), .docs = 1, .window = 25 });
    }
}

/* Spans of context parallelism: two runs of positions, keys of another rank, rows that see no key at all. */
TEST(attention_spans)
{
    const Spans zigzag = { { 0, 90 }, { 30, 30 } }, second = { { 30, 60 }, { 30, 30 } };
    const Spans reversed = { { 101, 7 }, { 37, 66 } }, odd = { { 5, 150 }, { 69, 1 } };
    for (int t = 0; t < 3; t++) {
        attention_case(types[t], (Shape){ .B = 1, .H = 2, .K = 1, .C = 32, .q = zigzag });
        attention_case(types[t], (Shape){ .B = 1, .H = 1, .K = 1, .C = 64, .q = zigzag, .k = second, .docs = 1 });
        attention_case(types[t], (Shape){ .B = 2, .H = 1, .K = 1, .C = 32, .q = second, .k = zigzag, .window = 45 });
        attention_case(types[t], (Shape){ .B = 1, .H = 2, .K = 2, .C = 40, .q = reversed, .k = odd });
        attention_case(types[t], (Shape){ .B = 1, .H = 1, .K = 1, .C = 32, .q = odd, .k = reversed, .drop = .2 });
    }
    attention_case(BF16, (Shape){ .B = 1, .H = 1, .K = 1, .C = 64, .q = run(0, 40), .k = run(40, 20) });
    attention_case(F32, (Shape){ .B = 1, .H = 1, .K = 1, .C = 64, .q = run(100, 40), .k = run(0, 20) });
}

/* Masks drawn four keys a call, and one by one where positions are no multiples of four. */
TEST(attention_dropout)
{
    for (int t = 0; t < 3; t++) {
        attention_case(types[t], (Shape){ .B = 2, .H = 2, .K = 1, .C = 32, .q = run(0, 70), .drop = .3 });
        attention_case(types[t], (Shape){ .B = 1, .H = 1, .K = 1, .C = 64, .q = run(3, 66), .drop = .3 });
        attention_case(types[t], (Shape){ .B = 1, .H = 1, .K = 1, .C = 128, .q = run(4, 130), .drop = .1 });
    }
    attention_case(BF16, (Shape){ .B = 1, .H = 1, .K = 1, .C = 200, .q = run(0, 65), .drop = .2 });
}

/* Capped scores in every width's engine, with masked tiles and without. */
TEST(attention_softcap)
{
    static const int64_t widths[] = { 32, 64, 96, 128, 192, 256 };
    for (int i = 0; i < 6; i++)
        attention_case(types[i % 3], (Shape){ .B = 1, .H = 2, .K = 1, .C = widths[i], .q = run(0, 70), .softcap = .7 });
    for (int t = 0; t < 3; t++) {
        attention_case(types[t],
                       (Shape){ .B = 1, .H = 1, .K = 1, .C = 64, .q = run(0, 130), .softcap = 2, .window = 40 });
        attention_case(types[t],
                       (Shape){ .B = 2, .H = 2, .K = 2, .C = 32, .q = run(0, 66), .softcap = .5, .drop = .3 });
        attention_case(types[t],
                       (Shape){ .B = 1, .H = 1, .K = 1, .C = 32, .q = run(0, 131), .softcap = .5, .docs = 1 });
    }
}

TEST(attention_sinks)
{
    for (int t = 0; t < 3; t++) {
        attention_case(types[t], (Shape){ .B = 2, .H = 4, .K = 2, .C = 32, .q = run(0, 70), .sinks = 1 });
        attention_case(types[t], (Shape){ .B = 1, .H = 2, .K = 1, .C = 64, .q = run(0, 130), .sinks = 1, .window = 33,
                                          .drop = .2 });
        attention_case(types[t],
                       (Shape){ .B = 1, .H = 2, .K = 1, .C = 128, .q = run(0, 40), .sinks = 1, .softcap = 1 });
    }
    attention_case(BF16, (Shape){ .B = 1, .H = 1, .K = 1, .C = 64, .q = run(0, 40), .k = run(40, 20), .sinks = 1 });
}

static void sink_case(DType T, int64_t N, int64_t H)
{
    CudaCase *c = case_open();
    Pair dsink = pair_output(c, T, N, H), sink = pair_random(c, T, 2, H);
    Pair lse = pair_random(c, F32, 2, N, H), delta = pair_random(c, F32, 1, N, H);
    BOTH(c, sink_bwd, .dsink = AT(dsink), .sink = AT(sink), .lse = AT(lse), .delta = AT(delta));
    pair_check(c, dsink, case_tolerance(T), "dsink %s N %d H %d", dtype_name(T), (int)N, (int)H);
    case_close(c);
}

TEST(attention_sink_gradients)
{
    for (int t = 0; t < 3; t++) {
        sink_case(types[t], 1, 1);
        sink_case(types[t], 33, 12);
        sink_case(types[t], 130, 4);
    }
}

/* ---- keys in several calls ---- */

enum { PARTS = 4 };

/* Keys in PARTS calls, or (one call) all at once, with o and dq in fp32. */
static void parts_case(DType T, Shape s, int parts)
{
    CudaCase *c = case_open();
    const int64_t rows = s.q.count[0] + s.q.count[1], length = s.k.count[0] / parts;
    const char *name = shape_name(T, &s);
    const float scale = 1.0f / sqrtf((float)s.C);
    const Dropout dropout = { 0x123456789ABCDEF, dropout_threshold((float)s.drop), 1 / (1 - (float)s.drop) };
    Pair q = heads_random(c, T, 3, &s, rows, s.H), k[PARTS], v[PARTS], sample = samples(c, &s), doc = { 0 },
         sink = { 0 };
    Pair o = pair_output(c, F32, s.B, rows, s.H, s.C), lse = pair_output(c, F32, s.B, rows, s.H);
    Pair max = pair_output(c, F32, s.B, rows, s.H), sum = pair_output(c, F32, s.B, rows, s.H);
    Pair logits = pair_zero(c, I64, s.H);
    if (s.sinks) sink = pair_random(c, T, 2, s.H);
    if (s.docs) doc = documents(c, &s, rows);
    for (int i = 0; i < parts; i++) {
        k[i] = heads_random(c, T, 1, &s, length, s.K), v[i] = heads_random(c, T, 1, &s, length, s.K);
        BOTH(c, attention_fwd, .o = AT(o), .lse = AT(lse), .max = AT(max), .sum = AT(sum), .logit_max = AT(logits),
             .q = AT(q), .k = AT(k[i]), .v = AT(v[i]), .sink = AT(sink), .doc = AT(doc), .sample = AT(sample),
             .q_span = s.q, .k_span = run(s.k.first[0] + i * length, length), .scale = scale,
             .softcap = (float)s.softcap, .block = 64, .window = s.window, .dropout = dropout, .head0 = HEAD0,
             .resumed = i > 0, .unfinished = i + 1 < parts);
    }
    pair_check(c, o, 8 * unit_of(T), "o of %d parts, %s", parts, name);
    pair_check(c, lse, 1e-5, "lse of %d parts, %s", parts, name);
    check_logits(c, logits, name);

    o = pair_values(c, T, o.t[CASE_CPU].data, s.B, rows, s.H, s.C);
    lse = pair_values(c, F32, lse.t[CASE_CPU].data, s.B, rows, s.H);
    Pair go = heads_random(c, T, 1, &s, rows, s.H), dq = pair_output(c, F32, s.B, rows, s.H, s.C);
    Pair delta = pair_output(c, F32, s.B, rows, s.H);
    for (int i = 0; i < parts; i++) {
        Pair dk = heads_random(c, T, 1, &s, length, s.K), dv = heads_random(c, T, 1, &s, length, s.K);
        BOTH(c, attention_bwd, .dq = AT(dq), .dk = AT(dk), .dv = AT(dv), .go = AT(go), .q = AT(q), .k = AT(k[i]),
             .v = AT(v[i]), .o = AT(o), .lse = AT(lse), .delta = AT(delta), .doc = AT(doc), .sample = AT(sample),
             .q_span = s.q, .k_span = run(s.k.first[0] + i * length, length), .scale = scale,
             .softcap = (float)s.softcap, .block = 64, .window = s.window, .dropout = dropout, .head0 = HEAD0,
             .chunk = s.H / s.K, .leaf = 64, .positions = POSITIONS, .resumed = i > 0);
        pair_check(c, dk, 16 * unit_of(T), "dk of part %d, %s", i, name);
        pair_check(c, dv, 16 * unit_of(T), "dv of part %d, %s", i, name);
    }
    pair_check(c, dq, 16 * unit_of(T), "dq of %d parts, %s", parts, name);
    pair_check(c, delta, 1e-5, "delta, %s", name);
    case_close(c);
}

/* A zigzag rank's queries; its first ones see nothing of the later parts. */
TEST(attention_keys_in_parts)
{
    const Spans zigzag = { { 20, 100 }, { 20, 20 } }, back = { { 60, 0 }, { 70, 0 } };
    for (int t = 0; t < 3; t++) {
        parts_case(types[t], (Shape){ .B = 2, .H = 2, .K = 1, .C = 32, .q = zigzag, .k = run(0, 80) }, 4);
        parts_case(types[t], (Shape){ .B = 1, .H = 2, .K = 2, .C = 64, .q = back, .k = run(0, 120), .docs = 1,
                                      .softcap = 2, .drop = .2 }, 3);
        parts_case(types[t], (Shape){ .B = 1, .H = 2, .K = 1, .C = 96, .q = back, .k = run(40, 80), .window = 25,
                                      .sinks = 1 }, 2);
        parts_case(types[t], (Shape){ .B = 1, .H = 1, .K = 1, .C = 40, .q = zigzag, .k = zigzag }, 1);
    }
    parts_case(BF16, (Shape){ .B = 1, .H = 1, .K = 1, .C = 256, .q = zigzag, .k = run(0, 80) }, 2);
}

/* ---- keys enough for warpgroups (attention_fwd_hopper.cu) ---- */

/* Blocks take items one after another: so few of them that each has several. */
static int few_blocks(int blocks)
{
    Device *gpu = &case_open()->dev[CASE_GPU];
    const int all = gpu->threads;
    gpu->threads = blocks;
    return all;
}

/* Warpgroups in a random order take four times as long: then every third case is tried, all of them with FULL=1. */
static int cases_apart(void)
{
    const char *order = getenv("EMU_ORDER");
    return order && !strncmp(order, "random", 6) && !getenv("FULL") ? 3 : 1;
}

/* Each width of tile, full and padded, with a cap and dropout and without. */
TEST(attention_warpgroups)
{
    const int all = few_blocks(2);
    static const int64_t keys[] = { 40, 64, 80, 96, 128, 136, 192, 192, 256 },
                         values[] = { 64, 64, 96, 72, 128, 128, 128, 192, 232 };
    for (int i = 0; i < 9; i += cases_apart()) {
        attention_case(types[1 + i % 2], (Shape){ .B = 1 + !i, .H = 2, .K = 1, .C = keys[i], .V = values[i],
                                                  .q = run(0, i % 2 ? 333 : 256), .gap = i % 3 * 8 });
        attention_case(types[2 - i % 2], (Shape){ .B = 1,
                                                  .H = 2,
                                                  .K = 2,
                                                  .C = keys[i],
                                                  .V = values[i],
                                                  .q = run(1, 200),
                                                  .drop = .2,
                                                  .softcap = i % 2 ? 1.5 : 0 });
    }
    few_blocks(all);
}

/* Tiles that some warpgroups of a block leave out, before, behind and more of them than a block holds at once; rows
 * without keys; queries in groups. */
TEST(attention_warpgroups_masks)
{
    const Spans far = { { 0, 400 }, { 190, 100 } }, near = { { 300, 20 }, { 200, 150 } };
    static const int64_t windows[] = { 1, 64, 100, 129 };
    const int all = few_blocks(2);
    for (int i = 0; i < 4; i += cases_apart()) {
        attention_case(types[1 + i % 2],
                       (Shape){ .B = 1, .H = 2, .K = 1, .C = 64, .q = run(0, 500), .window = windows[i] });
        attention_case(types[2 - i % 2], (Shape){ .B = 1,
                                                  .H = 1,
                                                  .K = 1,
                                                  .C = 128,
                                                  .q = run(100, 257),
                                                  .k = run(0, 357),
                                                  .window = windows[i],
                                                  .docs = i % 2 });
    }
    for (int64_t C = 64; C <= 128; C += 32 * cases_apart()) {
        attention_case(BF16, (Shape){ .B = 2, .H = 2, .K = 2, .C = C, .q = run(0, 449), .docs = 1 });
        attention_case(BF16, (Shape){ .B = 2, .H = 1, .K = 1, .C = C, .q = run(0, 512), .docs = 250 });
        /* the last warpgroup sees nothing of what the others see: it leaves out more tiles than fit */
        attention_case(F16, (Shape){ .B = 1, .H = 2, .K = 1, .C = C, .q = run(0, 512), .docs = -448 });
        attention_case(F16, (Shape){ .B = 1, .H = 6, .K = 2, .C = C, .q = run(0, 320), .grouped = 1, .gap = 8 });
        attention_case(BF16, (Shape){ .B = 1, .H = 2, .K = 1, .C = C, .q = far, .sinks = 1 });
        attention_case(BF16, (Shape){ .B = 1, .H = 2, .K = 1, .C = C, .q = far, .k = near, .window = 120 });
        attention_case(F16, (Shape){ .B = 2, .H = 1, .K = 1, .C = C, .q = near, .k = far, .drop = .1 });
        attention_case(BF16, (Shape){ .B = 1, .H = 1, .K = 1, .C = C, .q = run(0, 300), .k = run(200, 140) });
    }
    few_blocks(all);
}

TEST(attention_warpgroups_in_parts)
{
    const Spans zigzag = { { 100, 400 }, { 150, 100 } };
    for (int64_t C = 64; C <= 192; C += 64)
        for (int i = 0; i < 2; i++)
            parts_case(types[1 + i], (Shape){ .B = 1, .H = 2, .K = 1, .C = C, .q = zigzag, .k = run(0, 512), .sinks = i,
                                              .window = i * 180, .drop = i * .2 }, 2 + i * 2);
}

/* ---- NaN, refusals ---- */

TEST(attention_keeps_nan_in_its_rows)
{
    enum { T = 40, H = 2, C = 32, BAD = 20 };
    for (int t = 0; t < 3; t++) {
        CudaCase *c = case_open();
        float x[T * H * C], o[T * H * C];
        for (int i = 0; i < T * H * C; i++) x[i] = (float)test_uniform(&c->random, -1, 1);
        x[(BAD * H + 1) * C + 3] = NAN;
        Shape s = { .B = 1 };
        Pair q = pair_values(c, types[t], x, 1, T, H, C), k = pair_random(c, types[t], 1, 1, T, 1, C);
        Pair out = pair_output(c, types[t], 1, T, H, C), lse = pair_output(c, F32, 1, T, H), sample = samples(c, &s);
        Pair logits = pair_zero(c, I64, H);
        int64_t order[H];
        case_side = CASE_GPU;
        OK(op(case_stream(c), attention_fwd, .o = AT(out), .lse = AT(lse), .logit_max = AT(logits), .q = AT(q),
              .k = AT(k), .v = AT(k), .sample = AT(sample), .q_span = spans_whole(T), .k_span = spans_whole(T),
              .scale = 0.2f, .block = 64));
        OK(device_read(case_stream(c), c->first, out.t[CASE_GPU].data, tensor_bytes(out.t[CASE_GPU])));
        for (int i = 0; i < T * H * C; i++) o[i] = case_load(c->first, types[t], i);
        for (int i = 0; i < T * H * C; i++) CHECK(isnan(o[i]) == (i / C == BAD * H + 1));
        OK(device_read(case_stream(c), o, lse.t[CASE_GPU].data, T * H * 4));
        for (int i = 0; i < T * H; i++) CHECK(isnan(o[i]) == (i == BAD * H + 1));
        OK(device_read(case_stream(c), order, logits.t[CASE_GPU].data, sizeof order));
        CHECK(isfinite(logit_of_order(order[0])) && isnan(logit_of_order(order[1])));
        case_close(c);
    }
}

/* Places behind the last query and the last key, whose products are 0, are no scores. */
TEST(attention_largest_of_negative_scores)
{
    enum { T = 70, C = 32 };
    for (int t = 0; t < 3; t++) {
        CudaCase *c = case_open();
        float above[T * C], below[T * C];
        Shape s = { .B = 1 };
        for (int i = 0; i < T * C; i++) {
            above[i] = (float)test_uniform(&c->random, .5, 1);
            below[i] = (float)test_uniform(&c->random, -1, -.5);
        }
        Pair q = pair_values(c, types[t], above, 1, T, 1, C), k = pair_values(c, types[t], below, 1, T, 1, C);
        Pair o = pair_output(c, types[t], 1, T, 1, C), lse = pair_output(c, F32, 1, T, 1), sample = samples(c, &s);
        Pair logits = pair_zero(c, I64, 1);
        BOTH(c, attention_fwd, .o = AT(o), .lse = AT(lse), .logit_max = AT(logits), .q = AT(q), .k = AT(k), .v = AT(k),
             .sample = AT(sample), .q_span = spans_whole(T), .k_span = spans_whole(T), .scale = 0.2f, .block = 64,
             .window = 3);
        check_logits(c, logits, "negative scores");
        CHECK(logit_of_order(*(int64_t *)logits.t[CASE_CPU].data) < -1);
        case_close(c);
    }
}

static Err refused(DType T, Shape s, float scale, int shift)
{
    CudaCase *c = case_open();
    const int64_t rows = s.q.count[0] + s.q.count[1], keys = s.k.count[0] + s.k.count[1];
    Pair q = heads_random(c, T, 1, &s, rows, s.H), k = heads_random(c, T, 1, &s, keys, s.K);
    Pair o = heads_random(c, T, 1, &s, rows, s.H), lse = pair_output(c, F32, s.B, rows, s.H), sample = samples(c, &s);
    q = without_gap(q, &s), k = without_gap(k, &s), o = without_gap(o, &s);
    case_side = CASE_GPU;
    k.t[CASE_GPU].data = (char *)k.t[CASE_GPU].data + shift;
    Err err = op(case_stream(c), attention_fwd, .o = AT(o), .lse = AT(lse), .q = AT(q), .k = AT(k), .v = AT(k),
                 .sample = AT(sample), .q_span = s.q, .k_span = s.k, .scale = scale, .block = 64);
    case_close(c);
    return err;
}

TEST(attention_refuses_what_does_not_fit)
{
    const Shape fits = { .B = 1, .H = 2, .K = 1, .C = 64, .q = run(0, 8), .k = run(0, 8) };
    OK(refused(BF16, fits, 1, 0));
    Shape s = fits;
    s.C = 264;
    FAILS(refused(F16, s, 1, 0), ERR_SHAPE, "head width is 264");
    s.C = 12;
    FAILS(refused(F32, s, 1, 0), ERR_SHAPE, "head width is 12");
    s = fits, s.gap = 4;
    FAILS(refused(BF16, s, 1, 0), ERR_SHAPE, "rows of o do not begin at multiples of 16 bytes");
    FAILS(refused(BF16, fits, 1, 8), ERR_SHAPE, "rows of k do not begin at multiples of 16 bytes");
    FAILS(refused(BF16, fits, 0, 0), ERR_SHAPE, "scale is 0");
    FAILS(refused(BF16, fits, NAN, 0), ERR_SHAPE, "scale is nan");
    s = fits, s.H = 3, s.K = 2;
    FAILS(refused(BF16, s, 1, 0), ERR_SHAPE, "3 query heads on 2 key heads");
    s = fits, s.k = (Spans){ { 0, 4 }, { 5, 3 } };
    FAILS(refused(BF16, s, 1, 0), ERR_SHAPE, "spans of k overlap");
    s = fits, s.q = (Spans){ { -1, 9 }, { 4, 4 } };
    FAILS(refused(BF16, s, 1, 0), ERR_SHAPE, "spans of q overlap or leave");
}

TEST(attention_refuses_parts_that_would_round)
{
    CudaCase *c = case_open();
    const Shape s = { .B = 1 };
    Pair q = pair_random(c, BF16, 1, 1, 8, 1, 32), o = pair_output(c, BF16, 1, 8, 1, 32), sample = samples(c, &s);
    Pair lse = pair_output(c, F32, 1, 8, 1);
    case_side = CASE_GPU;
    attention_fwd_args a = { .o = AT(o), .lse = AT(lse), .max = AT(lse), .sum = AT(lse), .q = AT(q), .k = AT(q),
                             .v = AT(q), .sample = AT(sample), .q_span = spans_whole(8), .k_span = spans_whole(8),
                             .scale = 1, .block = 64, .unfinished = 1 };
    FAILS(op_attention_fwd(case_stream(c), &a), ERR_SHAPE, "o is bf16: keys in several calls need it in f32");
    a.max.data = NULL;
    FAILS(op_attention_fwd(case_stream(c), &a), ERR_SHAPE, "keys in several calls need max and sum");
    case_close(c);
}

TEST_MAIN
