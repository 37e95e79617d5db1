/* metrics.jsonl read back by the JSON reader, cut on resume, under injected faults; the picture; the numbers
 * for people. */
#include "test.h"

#include <errno.h>
#include <malloc.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "config/config.h"
#include "base/file.h"
#include "base/json.h"
#include "base/log.h"
#include "base/units.h"
#include "record/metrics.h"
#include "record/prometheus.h"

static char dir[64], jsonl[96], svg[96];

static void set_dir(const char *name)
{
    snprintf(dir, sizeof dir, "%s", name);
    snprintf(jsonl, sizeof jsonl, "%s/metrics.jsonl", dir);
    snprintf(svg, sizeof svg, "%s/loss.svg", dir);
}

static void fresh_dir(void)
{
    char name[] = "/tmp/test_metrics.XXXXXX";
    if (!mkdtemp(name)) exit(1);
    set_dir(name);
}

static MetricsOptions options(int64_t resume_step)
{
    return (MetricsOptions){ .run_dir = dir, .title = "tiny <&> run", .jsonl = true, .color = LOG_COLOR_NEVER,
                             .log_every = 1000000, .total_steps = 1000000000, .resume_step = resume_step };
}

static MetricsRecord record(int64_t step)
{
    return (MetricsRecord){ .step = step, .tokens = step * 512, .loss = 3 + 1.0 / (double)step, .grad_norm = 0.1f,
                            .lr = 3e-4f / 7, .step_ms = 12.5, .tokens_per_s = 1e5 / 3, .mfu = 0.4, .tflops = 0.02,
                            .memory_bytes = 123456789, .time = 1764000000.123456 };
}

static char *slurp(const char *path, int64_t *size)
{
    char *text = NULL;
    OK(file_read_all(path, 1 << 26, &text, size));
    return text;
}

/* The file's lines, each parsed; -1 if a line is not JSON or the last one has no end. */
static int lines_of(const char *path, Json **out, int room)
{
    int64_t size;
    char *text = slurp(path, &size), *at = text;
    int n = 0;
    while (*at) {
        char *end = strchr(at, '\n');
        if (!end || n == room || json_parse(path, at, end - at, &out[n]) != ERR_OK) {
            n = -1;
            break;
        }
        n++;
        at = end + 1;
    }
    free(text);
    return n;
}

static double number(const Json *j, const char *key)
{
    return json_number(json_get(j, key), NAN);
}

static void valid(Metrics *m, int64_t step, int64_t tokens, const char *name, double loss)
{
    ValidRecord r = { .step = step, .tokens = tokens, .loss = loss, .time = 1.7e9 };
    curve_cut_name(r.name, name);
    metrics_valid(m, &r);
}

TEST(lines_read_back_exactly)
{
    Metrics m;
    fresh_dir();
    OK(metrics_open(&m, options(0)));
    for (int64_t s = 1; s <= 3; s++) {
        MetricsRecord r = record(s);
        if (s == 2) r.loss = NAN, r.grad_norm = INFINITY, r.skipped = true;
        metrics_step(&m, &r);
    }
    valid(&m, 3, 1536, "", 2.5);
    valid(&m, 3, 1536, "wiki \"x\"", NAN);
    OK(metrics_close(&m));

    Json *j[8];
    int n = lines_of(jsonl, j, 8);
    CHECK_MSG(n == 5, "%d lines", n);
    if (n != 5) return;
    MetricsRecord want = record(3);
    CHECK(json_int(json_get(j[2], "step"), 0) == 3 && json_int(json_get(j[2], "tokens"), 0) == 1536);
    CHECK(number(j[2], "loss") == want.loss && number(j[2], "lr") == want.lr);
    CHECK(number(j[2], "grad_norm") == want.grad_norm && number(j[2], "tokens_per_s") == want.tokens_per_s);
    CHECK(number(j[2], "mfu") == want.mfu && number(j[2], "tflops") == want.tflops);
    CHECK(number(j[2], "time") == 1764000000.123456 && number(j[3], "time") == 1.7e9);
    CHECK(number(j[2], "step_ms") == want.step_ms && number(j[2], "memory_bytes") == 123456789);
    CHECK(json_get(j[2], "skipped") && !json_is_true(json_get(j[2], "skipped")) && !json_get(j[2], "nonfinite"));
    CHECK(json_is_null(json_get(j[1], "loss")) && json_is_null(json_get(j[1], "grad_norm")));
    CHECK(json_is_true(json_get(j[1], "nonfinite")) && json_is_true(json_get(j[1], "skipped")));
    CHECK(number(j[3], "valid_loss") == 2.5 && !json_get(j[3], "valid"));
    CHECK(json_is_null(json_get(j[4], "valid_loss")) && json_is_true(json_get(j[4], "nonfinite")));
    CHECK(strcmp(json_text(json_get(j[4], "valid"), NULL), "wiki \"x\"") == 0);
    for (int i = 0; i < n; i++) json_free(j[i]);
    OK(file_remove_tree(dir));
}

