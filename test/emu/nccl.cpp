/*
 * NCCL on the emulator: the calls of cuda/nccl.c and no others (cuda/nccl_api.h), between processes of one host. Each
 * communicator is a file in shared memory: for every rank a piece of data, how far it is, and a lock that the kernel
 * drops when the process dies.
 *
 * A collective runs in pieces that fit. A rank publishes its piece when all have read its last one, and computes its
 * result when all have published; floats are added around a ring that begins at another rank with every piece, so that
 * the sums are not those of the tree. As NVLS may, it begins anywhere, in each call of each run, unless
 * NCCL_NVLS_ENABLE=0, or NCCL_ALGO excludes it for calls of this kind.
 *
 * Messages between two ranks go piece by piece through a place of their own. A send ends when the other rank has read
 * all of it, so that nothing is buffered: a send blocks its stream until the receive is there. Within a group messages
 * make progress together, those to one rank, and those from one, in order.
 *
 * Stricter than the library:
 *   - communicators are non-blocking; creating and finalizing one, and every collective and group of messages, are in
 *     progress until ncclCommGetAsyncError has been asked about it a few times, and a call before that is
 *     ncclInvalidUsage
 *   - a communicator takes device memory with its first call of each kind, and for each member with the first message
 *   - ranks that issue different calls, or messages of different lengths, get ncclInvalidUsage as asynchronous error,
 *   not
 *     a wrong sum
 *   - messages are sent and received inside a group only, of one communicator and stream, and are not empty
 *   - where there are several ranks, none sends itself a message
 *   - every address leads to device memory for its whole length
 *   - dtypes and operations that nccl.c does not need are refused
 *   - the default stream is refused
 * Two ranks with one GPU are refused, as by the library: unless their NCCL_HOSTID differ, or from 2.30.3 on
 * NCCL_MULTI_RANK_GPU_ENABLE=1.
 * A dead peer is an asynchronous ncclRemoteError, or with EMU_NCCL=silent, as between GPUs of one host, nothing: then
 * only a deadline ends the wait. NCCL_DEBUG=INFO names communicators and their limits. After ncclCommAbort what is in
 * streams ends without results; with EMU_NCCL=stuck that call does not come back.
 */
#include "runtime.h"

#include "nccl_api.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <vector>

namespace
{

enum { RANKS = 64, ROOM = 256 << 10, PAIR_ROOM = 32 << 10, LOOK_EVERY_MS = 20 };
enum { ASKS = 4 /* until a call is through */, KIND_BYTES = 4 << 20, PEER_BYTES = 1 << 20 /* of connections */ };

/* What one rank tells the others. */
struct Seat {
    std::atomic<int> here, left;
    std::atomic<uint64_t> posted, taken; /* pieces: in the data, and read by this rank from all */
    std::atomic<uint64_t> splits;
    int gpu, color[16], key[16]; /* of the k-th split */
    char host[64]; /* NCCL_HOSTID */
    int kind, type, op;
    uint64_t count;
};

struct Shared {
    std::atomic<int> attached;
    Seat seats[RANKS];
};

/* From one rank to another. */
struct Pair {
    std::atomic<uint64_t> posted, taken; /* pieces */
    uint64_t bytes;                      /* of the message that the piece belongs to */
    char data[PAIR_ROOM];
};

enum What { ALL_GATHER = 1, ALL_REDUCE, REDUCE_SCATTER };

} // namespace

struct ncclComm {
    char path[64];
    int rank = 0, size = 0, file = -1;
    Shared *shared = nullptr;
    char *data = nullptr; /* ROOM bytes a rank */
    Pair *pairs = nullptr; /* [from * size + to] */
    std::vector<uint64_t> sent, received; /* pieces of messages issued so far, by rank */
    std::atomic<int> error{ ncclSuccess };
    std::atomic<bool> aborted{ false };
    bool connecting = false, finalizing = false;
    int starting = 0; /* times that one has to ask for the last call */
    std::vector<bool> connected; /* by kind of collective, then by member */
    int64_t taken = 0; /* bytes of the device's memory */
    uint64_t pieces = 0;          /* of collectives issued so far */
    std::atomic<int> in_flight{ 0 }; /* collectives in streams */
    std::chrono::steady_clock::time_point looked{};
    /* the split in progress */
    uint64_t splits = 0;
    ncclComm **child = nullptr;
};

