/* A run's folder read back, whole, torn at every byte and with flipped ones; and the page made of it, whatever names
 * and values hold. */
#include "test.h"

#include "base/log.h"
#include "scratch.h"
#include "record/report.h"
#include "record/report_pictures.h"

/* Ten steps, the seventh skipped; losses on two sets after five and ten. */
static void make_run(const char *name, const char *config)
{
    char path[96], text[8192];
    JsonOut j;
    int n = 0;
    for (int64_t s = 1; s <= 10; s++) {
        MetricsRecord r = { .step = s, .tokens = 512 * s, .loss = s == 7 ? NAN : 5 - 0.1 * (double)s, .grad_norm = 1,
                            .lr = 1e-3, .step_ms = 20, .tokens_per_s = 25600, .mfu = 0.25, .tflops = 1,
                            .memory_bytes = 1 << 20, .skipped = s == 7 };
        for (int line = 0; line < (s % 5 ? 1 : 3); line++) {
            json_out_init(&j, text + n, (int64_t)sizeof text - n);
            if (line == 0) record_put_step(&j, &r);
            else {
                ValidRecord v = { .step = s,
                                  .tokens = 512 * s,
                                  .loss = line == 1 ? (s == 5 ? 2.5 : 3.5)
                                          : s == 5  ? 9.25
                                                    : 8.25 };
                if (line == 2) strcpy(v.name, "code");
                record_put_valid(&j, &v);
            }
            n += (int)j.used_bytes;
            text[n++] = '\n';
        }
    }
    OK(file_make_dirs(in_dir(name)));
    snprintf(path, sizeof path, "%s/metrics.jsonl", name);
    write_bytes(path, text, n);
    snprintf(path, sizeof path, "%s/config.ini", name);
    write_text(path, config);
}

static const char *page_of(const History *runs, int count)
{
    static char *text;
    size_t size;
    free(text);
    FILE *f = open_memstream(&text, &size);
    report_write(runs, count, f);
    fclose(f);
    CHECK(strstr(text, "</html>") && strlen(text) == size);
    return text;
}

TEST(a_run_reads_back)
{
    History h;
    make_run("run", "[run]\nname = first try\ndir =\n\n[train]\nsteps = 12\n");
    OK(history_read(in_dir("run"), &h));
    CHECK(!strcmp(h.name, "run") && h.last_step == 10 && h.tokens == 5120);
    CHECK(h.planned_steps == 12 && h.planned_tokens == 0);
    CHECK(h.steps == 10 && h.skipped == 1 && h.skipped_step[0] == 7 && h.memory_bytes == 1 << 20);
    CHECK_CLOSE(h.seconds, 0.2, 1e-12);
    CHECK_CLOSE(h.trained_tokens / h.seconds, 25600, 1e-12);
    CHECK_CLOSE(h.mfu_seconds / h.seconds, 0.25, 1e-12);
    const Curve *c = &h.curve[HISTORY_LOSS];
    CHECK(c->count == 10 && c->names == 2 && !*c->name[0] && !strcmp(c->name[1], "code") && c->dot_count == 4);
    CHECK(h.valid[0].best == 2.5 && h.valid[0].best_step == 5 && h.valid[0].last == 3.5 && h.valid[0].last_step == 10);
    CHECK(h.valid[1].best == 8.25 && h.valid[1].best_step == 10);
    CHECK(h.note_count == 0 && h.key_count == 3 && !strcmp(history_key(&h, "run.dir"), ""));
    CHECK(!history_key(&h, "run.seed"));
    const char *page = page_of(&h, 1);
    CHECK(strstr(page, "10 of 12") && strstr(page, "2.5000 <small>(step 5)") && strstr(page, "1 <small>(step 7)"));
    const char *curves = strstr(page, "<h2>Curves"), *figures = strstr(page, "<h2>Figures"),
               *keys = strstr(page, "<h2>Configuration<");
    CHECK(curves && figures > curves && keys > figures && strstr(keys, "<code>run.name</code>"));
    CHECK(strstr(page, "Validation loss on code by tokens") && strstr(page, "<h1>Run run</h1>"));
    history_release(&h);

    make_run("run", "[train]\nsteps = 0\ntokens = 7500000\n");
    OK(history_read(in_dir("run"), &h));
    CHECK(h.planned_steps == 0 && h.planned_tokens == 7500000);
    page = page_of(&h, 1);
    CHECK(!strstr(page, "10 of ") && strstr(page, "5.12k of 7.50M"));
    history_release(&h);
}

