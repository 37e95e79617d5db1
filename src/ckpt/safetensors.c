/* Header parsing and writing; see safetensors.h. The format's little-endian lengths are read byte by byte. */
#include "ckpt/safetensors.h"

#include <stdlib.h>
#include <string.h>

#include "base/file.h"

static const struct {
    const char *name;
    int64_t bytes;
} dtypes[] = {
    { "F32", 4 }, { "BF16", 2 }, { "F16", 2 },     { "F64", 8 },     { "I64", 8 },
    { "I32", 4 }, { "I16", 2 },  { "I8", 1 },      { "U64", 8 },     { "U32", 4 },
    { "U16", 2 }, { "U8", 1 },   { "F8_E4M3", 1 }, { "F8_E5M2", 1 }, { "BOOL", 1 },
};

static int dtype_index(const char *name)
{
    int n = (int)(sizeof dtypes / sizeof dtypes[0]);
    for (int i = 0; i < n; i++)
        if (!strcmp(dtypes[i].name, name)) return i;
    return -1;
}

int64_t st_dtype_bytes(const char *dtype)
{
    int i = dtype_index(dtype);
    return i < 0 ? 0 : dtypes[i].bytes;
}

Err st_header_length(const char *path, const void *first8, int64_t file_bytes, int64_t *header_bytes)
{
    const uint8_t *b = first8;
    uint64_t n = 0;
    for (int i = 7; i >= 0; i--) n = n << 8 | b[i];
    if (n > ST_MAX_HEADER_BYTES)
        return err_set(ERR_CKPT, "'%s': header of %llu bytes, more than the %d allowed", path, (unsigned long long)n,
                       (int)ST_MAX_HEADER_BYTES);
    if ((int64_t)n > file_bytes - 8)
        return err_set(ERR_CKPT, "'%s': header of %llu bytes in a file of %lld", path, (unsigned long long)n,
                       (long long)file_bytes);
    *header_bytes = (int64_t)n;
    return ERR_OK;
}

static Err check_name(const char *path, const char *name)
{
    if (strlen(name) > ST_NAME_MAX)
        return err_set(ERR_CKPT, "'%s': a tensor name is longer than %d", path, ST_NAME_MAX);
    if (!*name) return err_set(ERR_CKPT, "'%s': a tensor has an empty name", path);
    for (const unsigned char *c = (const unsigned char *)name; *c; c++)
        if (*c < 0x20 || *c == 0x7F)
            return err_set(ERR_CKPT, "'%s': a tensor name has a control character (%d)", path, (int)*c);
    return ERR_OK;
}

/* Fills t->ndim and t->shape; the byte count of that shape in *size_bytes. */
static Err parse_shape(const char *path, const Json *shape, StTensor *t, int64_t *size_bytes)
{
    int64_t ndim = json_count(shape);
    if (!json_is_array(shape) || ndim > ST_MAX_DIMS)
        return err_set(ERR_CKPT, "'%s': tensor '%s' has no shape of at most %d dims", path, t->name, ST_MAX_DIMS);
    t->ndim = (int)ndim;
    *size_bytes = st_dtype_bytes(t->dtype);
    for (int d = 0; d < t->ndim; d++) {
        t->shape[d] = json_int(json_at(shape, d), -1);
        if (t->shape[d] < 0 || __builtin_mul_overflow(*size_bytes, t->shape[d], size_bytes))
            return err_set(ERR_CKPT, "'%s': tensor '%s' has an impossible shape", path, t->name);
    }
    return ERR_OK;
}

/* `data` is where the data starts in the file, data_bytes how much there is. */
static Err parse_tensor(const char *path, const Json *j, int64_t data, int64_t data_bytes, StTensor *t)
{
    const char *dtype = json_text(json_get(j, "dtype"), NULL);
    const Json *offsets = json_get(j, "data_offsets");
    int64_t size_bytes = 0;
    TRY(check_name(path, t->name));
    if (!dtype || dtype_index(dtype) < 0)
        return err_set(ERR_CKPT, "'%s': tensor '%s' has dtype '%s', which is unknown", path, t->name,
                       dtype ? dtype : "none");
    t->dtype = dtypes[dtype_index(dtype)].name;
    TRY(parse_shape(path, json_get(j, "shape"), t, &size_bytes));
    int64_t begin = json_int(json_at(offsets, 0), -1), end = json_int(json_at(offsets, 1), -1);
    if (json_count(offsets) != 2 || begin < 0 || end < begin || end > data_bytes)
        return err_set(ERR_CKPT, "'%s': tensor '%s' lies at [%lld, %lld] of %lld bytes of data", path, t->name,
                       (long long)begin, (long long)end, (long long)data_bytes);
    if (end - begin != size_bytes)
        return err_set(ERR_CKPT, "'%s': tensor '%s' has %lld bytes, its shape says %lld", path, t->name,
                       (long long)(end - begin), (long long)size_bytes);
    t->offset = data + begin;
    t->size_bytes = size_bytes;
    return ERR_OK;
}

