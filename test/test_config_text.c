/*
 * The configuration's text: every mistype is answered with the nearest key, forms of lines and files, damage; what
 * is dumped reads back, explanations, what may change on resume.
 */
#include <glob.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "config_case.h"

#define MIXTURE "moe.experts=8 moe.ffn=128 model.hidden=256 model.heads=4 model.bias=false"

/* ---- mistypes ---- */

/* True if at most `edits` insertions, deletions and replacements turn a into b. */
static bool within(const char *a, const char *b, int edits)
{
    while (*a && *a == *b) a++, b++;
    if (!*a && !*b) return true;
    if (edits == 0) return false;
    return (*a && within(a + 1, b, edits - 1)) || (*b && within(a, b + 1, edits - 1)) ||
           (*a && *b && within(a + 1, b + 1, edits - 1));
}

static int distance(const char *a, const char *b)
{
    int edits = 0;
    while (edits < 5 && !within(a, b, edits)) edits++;
    return edits;
}

static void mistype(char *text, uint64_t *seed)
{
    int n = (int)strlen(text), at = (int)(test_rand(seed) % (uint64_t)n);
    char letter = (char)('a' + test_rand(seed) % 26);
    switch (test_rand(seed) % 3) {
    case 0: text[at] = letter; break;
    case 1:
        if (n > 1) memmove(text + at, text + at + 1, (size_t)(n - at));
        break;
    default:
        memmove(text + at + 1, text + at, (size_t)(n - at) + 1);
        text[at] = letter;
    }
}

TEST(mistypes_are_answered_with_a_key_as_near)
{
    uint64_t seed = 7;
    ConfigId unused;
    for (int i = 0; i < CFG_COUNT; i++) {
        const ConfigKey *key = config_key((ConfigId)i);
        for (int edits = 1; edits <= 2; edits++) {
            for (int k = 0; k < 12; k++) {
                char typed[64], text[128], want[128];
                strcpy(typed, key->name);
                for (int e = 0; e < edits; e++) mistype(typed, &seed);
                if (config_find(key->section, typed, &unused)) continue;
                /* (others' names: no mistypes) */
                if (!strcmp(typed, "dp") || !strcmp(typed, "mscale") || !strcmp(typed, "val_batches")) continue;
                ConfigId near = config_nearest(key->section, typed);
                CHECK_MSG(near < CFG_COUNT, "%s.%s for %s", key->section, typed, key->name);
                if (near == CFG_COUNT) continue;
                const ConfigKey *found = config_key(near);
                bool good = strcmp(found->section, key->section) == 0
                                ? distance(found->name, typed) <= distance(key->name, typed)
                                : strcmp(found->name, typed) == 0 || distance(found->section, key->section) <= 1;
                CHECK_MSG(good, "%s.%s: %s.%s", key->section, typed, found->section, found->name);
                snprintf(text, sizeof text, "[%s]\n%s = 1\n", key->section, typed);
                snprintf(want, sizeof want, "t.ini:2: unknown key '%s.%s'; did you mean '%s.%s'?", key->section, typed,
                         found->section, found->name);
                CHECK_MSG(strcmp(complaint(text, "", 1), want) == 0, "%s", complaint(text, "", 1));
            }
        }
    }
}

TEST(keys_in_the_wrong_place)
{
    CHECK(strstr(complaint("[train]\nlr = 1\n", "", 1), "unknown key 'train.lr'; did you mean 'optim.lr'?"));
    CHECK(strstr(complaint("lr = 1\n", "", 1), "t.ini:1: unknown key 'lr'; did you mean 'optim.lr'?"));
    CHECK(strstr(complaint(NULL, "optm.lr=1", 1), "did you mean 'optim.lr'?"));
    CHECK(strcmp(complaint("[train]\nsomething_else = 1\n", "", 1), "t.ini:2: unknown key 'train.something_else'") ==
          0);
    CHECK(strcmp(complaint("[trian]\nlr = 1\n", "", 1),
                 "t.ini:1: unknown section '[trian]'; did you mean '[train]'?") == 0);
    CHECK(strcmp(complaint("[elsewhere]\n", "", 1), "t.ini:1: unknown section '[elsewhere]'") == 0);
}

