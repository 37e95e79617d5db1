/*
 * Relations between the keys of attention (docs/attention.md), a part of config_check().
 */
#include <string.h>

#include "base/config_reader.h"
#include "base/layer_set.h"

/* A list over blocks: `form` says what its numbers are. */
static void check_pattern(ConfigReader *r, ConfigId id, const char *list, int64_t most, const char *form)
{
    char text[200];
    LayerPattern pattern;
    const int64_t length = layer_pattern_read(list, most, &pattern), layers = r->config->model.layers;
    snprintf(text, sizeof text, "must be %s, or a list of them with repetitions", form);
    RULE(length >= 0, text, id);
    snprintf(text, sizeof text, "the list is about %lld blocks, the model has %lld", (long long)length,
             (long long)layers);
    RULE(length <= layers, text, id, CFG_model_layers);
}

static void check_rope(ConfigReader *r)
{
    const Config *c = r->config;
    LayerPattern layers;
    const bool rope = c->model.position == MODEL_POSITION_ROPE;
    const bool valid = layer_pattern_read(c->model.rope_layers, 1, &layers) >= 0;
    check_pattern(r, CFG_model_rope_layers, c->model.rope_layers, 1, "0 or 1");
    RULE(!valid || layer_pattern_most(&layers), "no block has rotary positions: give a 1, or position = none",
         CFG_model_rope_layers, CFG_model_position);
    RULE(rope || strcmp(c->model.rope_layers, config_defaults.model.rope_layers) == 0,
         "only position = rope has it", CFG_model_rope_layers, CFG_model_position);
}

void config_check_attention(ConfigReader *r)
{
    const Config *c = r->config;
    check_pattern(r, CFG_model_window, c->model.window, WINDOW_MOST, "a number of positions up to 16777216");
    check_rope(r);
}
