/*
 * Token files against hand-made bytes and a second writer in Python; damaged ones; splits, permutations and
 * blends against their definitions; the loader against direct reads; preprocessing end to end.
 */
#include "test.h"

#include <unistd.h>

#include "base/file.h"
#include "data/indexed.h"
#include "data/loader.h"
#include "data/order.h"
#include "data/preprocess.h"
#include "data/tokenizer.h"

static char dir[64];

static const char *in_dir(const char *name)
{
    static char paths[8][160];
    static int turn;
    if (!*dir) {
        strcpy(dir, "/tmp/megatrain-data-XXXXXX");
        if (!mkdtemp(dir)) exit(1);
    }
    char *path = paths[turn++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", dir, name);
    return path;
}

__attribute__((destructor)) static void clean(void)
{
    if (*dir) file_remove_tree(dir);
}

static void write_bytes(const char *name, const void *data, int64_t size)
{
    OK(file_replace(in_dir(name), data, size));
}

static void write_text(const char *name, const char *text)
{
    write_bytes(name, text, (int64_t)strlen(text));
}

static int64_t read_bytes(const char *name, char **out)
{
    int64_t size = 0;
    OK(file_read_all(in_dir(name), 1 << 28, out, &size));
    return size;
}

static bool same_files(const char *a, const char *b)
{
    char *x, *y;
    int64_t nx = read_bytes(a, &x), ny = read_bytes(b, &y);
    bool same = nx == ny && memcmp(x, y, (size_t)nx) == 0;
    free(x);
    free(y);
    return same;
}

/* documents of the given lengths; token k of the whole file is (k * 7 + 3) % vocab */
static void write_pair(const char *prefix, TokenType type, const int *lengths, int documents, int vocab)
{
    IndexedWriter *w;
    int k = 0;
    OK(indexed_create(in_dir(prefix), type, &w));
    for (int d = 0; d < documents; d++) {
        for (int i = 0; i < lengths[d]; i++, k++) OK(indexed_add_tokens(w, &(int32_t){ (k * 7 + 3) % vocab }, 1));
        OK(indexed_end_document(w));
    }
    OK(indexed_finish(w));
}

/* ---- token files ---- */

/* Two documents, {1, 2, 300} and {65535}, and an empty one between. */
static const uint8_t hand_idx[] = {
    'M', 'M', 'I', 'D', 'I', 'D', 'X', 0, 0, /* magic */
    1, 0, 0, 0, 0, 0, 0, 0,                  /* version */
    8,                                       /* u16 */
    2, 0, 0, 0, 0, 0, 0, 0,                  /* sequences */
    4, 0, 0, 0, 0, 0, 0, 0,                  /* document entries */
    3, 0, 0, 0, 1, 0, 0, 0,                  /* lengths */
    0, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, /* byte offsets */
    0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, /* documents end after */
    1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0,
};
static const uint8_t hand_bin[] = { 1, 0, 2, 0, 44, 1, 255, 255 };

static void write_hand(const char *prefix)
{
    char name[64];
    snprintf(name, sizeof name, "%s.idx", prefix);
    write_bytes(name, hand_idx, sizeof hand_idx);
    snprintf(name, sizeof name, "%s.bin", prefix);
    write_bytes(name, hand_bin, sizeof hand_bin);
}

TEST(indexed_bytes_by_hand)
{
    static const int32_t ids[] = { 1, 2, 300, 65535 };
    IndexedWriter *w;
    Indexed x;
    char *got;
    int32_t back[4];
    OK(indexed_create(in_dir("w"), TOKEN_U16, &w));
    OK(indexed_add_tokens(w, ids, 3));
    OK(indexed_end_document(w));
    OK(indexed_end_document(w));
    OK(indexed_add_tokens(w, ids + 3, 1));
    CHECK(!file_exists(in_dir("w.idx")) && !file_exists(in_dir("w.bin")));
    OK(indexed_finish(w));
    int64_t n = read_bytes("w.idx", &got);
    CHECK(n == sizeof hand_idx && memcmp(got, hand_idx, sizeof hand_idx) == 0);
    free(got);
    n = read_bytes("w.bin", &got);
    CHECK(n == sizeof hand_bin && memcmp(got, hand_bin, sizeof hand_bin) == 0);
    free(got);
    OK(indexed_open(in_dir("w"), &x));
    CHECK(x.sequences == 2 && x.documents == 3 && x.tokens == 4 && x.type == TOKEN_U16);
    CHECK(indexed_length(&x, 0) == 3 && indexed_start(&x, 1) == 3 && indexed_start(&x, 2) == 4);
    CHECK(indexed_document_end(&x, 0) == 1 && indexed_document_end(&x, 1) == 1 && indexed_document_end(&x, 2) == 2);
    OK(indexed_read(&x, 0, 4, 0, back));
    CHECK(memcmp(back, ids, sizeof ids) == 0);
    indexed_close(&x);
}

TEST(indexed_types)
{
    static const struct {
        TokenType type;
        int bytes;
        uint64_t value; /* little endian in the file */
        int64_t want;   /* -1: refused */
    } cases[] = {
        { TOKEN_U8, 1, 200, 200 },     { TOKEN_I8, 1, 100, 100 },         { TOKEN_I8, 1, 200, -1 },
        { TOKEN_I16, 2, 30000, 30000 }, { TOKEN_I16, 2, 40000, -1 },       { TOKEN_U16, 2, 40000, 40000 },
        { TOKEN_I32, 4, 70000, 70000 }, { TOKEN_I32, 4, 0xFFFFFFFFu, -1 }, { TOKEN_I64, 8, 70000, 70000 },
        { TOKEN_I64, 8, 1ull << 40, -1 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint8_t idx[34 + 4 + 8 + 16] = { 0 };
        int32_t got;
        Indexed x;
        memcpy(idx, hand_idx, 18);
        idx[17] = (uint8_t)cases[i].type;
        idx[18] = 1, idx[26] = 2, idx[34] = 1, idx[34 + 4 + 8 + 8] = 1;
        write_bytes("t.idx", idx, sizeof idx);
        write_bytes("t.bin", &cases[i].value, cases[i].bytes);
        OK(indexed_open(in_dir("t"), &x));
        if (cases[i].want >= 0) {
            OK(indexed_read(&x, 0, 1, 0, &got));
            CHECK(got == cases[i].want);
        } else
            FAILS(indexed_read(&x, 0, 1, 0, &got), ERR_DATA, "document '0', position '0'");
        indexed_close(&x);
    }
}

TEST(indexed_equals_python)
{
    static const char *const specs[] = { "{\"dtype\":8,\"documents\":[[1,2,3],[],[4,65499],[7]]}",
                                         "{\"dtype\":4,\"documents\":[[],[100000,2,3],[4],[],[]]}" };
    static const int32_t ids[2][6] = { { 1, 2, 3, 4, 65499, 7 }, { 100000, 2, 3, 4 } };
    static const int lengths[2][5] = { { 3, 0, 2, 1, -1 }, { 0, 3, 1, 0, 0 } };
    if (system("/usr/bin/python3 -c '' 2>/dev/null") != 0) SKIP("no /usr/bin/python3");
    for (int i = 0; i < 2; i++) {
        IndexedWriter *w;
        char command[512];
        const int32_t *at = ids[i];
        snprintf(command, sizeof command, "echo '%s' | /usr/bin/python3 test/tools/write_idx.py %s", specs[i], in_dir("py"));
        CHECK(system(command) == 0);
        OK(indexed_create(in_dir("c"), i ? TOKEN_I32 : TOKEN_U16, &w));
        for (int d = 0; d < 5 && lengths[i][d] >= 0; at += lengths[i][d++]) {
            OK(indexed_add_tokens(w, at, lengths[i][d]));
            OK(indexed_end_document(w));
        }
        OK(indexed_finish(w));
        CHECK(same_files("c.idx", "py.idx") && same_files("c.bin", "py.bin"));
    }
}

static Err open_and_close(const char *prefix)
{
    Indexed x;
    Err err = indexed_open(in_dir(prefix), &x);
    if (!err) indexed_close(&x);
    return err;
}

static void check_patched(int64_t at, uint8_t value, const char *message)
{
    uint8_t idx[sizeof hand_idx];
    memcpy(idx, hand_idx, sizeof idx);
    idx[at] = value;
    write_bytes("p.idx", idx, sizeof idx);
    write_bytes("p.bin", hand_bin, sizeof hand_bin);
    FAILS(open_and_close("p"), ERR_DATA, message);
    if (at < 34) CHECK_MSG(strstr(err_message(), "p.idx"), "%s", err_message());
}

TEST(indexed_damage)
{
    check_patched(0, 'm', "does not start with MMIDIDX");
    check_patched(8, 1, "does not start with MMIDIDX");
    check_patched(9, 2, "version is not 1");
    check_patched(16, 1, "version is not 1");
    check_patched(17, 7, "floating point");
    check_patched(17, 9, "type is unknown");
    check_patched(17, 0, "type is unknown");
    check_patched(17, 4, "does not start where"); /* i32: pointers no longer fit */
    check_patched(18, 3, "size does not fit");
    check_patched(25, 0x80, "more sequences than");
    check_patched(22, 1, "more sequences than");
    check_patched(26, 0, "number of documents");
    check_patched(33, 0x7F, "number of documents");
    check_patched(37, 0x80, "negative length");
    check_patched(38, 2, "describes '10'");
    check_patched(42, 1, "does not start where");
    check_patched(50, 7, "does not start where");
    check_patched(50, 200, "beyond the end of PREFIX.bin");
    check_patched(57, 0x80, "beyond the end of PREFIX.bin");
    check_patched(58, 1, "does not start with 0");
    check_patched(66, 3, "goes backwards or beyond");
    check_patched(74, 0, "goes backwards or beyond");
    check_patched(82, 1, "does not cover all");

    write_hand("h");
    OK(open_and_close("h"));
    for (int64_t n = 0; n < (int64_t)sizeof hand_idx; n++) {
        write_bytes("h.idx", hand_idx, n);
        CHECK_MSG(open_and_close("h") == ERR_DATA, "cut to %lld bytes", (long long)n);
    }
    write_hand("h");
    write_bytes("h.bin", hand_bin, sizeof hand_bin - 1);
    FAILS(open_and_close("h"), ERR_DATA, "has '7' bytes");
    write_bytes("h.bin", hand_bin, 4);
    FAILS(open_and_close("h"), ERR_DATA, "beyond the end of PREFIX.bin");
    write_bytes("h.bin", hand_bin, 0);
    FAILS(open_and_close("h"), ERR_DATA, "h.idx");
    OK(file_remove_tree(in_dir("h.bin")));
    FAILS(open_and_close("h"), ERR_DATA, "no token file");
    FAILS(open_and_close("nowhere"), ERR_DATA, "nowhere.idx");

    uint8_t modes[sizeof hand_idx + 2] = { 0 };
    memcpy(modes, hand_idx, sizeof hand_idx);
    write_bytes("m.idx", modes, sizeof modes);
    write_bytes("m.bin", hand_bin, sizeof hand_bin);
    FAILS(open_and_close("m"), ERR_DATA, "multimodal");
    uint8_t none[42] = { 0 };
    memcpy(none, hand_idx, 18);
    none[26] = 1;
    write_bytes("m.idx", none, sizeof none);
    write_bytes("m.bin", "", 0);
    FAILS(open_and_close("m"), ERR_DATA, "holds no tokens");
}

TEST(indexed_swapped_bin)
{
    write_pair("one", TOKEN_U16, (int[]){ 5, 6 }, 2, 100);
    write_pair("two", TOKEN_U16, (int[]){ 5, 7 }, 2, 100);
    OK(file_rename(in_dir("two.bin"), in_dir("one.bin")));
    FAILS(open_and_close("one"), ERR_DATA, "has '24' bytes");
    CHECK(strstr(err_hint_text(), "another pair"));
}

TEST(indexed_bit_flips)
{
    for (int bit = 0; bit < 8 * (int)sizeof hand_idx; bit++) {
        uint8_t idx[sizeof hand_idx];
        memcpy(idx, hand_idx, sizeof idx);
        idx[bit / 8] ^= (uint8_t)(1 << bit % 8);
        write_bytes("f.idx", idx, sizeof idx);
        write_bytes("f.bin", hand_bin, sizeof hand_bin);
        Err err = open_and_close("f");
        /* some flips give another valid file: u16 read as i16, a document that ends elsewhere */
        bool harmless = (bit / 8 >= 66 && bit / 8 < 82) || bit / 8 == 17;
        CHECK_MSG(err == ERR_DATA || (harmless && err == ERR_OK), "bit %d", bit);
    }
}

TEST(indexed_vocabulary)
{
    Indexed x;
    int32_t out[8];
    int64_t highest;
    write_hand("v");
    OK(indexed_open(in_dir("v"), &x));
    OK(indexed_read(&x, 0, 4, 65536, out));
    FAILS(indexed_read(&x, 0, 4, 65535, out), ERR_DATA, "token id '65535' at byte '6' (document '2', position '0')");
    FAILS(indexed_read(&x, 1, 2, 300, out), ERR_DATA, "token id '300' at byte '4' (document '0', position '2')");
    FAILS(indexed_check(&x, 300, NULL), ERR_DATA, "document '0', position '2'");
    OK(indexed_check(&x, 0, &highest));
    CHECK(highest == 65535);
    indexed_close(&x);
    CHECK(indexed_type_for(65499) == TOKEN_U16 && indexed_type_for(65500) == TOKEN_I32);
}

TEST(indexed_writer_leaves_nothing)
{
    IndexedWriter *w;
    OK(indexed_create(in_dir("sub/deep/x"), TOKEN_I32, &w));
    OK(indexed_end_document(w));
    FAILS(indexed_finish(w), ERR_DATA, "no tokens");
    OK(indexed_create(in_dir("sub/deep/x"), TOKEN_I32, &w));
    OK(indexed_add_tokens(w, &(int32_t){ 5 }, 1));
    indexed_abandon(w);
    char command[256];
    snprintf(command, sizeof command, "test -z \"$(ls -A %s)\"", in_dir("sub/deep"));
    CHECK(system(command) == 0);
}

/* ---- order ---- */

TEST(permutations)
{
    static const int64_t sizes[] = { 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 63, 64, 65, 100, 1000, 4095, 4096, 4097, 65537 };
    static uint8_t seen[65537];
    for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++) {
        for (int epoch = 0; epoch < 3; epoch++) {
            int64_t n = sizes[k], hits = 0, fixed = 0, again = 0;
            memset(seen, 0, sizeof seen);
            for (int64_t i = 0; i < n; i++) {
                int64_t p = order_permute(1234, epoch, n, i);
                if (p < 0 || p >= n || seen[p]++) break;
                hits++;
                fixed += p == i;
                again += p == order_permute(1234, epoch + 1, n, i);
            }
            CHECK_MSG(hits == n, "n %lld, epoch %d", (long long)n, epoch);
            if (n >= 1000) CHECK_MSG(fixed < 10 && again < 10, "n %lld: %lld fixed", (long long)n, (long long)fixed);
        }
    }
    int64_t n = (1ll << 40) + 12345, p = order_permute(7, 1ll << 33, n, n - 1);
    CHECK(p >= 0 && p < n && p == order_permute(7, 1ll << 33, n, n - 1));
    CHECK(p != order_permute(8, 1ll << 33, n, n - 1) && p != order_permute(7, 0, n, n - 1));
}

/* The same numbers from test/tools/order.py; they are part of what a resumed run relies on. */
TEST(permutation_by_python)
{
    char command[256], line[64];
    if (system("/usr/bin/python3 -c '' 2>/dev/null") != 0) SKIP("no /usr/bin/python3");
    for (int64_t n = 1; n < 3000; n = n * 3 + 1) {
        snprintf(command, sizeof command, "/usr/bin/python3 test/tools/order.py 99 5 %lld", (long long)n);
        FILE *f = popen(command, "r");
        for (int64_t i = 0; i < n; i++) {
            bool ok = f && fgets(line, sizeof line, f);
            CHECK_MSG(ok && atoll(line) == order_permute(99, 5, n, i), "n %lld, i %lld", (long long)n, (long long)i);
        }
        pclose(f);
    }
}

/* Mean distance between what neighbouring positions visit: n / 3 for a random order. */
TEST(permutations_look_random)
{
    enum { N = 20000 };
    double sum = 0;
    int low = 0;
    for (int64_t i = 0; i + 1 < N; i++)
        sum += fabs((double)(order_permute(1, 0, N, i) - order_permute(1, 0, N, i + 1)));
    for (int64_t i = 0; i < N / 2; i++) low += order_permute(1, 0, N, i) < N / 2;
    CHECK_CLOSE(sum / N / N, 1.0 / 3, 0.01, "mean distance");
    CHECK_CLOSE(low / (N / 2.0), 0.5, 0.02, "share of the lower half");
}

static void check_blend(const double *weights, int n)
{
    static Blend b;
    int64_t count[BLEND_SOURCES_MAX] = { 0 }, sum = 0, wrong = 0, far = 0;
    OK(blend_init(&b, weights, n));
    for (int d = 0; d < n; d++) sum += b.units[d];
    CHECK(sum == BLEND_BLOCK);
    for (int64_t q = 0; q < 3 * BLEND_BLOCK; q++) {
        int64_t earlier;
        int d = blend_draw(&b, q, &earlier);
        wrong += earlier != count[d];
        count[d]++;
        for (int k = 0; k < n; k++)
            far += !(llabs(count[k] * BLEND_BLOCK - b.units[k] * (q + 1)) < BLEND_BLOCK);
    }
    CHECK_MSG(wrong == 0 && far == 0, "%d sources: %lld draws not sequential, %lld a whole draw away", n,
              (long long)wrong, (long long)far);
}

TEST(blends)
{
    double w[BLEND_SOURCES_MAX];
    uint64_t seed = 4;
    check_blend((double[]){ 1 }, 1);
    check_blend((double[]){ 0.5, 0.3, 0.2 }, 3);
    check_blend((double[]){ 1, 4095 }, 2);
    check_blend((double[]){ 4, 503, 852, 2733, 2, 2 }, 6);
    for (int round = 0; round < 40; round++) {
        int n = 2 + (int)(test_rand(&seed) % (round % 4 ? 12 : 200));
        for (int d = 0; d < n; d++) w[d] = pow(test_uniform(&seed, 0.3, 1), round % 3 + 1);
        check_blend(w, n);
    }
    static Blend b;
    FAILS(blend_init(&b, (double[]){ 1, 0 }, 2), ERR_CONFIG, "weight '0' of data set '2'");
    FAILS(blend_init(&b, (double[]){ NAN, 1 }, 2), ERR_CONFIG, "not a positive number");
    FAILS(blend_init(&b, (double[]){ 1, 1e6 }, 2), ERR_CONFIG, "less than 1/4096");
    OK(blend_init(&b, (double[]){ 0.5, 0.3, 0.2 }, 3));
    CHECK(b.units[0] == 2048 && b.units[1] == 1229 && b.units[2] == 819); /* 2048, 1228.8, 819.2 */
}

/* ---- splits and data sets ---- */

TEST(splits)
{
    static const struct {
        const char *split;
        int64_t documents, want[4];
    } cases[] = {
        { "969,30,1", 1000, { 0, 969, 999, 1000 } }, { "969, 30, 1", 10, { 0, 10, 10, 10 } },
        { "98,2", 100, { 0, 98, 100, 100 } },        { "1", 7, { 0, 7, 7, 7 } },
        { "0.5,0.5", 5, { 0, 2, 5, 5 } }, /* 2.5 rounds to even */
        { "1,1,1", 5, { 0, 2, 3, 5 } },              { "0.5,0.5", 7, { 0, 4, 7, 7 } }, /* 3.5 too */
        { "90,5,5", 33, { 0, 30, 31, 33 } },         { "0,1,0", 3, { 0, 0, 3, 3 } },
    };
    int64_t got[4];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        OK(split_documents(cases[i].split, cases[i].documents, got));
        CHECK_MSG(memcmp(got, cases[i].want, sizeof got) == 0, "'%s' of %lld: %lld %lld %lld", cases[i].split,
                  (long long)cases[i].documents, (long long)got[1], (long long)got[2], (long long)got[3]);
    }
    static const char *const bad[] = { "a", "1,2,3,4", "-1,2", "0,0,0", "1;2", "nan", "1,,2" };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) FAILS(split_documents(bad[i], 10, got), ERR_CONFIG, bad[i]);
}