/* What --override changed stands in the figures and in each curve; the last start's steps may be fewer than were
 * made. */
TEST(changes_on_the_way)
{
    History h[2];
    char line[512];
    JsonOut j;
    make_run("changed", "[train]\nsteps = 7\n[optim]\nlr = 0.001\n");
    make_run("plain", "[train]\nsteps = 10\n");
    json_out_init(&j, line, sizeof line);
    record_put_override(&j,
                        &(OverrideRecord){ .step = 11, .section = "optim", .key = "lr", .was = "0.003", .is = "<i>" });
    FILE *f = fopen(in_dir("changed/metrics.jsonl"), "a");
    fprintf(f, "%.*s\n{\"step\":11,\"override\":\"x\"}\n", (int)j.used_bytes, line);
    fclose(f);
    OK(history_read(in_dir("changed"), &h[0]));
    OK(history_read(in_dir("plain"), &h[1]));
    CHECK(h[0].changes == 1 && h[0].change[0].step == 11 && h[0].change[0].tokens == 5120 && h[1].changes == 0);
    CHECK(!strcmp(h[0].change[0].key, "optim.lr") && !strcmp(h[0].change[0].was, "0.003"));
    const char *page = page_of(h, 2);
    CHECK(strstr(page, "changed on the way</th><td><code>optim.lr</code> 0.003 to &lt;i&gt; <small>(from step 11 on)"));
    CHECK(strstr(page, "</small></td><td>nothing</td>"));
    CHECK(strstr(page, "<path class=\"change ") && strstr(page, "optim.lr from 0.003 to &lt;i&gt;</title>"));
    CHECK(strstr(page, "10 <small>(train.steps of the last start: 7)") && strstr(page, "10 of 10"));
    CHECK(!strstr(page_of(&h[1], 1), "changed on the way"));
    history_release(&h[0]);
    history_release(&h[1]);
}

/* The first figure of this title, and the first number behind `key` in it. */
static const char *figure(const char *page, const char *title)
{
    const char *at = strstr(page, title);
    CHECK_MSG(at != NULL, "no figure '%s'", title);
    return at ? at : "";
}

/* A learning rate of two values has no others in its picture. */
/* A picture of what some runs have measured. */
TEST(logits_are_drawn_where_they_are_known)
{
    char text[2048];
    int n = 0;
    History h;
    make_run("plain", "");
    OK(history_read(in_dir("plain"), &h));
    CHECK(!strstr(page_of(&h, 1), "<figcaption>Largest logit of attention"));
    history_release(&h);
    for (int s = 1; s <= 10; s++)
        n += snprintf(text + n, sizeof text - (size_t)n, "{\"step\":%d,\"loss\":1,\"max_attention_logit\":%d}\n", s,
                      10 * s);
    OK(file_make_dirs(in_dir("logits")));
    write_bytes("logits/metrics.jsonl", text, n);
    OK(history_read(in_dir("logits"), &h));
    CHECK(h.curve[HISTORY_LOGIT].count == 10);
    CHECK(strstr(page_of(&h, 1), "<figcaption>Largest logit of attention"));
    history_release(&h);
}

