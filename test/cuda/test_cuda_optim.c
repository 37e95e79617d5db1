/* Gradient statistics, the step's decision, AdamW and casts on cuda, for float accumulators, against the CPU's. */
#include "base/half.h"
#include "cuda_case.h"

static const DType types[] = { F32, BF16, F16 };
enum { TYPES = 3 };

static Tensor counted(Tensor t, const Pair *rows)
{
    t.rows = rows->t[case_side].data;
    return t;
}

/* A table of n tensors, whose chunks are filled in. */
static Pair pair_parts(CudaCase *c, FlatPart *part, int n, int64_t *chunks)
{
    *chunks = 0;
    for (int i = 0; i < n; i++) {
        part[i].chunk = *chunks;
        *chunks += flat_chunks(part[i].count);
    }
    return pair_values(c, I64, part, n, sizeof *part / sizeof(int64_t));
}

static Pair pair_step(CudaCase *c, const StepValues *v)
{
    return pair_values(c, I64, v, sizeof *v / 8);
}

static void gpu_read(CudaCase *c, void *to, Tensor t)
{
    OK(device_read(&c->dev[CASE_GPU].stream, to, t.data, tensor_bytes(t)));
}

static uint16_t to_bits(DType T, float x)
{
    return T == BF16 ? bf16_from_float(x) : f16_from_float(x);
}

static float of_bits(DType T, uint16_t h)
{
    return T == BF16 ? bf16_to_float(h) : f16_to_float(h);
}

/* Whether got is x in its dtype: the nearest, bit for bit; any NaN for a NaN. */
static bool right(DType T, const void *got, int64_t i, float x)
{
    if (T == F32) return isnan(x) ? isnan(((const float *)got)[i]) : !memcmp((const float *)got + i, &x, sizeof x);
    uint16_t h = ((const uint16_t *)got)[i];
    return isnan(x) ? isnan(of_bits(T, h)) : h == to_bits(T, x);
}

/* ---- statistics ---- */

static double limbs_value(const int64_t *limb)
{
    double x = 0;
    for (int i = 3; i >= 0; i--) x = x * 0x1p32 + (double)limb[i];
    return x;
}

/* Gradients of very different sizes, the largest about `scale`. */
static Pair gradients(CudaCase *c, int64_t n, double scale)
{
    float *g = malloc((size_t)n * 4);
    for (int64_t i = 0; i < n; i++)
        g[i] = (float)(scale * ldexp(test_uniform(&c->random, -1, 1), -(int)(test_rand(&c->random) % 12)));
    Pair p = pair_values(c, F32, g, n);
    free(g);
    return p;
}

static void check_stats(CudaCase *c, Pair max, Pair sumsq, const char *what)
{
    int64_t limb[4];
    pair_check(c, max, 0, "max, %s", what);
    gpu_read(c, limb, sumsq.t[CASE_GPU]);
    double got = limbs_value(limb), want = limbs_value(sumsq.t[CASE_CPU].data);
    CHECK_MSG(fabs(got - want) <= 1e-9 * want, "%s: sum of squares %.17g, cpu %.17g", what, got, want);
}

static void stats_case(int64_t P, int64_t first, int64_t rows, int shift, double scale)
{
    CudaCase *c = case_open();
    int64_t start_max = 5, start[4] = { 7, 0, 1, 0 }, chunks[2];
    int32_t by = shift;
    char what[96];
    snprintf(what, sizeof what, "P %d first %d rows %d shift %d scale %g", (int)P, (int)first, (int)rows, shift, scale);
    Pair g = gradients(c, P + first, scale), max = pair_values(c, I64, &start_max, 1);
    Pair sumsq = pair_values(c, I64, start, 1, 4), at = pair_values(c, I32, &by, 1);
    FlatPart few = { .grad = first, .value = first, .count = rows, .flags = FLAT_COUNTS }, all = few;
    all.count = P;
    Pair part = pair_parts(c, &few, 1, &chunks[0]), whole = pair_parts(c, &all, 1, &chunks[1]);
    BOTH(c, grad_stats, .max = AT(max), .sumsq = AT(sumsq), .g = AT(g), .shift = AT(at), .parts = AT(part),
         .chunks = chunks[0]);
    check_stats(c, max, sumsq, what);
    BOTH(c, grad_stats, .max = AT(max), .sumsq = AT(sumsq), .g = AT(g), .shift = AT(at), .parts = AT(whole),
         .chunks = chunks[1]); /* onto what is there */
    check_stats(c, max, sumsq, what);
    case_close(c);
}

