/*
 * Evaluation as a command (train.h): a checkpoint of a run, on one process or on the ranks of any layout. All
 * give the same figures; rank 0 prints them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fault.h"
#include "base/mathx.h"
#include "train/join.h"
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

static Err eval_set(Run *r, const NamedSet *set)
{
    double loss;
    int64_t counted, bytes = 0, samples = run_valid_samples(r, set->data);
    TRY(trainer_eval(&r->trainer, run_tokens(set->data), 0, samples, &loss, &counted));
    if (r->world->rank) return ERR_OK;
    TRY(target_bytes(r, set->data, samples, &bytes));
    if (*set->name) printf("valid %s\n", set->name);
    printf("loss %.6f\nperplexity %.4f\ntokens %lld\nbytes %lld\nbits_per_byte %.4f\n", loss, m_exp(loss),
           (long long)counted, (long long)bytes, loss / m_log(2) * (double)counted / (double)bytes);
    return ERR_OK;
}

/* The checkpoint that the configuration names, else the run. */
static const char *configured(const Config *cfg)
{
    const char *resume = cfg->checkpoint.resume;
    if (*cfg->checkpoint.load) return cfg->checkpoint.load;
    return strcmp(resume, "auto") && strcmp(resume, "none") ? resume : cfg->run.dir;
}

static Err eval_print(Run *r, const EvalFrom *from)
{
    TRY(run_load_weights(r, from->run_dir ? from->run_dir : configured(r->cfg), from->step));
    if (r->ranks) watch_phase(r->ranks->watch, PHASE_EVAL, 0);
    fault_point("evaluate");
    for (int i = 0; i < r->valid.count; i++) TRY(eval_set(r, &r->valid.set[i]));
    return ERR_OK;
}

/* ranks: NULL for one process, which reads the model of any layout as a whole. */
static Err eval_on(const Config *cfg, const EvalFrom *from, Ranks *ranks)
{
    Run r;
    TRY(run_open(&r, cfg, RUN_EVAL, ranks));
    Err err = eval_print(&r, from);
    if (ranks) err = ranks_end(ranks, err); /* what is still on its way must not meet memory that is gone */
    run_close(&r);
    return err;
}

Err eval_run(const Config *cfg, const Boot *boot, const EvalFrom *from)
{
    Ranks ranks = { 0 };
    char *text = NULL;
    if (boot->size == 1) return eval_on(cfg, from, NULL);
    Err err = join_ranks(&ranks, cfg, boot, from->run_dir ? from->run_dir : cfg->run.dir, NULL, &text);
    if (!err) watch_phase(ranks.watch, PHASE_LOAD, 0);
    if (!err) err = eval_on(cfg, from, &ranks);
    else err = ranks_end(&ranks, err);
    free(text);
    return ranks_close(&ranks, err);
}
