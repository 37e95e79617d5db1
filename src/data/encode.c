/*
 * Encoding: a text goes through the stages of its tokenizer (tokenizer_impl.h), each of which gives the next one the
 * text rewritten or piece by piece, and what comes out of the last to the model.
 *
 * Also here: where a text can be cut so that its parts can be encoded apart.
 */
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/utf8.h"
#include "data/grow.h"
#include "data/tokenizer_impl.h"

struct Encoder {
    const Tokenizer *tokenizer;
    BpeWork *bpe;
    SplitterWork *split[STAGES_MAX];
    StageBuffer text[STAGES_MAX]; /* what a stage has made of the text that it was given */
    int64_t room;                 /* bytes by which the stages may still make this text longer */
    TokenList *out;
};

/* Bytes by which a text may become longer, and by which each of its bytes may. A mark in place of a blank adds two. */
enum { GROWTH_ANYWAY = 1 << 16, GROWTH_A_BYTE = 64 };

Err encoder_open(const Tokenizer *t, Encoder **out)
{
    Encoder *e = calloc(1, sizeof *e);
    if (!e) return err_set(ERR_MEMORY, "no memory for an encoder");
    e->tokenizer = t;
    Err err = t->is_byte ? ERR_OK : bpe_work_open(&e->bpe);
    for (int i = 0; i < t->stage_count && !err; i++)
        if (t->stages[i].splitter) err = splitter_work_open(t->stages[i].splitter, &e->split[i]);
    if (err) encoder_close(e);
    else *out = e;
    return err;
}

void encoder_close(Encoder *e)
{
    if (!e) return;
    bpe_work_close(e->bpe);
    for (int i = 0; i < STAGES_MAX; i++) {
        splitter_work_close(e->split[i]);
        free(e->text[i].text);
    }
    free(e);
}

/* ---- rewriting ---- */

static Err put(StageBuffer *b, const char *text, int64_t size)
{
    if (size > b->most - b->size)
        return err_set(ERR_DATA, "its normalizer, pre_tokenizer or decoder makes a text too long: above %lld bytes",
                       (long long)b->most);
    TRY(grow_to(&b->text, &b->capacity, b->size + size));
    if (size) memcpy(b->text + b->size, text, (size_t)size);
    b->size += size;
    return ERR_OK;
}

/* No code point below U+0300 changes under NFC, whatever stands beside it. */
static bool is_plainly_nfc(const char *text, int64_t size)
{
    for (int64_t i = 0; i < size; i++)
        if ((uint8_t)text[i] >= 0xCC) return false;
    return true;
}