/* Names of other frameworks, keys without a section, comments as elsewhere. */
TEST(names_of_others)
{
    static const char *const cases[][2] = {
        { "model.n_layer=4", "unknown key 'model.n_layer'; did you mean 'model.layers'?" },
        { "model.hidden_size=4", "did you mean 'model.hidden'?" },
        { "train.batch_size=4", "did you mean 'train.micro_batch' or 'train.global_batch'?" },
        { "optim.learning_rate=4", "did you mean 'optim.lr'?" },
        { "train.Max-Iters=4", "did you mean 'train.steps'?" },
        { "log.wandb=true", "did you mean 'log.tensorboard'?" },
        { "layers=3", "'layers=3' is not section.key=value; did you mean 'model.layers=3'?" },
        { "seed=3", "did you mean 'run.seed=3' or 'data.seed=3'?" },
        { "n_embd=3", "did you mean 'model.hidden=3'?" },
        { "config/tiny.ini", "did you mean '--config config/tiny.ini'?" },
        { "nonsense", "'nonsense' is not section.key=value" },
        /* torchtitan's, of which the sections are no sections here */
        { "parallelism.tensor_parallel_degree=4", "did you mean 'parallel.tp'?" },
        { "parallelism.pipeline_parallel_schedule=Interleaved1F1B", "did you mean 'parallel.schedule=interleaved'?" },
        { "parallelism.data_parallel_shard_degree=-1", "; dp follows from the number of ranks" },
        { "training.local_batch_size=2", "did you mean 'train.micro_batch'?" },
        { "training.max_norm=1", "did you mean 'optim.clip'?" },
        { "training.steps=5", "did you mean 'train.steps'?" },
        { "activation_checkpoint.mode=full", "did you mean 'train.recompute'?" },
        { "checkpoint.interval=5", "did you mean 'checkpoint.every'?" },
        { "checkpoint.enable=false", "did you mean 'checkpoint.every=0'?" },
        { "checkpoint.folder=x", "unknown key 'checkpoint.folder'; checkpoints lie in run.dir" },
        { "model.flavor=8B", "unknown key 'model.flavor'; a model is said by its sizes" },
        { "compile.enable=true", "; nothing is compiled when a run starts" },
        { "checkpoint.async_mode=disabled", "did you mean 'checkpoint.async=false'?" },
        { "profiling.enable_profiling=true", "did you mean 'log.trace_every=100'?" },
        { "metrics.log_freq=5", "did you mean 'log.every'?" },
        { "optimizer.name=AdamW", "did you mean 'optim.name=adamw'?" },
        { "optimizer.lr=1e-3", "did you mean 'optim.lr'?" },
        { "lr_scheduler.warmup_steps=9", "did you mean 'optim.warmup'?" },
        { "job.dump_folder=x", "did you mean 'run.dir'?" },
        /* values that are others here */
        { "bf16=true", "did you mean 'run.precision=bf16'?" },
        { "fp16=false", "did you mean 'run.precision=fp32'?" },
        { "torch_dtype=bfloat16", "did you mean 'run.precision=bf16'?" },
        { "bf16=maybe", "did you mean 'run.precision'?" },
        { "fp32-residual-connection=true", "did you mean 'run.fp32_residual=true'?" },
        { "use-distributed-optimizer=true", "did you mean 'parallel.zero=1'?" },
        { "gradient_accumulation_steps=4", "did you mean 'train.global_batch'?" },
        { "decay_lr=false", "did you mean 'optim.schedule=constant'?" },
        { "parallel.dp=2", "unknown key 'parallel.dp'; dp follows from the number of ranks" },
        { "dp=2", "; dp follows from the number of ranks" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const char *got = complaint(NULL, cases[i][0], 1);
        CHECK_MSG(strncmp(got, "command line: ", 14) == 0 && strstr(got, cases[i][1]), "%s: %s", cases[i][0], got);
    }
    CHECK(strcmp(complaint("[optim]\nlr = 6e-4 # note\n", "", 1),
                 "t.ini:2: optim.lr = '6e-4 # note': not a number; a comment behind a value begins with ';'") == 0);
    CHECK(strstr(complaint("n_head = 6\n", "", 1), "unknown key 'n_head'; did you mean 'model.heads'?"));
}

/* Numbers as people write them: the plain one is kept, and dumped. */
TEST(numbers_as_people_write_them)
{
    static const struct {
        const char *words;
        ConfigId key;
        const char *value;
    } cases[] = {
        { "train.tokens=1e9", CFG_train_tokens, "1000000000" },
        { "train.tokens=1.5B", CFG_train_tokens, "1500000000" },
        { "train.tokens=0.5e3k", CFG_train_tokens, "500000" },
        { "train.tokens=2T", CFG_train_tokens, "2000000000000" },
        { "train.steps=64k", CFG_train_steps, "64000" },
        { "checkpoint.every=1K", CFG_checkpoint_every, "1000" },
        { "optim.warmup=0.5k", CFG_optim_warmup, "500" },
        { "model.seq=1.024e3", CFG_model_seq, "1024" },
        { "model.layers=20e-1", CFG_model_layers, "2" },
        { "train.max_minutes=2h", CFG_train_max_minutes, "120" },
        { "train.max_minutes=90s", CFG_train_max_minutes, "1.5" },
        { "train.max_minutes=1d2h30m", CFG_train_max_minutes, "1590" },
        { "parallel.timeout_s=2.5m", CFG_parallel_timeout_s, "150" },
        { "parallel.timeout_s=90", CFG_parallel_timeout_s, "90" },
    };
    static const char *const wrong[][2] = {
        { "model.seq=64k", "model.seq = '64k': 64000 or 65536? write model.seq=65536, or the other" },
        { "model.seq=1.5k", "1500 or 1536? write model.seq=1536" },
        { "train.micro_batch=2k", "2000 or 2048?" },
        { "parallel.nccl.tp.max_ctas=1k", "1000 or 1024? write parallel.nccl.tp.max_ctas=1024" },
        { "train.tokens=1e99", "must lie between" },
        { "train.tokens=1.5", "not an integer" },
        { "train.tokens=1e-1", "not an integer" },
        { "train.tokens=1G", "not an integer" },
        { "train.tokens=1kk", "not an integer" },
        { "train.tokens=k", "not an integer" },
        { "train.tokens=1e", "not an integer" },
        { "train.tokens=-1e3", "must lie between" },
        { "train.global_batch=1e3", "in digits alone" },
        { "train.global_batch=8*1e3,16", "in digits alone" },
        { "train.max_minutes=2x", "not a number, or such as 2h30m" },
        { "train.max_minutes=0x2h", "not a number" },
        { "train.max_minutes=30m2h", "not a number" },
        { "train.max_minutes=2h30", "not a number" },
        { "train.max_minutes=-2h", "not a number" },
        { "optim.lr=2h", "not a number" },
        { "parallel.timeout_s=1e9d", "must lie between" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Config c;
        char buf[CONFIG_VALUE_BYTES];
        OK(read_as(&c, NULL, cases[i].words, 1));
        CHECK_MSG(!strcmp(config_value(&c, cases[i].key, buf), cases[i].value), "%s: %s", cases[i].words, buf);
        config_release(&c);
    }
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        CHECK_MSG(strstr(complaint(NULL, wrong[i][0], 1), wrong[i][1]), "%s: %s", wrong[i][0],
                  complaint(NULL, wrong[i][0], 1));
}

/* What a shell or another format would read otherwise is expanded or refused, and never becomes part of a name. */
TEST(texts_as_people_write_them)
{
    static const struct {
        const char *line, *says;
    } wrong[] = {
        { "[run]\nname = foo # x",
          "t.ini:2: run.name = 'foo # x': must not contain '#' after a blank; a comment behind" },
        { "[data]\ntrain = d/x # mine", "t.ini:2: data.train = 'd/x # mine': must not contain '#' after a blank; a" },
        { "[run]\nname = foo\t# x", "must not contain control characters; a comment behind a value begins with ';'" },
        { "[run]\ndir = ~", "t.ini:2: run.dir = '~': '~' is the home folder before '/' alone" },
        { "[checkpoint]\nload = ~you/x",
          "t.ini:2: checkpoint.load = '~you/x': '~' is the home folder before '/' alone" },
        { "[model]\nlayers = \"2\"", "t.ini:2: model.layers = '\"2\"': not an integer; leave the quotes out" },
        { "[optim]\nlr = '1e-3'", "t.ini:2: optim.lr = ''1e-3'': not a number; leave the quotes out" },
        { "[model]\narch = \"llama\"", "must be one of: gpt2 llama; leave the quotes out" },
        { "[run]\ndir = \"my runs/x\"", "t.ini:2: run.dir = '\"my runs/x\"': leave the quotes out" },
        { "model.layers = 2",
          "t.ini:1: unknown key 'model.layers'; in a file it is the line 'layers = ...' under a line [model]" },
        { "[model]\nmodel.layers = 2", "in a file it is the line 'layers = ...' under a line [model]" },
    };
    char base[64], ini[96];
    Config c;
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        const char *said = complaint(wrong[i].line, "", 1);
        CHECK_MSG(strstr(said, wrong[i].says), "'%s': %s", wrong[i].line, said);
    }
    CHECK(strstr(complaint(NULL, "run.dir=~", 1), "command line: run.dir = '~': '~' is the home folder"));
    CHECK(strstr(complaint("[run]\nname = #3", "", 1), "even an empty one, before which '#' is part of the value"));
    snprintf(base, sizeof base, "%s", getenv("HOME") ? getenv("HOME") : "");
    setenv("HOME", "/home/me", 1);
    snprintf(ini, sizeof ini, "[data]\ntrain = 0.7 ~/a 0.3 '~/b c' @9 @~/l.txt\ntokenizer = a~/b");
    CHECK(!read_as(&c, ini, "run.dir=~/runs/x", 1));
    CHECK(!strcmp(c.run.dir, "/home/me/runs/x") && !strcmp(c.data.tokenizer, "a~/b"));
    CHECK(!strcmp(c.data.train, "0.7 /home/me/a 0.3 '/home/me/b c' @9 @/home/me/l.txt"));
    config_release(&c);
    unsetenv("HOME");
    CHECK(strstr(complaint("[run]\ndir = ~/x", "", 1), "HOME is not set"));
    setenv("HOME", base, 1);
    CHECK(
        !config_read(&c, (ConfigSource){ .path = "old", .text = "[run]\nname = foo # x\ndir = ~\n", .earlier = true }));
    CHECK(!strcmp(c.run.name, "foo # x") && !strcmp(c.run.dir, "~"));
    config_release(&c);
}

/* A program that took '~' for a name made such a folder: is it meant, or the home folder? */
TEST(a_folder_by_the_name_of_home)
{
    char base[64], here[512], dir[] = "/tmp/test_config_text.XXXXXX";
    Config c;
    CHECK(getcwd(here, sizeof here));
    snprintf(base, sizeof base, "%s", getenv("HOME") ? getenv("HOME") : "");
    CHECK(mkdtemp(dir) && !chdir(dir) && !mkdir("~", 0777) && !mkdir("~/old", 0777));
    setenv("HOME", "/home/me", 1);
    const char *said = complaint(NULL, "run.dir=~/old", 1);
    CHECK_MSG(strstr(said, "'/home/me/old' or './~/old', which exists? write the one that is meant"), "%s", said);
    OK(read_as(&c, NULL, "run.dir=./~/old checkpoint.load=~/new", 1));
    CHECK(!strcmp(c.run.dir, "./~/old") && !strcmp(c.checkpoint.load, "/home/me/new"));
    config_release(&c);
    setenv("HOME", base, 1);
    CHECK(!rmdir("~/old") && !rmdir("~") && !chdir(here) && !rmdir(dir));
}

/* Values that others' are translated to are legal ones. */
TEST(translated_values_are_ours)
{
    static const char *const theirs[] = {
        "bf16=true",
        "fp16=true",
        "dtype=float32",
        "dtype=half",
        "multi_latent_attention=true",
        "normalization=RMSNorm",
        "swiglu=true",
        "squared_relu=true",
        "position_embedding_type=learned_absolute",
        "untie-embeddings-and-output-weights=true",
        "cp_comm_type=a2a+p2p",
        "cp_comm_type=p2p",
        "pipeline_parallel_schedule=ZBVZeroBubble",
        "pipeline_parallel_schedule=1F1B",
        "use_distributed_optimizer=false",
        "gradient_checkpointing=true",
        "optimizer=adam",
        "lr_decay_style=inverse-square-root",
        "decay_lr=true",
        "init_from=scratch",
        "init_from=resume",
        "async_mode=async_with_pinned_mem",
        "enable_profiling=false",
        "softmax_type=learnable",
    };
    for (size_t i = 0; i < sizeof theirs / sizeof *theirs; i++) {
        const char *got = strstr(complaint(NULL, theirs[i], 1), "did you mean '");
        char ours[96] = "";
        if (got) snprintf(ours, sizeof ours, "%.*s", (int)strcspn(got + 14, "'"), got + 14);
        CHECK_MSG(strchr(ours, '='), "%s: %s", theirs[i], ours);
        got = complaint(NULL, ours, 1);
        CHECK_MSG(!strstr(got, "unknown") && !strstr(got, "must be one of") && !strstr(got, "not an"), "%s: %s", ours,
                  got);
    }
}

/* No name of others is one of ours, which would never be asked for. */
TEST(names_of_others_are_not_ours)
{
    ConfigId ids[CONFIG_MEANT];
    for (int i = 0; i < CFG_COUNT; i++) {
        const ConfigKey *key = config_key((ConfigId)i);
        bool found = false;
        const int count = config_meant("", key->name, ids);
        for (int k = 0; k < count; k++) found |= ids[k] == (ConfigId)i;
        CHECK_MSG(found, "%s.%s", key->section, key->name);
    }
}

/* ---- the form of the file ---- */

TEST(all_mistakes_at_once)
{
    const char *got = complaint("[run]\nnam = x\n[model]\nheads = 7\nkv_heads = 2\nkv_heads = 1\njunk\n[optm]\nlr = 4\n"
                                "[train]\nlr = 3\n[data\nx = 3\n",
                                "optim.lr=99 optim.lr=1 nonsense debug.isa=sse", 1);
    static const char *const want[] = {
        "11 mistakes in the configuration:\n",
        "t.ini:2: unknown key 'run.nam'; did you mean 'run.name'?",
        "t.ini:6: model.kv_heads is given twice, first in line 5",
        "t.ini:7: neither [section] nor key = value",
        "t.ini:8: unknown section '[optm]'",
        "t.ini:11: unknown key 'train.lr'; did you mean 'optim.lr'?",
        "t.ini:12: section without ']'",
        "command line: optim.lr = '99': must lie between 0 and 10",
        "command line: 'nonsense' is not section.key=value",
        "command line: debug.isa = 'sse': must be one of: auto avx512 avx2 c",
        "t.ini:4: model.heads = '7' with model.kv_heads = '2': heads must be",
        "t.ini:4: model.heads = '7' with model.hidden = '768': hidden must be",
    };
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) CHECK_MSG(strstr(got, want[i]), "%s\n%s", want[i], got);
}

