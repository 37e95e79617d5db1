/*
 * See report.h. In here: style and script of the page, its tables, the page. Pictures: report_chart.c, report_loads.c.
 */
#include "record/report.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/svg.h"
#include "base/units.h"
#include "base/version.h"
#include "record/report_pictures.h"

static const char colors[] = ":root{color-scheme:light dark;--ink:" SVG_INK ";--dim:" SVG_DIM ";--paper:" SVG_PAPER
                             ";--line:" SVG_GRID ";--soft:" SVG_SOFT ";--c0:" SVG_C0 ";--c1:" SVG_C1 ";--c2:" SVG_C2
                             ";--c3:" SVG_C3 ";--c4:" SVG_C4 ";--c5:" SVG_C5 "}";

static const char style[] =
    "*{box-sizing:border-box}body{margin:0 auto;padding:1.5rem "
    "clamp(.75rem,3vw,2.5rem);max-width:90rem;"
    "font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper)}\n"
    "h1{font-size:1.5rem;line-height:1.25;margin:0 0 .25rem;overflow-wrap:anywhere}"
    "h2{font-size:1.1rem;margin:2rem 0 .5rem}p{margin:.25rem 0}.dim,footer{color:var(--dim)}"
    "footer{margin-top:2rem;font-size:.85rem}\n"
    ".scroll{overflow-x:auto}.scroll:focus-visible{outline:2px solid var(--c0)}"
    "table{border-collapse:collapse;font-variant-numeric:tabular-nums}"
    "caption{text-align:left;color:var(--dim);padding-bottom:.25rem}"
    "th,td{padding:.3rem .75rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top;"
    "overflow-wrap:anywhere;min-width:7.5rem;max-width:24rem}"
    "thead th{background:var(--soft)}thead .key{display:block;margin-top:.35rem}tbody "
    "th{font-weight:400;color:var(--dim);min-width:9rem}"
    "th small{display:block;font-weight:400;color:var(--dim)}td small{color:var(--dim)}"
    "code{font:.9em ui-monospace,monospace;white-space:nowrap}\n"
    ".legend{list-style:none;display:flex;flex-wrap:wrap;gap:.25rem 1.25rem;padding:0;margin:.5rem 0}"
    ".legend li,thead "
    "th{overflow-wrap:anywhere}.key{width:30px;height:12px;vertical-align:middle;margin-right:.4rem}\n"
    ".charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,30rem),1fr));gap:1rem 1.5rem}"
    "figure{margin:0;min-width:0}figcaption{font-weight:600}figure svg{width:100%;height:auto;display:block}"
    ".read{min-height:1.5em;font-size:.85rem;color:var(--dim);font-variant-numeric:tabular-nums}\n"
    "svg text{font:12px system-ui,sans-serif;fill:var(--dim)}.e{text-anchor:end}.m{text-anchor:middle}"
    "svg path{fill:none}.map rect{fill:var(--c1)}.grid{stroke:var(--line)}.line,.raw,.key "
    "path{stroke:var(--c);stroke-linejoin:round;"
    "stroke-linecap:round}.line,.key path{stroke-width:2}.raw{opacity:.25}svg .mark{fill:var(--c)}"
    ".skip{stroke:var(--c);stroke-width:2}.cursor{stroke:var(--dim)}"
    ".change{stroke:var(--c);stroke-dasharray:3 3}\n"
    ".c0{--c:var(--c0)}.c1{--c:var(--c1)}.c2{--c:var(--c2)}.c3{--c:var(--c3)}.c4{--c:var(--c4)}.c5{--c:var(--"
    "c5)}"
    ".line.k1,.key .k1{stroke-dasharray:8 4}.line.k2,.key .k2{stroke-dasharray:2 4}"
    ".line.k3,.key .k3{stroke-dasharray:9 4 2 4}\n"
    "@media(max-width:36rem){svg text{font-size:17px}}\n"
    "@media print{.read{display:none}figure,tr{break-inside:avoid}}\n";

