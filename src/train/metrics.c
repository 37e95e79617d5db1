/*
 * See metrics.h. In here, in this order: the curve that is kept in memory, the lines of an earlier run, the
 * JSON lines, the picture, the terminal.
 *
 * metrics.jsonl is only ever appended to while a run goes on. When a write fails, the file is cut back to its
 * last whole line, so that a reader (and a resumed run) sees whole lines only.
 */
#include "train/metrics.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/config.h"
#include "base/json.h"
#include "base/units.h"

static const double PICTURE_EVERY_S = 30, STATUS_EVERY_S = 0.05;

/* ---- the curve ---- */

static void point_merge(SvgPoint *to, const SvgPoint *from)
{
    to->step = from->step;
    to->count += from->count;
    to->sum += from->sum;
    to->low = fmin(to->low, from->low);
    to->high = fmax(to->high, from->high);
    to->skipped += from->skipped;
}

static bool same_point(const MetricsCurve *c, int64_t a, int64_t b)
{
    return (a - 1) / c->stride == (b - 1) / c->stride;
}

static void curve_coarsen(MetricsCurve *c)
{
    int kept = 0;
    c->stride *= 2;
    for (int i = 0; i < c->count; i++) {
        if (kept > 0 && same_point(c, c->points[kept - 1].step, c->points[i].step))
            point_merge(&c->points[kept - 1], &c->points[i]);
        else c->points[kept++] = c->points[i];
    }
    c->count = kept;
}

static void curve_add(MetricsCurve *c, int64_t step, double loss, bool skipped)
{
    bool finite = isfinite(loss);
    SvgPoint one = { .step = step,
                     .count = finite,
                     .sum = finite ? loss : 0,
                     .low = finite ? loss : INFINITY,
                     .high = finite ? loss : -INFINITY,
                     .skipped = skipped };
    while (c->count == CURVE_POINTS && !same_point(c, c->points[c->count - 1].step, step)) curve_coarsen(c);
    if (c->count > 0 && same_point(c, c->points[c->count - 1].step, step))
        point_merge(&c->points[c->count - 1], &one);
    else c->points[c->count++] = one;
}

static void curve_add_dot(MetricsCurve *c, SvgDot dot)
{
    if (c->dot_count == CURVE_DOTS) {
        for (int i = 0; i < CURVE_DOTS / 2; i++) c->dots[i] = c->dots[2 * i];
        c->dot_count = CURVE_DOTS / 2;
    }
    c->dots[c->dot_count++] = dot;
}

/* A name that fits, cut between two characters. */
static void name_cut(char out[SVG_NAME_BYTES], const char *name)
{
    size_t n = strlen(name);
    if (n >= SVG_NAME_BYTES)
        for (n = SVG_NAME_BYTES - 1; n > 0 && (name[n] & 0xC0) == 0x80; n--) {}
    memcpy(out, name, n);
    out[n] = 0;
}

/* The series of a validation set; those beyond METRICS_NAMES share the last one's. */
static int series_of(Metrics *m, const char *name)
{
    for (int i = 0; i < m->names; i++)
        if (strcmp(m->name[i], name) == 0) return i;
    if (m->names == METRICS_NAMES) return METRICS_NAMES - 1;
    name_cut(m->name[m->names], name);
    return m->names++;
}

/* ---- the lines of an earlier run ---- */

typedef struct {
    FileMap map;
    FileWriter kept;     /* the file without the lines that have to go; open after the first of those */
    char path[PATH_MAX]; /* of `kept` */
    bool cutting;
    int64_t run_start; /* kept lines from here on are not yet copied */
    int64_t damaged;
} Earlier;

/* True if the line stays; then it is part of the curve. */
static bool take_line(Metrics *m, Earlier *e, const char *line, int64_t size_bytes)
{
    Json *j;
    if (json_parse(m->jsonl_path, line, size_bytes, &j) != ERR_OK || !json_is_int(json_get(j, "step"))) {
        if (size_bytes > 0) e->damaged++;
        json_free(j);
        return false;
    }
    int64_t step = json_int(json_get(j, "step"), 0);
    const Json *valid = json_get(j, "valid_loss");
    bool keep = step >= 0 && step <= m->o.resume_step && m->o.resume_step > 0;
    if (keep && valid) {
        const char *name = json_text(json_get(j, "valid"), NULL);
        char shown[SVG_NAME_BYTES];
        name_cut(shown, name ? name : "");
        curve_add_dot(&m->curve, (SvgDot){ step, json_number(valid, NAN), series_of(m, shown) });
    } else if (keep && step > 0)
        curve_add(&m->curve, step, json_number(json_get(j, "loss"), NAN),
                  json_is_true(json_get(j, "skipped")));
    json_free(j);
    return keep;
}

