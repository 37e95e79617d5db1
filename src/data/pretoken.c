#include "data/pretoken.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/utf8.h"
#include "data/grow.h"

/* Unicode's White_Space, 25 code points, for use inside a class. */
#define SPACE  \
    "\\t-\\r " \
    "\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
/*
 * Characters that Unicode 15 and 16 added to classes, for use inside a class. PCRE2 knows Unicode 14 at least, so with
 * these the ids do not depend on the library's version. (Additions of Unicode 17 and later are in a class if the
 * library knows them.)
 */
#define LATER_LU "\\x{1C89}\\x{A7CB}-\\x{A7CC}\\x{A7DA}\\x{A7DC}\\x{10D50}-\\x{10D65}"
#define LATER_LL "\\x{1C8A}\\x{A7CD}\\x{A7DB}\\x{10D70}-\\x{10D85}\\x{1DF25}-\\x{1DF2A}"
#define LATER_LM "\\x{10D4E}\\x{10D6F}\\x{16D40}-\\x{16D42}\\x{16D6B}-\\x{16D6C}\\x{1E030}-\\x{1E06D}\\x{1E4EB}"
#define LATER_LO                                                                                     \
    "\\x{105C0}-\\x{105F3}\\x{10D4A}-\\x{10D4D}\\x{10D4F}\\x{10EC2}-\\x{10EC4}\\x{1123F}-\\x{11240}" \
    "\\x{11380}-\\x{11389}\\x{1138B}\\x{1138E}\\x{11390}-\\x{113B5}\\x{113B7}\\x{113D1}\\x{113D3}"   \
    "\\x{11BC0}-\\x{11BE0}\\x{11F02}\\x{11F04}-\\x{11F10}\\x{11F12}-\\x{11F33}\\x{1342F}"            \
    "\\x{13441}-\\x{13446}\\x{13460}-\\x{143FA}\\x{16100}-\\x{1611D}\\x{16D43}-\\x{16D6A}\\x{18CFF}" \
    "\\x{1B132}\\x{1B155}\\x{1E4D0}-\\x{1E4EA}\\x{1E5D0}-\\x{1E5ED}\\x{1E5F0}\\x{2B739}"             \
    "\\x{2EBF0}-\\x{2EE5D}\\x{31350}-\\x{323AF}"
#define LATER_M                                                                                      \
    "\\x{897}\\x{CF3}\\x{ECE}\\x{10D69}-\\x{10D6D}\\x{10EFC}-\\x{10EFF}\\x{11241}"                   \
    "\\x{113B8}-\\x{113C0}\\x{113C2}\\x{113C5}\\x{113C7}-\\x{113CA}\\x{113CC}-\\x{113D0}\\x{113D2}"  \
    "\\x{113E1}-\\x{113E2}\\x{11F00}-\\x{11F01}\\x{11F03}\\x{11F34}-\\x{11F3A}\\x{11F3E}-\\x{11F42}" \
    "\\x{11F5A}\\x{13440}\\x{13447}-\\x{13455}\\x{1611E}-\\x{1612F}\\x{1E08F}\\x{1E4EC}-\\x{1E4EF}"  \
    "\\x{1E5EE}-\\x{1E5EF}"
#define LATER_N                                                                            \
    "\\x{10D40}-\\x{10D49}\\x{116D0}-\\x{116E3}\\x{11BF0}-\\x{11BF9}\\x{11F50}-\\x{11F59}" \
    "\\x{16130}-\\x{16139}\\x{16D70}-\\x{16D79}\\x{1CCF0}-\\x{1CCF9}\\x{1D2C0}-\\x{1D2D3}" \
    "\\x{1E4F0}-\\x{1E4F9}\\x{1E5F1}-\\x{1E5FA}"
#define LATER_P                                                                        \
    "\\x{1B4E}-\\x{1B4F}\\x{1B7F}\\x{10D6E}\\x{113D4}-\\x{113D5}\\x{113D7}-\\x{113D8}" \
    "\\x{11B00}-\\x{11B09}\\x{11BE1}\\x{11F43}-\\x{11F4F}\\x{16D6D}-\\x{16D6F}\\x{1E5FF}"
