/*
 * record/metrics.c: the metrics.jsonl that a resumed run finds, of which it keeps what is not later than its checkpoint
 * (step 1000). Input: the file; behind a first '*' its 64th part, so that points and dots of the picture run out. What
 * is left are whole lines of JSON that stood in the file, in order; opened once more, the file and the picture stay as
 * they are; the picture is text for XML.
 */
#include "fuzz.h"

#include "base/json.h"
#include "record/metrics.h"

enum { RESUME_STEP = 1000, PARTS = 64 };

static Err open_and_close(void)
{
    Metrics m;
    MetricsOptions o = { .run_dir = fuzz_path("."),
                         .title = "fuzz",
                         .jsonl = true,
                         .color = 0,
                         .log_every = 1,
                         .total_steps = RESUME_STEP,
                         .resume_step = RESUME_STEP };
    Err err = metrics_open(&m, o);
    return err ? err : metrics_close(&m);
}

static void check_lines(const char *kept, size_t size, const uint8_t *data, size_t data_size)
{
    const uint8_t *from = data;
    for (const char *at = kept, *stop; at < kept + size; at = stop + 1) {
        Json *j;
        stop = memchr(at, '\n', (size_t)(kept + size - at));
        FUZZ_CHECK(stop, "the last line has no end");
        Err err = json_parse("line", at, stop - at, &j);
        FUZZ_CHECK(!err, "%s", err_message());
        FUZZ_CHECK(json_int(json_get(j, "step"), -1) >= 0 && json_int(json_get(j, "step"), -1) <= RESUME_STEP,
                   "%.*s", (int)(stop - at), at);
        json_free(j);
        from = memmem(from, data_size - (size_t)(from - data), at, (size_t)(stop - at) + 1);
        FUZZ_CHECK(from, "not in the input: %.*s", (int)(stop - at), at);
        from += stop - at + 1;
    }
}

static void check_picture(const char *svg, size_t size)
{
    int depth = 0;
    FUZZ_CHECK(size < CURVE_SVG_BYTES && size > 6 && !memcmp(svg + size - 7, "</svg>\n", 7), "%zu bytes", size);
    for (size_t i = 0; i < size; i++) {
        FUZZ_CHECK(svg[i] == '\n' || (unsigned char)svg[i] >= 0x20, "control character %d", svg[i]);
        depth += svg[i] == '<' ? 1 : svg[i] == '>' ? -1 : 0;
        FUZZ_CHECK(depth == 0 || depth == 1, "brackets at %zu", i);
        FUZZ_CHECK(depth == 0 || i + 3 > size || (memcmp(svg + i, "nan", 3) && memcmp(svg + i, "inf", 3)),
                   "no number");
    }
}

static void check_file(const uint8_t *data, size_t size)
{
    size_t n, m, s, t;
    fuzz_write("metrics.jsonl", data, size);
    fuzz_memory_start();
    Err err = open_and_close();
    FUZZ_MEMORY_BOUND(size, 4, FUZZ_JSON_BYTES + (1 << 20));
    fuzz_check_error(err, ERR_STORAGE, ERR_STORAGE, false);
    FUZZ_CHECK(!err, "%s", err_message());
    char *kept = fuzz_read("metrics.jsonl", &n), *svg = fuzz_read("loss.svg", &s);
    check_lines(kept, n, data, size);
    check_picture(svg, s);
    err = open_and_close();
    FUZZ_CHECK(!err, "%s", err_message());
    char *kept_again = fuzz_read("metrics.jsonl", &m), *svg_again = fuzz_read("loss.svg", &t);
    FUZZ_CHECK(n == m && !memcmp(kept, kept_again, n), "the file changed");
    FUZZ_CHECK(s == t && !memcmp(svg, svg_again, s), "the picture changed");
    free(kept);
    free(kept_again);
    free(svg);
    free(svg_again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (!size || data[0] != '*') return check_file(data, size), 0;
    size_t part = size - 1;
    uint8_t *whole = malloc(PARTS * part + 1);
    if (!whole) abort();
    for (size_t i = 0; i < PARTS; i++) memcpy(whole + i * part, data + 1, part);
    check_file(whole, PARTS * part);
    free(whole);
    return 0;
}