TEST(a_flood_of_mistakes_is_cut)
{
    char *text = malloc(200000);
    size_t n = (size_t)sprintf(text, "[run]\n");
    for (int i = 0; i < 5000; i++) n += (size_t)sprintf(text + n, "unknown_key_%d = 1\n", i);
    const char *got = complaint(text, "", 1);
    CHECK(strstr(got, "5000 mistakes") && strlen(got) < 16384 && strstr(got, "t.ini:2: unknown key"));
    free(text);
}

TEST(forms_of_lines)
{
    Config c;
    CHECK(strstr(complaint("[model]\nlayers=3;4\n", "", 1), "model.layers = '3;4': not an integer"));
    CHECK(strcmp(complaint("[train] steps = 7\n[model] layers = 3\n", "", 1),
                 "2 mistakes in the configuration:\nt.ini:1: only a comment may stand behind [section]\n"
                 "t.ini:2: only a comment may stand behind [section]") == 0);
    CHECK(strcmp(complaint("[train]\t; a\n[model]# b\n[run] \r\n", "", 1), "") == 0);
    OK(read_as(&c, "\xEF\xBB\xBF[run]\r\n  seed = 5\r\n\tname : x y \r\n\r\n# c = d\n ; e\n[model] ; why\nlayers=3 ; 4",
               "model.hidden=24", 1));
    CHECK(c.run.seed == 5 && strcmp(c.run.name, "x y") == 0 && c.model.layers == 3 && c.model.hidden == 24);
    CHECK(strcmp(c.run.dir, "runs/x y") == 0);
    char where[64];
    config_origin(&c, CFG_run_seed, where, sizeof where);
    CHECK(strcmp(where, "t.ini:2") == 0);
    config_origin(&c, CFG_model_hidden, where, sizeof where);
    CHECK(strcmp(where, "command line") == 0);
    config_origin(&c, CFG_model_ffn, where, sizeof where);
    CHECK(strcmp(where, "auto") == 0);
    config_origin(&c, CFG_optim_lr, where, sizeof where);
    CHECK(strcmp(where, "default") == 0);
    config_release(&c);
    OK(read_as(&c, "[run]\nseed = 5\n", "run.seed=6", 1)); /* the command line wins over the file */
    CHECK(c.run.seed == 6);
    config_release(&c);
    /* and its later value over the earlier */
    OK(read_as(&c, "[run]\nseed = 5\n", "run.seed=6 optim.lr=1 run.seed=7", 1));
    CHECK(c.run.seed == 7 && c.optim.lr == 1);
    config_release(&c);
}

