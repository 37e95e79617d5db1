/* See config_arg.h. */
#include "cli/config_arg.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fault.h"
#include "base/file.h"
#include "base/log.h"
#include "ckpt/ckpt.h"
#include "boot/boot.h"
#include "device/device.h"
#include "train/data_id.h"
#include "train/kept.h"
#include "train/spec.h"

static struct {
    const char *path, *text;
} frozen;

void config_arg_keep(const char *path, const char *text) { frozen.path = path, frozen.text = text; }

ConfigSource config_source_here(const char *path, Words overrides, int64_t world_size)
{
    char why[256];
    return (ConfigSource){ .path = path,
                           .text = frozen.path && path && !strcmp(path, frozen.path) ? frozen.text : NULL,
                           .gpus = device_cuda_count(why, sizeof why),
                           .pairs = dot_supported(),
                           .tiles = dot_best() == DOT_AMX,
                           .overrides = overrides.items,
                           .override_count = overrides.count,
                           .world_size = world_size };
}

Err config_arg(Config *c, const char *path, Words overrides, int64_t world_size)
{
    ConfigSource source = config_source_here(path, overrides, world_size);
    source.judge = grid_judge;
    return config_read(c, source);
}

/* A checkpoint's folder instead of its run's: it has a manifest, and lies as a run has its own. */
static Err refuse_checkpoint(const char *path)
{
    static const char inside[] = "checkpoints/step-";
    char manifest[PATH_MAX];
    const char *name = NULL;
    for (const char *at = path; (at = strstr(at, inside)); at++)
        if (at == path || at[-1] == '/') name = at;
    if (!name || snprintf(manifest, sizeof manifest, "%s/manifest.json", path) >= (int)sizeof manifest ||
        !file_exists(manifest))
        return ERR_OK;
    err_set(ERR_CONFIG, "--run '%s' is a checkpoint's folder, not a run's", path);
    return err_hint("give the run's, and which checkpoint: --run %.*s --step %lld",
                    name > path ? (int)(name - path) - 1 : 1, name > path ? path : ".",
                    strtoll(name + strlen(inside), NULL, 10));
}

static bool lies_in(const char *dir, const char *name)
{
    char path[PATH_MAX];
    return snprintf(path, sizeof path, "%s/%s", dir, name) < (int)sizeof path && file_exists(path);
}

bool config_arg_is_hf(const char *path)
{
    return lies_in(path, "config.json") &&
           (lies_in(path, "model.safetensors") || lies_in(path, "model.safetensors.index.json"));
}

/* Other folders that are taken for a run's: a model of Hugging Face's, a checkpoint that was moved out of its run. */
static Err refuse_folder(const char *path)
{
    if (lies_in(path, "checkpoints")) return ERR_OK;
    if (lies_in(path, "manifest.json")) {
        err_set(ERR_CKPT, "'%s' is a checkpoint's folder without its run", path);
        return err_hint(
            "move it to RUN/checkpoints/step-N, N being its step in 8 digits (megatrain inspect %s says it)", path);
    }
    if (!config_arg_is_hf(path)) return ERR_OK;
    err_set(ERR_CKPT, "'%s' is a model of Hugging Face's, not a run", path);
    return err_hint("megatrain convert --from %s --to RUN --format megatrain makes a run of it", path);
}

/* A checkpoint's meta data, and where it is. */
typedef struct {
    char path[PATH_MAX];
    SetupArena setup;
    CkptMeta meta;
} Source;

static Err read_meta(const char *path, void *arg)
{
    Source *s = arg;
    snprintf(s->path, sizeof s->path, "%s", path);
    fault_point("found");
    return ckpt_meta(path, &s->setup, &s->meta);
}

static Err find_meta(const char *run_dir, int64_t step, Source *s)
{
    bool found;
    char path[PATH_MAX];
    TRY(refuse_checkpoint(run_dir));
    TRY(refuse_folder(run_dir));
    if (step >= 0) {
        TRY(ckpt_of_step(run_dir, step, path));
        return ckpt_removed(path, read_meta(path, s));
    }
    TRY(ckpt_visit_newest(run_dir, read_meta, s, &found));
    if (found) return ERR_OK;
    return err_set(ERR_CKPT, "no checkpoint in '%s'", run_dir), err_hint("train first: megatrain --config FILE");
}