/* Around a thread's share, a block's, two blocks; where a buffer is not on 16 bytes; at both ends of the shifts. */
TEST(stats)
{
    static const int64_t P[] = { 1, 3, 4, 5, 1023, 1024, 1025, 4097, 32767, 32768, 32769, 70001 };
    for (size_t i = 0; i < sizeof P / sizeof *P; i++) {
        stats_case(P[i], 0, P[i], 40, 1);
        stats_case(P[i], 1 + (int64_t)i % 3, P[i] - P[i] / 3, 40, 1);
    }
    stats_case(500, 0, 500, -60, 0x1p110);
    stats_case(500, 0, 500, 100, 0x1p-60);
    stats_case(500, 0, 500, 70, 0x1p-9); /* squares up to 2^122 units */
    stats_case(500, 0, 500, 20, 0);
}

/* What is not finite, or too large for the unit, adds nothing and shows in max. */
TEST(stats_of_bad_gradients)
{
    static const float bad[] = { NAN, INFINITY, -INFINITY, -0x1p22f, 0x1.fffffep21f, 0x1p127f, -0.0f };
    for (int k = 0; k < 7; k++) {
        for (int place = 0; place < 50; place += 7) {
            CudaCase *c = case_open();
            float g[50];
            int64_t got, chunks;
            FlatPart whole = { .count = 50, .flags = FLAT_COUNTS };
            for (int i = 0; i < 50; i++) g[i] = (float)i / 8;
            g[place] = bad[k];
            Pair p = pair_values(c, F32, g, 50), max = pair_zero(c, I64, 1), sumsq = pair_zero(c, I64, 1, 4);
            Pair shift = pair_values(c, I32, &(int32_t){ 40 }, 1), part = pair_parts(c, &whole, 1, &chunks);
            BOTH(c, grad_stats, .max = AT(max), .sumsq = AT(sumsq), .g = AT(p), .shift = AT(shift), .parts = AT(part),
                 .chunks = chunks);
            check_stats(c, max, sumsq, "bad gradient");
            gpu_read(c, &got, max.t[CASE_GPU]);
            CHECK_MSG((got == 0x7F800000) == (k < 3), "%g at %d", (double)bad[k], place);
            case_close(c);
        }
    }
}

/* Makes `n` tensors of different lengths, one behind the other with a gap of `gap` elements. Each seventh is counted on
 * another rank. Returns the elements that they reach over. */
static int64_t many_parts(FlatPart *part, int n, int64_t gap)
{
    static const int64_t length[] = { 1, 64, 1000, FLAT_CHUNK, 5, FLAT_CHUNK + 1, 2049, 128, 64, 3 };
    int64_t at = 0;
    for (int i = 0; i < n; i++) {
        part[i] = (FlatPart){
            .grad = at + 2 * gap, .value = at + gap, .shard = at, .v = at, .count = length[i % 10], .number = n - 1 - i
        };
        part[i].flags = (i % 7 == 3 ? 0 : FLAT_COUNTS) | (i % 2 ? FLAT_DECAYS : 0) | (i % 3 ? FLAT_HIDDEN : 0);
        at += part[i].count + gap;
    }
    return at + 2 * gap;
}

/* Every block finds its tensor in tables of every size. */
TEST(stats_of_many)
{
    enum { MOST = 33 };
    static const int sizes[] = { 2, 3, 8, MOST };
    for (int k = 0; k < 4; k++) {
        CudaCase *c = case_open();
        const int n = sizes[k];
        FlatPart part[MOST];
        int32_t bits[MOST];
        int64_t limb[2][MOST][4], chunks, elements = many_parts(part, n, k % 2 ? 64 : 3);
        for (int i = 0; i < n; i++) bits[i] = 45 + i % 5;
        Pair g = gradients(c, elements, 1), max = pair_zero(c, I64, n), sumsq = pair_zero(c, I64, n, 4);
        Pair shift = pair_values(c, I32, bits, n), parts = pair_parts(c, part, n, &chunks);
        BOTH(c, grad_stats, .max = AT(max), .sumsq = AT(sumsq), .g = AT(g), .shift = AT(shift), .parts = AT(parts),
             .chunks = chunks);
        pair_check(c, max, 0, "max of %d tensors", n);
        gpu_read(c, limb[0], sumsq.t[CASE_GPU]);
        memcpy(limb[1], sumsq.t[CASE_CPU].data, sizeof limb[1][0] * (size_t)n);
        for (int i = 0; i < n; i++) {
            const double got = limbs_value(limb[0][i]), want = limbs_value(limb[1][i]);
            CHECK_MSG(fabs(got - want) <= 1e-9 * want, "%d tensors, number %d: %g, cpu %g", n, i, got, want);
            CHECK((want > 0) == ((part[n - 1 - i].flags & FLAT_COUNTS) != 0));
        }
        case_close(c);
    }
}

