#include "data/bpe.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
#include "base/utf8.h"
#include "data/grow.h"

uint64_t bytes_hash(const char *bytes, int64_t size)
{
    uint64_t h = (uint64_t)size, part;
    for (; size >= 8; bytes += 8, size -= 8) {
        memcpy(&part, bytes, 8);
        h = rng_mix(h ^ part);
    }
    part = 0;
    if (size) memcpy(&part, bytes, (size_t)size);
    return rng_mix(h ^ part);
}

Err token_list_add(TokenList *list, int32_t id)
{
    if (list->count == list->capacity) TRY(grow_to(&list->ids, &list->capacity, list->count + 1));
    list->ids[list->count++] = id;
    return ERR_OK;
}

/* ---- the model ---- */

/* Slots of a hash table for n entries, at most half full; a power of two. */
static int64_t table_slots(int64_t n)
{
    int64_t slots = 16;
    while (slots < 2 * n) slots *= 2;
    return slots;
}

Err bpe_init(Bpe *b, SetupArena *mem, int64_t id_count, int64_t merge_limit)
{
    int64_t lookup_slots = table_slots(id_count), merge_slots = table_slots(merge_limit);
    ASSERT(id_count >= 0 && id_count <= INT32_MAX && merge_limit >= 0 && merge_limit <= INT32_MAX);
    *b = (Bpe){
        .id_count = (int32_t)id_count, .unknown = -1, .lookup_mask = lookup_slots - 1, .merge_mask = merge_slots - 1
    };
    TRY(setup_array(mem, id_count, &b->tokens));
    TRY(setup_array(mem, lookup_slots, &b->lookup));
    TRY(setup_array(mem, merge_slots, &b->merges));
    for (int64_t i = 0; i < lookup_slots; i++) b->lookup[i] = -1;
    for (int64_t i = 0; i < merge_slots; i++) b->merges[i].rank = -1;
    for (int i = 0; i < 256; i++) b->byte_id[i] = -1;
    return ERR_OK;
}

/* The slot that holds these bytes, or the empty slot where they belong. */
static int32_t *lookup_slot(const Bpe *b, const char *bytes, int64_t size)
{
    for (uint64_t i = bytes_hash(bytes, size);; i++) {
        int32_t *slot = &b->lookup[i & (uint64_t)b->lookup_mask];
        if (*slot < 0) return slot;
        const TokenText *t = &b->tokens[*slot];
        if (t->size == size && memcmp(t->bytes, bytes, (size_t)size) == 0) return slot;
    }
}

int32_t bpe_find(const Bpe *b, const char *bytes, int64_t size) { return *lookup_slot(b, bytes, size); }

Err bpe_add_token(Bpe *b, int64_t id, const char *bytes, int64_t size)
{
    if (id < 0 || id >= b->id_count)
        return err_set(ERR_DATA, "token id %lld is outside 0..%d", (long long)id, b->id_count - 1);
    if (size <= 0 || size > INT32_MAX) return err_set(ERR_DATA, "token %lld is empty", (long long)id);
    if (b->tokens[id].bytes) return err_set(ERR_DATA, "two tokens have the id %lld", (long long)id);
    int32_t *slot = lookup_slot(b, bytes, size);
    if (*slot >= 0) return err_set(ERR_DATA, "tokens %d and %lld stand for the same bytes", *slot, (long long)id);
    b->tokens[id] = (TokenText){ bytes, (int32_t)size };
    *slot = (int32_t)id;
    return ERR_OK;
}

Err bpe_finish_bytes(Bpe *b)
{
    for (int i = 0; i < 256; i++) {
        const char byte = (char)i;
        b->byte_id[i] = bpe_find(b, &byte, 1);
        if (b->byte_id[i] < 0)
            return err_set(ERR_DATA, "no token stands for the byte 0x%02x: this is not a byte-level vocabulary", i);
    }
    return ERR_OK;
}

enum { BLANK_BYTES = sizeof BPE_BLANK - 1 };

static bool is_blank(const char *at, const char *end)
{
    return end - at >= BLANK_BYTES && memcmp(at, BPE_BLANK, BLANK_BYTES) == 0;
}

/* The first blank behind `at` that stands behind another character; `end`: there is none. */
static const char *next_word(const char *at, const char *end)
{
    const char *start = at;
    while ((at = memchr(at, BPE_BLANK[0], (size_t)(end - at)))) {
        const bool blank = is_blank(at, end);
        if (blank && at > start && !(at - start >= BLANK_BYTES && is_blank(at - BLANK_BYTES, end))) return at;
        at += blank ? BLANK_BYTES : 1;
    }
    return end;
}

