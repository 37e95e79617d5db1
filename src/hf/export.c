/* A checkpoint becomes a folder (convert.h): its tensors (theirs.h) in files of safetensors, with an index if there are
 * several. */
#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "ckpt/safetensors.h"
#include "hf/convert.h"
#include "hf/theirs.h"

enum { TEXT_BYTES = 8192, IDENTITY_BYTES = 512, COPY_MAX_BYTES = 1 << 30 };

typedef struct {
    int file;
    int64_t offset; /* in its data */
} FilePlace;

typedef struct {
    const HfExportJob *x;
    TheirsList list;
    FilePlace *place; /* [list.count] */
    int file_count;
    char temp[PATH_MAX];
    char *chunk, *text;
} Export;

/* ---- their tensors ---- */

static Stored stored(const void *user, const Param *p, const char *name, int64_t width)
{
    const char *dtype = user;
    (void)name, (void)width;
    if (p->spec.group == PARAM_STATE || !strcmp(dtype, "float32")) return STORED_F32;
    return strcmp(dtype, "float16") ? STORED_BF16 : STORED_F16;
}

static const char *dtype_of(const Theirs *t)
{
    return t->stored == STORED_F32 ? "F32" : t->stored == STORED_F16 ? "F16" : "BF16";
}

static Err assign_files(Export *m, SetupArena *a)
{
    int64_t used = 0;
    TRY(setup_array(a, m->list.count, &m->place));
    for (int64_t i = 0; i < m->list.count; i++) {
        const int64_t bytes = theirs_bytes(&m->list.items[i]);
        if (used && used + bytes > m->x->shard_bytes) {
            used = 0;
            m->file_count++;
        }
        m->place[i] = (FilePlace){ m->file_count, used };
        used += bytes;
    }
    m->file_count++;
    return ERR_OK;
}

/* ---- files ---- */

static void file_name(const Export *m, int file, char out[64])
{
    if (m->file_count == 1) snprintf(out, 64, "model.safetensors");
    else snprintf(out, 64, "model-%05d-of-%05d.safetensors", file + 1, m->file_count);
}

static Err path_in(const Export *m, const char *name, char out[PATH_MAX])
{
    if (snprintf(out, PATH_MAX, "%s/%s", m->temp, name) < PATH_MAX) return ERR_OK;
    return err_set(ERR_STORAGE, "path is too long: '%s'", m->x->to);
}

static Err put_header(const Export *m, int64_t from, int64_t end, TextOut *out)
{
    st_header_begin(&out->json);
    for (int64_t i = from; i < end; i++) {
        const Theirs *t = &m->list.items[i];
        const HfPart part = theirs_part(&m->list, t);
        char name[HF_NAME_MAX];
        theirs_name(&m->list, t, name);
        StTensor e = { .name = name, .dtype = dtype_of(t), .ndim = part.ndim, .offset = m->place[i].offset };
        for (int d = 0; d < part.ndim; d++) e.shape[d] = part.shape[d];
        e.size_bytes = theirs_bytes(t);
        st_header_tensor(&out->json, &e);
        TRY(text_flush(out));
    }
    st_header_end(&out->json);
    return text_flush(out);
}

static Err put_file(Export *m, int64_t from, int64_t end, ChunkWriter *w)
{
    TextOut counted, text;
    uint8_t length[8];
    text_init(&counted, NULL, m->text, TEXT_BYTES);
    TRY(put_header(m, from, end, &counted));
    const int64_t header_bytes = st_padded(counted.total_bytes);
    for (int i = 0; i < 8; i++) length[i] = (uint8_t)((uint64_t)header_bytes >> 8 * i);
    TRY(chunk_put(w, length, 8));
    text_init(&text, w, m->text, TEXT_BYTES);
    TRY(put_header(m, from, end, &text));
    TRY(chunk_put(w, "       ", header_bytes - text.total_bytes));
    for (int64_t i = from; i < end; i++) TRY(theirs_put(&m->list, &m->list.items[i], w));
    return chunk_sync_close(w);
}

