/*
 * Ops of the loss and of the optimizer step: against float64 loops and exact integers, in all builds of the
 * kernels (ops_env.h); and what layouts need of them: a vocabulary cut over ranks, and elements cut over
 * calls, change no bit.
 */
#include "base/half.h"
#include "ops_env.h"

/* ---- cross entropy ---- */

/* D columns in blocks of `a`, the first of them global column b; the vocabulary ends 3 columns before them. flags: the
 * cap of the logits, 0: none. */
static void case_xent(Env *e, const Shape *p)
{
    int64_t N = p->N, V = p->D, J = (V + p->a - 1) / p->a, vocab = p->b + V - (V > 3 ? 3 : 0);
    Tensor logits = env_out(e, F32, -9, 9, N, V), target = env_in(e, I32, p->b - 1.0, vocab, N);
    Tensor max = env_out(e, F32, 8, 9, N, J), sum = env_out(e, F32, 8, 9, N, J),
           at = env_out(e, F32, 8, 9, N);
    Tensor row_max = env_out(e, F32, 8, 9, N), row_sum = env_out(e, F32, 8, 9, N),
           loss = env_out(e, F32, 8, 9, N);
    StepValues step = { .loss_scale = 0.125f };
    /* one rank's statistics as [1 N J]: dense, for the op that combines ranks */
    Tensor max3 = { max.data, { 1, N, J }, max.ld, 3, F32 }, sum3 = { sum.data, { 1, N, J }, sum.ld, 3, F32 };
    RUN(e, xent_stats, .block_max = max, .block_sum = sum, .target_logit = at, .logits = env_used(e, logits),
        .target = target, .block = p->a, .first = p->b, .vocab = vocab);
    RUN(e, xent_loss, .loss = env_used(e, loss), .row_max = row_max, .row_sum = row_sum, .block_max = max3,
        .block_sum = sum3, .target_logit = tensor_of(at.data, F32, 1, N), .target = target);
    RUN(e, xent_bwd, .logits = env_used(e, logits), .target = target, .row_max = row_max, .row_sum = row_sum,
        .step = &step, .weight = 0.5f, .softcap = (float)p->flags, .first = p->b, .vocab = vocab);
    for (int64_t n = 0; e->check && n < env_n(e, N); n++) {
        const float *x = env_before(e, env_f(logits, n));
        int32_t t = ((int32_t *)target.data)[n];
        if (p->b && t < p->b) t = -2; /* another rank's word: no one-hot here */
        double top = -INFINITY, total = 0;
        for (int64_t i = 0; i < vocab - p->b; i++) top = fmax(top, (double)x[i]);
        for (int64_t i = 0; i < vocab - p->b; i++) total += exp((double)x[i] - top);
        double own = t >= 0 ? (double)x[t - p->b] : 0, want = t == -1 ? 0 : log(total) + top - own;
        CHECK_CLOSE((double)env_f(row_max, n)[0], top, 0, "row %d", (int)n);
        CHECK_CLOSE((double)env_f(row_sum, n)[0], total, 1e-5, "row %d", (int)n);
        CHECK_CLOSE((double)env_f(loss, n)[0], want, 2e-6, "row %d", (int)n);
        for (int64_t i = 0; i < V; i++) {
            double d = t == -1 || i >= vocab - p->b ? 0 : exp((double)x[i] - top) / total - (i == t - p->b);
            if (p->flags) d *= 1 - pow((double)x[i] / p->flags, 2);
            CHECK_CLOSE((double)env_f(logits, n)[i], d / 16, 5e-7, "row %d column %d", (int)n, (int)i);
        }
    }
}

/* The three ops in one: their bits. */
static void case_xent_row(Env *e, const Shape *p)
{
    int64_t N = p->N, V = p->D, J = V / p->a, vocab = V - p->b;
    Tensor logits = env_out(e, F32, -9, 9, N, V), target = env_in(e, I32, -1.0, (double)vocab, N);
    Tensor again = env_out(e, F32, 0, 1, N, V), loss = env_out(e, F32, 8, 9, N), want = env_out(e, F32, 8, 9, N);
    Tensor max = env_out(e, F32, 8, 9, N, J), sum = env_out(e, F32, 8, 9, N, J), at = env_out(e, F32, 8, 9, N);
    Tensor row_max = env_out(e, F32, 8, 9, N), row_sum = env_out(e, F32, 8, 9, N);
    Tensor max3 = { max.data, { 1, N, J }, max.ld, 3, F32 }, sum3 = { sum.data, { 1, N, J }, sum.ld, 3, F32 };
    StepValues step = { .loss_scale = 0.125f };
    for (int64_t n = 0; n < env_n(e, N); n++)
        memcpy(env_f(again, n), env_f(logits, n), (size_t)V * sizeof(float));
    RUN(e, xent_row, .loss = loss, .logits = env_used(e, logits), .target = target, .step = &step, .weight = 0.5f,
        .softcap = (float)p->flags, .block = p->a, .vocab = vocab);
    RUN(e, xent_stats, .block_max = max, .block_sum = sum, .target_logit = at, .logits = env_used(e, again),
        .target = target, .block = p->a, .vocab = vocab);
    RUN(e, xent_loss, .loss = env_used(e, want), .row_max = row_max, .row_sum = row_sum, .block_max = max3,
        .block_sum = sum3, .target_logit = tensor_of(at.data, F32, 1, N), .target = target);
    RUN(e, xent_bwd, .logits = env_used(e, again), .target = target, .row_max = row_max, .row_sum = row_sum,
        .step = &step, .weight = 0.5f, .softcap = (float)p->flags, .vocab = vocab);
    for (int64_t n = 0; e->check && n < env_n(e, N); n++) {
        CHECK_MSG(!memcmp(env_f(logits, n), env_f(again, n), (size_t)V * sizeof(float)), "row %d", (int)n);
        CHECK_MSG(!memcmp(env_f(loss, n), env_f(want, n), sizeof(float)), "loss %d", (int)n);
    }
}

TEST(cross_entropy_by_rows)
{
    CASES(case_xent_row, { 1, 1, 1 }, { 5, 20, 5, 3 }, { 9, 64, 32, 1 }, { 6, 48, 16, 20 }, { 3, 4000, 500, 7 },
          { 5, 40, 10, 2, 12 });
}

/* cap tanh(x / cap), far out as well. */
static void case_softcap(Env *e, const Shape *p)
{
    const double cap = p->flags;
    Tensor x = env_in(e, F32, -90, 90, p->N, p->D), y = env_out(e, F32, 8, 9, p->N, p->D);
    env_f(x, 0)[0] = 4e8f;
    env_settle(e);
    RUN(e, softcap, .y = y, .x = env_used(e, x), .cap = (float)cap);
    for (int64_t k = 0; e->check && k < env_n(e, p->N) * p->D; k++) {
        const double v = (double)env_f(x, k / p->D)[k % p->D];
        CHECK_CLOSE((double)env_f(y, k / p->D)[k % p->D], cap * tanh(v / cap), 5e-7, "x = %g", v);
    }
}

TEST(softcap)
{
    CASES(case_softcap, { 1, 1, 0, 0, 30 }, { 3, 15, 0, 0, 50 }, { 4, 33, 0, 0, 2 }, { 35, 100, 0, 0, 30 });
}

TEST(cross_entropy)
{
    CASES(case_xent, { 1, 1, 1 }, { 3, 15, 5 }, { 4, 16, 16 }, { 5, 17, 20 }, { 6, 31, 8 },
          { 3, 33, 11, 100 }, { 2, 7, 2, 50 }, { 9, 64, 2, 0 }, { 13, 5003, 700 }, { 4, 40, 8, 0, 30 },
          { 5, 33, 11, 100, 12 });
}

typedef struct {
    float *logits, *max, *sum, *at, loss[8], row_max[8], row_sum[8];
} Cut;

