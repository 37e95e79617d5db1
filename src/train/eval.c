/*
 * Evaluation as a command (train.h): a checkpoint of a run, on one process or on the ranks of any layout. All
 * give the same figures; rank 0 prints them.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fault.h"
#include "base/heap.h"
#include "base/json.h"
#include "base/mathx.h"
#include "train/announce.h"
#include "train/join.h"
#include "train/logits.h"
#include "train/run.h"
#include "train/train.h"

/* Bytes of text that the targets that count stand for: what makes losses of different vocabularies comparable. An end
 * of a document stands for none, however its token is spelled. */
static Err target_bytes(const Run *r, const Dataset *set, int64_t samples, int64_t *bytes)
{
    int64_t T = r->spec.model.seq;
    const int32_t eod = r->spec.documents.eod;
    int32_t *tokens = malloc((size_t)(T + 1) * sizeof *tokens);
    if (!tokens) return err_set(ERR_MEMORY, "no memory for a sample of %lld tokens", (long long)T);
    Err err = ERR_OK;
    *bytes = 0;
    for (int64_t i = 0; i < samples && !err; i++) {
        err = dataset_get(set, i, tokens);
        for (int64_t k = 1; k <= T && !err; k++) {
            int32_t size = 0;
            if (r->spec.documents.mask && tokens[k - 1] == eod) continue;
            if (tokens[k] != eod) tokenizer_bytes(r->tokenizer, tokens[k], tokens[k - 1] == eod, &size);
            *bytes += size;
        }
    }
    free(tokens);
    return err;
}

/* ---- what is printed: lines, or with `json` an object ---- */

static Err eval_set(Run *r, const NamedSet *set, JsonOut *json)
{
    double loss;
    int64_t counted, bytes = 0, samples = run_valid_samples(r, set->data);
    TRY(trainer_eval(&r->trainer, run_tokens(set->data), 0, samples, &loss, &counted));
    if (r->world->rank) return ERR_OK;
    TRY(target_bytes(r, set->data, samples, &bytes));
    const double perplexity = m_exp(loss), bits = loss / m_log(2) * (double)counted / (double)bytes;
    if (!json) {
        if (*set->name) printf("valid %s\n", set->name);
        printf("loss %.6f\nperplexity %.4f\ntokens %lld\nbytes %lld\nbits_per_byte %.4f\n", loss, perplexity,
               (long long)counted, (long long)bytes, bits);
        return ERR_OK;
    }
    json_open(json, NULL, '{');
    if (*set->name) json_put_text(json, "valid", set->name);
    json_put_number(json, "loss", loss);
    json_put_number(json, "perplexity", perplexity);
    json_put_int(json, "tokens", counted);
    json_put_int(json, "bytes", bytes);
    json_put_number(json, "bits_per_byte", bits);
    json_close(json, '}');
    return ERR_OK;
}

static void put_mean(TaskMetric metric, TaskMean m, JsonOut *json)
{
    char name[64];
    snprintf(name, sizeof name, "%s_error", task_metric_names[metric]);
    if (json) {
        json_put_number(json, task_metric_names[metric], m.mean);
        json_put_number(json, name, m.error);
    } else if (isnan(m.error)) printf(" %s %.4f", task_metric_names[metric], m.mean);
    else printf(" %s %.4f +- %.4f", task_metric_names[metric], m.mean, m.error);
}

static void put_task(const Tasks *t, const Task *task, JsonOut *json)
{
    if (!json) printf("task %s questions %lld", task->name, (long long)task->count);
    else {
        json_open(json, NULL, '{');
        json_put_text(json, "task", task->name);
        json_put_text(json, "form", task_form_names[task->form]);
        json_put_int(json, "questions", task->count);
        json_put_int(json, "cut", task->cut);
    }
    for (TaskMetric m = 0; m < TASK_METRICS && task_has(task, m); m++) put_mean(m, task_mean(t, task, m), json);
    if (json) json_close(json, '}');
    else putchar('\n');
}

