/*
 * Training byte-level BPE.
 *
 *   1. count the distinct words of the text (wordcount.h);
 *   2. count all neighbouring pairs of symbols over the words, overlapping ones too ("aaa" has two);
 *   3. again and again merge the most frequent pair in the words that hold it, keeping the counts right by touching
 *      only the neighbours of each merged place.
 *
 * The heap of candidates is lazy: when a pair's count grows, a fresh entry is pushed; when it shrinks, nothing happens
 * until its entry comes up too high and is put back where it belongs. An entry below the present count is a leftover.
 * So the top entry that agrees with its pair is the true maximum.
 *
 * Two merges can spell the same token ("a"+"bc", "ab"+"c"); the second gives no new id, only a merge rule. The result
 * is a function of the words and their counts: neither hash tables nor the order of words decide anything.
 */
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/log.h"
#include "base/rng.h"
#include "data/alphabet.h"
#include "data/grow.h"
#include "data/progress.h"
#include "data/tokenizer_impl.h"
#include "data/wordcount.h"

enum { BYTES = 256, VOCAB_LIMIT = 1 << 22 };

typedef struct {
    uint64_t key; /* left << 32 | right */
    int64_t count;
    int64_t last_use; /* newest Use of this pair, -1 if none */
    bool grown;       /* since the last merge; in t->grown */
} Pair;

/* A word in which a pair occurred at some time. */
typedef struct {
    int64_t word, older;
} Use;

typedef struct {
    int64_t count, pair;
    uint64_t turn; /* among equally frequent ones the smaller goes first */
} Candidate;

typedef struct {
    WordCounts counts; /* a word's size is that of its symbols */
    int32_t *symbols;  /* the symbols of all words, each word's where its bytes are */
    Pair *pairs;
    int64_t *pair_table; /* slots hold pair + 1 */
    Use *uses;
    Candidate *heap;
    int64_t *grown; /* pairs */
    int64_t pair_count, pair_capacity, pair_slots, use_count, use_capacity;
    int64_t heap_count, heap_capacity, grown_count, grown_capacity;

    SetupArena mem; /* bytes of tokens */
    Bpe lookup;     /* finds a token by its bytes */
    TrainedMerge *merges;
    int64_t merge_count, merge_capacity, token_count;
} Trainer;

/* ---- 1. words ---- */

static Err count_words(Trainer *t, const TokenizerTrainOptions *o)
{
    TRY(word_counts_of(&(WordInputs){ o->inputs, o->input_count, o->format, o->key, o->threads, o->skip_missing },
                       &t->counts));
    if (t->counts.word_count == 0) return err_set(ERR_DATA, "the input holds no text to train a tokenizer on");
    if (t->counts.missing_lines)
        log_info("%lld line%s passed over: the member '%s' is missing or null", (long long)t->counts.missing_lines,
                 t->counts.missing_lines == 1 ? " was" : "s were", o->key ? o->key : "text");
    if (t->counts.invalid_bytes)
        log_warn("%lld bytes of invalid UTF-8 in the input were not counted", (long long)t->counts.invalid_bytes);
    return ERR_OK;
}

/* ---- 2. pairs ---- */

static int64_t *pair_slot(const Trainer *t, uint64_t key)
{
    for (uint64_t i = rng_mix(key);; i++) {
        int64_t *slot = &t->pair_table[i & (uint64_t)(t->pair_slots - 1)];
        if (*slot == 0 || t->pairs[*slot - 1].key == key) return slot;
    }
}

static Err pairs_rehash(Trainer *t)
{
    t->pair_slots = t->pair_slots ? 2 * t->pair_slots : 1 << 12;
    free(t->pair_table);
    t->pair_table = calloc((size_t)t->pair_slots, sizeof *t->pair_table);
    if (!t->pair_table) return err_set(ERR_MEMORY, "no memory for a table of %lld slots", (long long)t->pair_slots);
    for (int64_t i = 0; i < t->pair_count; i++) *pair_slot(t, t->pairs[i].key) = i + 1;
    return ERR_OK;
}

static uint64_t key_of(int32_t left, int32_t right) { return (uint64_t)(uint32_t)left << 32 | (uint32_t)right; }

