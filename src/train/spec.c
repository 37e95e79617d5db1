/* See spec.h. */
#include "train/spec.h"

#include <string.h>

#include "base/mathx.h"
#include "comm/gpu.h"

static MixtureSpec mixture_spec(const Config *cfg)
{
    MixtureSpec m = {
        .experts = (int)cfg->moe.experts,
        .topk = (int)cfg->moe.topk,
        .ffn = cfg->moe.ffn,
        .shared_ffn = cfg->moe.shared_ffn,
        .latent = cfg->moe.latent,
        .shared_gate = cfg->moe.shared_gate,
        .dispatcher = cfg->moe.dispatcher,
        .router = { .score = cfg->moe.router,
                    .normalize = cfg->moe.normalize,
                    .scale = (float)cfg->moe.scale,
                    .groups = (int)cfg->moe.groups,
                    .group_topk = (int)cfg->moe.group_topk,
                    .group_best = (int)cfg->moe.group_best },
        .balance = { .unit = cfg->moe.unit,
                     .aux = (float)cfg->moe.aux_coeff,
                     .z = (float)cfg->moe.z_coeff,
                     .global = cfg->moe.balance == MOE_BALANCE_GLOBAL_AUX,
                     .sinkhorn = cfg->moe.balance == MOE_BALANCE_SINKHORN,
                     .forced = cfg->moe.balance == MOE_BALANCE_FORCED },
        .jitter = (float)cfg->moe.jitter,
        .capacity = { .factor = cfg->moe.capacity,
                      .by_position = cfg->moe.drop == MOE_DROP_POSITION,
                      .slack = cfg->moe.slack,
                      .drop = cfg->moe.overflow == MOE_OVERFLOW_DROP,
                      .redo = cfg->moe.overflow == MOE_OVERFLOW_REDO },
    };
    if (cfg->checkpoint.upcycle) m.parts = (int)(cfg->model.ffn / cfg->moe.ffn);
    if (cfg->moe.balance == MOE_BALANCE_BIAS) m.balance.bias_rate = (float)cfg->moe.bias_rate;
    layer_set_read(cfg->moe.every, (int)cfg->model.layers, &m.layers); /* (config_check has read it, too) */
    return m;
}

static MuonSpec muon_spec(const Config *cfg)
{
    const MuonSet set = cfg->optim.muon_coefficients;
    return (MuonSpec){ .momentum = (float)cfg->optim.muon_momentum,
                       .nesterov = cfg->optim.muon_nesterov,
                       .set = set,
                       .steps = cfg->optim.muon_steps    ? (int)cfg->optim.muon_steps
                                : set == MUON_DEEPSEEKV4 ? 10
                                                         : 5,
                       .scale = cfg->optim.muon_scale,
                       .split = cfg->optim.muon_split,
                       .router = cfg->optim.muon_router == OPTIM_MUON_ROUTER_MUON };
}

static RopeSpec rope_spec(const Config *cfg)
{
    RopeSpec r = { .base = (float)cfg->model.rope_base,
                   .local_base = (float)cfg->model.rope_base_local,
                   .columns = (int)cfg->model.rope_dim,
                   .scaling = cfg->model.rope_scaling,
                   .factor = cfg->model.rope_factor,
                   .original = (double)cfg->model.rope_original,
                   .slow = cfg->model.rope_slow,
                   .fast = cfg->model.rope_fast,
                   .magnitude = cfg->model.rope_magnitude,
                   .truncate = cfg->model.rope_truncate };
    layer_pattern_read(cfg->model.rope_layers, 1, &r.layers);
    return r;
}

/* (the attention kernels of GPUs hold rows of so many columns in shared memory; cuda/attention.cuh) */
enum { GPU_HEAD_MOST = 256 };

static LatentSpec latent_spec(const Config *cfg)
{
    const bool cpu = cfg->run.device != RUN_DEVICE_CUDA;
    const double m = cfg->model.rope_mscale_all * 0.1 * m_log(cfg->model.rope_factor) + 1;
    return (LatentSpec){ .width = { .q_rank = cfg->model.q_lora_rank,
                                    .kv_rank = cfg->model.kv_lora_rank,
                                    .nope = cfg->model.qk_nope_head_dim,
                                    .rope = cfg->model.qk_rope_head_dim,
                                    .value = cfg->model.v_head_dim },
                         .absorb = cpu || cfg->model.kv_lora_rank + cfg->model.qk_rope_head_dim <= GPU_HEAD_MOST,
                         .scale = (float)(m * m),
                         .norm_eps = (float)cfg->model.latent_norm_eps };
}

