/*
 * config/config_open.c and what it reads with. Input: the file's text, then, each behind a 0 byte, texts of the command
 * line. What is accepted reads back from its dump to the same values and the same dump; it fits into a manifest; its
 * split is one.
 */
#include "fuzz.h"

#include "config/config.h"
#include "base/json.h"
#include "data/dataset.h"

enum { OVERRIDES_MAX = 16 };

static const int64_t worlds[] = { 8, 1, CONFIG_ANY_WORLD, CONFIG_RANKS_MAX }; /* the length of the input picks one */

static char *dump(const Config *c)
{
    char *text;
    size_t size;
    FILE *f = open_memstream(&text, &size);
    if (!f) abort();
    config_dump(c, f, false);
    fclose(f);
    return text;
}

static void check_manifest_takes(const char *text)
{
    size_t room = 8 * strlen(text) + 64;
    char *json = malloc(room);
    JsonOut out;
    Json *j;
    if (!json) abort();
    json_out_init(&out, json, (int64_t)room);
    json_open(&out, NULL, '{');
    json_put_text(&out, "config", text);
    json_close(&out, '}');
    Err err = json_parse("manifest", json, out.used_bytes, &j);
    FUZZ_CHECK(!err, "%s", err_message());
    FUZZ_CHECK(!strcmp(json_text(json_get(j, "config"), NULL), text), "%s", json);
    json_free(j);
    free(json);
}

static void check_split(const Config *c)
{
    int64_t bounds[PART_COUNT + 1];
    if (!*c->data.split) return;
    Err err = split_documents(c->data.split, 1000, bounds);
    fuzz_check_error(err, ERR_CONFIG, ERR_CONFIG, false);
    if (err) return;
    FUZZ_CHECK(bounds[0] == 0 && bounds[PART_COUNT] == 1000, "split '%s'", c->data.split);
    for (int i = 0; i < PART_COUNT; i++) FUZZ_CHECK(bounds[i] <= bounds[i + 1], "split '%s'", c->data.split);
}

static void check_accepted(const Config *c, int64_t world)
{
    Config again;
    char a[CONFIG_VALUE_BYTES], b[CONFIG_VALUE_BYTES];
    char *text = dump(c);
    Err err = config_read(&again, (ConfigSource){ .path = "dump", .text = text, .world_size = world });
    FUZZ_CHECK(!err, "%s:\n%s", err_message(), text);
    for (int i = 0; i < CFG_COUNT; i++) {
        const char *x = config_value(c, (ConfigId)i, a), *y = config_value(&again, (ConfigId)i, b);
        FUZZ_CHECK(!strcmp(x, y), "%s.%s: '%s', then '%s'", config_key((ConfigId)i)->section,
                   config_key((ConfigId)i)->name, x, y);
    }
    FUZZ_CHECK(!config_same_run(c, &again), "%s", err_message());
    char *text_again = dump(&again);
    FUZZ_CHECK(!strcmp(text, text_again), "%s\nthen\n%s", text, text_again);
    check_manifest_takes(text);
    check_split(c);
    free(text);
    free(text_again);
    config_release(&again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = fuzz_text(data, size);
    const char *overrides[OVERRIDES_MAX];
    int count = 0;
    for (size_t at = strlen(text) + 1; at < size && count < OVERRIDES_MAX; at += strlen(text + at) + 1)
        overrides[count++] = text + at;
    Config c;
    const int64_t world = worlds[size % (sizeof worlds / sizeof *worlds)];
    ConfigSource source = { .path = "input.ini",
                            .text = text,
                            .overrides = overrides,
                            .override_count = count,
                            .world_size = world };
    fuzz_memory_start();
    Err err = config_read(&c, source);
    FUZZ_MEMORY_BOUND(size, 4, 1 << 20);
    fuzz_check_error(err, ERR_CONFIG, ERR_CONFIG, true);
    if (!err) check_accepted(&c, world);
    config_release(&c);
    free(text);
    return 0;
}