/* Loss and gradient of 8 rows of V columns, 5 of them padding, by `ranks` ranks. */
static void run_cut(Env *e, int64_t V, int64_t ranks, const int32_t *target, Cut *c)
{
    enum { N = 8, BLOCKS = 8 };
    int64_t W = V / ranks, J = BLOCKS / ranks;
    Tensor to = tensor_of((int32_t *)(intptr_t)target, I32, N);
    Tensor loss = tensor_of(c->loss, F32, N), rm = tensor_of(c->row_max, F32, N),
           rs = tensor_of(c->row_sum, F32, N);
    StepValues step = { .loss_scale = 0.01f };
    for (int64_t r = 0; r < ranks; r++) {
        Tensor part = tensor_col_slice(tensor_of(c->logits, F32, N, V), r * W, W);
        RUN(e, xent_stats, .block_max = tensor_of(c->max + r * N * J, F32, N, J),
            .block_sum = tensor_of(c->sum + r * N * J, F32, N, J),
            .target_logit = tensor_of(c->at + r * N, F32, N), .logits = part, .target = to,
            .block = V / BLOCKS, .first = r * W, .vocab = V - 5);
    }
    RUN(e, xent_loss, .loss = loss, .row_max = rm, .row_sum = rs,
        .block_max = tensor_of(c->max, F32, ranks, N, J), .block_sum = tensor_of(c->sum, F32, ranks, N, J),
        .target_logit = tensor_of(c->at, F32, ranks, N), .target = to);
    for (int64_t r = 0; r < ranks; r++) {
        RUN(e, xent_bwd, .logits = tensor_col_slice(tensor_of(c->logits, F32, N, V), r * W, W), .target = to,
            .row_max = rm, .row_sum = rs, .step = &step, .weight = 1, .first = r * W, .vocab = V - 5);
    }
}

TEST(cross_entropy_cut_over_ranks)
{
    enum { N = 8 };
    static float logits[2][N * 8 * 37], stats[3][N * 8];
    static const int32_t target[N] = { 0, 36, 37, 290, -1, 111, 148, 3 };
    for (int64_t block = 1; block <= 37; block += 12) {
        int64_t V = 8 * block;
        Cut one = { 0 };
        for (int64_t ranks = 1; ranks <= 8; ranks *= 2) {
            Env e;
            uint64_t state = 3;
            int32_t to[N];
            Cut c = { logits[ranks > 1], stats[0], stats[1], stats[2], { 0 }, { 0 }, { 0 } };
            env_open(&e, isa_best(), 1, 0);
            for (int64_t i = 0; i < N * V; i++) c.logits[i] = (float)test_uniform(&state, -9, 9);
            for (int i = 0; i < N; i++) to[i] = target[i] < V - 5 ? target[i] : 1;
            run_cut(&e, V, ranks, to, &c);
            if (ranks == 1) one = c;
            CHECK_MSG(!memcmp(one.loss, c.loss, sizeof c.loss), "V %d ranks %d", (int)V, (int)ranks);
            CHECK(!memcmp(one.logits, c.logits, (size_t)(N * V) * sizeof(float)));
            CHECK(c.loss[0] > 0 && c.loss[4] == 0);
            env_close(&e);
        }
    }
}

static float tree_of(const float *x, int n)
{
    int half = 1;
    if (n == 1) return x[0];
    while (2 * half < n) half *= 2;
    return tree_of(x, half) + tree_of(x + half, n - half);
}

/* The sum over blocks is the binary tree; all maxima are 0 here, so that nothing else is in it. */
TEST(row_sum_is_a_tree)
{
    for (int J = 1; J <= 20; J++) {
        float max[20] = { 0 }, sum[20], at = 0, loss = 0, row_max = 1, row_sum = 0;
        int32_t target = 0;
        uint64_t state = (uint64_t)J;
        for (int j = 0; j < J; j++) sum[j] = (float)test_uniform(&state, 1, 100);
        Env e;
        env_open(&e, isa_best(), 1, 0);
        RUN(&e, xent_loss, .loss = tensor_of(&loss, F32, 1), .row_max = tensor_of(&row_max, F32, 1),
            .row_sum = tensor_of(&row_sum, F32, 1), .block_max = tensor_of(max, F32, 1, 1, J),
            .block_sum = tensor_of(sum, F32, 1, 1, J), .target_logit = tensor_of(&at, F32, 1, 1),
            .target = tensor_of(&target, I32, 1));
        CHECK_MSG(row_sum == tree_of(sum, J) && row_max == 0.0f, "%d blocks", J);
        env_close(&e);
    }
}

TEST(bad_logits_give_bad_loss)
{
    static const float bad[] = { NAN, INFINITY };
    for (int k = 0; k < 2 * 40; k++) {
        float logits[40], max[3], sum[3], at = 0, loss = 0, row_max = 0, row_sum = 0;
        int32_t target = 7;
        int64_t sums[3] = { 10, 20, 0 };
        for (int i = 0; i < 40; i++) logits[i] = (float)i;
        logits[k / 2] = bad[k % 2];
        Env e;
        env_open(&e, isa_best(), 1, 0);
        RUN(&e, xent_stats, .block_max = tensor_of(max, F32, 1, 3), .block_sum = tensor_of(sum, F32, 1, 3),
            .target_logit = tensor_of(&at, F32, 1), .logits = tensor_of(logits, F32, 1, 40),
            .target = tensor_of(&target, I32, 1), .block = 17, .vocab = 40);
        RUN(&e, xent_loss, .loss = tensor_of(&loss, F32, 1), .row_max = tensor_of(&row_max, F32, 1),
            .row_sum = tensor_of(&row_sum, F32, 1), .block_max = tensor_of(max, F32, 1, 1, 3),
            .block_sum = tensor_of(sum, F32, 1, 1, 3), .target_logit = tensor_of(&at, F32, 1, 1),
            .target = tensor_of(&target, I32, 1));
        RUN(&e, loss_sum, .sums = tensor_of(sums, I64, 3), .loss = tensor_of(&loss, F32, 1),
            .target = tensor_of(&target, I32, 1));
        CHECK_MSG(!isfinite(loss), "logit %d: loss %g", k / 2, (double)loss);
        CHECK(sums[0] == 10 && sums[1] == 21 && sums[2] == 1);
        env_close(&e);
    }
}

static void case_loss_sum(Env *e, const Shape *p)
{
    Tensor loss = env_in(e, F32, 0, 30, p->N), target = env_in(e, I32, -2, 4, p->N),
           sums = env_out(e, I64, 3, 3, 3);
    for (int64_t n = 0; n < p->N; n++) {
        int32_t *t = (int32_t *)target.data + n;
        if (*t < 0) *t = -1, env_f(loss, n)[0] = 0;
    }
    env_settle(e);
    RUN(e, loss_sum, .sums = sums, .loss = env_used(e, loss), .target = target);
    int64_t want = 3, counted = 3;
    for (int64_t n = 0; n < env_n(e, p->N); n++) {
        want += llrint((double)env_f(loss, n)[0] * 268435456.0);
        counted += ((int32_t *)target.data)[n] >= 0;
    }
    const int64_t *got = sums.data;
    if (e->check) CHECK(got[0] == want && got[1] == counted && got[2] == 3);
}

TEST(loss_sum)
{
    CASES(case_loss_sum, { 1 }, { 15 }, { 16 }, { 17 }, { 1000 });
}

/* ---- gradient statistics ---- */

/* A sum of squares of numbers below 2^62, as five words of 32 bits. */
typedef struct {
    uint64_t word[6];
} Wide;

