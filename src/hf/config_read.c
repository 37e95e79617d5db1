/* A config.json as an HfModel: each key by its row of the table, or refused. See class.h, model.h. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/log.h"
#include "base/plain.h"
#include "base/words.h"
#include "hf/folder.h"
#include "hf/model.h"
#include "hf/tensors.h"

enum { VALUE_BYTES = 64, IGNORED_BYTES = 4096, MEMBERS = sizeof(HfModel) / 8 };

typedef struct {
    const char *name;   /* of the file, for messages */
    const char *folder; /* where it lies; NULL: it is a text */
    HfClass class;
    HfModel model;
    HfConfig *out;
    int unknown;                 /* keys that nobody knows, of which the first is the message's */
    char unknown_names[256];     /* the others */
    ErrKept unknown_error;       /* that message */
    char ignored[IGNORED_BYTES]; /* keys that change nothing */
    const char *by[MEMBERS];     /* the key that a member has its value from */
} Reader;

/* ---- messages ---- */

/* A name or a word of the file, fit for a line. */
static void word_text(const char *word, char out[VALUE_BYTES])
{
    text_cut(out, VALUE_BYTES - 2, word);
    plain_make(out, PLAIN_LINE);
}

/* A value in a line: a number, a word, or what kind of thing it is. */
static void value_text(const Json *v, char out[VALUE_BYTES])
{
    const char *text = json_text(v, NULL);
    char word[VALUE_BYTES];
    if (text) word_text(text, word);
    if (text) snprintf(out, VALUE_BYTES, "'%.*s'", VALUE_BYTES - 3, word);
    else if (json_is_int(v)) snprintf(out, VALUE_BYTES, "%lld", (long long)json_int(v, 0));
    else if (json_is_number(v)) snprintf(out, VALUE_BYTES, "%.15g", json_number(v, 0));
    else if (json_is_array(v)) snprintf(out, VALUE_BYTES, "[...]");
    else if (json_is_object(v)) snprintf(out, VALUE_BYTES, json_count(v) ? "{...}" : "{}");
    else snprintf(out, VALUE_BYTES, "%s", json_is_null(v) ? "null" : json_is_true(v) ? "true" : "false");
}

static Err damaged(const Reader *r, const HfKey *k, const Json *v, const char *want)
{
    char text[VALUE_BYTES];
    value_text(v, text);
    return err_set(ERR_CKPT, "%s: '%s' is %s, and should be %s: %s", r->name, k->name, text, want, k->meaning);
}

static Err refused(const Reader *r, const char *key, const Json *v, const char *meaning, const char *why)
{
    char text[VALUE_BYTES], name[VALUE_BYTES];
    value_text(v, text);
    word_text(key, name);
    return err_set(ERR_CONFIG, "%s: '%s' is %s (%s): %s", r->name, name, text, meaning, why);
}

/* ---- values ---- */

static Err take_int(const Reader *r, const HfKey *k, const Json *v, int64_t *out)
{
    enum { MOST = INT32_MAX };
    const int64_t n = json_int(v, -1);
    if (!json_is_int(v) || n < k->low || n > MOST)
        return damaged(r, k, v,
                       n > MOST ? "at most 2147483647"
                       : k->low ? "an integer above 0"
                                : "an integer of 0 or more");
    *out = n;
    return ERR_OK;
}

static Err take_real(const Reader *r, const HfKey *k, const Json *v, double *out)
{
    const double x = json_number(v, -1);
    if (!json_is_number(v) || !(x >= 0 && x <= 1e15)) return damaged(r, k, v, "a number of 0 or more");
    *out = x;
    return ERR_OK;
}

static Err take_flag(const Reader *r, const HfKey *k, const Json *v, int64_t *out)
{
    if (!json_is_true(v) && (json_is_number(v) || json_text(v, NULL) || json_is_object(v) || json_is_array(v)))
        return damaged(r, k, v, "true or false");
    *out = json_is_true(v);
    return ERR_OK;
}

static Err take_word(const Reader *r, const HfKey *k, const Json *v, int64_t *out)
{
    const char *text = json_text(v, NULL);
    if (!text) return damaged(r, k, v, "a word");
    *out = hf_word(k->values, text);
    return *out >= 0 ? ERR_OK : refused(r, k->name, v, k->meaning, "megatrain has no such thing");
}

static void add_layer(LayerSet *s, int64_t layer) { s->word[layer / 64] |= UINT64_C(1) << layer % 64; }

/* layer_types and mlp_layer_types: the blocks that have the second word. */
static Err take_words(Reader *r, const HfKey *k, const Json *v, int64_t *out)
{
    const bool types = k->kind == HF_KEY_TYPES;
    const HfClassRow *row = &hf_classes[r->class];
    const bool three = types && row->hybrid && row->windows;
    const char *words = !types        ? "sparse dense"
                        : three       ? "full_attention sliding_attention linear_attention"
                        : row->hybrid ? "full_attention linear_attention attention mamba"
                                      : "full_attention sliding_attention";
    LayerSet *second = types ? &r->model.sliding : &r->model.dense;
    if (!json_is_array(v) || json_count(v) > LAYERS_MAX) return damaged(r, k, v, "a list of words, one for each block");
    *second = (LayerSet){ { 0 } };
    for (int64_t i = 0; i < json_count(v); i++) {
        const Json *item = json_at(v, i);
        const char *text = json_text(item, NULL);
        if (!text) return damaged(r, k, v, "a list of words, one for each block");
        const int word = hf_word(words, text);
        if (word < 0)
            return refused(r, k->name, item, k->meaning,
                           types ? "megatrain has no such attention in this class"
                                 : "megatrain has no such layer in this class");
        if (word % 2) add_layer(second, i); /* (attention, mamba: of earlier releases) */
        if (three && word < 2) add_layer(&r->model.attending, i);
    }
    *out = json_count(v);
    return ERR_OK;
}

