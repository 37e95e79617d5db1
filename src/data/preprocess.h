/*
 * Text to token files: documents are read, encoded by several threads, and written in input order,
 * so the result does not depend on the number of threads.
 *
 *   text     each file is one document; with split_blank_lines each paragraph is one (the blank
 *            lines, and the line end before them, belong to none)
 *   jsonl    each line is an object, whose member `key` is a document; empty lines are skipped
 *   auto     jsonl of each input whose first line is a JSON object, else text
 *
 * Inputs may be compressed, or stdin (input.h). Memory: some 5 MiB a thread, whatever the lengths of files, lines and
 * documents (cut.h says where that ends).
 *
 * From time to time what is done is made safe in PREFIX.part. A job that was interrupted, in whatever way, goes on from
 * there when it is started again, to the same bytes (resume.h); one that reads stdin does not.
 *
 * Where to read on: cut.h (reading), indexed.h (writing).
 */
#ifndef MEGATRAIN_DATA_PREPROCESS_H
#define MEGATRAIN_DATA_PREPROCESS_H

#include <signal.h>
#include <stdint.h>

#include "base/err.h"
#include "data/input.h"

typedef struct {
    const char *const *inputs;
    int input_count;
    const char *tokenizer; /* argument of tokenizer_open */
    const char *output;    /* the PREFIX of .bin and .idx; folders are made */
    InputFormat format;
    const char *key;   /* member of JSON lines (jsonl.h: JsonlKey); NULL: "text" */
    bool skip_missing; /* JSON lines where that is missing or null are no documents, and are counted */
    bool append_eod;   /* every document that has tokens ends with an end-of-document id */
    bool split_blank_lines;
    int threads;                       /* 0: as many as OpenMP would use */
    double save_every_s;               /* how often work is made safe; 0: never */
    const volatile sig_atomic_t *stop; /* a signal: the job ends, and what is done is made safe; may be NULL */
} PreprocessOptions;

typedef struct {
    int64_t documents, empty_documents, tokens, input_bytes;
    int64_t missing_lines; /* how many JSON lines were passed over by skip_missing */
    int64_t invalid_bytes; /* how many bytes were no valid UTF-8 and became byte tokens */
    int32_t vocab;
    const char *token_type; /* "u16" or "i32" */
} PreprocessResult;

/*
 * The output appears whole or not at all. Invalid UTF-8 is kept byte by byte, with a warning that
 * says how much.
 * Errors: ERR_DATA naming file and line (input missing or damaged, not JSON, no tokens at all, tokenizer
 * without an end of document where one is wanted), ERR_CONFIG (the key; PREFIX.part is a job's with other options),
 * ERR_STORAGE if another process writes the same files, ERR_IO for the output; when asked to stop ERR_INTERRUPTED
 * by SIGINT, ERR_STOPPED by another signal.
 */
Err preprocess_run(const PreprocessOptions *o, PreprocessResult *result);

#endif
