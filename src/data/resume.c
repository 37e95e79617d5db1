/* See resume.h. The file is one line of JSON and a line with the checksum of the first. */
#include "data/resume.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/version.h"

enum { FORMAT = 1, RECORD_BYTES = 4096, CRC_LINE_BYTES = 9, TOKENIZER_MAX_BYTES = 1 << 30 };

/* ---- who am I? ---- */

/* A checksum of the inputs that have been begun: how far a job is does not depend on the others. */
static uint32_t inputs_crc(const JobIdentity *id, const InputPlace *at)
{
    uint32_t crc = 0;
    int64_t begun = at->input + (at->offset > 0);
    for (int64_t i = 0; i < begun && i < id->input_count; i++) {
        crc = crc32c(crc, id->inputs[i], strlen(id->inputs[i]) + 1);
        crc = crc32c(crc, &id->stats[i], sizeof id->stats[i]);
    }
    return crc;
}

static Err add_file(const char *path, uint32_t *crc)
{
    char *text;
    int64_t size_bytes;
    TRY_AS(ERR_DATA, file_read_all(path, TOKENIZER_MAX_BYTES, &text, &size_bytes));
    *crc = crc32c(*crc, text, (size_t)size_bytes);
    free(text);
    return ERR_OK;
}

Err tokenizer_identity(const Tokenizer *t, const char *spec, uint32_t *out)
{
    static const char *const names[] = { "encoder.json", "vocab.bpe", "vocab.json", "merges.txt", "tokenizer.json" };
    char path[PATH_MAX];
    *out = tokenizer_crc(t);                      /* has ids and their bytes; merges and patterns are in the files */
    if (strcmp(spec, "byte") == 0) return ERR_OK; /* whatever file has that name */
    if (!file_is_dir(spec)) return add_file(spec, out);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "%.*s/%s", PATH_MAX - 32, spec, names[i]);
        if (file_exists(path)) TRY(add_file(path, out));
    }
    return ERR_OK;
}

/* ---- writing ---- */

static void put_done(JsonOut *j, const char *name, const JobIdentity *id, const JobDone *d)
{
    json_open(j, name, '{');
    json_put_int(j, "input", d->place.input);
    json_put_int(j, "offset", d->place.offset);
    json_put_int(j, "lines", d->place.lines);
    json_put_int(j, "inputs_crc", inputs_crc(id, &d->place));
    json_put_int(j, "tokens", d->written.tokens);
    json_put_int(j, "sequences", d->written.sequences);
    json_put_int(j, "documents", d->written.documents);
    json_put_int(j, "document_tokens", d->written.document_tokens);
    json_put_int(j, "tokens_crc", d->written.tokens_crc);
    json_put_int(j, "lengths_crc", d->written.lengths_crc);
    json_put_int(j, "empty_documents", d->empty_documents);
    json_put_int(j, "missing_lines", d->missing_lines);
    json_put_int(j, "invalid_bytes", d->invalid_bytes);
    json_close(j, '}');
}

Err job_save(const JobIdentity *id, const JobDone *done, const JobDone *file_start)
{
    char text[RECORD_BYTES], path[PATH_MAX];
    JsonOut j;
    json_out_init(&j, text, sizeof text - CRC_LINE_BYTES - 2);
    json_open(&j, NULL, '{');
    json_put_int(&j, "format", FORMAT);
    json_put_text(&j, "program", MEGATRAIN_VERSION);
    json_put_text(&j, "options", id->options);
    json_put_int(&j, "tokenizer", id->tokenizer);
    put_done(&j, "done", id, done);
    put_done(&j, "file_start", id, file_start);
    json_close(&j, '}');
    if (!json_out_ok(&j)) return err_set(ERR_INTERNAL, "no room for the record of what is done");
    int n = (int)j.used_bytes;
    n += sprintf(text + n, "\n%08x\n", crc32c(0, text, (size_t)n));
    indexed_part(id->prefix, "/job.json", path);
    return file_replace(path, text, n);
}

/* ---- reading ---- */

static JobDone get_done(const Json *j)
{
    return (JobDone){ .place = { json_int(json_get(j, "input"), -1), json_int(json_get(j, "offset"), -1),
                                 json_int(json_get(j, "lines"), -1) },
                      .written = { json_int(json_get(j, "tokens"), -1), json_int(json_get(j, "sequences"), -1),
                                   json_int(json_get(j, "documents"), -1), json_int(json_get(j, "document_tokens"), -1),
                                   (uint32_t)json_int(json_get(j, "tokens_crc"), 0),
                                   (uint32_t)json_int(json_get(j, "lengths_crc"), 0) },
                      .empty_documents = json_int(json_get(j, "empty_documents"), 0),
                      .missing_lines = json_int(json_get(j, "missing_lines"), 0),
                      .invalid_bytes = json_int(json_get(j, "invalid_bytes"), 0) };
}