static Err take_blocks(Reader *r, const HfKey *k, const Json *v, int64_t *out)
{
    static const char letters[] = "M*-E", words[] = "linear_attention full_attention mlp moe mamba attention";
    const char *text = json_text(v, NULL);
    const int64_t count = text ? (int64_t)strlen(text) : json_count(v);
    LayerSet sets[4] = { { { 0 } } };
    if ((!text && !json_is_array(v)) || count < 1 || count > LAYERS_MAX)
        return damaged(r, k, v, "a list of words, or letters, one for each block");
    for (int64_t i = 0; i < count; i++) {
        const Json *item = text ? v : json_at(v, i);
        const char *letter = text ? strchr(letters, text[i]) : NULL, *word = json_text(item, NULL);
        const int kind = text ? (letter ? (int)(letter - letters) : -1) : word ? hf_word(words, word) : -1;
        if (kind < 0) return refused(r, k->name, item, k->meaning, "megatrain has no such layer in this class");
        add_layer(&sets[kind % 4], i); /* (mamba, attention: of earlier releases) */
    }
    if (r->by[k->offset / 8] && (*out != count || memcmp(&sets[0], &r->model.sliding, sizeof *sets) != 0 ||
                                 memcmp(&sets[1], &r->model.attending, sizeof *sets) != 0))
        return err_set(ERR_CKPT, "%s: 'layers_block_type' and 'hybrid_override_pattern' differ", r->name);
    r->by[k->offset / 8] = k->name;
    r->model.sliding = sets[0], r->model.attending = sets[1], r->model.dense = sets[2];
    *out = count;
    return ERR_OK;
}

static Err take_turns(Reader *r, const HfKey *k, const Json *v, int64_t *out)
{
    if (!json_is_array(v) || json_count(v) > LAYERS_MAX)
        return damaged(r, k, v, "a list of 0 and 1, one for each block");
    r->model.turning = (LayerSet){ { 0 } };
    for (int64_t i = 0; i < json_count(v); i++) {
        const int64_t turns = json_int(json_at(v, i), -1);
        if (turns != 0 && turns != 1) return damaged(r, k, v, "a list of 0 and 1, one for each block");
        if (turns) add_layer(&r->model.turning, i);
    }
    *out = json_count(v);
    return ERR_OK;
}

/* A base for each block, of which all that are not 0 are one. */
static Err take_bases(Reader *r, const HfKey *k, const Json *v, int64_t *out)
{
    HfModel *m = &r->model;
    if (!json_is_array(v) || json_count(v) > LAYERS_MAX)
        return damaged(r, k, v, "a list of numbers, one for each block");
    m->turning = (LayerSet){ { 0 } };
    m->bases.one = 0;
    for (int64_t i = 0; i < json_count(v); i++) {
        const double base = json_number(json_at(v, i), -1);
        if (!(base >= 0)) return damaged(r, k, v, "a list of numbers, one for each block");
        if (!(base > 0)) continue;
        if (m->bases.one > 0 && m->bases.one != base)
            return refused(r, k->name, json_at(v, i), k->meaning, "megatrain reads one base, and 0");
        m->bases.one = base;
        add_layer(&m->turning, i);
    }
    *out = json_count(v);
    return ERR_OK;
}

/* A number, or in letters: L for each block with a window, and G at the end. */
static Err take_pattern(const Reader *r, const HfKey *k, const Json *v, int64_t *out)
{
    const char *text = json_text(v, NULL);
    if (!text) return take_int(r, k, v, out);
    *out = (int64_t)strlen(text);
    if (*out < 1 || (int64_t)strspn(text, "L") != *out - 1 || text[*out - 1] != 'G')
        return refused(r, k->name, v, k->meaning, "megatrain reads a number, or letters L with one G behind them");
    return ERR_OK;
}

static Err take_auto(const Reader *r, const HfKey *k, const Json *v, int64_t *out)
{
    const char *text = json_text(v, NULL);
    if (!text || strcmp(text, "auto") != 0) return take_int(r, k, v, out);
    *out = HF_NONE;
    return ERR_OK;
}

/* The second is infinite: a word of Python's (json_parse_python), or an object of transformers'. */
static Err take_limits(const Reader *r, const HfKey *k, const Json *v, double *out)
{
    const Json *last = json_at(v, 1);
    const char *most = json_text(json_is_string(last) ? last : json_get(last, "__float__"), NULL);
    if (!json_is_array(v) || json_count(v) != 2) return damaged(r, k, v, "a list of two numbers");
    if (!most || strcmp(most, "Infinity") != 0)
        return refused(r, k->name, v, k->meaning, "megatrain bounds them from below alone");
    return take_real(r, k, json_at(v, 0), out);
}

