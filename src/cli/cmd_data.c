/* preprocess, tokenizer train, tokenize: text in, tokens out. */
#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/ending.h"
#include "base/file.h"
#include "base/log.h"
#include "base/units.h"
#include "base/words.h"
#include "cli/command.h"
#include "data/preprocess.h"
#include "data/tokenizer.h"

static const char *tokenizer, *output, *format = "auto", *key;
static Words inputs;
static bool append_eod, split_blank_lines, skip_missing, decode, force;
static int64_t threads, vocab_size;
static double save_every = 10;

#define TOKENIZER                                                                           \
    {                                                                                       \
        "tokenizer", OPTION_TEXT, &tokenizer,                                               \
            .required = true, .value = "T",                                                 \
            .help = "byte, a tokenizer.json, or a folder with it or with GPT-2's two files" \
    }

#define THREADS                                                                                                    \
    {                                                                                                              \
        "threads", OPTION_INT, &threads, .low = 0, .high = 1024, .value = "N", .help = "0: one for each processor" \
    }

#define INPUT                                                                                     \
    {                                                                                             \
        "input", OPTION_LIST, &inputs, .required = true, .value = "PATH...",                      \
                                       .help = "files or folders of text or JSON lines; -: stdin" \
    }

#define KEY                                                                         \
    {                                                                               \
        "key", OPTION_TEXT, &key, .value = "KEY",                                   \
                                  .help = "jsonl: the member with the text; a.b: b" \
                                          " in a (text)"                            \
    }

#define SKIP_MISSING                                                                                       \
    {                                                                                                      \
        "skip-missing", OPTION_FLAG, &skip_missing, .help = "jsonl: pass over lines whose text is missing" \
    }

#define FORMAT                                                                         \
    {                                                                                  \
        "format", OPTION_TEXT, &format, .value = "auto|text|jsonl|bytes",              \
                                        .help = "auto: jsonl or text; bytes: any file" \
    }

/* Options that both take: --format, which --key decides too, and stdin once. */
static Err read_format(InputFormat *out)
{
    static const char *const names[] = { "text", "jsonl", "auto", "bytes" };
    enum { COUNT = sizeof names / sizeof *names };
    int i = 0, streams = 0;
    while (i < COUNT && strcmp(format, names[i]) != 0) i++;
    if (i == COUNT) return err_set(ERR_CONFIG, "--format must be auto, text, jsonl or bytes, not '%s'", format);
    const bool takes_no_lines = i == INPUT_TEXT || i == INPUT_BYTES;
    if (key && takes_no_lines) return err_set(ERR_CONFIG, "--key belongs to --format jsonl");
    if (skip_missing && takes_no_lines) return err_set(ERR_CONFIG, "--skip-missing belongs to --format jsonl");
    for (int k = 0; k < inputs.count; k++) streams += input_is_stdin(inputs.items[k]);
    if (streams > 1) return err_set(ERR_CONFIG, "--input has '-' %d times: stdin can be read once", streams);
    *out = key ? INPUT_JSONL : (InputFormat)i;
    return ERR_OK;
}

/* ---- where the output goes ---- */

/* The first folder of the path that is not there: its bytes; 0: all are. */
static size_t missing_folder(const char *path)
{
    char folder[PATH_MAX];
    for (const char *at = strchr(path + 1, '/'); at; at = strchr(at + 1, '/')) {
        snprintf(folder, sizeof folder, "%.*s", (int)(at - path), path);
        if (!file_exists(folder)) return (size_t)(at - path);
    }
    return 0;
}

/* Numbers are what folders with names alike differ in on purpose. */
static bool same_but_digits(const char *a, const char *b)
{
    static const char digits[] = "0123456789";
    for (;; a++, b++) {
        a += strspn(a, digits);
        b += strspn(b, digits);
        if (*a != *b || !*a) return *a == *b;
    }
}

