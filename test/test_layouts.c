/*
 * The oracle: tiny models with dropout, clipping and accumulation, trained under many layouts, must give one
 * hash of losses, weights and both moments. docs/determinism.md says why they do; test/layout_controls.sh
 * breaks one rule at a time and expects just the layouts that use the rule to differ.
 *
 * test_layouts [case]
 * MEGATRAIN_LAYOUTS=print lists the hash of each layout; =short runs and lists a few layouts for a few steps
 * and leaves the verdict to the reader.
 */
#include "test.h"
#include "tiny.h"

typedef struct {
    int dp, tp, sp, micro, threads;
    Isa isa;
} Layout;

enum { STEPS = 10, SHORT_STEPS = 3 };

/* What the others are compared with. */
static const Layout reference = { 1, 1, 0, 4, 2, ISA_AUTO };

/* At least two layouts with and without each property that a rule of docs/determinism.md is about. */
static const Layout few[] = {
    { 1, 1, 0, 8, 1, ISA_AUTO }, { 1, 1, 0, 1, 2, ISA_AUTO }, { 1, 1, 0, 4, 3, ISA_AVX2 },
    { 2, 1, 0, 4, 1, ISA_AUTO }, { 4, 1, 0, 2, 1, ISA_AUTO }, { 1, 2, 0, 4, 1, ISA_AUTO },
    { 1, 2, 1, 4, 1, ISA_AUTO }, { 1, 4, 0, 8, 1, ISA_AUTO }, { 2, 2, 1, 2, 1, ISA_AVX2 },
};

/* What this processor runs for a wish. */
static Isa isa_of(Layout l) { return l.isa != ISA_AUTO && isa_supported(l.isa) ? l.isa : isa_best(); }

static bool mode_is(const char *mode)
{
    const char *set = getenv("MEGATRAIN_LAYOUTS");
    return set && !strcmp(set, mode);
}

static uint64_t hash_of(TrainSpec spec, Layout l, int steps, double *first, double *last)
{
    TinyRun r = { .spec = spec, .grid = { .tp = l.tp, .dp = l.dp, .sp = l.sp && l.tp > 1 }, .steps = steps };
    r.spec.micro_batch = l.micro;
    r.spec.threads = l.threads;
    r.spec.isa = isa_of(l);
    tiny_train(&r);
    CHECK_MSG(r.err == ERR_OK, "%s", r.message);
    *first = r.loss[0];
    *last = r.loss[r.steps - 1];
    return r.hash;
}

static void print_layout(Layout l, uint64_t hash, const char *verdict)
{
    printf("    dp%d tp%d%s micro%d threads%d %-6s %016llx %s\n", l.dp, l.tp,
           l.sp && l.tp > 1 ? "+sp" : "   ", l.micro, l.threads, isa_name(isa_of(l)),
           (unsigned long long)hash, verdict);
    fflush(stdout);
}

/* dp x tp x sp x micro-batch with 1, 2, 4, 8 ranks; threads and instruction sets cycle through. */
static int layouts(Layout *out)
{
    int n = 0, turn = 0;
    const Isa isas[] = { ISA_AVX512, ISA_AVX2, ISA_AVX512, ISA_AVX512 };
    for (int dp = 1; dp <= 8; dp *= 2)
        for (int tp = 1; tp * dp <= 8; tp *= 2)
            for (int sp = 0; sp <= (tp > 1); sp++)
                for (int micro = 1; micro * dp <= 8; micro *= 2, turn++)
                    out[n++] = (Layout){ dp, tp, sp, micro, 1 + turn % 3, isas[turn % 4] };
    out[n++] = (Layout){ 1, 1, 0, 8, 1, ISA_C };
    out[n++] = (Layout){ 1, 2, 1, 4, 1, ISA_C };
    return n;
}

/* The reference, then each of the few; test/layout_controls.sh reads this. */
static void run_few(TrainSpec spec)
{
    double first, last;
    print_layout(reference, hash_of(spec, reference, SHORT_STEPS, &first, &last), "reference");
    for (size_t i = 0; i < sizeof few / sizeof *few; i++)
        print_layout(few[i], hash_of(spec, few[i], SHORT_STEPS, &first, &last), "");
}

/* All layouts, or about half of each kind. */
static void run_all(TrainSpec spec, bool half)
{
    Layout all[128];
    int count = layouts(all), ran = 0, different = 0;
    double first, last;
    if (mode_is("short")) {
        run_few(spec);
        return;
    }
    uint64_t want = hash_of(spec, reference, STEPS, &first, &last);
    CHECK_MSG(last < first - 0.2, "the loss must fall: %.4f -> %.4f", first, last);
    for (int i = 0; i < count; i++) {
        if (half && (i + i / 4) % 2) continue; /* neighbours differ in micro-batch, fours in dp, tp or sp */
        uint64_t hash = hash_of(spec, all[i], STEPS, &first, &last);
        ran++;
        different += hash != want;
        if (mode_is("print") || hash != want) print_layout(all[i], hash, hash == want ? "same" : "DIFFERENT");
    }
    printf("    %d layouts, %d different, loss %.4f -> %.4f\n", ran, different, first, last);
    CHECK(ran >= (half ? 25 : 50));
    CHECK(different == 0);
}

TEST(gpt2_layouts) { run_all(tiny_gpt2(), false); }

TEST(llama_layouts) { run_all(tiny_llama(), true); }

TEST_MAIN
