/*
 * What a run has otherwise than the checkpoint that it goes on from, because --override allowed it: told in the log
 * (overrides_say), in metrics.jsonl (a line of the first step that it applies to) and in the manifests of all later
 * checkpoints, a line each, which add up over several changes:
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
    int64_t step;     /* the first one that they apply to */
    const char *text; /* for manifests, with those of earlier starts; NULL: none */
} Overrides;

/* Parts of the training data's identity (data_id.h) that `now` lets differ. */
unsigned overrides_data(const Config *was, const Config *now);

/*
 * Texts in `setup`. `data`: parts of the training data's identity that differ. ERR_CONFIG: a key that does not differ
 * and was no override of the checkpoint's run either; after a restart the same command has those. ERR_CKPT: the steps
 * done had other batches than train.global_batch says now.
 */
Err overrides_find(Overrides *o, const Config *was, const Config *now, const CkptMeta *meta, unsigned data,
                   SetupArena *setup);

/* ERR_CONFIG if there are any: the run goes on from no checkpoint. */
Err overrides_none(const Config *now);

void overrides_say(const Overrides *o);

#endif
