/*
 * Timed choices of GEMM algorithms as text, for the run folder and for other ranks:
 *
 *   cublasLt 130100, NVIDIA H200, 132 multiprocessors
 *   linear_fwd bf16 bf16 4 3072 8192 768 ... 0 1f0000001a ...
 *
 * that is, what the choices hold for, and per shape the key (op, dtypes, then numbers in the order of GemmKey; of fp8
 * the last as well) and the library's algorithm as hexadecimal words, which it promises to read back in the same
 * version.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "device/ops.h"
#include "gemm_plan.h"

enum { LINE_BYTES = 480 };

_Static_assert((CHOICES_MOST + 2) * LINE_BYTES <= CUDA_GEMM_TEXT_BYTES, "the text has room for all choices");

/* (files from before there was fp8 stay good) */
static size_t numbers_of(OpId op)
{
    return op == OP_fp8_product || op == OP_fp8_product_add ? KEY_NUMBERS : KEY_NUMBERS - 1;
}

const Choice *gemm_choice(const CudaGemm *g, const GemmKey *key)
{
    for (int i = 0; i < g->choice_count; i++)
        if (memcmp(&g->choices[i].key, key, sizeof *key) == 0) return &g->choices[i];
    return NULL;
}

int64_t cuda_gemm_save(const CudaGemm *g, char *text)
{
    int64_t at = 0, room = CUDA_GEMM_TEXT_BYTES;
    at += snprintf(text, (size_t)room, "%s\n", g->made_for);
    for (int i = 0; i < g->choice_count; i++) {
        const Choice *c = &g->choices[i];
        const int64_t *number = (const int64_t *)&c->key;
        at += snprintf(text + at, (size_t)(room - at), "%s %s %s", op_info((OpId)c->key.op)->name,
                       dtype_name((DType)c->key.type), dtype_name((DType)c->key.out));
        for (size_t j = KEY_NAMES; j < numbers_of((OpId)c->key.op); j++)
            at += snprintf(text + at, (size_t)(room - at), " %lld", (long long)number[j]);
        for (size_t j = 0; j < sizeof c->algo.data / sizeof *c->algo.data; j++)
            at += snprintf(text + at, (size_t)(room - at), " %llx", (unsigned long long)c->algo.data[j]);
        at += snprintf(text + at, (size_t)(room - at), "\n");
    }
    return at;
}

/* The next word of a line, at most 31 characters; *at moves behind it. */
static bool next_word(const char **at, char word[32])
{
    int used = 0;
    if (sscanf(*at, " %31[^ \n]%n", word, &used) != 1) return false;
    *at += used;
    return true;
}

static bool next_number(const char **at, int base, uint64_t *out)
{
    char word[32], *end;
    if (!next_word(at, word)) return false;
    *out = strtoull(word, &end, base);
    return *end == 0;
}

static bool dtype_read(const char *word, int64_t *out)
{
    for (int t = 0; t < DTYPE_COUNT; t++)
        if (!strcmp(word, dtype_name((DType)t))) return *out = t, true;
    return false;
}

static bool choice_read(const char *line, Choice *out)
{
    static const OpId ops[] = { OP_linear_fwd, OP_linear_dx, OP_linear_dw, OP_fp8_product, OP_fp8_product_add };
    int64_t *number = (int64_t *)&out->key;
    uint64_t value;
    char word[32];
    memset(out, 0, sizeof *out);
    out->key.op = -1;
    if (!next_word(&line, word)) return false;
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++)
        if (!strcmp(word, op_info(ops[i])->name)) out->key.op = ops[i];
    if (out->key.op < 0) return false;
    if (!next_word(&line, word) || !dtype_read(word, &out->key.type)) return false;
    if (!next_word(&line, word) || !dtype_read(word, &out->key.out)) return false;
    for (size_t j = KEY_NAMES; j < numbers_of((OpId)out->key.op); j++) {
        if (!next_number(&line, 10, &value)) return false;
        number[j] = (int64_t)value;
    }
    for (size_t j = 0; j < sizeof out->algo.data / sizeof *out->algo.data; j++) {
        if (!next_number(&line, 16, &value)) return false;
        out->algo.data[j] = value;
    }
    return *line == '\n';
}

/* The choices of a text into out[CHOICES_MOST]. */
static Err read_choices(const CudaGemm *g, const char *text, Choice *out, int *count)
{
    const size_t head = strlen(g->made_for);
    int line = 1;
    *count = 0;
    if (strncmp(text, g->made_for, head) || text[head] != '\n')
        return err_set(ERR_CONFIG, "the choices of GEMM algorithms are for '%.*s', here is '%s'",
                       (int)strcspn(text, "\n"), text, g->made_for),
               err_hint("remove the file to choose anew (results then differ in the last bits)");
    text += head + 1;
    for (; *text; text += strcspn(text, "\n") + 1, line++)
        if (*count == CHOICES_MOST || !choice_read(text, &out[(*count)++]))
            return err_set(ERR_CONFIG, "line %d of the choices of GEMM algorithms is damaged", line + 1);
    return ERR_OK;
}

static void add_choices(CudaGemm *g, const Choice *more, int count)
{
    for (int i = 0; i < count; i++)
        if (g->choice_count < CHOICES_MOST && !gemm_choice(g, &more[i].key)) g->choices[g->choice_count++] = more[i];
    gemm_forget_plans(g);
}

static Err take_choices(CudaGemm *g, const char *text, bool instead)
{
    int count;
    Choice *read = malloc(sizeof g->choices);
    if (!read) return err_set(ERR_MEMORY, "no host memory to read the choices of GEMM algorithms");
    Err err = read_choices(g, text, read, &count);
    if (!err && instead) g->choice_count = 0;
    if (!err) add_choices(g, read, count);
    free(read);
    return err;
}

Err cuda_gemm_load(CudaGemm *g, const char *text) { return take_choices(g, text, true); }
Err cuda_gemm_add(CudaGemm *g, const char *text) { return take_choices(g, text, false); }
