/*
 * plan: what a run will need, before it starts. plan_table.c counts it, plan_text.c and plan_json.c write it;
 * plan_search.c looks for layouts.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/heap.h"
#include "cli/config_arg.h"
#include "cli/memory_arg.h"
#include "cli/plan.h"
#include "plan/micro_batch.h"

enum { SEARCH_ANSWERS = 32, USUAL_ANSWERS = 5 };

static const char *config_path, *device;
static int64_t world_size, max_world, best; /* 0: not given */
static bool as_json, all_tables, advise, with_ops, is_search;
static const char *svg_path, *memory;
static double price = NAN;
static const char *compare;
static DeviceFile target; /* the device to plan for; without a name: this machine's, or a CPU */

static const Option options[] = {
    { "config", OPTION_TEXT, &config_path, .required = true, .value = "FILE", .help = "configuration (INI)" },
    { "world", OPTION_INT, &world_size, .low = 1, .high = CONFIG_RANKS_MAX, .value = "N",
      .help = "ranks; none: the launcher's, or as few as fit its cuts" },
    { "device", OPTION_TEXT, &device, .value = "NAME|FILE",
      .help = "cpu, h100, ... (config/devices); none: this machine's" },
    { "json", OPTION_FLAG, &as_json, .help = "figures as JSON" },
    { "all", OPTION_FLAG, &all_tables, .help = "tables of every kind of ranks and every stage" },
    { "advise", OPTION_FLAG, &advise, .help = "of --device: three changes that would help most" },
    { "ops", OPTION_FLAG, &with_ops, .help = "of --device: the time of each op" },
    { "svg", OPTION_TEXT, &svg_path, .value = "FILE", .help = "of --device: a picture of the predicted step" },
    { "search", OPTION_FLAG, &is_search, .help = "the fastest layouts of --device; keys given here stay" },
    { "max-world", OPTION_INT, &max_world, .low = 1, .high = CONFIG_RANKS_MAX, .value = "N",
      .help = "searches for so many ranks, half as many, ..." },
    { "memory", OPTION_TEXT, &memory, .value = "80GB", .help = "for --search, micro_batch=auto; none: --device's" },
    { "best", OPTION_INT, &best, .low = 1, .high = SEARCH_ANSWERS, .value = "N",
      .help = "with --search: answers; none: 5" },
    { "price", OPTION_REAL, &price, .low = 0, .high = 1e6, .value = "$",
      .help = "with --search: of a device and hour" },
    { "compare", OPTION_TEXT, &compare, .value = "TEXT", .help = "with --search: where others stand: \"KEYS; KEYS\"" },
};

static Err print_plan(PlanTable *t)
{
    TRY(plan_count(t));
    TRY(plan_time(t, svg_path));
    if (advise) TRY(plan_advise(t));
    if (as_json) return plan_print_json(t);
    plan_print_text(t);
    return ERR_OK;
}

/* chosen: "train.micro_batch=auto: ..."; NULL: the number is given. */
static Err plan_config(const Config *cfg, Words words, const char *chosen)
{
    ON_HEAP(PlanTable, t, 1);
    t->cfg = cfg;
    t->path = config_path;
    t->words = words;
    t->ops = with_ops;
    t->advised = advise;
    t->all = all_tables;
    t->target = *target.name ? &target : NULL;
    t->chosen = chosen;
    Err err = print_plan(t);
    plan_free(t);
    return err;
}

static Err search_words(Words words)
{
    int64_t ranks;
    TRY(config_world(max_world ? max_world : world_size, &ranks));
    if (ranks == CONFIG_ANY_WORLD)
        return err_set(ERR_CONFIG, "plan --search: on how many ranks?"), err_hint("give --world N or --max-world N");
    return plan_search(&(PlanSearch){ .config_path = config_path,
                                      .device = device,
                                      .overrides = words,
                                      .world = ranks,
                                      .max_world = max_world > 0,
                                      .memory = memory,
                                      .best = best ? best : USUAL_ANSWERS,
                                      .price = price,
                                      .compare = compare,
                                      .as_json = as_json });
}

