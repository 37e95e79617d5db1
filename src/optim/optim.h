/*
 * The end of a step, when gradients are summed over ranks (ddp.h): their norm, clipping, and the update of this rank's
 * shard of the weights (optimizer.h), QK-clip; and the learning-rate schedules. This code sees flat buffers and flags,
 * no layers.
 */
#ifndef MEGATRAIN_OPTIM_OPTIM_H
#define MEGATRAIN_OPTIM_OPTIM_H

#include "optim/muon.h"

/* Largest score that attention may have before rows of queries and keys are scaled down; 0: any. The queries' share. */
typedef struct {
    float threshold, alpha;
} QkClip;

enum { OPTIM_STORES = 2 };

typedef struct {
    ParamStore *store[OPTIM_STORES]; /* all stores that this rank has */
    int stores;
    Muon *muon; /* [stores] NULL: no weight is Muon's */
    Arena *scratch;
    const GradStats *stats;
    Stream *stream;
    World *world;
    StepValues *step; /* in device memory */
    Tensor sums;      /* [3] i64: loss, counted tokens, non-finite flag */
    Tensor logit_max; /* [blocks of the model, heads] i64 (layer/layer.h, Ctx); absent: nobody asks */
    OptimizerKind kind;
    AdamWSpec adamw;
    float hidden_rate; /* factor of lr and eps of matrices of blocks (PARAM_HIDDEN) */
    QkClip qk_clip;
    float bias_rate;   /* how fast experts' biases change (device/ops.def, expert_bias); 0: they stay */
    int headroom_bits; /* Canon.headroom_bits */
} Optim;

/* Sums loss, counted tokens and the non-finite flag over dp, cp and the stages; only the last stage has them. */
Err optim_sum_loss(Optim *o);
/* Puts the norm over all parameters, each counted once, the clip factor and the flags for skip and overflow into *step;
 * and computes the next shifts. logit_max becomes that of all ranks. */
Err optim_norm(Optim *o);
/* Does the same for this rank's stages alone, with `sums` instead of the loss's sums: for updates while other stages
 * run. */
Err optim_norm_local(Optim *o, Tensor sums);
/* Unless step->skip: an update of this rank's ZeRO shard of every parameter of a store, each by its optimizer (decay by
 * its flag); experts' biases change by their load; then QK-clip. With Muon all ranks of world->owners call, for one
 * stage at a time. */
Err optim_update(Optim *o, ParamStore *store);

typedef struct {
    LrShape shape;
    double lr, min_lr;
    int64_t warmup, decay_steps; /* steps */
    int64_t wsd_decay;           /* steps of the final decay of WSD */
} LrSchedule;

/* Learning rate of update number `step` (1 = first). Source: Megatron's scheduler, in steps. */
double lr_at(const LrSchedule *s, int64_t step);

#endif
