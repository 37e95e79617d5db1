/* See logits.h. */
#include "train/logits.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "train/inputs.h"

enum { IDS_MAX_BYTES = 1 << 30 };

typedef struct {
    const char *path;
    int32_t *ids; /* [sequences, positions] */
    int64_t sequences, positions, seq, vocab;
} IdFile;

/* ---- ids ---- */

static const char blanks[] = " \t\r";

/* The ids of a line that has one, behind those of the lines before. */
static Err read_line(IdFile *f, char *line, int64_t number)
{
    int32_t *to = f->ids + f->sequences * f->positions;
    int64_t n = 0;
    for (char *word = strtok(line, blanks); word; word = strtok(NULL, blanks)) {
        char *end;
        errno = 0;
        const long long id = strtoll(word, &end, 10);
        if (*end || errno || id < 0 || id >= f->vocab)
            return err_set(ERR_DATA, "%s:%lld: '%.40s' is no id of a vocabulary of %lld", f->path, (long long)number,
                           word, (long long)f->vocab);
        if (n == f->seq)
            return err_set(ERR_DATA, "%s:%lld: more than model.seq = %lld ids", f->path, (long long)number,
                           (long long)f->seq);
        to[n++] = (int32_t)id;
    }
    if (f->sequences && n != f->positions)
        return err_set(ERR_DATA, "%s:%lld: %lld ids, in the lines before %lld", f->path, (long long)number,
                       (long long)n, (long long)f->positions);
    f->positions = n;
    f->sequences++;
    return ERR_OK;
}

static Err read_lines(IdFile *f, char *text, int64_t size_bytes)
{
    int64_t number = 0;
    for (char *at = text, *next; at < text + size_bytes; at = next) {
        char *end = memchr(at, '\n', (size_t)(text + size_bytes - at));
        if (!end) end = text + size_bytes;
        next = end + 1;
        number++;
        if (memchr(at, 0, (size_t)(end - at)))
            return err_set(ERR_DATA, "%s:%lld: a 0 byte", f->path, (long long)number);
        *end = 0;
        if (at[strspn(at, blanks)]) TRY(read_line(f, at, number));
    }
    return f->sequences ? ERR_OK : err_set(ERR_DATA, "'%s' has no ids", f->path);
}

/* Owns: f->ids, also after an error. */
static Err read_ids(IdFile *f)
{
    char *text;
    int64_t size_bytes;
    TRY_AS(ERR_DATA, file_read_all(f->path, IDS_MAX_BYTES, &text, &size_bytes));
    f->ids = malloc((size_t)(size_bytes / 2 + 1) * sizeof *f->ids); /* an id and what ends it: two bytes */
    Err err = f->ids ? read_lines(f, text, size_bytes) : err_set(ERR_MEMORY, "no memory for '%s'", f->path);
    free(text);
    return err;
}

/* All ranks read the same ids, whatever their hosts call the file. */
static Err agree_on_ids(const Run *r, const IdFile *f)
{
    char facts[128];
    const uint32_t crc = crc32c(0, f->ids, (size_t)(f->sequences * f->positions) * sizeof *f->ids);
    snprintf(facts, sizeof facts, "--ids: %lld lines of %lld ids, checksum %08x", (long long)f->sequences,
             (long long)f->positions, crc);
    return inputs_agree_on_argument(r, facts);
}

/* Gives the ids as samples: behind the ids a sample is filled up. */
static Err id_tokens(void *user, int64_t first, int64_t count, int32_t *tokens)
{
    const IdFile *f = user;
    memset(tokens, 0, (size_t)(count * (f->seq + 1)) * sizeof *tokens);
    for (int64_t i = 0; i < count; i++)
        memcpy(tokens + i * (f->seq + 1), f->ids + (first + i) * f->positions, (size_t)f->positions * sizeof *tokens);
    return ERR_OK;
}

/* ---- the file ---- */

static Err write_header(FileWriter *w, const IdFile *f)
{
    enum { BEFORE = 10, UNIT = 64 };
    char head[4 * UNIT];
    int n = snprintf(head + BEFORE, sizeof head - BEFORE,
                     "{'descr': '<f4', 'fortran_order': False, 'shape': (%lld, %lld, %lld), }", (long long)f->sequences,
                     (long long)f->positions, (long long)f->vocab);
    const int size = (BEFORE + n + 1 + UNIT - 1) / UNIT * UNIT;
    memset(head + BEFORE + n, ' ', (size_t)(size - BEFORE - n - 1));
    head[size - 1] = '\n';
    memcpy(head, "\x93NUMPY\1\0", 8);
    head[8] = (char)(size - BEFORE);
    head[9] = 0;
    return file_write(w, head, size);
}

/* A few sequences at a time, as many as the ranks take at once. w: NULL on other ranks than 0. */
static Err write_rows(Run *r, const IdFile *f, FileWriter *w)
{
    const int64_t most = trainer_row_samples(&r->trainer), each = f->positions * f->vocab;
    float *logits = malloc((size_t)(most * each + 1) * sizeof *logits);
    Err err = logits ? ERR_OK : err_set(ERR_MEMORY, "no memory for the logits of %lld sequences", (long long)most);
    if (!err && w) err = write_header(w, f);
    for (int64_t first = 0; first < f->sequences && !err; first += most) {
        const int64_t left = f->sequences - first, count = left < most ? left : most;
        err = trainer_row_logits(&r->trainer, (TokenSource){ (void *)f, id_tokens, NULL }, first, count, f->positions,
                                 logits);
        if (!err && w) err = file_write(w, logits, count * each * (int64_t)sizeof *logits);
    }
    free(logits);
    return err;
}

static Err write_file(Run *r, const IdFile *f, const char *out)
{
    FileWriter w;
    char temp[PATH_MAX];
    TRY(file_check_replaces(out, "NUMPY"));
    file_sweep_beside(out);
    TRY(file_create_beside(out, &w));
    snprintf(temp, sizeof temp, "%s", w.path);
    Err err = write_rows(r, f, &w);
    if (err) {
        file_abandon(&w);
        return err;
    }
    err = file_sync_close(&w);
    if (!err) return file_take_place(temp, out);
    unlink(temp);
    return err;
}

Err logits_write(Run *r, const char *ids, const char *out)
{
    IdFile f = { .path = ids, .seq = r->spec.model.seq, .vocab = r->spec.model.vocab };
    Err err = read_ids(&f);
    if (!err) err = agree_on_ids(r, &f);
    if (!err) err = r->world->rank ? write_rows(r, &f, NULL) : write_file(r, &f, out);
    free(f.ids);
    return err == ERR_IO ? err_as(err, ERR_STORAGE) : err;
}
