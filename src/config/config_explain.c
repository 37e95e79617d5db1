/* Meanings of keys, for who asks: megatrain config. */
#include <string.h>

#include "config/config_reader.h"

static void explain_one(const Config *c, ConfigId id, FILE *out)
{
    const ConfigKey *key = config_key(id);
    char buf[CONFIG_VALUE_BYTES], range[256], origin[320];
    config_origin(c, id, origin, sizeof origin);
    fprintf(out, "%s.%s = %s    (%s)\n", key->section, key->name, config_value(c, id, buf), origin);
    config_range(id, range, sizeof range);
    fprintf(out, "    %s; default: %s; %s on resume\n    %s\n", range, config_default(id, buf),
            key->fixed ? "fixed" : "may change", key->meaning);
}

Err config_explain(const Config *c, const char *key, FILE *out)
{
    char full[160];
    int shown = 0;
    for (int i = 0; i < CFG_COUNT; i++) {
        const ConfigKey *k = config_key((ConfigId)i);
        snprintf(full, sizeof full, "%s.%s", k->section, k->name);
        if (key && strcmp(key, full) != 0 && strcmp(key, k->section) != 0) continue;
        explain_one(c, (ConfigId)i, out);
        shown++;
    }
    if (shown) return ERR_OK;
    const char *dot = strchr(key, '.'), *section = config_nearest_section(key);
    char meant[CONFIG_SUGGEST_BYTES];
    snprintf(full, sizeof full, "%.*s", dot ? (int)(dot - key) : 0, key);
    err_set(ERR_CONFIG, "there is no key '%s'", key);
    if (*config_suggest(full, dot ? dot + 1 : key, NULL, meant)) err_hint("%s", meant);
    else if (section) err_hint("did you mean '%s'?", section);
    return ERR_CONFIG;
}