static Dataset *open_dataset(DatasetOptions o)
{
    Dataset *d = NULL;
    OK(dataset_open(&o, &d));
    return d;
}

TEST(dataset_samples_by_definition)
{
    enum { SEQ = 6 };
    int32_t row[SEQ + 1];
    write_pair("d", TOKEN_I32, (int[]){ 5, 3, 0, 9, 4, 7 }, 6, 1000);
    Dataset *d = open_dataset((DatasetOptions){ .spec = in_dir("d"), .seq = SEQ, .seed = 3, .vocab = 1000 });
    CHECK(dataset_tokens(d) == 28 && dataset_samples(d) == 4); /* (28 - 1) / 6 */
    for (int64_t q = 0; q < 40; q++) {
        OK(dataset_get(d, q, row));
        int64_t i = order_permute(3, q / 4, 4, q % 4);
        CHECK(dataset_place(d, q).epoch == q / 4 && dataset_place(d, q).sample == i);
        for (int64_t k = 0; k <= SEQ; k++) CHECK(row[k] == ((i * SEQ + k) * 7 + 3) % 1000);
    }
    dataset_close(d);
    /* five sequences (the empty document has none): 3 and 2 of them */
    DatasetOptions o = { .spec = in_dir("d"), .split = "0.5,0.5", .seq = SEQ, .part = PART_VALID, .order = ORDER_FILE };
    d = open_dataset(o);
    CHECK(dataset_tokens(d) == 20 && dataset_samples(d) == 3); /* round(2.5) = 2: 9 + 4 + 7 */
    for (int64_t q = 0; q < 7; q++) {
        OK(dataset_get(d, q, row));
        for (int64_t k = 0; k <= SEQ; k++) CHECK(row[k] == ((8 + q % 3 * SEQ + k) * 7 + 3) % 1000);
    }
    uint32_t crc = dataset_crc(d);
    dataset_close(d);
    o.seed = 1;
    d = open_dataset(o);
    CHECK(dataset_crc(d) != crc);
    dataset_close(d);
}

