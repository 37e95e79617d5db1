/* See folder.h. */
#include "hf/folder.h"

#include <glob.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"

static const char single_name[] = "model.safetensors", index_name[] = "model.safetensors.index.json";

static Err join(char out[PATH_MAX], const char *folder, const char *name)
{
    if (snprintf(out, PATH_MAX, "%s/%s", folder, name) < PATH_MAX) return ERR_OK;
    return err_set(ERR_CKPT, "path is too long: '%s'", folder);
}

bool hf_folder_is(const char *path)
{
    const bool ours = file_holds(path, "manifest.json") || file_holds(path, "checkpoints");
    return !ours && (file_holds(path, single_name) || file_holds(path, index_name) || file_holds(path, "config.json"));
}

Err hf_folder_hint_cache(const char *path, Err err)
{
    char pattern[PATH_MAX + 32];
    glob_t found;
    snprintf(pattern, sizeof pattern, "%s/snapshots/*", path);
    if (glob(pattern, GLOB_ONLYDIR, NULL, &found)) return err;
    err_hint("it is a model's folder in the hub's cache, which has its files in snapshots: give '%s'",
             found.gl_pathv[0]);
    globfree(&found);
    return err;
}

/* ---- names of files ---- */

/* A plain name of a safetensors file. */
static bool plain_name(const char *name)
{
    static const char end[] = ".safetensors";
    const size_t n = strlen(name);
    return *name != '.' && !strchr(name, '/') && n > sizeof end - 1 && n < NAME_MAX &&
           !strcmp(name + n - (sizeof end - 1), end);
}

static bool lies_in(const char *path, const char *folder)
{
    char real[PATH_MAX];
    if (!realpath(folder, real)) return false;
    const size_t n = strlen(real);
    return !strncmp(path, real, n) && path[n] == '/';
}

Err hf_folder_check_link(const char *folder, const char *path)
{
    char real[PATH_MAX], blobs[PATH_MAX], whole[PATH_MAX];
    struct stat st;
    if (lstat(path, &st)) return err_set(ERR_CKPT, "cannot read '%s': %m", path);
    if (!S_ISLNK(st.st_mode)) return ERR_OK;
    if (!realpath(path, real)) return err_set(ERR_CKPT, "'%s' is a link that leads to no file: %m", path);
    if (lies_in(real, folder)) return ERR_OK;
    const char *snapshots = realpath(folder, whole) ? strstr(whole, "/snapshots/") : NULL;
    TRY(join(blobs, folder, "../../blobs"));
    if (snapshots && !strchr(snapshots + strlen("/snapshots/"), '/') && lies_in(real, blobs)) return ERR_OK;
    return err_set(ERR_CKPT, "'%s' is a link that leads out of the folder, to '%s'", path, real);
}

/* ---- opening ---- */

static Err open_file(HfFolder *f, const char *name, SetupArena *a)
{
    char path[PATH_MAX];
    HfFile *file = &f->files[f->file_count];
    TRY(join(path, f->path, name));
    if (!file_exists(path)) return err_set(ERR_CKPT, "'%s' is missing, which the index names", path);
    TRY(hf_folder_check_link(f->path, path));
    TRY(setup_strdup(a, path, &file->path));
    TRY_AS(ERR_CKPT, file_open_regular(path, &file->fd, &file->size_bytes));
    f->file_count++;
    return ERR_OK;
}

static int by_text(const void *a, const void *b) { return strcmp(*(const char *const *)a, *(const char *const *)b); }

/* The files that the index names, each once; map: its weight_map. */
static Err open_indexed(HfFolder *f, const char *path, const Json *map, SetupArena *a)
{
    const char **names;
    const int64_t count = json_count(map);
    int64_t n = 0;
    if (!json_is_object(map) || !count) return err_set(ERR_CKPT, "'%s' has no 'weight_map'", path);
    TRY(setup_array(a, count, &names));
    for (void *it = json_iter(map); it; it = json_next(map, it)) {
        const char *name = json_text(json_iter_value(it), NULL);
        if (!name || !plain_name(name))
            return err_set(ERR_CKPT, "'%s': tensor '%s' is in '%s', which is no name of a file in the folder", path,
                           json_iter_key(it), name ? name : "no text");
        names[n++] = name;
    }
    qsort(names, (size_t)count, sizeof *names, by_text);
    n = 0;
    for (int64_t i = 0; i < count; i++)
        if (!i || strcmp(names[i], names[n - 1])) names[n++] = names[i];
    TRY(setup_array(a, n, &f->files));
    for (int64_t i = 0; i < n; i++) TRY(open_file(f, names[i], a));
    return ERR_OK;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const HfTensor *)a)->t.name, ((const HfTensor *)b)->t.name);
}

