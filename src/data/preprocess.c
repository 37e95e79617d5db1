/*
 * Chunks go round in a ring: cut from the inputs (cut.h), encoded, written. Every thread does whatever is most urgent
 * and not being done: write the oldest chunk if it is encoded, else encode the oldest that is cut, else cut the next.
 * One thread at a time cuts and one writes, so both happen in order, and all the while the others encode.
 */
#include "data/preprocess.h"

#include <math.h>
#include <omp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "data/cut.h"
#include "data/grow.h"
#include "data/indexed.h"
#include "data/progress.h"
#include "data/resume.h"

enum { CHUNKS_PER_THREAD = 3, KEPT_BYTES = 8 << 20 };

typedef struct {
    Chunk chunk;
    bool encoded; /* it is encoded, or that has failed */
    TokenList tokens;
    int64_t *ends; /* for each document how many tokens of this chunk there are up to its end */
    int64_t end_count, end_capacity;
    int64_t empty, invalid_bytes;
    Err err;
    ErrKept why;
} Work;

/* Memory that a thread needs of its own. */
typedef struct {
    Encoder *encoder;
    JsonlScan scan;
    JsonlText text;
} Tools;

typedef struct {
    const PreprocessOptions *o;
    char options[JSONL_KEY_BYTES + 96];
    CutOptions cut;
    Tokenizer *tokenizer;
    InputStat *stats;
    JobIdentity identity;
    int lock;
    Cutter *cutter;
    IndexedWriter *writer;
    int threads;
    Tools *tools;

    /* the ring; numbers of chunks only grow */
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    Work *works;
    int64_t room, written, taken, cut_count; /* chunks up to these are written, being encoded, cut */
    bool cutting, writing, cut_all, stop;
    Err err;
    ErrKept why;

    /* the writing thread's */
    JobDone done, file_start;
    double save_s;      /* when to save next */
    int64_t read_bytes; /* how much of the inputs was read so far */
    bool saved, published;
    Progress progress;
} Job;

/* ---- encoding ---- */

/* Text of a document that began in this chunk or before it (`goes_on`), and ends with this text or not. */
static Err encode_part(const Job *j, Work *w, Tools *t, const char *text, int64_t size, bool goes_on, bool ends)
{
    TRY(encoder_run(t->encoder, text, size, goes_on, &w->tokens, &w->invalid_bytes));
    if (!ends) return ERR_OK;
    if (size == 0 && !goes_on) w->empty++;
    else if (j->o->append_eod) TRY(token_list_add(&w->tokens, tokenizer_eod(j->tokenizer)));
    TRY(grow_to(&w->ends, &w->end_capacity, w->end_count + 1));
    w->ends[w->end_count++] = w->tokens.count;
    return ERR_OK;
}

static Err encode_document(const Job *j, Work *w, Tools *t)
{
    const Chunk *c = &w->chunk;
    return encode_part(j, w, t, c->text, c->size, c->continues, !c->open);
}

static Err encode_paragraphs(const Job *j, Work *w, Tools *t)
{
    const Chunk *c = &w->chunk;
    const char *end = c->text + c->size, *first = NULL, *last = NULL;
    bool goes_on = c->continues;
    bool rest = goes_on; /* the rest of a line that began in the chunk before comes first */
    for (const char *line = c->text, *stop; line < end || rest; line = stop + 1, rest = false) {
        stop = line_end(line, end);
        if (rest || !line_is_blank(line, stop)) {
            if (!first) first = line;
            last = stop > line && stop[-1] == '\r' ? stop - 1 : stop; /* line ends are LF or CR LF */
        } else if (first) {
            TRY(encode_part(j, w, t, first, last - first, goes_on, true));
            first = NULL;
            goes_on = false;
        }
    }
    return first ? encode_part(j, w, t, first, last - first, goes_on, !c->open) : ERR_OK;
}

