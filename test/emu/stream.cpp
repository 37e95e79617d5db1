/*
 * Streams, events and graphs. Work is queued and runs as late as CUDA allows: when something waits for it. So a
 * missing synchronisation shows as old data, every time. EMU_STREAMS=now runs work at once (to debug a kernel
 * under the call that launched it), EMU_STREAMS=queue as late, but in the order of submission to all streams, as if
 * they shared one queue of the hardware: what waits there for another process holds up everything behind it.
 * EMU_STREAMS=random lets streams come on by chance, with each submission: one runs ahead of another that it should
 * wait for, too. A captured stream's work becomes the nodes of a graph, in order of submission.
 *
 * EMU_REPORT=FILE: at the end of the process the kernels that ran, "COUNT NAME" a line, sorted by name.
 */
#include "stream.h"

#include <stdarg.h>
#include <stdlib.h>
#include <time.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <set>
#include <thread>

namespace emu
{

enum { QUEUE_LIMIT = 4096 /* items; a longer queue is run */, PATIENCE_MS = 1000 };

static CUstream_st &legacy = *new CUstream_st;
static std::set<CUstream_st *> &streams = *new std::set<CUstream_st *>;
static std::set<CUevent_st *> &events = *new std::set<CUevent_st *>;
static std::set<CUgraph_st *> &graphs = *new std::set<CUgraph_st *>;
static std::set<CUgraphExec_st *> &executables = *new std::set<CUgraphExec_st *>;
static std::map<std::string, uint64_t> &counts = *new std::map<std::string, uint64_t>;

std::recursive_mutex &runtime_mutex()
{
    static std::recursive_mutex &mutex = *new std::recursive_mutex;
    return mutex;
}

static bool mode_is(const char *mode)
{
    static const char *text = getenv("EMU_STREAMS");
    const char *const modes[] = { "now", "late", "queue", "random" };
    bool known = !text;
    for (const char *m : modes) known |= text && !strcmp(text, m);
    if (!known) fail("EMU_STREAMS=%s: now, late, queue or random is wanted", text);
    return text && strcmp(text, mode) == 0;
}

bool now_mode() { return mode_is("now"); }

static double passed_ms = 0;

void let_pass(double ms) { passed_ms += ms; }

static double now_ms()
{
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return passed_ms + static_cast<double>(t.tv_sec) * 1e3 + static_cast<double>(t.tv_nsec) * 1e-6;
}

/* ---- errors ---- */

static thread_local cudaError_t last_error = cudaSuccess;

cudaError_t set_error(cudaError_t e)
{
    if (e != cudaSuccess) last_error = e;
    return e;
}

cudaError_t take_error(bool forget)
{
    const cudaError_t e = last_error;
    if (forget) last_error = cudaSuccess;
    return e;
}

cudaError_t refuse(cudaError_t e, const char *format, ...)
{
    char text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fflush(stdout);
    fprintf(stderr, "emu: %s: %s\n", text, cudaGetErrorName(e));
    return set_error(e);
}

/* ---- the list of kernels ---- */

static void write_report()
{
    FILE *f = fopen(getenv("EMU_REPORT"), "w");
    if (!f) return perror("emu: EMU_REPORT");
    for (const auto &entry : counts) fprintf(f, "%llu %s\n", (unsigned long long)entry.second, entry.first.c_str());
    fprintf(f, "%zu bytes of device memory\n", device_peak_bytes());
    fclose(f);
}

static void count(const std::string &name)
{
    static const bool wanted = getenv("EMU_REPORT") && atexit(write_report) == 0;
    if (wanted && !name.empty()) counts[name]++;
}

/* ---- queues ---- */

CUstream_st *stream_of(cudaStream_t handle, const char *call)
{
    if (!handle || handle == cudaStreamLegacy) return &legacy;
    if (streams.count(handle)) return handle;
    refuse(cudaErrorInvalidResourceHandle, "%s: %p is not a stream", call, static_cast<void *>(handle));
    return nullptr;
}

static bool reach(const std::shared_ptr<Mark> &mark);

/* Is what the first item waits for there? */
static bool first_may_run(CUstream_st *s)
{
    const Item &first = s->queue.front();
    if (first.wait && !reach(first.wait)) return false;
    if (!first.poll) return true;
    OpenDevice open;
    return first.poll();
}

/* The stream whose first item was submitted before all others'. */
static CUstream_st *oldest()
{
    CUstream_st *first = nullptr;
    for (CUstream_st *s : streams)
        if (!s->queue.empty() && (!first || s->queue.front().number < first->queue.front().number)) first = s;
    return first;
}

static bool step_alone(CUstream_st *s)
{
    if (s->queue.empty() || !first_may_run(s)) return false;
    const Item item = std::move(s->queue.front());
    s->queue.pop_front();
    s->polls -= item.poll ? 1 : 0;
    if (item.run || item.poll) count(item.name);
    if (item.run) {
        OpenDevice open;
        item.run();
    }
    if (item.mark) {
        item.mark->time_ms = now_ms();
        item.mark->done = true;
    }
    return true;
}

/* One item of the stream; with EMU_STREAMS=queue all that is before it goes first. */
bool step(CUstream_st *s)
{
    for (CUstream_st *o; mode_is("queue") && !s->queue.empty() && (o = oldest()) && o != s && s != &legacy;)
        if (!step_alone(o)) return false;
    return step_alone(s);
}

/* Steps of the mark's stream up to it, unless something there waits for another process. */
static bool reach(const std::shared_ptr<Mark> &mark)
{
    while (!mark->done) {
        if (mark->stream->queue.empty()) fail("an event is waited for that no stream will pass");
        if (!step(mark->stream)) return false;
    }
    return true;
}

/* Other processes are waited for: meanwhile the runtime is free, for threads that may end the wait. */
static void pause()
{
    const timespec nap = { 0, 50 * 1000 };
    runtime_mutex().unlock();
    nanosleep(&nap, nullptr);
    runtime_mutex().lock();
}

/* False: something in the stream waits for another process. */
static bool run_through(CUstream_st *s)
{
    if (s->queue.empty()) return true;
    OpenDevice open;
    while (step(s)) {}
    return s->queue.empty();
}

void drain(CUstream_st *s)
{
    while (!run_through(s)) pause();
}

/*
 * With EMU_STREAMS=now other processes are waited for too, but not for ever: they may be gone, and a caller that waited
 * on could not give it up. From then on their work, and all that is behind it, runs late (pass_time). Patience is by
 * the clock: where many processes share a core, one pause may last as long as hundreds.
 */
static void run_at_once(CUstream_st *s, int patience_ms)
{
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(patience_ms);
    while (!run_through(s) && std::chrono::steady_clock::now() < until) pause();
}

void drain_until(const std::shared_ptr<Mark> &mark)
{
    while (!mark->done) {
        {
            OpenDevice open;
            if (reach(mark)) return;
        }
        pause();
    }
}

/* With EMU_STREAMS=random, after each submission: half of the streams by a few items, unless they sleep, now and then
 * while many things are submitted. */
static void run_by_chance()
{
    static uint64_t state = getenv("EMU_SEED") ? strtoull(getenv("EMU_SEED"), nullptr, 10) : 1;
    const auto draw = [](unsigned n) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<unsigned>(state >> 33) % n;
    };
    std::vector<CUstream_st *> all(streams.begin(), streams.end());
    std::sort(all.begin(), all.end(), [](const CUstream_st *a, const CUstream_st *b) { return a->number < b->number; });
    OpenDevice open;
    for (CUstream_st *s : all) {
        if (s->asleep) s->asleep--;
        else if (!draw(24)) s->asleep = draw(256);
        else
            for (unsigned n = draw(2) ? 0 : 1 + draw(8); n && step(s); n--) {}
    }
}

