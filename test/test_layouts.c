/*
 * The oracle: tiny models with dropout, clipping and accumulation, trained under many layouts, must give one
 * hash of losses, weights and both moments. docs/determinism.md says why they do; test/layout_controls.sh
 * breaks one rule at a time and expects just the layouts that use the rule to differ.
 *
 * test_layouts [case]
 * MEGATRAIN_LAYOUTS=print lists the hash of each layout; =all runs every one of the mixtures; =short runs
 * and lists a few layouts for a few steps and leaves the verdict to the reader.
 */
#include <math.h>

#include "test.h"
#include "tiny.h"

typedef struct {
    int dp, tp, sp, micro, threads;
    Isa isa;
    int zero, overlap;
    int ep; /* of a mixture; 0 = 1 */
} Layout;

enum { STEPS = 10, SHORT_STEPS = 3, BUCKET_BYTES = 64 << 10 /* some ten buckets */ };

/* What the others are compared with. */
static const Layout reference = { 1, 1, 0, 4, 2, ISA_AUTO };

/* At least two layouts with and without each property that a rule of docs/determinism.md is about. */
static const Layout few[] = {
    { 1, 1, 0, 8, 1, ISA_AUTO }, { 1, 1, 0, 1, 2, ISA_AUTO }, { 1, 1, 0, 4, 3, ISA_AVX2 },
    { 2, 1, 0, 4, 1, ISA_AUTO, 0, 1 }, { 4, 1, 0, 2, 1, ISA_AUTO, 1, 1 }, { 1, 2, 0, 4, 1, ISA_AUTO },
    { 1, 2, 1, 4, 1, ISA_AUTO }, { 1, 4, 0, 8, 1, ISA_AUTO }, { 2, 2, 1, 2, 1, ISA_AVX2, 1, 0 },
    { 1, 8, 1, 4, 1, ISA_AUTO },
};

static const Layout few_mixtures[] = {
    { 1, 1, 0, 8, 1, ISA_AUTO }, { 1, 1, 0, 1, 2, ISA_AUTO }, { 1, 1, 0, 4, 3, ISA_AVX2 },
    { 2, 1, 0, 4, 1, ISA_AUTO, 0, 1, 1 }, { 2, 1, 0, 2, 2, ISA_AUTO, 1, 0, 2 }, { 4, 1, 0, 2, 1, ISA_AUTO, 1, 1, 2 },
    { 4, 1, 0, 1, 1, ISA_AUTO, 0, 0, 4 }, { 1, 2, 1, 4, 1, ISA_AUTO, 0, 0, 2 }, { 2, 2, 1, 2, 1, ISA_AVX2, 1, 0, 2 },
};

/* What this processor runs for a wish. */
static Isa isa_of(Layout l) { return l.isa != ISA_AUTO && isa_supported(l.isa) ? l.isa : isa_best(); }

static bool mode_is(const char *mode) { return env_is("MEGATRAIN_LAYOUTS", mode); }

static uint64_t hash_of(TrainSpec spec, Layout l, int steps, double *first, double *last)
{
    TinyRun r = { .spec = spec, .grid = { .tp = l.tp, .dp = l.dp, .sp = l.sp && l.tp > 1, .ep = l.ep }, .steps = steps };
    r.spec.micro_batch = l.micro;
    r.spec.threads = l.threads;
    r.spec.isa = isa_of(l);
    r.spec.zero = l.zero;
    r.spec.overlap_grad = r.spec.overlap_param = l.overlap;
    r.spec.bucket_bytes = BUCKET_BYTES;
    tiny_train(&r);
    CHECK_MSG(r.err == ERR_OK, "%s", r.message);
    *first = r.loss[0];
    *last = r.loss[r.steps - 1];
    return r.hash;
}

static void print_layout(Layout l, uint64_t hash, const char *verdict)
{
    printf("    dp%d tp%d%s ep%d zero%d overlap%d micro%d threads%d %-6s %016llx %s\n", l.dp, l.tp,
           l.sp && l.tp > 1 ? "+sp" : "   ", l.ep ? l.ep : 1, l.zero, l.overlap, l.micro, l.threads, isa_name(isa_of(l)),
           (unsigned long long)hash, verdict);
    fflush(stdout);
}

/* dp x tp x sp x micro-batch with 1, 2, 4, 8 ranks; threads, instruction sets, ZeRO and overlap cycle through. */
static int layouts(Layout *out)
{
    int n = 0, turn = 0;
    const Isa isas[] = { ISA_AVX512, ISA_AVX2, ISA_AVX512, ISA_AVX512 };
    for (int dp = 1; dp <= 8; dp *= 2)
        for (int tp = 1; tp * dp <= 8; tp *= 2)
            for (int sp = 0; sp <= (tp > 1); sp++)
                for (int micro = 1; micro * dp <= 8; micro *= 2, turn++)
                    out[n++] = (Layout){ dp,  tp, sp, micro, 1 + turn % 3, isas[turn % 4], dp > 1 && turn % 2,
                                         dp > 1 && turn % 5 < 3 };
    out[n++] = (Layout){ 1, 1, 0, 8, 1, ISA_C };
    out[n++] = (Layout){ 1, 2, 1, 4, 1, ISA_C };
    return n;
}

