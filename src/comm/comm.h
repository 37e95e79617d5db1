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
    void *data;        /* is read if the message is sent, else written */
    int64_t bytes;     /* both ends give the same number; it may be 0 */
    MessageLabel what; /* both ends give the same label */
} CommMessage;

enum {
    COMM_MESSAGES_MAX = 16, /* an exchange has no more */
    COMM_BESIDE_MOST = 8    /* calls that go on while their caller works */
};

/*
 * Rows that members send to each other's *chunks*. All members have equally many chunks. A member has two arrays of
 * rows: `local` holds its own rows for the chunks of all members, ordered by (member, chunk), and `remote` holds the
 * rows of all members for its own chunks, ordered by (chunk, member). The rows for one chunk from one member are a
 * piece. Only device memory says how many rows a piece has: piece i of local begins with row local_offset[i * stride]
 * and ends before local_offset[(i + 1) * stride], and remote_offset says the same of remote. Both ends of a piece must
 * find the same number.
 *
 * `copies` neighbours have the same chunks, and each of them gets every row for these; the members / copies groups of
 * neighbours have different ones. What comes back from copy i lies in the i-th of `copies` arrays as large as local, to
 * be added up.
 */
typedef struct {
    char *local, *remote;
    const int64_t *local_offset;  /* [members / copies * chunks * stride + 1] */
    const int64_t *remote_offset; /* [members * chunks * stride + 1] */
    int64_t chunks, stride, copies;
    bool back;           /* true: remote is sent to local; false: local to remote */
    int64_t remote_rows; /* how many rows fit into remote */
    /* Marked where both lists of offsets were there. NULL: an earlier call has moved rows by the same lists. Over NCCL
     * the host waits for this, and not for what was enqueued behind it. */
    Event *known;
    /* so many rows a member sends if all chunks get as many, for counting bytes; 0: all of local */
    int64_t even;
} CommRows;

typedef struct {
    CommKind kind;
    void *dst;
    const void *src;
    /* All-gather and reduce-scatter: the elements of a rank. An all-to-all of rows: the rows of local. An exchange: the
     * bytes that it sends. Others: all elements. */
    int64_t count;
    int64_t elem_bytes; /* size of an element, or of a row */
    uint64_t sequence;  /* its number among this communicator's collectives, or among its exchanges */
    Event *done;
    Stream *stream;        /* the caller's; what was enqueued on it before comes first */
    bool check;            /* compare this call with the peers' before running it */
    CommObserver observer; /* this and carrier are copies of Comm's */
    bool carrier;
    CommRows rows;     /* the rows that an all-to-all moves */
    int message_count; /* how many messages an exchange has */
    CommMessage messages[COMM_MESSAGES_MAX];
} CommRequest;

typedef struct Comm Comm;

typedef struct {
    const char *name;
    Err (*submit)(Comm *c, const CommRequest *r); /* r->done is completed now or later */
    void (*close)(Comm *c);
} CommTable;

/* A call of the dry run that may not have been waited for; ops: how many the device had been given before it. */
typedef struct {
    Comm *comm;
    const Device *device;
    int64_t number, ops, bytes;
} CommOpen;

enum { COMM_OPEN_MOST = 64 }; /* most calls that go on beside ops */

struct Comm {
    const CommTable *table;
    const char *name; /* "tp", "dp", ... */
    int rank, size;
    void *impl;
    uint64_t sequence, exchanges; /* how many collectives and exchanges were issued */
    bool check;
    CommObserver observer; /* hears of every call */
    /* This communicator carries the calls of another, which counts them. So its observer hears of waits alone. */
    bool carrier;
    bool reads_lengths; /* an all-to-all of rows lets the host wait for its offsets: so does nccl */
    /* Work that this rank has sent, as the minimal algorithm would: calls and bytes by kind, and all bytes together. */
    int64_t calls[COMM_KIND_COUNT], bytes[COMM_KIND_COUNT], sent_bytes;
    int64_t last_bytes; /* bytes of the latest call */
    int64_t rows_most;  /* most bytes of an all-to-all: of all rows, each to another rank */
    /* null: bytes of calls beside which ops were issued before they were waited for; and what tells them (null.c) */
    int64_t beside_bytes, submitted;
    CommOpen open[COMM_OPEN_MOST];
    Event own;                      /* completes calls that have no event */
    Event pending;                  /* completes the one call that goes on while its caller works, */
    Event beside[COMM_BESIDE_MOST]; /* and these the calls where there are several */
};

