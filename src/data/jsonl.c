/*
 * A machine that takes one byte after the other; its states are the places between two bytes. Strings, which are most
 * of any line, are passed on in runs.
 */
#include "data/jsonl.h"

#include <string.h>

#include "base/utf8.h"
#include "data/grow.h"

enum State {
    LINE, /* before the object */
    FIRST_NAME,
    NAME,
    COLON,
    VALUE,
    FIRST_ITEM,
    STRING,
    ESCAPE,
    HEX,
    NUMBER,
    WORD, /* true, false, null */
    AFTER,
    DONE
};

enum Sink { SKIPPED, COMPARED, WANTED }; /* what becomes of a string */

enum { END = -1 }; /* instead of a byte */

/* A number so far; see number_step. */
enum Step { SIGN, ZERO, DIGITS, POINT, FRACTION, E, E_SIGN, EXPONENT, BROKEN };

static Err scan_error(const JsonlScan *s, int64_t at, const char *what)
{
    return err_set(ERR_DATA, "column %lld: %s", (long long)(s->column + at) + 1, what);
}

static bool is_blank(int c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; }

/* ---- the key ---- */

static Err key_error(const char *text, const char *what)
{
    err_set(ERR_CONFIG, "the key '%.*s' %s", JSONL_KEY_BYTES, text, what);
    return err_hint("a member's name, or several from the outside in: meta.body; a dot in a name is '\\.'");
}

Err jsonl_key(const char *text, JsonlKey *out)
{
    int n = 0;
    *out = (JsonlKey){ 0 };
    if (strlen(text) >= JSONL_KEY_BYTES) return key_error(text, "is too long");
    strcpy(out->text, text);
    for (const char *at = text;; at++) {
        if (*at && *at != '.') {
            if (*at == '\\' && (at[1] == '.' || at[1] == '\\')) at++;
            out->names[n++] = *at;
            continue;
        }
        if (n == out->start[out->parts]) return key_error(text, "has an empty name");
        out->start[++out->parts] = n;
        if (!*at) return ERR_OK;
        if (out->parts == JSONL_KEY_PARTS) return key_error(text, "has too many names");
    }
}

/* The part of the key that a member of the present object may be. */
static int key_part(const JsonlScan *s) { return s->on_path - 1; }

static bool is_on_path(const JsonlScan *s) { return s->depth == s->on_path; }

/* Notes a member's name. One that does not fit ends the list. */
static void note_member(JsonlScan *s, const char *bytes, int64_t size)
{
    if (s->depth != 1 || s->members_bytes + size >= JSONL_MEMBERS_BYTES) return;
    memcpy(s->members + s->members_bytes, bytes, (size_t)size);
    s->members_bytes += (int)size;
    s->members[s->members_bytes] = 0;
}

/* Names the member that may be meant. A line as it is would be trained on with its brackets and names. */
static Err hint_members(const JsonlScan *s, bool missing)
{
    if (!s->members_bytes) return ERR_DATA;
    if (missing)
        return err_hint("the line has the members %s: --key NAME takes another; --skip-missing passes over "
                        "lines where it is missing or null",
                        s->members);
    return err_hint("the line has the members %s: --key NAME takes another; lines without it are left out by "
                    "`jq -c 'select(.%s | type == \"string\")'`",
                    s->members, s->key->text);
}

static void compare_name(JsonlScan *s, const char *bytes, int64_t size)
{
    note_member(s, bytes, size);
    const JsonlKey *k = s->key;
    int from = k->start[key_part(s)] + s->name_at, left = k->start[key_part(s) + 1] - from;
    if (s->name_at < 0) return;
    bool same = size <= left && memcmp(k->names + from, bytes, (size_t)size) == 0;
    s->name_at = same ? s->name_at + (int)size : -1;
}