TEST(a_jump_is_drawn_as_a_jump)
{
    static char text[65536];
    History h;
    int n = 0, heights = 0;
    char last[16] = "", y[16];
    for (int s = 1; s <= 400; s++)
        n += snprintf(text + n, sizeof text - (size_t)n, "{\"step\":%d,\"loss\":1,\"lr\":%s}\n", s,
                      s <= 200 ? "0" : "1e-4");
    OK(file_make_dirs(in_dir("jump")));
    write_bytes("jump/metrics.jsonl", text, n);
    OK(history_read(in_dir("jump"), &h));
    const char *at = strstr(figure(page_of(&h, 1), "<figcaption>Learning rate"), "class=\"line "),
               *end = at ? strstr(at, "/>") : NULL;
    for (at = at ? strstr(at, "h0L") : NULL; at && at < end;
         at = strchr(at + 1, ' '), at = at ? strchr(at + 1, ' ') : NULL) {
        if (sscanf(strchr(at, '.'), ".%*d %15[0-9.]", y) != 1) break;
        heights += strcmp(last, y) != 0;
        strcpy(last, y);
    }
    CHECK_MSG(heights == 2, "%d heights", heights);
    history_release(&h);
}

/* Beside a long run a short one's loss is within the axes, and its line, too short to be seen, ends in a mark. */
TEST(a_short_run_is_seen_beside_a_long_one)
{
    static char text[1 << 18];
    History h[2];
    int n = 0;
    double last, low, high;
    for (int s = 1; s <= 4000; s++)
        n += snprintf(text + n, sizeof text - (size_t)n, "{\"step\":%d,\"loss\":%.4f}\n", s, 2 + 4 * exp(-s / 50.0));
    OK(file_make_dirs(in_dir("long")));
    OK(file_make_dirs(in_dir("short")));
    write_bytes("long/metrics.jsonl", text, n);
    write_text("short/metrics.jsonl", "{\"step\":1,\"loss\":6.5}\n{\"step\":2,\"loss\":6.25}\n");
    OK(history_read(in_dir("long"), &h[0]));
    OK(history_read(in_dir("short"), &h[1]));
    const char *at = figure(page_of(h, 2), "<figcaption>Training loss by step"), *end = strstr(at, "</figure>");
    const char *axes = strstr(at, "data-axes=\""), *mark = strstr(at, "class=\"mark c1 k1\"");
    CHECK(axes && sscanf(axes, "data-axes=\"%lf %lf %lf", &last, &low, &high) == 3);
    CHECK_MSG(last == 4000 && low < 2.1 && high > 6.25 && high < 7, "from %g to %g", low, high);
    CHECK(mark && mark < end);
    history_release(&h[0]);
    at = figure(page_of(&h[1], 1), "<figcaption>Training loss by step");
    CHECK(strstr(at, "class=\"mark") == NULL || strstr(at, "class=\"mark") > strstr(at, "</figure>"));
    history_release(&h[1]);
}

TEST(what_is_missing_is_told)
{
    History h;
    make_run("run", "[run]\n");
    FAILS(history_read(in_dir("nowhere"), &h), ERR_CKPT, "is no run folder");
    OK(file_remove_tree(in_dir("run/config.ini")));
    OK(history_read(in_dir("run"), &h));
    CHECK(h.steps == 10 && h.note_count == 1 && strstr(h.notes[0], "config.ini is missing") && !strcmp(h.name, "run"));
    history_release(&h);
    make_run("run", "[run]\nname = x\n");
    OK(file_remove_tree(in_dir("run/metrics.jsonl")));
    OK(history_read(in_dir("run"), &h));
    CHECK(h.steps == 0 && h.note_count == 1 && strstr(h.notes[0], "metrics.jsonl is missing"));
    CHECK(strstr(page_of(&h, 1), "not known"));
    history_release(&h);
    write_text("run/metrics.jsonl", "");
    OK(history_read(in_dir("run"), &h));
    CHECK(h.note_count == 1 && strstr(h.notes[0], "holds no step"));
    history_release(&h);
}

