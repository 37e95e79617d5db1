/* See cut.h. What is read beyond the end of a chunk waits in `ahead` for the next one. */
#include "data/cut.h"

#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "data/grow.h"
#include "data/not_text.h"
#include "data/pretoken.h"

enum { PIECE_BYTES = 64 << 10 }; /* a long line is read in pieces of this size */

struct Cutter {
    CutOptions o;
    InputPlace at;
    Input *input;            /* NULL: the next one is to be opened */
    ChunkKind kind;          /* what the input holds */
    bool told;               /* it was said that an input holds JSON lines */
    bool marked;             /* the input begins with a byte order mark */
    int64_t consumed_before; /* bytes of the files before it */
    char *ahead;
    int64_t ahead_size, ahead_capacity;
    bool open; /* the last chunk left a document open */
    bool long_line;
    JsonlScan scan; /* how far the long line was read */
    JsonlText text; /* decoded from it, and not yet in a chunk */
};

const char *line_end(const char *text, const char *end)
{
    const char *stop = memchr(text, '\n', (size_t)(end - text));
    return stop ? stop : end;
}

bool line_is_blank(const char *line, const char *stop)
{
    while (line < stop && (*line == ' ' || *line == '\t' || *line == '\r')) line++;
    return line == stop;
}

/* ---- reading ahead ---- */

/* Bytes until `out` has `size` of them; fewer, and *ended, only at the end of the file. */
static Err fill(Cutter *c, Chunk *out, int64_t size, bool *ended)
{
    int64_t got, waiting = c->ahead_size < size - out->size ? c->ahead_size : size - out->size;
    TRY(grow_to(&out->text, &out->capacity, size));
    if (waiting > 0) {
        memcpy(out->text + out->size, c->ahead, (size_t)waiting);
        out->size += waiting;
        c->ahead_size -= waiting;
        memmove(c->ahead, c->ahead + waiting, (size_t)c->ahead_size);
    }
    *ended = false;
    if (out->size == size) return ERR_OK;
    TRY(input_read(c->input, out->text + out->size, size - out->size, &got));
    out->size += got;
    *ended = out->size < size;
    return ERR_OK;
}

/* Leaves only the first `size` bytes in the chunk. */
static Err put_back(Cutter *c, Chunk *out, int64_t size)
{
    int64_t rest = out->size - size;
    TRY(grow_to(&c->ahead, &c->ahead_capacity, c->ahead_size + rest + 1));
    memmove(c->ahead + rest, c->ahead, (size_t)c->ahead_size);
    memcpy(c->ahead, out->text + size, (size_t)rest);
    c->ahead_size += rest;
    out->size = size;
    return ERR_OK;
}

/* ---- where to cut; 0: nowhere ---- */

static int64_t last_line_start(const char *text, int64_t size)
{
    const char *last = memrchr(text, '\n', (size_t)size);
    return last ? last + 1 - text : 0;
}

/* The last blank line that is there whole: where it starts. */
static int64_t last_blank_line(const char *text, int64_t size)
{
    const char *stop = memrchr(text, '\n', (size_t)size);
    while (stop && stop > text) {
        const char *before = memrchr(text, '\n', (size_t)(stop - text));
        if (!before) return 0;
        if (line_is_blank(before + 1, stop)) return before + 1 - text;
        stop = before;
    }
    return 0;
}

/* solid: behind something that is no blank, as blanks at its end may not belong to a paragraph. */
static int64_t cut_inside(const Cutter *c, const char *text, int64_t size, bool solid)
{
    int64_t at = size;
    do {
        at = c->o.tokenizer ? tokenizer_cut(c->o.tokenizer, text, at) : split_cut(text, at);
    } while (solid && at > 0 && strchr(" \t\r\n", text[at - 1]));
    return at;
}

/* ---- chunks of plain text, of paragraphs, of lines ---- */

/* The chunk is complete; ended: and with it the file. */
static Err finish(Cutter *c, Chunk *out, bool ended)
{
    out->safe = !out->open || c->kind == CHUNK_DOCUMENT;
    out->consumed_bytes = c->consumed_before + input_consumed(c->input);
    if (ended) {
        c->consumed_before = out->consumed_bytes;
        c->at = (InputPlace){ .input = c->at.input + 1 };
        input_close(c->input);
        c->input = NULL;
    }
    c->open = out->open;
    out->next = c->at;
    return ERR_OK;
}

