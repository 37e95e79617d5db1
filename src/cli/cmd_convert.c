/*
 * convert: a folder of Hugging Face's becomes a run folder with one checkpoint, or a checkpoint becomes such a folder
 * or a GGUF file. The configuration goes along, and so do the tokenizer's files.
 */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/heap.h"
#include "base/identity.h"
#include "base/log.h"
#include "base/processors.h"
#include "ckpt/values.h"
#include "cli/command.h"
#include "cli/end_ids.h"
#include "cli/memory_arg.h"
#include "hf/convert.h"
#include "hf/folder.h"
#include "hf/gguf.h"
#include "hf/weights.h"
#include "train/kept.h"
#include "train/spec.h"

static const char *from_path, *to_path, *format, *dtype, *shard_size = "5GB";
static int64_t threads;

static const Option options[] = {
    { "from", OPTION_TEXT, &from_path, .required = true, .value = "PATH",
      .help = "a Hugging Face folder; a run, or a checkpoint's folder" },
    { "to", OPTION_TEXT, &to_path, .required = true, .value = "PATH",
      .help = "a folder that is not there; of gguf a file" },
    { "format", OPTION_TEXT, &format, .required = true, .value = "hf|gguf|megatrain", .help = "what to write" },
    { "dtype", OPTION_TEXT, &dtype, .value = "f32|bf16|f16|q8_0",
      .help = "of the weights that are written; f32: exactly ours; q8_0: gguf alone" },
    { "max-shard-size", OPTION_TEXT, &shard_size, .value = "5GB", .help = "of each of hf's files" },
    { "threads", OPTION_INT, &threads, .low = 1, .high = 256, .value = "N",
      .help = "none: as many as there are processors" },
};

/* A model as one rank would have it. */
typedef struct {
    SetupArena setup;
    Config cfg;
    TrainSpec spec;
    Stage stage;
    ParamRegistry whole;
} Model;

static Err model_open(Model *m, ConfigSource source, int64_t vocab)
{
    TRY(config_read(&m->cfg, source));
    TRY(train_spec(&m->cfg, vocab, &m->spec));
    const StageShare all = stage_whole(&m->spec.model);
    param_registry_init(&m->whole, &m->setup, param_place_single());
    TRY(stages_register(&m->stage, &all, 1, &m->whole, &m->spec.model, &m->setup));
    return param_layout(&m->whole, INT64_MAX);
}

static void model_init(Model *m)
{
    *m = (Model){ 0 };
    setup_init(&m->setup);
}

static void model_close(Model *m)
{
    config_release(&m->cfg);
    setup_release(&m->setup);
}

static int thread_count(void) { return threads ? (int)threads : processors_share(1, 1); }

static bool holds(const char *folder, const char *name, char path[PATH_MAX])
{
    return snprintf(path, PATH_MAX, "%s/%s", folder, name) < PATH_MAX && file_exists(path);
}

/* ---- in ---- */

/* The folder's tokenizer, if it has one that is understood. */
static Err find_tokenizer(const char *folder, char spec[PATH_MAX], uint32_t *crc, int64_t *size, bool *found)
{
    Tokenizer *t;
    char path[PATH_MAX];
    *found = false;
    for (int i = 0; kept_tokenizer_files[i]; i++)
        if (holds(folder, kept_tokenizer_files[i], path)) TRY(hf_folder_check_link(folder, path));
    if (holds(folder, "tokenizer.json", spec)) {
    } else if (holds(folder, "vocab.json", path) && holds(folder, "merges.txt", path)) {
        snprintf(spec, PATH_MAX, "%s", folder);
    } else {
        log_warn("'%s' has no tokenizer.json: data.tokenizer is yours to give", folder);
        return ERR_OK;
    }
    const Err err = tokenizer_open(spec, &t);
    if (err == ERR_MEMORY) return err;
    if (err) {
        log_warn("the tokenizer is left out, data.tokenizer is yours to give: %s", err_message());
        return ERR_OK;
    }
    *crc = tokenizer_crc(t);
    *size = tokenizer_vocab(t);
    *found = true;
    tokenizer_close(t);
    return ERR_OK;
}

static Err config_text(const Config *cfg, SetupArena *a, char **out)
{
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    if (!f) return err_set(ERR_MEMORY, "no memory for the configuration");
    config_dump(cfg, f, false);
    const Err err = fclose(f) ? err_set(ERR_MEMORY, "no memory for the configuration") : setup_strdup(a, text, out);
    free(text);
    return err;
}

/* The configuration of a folder, with the tokenizer that was found. */
static Err open_theirs(Model *m, const HfConfig *hf, const char *spec)
{
    char key[PATH_MAX + 32];
    const char *overrides[2] = { "run.device=cpu" };
    ConfigSource source = { .path = "config.json",
                            .text = hf->ini,
                            .overrides = overrides,
                            .override_count = 1,
                            .world_size = CONFIG_ANY_WORLD };
    snprintf(key, sizeof key, "data.tokenizer=%s", spec);
    if (*spec) overrides[source.override_count++] = key;
    return model_open(m, source, 0);
}

