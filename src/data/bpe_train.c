/*
 * Training byte-level BPE.
 *
 *   1. cut the text into GPT-2's pieces and count each distinct one (a word with its count);
 *   2. count all neighbouring pairs of symbols over the words, overlapping ones too ("aaa" has
 *   two);
 *   3. again and again merge the most frequent pair in the words that hold it, keeping the counts
 *   right
 *      by touching only the neighbours of each merged place.
 *
 * The heap of candidates is lazy: when a pair's count grows, a fresh entry is pushed; when it
 * shrinks, nothing happens until its entry comes up too high and is put back where it belongs. An
 * entry below the present count is a leftover. So the top entry that agrees with its pair is the
 * true maximum.
 *
 * Two merges can spell the same token ("a"+"bc", "ab"+"c"); the second gives no new id, only a
 * merge rule. The result is a function of the words and their counts: hash tables decide no order.
 */
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/log.h"
#include "base/rng.h"
#include "data/grow.h"
#include "data/tokenizer_impl.h"
#include "data/utf8.h"

enum { BYTES = 256, VOCAB_LIMIT = 1 << 22 };

typedef struct {
    int64_t start; /* of its bytes, later of its symbols, in one pool */
    int64_t size;
    int64_t count;
} Word;

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
} Candidate;

typedef struct {
    char *bytes; /* of all words */
    Word *words;
    int64_t *word_table; /* slots hold word + 1 */
    int32_t *symbols;    /* of all words, at the same place as their bytes */
    Pair *pairs;
    int64_t *pair_table; /* slots hold pair + 1 */
    Use *uses;
    Candidate *heap;
    int64_t *grown; /* pairs */
    int64_t byte_count, byte_capacity, word_count, word_capacity, word_slots;
    int64_t pair_count, pair_capacity, pair_slots, use_count, use_capacity;
    int64_t heap_count, heap_capacity, grown_count, grown_capacity;
    int64_t invalid_bytes;

    SetupArena mem; /* bytes of tokens */
    Bpe lookup;     /* finds a token by its bytes */
    TrainedMerge *merges;
    int64_t merge_count, merge_capacity, token_count;
} Trainer;

/* ---- 1. words ---- */

static Err table_new(int64_t **table, int64_t slots)
{
    free(*table);
    *table = calloc((size_t)slots, sizeof **table);
    return *table ? ERR_OK : err_set(ERR_MEMORY, "no memory for a table of '%lld' slots", (long long)slots);
}

/* The slot of these bytes: holds word + 1, or 0 if the word is new. */
static int64_t *word_slot(const Trainer *t, const char *bytes, int64_t size)
{
    for (uint64_t i = bytes_hash(bytes, size);; i++) {
        int64_t *slot = &t->word_table[i & (uint64_t)(t->word_slots - 1)];
        if (*slot == 0) return slot;
        const Word *w = &t->words[*slot - 1];
        if (w->size == size && memcmp(t->bytes + w->start, bytes, (size_t)size) == 0) return slot;
    }
}

static Err words_rehash(Trainer *t)
{
    t->word_slots = t->word_slots ? 2 * t->word_slots : 1 << 12;
    TRY(table_new(&t->word_table, t->word_slots));
    for (int64_t i = 0; i < t->word_count; i++)
        *word_slot(t, t->bytes + t->words[i].start, t->words[i].size) = i + 1;
    return ERR_OK;
}

static Err count_word(Trainer *t, const char *bytes, int64_t size)
{
    if (2 * t->word_count >= t->word_slots) TRY(words_rehash(t));
    int64_t *slot = word_slot(t, bytes, size);
    if (*slot == 0) {
        TRY(grow_to(&t->words, &t->word_capacity, t->word_count + 1));
        TRY(grow_to(&t->bytes, &t->byte_capacity, t->byte_count + size));
        memcpy(t->bytes + t->byte_count, bytes, (size_t)size);
        t->words[t->word_count] = (Word){ .start = t->byte_count, .size = size };
        t->byte_count += size;
        *slot = ++t->word_count;
    }
    t->words[*slot - 1].count++;
    return ERR_OK;
}

static Err count_text(Trainer *t, SplitterWork *split, const char *text, int64_t size)
{
    for (int64_t at = 0; at < size; at++) { /* each round: a valid run, then one invalid byte */
        int64_t stop = at + utf8_valid_bytes(text + at, size - at);
        for (int64_t end; at < stop; at = end) {
            TRY(splitter_next(split, text, stop, at, &end));
            TRY(count_word(t, text + at, end - at));
        }
        t->invalid_bytes += stop < size;
    }
    return ERR_OK;
}

static Err count_files(Trainer *t, SplitterWork *split, const TokenizerTrainOptions *o)
{
    for (int i = 0; i < o->input_count; i++) {
        FileMap map;
        TRY_AS(ERR_DATA, file_map(o->inputs[i], &map));
        Err err = count_text(t, split, map.data, map.size_bytes);
        file_unmap(&map);
        if (err) return err_prefix(err, "'%s'", o->inputs[i]);
    }
    if (t->word_count == 0) return err_set(ERR_DATA, "the input holds no text to train a tokenizer on");
    if (t->invalid_bytes)
        log_warn("'%lld' bytes of invalid UTF-8 in the input were not counted", (long long)t->invalid_bytes);
    return ERR_OK;
}