TEST(dataset_blend)
{
    enum { SEQ = 4 };
    int32_t row[SEQ + 1];
    char spec[512];
    write_pair("b0", TOKEN_U16, (int[]){ 40, 41 }, 2, 100);
    write_pair("b1", TOKEN_I32, (int[]){ 30 }, 1, 5000);
    snprintf(spec, sizeof spec, " 0.7 %s  0.3 %s ", in_dir("b0"), in_dir("b1"));
    Dataset *d = open_dataset((DatasetOptions){ .spec = spec, .seq = SEQ, .seed = 8 });
    CHECK(dataset_source_count(d) == 2 && dataset_samples(d) == 20 + 7);
    int64_t own[2] = { 0, 0 }, samples[2] = { 20, 7 };
    for (int64_t q = 0; q < 10000; q++) {
        DatasetPlace p = dataset_place(d, q);
        int64_t k = own[p.source]++;
        bool ok = p.epoch == k / samples[p.source] &&
                  p.sample == order_permute(8, p.epoch, samples[p.source], k % samples[p.source]);
        CHECK(ok && fabs((double)own[0] - 0.7 * (double)(q + 1)) < 1 + 1e-4 * (double)q);
        OK(dataset_get(d, q, row));
        CHECK(row[0] == (p.sample * SEQ * 7 + 3) % (p.source ? 5000 : 100));
    }
    dataset_close(d);
}