/* A folder beside where `folder` would be made, of nearly the same name. */
static bool folder_alike(const char *folder, char out[NAME_MAX + 1])
{
    char parent[PATH_MAX];
    const char *slash = strrchr(folder, '/'), *name = slash ? slash + 1 : folder;
    snprintf(parent, sizeof parent, "%.*s", slash ? (int)(slash - folder) + 1 : 2, slash ? folder : "./");
    DIR *d = opendir(parent);
    bool found = false;
    for (struct dirent *entry; d && !found && (entry = readdir(d));) {
        char path[2 * PATH_MAX];
        const char *other = entry->d_name;
        snprintf(path, sizeof path, "%s%s", parent, other);
        found = other[0] != '.' && word_nearest(name, &other, 1) && !same_but_digits(name, other) && file_is_dir(path);
        if (found) snprintf(out, NAME_MAX + 1, "%s", other);
    }
    if (d) closedir(d);
    return found;
}

/* Folders are made, and *made bytes of the path name the first of them; not one that looks like a mistype. */
static Err check_folder(const char *path, int *made)
{
    char folder[PATH_MAX], alike[NAME_MAX + 1];
    *made = (int)missing_folder(path);
    snprintf(folder, sizeof folder, "%.*s", *made, path);
    if (!*made || !folder_alike(folder, alike)) return ERR_OK;
    err_set(ERR_CONFIG, "there is no folder '%s'", folder);
    return err_hint("did you mean '%s', which is there? If not: mkdir -p '%s'", alike, folder);
}

static void say_made(const char *path, int made)
{
    if (made) log_info("made the folder '%.*s'", made, path);
}

/* Token files that are there stay, unless an interrupted job has begun to replace them. */
static Err check_new(const char *prefix)
{
    static const char *const suffixes[] = { ".idx", ".bin" };
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%.*s.part", PATH_MAX - 8, prefix);
    if (force || file_is_dir(path)) return ERR_OK;
    for (int i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%.*s%s", PATH_MAX - 8, prefix, suffixes[i]);
        struct stat st;
        if (lstat(path, &st) != 0 || !S_ISREG(st.st_mode)) continue; /* what else it is is told later */
        err_set(ERR_CONFIG, "'%s' is there already", path);
        return err_hint("another --output, or --force, which replaces it");
    }
    return ERR_OK;
}

/* ---- preprocess ---- */

static volatile sig_atomic_t stop;

/* The first signal ends the work in order, a second one at once, whichever. */
static void on_interrupt(int sig)
{
    stop = sig;
    for (int i = 0; i < ENDING_COUNT; i++) {
        struct sigaction now;
        if (!sigaction(ending_signals[i], NULL, &now) && now.sa_handler == on_interrupt)
            signal(ending_signals[i], SIG_DFL);
    }
    input_interrupt();
}

static void catch_interrupt(void)
{
    struct sigaction a = { .sa_handler = on_interrupt };
    sigfillset(&a.sa_mask);
    ending_catch(&a);
}

static const Option preprocess_options[] = {
    INPUT,
    TOKENIZER,
    { "output", OPTION_TEXT, &output, .required = true, .value = "PREFIX", .help = "writes PREFIX.bin and PREFIX.idx" },
    FORMAT,
    KEY,
    SKIP_MISSING,
    { "force", OPTION_FLAG, &force, .help = "replace files that are there" },
    { "append-eod", OPTION_FLAG, &append_eod, .help = "end each document with the end-of-document token" },
    { "split-blank-lines", OPTION_FLAG, &split_blank_lines, .help = "text: each paragraph is a document" },
    THREADS,
    { "save-every", OPTION_REAL, &save_every, .low = 0, .high = 1e6, .value = "SECONDS",
      .help = "how often what is done is made safe; 0: never" },
};

/* Without a name in it the files would be .bin, .idx and .crc, which nobody sees. */
static Err check_prefix(const char *prefix)
{
    const size_t n = strlen(prefix);
    if (n > 0 && prefix[n - 1] != '/') return ERR_OK;
    err_set(ERR_CONFIG, "--output '%s' names no files", prefix);
    return err_hint("give the beginning of their names: '%sbooks' makes '%sbooks.bin' and '%sbooks.idx'", prefix,
                    prefix, prefix);
}

