/* See preflight.h. */
#include "train/preflight.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/log.h"
#include "base/words.h"
#include "data/sets.h"
#include "data/shards.h"
#include "data/tasks.h"
#include "data/tokenizer.h"
#include "device/device.h"
#include "train/spec.h"

/* Files that cannot be opened are warned of in the words in which a run would fail. */
static void warn_of(Err err, const char *key, int *found)
{
    if (!err) return;
    log_warn("%s: %s", key, err_message());
    ++*found;
}

static void look_for_device(const Config *c, int *found)
{
    char why[256];
    if (c->run.device != RUN_DEVICE_CUDA || device_cuda_count(why, sizeof why) > 0) return;
    log_warn("run.device: there is no GPU to use: %s", why);
    ++*found;
}

/* ERR_CONFIG: data.train or data.valid is not a list of files that a run would take. */
static Err look_for_data(const Config *c, const Tokenizer *t, int *found)
{
    DatasetOptions o = data_spec(c, t);
    Dataset *train = NULL;
    Sets valid = { 0 };
    Err err =
        *c->data.train ? dataset_open(&o, &train) : err_set(ERR_DATA, "it is empty: there is nothing to train on");
    dataset_close(train);
    if (err == ERR_CONFIG) return data_error(c, CFG_data_train, err);
    warn_of(err, "data.train", found);
    o = valid_spec(c, t);
    if (!*o.spec || (!*c->data.valid && !*c->data.split)) return ERR_OK;
    err = sets_open(&o, &valid);
    if (!err) sets_close(&valid);
    if (err == ERR_CONFIG) return data_error(c, CFG_data_valid, err);
    warn_of(err, *c->data.split ? "data.split" : "data.valid", found);
    return ERR_OK;
}

static Err look_for_tasks(const Config *c, const Tokenizer *t, int *found)
{
    Tasks tasks;
    if (!t || !*c->train.eval_tasks) return ERR_OK;
    Err err = tasks_open(&tasks, c->train.eval_tasks, t, c->model.seq);
    tasks_close(&tasks);
    if (err == ERR_CONFIG) return err;
    warn_of(err, "train.eval_tasks", found);
    return ERR_OK;
}

/* Is data.train one prefix, of files that are not there? */
static bool lacks_tokens(const Config *c)
{
    const char *prefix = c->data.train;
    return *prefix && !strpbrk(prefix, " @'\"") && shards_missing(prefix);
}

Err preflight_hint_of_run(const Config *c, Err err)
{
    char words[2048];
    bool missing = false;
    text_cut(words, sizeof words, *c->data.valid ? c->data.valid : c->data.train);
    for (char *at = words + strspn(words, " "), *word; *at; at += strspn(at, " ")) {
        word = at;
        at += word_length(at);
        if (*at) *at++ = 0;
        word = word_bare(word);
        missing |= *word != '/' && !(*word == '@' && isdigit((unsigned char)word[1])) && !strchr(word, ':') &&
                   word[strspn(word, "0123456789.eE+-")] && shards_missing(word);
    }
    if (!missing) return err;
    return err_hint("the paths are relative to the folder in which the run was started: go there, or give "
                    "data.%s=PATH from here",
                    *c->data.valid ? "valid" : "train");
}

Err preflight_hint(const Config *c, Err err)
{
    const char *tokenizer = c->data.tokenizer;
    char vocabulary[512] = "", tokens[512] = "";
    const bool no_tokenizer = strcmp(tokenizer, "byte") != 0 && !file_exists(tokenizer);
    if (no_tokenizer && text_ends(tokenizer, ".json"))
        snprintf(vocabulary, sizeof vocabulary, "megatrain tokenizer train --input TEXT --vocab-size %lld --output %s",
                 (long long)(c->model.vocab ? c->model.vocab : 32768), tokenizer);
    if (lacks_tokens(c))
        snprintf(tokens, sizeof tokens, "megatrain preprocess --input TEXT --tokenizer %s --output %s --append-eod",
                 tokenizer, c->data.train);
    if (!*vocabulary && !*tokens) return err;
    return err_hint("made from text: %s%s%s (published ones: docs/data.md)", vocabulary,
                    *vocabulary && *tokens ? "; then " : "", tokens);
}

static void look_for_path(const char *key, const char *path, int *found)
{
    if (file_exists(path)) return;
    log_warn("%s: there is no '%s'", key, path);
    ++*found;
}

/* Does the tokenizer fit the configuration? */
static Err look_into(const Tokenizer *t, const Config *c)
{
    TrainSpec spec;
    int32_t eod;
    TRY(train_spec(c, tokenizer_vocab(t), &spec));
    return spec_eod(c, t, &eod);
}

Err preflight(const Config *c, int *found, int64_t *vocab)
{
    Tokenizer *t = NULL;
    *found = 0;
    look_for_device(c, found);
    warn_of(tokenizer_open(c->data.tokenizer, &t), "data.tokenizer", found);
    Err err = look_for_data(c, t, found);
    if (!err) err = look_for_tasks(c, t, found);
    if (strcmp(c->checkpoint.resume, "auto") && strcmp(c->checkpoint.resume, "none"))
        look_for_path("checkpoint.resume", c->checkpoint.resume, found);
    if (*c->checkpoint.load) look_for_path("checkpoint.load", c->checkpoint.load, found);
    *vocab = c->model.vocab ? c->model.vocab : t ? tokenizer_vocab(t) : 0;
    if (!err && t) err = look_into(t, c);
    tokenizer_close(t);
    return err;
}
