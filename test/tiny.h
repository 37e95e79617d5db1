/*
 * Tiny models trained on thread ranks, for the tests that compare layouts, resumes and memory.
 *
 *   TinyRun r = { .spec = tiny_gpt2(), .grid = { 2, 2, true }, .steps = 10 };
 *   tiny_train(&r);      r.hash covers losses, weights and both moments, in global plain order
 *
 * Tokens are a noisy affine walk, so that there is something to learn; sample i depends on i alone.
 */
#ifndef MEGATRAIN_TEST_TINY_H
#define MEGATRAIN_TEST_TINY_H

#include <pthread.h>

#include "base/half.h"
#include "base/rng.h"
#include "call_order.h"
#include "engine/trainer.h"
#include "thread_ranks.h"

enum { TINY_VOCAB = 251, TINY_SEQ = 64, TINY_LONG = 256, TINY_STEPS_MAX = 64 };

static inline TrainSpec tiny_base(void)
{
    TrainSpec s = { .micro_batch = 2,
                    .global_batch = 8,
                    .seq_blocks = 4,
                    .attn_block = 16,
                    .exact = true,
                    .update.adamw = { 0.9f, 0.95f, 1e-8f, 0.1f },
                    .update.clip = 1,
                    .update.lr = { LR_COSINE, 1e-2, 1e-3, 2, 20, 1 },
                    .seed = 1234,
                    .device.threads = 1 };
    s.model = (ModelSpec){ .layers = 2, .heads = 8, .kv_heads = 8, .head_dim = 8, .hidden = 64, .ffn = 128,
                           .seq = TINY_SEQ, .vocab = TINY_VOCAB, .padded_vocab = 256, .norm_eps = 1e-5f,
                           .dropout = 0.1f, .attention_dropout = 0.1f, .init_std = 0.02f, .rope = { .base = 10000 },
                           .seed = 1234, .tp_blocks = 8 };
    return s;
}

/* Recomputations, by number: each kind for all blocks of a stage, then several in turn, the last for those behind. */
enum { TINY_FULL_FIRST = RECOMPUTE_FULL + 1, TINY_FULL_LAST, TINY_SELECTIVE_FIRST, TINY_RECOMPUTES };
static inline LayerPattern tiny_recompute(int kind)
{
    static const LayerPattern several[] = {
        { .runs = 2, .value = { RECOMPUTE_FULL, RECOMPUTE_NONE }, .times = { 1, 1 } },
        { .runs = 2, .value = { RECOMPUTE_NONE, RECOMPUTE_FULL }, .times = { 1, 1 } },
        { .runs = 3, .value = { RECOMPUTE_SELECTIVE, RECOMPUTE_FULL, RECOMPUTE_SELECTIVE }, .times = { 1, 1, 1 } },
    };
    return kind < TINY_FULL_FIRST ? layer_pattern_all(kind) : several[kind - TINY_FULL_FIRST];
}

static inline TrainSpec tiny_gpt2(void)
{
    TrainSpec s = tiny_base();
    s.model.learned_positions = s.model.bias = s.model.tied = true;
    s.model.activation = ACT_GELU;
    return s;
}

static inline TrainSpec tiny_llama(void)
{
    TrainSpec s = tiny_base();
    s.model.rope.layers = layer_pattern_all(1);
    s.model.rms = true;
    s.model.qk_norm = QK_NORM_HEADS;
    s.model.heads = 16;
    s.model.kv_heads = 2; /* fewer than ranks */
    s.model.activation = ACT_SWIGLU;
    return s;
}

