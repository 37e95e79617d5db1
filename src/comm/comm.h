/*
 * Communicators: who talks to whom, behind one table of functions.
 *
 *   self      a group of one: nothing moves
 *   gloo      ranks are processes, over TCP (comm/gloo.h)
 *   nccl, staged   ranks are processes with GPUs, tensors in device memory (comm/gpu.h)
 *   null      any size, moves nothing, counts everything (the dry run)
 *
 * Every call enqueues and returns; requests of one communicator run in order, on a thread of its own.
 * Completion is an Event. With done == NULL the stream waits instead: later work on `s` sees the result.
 * All members must issue the same collective calls in the same order; the sequence number is taken here, on the
 * issuing thread, and checked against the peers' together with kind and count. Exchanges are between pairs: members
 * issue as many as they like, and what must agree is the order of messages from one member to another.
 *
 * There is no float all-reduce, NCCL's excepted. Sums that cross cuts are a binary tree over ranks in rank order
 * (each rank holds an aligned subtree of the canonical blocks) or integers, so that every layout gives the
 * same bits (docs/determinism.md).
 *
 * counts are elements. In-place is allowed where said. Buffers must stay alive until completion.
 */
#ifndef MEGATRAIN_COMM_COMM_H
#define MEGATRAIN_COMM_COMM_H

#include "boot/observer.h"
#include "device/device.h"

typedef enum {
    COMM_ALL_GATHER,
    COMM_REDUCE_TREE_F32,
    COMM_REDUCE_SCATTER_TREE_F32,
    COMM_REDUCE_SCATTER_I64,
    COMM_SUM_I64,
    COMM_MAX_I64,
    COMM_BARRIER,
    COMM_ALL_TO_ALL_ROWS,
    COMM_EXCHANGE,
    COMM_KIND_COUNT
} CommKind;

/* One message of an exchange. */
typedef struct {
    bool send;         /* else it is received */
    int peer;          /* another member */
    void *data;        /* read, or written */
    int64_t bytes;     /* the same on both ends; may be 0 */
    MessageLabel what; /* the same on both ends */
} CommMessage;

enum { COMM_MESSAGES_MAX = 16 }; /* of an exchange */

/*
 * Rows that members send to each other's *chunks*, of which each member has as many. A member holds twice what they
 * are: `local`, rows of its own for the chunks of all, by (member, chunk), and `remote`, rows of all for its own
 * chunks, by (chunk, member). How many rows a piece has only device memory says: piece i of local begins with row
 * local_offset[i * stride] and ends before local_offset[(i + 1) * stride], likewise of remote; both ends of a piece
 * must find the same number.
 *
 * `copies` neighbours have the same chunks (members / copies have others): each gets every row of them. What comes back
 * from copy i lies in the i-th of `copies` arrays as large as local, to be added up.
 */
typedef struct {
    char *local, *remote;
    const int64_t *local_offset;  /* [members / copies * chunks * stride + 1] */
    const int64_t *remote_offset; /* [members * chunks * stride + 1] */
    int64_t chunks, stride, copies;
    bool back;           /* remote is sent to local, else local to remote */
    int64_t most;        /* rows that one member can have for another, or for itself; the same on all */
    int64_t remote_rows; /* that remote has room for */
    /* Beside the tensors comm_rows_scratch() bytes, whose contents are undefined; NULL where that is 0. */
    char *scratch;
} CommRows;

typedef struct {
    CommKind kind;
    void *dst;
    const void *src;
    int64_t count;      /* elements per rank for all-gather and reduce-scatter, rows of local, else in all */
    int64_t elem_bytes; /* of rows: of one row */
    uint64_t sequence;  /* among the collectives, or the exchanges, of this communicator */
    Event *done;
    Stream *stream;        /* the caller's: what it holds so far comes first */
    bool check;            /* compare this call with the peers' before running it */
    CommObserver observer; /* Comm's, as is: */
    bool carrier;
    CommRows rows;     /* of an all-to-all of rows */
    int message_count; /* of an exchange, whose count is the bytes that it sends */
    CommMessage messages[COMM_MESSAGES_MAX];
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
    uint64_t sequence, exchanges; /* issued: collectives, exchanges */
    bool check;
    CommObserver observer; /* hears of every call */
    bool
        carrier; /* carries the calls of another communicator, which counts them: its observer hears of waits alone */
    bool pads_rows; /* an all-to-all of rows sends as many as there can be: nccl, and null in its stead */
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
/* Device memory that the call below needs beside its tensors, until it is done: 0 unless it pads. */
int64_t comm_rows_scratch(const Comm *c, const CommRows *rows, int64_t row_bytes);
/*
 * The pieces of rows->local [count, ...], count the same on all members, where they belong in the others' remote, or
 * back. rows of row_bytes. Its bytes count as if all members sent each other the same; padded, as many as are sent.
 */
Err comm_all_to_all_rows(Comm *c, Stream *s, const CommRows *rows, int64_t count, int64_t row_bytes,
                         Event *done);

/*
 * Messages to and from some of the other members; `messages` is copied. All of them make progress together, whatever
 * the order in the list, and the call is done when all have ended: a message ends when both its ends have issued
 * it. Messages from A to B match in the order in which A and B issue them, and have no other tag. The exchange
 * after it begins when it is done. No message may be received into memory of another message of the call.
 */
Err comm_exchange(Comm *c, Stream *s, const CommMessage *messages, int count, Event *done);

/*
 * For debugging: from now on the ranks compare kind, count, element size and, of rows, the way of each call before they
 * run it, and a difference is ERR_INTERNAL on all of them, naming both calls; of an exchange bytes and label of each
 * message, and a difference is ERR_INTERNAL on the member that receives it. Costs a small message a call, or a message,
 * between processes. All members switch it at the same call.
 */
void comm_check_calls(Comm *c, bool on);

/* From now on it hears which calls were issued, which are done and what the one that runs waits for. */
void comm_observe(Comm *c, CommObserver observer);

const char *comm_kind_name(CommKind kind); /* "all-gather", ... */

/* ---- for tables ---- */

/* *c, open: what every table's communicators have in common. `impl` is the table's; comm_close ends it. */
void comm_init(Comm *c, const CommTable *table, const char *name, int rank, int size, void *impl);

/* What must be the same on all ranks. */
typedef struct {
    uint64_t sequence;
    int64_t count, elem_bytes, kind;
    int64_t back; /* of rows: CommRows.back; else 0 */
} CommCall;

/* To the request's observer. */
void comm_tell_completed(const CommRequest *r);

CommCall comm_call(const CommRequest *r);
/* Do all ranks' calls agree? If not, says where the first difference is. */
bool comm_same_calls(const char *name, const CommCall *calls, int size, char *message, size_t message_size);

/* What must be the same on both ends of a message. */
typedef struct {
    uint64_t number; /* of the messages from one member to the other */
    int64_t bytes;
    MessageLabel what;
} CommNote;

/* A message from member `from` to member `to`; if its ends do not agree, says so. */
bool comm_same_message(const char *name, int from, int to, const CommNote ends[2], char *text,
                       size_t text_size);

/* Pieces of an all-to-all of rows in a group of `size`, where offsets can be read: what goes to `member` and comes from
 * it, of each chunk. 0 bytes: no row. */
typedef struct {
    char *data;
    int64_t bytes;
} CommPiece;

CommPiece comm_piece_out(const CommRequest *r, int size, int member, int64_t chunk);
CommPiece comm_piece_in(const CommRequest *r, int size, int member, int64_t chunk);

#endif