static void find_word_ends(Bpe *b)
{
    const bool has_blank = bpe_find(b, BPE_BLANK, BLANK_BYTES) >= 0;
    memset(b->word_ends, has_blank, sizeof b->word_ends);
    for (int32_t id = 0; id < b->id_count; id++) {
        const char *at = b->tokens[id].bytes, *end = at ? at + b->tokens[id].size : at;
        while (at < end && (at = next_word(at, end)) < end) b->word_ends[(uint8_t)at[-1]] = false;
    }
}

Err bpe_finish_characters(Bpe *b, const char *unknown, bool fuse, bool fallback)
{
    bool all_bytes = true;
    char spelling[8];
    b->characters = true;
    b->fuse_unknown = fuse;
    if (unknown) {
        b->unknown = bpe_find(b, unknown, (int64_t)strlen(unknown));
        if (b->unknown < 0) return err_set(ERR_DATA, "the unk_token '%s' is not in the vocabulary", unknown);
    }
    for (int i = 0; i < 256; i++) {
        snprintf(spelling, sizeof spelling, "<0x%02X>", (unsigned)i);
        b->byte_id[i] = fallback ? bpe_find(b, spelling, 6) : -1;
        all_bytes = all_bytes && b->byte_id[i] >= 0;
    }
    find_word_ends(b);
    if (all_bytes || b->unknown >= 0) return ERR_OK;
    return err_set(ERR_DATA, "there is neither an unk_token nor byte_fallback with the tokens of all bytes: some "
                             "characters would have no token");
}

static uint64_t pair_key(int32_t left, int32_t right) { return (uint64_t)(uint32_t)left << 32 | (uint32_t)right; }

/* The slot of this pair, or the empty slot (rank -1) where it belongs. */
static BpeMerge *merge_slot(const Bpe *b, uint64_t pair)
{
    for (uint64_t i = rng_mix(pair);; i++) {
        BpeMerge *m = &b->merges[i & (uint64_t)b->merge_mask];
        if (m->rank < 0 || m->pair == pair) return m;
    }
}

static Err join_find(const Bpe *b, TokenText left, TokenText right, int32_t *out)
{
    char room[256];
    int64_t size = (int64_t)left.size + right.size;
    char *joined = size <= (int64_t)sizeof room ? room : malloc((size_t)size);
    if (!joined) return err_set(ERR_MEMORY, "no memory for a token of %lld bytes", (long long)size);
    memcpy(joined, left.bytes, (size_t)left.size);
    memcpy(joined + left.size, right.bytes, (size_t)right.size);
    *out = bpe_find(b, joined, size);
    if (joined != room) free(joined);
    return ERR_OK;
}

Err bpe_add_merge(Bpe *b, TokenText left, TokenText right)
{
    int32_t l = bpe_find(b, left.bytes, left.size), r = bpe_find(b, right.bytes, right.size), joined = -1;
    long long number = b->merge_count + 1;
    if (l < 0 || r < 0)
        return err_set(ERR_DATA, "merge %lld: its %s part is not in the vocabulary", number, l < 0 ? "left" : "right");
    TRY(join_find(b, left, right, &joined));
    if (joined < 0) return err_set(ERR_DATA, "merge %lld: the merged token is not in the vocabulary", number);
    BpeMerge *m = merge_slot(b, pair_key(l, r));
    if (m->rank >= 0) return err_set(ERR_DATA, "merge %lld is the same as merge %d", number, m->rank + 1);
    ASSERT(2 * b->merge_count <= b->merge_mask);
    *m = (BpeMerge){ .pair = pair_key(l, r), .rank = (int32_t)b->merge_count++, .merged = joined };
    return ERR_OK;
}

/* ---- encoding one piece ---- */

/* Pieces up to CACHE_BYTES that became at most CACHE_IDS tokens are remembered, one per slot: 64
 * bytes. */
enum { CACHE_SLOTS = 1 << 15, CACHE_BYTES = 26, CACHE_IDS = 8, PARTS_MIN = 64 };

typedef struct {
    uint32_t hash;
    uint8_t size, count; /* count 0: empty */
    char bytes[CACHE_BYTES];
    int32_t ids[CACHE_IDS];
} CacheSlot;

typedef struct {
    int32_t id; /* -1: merged into its left neighbour */
    int32_t previous, next;
} Part;

struct BpeWork {
    CacheSlot *cache;
    Part *parts;
    uint64_t *heap;               /* rank << 32 | left part's place; the smallest is merged next */
    int64_t capacity, heap_count; /* capacity parts, twice as many entries */
};

