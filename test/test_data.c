/*
 * Permutations, blends and splits against their definitions; data sets and the loader against
 * direct reads.
 */
#include "test.h"

#include "data/loader.h"
#include "data/order.h"
#include "data/sets.h"
#include "token_pair.h"
#include "train/data_id.h"

/* ---- order ---- */

TEST(permutations)
{
    static const int64_t sizes[] = { 1,  2,  3,  4,   5,    7,    8,    15,   16,   17,
                                     63, 64, 65, 100, 1000, 4095, 4096, 4097, 65537 };
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
            if (n >= 1000)
                CHECK_MSG(fixed < 10 && again < 10, "n %lld: %lld fixed", (long long)n,
                          (long long)fixed);
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
        snprintf(command, sizeof command, "/usr/bin/python3 test/tools/order.py 99 5 %lld",
                 (long long)n);
        FILE *f = popen(command, "r");
        for (int64_t i = 0; i < n; i++) {
            bool ok = f && fgets(line, sizeof line, f);
            CHECK_MSG(ok && atoll(line) == order_permute(99, 5, n, i), "n %lld, i %lld",
                      (long long)n, (long long)i);
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

/* The data set of draw k by the definition: of the shares that have begun the one that ends first. */
static int source_of(const Blend *b, const int64_t *taken, int64_t k)
{
    int best = -1;
    int64_t best_due = 0;
    for (int d = 0; d < b->source_count; d++) {
        const int64_t begun = taken[d] * b->block / b->units[d];
        const int64_t due = ((taken[d] + 1) * b->block + b->units[d] - 1) / b->units[d];
        if (begun > k || (best >= 0 && due >= best_due)) continue;
        best = d;
        best_due = due;
    }
    return best;
}

static void check_blend(const double *weights, int n)
{
    static Blend b;
    int64_t count[BLEND_SOURCES_MAX] = { 0 }, sum = 0, wrong = 0, far = 0;
    double all = 0;
    SetupArena mem;
    setup_init(&mem);
    OK(blend_init(&b, weights, n, &mem));
    for (int d = 0; d < n; d++) all += weights[d];
    for (int d = 0; d < n; d++)
        CHECK(b.units[d] > 0 && fabs(b.units[d] - weights[d] / all * b.block) < 1);
    for (int d = 0; d < n; d++) sum += b.units[d];
    CHECK(sum == b.block);
    for (int64_t q = 0; q < 3 * b.block; q++) {
        int64_t earlier;
        int d = blend_draw(&b, q, &earlier);
        wrong += earlier != count[d] || (q < b.block && d != source_of(&b, count, q));
        count[d]++;
        wrong += blend_taken(&b, q + 1, d) != count[d] || blend_taken(&b, q + 1, n - 1) != count[n - 1];
        for (int k = 0; k < n; k++)
            far += !(llabs(count[k] * b.block - b.units[k] * (q + 1)) < b.block);
    }
    CHECK_MSG(wrong == 0 && far == 0,
              "%d sources: %lld draws not sequential, %lld a whole draw away", n, (long long)wrong,
              (long long)far);
    setup_release(&mem);
}

/* As many data sets as there may be, the least with one draw of the longest block: 2 bytes a draw. */
static void check_large_blend(void)
{
    static Blend b;
    double weights[BLEND_SOURCES_MAX];
    int64_t count[BLEND_SOURCES_MAX] = { 0 }, wrong = 0, earlier;
    SetupArena mem;
    setup_init(&mem);
    for (int d = 0; d < BLEND_SOURCES_MAX; d++) weights[d] = pow(10, -4.6 * d / (BLEND_SOURCES_MAX - 1));
    OK(blend_init(&b, weights, BLEND_SOURCES_MAX, &mem));
    CHECK(b.block == BLEND_BLOCK_MOST && b.units[BLEND_SOURCES_MAX - 1] == 1 && mem.total_bytes < 3 << 20);
    for (int64_t q = 0; q < b.block; q++) {
        const int d = blend_draw(&b, q, &earlier);
        wrong += earlier != count[d] || (q % 4099 == 0 && d != source_of(&b, count, q));
        count[d]++;
    }
    for (int d = 0; d < BLEND_SOURCES_MAX; d++)
        wrong += count[d] != b.units[d] || blend_taken(&b, b.block + 1, d) != count[d] + (b.source[0] == d);
    CHECK_MSG(!wrong, "%lld draws of a large blend are wrong", (long long)wrong);
    setup_release(&mem);
}

static int32_t block_of(double a, double b)
{
    static Blend blend;
    SetupArena mem;
    setup_init(&mem);
    OK(blend_init(&blend, (double[]){ a, b }, 2, &mem));
    setup_release(&mem);
    return blend.block;
}

TEST(blends)
{
    double w[BLEND_SOURCES_MAX];
    uint64_t seed = 4;
    check_blend((double[]){ 1 }, 1);
    check_blend((double[]){ 0.5, 0.3, 0.2 }, 3);
    check_blend((double[]){ 1, 4095 }, 2);
    check_blend((double[]){ 4, 503, 852, 2733, 2, 2 }, 6);
    check_blend((double[]){ 1, 5000, 5000 }, 3); /* less than a 4096th */
    check_blend((double[]){ 1e-5, 1 }, 2);
    check_large_blend();
    CHECK(block_of(1, 4095) == 4096 && block_of(1, 9999) == 16384 && block_of(1, 3e5) == 1 << 19);
    for (int round = 0; round < 40; round++) {
        int n = 2 + (int)(test_rand(&seed) % (round % 4 ? 12 : 200));
        for (int d = 0; d < n; d++) w[d] = pow(test_uniform(&seed, 0.3, 1), round % 3 + 1);
        check_blend(w, n);
    }
    static Blend b;
    SetupArena mem;
    setup_init(&mem);
    FAILS(blend_init(&b, (double[]){ 1, 0 }, 2, &mem), ERR_CONFIG, "weight 0 of data set 2");
    FAILS(blend_init(&b, (double[]){ NAN, 1 }, 2, &mem), ERR_CONFIG, "not a positive number");
    FAILS(blend_init(&b, (double[]){ 1, 1e7 }, 2, &mem), ERR_CONFIG, "less than 1/1048576");
    OK(blend_init(&b, (double[]){ 0.5, 0.3, 0.2 }, 3, &mem));
    CHECK(b.units[0] == 2048 && b.units[1] == 1229 && b.units[2] == 819); /* 2048, 1228.8, 819.2 */
    setup_release(&mem);
}

/* ---- splits and data sets ---- */

TEST(splits)
{
    static const struct {
        const char *split;
        int64_t documents, want[4];
    } cases[] = {
        { "969,30,1", 1000, { 0, 969, 999, 1000 } },
        { "969, 30, 1", 10, { 0, 10, 10, 10 } },
        { "98,2", 100, { 0, 98, 100, 100 } },
        { "1", 7, { 0, 7, 7, 7 } },
        { "0.5,0.5", 5, { 0, 2, 5, 5 } }, /* 2.5 rounds to even */
        { "1,1,1", 5, { 0, 2, 3, 5 } },
        { "0.5,0.5", 7, { 0, 4, 7, 7 } }, /* 3.5 too */
        { "90,5,5", 33, { 0, 30, 31, 33 } },
        { "0,1,0", 3, { 0, 0, 3, 3 } },
    };
    int64_t got[4];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        OK(split_documents(cases[i].split, cases[i].documents, got));
        CHECK_MSG(memcmp(got, cases[i].want, sizeof got) == 0, "'%s' of %lld: %lld %lld %lld",
                  cases[i].split, (long long)cases[i].documents, (long long)got[1],
                  (long long)got[2], (long long)got[3]);
    }
    static const char *const bad[] = { "a", "1,2,3,4", "-1,2", "0,0,0", "1;2", "nan", "1,,2" };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        FAILS(split_documents(bad[i], 10, got), ERR_CONFIG, bad[i]);
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
    Dataset *d =
        open_dataset((DatasetOptions){ .spec = in_dir("d"), .seq = SEQ, .seed = 3, .vocab = 1000 });
    CHECK(dataset_tokens(d) == 28 && dataset_samples(d) == 4); /* (28 - 1) / 6 */
    for (int64_t q = 0; q < 40; q++) {
        OK(dataset_get(d, q, row));
        int64_t i = order_permute(3, q / 4, 4, q % 4);
        CHECK(dataset_place(d, q).epoch == q / 4 && dataset_place(d, q).sample == i);
        for (int64_t k = 0; k <= SEQ; k++) CHECK(row[k] == ((i * SEQ + k) * 7 + 3) % 1000);
    }
    dataset_close(d);
    /* five sequences (the empty document has none): 3 and 2 of them */
    DatasetOptions o = {
        .spec = in_dir("d"), .split = "0.5,0.5", .seq = SEQ, .part = PART_VALID, .order = ORDER_FILE
    };
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
    CHECK(dataset_crc(d) == crc); /* nothing is drawn */
    dataset_close(d);
    o.order = ORDER_KEYED;
    d = open_dataset(o);
    crc = dataset_crc(d);
    dataset_close(d);
    o.seed = 2;
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

/* Documents [from, to) of 50 of different lengths: token k of document d is (31 d + 7 k) % 200. */
static void write_documents(const char *prefix, TokenType type, int from, int to)
{
    IndexedWriter *w;
    OK(indexed_create(in_dir(prefix), type, &w));
    for (int d = from; d < to; d++) {
        for (int k = 0; k < 3 + d * 17 % 40; k++)
            OK(indexed_add_tokens(w, &(int32_t){ (31 * d + 7 * k) % 200 }, 1));
        OK(indexed_end_document(w));
    }
    OK(indexed_finish(w));
}

/* Several files are read as the one that holds all their documents, however they are named. */
TEST(dataset_shards)
{
    enum { SEQ = 6 };
    static const DataOrder orders[] = { ORDER_KEYED, ORDER_FILE, ORDER_MEGATRON };
    char list[1200], spec[6][256];
    int32_t row[SEQ + 1], want[SEQ + 1];
    OK(file_make_dirs(in_dir("sh[1]")));
    write_documents("all", TOKEN_I32, 0, 50);
    write_documents("sh[1]/b-2", TOKEN_I32, 30, 50); /* (written in another order) */
    write_documents("sh[1]/a-1", TOKEN_U16, 0, 1);
    write_documents("sh[1]/b-10", TOKEN_U16, 1, 30); /* bytes: '1' before '2' */
    snprintf(list, sizeof list, "# shards\n%s\r\n\n  %s.bin \n%s.idx", in_dir("sh[1]/a-1"), in_dir("sh[1]/b-10"),
             in_dir("sh[1]/b-2"));
    write_text("list.txt", list);
    snprintf(spec[0], sizeof spec[0], "%s", in_dir("sh[1]"));
    snprintf(spec[1], sizeof spec[1], "%s", in_dir("sh[[]1]/[ab]-*"));
    snprintf(spec[2], sizeof spec[2], "%s", in_dir("sh[[]1]/?-*.bin"));
    write_text("a list.txt", list);
    snprintf(spec[3], sizeof spec[3], "@%s", in_dir("list.txt"));
    snprintf(spec[4], sizeof spec[4], "@\"%s\"", in_dir("a list.txt"));
    snprintf(spec[5], sizeof spec[5], "'@%s'", in_dir("a list.txt"));
    for (int i = 0; i < 3 * 6 * 2; i++) {
        DatasetOptions o = { .spec = in_dir("all"), .seq = SEQ, .seed = 5, .samples = 900, .order = orders[i % 3] };
        if (i >= 18) o.split = "70,30";
        Dataset *whole = open_dataset(o);
        o.spec = spec[i / 3 % 6];
        Dataset *parts = open_dataset(o);
        CHECK(dataset_source_count(parts) == 1 && dataset_tokens(parts) == dataset_tokens(whole));
        CHECK(dataset_source(parts, 0).files == 3 && dataset_source(parts, 0).documents == 50);
        for (int64_t p = 0; p < o.samples; p++) {
            OK(dataset_get(whole, p, want));
            OK(dataset_get(parts, p, row));
            CHECK_MSG(!memcmp(row, want, sizeof row), "%s, position %lld", o.spec, (long long)p);
        }
        dataset_close(whole);
        dataset_close(parts);
    }
}

TEST(dataset_shards_refused)
{
    char text[1200], spec[256];
    Dataset *d;
    DatasetOptions o = { .spec = spec, .seq = 4 };
    OK(file_make_dirs(in_dir("none")));
    write_documents("r", TOKEN_U16, 0, 9);
    snprintf(spec, sizeof spec, "%s", in_dir("none"));
    FAILS(dataset_open(&o, &d), ERR_DATA, "holds no token files");
    snprintf(spec, sizeof spec, "%s", in_dir("none/*"));
    FAILS(dataset_open(&o, &d), ERR_DATA, "no token files match");
    snprintf(spec, sizeof spec, "@%s", in_dir("refused.txt"));
    FAILS(dataset_open(&o, &d), ERR_CONFIG, "refused.txt");
    write_text("refused.txt", "# nothing\n\n");
    FAILS(dataset_open(&o, &d), ERR_CONFIG, "names none");
    snprintf(text, sizeof text, "%s\n0.5 %s\n", in_dir("r"), in_dir("r"));
    write_text("refused.txt", text);
    FAILS(dataset_open(&o, &d), ERR_CONFIG, "line 2");
    snprintf(text, sizeof text, "%s.idx\n%s.bin\n", in_dir("r"), in_dir("r"));
    write_text("refused.txt", text);
    FAILS(dataset_open(&o, &d), ERR_CONFIG, "there twice");
    snprintf(text, sizeof text, "%s\n%s\n", in_dir("r"), in_dir("gone"));
    write_text("refused.txt", text);
    FAILS(dataset_open(&o, &d), ERR_DATA, "gone.idx");
}

/* Three stages over two files and a third: every file is read on where the stage before left it, by counting. */
TEST(dataset_stages)
{
    enum { SEQ = 4, STAGES = 3, FILES = 3 };
    static const int samples[FILES] = { 20, 7, 12 }, firsts[STAGES] = { 0, 4 * 6, 4 * 6 + 3000 * 4 };
    char spec[1024], part[STAGES][256];
    int32_t row[SEQ + 1];
    BatchRamp ramp;
    int64_t own[FILES] = { 0 };
    write_pair("s0", TOKEN_U16, (int[]){ 40, 41 }, 2, 100);
    write_pair("s1", TOKEN_I32, (int[]){ 30 }, 1, 5000);
    write_pair("s2", TOKEN_U16, (int[]){ 49 }, 1, 300);
    CHECK(!batch_ramp_read("6*4,4", &ramp)); /* steps 1 to 4 read 24 samples, 5 to 3004 12,000 */
    snprintf(part[0], sizeof part[0], "%s", in_dir("s0"));
    snprintf(part[1], sizeof part[1], "0.7 %s 0.3 %s", in_dir("s1"), in_dir("s0"));
    snprintf(part[2], sizeof part[2], "1 %s 1 %s", in_dir("s0"), in_dir("s2"));
    snprintf(spec, sizeof spec, "%s  @5 %s @3005\t%s ", part[0], part[1], part[2]);
    Dataset *d = open_dataset((DatasetOptions){ .spec = spec, .seq = SEQ, .seed = 8, .ramp = &ramp });
    CHECK(dataset_source_count(d) == 5);
    for (int k = 0; k < STAGES; k++) {
        const int files[STAGES][2] = { { 0, 0 }, { 1, 0 }, { 0, 2 } };
        Dataset *alone = open_dataset((DatasetOptions){ .spec = part[k], .seq = SEQ, .seed = 8 });
        const DatasetStage s = dataset_stage(d, firsts[k]);
        CHECK(s.number == k && s.count == STAGES && s.first == firsts[k] && !strcmp(s.spec, part[k]));
        CHECK(s.samples == dataset_samples(alone) && (!k || dataset_stage(d, firsts[k] - 1).number == k - 1));
        const int64_t end = k + 1 < STAGES ? firsts[k + 1] : firsts[k] + 5000;
        for (int64_t q = firsts[k]; q < end; q++) {
            const int file = files[k][dataset_place(alone, q - firsts[k]).source];
            const int64_t at = own[file]++, n = samples[file];
            const int64_t want = order_permute(8, at / n, n, at % n);
            OK(dataset_get(d, q, row));
            CHECK_MSG(row[0] == (want * SEQ * 7 + 3) % (file == 1 ? 5000 : file ? 300 : 100), "stage %d, position %lld",
                      k, (long long)q);
        }
        dataset_close(alone);
    }
    const uint32_t crc = dataset_crc(d);
    dataset_close(d);
    snprintf(spec, sizeof spec, "%s @6 %s @3005 %s", part[0], part[1], part[2]);
    d = open_dataset((DatasetOptions){ .spec = spec, .seq = SEQ, .seed = 8, .ramp = &ramp });
    CHECK(dataset_crc(d) != crc);
    dataset_close(d);
}

TEST(dataset_stages_errors)
{
    static const struct {
        const char *spec, *says;
    } wrong[] = { { "%s @1 %s", "'@1' in data.train: each stage must begin at a later step" },
                  { "%s @0 %s", "'@0' in data.train: each stage" },
                  { "%s @9 %s @9 x", "'@9' in data.train: each stage" },
                  { "%s @9x %s", "'@9x' in data.train: no number of a step" },
                  { "%s @99999999999999999999 %s", "in data.train: each stage" },
                  { "%s @9", "cannot read the data set ''" },
                  { "@9 %s", "cannot read the data set '@9" },
                  { "%s @9 1 %s 2", "cannot read the data set '1 " } };
    const BatchRamp ramp = batch_ramp_flat(2);
    char spec[512];
    Dataset *d;
    write_pair("s", TOKEN_U16, (int[]){ 40 }, 1, 100);
    DatasetOptions o = { .spec = spec, .seq = 4, .ramp = &ramp, .samples = 8 };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        snprintf(spec, sizeof spec, wrong[i].spec, in_dir("s"), in_dir("s"));
        FAILS(dataset_open(&o, &d), ERR_CONFIG, wrong[i].says);
    }
    snprintf(spec, sizeof spec, "%s @9 %s", in_dir("s"), in_dir("s"));
    OK(dataset_open(&o, &d));
    dataset_close(d);
    o.order = ORDER_MEGATRON;
    FAILS(dataset_open(&o, &d), ERR_CONFIG, "'@9' in data.train: data.order=megatron is an order of one data set");
    o.order = ORDER_KEYED, o.split = "1,1";
    FAILS(dataset_open(&o, &d), ERR_CONFIG, "'@9' in data.train: stages need data.valid, not data.split");
    o.split = NULL, o.ramp = NULL;
    FAILS(dataset_open(&o, &d), ERR_CONFIG, "only training data have stages");
}

TEST(dataset_errors)
{
    Dataset *d;
    int32_t row[8];
    char two[400];
    write_pair("e", TOKEN_U16, (int[]){ 5, 3 }, 2, 1000);
    DatasetOptions o = { .spec = in_dir("e"), .seq = 7, .vocab = 20 };
    OK(dataset_open(&o, &d));
    FAILS(dataset_check(d, 1), ERR_DATA, "token id 24 at byte 6");
    FAILS(dataset_get(d, 0, row), ERR_DATA,
          "token id 24 at byte 6 (document 0, position 3)");
    dataset_close(d);
    o.seq = 8;
    FAILS(dataset_open(&o, &d), ERR_DATA, "too few for one sample of 8 + 1");
    o.seq = 2, o.split = "1,0,0", o.part = PART_TEST;
    FAILS(dataset_open(&o, &d), ERR_DATA, "leaves none of its 2 documents for test");
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

/* A name with blanks stands in quotes, or in a line of a list; quotes inside of a word are characters. */
TEST(names_with_blanks)
{
    char spec[1024], list[256];
    Dataset *d;
    Sets s;
    write_pair("my data", TOKEN_U16, (int[]){ 40 }, 1, 100);
    write_pair("it's", TOKEN_U16, (int[]){ 30 }, 1, 100);
    DatasetOptions o = { .spec = spec, .seq = 4 };
    snprintf(spec, sizeof spec, "'%s'", in_dir("my data"));
    OK(dataset_open(&o, &d));
    CHECK(!strcmp(dataset_source_name(d, 0), in_dir("my data")));
    dataset_close(d);
    snprintf(spec, sizeof spec, "0.7 \"%s\" 0.3 %s", in_dir("my data"), in_dir("it's"));
    OK(dataset_open(&o, &d));
    CHECK(dataset_source_count(d) == 2 && dataset_samples(d) == 9 + 7);
    dataset_close(d);
    snprintf(spec, sizeof spec, "%s", in_dir("my data"));
    FAILS(dataset_open(&o, &d), ERR_CONFIG, "cannot read the data set");
    CHECK(strstr(err_hint_text(), "a name with blanks stands in quotes: \""));
    snprintf(list, sizeof list, "%s", in_dir("list of two.txt"));
    FILE *f = fopen(list, "w");
    fprintf(f, "# two\n  %s \n\n'%s'\n", in_dir("my data"), in_dir("it's"));
    fclose(f);
    snprintf(spec, sizeof spec, "'@%s'", list);
    OK(dataset_open(&o, &d));
    CHECK(dataset_source_count(d) == 1 && dataset_tokens(d) == 70);
    dataset_close(d);
    snprintf(spec, sizeof spec, "a: '%s'  b: %s", in_dir("my data"), in_dir("it's"));
    OK(sets_open(&o, &s));
    CHECK(s.count == 2 && !strcmp(s.set[1].name, "b"));
    sets_close(&s);
}

/* ---- several under names ---- */

TEST(named_sets)
{
    char spec[1024];
    int32_t row[5];
    Sets s;
    write_pair("v0", TOKEN_U16, (int[]){ 40, 41 }, 2, 100);
    write_pair("v1", TOKEN_I32, (int[]){ 30 }, 1, 5000);
    DatasetOptions o = { .spec = spec, .seq = 4, .order = ORDER_FILE };

    snprintf(spec, sizeof spec, "%s", in_dir("v0"));
    OK(sets_open(&o, &s));
    CHECK(s.count == 1 && strcmp(s.set[0].name, "") == 0 && dataset_samples(s.set[0].data) == 20);
    sets_close(&s);

    snprintf(spec, sizeof spec, " wiki: %s\tcode:  1 %s 3 %s  x:y:  %s ", in_dir("v1"), in_dir("v0"), in_dir("v1"),
             in_dir("v0"));
    OK(sets_open(&o, &s));
    CHECK(s.count == 3);
    CHECK(!strcmp(s.set[0].name, "wiki") && !strcmp(s.set[1].name, "code") && !strcmp(s.set[2].name, "x:y"));
    CHECK(dataset_source_count(s.set[1].data) == 2 && dataset_samples(s.set[1].data) == 27);
    OK(dataset_get(s.set[0].data, 1, row));
    CHECK(row[0] == 4 * 7 + 3 && dataset_samples(s.set[0].data) == 7);
    sets_close(&s);

    o.split = "1,1"; /* of the documents of one data set, whatever its name */
    snprintf(spec, sizeof spec, "%s", in_dir("v0"));
    o.part = PART_VALID;
    OK(sets_open(&o, &s));
    CHECK(s.count == 1 && dataset_tokens(s.set[0].data) == 41);
    sets_close(&s);
}

TEST(named_sets_errors)
{
    static const char *const bad[][2] = {
        { "a: x a: y", "two sets have the name 'a'" },
        { "x b: y", "there is no name before 'x b: y'" },
        { "a: b: y", "there is no data set behind 'a'" },
        { "b: y c:", "there is no data set behind 'c'" },
        { "a: x : y", "there is no name before ':'" },
        { "a2345678901234567890123456789012345678901: x", "longer than 39 bytes" },
        { "a: 1 b 2", "validation set 'a'" },
    };
    Sets s;
    char many[512] = "";
    DatasetOptions o = { .seq = 4, .order = ORDER_FILE };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        o.spec = bad[i][0];
        FAILS(sets_open(&o, &s), ERR_CONFIG, bad[i][1]);
    }
    for (int i = 0; i < 33; i++) sprintf(many + strlen(many), "n%d: x ", i);
    o.spec = many;
    FAILS(sets_open(&o, &s), ERR_CONFIG, "too many");
    o.spec = "a: gone";
    FAILS(sets_open(&o, &s), ERR_DATA, "validation set 'a'");
    FAILS(sets_open(&o, &s), ERR_DATA, "gone.idx");
}

/* ---- loader ---- */

enum { LSEQ = 5, LROW = LSEQ + 1 };

static Dataset *loader_data(void)
{
    static int lengths[50];
    for (int i = 0; i < 50; i++) lengths[i] = 7 + i % 13;
    write_pair("l", TOKEN_U16, lengths, 50, 60000);
    return open_dataset(
        (DatasetOptions){ .spec = in_dir("l"), .seq = LSEQ, .seed = 21, .vocab = 60000 });
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

TEST(identity_names_what_differs)
{
    static const char was[] = "train 11111111, tokenizer 22222222\n"
                              "a: 10 bytes, 1 documents, 5 tokens, index 33333333, content 44444444\n"
                              "b: 20 bytes, 2 documents, 10 tokens, index 55555555";
    static const char *const other[][3] = {
        { "tokenizer 22222222", "tokenizer 99999999", "the tokenizer's checksum: '99999999' now, '22222222' then" },
        { "a: 10 bytes, 1 doc", "a: 12 bytes, 1 doc", "a token file: 'a: 12 bytes" },
        { "2 documents", "3 documents", "a token file: 'b: 20 bytes, 3 documents" },
        { "index 55555555", "index 55555556", "a token file: 'b: " },
        { "content 44444444", "content 44444445", "content 44444445' now" },
        { "train 11111111", "train 11111112", "the order of its samples" },
    };
    char now[512];
    OK(data_id_same(was, was, 0));
    for (size_t i = 0; i < sizeof other / sizeof *other; i++) {
        const char *at = strstr(was, other[i][0]);
        snprintf(now, sizeof now, "%.*s%s%s", (int)(at - was), was, other[i][1], at + strlen(other[i][0]));
        FAILS(data_id_same(now, was, 0), ERR_CKPT, other[i][2]);
        CHECK(strstr(err_hint_text(), "another run.dir"));
    }
    OK(data_id_same(was, "train 11111111, tokenizer 22222222", 0)); /* as earlier versions wrote it */
    FAILS(data_id_same(was, "train 11111110, tokenizer 22222222", 0), ERR_CKPT, "the order of its samples");
    const char *end = strstr(was, ", content"); /* a PREFIX.crc that came or went */
    snprintf(now, sizeof now, "%.*s%s", (int)(end - was), was, strchr(end, '\n'));
    OK(data_id_same(now, was, 0));
    OK(data_id_same(was, now, 0));
    /* moved: with a checksum it is the same file, without one nobody knows */
    OK(data_id_same("train 1, tokenizer 2\nx:/y/a: 10 bytes, content 4", "train 1, tokenizer 2\na: 10 bytes, content 4",
                    0));
    FAILS(data_id_same("train 1, tokenizer 2\nx/a: 10 bytes, content 5", "train 1, tokenizer 2\na: 10 bytes, content 4",
                       0),
          ERR_CKPT, "a token file: 'x/a: 10 bytes, content 5' now");
    FAILS(data_id_same("train 1, tokenizer 2\nx/a: 10 bytes", "train 1, tokenizer 2\na: 10 bytes", 0), ERR_CKPT,
          "a token file: 'x/a: 10 bytes' now");
}

TEST(what_differs_of_the_data_may_be_allowed)
{
    static const struct {
        const char *now;
        unsigned differs;
    } cases[] = { { "train 1, tokenizer 2\na: 10 bytes", 0 },
                  { "train 3, tokenizer 2\na: 10 bytes", DATA_ORDER },
                  { "train 1, tokenizer 3\na: 10 bytes", DATA_TOKENIZER },
                  { "train 3, tokenizer 2\na: 11 bytes", DATA_FILES }, /* which their order follows from */
                  { "train 3, tokenizer 3\nb: 10 bytes", DATA_FILES | DATA_TOKENIZER },
                  { "train 3, tokenizer 3\na: 10 bytes", DATA_ORDER | DATA_TOKENIZER } };
    const char *then = "train 1, tokenizer 2\na: 10 bytes";
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        CHECK_MSG(data_id_differs(cases[i].now, then) == cases[i].differs, "case %d", (int)i);
        for (unsigned allowed = 0; allowed <= DATA_ALL; allowed++) {
            const Err err = data_id_same(cases[i].now, then, allowed);
            CHECK_MSG((err == ERR_OK) == !(cases[i].differs & ~allowed), "case %d, allowed %u", (int)i, allowed);
        }
    }
}

TEST(loader_equals_direct)
{
    Dataset *d = loader_data();
    int32_t rows[24 * LROW];
    static const struct {
        int64_t first, step;
        const char *ramp;
        int dp, micro;
    } cases[] = { { 0, 1, "12", 1, 3 },       { 0, 1, "12", 4, 1 },
                  { 24, 3, "12", 2, 2 },      { 7, 1, "24", 3, 8 },
                  { 5, 1, "6", 6, 1 },        { 0, 1, "5", 1, 5 },
                  { 0, 1, "4*2,8*1,24", 2, 2 }, { 8, 3, "4*2,8*1,24", 4, 1 },
                  { 16, 4, "4*2,8*1,24", 1, 4 } };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        BatchRamp ramp;
        char taken[512] = { 0 };
        int64_t batch = 0;
        CHECK(!batch_ramp_read(cases[c].ramp, &ramp));
        for (int r = 0; r < cases[c].dp; r++) {
            LoaderOptions o = { d, cases[c].first, cases[c].step, ramp, cases[c].dp, r };
            int64_t served = 0;
            Loader *l;
            OK(loader_open(&o, &l));
            batch = cases[c].first;
            for (int64_t step = cases[c].step; step < cases[c].step + 6; step++) {
                const int64_t slice = batch_ramp_at(&ramp, step) / cases[c].dp;
                for (int64_t m = 0; m < slice; m += cases[c].micro) {
                    int64_t at = batch + slice * r + m;
                    OK(loader_get(l, at, cases[c].micro, rows));
                    CHECK(equals_direct(d, at, cases[c].micro, rows));
                    for (int i = 0; i < cases[c].micro; i++) taken[at + i - cases[c].first]++;
                }
                batch += slice * cases[c].dp;
                served += slice;
            }
            CHECK(loader_stats(l).fetched_samples == 0 && loader_stats(l).copied_samples == served);
            loader_close(l);
        }
        /* all ranks together: the interval, each position once */
        for (int64_t i = 0; i < batch - cases[c].first; i++) CHECK(taken[i] == 1);
        CHECK(taken[batch - cases[c].first] == 0);
    }
    dataset_close(d);
}