static Err take_layers(const Reader *r, const HfKey *k, const Json *v, LayerSet *out)
{
    if (!json_is_array(v)) return damaged(r, k, v, "a list of blocks");
    *out = (LayerSet){ { 0 } };
    for (int64_t i = 0; i < json_count(v); i++) {
        const int64_t layer = json_int(json_at(v, i), -1) - k->low;
        if (layer < 0 || layer >= LAYERS_MAX)
            return damaged(r, k, v, k->low ? "a list of blocks, counted from 1" : "a list of blocks, counted from 0");
        add_layer(out, layer);
    }
    return ERR_OK;
}

static Err take_fixed(const Reader *r, const HfKey *k, const Json *v)
{
    char value[VALUE_BYTES], why[128];
    const char *text = json_text(v, NULL);
    if (!text) value_text(v, value);
    if (hf_word(k->values, text ? text : value) >= 0) return ERR_OK;
    snprintf(why, sizeof why, *k->values ? "with megatrain it can only be %s" : "megatrain has none",
             k->values); /* NOLINT */
    return refused(r, k->name, v, k->meaning, why);
}

/* How a folder stores its weights: the same model, read in another way. */
static Err take_store(Reader *r, const HfKey *k, const Json *v)
{
    const char *method = json_text(json_get(v, "quant_method"), NULL);
    const Json *block = json_get(v, "weight_block_size"), *format = json_get(v, "fmt");
    if (!json_is_object(v) || !method) return damaged(r, k, v, "an object with 'quant_method'");
    if (!strcmp(method, "mxfp4") && r->class == HF_GPT_OSS) {
        r->out->store = HF_STORE_MXFP4;
        return ERR_OK;
    }
    if (strcmp(method, "fp8") != 0)
        return refused(r, "quant_method", json_get(v, "quant_method"), k->meaning,
                       "of this class megatrain reads weights as they are, or in blocks of fp8");
    if (format && (!json_text(format, NULL) || hf_word("e4m3 float8_e4m3fn", json_text(format, NULL)) < 0))
        return refused(r, "fmt", format, "the numbers of fp8", "megatrain reads e4m3");
    r->out->block_rows = json_int(json_at(block, 0), 0);
    r->out->block_cols = json_int(json_at(block, 1), 0);
    if (json_count(block) != 2 || r->out->block_rows < 1 || r->out->block_cols < 1)
        return refused(r, "weight_block_size", block, "rows and columns with one scale",
                       "megatrain reads fp8 with a scale for each block");
    r->out->store = HF_STORE_FP8_BLOCKS;
    return ERR_OK;
}

/* ---- keys ---- */

static const HfKey *find_key(const HfKey *keys, int count, const char *name, HfClassSet classes)
{
    for (int i = 0; i < count; i++)
        if (keys[i].classes & classes && strcmp(keys[i].name, name) == 0) return &keys[i];
    return NULL;
}

static Err take_rope(Reader *r, const HfKey *k, const Json *v);
static Err take_kda(Reader *r, const HfKey *k, const Json *v);

static Err take_value(Reader *r, const HfKey *k, const Json *v)
{
    int64_t *n = hf_int(&r->model, k);
    double *x = hf_real(&r->model, k);
    if (json_is_null(v)) {
        if (!k->nullable) return damaged(r, k, v, "given");
        if (k->kind == HF_KEY_INT) *n = HF_NONE;
        if (k->kind == HF_KEY_REAL) *x = HF_NONE;
        return ERR_OK;
    }
    switch (k->kind) {
    case HF_KEY_INT: return take_int(r, k, v, n);
    case HF_KEY_REAL: return take_real(r, k, v, x);
    case HF_KEY_FLAG: return take_flag(r, k, v, n);
    case HF_KEY_WORD: return take_word(r, k, v, n);
    case HF_KEY_TYPES:
    case HF_KEY_MLPS: return take_words(r, k, v, n);
    case HF_KEY_PATTERN: return take_pattern(r, k, v, n);
    case HF_KEY_BLOCKS: return take_blocks(r, k, v, n);
    case HF_KEY_AUTO: return take_auto(r, k, v, n);
    case HF_KEY_LIMITS: return take_limits(r, k, v, x);
    case HF_KEY_TURNS: return take_turns(r, k, v, n);
    case HF_KEY_BASES: return take_bases(r, k, v, n);
    case HF_KEY_LAYERS: return take_layers(r, k, v, (LayerSet *)(void *)n);
    case HF_KEY_ROPE: return take_rope(r, k, v);
    case HF_KEY_KDA: return take_kda(r, k, v);
    case HF_KEY_STORE: return take_store(r, k, v);
    case HF_KEY_FIXED: return take_fixed(r, k, v);
    case HF_KEY_IDLE: break;
    }
    return ERR_OK;
}

static bool is_number(const HfKey *k)
{
    return k->kind == HF_KEY_INT || k->kind == HF_KEY_REAL || k->kind == HF_KEY_FLAG || k->kind == HF_KEY_WORD;
}