/* Values under the mouse, from the lines themselves: they are in the box's units. 1e6 is SVG_FAR. */
static const char script[] =
    "const names=[...document.querySelectorAll('.legend li')].map(e=>e.textContent.trim());\n"
    "for(const f of document.querySelectorAll('figure:not(.map)')){const "
    "s=f.querySelector('svg'),r=f.querySelector('.read'),"
    "cursor=f.querySelector('.cursor'),[l,t,e,b]=s.dataset.box.split(' ').map(Number),"
    "[last,low,high]=s.dataset.axes.split(' ').map(Number),lines=[...f.querySelectorAll('.line')].map(p=>{"
    "const n=(p.getAttribute('d').match(/-?[\\d.]+ -?[\\d.]+/g)||[]).map(q=>q.split(' ').map(Number));"
    "return{run:+p.dataset.run,n}});\n"
    "s.addEventListener('pointermove',ev=>{const m=s.getBoundingClientRect(),"
    "x=Math.min(e,Math.max(l,(ev.clientX-m.left)/m.width*s.viewBox.baseVal.width));\n"
    "cursor.setAttribute('d','M'+x+' '+t+'V'+b);const at=Math.round((x-l)/(e-l)*last);\n"
    "r.textContent=at.toLocaleString('en')+': '+lines.filter(p=>p.n.length).map(p=>{"
    "const q=p.n.reduce((a,c)=>Math.abs(c[0]-x)<Math.abs(a[0]-x)?c:a);"
    "return Math.abs(q[0]-x)>(e-l)/12?names[p.run]+' none':names[p.run]+' '+"
    "(Math.abs(q[1])<1e6?(high-(q[1]-t)/(b-t)*(high-low)).toPrecision(4):'far outside')}).join(' \\u00b7 "
    "')});\n"
    "s.addEventListener('pointerleave',()=>{cursor.setAttribute('d','');r.textContent=''})}\n";

/* A sample of the run's line, and its name. */
static void put_name(const char *name, int run, FILE *out)
{
    fprintf(out, "<svg class=\"key\" viewBox=\"0 0 30 12\" aria-hidden=\"true\"><path class=\"");
    report_look(out, run);
    svg_text(out, "\" d=\"M2 6h26\"/></svg>", name, "");
}

/* ---- tables ---- */

typedef struct {
    const History *runs;
    int count;
    FILE *out;
    int *charts; /* so far */
} Page;

static void open_table(const Page *p, const char *label, const char *caption)
{
    fprintf(p->out,
            "<div class=\"scroll\" tabindex=\"0\" role=\"region\" "
            "aria-label=\"%s\"><table><caption>%s</caption>\n"
            "<thead><tr><td></td>",
            label, caption);
    for (int i = 0; i < p->count; i++) {
        fprintf(p->out, "<th scope=\"col\">");
        put_name(p->runs[i].name, i, p->out);
        svg_text(p->out, "<small>", p->runs[i].dir, "</small></th>");
    }
    fprintf(p->out, "</tr></thead>\n<tbody>\n");
}

static void close_table(const Page *p) { fprintf(p->out, "</tbody></table></div>\n"); }

static void put_loss(FILE *out, double loss)
{
    if (isfinite(loss)) fprintf(out, "%.4f", loss);
    else fprintf(out, "not finite");
}

/* A value that a row shows of a run. */
typedef enum {
    ROW_STEPS,
    ROW_TOKENS,
    ROW_LOSS,
    ROW_SPEED,
    ROW_STEP_TIME,
    ROW_MFU,
    ROW_MEMORY,
    ROW_TIME,
    ROW_SKIPPED,
    ROW_SLOW,
    ROWS
} Row;