Err bpe_work_open(BpeWork **out)
{
    BpeWork *w = calloc(1, sizeof *w);
    if (w) w->cache = calloc(CACHE_SLOTS, sizeof *w->cache);
    if (!w || !w->cache) {
        free(w);
        return err_set(ERR_MEMORY, "no memory for the piece cache");
    }
    *out = w;
    return ERR_OK;
}

void bpe_work_close(BpeWork *w)
{
    if (!w) return;
    free(w->cache);
    free(w->parts);
    free(w->heap);
    free(w);
}

static void heap_push(BpeWork *w, uint64_t key)
{
    int64_t i = w->heap_count++;
    for (; i > 0 && w->heap[(i - 1) / 2] > key; i = (i - 1) / 2) w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = key;
}

static uint64_t heap_pop(BpeWork *w)
{
    uint64_t top = w->heap[0], last = w->heap[--w->heap_count];
    int64_t i = 0, child;
    while ((child = 2 * i + 1) < w->heap_count) {
        if (child + 1 < w->heap_count && w->heap[child + 1] < w->heap[child]) child++;
        if (w->heap[child] >= last) break;
        w->heap[i] = w->heap[child];
        i = child;
    }
    w->heap[i] = last;
    return top;
}

/* The merge of the part at `i` with its right neighbour, or an empty slot. */
static const BpeMerge *merge_at(const Bpe *b, const Part *parts, int32_t i)
{
    static const BpeMerge none = { .rank = -1 };
    if (i < 0 || parts[i].id < 0 || parts[i].next < 0) return &none;
    return merge_slot(b, pair_key(parts[i].id, parts[parts[i].next].id));
}

static void offer(const Bpe *b, BpeWork *w, int32_t i)
{
    const BpeMerge *m = merge_at(b, w->parts, i);
    if (m->rank >= 0) heap_push(w, (uint64_t)m->rank << 32 | (uint32_t)i);
}

/* Merges the first n parts; the rank of the last merge, -1: there was none. */
static int32_t merge_parts(const Bpe *b, BpeWork *w, int64_t n)
{
    Part *p = w->parts;
    int32_t last = -1;
    p[n - 1].next = -1;
    w->heap_count = 0;
    for (int64_t i = 0; i + 1 < n; i++) offer(b, w, (int32_t)i);
    while (w->heap_count > 0) {
        uint64_t top = heap_pop(w);
        int32_t i = (int32_t)(uint32_t)top;
        const BpeMerge *m = merge_at(b, p, i);
        /* an entry is stale when its pair has changed since; ranks name pairs, so comparing them
         * will do */
        if (m->rank < 0 || (uint64_t)m->rank != top >> 32) continue;
        int32_t gone = p[i].next;
        last = m->rank;
        p[i].id = m->merged;
        p[i].next = p[gone].next;
        p[gone].id = -1;
        if (p[i].next >= 0) p[p[i].next].previous = i;
        offer(b, w, p[i].previous);
        offer(b, w, i);
    }
    return last;
}

/* Nothing in the arrays is kept, and a long word is rare: they are made anew, as long as it is. The heap has an entry a
 * pair at first, and one more with each merge, which takes one and may offer two. */
static Err work_room(BpeWork *w, int64_t size)
{
    if (size <= w->capacity) return ERR_OK;
    if (size < PARTS_MIN) size = PARTS_MIN;
    free(w->parts);
    free(w->heap);
    w->parts = malloc((size_t)size * sizeof *w->parts);
    w->heap = malloc((size_t)size * 2 * sizeof *w->heap);
    w->capacity = w->parts && w->heap ? size : 0;
    return w->capacity ? ERR_OK : err_set(ERR_MEMORY, "no memory for a word of %lld bytes", (long long)size);
}

static int64_t add_part(BpeWork *w, int64_t n, int32_t id)
{
    w->parts[n] = (Part){ .id = id, .previous = (int32_t)n - 1, .next = (int32_t)n + 1 };
    return n + 1;
}

/* The tokens of a character's bytes; 0 if one of them has none. */
static int64_t byte_parts(const Bpe *b, BpeWork *w, int64_t n, const char *bytes, int count)
{
    for (int i = 0; i < count; i++)
        if (b->byte_id[(uint8_t)bytes[i]] < 0) return 0;
    for (int i = 0; i < count; i++) n = add_part(w, n, b->byte_id[(uint8_t)bytes[i]]);
    return n;
}

/* Adds the parts of characters in the package's order: an unknown token waits until a character of the vocabulary
 * comes, behind the bytes of characters between them. */