/* Values longer than the parser's line buffer come through whole, wherever the line would be cut. */
TEST(long_lines)
{
    for (int n = 150; n < 260; n++) {
        char text[2048], path[512];
        for (int i = 0; i < n; i++) path[i] = "abc def/"[i % 8];
        path[0] = path[n - 1] = 'x';
        path[n] = 0;
        snprintf(text, sizeof text, "[data]\n; %s\ntrain = %s ; comment\nvalid=%s\n", path, path, path);
        Config c;
        OK(read_as(&c, text, "", 1));
        CHECK_MSG(strcmp(c.data.train, path) == 0 && strcmp(c.data.valid, path) == 0, "%d: %s", n, c.data.train);
        config_release(&c);
        snprintf(text, sizeof text, "[checkpoint] ; %s\nkeep = 7\n[log] # %s\nevery = 9\n", path, path);
        OK(read_as(&c, text, "", 1));
        CHECK_MSG(c.checkpoint.keep == 7 && c.log.every == 9 && c.checkpoint.every != 9, "%d", n);
        config_release(&c);
        snprintf(text, sizeof text, "[data]\n%s\n", path);
        CHECK(strcmp(complaint(text, "", 1), "t.ini:2: neither [section] nor key = value") == 0);
        /* the key ends in a comment: the value is nobody's, the next key's neither */
        snprintf(text, sizeof text, "[data]\nseed ;= %s\nvalid ;= %s\n[model]\nlayers = 3\n", path, path);
        CHECK_MSG(strcmp(complaint(text, "", 1), "2 mistakes in the configuration:\n"
                                                 "t.ini:2: neither [section] nor key = value\n"
                                                 "t.ini:3: neither [section] nor key = value") == 0,
                  "%d: %s", n, err_message());
        snprintf(text, sizeof text, "[optim]\nlr = %s\n", path);
        CHECK(strstr(complaint(text, "", 1), "t.ini:2: optim.lr = 'x") && strstr(err_message(), "not a number"));
    }
}

TEST(files_that_cannot_be_read)
{
    Config c;
    char path[] = "/tmp/test_config.XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0 && write(fd, "[run]\nseed\0= 1\n", 15) == 15);
    close(fd);
    FAILS(config_read(&c, (ConfigSource){ .path = path }), ERR_CONFIG, "not a text file");
    config_release(&c);
    CHECK(truncate(path, 2 << 20) == 0);
    FAILS(config_read(&c, (ConfigSource){ .path = path }), ERR_CONFIG, "more than");
    config_release(&c);
    unlink(path);
    FAILS(config_read(&c, (ConfigSource){ .path = path }), ERR_CONFIG, "No such file");
    config_release(&c);
    FAILS(config_read(&c, (ConfigSource){ .path = "/tmp" }), ERR_CONFIG, "not a regular file");
    config_release(&c);
}

/* (not inlined: gcc 12 would take what strstr finds in the text for a pointer into the variable that held it) */
__attribute__((noinline)) static char *dumped(const Config *c, bool origins)
{
    char *text = NULL;
    size_t n = 0;
    FILE *f = open_memstream(&text, &n);
    config_dump(c, f, origins);
    fclose(f);
    return text;
}

/* What a run leaves as its configuration is that configuration, whatever was left open. */
static void reads_back(const Config *c, int64_t world_size)
{
    Config again;
    char *text = dumped(c, false);
    OK(config_read(&again, (ConfigSource){ .path = c->path, .text = text, .world_size = world_size }));
    CHECK_MSG(same_values(c, &again), "%s", text);
    config_release(&again);
    free(text);
}

