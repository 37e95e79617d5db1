/*
 * The heap's meter, scratch files and the check of errors. Under a sanitizer its hooks count; elsewhere malloc and
 * its kin are defined here, in front of the C library's.
 */
#include "fuzz.h"

#include <malloc.h>
#include <stdatomic.h>
#include <unistd.h>

#include "base/file.h"
#include "base/json.h"
#include "base/log.h"

#if defined(__SANITIZE_ADDRESS__)
#define METER_HOOKS 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define METER_HOOKS 1
#endif
#endif

/* ---- the heap ---- */

static _Atomic int64_t live_bytes, most_bytes;

static void took(size_t bytes)
{
    int64_t now = atomic_fetch_add(&live_bytes, (int64_t)bytes) + (int64_t)bytes;
    if (now > most_bytes) most_bytes = now;
}

#ifdef METER_HOOKS
size_t __sanitizer_get_allocated_size(const volatile void *p);
int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void *, size_t),
                                              void (*on_free)(const volatile void *));

static void on_malloc(const volatile void *p, size_t bytes)
{
    (void)p;
    took(bytes);
}

static void on_free(const volatile void *p)
{
    if (p) live_bytes -= (int64_t)__sanitizer_get_allocated_size(p);
}

__attribute__((constructor)) static void install(void)
{
    __sanitizer_install_malloc_and_free_hooks(on_malloc, on_free);
}
#else
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *p, size_t bytes);
void __libc_free(void *p);

static void *counted(void *p)
{
    if (p) took(malloc_usable_size(p));
    return p;
}

void *malloc(size_t bytes) { return counted(__libc_malloc(bytes)); }

void *calloc(size_t count, size_t bytes) { return counted(__libc_calloc(count, bytes)); }

void *realloc(void *p, size_t bytes)
{
    int64_t before = p ? (int64_t)malloc_usable_size(p) : 0;
    void *q = __libc_realloc(p, bytes);
    if (!q) return NULL;
    if (p == q) live_bytes -= before;
    took(malloc_usable_size(q));
    if (p != q) live_bytes -= before; /* both were there for a moment */
    return q;
}

void free(void *p)
{
    if (p) live_bytes -= (int64_t)malloc_usable_size(p);
    __libc_free(p);
}
#endif

static int64_t start_bytes, spare_bytes;

void fuzz_memory_start(void)
{
    if (!spare_bytes) spare_bytes = json_spare_bytes;
    json_spare_bytes = FUZZ_JSON_BYTES;
    start_bytes = live_bytes;
    most_bytes = start_bytes;
}

int64_t fuzz_memory_peak(void)
{
    if (spare_bytes) json_spare_bytes = spare_bytes;
    return most_bytes - start_bytes;
}

/* ---- errors ---- */

static bool is_documented(int status)
{
    static const int documented[] = { 2, 3, 4, 5, 6, 7, 8, 9, 10 };
    for (size_t i = 0; i < sizeof documented / sizeof *documented; i++)
        if (documented[i] == status) return true;
    return false;
}

static void check_text(const char *text, bool lines)
{
    for (const char *p = text; *p; p++)
        FUZZ_CHECK((unsigned char)*p >= 0x20 || (lines && *p == '\n'), "control character %d in '%s'", *p,
                   text);
}

void fuzz_check_error(Err err, Err kind, Err or_kind, bool lines)
{
    if (!err) return;
    FUZZ_CHECK(err == kind || err == or_kind, "kind '%s': %s", err_name(err), err_message());
    FUZZ_CHECK(is_documented(err_exit_code(err)), "exit status %d: %s", err_exit_code(err), err_message());
    FUZZ_CHECK(*err_message(), "an error without text");
    check_text(err_message(), lines);
    check_text(err_hint_text(), false);
}

/* ---- input and files ---- */

char *fuzz_text(const uint8_t *data, size_t size)
{
    char *text = malloc(size + 1);
    if (!text) abort();
    if (size) memcpy(text, data, size);
    text[size] = 0;
    return text;
}

static char folder[64];

__attribute__((constructor)) static void quiet(void) { log_set_level(LOG_ERROR); }

__attribute__((destructor)) static void clean(void)
{
    if (*folder) file_remove_tree(folder);
}

const char *fuzz_path(const char *name)
{
    static char paths[8][160];
    static int turn;
    if (!*folder) {
        const char *in = access("/dev/shm", W_OK) ? "/tmp" : "/dev/shm";
        snprintf(folder, sizeof folder, "%s/megatrain-fuzz-%d", in, (int)getpid());
        if (file_make_dirs(folder)) abort();
    }
    char *path = paths[turn++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

void fuzz_write(const char *name, const void *data, size_t size)
{
    FILE *f = fopen(fuzz_path(name), "wb");
    if (!f || (size && fwrite(data, 1, size, f) != size) || fclose(f)) abort();
}

char *fuzz_read(const char *name, size_t *size)
{
    char *text;
    int64_t bytes;
    if (file_read_all(fuzz_path(name), 1 << 30, &text, &bytes)) abort();
    *size = (size_t)bytes;
    return text;
}