/* What llama leaves of attention: windows, blocks without positions, scaled angles, capped scores, sinks, a gate. */
static inline TrainSpec tiny_variants(void)
{
    TrainSpec s = tiny_llama();
    s.model.layers = 3;
    s.model.window = (LayerPattern){ .runs = 2, .value = { 24, 0 }, .times = { 1, 1 } };
    s.model.rope.layers = (LayerPattern){ .runs = 2, .value = { 1, 0 }, .times = { 2, 1 } };
    s.model.rope.columns = 6;
    s.model.rope.scaling = ROPE_YARN;
    s.model.rope.factor = 4, s.model.rope.original = 16, s.model.rope.slow = 0.1, s.model.rope.fast = 1;
    s.model.rope.magnitude = 1.1;
    s.model.attention_softcap = 2;
    s.model.sinks = s.model.attention_gate = true;
    return s;
}

/* The same with latent attention: q_rank 0: no latent of queries; with one sinks, biases and a gate, too. */
static inline TrainSpec tiny_latent(TrainSpec s, int64_t q_rank)
{
    s.model.heads = s.model.kv_heads = 8;
    s.model.qk_norm = QK_NORM_NONE;
    s.model.latent = (LatentSpec){ { q_rank, 20, 8, 6, 10 }, .scale = 1.2f };
    s.model.mixer = layer_pattern_all(MIXER_LATENT);
    s.model.head_dim = 14;
    s.model.rope.columns = 6;
    s.model.sinks = s.model.bias = s.model.attention_gate = q_rank > 0;
    return s;
}

/* Every other block has Gated DeltaNet, over several of its windows. */
static inline TrainSpec tiny_delta(TrainSpec s)
{
    s.model.seq = TINY_LONG;
    s.model.mixer = (LayerPattern){ .runs = 2, .value = { MIXER_DELTA, MIXER_ATTENTION }, .times = { 1, 1 } };
    s.model.delta = (DeltaSpec){ .key_heads = 8, .value_heads = 16, .key = 16, .value = 8, .conv = 4 };
    return s;
}

/* Every other block has Kimi Delta Attention. */
static inline TrainSpec tiny_kda(TrainSpec s)
{
    s.model.seq = TINY_LONG;
    s.model.mixer = (LayerPattern){ .runs = 2, .value = { MIXER_KDA, MIXER_ATTENTION }, .times = { 1, 1 } };
    s.model.kda = (KdaSpec){ .heads = 8, .head = 8, .conv = 4 };
    return s;
}

/* Every other block has Mamba-2. */
static inline TrainSpec tiny_mamba(TrainSpec s)
{
    s.model.seq = TINY_LONG;
    s.model.mixer = (LayerPattern){ .runs = 2, .value = { MIXER_MAMBA2, MIXER_ATTENTION }, .times = { 1, 1 } };
    s.model.mamba = (MambaSpec){ .heads = 16, .groups = 8, .head = 8, .state = 16, .conv = 4, .conv_bias = true };
    return s;
}

/* Blocks of attention alone, of a feed-forward layer alone, and of both, in turn. */
static inline TrainSpec tiny_singles(TrainSpec s, int layers)
{
    s.model.layers = layers;
    s.model.mixer = (LayerPattern){ 3, { MIXER_ATTENTION, MIXER_NONE, MIXER_ATTENTION }, { 1, 1, 1 } };
    for (int i = 0; i < 64; i += 3) {
        s.model.without_ffn.word[0] |= 1ull << i;
        s.model.moe.layers.word[0] &= ~(1ull << i);
    }
    return s;
}

/* With modules of multi-token prediction. */
static inline TrainSpec tiny_further(TrainSpec s, int modules)
{
    s.model.mtp = (MtpSpec){ modules, 0.4f };
    return s;
}

/* Mixtures of experts with the routers of Mixtral, Qwen3-MoE and DeepSeek-V3; the last with a dense block before them,
 * a gated shared expert and groups. Balanced as these are: by a loss, by biases and a loss. */
typedef enum { TINY_MIXTRAL, TINY_QWEN3, TINY_DEEPSEEK, TINY_MIXTURES } TinyMixture;