/* How many of an object's names the table of docs/watching.md lacks. */
static int64_t unlisted(const Json *j, const char *docs)
{
    int64_t missing = 0;
    for (void *it = json_iter(j); it; it = json_next(j, it)) {
        char row[96];
        snprintf(row, sizeof row, "\n| `%s` | ", json_iter_key(it));
        if (strstr(docs, row)) continue;
        TEST_FAIL("'%s' is not in the table of docs/watching.md", json_iter_key(it));
        missing++;
    }
    return missing;
}

/* Lines with all that there is to say: each name is in the table of docs/watching.md, and each row's in a line. */
TEST(every_name_is_documented)
{
    enum { LINES = 5 };
    static const char *const metrics[] = { "acc", "acc_norm", "acc_bytes" };
    Metrics m;
    int64_t size, listed = 0;
    const double load[] = { 4.0 / 3, 0 }, mtp[] = { NAN }, aux = 1.25, z = 2.5;
    const int64_t dropped[] = { 3, 0 };
    const double logits[] = { 12.5, -INFINITY };
    MetricsRecord r = record(1);
    r.logits = (MetricsLogits){ .by_layer = logits, .most = 12.5, .layer = 0, .head = 7 };
    r.save = (MetricsSave){ .step = 1, .failure = "full" };
    r.bubble.measured = r.ranks.measured = true;
    r.load = load, r.dropped = dropped, r.layers = 2, r.mtp_loss = mtp, r.mtp = 1, r.aux_loss = &aux, r.z_loss = &z;
    fresh_dir();
    OK(metrics_open(&m, options(0)));
    metrics_step(&m, &r);
    valid(&m, 1, 512, "books", 2);
    metrics_override(&m,
                     &(OverrideRecord){ .step = 1, .section = "optim", .key = "lr", .was = "1", .is = "2", .time = 3 });
    metrics_task(&m, &(TaskRecord){ .step = 1, .questions = 3, .name = "riddles", .metric = metrics, .metrics = 3 });
    metrics_restart(&m,
                    &(RestartRecord){ .step = 1, .restart = 1, .cause = "lost", .lost = 2, .seconds = 3, .time = 4 });
    OK(metrics_close(&m));
    Json *j[LINES];
    char *docs = slurp("docs/watching.md", &size);
    CHECK(lines_of(jsonl, j, LINES) == LINES);
    for (int i = 0; i < LINES; i++) CHECK(unlisted(j[i], docs) == 0);
    const char *at = strstr(docs, "\n| field | line |"), *end = at ? strstr(at, "\n\n") : NULL;
    for (; at && end && (at = strstr(at + 1, "\n| `")) && at < end; listed++) {
        char name[64];
        CHECK(sscanf(at, "\n| `%63[a-z_]` |", name) == 1);
        bool in = false;
        for (int i = 0; i < LINES; i++) in |= json_get(j[i], name) != NULL;
        CHECK_MSG(in, "'%s' is in no line", name);
    }
    CHECK_MSG(listed > 30, "%lld rows", (long long)listed);
    CHECK(json_number(json_at(json_get(j[0], "expert_load"), 0), 0) == 4.0 / 3); /* to the last digit */
    CHECK(number(j[0], "max_attention_logit") == 12.5 && json_int(json_get(j[0], "max_attention_logit_head"), 0) == 7);
    CHECK(json_number(json_at(json_get(j[0], "max_attention_logits"), 0), 0) == 12.5);
    CHECK(json_is_null(json_at(json_get(j[0], "max_attention_logits"), 1)));
    for (int i = 0; i < LINES; i++) json_free(j[i]);
    free(docs);
    OK(file_remove_tree(dir));
}

