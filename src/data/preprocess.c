/*
 * The input is cut into chunks of about CHUNK_BYTES: at ends of lines or documents, or inside a
 * long text document where tokenizer_cut says that it changes no id. A batch of chunks is encoded
 * in parallel and then written in order by one thread; that is all the order there is to keep.
 */
#include "data/preprocess.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/file.h"
#include "base/log.h"
#include "data/grow.h"
#include "data/indexed.h"
#include "data/jsonl.h"
#include "data/tokenizer.h"

enum { CHUNK_BYTES = 256 << 10, CHUNKS_PER_THREAD = 8, MESSAGE_BYTES = 512 };

typedef struct {
    const char *path, *text; /* in a map */
    int64_t offset, size;    /* in the file */
    bool ends_document;      /* text: this is the last chunk of the file */
    FileMap map;             /* the file's, in its last chunk: released with it */

    TokenList tokens;
    int64_t *ends; /* of documents: tokens of this chunk up to there */
    int64_t end_count, end_capacity;
    int64_t empty, invalid_bytes;
    JsonlText line;
    Err err;
    char message[MESSAGE_BYTES];
} Chunk;

typedef struct {
    const PreprocessOptions *o;
    Tokenizer *tokenizer;
    IndexedWriter *writer;
    Encoder **encoders; /* one a thread */
    Chunk *chunks;
    int threads, chunk_limit, chunk_count;
    int next_input;
    FileMap map; /* of the input being cut; path NULL: none */
    int64_t at;
    PreprocessResult *result;
} Job;

/* ---- cutting ---- */

static const char *line_end(const char *text, const char *end)
{
    const char *stop = memchr(text, '\n', (size_t)(end - text));
    return stop ? stop : end;
}

static bool is_blank_line(const char *line, const char *stop)
{
    while (line < stop && (*line == ' ' || *line == '\t' || *line == '\r')) line++;
    return line == stop;
}

/* The first line start after about CHUNK_BYTES; for paragraphs one that begins a blank line. */
static int64_t cut_at_line(const char *text, int64_t size, bool blank)
{
    const char *end = text + size, *at = line_end(text + CHUNK_BYTES, end);
    while (at < end) {
        const char *start = ++at;
        at = line_end(start, end);
        if (!blank || is_blank_line(start, at)) return start - text;
    }
    return size;
}

/* Where a text document may be cut; looks further and further when there is no good place. */
static int64_t cut_inside_text(const Tokenizer *t, const char *text, int64_t size)
{
    for (int64_t window = CHUNK_BYTES; window < size; window *= 2) {
        int64_t cut = tokenizer_cut(t, text, window);
        if (cut > 0) return cut;
    }
    return size;
}

static int64_t chunk_size(const Job *j, const char *text, int64_t left)
{
    if (left <= CHUNK_BYTES) return left;
    if (j->o->format == INPUT_JSONL) return cut_at_line(text, left, false);
    if (j->o->split_blank_lines) return cut_at_line(text, left, true);
    return cut_inside_text(j->tokenizer, text, left);
}

static Err next_file(Job *j)
{
    TRY_AS(ERR_DATA, file_map(j->o->inputs[j->next_input], &j->map));
    j->next_input++;
    j->at = 0;
    j->result->input_bytes += j->map.size_bytes;
    return ERR_OK;
}

/* Prepares the next chunk of the input; the file goes with its last chunk. */
static void cut_chunk(Job *j, Chunk *c)
{
    const char *text = j->map.data;
    int64_t left = j->map.size_bytes - j->at;
    c->path = j->o->inputs[j->next_input - 1];
    c->text = text ? text + j->at : "";
    c->offset = j->at;
    c->size = chunk_size(j, c->text, left);
    c->ends_document = c->size == left;
    c->tokens.count = c->end_count = c->empty = c->invalid_bytes = 0;
    c->err = ERR_OK;
    j->at += c->size;
    if (c->size < left) return;
    c->map = j->map;
    j->map = (FileMap){ 0 };
}

static Err cut_batch(Job *j)
{
    for (j->chunk_count = 0; j->chunk_count < j->chunk_limit; j->chunk_count++) {
        if (!j->map.path && j->next_input == j->o->input_count) break;
        if (!j->map.path) TRY(next_file(j));
        cut_chunk(j, &j->chunks[j->chunk_count]);
    }
    return ERR_OK;
}

/* ---- encoding (several threads, each with chunks and an encoder of its own) ---- */

static Err encode_part(const Job *j, Chunk *c, Encoder *e, const char *text, int64_t size, bool ends)
{
    TRY(encoder_run(e, text, size, &c->tokens, &c->invalid_bytes));
    if (!ends) return ERR_OK;
    if (size == 0) c->empty++;
    else if (j->o->append_eod) TRY(token_list_add(&c->tokens, tokenizer_eod(j->tokenizer)));
    TRY(grow_to(&c->ends, &c->end_capacity, c->end_count + 1));
    c->ends[c->end_count++] = c->tokens.count;
    return ERR_OK;
}

static Err encode_paragraphs(const Job *j, Chunk *c, Encoder *e)
{
    const char *end = c->text + c->size, *first = NULL, *last = NULL;
    for (const char *line = c->text, *stop; line < end; line = stop + 1) {
        stop = line_end(line, end);
        bool blank = is_blank_line(line, stop);
        if (!blank) {
            if (!first) first = line;
            last = stop;
        } else if (first) {
            TRY(encode_part(j, c, e, first, last - first, true));
            first = NULL;
        }
    }
    return first ? encode_part(j, c, e, first, last - first, true) : ERR_OK;
}

static int64_t line_number(const Chunk *c, const char *line)
{
    int64_t n = 1;
    for (const char *p = c->text - c->offset; p < line; p++) n += *p == '\n';
    return n;
}

