/*
 * See metrics.h. In here, in this order: the lines of an earlier run, lines and events, the picture, the terminal.
 *
 * metrics.jsonl and the event file are only ever appended to while a run goes on. When a write fails, the file is cut
 * back to its last whole line or event, so that a reader (and a resumed run) sees whole ones only.
 */
#include "record/metrics.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "config/config.h"
#include "base/map.h"
#include "base/run_files.h"
#include "base/units.h"
#include "base/words.h"

static const double PICTURE_EVERY_S = 30, STATUS_EVERY_S = 0.05;

/* ---- the lines of an earlier run ---- */

typedef struct {
    FileMap map;
    FileWriter kept;     /* the file without the lines that have to go; open after the first of those */
    char path[PATH_MAX]; /* of `kept`, once it is cutting */
    bool cutting;
    int64_t run_start; /* kept lines from here on are not yet copied */
    int64_t damaged;
} Earlier;

/* True if the line stays; then it is part of the curve. */
static bool take_line(Metrics *m, Earlier *e, const char *line, int64_t size_bytes)
{
    Record r;
    record_read(line, size_bytes, &r);
    e->damaged += r.kind == RECORD_DAMAGED && size_bytes > 0;
    if (r.kind == RECORD_DAMAGED || m->o.resume_step == 0 || r.step.step > m->o.resume_step) return false;
    if (r.kind == RECORD_VALID) curve_add_dot(&m->curve, r.valid.step, r.valid.tokens, r.valid.loss, r.valid.name);
    if (r.kind == RECORD_STEP && r.step.step > 0)
        curve_add(&m->curve, r.step.step, r.step.tokens, r.step.loss, r.step.skipped);
    return true;
}

/* Copies the kept lines up to `end`, where a line that goes begins; the next kept one starts at `next`. */
static Err cut_out(const Metrics *m, Earlier *e, int64_t end, int64_t next)
{
    if (!e->cutting) {
        TRY(file_create_beside(m->jsonl_path, &e->kept));
        strcpy(e->path, e->kept.path);
        e->cutting = true;
    }
    const char *text = e->map.data;
    if (end > e->run_start) TRY(file_write(&e->kept, text + e->run_start, end - e->run_start));
    e->run_start = next;
    return ERR_OK;
}

static Err filter_lines(Metrics *m, Earlier *e)
{
    const char *text = e->map.data;
    int64_t size = e->map.size_bytes;
    for (int64_t at = 0, next; at < size; at = next) {
        const char *end = memchr(text + at, '\n', (size_t)(size - at));
        next = end ? end + 1 - text : size;
        bool keep = end && take_line(m, e, text + at, end - (text + at));
        if (!keep) TRY(cut_out(m, e, at, next));
    }
    TRY(map_intact(&e->map));
    return e->cutting ? cut_out(m, e, size, size) : ERR_OK;
}

/* Reads metrics.jsonl into the curve and takes off what is later than the checkpoint. */
static Err read_earlier(Metrics *m)
{
    Earlier e = { .kept.fd = -1 };
    if (!file_exists(m->jsonl_path)) return ERR_OK;
    TRY(file_map(m->jsonl_path, &e.map));
    Err err = filter_lines(m, &e);
    file_unmap(&e.map);
    if (e.damaged > 0)
        log_warn("'%s': dropped %lld damaged line%s", m->jsonl_path, (long long)e.damaged, e.damaged == 1 ? "" : "s");
    if (!e.cutting) return err;
    if (err) {
        file_abandon(&e.kept);
        return err;
    }
    err = file_sync_close(&e.kept);
    if (!err) err = file_rename(e.path, m->jsonl_path);
    if (err) unlink(e.path);
    else err = file_sync_dir(m->o.run_dir);
    return err;
}

static void look_at(MetricsLeft *left, const char *line, int64_t size_bytes)
{
    static const char saved[] = "\"saved\":true";
    Record r;
    record_read(line, size_bytes, &r);
    if (r.kind == RECORD_STEP && r.step.step > left->last_step) left->last_step = r.step.step;
    left->saved |= memmem(line, (size_t)size_bytes, saved, sizeof saved - 1) != NULL;
}

