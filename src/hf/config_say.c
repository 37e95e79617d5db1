/* A configuration as an HfModel: what a class's config.json has to say for it. See model.h. */
#include <math.h>

#include "base/mathx.h"
#include "hf/model.h"

static void say_sizes(const Config *cfg, HfClass c, HfModel *m)
{
    m->layers = cfg->model.layers;
    m->hidden = cfg->model.hidden;
    m->heads = cfg->model.heads;
    m->kv_heads = cfg->model.kv_heads;
    m->head_dim = cfg->model.head_dim;
    m->ffn = hf_classes[c].usual.expert_ffn == HF_NONE ? cfg->moe.ffn : cfg->model.ffn;
    m->positions = cfg->model.seq;
    m->vocab = cfg->model.vocab;
    m->tied = cfg->model.tied;
    m->out_bias = cfg->model.attention_bias == ATTENTION_BIAS_ALL;
    m->attention_bias = m->out_bias;
    if (hf_classes[c].bias == HF_BIAS_APART) m->attention_bias = cfg->model.attention_bias != ATTENTION_BIAS_NONE;
    m->mlp_bias = cfg->model.bias;
    m->qk_norm = cfg->model.qk_norm == QK_NORM_HEADS;
    m->post_norms = cfg->model.block_norms == BLOCK_NORMS_BOTH;
    m->norm_count = cfg->model.block_norms == BLOCK_NORMS_PARALLEL_TWO ? 2 : 1;
    m->parallel = m->norm_count == 2 || cfg->model.block_norms == BLOCK_NORMS_PARALLEL;
    m->grouped = m->norm_count == 2 || (m->kv_heads > 1 && m->kv_heads < m->heads);
    m->one_kv = !m->grouped && m->kv_heads == 1;
    m->gelu = cfg->model.activation != MODEL_ACTIVATION_GELU_ERF;
    m->eps = cfg->model.norm_eps;
    m->init_std = cfg->model.init_std;
    m->attention_dropout = cfg->model.attention_dropout;
    m->branch_dropout = m->embedding_dropout = cfg->model.dropout;
    m->mtp = cfg->model.mtp_layers;
    m->limit = cfg->model.activation_limit;
}

/* Gemma's caps, scale of scores and second base of angles. */
static void say_gemma(const Config *cfg, HfModel *m)
{
    const double scale = cfg->model.attention_scale;
    m->attention_cap = cfg->model.attention_softcap > 0 ? cfg->model.attention_softcap : HF_NONE;
    m->final_cap = cfg->model.final_softcap > 0 ? cfg->model.final_softcap : HF_NONE;
    m->query_scalar = scale > 0 ? (int64_t)(1 / (scale * scale) + 0.5) : m->head_dim;
    m->scaled = (float)cfg->model.embed_scale == (float)sqrt((double)m->hidden);
    m->local_theta = cfg->model.rope_base_local > 0 ? cfg->model.rope_base_local : cfg->model.rope_base;
}

static void say_factors(const Config *cfg, HfModel *m)
{
    const double scale = cfg->model.attention_scale;
    m->embedding_factor = cfg->model.embed_scale;
    m->branch_factor = cfg->model.residual_scale;
    m->score_factor = scale > 0 ? scale : 1 / sqrt((double)m->head_dim);
    m->logits_divisor = 1 / cfg->model.logits_scale;
    m->logits_factor = cfg->model.logits_scale;
    m->minicpm.depth = cfg->model.residual_scale * sqrt((double)m->layers);
    m->minicpm.base = (int64_t)((double)m->hidden * cfg->model.logits_scale + 0.5);
}

static void say_windows(const Config *cfg, HfModel *m)
{
    LayerPattern p;
    layer_pattern_read(cfg->model.window, WINDOW_MOST, &p); /* (config_check has read it) */
    m->window = layer_pattern_most(&p);
    m->use_window = m->window > 0;
    if (!m->window) m->window = HF_NONE;
    m->typed = m->full_layers = m->layers;
    m->sliding = (LayerSet){ { 0 } };
    for (int i = (int)m->layers - 1; i >= 0; i--) {
        if (!layer_pattern_at(&p, i)) {
            m->period = i + 1;
            continue;
        }
        m->sliding.word[i / 64] |= UINT64_C(1) << i % 64;
        m->full_layers = i;
    }
    if (m->use_window && layer_set_count(&m->sliding) == m->layers) m->period = m->layers + 1;
}