static inline TrainSpec tiny_mixture(TinyMixture kind, int layers)
{
    static const MixtureSpec kinds[] = {
        [TINY_MIXTRAL] = { .experts = 8, .topk = 2, .ffn = 48, .router = { ROUTER_SOFTMAX, 1, 1, 1, 1 },
                           .balance = { 1, 0.02f, 1e-3f } },
        [TINY_QWEN3] = { .experts = 32, .topk = 8, .ffn = 16, .router = { ROUTER_SOFTMAX_PRE, 1, 1, 1, 1 },
                         .balance = { 1, 0.01f } },
        [TINY_DEEPSEEK] = { .experts = 16, .topk = 4, .ffn = 24, .shared_ffn = 40, .shared_gate = true,
                            .router = { ROUTER_SIGMOID, 1, 2.5f, 4, 2 },
                            .balance = { 1, 1e-3f, .bias_rate = 1e-2f } },
    };
    TrainSpec s = tiny_llama();
    s.model.heads = 8;
    s.model.layers = layers;
    s.model.qk_norm = kind == TINY_QWEN3 ? QK_NORM_HEADS : QK_NORM_NONE;
    s.model.moe = kinds[kind];
    s.model.moe.layers.word[0] = kind == TINY_DEEPSEEK ? ~1ull : ~0ull;
    return s;
}

/* The same with experts between latents, as Nemotron 3's are, and in blocks of one layer. */
static inline TrainSpec tiny_nemotron(int layers)
{
    TrainSpec s = tiny_singles(tiny_mixture(TINY_DEEPSEEK, layers), layers);
    s.model.activation = ACT_RELU2;
    s.model.moe.latent = 40;
    s.model.moe.shared_gate = false;
    return s;
}

/* A model like gpt-oss: windows, sinks, biases everywhere, of router and experts too, and the clamped activation, whose
 * limit the numbers of so small a model reach. */
static inline TrainSpec tiny_gptoss(int layers)
{
    TrainSpec s = tiny_mixture(TINY_MIXTRAL, layers);
    s.model.window = (LayerPattern){ .runs = 2, .value = { 24, 0 }, .times = { 1, 1 } };
    s.model.sinks = s.model.bias = true;
    s.model.activation = ACT_CLAMPED_SWIGLU;
    s.model.activation_limit = 0.1f;
    return s;
}

static inline void tiny_walk(int vocab, int64_t seq, int64_t first, int64_t count, int32_t *out)
{
    for (int64_t s = 0; s < count; s++) {
        int64_t x = (int64_t)(rng_mix((uint64_t)(first + s)) % (uint64_t)vocab);
        for (int64_t i = 0; i <= seq; i++) {
            uint64_t noise = rng_mix((uint64_t)((first + s) * 1000 + i));
            x = (x * 5 + 7 + (int64_t)(noise % 3)) % vocab;
            out[s * (seq + 1) + i] = (int32_t)x;
        }
    }
}

/* An end of document (id 0) at about every tenth place, sometimes two in a row. */
static inline void tiny_ends(int64_t seq, int64_t first, int64_t count, int32_t *out)
{
    for (int64_t i = 0; i < count * (seq + 1); i++)
        if (rng_mix((uint64_t)(first * (seq + 1) + i) ^ 0x5eed) % 10 == 0) out[i] = 0;
}

static inline Err tiny_tokens(void *user, int64_t first, int64_t count, int32_t *out)
{
    tiny_walk(user ? *(int *)user : TINY_VOCAB, TINY_SEQ, first, count, out);
    return ERR_OK;
}

static inline Err tiny_documents(void *user, int64_t first, int64_t count, int32_t *out)
{
    TRY(tiny_tokens(user, first, count, out));
    tiny_ends(TINY_SEQ, first, count, out);
    return ERR_OK;
}

/* The same of samples of TINY_LONG. */
static inline Err tiny_long_tokens(void *user, int64_t first, int64_t count, int32_t *out)
{
    (void)user;
    tiny_walk(TINY_VOCAB, TINY_LONG, first, count, out);
    return ERR_OK;
}

