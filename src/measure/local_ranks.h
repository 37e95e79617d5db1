/*
 * Some processes of this machine that do the same at the same time, as the ranks of a run: what calibration times ops
 * and collectives in. They share memory that is made before them. The program has no threads yet (fork).
 */
#ifndef MEGATRAIN_MEASURE_LOCAL_RANKS_H
#define MEGATRAIN_MEASURE_LOCAL_RANKS_H

#include "comm/gloo.h"

enum { LOCAL_RANKS_MOST = 64 };

typedef struct LocalRanks LocalRanks;

typedef struct {
    int rank, size;
    LocalRanks *all;
} LocalRank;

/* Zero-filled memory that processes made later share. ERR_MEMORY. */
Err local_shared(int64_t bytes, void **out);
void local_unshare(void *p, int64_t bytes);

/* Runs body in `size` new processes and waits for them; `user` is of local_shared, or only read. The first failure is
 * this one's, with its message; the others are ended. ERR_INTERNAL: a process died. */
Err local_ranks_run(int size, Err (*body)(LocalRank *r, void *user), void *user);

/* Inside body: returns when all ranks have come. ERR_PEER after a minute. */
Err local_ranks_meet(LocalRank *r);
/* Inside body: connects the ranks over loopback. The caller closes the world. */
Err local_ranks_connect(LocalRank *r, GlooWorld **out);

#endif