static DeltaSpec delta_spec(const Config *cfg)
{
    return (DeltaSpec){ .key_heads = (int)cfg->model.delta_key_heads,
                        .value_heads = (int)cfg->model.delta_value_heads,
                        .key = cfg->model.delta_key_dim,
                        .value = cfg->model.delta_value_dim,
                        .conv = (int)cfg->model.delta_conv,
                        .negative = cfg->model.delta_negative,
                        .norm_eps = (float)cfg->model.delta_norm_eps };
}

static KdaSpec kda_spec(const Config *cfg)
{
    return (KdaSpec){ .heads = (int)cfg->model.kda_heads,
                      .head = cfg->model.kda_head_dim,
                      .conv = (int)cfg->model.kda_conv,
                      .bound = (float)cfg->model.kda_bound };
}

static MambaSpec mamba_spec(const Config *cfg)
{
    return (MambaSpec){ .heads = (int)cfg->model.mamba_heads,
                        .groups = (int)cfg->model.mamba_groups,
                        .head = cfg->model.mamba_head_dim,
                        .state = cfg->model.mamba_state,
                        .conv = (int)cfg->model.mamba_conv,
                        .conv_bias = cfg->model.mamba_conv_bias,
                        .least = (float)cfg->model.mamba_dt_min };
}

static void put_states(const Config *cfg, ModelSpec *m)
{
    m->state_pre_norms = cfg->model.state_norms == MODEL_STATE_NORMS_PRE;
    if (config_has_delta(cfg)) m->delta = delta_spec(cfg);
    if (config_has_kda(cfg)) m->kda = kda_spec(cfg);
    if (config_has_mamba(cfg)) m->mamba = mamba_spec(cfg);
}

static LayerPattern mixer_spec(const Config *cfg)
{
    const int kinds[] = { [MIXER_WORD_ATTENTION] = config_is_latent(cfg) ? MIXER_LATENT : MIXER_ATTENTION,
                          [MIXER_WORD_NONE] = MIXER_NONE,
                          [MIXER_WORD_DELTA] = MIXER_DELTA,
                          [MIXER_WORD_MAMBA2] = MIXER_MAMBA2,
                          [MIXER_WORD_KDA] = MIXER_KDA };
    LayerPattern p = cfg->derived.mixer;
    for (int i = 0; i < p.runs; i++) p.value[i] = kinds[p.value[i]];
    return p;
}

/* The blocks without a feed-forward layer; of the mixtures those go that have none. */
static void feed_forward_spec(const Config *cfg, ModelSpec *m)
{
    for (int i = 0; i < m->layers; i++) {
        const uint64_t bit = UINT64_C(1) << i % 64;
        if (layer_pattern_at(&cfg->derived.ffn_layers, i)) continue;
        m->without_ffn.word[i / 64] |= bit;
        m->moe.layers.word[i / 64] &= ~bit;
    }
}

/* (a ring of single ranks is a ring) */
static LayerPattern context_spec(const Config *cfg)
{
    LayerPattern p = cfg->derived.cp_comm;
    for (int i = 0; i < p.runs; i++) {
        if (p.value[i] == CONTEXT_HIERARCHICAL && cfg->derived.cp_heads <= 1) p.value[i] = CONTEXT_RING;
    }
    return p;
}

/* Chunks that the table's rows are padded to: each tp rank has as many, also where tp does not divide tp_blocks, which
 * only runs without the promise of equal bits may have. */
static int vocab_chunks(const Config *cfg)
{
    int64_t chunks = cfg->parallel.tp_blocks;
    while (chunks % cfg->parallel.tp) chunks += cfg->parallel.tp_blocks;
    return (int)chunks;
}

static MupSpec mup_spec(const Config *cfg)
{
    return (MupSpec){ .width = config_mup_width(cfg), .head_dim = (int)cfg->optim.mup_head_dim };
}

static Fp8Spec fp8_spec(const Config *cfg)
{
    Fp8Spec s = fp8_between(config_fp8_recipe(cfg), (int)cfg->model.layers, (int)cfg->run.fp8_keep);
    s.experts = cfg->run.fp8_experts;
    return s;
}