TEST(the_configurations_that_come_along)
{
    glob_t found;
    CHECK(glob("config/*.ini", 0, NULL, &found) == 0 && found.gl_pathc >= 11);
    for (size_t i = 0; i < found.gl_pathc; i++) {
        Config c;
        OK(config_read(&c, (ConfigSource){ .path = found.gl_pathv[i], .world_size = CONFIG_ANY_WORLD }));
        CHECK(strncmp(c.run.dir, "runs/", 5) == 0 && strstr(found.gl_pathv[i], c.run.name));
        reads_back(&c, CONFIG_ANY_WORLD);
        config_release(&c);
    }
    globfree(&found);
}

/* What a file's name cannot give to the manifest, or to a dump that reads back, is not taken for run.name. */
TEST(odd_names_of_files)
{
    static const char *const cases[][2] = { { "runs of\xFF.ini", "must be UTF-8" },
                                            { "a\nb.ini", "must not contain control characters" },
                                            { "a ;b.ini", "must not contain ';' after a blank (a comment)" },
                                            { "a .ini", "must not begin or end with a blank" },
                                            { "runs/ a.ini", "must not begin or end with a blank" } };
    static const char *const named[] = { "run.name=a" };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Config c;
        char want[160];
        snprintf(want, sizeof want, "run.name, from the file's name, %s: give run.name", cases[i][1]);
        FAILS(config_read(&c, (ConfigSource){ .path = cases[i][0], .text = "" }), ERR_CONFIG, want);
        CHECK(count_lines(err_message()) == 1 + (i == 1)); /* its path has a line feed */
        config_release(&c);
        OK(config_read(&c, (ConfigSource){ .path = cases[i][0], .text = "", .overrides = named, .override_count = 1 }));
        CHECK(strcmp(c.run.name, "a") == 0);
        config_release(&c);
    }
}

/* Any bytes: a report or a configuration, never a crash. */
TEST(damaged_files)
{
    static const char start[] = "[run]\nseed = 5\nname = x\n[model]\narch = llama\nlayers = 3\n[data]\nsplit = 98,2\n"
                                "[optim]\nlr = 1e-3 ; c\nschedule = wsd\n";
    uint64_t seed = 8;
    int good = 0;
    for (int i = 0; i < 3000; i++) {
        char text[sizeof start];
        memcpy(text, start, sizeof start);
        for (int k = (int)(test_rand(&seed) % 8); k >= 0; k--)
            text[test_rand(&seed) % (sizeof start - 1)] = (char)test_rand(&seed);
        Config c;
        Err err = read_as(&c, text, "", 1);
        CHECK(err == ERR_OK || (err == ERR_CONFIG && *err_message()));
        good += err == ERR_OK;
        config_release(&c);
    }
    CHECK(good < 3000);
}

/* ---- dump, explain, resume ---- */

TEST(auto_is_a_value)
{
    Config c;
    OK(read_as(&c, "[moe]\naux_coeff = auto\nexperts = 4\nbalance = aux\n[model]\nbias = false\nrope_factor = auto\n",
               "", 1));
    CHECK(c.moe.aux_coeff == 0.01 && c.model.rope_factor == 1);
    config_release(&c);
    CHECK(strstr(complaint(NULL, "optim.lr=auto", 1), "optim.lr = 'auto': not a number"));
}

TEST(least_learning_rate)
{
    Config c;
    OK(read_as(&c, NULL, "optim.lr=0.004 optim.min_lr_ratio=0.25", 1));
    CHECK(c.derived.min_lr == 0.001 && c.optim.min_lr == 0);
    char *dump = dumped(&c, false);
    config_release(&c);
    OK(config_read(&c, (ConfigSource){ .text = dump, .path = "dump", .world_size = 1 }));
    CHECK(c.derived.min_lr == 0.001);
    config_release(&c);
    free(dump);
    OK(read_as(&c, NULL, "optim.lr=0.004 optim.min_lr=0.002", 1));
    CHECK(c.derived.min_lr == 0.002);
    config_release(&c);
    CHECK(strstr(complaint(NULL, "optim.min_lr=1e-5 optim.min_lr_ratio=0.1", 1),
                 "give either min_lr or min_lr_ratio; take optim.min_lr=0"));
    CHECK(strstr(complaint("[optim]\nmin_lr = 3e-4", "optim.lr=1e-4", 1),
                 "min_lr must not be above lr; take optim.min_lr=0 optim.min_lr_ratio=0.1"));
}