/* Two keys of one meaning may both be there, if they say the same. */
static Err take_key(Reader *r, const HfKey *k, const Json *v)
{
    const int64_t member = k->offset / 8, before = *hf_int(&r->model, k);
    if (k->kind == HF_KEY_IDLE || (k->kind == HF_KEY_FIXED && json_is_null(v))) return ERR_OK;
    if (!is_number(k)) return take_value(r, k, v);
    TRY(take_value(r, k, v));
    if (r->by[member] && before != *hf_int(&r->model, k))
        return err_set(ERR_CKPT, "%s: '%s' and '%s' differ, and mean the same: %s", r->name, r->by[member], k->name,
                       k->meaning);
    r->by[member] = k->name;
    return ERR_OK;
}

/* null, false, or nothing in brackets: what a key that nobody knows asks for is then left out. */
static bool asks_for_nothing(const Json *v)
{
    if (json_is_object(v) || json_is_array(v)) return json_count(v) == 0;
    return !json_is_true(v) && !json_is_number(v) && !json_is_string(v);
}

/* All of them are named at once. */
static Err note_unknown(Reader *r, const char *name, const Json *v)
{
    char word[VALUE_BYTES];
    const size_t used = strlen(r->unknown_names);
    if (r->unknown++) {
        word_text(name, word);
        snprintf(r->unknown_names + used, sizeof r->unknown_names - used, "%s'%s'", used ? ", " : "", word);
        return ERR_OK;
    }
    refused(r, name, v, "not a key that megatrain knows of this class", "it may change what the model computes");
    err_keep(&r->unknown_error);
    return ERR_OK;
}

static Err refuse_unknown(const Reader *r)
{
    if (!r->unknown) return ERR_OK;
    if (r->unknown > 1) err_set(ERR_CONFIG, "%s; and so are %s", r->unknown_error.message, r->unknown_names);
    else err_again(&r->unknown_error, ERR_CONFIG);
    return err_hint("if %s not, take %s out of config.json", r->unknown > 1 ? "they do" : "it does",
                    r->unknown > 1 ? "them" : "it");
}

/* (a key of every class, in an object within config.json) */
static bool is_of_all(const HfKey *k) { return k->classes == HF_CLASS_ALL; }

/* (its class, and ids, are said in other places) */
static void note_ignored(Reader *r, const char *name)
{
    static const char *const said[] = { "model_type", "architectures", "bos_token_id", "eos_token_id", "pad_token_id" };
    char word[VALUE_BYTES];
    const size_t used = strlen(r->ignored);
    for (size_t i = 0; i < sizeof said / sizeof *said; i++)
        if (strcmp(name, said[i]) == 0) return;
    word_text(name, word);
    snprintf(r->ignored + used, sizeof r->ignored - used, "%s%s", used ? ", " : "", word);
}

/* A key may change nothing in one class and much in another, so that only those of every class are passed over. */
static Err unknown_key(Reader *r, const char *name, const Json *v)
{
    const HfKey *elsewhere = find_key(hf_keys, hf_key_count, name, HF_CLASS_ALL);
    const bool idle = elsewhere && elsewhere->kind == HF_KEY_IDLE && is_of_all(elsewhere);
    if (idle || asks_for_nothing(v) || name[0] == '_') { /* (or a note of whoever wrote the file) */
        note_ignored(r, name);
        return ERR_OK;
    }
    if (elsewhere && elsewhere->kind != HF_KEY_IDLE)
        return refused(r, name, v, elsewhere->meaning, "the class has no such key");
    return note_unknown(r, name, v);
}

static Err take_keys(Reader *r, const Json *object, const HfKey *keys, int count)
{
    for (void *it = json_iter(object); it; it = json_next(object, it)) {
        const HfKey *k = find_key(keys, count, json_iter_key(it), HF_CLASS_BIT(r->class));
        if (k && k->kind == HF_KEY_IDLE) note_ignored(r, k->name);
        if (k) TRY(take_key(r, k, json_iter_value(it)));
        else TRY(unknown_key(r, json_iter_key(it), json_iter_value(it)));
    }
    return ERR_OK;
}

/* Gemma 3 in transformers 5: of blocks without a window, and of those with one. */
static Err take_nested_rope(Reader *r, const HfKey *k, const Json *v)
{
    static const HfKey local = { .name = "rope_theta",
                                 .kind = HF_KEY_REAL,
                                 .offset = offsetof(HfModel, local_theta),
                                 .meaning = "base of the rotary angles of blocks with a window" };
    const Json *full = json_get(v, "full_attention"), *sliding = json_get(v, "sliding_attention");
    for (void *it = json_iter(v); it; it = json_next(v, it))
        if (hf_word("full_attention sliding_attention", json_iter_key(it)) < 0)
            return unknown_key(r, json_iter_key(it), json_iter_value(it));
    if (!json_is_object(full)) return damaged(r, k, v, "an object with objects 'full_attention', 'sliding_attention'");
    TRY(take_keys(r, full, hf_rope_keys, hf_rope_key_count));
    for (void *it = json_iter(sliding); it; it = json_next(sliding, it)) {
        const Json *value = json_iter_value(it);
        const char *name = json_iter_key(it), *text = json_text(value, NULL);
        if (strcmp(name, "rope_theta") == 0) TRY(take_key(r, &local, value));
        else if (!text || strcmp(name, "rope_type") != 0 || strcmp(text, "default") != 0)
            return refused(r, name, value, "rotary angles of blocks with a window", "megatrain scales none of these");
    }
    return ERR_OK;
}