static void run_steps(int64_t resume, int64_t last)
{
    Metrics m;
    OK(metrics_open(&m, options(resume)));
    for (int64_t s = resume + 1; s <= last; s++) {
        MetricsRecord r = record(s);
        metrics_step(&m, &r);
        if (s % 10 == 0) valid(&m, s, r.tokens, "", 3);
    }
    OK(metrics_close(&m));
}

static void append_text(const char *text)
{
    FileWriter w;
    OK(file_append(jsonl, &w));
    OK(file_write(&w, text, (int64_t)strlen(text)));
    OK(file_sync_close(&w));
}

/* Prometheus takes UTF-8 alone. */
TEST(a_label_is_cut_between_characters)
{
    char name[200] = "\xff\"", want[200] = "?\\\"";
    Prometheus p;
    for (int i = 0; i < 90; i++) strcat(name, "\xc3\xa9"); /* two bytes each, from the third on */
    for (int i = 0; i < 62; i++) strcat(want, "\xc3\xa9");
    name[181] = 0;
    OK(prometheus_open(&p, "now.prom", dir, name));
    CHECK_MSG(!strcmp(p.run, want), "%s", p.run);
    OK(prometheus_open(&p, "now.prom", dir, "a\n\xc3"));
    CHECK_MSG(!strcmp(p.run, "a\\n?"), "%s", p.run);
}

TEST(resume_gives_the_file_of_an_unbroken_run)
{
    int64_t whole_bytes, bytes;
    fresh_dir();
    run_steps(0, 40);
    char *whole = slurp(jsonl, &whole_bytes);
    int64_t whole_svg_bytes, svg_bytes;
    char *whole_svg = slurp(svg, &whole_svg_bytes);
    OK(file_remove_tree(dir));

    fresh_dir();
    run_steps(0, 27); /* seven steps that no checkpoint knows of, and half a line */
    append_text("{\"step\":28,\"los");
    run_steps(20, 40);
    char *text = slurp(jsonl, &bytes);
    CHECK_MSG(bytes == whole_bytes && memcmp(text, whole, (size_t)bytes) == 0, "'%s'", text);
    char *picture = slurp(svg, &svg_bytes); /* the curve covers the earlier steps too */
    CHECK(svg_bytes == whole_svg_bytes && memcmp(picture, whole_svg, (size_t)svg_bytes) == 0);
    free(picture);
    free(text);

    append_text("nonsense\n\n[1]\n");
    run_steps(40, 40);
    text = slurp(jsonl, &bytes);
    CHECK(bytes == whole_bytes && memcmp(text, whole, (size_t)bytes) == 0);
    free(text);

    run_steps(0, 1); /* from the beginning: nothing stays */
    Json *j[4];
    CHECK(lines_of(jsonl, j, 4) == 1);
    json_free(j[0]);
    free(whole);
    free(whole_svg);
    OK(file_remove_tree(dir));
}

TEST(without_jsonl_too_what_a_resumed_run_undid_goes)
{
    Metrics m;
    MetricsOptions o = options(20);
    int64_t bytes, svg_bytes, want_bytes;
    fresh_dir();
    run_steps(0, 20);
    char *want = slurp(jsonl, &want_bytes), *picture = slurp(svg, &svg_bytes);
    run_steps(20, 27);
    o.jsonl = false;
    OK(metrics_open(&m, o));
    OK(metrics_close(&m));
    char *text = slurp(jsonl, &bytes);
    CHECK_MSG(bytes == want_bytes && memcmp(text, want, (size_t)bytes) == 0, "'%s'", text);
    free(text);
    text = slurp(svg, &bytes);
    CHECK(bytes == svg_bytes && memcmp(text, picture, (size_t)bytes) == 0);
    free(text);
    free(want);
    free(picture);
    OK(file_remove_tree(dir));
}

