/* See vocabulary.h. */
#include "data/vocabulary.h"

#include <stddef.h>

#include "data/tokenizer_impl.h"

TokenKind vocabulary_kind(const Tokenizer *t, int32_t id)
{
    int32_t size;
    for (int64_t i = 0; i < t->added_count; i++)
        if (t->added[i].id == id) return t->added[i].special ? TOKEN_SPECIAL : TOKEN_ADDED;
    if (id == t->eod) return TOKEN_SPECIAL;
    return tokenizer_bytes(t, id, &size) ? TOKEN_PIECE : TOKEN_UNUSED;
}

int64_t vocabulary_merge_count(const Tokenizer *t) { return t->bpe.merge_count; }

void vocabulary_merges(const Tokenizer *t, VocabularyMerge *out)
{
    for (int64_t i = 0; t->bpe.merge_count && i <= t->bpe.merge_mask; i++) {
        const BpeMerge *m = &t->bpe.merges[i];
        if (m->rank >= 0) out[m->rank] = (VocabularyMerge){ (int32_t)(m->pair >> 32), (int32_t)m->pair };
    }
}

const char *vocabulary_pattern(const Tokenizer *t)
{
    static const char *const names[SPLIT_COUNT] = {
        [SPLIT_GPT2] = "gpt2", [SPLIT_LLAMA3] = "llama3", [SPLIT_QWEN] = "qwen"
    };
    return t->is_byte ? NULL : names[t->split];
}
