/* config: check, dump, explain, from-hf. */
#include <limits.h>
#include <string.h>

#include "base/file.h"
#include "base/heap.h"
#include "base/words.h"
#include "cli/check_layout.h"
#include "cli/config_arg.h"
#include "hf/class.h"
#include "plan/micro_batch.h"
#include "train/preflight.h"
#include "train/spec.h"

static const char *config_path, *may_differ;
static char joined[OPTION_JOIN_BYTES]; /* of may_differ */
static int64_t world_size;
static bool in_layout;

static const Option options[] = {
    { "config", OPTION_TEXT, &config_path, .value = "FILE", .help = "configuration (INI); none: the defaults" },
    { "world", OPTION_INT, &world_size, .low = 1, .high = CONFIG_RANKS_MAX, .value = "N",
      .help = "ranks to read it for; none: the launcher's, or the fewest that its cuts take" },
    { "override", OPTION_TEXT, &may_differ, .join = joined, .value = "KEY,KEY",
      .help = "as train takes it; the names are checked, and no value changes by it" },
    { "layout", OPTION_FLAG, &in_layout,
      .help = "check: trains a small model two steps in the layout and on one rank, and compares all bits" },
};

static bool is_override(const char *word) { return strchr(word, '=') != NULL; }

/* Says what was not looked at. */
static void say_checked(const Config *c, bool found, bool vocab)
{
    const long long ranks = c->derived.world_size;
    printf("%s: ok on %lld rank%s", config_path ? config_path : "the defaults", ranks, ranks > 1 ? "s" : "");
    if (c->derived.any_world) printf(" (more ranks were not checked: --world N)");
    if (!vocab) printf(" (a step was not planned, for the vocabulary is not known: give model.vocab)");
    printf("%s\n", found ? ", but a run would not start here: see the warnings" : "");
}

/* What the table of keys and the relations between them do not say: all that a run's start refuses; and what is not to
 * be had here, which another machine may have. */
static Err check_whole(const Config *c)
{
    Grid grid;
    int found;
    int64_t vocab;
    TRY(grid_spec(c, &grid));
    TRY(preflight(c, &found, &vocab));
    if (vocab) TRY(spec_dry_run(c, grid, vocab));
    say_checked(c, found, vocab > 0);
    return ERR_OK;
}

/* train.micro_batch=auto is right where any number is. */
static Err check(const Config *c)
{
    ON_HEAP(Config, least, 1);
    int64_t samples;
    char word[MICRO_BATCH_WORD];
    if (!c->derived.open_micro_batch) return check_whole(c);
    TRY(micro_batch_least(c, &samples));
    Err err = config_for(c, 0, micro_batch_word(samples, word), least);
    if (!err) err = check_whole(least);
    config_release(least);
    return err;
}

/* check, dump, explain: with the words behind them that are no overrides. */
static Err answer(const Config *c, const char *verb, const char *key)
{
    if (strcmp(verb, "explain") == 0) return config_explain(c, key, stdout);
    if (strcmp(verb, "check") == 0)
        return in_layout ? check_layout(c, config_path ? config_path : "the defaults") : check(c);
    config_dump(c, stdout, true);
    return ERR_OK;
}

/* Cuts a path of a model's config.json to that of its folder. */
static Err find_folder(char path[PATH_MAX], const char *given)
{
    static const char name[] = "config.json";
    snprintf(path, PATH_MAX, "%s", given);
    if (file_is_dir(given) || !file_exists(given)) return ERR_OK;
    char *last = strrchr(path, '/');
    if (strcmp(last ? last + 1 : path, name) != 0) {
        err_set(ERR_CONFIG, "'megatrain config from-hf': '%s' is a file, and neither a folder nor its %s", given, name);
        return err_hint("megatrain config from-hf FOLDER >model.ini");
    }
    if (last) last[last == path] = 0; /* (the root is a folder, too) */
    else strcpy(path, ".");
    return ERR_OK;
}

/* The sections of a model of Hugging Face's. */
static Err from_hf(Words folders)
{
    SetupArena arena;
    HfConfig hf;
    char folder[PATH_MAX];
    if (folders.count != 1)
        return err_set(ERR_CONFIG, "'megatrain config from-hf' takes one folder, with a config.json"),
               err_hint("megatrain config from-hf FOLDER >model.ini");
    TRY(find_folder(folder, folders.items[0]));
    setup_init(&arena);
    const Err err = hf_config_read(folder, &arena, &hf);
    if (!err) printf("; %s\n", hf_class_names(hf.kind)->architecture);
    if (!err && *hf.ignored) printf("; ignored, since they change nothing here: %s\n", hf.ignored);
    if (!err) fputs(hf.ini, stdout);
    setup_release(&arena);
    return err;
}

static Err config(Words rest)
{
    static const char *const verbs[] = { "check", "dump", "explain", "from-hf" };
    const char *verb = "dump", *key = NULL;
    int used = 0;
    if (rest.count > used && !is_override(rest.items[used])) verb = rest.items[used++];
    if (!strcmp(verb, "from-hf")) return from_hf((Words){ rest.items + used, rest.count - used });
    bool known = !strcmp(verb, "check") || !strcmp(verb, "dump") || !strcmp(verb, "explain");
    if (!known) {
        const char *nearest = word_nearest(verb, verbs, 4);
        err_set(ERR_CONFIG, "'megatrain config' does not know '%s'", verb);
        return nearest ? err_hint("did you mean '%s'?", nearest)
                       : err_hint("check, dump, explain KEY or from-hf FOLDER");
    }
    if (!strcmp(verb, "explain") && rest.count > used && !is_override(rest.items[used])) key = rest.items[used++];

    if (in_layout && strcmp(verb, "check") != 0)
        return err_set(ERR_CONFIG, "'megatrain config %s' takes no --layout", verb),
               err_hint("megatrain config check --layout --config FILE --world N");
    Config c;
    int64_t ranks;
    TRY(config_world(world_size, &ranks));
    Err err = config_arg(&c, config_path, (Words){ rest.items + used, rest.count - used }, ranks);
    if (!err && may_differ) err = config_let_differ(&c, may_differ);
    if (!err) err = answer(&c, verb, key);
    config_release(&c);
    return err;
}

const Command command_config = {
    .name = "config",
    .summary = "check a configuration, print it complete, explain keys",
    .verbs = "check dump explain from-hf",
    .rest = "[check | dump | explain [KEY]] " REST_OVERRIDES,
    .text = "  check              all mistakes at once, and where; what is missing here\n"
            "  dump               all values and their origins (the default)\n"
            "  explain            all keys; explain model, explain model.layers: these\n"
            "  from-hf FOLDER     instead: sections [model] and [moe] of a Hugging Face model\n",
    OPTIONS(options),
    .run = config,
};
