/*
 * Cutting input files into chunks that can be encoded apart: at ends of lines or documents, or inside a long document
 * where tokenizer_cut says that it changes no id. Chunks follow one another in the order of the inputs, and depend on
 * nothing but the inputs.
 *
 * A chunk holds CHUNK_BYTES; a JSON line or a paragraph up to LONG_BYTES is kept whole, a longer one comes in several
 * chunks: so memory does not depend on lengths of lines or documents, except for text in which the tokenizer finds no
 * place to cut.
 */
#ifndef MEGATRAIN_DATA_CUT_H
#define MEGATRAIN_DATA_CUT_H

#include "data/input.h"
#include "data/jsonl.h"
#include "data/tokenizer.h"

enum { CHUNK_BYTES = 256 << 10, LONG_BYTES = 1 << 20 };

typedef enum {
    CHUNK_DOCUMENT,   /* a document, or a part of one */
    CHUNK_PARAGRAPHS, /* documents with blank lines between them */
    CHUNK_LINES       /* JSON lines */
} ChunkKind;

/* A place in the inputs: which input, and how many bytes and lines of its text lie before the place. The caller counts
 * the lines. */
typedef struct {
    int64_t input, offset, lines;
} InputPlace;

typedef struct {
    ChunkKind kind;
    char *text; /* the chunk owns it; it is used again */
    int64_t size, capacity;
    bool continues;         /* it begins inside the document that the chunk before has left open */
    bool open;              /* its last document goes on in the next chunk */
    bool safe;              /* a later process can begin behind it */
    int64_t input;          /* the input that it comes from */
    InputPlace next;        /* where what follows it begins */
    int64_t consumed_bytes; /* how many bytes of all files were read up to its end */
    int64_t lines;          /* how many lines end in it; in CHUNK_LINES the caller counts them */
    int64_t missing;        /* how many of these have no text (JsonlKey.skip_missing); counted as they are */
    bool at_line;           /* a failure concerns the line behind those */
} Chunk;

typedef struct {
    const char *const *inputs;
    int64_t input_count;
    InputStat *stats; /* [input_count] is filled for each input when it is opened */
    /* Says where text may be cut. NULL: wherever no pattern of words is cut (pretoken.h). */
    const Tokenizer *tokenizer;
    ChunkKind kind;
    bool tell_lines; /* an input that begins as JSON lines is CHUNK_LINES, and that is said */
    bool any_bytes;  /* INPUT_BYTES: inputs are taken as they are, also what is no text (not_text.h) */
    JsonlKey key;    /* the member of JSON lines that holds the text */
} CutOptions;

/* The hint when a line of an input that was said to be JSON lines is no JSON. */
#define CUT_TEXT_HINT "if it is no file of JSON lines: --format text takes it as it is"

typedef struct Cutter Cutter;

/* Cuts from `place` on. consumed_bytes: what the files before it have. */
Err cutter_open(const CutOptions *o, InputPlace place, int64_t consumed_bytes, Cutter **out);
void cutter_close(Cutter *c); /* NULL is fine */

/* Gives the next chunk; after the last *more = false, and there is no chunk. ERR_DATA names the file, or with
 * out->at_line the column. ERR_MEMORY. */
Err cutter_next(Cutter *c, Chunk *out, bool *more);

/* The end of the line that starts at `text`: its line feed, or `end`. */
const char *line_end(const char *text, const char *end);
bool line_is_blank(const char *line, const char *stop);

#endif
