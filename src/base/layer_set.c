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

/* "*n" at *at, or nothing: once. -1 if it is neither. */
static int64_t read_times(const char **at)
{
    if (**at != '*') return 1;
    (*at)++;
    return read_number(at);
}

/* "x" or "x*n" at *at; false if it is neither. */
static bool read_item(const char **at, int64_t *value, int64_t *times)
{
    *value = read_number(at);
    *times = read_times(at);
    return *value >= 0 && *times >= 1;
}

/* "0*3,1*58" */
static int64_t read_list(const char *at, LayerSet *set)
{
    int64_t count = 0, member, times;
    for (;; at++) {
        if (!read_item(&at, &member, &times) || member > 1) return -1;
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

/* False where there is no room for another. */
static bool add_run(LayerPattern *p, int64_t value, int64_t times)
{
    if (p->runs == PATTERN_RUNS) return false;
    p->value[p->runs] = (int32_t)value;
    p->times[p->runs++] = (int32_t)times;
    return true;
}

int64_t layer_pattern_read(const char *text, int64_t most, LayerPattern *out)
{
    const char *at = text;
    int64_t count = 0, value, times;
    *out = (LayerPattern){ 0 };
    for (;; at++) {
        if (!read_item(&at, &value, &times) || value > most) return -1;
        if (!add_run(out, value, times)) return PATTERN_LONG;
        count += times;
        if (!*at) return count;
        if (*at != ',') return -1;
    }
}

/* The number of the word at *at, behind which *at is left; -1 if there is none. */
static int64_t read_word(const char **at, const char *const *words, int count)
{
    const size_t n = strcspn(*at, ",*");
    for (int i = 0; i < count; i++)
        if (strlen(words[i]) == n && strncmp(words[i], *at, n) == 0) return *at += n, i;
    return -1;
}

int64_t layer_pattern_read_words(const char *text, const char *const *words, int count, LayerPattern *out)
{
    const char *at = text;
    int64_t length = 0, value, times;
    *out = (LayerPattern){ 0 };
    for (;; at++) {
        value = read_word(&at, words, count);
        times = value < 0 ? -1 : read_times(&at);
        if (times < 1) return -1;
        if (!add_run(out, value, times)) return PATTERN_LONG;
        length += times;
        if (!*at) return length;
        if (*at != ',') return -1;
    }
}

bool layer_pattern_has(const LayerPattern *p, int64_t value)
{
    for (int i = 0; i < p->runs; i++)
        if (p->value[i] == value) return true;
    return false;
}

int64_t layer_pattern_at(const LayerPattern *p, int layer)
{
    int64_t length = 0, at;
    for (int i = 0; i < p->runs; i++) length += p->times[i];
    if (!length) return 0;
    at = layer % length;
    for (int i = 0;; i++) {
        at -= p->times[i];
        if (at < 0) return p->value[i];
    }
}

int64_t layer_pattern_on(const LayerPattern *p, int layer)
{
    for (int i = 0; i < p->runs - 1; i++) {
        layer -= p->times[i];
        if (layer < 0) return p->value[i];
    }
    return p->runs ? p->value[p->runs - 1] : 0;
}

int64_t layer_pattern_most(const LayerPattern *p)
{
    int64_t most = 0;
    for (int i = 0; i < p->runs; i++) most = p->value[i] > most ? p->value[i] : most;
    return most;
}
