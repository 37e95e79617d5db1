/*
 * A configuration as config.json, of the class that can say it. Whether one can is not reasoned about: its text is
 * written, read again, and compared. See class.h.
 */
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "hf/model.h"

enum { JSON_BYTES = 96 << 10 };

/* ---- text ---- */

static void put_id(JsonOut *j, const char *key, int64_t id)
{
    if (id >= 0) json_put_int(j, key, id);
    else json_put_null(j, key);
}

/* A word of the table is a flag, a number or a text. */
static void put_word(JsonOut *j, const char *key, const char *word)
{
    char *end;
    const double number = strtod(word, &end);
    if (!strcmp(word, "true") || !strcmp(word, "false")) json_put_bool(j, key, *word == 't');
    else if (*word && !*end) json_put_number(j, key, number);
    else json_put_text(j, key, word);
}

static void put_words(JsonOut *j, const HfKey *k, int64_t layers, const LayerSet *set, const char *in_set,
                      const char *other)
{
    json_open(j, k->name, '[');
    for (int i = 0; i < layers; i++) json_put_text(j, NULL, layer_set_has(set, i) ? in_set : other);
    json_close(j, ']');
}

/* Blocks of a hybrid with windows. */
static void put_three(JsonOut *j, const HfModel *m, const HfKey *k)
{
    json_open(j, k->name, '[');
    for (int i = 0; i < m->layers; i++)
        json_put_text(j, NULL,
                      layer_set_has(&m->sliding, i)     ? "sliding_attention"
                      : layer_set_has(&m->attending, i) ? "full_attention"
                                                        : "linear_attention");
    json_close(j, ']');
}

static void put_layer_of_blocks(JsonOut *j, const HfModel *m, const HfKey *k)
{
    json_open(j, k->name, '[');
    for (int i = 0; i < m->layers; i++)
        json_put_text(j, NULL,
                      layer_set_has(&m->sliding, i)     ? "linear_attention"
                      : layer_set_has(&m->attending, i) ? "full_attention"
                      : layer_set_has(&m->dense, i)     ? "mlp"
                                                        : "moe");
    json_close(j, ']');
}

static void put_turns(JsonOut *j, const HfModel *m, const HfKey *k)
{
    json_open(j, k->name, '[');
    for (int i = 0; i < m->turned; i++) json_put_int(j, NULL, layer_set_has(&m->turning, i));
    json_close(j, ']');
}

static void put_bases(JsonOut *j, const HfModel *m, const HfKey *k)
{
    json_open(j, k->name, '[');
    for (int i = 0; i < m->layers; i++) json_put_real(j, NULL, layer_set_has(&m->turning, i) ? m->theta : 0);
    json_close(j, ']');
}

static void put_limits(JsonOut *j, const HfKey *k, double least)
{
    json_open(j, k->name, '[');
    json_put_real(j, NULL, least);
    json_open(j, NULL, '{');
    json_put_text(j, "__float__", "Infinity");
    json_close(j, '}');
    json_close(j, ']');
}

static void put_layers(JsonOut *j, const HfKey *k, const LayerSet *s)
{
    json_open(j, k->name, '[');
    for (int i = 0; i < LAYERS_MAX; i++)
        if (layer_set_has(s, i)) json_put_int(j, NULL, i + k->low);
    json_close(j, ']');
}

static void put_rope(JsonOut *j, HfModel *m, HfClass c, const HfKey *k);
static void put_kda(JsonOut *j, HfModel *m, HfClass c, const HfKey *k);

