/*
 * A file of text that is read front to back, plain or compressed by gzip or zstd; "-" is stdin. Its first bytes tell
 * which of these it is (no text begins as compressed files do), not its name. Several compressed members, one behind
 * the other, are one text.
 * Memory: a buffer, and what the decompressor needs (zstd: up to 128 MiB, if the file was compressed with a long
 * window).
 */
#ifndef MEGATRAIN_DATA_INPUT_H
#define MEGATRAIN_DATA_INPUT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/arena.h"
#include "base/err.h"

/* Contents of a job's inputs. AUTO: JSON lines, if an input begins as such (jsonl_begins), else text. */
typedef enum { INPUT_TEXT, INPUT_JSONL, INPUT_AUTO, INPUT_BYTES } InputFormat;

/*
 * The files of a job, from words that name files, folders or stdin. A folder stands for all files in it and in its
 * folders, in the order of their names' bytes; names that begin with a dot are left out. ERR_DATA: a folder has no
 * files, or cannot be read. (What names no folder is looked at when it is opened.)
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

/* Facts by which one sees whether a file is still the same. For stdin both are 0. */
typedef struct {
    int64_t size_bytes, mtime_ns;
} InputStat;

/* ERR_DATA: the path is neither a regular file nor "-". */
Err input_stat(const char *path, InputStat *out);

bool input_is_stdin(const char *path);

/* A signal's handler may call this: reading stdin, which may wait for ever, then ends with ERR_INTERRUPTED. */
void input_interrupt(void);

typedef struct Input Input;

/* ERR_DATA names the file. `path` must outlive the input. */
Err input_open(const char *path, Input **out);
void input_close(Input *in); /* NULL is fine */

InputStat input_opened(const Input *in); /* the file as it was when it was opened */
bool input_stat_same(InputStat a, InputStat b);

/*
 * Reads the next bytes of text, as many as there is room for; *got is less only at the end. ERR_DATA, which names the
 * file and the offset in it: it is damaged or cut short, as far as the format tells, or it changed while it was read.
 */
Err input_read(Input *in, char *out, int64_t room, int64_t *got);

/* Gives the first bytes of the text, which input_read gives again: at most INPUT_PEEK_BYTES, fewer if it is shorter. To
 * be called before anything is read. Errors as in input_read. */
enum { INPUT_PEEK_BYTES = 64 << 10 };
Err input_peek(Input *in, const char **text, int64_t *size);

/* Passes over the first bytes of the text; a compressed file is read up to there. ERR_DATA: there are fewer. */
Err input_skip(Input *in, int64_t bytes);

/* How many bytes of the file were taken so far, counted as they lie there. */
int64_t input_consumed(const Input *in);

#endif
