/* See dump.h. */
#include "train/dump.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/log.h"
#include "ckpt/safetensors.h"

static bool is_known(const Dump *d, const char *what)
{
    for (int i = 0; i < d->count; i++)
        if (!strcmp(d->tensor[i].what, what)) return true;
    return false;
}

/* Row by row: factors and parts of wider tensors have room between their rows. */
static Err read_rows(Stream *s, DumpTensor *to, Tensor t)
{
    const int64_t row = to->columns * dtype_size(t.dtype);
    for (int64_t r = 0; r < to->rows; r++)
        TRY(device_read(s, (char *)to->data + r * row, (const char *)t.data + tensor_row_at(t, r) * dtype_size(t.dtype),
                        row));
    return ERR_OK;
}

/* Sees the first micro-batch, or the first part of its rows. */
static Err see(void *user, const char *weight, const char *what, Tensor t)
{
    Dump *d = user;
    if (strcmp(weight, d->weight) != 0 || is_known(d, what)) return ERR_OK;
    ASSERT(d->count < DUMP_MOST);
    DumpTensor *to = &d->tensor[d->count];
    *to = (DumpTensor){ .dtype = t.dtype,
                        .rows = tensor_rows(t),
                        .columns = t.dim[t.ndim - 1],
                        .bytes = tensor_count(t) * dtype_size(t.dtype) };
    snprintf(to->what, sizeof to->what, "%s", what);
    to->data = malloc((size_t)to->bytes + 1);
    if (!to->data) return err_set(ERR_MEMORY, "no memory for debug.dump of '%s'", weight);
    d->count++;
    return read_rows(d->ctx->s, to, t);
}

void dump_begin(Dump *d, Ctx *ctx, const char *weight)
{
    *d = (Dump){ .weight = *weight ? weight : NULL, .ctx = ctx };
    if (d->weight) ctx->onlooker = (Onlooker){ see, d };
}

void dump_close(Dump *d)
{
    for (int i = 0; i < d->count; i++) free(d->tensor[i].data);
    d->count = 0;
    d->weight = NULL;
}

/* (codes of 4 bits have a byte each) */
static const char *type_of(DType t)
{
    switch (t) {
    case F32: return "F32";
    case BF16: return "BF16";
    case F16: return "F16";
    case E4M3: return "F8_E4M3";
    case E5M2: return "F8_E5M2";
    default: return dtype_size(t) == 1 ? "U8" : "I64";
    }
}

static int64_t make_header(const Dump *d, char *text, int64_t room)
{
    JsonOut j;
    int64_t at = 0;
    json_out_init(&j, text, room);
    st_header_begin(&j);
    for (int i = 0; i < d->count; i++) {
        const DumpTensor *t = &d->tensor[i];
        const StTensor st = { t->what, type_of(t->dtype), 2, { t->rows, t->columns }, at, t->bytes };
        st_header_tensor(&j, &st);
        at += t->bytes;
    }
    st_header_end(&j);
    ASSERT(json_out_ok(&j));
    while (j.used_bytes < st_padded(j.used_bytes)) text[j.used_bytes++] = ' ';
    return j.used_bytes;
}

static Err write_file(const Dump *d, const char *path)
{
    enum { ROOM = 256 * DUMP_MOST };
    char header[ROOM];
    const int64_t length = make_header(d, header, ROOM);
    int64_t bytes = 8 + length, at = bytes;
    for (int i = 0; i < d->count; i++) bytes += d->tensor[i].bytes;
    char *file = malloc((size_t)bytes);
    if (!file) return err_set(ERR_MEMORY, "no memory for '%s'", path);
    memcpy(file, &length, 8); /* (little endian, as all that this program runs on) */
    memcpy(file + 8, header, (size_t)length);
    for (int i = 0; i < d->count; i++) {
        memcpy(file + at, d->tensor[i].data, (size_t)d->tensor[i].bytes);
        at += d->tensor[i].bytes;
    }
    const Err err = file_replace(path, file, bytes);
    free(file);
    return err;
}

Err dump_end(Dump *d, const char *folder, int rank, bool alone)
{
    char path[PATH_MAX];
    Err err = ERR_OK;
    if (!d->weight) return ERR_OK;
    d->ctx->onlooker = (Onlooker){ 0 };
    snprintf(path, sizeof path, "%s/dump-%d.safetensors", folder, rank);
    if (d->count) err = write_file(d, path);
    else if (alone)
        log_warn("debug.dump: no product of 8 bits is by '%s'; megatrain inspect names the weights", d->weight);
    if (!err && d->count) log_info("debug.dump: products by '%s' are in '%s'", d->weight, path);
    dump_close(d);
    return err;
}