static ModelSpec model_spec(const Config *cfg, int64_t vocab)
{
    ModelSpec m = { .layers = (int)cfg->model.layers,
                    .heads = (int)cfg->model.heads,
                    .kv_heads = (int)cfg->model.kv_heads,
                    .head_dim = (int)cfg->model.head_dim,
                    .hidden = cfg->model.hidden,
                    .ffn = cfg->model.ffn,
                    .seq = cfg->model.seq,
                    .vocab = cfg->model.vocab ? cfg->model.vocab : vocab,
                    .learned_positions = cfg->model.position == MODEL_POSITION_LEARNED,
                    .rms = cfg->model.norm == MODEL_NORM_RMSNORM,
                    .bare_norms = !cfg->model.norm_bias,
                    .bias = cfg->model.bias,
                    .attention_bias = cfg->model.attention_bias,
                    .tied = cfg->model.tied,
                    .mtp = { (int)cfg->model.mtp_layers, (float)cfg->model.mtp_weight },
                    .qk_norm = cfg->model.qk_norm,
                    .sinks = cfg->model.sinks,
                    .attention_gate = cfg->model.attention_gate,
                    .attention_softcap = (float)cfg->model.attention_softcap,
                    .attention_scale = (float)cfg->model.attention_scale,
                    .embed_scale = (float)cfg->model.embed_scale,
                    .residual_scale = (float)cfg->model.residual_scale,
                    .logits = { (float)cfg->model.logits_scale, (float)cfg->model.final_softcap, cfg->model.head_bias },
                    .block_norms = cfg->model.block_norms,
                    .activation = config_activation(cfg),
                    .activation_limit = (float)cfg->model.activation_limit,
                    .norm_eps = (float)cfg->model.norm_eps,
                    .dropout = (float)cfg->model.dropout,
                    .attention_dropout = (float)cfg->model.attention_dropout,
                    .init_std = (float)cfg->model.init_std,
                    .seed = (uint64_t)cfg->run.seed,
                    .recompute = cfg->derived.recompute,
                    .offload = (int)cfg->train.offload };
    if (cfg->optim.mup_base) m.mup = mup_spec(cfg);
    if (cfg->run.precision == RUN_PRECISION_FP8) m.fp8 = fp8_spec(cfg);
    m.fp8.keeps_weights = cfg->run.fp8_weights;
    layer_pattern_read(cfg->model.window, WINDOW_MOST, &m.window); /* (config_check has read both, too) */
    m.context = context_spec(cfg);
    if (cfg->model.position == MODEL_POSITION_ROPE) m.rope = rope_spec(cfg);
    m.mixer = mixer_spec(cfg);
    put_states(cfg, &m);
    if (config_is_latent(cfg)) {
        m.latent = latent_spec(cfg);
        if (cfg->model.position == MODEL_POSITION_ROPE) m.rope.columns = (int)m.latent.width.rope;
    }
    m.tp_blocks = (int)cfg->parallel.tp_blocks;
    if (cfg->moe.experts) m.moe = mixture_spec(cfg);
    feed_forward_spec(cfg, &m);
    m.padded_vocab = head_padded_vocab(m.vocab, vocab_chunks(cfg));
    return m;
}

LrSchedule lr_spec(const Config *cfg)
{
    return (LrSchedule){ .shape = cfg->optim.schedule,
                         .lr = cfg->optim.lr,
                         .min_lr = cfg->derived.min_lr,
                         .warmup = cfg->optim.warmup,
                         .decay_steps = cfg->derived.decay_steps,
                         .wsd_decay = cfg->derived.wsd_decay };
}

static Err check_vocab(const TrainSpec *s, int64_t vocab)
{
    if (s->model.vocab >= vocab) return ERR_OK;
    return err_set(ERR_CONFIG, "model.vocab is %lld, the tokenizer has %lld ids", (long long)s->model.vocab,
                   (long long)vocab),
           err_hint("leave model.vocab at 0 to take the tokenizer's");
}

