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
 */
#ifndef MEGATRAIN_COMM_GROUPS_H
#define MEGATRAIN_COMM_GROUPS_H

#include <stdint.h>

typedef enum { ORDER_DP_PP, ORDER_PP_DP } GridOrder;

typedef struct {
    int world, tp, cp, pp, ep, etp;
    GridOrder order;
    int kv; /* divides tp; 0 = 1 */
} GridShape;

typedef enum {
    GROUP_TP,
    GROUP_KV, /* a kv head's columns and query heads */
    GROUP_CP,
    GROUP_DP,
    GROUP_PP,
    GROUP_DP_CP, /* gradients of dense parameters, ZeRO-1 */
    GROUP_TP_PP, /* a whole model: norm of the gradient */
    GROUP_TP_CP,
    GROUP_TP_DP,
    GROUP_TP_DP_CP,
    GROUP_EMBD,     /* first and last stage: a tied table's gradient */
    GROUP_POS_EMBD, /* first stage: positions */
    GROUP_EP,
    GROUP_EXPERT_TP,
    GROUP_EXPERT_DP, /* gradients of experts */
    GROUP_TP_EP,
    GROUP_TP_EP_PP, /* a whole model's experts */
    GROUP_KINDS
} GroupKind;

const char *group_name(GroupKind kind); /* "tp", "dp-cp", ... */

/* Does the shape divide the world, for dense layers and for experts? Without pp last, pipelines need edp = dp. */
int grid_fits(GridShape s);

/* The rest is for shapes that fit. */
int grid_dp(GridShape s);
int grid_edp(GridShape s);
int group_size(GridShape s, GroupKind kind);
int group_count(GridShape s, GroupKind kind);
void group_members(GridShape s, GroupKind kind, int index, int *members); /* [group_size] world ranks */

/* The index of the group that a rank is in; -1: in none (embd and pos_embd have some of the ranks only). */
int group_of(GridShape s, GroupKind kind, int rank);

#endif
