/*
 * The reader hands out Jansson's own values under the name Json; this is the only file that knows. Getters
 * take NULL and the wrong kind and answer NULL or the caller's default, so that a chain of lookups needs one
 * check at its end.
 */
#include <jansson.h>
#undef json_is_string /* Jansson has them as macros, our header as functions */
#undef json_is_number
#undef json_is_object
#undef json_is_array
#undef json_is_null
#undef json_is_true

#include "base/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"

/* ---- reading ---- */

int64_t json_spare_bytes = 256 << 20;

static bool is_word(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '-' || c == '+' ||
           c == '.';
}

/* The place behind the closing quote of the string that begins at `at`, or the end. */
static const char *skip_string(const char *at, const char *end)
{
    for (at++; at < end && *at != '"'; at++)
        if (*at == '\\') at++;
    return at < end ? at + 1 : end;
}

static const char *skip_word(const char *at, const char *end)
{
    for (at++; at < end && is_word(*at);) at++;
    return at;
}

/*
 * At least what Jansson takes of the heap for this text at any moment: malloc's chunks for its values, keys and
 * tables (those being doubled), and four times the longest token for the buffers it passes through. Counted before,
 * because an allocator that fails is no way to stop Jansson: it does not look whether a token's buffer has grown, and
 * reads on behind its end.
 */
static int64_t tree_bytes(const char *text, int64_t size_bytes)
{
    enum { STRING = 80, NUMBER = 32, ROUNDING = 32 << 10 /* large chunks are pages */ };
    static const uint8_t marks[256] = { ['{'] = 224, ['['] = 128, [','] = 24, [':'] = 24 };
    const char *end = text + size_bytes, *next;
    int64_t bytes = ROUNDING, longest = 0;
    for (const char *at = text; at < end; at = next) {
        if (*at == '"') {
            next = skip_string(at, end);
            bytes += STRING + (next - at);
        } else if (is_word(*at)) {
            next = skip_word(at, end);
            bytes += NUMBER;
        } else {
            next = at + 1;
            bytes += marks[(unsigned char)*at];
        }
        if (next - at > longest) longest = next - at;
    }
    return bytes + 4 * longest;
}

static Err check_size(const char *name, const char *text, int64_t size_bytes)
{
    int64_t most = 2 * size_bytes + json_spare_bytes, want = tree_bytes(text, size_bytes);
    if (want <= most) return ERR_OK;
    err_set(ERR_IO, "'%s' is JSON of %lld bytes that would take %lld MiB of memory, %lld MiB are allowed", name,
            (long long)size_bytes, (long long)(want >> 20), (long long)(most >> 20));
    return err_hint("it has far more brackets and commas than text: is it the file that you mean?");
}