static void say_mamba(const Config *cfg, HfModel *m)
{
    m->mamba.heads = cfg->model.mamba_heads;
    m->mamba.head = cfg->model.mamba_head_dim;
    m->mamba.groups = cfg->model.mamba_groups;
    m->mamba.state = cfg->model.mamba_state;
    m->mamba.conv = cfg->model.mamba_conv;
    m->mamba.conv_bias = cfg->model.mamba_conv_bias;
    m->mamba.expand = m->mamba.heads * m->mamba.head / m->hidden;
    m->mamba.dt_min = cfg->model.mamba_dt_min;
}

static void say_delta(const Config *cfg, HfModel *m)
{
    m->linear.key_heads = cfg->model.delta_key_heads;
    m->linear.value_heads = cfg->model.delta_value_heads;
    m->linear.key_dim = cfg->model.delta_key_dim;
    m->linear.value_dim = cfg->model.delta_value_dim;
    m->linear.conv = cfg->model.delta_conv;
    m->linear.negative = cfg->model.delta_negative;
}

static void say_kda(const Config *cfg, HfModel *m)
{
    m->kda.heads = cfg->model.kda_heads;
    m->kda.head = cfg->model.kda_head_dim;
    m->kda.conv = cfg->model.kda_conv;
}

/* Blocks whose mixer is what the class has as linear attention. */
static void say_mixers(const Config *cfg, HfClass c, HfModel *m)
{
    const MixerWord kind = hf_classes[c].hybrid;
    const LayerSet windows = m->sliding;
    m->sliding = m->attending = (LayerSet){ { 0 } };
    for (int i = 0; i < m->layers; i++) {
        const int64_t mixer = layer_pattern_at(&cfg->derived.mixer, i);
        LayerSet *set = mixer == (int64_t)kind ? &m->sliding : &m->attending;
        if (mixer != MIXER_WORD_NONE) set->word[i / 64] |= UINT64_C(1) << i % 64;
    }
    if (kind == MIXER_WORD_DELTA && config_has_delta(cfg)) say_delta(cfg, m);
    if (kind == MIXER_WORD_MAMBA2 && config_has_mamba(cfg)) say_mamba(cfg, m);
    if (kind == MIXER_WORD_KDA && config_has_kda(cfg)) say_kda(cfg, m);
    m->kda.blocks = m->sliding;
    for (int i = 0; i < LAYERS_MAX / 64 && hf_classes[c].windows; i++)
        m->sliding.word[i] = windows.word[i] & m->attending.word[i];
}

static void say_turns(const Config *cfg, HfModel *m)
{
    LayerPattern p;
    layer_pattern_read(cfg->model.rope_layers, 1, &p); /* (config_check has read it) */
    m->turned = m->layers;
    m->rotates = cfg->model.position == MODEL_POSITION_ROPE;
    m->turning = (LayerSet){ { 0 } };
    m->no_rope_every = m->layers + 1;
    for (int i = (int)m->layers - 1; i >= 0; i--)
        if (cfg->model.position == MODEL_POSITION_ROPE && layer_pattern_at(&p, i))
            m->turning.word[i / 64] |= UINT64_C(1) << i % 64;
        else m->no_rope_every = i + 1;
}

static void say_yarn(const Config *cfg, HfClass c, HfModel *m)
{
    const double log_factor = 0.1 * m_log(m->factor), magnitude = cfg->model.rope_magnitude;
    const double all = hf_classes[c].latent ? cfg->model.rope_mscale_all : 0;
    m->beta_slow = cfg->model.rope_slow;
    m->beta_fast = cfg->model.rope_fast;
    m->truncate = cfg->model.rope_truncate ? HF_NONE : 0;
    if (all > 0) {
        m->mscale_all = all;
        m->mscale = magnitude == 1 ? all : 1;
        if (magnitude == 1 || magnitude == (log_factor + 1) / (all * log_factor + 1)) return;
    } else if (magnitude == log_factor + 1) {
        return;
    }
    m->attention_factor = magnitude;
}

