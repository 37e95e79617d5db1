/*
 * Tensor: a typed view of memory that some arena owns. Copied by value; never owns anything.
 *
 * All dims but the last are "rows". The last dim is contiguous; consecutive rows lie `ld` elements apart
 * (ld == last dim when the tensor is dense). So a column slice of a matrix is a view, and q, k, v need no
 * copies. Shapes are written with the letters of docs/glossary: B T N D H K C F V E L.
 *
 * `group` (0 or 1: none) rows lie side by side without gaps, as many query heads of a fused projection do, and `ld` is
 * from one such group to the next. It divides the last dim but one, which is below 2^31. Few arguments of ops may be
 * such tensors: those with a * behind that dim in ops.def.
 *
 * `rows` (usually NULL): device-side count of rows in use; the shape then is the capacity. Ops work on that
 * many rows of dim 0 and leave the others untouched.
 *
 * `expected`: how many rows of dim 0 are in use on the average, where the shape is a capacity; 0: all. What ops read,
 * write and compute is counted by it (DeviceCounters). Of codes it is of the last dim, which products sum over.
 *
 * `scale`: of a tensor of codes, the f32 factors of its blocks, by which codes are multiplied (ops.def, :fp8). A code
 * takes a byte, one of 4 bits too.
 */
#ifndef MEGATRAIN_DEVICE_TENSOR_H
#define MEGATRAIN_DEVICE_TENSOR_H

#include <stdint.h>

#include "base/arena.h"

typedef enum { F32, BF16, F16, I32, I64, E4M3, E5M2, E2M1, DTYPE_COUNT } DType;

enum { TENSOR_MAX_DIMS = 4 };

typedef struct Tensor {
    void *data; /* NULL = absent (optional op arguments) */
    int64_t dim[TENSOR_MAX_DIMS];
    int64_t ld; /* elements from one row, or group of rows, to the next */
    int ndim;
    DType dtype;
    const int64_t *rows;
    int64_t expected;
    const struct Tensor *scale;
    int64_t group; /* rows that lie side by side; 0: none */
} Tensor;

/* The dim that `expected` is of. */
static inline int tensor_counted_dim(Tensor t) { return t.scale ? t.ndim - 1 : 0; }

int64_t dtype_size(DType t); /* bytes */
const char *dtype_name(DType t);

int64_t tensor_count(Tensor t); /* elements */
int64_t tensor_rows(Tensor t);  /* product of all dims but the last */
int64_t tensor_bytes(Tensor t); /* bytes of a dense tensor of this shape */

/* Begin of a row, in elements from the first row's. */
static inline int64_t tensor_row_at(Tensor t, int64_t row)
{
    if (t.group <= 1) return row * t.ld;
    return row / t.group * t.ld + row % t.group * t.dim[t.ndim - 1];
}

/* A dense view over `data`; dims beyond ndim are ignored. */
Tensor tensor_view(void *data, DType dtype, int ndim, const int64_t *dim);
#define tensor_of(data, dtype, ...)                                                           \
    tensor_view((data), (dtype), (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), \
                (const int64_t[]){ __VA_ARGS__ })

/* A dense tensor in the arena, 256-byte aligned, contents undefined. ERR_MEMORY. */
Err tensor_alloc(Arena *a, Tensor *out, DType dtype, int ndim, const int64_t *dim);
#define tensor_new(arena, out, dtype, ...)                                                             \
    tensor_alloc((arena), (out), (dtype), (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), \
                 (const int64_t[]){ __VA_ARGS__ })

/* The same memory under another shape (ASSERT: same count; dense, or rows of the same length, in the same groups). */
Tensor tensor_as(Tensor t, int ndim, const int64_t *dim);
#define tensor_reshape(t, ...) \
    tensor_as((t), (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)), (const int64_t[]){ __VA_ARGS__ })

Tensor tensor_row_slice(Tensor t, int64_t first, int64_t count); /* rows of a 1-D or 2-D tensor */
Tensor tensor_col_slice(Tensor t, int64_t first, int64_t count); /* columns of a 2-D tensor */

#endif