/* ---- the decision ---- */

typedef struct {
    int64_t n;
    float nan_at, large_at; /* tensors with a NaN, with what is too large for their shift; < 0: none */
    int64_t sums[3];
    int32_t overflow, over_limit;
    float clip;
    int spread; /* exponents of the maxima: +- spread */
} Finish;

static void finish_case(Finish f)
{
    CudaCase *c = case_open();
    int64_t *max = malloc((size_t)f.n * 8), *sumsq = malloc((size_t)f.n * 32);
    int32_t *shift = malloc((size_t)f.n * 4);
    StepValues v = { .nominal = 4096, .clip = f.clip, .unscale = 0.25f, .loss_scale = 0.01f, .lr = 3, .step = 8 }, got;
    for (int64_t i = 0; i < f.n; i++) {
        float x = (float)ldexp(test_uniform(&c->random, 0.5, 1), (int)(test_rand(&c->random) % 16) - 8);
        if (i % 5 == 1) x = (float)ldexp(1, f.spread - (int)(i % 7));
        if (i % 5 == 2) x = (float)ldexp(1, -f.spread);
        if (i % 11 == 3) x = 0;
        shift[i] = 20 + (int)(i % 3) - (f.spread > 39 ? f.spread - 39 : 0);
        if (i == (int64_t)f.large_at) x = (float)ldexp(1.5, 61 - shift[i]);
        if (i == (int64_t)f.nan_at) x = INFINITY;
        max[i] = (int64_t)half_float_bits(x);
        for (int k = 0; k < 4; k++) sumsq[4 * i + k] = (int64_t)(test_rand(&c->random) >> (k == 3 ? 58 : 28));
    }
    Pair tm = pair_values(c, I64, max, f.n), ts = pair_values(c, I64, sumsq, f.n, 4), step = pair_step(c, &v);
    Pair sh = pair_values(c, I32, shift, f.n), next = pair_output(c, I32, f.n), sums = pair_values(c, I64, f.sums, 3);
    Pair overflow = pair_values(c, I32, &f.overflow, 1), over_limit = pair_values(c, I32, &f.over_limit, 1);
    BOTH(c, step_finish, .max = AT(tm), .sumsq = AT(ts), .shift = AT(sh), .next_shift = AT(next), .loss_sums = AT(sums),
         .overflow = AT(overflow), .over_limit = AT(over_limit), .step = AT(step).data, .headroom_bits = 16,
         .acc = F32);
    pair_check(c, next, 0, "next shifts of %d tensors", (int)f.n);
    gpu_read(c, &got, step.t[CASE_GPU]);
    memcpy(&v, step.t[CASE_CPU].data, sizeof v);
    CHECK_CLOSE((double)got.grad_norm / (double)fmaxf(v.grad_norm, 1e-30f), v.grad_norm > 0 ? 1.0 : 0.0, 1e-6, " ");
    CHECK_CLOSE((double)got.grad_scale, (double)v.grad_scale, 1e-6, " ");
    got.grad_norm = v.grad_norm, got.grad_scale = v.grad_scale; /* the rest to the bit */
    CHECK_MSG(!memcmp(&got, &v, sizeof v), "%d tensors: flags %d %d %d %d, cpu %d %d %d %d", (int)f.n, got.overflow,
              got.nonfinite, got.skip, got.loss_nonfinite, v.overflow, v.nonfinite, v.skip, v.loss_nonfinite);
    CHECK(v.overflow == (f.overflow || f.large_at >= 0) && v.nonfinite == (f.nan_at >= 0 || f.sums[2]));
    free(max), free(sumsq), free(shift);
    case_close(c);
}

