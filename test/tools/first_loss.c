/*
 * Initial weights and first loss of a configuration, for a comparison with another program
 * (gpt2_first_loss.py): writes all weights in plain order and the tokens to a safetensors file, does one step on
 * those tokens, and prints one JSON object with the model's sizes and the step's loss.
 *
 *   first_loss OUT.safetensors CONFIG.ini [section.key=value ...]
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "ckpt/safetensors.h"
#include "train/spec.h"

typedef struct {
    TrainSpec spec;
    World world;
    Trainer t;
    int32_t *tokens; /* [global_batch][seq + 1] */
} FirstLoss;

static int64_t token_count(const TrainSpec *s)
{
    return s->global_batch * (s->model.seq + 1);
}

static Err get_tokens(void *user, int64_t first, int64_t count, int32_t *out)
{
    const FirstLoss *f = user;
    int64_t width = f->spec.model.seq + 1;
    memcpy(out, f->tokens + first * width, (size_t)(count * width) * sizeof *out);
    return ERR_OK;
}

static Err open_model(FirstLoss *f, const char *config, const char *const *overrides, int count)
{
    Config cfg;
    MemoryPlan plan;
    Err err = config_read(&cfg, (ConfigSource){ .path = config, .overrides = overrides, .override_count = count });
    if (!err) err = train_spec(&cfg, 0, &f->spec);
    config_release(&cfg);
    TRY(err);
    if (!f->spec.model.vocab) return err_set(ERR_CONFIG, "model.vocab is 0: give a number, no tokenizer is read here");
    TRY(trainer_plan(&f->spec, (Grid){ .tp = 1, .dp = 1 }, 0, &plan));
    TRY(world_open_self(&f->world));
    TRY(trainer_open(&f->t, &f->spec, &f->world, &plan));
    f->tokens = calloc((size_t)token_count(&f->spec), sizeof *f->tokens);
    if (!f->tokens) return err_set(ERR_MEMORY, "no memory for %lld tokens", (long long)token_count(&f->spec));
    for (int64_t i = 0; i < token_count(&f->spec); i++)
        f->tokens[i] = (int32_t)(rng_mix((uint64_t)i) % (uint64_t)f->spec.model.vocab);
    return ERR_OK;
}

static StTensor entry_of(const Param *p, int64_t offset)
{
    StTensor e = { .name = p->name, .dtype = "F32", .ndim = p->spec.ndim, .offset = offset };
    e.shape[0] = p->spec.shape[0];
    e.shape[1] = p->spec.shape[1];
    e.size_bytes = p->spec.shape[0] * p->spec.shape[1] * (int64_t)sizeof(float);
    return e;
}

static Err write_header(const FirstLoss *f, FILE *out)
{
    static char text[1 << 20];
    JsonOut j;
    int64_t at = 0;
    json_out_init(&j, text, sizeof text);
    st_header_begin(&j);
    for (int i = 0; i < f->t.stores[0].reg->count; i++) {
        StTensor e = entry_of(&f->t.stores[0].reg->items[i], at);
        st_header_tensor(&j, &e);
        at += e.size_bytes;
    }
    StTensor e = { "tokens", "I32", 2, { f->spec.global_batch, f->spec.model.seq + 1 }, at, 4 * token_count(&f->spec) };
    st_header_tensor(&j, &e);
    st_header_end(&j);
    if (!json_out_ok(&j)) return err_set(ERR_INTERNAL, "the header is too long");
    uint64_t length = (uint64_t)st_padded(j.used_bytes);
    fwrite(&length, sizeof length, 1, out);
    fprintf(out, "%-*s", (int)length, text);
    return ERR_OK;
}

/* Rows of a cut-free parameter in plain order: where in memory each lies is param_plain_row's business. */
static Err write_param(const Trainer *t, int i, FILE *out)
{
    const Param *p = &t->stores[0].reg->items[i];
    const float *w = param_store_value(&t->stores[0], i, 0).data;
    int64_t rows = p->spec.shape[0], columns = p->local[1], *row_of = calloc((size_t)rows, sizeof *row_of);
    if (!row_of) return err_set(ERR_MEMORY, "no memory for %lld rows", (long long)rows);
    for (int64_t r = 0; r < p->local[0]; r++)
        if (param_plain_row(p, r) >= 0) row_of[param_plain_row(p, r)] = r;
    for (int64_t r = 0; r < rows; r++) fwrite(w + row_of[r] * columns, sizeof *w, (size_t)columns, out);
    free(row_of);
    return ERR_OK;
}

static Err write_model(const FirstLoss *f, const char *path)
{
    FILE *out = fopen(path, "wb");
    if (!out) return err_set(ERR_IO, "'%s' cannot be written", path);
    Err err = write_header(f, out);
    for (int i = 0; !err && i < f->t.stores[0].reg->count; i++) err = write_param(&f->t, i, out);
    fwrite(f->tokens, sizeof *f->tokens, (size_t)token_count(&f->spec), out);
    bool bad = ferror(out);
    if (fclose(out) || bad) return err ? err : err_set(ERR_IO, "'%s' could not be written in full", path);
    return err;
}

/* A number for each block. */
static void put_pattern(const char *name, const LayerPattern *p, int layers)
{
    printf("\"%s\": ", name);
    for (int i = 0; i < layers; i++) printf("%s%lld", i ? ", " : "[", (long long)layer_pattern_at(p, i));
    printf("], ");
}

static Err report(FirstLoss *f)
{
    StepReport r;
    const ModelSpec *m = &f->spec.model;
    TRY(trainer_step(&f->t, (TokenSource){ f, get_tokens }, &r));
    printf("{\"loss\": %.12g, \"params\": %lld, \"layers\": %d, \"hidden\": %lld, \"heads\": %d, \"kv_heads\": %d, "
           "\"head_dim\": %d, \"ffn\": %lld, \"seq\": %lld, \"vocab\": %lld, ",
           r.loss, (long long)param_total(f->t.stores[0].reg), m->layers, (long long)m->hidden, m->heads, m->kv_heads,
           m->head_dim, (long long)m->ffn, (long long)m->seq, (long long)m->vocab);
    put_pattern("window", &m->window, m->layers);
    put_pattern("rope", &m->rope.layers, m->layers);
    const char *const word[] = { "false", "true" };
    printf("\"learned_positions\": %s, \"rms\": %s, \"bias\": %s, \"tied\": %s, \"qk_norm\": %s, "
           "\"swiglu\": %s, \"norm_eps\": %.9g, \"rope_base\": %.9g, \"init_std\": %.9g}\n",
           word[m->learned_positions], word[m->rms], word[m->bias], word[m->tied], word[m->qk_norm == QK_NORM_HEADS],
           word[m->activation == ACT_SWIGLU], m->norm_eps, m->rope.base, m->init_std);
    return ERR_OK;
}

int main(int argc, char **argv)
{
    FirstLoss f = { 0 };
    if (argc < 3) {
        fprintf(stderr, "usage: first_loss OUT.safetensors CONFIG.ini [section.key=value ...]\n");
        return err_exit_code(ERR_CONFIG);
    }
    Err err = open_model(&f, argv[2], (const char *const *)argv + 3, argc - 3);
    if (!err) err = write_model(&f, argv[1]);
    if (!err) err = report(&f);
    if (err) err_print(err, true);
    free(f.tokens);
    if (f.t.device.ops) trainer_close(&f.t);
    return err_exit_code(err);
}
