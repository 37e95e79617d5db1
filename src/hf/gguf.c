/* See gguf.h. The header is written twice: once to count its keys, once to the file. */
#include "hf/gguf.h"

#include <stdio.h>
#include <string.h>

#include "base/file.h"
#include "model/model.h"

enum { ALIGNMENT = 32, VERSION = 3, Q8_BLOCK = 32 };

/* Types of values, and of numbers of tensors, as the format numbers them. */
typedef enum { U32 = 4, I32 = 5, F32_VALUE = 6, BOOL = 7, TEXT = 8, ARRAY = 9 } ValueType;
static const uint32_t number_types[] = {
    [STORED_F32] = 0, [STORED_F16] = 1, [STORED_Q8_0] = 8, [STORED_BF16] = 30
};
static const uint32_t file_types[] = {
    [STORED_F32] = 0, [STORED_F16] = 1, [STORED_Q8_0] = 7, [STORED_BF16] = 32
};

typedef struct {
    const GgufJob *x;
    HfClass class;
    const char *arch;
    TheirsList list;
    ChunkWriter file;
    ChunkWriter *w; /* NULL: nothing is written, keys are counted */
    int64_t bytes, keys;
    Err err;
    char chunk[CHUNK_BYTES];
} Gguf;

/* ---- values ---- */

static void put(Gguf *g, const void *data, int64_t size_bytes)
{
    g->bytes += size_bytes;
    if (g->w && !g->err) g->err = chunk_put(g->w, data, size_bytes);
}

static void put_u32(Gguf *g, uint32_t value) { put(g, &value, sizeof value); }
static void put_i64(Gguf *g, int64_t value) { put(g, &value, sizeof value); }

static void put_bytes(Gguf *g, const char *text, int64_t size_bytes)
{
    put_i64(g, size_bytes);
    put(g, text, size_bytes);
}

static void put_text(Gguf *g, const char *text) { put_bytes(g, text, (int64_t)strlen(text)); }

/* '*' at the start of a key stands for the class. */
static void put_key(Gguf *g, const char *key, ValueType type)
{
    char name[96];
    snprintf(name, sizeof name, "%s%s", *key == '*' ? g->arch : "", *key == '*' ? key + 1 : key);
    put_text(g, name);
    put_u32(g, type);
    g->keys++;
}

static void key_u32(Gguf *g, const char *key, int64_t value)
{
    put_key(g, key, U32);
    put_u32(g, (uint32_t)value);
}

static void key_f32(Gguf *g, const char *key, double value)
{
    const float x = (float)value;
    put_key(g, key, F32_VALUE);
    put(g, &x, sizeof x);
}

static void key_bool(Gguf *g, const char *key, bool value)
{
    put_key(g, key, BOOL);
    put(g, &(uint8_t){ value }, 1);
}

static void key_text(Gguf *g, const char *key, const char *value)
{
    put_key(g, key, TEXT);
    put_text(g, value);
}

static void key_array(Gguf *g, const char *key, ValueType type, int64_t count)
{
    put_key(g, key, ARRAY);
    put_u32(g, type);
    put_i64(g, count);
}
