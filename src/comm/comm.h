/*
 * Communicators: who talks to whom, behind one table of functions.
 *
 *   self      a group of one: nothing moves
 *   threads   ranks are threads of one process (tests of every layout)
 *   null      any size, moves nothing, counts everything (the dry run)
 *
 * Every call enqueues and returns; requests of one communicator run in order, on a thread of its own.
 * Completion is an Event. With done == NULL the stream waits instead: later work on `s` sees the result.
 * All members must issue the same calls in the same order; the sequence number is taken here, on the issuing
 * thread, and checked against the peers' together with kind and count.
 *
 * There is no float all-reduce. Sums that cross a layout's cuts are a binary tree over ranks in rank order
 * (each rank holds an aligned subtree of the canonical blocks) or integers, so that every layout gives the
 * same bits (docs/determinism.md).
 *
 * counts are elements. In-place is allowed where said. Buffers must stay alive until completion.
 */
#ifndef MEGATRAIN_COMM_COMM_H
#define MEGATRAIN_COMM_COMM_H

#include "device/device.h"

typedef enum {
    COMM_ALL_GATHER,
    COMM_REDUCE_TREE_F32,
    COMM_REDUCE_SCATTER_TREE_F32,
    COMM_SUM_I64,
    COMM_MAX_I64,
    COMM_BARRIER,
    COMM_KIND_COUNT
} CommKind;

typedef struct {
    CommKind kind;
    void *dst;
    const void *src;
    int64_t count; /* elements per rank for all-gather and reduce-scatter, else in all */
    int64_t elem_bytes;
    uint64_t sequence;
    Event *done;
} CommRequest;

typedef struct Comm Comm;

typedef struct {
    const char *name;
    Err (*submit)(Comm *c, const CommRequest *r); /* completes r->done, now or later */
    void (*close)(Comm *c);
} CommTable;

struct Comm {
    const CommTable *table;
    const char *name; /* "tp", "dp", ... */
    int rank, size;
    void *impl;
    uint64_t sequence;
    int64_t calls[COMM_KIND_COUNT], sent_bytes; /* payload this rank sends, by the minimal algorithm */
    Event own;                                  /* for calls without an event */
};

void comm_open_self(Comm *c, const char *name);
void comm_open_null(Comm *c, const char *name, int rank, int size);
void comm_close(Comm *c);

/* dst[size * count] = every rank's src[count], in rank order. src may be its own slot of dst. */
Err comm_all_gather(Comm *c, Stream *s, Tensor dst, Tensor src, Event *done);
/* buf = tree over ranks of buf; the same bits on every rank. */
Err comm_reduce_tree_f32(Comm *c, Stream *s, Tensor buf, Event *done);
/* dst[count] = this rank's slice of the tree over ranks of src[size * count]. No aliasing. */
Err comm_reduce_scatter_tree_f32(Comm *c, Stream *s, Tensor dst, Tensor src, Event *done);
Err comm_sum_i64(Comm *c, Stream *s, int64_t *buf, int64_t count, Event *done);
Err comm_max_i64(Comm *c, Stream *s, int64_t *buf, int64_t count, Event *done);
Err comm_barrier(Comm *c, Stream *s);

/* ---- ranks as threads ---- */

typedef struct CommHub CommHub; /* what the thread-ranks of one process share */

/* delay_ms: every completion is held back that long (a test that nothing depends on timing). */
Err comm_hub_open(int world_size, int delay_ms, CommHub **out);
void comm_hub_close(CommHub *hub);
/* Collective over the members, each calling from its own thread with the same list (world ranks, ascending). */
Err comm_open_threads(CommHub *hub, Comm *c, const char *name, int world_rank, const int *members, int size);
/* Wakes every waiting rank; all open requests end with ERR_PEER and this text. The first call wins. */
void comm_hub_abort(CommHub *hub, const char *why);

#endif
