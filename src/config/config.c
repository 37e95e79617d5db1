/*
 * The table of keys, and text to values and back. config_read.c reads INI files and the command line with it,
 * config_resolve.c completes the result, config_check.c judges it; config_open.c does all that.
 */
#include "config/config.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

#include "config/config_reader.h"
#include "base/json.h"
#include "base/processors.h"
#include "base/words.h"

enum { FREE, FIXED, AUTO = CONFIG_AUTO };

static const ConfigKey keys[CFG_COUNT] = {
#define INT(s, k, start, low, high, resume, help) \
    [CFG_##s##_##k] = { #s, #k, help, NULL, CONFIG_INT, resume, false, offsetof(Config, s.k), low, high, 0, 0 },
#define AUTO_INT(s, k, start, low, high, resume, help) \
    [CFG_##s##_##k] = { #s, #k, help, NULL, CONFIG_INT, resume, true, offsetof(Config, s.k), low, high, 0, 0 },
#define DOTS(s, k, key, start, low, high, resume, help) \
    [CFG_##s##_##k] = { #s, key, help, NULL, CONFIG_INT, resume, false, offsetof(Config, s.k), low, high, 0, 0 },
#define REAL(s, k, start, low, high, resume, help) \
    [CFG_##s##_##                                  \
        k] = { #s, #k, help, NULL, CONFIG_REAL, resume, (start) == AUTO, offsetof(Config, s.k), 0, 0, low, high },
#define BOOL(s, k, start, resume, help) \
    [CFG_##s##_##k] = { #s, #k, help, NULL, CONFIG_BOOL, resume, (start) == AUTO, offsetof(Config, s.k) },
#define C(name, text) text " "
#define PICK(s, k, start, choices, resume, help) \
    [CFG_##s##_##k] = { #s, #k, help, choices, CONFIG_PICK, resume, false, offsetof(Config, s.k) },
#define WORD(s, k, key, start, choices, resume, help) \
    [CFG_##s##_##k] = { #s, key, help, choices, CONFIG_PICK, resume, false, offsetof(Config, s.k) },
#define TEXT(s, k, start, resume, help) \
    [CFG_##s##_##k] = { #s, #k, help, NULL, CONFIG_TEXT, resume, false, offsetof(Config, s.k) },
#include "config/config.def"
#undef C
};

const Config config_defaults = {
#define SECTION(s) .s = {
#define SECTION_END(s) \
    }                  \
    ,
#define INT(s, k, start, ...) .k = start,
#define REAL(s, k, start, ...) .k = start,
#define BOOL(s, k, start, ...) .k = start,
#define PICK(s, k, start, ...) .k = start,
#define TEXT(s, k, start, ...) .k = start,
#include "config/config.def"
};

const ConfigKey *config_key(ConfigId id)
{
    ASSERT((unsigned)id < CFG_COUNT);
    return &keys[id];
}

bool config_find(const char *section, const char *name, ConfigId *id)
{
    for (int i = 0; i < CFG_COUNT; i++) {
        if (strcmp(keys[i].section, section) != 0 || strcmp(keys[i].name, name) != 0) continue;
        *id = (ConfigId)i;
        return true;
    }
    return false;
}

void config_release(Config *c) { setup_release(&c->memory); }

/* ---- values as text ---- */

/* Copies the word of `words` with this index; false if there is none. */
static bool nth_word(const char *words, unsigned index, char *out, int size_bytes)
{
    for (; index && *words; words++) index -= *words == ' ';
    int n = (int)strcspn(words, " ");
    snprintf(out, (size_t)size_bytes, "%.*s", n, words);
    return n > 0;
}

const char *config_value(const Config *c, ConfigId id, char buf[CONFIG_VALUE_BYTES])
{
    const ConfigKey *key = config_key(id);
    const char *at = (const char *)c + key->offset;
    switch (key->kind) {
    case CONFIG_INT:
        if (key->has_auto && c->derived.open_micro_batch) snprintf(buf, CONFIG_VALUE_BYTES, "auto");
        else snprintf(buf, CONFIG_VALUE_BYTES, "%lld", (long long)*(const int64_t *)at);
        break;
    case CONFIG_REAL:
        if (key->has_auto && *(const double *)at == AUTO) snprintf(buf, CONFIG_VALUE_BYTES, "auto");
        else json_number_text(*(const double *)at, buf);
        break;
    case CONFIG_BOOL: {
        int value = *(const int *)at;
        snprintf(buf, CONFIG_VALUE_BYTES, "%s", value == AUTO ? "auto" : value ? "true" : "false");
        break;
    }
    case CONFIG_PICK: ASSERT(nth_word(key->choices, *(const unsigned *)at, buf, CONFIG_VALUE_BYTES)); break;
    case CONFIG_TEXT: return *(const char *const *)at;
    }
    return buf;
}

void config_origin(const Config *c, ConfigId id, char *out, int size_bytes)
{
    static const char *const names[] = { "default", "auto", "", "command line" };
    ConfigOrigin o = c->origin[id];
    if (o.kind == ORIGIN_FILE) snprintf(out, (size_t)size_bytes, "%s:%d", c->path, o.line);
    else snprintf(out, (size_t)size_bytes, "%s", names[o.kind]);
}

const char *config_text_fault(const char *text)
{
    const size_t n = strlen(text);
    if (n && (text[0] == ' ' || text[n - 1] == ' ')) return "must not begin or end with a blank";
    for (const char *p = text; *p; p++) {
        const bool is_c1 = (unsigned char)p[0] == 0xC2 && (unsigned char)p[1] >= 0x80 && (unsigned char)p[1] < 0xA0;
        if ((unsigned char)*p < ' ' || *p == 0x7F || is_c1) return "must not contain control characters";
        if (*p == ';' && (p == text || p[-1] == ' ')) return "must not contain ';' after a blank (a comment)";
    }
    return json_can_hold(text) ? NULL : "must be UTF-8";
}

bool config_seems_commented(const char *text) { return *text == '#' || strstr(text, " #"); }

/* ---- the nearest key ---- */

const char *config_nearest_section(const char *name)
{
    const char *nearest = NULL;
    int best = 3;
    for (int i = 0; i < CFG_COUNT; i++) {
        int distance = word_distance(name, keys[i].section);
        if (distance >= best) continue;
        best = distance;
        nearest = keys[i].section;
    }
    return nearest;
}

ConfigId config_nearest(const char *section, const char *name)
{
    char full[160], candidate[160];
    int best = 2 * 2 + 2;
    ConfigId nearest = CFG_COUNT;
    snprintf(full, sizeof full, "%s.%s", section, name);
    for (int i = 0; i < CFG_COUNT; i++) {
        snprintf(candidate, sizeof candidate, "%s.%s", keys[i].section, keys[i].name);
        int distance = 2 * word_distance(full, candidate);
        if (strcmp(name, keys[i].name) == 0) distance = 0;     /* the right key under a wrong section */
        if (strcmp(section, keys[i].section) != 0) distance++; /* the own section wins a tie */
        if (distance >= best) continue;
        best = distance;
        nearest = (ConfigId)i;
    }
    return nearest;
}

/* ---- for readers ---- */

void config_dump(const Config *c, FILE *out, bool origins)
{
    char buf[CONFIG_VALUE_BYTES], origin[320], line[96];
    for (int i = 0; i < CFG_COUNT; i++) {
        if (i == 0 || strcmp(keys[i].section, keys[i - 1].section) != 0)
            fprintf(out, "%s[%s]\n", i ? "\n" : "", keys[i].section);
        const char *value = config_value(c, (ConfigId)i, buf);
        if (!origins) {
            fprintf(out, "%s =%s%s%s\n", keys[i].name, *value ? " " : "", value,
                    config_seems_commented(value) ? " ;" : "");
            continue;
        }
        config_origin(c, (ConfigId)i, origin, sizeof origin);
        int n = snprintf(line, sizeof line, "%s =%s", keys[i].name, *value ? " " : "");
        fprintf(out, "%s%-*s ; %s\n", line, 36 - n, value, origin);
    }
}

bool config_dump_next(const char **at, ConfigLine *line)
{
    while (**at) {
        const char *text = *at, *end = text + strcspn(text, "\n");
        const char *equals = memchr(text, '=', (size_t)(end - text));
        *at = *end ? end + 1 : end;
        if (*text == '[') {
            snprintf(line->section, sizeof line->section, "%.*s", (int)strcspn(text + 1, "]\n"), text + 1);
        } else if (equals && equals > text) {
            const char *value = equals + (equals[1] == ' ' ? 2 : 1), *name_end = equals;
            while (name_end > text && name_end[-1] == ' ') name_end--;
            line->name = text, line->name_bytes = (int)(name_end - text);
            if (end - value > 1 && !strncmp(end - 2, " ;", 2)) end -= 2; /* behind a '#' */
            line->value = value < end ? value : end, line->value_bytes = (int)(end - line->value);
            return true;
        }
    }
    return false;
}

void config_range(ConfigId id, char *out, int size_bytes)
{
    const ConfigKey *key = &keys[id];
    char low[CONFIG_VALUE_BYTES], high[CONFIG_VALUE_BYTES];
    size_t n = (size_t)size_bytes;
    switch (key->kind) {
    case CONFIG_INT:
        snprintf(out, n, "integer, %lld to %lld%s", (long long)key->int_low, (long long)key->int_high,
                 key->has_auto ? ", or auto" : "");
        break;
    case CONFIG_REAL:
        json_number_text(key->real_low, low);
        json_number_text(key->real_high, high);
        snprintf(out, n, "number, %s to %s%s", low, high, key->has_auto ? ", or auto" : "");
        break;
    case CONFIG_BOOL: snprintf(out, n, key->has_auto ? "true, false or auto" : "true or false"); break;
    case CONFIG_PICK: snprintf(out, n, "one of: %.*s", (int)strlen(key->choices) - 1, key->choices); break;
    case CONFIG_TEXT: snprintf(out, n, "text"); break;
    }
}

const char *config_default(ConfigId id, char buf[CONFIG_VALUE_BYTES])
{
    const char *start = config_value(&config_defaults, id, buf);
    return *start ? start : "(empty)";
}

/* ---- resuming ---- */

bool config_has_dots(const Config *c)
{
    const bool bf16 = c->run.precision == RUN_PRECISION_BF16 || c->run.precision == RUN_PRECISION_FP8;
    return c->run.device == RUN_DEVICE_CPU && bf16;
}

bool config_differs(const Config *was, const Config *now, ConfigId id)
{
    char a[CONFIG_VALUE_BYTES], b[CONFIG_VALUE_BYTES];
    if (!keys[id].fixed) return false;
    /* 0 may be any size: tensors say whether it is the same */
    if (id == CFG_model_vocab && (was->model.vocab == 0 || now->model.vocab == 0)) return false;
    /* 0: the run's length, or said so */
    if (id == CFG_optim_decay_steps && was->derived.decay_steps == now->derived.decay_steps) return false;
    /* another device, or precision, has no choice */
    if (id == CFG_debug_dot && !(config_has_dots(was) && config_has_dots(now))) return false;
    /* nothing is of 8 bits */
    if ((id == CFG_run_fp8 || id == CFG_run_fp8_keep || id == CFG_run_fp8_experts) &&
        !(was->run.precision == RUN_PRECISION_FP8 && now->run.precision == RUN_PRECISION_FP8))
        return false;
    /* all is fp32 in any case */
    if ((id == CFG_run_fp32_residual || id == CFG_run_fp32_vectors || id == CFG_run_fp32_row_sums) &&
        was->run.precision == RUN_PRECISION_FP32 && now->run.precision == RUN_PRECISION_FP32)
        return false;
    /* only mixtures sum rows */
    if (id == CFG_run_fp32_row_sums && !was->moe.experts && !now->moe.experts) return false;
    return strcmp(config_value(was, id, a), config_value(now, id, b)) != 0;
}

Err config_same_run(const Config *was, const Config *now)
{
    char text[4096], a[CONFIG_VALUE_BYTES], b[CONFIG_VALUE_BYTES];
    int n = 0;
    for (int i = 0; i < CFG_COUNT; i++) {
        const ConfigId id = (ConfigId)i;
        if (now->may_differ[i] || !config_differs(was, now, id) || n >= (int)sizeof text) continue;
        n += snprintf(text + n, sizeof text - (size_t)n, "%s%s.%s was '%s' and is '%s'", n ? "; " : "", keys[i].section,
                      keys[i].name, config_value(was, id, a), config_value(now, id, b));
    }
    if (!n) return ERR_OK;
    err_set(ERR_CKPT, "the run cannot be resumed with another configuration: %s", text);
    return err_hint("restore the value, let it differ (--override KEY,KEY), or start in another run.dir (weights "
                    "alone: checkpoint.load)");
}

/* One name of --override. */
static Err let_differ(Config *c, const char *name)
{
    char section[64];
    ConfigId id;
    const char *dot = strchr(name, '.'), *key = dot ? dot + 1 : name;
    snprintf(section, sizeof section, "%.*s", dot ? (int)(dot - name) : 0, name);
    if (!config_find(section, key, &id)) {
        const ConfigId nearest = config_nearest(section, key);
        err_set(ERR_CONFIG, "--override: there is no key '%s'", name);
        if (nearest == CFG_COUNT)
            return err_hint("section.key, several parted by commas: --override optim.lr,optim.clip");
        return err_hint("did you mean '%s.%s'?", keys[nearest].section, keys[nearest].name);
    }
    if (!keys[id].fixed && id != CFG_data_train && id != CFG_data_tokenizer)
        return err_set(ERR_CONFIG, "--override: '%s' may change on resume without it", name), err_hint("leave it out");
    c->may_differ[id] = true;
    return ERR_OK;
}

Err config_let_differ(Config *c, const char *names)
{
    char name[96];
    for (const char *at = names;; at++) {
        const size_t n = strcspn(at, ",");
        snprintf(name, sizeof name, "%.*s", (int)n, at);
        TRY(let_differ(c, name));
        at += n;
        if (!*at) return ERR_OK;
    }
}
