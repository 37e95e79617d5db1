/*
 * Writing token files (layout: indexed.h). They are built in a folder of their own, PREFIX.part: `tokens` becomes
 * PREFIX.bin, `lengths` has an i32 for each document (0: no tokens), from which `index`, later PREFIX.idx, is made.
 *
 * Order of the last operations: sync all of them, remove an old PREFIX.idx, sync the folder, rename the .bin, the .crc
 * and at last the .idx, sync the folder. Whenever it stops, there is either the whole new pair, or no PREFIX.idx, or
 * (before the removal) the old pair.
 */
#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "data/indexed.h"

enum { BUFFER_BYTES = 1 << 20 };

/* A file being written, and the checksum of what it holds and will hold. */
typedef struct {
    FileWriter file;
    char *buffer; /* BUFFER_BYTES not yet written */
    int64_t buffered;
    uint32_t crc; /* without the buffer's */
} Stream;

struct IndexedWriter {
    char bin[PATH_MAX], idx[PATH_MAX], dir[PATH_MAX], part[PATH_MAX];
    char tokens_path[PATH_MAX], lengths_path[PATH_MAX], index_path[PATH_MAX];
    char crc[PATH_MAX], sums_path[PATH_MAX];
    TokenType type;
    int token_bytes;
    Stream tokens, lengths, index;
    IndexedMark now; /* but for the checksums */
    bool keep;       /* something was synced that indexed_resume can go on from */
    bool made_with;  /* the tokenizer is known: */
    uint32_t tokenizer_crc;
};

/* ---- streams ---- */

static Err stream_flush(Stream *s)
{
    if (s->buffered == 0) return ERR_OK;
    TRY(file_write(&s->file, s->buffer, s->buffered));
    s->crc = crc32c(s->crc, s->buffer, (size_t)s->buffered);
    s->buffered = 0;
    return ERR_OK;
}

static Err put(Stream *s, const void *data, int64_t size_bytes)
{
    if (s->buffered + size_bytes > BUFFER_BYTES) TRY(stream_flush(s));
    memcpy(s->buffer + s->buffered, data, (size_t)size_bytes);
    s->buffered += size_bytes;
    return ERR_OK;
}

static Err stream_sync(Stream *s)
{
    TRY(stream_flush(s));
    return file_sync(&s->file);
}

static Err stream_close(Stream *s)
{
    TRY(stream_flush(s));
    return file_sync_close(&s->file);
}

static uint32_t stream_crc(const Stream *s) { return crc32c(s->crc, s->buffer, (size_t)s->buffered); }

/* ---- opening ---- */

static bool set_paths(IndexedWriter *w, const char *prefix)
{
    const char *slash = strrchr(prefix, '/');
    int n = slash ? (int)(slash - prefix) : 0;
    if (strlen(prefix) > PATH_MAX - 64) return false;
    snprintf(w->bin, PATH_MAX, "%s.bin", prefix);
    snprintf(w->idx, PATH_MAX, "%s.idx", prefix);
    snprintf(w->crc, PATH_MAX, "%s.crc", prefix);
    indexed_part(prefix, "/sums", w->sums_path);
    indexed_part(prefix, "", w->part);
    indexed_part(prefix, "/tokens", w->tokens_path);
    indexed_part(prefix, "/lengths", w->lengths_path);
    indexed_part(prefix, "/index", w->index_path);
    if (slash) snprintf(w->dir, PATH_MAX, "%.*s", n ? n : 1, prefix);
    else strcpy(w->dir, ".");
    return true;
}

void indexed_part(const char *prefix, const char *name, char out[PATH_MAX])
{
    snprintf(out, PATH_MAX, "%.*s.part%s", PATH_MAX - 64, prefix, name);
}

/* Is this one of the names in PREFIX.part, or what file_replace makes of one? */
static bool is_ours(const char *name)
{
    static const char *const ours[] = { ".", "..", "tokens", "lengths", "index", "sums", "job.json", "lock" };
    const char *end = strstr(name, ".tmp-");
    const size_t n = end ? (size_t)(end - name) : strlen(name);
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++)
        if (strlen(ours[i]) == n && memcmp(name, ours[i], n) == 0) return true;
    return false;
}