Err json_parse(const char *name, const char *text, int64_t size_bytes, Json **out)
{
    json_error_t error;
    *out = NULL;
    TRY(check_size(name, text, size_bytes));
    const char *zero = size_bytes ? memchr(text, 0, (size_t)size_bytes) : NULL;
    if (zero) /* Jansson passes over those that follow a word or a number */
        return err_set(ERR_IO, "'%s' is not valid JSON: a 0 byte at offset %lld", name, (long long)(zero - text));
    *out = json_loadb(text, (size_t)size_bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
    if (*out) return ERR_OK;
    return err_set(ERR_IO, "'%s' is not valid JSON: line %d, column %d: %s", name, error.line, error.column,
                   error.text);
}

static bool is_python_number(const char *word, int64_t length)
{
    static const char *const words[] = { "Infinity", "-Infinity", "NaN" };
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (length == (int64_t)strlen(words[i]) && !memcmp(word, words[i], (size_t)length)) return true;
    return false;
}

Err json_parse_python(const char *name, const char *text, int64_t size_bytes, Json **out)
{
    const char *end = text + size_bytes, *next;
    char *copy = malloc(2 * (size_t)size_bytes + 1), *to = copy;
    *out = NULL;
    if (!copy) return err_set(ERR_MEMORY, "no memory for '%s'", name);
    for (const char *at = text; at < end; at = next) {
        next = *at == '"' ? skip_string(at, end) : is_word(*at) ? skip_word(at, end) : at + 1;
        const bool quoted = is_python_number(at, next - at);
        if (quoted) *to++ = '"';
        memcpy(to, at, (size_t)(next - at));
        to += next - at;
        if (quoted) *to++ = '"';
    }
    const Err err = json_parse(name, copy, to - copy, out);
    free(copy);
    return err;
}

/* ---- reading in parts ---- */

static const char *skip_blanks(const char *at, const char *end)
{
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r')) at++;
    return at;
}

/* Behind a word, a string or what stands in brackets, of whatever kind they are; `at` where there is none. */
static const char *skip_value(const char *at, const char *end)
{
    int64_t depth = 0;
    if (at < end && is_word(*at)) return skip_word(at, end);
    if (at < end && *at == '"') return skip_string(at, end);
    if (at == end || (*at != '{' && *at != '[')) return at;
    do {
        depth += *at == '{' || *at == '[';
        depth -= *at == '}' || *at == ']';
        at = *at == '"' ? skip_string(at, end) : at + 1;
    } while (depth > 0 && at < end);
    return at;
}

/* The member at `at`, and what follows it; NULL if there is none. */
static const char *split_member(const char *at, const char *end, JsonSpan *key, JsonSpan *value)
{
    if (at == end || *at != '"') return NULL;
    *key = (JsonSpan){ at, skip_string(at, end) - at };
    at = skip_blanks(at + key->size_bytes, end);
    if (at == end || *at != ':') return NULL;
    at = skip_blanks(at + 1, end);
    *value = (JsonSpan){ at, skip_value(at, end) - at };
    at = skip_blanks(at + value->size_bytes, end);
    return value->size_bytes && at < end && (*at == ',' || *at == '}') ? at : NULL;
}

static int find_key(JsonSpan quoted, const char *const *keys, int count)
{
    for (int i = 0; i < count; i++)
        if (quoted.size_bytes == (int64_t)strlen(keys[i]) + 2 && !memcmp(quoted.text + 1, keys[i], strlen(keys[i])))
            return i;
    return -1;
}

/* Puts the other members into rest[size_bytes]; 0 where the text is no object of members that come once. */
static int64_t split_object(const char *text, int64_t size_bytes, const char *const *keys, int count, JsonSpan *values,
                            char *rest)
{
    const char *end = text + size_bytes, *at = skip_blanks(text, end), *next;
    JsonSpan key, value;
    int64_t n = 0;
    if (at == end || *at != '{') return 0;
    do {
        rest[n] = n ? ',' : '{';
        n++;
        at = skip_blanks(at + 1, end);
        next = split_member(at, end, &key, &value);
        if (!next) return 0;
        int i = find_key(key, keys, count);
        if (i >= 0 && values[i].text) return 0;
        if (i >= 0) values[i] = value, n--;
        else memcpy(rest + n, at, (size_t)(next - at)), n += next - at;
        at = next;
    } while (*at == ',');
    if (skip_blanks(at + 1, end) != end) return 0;
    if (!n) rest[n++] = '{';
    rest[n++] = '}';
    return n;
}

Err json_parse_without(const char *name, const char *text, int64_t size_bytes, const char *const *keys, int count,
                       JsonSpan *values, Json **rest)
{
    *rest = NULL;
    for (int i = 0; i < count; i++) values[i] = (JsonSpan){ 0 };
    char *others = malloc((size_t)size_bytes + 2);
    if (!others) return err_set(ERR_MEMORY, "no memory to read '%s'", name);
    int64_t n = split_object(text, size_bytes, keys, count, values, others);
    /* as a whole where it is no object: for the message; and where it is an empty one */
    Err err = n ? json_parse(name, others, n, rest) : json_parse(name, text, size_bytes, rest);
    free(others);
    return err;
}

Err json_next_item(const char *name, JsonSpan *array, JsonSpan *item)
{
    const char *at = array->text, *end = at + array->size_bytes, *next;
    bool first = at < end && *at == '[';
    *item = (JsonSpan){ 0 };
    if (at < end && (first || *at == ',')) {
        at = skip_blanks(at + 1, end);
        next = skip_value(at, end);
        if (next > at) *item = (JsonSpan){ at, next - at };
        at = skip_blanks(next, end);
        if (!first && !item->text) end = at;
    }
    *array = (JsonSpan){ at, end - at };
    if (at < end && (*at == ']' || (*at == ',' && item->text))) return ERR_OK;
    return err_set(ERR_IO, "'%s' is not valid JSON: a list without ',' or ']' behind an item", name);
}

Err json_read_file(const char *path, int64_t max_bytes, Json **out)
{
    char *text;
    int64_t size_bytes;
    *out = NULL;
    TRY(file_read_all(path, max_bytes, &text, &size_bytes));
    const int mark = strncmp(text, "\xEF\xBB\xBF", 3) ? 0 : 3; /* a byte order mark */
    Err err = json_parse(path, text + mark, size_bytes - mark, out);
    free(text);
    return err;
}

void json_free(Json *j) { json_decref(j); }

static bool is(const Json *j, json_type type) { return j && json_typeof(j) == type; }

const Json *json_get(const Json *object, const char *key)
{
    return is(object, JSON_OBJECT) ? json_object_get(object, key) : NULL;
}

const Json *json_at(const Json *array, int64_t index)
{
    return is(array, JSON_ARRAY) && index >= 0 ? json_array_get(array, (size_t)index) : NULL;
}

int64_t json_count(const Json *j)
{
    return is(j, JSON_ARRAY) ? (int64_t)json_array_size(j) : is(j, JSON_OBJECT) ? (int64_t)json_object_size(j) : 0;
}

/* Jansson's iterators do not change the object but are declared without const. */
void *json_iter(const Json *object)
{
    return is(object, JSON_OBJECT) ? json_object_iter((Json *)(uintptr_t)object) : NULL;
}

void *json_next(const Json *object, void *it) { return json_object_iter_next((Json *)(uintptr_t)object, it); }

const char *json_iter_key(void *it) { return json_object_iter_key(it); }

const Json *json_iter_value(void *it) { return json_object_iter_value(it); }

const char *json_library(void) { return "Jansson " JANSSON_VERSION; }

bool json_can_hold(const char *text)
{
    Json *j = json_string(text); /* NULL otherwise */
    json_free(j);
    return j != NULL;
}

bool json_is_string(const Json *j) { return is(j, JSON_STRING); }

bool json_is_int(const Json *j) { return is(j, JSON_INTEGER); }

bool json_is_number(const Json *j) { return is(j, JSON_INTEGER) || is(j, JSON_REAL); }

bool json_is_object(const Json *j) { return is(j, JSON_OBJECT); }

bool json_is_array(const Json *j) { return is(j, JSON_ARRAY); }

bool json_is_null(const Json *j) { return is(j, JSON_NULL); }

bool json_is_true(const Json *j) { return is(j, JSON_TRUE); }

const char *json_text(const Json *j, int64_t *size_bytes)
{
    if (!is(j, JSON_STRING)) return NULL;
    const char *text = json_string_value(j);
    if (size_bytes) *size_bytes = (int64_t)json_string_length(j);
    else if (strlen(text) != json_string_length(j)) return NULL;
    return text;
}

int64_t json_int(const Json *j, int64_t otherwise)
{
    return is(j, JSON_INTEGER) ? (int64_t)json_integer_value(j) : otherwise;
}

double json_number(const Json *j, double otherwise) { return json_is_number(j) ? json_number_value(j) : otherwise; }

/* ---- writer ---- */

static void put_bytes(JsonOut *j, const char *text, int64_t n)
{
    int64_t room = j->size_bytes - 1 - j->used_bytes;
    int64_t fits = room < 0 ? 0 : n < room ? n : room;
    if (fits > 0) memcpy(j->buf + j->used_bytes, text, (size_t)fits);
    if (fits > 0) j->buf[j->used_bytes + fits] = 0;
    j->used_bytes += n;
}

static void put_str(JsonOut *j, const char *text) { put_bytes(j, text, (int64_t)strlen(text)); }

static void put_quoted(JsonOut *j, const char *text)
{
    put_str(j, "\"");
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        char escape[8];
        if (c == '"' || c == '\\') snprintf(escape, sizeof escape, "\\%c", c);
        else if (c < 0x20) snprintf(escape, sizeof escape, "\\u%04x", (unsigned)c);
        else snprintf(escape, sizeof escape, "%c", c);
        put_str(j, escape);
    }
    put_str(j, "\"");
}