TEST(dataset_errors)
{
    Dataset *d;
    int32_t row[8];
    char two[400];
    write_pair("e", TOKEN_U16, (int[]){ 5, 3 }, 2, 1000);
    DatasetOptions o = { .spec = in_dir("e"), .seq = 7, .vocab = 20 };
    OK(dataset_open(&o, &d));
    FAILS(dataset_get(d, 0, row), ERR_DATA, "token id '24' at byte '6' (document '0', position '3')");
    dataset_close(d);
    o.seq = 8;
    FAILS(dataset_open(&o, &d), ERR_DATA, "too few for one sample of '8' + 1");
    o.seq = 2, o.split = "1,0,0", o.part = PART_TEST;
    FAILS(dataset_open(&o, &d), ERR_DATA, "leaves no document of '2' for test");
    o.split = "x";
    FAILS(dataset_open(&o, &d), ERR_CONFIG, "split 'x'");
    o.split = NULL, o.spec = "";
    FAILS(dataset_open(&o, &d), ERR_CONFIG, "cannot read the data set");
    o.spec = "1 a 2";
    FAILS(dataset_open(&o, &d), ERR_CONFIG, "1 a 2");
    o.spec = "x a y b";
    FAILS(dataset_open(&o, &d), ERR_CONFIG, "x a y b");
    snprintf(two, sizeof two, "1 %s 1 %s", in_dir("e"), in_dir("gone"));
    o.spec = two;
    FAILS(dataset_open(&o, &d), ERR_DATA, "gone.idx");
}