static Err encode_lines(const Job *j, Work *w, Tools *t)
{
    Chunk *c = &w->chunk;
    const char *end = c->text + c->size;
    for (const char *line = c->text, *stop; line < end; line = stop + 1) {
        stop = line_end(line, end);
        if (!line_is_blank(line, stop)) {
            t->text.size = 0;
            c->at_line = true;
            jsonl_begin(&t->scan, &j->cut.key);
            TRY(jsonl_feed(&t->scan, line, stop - line, &t->text));
            TRY(jsonl_end(&t->scan, &t->text));
            c->at_line = false;
            if (jsonl_is_missing(&t->scan)) c->missing++;
            else TRY(encode_part(j, w, t, t->text.text, t->text.size, false, true));
        }
        c->lines++;
    }
    return ERR_OK;
}

static Err encode(const Job *j, Work *w, Tools *t)
{
    if (w->chunk.kind == CHUNK_LINES) return encode_lines(j, w, t);
    return w->chunk.kind == CHUNK_PARAGRAPHS ? encode_paragraphs(j, w, t) : encode_document(j, w, t);
}

/* ---- writing ---- */

static Err chunk_error(const Job *j, const Work *w)
{
    err_again(&w->why, w->err);
    if (!w->chunk.at_line) return w->err;
    if (j->cut.tell_lines && !*err_hint_text()) err_hint(CUT_TEXT_HINT);
    return err_prefix(w->err, "'%s': line %lld", j->o->inputs[w->chunk.input],
                      (long long)(j->done.place.lines + w->chunk.lines + 1));
}

static Err save(Job *j)
{
    TRY(indexed_sync(j->writer));
    j->done.written = indexed_now(j->writer);
    TRY(job_save(&j->identity, &j->done, &j->file_start));
    j->saved = true;
    j->save_s = clock_s() + j->o->save_every_s;
    return ERR_OK;
}

static void count_chunk(Job *j, const Work *w)
{
    bool next_file = w->chunk.next.input != w->chunk.input;
    int64_t lines = next_file ? 0 : j->done.place.lines + w->chunk.lines;
    j->done.place = w->chunk.next;
    j->done.place.lines = lines;
    j->done.empty_documents += w->empty;
    j->done.missing_lines += w->chunk.missing;
    j->done.invalid_bytes += w->invalid_bytes;
    if (!next_file) return;
    j->file_start = j->done;
    j->file_start.written = indexed_now(j->writer);
}

static bool asked_to_stop(const Job *j) { return j->o->stop && *j->o->stop; }

static Err write_chunk(Job *j, Work *w)
{
    int64_t from = 0;
    if (w->err) return chunk_error(j, w);
    for (int64_t i = 0; i < w->end_count; from = w->ends[i++]) {
        TRY(indexed_add_tokens(j->writer, w->tokens.ids + from, w->ends[i] - from));
        TRY(indexed_end_document(j->writer));
    }
    TRY(indexed_add_tokens(j->writer, w->tokens.ids + from, w->tokens.count - from));
    count_chunk(j, w);
    j->read_bytes = w->chunk.consumed_bytes;
    progress_show(&j->progress, j->read_bytes, indexed_written_tokens(j->writer));
    const bool stop = asked_to_stop(j), due = clock_s() >= j->save_s || (stop && isfinite(j->save_s));
    if (w->chunk.safe && due) TRY(save(j));
    return stop ? ERR_INTERRUPTED : ERR_OK;
}

/* ---- the ring ---- */

/* Frees the memory of a chunk that was far longer than usual. */
static void let_go(Work *w)
{
    if (w->chunk.capacity > KEPT_BYTES) {
        free(w->chunk.text);
        w->chunk.text = NULL;
        w->chunk.capacity = 0;
    }
    if (w->tokens.capacity * (int64_t)sizeof *w->tokens.ids > KEPT_BYTES) {
        free(w->tokens.ids);
        w->tokens = (TokenList){ 0 };
    }
}

static void take_failure(Work *w, Err err)
{
    w->err = err;
    if (err) err_keep(&w->why);
}

