/* Coordinates and communicators of one rank; see grid.h. */
#include "comm/grid.h"

#include <stdlib.h>
#include <string.h>

static Grid whole(Grid g)
{
    if (!g.pp) g.pp = 1;
    if (!g.cp) g.cp = 1;
    if (!g.kv) g.kv = 1;
    if (!g.etp) g.etp = 1;
    return g;
}

int grid_size(Grid g) { return g.tp * whole(g).cp * g.dp * whole(g).pp; }

/* The neighbours from rank `first` on that are on one host, of at most `most`. */
static int on_one_host(int first, int most, int64_t (*host_of)(const void *user, int rank), const void *user)
{
    int count = 1;
    while (count < most && host_of(user, first + count) == host_of(user, first)) count++;
    return count;
}

/* (a group is a run of ranks) */
int grid_ep_hosts(Grid g, int64_t (*host_of)(const void *user, int rank), const void *user)
{
    const int etp = whole(g).etp, group = g.ep * etp, each = on_one_host(0, group, host_of, user);
    if (group % each || (each < group && each % etp)) return 0;
    for (int first = 0; first < grid_size(g); first += each) {
        if (on_one_host(first, each, host_of, user) < each) return 0;
        for (int other = first - first % group; other < first; other += each)
            if (host_of(user, other) == host_of(user, first)) return 0;
    }
    return group / each;
}

const char *grid_order_text(Grid g)
{
    if (g.order == ORDER_PP_DP) return whole(g).cp > 1 ? "tp, cp, pp, dp" : "tp, pp, dp";
    return whole(g).cp > 1 ? "tp, cp, dp, pp" : "tp, dp, pp";
}

GridShape grid_shape(Grid g)
{
    g = whole(g);
    return (GridShape){ .world = grid_size(g),
                        .tp = g.tp,
                        .cp = g.cp,
                        .pp = g.pp,
                        .ep = g.ep ? g.ep : g.cp,
                        .etp = g.ep ? g.etp : g.tp, /* without experts the two grids are one */
                        .order = g.order,
                        .kv = g.kv,
                        .cp_heads = g.cp_heads,
                        .ep_hosts = g.ep ? g.ep_hosts : 0,
                        .zero_group = g.zero_group,
                        .sp = g.sp,
                        .two_replicas = g.bidirectional,
                        .experts = g.ep > 0,
                        .owners = g.owners,
                        .embd = { g.embd[0], g.embd[1] } };
}

GridCoords grid_coords(Grid g, int rank)
{
    const GridShape s = grid_shape(g);
    return (GridCoords){ .tp = group_rank(s, GROUP_TP, rank),
                         .cp = group_rank(s, GROUP_CP, rank),
                         .dp = group_rank(s, GROUP_DP, rank),
                         .pp = group_rank(s, GROUP_PP, rank) };
}

static void place(World *w, Grid g, int rank)
{
    const GridCoords at = grid_coords(g, rank);
    ASSERT(grid_fits(grid_shape(g)));
    memset(w, 0, sizeof *w);
    w->grid = whole(g);
    w->rank = rank;
    w->size = grid_size(g);
    w->tp_rank = at.tp;
    w->cp_rank = at.cp;
    w->dp_rank = at.dp;
    w->pp_rank = at.pp;
}

/* A group of dp is not opened where there is cp: dp-cp does its work. */
static bool is_opened(GridShape s, GroupKind kind)
{
    return kind == GROUP_DP ? s.cp == 1 : kind != GROUP_DP_CP || s.cp > 1;
}

int world_groups(Grid g)
{
    const GridShape s = grid_shape(g);
    int count = 0;
    for (int kind = 0; kind < WORLD_COMMS; kind++)
        count += kind != GROUP_HOST && is_opened(s, kind) && group_size(s, kind) > 1;
    return count;
}

int world_pairs(Grid g, bool sums_by_message, int host_ranks)
{
    const GridShape s = grid_shape(g);
    int count = 0;
    for (int kind = 0; kind < WORLD_COMMS; kind++) {
        if (!is_opened(s, kind) || group_messages(s, kind, sums_by_message) != MESSAGES_ALL_PAIRS) continue;
        for (int rank = 1; rank < host_ranks && rank < s.world; rank++)
            count += group_of(s, kind, rank) == group_of(s, kind, 0);
    }
    return count;
}

Comm *world_copies(World *w) { return w->grid.cp > 1 ? &w->dp_cp : &w->dp; }

Err world_open_self(World *w)
{
    place(w, (Grid){ .tp = 1, .dp = 1 }, 0);
    for (int kind = 0; kind < WORLD_COMMS; kind++) comm_open_self(&w->comm[kind], group_name(kind));
    return ERR_OK;
}

Err world_open_null(World *w, Grid g, int rank)
{
    const GridShape s = grid_shape(g);
    place(w, g, rank);
    for (int kind = 0; kind < WORLD_COMMS; kind++) {
        const int at = is_opened(s, kind) ? group_rank(s, kind, rank) : -1;
        comm_open_null(&w->comm[kind], group_name(kind), at < 0 ? 0 : at, at < 0 ? 1 : group_size(s, kind));
    }
    return ERR_OK;
}

Err world_open(World *w, Grid g, int rank, CommOpener o)
{
    const GridShape s = grid_shape(g);
    place(w, g, rank);
    int *members = calloc((size_t)w->size, sizeof *members);
    if (!members) return err_set(ERR_MEMORY, "no memory for groups of %d ranks", w->size);
    Err err = ERR_OK;
    for (int kind = 0; kind < WORLD_COMMS && !err; kind++) {
        const int size = group_size(s, kind), index = group_of(s, kind, rank);
        if (index >= 0) group_members(s, kind, index, members);
        if (size == 1 || !is_opened(s, kind)) comm_open_self(&w->comm[kind], group_name(kind));
        else err = o.open(o.user, &w->comm[kind], kind, members, index < 0 ? 0 : size);
    }
    free(members);
    if (!err) return ERR_OK;
    ErrKept why;
    err_keep(&why);
    world_close(w);
    return err_again(&why, err);
}

int world_first_member(const World *w, GroupKind kind)
{
    const GridShape s = grid_shape(w->grid);
    const int index = group_of(s, kind, w->rank);
    if (index < 0 || !is_opened(s, kind)) return w->rank;
    for (int first = 0; first < w->rank; first++)
        if (group_of(s, kind, first) == index) return first;
    return w->rank;
}

void world_close(World *w)
{
    for (int kind = WORLD_COMMS - 1; kind >= 0; kind--) comm_close(&w->comm[kind]);
}