/* ---- loader ---- */

enum { LSEQ = 5, LROW = LSEQ + 1 };

static Dataset *loader_data(void)
{
    static int lengths[50];
    for (int i = 0; i < 50; i++) lengths[i] = 7 + i % 13;
    write_pair("l", TOKEN_U16, lengths, 50, 60000);
    return open_dataset((DatasetOptions){ .spec = in_dir("l"), .seq = LSEQ, .seed = 21, .vocab = 60000 });
}

static bool equals_direct(const Dataset *d, int64_t first, int64_t count, const int32_t *rows)
{
    int32_t want[LROW];
    for (int64_t i = 0; i < count; i++) {
        OK(dataset_get(d, first + i, want));
        if (memcmp(want, rows + i * LROW, sizeof want) != 0) return false;
    }
    return true;
}

TEST(loader_equals_direct)
{
    Dataset *d = loader_data();
    int32_t rows[24 * LROW];
    static const struct {
        int64_t first, global;
        int dp, micro;
    } cases[] = { { 0, 12, 1, 3 }, { 0, 12, 4, 1 }, { 24, 12, 2, 2 }, { 7, 24, 3, 8 }, { 5, 6, 6, 1 }, { 0, 5, 1, 5 } };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        int64_t slice = cases[c].global / cases[c].dp;
        char taken[512] = { 0 };
        for (int r = 0; r < cases[c].dp; r++) {
            LoaderOptions o = { d, cases[c].first, cases[c].global, cases[c].dp, r };
            Loader *l;
            OK(loader_open(&o, &l));
            for (int64_t batch = cases[c].first; batch < cases[c].first + 6 * cases[c].global; batch += cases[c].global)
                for (int64_t m = 0; m < slice; m += cases[c].micro) {
                    int64_t at = loader_slice(&o, batch) + m;
                    OK(loader_get(l, at, cases[c].micro, rows));
                    CHECK(equals_direct(d, at, cases[c].micro, rows));
                    for (int i = 0; i < cases[c].micro; i++) taken[at + i - cases[c].first]++;
                }
            CHECK(loader_stats(l).fetched_samples == 0 && loader_stats(l).copied_samples == 6 * slice);
            loader_close(l);
        }
        /* all ranks together: the interval, each position once */
        for (int64_t i = 0; i < 6 * cases[c].global; i++) CHECK(taken[i] == 1);
        CHECK(taken[6 * cases[c].global] == 0);
    }
    dataset_close(d);
}

