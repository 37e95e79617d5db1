/*
 * Facts that differ from layer to layer, and the texts of a configuration that say so. In a list x*n stands for n times
 * x.
 *
 * A set of layers:
 *   "2"           every second layer: 0, 2, 4, ...
 *   "0*3,1*58"    layer by layer, 1 = in the set
 *
 * A pattern of numbers:
 *   "1024"        the same for all layers
 *   "1024*3,0"    layer by layer, and when it is at its end from the beginning again (layer_pattern_at), or its last
 *                 item goes on (layer_pattern_on)
 *
 * Or of words, which stand for their numbers in a list of them: "ring*3,a2a".
 */
#ifndef MEGATRAIN_BASE_LAYER_SET_H
#define MEGATRAIN_BASE_LAYER_SET_H

#include <stdbool.h>
#include <stdint.h>

enum { LAYERS_MAX = 1024, WINDOW_MOST = 16777216 /* positions */ };

typedef struct {
    uint64_t word[LAYERS_MAX / 64];
} LayerSet;

static inline bool layer_set_has(const LayerSet *s, int layer) { return s->word[layer / 64] >> layer % 64 & 1; }

/*
 * The set of a text for a model of so many layers, at most LAYERS_MAX. Returns how many layers a list is about,
 * `layers` for an integer, -1 for a text of neither form; *out is only set for `layers`.
 */
int64_t layer_set_read(const char *text, int layers, LayerSet *out);

int layer_set_count(const LayerSet *s);

enum { PATTERN_RUNS = 128, PATTERN_LONG = -2 };

/* {0}: 0 for all layers. */
typedef struct {
    int runs;
    int32_t value[PATTERN_RUNS], times[PATTERN_RUNS]; /* number of each run of equal ones, and its length */
} LayerPattern;

/*
 * The pattern of a text whose numbers are at most `most`. Returns how many layers it is about until it begins again, 1
 * for a single number; -1 for a text of neither form or a larger number, PATTERN_LONG for a list of more than
 * PATTERN_RUNS items, and *out is undefined then.
 */
int64_t layer_pattern_read(const char *text, int64_t most, LayerPattern *out);

/* Likewise of a text whose items are some of the `count` words; word i stands for i. */
int64_t layer_pattern_read_words(const char *text, const char *const *words, int count, LayerPattern *out);

/* Is the number in it? */
bool layer_pattern_has(const LayerPattern *p, int64_t value);

/* The pattern of one number for all. */
static inline LayerPattern layer_pattern_all(int32_t value)
{
    return (LayerPattern){ .runs = 1, .value = { value }, .times = { 1 } };
}

int64_t layer_pattern_at(const LayerPattern *p, int layer);
/* The same where the last item goes on for all layers behind it. */
int64_t layer_pattern_on(const LayerPattern *p, int layer);
/* The largest number in it. */
int64_t layer_pattern_most(const LayerPattern *p);

#endif