static int by_offset(const void *a, const void *b)
{
    const StTensor *x = a, *y = b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return (x->size_bytes > y->size_bytes) - (x->size_bytes < y->size_bytes);
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const StTensor *)a)->name, ((const StTensor *)b)->name);
}

/* The tensors cover the data exactly once. */
static Err check_cover(const char *path, StFile *f, int64_t data, int64_t file_bytes)
{
    int64_t at = data;
    qsort(f->items, (size_t)f->count, sizeof *f->items, by_offset);
    for (int64_t i = 0; i < f->count; i++) {
        const StTensor *t = &f->items[i];
        if (t->offset != at)
            return err_set(ERR_CKPT, "'%s': tensor '%s' %s the data before it", path, t->name,
                           t->offset < at ? "overlaps" : "leaves a hole behind");
        at += t->size_bytes;
    }
    if (at != file_bytes)
        return err_set(ERR_CKPT, "'%s': has %lld bytes, its header describes %lld", path, (long long)file_bytes,
                       (long long)at);
    qsort(f->items, (size_t)f->count, sizeof *f->items, by_name);
    return ERR_OK;
}

static Err parse_tensors(const char *path, const Json *root, int64_t data, int64_t file_bytes, SetupArena *a,
                         StFile *out)
{
    TRY(setup_array(a, json_count(root), &out->items));
    for (void *it = json_iter(root); it; it = json_next(root, it)) {
        if (!strcmp(json_iter_key(it), "__metadata__")) continue;
        StTensor *t = &out->items[out->count++];
        TRY(setup_strdup(a, json_iter_key(it), (char **)(uintptr_t)&t->name));
        TRY(parse_tensor(path, json_iter_value(it), data, file_bytes - data, t));
    }
    return check_cover(path, out, data, file_bytes);
}

Err st_parse(const char *path, const char *header, int64_t header_bytes, int64_t file_bytes, SetupArena *a, StFile *out)
{
    Json *root;
    *out = (StFile){ 0 };
    if (header_bytes < 1 || header[0] != '{') return err_set(ERR_CKPT, "'%s' is not a safetensors file", path);
    TRY_AS(ERR_CKPT, json_parse(path, header, header_bytes, &root));
    Err err = parse_tensors(path, root, 8 + header_bytes, file_bytes, a, out);
    json_free(root);
    return err;
}

Err st_open(const char *path, SetupArena *a, StFile *out)
{
    uint8_t first8[8];
    int64_t file_bytes, header_bytes;
    char *header;
    TRY_AS(ERR_CKPT, file_size(path, &file_bytes));
    TRY_AS(ERR_CKPT, file_read_at(path, 0, first8, 8));
    TRY(st_header_length(path, first8, file_bytes, &header_bytes));
    header = malloc((size_t)header_bytes + 1);
    if (!header) return err_set(ERR_MEMORY, "no memory for the header of '%s'", path);
    Err err = err_as(file_read_at(path, 8, header, header_bytes), ERR_CKPT);
    if (!err) err = st_parse(path, header, header_bytes, file_bytes, a, out);
    free(header);
    return err;
}

const StTensor *st_find(const StFile *f, const char *name)
{
    StTensor key = { .name = name };
    return f->count ? bsearch(&key, f->items, (size_t)f->count, sizeof key, by_name) : NULL;
}

void st_header_begin(JsonOut *j)
{
    json_open(j, NULL, '{');
    json_open(j, "__metadata__", '{');
    json_put_text(j, "format", "pt"); /* what PyTorch's loaders look for */
    json_close(j, '}');
}

void st_header_tensor(JsonOut *j, const StTensor *t)
{
    json_open(j, t->name, '{');
    json_put_text(j, "dtype", t->dtype);
    json_open(j, "shape", '[');
    for (int d = 0; d < t->ndim; d++) json_put_int(j, NULL, t->shape[d]);
    json_close(j, ']');
    json_open(j, "data_offsets", '[');
    json_put_int(j, NULL, t->offset);
    json_put_int(j, NULL, t->offset + t->size_bytes);
    json_close(j, ']');
    json_close(j, '}');
}

void st_header_end(JsonOut *j) { json_close(j, '}'); }

int64_t st_padded(int64_t header_bytes) { return (header_bytes + 7) / 8 * 8; }
