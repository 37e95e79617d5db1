/* The kinds of layers as tables, and which of them a block of a model has. */
#include "base/choices.h"
#include "device/scan_room.h"
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
    return ffns[!model_has_ffn(s, block) ? FFN_NONE : model_is_mixture(s, block) ? FFN_MIXTURE : FFN_DENSE];
}

bool model_sums_own_rows(const ModelSpec *s)
{
    for (int i = 0; i < s->layers; i++)
        if (model_mixer(s, i)->sums_own_rows || model_ffn(s, i)->sums_own_rows) return true;
    return false;
}

int model_score_heads(const ModelSpec *s, int block) { return model_mixer(s, block)->score_heads(s); }

Err kind_check_way(const LayerKind *kind, int block, ContextComm way)
{
    static const char *const words[CONTEXT_COMMS] = { CONTEXT_COMM_LIST(CHOICE_TEXT) };
    if (kind->carry.ways & 1U << way) return ERR_OK;
    err_set(ERR_CONFIG,
            "layers.%d.%s: the ranks of parallel.cp cannot meet in such a layer as parallel.cp_comm=%s says", block,
            kind->name, words[way]);
    for (int other = 0; other < CONTEXT_COMMS; other++)
        if (kind->carry.ways & 1U << other) err_take("parallel.cp_comm=%s", words[other]);
    return err_take("parallel.cp=1");
}

Err model_check_ways(const ModelSpec *s)
{
    for (int i = 0; i < s->layers; i++)
        TRY(kind_check_way(model_mixer(s, i), i, (ContextComm)layer_pattern_at(&s->context, i)));
    return ERR_OK;
}

/* The most slices of whole units among the divisors of `slices`, which other rules take where they take `slices`. */
static int64_t fewer_slices(int64_t slices, int64_t unit, int64_t seq)
{
    for (int64_t n = slices - 1; n > 1; n--)
        if (slices % n == 0 && seq % (n * unit) == 0) return n;
    return 1;
}

Err model_check_slices(const ModelSpec *s, int64_t slices)
{
    for (int i = 0; i < s->layers; i++) {
        const LayerKind *kind = model_mixer(s, i);
        const int64_t unit = kind->carry.slice_unit;
        if (!unit || s->seq % (slices * unit) == 0) continue;
        err_set(ERR_CONFIG,
                "layers.%d.%s: a slice has whole windows of %lld positions: %lld x slices must divide seq, here %lld",
                i, kind->name, (long long)unit, (long long)unit, (long long)s->seq);
        return err_take("parallel.slices=%lld", (long long)fewer_slices(slices, unit, s->seq));
    }
    return ERR_OK;
}

Err model_check_room(const ModelSpec *s, DeviceKind device)
{
    const DeltaSpec *d = &s->delta;
    if (!layer_pattern_has(&s->mixer, MIXER_DELTA)) return ERR_OK;
    const int64_t group = d->value_heads / d->key_heads;
    const int64_t needs = (device == DEVICE_CUDA ? delta_room_cuda : delta_room_cpu)(d->key, d->value, group);
    if (needs <= DEVICE_WORKSPACE_BYTES) return ERR_OK;
    err_set(ERR_CONFIG,
            "a key head of Gated DeltaNet, with model.delta_key_dim = %lld, model.delta_value_dim = %lld and %lld of "
            "model.delta_value_heads for each key head, needs %lld bytes of workspace, there are %lld",
            (long long)d->key, (long long)d->value, (long long)group, (long long)needs,
            (long long)DEVICE_WORKSPACE_BYTES);
    return err_hint("narrower heads, or fewer of model.delta_value_heads for each of model.delta_key_heads");
}
