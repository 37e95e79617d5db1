/*
 * Rows from all to all over NCCL (comm/comm.h, CommRows): messages of their true lengths. NCCL wants these on the host,
 * and only device memory says them:
 *
 *   stream for reading   waits for the offsets | copies them to pinned memory | the host waits until they are there
 *   group's stream       ... waits for inputs | a message for each piece that has rows | done
 *
 * What was enqueued before goes on meanwhile, and so does the group's stream. See nccl_world.h.
 */
#include <sched.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/trace.h"
#include "nccl_world.h"

/* Copies the starts of pieces, and the end of the last one, to the host. Between these the device has the offsets of a
 * piece's parts. */
static Err copy_offsets(Group *g, const int64_t *offset, int64_t pieces, int64_t stride, int64_t *host)
{
    const size_t pitch = (size_t)stride * sizeof *offset;
    return cuda_check(cudaMemcpy2DAsync(host, sizeof *host, offset, pitch, sizeof *host, (size_t)pieces + 1,
                                        cudaMemcpyDeviceToHost, g->reading),
                      "reading where rows begin");
}

/* The stream for reading waits. (stream_wait would time it as a stall of the compute stream.) */
static Err wait_on_stream(Group *g, Device *dev, Event *known)
{
    Stream reading = { dev, g->reading };
    return known->marked ? known->marks->stream_wait(&reading, known->mark) : ERR_OK;
}

/* A device that works for lost ranks comes to an end, too: their groups are aborted. */
static Err wait_for_offsets(Group *g)
{
    TRY(cuda_check(cudaEventRecord(g->read, g->reading), "marking a point in a stream"));
    for (int asked = 0;; asked++) {
        const cudaError_t code = cudaEventQuery(g->read);
        if (g->world->stopped) return nccl_stopped(g->world);
        if (code != cudaErrorNotReady) return cuda_check(code, "reading where rows begin");
        cudaGetLastError();
        if (asked < NCCL_SPINS) sched_yield();
        else usleep(NAP_US);
    }
}

/* Do the offsets describe pieces that lie in so many rows? */
static bool in_order(const int64_t *offset, int64_t pieces, int64_t rows)
{
    bool fine = offset[0] == 0;
    for (int64_t i = 0; i < pieces; i++) fine = fine && offset[i] <= offset[i + 1];
    return fine && offset[pieces] <= rows;
}

Err nccl_read_rows(Group *g, CommRequest *r)
{
    CommRows *x = &r->rows;
    const int64_t local = g->size / x->copies * x->chunks, remote = g->size * x->chunks;
    int64_t *const host[2] = { g->offsets, g->offsets + local + 1 };
    ASSERT(local + remote + 2 <= g->offset_count);
    if (x->known) TRY(wait_on_stream(g, r->stream->dev, x->known));
    TRY(copy_offsets(g, x->local_offset, local, x->stride, host[0]));
    TRY(copy_offsets(g, x->remote_offset, remote, x->stride, host[1]));
    trace_begin("wait for numbers of rows");
    const Err err = wait_for_offsets(g);
    trace_end();
    TRY(err);
    x->local_offset = host[0];
    x->remote_offset = host[1];
    x->stride = 1;
    if (in_order(host[0], local, r->count) && in_order(host[1], remote, x->remote_rows)) return ERR_OK;
    return nccl_stop(g->world, ERR_INTERNAL, "rows from all to all: the offsets do not fit the tensors");
}

/* Copies the rows that stay on this rank. */
static ncclResult_t copy_own(Group *g, const CommRequest *r)
{
    const int self = g->host.rank;
    for (int64_t chunk = 0; chunk < r->rows.chunks; chunk++) {
        const CommPiece from = comm_piece_out(r, g->size, self, chunk), to = comm_piece_in(r, g->size, self, chunk);
        if (from.bytes && cudaMemcpyAsync(to.data, from.data, (size_t)from.bytes, cudaMemcpyDeviceToDevice, g->stream))
            return ncclUnhandledCudaError;
    }
    return ncclSuccess;
}

ncclResult_t nccl_message(Group *g, bool send, int peer, void *data, int64_t bytes)
{
    const size_t n = (size_t)bytes;
    if (!n) return ncclSuccess;
    return nccl_queued(send ? nccl.Send(data, n, ncclUint8, peer, g->comm, g->stream)
                            : nccl.Recv(data, n, ncclUint8, peer, g->comm, g->stream));
}

static ncclResult_t send_or_receive(Group *g, bool send, int member, CommPiece piece)
{
    return nccl_message(g, send, member, piece.data, piece.bytes);
}

/* (A sender's chunks are in the receiver's order: messages between two members match one by one.) */
ncclResult_t nccl_enqueue_rows(Group *g, const CommRequest *r)
{
    ncclResult_t rc = copy_own(g, r);
    if (!rc) rc = nccl.GroupStart();
    if (rc) return rc;
    for (int m = 0; m < g->size && !rc; m++)
        for (int64_t chunk = 0; m != g->host.rank && chunk < r->rows.chunks && !rc; chunk++) {
            rc = send_or_receive(g, true, m, comm_piece_out(r, g->size, m, chunk));
            if (!rc) rc = send_or_receive(g, false, m, comm_piece_in(r, g->size, m, chunk));
        }
    const ncclResult_t ended = nccl.GroupEnd();
    return rc ? rc : ended;
}