TEST(finish)
{
    static const int64_t n[] = { 1, 31, 255, 256, 257, 1000 };
    for (size_t i = 0; i < sizeof n / sizeof *n; i++) {
        float last = (float)n[i] - 1;
        Finish f = { .n = n[i], .nan_at = -1, .large_at = -1, .sums = { 1 << 20, 3000, 0 }, .clip = 1, .spread = 20 };
        finish_case(f);
        Finish free_norm = f, tight = f, nan = f, large = f, raised = f, loss = f, empty = f, wide = f;
        free_norm.clip = 0, tight.clip = 1e-9f;
        nan.nan_at = last;
        large.large_at = last;
        raised.overflow = 1;
        Finish full = f;
        full.over_limit = 1;
        loss.sums[2] = 1;
        empty.sums[1] = 0;
        wide.spread = 119; /* maxima below what a normal float can be, shifts at their limits */
        finish_case(free_norm), finish_case(tight), finish_case(nan), finish_case(large), finish_case(raised);
        finish_case(loss), finish_case(empty), finish_case(wide), finish_case(full);
    }
}

/* The smallest floats: denormal maxima. */
TEST(finish_of_denormals)
{
    CudaCase *c = case_open();
    enum { N = 40 };
    int64_t max[N];
    int32_t shift[N];
    for (int i = 0; i < N; i++) max[i] = i < 24 ? 1 << i : (1 << (i - 20)) + 1, shift[i] = 90;
    StepValues v = { .nominal = 1, .unscale = 1 };
    int64_t none[3] = { 0, 1, 0 };
    Pair tm = pair_values(c, I64, max, N), ts = pair_zero(c, I64, N, 4), sh = pair_values(c, I32, shift, N);
    Pair next = pair_output(c, I32, N), sums = pair_values(c, I64, none, 3), step = pair_step(c, &v);
    Pair overflow = pair_zero(c, I32, 1);
    for (int bits = 16; bits <= 170; bits += 77) { /* large ones only to see the numbers inside the limits */
        BOTH(c, step_finish, .max = AT(tm), .sumsq = AT(ts), .shift = AT(sh), .next_shift = AT(next),
             .loss_sums = AT(sums), .overflow = AT(overflow), .step = AT(step).data, .headroom_bits = bits, .acc = F32);
        pair_check(c, next, 0, "next shifts, %d bits of headroom", bits);
        pair_check(c, step, 0, "step, %d bits of headroom", bits);
    }
    case_close(c);
}

/* ---- AdamW ---- */

enum { NO_COPY = -1 };

typedef struct {
    int64_t P, first, rows;
    int copy; /* dtype, or NO_COPY */
    bool skip;
    DType moments;
} Adam;

/* The copy is w, to the nearest of its dtype. */
static void check_copy(CudaCase *c, Pair w, Pair copy, int64_t first, int64_t count)
{
    DType T = copy.t[CASE_GPU].dtype;
    int64_t n = tensor_count(w.t[CASE_GPU]), wrong = 0;
    float *from = malloc((size_t)n * 4), *got = malloc((size_t)n * 4);
    gpu_read(c, from, w.t[CASE_GPU]);
    gpu_read(c, got, copy.t[CASE_GPU]);
    for (int64_t i = first; i < first + count; i++) wrong += !right(T, got, i, from[i]);
    CHECK_MSG(wrong == 0, "%d of %d copies are not w", (int)wrong, (int)count);
    free(from), free(got);
}

/* The GPU's are the CPU's floats to the nearest of their dtype. */
static void check_nearest(CudaCase *c, Pair p, const char *name)
{
    const Tensor t = p.t[CASE_GPU];
    const int64_t n = tensor_count(t);
    int64_t wrong = 0;
    float *got = malloc((size_t)n * sizeof *got);
    gpu_read(c, got, t);
    for (int64_t i = 0; i < n; i++) wrong += !right(t.dtype, got, i, ((const float *)p.t[CASE_CPU].data)[i]);
    CHECK_MSG(wrong == 0, "%d of %d of %s are not the nearest", (int)wrong, (int)n, name);
    free(got);
}