/* Transformers 5 takes of rope_parameters only the two objects in it, in a class with two bases: others may only say
 * what the class has anyway. */
static Err check_flat(const Reader *r, const HfKey *k, const Json *v)
{
    const HfClassRow *row = &hf_classes[r->class];
    if (!row->local_base || strcmp(k->name, "rope_parameters") != 0) return ERR_OK;
    for (void *it = json_iter(v); it; it = json_next(v, it)) {
        const Json *value = json_iter_value(it);
        const char *name = json_iter_key(it), *text = json_text(value, NULL);
        const bool plain = text && hf_word("rope_type type", name) >= 0 && strcmp(text, "default") == 0;
        const bool base = strcmp(name, "rope_theta") == 0 && json_number(value, -1) == row->usual.theta;
        if (!plain && !base)
            return refused(r, name, value, k->meaning,
                           "this class has it in the objects 'full_attention' and 'sliding_attention'");
    }
    return ERR_OK;
}

/* Takes an object of rotary positions in place of the class's default. */
static Err take_rope(Reader *r, const HfKey *k, const Json *v)
{
    HfModel *m = &r->model;
    if (!json_is_object(v)) return damaged(r, k, v, "an object");
    if (!r->by[offsetof(HfModel, rope_type) / 8]) {
        m->rope_type = ROPE_PLAIN;
        m->factor = m->original = m->slow = m->fast = HF_NONE;
        m->truncate = true;
    }
    if (hf_classes[r->class].local_base && json_get(v, "full_attention")) return take_nested_rope(r, k, v);
    TRY(check_flat(r, k, v));
    TRY(take_keys(r, v, hf_rope_keys, hf_rope_key_count));
    if (!r->by[offsetof(HfModel, rope_type) / 8]) r->by[offsetof(HfModel, rope_type) / 8] = k->name;
    return ERR_OK;
}

/* Transformers takes the two lists of blocks only where both are there. */
static Err take_kda(Reader *r, const HfKey *k, const Json *v)
{
    const bool linear = json_get(v, "kda_layers"), full = json_get(v, "full_attn_layers");
    if (!json_is_object(v)) return damaged(r, k, v, "an object");
    if (linear != full)
        return err_set(ERR_CKPT, "%s: '%s' has one of 'kda_layers' and 'full_attn_layers' without the other", r->name,
                       k->name);
    r->model.kda.listed = linear;
    return take_keys(r, v, hf_kda_keys, hf_kda_key_count);
}

/* ---- classes ---- */

static bool ends(const char *text, const char *end)
{
    const size_t n = strlen(text), m = strlen(end);
    return n >= m && strcmp(text + n - m, end) == 0;
}

/* Other architectures of a class have another head, or none. */
static Err check_head(const Reader *r, const Json *root)
{
    static const char *const heads[] = { "ForCausalLM", "LMHeadModel", "ForConditionalGeneration" };
    const Json *first = json_at(json_get(root, "architectures"), 0);
    const char *text = json_text(first, NULL);
    if (!text) return ERR_OK;
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        if (ends(text, heads[i])) return ERR_OK;
    return refused(r, "architectures", first, "what stands on the blocks", "megatrain reads language models");
}

static Err find_class(Reader *r, const Json *root, const Json **keys)
{
    char known[2048] = "";
    const char *type = json_text(json_get(root, "model_type"), NULL);
    if (!json_is_object(root) || !type)
        return err_set(ERR_CKPT, "%s: no configuration of a model: 'model_type' is missing", r->name);
    for (int c = 0; c < HF_CLASSES; c++) {
        const HfClassRow *row = &hf_classes[c];
        r->class = (HfClass)c;
        if (strcmp(type, row->names.model_type) == 0) return check_head(r, root);
        if (row->alias && strcmp(type, row->alias) == 0) return check_head(r, root);
        r->out->wrapped = row->wrapper && strcmp(type, row->wrapper) == 0;
        if (r->out->wrapped) {
            *keys = json_get(root, "text_config");
            if (!json_is_object(*keys)) return err_set(ERR_CKPT, "%s: 'text_config' is missing", r->name);
            return check_head(r, root);
        }
        snprintf(known + strlen(known), sizeof known - strlen(known), "%s%s", c ? ", " : "", row->names.model_type);
    }
    refused(r, "model_type", json_get(root, "model_type"), "the class of the model", "megatrain does not read it");
    return err_hint("it reads %s", known);
}

/* Takes the members beside text_config that a folder with images has for the text model. */
static Err take_wrapper(Reader *r, const Json *root)
{
    static const char *const shared[] = { "quantization_config", "tie_word_embeddings" };
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++) {
        const Json *v = json_get(root, shared[i]);
        if (v) TRY(take_key(r, find_key(hf_keys, hf_key_count, shared[i], HF_CLASS_BIT(r->class)), v));
    }
    return ERR_OK;
}

/* ---- what keys mean together ---- */

