/* See tasks.h. In here, in this order: lines, requests, packing, samples, accuracies. */
#include "data/tasks.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "base/map.h"
#include "base/utf8.h"
#include "base/words.h"
#include "data/grow.h"

const char *const task_metric_names[TASK_METRICS] = { "acc", "acc_norm", "acc_bytes" };
const char *const task_form_names[] = { "choices", "contexts", "greedy" };

/* A line that is being read. */
typedef struct {
    Tasks *tasks;
    Task *task;
    const Tokenizer *tokenizer;
    Encoder *encoder;
    int64_t number;
    const Json *line;
    TokenList whole, context; /* room that is used again */
    char *text;
    int64_t text_room;
} Reader;

typedef struct {
    const char *text;
    int64_t size;
} Text;

/* Writes "FILE:LINE: ..." */
#define refuse(r, ...) (err_set(ERR_DATA, __VA_ARGS__), place_of(r))

static Err place_of(const Reader *r) { return err_prefix(ERR_DATA, "%s:%lld", r->task->path, (long long)r->number); }

/* ---- requests ---- */

static bool is_blank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

static bool has_blank_between(Text context, Text choice)
{
    return (context.size && is_blank(context.text[context.size - 1])) || is_blank(choice.text[0]);
}

static int32_t code_points(Text t)
{
    int32_t n = 0;
    for (int64_t i = 0; i < t.size; i++) n += !utf8_is_tail((uint8_t)t.text[i]);
    return n;
}

static Err encode(Reader *r, const char *text, int64_t size, TokenList *out)
{
    out->count = 0;
    const Err err = encoder_run(r->encoder, text, size, false, out, NULL);
    return err == ERR_DATA ? err_prefix(err, "%s:%lld", r->task->path, (long long)r->number) : err;
}

/*
 * Tokens of both, and of the context without the blanks at its end, which then belong to the choice. Scored are as many
 * of the first as they are more than the second.
 */
static Err encode_both(Reader *r, Text context, Text choice)
{
    const int64_t size = context.size + 1 + choice.size;
    TRY(grow_to(&r->text, &r->text_room, size));
    memcpy(r->text, context.text, (size_t)context.size);
    int64_t used = context.size, kept = context.size;
    if (!has_blank_between(context, choice)) r->text[used++] = ' ';
    memcpy(r->text + used, choice.text, (size_t)choice.size);
    while (kept && is_blank(r->text[kept - 1])) kept--;
    TRY(encode(r, r->text, kept, &r->context));
    return encode(r, r->text, used + choice.size, &r->whole);
}

static Err add_tokens(Tasks *t, const int32_t *ids, int64_t count)
{
    TRY(grow_to(&t->pool, &t->pool_room, t->pool_count + count));
    memcpy(t->pool + t->pool_count, ids, (size_t)count * sizeof *ids);
    t->pool_count += count;
    return ERR_OK;
}

/* Adds an end of document if nothing stands before the first token; *added is then 1. */
static Err add_beginning(Reader *r, int64_t *added)
{
    const int32_t eod = tokenizer_eod(r->tokenizer);
    *added = r->context.count == 0;
    if (!*added) return ERR_OK;
    if (eod < 0) return refuse(r, "the context is empty, and the tokenizer has no end of document to begin with");
    return add_tokens(r->tasks, &eod, 1);
}