Err metrics_left(const char *run_dir, MetricsLeft *left)
{
    char path[PATH_MAX];
    FileMap map;
    *left = (MetricsLeft){ 0 };
    if (snprintf(path, sizeof path, "%s/" RUN_METRICS, run_dir) >= PATH_MAX || !file_exists(path)) return ERR_OK;
    TRY_AS(ERR_STORAGE, file_map(path, &map));
    const char *text = map.data, *end = text + map.size_bytes;
    for (const char *next; text && text < end; text = next) {
        const char *newline = memchr(text, '\n', (size_t)(end - text));
        next = newline ? newline + 1 : end;
        if (newline) look_at(left, text, newline - text);
    }
    file_unmap(&map);
    return ERR_OK;
}

/* ---- lines and events ---- */

/* A failed write is told once a file and counted. */
static void count_lost(Err err, int64_t *lost, const char *what)
{
    if (err && (*lost)++ == 0) log_warn("%s; the run goes on without this %s", err_message(), what);
}

static void write_line(Metrics *m, JsonOut *j)
{
    ASSERT(json_out_ok(j) && j->used_bytes + 1 < j->size_bytes);
    j->buf[j->used_bytes] = '\n';
    count_lost(file_write_or_undo(&m->jsonl, j->buf, j->used_bytes + 1), &m->lost_lines, "line of its metrics");
}

static void line_step(Metrics *m, const MetricsRecord *r)
{
    JsonOut j;
    json_out_init(&j, m->line, sizeof m->line);
    record_put_step(&j, r);
    write_line(m, &j);
}

static void line_valid(Metrics *m, const ValidRecord *r)
{
    JsonOut j;
    json_out_init(&j, m->line, sizeof m->line);
    record_put_valid(&j, r);
    write_line(m, &j);
}

void metrics_override(Metrics *m, const OverrideRecord *r)
{
    JsonOut j;
    if (!m->open || !m->o.jsonl) return;
    json_out_init(&j, m->line, sizeof m->line);
    record_put_override(&j, r);
    write_line(m, &j);
}

void metrics_restart(Metrics *m, const RestartRecord *r)
{
    JsonOut j;
    if (!m->open || !m->o.jsonl) return;
    json_out_init(&j, m->line, sizeof m->line);
    record_put_restart(&j, r);
    write_line(m, &j);
}

static void event_done(Metrics *m, Err err) { count_lost(err, &m->lost_events, "event for TensorBoard"); }

/* ---- loss.svg ---- */

static Err write_picture(Metrics *m)
{
    m->picture_s = clock_s();
    curve_svg(&m->curve, m->o.title, m->picture.out);
    return svg_sheet_write(&m->picture, m->svg_path);
}

/* ---- the terminal ---- */

typedef struct {
    char *text;
    int used, width, room; /* bytes so far; columns so far and at most */
    bool colored;
} Line;

/* Adds two blanks and the text, in this colour (SGR parameters; "" = none), unless there is no room for it. */
__attribute__((format(printf, 3, 4))) static void line_add(Line *l, const char *color, const char *fmt, ...)
{
    char text[96];
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(text, sizeof text, fmt, args);
    va_end(args);
    int gap = l->width ? 2 : 0;
    if (n < 0 || n >= (int)sizeof text || l->width + gap + n > l->room) return;
    l->width += gap + n;
    bool paint = l->colored && *color;
    n = snprintf(l->text + l->used, (size_t)(LOG_STATUS_BYTES - l->used), "%*s%s%s%s%s%s", gap, "",
                 paint ? "\x1b[" : "", paint ? color : "", paint ? "m" : "", text, paint ? "\x1b[0m" : "");
    l->used += n;
    ASSERT(l->used < LOG_STATUS_BYTES);
}

static int terminal_columns(void)
{
    struct winsize w;
    return ioctl(STDERR_FILENO, TIOCGWINSZ, &w) == 0 && w.ws_col > 0 ? w.ws_col - 1 : 100;
}

static double worst_load(const MetricsRecord *r)
{
    double worst = 0;
    for (int i = 0; i < r->layers; i++)
        if (r->load[i] > worst) worst = r->load[i];
    return worst;
}