static Err check_part(const char *part)
{
    Err err = ERR_OK;
    DIR *dir = opendir(part);
    if (!dir) return ERR_OK; /* not there, or making it will say what is wrong */
    for (const struct dirent *e; !err && (e = readdir(dir));)
        if (!is_ours(e->d_name)) {
            err =
                err_set(ERR_STORAGE, "'%s' is to be used and removed, but holds something else: '%s'", part, e->d_name);
            err_hint("move it away, or choose another --output");
        }
    closedir(dir);
    return err;
}

Err indexed_check_place(const char *prefix)
{
    static const char *const suffixes[] = { ".bin", ".crc", ".idx" };
    char path[PATH_MAX];
    for (int i = 0; i < 3; i++) {
        snprintf(path, sizeof path, "%.*s%s", PATH_MAX - 64, prefix, suffixes[i]);
        if (err_as(file_check_output(path), ERR_STORAGE)) return err_hint("choose another --output");
    }
    indexed_part(prefix, "", path);
    return check_part(path);
}

static void writer_free(IndexedWriter *w)
{
    free(w->tokens.buffer);
    free(w->lengths.buffer);
    free(w->index.buffer);
    free(w);
}

static Err writer_new(const char *prefix, TokenType type, IndexedWriter **out)
{
    ASSERT(type == TOKEN_U16 || type == TOKEN_I32);
    IndexedWriter *w = calloc(1, sizeof *w);
    if (!w) return err_set(ERR_MEMORY, "no memory for writing token files");
    Stream *streams[] = { &w->tokens, &w->lengths, &w->index };
    bool room = true;
    for (int i = 0; i < 3; i++) {
        streams[i]->file = (FileWriter){ .fd = -1, .failed = true };
        streams[i]->buffer = malloc(BUFFER_BYTES);
        room = room && streams[i]->buffer;
    }
    w->type = type;
    w->token_bytes = type == TOKEN_U16 ? 2 : 4;
    Err err = room ? ERR_OK : err_set(ERR_MEMORY, "no memory for writing token files");
    if (!err && !set_paths(w, prefix)) err = err_set(ERR_IO, "path is too long: '%s'", prefix);
    if (err) writer_free(w);
    else *out = w;
    return err;
}

static Err begin(IndexedWriter *w)
{
    TRY(file_make_dirs(w->part));
    TRY(file_create(w->tokens_path, &w->tokens.file));
    return file_create(w->lengths_path, &w->lengths.file);
}

Err indexed_create(const char *prefix, TokenType type, IndexedWriter **out)
{
    IndexedWriter *w;
    TRY(writer_new(prefix, type, &w));
    Err err = begin(w);
    if (err) indexed_abandon(w);
    else *out = w;
    return err;
}

/* ---- going on ---- */

/* The first size_bytes of a file have this checksum. */
static Err check_file(IndexedWriter *w, const char *path, int64_t size_bytes, uint32_t crc)
{
    int fd;
    int64_t file_bytes, got = 1;
    uint32_t found = 0;
    TRY_AS(ERR_DATA, file_open_regular(path, &fd, &file_bytes));
    Err err = ERR_OK;
    for (int64_t at = 0; !err && at < size_bytes && got > 0; at += got) {
        int64_t want = size_bytes - at < BUFFER_BYTES ? size_bytes - at : BUFFER_BYTES;
        err = err_as(file_read_some(fd, path, at, w->index.buffer, want, &got), ERR_DATA);
        if (!err) found = crc32c(found, w->index.buffer, (size_t)got);
    }
    close(fd);
    if (!err && (file_bytes < size_bytes || found != crc))
        err = err_set(ERR_DATA, "'%s' is not as it was written", path);
    return err;
}

