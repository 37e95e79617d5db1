/*
 * Communicators over Gloo; see gloo.h and docs/comm.md. Of Gloo only the TCP transport is used: "unbound
 * buffers", whose sends and receives between two ranks meet by a 64-bit slot, in order within a slot.
 *
 * A request on its group's worker thread:
 *
 *   [compare calls] | blocks of the peers' contributions to my slice arrive in scratch | sum | send it to all
 *
 * No exception leaves this file: entry points and the worker catch everything.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gloo/config.h>
#include <gloo/transport/address.h>
#include <gloo/transport/context.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

extern "C" {
#include "base/fault.h"
#include "comm/gloo.h"
#include "base/trace.h"
#include "comm/reduce.h"
}

namespace
{

using Milliseconds = std::chrono::milliseconds;
using gloo::transport::UnboundBuffer;

enum Phase { COMPARE, REDUCE, GATHER, PHASES };
enum {
    QUEUE_SIZE = 64,
    DIRECT_BYTES = 64 << 10,      /* reductions that move no more than this go from all to all at once */
    GATHER_BLOCK_BYTES = 1 << 20, /* so that a long gather does not keep other groups from the connection */
    GROUPS_PER_PAIR = 1 << 16,
};

/* A failure whose kind is known. */
struct Failure : std::runtime_error {
    Err kind;
    Failure(Err k, const std::string &text) : std::runtime_error(text), kind(k) {}
};

struct Stopped {
}; /* thrown where the world has ended already */

/*
 * The messages of one phase to and from one peer. The buffer spans the address space (offset = address), so that
 * none is made per request. This is safe because a request ends either with all its messages complete or with
 * all connections closed.
 */
struct Lane {
    std::unique_ptr<UnboundBuffer> buffer;
    int sends = 0, receives = 0; /* posted and not waited for */
};

struct Group;

} // namespace

struct GlooWorld {
    int delay_ms = 0;
    int rank, size;
    Milliseconds timeout;
    std::shared_ptr<gloo::transport::Device> device;
    std::shared_ptr<gloo::transport::Context> context;
    std::vector<int> groups_with; /* how many groups were opened that contain this and that rank */

    std::mutex lock; /* of what follows */
    std::vector<Group *> groups;
    std::string why;
    std::atomic<bool> stopped{ false };
};

namespace
{

struct Group {
    GlooWorld *world;
    std::string name;
    int rank, size;
    std::vector<int> members;  /* world ranks */
    std::vector<uint64_t> ids; /* this group's number, per member */
    std::vector<Lane> lanes[PHASES];
    std::unique_ptr<char[]> scratch;
    std::vector<const void *> inputs;
    std::vector<CommCall> calls;
    uint64_t name_hash = 0, call_hash = 0, sequence = 0; /* of the request that runs */
    const CommRequest *request = nullptr;                /* that runs */
    int peer = 0;                                        /* that the worker deals with, for messages */

