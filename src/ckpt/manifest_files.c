/* The files of tensors that a manifest lists: opened, checked, and what is damaged in them named; see manifest.h. */
#include "ckpt/manifest.h"

#include <stdlib.h>
#include <string.h>

Err manifest_check_files(const Manifest *m)
{
    for (int i = 0; i < m->file_count; i++) {
        ChunkReader r;
        TRY(chunk_open(&r, m->files[i].path, m->files[i].size_bytes, m->files[i].crcs, NULL));
    }
    return ERR_OK;
}

/* The CRC of bytes [at, at + size_bytes) as they are in the file, right or not. */
static Err crc_of_bytes(const char *path, int64_t at, int64_t size_bytes, uint32_t *crc)
{
    char part[4096];
    *crc = 0;
    for (int64_t n; size_bytes > 0; at += n, size_bytes -= n) {
        n = size_bytes < (int64_t)sizeof part ? size_bytes : (int64_t)sizeof part;
        TRY(file_read_at(path, at, part, n));
        *crc = crc32c(*crc, part, (size_t)n);
    }
    return ERR_OK;
}

/* "'embed.weight', 'm/norm.weight'": the file's tensors in the bad chunk that are not as written, cut when they are
 * many; their number, -1 when that cannot be told. Where a tensor lies follows from the sizes of those behind it: the
 * header, which says so too, may be what is damaged. */
static int name_damaged(const Manifest *m, const ChunkReader *r, char *text, size_t room)
{
    const int64_t start = r->bad * CHUNK_BYTES, end = start + CHUNK_BYTES;
    int64_t at = r->size_bytes;
    size_t used = 0;
    int damaged = 0;
    for (int64_t i = m->piece_count; i-- > 0;) {
        const ManifestPiece *q = &m->pieces[i];
        const ManifestParam *p = &m->params[q->param];
        const int64_t size_bytes = box_count(q->box) * dtype_size(q->dtype);
        char key[KEY_MAX];
        uint32_t crc;
        if (m->files[q->file].path != r->path) continue;
        at -= size_bytes;
        if (at >= end || at + size_bytes <= start) continue;
        if (q->crc < 0 || crc_of_bytes(r->path, at, size_bytes, &crc)) return -1;
        if (crc == (uint32_t)q->crc) continue;
        ckpt_key(key, q->state, p->name, p->ndim, q->box, p->shape);
        damaged++;
        if (used + strlen(key) + 8 > room) break;
        used += (size_t)snprintf(text + used, room - used, "%s'%s'", used ? ", " : "", key);
    }
    return damaged;
}

Err manifest_blame(const Manifest *m, const ChunkReader *r, Err err)
{
    char text[512] = "", why[1024];
    if (err != ERR_CKPT || r->bad < 0) return err;
    snprintf(why, sizeof why, "%s", err_message());
    const int damaged = name_damaged(m, r, text, sizeof text);
    if (damaged < 0) return err_set(err, "%s", why);
    if (damaged) return err_set(err, "%s; tensor %s", why, text);
    return err_set(err, "%s; no tensor's own checksum is wrong, so it is the header", why);
}

static Err open_shard(const Manifest *m, int file, char *chunk, SetupArena *a, ChunkReader *r, StFile *out)
{
    const ManifestFile *f = &m->files[file];
    uint8_t first8[8];
    int64_t header_bytes;
    TRY(chunk_open(r, f->path, f->size_bytes, f->crcs, chunk));
    TRY(chunk_get(r, 0, first8, 8));
    TRY(st_header_length(f->path, first8, f->size_bytes, &header_bytes));
    char *header = malloc((size_t)header_bytes + 1);
    if (!header) return err_set(ERR_MEMORY, "no memory for the header of '%s'", f->path);
    Err err = chunk_get(r, 8, header, header_bytes);
    if (!err) err = st_parse(f->path, header, header_bytes, f->size_bytes, a, out);
    free(header);
    return err;
}

Err manifest_open(const Manifest *m, int file, char *chunk, SetupArena *a, ChunkReader *r, StFile *out)
{
    return manifest_blame(m, r, open_shard(m, file, chunk, a, r, out));
}

Err manifest_tensor(const Manifest *m, const ManifestPiece *p, const StFile *f, const StTensor **out)
{
    const ManifestParam *q = &m->params[p->param];
    const char *path = m->files[p->file].path;
    char key[KEY_MAX];
    ckpt_key(key, p->state, q->name, q->ndim, p->box, q->shape);
    const StTensor *t = st_find(f, key);
    if (!t) return err_set(ERR_CKPT, "'%s' has no tensor '%s', which the manifest lists", path, key);
    if (strcmp(t->dtype, ckpt_dtype_name(p->dtype)))
        return err_set(ERR_CKPT, "'%s': tensor '%s' has dtype '%s', the manifest says '%s'", path, key, t->dtype,
                       ckpt_dtype_name(p->dtype));
    if (t->ndim != q->ndim || t->shape[0] != p->box.shape[0] || (q->ndim == 2 && t->shape[1] != p->box.shape[1]))
        return err_set(ERR_CKPT, "'%s': tensor '%s' has another shape than the manifest says", path, key);
    *out = t;
    return ERR_OK;
}
