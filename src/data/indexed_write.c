/*
 * Writing token files (layout: indexed.h). Order of the last operations: sync both temporary
 * files, remove an old PREFIX.idx, rename the .bin, rename the .idx, sync the folder. Whenever it
 * stops, there is either the whole new pair, or no PREFIX.idx, or (before the removal) the old
 * pair.
 */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/grow.h"
#include "data/indexed.h"

enum { BUFFER_BYTES = 1 << 20 };

struct IndexedWriter {
    char bin[PATH_MAX], idx[PATH_MAX], bin_temp[PATH_MAX], idx_temp[PATH_MAX], dir[PATH_MAX];
    FileWriter file;
    TokenType type;
    int token_bytes;
    char *buffer; /* BUFFER_BYTES of tokens not yet written, later of the index */
    int64_t buffered;
    int32_t *lengths; /* of sequences */
    int64_t *document_ends;
    int64_t sequence_count, sequence_capacity, document_count, document_capacity;
    int64_t tokens, document_tokens;
};

static bool set_paths(IndexedWriter *w, const char *prefix)
{
    int pid = (int)getpid();
    const char *slash = strrchr(prefix, '/');
    int n = slash ? (int)(slash - prefix) : 0;
    if (strlen(prefix) > PATH_MAX - 64) return false;
    snprintf(w->bin, PATH_MAX, "%s.bin", prefix);
    snprintf(w->idx, PATH_MAX, "%s.idx", prefix);
    snprintf(w->bin_temp, PATH_MAX, "%s.bin.tmp-%d", prefix, pid);
    snprintf(w->idx_temp, PATH_MAX, "%s.idx.tmp-%d", prefix, pid);
    if (slash) snprintf(w->dir, PATH_MAX, "%.*s", n ? n : 1, prefix);
    else strcpy(w->dir, ".");
    return true;
}

static void writer_free(IndexedWriter *w)
{
    free(w->buffer);
    free(w->lengths);
    free(w->document_ends);
    free(w);
}

Err indexed_create(const char *prefix, TokenType type, IndexedWriter **out)
{
    ASSERT(type == TOKEN_U16 || type == TOKEN_I32);
    IndexedWriter *w = calloc(1, sizeof *w);
    if (w) w->buffer = malloc(BUFFER_BYTES);
    Err err = ERR_OK;
    if (!w || !w->buffer) err = err_set(ERR_MEMORY, "no memory for writing token files");
    else if (!set_paths(w, prefix)) err = err_set(ERR_IO, "path is too long: '%s'", prefix);
    if (!err) err = file_make_dirs(w->dir);
    if (!err) err = file_create(w->bin_temp, &w->file);
    if (err) {
        if (w) writer_free(w);
        return err;
    }
    w->type = type;
    w->token_bytes = type == TOKEN_U16 ? 2 : 4;
    *out = w;
    return ERR_OK;
}

static Err flush(IndexedWriter *w)
{
    if (w->buffered == 0) return ERR_OK;
    TRY(file_write(&w->file, w->buffer, w->buffered));
    w->buffered = 0;
    return ERR_OK;
}

static Err put(IndexedWriter *w, const void *data, int64_t size_bytes)
{
    if (w->buffered + size_bytes > BUFFER_BYTES) TRY(flush(w));
    memcpy(w->buffer + w->buffered, data, (size_t)size_bytes);
    w->buffered += size_bytes;
    return ERR_OK;
}

Err indexed_add_tokens(IndexedWriter *w, const int32_t *ids, int64_t count)
{
    if (count > INT32_MAX - w->document_tokens)
        return err_set(ERR_DATA, "a document has more than '%d' tokens, which the file format cannot express",
                       INT32_MAX);
    for (int64_t i = 0; i < count; i++) {
        uint16_t narrow = (uint16_t)ids[i];
        ASSERT(ids[i] >= 0 && (w->type == TOKEN_I32 || ids[i] <= UINT16_MAX));
        TRY(w->type == TOKEN_I32 ? put(w, &ids[i], 4) : put(w, &narrow, 2));
    }
    w->document_tokens += count;
    return ERR_OK;
}

Err indexed_end_document(IndexedWriter *w)
{
    TRY(grow_to(&w->document_ends, &w->document_capacity, w->document_count + 1));
    if (w->document_tokens > 0) {
        TRY(grow_to(&w->lengths, &w->sequence_capacity, w->sequence_count + 1));
        w->lengths[w->sequence_count++] = (int32_t)w->document_tokens;
    }
    w->document_ends[w->document_count++] = w->sequence_count;
    w->tokens += w->document_tokens;
    w->document_tokens = 0;
    return ERR_OK;
}

int64_t indexed_written_tokens(const IndexedWriter *w) { return w->tokens + w->document_tokens; }

static Err put_index(IndexedWriter *w)
{
    int64_t version = INDEXED_VERSION, entries = w->document_count + 1, at = 0;
    uint8_t type = (uint8_t)w->type;
    TRY(put(w, "MMIDIDX\0", 9));
    TRY(put(w, &version, 8));
    TRY(put(w, &type, 1));
    TRY(put(w, &w->sequence_count, 8));
    TRY(put(w, &entries, 8));
    for (int64_t s = 0; s < w->sequence_count; s++) TRY(put(w, &w->lengths[s], 4));
    for (int64_t s = 0; s < w->sequence_count; s++) {
        TRY(put(w, &at, 8));
        at += (int64_t)w->lengths[s] * w->token_bytes;
    }
    at = 0;
    TRY(put(w, &at, 8));
    for (int64_t d = 0; d < w->document_count; d++) TRY(put(w, &w->document_ends[d], 8));
    return flush(w);
}

/* The .bin is complete and closed; the index is being written to w->file. */
static Err write_index(IndexedWriter *w)
{
    TRY(file_create(w->idx_temp, &w->file));
    TRY(put_index(w));
    return file_sync_close(&w->file);
}

static Err publish(IndexedWriter *w)
{
    TRY(file_remove_tree(w->idx));
    TRY(file_rename(w->bin_temp, w->bin));
    TRY(file_rename(w->idx_temp, w->idx));
    return file_sync_dir(w->dir);
}

static Err finish(IndexedWriter *w)
{
    if (w->document_tokens) TRY(indexed_end_document(w));
    if (w->tokens == 0) return err_set(ERR_DATA, "there are no tokens to write to '%s'", w->bin);
    TRY(flush(w));
    TRY(file_sync_close(&w->file));
    TRY(write_index(w));
    return publish(w);
}

Err indexed_finish(IndexedWriter *w)
{
    Err err = finish(w);
    if (err) indexed_abandon(w);
    else writer_free(w);
    return err;
}

void indexed_abandon(IndexedWriter *w)
{
    if (!w) return;
    if (w->file.fd >= 0) file_abandon(&w->file);
    unlink(w->bin_temp); /* whichever of them is there; the error on the way is already reported */
    unlink(w->idx_temp);
    writer_free(w);
}
