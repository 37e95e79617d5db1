/*
 * Muon: the momentum of a matrix is orthogonalized before it is taken from the weights.
 *
 *   m <- beta m + (1 - beta) g            g clipped, m elementwise in this rank's ZeRO shard, as AdamW's m
 *   u  = beta m + (1 - beta) g, or m      Nesterov's, or not
 *   X  = u / max(|u|, 1e-7)               Frobenius norm
 *   X <- a X + (b A + c A^2) X, A = X X^T     Newton-Schulz: so many steps, coefficients by the step
 *   W <- W - lr (decay W + scale X)
 *
 * u is a matrix of the *checkpoint* (param/shard.h), whatever ranks have of it: q, k and v, gate and up apart, each
 * expert alone; with MUON_SPLIT_HEAD each head of them, and of latent attention's q, kv_b and gate. Of Gated
 * DeltaNet q, k, v and z are apart in the same way. One rank *owns* it:
 * the ranks that share a matrix send it their pieces of u, each number from one rank, it does the products, and sends
 * everybody the pieces of X that lie in his ZeRO shard. No sum is cut, so the bits are those of one rank in every
 * layout.
 *
 *   ranks' shards  --u-->  owner: X  --X-->  ranks' shards
 *
 * Matrices are dealt to the ranks that have a part of them, the longest first, by max(r, c) min(r, c)^2, each to the
 * rank with the least to do. All ranks deal alike, without talking. They proceed in rounds: in each a rank owns one
 * matrix at most, so what lies in scratch is bounded; all take as much memory as the one that needs the most, so that
 * ranks of a stage are alike in it. If rows > columns the matrix is transposed on its way: A is on the shorter side.
 * Sources: Jordan et al. 2024; Liu et al. 2025 (Moonlight).
 */
#ifndef MEGATRAIN_OPTIM_MUON_H
#define MEGATRAIN_OPTIM_MUON_H

#include "optim/optimizer.h"
#include "param/shard.h"

/* A matrix of a stage. */
typedef struct {
    int id;  /* its parameter in the registry */
    Box box; /* its part of the parameter, in plain order */
    int owner, round;
} MuonMatrix;

/* A part of the table of boxes. */
typedef struct {
    int64_t first, count, chunks;
} BoxRange;

/* Elements that go to and come from a member: where in the buffers of a round, and how many. */
typedef struct {
    int64_t send_at, send, take_at, take;
} MuonParcel;

enum { MUON_THERE, MUON_BACK, MUON_WAYS };

typedef struct {
    int own;                       /* the matrix that this rank owns in it; -1: none */
    BoxRange send, mine, place;    /* there: what goes to others; what is its owner's already; what others sent it */
    BoxRange give, apply;          /* back: to others; from others */
    MuonParcel *parcel[MUON_WAYS]; /* [members] */
    int64_t send_count[MUON_WAYS], take_count[MUON_WAYS]; /* numbers of all parcels */
    int64_t scratch;                                      /* bytes that a member needs for it at most */
} MuonRound;

/* A rank's work for the matrices of one store. */
typedef struct {
    ParamStore *store;
    Comm *comm;
    const MuonSpec *spec;
    ParamPlace *place; /* [members] */
    MuonMatrix *matrix;
    int count;
    double *load; /* [members] the work that each owns */
    MuonRound *round;
    int rounds;
    Tensor boxes; /* [, 9] FlatBox */
    ShardBox *held, *piece;
    int capacity; /* room of these two */
} Muon;

/* Everything that follows from the layout; the table of boxes lies in `state`. The store must have gradients. */
Err muon_open(Muon *u, ParamStore *store, World *world, const MuonSpec *spec, Stream *stream, Arena *state);

/* An update of the store's matrices, unless step->skip. All ranks of world->owners call, for the same stage. */
Err muon_update(Muon *u, Stream *s, const StepValues *step, float decay, Arena *scratch);

/* x [r, c], r <= c, in place: `steps` steps of Newton-Schulz. */
Err muon_newton_schulz(Stream *s, MuonSet set, int steps, Tensor x, Arena *scratch);

/* Operations of the matrices that a member owns, in Newton-Schulz; of all, divided by the members. */
double muon_flop(const Muon *u, int member);
double muon_mean_flop(const Muon *u);
/* The most work of a rank over the mean. 1 if there is none. */
double muon_imbalance(const Muon *u);

#endif
