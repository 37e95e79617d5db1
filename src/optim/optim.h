/*
 * The end of a step, when gradients are summed over ranks (ddp.h): their norm, clipping, AdamW on this rank's slice of
 * the weights; and the learning-rate schedules. Sees flat buffers and flags, no layers.
 */
#ifndef MEGATRAIN_OPTIM_OPTIM_H
#define MEGATRAIN_OPTIM_OPTIM_H

#include "param/param.h"

typedef struct {
    float beta1, beta2, eps, weight_decay;
} AdamWSpec;

enum { OPTIM_STORES = 2 };

typedef struct {
    ParamStore *store[OPTIM_STORES]; /* all that this rank has */
    int stores;
    const GradStats *stats;
    Stream *stream;
    World *world;
    StepValues *step; /* device memory */
    Tensor sums;      /* [3] i64: loss, counted tokens, non-finite flag */
    AdamWSpec adamw;
    float bias_rate;   /* of experts' biases (device/ops.def, expert_bias); 0: they stay */
    int headroom_bits; /* Canon.headroom_bits */
} Optim;

/* Loss, counted tokens and non-finite flag over dp, cp and the stages, of which the last one's have them. */
Err optim_sum_loss(Optim *o);
/* Norm over all parameters once each, clip factor, skip and overflow flags, next shifts: into *step. */
Err optim_norm(Optim *o);
/* The same for this rank's stages alone, with `sums` instead of the loss's: for updates while other stages run. */
Err optim_norm_local(Optim *o, Tensor sums);
/* AdamW on this rank's slice of every parameter of a store (decay by its flag), unless step->skip; experts' biases by
 * their load. */
Err optim_update(Optim *o, ParamStore *store);

typedef enum { LR_CONSTANT, LR_LINEAR, LR_COSINE, LR_WSD, LR_INVERSE_SQRT } LrShape;

typedef struct {
    LrShape shape;
    double lr, min_lr;
    int64_t warmup, decay_steps; /* steps */
    int64_t wsd_decay;           /* WSD: length of the final decay, steps */
} LrSchedule;

/* Learning rate of update number `step` (1 = first). Source: Megatron's scheduler, in steps. */
double lr_at(const LrSchedule *s, int64_t step);

#endif
