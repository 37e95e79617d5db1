/* Keys and values: the requests of ranks to rank 0's server. */
#include <string.h>

#include "boot/host_impl.h"

static void reply(Conn *c, uint32_t id, const void *value, size_t size)
{
    link_put(&c->link, FRAME_REPLY, id, value, size, NULL, 0);
}

static void refuse(Conn *c, uint32_t id, const char *text)
{
    link_put(&c->link, FRAME_FAIL, id, text, strlen(text), NULL, 0);
}

static void wake_waiting(Host *h, const char *key)
{
    const KvItem *item = kv_find(&h->values, key);
    for (int i = 0; i < h->count; i++) {
        Conn *c = h->conns[i];
        if (c->state != CONN_STORE || !c->waits || strcmp(c->wanted, key)) continue;
        c->waits = false;
        reply(c, c->wanted_id, item->value, item->size);
    }
}

void host_set(Host *h, Conn *c, uint32_t id, const char *key, const void *value, size_t size, size_t echo)
{
    if (!kv_put(&h->values, c->rank, key, value, size)) {
        refuse(c, id, "the store has no more room for this rank's values");
        return;
    }
    reply(c, id, value, echo);
    wake_waiting(h, key);
}

void host_get(Host *h, Conn *c, uint32_t id, const char *key)
{
    const KvItem *item = kv_find(&h->values, key);
    if (item) {
        reply(c, id, item->value, item->size);
        return;
    }
    c->waits = true;
    c->wanted_id = id;
    strcpy(c->wanted, key);
}

bool host_add(Host *h, Conn *c, uint32_t id, const char *key, const char *value, size_t size)
{
    int64_t sum = 0, delta;
    const KvItem *item = kv_find(&h->values, key);
    if (size != sizeof delta) return false;
    if (item && item->size != sizeof sum) return refuse(c, id, "store_add on a value that is no number"), true;
    if (item) memcpy(&sum, item->value, sizeof sum);
    memcpy(&delta, value, sizeof delta);
    sum = (int64_t)((uint64_t)sum + (uint64_t)delta);
    host_set(h, c, id, key, &sum, sizeof sum, sizeof sum);
    return true;
}
