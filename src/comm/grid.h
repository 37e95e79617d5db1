/*
 * The process grid: which rank sits where, and the communicators of one rank (the COMM lines of groups.def; groups.h
 * says what each is for).
 */
#ifndef MEGATRAIN_COMM_GRID_H
#define MEGATRAIN_COMM_GRID_H

#include "comm/comm.h"
#include "comm/groups.h"

typedef struct {
    int tp, dp;
    int pp; /* pipeline ranks; 0 = 1 */
    GridOrder order;
    bool sp;
    int kv;             /* ranks that share a kv head; divides tp; 0 = 1 */
    bool bidirectional; /* two replicas of each stage, on pp ranks r and pp-1-r; pp is even */
    int ep;             /* ranks that hold the experts together; 0: the model has none */
    int etp;            /* ranks that share each expert; 0 = 1 */
} Grid;

typedef struct {
    int tp, dp, pp;
} GridCoords;

typedef struct {
    Grid grid; /* pp and kv at least 1 */
    int rank, size;
    int tp_rank, dp_rank, pp_rank;
    union {                     /* a rank that is in no group of a kind has a group of one */
        Comm comm[WORLD_COMMS]; /* by GroupKind */
        struct {
#define COMM(kind, field, name, axes, grid, members, used) Comm field;
#define GROUP(kind, name, axes, grid, members, used)
#include "comm/groups.def"
        };
    };
} World;

/*
 * How the communicator of a list of ranks, ascending, is opened. *All* ranks of the world call together for each
 * kind of more than one member, in the order of the kinds; a rank that is in no group of the kind has size 0 and
 * opens a group of one.
 */
typedef struct {
    void *user;
    Err (*open)(void *user, Comm *c, GroupKind kind, const int *members, int size);
} CommOpener;

int grid_size(Grid g);
GridShape grid_shape(Grid g);
GridCoords grid_coords(Grid g, int rank);

Err world_open(World *w, Grid g, int rank, CommOpener opener); /* collective */
Err world_open_self(World *w);
Err world_open_null(World *w, Grid g, int rank);
Err world_open_threads(World *w, CommHub *hub, Grid g, int rank); /* collective */
void world_close(World *w);

/* The first of the ranks that share the communicator of this kind with this rank. */
int world_first_member(const World *w, GroupKind kind);

#endif