static Err add_request(Reader *r, Text context, Text choice, int number)
{
    Tasks *t = r->tasks;
    int64_t begin = t->pool_count, added;
    if (!choice.size) return refuse(r, "choice %d is empty", number);
    TRY(encode_both(r, context, choice));
    const int64_t scored = r->whole.count - r->context.count;
    TRY(add_beginning(r, &added));
    if (scored < 1) return refuse(r, "choice %d has no token of its own behind its context", number);
    if (scored > t->seq)
        return refuse(r, "choice %d has %lld tokens, model.seq is %lld", number, (long long)scored, (long long)t->seq);
    TRY(add_tokens(t, r->whole.ids, r->whole.count));
    const int64_t count = added + r->whole.count, over = count > t->seq + 1 ? count - t->seq - 1 : 0;
    begin += over;
    r->task->cut += over > 0;
    TRY(grow_to(&t->requests, &t->request_room, t->request_count + 1));
    t->requests[t->request_count++] = (TaskRequest){ .tokens = begin,
                                                     .count = (int32_t)(count - over),
                                                     .scored = (int32_t)scored,
                                                     .chars = code_points(choice),
                                                     .bytes = (int32_t)choice.size };
    return ERR_OK;
}

/* ---- lines ---- */

static Err text_of(const Reader *r, const Json *j, const char *what, Text *out)
{
    out->text = json_text(j, &out->size);
    if (!out->text) return refuse(r, "'%s' is %s", what, j ? "no string" : "missing");
    return ERR_OK;
}

static Err read_texts(Reader *r, const char *one, const char *several, bool contexts)
{
    const Json *list = json_get(r->line, several);
    const int64_t count = json_count(list);
    Text fixed, text;
    TRY(text_of(r, json_get(r->line, one), one, &fixed));
    if (!json_is_array(list)) return refuse(r, "'%s' is no list", several);
    if (!count) return refuse(r, "'%s' is empty", several);
    for (int64_t i = 0; i < count; i++) {
        TRY(text_of(r, json_at(list, i), several, &text));
        TRY(add_request(r, contexts ? text : fixed, contexts ? fixed : text, (int)i));
    }
    return ERR_OK;
}

static Err read_gold(const Reader *r, int64_t choices, int32_t *out)
{
    const Json *gold = json_get(r->line, "gold");
    if (!json_is_int(gold)) return refuse(r, "'gold' is %s", gold ? "no whole number" : "missing");
    const int64_t value = json_int(gold, 0);
    if (value < 0 || value >= choices)
        return refuse(r, "'gold' is %lld: the choices are numbered from 0 to %lld", (long long)value,
                      (long long)choices - 1);
    *out = (int32_t)value;
    return ERR_OK;
}

static Err read_greedy(Reader *r)
{
    Text context, continuation;
    TRY(text_of(r, json_get(r->line, "context"), "context", &context));
    TRY(text_of(r, json_get(r->line, "continuation"), "continuation", &continuation));
    return add_request(r, context, continuation, 0);
}

static Err form_of(Reader *r, TaskForm *out)
{
    if (json_get(r->line, "choices")) *out = TASK_CHOICES;
    else if (json_get(r->line, "context_options")) *out = TASK_CONTEXTS;
    else if (json_get(r->line, "continuation")) *out = TASK_GREEDY;
    else return refuse(r, "there is neither 'choices' nor 'context_options' nor 'continuation'");
    if (r->task->count && *out != r->task->form)
        return refuse(r, "a question of another form than those before: %s, not %s", task_form_names[*out],
                      task_form_names[r->task->form]);
    r->task->form = *out;
    return ERR_OK;
}

static Err read_question(Reader *r)
{
    Tasks *t = r->tasks;
    TaskQuestion q = { .first = t->request_count };
    TaskForm form = TASK_CHOICES;
    if (!json_is_object(r->line)) return refuse(r, "a line is one object");
    TRY(form_of(r, &form));
    if (form == TASK_GREEDY) TRY(read_greedy(r));
    else
        TRY(read_texts(r, form == TASK_CHOICES ? "query" : "continuation",
                       form == TASK_CHOICES ? "choices" : "context_options", form == TASK_CONTEXTS));
    q.count = (int32_t)(t->request_count - q.first);
    if (form != TASK_GREEDY) TRY(read_gold(r, q.count, &q.gold));
    TRY(grow_to(&t->questions, &t->question_room, t->question_count + 1));
    t->questions[t->question_count++] = q;
    r->task->count++;
    return ERR_OK;
}