Err spec_eod(const Config *cfg, const Tokenizer *t, int32_t *out)
{
    *out = tokenizer_eod(t);
    if (*out >= 0 || !(cfg->data.mask_eod || cfg->data.reset_at_eod)) return ERR_OK;
    return err_set(ERR_CONFIG, "data.%s needs a token that ends a document, and the tokenizer '%s' has none",
                   cfg->data.mask_eod ? "mask_eod" : "reset_at_eod", cfg->data.tokenizer),
           err_hint("take a tokenizer with <|endoftext|>, as `megatrain tokenizer train` makes");
}

DatasetOptions data_spec(const Config *cfg, const Tokenizer *t)
{
    return (DatasetOptions){ .spec = cfg->data.train,
                             .split = cfg->data.split,
                             .part = PART_TRAIN,
                             .seq = cfg->model.seq,
                             .tokenizer = t ? cfg->data.tokenizer : NULL,
                             .tokenizer_crc = t ? tokenizer_crc(t) : 0,
                             .seed = (uint64_t)cfg->data.seed,
                             .order = cfg->data.order == DATA_ORDER_MEGATRON ? ORDER_MEGATRON : ORDER_KEYED,
                             .samples = batch_ramp_samples(&cfg->derived.batch, cfg->derived.steps),
                             .ramp = &cfg->derived.batch };
}

Err data_error(const Config *cfg, ConfigId id, Err err)
{
    char place[512];
    if (id == CFG_data_valid && *cfg->data.split) id = CFG_data_split;
    config_origin(cfg, id, place, sizeof place);
    return err == ERR_CONFIG ? err_prefix(err, "%s: data.%s", place, config_key(id)->name) : err;
}

DatasetOptions valid_spec(const Config *cfg, const Tokenizer *t)
{
    DatasetOptions o = data_spec(cfg, t);
    if (!*o.split) o.spec = cfg->data.valid;
    o.part = PART_VALID;
    o.order = ORDER_FILE;
    o.ramp = NULL;
    return o;
}

static PipelineSpec pipeline_spec(const Config *cfg)
{
    return (PipelineSpec){ .schedule = cfg->parallel.schedule,
                           .layout = cfg->parallel.layout,
                           .chunks = (int)cfg->parallel.vpp,
                           .group = (int)cfg->parallel.group,
                           .slices = (int)cfg->parallel.slices };
}

ZeroCut spec_zero_cut(int64_t zero, int reshard, int64_t pp)
{
    const bool whole = reshard == PARALLEL_RESHARD_NEVER || (reshard == PARALLEL_RESHARD_AUTO && pp > 1);
    return zero == ZERO_VALUES && whole ? ZERO_GRADS : (ZeroCut)zero;
}

#define DOT_OF(name, text, number) [DEBUG_DOT_##name] = DOT_##name,
#define TYPE_OF(name, text, type) [RUN_PRECISION_##name] = type,

Err train_spec(const Config *cfg, int64_t vocab, TrainSpec *out)
{
    static const DotKind dots[] = { DOT_LIST(DOT_OF) };
    static const DType dtypes[] = { PRECISIONS(TYPE_OF) };
    const ZeroCut zero = spec_zero_cut(cfg->parallel.zero, cfg->parallel.reshard, cfg->parallel.pp);
    *out = (TrainSpec){ .device.kind = cfg->run.device == RUN_DEVICE_CUDA ? DEVICE_CUDA : DEVICE_CPU,
                        .compute = dtypes[cfg->run.precision],
                        .fp32_residual = cfg->run.fp32_residual,
                        .fp32_vectors = cfg->run.fp32_vectors,
                        .fp32_row_sums = cfg->run.fp32_row_sums,
                        .model = model_spec(cfg, vocab),
                        .pipeline = pipeline_spec(cfg),
                        .micro_batch = cfg->train.micro_batch,
                        .global_batch = cfg->derived.global_batch,
                        .ramp = cfg->derived.batch,
                        .documents.mask = cfg->data.mask_eod,
                        .documents.restart = cfg->data.reset_at_eod,
                        .seq_blocks = (int)cfg->parallel.seq_blocks,
                        .attn_block = cfg->parallel.attn_block,
                        .cut = cfg->parallel.cp_cut == PARALLEL_CP_CUT_CONTIGUOUS ? CONTEXT_CONTIGUOUS : CONTEXT_ZIGZAG,
                        .exact = cfg->run.reproducible == RUN_REPRODUCIBLE_LAYOUT,
                        .update.optimizer = cfg->optim.name,
                        .update.muon = muon_spec(cfg),
                        .update.adamw = { (float)cfg->optim.beta1, (float)cfg->optim.beta2, (float)cfg->optim.eps,
                                          (float)cfg->optim.weight_decay },
                        .update.qk_clip = { (float)cfg->optim.qk_clip, (float)cfg->optim.qk_clip_alpha },
                        .update.moments = cfg->optim.moments == OPTIM_MOMENTS_BF16 ? BF16 : F32,
                        .update.states_on_host = cfg->optim.states == OPTIM_STATES_HOST,
                        .update.clip = (float)cfg->optim.clip,
                        .update.lr = lr_spec(cfg),
                        .update.zero = zero,
                        .update.bucket_bytes = cfg->parallel.bucket_mb << 20,
                        .update.overlap_grad = cfg->parallel.overlap_grad,
                        .update.overlap_param = cfg->parallel.overlap_param,
                        .overlap_tp = (int)cfg->parallel.overlap_tp,
                        .overlap_moe = cfg->parallel.overlap_moe,
                        .seed = (uint64_t)cfg->run.seed,
                        .device.threads = (int)cfg->debug.threads,
                        .device.isa = cfg->debug.isa,
                        .device.dot = dots[cfg->debug.dot],
                        .purpose.ahead = true,
                        .purpose.snapshot = cfg->checkpoint.async,
                        .purpose.scores = *cfg->train.eval_tasks != 0,
                        .attention_logits = cfg->log.max_attention_logit,
                        .graphs = cfg->run.graphs,
                        .poison = cfg->debug.poison,
                        .extra_shift = (int)cfg->debug.extra_shift };
    return check_vocab(out, vocab);
}
#undef DOT_OF
#undef TYPE_OF

