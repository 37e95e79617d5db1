/* See inputs.h. */
#include "train/inputs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "hf/folder.h"
#include "train/data_id.h"

/* ---- the list of what a run reads ---- */

/* Samples of a run's data take so much together, and so do those of the weights that it begins with. */
enum { SAMPLED_BYTES = 16 << 20 };

static Err put_set(const Dataset *d, const char *key, const char *set, FILE *f)
{
    if (!d) return ERR_OK;
    for (int i = 0; i < dataset_source_count(d); i++) {
        fprintf(f, "%s%s%s: ", key, *set ? " " : "", set);
        data_id_put_source(f, dataset_source(d, i));
        fputc('\n', f);
    }
    fprintf(f, "%s%s%s: order of samples %08x\n", key, *set ? " " : "", set, dataset_crc(d));
    return ERR_OK;
}

static Err put_train(const Run *r, FILE *f) { return put_set(r->train, "data.train", "", f); }

static Err put_valid(const Run *r, FILE *f)
{
    for (int i = 0; i < r->valid.count; i++) TRY(put_set(r->valid.set[i].data, "data.valid", r->valid.set[i].name, f));
    return ERR_OK;
}

typedef struct {
    const char *path, *key; /* the key that names it */
} TokenFile;

/* Orders by path, then by key: where a file stands under two keys, the first in the list stays. */
static int by_path(const void *a, const void *b)
{
    const TokenFile *x = a, *y = b;
    const int order = strcmp(x->path, y->path);
    return order ? order : strcmp(x->key, y->key);
}

/* Adds the files of a set to those in `out`; NULL: counts them. */
static int add_files(const Dataset *d, const char *key, TokenFile *out)
{
    const char *path;
    int n = 0;
    for (int i = 0; d && i < dataset_source_count(d); i++)
        for (int k = 0; (path = dataset_file(d, i, k)); k++, n++)
            if (out) out[n] = (TokenFile){ path, key };
    return n;
}

static int list_files(const Run *r, TokenFile *out)
{
    int n = add_files(r->train, "data.train", out);
    for (int i = 0; i < r->valid.count; i++) n += add_files(r->valid.set[i].data, "data.valid", out ? out + n : NULL);
    return n;
}

static int drop_repeated(TokenFile *t, int count)
{
    int n = 0;
    qsort(t, (size_t)count, sizeof *t, by_path);
    for (int i = 0; i < count; i++)
        if (!n || strcmp(t[i].path, t[n - 1].path)) t[n++] = t[i];
    return n;
}

/* The tokens themselves, of each file once, whatever sets and stages read it. */
static Err put_tokens(const Run *r, FILE *f)
{
    Err err = ERR_OK;
    int count = list_files(r, NULL);
    if (!count) return ERR_OK;
    TokenFile *t = calloc((size_t)count, sizeof *t);
    if (!t) return err_set(ERR_MEMORY, "no memory for the names of %d token files", count);
    list_files(r, t);
    count = drop_repeated(t, count);
    for (int i = 0; i < count && !err; i++) {
        uint32_t crc = 0;
        err = err_as(file_sample_crc(t[i].path, SAMPLED_BYTES / count, &crc), ERR_DATA);
        fprintf(f, "%s: %s: sampled %08x\n", t[i].key, t[i].path, crc);
    }
    free(t);
    return err;
}

static Err put_tokenizer(const Run *r, FILE *f)
{
    fprintf(f, "data.tokenizer: %s: %d ids, checksum %08x\n", r->cfg->data.tokenizer, tokenizer_vocab(r->tokenizer),
            tokenizer_crc(r->tokenizer));
    return ERR_OK;
}

static Err put_tasks(const Run *r, FILE *f)
{
    const Tasks *t = &r->tasks;
    if (t->count)
        fprintf(f, "train.eval_tasks: %s: %lld questions, checksum %08x\n", r->cfg->train.eval_tasks,
                (long long)t->question_count, tasks_crc(t));
    return ERR_OK;
}

/* (the tokenizer first: with another one the others differ, too) */
static Err (*const inputs[])(const Run *r, FILE *f) = { put_tokenizer, put_train, put_valid, put_tokens, put_tasks };

/* ---- comparing ---- */

