#include "data/jsonl.h"

#include <string.h>

#include "data/grow.h"
#include "data/utf8.h"

enum { DEPTH_MAX = 256, END = -1 };

typedef struct {
    const uint8_t *text;
    int64_t at, size;
    char open[DEPTH_MAX]; /* '{' or '[' of the values we are inside of */
    int depth;
} Scan;

static Err scan_error(const Scan *s, const char *what)
{
    return err_set(ERR_DATA, "column '%lld': %s", (long long)s->at + 1, what);
}

static int peek(const Scan *s) { return s->at < s->size ? s->text[s->at] : END; }

static void skip_blanks(Scan *s)
{
    for (int c; c = peek(s), c == ' ' || c == '\t' || c == '\r' || c == '\n';) s->at++;
}

static Err expect(Scan *s, char c, const char *what)
{
    skip_blanks(s);
    if (peek(s) != c) return scan_error(s, what);
    s->at++;
    return ERR_OK;
}

/* ---- scalars ---- */

static int hex_value(int c)
{
    if (c >= '0' && c <= '9') return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Four hex digits; -1 if they are not. */
static int32_t hex4(const Scan *s, int64_t at)
{
    int32_t v = 0;
    if (at + 4 > s->size) return -1;
    for (int i = 0; i < 4; i++) {
        int h = hex_value(s->text[at + i]);
        if (h < 0) return -1;
        v = v << 4 | h;
    }
    return v;
}

/* After "\u"; leaves `at` behind the escape, both halves of a pair included. */
static Err scan_code_point(Scan *s, uint32_t *out)
{
    int32_t c = hex4(s, s->at), low = -1;
    if (c < 0) return scan_error(s, "\\u is not followed by four hexadecimal digits");
    s->at += 4;
    *out = (uint32_t)c;
    if (c < 0xD800 || c > 0xDFFF) return ERR_OK;
    if (c < 0xDC00 && s->at + 6 <= s->size && s->text[s->at] == '\\' && s->text[s->at + 1] == 'u')
        low = hex4(s, s->at + 2);
    if (low < 0xDC00 || low > 0xDFFF) {
        *out = 0xFFFD;
        return ERR_OK;
    }
    *out = 0x10000u + ((uint32_t)(c - 0xD800) << 10) + (uint32_t)(low - 0xDC00);
    s->at += 6;
    return ERR_OK;
}

static Err scan_escape(Scan *s, char *out, int64_t *n)
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    int c = peek(s);
    uint32_t code = 0;
    const char *name = c > 0 ? strchr(names, c) : NULL;
    if (!name && c != 'u') return scan_error(s, "unknown escape in a string");
    s->at++;
    if (name) {
        out[(*n)++] = values[name - names];
        return ERR_OK;
    }
    TRY(scan_code_point(s, &code));
    *n += utf8_put(out + *n, code);
    return ERR_OK;
}

/* A string, decoded behind the first `keep` bytes of `out`; *size = its length. */
static Err scan_string(Scan *s, JsonlText *out, int64_t keep, int64_t *size)
{
    int64_t n = keep;
    TRY(expect(s, '"', "a string was expected"));
    const uint8_t *end = memchr(s->text + s->at, '"', (size_t)(s->size - s->at));
    /* decoding never makes text longer, so room up to the first quote is a good start */
    TRY(grow_to(&out->text, &out->capacity, keep + (end ? end - (s->text + s->at) : 0) + 4));
    for (;;) {
        int c = peek(s);
        if (c == END) return scan_error(s, "a string does not end");
        if (c < 0x20) return scan_error(s, "a control character in a string");
        s->at++;
        if (c == '"') break;
        if (n + 4 > out->capacity) TRY(grow_to(&out->text, &out->capacity, n + 4));
        if (c == '\\') TRY(scan_escape(s, out->text, &n));
        else out->text[n++] = (char)c;
    }
    *size = n - keep;
    return ERR_OK;
}

static bool scan_digits(Scan *s)
{
    int64_t from = s->at;
    while (peek(s) >= '0' && peek(s) <= '9') s->at++;
    return s->at > from;
}

