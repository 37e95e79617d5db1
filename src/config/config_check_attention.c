/*
 * Relations between the keys of attention (docs/attention.md), a part of config_check().
 */
#include "config/config_reader.h"
#include "base/layer_set.h"

/* A list over blocks: `form` says what its numbers are. */
static void check_pattern(ConfigReader *r, ConfigId id, const char *list, int64_t most, const char *form)
{
    char text[200];
    LayerPattern pattern;
    const int64_t length = layer_pattern_read(list, most, &pattern), layers = r->config->model.layers;
    snprintf(text, sizeof text, "must be %s, or a list of them with repetitions", form);
    RULE(length >= 0, config_list_text(length, text), id);
    snprintf(text, sizeof text, "the list is about %lld blocks, the model has %lld", (long long)length,
             (long long)layers);
    RULE(length <= layers, text, id, CFG_model_layers);
}

/* Is the number above 0 in some block that has attention? */
static bool is_of_attention(const Config *c, const LayerPattern *p)
{
    for (int i = 0; i < (int)c->model.layers; i++)
        if (layer_pattern_at(&c->derived.mixer, i) == MIXER_WORD_ATTENTION && layer_pattern_at(p, i) > 0) return true;
    return false;
}

static void check_window(ConfigReader *r)
{
    const Config *c = r->config;
    LayerPattern blocks;
    const bool valid = layer_pattern_read(c->model.window, WINDOW_MOST, &blocks) >= 0;
    const bool given = valid && config_has_attention(c) && layer_pattern_most(&blocks) > 0;
    check_pattern(r, CFG_model_window, c->model.window, WINDOW_MOST, "a number of positions up to 16777216");
    RULE(!given || is_of_attention(c, &blocks), "no block with attention has a window", CFG_model_window,
         CFG_model_mixer);
    config_take(r, "model.window=0");
}

static void check_rope(ConfigReader *r)
{
    const Config *c = r->config;
    LayerPattern layers;
    const bool valid = layer_pattern_read(c->model.rope_layers, 1, &layers) >= 0;
    const bool turns = config_has_attention(c) && c->model.position == MODEL_POSITION_ROPE;
    const bool given = valid && turns && layer_pattern_most(&layers) > 0;
    check_pattern(r, CFG_model_rope_layers, c->model.rope_layers, 1, "0 or 1");
    RULE(!valid || layer_pattern_most(&layers), "no block has rotary positions: give a 1", CFG_model_rope_layers,
         CFG_model_position);
    config_take(r, "model.position=none model.rope_layers=1");
    RULE(!given || is_of_attention(c, &layers), "no block with attention has rotary positions: give one of them a 1",
         CFG_model_rope_layers, CFG_model_mixer, CFG_model_position);
    config_take(r, "model.position=none model.rope_layers=1, or model.rope_layers=1");
}

/* (rules about what blocks have would be about another list) */
void config_check_mixer(ConfigReader *r)
{
    LayerPattern blocks;
    const int64_t length = config_mixer(r->config, &blocks);
    const bool valid = length >= 0;
    RULE(valid,
         config_list_text(length, "must be attention, delta, kda, mamba2 or none, or a list of them with repetitions"),
         CFG_model_mixer);
    r->bad[CFG_model_mixer] |= !valid;
}

/* Heads with states are cut by such units, of which the key says how many there are. */
static void check_units(ConfigReader *r, ConfigId key, int64_t units, MixerWord mixer)
{
    const Config *c = r->config;
    const int64_t tp = c->parallel.tp;
    char text[160];
    snprintf(text, sizeof text, "tp must divide %s", config_key(key)->name);
    RULE(units % tp == 0, text, CFG_parallel_tp, key, CFG_model_mixer);
    config_take_near(r, CFG_parallel_tp);
    snprintf(text, sizeof text, "ranks of cp exchange positions for heads: tp x cp must divide %s",
             config_key(key)->name);
    RULE(!config_meets(c, mixer, CONTEXT_A2A) || units % (tp * c->parallel.cp) == 0 || units % tp, text,
         CFG_parallel_cp, CFG_parallel_tp, key, CFG_model_mixer, CFG_parallel_cp_comm);
    config_take_ways(r, "state", "allgather");
    config_take(r, "parallel.cp=1");
}

