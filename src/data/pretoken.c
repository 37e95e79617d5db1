#include "data/pretoken.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/utf8.h"

/* Unicode's White_Space, 25 code points, for use inside a class. */
#define SPACE  \
    "\\t-\\r " \
    "\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
/*
 * Letters and numbers of Unicode 16, for use inside a class: those that PCRE2 knows, of Unicode 14 at least, and what
 * was added since; so the ids do not depend on the library's version. (What Unicode 17 and later added counts as
 * letters if the library knows it.)
 */
#define LATER_LETTERS                                                                                     \
    "\\x{1C89}-\\x{1C8A}\\x{A7CB}-\\x{A7CD}\\x{A7DA}-\\x{A7DC}\\x{105C0}-\\x{105F3}\\x{10D4A}-\\x{10D65}" \
    "\\x{10D6F}-\\x{10D85}\\x{10EC2}-\\x{10EC4}\\x{1123F}-\\x{11240}\\x{11380}-\\x{11389}\\x{1138B}"      \
    "\\x{1138E}\\x{11390}-\\x{113B5}\\x{113B7}\\x{113D1}\\x{113D3}\\x{11BC0}-\\x{11BE0}\\x{11F02}"        \
    "\\x{11F04}-\\x{11F10}\\x{11F12}-\\x{11F33}\\x{1342F}\\x{13441}-\\x{13446}\\x{13460}-\\x{143FA}"      \
    "\\x{16100}-\\x{1611D}\\x{16D40}-\\x{16D6C}\\x{18CFF}\\x{1B132}\\x{1B155}\\x{1DF25}-\\x{1DF2A}"       \
    "\\x{1E030}-\\x{1E06D}\\x{1E4D0}-\\x{1E4EB}\\x{1E5D0}-\\x{1E5ED}\\x{1E5F0}\\x{2B739}"                 \
    "\\x{2EBF0}-\\x{2EE5D}\\x{31350}-\\x{323AF}"
#define LATER_NUMBERS                                                                      \
    "\\x{10D40}-\\x{10D49}\\x{116D0}-\\x{116E3}\\x{11BF0}-\\x{11BF9}\\x{11F50}-\\x{11F59}" \
    "\\x{16130}-\\x{16139}\\x{16D70}-\\x{16D79}\\x{1CCF0}-\\x{1CCF9}\\x{1D2C0}-\\x{1D2D3}" \
    "\\x{1E4F0}-\\x{1E4F9}\\x{1E5F1}-\\x{1E5FA}"
#define LETTER "\\p{L}" LATER_LETTERS
#define NUMBER "\\p{N}" LATER_NUMBERS
#define SUFFIX "'s|'t|'re|'ve|'m|'ll|'d"
#define LETTERS_AFTER_ANY "|[^\\r\\n" LETTER NUMBER "]?[" LETTER "]+|"
#define REGEX_LETTERS "|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
#define TAIL "[\\r\\n]*|[" SPACE "]*[\\r\\n]+|[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+"
#define REGEX_TAIL "|\\s+(?!\\S)|\\s+"

static const struct {
    const char *name;
    const char *regex;   /* the published text, with \s */
    const char *pattern; /* the same with the class written out */
} splits[SPLIT_COUNT] = {
    [SPLIT_GPT2] = { "gpt2", SUFFIX "| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+" REGEX_TAIL,
                     SUFFIX "| ?[" LETTER "]+| ?[" NUMBER "]+| ?[^" SPACE LETTER NUMBER "]+"
                            "|[" SPACE "]+(?![^" SPACE "])|[" SPACE "]+" },
    [SPLIT_LLAMA3] = { "llama3",
                       "(?i:" SUFFIX ")" REGEX_LETTERS
                       "\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+" REGEX_TAIL,
                       "(?i:" SUFFIX ")" LETTERS_AFTER_ANY "[" NUMBER "]{1,3}| ?[^" SPACE LETTER NUMBER
                       "]+" TAIL },
    [SPLIT_QWEN] = { "qwen",
                     "(?i:" SUFFIX ")" REGEX_LETTERS
                     "\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+" REGEX_TAIL,
                     "(?i:" SUFFIX ")" LETTERS_AFTER_ANY "[" NUMBER "]| ?[^" SPACE LETTER NUMBER "]+" TAIL },
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
    pcre2_set_match_limit(w->context, UINT32_MAX); /* ten million, the usual one, are as many blanks */
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

/* A blank, a line feed, a comma or a full stop, ASCII's or East Asia's: NFC composes them with nothing before them. */
static bool begins_piece(const char *text, int64_t size)
{
    switch (*text) {
    case ' ':
    case '\n':
    case ',':
    case '.': return true;
    default: break;
    }
    return size >= 3 && (!memcmp(text, "\xE3\x80\x81", 3) || !memcmp(text, "\xE3\x80\x82", 3) ||
                         !memcmp(text, "\xEF\xBC\x8C", 3));
}

/* Is the character that ends at `at` > 0 a digit of ASCII, or a letter of the basic plane that NFC leaves as it is? */
static bool ends_piece(const char *text, int64_t at)
{
    uint8_t last = (uint8_t)text[at - 1], letter = last | 0x20;
    if (last < 0x80) return (letter >= 'a' && letter <= 'z') || (last >= '0' && last <= '9');
    int64_t from = at - 1;
    while (from > 0 && at - from < 3 && utf8_is_tail((uint8_t)text[from])) from--;
    if (utf8_char_bytes((const uint8_t *)text + from, at - from) != at - from) return false;
    int bytes;
    uint32_t c = utf8_get(text + from, &bytes);
    if (c >= 0x1100 && c <= 0x11FF) return false; /* parts of Korean syllables */
    const utf8proc_property_t *p = utf8proc_get_property((utf8proc_int32_t)c);
    return p->category >= UTF8PROC_CATEGORY_LU && p->category <= UTF8PROC_CATEGORY_LO &&
           p->decomp_seqindex == UINT16_MAX;
}

int64_t split_cut(const char *text, int64_t size)
{
    for (int64_t at = size - 1; at > 0; at--)
        if (begins_piece(text + at, size - at) && ends_piece(text, at)) return at;
    return 0;
}
