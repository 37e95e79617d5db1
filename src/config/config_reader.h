/* Shared by the files of the configuration alone: one reading of a configuration, and its list of mistakes. */
#ifndef MEGATRAIN_CONFIG_CONFIG_READER_H
#define MEGATRAIN_CONFIG_CONFIG_READER_H

#include "base/choices.h"
#include "config/config.h"

enum { CONFIG_REPORT_BYTES = 12288, CONFIG_BROKEN = 128, USUAL_ATTN_BLOCK = 64 };

/* A rule: the line that states it, and the first of the keys it is about. */
typedef struct {
    const char *function;
    int line;
    ConfigId key;
} ConfigRule;

typedef struct ConfigReader ConfigReader;
struct ConfigReader {
    Config *config;
    bool written;             /* the text that is read was written by a run, not by a user */
    bool compared;            /* as ConfigSource's */
    bool bare;                /* the value that is read stands in a user's file, and no comment with ';' behind it */
    bool bad[CFG_COUNT];      /* its value was refused: rules about it are not looked at */
    bool doubtful[CFG_COUNT]; /* a rule about it is broken */
    int mistakes;
    int64_t report_used;
    char report[CONFIG_REPORT_BYTES]; /* a line each */
    Err memory;                       /* ERR_MEMORY once a text could not be stored */

    ConfigRule broken[CONFIG_BROKEN];
    int broken_count;           /* mistakes against rules; more than CONFIG_BROKEN are only counted */
    const ConfigReader *before; /* all that is broken, while ways out are looked for; NULL: they are not */
    /* Makes `now` of a configuration with other values, and other ranks unless 0, and says what is wrong with it. */
    void (*again)(ConfigReader *now, const Config *c, const char *values, int64_t ranks);
    bool holds;       /* the last rule */
    int ways, trials; /* out of the last rule, so far; looked at, of all rules */
};

extern const Config config_defaults; /* the values of config.def */

/* Adds a line to the report. */
void config_complain(ConfigReader *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Is the report full? Further mistakes are counted, not read: no need to look for the nearest key. */
bool config_report_is_full(const ConfigReader *r);

/* A text of any length in the configuration's own memory; "" and r->memory set where there is none. */
const char *config_keep(ConfigReader *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* Mistake of a text as a value; NULL: none. A value is what an INI file can hold, so that a dump always reads back, and
 * what a checkpoint's manifest can, which is JSON. */
const char *config_text_fault(const char *text);

/* Would somebody read '#' in it as the beginning of a comment? In a file it takes one with ';' behind it, if an empty
 * one. */
bool config_seems_commented(const char *text);

const char *config_nearest_section(const char *name); /* at most 2 edits away; NULL if none */

/* Is each rule that is broken `now` one that was? Neither are other mistakes more. */
bool config_breaks_no_more(const ConfigReader *now, const ConfigReader *was);

/* Takes a file's text, the file itself, a "section.key=value". */
void config_read_text(ConfigReader *r, const char *text);
Err config_read_file(ConfigReader *r, const char *path); /* ERR_CONFIG: it cannot be read */
void config_read_override(ConfigReader *r, const char *text);

/* Fills keys that the text lacks as programs did that did not have the keys yet. To be called before a command line is
 * read. */
void config_read_before(ConfigReader *r);

/* ---- facts of a configuration (config_resolve.c) ---- */

bool config_is_default(const Config *c, ConfigId id);       /* is its value that of config_defaults? */
bool config_schedule_is(const Config *c, const char *name); /* with '+split' behind the name, too */
bool config_updates_in_step(const Config *c);               /* (the other schedules update once a step) */
int64_t config_qkv_width(const Config *c);                  /* outputs of the projection to queries, keys and values */
/* The dense layers' ranks, and the experts', of one data-parallel replica. */
int64_t config_dense_ranks(const Config *c);
int64_t config_expert_ranks(const Config *c);

/* ---- completing and judging ---- */

/* The two stages after reading, in this order. */
void config_resolve(ConfigReader *r);
void config_check(ConfigReader *r);
void config_check_rules(ConfigReader *r); /* config_check without ways out */
void config_check_moe(ConfigReader *r);   /* parts of config_check */
void config_check_context(ConfigReader *r);
/* config_check_slices.c; fit: they cut between canonical blocks alone */
void config_check_slices(ConfigReader *r);
bool config_slices_fit(const Config *c);

/* The mistake of a list over blocks: as many were read as the length says, and it must have this form. */
const char *config_list_text(int64_t length, const char *form);

/* The pattern of parallel.cp_comm; as layer_pattern_read_words. */
int64_t config_cp_comm(const Config *c, LayerPattern *out);

/* The pattern of model.mixer; as layer_pattern_read_words. */
int64_t config_mixer(const Config *c, LayerPattern *out);

/* The pattern of train.recompute; as layer_pattern_read_words. */
int64_t config_recompute(const Config *c, LayerPattern *out);

/* Do ranks of cp meet in this way in some block with that mixer? */
bool config_meets(const Config *c, MixerWord mixer, ContextComm way);
/* Takes a list for parallel.cp_comm: of blocks with states, and of all others. */
void config_take_ways(ConfigReader *r, const char *state_way, const char *way);
/* Neighbours along cp that exchange heads: parallel.cp_heads, or what is usual. Reads derived.cp_comm. */
int64_t config_cp_heads(const Config *c);
void config_check_attention(ConfigReader *r);
void config_check_mixer(ConfigReader *r); /* is the list one? To be called before all rules about its blocks */

/* A relation between keys: where it does not hold, the text is complained of with all of them, at the first. */
#define KEY_IDS(...) \
    (const ConfigId[]) { __VA_ARGS__ }
#define RULE(holds, text, ...)                                                \
    config_check_rule(r, (holds), (text),                                     \
                      (ConfigKeys){ __func__, __LINE__, KEY_IDS(__VA_ARGS__), \
                                    (int)(sizeof KEY_IDS(__VA_ARGS__) / sizeof(ConfigId)) })
typedef struct {
    const char *function;
    int line;
    const ConfigId *ids;
    int count;
} ConfigKeys;
void config_check_rule(ConfigReader *r, bool holds, const char *text, ConfigKeys keys);

/*
 * Ways out of the rule that stands just before (config_hint.c). Each is tried: it is named, behind the complaint, only
 * if with it that rule holds and no other is broken that was not. Where the rule holds nothing is done.
 *
 * config_take: "section.key=value", several parted by blanks; several ways parted by ", or ".
 * config_take_near: the nearest values of an integer below and above. config_take_ranks: of the number of ranks, of
 * multiples of `unit`.
 */
void config_take(ConfigReader *r, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
void config_take_near(ConfigReader *r, ConfigId id);
void config_take_ranks(ConfigReader *r, int64_t unit);

#endif