    std::mutex lock; /* of what follows */
    std::condition_variable changed;
    CommRequest queue[QUEUE_SIZE];
    int64_t head = 0, tail = 0;
    bool closing = false;
    std::thread worker;
};

/* Ends all groups: wakes those who wait, then closes the connections, after which nothing is written to or read
 * from any request's memory. Returns when that is so. */
void stop_world(GlooWorld *w, const std::string &why) noexcept
{
    std::lock_guard<std::mutex> guard(w->lock);
    if (w->stopped) return;
    try {
        w->why = why;
    } catch (...) {
    }
    w->stopped = true;
    for (Group *g : w->groups)
        for (auto &lanes : g->lanes)
            for (Lane &lane : lanes) {
                if (!lane.buffer) continue;
                lane.buffer->abortWaitRecv();
                lane.buffer->abortWaitSend();
            }
    for (int p = 0; p < w->size; p++) {
        if (p == w->rank) continue;
        try {
            w->context->getPair(p)->close();
        } catch (...) {
        }
    }
}

/* ---- messages ---- */

/*
 * 16 bits group | 24 bits call | 16 bits of what the call is | 8 bits phase. The group's number is counted per
 * pair of ranks: two groups that share two ranks differ on that pair, whatever other groups exist.
 * Calls that differ, or groups opened in another order, do not meet: they time out, where a message of another
 * length would end the process.
 */
uint64_t slot_of(const Group *g, int p, Phase phase)
{
    uint64_t what = phase == COMPARE ? g->name_hash : g->call_hash;
    return g->ids[p] << 48 | (g->sequence & 0xffffff) << 24 | (what & 0xffff) << 8 | (uint64_t)phase;
}

uint64_t mix(uint64_t hash, uint64_t x)
{
    hash = (hash ^ x) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 29;
}

Lane &lane_to(Group *g, int p, Phase phase)
{
    if (g->world->stopped) throw Stopped();
    g->peer = p;
    return g->lanes[phase][p];
}

void send(Group *g, int p, Phase phase, const void *data, int64_t bytes)
{
    if (!bytes) return;
    Lane &lane = lane_to(g, p, phase);
    lane.buffer->send(g->members[p], slot_of(g, p, phase), (size_t)data, (size_t)bytes);
    lane.sends++;
}

void receive(Group *g, int p, Phase phase, void *data, int64_t bytes)
{
    if (!bytes) return;
    Lane &lane = lane_to(g, p, phase);
    lane.buffer->recv(g->members[p], slot_of(g, p, phase), (size_t)data, (size_t)bytes);
    lane.receives++;
}

/* Another group's wait timed out and Gloo closed everything: that group will say so in a moment. */
void let_cause_appear(const GlooWorld *w)
{
    for (int i = 0; i < 100 && !w->stopped; i++) std::this_thread::sleep_for(Milliseconds(10));
}

template <class Wait> void wait_for(Group *g, Wait wait)
{
    auto begin = std::chrono::steady_clock::now();
    bool done;
    const CommRequest *r = g->request;
    watch_waits(r->watch, r->watch_id, g->members[g->peer]);
    try {
        done = wait();
        watch_waits(r->watch, r->watch_id, WATCH_NOBODY);
    } catch (const std::exception &e) {
        if (strstr(e.what(), "Application timeout")) let_cause_appear(g->world);
        if (g->world->stopped) throw Stopped();
        if (std::chrono::steady_clock::now() - begin < g->world->timeout) throw;
        throw Failure(ERR_HANG, "no answer in " + std::to_string(g->world->timeout.count()) + " ms");
    }
    if (!done) throw Stopped();
}

/* The oldest message from p in this phase. */
void wait_receive(Group *g, int p, Phase phase)
{
    Lane &lane = lane_to(g, p, phase);
    fault_point(comm_kind_name(g->request->kind));
    wait_for(g, [&] { return lane.buffer->waitRecv(nullptr, g->world->timeout); });
    lane.receives--;
}

void wait_all(Group *g, Phase phase)
{
    for (int p = 0; p < g->size; p++) {
        if (p == g->rank) continue;
        while (g->lanes[phase][p].receives) wait_receive(g, p, phase);
        while (g->lanes[phase][p].sends) {
            Lane &lane = lane_to(g, p, phase);
            wait_for(g, [&] { return lane.buffer->waitSend(nullptr, g->world->timeout); });
            lane.sends--;
        }
    }
}

/* fn(member) for the others, beginning with the next rank, so that not all begin with the same. */
template <class Fn> void each_peer(const Group *g, Fn fn)
{
    for (int i = 1; i < g->size; i++) fn((g->rank + i) % g->size);
}

/* ---- collectives ---- */

int64_t block_length(int64_t bytes, int64_t block, int64_t k)
{
    return std::max<int64_t>(0, std::min(block, bytes - k * block));
}

/* dst[size * bytes] = everybody's src[bytes]. */
void gather(Group *g, Phase phase, char *dst, const char *src, int64_t bytes)
{
    char *own = dst + g->rank * bytes;
    if (own != src) memmove(own, src, (size_t)bytes);
    int64_t block = GATHER_BLOCK_BYTES, blocks = (bytes + block - 1) / block;
    for (int64_t k = 0; k < blocks; k++) {
        int64_t n = block_length(bytes, block, k), first = k * block;
        each_peer(g, [&](int p) { receive(g, p, phase, dst + p * bytes + first, n); });
        each_peer(g, [&](int p) { send(g, p, phase, own + first, n); });
        if (k) each_peer(g, [&](int p) { wait_receive(g, p, phase); });
    }
    wait_all(g, phase);
}

/*
 * A reduction. Rank p is to sum `part(p)` of everybody's source, in blocks: while one is summed the next
 * arrives. With `spread` the sums then go to all, into dst (= src): the region of p's part is written when p
 * has summed the block, so after it was sent.
 */
struct Reduction {
    Group *g;
    CommKind kind;
    const char *src;
    char *dst;
    int64_t count, elem_bytes;
    bool scatter, direct, spread;
    int64_t block;