/* The same for a chunk that is the first `size` bytes of what was read; ended: nothing follows that. */
static Err finish_at(Cutter *c, Chunk *out, int64_t size, bool ended)
{
    TRY(put_back(c, out, size));
    c->at.offset += size;
    return finish(c, out, ended && c->ahead_size == 0);
}

static Err cut_document(Cutter *c, Chunk *out)
{
    bool ended;
    for (int64_t want = CHUNK_BYTES;; want *= 2) {
        TRY(fill(c, out, want, &ended));
        if (ended && want == CHUNK_BYTES) return finish_at(c, out, out->size, true);
        int64_t at = cut_inside(c, out->text, out->size, false);
        if (at == 0 && !ended) continue;
        out->open = at > 0;
        return finish_at(c, out, at > 0 ? at : out->size, ended);
    }
}

static Err cut_paragraphs(Cutter *c, Chunk *out)
{
    bool ended;
    for (int64_t want = CHUNK_BYTES;; want *= 2) {
        TRY(fill(c, out, want, &ended));
        if (ended && want == CHUNK_BYTES) return finish_at(c, out, out->size, true);
        int64_t at = last_blank_line(out->text, out->size);
        if (at == 0 && want >= LONG_BYTES) {
            at = cut_inside(c, out->text, out->size, true);
            out->open = at > 0;
        }
        if (at > 0 || ended) return finish_at(c, out, at > 0 ? at : out->size, ended);
    }
}

/* ---- a line of more than LONG_BYTES: its text is decoded here ---- */

/* Reads on in the long line until `want` bytes of its text are decoded or it ends. */
static Err read_long(Cutter *c, Chunk *out, int64_t want, bool *line_ended, bool *file_ended)
{
    for (*line_ended = *file_ended = false; c->text.size < want && !*line_ended;) {
        out->size = 0;
        TRY(fill(c, out, PIECE_BYTES, file_ended));
        const char *end = out->text + out->size, *stop = line_end(out->text, end);
        int64_t size = stop - out->text;
        *line_ended = stop < end || *file_ended;
        out->at_line = true;
        TRY(jsonl_feed(&c->scan, out->text, size, &c->text));
        out->at_line = false;
        TRY(put_back(c, out, stop < end ? size + 1 : size));
        c->at.offset += out->size;
    }
    *file_ended = *file_ended && c->ahead_size == 0;
    return ERR_OK;
}

/* The chunk gets the first bytes of the decoded text. */
static Err take_text(Cutter *c, Chunk *out, int64_t size, bool open)
{
    TRY(grow_to(&out->text, &out->capacity, size + 1));
    memcpy(out->text, c->text.text, (size_t)size);
    c->text.size -= size;
    memmove(c->text.text, c->text.text + size, (size_t)c->text.size);
    out->kind = CHUNK_DOCUMENT;
    out->size = size;
    out->open = open;
    return ERR_OK;
}

static Err end_long(Cutter *c, Chunk *out, bool file_ended)
{
    out->size = 0;
    c->long_line = false;
    if (!jsonl_blank(&c->scan)) {
        out->at_line = true;
        TRY(jsonl_end(&c->scan, &c->text));
        out->at_line = false;
        out->missing = jsonl_is_missing(&c->scan);
        if (!out->missing) TRY(take_text(c, out, c->text.size, false));
    }
    out->lines = 1;
    return finish(c, out, file_ended);
}

static Err cut_long(Cutter *c, Chunk *out)
{
    bool line_ended, file_ended;
    for (int64_t want = CHUNK_BYTES;; want *= 2) {
        TRY(read_long(c, out, want, &line_ended, &file_ended));
        if (line_ended) return end_long(c, out, file_ended);
        int64_t at = cut_inside(c, c->text.text, c->text.size, false);
        if (at == 0) continue;
        TRY(take_text(c, out, at, true));
        return finish(c, out, false);
    }
}

static Err cut_lines(Cutter *c, Chunk *out)
{
    bool ended;
    for (int64_t want = CHUNK_BYTES; want <= LONG_BYTES; want *= 2) {
        TRY(fill(c, out, want, &ended));
        if (ended) return finish_at(c, out, out->size, true);
        int64_t at = last_line_start(out->text, out->size);
        if (at > 0) return finish_at(c, out, at, false);
    }
    TRY(put_back(c, out, 0));
    c->long_line = true;
    c->text.size = 0;
    jsonl_begin(&c->scan, &c->o.key);
    return cut_long(c, out);
}

