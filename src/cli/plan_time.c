/* See plan.h: how long a step takes, and what it is spent on. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/json.h"
#include "base/units.h"
#include "cli/plan.h"
#include "plan/besides.h"
#include "plan/planner.h"

static int by_seconds(const void *a, const void *b)
{
    const double x = ((const PredictionShare *)a)->seconds, y = ((const PredictionShare *)b)->seconds;
    return (x < y) - (x > y);
}

/* Those above 0, the largest first; their number. */
static int shares_of(const Prediction *p, PredictionShare out[PREDICTION_SHARES])
{
    PredictionShare all[PREDICTION_SHARES];
    int kept = 0;
    prediction_shares(p, all);
    for (int i = 0; i < PREDICTION_SHARES; i++)
        if (all[i].seconds > 0) out[kept++] = all[i];
    qsort(out, (size_t)kept, sizeof *out, by_seconds);
    return kept;
}

void plan_gain(const Prediction *before, const Prediction *after, Advice *out)
{
    PredictionShare was[PREDICTION_SHARES], is[PREDICTION_SHARES];
    int most = 0;
    prediction_shares(before, was);
    prediction_shares(after, is);
    for (int i = 1; i < PREDICTION_SHARES; i++)
        if (was[i].seconds - is[i].seconds > was[most].seconds - is[most].seconds) most = i;
    snprintf(out->share, sizeof out->share, "%s", was[most].name);
    out->share_s = was[most].seconds;
    out->share_after_s = is[most].seconds;
}

/* ---- ops ---- */

static const TimeShares *sorted_by;

static int by_op_time(const void *a, const void *b)
{
    const double x = sorted_by->op[*(const int *)a], y = sorted_by->op[*(const int *)b];
    return (x < y) - (x > y);
}

/* Ids of ops that take time, those that take most first. Their number. */
static int ops_by_time(const TimeShares *t, int out[OP_COUNT])
{
    int n = 0;
    for (int i = 0; i < OP_COUNT; i++)
        if (t->calls[i] > 0) out[n++] = i;
    sorted_by = t;
    qsort(out, (size_t)n, sizeof *out, by_op_time);
    return n;
}

static void put_ops(const PlanTable *t)
{
    const TimeShares *sum = &t->predicted.shares;
    int op[OP_COUNT];
    const int n = ops_by_time(sum, op);
    printf("\n%-34s %12s %15s %11s\n", "ops of a step, predicted", "calls", "ms", "us a call");
    for (int i = 0; i < n; i++)
        printf("  %-32s %12.0f %15.2f %11.1f\n", op_info((OpId)op[i])->name, sum->calls[op[i]], 1e3 * sum->op[op[i]],
               1e6 * sum->op[op[i]] / sum->calls[op[i]]);
}

/* ---- the step ---- */

/* Predicts it, and draws it into a file. */
static Err draw(const CostModel *m, PlanTable *t, const char *path)
{
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    if (!f) return err_set(ERR_MEMORY, "no memory for the picture");
    Err err = predict_svg(m, &t->spec, t->grid, &t->predicted, f);
    const bool whole = !ferror(f);
    if ((fclose(f) || !whole) && !err) err = err_set(ERR_MEMORY, "no memory for the picture");
    if (!err) err = err_as(file_replace(path, text, (int64_t)size), ERR_STORAGE);
    free(text);
    return err;
}

Err plan_time(PlanTable *t, const char *svg)
{
    CostModel m;
    if (!t->target)
        snprintf(t->no_time, sizeof t->no_time,
                 "--device h100 says it of a GPU; of processors, the file that megatrain doctor --calibrate FILE "
                 "writes");
    else if (cost_open(&m, t->target, grid_size(t->grid))) snprintf(t->no_time, sizeof t->no_time, "%s", err_message());
    else t->has_time = true, planner_warn(t->target, t->cfg, false);
    if (svg) TRY(file_check_replaces(svg, "<svg"));
    const char *asked = svg ? "svg" : t->advised ? "advise" : t->ops ? "ops" : NULL;
    if (!t->has_time && asked)
        return err_set(ERR_CONFIG, "--%s is about a predicted step, and none is predicted", asked),
               err_hint("%s", t->no_time);
    if (!t->has_time) return ERR_OK;
    return svg ? draw(&m, t, svg) : predict(&m, &t->spec, t->grid, &t->predicted);
}

