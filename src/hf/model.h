/*
 * Shared by the files of hf/ alone: what a config.json says of a model (HfModel), the table of its keys (keys.def) and
 * the table of classes (class.c). Both directions go through HfModel:
 *
 *   config.json  ->  config_read.c  ->  HfModel  ->  config_ini.c  ->  INI text
 *   config.json  <-  config_write.c  <-  HfModel  <-  config_say.c  <-  Config
 */
#ifndef MEGATRAIN_HF_MODEL_H
#define MEGATRAIN_HF_MODEL_H

#include "base/choices.h"
#include "base/json.h"
#include "hf/class.h"

enum { HF_NONE = -1 }; /* a number that is null or absent, where that means something */

typedef enum { HF_GREEDY, HF_GROUP_LIMITED } HfTopkMethod;

/* Members are numbers that keys.def has names and meanings for; those of a class that lacks a key have its default, and
 * are not looked at if nothing of the class reads them. */
typedef struct {
    int64_t layers, hidden, heads, kv_heads, head_dim, ffn, positions, vocab;
    int64_t tied, attention_bias, out_bias, mlp_bias, qk_norm;
    int64_t post_norms;           /* norms behind branches, too */
    int64_t parallel, norm_count; /* layers of a block stand in parallel; behind so many norms of its input */
    int64_t one_kv, grouped;      /* Falcon: one head of keys and values; kv_heads of them */
    int64_t gelu;                 /* 0: the exact one */
    double eps, init_std, attention_dropout, branch_dropout, embedding_dropout;
    double mlp_dropout; /* behind feed-forward layers alone */

    int64_t window, use_window;      /* window of the blocks that have one */
    int64_t full_layers, period;     /* blocks before the first that has one; every so many blocks one has none */
    int64_t typed;                   /* blocks that layer_types is about; 0: absent */
    LayerSet sliding;                /* layer_types' blocks with a window; of a hybrid, with linear attention */
    double attention_cap, final_cap; /* 0 or HF_NONE: none */
    int64_t query_scalar;            /* scores are divided by its root; 0: of head_dim */
    int64_t scaled;                  /* embeddings are multiplied by the root of their width */
    /* what the class multiplies or divides; 0: it does not */
    double embedding_factor, branch_factor, score_factor, logits_divisor, logits_factor;
    struct {
        double depth; /* branch_factor times the root of the number of blocks */
        int64_t base; /* the width by which logits_divisor is 1 */
    } minicpm;

    int64_t rope_type; /* RopeScaling */
    double theta, local_theta, partial, factor, slow, fast, beta_slow, beta_fast;
    double attention_factor, mscale, mscale_all;
    int64_t original, truncate, interleaved, rotary;
    int64_t turned;        /* blocks that no_rope_layers is about; 0: absent */
    LayerSet turning;      /* of no_rope_layers: 1 */
    int64_t no_rope_every; /* each block of so many has no rotary positions */
    struct {
        int64_t count; /* blocks that layer_rope_theta is about; 0: absent */
        double one;    /* the base of those of `turning`; 0: none turns */
    } bases;

    int64_t moe_latent; /* HF_NONE, 0: experts' rows are as wide as the model */
    int64_t shared_ffn; /* of all shared experts together; 0: shared * expert_ffn */
    int64_t experts, topk, expert_ffn, shared, first_dense, sparse_step, normalize;
    int64_t mlps;   /* blocks that mlp_layer_types is about; 0: absent */
    LayerSet dense; /* blocks without experts, of those that the step would give some */
    int64_t method; /* HfTopkMethod */
    int64_t groups, group_topk, mtp;
    double scale, limit, jitter;

    int64_t q_rank, kv_rank, nope, rope_dim, v_dim;

    struct {
        int64_t key_heads, value_heads, key_dim, value_dim, conv;
        int64_t negative; /* write strengths are up to 2 */
    } linear;             /* Gated DeltaNet */
    struct {
        int64_t heads, head, groups, state, conv, conv_bias;
        int64_t expand; /* width of all heads, over hidden */
        double dt_min;
    } mamba;
    struct {
        int64_t heads, head, conv;
        int64_t listed;  /* linear_attn_config says which blocks have which */
        LayerSet blocks; /* those of Kimi Delta Attention there; attending: the others */
    } kda;
    int64_t rotates;    /* HF_TURNS_KEY: blocks have rotary positions */
    LayerSet attending; /* blocks with attention, in a class that lists these */
} HfModel;

/* ---- classes ---- */

/* The blocks that have a window. */
typedef enum {
    HF_WINDOWS_NONE,
    HF_WINDOWS_ALL,
    HF_WINDOWS_SWITCH, /* all, with use_sliding_window */
    HF_WINDOWS_FROM,   /* with use_sliding_window layer_types, or those from max_window_layers on */
    HF_WINDOWS_TYPES,  /* layer_types, or all but each period-th */
} HfWindows;

/* The blocks that have rotary positions. */
typedef enum {
    HF_TURNS_ALL,
    HF_TURNS_LIST,     /* no_rope_layers, or all but each no_rope_every-th */
    HF_TURNS_WINDOWED, /* those with a window; all, where none has one */
    HF_TURNS_KEY,      /* all, or none: position_embedding_type */
} HfTurns;

/* The weights that a router gives the chosen experts. */
typedef enum {
    HF_ROUTER_CHOSEN,  /* softmax over the chosen experts */
    HF_ROUTER_ALL,     /* softmax over all, never divided by the sum of the chosen */
    HF_ROUTER_FLAG,    /* softmax over all, divided with norm_topk_prob */
    HF_ROUTER_SIGMOID, /* divided with norm_topk_prob */
} HfRouter;

