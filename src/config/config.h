/*
 * The configuration: one struct, made from the table in config.def, as cfg.model.layers, cfg.optim.lr, ...
 *
 * Values come from the default, then the INI file, then section.key=value of the command line, where the later of two
 * wins (in a file a key that is given twice is a mistake); config_read collects every mistake of all of them, with file
 * and line, and reports all at once. It then fills in what was left 'auto' or 0 (config_resolve.c says how), checks the
 * relations between keys, and refuses what this build cannot do. A Config that config_read returned is complete and
 * consistent: after it no PICK is AUTO where there is something to choose (log.color and debug.isa stay), no BOOL is
 * AUTO, and `derived` is set. Still open: model.vocab == 0 (the tokenizer decides), derived.open_micro_batch and empty
 * texts that mean "none".
 */
#ifndef MEGATRAIN_CONFIG_CONFIG_H
#define MEGATRAIN_CONFIG_CONFIG_H

#include <stdint.h>
#include <stdio.h>

#include "base/activation.h"
#include "base/arena.h"
#include "base/batch_ramp.h"
#include "base/choices.h"
#include "base/dispatcher.h"
#include "base/fp8_recipe.h"
#include "base/layer_set.h"

/* Source of a value. AUTO: filled in, from the recipe or from other keys. */
typedef enum { ORIGIN_DEFAULT, ORIGIN_AUTO, ORIGIN_FILE, ORIGIN_COMMAND_LINE } ConfigOriginKind;
typedef struct {
    ConfigOriginKind kind;
    int line; /* line of the file */
} ConfigOrigin;

/* Ids of keys: CFG_model_layers, ... */
typedef enum {
#define ANY(section, key) CFG_##section##_##key,
#include "config/config.def"
    CFG_COUNT
} ConfigId;

typedef struct {
#define SECTION(section) struct {
#define SECTION_END(section) \
    }                        \
    section;
#define INT(section, key, ...) int64_t key;
#define REAL(section, key, ...) double key;
#define BOOL(section, key, ...) int key;
#define C(name, text) name,
#define PICK(section, key, start, choices, ...) enum { choices } key;
#define WORD(section, name, key, start, choices, ...) enum { choices } name;
#define ONE_OF(section, key, start, Type, ...) Type key;
#define TEXT(section, key, ...) const char *key;
#include "config/config.def"
#undef C

    struct {
        int64_t world_size, dp; /* ranks; data-parallel ranks */
        bool any_world;         /* the first was asked for as CONFIG_ANY_WORLD */
        int gpus;               /* GPUs of this host */
        bool pairs, tiles;      /* its processor has VDPBF16PS; TDPBF16PS */
        BatchRamp batch;        /* train.global_batch */
        int64_t global_batch;   /* samples of the largest step */
        /* train.micro_batch is auto: until somebody chooses (plan/micro_batch.h) it is the least that the rules take */
        bool open_micro_batch;
        int64_t eval_samples; /* most samples of each validation set; 0: all */
        /* Micro-batches of that step on one rank: global_batch / (micro_batch * dp). */
        int64_t microbatches;
        int64_t steps;                   /* steps of the whole run, also when train.tokens is given */
        double min_lr;                   /* optim.min_lr, or min_lr_ratio's share of lr */
        int64_t decay_steps;             /* optim.decay_steps, or steps */
        int64_t wsd_decay;               /* optim.wsd_decay, or a tenth of decay_steps, at least 1 */
        int64_t trace_first, trace_last; /* log.trace_steps; 0: none */
        LayerPattern mixer;              /* model.mixer: of each block its MixerWord */
        LayerPattern ffn_layers;         /* model.ffn_layers: 1: the block has a feed-forward layer */
        LayerPattern cp_comm;            /* parallel.cp_comm: of each block its ContextComm */
        int64_t cp_heads;                /* parallel.cp_heads, or what is usual */
        LayerPattern recompute;          /* train.recompute: of each layer of a stage its Recompute */
    } derived;

    ConfigOrigin origin[CFG_COUNT];
    bool may_differ[CFG_COUNT]; /* from the checkpoint that a run goes on from: config_let_differ */
    const char *path;           /* the file; "" if none */
    SetupArena memory;          /* memory of the texts */
} Config;

