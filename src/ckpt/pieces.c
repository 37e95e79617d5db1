/*
 * Shard files and the text of the manifest. Both are streamed: boxes go from the device through the
 * one chunk buffer, text item by item through a small one.
 */
#include "ckpt/pieces.h"

#include <math.h>
#include <string.h>

void piece_first(PieceIter *it, const Ckpt *c, int rank)
{
    const Grid grid = c->o.world->grid;
    const ZeroCut zero = c->o.params->registries->place.zero;
    *it = (PieceIter){ .c = c, .param = -1, .at = grid_coords(grid, rank), .place = param_place(grid, rank, zero) };
}

static const ParamRegistry *registry_of(const PieceIter *it)
{
    return param_set_registry(it->c->o.params, it->at.pp, it->replica);
}

/* The next parameter: replica by replica, state by state. False: there is none. */
static bool next_param(PieceIter *it)
{
    while (++it->param >= registry_of(it)->count) {
        it->param = -1;
        if (++it->replica < it->c->o.params->replicas) continue;
        it->replica = 0;
        if (++it->state == it->c->states) return false;
    }
    return true;
}

/* A tensor that has copies is written by one rank; if its copies have ZeRO shards of it, each writes its own. */
static int rank_boxes(const PieceIter *it)
{
    const Ckpt *c = it->c;
    if (it->shard.copy || !shard_owner(&it->shard, &it->place)) return 0;
    if (it->state == STATE_V && it->shard.moments < 2) return 0;
    const ParamRange x = param_zero_shard_at(registry_of(it), it->param, it->place.zero_shard[it->shard.spec.group]);
    return shard_range(&it->shard, x.first, x.count, c->boxes, c->box_capacity);
}

bool piece_next(PieceIter *it)
{
    const Ckpt *c = it->c;
    while (it->box == it->box_count) {
        if (!next_param(it)) return false;
        it->shard = shard_param(&registry_of(it)->items[it->param], &it->place);
        it->box = 0;
        it->box_count = rank_boxes(it);
    }
    it->boxes = c->boxes + it->box;
    it->count = shard_merge(it->boxes, it->box_count - it->box, &it->piece);
    it->box += it->count;
    return true;
}

void shard_name(char out[CKPT_NAME_MAX], int rank) { snprintf(out, CKPT_NAME_MAX, "shard-%05d.safetensors", rank); }

/* (Of any rank's pieces: one without parameters, whose moments have no memory, counts the others' chunks by it.) */
DType piece_dtype(const PieceIter *it)
{
    const ParamStore *st = it->c->o.params->stores;
    return it->state != STATE_VALUE && st->trained ? st->m.dtype : F32;
}

static int64_t piece_bytes(const PieceIter *it) { return box_count(it->piece) * dtype_size(piece_dtype(it)); }

const void *piece_data(const PieceIter *it, int box)
{
    const ParamStore *st = &it->c->o.params->stores[it->replica];
    const Tensor flat[CKPT_STATES] = { st->master, st->m, st->v };
    const ShardBox *b = &it->boxes[box];
    /* the boxes of a rank are as wide as its memory, or of a single row: each is one run */
    ASSERT(b->ld == b->box.shape[1] || b->box.shape[0] == 1);
    return (const char *)flat[it->state].data +
           (param_origin(st, it->param, flat[it->state]) + b->at) * dtype_size(piece_dtype(it));
}

Err pieces_open(Ckpt *c, SetupArena *setup)
{
    const ParamRegistry *reg = c->o.params->whole;
    c->box_capacity = 1;
    for (int i = 0; i < reg->count; i++) {
        const Cut *cut = reg->items[i].spec.cut, axis = cut[0] ? cut[0] : cut[1];
        ParamPlace place = reg->place;
        for (place.shard[axis] = 0; place.shard[axis] < place.shards[axis]; place.shard[axis]++) {
            const Param p = shard_param(&reg->items[i], &place);
            const int n = shard_boxes(&p, NULL, 0);
            if (n > c->box_capacity) c->box_capacity = n;
        }
    }
    c->box_capacity += 2; /* a ZeRO shard may begin and end inside rows */
    return setup_array(setup, c->box_capacity, &c->boxes);
}