/* ---- besides ---- */

static Besides besides(const PlanTable *t)
{
    int64_t most = 0;
    for (int rank = 0; rank < grid_size(t->grid); rank++) most = t->shards[rank] > most ? t->shards[rank] : most;
    const BesidesOf of = { .step_s = t->predicted.step_s,
                           .forward_s = t->predicted.forward_s,
                           .ranks = grid_size(t->grid),
                           .checkpoint = plan_checkpoint(t),
                           .shard = most };
    return besides_of(t->cfg, t->target, &of);
}

/* "12.34 ms", or of long steps "12.34 s": one unit in all lines of a table. */
static const char *share_text(const PlanTable *t, double seconds, char out[UNITS_BYTES])
{
    const bool is_long = t->predicted.step_s >= 10;
    snprintf(out, UNITS_BYTES, "%.2f %s", is_long ? seconds : 1e3 * seconds, is_long ? "s" : "ms");
    return out;
}

static void put_beside(const PlanTable *t, const char *name, double seconds, const char *what, const char *lacks)
{
    char time[UNITS_BYTES];
    if (isnan(seconds)) printf("  %-34s %15s %9s  (%s: %s)\n", name, "not known", "", what, lacks);
    else if (seconds > 0)
        printf("  %-34s %15s %9.2f %%  (%s)\n", name, share_text(t, seconds, time), 100 * seconds / t->predicted.step_s,
               what);
}

static void put_besides(const PlanTable *t)
{
    const Config *c = t->cfg;
    const Besides b = besides(t);
    char evaluations[120], checkpoints[120], bytes[UNITS_BYTES], time[UNITS_BYTES], tokens[32];
    snprintf(evaluations, sizeof evaluations, "%lld samples of %d set%s every %lld steps",
             (long long)c->derived.eval_samples, besides_sets(c), besides_sets(c) == 1 ? "" : "s",
             (long long)c->train.eval_every);
    snprintf(checkpoints, sizeof checkpoints, "%s every %lld steps%s", units_bytes(bytes, plan_checkpoint(t)),
             (long long)c->checkpoint.every, c->checkpoint.async ? ", written beside them" : "");
    if (!isnan(b.evaluations + b.tasks + b.checkpoints) && !(besides_sum(&b) > 0)) return;
    printf("  and besides, on the average of a step:\n");
    put_beside(t, "evaluations", b.evaluations, c->derived.eval_samples ? evaluations : "whole sets",
               "train.eval_samples says how much of them");
    put_beside(t, "questions", b.tasks, "train.eval_tasks", "its files alone say how many");
    put_beside(t, "checkpoints", b.checkpoints, checkpoints, "the device's file has no disk_gb_s");
    put_beside(t, "the host between two steps", b.host, "step_us of the device's file", "");
    const double all = t->predicted.step_s + besides_sum(&b);
    printf("  %s in all: %s tokens/s\n", units_step(time, all),
           units_commas(tokens, llround(t->predicted.tokens_s * t->predicted.step_s / all)));
}

static void json_besides(JsonOut *j, const PlanTable *t)
{
    const Besides b = besides(t);
    json_open(j, "besides_ms", '{');
    json_put_number(j, "evaluations", 1e3 * b.evaluations);
    json_put_number(j, "tasks", 1e3 * b.tasks);
    json_put_number(j, "checkpoints", 1e3 * b.checkpoints);
    json_put_number(j, "host", 1e3 * b.host);
    json_close(j, '}');
    json_put_number(j, "all_ms", 1e3 * (t->predicted.step_s + besides_sum(&b)));
}

static void put_advice(const PlanTable *t)
{
    const double step = t->predicted.step_s;
    if (!t->advised) return;
    printf("\nwhat would help most, of %d layouts that differ in one thing and fit\n", t->neighbours);
    if (!t->advice_count) printf("  none of them is faster\n");
    for (int i = 0; i < t->advice_count; i++) {
        const Advice *a = &t->advice[i];
        printf("  %s saves %.1f %%: %.1f %% of the step is %s, then %.1f %%\n", a->words, 100 * (1 - a->step_s / step),
               100 * a->share_s / step, a->share, 100 * a->share_after_s / a->step_s);
    }
}

