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

TEST(windows_that_ranks_would_cut)
{
    TrainSpec s = tiny_delta(tiny_llama());
    s.model.context = layer_pattern_all(CONTEXT_STATE);
    FAILS(trainer_check(&s, (Grid){ .tp = 1, .cp = 2, .dp = 1, .pp = 1 }), ERR_CONFIG,
          "layers.1.attn: the ranks of parallel.cp cannot meet in such a layer as parallel.cp_comm=state says");
    s.model.context = (LayerPattern){ 2, { CONTEXT_STATE, CONTEXT_ALLGATHER }, { 1, 1 } };
    OK(trainer_check(&s, (Grid){ .tp = 1, .cp = 4, .dp = 1, .pp = 1 }));
    FAILS(trainer_check(&s, (Grid){ .tp = 1, .cp = 8, .dp = 1, .pp = 1 }), ERR_CONFIG,
          "layers.0.delta: a rank that hands its state on has whole windows of 64 positions: 64 x cp x slices must "
          "divide seq, here 256");
    CHECK_MSG(strstr(err_hint_text(), "parallel.cp=4"), "%s", err_hint_text());
    s.pipeline.schedule = "seq1f1b";
    s.pipeline.slices = 2;
    s.seq_blocks = 16;
    FAILS(trainer_check(&s, (Grid){ .tp = 1, .cp = 4, .dp = 1, .pp = 2 }), ERR_CONFIG, "64 x cp x slices");
    OK(trainer_check(&s, (Grid){ .tp = 1, .cp = 2, .dp = 1, .pp = 2 }));
    s = tiny_mamba(tiny_llama());
    s.model.context = (LayerPattern){ 2, { CONTEXT_STATE, CONTEXT_ALLGATHER }, { 1, 1 } };
    FAILS(trainer_check(&s, (Grid){ .tp = 1, .cp = 4, .dp = 1, .pp = 1 }), ERR_CONFIG, "windows of 128 positions");
    s = tiny_delta(tiny_llama()); /* whoever exchanges heads has whole samples, which may end within a window */
    s.model.context = (LayerPattern){ 2, { CONTEXT_A2A, CONTEXT_ALLGATHER }, { 1, 1 } };
    s.model.seq = 104;
    s.seq_blocks = 8;
    OK(trainer_check(&s, (Grid){ .tp = 1, .cp = 2, .dp = 1, .pp = 1 }));
}

/* ---- the state is handed from rank to rank ---- */

typedef struct {
    int tp, cp, pp, slices;
    const char *schedule;
    Recompute recompute;
    ContextCut cut;
    ContextComm attention;
    ZeroCut zero;
} Row;

static uint64_t hash_of(TrainSpec s, Row row)
{
    const Grid grid = { .tp = row.tp, .dp = 1, .cp = row.cp, .pp = row.pp, .sp = row.tp > 1 };
    TinyRun r = { .spec = s, .grid = grid, .steps = 2 };
    r.spec.model.context = (LayerPattern){ 2, { CONTEXT_STATE, row.attention }, { 1, 1 } };
    r.spec.model.recompute = layer_pattern_all(row.recompute);
    r.spec.cut = row.cut;
    r.spec.pipeline.schedule = row.schedule;
    r.spec.pipeline.slices = row.slices;
    r.spec.update.zero = row.zero;
    tiny_train(&r);
    CHECK_MSG(!r.err, "%s", r.message);
    return r.hash;
}

/* One digest: on one rank, and wherever borders between ranks and between slices are. */
static void check_rows(TrainSpec s)
{
    static const Row rows[] = {
        { 1, 2, 1, 0, NULL, RECOMPUTE_NONE, CONTEXT_CONTIGUOUS, CONTEXT_ALLGATHER },
        { 2, 2, 1, 0, NULL, RECOMPUTE_SELECTIVE, CONTEXT_ZIGZAG, CONTEXT_RING, ZERO_VALUES },
        { 1, 4, 1, 0, NULL, RECOMPUTE_FULL, CONTEXT_ZIGZAG, CONTEXT_A2A },
        { 1, 4, 1, 0, NULL, RECOMPUTE_SELECTIVE, CONTEXT_CONTIGUOUS, CONTEXT_ALLGATHER },
        { 1, 2, 2, 2, "seq1f1b", RECOMPUTE_NONE, CONTEXT_ZIGZAG, CONTEXT_ALLGATHER },
        { 1, 2, 2, 2, "seq1f1b", RECOMPUTE_FULL, CONTEXT_CONTIGUOUS, CONTEXT_A2A },
        { 2, 2, 1, 2, "seq1f1b", RECOMPUTE_SELECTIVE, CONTEXT_CONTIGUOUS, CONTEXT_RING, ZERO_STATES },
    };
    const bool wide = s.model.mamba.heads > 0; /* (windows of 128: two ranks, or slices, have them) */
    s.seq_blocks = 16;
    s.attn_block = 16;
    const uint64_t want = hash_of(s, (Row){ 1, 1, 1, .attention = CONTEXT_ALLGATHER });
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (wide && (rows[i].cp > 2 || rows[i].slices)) continue;
        if (s.model.mamba.groups == 1 && rows[i].tp > 1) continue;
        CHECK_MSG(hash_of(s, rows[i]) == want, "row %zu", i);
    }
}

TEST(the_state_of_gated_deltanet_is_handed_on) { check_rows(tiny_delta(tiny_llama())); }
TEST(that_of_kda_with_documents) { check_rows(tiny_apart(tiny_kda(tiny_llama()))); }
TEST(that_of_mamba) { check_rows(tiny_mamba(tiny_llama())); }

/* As Granite 4 has it: no head could be exchanged. */
TEST(that_of_mamba_with_one_group)
{
    TrainSpec s = tiny_apart(tiny_mamba(tiny_llama()));
    s.model.mamba.groups = s.model.tp_blocks = 1;
    s.compute = BF16;
    check_rows(s);
}

TEST_MAIN
