/*
 * The process grid: which rank sits where, and the communicators of one rank (the COMM lines of groups.def; groups.h
 * says what each is for). Without cp, dp and dp-cp are the same ranks, so only one of the two is opened: dp without cp,
 * dp-cp with it. The other is a group of one.
 */
#ifndef MEGATRAIN_COMM_GRID_H
#define MEGATRAIN_COMM_GRID_H

#include "comm/comm.h"
#include "comm/groups.h"

typedef struct {
    int tp, dp;
    int pp;       /* pipeline ranks; 0 = 1 */
    int cp;       /* ranks that share each sequence; 0 = 1 */
    int cp_heads; /* how many neighbours along cp exchange heads; the rest of cp is a ring; divides cp; 0 = 1 */
    GridOrder order;
    bool sp;
    int kv;             /* ranks that share a kv head; divides tp; 0 = 1 */
    bool bidirectional; /* two replicas of each stage, on pp ranks r and pp-1-r; pp is even */
    int embd[2];        /* pp ranks that read the embedding's table besides the first; as groups.h */
    int ep;             /* ranks that hold the experts together; 0: the model has none */
    int etp;            /* ranks that share each expert; 0 = 1 */
    int ep_hosts;   /* hosts that rows cross between by groups of their own, ep-host and ep-rail; divides ep; 0 = 1 */
    int zero_group; /* as groups.h */
    bool owners;    /* as groups.h */
} Grid;

typedef struct {
    int tp, cp, dp, pp;
} GridCoords;

typedef struct {
    Grid grid; /* pp, cp and kv are at least 1 in it */
    int rank, size;
    int tp_rank, cp_rank, dp_rank, pp_rank;
    union {                     /* a rank that is in no group of a kind has a group of one */
        Comm comm[WORLD_COMMS]; /* the index is a GroupKind */
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
/*
 * The hosts that each group of ep x etp ranks is spread over, of which each has equally many neighbours of it and whole
 * experts: a value for ep_hosts. 0: that is not so. host_of: the same for ranks of one host, different for others.
 */
int grid_ep_hosts(Grid g, int64_t (*host_of)(const void *user, int rank), const void *user);
const char *grid_order_text(Grid g); /* "tp, dp, pp": how ranks are numbered; cp is left out where it is 1 */
GridShape grid_shape(Grid g);
GridCoords grid_coords(Grid g, int rank);

/* How many communicators of several ranks a World has on one device at most: all but the host's. */
int world_groups(Grid g);
/* How many of its communicators connect rank 0 with another rank of its host, each such pair counted, by messages
 * (group_messages); hosts have so many ranks each. */
int world_pairs(Grid g, bool sums_by_message, int host_ranks);

Err world_open(World *w, Grid g, int rank, CommOpener opener); /* collective */
Err world_open_self(World *w);
Err world_open_null(World *w, Grid g, int rank);
void world_close(World *w);

/* The communicator of the ranks with the same dense weights, which see other samples or other parts of them: dp-cp, or
 * dp without cp. */
Comm *world_copies(World *w);

/* The first of the ranks that share the communicator of this kind with this rank. */
int world_first_member(const World *w, GroupKind kind);

#endif