static void put_key(JsonOut *j, HfModel *m, HfClass c, const HfKey *k)
{
    char word[64];
    const int64_t n = *hf_int(m, k);
    switch (k->kind) {
    case HF_KEY_AUTO:
    case HF_KEY_PATTERN:
    case HF_KEY_INT: put_id(j, k->name, n); break;
    case HF_KEY_REAL:
        if (*hf_real(m, k) == HF_NONE) json_put_null(j, k->name);
        else json_put_real(j, k->name, *hf_real(m, k));
        break;
    case HF_KEY_FLAG: json_put_bool(j, k->name, n > 0); break;
    case HF_KEY_WORD:
        hf_word_at(k->values, (int)n, word, sizeof word);
        json_put_text(j, k->name, word);
        break;
    case HF_KEY_TYPES:
        if (hf_classes[c].hybrid && hf_classes[c].windows) {
            put_three(j, m, k);
            break;
        }
        put_words(j, k, m->typed, &m->sliding, hf_classes[c].hybrid ? "linear_attention" : "sliding_attention",
                  "full_attention");
        break;
    case HF_KEY_LAYERS: put_layers(j, k, (const LayerSet *)(const void *)hf_int(m, k)); break;
    case HF_KEY_MLPS: put_words(j, k, m->mlps, &m->dense, "dense", "sparse"); break;
    case HF_KEY_TURNS: put_turns(j, m, k); break;
    case HF_KEY_BASES: put_bases(j, m, k); break;
    case HF_KEY_BLOCKS: put_layer_of_blocks(j, m, k); break;
    case HF_KEY_LIMITS: put_limits(j, k, *hf_real(m, k)); break;
    case HF_KEY_ROPE: put_rope(j, m, c, k); break;
    case HF_KEY_KDA: put_kda(j, m, c, k); break;
    case HF_KEY_FIXED:
        hf_word_at(k->values, 0, word, sizeof word);
        put_word(j, k->name, word);
        break;
    case HF_KEY_STORE:
    case HF_KEY_IDLE: break;
    }
}

/* Keys that the kind of scaling does not have are left out: releases of transformers complain of them. */
static bool says_nothing(HfModel *m, const HfKey *k)
{
    return k->kind == HF_KEY_REAL ? *hf_real(m, k) == HF_NONE : *hf_int(m, k) == HF_NONE;
}

static void put_rope_keys(JsonOut *j, HfModel *m, HfClass c)
{
    for (int i = 0; i < hf_rope_key_count; i++)
        if (!hf_rope_keys[i].silent && !says_nothing(m, &hf_rope_keys[i])) put_key(j, m, c, &hf_rope_keys[i]);
}

/* An object for each kind of block. */
static void put_nested_rope(JsonOut *j, HfModel *m, HfClass c, const HfKey *k)
{
    json_open(j, k->name, '{');
    json_open(j, "full_attention", '{');
    json_put_real(j, "rope_theta", m->theta);
    put_rope_keys(j, m, c);
    json_close(j, '}');
    json_open(j, "sliding_attention", '{');
    json_put_real(j, "rope_theta", m->local_theta);
    json_put_text(j, "rope_type", "default");
    json_close(j, '}');
    json_close(j, '}');
}

static void put_rope(JsonOut *j, HfModel *m, HfClass c, const HfKey *k)
{
    if (hf_classes[c].nests) {
        put_nested_rope(j, m, c, k);
        return;
    }
    if (m->rope_type == ROPE_PLAIN && hf_classes[c].usual.rope_type == ROPE_PLAIN) {
        json_put_null(j, k->name);
        return;
    }
    json_open(j, k->name, '{');
    put_rope_keys(j, m, c);
    json_close(j, '}');
}

static void put_kda(JsonOut *j, HfModel *m, HfClass c, const HfKey *k)
{
    json_open(j, k->name, '{');
    for (int i = 0; i < hf_kda_key_count; i++) put_key(j, m, c, &hf_kda_keys[i]);
    json_close(j, '}');
}

static void put_config(JsonOut *j, HfModel *m, HfClass c, const HfExport *x)
{
    const HfClassNames *names = &hf_classes[c].names;
    json_open(j, NULL, '{');
    json_open(j, "architectures", '[');
    json_put_text(j, NULL, names->architecture);
    json_close(j, ']');
    json_put_text(j, "model_type", names->model_type);
    json_put_text(j, "torch_dtype", x->dtype);
    put_id(j, "bos_token_id", x->ids.begin);
    hf_ids_put_ends(j, &x->ids);
    put_id(j, "pad_token_id", x->ids.pad);
    for (int i = 0; i < hf_key_count; i++)
        if (hf_keys[i].classes & HF_CLASS_BIT(c) && !hf_keys[i].silent) put_key(j, m, c, &hf_keys[i]);
    json_close(j, '}');
}

/* malloc'ed, with its size; NULL: out of memory. */
static char *config_text(const Config *cfg, HfClass c, const HfExport *x, int64_t *size_bytes)
{
    HfModel m;
    JsonOut j;
    char *text = malloc(JSON_BYTES);
    if (!text) return NULL;
    hf_say(cfg, c, &m);
    if (!m.vocab) m.vocab = x->vocab;
    json_out_init(&j, text, JSON_BYTES);
    put_config(&j, &m, c, x);
    ASSERT(json_out_ok(&j));
    *size_bytes = j.used_bytes;
    return text;
}

