/*
 * How long an op or a call of a communicator takes on a device that may be absent: a device's file
 * (config/config_device.h) and, on the processors of a host, which ranks share it. time_line.h puts such times behind
 * and beside each other; docs/prediction.md says where the figures are from.
 *
 *   GPUs    facts of the data sheet times shares that kernels reach (op_cost.c, comm_cost.c)
 *   CPUs    what was measured (measured.h)
 */
#ifndef MEGATRAIN_COST_COST_H
#define MEGATRAIN_COST_COST_H

#include "comm/grid.h"
#include "config/config_device.h"
#include "device/ops.h"

typedef struct {
    const DeviceFile *device;
    bool cpu;           /* the device is a host's processors */
    int ranks, threads; /* cpu: ranks that compute there at once, threads of each */
} CostModel;

/* ERR_CONFIG: the file does not say what times need, with what is missing; or it has points of what there is not. The
 * file must outlive the model. */
Err cost_open(CostModel *m, const DeviceFile *device, int ranks);

typedef enum {
    FAMILY_PRODUCTS,
    FAMILY_EXPERTS,
    FAMILY_ATTENTION,
    FAMILY_MEMORY,
    FAMILY_OPTIMIZER,
    FAMILIES
} OpFamily;

const char *family_name(OpFamily f); /* "products", ... */
OpFamily family_of(OpId id);

/* One call of an op: seconds on the device with nothing beside it, gaps between its kernels included; of the host, to
 * issue it (0 where ops run at once). flop: what the device counted. */
typedef struct {
    double seconds, host;
    int launches;
} OpCost;

OpCost cost_op(const CostModel *m, OpId id, const void *args, double flop);

/* Results of `rows` x `columns`, sums of `depth`; `count` such. */
typedef struct {
    double rows, columns, depth, count;
} Product;

/* What so many multiprocessors do meanwhile at their full rate: FLOP of the best of a library's tiles, each of which
 * takes as much longer as `tile_depth` is of its sum. apart: each product is a launch, partly beside others. */
double product_flop(Product p, double multiprocessors, double tile_depth, bool apart);

/* Where the members of a group are: on how many hosts, and how many of them on the host that has fewest, for which all
 * others wait. */
typedef struct {
    int size, hosts, here;
} CommPlace;

CommPlace cost_place(const CostModel *m, GridShape s, GroupKind kind, int rank);

bool cost_same_host(const CostModel *m, GridShape s, int a, int b); /* are two ranks on one? */

/* Bytes a second: of a device's links to others of its host, and of its port to other hosts. */
typedef struct {
    double link, network;
} CommRates;

/* Bytes a second of a ring through all members: each link carries what a rank sends. */
double ring_rate(CommRates r, CommPlace p);
/* Seconds of what a rank sends to other hosts, by its port, beside what stays, by links. */
double spread_time(CommRates r, double far_bytes, double near_bytes);

/* One collective that sends so many bytes from each member, beside nothing. */
double cost_call(const CostModel *m, CommKind kind, CommPlace place, int64_t bytes);
/* One exchange, by the messages of a member. */
double cost_exchange(const CostModel *m, CommPlace place, const CommMessage *messages, int count);
/* One message between two ranks. */
double cost_message(const CostModel *m, bool same_host, int64_t bytes);

/* A copy of so many bytes between a device and its host's memory, beside nothing. On processors it is one from memory
 * to memory, of all ranks at once. */
double cost_copy(const CostModel *m, int64_t bytes);

/* How much longer a call takes because its members have worked for so long since they met: one is late, and the threads
 * that carry the call wait for processors. */
double cost_skew(const CostModel *m, int members, double work);

/* How far ops come in a second in which a call is under way: less than a second's work. */
double cost_pace_beside(const CostModel *m);

#endif