/* A copy of the set: it may change while a stream waits. */
static void drain_those(bool (*wanted)(const CUstream_st *))
{
    const std::set<CUstream_st *> now = streams;
    drain(&legacy);
    for (CUstream_st *s : now)
        if (streams.count(s) && wanted(s)) drain(s);
}

void drain_blocking()
{
    drain_those([](const CUstream_st *s) { return s->blocking; });
}

void drain_all()
{
    drain_those([](const CUstream_st *) { return true; });
}

/* Where streams wait for other processes, time passes by itself: those must not wait for what this host calls next. */
static void pass_time()
{
    for (;;) {
        const timespec nap = { 0, 200 * 1000 };
        nanosleep(&nap, nullptr);
        std::lock_guard<std::recursive_mutex> lock(runtime_mutex());
        const std::set<CUstream_st *> now = streams;
        for (CUstream_st *s : now)
            while (s->polls && step(s)) {}
    }
}

static void push(CUstream_st *s, Item item)
{
    if (s == &legacy) drain_blocking();
    static uint64_t submitted;
    const bool late = !s->queue.empty();
    item.number = submitted++;
    s->queue.push_back(std::move(item));
    if (s == &legacy || s->queue.size() > QUEUE_LIMIT) drain(s);
    else if (now_mode()) run_at_once(s, late ? 0 : PATIENCE_MS);
    else if (mode_is("random")) run_by_chance();
}

