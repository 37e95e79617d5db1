/*
 * hf/folder.c: weights of Hugging Face's, as a folder. Input: which files there are (a byte), bytes of data of two of
 * them (a byte each), how long the index is and the first header (2 bytes each, little endian), these, the second
 * header.
 * What is accepted has each tensor once, within its file and where the index says, and every byte of it can be read.
 */
#include <sys/stat.h>
#include <unistd.h>

#include "fuzz.h"

#include "hf/folder.h"
#include "base/json.h"

enum { HEAD = 7, HAS_INDEX = 1, HAS_SINGLE = 2, HAS_SECOND = 4, IS_LINK = 8, HAS_MANIFEST = 16 };

static const char index_file[] = "hf/model.safetensors.index.json", single[] = "hf/model.safetensors",
                  first[] = "hf/a.safetensors", second[] = "hf/b.safetensors";

typedef struct {
    const uint8_t *at;
    size_t left;
} Bytes;

static Bytes take(Bytes *from, size_t wanted)
{
    const Bytes b = { from->at, wanted < from->left ? wanted : from->left };
    *from = (Bytes){ b.at + b.left, from->left - b.left };
    return b;
}

static void put_weights(const char *name, Bytes header, size_t data)
{
    const uint64_t length = header.left;
    uint8_t *file = calloc(1, 8 + header.left + data);
    if (!file) abort();
    memcpy(file, &length, sizeof length);
    if (header.left) memcpy(file + 8, header.at, header.left);
    fuzz_write(name, file, 8 + header.left + data);
    free(file);
}

static void make_folder(const uint8_t *data, size_t size)
{
    static const char *const names[] = { index_file, single, first, second, "hf/manifest.json" };
    Bytes rest = { data + HEAD, size - HEAD };
    const Bytes index = take(&rest, data[3] + 256u * data[4]), header = take(&rest, data[5] + 256u * data[6]);
    mkdir(fuzz_path("hf"), 0700);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) unlink(fuzz_path(names[i]));
    if (data[0] & HAS_INDEX) fuzz_write(index_file, index.at, index.left);
    put_weights(data[0] & HAS_SINGLE ? single : first, header, data[1]);
    if (data[0] & HAS_SECOND) put_weights(second, rest, data[2]);
    if (!(data[0] & HAS_SECOND) && data[0] & IS_LINK && symlink("a.safetensors", fuzz_path(second))) abort();
    if (data[0] & HAS_MANIFEST) fuzz_write("hf/manifest.json", "{}", 2);
}

/* The file that an index names for a tensor; the index was read as JSON before. */
static void check_place(const HfFolder *f, const HfTensor *t, const Json *map)
{
    const char *name = json_text(json_get(map, t->t.name), NULL), *path = f->files[t->file].path;
    FUZZ_CHECK(name && strlen(path) > strlen(name) && !strcmp(path + strlen(path) - strlen(name), name),
               "'%s' is in '%s', the index says '%s'", t->t.name, path, name ? name : "nothing");
}

static void check_tensors(HfFolder *f, const Json *map)
{
    for (int64_t i = 0; i < f->count; i++) {
        const HfTensor *t = &f->tensors[i];
        char *read = malloc((size_t)t->t.size_bytes + 1);
        if (!read) abort();
        FUZZ_CHECK(!i || strcmp(f->tensors[i - 1].t.name, t->t.name) < 0, "'%s' is there twice", t->t.name);
        FUZZ_CHECK(t->file >= 0 && t->file < f->file_count &&
                       t->t.offset + t->t.size_bytes <= f->files[t->file].size_bytes,
                   "'%s' is beyond its file", t->t.name);
        FUZZ_CHECK(hf_folder_find(f, t->t.name) == t && hf_folder_use(f, t->t.name) == t && t->used,
                   "'%s' is lost", t->t.name);
        FUZZ_CHECK(!hf_folder_read(f, t, 0, read, t->t.size_bytes), "'%s': %s", t->t.name, err_message());
        if (map) check_place(f, t, map);
        free(read);
    }
    if (map)
        FUZZ_CHECK(json_count(map) == f->count, "%lld tensors, the index names %lld", (long long)f->count,
                   (long long)json_count(map));
}

static void check_index(HfFolder *f, bool used)
{
    size_t size;
    Json *j = NULL;
    char *text = used ? fuzz_read(index_file, &size) : NULL;
    if (text) FUZZ_CHECK(!json_parse("index", text, (int64_t)size, &j), "%s", err_message());
    check_tensors(f, j ? json_get(j, "weight_map") : NULL);
    json_free(j);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    SetupArena a;
    HfFolder f = { 0 };
    if (size < HEAD) return 0;
    make_folder(data, size);
    setup_init(&a);
    fuzz_memory_start();
    Err err = hf_folder_open(fuzz_path("hf"), &a, &f);
    FUZZ_MEMORY_BOUND(size, 8, 2 * FUZZ_JSON_BYTES + (2 << 20));
    fuzz_check_error(err, ERR_CKPT, ERR_CKPT, false);
    FUZZ_CHECK(hf_folder_is(fuzz_path("hf")) ==
                   (!(data[0] & HAS_MANIFEST) && (data[0] & (HAS_INDEX | HAS_SINGLE))),
               "weights of Hugging Face's, or not");
    if (!err) check_index(&f, !(data[0] & HAS_SINGLE));
    hf_folder_close(&f);
    setup_release(&a);
    return 0;
}