namespace
{

size_t bytes_of(const ncclComm *c)
{
    const size_t size = static_cast<size_t>(c->size);
    return sizeof(Shared) + size * ROOM + size * size * sizeof(Pair);
}

struct flock seat_lock(int rank, short type)
{
    struct flock l = {};
    l.l_type = type;
    l.l_whence = SEEK_SET;
    l.l_start = rank;
    l.l_len = 1;
    return l;
}

/* A file of zeros that whoever comes first makes; the last one to come removes its name. */
bool attach(ncclComm *c)
{
    c->file = open(c->path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (c->file < 0 || ftruncate(c->file, static_cast<off_t>(bytes_of(c)))) return false;
    void *p = mmap(nullptr, bytes_of(c), PROT_READ | PROT_WRITE, MAP_SHARED, c->file, 0);
    if (p == MAP_FAILED) return false;
    c->shared = static_cast<Shared *>(p);
    c->data = static_cast<char *>(p) + sizeof(Shared);
    c->pairs = reinterpret_cast<Pair *>(c->data + static_cast<size_t>(c->size) * ROOM);
    struct flock l = seat_lock(c->rank, F_WRLCK);
    if (fcntl(c->file, F_OFD_SETLK, &l)) return false;
    const char *const host = getenv("NCCL_HOSTID");
    c->shared->seats[c->rank].gpu = emu::host_gpu(emu::current_device());
    snprintf(c->shared->seats[c->rank].host, sizeof c->shared->seats[c->rank].host, "%s", host ? host : "");
    c->shared->seats[c->rank].here = 1;
    if (++c->shared->attached == c->size) unlink(c->path);
    return true;
}

void detach(ncclComm *c)
{
    if (!c->shared) return;
    if (c->shared->attached < c->size) unlink(c->path);
    munmap(c->shared, bytes_of(c));
    close(c->file);
    c->shared = nullptr;
}

ncclResult_t fail_comm(ncclComm *c, ncclResult_t error)
{
    c->error = error;
    return error;
}

bool is_dead(const ncclComm *c, int rank)
{
    struct flock l = seat_lock(rank, F_WRLCK);
    return !fcntl(c->file, F_OFD_GETLK, &l) && l.l_type == F_UNLCK;
}

/* EMU_NCCL_VERSION=22105: an older one. */
int version()
{
    static const char *const given = getenv("EMU_NCCL_VERSION");
    return given ? atoi(given) : NCCL_NUMBER(2, 28, 9);
}

bool mode_is(const char *mode)
{
    static const char *given = getenv("EMU_NCCL");
    return given && !strcmp(given, mode);
}

/* Looks for dead peers now and then: by the clock, as polls are rare where many processes share a core. */
void look_around(ncclComm *c)
{
    const auto now = std::chrono::steady_clock::now();
    if (mode_is("silent") || now - c->looked < std::chrono::milliseconds(LOOK_EVERY_MS)) return;
    c->looked = now;
    for (int p = 0; p < c->size; p++) {
        const Seat &seat = c->shared->seats[p];
        if (p != c->rank && seat.here && !seat.left && is_dead(c, p)) c->error = ncclRemoteError;
    }
}

bool all_here(const ncclComm *c)
{
    for (int p = 0; p < c->size; p++)
        if (!c->shared->seats[p].here) return false;
    return true;
}

char last_error[128];

bool shared_gpu(const ncclComm *c)
{
    const char *const allowed = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    if (allowed && atoi(allowed) && version() >= NCCL_SHARES) return false;
    for (int p = 0; p < c->size; p++)
        for (int q = 0; q < p; q++) {
            const Seat &low = c->shared->seats[q], &high = c->shared->seats[p];
            if (low.gpu != high.gpu || strcmp(low.host, high.host)) continue;
            snprintf(last_error, sizeof last_error,
                     "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x", p, q, low.gpu);
            return true;
        }
    return false;
}

/* ---- collectives ---- */

struct Call {
    ncclComm *comm;
    What what;
    const char *from;
    char *to;
    size_t count, element; /* of each rank's share, or in all; bytes */
    ncclDataType_t type;
    ncclRedOp_t op;
    size_t done = 0; /* elements */
    uint64_t piece;  /* number of the first */
    bool posted = false;

    size_t shares_in() const { return what == REDUCE_SCATTER ? static_cast<size_t>(comm->size) : 1; }
    size_t length() const { return std::min(count - done, ROOM / element / shares_in()); }
    uint64_t pieces() const
    {
        const size_t each = ROOM / element / shares_in();
        return count ? (count + each - 1) / each : 1;
    }
    bool post();
    bool take();
    void reduce(const char *const *pieces, char *out, size_t n);
};

/* Into this rank's place, when the others have read what was there. */
bool Call::post()
{
    Seat &own = comm->shared->seats[comm->rank];
    for (int p = 0; p < comm->size; p++)
        if (comm->shared->seats[p].taken < piece) return false;
    char *place = comm->data + static_cast<size_t>(comm->rank) * ROOM;
    const size_t n = length();
    for (size_t s = 0; s < shares_in(); s++)
        memcpy(place + s * n * element, from + (s * count + done) * element, n * element);
    own.kind = what, own.type = type, own.op = op, own.count = count;
    own.posted = piece + 1;
    return posted = true;
}

/* Looked at with the first sum, as the library does. From 2.24 on NCCL_ALGO may have a list for one kind of call. */
bool nvls(const char *of)
{
    static const char *const enable = getenv("NCCL_NVLS_ENABLE"), *const algo = getenv("NCCL_ALGO");
    const char *list = algo && version() >= NCCL_LISTS ? strstr(algo, of) : nullptr;
    if (enable && !strcmp(enable, "0")) return false;
    return !list || strncmp(list + strlen(of), ":^nvls,nvlstree", 15) != 0;
}

/* The same on all ranks of a communicator, whose path was drawn by lot. */
uint64_t mixed(const char *path, uint64_t piece)
{
    for (uint64_t h = piece;; path++) {
        if (!*path) return h >> 32;
        h = (h ^ static_cast<uint64_t>(*path)) * 0x9E3779B97F4A7C15u;
        h ^= h >> 29;
    }
}

template <typename T> void add_up(const char *const *pieces, int ranks, int first, ncclRedOp_t op, char *out, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        T sum = reinterpret_cast<const T *>(pieces[first])[i];
        for (int k = 1; k < ranks; k++) {
            const T x = reinterpret_cast<const T *>(pieces[(first + k) % ranks])[i];
            sum = op == ncclMax ? std::max(sum, x) : static_cast<T>(sum + x);
        }
        reinterpret_cast<T *>(out)[i] = sum;
    }
}

void Call::reduce(const char *const *parts, char *out, size_t n)
{
    const bool anywhere = nvls(what == ALL_REDUCE ? "allreduce" : "reducescatter");
    const uint64_t at = anywhere ? mixed(comm->path, piece) : piece;
    const int first = static_cast<int>(at % static_cast<uint64_t>(comm->size));
    if (type == ncclFloat32) add_up<float>(parts, comm->size, first, op, out, n);
    else if (type == ncclInt64) add_up<int64_t>(parts, comm->size, first, op, out, n);
    else add_up<uint64_t>(parts, comm->size, first, op, out, n);
}

/* From everybody's place, when all have put something there. */
bool Call::take()
{
    const char *parts[RANKS];
    const size_t n = length();
    for (int p = 0; p < comm->size; p++)
        if (comm->shared->seats[p].posted <= piece) return false;
    for (int p = 0; p < comm->size; p++) {
        const Seat &s = comm->shared->seats[p];
        if (s.kind != what || s.type != type || s.op != op || s.count != count) comm->error = ncclInvalidUsage;
        parts[p] = comm->data + static_cast<size_t>(p) * ROOM;
        if (what == REDUCE_SCATTER) parts[p] += static_cast<size_t>(comm->rank) * n * element;
    }
    if (comm->error) return false;
    if (what == ALL_GATHER)
        for (int p = 0; p < comm->size; p++)
            memcpy(to + (static_cast<size_t>(p) * count + done) * element, parts[p], n * element);
    else reduce(parts, to + done * element, n);
    comm->shared->seats[comm->rank].taken = ++piece;
    done += n;
    posted = false;
    return true;
}

/* A few steps; true when all is done, or nothing more will be. */
bool advance(Call &call)
{
    ncclComm *c = call.comm;
    for (;;) {
        if (c->aborted) break;
        look_around(c);
        if (c->error && c->error != ncclInProgress) return false; /* hangs until it is aborted */
        if (!call.posted && !call.post()) return false;
        if (!call.take()) return false;
        if (call.done >= call.count) break;
    }
    c->in_flight--;
    return true;
}

/* What a call of this kind, or a message to or from this member, needs. */
bool connect(ncclComm *c, size_t what, int64_t bytes)
{
    if (c->connected[what]) return true;
    if (!emu::library_take(bytes)) return false;
    c->connected[what] = true;
    c->taken += bytes;
    return true;
}

thread_local int group_depth; /* of ncclGroupStart, on this thread */

bool usable(ncclComm *c)
{
    return c && !c->connecting && !c->finalizing && !c->starting && !c->child && c->error == ncclSuccess;
}

ncclResult_t begin(ncclComm *c, What what, const void *from, void *to, size_t count, ncclDataType_t type,
                   ncclRedOp_t op, cudaStream_t stream)
{
    if (!usable(c) || group_depth) return ncclInvalidUsage;
    const size_t element = type == ncclUint8 ? 1 : type == ncclFloat32 ? 4 : 8;
    const bool known = what == ALL_GATHER ? type == ncclUint8
                                          : (op == ncclSum && (type == ncclFloat32 || type == ncclUint64)) ||
                                                (op == ncclMax && type == ncclInt64);
    const size_t size = static_cast<size_t>(c->size);
    const size_t in = count * element * (what == REDUCE_SCATTER ? size : 1);
    const size_t out = count * element * (what == ALL_GATHER ? size : 1);
    if (!known || !stream) return ncclInvalidArgument;
    if (count && (!emu::device_holds(from, in) || !emu::device_holds(to, out))) return ncclInvalidArgument;
    if (!connect(c, what, KIND_BYTES)) return fail_comm(c, ncclUnhandledCudaError);
    Call call = { c, what, static_cast<const char *>(from), static_cast<char *>(to), count, element, type, op };
    call.piece = c->pieces;
    c->pieces += call.pieces();
    c->in_flight++;
    const bool bad = emu::submit_until(stream, "nccl", [call]() mutable { return advance(call); }) != cudaSuccess;
    if (bad) return ncclUnhandledCudaError;
    c->starting = ASKS;
    return ncclInProgress;
}

/* ---- messages ---- */

struct Message {
    bool send;
    int peer;
    char *data;
    size_t bytes, done = 0;
    uint64_t piece; /* number of the next, from one rank to the other */
    bool posted = false;
    Message(bool s, int p, void *d, size_t n) : send(s), peer(p), data(static_cast<char *>(d)), bytes(n), piece(0) {}
};

/* The group that this thread has open, or that a stream works on. */
struct Group {
    ncclComm *comm = nullptr;
    cudaStream_t stream = nullptr;
    std::vector<Message> messages;
};

thread_local Group open_group;

/* One piece further; false: the other rank is not there yet. */
bool step(ncclComm *c, Message &m)
{
    Pair &pair = c->pairs[m.send ? c->rank * c->size + m.peer : m.peer * c->size + c->rank];
    const size_t n = std::min(m.bytes - m.done, static_cast<size_t>(PAIR_ROOM));
    if (m.send && !m.posted) {
        if (pair.taken < m.piece) return false; /* of an earlier message */
        memcpy(pair.data, m.data + m.done, n);
        pair.bytes = m.bytes;
        pair.posted = m.piece + 1;
        m.posted = true;
    }
    if (m.send ? pair.taken <= m.piece : pair.posted <= m.piece) return false;
    if (!m.send && pair.bytes != m.bytes) c->error = ncclInvalidUsage;
    if (c->error) return false;
    if (!m.send) memcpy(m.data + m.done, pair.data, n);
    if (!m.send) pair.taken = m.piece + 1;
    m.piece++;
    m.done += n;
    m.posted = false;
    return true;
}

/* A few steps of each message whose predecessors to, or from, the same rank are through; true when all are. */
bool advance_group(Group &g)
{
    ncclComm *c = g.comm;
    bool waits[2][RANKS] = {}, all = true;
    if (!c->aborted) {
        look_around(c);
        if (c->error && c->error != ncclInProgress) return false; /* hangs until it is aborted */
        for (Message &m : g.messages) {
            while (!waits[m.send][m.peer] && m.done < m.bytes)
                if (!step(c, m)) waits[m.send][m.peer] = true;
            all = all && m.done == m.bytes;
        }
    }
    if (!all) return false;
    c->in_flight--;
    return true;
}

ncclResult_t add_message(bool send, void *data, size_t count, ncclDataType_t type, int peer, ncclComm *c,
                         cudaStream_t stream)
{
    Group &g = open_group;
    if (!group_depth || !usable(c) || (g.comm && (g.comm != c || g.stream != stream))) return ncclInvalidUsage;
    if (!stream || type != ncclUint8 || !count || peer < 0 || peer >= c->size || (peer == c->rank && c->size > 1) ||
        !emu::device_holds(data, count))
        return ncclInvalidArgument;
    if (!connect(c, static_cast<size_t>(REDUCE_SCATTER + 1 + peer), PEER_BYTES)) return ncclUnhandledCudaError;
    g.comm = c;
    g.stream = stream;
    g.messages.emplace_back(send, peer, data, count);
    auto &pieces = (send ? c->sent : c->received)[static_cast<size_t>(peer)];
    g.messages.back().piece = pieces;
    pieces += (count + PAIR_ROOM - 1) / PAIR_ROOM;
    return ncclSuccess;
}

/* ---- communicators ---- */

void say(const ncclConfig_t *config)
{
    const char *debug = getenv("NCCL_DEBUG");
    if (!debug || strcmp(debug, "INFO")) return;
    const auto text = [](int ctas) {
        return ctas == NCCL_CONFIG_UNDEF_INT ? std::string("any") : std::to_string(ctas);
    };
    const char *name = version() >= NCCL_NAMES ? config->commName : "without a name";
    fprintf(stderr, "emu: communicator %s, CTAs from %s to %s\n", name, text(config->minCTAs).c_str(),
            text(config->maxCTAs).c_str());
}

ncclComm *create(const char *path, int rank, int size)
{
    ncclComm *c = new ncclComm;
    snprintf(c->path, sizeof c->path, "%s", path);
    c->rank = rank;
    c->size = size;
    c->sent.resize(static_cast<size_t>(size));
    c->received.resize(static_cast<size_t>(size));
    c->connecting = true;
    c->connected.resize(static_cast<size_t>(REDUCE_SCATTER + 1 + size));
    return c;
}

/* All ranks have said their colours: who is in the new communicator? */
void finish_split(ncclComm *c)
{
    const uint64_t k = c->splits;
    const Seat &own = c->shared->seats[c->rank];
    int size = 0, rank = 0, first = -1;
    for (int p = 0; p < c->size; p++)
        if (c->shared->seats[p].splits < k) return;
    ncclComm **const out = c->child;
    c->child = nullptr;
    if (own.color[k - 1] == NCCL_SPLIT_NOCOLOR) return;
    for (int p = 0; p < c->size; p++) {
        const Seat &s = c->shared->seats[p];
        if (s.color[k - 1] != own.color[k - 1]) continue;
        if (first < 0) first = p;
        size++;
        rank += s.key[k - 1] < own.key[k - 1] || (s.key[k - 1] == own.key[k - 1] && p < c->rank);
    }
    char path[64];
    snprintf(path, sizeof path, "%.36s-%d-%d", c->path, static_cast<int>(k), first);
    ncclComm *child = create(path, rank, size);
    if (!attach(child)) c->error = ncclSystemError;
    *out = child;
}

/* The config has this version's size, or one that this version can read; members that it does not know are not looked
 * at. */
bool config_is_known(const ncclConfig_t *c)
{
    const size_t size = version() >= NCCL_NAMES ? sizeof *c : offsetof(ncclConfig_t, commName);
    return c && c->magic == NCCL_MAGIC && c->size == size && c->version <= static_cast<unsigned>(version()) &&
           c->blocking == 0 && c->minCTAs <= c->maxCTAs;
}

} // namespace