cudaError_t unless_capturing(const char *call)
{
    bool any = false;
    for (CUstream_st *s : streams)
        if (s->capture && (s->capture->mode == cudaStreamCaptureModeGlobal ||
                           (s->capture->mode == cudaStreamCaptureModeThreadLocal &&
                            s->capture->owner == std::this_thread::get_id())))
            any = s->capture->invalid = true;
    return any ? refuse(cudaErrorStreamCaptureUnsupported, "%s while a stream is captured", call) : cudaSuccess;
}

cudaError_t submit(cudaStream_t stream, const std::string &name, std::function<void()> work)
{
    std::lock_guard<std::recursive_mutex> lock(runtime_mutex());
    CUstream_st *s = stream_of(stream, name.c_str());
    if (!s) return cudaErrorInvalidResourceHandle;
    if (s == &legacy)
        for (CUstream_st *other : streams)
            if (other->capture && other->blocking) {
                other->capture->invalid = true;
                return refuse(cudaErrorStreamCaptureImplicit, "%s in the NULL stream while a stream is captured",
                              name.c_str());
            }
    if (s->capture) {
        s->capture->nodes.push_back({ name, std::move(work) });
        s->captured++;
        s->unjoined = s != s->capture->origin;
        return cudaSuccess;
    }
    push(s, { name, std::move(work), nullptr, nullptr, nullptr, 0 });
    return cudaSuccess;
}

cudaError_t submit_until(cudaStream_t stream, const std::string &name, std::function<bool()> poll)
{
    std::lock_guard<std::recursive_mutex> lock(runtime_mutex());
    CUstream_st *s = stream_of(stream, name.c_str());
    if (!s) return cudaErrorInvalidResourceHandle;
    if (s->capture) return unless_capturing(name.c_str());
    static const bool passing = (std::thread(pass_time).detach(), true);
    (void)passing;
    s->polls++;
    push(s, { name, nullptr, std::move(poll), nullptr, nullptr, 0 });
    return cudaSuccess;
}

bool waits_for_others()
{
    for (const CUstream_st *s : streams)
        if (s->polls) return true;
    return false;
}

} // namespace emu

using namespace emu;
typedef std::lock_guard<std::recursive_mutex> Lock;

/* ---- streams ---- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags)
{
    Lock lock(runtime_mutex());
    if (!device_count()) return set_error(cudaErrorNoDevice);
    if (flags > cudaStreamNonBlocking)
        return refuse(cudaErrorInvalidValue, "cudaStreamCreateWithFlags: flags %u", flags);
    *out = new CUstream_st;
    (*out)->blocking = !(flags & cudaStreamNonBlocking);
    static uint64_t created;
    (*out)->number = ++created;
    streams.insert(*out);
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *out) { return cudaStreamCreateWithFlags(out, 0); }

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int)
{
    return cudaStreamCreateWithFlags(out, flags);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle)
{
    Lock lock(runtime_mutex());
    CUstream_st *s = handle ? stream_of(handle, "cudaStreamDestroy") : nullptr;
    if (!s) return set_error(cudaErrorInvalidResourceHandle);
    drain(s);
    streams.erase(s);
    delete s;
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle)
{
    Lock lock(runtime_mutex());
    CUstream_st *s = stream_of(handle, "cudaStreamSynchronize");
    if (!s) return cudaErrorInvalidResourceHandle;
    if (s->capture) return unless_capturing("cudaStreamSynchronize");
    if (s == &legacy) drain_blocking();
    drain(s);
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle)
{
    Lock lock(runtime_mutex());
    CUstream_st *s = stream_of(handle, "cudaStreamQuery");
    if (!s) return cudaErrorInvalidResourceHandle;
    if (s->capture) return unless_capturing("cudaStreamQuery");
    step(s); /* time passes */
    return s->queue.empty() ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaDeviceSynchronize(void)
{
    Lock lock(runtime_mutex());
    if (!device_count()) return set_error(cudaErrorNoDevice);
    if (unless_capturing("cudaDeviceSynchronize")) return cudaErrorStreamCaptureUnsupported;
    drain_all();
    return cudaSuccess;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data)
{
    return submit(stream, "", [function, data] { function(data); });
}

