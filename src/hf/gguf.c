/* See gguf.h. The header is written twice: once to count its keys, once to the file. */
#include "hf/gguf.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/utf8.h"
#include "hf/gguf_tokens.h"
#include "model/model.h"

enum { ALIGNMENT = 32, VERSION = 3, Q8_BLOCK = 32 };
/* Limits of llama.cpp: it ends with an assertion where a file has more. */
enum { BLOCKS_MAX = 512, EXPERTS_MAX = 1024 };

/* Types of values, and of numbers of tensors, as the format numbers them. */
typedef enum { VALUE_U32 = 4, VALUE_I32, VALUE_F32, VALUE_BOOL, VALUE_TEXT, VALUE_ARRAY } ValueType;
static const uint32_t number_types[] = { [STORED_F32] = 0, [STORED_F16] = 1, [STORED_Q8_0] = 8, [STORED_BF16] = 30 };
static const uint32_t file_types[] = { [STORED_F32] = 0, [STORED_F16] = 1, [STORED_Q8_0] = 7, [STORED_BF16] = 32 };

typedef struct {
    const GgufJob *x;
    HfClass kind;
    const char *arch;
    TheirsList list;
    GgufTokens tokens;
    ChunkWriter file;
    ChunkWriter *w; /* NULL: nothing is written, keys are counted */
    int64_t bytes, keys;
    Err err;
    char chunk[CHUNK_BYTES];
} Gguf;

/* ---- values ---- */

static void put(Gguf *g, const void *data, int64_t size_bytes)
{
    g->bytes += size_bytes;
    if (g->w && !g->err) g->err = chunk_put(g->w, data, size_bytes);
}

static void put_u32(Gguf *g, uint32_t value) { put(g, &value, sizeof value); }
static void put_i64(Gguf *g, int64_t value) { put(g, &value, sizeof value); }

static void put_bytes(Gguf *g, const char *text, int64_t size_bytes)
{
    put_i64(g, size_bytes);
    put(g, text, size_bytes);
}

static void put_text(Gguf *g, const char *text) { put_bytes(g, text, (int64_t)strlen(text)); }

/* '*' at the start of a key stands for the class. */
static void put_key(Gguf *g, const char *key, ValueType type)
{
    char name[96];
    snprintf(name, sizeof name, "%s%s", *key == '*' ? g->arch : "", *key == '*' ? key + 1 : key);
    put_text(g, name);
    put_u32(g, type);
    g->keys++;
}

static void key_u32(Gguf *g, const char *key, int64_t value)
{
    put_key(g, key, VALUE_U32);
    put_u32(g, (uint32_t)value);
}

static void key_f32(Gguf *g, const char *key, double value)
{
    const float x = (float)value;
    put_key(g, key, VALUE_F32);
    put(g, &x, sizeof x);
}

static void key_bool(Gguf *g, const char *key, bool value)
{
    put_key(g, key, VALUE_BOOL);
    put(g, &(uint8_t){ value }, 1);
}

static void key_text(Gguf *g, const char *key, const char *value)
{
    put_key(g, key, VALUE_TEXT);
    put_text(g, value);
}

static void key_array(Gguf *g, const char *key, ValueType type, int64_t count)
{
    put_key(g, key, VALUE_ARRAY);
    put_u32(g, type);
    put_i64(g, count);
}

/* ---- keys ---- */

static void put_rope(Gguf *g)
{
    const RopeSpec *r = &g->x->model->rope;
    key_f32(g, "*.rope.freq_base", r->base);
    key_u32(g, "*.rope.dimension_count", g->x->model->head_dim);
    if (r->scaling == ROPE_LINEAR) {
        key_text(g, "*.rope.scaling.type", "linear");
        key_f32(g, "*.rope.scaling.factor", r->factor);
    }
    if (r->scaling == ROPE_YARN) {
        key_text(g, "*.rope.scaling.type", "yarn");
        key_f32(g, "*.rope.scaling.factor", r->factor);
        key_u32(g, "*.rope.scaling.original_context_length", (int64_t)r->original);
        key_f32(g, "*.rope.scaling.yarn_beta_fast", r->fast);
        key_f32(g, "*.rope.scaling.yarn_beta_slow", r->slow);
    }
}

