/*
 * What a run has otherwise than the checkpoint that it goes on from, because --override allowed it. The log tells it
 * (overrides_say), metrics.jsonl (in a line for the first step that it applies to), and the manifests of all later
 * checkpoints. There it is a line for each change, and lines of several starts add up:
 *
 *   from step 301 on: optim.lr was '0.003' and is '0.001'
 */
#ifndef MEGATRAIN_TRAIN_OVERRIDES_H
#define MEGATRAIN_TRAIN_OVERRIDES_H

#include "config/config.h"
#include "ckpt/ckpt.h"

typedef struct {
    ConfigId key;
    const char *was, *is;
} Override;

typedef struct {
    Override item[CFG_COUNT];
    int count;
    int64_t step;     /* the first step that they apply to */
    const char *text; /* text for manifests, with the changes of earlier starts; NULL: none */
} Overrides;

/* Parts of the training data's identity (data_id.h) that `now` lets differ. */
unsigned overrides_data(const Config *was, const Config *now);

/*
 * Takes texts from `setup`. `data`: which parts of the training data's identity differ. ERR_CONFIG: a key was allowed
 * to differ, does not, and was no override of the checkpoint's run either (after a restart, the same command has
 * those). ERR_CKPT: the steps that are done had other batches than train.global_batch says now.
 */
Err overrides_find(Overrides *o, const Config *was, const Config *now, const CkptMeta *meta, unsigned data,
                   SetupArena *setup);

/* ERR_CONFIG: there are overrides, but the run goes on from no checkpoint. */
Err overrides_none(const Config *now);

void overrides_say(const Overrides *o);

#endif
