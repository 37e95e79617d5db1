/* See vocabulary.h. */
#include "data/vocabulary.h"

#include <string.h>

#include "data/tokenizer_impl.h"

/* ---- tokens ---- */

static TokenText text_of(const Tokenizer *t, int32_t id)
{
    TokenText text = { .bytes = NULL };
    if (!t->bpe.characters) text.bytes = tokenizer_bytes(t, id, false, &text.size);
    else if (id < t->bpe.id_count) text = t->bpe.tokens[id];
    return text;
}

void vocabulary_tokens(const Tokenizer *t, VocabularyToken *out)
{
    for (int32_t id = 0; id < t->vocab; id++) {
        const TokenText text = text_of(t, id);
        out[id] = (VocabularyToken){ text.bytes ? TOKEN_PIECE : TOKEN_UNUSED, text };
    }
    for (int byte = 0; t->bpe.characters && byte < 256; byte++)
        if (t->bpe.byte_id[byte] >= 0) out[t->bpe.byte_id[byte]].kind = TOKEN_BYTE;
    for (int64_t i = 0; i < t->added_count; i++) {
        const AddedToken *a = &t->added[i];
        out[a->id].kind = !a->special                                    ? TOKEN_ADDED
                          : t->bpe.characters && a->id == t->bpe.unknown ? TOKEN_UNKNOWN
                                                                         : TOKEN_SPECIAL;
        if (t->bpe.characters) out[a->id].text = a->text;
    }
    if (t->eod >= 0) out[t->eod].kind = TOKEN_SPECIAL;
}

const AddedToken *vocabulary_added(const Tokenizer *t, int64_t *count)
{
    *count = t->added_count;
    return t->added;
}

void vocabulary_around(const Tokenizer *t, int32_t *before, int32_t *behind)
{
    *before = t->before < t->vocab ? t->before : -1;
    *behind = t->behind < t->vocab ? t->behind : -1;
}

/* ---- merges ---- */

int64_t vocabulary_merge_count(const Tokenizer *t) { return t->bpe.merge_count; }

void vocabulary_merges(const Tokenizer *t, VocabularyMerge *out)
{
    for (int64_t i = 0; t->bpe.merge_count && i <= t->bpe.merge_mask; i++) {
        const BpeMerge *m = &t->bpe.merges[i];
        if (m->rank >= 0) out[m->rank] = (VocabularyMerge){ (int32_t)(m->pair >> 32), (int32_t)m->pair };
    }
}

Err vocabulary_alone(const Tokenizer *t, const TokenText *texts, int64_t count, BpeAlone *out)
{
    BpeWork *w;
    TRY(bpe_work_open(&w));
    Err err = ERR_OK;
    for (int64_t i = 0; i < count && !err; i++) err = bpe_alone(&t->bpe, w, texts[i], &out[i]);
    bpe_work_close(w);
    return err;
}

bool vocabulary_takes_whole(const Tokenizer *t) { return t->bpe.whole_pieces; }

/* ---- what is around the model ---- */

bool vocabulary_pattern(const Tokenizer *t, SplitKind *out)
{
    static const SplitKind deepseek[] = { SPLIT_DEEPSEEK_NUMBERS, SPLIT_DEEPSEEK_EAST_ASIA, SPLIT_DEEPSEEK };
    SplitKind kinds[STAGES_MAX];
    int count = 0;
    *out = SPLIT_GPT2;
    if (t->is_byte) return true;
    if (t->bpe.characters) return false;
    for (int i = 0; i < t->stage_count; i++) {
        const Stage *s = &t->stages[i];
        if (s->kind == STAGE_ADDED || s->kind == STAGE_NFC) continue;
        if (s->kind != STAGE_SPLIT || s->invert || s->behavior != BEHAVIOR_ISOLATED) return false;
        kinds[count++] = splitter_kind(s->splitter);
    }
    if (count == 3 && !memcmp(kinds, deepseek, sizeof deepseek)) return *out = SPLIT_DEEPSEEK, true;
    if (count != 1) return false;
    *out = kinds[0];
    return *out <= SPLIT_TEKKEN;
}

static bool is(TokenText t, const char *text)
{
    return (size_t)t.size == strlen(text) && memcmp(t.bytes, text, strlen(text)) == 0;
}

/* (Gemma's files cut at blanks, of which none is left then.) */
bool vocabulary_is_marked(const Tokenizer *t, bool *prefix)
{
    bool marks = false;
    *prefix = false;
    if (!t->bpe.characters) return false;
    for (int i = 0; i < t->stage_count; i++) {
        const Stage *s = &t->stages[i];
        const bool puts = s->kind == STAGE_PREFIX && s->rule == PREFIX_ALWAYS && is(s->to, BPE_BLANK);
        const bool replaces = s->kind == STAGE_REPLACE && is(s->from, " ") && is(s->to, BPE_BLANK);
        const bool nothing = s->kind == STAGE_SPLIT && marks && !s->invert && is(s->from, " ");
        if (s->kind != STAGE_ADDED && !replaces && !nothing && (!puts || *prefix)) return false;
        *prefix |= puts;
        marks |= replaces;
    }
    return marks;
}
