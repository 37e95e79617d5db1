/* See load.h. */
#include "hf/load.h"

#include <stdio.h>
#include <string.h>

#include "base/int64.h"
#include "base/log.h"
#include "hf/weights.h"

enum { BUF_FLOATS = 1 << 20 };

typedef struct {
    const CkptLoad *l;
    HfWeights model;
    ShardBox *boxes;
    int box_capacity;
    float *buf;
} Loader;

/* A box of a parameter, some rows at a time, or a part of a row. */
static Err load_box(const Loader *x, const Param *p, const ShardBox *b, float *base)
{
    const int64_t columns = b->box.shape[1], wide = min64(columns, BUF_FLOATS);
    const int64_t step = max64(1, BUF_FLOATS / columns);
    for (int64_t r = 0; r < b->box.shape[0]; r += step)
        for (int64_t c = 0; c < columns; c += wide) {
            const int64_t rows = min64(step, b->box.shape[0] - r), n = min64(wide, columns - c);
            const Box in = { { b->box.offset[0] + r, b->box.offset[1] + c }, { rows, n } };
            float *to = base + b->at + r * b->ld + c;
            TRY(hf_weights_read(&x->model, p, in, x->buf, n));
            const bool one = n == b->ld;
            for (int64_t k = 0; k < (one ? 1 : rows); k++)
                TRY(device_write(x->l->stream, to + k * b->ld, x->buf + k * n,
                                 (one ? rows : 1) * n * (int64_t)sizeof(float)));
        }
    return ERR_OK;
}

static Err load_store(Loader *x, const ParamStore *s)
{
    if (s->trained) {
        TRY(device_zero(x->l->stream, s->m.data, tensor_bytes(s->m)));
        TRY(device_zero(x->l->stream, s->v.data, tensor_bytes(s->v)));
    }
    TRY(device_zero(x->l->stream, s->master.data, tensor_bytes(s->master)));
    for (int i = 0; i < s->reg->count; i++) {
        const Param *p = &s->reg->items[i];
        const ParamRange own = param_held(s, i, s->master);
        const int n = shard_range(p, own.first, own.count, x->boxes, x->box_capacity);
        float *base = (float *)s->master.data + param_origin(s, i, s->master);
        for (int k = 0; k < n; k++) TRY(load_box(x, p, &x->boxes[k], base));
    }
    return ERR_OK;
}

static Err load_stores(Loader *x, SetupArena *a)
{
    const ParamSet *params = x->l->params;
    for (int r = 0; r < params->replicas; r++)
        for (int i = 0; i < params->stores[r].reg->count; i++) {
            const int n = shard_boxes(&params->stores[r].reg->items[i], NULL, 0) + 2;
            if (n > x->box_capacity) x->box_capacity = n; /* (a ZeRO shard may begin and end inside of rows) */
        }
    TRY(setup_array(a, x->box_capacity, &x->boxes));
    TRY(setup_array(a, BUF_FLOATS, &x->buf));
    for (int r = 0; r < params->replicas; r++) TRY(load_store(x, &params->stores[r]));
    return ERR_OK;
}

/* Was a key that says what a model computes given to the run? The folder's model has the usual value. */
static bool only_ours(const Config *cfg, int id)
{
    const ConfigOriginKind kind = cfg->origin[id].kind;
    return config_key(id)->fixed && kind != ORIGIN_DEFAULT && kind != ORIGIN_AUTO;
}

/* The folder's model and the run's: other numbers come out where a key differs. */
static Err compare(const HfConfig *hf, const Config *cfg)
{
    Config theirs;
    const ConfigSource source = { .path = "config.json", .text = hf->ini, .world_size = CONFIG_ANY_WORLD };
    Err err = config_read(&theirs, source);
    for (int id = 0; !err && id < CFG_COUNT; id++) {
        char was[CONFIG_VALUE_BYTES], is[CONFIG_VALUE_BYTES];
        const ConfigKey *k = config_key(id);
        const bool said = theirs.origin[id].kind == ORIGIN_FILE || theirs.origin[id].kind == ORIGIN_AUTO;
        if (strcmp(k->section, "model") != 0 && strcmp(k->section, "moe") != 0) continue;
        if ((!said && !only_ours(cfg, id)) || id == CFG_model_seq || !config_differs(&theirs, cfg, id)) continue;
        log_warn("checkpoint.load: %s.%s is %s in this run and %s in the folder's config.json", k->section, k->name,
                 config_value(cfg, id, is), config_value(&theirs, id, was));
    }
    config_release(&theirs);
    return err;
}

static Err load(Loader *x, const Config *cfg, SetupArena *a)
{
    const CkptLoad *l = x->l;
    const bool first = l->world->rank == 0;
    HfConfig hf;
    if (l->upcycle)
        return err_set(ERR_CONFIG, "checkpoint.upcycle wants a checkpoint, '%s' is a folder of Hugging Face's",
                       l->path),
               err_hint("megatrain convert makes one of it");
    TRY(hf_config_read(l->path, a, &hf));
    TRY(hf_check_mup(cfg));
    if (first) TRY(compare(&hf, cfg));
    TRY(hf_weights_open(l->path, &hf, cfg, l->params->whole, a, &x->model));
    if (first) TRY(hf_weights_check_twins(&x->model, l->params->whole));
    return load_stores(x, a);
}

static Err agree(const CkptLoad *l, Err mine)
{
    int64_t worst = (int64_t)mine;
    ErrKept why;
    if (mine) err_keep(&why);
    TRY(comm_max_i64(&l->world->host, l->stream, &worst, 1, NULL));
    if (!worst) return ERR_OK;
    if (mine) return err_again(&why, mine);
    return err_elsewhere(err_set((Err)worst, "another rank could not load '%s'", l->path));
}

Err hf_load(const CkptLoad *l, const Config *cfg)
{
    Loader x = { .l = l };
    SetupArena a;
    setup_init(&a);
    const Err err = load(&x, cfg, &a);
    hf_weights_close(&x.model);
    setup_release(&a);
    TRY(agree(l, err));
    return param_set_publish(l->params, l->stream);
}