static inline Err tiny_long_documents(void *user, int64_t first, int64_t count, int32_t *out)
{
    TRY(tiny_long_tokens(user, first, count, out));
    tiny_ends(TINY_LONG, first, count, out);
    return ERR_OK;
}

/* Documents are kept apart and their ends left out of the loss. */
static inline TrainSpec tiny_apart(TrainSpec s)
{
    s.documents.mask = s.documents.restart = true;
    return s;
}

static inline TokenSource tiny_source(const Trainer *t)
{
    const bool documents = t->spec.documents.mask || t->spec.documents.restart;
    if (t->spec.model.seq == TINY_LONG)
        return (TokenSource){ NULL, documents ? tiny_long_documents : tiny_long_tokens };
    return (TokenSource){ NULL, documents ? tiny_documents : tiny_tokens };
}

typedef struct {
    TrainSpec spec;
    Grid grid;
    int steps, delay_ms;
    Err (*before)(Trainer *t, void *user), (*after)(Trainer *t, void *user); /* of the steps, on each rank; or NULL */
    void *user;
    /* results */
    uint64_t hash;
    uint64_t logits; /* the same of the largest logits of all steps, if they are asked for */
    double loss[TINY_STEPS_MAX]; /* of multi-token prediction, too */
    double valid_loss;           /* of the evaluation behind all steps */
    int retried_in_pieces;       /* steps that were done again in pieces */
    Err err;
    char message[256];
    float *state[3]; /* master, m, v in global plain order, when keep_state */
    bool keep_state;
    int64_t global_count;
} TinyRun;

typedef struct {
    TinyRun *run;
    CommHub *hub;
    pthread_barrier_t *closed; /* all communicators of all ranks */
    int rank;
    Err err;
    char message[256];
    float *state[3];
} TinyRank;

/* Begin of a parameter of the whole model in the global plain array. */
static inline int64_t tiny_start(const Trainer *t, int global)
{
    int64_t at = 0;
    for (int i = 0; i < global; i++) {
        const ParamSpec *s = &t->parts.whole.items[i].spec;
        at += s->shape[0] * s->shape[1];
    }
    return at;
}

/* What this rank holds of one flat buffer of a store into the global plain array. Two ranks that hold the same must
 * hold the same bits: the one that comes second adds what makes it a NaN if not. */
static inline void tiny_scatter(const Trainer *t, const ParamStore *s, Tensor flat, float *out)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < s->reg->count; i++) {
        const Param *p = &s->reg->items[i];
        const int64_t origin = param_origin(s, i, flat);
        const int64_t start = tiny_start(t, p->global);
        const ParamRange own = param_held(s, i, flat);
        for (int64_t e = own.first; e < own.first + own.count; e++) {
            int64_t row = param_plain_row(p, e / p->local[1]);
            if (row < 0) continue;
            float *to = &out[start + row * p->spec.shape[1] + p->first[1] + e % p->local[1]];
            const float x = flat.dtype == BF16 ? bf16_to_float(((const uint16_t *)flat.data)[origin + e])
                                               : ((const float *)flat.data)[origin + e];
            *to = *to == 0 || !memcmp(to, &x, sizeof *to) ? x : NAN;
        }
    }
    pthread_mutex_unlock(&lock);
}

static inline int64_t tiny_sent_bytes(const World *w)
{
    int64_t sum = 0;
    for (int i = 0; i < WORLD_COMMS; i++) sum += w->comm[i].sent_bytes;
    return sum;
}