int64_t pieces_bytes(const Ckpt *c, int rank)
{
    PieceIter it;
    int64_t bytes = 0;
    for (piece_first(&it, c, rank); piece_next(&it);) bytes += piece_bytes(&it);
    return bytes;
}

/* ---- shards ---- */

/* The header of a rank's shard; *data_bytes: what lies behind it. */
static Err put_header(const Ckpt *c, int rank, TextOut *t, int64_t *data_bytes)
{
    PieceIter it;
    int64_t at = 0;
    st_header_begin(&t->json);
    for (piece_first(&it, c, rank); piece_next(&it);) {
        char key[KEY_MAX];
        const ParamSpec *s = &it.shard.spec;
        ckpt_key(key, it.state, it.shard.name, s->ndim, it.piece, s->shape);
        StTensor e = { .name = key, .dtype = ckpt_dtype_name(piece_dtype(&it)), .ndim = s->ndim, .offset = at };
        e.shape[0] = it.piece.shape[0];
        e.shape[1] = it.piece.shape[1];
        e.size_bytes = piece_bytes(&it);
        st_header_tensor(&t->json, &e);
        TRY(text_flush(t));
        at += e.size_bytes;
    }
    st_header_end(&t->json);
    *data_bytes = at;
    return text_flush(t);
}

Err pieces_measure(Ckpt *c)
{
    c->total_bytes = c->crc_count = c->piece_count = 0;
    for (int rank = 0; rank < c->o.world->size; rank++) {
        PieceIter it;
        TextOut t;
        int64_t data_bytes, pieces = 0;
        for (piece_first(&it, c, rank); piece_next(&it);) pieces++;
        text_init(&t, NULL, c->text, c->text_bytes);
        TRY(put_header(c, rank, &t, &data_bytes));
        c->header_bytes[rank] = st_padded(t.total_bytes);
        c->file_bytes[rank] = pieces ? 8 + c->header_bytes[rank] + data_bytes : 0;
        c->total_bytes += c->file_bytes[rank];
        c->crc_count += chunk_count(c->file_bytes[rank]);
        c->rank_pieces[rank] = pieces;
        c->piece_count += pieces;
    }
    return ERR_OK;
}

Err ckpt_shard_bytes(const ParamSet *params, const World *world, int64_t *bytes)
{
    Ckpt c = { .o = { .params = params, .world = (World *)world }, .states = CKPT_STATES, .text_bytes = 8192 };
    SetupArena a;
    setup_init(&a);
    c.file_bytes = bytes;
    Err err = pieces_open(&c, &a);
    if (!err) err = setup_array(&a, c.text_bytes, &c.text);
    if (!err) err = setup_array(&a, world->size, &c.header_bytes);
    if (!err) err = setup_array(&a, world->size, &c.rank_pieces);
    if (!err) err = pieces_measure(&c);
    setup_release(&a);
    return err;
}

static Err put_from(const CkptSource *source, ChunkWriter *w, int64_t bytes)
{
    const void *data;
    for (int64_t n; bytes; bytes -= n) {
        TRY(source->next(source->user, &data, &n));
        ASSERT(n > 0 && n <= bytes);
        TRY(chunk_put(w, data, n));
    }
    return ERR_OK;
}

static Err put_piece(const PieceIter *it, ChunkWriter *w, const char **copied)
{
    const Ckpt *c = it->c;
    if (c->o.source) return put_from(c->o.source, w, piece_bytes(it));
    for (int i = 0; i < it->count; i++) {
        const int64_t bytes = box_count(it->boxes[i].box) * dtype_size(piece_dtype(it));
        if (*copied) TRY(chunk_put(w, *copied, bytes));
        else TRY(chunk_put_device(w, c->o.stream, piece_data(it, i), bytes));
        if (*copied) *copied += bytes;
    }
    return ERR_OK;
}

/* piece_crcs: of this rank's, one after the other. */
static Err put_shard(const Ckpt *c, ChunkWriter *w, int64_t *piece_crcs)
{
    const char *copied = c->snapshot;
    int rank = c->o.world->rank;
    uint64_t n = (uint64_t)c->header_bytes[rank];
    uint8_t length[8];
    TextOut t;
    PieceIter it;
    int64_t data_bytes;
    for (int i = 0; i < 8; i++) length[i] = (uint8_t)(n >> 8 * i);
    TRY(chunk_put(w, length, 8));
    text_init(&t, w, c->text, c->text_bytes);
    TRY(put_header(c, rank, &t, &data_bytes));
    TRY(chunk_put(w, "       ", c->header_bytes[rank] - t.total_bytes));
    for (piece_first(&it, c, rank); piece_next(&it);) {
        w->crc = 0;
        TRY(put_piece(&it, w, &copied));
        *piece_crcs++ = w->crc;
    }
    return ERR_OK;
}