TEST(damage_is_left_out_and_told)
{
    History h;
    make_run("run", "[run]\nname = x\n");
    write_text(
        "run/metrics.jsonl",
        "{\"step\":1,\"loss\":4}\nnonsense\n[]\n{\"step\":-1}\n{\"step\":3,\"loss\":3}\n"
        "{\"step\":3,\"saved\":true,\"save_ms\":4}\n{\"step\":2,\"loss\":2}\n{\"step\":3,\"loss\":1}\n"
        "{\"step\":4,\"loss\":1e999}\n"
        "{\"step\":9223372036854775807,\"loss\":\"x\",\"valid_loss\":\"y\"}\n{\"step\":5");
    OK(history_read(in_dir("run"), &h));
    CHECK(h.steps == 3 && h.last_step == INT64_MAX);
    CHECK(h.note_count == 3 && strstr(h.notes[0], "is torn"));
    CHECK_MSG(strstr(h.notes[1], "4 damaged lines"), "%s", h.notes[1]);
    CHECK_MSG(strstr(h.notes[2], "2 steps"), "%s", h.notes[2]);
    const char *page = page_of(&h, 1);
    CHECK(strstr(page, "Not read whole") && strstr(page, "is torn") && !strstr(page, "\"nan") && !strstr(page, " inf"));
    history_release(&h);
}

TEST(any_byte_torn_or_flipped)
{
    History h;
    char *text;
    int64_t size;
    uint64_t state = 7;
    make_run("run", "[run]\nname = x\n");
    OK(file_read_all(in_dir("run/metrics.jsonl"), 1 << 20, &text, &size));
    for (int64_t cut = 0; cut < size; cut += 13) {
        write_bytes("run/metrics.jsonl", text, cut);
        int64_t whole = 0;
        for (int64_t i = 0; i < cut; i++) whole += text[i] == '\n';
        OK(history_read(in_dir("run"), &h));
        CHECK(h.steps + h.curve[HISTORY_LOSS].dot_count == whole);
        CHECK((h.note_count > 0) == (cut == 0 || text[cut - 1] != '\n'));
        history_release(&h);
    }
    char *bad = malloc((size_t)size);
    for (int turn = 0; turn < 120; turn++) {
        memcpy(bad, text, (size_t)size);
        for (int k = 0; k < 1 + turn % 4; k++)
            bad[test_rand(&state) % (uint64_t)size] ^= (char)(1 << test_rand(&state) % 8);
        write_bytes(turn % 2 ? "run/metrics.jsonl" : "run/config.ini", bad, size);
        OK(history_read(in_dir("run"), &h));
        if (turn % 8 == 0) page_of(&h, 1);
        history_release(&h);
    }
    free(bad);
    free(text);
}

/* Loads of experts, 200 steps of three layers in bins of four: means of the bins, and a picture of them. Lists that are
 * damaged or of another length are left out. */
TEST(loads_of_experts)
{
    static char text[32768];
    History h;
    int n = 0;
    for (int s = 1; s <= 200; s++)
        n += snprintf(text + n, sizeof text - (size_t)n, "{\"step\":%d,\"loss\":1,\"expert_load\":[1,%.2f,%.2f]}\n", s,
                      1 + 0.02 * s, s <= 100 ? 8.0 : 1.0);
    n += snprintf(
        text + n, sizeof text - (size_t)n,
        "{\"step\":201,\"loss\":1,\"expert_load\":[1,null,2]}\n{\"step\":202,\"loss\":1,\"expert_load\":[9,9]}\n"
        "{\"step\":203,\"loss\":1,\"expert_load\":{\"a\":9,\"b\":9,\"c\":9}}\n");
    OK(file_make_dirs(in_dir("loads")));
    write_bytes("loads/metrics.jsonl", text, n);
    OK(history_read(in_dir("loads"), &h));
    CHECK(h.loads.layers == 3 && h.loads.stride == 4 && h.loads.bins == 50 && h.loads.step[49] == 200);
    for (int b = 0; b < 50; b++) {
        CHECK_CLOSE(load_map_at(&h.loads, 0, b), 1, 1e-12);
        CHECK_CLOSE(load_map_at(&h.loads, 1, b), 1 + 0.02 * (4 * b + 2.5), 1e-12);
        CHECK_CLOSE(load_map_at(&h.loads, 2, b), b < 25 ? 8 : 1, 1e-12);
    }
    const char *page = page_of(&h, 1);
    CHECK(strstr(page, "At the end: layer 0 1, layer 1 4.97, layer 2 1."));
    CHECK(strstr(page, "from no colour, 1, to the strongest, 8"));
    int strongest = 0;
    for (const char *at = page; (at = strstr(at, "opacity=\"1.00\"")); at++) strongest++;
    CHECK(strongest == 1); /* half a row, in one piece */
    history_release(&h);
    make_run("dense", "[run]\nname = dense\n");
    OK(history_read(in_dir("dense"), &h));
    CHECK(!strstr(page_of(&h, 1), "Load of experts"));
    history_release(&h);
}

