/* Event files, read back by a reader of our own: framing with a bitwise CRC32C, protobuf by hand; against two records
 * whose bytes were made elsewhere; cut back on resume, also where they are damaged, and under faults. */
#include "test.h"

#include <dirent.h>
#include <fcntl.h>

#include "base/log.h"
#include "scratch.h"
#include "record/events.h"
#include "record/metrics.h"

/* ---- the reader ---- */

static uint32_t bitwise_crc(const uint8_t *p, int64_t n)
{
    uint32_t c = 0xFFFFFFFFu;
    for (int64_t i = 0; i < n; i++) {
        c ^= p[i];
        for (int k = 0; k < 8; k++) c = c & 1 ? c >> 1 ^ 0x82F63B78u : c >> 1;
    }
    return ~c;
}

static uint32_t unmasked(uint32_t m)
{
    const uint32_t r = m - 0xa282ead8u;
    return r >> 17 | r << 15;
}

typedef struct {
    int64_t step;
    double wall_s;
    bool start;
    char version[16], tag[64];
    float value;
} Point;

typedef struct {
    Point points[4096];
    int count, starts;
    int64_t whole_bytes, size_bytes; /* up to the first broken record; of the file */
} Read;

static uint64_t varint(const uint8_t **at)
{
    uint64_t x = 0;
    int shift = 0;
    do x |= (uint64_t)(**at & 0x7F) << shift, shift += 7;
    while (*(*at)++ & 0x80);
    return x;
}

static void read_value(Read *r, Point p, const uint8_t *at, const uint8_t *end)
{
    while (at < end) {
        const uint64_t key = varint(&at);
        if (key == (1 << 3 | 2)) {
            const uint64_t n = varint(&at);
            snprintf(p.tag, sizeof p.tag, "%.*s", (int)n, (const char *)at);
            at += n;
        } else if (key == (2 << 3 | 5)) memcpy(&p.value, at, 4), at += 4;
        else TEST_FAIL("field %d of a value", (int)key);
    }
    if (r->count < 4096) r->points[r->count++] = p;
}

static void read_event(Read *r, const uint8_t *at, const uint8_t *end)
{
    Point p = { 0 };
    while (at < end) {
        const uint64_t key = varint(&at), wire = key & 7;
        if (key == (1 << 3 | 1)) memcpy(&p.wall_s, at, 8), at += 8;
        else if (key == (2 << 3 | 0)) p.step = (int64_t)varint(&at);
        else if (wire == 2) {
            const uint8_t *to = at;
            const uint64_t n = varint(&to);
            at = to + n;
            if (key >> 3 == 3) snprintf(p.version, sizeof p.version, "%.*s", (int)n, (const char *)to);
            else if (key >> 3 == 7) p.start = n == 2 && to[0] == 8 && to[1] == 1;
            else if (key >> 3 == 5)
                while (to < at) {
                    CHECK(varint(&to) == (1 << 3 | 2));
                    const uint64_t size = varint(&to);
                    read_value(r, p, to, to + size);
                    to += size;
                }
            else TEST_FAIL("field %d of an event", (int)(key >> 3));
        } else {
            TEST_FAIL("key %d of an event", (int)key);
            return;
        }
    }
    if ((p.start || *p.version) && r->count < 4096) r->points[r->count++] = p;
    r->starts += p.start;
}

static void read_events(const char *path, Read *r)
{
    char *text;
    uint64_t size;
    uint32_t crc;
    *r = (Read){ 0 };
    OK(file_read_all(path, 1 << 26, &text, &r->size_bytes));
    const uint8_t *at = (const uint8_t *)text, *end = at + r->size_bytes;
    while (end - at >= 16) {
        memcpy(&size, at, 8);
        memcpy(&crc, at + 8, 4);
        if (unmasked(crc) != bitwise_crc(at, 8) || size > (uint64_t)(end - at) - 16) break;
        memcpy(&crc, at + 12 + size, 4);
        if (unmasked(crc) != bitwise_crc(at + 12, (int64_t)size)) break;
        read_event(r, at + 12, at + 12 + size);
        at += size + 16;
    }
    r->whole_bytes = at - (const uint8_t *)text;
    free(text);
}

/* ---- the folder ---- */

static const char *dir;

