/*
 * A file of text read front to back, plain or compressed by gzip or zstd. Which of them is seen from its first bytes
 * (no text begins like that), not from its name. Several compressed members one behind the other are one text.
 * Memory: a buffer, and what the decompressor needs (zstd: up to 128 MiB, if the file was compressed with a long
 * window).
 */
#ifndef MEGATRAIN_DATA_INPUT_H
#define MEGATRAIN_DATA_INPUT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/err.h"

/* What tells whether a file is still the same. */
typedef struct {
    int64_t size_bytes, mtime_ns;
} InputStat;

/* ERR_DATA if the path is no regular file. */
Err input_stat(const char *path, InputStat *out);

/* Do the first bytes of a file say that it is compressed? */
bool input_is_compressed(const void *start, int64_t size);

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

/* Passes over the first bytes of the text; a compressed file is read to there. ERR_DATA if there are fewer. */
Err input_skip(Input *in, int64_t bytes);

int64_t input_consumed(const Input *in); /* bytes of the file read so far, compressed as they are */

#endif
