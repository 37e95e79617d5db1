/* The table behind the store (inside comm/ only): keys, values, a limit on the memory that they take. */
#ifndef MEGATRAIN_COMM_KV_H
#define MEGATRAIN_COMM_KV_H

#include <stdbool.h>
#include <stddef.h>

enum { KV_BUCKETS = 1024, KV_BYTES_MAX = 256 << 20 };

typedef struct KvItem {
    struct KvItem *next;
    size_t size;
    char *value;
    char key[];
} KvItem;

typedef struct {
    KvItem *buckets[KV_BUCKETS];
    size_t bytes;
} Kv;

const KvItem *kv_find(const Kv *kv, const char *key); /* NULL: not set */
/* Copies the value in the place of any earlier one; false when full. */
bool kv_put(Kv *kv, const char *key, const void *value, size_t size);
void kv_free(Kv *kv);

#endif