TEST(loader_jumps)
{
    Dataset *d = loader_data();
    int32_t rows[24 * LROW];
    uint64_t seed = 6;
    Loader *l;
    OK(loader_open(&(LoaderOptions){ d, 0, 8, 2, 1 }, &l));
    for (int i = 0; i < 500; i++) {
        int64_t at = (int64_t)(test_rand(&seed) % (i % 2 ? 40 : 1000)), n = 1 + (int64_t)(test_rand(&seed) % 20);
        OK(loader_get(l, at, n, rows));
        CHECK(equals_direct(d, at, n, rows));
    }
    CHECK(loader_stats(l).fetched_samples > 0);
    loader_close(l);
    OK(loader_open(&(LoaderOptions){ d, 0, 8, 2, 1 }, &l)); /* closed while it reads ahead */
    loader_close(l);
    dataset_close(d);
}

TEST(loader_reports_bad_tokens)
{
    int32_t rows[2 * LROW];
    Loader *l;
    write_pair("lb", TOKEN_U16, (int[]){ 40 }, 1, 200);
    Dataset *d = open_dataset((DatasetOptions){ .spec = in_dir("lb"), .seq = LSEQ, .vocab = 100, .order = ORDER_FILE });
    OK(loader_open(&(LoaderOptions){ d, 0, 2, 1, 0 }, &l));
    OK(loader_get(l, 0, 2, rows));
    FAILS(loader_get(l, 2, 2, rows), ERR_DATA, "token id '101' at byte '28' (document '0', position '14')");
    loader_close(l);
    dataset_close(d);
}

