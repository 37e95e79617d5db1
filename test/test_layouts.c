/*
 * The oracle: tiny models with dropout, clipping and accumulation, trained under many layouts, must give one
 * hash of losses, weights and both moments. docs/determinism.md says why they do; test/mutants.sh breaks one
 * rule at a time and expects this test to see it in just the layouts that use the rule.
 *
 * test_layouts [case]; MEGATRAIN_LAYOUTS=print lists each layout's hash.
 */
#include "test.h"
#include "tiny.h"

typedef struct {
    int dp, tp, sp, micro, threads;
    Isa isa;
} Layout;

static uint64_t hash_of(TrainSpec spec, Layout l, double *first, double *last)
{
    TinyRun r = { .spec = spec, .grid = { .tp = l.tp, .dp = l.dp, .sp = l.sp && l.tp > 1 }, .steps = 10 };
    r.spec.micro_batch = l.micro;
    r.spec.threads = l.threads;
    r.spec.isa = l.isa;
    tiny_train(&r);
    CHECK_MSG(r.err == ERR_OK, "%s", r.message);
    *first = r.loss[0];
    *last = r.loss[r.steps - 1];
    return r.hash;
}

static void print_layout(Layout l, uint64_t hash, const char *verdict)
{
    printf("    dp%d tp%d%s micro%d threads%d %-6s %016llx %s\n", l.dp, l.tp, l.sp && l.tp > 1 ? "+sp" : "   ", l.micro,
           l.threads, isa_name(l.isa), (unsigned long long)hash, verdict);
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

static void run_all(TrainSpec spec)
{
    Layout all[128];
    int count = layouts(all), different = 0, ran = 0;
    double first, last;
    bool print = getenv("MEGATRAIN_LAYOUTS") != NULL;
    uint64_t want = hash_of(spec, (Layout){ 1, 1, 0, 4, 2, ISA_AUTO }, &first, &last);
    CHECK_MSG(last < first - 0.2, "the loss must fall: %.4f -> %.4f", first, last);
    for (int i = 0; i < count; i++) {
        if (!isa_supported(all[i].isa)) all[i].isa = ISA_AUTO;
        uint64_t hash = hash_of(spec, all[i], &first, &last);
        ran++;
        different += hash != want;
        if (print || hash != want) print_layout(all[i], hash, hash == want ? "same" : "DIFFERENT");
    }
    printf("    %d layouts, %d different, loss %.4f -> %.4f\n", ran, different, first, last);
    CHECK(ran >= 25);
    CHECK(different == 0);
}

TEST(gpt2_layouts)
{
    run_all(tiny_gpt2());
}

TEST(llama_layouts)
{
    run_all(tiny_llama());
}

TEST_MAIN