static Err preprocess_files(const InputFiles *files, InputFormat form, PreprocessResult *r)
{
    PreprocessOptions o = { .inputs = files->paths,
                            .input_count = files->count,
                            .tokenizer = tokenizer,
                            .output = output,
                            .format = form,
                            .key = key,
                            .skip_missing = skip_missing,
                            .append_eod = append_eod,
                            .split_blank_lines = split_blank_lines,
                            .threads = (int)threads,
                            .save_every_s = save_every,
                            .stop = &stop };
    const Err err = preprocess_run(&o, r);
    return err == ERR_IO ? err_as(err, ERR_STORAGE) : err;
}

static Err preprocess(Words rest)
{
    (void)rest;
    char a[UNITS_BYTES];
    PreprocessResult r;
    InputFormat form;
    InputFiles files;
    int made;
    TRY(read_format(&form));
    if (split_blank_lines && form == INPUT_JSONL)
        return err_set(ERR_CONFIG, "--split-blank-lines belongs to --format text");
    TRY(check_prefix(output));
    TRY(input_files_check_output(inputs.items, inputs.count, output));
    TRY(check_new(output));
    TRY(check_folder(output, &made));
    catch_interrupt();
    TRY(input_files_open(inputs.items, inputs.count, &files));
    const Err err = preprocess_files(&files, form, &r);
    input_files_close(&files);
    TRY(err);
    say_made(output, made);
    printf("%s.bin %s.idx: %lld document%s, %lld token%s (%s, vocabulary %d) from %s\n", output, output,
           (long long)r.documents, r.documents == 1 ? "" : "s", (long long)r.tokens, r.tokens == 1 ? "" : "s",
           r.token_type, r.vocab, units_bytes(a, r.input_bytes));
    if (r.empty_documents > 0)
        log_info("%lld of these documents %s empty: in the index, without tokens", (long long)r.empty_documents,
                 r.empty_documents == 1 ? "is" : "are");
    if (r.missing_lines > 0)
        log_info("%lld line%s passed over: the member '%s' is missing or null", (long long)r.missing_lines,
                 r.missing_lines == 1 ? " was" : "s were", key ? key : "text");
    return ERR_OK;
}

const Command command_preprocess = {
    .name = "preprocess",
    .summary = "text or JSON lines to token files in Megatron's format",
    .text = "A document is a file of text or a JSON line. The result does not depend on threads.\n"
            "Bytes that are not UTF-8 are kept as byte tokens and counted. After a stop the same\n"
            "command goes on with PREFIX.part (not from stdin).\n",
    OPTIONS(preprocess_options),
    .run = preprocess,
};

/* ---- tokenizer train ---- */

static const Option train_options[] = {
    INPUT,
    { "vocab-size", OPTION_INT, &vocab_size, .required = true, .low = 257, .high = 1 << 24, .value = "N",
      .help = "256 bytes, the merges, and the end of document" },
    { "output", OPTION_TEXT, &output, .required = true, .value = "FILE.json", .help = "a tokenizer.json" },
    FORMAT,
    KEY,
    SKIP_MISSING,
    { "force", OPTION_FLAG, &force, .help = "replace a file that is there" },
    THREADS,
};

static Err tokenizer_train_command(Words rest)
{
    (void)rest;
    int64_t vocab;
    int made;
    InputFiles files;
    TokenizerTrainOptions o = { .vocab = vocab_size, .output = output, .threads = (int)threads, .key = key };
    TRY(read_format(&o.format));
    TRY(input_files_check_output(inputs.items, inputs.count, output));
    struct stat st;
    if (!force && !lstat(output, &st) && S_ISREG(st.st_mode)) /* what else it is is told later */
        return err_set(ERR_CONFIG, "'%s' is there already", output),
               err_hint("another --output, or --force, which replaces it: token files and runs made with it then "
                        "want the old one");
    TRY(check_folder(output, &made));
    TRY(input_files_open(inputs.items, inputs.count, &files));
    o.skip_missing = skip_missing;
    o.inputs = files.paths;
    o.input_count = files.count;
    const Err err = tokenizer_train(&o, &vocab);
    input_files_close(&files);
    if (err == ERR_IO) return err_as(err, ERR_STORAGE);
    TRY(err);
    say_made(output, made);
    printf("%s: vocabulary %lld\n", output, (long long)vocab);
    return ERR_OK;
}

