#include "data/wordcount.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/map.h"
#include "data/bpe.h"
#include "data/grow.h"
#include "data/input.h"
#include "data/pretoken.h"
#include "data/utf8.h"

enum { CHUNK_BYTES = 1 << 20, CHUNK_LIMIT = 1 << 16, MAP_LIMIT = 256, MESSAGE_BYTES = 512 };

/* ---- a table of words ---- */

/* The slot of these bytes: holds word + 1, or 0 if the word is new. */
static int64_t *word_slot(const WordCounts *w, const char *bytes, int64_t size)
{
    for (uint64_t i = bytes_hash(bytes, size);; i++) {
        int64_t *slot = &w->slots[i & (uint64_t)(w->slot_count - 1)];
        if (*slot == 0) return slot;
        const Word *have = &w->words[*slot - 1];
        if (have->size == size && memcmp(w->bytes + have->start, bytes, (size_t)size) == 0) return slot;
    }
}

static Err rehash(WordCounts *w)
{
    w->slot_count = w->slot_count ? 2 * w->slot_count : 1 << 12;
    free(w->slots);
    w->slots = calloc((size_t)w->slot_count, sizeof *w->slots);
    if (!w->slots)
        return err_set(ERR_MEMORY, "no memory for a table of '%lld' slots", (long long)w->slot_count);
    for (int64_t i = 0; i < w->word_count; i++)
        *word_slot(w, w->bytes + w->words[i].start, w->words[i].size) = i + 1;
    return ERR_OK;
}

static Err add_word(WordCounts *w, const char *bytes, int64_t size, int64_t count)
{
    if (2 * w->word_count >= w->slot_count) TRY(rehash(w));
    int64_t *slot = word_slot(w, bytes, size);
    if (*slot == 0) {
        TRY(grow_to(&w->words, &w->word_capacity, w->word_count + 1));
        TRY(grow_to(&w->bytes, &w->byte_capacity, w->byte_count + size));
        memcpy(w->bytes + w->byte_count, bytes, (size_t)size);
        w->words[w->word_count] = (Word){ .start = w->byte_count, .size = size };
        w->byte_count += size;
        *slot = ++w->word_count;
    }
    w->words[*slot - 1].count += count;
    return ERR_OK;
}

static Err add_counts(WordCounts *w, const WordCounts *from)
{
    for (int64_t i = 0; i < from->word_count; i++)
        TRY(add_word(w, from->bytes + from->words[i].start, from->words[i].size, from->words[i].count));
    w->invalid_bytes += from->invalid_bytes;
    return ERR_OK;
}

void word_counts_free(WordCounts *w)
{
    free(w->bytes);
    free(w->words);
    free(w->slots);
    *w = (WordCounts){ 0 };
}

/* ---- files, a batch at a time ---- */

typedef struct {
    const char *text;
    int64_t size;
} Chunk;

/* What one thread counts with. */
typedef struct {
    SplitterWork *split;
    WordCounts words;
    Err err;
    char message[MESSAGE_BYTES];
} Counter;

typedef struct {
    Splitter *splitter;
    Counter *counters; /* [threads] */
    int threads;
    const char *const *paths;
    int path_count, next_path;
    FileMap maps[MAP_LIMIT]; /* of the batch */
    int map_count;
    Chunk *chunks; /* of the batch */
    int64_t chunk_count, chunk_capacity;
} Job;

static Err count_text(Counter *c, const char *text, int64_t size)
{
    for (int64_t at = 0; at < size; at++) { /* each round: a valid run, then one invalid byte */
        int64_t stop = at + utf8_valid_bytes(text + at, size - at);
        for (int64_t end; at < stop; at = end) {
            TRY(splitter_next(c->split, text, stop, at, &end));
            TRY(add_word(&c->words, text + at, end - at, 1));
        }
        c->words.invalid_bytes += stop < size;
    }
    return ERR_OK;
}

/* Where to end a chunk; looks further and further when there is no good place. */
static int64_t chunk_size(const char *text, int64_t size)
{
    for (int64_t window = CHUNK_BYTES; window < size; window *= 2) {
        int64_t cut = split_cut(text, window);
        if (cut > 0) return cut;
    }
    return size;
}

static Err cut_file(Job *j, const char *path)
{
    FileMap *map = &j->maps[j->map_count];
    TRY_AS(ERR_DATA, file_map(path, map));
    j->map_count++;
    if (input_is_compressed(map->data, map->size_bytes)) {
        err_set(ERR_DATA, "'%s' is compressed", path);
        return err_hint("a tokenizer is trained on plain text: unpack it first");
    }
    for (int64_t at = 0, size; at < map->size_bytes; at += size) {
        const char *text = (const char *)map->data + at;
        size = chunk_size(text, map->size_bytes - at);
        TRY(grow_to(&j->chunks, &j->chunk_capacity, j->chunk_count + 1));
        j->chunks[j->chunk_count++] = (Chunk){ text, size };
    }
    return ERR_OK;
}

static Err count_batch(Job *j)
{
#pragma omp parallel for schedule(dynamic, 1) num_threads(j->threads)
    for (int64_t i = 0; i < j->chunk_count; i++) {
        Counter *c = &j->counters[omp_get_thread_num()];
        if (c->err) continue;
        c->err = count_text(c, j->chunks[i].text, j->chunks[i].size);
        /* failures are recorded per thread: carry the text to the one that reports it */
        if (c->err) snprintf(c->message, sizeof c->message, "%s", err_message());
    }
    for (int i = 0; i < j->threads; i++)
        if (j->counters[i].err) return err_set(j->counters[i].err, "%s", j->counters[i].message);
    for (int i = 0; i < j->map_count; i++) {
        Err err = map_intact(&j->maps[i]);
        if (err) return err_prefix(err, "'%s'", j->maps[i].path);
    }
    return ERR_OK;
}

static void end_batch(Job *j)
{
    while (j->map_count > 0) file_unmap(&j->maps[--j->map_count]);
    j->chunk_count = 0;
}

static Err count_files(Job *j)
{
    while (j->next_path < j->path_count) {
        while (j->next_path < j->path_count && j->map_count < MAP_LIMIT && j->chunk_count < CHUNK_LIMIT)
            TRY(cut_file(j, j->paths[j->next_path++]));
        TRY(count_batch(j));
        end_batch(j);
    }
    return ERR_OK;
}

static Err open_job(Job *j)
{
    TRY(splitter_open(SPLIT_GPT2, &j->splitter));
    j->counters = calloc((size_t)j->threads, sizeof *j->counters);
    if (!j->counters) return err_set(ERR_MEMORY, "no memory for '%d' threads", j->threads);
    for (int i = 0; i < j->threads; i++) TRY(splitter_work_open(j->splitter, &j->counters[i].split));
    return ERR_OK;
}

static void close_job(Job *j)
{
    end_batch(j);
    for (int i = 0; i < j->threads && j->counters; i++) {
        splitter_work_close(j->counters[i].split);
        word_counts_free(&j->counters[i].words);
    }
    splitter_close(j->splitter);
    free(j->counters);
    free(j->chunks);
}

Err word_counts_of_files(const char *const *paths, int path_count, int threads, WordCounts *out)
{
    Job j = { .paths = paths,
              .path_count = path_count,
              .threads = threads ? threads : omp_get_max_threads() };
    Err err = open_job(&j);
    if (!err) err = count_files(&j);
    for (int i = 0; !err && i < j.threads; i++) err = add_counts(out, &j.counters[i].words);
    close_job(&j);
    return err;
}
