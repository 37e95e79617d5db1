/*
 * Encodes the documents of a file by one thread, with a fresh encoder each round.
 *
 *   bench_tokenizer TOKENIZER FILE [ROUNDS]
 *
 * FILE holds documents that end with a 0 byte (bench/tokens.py writes it). Prints for each round the seconds, and
 * the number of ids and their CRC32C.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/file.h"
#include "data/tokenizer.h"

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static Err encode_all(const Tokenizer *t, const char *text, int64_t size, TokenList *ids)
{
    Encoder *e;
    TRY(encoder_open(t, &e));
    Err err = ERR_OK;
    for (const char *at = text, *end; !err && at < text + size; at = end + 1) {
        end = memchr(at, 0, (size_t)(text + size - at));
        if (!end) end = text + size;
        err = encoder_run(e, at, end - at, false, ids, NULL);
    }
    encoder_close(e);
    return err;
}

static Err run(const char *tokenizer, const char *path, int rounds)
{
    Tokenizer *t;
    char *text;
    int64_t size;
    TokenList ids = { 0 };
    TRY(tokenizer_open(tokenizer, &t));
    TRY(file_read_all(path, (int64_t)1 << 32, &text, &size));
    for (int i = 0; i < rounds; i++) {
        ids.count = 0;
        double start = now();
        TRY(encode_all(t, text, size, &ids));
        printf("%.6f %lld %08x\n", now() - start, (long long)ids.count,
               crc32c(0, ids.ids, (size_t)ids.count * sizeof *ids.ids));
    }
    free(ids.ids);
    free(text);
    tokenizer_close(t);
    return ERR_OK;
}

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: bench_tokenizer TOKENIZER FILE [ROUNDS]\n");
        return 2;
    }
    if (!run(argv[1], argv[2], argc > 3 ? atoi(argv[3]) : 1)) return 0;
    fprintf(stderr, "bench_tokenizer: %s\n", err_message());
    return 1;
}