static Err check_pairs(const Config *cfg)
{
    const char *name = pipeline_spec(cfg).schedule;
    bool pairs;
    if (!cfg->parallel.overlap_moe) return ERR_OK;
    TRY(schedule_pairs(name, &pairs));
    if (pairs) return ERR_OK;
    err_set(ERR_CONFIG,
            "parallel.overlap_moe=true: schedule '%s' has no micro-batch whose forward runs beside the "
            "backward of another",
            name);
    err_take("parallel.schedule=dualpipev");
    err_take("parallel.schedule=dualpipe");
    return err_take("parallel.overlap_moe=false");
}

static Err check_data(const Config *cfg)
{
    const DatasetOptions o = data_spec(cfg, NULL);
    return *o.spec ? data_error(cfg, CFG_data_train, dataset_check_text(&o)) : ERR_OK;
}

/* The number that a host is taken to have where nothing says it. */
enum { RANKS_OF_A_HOST = 8 };

int spec_host_ranks(const Config *cfg)
{
    return cfg->debug.ranks_per_host ? (int)cfg->debug.ranks_per_host : RANKS_OF_A_HOST;
}

bool spec_sums_by_message(const Config *cfg)
{
    return cfg->run.precision != RUN_PRECISION_FP32 || cfg->parallel.overlap_tp > 1;
}

static int64_t host_by_number(const void *ranks_of_a_host, int rank)
{
    return rank / *(const int64_t *)ranks_of_a_host;
}

/* Hosts of the key, or those that a plan is for; a run without the key finds its own (ranks.c). */
static Err spread_experts(const Config *cfg, Grid *grid)
{
    const int64_t said = cfg->debug.ranks_per_host, each = spec_host_ranks(cfg);
    if (cfg->moe.dispatcher != DISPATCH_NODE || !grid->ep) return ERR_OK;
    grid->ep_hosts = grid_ep_hosts(*grid, host_by_number, &each);
    if (grid->ep_hosts) return ERR_OK;
    grid->ep_hosts = 1;
    if (!said) return ERR_OK;
    err_set(ERR_CONFIG,
            "moe.dispatcher=node: with debug.ranks_per_host=%lld hosts have unequal parts of a group of ep x "
            "etp = %d x %d ranks, or a part of an expert without the others",
            (long long)said, grid->ep, grid->etp);
    err_take("moe.dispatcher=alltoall debug.ranks_per_host=0");
    return err_take("debug.ranks_per_host=0");
}