static Err scan_number(Scan *s)
{
    bool zero, ok;
    if (peek(s) == '-') s->at++;
    zero = peek(s) == '0';
    int64_t from = s->at;
    ok = scan_digits(s) && !(zero && s->at > from + 1);
    if (ok && peek(s) == '.') s->at++, ok = scan_digits(s);
    if (ok && (peek(s) == 'e' || peek(s) == 'E')) {
        s->at++;
        if (peek(s) == '+' || peek(s) == '-') s->at++;
        ok = scan_digits(s);
    }
    return ok ? ERR_OK : scan_error(s, "not a JSON value");
}

static Err scan_scalar(Scan *s, JsonlText *scratch, int64_t keep)
{
    static const char *const words[] = { "true", "false", "null" };
    int64_t size;
    if (peek(s) == '"') return scan_string(s, scratch, keep, &size);
    for (int i = 0; i < 3; i++) {
        int64_t n = (int64_t)strlen(words[i]);
        if (s->size - s->at >= n && memcmp(s->text + s->at, words[i], (size_t)n) == 0) {
            s->at += n;
            return ERR_OK;
        }
    }
    return scan_number(s);
}

/* ---- values of any kind, and the object of the line ---- */

static Err skip_key(Scan *s, JsonlText *scratch, int64_t keep)
{
    int64_t size;
    TRY(scan_string(s, scratch, keep, &size));
    return expect(s, ':', "':' was expected");
}

/* Where a value must stand: enters containers until a scalar or an empty container is behind us. */
static Err skip_inwards(Scan *s, JsonlText *scratch, int64_t keep)
{
    for (;;) {
        skip_blanks(s);
        int c = peek(s);
        if (c != '{' && c != '[') return scan_scalar(s, scratch, keep);
        if (s->depth == DEPTH_MAX) return scan_error(s, "values are nested too deep");
        s->open[s->depth++] = (char)c;
        s->at++;
        skip_blanks(s);
        if (peek(s) == (c == '{' ? '}' : ']')) {
            s->at++;
            s->depth--;
            return ERR_OK;
        }
        if (c == '{') TRY(skip_key(s, scratch, keep));
    }
}

/* Any value; the first `keep` bytes of scratch stay. */
static Err skip_value(Scan *s, JsonlText *scratch, int64_t keep)
{
    s->depth = 0;
    TRY(skip_inwards(s, scratch, keep));
    while (s->depth > 0) {
        bool object = s->open[s->depth - 1] == '{';
        skip_blanks(s);
        if (peek(s) == ',') {
            s->at++;
            if (object) TRY(skip_key(s, scratch, keep));
            TRY(skip_inwards(s, scratch, keep));
            continue;
        }
        TRY(expect(s, object ? '}' : ']', "',' or a closing bracket was expected"));
        s->depth--;
    }
    return ERR_OK;
}

/* One member; *found when it was the wanted one. out->size = bytes of the wanted text so far. */
static Err scan_member(Scan *s, const char *key, JsonlText *out, bool *found)
{
    int64_t size;
    TRY(scan_string(s, out, out->size, &size));
    bool wanted = size == (int64_t)strlen(key) && memcmp(out->text + out->size, key, (size_t)size) == 0;
    TRY(expect(s, ':', "':' was expected"));
    skip_blanks(s);
    if (!wanted) return skip_value(s, out, out->size);
    if (*found) return err_set(ERR_DATA, "the member '%s' occurs twice", key);
    if (peek(s) != '"') return err_set(ERR_DATA, "the member '%s' is not a string", key);
    *found = true;
    return scan_string(s, out, 0, &out->size);
}

Err jsonl_member(const char *line, int64_t size, const char *key, JsonlText *out)
{
    Scan s = { .text = (const uint8_t *)line, .size = size };
    bool found = false;
    out->size = 0;
    TRY(expect(&s, '{', "a line must hold one JSON object"));
    skip_blanks(&s);
    while (peek(&s) != '}') {
        TRY(scan_member(&s, key, out, &found));
        skip_blanks(&s);
        if (peek(&s) == '}') break;
        TRY(expect(&s, ',', "',' or '}' was expected"));
        skip_blanks(&s);
        if (peek(&s) == '}') return scan_error(&s, "a member was expected after ','");
    }
    s.at++;
    skip_blanks(&s);
    if (peek(&s) != END) return scan_error(&s, "something follows the object");
    if (!found) return err_set(ERR_DATA, "there is no member '%s'", key);
    return ERR_OK;
}