static void wide_add_square(Wide *w, uint64_t a)
{
    unsigned __int128 s = (unsigned __int128)a * a;
    uint64_t carry = 0;
    for (int i = 0; i < 6; i++, s >>= 32) {
        uint64_t sum = w->word[i] + (uint32_t)s + carry;
        w->word[i] = (uint32_t)sum;
        carry = sum >> 32;
    }
}

enum { STATS_FLOAT = 1, STATS_LARGE = 2 };

/* Elements of all sizes up to 2^b, or all just below it; flags: float accumulator. */
static Tensor stats_input(Env *e, const Shape *p)
{
    Tensor g = env_in(e, p->flags & STATS_FLOAT ? F32 : I64, -1e9, 1e9, p->N);
    uint64_t state = 5;
    for (int64_t i = 0; i < p->N; i++) {
        int64_t x = (int64_t)(test_rand(&state) >> (64 - p->b)) >> test_rand(&state) % 40;
        /* 24 bits are a float's */
        if (p->flags & STATS_LARGE) x = (1LL << p->b) - (1 + (x & 7)) * (1LL << (p->b - 24));
        if (i % 3 == 0) x = -x;
        if (p->flags & STATS_FLOAT) ((float *)g.data)[i] = (float)x * 0x1p-20f;
        else ((int64_t *)g.data)[i] = x;
    }
    env_settle(e);
    return g;
}

static int64_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* One tensor, of elements first .. first + count - 1. */
static FlatPart part_of(int64_t first, int64_t count)
{
    return (
        FlatPart){ .grad = first, .value = first, .shard = first, .v = first, .count = count, .flags = FLAT_COUNTS };
}

static Tensor parts_of(const FlatPart *part, int count)
{
    return tensor_of((void *)(uintptr_t)part, I64, count, sizeof *part / sizeof(int64_t));
}

static void case_grad_stats(Env *e, const Shape *p)
{
    Tensor g = stats_input(e, p), max = env_out(e, I64, 2, 2.5, 1), sumsq = env_out(e, I64, 0, 0.5, 1, 4);
    Tensor shift = env_int(e, 19);
    const FlatPart part = part_of(0, env_n(e, p->N));
    RUN(e, grad_stats, .max = max, .sumsq = sumsq, .g = g, .shift = shift, .parts = parts_of(&part, 1),
        .chunks = flat_chunks(part.count));
    if (!e->check) return;
    Wide w = { { 0 } };
    const bool plain = p->flags & STATS_FLOAT;
    float top = 0;
    for (int64_t i = 0; i < env_n(e, p->N); i++) {
        float f = plain ? fabsf(env_f(g, i)[0]) : fabsf((float)((int64_t *)g.data)[i]);
        wide_add_square(&w, (uint64_t)llrintf(plain ? f * 0x1p19f : f));
        if (f > top) top = f;
    }
    const int64_t *limb = sumsq.data;
    for (int i = 0; i < 3; i++) CHECK_MSG((uint64_t)limb[i] == w.word[i], "limb %d", i);
    CHECK((uint64_t)limb[3] == (w.word[3] | w.word[4] << 32) && w.word[5] == 0);
    int64_t bits = bits_of(plain ? top : top * 0x1p-19f);
    CHECK(*(int64_t *)max.data == (bits > 2 ? bits : 2));
}

TEST(grad_stats)
{
    CASES(case_grad_stats, { 1, 0, 0, 30, 0 }, { 15, 0, 0, 60, 0 }, { 16, 0, 0, 30, 1 }, { 17, 0, 0, 62, 0 },
          { 31, 0, 0, 55, 1 }, { 33, 0, 0, 62, 1 }, { 50001, 0, 0, 62, 0 }, { 50002, 0, 0, 40, 1 },
          { 1000, 0, 0, 20, 0 }, { 5000, 0, 0, 43, 0 }, { 3000, 0, 0, 43, STATS_LARGE },
          { 3000, 0, 0, 44, STATS_LARGE }, { 3000, 0, 0, 44, STATS_FLOAT | STATS_LARGE },
          { 3000, 0, 0, 45, STATS_FLOAT | STATS_LARGE });
}

TEST(grad_stats_splits)
{
    enum { N = 1000 };
    static const int64_t cuts[] = { 0, 1, 17, 16 * 20, 16 * 20 + 5, 999, N };
    for (int plain = 0; plain < 2; plain++) {
        Env e;
        env_open(&e, isa_best(), 1, 0);
        Shape p = { .N = N, .b = 61, .flags = plain };
        Tensor g = stats_input(&e, &p), shift = env_int(&e, 20);
        int64_t max[2] = { 0 }, sumsq[2][4] = { { 0 } };
        for (int k = -1; k < 6; k++) {
            int64_t first = k < 0 ? 0 : cuts[5 - k], end = k < 0 ? N : cuts[6 - k];
            const FlatPart part = part_of(first, end - first);
            RUN(&e, grad_stats, .max = tensor_of(&max[k < 0], I64, 1), .sumsq = tensor_of(sumsq[k < 0], I64, 1, 4),
                .g = g, .shift = shift, .parts = parts_of(&part, 1), .chunks = 1);
        }
        CHECK(max[0] == max[1] && max[0] > 0 && !memcmp(sumsq[0], sumsq[1], sizeof sumsq[0]));
        env_close(&e);
    }
}

TEST(grad_stats_tells_what_it_cannot_count)
{
    static const float bad[] = { NAN, INFINITY, -INFINITY };
    static const int64_t large[] = { 1LL << 62, -(1LL << 62), INT64_MIN };
    for (int k = 0; k < 6; k++) {
        Env e;
        env_open(&e, isa_best(), 1, 0);
        Shape p = { .N = 40, .b = 20, .flags = k < 3 };
        Tensor g = stats_input(&e, &p), max = env_out(&e, I64, 0, 0.5, 1),
               sumsq = env_out(&e, I64, 0, 0.5, 1, 4);
        const FlatPart part = part_of(0, 40);
        if (k < 3) ((float *)g.data)[35] = bad[k];
        else ((int64_t *)g.data)[35] = large[k - 3];
        RUN(&e, grad_stats, .max = max, .sumsq = sumsq, .g = g, .shift = env_int(&e, 0), .parts = parts_of(&part, 1),
            .chunks = 1);
        CHECK(*(int64_t *)max.data == bits_of(k < 3 ? INFINITY : k < 5 ? 0x1p62f : 0x1p63f));
        CHECK(((int64_t *)sumsq.data)[3] == 0);
        env_close(&e);
    }
}

/* Tensors of one call get what each gets by itself; one that other ranks count gets nothing. */
TEST(grad_stats_of_many)
{
    enum { N = 4, ELEMENTS = 2 * FLAT_CHUNK };
    static const int64_t first[] = { 64, 128, 192, FLAT_CHUNK + 256 }, count[] = { 3, 64, FLAT_CHUNK + 1, 999 };
    int64_t max[2][N] = { 0 }, sumsq[2][N][4] = { { { 0 } } };
    int32_t bits[N] = { 20, 30, 25, 20 };
    FlatPart part[N];
    Env e;
    env_open(&e, isa_best(), 2, 0);
    Shape p = { .N = ELEMENTS, .b = 50 };
    Tensor g = stats_input(&e, &p), shift = tensor_of(bits, I32, N);
    int64_t chunks = 0;
    for (int i = 0; i < N; i++) {
        part[i] = part_of(first[i], count[i]);
        part[i].number = N - 1 - i;
        part[i].chunk = chunks;
        if (i == 1) part[i].flags = FLAT_DECAYS;
        chunks += flat_chunks(count[i]);
        RUN(&e, grad_stats, .max = tensor_of(max[1], I64, N), .sumsq = tensor_of(sumsq[1], I64, N, 4), .g = g,
            .shift = shift, .parts = parts_of(&part[i], 1), .chunks = flat_chunks(count[i]));
    }
    CHECK(chunks == N + 1);
    RUN(&e, grad_stats, .max = tensor_of(max[0], I64, N), .sumsq = tensor_of(sumsq[0], I64, N, 4), .g = g,
        .shift = shift, .parts = parts_of(part, N), .chunks = chunks);
    for (int i = 0; i < N; i++) CHECK((max[0][i] > 0) == (i != 2) && (sumsq[0][i][0] > 0) == (i != 2));
    CHECK(!memcmp(max[0], max[1], sizeof max[0]) && !memcmp(sumsq[0], sumsq[1], sizeof sumsq[0]));
    env_close(&e);
}

