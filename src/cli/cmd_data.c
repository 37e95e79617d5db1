/* preprocess, tokenizer train, tokenize: text in, tokens out. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/log.h"
#include "base/units.h"
#include "cli/command.h"
#include "data/preprocess.h"
#include "data/tokenizer.h"

static const char *tokenizer, *output, *format = "text", *key;
static Words inputs;
static bool append_eod, split_blank_lines, decode;
static int64_t threads, vocab_size;
static double save_every = 10;

#define TOKENIZER                                                                           \
    {                                                                                       \
        "tokenizer", OPTION_TEXT, &tokenizer,                                               \
            .required = true, .value = "T",                                                 \
            .help = "byte, a tokenizer.json, or a folder with it or with GPT-2's two files" \
    }

#define THREADS                                                                \
    {                                                                          \
        "threads", OPTION_INT, &threads, .low = 0, .high = 1024, .value = "N", \
                                         .help = "0: one for each processor"   \
    }

/* ---- preprocess ---- */

static const Option preprocess_options[] = {
    { "input", OPTION_LIST, &inputs, .required = true, .value = "FILE...",
      .help = "UTF-8 text or JSON lines; plain, gzip or zstd" },
    TOKENIZER,
    { "output", OPTION_TEXT, &output, .required = true, .value = "PREFIX",
      .help = "writes PREFIX.bin and PREFIX.idx" },
    { "format", OPTION_TEXT, &format, .value = "text|jsonl",
      .help = "text: each file is one document; jsonl: each line" },
    { "key", OPTION_TEXT, &key, .value = "KEY",
      .help = "jsonl: the member with the text; a.b: b in a (text)" },
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
    return err_hint("give the beginning of their names: '%sbooks' makes '%sbooks.bin' and '%sbooks.idx'",
                    prefix, prefix, prefix);
}

static Err preprocess(Words rest)
{
    (void)rest;
    char a[UNITS_BYTES];
    PreprocessResult r;
    bool jsonl = strcmp(format, "jsonl") == 0;
    if (!jsonl && strcmp(format, "text"))
        return err_set(ERR_CONFIG, "--format must be text or jsonl, not '%s'", format);
    if (key && !jsonl) return err_set(ERR_CONFIG, "--key belongs to --format jsonl");
    if (split_blank_lines && jsonl)
        return err_set(ERR_CONFIG, "--split-blank-lines belongs to --format text");
    TRY(check_prefix(output));
    PreprocessOptions o = { .inputs = inputs.items,
                            .input_count = inputs.count,
                            .tokenizer = tokenizer,
                            .output = output,
                            .format = jsonl ? INPUT_JSONL : INPUT_TEXT,
                            .key = key,
                            .append_eod = append_eod,
                            .split_blank_lines = split_blank_lines,
                            .threads = (int)threads,
                            .save_every_s = save_every };
    Err err = preprocess_run(&o, &r);
    if (err == ERR_IO) return err_as(err, ERR_STORAGE);
    TRY(err);
    printf("%s.bin %s.idx: %lld documents, %lld tokens (%s, vocabulary %d) from %s\n", output, output,
           (long long)r.documents, (long long)r.tokens, r.token_type, r.vocab, units_bytes(a, r.input_bytes));
    if (r.empty_documents > 0)
        log_info("%lld of these documents are empty: they are in the index, without tokens",
                 (long long)r.empty_documents);
    return ERR_OK;
}

const Command command_preprocess = {
    .name = "preprocess",
    .summary = "text or JSON lines to token files in Megatron's format",
    .text = "Several threads, bounded memory; the result does not depend on the number of threads.\n"
            "Bytes that are not UTF-8 are kept as byte tokens and counted. When it was interrupted,\n"
            "the same command goes on with PREFIX.part.\n",
    OPTIONS(preprocess_options),
    .run = preprocess,
};

/* ---- tokenizer train ---- */

static const Option train_options[] = {
    { "input", OPTION_LIST, &inputs, .required = true, .value = "FILE...", .help = "UTF-8 text" },
    { "vocab-size", OPTION_INT, &vocab_size, .required = true, .low = 257, .high = 1 << 24, .value = "N",
      .help = "256 bytes, the merges, and the end of document" },
    { "output", OPTION_TEXT, &output, .required = true, .value = "FILE.json", .help = "a tokenizer.json" },
    THREADS,
};

static Err tokenizer_train_command(Words rest)
{
    (void)rest;
    int64_t vocab;
    TokenizerTrainOptions o = { inputs.items, inputs.count, vocab_size, output, (int)threads };
    Err err = tokenizer_train(&o, &vocab);
    if (err == ERR_IO) return err_as(err, ERR_STORAGE);
    TRY(err);
    printf("%s: vocabulary %lld\n", output, (long long)vocab);
    return ERR_OK;
}

const Command command_tokenizer_train = {
    .name = "tokenizer train",
    .summary = "train a byte-level BPE vocabulary",
    .text =
        "The file is a tokenizer.json, which the 'tokenizers' library loads too. It does not depend on the\n"
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
        return err_set(ERR_DATA, "stdin holds a 0 byte at offset %lld, where ids should be",
                       (long long)strlen(text));
    *ids = malloc((size_t)(size_bytes / 2 + 1) * sizeof **ids); /* an id and its separator: two bytes */
    if (!*ids) return err_set(ERR_MEMORY, "no memory for the ids on stdin");
    const char *blank = " \t\r\n";
    for (const char *at = text + strspn(text, blank); *at; at += strspn(at, blank)) {
        char *end;
        errno = 0;
        long id = strtol(at, &end, 10);
        bool number = *at >= '0' && *at <= '9' && !errno && id <= INT32_MAX && (!*end || strchr(blank, *end));
        if (!number)
            return err_set(ERR_DATA, "'%.*s' on stdin (offset %lld) is no token id", (int)strcspn(at, blank),
                           at, (long long)(at - text));
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
