/*
 * Streams, events and graphs as the emulator keeps them (stream.cpp); the handles of the CUDA runtime point to
 * these. Included by the two files that implement the runtime's functions.
 */
#ifndef MEGATRAIN_EMU_STREAM_H
#define MEGATRAIN_EMU_STREAM_H

#include "runtime.h"

#include <deque>
#include <thread>

namespace emu
{

/* A point in a stream: passed once `done`. */
struct Mark {
    CUstream_st *stream;
    bool done = false;
    double time_ms = 0;
};

/* Work, or work that waits for other processes, or a wait, or a mark. */
struct Item {
    std::string name;
    std::function<void()> run;
    std::function<bool()> poll; /* called until it says that all is done */
    std::shared_ptr<Mark> wait, mark;
    uint64_t number = 0; /* in the order of submission to all streams */
};

struct Node {
    std::string name;
    std::function<void()> run;
};

/* Streams that are being recorded into one graph. */
struct Capture {
    std::vector<Node> nodes;
    CUstream_st *origin;
    cudaStreamCaptureMode mode;
    std::thread::id owner; /* with cudaStreamCaptureModeThreadLocal calls of other threads do not spoil it */
    bool invalid = false;
};

} // namespace emu

struct CUstream_st {
    bool blocking = true; /* ordered with the NULL stream */
    uint64_t number = 0;  /* in the order of creation */
    unsigned asleep = 0;  /* submissions for which it does not come on (EMU_STREAMS=random) */
    std::deque<emu::Item> queue;
    int polls = 0; /* items in it that wait for other processes */
    std::shared_ptr<emu::Capture> capture;
    uint64_t captured = 0; /* nodes of this capture so far */
    bool unjoined = false; /* captured work that the origin does not wait for yet */
};

struct CUevent_st {
    bool timing = true;
    std::shared_ptr<emu::Mark> mark;       /* of the last record */
    std::shared_ptr<emu::Capture> capture; /* recorded in a stream under capture: */
    CUstream_st *source = nullptr;
    uint64_t position = 0;
};

struct CUgraph_st {
    std::vector<emu::Node> nodes;
};

struct CUgraphExec_st {
    std::shared_ptr<const std::vector<emu::Node>> nodes;
};

namespace emu
{

/* The stream of a handle (0: the legacy stream), or NULL after refuse(). */
CUstream_st *stream_of(cudaStream_t handle, const char *call);
void drain(CUstream_st *s); /* runs what is queued */
void drain_until(const std::shared_ptr<Mark> &mark);
bool step(CUstream_st *s); /* runs one item; false: nothing is queued, or it waits for another process */
void drain_blocking();     /* as the legacy stream does */
void drain_all();
/* What may not be called while a stream is captured: refuses, spoils the captures, and returns the error. */
cudaError_t unless_capturing(const char *call);
bool now_mode();

} // namespace emu

#endif