const Command command_tokenizer_train = {
    .name = "tokenizer train",
    .summary = "train a byte-level BPE vocabulary",
    .text = "The file is a tokenizer.json, which the 'tokenizers' library loads too. It does not depend on the\n"
            "number of threads.\n",
    OPTIONS(train_options),
    .run = tokenizer_train_command,
};

/* ---- tokenize ---- */

static const Option tokenize_options[] = {
    TOKENIZER,
    { "decode", OPTION_FLAG, &decode, .help = "ids on stdin, text on stdout" },
};

/* All of stdin, malloc'ed, with a 0 byte behind it. */
static Err read_stdin(char **out, int64_t *size_bytes)
{
    size_t room = 1 << 16, used = 0;
    char *text = malloc(room);
    while (text) {
        ssize_t n = read(STDIN_FILENO, text + used, room - used - 1);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) {
            free(text);
            return err_set(ERR_DATA, "cannot read stdin: %s", strerror(errno));
        }
        if (n == 0) break;
        used += (size_t)n;
        if (room - used > 1) continue;
        char *more = realloc(text, room *= 2);
        if (!more) free(text);
        text = more;
    }
    if (!text) return err_set(ERR_MEMORY, "no memory for the text on stdin");
    text[used] = 0;
    *out = text;
    *size_bytes = (int64_t)used;
    return ERR_OK;
}

/* Ids separated by white space. */
static Err parse_ids(const char *text, int64_t size_bytes, int32_t **ids, int64_t *count)
{
    int64_t n = 0;
    if ((int64_t)strlen(text) != size_bytes)
        return err_set(ERR_DATA, "stdin holds a 0 byte at offset %lld, where ids should be", (long long)strlen(text));
    *ids = malloc((size_t)(size_bytes / 2 + 1) * sizeof **ids); /* an id and its separator: two bytes */
    if (!*ids) return err_set(ERR_MEMORY, "no memory for the ids on stdin");
    const char *blank = " \t\r\n";
    for (const char *at = text + strspn(text, blank); *at; at += strspn(at, blank)) {
        char *end;
        errno = 0;
        long id = strtol(at, &end, 10);
        bool number = *at >= '0' && *at <= '9' && !errno && id <= INT32_MAX && (!*end || strchr(blank, *end));
        if (!number)
            return err_set(ERR_DATA, "'%.*s' on stdin (offset %lld) is no token id", (int)strcspn(at, blank), at,
                           (long long)(at - text));
        (*ids)[n++] = (int32_t)id;
        at = end;
    }
    *count = n;
    return ERR_OK;
}

static Err decode_stdin(const Tokenizer *t, const char *text, int64_t size_bytes)
{
    int32_t *ids = NULL;
    char *bytes = NULL;
    int64_t count = 0, byte_count = 0;
    Err err = parse_ids(text, size_bytes, &ids, &count);
    if (!err) err = tokenizer_decode(t, ids, count, &bytes, &byte_count);
    if (!err) fwrite(bytes, 1, (size_t)byte_count, stdout);
    free(bytes);
    free(ids);
    return err;
}

static Err encode_stdin(const Tokenizer *t, const char *text, int64_t size_bytes)
{
    TokenList list = { 0 };
    Err err = tokenizer_encode(t, text, size_bytes, &list);
    for (int64_t i = 0; !err && i < list.count; i++) printf(i ? " %d" : "%d", list.ids[i]);
    if (!err) putchar('\n');
    free(list.ids);
    return err;
}

static Err tokenize(Words rest)
{
    (void)rest;
    Tokenizer *t = NULL;
    char *text = NULL;
    int64_t size_bytes = 0;
    TRY(tokenizer_open(tokenizer, &t));
    Err err = read_stdin(&text, &size_bytes);
    if (!err) err = decode ? decode_stdin(t, text, size_bytes) : encode_stdin(t, text, size_bytes);
    free(text);
    tokenizer_close(t);
    return err;
}

const Command command_tokenize = {
    .name = "tokenize",
    .summary = "stdin to token ids on stdout, and back",
    .text = "The whole input is one text; ids are separated by blanks, on one line.\n",
    OPTIONS(tokenize_options),
    .run = tokenize,
};