/* The tokenizer, with ids that end a text beside it, or without a tokenizer these alone. */
static Err keep(void *user, const char *run_dir)
{
    const char *spec = user;
    char copy[PATH_MAX];
    if (!*spec) return end_ids_keep(from_path, run_dir);
    TRY_AS(ERR_STORAGE, kept_tokenizer(run_dir, spec));
    return kept_find_tokenizer(run_dir, copy) ? end_ids_keep(from_path, copy) : ERR_OK;
}

static Err import(Model *m)
{
    char spec[PATH_MAX] = "", data[64] = "", *text;
    uint32_t crc = 0;
    int64_t size = 0;
    bool found;
    HfConfig hf;
    TRY(hf_config_read(from_path, &m->setup, &hf));
    TRY(find_tokenizer(from_path, spec, &crc, &size, &found));
    if (!found) *spec = 0;
    TRY(open_theirs(m, &hf, spec));
    if (size > m->cfg.model.vocab)
        log_warn("the tokenizer has %lld tokens, the model %lld: a run refuses it, so data.tokenizer is "
                 "yours to give",
                 (long long)size, (long long)m->cfg.model.vocab);
    TRY(config_text(&m->cfg, &m->setup, &text));
    if (found) snprintf(data, sizeof data, "train 00000000, tokenizer %08x", crc);
    const CkptMeta meta = { .seed = m->cfg.run.seed,
                            .tp_blocks = m->spec.model.tp_blocks,
                            .seq_blocks = m->spec.seq_blocks,
                            .attn_block = m->spec.attn_block,
                            .reproducible = m->spec.exact ? "layout" : "run",
                            .program = identity_program(),
                            .config = text,
                            .data = data,
                            .overrides = "" };
    TRY(hf_import(&(HfImport){ .from = from_path,
                               .run_dir = to_path,
                               .hf = &hf,
                               .cfg = &m->cfg,
                               .whole = &m->whole,
                               .meta = &meta,
                               .keep = keep,
                               .user = spec,
                               .threads = thread_count() }));
    return ERR_OK;
}

/* ---- out ---- */

enum { COPIES_MOST = 16 };

/* The tokenizer's files, and what transformers keeps beside them. */
static int find_copies(const char *tokenizer, HfCopy out[COPIES_MOST])
{
    int count = 0;
    for (int i = 0; kept_tokenizer_files[i]; i++) {
        ASSERT(count < COPIES_MOST);
        out[count].name = kept_tokenizer_files[i];
        count += kept_tokenizer_path(tokenizer, out[count].name, out[count].path);
    }
    return count;
}

static Err find_checkpoint(const char *from, char path[PATH_MAX])
{
    char manifest[PATH_MAX];
    bool found;
    if (holds(from, "manifest.json", manifest)) {
        snprintf(path, PATH_MAX, "%s", from);
        return ERR_OK;
    }
    TRY(ckpt_find(from, INT64_MAX, path, &found));
    return found ? ERR_OK : err_set(ERR_CKPT, "no checkpoint in '%s'", from);
}

static Err read_dtype(bool gguf, Stored *out)
{
    static const char *const words[] = {
        [STORED_F32] = "f32", [STORED_BF16] = "bf16", [STORED_F16] = "f16", [STORED_Q8_0] = "q8_0"
    };
    *out = STORED_F32;
    for (int i = 0; dtype && i < (gguf ? 4 : 3); i++)
        if (!strcmp(words[i], dtype)) return *out = (Stored)i, ERR_OK;
    if (!dtype) return ERR_OK;
    return err_set(ERR_CONFIG, "--dtype '%s' is none of f32, bf16%s", dtype, gguf ? ", f16 and q8_0" : " and f16");
}

/* A checkpoint that is to be written in another form, with the run's copy of its tokenizer, else what its configuration
 * names. */
typedef struct {
    char path[PATH_MAX], tokenizer_spec[PATH_MAX];
    const char *data; /* what the checkpoint says of what it was trained on */
    int64_t vocab;
    Tokenizer *tokenizer; /* NULL: none that is understood */
} Source;

static Err open_tokenizer(const Model *m, Source *out)
{
    char run[PATH_MAX + 32];
    /* (a checkpoint that was copied elsewhere has no run around it) */
    snprintf(run, sizeof run, "%s/../../checkpoints", out->path);
    const bool in_run = file_is_dir(run);
    snprintf(run, sizeof run, "%s/../..", out->path);
    if (!in_run || !kept_find_tokenizer(run, out->tokenizer_spec))
        snprintf(out->tokenizer_spec, sizeof out->tokenizer_spec, "%s", m->cfg.data.tokenizer);
    const Err err = tokenizer_open(out->tokenizer_spec, &out->tokenizer);
    if (err == ERR_MEMORY) return err;
    if (err) log_warn("no tokenizer is written: %s", err_message());
    return ERR_OK;
}

