/*
 * Who am I: rank, size and meeting point, from whatever started the processes.
 *
 *   RANK + WORLD_SIZE          torchrun, scripts/launch.sh, by hand
 *   OMPI_COMM_WORLD_*          mpirun (Open MPI)
 *   PMI_RANK + PMI_SIZE        mpiexec (hydra)
 *   SLURM_*                    srun: only inside a step (SLURM_STEP_ID)
 *   none of these              one process
 *
 * The first line that applies wins: the innermost launcher is the one to believe (mpirun inside salloc leaves
 * SLURM_PROCID=0 in every rank). An empty variable counts as not set. Docs: docs/ranks.md.
 */
#ifndef MEGATRAIN_BOOT_BOOT_H
#define MEGATRAIN_BOOT_BOOT_H

#include <signal.h>
#include <stdint.h>

#include "base/err.h"

enum { BOOT_PORTS = 16 }; /* the meeting point is one of so many ports, from Boot.port on */
enum { BOOT_SECRET_MIN = 16, BOOT_SECRET_BYTES = 256 };

typedef struct {
    const char *launcher; /* "torchrun", "environment", "mpirun", "mpiexec", "srun", "none" */
    int rank, size;
    int local_rank, local_size; /* rank and ranks on this node; -1: the launcher does not tell */
    char addr[256];             /* name or number of the host of rank 0 */
    int port;                   /* the first port to try */
    bool port_given;            /* the user or the launcher gave the port; else it is our default */
    int job_tasks;              /* tasks of the Slurm job in which this process is alone, no step of srun's; 0: none */
    int restart;                /* how often the launcher started the job anew */
    char job[256];              /* equal on the ranks of one start of a job, different for any other */
    char secret[BOOT_SECRET_BYTES];    /* MEGATRAIN_SECRET; "" if the launcher gave none (boot/secret.h) */
    int attempt;                       /* number of this worker of the rank, from 0: of run.restarts */
    struct Supervised *supervised;     /* what its supervisor shares with it (boot/supervised.h); NULL: there is none */
    const volatile sig_atomic_t *stop; /* not 0: waits for others end; NULL unless the caller sets it */
} Boot;

/* ERR_CONFIG: only half of a set of variables is there, a value is no number or out of range, a secret is too short or
 * too long, or nothing says where rank 0 is. */
Err boot_from_env(Boot *out);

/* Does the same with any source of variables: get(context, name) returns the value, NULL if there is none.
 * Values stay valid until boot_read returns. */
typedef const char *(*BootGet)(void *context, const char *name);
Err boot_read(Boot *out, BootGet get, void *context);

/* A 64-bit hash of b->job, for use in the name of a file. */
uint64_t boot_key(const Boot *b);

#endif