/* Bits as the CPU's: each operation is rounded the same way. */
static void adam_case(Adam x)
{
    CudaCase *c = case_open();
    int64_t n = x.P + x.first, rows = x.rows ? x.rows : x.P, chunks;
    FlatPart range = { .grad = x.first, .value = x.first, .shard = x.first, .v = x.first, .count = rows,
                       .flags = FLAT_DECAYS | (x.first ? FLAT_HIDDEN : 0) };
    StepValues values = { .lr = 0.01f, .correct1 = 0.271f, .correct2 = 0.05f, .grad_scale = 0.7f, .skip = x.skip };
    Pair w = pair_random(c, F32, 2, n), m = pair_random(c, x.moments, 1, n),
         v = pair_uniform(c, x.moments, 0, 1, 1, &n);
    Pair g = pair_random(c, F32, 3, n), copy = pair_random(c, x.copy == NO_COPY ? F32 : (DType)x.copy, 2, n);
    Pair step = pair_step(c, &values), shift = pair_zero(c, I32, 1), parts = pair_parts(c, &range, 1, &chunks);
    Pair all[] = { w, m, v, g, copy };
    static const char *const names[] = { "w", "m", "v", "g", "copy" };
    if (x.copy == NO_COPY) memset(&copy, 0, sizeof copy);
    BOTH(c, adamw, .w = AT(w), .m = AT(m), .v = AT(v), .g = AT(g), .copy = AT(copy), .shift = AT(shift),
         .step = AT(step).data, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-3f, .decay = 0.1f, .hidden_rate = 0.3f,
         .parts = AT(parts), .chunks = chunks);
    for (int i = 0; i < 5; i++) {
        if ((i == 1 || i == 2) && x.moments != F32) {
            check_nearest(c, all[i], names[i]);
            continue;
        }
        double tol = i == 4 && x.copy == BF16 ? 0x1p-8 : i == 4 && x.copy == F16 ? 0x1p-11 : 0;
        pair_check(c, all[i], tol, "%s: P %d first %d rows %d copy %d skip %d", names[i], (int)x.P, (int)x.first,
                   (int)rows, x.copy, x.skip);
    }
    if (x.copy != NO_COPY && !x.skip) check_copy(c, w, copy, x.first, rows);
    case_close(c);
}

TEST(adamw)
{
    static const int64_t P[] = { 1, 3, 4, 5, 8, 1023, 1024, 1028, 2047, 2048, 2049, 5003 };
    static const int copies[] = { NO_COPY, F32, BF16, F16 };
    for (size_t i = 0; i < sizeof P / sizeof *P; i++) {
        for (int k = 0; k < 4; k++) {
            adam_case((Adam){ .P = P[i], .copy = copies[k] });
            adam_case((Adam){ .P = P[i], .copy = copies[k], .first = 1 + (int64_t)i % 5, .rows = P[i] - P[i] / 4 });
        }
        adam_case((Adam){ .P = P[i], .copy = copies[i % 4], .skip = true });
        adam_case((Adam){ .P = P[i], .copy = copies[i % 4], .moments = BF16 });
        adam_case((Adam){ .P = P[i], .copy = copies[i % 3], .first = 1 + (int64_t)i % 5, .rows = P[i] - P[i] / 4,
                          .moments = BF16 });
    }
}

/* Many tensors in one call: each with its own places, decay and rate, what lies between them as it was. */
TEST(adamw_of_many)
{
    enum { MOST = 33 };
    static const int sizes[] = { 2, 7, MOST }, copies[] = { F32, BF16, NO_COPY };
    for (int k = 0; k < 3; k++) {
        CudaCase *c = case_open();
        const int n = sizes[k];
        FlatPart part[MOST];
        StepValues values = { .lr = 0.01f, .correct1 = 0.271f, .correct2 = 0.05f, .grad_scale = 0.7f };
        int64_t chunks, whole = many_parts(part, n, k == 1 ? 3 : 64);
        Pair w = pair_random(c, F32, 2, whole), m = pair_random(c, F32, 1, whole),
             v = pair_uniform(c, F32, 0, 1, 1, &whole);
        Pair g = pair_random(c, F32, 3, whole), copy = { 0 }, shift = pair_zero(c, I32, n),
             step = pair_step(c, &values);
        Pair parts = pair_parts(c, part, n, &chunks);
        if (copies[k] != NO_COPY) copy = pair_random(c, (DType)copies[k], 2, whole);
        BOTH(c, adamw, .w = AT(w), .m = AT(m), .v = AT(v), .g = AT(g), .copy = AT(copy), .shift = AT(shift),
             .step = AT(step).data, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-3f, .decay = 0.1f, .hidden_rate = 0.3f,
             .parts = AT(parts), .chunks = chunks);
        pair_check(c, w, 0, "w of %d tensors", n);
        pair_check(c, m, 0, "m of %d tensors", n);
        pair_check(c, v, 0, "v of %d tensors", n);
        if (copies[k] != NO_COPY) pair_check(c, copy, copies[k] == BF16 ? 0x1p-8 : 0, "copies of %d tensors", n);
        case_close(c);
    }
}

