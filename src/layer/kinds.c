/* The kinds of layers as tables, and which of them a block of a model has. */
#include <stdio.h>

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

/* A rank that hands its state on has whole windows of each slice. */
static Err check_in_order(const ModelSpec *s, int block, int64_t slices, int64_t cp)
{
    const LayerKind *kind = model_mixer(s, block);
    const int64_t unit = kind->carry.slice_unit;
    if (cp == 1 || layer_pattern_at(&s->context, block) != CONTEXT_STATE || s->seq % (slices * cp * unit) == 0)
        return ERR_OK;
    err_set(ERR_CONFIG,
            "layers.%d.%s: a rank that hands its state on has whole windows of %lld positions: %lld x cp x slices "
            "must divide seq, here %lld",
            block, kind->name, (long long)unit, (long long)unit, (long long)s->seq);
    return err_take("parallel.cp=%lld", (long long)fewer_slices(cp, unit * slices, s->seq));
}

Err model_check_slices(const ModelSpec *s, int64_t slices, int64_t cp)
{
    for (int i = 0; i < s->layers; i++) {
        const LayerKind *kind = model_mixer(s, i);
        const int64_t unit = kind->carry.slice_unit;
        if (!unit) continue;
        TRY(check_in_order(s, i, slices, cp));
        if (slices == 1 || s->seq % (slices * unit) == 0) continue;
        err_set(ERR_CONFIG,
                "layers.%d.%s: a slice has whole windows of %lld positions: %lld x slices must divide seq, here %lld",
                i, kind->name, (long long)unit, (long long)unit, (long long)s->seq);
        return err_take("parallel.slices=%lld", (long long)fewer_slices(slices, unit, s->seq));
    }
    return ERR_OK;
}

static Err refuse_room(int64_t needs, const char *heads, const char *narrower)
{
    if (needs <= DEVICE_WORKSPACE_BYTES) return ERR_OK;
    err_set(ERR_CONFIG, "%s needs %lld bytes of workspace, there are %lld", heads, (long long)needs,
            (long long)DEVICE_WORKSPACE_BYTES);
    return err_hint("%s", narrower);
}

static Err check_delta_room(const DeltaSpec *d, DeviceKind device)
{
    const int64_t group = d->value_heads / d->key_heads;
    char heads[240];
    snprintf(heads, sizeof heads,
             "a key head of Gated DeltaNet, with model.delta_key_dim = %lld, model.delta_value_dim = %lld and %lld of "
             "model.delta_value_heads for each key head,",
             (long long)d->key, (long long)d->value, (long long)group);
    return refuse_room((device == DEVICE_CUDA ? delta_room_cuda : delta_room_cpu)(d->key, d->value, group), heads,
                       "narrower heads, or fewer of model.delta_value_heads for each of model.delta_key_heads");
}

static Err check_kda_room(const KdaSpec *d, DeviceKind device)
{
    char heads[120];
    snprintf(heads, sizeof heads, "a head of Kimi Delta Attention, with model.kda_head_dim = %lld,",
             (long long)d->head);
    return refuse_room((device == DEVICE_CUDA ? kda_room_cuda : kda_room_cpu)(d->head, d->head), heads,
                       "narrower heads");
}

static Err check_mamba_room(const MambaSpec *d, DeviceKind device)
{
    char heads[160];
    snprintf(heads, sizeof heads, "a head of Mamba-2, with model.mamba_head_dim = %lld and model.mamba_state = %lld,",
             (long long)d->head, (long long)d->state);
    return refuse_room((device == DEVICE_CUDA ? mamba_room_cuda : mamba_room_cpu)(d->state, d->head), heads,
                       "narrower heads, or a smaller model.mamba_state");
}

Err model_check_room(const ModelSpec *s, DeviceKind device)
{
    if (layer_pattern_has(&s->mixer, MIXER_DELTA)) TRY(check_delta_room(&s->delta, device));
    if (layer_pattern_has(&s->mixer, MIXER_KDA)) TRY(check_kda_room(&s->kda, device));
    return layer_pattern_has(&s->mixer, MIXER_MAMBA2) ? check_mamba_room(&s->mamba, device) : ERR_OK;
}
