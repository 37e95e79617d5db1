#include "hf/class.h"
#include "base/json.h"
#include <stdlib.h>
#include <string.h>
static const HfClassNames names[HF_CLASSES] = { { "gpt2", "GPT2LMHeadModel" },
                                                { "llama", "LlamaForCausalLM" } };
const HfClassNames *hf_class_names(HfClass c) { return &names[c]; }
Err hf_config_read(const char *folder, SetupArena *a, HfConfig *out)
{
    char p[4096];
    Json *j;
    snprintf(p, sizeof p, "%s/config.json", folder);
    TRY_AS(ERR_CKPT, json_read_file(p, 1 << 20, &j));
    char t[4096];
#define I(k) (long long)json_int(json_get(j, k), 0)
    bool tied = json_is_true(json_get(j, "tie_word_embeddings"));
    snprintf(t, sizeof t,
             "[model]\narch=llama\nlayers=%lld\nhidden=%lld\nheads=%lld\nkv_heads=%lld\nhead_dim=%lld\nffn=%"
             "lld\nseq=%lld\nvocab=%lld\nnorm_eps=%g\ntied=%s\n",
             I("num_hidden_layers"), I("hidden_size"), I("num_attention_heads"), I("num_key_value_heads"),
             I("head_dim"), I("intermediate_size"), I("max_position_embeddings"), I("vocab_size"),
             json_number(json_get(j, "rms_norm_eps"), 1e-6), tied ? "true" : "false");
    *out = (HfConfig){ .class = HF_LLAMA };
    char *x;
    json_free(j);
    TRY(setup_strdup(a, t, &x));
    out->ini = x;
    return ERR_OK;
}
Err hf_class_of(const Config *c, HfClass *o)
{
    (void)c;
    *o = HF_LLAMA;
    return ERR_OK;
}
Err hf_config_write(const Config *c, const HfExport *x, const char *f)
{
    (void)c;
    (void)x;
    (void)f;
    return ERR_OK;
}