/* Of three tensors the second one's copy is fp32, in the place of twice as many elements of 16 bits: w to the bit. */
enum { NARROW = 70, WIDE = 37, WIDE_AT = 64, WIDE_END = WIDE_AT + 2 * WIDE };

static void wide_parts(FlatPart part[3])
{
    part[0] = (FlatPart){ .value = 0, .count = 60 };
    part[1] = (FlatPart){ .grad = 60, .value = WIDE_AT, .shard = 60, .v = 60, .count = WIDE, .flags = FLAT_WIDE };
    part[2] = (FlatPart){ .grad = 60 + WIDE, .value = WIDE_END, .shard = 60 + WIDE, .v = 60 + WIDE, .count = 10 };
}

static void check_wide_copy(CudaCase *c, Pair w, Pair copy, const char *what)
{
    float of_w[NARROW + WIDE], wide[WIDE];
    uint16_t got[WIDE_END + 10];
    const DType T = copy.t[CASE_GPU].dtype;
    gpu_read(c, of_w, w.t[CASE_GPU]);
    gpu_read(c, got, copy.t[CASE_GPU]);
    memcpy(wide, got + WIDE_AT, sizeof wide);
    for (int i = 0; i < 60; i++) CHECK_MSG(right(T, got, i, of_w[i]), "%s: %d", what, i);
    for (int i = 0; i < WIDE; i++) CHECK_MSG(right(F32, wide, i, of_w[60 + i]), "%s: wide %d", what, i);
    for (int i = 0; i < 10; i++) CHECK_MSG(right(T, got + WIDE_END, i, of_w[60 + WIDE + i]), "%s: behind %d", what, i);
    CHECK(!memcmp((uint16_t *)copy.t[CASE_CPU].data + WIDE_AT, got + WIDE_AT, sizeof wide));
}

TEST(copies_of_fp32_beside_narrow_ones)
{
    for (int k = 0; k < 6; k++) {
        CudaCase *c = case_open();
        FlatPart part[3];
        int64_t chunks;
        const int64_t n = NARROW + WIDE;
        StepValues values = { .lr = 0.01f, .correct1 = 0.271f, .correct2 = 0.05f, .grad_scale = 0.7f };
        wide_parts(part);
        Pair w = pair_random(c, F32, 2, n), m = pair_random(c, F32, 1, n), v = pair_uniform(c, F32, 0, 1, 1, &n);
        Pair g = pair_random(c, F32, 3, n), copy = pair_random(c, k % 2 ? F16 : BF16, 2, (int64_t)WIDE_END + 10);
        Pair step = pair_step(c, &values), shift = pair_zero(c, I32, 1), parts = pair_parts(c, part, 3, &chunks);
        if (k < 2)
            BOTH(c, adamw, .w = AT(w), .m = AT(m), .v = AT(v), .g = AT(g), .copy = AT(copy), .shift = AT(shift),
                 .step = AT(step).data, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-3f, .decay = 0.1f, .hidden_rate = 1,
                 .parts = AT(parts), .chunks = chunks);
        else
            BOTH(c, one_moment, .w = AT(w), .m = AT(m), .g = AT(g), .copy = AT(copy), .shift = AT(shift),
                 .step = AT(step).data, .beta1 = 0.9f, .beta2 = 0.95f, .decay = 0.1f, .hidden_rate = 1,
                 .lion = k < 4, .parts = AT(parts), .chunks = chunks);
        check_wide_copy(c, w, copy, k < 2 ? "adamw" : "one_moment");
        case_close(c);
    }
}

