/* See auto_micro_batch.h. What rank 0 tells the others is the word "train.micro_batch=N". */
#include "cli/auto_micro_batch.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/heap.h"
#include "base/log.h"
#include "cli/config_arg.h"
#include "cli/going_on.h"
#include "cli/plan.h"
#include "plan/micro_batch.h"

/* *c anew, with one word more. */
static Err read_with(const AutoMicroBatch *a, const char *word, int64_t ranks, Config *c)
{
    const char **all = calloc((size_t)a->words.count + 1, sizeof *all);
    if (!all) return err_set(ERR_MEMORY, "no memory for %d words", a->words.count + 1);
    for (int i = 0; i < a->words.count; i++) all[i] = a->words.items[i];
    all[a->words.count] = word;
    config_release(c);
    const Err err = config_arg(c, a->path, (Words){ all, a->words.count + 1 }, ranks);
    free(all);
    return err;
}

/* The number of the checkpoint that c goes on from; 0: there is none, or it has no number. */
static Err number_kept(const Config *c, int64_t *samples, int64_t *step)
{
    ON_HEAP(Config, was, 1);
    bool found;
    *samples = 0;
    TRY(going_on(c, was, step, &found));
    if (!found) return ERR_OK;
    if (!was->derived.open_micro_batch) *samples = was->train.micro_batch;
    config_release(was);
    return ERR_OK;
}

/* The number of a run that goes on; 0: it begins, or its layout takes another one. */
static Err keep(const Config *c, int64_t *samples)
{
    int64_t had = 0, step = 0;
    *samples = 0;
    TRY(number_kept(c, &had, &step));
    if (!had) return ERR_OK;
    const Err err = micro_batch_allowed(c, had);
    if (err && err != ERR_CONFIG) return err;
    if (err)
        log_info("train.micro_batch=auto: the checkpoint of step %lld has %lld, which this run cannot take (%.*s): "
                 "it takes another number",
                 (long long)step, (long long)had, (int)strcspn(err_message(), "\n"), err_message());
    else log_info("train.micro_batch=auto: %lld, as in the checkpoint of step %lld", (long long)had, (long long)step);
    if (!err) *samples = had;
    return ERR_OK;
}

/* The least will do where the vocabulary cannot be read, or nothing fits: the run itself says what is wrong. */
static Err begin(const Config *c, const Room *room, int64_t *samples)
{
    int64_t vocab;
    char text[MICRO_BATCH_TEXT];
    MicroBatch m;
    if (plan_vocab(c, &vocab)) return micro_batch_least(c, samples);
    TRY(micro_batch_choose(c, vocab, room, &m));
    if (m.fits) log_info("train.micro_batch=auto: %s", micro_batch_text(&m, room, text));
    *samples = m.samples;
    return ERR_OK;
}

static Err choose(void *user, const Config *c, const Boot *boot, const Room *room, char *text, size_t size)
{
    int64_t samples;
    char word[MICRO_BATCH_WORD];
    (void)user, (void)boot;
    TRY(keep(c, &samples));
    if (!samples) TRY(begin(c, room, &samples));
    snprintf(text, size, "%s", micro_batch_word(samples, word));
    return ERR_OK;
}

static Err take(void *user, const char *text, const Boot *boot, Config *c)
{
    const AutoMicroBatch *a = user;
    TRY(read_with(a, text, boot->size, c));
    return a->may_differ ? config_let_differ(c, a->may_differ) : ERR_OK;
}

LayoutChoice auto_micro_batch_choice(AutoMicroBatch *a) { return (LayoutChoice){ a, true, choose, take }; }