static Err no(const Reader *r, const char *what) { return err_set(ERR_CONFIG, "%s: %s", r->name, what); }

/* Falcon: newer models count their heads of keys and values, and may have a norm for each layer. */
static Err settle_falcon(Reader *r)
{
    HfModel *m = &r->model;
    if (m->grouped && !m->parallel) return no(r, "'new_decoder_architecture' without 'parallel_attn'");
    if (!m->grouped) m->kv_heads = m->one_kv ? 1 : m->heads;
    if (m->norm_count == HF_NONE) m->norm_count = m->grouped ? 2 : 1;
    if (m->norm_count > 2 || (m->norm_count == 2 && !m->grouped))
        return no(r, "'num_ln_in_parallel_attn' is above 1 without 'new_decoder_architecture', or above 2");
    return ERR_OK;
}

/* Granite: without experts the shared one is the feed-forward layer. */
static Err settle_mamba(Reader *r)
{
    HfModel *m = &r->model;
    const int64_t all = m->mamba.expand * m->hidden;
    if (hf_classes[r->class].hybrid != MIXER_WORD_MAMBA2) return ERR_OK;
    if (r->class == HF_GRANITEMOEHYBRID && m->experts < 1) m->ffn = m->shared_ffn;
    if (m->mamba.head == HF_NONE) m->mamba.head = all / m->mamba.heads;
    if (m->mamba.head * m->mamba.heads == all || r->class == HF_NEMOTRON_H) return ERR_OK;
    return no(r, "'mamba_n_heads' x 'mamba_d_head' is not 'mamba_expand' x 'hidden_size'");
}

/* Lara: of each five blocks the second and the last have a window, and the fourth has full attention. */
static void settle_lara(Reader *r)
{
    HfModel *m = &r->model;
    if (r->class != HF_LARA_MINI || m->typed || m->layers > LAYERS_MAX) return;
    m->typed = m->layers;
    for (int i = 0; i < m->layers; i++) {
        if (i % 5 == 1 || i % 5 == 4) add_layer(&m->sliding, i);
        if (i % 5 != 0 && i % 5 != 2) add_layer(&m->attending, i);
    }
}

/* OLMo Hybrid: widths that are absent, and some block with full attention. */
static void settle_delta(Reader *r)
{
    HfModel *m = &r->model;
    if (r->class != HF_OLMO_HYBRID) return;
    if (!m->typed && m->layers < m->period) m->period = m->layers;
    if (m->linear.key_heads == HF_NONE) m->linear.key_heads = m->heads;
    if (m->linear.value_heads == HF_NONE) m->linear.value_heads = m->heads;
    if (m->linear.key_dim == HF_NONE)
        m->linear.key_dim = (int64_t)(0.75 * (double)m->hidden / (double)m->linear.key_heads);
    if (m->linear.value_dim == HF_NONE) m->linear.value_dim = 2 * m->linear.key_dim;
}

/* Kimi Linear: which blocks have linear attention is said by two lists, or by layer_types. */
static Err settle_kda(Reader *r)
{
    HfModel *m = &r->model;
    if (!m->kda.listed) return ERR_OK;
    for (int i = 0; i < LAYERS_MAX; i++) {
        const int said = layer_set_has(&m->kda.blocks, i) + layer_set_has(&m->attending, i);
        if (said != (i < m->layers))
            return no(r, "'kda_layers' and 'full_attn_layers' do not name each block once, counted from 1");
    }
    if (m->typed && m->typed != m->layers) return no(r, "'layer_types' does not have a word for each block");
    if (m->typed && memcmp(&m->sliding, &m->kda.blocks, sizeof m->sliding) != 0)
        return no(r, "'layer_types' and 'linear_attn_config' differ in the blocks with linear attention");
    if (!m->typed) m->typed = m->layers, m->sliding = m->kda.blocks;
    return ERR_OK;
}

static Err settle_sizes(Reader *r)
{
    HfModel *m = &r->model;
    const bool latent = hf_classes[r->class].latent;
    if (hf_classes[r->class].single && !m->layers) m->layers = m->typed;
    if (m->layers > LAYERS_MAX) return no(r, "more than 1024 blocks");
    if (r->class == HF_FALCON) TRY(settle_falcon(r));
    TRY(settle_mamba(r));
    TRY(settle_kda(r));
    settle_delta(r);
    settle_lara(r);
    if (r->class == HF_GPT_NEOX) m->embedding_dropout = m->branch_dropout;
    if (m->kv_heads == HF_NONE) m->kv_heads = m->heads;
    if (latent && m->kv_heads != m->heads)
        return no(r, "'num_key_value_heads' is not 'num_attention_heads': latent attention has keys for each head");
    if (!latent && m->head_dim == HF_NONE) {
        if (m->hidden % m->heads)
            return no(r, "'num_attention_heads' does not divide the width, and 'head_dim' is missing");
        m->head_dim = m->hidden / m->heads;
    }
    if (m->ffn == HF_NONE) m->ffn = 4 * m->hidden;
    if (latent && m->v_dim == HF_NONE) m->v_dim = m->hidden / m->heads;
    if (m->init_std == HF_NONE) m->init_std = 2 / sqrt(5.0 * (double)m->hidden);
    if (m->out_bias && !m->attention_bias)
        return no(r, "'attention_out_bias' without 'attention_bias': megatrain has no such biases");
    return ERR_OK;
}

