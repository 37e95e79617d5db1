/* See history.h. */
#include "record/history.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "config/config.h"
#include "base/file.h"
#include "base/map.h"
#include "base/run_files.h"

enum { CONFIG_MAX_BYTES = 1 << 20 };

__attribute__((format(printf, 2, 3))) static void note(History *h, const char *fmt, ...)
{
    va_list args;
    if (h->note_count == HISTORY_NOTES) return;
    va_start(args, fmt);
    vsnprintf(h->notes[h->note_count++], HISTORY_NOTE_BYTES, fmt, args);
    va_end(args);
}

/* ---- metrics.jsonl ---- */

typedef struct {
    int64_t damaged, disordered;
} Left;

static void take_step(History *h, const MetricsRecord *r, Left *left)
{
    if (r->step <= h->last_step) {
        left->disordered++;
        return;
    }
    const double seconds = r->step_ms > 0 && isfinite(r->step_ms) ? 1e-3 * r->step_ms : 0;
    h->last_step = r->step;
    h->tokens = r->tokens > h->tokens ? r->tokens : h->tokens;
    h->memory_bytes = r->memory_bytes > h->memory_bytes ? r->memory_bytes : h->memory_bytes;
    h->steps++;
    if (r->skipped && h->skipped < HISTORY_SKIPPED) h->skipped_step[h->skipped] = r->step;
    h->skipped += r->skipped;
    if (isfinite(r->tokens_per_s)) {
        h->seconds += seconds;
        h->trained_tokens += seconds * r->tokens_per_s;
        h->mfu_seconds += isfinite(r->mfu) ? seconds * r->mfu : NAN;
    }
    const double values[] = { r->loss, r->grad_norm, r->lr, r->tokens_per_s, r->logits.most };
    for (int i = 0; i < HISTORY_CURVES; i++) curve_add(&h->curve[i], r->step, r->tokens, values[i], r->skipped);
}

static void take_valid(History *h, const ValidRecord *r)
{
    Curve *c = &h->curve[HISTORY_LOSS];
    const int known = c->names;
    curve_add_dot(c, r->step, r->tokens, r->loss, r->name);
    const int series = c->dots[c->dot_count - 1].series;
    HistoryValid *v = &h->valid[series];
    if (series >= known) *v = (HistoryValid){ .best = NAN };
    v->last = r->loss;
    v->last_step = r->step;
    if (isfinite(r->loss) && !(v->best <= r->loss)) v->best = r->loss, v->best_step = r->step;
}

static Err take_override(History *h, const Record *r)
{
    if (h->changes == HISTORY_CHANGES) return ERR_OK;
    HistoryChange *c = &h->change[h->changes++];
    *c = (HistoryChange){ .step = r->step.step, .tokens = h->tokens };
    TRY(setup_strdup(&h->memory, r->override.key, &c->key));
    TRY(setup_strdup(&h->memory, r->override.was, &c->was));
    return setup_strdup(&h->memory, r->override.is, &c->is);
}

static Err take_load(History *h, const MetricsRecord *r)
{
    if (!r->load || r->step != h->last_step) return ERR_OK; /* (a disordered one) */
    return load_map_add(&h->loads, &h->memory, r->step, r->load, r->layers);
}

/* Room for the counts of `rank`. */
static Err make_room(History *h, int rank)
{
    HistorySlow *more;
    int count = h->slow_count ? h->slow_count : 8;
    while (count <= rank) count *= 2;
    if (count == h->slow_count) return ERR_OK;
    TRY(setup_array(&h->memory, count, &more));
    if (h->slow_count) memcpy(more, h->slow, (size_t)h->slow_count * sizeof *more);
    h->slow = more;
    h->slow_count = count;
    return ERR_OK;
}

static Err take_ranks(History *h, const MetricsRecord *r)
{
    const MetricsRanks *m = &r->ranks;
    if (!m->measured || m->slowest >= CONFIG_RANKS_MAX || r->step != h->last_step) return ERR_OK;
    h->compared++;
    if (!(m->lag >= LAG_NOTABLE)) return ERR_OK;
    TRY(make_room(h, m->slowest));
    h->slow[m->slowest].steps++;
    h->slow[m->slowest].lag += m->lag;
    return ERR_OK;
}

static Err take_lines(History *h, const char *text, int64_t size, Left *left)
{
    Record r;
    for (int64_t at = 0, next; at < size; at = next) {
        const char *end = memchr(text + at, '\n', (size_t)(size - at));
        next = end ? end + 1 - text : size;
        if (!end) {
            note(h, "the last line of metrics.jsonl is torn: the run is going on, or was killed");
            break;
        }
        record_read(text + at, end - (text + at), &r);
        if (r.kind == RECORD_DAMAGED) left->damaged++;
        else if (r.kind == RECORD_VALID) take_valid(h, &r.valid);
        else if (r.kind == RECORD_OVERRIDE) TRY(take_override(h, &r));
        else if (r.kind == RECORD_STEP && r.step.step > 0) {
            take_step(h, &r.step, left);
            TRY(take_load(h, &r.step));
            TRY(take_ranks(h, &r.step));
        }
    }
    return ERR_OK;
}