/* Each of these three is called with the mutex held, lets it go for its work, and holds it again at the end. */
static void write_next(Job *j)
{
    Work *w = &j->works[j->written % j->room];
    j->writing = true;
    pthread_mutex_unlock(&j->mutex);
    Err err = write_chunk(j, w);
    let_go(w);
    pthread_mutex_lock(&j->mutex);
    j->writing = false;
    j->written++;
    if (!err) return;
    err_keep(&j->why);
    j->err = err;
    j->stop = true;
}

static void encode_next(Job *j, Tools *t)
{
    Work *w = &j->works[j->taken++ % j->room];
    pthread_mutex_unlock(&j->mutex);
    if (!w->err) take_failure(w, encode(j, w, t));
    pthread_mutex_lock(&j->mutex);
    w->encoded = true;
}

/* A failure takes its turn as a chunk: what comes before it is written first. */
static void cut_next(Job *j)
{
    Work *w = &j->works[j->cut_count % j->room];
    bool more = true;
    j->cutting = true;
    w->encoded = false;
    w->tokens.count = w->end_count = w->empty = w->invalid_bytes = 0;
    pthread_mutex_unlock(&j->mutex);
    take_failure(w, cutter_next(j->cutter, &w->chunk, &more));
    pthread_mutex_lock(&j->mutex);
    j->cutting = false;
    if (more) j->cut_count++;
    if (!more || w->err) j->cut_all = true;
}

static void work(Job *j, Tools *t)
{
    pthread_mutex_lock(&j->mutex);
    while (!j->stop && !(j->cut_all && j->written == j->cut_count)) {
        bool writable = !j->writing && j->written < j->taken && j->works[j->written % j->room].encoded;
        if (writable) write_next(j);
        else if (j->taken < j->cut_count) encode_next(j, t);
        else if (!j->cutting && !j->cut_all && j->cut_count - j->written < j->room) cut_next(j);
        else {
            pthread_cond_wait(&j->changed, &j->mutex);
            continue;
        }
        pthread_cond_broadcast(&j->changed);
    }
    pthread_mutex_unlock(&j->mutex);
}

typedef struct {
    Job *job;
    Tools *tools;
    pthread_t thread;
} Worker;

static void *worker_main(void *arg)
{
    Worker *w = arg;
    work(w->job, w->tools);
    return NULL;
}

static Err run_threads(Job *j)
{
    Worker *workers = calloc((size_t)j->threads, sizeof *workers);
    if (!workers) return err_set(ERR_MEMORY, "no memory for %d threads", j->threads);
    int count = 1; /* this thread is the first */
    int error = 0;
    while (!error && count < j->threads) {
        workers[count] = (Worker){ .job = j, .tools = &j->tools[count] };
        error = pthread_create(&workers[count].thread, NULL, worker_main, &workers[count]);
        count += !error;
    }
    if (!error) work(j, &j->tools[0]);
    pthread_mutex_lock(&j->mutex);
    j->stop = true;
    pthread_mutex_unlock(&j->mutex);
    for (int i = 1; i < count; i++) pthread_join(workers[i].thread, NULL);
    free(workers);
    if (error) return err_no_thread("reading text", error);
    return j->err ? err_again(&j->why, j->err) : ERR_OK;
}

/* ---- the whole ---- */

