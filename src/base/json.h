/*
 * JSON, on top of Jansson: size caps, duplicate keys refused, errors with file, line and column; and a small
 * writer that needs no memory (metrics and manifests are written during training).
 */
#ifndef MEGATRAIN_BASE_JSON_H
#define MEGATRAIN_BASE_JSON_H

#include <stdint.h>
#include <stdio.h>

#include "base/err.h"

typedef struct json_t Json; /* Jansson's value; opaque here. NULL-safe getters below. */

/* Parses one object or array; `name` is for messages. Refused: duplicate keys, invalid UTF-8, anything after
 * the value, and what would take more memory than 2 x its size and json_spare_bytes, before any of it is taken.
 * ERR_IO (callers re-label). Free with json_free. */
Err json_parse(const char *name, const char *text, int64_t size_bytes, Json **out);
/* The same of what Python's json writes: Infinity, -Infinity and NaN, which JSON lacks, become strings of these
 * names. */
Err json_parse_python(const char *name, const char *text, int64_t size_bytes, Json **out);
/* A byte order mark before the value is passed over. */
Err json_read_file(const char *path, int64_t max_bytes, Json **out);
void json_free(Json *j);
extern int64_t json_spare_bytes; /* 256 MiB; less in tests, which then need smaller documents */

/* The text of a value inside of a larger one. */
typedef struct {
    const char *text;
    int64_t size_bytes;
} JsonSpan;

/* For lists that are too long for one tree: parses an object without those of its members that are called keys[count];
 * where their values stand goes to values[count] (text NULL: absent). ERR_IO as json_parse. */
Err json_parse_without(const char *name, const char *text, int64_t size_bytes, const char *const *keys, int count,
                       JsonSpan *values, Json **rest);
/* The next item of an array, whose span becomes what is left of it; item->text NULL: there is none. The item is not
 * looked into: it is for json_parse. ERR_IO. */
Err json_next_item(const char *name, JsonSpan *array, JsonSpan *item);

/* Members and items; NULL when absent or of another kind. */
const Json *json_get(const Json *object, const char *key);
const Json *json_at(const Json *array, int64_t index);
int64_t json_count(const Json *j); /* items or members; 0 otherwise */
/* Iterates members: for (void *it = json_iter(o); it; it = json_next(o, it)) json_iter_key(it), _value(it) */
void *json_iter(const Json *object);
void *json_next(const Json *object, void *it);
const char *json_iter_key(void *it);
const Json *json_iter_value(void *it);

bool json_is_string(const Json *j);
bool json_is_int(const Json *j);
bool json_is_number(const Json *j);
bool json_is_object(const Json *j);
bool json_is_array(const Json *j);
bool json_is_null(const Json *j);
bool json_is_true(const Json *j);
/* NULL if not a string. Without `size_bytes` also for a string that holds a 0 byte: it would seem to end there. */
const char *json_text(const Json *j, int64_t *size_bytes);
int64_t json_int(const Json *j, int64_t otherwise);
double json_number(const Json *j, double otherwise);

/* Writer into a caller's buffer: commas and quotes are its business. Overflow is remembered, never written. */
typedef struct {
    char *buf;
    int64_t size_bytes, used_bytes; /* used counts what was wanted, also beyond size */
    bool comma;
} JsonOut;

void json_out_init(JsonOut *j, char *buf, int64_t size_bytes);
void json_open(JsonOut *j, const char *key, char bracket);          /* '{' or '['; key NULL inside arrays */
void json_close(JsonOut *j, char bracket);                          /* '}' or ']' */
void json_put_text(JsonOut *j, const char *key, const char *value); /* UTF-8, or no reader will take it */
void json_put_int(JsonOut *j, const char *key, int64_t value);
void json_put_milli(JsonOut *j, const char *key, int64_t value); /* value / 1000, three decimals; value >= 0 */
/* Shortest digits that read back exactly; NaN and Inf become null. */
enum { JSON_NUMBER_BYTES = 32 };
void json_number_text(double value, char out[JSON_NUMBER_BYTES]);
/* Returns false for NaN and Inf. */
bool json_put_number(JsonOut *j, const char *key, double value);
/* The same, and 2 is 2.0: for readers to whom an integer is no real. */
void json_put_real(JsonOut *j, const char *key, double value);
void json_put_null(JsonOut *j, const char *key);
void json_put_bool(JsonOut *j, const char *key, bool value);
bool json_out_ok(const JsonOut *j); /* everything fitted, and a 0 byte stands behind it */

bool json_can_hold(const char *text); /* it is UTF-8 */

const char *json_library(void); /* name and version, for --version */

#endif
