/* See wordcount.h. Threads take turns at reading; each counts what it has read while the others read. */
#include "data/wordcount.h"

#include <omp.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/utf8.h"
#include "data/bpe.h"
#include "data/cut.h"
#include "data/grow.h"
#include "data/pretoken.h"
#include "data/progress.h"

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
    if (!w->slots) return err_set(ERR_MEMORY, "no memory for a table of %lld slots", (long long)w->slot_count);
    for (int64_t i = 0; i < w->word_count; i++) *word_slot(w, w->bytes + w->words[i].start, w->words[i].size) = i + 1;
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
    w->missing_lines += from->missing_lines;
    return ERR_OK;
}

void word_counts_free(WordCounts *w)
{
    free(w->bytes);
    free(w->words);
    free(w->slots);
    *w = (WordCounts){ 0 };
}

/* ---- inputs, a chunk at a time ---- */

/* State of one thread that counts. */
typedef struct {
    SplitterWork *split;
    WordCounts words;
    Chunk chunk;
    JsonlScan scan;
    JsonlText line;
    Err err;
    ErrKept why;
} Counter;

typedef struct {
    const WordInputs *in;
    CutOptions cut;
    Splitter *splitter;
    Counter *counters; /* [threads] */
    int threads;

    /* under the mutex */
    pthread_mutex_t mutex;
    Cutter *cutter;
    int64_t input, lines; /* the next chunk begins behind so many lines of this input */
    bool more;
    Progress progress;
} Job;

static Err count_text(Counter *c, const char *text, int64_t size)
{
    for (int64_t at = 0; at < size; at++) { /* each round: a valid run, then one invalid byte */
        int64_t stop = at + utf8_valid_bytes(text + at, size - at);
        bool is_match; /* all are, by GPT-2's pattern */
        for (int64_t end; at < stop; at = end) {
            TRY(splitter_next(c->split, text, stop, at, &end, &is_match));
            TRY(add_word(&c->words, text + at, end - at, 1));
        }
        c->words.invalid_bytes += stop < size;
    }
    return ERR_OK;
}

static Err in_line(const Job *j, int64_t input, int64_t line, Err err)
{
    if (j->cut.tell_lines && !*err_hint_text()) err_hint(CUT_TEXT_HINT);
    return err_prefix(err, "'%s': line %lld", j->in->paths[input], (long long)line);
}

/* first: number of the chunk's first line. */
static Err count_lines(const Job *j, Counter *c, int64_t first)
{
    const char *end = c->chunk.text + c->chunk.size;
    for (const char *line = c->chunk.text, *stop; line < end; line = stop + 1, first++) {
        stop = line_end(line, end);
        if (line_is_blank(line, stop)) continue;
        c->line.size = 0;
        jsonl_begin(&c->scan, &j->cut.key);
        Err err = jsonl_feed(&c->scan, line, stop - line, &c->line);
        if (!err) err = jsonl_end(&c->scan, &c->line);
        if (err) return in_line(j, c->chunk.input, first, err);
        if (jsonl_is_missing(&c->scan)) c->words.missing_lines++;
        else TRY(count_text(c, c->line.text, c->line.size));
    }
    return ERR_OK;
}

static int64_t lines_of(const Chunk *c)
{
    int64_t n = c->lines;
    const char *end = c->text + c->size;
    for (const char *at = c->text; c->kind == CHUNK_LINES && at < end; at = line_end(at, end) + 1) n++;
    return n;
}

/* The next chunk, and the number of its first line. With the mutex held. */
static Err take_chunk(Job *j, Counter *c, int64_t *first)
{
    Err err = cutter_next(j->cutter, &c->chunk, &j->more);
    if (j->input != c->chunk.input) j->input = c->chunk.input, j->lines = 0;
    if (err && c->chunk.at_line) return in_line(j, j->input, j->lines + 1, err);
    TRY(err);
    *first = j->lines + 1;
    if (!j->more) return ERR_OK;
    j->lines += lines_of(&c->chunk);
    progress_show(&j->progress, c->chunk.consumed_bytes, 0);
    return ERR_OK;
}