/* Numbers that can be multiplied by the size of an item, and added. */
static bool is_possible(const JobDone *d)
{
    const int64_t numbers[] = { d->place.input,
                                d->place.offset,
                                d->place.lines,
                                d->written.tokens,
                                d->written.sequences,
                                d->written.documents,
                                d->written.document_tokens,
                                d->empty_documents,
                                d->missing_lines,
                                d->invalid_bytes };
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (numbers[i] < 0 || numbers[i] > INT64_MAX / 16) return false;
    return true;
}

static Err warn_damaged(const char *path)
{
    log_warn("'%s' is damaged: the job starts from the beginning", path);
    return ERR_OK;
}

static bool inputs_match(const JobIdentity *id, const Json *j, const JobDone *d)
{
    return d->place.input <= id->input_count && json_int(json_get(j, "inputs_crc"), -1) == inputs_crc(id, &d->place);
}

__attribute__((format(printf, 3, 4))) static Err other_job(const JobIdentity *id, Err kind, const char *fmt, ...)
{
    char part[PATH_MAX], what[RECORD_BYTES];
    va_list args;
    va_start(args, fmt);
    vsnprintf(what, sizeof what, fmt, args);
    va_end(args);
    indexed_part(id->prefix, "", part);
    err_set(kind, "'%s' holds the work of an interrupted job with other %s", part, what);
    return err_hint("give the same to go on with it, or remove '%s' to start from the beginning", part);
}

static Err take_record(const JobIdentity *id, const char *path, const Json *j, JobDone *done, JobDone *file_start,
                       bool *found)
{
    const char *options = json_text(json_get(j, "options"), NULL);
    const Json *now = json_get(j, "done"), *start = json_get(j, "file_start");
    if (json_int(json_get(j, "format"), 0) != FORMAT) return other_job(id, ERR_CONFIG, "version of its record");
    if (!options || strcmp(options, id->options) != 0)
        return other_job(id, ERR_CONFIG, "options: '%s', now '%s'", options ? options : "", id->options);
    if (json_int(json_get(j, "tokenizer"), -1) != id->tokenizer) return other_job(id, ERR_DATA, "tokenizer");
    *done = get_done(now);
    *file_start = get_done(start);
    *found = is_possible(done) && is_possible(file_start);
    if (!*found) return warn_damaged(path);
    if (inputs_match(id, now, done)) return ERR_OK;
    *done = *file_start;
    if (!inputs_match(id, start, done)) return other_job(id, ERR_DATA, "inputs (their names, sizes and times count)");
    log_warn("the input that was in progress has changed: it is read again from its beginning");
    return ERR_OK;
}

/* The JSON line, whose checksum stands behind it. */
static bool is_intact(const char *text, int64_t size_bytes)
{
    char line[CRC_LINE_BYTES + 2];
    int64_t n = size_bytes - CRC_LINE_BYTES - 1;
    if (n < 1) return false;
    snprintf(line, sizeof line, "\n%08x\n", crc32c(0, text, (size_t)n));
    return memcmp(text + n, line, CRC_LINE_BYTES + 1) == 0;
}

Err job_load(const JobIdentity *id, JobDone *done, JobDone *file_start, bool *found)
{
    char path[PATH_MAX], *text;
    int64_t size_bytes;
    Json *j;
    *found = false;
    indexed_part(id->prefix, "/job.json", path);
    if (!file_exists(path)) return ERR_OK;
    TRY(file_size(path, &size_bytes));
    if (size_bytes > RECORD_BYTES) return warn_damaged(path);
    TRY(file_read_all(path, RECORD_BYTES, &text, &size_bytes));
    bool intact = is_intact(text, size_bytes) && json_parse(path, text, size_bytes - CRC_LINE_BYTES - 1, &j) == ERR_OK;
    free(text);
    if (!intact) return warn_damaged(path);
    Err err = take_record(id, path, j, done, file_start, found);
    json_free(j);
    return err;
}

/* ---- the folder ---- */

Err job_lock(const char *prefix, int *lock)
{
    char path[PATH_MAX];
    TRY(indexed_check_place(prefix));
    indexed_part(prefix, "", path);
    TRY(file_make_dirs(path));
    indexed_part(prefix, "/lock", path);
    return file_lock(path, lock);
}

void job_unlock(const char *prefix, int lock)
{
    char path[PATH_MAX];
    ErrKept why;
    indexed_part(prefix, "/job.json", path);
    err_keep(&why); /* an error may be on its way up */
    bool keep = file_exists(path);
    indexed_part(prefix, "/lock", path); /* gone: what may be there again is another process's */
    keep = keep || !file_is_still(lock, path);
    indexed_part(prefix, "", path);
    if (!keep && file_remove_tree(path) != ERR_OK) err_again(&why, ERR_IO);
    file_unlock(lock);
}
