/* Views and shapes; see tensor.h. */
#include "device/tensor.h"

#include <stddef.h>

static const struct {
    int64_t size;
    const char *name;
} dtypes[DTYPE_COUNT] = {
    [F32] = { 4, "f32" }, [BF16] = { 2, "bf16" }, [F16] = { 2, "f16" },   [I32] = { 4, "i32" },
    [I64] = { 8, "i64" }, [E4M3] = { 1, "e4m3" }, [E5M2] = { 1, "e5m2" }, [E2M1] = { 1, "e2m1" },
};

int64_t dtype_size(DType t)
{
    ASSERT(t < DTYPE_COUNT);
    return dtypes[t].size;
}

const char *dtype_name(DType t)
{
    ASSERT(t < DTYPE_COUNT);
    return dtypes[t].name;
}

int64_t tensor_count(Tensor t)
{
    int64_t n = 1;
    for (int i = 0; i < t.ndim; i++) n *= t.dim[i];
    return n;
}

int64_t tensor_rows(Tensor t)
{
    return t.ndim == 0 || t.dim[t.ndim - 1] == 0 ? 0 : tensor_count(t) / t.dim[t.ndim - 1];
}

int64_t tensor_bytes(Tensor t) { return tensor_count(t) * dtype_size(t.dtype); }

Tensor tensor_view(void *data, DType dtype, int ndim, const int64_t *dim)
{
    Tensor t = { .data = data, .ndim = ndim, .dtype = dtype };
    ASSERT(ndim >= 1 && ndim <= TENSOR_MAX_DIMS);
    for (int i = 0; i < ndim; i++) t.dim[i] = dim[i];
    t.ld = dim[ndim - 1];
    return t;
}

Err tensor_alloc(Arena *a, Tensor *out, DType dtype, int ndim, const int64_t *dim)
{
    *out = tensor_view(NULL, dtype, ndim, dim);
    return arena_alloc(a, tensor_bytes(*out), &out->data);
}

Tensor tensor_as(Tensor t, int ndim, const int64_t *dim)
{
    Tensor r = tensor_view(t.data, t.dtype, ndim, dim);
    const int64_t columns = t.dim[t.ndim - 1];
    ASSERT(tensor_count(r) == tensor_count(t) && (t.ld == columns || r.ld == columns));
    if (t.ld != columns) r.ld = t.ld, r.group = t.group;
    return r;
}

Tensor tensor_row_slice(Tensor t, int64_t first, int64_t count)
{
    ASSERT(t.ndim <= 2 && t.group <= 1 && first >= 0 && first + count <= t.dim[0]);
    int64_t step = t.ndim == 2 ? t.ld : 1;
    t.data = (char *)t.data + first * step * dtype_size(t.dtype);
    t.dim[0] = count;
    if (t.ndim == 1) t.ld = count;
    return t;
}

Tensor tensor_col_slice(Tensor t, int64_t first, int64_t count)
{
    ASSERT(t.ndim == 2 && t.group <= 1 && first >= 0 && first + count <= t.dim[1]);
    t.data = (char *)t.data + first * dtype_size(t.dtype);
    t.dim[1] = count;
    return t;
}