/* One chunk; *more: there was one. A failure ends the work of all threads. */
static Err count_chunk(Job *j, Counter *c, bool *more)
{
    int64_t first = 0;
    pthread_mutex_lock(&j->mutex);
    Err err = j->more ? take_chunk(j, c, &first) : ERR_OK;
    *more = j->more && !err;
    pthread_mutex_unlock(&j->mutex);
    if (*more)
        err = c->chunk.kind == CHUNK_LINES ? count_lines(j, c, first) : count_text(c, c->chunk.text, c->chunk.size);
    if (*more) c->words.missing_lines += c->chunk.missing;
    if (!err) return ERR_OK;
    pthread_mutex_lock(&j->mutex);
    j->more = false;
    pthread_mutex_unlock(&j->mutex);
    return err;
}

static Err count_chunks(Job *j, Counter *c)
{
    for (bool more = true; more;) TRY(count_chunk(j, c, &more));
    return ERR_OK;
}

/* A failure is recorded by the thread that has it: it is carried to the one that reports it. */
static Err run_threads(Job *j)
{
#pragma omp parallel num_threads(j->threads)
    {
        Counter *c = &j->counters[omp_get_thread_num()];
        c->err = count_chunks(j, c);
        if (c->err) err_keep(&c->why);
    }
    for (int i = 0; i < j->threads; i++)
        if (j->counters[i].err) return err_again(&j->counters[i].why, j->counters[i].err);
    return ERR_OK;
}

static Err open_job(Job *j, InputStat *stats)
{
    const WordInputs *in = j->in;
    int64_t bytes = 0;
    for (int i = 0; i < in->count; i++) {
        TRY(input_stat(in->paths[i], &stats[i]));
        bytes += stats[i].size_bytes;
    }
    j->cut = (CutOptions){ .inputs = in->paths,
                           .input_count = in->count,
                           .stats = stats,
                           .kind = in->format == INPUT_JSONL ? CHUNK_LINES : CHUNK_DOCUMENT,
                           .tell_lines = in->format == INPUT_AUTO,
                           .any_bytes = in->format == INPUT_BYTES };
    TRY(jsonl_key(in->key ? in->key : "text", &j->cut.key));
    j->cut.key.skip_missing = in->skip_missing;
    TRY(cutter_open(&j->cut, (InputPlace){ 0 }, 0, &j->cutter));
    TRY(splitter_open(split_regex(SPLIT_GPT2), &j->splitter));
    for (int i = 0; i < j->threads; i++) TRY(splitter_work_open(j->splitter, &j->counters[i].split));
    progress_open(&j->progress, bytes, NULL);
    return ERR_OK;
}

static void close_job(Job *j)
{
    progress_close(&j->progress);
    for (int i = 0; i < j->threads; i++) {
        splitter_work_close(j->counters[i].split);
        word_counts_free(&j->counters[i].words);
        free(j->counters[i].chunk.text);
        free(j->counters[i].line.text);
    }
    splitter_close(j->splitter);
    cutter_close(j->cutter);
}

Err word_counts_of(const WordInputs *in, WordCounts *out)
{
    Job j = { .in = in,
              .threads = in->threads ? in->threads : omp_get_max_threads(),
              .more = true,
              .mutex = PTHREAD_MUTEX_INITIALIZER };
    InputStat *stats = calloc((size_t)in->count, sizeof *stats);
    j.counters = calloc((size_t)j.threads, sizeof *j.counters);
    Err err = stats && j.counters ? open_job(&j, stats) : err_set(ERR_MEMORY, "no memory for %d threads", j.threads);
    if (!err) err = run_threads(&j);
    for (int i = 0; !err && i < j.threads; i++) err = add_counts(out, &j.counters[i].words);
    if (j.counters) close_job(&j);
    free(j.counters);
    free(stats);
    return err;
}
