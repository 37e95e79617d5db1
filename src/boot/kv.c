/* Chained hashing; keys are never taken out. */
#include "boot/kv.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static size_t bucket_of(const char *key)
{
    uint32_t h = 2166136261u; /* FNV-1a */
    for (; *key; key++) h = (h ^ (unsigned char)*key) * 16777619u;
    return h % KV_BUCKETS;
}

static KvItem *find(const Kv *kv, const char *key)
{
    KvItem *i = kv->buckets[bucket_of(key)];
    while (i && strcmp(i->key, key)) i = i->next;
    return i;
}

const KvItem *kv_find(const Kv *kv, const char *key) { return find(kv, key); }

bool kv_open(Kv *kv, int ranks)
{
    *kv = (Kv){ .use = calloc((size_t)ranks, sizeof *kv->use) };
    return kv->use;
}

static KvItem *add(Kv *kv, int rank, const char *key)
{
    const size_t bytes = sizeof(KvItem) + strlen(key) + 1;
    KvItem **bucket = &kv->buckets[bucket_of(key)], *i = NULL;
    if (kv->bytes + bytes <= KV_BYTES_MAX && kv->use[rank].keys < KV_RANK_KEYS_MAX) i = calloc(1, bytes);
    if (!i) return NULL;
    kv->bytes += bytes;
    kv->use[rank].keys++;
    strcpy(i->key, key);
    i->owner = rank;
    i->next = *bucket;
    return *bucket = i;
}

bool kv_put(Kv *kv, int rank, const char *key, const void *value, size_t size)
{
    const bool fits = kv->bytes + size <= KV_BYTES_MAX && kv->use[rank].bytes + size <= KV_RANK_BYTES_MAX;
    char *copy = fits ? malloc(size + 1) : NULL;
    KvItem *i = copy ? find(kv, key) : NULL;
    if (copy && !i) i = add(kv, rank, key);
    if (!i) return free(copy), false;
    memcpy(copy, value, size);
    kv->bytes += size - i->size;
    kv->use[i->owner].bytes -= i->size;
    kv->use[rank].bytes += size;
    free(i->value);
    i->value = copy;
    i->size = size;
    i->owner = rank;
    return true;
}

void kv_free(Kv *kv)
{
    for (int b = 0; b < KV_BUCKETS; b++)
        while (kv->buckets[b]) {
            KvItem *i = kv->buckets[b];
            kv->buckets[b] = i->next;
            free(i->value);
            free(i);
        }
    free(kv->use);
}
