/* The kinds of layers as tables, and which of them a block of a model has. */
#include "layer/layer.h"

#define MIXER(number, kind) extern const LayerKind kind;
#define FFN(number, kind) extern const LayerKind kind;
#include "layer/kinds.def"

static const LayerKind *const mixers[] = {
#define MIXER(number, kind) [number] = &kind,
#include "layer/kinds.def"
};

static const LayerKind *const ffns[] = {
#define FFN(number, kind) [number] = &kind,
#include "layer/kinds.def"
};

const LayerKind *model_mixer(const ModelSpec *s, int block)
{
    return mixers[layer_pattern_at(&s->mixer, model_like(s, block))];
}

const LayerKind *model_ffn(const ModelSpec *s, int block)
{
    return ffns[model_is_mixture(s, block) ? FFN_MIXTURE : FFN_DENSE];
}

bool model_sums_own_rows(const ModelSpec *s)
{
    for (int i = 0; i < s->layers; i++)
        if (model_mixer(s, i)->sums_own_rows || model_ffn(s, i)->sums_own_rows) return true;
    return false;
}