static int names_of(char names[16][256])
{
    int n = 0;
    DIR *d = opendir(dir);
    for (struct dirent *e; (e = readdir(d));)
        if (strstr(e->d_name, "tfevents") && n < 16) snprintf(names[n++], 256, "%s", e->d_name);
    closedir(d);
    qsort(names, (size_t)n, 256, (int (*)(const void *, const void *))strcmp);
    return n;
}

static int read_all(Read r[16])
{
    static char names[16][256];
    char path[8192];
    int n = names_of(names);
    for (int i = 0; i < n; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        read_events(path, &r[i]);
    }
    return n;
}

static const char *only_path(void)
{
    static char names[16][256], path[8192];
    if (names_of(names) != 1) TEST_FAIL("not one file");
    snprintf(path, sizeof path, "%s/%s", dir, names[0]);
    return path;
}

static MetricsRecord record(int64_t step)
{
    return (MetricsRecord){ .step = step, .tokens = step * 512, .loss = 3 + 1.0 / (double)step, .grad_norm = 0.5,
                            .lr = 3e-4, .step_ms = 12.5, .tokens_per_s = 1e5, .mfu = 0.4, .tflops = 0.02,
                            .memory_bytes = 1 << 20, .skipped = step % 7 == 0 };
}

static Err run_steps(int64_t resume, int64_t last)
{
    Metrics m;
    TRY(metrics_open(&m, (MetricsOptions){ .run_dir = dir, .title = "x", .jsonl = true, .tensorboard = true,
                                           .color = 0, .log_every = 1000000, .resume_step = resume }));
    for (int64_t s = resume + 1; s <= last; s++) {
        MetricsRecord r = record(s);
        metrics_step(&m, &r);
        if (s % 10 == 0) metrics_valid(&m, &(ValidRecord){ .step = s, .tokens = r.tokens, .loss = 2, .name = "" });
        if (s % 10 == 0) metrics_valid(&m, &(ValidRecord){ .step = s, .tokens = r.tokens, .loss = 4, .name = "wiki" });
    }
    return metrics_close(&m);
}

static void fresh_dir(void)
{
    dir = in_dir("run");
    OK(file_remove_tree(dir));
    OK(file_make_dirs(dir));
}

/* How often each step from 1 on is there under a tag, in all files. */
static void counts_of(const Read *r, int files, const char *tag, int counts[64])
{
    memset(counts, 0, 64 * sizeof *counts);
    for (int f = 0; f < files; f++)
        for (int i = 0; i < r[f].count; i++)
            if (!strcmp(r[f].points[i].tag, tag) && r[f].points[i].step < 64) counts[r[f].points[i].step]++;
}

/* ---- cases ---- */

static void check_bytes(const EventRecord *e, const char *hex)
{
    char buf[EVENT_BYTES], got[2 * EVENT_BYTES + 1] = "";
    const int64_t n = event_encode(e, buf);
    for (int64_t i = 0; i < n; i++) sprintf(got + 2 * i, "%02x", (uint8_t)buf[i]);
    CHECK_MSG(strcmp(got, hex) == 0, "%s, want %s", got, hex);
}

/* TensorBoard groups by what stands before the first '/': every curve belongs to a group. */
TEST(every_tag_has_a_group)
{
    static Read r;
    fresh_dir();
    OK(run_steps(0, 10));
    read_events(only_path(), &r);
    for (int i = 0; i < r.count; i++) {
        const char *tag = r.points[i].tag, *slash = strchr(tag, '/');
        CHECK_MSG(!*tag || (slash && slash != tag && slash[1]), "'%s'", tag);
    }
    CHECK(r.count > 10);
}

/* Made by another writer and decoded with protoc. */
TEST(known_bytes)
{
    CHECK(bitwise_crc((const uint8_t *)"123456789", 9) == 0xE3069283u);
    check_bytes(&(EventRecord){ .kind = EVENT_VERSION, .wall_s = 1 },
                "1800000000000000a37f4b2209000000000000f03f1a0d627261696e2e4576656e743a3286bf577a");
    check_bytes(
        &(EventRecord){ .kind = EVENT_SCALARS, .wall_s = 2, .step = 300, .count = 1, .scalar = { { "loss", 2.5f } } },
        "1b000000000000001a0d9e1309000000000000004010ac022a0d0a0b0a046c6f73731500002040de65814e");
}

