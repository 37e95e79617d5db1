/*
 * Gated DeltaNet, Kimi Delta Attention and Mamba-2 in a model: what generation carries from call to call, and layouts
 * that they refuse. Their gradients are held to difference quotients in test_layers, their bits to other layouts in
 * test_array, their ops to float64 elsewhere.
 */
#include "test.h"
#include "base/half.h"
#include "tiny.h"

typedef struct {
    World world;
    Trainer t;
} Rig;

static void rig_open(Rig *r, TrainSpec s)
{
    MemoryPlan plan;
    s.purpose.forward_only = s.purpose.generate = true;
    s.micro_batch = s.global_batch = 1;
    OK(world_open_self(&r->world));
    OK(trainer_plan(&s, r->world.grid, 0, &plan));
    OK(trainer_open(&r->t, &s, &r->world, &plan));
}

static void rig_close(Rig *r)
{
    trainer_close(&r->t);
    world_close(&r->world);
}

/* The last call's logits of the first n tokens, in calls of at most `most` tokens each. */
static void logits_in_calls(Rig *r, const int32_t *tokens, int64_t n, uint64_t *seed, int64_t most, float *logits)
{
    for (int64_t past = 0, more; past < n; past += more) {
        more = 1 + (int64_t)(test_rand(seed) % (uint64_t)most);
        if (more > n - past) more = n - past;
        OK(trainer_logits(&r->t, tokens + past, past, more, logits));
    }
}

/* Windows are 64 positions, or 128: texts end before, at and behind their borders. */
static void check_cuts(TrainSpec s)
{
    static const int64_t ends[] = { 1, 2, 3, 5, 62, 63, 64, 65, 67, 127, 128, 130, 191, 192, 193, 255, 256 };
    static const int64_t most[] = { 1, 7, 70, 200 };
    const size_t bytes = (size_t)s.model.vocab * sizeof(float);
    int32_t tokens[TINY_LONG + 1];
    float whole[TINY_VOCAB], cut[TINY_VOCAB];
    uint64_t seed = 5;
    Rig r;
    rig_open(&r, s);
    OK(r.t.spec.documents.restart ? tiny_long_documents(NULL, 3, 1, tokens) : tiny_long_tokens(NULL, 3, 1, tokens));
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) {
        OK(trainer_logits(&r.t, tokens, 0, ends[i], whole));
        for (size_t k = 0; k < sizeof most / sizeof *most; k++) {
            memset(cut, 0xff, sizeof cut);
            logits_in_calls(&r, tokens, ends[i], &seed, most[k], cut);
            CHECK_MSG(!memcmp(whole, cut, bytes), "%lld tokens, up to %lld at a time", (long long)ends[i],
                      (long long)most[k]);
        }
    }
    rig_close(&r);
}

TEST(a_text_is_cut_anywhere) { check_cuts(tiny_delta(tiny_llama())); }
TEST(with_documents) { check_cuts(tiny_apart(tiny_delta(tiny_llama()))); }
TEST(with_a_short_convolution)
{
    TrainSpec s = tiny_delta(tiny_llama());
    s.model.delta.conv = 2;
    s.compute = BF16;
    s.model.mixer = layer_pattern_all(MIXER_DELTA);
    check_cuts(s);
}

/* Of numbers that decay is made of, layers read the master itself, of all others it rounded. */
static Err rates_are_masters(Trainer *t, void *user)
{
    const ParamStore *s = &t->stores[0];
    int rates = 0;
    (void)user;
    for (int i = 0; i < s->reg->count; i++) {
        const char *name = s->reg->items[i].name;
        const Tensor master = param_zero_shard_master(s, i), value = param_zero_shard_value(s, i);
        const bool wide = strstr(name, ".a_log") || strstr(name, ".dt_bias") || strstr(name, ".skip");
        int64_t wrong = 0;
        const float *is = master.data;
        CHECK_MSG(value.dtype == (wide ? F32 : BF16) && value.dim[0] == master.dim[0], "%s", name);
        for (int64_t e = 0; e < master.dim[0]; e++)
            wrong += wide ? !(((const float *)value.data)[e] == is[e])
                          : ((const uint16_t *)value.data)[e] != bf16_from_float(is[e]);
        CHECK_MSG(wrong == 0, "%s: %lld", name, (long long)wrong);
        rates += wide;
    }
    CHECK(rates >= 2);
    return ERR_OK;
}

