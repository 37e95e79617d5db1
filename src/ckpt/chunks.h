/*
 * Files in chunks of 1 MiB, each with a CRC32C: what shards and manifests are written and read through.
 *
 * The writer owns no memory: it fills the caller's chunk buffer and the caller's table of CRCs. The reader
 * hands out bytes only of chunks whose CRC was right, and keeps the last one, so that reading forward touches
 * every chunk once. Both are for files of a checkpoint only; nothing here knows what is in them.
 */
#ifndef MEGATRAIN_CKPT_CHUNKS_H
#define MEGATRAIN_CKPT_CHUNKS_H

#include "base/file.h"
#include "base/json.h"
#include "device/device.h"

enum { CHUNK_BYTES = 1 << 20 };

int64_t chunk_count(int64_t file_bytes);

typedef struct {
    FileWriter file;
    char *buf; /* CHUNK_BYTES, the caller's */
    int64_t used_bytes;
    int64_t *crcs;     /* [chunk_count of the whole file], the caller's; NULL: not wanted */
    int64_t put_bytes; /* bytes put into the file, counted with crcs alone */
    uint32_t crc;      /* with crcs: the CRC of what was put since the caller set it to 0 */
} ChunkWriter;

/* All of these may return ERR_IO, as in base/file.h. After a failure the caller calls chunk_abandon. */
Err chunk_create(ChunkWriter *w, const char *path, char *buf, int64_t *crcs);
Err chunk_put(ChunkWriter *w, const void *data, int64_t size_bytes);
Err chunk_put_device(ChunkWriter *w, Stream *s, const void *device_src, int64_t size_bytes);
Err chunk_sync_close(ChunkWriter *w);
void chunk_abandon(ChunkWriter *w);

/*
 * JSON of any length through a small buffer: write items into `json`, call text_flush after each. Without a
 * file the text is only counted.
 */
typedef struct {
    JsonOut json;
    ChunkWriter *file;
    int64_t total_bytes;
    uint32_t crc; /* the CRC of all text so far */
} TextOut;

void text_init(TextOut *t, ChunkWriter *file, char *buf, int64_t buf_bytes);
Err text_flush(TextOut *t); /* ERR_INTERNAL: an item was larger than the buffer */

typedef struct {
    const char *path;
    int64_t size_bytes;
    const uint32_t *crcs; /* [chunk_count(size_bytes)] */
    char *buf;            /* CHUNK_BYTES, the caller's */
    int64_t held;         /* the chunk in buf; -1: none */
    int64_t bad;          /* the chunk whose CRC was wrong; -1: none */
} ChunkReader;

/* ERR_CKPT, which names the file: its size is not size_bytes. */
Err chunk_open(ChunkReader *r, const char *path, int64_t size_bytes, const uint32_t *crcs, char *buf);
/* Copies bytes [offset, offset + size_bytes) to the host. ERR_CKPT, which names file and chunk: a CRC is wrong. */
Err chunk_get(ChunkReader *r, int64_t offset, void *out, int64_t size_bytes);
Err chunk_get_device(ChunkReader *r, Stream *s, int64_t offset, void *device_dst, int64_t size_bytes);
Err chunk_check_all(ChunkReader *r);
/* For whoever reads chunks by other means. ERR_CKPT, which names file and chunk: `crc` is not the one in the table. */
Err chunk_judge(const char *path, int64_t size_bytes, const uint32_t *crcs, int64_t chunk, uint32_t crc);

#endif
