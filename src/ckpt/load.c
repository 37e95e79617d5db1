/*
 * Loading into any layout: every stored piece is intersected with every box that this rank keeps of the same
 * tensor, and what they share is read. Pieces are visited in file order, so a rank reads each chunk that it
 * needs once, and no other.
 */
#include <stdlib.h>
#include <string.h>

#include "base/half.h"
#include "ckpt/manifest.h"

typedef struct {
    const CkptLoad *l;
    SetupArena arena; /* for this load alone */
    Manifest m;
    char *chunk;
    int *ids; /* [m.param_count]: number of each in the whole model */
    ShardBox *boxes;
    int box_capacity;
    /* the file that is being read */
    int file;
    SetupArena header_arena;
    StFile header;
    ChunkReader reader;
} Loader;

static const ParamRegistry *whole(const Loader *x) { return x->l->params->whole; }

/* ---- does it fit the model? ---- */

static void shape_text(char out[64], int ndim, const int64_t *shape)
{
    if (ndim == 1) snprintf(out, 64, "[%lld]", (long long)shape[0]);
    else snprintf(out, 64, "[%lld, %lld]", (long long)shape[0], (long long)shape[1]);
}

/* The stored tensor that a parameter is read from, and its shape; -1: none. */
static int source_of(const Loader *x, const Param *p, int64_t shape[2])
{
    char dense[PARAM_NAME_MAX];
    const int at = manifest_find(&x->m, p->name);
    shape[0] = p->spec.shape[0];
    shape[1] = p->spec.shape[1];
    if (at >= 0 || !x->l->upcycle || !upcycle_source(p->name, dense)) return at;
    upcycle_shape(x->l->upcycle, p, shape);
    return manifest_find(&x->m, dense);
}

static Err check_param(Loader *x, int id)
{
    const Param *p = &whole(x)->items[id];
    const char *path = x->l->path;
    char have[64], want[64];
    int64_t shape[2];
    const int at = source_of(x, p, shape);
    if (at < 0 && x->l->upcycle && upcycle_is_new(p->name)) return ERR_OK;
    if (at < 0) return err_set(ERR_CKPT, "checkpoint '%s' has no tensor '%s', which the model wants", path, p->name);
    const ManifestParam *q = &x->m.params[at];
    if (q->ndim != p->spec.ndim || q->shape[0] != shape[0] || q->shape[1] != shape[1]) {
        shape_text(have, q->ndim, q->shape);
        shape_text(want, p->spec.ndim, shape);
        return err_set(ERR_CKPT, "tensor '%s' has shape '%s' in checkpoint '%s' and '%s' in the model", q->name, have,
                       path, want);
    }
    if (!x->l->weights_only && !q->has[STATE_M])
        return err_set(ERR_CKPT, "checkpoint '%s' has no moments of '%s', only values", path, p->name),
               err_hint("load it with checkpoint.load, as weights only");
    if (!x->l->weights_only && p->moments > 1 && !q->has[STATE_V])
        return err_set(ERR_CKPT, "checkpoint '%s' has no second moment of '%s', which another optimizer updated", path,
                       p->name),
               err_hint("load it with checkpoint.load, as weights only");
    x->ids[at] = id;
    return ERR_OK;
}

static Err check_fit(Loader *x)
{
    ASSERT(x->l->weights_only || (x->l->params->stores->trained && !x->l->upcycle));
    TRY(setup_array(&x->arena, x->m.param_count, &x->ids));
    for (int i = 0; i < x->m.param_count; i++) x->ids[i] = -1;
    for (int i = 0; i < whole(x)->count; i++) TRY(check_param(x, i));
    for (int i = 0; i < x->m.param_count; i++)
        if (x->ids[i] < 0)
            return err_set(ERR_CKPT, "checkpoint '%s' has a tensor '%s', which the model does not have", x->l->path,
                           x->m.params[i].name);
    return ERR_OK;
}

/* ---- reading ---- */

static Tensor flat(const ParamStore *s, int state)
{
    return state == STATE_VALUE ? s->master : state == STATE_M ? s->m : s->v;
}

/* Padding, and moments that are not loaded, are 0. What a dense model has nothing for stays as it began. */
static Err clear(const Loader *x, const ParamStore *s)
{
    for (int state = 0; state < CKPT_STATES; state++) {
        Tensor t = flat(s, state);
        if (t.data && !(x->l->upcycle && state == STATE_VALUE)) TRY(device_zero(x->l->stream, t.data, tensor_bytes(t)));
    }
    return ERR_OK;
}

static Err open_file(Loader *x, int file)
{
    if (x->file == file) return ERR_OK;
    setup_release(&x->header_arena);
    x->file = file;
    return manifest_open(&x->m, file, x->chunk, &x->header_arena, &x->reader, &x->header);
}