/* A range cut into ranks' shares that start anywhere: the same bits as in one piece. */
TEST(adamw_splits)
{
    enum { N = 300 };
    static const int64_t cuts[] = { 0, 1, 64, 129, 299, N };
    CudaCase *c = case_open();
    StepValues values = { .lr = 0.01f, .correct1 = 0.271f, .correct2 = 0.05f, .grad_scale = 0.7f };
    Pair w = pair_random(c, F32, 2, N), m = pair_random(c, F32, 1, N), v = pair_zero(c, F32, N);
    Pair g = pair_random(c, F32, 3, N), copy = pair_output(c, BF16, N), step = pair_step(c, &values);
    Pair shift = pair_zero(c, I32, 1);
    for (int i = 0; i < 5; i++) {
        int64_t chunks;
        FlatPart range = {
            .grad = cuts[i], .value = cuts[i], .shard = cuts[i], .v = cuts[i], .count = cuts[i + 1] - cuts[i]
        };
        Pair parts = pair_parts(c, &range, 1, &chunks);
        BOTH(c, adamw, .w = AT(w), .m = AT(m), .v = AT(v), .g = AT(g), .copy = AT(copy), .shift = AT(shift),
             .step = AT(step).data, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f, .parts = AT(parts), .chunks = chunks);
    }
    pair_check(c, w, 0, "w");
    pair_check(c, m, 0, "m");
    pair_check(c, v, 0, "v");
    pair_check(c, g, 0, "g");
    check_copy(c, w, copy, 0, N);
    case_close(c);
}

/* ---- Lion, and SGD with momentum ---- */

/* Bits as the CPU's: each operation is rounded the same way. */
static void one_moment_case(FlatPart *part, int count, int64_t n, int copied, bool lion, bool skip)
{
    CudaCase *c = case_open();
    StepValues values = { .lr = 0.01f, .grad_scale = 0.7f, .skip = skip };
    int64_t chunks;
    Pair w = pair_random(c, F32, 2, n), m = pair_random(c, F32, 1, n), g = pair_random(c, F32, 3, n), copy = { 0 };
    Pair step = pair_step(c, &values), shift = pair_zero(c, I32, count), parts = pair_parts(c, part, count, &chunks);
    if (copied != NO_COPY) copy = pair_random(c, (DType)copied, 2, n);
    BOTH(c, one_moment, .w = AT(w), .m = AT(m), .g = AT(g), .copy = AT(copy), .shift = AT(shift), .step = AT(step).data,
         .beta1 = 0.9f, .beta2 = 0.99f, .decay = 0.1f, .hidden_rate = 0.3f, .lion = lion, .parts = AT(parts),
         .chunks = chunks);
    pair_check(c, w, 0, "w of %d tensors, lion %d", count, lion);
    pair_check(c, m, 0, "m of %d tensors, lion %d", count, lion);
    if (copied != NO_COPY)
        pair_check(c, copy, copied == BF16 ? 0x1p-8 : copied == F16 ? 0x1p-11 : 0, "copies of %d tensors", count);
    if (copied != NO_COPY && count == 1 && !skip) check_copy(c, w, copy, part->shard, part->count);
    case_close(c);
}

TEST(one_moment)
{
    enum { MOST = 33 };
    static const int64_t P[] = { 1, 3, 8, 1028, 2047, 2049, 5003 };
    static const int copies[] = { NO_COPY, F32, BF16, F16 };
    FlatPart many[MOST];
    for (int i = 0; i < 7; i++)
        for (int k = 0; k < 4; k++)
            for (int lion = 0; lion < 2; lion++) {
                const int64_t first = k % 2 * (1 + i % 5);
                FlatPart range = { .grad = first, .value = first, .shard = first, .count = P[i],
                                   .flags = FLAT_DECAYS | (first ? FLAT_HIDDEN : 0) };
                one_moment_case(&range, 1, P[i] + first, copies[k], lion, i == 3);
            }
    const int64_t whole = many_parts(many, MOST, 64);
    one_moment_case(many, MOST, whole, BF16, true, false);
    one_moment_case(many, MOST, whole, NO_COPY, false, false);
}

/* ---- QK-clip ---- */

