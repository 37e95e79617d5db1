/*
 * Tasks: questions whose choices a model ranks by their log-likelihood behind a context. A file of JSON lines is a
 * task, all its lines of one form:
 *
 *   {"query", "choices": [...], "gold"}               which continuation of the query is the most likely
 *   {"context_options": [...], "continuation", "gold"}  behind which context the continuation is the most likely
 *   {"context", "continuation"}                       is every token of the continuation the most likely one
 *
 * `gold` counts from 0. Each choice is a request: the tokens of context and choice, of which those of the choice are
 * scored. docs/data.md (Tasks) says which tokens these are, and what the accuracies mean.
 *
 * Requests are packed into samples of seq + 1 tokens, one behind the other. Which stands where follows from their
 * lengths alone, so the scores do not depend on the batch or the layout.
 */
#ifndef MEGATRAIN_DATA_TASKS_H
#define MEGATRAIN_DATA_TASKS_H

#include <stdbool.h>

#include "data/tokenizer.h"

enum { TASKS_MAX = 64, TASK_NAME_BYTES = 64 /* the closing 0 is counted */ };

typedef enum { TASK_CHOICES, TASK_CONTEXTS, TASK_GREEDY } TaskForm;

/* Divisor of a choice's score, before the largest is taken. */
typedef enum { TASK_ACC, TASK_ACC_NORM, TASK_ACC_BYTES, TASK_METRICS } TaskMetric;

/* A share of questions, and its standard error; NaN if it has none. */
typedef struct {
    double mean, error;
} TaskMean;

/* One choice of a question. */
typedef struct {
    int64_t tokens;       /* where they begin in the pool */
    int32_t count;        /* number of its tokens */
    int32_t scored;       /* the last of them, 1 or more */
    int32_t chars, bytes; /* code points and bytes of the choice */
    int64_t sample;       /* the sample that it stands in */
    int32_t begin;        /* from this position on */
    bool greedy;          /* no other token had a larger logit than any of those scored */
    double score;         /* log-likelihood, nats */
} TaskRequest;

typedef struct {
    int64_t first; /* request */
    int32_t count, gold;
} TaskQuestion;

typedef struct {
    char path[256], name[TASK_NAME_BYTES]; /* name: that of the file, without folder and .jsonl */
    TaskForm form;
    int64_t first, count; /* questions */
    int64_t cut;          /* requests that were cut from the left to fit */
} Task;

typedef struct {
    Task task[TASKS_MAX];
    int count; /* 0: there are none */
    int64_t seq;
    int32_t *pool;
    TaskRequest *requests;
    TaskQuestion *questions;
    int64_t pool_count, request_count, question_count;
    int64_t samples;
    int64_t *order;        /* [request_count] by sample and place */
    int64_t *sample_first; /* [samples + 1] into order */
    int64_t pool_room, request_room, question_room;
} Tasks;

/*
 * Reads the files of a list "FILE,FILE". ERR_CONFIG: a name is empty or given twice, or there are too many; ERR_DATA
 * naming file and line: no such file, no JSON, a member that is missing or of another kind, no choices, a gold that is
 * no choice, a choice without tokens or of more than seq. tasks_close is to be called also after an error.
 */
Err tasks_open(Tasks *t, const char *list, const Tokenizer *tokenizer, int64_t seq);
void tasks_close(Tasks *t); /* all zero is fine */

/* CRC32C of all questions and their tokens: are those of two ranks the same? */
uint32_t tasks_crc(const Tasks *t);

/* Samples as TokenSource wants them (engine/trainer.h), of a Tasks. */
Err tasks_tokens(void *tasks, int64_t first, int64_t count, int32_t *tokens);
Err tasks_requests(void *tasks, int64_t first, int64_t count, int32_t *begin, bool *counts);

/* The n-th request of a sample; NULL: it has fewer. Its score and greedy are the caller's to fill in. */
TaskRequest *tasks_request(const Tasks *t, int64_t sample, int64_t n);

/* Does the metric mean something for a task whose requests have scores? The other counts over all tasks, each question
 * alike, and leaves out forms without the metric; *questions: how many count. */
bool task_has(const Task *task, TaskMetric metric);
TaskMean task_mean(const Tasks *t, const Task *task, TaskMetric metric);
TaskMean tasks_pooled(const Tasks *t, TaskMetric metric, int64_t *questions);

extern const char *const task_metric_names[TASK_METRICS]; /* "acc", ... */
extern const char *const task_form_names[];               /* "choices", ... */

#endif
