/* The report of a configuration's mistakes, and the rules whose breaking is one. */
#include <stdarg.h>
#include <string.h>

#include "config/config_reader.h"

bool config_report_is_full(const ConfigReader *r) { return CONFIG_REPORT_BYTES - r->report_used < 2; }

void config_complain(ConfigReader *r, const char *fmt, ...)
{
    r->mistakes++;
    int64_t room = CONFIG_REPORT_BYTES - r->report_used;
    if (config_report_is_full(r)) return;
    va_list args;
    va_start(args, fmt);
    int n = vsnprintf(r->report + r->report_used, (size_t)(room - 1), fmt, args);
    va_end(args);
    r->report_used += n < room - 1 ? n : room - 2;
    r->report[r->report_used++] = '\n';
    r->report[r->report_used] = 0;
}

const char *config_keep(ConfigReader *r, const char *fmt, ...)
{
    va_list args, again;
    char *text = NULL;
    va_start(args, fmt);
    va_copy(again, args);
    const int n = vsnprintf(NULL, 0, fmt, args);
    if (n < 0 || setup_array(&r->config->memory, n + 1, &text)) r->memory = ERR_MEMORY;
    else vsnprintf(text, (size_t)n + 1, fmt, again);
    va_end(again);
    va_end(args);
    return text ? text : "";
}

/* "section.key = 'value'", behind what stands in `out`. */
static void add_key(const Config *c, ConfigId id, char *out, int size_bytes)
{
    char buf[CONFIG_VALUE_BYTES];
    const ConfigKey *key = config_key(id);
    int n = (int)strlen(out);
    snprintf(out + n, (size_t)(size_bytes - n), "%s.%s = '%s'", key->section, key->name, config_value(c, id, buf));
}

/* Complains unless `holds`. The report starts with the place of the first of the keys that was given. */
void config_check_rule(ConfigReader *r, bool holds, const char *text, ConfigKeys keys)
{
    const Config *c = r->config;
    const ConfigId *ids = keys.ids;
    char place[512], list[768] = "";
    int first = 0;
    r->holds = true;
    for (int i = 0; i < keys.count; i++)
        if (r->bad[ids[i]]) return;
    if (holds) return;
    r->holds = false;
    r->ways = 0;
    if (r->broken_count < CONFIG_BROKEN) r->broken[r->broken_count] = (ConfigRule){ keys.function, keys.line, ids[0] };
    r->broken_count++;
    for (int i = 0; i < keys.count; i++) r->doubtful[ids[i]] = true;
    while (first < keys.count && c->origin[ids[first]].kind < ORIGIN_FILE) first++;
    if (first == keys.count) first = 0;
    config_origin(c, ids[first], place, sizeof place);
    add_key(c, ids[first], list, sizeof list);
    for (int i = 0, named = 0; i < keys.count; i++) {
        if (i == first) continue;
        strncat(list, named++ ? ", " : " with ", sizeof list - strlen(list) - 1);
        add_key(c, ids[i], list, sizeof list);
    }
    config_complain(r, "%s: %s: %s", place, list, text);
}
