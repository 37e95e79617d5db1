/* Coordinates and communicators of one rank; see grid.h. */
#include "comm/grid.h"

#include <stdlib.h>
#include <string.h>

int grid_size(Grid g) { return g.tp * g.dp; }

void grid_coords(Grid g, int rank, int *tp_rank, int *dp_rank)
{
    *tp_rank = rank % g.tp;
    *dp_rank = rank / g.tp;
}

GridShape grid_shape(Grid g)
{
    return (GridShape){ .world = grid_size(g), .tp = g.tp, .cp = 1, .pp = 1, .ep = 1, .etp = 1, .kv = g.kv };
}

static void place(World *w, Grid g, int rank)
{
    memset(w, 0, sizeof *w);
    w->grid = g;
    w->rank = rank;
    w->size = grid_size(g);
    grid_coords(g, rank, &w->tp_rank, &w->dp_rank);
    if (!g.kv) w->grid.kv = 1;
    ASSERT(g.tp % w->grid.kv == 0);
}

Err world_open_self(World *w)
{
    place(w, (Grid){ .tp = 1, .dp = 1 }, 0);
    comm_open_self(&w->tp, "tp");
    comm_open_self(&w->sp, "sp");
    comm_open_self(&w->kv, "kv");
    comm_open_self(&w->dp, "dp");
    comm_open_self(&w->world, "world");
    comm_open_self(&w->host, "host");
    return ERR_OK;
}

Err world_open_null(World *w, Grid g, int rank)
{
    place(w, g, rank);
    comm_open_null(&w->tp, "tp", w->tp_rank, g.tp);
    comm_open_null(&w->sp, "sp", g.sp ? w->tp_rank : 0, g.sp ? g.tp : 1);
    comm_open_null(&w->kv, "kv", w->tp_rank % w->grid.kv, w->grid.kv);
    comm_open_null(&w->dp, "dp", w->dp_rank, g.dp);
    comm_open_null(&w->world, "world", rank, w->size);
    comm_open_null(&w->host, "host", rank, w->size);
    return ERR_OK;
}

Err world_open(World *w, Grid g, int rank, CommOpener o)
{
    place(w, g, rank);
    int *members = calloc((size_t)w->size, sizeof *members);
    if (!members) return err_set(ERR_MEMORY, "no memory for groups of %d ranks", w->size);
    const GridShape shape = grid_shape(g);
    group_members(shape, GROUP_TP, group_of(shape, GROUP_TP, rank), members);
    Err err = o.open(o.user, &w->tp, "tp", members, g.tp);
    if (!err && g.sp) err = o.open(o.user, &w->sp, "sp", members, g.tp);
    if (!g.sp) comm_open_self(&w->sp, "sp");
    if (w->grid.kv > 1) {
        group_members(shape, GROUP_KV, group_of(shape, GROUP_KV, rank), members);
        if (!err) err = o.open(o.user, &w->kv, "kv", members, w->grid.kv);
    } else comm_open_self(&w->kv, "kv");
    group_members(shape, GROUP_DP, group_of(shape, GROUP_DP, rank), members);
    if (!err) err = o.open(o.user, &w->dp, "dp", members, g.dp);
    for (int i = 0; i < w->size; i++) members[i] = i;
    if (!err) err = o.open(o.user, &w->world, "world", members, w->size);
    if (!err) err = o.open(o.user, &w->host, "host", members, w->size);
    free(members);
    return err;
}

typedef struct {
    CommHub *hub;
    int rank;
} ThreadRank;

static Err open_threads(void *user, Comm *c, const char *name, const int *members, int size)
{
    const ThreadRank *t = user;
    return comm_open_threads(t->hub, c, name, t->rank, members, size);
}

Err world_open_threads(World *w, CommHub *hub, Grid g, int rank)
{
    ThreadRank t = { hub, rank };
    return world_open(w, g, rank, (CommOpener){ &t, open_threads });
}

Comm *world_comm(World *w, int i)
{
    Comm *all[WORLD_COMMS] = { &w->tp, &w->sp, &w->kv, &w->dp, &w->world, &w->host };
    return all[i];
}

void world_close(World *w)
{
    comm_close(&w->host);
    comm_close(&w->world);
    comm_close(&w->dp);
    comm_close(&w->kv);
    comm_close(&w->sp);
    comm_close(&w->tp);
}