static Err read_line(Reader *r, const char *line, int64_t size)
{
    char name[sizeof r->task->path + 24];
    Json *j = NULL;
    int64_t blank = 0;
    r->number++;
    while (blank < size && is_blank(line[blank])) blank++;
    if (blank == size) return ERR_OK;
    snprintf(name, sizeof name, "%s:%lld", r->task->path, (long long)r->number);
    TRY_AS(ERR_DATA, json_parse(name, line, size, &j));
    r->line = j;
    Err err = read_question(r);
    json_free(j);
    return err;
}

static Err read_lines(Reader *r, const FileMap *map)
{
    const char *text = map->data;
    for (int64_t at = 0, next; at < map->size_bytes; at = next) {
        const char *end = memchr(text + at, '\n', (size_t)(map->size_bytes - at));
        next = end ? end + 1 - text : map->size_bytes;
        TRY(read_line(r, text + at, (end ? end - text : map->size_bytes) - at));
    }
    TRY(map_intact(map));
    return r->task->count ? ERR_OK : err_set(ERR_DATA, "'%s' has no questions", r->task->path);
}

static Err read_file(Reader *r)
{
    FileMap map;
    TRY_AS(ERR_DATA, file_map(r->task->path, &map));
    Err err = read_lines(r, &map);
    file_unmap(&map);
    return err;
}

/* ---- files ---- */

static Err name_of(const Tasks *t, Task *task)
{
    const char *slash = strrchr(task->path, '/'), *name = slash ? slash + 1 : task->path;
    const int64_t size = (int64_t)strlen(name) - (text_ends(name, ".jsonl") ? 6 : 0);
    if (size < 1 || size >= TASK_NAME_BYTES || !json_can_hold(name))
        return err_set(ERR_CONFIG, "tasks '%s': a name of 1 to %d bytes of UTF-8 is wanted before .jsonl", task->path,
                       TASK_NAME_BYTES - 1);
    snprintf(task->name, sizeof task->name, "%.*s", (int)size, name);
    for (const Task *other = t->task; other < task; other++)
        if (!strcmp(other->name, task->name))
            return err_set(ERR_CONFIG, "tasks: '%s' and '%s' have the same name", other->path, task->path);
    return ERR_OK;
}

static Err read_task(Reader *r, const char *path, size_t size)
{
    Tasks *t = r->tasks;
    if (t->count == TASKS_MAX) return err_set(ERR_CONFIG, "tasks: there are more than %d files", TASKS_MAX);
    r->task = &t->task[t->count];
    r->number = 0;
    *r->task = (Task){ .first = t->question_count };
    if (!size) return err_set(ERR_CONFIG, "tasks: a file's name is empty: it is FILE,FILE");
    if (size >= sizeof r->task->path)
        return err_set(ERR_CONFIG, "tasks: a file's name has more than %d bytes: '%.60s...'",
                       (int)sizeof r->task->path - 1, path);
    memcpy(r->task->path, path, size);
    TRY(name_of(t, r->task));
    TRY(read_file(r));
    t->count++;
    return ERR_OK;
}

static Err read_list(Reader *r, const char *list)
{
    for (const char *at = list;; at++) {
        const size_t size = strcspn(at, ",");
        TRY(read_task(r, at, size));
        at += size;
        if (!*at) return ERR_OK;
    }
}

/* ---- packing ---- */

typedef struct {
    int64_t number;
    int32_t count;
} Length;

/* Longest first; equals as they come. */
static int by_length(const void *a, const void *b)
{
    const Length *x = a, *y = b;
    if (x->count != y->count) return x->count > y->count ? -1 : 1;
    return x->number < y->number ? -1 : x->number > y->number;
}

/* Samples by the tokens that they still have room for: the last one of each size, and before each sample another. */
typedef struct {
    int64_t *last;   /* [seq + 2] */
    int64_t *before; /* [samples] */
} Rooms;

