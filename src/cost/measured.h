/*
 * How long an op or a collective takes where a device's file says what was measured (config/device_points.h): between
 * the points nearest to its shape. The shape of a point:
 *
 *   products             rows, outputs, inputs: the letters N, O, I of ops.def
 *   grouped products     rows of an expert on the average, outputs, inputs
 *   attention            queries, keys, width of a head
 *   others               bytes of the tensors that go through memory: those that are changed in place twice
 *   collectives          bytes that a member sends
 *
 * An epilogue, such as a product's GELU, costs what the op does that makes it alone.
 */
#ifndef MEGATRAIN_COST_MEASURED_H
#define MEGATRAIN_COST_MEASURED_H

#include "config/device_points.h"
#include "comm/comm.h"
#include "device/ops.h"

/* Work of an op: so many times the work of a point of this shape, which is one expert's product, or causal attention of
 * one head of one sample. */
typedef struct {
    int dims;
    double shape[POINT_SHAPE_MOST];
    double times;
    bool fixed; /* linear_dw's dw is of fixed point (run.reproducible = layout) */
} OpWork;

OpWork op_work(OpId id, const void *args);

/* Share of a tensor that is in use, by its `expected`; 1: all. */
double expected_share(Tensor t);

/* Columns that experts' sums over codes pass: those begin with whole blocks, so that each run leaves half of one
 * unfilled on the average. */
int64_t codes_in_use(const fp8_grouped_add_args *a);

/* Heads, or experts, of a call by which a point was measured. */
enum { MEASURED_AT_ONCE = 4 };

/* Pairs of a query and a key that it sees, of so many queries at the end of so many keys. */
double causal_pairs(double queries, double keys);

/* The dtype by which an op's points are named: that of its tensors of the compute dtype, fp32 where it has none. */
const char *op_dtype(OpId id, const void *args);

/* The op among `ranks` ranks of this machine that compute at once, with so many threads. false: nothing of it was
 * measured. */
bool measured_op(const DevicePoints *all, OpId id, const void *args, int ranks, int threads, double *seconds);

/* A collective of so many members, each of which sends so many bytes. false: nothing of its kind was measured. */
bool measured_comm(const DevicePoints *all, CommKind kind, int members, int64_t bytes, double *seconds);

/*
 * The section [comm.skew]: microseconds that a small call adds to so many microseconds (the size of a point) of work
 * before it. Its members are not equally fast, and the threads that carry a call may find their processor at work for
 * another rank, while that rank's own is idle. The section [comm.skew-of-pairs]: the same, where ranks make calls two
 * and two; what such a pair waits, the other one may compute in.
 */
#define SKEW_NAME "skew"
#define SKEW_PAIRS_NAME "skew-of-pairs"

/* Seconds that a call of so many members takes longer behind so many seconds of work, on a host with so many ranks and
 * processors, than in its own time, which was measured behind the shortest work of these points. 0: nothing of the kind
 * was measured. */
double measured_skew(const DevicePoints *all, int members, int ranks, int processors, double work);

#endif