/* Nothing of a name or value becomes markup; what differs is shown, and only that. */
TEST(hostile_text_stays_text)
{
    History h[2];
    make_run("<b>'&\"", "[run]\nname = x\n\n[data]\ntrain = <img src=x onerror=y>\n"
                        "seed = 1\nvalid =\n");
    make_run("\xff\xfe\xc3(\x01\xc2\x9b \xe2\x82\xac", "[data]\ntrain = a\"b'c&d\nseed = 1\n");
    write_text("\xff\xfe\xc3(\x01\xc2\x9b \xe2\x82\xac/metrics.jsonl", "{\"step\":1,\"loss\":1,\"tokens\":1}\n"
                                  "{\"step\":1,\"valid\":\"</desc><svg onload=z>\",\"valid_loss\":2}\n");
    OK(history_read(in_dir("<b>'&\""), &h[0]));
    OK(history_read(in_dir("\xff\xfe\xc3(\x01\xc2\x9b \xe2\x82\xac"), &h[1]));
    const char *page = page_of(h, 2);
    CHECK(!strstr(page, "<img") && !strstr(page, "<svg onload") && !strstr(page, "<b>"));
    CHECK(strstr(page, "</svg>&lt;b&gt;&#39;&amp;&quot;<small>") && strstr(page, "&lt;img src=x onerror=y&gt;"));
    CHECK(!strstr(page, "\xc2\x9b")); /* a control character in two bytes */
    CHECK(strstr(page, "a&quot;b&#39;c&amp;d") && strstr(page, "&lt;/desc&gt;&lt;svg onload=z&gt;"));
    CHECK(strstr(page, "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD(   \xe2\x82\xac"));
    CHECK(strstr(page, "<code>data.train</code>") && !strstr(page, "<code>data.seed</code>"));
    CHECK(strstr(page, "<code>data.valid</code>") && strstr(page, "not there") && !strstr(page, "<code>run.name"));
    history_release(&h[0]);
    history_release(&h[1]);
}

/* Named by their folders, for what one configuration was tried with has one name. */
TEST(runs_of_one_name_are_told_apart)
{
    History h[3];
    make_run("first/demo", "[run]\nname = of its configuration\n");
    make_run("second/demo", "[run]\nname = of its configuration\n");
    make_run("other", "[run]\nname = of its configuration\n");
    OK(history_read(in_dir("first/demo"), &h[0]));
    OK(history_read(in_dir("second/demo/"), &h[1]));
    OK(history_read(in_dir("other"), &h[2]));
    CHECK(!strcmp(report_name(h, 3, 0), h[0].dir) && !strcmp(report_name(h, 3, 1), h[1].dir));
    CHECK(!strcmp(report_name(h, 3, 2), "other") && !strcmp(report_name(h, 1, 0), "demo"));
    const char *legend = strstr(page_of(h, 3), "<ul class=\"legend\">");
    CHECK(legend && strstr(legend, "/first/demo</li>") && strstr(legend, "/second/demo/</li>") &&
          strstr(legend, "other</li>"));
    CHECK(strstr(legend, "/second/demo/: ") && strstr(legend, "/second/demo/: 1 skipped step</title>"));
    for (int i = 0; i < 3; i++) history_release(&h[i]);
}