/* The file has its name when all of it is on the disk: an interrupted job is gone on with behind such files. */
static Err write_file(Export *m, int64_t from, int64_t end)
{
    char name[64], path[PATH_MAX], part[PATH_MAX];
    ChunkWriter w;
    file_name(m, m->place[from].file, name);
    TRY(path_in(m, name, path));
    TRY(path_in(m, "part", part));
    TRY(chunk_create(&w, part, m->chunk, NULL));
    const Err err = put_file(m, from, end, &w);
    if (err) chunk_abandon(&w);
    return err ? err : file_rename(part, path);
}

/* The first tensor of a file that is not there yet. */
static Err first_to_write(const Export *m, int64_t *first)
{
    char name[64], path[PATH_MAX];
    for (*first = 0; *first < m->list.count; ++*first) {
        file_name(m, m->place[*first].file, name);
        TRY(path_in(m, name, path));
        if (!file_exists(path)) return ERR_OK;
    }
    return ERR_OK;
}

static Err put_index(const Export *m, TextOut *out)
{
    json_open(&out->json, NULL, '{');
    json_open(&out->json, "metadata", '{');
    json_put_int(&out->json, "total_size", m->list.total_bytes);
    json_close(&out->json, '}');
    json_open(&out->json, "weight_map", '{');
    for (int64_t i = 0; i < m->list.count; i++) {
        char name[HF_NAME_MAX], file[64];
        theirs_name(&m->list, &m->list.items[i], name);
        file_name(m, m->place[i].file, file);
        json_put_text(&out->json, name, file);
        TRY(text_flush(out));
    }
    json_close(&out->json, '}');
    json_close(&out->json, '}');
    return text_flush(out);
}

static Err write_index(Export *m)
{
    char path[PATH_MAX];
    ChunkWriter w;
    TextOut text;
    TRY(path_in(m, "model.safetensors.index.json", path));
    TRY(chunk_create(&w, path, m->chunk, NULL));
    text_init(&text, &w, m->text, TEXT_BYTES);
    Err err = put_index(m, &text);
    if (!err) err = chunk_sync_close(&w);
    if (err) chunk_abandon(&w);
    return err;
}

static Err copy_file(const Export *m, const HfCopy *copy)
{
    char path[PATH_MAX], *data;
    int64_t size_bytes;
    TRY(path_in(m, copy->name, path));
    TRY(file_read_all(copy->path, COPY_MAX_BYTES, &data, &size_bytes));
    const Err err = file_replace(path, data, size_bytes);
    free(data);
    return err;
}

/* ---- the whole ---- */

static Err write_all(Export *m, SetupArena *a)
{
    const HfExportJob *x = m->x;
    char path[PATH_MAX];
    int64_t first;
    TRY(first_to_write(m, &first));
    TRY(theirs_start(&m->list, first, a));
    for (int64_t i = first; i < m->list.count; first = i) {
        while (i < m->list.count && m->place[i].file == m->place[first].file) i++;
        TRY(write_file(m, first, i));
    }
    if (m->file_count > 1) TRY(write_index(m));
    TRY(hf_config_write(x->cfg, &x->about, m->temp));
    for (int i = 0; i < x->copy_count; i++) TRY(copy_file(m, &x->copies[i]));
    if (!x->apart) return ERR_OK;
    TRY(path_in(m, "tokenizer.json", path));
    return tokenizer_join(x->apart, x->apart_in, path);
}

/* All that the files of a job depend on. */
static Err identity_of(const Export *m, char out[IDENTITY_BYTES])
{
    char path[PATH_MAX], *crc;
    int64_t size;
    if (snprintf(path, sizeof path, "%s/manifest.crc", m->x->from) >= (int)sizeof path)
        return err_set(ERR_CKPT, "path is too long: '%s'", m->x->from);
    TRY_AS(ERR_CKPT, file_read_all(path, IDENTITY_BYTES, &crc, &size));
    snprintf(out, IDENTITY_BYTES, "checkpoint %.*s, %s, %d files of %lld bytes\n", (int)strcspn(crc, "\n"), crc,
             m->x->about.dtype, m->file_count, (long long)m->x->shard_bytes);
    free(crc);
    return ERR_OK;
}

/* Is the interrupted job that left files the same one? */
static bool goes_on(const Export *m, const char *identity)
{
    char path[PATH_MAX], *text;
    int64_t size;
    if (path_in(m, "job", path) || !file_exists(path) || file_read_all(path, IDENTITY_BYTES, &text, &size))
        return false;
    const bool same = (size_t)size == strlen(identity) && !memcmp(text, identity, (size_t)size);
    free(text);
    return same;
}