    Reduction(Group *group, const CommRequest &r)
        : g(group), kind(r.kind), src((const char *)r.src), dst((char *)r.dst), count(r.count),
          elem_bytes(r.elem_bytes)
    {
        scatter = kind == COMM_REDUCE_SCATTER_TREE_F32 || kind == COMM_REDUCE_SCATTER_I64;
        direct = !scatter && count * elem_bytes * (g->size - 1) <= DIRECT_BYTES;
        spread = !scatter && !direct;
        block = (GLOO_SCRATCH_BYTES / 2 / (g->size - 1)) & ~63;
    }

    int64_t first(int p) const /* byte of the source at which p's part begins */
    {
        if (direct) return 0;
        return (scatter ? p * count : count * p / g->size) * elem_bytes;
    }

    int64_t length(int p) const { return scatter || direct ? count * elem_bytes : first(p + 1) - first(p); }

    int64_t length(int p, int64_t k) const { return block_length(length(p), block, k); }

    char *result() const { return scatter ? dst : dst + first(g->rank); }

    char *landing(int p, int64_t k) const /* of p's contribution to block k of my part */
    {
        int index = p < g->rank ? p : p - 1;
        return g->scratch.get() + ((k % 2) * (g->size - 1) + index) * block;
    }

    void post(int64_t k)
    {
        each_peer(g, [&](int p) {
            receive(g, p, REDUCE, landing(p, k), length(g->rank, k));
            if (spread) receive(g, p, GATHER, dst + first(p) + k * block, length(p, k));
        });
        each_peer(g, [&](int p) { send(g, p, REDUCE, src + first(p) + k * block, length(p, k)); });
    }

    void sum(int64_t k)
    {
        int64_t n = length(g->rank, k);
        if (!n) return;
        each_peer(g, [&](int p) {
            wait_receive(g, p, REDUCE);
            g->inputs[p] = landing(p, k);
        });
        g->inputs[g->rank] = src + first(g->rank) + k * block;
        char *out = result() + k * block;
        if (direct) wait_all(g, REDUCE); /* the source is about to be overwritten */
        comm_reduce(kind, out, g->inputs.data(), g->size, n / elem_bytes);
        if (spread) each_peer(g, [&](int p) { send(g, p, GATHER, out, n); });
    }