void comm_open_self(Comm *c, const char *name);
void comm_open_null(Comm *c, const char *name, int rank, int size);
void comm_close(Comm *c);

/* dst[size * count] = every rank's src[count], in rank order. src may be its own slot of dst. */
Err comm_all_gather(Comm *c, Stream *s, Tensor dst, Tensor src, Event *done);
/* buf = tree over ranks of buf; the same bits on every rank. */
Err comm_reduce_tree_f32(Comm *c, Stream *s, Tensor buf, Event *done);
/*
 * dst[count] = this rank's part of the sum over ranks of src[size * count]: the tree for floats, modulo 2^64 for
 * integers. dst may be this rank's own part of src, and src is otherwise unchanged. They may not overlap in another
 * way.
 */
Err comm_reduce_scatter_tree_f32(Comm *c, Stream *s, Tensor dst, Tensor src, Event *done);
Err comm_reduce_scatter_i64(Comm *c, Stream *s, int64_t *dst, const int64_t *src, int64_t count, Event *done);
/* buf = sum modulo 2^64, or maximum, over ranks. */
Err comm_sum_i64(Comm *c, Stream *s, int64_t *buf, int64_t count, Event *done);
Err comm_max_i64(Comm *c, Stream *s, int64_t *buf, int64_t count, Event *done);
Err comm_barrier(Comm *c, Stream *s);
/*
 * Moves the pieces of rows->local [count, ...] to where they belong in the others' remote, or back. All members give
 * the same count. A row has row_bytes. The call counts bytes as if all members sent each other the same number of rows.
 */
Err comm_all_to_all_rows(Comm *c, Stream *s, const CommRows *rows, int64_t count, int64_t row_bytes, Event *done);

/*
 * Messages to and from some of the other members; `messages` is copied. All of them make progress together, whatever
 * the order in the list, and the call is done when all have ended: a message ends when both its ends have issued
 * it. Messages from A to B match in the order in which A and B issue them, and have no other tag. The exchange
 * after it begins when it is done. No message may be received into memory of another message of the call.
 */
Err comm_exchange(Comm *c, Stream *s, const CommMessage *messages, int count, Event *done);

/*
 * For debugging. From now on the ranks compare kind, count, element size and, for rows, the direction of each
 * collective before they run it; a difference is ERR_INTERNAL on all of them, which names both calls. For an exchange
 * they compare bytes and label of each message; a difference is ERR_INTERNAL on the member that receives it. Between
 * processes this costs one small message for each call, or for each message. All members switch it at the same call.
 */
void comm_check_calls(Comm *c, bool on);

/* From now on the observer hears which calls were issued, which are done, and what the call that runs waits for. */
void comm_observe(Comm *c, CommObserver observer);

const char *comm_kind_name(CommKind kind); /* "all-gather", ... */

/* ---- for tables ---- */

/* Opens *c: sets what the communicators of all tables have in common. `impl` is the table's; comm_close ends it. */
void comm_init(Comm *c, const CommTable *table, const char *name, int rank, int size, void *impl);

/* Facts that must be the same in one call of all ranks. */
typedef struct {
    uint64_t sequence;
    int64_t count, elem_bytes, kind;
    int64_t back; /* CommRows.back, in an all-to-all of rows; else 0 */
} CommCall;

/* Tells the request's observer. */
void comm_tell_completed(const CommRequest *r);

CommCall comm_call(const CommRequest *r);
/* Do all ranks' calls agree? If not, says where the first difference is. */
bool comm_same_calls(const char *name, const CommCall *calls, int size, char *message, size_t message_size);

/* Facts that both ends of a message must have the same. */
typedef struct {
    uint64_t number; /* counts the messages from one member to the other */
    int64_t bytes;
    MessageLabel what;
} CommNote;

/* Do both ends of a message from member `from` to member `to` agree? If not, `text` says how they differ. */
bool comm_same_message(const char *name, int from, int to, const CommNote ends[2], char *text, size_t text_size);

/* The pieces of an all-to-all of rows in a group of `size`, where offsets can be read: for each chunk what goes to
 * `member`, and what comes from it. 0 bytes: the piece has no row. */
typedef struct {
    char *data;
    int64_t bytes;
} CommPiece;

CommPiece comm_piece_out(const CommRequest *r, int size, int member, int64_t chunk);
CommPiece comm_piece_in(const CommRequest *r, int size, int member, int64_t chunk);

#endif
