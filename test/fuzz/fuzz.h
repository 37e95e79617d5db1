/*
 * What the fuzz targets share. A target fuzz_NAME.c defines LLVMFuzzerTestOneInput and checks more than "no crash":
 *
 *   - input that was accepted is written out again and read again, and nothing has changed;
 *   - an error has one line of text and a kind whose exit status is documented for this reader;
 *   - the heap never holds more than FACTOR x the input's size plus a constant (fuzz_memory_*).
 *
 * Built twice: by clang with libFuzzer, ASan and UBSan (`make fuzz`), and by the plain compiler with driver.c, which
 * runs the target on the files of test/fuzz/seeds/NAME (`make test`, `make asan`). README.md has the rest.
 */
#ifndef MEGATRAIN_TEST_FUZZ_H
#define MEGATRAIN_TEST_FUZZ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* A rule is broken: says which and aborts, so that the input is kept. */
#define FUZZ_CHECK(cond, ...)                                                      \
    do {                                                                           \
        if (!(cond)) {                                                             \
            fprintf(stderr, "%s:%d: broken: %s\n    ", __FILE__, __LINE__, #cond); \
            fprintf(stderr, __VA_ARGS__);                                          \
            fputc('\n', stderr);                                                   \
            abort();                                                               \
        }                                                                          \
    } while (0)

/* `err` is one of two kinds, or OK, and then has a text without control characters; `lines`: it may have several. */
void fuzz_check_error(Err err, Err kind, Err or_kind, bool lines);

/* Bytes on the heap: from `start` on, the most at a time that are above what there was. Until `peak` is asked for, a
 * JSON text's tree may take 2 x its size and FUZZ_JSON_BYTES (json_spare_bytes), so that small inputs reach that
 * limit. */
enum {
    FUZZ_JSON_BYTES = 1 << 18,
    FUZZ_WATCHER_BYTES = 1 << 10 /* libFuzzer's watching thread takes some 200 as it starts, sooner or later */
};
void fuzz_memory_start(void);
int64_t fuzz_memory_peak(void);
#define FUZZ_MEMORY_BOUND(size, factor, constant)                                                                      \
    FUZZ_CHECK(fuzz_memory_peak() <= (int64_t)(factor) * (int64_t)(size) + (int64_t)(constant) + FUZZ_WATCHER_BYTES, \
               "%lld bytes of memory for an input of %zu", (long long)fuzz_memory_peak(), (size_t)(size))

/* A 0-terminated copy in memory of exactly that size, so that reading beyond it is seen. Release with free(). */
char *fuzz_text(const uint8_t *data, size_t size);

/* Path of a file in this process's scratch folder (in memory where there is /dev/shm); static, eight at a time. */
const char *fuzz_path(const char *name);
void fuzz_write(const char *name, const void *data, size_t size);
/* Whole file; release with free(). */
char *fuzz_read(const char *name, size_t *size);

#endif