/* ---- the interface ---- */

ncclResult_t ncclGetVersion(int *out)
{
    *out = version();
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    uint64_t random[2];
    if (getrandom(random, sizeof random, 0) != sizeof random) return ncclSystemError;
    memset(id, 0, sizeof *id);
    snprintf(id->internal, sizeof id->internal, "/dev/shm/emu-nccl-%08llx%08llx",
             static_cast<unsigned long long>(random[0] & 0xffffffff),
             static_cast<unsigned long long>(random[1] & 0xffffffff));
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int size, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    if (!config_is_known(config) || size < 1 || size > RANKS || rank < 0 || rank >= size) return ncclInvalidArgument;
    *comm = create(id.internal, rank, size);
    if (!attach(*comm)) return fail_comm(*comm, ncclSystemError);
    say(config);
    return ncclInProgress;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out, ncclConfig_t *config)
{
    if (!usable(comm)) return ncclInvalidUsage;
    const bool none = color == NCCL_SPLIT_NOCOLOR;
    if ((!none && (!config_is_known(config) || color < 0)) || comm->splits == 16) return ncclInvalidArgument;
    *out = nullptr;
    Seat &own = comm->shared->seats[comm->rank];
    own.color[comm->splits] = color;
    own.key[comm->splits] = key;
    comm->child = out;
    if (!none) say(config);
    own.splits = ++comm->splits;
    return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    if (!comm || !error) return ncclInvalidArgument;
    *error = static_cast<ncclResult_t>(comm->error.load());
    if (*error) return ncclSuccess;
    if (comm->connecting || comm->child || comm->finalizing) look_around(comm);
    if (comm->connecting && all_here(comm)) {
        comm->connecting = false;
        if (shared_gpu(comm)) fail_comm(comm, ncclInvalidUsage);
    }
    if (comm->child) finish_split(comm);
    const bool draining = comm->finalizing && comm->in_flight;
    *error = static_cast<ncclResult_t>(comm->error.load());
    if (comm->starting) comm->starting--;
    if (!*error && (comm->connecting || comm->child || draining || comm->starting)) *error = ncclInProgress;
    return ncclSuccess;
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream)
{
    return begin(comm, ALL_GATHER, from, to, count, type, ncclSum, stream);
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream)
{
    return begin(comm, ALL_REDUCE, from, to, count, type, op, stream);
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream)
{
    return begin(comm, REDUCE_SCATTER, from, to, count, type, op, stream);
}

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    return add_message(true, const_cast<void *>(from), count, type, peer, comm, stream);
}

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream)
{
    return add_message(false, to, count, type, peer, comm, stream);
}

