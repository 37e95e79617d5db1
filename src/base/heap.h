/*
 * Large objects of a function. A stack may be small (ulimit -s, a thread's), so no frame of src/ is above 32 KiB, which
 * the compiler checks (Makefile, FRAMES).
 */
#ifndef MEGATRAIN_BASE_HEAP_H
#define MEGATRAIN_BASE_HEAP_H

#include <stdlib.h>

#include "base/err.h"

static inline void heap_free(void *pointer) { free(*(void **)pointer); }

/* `name`: `count` zeroed objects on the heap until the block ends. Without memory the function returns ERR_MEMORY. */
#define ON_HEAP(type, name, count)                                                            \
    __attribute__((cleanup(heap_free))) type *name = calloc((size_t)(count), sizeof *(name)); \
    if (!(name)) return err_set(ERR_MEMORY, "no memory for %zu bytes of '%s'", (size_t)(count) * sizeof *(name), #type)

#endif
