/* See prometheus.h. */
#include "record/prometheus.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/file.h"
#include "base/log.h"
#include "base/plain.h"
#include "base/words.h"

static const double EVERY_S = 5;
static const char mark[] = "megatrain_step";
enum { TEXT_BYTES = 8192, GAUGE_BYTES = 600 };

/* Writes a label's value: a backslash, a quote and an end of line have a backslash before them. */
static void escape(const char *text, char out[PROMETHEUS_RUN_BYTES])
{
    char whole[PROMETHEUS_RUN_BYTES / 2]; /* escaped, it still fits */
    size_t n = 0;
    text_cut(whole, sizeof whole, text);
    plain_make(whole, PLAIN_LINES); /* node_exporter drops a file that is not UTF-8 */
    for (text = whole; *text; text++) {
        if (*text == '\\' || *text == '"' || *text == '\n') out[n++] = '\\';
        out[n++] = *text == '\n' ? 'n' : *text;
    }
    out[n] = 0;
}

Err prometheus_open(Prometheus *p, const char *name, const char *run_dir, const char *run)
{
    *p = (Prometheus){ .valid_loss = NAN };
    if (!*name) return ERR_OK;
    const char *format = strchr(name, '/') ? "%.0s%s" : "%s/%s";
    if (snprintf(p->path, sizeof p->path, format, run_dir, name) >= PATH_MAX - 64)
        return err_set(ERR_CONFIG, "log.prometheus: path is too long: '%s'", name);
    escape(run, p->run);
    return file_check_replaces(p->path, mark);
}

typedef struct {
    char text[TEXT_BYTES];
    int used;
    const char *run;
} Page;

static void gauge(Page *g, const char *name, const char *help, double value)
{
    ASSERT(g->used + GAUGE_BYTES < TEXT_BYTES);
    char number[40];
    snprintf(number, sizeof number,
             isnan(value)   ? "NaN"
             : isinf(value) ? (value > 0 ? "+Inf" : "-Inf")
                            : "%.17g",
             value);
    g->used += snprintf(g->text + g->used, (size_t)(TEXT_BYTES - g->used),
                        "# HELP megatrain_%s %s\n# TYPE megatrain_%s gauge\nmegatrain_%s{run=\"%s\"} %s\n", name, help,
                        name, name, g->run, number);
}

static void write_page(Prometheus *p)
{
    const MetricsRecord *r = &p->last;
    Page g = { .run = p->run };
    gauge(&g, "step", "Steps done.", (double)r->step);
    gauge(&g, "tokens", "Tokens trained on.", (double)r->tokens);
    gauge(&g, "loss", "Mean loss per token of the last step, nats.", r->loss);
    gauge(&g, "valid_loss", "Last validation loss on the first set, nats.", p->valid_loss);
    gauge(&g, "grad_norm", "Norm of the gradient of the last step.", r->grad_norm);
    gauge(&g, "learning_rate", "Learning rate of the last step.", r->lr);
    gauge(&g, "step_seconds", "Time of the last step.", 1e-3 * r->step_ms);
    gauge(&g, "tokens_per_second", "Tokens per second of the last step.", r->tokens_per_s);
    gauge(&g, "mfu", "Share of the peak FLOP/s in the last step.", r->mfu);
    gauge(&g, "memory_bytes", "Peak of rank 0's device memory.", (double)r->memory_bytes);
    gauge(&g, "skipped_steps", "Steps of this start that were not finite.", (double)p->skipped);
    gauge(&g, "checkpoint_step", "Step of the newest checkpoint of this start, 0 before the first.",
          (double)p->saved_step);
    gauge(&g, "time_seconds", "When the last step ended, seconds since 1970.", r->time);
    p->written_s = clock_s();
    if (file_replace(p->path, g.text, g.used) && !p->lost) {
        log_warn("log.prometheus: %s; the run goes on", err_message());
        p->lost = true;
    }
}

void prometheus_step(Prometheus *p, const MetricsRecord *r)
{
    if (!*p->path) return;
    const bool first = !p->last.step;
    p->last = *r;
    p->skipped += r->skipped;
    if (r->save.step && !*r->save.failure) p->saved_step = r->save.step;
    if (first || clock_s() - p->written_s > EVERY_S) write_page(p);
}

void prometheus_valid(Prometheus *p, const ValidRecord *r)
{
    /* (the sets come in their order: the first one of a step counts) */
    if (!*p->path || p->valid_step == r->step) return;
    p->valid_loss = r->loss;
    p->valid_step = r->step;
}

void prometheus_close(Prometheus *p)
{
    if (*p->path && p->last.step) write_page(p);
}
