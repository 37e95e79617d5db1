/* The tables made of keys.def. See model.h. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "hf/model.h"

#define B(name) (UINT64_C(1) << HF_##name)
#define ALL ((UINT64_C(1) << HF_CLASSES) - 1)
#define LATENT (B(DEEPSEEK_V2) | B(DEEPSEEK_V3))
#define GEMMAS (B(GEMMA2) | B(GEMMA3))
#define ROTARY (ALL & ~B(GPT2))
#define PLAIN (ROTARY & ~LATENT) /* heads of one width */
#define MIXTURE (B(QWEN3_MOE) | B(MIXTRAL) | B(GPT_OSS) | LATENT)
#define QWEN (B(QWEN2) | B(QWEN3))
#define WINDOWED (B(MISTRAL) | B(MIXTRAL) | B(PHI3) | QWEN | B(QWEN3_MOE) | B(GPT_OSS) | GEMMAS)
#define BIASED (B(LLAMA) | B(QWEN3) | B(QWEN3_MOE) | LATENT | B(GPT_OSS) | GEMMAS | B(OLMO2))

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
#define WORD(classes_, name_, member_, values_, ...) \
    KEY(WORD, classes_, name_, member_, __VA_ARGS__, .values = values_)
#define OTHER(...) KEY(__VA_ARGS__)
#define FIXED(classes_, name_, values_, meaning_, ...) \
    { .name = name_,                                   \
      .classes = classes_,                             \
      .kind = HF_KEY_FIXED,                            \
      .values = values_,                               \
      .meaning = meaning_,                             \
      __VA_ARGS__ },
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