/* Colour and dashes together tell as many runs apart as a page takes. */
TEST(all_runs_look_different)
{
    char *look[REPORT_RUNS];
    size_t size;
    for (int i = 0; i < REPORT_RUNS; i++) {
        FILE *f = open_memstream(&look[i], &size);
        report_look(f, i);
        fclose(f);
        for (int k = 0; k < i; k++) CHECK_MSG(strcmp(look[k], look[i]) != 0, "runs %d and %d: %s", k, i, look[i]);
        char dashes[8];
        snprintf(dashes, sizeof dashes, "k%d", report_mark(i));
        CHECK(strstr(look[i], dashes));
    }
    for (int i = 0; i < REPORT_RUNS; i++) free(look[i]);
}

/* The page's script reads values off the lines, of those above the picture too. */
TEST(lines_hold_the_values)
{
    History h;
    char text[8192], *at = text;
    make_run("run", "[run]\nname = x\n");
    for (int s = 1; s <= 100; s++)
        at += sprintf(at, "{\"step\":%d,\"tokens\":%d,\"loss\":%g}\n", s, s,
                      s == 1   ? 50.0
                      : s == 2 ? 1e5
                               : 3 + 0.01 * s);
    write_bytes("run/metrics.jsonl", text, at - text);
    OK(history_read(in_dir("run"), &h));
    const char *page = page_of(&h, 1), *axes = strstr(page, "data-box="), *line = axes;
    double left, top, right, bottom, last, low, high, x, y;
    CHECK(axes && sscanf(axes, "data-box=\"%lf %lf %lf %lf\" data-axes=\"%lf %lf %lf\"", &left, &top, &right, &bottom,
                         &last, &low, &high) == 7);
    CHECK(last == 100 && high < 10);
    line = strstr(line, "<path class=\"line ");
    CHECK(line && (line = strstr(line, "d=\"M")) && sscanf(line, "d=\"M%lf %lf", &x, &y) == 2);
    CHECK_CLOSE((x - left) / (right - left) * last, 1, 1e-2);
    CHECK_CLOSE(high - (y - top) / (bottom - top) * (high - low), 50, 1e-3);
    CHECK_MSG(strstr(page, " -1000000.00 ") && strstr(page, "<1e6?"), "%.300s", line);
    history_release(&h);
}

TEST(the_first_step_has_an_axis_of_whole_steps)
{
    History h;
    make_run("run", "[run]\nname = x\n");
    write_text("run/metrics.jsonl", "{\"step\":1,\"tokens\":64,\"loss\":155113}\n");
    OK(history_read(in_dir("run"), &h));
    const char *page = page_of(&h, 1);
    CHECK(strstr(page, "class=\"m\">1<") && !strstr(page, "class=\"m\">0.2<"));
    CHECK(strstr(page, ": 155k at step 1. "));
    history_release(&h);
}

/* A note is long enough for a path and what is wrong with it. */
TEST(notes_are_whole)
{
    History h;
    char name[200] = "run", path[300];
    for (int i = 0; i < 90; i++) strcat(name, "\xC3\xBC");
    snprintf(path, sizeof path, "%s/metrics.jsonl", name);
    OK(file_make_dirs(in_dir(path)));
    OK(history_read(in_dir(name), &h));
    CHECK_MSG(h.note_count == 2 && strstr(h.notes[1], "metrics.jsonl' is not a regular file"), "%s", h.notes[1]);
    history_release(&h);
}

TEST(long_runs_give_small_pages)
{
    static char text[1 << 23];
    History h;
    int n = 0;
    make_run("run", "[run]\nname = x\n");
    for (int s = 1; s <= 60000; s++)
        n += sprintf(text + n, "{\"step\":%d,\"tokens\":%d,\"loss\":%.4f,\"step_ms\":1,\"tokens_per_s\":9}\n", s, s,
                     1.0 / s);
    write_bytes("run/metrics.jsonl", text, n);
    OK(history_read(in_dir("run"), &h));
    CHECK(h.steps == 60000 && strlen(page_of(&h, 1)) < 400000);
    history_release(&h);
}

int main(int argc, char **argv)
{
    log_set_level(LOG_ERROR);
    return test_main(argc, argv);
}
