/*
 * Communicators: who talks to whom, behind one table of functions.
 *
 *   self      a group of one: nothing moves
 *   threads   ranks are threads of one process (tests of every layout)
 *   gloo      ranks are processes, over TCP (comm/gloo.h)
 *   nccl, staged   ranks are processes with GPUs, tensors in device memory (comm/gpu.h)
 *   null      any size, moves nothing, counts everything (the dry run)
 *
 * Every call enqueues and returns; requests of one communicator run in order, on a thread of its own.
 * Completion is an Event. With done == NULL the stream waits instead: later work on `s` sees the result.
 * All members must issue the same calls in the same order; the sequence number is taken here, on the issuing
 * thread, and checked against the peers' together with kind and count.
 *
 * There is no float all-reduce, NCCL's excepted. Sums that cross cuts are a binary tree over ranks in rank order
 * (each rank holds an aligned subtree of the canonical blocks) or integers, so that every layout gives the
 * same bits (docs/determinism.md).
 *
 * counts are elements. In-place is allowed where said. Buffers must stay alive until completion.
 */
#ifndef MEGATRAIN_COMM_COMM_H
#define MEGATRAIN_COMM_COMM_H

#include "comm/watch.h"
#include "device/device.h"

typedef enum {
    COMM_ALL_GATHER,
    COMM_REDUCE_TREE_F32,
    COMM_REDUCE_SCATTER_TREE_F32,
    COMM_REDUCE_SCATTER_I64,
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
    Stream *stream; /* the caller's: what it holds so far comes first */
    bool check;     /* compare this call with the peers' before running it */
    Watch *watch;   /* as Comm's */
    uint32_t watch_id;
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
    bool check;
    Watch *watch; /* hears of every call; may be NULL */
    uint32_t watch_id;
    /* payload this rank sends, by the minimal algorithm: of each kind, and together */
    int64_t calls[COMM_KIND_COUNT], bytes[COMM_KIND_COUNT], sent_bytes;
    Event own;     /* for calls without an event */
    Event pending; /* for a call that goes on while its caller works; one at a time */
};

void comm_open_self(Comm *c, const char *name);
void comm_open_null(Comm *c, const char *name, int rank, int size);
void comm_close(Comm *c);

/* dst[size * count] = every rank's src[count], in rank order. src may be its own slot of dst. */
Err comm_all_gather(Comm *c, Stream *s, Tensor dst, Tensor src, Event *done);
/* buf = tree over ranks of buf; the same bits on every rank. */
Err comm_reduce_tree_f32(Comm *c, Stream *s, Tensor buf, Event *done);
/*
 * dst[count] = this rank's slice of the sum over ranks of src[size * count]: the tree for floats, modulo 2^64
 * for integers. dst may be this rank's own slice of src, and src is otherwise unchanged; no other overlap.
 */
Err comm_reduce_scatter_tree_f32(Comm *c, Stream *s, Tensor dst, Tensor src, Event *done);
Err comm_reduce_scatter_i64(Comm *c, Stream *s, int64_t *dst, const int64_t *src, int64_t count, Event *done);
/* buf = sum modulo 2^64, or maximum, over ranks. */
Err comm_sum_i64(Comm *c, Stream *s, int64_t *buf, int64_t count, Event *done);
Err comm_max_i64(Comm *c, Stream *s, int64_t *buf, int64_t count, Event *done);
Err comm_barrier(Comm *c, Stream *s);

/*
 * For debugging: from now on the ranks compare kind, count and element size of each call before they run it,
 * and a difference is ERR_INTERNAL on all of them, naming both calls. Costs a small exchange a call between
 * processes. (Threads always compare; one that is late may find the group stopped: ERR_PEER, with the same text.)
 * All members switch it at the same call.
 */
void comm_check_calls(Comm *c, bool on);

/* From now on `w` hears, as communicator `id`, which calls were issued and which are done. */
void comm_watch(Comm *c, Watch *w, uint32_t id);

const char *comm_kind_name(CommKind kind); /* "all-gather", ... */

/* ---- for tables ---- */

/* *c, open: what every table's communicators have in common. `impl` is the table's; comm_close ends it. */
void comm_init(Comm *c, const CommTable *table, const char *name, int rank, int size, void *impl);

/* What must be the same on all ranks. */
typedef struct {
    uint64_t sequence;
    int64_t count, elem_bytes, kind;
} CommCall;

CommCall comm_call(const CommRequest *r);
/* Do all ranks' calls agree? If not, says where the first difference is. */
bool comm_same_calls(const char *name, const CommCall *calls, int size, char *message, size_t message_size);

/* ---- ranks as threads ---- */

typedef struct CommHub CommHub; /* what the thread-ranks of one process share */

/* delay_ms: every completion is held back that long (a test that nothing depends on timing). */
Err comm_hub_open(int world_size, int delay_ms, CommHub **out);
void comm_hub_close(CommHub *hub);
/* Collective over the members, each calling from its own thread with the same list (world ranks, ascending). Of one
 * member, or of none: comm_open_self. */
Err comm_open_threads(CommHub *hub, Comm *c, const char *name, int world_rank, const int *members, int size);
/* Wakes every waiting rank; all open requests end with ERR_PEER and this text. The first call wins. */
void comm_hub_abort(CommHub *hub, const char *why);

#endif