static void put_skipped(const History *h, FILE *out)
{
    if (!h->skipped) fprintf(out, "none");
    else fprintf(out, "%lld <small>(step", (long long)h->skipped);
    for (int i = 0; i < HISTORY_SKIPPED && i < h->skipped; i++)
        fprintf(out, "%s %lld", i ? "," : h->skipped > 1 ? "s" : "", (long long)h->skipped_step[i]);
    if (h->skipped) fprintf(out, "%s)</small>", h->skipped > HISTORY_SKIPPED ? ", ..." : "");
}

/* The rank that was slowest by far in the most steps. */
static void put_slow(const History *h, FILE *out)
{
    int most = 0;
    for (int r = 1; r < h->slow_count; r++)
        if (h->slow[r].steps > h->slow[most].steps) most = r;
    if (!h->slow_count || !h->slow[most].steps) fprintf(out, "none");
    else
        fprintf(out, "rank %d in %lld of %lld <small>(by %.0f %% on average)</small>", most,
                (long long)h->slow[most].steps, (long long)h->compared,
                100 * h->slow[most].lag / (double)h->slow[most].steps);
}

static void put_cell(const History *h, Row row, FILE *out)
{
    char text[UNITS_BYTES];
    const Curve *c = &h->curve[HISTORY_LOSS];
    double loss = NAN;
    switch (row) {
    case ROW_STEPS:
        fprintf(out, "%lld", (long long)h->last_step);
        if (h->planned_steps >= h->last_step) fprintf(out, " of %lld", (long long)h->planned_steps);
        else if (h->planned_steps > 0)
            fprintf(out, " <small>(train.steps of the last start: %lld)</small>", (long long)h->planned_steps);
        break;
    case ROW_TOKENS:
        fputs(units_count(text, (double)h->tokens), out);
        if (h->planned_tokens > 0) fprintf(out, " of %s", units_count(text, (double)h->planned_tokens));
        break;
    case ROW_LOSS:
        if (c->count) curve_smooth(c, c->count - 1, &loss);
        put_loss(out, loss);
        break;
    case ROW_SPEED: fputs(units_count(text, h->trained_tokens / h->seconds), out); break;
    case ROW_STEP_TIME: fprintf(out, "%.4g ms", 1e3 * h->seconds / (double)h->steps); break;
    case ROW_MFU: fprintf(out, "%.1f %%", 100 * h->mfu_seconds / h->seconds); break;
    case ROW_MEMORY: fputs(units_bytes(text, h->memory_bytes), out); break;
    case ROW_TIME: fputs(units_seconds(text, h->seconds), out); break;
    case ROW_SKIPPED: put_skipped(h, out); break;
    case ROW_SLOW: put_slow(h, out); break;
    case ROWS: break;
    }
}

/* Rows but the first two need steps; those from speed to mfu need times, too. */
static bool has_cell(const History *h, Row row)
{
    if (row >= ROW_SPEED && row <= ROW_MFU && !(h->seconds > 0)) return false;
    if (row == ROW_SLOW) return h->compared > 0;
    return h->steps > 0 && !(row == ROW_MFU && !isfinite(h->mfu_seconds));
}

static int series_of(const History *h, const char *set)
{
    const Curve *c = &h->curve[HISTORY_LOSS];
    for (int i = 0; i < c->names; i++)
        if (strcmp(c->name[i], set) == 0) return i;
    return -1;
}

static void put_valid_row(const Page *p, const char *set, bool best)
{
    fprintf(p->out, "<tr><th scope=\"row\">validation loss");
    svg_text(p->out, *set ? " on " : "", set, best ? ", best</th>" : ", last</th>");
    for (int i = 0; i < p->count; i++) {
        const int series = series_of(&p->runs[i], set);
        const HistoryValid *v = &p->runs[i].valid[series < 0 ? 0 : series];
        fprintf(p->out, "<td>");
        if (series < 0) fprintf(p->out, "none");
        else {
            put_loss(p->out, best ? v->best : v->last);
            if (!best || isfinite(v->best))
                fprintf(p->out, " <small>(step %lld)</small>", (long long)(best ? v->best_step : v->last_step));
        }
        fprintf(p->out, "</td>");
    }
    fprintf(p->out, "</tr>\n");
}