TEST(loader_jumps)
{
    Dataset *d = loader_data();
    int32_t rows[24 * LROW];
    uint64_t seed = 6;
    Loader *l;
    OK(loader_open(&(LoaderOptions){ d, 0, 1, batch_ramp_flat(8), 2, 1 }, &l));
    for (int i = 0; i < 500; i++) {
        int64_t at = (int64_t)(test_rand(&seed) % (i % 2 ? 40 : 1000)),
                n = 1 + (int64_t)(test_rand(&seed) % 20);
        OK(loader_get(l, at, n, rows));
        CHECK(equals_direct(d, at, n, rows));
    }
    CHECK(loader_stats(l).fetched_samples > 0);
    loader_close(l);
    OK(loader_open(&(LoaderOptions){ d, 0, 1, batch_ramp_flat(8), 2, 1 }, &l)); /* closed while it reads ahead */
    loader_close(l);
    dataset_close(d);
}

TEST(loader_reports_bad_tokens)
{
    int32_t rows[2 * LROW];
    Loader *l;
    write_pair("lb", TOKEN_U16, (int[]){ 40 }, 1, 200);
    Dataset *d = open_dataset(
        (DatasetOptions){ .spec = in_dir("lb"), .seq = LSEQ, .vocab = 100, .order = ORDER_FILE });
    OK(loader_open(&(LoaderOptions){ d, 0, 1, batch_ramp_flat(2), 1, 0 }, &l));
    OK(loader_get(l, 0, 2, rows));
    FAILS(loader_get(l, 2, 2, rows), ERR_DATA,
          "token id 101 at byte 28 (document 0, position 14)");
    loader_close(l);
    dataset_close(d);
}

TEST_MAIN