static Err go_on(IndexedWriter *w, const IndexedMark *mark)
{
    int64_t tokens_bytes = mark->tokens * w->token_bytes, lengths_bytes = 4 * mark->documents;
    /* stopped between the last two renames, the tokens are there under their new name already */
    bool renamed = !file_exists(w->tokens_path) && !file_exists(w->idx);
    TRY(check_file(w, renamed ? w->bin : w->tokens_path, tokens_bytes, mark->tokens_crc));
    TRY(check_file(w, w->lengths_path, lengths_bytes, mark->lengths_crc));
    if (renamed) TRY(file_rename(w->bin, w->tokens_path));
    TRY(file_reopen(w->tokens_path, tokens_bytes, &w->tokens.file));
    TRY(file_reopen(w->lengths_path, lengths_bytes, &w->lengths.file));
    w->now = *mark;
    w->tokens.crc = mark->tokens_crc;
    w->lengths.crc = mark->lengths_crc;
    return ERR_OK;
}

Err indexed_resume(const char *prefix, TokenType type, const IndexedMark *mark, IndexedWriter **out)
{
    IndexedWriter *w;
    TRY(writer_new(prefix, type, &w));
    w->keep = true;
    Err err = go_on(w, mark);
    if (err) indexed_abandon(w);
    else *out = w;
    return err;
}

bool indexed_published(const char *prefix, const IndexedMark *mark)
{
    char tokens_path[PATH_MAX];
    Indexed x;
    bool summed;
    indexed_part(prefix, "/tokens", tokens_path);
    if (file_exists(tokens_path) || indexed_open(prefix, &x) != ERR_OK) return false;
    bool same = indexed_verify(&x, &summed) == ERR_OK && summed && x.bin_crc == mark->tokens_crc &&
                x.tokens == mark->tokens && x.documents == mark->documents;
    indexed_close(&x);
    return same;
}

/* ---- writing ---- */

Err indexed_add_tokens(IndexedWriter *w, const int32_t *ids, int64_t count)
{
    if (count > INT32_MAX - w->now.document_tokens)
        return err_set(ERR_DATA, "a document has more than %d tokens, which the file format cannot express", INT32_MAX);
    uint16_t narrow[512];
    for (int64_t from = 0, n; from < count; from += n) {
        n = count - from < 512 ? count - from : 512;
        int32_t highest = 0, any = 0;
        for (int64_t i = 0; i < n; i++) {
            int32_t id = ids[from + i];
            narrow[i] = (uint16_t)id;
            highest = id > highest ? id : highest;
            any |= id;
        }
        ASSERT(any >= 0 && (w->type == TOKEN_I32 || highest <= UINT16_MAX));
        TRY(w->type == TOKEN_I32 ? put(&w->tokens, ids + from, 4 * n) : put(&w->tokens, narrow, 2 * n));
    }
    w->now.document_tokens += count;
    w->now.tokens += count;
    return ERR_OK;
}

Err indexed_end_document(IndexedWriter *w)
{
    int32_t length = (int32_t)w->now.document_tokens;
    TRY(put(&w->lengths, &length, 4));
    w->now.sequences += length > 0;
    w->now.documents++;
    w->now.document_tokens = 0;
    return ERR_OK;
}

void indexed_made_with(IndexedWriter *w, uint32_t tokenizer_crc)
{
    w->made_with = true;
    w->tokenizer_crc = tokenizer_crc;
}

int64_t indexed_written_tokens(const IndexedWriter *w) { return w->now.tokens; }

IndexedMark indexed_now(const IndexedWriter *w)
{
    IndexedMark m = w->now;
    m.tokens_crc = stream_crc(&w->tokens);
    m.lengths_crc = stream_crc(&w->lengths);
    return m;
}

Err indexed_sync(IndexedWriter *w)
{
    TRY(stream_sync(&w->tokens));
    TRY(stream_sync(&w->lengths));
    w->keep = true;
    return ERR_OK;
}

/* ---- the index ---- */

typedef enum { LENGTHS, OFFSETS, DOCUMENTS } IndexPart;

/* One of the index's three arrays, from a piece of the documents' lengths. *at: where the array has got to. */
static Err put_part(IndexedWriter *w, IndexPart part, const int32_t *lengths, int64_t count, int64_t *at)
{
    for (int64_t d = 0; d < count; d++) {
        bool sequence = lengths[d] > 0;
        if (part == LENGTHS && sequence) TRY(put(&w->index, &lengths[d], 4));
        if (part == OFFSETS && sequence) TRY(put(&w->index, at, 8));
        if (part == OFFSETS) *at += (int64_t)lengths[d] * w->token_bytes;
        if (part == DOCUMENTS) *at += sequence;
        if (part == DOCUMENTS) TRY(put(&w->index, at, 8));
    }
    return ERR_OK;
}

