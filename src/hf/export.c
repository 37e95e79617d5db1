/*
 * A checkpoint becomes a folder (convert.h). The list of their tensors follows from ours, parameter by parameter and
 * part by part. A tensor is seen as rows of its last dim, some of which are a job; what of our parameter lies there is
 * a box of each part.
 */
#include <dirent.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/half.h"
#include "base/int64.h"
#include "ckpt/chunks.h"
#include "ckpt/safetensors.h"
#include "ckpt/values.h"
#include "data/progress.h"
#include "hf/convert.h"
#include "hf/jobs.h"
#include "hf/tensors.h"

enum { JOB_FLOATS = 1 << 20, TEXT_BYTES = 8192, COPY_MAX_BYTES = 1 << 30 };

typedef struct {
    const Param *param;
    int first_part, parts;
    const char *name; /* of a twin; NULL: the first part's */
    const char *dtype;
    int64_t count, width, job_rows; /* elements; of a row; rows of a job */
    int64_t first_job;
    int64_t offset; /* in its file's data */
    int file;
} Theirs;

typedef struct {
    const HfExportJob *x;
    HfNaming naming;
    const char *dtype; /* of safetensors */
    CkptValues *values;
    Theirs *tensors;
    int64_t tensor_count, job_count, slot_floats, total_bytes, done_bytes;
    int file_count;
    char temp[PATH_MAX];
    char *chunk, *text;
    Jobs *jobs;
    Progress progress;
} Export;

/* ---- their tensors ---- */

static void name_of(const Export *m, const Theirs *t, char out[HF_NAME_MAX])
{
    if (t->name) snprintf(out, HF_NAME_MAX, "%s", t->name);
    else snprintf(out, HF_NAME_MAX, "%s", hf_part(&m->naming, t->param, t->first_part).name);
}

static int64_t stored_bytes(const Theirs *t) { return t->count * st_dtype_bytes(t->dtype); }

static void put_tensor(Export *m, const Param *p, int first_part, int parts, const char *name)
{
    const HfPart part = hf_part(&m->naming, p, first_part);
    Theirs t = { .param = p, .first_part = first_part, .parts = parts, .name = name, .count = 1 };
    for (int d = 0; d < part.ndim; d++) t.count *= part.shape[d];
    t.width = p->spec.ndim == 1 ? t.count : part.shape[part.ndim - 1]; /* (a vector is one job) */
    t.job_rows = max64(1, JOB_FLOATS / t.width);
    t.dtype = m->dtype;
    if (p->spec.group == PARAM_STATE) t.dtype = "F32";
    t.first_job = m->job_count;
    m->job_count += (t.count / t.width + t.job_rows - 1) / t.job_rows;
    m->slot_floats = max64(m->slot_floats, t.width);
    m->total_bytes += stored_bytes(&t);
    m->tensors[m->tensor_count++] = t;
}

static void put_tensors(Export *m, const Param *p)
{
    const int count = hf_part_count(&m->naming, p);
    for (int k = 0, first = 0; k < count; first = k) {
        const HfPart part = hf_part(&m->naming, p, first);
        for (k++; k < count && !strcmp(hf_part(&m->naming, p, k).name, part.name);) k++;
        put_tensor(m, p, first, k - first, NULL);
    }
}

static Err put_twins(Export *m, SetupArena *a)
{
    HfTwin twin;
    for (int i = 0; hf_twin(&m->naming, m->x->cfg->model.mtp_layers, i, &twin); i++) {
        char *name;
        const Param *p = &m->x->whole->items[param_find(m->x->whole, twin.ours)];
        if (!twin.written) continue;
        TRY(setup_strdup(a, twin.name, &name));
        put_tensor(m, p, 0, hf_part_count(&m->naming, p), name);
    }
    return ERR_OK;
}

static void assign_files(Export *m)
{
    int64_t used = 0;
    for (int64_t i = 0; i < m->tensor_count; i++) {
        Theirs *t = &m->tensors[i];
        if (used && used + stored_bytes(t) > m->x->shard_bytes) {
            used = 0;
            m->file_count++;
        }
        t->file = m->file_count;
        t->offset = used;
        used += stored_bytes(t);
    }
    m->file_count++;
}

static Err list_tensors(Export *m, SetupArena *a)
{
    const ParamRegistry *whole = m->x->whole;
    int64_t most = 2 * m->x->cfg->model.mtp_layers;
    for (int i = 0; i < whole->count; i++) most += hf_part_count(&m->naming, &whole->items[i]);
    TRY(setup_array(a, most, &m->tensors));
    m->slot_floats = JOB_FLOATS;
    for (int i = 0; i < whole->count; i++) put_tensors(m, &whole->items[i]);
    TRY(put_twins(m, a));
    assign_files(m);
    return ERR_OK;
}