static void put_model(Gguf *g)
{
    const ModelSpec *m = g->x->model;
    const bool mixture = m->moe.experts > 0;
    key_u32(g, "*.vocab_size", g->x->vocab);
    key_u32(g, "*.context_length", m->seq);
    key_u32(g, "*.embedding_length", m->hidden);
    key_u32(g, "*.block_count", m->layers);
    key_u32(g, "*.feed_forward_length", mixture && g->kind == HF_MIXTRAL ? m->moe.ffn : m->ffn);
    key_u32(g, "*.attention.head_count", m->heads);
    key_u32(g, "*.attention.head_count_kv", m->kv_heads);
    key_u32(g, "*.attention.key_length", m->head_dim);
    key_u32(g, "*.attention.value_length", m->head_dim);
    key_f32(g, "*.attention.layer_norm_rms_epsilon", m->norm_eps);
    put_rope(g);
    if (!mixture) return;
    key_u32(g, "*.expert_count", m->moe.experts);
    key_u32(g, "*.expert_used_count", m->moe.topk);
    key_u32(g, "*.expert_feed_forward_length", m->moe.ffn);
}

/*
 * The last part of the path, for people. False: there is none that can be written. llama.cpp lets tokens of a model
 * that is called Phi 3 or ModernBERT swallow the blanks beside them.
 */
static bool model_name(const char *path, char out[PATH_MAX])
{
    static const char *const meant[] = { "phi-3", "phi3", "modern-bert" };
    char whole[PATH_MAX], lower[PATH_MAX];
    if (!realpath(path, whole)) return false;
    const char *name = strrchr(whole, '/') + 1;
    for (size_t i = 0; i <= strlen(name); i++) lower[i] = (char)tolower((unsigned char)name[i]);
    for (size_t i = 0; i < sizeof meant / sizeof *meant; i++)
        if (strstr(lower, meant[i])) return false;
    strcpy(out, name);
    return *name && utf8_valid_bytes(name, (int64_t)strlen(name)) == (int64_t)strlen(name);
}

static void put_general(Gguf *g)
{
    char name[PATH_MAX];
    key_text(g, "general.architecture", g->arch);
    key_text(g, "general.type", "model");
    if (model_name(g->x->path, name)) key_text(g, "general.name", name);
    key_u32(g, "general.alignment", ALIGNMENT);
    key_u32(g, "general.file_type", file_types[g->x->stored]);
    key_u32(g, "general.quantization_version", 2);
}

/* ---- tokens ---- */

static void key_texts(Gguf *g, const char *key, const TokenText *texts, int64_t count)
{
    key_array(g, key, VALUE_TEXT, count);
    for (int64_t i = 0; i < count; i++) put_bytes(g, texts[i].bytes, texts[i].size);
}

static void put_tokens(Gguf *g)
{
    const GgufTokens *t = &g->tokens;
    const int64_t count = g->x->vocab;
    key_text(g, "tokenizer.ggml.model", t->model);
    if (!t->texts) return;
    if (t->pre) key_text(g, "tokenizer.ggml.pre", t->pre);
    key_texts(g, "tokenizer.ggml.tokens", t->texts, count);
    key_array(g, "tokenizer.ggml.token_type", VALUE_I32, count);
    put(g, t->types, count * (int64_t)sizeof *t->types);
    if (t->scores) {
        key_array(g, "tokenizer.ggml.scores", VALUE_F32, count);
        put(g, t->scores, count * (int64_t)sizeof *t->scores);
    }
    if (t->merges) key_texts(g, "tokenizer.ggml.merges", t->merges, t->merge_count);
    key_u32(g, "tokenizer.ggml.bos_token_id", t->bos);
    key_u32(g, "tokenizer.ggml.eos_token_id", t->eos);
    key_u32(g, "tokenizer.ggml.unknown_token_id", t->unknown);
    key_u32(g, "tokenizer.ggml.padding_token_id", t->padding);
    key_bool(g, "tokenizer.ggml.add_bos_token", t->add_bos);
    key_bool(g, "tokenizer.ggml.add_eos_token", t->add_eos);
    key_bool(g, "tokenizer.ggml.add_space_prefix", t->prefix);
}