/* ---- does it say the same? ---- */

/* (lists count blocks without attention, too, where they say nothing) */
static bool attends(const Config *c, int layer)
{
    return layer_pattern_at(&c->derived.mixer, layer) == MIXER_WORD_ATTENTION;
}

static int64_t window_of(const Config *c, int layer)
{
    LayerPattern p;
    layer_pattern_read(c->model.window, WINDOW_MOST, &p);
    return attends(c, layer) ? layer_pattern_at(&p, layer) : 0;
}

static int64_t turns(const Config *c, int layer)
{
    LayerPattern p;
    layer_pattern_read(c->model.rope_layers, 1, &p);
    return c->model.position == MODEL_POSITION_ROPE && attends(c, layer) && layer_pattern_at(&p, layer);
}

static int64_t mixer_of(const Config *c, int layer) { return layer_pattern_at(&c->derived.mixer, layer); }

static int64_t has_ffn(const Config *c, int layer) { return layer_pattern_at(&c->derived.ffn_layers, layer); }

static int64_t is_mixture(const Config *c, int layer)
{
    LayerSet s = { { 0 } };
    if (c->moe.experts) layer_set_read(c->moe.every, (int)c->model.layers, &s);
    return has_ffn(c, layer) && layer_set_has(&s, layer);
}

static bool same_in_blocks(const Config *a, const Config *b, int64_t (*of)(const Config *c, int layer))
{
    for (int i = 0; i < a->model.layers && a->model.layers == b->model.layers; i++)
        if (of(a, i) != of(b, i)) return false;
    return true;
}

static bool has_dense(const Config *c)
{
    for (int i = 0; i < c->model.layers; i++)
        if (has_ffn(c, i) && !is_mixture(c, i)) return true;
    return false;
}

static int64_t columns_that_turn(const Config *c) { return c->model.rope_dim ? c->model.rope_dim : c->model.head_dim; }

/* The base of the angles of blocks with a window; 0: as all others, scaled. */
static double local_base(const Config *c)
{
    const bool scaled = c->model.rope_scaling != ROPE_PLAIN;
    return c->model.rope_base_local > 0 ? c->model.rope_base_local : scaled ? 0 : c->model.rope_base;
}

static double latent_eps(const Config *c)
{
    return c->model.latent_norm_eps > 0 ? c->model.latent_norm_eps : c->model.norm_eps;
}

static double delta_eps(const Config *c)
{
    return c->model.delta_norm_eps > 0 ? c->model.delta_norm_eps : c->model.norm_eps;
}

/* Softmax over all, divided by the sum of the chosen, is softmax over the chosen. */
static int router_of(const Config *c)
{
    const bool divided = c->moe.router == ROUTER_SOFTMAX_PRE && c->moe.normalize;
    return divided ? ROUTER_SOFTMAX : (int)c->moe.router;
}

static int64_t counted_of_group(const Config *c)
{
    return c->moe.group_best ? c->moe.group_best : c->moe.topk / c->moe.group_topk;
}

/* How a model is trained, not what it computes; and what config.json has from elsewhere. */
static bool is_of_training(ConfigId id)
{
    static const ConfigId ids[] = {
        CFG_model_arch,       CFG_model_vocab,    CFG_model_dropout, CFG_model_attention_dropout,
        CFG_model_mtp_weight, CFG_model_init_std, CFG_moe_balance,   CFG_moe_aux_coeff,
        CFG_moe_unit,         CFG_moe_bias_rate,  CFG_moe_z_coeff,   CFG_moe_jitter,
        CFG_moe_capacity,     CFG_moe_drop,       CFG_moe_pad,       CFG_moe_slack,
        CFG_moe_overflow,     CFG_moe_dispatcher
    };
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
        if (ids[i] == id) return true;
    return false;
}

