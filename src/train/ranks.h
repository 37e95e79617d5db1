/*
 * The processes of a run: how they meet, who watches over them, and how they end together (docs/ranks.md).
 *
 *   store      every rank finds the others, and learns that all run the same program with the same configuration
 *   watch      from then on a dead, frozen or hung rank is named to all within its threshold
 *   groups     connections between all ranks; the communicators of the grid share them
 *   GPUs       each rank takes one, with NCCL between them or a way through the host (train/gpus.h)
 *
 * A run of one process has none of this, only groups of one.
 *
 * Ending: one rank prints the run's error, and all leave with the same exit code. It is the rank that failed first, or
 * if that cannot speak (killed, frozen, hung) the lowest rank that is left (train/speaker.h). Before all ranks have
 * met, it is rank 0.
 */
#ifndef MEGATRAIN_TRAIN_RANKS_H
#define MEGATRAIN_TRAIN_RANKS_H

#include "comm/gloo.h"
#include "comm/grid.h"
#include "boot/watch.h"
#include "train/gpus.h"
#include "train/speaker.h"

typedef struct {
    Boot boot;
    int local_rank, local_size; /* this rank among those of this host, and how many these are */
    int cpu_sharers;            /* how many of these may use the same processors, this one included */
    int hosts;
    /* what this host had free before any of its ranks took the memory that it plans */
    double host_free_bytes;
    struct Place *places; /* of all ranks, until the groups are open; NULL: one rank */
    Store *store;
    Watch *watch;
    GlooWorld *gloo;
    NcclWorld *nccl; /* NULL: it is not needed */
    bool cuda;       /* tensors lie in the memory of GPUs */
    RankGpu gpu;     /* is set with cuda */
    NcclCtas tp_ctas, dp_ctas;
    bool sums_by_message; /* see RanksOptions */
    int64_t row_pieces;
    Grid grid;
    World world;
    bool met, placed; /* ranks_meet, ranks_place was called */
    bool world_open;
    Comm save; /* has all ranks, for the thread that writes checkpoints; open with `saver` */
    Speaker speaker;
    double timeout_s;
    double ready_s; /* how long meeting and opening all groups took */
} Ranks;

typedef struct {
    Grid grid; /* it has boot.size ranks */
    double timeout_s, freeze_s, stall_s;
    /* All ranks see this folder. There they agree on who speaks, and have the secret if the launcher gives none. */
    const char *folder;
    const volatile sig_atomic_t *stop; /* not 0: nobody waits any longer for ranks that have not come */
    int data_port;                     /* parallel.data_port */
    const char *facts;                 /* lines "what: value", the same on all ranks; NULL if there is one rank */
    int delay_ms;                      /* every communication is held back that long */
    bool check_calls;                  /* every collective call is compared with the peers' */
    bool cuda;                         /* tensors lie in the memory of GPUs */
    Carrier carrier;                   /* and reach other ranks by it */
    bool near;                         /* processors near each rank's GPU are looked for */
    NcclCtas tp_ctas, dp_ctas;
    bool sums_by_message; /* tensor-parallel ranks send messages (layer/sums.c, bands.c) */
    int64_t row_pieces;   /* pieces of rows that ranks send each other's experts (NcclUse) */
    bool any_order;       /* a repeat need not have the same bits: NcclOptions */
    bool saver;           /* checkpoints are written by a thread */
    bool by_hosts;        /* grid.ep_hosts is to be what the ranks' hosts are */
} RanksOptions;

/*
 * Collective; `r` must stay where it is. ERR_RENDEZVOUS, ERR_CONFIG (a rank has another program or configuration),
 * ERR_PEER.
 */
Err ranks_open(Ranks *r, const Boot *boot, const RanksOptions *o);

/*
 * The same in steps, for ranks that agree on their layout before they have one: of the options ranks_meet goes by
 * times, folder and `stop` alone. Between them rank 0 may tell the others a text, which then is in `text` on all, and
 * *value becomes the least of all ranks. ranks_place: local_rank to host_free_bytes and gpu are set from there on; it
 * goes by times, cuda, carrier and near.
 */
Err ranks_meet(Ranks *r, const Boot *boot, const RanksOptions *o);
Err ranks_place(Ranks *r, const RanksOptions *o);
Err ranks_tell(Ranks *r, const char *key, char *text, size_t size);
Err ranks_least(Ranks *r, const char *key, int64_t *value);
Err ranks_connect(Ranks *r, const RanksOptions *o);

/*
 * Collective: does every rank see the run's folder? Rank 0 leaves a file there for a moment, which the others look for.
 * ERR_STORAGE on a rank that does not find it.
 */
Err ranks_see_folder(Ranks *r, const char *folder);

/* Collective: store_agree among the ranks of a run. */
Err ranks_agree(Ranks *r, const Agreement *a);
Err ranks_agree_on_job(Ranks *r, const char *facts); /* facts: RanksOptions' */

/*
 * To be called when the run is over. After a failure of communication it first waits for the verdict, which replaces
 * the failure; a verdict that was passed meanwhile ends the process here. After a failure nobody waits for peers any
 * more: all their calls end. Returns the outcome to close with.
 */
Err ranks_end(Ranks *r, Err outcome);
/* Says goodbye with the outcome of the run. To be called when nothing uses a communicator any more. */
Err ranks_close(Ranks *r, Err outcome);

#endif
