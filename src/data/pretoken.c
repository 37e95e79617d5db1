#include "data/pretoken.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>

/* Unicode's White_Space, 25 code points, for use inside a class. */
#define SPACE  \
    "\\t-\\r " \
    "\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define SUFFIX "'s|'t|'re|'ve|'m|'ll|'d"
#define LETTERS_AFTER_ANY "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
#define TAIL "[\\r\\n]*|[" SPACE "]*[\\r\\n]+|[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+"
#define REGEX_TAIL "|\\s+(?!\\S)|\\s+"

static const struct {
    const char *name;
    const char *regex;   /* as published, with \s */
    const char *pattern; /* the same with the class written out */
} splits[SPLIT_COUNT] = {
    [SPLIT_GPT2] = { "gpt2", SUFFIX "| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+" REGEX_TAIL,
                     SUFFIX "| ?\\p{L}+| ?\\p{N}+| ?[^" SPACE "\\p{L}\\p{N}]+"
                            "|[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+" },
    [SPLIT_LLAMA3] = { "llama3",
                       "(?i:" SUFFIX ")" LETTERS_AFTER_ANY
                       "\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+" REGEX_TAIL,
                       "(?i:" SUFFIX ")" LETTERS_AFTER_ANY "\\p{N}{1,3}| ?[^" SPACE "\\p{L}\\p{N}]+" TAIL },
    [SPLIT_QWEN] = { "qwen",
                     "(?i:" SUFFIX ")" LETTERS_AFTER_ANY
                     "\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+" REGEX_TAIL,
                     "(?i:" SUFFIX ")" LETTERS_AFTER_ANY "\\p{N}| ?[^" SPACE "\\p{L}\\p{N}]+" TAIL },
};

/* Backtracking beyond the machine stack happens only on odd text; the JIT may then take this much. */
enum { JIT_STACK_START_BYTES = 32 << 10, JIT_STACK_MAX_BYTES = 16 << 20 };

struct Splitter {
    pcre2_code *code;
};

struct SplitterWork {
    const Splitter *splitter;
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
};

bool split_find(const char *regex, SplitKind *out)
{
    for (int k = 0; k < SPLIT_COUNT; k++)
        if (strcmp(regex, splits[k].regex) == 0) {
            *out = (SplitKind)k;
            return true;
        }
    return false;
}

const char *split_name(SplitKind kind) { return splits[kind].name; }

static Err pattern_error(const char *doing, int code)
{
    char text[128] = "";
    pcre2_get_error_message(code, (PCRE2_UCHAR *)text, sizeof text);
    return err_set(ERR_INTERNAL, "%s: PCRE2: %s (%d)", doing, text, code);
}

Err splitter_open(SplitKind kind, Splitter **out)
{
    int code;
    PCRE2_SIZE where;
    Splitter *s = calloc(1, sizeof *s);
    if (!s) return err_set(ERR_MEMORY, "no memory for a pattern");
    s->code = pcre2_compile((PCRE2_SPTR)splits[kind].pattern, PCRE2_ZERO_TERMINATED,
                            PCRE2_UTF | PCRE2_ANCHORED, &code, &where, NULL);
    if (!s->code) {
        free(s);
        return pattern_error("cannot compile a split pattern", code);
    }
    /* without a JIT for this processor pcre2_match interprets: slower, same result */
    pcre2_jit_compile(s->code, PCRE2_JIT_COMPLETE);
    *out = s;
    return ERR_OK;
}

void splitter_close(Splitter *s)
{
    if (s) pcre2_code_free(s->code);
    free(s);
}

Err splitter_work_open(const Splitter *s, SplitterWork **out)
{
    SplitterWork *w = calloc(1, sizeof *w);
    if (!w) return err_set(ERR_MEMORY, "no memory for a pattern");
    w->splitter = s;
    w->match = pcre2_match_data_create(1, NULL);
    w->context = pcre2_match_context_create(NULL);
    w->stack = pcre2_jit_stack_create(JIT_STACK_START_BYTES, JIT_STACK_MAX_BYTES, NULL);
    if (!w->match || !w->context) {
        splitter_work_close(w);
        return err_set(ERR_MEMORY, "no memory for a pattern");
    }
    if (w->stack) pcre2_jit_stack_assign(w->context, NULL, w->stack);
    *out = w;
    return ERR_OK;
}

void splitter_work_close(SplitterWork *w)
{
    if (!w) return;
    pcre2_match_data_free(w->match);
    pcre2_match_context_free(w->context);
    pcre2_jit_stack_free(w->stack);
    free(w);
}

Err splitter_next(SplitterWork *w, const char *text, int64_t size, int64_t at, int64_t *end)
{
    int n = pcre2_match(w->splitter->code, (PCRE2_SPTR)text, (PCRE2_SIZE)size, (PCRE2_SIZE)at,
                        PCRE2_NO_UTF_CHECK, w->match, w->context);
    if (n < 0) return pattern_error("cannot split text into pieces", n);
    *end = (int64_t)pcre2_get_ovector_pointer(w->match)[1];
    if (*end <= at) return err_set(ERR_INTERNAL, "a split pattern matched nothing");
    return ERR_OK;
}