static Err pair_grow(Trainer *t, uint64_t key, int64_t word)
{
    if (2 * t->pair_count >= t->pair_slots) TRY(pairs_rehash(t));
    int64_t *slot = pair_slot(t, key);
    if (*slot == 0) {
        TRY(grow_to(&t->pairs, &t->pair_capacity, t->pair_count + 1));
        t->pairs[t->pair_count] = (Pair){ .key = key, .last_use = -1 };
        *slot = ++t->pair_count;
    }
    Pair *p = &t->pairs[*slot - 1];
    p->count += t->counts.words[word].count;
    if (!p->grown) {
        TRY(grow_to(&t->grown, &t->grown_capacity, t->grown_count + 1));
        t->grown[t->grown_count++] = *slot - 1;
        p->grown = true;
    }
    if (p->last_use >= 0 && t->uses[p->last_use].word == word) return ERR_OK;
    TRY(grow_to(&t->uses, &t->use_capacity, t->use_count + 1));
    t->uses[t->use_count] = (Use){ .word = word, .older = p->last_use };
    p->last_use = t->use_count++;
    return ERR_OK;
}

static void pair_shrink(Trainer *t, uint64_t key, int64_t word)
{
    t->pairs[*pair_slot(t, key) - 1].count -= t->counts.words[word].count;
}

static Err count_pairs(Trainer *t)
{
    const WordCounts *c = &t->counts;
    t->symbols = malloc((size_t)c->byte_count * sizeof *t->symbols);
    if (!t->symbols) return err_set(ERR_MEMORY, "no memory for %lld symbols", (long long)c->byte_count);
    for (int64_t i = 0; i < c->byte_count; i++) t->symbols[i] = (uint8_t)c->bytes[i];
    for (int64_t w = 0; w < c->word_count; w++) {
        const int32_t *s = t->symbols + c->words[w].start;
        for (int64_t i = 0; i + 1 < c->words[w].size; i++) TRY(pair_grow(t, key_of(s[i], s[i + 1]), w));
    }
    return ERR_OK;
}

/* ---- the heap of candidates ---- */

/* Bytes come in the order of GPT-2's alphabet, then merged tokens as they were made. */
static uint64_t age(int32_t id) { return id < BYTES ? alphabet_char((uint8_t)id) : (uint64_t)id + ALPHABET_END; }

static Candidate candidate(const Trainer *t, int64_t pair)
{
    const Pair *p = &t->pairs[pair];
    return (Candidate){ .count = p->count,
                        .pair = pair,
                        .turn = age((int32_t)(p->key >> 32)) << 32 | age((int32_t)(uint32_t)p->key) };
}

/* True if a is merged before b. */
static bool goes_before(Candidate a, Candidate b) { return a.count != b.count ? a.count > b.count : a.turn < b.turn; }

static Err heap_push(Trainer *t, Candidate c)
{
    TRY(grow_to(&t->heap, &t->heap_capacity, t->heap_count + 1));
    int64_t i = t->heap_count++;
    for (; i > 0 && goes_before(c, t->heap[(i - 1) / 2]); i = (i - 1) / 2) t->heap[i] = t->heap[(i - 1) / 2];
    t->heap[i] = c;
    return ERR_OK;
}

static Candidate heap_pop(Trainer *t)
{
    Candidate top = t->heap[0], last = t->heap[--t->heap_count];
    int64_t i = 0, child;
    while ((child = 2 * i + 1) < t->heap_count) {
        if (child + 1 < t->heap_count && goes_before(t->heap[child + 1], t->heap[child])) child++;
        if (!goes_before(t->heap[child], last)) break;
        t->heap[i] = t->heap[child];
        i = child;
    }
    t->heap[i] = last;
    return top;
}

static Err push_grown(Trainer *t)
{
    for (int64_t i = 0; i < t->grown_count; i++) {
        Pair *p = &t->pairs[t->grown[i]];
        p->grown = false;
        if (p->count >= 2) TRY(heap_push(t, candidate(t, t->grown[i])));
    }
    t->grown_count = 0;
    return ERR_OK;
}

/* The pair to merge next; -1 when none occurs twice. */
static Err best_pair(Trainer *t, int64_t *pair)
{
    *pair = -1;
    while (t->heap_count > 0) {
        Candidate c = heap_pop(t);
        int64_t now = t->pairs[c.pair].count;
        if (c.count == now) {
            *pair = c.pair;
            return ERR_OK;
        }
        if (c.count > now && now >= 2) TRY(heap_push(t, candidate(t, c.pair)));
    }
    return ERR_OK;
}

/* ---- 3. merging ---- */