/* Calls f for every validation set of any run, in the order they are met. */
static void each_set(const Page *p, void (*f)(const Page *p, const char *set))
{
    for (int i = 0; i < p->count; i++) {
        const Curve *c = &p->runs[i].curve[HISTORY_LOSS];
        for (int s = 0; s < c->names; s++) {
            bool seen = false;
            for (int k = 0; k < i && !seen; k++) seen = series_of(&p->runs[k], c->name[s]) >= 0;
            if (!seen) f(p, c->name[s]);
        }
    }
}

static void put_valid_rows(const Page *p, const char *set)
{
    put_valid_row(p, set, false);
    put_valid_row(p, set, true);
}

/* Had any run several ranks? */
static bool any_compared(const Page *p)
{
    bool any = false;
    for (int i = 0; i < p->count; i++) any |= p->runs[i].compared > 0;
    return any;
}

static bool any_changed(const Page *p)
{
    bool any = false;
    for (int i = 0; i < p->count; i++) any |= p->runs[i].changes > 0;
    return any;
}

/* Keys that --override changed: the last start's value alone would be wrong for the steps before. */
static void put_changes(const Page *p)
{
    if (!any_changed(p)) return;
    fprintf(p->out, "<tr><th scope=\"row\">changed on the way</th>");
    for (int i = 0; i < p->count; i++) {
        const History *h = &p->runs[i];
        fprintf(p->out, h->changes ? "<td>" : "<td>nothing");
        for (int k = 0; k < h->changes; k++) {
            svg_text(p->out, k ? "<br><code>" : "<code>", h->change[k].key, "</code> ");
            svg_text(p->out, "", *h->change[k].was ? h->change[k].was : "(empty)", " to ");
            svg_text(p->out, "", *h->change[k].is ? h->change[k].is : "(empty)", "");
            fprintf(p->out, " <small>(from step %lld on)</small>", (long long)h->change[k].step);
        }
        if (h->changes == HISTORY_CHANGES) fprintf(p->out, "<br>and perhaps more");
        fprintf(p->out, "</td>");
    }
    fprintf(p->out, "</tr>\n");
}

static void put_figures(const Page *p)
{
    static const char *const names[ROWS] = { "steps",
                                             "tokens",
                                             "training loss at the end, smoothed",
                                             "tokens a second, mean",
                                             "step, mean",
                                             "model FLOP utilisation, mean",
                                             "memory of a device, peak",
                                             "time in steps",
                                             "skipped steps",
                                             "steps with a rank that was slow by 20 % or more" };
    fprintf(p->out, "<h2>Figures</h2>\n");
    open_table(p, "Figures", "Losses in nats per token.");
    for (int row = 0; row < ROWS; row++) {
        if (row == ROW_SPEED) each_set(p, put_valid_rows);
        if (row == ROW_SLOW && !any_compared(p)) continue;
        fprintf(p->out, "<tr><th scope=\"row\">%s</th>", names[row]);
        for (int i = 0; i < p->count; i++) {
            fprintf(p->out, "<td>");
            if (has_cell(&p->runs[i], (Row)row)) put_cell(&p->runs[i], (Row)row, p->out);
            else fprintf(p->out, "not known");
            fprintf(p->out, "</td>");
        }
        fprintf(p->out, "</tr>\n");
    }
    put_changes(p);
    close_table(p);
}

/* The smoothed loss at a step; NaN where the run has none. */
static double loss_at(const History *h, int64_t step)
{
    const Curve *c = &h->curve[HISTORY_LOSS];
    double loss = NAN;
    int i = 0;
    while (i < c->count && c->points[i].step < step) i++;
    return i < c->count && curve_smooth(c, i, &loss) ? loss : NAN;
}

