/*
 * ckpt/manifest.c. Input: manifest.json, then, behind a 0 byte, manifest.crc; left out: the right one. What is
 * accepted is written again from what was understood, and read again to the same.
 */
#include "fuzz.h"

#include "ckpt/manifest.h"

static void put_pair(JsonOut *j, const char *key, int ndim, const int64_t pair[2])
{
    json_open(j, key, '[');
    for (int d = 0; d < ndim; d++) json_put_int(j, NULL, pair[d]);
    json_close(j, ']');
}

static void put_meta(JsonOut *j, const Manifest *m)
{
    json_put_int(j, "format", m->format);
    json_put_text(j, "program", m->meta.program);
    json_put_int(j, "step", m->meta.step);
    json_put_int(j, "samples", m->meta.samples);
    json_put_int(j, "tokens", m->meta.tokens);
    json_put_int(j, "seed", m->meta.seed);
    json_put_text(j, "reproducible", m->meta.reproducible);
    json_open(j, "blocks", '{');
    json_put_int(j, "tp", m->meta.tp_blocks);
    json_put_int(j, "seq", m->meta.seq_blocks);
    json_put_int(j, "attn", m->meta.attn_block);
    json_close(j, '}');
    json_open(j, "counters", '{');
    for (int i = 0; i < m->meta.counter_count; i++)
        json_put_int(j, m->meta.counters[i].name, m->meta.counters[i].value);
    json_close(j, '}');
    json_put_text(j, "data", m->meta.data);
    json_put_text(j, "config", m->meta.config);
}

static void put_tensors(JsonOut *j, const Manifest *m)
{
    json_open(j, "parameters", '[');
    for (int i = 0; i < m->param_count; i++) {
        json_open(j, NULL, '{');
        json_put_text(j, "name", m->params[i].name);
        put_pair(j, "shape", m->params[i].ndim, m->params[i].shape);
        json_put_int(j, "shift", m->params[i].shift);
        json_close(j, '}');
    }
    json_close(j, ']');
    json_open(j, "pieces", '[');
    for (int64_t i = 0; i < m->piece_count; i++) {
        const ManifestPiece *q = &m->pieces[i];
        const ManifestParam *p = &m->params[q->param];
        json_open(j, NULL, '{');
        json_put_text(j, "name", p->name);
        json_put_text(j, "state", ckpt_state_names[q->state]);
        json_put_text(j, "dtype", "F32");
        put_pair(j, "global", p->ndim, p->shape);
        put_pair(j, "offset", p->ndim, q->box.offset);
        put_pair(j, "shape", p->ndim, q->box.shape);
        json_put_text(j, "file", m->files[q->file].name);
        if (q->crc >= 0) json_put_int(j, "crc32c", q->crc);
        json_close(j, '}');
    }
    json_close(j, ']');
}

/* malloc'ed */
static char *write_again(const Manifest *m, size_t size)
{
    size_t room = 32 * size + 1024;
    char *text = malloc(room);
    JsonOut out, *j = &out;
    if (!text) abort();
    json_out_init(j, text, (int64_t)room);
    json_open(j, NULL, '{');
    put_meta(j, m);
    put_tensors(j, m);
    json_open(j, "files", '[');
    for (int i = 0; i < m->file_count; i++) {
        json_open(j, NULL, '{');
        json_put_text(j, "name", m->files[i].name);
        json_put_int(j, "size", m->files[i].size_bytes);
        json_open(j, "crc32c", '[');
        for (int64_t k = 0; k < chunk_count(m->files[i].size_bytes); k++)
            json_put_int(j, NULL, m->files[i].crcs[k]);
        json_close(j, ']');
        json_close(j, '}');
    }
    json_close(j, ']');
    json_close(j, '}');
    FUZZ_CHECK(json_out_ok(j), "%lld bytes wanted", (long long)out.used_bytes);
    return text;
}

/* Every element of every state that is there lies in one piece. */
static void check_tiling(const Manifest *m)
{
    for (int i = 0; i < m->param_count; i++)
        for (int s = 0; s < CKPT_STATES; s++) {
            int64_t elements = 0;
            for (int64_t k = 0; k < m->piece_count; k++)
                if (m->pieces[k].param == i && m->pieces[k].state == s)
                    elements += box_count(m->pieces[k].box);
            FUZZ_CHECK(elements == (m->params[i].has[s] ? m->params[i].shape[0] * m->params[i].shape[1] : 0),
                       "'%s': %lld elements", m->params[i].name, (long long)elements);
        }
}