/* Options about one layout are not about a search, nor the other way round. */
static Err words_agree(void)
{
    const char *of_search = max_world       ? "max-world"
                            : best          ? "best"
                            : !isnan(price) ? "price"
                            : compare       ? "compare"
                                            : NULL;
    const char *of_layout = svg_path ? "svg" : all_tables ? "all" : advise ? "advise" : with_ops ? "ops" : NULL;
    if (is_search && of_layout)
        return err_set(ERR_CONFIG, "--%s is about one layout", of_layout), err_hint("leave out --search");
    if (!is_search && of_search)
        return err_set(ERR_CONFIG, "--%s is about a search", of_search), err_hint("add --search");
    if (world_size && max_world)
        return err_set(ERR_CONFIG, "--world and --max-world both say how many ranks"),
               err_hint("leave one of them out: --max-world N searches for N, N / 2, ...");
    return ERR_OK;
}

/* ---- train.micro_batch=auto ---- */

/* Memory of a rank, as a run whose ranks all begin now on this machine would find it. */
static Err room_here(const Config *c, Room *out)
{
    char why[256];
    if (c->run.device != RUN_DEVICE_CUDA || device_cuda_count(why, sizeof why)) return room_on_this_host(c, out);
    return err_set(ERR_CONFIG, "train.micro_batch=auto: nothing says how much memory the GPU has: %s", why),
           err_hint("--device h100, --memory 80GB, or a number for train.micro_batch");
}

/* The ranks of a host share its processors' memory. */
static Err room_asked_for(const Config *c, Room *out)
{
    const bool cpu = c->run.device == RUN_DEVICE_CPU;
    int64_t bytes = target.memory_mib << 20;
    if (memory) TRY(memory_arg("memory", memory, &bytes));
    if (!memory && !*target.name) return room_here(c, out);
    if (*target.name) target.memory_mib = bytes >> 20;
    if (memory) target.sold_gb = 0;
    *out = (Room){ .host = INT64_MAX, .gpu = bytes, .has_nccl = true };
    if (cpu && *target.name) bytes /= c->derived.world_size;
    if (cpu) *out = (Room){ .host = memory ? bytes : room_less_reserve(bytes) };
    return ERR_OK;
}

/* The word that says which number, and a text for people. */
static Err choose_micro_batch(const Config *c, char word[MICRO_BATCH_WORD], char text[MICRO_BATCH_TEXT])
{
    int64_t vocab;
    Room room;
    MicroBatch m;
    TRY(room_asked_for(c, &room));
    TRY(plan_vocab(c, &vocab));
    TRY(micro_batch_choose(c, vocab, &room, &m));
    micro_batch_word(m.samples, word);
    micro_batch_text(&m, &room, text);
    return ERR_OK;
}

static Err refuse_memory(void)
{
    if (!memory) return ERR_OK;
    return err_set(ERR_CONFIG, "--memory is about a search, or about train.micro_batch=auto"),
           err_hint("add --search, or train.micro_batch=auto");
}

/* words has room for one more. */
static Err plan_words(const char **words, int count)
{
    Config c = { 0 };
    int64_t ranks = 0;
    char word[MICRO_BATCH_WORD], text[MICRO_BATCH_TEXT];
    TRY(config_world(world_size, &ranks));
    Err err = config_arg(&c, config_path, (Words){ words, count }, ranks);
    const bool open = !err && c.derived.open_micro_batch;
    if (!err) err = open ? choose_micro_batch(&c, word, text) : refuse_memory();
    if (!err && open) {
        words[count++] = word;
        config_release(&c);
        err = config_arg(&c, config_path, (Words){ words, count }, ranks);
    }
    if (!err) err = plan_config(&c, (Words){ words, count }, open ? text : NULL);
    config_release(&c);
    return err;
}

/* --device speaks last. */
static Err plan(Words rest)
{
    enum { MORE = 2 };
    int count = rest.count;
    TRY(words_agree());
    const char **words = calloc((size_t)count + MORE, sizeof *words);
    if (!words) return err_set(ERR_MEMORY, "no memory for %d words", count);
    for (int i = 0; i < count; i++) words[i] = rest.items[i];
    bool cpu = device && strcmp(device, "cpu") == 0;
    Err err = device && !cpu ? device_file_read(device, &target) : ERR_OK;
    cpu = cpu || target.processors > 0;
    if (device) words[count++] = cpu ? "run.device=cpu" : "run.device=cuda";
    if (!err) err = is_search ? search_words((Words){ words, count }) : plan_words(words, count);
    free(words);
    return err;
}

const Command command_plan = {
    .name = "plan",
    .summary = "exact bytes, FLOP and communication, from a dry run",
    .rest = REST_OVERRIDES,
    .text = "A run takes exactly these bytes. The first lines answer, tables follow.\n",
    OPTIONS(options),
    .run = plan,
};