static void format_step(Metrics *m, const MetricsRecord *r)
{
    char a[UNITS_BYTES];
    Line l = { .text = m->text, .room = m->live ? terminal_columns() : 160, .colored = m->colored };
    m->text[0] = 0;
    if (m->o.total_steps) line_add(&l, "", "step %lld/%lld", (long long)r->step, (long long)m->o.total_steps);
    else line_add(&l, "", "step %lld", (long long)r->step);
    line_add(&l, "1;36", "loss %.4f", r->loss);
    for (int i = 0; i < r->mtp; i++) line_add(&l, "36", "mtp%d %.4f", i + 1, r->mtp_loss[i]);
    line_add(&l, "", "lr %.2e", r->lr);
    if (r->skipped) line_add(&l, "1;31", "skipped: not finite");
    else line_add(&l, "", r->grad_norm < 1e4 ? "grad %.3f" : "grad %.2e", r->grad_norm);
    if (r->load) line_add(&l, "", "load %.2f", worst_load(r));
    if (r->logits.by_layer)
        line_add(&l, "", "max logit %.4g (layer %d head %d)", r->logits.most, r->logits.layer, r->logits.head);
    line_add(&l, "", "%.*f ms", r->step_ms < 100 ? 1 : 0, r->step_ms);
    if (r->ranks.notable) line_add(&l, "1;33", "rank %d %.0f%% slower", r->ranks.slowest, 100 * r->ranks.lag);
    line_add(&l, "32", "%s tok/s", units_count(a, r->tokens_per_s));
    if (r->mfu > 0) line_add(&l, "32", "MFU %.1f%%", 100 * r->mfu);
    line_add(&l, "2", "%s", units_bytes(a, r->memory_bytes));
    if (m->o.epoch_tokens) line_add(&l, "2", "epoch %.2f", (double)r->tokens / (double)m->o.epoch_tokens);
    if (m->o.total_steps > r->step)
        line_add(&l, "2", "eta %s", units_seconds(a, 1e-3 * m->mean_ms * (double)(m->o.total_steps - r->step)));
}

static void show_step(Metrics *m, const MetricsRecord *r)
{
    m->mean_ms = m->mean_ms > 0 ? 0.9 * m->mean_ms + 0.1 * r->step_ms : r->step_ms;
    const bool stays = r->step % m->o.log_every == 0 || r->step == m->o.total_steps;
    const double t = clock_s();
    if (!stays && !m->live) return;
    format_step(m, r);
    m->said = stays;
    if (stays) {
        if (m->live) log_status(NULL);
        log_info("%s", m->text);
    } else if (t - m->status_s >= STATUS_EVERY_S) {
        log_status(m->text);
        m->status_s = t;
    }
}

static void terminal_open(Metrics *m)
{
    const char *no_color = getenv("NO_COLOR");
    m->live = log_is_live();
    bool wanted = m->live && !(no_color && *no_color);
    m->colored = m->o.color == LOG_COLOR_ALWAYS || (m->o.color == LOG_COLOR_AUTO && wanted);
}

/* ---- all together ---- */

static Err open_files(Metrics *m)
{
    TRY(curve_open(&m->curve, &m->memory, true));
    TRY(svg_sheet_open(&m->picture, &m->memory, CURVE_SVG_BYTES));
    TRY_AS(ERR_STORAGE, read_earlier(m)); /* without log.jsonl too: what was undone must not stay */
    TRY_AS(ERR_STORAGE, events_cut(m->o.run_dir, m->o.resume_step));
    if (m->o.tensorboard) TRY_AS(ERR_STORAGE, events_open(&m->events, m->o.run_dir, m->o.resume_step + 1));
    Err err = m->o.tensorboard && m->o.config ? events_config(&m->events, m->o.resume_step + 1, m->o.config) : ERR_OK;
    if (!err && m->o.jsonl) err = file_append(m->jsonl_path, &m->jsonl);
    if (err && m->o.tensorboard) file_abandon(&m->events.file);
    return err_as(err, ERR_STORAGE);
}