void plan_put_time(const PlanTable *t)
{
    const Prediction *p = &t->predicted;
    PredictionShare share[PREDICTION_SHARES];
    char time[UNITS_BYTES], all[32], each[32];
    if (!t->has_time) {
        printf("\ntime    not predicted: %s\n", t->no_time);
        return;
    }
    printf("\ntime of a step on %s, predicted, not measured (docs/planner.md)\n", t->target->name);
    printf("  %s: %s tokens/s, %s on each rank; %.4g TFLOP/s on each", units_step(time, p->step_s),
           units_commas(all, llround(p->tokens_s)), units_commas(each, llround(p->tokens_s / grid_size(t->grid))),
           1e-12 * p->flop_s);
    if (p->mfu > 0) printf(", MFU %.1f %%", 100 * p->mfu);
    if (t->grid.pp > 1) printf("\n  of it, on pp rank %d, which is busy longest:\n", t->predicted.pp_rank);
    else printf("\n  of it:\n");
    const int n = shares_of(p, share);
    for (int i = 0; i < n; i++)
        printf("  %-34s %15s %9.1f %%\n", share[i].name, share_text(t, share[i].seconds, time),
               100 * share[i].seconds / p->step_s);
    put_besides(t);
    printf("  not in it: waiting for data, steps that are done again\n");
    put_advice(t);
    if (t->ops) put_ops(t);
}

static void json_ops(JsonOut *j, const TimeShares *sum)
{
    int op[OP_COUNT];
    const int n = ops_by_time(sum, op);
    json_open(j, "ops", '{');
    for (int i = 0; i < n; i++) {
        json_open(j, op_info((OpId)op[i])->name, '{');
        json_put_number(j, "calls", sum->calls[op[i]]);
        json_put_number(j, "ms", 1e3 * sum->op[op[i]]);
        json_close(j, '}');
    }
    json_close(j, '}');
}

static void json_advice(JsonOut *j, const PlanTable *t)
{
    json_open(j, "advice", '[');
    for (int i = 0; i < t->advice_count; i++) {
        json_open(j, NULL, '{');
        json_put_text(j, "keys", t->advice[i].words);
        json_put_number(j, "step_ms", 1e3 * t->advice[i].step_s);
        json_put_number(j, "saves", 1 - t->advice[i].step_s / t->predicted.step_s);
        json_put_text(j, "share", t->advice[i].share);
        json_close(j, '}');
    }
    json_close(j, ']');
}

void plan_json_time(JsonOut *j, const PlanTable *t)
{
    const Prediction *p = &t->predicted;
    PredictionShare share[PREDICTION_SHARES];
    if (!t->has_time) {
        json_put_number(j, "predicted", NAN);
        return;
    }
    json_open(j, "predicted", '{');
    json_put_number(j, "step_ms", 1e3 * p->step_s);
    json_put_number(j, "tokens_per_s", p->tokens_s);
    json_put_number(j, "tokens_per_s_gpu", p->tokens_s / grid_size(t->grid));
    json_put_number(j, "tflops", 1e-12 * p->flop_s);
    json_put_number(j, "mfu", p->mfu);
    json_put_text(j, "bound", prediction_bound(p).name);
    json_put_int(j, "pp_rank", p->pp_rank);
    json_put_number(j, "launches", p->shares.launches);
    json_put_number(j, "pieces", p->shares.pieces);
    json_put_number(j, "evaluation_batch_ms", 1e3 * p->forward_s);
    json_besides(j, t);
    json_open(j, "ms", '{');
    const int n = shares_of(p, share);
    for (int i = 0; i < n; i++) json_put_number(j, share[i].name, 1e3 * share[i].seconds);
    json_close(j, '}');
    if (t->ops) json_ops(j, &p->shares);
    if (t->advised) json_advice(j, t);
    json_close(j, '}');
}