static Err read_headers(HfFolder *f, SetupArena *a)
{
    StFile *headers;
    TRY(setup_array(a, f->file_count, &headers));
    for (int i = 0; i < f->file_count; i++) {
        TRY(st_open(f->files[i].path, a, &headers[i]));
        f->count += headers[i].count;
    }
    TRY(setup_array(a, f->count, &f->tensors));
    int64_t n = 0;
    for (int i = 0; i < f->file_count; i++)
        for (int64_t k = 0; k < headers[i].count; k++)
            f->tensors[n++] = (HfTensor){ .t = headers[i].items[k], .file = i };
    if (n) qsort(f->tensors, (size_t)n, sizeof *f->tensors, by_name);
    for (int64_t i = 1; i < n; i++)
        if (!strcmp(f->tensors[i - 1].t.name, f->tensors[i].t.name))
            return err_set(ERR_CKPT, "tensor '%s' is in '%s' and in '%s'", f->tensors[i].t.name,
                           f->files[f->tensors[i - 1].file].path, f->files[f->tensors[i].file].path);
    return ERR_OK;
}

/* Index and headers name the same. */
static Err check_index(const HfFolder *f, const char *path, const Json *map)
{
    for (void *it = json_iter(map); it; it = json_next(map, it)) {
        const HfTensor *t = hf_folder_find(f, json_iter_key(it));
        const char *name = json_text(json_iter_value(it), NULL);
        const char *at = t ? strrchr(f->files[t->file].path, '/') + 1 : NULL;
        if (!t || strcmp(at, name))
            return err_set(ERR_CKPT, "'%s' has tensor '%s' in '%s', which does not hold it", path, json_iter_key(it),
                           name);
    }
    if (json_count(map) == f->count) return ERR_OK;
    for (int64_t i = 0; i < f->count; i++)
        if (!json_get(map, f->tensors[i].t.name))
            return err_set(ERR_CKPT, "'%s' holds tensor '%s', which '%s' does not name",
                           f->files[f->tensors[i].file].path, f->tensors[i].t.name, index_name);
    return ERR_OK;
}

static Err open_with_index(HfFolder *f, const char *path, SetupArena *a)
{
    Json *root;
    TRY(hf_folder_check_link(f->path, path));
    TRY_AS(ERR_CKPT, json_read_file(path, ST_MAX_HEADER_BYTES, &root));
    const Json *map = json_get(root, "weight_map");
    Err err = open_indexed(f, path, map, a);
    if (!err) err = read_headers(f, a);
    if (!err) err = check_index(f, path, map);
    json_free(root);
    return err;
}

/* (files of pickled objects would run what is in them) */
static Err no_weights(const char *path)
{
    char pattern[PATH_MAX + 32];
    glob_t found;
    err_set(ERR_CKPT, "'%s' has neither '%s' nor '%s'", path, single_name, index_name);
    snprintf(pattern, sizeof pattern, "%s/*.bin", path);
    if (glob(pattern, 0, NULL, &found)) return ERR_CKPT;
    globfree(&found);
    return err_hint("files of PyTorch's own (*.bin) are not read: python3 -c \"from transformers import "
                    "AutoModelForCausalLM as M; M.from_pretrained('%s', dtype='auto').save_pretrained('NEW')\"",
                    path);
}

Err hf_folder_open(const char *path, SetupArena *a, HfFolder *out)
{
    char index[PATH_MAX];
    *out = (HfFolder){ .path = path };
    TRY(join(index, path, index_name));
    if (!file_holds(path, single_name) && file_exists(index)) return open_with_index(out, index, a);
    if (!file_holds(path, single_name)) {
        return no_weights(path);
    }
    TRY(setup_array(a, 1, &out->files));
    TRY(open_file(out, single_name, a));
    return read_headers(out, a);
}

void hf_folder_close(HfFolder *f)
{
    for (int i = 0; i < f->file_count; i++) close(f->files[i].fd);
    f->file_count = 0;
}

/* ---- tensors ---- */

const HfTensor *hf_folder_find(const HfFolder *f, const char *name)
{
    const HfTensor key = { .t = { .name = name } };
    return f->count ? bsearch(&key, f->tensors, (size_t)f->count, sizeof key, by_name) : NULL;
}

const HfTensor *hf_folder_use(HfFolder *f, const char *name)
{
    const HfTensor *t = hf_folder_find(f, name);
    if (t) f->tensors[t - f->tensors].used = true;
    return t;
}

Err hf_folder_read(const HfFolder *f, const HfTensor *t, int64_t offset, void *out, int64_t size_bytes)
{
    const HfFile *file = &f->files[t->file];
    int64_t got;
    ASSERT(offset >= 0 && size_bytes >= 0 && offset + size_bytes <= t->t.size_bytes);
    TRY_AS(ERR_CKPT, file_read_some(file->fd, file->path, t->t.offset + offset, out, size_bytes, &got));
    if (got == size_bytes) return ERR_OK;
    return err_set(ERR_CKPT, "'%s' ends inside of tensor '%s'", file->path, t->t.name);
}