static Err agree(const Run *r, const char *facts, Err err)
{
    const Agreement a = { .facts = facts,
                          .err = err,
                          .what = err == ERR_DATA ? "the ranks do not read the same data"
                                                  : "the ranks do not load the same weights",
                          .way = "copy the files anew to the hosts that differ, or put them in a folder that "
                                 "all hosts share" };
    return ranks_agree(r->ranks, &a);
}

static bool alone(const Run *r) { return !r->ranks || r->ranks->boot.size == 1; }

static Err put_all(const Run *r, FILE *f)
{
    Err err = ERR_OK;
    for (size_t i = 0; i < sizeof inputs / sizeof *inputs && !err; i++) err = inputs[i](r, f);
    return err;
}

Err inputs_agree(const Run *r)
{
    char *text = NULL;
    size_t size = 0;
    if (alone(r)) return ERR_OK;
    FILE *f = open_memstream(&text, &size);
    Err err = f ? put_all(r, f) : ERR_MEMORY;
    if (!f || fclose(f)) err = err_set(ERR_MEMORY, "no memory for what the ranks compare of their data");
    if (!err) err = agree(r, text, ERR_DATA);
    free(text);
    return err;
}

Err inputs_agree_on_argument(const Run *r, const char *facts) { return alone(r) ? ERR_OK : agree(r, facts, ERR_DATA); }

/* ---- weights ---- */

static Err put_file(FILE *f, const char *path, int64_t budget)
{
    int64_t bytes;
    uint32_t crc = 0;
    TRY_AS(ERR_CKPT, file_size(path, &bytes));
    TRY_AS(ERR_CKPT, file_sample_crc(path, budget, &crc));
    fprintf(f, "%s: %lld bytes, %s %08x\n", path, (long long)bytes, bytes <= budget ? "checksum" : "sampled", crc);
    return ERR_OK;
}

static Err put_file_of(FILE *f, const char *folder, const char *name, int64_t budget)
{
    char path[PATH_MAX];
    if (snprintf(path, sizeof path, "%s/%s", folder, name) < PATH_MAX) return put_file(f, path, budget);
    return err_set(ERR_CKPT, "path is too long: '%s'", folder);
}

static Err put_hub_files(FILE *f, const char *folder, SetupArena *a)
{
    HfFolder hf;
    Err err = hf_folder_open(folder, a, &hf);
    for (int i = 0; i < hf.file_count && !err; i++) err = put_file(f, hf.files[i].path, SAMPLED_BYTES / hf.file_count);
    hf_folder_close(&hf);
    return err;
}

/* A checkpoint's manifest has the checksums of all its files, and loading goes by them. */
static Err put_weights(FILE *f, const char *path)
{
    SetupArena a;
    if (!hf_folder_is(path)) return put_file_of(f, path, "manifest.json", INT64_MAX);
    TRY(put_file_of(f, path, "config.json", SAMPLED_BYTES));
    setup_init(&a);
    const Err err = put_hub_files(f, path, &a);
    setup_release(&a);
    return err;
}

/* All ranks return alike. */
static Err readable_on_all(Run *r, const char *path, Err mine)
{
    int64_t failed = mine != ERR_OK;
    ErrKept why;
    if (mine) err_keep(&why);
    TRY(comm_max_i64(&r->world->host, &r->trainer.device.stream, &failed, 1, NULL));
    if (mine) return err_again(&why, mine);
    return failed ? err_elsewhere(err_set(ERR_CKPT, "another rank cannot read '%s'", path)) : ERR_OK;
}

Err inputs_agree_on_weights(Run *r, const char *path, bool *damaged)
{
    char *text = NULL;
    size_t size = 0;
    *damaged = false;
    if (alone(r)) return ERR_OK;
    FILE *f = open_memstream(&text, &size);
    Err err = f ? put_weights(f, path) : ERR_MEMORY;
    if (!f || fclose(f)) err = err_set(ERR_MEMORY, "no memory for what the ranks compare of '%s'", path);
    err = readable_on_all(r, path, err);
    *damaged = err == ERR_CKPT;
    if (!err) err = agree(r, text, ERR_CKPT);
    free(text);
    return err;
}

Err inputs_agree_on_source(const Run *r, const char *path, const char *kind)
{
    char facts[PATH_MAX + 64];
    if (alone(r)) return ERR_OK;
    snprintf(facts, sizeof facts, "%s: %s\n", path, kind);
    return agree(r, facts, ERR_CKPT);
}
