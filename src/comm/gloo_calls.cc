/*
 * What a request over Gloo does, on its group's thread; see gloo.h and docs/comm.md. Of Gloo only the TCP transport is
 * used: "unbound buffers", whose sends and receives between two ranks meet by a 64-bit slot, in order within a slot.
 *
 *   a reduction   [compare calls] | blocks of the peers' parts of my slice arrive in scratch | sum | send to all
 *   an exchange   all messages begin at once | [compare those that arrive] | wait for all
 */
#include <algorithm>
#include <cstring>

#include "comm/gloo.hpp"

extern "C" {
#include "base/fault.h"
#include "comm/reduce.h"
}

namespace
{

enum {
    DIRECT_BYTES = 64 << 10,      /* reductions that move no more than this go from all to all at once */
    GATHER_BLOCK_BYTES = 1 << 20, /* so that a long gather does not keep other groups from the connection */
};

/* ---- messages ---- */

/*
 * 16 bits group | 24 bits number | 16 bits of what it is | 8 bits phase. The group's number is counted per pair of
 * ranks: two groups that share two ranks differ on that pair, whatever other groups exist. The number is that of
 * the collective, or of the message from one of the two ranks to the other.
 * Calls and messages that differ, or groups opened in another order, do not meet: they time out, where a message of
 * another length would end the process.
 */
uint64_t slot_of(const Group *g, int p, uint64_t number, uint64_t what, Phase phase)
{
    return g->ids[p] << 48 | (number & 0xffffff) << 24 | (what & 0xffff) << 8 | (uint64_t)phase;
}

uint64_t call_slot(const Group *g, int p, Phase phase)
{
    return slot_of(g, p, g->sequence, phase == COMPARE ? g->name_hash : g->call_hash, phase);
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
    lane.buffer->send(g->members[p], call_slot(g, p, phase), (size_t)data, (size_t)bytes);
    lane.sends++;
}

void receive(Group *g, int p, Phase phase, void *data, int64_t bytes)
{
    if (!bytes) return;
    Lane &lane = lane_to(g, p, phase);
    lane.buffer->recv(g->members[p], call_slot(g, p, phase), (size_t)data, (size_t)bytes);
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
    const CommMessage *m = g->message;
    if (m) observer_waits_message(r->observer, g->members[m->peer], m->send, m->what);
    else observer_waits(r->observer, g->members[g->peer]);
    try {
        done = wait();
        observer_waits(r->observer, OBSERVER_NOBODY);
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
        : g(group), kind(r.kind), src((const char *)r.src), dst((char *)r.dst), count(r.count), elem_bytes(r.elem_bytes)
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

    char *landing(int p, int64_t k) const /* where p's contribution to block k of my part lands */
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

/* Both ends know how long a piece is, so one without rows is no message. */
void all_to_all_rows(Group *g, const CommRequest &r)
{
    const auto in = [&](int p, int64_t c) { return comm_piece_in(&r, g->size, p, c); };
    const auto out = [&](int p, int64_t c) { return comm_piece_out(&r, g->size, p, c); };
    for (int64_t c = 0; c < r.rows.chunks; c++) {
        const CommPiece own = in(g->rank, c);
        if (own.bytes) memcpy(own.data, out(g->rank, c).data, (size_t)own.bytes);
        each_peer(g, [&](int p) { receive(g, p, GATHER, in(p, c).data, in(p, c).bytes); });
    }
    for (int64_t c = 0; c < r.rows.chunks; c++)
        each_peer(g, [&](int p) { send(g, p, GATHER, out(p, c).data, out(p, c).bytes); });
    wait_all(g, GATHER);
}

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

/* ---- exchanges ---- */

uint64_t seal_of(const CommNote &note)
{
    uint64_t label;
    static_assert(sizeof label == sizeof note.what, "a label is one word");
    memcpy(&label, &note.what, sizeof label);
    return mix_hash(mix_hash(mix_hash(1, note.number), (uint64_t)note.bytes), label);
}

/*
 * All messages are posted at once, and Gloo's thread moves each as soon as its other end is there: in what order they
 * are waited for does not matter. With `check` a note goes before each message, and the receiver compares.
 */
struct Exchange {
    Group *g;
    const CommRequest &r;
    CommNote own[COMM_MESSAGES_MAX];

    Exchange(Group *group, const CommRequest &request) : g(group), r(request) {}

    void post_note(int i, uint64_t slot)
    {
        const CommMessage &m = r.messages[i];
        if (m.send) {
            g->notes_out[i] = { own[i], seal_of(own[i]) };
            g->notes.buffer->send(g->members[m.peer], slot, (size_t)&g->notes_out[i], sizeof(Note));
            g->notes.sends++;
        } else {
            g->notes_in[i] = {};
            g->notes.buffer->recv(g->members[m.peer], slot, (size_t)&g->notes_in[i], sizeof(Note));
        }
    }

    void post(int i)
    {
        const CommMessage &m = r.messages[i];
        Lane &lane = lane_to(g, m.peer, MESSAGES);
        const uint64_t number = m.send ? g->sent[m.peer]++ : g->received[m.peer]++;
        own[i] = { number, m.bytes, m.what };
        if (r.check) post_note(i, slot_of(g, m.peer, number, g->name_hash, NOTES));
        if (!m.bytes) return;
        const uint64_t slot = slot_of(g, m.peer, number, mix_hash(g->name_hash, (uint64_t)m.bytes), MESSAGES);
        if (m.send) lane.buffer->send(g->members[m.peer], slot, (size_t)m.data, (size_t)m.bytes);
        else lane.buffer->recv(g->members[m.peer], slot, (size_t)m.data, (size_t)m.bytes);
    }

    /* Gloo's wait does not say whose note came, and another may be half there: that is what seals are for. */
    bool compare_arrived(uint64_t &compared)
    {
        bool all = true;
        for (int i = 0; i < r.message_count; i++) {
            const CommMessage &m = r.messages[i];
            if (m.send || compared >> i & 1) continue;
            const Note note = g->notes_in[i];
            if (note.seal == seal_of(note.note)) {
                const CommNote ends[2] = { note.note, own[i] };
                char text[256];
                if (!comm_same_message(g->name.c_str(), m.peer, g->rank, ends, text, sizeof text))
                    throw Failure(ERR_INTERNAL, text);
                compared |= (uint64_t)1 << i;
            } else if (all) { /* the first that is missing */
                all = false;
                g->peer = m.peer;
                g->message = &m;
            }
        }
        return all;
    }

    void compare()
    {
        uint64_t compared = 0;
        while (!compare_arrived(compared))
            wait_for(g, [&] { return g->notes.buffer->waitRecv(nullptr, g->world->timeout); });
    }

    void wait_message(const CommMessage &m)
    {
        Lane &lane = lane_to(g, m.peer, MESSAGES);
        g->message = &m;
        fault_point(comm_kind_name(COMM_EXCHANGE));
        if (m.send) wait_for(g, [&] { return lane.buffer->waitSend(nullptr, g->world->timeout); });
        else wait_for(g, [&] { return lane.buffer->waitRecv(nullptr, g->world->timeout); });
    }

    void run()
    {
        for (int i = 0; i < r.message_count; i++) post(i);
        if (r.check) compare();
        for (int sends = 0; sends < 2; sends++)
            for (int i = 0; i < r.message_count; i++)
                if (r.messages[i].bytes && r.messages[i].send == (bool)sends) wait_message(r.messages[i]);
        for (; g->notes.sends; g->notes.sends--)
            wait_for(g, [&] { return g->notes.buffer->waitSend(nullptr, g->world->timeout); });
    }
};

} // namespace

void perform(Group *g, const CommRequest &r)
{
    g->sequence = r.sequence;
    g->request = &r;
    g->message = nullptr;
    if (r.kind == COMM_EXCHANGE) return Exchange(g, r).run();
    g->call_hash =
        mix_hash(mix_hash(mix_hash(g->name_hash, (uint64_t)r.kind), (uint64_t)r.count), (uint64_t)r.elem_bytes);
    if (r.check) compare_calls(g, r);
    char *scratch = g->scratch.get();
    switch (r.kind) {
    case COMM_ALL_GATHER: gather(g, GATHER, (char *)r.dst, (const char *)r.src, r.count * r.elem_bytes); break;
    case COMM_BARRIER: gather(g, GATHER, scratch, scratch + g->rank, 1); break;
    case COMM_ALL_TO_ALL_ROWS: all_to_all_rows(g, r); break;
    default: Reduction(g, r).run(); break;
    }
}