TEST(a_dump_reads_back_to_the_same)
{
    char longer[3000];
    size_t n = (size_t)sprintf(longer, "data.train=1:");
    while (n < sizeof longer - 40) n += (size_t)sprintf(longer + n, ",/some/folder/%zu", n);
    const struct {
        const char *overrides;
        int64_t world_size;
    } cases[] = {
        { "", 1 },
        { "model.arch=llama model.heads=6 model.kv_heads=2 optim.lr=0.1234567890123456 optim.eps=1e-30", 1 },
        { "train.tokens=123456789 run.name=a optim.clip=0.99999999999999989 data.seed=9223372036854775807", 1 },
        { "parallel.tp=2 train.micro_batch=2 optim.schedule=wsd debug.isa=c debug.poison=true", 4 },
        { "parallel.tp=3 train.micro_batch=3 train.global_batch=12 model.norm_eps=1e-12", 6 },
        { longer, 1 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        Config a, b;
        OK(read_as(&a, NULL, cases[i].overrides, cases[i].world_size));
        for (int origins = 0; origins < 2; origins++) {
            char *text = dumped(&a, origins);
            OK(read_as(&b, text, "", cases[i].world_size));
            CHECK_MSG(same_values(&a, &b), "%s", text);
            CHECK(a.optim.lr == b.optim.lr && a.optim.eps == b.optim.eps && a.optim.clip == b.optim.clip);
            char *again = dumped(&b, false), *plain = dumped(&a, false);
            CHECK(strcmp(again, plain) == 0);
            CHECK(!strstr(plain, "; ") && (origins == 0) == (strcmp(text, plain) == 0));
            OK(config_same_run(&a, &b));
            free(text);
            free(again);
            free(plain);
            config_release(&b);
        }
        config_release(&a);
    }
}

/* A text for this key: often a good one, and else made of whatever means something to a reader of INI files. */
static void random_value(ConfigId id, char *out, size_t size, uint64_t *seed)
{
    static const char *const parts[] = { "a",        " ",    "b ", ";",  " ;", "#",        "=",    ":",
                                         "[",        "]",    "\"", "'",  "\\", "\xC3\xA9", "\x7F", "\xEF\xBB\xBF",
                                         "\xC2\xA0", "\xC3", "\t", "\r", "\v", "/",        ".ini", "0",
                                         "-",        "%s",   "," };
    const ConfigKey *key = config_key(id);
    const uint64_t kind = test_rand(seed) % 8;
    int64_t bits = (int64_t)test_rand(seed);
    double real;
    *out = 0;
    if (kind < 5) switch (key->kind) {
        case CONFIG_INT:
            if (key->has_auto && bits & 1) {
                snprintf(out, size, "auto");
                return;
            }
            snprintf(out, size, "%lld",
                     (long long)(kind == 0   ? key->int_low
                                 : kind == 1 ? key->int_high
                                             : bits >> (bits & 63)));
            return;
        case CONFIG_REAL:
            memcpy(&real, &bits, sizeof real);
            if (kind > 1) real = test_uniform(seed, key->real_low, kind > 2 ? key->real_low + 1 : key->real_high);
            snprintf(out, size, kind == 4 ? "%a" : "%.17g", real);
            return;
        case CONFIG_PICK: {
            const char *word = key->choices;
            for (uint64_t i = (uint64_t)bits % 8; i > 0 && *word; i--) word += strcspn(word, " ") + 1;
            snprintf(out, size, "%.*s", (int)strcspn(word, " "), word);
            return;
        }
        case CONFIG_BOOL:
            snprintf(out, size, "%s", (const char *[]){ "true", "off", "1", "auto" }[(uint64_t)bits % 4]);
            return;
        case CONFIG_TEXT: break;
        }
    /* a short one; one as long as a line that the reader of INI files takes whole (200); a long one */
    const size_t most = kind % 3 == 0 ? 12 : kind % 3 == 1 ? 180 + test_rand(seed) % 40 : test_rand(seed) % size;
    const uint64_t plain = test_rand(seed) % 60; /* one in so many is odd */
    for (size_t n = 0; n + 8 < (most < size ? most : size); n = strlen(out)) {
        const uint64_t odd = test_rand(seed) % (1 + plain);
        strcat(out, odd ? parts[test_rand(seed) % 3] : parts[test_rand(seed) % (sizeof parts / sizeof *parts)]);
    }
}

/* Whatever the command line takes, a file takes as the same value, and the dump of either gives it back. */
TEST(any_value_reads_back)
{
    enum { ROUNDS = 12000, KEYS = 3, ROOM = 1200 };
    static char value[KEYS][ROOM], override[KEYS][ROOM + 80], file[KEYS * (ROOM + 120)];
    const char *const overrides[KEYS] = { override[0], override[1], override[2] };
    static const int64_t worlds[] = { 1, 4, CONFIG_ANY_WORLD };
    uint64_t seed = 11;
    int good = 0, texts = 0;
    for (int round = 0; round < ROUNDS; round++) {
        const int64_t world = worlds[round % 3];
        const int count = 1 + (int)(test_rand(&seed) % KEYS);
        bool text = false, twice = false; /* a key: overrides may, a file must not */
        ConfigId ids[KEYS];
        *file = 0;
        for (int i = 0; i < count; i++) {
            const ConfigId id = ids[i] = (ConfigId)(test_rand(&seed) % CFG_COUNT);
            const ConfigKey *key = config_key(id);
            for (int k = 0; k < i; k++) twice |= ids[k] == id;
            random_value(id, value[i], ROOM, &seed);
            text |= key->kind == CONFIG_TEXT && *value[i];
            snprintf(override[i], sizeof override[i], "%s.%s=%s", key->section, key->name, value[i]);
            sprintf(file + strlen(file), "[%s]\n%s = %s%s\n", key->section, key->name, value[i],
                    strchr(value[i], '#') ? " ;" : "");
        }
        Config a, b;
        Err err = config_read(&a, (ConfigSource){ .path = "t.ini",
                                                  .text = "",
                                                  .overrides = overrides,
                                                  .override_count = count,
                                                  .world_size = world });
        CHECK(err == ERR_OK || (err == ERR_CONFIG && *err_message()));
        for (int origins = twice ? 0 : -1; err == ERR_OK && origins < 2; origins++) {
            char *dump = origins < 0 ? strdup(file) : dumped(&a, origins);
            err = config_read(&b, (ConfigSource){ .path = "t.ini", .text = dump, .world_size = world });
            CHECK_MSG(err == ERR_OK && same_values(&a, &b), "%s\n%s", err ? err_message() : "other values", dump);
            config_release(&b);
            free(dump);
            good += origins == 1, texts += origins == 1 && text;
        }
        config_release(&a);
    }
    CHECK_MSG(good >= 1000 && texts >= 120, "%d good, %d with texts", good, texts);
}

/* However long run.name is: it and run.dir, which follows from it, are whole. */
TEST(long_names_stay_whole)
{
    static const char *const parts[] = { "a", "a ", "\xC3\xA9", "x;" };
    for (size_t i = 0; i < 2 * sizeof parts / sizeof *parts; i++) {
        char override[1300] = "run.name=", want[1300];
        const char *name = override + strlen(override);
        if (i % 2) strcat(override, "b");
        while (strlen(override) < 1200) strcat(override, parts[i / 2]);
        strcat(override, "c");
        Config a, b;
        OK(config_read(&a, (ConfigSource){ .overrides = (const char *[]){ override }, .override_count = 1 }));
        snprintf(want, sizeof want, "runs/%s", name);
        CHECK(strcmp(a.run.name, name) == 0 && strcmp(a.run.dir, want) == 0);
        char *text = dumped(&a, false);
        OK(read_as(&b, text, "", 1));
        CHECK(same_values(&a, &b));
        free(text);
        config_release(&b);
        config_release(&a);
    }
}

TEST(the_dump_says_where_values_come_from)
{
    Config c;
    OK(read_as(&c, "[model]\nlayers = 3\n", "optim.lr=0.01", 1));
    char *text = dumped(&c, true);
    CHECK(strstr(text, "\nlayers = 3                           ; t.ini:2\n"));
    CHECK(strstr(text, "; command line\n") && strstr(text, "; auto\n") && strstr(text, "; default\n"));
    free(text);
    config_release(&c);
}

TEST(explain)
{
    Config c;
    char *text = NULL, full[128];
    size_t n = 0;
    OK(read_as(&c, "[model]\nlayers = 3\n", "", 1));
    for (int i = 0; i < CFG_COUNT; i++) {
        const ConfigKey *key = config_key((ConfigId)i);
        FILE *f = open_memstream(&text, &n);
        snprintf(full, sizeof full, "%s.%s", key->section, key->name);
        OK(config_explain(&c, full, f));
        fclose(f);
        CHECK_MSG(strstr(text, full) == text && strstr(text, key->meaning) && strstr(text, "default: "), "%s", text);
        CHECK_MSG(!strstr(text, "default: -1") == (i != CFG_data_start), "%s", text); /* -1 is never short for auto */
        free(text);
    }
    FILE *f = open_memstream(&text, &n);
    OK(config_explain(&c, "model.layers", f));
    OK(config_explain(&c, "optim", f));
    OK(config_explain(&c, NULL, f));
    fclose(f);
    CHECK(strstr(text, "model.layers = 3    (t.ini:2)\n    integer, 1 to 1024; default: 12; fixed on resume\n") ==
          text);
    CHECK(strstr(text, "optim.beta1 = 0.9") && strstr(text, "debug.isa = auto"));
    CHECK(strstr(text, "\nmodel.rope_factor = 1    (auto)\n    number, 1 to 1000000, or auto; default: auto; "));
    FAILS(config_explain(&c, "optim.lrr", stdout), ERR_CONFIG, "there is no key 'optim.lrr'");
    CHECK(strcmp(err_hint_text(), "did you mean 'optim.lr'?") == 0);
    FAILS(config_explain(&c, "modl", stderr), ERR_CONFIG, "there is no key 'modl'");
    CHECK(strcmp(err_hint_text(), "did you mean 'model'?") == 0);
    FAILS(config_explain(&c, "lr", stdout), ERR_CONFIG, "there is no key 'lr'");
    CHECK(strcmp(err_hint_text(), "did you mean 'optim.lr'?") == 0);
    FAILS(config_explain(&c, "xyzxyz", stdout), ERR_CONFIG, "there is no key 'xyzxyz'");
    CHECK(err_hint_text()[0] == 0);
    free(text);
    config_release(&c);
}

TEST(what_may_change_on_resume)
{
    Config was, now;
    OK(read_as(&was, NULL, "", 2));
    OK(read_as(&now, NULL,
               "train.steps=2000 train.stop_at=3 log.every=7 train.eval_every=5 parallel.tp=2 train.micro_batch=2 "
               "run.dir=elsewhere debug.isa=c checkpoint.keep=9 run.reproducible=run",
               2));
    OK(config_same_run(&was, &now));
    config_release(&now);
    OK(read_as(&now, NULL, "optim.lr=0.01 model.layers=3 log.every=2", 2));
    FAILS(config_same_run(&was, &now), ERR_CKPT, "optim.lr was '0.0003' and is '0.01'");
    CHECK(strstr(err_message(), "model.layers was '12' and is '3'") && !strstr(err_message(), "log.every"));
    config_release(&now);
    config_release(&was);
    OK(read_as(&was, NULL, "model.vocab=257", 1));
    OK(read_as(&now, NULL, "", 1)); /* 0: the tokenizer's, which the caller knows */
    OK(config_same_run(&was, &now));
    OK(config_same_run(&now, &was));
    config_release(&now);
    OK(read_as(&now, NULL, "model.vocab=258", 1));
    FAILS(config_same_run(&was, &now), ERR_CKPT, "model.vocab was '257' and is '258'");
    config_release(&was);
    config_release(&now);
}

/* A dump in which keys that older programs did not have are comments. */
static void dump_older(const Config *c, char *text, int size)
{
    static const char *const later[] = { "\nfp8_experts = ", "\nfp32_residual = ", "\nfp32_vectors = ",
                                        "\nfp32_row_sums = " };
    char *all = dumped(c, false);
    CHECK(snprintf(text, (size_t)size, "%s", all) < size);
    free(all);
    for (int i = 0; i < 4; i++) {
        char *line = strstr(text, later[i]);
        CHECK(line && !strstr(line + 1, later[i]));
        line[1] = ';';
    }
}

/* A checkpoint of a program without a key says what that program did, not what `auto` comes to since. */
TEST(keys_that_an_older_program_lacked)
{
    static const char *const runs[] = { "run.precision=bf16", "run.precision=fp32",
                                        "run.precision=fp8 run.fp8=blockwise " MIXTURE,
                                        "run.precision=fp8 run.fp8=mxfp8 " MIXTURE };
    for (int i = 0; i < 4; i++) {
        Config now, was, as_read;
        char set[256], text[16384];
        OK(read_as(&now, NULL, runs[i], 1));
        dump_older(&now, text, sizeof text);
        const ConfigSource older = { .text = text, .path = "older", .world_size = 1, .earlier = true };
        OK(config_read(&was, older));
        CHECK(!was.run.fp32_residual && !was.run.fp32_vectors && !was.run.fp32_row_sums && !was.run.fp8_experts);
        CHECK(now.run.fp32_residual && now.run.fp32_vectors && now.run.fp32_row_sums &&
              now.run.fp8_experts == (i >= 2));
        if (i == 1) OK(config_same_run(&was, &now)); /* (all is fp32) */
        else FAILS(config_same_run(&was, &now), ERR_CKPT, "run.fp32_vectors was 'false' and is 'true'");
        config_release(&now);
        snprintf(set, sizeof set, "%s run.fp32_residual=false run.fp32_vectors=false run.fp8_experts=false", runs[i]);
        OK(read_as(&now, NULL, set, 1));
        OK(config_same_run(&was, &now));
        OK(read_as(&as_read, text, "", 1)); /* a file that somebody writes today */
        CHECK(as_read.run.fp32_residual && as_read.run.fp32_vectors && as_read.run.fp32_row_sums &&
              as_read.run.fp8_experts == (i >= 2));
        config_release(&as_read);
        config_release(&was);
        config_release(&now);
    }
}

/* What a text does say stands, whether a dump says it or a word beside. */
TEST(keys_that_an_older_program_had)
{
    static const char *const words[] = { "run.fp32_vectors=true" };
    Config c;
    OK(config_read(&c, (ConfigSource){ .text = "[run]\nprecision = bf16\nfp32_residual = true\n", .path = "older",
                                       .overrides = words, .override_count = 1, .world_size = 1, .earlier = true }));
    CHECK(c.run.fp32_residual && c.run.fp32_vectors && !c.run.fp8_experts);
    config_release(&c);
}

/* A program whose streams and vectors were fp32, and a mixture's sums of rows not: of a dense model there are none. */
TEST(sums_of_rows_in_an_older_run)
{
    static const char *const runs[] = { "run.precision=bf16", "run.precision=fp32 " MIXTURE,
                                        "run.precision=bf16 " MIXTURE,
                                        "run.precision=bf16 run.fp32_residual=false " MIXTURE,
                                        "run.precision=fp16 run.fp32_vectors=false " MIXTURE };
    for (int i = 0; i < 5; i++) {
        Config now, was;
        char text[16384];
        OK(read_as(&now, NULL, runs[i], 1));
        char *all = dumped(&now, false), *line = strstr(all, "\nfp32_row_sums = ");
        CHECK(line && now.run.fp32_row_sums == (i < 3));
        line[1] = ';';
        snprintf(text, sizeof text, "%s", all);
        free(all);
        OK(config_read(&was, (ConfigSource){ .text = text, .path = "older", .world_size = 1, .earlier = true }));
        CHECK(!was.run.fp32_row_sums && was.run.fp32_residual == now.run.fp32_residual &&
              was.run.fp32_vectors == now.run.fp32_vectors);
        if (i != 2) OK(config_same_run(&was, &now));
        else FAILS(config_same_run(&was, &now), ERR_CKPT, "run.fp32_row_sums was 'false' and is 'true'");
        config_release(&was);
        config_release(&now);
    }
}

/* A program that wrote 1f1b and 1 where vpp, slices or a layout had said what else is run. */
TEST(pipelines_of_an_older_run)
{
    static const struct {
        const char *text, *schedule;
        int64_t vpp;
    } runs[] = { { "vpp = 2\nschedule = 1f1b\n", "interleaved", 2 },
                 { "vpp = 1\nschedule = zb-v\n", "zb-v", 0 },
                 { "vpp = 1\nslices = 2\nschedule = 1f1b\n", "seq1f1b", 0 },
                 { "vpp = 1\nschedule = 1f1b\n", "1f1b", 0 } };
    for (size_t i = 0; i < sizeof runs / sizeof *runs; i++) {
        Config was;
        char text[200];
        snprintf(text, sizeof text, "[parallel]\n%s", runs[i].text);
        OK(config_read(&was, (ConfigSource){ .text = text, .path = "older", .world_size = 1, .earlier = true }));
        CHECK(strcmp(was.parallel.schedule, runs[i].schedule) == 0 && was.parallel.vpp == runs[i].vpp);
        config_release(&was);
        OK(read_as(&was, text, "", 1)); /* a file that somebody writes today */
        CHECK(was.parallel.vpp == (runs[i].vpp ? runs[i].vpp : 1));
        config_release(&was);
    }
}

/* No shell leaves a comment in a word; a file says with a ';' that '#' is part of the value, as each dump does. */
TEST(hashes_in_texts_read_back)
{
    static const char *const words[] = { "run.name=#try #3", "data.train=0.5 d/x 0.5 d #2/y", "run.dir=runs/#1" };
    Config c, again;
    ConfigLine k = { 0 };
    int seen = 0;
    OK(config_read(&c, (ConfigSource){ .overrides = words, .override_count = 3 }));
    CHECK(!strcmp(c.run.name, "#try #3") && !strcmp(c.data.train, "0.5 d/x 0.5 d #2/y"));
    for (int origins = 0; origins < 2; origins++) {
        char *text = dumped(&c, origins);
        OK(read_as(&again, text, "", 1));
        CHECK(same_values(&c, &again));
        config_release(&again);
        for (const char *at = text; !origins && config_dump_next(&at, &k);)
            seen += k.value_bytes == 7 && !strncmp(k.value, "#try #3", 7);
        free(text);
    }
    CHECK(seen == 1);
    config_release(&c);
}

/* The text alone says which program wrote it. */
TEST(pipelines_of_an_older_run_with_words)
{
    static const char *const words[] = { "train.eval_samples=100" };
    Config was;
    OK(config_read(&was, (ConfigSource){ .text = "[parallel]\nvpp = 2\nschedule = 1f1b\n", .path = "older",
                                         .overrides = words, .override_count = 1, .world_size = 1, .earlier = true }));
    CHECK(!strcmp(was.parallel.schedule, "interleaved") && was.train.eval_samples == 100);
    config_release(&was);
    OK(config_read(&was, (ConfigSource){ .text = "[parallel]\nvpp = 1\n[train]\neval_samples = 0\n", .path = "new",
                                         .overrides = words, .override_count = 1, .world_size = 1, .earlier = true }));
    CHECK(was.parallel.vpp == 1);
    config_release(&was);
}

/* A GPU's run of a width that GPUs are no longer given can still be read, for another device. */
TEST(widths_of_an_older_run)
{
    ConfigSource s = { .text = "[run]\ndevice = cuda\n[model]\nhidden = 764\nhead_dim = 64\nffn = 3060\n",
                       .path = "older", .world_size = 1, .earlier = true };
    Config was;
    FAILS(config_read(&was, s), ERR_CONFIG, "rows of products begin on 16 bytes");
    config_release(&was);
    s.compared = true;
    OK(config_read(&was, s));
    CHECK(was.model.hidden == 764 && was.model.ffn == 3060);
    config_release(&was);
}

TEST(what_may_differ_by_name)
{
    Config was, now;
    OK(read_as(&was, NULL, "", 1));
    OK(read_as(&now, NULL, "optim.lr=0.01 optim.clip=2 data.seed=5", 1));
    OK(config_let_differ(&now, "optim.lr,data.seed"));
    FAILS(config_same_run(&was, &now), ERR_CKPT, "configuration: optim.clip was '1' and is '2'");
    CHECK(strstr(err_hint_text(), "--override"));
    OK(config_let_differ(&now, "optim.clip"));
    OK(config_same_run(&was, &now));
    CHECK(config_differs(&was, &now, CFG_optim_clip) && !config_differs(&was, &now, CFG_optim_beta1));
    OK(config_let_differ(&now, "data.train,data.tokenizer")); /* whose content counts */
    FAILS(config_let_differ(&now, "optim.lr,optim.clipp"), ERR_CONFIG, "--override: there is no key 'optim.clipp'");
    CHECK(strcmp(err_hint_text(), "did you mean 'optim.clip'?") == 0);
    FAILS(config_let_differ(&now, "lr"), ERR_CONFIG, "there is no key 'lr'");
    FAILS(config_let_differ(&now, "optim.lr,"), ERR_CONFIG, "there is no key ''");
    FAILS(config_let_differ(&now, ""), ERR_CONFIG, "there is no key ''");
    FAILS(config_let_differ(&now, "train.steps"), ERR_CONFIG, "'train.steps' may change on resume without it");
    config_release(&was);
    config_release(&now);
}

TEST_MAIN