/* ---- step_finish ---- */

typedef struct {
    int64_t max[3], sumsq[3][4], sums[3];
    int32_t shift[3], next[3], overflow, over_limit;
    StepValues step;
    DType acc;
} Finish;

/* Three int64 tensors; squares of 3 * 2^20, 2^36 and nothing. */
static Finish finish_input(void)
{
    return (Finish){ .max = { bits_of(1.5f), bits_of(0x1p-4f), 0 },
                     .sumsq = { { 0, (9LL << 40) >> 32, 0, 0 }, { 0, 0, 1 << 8, 0 }, { 0 } },
                     .sums = { 12345, 50, 0 }, .shift = { 20, 40, 33 }, .acc = I64,
                     .step = { .nominal = 100, .clip = 1.0f, .unscale = 0.25f, .loss_scale = 0.01f } };
}

static void finish(Finish *f)
{
    Env e;
    env_open(&e, isa_best(), 1, 0);
    RUN(&e, step_finish, .max = tensor_of(f->max, I64, 3), .sumsq = tensor_of(f->sumsq, I64, 3, 4),
        .shift = tensor_of(f->shift, I32, 3), .next_shift = tensor_of(f->next, I32, 3),
        .loss_sums = tensor_of(f->sums, I64, 3), .overflow = tensor_of(&f->overflow, I32, 1),
        .over_limit = tensor_of(&f->over_limit, I32, 1), .step = &f->step, .headroom_bits = 16, .acc = f->acc);
    env_close(&e);
}

TEST(step_finish_norm_and_clip)
{
    Finish f = finish_input();
    finish(&f);
    /* tensor 0: (3 * 2^20 * 2^-20)^2 = 9; tensor 1: (2^36 * 2^-40)^2 = 2^-8 */
    double norm = sqrt(9 + 0x1p-8), mean = 100.0 / 50 * 0.25;
    CHECK_CLOSE((double)f.step.grad_norm, norm * mean, 1e-7, " ");
    CHECK_CLOSE((double)f.step.grad_scale, mean * 1 / (norm * mean + 1e-6), 1e-7, " ");
    CHECK(f.step.loss_fixed == 12345 && f.step.counted == 50);
    CHECK(!f.step.overflow && !f.step.nonfinite && !f.step.skip);
    /* 62 - 16 - 10 - ceil(log2 max): 1.5 * 2^20 * 2^-20 -> 1; 2^-4 -> -4; no gradient keeps its shift */
    CHECK(f.next[0] == 36 - 1 && f.next[1] == 36 + 4 && f.next[2] == 33);

    Finish small = finish_input();
    small.step.clip = 10;
    finish(&small);
    CHECK_CLOSE((double)small.step.grad_scale, mean, 1e-7, " ");
    small.step.clip = 0;
    finish(&small);
    CHECK_CLOSE((double)small.step.grad_scale, mean, 1e-7, " ");
}

/* Limbs of three ranks, added up as integers, are the limbs of one. */
TEST(step_finish_adds_ranks)
{
    Finish one = finish_input(), many = finish_input();
    for (int i = 0; i < 4; i++) one.sumsq[0][i] = 0xFFFFFFFFLL, many.sumsq[0][i] = 3 * 0xFFFFFFFFLL;
    int64_t carry = 0;
    for (int i = 0; i < 4; i++) {
        int64_t sum = 3 * one.sumsq[0][i] + carry;
        one.sumsq[0][i] = i < 3 ? sum & 0xFFFFFFFF : sum;
        carry = sum >> 32;
    }
    finish(&one);
    finish(&many);
    CHECK(!memcmp(&one.step, &many.step, sizeof one.step) && one.step.grad_norm > 1e9f);
}

TEST(step_finish_flags)
{
    for (int k = 0; k < 10; k++) {
        Finish f = finish_input();
        int want_overflow = k < 3 || k == 5, want_nonfinite = k == 3 || k == 4;
        if (k == 0) f.overflow = 1;
        if (k == 1) f.max[2] = bits_of(0x1p30f); /* 2^63 units */
        if (k == 2) f.max[0] = bits_of(0x1p42f); /* 2^62 units */
        if (k == 3) f.sums[2] = 2;
        if (k >= 4) {
            f.acc = F32;
            for (int i = 0; i < 3; i++) f.max[i] = bits_of(1);
        }
        if (k == 4) f.max[1] = bits_of(INFINITY);
        if (k == 5) f.max[1] = bits_of(0x1p30f);
        if (k == 7) f.sums[1] = 0;
        if (k == 8) f.max[1] = 0x3F800001;
        if (k == 9) f.over_limit = 1;
        finish(&f);
        CHECK(f.step.over_limit == (k == 9));
        CHECK_MSG(f.step.overflow == want_overflow && f.step.nonfinite == want_nonfinite, "case %d", k);
        CHECK_MSG(f.step.skip == (want_overflow || want_nonfinite || k == 7 || k == 9), "case %d", k);
        CHECK(isfinite(f.step.grad_norm) && isfinite(f.step.grad_scale));
        CHECK((f.step.grad_scale == 0) == f.step.skip);
        if (k < 3) CHECK(f.next[0] == 8 && f.next[1] == 28 && f.next[2] == 21);
        if (k == 4) CHECK(f.next[0] == 36 && f.next[1] == 40);
        if (k == 5) CHECK(f.next[0] == 36 && f.next[1] == 6);
        if (k == 8) CHECK(f.next[0] == 36 && f.next[1] == 35);
    }
}

TEST(shift_stays_in_range)
{
    Finish f = finish_input();
    f.shift[0] = -55, f.overflow = 1;
    finish(&f);
    CHECK(f.next[0] == -60);
    f = finish_input();
    f.shift[0] = 95, f.max[0] = bits_of(0x1p-95f);
    finish(&f);
    CHECK(f.next[0] == 100);
}

/* ---- AdamW ---- */

static StepValues adam_step(void)
{
    return (StepValues){ .lr = 0.01f, .correct1 = 0.271f, .correct2 = 0.05f, .grad_scale = 0.7f };
}

enum { ADAM_PLAIN = 1, ADAM_SKIP = 2, ADAM_COPY = 4, ADAM_AHEAD = 10 };
#define ADAM_HIDDEN 0.3f

/* Two tensors in n elements of the shards, of which the last of the first half is nobody's; in whole buffers they lie
 * ADAM_AHEAD elements further. The second decays, and is a matrix of a block. */
static void adam_parts(FlatPart part[2], int64_t n)
{
    const int64_t half = n / 2;
    part[0] = (FlatPart){ .grad = ADAM_AHEAD, .value = ADAM_AHEAD, .count = half - 1 };
    part[1] = (FlatPart){ .grad = half + ADAM_AHEAD,
                          .value = half + ADAM_AHEAD,
                          .shard = half,
                          .v = half,
                          .count = n - half,
                          .chunk = flat_chunks(half - 1),
                          .number = 1,
                          .flags = FLAT_DECAYS | FLAT_HIDDEN };
}

