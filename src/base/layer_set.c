/* See layer_set.h. */
#include "base/layer_set.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* A number below 10^9 at *at, behind which *at is left; -1 if there is none. */
static int64_t read_number(const char **at)
{
    int64_t n = 0;
    if (!isdigit((unsigned char)**at)) return -1;
    for (; isdigit((unsigned char)**at); (*at)++) {
        n = 10 * n + (**at - '0');
        if (n >= 1000000000) return -1;
    }
    return n;
}

static void add(LayerSet *s, int64_t layer)
{
    if (layer < LAYERS_MAX) s->word[layer / 64] |= UINT64_C(1) << layer % 64;
}

/* "0*3,1*58" */
static int64_t read_list(const char *at, LayerSet *set)
{
    int64_t count = 0;
    for (;; at++) {
        const int64_t member = read_number(&at);
        int64_t times = 1;
        if (*at == '*') {
            at++;
            times = read_number(&at);
        }
        if (member < 0 || member > 1 || times < 1) return -1;
        for (int64_t i = 0; i < times && member && count + i < LAYERS_MAX; i++) add(set, count + i);
        count += times;
        if (!*at) return count;
        if (*at != ',') return -1;
    }
}

int64_t layer_set_read(const char *text, int layers, LayerSet *out)
{
    LayerSet set = { { 0 } };
    const char *at = text;
    int64_t count = layers;
    if (strpbrk(text, ",*")) {
        count = read_list(text, &set);
    } else {
        const int64_t every = read_number(&at);
        if (every < 1 || *at) return -1;
        for (int64_t i = 0; i < layers; i += every) add(&set, i);
    }
    if (count == layers) *out = set;
    return count;
}

int layer_set_count(const LayerSet *s)
{
    int n = 0;
    for (int i = 0; i < LAYERS_MAX / 64; i++) n += __builtin_popcountll(s->word[i]);
    return n;
}