static Err read_metrics(History *h, const char *path)
{
    FileMap map;
    Left left = { 0 };
    if (!file_exists(path)) return note(h, "metrics.jsonl is missing"), ERR_OK;
    Err err = file_map(path, &map);
    if (err == ERR_MEMORY) return err;
    if (err) return note(h, "%s", err_message()), ERR_OK;
    const Err taken = take_lines(h, map.data, map.size_bytes, &left);
    if (map_intact(&map)) note(h, "%s", err_message());
    file_unmap(&map);
    if (taken) return taken;
    if (left.damaged)
        note(h, "left out of metrics.jsonl: %lld damaged line%s", (long long)left.damaged,
             left.damaged == 1 ? "" : "s");
    if (left.disordered)
        note(h, "left out of metrics.jsonl: %lld step%s that came after a later one", (long long)left.disordered,
             left.disordered == 1 ? "" : "s");
    if (!h->steps) note(h, "metrics.jsonl holds no step");
    return ERR_OK;
}

/* ---- config.ini ---- */

static Err keep_key(History *h, const ConfigLine *line)
{
    char full[256];
    HistoryKey *k = &h->keys[h->key_count++];
    snprintf(full, sizeof full, "%s.%.*s", line->section, line->name_bytes, line->name);
    TRY(setup_strdup(&h->memory, full, &k->key));
    TRY(setup_alloc(&h->memory, line->value_bytes + 1, (void **)&k->value));
    memcpy(k->value, line->value, (size_t)line->value_bytes);
    return ERR_OK;
}

static Err keep_keys(History *h, const char *text)
{
    int count = 0;
    ConfigLine line = { 0 };
    for (const char *at = text; config_dump_next(&at, &line);) count++;
    TRY(setup_array(&h->memory, count, &h->keys));
    line = (ConfigLine){ 0 };
    for (const char *at = text; config_dump_next(&at, &line);) TRY(keep_key(h, &line));
    if (!h->key_count) note(h, "config.ini holds no key");
    return ERR_OK;
}

static Err read_config(History *h, const char *path)
{
    char *text;
    int64_t size;
    if (!file_exists(path)) return note(h, "config.ini is missing"), ERR_OK;
    Err err = file_read_all(path, CONFIG_MAX_BYTES, &text, &size);
    if (err == ERR_MEMORY) return err;
    if (err) return note(h, "%s", err_message()), ERR_OK;
    err = keep_keys(h, text);
    free(text);
    return err;
}

const char *history_key(const History *h, const char *key)
{
    for (int i = 0; i < h->key_count; i++)
        if (strcmp(h->keys[i].key, key) == 0) return h->keys[i].value;
    return NULL;
}

/* ---- both ---- */

static int64_t count_key(const History *h, const char *key)
{
    const char *value = history_key(h, key);
    return value ? strtoll(value, NULL, 10) : 0;
}

/* (a configuration's name, run.name, is that of all the runs made of it) */
static Err name_run(History *h)
{
    char path[PATH_MAX], name[PATH_MAX];
    if (!realpath(h->dir, path)) snprintf(path, sizeof path, "%s", h->dir);
    const char *slash = strrchr(path, '/');
    snprintf(name, sizeof name, "%s", slash && slash[1] ? slash + 1 : path);
    return setup_strdup(&h->memory, name, (char **)(uintptr_t)&h->name);
}

static Err read_all(History *h)
{
    char metrics[PATH_MAX], config[PATH_MAX];
    if (snprintf(metrics, sizeof metrics, "%s/" RUN_METRICS, h->dir) >= PATH_MAX)
        return err_set(ERR_CKPT, "path is too long: '%s'", h->dir);
    snprintf(config, sizeof config, "%.*s/" RUN_CONFIG, PATH_MAX - 16, h->dir);
    if (!file_exists(metrics) && !file_exists(config))
        return err_set(ERR_CKPT, "'%s' is no run folder: it has neither metrics.jsonl nor config.ini", h->dir),
               err_hint("give the run.dir of a run, runs/NAME unless the configuration says otherwise");
    for (int i = 0; i < HISTORY_CURVES; i++) TRY(curve_open(&h->curve[i], &h->memory, i == HISTORY_LOSS));
    TRY(read_config(h, config));
    TRY(read_metrics(h, metrics));
    h->planned_steps = count_key(h, "train.steps");
    h->planned_tokens = count_key(h, "train.tokens");
    return name_run(h);
}

Err history_read(const char *dir, History *h)
{
    *h = (History){ .dir = dir };
    setup_init(&h->memory);
    Err err = read_all(h);
    if (err) history_release(h);
    return err;
}

void history_release(History *h) { setup_release(&h->memory); }
