/*
 * A ring of ranks that takes keys in the order of arrival (layer/keys_rotate.c): losses and gradients beside those
 * of one rank, whose attention is one call; the same bits however late messages are; as many messages as are needed,
 * and bytes. That memory is as planned, tiny_train says.
 */
#include "test.h"
#include "tiny.h"

enum { STEPS = 1 }; /* AdamW would make much of little differences in the next one */

typedef struct {
    ContextComm way;
    int cp, tp, heads; /* heads: of a hierarchical exchange */
    ContextCut cut;
    int delay_ms, threads;
} Shape;

static TinyRun train(TrainSpec spec, Shape l)
{
    TinyRun r = { .spec = spec, .steps = STEPS, .delay_ms = l.delay_ms, .keep_state = true };
    r.grid = (Grid){ .tp = l.tp ? l.tp : 1, .cp = l.cp, .dp = 1, .cp_heads = l.heads };
    r.spec.exact = false;
    r.spec.cut = l.cut;
    r.spec.model.context = layer_pattern_all((int32_t)l.way);
    r.spec.device.threads = l.threads ? l.threads : 1;
    tiny_train(&r);
    CHECK_MSG(r.err == ERR_OK, "%s", r.message);
    return r;
}

static void release(TinyRun *r)
{
    for (int i = 0; i < 3; i++) free(r->state[i]);
}

/* The largest difference of the first moments, sums of gradients, by the largest of them; NaN stays. */
static double distance(const TinyRun *a, const TinyRun *b)
{
    double most = 0, difference = 0;
    for (int64_t i = 0; i < a->global_count; i++) {
        const double x = a->state[1][i], y = b->state[1][i];
        most = fmax(most, fabs(x));
        if (!(fabs(x - y) <= difference)) difference = fabs(x - y);
    }
    return difference / most;
}

static void check_shapes(TrainSpec spec, const Shape *list, size_t count, double tolerance)
{
    TinyRun one = train(spec, (Shape){ .cp = 1 });
    for (size_t i = 0; i < count; i++) {
        TinyRun r = train(spec, list[i]);
        const double apart = distance(&one, &r);
        for (int k = 0; k < STEPS; k++)
            CHECK_MSG(fabs(r.loss[k] - one.loss[k]) <= tolerance * one.loss[k],
                      "shape %zu, step %d: %.8f, one rank %.8f", i, k, r.loss[k], one.loss[k]);
        CHECK_MSG(apart <= 10 * tolerance, "shape %zu: gradients %.1e apart", i, apart);
        release(&r);
    }
    release(&one);
}

#define RING CONTEXT_RING
#define CHECK_SHAPES(spec, tolerance, ...) \
    check_shapes(spec, (const Shape[]){ __VA_ARGS__ }, sizeof((Shape[]){ __VA_ARGS__ }) / sizeof(Shape), tolerance)

TEST(near_one_rank)
{
    CHECK_SHAPES(tiny_gpt2(), 2e-7, { RING, 2 }, { RING, 4 }, { RING, 8 }, { RING, 2, .cut = CONTEXT_CONTIGUOUS },
                 { CONTEXT_HIERARCHICAL, 4, .heads = 2 });
    CHECK_SHAPES(tiny_llama(), 2e-7, { RING, 4 }, { RING, 2, .tp = 2 });
}

/* Windows that see parts of the sequence, on which ranks agree who sends what; documents; sinks; keys and values of
 * different widths. */
TEST(near_one_rank_with_masks)
{
    TrainSpec apart = tiny_apart(tiny_llama()), narrow = tiny_gpt2();
    apart.model.window = layer_pattern_all(24);
    narrow.model.window = layer_pattern_all(5);
    CHECK_SHAPES(apart, 2e-7, { RING, 2 }, { RING, 4 }, { RING, 8 });
    CHECK_SHAPES(narrow, 2e-7, { RING, 4 }, { RING, 8 });
    CHECK_SHAPES(tiny_variants(), 2e-7, { RING, 4 });
    CHECK_SHAPES(tiny_latent(tiny_llama(), 12), 2e-7, { RING, 4 });
}

TEST(near_one_rank_in_16_bits)
{
    TrainSpec s = tiny_llama();
    s.compute = BF16;
    CHECK_SHAPES(s, 2e-3, { RING, 2 }, { RING, 4 });
}

TEST(repeats_have_the_same_bits)
{
    TinyRun first = train(tiny_llama(), (Shape){ RING, 4 });
    TinyRun late = train(tiny_llama(), (Shape){ RING, 4, .delay_ms = 5, .threads = 2 });
    CHECK(first.hash == late.hash);
    release(&first);
    release(&late);
}

/* Bytes and exchanges of all ranks in a step, in closed form: the front part of each rank goes round, the back part as
 * far as rank 0, which all others are behind; gradients follow each from the first rank that sees it on. */
TEST(messages_of_a_step)
{
    for (int n = 2; n <= 8; n *= 2) {
        TrainSpec s = tiny_gpt2();
        int64_t bytes = 0, calls = 0;
        s.exact = false;
        s.model.context = layer_pattern_all(CONTEXT_RING);
        for (int rank = 0; rank < n; rank++) {
            MemoryPlan p;
            OK(trainer_plan(&s, (Grid){ .tp = 1, .cp = n, .dp = 1 }, rank, &p));
            bytes += p.work.comm[GROUP_CP][COMM_EXCHANGE].bytes;
            calls += p.work.comm[GROUP_CP][COMM_EXCHANGE].calls;
        }
        const ModelSpec *m = &s.model;
        const int64_t part = 4 * s.micro_batch * m->seq / (2 * n) * 2 * m->kv_heads * m->head_dim;
        const int64_t times = m->layers * s.global_batch / s.micro_batch;
        const int64_t keys = n * (n - 1) + (n - 1) * (n - 1), sums = n * (n - 1) + n * (n - 1) / 2;
        CHECK_MSG(bytes == times * part * (2 * keys + sums), "cp %d: %lld bytes, not %lld", n, (long long)bytes,
                  (long long)(times * part * (2 * keys + sums)));
        CHECK_MSG(calls == times * n * (n > 2 ? 2 * n : 3), "cp %d: %lld exchanges", n, (long long)calls);
    }
}

TEST_MAIN