static Err open_ours(Model *m, Source *out)
{
    int64_t shape[2];
    CkptMeta meta;
    TRY(find_checkpoint(from_path, out->path));
    TRY(ckpt_meta(out->path, &m->setup, &meta));
    TRY(ckpt_tensor_shape(out->path, "embedding.token.weight", shape));
    const ConfigSource source = { .path = "the checkpoint's configuration",
                                  .text = meta.config,
                                  .earlier = true,
                                  .compared = true,
                                  .world_size = CONFIG_ANY_WORLD };
    TRY_AS(ERR_CKPT, model_open(m, source, shape[0]));
    out->vocab = shape[0];
    out->data = meta.data ? meta.data : "";
    return open_tokenizer(m, out);
}

/* Does the checkpoint speak of a tokenizer? */
static bool is_trained(const Source *from) { return strstr(from->data, ", tokenizer "); }

/* Is it the one that the checkpoint speaks of? Where it speaks of none, `byte` is only what data.tokenizer is when
 * nobody gives it. */
static bool is_trained_with(const Source *from)
{
    char said[32];
    snprintf(said, sizeof said, ", tokenizer %08x", tokenizer_crc(from->tokenizer));
    if (is_trained(from)) return strstr(from->data, said);
    return strcmp(from->tokenizer_spec, "byte") != 0;
}

/* Do a vocabulary and merges lie apart? */
static bool is_apart(const Source *from)
{
    char path[PATH_MAX];
    return file_is_dir(from->tokenizer_spec) && !kept_tokenizer_path(from->tokenizer_spec, "tokenizer.json", path);
}

/* The text of the token that ends a document, where tokenizer.json has one; NULL: it has none, or a longer one. */
static const char *end_text(const Source *from, char *out, size_t out_bytes)
{
    char path[PATH_MAX];
    const int32_t id = tokenizer_eod(from->tokenizer);
    int32_t size = 0;
    if (id < 0 || (!is_apart(from) && !kept_tokenizer_path(from->tokenizer_spec, "tokenizer.json", path))) return NULL;
    const char *bytes = tokenizer_bytes(from->tokenizer, id, false, &size);
    if (!bytes || (size_t)size >= out_bytes || memchr(bytes, 0, (size_t)size)) return NULL;
    snprintf(out, out_bytes, "%.*s", (int)size, bytes);
    return out;
}

/* What transformers' AutoTokenizer makes other ids of, without a word of its own (docs/huggingface.md). */
static Err warn_of_readers(const Model *m, const Source *from)
{
    char path[PATH_MAX];
    HfClass kind;
    TRY(hf_class_of(&m->cfg, &kind));
    if (kind == HF_QWEN2 && !kept_tokenizer_path(from->tokenizer_spec, "tokenizer_config.json", path))
        log_warn("AutoTokenizer takes Qwen's own pattern for a model of class qwen2: open the folder with "
                 "PreTrainedTokenizerFast");
    return ERR_OK;
}

static Err refuse_tokenizer(const Source *from)
{
    err_set(ERR_CKPT, "the checkpoint was not trained with the tokenizer '%s': '%s', and that is tokenizer %08x",
            from->tokenizer_spec, from->data, tokenizer_crc(from->tokenizer));
    return err_hint("convert it inside its run's folder, which keeps a copy of its tokenizer");
}

/* Files that go into the folder beside the weights. */
typedef struct {
    HfCopy copies[COPIES_MOST + 1];
    int count;
    char end[256];
} Beside;

/* The tokenizer's files, if it has any. */
static Err take_tokenizer(const Model *m, const Source *from, Beside *b, HfExport *about)
{
    if (!from->tokenizer) return ERR_OK;
    if (!strcmp(from->tokenizer_spec, "byte")) {
        log_warn("no tokenizer is written: %s", is_trained(from)
                                                    ? "with `byte` ids 0 to 255 are bytes, and 256 ends a document"
                                                    : "the checkpoint speaks of none");
        return ERR_OK;
    }
    if (!is_trained_with(from)) return refuse_tokenizer(from);
    if (tokenizer_vocab(from->tokenizer) > from->vocab)
        log_warn("the tokenizer has %d tokens, the model %lld", tokenizer_vocab(from->tokenizer),
                 (long long)from->vocab);
    b->count = find_copies(from->tokenizer_spec, b->copies);
    about->end = end_text(from, b->end, sizeof b->end);
    about->ids.ends[0] = tokenizer_eod(from->tokenizer);
    about->ids.end_count = about->ids.ends[0] >= 0;
    return warn_of_readers(m, from);
}