static void case_adamw(Env *e, const Shape *p)
{
    bool plain = p->flags & ADAM_PLAIN, skip = p->flags & ADAM_SKIP, copied = p->flags & ADAM_COPY;
    const int64_t whole = p->N + ADAM_AHEAD, n = env_n(e, p->N), ahead = copied ? 0 : ADAM_AHEAD;
    Tensor w = env_out(e, F32, -2, 2, p->N + ahead), m = env_out(e, F32, -1, 1, p->N), v = env_out(e, F32, 0, 1, p->N);
    Tensor g = env_in(e, plain ? F32 : I64, plain ? -3 : -3e12, plain ? 3 : 3e12, whole),
           shift = env_in(e, I32, 40, 41, 2);
    Tensor copy = { 0 };
    if (copied) copy = env_out(e, F32, -2, 2, whole);
    StepValues step = adam_step();
    FlatPart part[2];
    step.skip = skip;
    adam_parts(part, n);
    const int first = part[0].count > 0 ? 0 : 1; /* tables have no empty tensors */
    part[first].chunk = 0;
    RUN(e, adamw, .w = w, .m = m, .v = v, .g = g, .copy = copy, .shift = shift, .step = &step, .beta1 = 0.9f,
        .beta2 = 0.95f, .eps = 1e-3f, .decay = 0.1f, .hidden_rate = ADAM_HIDDEN,
        .parts = parts_of(part + first, 2 - first), .chunks = part[1].chunk + flat_chunks(part[1].count));
    for (int64_t i = 0; e->check && i < n; i++) {
        float w0 = *(const float *)env_before(e, env_f(w, i + ahead)), m0 = *(const float *)env_before(e, env_f(m, i));
        float v0 = *(const float *)env_before(e, env_f(v, i)), f, decay = i < part[1].shard ? 0 : 0.1f;
        const void *g0 = env_before(e, env_row(&g, i + ADAM_AHEAD));
        f = plain ? *(const float *)g0 : (float)*(const int64_t *)g0 * 0x1p-40f;
        f *= 0.7f;
        skip = p->flags & ADAM_SKIP || i == part[1].shard - 1;
        float m1 = fmaf(0.9f, m0, (1.0f - 0.9f) * f), v1 = fmaf(0.95f, v0, (1.0f - 0.95f) * (f * f));
        const float share = i < part[1].shard ? 1 : ADAM_HIDDEN;
        float u = m1 * (1.0f / 0.271f) / (sqrtf(v1 * (1.0f / 0.05f)) + 1e-3f * share);
        float w1 = fmaf(-(0.01f * share), fmaf(decay, w0, u), w0), *to = env_f(copy, i + ADAM_AHEAD);
        CHECK(env_f(w, i + ahead)[0] == (skip ? w0 : w1) && env_f(m, i)[0] == (skip ? m0 : m1));
        CHECK(env_f(v, i)[0] == (skip ? v0 : v1));
        if (copied) CHECK(*to == (skip ? *(const float *)env_before(e, to) : w1));
        double dm = 0.9 * (double)m0 + 0.1 * (double)f, dv = 0.95 * (double)v0 + 0.05 * (double)f * (double)f;
        const double rate = i < part[1].shard ? 1 : 0.3;
        double want =
            (double)w0 - 0.01 * rate * (dm / 0.271 / (sqrt(dv / 0.05) + 1e-3 * rate) + (double)decay * (double)w0);
        if (!skip) CHECK_CLOSE((double)env_f(w, i + ahead)[0], want, 3e-7, "element %d", (int)i);
    }
}

TEST(adamw)
{
    CASES(case_adamw, { 1 }, { 15, 0, 0, 0, ADAM_PLAIN }, { 16, 0, 0, 0, ADAM_SKIP }, { 17 },
          { 31, 0, 0, 0, ADAM_PLAIN | ADAM_COPY }, { 33, 0, 0, 0, ADAM_SKIP | ADAM_PLAIN | ADAM_COPY },
          { 50003, 0, 0, 0, ADAM_COPY }, { 40000, 0, 0, 0, ADAM_PLAIN });
}

/* Ranks own ranges that start anywhere: the same bits. */
TEST(adamw_splits)
{
    enum { N = 200 };
    static const int64_t cuts[] = { 0, 1, 17, 100, 199, N };
    float w[2][N], m[2][N], v[2][N];
    int64_t g[2][N];
    int32_t bits = 30;
    uint64_t state = 8;
    for (int i = 0; i < N; i++) {
        w[0][i] = w[1][i] = (float)test_uniform(&state, -1, 1);
        m[0][i] = m[1][i] = (float)test_uniform(&state, -1, 1);
        v[0][i] = v[1][i] = (float)test_uniform(&state, 0, 1);
        g[0][i] = g[1][i] = (int64_t)test_rand(&state) >> 30;
    }
    Env e;
    env_open(&e, isa_best(), 1, 0);
    StepValues step = adam_step();
    for (int k = -1; k < 5; k++) {
        int64_t at = k < 0 ? 0 : cuts[k], count = k < 0 ? N : cuts[k + 1] - at;
        int to = k >= 0;
        const FlatPart part = part_of(at, count);
        RUN(&e, adamw, .w = tensor_of(w[to], F32, N), .m = tensor_of(m[to], F32, N), .v = tensor_of(v[to], F32, N),
            .g = tensor_of(g[to], I64, N), .shift = tensor_of(&bits, I32, 1), .step = &step, .beta1 = 0.9f,
            .beta2 = 0.999f, .eps = 1e-8f, .parts = parts_of(&part, 1), .chunks = 1);
    }
    CHECK(!memcmp(w[0], w[1], sizeof w[0]) && !memcmp(m[0], m[1], sizeof m[0]) &&
          !memcmp(v[0], v[1], sizeof v[0]));
    env_close(&e);
}

/* The copy is the new weight to the nearest of its dtype. */
TEST(adamw_copies)
{
    enum { N = 100 };
    for (int k = 0; k < 2; k++) {
        float w[N], m[N] = { 0 }, v[N] = { 0 }, g[N];
        uint16_t copy[N] = { 0 };
        int32_t bits = 0;
        const FlatPart part = part_of(0, N);
        Env e;
        env_open(&e, isa_best(), 1, 0);
        for (int i = 0; i < N; i++) w[i] = ldexpf(1.2345f, -i), g[i] = (float)(i % 3) * 0x1p-40f;
        w[3] = INFINITY, w[4] = NAN, w[5] = 0x1.ffp127f;
        StepValues step = adam_step();
        RUN(&e, adamw, .w = tensor_of(w, F32, N), .m = tensor_of(m, F32, N), .v = tensor_of(v, F32, N),
            .g = tensor_of(g, F32, N), .copy = tensor_of(copy, k ? F16 : BF16, N), .shift = tensor_of(&bits, I32, 1),
            .step = &step, .beta1 = 0.9f, .beta2 = 0.999f, .eps = 1e-8f, .parts = parts_of(&part, 1), .chunks = 1);
        for (int i = 0; i < N; i++) CHECK(copy[i] == (k ? f16_from_float(w[i]) : bf16_from_float(w[i])));
        CHECK(copy[0] != 0 && copy[4] == 0x7FFF);
        env_close(&e);
    }
}

/* ---- Lion, and SGD with momentum ---- */

enum { MOMENT_LION = 8 };