/* A file's header made from its pieces is one, and each piece is found in it. */
static void check_keys(const Manifest *m, int file, size_t size)
{
    size_t room = 64 * size + 1024;
    char *text = malloc(room), key[KEY_MAX];
    int64_t offset = 0;
    SetupArena a;
    StFile header;
    JsonOut out;
    if (!text) abort();
    json_out_init(&out, text, (int64_t)room);
    st_header_begin(&out);
    for (int64_t i = 0; i < m->piece_count; i++) {
        const ManifestPiece *q = &m->pieces[i];
        const ManifestParam *p = &m->params[q->param];
        if (q->file != file) continue;
        ckpt_key(key, q->state, p->name, p->ndim, q->box, p->shape);
        StTensor t = { .name = key,
                       .dtype = "F32",
                       .ndim = p->ndim,
                       .shape = { q->box.shape[0], q->box.shape[1] },
                       .offset = offset,
                       .size_bytes = 4 * box_count(q->box) };
        st_header_tensor(&out, &t);
        if (__builtin_add_overflow(offset, t.size_bytes, &offset) || offset > INT64_MAX / 2) {
            free(text); /* more than a file can hold */
            return;
        }
    }
    st_header_end(&out);
    FUZZ_CHECK(json_out_ok(&out), "%lld bytes wanted", (long long)out.used_bytes);
    setup_init(&a);
    Err err = st_parse("header", text, out.used_bytes, 8 + out.used_bytes + offset, &a, &header);
    for (int64_t i = 0; i < m->piece_count && !err; i++) {
        const StTensor *t;
        if (m->pieces[i].file == file) err = manifest_tensor(m, &m->pieces[i], &header, &t);
    }
    FUZZ_CHECK(!err, "%s: %s", err_message(), text);
    setup_release(&a);
    free(text);
}

/* Asks which tensor is damaged in a file of zeros. The error still begins with what was wrong. */
static void check_blame(const Manifest *m, int file)
{
    static const char zeros[1 << 12];
    const ManifestFile *f = &m->files[file];
    ChunkReader r = { .path = f->path, .size_bytes = f->size_bytes, .bad = 0 };
    if (f->size_bytes > (int64_t)sizeof zeros) return;
    fuzz_write(f->name, zeros, (size_t)f->size_bytes);
    Err err = manifest_blame(m, &r, err_set(ERR_CKPT, "damaged"));
    fuzz_check_error(err, ERR_CKPT, ERR_CKPT, false);
    FUZZ_CHECK(err && !strncmp(err_message(), "damaged", 7), "'%s'", err_message());
}

static Err read_manifest(const char *text, size_t size, const char *crc, SetupArena *a, Manifest *m)
{
    char right[64];
    manifest_crc_text(right, crc32c(0, text, size), (int64_t)size);
    if (!crc) crc = right;
    fuzz_write("manifest.json", text, size);
    fuzz_write("manifest.crc", crc, strlen(crc));
    return manifest_read(fuzz_path("."), a, m);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = fuzz_text(data, size);
    size_t n = strlen(text);
    SetupArena a, b;
    Manifest m, again;
    setup_init(&a);
    fuzz_memory_start();
    Err err = read_manifest(text, n, n < size ? text + n + 1 : NULL, &a, &m);
    FUZZ_MEMORY_BOUND(n, 4, FUZZ_JSON_BYTES + (1 << 20));
    fuzz_check_error(err, ERR_CKPT, ERR_CKPT, false);
    if (!err) {
        setup_init(&b);
        check_tiling(&m);
        char *first = write_again(&m, n);
        err = read_manifest(first, strlen(first), NULL, &b, &again);
        FUZZ_CHECK(!err, "%s: %s", err_message(), first);
        char *second = write_again(&again, n);
        FUZZ_CHECK(!strcmp(first, second), "%s\nthen\n%s", first, second);
        for (int i = 0; i < m.param_count; i++)
            FUZZ_CHECK(manifest_find(&m, m.params[i].name) == i, "'%s' is not found", m.params[i].name);
        for (int f = 0; f < m.file_count; f++) check_keys(&m, f, n);
        for (int f = 0; f < m.file_count; f++) check_blame(&m, f);
        free(first);
        free(second);
        setup_release(&b);
    }
    setup_release(&a);
    free(text);
    return 0;
}