/* Flint: the first two blocks, the second of each four and the last one have no window. */
static void settle_flint(HfModel *m)
{
    for (int i = 2; i < m->layers - 1; i++)
        if (i % 4 != 1) add_layer(&m->sliding, i);
    m->typed = m->layers;
}

static Err settle_windows(Reader *r)
{
    HfModel *m = &r->model;
    if (r->class == HF_FLINT && !m->typed) settle_flint(m);
    const HfWindows kind = hf_classes[r->class].windows;
    if (kind == HF_WINDOWS_FROM || kind == HF_WINDOWS_SWITCH)
        if (!m->use_window) m->window = HF_NONE;
    if (m->typed && m->typed != m->layers) return no(r, "'layer_types' is not about as many blocks as there are");
    if (kind == HF_WINDOWS_SWITCH && m->window != HF_NONE && m->full_layers > 0)
        return no(r, "'use_sliding_window' with 'max_window_layers': releases of transformers differ in what "
                     "it means");
    if (!m->typed && kind == HF_WINDOWS_TYPES && m->window != HF_NONE && m->period < 1)
        return no(r, "neither 'layer_types' nor 'sliding_window_pattern' says which blocks have a window");
    if (m->typed && m->window == HF_NONE && !hf_classes[r->class].hybrid && layer_set_count(&m->sliding))
        return no(r, "'layer_types' has blocks with a window, and 'sliding_window' says none");
    return ERR_OK;
}

/* Some columns of a head turn: a number of them, or a part. */
static Err settle_partial(Reader *r)
{
    HfModel *m = &r->model;
    const bool given = r->by[offsetof(HfModel, partial) / 8] != NULL;
    if (m->rotary > 0 && !given) m->partial = (double)m->rotary / (double)m->head_dim;
    if (m->partial == 1 || hf_is_gpt2(r->class)) return ERR_OK;
    if (!(m->partial < 1 && (double)m->head_dim * m->partial >= 2))
        return no(r, "'partial_rotary_factor' or 'rotary_dim' makes fewer than 2 columns of a head turn, or more than "
                     "a head has");
    if (m->rotary > 0 && (int64_t)((double)m->head_dim * m->partial) != m->rotary)
        return no(r, "'rotary_dim' and 'partial_rotary_factor' say different columns that turn");
    return ERR_OK;
}

static Err settle_rope(Reader *r)
{
    HfModel *m = &r->model;
    if (m->theta == HF_NONE) m->rotates = false;
    TRY(settle_partial(r));
    if (m->turned && m->turned < m->layers) return no(r, "'no_rope_layers' is about fewer blocks than there are");
    if (m->bases.count && m->bases.count < m->layers)
        return no(r, "'layer_rope_theta' is about fewer blocks than there are");
    if (m->bases.count) m->turned = m->layers;
    if (m->bases.one > 0) m->theta = m->bases.one;
    const bool known = m->original != HF_NONE;
    if (m->rope_type == ROPE_LLAMA3 && (m->slow == HF_NONE || m->fast == HF_NONE))
        return no(r, "'rope_scaling' is llama3, and lacks 'low_freq_factor' or 'high_freq_factor'");
    if (m->rope_type == ROPE_LLAMA3 || m->rope_type == ROPE_YARN)
        if (!known) m->original = m->positions;
    if (m->rope_type == ROPE_YARN && m->factor == HF_NONE && known)
        m->factor = (double)m->positions / (double)m->original;
    if (m->rope_type != ROPE_PLAIN && m->factor == HF_NONE)
        return no(r, "'rope_scaling' lacks 'factor', what angles are divided by");
    if (m->rope_type != ROPE_YARN && m->mscale_all > 0 && hf_classes[r->class].latent)
        return no(r, "'mscale_all_dim' (multiplies the log of the factor, of scores): megatrain has it with "
                     "yarn alone");
    return ERR_OK;
}

static Err settle_groups(Reader *r)
{
    HfModel *m = &r->model;
    if (!hf_classes[r->class].best) return ERR_OK;
    if (r->class == HF_DEEPSEEK_V2 && m->method == HF_GREEDY) m->groups = m->group_topk = 1;
    if (m->groups == HF_NONE || m->group_topk == HF_NONE) return no(r, "'n_group' or 'topk_group' is missing");
    return ERR_OK;
}

static Err settle_experts(Reader *r)
{
    HfModel *m = &r->model;
    int count = 0;
    if (!hf_classes[r->class].mixture) return ERR_OK;
    if (m->mlps && m->mlps != m->layers) return no(r, "'mlp_layer_types' is not about as many blocks as there are");
    if (m->mlps) m->first_dense = 0; /* (the list says it of every block) */
    for (int i = 0; i < m->layers; i++) count += hf_is_mixture(m, r->class, i);
    if (count && m->experts == HF_NONE && hf_classes[r->class].usual.experts == HF_NONE)
        return no(r, "'n_routed_experts' (experts) is missing");
    if (!count && m->mtp > 0)
        return no(r, "modules of multi-token prediction have experts in this class, and no block has any");
    if (!count || m->experts == HF_NONE) m->experts = 0;
    if (m->expert_ffn == HF_NONE) m->expert_ffn = m->ffn;
    if (m->shared == HF_NONE) m->shared = 0;
    if (!m->experts) return ERR_OK;
    if (m->topk == HF_NONE) return no(r, "'num_experts_per_tok' (experts of a token) is missing");
    return settle_groups(r);
}

