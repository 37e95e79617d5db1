/* train, eval: the configuration is read here; train/train.c and train/eval.c do the rest. */
#include "base/log.h"
#include "cli/config_arg.h"
#include "comm/boot.h"
#include "train/join.h"
#include "train/train.h"

static const char *config_path;

static const Option options[] = {
    { "config", OPTION_TEXT, &config_path, .required = true, .value = "FILE", .help = "configuration (INI)" },
};

/* What all ranks have to say rank 0 says. alone: the world size that counts for one process. */
static Err read_config(Config *c, Boot *boot, Words rest, int64_t alone)
{
    *c = (Config){ 0 };
    TRY(boot_from_env(boot));
    log_set_rank(boot->rank, boot->size);
    if (boot->rank) log_set_level(LOG_WARN);
    return join_said_once(boot, config_arg(c, config_path, rest, boot->size > 1 ? boot->size : alone));
}

static Err train(Words rest)
{
    Config c;
    Boot boot;
    Err err = read_config(&c, &boot, rest, 1);
    if (!err) err = train_run(&c, &boot);
    config_release(&c);
    return err;
}

static Err eval(Words rest)
{
    Config c;
    Boot boot;
    Err err = read_config(&c, &boot, rest, CONFIG_ANY_WORLD);
    if (!err) err = eval_run(&c, &boot);
    config_release(&c);
    return err;
}

const Command command_train = {
    .name = "train",
    .summary = "train, or resume, the run that a configuration describes",
    .rest = REST_OVERRIDES,
    .text = "With checkpoint.resume = auto (the default) a run goes on from its newest checkpoint.\n"
            "SIGTERM, SIGUSR1 and the first SIGINT finish the step, write a checkpoint and exit with 75.\n"
            "megatrain config explain lists all keys.\n",
    OPTIONS(options),
    .run = train,
};

const Command command_eval = {
    .name = "eval",
    .summary = "loss, perplexity and bits per byte on the validation data",
    .rest = REST_OVERRIDES,
    .text = "train.eval_batches says how many global batches are read, at most the whole validation set.\n"
            "One process reads a checkpoint of any layout; several are the ranks of the layout configured.\n",
    OPTIONS(options),
    .run = eval,
};