typedef enum { CONFIG_INT, CONFIG_REAL, CONFIG_BOOL, CONFIG_PICK, CONFIG_TEXT } ConfigKind;

/* A line of the table. */
typedef struct {
    const char *section, *name, *meaning;
    const char *choices; /* PICK: words, in the enum's order */
    ConfigKind kind;
    bool fixed;     /* must not change on resume */
    bool has_auto;  /* may be 'auto', which is CONFIG_AUTO until config_resolve */
    int64_t offset; /* in Config */
    int64_t int_low, int_high;
    double real_low, real_high;
} ConfigKey;

/* An integer's 'auto', until config_resolve. */
enum { CONFIG_AUTO = -1 };

/* CONFIG_ANY_WORLD: for who reads about a run and is not part of it: as many ranks as its layout takes at the least. */
enum { CONFIG_ANY_WORLD = -1, CONFIG_RANKS_MAX = 1 << 20 };

/* The longest file. */
enum { CONFIG_FILE_MAX_BYTES = 1 << 20 };

/* Source of a configuration. `path`, `text` or neither; `text` is what config_dump wrote, `path` then only names it. */
typedef struct {
    const char *path, *text;
    const char *const *overrides; /* section.key=value */
    int override_count;
    int64_t world_size; /* ranks, at most CONFIG_RANKS_MAX; 0 counts as 1; CONFIG_ANY_WORLD */
    int gpus;           /* GPUs of this host, for run.device = auto */
    bool pairs, tiles;  /* its processor has VDPBF16PS; TDPBF16PS; for debug.dot = auto */
    bool earlier;       /* `text` may be an older program's: of keys that it had not, what it did */
    bool compared;      /* it is read to be compared, or for its weights: its device need not take it */
    /* Asked only of what has mistakes already, so that they are all named at once: what else there is against it, given
     * the keys that are complained of (NULL: nobody is asked). Its ERR_CONFIG is one more of them. */
    Err (*judge)(const Config *c, const bool doubtful[CFG_COUNT]);
} ConfigSource;

/*
 * Reads, completes and checks. Owns: the texts, freed by config_release, which is needed after a failure too.
 * Errors: ERR_CONFIG with all mistakes, one a line; an unreadable file is one. ERR_MEMORY.
 */
Err config_read(Config *c, ConfigSource source);
void config_release(Config *c);

/*
 * c, which config_read returned, with other values: "section.key=value", several parted by blanks. What was filled in
 * is filled in anew. False where that breaks a rule between keys that c keeps. *out has texts of c: release it first,
 * also after false.
 */
bool config_with(const Config *c, const char *values, Config *out);

/* The same for so many ranks, 0: for c's. ERR_CONFIG, with the first mistake, where any rule is broken. ERR_MEMORY. */
Err config_for(const Config *c, int64_t ranks, const char *values, Config *out);

/* Whether such values can be read, rules between keys aside. ERR_CONFIG, with the first that is no key or no value of
 * it. ERR_MEMORY. */
Err config_can_read(const Config *c, const char *values);

/* model.activation, once it is no longer auto. */
Activation config_activation(const Config *c);

/* run.fp8, as layers know it. */
static inline Fp8Recipe config_fp8_recipe(const Config *c) { return (Fp8Recipe)(FP8_NONE + 1 + c->run.fp8); }

/* hidden / optim.mup_base; 1 where there is none. */
float config_mup_width(const Config *c);