/* One step, which must do and send what was planned for this rank. */
static inline Err tiny_step(Trainer *t, StepReport *report)
{
    const DeviceCounters *c = &t->device.counters;
    int64_t flop = c->flop, bytes = c->bytes, sent = tiny_sent_bytes(t->world);
    TRY(trainer_step(t, tiny_source(t), report));
    flop = c->flop - flop;
    bytes = c->bytes - bytes;
    sent = tiny_sent_bytes(t->world) - sent;
    if (report->redone || report->retried_in_pieces ||
        (flop == t->plan.work.flop && bytes == t->plan.work.op_bytes && sent == t->plan.work.comm_bytes))
        return ERR_OK;
    return err_set(ERR_INTERNAL, "%lld FLOP, %lld bytes, %lld bytes sent; planned were %lld, %lld and %lld",
                   (long long)flop, (long long)bytes, (long long)sent, (long long)t->plan.work.flop,
                   (long long)t->plan.work.op_bytes, (long long)t->plan.work.comm_bytes);
}

/* Was an arena filled just as far as was planned; or, if a run may do steps in pieces, no further? */
static inline bool tiny_filled(const Trainer *t, int64_t peak, int64_t planned)
{
    return t->spec.model.moe.capacity.redo ? peak <= planned : peak == planned;
}

/* An evaluation; then all arenas of this rank have been filled just as far as was planned. */
static inline Err tiny_run_eval(Trainer *t, double *loss)
{
    int64_t counted;
    TRY(trainer_eval(t, tiny_source(t), 0, t->spec.global_batch, loss, &counted));
    const MemoryPlan peak = trainer_peak(t), *plan = &t->plan;
    const bool stages = t->spec.model.moe.capacity.redo || !memcmp(peak.stages, plan->stages, sizeof peak.stages);
    if (peak.state == plan->state && tiny_filled(t, peak.scratch, plan->scratch) &&
        tiny_filled(t, peak.save, plan->save) && tiny_filled(t, peak.offload_buffers, plan->offload_buffers) &&
        tiny_filled(t, peak.offload_host, plan->offload_host) && stages)
        return ERR_OK;
    return err_set(ERR_INTERNAL,
                   "state %lld, saves %lld, scratch %lld, offload %lld, %lld; planned: %lld, %lld, %lld, %lld, %lld",
                   (long long)peak.state, (long long)peak.save, (long long)peak.scratch,
                   (long long)peak.offload_buffers, (long long)peak.offload_host, (long long)plan->state,
                   (long long)plan->save, (long long)plan->scratch, (long long)plan->offload_buffers,
                   (long long)plan->offload_host);
}

static inline uint64_t tiny_hash(uint64_t h, const void *data, size_t bytes)
{
    const uint32_t *w = data;
    for (size_t i = 0; i < bytes / 4; i++) h = rng_mix(h ^ w[i]);
    return h;
}

static inline uint64_t tiny_logits(uint64_t h, const ModelSpec *m, const AttentionLogits *l)
{
    if (!l->by_layer) return h;
    h = tiny_hash(h, l->by_layer, (size_t)model_blocks(m) * sizeof *l->by_layer);
    h = tiny_hash(h, &l->most, sizeof l->most);
    return rng_mix(h ^ (uint64_t)(l->layer * 4096 + l->head));
}

static inline Err tiny_rank_run(TinyRank *r, World *world, Trainer *t)
{
    MemoryPlan plan;
    TinyRun *run = r->run;
    TRY(trainer_plan(&run->spec, run->grid, r->rank, &plan));
    TRY(world_open_threads(world, r->hub, run->grid, r->rank));
    TRY(trainer_open(t, &run->spec, world, &plan));
    if (run->before) TRY(run->before(t, run->user));
    for (int i = 0; i < run->steps; i++) {
        StepReport report;
        TRY(tiny_step(t, &report));
        for (int k = 0; k < run->spec.model.mtp.count; k++) report.loss += report.mtp_loss[k];
        if (r->rank) continue;
        run->loss[i] = report.loss;
        run->logits = tiny_logits(run->logits, &run->spec.model, &report.logits);
        run->retried_in_pieces += report.retried_in_pieces;
    }
    double valid_loss = 0;
    if (run->steps) TRY(tiny_run_eval(t, &valid_loss));
    if (r->rank == 0) run->valid_loss = valid_loss;
    TRY(trainer_settle(t));
    if (run->after) TRY(run->after(t, run->user));
    for (int k = 0; k < t->params.replicas; k++) {
        const ParamStore *s = &t->stores[k];
        const Tensor flats[3] = { s->master, s->m, s->v };
        for (int i = 0; i < 3; i++) tiny_scatter(t, s, flats[i], r->state[i]);
    }
    return ERR_OK;
}