ncclResult_t ncclGroupStart(void)
{
    if (group_depth) return ncclInvalidUsage; /* (the library nests them; nothing here does) */
    group_depth = 1;
    open_group = Group();
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    if (!group_depth) return ncclInvalidUsage;
    group_depth = 0;
    Group g = open_group;
    open_group = Group();
    if (!g.comm) return ncclSuccess;
    ncclComm *c = g.comm;
    c->in_flight++;
    if (emu::submit_until(g.stream, "nccl", [g]() mutable { return advance_group(g); }) != cudaSuccess)
        return ncclUnhandledCudaError;
    c->starting = ASKS;
    return ncclInProgress;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    if (!usable(comm)) return ncclInvalidUsage;
    comm->finalizing = true;
    comm->shared->seats[comm->rank].left = 1;
    return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    if (!comm || !comm->finalizing || comm->in_flight) return ncclInvalidUsage;
    emu::library_take(-comm->taken);
    detach(comm);
    delete comm;
    return ncclSuccess;
}

/* Work in streams still looks at it: it is never freed. */
ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    if (!comm) return ncclInvalidArgument;
    if (comm->shared && comm->shared->attached < comm->size) unlink(comm->path);
    comm->aborted = true;
    while (mode_is("stuck")) sleep(1);
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t error)
{
    static const char *const texts[] = { "no error",         "unhandled cuda error", "unhandled system error",
                                         "internal error",   "invalid argument",     "invalid usage",
                                         "remote process exited or there was a network error", "in progress" };
    return error >= 0 && error <= ncclInProgress ? texts[error] : "unknown";
}

const char *ncclGetLastError(ncclComm_t) { return last_error; }