/* What the class has no tensor for is 0 in it. */
static Err check_zeros(const Export *m)
{
    float values[1024];
    for (int i = 0; i < m->x->whole->count; i++) {
        const Param *p = &m->x->whole->items[i];
        if (hf_part_count(&m->naming, p)) continue;
        for (int64_t r = 0; r < p->spec.shape[0]; r++)
            for (int64_t c = 0, n; c < p->spec.shape[1]; c += n) {
                n = min64(1024, p->spec.shape[1] - c);
                TRY(ckpt_values_read(m->values, p->name, (Box){ { r, c }, { 1, n } }, values, n));
                for (int64_t k = 0; k < n; k++)
                    if (!(values[k] >= 0 && values[k] <= 0))
                        return err_set(ERR_CKPT, "tensor '%s' is not 0, and '%s' has no place for it",
                                       p->name, hf_class_names(m->naming.kind)->model_type);
            }
    }
    return ERR_OK;
}

/* ---- numbers ---- */

/* In place: floats become what is stored. */
static Err encode(const Theirs *t, float *values, int64_t count)
{
    uint16_t *out = (uint16_t *)values;
    const bool half = !strcmp(t->dtype, "F16");
    if (!strcmp(t->dtype, "F32")) return ERR_OK;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        const float x = half_float_of(bits);
        const uint16_t y = half ? f16_from_float(x) : bf16_from_float(x);
        const bool finite = (bits & 0x7F800000) != 0x7F800000;
        if (finite && (y & (half ? 0x7C00 : 0x7F80)) == (half ? 0x7C00 : 0x7F80))
            return err_set(ERR_CKPT, "tensor '%s' has %.9g, which is too large for %s", t->param->name,
                           (double)x, half ? "f16" : "bf16");
        memcpy(&out[i], &y, sizeof y);
    }
    return ERR_OK;
}

static int64_t up(int64_t a, int64_t by) { return a <= 0 ? 0 : (a + by - 1) / by; }

/* What a part has of elements [first, end) of their tensor, to out[0...]. */
static Err fill_part(const Export *m, const Theirs *t, const HfPart *part, int64_t first, int64_t end,
                     float *out, float *scratch)
{
    Box box = part->box;
    const int d = part->row < part->column; /* the dim of ours that goes from row to row of theirs */
    const int64_t stride = d ? part->column : part->row, start = part->first - part->first % t->width;
    int64_t low = 0, high = box.shape[d];
    if (stride >= t->width) {
        low = up(first - start, stride);
        high = min64(high, up(end - start, stride));
    }
    if (low >= high) return ERR_OK;
    box.offset[d] += low;
    box.shape[d] = high - low;
    const int64_t to = part->first + low * stride - first;
    TRY(ckpt_values_read(m->values, t->param->name, box, scratch, box.shape[1]));
    for (int64_t r = 0; r < box.shape[0]; r++) {
        const float *from = scratch + r * box.shape[1];
        float *row = out + to + r * part->row;
        if (part->column == 1) memcpy(row, from, (size_t)box.shape[1] * sizeof *row);
        else
            for (int64_t c = 0; c < box.shape[1]; c++) row[c * part->column] = from[c];
    }
    return ERR_OK;
}

static Err work(void *user, int64_t index, char *slot, char *scratch, int64_t *size_bytes)
{
    const Export *m = user;
    int64_t low = 0, high = m->tensor_count;
    while (high - low > 1) {
        const int64_t middle = (low + high) / 2;
        if (m->tensors[middle].first_job <= index) low = middle;
        else high = middle;
    }
    const Theirs *t = &m->tensors[low];
    const int64_t first = (index - t->first_job) * t->job_rows * t->width;
    const int64_t end = min64(t->count, first + t->job_rows * t->width);
    for (int k = 0; k < t->parts; k++) {
        const HfPart part = hf_part(&m->naming, t->param, t->first_part + k);
        TRY(fill_part(m, t, &part, first, end, (float *)slot, (float *)scratch));
    }
    *size_bytes = (end - first) * st_dtype_bytes(t->dtype);
    return encode(t, (float *)slot, end - first);
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

static Err put_header(const Export *m, const Theirs *from, const Theirs *end, TextOut *out)
{
    st_header_begin(&out->json);
    for (const Theirs *t = from; t < end; t++) {
        const HfPart part = hf_part(&m->naming, t->param, t->first_part);
        char name[HF_NAME_MAX];
        name_of(m, t, name);
        StTensor e = { .name = name, .dtype = t->dtype, .ndim = part.ndim, .offset = t->offset };
        for (int d = 0; d < part.ndim; d++) e.shape[d] = part.shape[d];
        e.size_bytes = stored_bytes(t);
        st_header_tensor(&out->json, &e);
        TRY(text_flush(out));
    }
    st_header_end(&out->json);
    return text_flush(out);
}

static Err put_data(Export *m, const Theirs *t, ChunkWriter *w)
{
    const void *data;
    for (int64_t left = stored_bytes(t), n; left; left -= n) {
        TRY(jobs_next(m->jobs, &data, &n));
        TRY(chunk_put(w, data, n));
        m->done_bytes += n;
        progress_show(&m->progress, m->done_bytes, 0);
    }
    return ERR_OK;
}

static Err put_file(Export *m, const Theirs *from, const Theirs *end, ChunkWriter *w)
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
    for (const Theirs *t = from; t < end; t++) TRY(put_data(m, t, w));
    return chunk_sync_close(w);
}

