/*
 * Megatron's order of samples: NumPy's generator and shuffles, the worked example of three lengths of a run, and
 * whole data sets against test/golden/megatron_order.txt, which test/tools/megatron_order.py makes with NumPy.
 */
#include "test.h"

#include "data/dataset.h"
#include "data/megatron.h"
#include "scratch.h"

static bool equals(const uint32_t *got, const char *want, int64_t n)
{
    char *at = (char *)want;
    for (int64_t i = 0; i < n; i++)
        if (got[i] != strtoul(at, &at, 10)) return false;
    return strspn(at, " ") == strlen(at);
}

static void check_shuffle(Twister *t, int64_t n, const char *want)
{
    uint32_t x[32];
    for (int64_t i = 0; i < n; i++) x[i] = (uint32_t)i;
    twister_shuffle(t, x, n);
    CHECK_MSG(equals(x, want, n), "%lld elements: not %s", (long long)n, want);
}

TEST(numpy_shuffles)
{
    Twister t;
    twister_seed(&t, 0);
    check_shuffle(&t, 10, "2 8 4 9 1 6 7 3 0 5");
    twister_seed(&t, 42);
    check_shuffle(&t, 10, "8 1 5 0 7 2 9 4 3 6");
    twister_seed(&t, 1234);
    check_shuffle(&t, 20, "3 13 2 16 14 5 4 0 8 18 17 11 10 9 7 1 19 12 6 15");
    check_shuffle(&t, 7, "6 4 1 5 3 0 2");
    check_shuffle(&t, 1, "0"); /* draws nothing */
    check_shuffle(&t, 0, "");
}

/* Documents of these lengths; token k of the whole file is first + k. */
static void write_file(const char *name, const int32_t *lengths, int documents, int32_t first)
{
    IndexedWriter *w;
    OK(indexed_create(in_dir(name), TOKEN_I32, &w));
    for (int d = 0; d < documents; d++) {
        for (int i = 0; i < lengths[d]; i++, first++) OK(indexed_add_tokens(w, &first, 1));
        OK(indexed_end_document(w));
    }
    OK(indexed_finish(w));
}

TEST(worked_example)
{
    static const struct {
        int64_t wanted, epochs, first_samples, samples;
        const char *documents, *shuffle;
    } cases[] = {
        { 4, 1, 4, 4, "4 0 1 2 3", "2 1 3 0" },
        { 6, 2, 4, 9, "4 0 1 2 3 3 2 1 0 4", "2 0 3 1 5 8 4 6 7" },
        { 9, 2, 9, 9, "2 2 4 1 0 3 4 0 1 3", "7 3 5 1 4 8 0 2 6" },
    };
    Shards file;
    write_file("worked", (int32_t[]){ 5, 3, 9, 4, 7 }, 5, 0);
    SetupArena tables;
    setup_init(&tables);
    OK(shards_open(in_dir("worked"), &tables, &file));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        SetupArena mem;
        MegatronIndex x;
        setup_init(&mem);
        MegatronPart part = { .file = &file, .to = 5, .seq = 6, .wanted = cases[i].wanted, .seed = 1234 };
        OK(megatron_index(&x, part, &mem));
        CHECK(x.epochs == cases[i].epochs && x.samples == cases[i].samples);
        CHECK(x.first_samples == cases[i].first_samples && x.entries == 5 * x.epochs);
        CHECK_MSG(equals(x.document, cases[i].documents, x.entries), "case %zu", i);
        CHECK_MSG(equals(x.shuffle, cases[i].shuffle, x.samples), "case %zu", i);
        setup_release(&mem);
    }
    shards_close(&file);
    setup_release(&tables);
}

TEST(blend_by_the_largest_error)
{
    static const int want[12][2] = { { 0, 0 }, { 1, 0 }, { 2, 0 }, { 0, 1 }, { 1, 1 }, { 0, 2 },
                                     { 2, 1 }, { 0, 3 }, { 1, 2 }, { 0, 4 }, { 0, 5 }, { 1, 3 } };
    SetupArena mem;
    MegatronBlend b;
    int64_t earlier, taken[3] = { 0 };
    setup_init(&mem);
    OK(megatron_blend(&b, (double[]){ 5, 3, 2 }, 3, 10000, &mem));
    for (int i = 0; i < 12; i++) {
        CHECK(megatron_draw(&b, i, &earlier) == want[i][0]);
        CHECK(earlier == want[i][1]);
    }
    for (int64_t q = 0; q < b.size; q++) {
        int d = megatron_draw(&b, q, &earlier);
        CHECK_MSG(earlier == taken[d], "draw %lld", (long long)q);
        taken[d]++;
    }
    CHECK(b.size == 10000 && b.wanted[0] == 5025 && b.wanted[1] == 3015 && b.wanted[2] == 2010);
    CHECK(memcmp(taken, b.taken, sizeof taken) == 0);
    setup_release(&mem);
}

/* ---- the golden file ---- */

static FILE *open_golden(void)
{
    FILE *f = fopen("test/golden/megatron_order.txt", "re");
    if (!f) TEST_FAIL("no test/golden/megatron_order.txt");
    return f;
}

