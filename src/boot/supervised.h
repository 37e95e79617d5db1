/*
 * What a worker and the process that supervises it tell each other (train/supervisor.h), in memory that both see. It
 * outlives the worker: the next one of the rank reads there why it was started.
 */
#ifndef MEGATRAIN_BOOT_SUPERVISED_H
#define MEGATRAIN_BOOT_SUPERVISED_H

#include <stdbool.h>
#include <stdint.h>

#include "boot/boot.h"

enum { SUPERVISED_CAUSE_BYTES = 640 };

typedef struct Supervised {
    /* The worker writes these, each from one place. */
    volatile uint64_t beats;            /* signs of life of the thread that watches; 0: it has none */
    volatile uint64_t signals;          /* signals that it has heard */
    volatile int64_t step;              /* the last step done; -1: none */
    volatile int64_t saved;             /* step of the newest checkpoint that it wrote or went on from; 0: none */
    volatile bool judged;               /* it heard a verdict, and ends its process */
    volatile bool outdated;             /* its start was over before all had met: another rank was lost */
    volatile bool ended;                /* it comes to its end in order, so that its exit status says what happened */
    volatile bool done;                 /* all workers have done all that the run is for */
    char cause[SUPERVISED_CAUSE_BYTES]; /* why it ends; "": it could not say */
    char secret[BOOT_SECRET_BYTES];     /* that it found in the run's folder; "": in none */
    /* The supervisor writes these before it starts the next one. */
    double begun_s;                      /* when the launcher started the rank, on clock_s */
    int attempt;                         /* number of the worker, from 0 */
    int64_t lost_step;                   /* `step` of the one before */
    double lost_s;                       /* when that one ended, on clock_s */
    char before[SUPERVISED_CAUSE_BYTES]; /* its cause */
} Supervised;

/* NULL for `s`: nobody supervises this process, and nothing happens. */
void supervised_cause(Supervised *s, const char *text);

/*
 * A supervisor makes this memory, and a copy of the configuration's file. Workers, as new programs, find both by an
 * environment variable, which names two descriptors that they inherit. ERR_MEMORY.
 */
Err supervised_make(const char *config, Supervised **out);
/* Is this process a worker? Then fills boot->supervised and boot->attempt, and *config, which the caller frees. */
Err supervised_find(Boot *boot, char **config);

#endif