/* The record of a text, as protobuf's own encoder made it of an Event of TensorBoard's. Lengths of two bytes. */
TEST(known_bytes_of_a_text)
{
    static const uint8_t head[] = {
        0x0d, 0x01, 0, 0, 0, 0, 0, 0, 0x3a, 0x87, 0x28, 0x6e,                                   /* frame */
        0x09, 0, 0, 0x20, 0x40, 0xfc, 0x54, 0xd9, 0x41, 0x10, 0xac, 0x02,                       /* time and step */
        0x2a, 0xfe, 0x01, 0x0a, 0xfb, 0x01,                                                     /* summary, value */
        0x0a, 0x13, 'c', 'o', 'n', 'f', 'i', 'g', '/', 't', 'e', 'x', 't', '_', 's', 'u', 'm', 'm', 'a', 'r', 'y',
        0x42, 0xd9, 0x01, 0x08, 0x07, 0x12, 0x00, 0x42, 0xd2, 0x01 };                           /* tensor */
    static const uint8_t tail[] = { 0x4a, 0x08, 0x0a, 0x06, 0x0a, 0x04, 't', 'e', 'x', 't', 0x83, 0x87, 0x65, 0xff };
    char text[212] = "    [run]\n", buf[512];
    memset(text + 10, 'x', 200);
    const int64_t n = event_encode_text(1700000000.5, 300, "config/text_summary", text, buf);
    CHECK_MSG(n == 285 && sizeof head + 210 + sizeof tail == 285, "%lld bytes", (long long)n);
    CHECK(!memcmp(buf, head, sizeof head) && !memcmp(buf + sizeof head, text, 210) &&
          !memcmp(buf + n - sizeof tail, tail, sizeof tail));
}

TEST(the_fullest_event_fits)
{
    char buf[EVENT_BYTES];
    EventRecord e = { .kind = EVENT_SCALARS, .step = INT64_MAX, .count = RECORD_FIELDS };
    for (int i = 0; i < RECORD_FIELDS; i++) memset(e.scalar[i].tag, 'x', EVENT_TAG_BYTES - 1);
    CHECK(event_encode(&e, buf) <= EVENT_BYTES);
}

TEST(values_read_back)
{
    static Read r;
    fresh_dir();
    const double before = (double)time(NULL) - 1;
    OK(run_steps(0, 20));
    read_events(only_path(), &r);
    CHECK(r.whole_bytes == r.size_bytes && strcmp(r.points[0].version, "brain.Event:2") == 0);
    CHECK(r.points[1].start && r.points[1].step == 1 && r.starts == 1);
    const char *tags[] = { "run/tokens", "loss/train", "optim/grad_norm", "optim/lr", "speed/step_ms",
                           "speed/tokens_per_s", "speed/mfu", "speed/tflops", "run/memory_bytes", "optim/skipped" };
    const double want[] = { 7 * 512, 3 + 1.0 / 7, 0.5, 3e-4, 12.5, 1e5, 0.4, 0.02, 1 << 20, 1 };
    for (int t = 0; t < 10; t++) {
        int seen = 0, counts[64];
        for (int i = 0; i < r.count; i++) {
            if (strcmp(r.points[i].tag, tags[t]) || r.points[i].step != 7) continue;
            seen++;
            CHECK_MSG(r.points[i].value == (float)want[t], "%s %g", tags[t], (double)r.points[i].value);
            CHECK(r.points[i].wall_s >= before && r.points[i].wall_s < before + 600);
        }
        counts_of(&r, 1, tags[t], counts);
        CHECK(seen == 1);
        for (int s = 0; s < 64; s++) CHECK_MSG(counts[s] == (s >= 1 && s <= 20), "%s, step %d", tags[t], s);
    }
    int plain[64], named[64];
    counts_of(&r, 1, "loss/valid", plain);
    counts_of(&r, 1, "valid/wiki", named);
    CHECK(plain[10] == 1 && plain[20] == 1 && named[10] == 1 && named[20] == 1);
    int tagged = 0;
    for (int i = 0; i < RECORD_FIELDS; i++) tagged += record_tag(i) != NULL;
    CHECK_MSG(r.count == 2 + 20 * tagged + 4, "%d events, %d figures of a step", r.count, tagged);
}