/* `piece`: room for BUFFER_BYTES */
static Err put_array(IndexedWriter *w, int fd, IndexPart part, int32_t *piece)
{
    int64_t at = 0, got = BUFFER_BYTES;
    if (part == DOCUMENTS) TRY(put(&w->index, &at, 8));
    for (int64_t offset = 0; got == BUFFER_BYTES; offset += got) {
        TRY(file_read_some(fd, w->lengths_path, offset, piece, BUFFER_BYTES, &got));
        TRY(put_part(w, part, piece, got / 4, &at));
    }
    return ERR_OK;
}

static Err put_index(IndexedWriter *w, int fd, int32_t *piece)
{
    int64_t version = INDEXED_VERSION, entries = w->now.documents + 1;
    uint8_t type = (uint8_t)w->type;
    TRY(put(&w->index, "MMIDIDX\0", 9));
    TRY(put(&w->index, &version, 8));
    TRY(put(&w->index, &type, 1));
    TRY(put(&w->index, &w->now.sequences, 8));
    TRY(put(&w->index, &entries, 8));
    TRY(put_array(w, fd, LENGTHS, piece));
    TRY(put_array(w, fd, OFFSETS, piece));
    return put_array(w, fd, DOCUMENTS, piece);
}

/* The tokens are complete, and nobody writes them any more: their buffer takes the lengths. */
static Err write_index(IndexedWriter *w)
{
    int fd;
    int64_t size_bytes;
    TRY(file_open_regular(w->lengths_path, &fd, &size_bytes));
    Err err = file_create(w->index_path, &w->index.file);
    if (!err) err = put_index(w, fd, (int32_t *)w->tokens.buffer);
    if (!err) err = stream_close(&w->index);
    close(fd);
    return err;
}

/* Both files are complete. */
static Err write_sums(IndexedWriter *w)
{
    char text[INDEXED_SUMS_MAX];
    int64_t bin_bytes = w->now.tokens * w->token_bytes;
    int64_t idx_bytes = INDEXED_HEADER_BYTES + 12 * w->now.sequences + 8 * (w->now.documents + 1);
    int n = w->made_with ? snprintf(text, sizeof text, INDEXED_MADE_WITH, w->tokenizer_crc) : 0;
    n += snprintf(text + n, sizeof text - (size_t)n, INDEXED_SUMS, w->tokens.crc, (long long)bin_bytes, w->index.crc,
                  (long long)idx_bytes);
    return file_replace(w->sums_path, text, n);
}

static Err publish(IndexedWriter *w)
{
    TRY(file_remove_tree(w->idx));
    TRY(file_sync_dir(w->dir));
    TRY(file_rename(w->tokens_path, w->bin));
    TRY(file_rename(w->sums_path, w->crc));
    TRY(file_rename(w->index_path, w->idx));
    TRY(file_sync_dir(w->dir));
    return file_remove_tree(w->part);
}

static Err finish(IndexedWriter *w)
{
    if (w->now.document_tokens) TRY(indexed_end_document(w));
    if (w->now.tokens == 0) return err_set(ERR_DATA, "there are no tokens to write to '%s'", w->bin);
    TRY(stream_close(&w->tokens));
    TRY(stream_close(&w->lengths));
    TRY(write_index(w));
    TRY(write_sums(w));
    return publish(w);
}

static void close_files(IndexedWriter *w)
{
    Stream *streams[] = { &w->tokens, &w->lengths, &w->index };
    for (int i = 0; i < 3; i++)
        if (streams[i]->file.fd >= 0) close(streams[i]->file.fd);
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
    ErrKept why;
    if (!w) return;
    close_files(w);
    err_keep(&why); /* it is being reported already; removing is best effort */
    if (!w->keep && file_remove_tree(w->part) != ERR_OK) err_again(&why, ERR_IO);
    writer_free(w);
}