/* ---- preprocess ---- */

static PreprocessResult preprocess(PreprocessOptions o)
{
    PreprocessResult r = { 0 };
    OK(preprocess_run(&o, &r));
    return r;
}

/* The documents of a pair as text, '|' after each. */
static void check_documents(const char *prefix, const char *want)
{
    Indexed x;
    char got[512] = "";
    size_t n = 0;
    OK(indexed_open(in_dir(prefix), &x));
    for (int64_t doc = 0, s = 0; doc < x.documents; doc++) {
        for (; s < indexed_document_end(&x, doc); s++)
            for (int64_t i = 0; i < indexed_length(&x, s); i++) {
                int32_t id;
                OK(indexed_read(&x, indexed_start(&x, s) + i, 1, 257, &id));
                got[n++] = id == 256 ? '$' : (char)id;
            }
        got[n++] = '|';
    }
    got[n] = 0;
    CHECK_MSG(strcmp(got, want) == 0, "got '%s', want '%s'", got, want);
    indexed_close(&x);
}

TEST(preprocess_documents)
{
    write_text("a.txt", "one\n\n \t\ntwo\nlines\r\n\r\nend");
    write_text("b.txt", "");
    write_text("c.txt", "\n\nx\n\n");
    write_text("d.jsonl", "{\"text\":\"A\\n\"}\n\n{\"b\":1,\"text\":\"\"}\n{\"text\":\"B\"}");
    const char *texts[] = { in_dir("a.txt"), in_dir("b.txt"), in_dir("c.txt") }, *jsonl[] = { in_dir("d.jsonl") };
    PreprocessOptions o = { .inputs = texts, .input_count = 3, .tokenizer = "byte", .output = in_dir("out/p") };
    PreprocessResult r = preprocess(o);
    check_documents("out/p", "one\n\n \t\ntwo\nlines\r\n\r\nend||\n\nx\n\n|");
    CHECK(r.documents == 3 && r.empty_documents == 1 && r.tokens == 29 && r.input_bytes == 29 && r.vocab == 257);
    o.append_eod = true;
    preprocess(o);
    check_documents("out/p", "one\n\n \t\ntwo\nlines\r\n\r\nend$||\n\nx\n\n$|");
    o.split_blank_lines = true;
    preprocess(o);
    check_documents("out/p", "one$|two\nlines\r$|end$|x$|");
    preprocess((PreprocessOptions){ .inputs = jsonl, .input_count = 1, .tokenizer = "byte", .output = in_dir("out/p"),
                                    .format = INPUT_JSONL, .append_eod = true });
    check_documents("out/p", "A\n$||B$|");
}

static char *make_corpus(int64_t bytes, int words_a_line)
{
    static const char *const words[] = { "alpha", "beta", "gamma", "caf\xC3\xA9", "42", "...", "it's", "\xE6\x97\xA5\xE6\x9C\xAC" };
    uint64_t seed = 77;
    char *text = malloc((size_t)bytes + 64);
    int64_t n = 0;
    for (int k = 1; n < bytes; k++)
        n += sprintf(text + n, "%s%c", words[test_rand(&seed) % 8], k % words_a_line ? ' ' : '\n');
    text[n] = 0;
    return text;
}