Err metrics_open(Metrics *m, MetricsOptions o)
{
    *m = (Metrics){ .o = o, .picture_s = clock_s() };
    m->jsonl = m->events.file = (FileWriter){ .fd = -1, .failed = true };
    ASSERT(o.log_every > 0 && o.resume_step >= 0);
    text_cut(m->title, sizeof m->title, o.title);
    m->o.title = m->title;
    int room = PATH_MAX - 64;
    if (snprintf(m->jsonl_path, PATH_MAX, "%s/" RUN_METRICS, o.run_dir) > room)
        return err_set(ERR_STORAGE, "path is too long: '%s'", o.run_dir);
    snprintf(m->svg_path, PATH_MAX, "%.*s/" RUN_CURVE, room, o.run_dir);
    TRY(prometheus_open(&m->prometheus, o.prometheus ? o.prometheus : "", o.run_dir, m->title));
    setup_init(&m->memory);
    Err err = open_files(m);
    if (err) {
        if (m->picture.out) fclose(m->picture.out);
        setup_release(&m->memory);
        return err;
    }
    terminal_open(m);
    m->open = true;
    return ERR_OK;
}

void metrics_wait(Metrics *m)
{
    if (m->open && m->live) log_status("the first step is running");
}

void metrics_step(Metrics *m, const MetricsRecord *r)
{
    if (!m->open) return;
    curve_add(&m->curve, r->step, r->tokens, r->loss, r->skipped);
    if (m->o.jsonl) line_step(m, r);
    prometheus_step(&m->prometheus, r);
    if (m->o.tensorboard) event_done(m, events_step(&m->events, r));
    if (m->o.tensorboard && r->mtp) event_done(m, events_mtp(&m->events, r));
    if (m->o.tensorboard && r->load) event_done(m, events_load(&m->events, r));
    if (m->o.tensorboard && r->logits.by_layer) event_done(m, events_logits(&m->events, r));
    if (m->o.tensorboard && r->ranks.measured) event_done(m, events_ranks(&m->events, r));
    show_step(m, r);
    if (clock_s() - m->picture_s > PICTURE_EVERY_S && write_picture(m) != ERR_OK)
        log_warn_once("metrics: picture", "%s; the run goes on", err_message());
}

void metrics_valid(Metrics *m, const ValidRecord *r)
{
    if (!m->open) return;
    curve_add_dot(&m->curve, r->step, r->tokens, r->loss, r->name);
    if (m->o.jsonl) line_valid(m, r);
    prometheus_valid(&m->prometheus, r);
    if (m->o.tensorboard) event_done(m, events_valid(&m->events, r->step, r->name, r->loss));
    log_info("step %lld: validation loss %.4f%s%s", (long long)r->step, r->loss, *r->name ? " on " : "", r->name);
}

void metrics_task(Metrics *m, const TaskRecord *r)
{
    char text[LOG_STATUS_BYTES];
    JsonOut j;
    if (!m->open) return;
    json_out_init(&j, m->line, sizeof m->line);
    record_put_task(&j, r);
    if (m->o.jsonl) write_line(m, &j);
    int used = snprintf(text, sizeof text, "step %lld: %s", (long long)r->step, r->name);
    for (int i = 0; i < r->metrics; i++)
        used += snprintf(text + used, sizeof text - (size_t)used, ", %s %.4f", r->metric[i], r->mean[i]);
    log_info("%s (%lld question%s)", text, (long long)r->questions, r->questions == 1 ? "" : "s");
}

static Err close_file(FileWriter *w, bool open, int64_t lost, const char *what)
{
    char path[PATH_MAX];
    if (!open) return ERR_OK;
    strcpy(path, w->path);
    TRY(file_sync_close(w));
    if (lost == 0) return ERR_OK;
    return err_set(ERR_STORAGE, "%lld %s of '%s' could not be written", (long long)lost, what, path);
}

Err metrics_close(Metrics *m)
{
    if (!m->open) return ERR_OK;
    if (m->live) log_status(NULL);
    if (m->live && m->text[0] && !m->said) log_info("%s", m->text);
    prometheus_close(&m->prometheus);
    Err err = close_file(&m->jsonl, m->o.jsonl, m->lost_lines, "lines");
    if (!err) err = close_file(&m->events.file, m->o.tensorboard, m->lost_events, "events");
    if (!err) err = write_picture(m);
    fclose(m->picture.out);
    setup_release(&m->memory);
    m->open = false;
    return err_as(err, ERR_STORAGE);
}