/* Elements first .. first + n - 1 of matrices of four heads, of which the second and the last have too large scores. */
static void clip_case(QkRows rows, int64_t columns, int64_t first, int64_t n, DType copied, bool skip)
{
    static const float logit[4] = { 80, 150, NAN, 1e4f };
    CudaCase *c = case_open();
    int64_t order[4];
    for (int i = 0; i < 4; i++) order[i] = logit_order(logit[i]);
    StepValues values = { .skip = skip };
    Pair w = pair_random(c, F32, 2, n), copy = { 0 }, logits = pair_values(c, I64, order, 4),
         step = pair_step(c, &values);
    if (copied != F32) copy = pair_random(c, copied, 2, n);
    BOTH(c, qk_clip, .w = AT(w), .copy = AT(copy), .logit_max = AT(logits), .step = AT(step).data, .rows = rows,
         .first = first, .columns = columns, .threshold = 100, .alpha = 0.25f);
    pair_check(c, w, 2e-7, "w: columns %d first %d n %d", (int)columns, (int)first, (int)n);
    if (copied != F32)
        pair_check(c, copy, copied == BF16 ? 0x1p-8 : 0x1p-11, "copy: columns %d first %d n %d", (int)columns,
                   (int)first, (int)n);
    case_close(c);
}

TEST(qk_clip)
{
    static const QkRows fused = { 6, { 3, 2 }, { QK_QUERY, QK_KEY }, .heads = 2, .chunks = 1 };
    static const QkRows parts = { 3, { 1, 1 }, { QK_QUERY, QK_KEY }, .heads = 2, .chunks = 2 };
    static const QkRows latent = { 3, { 2, 1 }, { QK_QUERY, QK_SHARED }, .heads = 1, .chunks = 1 };
    static const DType copied[] = { F32, BF16, F16 };
    for (int i = 0; i < 3; i++) {
        clip_case(fused, 40, 0, 480, copied[i], false);
        clip_case(fused, 1, 0, 12, copied[i], false);
        clip_case(parts, 700, 350, 5003, copied[i], false);
        clip_case(latent, 33, 40, 300, copied[i], false);
        clip_case(latent, 33, 1, 5, copied[i], i == 1);
        clip_case(latent, 257, 257 * 3, 257 * 9, copied[i], i == 2);
    }
}

/* ---- cast ---- */

static void cast_case(DType Y, DType X, const float *values, int64_t P, int64_t first, int64_t rows)
{
    CudaCase *c = case_open();
    int64_t wrong = 0, n = P + first;
    Pair x = pair_values(c, X, values, n), y = pair_output(c, Y, n), use = pair_values(c, I64, &rows, 1);
    float *got = malloc((size_t)n * 4), *from = malloc((size_t)n * 4);
    gpu_read(c, from, x.t[CASE_GPU]);
    BOTH(c, cast, .y = counted(tensor_row_slice(AT(y), first, P), &use), .x = tensor_row_slice(AT(x), first, P));
    gpu_read(c, got, y.t[CASE_GPU]);
    for (int64_t i = first; i < first + rows; i++) {
        float v = X == F32 ? from[i] : of_bits(X, ((uint16_t *)from)[i]);
        wrong += !right(Y, got, i, v);
    }
    for (int64_t i = 0; i < n; i++) /* others are the NaN that they were */
        if (i < first || i >= first + rows) wrong += !right(Y, got, i, NAN);
    CHECK_MSG(wrong == 0, "%s from %s, P %d first %d rows %d: %d wrong", dtype_name(Y), dtype_name(X), (int)P,
              (int)first, (int)rows, (int)wrong);
    free(got), free(from);
    case_close(c);
}

TEST(cast)
{
    enum { MOST = 5010 };
    static const int64_t P[] = { 1, 3, 4, 5, 1023, 1024, 2048, 2049, 5003 };
    static float values[MOST];
    uint64_t state = 4;
    for (int i = 0; i < MOST; i++) { /* all bit patterns, and sizes around both formats' ends */
        float any = half_float_of((uint32_t)test_rand(&state));
        values[i] = i % 2 ? any : (float)ldexp(test_uniform(&state, -2, 2), (int)(test_rand(&state) % 44) - 26);
        uint32_t bits = (uint32_t)test_rand(&state); /* ties, of bf16 and of f16 */
        if (i % 3 == 0) values[i] = half_float_of(bits & 0xFFFF8000u);
        if (i % 9 == 1) values[i] = half_float_of(0x38000000u + (bits & 0x0FFFF000u));
    }
    for (int y = 0; y < TYPES; y++)
        for (int x = 0; x < TYPES; x++)
            for (size_t i = 0; i < sizeof P / sizeof *P; i++) {
                cast_case(types[y], types[x], values, P[i], 0, P[i]);
                cast_case(types[y], types[x], values, P[i], 1 + (int64_t)i % 6, P[i] - P[i] / 3);
            }
}

TEST_MAIN
