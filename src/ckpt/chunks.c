/* Chunked, checksummed files; see chunks.h. */
#include "ckpt/chunks.h"

#include <string.h>

#include "base/int64.h"

int64_t chunk_count(int64_t file_bytes) { return file_bytes / CHUNK_BYTES + (file_bytes % CHUNK_BYTES != 0); }

/* ---- writing ---- */

Err chunk_create(ChunkWriter *w, const char *path, char *buf, int64_t *crcs)
{
    *w = (ChunkWriter){ .buf = buf, .crcs = crcs };
    return file_create(path, &w->file);
}

/* Shorter pieces are gathered; longer ones are written from where they lie. */
enum { GATHERED_BYTES = 1 << 16 };

static Err flush(ChunkWriter *w)
{
    if (w->used_bytes) TRY(file_write(&w->file, w->buf, w->used_bytes));
    w->used_bytes = 0;
    return ERR_OK;
}

static void checksum(ChunkWriter *w, const char *data, int64_t size_bytes)
{
    if (!w->crcs) return;
    w->crc = crc32c(w->crc, data, (size_t)size_bytes);
    for (int64_t n; size_bytes; size_bytes -= n, data += n) {
        const int64_t in = w->put_bytes % CHUNK_BYTES;
        int64_t *crc = &w->crcs[w->put_bytes / CHUNK_BYTES];
        n = min64(CHUNK_BYTES - in, size_bytes);
        *crc = crc32c(in ? (uint32_t)*crc : 0, data, (size_t)n);
        w->put_bytes += n;
    }
}

static Err put_gathered(ChunkWriter *w, Stream *s, const char *data, int64_t size_bytes)
{
    if (s) TRY(device_read(s, w->buf + w->used_bytes, data, size_bytes));
    else memcpy(w->buf + w->used_bytes, data, (size_t)size_bytes);
    checksum(w, w->buf + w->used_bytes, size_bytes);
    w->used_bytes += size_bytes;
    return w->used_bytes == CHUNK_BYTES ? flush(w) : ERR_OK;
}

static Err put_through(ChunkWriter *w, const char *data, int64_t size_bytes)
{
    TRY(flush(w));
    checksum(w, data, size_bytes);
    return file_write(&w->file, data, size_bytes);
}

/* `s` NULL: `data` is host memory. */
static Err put(ChunkWriter *w, Stream *s, const char *data, int64_t size_bytes)
{
    for (int64_t n; size_bytes > 0; size_bytes -= n, data += n) {
        const bool through = !s && size_bytes >= GATHERED_BYTES;
        n = min64(through ? CHUNK_BYTES : CHUNK_BYTES - w->used_bytes, size_bytes);
        TRY(through ? put_through(w, data, n) : put_gathered(w, s, data, n));
    }
    return ERR_OK;
}

Err chunk_put(ChunkWriter *w, const void *data, int64_t size_bytes) { return put(w, NULL, data, size_bytes); }

Err chunk_put_device(ChunkWriter *w, Stream *s, const void *device_src, int64_t size_bytes)
{
    return put(w, s, device_src, size_bytes);
}

Err chunk_sync_close(ChunkWriter *w)
{
    TRY(flush(w));
    return file_sync_close(&w->file);
}

void chunk_abandon(ChunkWriter *w) { file_abandon(&w->file); }

void text_init(TextOut *t, ChunkWriter *file, char *buf, int64_t buf_bytes)
{
    *t = (TextOut){ .file = file };
    json_out_init(&t->json, buf, buf_bytes);
}

Err text_flush(TextOut *t)
{
    int64_t n = t->json.used_bytes;
    t->total_bytes += n;
    t->json.used_bytes = 0; /* the comma's memory stays: the text goes on */
    if (!t->file) return ERR_OK;
    if (n >= t->json.size_bytes)
        return err_set(ERR_INTERNAL, "an item of %lld bytes in a text buffer of %lld", (long long)n,
                       (long long)t->json.size_bytes);
    t->crc = crc32c(t->crc, t->json.buf, (size_t)n);
    return chunk_put(t->file, t->json.buf, n);
}

/* ---- reading ---- */

Err chunk_open(ChunkReader *r, const char *path, int64_t size_bytes, const uint32_t *crcs, char *buf)
{
    int64_t found;
    *r = (ChunkReader){ .path = path, .size_bytes = size_bytes, .crcs = crcs, .buf = buf, .held = -1, .bad = -1 };
    TRY_AS(ERR_CKPT, file_size(path, &found));
    if (found == size_bytes) return ERR_OK;
    return err_set(ERR_CKPT, "'%s' has %lld bytes, the manifest says %lld", path, (long long)found,
                   (long long)size_bytes);
}

Err chunk_judge(const char *path, int64_t size_bytes, const uint32_t *crcs, int64_t chunk, uint32_t crc)
{
    const int64_t start = chunk * CHUNK_BYTES, end = min64(start + CHUNK_BYTES, size_bytes);
    if (crc == crcs[chunk]) return ERR_OK;
    return err_set(ERR_CKPT, "'%s' is damaged: bytes %lld to %lld have checksum %08x, not %08x", path, (long long)start,
                   (long long)(end - 1), crc, crcs[chunk]);
}

static Err hold(ChunkReader *r, int64_t chunk)
{
    int64_t start = chunk * CHUNK_BYTES, n = r->size_bytes - start;
    if (r->held == chunk) return ERR_OK;
    if (n > CHUNK_BYTES) n = CHUNK_BYTES;
    r->held = -1;
    TRY_AS(ERR_CKPT, file_read_at(r->path, start, r->buf, n));
    const Err err = chunk_judge(r->path, r->size_bytes, r->crcs, chunk, crc32c(0, r->buf, (size_t)n));
    r->bad = err ? chunk : -1;
    TRY(err);
    r->held = chunk;
    return ERR_OK;
}

static Err get(ChunkReader *r, Stream *s, int64_t offset, char *out, int64_t size_bytes)
{
    if (offset < 0 || size_bytes < 0 || offset > r->size_bytes - size_bytes)
        return err_set(ERR_CKPT, "'%s' is too short: bytes up to %lld wanted, %lld there", r->path,
                       (long long)(offset + size_bytes), (long long)r->size_bytes);
    while (size_bytes > 0) {
        int64_t in = offset % CHUNK_BYTES, n = CHUNK_BYTES - in;
        if (n > size_bytes) n = size_bytes;
        TRY(hold(r, offset / CHUNK_BYTES));
        if (s) TRY(device_write(s, out, r->buf + in, n));
        else memcpy(out, r->buf + in, (size_t)n);
        offset += n;
        out += n;
        size_bytes -= n;
    }
    return ERR_OK;
}

Err chunk_get(ChunkReader *r, int64_t offset, void *out, int64_t size_bytes)
{
    return get(r, NULL, offset, out, size_bytes);
}

Err chunk_get_device(ChunkReader *r, Stream *s, int64_t offset, void *device_dst, int64_t size_bytes)
{
    return get(r, s, offset, device_dst, size_bytes);
}

Err chunk_check_all(ChunkReader *r)
{
    for (int64_t i = 0; i < chunk_count(r->size_bytes); i++) TRY(hold(r, i));
    return ERR_OK;
}