TEST(rates_of_decay_are_fp32)
{
    static const OptimizerKind kinds[] = { OPTIMIZER_ADAMW, OPTIMIZER_LION, OPTIMIZER_MUON };
    for (ZeroCut zero = ZERO_NONE; zero <= ZERO_VALUES; zero++) {
        const TrainSpec s = zero % 2 ? tiny_mamba(tiny_llama()) : tiny_delta(tiny_llama());
        TinyRun r = { .spec = s, .grid = { .tp = 1, .dp = 2 }, .steps = 2 };
        r.after = rates_are_masters;
        r.spec.compute = BF16;
        r.spec.exact = r.spec.fp32_vectors = r.spec.fp32_residual = false;
        r.spec.update.zero = zero;
        r.spec.update.optimizer = kinds[zero % 3];
        r.spec.update.states_on_host = zero == ZERO_STATES;
        tiny_train(&r);
        CHECK_MSG(!r.err, "%s", r.message);
    }
}

TEST(with_kda) { check_cuts(tiny_kda(tiny_llama())); }
TEST(with_kda_and_documents)
{
    TrainSpec s = tiny_apart(tiny_kda(tiny_llama()));
    s.model.kda.conv = 2;
    s.model.kda.bound = -5;
    s.compute = BF16;
    s.model.mixer = layer_pattern_all(MIXER_KDA);
    check_cuts(s);
}

TEST(with_mamba) { check_cuts(tiny_mamba(tiny_llama())); }
TEST(with_mamba_and_documents)
{
    TrainSpec s = tiny_apart(tiny_mamba(tiny_llama()));
    s.model.mamba.conv = 2;
    s.model.mamba.conv_bias = false;
    s.compute = BF16;
    s.model.mixer = layer_pattern_all(MIXER_MAMBA2);
    check_cuts(s);
}

TEST(layouts_that_are_refused)
{
    TrainSpec s = tiny_delta(tiny_llama());
    s.pipeline.schedule = "seq1f1b";
    s.pipeline.slices = 8;
    s.seq_blocks = 8;
    FAILS(trainer_check(&s, (Grid){ .tp = 1, .dp = 1, .pp = 2 }), ERR_CONFIG,
          "layers.0.delta: a slice has whole windows of 64 positions: 64 x slices must divide seq, here 256");
    CHECK_MSG(strstr(err_hint_text(), "parallel.slices=4"), "%s", err_hint_text());
    s.pipeline.slices = 4;
    OK(trainer_check(&s, (Grid){ .tp = 1, .dp = 1, .pp = 2 }));
    s = tiny_delta(tiny_llama());
    s.model.delta.key = s.model.delta.value = 2048;
    FAILS(trainer_check(&s, (Grid){ .tp = 1, .dp = 1, .pp = 1 }), ERR_CONFIG, "model.delta_key_dim = 2048");
    s.model.delta.value = 1024;
    OK(trainer_check(&s, (Grid){ .tp = 1, .dp = 1, .pp = 1 }));
    s = tiny_mamba(tiny_llama());
    s.pipeline.schedule = "seq1f1b";
    s.pipeline.slices = 4;
    s.seq_blocks = 8;
    FAILS(trainer_check(&s, (Grid){ .tp = 1, .dp = 1, .pp = 2 }), ERR_CONFIG,
          "layers.0.mamba: a slice has whole windows of 128 positions: 128 x slices must divide seq, here 256");
    s = tiny_kda(tiny_llama());
    s.model.kda.head = 4096;
    FAILS(trainer_check(&s, (Grid){ .tp = 1, .dp = 1, .pp = 1 }), ERR_CONFIG, "model.kda_head_dim = 4096");
    s = tiny_mamba(tiny_llama());
    s.model.mamba.head = s.model.mamba.state = 4096;
    FAILS(trainer_check(&s, (Grid){ .tp = 1, .dp = 1, .pp = 1 }), ERR_CONFIG, "model.mamba_head_dim = 4096");
    s.model.mamba.head = 64;
    OK(trainer_check(&s, (Grid){ .tp = 1, .dp = 1, .pp = 1 }));
    s = tiny_delta(tiny_llama());
    s.model.context = layer_pattern_all(CONTEXT_RING);
    FAILS(trainer_check(&s, (Grid){ .tp = 1, .cp = 2, .dp = 1, .pp = 1 }), ERR_CONFIG,
          "layers.0.delta: the ranks of parallel.cp cannot meet in such a layer as parallel.cp_comm=ring says");
    s.model.context = layer_pattern_all(CONTEXT_A2A);
    OK(trainer_check(&s, (Grid){ .tp = 1, .cp = 2, .dp = 1, .pp = 1 }));
}

TEST_MAIN