TEST(sums_as_numpy_forms_them)
{
    char line[8192];
    double x[256], want;
    int n, sums = 0;
    FILE *f = open_golden();
    while (f && fgets(line, sizeof line, f)) {
        if (sscanf(line, "sum %d %lf", &n, &want) != 2) continue;
        for (int i = 0; i < n; i++) x[i] = 1.0 / (3 + 7 * i % 11);
        CHECK_MSG(megatron_sum(x, n) == want, "%d terms", n);
        sums++;
    }
    if (f) fclose(f);
    CHECK(sums == 13);
}

static const char *next_word(char **at) { return strtok_r(NULL, " \n", at); }
static int64_t next_int(char **at) { return strtoll(next_word(at), NULL, 10); }

/* Writes the line's files; `spec` becomes what data.train would be. */
static void write_files(char **at, int count, char *spec)
{
    int32_t lengths[512];
    char name[32];
    for (int i = 0; i < count; i++) {
        const char *weight = next_word(at);
        int64_t documents = next_int(at), a = next_int(at), b = next_int(at), m = next_int(at);
        for (int64_t d = 0; d < documents; d++) lengths[d] = (int32_t)(1 + (a * d * d + b * d) % m);
        snprintf(name, sizeof name, "source%d", i);
        write_file(name, lengths, (int)documents, i * 1000000);
        if (*weight != '-') spec += sprintf(spec, "%s ", weight);
        spec += sprintf(spec, "%s ", in_dir(name));
    }
}

static void check_samples(const Dataset *d, DatasetOptions o, uint64_t want, char **at)
{
    int32_t row[512];
    uint64_t hash = 14695981039346656037u;
    const char *first = next_word(at);
    for (int64_t q = 0; q < o.samples; q++) {
        OK(dataset_get(d, q, row));
        if (first) {
            CHECK_MSG(row[0] == atoi(first), "%s: sample %lld", o.spec, (long long)q);
            first = next_word(at);
        }
        for (int64_t k = 0; k <= o.seq; k++) hash = (hash ^ (uint64_t)row[k]) * 1099511628211u;
    }
    CHECK_MSG(hash == want, "%s: tokens differ", o.spec);
}

TEST(data_sets_by_numpy)
{
    char line[8192], spec[4096], *at;
    int cases = 0;
    FILE *f = open_golden();
    while (f && fgets(line, sizeof line, f)) {
        const char *what = strtok_r(line, " \n", &at);
        if (!what || strcmp(what, "order") != 0) continue;
        DatasetOptions o = { .spec = spec, .order = ORDER_MEGATRON };
        Dataset *d;
        o.seq = next_int(&at);
        o.seed = (uint64_t)next_int(&at);
        o.samples = next_int(&at);
        o.split = next_word(&at);
        if (*o.split == '-') o.split = "";
        write_files(&at, (int)next_int(&at), spec);
        const uint64_t hash = strtoull(next_word(&at), NULL, 16);
        OK(dataset_open(&o, &d));
        check_samples(d, o, hash, &at);
        dataset_close(d);
        cases++;
    }
    if (f) fclose(f);
    CHECK(cases == 17);
}

/* ---- what a run relies on ---- */

TEST(identity_follows_the_order)
{
    Dataset *d;
    uint32_t crc[4];
    const int64_t samples[] = { 4, 5, 6, 9 }; /* 5 and 6: two epochs, the last apart */
    write_file("id", (int32_t[]){ 5, 3, 9, 4, 7 }, 5, 0);
    for (int i = 0; i < 4; i++) {
        DatasetOptions o = {
            .spec = in_dir("id"), .seq = 6, .seed = 1234, .order = ORDER_MEGATRON, .samples = samples[i]
        };
        OK(dataset_open(&o, &d));
        crc[i] = dataset_crc(d);
        dataset_close(d);
    }
    CHECK(crc[1] == crc[2] && crc[0] != crc[1] && crc[1] != crc[3] && crc[0] != crc[3]);
}

TEST(order_errors)
{
    Dataset *d;
    int32_t row[8];
    write_file("e", (int32_t[]){ 5, 3, 9, 4, 7 }, 5, 0);
    DatasetOptions o = { .spec = in_dir("e"), .seq = 6, .seed = 1, .order = ORDER_MEGATRON, .samples = 5 };
    OK(dataset_open(&o, &d));
    OK(dataset_get(d, 4, row));
    FAILS(dataset_get(d, 5, row), ERR_DATA, "beyond the 5");
    dataset_close(d);
    o.vocab = 20;
    OK(dataset_open(&o, &d));
    Err err = ERR_OK;
    for (int64_t q = 0; q < 5 && !err; q++) err = dataset_get(d, q, row);
    FAILS(err, ERR_DATA, "is outside the vocabulary of 20");
    dataset_close(d);
    o.samples = (int64_t)1 << 40;
    FAILS(dataset_open(&o, &d), ERR_DATA, "in 32 bits");
    o.samples = 5, o.spec = "0 a 1 b";
    FAILS(dataset_open(&o, &d), ERR_CONFIG, "not a positive number");
    o.spec = in_dir("e"), o.seq = 28;
    FAILS(dataset_open(&o, &d), ERR_DATA, "too few for one sample");
}

TEST_MAIN