/* The comma before an element, and its name. */
static void put_key(JsonOut *j, const char *key)
{
    if (j->comma) put_str(j, ",");
    j->comma = true;
    if (!key) return;
    put_quoted(j, key);
    put_str(j, ":");
}

void json_out_init(JsonOut *j, char *buf, int64_t size_bytes)
{
    ASSERT(size_bytes > 0);
    *j = (JsonOut){ .buf = buf, .size_bytes = size_bytes };
    buf[0] = 0;
}

void json_open(JsonOut *j, const char *key, char bracket)
{
    put_key(j, key);
    put_bytes(j, &bracket, 1);
    j->comma = false;
}

void json_close(JsonOut *j, char bracket)
{
    put_bytes(j, &bracket, 1);
    j->comma = true;
}

void json_put_text(JsonOut *j, const char *key, const char *value)
{
    put_key(j, key);
    put_quoted(j, value);
}

void json_put_int(JsonOut *j, const char *key, int64_t value)
{
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)value);
    put_key(j, key);
    put_str(j, text);
}

void json_put_milli(JsonOut *j, const char *key, int64_t value)
{
    char text[32];
    snprintf(text, sizeof text, "%lld.%03d", (long long)(value / 1000), (int)(value % 1000));
    put_key(j, key);
    put_str(j, text);
}

void json_number_text(double value, char out[JSON_NUMBER_BYTES])
{
    snprintf(out, JSON_NUMBER_BYTES, "null");
    for (int digits = 15; isfinite(value) && digits <= 17; digits++) {
        snprintf(out, JSON_NUMBER_BYTES, "%.*g", digits, value);
        if (strtod(out, NULL) == value) break;
    }
}

bool json_put_number(JsonOut *j, const char *key, double value)
{
    char text[JSON_NUMBER_BYTES];
    json_number_text(value, text);
    put_key(j, key);
    put_str(j, text);
    return isfinite(value);
}

void json_put_real(JsonOut *j, const char *key, double value)
{
    char text[JSON_NUMBER_BYTES];
    json_number_text(value, text);
    put_key(j, key);
    put_str(j, text);
    if (!strpbrk(text, ".en")) put_str(j, ".0");
}

void json_put_null(JsonOut *j, const char *key)
{
    put_key(j, key);
    put_str(j, "null");
}

void json_put_bool(JsonOut *j, const char *key, bool value)
{
    put_key(j, key);
    put_str(j, value ? "true" : "false");
}

bool json_out_ok(const JsonOut *j) { return j->used_bytes < j->size_bytes; }