static Err five_steps(void)
{
    Metrics m;
    TRY(metrics_open(&m, options(0)));
    for (int64_t s = 1; s <= 5; s++) {
        MetricsRecord r = record(s);
        metrics_step(&m, &r);
    }
    return metrics_close(&m);
}

static Err resume_at_ten(void)
{
    Metrics m;
    TRY(metrics_open(&m, options(10)));
    return metrics_close(&m);
}

/* Runs this program as "faulty BODY DIR" with MEGATRAIN_FILE_FAULT set; its exit status, or 128 + signal. */
static int with_fault(const char *fault, const char *body)
{
    fflush(NULL);
    pid_t pid = fork();
    if (pid == 0) {
        setenv("MEGATRAIN_FILE_FAULT", fault, 1);
        execl("/proc/self/exe", "faulty", body, dir, (char *)NULL);
        _exit(127);
    }
    int status;
    if (waitpid(pid, &status, 0) != pid) return -1;
    return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

TEST(a_full_disk_loses_lines_never_halves)
{
    /* operations: create, then five writes */
    const char *faults[] = { "short@4", "enospc@4", "eio@2", "short@6" };
    for (int i = 0; i < 4; i++) {
        fresh_dir();
        int status = with_fault(faults[i], "five");
        Json *j[8];
        int n = lines_of(jsonl, j, 8);
        CHECK_MSG(status == 5 && n == 4, "%s: status %d, %d lines", faults[i], status, n);
        for (int k = 0; k < n; k++) json_free(j[k]);
        OK(file_remove_tree(dir));
    }
    fresh_dir();
    CHECK(with_fault("enospc@1", "five") == 5);
    OK(file_remove_tree(dir));
}

TEST(cutting_back_is_all_or_nothing)
{
    char fault[32];
    int killed = 0;
    for (int at = 1; at <= 12; at++) {
        fresh_dir();
        run_steps(0, 25);
        snprintf(fault, sizeof fault, "kill@%d", at);
        int status = with_fault(fault, "resume");
        killed += status == 128 + 9;
        Json *j[64];
        int n = lines_of(jsonl, j, 64);
        CHECK_MSG(n == 27 || n == 11, "%s: %d lines", fault, n); /* with 2 evaluations, or with 1 */
        if (status == 0) CHECK(n == 11);
        for (int k = 0; k < n; k++) json_free(j[k]);
        OK(file_remove_tree(dir));
    }
    CHECK(killed >= 5);
}

static int64_t count_of(const char *text, const char *what)
{
    int64_t n = 0;
    for (const char *at = text; (at = strstr(at, what)); at += strlen(what)) n++;
    return n;
}

TEST(a_long_run_takes_no_memory_and_gives_a_small_picture)
{
    Metrics m;
    fresh_dir();
    MetricsOptions o = options(0);
    o.jsonl = false;
    OK(metrics_open(&m, o));
    size_t before = mallinfo2().uordblks;
    double sum = 0;
    int64_t steps = 300007;
    for (int64_t s = 1; s <= steps; s++) {
        MetricsRecord r = record(s);
        if (s % 1000 == 7) r.loss = NAN, r.skipped = true;
        else sum += r.loss;
        metrics_step(&m, &r);
        if (s % 100 == 0) valid(&m, s, r.tokens, s % 200 ? "a<b" : "", 3.5);
        if (s == 1) before = mallinfo2().uordblks; /* the C library's buffers of stdio */
    }
    CHECK(mallinfo2().uordblks == before);
    double curve_sum = 0;
    int64_t count = 0, skipped = 0, last = 0;
    for (int i = 0; i < m.curve.count; i++) {
        curve_sum += m.curve.points[i].sum;
        count += m.curve.points[i].count;
        skipped += m.curve.points[i].skipped;
        CHECK(m.curve.points[i].step > last);
        last = m.curve.points[i].step;
    }
    CHECK(m.curve.count <= CURVE_POINTS && m.curve.count > CURVE_POINTS / 2 && last == steps);
    CHECK(skipped == 301 && count + skipped == steps);
    CHECK_CLOSE(curve_sum, sum, 1e-12);
    OK(metrics_close(&m));
    CHECK(!file_exists(jsonl));

    int64_t size;
    char *text = slurp(svg, &size);
    CHECK_MSG(size < CURVE_SVG_BYTES && size > 10000, "%lld", (long long)size);
    CHECK(strstr(text, "tiny &lt;&amp;&gt; run") && strstr(text, "301 skipped steps") && strstr(text, "a&lt;b"));
    CHECK(count_of(text, "class=\"v0\"") > 128 && count_of(text, "class=\"v1\"") > 128);
    CHECK(strstr(text, "last validation loss is 3.5000 at step 300000.") && strstr(text, "on a&lt;b is 3.5000"));
    CHECK(strstr(text, "301 steps were skipped") && !strstr(text, "nan") && !strstr(text, "inf"));
    CHECK(strstr(text, ">300k<") && strstr(text, "</svg>"));
    free(text);
    OK(file_remove_tree(dir));
}

/* Every tag that opens also closes, in the right order. */
static bool well_formed(const char *text)
{
    char open[64][32];
    int depth = 0;
    for (const char *at = text; (at = strchr(at, '<')); at++) {
        const char *end = strchr(at, '>');
        int n = (int)strcspn(at + 1, " />\n");
        if (!end || depth == 64 || n > 31) return false;
        if (at[1] == '/') {
            n = (int)strcspn(at + 2, ">");
            if (depth-- == 0 || (int)strlen(open[depth]) != n || strncmp(open[depth], at + 2, (size_t)n) != 0)
                return false;
        } else if (end[-1] != '/') snprintf(open[depth++], 32, "%.*s", n, at + 1);
    }
    return depth == 0;
}

static int64_t draw(const Curve *c, char buf[CURVE_SVG_BYTES])
{
    FILE *f = fmemopen(buf, CURVE_SVG_BYTES, "w");
    curve_svg(c, "x", f);
    CHECK(!fflush(f) && !ferror(f));
    const int64_t size = ftell(f);
    fclose(f);
    return size;
}

TEST(odd_pictures)
{
    static char buf[CURVE_SVG_BYTES];
    static CurvePoint points[1024];
    static CurveDot dots[512];
    Curve c = { .points = points, .dots = dots };
    CHECK(draw(&c, buf) == (int64_t)strlen(buf) && strstr(buf, "no finite loss") && well_formed(buf));
    points[0] = (CurvePoint){ .step = 1, .low = INFINITY, .high = -INFINITY, .skipped = 1 };
    c.count = 1;
    CHECK(draw(&c, buf) > 0 && strstr(buf, "no finite loss") && well_formed(buf));
    points[0] = (CurvePoint){ .step = 1, .count = 1, .sum = 4, .low = 4, .high = 4 };
    CHECK(draw(&c, buf) > 0 && strstr(buf, ">1<") && well_formed(buf));

    points[1] = points[2] = points[3] = points[4] =
        (CurvePoint){ .step = 2, .low = INFINITY, .high = -INFINITY, .skipped = 1 };
    dots[0] = (CurveDot){ .step = 5, .loss = NAN };
    c.count = 5, c.dot_count = 1, c.names = 1;
    CHECK(draw(&c, buf) > 0 && well_formed(buf) && !strstr(buf, "nan"));
    CHECK_MSG(strstr(buf, "over 5 steps, 4.0000 at step 1. ") && strstr(buf, "loss is not finite at step 5. "),
              "%.600s", buf);

    /* the most there can be, with the longest numbers */
    for (int i = 0; i < 1024; i++) {
        double y = i % 2 ? 1e300 : -1e300;
        points[i] = (CurvePoint){ .step = 1000000000000 + i * INT64_C(12345678), .count = 2, .sum = y,
                                .low = -1e300, .high = 1e300, .skipped = 1 };
        if (i < 512) dots[i] = (CurveDot){ .step = 1000000000000, .loss = 123456.78 };
    }
    c.count = 1024, c.dot_count = 512, c.names = CURVE_NAMES;
    for (int i = 0; i < CURVE_NAMES; i++) memset(c.name[i], '"', CURVE_NAME_BYTES - 1);
    CHECK(draw(&c, buf) == (int64_t)strlen(buf) && well_formed(buf) && !strstr(buf, "nan") && !strstr(buf, "inf"));
}

/* Both sets of colours, each rule once in each. */
TEST(colours_for_light_and_dark)
{
    char text[256] = "";
    FILE *f = fmemopen(text, sizeof text, "w");
    svg_rules(f, "a{fill:" SVG_INK "}b{stroke:#123456|#abcdef;x:y}");
    fclose(f);
    CHECK_MSG(!strcmp(text, "a{fill:#1f2328}b{stroke:#123456;x:y}\n"
                            "@media(prefers-color-scheme:dark){a{fill:#e6edf3}b{stroke:#abcdef;x:y}}\n"), "%s", text);
}

/* A picture that does not fit is an error, not a torn file; the next one begins anew. */
TEST(a_sheet_is_drawn_on_again)
{
    static SvgSheet sheet;
    SetupArena memory;
    int64_t size;
    fresh_dir();
    setup_init(&memory);
    OK(svg_sheet_open(&sheet, &memory, 64));
    fprintf(sheet.out, "%050d", 0);
    OK(svg_sheet_write(&sheet, svg));
    fprintf(sheet.out, "%0100d", 1);
    FAILS(svg_sheet_write(&sheet, svg), ERR_INTERNAL, "too little room");
    char *text = slurp(svg, &size);
    CHECK(size == 50);
    free(text);
    fprintf(sheet.out, "%020d", 2);
    OK(svg_sheet_write(&sheet, svg));
    text = slurp(svg, &size);
    CHECK(size == 20 && text[19] == '2');
    free(text);
    fclose(sheet.out);
    setup_release(&memory);
    OK(file_remove_tree(dir));
}

TEST(labels_of_an_axis)
{
    static const struct {
        double value, distance;
        const char *label;
    } cases[] = {
        { 0, 1, "0" },          { 2e-4, 2e-4, "2e-4" },       { 1e-3, 2e-4, "1e-3" },     { 1.2e-3, 2e-4, "1.2e-3" },
        { 3e-3, 1e-4, "3e-3" }, { 1.05e-3, 5e-5, "1.05e-3" }, { 0.004, 1e-3, "0.004" },   { -6e-7, 2e-7, "-6e-7" },
        { 3.5, 0.5, "3.5" },    { 2000, 500, "2k" },          { 1500000, 500000, "1.5M" }
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char buf[SVG_LABEL_BYTES];
        CHECK_MSG(strcmp(svg_label(buf, cases[i].value, cases[i].distance), cases[i].label) == 0, "%s, not %s", buf,
                  cases[i].label);
    }
}

TEST(numbers_for_people)
{
    char b[UNITS_BYTES];
    static const struct { int64_t bytes; const char *want; } bytes[] = {
        { 0, "0 B" }, { 1023, "1023 B" }, { 1024, "1.00 KiB" }, { 1536, "1.50 KiB" }, { 1048575, "1.00 MiB" },
        { 13 << 20, "13.0 MiB" }, { (int64_t)139 << 30, "139 GiB" }, { INT64_MAX, "8.00 EiB" },
    };
    static const struct { double count; const char *want; } counts[] = {
        { 0, "0" }, { 999, "999" }, { 999.7, "1.00k" }, { 13500, "13.5k" }, { 124439808, "124M" }, { 6.1e12, "6.10T" },
    };
    static const struct { double s; const char *want; } seconds[] = {
        { 0.84, "0.8s" }, { 9.96, "10s" }, { 59.4, "59s" }, { 59.6, "1m00s" }, { 581, "9m41s" }, { 7500, "2h05m" },
        { 273600, "3d04h" }, { NAN, "?" }, { -1, "?" }, { 1e300, "?" },
    };
    for (int i = 0; i < 8; i++) CHECK_MSG(!strcmp(units_bytes(b, bytes[i].bytes), bytes[i].want), "%s", b);
    for (int i = 0; i < 6; i++) CHECK_MSG(!strcmp(units_count(b, counts[i].count), counts[i].want), "%s", b);
    for (int i = 0; i < 10; i++) CHECK_MSG(!strcmp(units_seconds(b, seconds[i].s), seconds[i].want), "%s", b);
}

/* Extremes of y on the paths of one class. */
static void extremes(const char *svg_text, const char *class, double *least, double *most)
{
    char start[64];
    double x, y;
    snprintf(start, sizeof start, "<path class=\"%s\" d=\"", class);
    const char *at = strstr(svg_text, start), *end = at ? strchr(at + strlen(start), '"') : NULL;
    *least = 1e9, *most = -1e9;
    for (at = at ? at + strlen(start) : NULL; at && at < end; at++) {
        int n = 0;
        if ((*at == 'M' || *at == 'L' || *at == ' ') && sscanf(at + 1, "%lf %lf%n", &x, &y, &n) == 2 && n) {
            *least = y < *least ? y : *least;
            *most = y > *most ? y : *most;
            at += n;
        }
    }
}

/* Losses that jump up and down round a smooth curve; one spike is cut off, or nothing else could be seen. */
TEST(the_axes_hold_what_is_drawn)
{
    enum { TOP = 48, BOTTOM = 480 - 56 }; /* of the picture's frame */
    for (int spike = 0; spike < 2; spike++) {
        Metrics m;
        double least, most;
        int64_t size;
        fresh_dir();
        OK(metrics_open(&m, options(0)));
        for (int64_t s = 1; s <= 200; s++) {
            MetricsRecord r = record(s);
            if (s > 20) r.loss = 3 + (s % 2 ? 0.5 : -0.5) + 100 * (spike && s == 100);
            else r.loss = 3; /* (the first ones are not smoothed) */
            metrics_step(&m, &r);
        }
        OK(metrics_close(&m));
        char *text = slurp(svg, &size);
        extremes(text, "raw", &least, &most);
        CHECK_MSG(most <= BOTTOM && most > BOTTOM - 80, "the lowest step is at %g, the axis at %d", most, BOTTOM);
        if (!spike) CHECK_MSG(least >= TOP, "the highest step is at %g, the picture begins at %d", least, TOP);
        else CHECK(least < TOP);
        free(text);
    }
}

/* What is said of a step, and the copy that log_to_file keeps of it: with its time, without colours. */
TEST(the_line_of_a_step)
{
    Metrics m;
    MetricsOptions o = options(0);
    MetricsRecord r = record(3);
    char path[160], *text;
    int64_t size;
    fresh_dir();
    snprintf(path, sizeof path, "%s/log.txt", dir);
    o.epoch_tokens = 4 * r.tokens;
    o.log_every = 1;
    o.color = LOG_COLOR_ALWAYS;
    log_set_level(LOG_INFO);
    CHECK(log_to_file(path));
    OK(metrics_open(&m, o));
    r.grad_norm = 44442427498430464.0;
    metrics_step(&m, &r);
    r.grad_norm = 12.25;
    metrics_step(&m, &r);
    OK(metrics_close(&m));
    log_set_level(LOG_WARN);
    OK(file_read_all(path, 1 << 16, &text, &size));
    CHECK_MSG(strstr(text, "  grad 4.44e+16  ") && strstr(text, "  grad 12.250  ") && strstr(text, "  epoch 0.25"),
              "%s", text);
    const char *last = strstr(text, "Z step 3/");
    CHECK_MSG(last && last - text >= 19 && last[-3] == ':' && text[0] == '2' && !strchr(text, '\x1b'), "%s", text);
    free(text);
}

TEST(a_zero_metrics_ignores_calls)
{
    Metrics m = { 0 };
    MetricsRecord r = record(1);
    metrics_step(&m, &r);
    valid(&m, 1, 1, "x", 1);
    OK(metrics_close(&m));
    fresh_dir();
    OK(file_remove_tree(dir));
    FAILS(metrics_open(&m, options(0)), ERR_STORAGE, dir);
}

int main(int argc, char **argv)
{
    if (strcmp(argv[0], "faulty") == 0) {
        log_set_level(LOG_ERROR);
        set_dir(argv[2]);
        return err_exit_code(strcmp(argv[1], "five") == 0 ? five_steps() : resume_at_ten());
    }
    log_set_level(LOG_WARN);
    return test_main(argc, argv);
}
