/*
 * Cuts a text into a training part and its tail for validation, and takes out of the training part whatever
 * also stands in the tail: afterwards no piece of PIECE bytes of the validation text occurs in the training
 * text, so that a low validation loss is not memory.
 *
 *   split_text TEXT TRAIN VALID VALID_BYTES
 *
 * Every piece of the tail is entered in a hash table by a rolling hash; the same hash slides over the training
 * part, candidates are compared byte by byte, and matches are cut out. Cutting can bring new neighbours
 * together, so it is repeated until nothing is found. Prints what it did. Exit 3 for unusable input.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PIECE = 200, SEED = 1 };
static const uint64_t BASE = 0x9E3779B97F4A7C15u | SEED;

typedef struct {
    const char *text;
    size_t size, mask;
    uint32_t *slot; /* offset + 1 of a piece; 0 = free */
} Table;

static void fail(const char *what, const char *path)
{
    fprintf(stderr, "split_text: %s '%s'\n", what, path);
    exit(3);
}

static char *read_all(const char *path, size_t *size)
{
    FILE *f = fopen(path, "rb");
    if (!f || fseek(f, 0, SEEK_END)) fail("cannot read", path);
    long n = ftell(f);
    rewind(f);
    if (n <= 0 || n > 0x7fffffff) fail("empty or too large:", path);
    char *text = malloc((size_t)n);
    if (!text || fread(text, 1, (size_t)n, f) != (size_t)n) fail("cannot read", path);
    fclose(f);
    *size = (size_t)n;
    return text;
}

static void write_all(const char *path, const char *text, size_t size)
{
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(text, 1, size, f) != size || fclose(f)) fail("cannot write", path);
}

/* BASE^(PIECE - 1): the weight of the byte that leaves the window. */
static uint64_t oldest_weight(void)
{
    uint64_t p = 1;
    for (int i = 1; i < PIECE; i++) p *= BASE;
    return p;
}

static uint64_t first_hash(const char *text)
{
    uint64_t h = 0;
    for (int i = 0; i < PIECE; i++) h = h * BASE + (unsigned char)text[i];
    return h;
}

static uint64_t next_hash(uint64_t h, const char *window, uint64_t oldest)
{
    return (h - (unsigned char)window[0] * oldest) * BASE + (unsigned char)window[PIECE];
}

static size_t place(uint64_t h, size_t mask)
{
    return (size_t)(h ^ (h >> 29)) & mask;
}

static Table enter_pieces(const char *text, size_t size)
{
    Table t = { text, size, 1, NULL };
    while (t.mask < 4 * size) t.mask *= 2;
    t.slot = calloc(t.mask--, sizeof *t.slot);
    if (!t.slot) fail("no memory for", text);
    uint64_t oldest = oldest_weight(), h = first_hash(text);
    for (size_t i = 0;; h = next_hash(h, text + i, oldest), i++) {
        size_t at = place(h, t.mask);
        while (t.slot[at] && memcmp(text + t.slot[at] - 1, text + i, PIECE)) at = (at + 1) & t.mask;
        t.slot[at] = (uint32_t)i + 1;
        if (i + PIECE >= size) return t;
    }
}

static int holds(const Table *t, uint64_t h, const char *window)
{
    for (size_t at = place(h, t->mask); t->slot[at]; at = (at + 1) & t->mask)
        if (!memcmp(t->text + t->slot[at] - 1, window, PIECE)) return 1;
    return 0;
}

/* Cuts out every window of the training text that the table holds; returns the new size. */
static size_t cut_pass(const Table *t, char *text, size_t size)
{
    if (size < PIECE) return size;
    uint64_t oldest = oldest_weight(), h = first_hash(text);
    size_t kept = 0, done = 0, i = 0; /* text[done, ...) not yet decided */
    char *out = malloc(size);
    if (!out) fail("no memory for", "the training text");
    for (;; h = next_hash(h, text + i, oldest), i++) {
        if (holds(t, h, text + i)) {
            if (i > done) memcpy(out + kept, text + done, i - done), kept += i - done;
            done = i + PIECE;
        }
        if (i + PIECE >= size) break;
    }
    if (done < size) memcpy(out + kept, text + done, size - done), kept += size - done;
    memcpy(text, out, kept);
    free(out);
    return kept;
}

int main(int argc, char **argv)
{
    if (argc != 5) return fprintf(stderr, "usage: split_text TEXT TRAIN VALID VALID_BYTES\n"), 2;
    size_t size, valid = (size_t)atoll(argv[4]);
    char *text = read_all(argv[1], &size);
    if (valid < 4 * PIECE || size < 4 * valid) fail("too short to leave a validation tail:", argv[1]);
    size_t train = size - valid, before;
    while (train > 0 && text[train - 1] != '\n') train--; /* whole lines */
    if (train < size / 2) train = size - valid;
    valid = size - train;
    Table t = enter_pieces(text + train, valid);
    char *rest = malloc(train);
    if (!rest) fail("no memory for", argv[1]);
    memcpy(rest, text, train);
    size_t whole = train;
    do {
        before = train;
        train = cut_pass(&t, rest, train);
    } while (train != before);
    write_all(argv[2], rest, train);
    write_all(argv[3], text + size - valid, valid);
    printf("training %zu bytes, validation %zu bytes (the tail); %zu bytes that also stand in the tail left out\n",
           train, valid, whole - train);
    free(rest);
    free(t.slot);
    free(text);
    return 0;
}
