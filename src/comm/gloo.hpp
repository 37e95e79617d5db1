/*
 * What the two files of Gloo's communicators share (inside comm/ only): gloo.cc has connections, groups and their
 * threads, gloo_calls.cc what a request does on its group's thread.
 */
#ifndef MEGATRAIN_COMM_GLOO_HPP
#define MEGATRAIN_COMM_GLOO_HPP

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/unbound_buffer.h>

extern "C" {
#include "comm/gloo.h"
}

using Milliseconds = std::chrono::milliseconds;
using gloo::transport::UnboundBuffer;

enum Phase { COMPARE, REDUCE, GATHER, MESSAGES, PHASES, NOTES };
enum { QUEUE_SIZE = 64, GROUPS_PER_PAIR = 1 << 16 };

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
    int sends = 0, receives = 0; /* how many were posted and not waited for */
};

struct Group;

struct GlooWorld {
    int delay_ms = 0;
    int rank, size;
    Milliseconds timeout;
    std::shared_ptr<gloo::transport::Device> device;
    std::shared_ptr<gloo::transport::Context> context;
    std::vector<int> groups_with; /* how many groups were opened that contain this and that rank */

    std::mutex lock; /* guards what follows */
    std::vector<Group *> groups;
    std::string why;
    std::atomic<bool> stopped{ false };
};

/* What a sender says of its message, for comparing. The seal tells that all of it has arrived. */
struct Note {
    CommNote note;
    uint64_t seal;
};

struct Group {
    GlooWorld *world;
    std::string name;
    int rank, size;
    std::vector<int> members;  /* their world ranks */
    std::vector<uint64_t> ids; /* for each member this group's number */
    std::vector<Lane> lanes[PHASES];
    Lane notes; /* has all peers: a mismatch is to be seen even if another peer's message never comes */
    std::unique_ptr<char[]> scratch;
    std::vector<const void *> inputs;
    std::vector<CommCall> calls;
    std::vector<uint64_t> sent, received; /* for each member how many messages of exchanges so far */
    Note notes_out[COMM_MESSAGES_MAX], notes_in[COMM_MESSAGES_MAX];
    uint64_t name_hash = 0, call_hash = 0, sequence = 0; /* they describe the collective that runs */
    const CommRequest *request = nullptr;                /* the request that runs */
    int peer = 0;                                        /* the peer that the worker deals with, for error messages */
    const CommMessage *message = nullptr;                /* the message of an exchange that it waits for; else NULL */

    std::mutex lock; /* guards what follows */
    std::condition_variable changed;
    CommRequest queue[QUEUE_SIZE];
    int64_t head = 0, tail = 0;
    bool closing = false;
    std::thread worker;
};

/* Ends all groups: wakes those who wait, then closes the connections, after which nothing is written to or read
 * from any request's memory. Returns when that is so. */
void stop_world(GlooWorld *w, const std::string &why) noexcept;

inline uint64_t mix_hash(uint64_t hash, uint64_t x)
{
    hash = (hash ^ x) * 0x9e3779b97f4a7c15u;
    return hash ^ hash >> 29;
}

/* Runs a request on its group's thread; throws Stopped, Failure, or what Gloo throws. */
void perform(Group *g, const CommRequest &r);

#endif