/* Numbers on their way from a file to a tensor. */
typedef struct {
    DType from, to;
    float factor;
} Conversion;

/* To the nearest. */
static void convert(const Conversion *c, const void *from, void *to, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        float x = c->from == BF16 ? bf16_to_float(((const uint16_t *)from)[i]) : ((const float *)from)[i];
        x *= c->factor;
        if (c->to == BF16) ((uint16_t *)to)[i] = bf16_from_float(x);
        else ((float *)to)[i] = x;
    }
}

/* `count` numbers at `offset` of the file. */
static Err read_run(Loader *x, int64_t offset, char *to, int64_t count, const Conversion *c)
{
    enum { PIECE = 1024 };
    float stored[PIECE], host[PIECE];
    const int64_t each = dtype_size(c->from), size = dtype_size(c->to);
    if (c->from == c->to && !(c->factor < 1) && !(c->factor > 1))
        return chunk_get_device(&x->reader, x->l->stream, offset, to, count * size);
    for (int64_t done = 0, n; done < count; done += n) {
        n = count - done < PIECE ? count - done : PIECE;
        TRY(chunk_get(&x->reader, offset + done * each, stored, n * each));
        convert(c, stored, host, n);
        TRY(device_write(x->l->stream, to + done * size, host, n * size));
    }
    return ERR_OK;
}

/* The part of a stored piece, at `offset` in its file, that `want` has room for. */
static Err read_box(Loader *x, Box piece, int64_t offset, char *base, const ShardBox *want, const Conversion *c)
{
    int64_t rows = want->box.shape[0], columns = want->box.shape[1];
    int64_t row = want->box.offset[0] - piece.offset[0], column = want->box.offset[1] - piece.offset[1];
    if (columns == piece.shape[1] && columns == want->ld) { /* rows touch on both sides: one run */
        columns *= rows;
        rows = 1;
    }
    for (int64_t r = 0; r < rows; r++)
        TRY(read_run(x, offset + ((row + r) * piece.shape[1] + column) * dtype_size(c->from),
                     base + (want->at + r * want->ld) * dtype_size(c->to), columns, c));
    return ERR_OK;
}

/* Loads the part of a stored piece that goes into a window of a parameter of a store. */
static Err load_window(Loader *x, const ManifestPiece *q, const ParamStore *s, int id, UpcycleWindow w)
{
    const StTensor *t = NULL;
    const Tensor to = flat(s, q->state);
    const ParamRange own = param_held(s, id, to); /* (nothing of a moment that its optimizer does not keep) */
    const Conversion c = { q->dtype, to.dtype, w.factor };
    char *base = (char *)to.data + param_origin(s, id, to) * dtype_size(to.dtype);
    int n = shard_range(&s->reg->items[id], own.first, own.count, x->boxes, x->box_capacity);
    for (int i = 0; i < n; i++) {
        ShardBox want;
        if (!shard_clip(x->boxes[i], w.to, &want)) continue;
        for (int d = 0; d < 2; d++) want.box.offset[d] += w.from[d];
        if (!shard_clip(want, q->box, &want)) continue;
        TRY(open_file(x, q->file));
        if (!t) TRY(manifest_tensor(&x->m, q, &x->header, &t));
        Err err = read_box(x, q->box, t->offset, base, &want, &c);
        TRY(manifest_blame(&x->m, &x->reader, err));
    }
    return ERR_OK;
}

/* Loads the part of a stored piece that a store keeps. */
static Err load_piece(Loader *x, const ManifestPiece *q, const ParamStore *s)
{
    const Upcycle *u = x->l->upcycle;
    const char *name = x->m.params[q->param].name;
    const int id = param_find(s->reg, name);
    char dense[PARAM_NAME_MAX];
    if (id >= 0) return load_window(x, q, s, id, (UpcycleWindow){ shard_global(&s->reg->items[id]), { 0, 0 }, 1 });
    for (int i = 0; u && i < s->reg->count; i++) {
        const Param *p = &s->reg->items[i];
        if (!upcycle_source(p->name, dense) || strcmp(dense, name)) continue;
        for (int k = 0; k < upcycle_windows(u, p); k++) TRY(load_window(x, q, s, i, upcycle_window(u, p, k)));
    }
    return ERR_OK; /* else another pipeline rank's */
}

static int most_boxes(const ParamRegistry *reg)
{
    int most = 1;
    for (int i = 0; i < reg->count; i++) {
        int n = shard_boxes(&reg->items[i], NULL, 0);
        if (n > most) most = n;
    }
    return most + 2; /* a ZeRO shard may begin and end inside rows */
}