static void case_one_moment(Env *e, const Shape *p)
{
    const bool plain = p->flags & ADAM_PLAIN, copied = p->flags & ADAM_COPY, lion = p->flags & MOMENT_LION;
    const int64_t whole = p->N + ADAM_AHEAD, n = env_n(e, p->N), ahead = copied ? 0 : ADAM_AHEAD;
    Tensor w = env_out(e, F32, -2, 2, p->N + ahead), m = env_out(e, F32, -1, 1, p->N), copy = { 0 };
    Tensor g = env_in(e, plain ? F32 : I64, plain ? -3 : -3e12, plain ? 3 : 3e12, whole),
           shift = env_in(e, I32, 40, 41, 2);
    if (copied) copy = env_out(e, F32, -2, 2, whole);
    StepValues step = adam_step();
    FlatPart part[2];
    step.skip = p->flags & ADAM_SKIP;
    adam_parts(part, n);
    const int first = part[0].count > 0 ? 0 : 1; /* tables have no empty tensors */
    part[first].chunk = 0;
    RUN(e, one_moment, .w = w, .m = m, .g = g, .copy = copy, .shift = shift, .step = &step, .beta1 = 0.9f,
        .beta2 = 0.99f, .decay = 0.1f, .hidden_rate = ADAM_HIDDEN, .lion = lion,
        .parts = parts_of(part + first, 2 - first), .chunks = part[1].chunk + flat_chunks(part[1].count));
    for (int64_t i = 0; e->check && i < n; i++) {
        const float w0 = *(const float *)env_before(e, env_f(w, i + ahead)),
                    m0 = *(const float *)env_before(e, env_f(m, i));
        const float decay = i < part[1].shard ? 0 : 0.1f, share = i < part[1].shard ? 1 : ADAM_HIDDEN;
        const void *g0 = env_before(e, env_row(&g, i + ADAM_AHEAD));
        const float f = (plain ? *(const float *)g0 : (float)*(const int64_t *)g0 * 0x1p-40f) * 0.7f;
        const bool skip = step.skip || i == part[1].shard - 1;
        const float mixed = fmaf(0.9f, m0, (1.0f - 0.9f) * f);
        const float m1 = lion ? fmaf(0.99f, m0, (1.0f - 0.99f) * f) : fmaf(0.9f, m0, f);
        const float u = lion ? (float)((mixed > 0) - (mixed < 0)) : m1;
        const float w1 = fmaf(-(0.01f * share), fmaf(decay, w0, u), w0), *to = env_f(copy, i + ADAM_AHEAD);
        CHECK(env_f(w, i + ahead)[0] == (skip ? w0 : w1) && env_f(m, i)[0] == (skip ? m0 : m1));
        if (copied) CHECK(*to == (skip ? *(const float *)env_before(e, to) : w1));
        const double du = lion ? (mixed > 0) - (mixed < 0) : 0.9 * (double)m0 + (double)f;
        const double want = (double)w0 - 0.01 * (double)share * (du + (double)decay * (double)w0);
        if (!skip) CHECK_CLOSE((double)env_f(w, i + ahead)[0], want, 3e-7, "element %d", (int)i);
    }
}

TEST(one_moment)
{
    CASES(case_one_moment, { 1 }, { 15, 0, 0, 0, ADAM_PLAIN | MOMENT_LION }, { 16, 0, 0, 0, ADAM_SKIP },
          { 17, 0, 0, 0, MOMENT_LION }, { 31, 0, 0, 0, ADAM_PLAIN | ADAM_COPY },
          { 33, 0, 0, 0, ADAM_SKIP | ADAM_PLAIN | ADAM_COPY | MOMENT_LION },
          { 50003, 0, 0, 0, ADAM_COPY | MOMENT_LION }, { 40000, 0, 0, 0, ADAM_PLAIN });
}

/* Where moment and gradient are 0, so is Lion's direction; of numbers as small as there are it is not. */
TEST(lion_of_nothing)
{
    enum { N = 40 };
    float w[N], m[N] = { 0 }, g[N] = { 0 };
    int32_t bits = 0;
    const FlatPart part = part_of(0, N);
    StepValues step = adam_step();
    Env e;
    env_open(&e, isa_best(), 1, 0);
    for (int i = 0; i < N; i++) w[i] = 1;
    g[7] = -1e-30f, m[9] = 1e-30f, m[11] = -0.0f;
    RUN(&e, one_moment, .w = tensor_of(w, F32, N), .m = tensor_of(m, F32, N), .g = tensor_of(g, F32, N),
        .shift = tensor_of(&bits, I32, 1), .step = &step, .beta1 = 0.9f, .beta2 = 0.99f, .hidden_rate = 1, .lion = 1,
        .parts = parts_of(&part, 1), .chunks = 1);
    for (int i = 0; i < N; i++) CHECK(w[i] == (i == 7 ? 1.01f : i == 9 ? 0.99f : 1));
    env_close(&e);
}

static uint16_t nearest_bf16(double x)
{
    const float down = bf16_to_float((uint16_t)(half_float_bits((float)x) >> 16));
    const float step = bf16_to_float((uint16_t)((half_float_bits((float)x) >> 16) + 1)) - down;
    return bf16_from_float(fabs(x - (double)down) * 2 > fabs((double)step) ? down + step : down);
}

/* Moments in bf16: a loop in float64 that rounds them after each update, over several updates, and in each build the
 * bits of updates in fp32 whose moments are rounded behind each. */
TEST(adamw_narrow_moments)
{
    enum { N = 1500, UPDATES = 6 };
    static float w[2][N], wide[2][N], g[N];
    static double exact[3][N];
    static uint16_t m[N], v[N];
    int32_t bits = 0;
    uint64_t state = 3;
    Env e;
    env_open(&e, isa_best(), 2, 0);
    StepValues step = adam_step();
    const FlatPart part = part_of(3, N - 5);
    memset(m, 0, sizeof m), memset(v, 0, sizeof v), memset(wide, 0, sizeof wide), memset(exact, 0, sizeof exact);
    for (int i = 0; i < N; i++) w[0][i] = w[1][i] = (float)test_uniform(&state, -1, 1), exact[0][i] = (double)w[0][i];
    int64_t off = 0;
    for (int u = 0; u < UPDATES; u++) {
        for (int i = 0; i < N; i++) g[i] = (float)test_uniform(&state, -3, 3);
        for (int kind = 0; kind < 2; kind++)
            RUN(&e, adamw, .w = tensor_of(w[kind], F32, N),
                .m = kind ? tensor_of(m, BF16, N) : tensor_of(wide[0], F32, N),
                .v = kind ? tensor_of(v, BF16, N) : tensor_of(wide[1], F32, N), .g = tensor_of(g, F32, N),
                .shift = tensor_of(&bits, I32, 1), .step = &step, .beta1 = 0.9f, .beta2 = 0.95f, .eps = 1e-8f,
                .parts = parts_of(&part, 1), .chunks = 1);
        for (int i = 0; i < N; i++) {
            const bool own = i >= 3 && i < N - 2;
            const double x = (double)(g[i] * 0.7f);
            double *em = &exact[1][i], *ev = &exact[2][i];
            if (own) {
                *em = (double)0.9f * *em + (double)(1.0f - 0.9f) * x;
                *ev = (double)0.95f * *ev + (double)(1.0f - 0.95f) * x * x;
                exact[0][i] -= (double)0.01f * (*em / (double)0.271f / (sqrt(*ev / (double)0.05f) + 1e-8));
                *em = (double)bf16_to_float(nearest_bf16(*em));
                *ev = (double)bf16_to_float(nearest_bf16(*ev));
            }
            for (int k = 0; k < 2; k++) wide[k][i] = bf16_to_float(bf16_from_float(wide[k][i]));
            CHECK(w[1][i] == w[0][i] && bf16_to_float(m[i]) == wide[0][i] && bf16_to_float(v[i]) == wide[1][i]);
            /* (a sum near the middle between two numbers may be rounded to the other) */
            off += (double)bf16_to_float(m[i]) != *em || (double)bf16_to_float(v[i]) != *ev;
            CHECK_CLOSE((double)bf16_to_float(m[i]), *em, 0x1p-6, "m %d", i);
            CHECK_CLOSE((double)bf16_to_float(v[i]), *ev, 0x1p-6, "v %d", i);
            CHECK_CLOSE((double)w[1][i], exact[0][i], 2e-4, "w %d", i);
            if (!own) CHECK(!m[i] && !v[i] && (double)w[1][i] == exact[0][i]);
        }
    }
    CHECK_MSG(off < UPDATES * N / 200, "%d moments are rounded to another number", (int)off);
    FAILS(op(&e.dev.stream, adamw, .w = tensor_of(w[0], F32, N), .m = tensor_of(m, BF16, N),
             .v = tensor_of(wide[1], F32, N), .g = tensor_of(g, F32, N), .shift = tensor_of(&bits, I32, 1),
             .step = &step, .parts = parts_of(&part, 1), .chunks = 1),
          ERR_SHAPE, "adamw: m is");
    env_close(&e);
}

