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

Err json_parse(const char *name, const char *text, int64_t size_bytes, Json **out)
{
    json_error_t error;
    *out = json_loadb(text, (size_t)size_bytes, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &error);
    if (*out) return ERR_OK;
    return err_set(ERR_IO, "'%s' is not valid JSON: line %d, column %d: %s", name, error.line, error.column,
                   error.text);
}

Err json_read_file(const char *path, int64_t max_bytes, Json **out)
{
    char *text;
    int64_t size_bytes;
    *out = NULL;
    TRY(file_read_all(path, max_bytes, &text, &size_bytes));
    Err err = json_parse(path, text, size_bytes, out);
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
    return is(j, JSON_ARRAY)    ? (int64_t)json_array_size(j)
           : is(j, JSON_OBJECT) ? (int64_t)json_object_size(j)
                                : 0;
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
    if (size_bytes) *size_bytes = (int64_t)json_string_length(j);
    return json_string_value(j);
}

int64_t json_int(const Json *j, int64_t otherwise)
{
    return is(j, JSON_INTEGER) ? (int64_t)json_integer_value(j) : otherwise;
}

double json_number(const Json *j, double otherwise)
{
    return json_is_number(j) ? json_number_value(j) : otherwise;
}

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

bool json_put_number(JsonOut *j, const char *key, double value)
{
    char text[32] = "null";
    for (int digits = 15; isfinite(value) && digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    put_key(j, key);
    put_str(j, text);
    return isfinite(value);
}

bool json_put_float(JsonOut *j, const char *key, float value)
{
    char text[32] = "null";
    for (int digits = 6; isfinite(value) && digits <= 9; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, (double)value);
        if (strtof(text, NULL) == value) break;
    }
    put_key(j, key);
    put_str(j, text);
    return isfinite(value);
}

void json_put_bool(JsonOut *j, const char *key, bool value)
{
    put_key(j, key);
    put_str(j, value ? "true" : "false");
}

bool json_out_ok(const JsonOut *j) { return j->used_bytes < j->size_bytes; }