/* ---- events ---- */

static CUevent_st *event_of(cudaEvent_t e, const char *call)
{
    if (events.count(e)) return e;
    refuse(cudaErrorInvalidResourceHandle, "%s: %p is not an event", call, static_cast<void *>(e));
    return nullptr;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
    Lock lock(runtime_mutex());
    if (!device_count()) return set_error(cudaErrorNoDevice);
    *out = new CUevent_st;
    (*out)->timing = !(flags & cudaEventDisableTiming);
    events.insert(*out);
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    Lock lock(runtime_mutex());
    if (!event_of(e, "cudaEventDestroy")) return cudaErrorInvalidResourceHandle;
    events.erase(e);
    delete e;
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    Lock lock(runtime_mutex());
    CUevent_st *e = event_of(event, "cudaEventRecord");
    CUstream_st *s = stream_of(stream, "cudaEventRecord");
    if (!e || !s) return cudaErrorInvalidResourceHandle;
    e->mark = nullptr;
    e->capture = s->capture;
    e->source = s;
    e->position = s->captured;
    if (s->capture) return cudaSuccess;
    e->mark = std::make_shared<Mark>();
    e->mark->stream = s;
    push(s, { "", nullptr, nullptr, nullptr, e->mark });
    return cudaSuccess;
}

static cudaError_t wait_captured(CUstream_st *s, CUevent_st *e)
{
    if (s->capture && s->capture != e->capture)
        return s->capture->invalid = true,
               refuse(cudaErrorStreamCaptureMerge, "cudaStreamWaitEvent: two captures meet");
    if (!s->capture) {
        s->capture = e->capture;
        s->captured = 0;
    }
    if (s != s->capture->origin) s->unjoined = true;
    if (e->source != s && streams.count(e->source) && e->source->captured == e->position) e->source->unjoined = false;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    Lock lock(runtime_mutex());
    CUevent_st *e = event_of(event, "cudaStreamWaitEvent");
    CUstream_st *s = stream_of(stream, "cudaStreamWaitEvent");
    if (!e || !s) return cudaErrorInvalidResourceHandle;
    if (e->capture) return wait_captured(s, e);
    if (s->capture) {
        s->capture->invalid = true;
        return refuse(cudaErrorStreamCaptureIsolation,
                      "cudaStreamWaitEvent: a captured stream waits for an event outside");
    }
    if (e->mark) push(s, { "", nullptr, nullptr, e->mark, nullptr });
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    Lock lock(runtime_mutex());
    CUevent_st *e = event_of(event, "cudaEventSynchronize");
    if (!e) return cudaErrorInvalidResourceHandle;
    if (e->capture) return refuse(cudaErrorCapturedEvent, "cudaEventSynchronize");
    if (e->mark) drain_until(e->mark);
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    Lock lock(runtime_mutex());
    CUevent_st *e = event_of(event, "cudaEventQuery");
    if (!e) return cudaErrorInvalidResourceHandle;
    if (e->capture) return refuse(cudaErrorCapturedEvent, "cudaEventQuery");
    if (e->mark && !e->mark->done) step(e->mark->stream); /* time passes */
    return !e->mark || e->mark->done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to)
{
    Lock lock(runtime_mutex());
    CUevent_st *a = event_of(from, "cudaEventElapsedTime"), *b = event_of(to, "cudaEventElapsedTime");
    if (!a || !b) return cudaErrorInvalidResourceHandle;
    if (!a->timing || !b->timing || !a->mark || !b->mark)
        return refuse(cudaErrorInvalidResourceHandle,
                      "cudaEventElapsedTime: an event without timing, or never recorded");
    if (!a->mark->done || !b->mark->done) return cudaErrorNotReady;
    *ms = static_cast<float>(b->mark->time_ms - a->mark->time_ms);
    return cudaSuccess;
}

