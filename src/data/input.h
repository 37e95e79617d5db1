/*
 * A file of text read front to back, plain or compressed by gzip or zstd; "-" is stdin. Which of them is seen from its
 * first bytes (no text begins like that), not from its name. Several compressed members one behind the other are one
 * text.
 * Memory: a buffer, and what the decompressor needs (zstd: up to 128 MiB, if the file was compressed with a long
 * window).
 */
#ifndef MEGATRAIN_DATA_INPUT_H
#define MEGATRAIN_DATA_INPUT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/arena.h"
#include "base/err.h"

/* What is in the inputs of a job; AUTO: JSON lines in those that begin as such (jsonl_begins), text in the others. */
typedef enum { INPUT_TEXT, INPUT_JSONL, INPUT_AUTO } InputFormat;

/*
 * The files of a job, from words that name files, folders or stdin: of a folder all files in it and in its folders, in
 * the order of their names' bytes, but for those whose name begins with a dot. ERR_DATA: a folder without files, or
 * that cannot be read. (What names no folder is looked at when it is opened.)
 */
typedef struct {
    const char **paths;
    int count;
    int64_t capacity;
    SetupArena mem;
} InputFiles;

Err input_files_open(const char *const *words, int count, InputFiles *out);
void input_files_close(InputFiles *f); /* all zero is fine */
/* ERR_CONFIG: the output lies in a folder of the inputs. */
Err input_files_check_output(const char *const *words, int count, const char *output);

/* What tells whether a file is still the same; of stdin nothing does, and both are 0. */
typedef struct {
    int64_t size_bytes, mtime_ns;
} InputStat;

/* ERR_DATA if the path is no regular file, nor "-". */
Err input_stat(const char *path, InputStat *out);

bool input_is_stdin(const char *path);

/* For a signal's handler: reading stdin, which may wait for ever, ends with ERR_INTERRUPTED. */
void input_interrupt(void);

typedef struct Input Input;

/* ERR_DATA naming the file. `path` must stay. */
Err input_open(const char *path, Input **out);
void input_close(Input *in); /* NULL is fine */

InputStat input_opened(const Input *in); /* the file as it was when it was opened */
bool input_stat_same(InputStat a, InputStat b);

/*
 * The next bytes of text, as many as there is room for; *got is less only at the end. ERR_DATA naming the file and the
 * offset in it: damaged or cut short, as far as the format tells; changed while it was read.
 */
Err input_read(Input *in, char *out, int64_t room, int64_t *got);

/* The first bytes of the text, which input_read gives again: at most INPUT_PEEK_BYTES, fewer if it is shorter. Before
 * anything is read. Errors as of input_read. */
enum { INPUT_PEEK_BYTES = 64 << 10 };
Err input_peek(Input *in, const char **text, int64_t *size);

/* Passes over the first bytes of the text; a compressed file is read to there. ERR_DATA if there are fewer. */
Err input_skip(Input *in, int64_t bytes);

int64_t input_consumed(const Input *in); /* bytes of the file taken so far, compressed as they are */

#endif
