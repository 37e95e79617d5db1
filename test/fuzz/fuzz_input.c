/*
 * data/input.c: text, plain or compressed by gzip or zstd. Input: the file. Read in one go, in small pieces, and behind
 * a place passed over it is the same text or the same kind of failure; a plain file is its own text.
 */
#include "fuzz.h"

#include "data/input.h"

enum { TEXT_MAX = 1 << 20 };

/* Up to TEXT_MAX bytes, `piece` at a time. */
static Err read_text(int64_t skip, int64_t piece, char *out, int64_t *size)
{
    Input *in;
    *size = 0;
    Err err = input_open(fuzz_path("in"), &in);
    if (err) return err;
    if (skip) err = input_skip(in, skip);
    for (int64_t got = piece; !err && got == piece && *size + piece <= TEXT_MAX; *size += got) {
        got = 0;
        err = input_read(in, out + *size, piece, &got);
        FUZZ_CHECK(err || (got >= 0 && got <= piece), "%lld bytes", (long long)got);
        if (err) break;
    }
    input_close(in);
    return err;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char whole[TEXT_MAX + 1], pieces[TEXT_MAX + 1];
    int64_t n, m;
    fuzz_write("in", data, size);
    fuzz_memory_start();
    Err err = read_text(0, TEXT_MAX, whole, &n);
    /* zlib and libzstd: their windows, at most 128 MiB (input.h) */
    FUZZ_MEMORY_BOUND(0, 0, 160 << 20);
    fuzz_check_error(err, ERR_DATA, ERR_DATA, false);
    bool zip = size >= 2 && data[0] == 0x1F && data[1] == 0x8B;
    bool zstd = size >= 4 && (!memcmp(data, "\x28\xB5\x2F\xFD", 4) ||
                              ((data[0] & 0xF0) == 0x50 && !memcmp(data + 1, "\x2A\x4D\x18", 3)));
    if (!zip && !zstd) FUZZ_CHECK(!err && n == (int64_t)size && !memcmp(whole, data, size), "another text");
    if (err || n == TEXT_MAX) return 0; /* a bomb: enough of it */
    err = read_text(0, 61, pieces, &m);
    FUZZ_CHECK(!err && n == m && !memcmp(whole, pieces, (size_t)n), "%lld, then %lld bytes", (long long)n,
               (long long)m);
    err = read_text(n / 2, 1000, pieces, &m);
    FUZZ_CHECK(!err && m == n - n / 2 && !memcmp(whole + n / 2, pieces, (size_t)m), "behind %lld",
               (long long)n / 2);
    return 0;
}
