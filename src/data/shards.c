/* See shards.h: which files a word names, then reading them as one. */
#include "data/shards.h"

#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/words.h"

enum { LIST_BYTES_MAX = 64 << 20 };
static const char patterns[] = "*?["; /* what makes a word one */

/* ---- which files ---- */

typedef struct {
    SetupArena *mem;
    char **prefix;
    int count;
} Names;

static bool is_pair(const char *word)
{
    char index[PATH_MAX];
    return snprintf(index, sizeof index, "%s.idx", word) < PATH_MAX && file_exists(index);
}

/* PREFIX.bin or PREFIX.idx is taken for PREFIX, unless that is one, too. */
static void cut_suffix(char *word)
{
    if ((text_ends(word, ".bin") || text_ends(word, ".idx")) && !is_pair(word)) word[strlen(word) - 4] = 0;
}

static Err add_name(Names *n, const char *word)
{
    TRY(setup_strdup(n->mem, word, &n->prefix[n->count]));
    cut_suffix(n->prefix[n->count++]);
    return ERR_OK;
}

static int by_bytes(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static Err list_line(const char *list, int64_t number, const char *line, const char *what)
{
    err_set(ERR_CONFIG, "list of token files '%s', line %lld: '%.600s' %s", list, (long long)number, line, what);
    return err_hint("a list has one prefix a line; weights stand in data.train, as `0.7 @a.txt 0.3 @b.txt`");
}

/* The text between the blanks at both ends, cut off in place. */
static char *trimmed(char *line)
{
    size_t n = strlen(line);
    while (n && strchr(" \t\r", line[n - 1])) line[--n] = 0;
    return line + strspn(line, " \t");
}

static Err add_lines(Names *n, const char *list, char *text)
{
    int64_t number = 0;
    for (char *line; (line = strsep(&text, "\n"));) {
        number++;
        line = trimmed(line);
        if (!*line || *line == '#') continue;
        line = word_bare(line);
        TRY(add_name(n, line));
        if (line[strcspn(line, " \t")] && !is_pair(n->prefix[n->count - 1]))
            return list_line(list, number, line, "names no token file");
    }
    return ERR_OK;
}

/* A file that is read twice would count twice: a list of `ls` has both PREFIX.bin and PREFIX.idx. */
static Err check_once(const Names *n, const char *list)
{
    char **sorted;
    TRY(setup_array(n->mem, n->count, &sorted));
    memcpy(sorted, n->prefix, (size_t)n->count * sizeof *sorted);
    qsort(sorted, (size_t)n->count, sizeof *sorted, by_bytes);
    for (int i = 1; i < n->count; i++) {
        if (strcmp(sorted[i - 1], sorted[i])) continue;
        err_set(ERR_CONFIG, "list of token files '%s': '%.600s' is there twice", list, sorted[i]);
        return err_hint("PREFIX, PREFIX.bin and PREFIX.idx are the same: leave one; a weight reads a file more often");
    }
    return ERR_OK;
}

static Err read_list(Names *n, const char *list)
{
    char *text;
    int64_t size_bytes, lines = 1;
    TRY_AS(ERR_CONFIG, file_read_all(list, LIST_BYTES_MAX, &text, &size_bytes));
    for (const char *at = text; (at = strchr(at, '\n')); at++) lines++;
    Err err = setup_array(n->mem, lines, &n->prefix);
    if (!err) err = add_lines(n, list, text);
    free(text);
    if (!err && n->count == 0) return err_set(ERR_CONFIG, "list of token files '%s' names none", list);
    return err ? err : check_once(n, list);
}

/* The pattern of a folder's or a pattern's PREFIX.idx; in a folder's name every character stands for itself. */
static void index_pattern(const char *word, bool folder, char out[2 * PATH_MAX])
{
    size_t n = 0, length = strlen(word);
    if (!folder && (text_ends(word, ".bin") || text_ends(word, ".idx"))) length -= 4;
    for (size_t i = 0; i < length && n < 2 * PATH_MAX - 16; i++) {
        if (folder && strchr("*?[\\", word[i])) out[n++] = '\\';
        out[n++] = word[i];
    }
    snprintf(out + n, 16, folder ? "/*.idx" : ".idx");
}

static Err find_files(Names *n, const char *word, bool folder)
{
    char pattern[2 * PATH_MAX];
    glob_t found;
    index_pattern(word, folder, pattern);
    const int rc = glob(pattern, GLOB_NOSORT | GLOB_ERR, NULL, &found);
    if (rc == GLOB_NOMATCH) {
        err_set(ERR_DATA, folder ? "the folder '%s' holds no token files" : "no token files match '%s'", word);
        return err_hint("what is looked for is '%s'; `megatrain preprocess --output PREFIX` makes it", pattern);
    }
    if (rc) return err_set(rc == GLOB_NOSPACE ? ERR_MEMORY : ERR_DATA, "cannot list token files of '%s': %m", word);
    Err err = setup_array(n->mem, found.gl_pathc, &n->prefix);
    for (size_t i = 0; !err && i < found.gl_pathc; i++) err = add_name(n, found.gl_pathv[i]);
    globfree(&found);
    if (!err) qsort(n->prefix, (size_t)n->count, sizeof *n->prefix, by_bytes);
    return err;
}

bool shards_missing(const char *word)
{
    if (*word == '@') return !file_exists(word + 1);
    return !strpbrk(word, patterns) && !file_is_dir(word) && !is_pair(word);
}

static Err find_names(Names *n, const char *word)
{
    if (*word == '@') return read_list(n, word + 1);
    const bool folder = file_is_dir(word);
    if (!is_pair(word) && (folder || strpbrk(word, patterns))) return find_files(n, word, folder);
    TRY(setup_array(n->mem, 1, &n->prefix));
    return add_name(n, word);
}

/* ---- opening ---- */

static Err open_all(Shards *s, const char *word, SetupArena *mem)
{
    Names n = { .mem = mem };
    char *name;
    TRY(find_names(&n, word));
    TRY(setup_strdup(mem, n.count > 1 ? word : *n.prefix, &name));
    s->name = name;
    TRY(setup_array(mem, n.count, &s->file));
    TRY(setup_array(mem, n.count + 1, &s->sequence));
    TRY(setup_array(mem, n.count + 1, &s->token));
    while (s->count < n.count) {
        Indexed *x = &s->file[s->count];
        TRY(indexed_open(n.prefix[s->count], x));
        s->count++;
        s->sequence[s->count] = s->sequences += x->sequences;
        s->token[s->count] = s->tokens += x->tokens;
        s->documents += x->documents;
        s->bytes += x->bin.size_bytes;
    }
    return ERR_OK;
}

Err shards_open(const char *word, SetupArena *mem, Shards *out)
{
    *out = (Shards){ 0 };
    Err err = open_all(out, word, mem);
    if (err) shards_close(out);
    return err;
}

void shards_close(Shards *s)
{
    for (int i = 0; i < s->count; i++) indexed_close(&s->file[i]);
    *s = (Shards){ 0 };
}

Err shards_check_tokenizer(const Shards *s, uint32_t tokenizer_crc, const char *name)
{
    for (int i = 0; i < s->count; i++) TRY(indexed_check_tokenizer(&s->file[i], tokenizer_crc, name));
    return ERR_OK;
}

/* ---- reading ---- */

/* The file that holds number `at` of what first[] counts: the last that begins at or before it. */
static int file_of(const Shards *s, const int64_t *first, int64_t at)
{
    int low = 0, high = s->count - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first[middle] <= at) low = middle;
        else high = middle - 1;
    }
    return low;
}