#define LATER_S                                                                                      \
    "\\x{2427}-\\x{2429}\\x{2FFC}-\\x{2FFF}\\x{31E4}-\\x{31E5}\\x{31EF}\\x{10D8E}-\\x{10D8F}"        \
    "\\x{1CC00}-\\x{1CCEF}\\x{1CD00}-\\x{1CEB3}\\x{1F6DC}\\x{1F774}-\\x{1F776}\\x{1F77B}-\\x{1F77F}" \
    "\\x{1F7D9}\\x{1F8B2}-\\x{1F8BB}\\x{1F8C0}-\\x{1F8C1}\\x{1FA75}-\\x{1FA77}\\x{1FA87}-\\x{1FA89}" \
    "\\x{1FA8F}\\x{1FAAD}-\\x{1FAAF}\\x{1FABB}-\\x{1FABF}\\x{1FAC6}\\x{1FACE}-\\x{1FACF}"            \
    "\\x{1FADA}-\\x{1FADC}\\x{1FADF}\\x{1FAE8}-\\x{1FAE9}\\x{1FAF7}-\\x{1FAF8}\\x{1FBCB}-\\x{1FBEF}"
#define LATER_L LATER_LU LATER_LL LATER_LM LATER_LO

static const struct {
    const char *name, *members;
} classes[] = {
    { "\\s", SPACE },
    { "\\p{L}", "\\p{L}" LATER_L },
    { "\\p{N}", "\\p{N}" LATER_N },
    { "\\p{M}", "\\p{M}" LATER_M },
    { "\\p{P}", "\\p{P}" LATER_P },
    { "\\p{S}", "\\p{S}" LATER_S },
    { "\\p{Lu}", "\\p{Lu}" LATER_LU },
    { "\\p{Ll}", "\\p{Ll}" LATER_LL },
    { "\\p{Lt}", "\\p{Lt}" },
    { "\\p{Lm}", "\\p{Lm}" LATER_LM },
    { "\\p{Lo}", "\\p{Lo}" LATER_LO },
};

#define SUFFIX "'s|'t|'re|'ve|'m|'ll|'d"
#define TAIL "|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
#define REST "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*" TAIL
#define LOWER "[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]"
#define UPPER "[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]"
#define BEFORE_WORD "[^\\r\\n\\p{L}\\p{N}]?"
#define CASES(suffix) BEFORE_WORD UPPER "*" LOWER "+" suffix "|" BEFORE_WORD UPPER "+" LOWER "*" suffix
#define CASES_REST "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*" TAIL

/* covers: it matches wherever a character begins, so that it need not be looked for. */
static const struct {
    const char *regex;
    SplitAtCut at_cut;
    bool covers;
} published[SPLIT_COUNT] = {
    [SPLIT_GPT2] = { SUFFIX "| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+", SPLIT_BEGINS, true },
    [SPLIT_LLAMA3] = { "(?i:" SUFFIX ")|" BEFORE_WORD "\\p{L}+|\\p{N}{1,3}" REST, SPLIT_BEGINS, true },
    [SPLIT_QWEN] = { "(?i:" SUFFIX ")|" BEFORE_WORD "\\p{L}+|\\p{N}" REST, SPLIT_BEGINS, true },
    [SPLIT_O200K] = { CASES("(?i:" SUFFIX ")?") "|\\p{N}{1,3}" CASES_REST, SPLIT_BEGINS, true },
    [SPLIT_TEKKEN] = { CASES("") "|\\p{N}" CASES_REST, SPLIT_BEGINS, true },
    [SPLIT_DIGITS] = { "\\p{N}", SPLIT_KEEPS },
    [SPLIT_DEEPSEEK_NUMBERS] = { "\\p{N}{1,3}", SPLIT_KEEPS },
    [SPLIT_DEEPSEEK_EAST_ASIA] = { "[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+", SPLIT_KEEPS },
    [SPLIT_DEEPSEEK] = { "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?"
                         "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\\r\\n]*" TAIL,
                         SPLIT_BEGINS },
};

/* Backtracking beyond the machine stack happens only on odd text; the JIT may then take this much. */
enum { JIT_STACK_START_BYTES = 32 << 10, JIT_STACK_MAX_BYTES = 16 << 20 };

