/*
 * data/tokenizer_json.c, a tokenizer.json. The first '@' of the input stands for the 256 byte tokens. With what is
 * accepted a text of all bytes is encoded, or refused: steps of a split pattern and bytes that parts add are counted
 * and have a limit, so that no file makes a text slow. With tokens of bytes, where nothing rewrites it, it comes back,
 * but for the blanks beside added tokens that swallow them, and the vocabulary, where no id is left out, is written as
 * after a training and read again to the same tokens and merges.
 */
#include "alphabet.h"

#include "data/tokenizer_impl.h"

/* It is the text; where some added token swallows blanks beside it, the text without some of its blanks. */
static void check_back(const Tokenizer *t, const char *text, int64_t size, const char *back, int64_t back_size)
{
    bool swallows = false;
    int64_t k = 0;
    for (int64_t i = 0; i < t->added_count; i++) swallows |= t->added[i].lstrip || t->added[i].rstrip;
    for (int64_t i = 0; i < size; i++) {
        if (k < back_size && text[i] == back[k]) k++;
        else
            FUZZ_CHECK(swallows && text[i] && strchr(" \t\n\v\f\r", text[i]), "byte %lld is not there",
                       (long long)i);
    }
    FUZZ_CHECK(k == back_size, "%lld bytes of %lld stand in the text", (long long)k, (long long)back_size);
}

static bool gives_back(const Tokenizer *t)
{
    for (int i = 0; i < t->stage_count; i++)
        if ((t->stages[i].kind != STAGE_ADDED && t->stages[i].kind != STAGE_SPLIT) ||
            t->stages[i].behavior == BEHAVIOR_REMOVED)
            return false;
    return !t->bpe.characters;
}

static void check_ids(const Tokenizer *t, const TokenList *ids, const char *text, const char *back, int64_t size)
{
    for (int64_t i = 0; i < ids->count; i++)
        FUZZ_CHECK(ids->ids[i] >= 0 && ids->ids[i] < t->vocab, "%d", ids->ids[i]);
    if (gives_back(t)) check_back(t, text, 320, back, size);
}

static void check_text(const Tokenizer *t)
{
    char text[512], *back;
    TokenList ids = { 0 };
    Encoder *e;
    int64_t size, invalid = 0;
    for (int i = 0; i < 256; i++) text[i] = (char)i;
    memcpy(text + 256,
           "Once upon a time, ab aab  <|endoftext|> 12345 it's \xC3\xA9t\xC3\xA9\n\n\xE4\xB8\xAD abab", 64);
    Err err = encoder_open(t, &e);
    FUZZ_CHECK(!err, "%s", err_message());
    err = encoder_run(e, text, 320, false, &ids, &invalid);
    FUZZ_CHECK(!err || (err == ERR_DATA && strstr(err_message(), " too long")), "%s", err_message());
    if (!err) {
        err = tokenizer_decode(t, ids.ids, ids.count, &back, &size);
        FUZZ_CHECK(!err, "%s", err_message());
        check_ids(t, &ids, text, back, size);
        free(back);
    }
    free(ids.ids);
    encoder_close(e);
}

static bool is_plain(const Tokenizer *t)
{
    for (int32_t id = 0; id < t->bpe.id_count; id++)
        if (!t->bpe.tokens[id].bytes) return false;
    return !t->bpe.characters && bpe_find(&t->bpe, END_OF_TEXT, (int64_t)strlen(END_OF_TEXT)) < 0;
}

static void check_again(const Tokenizer *t)
{
    const Bpe *b = &t->bpe;
    TrainedMerge *merges = malloc((size_t)(b->merge_count + 1) * sizeof *merges);
    Tokenizer *again;
    if (!merges) abort();
    for (int64_t i = 0; i <= b->merge_mask; i++)
        if (b->merges[i].rank >= 0)
            merges[b->merges[i].rank] =
                (TrainedMerge){ (int32_t)(b->merges[i].pair >> 32), (int32_t)(uint32_t)b->merges[i].pair };
    Err err = tokenizer_json_write(fuzz_path("again.json"), b->tokens, b->id_count, merges, b->merge_count);
    if (!err) err = tokenizer_open(fuzz_path("again.json"), &again);
    FUZZ_CHECK(!err, "%s", err_message());
    FUZZ_CHECK(again->vocab == b->id_count + 1 && again->eod == b->id_count, "%d ids", again->vocab);
    for (int32_t id = 0; id < b->id_count; id++)
        FUZZ_CHECK(again->text[id].size == b->tokens[id].size &&
                       !memcmp(again->text[id].bytes, b->tokens[id].bytes, (size_t)b->tokens[id].size),
                   "token %d", id);
    FUZZ_CHECK(again->bpe.merge_count == b->merge_count && again->bpe.merge_mask == b->merge_mask &&
                   !memcmp(again->bpe.byte_id, b->byte_id, sizeof b->byte_id),
               "other merges");
    for (int64_t i = 0; i <= b->merge_mask; i++)
        FUZZ_CHECK(again->bpe.merges[i].rank == b->merges[i].rank &&
                       again->bpe.merges[i].merged == b->merges[i].merged,
                   "slot %lld", (long long)i);
    tokenizer_close(again);
    free(merges);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    Tokenizer *t;
    size_t n;
    char *text = with_alphabet((const char *)data, size, &n);
    fuzz_write("in.json", text, n);
    free(text);
    fuzz_memory_start();
    Err err = tokenizer_open(fuzz_path("in.json"), &t);
    FUZZ_MEMORY_BOUND(n, 4, FUZZ_JSON_BYTES + (2 << 20));
    fuzz_check_error(err, ERR_DATA, ERR_DATA, false);
    if (err) return 0;
    FUZZ_CHECK(t->vocab >= 1 && t->eod < t->vocab, "%d ids", t->vocab);
    check_text(t);
    if (is_plain(t)) check_again(t);
    tokenizer_close(t);
    return 0;
}
