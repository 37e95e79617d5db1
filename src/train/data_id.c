/* See data_id.h. */
#include "train/data_id.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void data_id_put_source(FILE *f, DatasetSource s)
{
    fprintf(f, "%s: ", s.name);
    if (s.files > 1) fprintf(f, "%d files, ", s.files);
    fprintf(f, "%lld bytes, %lld documents, %lld tokens, index %08x", (long long)s.bytes, (long long)s.documents,
            (long long)s.tokens, s.index_crc);
    if (s.has_content_crc) fprintf(f, ", content %08x", s.content_crc);
}

Err data_id_make(const Dataset *train, const Tokenizer *tokenizer, SetupArena *setup, char **out)
{
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    if (!f) return err_set(ERR_MEMORY, "no memory for the identity of the training data");
    fprintf(f, "train %08x, tokenizer %08x", dataset_crc(train), tokenizer_crc(tokenizer));
    int64_t stage = 0;
    for (int i = 0; i < dataset_source_count(train); i++) {
        const DatasetSource s = dataset_source(train, i);
        if (s.first != stage) fprintf(f, "\nfrom sample %lld on", (long long)s.first);
        stage = s.first;
        fputc('\n', f);
        data_id_put_source(f, s);
    }
    if (fclose(f)) return err_set(ERR_MEMORY, "no memory for the identity of the training data");
    Err err = setup_strdup(setup, text, out);
    free(text);
    return err;
}

enum { LINE = 4608 }; /* a path and a few numbers */

/* The next line of *at into `line`; false: no more. */
static bool next_line(const char **at, char line[LINE])
{
    if (!**at) return false;
    const size_t n = strcspn(*at, "\n");
    snprintf(line, LINE, "%.*s", (int)n, *at);
    *at += n + ((*at)[n] == '\n');
    return true;
}

/* Place of the last part of a token file's description, which may be missing; the end if it has none. */
static size_t content_at(const char *line)
{
    const char *at = strstr(line, ", content ");
    return at ? (size_t)(at - line) : strlen(line);
}

/* End of the path: nothing behind it has a colon. */
static size_t path_end(const char *line)
{
    const char *at = strrchr(line, ':');
    return at ? (size_t)(at - line) : 0;
}

/* Files may be moved where their content has a checksum. */
static bool same_file(const char *now, const char *then)
{
    const size_t a = path_end(now), b = path_end(then), x = content_at(now), y = content_at(then);
    if (now[x] && then[y]) return !strcmp(now + a, then + b);
    return x == y && !strncmp(now, then, x);
}

static Err differs(const char *what, const char *now, const char *then)
{
    err_set(ERR_CKPT, "the training data is not the checkpoint's: %s: '%.600s' now, '%.600s' then", what, now, then);
    return err_hint(
        "put the files, data.split, data.seed and the tokenizer back as they were (with data.order=megatron "
        "train.steps, too: its order depends on the run's epochs); to go on with these, --override "
        "data.train; to "
        "start a new run from these weights use another run.dir and checkpoint.load");
}

/* The first line in two parts. */
typedef struct {
    char train[LINE], tokenizer[LINE];
} FirstLine;

static FirstLine first_line(const char **text)
{
    FirstLine f = { "", "" };
    next_line(text, f.train);
    char *at = strstr(f.train, ", tokenizer ");
    if (!at) return f;
    snprintf(f.tokenizer, sizeof f.tokenizer, "%s", at + strlen(", tokenizer "));
    *at = 0;
    return f;
}

/* The first file that differs, in a and b; false: none. Of an earlier version's text there is but the first line. */
static bool other_file(const char *now, const char *then, char a[LINE], char b[LINE])
{
    while (next_line(&now, a) && next_line(&then, b))
        if (!same_file(a, b)) return true;
    return false;
}

/* Stops at the first difference that is not allowed. */
static Err compare(const char *now, const char *then, unsigned allowed, unsigned *found)
{
    const FirstLine one = first_line(&now), other = first_line(&then);
    char a[LINE], b[LINE];
    *found = 0;
    if (*other.tokenizer && strcmp(one.tokenizer, other.tokenizer)) {
        *found |= DATA_TOKENIZER;
        if (!(allowed & DATA_TOKENIZER)) return differs("the tokenizer's checksum", one.tokenizer, other.tokenizer);
    }
    if (other_file(now, then, a, b)) {
        *found |= DATA_FILES;
        return allowed & DATA_FILES ? ERR_OK : differs("a token file", a, b);
    }
    if (!strcmp(one.train, other.train)) return ERR_OK;
    *found |= DATA_ORDER;
    return allowed & DATA_ORDER ? ERR_OK : differs("the order of its samples", one.train, other.train);
}

unsigned data_id_differs(const char *now, const char *then)
{
    unsigned found;
    return compare(now, then, DATA_ALL, &found) ? DATA_ALL : found;
}

Err data_id_same(const char *now, const char *then, unsigned allowed)
{
    unsigned found;
    return compare(now, then, allowed, &found);
}

Err data_id_same_tokenizer(const Tokenizer *now, const char *then)
{
    char first[LINE] = "", crc[16];
    if (!then || !next_line(&then, first)) return ERR_OK;
    const char *was = strstr(first, ", tokenizer ");
    snprintf(crc, sizeof crc, "%08x", tokenizer_crc(now));
    if (!was || !strcmp(was + 12, crc)) return ERR_OK;
    err_set(ERR_CKPT, "the tokenizer is not the checkpoint's: its checksum is '%s' now, '%.600s' then", crc, was + 12);
    return err_hint("put data.tokenizer back as it was when the checkpoint was written: its ids mean other text now");
}
