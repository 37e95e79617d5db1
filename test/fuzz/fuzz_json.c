/* base/json.c: reading takes no more than was counted before; a value read, written by JsonOut, read again is the
 * same. */
#include "fuzz.h"

#include <math.h>

#include "base/json.c"

static void emit(JsonOut *out, const char *key, const Json *j)
{
    if (json_is_object(j)) {
        json_open(out, key, '{');
        for (void *it = json_iter(j); it; it = json_next(j, it))
            emit(out, json_iter_key(it), json_iter_value(it));
        json_close(out, '}');
    } else if (json_is_array(j)) {
        json_open(out, key, '[');
        for (int64_t i = 0; i < json_count(j); i++) emit(out, NULL, json_at(j, i));
        json_close(out, ']');
    } else if (json_is_string(j)) json_put_text(out, key, json_text(j, NULL) ? json_text(j, NULL) : "");
    else if (json_is_int(j)) json_put_int(out, key, json_int(j, 0));
    else if (json_is_number(j)) json_put_number(out, key, json_number(j, 0));
    else if (json_is_null(j)) json_put_number(out, key, NAN); /* as metrics do */
    else json_put_bool(out, key, json_is_true(j));
}

/* The writer takes texts that end with a 0 byte; those that hold one it is not given. */
static bool same(const Json *a, const Json *b)
{
    if (json_is_object(a) || json_is_array(a)) {
        if (json_is_object(a) != json_is_object(b) || json_count(a) != json_count(b)) return false;
        for (int64_t i = 0; json_is_array(a) && i < json_count(a); i++)
            if (!same(json_at(a, i), json_at(b, i))) return false;
        void *other = json_iter(b);
        for (void *it = json_iter(a); it; it = json_next(a, it), other = json_next(b, other))
            if (strcmp(json_iter_key(it), json_iter_key(other)) ||
                !same(json_iter_value(it), json_iter_value(other)))
                return false;
        return true;
    }
    int64_t n = 0, m = 0;
    const char *x = json_text(a, &n), *y = json_text(b, &m);
    if (x && memchr(x, 0, (size_t)n)) return json_text(a, NULL) == NULL && y && m == 0;
    if (x || y) return x && y && n == m && memcmp(x, y, (size_t)n) == 0;
    if (json_is_int(a) && json_is_int(b)) return json_int(a, 0) == json_int(b, 1);
    if (json_is_number(a) || json_is_number(b)) return json_number(a, 0) == json_number(b, 1);
    return json_is_null(a) == json_is_null(b) && json_is_true(a) == json_is_true(b);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    Json *j, *again;
    JsonOut out;
    fuzz_memory_start();
    Err err = json_parse("input", (const char *)data, (int64_t)size, &j);
    FUZZ_MEMORY_BOUND(size, 2, FUZZ_JSON_BYTES);
    FUZZ_MEMORY_BOUND(0, 0, tree_bytes((const char *)data, (int64_t)size));
    fuzz_check_error(err, ERR_IO, ERR_IO, false);
    if (err) return 0;
    FUZZ_CHECK(!memchr(data, 0, size), "a 0 byte was passed over");
    size_t room = 32 * size + 64;
    char *text = malloc(room);
    if (!text) abort();
    json_out_init(&out, text, (int64_t)room);
    emit(&out, NULL, j);
    FUZZ_CHECK(json_out_ok(&out), "%lld bytes wanted", (long long)out.used_bytes);
    err = json_parse("again", text, out.used_bytes, &again);
    FUZZ_CHECK(!err, "%s: %s", err_message(), text);
    FUZZ_CHECK(same(j, again), "%s", text);
    free(text);
    json_free(again);
    json_free(j);
    return 0;
}
