/* The table behind the store (inside boot/ only): keys, values, limits on what they and those of one rank take. */
#ifndef MEGATRAIN_BOOT_KV_H
#define MEGATRAIN_BOOT_KV_H

#include <stdbool.h>
#include <stddef.h>

enum { KV_BUCKETS = 1024, KV_BYTES_MAX = 256 << 20, KV_RANK_BYTES_MAX = 4 << 20, KV_RANK_KEYS_MAX = 1024 };

typedef struct KvItem {
    struct KvItem *next;
    int owner; /* the rank that set it last */
    size_t size;
    char *value;
    char key[];
} KvItem;

typedef struct {
    size_t bytes, keys;
} KvUse;

typedef struct {
    KvItem *buckets[KV_BUCKETS];
    size_t bytes;
    KvUse *use; /* by rank */
} Kv;

bool kv_open(Kv *kv, int ranks);                      /* false: no memory */
const KvItem *kv_find(const Kv *kv, const char *key); /* NULL: not set */
/* Copies the value in the place of any earlier one; false when full, or this rank's share is. */
bool kv_put(Kv *kv, int rank, const char *key, const void *value, size_t size);
void kv_free(Kv *kv);

#endif