static void put_way(const Page *p)
{
    enum { ROWS_WANTED = 8 };
    int64_t last = 0;
    for (int i = 0; i < p->count; i++) last = p->runs[i].last_step > last ? p->runs[i].last_step : last;
    if (last < ROWS_WANTED) return;
    fprintf(p->out, "<h2>Losses on the way</h2>\n");
    open_table(p, "Losses on the way", "Training loss, smoothed as in the picture.");
    for (int k = 1; k <= ROWS_WANTED; k++) {
        const int64_t step = last / ROWS_WANTED * k + last % ROWS_WANTED * k / ROWS_WANTED;
        fprintf(p->out, "<tr><th scope=\"row\">step %lld</th>", (long long)step);
        for (int i = 0; i < p->count; i++) {
            const double loss = loss_at(&p->runs[i], step);
            fprintf(p->out, "<td>");
            if (isfinite(loss)) fprintf(p->out, "%.4f", loss);
            else fprintf(p->out, "%s", step > p->runs[i].last_step ? "not reached" : "not finite");
            fprintf(p->out, "</td>");
        }
        fprintf(p->out, "</tr>\n");
    }
    close_table(p);
}

/* ---- configurations ---- */

/* Between run i, which has the key, and any other; runs whose configuration could not be read do not count. */
static bool differs(const Page *p, int i, const char *key)
{
    const char *mine = history_key(&p->runs[i], key);
    for (int k = 0; k < p->count; k++) {
        const char *other = history_key(&p->runs[k], key);
        if (p->runs[k].key_count && (!other || strcmp(mine, other) != 0)) return true;
    }
    return false;
}

/* Keys of run i that no run before it has. */
static bool met_before(const Page *p, int i, const char *key)
{
    for (int k = 0; k < i; k++)
        if (history_key(&p->runs[k], key)) return true;
    return false;
}

static void put_key_row(const Page *p, const char *key)
{
    svg_text(p->out, "<tr><th scope=\"row\"><code>", key, "</code></th>");
    for (int i = 0; i < p->count; i++) {
        const char *value = history_key(&p->runs[i], key);
        fprintf(p->out, "<td>");
        if (value && *value) svg_text(p->out, "", value, "");
        else fprintf(p->out, "<small>%s</small>", value ? "empty" : p->runs[i].key_count ? "not there" : "not known");
        fprintf(p->out, "</td>");
    }
    fprintf(p->out, "</tr>\n");
}

/* All keys of the only run, folded away. */
static void put_configuration(const Page *p)
{
    const History *h = &p->runs[0];
    if (!h->key_count) return;
    fprintf(p->out, "<h2>Configuration</h2>\n<details><summary>all keys</summary>\n");
    open_table(p, "Configuration", "As resolved at the last start.");
    for (int k = 0; k < h->key_count; k++) put_key_row(p, h->keys[k].key);
    close_table(p);
    fprintf(p->out, "</details>\n");
}

static void put_differences(const Page *p)
{
    int rows = 0;
    if (p->count == 1) {
        put_configuration(p);
        return;
    }
    fprintf(p->out, "<h2>Configurations</h2>\n");
    for (int i = 0; i < p->count; i++)
        for (int k = 0; k < p->runs[i].key_count; k++) {
            const char *key = p->runs[i].keys[k].key;
            if (!strcmp(key, "run.dir") || !strcmp(key, "run.name")) continue;
            if (met_before(p, i, key) || !differs(p, i, key)) continue;
            if (rows++ == 0) open_table(p, "Configurations", "Keys that differ, besides run.dir and run.name.");
            put_key_row(p, key);
        }
    if (rows) close_table(p);
    else fprintf(p->out, "<p>No key differs, besides run.dir and run.name.</p>\n");
}

/* ---- pictures ---- */

static void put_chart(const Page *p, const ReportChart *c) { report_chart(c, p->runs, p->count, ++*p->charts, p->out); }

