#include "data/bpe.h"

#include <stdlib.h>
#include <string.h>

#include "base/rng.h"
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
    *b = (Bpe){ .id_count = (int32_t)id_count,
                .lookup_mask = lookup_slots - 1,
                .merge_mask = merge_slots - 1 };
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
        return err_set(ERR_DATA, "token id '%lld' is outside 0..%d", (long long)id, b->id_count - 1);
    if (size <= 0 || size > INT32_MAX) return err_set(ERR_DATA, "token '%lld' is empty", (long long)id);
    if (b->tokens[id].bytes) return err_set(ERR_DATA, "two tokens have the id '%lld'", (long long)id);
    int32_t *slot = lookup_slot(b, bytes, size);
    if (*slot >= 0)
        return err_set(ERR_DATA, "tokens '%d' and '%lld' stand for the same bytes", *slot, (long long)id);
    b->tokens[id] = (TokenText){ bytes, (int32_t)size };
    *slot = (int32_t)id;
    if (size == 1) b->byte_id[(uint8_t)bytes[0]] = (int32_t)id;
    return ERR_OK;
}

Err bpe_finish(Bpe *b)
{
    for (int i = 0; i < 256; i++)
        if (b->byte_id[i] < 0)
            return err_set(ERR_DATA,
                           "no token stands for the byte '0x%02x': this is not a byte-level vocabulary", i);
    return ERR_OK;
}

static uint64_t pair_key(int32_t left, int32_t right)
{
    return (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
}

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
    if (!joined) return err_set(ERR_MEMORY, "no memory for a token of '%lld' bytes", (long long)size);
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
        return err_set(ERR_DATA, "merge '%lld': its %s part is not in the vocabulary", number,
                       l < 0 ? "left" : "right");
    TRY(join_find(b, left, right, &joined));
    if (joined < 0)
        return err_set(ERR_DATA, "merge '%lld': the merged token is not in the vocabulary", number);
    BpeMerge *m = merge_slot(b, pair_key(l, r));
    if (m->rank >= 0) return err_set(ERR_DATA, "merge '%lld' is the same as merge '%d'", number, m->rank + 1);
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

static void merge_parts(const Bpe *b, BpeWork *w)
{
    Part *p = w->parts;
    while (w->heap_count > 0) {
        uint64_t top = heap_pop(w);
        int32_t i = (int32_t)(uint32_t)top;
        const BpeMerge *m = merge_at(b, p, i);
        /* an entry is stale when its pair has changed since; ranks name pairs, so comparing them
         * will do */
        if (m->rank < 0 || (uint64_t)m->rank != top >> 32) continue;
        int32_t gone = p[i].next;
        p[i].id = m->merged;
        p[i].next = p[gone].next;
        p[gone].id = -1;
        if (p[i].next >= 0) p[p[i].next].previous = i;
        offer(b, w, p[i].previous);
        offer(b, w, i);
    }
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
    return w->capacity ? ERR_OK
                       : err_set(ERR_MEMORY, "no memory for a word of '%lld' bytes", (long long)size);
}

static Err encode_merging(const Bpe *b, BpeWork *w, const char *piece, int64_t size, TokenList *out)
{
    if (size > BPE_PIECE_MAX_BYTES)
        return err_set(ERR_DATA, "a word of '%lld' bytes without a blank cannot be encoded", (long long)size);
    TRY(work_room(w, size));
    for (int64_t i = 0; i < size; i++)
        w->parts[i] = (Part){ .id = b->byte_id[(uint8_t)piece[i]],
                              .previous = (int32_t)i - 1,
                              .next = i + 1 < size ? (int32_t)i + 1 : -1 };
    w->heap_count = 0;
    for (int64_t i = 0; i + 1 < size; i++) offer(b, w, (int32_t)i);
    merge_parts(b, w);
    TRY(grow_to(&out->ids, &out->capacity, out->count + size));
    for (int32_t i = 0; i >= 0; i = w->parts[i].next) out->ids[out->count++] = w->parts[i].id;
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

Err bpe_encode(const Bpe *b, BpeWork *w, const char *piece, int64_t size, TokenList *out)
{
    if (size == 1) return token_list_add(out, b->byte_id[(uint8_t)piece[0]]);
    if (b->whole_pieces) {
        int32_t id = bpe_find(b, piece, size);
        if (id >= 0) return token_list_add(out, id);
    }
    if (size > CACHE_BYTES) return encode_merging(b, w, piece, size, out);
    uint64_t hash = bytes_hash(piece, size);
    CacheSlot *slot = &w->cache[hash & (CACHE_SLOTS - 1)];
    if (slot->count && slot->hash == (uint32_t)(hash >> 32) && slot->size == size &&
        memcmp(slot->bytes, piece, (size_t)size) == 0) {
        TRY(grow_to(&out->ids, &out->capacity, out->count + slot->count));
        memcpy(out->ids + out->count, slot->ids, slot->count * sizeof *slot->ids);
        out->count += slot->count;
        return ERR_OK;
    }
    int64_t before = out->count;
    TRY(encode_merging(b, w, piece, size, out));
    cache_put(slot, hash, (TokenText){ piece, (int32_t)size }, out->ids + before, out->count - before);
    return ERR_OK;
}