static void check_mixer(ConfigReader *r)
{
    const Config *c = r->config;
    LayerPattern blocks;
    const int64_t length = config_mixer(c, &blocks), layers = c->model.layers;
    char text[160];
    snprintf(text, sizeof text, "the list is about %lld blocks, the model has %lld", (long long)length,
             (long long)layers);
    RULE(length <= layers, text, CFG_model_mixer, CFG_model_layers);
    RULE(!config_is_latent(c) || config_has_attention(c), "no block has attention of any kind", CFG_model_mixer,
         CFG_model_attention);
    config_take(r, "model.attention=mha");
    if (config_has_delta(c)) check_units(r, CFG_model_delta_key_heads, c->model.delta_key_heads, MIXER_WORD_DELTA);
    if (config_has_mamba(c)) check_units(r, CFG_model_mamba_groups, c->model.mamba_groups, MIXER_WORD_MAMBA2);
    if (config_has_kda(c)) check_units(r, CFG_model_kda_heads, c->model.kda_heads, MIXER_WORD_KDA);
}

/* The first block that has neither a mixer nor a feed-forward layer; -1: each has one of them. */
static int empty_block(const Config *c)
{
    for (int i = 0; i < (int)c->model.layers; i++)
        if (layer_pattern_at(&c->derived.mixer, i) == MIXER_WORD_NONE && !layer_pattern_at(&c->derived.ffn_layers, i))
            return i;
    return -1;
}

/* Blocks of one layer. */
static void check_singles(ConfigReader *r)
{
    const Config *c = r->config;
    const int empty = empty_block(c);
    const bool singles =
        layer_pattern_has(&c->derived.mixer, MIXER_WORD_NONE) || layer_pattern_has(&c->derived.ffn_layers, 0);
    const bool beside =
        c->model.block_norms == BLOCK_NORMS_PARALLEL || c->model.block_norms == BLOCK_NORMS_PARALLEL_TWO;
    LayerPattern blocks;
    char text[120];
    const bool valid = layer_pattern_read(c->model.ffn_layers, 1, &blocks) >= 0;
    check_pattern(r, CFG_model_ffn_layers, c->model.ffn_layers, 1, "0 or 1");
    RULE(c->derived.mixer.runs != 1 || !layer_pattern_has(&c->derived.mixer, MIXER_WORD_NONE),
         "no token would see those before it: give some block a mixer", CFG_model_mixer);
    config_take(r, "model.mixer=attention");
    snprintf(text, sizeof text, "block %d would have neither a mixer nor a feed-forward layer", empty);
    RULE(!valid || empty < 0, text, CFG_model_ffn_layers, CFG_model_mixer);
    config_take(r, "model.ffn_layers=1");
    RULE(!singles || !beside, "layers stand in parallel in blocks that have two: this model has blocks of one layer",
         CFG_model_block_norms, CFG_model_mixer, CFG_model_ffn_layers);
    config_take(r, "model.block_norms=pre");
}

/* Factors that cut the rows of a sample, beside tp. */
static const char *context_factors(const Config *c)
{
    const bool cp = c->parallel.cp > 1, slices = c->parallel.slices > 1;
    return cp && slices ? " x cp x slices" : cp ? " x cp" : slices ? " x slices" : "";
}

/* With sp, ranks have their own rows of what no rank of tp has a part of: latents, gates of mixers with states; and of
 * the gradients of their weights. */
static void check_own_rows(ConfigReader *r)
{
    const Config *c = r->config;
    const int64_t cuts = c->parallel.cp * c->parallel.slices, blocks = c->train.micro_batch * c->parallel.seq_blocks;
    const bool layout = c->run.reproducible == RUN_REPRODUCIBLE_LAYOUT && !c->moe.experts;
    char text[200];
    snprintf(text, sizeof text,
             "with sp a rank of %s must have whole leaves of gradients: tp%s must divide micro_batch x seq_blocks, "
             "here %lld x %lld",
             config_has_delta(c)   ? "Gated DeltaNet"
             : config_has_mamba(c) ? "Mamba-2"
                                   : "latent attention",
             context_factors(c), (long long)c->train.micro_batch, (long long)c->parallel.seq_blocks);
    RULE(!layout || !c->parallel.sp || blocks % (c->parallel.tp * cuts) == 0, text, CFG_parallel_tp,
         CFG_train_micro_batch, CFG_parallel_seq_blocks, config_has_states(c) ? CFG_model_mixer : CFG_model_attention);
    config_take(r, "parallel.sp=false, or run.reproducible=run");
}

void config_check_attention(ConfigReader *r)
{
    const Config *c = r->config;
    check_window(r);
    check_rope(r);
    check_mixer(r);
    check_singles(r);
    if (config_is_latent(c) || config_has_states(c)) check_own_rows(r);
}