/* ---- the whole ---- */

static const char byte_order_mark[] = "\xEF\xBB\xBF";

static bool has_mark(const char *text, int64_t size) { return size >= 3 && !memcmp(text, byte_order_mark, 3); }

/* A list of objects, as many data sets come: its brackets and names would be trained on. */
static bool is_json_list(const char *text, int64_t size)
{
    const char *end = text + size;
    if (has_mark(text, size)) text += 3;
    while (text < end && strchr(" \t\r\n", *text) && *text) text++;
    if (text == end || *text++ != '[') return false;
    while (text < end && strchr(" \t\r\n", *text) && *text) text++;
    return text < end && *text == '{';
}

static Err refuse_list(const Cutter *c)
{
    const char *path = c->o.inputs[c->at.input];
    const bool quotable = strcmp(path, "-") && !strchr(path, '\'');
    err_set(ERR_DATA, "'%s' is one JSON list, not a line for each document", path);
    return err_hint(
        "jq -c '.[]' '%s' | megatrain preprocess --input - --format jsonl --key '%s' --tokenizer T --output "
        "PREFIX  # or --format text, which takes it as it is",
        quotable ? path : "FILE", strchr(c->o.key.text, '\'') ? "KEY" : c->o.key.text);
}

static Err choose_kind(Cutter *c)
{
    const char *text;
    int64_t size;
    c->kind = c->o.kind;
    c->marked = false;
    if (c->o.any_bytes) return ERR_OK;
    TRY(input_peek(c->input, &text, &size));
    c->marked = has_mark(text, size);
    TRY(not_text_check(c->o.inputs[c->at.input], c->o.key.text, text, size));
    if ((c->o.tell_lines || c->kind == CHUNK_LINES) && is_json_list(text, size)) return refuse_list(c);
    if (!c->o.tell_lines || !jsonl_begins(text, size)) return ERR_OK;
    c->kind = CHUNK_LINES;
    if (!c->told)
        log_info("'%s' holds JSON lines: the member '%s' of each is its text (--format text: all as it is)",
                 c->o.inputs[c->at.input], c->o.key.text);
    c->told = true;
    return ERR_OK;
}

/* A byte order mark at the beginning of a file is no text. */
static Err pass_mark(Cutter *c)
{
    if (!c->marked) return ERR_OK;
    c->at.offset = 3;
    return input_skip(c->input, 3);
}

static Err open_next(Cutter *c)
{
    const char *path = c->o.inputs[c->at.input];
    InputStat *known = &c->o.stats[c->at.input];
    TRY(input_open(path, &c->input));
    TRY(choose_kind(c));
    if (c->at.offset > 0) c->open = c->kind == CHUNK_DOCUMENT; /* begun by an earlier process */
    const InputStat opened = input_opened(c->input);
    if (c->at.offset > 0 && !input_stat_same(opened, *known)) {
        err_set(ERR_DATA, "'%s' changed just as the job went on", path);
        return err_hint("start it again");
    }
    *known = opened;
    return c->at.offset > 0 ? input_skip(c->input, c->at.offset) : pass_mark(c);
}

Err cutter_next(Cutter *c, Chunk *out, bool *more)
{
    *more = c->at.input < c->o.input_count;
    if (!*more) return ERR_OK;
    out->size = out->lines = out->missing = 0;
    out->open = out->at_line = false;
    out->input = c->at.input;
    if (!c->input) TRY(open_next(c));
    out->kind = c->kind;
    out->continues = c->open;
    if (c->long_line) return cut_long(c, out);
    if (c->kind == CHUNK_LINES) return cut_lines(c, out);
    return c->kind == CHUNK_PARAGRAPHS ? cut_paragraphs(c, out) : cut_document(c, out);
}

Err cutter_open(const CutOptions *o, InputPlace place, int64_t consumed_bytes, Cutter **out)
{
    Cutter *c = calloc(1, sizeof *c);
    if (!c) return err_set(ERR_MEMORY, "no memory for reading text");
    *c = (Cutter){ .o = *o, .at = place, .consumed_before = consumed_bytes };
    *out = c;
    return ERR_OK;
}

void cutter_close(Cutter *c)
{
    if (!c) return;
    input_close(c->input);
    free(c->ahead);
    free(c->text.text);
    free(c);
}