static void say_rope(const Config *cfg, HfClass c, HfModel *m)
{
    m->theta = cfg->model.rope_base;
    m->rope_type = cfg->model.rope_scaling;
    m->partial = 1;
    if (cfg->model.rope_dim) m->partial = (double)cfg->model.rope_dim / (double)m->head_dim;
    if ((int64_t)(m->partial * (double)m->head_dim) < cfg->model.rope_dim) m->partial = nextafter(m->partial, 1);
    m->rotary = cfg->model.rope_dim ? cfg->model.rope_dim : m->head_dim;
    m->factor = m->rope_type ? cfg->model.rope_factor : HF_NONE;
    m->original = m->rope_type > ROPE_LINEAR ? cfg->model.rope_original : HF_NONE;
    m->truncate = HF_NONE;
    if (m->rope_type == ROPE_LLAMA3) {
        m->slow = cfg->model.rope_slow;
        m->fast = cfg->model.rope_fast;
    }
    if (m->rope_type == ROPE_YARN) say_yarn(cfg, c, m);
}

static void say_latent(const Config *cfg, HfModel *m)
{
    m->q_rank = cfg->model.q_lora_rank ? cfg->model.q_lora_rank : HF_NONE;
    m->kv_rank = cfg->model.kv_lora_rank;
    m->nope = cfg->model.qk_nope_head_dim;
    m->rope_dim = cfg->model.qk_rope_head_dim;
    m->v_dim = cfg->model.v_head_dim;
}

static void say_experts(const Config *cfg, HfModel *m)
{
    LayerSet mixtures = { { 0 } };
    m->first_dense = m->layers;
    m->dense = (LayerSet){ { 0 } };
    for (int i = 0; i < m->layers && !cfg->moe.experts; i++) m->dense.word[i / 64] |= UINT64_C(1) << i % 64;
    if (!cfg->moe.experts) return;
    layer_set_read(cfg->moe.every, (int)m->layers, &mixtures); /* (config_check has read it) */
    for (int i = (int)m->layers - 1; i >= 0; i--) {
        if (layer_set_has(&mixtures, i)) m->first_dense = i;
        else m->dense.word[i / 64] |= UINT64_C(1) << i % 64;
    }
    m->mlps = m->layers;
    m->experts = cfg->moe.experts;
    m->topk = cfg->moe.topk;
    m->expert_ffn = cfg->moe.ffn;
    m->moe_latent = cfg->moe.latent ? cfg->moe.latent : HF_NONE;
    m->shared = cfg->moe.shared_ffn / cfg->moe.ffn;
    m->shared_ffn = cfg->moe.shared_ffn;
    m->sparse_step = 1;
    m->normalize = cfg->moe.normalize;
    m->scale = cfg->moe.scale;
    m->method = cfg->moe.groups > 1 ? HF_GROUP_LIMITED : HF_GREEDY;
    m->groups = cfg->moe.groups;
    m->group_topk = cfg->moe.group_topk;
}

/* Of a class whose blocks have one layer: dense feed-forward layers are those that are there and have no experts. */
static void say_singles(const Config *cfg, HfModel *m)
{
    for (int i = 0; i < m->layers; i++)
        if (!layer_pattern_at(&cfg->derived.ffn_layers, i)) m->dense.word[i / 64] &= ~(UINT64_C(1) << i % 64);
}

void hf_say(const Config *cfg, HfClass c, HfModel *out)
{
    *out = hf_classes[c].usual;
    say_sizes(cfg, c, out);
    say_gemma(cfg, out);
    say_windows(cfg, out);
    say_turns(cfg, out);
    say_rope(cfg, c, out);
    if (out->branch_factor > 0 || out->logits_factor > 0) say_factors(cfg, out);
    if (c == HF_FLINT && out->window == HF_NONE) out->window = hf_classes[c].usual.window; /* (of no block) */
    if (hf_classes[c].latent && cfg->model.attention == MODEL_ATTENTION_MLA) say_latent(cfg, out);
    if (hf_classes[c].hybrid) say_mixers(cfg, c, out);
    if (hf_classes[c].mixture) say_experts(cfg, out);
    if (hf_classes[c].single) say_singles(cfg, out);
    if (c == HF_OLMO_HYBRID && !out->rotates) out->theta = HF_NONE;
    if (c == HF_GRANITEMOEHYBRID && !cfg->moe.experts) { /* (its feed-forward layers are shared experts alone) */
        out->experts = 0;
        out->ffn = out->shared_ffn = cfg->model.ffn;
    }
}