/* ---- QK-clip ---- */

typedef struct {
    QkRows rows;
    int64_t columns, first, count; /* the elements of a call */
    double alpha;
    bool skip;
} Clip;

enum { CLIP_HEADS = 8, CLIP_MOST = 4096 };

/* The factor of a row by the rule, in float64. */
static double clip_factor(const Clip *c, const float *logit, double threshold, int64_t row)
{
    const QkRows *q = &c->rows;
    const int64_t chunk = row / q->chunk, in = row % q->chunk, head = chunk / q->chunks * q->heads;
    double most = -INFINITY, power = 0;
    for (int i = 0; i < q->heads; i++) most = fmax(most, (double)logit[head + i]);
    const int part = in < q->rows[0] ? 0 : in < q->rows[0] + q->rows[1] ? 1 : 2;
    if (part < 2) power = q->kind[part] == QK_QUERY ? c->alpha : q->kind[part] == QK_KEY ? 1 - c->alpha : 1;
    return pow(fmin(1, threshold / most), most > threshold && !c->skip ? power : 0);
}

static void check_clip(const Clip *c, Isa isa, int threads, DType copied)
{
    static const float logit[CLIP_HEADS] = { 150, 80, 30, 99.5f, 100, -200, 4000, 101 };
    float w[CLIP_MOST], copy[CLIP_MOST], before[CLIP_MOST];
    int64_t order[CLIP_HEADS];
    StepValues step = { .skip = c->skip };
    Env e;
    uint64_t seed = 3;
    for (int i = 0; i < CLIP_HEADS; i++) order[i] = logit_order(logit[i]);
    for (int i = 0; i < CLIP_MOST; i++) before[i] = w[i] = (float)test_uniform(&seed, -2, 2);
    memset(copy, 0x55, sizeof copy);
    env_open(&e, isa, threads, 0);
    RUN(&e, qk_clip, .w = tensor_of(w + c->first, F32, c->count),
        .copy = copied == F32 ? (Tensor){ 0 } : tensor_of((uint16_t *)copy + c->first, copied, c->count),
        .logit_max = tensor_of(order, I64, CLIP_HEADS), .step = &step, .rows = c->rows, .first = c->first,
        .columns = c->columns, .threshold = 100, .alpha = (float)c->alpha);
    for (int64_t i = 0; i < CLIP_MOST; i++) {
        const bool in = i >= c->first && i < c->first + c->count;
        const double factor = in ? clip_factor(c, logit, 100, i / c->columns) : 1;
        const uint16_t kept = ((uint16_t *)copy)[i];
        if (factor == 1) CHECK(!memcmp(&w[i], &before[i], sizeof *w) && kept == 0x5555);
        else CHECK_CLOSE((double)w[i], (double)before[i] * factor, 2e-7, "element %d", (int)i);
        if (factor == 1 || copied == F32) continue;
        CHECK(kept == (copied == BF16 ? bf16_from_float(w[i]) : f16_from_float(w[i])));
    }
    env_close(&e);
}

/* Whole matrices, and what a ZeRO shard has: from within a row to within another. */
TEST(qk_clip)
{
    static const QkRows fused = { 12, { 6, 3 }, { QK_QUERY, QK_KEY }, .heads = 2, .chunks = 1 };
    static const QkRows parts = { 6, { 3, 1 }, { QK_QUERY, QK_KEY }, .heads = 2, .chunks = 2 };
    static const QkRows latent = { 5, { 3, 2 }, { QK_QUERY, QK_SHARED }, .heads = 1, .chunks = 1 };
    static const QkRows latent_keys = { 7, { 3, 0 }, { QK_KEY, QK_KEY }, .heads = 1, .chunks = 1 };
    static const Clip clips[] = {
        { fused, 20, 0, 48 * 20, .5 },        { fused, 20, 7, 333, .25 },  { fused, 1, 0, 48, .5 },
        { parts, 17, 0, 48 * 17, .5 },        { parts, 17, 250, 5, .7 },   { latent, 33, 0, 40 * 33, .5 },
        { latent, 33, 40, 1000, 0 },          { latent, 33, 33, 33, 1 },   { latent_keys, 64, 0, 56 * 64, .5 },
        { latent_keys, 64, 65, 3000, .25 },   { fused, 20, 0, 960, .5, .skip = true },
    };
    static const DType copied[] = { F32, BF16, F16 };
    for (size_t i = 0; i < sizeof clips / sizeof *clips; i++)
        for (int isa = ISA_AVX512; isa < ISA_COUNT; isa++)
            if (isa_supported((Isa)isa)) check_clip(&clips[i], (Isa)isa, 1 + (int)i % 2, copied[i % 3]);
}

/* Published numbers: two heads of a group, t = 100; then a latent head. */
TEST(qk_clip_of_two_heads)
{
    static const float logit[2] = { 150, 80 };
    int64_t order[2] = { logit_order(logit[0]), logit_order(logit[1]) };
    float w[6] = { 1, 1, 1, 1, 1, 1 }, latent[8] = { 1, 1, 1, 1, 1, 1, 1, 1 }, keys[4] = { 1, 1, 1, 1 };
    StepValues step = { 0 };
    const Tensor logits = tensor_of(order, I64, 2);
    Env e;
    env_open(&e, isa_best(), 1, 0);
    RUN(&e, qk_clip, .w = tensor_of(w, F32, 6), .logit_max = logits, .step = &step,
        .rows = { 6, { 4, 1 }, { QK_QUERY, QK_KEY }, .heads = 2, .chunks = 1 }, .columns = 1, .threshold = 100,
        .alpha = 0.5f);
    RUN(&e, qk_clip, .w = tensor_of(latent, F32, 8), .logit_max = logits, .step = &step,
        .rows = { 4, { 2, 2 }, { QK_QUERY, QK_SHARED }, .heads = 1, .chunks = 1 }, .columns = 1, .threshold = 100,
        .alpha = 0.5f);
    RUN(&e, qk_clip, .w = tensor_of(keys, F32, 4), .logit_max = logits, .step = &step,
        .rows = { 2, { 1, 0 }, { QK_KEY, QK_KEY }, .heads = 1, .chunks = 1 }, .columns = 1, .threshold = 100,
        .alpha = 0.5f);
    for (int i = 0; i < 5; i++) CHECK_CLOSE((double)w[i], 0.8164965809, 1e-7, "row %d", i);
    for (int i = 0; i < 4; i++) CHECK_CLOSE((double)latent[i], i < 2 ? 0.8164965809 : 0.6666666667, 1e-7, "row %d", i);
    for (int i = 4; i < 8; i++) CHECK(latent[i] == 1);
    CHECK_CLOSE((double)keys[0], 0.8164965809, 1e-7, "key");
    CHECK(w[5] == 1 && keys[1] == 1 && keys[2] == 1 && keys[3] == 1);
    env_close(&e);
}

/* ---- Muon ---- */

enum { MUON_PLAIN = 1, MUON_SKIP = 2, MUON_COPY = 4, MUON_TALL = 8, MUON_LOOKS_AHEAD = 16, MUON_AHEAD = 3 };

