/*
 * Calls between ranks: what each takes besides its bytes, and its bytes over the slowest link that they pass. See
 * cost.h. Members of a group on one host share it with `here` network ports, one a device.
 *
 *   gathers, scatters, sums   a ring through all members: each link carries what a rank sends
 *   rows, exchanges           of what a rank sends, or gets where that is more, what is from or for other hosts passes
 *                             its port; in a ring of exchanges that is all of it, for some rank at least
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cost/cost.h"
#include "cost/measured.h"

/* ---- the model ---- */

typedef struct {
    const char *key;
    double value;
} Needed;

static Err lacking(const DeviceFile *d, const Needed *needed, int count)
{
    for (int i = 0; i < count; i++)
        if (!(needed[i].value > 0))
            return err_set(ERR_CONFIG, "device %s: times need %s", d->name, needed[i].key),
                   err_hint("give it in the device's file, as config/devices/h100.ini does; of this machine's "
                            "processors: megatrain doctor --calibrate FILE");
    return ERR_OK;
}

static int comm_dims(const char *name)
{
    for (int i = 0; i < COMM_KIND_COUNT; i++)
        if (!strcmp(name, comm_kind_name((CommKind)i))) return 1;
    return !strcmp(name, SKEW_NAME) || !strcmp(name, SKEW_PAIRS_NAME);
}

static int op_dims(const char *name)
{
    for (int i = 0; i < OP_COUNT; i++) {
        if (!strcmp(name, op_info((OpId)i)->name)) return family_of((OpId)i) < FAMILY_SCAN ? 3 : 1;
    }
    return 0;
}

/* Checks points: each is of something that exists, with as many sizes as that has. */
static Err check_points(const DeviceFile *d)
{
    for (int i = 0; i < d->points.count; i++) {
        const DevicePoint *p = &d->points.items[i];
        const bool op = *p->dtype != 0;
        const int dims = op ? op_dims(p->name) : comm_dims(p->name);
        if (!dims)
            return err_set(ERR_CONFIG, "device %s: [%s.%s] is none of megatrain's %s", d->name, op ? "op" : "comm",
                           p->name, op ? "ops" : "collectives"),
                   err_hint("measure it again: megatrain doctor --calibrate FILE");
        if (p->dims != dims)
            return err_set(ERR_CONFIG, "device %s: a shape of [%s.%s] has %d number%s, not %d", d->name,
                           op ? "op" : "comm", p->name, dims, dims == 1 ? "" : "s", p->dims),
                   err_hint("measure it again: megatrain doctor --calibrate FILE");
    }
    return ERR_OK;
}

Err cost_open(CostModel *m, const DeviceFile *d, int ranks)
{
    TRY(check_points(d));
    *m = (CostModel){ .device = d, .cpu = !(d->multiprocessors > 0), .ranks = 1, .threads = 1 };
    if (!m->cpu) {
        const Needed gpu[] = {
            { "memory_gb_s", d->memory_gb_s },   { "bf16_tflops", d->bf16_tflops },
            { "fp32_tflops", d->fp32_tflops },   { "attention_fwd_tflops", d->attention_fwd_tflops },
            { "host_devices", d->host_devices }, { "attention_bwd_tflops", d->attention_bwd_tflops },
            { "link_gb_s", d->link_gb_s },       { "network_gb_s", d->network_gb_s },
        };
        return lacking(d, gpu, sizeof gpu / sizeof *gpu);
    }
    const Needed cpu[] = { { "memory_gb_s", d->memory_gb_s },
                           { "fp32_tflops", d->fp32_tflops },
                           { "processors", d->processors },
                           { "link_gb_s", d->link_gb_s } };
    const int processors = (int)d->processors;
    m->ranks = ranks < 1 ? 1 : ranks;
    m->threads = processors / m->ranks > 1 ? processors / m->ranks : 1;
    return lacking(d, cpu, sizeof cpu / sizeof *cpu);
}

/* ---- places ---- */

/* Ranks in a row share a host. */
static int host_ranks(const CostModel *m, GridShape s) { return m->cpu ? s.world : (int)m->device->host_devices; }

bool cost_same_host(const CostModel *m, GridShape s, int a, int b)
{
    return a / host_ranks(m, s) == b / host_ranks(m, s);
}

CommPlace cost_place(const CostModel *m, GridShape s, GroupKind kind, int rank)
{
    CommPlace p = { .size = group_size(s, kind), .hosts = 1, .here = 1 };
    const int group = group_of(s, kind, rank), devices = host_ranks(m, s);
    p.here = p.size;
    if (p.size < 2 || group < 0 || s.world <= devices) return p;
    if (p.size == s.world)
        return (CommPlace){ .size = p.size,
                            .hosts = (p.size + devices - 1) / devices,
                            .here = p.size % devices ? p.size % devices : devices };
    int *members = malloc((size_t)p.size * sizeof *members), here = 0;
    ASSERT(members);
    group_members(s, kind, group, members);
    p.hosts = 0;
    for (int i = 0; i < p.size; i++) {
        const bool last = i + 1 == p.size || !cost_same_host(m, s, members[i], members[i + 1]);
        here++;
        if (!last) continue;
        p.hosts++;
        if (here < p.here) p.here = here;
        here = 0;
    }
    free(members);
    return p;
}

