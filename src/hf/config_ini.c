/* An HfModel as the sections [model] and [moe]: the features that make its class. See model.h. */
#include <math.h>
#include <stdarg.h>
#include <string.h>

#include "base/mathx.h"
#include "hf/model.h"

enum { INI_BYTES = 8192 };

static const double LATENT_EPS = 1e-6; /* what transformers gives the norms of latents, whatever rms_norm_eps says */

typedef struct {
    const HfModel *m;
    const HfClassRow *row;
    bool attends; /* some block has attention: else keys of it would be refused */
    char text[INI_BYTES];
    int used;
    bool full;
} Ini;

/* ---- writing ---- */

static void line(Ini *w, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static void line(Ini *w, const char *fmt, ...)
{
    va_list args;
    va_start(args, fmt);
    const int n = vsnprintf(w->text + w->used, (size_t)(INI_BYTES - w->used), fmt, args);
    va_end(args);
    if (n < 0 || n >= INI_BYTES - w->used) w->full = true;
    else w->used += n;
}

static void put_int(Ini *w, const char *key, int64_t value) { line(w, "%s = %lld\n", key, (long long)value); }

static void put_real(Ini *w, const char *key, double value)
{
    char text[JSON_NUMBER_BYTES];
    json_number_text(value, text);
    line(w, "%s = %s\n", key, text);
}

static void put_word(Ini *w, const char *key, const char *value) { line(w, "%s = %s\n", key, value); }
static void put_flag(Ini *w, const char *key, bool value) { put_word(w, key, value ? "true" : "false"); }

typedef int64_t OfBlock(const HfModel *m, HfClass c, int layer);

/* Numbers of the first `count` blocks as "x*n,y"; or words, of which they are the numbers. */
static void put_runs(Ini *w, HfClass c, OfBlock *of, int count, const char *words)
{
    char word[32];
    for (int i = 0, n; i < count; i += n) {
        const int64_t x = of(w->m, c, i);
        for (n = 1; i + n < count && of(w->m, c, i + n) == x;) n++;
        snprintf(word, sizeof word, "%lld", (long long)x);
        if (words) hf_word_at(words, (int)x, word, sizeof word);
        line(w, "%s%s", i ? "," : "", word);
        if (n > 1 && count > n) line(w, "*%d", n);
    }
}

/* After how many blocks their numbers begin again. */
static int period_of(const HfModel *m, HfClass c, OfBlock *of)
{
    for (int p = 1, i; p < m->layers; p++) {
        for (i = p; i < m->layers && of(m, c, i) == of(m, c, i - p);) i++;
        if (i == m->layers) return p;
    }
    return (int)m->layers;
}

/* A key that is a list over the blocks, repeated; `usual` is what all of them have without it. */
static void put_blocks(Ini *w, HfClass c, const char *key, OfBlock *of, int64_t usual, const char *words)
{
    const int period = period_of(w->m, c, of);
    if (period == 1 && of(w->m, c, 0) == usual) return;
    line(w, "%s = ", key);
    put_runs(w, c, of, period, words);
    line(w, "\n");
}

/* ---- [model] ---- */

int64_t hf_window(const HfModel *m, HfClass c, int layer)
{
    const HfWindows kind = hf_classes[c].windows;
    bool has = kind == HF_WINDOWS_ALL || kind == HF_WINDOWS_SWITCH;
    if (kind == HF_WINDOWS_NONE || m->window == HF_NONE) return 0;
    if (kind == HF_WINDOWS_FROM) has = m->typed ? layer_set_has(&m->sliding, layer) : layer >= m->full_layers;
    if (kind == HF_WINDOWS_TYPES)
        has = m->typed ? layer_set_has(&m->sliding, layer) : (layer + !hf_classes[c].first_full) % m->period != 0;
    return has ? m->window : 0;
}

int64_t hf_turns(const HfModel *m, HfClass c, int layer)
{
    switch (hf_classes[c].turns) {
    case HF_TURNS_ALL: break;
    case HF_TURNS_LIST: return m->turned ? layer_set_has(&m->turning, layer) : (layer + 1) % m->no_rope_every != 0;
    case HF_TURNS_KEY: return m->rotates;
    case HF_TURNS_WINDOWED: return m->window == HF_NONE || hf_window(m, c, layer) > 0;
    }
    return 1;
}

int64_t hf_is_linear(const HfModel *m, HfClass c, int layer)
{
    if (!hf_classes[c].hybrid) return 0;
    if (hf_classes[c].single) return layer_set_has(&m->sliding, layer);
    if (hf_classes[c].listed) return !layer_set_has(&m->attending, layer);
    if (!m->typed && hf_classes[c].first_full) return !layer || layer % m->period;
    return m->typed ? layer_set_has(&m->sliding, layer) : (layer + 1) % m->period != 0;
}

int64_t hf_mixer(const HfModel *m, HfClass c, int layer)
{
    if (hf_is_linear(m, c, layer)) return 1;
    return hf_classes[c].single && !layer_set_has(&m->attending, layer) ? 2 : 0;
}

static int64_t has_ffn(const HfModel *m, HfClass c, int layer)
{
    return !hf_classes[c].single || hf_mixer(m, c, layer) == 2;
}

/* The first block with that mixer; `layers`: none has it. */
static int first_with(const HfModel *m, HfClass c, int64_t mixer)
{
    int i = 0;
    while (i < m->layers && hf_mixer(m, c, i) != mixer) i++;
    return i;
}

static void put_sizes(Ini *w)
{
    const HfModel *m = w->m;
    put_int(w, "layers", m->layers);
    put_int(w, "hidden", m->hidden);
    put_int(w, "heads", m->heads);
    if (w->attends && !w->row->latent && m->kv_heads != m->heads) put_int(w, "kv_heads", m->kv_heads);
    if (w->attends && !w->row->latent && m->head_dim * m->heads != m->hidden) put_int(w, "head_dim", m->head_dim);
    put_int(w, "ffn", m->ffn);
    put_int(w, "seq", m->positions);
    put_int(w, "vocab", m->vocab);
    put_flag(w, "tied", m->tied);
    put_real(w, "norm_eps", m->eps);
    put_real(w, "init_std", m->init_std);
}

static void put_bias(Ini *w)
{
    const HfModel *m = w->m;
    const HfBias kind = w->row->bias;
    const bool keys = kind == HF_BIAS_KEYS || kind == HF_BIAS_APART, one = kind == HF_BIAS_ONE;
    const bool linears = (keys || one) && m->mlp_bias, attention = one ? linears : keys && m->attention_bias;
    if (kind == HF_BIAS_ALL) return; /* (gpt2 has them) */
    if (linears) put_flag(w, "bias", true);
    if (!w->attends) return;
    if (kind == HF_BIAS_QKV || (kind == HF_BIAS_APART && attention && !m->out_bias))
        put_word(w, "attention_bias", "qkv");
    else if (attention != linears && w->attends) put_word(w, "attention_bias", attention ? "all" : "none");
}

/* Megatrain's two kinds of dropout are in the places of GPT-2's three. */
static void put_dropout(Ini *w)
{
    const HfModel *m = w->m;
    const bool embedding = w->row->drops_embedding;
    if (m->attention_dropout > 0 && w->attends) put_real(w, "attention_dropout", m->attention_dropout);
    if (embedding && m->embedding_dropout == m->branch_dropout) put_real(w, "dropout", m->branch_dropout);
    else if (m->branch_dropout > 0 || (embedding && m->embedding_dropout > 0))
        line(w, "; not taken over: dropout of %g on branches and %g on the embedding, which dropout has in one\n",
             m->branch_dropout, embedding ? m->embedding_dropout : 0.0);
    if (m->mlp_dropout > 0)
        line(w, "; not taken over: hidden_dropout of %g, which is behind feed-forward layers alone\n", m->mlp_dropout);
}

static void put_yarn(Ini *w)
{
    const HfModel *m = w->m;
    const double log_factor = m->factor > 1 ? 0.1 * m_log(m->factor) : 0, all = m->mscale_all > 0 ? m->mscale_all : 0;
    const double in_scores = w->row->latent ? all : 0, usual = (log_factor + 1) / (in_scores * log_factor + 1);
    double magnitude = log_factor + 1;
    if (m->mscale > 0 && all > 0) magnitude = (m->mscale * log_factor + 1) / (all * log_factor + 1);
    if (m->attention_factor != HF_NONE) magnitude = m->attention_factor;
    if (m->beta_slow > 0 && m->beta_slow != 1) put_real(w, "rope_slow", m->beta_slow); /* (0 is as absent) */
    if (m->beta_fast > 0 && m->beta_fast != 32) put_real(w, "rope_fast", m->beta_fast);
    if (magnitude != usual) put_real(w, "rope_magnitude", magnitude);
    if (in_scores > 0) put_real(w, "rope_mscale_all", in_scores);
    if (!m->truncate) put_flag(w, "rope_truncate", false);
}

static void put_rope(Ini *w, HfClass c)
{
    static const char *const names[] = { ROPE_SCALINGS(CHOICE_TEXT) };
    const HfModel *m = w->m;
    if (hf_is_gpt2(c)) return;
    if (!w->attends || (period_of(m, c, hf_turns) == 1 && !hf_turns(m, c, 0))) {
        put_word(w, "position", "none");
        return;
    }
    put_real(w, "rope_base", m->theta);
    if (w->row->local_base && (m->local_theta != m->theta || m->rope_type != ROPE_PLAIN))
        put_real(w, "rope_base_local", m->local_theta);
    put_blocks(w, c, "rope_layers", hf_turns, 1, NULL);
    if (m->partial != 1) put_int(w, "rope_dim", (int64_t)((double)m->head_dim * m->partial));
    if (m->rope_type == ROPE_PLAIN) return;
    put_word(w, "rope_scaling", names[m->rope_type]);
    put_real(w, "rope_factor", m->factor);
    if (m->rope_type == ROPE_LINEAR) return;
    put_int(w, "rope_original", m->original);
    if (m->rope_type == ROPE_LLAMA3) {
        put_real(w, "rope_slow", m->slow);
        put_real(w, "rope_fast", m->fast);
    } else {
        put_yarn(w);
    }
}

static void put_attention(Ini *w, HfClass c)
{
    const HfModel *m = w->m;
    if (w->row->latent && w->attends) {
        put_word(w, "attention", "mla");
        if (m->q_rank != HF_NONE) put_int(w, "q_lora_rank", m->q_rank);
        put_int(w, "kv_lora_rank", m->kv_rank);
        put_int(w, "qk_nope_head_dim", m->nope);
        put_int(w, "qk_rope_head_dim", m->rope_dim);
        put_int(w, "v_head_dim", m->v_dim);
        if (m->eps != LATENT_EPS) put_real(w, "latent_norm_eps", LATENT_EPS);
    }
    if (m->attention_cap > 0) put_real(w, "attention_softcap", m->attention_cap);
    if (m->query_scalar && m->query_scalar != m->head_dim)
        put_real(w, "attention_scale", 1 / sqrt((double)m->query_scalar));
    put_blocks(w, c, "window", hf_window, 0, NULL);
}

static void put_delta(Ini *w)
{
    const HfModel *m = w->m;
    put_int(w, "delta_key_heads", m->linear.key_heads);
    put_int(w, "delta_value_heads", m->linear.value_heads);
    put_int(w, "delta_key_dim", m->linear.key_dim);
    put_int(w, "delta_value_dim", m->linear.value_dim);
    if (m->linear.conv != 4) put_int(w, "delta_conv", m->linear.conv);
    if (m->linear.negative) put_flag(w, "delta_negative", true);
}

static void put_mamba(Ini *w)
{
    const HfModel *m = w->m;
    put_int(w, "mamba_heads", m->mamba.heads);
    put_int(w, "mamba_head_dim", m->mamba.head);
    put_int(w, "mamba_groups", m->mamba.groups);
    put_int(w, "mamba_state", m->mamba.state);
    if (m->mamba.conv != 4) put_int(w, "mamba_conv", m->mamba.conv);
    if (!m->mamba.conv_bias) put_flag(w, "mamba_conv_bias", false);
    if (m->mamba.dt_min > 0) put_real(w, "mamba_dt_min", m->mamba.dt_min);
}

static void put_kda(Ini *w)
{
    const HfModel *m = w->m;
    put_int(w, "kda_heads", m->kda.heads);
    put_int(w, "kda_head_dim", m->kda.head);
    if (m->kda.conv != 4) put_int(w, "kda_conv", m->kda.conv);
}

/* Blocks with linear attention, if there are any. */
static void put_mixers(Ini *w, HfClass c)
{
    const MixerWord kind = w->row->hybrid;
    const char *words = kind == MIXER_WORD_DELTA ? "attention delta"
                        : kind == MIXER_WORD_KDA ? "attention kda"
                                                 : "attention mamba2 none";
    put_blocks(w, c, "mixer", hf_mixer, 0, words);
    put_blocks(w, c, "ffn_layers", has_ffn, 1, NULL);
    if (first_with(w->m, c, 1) == w->m->layers) return;
    if (kind == MIXER_WORD_DELTA) put_delta(w);
    else if (kind == MIXER_WORD_KDA) put_kda(w);
    else put_mamba(w);
}

/* A factor that is 1 is not said, and neither is that of scores where it is the usual one. */
static void put_factors(Ini *w)
{
    const HfModel *m = w->m;
    if (w->row->scaled || m->scaled) put_real(w, "embed_scale", sqrt((double)m->hidden));
    if (m->embedding_factor && m->embedding_factor != 1) put_real(w, "embed_scale", m->embedding_factor);
    if (m->branch_factor && m->branch_factor != 1) put_real(w, "residual_scale", m->branch_factor);
    if (m->score_factor && w->attends && !w->row->latent &&
        (float)m->score_factor != (float)(1 / sqrt((double)m->head_dim)))
        put_real(w, "attention_scale", m->score_factor);
    if (m->logits_divisor && m->logits_divisor != 1) put_real(w, "logits_scale", 1 / m->logits_divisor);
    if (m->logits_factor && m->logits_factor != 1) put_real(w, "logits_scale", m->logits_factor);
}

static void put_model(Ini *w, HfClass c)
{
    const HfModel *m = w->m;
    line(w, "[model]\narch = %s\n", hf_is_gpt2(c) ? "gpt2" : "llama");
    put_sizes(w);
    put_bias(w);
    if (w->row->model) line(w, "%s", w->row->model);
    if (m->qk_norm) put_flag(w, "qk_norm", true);
    if (m->post_norms) put_word(w, "block_norms", "both");
    if (m->parallel) put_word(w, "block_norms", m->norm_count == 2 ? "parallel_two" : "parallel");
    if (w->row->gelu) put_word(w, "activation", m->gelu ? "gelu" : "gelu_erf");
    put_attention(w, c);
    put_mixers(w, c);
    put_rope(w, c);
    put_factors(w);
    if (m->final_cap > 0) put_real(w, "final_softcap", m->final_cap);
    if (m->limit > 0 && m->limit != 7) put_real(w, "activation_limit", m->limit);
    put_dropout(w);
    if (m->mtp > 0) put_int(w, "mtp_layers", m->mtp);
}

/* ---- [moe] ---- */

bool hf_is_mixture(const HfModel *m, HfClass c, int layer)
{
    if (hf_classes[c].single) return has_ffn(m, c, layer) && !layer_set_has(&m->dense, layer);
    return hf_classes[c].mixture && layer >= m->first_dense && !layer_set_has(&m->dense, layer) &&
           (layer + 1) % m->sparse_step == 0;
}

static int64_t mixture_of(const HfModel *m, HfClass c, int layer) { return hf_is_mixture(m, c, layer); }

/* Softmax over the chosen is softmax over all, divided by the sum of the chosen. */
static void put_router(Ini *w)
{
    const HfModel *m = w->m;
    const HfRouter router = w->row->router;
    if (router == HF_ROUTER_SIGMOID) put_word(w, "router", "sigmoid");
    else if (router == HF_ROUTER_CHOSEN || (m->normalize && m->topk == 1)) put_word(w, "router", "softmax");
    else put_word(w, "router", "softmax_pre");
    if (router == HF_ROUTER_SIGMOID || (router == HF_ROUTER_FLAG && m->topk > 1))
        put_flag(w, "normalize", m->normalize);
    if (m->scale != 1) put_real(w, "scale", m->scale);
    if (m->groups > 1) {
        put_int(w, "groups", m->groups);
        put_int(w, "group_topk", m->group_topk);
        if (m->topk != m->group_topk * w->row->best) put_int(w, "group_best", w->row->best);
    }
}

static void put_moe(Ini *w, HfClass c)
{
    const HfModel *m = w->m;
    if (!w->row->mixture || !m->experts) return;
    line(w, "\n[moe]\n");
    put_int(w, "experts", m->experts);
    put_int(w, "topk", m->topk);
    put_int(w, "ffn", m->expert_ffn);
    if (m->moe_latent > 0) put_int(w, "latent", m->moe_latent);
    if (m->shared_ffn > 0) put_int(w, "shared_ffn", m->shared_ffn);
    else if (m->shared > 0) put_int(w, "shared_ffn", m->shared * m->expert_ffn);
    if (period_of(m, c, mixture_of) > 1 && (!w->row->single || layer_set_count(&m->dense))) {
        line(w, "every = ");
        put_runs(w, c, mixture_of, (int)m->layers, NULL);
        line(w, "\n");
    }
    put_router(w);
    if (w->row->moe) line(w, "%s", w->row->moe);
    if (m->jitter > 0)
        line(w, "; not taken over: router_jitter_noise of %g, which is on what experts get, too\n", m->jitter);
}

/* ---- the text ---- */

/* It has to be a configuration: sizes that fit each other, keys that this build has. Of what is wrong the first. */
static Err check(const char *name, const char *text)
{
    Config c;
    ErrKept kept;
    const Err err = config_read(&c, (ConfigSource){ .path = "", .text = text });
    config_release(&c);
    if (err != ERR_CONFIG) return err;
    err_keep(&kept);
    const char *first = strchr(kept.message, '\n'), *mistake = strchr(first ? first : kept.message, ' ');
    return err_set(err, "%s: megatrain has no such model:%.*s", name, mistake ? (int)strcspn(mistake, "\n") : 0,
                   mistake);
}

Err hf_ini(const char *name, const HfModel *m, HfClass c, SetupArena *arena, const char **out)
{
    Ini w = { .m = m, .row = &hf_classes[c] };
    char *text;
    w.attends = first_with(m, c, 0) < m->layers;
    put_model(&w, c);
    put_moe(&w, c);
    if (w.full) return err_set(ERR_CONFIG, "%s: windows or experts change too often from block to block", name);
    TRY(check(name, w.text));
    TRY(setup_strdup(arena, w.text, &text));
    *out = text;
    return ERR_OK;
}