/* N rows of D columns of a buffer whose rows have two columns more, in a matrix of their own. */
static FlatBox box_of(const Env *e, const Shape *p, bool copied)
{
    const int32_t rows = (int32_t)env_n(e, p->N), columns = (int32_t)p->D, tall = p->flags & MUON_TALL;
    return (FlatBox){ .grad = MUON_AHEAD,
                      .value = copied ? 2 * MUON_AHEAD : 0,
                      .at = 1,
                      .rows = rows,
                      .columns = columns,
                      .ld = columns + 2,
                      .row_step = tall ? 1 : columns,
                      .column_step = tall ? rows : 1,
                      .flags = FLAT_DECAYS,
                      .scale = 1.5f };
}

static float gradient_at(const Env *e, Tensor g, int64_t i)
{
    const void *at = env_before(e, env_row(&g, i));
    return (g.dtype == F32 ? *(const float *)at : (float)*(const int64_t *)at * 0x1p-40f) * 0.7f;
}

static void case_muon(Env *e, const Shape *p)
{
    const bool plain = p->flags & MUON_PLAIN, copied = p->flags & MUON_COPY, skip = p->flags & MUON_SKIP;
    const int64_t most = p->N * (p->D + 2), all = p->N * p->D + 1, n = env_n(e, p->N) * (p->D + 2);
    Tensor m = env_out(e, F32, -1, 1, most), w = env_out(e, F32, -2, 2, most), copy = { 0 };
    Tensor g = env_in(e, plain ? F32 : I64, plain ? -3 : -3e12, plain ? 3 : 3e12, most + MUON_AHEAD);
    Tensor shift = env_in(e, I32, 40, 41, 1), y = env_out(e, F32, 0, 1, all), x = env_in(e, F32, -1, 1, all);
    Tensor from = env_in(e, F32, -1, 1, most), there = env_out(e, F32, 0, 1, all), back = env_out(e, F32, 0, 1, most);
    if (copied) copy = env_out(e, F32, -2, 2, most + 2 * MUON_AHEAD);
    const StepValues step = { .lr = 0.01f, .grad_scale = 0.7f, .skip = skip };
    const FlatPart part[2] = {
        { .grad = MUON_AHEAD, .count = n - 2, .flags = FLAT_MUON },
        { .grad = MUON_AHEAD + n - 2, .shard = n - 2, .count = 2, .chunk = flat_chunks(n - 2) }
    };
    const FlatBox box = box_of(e, p, copied);
    const Tensor boxes = tensor_of((void *)(uintptr_t)&box, I64, 1, sizeof box / sizeof(int64_t));
    const int64_t chunks = flat_chunks((int64_t)box.rows * box.columns);
    RUN(e, muon_moment, .m = m, .g = g, .shift = shift, .parts = parts_of(part, 2), .chunks = part[1].chunk + 1,
        .step = &step, .beta = 0.95f);
    RUN(e, muon_pack, .y = y, .m = m, .g = g, .shift = shift, .boxes = boxes, .chunks = chunks, .step = &step,
        .beta = 0.95f, .nesterov = p->flags & MUON_LOOKS_AHEAD);
    RUN(e, muon_apply, .w = w, .copy = copy, .x = x, .boxes = boxes, .chunks = chunks, .step = &step, .decay = 0.1f);
    RUN(e, box_copy, .y = there, .x = from, .boxes = boxes, .chunks = chunks);
    RUN(e, box_copy, .y = back, .x = x, .boxes = boxes, .chunks = chunks, .back = 1);
    for (int64_t i = 0; e->check && i < n; i++) {
        const int64_t r = i / (p->D + 2), c = i % (p->D + 2), at = 1 + r * box.row_step + c * box.column_step;
        const float m0 = *(const float *)env_before(e, env_f(m, i)), w0 = *(const float *)env_before(e, env_f(w, i));
        const float f = gradient_at(e, g, i + MUON_AHEAD), rest = (1.0f - 0.95f) * f;
        const float m1 = skip || i >= n - 2 ? m0 : fmaf(0.95f, m0, rest);
        CHECK(env_f(m, i)[0] == m1);
        if (c >= p->D) {
            CHECK(env_f(w, i)[0] == w0 && !memcmp(env_f(back, i), env_before(e, env_f(back, i)), sizeof(float)));
            continue;
        }
        const float w1 = skip ? w0 : fmaf(-0.01f, fmaf(0.1f, w0, 1.5f * env_f(x, at)[0]), w0);
        CHECK(env_f(y, at)[0] == (p->flags & MUON_LOOKS_AHEAD ? fmaf(0.95f, m1, rest) : m1));
        CHECK(env_f(w, i)[0] == w1 && env_f(there, at)[0] == env_f(from, i)[0] && env_f(back, i)[0] == env_f(x, at)[0]);
        if (copied && !skip) CHECK(env_f(copy, i + 2 * MUON_AHEAD)[0] == w1);
        const double want = (double)w0 - 0.01 * (0.1 * (double)w0 + 1.5 * (double)env_f(x, at)[0]);
        if (!skip) CHECK_CLOSE((double)w1, want, 3e-7, "element %d", (int)i);
    }
}

TEST(muon)
{
    CASES(case_muon, { 2, 2 }, { 5, 17, 0, 0, MUON_PLAIN | MUON_TALL }, { 16, 16, 0, 0, MUON_SKIP | MUON_LOOKS_AHEAD },
          { 5, 33, 0, 0, MUON_COPY | MUON_LOOKS_AHEAD }, { 70, 600, 0, 0, MUON_COPY | MUON_TALL | MUON_PLAIN },
          { 200, 90, 0, 0, MUON_LOOKS_AHEAD | MUON_TALL }, { 9, 40, 0, 0, MUON_SKIP | MUON_COPY });
}

static void case_normalize(Env *e, const Shape *p)
{
    const double size = p->flags ? 1e-30 : 2;
    Tensor y = env_out(e, F32, 8, 9, p->N, p->D), sums = env_out(e, I64, 0, 1, p->N),
           x = env_in(e, F32, -size, size, p->N, p->D);
    const int64_t n = env_n(e, p->N);
    RUN(e, normalize, .y = tensor_row_slice(y, 0, n), .sums = tensor_row_slice(sums, 0, n),
        .x = tensor_row_slice(x, 0, n), .eps = 1e-7f);
    double sum = 0;
    for (int64_t k = 0; e->check && k < n * p->D; k++) sum += pow((double)env_f(x, k / p->D)[k % p->D], 2);
    const double norm = fmax(sqrt(sum), (double)1e-7f);
    for (int64_t k = 0; e->check && k < n * p->D; k++) {
        const double want = (double)env_f(x, k / p->D)[k % p->D] / norm, got = (double)env_f(y, k / p->D)[k % p->D];
        CHECK_MSG(fabs(got - want) <= 2e-7 * fabs(want), "element %d: %.9g, want %.9g", (int)k, got, want);
    }
}

TEST(normalize)
{
    CASES(case_normalize, { 1, 1 }, { 1, 33 }, { 3, 15 }, { 40, 100 }, { 300, 70 }, { 7, 40, 0, 0, 1 });
}

static void case_mix(Env *e, const Shape *p)
{
    Tensor y = env_out(e, F32, -2, 2, p->N, p->D), x = env_in(e, F32, -2, 2, p->N, p->D);
    RUN(e, mix, .y = y, .x = env_used(e, x), .a = -4.775f, .b = 2.0315f);
    for (int64_t k = 0; e->check && k < env_n(e, p->N) * p->D; k++) {
        const float *to = env_f(y, k / p->D) + k % p->D, y0 = *(const float *)env_before(e, to);
        CHECK(*to == fmaf(-4.775f, env_f(x, k / p->D)[k % p->D], 2.0315f * y0));
    }
}

TEST(mix)
{
    CASES(case_mix, { 1, 1 }, { 3, 15 }, { 5, 33 }, { 40, 100 });
}

TEST_MAIN
