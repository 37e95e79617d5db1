/*
 * Both arenas only ever move a mark forward. An Arena never touches the memory that it hands out (on the
 * null device there is none), except to poison it on release when debug.poison asks for that.
 *
 * A SetupArena is a list of calloc'ed chunks: small requests share the chunk at the head of the list, large
 * ones get a chunk of their own behind the head, whose pages the system zeroes only when they are touched.
 */
#include "base/arena.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/processors.h"
#include "base/trace.h"

enum { SETUP_ALIGN = 64, SETUP_CHUNK_BYTES = 1 << 18 };

double host_free_bytes(void)
{
    char line[128];
    double kib = 0;
    FILE *f = fopen("/proc/meminfo", "re");
    while (f && fgets(line, sizeof line, f) && sscanf(line, "MemAvailable: %lf", &kib) != 1) continue;
    if (f) fclose(f);
    const double all = kib > 0 ? 1024 * kib : (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    const double group = group_memory_left("");
    return group > 0 && group < all ? group : all;
}

void arena_init(Arena *a, const char *name, void *base, int64_t size_bytes)
{
    ASSERT((uintptr_t)base % ARENA_ALIGN == 0 && size_bytes >= 0);
    *a = (Arena){ .name = name, .base = base, .size_bytes = size_bytes };
}

#define FULL "arena '" /* how no other message begins */

bool arena_was_full(void) { return !strncmp(err_message(), FULL, strlen(FULL)); }

Err arena_alloc(Arena *a, int64_t size_bytes, void **out)
{
    ASSERT(size_bytes >= 0);
    int64_t free_bytes = a->size_bytes - a->used_bytes;
    int64_t padding = (ARENA_ALIGN - size_bytes % ARENA_ALIGN) % ARENA_ALIGN;
    if (size_bytes > free_bytes || padding > free_bytes - size_bytes)
        return err_set(ERR_MEMORY, FULL "%s' is full: %lld bytes wanted, %lld of %lld free", a->name,
                       (long long)size_bytes, (long long)free_bytes, (long long)a->size_bytes);
    *out = (void *)((uintptr_t)a->base + (uintptr_t)a->used_bytes); /* base may be no real address */
    if (size_bytes == 0) return ERR_OK;
    a->used_bytes += size_bytes + padding;
    if (a->used_bytes > a->peak_bytes) a->peak_bytes = a->used_bytes;
    arena_show(a);
    return ERR_OK;
}

ArenaMark arena_mark(const Arena *a) { return a->used_bytes; }

void arena_release(Arena *a, ArenaMark mark)
{
    ASSERT(mark >= 0 && mark <= a->used_bytes);
    if (a->poison && a->used_bytes > mark) memset(a->base + mark, 0xFF, (size_t)(a->used_bytes - mark));
    if (mark == a->used_bytes) return;
    a->used_bytes = mark;
    arena_show(a);
}

void arena_show(const Arena *a) { trace_counter(a->name, a->number, (double)a->used_bytes); }

struct SetupChunk {
    SetupChunk *next;
    int64_t size_bytes, used_bytes;
    char *data; /* on a SETUP_ALIGN boundary, inside `memory` */
    char memory[];
};

void setup_init(SetupArena *s) { *s = (SetupArena){ 0 }; }

void setup_release(SetupArena *s)
{
    for (SetupChunk *c = s->chunks, *next; c; c = next) {
        next = c->next;
        free(c);
    }
    setup_init(s);
}

void setup_freeze(SetupArena *s) { s->frozen = true; }

static SetupChunk *chunk_new(int64_t size_bytes)
{
    SetupChunk *c = calloc(1, sizeof *c + (size_t)size_bytes + SETUP_ALIGN);
    if (!c) return NULL;
    uintptr_t start = (uintptr_t)c->memory;
    c->data = c->memory + (SETUP_ALIGN - start % SETUP_ALIGN) % SETUP_ALIGN;
    c->size_bytes = size_bytes;
    return c;
}

Err setup_alloc(SetupArena *s, int64_t size_bytes, void **out)
{
    ASSERT(size_bytes >= 0 && !s->frozen);
    if (size_bytes > INT64_MAX / 4)
        return err_set(ERR_MEMORY, "cannot allocate %lld bytes of host memory", (long long)size_bytes);
    int64_t padded = (size_bytes + SETUP_ALIGN - 1) / SETUP_ALIGN * SETUP_ALIGN;
    SetupChunk *c = s->chunks;
    if (!c || padded > c->size_bytes - c->used_bytes) {
        bool own_chunk = padded > SETUP_CHUNK_BYTES / 4;
        c = chunk_new(own_chunk ? padded : SETUP_CHUNK_BYTES);
        if (!c) return err_set(ERR_MEMORY, "cannot allocate %lld bytes of host memory", (long long)size_bytes);
        SetupChunk **place = own_chunk && s->chunks ? &s->chunks->next : &s->chunks;
        c->next = *place;
        *place = c;
        s->total_bytes += c->size_bytes;
    }
    *out = c->data + c->used_bytes;
    c->used_bytes += padded;
    return ERR_OK;
}

Err setup_alloc_items(SetupArena *s, int64_t count, int64_t item_bytes, void **out)
{
    int64_t size_bytes;
    ASSERT(count >= 0);
    if (__builtin_mul_overflow(count, item_bytes, &size_bytes))
        return err_set(ERR_MEMORY, "cannot allocate %lld items of %lld bytes", (long long)count, (long long)item_bytes);
    return setup_alloc(s, size_bytes, out);
}

Err setup_strdup(SetupArena *s, const char *text, char **out)
{
    int64_t size_bytes = (int64_t)strlen(text) + 1;
    TRY(setup_alloc(s, size_bytes, (void **)out));
    memcpy(*out, text, (size_t)size_bytes);
    return ERR_OK;
}
