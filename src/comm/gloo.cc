/*
 * Communicators over Gloo: connections, groups and their threads; see gloo.h and docs/comm.md. What a request does is
 * in gloo_calls.cc. No exception leaves this file: entry points and the worker catch everything.
 */
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

#include <gloo/config.h>
#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/pair.h>

#include "comm/gloo.hpp"

extern "C" {
#include "base/trace.h"
#include "comm/mesh.h"
}

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
    for (Group *g : w->groups) {
        g->notes.buffer->abortWaitRecv();
        g->notes.buffer->abortWaitSend();
    }
    for (int p = 0; p < w->size; p++) {
        if (p == w->rank) continue;
        try {
            w->context->getPair(p)->close();
        } catch (...) {
        }
    }
}

namespace
{

/* ---- the worker ---- */

/* Gloo's texts begin with the place in its source. */
const char *without_place(const char *text)
{
    const char *end = *text == '[' ? strstr(text, "] ") : nullptr;
    return end ? end + 2 : text;
}

/* "lost rank 3 in reduce-tree of 5000 (call 7)", "waited for rank 3 in exchange 7 (to send: activation of ...)" */
void tell_call(const Group *g, const CommRequest &r, Err kind, char *text, size_t size)
{
    char what[64];
    const char *verb = kind == ERR_HANG ? "waited for" : "lost";
    if (g->message) {
        message_text(g->message->what, what, sizeof what);
        snprintf(text, size, "%s rank %d in exchange %llu (to %s: %s)", verb, g->members[g->peer],
                 (unsigned long long)r.sequence, g->message->send ? "take" : "send", what);
    } else
        snprintf(text, size, "%s rank %d in %s of %lld (call %llu)", verb, g->members[g->peer], comm_kind_name(r.kind),
                 (long long)r.count, (unsigned long long)r.sequence);
}

Err report(Group *g, const CommRequest &r, Err kind, const char *text, char *message, size_t size)
{
    char call[160];
    tell_call(g, r, kind, call, sizeof call);
    if (kind == ERR_INTERNAL) snprintf(message, size, "%s", text);
    else snprintf(message, size, "%s: %s: %s", g->name.c_str(), call, without_place(text));
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
        if (!err) comm_tell_completed(&r);
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

/* Gloo's own address is one where nobody calls: its sockets are made here. */
void make_device(GlooWorld *w)
{
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
    w->device = gloo::transport::tcp::CreateDevice(gloo::transport::tcp::attr("127.0.0.1"));
}

/*
 * Holds Gloo's event thread: as long as this exists, nothing of what happens to Gloo's sockets is looked at. The
 * constructor of a pair opens a listener (in versions before 2023), on which somebody may call before it is closed.
 */
class Held final : public gloo::transport::tcp::Handler
{
  public:
    explicit Held(gloo::transport::tcp::Device *d) : device(d), fd(eventfd(1, EFD_CLOEXEC | EFD_NONBLOCK))
    {
        if (fd < 0) throw std::runtime_error(strerror(errno));
        device->registerDescriptor(fd, EPOLLIN, this);
        std::unique_lock<std::mutex> guard(lock);
        changed.wait(guard, [&] { return held; });
    }

    Held(const Held &) = delete;

    ~Held() override
    {
        std::unique_lock<std::mutex> guard(lock);
        released = true;
        changed.notify_all();
        changed.wait(guard, [&] { return !held; }); /* (the last time that the other thread looks at this) */
        guard.unlock();
        device->unregisterDescriptor(fd, this);
        ::close(fd);
    }

    void handleEvents(int) override
    {
        eventfd_t once; /* (read, so that this is not called again) */
        if (eventfd_read(fd, &once)) return;
        std::unique_lock<std::mutex> guard(lock);
        held = true;
        changed.notify_all();
        changed.wait(guard, [&] { return released; });
        held = false;
        changed.notify_all();
    }

  private:
    gloo::transport::tcp::Device *device;
    int fd;
    std::mutex lock; /* guards what follows */
    std::condition_variable changed;
    bool held = false, released = false;
};

/* Gloo's pair, with a socket that is connected and whose other end is known (comm/mesh.h). */
class ConnectedPair final : public gloo::transport::tcp::Pair
{
  public:
    ConnectedPair(gloo::transport::tcp::Context *c, gloo::transport::tcp::Device *d, int peer, Milliseconds timeout,
                  int fd)
        : Pair(c, d, peer, timeout)
    {
        using gloo::transport::tcp::Address;
        std::lock_guard<std::mutex> guard(m_);
        if (fd_ >= 0) ::close(fd_); /* the listener */
        fd_ = fd;
        self_ = Address::fromSockName(fd_);
        peer_ = Address::fromPeerName(fd_);
        device_->registerDescriptor(fd_, EPOLLIN, this);
        changeState(CONNECTED);
    }

    /* Gloo's event thread is told at once again of what it cannot look at, as another thread holds the connection. It
     * must not wait for that one, which may wait for it, but lets it run. */
    void handleEvents(int events) override
    {
        if (!m_.try_lock()) {
            std::this_thread::yield();
            return;
        }
        m_.unlock();
        Pair::handleEvents(events);
    }
};

/* Descriptors, closed unless Gloo has them. */
struct Sockets {
    std::vector<int> fds;
    explicit Sockets(int count) : fds((size_t)count, -1) {}
    Sockets(const Sockets &) = delete;
    ~Sockets()
    {
        for (int fd : fds)
            if (fd >= 0) ::close(fd);
    }
    int take(int i)
    {
        int fd = fds[(size_t)i];
        fds[(size_t)i] = -1;
        return fd;
    }
};

void make_pairs(GlooWorld *w, Sockets *sockets)
{
    auto *device = static_cast<gloo::transport::tcp::Device *>(w->device.get());
    auto *context = static_cast<gloo::transport::tcp::Context *>(w->context.get());
    Held held(device);
    for (int p = 0; p < w->size; p++)
        if (p != w->rank)
            context->getPair(p).reset(new ConnectedPair(context, device, p, w->timeout, sockets->take(p)));
}

using Addresses = std::vector<std::array<char, MESH_ADDRESS_BYTES>>;

/* One value a rank. */
Err exchange_addresses(const GlooWorld *w, const GlooStore &store, double timeout_s, Addresses *addresses)
{
    const auto key = [](int p) { return "gloo/" + std::to_string(p); };
    TRY(store.set(store.user, key(w->rank).c_str(), (*addresses)[w->rank].data(), MESH_ADDRESS_BYTES));
    for (int p = 0; p < w->size; p++) {
        if (p == w->rank) continue;
        char *address = (*addresses)[p].data();
        int64_t n = 0;
        TRY(store.get(store.user, key(p).c_str(), address, MESH_ADDRESS_BYTES, &n, timeout_s));
        if (n != MESH_ADDRESS_BYTES || address[n - 1])
            throw Failure(ERR_RENDEZVOUS, "'" + key(p) + "' in the store is not ours");
    }
    return ERR_OK;
}

Err connect_all(GlooWorld *w, const GlooOptions &o)
{
    Sockets sockets(w->size);
    Addresses addresses((size_t)w->size);
    Mesh *mesh;
    TRY(mesh_open(w->rank, w->size, { o.address, o.port, o.port_step }, { o.secret, o.start }, &mesh));
    std::unique_ptr<Mesh, decltype(&mesh_close)> closing(mesh, mesh_close);
    mesh_address(mesh, addresses[w->rank].data());
    TRY(exchange_addresses(w, o.store, o.timeout_s, &addresses));
    TRY(mesh_connect(mesh, reinterpret_cast<const char(*)[MESH_ADDRESS_BYTES]>(addresses.data()), o.timeout_s,
                     sockets.fds.data()));
    w->context = w->device->createContext(w->rank, w->size);
    w->context->setTimeout(w->timeout);
    make_pairs(w, &sockets);
    return ERR_OK;
}

void open_group(GlooWorld *w, Comm *c, const char *name, const int *members, int size)
{
    std::unique_ptr<Group> g(new Group());
    g->world = w;
    g->name = name;
    for (char x : g->name) g->name_hash = mix_hash(g->name_hash, (uint64_t)x);
    g->size = size;
    g->rank = (int)(std::find(members, members + size, w->rank) - members);
    g->members.assign(members, members + size);
    g->scratch.reset(new char[GLOO_SCRATCH_BYTES]());
    g->inputs.resize((size_t)size);
    g->calls.resize((size_t)size);
    g->sent.resize((size_t)size);
    g->received.resize((size_t)size);
    g->notes.buffer = w->context->createUnboundBuffer(nullptr, SIZE_MAX);
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

bool says(const char *text, int error) { return strstr(text, strerror(error)) != nullptr; }

/* Gloo and the C++ library say in a text alone what the system refused, and of descriptors not even that. */
Err refused(const char *what, const char *text) noexcept
{
    const int another = eventfd(0, EFD_CLOEXEC), full = another < 0 ? errno : says(text, EMFILE) ? EMFILE : 0;
    if (another >= 0) ::close(another);
    if (full == EMFILE || full == ENFILE) {
        err_set(ERR_RENDEZVOUS, "%s: no file descriptor is left: %s", what, text);
        return err_hint_descriptors(full);
    }
    if (says(text, EAGAIN)) return err_no_thread(what, EAGAIN);
    return err_set(says(text, ENOMEM) ? ERR_MEMORY : ERR_INTERNAL, "%s: %s", what, text);
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
        return refused(what, without_place(e.what()));
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
        make_device(w.get());
        if (o.size > 1) TRY(connect_all(w.get(), o));
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
    static const std::string text = std::to_string(GLOO_VERSION_MAJOR) + "." + std::to_string(GLOO_VERSION_MINOR) +
                                    "." + std::to_string(GLOO_VERSION_PATCH);
    return text.c_str();
}