/* MiniCPM's factors, which depend on the number of blocks and on the width. */
static Err settle_depth(Reader *r)
{
    HfModel *m = &r->model;
    if (m->minicpm.base == HF_NONE) m->minicpm.base = m->hidden;
    m->logits_divisor = (double)m->hidden / (double)m->minicpm.base;
    m->branch_factor = m->minicpm.depth == HF_NONE ? 1 : m->minicpm.depth / sqrt((double)m->layers);
    if (m->embedding_factor > 0 && m->branch_factor > 0) return ERR_OK;
    return no(r, "'scale_emb' and 'scale_depth' must be above 0");
}

/* (of a class that has none they are 0) */
static Err settle_factors(Reader *r)
{
    HfModel *m = &r->model;
    const HfModel *usual = &hf_classes[r->class].usual;
    if (m->score_factor == HF_NONE) m->score_factor = 1 / sqrt((double)m->head_dim);
    if (usual->minicpm.depth > 0) return settle_depth(r);
    if (!(usual->branch_factor > 0))
        return usual->logits_factor > 0 && !(m->logits_factor > 0) ? no(r, "'logit_scale' must be above 0") : ERR_OK;
    if (m->embedding_factor > 0 && m->branch_factor > 0 && m->score_factor > 0 &&
        m->logits_divisor + m->logits_factor > 0)
        return ERR_OK;
    return no(r, "'embedding_multiplier', 'residual_multiplier', 'attention_multiplier' and 'logits_scaling' must be "
                 "above 0");
}

static Err settle(Reader *r)
{
    TRY(settle_sizes(r));
    TRY(settle_factors(r));
    TRY(settle_windows(r));
    TRY(settle_rope(r));
    return settle_experts(r);
}

/* Releases of transformers keep the key and save no such modules. (A folder whose weights are not there yet has what it
 * says.) */
static void look_for_modules(Reader *r)
{
    HfFolder f;
    SetupArena a;
    char name[HF_NAME_MAX];
    bool found = false;
    const bool said = r->by[offsetof(HfModel, mtp) / 8] != NULL;
    if (!r->folder || r->model.mtp < 1) return;
    setup_init(&a);
    const Err err = hf_folder_open(r->folder, &a, &f);
    for (const char *const *at = hf_prefixes(r->class, r->out->wrapped); *at && !err; at++) {
        snprintf(name, sizeof name, "%slayers.%lld.enorm.weight", *at, (long long)r->model.layers);
        found |= hf_folder_find(&f, name) != NULL;
    }
    hf_folder_close(&f);
    setup_release(&a);
    if (err || found) return;
    r->model.mtp = 0;
    if (!log_rank())
        log_warn("'%s' has no weights of the modules of multi-token prediction that %s: model.mtp_layers = 0",
                 r->folder, said ? "its config.json speaks of" : "its class has where config.json says nothing");
}

static Err read_model(Reader *r, const Json *root, SetupArena *arena)
{
    const Json *keys = root;
    TRY(find_class(r, root, &keys));
    r->model = hf_classes[r->class].usual;
    if (keys != root) TRY(take_wrapper(r, root));
    TRY(take_keys(r, keys, hf_keys, hf_key_count));
    TRY(refuse_unknown(r));
    TRY(settle(r));
    look_for_modules(r);
    r->out->kind = r->class;
    r->out->interleaved = r->model.interleaved;
    char *ignored;
    TRY(setup_strdup(arena, r->ignored, &ignored));
    r->out->ignored = ignored;
    return hf_ini(r->name, &r->model, r->class, arena, &r->out->ini);
}

static Err parse(const char *name, const char *folder, const char *text, int64_t size_bytes, SetupArena *arena,
                 HfConfig *out)
{
    Json *root;
    Reader r = { .name = name, .folder = folder, .out = out };
    *out = (HfConfig){ 0 };
    TRY_AS(ERR_CKPT, json_parse_python(name, text, size_bytes, &root));
    const Err err = read_model(&r, root, arena);
    json_free(root);
    return err;
}

Err hf_config_parse(const char *name, const char *text, int64_t size_bytes, SetupArena *arena, HfConfig *out)
{
    return parse(name, NULL, text, size_bytes, arena, out);
}

Err hf_config_read(const char *folder, SetupArena *arena, HfConfig *out)
{
    char path[PATH_MAX], *text;
    int64_t size;
    if (snprintf(path, sizeof path, "%s/config.json", folder) >= (int)sizeof path)
        return err_set(ERR_CKPT, "'%s': the path is too long", folder);
    const Err read = file_read_all(path, HF_JSON_MOST, &text, &size);
    if (read) return hf_folder_hint_cache(folder, err_as(read, ERR_CKPT));
    const Err err = parse(path, folder, text, size, arena, out);
    free(text);
    return err;
}
