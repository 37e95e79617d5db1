/*
 * inspect: says what a path is and checks every byte of it that carries a checksum.
 *
 *   folder with manifest.json                  a checkpoint
 *   folder with checkpoints/ or config.ini     a run: its last metrics and its newest checkpoint
 *   PREFIX, PREFIX.idx or PREFIX.bin           a pair of token files
 *   *.json, other folders, "byte"              a tokenizer
 */
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/file.h"
#include "base/plain.h"
#include "base/run_files.h"
#include "base/units.h"
#include "ckpt/ckpt.h"
#include "cli/command.h"
#include "cli/config_arg.h"
#include "data/indexed.h"
#include "data/tokenizer.h"

static int64_t document = -1;
static const char *tokenizer;

static void print_what(const char *path, const char *is)
{
    plain_put(stdout, path, (int64_t)strlen(path), PLAIN_LINE);
    printf(": %s\n", is);
}

/* ---- checkpoints and runs ---- */

static Err write_ckpt(const char *path, FILE *out)
{
    uint64_t digest;
    TRY(ckpt_print(path, out));
    fault_point("inspect");
    TRY(ckpt_verify(path));
    TRY(ckpt_digest(path, &digest));
    fprintf(out, "\nchecksums     every byte is as it was written\ndigest        %016llx\n",
            (unsigned long long)digest);
    return ERR_OK;
}

/* Nothing is printed of one that was removed meanwhile. */
static Err inspect_ckpt(const char *path, void *unused)
{
    char *text = NULL;
    size_t size = 0;
    (void)unused;
    FILE *out = open_memstream(&text, &size);
    if (!out) return err_set(ERR_MEMORY, "no memory for the list of tensors");
    Err err = write_ckpt(path, out);
    if (fclose(out)) err = err_set(ERR_MEMORY, "no memory for the list of tensors");
    if (!err || file_is_dir(path)) fwrite(text, 1, size, stdout);
    free(text);
    return err;
}

/* The last whole line of metrics.jsonl. */
static Err print_last_metrics(const char *dir)
{
    char path[PATH_MAX];
    FileMap map;
    if (!file_holds(dir, RUN_METRICS)) return ERR_OK;
    snprintf(path, sizeof path, "%s/" RUN_METRICS, dir);
    TRY(file_map(path, &map));
    const char *text = map.data;
    int64_t end = map.size_bytes;
    while (end > 0 && text[end - 1] != '\n') end--;
    int64_t begin = end - 1;
    while (begin > 0 && text[begin - 1] != '\n') begin--;
    if (end > 0) {
        printf("last metrics: ");
        plain_put(stdout, text + begin, end - 1 - begin, PLAIN_LINE);
        putchar('\n');
    }
    file_unmap(&map);
    return ERR_OK;
}

static Err inspect_run(const char *dir)
{
    bool found;
    print_what(dir, "a run");
    TRY_AS(ERR_STORAGE, print_last_metrics(dir));
    TRY(ckpt_visit_newest(dir, inspect_ckpt, NULL, &found));
    if (!found) printf("no checkpoint yet\n");
    return ERR_OK;
}

/* ---- data ---- */

static Err print_tokens(const char *prefix, const Indexed *x)
{
    int64_t highest, longest = 0;
    char a[UNITS_BYTES];
    bool summed;
    TRY(indexed_verify(x, &summed));
    TRY(indexed_check(x, 0, x->tokens, 0, &highest));
    for (int64_t i = 0; i < x->sequences; i++)
        if (indexed_length(x, i) > longest) longest = indexed_length(x, i);
    print_what(prefix, "token files");
    printf("documents %lld\nsequences %lld, the longest of %lld tokens\n", (long long)x->documents,
           (long long)x->sequences, (long long)longest);
    printf("tokens %lld (%s, %s)\nhighest id %lld\n", (long long)x->tokens, token_type_name(x->type),
           units_bytes(a, x->bin.size_bytes), (long long)highest);
    printf("checksums %s\n", summed ? "every byte is as it was written" : "none: there is no PREFIX.crc");
    if (x->made_with) printf("made with the tokenizer of crc %08x\n", x->tokenizer_crc);
    return ERR_OK;
}

/* The ids as text, to a file byte by byte, to a terminal what is fit for it. The end of the document, if it is
 * there, is not part of it. */
static Err print_text(const Tokenizer *t, const int32_t *ids, int64_t count)
{
    char *text;
    int64_t size_bytes;
    if (count > 0 && ids[count - 1] == tokenizer_eod(t)) count--;
    TRY(tokenizer_decode(t, ids, count, &text, &size_bytes));
    if (isatty(STDOUT_FILENO)) plain_put(stdout, text, size_bytes, PLAIN_LINES);
    else fwrite(text, 1, (size_t)size_bytes, stdout);
    free(text);
    return ERR_OK;
}