/* Ids that end a text, where a generation_config.json says them: it goes along, and config.json says the same. */
static Err take_ids(const Source *from, Beside *b, HfExport *about)
{
    static const char name[] = "generation_config.json";
    HfCopy *last = &b->copies[b->count];
    HfIds said;
    TRY(end_ids_of(from->path, from->data, from->tokenizer_spec, last->path, &said));
    if (!*last->path) return ERR_OK;
    if (said.end_count) about->ids = said;
    last->name = name;
    for (int i = 0; i < b->count; i++)
        if (!strcmp(b->copies[i].name, name)) return ERR_OK; /* it lies beside the tokenizer */
    b->count++;
    return ERR_OK;
}

static Err write_hf(const Model *m, const Source *from, Stored stored)
{
    static const char *const dtypes[] = {
        [STORED_F32] = "float32", [STORED_BF16] = "bfloat16", [STORED_F16] = "float16"
    };
    int64_t shard_bytes;
    ON_HEAP(Beside, beside, 1);
    HfExport about = { .dtype = dtypes[stored], .vocab = from->vocab, .ids = HF_NO_IDS };
    TRY(memory_arg("max-shard-size", shard_size, &shard_bytes));
    TRY(take_tokenizer(m, from, beside, &about));
    TRY(take_ids(from, beside, &about));
    return hf_export(&(HfExportJob){ .from = from->path,
                                     .to = to_path,
                                     .cfg = &m->cfg,
                                     .whole = &m->whole,
                                     .about = about,
                                     .shard_bytes = shard_bytes,
                                     .copies = beside->copies,
                                     .copy_count = beside->count,
                                     .apart = from->tokenizer && is_apart(from) ? from->tokenizer : NULL,
                                     .apart_in = from->tokenizer_spec,
                                     .threads = thread_count() });
}

static Err write_gguf(const Model *m, const Source *from, Stored stored)
{
    const bool known = from->tokenizer && is_trained_with(from);
    if (from->tokenizer && !known)
        log_warn("no tokenizer is written: the checkpoint does not say that it was trained with '%s'",
                 from->tokenizer_spec);
    return gguf_write(&(GgufJob){ .from = from->path,
                                  .to = to_path,
                                  .path = from_path,
                                  .cfg = &m->cfg,
                                  .model = &m->spec.model,
                                  .whole = &m->whole,
                                  .tokenizer = known ? from->tokenizer : NULL,
                                  .vocab = from->vocab,
                                  .stored = stored,
                                  .threads = thread_count() });
}

static Err export(Model *m)
{
    Stored stored;
    Source from = { .tokenizer = NULL };
    const bool gguf = !strcmp(format, "gguf");
    TRY(read_dtype(gguf, &stored));
    Err err = open_ours(m, &from);
    if (!err) err = gguf ? write_gguf(m, &from, stored) : write_hf(m, &from, stored);
    tokenizer_close(from.tokenizer);
    return err;
}

static Err convert(Words rest)
{
    ON_HEAP(Model, m, 1);
    char path[PATH_MAX];
    (void)rest;
    const bool out = strcmp(format, "megatrain") != 0;
    if (out && strcmp(format, "hf") != 0 && strcmp(format, "gguf") != 0)
        return err_set(ERR_CONFIG, "--format '%s' is none of hf, gguf and megatrain", format);
    if (!file_is_dir(from_path)) return err_set(ERR_CKPT, "there is no folder '%s'", from_path);
    const bool theirs = hf_folder_is(from_path);
    if (theirs && !strcmp(format, "gguf"))
        return err_set(ERR_CONFIG, "'%s' is Hugging Face's: first make it --format megatrain", from_path);
    if (!out && !theirs && !holds(from_path, "checkpoints", path) && !holds(from_path, "manifest.json", path))
        return hf_folder_hint_cache(from_path, err_set(ERR_CKPT, "'%s' holds no model", from_path));
    if (out == theirs)
        return err_set(ERR_CONFIG, "'%s' is %s already", from_path, out ? "Hugging Face's" : "megatrain's");
    model_init(m);
    const Err err = out ? export(m) : import(m);
    model_close(m);
    if (!err) log_info("%s from %s", to_path, from_path);
    return err;
}

const Command command_convert = {
    .name = "convert",
    .summary = "Hugging Face models in and out",
    .text = "  in    megatrain convert --from FOLDER --to RUN --format megatrain\n"
            "  out   megatrain convert --from RUN --to FOLDER --format hf\n"
            "        megatrain convert --from RUN --to FILE.gguf --format gguf --dtype q8_0\n"
            "A job that was interrupted leaves nothing that could be taken for whole: start it again.\n",
    OPTIONS(options),
    .run = convert,
};