/* ---- graphs ---- */

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode)
{
    Lock lock(runtime_mutex());
    CUstream_st *s = stream_of(stream, "cudaStreamBeginCapture");
    if (!s) return cudaErrorInvalidResourceHandle;
    if (s == &legacy) return refuse(cudaErrorStreamCaptureUnsupported, "cudaStreamBeginCapture of the NULL stream");
    if (s->capture) return refuse(cudaErrorIllegalState, "cudaStreamBeginCapture of a stream under capture");
    s->capture = std::make_shared<Capture>();
    s->capture->origin = s;
    s->capture->mode = mode;
    s->capture->owner = std::this_thread::get_id();
    s->captured = 0;
    s->unjoined = false;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out)
{
    Lock lock(runtime_mutex());
    *out = nullptr;
    CUstream_st *s = stream_of(stream, "cudaStreamEndCapture");
    if (!s) return cudaErrorInvalidResourceHandle;
    const std::shared_ptr<Capture> capture = s->capture;
    if (!capture) return refuse(cudaErrorIllegalState, "cudaStreamEndCapture of a stream that is not captured");
    if (capture->origin != s) return refuse(cudaErrorStreamCaptureUnmatched, "cudaStreamEndCapture of a joined stream");
    bool unjoined = false;
    for (CUstream_st *other : streams) {
        if (other->capture != capture) continue;
        unjoined |= other->unjoined;
        other->capture = nullptr;
        other->unjoined = false;
    }
    if (capture->invalid) return refuse(cudaErrorStreamCaptureInvalidated, "cudaStreamEndCapture");
    if (unjoined) return refuse(cudaErrorStreamCaptureUnjoined, "cudaStreamEndCapture");
    *out = new CUgraph_st{ capture->nodes };
    graphs.insert(*out);
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *out)
{
    Lock lock(runtime_mutex());
    const CUstream_st *s = stream_of(stream, "cudaStreamIsCapturing");
    if (!s) return cudaErrorInvalidResourceHandle;
    *out = !s->capture           ? cudaStreamCaptureStatusNone
           : s->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    Lock lock(runtime_mutex());
    if (!graphs.count(graph)) return refuse(cudaErrorInvalidResourceHandle, "cudaGraphGetNodes");
    if (nodes) return refuse(cudaErrorNotSupported, "cudaGraphGetNodes: only the number is known");
    *count = graph->nodes.size();
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long)
{
    Lock lock(runtime_mutex());
    if (!graphs.count(graph)) return refuse(cudaErrorInvalidResourceHandle, "cudaGraphInstantiate");
    *out = new CUgraphExec_st{ std::make_shared<const std::vector<Node>>(graph->nodes) };
    executables.insert(*out);
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags)
{
    return cudaGraphInstantiate(out, graph, flags);
}

cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph, cudaGraphExecUpdateResultInfo *result)
{
    Lock lock(runtime_mutex());
    if (!graphs.count(graph) || !executables.count(exec))
        return refuse(cudaErrorInvalidResourceHandle, "cudaGraphExecUpdate");
    bool same = graph->nodes.size() == exec->nodes->size();
    for (size_t i = 0; same && i < graph->nodes.size(); i++) same = graph->nodes[i].name == (*exec->nodes)[i].name;
    *result = {};
    result->result = same ? cudaGraphExecUpdateSuccess : cudaGraphExecUpdateErrorTopologyChanged;
    if (!same) return set_error(cudaErrorGraphExecUpdateFailure);
    exec->nodes = std::make_shared<const std::vector<Node>>(graph->nodes);
    return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t)
{
    Lock lock(runtime_mutex());
    return executables.count(exec) ? cudaSuccess : refuse(cudaErrorInvalidResourceHandle, "cudaGraphUpload");
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    Lock lock(runtime_mutex());
    if (!executables.count(exec)) return refuse(cudaErrorInvalidResourceHandle, "cudaGraphLaunch");
    const auto nodes = exec->nodes;
    return submit(stream, "", [nodes] {
        for (const Node &node : *nodes) {
            count(node.name);
            node.run();
        }
    });
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    Lock lock(runtime_mutex());
    if (!graphs.erase(graph)) return refuse(cudaErrorInvalidResourceHandle, "cudaGraphDestroy");
    delete graph;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    Lock lock(runtime_mutex());
    if (!executables.erase(exec)) return refuse(cudaErrorInvalidResourceHandle, "cudaGraphExecDestroy");
    delete exec;
    return cudaSuccess;
}
