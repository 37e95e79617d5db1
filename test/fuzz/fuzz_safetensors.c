/*
 * ckpt/safetensors.c. Input: how many bytes of data the file has behind its header (8 bytes, little endian), the
 * header. What is accepted covers the data exactly; its header, written again, gives the same tensors. The first 8
 * bytes are read as the length of a header as well.
 */
#include "fuzz.h"

#include "ckpt/safetensors.h"

static int by_offset(const void *a, const void *b)
{
    const StTensor *x = *(StTensor *const *)a, *y = *(StTensor *const *)b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return (x->size_bytes > y->size_bytes) - (x->size_bytes < y->size_bytes);
}

static void check_again(const StFile *f, int64_t data, int64_t data_bytes, size_t size)
{
    SetupArena a;
    StFile again;
    JsonOut out;
    size_t room = 32 * size + 256;
    char *text = malloc(room);
    StTensor **order = malloc((size_t)(f->count + 1) * sizeof *order);
    if (!text || !order) abort();
    for (int64_t i = 0; i < f->count; i++) order[i] = &f->items[i];
    qsort(order, (size_t)f->count, sizeof *order, by_offset);
    json_out_init(&out, text, (int64_t)room);
    st_header_begin(&out);
    for (int64_t i = 0; i < f->count; i++) {
        StTensor t = *order[i];
        t.offset -= data;
        st_header_tensor(&out, &t);
    }
    st_header_end(&out);
    FUZZ_CHECK(json_out_ok(&out), "%lld bytes wanted", (long long)out.used_bytes);
    setup_init(&a);
    int64_t header = out.used_bytes;
    Err err = st_parse("again", text, header, 8 + header + data_bytes, &a, &again);
    FUZZ_CHECK(!err, "%s: %s", err_message(), text);
    FUZZ_CHECK(again.count == f->count, "%lld tensors, then %lld", (long long)f->count,
               (long long)again.count);
    for (int64_t i = 0; i < f->count; i++) {
        const StTensor *x = &f->items[i], *y = st_find(&again, x->name);
        FUZZ_CHECK(y && y->ndim == x->ndim && !strcmp(x->dtype, y->dtype) && x->size_bytes == y->size_bytes &&
                       x->offset - data == y->offset - 8 - header &&
                       !memcmp(x->shape, y->shape, (size_t)x->ndim * sizeof *x->shape),
                   "tensor '%s'", x->name);
    }
    setup_release(&a);
    free(order);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int64_t length, data_bytes, total = 0, header_bytes = (int64_t)size - 8;
    SetupArena a;
    StFile f = { 0 };
    if (size < 8) return 0;
    Err err = st_header_length("input", data, (int64_t)size, &length);
    fuzz_check_error(err, ERR_CKPT, ERR_CKPT, false);
    FUZZ_CHECK(err || (length >= 0 && length <= header_bytes), "a header of %lld bytes", (long long)length);
    memcpy(&data_bytes, data, sizeof data_bytes);
    if (data_bytes < 0 || data_bytes > INT64_MAX / 2) return 0; /* no file is so long */
    setup_init(&a);
    fuzz_memory_start();
    char *header = fuzz_text(data + 8, (size_t)header_bytes);
    err = st_parse("input", header, header_bytes, 8 + header_bytes + data_bytes, &a, &f);
    free(header);
    FUZZ_MEMORY_BOUND(header_bytes, 4, FUZZ_JSON_BYTES + (1 << 20));
    fuzz_check_error(err, ERR_CKPT, ERR_CKPT, false);
    for (int64_t i = 0; !err && i < f.count; i++) {
        FUZZ_CHECK(st_find(&f, f.items[i].name) == &f.items[i], "'%s' is not found", f.items[i].name);
        total += f.items[i].size_bytes;
    }
    if (!err) {
        FUZZ_CHECK(total == data_bytes, "%lld bytes of tensors", (long long)total);
        check_again(&f, 8 + header_bytes, total, (size_t)header_bytes);
    }
    setup_release(&a);
    return 0;
}