/* Places in c->crcs where a rank's checksums start: of its chunks, of its pieces. */
static void crc_start(const Ckpt *c, int rank, int64_t **chunks, int64_t **pieces)
{
    *chunks = c->crcs;
    *pieces = c->crcs + c->crc_count;
    for (int r = 0; r < rank; r++) {
        *chunks += chunk_count(c->file_bytes[r]);
        *pieces += c->rank_pieces[r];
    }
}

Err shard_write(Ckpt *c, const char *dir)
{
    char name[CKPT_NAME_MAX], path[PATH_MAX];
    int rank = c->o.world->rank;
    int64_t *chunk_crcs, *piece_crcs;
    ChunkWriter w;
    if (!c->file_bytes[rank]) return ERR_OK;
    crc_start(c, rank, &chunk_crcs, &piece_crcs);
    shard_name(name, rank);
    if (snprintf(path, sizeof path, "%s/%s", dir, name) >= (int)sizeof path)
        return err_set(ERR_IO, "path is too long: '%s'", dir);
    TRY(chunk_create(&w, path, c->chunk, chunk_crcs));
    Err err = put_shard(c, &w, piece_crcs);
    if (!err) err = chunk_sync_close(&w);
    if (err) chunk_abandon(&w);
    return err;
}

/* ---- manifest ---- */

static void put_pair(JsonOut *j, const char *key, int ndim, const int64_t pair[2])
{
    json_open(j, key, '[');
    for (int d = 0; d < ndim; d++) json_put_int(j, NULL, pair[d]);
    json_close(j, ']');
}

static void put_valid(JsonOut *j, const CkptMeta *m)
{
    json_open(j, "valid", '[');
    for (int i = 0; i < m->valid_count; i++) {
        if (!isfinite(m->valid[i].loss)) continue;
        json_open(j, NULL, '{');
        json_put_text(j, "set", m->valid[i].set);
        json_put_number(j, "loss", m->valid[i].loss);
        json_put_int(j, "samples", m->valid[i].samples);
        json_put_int(j, "data", m->valid[i].crc);
        if (m->valid[i].has_content) json_put_int(j, "content", m->valid[i].content);
        json_close(j, '}');
    }
    json_close(j, ']');
}

static Err put_meta(TextOut *t, const CkptMeta *m)
{
    JsonOut *j = &t->json;
    json_put_int(j, "format", CKPT_FORMAT);
    json_put_text(j, "program", m->program);
    if (m->machine && *m->machine) json_put_text(j, "machine", m->machine);
    if (m->job && *m->job) json_put_text(j, "job", m->job);
    json_put_int(j, "step", m->step);
    json_put_int(j, "samples", m->samples);
    json_put_int(j, "tokens", m->tokens);
    json_put_int(j, "seed", m->seed);
    json_put_text(j, "reproducible", m->reproducible);
    json_open(j, "blocks", '{');
    json_put_int(j, "tp", m->tp_blocks);
    json_put_int(j, "seq", m->seq_blocks);
    json_put_int(j, "attn", m->attn_block);
    json_close(j, '}');
    json_open(j, "counters", '{');
    for (int i = 0; i < m->counter_count; i++) json_put_int(j, m->counters[i].name, m->counters[i].value);
    json_close(j, '}');
    json_put_text(j, "data", m->data);
    if (m->overrides && *m->overrides) json_put_text(j, "overrides", m->overrides);
    json_put_text(j, "config", m->config);
    TRY(text_flush(t));
    if (m->valid_count) put_valid(j, m);
    return text_flush(t);
}