/* ---- calls ---- */

static CommRates rates_of(const CostModel *m)
{
    const double share = 1e9 * m->device->link_share;
    return (CommRates){ share * m->device->link_gb_s, share * m->device->network_gb_s };
}

double ring_rate(CommRates r, CommPlace p) { return p.hosts > 1 ? fmin(r.link, p.here * r.network) : r.link; }

double spread_time(CommRates r, double far_bytes, double near_bytes)
{
    return fmax(far_bytes > 0 ? far_bytes / r.network : 0, near_bytes / r.link);
}

/* Until the last member has something: a hop of a ring through hosts takes about 4 us (NCCL's own tables). */
static double begin_seconds(const CostModel *m, CommPlace p)
{
    static const double HOP_US = 4;
    return 1e-6 * (p.hosts > 1 ? m->device->network_us + HOP_US * (p.hosts - 1) : m->device->link_us);
}

static double ring_seconds(const CostModel *m, CommPlace p, double bytes)
{
    return begin_seconds(m, p) + bytes / ring_rate(rates_of(m), p);
}

/* To so many of the others: what goes to other hosts by the port, beside what stays. The member with the fewest on its
 * own host has the most to send away. */
static double spread_seconds(const CostModel *m, CommPlace p, int peers, double bytes)
{
    static const double PEER_US = 1; /* to begin a message to one member more */
    const double far = fmin(1, (double)(p.size - p.here) / peers);
    const double begin = (p.hosts > 1 ? m->device->network_us : m->device->link_us) + PEER_US * peers;
    return 1e-6 * begin + spread_time(rates_of(m), far * bytes, (1 - far) * bytes);
}

static bool measured_call(const CostModel *m, CommKind kind, CommPlace p, int64_t bytes, double *seconds)
{
    return m->cpu && measured_comm(&m->device->points, kind, p.size, bytes, seconds);
}

double cost_call(const CostModel *m, CommKind kind, CommPlace p, int64_t bytes)
{
    double measured;
    if (p.size < 2) return 0;
    if (measured_call(m, kind, p, bytes, &measured)) return measured;
    if (kind == COMM_ALL_TO_ALL_ROWS) return spread_seconds(m, p, p.size - 1, (double)bytes);
    return ring_seconds(m, p, (double)bytes);
}

static double exchange_seconds(const CostModel *m, CommPlace p, int peers, int64_t bytes)
{
    double measured;
    if (measured_call(m, COMM_EXCHANGE, p, bytes, &measured)) return measured;
    return spread_seconds(m, p, peers, (double)bytes);
}

/* Whether no message before the i-th goes the same way. */
static bool is_first(const CommMessage *messages, int i)
{
    for (int j = 0; j < i; j++)
        if (messages[j].peer == messages[i].peer && messages[j].send == messages[i].send) return false;
    return true;
}

double cost_exchange(const CostModel *m, CommPlace p, const CommMessage *messages, int count)
{
    int64_t bytes[2] = { 0 };
    int peers[2] = { 0 };
    for (int i = 0; i < count; i++) {
        bytes[messages[i].send] += messages[i].bytes;
        peers[messages[i].send] += is_first(messages, i);
    }
    const bool send = bytes[true] >= bytes[false];
    return p.size < 2 || !count ? 0 : exchange_seconds(m, p, peers[send], bytes[send]);
}

/* (ranks that take turns on processors find theirs taken, as members of a group of all of them do) */
double cost_message(const CostModel *m, bool same_host, int64_t bytes)
{
    const bool turns = m->cpu && m->ranks > 2 && m->ranks > (int)m->device->processors;
    double measured;
    if (turns && measured_comm(&m->device->points, COMM_EXCHANGE, m->ranks, bytes, &measured)) return measured;
    const CommPlace two = { .size = 2, .hosts = same_host ? 1 : 2, .here = same_host ? 2 : 1 };
    return exchange_seconds(m, two, 1, bytes);
}

double cost_copy(const CostModel *m, int64_t bytes)
{
    const DeviceFile *d = m->device;
    if (m->cpu) return 2. * m->ranks * (double)bytes / (1e9 * d->memory_gb_s);
    return (double)bytes / device_host_rate(d);
}

double cost_skew(const CostModel *m, int members, double work)
{
    if (!m->cpu) return 0;
    return measured_skew(&m->device->points, members, m->ranks, (int)m->device->processors, work);
}

double cost_pace_beside(const CostModel *m) { return 1 - m->device->overlap_cost; }