static Err write_file(Export *m, int64_t from, int64_t end)
{
    char name[64], path[PATH_MAX];
    ChunkWriter w;
    file_name(m, m->tensors[from].file, name);
    TRY(path_in(m, name, path));
    TRY(chunk_create(&w, path, m->chunk, NULL));
    const Err err = put_file(m, m->tensors + from, m->tensors + end, &w);
    if (err) chunk_abandon(&w);
    return err;
}

static Err put_index(const Export *m, TextOut *out)
{
    json_open(&out->json, NULL, '{');
    json_open(&out->json, "metadata", '{');
    json_put_int(&out->json, "total_size", m->total_bytes);
    json_close(&out->json, '}');
    json_open(&out->json, "weight_map", '{');
    for (int64_t i = 0; i < m->tensor_count; i++) {
        char name[HF_NAME_MAX], file[64];
        name_of(m, &m->tensors[i], name);
        file_name(m, m->tensors[i].file, file);
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

static Err copy_file(const Export *m, const char *from)
{
    char path[PATH_MAX], *data;
    int64_t size_bytes;
    const char *slash = strrchr(from, '/');
    TRY(path_in(m, slash ? slash + 1 : from, path));
    TRY(file_read_all(from, COPY_MAX_BYTES, &data, &size_bytes));
    const Err err = file_replace(path, data, size_bytes);
    free(data);
    return err;
}

/* ---- the whole ---- */

static Err write_all(Export *m, SetupArena *a)
{
    const HfExportJob *x = m->x;
    TRY(jobs_open(&(JobsSpec){ .user = m,
                               .work = work,
                               .count = m->job_count,
                               .slot_bytes = m->slot_floats * (int64_t)sizeof(float),
                               .threads = x->threads },
                  a, &m->jobs));
    progress_open(&m->progress, m->total_bytes, NULL);
    for (int64_t i = 0, first = 0; i < m->tensor_count; first = i) {
        while (i < m->tensor_count && m->tensors[i].file == m->tensors[first].file) i++;
        TRY(write_file(m, first, i));
    }
    if (m->file_count > 1) TRY(write_index(m));
    TRY(hf_config_write(x->cfg, &x->about, m->temp));
    for (int i = 0; i < x->copy_count; i++) TRY(copy_file(m, x->copies[i]));
    return ERR_OK;
}

/* What an earlier job left that was interrupted, but the lock. */
static Err sweep(const Export *m)
{
    char path[PATH_MAX];
    DIR *d = opendir(m->temp);
    Err err = ERR_OK;
    if (!d) return err_set(ERR_STORAGE, "cannot read folder '%s': %m", m->temp);
    for (struct dirent *entry; !err && (entry = readdir(d));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..") || !strcmp(entry->d_name, "lock"))
            continue;
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

/* While what is written has its temporary name. */
static Err write_temp(Export *m, SetupArena *a)
{
    ErrKept why;
    int lock;
    TRY(ckpt_lock(m->temp, &lock));
    Err err = sweep(m);
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
    m->naming = hf_naming(kind, x->cfg, NULL);
    m->dtype = !strcmp(x->about.dtype, "float32")   ? "F32"
               : !strcmp(x->about.dtype, "float16") ? "F16"
                                                    : "BF16";
    TRY(setup_array(a, CHUNK_BYTES, &m->chunk));
    TRY(setup_array(a, TEXT_BYTES, &m->text));
    TRY(ckpt_verify(x->from));
    TRY(ckpt_values_open(x->from, a, &m->values));
    TRY(ckpt_values_fit(m->values, x->whole));
    TRY(check_zeros(m));
    TRY(list_tensors(m, a));
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
    jobs_close(m.jobs);
    progress_close(&m.progress);
    ckpt_values_close(m.values);
    setup_release(&a);
    return err;
}
