/*
 * data/dataset.c, data/sets.c: the texts of data.train, data.valid and data.split. Input: a byte that says which order
 * (lower 2 bits; 3: as validation sets) and of how many samples; the data sets up to a line feed, in which '@' and '&'
 * stand for two token files; the split. In what is accepted the words are the files', each gets its share of the draws,
 * and samples are the tokens where they are said to stand.
 */
#include "fuzz.h"

#include <ctype.h>
#include <math.h>

#include "data/indexed.h"
#include "data/order.h"
#include "data/sets.h"

enum { VOCAB = 256, SEQ = 4, POSITIONS = 16, FILES = 2 };
static const char *const names[FILES] = { "a", "b" };
static Indexed files[FILES];

static void write_files(void)
{
    for (int f = 0; f < FILES; f++) {
        IndexedWriter *w;
        Err err = indexed_create(fuzz_path(names[f]), f ? TOKEN_I32 : TOKEN_U16, &w);
        for (int32_t i = 0; i < 60 && !err; i++) {
            int32_t id = (7 * i + 100 * f) % VOCAB;
            err = indexed_add_tokens(w, &id, 1);
            if (!err && i % (f ? 30 : 6) == 5) err = indexed_end_document(w);
        }
        if (!err) err = indexed_end_document(w);
        if (!err) err = indexed_finish(w);
        if (!err) err = indexed_open(fuzz_path(names[f]), &files[f]);
        FUZZ_CHECK(!err, "%s", err_message());
    }
}

/* The text with the names of the files in it, and without patterns, which would look through the whole machine;
 * malloc'ed */
static char *with_names(const uint8_t *data, size_t size)
{
    char *text = malloc(size * 64 + 1);
    size_t n = 0;
    if (!text) abort();
    for (size_t i = 0; i < size; i++)
        if (data[i] == '@' || data[i] == '&')
            n += (size_t)sprintf(text + n, "%s", fuzz_path(names[data[i] == '&']));
        else text[n++] = strchr("*?[", data[i]) && data[i] ? 'x' : (char)data[i];
    text[n] = 0;
    return text;
}

static char *next_word(char **at)
{
    while (isspace((unsigned char)**at)) ++*at;
    char *word = *at;
    while (**at && !isspace((unsigned char)**at)) ++*at;
    if (**at) *(*at)++ = 0;
    return *word ? word : NULL;
}

/* A file may be named by its prefix, or by either file of its pair. */
static bool names_file(const char *word, const char *prefix)
{
    size_t n = strlen(prefix);
    const char *suffix = word + n;
    return !strncmp(word, prefix, n) && (!*suffix || !strcmp(suffix, ".bin") || !strcmp(suffix, ".idx"));
}

/* The words are weight, prefix, weight, prefix, or one prefix; of each file as many draws as its weight says. */
static void check_words(const Dataset *d, const char *spec, bool keyed)
{
    char *words[2 * BLEND_SOURCES_MAX + 1], *text = strdup(spec), *at = text;
    int n = 0, draws[BLEND_SOURCES_MAX] = { 0 };
    double sum = 0;
    while (n <= 2 * BLEND_SOURCES_MAX && (words[n] = next_word(&at))) n++;
    int count = n > 1 ? n / 2 : 1;
    FUZZ_CHECK(n <= 2 * BLEND_SOURCES_MAX && (n == 1 || n % 2 == 0), "%d words", n);
    FUZZ_CHECK(dataset_source_count(d) == count, "%d files of %d words", dataset_source_count(d), n);
    bool longer = false; /* (a weight is less than a 4096th of all: another block) */
    for (int i = 0; i < count; i++) {
        const char *word = words[n > 1 ? 2 * i + 1 : 0];
        FUZZ_CHECK(names_file(word, dataset_source_name(d, i)), "'%s' for '%s'", dataset_source_name(d, i), word);
        sum += n > 1 ? strtod(words[2 * i], NULL) : 1;
    }
    for (int i = 0; keyed && i < count; i++)
        longer |= BLEND_BLOCK * (n > 1 ? strtod(words[2 * i], NULL) : 1) / sum < 1;
    for (int i = 0; keyed && !longer && i < BLEND_BLOCK; i++) draws[dataset_place(d, i).source]++;
    for (int i = 0; keyed && !longer && i < count; i++) {
        double share = BLEND_BLOCK * (n > 1 ? strtod(words[2 * i], NULL) : 1) / sum;
        FUZZ_CHECK(fabs(draws[i] - share) < 1 + 1e-9, "file %d: %d draws, and its share is %g", i, draws[i],
                   share);
    }
    free(text);
}

