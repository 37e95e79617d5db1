/* The tables made of keys.def. See model.h. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "hf/model.h"

#define B(name) HF_CLASS_BIT(HF_##name)
#define ALL HF_CLASS_ALL
#define DEEPSEEK (B(DEEPSEEK_V2) | B(DEEPSEEK_V3))
#define LLAMAS (B(LLAMA) | B(INTERNLM3) | B(IQUESTCODER) | B(EXAONE3)) /* of one class in transformers */
#define SARVAMS (B(SARVAM_MOE) | B(SARVAM_MLA))
#define LATENT (DEEPSEEK | B(YOUTU) | B(GLM4_MOE_LITE) | B(MINICPM3) | B(SARVAM_MLA) | B(KIMI_LINEAR))
#define GEMMAS (B(GEMMA2) | B(GEMMA3) | B(VAULTGEMMA))
#define SINKING (B(GRANITE_SWA) | B(GRANITEMOE_SWA)) /* Granites with windows and sinks */
#define GRANITES (B(GRANITE) | B(GRANITEMOE) | B(GRANITEMOESHARED) | B(GRANITEMOEHYBRID) | SINKING)
#define MAMBAS (B(GRANITEMOEHYBRID) | B(BAMBA))
#define FACTORED (GRANITES | B(HYPERCLOVAX))        /* with factors as keys */
#define SQUARES (B(ARCEE) | B(JAIS2) | B(NEMOTRON)) /* of a ReLU */
#define COHERES (B(COHERE) | B(COHERE2))
#define FUSED (B(GPT_NEOX) | B(FALCON)) /* heads of one width, the quotient; GELU of either form */
#define LAYERNORMS                                                                                                \
    (B(GPT2) | B(GPT_BIGCODE) | B(STARCODER2) | B(STABLELM) | B(JAIS2) | FUSED | COHERES | B(NEMOTRON) | B(PHI) | \
     B(GPTJ))
#define GPTS (B(GPT2) | B(GPT_BIGCODE) | B(GPTJ))
#define ROTARY (ALL & ~GPTS)                                /* with the usual names of keys */
#define TURNING (ROTARY & ~B(NEMOTRON_H) & ~B(KIMI_LINEAR)) /* with rotary positions */
/* heads of one width, which is a key */
#define PLAIN (ROTARY & ~LATENT & ~FUSED & ~B(COHERE2) & ~B(OLMOE) & ~B(STABLELM) & ~B(OLMO_HYBRID) & ~B(PHI))
#define LATER (B(QWEN3_5) | B(QWEN3_5_MOE))
#define HYBRIDS (B(QWEN3_NEXT) | LATER) /* with linear attention */
#define DELTAS (HYBRIDS | B(LARA_MINI)) /* the same, of which one has windows, too */
#define SPARSE \
    (B(QWEN2_MOE) | B(QWEN3_MOE) | B(QWEN3_NEXT) | B(FLINT)) /* some blocks have no experts, by a step and a list */
#define GLMS (B(GLM4_MOE) | B(GLM4_MOE_LITE) | B(DOTS1) | B(SOLAR_OPEN) | SARVAMS) /* experts as DeepSeek-V3's */
#define ROUTED (DEEPSEEK | GLMS)
#define MIXTURE                                                                                                        \
    (SPARSE | ROUTED | B(QWEN3_5_MOE) | B(EXAONE_MOE) | B(FLEX_OLMO) | B(MIXTRAL) | B(GPT_OSS) | B(OLMOE) |            \
     B(MINIMAX_M2) | B(HY_V3) | B(GRANITEMOE) | B(GRANITEMOESHARED) | B(GRANITEMOEHYBRID) | B(AFMOE) | B(NEMOTRON_H) | \
     B(MELLUM) | B(GRANITEMOE_SWA) | B(LARA_MINI))
#define OLMO (B(FLEX_OLMO) | B(OLMO2) | B(OLMO3) | B(OLMOE))
#define QWEN (B(QWEN2) | B(QWEN3))
#define EXAONE (B(EXAONE4) | B(EXAONE_MOE))
#define FROM (QWEN | B(DOTS1)) /* blocks from one on have a window */
#define WINDOWED                                                                                         \
    (B(MISTRAL) | B(MIXTRAL) | B(PHI3) | FROM | B(QWEN3_MOE) | B(GPT_OSS) | GEMMAS | B(OLMO3) | EXAONE | \
     B(MINISTRAL) | B(CWM) | B(STARCODER2) | B(AFMOE) | B(COHERE2) | B(MELLUM) | B(FLINT) | SINKING)
