/*
 * The time of an op, or of a communicator's call, on a device that may be absent. It follows from the device's file
 * (config/config_device.h) and, on the processors of a host, from the ranks that share these. time_line.h puts such
 * times behind and beside each other; docs/prediction.md says where the figures are from.
 *
 *   GPUs    facts of the data sheet times shares that kernels reach (op_cost.c, comm_cost.c)
 *   CPUs    measured times (measured.h)
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

/* ERR_CONFIG: the file lacks a number that times need, which the error names; or it has points of an op or call that
 * does not exist. The file must outlive the model. */
Err cost_open(CostModel *m, const DeviceFile *device, int ranks);

typedef enum {
    FAMILY_PRODUCTS,
    FAMILY_EXPERTS,
    FAMILY_ATTENTION,
    FAMILY_SCAN,
    FAMILY_MEMORY,
    FAMILY_OPTIMIZER,
    FAMILIES
} OpFamily;

const char *family_name(OpFamily f); /* "products", ... */
OpFamily family_of(OpId id);

/* Cost of one call of an op. seconds: on the device with nothing beside it, gaps between its kernels included. host:
 * seconds of the host to issue it, 0 where ops run at once. flop: the count of the device. */
typedef struct {
    double seconds, host;
    int launches;
} OpCost;

OpCost cost_op(const CostModel *m, OpId id, const void *args, double flop);

/* `count` products with results of `rows` x `columns`, which are sums of `depth` terms. */
typedef struct {
    double rows, columns, depth, count;
} Product;

/* FLOP that so many multiprocessors would do at their full rate in the time of the product, with the best of a
 * library's tiles. A tile takes longer by the ratio of `tile_depth` to its depth. apart: each product is a launch,
 * partly beside others. */
double product_flop(Product p, double multiprocessors, double tile_depth, bool apart);

/* Placement of the members of a group: number of hosts, and members on the host that has fewest, for which all others
 * wait. */
typedef struct {
    int size, hosts, here;
} CommPlace;

CommPlace cost_place(const CostModel *m, GridShape s, GroupKind kind, int rank);

bool cost_same_host(const CostModel *m, GridShape s, int a, int b); /* are two ranks on one? */

/* Bytes a second of a device's links to others of its host, and of its port to other hosts. */
typedef struct {
    double link, network;
} CommRates;

/* Bytes a second of a ring through all members: each link carries all that a rank sends. */
double ring_rate(CommRates r, CommPlace p);
/* Seconds of a rank's messages: those to other hosts go by its port, beside those to its own host, which go by
 * links. */
double spread_time(CommRates r, double far_bytes, double near_bytes);

/* One collective that sends so many bytes from each member, beside nothing. */
double cost_call(const CostModel *m, CommKind kind, CommPlace place, int64_t bytes);
/* One exchange, by the messages of a member. */
double cost_exchange(const CostModel *m, CommPlace place, const CommMessage *messages, int count);
/* One message between two ranks. */
double cost_message(const CostModel *m, bool same_host, int64_t bytes);

/* A copy of so many bytes between a device and its host's memory, with nothing beside it. On processors the copy is
 * from memory to memory, and all ranks make it at once. */
double cost_copy(const CostModel *m, int64_t bytes);

/* Seconds that a call takes longer because its members have worked for `work` seconds since they met: one is late, and
 * the threads that carry the call wait for processors. */
double cost_skew(const CostModel *m, int members, double work);

/* Seconds of work that ops get done in a second beside a call: less than one. */
double cost_pace_beside(const CostModel *m);

#endif