static Err put_params(const Ckpt *c, TextOut *t)
{
    const ParamRegistry *reg = c->o.params->whole;
    json_open(&t->json, "parameters", '[');
    for (int i = 0; i < reg->count; i++) {
        const Param *p = &reg->items[i];
        json_open(&t->json, NULL, '{');
        json_put_text(&t->json, "name", p->name);
        put_pair(&t->json, "shape", p->spec.ndim, p->spec.shape);
        json_put_int(&t->json, "shift", c->shifts[i]);
        json_close(&t->json, '}');
        TRY(text_flush(t));
    }
    json_close(&t->json, ']');
    return text_flush(t);
}

static Err put_pieces(const Ckpt *c, TextOut *t)
{
    const int64_t *crc = c->crcs + c->crc_count;
    json_open(&t->json, "pieces", '[');
    for (int rank = 0; rank < c->o.world->size; rank++) {
        char file[CKPT_NAME_MAX];
        PieceIter it;
        shard_name(file, rank);
        for (piece_first(&it, c, rank); piece_next(&it);) {
            const ParamSpec *s = &it.shard.spec;
            json_open(&t->json, NULL, '{');
            json_put_text(&t->json, "name", it.shard.name);
            json_put_text(&t->json, "state", ckpt_state_names[it.state]);
            json_put_text(&t->json, "dtype", ckpt_dtype_name(piece_dtype(&it)));
            put_pair(&t->json, "global", s->ndim, s->shape);
            put_pair(&t->json, "offset", s->ndim, it.piece.offset);
            put_pair(&t->json, "shape", s->ndim, it.piece.shape);
            json_put_text(&t->json, "file", file);
            json_put_int(&t->json, "crc32c", *crc++);
            json_close(&t->json, '}');
            TRY(text_flush(t));
        }
    }
    json_close(&t->json, ']');
    return text_flush(t);
}

static Err put_files(const Ckpt *c, TextOut *t)
{
    const int64_t *crc = c->crcs;
    json_open(&t->json, "files", '[');
    for (int rank = 0; rank < c->o.world->size; rank++) {
        char name[CKPT_NAME_MAX];
        if (!c->file_bytes[rank]) continue;
        shard_name(name, rank);
        json_open(&t->json, NULL, '{');
        json_put_text(&t->json, "name", name);
        json_put_int(&t->json, "size", c->file_bytes[rank]);
        json_open(&t->json, "crc32c", '[');
        for (int64_t i = chunk_count(c->file_bytes[rank]); i; i--) {
            json_put_int(&t->json, NULL, *crc++);
            TRY(text_flush(t));
        }
        json_close(&t->json, ']');
        json_close(&t->json, '}');
    }
    json_close(&t->json, ']');
    return text_flush(t);
}

static Err put_manifest(const Ckpt *c, const CkptMeta *meta, TextOut *t)
{
    json_open(&t->json, NULL, '{');
    TRY(put_meta(t, meta));
    TRY(put_params(c, t));
    TRY(put_pieces(c, t));
    TRY(put_files(c, t));
    json_close(&t->json, '}');
    return text_flush(t);
}

static Err write_small(const char *dir, const char *name, const char *text)
{
    char path[PATH_MAX];
    FileWriter w;
    if (snprintf(path, sizeof path, "%s/%s", dir, name) >= (int)sizeof path)
        return err_set(ERR_IO, "path is too long: '%s'", dir);
    TRY(file_create(path, &w));
    Err err = file_write(&w, text, (int64_t)strlen(text));
    if (!err) err = file_sync_close(&w);
    if (err) file_abandon(&w);
    return err;
}

Err manifest_write(Ckpt *c, const CkptMeta *meta, const char *dir, uint32_t *crc, int64_t *size_bytes)
{
    char path[PATH_MAX], text[64];
    ChunkWriter w;
    TextOut t;
    if (snprintf(path, sizeof path, "%s/manifest.json", dir) >= (int)sizeof path)
        return err_set(ERR_IO, "path is too long: '%s'", dir);
    TRY(chunk_create(&w, path, c->chunk, NULL));
    text_init(&t, &w, c->text, c->text_bytes);
    Err err = put_manifest(c, meta, &t);
    if (!err) err = chunk_sync_close(&w);
    if (err) {
        chunk_abandon(&w);
        return err;
    }
    *crc = t.crc;
    *size_bytes = t.total_bytes;
    manifest_crc_text(text, t.crc, t.total_bytes);
    return write_small(dir, "manifest.crc", text);
}