#define TYPED                                                                                                        \
    (FROM | B(GPT_OSS) | GEMMAS | B(OLMO3) | B(SMOLLM3) | B(QWEN2_MOE) | EXAONE | B(MINISTRAL) | B(CWM) | B(AFMOE) | \
     B(COHERE2) | B(MELLUM) | B(FLINT) | SINKING)
#define BIASED                                                                                                       \
    (LLAMAS | B(QWEN3) | B(QWEN3_MOE) | LATENT | B(GPT_OSS) | GEMMAS | B(GEMMA) | OLMO | B(SMOLLM3) | GLMS |         \
     B(HY_V3) | B(SEED_OSS) | B(HELIUM) | B(GLM) | B(GLM4) | FACTORED | SQUARES | B(AFMOE) | HYBRIDS | B(GPT_NEOX) | \
     COHERES | B(BAMBA) | B(MELLUM) | B(FLINT) | B(ARIA) | B(OLMO_HYBRID) | B(LARA_MINI))
#define PARTIAL                                                                                             \
    (B(GLM) | B(GLM4) | B(PHI3) | B(GLM4_MOE) | B(SARVAM_MOE) | B(MINIMAX_M2) | B(STABLELM) | B(NEMOTRON) | \
     B(GPT_NEOX) | HYBRIDS | B(BAMBA) | B(PHI)) /* some columns of a head turn */

#define KEY(kind_, classes_, name_, member_, meaning_, ...) \
    { .name = name_,                                        \
      .classes = classes_,                                  \
      .kind = HF_KEY_##kind_,                               \
      .offset = offsetof(HfModel, member_),                 \
      .meaning = meaning_,                                  \
      __VA_ARGS__ },
#define INT(...) KEY(INT, __VA_ARGS__)
#define SIZE(...) KEY(INT, __VA_ARGS__, .low = 1)
#define REAL(...) KEY(REAL, __VA_ARGS__)
#define FLAG(...) KEY(FLAG, __VA_ARGS__)
#define WORD(classes_, name_, member_, values_, ...) KEY(WORD, classes_, name_, member_, __VA_ARGS__, .values = values_)
#define OTHER(...) KEY(__VA_ARGS__)
#define FIXED(classes_, name_, values_, meaning_, ...) \
    { .name = name_, .classes = classes_, .kind = HF_KEY_FIXED, .values = values_, .meaning = meaning_, __VA_ARGS__ },
#define QUIET(...) FIXED(__VA_ARGS__, .silent = true)
#define IDLE(classes_, name_) { .name = name_, .classes = classes_, .kind = HF_KEY_IDLE, .silent = true },

const HfKey hf_keys[] = {
#include "hf/keys.def"
};
const int hf_key_count = sizeof hf_keys / sizeof *hf_keys;

const HfKey hf_rope_keys[] = {
#define ROPE_KEYS
#include "hf/keys.def"
};
const int hf_rope_key_count = sizeof hf_rope_keys / sizeof *hf_rope_keys;

/* Kimi Linear: members of linear_attn_config. */
const HfKey hf_kda_keys[] = {
    SIZE(B(KIMI_LINEAR), "head_dim", kda.head, "width of a head in linear attention")
        SIZE(B(KIMI_LINEAR), "num_heads", kda.heads, "heads of linear attention")
            SIZE(B(KIMI_LINEAR), "short_conv_kernel_size", kda.conv,
                 "tokens that the convolution of linear attention spans")
                OTHER(LAYERS, B(KIMI_LINEAR), "kda_layers", kda.blocks, "blocks with linear attention", .low = 1)
                    OTHER(LAYERS, B(KIMI_LINEAR), "full_attn_layers", attending, "blocks with full attention", .low = 1)
};
const int hf_kda_key_count = sizeof hf_kda_keys / sizeof *hf_kda_keys;

int hf_word(const char *words, const char *word)
{
    const size_t n = strlen(word);
    for (int i = 0;; i++) {
        const size_t size = strcspn(words, " ");
        if (size == n && memcmp(words, word, n) == 0) return i;
        if (!words[size]) return -1;
        words += size + 1;
    }
}

void hf_word_at(const char *words, int number, char *out, int size_bytes)
{
    for (; number > 0 && strchr(words, ' '); number--) words = strchr(words, ' ') + 1;
    snprintf(out, (size_t)size_bytes, "%.*s", (int)strcspn(words, " "), words);
}
