/*
 * The processes of a run: how they meet, who watches over them, and how they end together (docs/ranks.md).
 *
 *   store      every rank finds the others, and learns that all run the same program with the same configuration
 *   watch      from then on a dead, frozen or hung rank is named to all within its threshold
 *   groups     connections between all ranks; the communicators of the grid share them
 *   GPUs       each rank's, and NCCL between them or a way through the host (train/gpus.h)
 *
 * A run of one process has none of this, only groups of one.
 *
 * Ending: one rank prints the run's error, and all leave with the same exit code: who failed first, or of a rank
 * that cannot speak (killed, frozen, hung) the lowest rank that is left (train/speaker.h). Before all ranks have
 * met, rank 0.
 */
#ifndef MEGATRAIN_TRAIN_RANKS_H
#define MEGATRAIN_TRAIN_RANKS_H

#include "comm/gloo.h"
#include "comm/grid.h"
#include "boot/watch.h"
#include "train/gpus.h"

typedef struct {
    Boot boot;
    int local_rank, local_size; /* among the ranks of this host */
    int cpu_sharers;            /* of them, this one included, those that may use the same processors */
    int hosts;
    double host_free_bytes; /* of this host, before any of its ranks took the memory that it plans */
    Store *store;
    Watch *watch;
    GlooWorld *gloo;
    NcclWorld *nccl; /* NULL: not needed */
    bool cuda;       /* tensors lie in the memory of GPUs */
    RankGpu gpu;     /* with cuda */
    NcclCtas tp_ctas, dp_ctas;
    bool sums_by_message; /* RanksOptions */
    World world;
    bool world_open;
    Comm save;          /* all ranks, for what writes checkpoints beside the steps; open with `saver` */
    const char *folder; /* RanksOptions */
    double timeout_s;
    double ready_s; /* that meeting and opening all groups took */
} Ranks;

typedef struct {
    Grid grid; /* of boot.size ranks */
    double timeout_s, freeze_s, stall_s;
    const char
        *folder; /* that all ranks see, for who speaks and, where the launcher gives none, the secret */
    const volatile sig_atomic_t *stop; /* not 0: stop waiting for ranks that have not come */
    const char *facts; /* lines "what: value" that must be the same on all ranks; NULL for one */
    int delay_ms;      /* every communication is held back that long */
    bool check_calls;  /* every collective call is compared with the peers' */
    bool cuda;         /* tensors lie in the memory of GPUs */
    NcclCtas tp_ctas, dp_ctas;
    bool sums_by_message; /* of tensor-parallel ranks: the values have 16 bits (layer/sums.c) */
    bool saver;           /* checkpoints are written by a thread */
} RanksOptions;

/*
 * Collective; `r` must stay where it is. ERR_RENDEZVOUS, ERR_CONFIG (a rank has another program or configuration),
 * ERR_PEER.
 */
Err ranks_open(Ranks *r, const Boot *boot, const RanksOptions *o);

/*
 * The run is over. A failure of communication first waits for the verdict, and becomes it; a verdict that was passed
 * meanwhile ends the process here. After a failure nobody waits for peers any more: all their calls end. Returns the
 * outcome to close with.
 */
Err ranks_end(Ranks *r, Err outcome);
/* Says goodbye with the outcome of the run, when nothing uses a communicator any more. */
Err ranks_close(Ranks *r, Err outcome);

#endif