/* Steps that an unpublished pattern may take: in any text, and for each byte. What a repeat reads in vain is not
 * counted, so none is of more characters than REPEATS. */
enum { STEPS_ANYWAY = 1 << 18, STEPS_A_BYTE = 512, REPEATS = 255 };

/* A text, or else a pattern. */
struct Splitter {
    char *text;
    int64_t text_size;
    pcre2_code *code;
    int (*match)(const pcre2_code *, PCRE2_SPTR, PCRE2_SIZE, PCRE2_SIZE, uint32_t, pcre2_match_data *,
                 pcre2_match_context *);
    SplitKind kind;
};

struct SplitterWork {
    const Splitter *splitter;
    int64_t steps;     /* that it may still take */
    PCRE2_SIZE before; /* where the last one was */
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
    int64_t match_from, match_to; /* a match that was found behind a span without one; match_from 0: none */
};

const char *split_regex(SplitKind kind) { return published[kind].regex; }

/* ---- rewriting an expression ---- */

typedef struct {
    const char *at; /* what is left of the expression */
    char *text;
    int64_t size, capacity;
    int folding; /* how many groups are open inside of and with (?i: */
} Rewriting;

static Err put(Rewriting *r, const char *text, int64_t size)
{
    TRY(grow_to(&r->text, &r->capacity, r->size + size + 1));
    memcpy(r->text + r->size, text, (size_t)size);
    r->size += size;
    r->text[r->size] = 0;
    return ERR_OK;
}

static Err put_text(Rewriting *r, const char *text) { return put(r, text, (int64_t)strlen(text)); }

static Err not_known(const char *at)
{
    return err_set(ERR_DATA, "at '%.40s' it has what is not supported in a split pattern", at);
}

/* The class that is named here; NULL: none is. */
static const char *class_at(const char *at, size_t *size)
{
    for (size_t i = 0; i < sizeof classes / sizeof *classes; i++) {
        *size = strlen(classes[i].name);
        if (strncmp(at, classes[i].name, *size) == 0) return classes[i].members;
    }
    return NULL;
}

/* A character, an escaped one, or a class. */
static Err rewrite_item(Rewriting *r, bool inside)
{
    size_t size;
    const char *members = class_at(r->at, &size);
    if (members) {
        if (r->folding && members[1] == 'p') return not_known(r->at); /* \p{Lu} would have all letters there */
        if (!inside) TRY(put_text(r, "["));
        TRY(put_text(r, members));
        if (!inside) TRY(put_text(r, "]"));
    } else if (*r->at == '\\') {
        size = 2;
        if (!strncmp(r->at, "\\S", 2) && !inside) return r->at += 2, put_text(r, "[^" SPACE "]");
        if (!r->at[1] || !strchr("rnt!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ ", r->at[1])) return not_known(r->at);
        TRY(put(r, r->at, 2));
    } else { /* line ends are written as in the published expressions, which are known by that */
        size = 1;
        if (*r->at == '\r') TRY(put_text(r, "\\r"));
        else if (*r->at == '\n') TRY(put_text(r, "\\n"));
        else TRY(put(r, r->at, 1));
    }
    r->at += size;
    return ERR_OK;
}

static Err rewrite_set(Rewriting *r)
{
    const bool without = r->at[1] == '^';
    TRY(put(r, r->at, 1 + without));
    r->at += 1 + without;
    if (*r->at == ']') return not_known(r->at);
    while (*r->at && *r->at != ']') {
        if (*r->at == '[' || !strncmp(r->at, "&&", 2)) return not_known(r->at);
        TRY(rewrite_item(r, true));
    }
    return *r->at ? (r->at++, put_text(r, "]")) : not_known("[");
}

static Err rewrite_group(Rewriting *r)
{
    static const char *const starts[] = { "(?:", "(?i:", "(?!", "(?=" };
    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) {
        if (strncmp(r->at, starts[i], strlen(starts[i])) != 0) continue;
        if (r->folding || i == 1) r->folding++;
        r->at += strlen(starts[i]);
        return put_text(r, starts[i]);
    }
    if (r->at[1] == '?' || r->at[1] == '*') return not_known(r->at);
    if (r->folding) r->folding++;
    r->at++;
    return put_text(r, "(?:");
}