/* The name of a member has ended: is it on the way to the text? */
static Err take_name(JsonlScan *s)
{
    s->state = COLON;
    if (!is_on_path(s)) return ERR_OK;
    int part = key_part(s);
    s->matched = s->name_at == s->key->start[part + 1] - s->key->start[part];
    if (s->matched && s->seen[part]) return err_set(ERR_DATA, "the member '%s' occurs twice", s->key->text);
    s->seen[part] |= s->matched;
    return ERR_OK;
}

/* ---- strings ---- */

static Err put(JsonlScan *s, const char *bytes, int64_t size, JsonlText *out)
{
    if (s->sink == COMPARED) compare_name(s, bytes, size);
    if (s->sink != WANTED) return ERR_OK;
    TRY(grow_to(&out->text, &out->capacity, out->size + size));
    memcpy(out->text + out->size, bytes, (size_t)size);
    out->size += size;
    return ERR_OK;
}

static Err put_code(JsonlScan *s, uint32_t code, JsonlText *out)
{
    char bytes[4];
    return put(s, bytes, utf8_put(bytes, code), out);
}

/* Half of a pair that has waited in vain. */
static Err put_lone_half(JsonlScan *s, JsonlText *out)
{
    if (!s->high) return ERR_OK;
    s->high = 0;
    return put_code(s, 0xFFFD, out);
}

static Err take_code(JsonlScan *s, JsonlText *out)
{
    uint32_t c = s->code, high = s->high;
    bool low = c >= 0xDC00 && c <= 0xDFFF;
    s->state = STRING;
    if (high && low) {
        s->high = 0;
        return put_code(s, 0x10000u + ((high - 0xD800) << 10) + (c - 0xDC00), out);
    }
    TRY(put_lone_half(s, out));
    if (c >= 0xD800 && c < 0xDC00) s->high = c;
    return s->high ? ERR_OK : put_code(s, low ? 0xFFFD : c, out);
}

static Err take_hex(JsonlScan *s, int64_t at, int c, JsonlText *out)
{
    int lower = c | 0x20;
    bool digit = c >= '0' && c <= '9';
    if (!digit && (lower < 'a' || lower > 'f'))
        return scan_error(s, at, "\\u is not followed by four hexadecimal digits");
    s->code = s->code << 4 | (uint32_t)(digit ? c - '0' : lower - 'a' + 10);
    return ++s->step == 4 ? take_code(s, out) : ERR_OK;
}

static Err take_escape(JsonlScan *s, int64_t at, int c, JsonlText *out)
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    if (c == 'u') {
        s->state = HEX;
        s->step = 0;
        s->code = 0;
        return ERR_OK;
    }
    const char *name = c ? strchr(names, c) : NULL;
    if (!name) return scan_error(s, at, "unknown escape in a string");
    s->state = STRING;
    TRY(put_lone_half(s, out));
    return put(s, &values[name - names], 1, out);
}

static void begin_string(JsonlScan *s, enum Sink sink)
{
    s->after_string = s->state == VALUE || s->state == FIRST_ITEM ? AFTER : COLON;
    s->state = STRING;
    s->sink = sink;
    s->high = 0;
}

/* Bytes of a string from *at on: the run up to an escape or the end, and that. */
static Err take_string(JsonlScan *s, const uint8_t *bytes, int64_t size, int64_t *at, JsonlText *out)
{
    int64_t from = *at, to = from;
    while (to < size && bytes[to] >= 0x20 && bytes[to] != '"' && bytes[to] != '\\') to++;
    if (to > from) {
        TRY(put_lone_half(s, out));
        TRY(put(s, (const char *)bytes + from, to - from, out));
    }
    *at = to;
    if (to == size) return ERR_OK;
    if (bytes[to] < 0x20) return scan_error(s, to, "a control character in a string");
    ++*at;
    if (bytes[to] == '\\') {
        s->state = ESCAPE;
        return ERR_OK;
    }
    TRY(put_lone_half(s, out));
    s->state = AFTER;
    return s->after_string == COLON ? take_name(s) : ERR_OK;
}

/* ---- numbers and words ---- */