    void run()
    {
        int64_t longest = 0;
        for (int p = 0; p < g->size; p++) longest = std::max(longest, length(p));
        int64_t blocks = (longest + block - 1) / block;
        for (int64_t k = 0; k <= blocks; k++) {
            if (k < blocks) post(k);
            if (k > 0) sum(k - 1);
        }
        wait_all(g, REDUCE);
        wait_all(g, GATHER);
    }
};

void compare_calls(Group *g, const CommRequest &r)
{
    char message[256];
    g->calls[g->rank] = comm_call(&r);
    gather(g, COMPARE, (char *)g->calls.data(), (char *)&g->calls[g->rank], sizeof(CommCall));
    if (comm_same_calls(g->name.c_str(), g->calls.data(), g->size, message, sizeof message)) return;
    /* closing drops what is still under way: let all peers come to the same finding */
    std::this_thread::sleep_for(Milliseconds(100));
    throw Failure(ERR_INTERNAL, message);
}

void perform(Group *g, const CommRequest &r)
{
    g->sequence = r.sequence;
    g->request = &r;
    g->call_hash = mix(mix(mix(g->name_hash, (uint64_t)r.kind), (uint64_t)r.count), (uint64_t)r.elem_bytes);
    if (r.check) compare_calls(g, r);
    char *scratch = g->scratch.get();
    switch (r.kind) {
    case COMM_ALL_GATHER:
        gather(g, GATHER, (char *)r.dst, (const char *)r.src, r.count * r.elem_bytes);
        break;
    case COMM_BARRIER: gather(g, GATHER, scratch, scratch + g->rank, 1); break;
    default: Reduction(g, r).run(); break;
    }
}

/* ---- the worker ---- */

/* Gloo's texts begin with the place in its source. */
const char *without_place(const char *text)
{
    const char *end = *text == '[' ? strstr(text, "] ") : nullptr;
    return end ? end + 2 : text;
}

Err report(Group *g, const CommRequest &r, Err kind, const char *text, char *message, size_t size)
{
    if (kind == ERR_INTERNAL) snprintf(message, size, "%s", text);
    else
        snprintf(message, size, "%s: %s rank %d in %s of %lld (call %llu): %s", g->name.c_str(),
                 kind == ERR_HANG ? "waited for" : "lost", g->members[g->peer], comm_kind_name(r.kind),
                 (long long)r.count, (unsigned long long)r.sequence, without_place(text));
    stop_world(g->world, message);
    return kind;
}

Err run(Group *g, const CommRequest &r, char *message, size_t size) noexcept
{
    try {
        if (g->world->stopped) throw Stopped();
        perform(g, r);
        return ERR_OK;
    } catch (const Stopped &) {
    } catch (const Failure &e) {
        return report(g, r, e.kind, e.what(), message, size);
    } catch (const std::exception &e) {
        if (!g->world->stopped) return report(g, r, ERR_PEER, e.what(), message, size);
    } catch (...) {
        return report(g, r, ERR_INTERNAL, "unknown exception", message, size);
    }
    std::lock_guard<std::mutex> guard(g->world->lock); /* held until connections are closed */
    snprintf(message, size, "%s: stopped because %s", g->name.c_str(), g->world->why.c_str());
    return ERR_PEER;
}

void work(Group *g) noexcept
{
    trace_track(g->name.c_str());
    for (;;) {
        CommRequest r;
        {
            std::unique_lock<std::mutex> guard(g->lock);
            g->changed.wait(guard, [&] { return g->head < g->tail || g->closing; });
            if (g->head == g->tail) return;
            r = g->queue[g->head % QUEUE_SIZE];
        }
        char message[256] = "";
        trace_begin(comm_kind_name(r.kind));
        Err err = run(g, r, message, sizeof message);
        if (g->world->delay_ms) std::this_thread::sleep_for(Milliseconds(g->world->delay_ms));
        trace_end();
        if (r.watch && !err) watch_completed(r.watch, r.watch_id, r.sequence + 1);
        event_complete(r.done, err, message);
        std::lock_guard<std::mutex> guard(g->lock);
        g->head++;
        g->changed.notify_all();
    }
}

Err submit(Comm *c, const CommRequest *r)
{
    Group *g = (Group *)c->impl;
    std::unique_lock<std::mutex> guard(g->lock);
    g->changed.wait(guard, [&] { return g->tail - g->head < QUEUE_SIZE; });
    g->queue[g->tail++ % QUEUE_SIZE] = *r;
    g->changed.notify_all();
    return ERR_OK;
}

void close_group(Comm *c)
{
    Group *g = (Group *)c->impl;
    {
        std::lock_guard<std::mutex> guard(g->lock);
        g->closing = true;
        g->changed.notify_all();
    }
    g->worker.join();
    {
        std::lock_guard<std::mutex> guard(g->world->lock);
        auto &all = g->world->groups;
        all.erase(std::find(all.begin(), all.end(), g));
    }
    delete g;
}

const CommTable gloo_table = { "gloo", submit, close_group };

/* ---- connecting ---- */

/* That it can be listened on, before Gloo tries: its texts do not say which address, and a failure leaks. */
void check_address(const char *address)
{
    struct sockaddr_in v4 = {};
    struct sockaddr_in6 v6 = {};
    v4.sin_family = AF_INET;
    v6.sin6_family = AF_INET6;
    bool is_v4 = inet_pton(AF_INET, address, &v4.sin_addr) == 1;
    if (!is_v4 && inet_pton(AF_INET6, address, &v6.sin6_addr) != 1)
        throw Failure(ERR_CONFIG, std::string("address '") + address + "' of this rank is not numeric");
    int fd = socket(is_v4 ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int rc = is_v4 ? bind(fd, (const struct sockaddr *)&v4, sizeof v4)
                   : bind(fd, (const struct sockaddr *)&v6, sizeof v6);
    std::string why = strerror(errno);
    if (fd >= 0) close(fd);
    if (rc) throw Failure(ERR_CONFIG, std::string("cannot listen on address '") + address + "': " + why);
}

void make_device(GlooWorld *w, const char *address)
{
    check_address(address);
    signal(SIGPIPE, SIG_IGN); /* Gloo writes without MSG_NOSIGNAL */
    /* Gloo's event thread retries at once while another thread holds a connection's lock. Woken on a shared core
     * it preempts that thread and spins out its time slice; a SCHED_BATCH thread does not preempt. Not being
     * allowed to ask costs time only. */
    struct sched_param none = {};
    sched_setscheduler(0, SCHED_BATCH, &none);
    struct rlimit files;
    if (!getrlimit(RLIMIT_NOFILE, &files) && files.rlim_cur < files.rlim_max) {
        files.rlim_cur = files.rlim_max; /* a socket for each rank */
        setrlimit(RLIMIT_NOFILE, &files);
    }
    try {
        w->device = gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr(address));
    } catch (const std::exception &e) {
        throw Failure(ERR_CONFIG,
                      std::string("cannot use address '") + address + "': " + without_place(e.what()));
    }
}

Err connect_all(GlooWorld *w, const GlooStore &store, double timeout_s)
{
    w->context = w->device->createContext(w->rank, w->size);
    w->context->setTimeout(w->timeout / 5 +
                           Milliseconds(1)); /* Gloo waits five times as long for a connection */
    for (int p = 0; p < w->size; p++)
        if (p != w->rank) w->context->createPair(p);
    /* one value per rank: where each of the others finds it */
    size_t length = w->context->getPair(w->rank ? 0 : 1)->address().bytes().size();
    std::vector<char> own(length * (size_t)w->size);
    for (int p = 0; p < w->size; p++) {
        if (p == w->rank) continue;
        std::vector<char> address = w->context->getPair(p)->address().bytes();
        memcpy(own.data() + length * (size_t)p, address.data(), std::min(length, address.size()));
    }
    TRY(store.set(store.user, ("gloo/" + std::to_string(w->rank)).c_str(), own.data(), (int64_t)own.size()));
    std::vector<char> theirs(own.size());
    for (int p = 0; p < w->size; p++) {
        if (p == w->rank) continue;
        int64_t n = 0;
        std::string key = "gloo/" + std::to_string(p);
        TRY(store.get(store.user, key.c_str(), theirs.data(), (int64_t)theirs.size(), &n, timeout_s));
        if (n != (int64_t)theirs.size())
            throw Failure(ERR_RENDEZVOUS, "'" + key + "' in the store is not ours");
        auto at = theirs.begin() + (ptrdiff_t)(length * (size_t)w->rank);
        try {
            w->context->getPair(p)->connect(std::vector<char>(at, at + (ptrdiff_t)length));
        } catch (const std::exception &e) {
            throw Failure(ERR_RENDEZVOUS, "rank " + std::to_string(w->rank) + " and rank " +
                                              std::to_string(p) +
                                              " do not connect: " + without_place(e.what()));
        }
    }
    return ERR_OK;
}

void open_group(GlooWorld *w, Comm *c, const char *name, const int *members, int size)
{
    std::unique_ptr<Group> g(new Group());
    g->world = w;
    g->name = name;
    for (char x : g->name) g->name_hash = mix(g->name_hash, (uint64_t)x);
    g->size = size;
    g->rank = (int)(std::find(members, members + size, w->rank) - members);
    g->members.assign(members, members + size);
    g->scratch.reset(new char[GLOO_SCRATCH_BYTES]());
    g->inputs.resize((size_t)size);
    g->calls.resize((size_t)size);
    for (int m : g->members) {
        if (w->groups_with[m] == GROUPS_PER_PAIR) throw Failure(ERR_CONFIG, "too many groups");
        g->ids.push_back((uint64_t)w->groups_with[m]++);
    }
    for (auto &lanes : g->lanes) {
        lanes.resize((size_t)size);
        for (int p = 0; p < size; p++)
            if (p != g->rank) lanes[p].buffer = w->context->createUnboundBuffer(nullptr, SIZE_MAX);
    }
    {
        std::lock_guard<std::mutex> guard(w->lock);
        w->groups.push_back(g.get());
    }
    try {
        g->worker = std::thread(work, g.get());
    } catch (...) {
        std::lock_guard<std::mutex> guard(w->lock);
        w->groups.pop_back();
        throw;
    }
    const int rank = g->rank;
    comm_init(c, &gloo_table, name, rank, size, g.release());
}

template <class Fn> Err guarded(const char *what, Fn fn) noexcept
{
    try {
        return fn();
    } catch (const Failure &e) {
        return err_set(e.kind, "%s: %s", what, e.what());
    } catch (const std::bad_alloc &) {
        return err_set(ERR_MEMORY, "%s: no memory", what);
    } catch (const std::exception &e) {
        return err_set(ERR_INTERNAL, "%s: %s", what, without_place(e.what()));
    } catch (...) {
        return err_set(ERR_INTERNAL, "%s: unknown exception", what);
    }
}

} // namespace

