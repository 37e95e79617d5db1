/*
 * What would help most (plan.h): the step of layouts that differ from the configuration's in one thing, as far as the
 * program's own rules take them and they fit.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/config_arg.h"
#include "cli/plan.h"

/* A key that takes another word, or a number that is doubled or halved. */
typedef struct {
    ConfigId key;
    const char *word; /* NULL: a number, */
    bool doubled;     /* twice as much of it, or half */
} Change;

/* Pairs of keys, which some layouts change together alone. */
typedef struct {
    Change change[2];
    int count;
} Step;

#define TWICE(name)            \
    {                          \
        CFG_##name, NULL, true \
    }
#define HALF(name)              \
    {                           \
        CFG_##name, NULL, false \
    }
#define BE(name, word)          \
    {                           \
        CFG_##name, word, false \
    }
static const Step steps[] = {
    { { TWICE(parallel_tp) }, 1 },
    { { HALF(parallel_tp) }, 1 },
    { { TWICE(parallel_pp) }, 1 },
    { { HALF(parallel_pp) }, 1 },
    { { TWICE(parallel_tp), HALF(parallel_pp) }, 2 },
    { { HALF(parallel_tp), TWICE(parallel_pp) }, 2 },
    { { TWICE(parallel_cp) }, 1 },
    { { HALF(parallel_cp) }, 1 },
    { { TWICE(parallel_ep) }, 1 },
    { { HALF(parallel_ep) }, 1 },
    { { TWICE(parallel_vpp) }, 1 },
    { { HALF(parallel_vpp) }, 1 },
    { { TWICE(train_micro_batch) }, 1 },
    { { HALF(train_micro_batch) }, 1 },
    { { BE(train_recompute, "none") }, 1 },
    { { BE(train_recompute, "selective") }, 1 },
    { { BE(train_recompute, "full") }, 1 },
    { { BE(parallel_schedule, "1f1b") }, 1 },
    { { BE(parallel_schedule, "interleaved"), BE(parallel_vpp, "2") }, 2 },
    { { BE(parallel_schedule, "zb-h1") }, 1 },
    { { BE(parallel_schedule, "dualpipev"), BE(parallel_overlap_moe, "true") }, 2 },
    { { BE(parallel_overlap_tp, "4") }, 1 },
    { { BE(parallel_overlap_tp, "1") }, 1 },
    { { BE(parallel_overlap_grad, "true") }, 1 },
    { { BE(parallel_overlap_param, "true") }, 1 },
};
enum { STEPS = sizeof steps / sizeof *steps, WORD_BYTES = 48 };

/* "parallel.tp=4 parallel.pp=2" in two words. false: that is what there is, or a number cannot be halved. */
static bool words_of(const Config *cfg, const Step *s, char words[2][WORD_BYTES])
{
    bool other = false;
    for (int i = 0; i < s->count; i++) {
        const Change *c = &s->change[i];
        char now[CONFIG_VALUE_BYTES], next[32];
        config_value(cfg, c->key, now);
        const long long number = atoll(now);
        if (!c->word && !c->doubled && number % 2) return false;
        snprintf(next, sizeof next, "%lld", c->doubled ? 2 * number : number / 2);
        const ConfigKey *key = config_key(c->key);
        snprintf(words[i], WORD_BYTES, "%s.%s=%s", key->section, key->name, c->word ? c->word : next);
        other |= strcmp(now, c->word ? c->word : next) != 0;
    }
    return other;
}

/* The step where those words are added. Errors: it is not legal, or does not fit. */
static Err predict_words(const PlanTable *t, const CostModel *m, char words[2][WORD_BYTES], int count, Prediction *out)
{
    Config c = { 0 };
    TrainSpec spec;
    Grid grid;
    const int given = t->words.count;
    const char **all = calloc((size_t)(given + count), sizeof *all);
    if (!all) return err_set(ERR_MEMORY, "no memory for %d words", given + count);
    for (int i = 0; i < given; i++) all[i] = t->words.items[i];
    for (int i = 0; i < count; i++) all[given + i] = words[i];
    Err err = config_arg(&c, t->path, (Words){ all, given + count }, grid_size(t->grid));
    if (!err) err = train_spec(&c, t->spec.model.vocab, &spec);
    if (!err) err = grid_spec(&c, &grid);
    if (!err) err = trainer_check(&spec, grid);
    if (!err) err = predict(m, &spec, grid, out);
    if (!err && !plan_holds(t->target, &c, grid, out->bytes)) err = err_set(ERR_PLAN, "it does not fit");
    config_release(&c);
    free(all);
    return err;
}

static int by_step(const void *a, const void *b)
{
    const double x = ((const Advice *)a)->step_s, y = ((const Advice *)b)->step_s;
    return (x > y) - (x < y);
}

Err plan_advise(PlanTable *t)
{
    Advice all[STEPS];
    CostModel m;
    int count = 0;
    TRY(cost_open(&m, t->target, grid_size(t->grid)));
    for (int i = 0; i < STEPS; i++) {
        char words[2][WORD_BYTES] = { "", "" };
        Prediction p;
        if (!words_of(t->cfg, &steps[i], words)) continue;
        const Err err = predict_words(t, &m, words, steps[i].count, &p);
        if (err == ERR_MEMORY) return err;
        if (err) continue; /* (no neighbour, then) */
        t->neighbours++;
        if (!(p.step_s < t->predicted.step_s)) continue;
        Advice *a = &all[count++];
        snprintf(a->words, sizeof a->words, "%s%s%s", words[0], words[1][0] ? " " : "", words[1]);
        a->step_s = p.step_s;
        plan_gain(&t->predicted, &p, a);
    }
    qsort(all, (size_t)count, sizeof *all, by_step);
    t->advice_count = count < ADVICE_MOST ? count : ADVICE_MOST;
    memcpy(t->advice, all, (size_t)t->advice_count * sizeof *all);
    return ERR_OK;
}