static bool same_key(const Config *a, const Config *b, ConfigId id)
{
    char x[CONFIG_VALUE_BYTES], y[CONFIG_VALUE_BYTES];
    const bool experts = a->moe.experts && b->moe.experts;
    switch (id) {
    case CFG_model_window: return same_in_blocks(a, b, window_of);
    case CFG_model_mixer: return same_in_blocks(a, b, mixer_of);
    case CFG_model_ffn_layers: return same_in_blocks(a, b, has_ffn);
    case CFG_model_rope_layers: return same_in_blocks(a, b, turns);
    case CFG_moe_every: return same_in_blocks(a, b, is_mixture);
    case CFG_model_rope_dim: return columns_that_turn(a) == columns_that_turn(b);
    case CFG_model_rope_base:
        return a->model.position != MODEL_POSITION_ROPE || a->model.rope_base == b->model.rope_base;
    case CFG_model_rope_base_local: return local_base(a) == local_base(b);
    case CFG_model_logits_scale: return (float)a->model.logits_scale == (float)b->model.logits_scale;
    case CFG_model_residual_scale: return (float)a->model.residual_scale == (float)b->model.residual_scale;
    case CFG_model_latent_norm_eps: return latent_eps(a) == latent_eps(b);
    case CFG_model_delta_norm_eps: return delta_eps(a) == delta_eps(b);
    case CFG_model_ffn: return !has_dense(a) || a->model.ffn == b->model.ffn;
    case CFG_moe_router: return !experts || router_of(a) == router_of(b);
    case CFG_moe_normalize: /* (of softmax the router says it) */
        return !experts || router_of(a) == ROUTER_SOFTMAX || a->moe.normalize == b->moe.normalize;
    case CFG_moe_group_topk: return a->moe.groups == 1 || a->moe.group_topk == b->moe.group_topk;
    case CFG_moe_group_best: return !experts || a->moe.groups == 1 || counted_of_group(a) == counted_of_group(b);
    default: break;
    }
    if (is_of_training(id)) return true;
    if (strcmp(config_key(id)->section, "moe") == 0 && !experts && id != CFG_moe_experts) return true;
    return strcmp(config_value(a, id, x), config_value(b, id, y)) == 0;
}

/* The keys that differ; *first: one of them. */
static int differences(const Config *a, const Config *b, ConfigId *first)
{
    int count = 0;
    for (int i = CFG_COUNT - 1; i >= 0; i--) {
        const char *section = config_key((ConfigId)i)->section;
        if (strcmp(section, "model") != 0 && strcmp(section, "moe") != 0) continue;
        if (same_key(a, b, (ConfigId)i)) continue;
        *first = (ConfigId)i;
        count++;
    }
    return count;
}

/* The configuration that reading the class's config.json gives back; config_release it. */
static Err there_and_back(const Config *cfg, HfClass c, const HfExport *x, Config *back)
{
    SetupArena arena;
    HfConfig hf;
    int64_t size;
    char *text = config_text(cfg, c, x, &size);
    if (!text) return err_set(ERR_MEMORY, "no memory for a config.json");
    setup_init(&arena);
    Err err = hf_config_parse("config.json", text, size, &arena, &hf);
    if (!err) err = config_read(back, (ConfigSource){ .path = "config.json", .text = hf.ini });
    setup_release(&arena);
    free(text);
    return err;
}

typedef struct {
    HfClass class;
    int count;
    ConfigId key;
    char theirs[CONFIG_VALUE_BYTES];
    /* Why the last class with attention of this kind cannot say it at all. */
    HfClass refuser;
    ErrKept refusal;
} Nearest;

static Err compare(const Config *cfg, HfClass c, const HfExport *x, Nearest *n)
{
    Config back = { 0 };
    char buf[CONFIG_VALUE_BYTES];
    ConfigId key = CFG_COUNT;
    const Err err = there_and_back(cfg, c, x, &back);
    const int count = err ? CFG_COUNT : differences(cfg, &back, &key);
    if (err && hf_classes[c].latent && cfg->model.attention == MODEL_ATTENTION_MLA) {
        n->refuser = c;
        err_keep(&n->refusal);
    }
    if (!err && count < n->count) {
        n->class = c;
        n->count = count;
        n->key = key;
        if (count) snprintf(n->theirs, sizeof n->theirs, "%s", config_value(&back, key, buf));
    }
    config_release(&back);
    return err == ERR_MEMORY ? err : ERR_OK;
}

Err hf_check_mup(const Config *cfg)
{
    const int64_t head_dim = cfg->optim.mup_head_dim;
    if (head_dim && head_dim != cfg->model.head_dim)
        return err_set(ERR_CONFIG, "no class of transformers has scores as muP with optim.mup_head_dim = %lld",
                       (long long)head_dim);
    if (!cfg->model.mtp_layers || !cfg->optim.mup_base || cfg->optim.mup_base == cfg->model.hidden) return ERR_OK;
    return err_set(ERR_CONFIG, "no class of transformers has model.mtp_layers = %lld beside optim.mup_base = %lld",
                   (long long)cfg->model.mtp_layers, (long long)cfg->optim.mup_base);
}