static int number_step(int step, int c)
{
    bool digit = c >= '0' && c <= '9', e = c == 'e' || c == 'E';
    switch (step) {
    case SIGN: return c == '0' ? ZERO : digit ? DIGITS : BROKEN;
    case ZERO: return c == '.' ? POINT : e ? E : BROKEN;
    case DIGITS: return digit ? DIGITS : c == '.' ? POINT : e ? E : BROKEN;
    case POINT: return digit ? FRACTION : BROKEN;
    case FRACTION: return digit ? FRACTION : e ? E : BROKEN;
    case E: return digit ? EXPONENT : c == '+' || c == '-' ? E_SIGN : BROKEN;
    default: return digit ? EXPONENT : BROKEN;
    }
}

static bool number_may_end(int step) { return step == ZERO || step == DIGITS || step == FRACTION || step == EXPONENT; }

/* A byte of a number; one that does not belong to it is left for what comes after. */
static Err take_number(JsonlScan *s, int64_t *at, int c)
{
    bool inside = strchr("0123456789+-.eE", c) && c;
    if (!inside && !number_may_end(s->step)) return scan_error(s, *at, "not a JSON value");
    if (!inside) {
        s->state = AFTER;
        return ERR_OK;
    }
    s->step = number_step(s->step, c);
    if (s->step == BROKEN) return scan_error(s, *at, "not a JSON value");
    ++*at;
    return ERR_OK;
}

static Err take_word(JsonlScan *s, int64_t at, int c)
{
    if (c != *s->word) return scan_error(s, at, "not a JSON value");
    if (!*++s->word) s->state = AFTER;
    return ERR_OK;
}

/* ---- values ---- */

static Err begin_container(JsonlScan *s, int64_t at, int c, bool leads)
{
    if (s->depth == JSONL_DEPTH_MAX) return scan_error(s, at, "values are nested too deep");
    s->open[s->depth++] = (char)c;
    if (leads) s->on_path++;
    s->state = c == '{' ? FIRST_NAME : FIRST_ITEM;
    return ERR_OK;
}

static Err begin_value(JsonlScan *s, int64_t at, int c)
{
    bool wanted = s->matched, last = s->on_path == s->key->parts;
    s->matched = false;
    if (c == 'n' && s->key->skip_missing) wanted = false; /* null is no text */
    if (wanted && c != (last ? '"' : '{'))
        return err_set(ERR_DATA, "the member '%s' %s", s->key->text,
                       c == 'n' ? "is null"
                       : last   ? "is not a string"
                                : "leads through something that is not an object"),
               hint_members(s, c == 'n');
    s->found |= wanted && last;
    if (c == '"') {
        begin_string(s, wanted ? WANTED : SKIPPED);
        return ERR_OK;
    }
    if (c == '{' || c == '[') return begin_container(s, at, c, wanted);
    s->state = WORD;
    s->word = c == 't' ? "rue" : c == 'f' ? "alse" : c == 'n' ? "ull" : NULL;
    if (s->word) return ERR_OK;
    s->state = NUMBER;
    s->step = c == '-' ? SIGN : number_step(SIGN, c);
    return s->step == BROKEN ? scan_error(s, at, "not a JSON value") : ERR_OK;
}

static void end_container(JsonlScan *s)
{
    if (is_on_path(s)) s->on_path--;
    s->state = --s->depth ? AFTER : DONE;
}

static Err after_value(JsonlScan *s, int64_t at, int c)
{
    bool object = s->open[s->depth - 1] == '{';
    if (c == ',') s->state = object ? NAME : VALUE;
    else if (c == (object ? '}' : ']')) end_container(s);
    else return scan_error(s, at, object ? "',' or '}' was expected" : "',' or a closing bracket was expected");
    return ERR_OK;
}

static Err begin_name(JsonlScan *s, int64_t at, int c)
{
    if (c == '}' && s->state == FIRST_NAME) {
        end_container(s);
        return ERR_OK;
    }
    if (c != '"')
        return scan_error(s, at, s->state == NAME ? "a member was expected after ','" : "a string was expected");
    begin_string(s, is_on_path(s) ? COMPARED : SKIPPED);
    if (is_on_path(s) && s->members_bytes) note_member(s, ", ", 2);
    s->name_at = 0;
    return ERR_OK;
}