/* A rank that failed leaves requests behind, and other ranks may be reading what lies in its trainer: first all
 * communicators end, then all trainers. */
static inline void *tiny_rank_main(void *arg)
{
    TinyRank *r = arg;
    World world = { 0 };
    Trainer t = { 0 };
    r->err = tiny_rank_run(r, &world, &t);
    if (r->err) {
        snprintf(r->message, sizeof r->message, "rank %d: %s", r->rank, err_message());
        comm_hub_abort(r->hub, r->message);
    }
    world_close(&world);
    pthread_barrier_wait(r->closed);
    trainer_close(&t);
    return NULL;
}

static inline int64_t tiny_global_count(const ModelSpec *m)
{
    Stage st;
    SetupArena setup;
    ParamRegistry reg;
    setup_init(&setup);
    param_registry_init(&reg, &setup, param_place_single());
    const StageShare all = stage_whole(m);
    int64_t n = stages_register(&st, &all, 1, &reg, m, &setup) ? -1 : param_total(&reg);
    setup_release(&setup);
    return n;
}

/* Trains, if the calls of all ranks come to an end (call_order.h); run->err and message say what went wrong. */
static inline void tiny_train(TinyRun *run)
{
    enum { RANKS = 16 };
    TinyRank ranks[RANKS];
    pthread_t threads[RANKS];
    CommHub *hub = NULL;
    pthread_barrier_t closed;
    int n = grid_size(run->grid), kv_heads = run->spec.model.kv_heads;
    run->grid.kv = run->grid.tp > kv_heads ? run->grid.tp / kv_heads : 1;
    if (run->spec.model.moe.experts && !run->grid.ep) run->grid.ep = 1;
    (void)trainer_grid(&run->spec, &run->grid); /* (what does not fit is refused where it is opened) */
    run->global_count = tiny_global_count(&run->spec.model);
    run->logits = 1;
    for (int i = 0; i < 3; i++) run->state[i] = calloc((size_t)run->global_count, sizeof(float));
    run->err = comm_hub_open(n, run->delay_ms, &hub);
    if (call_order_of(&run->spec, run->grid) == ERR_INTERNAL) { /* (would hang) */
        run->err = ERR_INTERNAL;
        snprintf(run->message, sizeof run->message, "%s", err_message());
        n = 0;
    }
    pthread_barrier_init(&closed, NULL, (unsigned)n + !n);
    for (int i = 0; i < n; i++) {
        ranks[i] = (TinyRank){ .run = run, .hub = hub, .closed = &closed, .rank = i };
        memcpy(ranks[i].state, run->state, sizeof run->state);
        pthread_create(&threads[i], NULL, tiny_rank_main, &ranks[i]);
    }
    for (int i = 0; i < n; i++) {
        pthread_join(threads[i], NULL);
        if (ranks[i].err && !run->err) {
            run->err = ranks[i].err;
            snprintf(run->message, sizeof run->message, "%s", ranks[i].message);
        }
    }
    run->hash = tiny_hash(1, run->loss, (size_t)run->steps * sizeof *run->loss);
    for (int i = 0; i < 3; i++) {
        run->hash = tiny_hash(run->hash, run->state[i], (size_t)run->global_count * sizeof(float));
        if (!run->keep_state) free(run->state[i]);
    }
    pthread_barrier_destroy(&closed);
    comm_hub_close(hub);
}

#endif