static Err open_options(Job *j)
{
    const PreprocessOptions *o = j->o;
    static const char *const forms[] = { "text", "jsonl, key ", "text or jsonl, key ", "bytes" };
    const bool lines = o->format == INPUT_JSONL;
    TRY(jsonl_key(o->key ? o->key : "text", &j->cut.key));
    j->cut.key.skip_missing = o->skip_missing;
    snprintf(j->options, sizeof j->options, "%s%s%s%s%s", forms[o->format],
             lines || o->format == INPUT_AUTO ? j->cut.key.text : "", o->skip_missing ? ", skip missing" : "",
             o->split_blank_lines ? ", split at blank lines" : "", o->append_eod ? ", append eod" : "");
    TRY(tokenizer_open(o->tokenizer, &j->tokenizer));
    if (o->append_eod && tokenizer_eod(j->tokenizer) < 0) {
        err_set(ERR_DATA, "tokenizer '%s' has no id that ends a document", o->tokenizer);
        err_hint("leave out --append-eod, or use a tokenizer with <|endoftext|>");
        return ERR_DATA;
    }
    j->cut.inputs = o->inputs;
    j->cut.input_count = o->input_count;
    j->cut.tokenizer = j->tokenizer;
    j->cut.kind = lines ? CHUNK_LINES : o->split_blank_lines ? CHUNK_PARAGRAPHS : CHUNK_DOCUMENT;
    j->cut.tell_lines = o->format == INPUT_AUTO;
    j->cut.any_bytes = o->format == INPUT_BYTES;
    return ERR_OK;
}

static Err open_identity(Job *j, PreprocessResult *r)
{
    const PreprocessOptions *o = j->o;
    j->stats = calloc((size_t)o->input_count, sizeof *j->stats);
    if (!j->stats) return err_set(ERR_MEMORY, "no memory for %d inputs", o->input_count);
    for (int i = 0; i < o->input_count; i++) {
        TRY(input_stat(o->inputs[i], &j->stats[i]));
        r->input_bytes += j->stats[i].size_bytes;
    }
    j->cut.stats = j->stats; /* until an input's turn comes it may change */
    j->identity = (JobIdentity){ .prefix = o->output,
                                 .options = j->options,
                                 .inputs = o->inputs,
                                 .stats = j->stats,
                                 .input_count = o->input_count };
    return tokenizer_identity(j->tokenizer, o->tokenizer, &j->identity.tokenizer);
}

static Err open_threads(Job *j)
{
    j->threads = j->o->threads > 0 ? j->o->threads : omp_get_max_threads();
    j->room = (int64_t)j->threads * CHUNKS_PER_THREAD;
    j->tools = calloc((size_t)j->threads, sizeof *j->tools);
    j->works = calloc((size_t)j->room, sizeof *j->works);
    if (!j->tools || !j->works) return err_set(ERR_MEMORY, "no memory for %d threads", j->threads);
    for (int i = 0; i < j->threads; i++) TRY(encoder_open(j->tokenizer, &j->tools[i].encoder));
    return ERR_OK;
}

/* The writer, from the beginning or from where an earlier process was stopped. */
static Err open_writer(Job *j, TokenType type)
{
    bool found;
    TRY(job_load(&j->identity, &j->done, &j->file_start, &found));
    const bool ended = found && j->done.place.input == j->identity.input_count;
    j->published = ended && indexed_published(j->o->output, &j->done.written);
    if (j->published) return ERR_OK;
    if (found) {
        Err err = indexed_resume(j->o->output, type, &j->done.written, &j->writer);
        if (err && err != ERR_DATA) return err;
        j->saved = true;
        if (!err) return ERR_OK;
        log_warn("%s: the job starts from the beginning", err_message());
    }
    j->done = j->file_start = (JobDone){ 0 };
    return indexed_create(j->o->output, type, &j->writer);
}

/* Does the job read stdin, which nobody can read again? */
static bool reads_stdin(const PreprocessOptions *o)
{
    for (int i = 0; i < o->input_count; i++)
        if (input_is_stdin(o->inputs[i])) return true;
    return false;
}

static Err open_places(Job *j, int64_t total_bytes)
{
    const InputPlace *at = &j->done.place;
    int64_t before = 0;
    for (int64_t i = 0; i < at->input; i++) before += j->stats[i].size_bytes;
    j->save_s = j->o->save_every_s > 0 && !reads_stdin(j->o) ? clock_s() + j->o->save_every_s : INFINITY;
    progress_open(&j->progress, total_bytes, "tokens");
    if (j->done.written.documents + j->done.written.tokens > 0)
        log_info("going on in %s.part: %lld documents and %lld tokens are there", j->o->output,
                 (long long)j->done.written.documents, (long long)j->done.written.tokens);
    return cutter_open(&j->cut, *at, before, &j->cutter);
}