Err grid_read(const Config *cfg, Grid *out)
{
    const int tp = (int)cfg->parallel.tp, kv_heads = (int)cfg->model.kv_heads;
    *out = (Grid){ .tp = tp,
                   .cp = (int)cfg->parallel.cp,
                   .cp_heads =
                       layer_pattern_has(&cfg->derived.cp_comm, CONTEXT_HIERARCHICAL) ? (int)cfg->derived.cp_heads : 1,
                   .dp = (int)cfg->derived.dp,
                   .pp = (int)cfg->parallel.pp,
                   .order = cfg->parallel.order == PARALLEL_ORDER_TP_CP_EP_PP_DP ? ORDER_PP_DP : ORDER_DP_PP,
                   .sp = cfg->parallel.sp && tp > 1,
                   .kv = tp > kv_heads ? tp / kv_heads : 1,
                   .ep = cfg->moe.experts ? (int)cfg->parallel.ep : 0,
                   .etp = (int)cfg->parallel.etp,
                   .owners = cfg->optim.name == OPTIMIZER_MUON };
    TRY(schedule_two_way(pipeline_spec(cfg).schedule, &out->bidirectional));
    out->zero_group = param_zero_group(*out, (ZeroCut)cfg->parallel.zero, cfg->parallel.zero_group);
    TRY(spread_experts(cfg, out));
    return check_pairs(cfg);
}

/* Any vocabulary will do for the rules: a model has a multiple of tp_blocks, whatever its size. */
Err grid_try(const Config *cfg, Grid *out)
{
    TrainSpec s;
    TRY(grid_read(cfg, out));
    TRY(check_data(cfg));
    TRY(train_spec(cfg, 1, &s));
    TRY(trainer_check(&s, *out));
    return trainer_grid(&s, out);
}

int64_t grid_library_bytes(Grid grid, bool sums_by_message, int host_ranks)
{
    const int pairs = world_pairs(grid, sums_by_message, host_ranks);
    return DEVICE_LIBRARY_BYTES + (int64_t)world_groups(grid) * NCCL_GROUP_BYTES + (int64_t)pairs * NCCL_PAIR_BYTES;
}

int64_t spec_library_bytes(const Config *cfg, Grid grid)
{
    return grid_library_bytes(grid, spec_sums_by_message(cfg), spec_host_ranks(cfg));
}

bool spec_allows(const Config *cfg, const char *values)
{
    Config other;
    Grid grid;
    const bool allowed = config_with(cfg, values, &other) && !grid_try(&other, &grid);
    config_release(&other);
    return allowed;
}

static bool passes(const void *cfg, const char *way) { return spec_allows(cfg, way); }

Err grid_spec(const Config *cfg, Grid *out)
{
    const Err err = grid_try(cfg, out);
    if (err == ERR_CONFIG) err_ways_keep(passes, cfg);
    return err;
}

/* Does what grid_spec says go by the key? */
static bool grid_reads(ConfigId id)
{
    static const char *const sections[] = { "model", "moe", "parallel" };
    static const ConfigId others[] = {
        CFG_run_device,
        CFG_run_precision,
        CFG_run_reproducible,
        CFG_train_micro_batch,
        CFG_train_global_batch,
        CFG_optim_clip,
        CFG_optim_qk_clip,
        CFG_data_train,
        CFG_data_split,
        CFG_data_mask_eod,
        CFG_data_reset_at_eod,
        CFG_checkpoint_upcycle,
        CFG_log_max_attention_logit,
        CFG_debug_ranks_per_host,
    };
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++)
        if (strcmp(config_key(id)->section, sections[i]) == 0) return true;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (others[i] == id) return true;
    return false;
}

Err grid_judge(const Config *cfg, const bool doubtful[CFG_COUNT])
{
    Grid grid;
    for (int i = 0; i < CFG_COUNT; i++)
        if (doubtful[i] && grid_reads((ConfigId)i)) return ERR_OK;
    return grid_spec(cfg, &grid);
}

/* The first of the ranks of each pipeline rank: the others do the same, or less. */
Err spec_dry_run(const Config *cfg, Grid grid, int64_t vocab)
{
    TrainSpec s;
    MemoryPlan plan;
    TRY(train_spec(cfg, vocab, &s));
    for (int rank = 0, pp = 0; rank < grid_size(grid) && pp < grid.pp; rank++) {
        if (grid_coords(grid, rank).pp != pp) continue;
        TRY(trainer_plan(&s, grid, rank, &plan));
        pp++;
    }
    return ERR_OK;
}