static void put_valid_charts(const Page *p, const char *set)
{
    ReportChart c = { .title = "Validation loss", .curve = HISTORY_LOSS, .set = set };
    for (int tokens = 0; tokens < 2; tokens++) {
        c.by_tokens = tokens;
        put_chart(p, &c);
    }
}

static void put_charts(const Page *p)
{
    static const ReportChart losses[] = {
        { .title = "Training loss", .curve = HISTORY_LOSS, .mark_skipped = true },
        { .title = "Training loss", .curve = HISTORY_LOSS, .mark_skipped = true, .by_tokens = true },
    };
    static const ReportChart others[] = {
        { .title = "Tokens a second", .curve = HISTORY_SPEED, .from_zero = true },
        { .title = "Norm of the gradient", .curve = HISTORY_GRAD_NORM, .from_zero = true, .mark_skipped = true },
        { .title = "Learning rate", .curve = HISTORY_LR, .from_zero = true, .is_set = true },
        { .title = "Largest logit of attention", .curve = HISTORY_LOGIT },
    };
    fprintf(p->out, "<h2>Curves</h2>\n<ul class=\"legend\">");
    for (int i = 0; i < p->count; i++) {
        fprintf(p->out, "<li>");
        put_name(report_name(p->runs, p->count, i), i, p->out);
        fprintf(p->out, "</li>");
    }
    fprintf(p->out,
            "</ul>\n<p class=\"dim\">Lines are smoothed, but learning rates; each step, or the mean of some, "
            "is behind them where "
            "there are few runs. Ticks on the lower edge are skipped steps; a dashed upright line is a key that "
            "--override changed. Losses of the first 5%% of the steps may lie above a picture.</p>\n<div "
            "class=\"charts\">\n");
    for (int i = 0; i < 2; i++) put_chart(p, &losses[i]);
    each_set(p, put_valid_charts);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) put_chart(p, &others[i]);
    for (int i = 0; i < p->count; i++) report_loads(p->runs, p->count, i, ++*p->charts, p->out);
    fprintf(p->out, "</div>\n");
}

/* ---- the page ---- */

static void put_notes(const Page *p)
{
    int notes = 0;
    for (int i = 0; i < p->count; i++)
        for (int k = 0; k < p->runs[i].note_count; k++) {
            svg_text(p->out, notes++ ? "<li>" : "<h2>Not read whole</h2>\n<ul><li>", p->runs[i].dir, ": ");
            svg_text(p->out, "", p->runs[i].notes[k], "</li>\n");
        }
    if (notes) fprintf(p->out, "</ul>\n");
}

static void put_title(const Page *p)
{
    if (p->count > 1) fprintf(p->out, "%d runs", p->count);
    else svg_text(p->out, "Run ", p->runs[0].name, "");
}

void report_write(const History *runs, int count, FILE *out)
{
    int charts = 0;
    const Page p = { runs, count, out, &charts };
    const time_t now = time(NULL);
    char date[32];
    strftime(date, sizeof date, "%Y-%m-%d %H:%M UTC", gmtime(&now));
    fprintf(out, "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\n"
                 "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
                 "'unsafe-inline'; script-src 'unsafe-inline'\">\n"
                 "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>");
    put_title(&p);
    fprintf(out, "</title>\n<style>\n");
    svg_rules(out, colors);
    fprintf(out, "%s</style></head>\n<body>\n<main>\n<h1>", style);
    put_title(&p);
    fprintf(out, "</h1>\n<p class=\"dim\">As of %s</p>\n", date);
    put_notes(&p);
    put_charts(&p);
    put_figures(&p);
    put_way(&p);
    put_differences(&p);
    fprintf(out, "</main>\n<footer>megatrain %s, report</footer>\n<script>\n%s</script>\n</body></html>\n",
            MEGATRAIN_VERSION, script);
}
