/*
 * Arenas: the only way a run gets memory.
 *
 *   setup   host    the run            grows while starting; frozen before step 1
 *   state   device  the run            weights, gradients, moments as flat buffers
 *   save    device  one micro-batch    what backward needs; reset when its backward ends
 *   scratch device  one layer call     released by mark
 *
 * An Arena is a bump allocator over memory that it is given; it owns nothing. Marks are offsets, so
 * releasing is one assignment. `peak_bytes` is the high-water mark that `megatrain plan` prints and that
 * a real run must reproduce to the byte. On the null device the base is an address that nobody
 * dereferences and the size is unlimited: the same code then only counts.
 *
 * A SetupArena grows by malloc and hands out zeroed host memory that lives until setup_release.
 */
#ifndef MEGATRAIN_BASE_ARENA_H
#define MEGATRAIN_BASE_ARENA_H

#include <stdint.h>

#include "base/err.h"

enum { ARENA_ALIGN = 256 }; /* bytes; every allocation starts on such a boundary and is padded to it */

/* Bytes that an allocation of so many takes. */
static inline int64_t arena_padded(int64_t bytes) { return (bytes + ARENA_ALIGN - 1) / ARENA_ALIGN * ARENA_ALIGN; }

typedef struct {
    const char *name; /* for messages: "state", "save", "scratch" */
    char *base;
    int64_t size_bytes, used_bytes, peak_bytes;
    int number;  /* tells arenas of one name apart in a trace */
    bool poison; /* debug.poison: released bytes become 0xFF (NaN as a float, -1 as an index) */
} Arena;

typedef int64_t ArenaMark;

/* Bytes that the kernel would give now without swapping; all of the memory where it does not say. */
double host_free_bytes(void);

/* base: on an ARENA_ALIGN boundary (ASSERT). To only count: any such address and a size of INT64_MAX. */
void arena_init(Arena *a, const char *name, void *base, int64_t size_bytes);

/* ERR_MEMORY, naming arena, wanted and free bytes, when it does not fit. Contents are not cleared. */
Err arena_alloc(Arena *a, int64_t size_bytes, void **out);
/* This thread's recorded failure is that of a full arena; any other ERR_MEMORY is the machine's. */
bool arena_was_full(void);

ArenaMark arena_mark(const Arena *a);
void arena_release(Arena *a, ArenaMark mark); /* everything allocated since the mark */

/* Puts the fill into the trace, as a counter of the arena's name: every change does, this does without one. */
void arena_show(const Arena *a);

typedef struct SetupChunk SetupChunk;
typedef struct {
    SetupChunk *chunks;
    int64_t total_bytes;
    bool frozen; /* an allocation after this is a bug (ASSERT) */
} SetupArena;

void setup_init(SetupArena *s);
void setup_release(SetupArena *s);
void setup_freeze(SetupArena *s);
Err setup_alloc(SetupArena *s, int64_t size_bytes, void **out); /* zeroed, 64-byte aligned */
Err setup_strdup(SetupArena *s, const char *text, char **out);

/* Typed form: TRY(setup_array(s, n, &pointer)). A count whose bytes overflow is ERR_MEMORY. */
#define setup_array(s, count, out) setup_alloc_items((s), (int64_t)(count), (int64_t)sizeof **(out), (void **)(out))
Err setup_alloc_items(SetupArena *s, int64_t count, int64_t item_bytes, void **out);

#endif
