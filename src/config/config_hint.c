/*
 * Ways out of a rule that does not hold. One is a set of values, which is tried before it is named: a copy of the
 * configuration as it was given takes the values, is completed and checked anew.
 */
#include <stdarg.h>
#include <string.h>

#include "config/config_reader.h"

enum {
    WAYS = 2,      /* named of one rule */
    REACH = 512,   /* values looked at on either side */
    TRIALS = 1500, /* of one configuration: what is wrong in many ways is still refused at once */
    WAY_BYTES = 160
};

static bool same_rule(ConfigRule a, ConfigRule b)
{
    return a.function == b.function && a.line == b.line && a.key == b.key;
}

static bool is_broken(const ConfigReader *r, ConfigRule rule)
{
    for (int i = 0; i < r->broken_count; i++)
        if (same_rule(r->broken[i], rule)) return true;
    return false;
}

bool config_breaks_no_more(const ConfigReader *now, const ConfigReader *was)
{
    if (now->mistakes - now->broken_count > was->mistakes - was->broken_count) return false;
    if (now->broken_count > CONFIG_BROKEN || was->broken_count > CONFIG_BROKEN) return false;
    for (int i = 0; i < now->broken_count; i++)
        if (!is_broken(was, now->broken[i])) return false;
    return true;
}

static bool passes(ConfigReader *r, const char *values, int64_t ranks)
{
    Config c;
    ConfigReader now = { .config = &c };
    if (!r->before || r->trials++ >= TRIALS) return false;
    memcpy(now.bad, r->bad, sizeof now.bad);
    r->again(&now, r->config, values, ranks);
    config_release(&c);
    return !now.memory && config_breaks_no_more(&now, r->before) && !is_broken(&now, r->broken[r->broken_count - 1]);
}

/* Are ways out of the last rule looked for? */
static bool wanted(const ConfigReader *r)
{
    return r->before && !r->holds && r->ways < WAYS && r->broken_count <= CONFIG_BROKEN;
}

/* Behind the last line of the report, whose end is put back. */
static void add_way(ConfigReader *r, const char *way)
{
    if (r->report_used + (int64_t)strlen(way) + 16 > CONFIG_REPORT_BYTES) return;
    r->report_used--;
    r->report_used += snprintf(r->report + r->report_used, (size_t)(CONFIG_REPORT_BYTES - r->report_used), "%s%s\n",
                               r->ways++ ? ", or " : "; take ", way);
}

const char *config_list_text(int64_t length, const char *form)
{
    return length == PATTERN_LONG ? "a list has at most 128 items: give equal ones once, with their number, such as 0*3"
                                  : form;
}

void config_take(ConfigReader *r, const char *fmt, ...)
{
    static const char part[] = ", or ";
    char ways[3 * WAY_BYTES], *next, *taken = NULL;
    va_list args;
    if (!wanted(r)) return;
    va_start(args, fmt);
    vsnprintf(ways, sizeof ways, fmt, args);
    va_end(args);
    for (char *way = ways; way && wanted(r); way = next) {
        next = strstr(way, part);
        if (next) *next = 0, next += strlen(part);
        if (taken && !strncmp(way, taken, strlen(taken)) && way[strlen(taken)] == ' ')
            continue; /* what more it changes is not needed */
        if (!passes(r, way, 0)) continue;
        add_way(r, way);
        taken = way;
    }
}

/* Does the key's value `value` pass? Then it is named. */
static bool take_value(ConfigReader *r, ConfigId id, int64_t value)
{
    const ConfigKey *key = config_key(id);
    char way[WAY_BYTES];
    if (value < key->int_low || value > key->int_high) return false;
    snprintf(way, sizeof way, "%s.%s=%lld", key->section, key->name, (long long)value);
    if (!passes(r, way, 0)) return false;
    add_way(r, way);
    return true;
}

void config_take_near(ConfigReader *r, ConfigId id)
{
    const int64_t value = *(const int64_t *)((const char *)r->config + config_key(id)->offset);
    if (!wanted(r)) return;
    for (int64_t d = 1; d <= REACH && !take_value(r, id, value - d); d++) {}
    for (int64_t d = 1; d <= REACH && !take_value(r, id, value + d); d++) {}
}

void config_take_ranks(ConfigReader *r, int64_t unit)
{
    const int64_t size = r->config->derived.world_size, below = size / unit * unit;
    char way[WAY_BYTES];
    if (!wanted(r)) return;
    for (int side = -1; side <= 1; side += 2)
        for (int64_t i = side > 0, ranks; i <= REACH; i++) {
            ranks = below + side * i * unit;
            if (ranks < 1 || ranks > CONFIG_RANKS_MAX) break;
            if (!passes(r, "", ranks)) continue;
            snprintf(way, sizeof way, "%lld rank%s", (long long)ranks, ranks > 1 ? "s" : "");
            add_way(r, way);
            break;
        }
}
