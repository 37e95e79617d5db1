/* The table behind the store (inside boot/ only): keys and values, and limits for what all of them take and for what
 * those of one rank take. */
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
    KvUse *use; /* the index is a rank */
} Kv;

bool kv_open(Kv *kv, int ranks);                      /* false: there is no memory */
const KvItem *kv_find(const Kv *kv, const char *key); /* NULL: it is not set */
/* Copies the value, which replaces an earlier one. False: the table, or this rank's share of it, is full. */
bool kv_put(Kv *kv, int rank, const char *key, const void *value, size_t size);
void kv_free(Kv *kv);

#endif