static Err encode_lines(const Job *j, Chunk *c, Encoder *e)
{
    const char *end = c->text + c->size, *key = j->o->key ? j->o->key : "text";
    for (const char *line = c->text, *stop; line < end; line = stop + 1) {
        stop = line_end(line, end);
        if (is_blank_line(line, stop)) continue;
        Err err = jsonl_member(line, stop - line, key, &c->line);
        if (err) return err_prefix(err, "line '%lld'", (long long)line_number(c, line));
        TRY(encode_part(j, c, e, c->line.text, c->line.size, true));
    }
    return ERR_OK;
}

static void encode_chunk(const Job *j, Chunk *c, Encoder *e)
{
    if (j->o->format == INPUT_JSONL) c->err = encode_lines(j, c, e);
    else if (j->o->split_blank_lines) c->err = encode_paragraphs(j, c, e);
    else c->err = encode_part(j, c, e, c->text, c->size, c->ends_document);
    /* failures are recorded per thread: carry the text to the one that reports it */
    if (c->err) snprintf(c->message, sizeof c->message, "%s", err_message());
}

static void encode_batch(Job *j)
{
#pragma omp parallel for schedule(dynamic, 1) num_threads(j->threads)
    for (int i = 0; i < j->chunk_count; i++)
        encode_chunk(j, &j->chunks[i], j->encoders[omp_get_thread_num()]);
}

/* ---- writing ---- */

/* Gives the pages of a chunk back, so that a large input does not fill memory. */
static void let_go(Chunk *c)
{
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)c->text;
    uintptr_t from = start / page * page, to = (start + (uintptr_t)c->size) / page * page;
    if (c->size > 0 && to > from) madvise((void *)from, to - from, MADV_DONTNEED);
    file_unmap(&c->map);
}

static Err write_chunk(Job *j, Chunk *c)
{
    int64_t from = 0;
    if (c->err) return err_set(c->err, "'%s': %s", c->path, c->message);
    for (int64_t i = 0; i < c->end_count; from = c->ends[i++]) {
        TRY(indexed_add_tokens(j->writer, c->tokens.ids + from, c->ends[i] - from));
        TRY(indexed_end_document(j->writer));
    }
    TRY(indexed_add_tokens(j->writer, c->tokens.ids + from, c->tokens.count - from));
    j->result->documents += c->end_count;
    j->result->empty_documents += c->empty;
    j->result->invalid_bytes += c->invalid_bytes;
    return ERR_OK;
}

static Err write_batch(Job *j)
{
    for (int i = 0; i < j->chunk_count; i++) {
        TRY(write_chunk(j, &j->chunks[i]));
        let_go(&j->chunks[i]);
    }
    return ERR_OK;
}

static Err run_batches(Job *j)
{
    for (;;) {
        TRY(cut_batch(j));
        if (j->chunk_count == 0) break;
        encode_batch(j);
        TRY(write_batch(j));
    }
    j->result->tokens = indexed_written_tokens(j->writer);
    if (j->result->tokens > 0) return ERR_OK;
    err_set(ERR_DATA, "the input holds no text: '%s'%s", j->o->inputs[0],
            j->o->input_count > 1 ? " and the others" : "");
    return ERR_DATA;
}

/* ---- the whole ---- */

static Err open_job(Job *j)
{
    const PreprocessOptions *o = j->o;
    TRY(tokenizer_open(o->tokenizer, &j->tokenizer));
    if (o->append_eod && tokenizer_eod(j->tokenizer) < 0) {
        err_set(ERR_DATA, "tokenizer '%s' has no id that ends a document", o->tokenizer);
        err_hint("leave out --append-eod, or use a tokenizer with <|endoftext|>");
        return ERR_DATA;
    }
    j->threads = o->threads > 0 ? o->threads : omp_get_max_threads();
    j->chunk_limit = j->threads * CHUNKS_PER_THREAD;
    j->encoders = calloc((size_t)j->threads, sizeof *j->encoders);
    j->chunks = calloc((size_t)j->chunk_limit, sizeof *j->chunks);
    if (!j->encoders || !j->chunks) return err_set(ERR_MEMORY, "no memory for '%d' threads", j->threads);
    for (int i = 0; i < j->threads; i++) TRY(encoder_open(j->tokenizer, &j->encoders[i]));
    j->result->vocab = tokenizer_vocab(j->tokenizer);
    TokenType type = indexed_type_for(j->result->vocab);
    j->result->token_type = token_type_name(type);
    return indexed_create(o->output, type, &j->writer);
}

static void close_job(Job *j)
{
    indexed_abandon(j->writer);
    for (int i = 0; i < j->chunk_limit && j->chunks; i++) {
        file_unmap(&j->chunks[i].map);
        free(j->chunks[i].tokens.ids);
        free(j->chunks[i].ends);
        free(j->chunks[i].line.text);
    }
    for (int i = 0; i < j->threads && j->encoders; i++) encoder_close(j->encoders[i]);
    file_unmap(&j->map);
    free(j->chunks);
    free(j->encoders);
    tokenizer_close(j->tokenizer);
}

Err preprocess_run(const PreprocessOptions *o, PreprocessResult *result)
{
    Job j = { .o = o, .result = result };
    ASSERT(o->input_count > 0);
    *result = (PreprocessResult){ 0 };
    Err err = open_job(&j);
    if (!err) err = run_batches(&j);
    if (!err) {
        err = indexed_finish(j.writer);
        j.writer = NULL;
    }
    close_job(&j);
    if (!err && result->invalid_bytes)
        log_warn("'%lld' bytes of the input were not UTF-8 and were kept as byte tokens",
                 (long long)result->invalid_bytes);
    return err;
}