/* {1,3} and the like. Oniguruma has another meaning for {,3}, {3}? and {3}+. */
static Err rewrite_count(Rewriting *r)
{
    static const char digits[] = "0123456789";
    const size_t low = strspn(r->at + 1, digits);
    const char *end = r->at + 1 + low;
    if (*end == ',') end += 1 + strspn(end + 1, digits);
    if (low == 0 || *end != '}' || end[1] == '?' || end[1] == '+') return not_known(r->at);
    if (strtol(r->at + 1, NULL, 10) > REPEATS || (r->at[1 + low] == ',' && strtol(r->at + 2 + low, NULL, 10) > REPEATS))
        return err_set(ERR_DATA, "at '%.40s' it repeats something more than %d times, which is not supported", r->at,
                       REPEATS);
    TRY(put(r, r->at, end + 1 - r->at));
    r->at = end + 1;
    return ERR_OK;
}

static Err rewrite(Rewriting *r)
{
    while (*r->at) {
        switch (*r->at) {
        case '[': TRY(rewrite_set(r)); break;
        case '(': TRY(rewrite_group(r)); break;
        case '{': TRY(rewrite_count(r)); break;
        case '.':
        case '^':
        case '$': return not_known(r->at);
        case ')': /* a repeated group can take time that grows exponentially */
            if (r->at[1] && strchr("*+{", r->at[1])) return not_known(r->at);
            r->folding -= r->folding > 0;
            TRY(rewrite_item(r, false));
            break;
        default: TRY(rewrite_item(r, false));
        }
    }
    return ERR_OK;
}

static Err rewritten(const char *regex, Rewriting *out)
{
    *out = (Rewriting){ .at = regex };
    Err err = rewrite(out);
    if (!err) return ERR_OK;
    free(out->text);
    return err_prefix(err, "split pattern '%s'", regex);
}

/* ---- matching ---- */

static Err pattern_error(const char *doing, int code)
{
    char text[128] = "";
    pcre2_get_error_message(code, (PCRE2_UCHAR *)text, sizeof text);
    return err_set(ERR_INTERNAL, "%s: PCRE2: %s (%d)", doing, text, code);
}

static Err compile(const Rewriting *r, bool covers, Splitter *s)
{
    int code;
    uint32_t empty = 0;
    PCRE2_SIZE where;
    const uint32_t options =
        PCRE2_UTF | (covers ? PCRE2_ANCHORED : 0) | (s->kind == SPLIT_COUNT ? PCRE2_AUTO_CALLOUT : 0);
    s->code = pcre2_compile((PCRE2_SPTR)r->text, (PCRE2_SIZE)r->size, options, &code, &where, NULL);
    if (!s->code) return err_as(pattern_error("it cannot be compiled", code), ERR_DATA);
    pcre2_pattern_info(s->code, PCRE2_INFO_MATCHEMPTY, &empty);
    if (empty) return err_set(ERR_DATA, "it can match the empty text, which is not supported");
    /* without a JIT for this processor pcre2_match interprets: slower, same result */
    s->match = pcre2_jit_compile(s->code, PCRE2_JIT_COMPLETE) ? pcre2_match : pcre2_jit_match;
    return ERR_OK;
}

/* Published expressions are known by what they are rewritten to. */
static Err find_published(const Rewriting *r, SplitKind *out)
{
    *out = SPLIT_COUNT;
    for (int kind = 0; kind < SPLIT_COUNT && *out == SPLIT_COUNT; kind++) {
        Rewriting known;
        TRY(rewritten(published[kind].regex, &known));
        if (strcmp(known.text, r->text) == 0) *out = (SplitKind)kind;
        free(known.text);
    }
    return ERR_OK;
}

static Err open_rewritten(const Rewriting *r, Splitter *s)
{
    TRY(find_published(r, &s->kind));
    return compile(r, s->kind < SPLIT_COUNT && published[s->kind].covers, s);
}

