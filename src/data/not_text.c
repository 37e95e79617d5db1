/* See not_text.h. */
#include "data/not_text.h"

#include <stdio.h>
#include <string.h>

typedef struct {
    const char *magic;
    int bytes, at;
    const char *name;
    const char *rows; /* for a table: Python that runs over its batches `b`; q is `module` */
    const char *module;
    const char *unpack; /* the program that writes the file uncompressed with -dc; NULL: none */
} Format;

static const Format formats[] = {
    { "PAR1", 4, 0, "Parquet", "q.ParquetFile(sys.argv[1]).iter_batches(columns=[sys.argv[2]])", "parquet" },
    { "ARROW1\0", 7, 0, "Arrow", "(lambda r:map(r.get_batch,range(r.num_record_batches)))(q.open_file(sys.argv[1]))",
      "ipc" },
    { "\xFF\xFF\xFF\xFF", 4, 0, "Arrow (a stream)", "q.open_stream(sys.argv[1])", "ipc" },
    { "\x7F"
      "ELF",
      4, 0, "an executable or a library", NULL, NULL },
    { "\xCF\xFA\xED\xFE", 4, 0, "an executable or a library", NULL, NULL },
    { "PK\3\4", 4, 0, "a zip archive", NULL, NULL },
    { "7z\xBC\xAF\x27\x1C", 6, 0, "a 7z archive", NULL, NULL },
    { "ustar", 5, 257, "a tar archive", NULL, NULL },
    { "BZh", 3, 0, "compressed by bzip2", NULL, NULL, "bzip2" },
    { "\xFD"
      "7zXZ\0",
      6, 0, "compressed by xz", NULL, NULL, "xz" },
    { "\x89PNG\r\n", 6, 0, "a picture", NULL, NULL },
    { "\xFF\xD8\xFF", 3, 0, "a picture", NULL, NULL },
    { "GIF8", 4, 0, "a picture", NULL, NULL },
    { "%PDF-", 5, 0, "a PDF", NULL, NULL },
    { "\x93NUMPY", 6, 0, "an array of NumPy", NULL, NULL },
    { "\x89HDF\r\n", 6, 0, "HDF5", NULL, NULL },
    { "SQLite format 3\0", 16, 0, "a database of SQLite", NULL, NULL },
    { "\xFF\xFE", 2, 0, "UTF-16 text", NULL, NULL },
    { "\xFE\xFF", 2, 0, "UTF-16 text", NULL, NULL },
};

enum { ZEROS_LEAST = 8, ZEROS_ONE_OF = 50 }; /* text holds none; bytes by chance one of 256 */

static const Format *find_format(const char *beginning, int64_t size)
{
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++) {
        const Format *f = &formats[i];
        const bool compressed = !strcmp(f->magic, "BZh"); /* a digit and six bytes more: no word begins like that */
        if (size < f->at + f->bytes || memcmp(beginning + f->at, f->magic, (size_t)f->bytes)) continue;
        if (!compressed || (size >= 10 && !memcmp(beginning + 4, "1AY&SY", 6))) return f;
    }
    return NULL;
}

static bool has_many_zeros(const char *beginning, int64_t size)
{
    int64_t zeros = 0;
    for (int64_t i = 0; i < size; i++) zeros += !beginning[i];
    return zeros >= ZEROS_LEAST && zeros > size / ZEROS_ONE_OF;
}

/* The command that hands over a table's column; its words are quoted, so names with a quote are left to the reader, as
 * is the file that came on stdin. */
static Err hint_table(const Format *f, const char *path, const char *key)
{
    const bool has_name = strcmp(path, "-") != 0 && !strchr(path, '\'');
    return err_hint(
        "python3 -c \"import sys,json,pyarrow.%s as q;[print(json.dumps({sys.argv[2]:t or ''})) for b in %s "
        "for t in b.column(sys.argv[2]).to_pylist()]\" '%s' '%s' | megatrain preprocess --input - --format "
        "jsonl --key '%s' --tokenizer T --output PREFIX  # pip install pyarrow; --format "
        "bytes takes them as they are",
        f->module, f->rows, has_name ? path : "FILE", strchr(key, '\'') ? "COLUMN" : key,
        strchr(key, '\'') ? "COLUMN" : key);
}

Err not_text_check(const char *path, const char *key, const char *beginning, int64_t size)
{
    const Format *f = find_format(beginning, size);
    if (!f && !has_many_zeros(beginning, size)) return ERR_OK;
    err_set(ERR_DATA, "'%s' is no text but %s", path, f ? f->name : "holds many zero bytes");
    if (f && f->rows) return hint_table(f, path, key);
    if (f && f->unpack && strcmp(path, "-") != 0 && !strchr(path, '\''))
        return err_hint("%s -dc '%s' | megatrain ... --input - ...", f->unpack, path);
    return err_hint("give its text, in UTF-8, plain or compressed by gzip or zstd; --format bytes takes it as it is");
}