TEST(a_resumed_run_shows_each_step_once)
{
    static Read r[16];
    int counts[64], valid[64];
    fresh_dir();
    OK(run_steps(0, 33));
    OK(run_steps(20, 31)); /* went back; killed again */
    OK(run_steps(20, 40));
    OK(run_steps(40, 41));
    write_bytes("run/events.out.tfevents.1.other", "not ours", 8);
    int files = read_all(r);
    CHECK_MSG(files == 4, "%d files", files); /* the second has nothing left and is gone */
    int64_t last = 0;
    for (int f = 0; f < files - 1; f++) /* in the order of names the steps go up */
        for (int i = 0; i < r[f + 1].count; i++) {
            if (!*r[f + 1].points[i].tag) continue;
            CHECK(r[f + 1].points[i].step >= last);
            last = r[f + 1].points[i].step;
        }
    counts_of(r + 1, files - 1, "loss/train", counts);
    counts_of(r + 1, files - 1, "valid/wiki", valid);
    for (int s = 0; s < 64; s++) {
        CHECK_MSG(counts[s] == (s >= 1 && s <= 41), "step %d: %d", s, counts[s]);
        CHECK(valid[s] == (s > 0 && s <= 40 && s % 10 == 0));
    }
    CHECK(r[2].points[1].start && r[2].points[1].step == 21);

    OK(run_steps(0, 3)); /* from the beginning: nothing stays but what is another program's */
    CHECK(read_all(r) == 2 && file_exists(in_dir("run/events.out.tfevents.1.other")));
}

/* Any torn or flipped byte: what stands before it stays, the rest goes, and the run goes on. */
TEST(damage_is_cut_off)
{
    static Read r, whole;
    char *text, path[512], copy[512];
    int64_t size;
    fresh_dir();
    OK(run_steps(0, 12));
    snprintf(path, sizeof path, "%s", only_path());
    read_events(path, &whole);
    OK(file_read_all(path, 1 << 20, &text, &size));
    log_set_level(LOG_ERROR);
    for (int64_t at = 0; at < size; at += 37) {
        for (int flip = 0; flip < 2; flip++) {
            memcpy(copy, path, sizeof copy);
            char *bad = malloc((size_t)size);
            memcpy(bad, text, (size_t)size);
            if (flip) bad[at] ^= 0x10;
            OK(file_replace(copy, bad, flip ? size : at));
            free(bad);
            OK(events_cut(dir, 12));
            if (!file_exists(copy)) {
                CHECK(at < whole.size_bytes / 12 * 2); /* no value before the damage */
                continue;
            }
            read_events(copy, &r);
            CHECK(r.whole_bytes == r.size_bytes && r.size_bytes <= at && r.count > 0);
            CHECK(at - r.size_bytes <= EVENT_BYTES);
        }
    }
    log_set_level(LOG_WARN);
    free(text);
}

TEST(a_new_file_comes_last_when_the_clock_went_back)
{
    static char names[16][256];
    fresh_dir();
    write_bytes("run/events.out.tfevents.9999999998.h.1.megatrain", "", 0);
    Events e;
    OK(events_open(&e, dir, 1));
    OK(file_sync_close(&e.file));
    CHECK(names_of(names) == 2 && strncmp(names[1], "events.out.tfevents.9999999999.", 31) == 0);
}

TEST(a_full_disk_loses_events_never_halves)
{
    static Read r[16];
    int counts[64];
    fresh_dir();
    Events e;
    OK(events_open(&e, dir, 1));
    for (int64_t s = 1; s <= 3; s++) {
        MetricsRecord m = record(s);
        const int real = e.file.fd;
        if (s == 2) e.file.fd = open("/dev/full", O_WRONLY);
        Err err = events_step(&e, &m);
        if (s == 2) CHECK(err == ERR_IO);
        else CHECK(err == ERR_OK);
        if (s == 2) close(e.file.fd), e.file.fd = real, e.file.failed = false;
    }
    OK(file_sync_close(&e.file));
    CHECK(read_all(r) == 1 && r[0].whole_bytes == r[0].size_bytes);
    counts_of(r, 1, "loss/train", counts);
    CHECK(counts[1] == 1 && counts[2] == 0 && counts[3] == 1);
}

int main(int argc, char **argv)
{
    log_set_level(LOG_WARN);
    return test_main(argc, argv);
}
