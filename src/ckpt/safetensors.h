/*
 * The safetensors file format: u64 little-endian header length, a JSON header, the data.
 *
 *   {"__metadata__": {text: text}, NAME: {"dtype": "F32", "shape": [2], "data_offsets": [begin, end]}, ...}
 *
 * Offsets count from the first byte behind the header; tensors are row-major and cover the data without holes
 * or overlap. The reader believes nothing: lengths are capped before memory is taken, every sum and product
 * is checked for overflow, and a header that does not describe exactly the bytes of its file is refused.
 */
#ifndef MEGATRAIN_CKPT_SAFETENSORS_H
#define MEGATRAIN_CKPT_SAFETENSORS_H

#include "base/arena.h"
#include "base/json.h"

enum { ST_MAX_DIMS = 8, ST_NAME_MAX = 4096, ST_MAX_HEADER_BYTES = 100 << 20 };

typedef struct {
    const char *name;
    const char *dtype; /* "F32", "BF16", ...: one of the format's names */
    int ndim;
    int64_t shape[ST_MAX_DIMS];
    int64_t offset, size_bytes; /* where its data lies in the file */
} StTensor;

typedef struct {
    StTensor *items; /* sorted by name */
    int64_t count;
} StFile;

/* How many bytes an element has; 0: the format has no such dtype. */
int64_t st_dtype_bytes(const char *dtype);

/*
 * Checks the first 8 bytes of a file of file_bytes, which say how long the header is: *header_bytes. Here and below
 * ERR_CKPT names `path` and, where there is one, the tensor.
 */
Err st_header_length(const char *path, const void *first8, int64_t file_bytes, int64_t *header_bytes);

/* Parses the header of a file of file_bytes, header_bytes behind the first 8. Takes memory from `a`. */
Err st_parse(const char *path, const char *header, int64_t header_bytes, int64_t file_bytes, SetupArena *a,
             StFile *out);

/* Does both of the above for a file, whose data stays unread. */
Err st_open(const char *path, SetupArena *a, StFile *out);

const StTensor *st_find(const StFile *f, const char *name); /* NULL if absent */

/*
 * A header is written by begin, the tensors in the order of the data, and end. Blanks follow up to st_padded(length),
 * so that the data starts on a multiple of 8.
 */
void st_header_begin(JsonOut *j);
void st_header_tensor(JsonOut *j, const StTensor *t); /* t->offset counts from the start of the data */
void st_header_end(JsonOut *j);
int64_t st_padded(int64_t header_bytes);

#endif