/* Removes the files of an earlier job that was interrupted, but the lock; and where this one goes on with it, weights
 * that are whole. */
static Err sweep(const Export *m, bool on)
{
    char path[PATH_MAX];
    DIR *d = opendir(m->temp);
    Err err = ERR_OK;
    if (!d) return err_set(ERR_STORAGE, "cannot read folder '%s': %m", m->temp);
    for (struct dirent *entry; !err && (entry = readdir(d));) {
        const char *end = strrchr(entry->d_name, '.');
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..") || !strcmp(entry->d_name, "lock")) continue;
        if (on && (!strcmp(entry->d_name, "job") || (end && !strcmp(end, ".safetensors")))) continue;
        err = path_in(m, entry->d_name, path);
        if (!err) err = file_remove_tree(path);
    }
    closedir(d);
    return err;
}

/* The folder has its name when all is on the disk. */
static Err commit(Export *m, int lock)
{
    char path[PATH_MAX];
    TRY(path_in(m, "job", path));
    TRY(file_remove_tree(path));
    TRY(path_in(m, "lock", path));
    TRY(file_remove_tree(path));
    file_unlock(lock);
    TRY(file_sync_dir(m->temp));
    TRY(file_rename(m->temp, m->x->to));
    snprintf(path, sizeof path, "%s/..", m->x->to);
    return file_sync_dir(path);
}

/* A folder is nowhere, or empty. */
static Err check_target(const char *path)
{
    DIR *d = opendir(path);
    bool empty = true;
    if (!d && !file_exists(path)) return ERR_OK;
    if (d) {
        for (struct dirent *entry; empty && (entry = readdir(d));)
            empty = !strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..");
        closedir(d);
        if (empty) return ERR_OK;
    }
    err_set(ERR_CONFIG, d ? "'%s' holds files" : "'%s' is no folder", path);
    return err_hint("give --to a folder that is not there");
}

/* Leaves what an interrupted job of the same kind has made; from then on a file says which job this is. */
static Err begin(const Export *m)
{
    char identity[IDENTITY_BYTES], path[PATH_MAX];
    TRY(identity_of(m, identity));
    const bool on = goes_on(m, identity);
    TRY(sweep(m, on));
    TRY(path_in(m, "job", path));
    return on ? ERR_OK : file_replace(path, identity, (int64_t)strlen(identity));
}

/* While what is written has its temporary name. */
static Err write_temp(Export *m, SetupArena *a)
{
    ErrKept why;
    int lock;
    TRY(ckpt_lock(m->temp, &lock));
    Err err = begin(m);
    if (!err) err = write_all(m, a);
    if (!err) err = commit(m, lock);
    if (!err) return ERR_OK;
    err_keep(&why);
    (void)file_remove_tree(m->temp);
    file_unlock(lock);
    return err_again(&why, err);
}

static Err export(Export *m, SetupArena *a)
{
    const HfExportJob *x = m->x;
    HfClass kind;
    TRY(check_target(x->to));
    TRY(hf_class_of(x->cfg, &kind));
    const TheirsSpec spec = { .from = x->from,
                              .whole = x->whole,
                              .mtp_layers = x->cfg->model.mtp_layers,
                              .naming = hf_naming(kind, x->cfg, NULL),
                              .twins = true,
                              .stored = stored,
                              .user = x->about.dtype,
                              .threads = x->threads };
    TRY(setup_array(a, CHUNK_BYTES, &m->chunk));
    TRY(setup_array(a, TEXT_BYTES, &m->text));
    TRY(theirs_open(&spec, a, &m->list));
    TRY(assign_files(m, a));
    size_t n = strlen(x->to);
    while (n > 1 && x->to[n - 1] == '/') n--;
    if (snprintf(m->temp, PATH_MAX, "%.*s.partial", (int)n, x->to) >= PATH_MAX - 64)
        return err_set(ERR_CONFIG, "path is too long: '%s'", x->to);
    return write_temp(m, a);
}

Err hf_export(const HfExportJob *x)
{
    Export m = { .x = x };
    SetupArena a;
    setup_init(&a);
    const Err err = export(&m, &a);
    theirs_close(&m.list);
    setup_release(&a);
    return err;
}