static Err count_words(Trainer *t, const TokenizerTrainOptions *o)
{
    Splitter *splitter;
    SplitterWork *work;
    TRY(splitter_open(SPLIT_GPT2, &splitter));
    Err err = splitter_work_open(splitter, &work);
    if (!err) {
        err = count_files(t, work, o);
        splitter_work_close(work);
    }
    splitter_close(splitter);
    return err;
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
    TRY(table_new(&t->pair_table, t->pair_slots));
    for (int64_t i = 0; i < t->pair_count; i++) *pair_slot(t, t->pairs[i].key) = i + 1;
    return ERR_OK;
}

static uint64_t key_of(int32_t left, int32_t right)
{
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

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
    p->count += t->words[word].count;
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
    t->pairs[*pair_slot(t, key) - 1].count -= t->words[word].count;
}

static Err count_pairs(Trainer *t)
{
    t->symbols = malloc((size_t)t->byte_count * sizeof *t->symbols);
    if (!t->symbols) return err_set(ERR_MEMORY, "no memory for '%lld' symbols", (long long)t->byte_count);
    for (int64_t i = 0; i < t->byte_count; i++) t->symbols[i] = (uint8_t)t->bytes[i];
    for (int64_t w = 0; w < t->word_count; w++) {
        const int32_t *s = t->symbols + t->words[w].start;
        for (int64_t i = 0; i + 1 < t->words[w].size; i++) TRY(pair_grow(t, key_of(s[i], s[i + 1]), w));
    }
    return ERR_OK;
}

/* ---- the heap of candidates ---- */

static int compare_tokens(const Trainer *t, uint64_t a, uint64_t b)
{
    const TokenText *x = &t->lookup.tokens[a], *y = &t->lookup.tokens[b];
    int32_t common = x->size < y->size ? x->size : y->size;
    int order = memcmp(x->bytes, y->bytes, (size_t)common);
    return order ? order : (x->size > y->size) - (x->size < y->size);
}

/* True if a is merged before b. */
static bool goes_before(const Trainer *t, Candidate a, Candidate b)
{
    if (a.count != b.count) return a.count > b.count;
    uint64_t x = t->pairs[a.pair].key, y = t->pairs[b.pair].key;
    int order = compare_tokens(t, x >> 32, y >> 32);
    return (order ? order : compare_tokens(t, (uint32_t)x, (uint32_t)y)) < 0;
}

static Err heap_push(Trainer *t, Candidate c)
{
    TRY(grow_to(&t->heap, &t->heap_capacity, t->heap_count + 1));
    int64_t i = t->heap_count++;
    for (; i > 0 && goes_before(t, c, t->heap[(i - 1) / 2]); i = (i - 1) / 2)
        t->heap[i] = t->heap[(i - 1) / 2];
    t->heap[i] = c;
    return ERR_OK;
}

static Candidate heap_pop(Trainer *t)
{
    Candidate top = t->heap[0], last = t->heap[--t->heap_count];
    int64_t i = 0, child;
    while ((child = 2 * i + 1) < t->heap_count) {
        if (child + 1 < t->heap_count && goes_before(t, t->heap[child + 1], t->heap[child])) child++;
        if (!goes_before(t, t->heap[child], last)) break;
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
        if (p->count >= 2) TRY(heap_push(t, (Candidate){ p->count, t->grown[i] }));
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
        if (c.count > now && now >= 2) TRY(heap_push(t, (Candidate){ now, c.pair }));
    }
    return ERR_OK;
}

/* ---- 3. merging ---- */

/* Replaces left, right by `joined` throughout a word and corrects the counts of the pairs around. */
static Err merge_in_word(Trainer *t, int64_t word, TrainedMerge m, int32_t joined)
{
    Word *w = &t->words[word];
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

static Err train(Trainer *t, const TokenizerTrainOptions *o)
{
    int64_t token_limit = o->vocab - 1, pair; /* the last id ends a document */
    TRY(bpe_init(&t->lookup, &t->mem, token_limit, 0));
    TRY(add_single_bytes(t));
    TRY(count_words(t, o));
    TRY(count_pairs(t));
    TRY(push_grown(t));
    while (t->token_count < token_limit) {
        TRY(best_pair(t, &pair));
        if (pair < 0) break;
        TRY(merge_pair(t, pair));
    }
    if (t->token_count < token_limit)
        log_warn("the text gives a vocabulary of '%lld' only, '%lld' was wanted: no pair occurs twice",
                 (long long)t->token_count + 1, (long long)o->vocab);
    return tokenizer_json_write(o->output, t->lookup.tokens, t->token_count, t->merges, t->merge_count);
}

static void trainer_release(Trainer *t)
{
    free(t->bytes);
    free(t->words);
    free(t->word_table);
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
        return err_set(ERR_CONFIG, "a vocabulary of '%lld' is impossible: 257 to %d", (long long)o->vocab,
                       VOCAB_LIMIT);
    Trainer t = { 0 };
    setup_init(&t.mem);
    Err err = train(&t, o);
    if (!err && vocab_out) *vocab_out = t.token_count + 1;
    trainer_release(&t);
    return err;
}