/* Results over several tasks. */
static void put_pooled(const Tasks *t, JsonOut *json)
{
    if (json) json_open(json, "pooled", '{');
    for (TaskMetric m = 0; m < TASK_METRICS; m++) {
        int64_t questions;
        const TaskMean mean = tasks_pooled(t, m, &questions);
        if (!questions) continue;
        if (m == TASK_ACC && json) json_put_int(json, "questions", questions);
        else if (m == TASK_ACC) printf("tasks pooled questions %lld", (long long)questions);
        put_mean(m, mean, json);
    }
    if (json) json_close(json, '}');
    else putchar('\n');
}

static Err eval_tasks(Run *r, JsonOut *json)
{
    const Tasks *t = &r->tasks;
    TRY(run_score_tasks(r));
    if (r->world->rank || !t->count) return ERR_OK;
    announce_tasks(t);
    if (json) json_open(json, "tasks", '[');
    for (int i = 0; i < t->count; i++) put_task(t, &t->task[i], json);
    if (json) json_close(json, ']');
    if (t->count > 1) put_pooled(t, json);
    return ERR_OK;
}

static Err eval_all(Run *r, JsonOut *json)
{
    if (json) json_open(json, NULL, '{');
    if (json) json_open(json, "valid", '[');
    for (int i = 0; i < r->valid.count; i++) TRY(eval_set(r, &r->valid.set[i], json));
    if (json) json_close(json, ']');
    TRY(eval_tasks(r, json));
    if (json) json_close(json, '}');
    return ERR_OK;
}

/* Sets and tasks have a few numbers each, and names whose bytes escapes make six. */
static Err eval_json(Run *r)
{
    const int64_t room = 1024 + (SETS_MAX + TASKS_MAX) * (6 * TASK_NAME_BYTES + 512);
    char *text = malloc((size_t)room);
    JsonOut json;
    if (!text) return err_set(ERR_MEMORY, "no memory for %lld bytes of JSON", (long long)room);
    json_out_init(&json, text, room);
    Err err = eval_all(r, &json);
    ASSERT(err || json_out_ok(&json));
    if (!err && !r->world->rank) puts(text);
    free(text);
    return err;
}

/* The checkpoint that the configuration names, else the run. */
static const char *configured(const Config *cfg)
{
    const char *resume = cfg->checkpoint.resume;
    if (*cfg->checkpoint.load) return cfg->checkpoint.load;
    return strcmp(resume, "auto") && strcmp(resume, "none") ? resume : cfg->run.dir;
}

static Err eval_print(Run *r, const EvalOptions *o)
{
    TRY(run_load_weights(r, o->run_dir ? o->run_dir : configured(r->cfg), o->step));
    if (r->ranks) watch_phase(r->ranks->watch, PHASE_EVAL, 0);
    fault_point("evaluate");
    if (o->logits) return logits_write(r, o->ids, o->logits);
    return o->json ? eval_json(r) : eval_all(r, NULL);
}

/* ranks: NULL for one process, which reads the model of any layout as a whole. */
static Err eval_on(const Config *cfg, const EvalOptions *o, Ranks *ranks)
{
    ON_HEAP(Run, r, 1);
    Err err = run_open(r, cfg, o->logits ? RUN_LOGITS : RUN_EVAL, ranks);
    const bool open = !err;
    if (open) err = eval_print(r, o);
    if (ranks) err = ranks_end(ranks, err); /* what is still on its way must not meet memory that is gone */
    if (open) run_close(r);
    return err;
}

Err eval_run(const Config *cfg, const Boot *boot, const EvalOptions *o)
{
    ON_HEAP(Ranks, ranks, 1);
    char *text = NULL;
    if (boot->size == 1) return eval_on(cfg, o, NULL);
    Err err = join_ranks(ranks, cfg, boot, o->run_dir ? o->run_dir : cfg->run.dir, NULL, &text);
    if (!err) watch_phase(ranks->watch, PHASE_LOAD, 0);
    if (!err) err = eval_on(cfg, o, ranks);
    else err = ranks_end(ranks, err);
    free(text);
    return ranks_close(ranks, err);
}