static Err compose(const char *text, int64_t size, StageBuffer *b)
{
    utf8proc_uint8_t *composed = NULL;
    utf8proc_ssize_t n = utf8proc_map((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)size, &composed,
                                      UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (n < 0)
        return err_set(n == UTF8PROC_ERROR_NOMEM ? ERR_MEMORY : ERR_DATA, "cannot normalize text: %s",
                       utf8proc_errmsg(n));
    Err err = put(b, (const char *)composed, n);
    free(composed);
    return err;
}

static Err replace(const Stage *s, const char *text, const char *end, StageBuffer *b)
{
    for (const char *found; (found = memmem(text, (size_t)(end - text), s->from.bytes, (size_t)s->from.size));
         text = found + s->from.size) {
        TRY(put(b, text, found - text));
        TRY(put(b, s->to.bytes, s->to.size));
    }
    return put(b, text, end - text);
}

static bool takes_prefix(const Stage *s, const char *text, int64_t size, Place place)
{
    if (place == PLACE_CONTINUES || (s->rule == PREFIX_FIRST && place != PLACE_FIRST)) return false;
    return s->rule == PREFIX_ALWAYS || size < s->to.size || memcmp(text, s->to.bytes, (size_t)s->to.size) != 0;
}

Err stage_rewrite(const Stage *s, const char **text, int64_t *size, Place place, StageBuffer *b)
{
    b->size = 0;
    if (s->kind == STAGE_NFC) {
        if (is_plainly_nfc(*text, *size)) return ERR_OK;
        TRY(compose(*text, *size, b));
    } else if (s->kind == STAGE_REPLACE) {
        TRY(replace(s, *text, *text + *size, b));
    } else {
        if (!takes_prefix(s, *text, *size, place)) return ERR_OK;
        TRY(put(b, s->to.bytes, s->to.size));
        TRY(put(b, *text, *size));
    }
    *text = b->text;
    *size = b->size;
    return ERR_OK;
}

/* ---- the stages ---- */

static Err run(Encoder *e, int i, const char *text, int64_t size, Place place);

/* Place of a text that begins at `from` in a text of this place. */
static Place place_of(int64_t from, Place place) { return from == 0 ? place : PLACE_INSIDE; }

static Err run_added(Encoder *e, int i, const char *text, int64_t size, Place place)
{
    int64_t done = 0, search = 0;
    for (AddedMatch m; added_next(e->tokenizer->stages[i].set, text, size, done, &search, &m); done = m.to) {
        /* (it may begin inside of blanks that the token before it has swallowed) */
        if (m.from > done) TRY(run(e, i + 1, text + done, m.from - done, place_of(done, place)));
        TRY(token_list_add(e->out, m.id));
    }
    return run(e, i + 1, text + done, size - done, place_of(done, place));
}

/* Is a span one piece with the one before it? */
static bool joins(SplitBehavior behavior, bool before, bool is_match)
{
    switch (behavior) {
    case BEHAVIOR_PREVIOUS: return is_match && !before;
    case BEHAVIOR_NEXT: return !is_match && before;
    case BEHAVIOR_CONTIGUOUS: return is_match == before;
    default: return false;
    }
}

/* Each span is a piece of its own, for the model: what most tokenizers do with most of their text. */
static Err run_last_split(Encoder *e, int i, const char *text, int64_t size)
{
    bool is_match;
    for (int64_t at = 0, end; at < size; at = end) {
        TRY(splitter_next(e->split[i], text, size, at, &end, &is_match));
        TRY(bpe_encode(&e->tokenizer->bpe, e->bpe, text + at, end - at, e->out));
    }
    return ERR_OK;
}

static Err run_split(Encoder *e, int i, const char *text, int64_t size, Place place)
{
    const Stage *s = &e->tokenizer->stages[i];
    if (s->behavior == BEHAVIOR_ISOLATED && i + 1 == e->tokenizer->stage_count) return run_last_split(e, i, text, size);
    int64_t from = 0; /* where the piece begins that is not given on yet */
    bool before = false, is_match;
    for (int64_t at = 0, end; at < size; at = end, before = is_match) {
        TRY(splitter_next(e->split[i], text, size, at, &end, &is_match));
        is_match ^= s->invert;
        if (at > 0 && !joins(s->behavior, before, is_match)) {
            if (s->behavior != BEHAVIOR_REMOVED || !before)
                TRY(run(e, i + 1, text + from, at - from, place_of(from, place)));
            from = at;
        }
    }
    if (s->behavior == BEHAVIOR_REMOVED && before) return ERR_OK;
    return run(e, i + 1, text + from, size - from, place_of(from, place));
}

static Err run(Encoder *e, int i, const char *text, int64_t size, Place place)
{
    const Tokenizer *t = e->tokenizer;
    if (size == 0) return ERR_OK;
    if (i == t->stage_count) return bpe_encode(&t->bpe, e->bpe, text, size, e->out);
    if (t->stages[i].kind == STAGE_ADDED) return run_added(e, i, text, size, place);
    if (t->stages[i].kind == STAGE_SPLIT) return run_split(e, i, text, size, place);
    const int64_t before = size;
    e->text[i].most = size + e->room;
    TRY(stage_rewrite(&t->stages[i], &text, &size, place, &e->text[i]));
    if (size > before) e->room -= size - before;
    return run(e, i + 1, text, size, place);
}

/* ---- whole texts ---- */

static Err encode_valid(Encoder *e, const char *text, int64_t size, Place place)
{
    TokenList *out = e->out;
    if (!e->tokenizer->is_byte) return run(e, 0, text, size, place);
    TRY(grow_to(&out->ids, &out->capacity, out->count + size));
    for (int64_t i = 0; i < size; i++) out->ids[out->count++] = (uint8_t)text[i];
    return ERR_OK;
}

static int32_t byte_token(const Tokenizer *t, uint8_t byte)
{
    if (t->is_byte) return byte;
    return t->bpe.byte_id[byte] >= 0 ? t->bpe.byte_id[byte] : t->bpe.unknown;
}

/* The work that a text is worth, however the stages cut it up. */
static void allow(Encoder *e, int64_t size)
{
    e->room = GROWTH_ANYWAY + GROWTH_A_BYTE * size;
    for (int i = 0; i < e->tokenizer->stage_count; i++)
        if (e->split[i]) splitter_work_allow(e->split[i], size);
}

Err encoder_run(Encoder *e, const char *text, int64_t size, bool continues, TokenList *out, int64_t *invalid_bytes)
{
    e->out = out;
    allow(e, size);
    for (int64_t at = 0;; continues = true) {
        int64_t valid = utf8_valid_bytes(text + at, size - at);
        if (at + valid < size && !invalid_bytes)
            return err_set(ERR_DATA, "invalid UTF-8 at byte offset %lld (byte 0x%02x)", (long long)(at + valid),
                           (uint8_t)text[at + valid]);
        Err err = encode_valid(e, text + at, valid, continues ? PLACE_CONTINUES : PLACE_FIRST);
        if (err) return err == ERR_DATA ? err_prefix(err, "tokenizer '%s'", e->tokenizer->path) : err;
        at += valid;
        if (at == size) return ERR_OK;
        TRY(token_list_add(out, byte_token(e->tokenizer, (uint8_t)text[at++])));
        ++*invalid_bytes;
    }
}

Err tokenizer_encode(const Tokenizer *t, const char *text, int64_t size, TokenList *out)
{
    Encoder *e;
    *out = (TokenList){ 0 };
    TRY(encoder_open(t, &e));
    Err err = encoder_run(e, text, size, false, out, NULL);
    encoder_close(e);
    if (err) {
        free(out->ids);
        *out = (TokenList){ 0 };
    }
    return err;
}

/* ---- cuts ---- */

static bool is_text(TokenText t, const char *text)
{
    return (size_t)t.size == strlen(text) && memcmp(t.bytes, text, (size_t)t.size) == 0;
}

static bool blanks_become_marks(const Stage *s)
{
    return s->kind == STAGE_REPLACE && is_text(s->from, " ") && is_text(s->to, BPE_BLANK);
}

/*
 * The pieces of bytes fall apart at a cut if one pattern begins a piece there, and none looks or reaches across. Those
 * of characters need not fall apart: the model takes blanks there for the beginnings of words (Bpe.word_ends).
 */
void tokenizer_find_cuts(Tokenizer *t)
{
    bool marks = false, begins = false, known = true;
    t->blank = ' ';
    for (int i = 0; i < t->stage_count; i++) {
        const Stage *s = &t->stages[i];
        t->prefixes |= s->kind == STAGE_PREFIX;
        if (s->kind == STAGE_REPLACE) {
            known = known && blanks_become_marks(s) && t->bpe.characters;
            marks = known;
            if (i <= t->normalizers) t->blank = BPE_BLANK[0];
        } else if (s->kind == STAGE_SPLIT) {
            const SplitAtCut at_cut = splitter_at_cut(s->splitter);
            const bool isolated = s->behavior == BEHAVIOR_ISOLATED && !s->invert;
            begins |= isolated && at_cut == SPLIT_BEGINS;
            /* blanks are no more there, or it splits in front of what they became */
            const bool of_marks =
                marks &&
                (is_text(s->from, " ") || (is_text(s->from, BPE_BLANK) && s->behavior == BEHAVIOR_NEXT && !s->invert));
            known = known && (of_marks || (isolated && at_cut != SPLIT_ANYTHING && !marks));
        }
    }
    if (known && marks && !t->bpe.whole_pieces) t->cut = CUT_BLANKS;
    if (known && begins) t->cut = t->prefixes ? CUT_BLANKS : CUT_WORDS;
}

static bool ends_added(const Tokenizer *t, char last)
{
    for (const AddedToken *a = t->added; a < t->added + t->added_count; a++)
        if (a->text.bytes[a->text.size - 1] == last) return true;
    return false;
}

/* (NFC joins nothing to what stands on either side of such a place.) */
static bool may_cut(const Tokenizer *t, char before, char behind)
{
    if (t->cut == CUT_BLANKS && behind != ' ') return false;
    if (t->prefixes && ends_added(t, before)) return false; /* what follows a token begins a piece of its own */
    if (t->bpe.characters && !t->bpe.word_ends[(uint8_t)before]) return false;
    return !added_crosses(&t->sets[0], before, behind) &&
           !added_crosses(&t->sets[1], before, behind == ' ' ? t->blank : behind);
}

int64_t tokenizer_cut(const Tokenizer *t, const char *text, int64_t size)
{
    if (t->is_byte) { /* anywhere but inside a character */
        int64_t last = size - 1;
        while (last > 0 && utf8_is_tail((uint8_t)text[last])) last--;
        return last < 0 ? 0 : last;
    }
    if (t->cut == CUT_NOWHERE) return 0;
    for (int64_t at = split_cut(text, size); at > 0; at = split_cut(text, at))
        if (may_cut(t, text[at - 1], text[at])) return at;
    return 0;
}
