/*
 * Choices of the planner: values of the keys that say how a model is cut over ranks. A space is the values of each key
 * that are looked at; those on the command line are fixed. The configuration's own rules say whether a layout is legal.
 */
#ifndef MEGATRAIN_PLAN_LAYOUT_H
#define MEGATRAIN_PLAN_LAYOUT_H

#include "config/config.h"
#include "param/param.h"

/* The keys: KEY(NAME, section, key). Those up to LAYOUT_INNER decide what a rank does in a block. */
#define LAYOUT_KEY_LIST(KEY)                \
    KEY(TP, parallel, tp)                   \
    KEY(SP, parallel, sp)                   \
    KEY(CP, parallel, cp)                   \
    KEY(CP_COMM, parallel, cp_comm)         \
    KEY(MICRO_BATCH, train, micro_batch)    \
    KEY(RECOMPUTE, train, recompute)        \
    KEY(EP, parallel, ep)                   \
    KEY(ETP, parallel, etp)                 \
    KEY(DISPATCHER, moe, dispatcher)        \
    KEY(PP, parallel, pp)                   \
    KEY(VPP, parallel, vpp)                 \
    KEY(SCHEDULE, parallel, schedule)       \
    KEY(ZERO, parallel, zero)               \
    KEY(ORDER, parallel, order)             \
    KEY(OVERLAP_MOE, parallel, overlap_moe) \
    KEY(OVERLAP_TP, parallel, overlap_tp)

typedef enum {
#define KEY(name, section, key) LAYOUT_##name,
    LAYOUT_KEY_LIST(KEY)
#undef KEY
        LAYOUT_KEYS
} LayoutKey;

enum { LAYOUT_DENSE = LAYOUT_EP, LAYOUT_INNER = LAYOUT_PP, LAYOUT_VALUES = 48, LAYOUT_TEXT = 128 };

/* Numbers of words where the key has words: of LayoutSpace.word, or of the key's choices. */
typedef struct {
    int value[LAYOUT_KEYS];
    char stages[LAYOUT_TEXT]; /* parallel.layout; "": even shares */
} Layout;

/* The space that is looked at: without a file's layout keys, but with the command line's. */
typedef struct {
    const Config *base;      /* legal, with the fixed values; all others of it are replaced */
    int64_t world;           /* ranks */
    bool fixed[LAYOUT_KEYS]; /* the base's value alone; its word is word[key] */
    bool fixed_stages;       /* parallel.layout is given */
    int count[LAYOUT_KEYS], value[LAYOUT_KEYS][LAYOUT_VALUES];
    const char *word[LAYOUT_KEYS];
} LayoutSpace;

/* Limits of the space, where a key is not given. */
typedef struct {
    int tp_most;        /* tensor-parallel ranks: those of a host */
    int64_t cp_tokens;  /* positions of a sequence that a rank of cp has at least */
    int64_t batch_most; /* samples of a micro-batch */
} LayoutLimits;

/*
 * Reads what a space stands on: `source`, whose overrides are the command line's, for any number of ranks. Layout keys
 * of the file need not be legal together with those of the command line, which say what is fixed. As config_read.
 */
Err layout_base(ConfigSource source, Config *out);

/* Is the key fixed by the command line? (Not by train.micro_batch=auto.) base: layout_base's. */
bool layout_key_is_given(const Config *base, ConfigId id);

void layout_space(const Config *base, int64_t world, LayoutLimits limits, LayoutSpace *out);

/* The base with a layout's values. Release *out in any case. Errors: those of config_for. */
Err layout_config(const LayoutSpace *s, const Layout *l, Config *out);

/* "parallel.tp=8 parallel.sp=auto ...", without what is fixed. */
enum { LAYOUT_WORDS = 640 + CONFIG_WAYS_BYTES };
void layout_words(const LayoutSpace *s, const Layout *l, char out[LAYOUT_WORDS]);

/* The value as in a configuration; the name of the schedule, and of the key ("parallel.tp"). */
const char *layout_text(const LayoutSpace *s, const Layout *l, LayoutKey key, char buf[CONFIG_VALUE_BYTES]);
const char *layout_schedule(const LayoutSpace *s, const Layout *l);
const char *layout_key_name(LayoutKey key, char buf[CONFIG_VALUE_BYTES]);

/* Data-parallel ranks, and micro-batches of a step on each; 0 where that does not divide. */
int64_t layout_dp(const LayoutSpace *s, const Layout *l);
ZeroCut layout_zero(const LayoutSpace *s, const Layout *l); /* states that are cut, after parallel.reshard */
/* The layout with the next value of parallel.zero that cuts more; false: there is none, or it cuts nothing more. */
bool layout_cut_more(const LayoutSpace *s, Layout *l);
int64_t layout_microbatches(const LayoutSpace *s, const Layout *l);

/* Is the key's value the space's first? Gives the keys from `from` on the first. */
bool layout_is_first(const LayoutSpace *s, const Layout *l, LayoutKey key);
void layout_take_first(const LayoutSpace *s, Layout *l, int from);

/* Gives *l the first number of pipeline ranks from number `at` on with which all is divided, and says which it is;
 * LAYOUT_VALUES: there is none. */
int layout_next_pp(const LayoutSpace *s, Layout *l, int at);

/* A total order, for equal answers everywhere. */
int layout_compare(const Layout *a, const Layout *b);

#endif