Err splitter_open(const char *regex, Splitter **out)
{
    Rewriting r;
    if (!*regex) return err_set(ERR_DATA, "a split pattern is empty");
    TRY(rewritten(regex, &r));
    Splitter *s = calloc(1, sizeof *s);
    Err err = s ? open_rewritten(&r, s) : err_set(ERR_MEMORY, "no memory for a pattern");
    free(r.text);
    if (!err) return *out = s, ERR_OK;
    splitter_close(s);
    return err_prefix(err, "split pattern '%s'", regex);
}

Err splitter_open_text(const char *text, int64_t size, Splitter **out)
{
    Splitter *s = calloc(1, sizeof *s);
    char *copy = malloc((size_t)size);
    if (!s || !copy) return free(s), free(copy), err_set(ERR_MEMORY, "no memory for a pattern");
    *s = (Splitter){ .text = memcpy(copy, text, (size_t)size), .text_size = size, .kind = SPLIT_COUNT };
    *out = s;
    return ERR_OK;
}

SplitKind splitter_kind(const Splitter *s) { return s->kind; }

SplitAtCut splitter_at_cut(const Splitter *s)
{
    return s->kind < SPLIT_COUNT ? published[s->kind].at_cut : SPLIT_ANYTHING;
}

void splitter_close(Splitter *s)
{
    if (!s) return;
    pcre2_code_free(s->code);
    free(s->text);
    free(s);
}

/* PCRE2 calls this before each item of an unpublished pattern that it tries. How far it read since then counts, too. */
static int count_step(pcre2_callout_block *b, void *user)
{
    SplitterWork *w = user;
    const PCRE2_SIZE now = b->current_position;
    w->steps -= 1 + (int64_t)(now > w->before ? now - w->before : w->before - now);
    w->before = now;
    return w->steps < 0 ? PCRE2_ERROR_CALLOUT : 0;
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
    pcre2_set_callout(w->context, count_step, w);
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

void splitter_work_allow(SplitterWork *w, int64_t size) { w->steps = STEPS_ANYWAY + STEPS_A_BYTE * size; }

/* The next match from `at` on; *from = size: there is none. */
static void find_text(const Splitter *s, const char *text, int64_t size, int64_t at, int64_t *from, int64_t *to)
{
    const char *found = memmem(text + at, (size_t)(size - at), s->text, (size_t)s->text_size);
    *from = found ? found - text : size;
    *to = *from + s->text_size;
}

static Err find_match(SplitterWork *w, const char *text, int64_t size, int64_t at, int64_t *from, int64_t *to)
{
    w->before = (PCRE2_SIZE)at;
    const int n = w->splitter->match(w->splitter->code, (PCRE2_SPTR)text, (PCRE2_SIZE)size, (PCRE2_SIZE)at,
                                     PCRE2_NO_UTF_CHECK, w->match, w->context);
    const PCRE2_SIZE *found = pcre2_get_ovector_pointer(w->match);
    *from = n < 0 ? size : (int64_t)found[0];
    *to = n < 0 ? size : (int64_t)found[1];
    if (n >= 0 || n == PCRE2_ERROR_NOMATCH) return ERR_OK;
    if (w->splitter->kind != SPLIT_COUNT) return pattern_error("cannot split text into pieces", n);
    return err_set(ERR_DATA, "its split pattern takes too long");
}

Err splitter_next(SplitterWork *w, const char *text, int64_t size, int64_t at, int64_t *end, bool *is_match)
{
    int64_t from, to;
    *is_match = true;
    *end = w->match_to;
    if (at == w->match_from && at > 0) return ERR_OK;
    w->match_from = 0;
    if (w->splitter->text) find_text(w->splitter, text, size, at, &from, &to);
    else TRY(find_match(w, text, size, at, &from, &to));
    *is_match = from == at;
    *end = *is_match ? to : from;
    if (*end <= at) return err_set(ERR_INTERNAL, "a split pattern matched nothing");
    if (*is_match || from == size) return ERR_OK;
    w->match_from = from;
    w->match_to = to;
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
    return size >= 3 &&
           (!memcmp(text, "\xE3\x80\x81", 3) || !memcmp(text, "\xE3\x80\x82", 3) || !memcmp(text, "\xEF\xBC\x8C", 3));
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