int64_t shards_length(const Shards *s, int64_t sequence)
{
    const int f = file_of(s, s->sequence, sequence);
    return indexed_length(&s->file[f], sequence - s->sequence[f]);
}

int64_t shards_start(const Shards *s, int64_t sequence)
{
    const int f = file_of(s, s->sequence, sequence);
    return s->token[f] + indexed_start(&s->file[f], sequence - s->sequence[f]);
}

void shards_fetch(const Shards *s, int64_t sequence)
{
    const int f = file_of(s, s->sequence, sequence);
    indexed_fetch(&s->file[f], sequence - s->sequence[f]);
}

/* Tokens from `first` on that lie in one file, at most `count`; *at: the first of them in it. */
static int64_t in_one_file(const Shards *s, int64_t first, int64_t count, int *file, int64_t *at)
{
    *file = file_of(s, s->token, first);
    *at = first - s->token[*file];
    const int64_t rest = s->token[*file + 1] - first;
    return count < rest ? count : rest;
}

/* out NULL: checks the tokens alone. */
static Err visit(const Shards *s, int64_t first, int64_t count, int64_t vocab, int32_t *out)
{
    int f;
    int64_t at;
    ASSERT(first >= 0 && count >= 0 && first <= s->tokens - count);
    for (int64_t n; count > 0; first += n, count -= n) {
        n = in_one_file(s, first, count, &f, &at);
        TRY(out ? indexed_read(&s->file[f], at, n, vocab, out) : indexed_check(&s->file[f], at, n, vocab, NULL));
        if (out) out += n;
    }
    return ERR_OK;
}

Err shards_read(const Shards *s, int64_t first, int64_t count, int64_t vocab, int32_t *out)
{
    return visit(s, first, count, vocab, out);
}

Err shards_check(const Shards *s, int64_t first, int64_t count, int64_t vocab)
{
    return visit(s, first, count, vocab, NULL);
}

bool shards_end_with(const Shards *s, int32_t id)
{
    int32_t last;
    for (int i = 0; i < s->count; i++) {
        const Indexed *x = &s->file[i];
        if (indexed_read(x, x->tokens - 1, 1, 0, &last) != ERR_OK || last != id) return false;
    }
    return true;
}

/* ---- checksums ---- */

uint32_t shards_index_crc(const Shards *s, uint32_t crc)
{
    for (int i = 0; i < s->count; i++) crc = crc32c(crc, s->file[i].idx.data, (size_t)s->file[i].idx.size_bytes);
    return crc;
}

bool shards_content_crc(const Shards *s, uint32_t *crc)
{
    *crc = s->file->bin_crc;
    for (int i = 0; i < s->count; i++) {
        if (!s->file[i].summed) return false;
        if (s->count > 1) *crc = crc32c(i ? *crc : 0, &s->file[i].bin_crc, sizeof s->file[i].bin_crc);
    }
    return true;
}