/* A byte between the parts of a value. */
static Err take_mark(JsonlScan *s, int64_t at, int c)
{
    switch (s->state) {
    case LINE:
        if (c == 0xEF) /* the first byte of a byte order mark in UTF-8 */
            return scan_error(s, at, "a line must hold one JSON object: save the file without a byte order mark");
        if (c != '{') return scan_error(s, at, "a line must hold one JSON object");
        return begin_container(s, at, c, true);
    case FIRST_NAME:
    case NAME: return begin_name(s, at, c);
    case COLON:
        if (c != ':') return scan_error(s, at, "':' was expected");
        s->state = VALUE;
        return ERR_OK;
    case FIRST_ITEM:
        if (c == ']') {
            end_container(s);
            return ERR_OK;
        }
        return begin_value(s, at, c);
    case VALUE: return begin_value(s, at, c);
    case AFTER: return after_value(s, at, c);
    default: return scan_error(s, at, "something follows the object");
    }
}

/* ---- a line ---- */

void jsonl_begin(JsonlScan *s, const JsonlKey *key)
{
    s->key = key;
    s->column = 0;
    s->depth = s->on_path = 0;
    s->state = LINE;
    s->matched = s->found = false;
    s->members_bytes = 0;
    memset(s->seen, 0, sizeof s->seen);
}

Err jsonl_feed(JsonlScan *s, const char *bytes, int64_t size, JsonlText *out)
{
    const uint8_t *b = (const uint8_t *)bytes;
    for (int64_t at = 0; at < size;) {
        switch (s->state) {
        case STRING: TRY(take_string(s, b, size, &at, out)); continue;
        case ESCAPE: TRY(take_escape(s, at, b[at], out)); break;
        case HEX: TRY(take_hex(s, at, b[at], out)); break;
        case NUMBER: TRY(take_number(s, &at, b[at])); continue;
        case WORD: TRY(take_word(s, at, b[at])); break;
        default:
            if (!is_blank(b[at])) TRY(take_mark(s, at, b[at]));
        }
        at++;
    }
    s->column += size;
    return ERR_OK;
}

Err jsonl_end(JsonlScan *s, JsonlText *out)
{
    if (s->state == STRING || s->state == ESCAPE || s->state == HEX) return scan_error(s, 0, "a string does not end");
    TRY(jsonl_feed(s, "\n", 1, out)); /* ends a number */
    if (s->state != DONE) return take_mark(s, -1, END);
    if (!s->found && !s->key->skip_missing)
        return err_set(ERR_DATA, "there is no member '%s'", s->key->text), hint_members(s, true);
    return ERR_OK;
}

bool jsonl_is_missing(const JsonlScan *s) { return !s->found; }

bool jsonl_blank(const JsonlScan *s) { return s->state == LINE; }

bool jsonl_begins(const char *text, int64_t size)
{
    static const JsonlKey none = { .text = "", .names = "\x01", .start = { 0, 1 }, .parts = 1 };
    JsonlScan s;
    JsonlText unused = { 0 };
    if (size >= 3 && memcmp(text, "\xEF\xBB\xBF", 3) == 0) text += 3, size -= 3;
    while (size && is_blank(*text)) text++, size--;
    if (size < 2 || *text != '{') return false;
    const char *end = memchr(text, '\n', (size_t)size);
    jsonl_begin(&s, &none);
    if (jsonl_feed(&s, text, end ? end - text : size, &unused)) return false;
    return s.state == DONE || !end;
}

Err jsonl_member(const char *line, int64_t size, const char *key, JsonlText *out)
{
    JsonlScan s;
    JsonlKey k;
    TRY(jsonl_key(key, &k));
    out->size = 0;
    jsonl_begin(&s, &k);
    TRY(jsonl_feed(&s, line, size, out));
    return jsonl_end(&s, out);
}