/* The linear layers that have biases. */
typedef enum {
    HF_BIAS_NONE,
    HF_BIAS_ALL,
    HF_BIAS_QKV,   /* queries, keys and values alone */
    HF_BIAS_KEYS,  /* attention_bias, mlp_bias */
    HF_BIAS_ONE,   /* one key for all of them */
    HF_BIAS_APART, /* as KEYS, but attention_bias is of queries, keys and values alone */
} HfBias;

/* Classes like GPT-2, with learned positions. */
static inline bool hf_is_gpt2(HfClass c) { return c == HF_GPT2 || c == HF_GPT_BIGCODE; }

typedef struct {
    HfClassNames names;
    const char *alias;       /* another model_type of the same class; NULL: none */
    const char *wrapper;     /* model_type of a folder with images whose text_config is the class's; NULL: none */
    const char *model, *moe; /* lines of the two sections that all models of the class have */
    HfWindows windows;
    HfTurns turns;
    HfBias bias;
    HfRouter router;
    bool mixture, latent; /* has experts; latent attention */
    /* The mixer of blocks with linear attention: layer_types, or all but each period-th; ATTENTION: there are none */
    MixerWord hybrid;
    bool single;     /* blocks have one layer each: layers_block_type says which (typed, sliding, attending, dense) */
    bool listed;     /* a key lists the blocks with attention instead */
    bool divides;    /* releases open it only where the heads divide the width, whatever head_dim says */
    bool first_full; /* the block without a window, or linear attention, is the first of each period, not its last */
    bool gelu;       /* the activation is a GELU, which one a key says */
    bool scaled;     /* embeddings are multiplied by the root of their width, whatever keys say */
    bool local_base; /* blocks with a window have a base of angles of their own */
    bool nests;      /* and it is written in an object of each kind of block */
    bool drops_embedding; /* its dropout on branches and on the embedding are two keys */
    int best;             /* a group of experts counts by so many of its best */
    HfModel usual;        /* where a key is absent */
} HfClassRow;

extern const HfClassRow hf_classes[HF_CLASSES];

/* ---- keys ---- */

typedef enum {
    HF_KEY_INT,
    HF_KEY_REAL,
    HF_KEY_FLAG,
    HF_KEY_WORD,    /* one of `values`: its number */
    HF_KEY_TYPES,   /* layer_types */
    HF_KEY_LAYERS,  /* a list of blocks, counted from `low` */
    HF_KEY_TURNS,   /* no_rope_layers */
    HF_KEY_BASES,   /* layer_rope_theta */
    HF_KEY_MLPS,    /* mlp_layer_types */
    HF_KEY_PATTERN, /* a number, or a text such as LLLG */
    HF_KEY_AUTO,    /* a number, or "auto": HF_NONE */
    HF_KEY_LIMITS,  /* [a number, infinity] */
    HF_KEY_BLOCKS,  /* layers_block_type, or its letters: the one layer of each block */
    HF_KEY_ROPE,    /* an object of keys of hf_rope_keys */
    HF_KEY_KDA,     /* an object of keys of hf_kda_keys */
    HF_KEY_STORE,   /* quantization_config */
    HF_KEY_FIXED,   /* only one of `values` */
    HF_KEY_IDLE,    /* does not change what is computed */
} HfKeyKind;

typedef struct {
    const char *name;
    HfClassSet classes;
    HfKeyKind kind;
    bool nullable;      /* null is HF_NONE */
    bool silent;        /* is read, never written */
    int64_t offset;     /* in HfModel */
    int64_t low;        /* range of HF_KEY_INT; the first block of HF_KEY_LAYERS */
    const char *values; /* words parted by blanks, as in JSON without quotes */
    const char *meaning;
} HfKey;

extern const HfKey hf_keys[], hf_rope_keys[], hf_kda_keys[];
extern const int hf_key_count, hf_rope_key_count, hf_kda_key_count;

static inline int64_t *hf_int(HfModel *m, const HfKey *k) { return (int64_t *)(void *)((char *)m + k->offset); }
static inline double *hf_real(HfModel *m, const HfKey *k) { return (double *)(void *)((char *)m + k->offset); }

/* The number of a word in "a b c"; -1 if it is not there. hf_word_at: that word. */
int hf_word(const char *words, const char *word);
void hf_word_at(const char *words, int number, char *out, int size_bytes);

/* ---- parts ---- */

/* The window of a block, 0: none. */
int64_t hf_window(const HfModel *m, HfClass c, int layer);
/* Has a block rotary positions? */
int64_t hf_turns(const HfModel *m, HfClass c, int layer);
bool hf_is_mixture(const HfModel *m, HfClass c, int layer);
/* 0: a block has attention, 1: linear attention (HfClassRow.hybrid), 2: no mixer */
int64_t hf_mixer(const HfModel *m, HfClass c, int layer);
/* Has a block linear attention? */
int64_t hf_is_linear(const HfModel *m, HfClass c, int layer);

/* Sections [model] and [moe]; `name` is for messages. ERR_CONFIG: what the model cannot do. */
Err hf_ini(const char *name, const HfModel *m, HfClass c, SetupArena *arena, const char **out);

/* Says cfg as a class's config.json has to; members that it cannot say are as near as they come. */
void hf_say(const Config *cfg, HfClass c, HfModel *out);

#endif
