/* See vocabulary.h. */
#include "data/vocabulary.h"

#include "data/tokenizer_impl.h"

TokenKind vocabulary_kind(const Tokenizer *t, int32_t id)
{
    int32_t size;
    for (int64_t i = 0; i < t->added_count; i++)
        if (t->added[i].id == id) return t->added[i].special ? TOKEN_SPECIAL : TOKEN_ADDED;
    if (id == t->eod) return TOKEN_SPECIAL;
    return tokenizer_bytes(t, id, false, &size) ? TOKEN_PIECE : TOKEN_UNUSED;
}

int64_t vocabulary_merge_count(const Tokenizer *t) { return t->bpe.merge_count; }

void vocabulary_merges(const Tokenizer *t, VocabularyMerge *out)
{
    for (int64_t i = 0; t->bpe.merge_count && i <= t->bpe.merge_mask; i++) {
        const BpeMerge *m = &t->bpe.merges[i];
        if (m->rank >= 0) out[m->rank] = (VocabularyMerge){ (int32_t)(m->pair >> 32), (int32_t)m->pair };
    }
}

bool vocabulary_pattern(const Tokenizer *t, SplitKind *out)
{
    *out = t->is_byte ? SPLIT_GPT2 : SPLIT_COUNT;
    if (t->bpe.characters) return false;
    for (int i = 0; i < t->stage_count; i++) {
        const Stage *s = &t->stages[i];
        if (s->kind == STAGE_ADDED || s->kind == STAGE_NFC) continue;
        if (s->kind != STAGE_SPLIT || s->invert || s->behavior != BEHAVIOR_ISOLATED) return false;
        *out = splitter_kind(s->splitter);
        if (*out == SPLIT_COUNT) return false;
    }
    return *out != SPLIT_COUNT;
}