/* The same of a mixture, with ep from 1 to all ranks of the plane, in turn; beside tp its rows are sharded, in whole
 * leaves. */
static int mixture_layouts(Layout *out)
{
    Layout all[128];
    const int count = layouts(all);
    int n = 0;
    for (int i = 0; i < count; i++) {
        const int plane = all[i].dp * all[i].tp;
        if ((all[i].tp > 1 && !all[i].sp) || all[i].micro * tiny_base().seq_blocks % all[i].tp) continue;
        for (int ep = 1; ep <= plane; ep *= 2) {
            all[i].ep = ep;
            all[i].zero = all[i].dp > 1 && n % 3 != 0;
            out[n++] = all[i];
        }
    }
    return n;
}

/* The reference, then each of the few; test/layout_controls.sh reads this. */
static void run_few(TrainSpec spec)
{
    double first, last;
    print_layout(reference, hash_of(spec, reference, SHORT_STEPS, &first, &last), "reference");
    const bool mixture = spec.model.moe.experts > 0;
    const Layout *list = mixture ? few_mixtures : few;
    const size_t count = mixture ? sizeof few_mixtures / sizeof *few_mixtures : sizeof few / sizeof *few;
    for (size_t i = 0; i < count; i++) print_layout(list[i], hash_of(spec, list[i], SHORT_STEPS, &first, &last), "");
}

/* All layouts, or one in `every` of each kind. */
static void run_all(TrainSpec spec, int every)
{
    Layout all[256];
    const bool mixture = spec.model.moe.experts > 0;
    int count = mixture ? mixture_layouts(all) : layouts(all), ran = 0, different = 0;
    double first, last;
    if (mode_is("short")) {
        run_few(spec);
        return;
    }
    uint64_t want = hash_of(spec, reference, STEPS, &first, &last);
    CHECK_MSG(last < first - 0.2, "the loss must fall: %.4f -> %.4f", first, last);
    for (int i = 0; i < count; i++) {
        if ((i + i / 4) % every) continue; /* neighbours differ in micro-batch, fours in dp, tp or sp */
        uint64_t hash = hash_of(spec, all[i], STEPS, &first, &last);
        ran++;
        different += hash != want;
        if (mode_is("print") || hash != want) print_layout(all[i], hash, hash == want ? "same" : "DIFFERENT");
    }
    printf("    %d layouts, %d different, loss %.4f -> %.4f\n", ran, different, first, last);
    CHECK(ran >= 50 / every);
    CHECK(different == 0);
}

TEST(gpt2_layouts) { run_all(tiny_gpt2(), 1); }

TEST(llama_layouts) { run_all(tiny_llama(), 2); }

TEST(variants_of_attention) { run_all(tiny_variants(), mode_is("all") ? 1 : 4); }

/* Which rows lie beside each other in an expert depends on micro-batch and ranks; no sum may. */
TEST(mixtral_layouts) { run_all(tiny_mixture(TINY_MIXTRAL, 2), mode_is("all") ? 1 : 4); }
TEST(qwen3moe_layouts) { run_all(tiny_mixture(TINY_QWEN3, 2), mode_is("all") ? 1 : 9); }
TEST(deepseek_layouts) { run_all(tiny_mixture(TINY_DEEPSEEK, 2), mode_is("all") ? 1 : 9); }

/* A vocabulary whose chunks are cut into several leaves. */
TEST(long_vocabulary)
{
    TrainSpec s = tiny_gpt2();
    double first, last;
    s.model.vocab = 20000;
    s.model.layers = 1;
    s.model.padded_vocab = head_padded_vocab(s.model.vocab, s.model.tp_blocks);
    const uint64_t want = hash_of(s, reference, 2, &first, &last);
    for (size_t i = 0; i < sizeof few / sizeof *few; i++) {
        const uint64_t hash = hash_of(s, few[i], 2, &first, &last);
        if (hash != want) print_layout(few[i], hash, "DIFFERENT");
        CHECK(hash == want);
    }
}

/* A mixture with dropout gives the same bits with less kept and more computed. */
TEST(mixture_recompute)
{
    TrainSpec s = tiny_mixture(TINY_DEEPSEEK, 3);
    double first, last;
    const uint64_t want = hash_of(s, reference, SHORT_STEPS, &first, &last);
    for (Recompute r = RECOMPUTE_SELECTIVE; r <= RECOMPUTE_FULL; r++) {
        s.model.recompute = r;
        CHECK_MSG(hash_of(s, few[0], SHORT_STEPS, &first, &last) == want, "recompute %d", r);
    }
}

