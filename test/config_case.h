/* Shared by the tests of the configuration: reading one from a text and overrides, what is said of it. */
#ifndef MEGATRAIN_TEST_CONFIG_CASE_H
#define MEGATRAIN_TEST_CONFIG_CASE_H

#include "config/config.h"
#include "test.h"

enum { MAX_OVERRIDES = 48 };

/* Reads `text` as the file "t.ini" (NULL: none), then the blank-separated overrides. */
static inline Err read_as(Config *c, const char *text, const char *overrides, int64_t world_size)
{
    static char copy[16384];
    const char *list[MAX_OVERRIDES];
    int n = 0;
    snprintf(copy, sizeof copy, "%s", overrides);
    for (char *word = strtok(copy, " "); word && n < MAX_OVERRIDES; word = strtok(NULL, " "))
        list[n++] = word;
    return config_read(c, (ConfigSource){ .path = text ? "t.ini" : NULL,
                                          .text = text,
                                          .overrides = list,
                                          .override_count = n,
                                          .world_size = world_size });
}

/* What is wrong with it; "" if nothing. */
static inline const char *complaint(const char *text, const char *overrides, int64_t world_size)
{
    Config c;
    Err err = read_as(&c, text, overrides, world_size);
    config_release(&c);
    return err == ERR_OK ? "" : err == ERR_CONFIG ? err_message() : "another kind of error";
}

static inline int count_lines(const char *text)
{
    int n = 0;
    for (; *text; text++) n += *text == '\n';
    return n + 1;
}

static inline bool same_values(const Config *a, const Config *b)
{
    char x[CONFIG_VALUE_BYTES], y[CONFIG_VALUE_BYTES];
    bool same = memcmp(&a->derived, &b->derived, sizeof a->derived) == 0;
    for (int i = 0; i < CFG_COUNT; i++)
        same &= strcmp(config_value(a, (ConfigId)i, x), config_value(b, (ConfigId)i, y)) == 0;
    return same;
}

#endif