/* ---- tensors ---- */

static int64_t padded(int64_t bytes) { return (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

/* Rows of whole blocks only; the others stay halves. */
static Stored stored(const void *user, const Param *p, const char *name, int64_t width)
{
    const Stored wanted = ((const GgufJob *)user)->stored;
    if (p->spec.ndim == 1 || strstr(name, "ffn_gate_inp.")) return STORED_F32;
    return wanted == STORED_Q8_0 && width % Q8_BLOCK ? STORED_F16 : wanted;
}

/* Writes divisors, by which pairs of columns turn less, as a tensor of its own: llama.cpp has no key for Llama 3's
 * scaling. */
static int64_t divisors(const Gguf *g)
{
    return g->x->model->rope.scaling == ROPE_LLAMA3 ? g->x->model->head_dim / 2 : 0;
}

static void put_tensor(Gguf *g, const char *name, int ndim, const int64_t *shape, uint32_t type, int64_t offset)
{
    put_text(g, name);
    put_u32(g, (uint32_t)ndim);
    for (int d = ndim - 1; d >= 0; d--) put_i64(g, shape[d]);
    put_u32(g, type);
    put_i64(g, offset);
}

static void put_infos(Gguf *g)
{
    int64_t offset = 0, count = divisors(g);
    if (count) put_tensor(g, "rope_freqs.weight", 1, &count, number_types[STORED_F32], offset);
    offset += padded(count * 4);
    for (int64_t i = 0; i < g->list.count; i++) {
        const Theirs *t = &g->list.items[i];
        const HfPart part = theirs_part(&g->list, t);
        put_tensor(g, part.name, part.ndim, part.shape, number_types[t->stored], offset);
        offset += padded(theirs_bytes(t));
    }
}

static void put_padding(Gguf *g)
{
    static const char zeros[ALIGNMENT];
    put(g, zeros, padded(g->bytes) - g->bytes);
}

static void put_header(Gguf *g, int64_t keys)
{
    g->bytes = g->keys = 0;
    put(g, "GGUF", 4);
    put_u32(g, VERSION);
    put_i64(g, g->list.count + (divisors(g) > 0));
    put_i64(g, keys);
    put_general(g);
    put_model(g);
    put_tokens(g);
    put_infos(g);
    put_padding(g);
}

static void put_divisors(Gguf *g)
{
    const ModelSpec *m = g->x->model;
    for (int64_t i = 0; i < divisors(g); i++) {
        const float x = (float)(1 / model_rope_share(&m->rope, m->head_dim, i));
        put(g, &x, sizeof x);
    }
    put_padding(g);
}

static Err put_all(Gguf *g)
{
    put_header(g, 0);
    g->w = &g->file;
    put_header(g, g->keys);
    put_divisors(g);
    for (int64_t i = 0; i < g->list.count && !g->err; i++) {
        g->err = theirs_put(&g->list, &g->list.items[i], &g->file);
        g->bytes += theirs_bytes(&g->list.items[i]);
        put_padding(g);
    }
    return g->err;
}

/* ---- what can be said ---- */

static Err check_rope(const RopeSpec *r, int head_dim)
{
    const double usual = 1 + 0.1 * log(r->factor);
    if (r->columns && r->columns != head_dim)
        return gguf_cannot("that only some columns of a head turn (model.rope_dim)");
    if (r->scaling == ROPE_YARN && !(fabs(r->magnitude - usual) <= 1e-6 * usual))
        return gguf_cannot("another model.rope_magnitude than 1 + 0.1 ln rope_factor");
    if (r->scaling == ROPE_YARN && !r->truncate) return gguf_cannot("model.rope_truncate = false");
    return ERR_OK;
}

static Err check(Gguf *g)
{
    const ModelSpec *m = g->x->model;
    TRY(hf_class_of(g->x->cfg, &g->kind));
    if (!hf_naming_gguf(g->kind, g->x->cfg, &g->list.spec.naming)) {
        err_set(ERR_CONFIG, "the model is a %s, of which no GGUF file is written", hf_class_names(g->kind)->model_type);
        return err_hint("write --format hf, which transformers and vLLM open; llama.cpp's converter takes that too");
    }
    TRY(check_rope(&m->rope, m->head_dim));
    if (layer_pattern_most(&m->window)) return gguf_cannot("windows of attention (model.window) of this class");
    if (m->layers > BLOCKS_MAX) return gguf_cannot("a model of more than 512 blocks (model.layers)");
    if (m->moe.experts > EXPERTS_MAX) return gguf_cannot("a mixture of more than 1024 experts (moe.experts)");
    if ((g->kind == HF_QWEN3 || g->kind == HF_QWEN3_MOE) && (model_qkv_bias(m) || model_proj_bias(m)))
        return gguf_cannot("biases of this class's attention (model.attention_bias)");
    if (g->kind == HF_QWEN2 && (int64_t)m->heads * m->head_dim != m->hidden)
        return gguf_cannot("heads of another width than hidden / heads of this class (model.head_dim)");
    for (int i = 0; m->moe.experts && i < m->layers; i++)
        if (!model_is_mixture(m, i)) return gguf_cannot("that some blocks of a mixture are dense (moe.every)");
    if (g->kind == HF_QWEN3_MOE && m->moe.router.score == ROUTER_SOFTMAX_PRE && !m->moe.router.normalize)
        return gguf_cannot("that the weights of chosen experts do not add up to 1 (moe.normalize)");
    return ERR_OK;
}

/* ---- the whole ---- */

static Err write_file(Gguf *g, SetupArena *a)
{
    char temp[PATH_MAX];
    g->file = (ChunkWriter){ .buf = g->chunk };
    TRY(theirs_start(&g->list, 0, a));
    file_sweep_beside(g->x->to);
    TRY_AS(ERR_STORAGE, file_create_beside(g->x->to, &g->file.file));
    strcpy(temp, g->file.file.path);
    Err err = put_all(g);
    if (!err) err = chunk_sync_close(&g->file);
    if (!err) return err_as(file_take_place(temp, g->x->to), ERR_STORAGE);
    chunk_abandon(&g->file);
    unlink(temp); /* (which a file that failed when it was closed no longer knows) */
    return err == ERR_IO ? err_as(err, ERR_STORAGE) : err;
}

static Err write_all(Gguf *g, SetupArena *a)
{
    const GgufJob *x = g->x;
    TRY(check(g));
    TRY(gguf_tokens(x->tokenizer, x->vocab, a, &g->tokens));
    TRY(file_check_replaces(x->to, "GGUF"));
    static const char *const archs[HF_CLASSES] = {
        [HF_LLAMA] = "llama", [HF_MISTRAL] = "llama", [HF_MIXTRAL] = "llama",
        [HF_QWEN2] = "qwen2", [HF_QWEN3] = "qwen3",   [HF_QWEN3_MOE] = "qwen3moe"
    };
    g->arch = archs[g->kind];
    const TheirsSpec spec = { .from = x->from,
                              .whole = x->whole,
                              .naming = g->list.spec.naming,
                              .stored = stored,
                              .user = x,
                              .threads = x->threads };
    TRY(theirs_open(&spec, a, &g->list));
    return write_file(g, a);
}

Err gguf_write(const GgufJob *x)
{
    SetupArena a;
    Gguf *g = calloc(1, sizeof *g);
    if (!g) return err_set(ERR_MEMORY, "no memory for a GGUF file");
    g->x = x;
    setup_init(&a);
    const Err err = write_all(g, &a);
    theirs_close(&g->list);
    setup_release(&a);
    free(g);
    return err;
}
