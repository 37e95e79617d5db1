/* See record.h. */
#include "record/record.h"

#include <limits.h>
#include <math.h>
#include <stddef.h>

#include "base/words.h"

typedef enum { FIELD_INT, FIELD_REAL, FIELD_BOOL } FieldKind;

static const struct {
    const char *name, *tag;
    FieldKind kind;
    size_t offset;
} fields[RECORD_FIELDS] = {
#define ROW(type, name, tag) { #name, tag, FIELD_##type, offsetof(MetricsRecord, name) },
    RECORD_STEP_FIELDS(ROW)
#undef ROW
};

static const void *member(const MetricsRecord *r, int field) { return (const char *)r + fields[field].offset; }

const char *record_tag(int field) { return fields[field].tag; }

double record_value(const MetricsRecord *r, int field)
{
    const void *at = member(r, field);
    switch (fields[field].kind) {
    case FIELD_INT: return (double)*(const int64_t *)at;
    case FIELD_REAL: return *(const double *)at;
    case FIELD_BOOL: return *(const bool *)at;
    }
    return NAN;
}

/* ---- writing ---- */

static void put_save(JsonOut *j, const MetricsSave *s)
{
    json_put_int(j, "saved_step", s->step);
    json_put_bool(j, "saved", !*s->failure);
    json_put_number(j, "save_stall_ms", s->stall_ms);
    json_put_number(j, "save_ms", s->save_ms);
    if (*s->failure) json_put_text(j, "save_failure", s->failure);
}

static void put_bubble(JsonOut *j, const MetricsBubble *b)
{
    json_put_number(j, "bubble", b->bubble);
    json_put_number(j, "bubble_simulated", b->bubble_simulated);
}

static void put_numbers(JsonOut *j, const char *name, const double *value, int count)
{
    json_open(j, name, '[');
    for (int i = 0; i < count; i++) json_put_number(j, NULL, value[i]);
    json_close(j, ']');
}

static void put_ranks(JsonOut *j, const MetricsRanks *r)
{
    json_put_int(j, "slowest_rank", r->slowest);
    json_put_number(j, "lag_ms", r->lag_ms);
    json_put_number(j, "lag", r->lag);
    put_numbers(j, "compute_ms", r->compute_ms, 3);
    put_numbers(j, "wait_ms", r->wait_ms, 3);
}

static bool put_mtp(JsonOut *j, const MetricsRecord *r)
{
    bool finite = true;
    json_open(j, "mtp_loss", '[');
    for (int i = 0; i < r->mtp; i++) finite &= json_put_number(j, NULL, r->mtp_loss[i]);
    json_close(j, ']');
    return finite;
}

static bool put_logits(JsonOut *j, const MetricsRecord *r)
{
    const MetricsLogits *l = &r->logits;
    const bool finite = json_put_number(j, "max_attention_logit", l->most);
    json_put_int(j, "max_attention_logit_layer", l->layer);
    json_put_int(j, "max_attention_logit_head", l->head);
    put_numbers(j, "max_attention_logits", l->by_layer, r->layers);
    return finite;
}

/* Writes the load of each layer that is a mixture, in their order. */
static void put_load(JsonOut *j, const MetricsRecord *r)
{
    json_open(j, "expert_load", '[');
    for (int i = 0; i < r->layers; i++)
        if (r->load[i] > 0) json_put_number(j, NULL, r->load[i]);
    json_close(j, ']');
    if (!r->dropped) return;
    json_open(j, "expert_dropped", '[');
    for (int i = 0; i < r->layers; i++)
        if (r->load[i] > 0) json_put_int(j, NULL, r->dropped[i]);
    json_close(j, ']');
}

void record_put_step(JsonOut *j, const MetricsRecord *r)
{
    bool finite = true;
    json_open(j, NULL, '{');
    for (int i = 0; i < RECORD_FIELDS; i++) {
        const void *at = member(r, i);
        const char *name = fields[i].name;
        if (fields[i].kind == FIELD_INT) json_put_int(j, name, *(const int64_t *)at);
        else if (fields[i].kind == FIELD_BOOL) json_put_bool(j, name, *(const bool *)at);
        else finite &= json_put_number(j, name, *(const double *)at);
    }
    if (r->mtp) finite &= put_mtp(j, r);
    if (r->aux_loss) finite &= json_put_number(j, "aux_loss", *r->aux_loss);
    if (r->z_loss) finite &= json_put_number(j, "z_loss", *r->z_loss);
    if (r->logits.by_layer) finite &= put_logits(j, r);
    if (!finite) json_put_bool(j, "nonfinite", true);
    if (r->save.step) put_save(j, &r->save);
    if (r->bubble.measured) put_bubble(j, &r->bubble);
    if (r->ranks.measured) put_ranks(j, &r->ranks);
    if (r->load) put_load(j, r);
    json_close(j, '}');
}

void record_put_valid(JsonOut *j, const ValidRecord *v)
{
    json_open(j, NULL, '{');
    json_put_int(j, "step", v->step);
    json_put_int(j, "tokens", v->tokens);
    if (*v->name) json_put_text(j, "valid", v->name);
    if (!json_put_number(j, "valid_loss", v->loss)) json_put_bool(j, "nonfinite", true);
    json_put_number(j, "time", v->time);
    json_close(j, '}');
}