static Err write_tokens(Job *j, int64_t total_bytes)
{
    indexed_made_with(j->writer, tokenizer_crc(j->tokenizer));
    TRY(open_places(j, total_bytes));
    TRY(run_threads(j));
    if (asked_to_stop(j)) return ERR_INTERRUPTED; /* what wrote to our stdin may have been, too */
    if (j->saved) TRY(save(j));                   /* what follows must not cost the work either */
    j->done.written = indexed_now(j->writer);
    return ERR_OK;
}

static Err run(Job *j, PreprocessResult *r)
{
    TRY(open_options(j));
    TRY(open_identity(j, r));
    TRY(open_threads(j));
    TRY(job_lock(j->o->output, &j->lock));
    r->vocab = tokenizer_vocab(j->tokenizer);
    TokenType type = indexed_type_for(r->vocab);
    r->token_type = token_type_name(type);
    TRY(open_writer(j, type));
    if (!j->published) TRY(write_tokens(j, r->input_bytes));
    if (reads_stdin(j->o)) r->input_bytes = j->read_bytes;
    r->tokens = j->done.written.tokens;
    r->documents = j->done.written.documents;
    r->empty_documents = j->done.empty_documents;
    r->missing_lines = j->done.missing_lines;
    r->invalid_bytes = j->done.invalid_bytes;
    if (r->tokens > 0) return ERR_OK;
    err_set(ERR_DATA, "the input holds no text: '%s'%s", j->o->inputs[0],
            j->o->input_count > 1 ? " and the others" : "");
    if (r->missing_lines)
        err_hint("%lld lines were passed over, as the member '%s' is missing or null: --key NAME takes another",
                 (long long)r->missing_lines, j->cut.key.text);
    return ERR_DATA;
}

static Err finish(Job *j)
{
    char part[PATH_MAX];
    if (!j->published) {
        Err err = indexed_finish(j->writer);
        j->writer = NULL;
        return err;
    }
    log_info("the files are complete: an earlier process was stopped just before its end");
    indexed_part(j->o->output, "", part);
    return file_remove_tree(part);
}

static void close_job(Job *j)
{
    progress_close(&j->progress);
    indexed_abandon(j->writer);
    if (j->lock >= 0) job_unlock(j->o->output, j->lock);
    for (int i = 0; i < j->room && j->works; i++) {
        free(j->works[i].chunk.text);
        free(j->works[i].tokens.ids);
        free(j->works[i].ends);
    }
    for (int i = 0; i < j->threads && j->tools; i++) {
        encoder_close(j->tools[i].encoder);
        free(j->tools[i].text.text);
    }
    cutter_close(j->cutter);
    free(j->works);
    free(j->tools);
    free(j->stats);
    tokenizer_close(j->tokenizer);
}

static Err say_stopped(const PreprocessOptions *o)
{
    const int sig = o->stop ? *o->stop : 0;
    if (sig == 0 || sig == SIGINT) return err_set(ERR_INTERRUPTED, "interrupted before '%s' was complete", o->output);
    return err_set(ERR_STOPPED, "stopped by SIG%s before '%s' was complete", sigabbrev_np(sig), o->output);
}

Err preprocess_run(const PreprocessOptions *o, PreprocessResult *result)
{
    Job j = { .o = o, .lock = -1, .mutex = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER };
    ASSERT(o->input_count > 0);
    *result = (PreprocessResult){ 0 };
    Err err = run(&j, result);
    if (!err) err = finish(&j);
    close_job(&j);
    const bool stopped = err == ERR_INTERRUPTED;
    if (stopped) err = say_stopped(o);
    if ((err == ERR_IO || stopped) && j.saved)
        err_hint("'%s.part' keeps what is done: the same command goes on with it", o->output);
    if (!err && result->invalid_bytes)
        log_warn("%lld bytes of the input were not UTF-8 and were kept as byte tokens",
                 (long long)result->invalid_bytes);
    return err;
}