/* Ends of documents, in gpt2 and llama (whose names layout_controls.sh filters by): fewer tokens count, on each rank
 * another number; attention skips what it must not see. */
TEST(documents_learned_positions) { run_all(tiny_apart(tiny_gpt2()), 4); }

TEST(documents_rotary_positions)
{
    TrainSpec s = tiny_apart(tiny_llama());
    s.model.window = layer_pattern_all(24);
    run_all(s, 4);
}

/* Losses of all steps within a relative tolerance; NaN is far. */
static bool near(const TinyRun *a, const TinyRun *b, double tolerance)
{
    for (int i = 0; i < STEPS; i++)
        if (!(fabs(a->loss[i] - b->loss[i]) <= tolerance * b->loss[i])) return false;
    return true;
}

static TinyRun run_16_bit(TrainSpec spec, DType compute, Layout l)
{
    TinyRun r = { .spec = spec, .grid = { .tp = l.tp, .dp = l.dp, .sp = l.sp }, .steps = STEPS };
    r.spec.compute = compute;
    r.spec.exact = false;
    r.spec.micro_batch = l.micro;
    r.spec.threads = l.threads;
    r.spec.zero = l.zero;
    r.spec.overlap_grad = r.spec.overlap_param = l.overlap;
    r.spec.bucket_bytes = BUCKET_BYTES;
    tiny_train(&r);
    CHECK_MSG(r.err == ERR_OK, "%s", r.message);
    return r;
}

/*
 * 16-bit runs promise less: the products of tensor-parallel ranks are rounded before they are summed, and gradients
 * are float sums. Losses stay near; and the same bits come from layouts with the same dp, tp and micro-batch, whatever
 * threads, ZeRO and overlap are.
 */
static void run_narrow(TrainSpec spec, DType compute)
{
    static const Layout cuts[] = { { 1, 2, 0, 8, 1 }, { 1, 2, 1, 8, 1 }, { 1, 4, 1, 8, 1 }, { 1, 8, 0, 8, 1 },
                                   { 2, 1, 0, 4, 1 }, { 2, 2, 1, 4, 1, ISA_AUTO, 1, 1 } };
    static const Layout same[][2] = { { { 1, 2, 1, 8, 1 }, { 1, 2, 1, 8, 2 } },
                                      { { 2, 2, 1, 4, 1 }, { 2, 2, 1, 4, 1, ISA_AUTO, 0, 1 } },
                                      { { 2, 2, 0, 4, 1 }, { 2, 2, 0, 4, 2, ISA_AUTO, 1, 1 } } };
    const TinyRun one = run_16_bit(spec, compute, (Layout){ 1, 1, 0, 8, 1 });
    CHECK_MSG(one.loss[STEPS - 1] < one.loss[0] - 0.2, "the loss must fall: %.4f -> %.4f", one.loss[0],
              one.loss[STEPS - 1]);
    int equal = 0;
    double worst = 0;
    const size_t tried = mode_is("short") ? 1 : sizeof cuts / sizeof *cuts;
    for (size_t i = 0; i < tried; i++) {
        const TinyRun r = run_16_bit(spec, compute, cuts[i]);
        CHECK_MSG(near(&r, &one, 1e-2), "dp%d tp%d sp%d: %.5f, one rank %.5f", cuts[i].dp, cuts[i].tp, cuts[i].sp,
                  r.loss[STEPS - 1], one.loss[STEPS - 1]);
        equal += r.hash == one.hash;
        for (int k = 0; k < STEPS; k++) worst = fmax(worst, fabs(r.loss[k] - one.loss[k]) / one.loss[k]);
    }
    printf("    %d of %zu layouts with one rank's bits, losses at most %.1e apart\n", equal, tried, worst);
    for (size_t i = 0; i < (mode_is("short") ? 1 : sizeof same / sizeof *same); i++) {
        const uint64_t a = run_16_bit(spec, compute, same[i][0]).hash, b = run_16_bit(spec, compute, same[i][1]).hash;
        CHECK_MSG(a == b, "pair %zu of layouts", i);
    }
}

TEST(bf16_layouts) { run_narrow(tiny_gpt2(), BF16); }

/* Choices of experts differ where scores are close, so losses are only near those of fp32; threads change nothing. */
TEST(bf16_mixture)
{
    for (TinyMixture kind = 0; kind < TINY_MIXTURES; kind++) {
        const TrainSpec s = tiny_mixture(kind, 2);
        const TinyRun wide = run_16_bit(s, F32, (Layout){ 1, 1, 0, 4, 1 });
        const TinyRun one = run_16_bit(s, BF16, (Layout){ 1, 1, 0, 4, 1 });
        CHECK_MSG(near(&one, &wide, 3e-2), "mixture %d: %.5f, in fp32 %.5f", kind, one.loss[STEPS - 1],
                  wide.loss[STEPS - 1]);
        CHECK(run_16_bit(s, BF16, (Layout){ 1, 1, 0, 4, 3 }).hash == one.hash);
    }
}

TEST_MAIN