/* Copies the kept lines up to `end`, where a line that goes begins; the next kept one starts at `next`. */
static Err cut_out(Earlier *e, int64_t end, int64_t next)
{
    if (!e->cutting) {
        TRY(file_create(e->path, &e->kept));
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
        if (!keep) TRY(cut_out(e, at, next));
    }
    return e->cutting ? cut_out(e, size, size) : ERR_OK;
}

/* Reads metrics.jsonl into the curve and takes off what is later than the checkpoint. */
static Err read_earlier(Metrics *m)
{
    Earlier e = { .kept.fd = -1 };
    if (!file_exists(m->jsonl_path)) return ERR_OK;
    snprintf(e.path, sizeof e.path, "%.*s.tmp-%d", PATH_MAX - 32, m->jsonl_path, (int)getpid());
    TRY(file_map(m->jsonl_path, &e.map));
    Err err = filter_lines(m, &e);
    file_unmap(&e.map);
    if (e.damaged > 0)
        log_warn("'%s': dropped %lld damaged line%s", m->jsonl_path, (long long)e.damaged,
                 e.damaged == 1 ? "" : "s");
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

/* ---- metrics.jsonl ---- */

static void write_line(Metrics *m, JsonOut *j)
{
    ASSERT(json_out_ok(j) && j->used_bytes + 1 < j->size_bytes);
    j->buf[j->used_bytes] = '\n';
    int64_t whole_bytes = m->jsonl.written_bytes;
    if (file_write(&m->jsonl, j->buf, j->used_bytes + 1) == ERR_OK) return;

    if (m->lost_lines++ == 0) log_warn("%s; the run goes on without this line of its metrics", err_message());
    m->jsonl.failed = ftruncate(m->jsonl.fd, whole_bytes) != 0;
}

static void write_step(Metrics *m, const MetricsRecord *r)
{
    char buf[1024];
    JsonOut j;
    json_out_init(&j, buf, sizeof buf);
    json_open(&j, NULL, '{');
    json_put_int(&j, "step", r->step);
    json_put_int(&j, "tokens", r->tokens);
    bool finite = json_put_number(&j, "loss", r->loss);
    finite &= json_put_number(&j, "grad_norm", r->grad_norm);
    finite &= json_put_number(&j, "lr", r->lr);
    finite &= json_put_number(&j, "step_ms", r->step_ms);
    finite &= json_put_number(&j, "tokens_per_s", r->tokens_per_s);
    finite &= json_put_number(&j, "mfu", r->mfu);
    finite &= json_put_number(&j, "tflops", r->tflops);
    json_put_int(&j, "memory_bytes", r->memory_bytes);
    json_put_bool(&j, "skipped", r->skipped);
    if (!finite) json_put_bool(&j, "nonfinite", true);
    json_close(&j, '}');
    write_line(m, &j);
}

/* ---- loss.svg ---- */

static Err write_picture(Metrics *m)
{
    SvgCurve c = { .title = m->o.title,
                   .points = m->curve.points,
                   .count = m->curve.count,
                   .dots = m->curve.dots,
                   .dot_count = m->curve.dot_count,
                   .series = m->name,
                   .series_count = m->names };
    m->picture_s = clock_s();
    return file_replace(m->svg_path, m->picture, svg_curve(&c, m->picture));
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

static void format_step(Metrics *m, const MetricsRecord *r)
{
    char a[UNITS_BYTES];
    Line l = { .text = m->text, .room = m->live ? terminal_columns() : 160, .colored = m->colored };
    m->text[0] = 0;
    if (m->o.total_steps) line_add(&l, "", "step %lld/%lld", (long long)r->step, (long long)m->o.total_steps);
    else line_add(&l, "", "step %lld", (long long)r->step);
    line_add(&l, "1;36", "loss %.4f", r->loss);
    line_add(&l, "", "lr %.2e", r->lr);
    if (r->skipped) line_add(&l, "1;31", "skipped: not finite");
    else line_add(&l, "", "grad %.3f", r->grad_norm);
    line_add(&l, "", "%.*f ms", r->step_ms < 100 ? 1 : 0, r->step_ms);
    line_add(&l, "32", "%s tok/s", units_count(a, r->tokens_per_s));
    if (r->mfu > 0) line_add(&l, "32", "MFU %.1f%%", 100 * r->mfu);
    line_add(&l, "2", "%s", units_bytes(a, r->memory_bytes));
    if (m->o.total_steps > r->step)
        line_add(&l, "2", "eta %s",
                 units_seconds(a, 1e-3 * m->mean_ms * (double)(m->o.total_steps - r->step)));
}

static void show_step(Metrics *m, const MetricsRecord *r)
{
    m->mean_ms = m->mean_ms > 0 ? 0.9 * m->mean_ms + 0.1 * r->step_ms : r->step_ms;
    bool last = r->step == m->o.total_steps;
    if (!m->live && r->step % m->o.log_every != 0 && !last) return;
    format_step(m, r);
    if (!m->live) {
        log_info("%s", m->text);
        return;
    }
    double t = clock_s();
    if (t - m->status_s < STATUS_EVERY_S && !last) return;
    m->status_s = t;
    log_status(m->text);
}

static void terminal_open(Metrics *m)
{
    const char *term = getenv("TERM"), *no_color = getenv("NO_COLOR");
    m->live = isatty(STDERR_FILENO) && term && *term && strcmp(term, "dumb") != 0;
    bool wanted = m->live && !(no_color && *no_color);
    m->colored = m->o.color == LOG_COLOR_ALWAYS || (m->o.color == LOG_COLOR_AUTO && wanted);
}

/* ---- all together ---- */

static Err open_files(Metrics *m)
{
    TRY(setup_array(&m->memory, CURVE_POINTS, &m->curve.points));
    TRY(setup_array(&m->memory, CURVE_DOTS, &m->curve.dots));
    TRY(setup_array(&m->memory, SVG_BYTES, &m->picture));
    if (!m->o.jsonl) return ERR_OK;
    TRY_AS(ERR_STORAGE, read_earlier(m));
    TRY_AS(ERR_STORAGE, file_append(m->jsonl_path, &m->jsonl));
    return ERR_OK;
}

Err metrics_open(Metrics *m, MetricsOptions o)
{
    *m = (Metrics){ .o = o, .jsonl.fd = -1, .jsonl.failed = true, .curve.stride = 1, .picture_s = clock_s() };
    ASSERT(o.log_every > 0 && o.resume_step >= 0);
    int room = PATH_MAX - 64;
    if (snprintf(m->jsonl_path, PATH_MAX, "%s/metrics.jsonl", o.run_dir) > room)
        return err_set(ERR_STORAGE, "path is too long: '%s'", o.run_dir);
    snprintf(m->svg_path, PATH_MAX, "%.*s/loss.svg", room, o.run_dir);
    setup_init(&m->memory);
    Err err = open_files(m);
    if (err) {
        setup_release(&m->memory);
        return err;
    }
    terminal_open(m);
    m->open = true;
    return ERR_OK;
}

void metrics_step(Metrics *m, const MetricsRecord *r)
{
    if (!m->open) return;
    curve_add(&m->curve, r->step, r->loss, r->skipped);
    if (m->o.jsonl) write_step(m, r);
    show_step(m, r);
    if (clock_s() - m->picture_s > PICTURE_EVERY_S && write_picture(m) != ERR_OK)
        log_warn_once("metrics: picture", "%s; the run goes on", err_message());
}

void metrics_valid(Metrics *m, int64_t step, int64_t tokens, const char *name, double loss)
{
    if (!m->open) return;
    char buf[512], shown[SVG_NAME_BYTES];
    JsonOut j;
    name_cut(shown, name);
    curve_add_dot(&m->curve, (SvgDot){ step, loss, series_of(m, shown) });
    json_out_init(&j, buf, sizeof buf);
    json_open(&j, NULL, '{');
    json_put_int(&j, "step", step);
    json_put_int(&j, "tokens", tokens);
    if (*shown) json_put_text(&j, "valid", shown);
    if (!json_put_number(&j, "valid_loss", loss)) json_put_bool(&j, "nonfinite", true);
    json_close(&j, '}');
    if (m->o.jsonl) write_line(m, &j);
    log_info("step %lld: validation loss %.4f%s%s", (long long)step, loss, *shown ? " on " : "", shown);
}

Err metrics_close(Metrics *m)
{
    if (!m->open) return ERR_OK;
    if (m->live) {
        log_status(NULL);
        if (m->text[0]) log_info("%s", m->text);
    }
    Err err = ERR_OK;
    if (m->o.jsonl) err = file_sync_close(&m->jsonl);
    if (!err && m->lost_lines > 0)
        err = err_set(ERR_STORAGE, "%lld lines of '%s' could not be written", (long long)m->lost_lines,
                      m->jsonl_path);
    if (!err) err = write_picture(m);
    setup_release(&m->memory);
    m->open = false;
    return err_as(err, ERR_STORAGE);
}
