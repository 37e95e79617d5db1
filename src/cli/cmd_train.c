/* train, eval: the configuration is read here; train/train.c does the rest. */
#include "cli/config_arg.h"
#include "train/train.h"

static const char *config_path;

static const Option options[] = {
    { "config", OPTION_TEXT, &config_path, .required = true, .value = "FILE", .help = "configuration (INI)" },
};

static Err with_config(Words rest, Err (*run)(const Config *))
{
    Config c;
    TRY(single_process());
    Err err = config_arg(&c, config_path, rest, 1);
    if (!err) err = run(&c);
    config_release(&c);
    return err;
}

static Err train(Words rest) { return with_config(rest, train_run); }

static Err eval(Words rest) { return with_config(rest, eval_run); }

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
    .summary = "loss, perplexity and bits per byte on the validation data, from the newest checkpoint",
    .rest = REST_OVERRIDES,
    .text = "train.eval_batches says how many global batches are read, at most the whole validation set.\n",
    OPTIONS(options),
    .run = eval,
};
