/*
 * A set of layers, and the text of a configuration that gives one:
 *
 *   "2"           every second layer: 0, 2, 4, ...
 *   "0*3,1*58"    layer by layer, 1 = in the set; x*n stands for n times x, and what is not repeated for itself
 */
#ifndef MEGATRAIN_BASE_LAYER_SET_H
#define MEGATRAIN_BASE_LAYER_SET_H

#include <stdbool.h>
#include <stdint.h>

enum { LAYERS_MAX = 1024 };

typedef struct {
    uint64_t word[LAYERS_MAX / 64];
} LayerSet;

static inline bool layer_set_has(const LayerSet *s, int layer)
{
    return s->word[layer / 64] >> layer % 64 & 1;
}

/*
 * The set of a text for a model of so many layers, at most LAYERS_MAX. Returns how many layers a list is about,
 * `layers` for an integer, -1 for a text of neither form; *out is only set for `layers`.
 */
int64_t layer_set_read(const char *text, int layers, LayerSet *out);

int layer_set_count(const LayerSet *s);

#endif
