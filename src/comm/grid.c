/* Coordinates and communicators of one rank; see grid.h. */
#include "comm/grid.h"

#include <string.h>

int grid_size(Grid g) { return g.tp * g.dp; }

void grid_coords(Grid g, int rank, int *tp_rank, int *dp_rank)
{
    *tp_rank = rank % g.tp;
    *dp_rank = rank / g.tp;
}

static void place(World *w, Grid g, int rank)
{
    memset(w, 0, sizeof *w);
    w->grid = g;
    w->rank = rank;
    w->size = grid_size(g);
    grid_coords(g, rank, &w->tp_rank, &w->dp_rank);
}

Err world_open_self(World *w)
{
    place(w, (Grid){ 1, 1, false }, 0);
    comm_open_self(&w->tp, "tp");
    comm_open_self(&w->sp, "sp");
    comm_open_self(&w->dp, "dp");
    comm_open_self(&w->world, "world");
    return ERR_OK;
}

Err world_open_null(World *w, Grid g, int rank)
{
    place(w, g, rank);
    comm_open_null(&w->tp, "tp", w->tp_rank, g.tp);
    comm_open_null(&w->sp, "sp", g.sp ? w->tp_rank : 0, g.sp ? g.tp : 1);
    comm_open_null(&w->dp, "dp", w->dp_rank, g.dp);
    comm_open_null(&w->world, "world", rank, w->size);
    return ERR_OK;
}

Err world_open_threads(World *w, CommHub *hub, Grid g, int rank)
{
    int members[64];
    place(w, g, rank);
    ASSERT(w->size <= 64);
    for (int i = 0; i < g.tp; i++) members[i] = w->dp_rank * g.tp + i;
    TRY(comm_open_threads(hub, &w->tp, "tp", rank, members, g.tp));
    if (g.sp) TRY(comm_open_threads(hub, &w->sp, "sp", rank, members, g.tp));
    else comm_open_self(&w->sp, "sp");
    for (int i = 0; i < g.dp; i++) members[i] = i * g.tp + w->tp_rank;
    TRY(comm_open_threads(hub, &w->dp, "dp", rank, members, g.dp));
    for (int i = 0; i < w->size; i++) members[i] = i;
    return comm_open_threads(hub, &w->world, "world", rank, members, w->size);
}

void world_close(World *w)
{
    comm_close(&w->world);
    comm_close(&w->dp);
    comm_close(&w->sp);
    comm_close(&w->tp);
}