/* First as it is: what is wrong then is the checkpoint's fault. */
static Err config_of(Config *c, const Source *s, Words overrides, int64_t world_size)
{
    ConfigSource source = config_source_here(s->path, (Words){ 0 }, CONFIG_ANY_WORLD);
    source.text = s->meta.config;
    source.earlier = source.compared = true;
    TRY(err_as(config_read(c, source), ERR_CKPT));
    config_release(c);
    source.compared = false;
    source.overrides = overrides.items;
    source.override_count = overrides.count;
    source.world_size = world_size;
    return config_read(c, source);
}

/* Is what lies there now the tokenizer that the checkpoint was trained with? */
static bool same_tokenizer(const char *path, const char *data)
{
    Tokenizer *t = NULL;
    const bool same = !tokenizer_open(path, &t) && !data_id_same_tokenizer(t, data);
    tokenizer_close(t);
    return same;
}

/* The run's tokenizer may be gone from where it was, be another one by now, or be relative to another folder: the run
 * has a copy. */
static Err find_tokenizer(Config *c, const char *run_dir, const char *data)
{
    char copy[PATH_MAX], *kept;
    const bool named = c->origin[CFG_data_tokenizer].kind == ORIGIN_COMMAND_LINE;
    if (named || !strcmp(c->data.tokenizer, "byte") || !kept_find_tokenizer(run_dir, copy)) return ERR_OK;
    const bool there = file_exists(c->data.tokenizer);
    if (there && (same_tokenizer(c->data.tokenizer, data) || !same_tokenizer(copy, data))) return ERR_OK;
    if (there)
        log_warn("'%s' %s: the run's copy in '%s' is taken", c->data.tokenizer,
                 access(c->data.tokenizer, R_OK) ? "cannot be read" : "is not the run's tokenizer any more", copy);
    TRY(setup_strdup(&c->memory, copy, &kept));
    c->data.tokenizer = kept;
    return ERR_OK;
}

/* A run that is named has its checkpoints: what asks for another one is not passed over. */
static Err one_source(const char *run_dir, Words overrides)
{
    static const char *const keys[] = { "checkpoint.load=", "checkpoint.resume=" };
    for (int i = 0; i < overrides.count; i++)
        for (int k = 0; k < 2; k++)
            if (!strncmp(overrides.items[i], keys[k], strlen(keys[k])))
                return err_set(ERR_CONFIG, "--run '%s' and '%s' each name where the weights are", run_dir,
                               overrides.items[i]),
                       err_hint("give one of them: --run with --step N, or --config with %.*s",
                                (int)strlen(keys[k]) - 1, keys[k]);
    return ERR_OK;
}

Err config_of_run(Config *c, const char *run_dir, int64_t step, Words overrides, int64_t world_size)
{
    Source source = { 0 };
    TRY(one_source(run_dir, overrides));
    setup_init(&source.setup);
    Err err = find_meta(run_dir, step, &source);
    if (!err) err = config_of(c, &source, overrides, world_size);
    if (!err) err = find_tokenizer(c, run_dir, source.meta.data);
    setup_release(&source.setup);
    return err;
}

Err config_world(int64_t given, int64_t *out)
{
    Boot boot;
    *out = given;
    if (given) return ERR_OK;
    TRY(boot_from_env(&boot));
    *out = boot.size > 1 ? boot.size : CONFIG_ANY_WORLD;
    return ERR_OK;
}

/* The launchers of docs/ranks.md, "Launchers"; a batch job's size alone says nothing, a step's does. */
Err single_process(void)
{
    static const char *const names[] = { "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS" };
    for (int i = 0; i < 4; i++) {
        const char *text = getenv(names[i]);
        if (text && strtoll(text, NULL, 10) > 1)
            return err_set(ERR_CONFIG, "%s is '%s', and this command is a single process's", names[i], text),
                   err_hint("start it without a launcher");
        if (text) return ERR_OK;
    }
    return ERR_OK;
}