/* Several chunks; one thread and three give the same files, and both the ids of the text encoded in one go. */
TEST(preprocess_threads_and_chunks)
{
    char *text = make_corpus(3 << 20, 12);
    int64_t size = (int64_t)strlen(text);
    Tokenizer *t;
    TokenList ids;
    Indexed x;
    write_bytes("big.txt", text, size);
    const char *inputs[] = { in_dir("big.txt"), in_dir("big.txt") };
    char vocabulary[200];
    snprintf(vocabulary, sizeof vocabulary, "%s", in_dir("big.json"));
    OK(tokenizer_train(&(TokenizerTrainOptions){ inputs, 1, 290, vocabulary }, NULL));
    PreprocessOptions o = { .inputs = inputs, .input_count = 2, .tokenizer = vocabulary, .output = in_dir("t1"),
                            .append_eod = true, .threads = 1 };
    preprocess(o);
    o.threads = 3, o.output = in_dir("t3");
    preprocess(o);
    CHECK(same_files("t1.bin", "t3.bin") && same_files("t1.idx", "t3.idx"));
    OK(tokenizer_open(vocabulary, &t));
    OK(tokenizer_encode(t, text, size, &ids));
    OK(token_list_add(&ids, tokenizer_eod(t)));
    OK(indexed_open(in_dir("t1"), &x));
    int32_t *back = malloc((size_t)ids.count * sizeof *back);
    CHECK(x.documents == 2 && indexed_length(&x, 0) == ids.count && x.tokens == 2 * ids.count);
    for (int64_t half = 0; half < 2; half++) {
        OK(indexed_read(&x, half * ids.count, ids.count, 290, back));
        CHECK(memcmp(back, ids.ids, (size_t)ids.count * sizeof *back) == 0);
    }
    indexed_close(&x);
    free(back);
    free(ids.ids);
    free(text);
    tokenizer_close(t);
}

TEST(preprocess_lines_in_chunks)
{
    enum { LINES = 30000 };
    char *text = malloc(LINES * 64);
    Indexed x;
    int64_t n = 0;
    for (int i = 0; i < LINES; i++) n += sprintf(text + n, "{\"id\":%d,\"body\":\"line number %d\"}\n", i, i);
    write_bytes("many.jsonl", text, n);
    const char *inputs[] = { in_dir("many.jsonl") };
    PreprocessOptions o = { .inputs = inputs, .input_count = 1, .tokenizer = "byte", .output = in_dir("many"),
                            .format = INPUT_JSONL, .key = "body", .threads = 2 };
    CHECK(preprocess(o).documents == LINES);
    OK(indexed_open(in_dir("many"), &x));
    for (int64_t i = 0; i < LINES; i += 997) {
        char want[32], got[32] = "";
        int32_t ids[32];
        int64_t size = sprintf(want, "line number %lld", (long long)i);
        CHECK(indexed_length(&x, i) == size);
        OK(indexed_read(&x, indexed_start(&x, i), size, 256, ids));
        for (int64_t k = 0; k < size; k++) got[k] = (char)ids[k];
        CHECK(strcmp(got, want) == 0);
    }
    indexed_close(&x);
    text[n / 2] = '\n'; /* breaks a line in two */
    write_bytes("many.jsonl", text, n);
    PreprocessResult r;
    FAILS(preprocess_run(&o, &r), ERR_DATA, "many.jsonl': line '15");
    free(text);
}

TEST(preprocess_errors)
{
    write_bytes("none.txt", "", 0);
    write_bytes("bad.txt", "ok \xFF\xFE ok", 8);
    const char *none[] = { in_dir("none.txt") }, *gone[] = { in_dir("gone.txt") }, *bad[] = { in_dir("bad.txt") };
    const char *folder[] = { dir };
    PreprocessResult r;
    PreprocessOptions o = { .inputs = none, .input_count = 1, .tokenizer = "byte", .output = in_dir("err/x"), .append_eod = true };
    FAILS(preprocess_run(&o, &r), ERR_DATA, "no text");
    o.inputs = gone;
    FAILS(preprocess_run(&o, &r), ERR_DATA, "gone.txt");
    o.inputs = folder;
    FAILS(preprocess_run(&o, &r), ERR_DATA, "not a regular file");
    o.inputs = bad, o.format = INPUT_JSONL;
    FAILS(preprocess_run(&o, &r), ERR_DATA, "bad.txt': line '1': column '1'");
    o.tokenizer = "nothing";
    FAILS(preprocess_run(&o, &r), ERR_DATA, "no tokenizer 'nothing'");
    char command[256];
    snprintf(command, sizeof command, "test -z \"$(ls -A %s)\"", in_dir("err"));
    CHECK(system(command) == 0); /* nothing half-written is left */
    o.tokenizer = "byte", o.format = INPUT_TEXT, o.append_eod = false;
    r = preprocess(o);
    CHECK(r.invalid_bytes == 2);
    check_documents("err/x", "ok \xFF\xFE ok|");
    o.output = "/proc/none/x";
    FAILS(preprocess_run(&o, &r), ERR_IO, "/proc/none");
}

TEST_MAIN