static int64_t character_parts(const Bpe *b, BpeWork *w, const char *piece, int64_t size)
{
    int64_t n = 0, by_bytes;
    bool waiting = false;
    int bytes;
    for (int64_t at = 0; at < size; at += bytes) {
        utf8_get(piece + at, &bytes);
        const int32_t id = bpe_find(b, piece + at, bytes);
        if (id < 0 && (by_bytes = byte_parts(b, w, n, piece + at, bytes)) > 0) {
            n = by_bytes;
        } else {
            if (waiting && (id >= 0 || !b->fuse_unknown)) n = add_part(w, n, b->unknown);
            waiting = id < 0;
            if (id >= 0) n = add_part(w, n, id);
        }
    }
    return waiting ? add_part(w, n, b->unknown) : n;
}

static Err encode_merging(const Bpe *b, BpeWork *w, const char *piece, int64_t size, TokenList *out)
{
    int64_t n = 0;
    if (size > BPE_PIECE_MAX_BYTES)
        return err_set(ERR_DATA, "a word of %lld bytes without a blank cannot be encoded", (long long)size);
    TRY(work_room(w, size));
    if (b->characters) n = character_parts(b, w, piece, size);
    else
        while (n < size) n = add_part(w, n, b->byte_id[(uint8_t)piece[n]]);
    merge_parts(b, w, n);
    TRY(grow_to(&out->ids, &out->capacity, out->count + n));
    for (int32_t i = 0; i >= 0; i = w->parts[i].next) out->ids[out->count++] = w->parts[i].id;
    return ERR_OK;
}

Err bpe_alone(const Bpe *b, BpeWork *w, TokenText text, BpeAlone *out)
{
    int64_t n = 0;
    int bytes = 1;
    *out = (BpeAlone){ .id = -1, .rank = -1 };
    if (text.size == 0) return ERR_OK;
    TRY(work_room(w, text.size));
    for (int64_t at = 0; at < text.size; at += bytes) {
        if (b->characters) utf8_get(text.bytes + at, &bytes);
        n = add_part(w, n, bpe_find(b, text.bytes + at, bytes));
    }
    out->rank = merge_parts(b, w, n);
    for (int32_t i = 0; i >= 0; i = w->parts[i].next) out->symbols++;
    out->id = out->symbols == 1 ? w->parts[0].id : -1;
    return ERR_OK;
}

static void cache_put(CacheSlot *slot, uint64_t hash, TokenText piece, const int32_t *ids, int64_t count)
{
    if (count > CACHE_IDS) return;
    slot->hash = (uint32_t)(hash >> 32);
    slot->size = (uint8_t)piece.size;
    slot->count = (uint8_t)count;
    memcpy(slot->bytes, piece.bytes, (size_t)piece.size);
    memcpy(slot->ids, ids, (size_t)count * sizeof *ids);
}

/* Encodes a text that is merged apart: a piece of bytes, or a word of a piece of characters. */
static Err encode_word(const Bpe *b, BpeWork *w, const char *word, int64_t size, TokenList *out)
{
    if (size > CACHE_BYTES) return encode_merging(b, w, word, size, out);
    uint64_t hash = bytes_hash(word, size);
    CacheSlot *slot = &w->cache[hash & (CACHE_SLOTS - 1)];
    if (slot->count && slot->hash == (uint32_t)(hash >> 32) && slot->size == size &&
        memcmp(slot->bytes, word, (size_t)size) == 0) {
        TRY(grow_to(&out->ids, &out->capacity, out->count + slot->count));
        memcpy(out->ids + out->count, slot->ids, slot->count * sizeof *slot->ids);
        out->count += slot->count;
        return ERR_OK;
    }
    int64_t before = out->count;
    TRY(encode_merging(b, w, word, size, out));
    cache_put(slot, hash, (TokenText){ word, (int32_t)size }, out->ids + before, out->count - before);
    return ERR_OK;
}

static Err encode_words(const Bpe *b, BpeWork *w, const char *at, const char *end, TokenList *out)
{
    for (const char *word = at; word < end; word = at) {
        do at = next_word(at, end);
        while (at < end && !b->word_ends[(uint8_t)at[-1]]);
        TRY(encode_word(b, w, word, at - word, out));
    }
    return ERR_OK;
}

Err bpe_encode(const Bpe *b, BpeWork *w, const char *piece, int64_t size, TokenList *out)
{
    if (size == 1 && !b->characters) return token_list_add(out, b->byte_id[(uint8_t)piece[0]]);
    if (b->whole_pieces) {
        int32_t id = bpe_find(b, piece, size);
        if (id >= 0) return token_list_add(out, id);
    }
    return b->characters ? encode_words(b, w, piece, piece + size, out) : encode_word(b, w, piece, size, out);
}