/* The sample that has the least room for so many tokens, else a new one. */
static int64_t take_room(Tasks *t, Rooms *r, int32_t count, int32_t *begin)
{
    int64_t room = count, sample;
    while (room <= t->seq && r->last[room] < 0) room++;
    if (room > t->seq) {
        room = t->seq + 1;
        sample = t->samples++;
    } else {
        sample = r->last[room];
        r->last[room] = r->before[sample];
    }
    *begin = (int32_t)(t->seq + 1 - room);
    r->before[sample] = r->last[room - count];
    r->last[room - count] = sample;
    return sample;
}

static void place(Tasks *t, const Length *lengths, Rooms *r)
{
    for (int64_t room = 0; room <= t->seq + 1; room++) r->last[room] = -1;
    for (int64_t i = 0; i < t->request_count; i++) {
        TaskRequest *q = &t->requests[lengths[i].number];
        q->sample = take_room(t, r, q->count, &q->begin);
        t->sample_first[q->sample + 1]++;
    }
    for (int64_t s = 0; s < t->samples; s++) t->sample_first[s + 1] += t->sample_first[s];
    /* (longest first is also the order of the places in a sample) */
    for (int64_t i = 0; i < t->request_count; i++) r->before[i] = t->sample_first[i];
    for (int64_t i = 0; i < t->request_count; i++)
        t->order[r->before[t->requests[lengths[i].number].sample]++] = lengths[i].number;
}

static Err pack(Tasks *t)
{
    const size_t n = (size_t)t->request_count;
    Length *lengths = malloc(n * sizeof *lengths);
    Rooms r = { malloc((size_t)(t->seq + 2) * sizeof *r.last), malloc(n * sizeof *r.before) };
    t->order = malloc(n * sizeof *t->order);
    t->sample_first = calloc(n + 1, sizeof *t->sample_first);
    const bool there = lengths && r.last && r.before && t->order && t->sample_first;
    for (size_t i = 0; there && i < n; i++) lengths[i] = (Length){ (int64_t)i, t->requests[i].count };
    if (there) {
        qsort(lengths, n, sizeof *lengths, by_length);
        place(t, lengths, &r);
    }
    free(lengths);
    free(r.last);
    free(r.before);
    return there ? ERR_OK : err_set(ERR_MEMORY, "no memory for %lld requests", (long long)n);
}

Err tasks_open(Tasks *t, const char *list, const Tokenizer *tokenizer, int64_t seq)
{
    Reader r = { .tasks = t, .tokenizer = tokenizer };
    *t = (Tasks){ .seq = seq };
    TRY(encoder_open(tokenizer, &r.encoder));
    Err err = read_list(&r, list);
    encoder_close(r.encoder);
    free(r.whole.ids);
    free(r.context.ids);
    free(r.text);
    return err ? err : pack(t);
}

void tasks_close(Tasks *t)
{
    free(t->pool);
    free(t->requests);
    free(t->questions);
    free(t->order);
    free(t->sample_first);
    *t = (Tasks){ 0 };
}

uint32_t tasks_crc(const Tasks *t)
{
    uint32_t crc = crc32c(0, t->pool, (size_t)t->pool_count * sizeof *t->pool);
    for (int64_t i = 0; i < t->request_count; i++) {
        const TaskRequest *q = &t->requests[i];
        const int32_t what[] = { q->count, q->scored, q->chars, q->bytes };
        crc = crc32c(crc, what, sizeof what);
    }
    for (int64_t i = 0; i < t->question_count; i++) {
        const int32_t what[] = { t->questions[i].count, t->questions[i].gold };
        crc = crc32c(crc, what, sizeof what);
    }
    return crc;
}

/* ---- samples ---- */