void record_put_task(JsonOut *j, const TaskRecord *t)
{
    json_open(j, NULL, '{');
    json_put_int(j, "step", t->step);
    json_put_int(j, "tokens", t->tokens);
    json_put_text(j, "task", t->name);
    json_put_int(j, "questions", t->questions);
    for (int i = 0; i < t->metrics; i++) {
        char name[64];
        json_put_number(j, t->metric[i], t->mean[i]);
        snprintf(name, sizeof name, "%s_error", t->metric[i]);
        json_put_number(j, name, t->error[i]);
    }
    json_put_number(j, "time", t->time);
    json_close(j, '}');
}

void record_put_override(JsonOut *j, const OverrideRecord *r)
{
    char key[RECORD_KEY_BYTES], text[RECORD_VALUE_BYTES];
    snprintf(key, sizeof key, "%s.%s", r->section, r->key);
    json_open(j, NULL, '{');
    json_put_int(j, "step", r->step);
    json_put_text(j, "override", key);
    text_cut(text, sizeof text, r->was);
    json_put_text(j, "was", text);
    text_cut(text, sizeof text, r->is);
    json_put_text(j, "is", text);
    json_put_number(j, "time", r->time);
    json_close(j, '}');
}

void record_put_restart(JsonOut *j, const RestartRecord *r)
{
    char text[RECORD_VALUE_BYTES];
    text_cut(text, sizeof text, r->cause);
    json_open(j, NULL, '{');
    json_put_int(j, "step", r->step);
    json_put_int(j, "restart", r->restart);
    json_put_text(j, "cause", text);
    json_put_int(j, "lost_steps", r->lost);
    json_put_number(j, "restart_s", r->seconds);
    json_put_number(j, "time", r->time);
    json_close(j, '}');
}

/* ---- reading ---- */

static void read_step(const Json *j, MetricsRecord *r)
{
    for (int i = 0; i < RECORD_FIELDS; i++) {
        const Json *value = json_get(j, fields[i].name);
        void *at = (char *)r + fields[i].offset;
        if (fields[i].kind == FIELD_INT) *(int64_t *)at = json_int(value, 0);
        else if (fields[i].kind == FIELD_BOOL) *(bool *)at = json_is_true(value);
        else *(double *)at = json_number(value, NAN);
    }
    r->logits.most = json_number(json_get(j, "max_attention_logit"), NAN);
}

static void read_ranks(const Json *j, MetricsRanks *r)
{
    const int64_t rank = json_int(json_get(j, "slowest_rank"), -1);
    r->lag_ms = json_number(json_get(j, "lag_ms"), NAN);
    r->lag = json_number(json_get(j, "lag"), NAN);
    r->measured = rank >= 0 && rank <= INT_MAX && r->lag_ms >= 0 && r->lag >= 0;
    r->slowest = r->measured ? (int)rank : 0;
}

/* A damaged list counts as none. */
static void read_load(const Json *j, Record *out)
{
    const Json *list = json_get(j, "expert_load");
    const int n = (int)json_count(list);
    if (n > LAYERS_MAX) return;
    for (int i = 0; i < n; i++) {
        out->load[i] = json_number(json_at(list, i), NAN);
        if (!(out->load[i] >= 1 && out->load[i] <= 1e9)) return;
    }
    out->step.load = n ? out->load : NULL;
    out->step.layers = n;
}

/* No evaluation, then no name, unless valid_loss is a number or null. */
static bool read_valid(const Json *j, ValidRecord *v)
{
    const Json *loss = json_get(j, "valid_loss");
    const char *name = json_text(json_get(j, "valid"), NULL);
    if (!json_is_number(loss) && !json_is_null(loss)) return false;
    v->step = json_int(json_get(j, "step"), 0);
    v->tokens = json_int(json_get(j, "tokens"), 0);
    v->loss = json_number(loss, NAN);
    v->time = json_number(json_get(j, "time"), NAN);
    curve_cut_name(v->name, name ? name : "");
    return true;
}

static bool read_override(const Json *j, Record *out)
{
    const char *key = json_text(json_get(j, "override"), NULL);
    const char *was = json_text(json_get(j, "was"), NULL), *is = json_text(json_get(j, "is"), NULL);
    if (!key || !was || !is) return false;
    text_cut(out->override.key, sizeof out->override.key, key);
    text_cut(out->override.was, sizeof out->override.was, was);
    text_cut(out->override.is, sizeof out->override.is, is);
    return true;
}

void record_read(const char *line, int64_t size_bytes, Record *out)
{
    Json *j;
    *out = (Record){ .kind = RECORD_DAMAGED };
    if (json_parse("metrics.jsonl", line, size_bytes, &j) == ERR_OK && json_is_int(json_get(j, "step")) &&
        json_int(json_get(j, "step"), 0) >= 0) {
        read_step(j, &out->step);
        read_ranks(j, &out->step.ranks);
        read_load(j, out);
        out->kind = read_valid(j, &out->valid) ? RECORD_VALID
                    : json_get(j, "loss")      ? RECORD_STEP
                    : read_override(j, out)    ? RECORD_OVERRIDE
                                               : RECORD_OTHER;
    }
    json_free(j);
}
