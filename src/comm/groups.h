/*
 * Who is in a group with whom: the arithmetic of the process grid, and nothing but arithmetic.
 *
 * The same ranks form two grids. Dense layers see tp x cp x dp x pp, experts etp x ep x edp x pp; in every pipeline
 * stage tp * cp * dp = etp * ep * edp, so that the experts fold the plane of the dense axes anew. With more ranks along
 * tp than kv heads, each kv neighbours of them share a head. Axes are listed from the one that varies fastest from rank
 * to rank:
 *
 *   ORDER_DP_PP   tp cp ep dp pp   (parallel.order tp-cp-ep-dp-pp): the ranks of a stage are neighbours
 *   ORDER_PP_DP   tp cp ep pp dp   a replica of the model is a run of neighbours
 *
 * A group holds the ranks that differ only in the axes of the group, the fastest axis first; groups are numbered by
 * the other axes, the fastest first. Source: Megatron-LM's rank generator.
 *
 *   tp        ranks that share a layer's weights
 *   sp        the same ranks if rows are sharded between them (sequence parallelism), else this rank alone: layers
 *             call collectives on it always, and a group of one is a no-op
 *   kv        those of tp that share one kv head, neighbours
 *   dp        ranks with the same shard and other samples
 *   cp        ranks that share each sequence: the keys and values of attention
 *   cp-heads, cp-ring
 *             the neighbours in cp that exchange positions for heads, and those that then have the same heads
 *   dp-cp     ranks with the same shard, other samples or other parts of them: gradients of dense parameters, ZeRO-1
 *   zero, zero-far
 *             with groups of ZeRO: the neighbours in dp-cp that weights and gradients are cut over, and those that then
 *             have the same shards of them; expert-zero, expert-zero-far: the same of expert-dp, for the experts that
 *             the same ranks have
 *   pp        the stages of one model: activations and their gradients
 *   embd      the first and last stage, or whichever read the embedding's table: its gradient; pos-embd: the first
 *   stage-low, stage-high
 *             with two replicas of each stage (bidirectional schedules) pp ranks r and pp-1-r both hold the stages
 *             r and pp-1-r: these two along pp, times dp and cp, reduce the gradients of the lower and higher stage.
 *             One group of ranks, two communicators, so that the order of calls on each is that of one stage. With
 *             groups of ZeRO, which are in one pp rank, those of these ranks that have the same shards
 *   owners    all ranks that have a part of a stage's weights: whole matrices are dealt to them (optim/muon.h)
 *   tp-pp     a whole model: norm of the gradient
 *   world     all ranks; host: the same, for numbers in host memory, whatever the device
 *   ep        ranks that hold the experts of a layer together and send each other rows
 *   ep-host, ep-rail
 *             those of ep x etp (tp-ep) on one host, and those with one place on all their hosts: rows on their way
 *             through the network
 *   expert-dp gradients of experts: ranks with the same ones; expert-low, expert-high: as stage-low and stage-high;
 *             tp-ep-pp: a whole model's experts
 */
#ifndef MEGATRAIN_COMM_GROUPS_H
#define MEGATRAIN_COMM_GROUPS_H

#include <stdbool.h>
#include <stdint.h>

typedef enum { ORDER_DP_PP, ORDER_PP_DP } GridOrder;

typedef struct {
    int world, tp, cp, pp, ep, etp;
    GridOrder order;
    int kv;         /* divides tp; 0 = 1 */
    int cp_heads;   /* divides cp; 0 = 1 */
    int ep_hosts;   /* hosts that ep is spread over, etp inside them; divides ep; 0 = 1 */
    int zero_group; /* ranks with the same dense weights in a group of ZeRO; 0: there are none */
    bool sp;
    bool two_replicas; /* each stage has two, on mirrored pp ranks; pp is even */
    bool experts;      /* false: the groups of experts are not used */
    bool owners;       /* the optimizer deals whole matrices to the ranks of a stage */
    int embd[2];       /* the pp ranks in embd besides the first, ascending; 0 ends the list; none given: the last */
} GridShape;

typedef enum {
#define COMM(kind, field, name, axes, grid, members, used) GROUP_##kind,
#define GROUP(kind, name, axes, grid, members, used) GROUP_##kind,
#include "comm/groups.def"
    GROUP_KINDS
} GroupKind;

/* The first so many kinds are communicators of a World. */
enum {
    WORLD_COMMS = 0
#define COMM(kind, field, name, axes, grid, members, used) +1
#define GROUP(kind, name, axes, grid, members, used)
#include "comm/groups.def"
};

const char *group_name(GroupKind kind); /* "tp", "dp-cp", ... */

/* Is it of ranks with the same weights, along dp, perhaps with other axes of copies beside it? */
bool group_of_copies(GroupKind kind);

/* The members of a group that send each other messages, or rows of experts. In collectives all take part. */
typedef enum {
    MESSAGES_NONE,
    MESSAGES_NEIGHBOURS /* r and r + 1, the last and the first */,
    MESSAGES_ALL_PAIRS
} GroupMessages;

/* sums_by_message: tensor-parallel ranks add up rows that they send each other (layer/sums.c). */
GroupMessages group_messages(GridShape s, GroupKind kind, bool sums_by_message);

/* Does the shape divide the world, for dense layers and for experts? Without pp last, pipelines need edp = dp. */
bool grid_fits(GridShape s);

/* The rest is for shapes that fit. */
int grid_dp(GridShape s);
int grid_edp(GridShape s);
int group_size(GridShape s, GroupKind kind);
int group_count(GridShape s, GroupKind kind);
void group_members(GridShape s, GroupKind kind, int index, int *members); /* [group_size] world ranks, ascending */

/* The index of the group that a rank is in; -1: it is in none (only some ranks are in embd and pos-embd). */
int group_of(GridShape s, GroupKind kind, int rank);
/* The rank's index among the members of its group; -1: it is in none. */
int group_rank(GridShape s, GroupKind kind, int rank);

#endif