/* Replaces left, right by `joined` throughout a word and corrects the counts of the pairs around. */
static Err merge_in_word(Trainer *t, int64_t word, TrainedMerge m, int32_t joined)
{
    Word *w = &t->counts.words[word];
    int32_t *s = t->symbols + w->start;
    int64_t n = 0;
    for (int64_t i = 0; i < w->size; i++) {
        if (s[i] != m.left || i + 1 >= w->size || s[i + 1] != m.right) {
            s[n++] = s[i];
            continue;
        }
        pair_shrink(t, key_of(m.left, m.right), word);
        if (n > 0) {
            pair_shrink(t, key_of(s[n - 1], m.left), word);
            TRY(pair_grow(t, key_of(s[n - 1], joined), word));
        }
        if (i + 2 < w->size) {
            pair_shrink(t, key_of(m.right, s[i + 2]), word);
            TRY(pair_grow(t, key_of(joined, s[i + 2]), word));
        }
        s[n++] = joined;
        i++;
    }
    w->size = n;
    return ERR_OK;
}

/* The id of left and right together: a new one unless another merge spelled the same. */
static Err joined_token(Trainer *t, TrainedMerge m, int32_t *out)
{
    TokenText left = t->lookup.tokens[m.left], right = t->lookup.tokens[m.right];
    int64_t size = (int64_t)left.size + right.size;
    char *bytes;
    TRY(setup_array(&t->mem, size, &bytes));
    memcpy(bytes, left.bytes, (size_t)left.size);
    memcpy(bytes + left.size, right.bytes, (size_t)right.size);
    *out = bpe_find(&t->lookup, bytes, size);
    if (*out >= 0) return ERR_OK;
    *out = (int32_t)t->token_count;
    return bpe_add_token(&t->lookup, t->token_count++, bytes, size);
}

static Err merge_pair(Trainer *t, int64_t pair)
{
    uint64_t key = t->pairs[pair].key;
    TrainedMerge m = { (int32_t)(key >> 32), (int32_t)(uint32_t)key };
    int32_t joined = -1;
    TRY(joined_token(t, m, &joined));
    TRY(grow_to(&t->merges, &t->merge_capacity, t->merge_count + 1));
    t->merges[t->merge_count++] = m;
    for (int64_t use = t->pairs[pair].last_use; use >= 0; use = t->uses[use].older)
        TRY(merge_in_word(t, t->uses[use].word, m, joined));
    return push_grown(t);
}

static Err add_single_bytes(Trainer *t)
{
    char *bytes;
    TRY(setup_array(&t->mem, BYTES, &bytes));
    for (int i = 0; i < BYTES; i++) {
        bytes[i] = (char)i;
        TRY(bpe_add_token(&t->lookup, i, bytes + i, 1));
    }
    t->token_count = BYTES;
    return ERR_OK;
}

/* Until there are that many tokens, or no pair occurs twice. */
static Err merge_pairs(Trainer *t, int64_t token_limit)
{
    Progress progress;
    int64_t pair = 0;
    Err err = ERR_OK;
    progress_open(&progress, token_limit, "tokens of the vocabulary");
    while (!err && pair >= 0 && t->token_count < token_limit) {
        err = best_pair(t, &pair);
        if (!err && pair >= 0) err = merge_pair(t, pair);
        progress_items(&progress, t->token_count);
    }
    progress_close(&progress);
    return err;
}

static Err train(Trainer *t, const TokenizerTrainOptions *o)
{
    const int64_t token_limit = o->vocab - 1; /* the last id ends a document */
    TRY(bpe_init(&t->lookup, &t->mem, token_limit, 0));
    TRY(add_single_bytes(t));
    TRY(count_words(t, o));
    TRY(count_pairs(t));
    TRY(push_grown(t));
    TRY(merge_pairs(t, token_limit));
    if (t->token_count < token_limit)
        log_warn("the text gives a vocabulary of %lld only, %lld was wanted: no pair occurs twice",
                 (long long)t->token_count + 1, (long long)o->vocab);
    return tokenizer_json_write(o->output, t->lookup.tokens, t->token_count, t->merges, t->merge_count);
}

static void trainer_release(Trainer *t)
{
    word_counts_free(&t->counts);
    free(t->symbols);
    free(t->pairs);
    free(t->pair_table);
    free(t->uses);
    free(t->heap);
    free(t->grown);
    free(t->merges);
    setup_release(&t->mem);
}

Err tokenizer_train(const TokenizerTrainOptions *o, int64_t *vocab_out)
{
    if (o->vocab <= BYTES || o->vocab > VOCAB_LIMIT)
        return err_set(ERR_CONFIG, "a vocabulary of %lld is impossible: 257 to %d", (long long)o->vocab, VOCAB_LIMIT);
    TRY(file_make_parents(o->output)); /* what cannot be written shall not be computed first */
    TRY(file_check_output(o->output));
    Trainer t = { 0 };
    setup_init(&t.mem);
    Err err = train(&t, o);
    if (!err && vocab_out) *vocab_out = t.token_count + 1;
    trainer_release(&t);
    return err;
}