extern "C" Err gloo_world_open(GlooOptions o, GlooWorld **out)
{
    *out = nullptr;
    return guarded("connecting ranks", [&] {
        std::unique_ptr<GlooWorld> w(new GlooWorld());
        w->rank = o.rank;
        w->size = o.size;
        w->delay_ms = o.delay_ms;
        w->timeout = Milliseconds((int64_t)(o.timeout_s * 1000));
        w->groups_with.resize((size_t)o.size);
        make_device(w.get(), o.address);
        if (o.size > 1) TRY(connect_all(w.get(), o.store, o.timeout_s));
        *out = w.release();
        return ERR_OK;
    });
}

extern "C" void gloo_world_close(GlooWorld *w)
{
    if (!w) return;
    ASSERT(w->groups.empty());
    delete w;
}

extern "C" void gloo_world_abort(GlooWorld *w, const char *why) { stop_world(w, why); }

extern "C" Err comm_open_gloo(GlooWorld *w, Comm *c, const char *name, const int *members, int size)
{
    if (size <= 1) return comm_open_self(c, name), ERR_OK;
    return guarded(name, [&] {
        open_group(w, c, name, members, size);
        return ERR_OK;
    });
}

extern "C" const char *gloo_version(void)
{
    static const std::string text = std::to_string(GLOO_VERSION_MAJOR) + "." +
                                    std::to_string(GLOO_VERSION_MINOR) + "." +
                                    std::to_string(GLOO_VERSION_PATCH);
    return text.c_str();
}
