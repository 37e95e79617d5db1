/*
 * Text to token files: documents are read, encoded by several threads, and written in input order,
 * so the result does not depend on the number of threads.
 *
 *   text     each file is one document; with split_blank_lines each paragraph is one (the blank
 *            lines, and the line end before them, belong to none)
 *   jsonl    each line is an object, whose member `key` is a document; empty lines are skipped
 *
 * Memory: the inputs are mapped and let go piece by piece. A text document may be of any size; a
 * paragraph or a JSON line must fit into memory.
 */
#ifndef MEGATRAIN_DATA_PREPROCESS_H
#define MEGATRAIN_DATA_PREPROCESS_H

#include <stdint.h>

#include "base/err.h"

typedef enum { INPUT_TEXT, INPUT_JSONL } InputFormat;

typedef struct {
    const char *const *inputs;
    int input_count;
    const char *tokenizer; /* as tokenizer_open takes it */
    const char *output;    /* PREFIX of .bin and .idx; folders are made */
    InputFormat format;
    const char *key; /* jsonl; NULL: "text" */
    bool append_eod; /* an end-of-document id after every document that has tokens */
    bool split_blank_lines;
    int threads; /* 0: as many as OpenMP would use */
} PreprocessOptions;

typedef struct {
    int64_t documents, empty_documents, tokens, input_bytes;
    int64_t invalid_bytes; /* that were not UTF-8 and became byte tokens */
    int32_t vocab;
    const char *token_type; /* "u16" or "i32" */
} PreprocessResult;

/*
 * The output appears whole or not at all. Invalid UTF-8 is kept byte by byte, with a warning that
 * says how much.
 * Errors: ERR_DATA naming file and line (input missing, not JSON, no tokens at all, tokenizer
 * without an end of document where one is wanted), ERR_IO for the output.
 */
Err preprocess_run(const PreprocessOptions *o, PreprocessResult *result);

#endif