static void check_samples(const Dataset *d, bool placed, int64_t positions)
{
    int32_t sample[SEQ + 1], tokens[SEQ + 1];
    for (int64_t i = 0; i < positions; i++) {
        Err err = dataset_get(d, i, sample);
        FUZZ_CHECK(!err, "%s", err_message());
        for (int k = 0; k <= SEQ; k++) FUZZ_CHECK(sample[k] >= 0 && sample[k] < VOCAB, "%d", sample[k]);
        if (!placed) continue;
        DatasetPlace p = dataset_place(d, i);
        bool second = !strcmp(dataset_source_name(d, p.source), fuzz_path(names[1]));
        bool first = !strcmp(dataset_source_name(d, p.source), fuzz_path(names[0]));
        if (!first && !second) continue; /* the same files under another name */
        err = indexed_read(&files[second], p.first_token, SEQ + 1, VOCAB, tokens);
        FUZZ_CHECK(!err && !memcmp(sample, tokens, sizeof tokens), "another sample at %lld", (long long)i);
    }
}

static void check_set(const Dataset *d, const DatasetOptions *o)
{
    bool megatron = o->order == ORDER_MEGATRON;
    check_samples(d, !megatron, megatron ? o->samples : POSITIONS);
    Err err = megatron ? ERR_OK : dataset_check(d, POSITIONS);
    FUZZ_CHECK(!err, "%s", err_message());
}

static void check_sets(const DatasetOptions *o)
{
    Sets s;
    Err err = sets_open(o, &s);
    fuzz_check_error(err, ERR_CONFIG, ERR_DATA, false);
    if (err) return;
    FUZZ_CHECK(s.count >= 1 && s.count <= SETS_MAX, "%d sets", s.count);
    for (int i = 0; i < s.count; i++) {
        FUZZ_CHECK(strlen(s.set[i].name) < SET_NAME_BYTES && (*s.set[i].name || s.count == 1), "'%s'",
                   s.set[i].name);
        for (int k = 0; k < i; k++) FUZZ_CHECK(strcmp(s.set[i].name, s.set[k].name), "'%s'", s.set[i].name);
        check_set(s.set[i].data, o);
    }
    sets_close(&s);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!files[0].tokens) write_files();
    if (!size) return 0;
    const uint8_t *end = memchr(data + 1, '\n', size - 1);
    char *spec = with_names(data + 1, end ? (size_t)(end - data) - 1 : size - 1);
    char *split = fuzz_text(end ? end + 1 : data, end ? size - (size_t)(end + 1 - data) : 0);
    for (char *p = split; *p; p++)
        if (*p == '\n') *p = ' '; /* no value of a key holds one */
    const DataOrder orders[] = { ORDER_KEYED, ORDER_FILE, ORDER_MEGATRON, ORDER_FILE };
    DatasetOptions o = { .spec = spec,
                         .split = split,
                         .part = data[0] >> 2 & 1 ? PART_VALID : PART_TRAIN,
                         .seq = SEQ,
                         .vocab = VOCAB,
                         .seed = 1,
                         .order = orders[data[0] & 3],
                         .samples = 1 + (data[0] >> 3) };
    Dataset *d, *again;
    if ((data[0] & 3) == 3) check_sets(&o);
    else {
        fuzz_memory_start();
        Err err = dataset_open(&o, &d);
        FUZZ_MEMORY_BOUND(strlen(spec), 4, 3 << 20);
        fuzz_check_error(err, ERR_CONFIG, ERR_DATA, false);
        if (!err) {
            check_words(d, spec, o.order != ORDER_MEGATRON);
            check_set(d, &o);
            err = dataset_open(&o, &again);
            FUZZ_CHECK(!err && dataset_crc(d) == dataset_crc(again), "another data set");
            dataset_close(d);
            dataset_close(again);
        }
    }
    free(spec);
    free(split);
    return 0;
}