static Err load_tensors(Loader *x)
{
    const ParamSet *params = x->l->params;
    for (int r = 0; r < params->replicas; r++) {
        int n = most_boxes(params->stores[r].reg);
        if (n > x->box_capacity) x->box_capacity = n;
    }
    TRY(setup_array(&x->arena, x->box_capacity, &x->boxes));
    TRY(setup_array(&x->arena, CHUNK_BYTES, &x->chunk));
    for (int64_t i = 0; i < x->m.piece_count; i++) {
        const ManifestPiece *q = &x->m.pieces[i];
        if (q->state != STATE_VALUE && x->l->weights_only) continue;
        for (int r = 0; r < params->replicas; r++) TRY(load_piece(x, q, &params->stores[r]));
    }
    return ERR_OK;
}

static Err load_shifts(Loader *x)
{
    int32_t *shifts;
    Tensor to = x->l->params->stats->shift;
    TRY(setup_array(&x->arena, whole(x)->count, &shifts));
    for (int i = 0; i < x->m.param_count; i++) shifts[x->ids[i]] = x->m.params[i].shift;
    return device_write(x->l->stream, to.data, shifts, tensor_bytes(to));
}

/* ---- the meta data ---- */

static Err copy_text(SetupArena *a, const char **text) { return setup_strdup(a, *text, (char **)(uintptr_t)text); }

/* *out = *from with its texts in `a`. */
static Err copy_meta(SetupArena *a, const CkptMeta *from, CkptMeta *out)
{
    *out = *from;
    TRY(copy_text(a, &out->reproducible));
    TRY(copy_text(a, &out->program));
    TRY(copy_text(a, &out->machine));
    TRY(copy_text(a, &out->job));
    TRY(copy_text(a, &out->config));
    TRY(copy_text(a, &out->data));
    TRY(copy_text(a, &out->overrides));
    for (int i = 0; i < out->counter_count; i++) TRY(copy_text(a, &out->counters[i].name));
    for (int i = 0; i < out->valid_count; i++) TRY(copy_text(a, &out->valid[i].set));
    return ERR_OK;
}

Err ckpt_meta(const char *path, SetupArena *setup, CkptMeta *meta)
{
    SetupArena a;
    Manifest m;
    setup_init(&a);
    Err err = manifest_read(path, &a, &m);
    if (!err) err = copy_meta(setup, &m.meta, meta);
    setup_release(&a);
    return err;
}

/* ---- the whole ---- */

static Err load(Loader *x, SetupArena *setup, CkptMeta *meta, bool *damaged)
{
    *damaged = true;
    Err err = manifest_read(x->l->path, &x->arena, &x->m);
    if (err) {
        *damaged = err == ERR_CKPT && x->m.format <= CKPT_FORMAT;
        return err;
    }
    *damaged = false;
    TRY(check_fit(x));
    TRY(copy_meta(setup, &x->m.meta, meta));
    for (int r = 0; r < x->l->params->replicas; r++) TRY(clear(x, &x->l->params->stores[r]));
    err = load_tensors(x);
    *damaged = err == ERR_CKPT;
    if (err) return err;
    TRY(param_set_publish(x->l->params, x->l->stream));
    return x->l->weights_only ? ERR_OK : load_shifts(x);
}

/* Ranks end alike: with the worst of their outcomes, of which damage is the least (an older one may load). */
static Err agree(const CkptLoad *l, Err mine, bool *damaged)
{
    enum { GOOD, DAMAGED, FAILED };
    int64_t outcome[2] = { !mine ? GOOD : *damaged ? DAMAGED : FAILED, (int64_t)mine };
    char why[1024], hint[256];
    snprintf(why, sizeof why, "%s", mine ? err_message() : "");
    snprintf(hint, sizeof hint, "%s", mine ? err_hint_text() : "");
    TRY(comm_max_i64(&l->world->host, l->stream, outcome, 2, NULL));
    *damaged = outcome[0] == DAMAGED;
    if (outcome[0] == GOOD) return ERR_OK;
    if (!mine) return err_elsewhere(err_set((Err)outcome[1], "another rank could not load checkpoint '%s'", l->path));
    err_set(mine, "%s", why);
    return *hint ? err_hint("%s", hint) : mine;
}

Err ckpt_load(const CkptLoad *l, SetupArena *setup, CkptMeta *meta, bool *damaged)
{
    Loader x = { .l = l, .file = -1 };
    setup_init(&x.arena);
    setup_init(&x.header_arena);
    Err err = load(&x, setup, meta, damaged);
    setup_release(&x.header_arena);
    setup_release(&x.arena);
    return agree(l, err, damaged);
}
