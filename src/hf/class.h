/*
 * Classes of models in Hugging Face's transformers that megatrain reads and writes: what they are called, and how a
 * folder's config.json becomes a configuration of ours and the other way round.
 *
 * What a model computes is in the configuration alone: hf_config_read makes INI text of it, which config_read takes.
 * What is said of a folder besides (its class, hence its tensors' names; how weights are stored) is in HfConfig. The
 * table of classes is in class.c, that of keys in keys.c; docs/huggingface.md has it for users.
 */
#ifndef MEGATRAIN_HF_CLASS_H
#define MEGATRAIN_HF_CLASS_H

#include "config/config.h"
#include "hf/ids.h"

typedef enum {
    HF_GPT2,
    HF_LLAMA, /* 1 to 3.x */
    HF_MISTRAL,
    HF_QWEN2, /* and 2.5 */
    HF_QWEN3,
    HF_QWEN3_MOE,
    HF_MIXTRAL,
    HF_DEEPSEEK_V2,
    HF_DEEPSEEK_V3,
    HF_GPT_OSS,
    HF_GEMMA2,
    HF_GEMMA3, /* the text model, also of a folder with images */
    HF_OLMO2,
    HF_PHI3,
    HF_QWEN2_MOE,
    HF_OLMOE,
    HF_OLMO3,
    HF_SMOLLM3,
    HF_GLM4_MOE,
    HF_MINIMAX_M2,
    HF_DOTS1,
    HF_SOLAR_OPEN,
    HF_HY_V3,
    HF_ERNIE4_5,
    HF_SEED_OSS,
    HF_GEMMA,
    HF_EXAONE4,
    HF_YOUTU,
    HF_STARCODER2,
    HF_STABLELM,
    HF_EXAONE_MOE,
    HF_FLEX_OLMO,
    HF_MINISTRAL,
    HF_CWM,
    HF_HELIUM,
    HF_GLM,
    HF_GLM4,
    HF_GRANITE,
    HF_ARCEE,
    HF_JAIS2,
    HF_NEMOTRON,
    HF_VAULTGEMMA,
    HF_HYPERCLOVAX,
    HF_GRANITEMOE,
    HF_GRANITEMOESHARED,
    HF_GLM4_MOE_LITE,
    HF_MINICPM3,
    HF_AFMOE,
    HF_GPT_BIGCODE,
    HF_QWEN3_5, /* the text model, also of a folder with images; and the next one */
    HF_QWEN3_5_MOE,
    HF_QWEN3_NEXT,
    HF_GRANITEMOEHYBRID,
    HF_BAMBA,
    HF_NEMOTRON_H,
    HF_KIMI_LINEAR,
    HF_OLMO_HYBRID,
    HF_LARA_MINI,
    HF_GPT_NEOX,
    HF_FALCON,
    HF_COHERE,
    HF_COHERE2,
    HF_INTERNLM3,
    HF_IQUESTCODER,
    HF_EXAONE3, /* 3.0 and 3.5 */
    HF_SARVAM_MOE,
    HF_SARVAM_MLA,
    HF_MELLUM,
    HF_FLINT,
    HF_GRANITE_SWA,
    HF_GRANITEMOE_SWA,
    HF_ARIA, /* the text model, also of a folder with images */
    HF_PHI,  /* 1 to 2 */
    HF_GPTJ,
    HF_CLASSES
} HfClass;

/* Classes, a bit each. */
__extension__ typedef unsigned __int128 HfClassSet;
#define HF_CLASS_BIT(c) ((HfClassSet)1 << (c))
#define HF_CLASS_ALL (HF_CLASS_BIT(HF_CLASSES) - 1)

/* How a folder stores the weights of linear layers: each as it is; in fp8 (e4m3) with a scale for each block of rows
 * and columns, in NAME_scale_inv; or experts in MXFP4, as NAME_blocks and NAME_scales. */
typedef enum { HF_STORE_PLAIN, HF_STORE_FP8_BLOCKS, HF_STORE_MXFP4 } HfStore;

/* A class's names in config.json. */
typedef struct {
    const char *model_type;   /* "llama" */
    const char *architecture; /* "LlamaForCausalLM" */
} HfClassNames;

const HfClassNames *hf_class_names(HfClass c);

/* Contents of a folder's config.json. Texts are of the arena. */
typedef struct {
    HfClass kind;
    /* The text model of one that sees images, too: its keys stand in text_config, and its tensors' names have
     * "language_model." in them. */
    bool wrapped;
    bool interleaved; /* DeepSeek: rotary pairs are rows beside each other */
    HfStore store;
    int64_t block_rows, block_cols; /* HF_STORE_FP8_BLOCKS */
    const char *ini;                /* sections [model] and [moe], all keys that the class decides */
    const char *ignored;            /* keys of the file that change nothing here: "a, b" */
} HfConfig;

/*
 * Reads FOLDER/config.json. Errors, one line each: ERR_CKPT where the file is missing, damaged or no configuration of a
 * model; ERR_CONFIG for a class, key or value that megatrain cannot compute, naming it and what it means.
 */
Err hf_config_read(const char *folder, SetupArena *arena, HfConfig *out);
/* The same of a text; `name` is for messages. */
Err hf_config_parse(const char *name, const char *text, int64_t size_bytes, SetupArena *arena, HfConfig *out);

/* The class that says what a resolved configuration computes; of several the plainest. ERR_CONFIG, naming the key that
 * no class can say. */
Err hf_class_of(const Config *cfg, HfClass *out);

/* May the norm before the head stand for what muP multiplies (HfNaming.width)? ERR_CONFIG: scores are multiplied, too,
 * or modules of multi-token prediction read that norm. */
Err hf_check_mup(const Config *cfg);

/* Contents of config.json and generation_config.json besides the model. */
typedef struct {
    const char *dtype; /* dtype of the weights: "float32", "bfloat16", "float16" */
    int64_t vocab;     /* rows of the token table, where cfg->model.vocab is 0 */
    HfIds ids;
    /* Text of the first id that ends one, if a tokenizer.json has it; NULL: no tokenizer_config.json is written. */
    const char *end;
} HfExport;

/* Writes config.json, generation_config.json and perhaps tokenizer_config.json into the folder, each whole or not at
 * all. ERR_CONFIG as hf_class_of; ERR_STORAGE. */
Err hf_config_write(const Config *cfg, const HfExport *x, const char *folder);

#endif