TaskRequest *tasks_request(const Tasks *t, int64_t sample, int64_t n)
{
    const int64_t at = t->sample_first[sample] + n;
    return at < t->sample_first[sample + 1] ? &t->requests[t->order[at]] : NULL;
}

Err tasks_tokens(void *tasks, int64_t first, int64_t count, int32_t *tokens)
{
    const Tasks *t = tasks;
    const TaskRequest *q;
    memset(tokens, 0, (size_t)(count * (t->seq + 1)) * sizeof *tokens);
    for (int64_t i = 0; i < count; i++)
        for (int64_t n = 0; (q = tasks_request(t, first + i, n)); n++)
            memcpy(tokens + i * (t->seq + 1) + q->begin, t->pool + q->tokens, (size_t)q->count * sizeof *tokens);
    return ERR_OK;
}

/* A token is predicted from the position before it. What stands behind the last request is one of its own. */
Err tasks_requests(void *tasks, int64_t first, int64_t count, int32_t *begin, bool *counts)
{
    const Tasks *t = tasks;
    for (int64_t i = 0; i < count; i++, begin += t->seq, counts += t->seq) {
        const TaskRequest *q;
        int32_t end = 0;
        for (int64_t n = 0; (q = tasks_request(t, first + i, n)); n++) {
            end = q->begin + q->count;
            for (int32_t p = q->begin; p < end && p < t->seq; p++) {
                begin[p] = q->begin;
                counts[p] = p >= end - 1 - q->scored && p < end - 1;
            }
        }
        for (int32_t p = end; p < t->seq; p++) begin[p] = end, counts[p] = false;
    }
    return ERR_OK;
}

/* ---- accuracies ---- */

bool task_has(const Task *task, TaskMetric metric) { return metric == TASK_ACC || task->form != TASK_GREEDY; }

/* The first of the best; a score that is not finite is never taken: then none is, or another. */
static bool is_right(const Tasks *t, const TaskQuestion *q, TaskForm form, TaskMetric metric)
{
    const TaskRequest *r = &t->requests[q->first];
    double best = -INFINITY;
    int32_t chosen = -1;
    if (form == TASK_GREEDY) return r->greedy;
    for (int32_t i = 0; i < q->count; i++) {
        const double length = metric == TASK_ACC_NORM ? r[i].chars : metric == TASK_ACC_BYTES ? r[i].bytes : 1;
        const double score = r[i].score / length;
        if (!(score > best)) continue;
        best = score;
        chosen = i;
    }
    return chosen == q->gold;
}

/* sqrt(sum (x - mean)^2 / (n - 1) / n), which of zeros and ones is */
static double error_of(double mean, int64_t n) { return n > 1 ? sqrt(mean * (1 - mean) / (double)(n - 1)) : NAN; }

static int64_t count_right(const Tasks *t, const Task *task, TaskMetric metric)
{
    int64_t right = 0;
    for (int64_t i = 0; i < task->count; i++) right += is_right(t, &t->questions[task->first + i], task->form, metric);
    return right;
}

TaskMean task_mean(const Tasks *t, const Task *task, TaskMetric metric)
{
    const double mean = (double)count_right(t, task, metric) / (double)task->count;
    return (TaskMean){ mean, error_of(mean, task->count) };
}

TaskMean tasks_pooled(const Tasks *t, TaskMetric metric, int64_t *questions)
{
    int64_t n = 0, k = 0, right = 0;
    double squares = 0; /* of distances from the tasks' own means */
    for (int i = 0; i < t->count; i++) {
        const Task *task = &t->task[i];
        if (!task_has(task, metric)) continue;
        const int64_t of_task = count_right(t, task, metric);
        squares += (double)of_task * (1 - (double)of_task / (double)task->count);
        right += of_task;
        n += task->count;
        k++;
    }
    *questions = n;
    return (TaskMean){ (double)right / (double)n, n > k ? sqrt(squares / (double)(n - k) / (double)n) : NAN };
}