bool config_is_latent(const Config *c); /* attention, where blocks have any, is latent attention */
/* Some block has Gated DeltaNet; Mamba-2; Kimi Delta Attention; some has attention, of any kind. */
static inline bool config_has_delta(const Config *c) { return layer_pattern_has(&c->derived.mixer, MIXER_WORD_DELTA); }
static inline bool config_has_mamba(const Config *c) { return layer_pattern_has(&c->derived.mixer, MIXER_WORD_MAMBA2); }
static inline bool config_has_kda(const Config *c) { return layer_pattern_has(&c->derived.mixer, MIXER_WORD_KDA); }
static inline bool config_has_states(const Config *c)
{
    return config_has_delta(c) || config_has_mamba(c) || config_has_kda(c);
}
static inline bool config_has_attention(const Config *c)
{
    return layer_pattern_has(&c->derived.mixer, MIXER_WORD_ATTENTION);
}

/* INI text that reads back to exactly the same values; with `origins`, each line says where it came from. */
void config_dump(const Config *c, FILE *out, bool origins);

/* A key of such a text, which may be damaged or of another version. */
typedef struct {
    char section[64];
    const char *name, *value; /* point into the text */
    int name_bytes, value_bytes;
} ConfigLine;

/* The next key, from *at on; `line` is zero at first. False at the end. */
bool config_dump_next(const char **at, ConfigLine *line);

/* Meaning, range, default and present value of "section.key", of all keys of "section", or of all (NULL).
 * ERR_CONFIG, with the nearest key, when there is no such thing. */
Err config_explain(const Config *c, const char *key, FILE *out);

int config_unit_div(const Config *c);  /* into how many units the schedule divides a micro-batch's samples */
bool config_has_dots(const Config *c); /* debug.dot counts: the run is the CPU's, in bf16 */

/* Has a FIXED key another value? model.vocab 0 is no difference, nor is optim.decay_steps that comes to the same. */
bool config_differs(const Config *was, const Config *now, ConfigId id);

/* ERR_CKPT, naming each key that differs and both values, but those that now->may_differ. */
Err config_same_run(const Config *was, const Config *now);

/*
 * train --override: `names` (section.key, parted by commas) may differ from the checkpoint that the run goes on from.
 * ERR_CONFIG: no such key, or one that may change anyway.
 */
Err config_let_differ(Config *c, const char *names);

/* A list for parallel.cp_comm: ways of blocks with states, and of all others. */
enum { CONFIG_WAYS_BYTES = 20 * PATTERN_RUNS };
void config_ways(const Config *c, const char *state_way, const char *way, char list[CONFIG_WAYS_BYTES]);

/* ---- the table, for those who walk it ---- */

enum { CONFIG_VALUE_BYTES = 32 };

const ConfigKey *config_key(ConfigId id);
bool config_find(const char *section, const char *name, ConfigId *id);
/* The value as in the INI form: `buf`, or the text itself for TEXT keys. */
const char *config_value(const Config *c, ConfigId id, char buf[CONFIG_VALUE_BYTES]);
/* Values that a key may have ("integer, 1 to 1024"), and the one that it has when nothing is said. */
void config_range(ConfigId id, char *out, int size_bytes);
const char *config_default(ConfigId id, char buf[CONFIG_VALUE_BYTES]);
/* "default", "auto", "command line" or "FILE:LINE". */
void config_origin(const Config *c, ConfigId id, char *out, int size_bytes);
/* The key most like "name" in `section` (also if it belongs elsewhere), at most 2 edits away; CFG_COUNT if
 * there is none. */
ConfigId config_nearest(const char *section, const char *name);

/* Keys that an unknown "section.name" may mean (section "": it was given without one): by another framework's name
 * (config_meant.c), of any section, or the nearest. Returns how many, 0 to CONFIG_MEANT. */
enum { CONFIG_MEANT = 4, CONFIG_SUGGEST_BYTES = 320 };
int config_meant(const char *section, const char *name, ConfigId out[CONFIG_MEANT]);
/* The same as a question: "did you mean 'section.key' or ...?", or a note where there is none here; "" if nothing is
 * known. With another framework's `value` 'section.key=' and ours for it; where it is the same, it is said if section
 * is "". Returns out. */
const char *config_suggest(const char *section, const char *name, const char *value, char out[CONFIG_SUGGEST_BYTES]);

#endif