static Err print_document(const char *prefix, const Indexed *x, const Tokenizer *t)
{
    if (document >= x->documents) {
        err_set(ERR_DATA, "there is no document %lld in '%s'", (long long)document, prefix);
        return err_hint("it has %lld, counted from 0", (long long)x->documents);
    }
    int64_t first = indexed_start(x, document ? indexed_document_end(x, document - 1) : 0);
    int64_t count = indexed_start(x, indexed_document_end(x, document)) - first;
    int32_t *ids = malloc((size_t)(count + 1) * sizeof *ids);
    if (!ids) return err_set(ERR_MEMORY, "no memory for %lld tokens", (long long)count);
    Err err = indexed_read(x, first, count, t ? tokenizer_vocab(t) : 0, ids);
    if (!err && t) err = print_text(t, ids, count);
    for (int64_t i = 0; !err && !t && i < count; i++) printf(i ? " %d" : "%d", ids[i]);
    if (!err && !t) putchar('\n');
    free(ids);
    return err;
}

static Err inspect_tokens(const char *prefix)
{
    Indexed x;
    Tokenizer *t = NULL;
    TRY(indexed_open(prefix, &x));
    Err err = tokenizer ? tokenizer_open(tokenizer, &t) : ERR_OK;
    if (!err && t) err = indexed_check_tokenizer(&x, tokenizer_crc(t), tokenizer);
    if (!err) err = document < 0 ? print_tokens(prefix, &x) : print_document(prefix, &x, t);
    tokenizer_close(t);
    indexed_close(&x);
    return err;
}

static Err inspect_tokenizer(const char *path)
{
    Tokenizer *t;
    TRY(tokenizer_open(path, &t));
    print_what(path, "a tokenizer");
    printf("vocabulary %d\nend of document ", tokenizer_vocab(t));
    if (tokenizer_eod(t) < 0) printf("none\n");
    else printf("%d\n", tokenizer_eod(t));
    printf("crc %08x\n", tokenizer_crc(t));
    tokenizer_close(t);
    return ERR_OK;
}

/* ---- what is it? ---- */

static bool are_tokens(const char *prefix)
{
    char idx[PATH_MAX], bin[PATH_MAX];
    snprintf(idx, sizeof idx, "%.*s.idx", PATH_MAX - 8, prefix);
    snprintf(bin, sizeof bin, "%.*s.bin", PATH_MAX - 8, prefix);
    return file_exists(idx) || file_exists(bin);
}

/* PREFIX of PREFIX, PREFIX.idx, PREFIX.bin when there are token files of that name. A prefix may end as they do. */
static bool token_prefix(const char *path, char prefix[PATH_MAX])
{
    size_t n = strlen(path);
    if (n + 8 > PATH_MAX) return false;
    memcpy(prefix, path, n + 1);
    if (are_tokens(prefix)) return true;
    if (n <= 4 || (strcmp(path + n - 4, ".idx") && strcmp(path + n - 4, ".bin"))) return false;
    prefix[n - 4] = 0;
    return are_tokens(prefix);
}

static Err inspect_path(const char *path)
{
    char prefix[PATH_MAX];
    size_t n = strlen(path);
    if (document >= 0) {
        if (token_prefix(path, prefix)) return inspect_tokens(prefix);
        return err_set(ERR_DATA, "there are no token files '%s' to print a document of", path);
    }
    if (strcmp(path, "byte") == 0) return inspect_tokenizer(path);
    if (file_holds(path, "manifest.json")) return ckpt_removed(path, inspect_ckpt(path, NULL));
    if (file_holds(path, RUN_CHECKPOINTS) || file_holds(path, RUN_CONFIG)) return inspect_run(path);
    if (token_prefix(path, prefix)) return inspect_tokens(prefix);
    if (config_arg_is_hf(path)) {
        print_what(path, "a model of Hugging Face's");
        printf("megatrain config from-hf %s prints its configuration, convert --format megatrain makes a run\n", path);
        if (!file_holds(path, "vocab.json") && !file_holds(path, "tokenizer.json")) return ERR_OK;
    }
    bool folder =
        file_holds(path, "encoder.json") || file_holds(path, "vocab.json") || file_holds(path, "tokenizer.json");
    bool json = n > 5 && !strcmp(path + n - 5, ".json") && file_exists(path);
    if (folder || json) return inspect_tokenizer(path);
    if (!file_exists(path)) return err_set(ERR_CKPT, "there is no '%s'", path);
    return err_set(ERR_CKPT, "'%s' is no checkpoint, run folder, token file or tokenizer", path);
}

static Err inspect(Words rest)
{
    if (rest.count == 0) return err_set(ERR_CONFIG, "'megatrain inspect' needs a PATH");
    if (tokenizer && document < 0) return err_set(ERR_CONFIG, "--tokenizer belongs to --document");
    fault_init(0, 0);
    for (int i = 0; i < rest.count; i++) TRY(inspect_path(rest.items[i]));
    return ERR_OK;
}

static const Option options[] = {
    { "document", OPTION_INT, &document, .low = 0, .high = 9e15, .value = "N",
      .help = "of token files: print the ids of document N, from 0" },
    { "tokenizer", OPTION_TEXT, &tokenizer, .value = "T", .help = "print it as the text that it was made from" },
};

const Command command_inspect = {
    .name = "inspect",
    .summary = "what a checkpoint, run, token file or tokenizer holds",
    .rest = "PATH...",
    .text = "Every byte that has a checksum is verified, every token id is looked at.\n",
    OPTIONS(options),
    .run = inspect,
};