/* Has the class blocks with each of these mixers, and blocks of one layer if there are such? */
static bool has_mixers(const Config *cfg, HfClass c)
{
    const HfClassRow *row = &hf_classes[c];
    const bool single =
        layer_pattern_has(&cfg->derived.mixer, MIXER_WORD_NONE) || layer_pattern_has(&cfg->derived.ffn_layers, 0);
    for (int w = 0; w < MIXER_WORDS; w++)
        if (w != MIXER_WORD_ATTENTION && w != MIXER_WORD_NONE && w != (int)row->hybrid &&
            layer_pattern_has(&cfg->derived.mixer, w))
            return false;
    return row->single || !single;
}

/* Classes that cannot: attention of another kind, no experts, or a file that transformers would not open. */
static bool may_say(const Config *cfg, HfClass c)
{
    const HfClassRow *row = &hf_classes[c];
    if (!has_mixers(cfg, c) || (row->divides && cfg->model.hidden % cfg->model.heads)) return false;
    if (config_has_attention(cfg) && row->latent != (cfg->model.attention == MODEL_ATTENTION_MLA)) return false;
    if (c == HF_QWEN3_5_MOE && cfg->moe.router == ROUTER_SOFTMAX_PRE) return false; /* (as Qwen3-Next's are read) */
    return cfg->moe.experts ? row->mixture : row->latent || row->hybrid || !row->mixture;
}

Err hf_class_of(const Config *cfg, HfClass *out)
{
    const HfExport any = { .dtype = "float32", .vocab = 256, .ids = HF_NO_IDS };
    Nearest n = { .count = CFG_COUNT, .refuser = HF_CLASSES };
    char buf[CONFIG_VALUE_BYTES];
    TRY(hf_check_mup(cfg));
    for (int c = 0; c < HF_CLASSES && n.count; c++)
        if (may_say(cfg, (HfClass)c)) TRY(compare(cfg, (HfClass)c, &any, &n));
    *out = n.class;
    if (!n.count) return ERR_OK;
    if (n.refuser < HF_CLASSES)
        return err_set(ERR_CONFIG, "no class of transformers has this model: of %s %s",
                       hf_classes[n.refuser].names.model_type, n.refusal.message);
    if (n.count == CFG_COUNT)
        return err_set(ERR_CONFIG, "no class of transformers has a model with model.mixer = %s beside the other keys",
                       cfg->model.mixer);
    const ConfigKey *key = config_key(n.key);
    err_set(ERR_CONFIG, "no class of transformers has a model with %s.%s = %s beside the other keys", key->section,
            key->name, config_value(cfg, n.key, buf));
    return err_hint("the nearest, %s, would have %s", hf_classes[n.class].names.model_type, n.theirs);
}

/* ---- files ---- */

static Err write_file(const char *folder, const char *name, const char *text, int64_t size_bytes)
{
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path)
        return err_set(ERR_STORAGE, "'%s': the path is too long", folder);
    TRY_AS(ERR_STORAGE, file_replace(path, text, size_bytes));
    return ERR_OK;
}

/* For AutoTokenizer: the class that takes all from tokenizer.json, and what ends a document. */
static Err write_tokenizer(const HfExport *x, const char *folder)
{
    char text[2048];
    JsonOut j;
    if (!x->end) return ERR_OK;
    json_out_init(&j, text, sizeof text);
    json_open(&j, NULL, '{');
    json_put_text(&j, "tokenizer_class", "PreTrainedTokenizerFast");
    json_put_text(&j, "eos_token", x->end);
    json_close(&j, '}');
    ASSERT(json_out_ok(&j));
    return write_file(folder, "tokenizer_config.json", text, j.used_bytes);
}

Err hf_config_write(const Config *cfg, const HfExport *x, const char *folder)
{
    HfClass c;
    int64_t size;
    TRY(hf_class_of(cfg, &c));
    char *text = config_text(cfg, c, x, &size);
    if (!text) return err_set(ERR_MEMORY, "no memory for a config.json");
    const Err err = write_file(folder, "config.json", text, size);
    free(text);
    TRY(err);
    TRY(hf_ids_write(&x->ids, folder));
    return write_tokenizer(x, folder);
}
